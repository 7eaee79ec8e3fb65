"""A plan on a profile: composed costs against closed forms and conservation."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from pptune.cost_model import CostModel, Setting
from pptune.cost_model.step_constants import allreduce_s
from pptune.errors import PlanError, UsageError
from pptune.estimate import Estimate, Infeasible
from pptune.executors import Executor
from pptune.from_numbers import estimate_from_numbers
from pptune.model import ModelSpec
from pptune.plan import Plan, Schedule, make_plan
from pptune.profiles import (
    AllreducePoint,
    Link,
    MemoryModel,
    Overhead,
    Parallel,
    Profile,
    StepConstants,
)
from pptune.targets import parse_target
from tests.synthetic import synthetic_profile, uniform_link

IDEAL = Setting(target=None)


def plan(
    num_ranks: int,
    num_chunks: int,
    num_microbatches: int,
    *,
    layers: tuple[int, ...] | None = None,
    num_layers: int = 16,
    b: int = 1,
    schedule: Schedule | None = None,
    **more: object,
) -> Plan:
    num_stages = num_ranks * num_chunks
    return make_plan(
        schedule=schedule or ("1f1b" if num_chunks == 1 else "interleaved"),
        num_ranks=num_ranks,
        num_chunks=num_chunks,
        microbatch_size=b,
        num_microbatches=num_microbatches,
        layers_per_stage=layers or (num_layers // num_stages,) * num_stages,
        **more,  # type: ignore[arg-type]
    )


def estimate(profile: Profile, wanted: Plan, setting: Setting = IDEAL) -> Estimate:
    found = CostModel(profile, setting).estimate(wanted)
    assert isinstance(found, Estimate), found
    return found


# t_f = 1, t_b = 2 per rank, every hop costs c; checked with several independent simulators.
ORACLES = [
    (4, 8, 1, 0.0, 33.0), (4, 8, 2, 0.0, 28.5), (4, 8, 4, 0.0, 26.25),
    (4, 8, 1, 0.1, 34.6), (4, 8, 2, 0.1, 29.9), (4, 8, 4, 0.1, 29.25),
    (4, 8, 1, 0.3, 37.8), (4, 8, 2, 0.3, 32.7), (4, 8, 4, 0.3, 35.85),
    (8, 64, 4, 0.05, 200.35),
]  # fmt: skip


@pytest.mark.parametrize(("p", "m", "v", "c", "expected_s"), ORACLES)
def test_known_steps(p: int, m: int, v: int, c: float, expected_s: float) -> None:
    profile = synthetic_profile(num_layers=p * v, block=1 / v, links=[uniform_link(c)], num_ranks=p)
    found = estimate(profile, plan(p, v, m, layers=(1,) * (p * v)))
    assert found.step_time_s == pytest.approx(expected_s, rel=1e-9)
    bare = estimate_from_numbers(
        forward_s=1, backward_s=2, transfer_s=c, num_ranks=p, num_chunks=v, num_microbatches=m
    )
    assert bare.estimate.step_time_s == pytest.approx(expected_s, rel=1e-9)
    assert bare.estimate.assumptions == ()
    assert bare.estimate.source == "given"


def test_the_parts_of_a_step_sum_to_it_and_the_bubble_is_the_closed_form() -> None:
    profile = synthetic_profile(block=0.25, num_layers=16, num_ranks=4)
    found = estimate(profile, plan(4, 1, 8))
    assert found.bubble_ratio == pytest.approx(3 / (8 + 3))
    assert found.ideal_time_s == pytest.approx(8 * 3.0)
    parts = found.breakdown_s
    assert parts.compute == pytest.approx(24.0)
    total = sum(getattr(parts, name) for name in parts.__struct_fields__)
    assert total == pytest.approx(found.step_time_s)


def test_ends_are_added_to_the_first_and_last_stage() -> None:
    profile = synthetic_profile(block=0.5, embedding=0.25, head=0.75, num_layers=4, num_ranks=2)
    costs = CostModel(profile, IDEAL).costs(plan(2, 2, 4, num_layers=4))
    np.testing.assert_allclose(costs.forward_s, [0.75, 0.5, 0.5, 1.25])
    np.testing.assert_allclose(costs.backward_s, [1.5, 1.0, 1.0, 2.5])


def test_without_a_link_a_pipeline_has_no_estimate_and_one_rank_does() -> None:
    profile = synthetic_profile(links=())
    found = CostModel(profile, IDEAL).estimate(plan(2, 1, 4, num_layers=8))
    assert isinstance(found, Infeasible)
    assert found.rule == "link-not-measured"
    assert "--link intra:LATENCY,BANDWIDTH" in found.reason
    assert estimate(profile, plan(1, 1, 4, num_layers=8)).step_time_s == pytest.approx(8e-3 * 3 * 4)


@given(seed=st.integers(0, 10**6), executor=st.sampled_from(["ideal", "torch"]))
@settings(max_examples=25, deadline=None)
def test_doubling_every_time_doubles_the_step(seed: int, executor: str) -> None:
    draw = random.Random(seed)
    target = None if executor == "ideal" else parse_target("torch")
    numbers = [draw.random() for _ in range(8)]

    def step_s(scale: float) -> float:
        forward_s, head_s, latency_s, overhead_s, hop_s, fixed_s, chunk_s, rate = numbers
        profile = synthetic_profile(
            block=scale * forward_s,
            head=scale * head_s,
            num_layers=8,
            boundary_bytes=1,
            links=[uniform_link(scale * latency_s, rate / scale)],
            overheads={
                str(name): Overhead(
                    forward_s=scale * overhead_s,
                    backward_s=scale * overhead_s,
                    hop_s=scale * hop_s,
                    chunk_s=scale * chunk_s,
                )
                for name in Executor
            },
            step_constants=StepConstants(fixed_s=scale * fixed_s),
        )
        wanted = plan(2, draw.choice([1, 2, 4]), draw.choice([2, 6, 8]), num_layers=8)
        return estimate(profile, wanted, Setting(target=target)).step_time_s

    state = draw.getstate()
    once = step_s(1.0)
    draw.setstate(state)
    assert step_s(2.0) == pytest.approx(2 * once, rel=1e-12)


@given(seed=st.integers(0, 10**6))
@settings(max_examples=40, deadline=None)
def test_no_step_beats_its_bound(seed: int) -> None:
    draw = random.Random(seed)
    num_ranks, num_chunks = draw.choice([(1, 1), (2, 1), (3, 2), (4, 3), (2, 4)])
    m = num_ranks * draw.randint(1, 4)
    schedules: list[Schedule] = ["1f1b", "gpipe"] if num_chunks == 1 else ["interleaved"]
    profile = synthetic_profile(
        block=draw.random(),
        embedding=draw.random(),
        head=draw.random(),
        num_layers=num_ranks * num_chunks + 3,
        num_ranks=num_ranks,
        boundary_bytes=1,
        links=[
            uniform_link(
                draw.choice([0.0, draw.random()]),
                draw.choice([1e9, draw.random()]),
                send_occupied_s=draw.choice([0.0, draw.random()]),
                receive_occupied_s=draw.choice([0.0, draw.random()]),
            )
        ],
        overheads={
            str(name): Overhead(forward_s=draw.random(), backward_s=draw.random())
            for name in Executor
        },
        step_constants=StepConstants(fixed_s=draw.random()),
    )
    layers = (*(1 for _ in range(num_ranks * num_chunks - 1)), 4)
    for name in (None, "torch", "megatron"):
        model = CostModel(profile, Setting(target=None if name is None else parse_target(name)))
        for schedule in schedules:
            wanted = plan(num_ranks, num_chunks, m, layers=layers, schedule=schedule)
            step_s = model.evaluate(wanted).step_time_s
            bound = model.inputs(wanted).bound
            assert bound.step_s(m) <= step_s
            assert sum(bound.parts_s(m)) == pytest.approx(bound.step_s(m))


def test_the_bound_is_reached_by_equal_stages_and_free_messages() -> None:
    profile = synthetic_profile(block=0.25, num_layers=16, num_ranks=4)
    model = CostModel(profile, IDEAL)
    for v in (1, 2, 4):
        wanted = plan(4, v, 8)
        expected_s = 8 * 3.0 + 3 * 3.0 / v
        assert model.inputs(wanted).bound.step_s(8) == pytest.approx(expected_s)
        assert model.evaluate(wanted).step_time_s == pytest.approx(expected_s)


def test_a_measured_pair_counts_at_the_profiles_number_of_ranks_and_the_median_elsewhere() -> None:
    links = [
        Link(scope="intra", source_rank=a, target_rank=b, latency_s=seconds, bytes_per_s=1.0)
        for a, b, seconds in ((0, 1, 1.0), (1, 0, 2.0), (1, 2, 3.0), (2, 1, 4.0), (2, 0, 9.0),
                              (0, 2, 5.0))
    ]  # fmt: skip
    profile = synthetic_profile(num_layers=12, links=links, num_ranks=3)
    model = CostModel(profile, IDEAL)
    own = model.costs(plan(3, 2, 3, num_layers=12))
    # Stages 0..5 on ranks 0 1 2 0 1 2: the wrap-around takes the link from rank 2 to rank 0.
    np.testing.assert_allclose(own.forward_hops.latency_s, [1, 3, 9, 1, 3])
    np.testing.assert_allclose(own.backward_hops.latency_s, [2, 4, 5, 2, 4])
    other = model.costs(plan(2, 2, 2, num_layers=12))
    np.testing.assert_allclose(other.forward_hops.latency_s, [3.5, 3.5, 3.5])


def test_hops_cross_nodes_where_the_ranks_nodes_differ_the_wrap_around_included() -> None:
    links = [uniform_link(1.0), uniform_link(10.0, scope="inter")]
    profile = synthetic_profile(num_layers=8, links=links, ranks_per_node=2)
    hops = CostModel(profile, IDEAL).costs(plan(4, 2, 4, num_layers=8)).forward_hops
    np.testing.assert_allclose(hops.latency_s, [1, 10, 1, 10, 1, 10, 1])
    one_node = CostModel(profile, Setting(target=None, ranks_per_node=8))
    hops = one_node.costs(plan(4, 2, 4, num_layers=8)).forward_hops
    np.testing.assert_allclose(hops.latency_s, [1] * 7)


def test_what_more_ranks_than_measured_take_is_said() -> None:
    links = [uniform_link(1.0), replace(uniform_link(10.0, scope="inter"), source="given")]
    profile = synthetic_profile(num_layers=8, links=links, ranks_per_node=2)
    profile = replace(profile, num_ranks=2)
    more = plan(4, 2, 4, num_layers=8)
    assert estimate(profile, more, IDEAL).assumptions[:2] == (
        "hops 0 -> 1, 2 -> 3 stay within a node: each takes the median "
        f"{links[0].source} intra link",
        "hops 1 -> 2 cross nodes: each takes the median given inter link",
    )
    as_measured = estimate(profile, plan(2, 2, 4, num_layers=8), IDEAL)
    assert not any("hops" in text for text in as_measured.assumptions)


def test_a_given_link_replaces_the_measured_ones_of_its_scope() -> None:
    profile = synthetic_profile(num_layers=8, links=[uniform_link(1.0)], ranks_per_node=1)
    given_link = replace(uniform_link(7.0, scope="inter"), source="given")
    without = CostModel(profile, IDEAL).estimate(plan(2, 1, 2, num_layers=8))
    assert isinstance(without, Infeasible)
    assert "--link inter:" in without.reason
    found = estimate(
        profile, plan(2, 1, 2, num_layers=8), Setting(target=None, links=(given_link,))
    )
    assert found.source == "given"


def test_message_sizes_come_from_the_profile_or_from_the_model() -> None:
    model_spec = ModelSpec(name="m", family="gpt", num_layers=8, seq_len=128, hidden_size=64)
    profile = synthetic_profile(
        num_layers=8, boundary_bytes=None, links=[uniform_link(0.0, 1.0)], model=model_spec
    )
    wire_s = CostModel(profile, IDEAL).costs(plan(2, 1, 2, num_layers=8, b=2)).forward_hops.wire_s
    np.testing.assert_allclose(wire_s, [2 * 128 * 64 * 4])
    sharded = replace(profile, parallel=Parallel(tensor=4), dtype="bfloat16")
    wire_s = CostModel(sharded, IDEAL).costs(plan(2, 1, 2, num_layers=8, b=2)).forward_hops.wire_s
    np.testing.assert_allclose(wire_s, [2 * 128 * 64 * 2 / 4])
    unknown = replace(profile, model=replace(model_spec, hidden_size=None))
    found = CostModel(unknown, IDEAL).estimate(plan(2, 1, 2, num_layers=8))
    assert isinstance(found, Infeasible)
    assert found.rule == "message-size-unknown"


def test_times_count_only_for_the_parallelism_they_were_measured_at() -> None:
    profile = synthetic_profile(parallel=Parallel(tensor=2))
    with pytest.raises(UsageError, match="tensor-parallel 2, not 4"):
        CostModel(profile, Setting(target=None, tensor_parallel=4))
    CostModel(profile, Setting(target=None, tensor_parallel=2))
    with pytest.raises(UsageError, match="context-parallel 1, not 2"):
        CostModel(profile, Setting(target=None, context_parallel=2))


def test_overheads_are_paid_per_action_per_hop_per_chunk_and_per_step() -> None:
    overhead = Overhead(forward_s=0.1, backward_s=0.2, step_s=3.0, hop_s=0.05, chunk_s=1.0)
    profile = synthetic_profile(
        num_layers=8, block=1.0, overheads={"torch-runtime": overhead}, links=[uniform_link(0.25)]
    )
    setting = Setting(target=parse_target("torch"))
    found = estimate(profile, plan(2, 2, 8, num_layers=8), setting)
    assert found.breakdown_s.overhead == pytest.approx(8 * 2 * (0.1 + 0.2))
    assert found.breakdown_s.step_constant == pytest.approx(3.0 + 2 * 1.0)
    costs = CostModel(profile, setting).costs(plan(2, 2, 8, num_layers=8))
    np.testing.assert_allclose(costs.forward_hops.latency_s, 0.3)


def test_an_overhead_that_was_not_measured_is_another_runtimes_or_nothing_and_says_so() -> None:
    measured = {"torch-runtime": Overhead(forward_s=0.5, backward_s=0.5)}
    profile = synthetic_profile(num_layers=8, overheads=measured, no_overhead=False)
    setting = Setting(target=parse_target("megatron"))
    found = estimate(profile, plan(2, 1, 8, num_layers=8), setting)
    assert found.breakdown_s.overhead == pytest.approx(8.0)
    assert any("taken from torch-runtime" in text for text in found.assumptions)
    bare = synthetic_profile(num_layers=8, no_overhead=False)
    found = estimate(bare, plan(2, 1, 8, num_layers=8), setting)
    assert found.breakdown_s.overhead == 0
    assert any("was not measured: counted as 0" in text for text in found.assumptions)


def test_interference_stretches_compute_while_messages_move() -> None:
    profile = synthetic_profile(
        num_layers=3, block=10.0, boundary_bytes=1, links=[uniform_link(0.0, 0.5)], num_ranks=3,
        interference_ratio=0.1,
    )  # fmt: skip
    costs = CostModel(profile, IDEAL).costs(plan(3, 1, 3, num_layers=3))
    # A message takes 2 s; the middle rank has one arriving and one leaving per action.
    np.testing.assert_allclose(costs.forward_s, [10.2, 10.4, 10.2])
    np.testing.assert_allclose(costs.backward_s, [20.2, 20.4, 20.2])


def test_step_constants_follow_the_ranks_own_parameters() -> None:
    profile = synthetic_profile(
        num_layers=4, block=1.0, num_ranks=2, parameter_bytes=100, end_parameter_bytes=50,
        step_constants=StepConstants(fixed_s=1.0, per_parameter_byte_s=0.01),
    )  # fmt: skip
    wanted = plan(2, 1, 4, layers=(3, 1))
    constants = CostModel(profile, IDEAL).inputs(wanted).constant_s
    np.testing.assert_allclose(constants, [1 + 3.5, 1 + 1.5])


def test_replicas_pay_an_allreduce_of_their_gradients() -> None:
    points = [
        AllreducePoint(num_bytes=100, num_ranks=2, seconds=1.0),
        AllreducePoint(num_bytes=300, num_ranks=2, seconds=2.0),
    ]
    assert allreduce_s(points, 200, 2) == (1.5, "interpolated")
    assert allreduce_s(points, 300, 2) == (2.0, "measured")
    assert allreduce_s(points, 500, 2) == (3.0, "extrapolated")
    assert allreduce_s(points, 10, 2) == (1.0, "interpolated")
    # The ring moves 2 (n - 1) / n of the bytes: 1.5 times as much for 4 ranks as for 2.
    assert allreduce_s(points, 300, 4) == (3.0, "extrapolated")
    profile = synthetic_profile(
        num_layers=4, parameter_bytes=100, end_parameter_bytes=0, allreduce=points,
        memory=MemoryModel(gradient_bytes_per_parameter_byte=0.5),
    )  # fmt: skip
    model = CostModel(profile, IDEAL)
    alone = model.inputs(plan(2, 1, 4, num_layers=4)).constant_s
    paired = model.inputs(plan(2, 1, 4, num_layers=4, data_parallel=2)).constant_s
    np.testing.assert_allclose(paired - alone, 1.0)
    unmeasured = estimate(synthetic_profile(num_layers=4), plan(2, 1, 4, num_layers=4,
                                                                data_parallel=2))  # fmt: skip
    assert any("all-reduce was not measured" in text for text in unmeasured.assumptions)


def test_tied_embeddings_exchange_their_gradient_once_per_step() -> None:
    # Megatron-LM keeps one copy on the first and one on the last stage and all-reduces them.
    profile = synthetic_profile(
        num_layers=8, num_ranks=4, end_parameter_bytes=100, links=[uniform_link(1.0, 50.0)]
    )
    tied = replace(profile, model=replace(profile.model, tie_word_embeddings=True))
    setting = Setting(target=parse_target("megatron"))
    wanted = plan(4, 1, 4, num_layers=8)
    once = CostModel(tied, setting).inputs(wanted).constant_s
    np.testing.assert_allclose(once, [3.0, 0.0, 0.0, 3.0])
    np.testing.assert_allclose(CostModel(profile, setting).inputs(wanted).constant_s, 0.0)


def test_a_large_vocabulary_weighs_as_much_as_one_or_two_blocks() -> None:
    # bigscience-workshop/Megatron-DeepSpeed 186: with 250k words the embedding is about one layer
    # of the 176B model (h = 14336) and two of the 104B one (h = 11264).
    for hidden, layers in ((14336, 1), (11264, 2)):
        spec = ModelSpec(
            name="m",
            family="gpt",
            num_layers=70,
            seq_len=2048,
            hidden_size=hidden,
            num_heads=hidden // 128,
            ffn_size=4 * hidden,
        )
        block, flops = spec.block_parameters(), spec.block_flops_per_sequence()
        assert block is not None
        assert round(250_880 * hidden / block) == layers
        # Time is another matter: the head's products cost that much, the embedding's none.
        assert flops is not None
        head_flops = 2.0 * 2048 * hidden * 250_880
        assert head_flops / flops == pytest.approx(2 * 250_880 / (24 * hidden + 4 * 2048), rel=1e-6)


def test_full_recompute_plays_the_forward_again_unless_it_was_measured() -> None:
    profile = synthetic_profile(num_layers=4, block=1.0)
    full = plan(2, 1, 4, num_layers=4, recompute="full")
    found = CostModel(profile, IDEAL)
    np.testing.assert_allclose(found.costs(full).backward_s, [6.0, 6.0])
    assert any("recompute was not measured" in text for text in estimate(profile, full).assumptions)
    measured = synthetic_profile(num_layers=4, block=1.0, recomputed_block=(1.0, 2.5))
    np.testing.assert_allclose(CostModel(measured, IDEAL).costs(full).backward_s, [5.0, 5.0])
    assert not any("recompute" in text for text in estimate(measured, full).assumptions)


def test_recompute_costs_mfu_and_model_flops_stay_the_same() -> None:
    spec = ModelSpec(name="m", family="gpt", num_layers=4, seq_len=8, hidden_size=4, num_heads=2,
                     ffn_size=16, vocab_size=10)  # fmt: skip
    profile = synthetic_profile(num_layers=4, block=1.0, model=spec, peak_flops_per_s=1e6)
    plain = estimate(profile, plan(2, 1, 4, num_layers=4))
    full = estimate(profile, plan(2, 1, 4, num_layers=4, recompute="full"))
    flops = spec.flops_per_sequence()
    assert flops is not None
    assert plain.mfu == pytest.approx(4 * flops / (plain.step_time_s * 1e6 * 2))
    assert plain.mfu is not None
    assert full.mfu == pytest.approx(plain.mfu * plain.step_time_s / full.step_time_s)
    assert plain.tokens_per_s == pytest.approx(4 * 128 / plain.step_time_s)
    unknown = synthetic_profile(num_layers=4, model=spec)
    assert estimate(unknown, plan(2, 1, 4, num_layers=4)).mfu is None


def test_the_source_is_the_weakest_used() -> None:
    profile = synthetic_profile(num_layers=4, sizes=(1, 4))
    sources = [estimate(profile, plan(2, 1, 2, num_layers=4, b=b)).source for b in (1, 2, 8)]
    assert sources == ["measured", "interpolated", "extrapolated"]


def test_at_a_fixed_global_batch_the_bubble_grows_with_b() -> None:
    # xingchensong/verl_megatron_practice 9: a larger b at a fixed global batch lowers M.
    profile = synthetic_profile(num_layers=8, num_ranks=4)
    shares = [
        estimate(profile, plan(4, 1, 32 // b, num_layers=8, b=b)).bubble_ratio for b in (1, 2, 4, 8)
    ]
    assert shares == pytest.approx([3 / (32 // b + 3) for b in (1, 2, 4, 8)])


def test_the_slowest_stage_bounds_the_step() -> None:
    # ai-dynamo/aiconfigurator PR 1459: stages of 3.153, 3.150 x 6 and 3.901 ms give a balance of
    # 83.2 % and a speed-up of 6.65 over one device, not 8.
    profile = synthetic_profile(
        num_layers=8, block=(3.150, 0.0), embedding=(0.003, 0.0), head=(0.751, 0.0), num_ranks=8
    )
    m = 1000
    step_s = estimate(profile, plan(8, 1, m, num_layers=8)).step_time_s
    stages_s = [3.153, *[3.150] * 6, 3.901]
    assert step_s == pytest.approx(sum(stages_s) + (m - 1) * 3.901)
    assert sum(stages_s) / 8 / 3.901 == pytest.approx(0.832, abs=5e-4)
    assert m * sum(stages_s) / step_s == pytest.approx(6.65, rel=0.01)
    alone_s = estimate(profile, plan(1, 1, m, num_layers=8)).step_time_s
    assert alone_s == pytest.approx(m * sum(stages_s))


def test_torch_does_the_first_stages_whole_backward_as_weight_work() -> None:
    profile = synthetic_profile(num_layers=4, block=(1.0, 1.5, 0.5), head=(1.0, 1.0, 1.0))
    wanted = plan(2, 1, 4, num_layers=4, schedule="zb-h1")
    torch = CostModel(profile, Setting(target=parse_target("torch"))).costs(wanted)
    np.testing.assert_allclose(torch.backward_input_s, [0.0, 4.0])
    np.testing.assert_allclose(torch.backward_weight_s, [4.0, 2.0])
    ideal = CostModel(profile, IDEAL).costs(wanted)
    np.testing.assert_allclose(ideal.backward_input_s, [3.0, 4.0])
    np.testing.assert_allclose(ideal.backward_weight_s, [1.0, 2.0])


def test_a_split_backward_needs_split_times() -> None:
    found = CostModel(synthetic_profile(num_layers=4), IDEAL).estimate(
        plan(2, 1, 4, num_layers=4, schedule="zb-h1")
    )
    assert isinstance(found, Infeasible)
    assert found.rule == "split-times-not-measured"
    assert "apart" in found.reason


def test_numbers_need_a_backward_said_once() -> None:
    numbers = {"forward_s": 1.0, "num_ranks": 2, "num_microbatches": 4}
    for wrong in ({}, {"backward_s": 2.0, "backward_input_s": 1.0}, {"backward_input_s": 1.0}):
        with pytest.raises(UsageError, match="--backward"):
            estimate_from_numbers(**numbers, **wrong)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="rounds"):
        estimate_from_numbers(
            forward_s=1, backward_s=2, num_ranks=4, num_chunks=2, num_microbatches=9,
            target=parse_target("torch"),
        )  # fmt: skip
