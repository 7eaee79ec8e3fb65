"""The search finds what brute force finds, says what it excluded, and answers users' cases."""

import random
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from pptune.cost_model import CostModel, Setting
from pptune.cost_model.partition import balanced_layers
from pptune.errors import FileError, NoAnswer, UsageError
from pptune.estimate import Estimate
from pptune.executors import Executor
from pptune.plan import Plan, even_layers, make_plan
from pptune.plans_file import PlansFile, ProfileReference, load_plans, save_plans
from pptune.profiles import AllreducePoint, MemoryModel, Overhead, Profile, StepConstants
from pptune.search import Request, count_plans, search
from pptune.targets import illegal, parse_target
from tests.reference_simulator import simulate as reference_simulate
from tests.synthetic import synthetic_profile, uniform_link

TORCH = parse_target("torch")
REFERENCE = ProfileReference(path="profile.json", digest="0" * 64)


def found(
    profile: Profile, global_batch_size: int, setting: Setting | None = None, **request: object
) -> PlansFile:
    return search(
        profile,
        setting or Setting(target=TORCH),
        Request(global_batch_size=global_batch_size, **request),  # type: ignore[arg-type]
        reference=REFERENCE,
    )


def pick(*args: object, **request: object) -> Plan:
    return found(*args, **request).candidates[0].plan  # type: ignore[arg-type]


def random_profile(draw: random.Random, num_ranks: int) -> Profile:
    fixed, work = draw.uniform(0, 1), draw.uniform(0.1, 1)
    overheads = {
        str(name): Overhead(
            forward_s=draw.choice([0.0, 0.05, 0.2]),
            backward_s=draw.choice([0.0, 0.1]),
            hop_s=draw.choice([0.0, 0.05]),
            chunk_s=draw.choice([0.0, 0.0, 1.0]),
        )
        for name in Executor
    }
    return synthetic_profile(
        num_layers=draw.randint(num_ranks, 12),
        block=lambda b: (fixed + work * b, 2 * (fixed + work * b)),
        embedding=draw.choice([0.0, 0.3]),
        head=draw.choice([0.0, 0.5, 2.0]),
        sizes=(1, 2, 4, 8),
        num_ranks=num_ranks,
        links=[uniform_link(draw.choice([0.0, 0.1, 1.0]), draw.choice([1.0, 1e3]))],
        boundary_bytes=draw.choice([0, 1]),
        overheads=overheads,
        step_constants=StepConstants(fixed_s=0.5),
        activation_bytes=10,
        end_activation_bytes=5,
        parameter_bytes=100,
        end_parameter_bytes=50,
        memory=MemoryModel(),
        memory_bytes=draw.choice([None, 2500, 4000]),
    )


def every_plan(profile: Profile, global_batch_size: int) -> Iterator[Plan]:
    """All plans of torch's default axes, by plain loops."""
    num_ranks, num_layers = profile.num_ranks, profile.model.num_layers
    for b in (1, 2, 3, 4, 5, 6, 7, 8):
        if global_batch_size % b:
            continue
        times = CostModel(profile, Setting(target=TORCH)).layer_costs(b, "none")
        for v in range(1, num_layers // num_ranks + 1):
            if num_ranks == 1 and v > 1:
                continue
            balanced = balanced_layers(
                num_layers, num_ranks, v,
                embedding_s=times.embedding.forward_s + times.embedding.backward_s,
                block_s=times.block.forward_s + times.block.backward_s,
                head_s=times.head.forward_s + times.head.backward_s,
            )  # fmt: skip
            for layers in {balanced, even_layers(num_layers, num_ranks * v) or balanced}:
                plan = make_plan(
                    schedule="1f1b" if v == 1 else "interleaved", num_ranks=num_ranks,
                    num_chunks=v, microbatch_size=b, num_microbatches=global_batch_size // b,
                    layers_per_stage=layers,
                )  # fmt: skip
                if illegal(plan, TORCH) is None:
                    yield plan


def brute_force(profile: Profile, global_batch_size: int) -> list[float]:
    """Step times of every legal, fitting plan, ascending, played by the plain simulator."""
    model = CostModel(profile, Setting(target=TORCH))
    steps = []
    for plan in every_plan(profile, global_batch_size):
        if model.fits(model.peak_bytes(plan)) == "no":
            continue
        inputs = model.inputs(plan)
        played = reference_simulate(model.order(plan), inputs.costs, inputs.executor)
        steps.append(played.step + float(inputs.constant_s.max()))
    return sorted(steps)


@pytest.mark.parametrize("seed", range(200))
def test_the_search_finds_what_brute_force_finds(seed: int) -> None:
    draw = random.Random(seed)
    profile = random_profile(draw, draw.randint(1, 4))
    global_batch_size = draw.choice([4, 6, 8, 12, 16])
    expected = brute_force(profile, global_batch_size)
    if not expected:
        with pytest.raises(NoAnswer):
            found(profile, global_batch_size)
        return
    answer = found(profile, global_batch_size, top=5)
    assert answer.proven_optimal
    steps = [row.estimate.step_time_s for row in answer.candidates]
    assert steps == pytest.approx(expected[:5], rel=1e-9)
    assert answer.space.num_legal - answer.space.num_infeasible == len(expected)
    assert sum(answer.space.lost_by.values()) == answer.space.num_legal - 1


def test_sampling_a_tenth_of_the_plans_comes_close() -> None:
    num_spaces = num_close = 0
    for seed in range(60):
        draw = random.Random(seed)
        num_ranks = draw.choice([2, 3, 4, 6])
        profile = random_profile(draw, num_ranks)
        axes = {
            "microbatch_group_sizes": tuple(range(num_ranks, 25)),
            "recompute": ("none", "full"),
        }
        try:
            everything = found(profile, 24, **axes)
        except NoAnswer:
            continue
        if everything.space.num_legal < 100:
            continue
        trials = everything.space.num_legal // 10
        sampled = found(profile, 24, max_enumerated=0, trials=trials, **axes)
        assert not sampled.proven_optimal
        best_s, found_s = (
            answer.candidates[0].estimate.step_time_s for answer in (everything, sampled)
        )
        num_spaces += 1
        num_close += found_s <= best_s * 1.01
    assert num_spaces >= 10
    assert num_close >= 0.95 * num_spaces


def test_the_same_seed_samples_the_same_plans() -> None:
    profile = random_profile(random.Random(7), 4)
    one, two = (found(profile, 16, max_enumerated=0, trials=8, seed=3).candidates for _ in range(2))
    assert one == two


@given(seed=st.integers(0, 10**6), factor=st.floats(1.0, 20.0))
@settings(max_examples=15, deadline=None)
def test_a_slower_link_never_makes_the_best_plan_faster(seed: int, factor: float) -> None:
    profile = replace(random_profile(random.Random(seed), 3), num_ranks=3)
    slower = tuple(
        replace(link, latency_s=link.latency_s * factor, bytes_per_s=link.bytes_per_s / factor)
        for link in profile.links
    )
    fast, slow = (
        CostModel(p, Setting(target=None)) for p in (profile, replace(profile, links=slower))
    )
    for plan in every_plan(profile, 12):
        before, after = fast.estimate(plan), slow.estimate(plan)
        assert isinstance(before, Estimate)
        assert isinstance(after, Estimate)
        assert before.step_time_s <= after.step_time_s * (1 + 1e-12)


@given(seed=st.integers(0, 10**6))
@settings(max_examples=15, deadline=None)
def test_a_larger_memory_limit_never_makes_the_best_plan_slower(seed: int) -> None:
    profile = random_profile(random.Random(seed), 3)
    best = []
    for limit in (1500, 2500, 4000, 10**9):
        setting = Setting(target=TORCH, memory_limit_bytes=limit)
        try:
            answer = found(profile, 12, setting)
        except NoAnswer:
            best.append(float("inf"))
        else:
            best.append(answer.candidates[0].estimate.step_time_s)
    assert best == sorted(best, reverse=True)


# --- users' cases -------------------------------------------------------------------------------


def test_a_cost_per_chunk_lets_v1_win_at_small_m() -> None:
    # NVIDIA/Megatron-LM 1535: the first use of every virtual chunk is slow.
    def best(chunk_s: float) -> Plan:
        overheads = {
            str(name): Overhead(forward_s=0.0, backward_s=0.0, chunk_s=chunk_s) for name in Executor
        }
        profile = synthetic_profile(
            num_layers=16, block=0.1, num_ranks=4, sizes=(1,), overheads=overheads
        )
        return pick(profile, 4)

    assert best(0.0).num_chunks > 1
    assert best(3.0).num_chunks == 1


def test_v_and_b_are_searched_together() -> None:
    # NVIDIA-NeMo/Megatron-Bridge PR 4458: going from V = 1 to 2 changed the best b from 2 to 1.
    profile = synthetic_profile(
        num_layers=8,
        block=lambda b: ({1: 1.0, 2: 1.65}[b], {1: 2.0, 2: 3.3}[b]),
        sizes=(1, 2),
        num_ranks=4,
        activation_bytes=10,
        end_activation_bytes=0,
        parameter_bytes=0,
        end_parameter_bytes=0,
        memory=MemoryModel(),
    )
    # Rank 0 holds 4 micro-batches of 2 layers at V = 1, and 11 chunks of 1 layer at V = 2.
    setting = Setting(target=TORCH, memory_limit_bytes=200)

    def best(v: tuple[int, ...] | None, b: tuple[int, ...] | None = None) -> Plan:
        return pick(profile, 16, setting, num_chunks=v, microbatch_sizes=b)

    b_at_v1 = best((1,)).microbatch_size
    assert b_at_v1 == 2
    assert best(None, (b_at_v1,)).num_chunks == 1  # coordinate by coordinate it ends here
    joint = best(None)
    assert (joint.num_chunks, joint.microbatch_size) == (2, 1)


@pytest.mark.parametrize("seed", range(10))
def test_faster_kernels_never_ask_for_smaller_micro_batches(seed: int) -> None:
    # NVIDIA-NeMo/Megatron-Bridge 3385: the faster the kernels, the more fixed overhead weighs.
    draw = random.Random(seed)
    fixed, overhead_s = draw.uniform(0.0, 0.5), draw.uniform(0.05, 0.5)
    overhead = {
        str(name): Overhead(forward_s=overhead_s, backward_s=overhead_s) for name in Executor
    }

    def best_b(scale: float) -> int:
        profile = synthetic_profile(
            num_layers=8,
            block=lambda b: (scale * (fixed + 0.2 * b), 2 * scale * (fixed + 0.2 * b)),
            num_ranks=4,
            overheads=overhead,
        )
        return pick(profile, 32, schedules=("1f1b",)).microbatch_size

    assert best_b(1.0) <= best_b(0.5) <= best_b(0.1)


def test_how_v_depends_on_m_is_the_profiles_to_say() -> None:
    # Megatron-Bridge performance guide: many micro-batches favour a smaller V. True with overhead
    # per action, not with free transfers.
    def best_v(overhead_s: float, global_batch_size: int) -> int:
        overhead = {
            str(name): Overhead(forward_s=overhead_s, backward_s=overhead_s) for name in Executor
        }
        profile = synthetic_profile(
            num_layers=16, block=0.1, sizes=(1,), num_ranks=4, overheads=overhead
        )
        return pick(profile, global_batch_size).num_chunks

    assert best_v(0.02, 8) > best_v(0.02, 256)
    assert best_v(0.0, 8) == best_v(0.0, 256) == 4


def gpu_profile(latency_s: float, memory_bytes: int | None = None) -> Profile:
    return synthetic_profile(
        num_layers=8,
        block=0.1,
        sizes=(1, 2, 4),
        links=[uniform_link(latency_s)],
        num_ranks=2,
        activation_bytes=10,
        end_activation_bytes=0,
        parameter_bytes=100,
        end_parameter_bytes=0,
        memory=MemoryModel(),
        memory_bytes=memory_bytes,
        allreduce=[AllreducePoint(num_bytes=800, num_ranks=2, seconds=0.05)],
    )


def test_no_pipeline_where_the_model_fits_without_one() -> None:
    # EleutherAI/gpt-neox 903, xingchensong/TouchNet PR 10: pipelining over slow links lost to data
    # parallelism by 1.3 and more wherever the model fitted.
    answer = found(gpu_profile(0.5), 16, num_gpus=4)
    best = answer.candidates[0]
    assert (best.plan.num_ranks, best.plan.data_parallel) == (1, 4)
    piped = found(gpu_profile(0.5), 16, num_ranks=2, data_parallel=2).candidates[0]
    assert piped.estimate.step_time_s / best.estimate.step_time_s > 1.3
    # 8 layers need 800 bytes of weights, 2400 of gradients and optimizer state.
    assert pick(gpu_profile(0.5, memory_bytes=3000), 16, num_gpus=4).num_ranks > 1


def test_one_rank_has_no_bubble_and_its_plans_can_be_read_again(tmp_path: Path) -> None:
    """Sums of times that no wait parts differ by rounding only, either way."""
    profile = synthetic_profile(block=lambda b: (0.7e-3 + 0.1e-3 * b, 1.3e-3 + 0.3e-3 * b))
    for batch in range(1, 40):
        found = search(
            profile, Setting(target=TORCH), Request(global_batch_size=batch, num_ranks=1),
            reference=REFERENCE,
        )  # fmt: skip
        assert all(row.estimate.bubble_ratio >= 0 for row in found.candidates)
        save_plans(found, tmp_path / "plans.json")
        assert load_plans(tmp_path / "plans.json").candidates == found.candidates


def test_gpus_without_an_allreduce_measurement_are_refused() -> None:
    with pytest.raises(UsageError, match="all-reduce"):
        found(synthetic_profile(), 16, num_gpus=4)


def test_tied_embeddings_over_ranks_are_refused_on_torch() -> None:
    profile = gpu_profile(0.0)
    tied = replace(profile, model=replace(profile.model, tie_word_embeddings=True))
    with pytest.raises(NoAnswer, match="tied"):
        found(tied, 16)
    assert pick(tied, 16, num_ranks=1).num_ranks == 1


def test_with_flat_kernels_the_most_micro_batches_win_and_the_baseline_is_tuned_too() -> None:
    # unslothai/unsloth PR 10280: monotone in M, no knee; and sweeping M for the control mattered.
    profile = synthetic_profile(num_layers=8, block=0.1, num_ranks=2)
    answer = found(profile, 16, num_chunks=(1,))
    best = answer.candidates[0]
    assert best.plan.num_microbatches == 16
    assert answer.baseline is not None
    assert answer.baseline.plan == best.plan
    assert best.speedup_over_baseline == 1.0


def test_more_micro_batches_are_no_win_when_overhead_dominates() -> None:
    # marin-community/marin 6532: throughput was flat in M, bound by the cost of each call.
    overhead = {str(name): Overhead(forward_s=1.0, backward_s=1.0) for name in Executor}
    profile = synthetic_profile(num_layers=8, block=1e-4, num_ranks=2, overheads=overhead)
    answer = found(profile, 32)
    assert answer.candidates[0].plan.microbatch_size == 8
    assert answer.candidates[0].plan.num_chunks == 1
    assert set(answer.space.lost_by) <= {"overhead", "bubble"}
    model = CostModel(profile, Setting(target=TORCH))
    for plan in every_plan(profile, 32):
        estimate = model.estimate(plan)
        assert isinstance(estimate, Estimate)
        actions = 2 * plan.num_microbatches * plan.num_chunks
        assert estimate.step_time_s >= actions * 1.0
        assert estimate.breakdown_s.overhead == pytest.approx(actions)


def test_interleaving_may_win_below_the_rule_of_thumb() -> None:
    # NVIDIA/Megatron-LM 258 and many others: a rule of thumb never overrides the measurement. Here
    # M = 8 is half of 1.2 V P, and V = 2 is 29 % faster than V = 1.
    profile = synthetic_profile(
        num_layers=16, block=0.5, sizes=(1,), links=[uniform_link(0.05)], num_ranks=8
    )
    setting = Setting(target=TORCH)
    model = CostModel(profile, setting)
    answer = found(profile, 8, setting, num_chunks=(1, 2))
    assert answer.candidates[0].plan.num_chunks == 2
    assert model.estimate(answer.candidates[0].plan) == answer.candidates[0].estimate


def test_the_best_b_is_the_fastest_not_the_largest_that_fits() -> None:
    # bigscience-workshop/bigscience, tr11-176B-ml chronicles: 181B on P = 12, global batch 512 per
    # replica; b = 1, 2, 8 measured (as the compute part of the iterations), b = 4 was best.
    per_sequence_s = {1: 140.3, 2: 128.5, 8: 110.3}
    profile = synthetic_profile(
        num_layers=72,
        block=lambda b: (per_sequence_s[b] * b / 3, per_sequence_s[b] * b * 2 / 3),
        sizes=(1, 2, 8),
        num_ranks=12,
    )
    answer = found(profile, 512, schedules=("1f1b",))
    assert answer.candidates[0].plan.microbatch_size in (2, 4)
    assert answer.candidates[0].estimate.source in ("measured", "interpolated")
    tried = {row.plan.microbatch_size for row in answer.candidates}
    assert {1, 8} <= tried


def test_a_published_layout_is_found() -> None:
    # NVIDIA-NeMo/Megatron-Bridge PR 5797: 43 layers on PP 5, 160 devices with CP 16, global batch
    # 128, b = 1: D = 2, M = 64 and 8/9/9/9/8 where the ends weigh about a layer each.
    profile = synthetic_profile(
        num_layers=43, block=1.0, embedding=1.0, head=1.0, sizes=(1,), num_ranks=5
    )
    plan = pick(profile, 128, schedules=("1f1b",), data_parallel=160 // (5 * 16))
    assert plan.layers_per_stage == (8, 9, 9, 9, 8)
    assert (plan.data_parallel, plan.num_microbatches) == (2, 64)


def test_a_borderline_pick_is_said_to_be_one() -> None:
    profile = gpu_profile(0.0)
    peaks = CostModel(profile, Setting(target=TORCH)).peak_bytes(pick(profile, 8))
    assert peaks is not None
    setting = Setting(target=TORCH, memory_limit_bytes=round(float(peaks.max()) * 1.02))
    answer = found(profile, 8, setting)
    assert answer.candidates[0].estimate.fits == "borderline"
    assert any("5%" in warning for warning in answer.warnings)


def test_kernels_that_slow_down_let_the_small_b_win_with_a_warning() -> None:
    # NVIDIA/Megatron-LM 509: 0.989, 1.412, 2.261 s at b = 4, 8, 16.
    profile = synthetic_profile(
        num_layers=8,
        block=lambda b: ({4: 1.0, 8: 2.8, 16: 8.6}[b], {4: 2.0, 8: 5.6, 16: 17.2}[b]),
        sizes=(4, 8, 16),
        num_ranks=2,
    )
    answer = found(profile, 64)
    assert answer.candidates[0].plan.microbatch_size == 4
    assert any("memory pressure" in warning for warning in answer.warnings)


# --- what is asked, refused and stored ----------------------------------------------------------


def test_sizes_between_measured_ones_are_searched_and_sizes_beyond_only_on_request() -> None:
    profile = synthetic_profile(num_layers=8, block=lambda b: (1 + 0.01 * b, 2.0), sizes=(2, 8))
    assert found(profile, 64).space.axes["microbatch_size"] == ("2", "4", "8")
    asked = found(profile, 64, microbatch_sizes=(16,))
    assert asked.candidates[0].estimate.source == "extrapolated"
    assert any("extrapolated" in warning for warning in asked.warnings)


def test_nothing_legal_names_the_rule_and_the_nearest_change() -> None:
    profile = synthetic_profile(num_layers=16, sizes=(1,), num_ranks=4)
    with pytest.raises(NoAnswer, match=r"multiple of rounds \(2\) with 4 ranks; use 8 or 10"):
        found(profile, 9, schedules=("interleaved",), num_chunks=(2,))
    with pytest.raises(NoAnswer, match="more-stages-than-layers"):
        found(profile, 8, num_ranks=17)


def test_nothing_fits_says_what_each_rank_lacks_and_the_cheapest_way_out() -> None:
    profile = gpu_profile(0.0, memory_bytes=1500)
    with pytest.raises(NoAnswer) as refused:
        found(profile, 8)
    text = str(refused.value)
    assert "rank 0 needs" in text
    assert "rank 1 needs" in text
    assert "--ranks 4: " in text


def test_the_baseline_can_be_given() -> None:
    profile = synthetic_profile(num_layers=8, block=0.1, num_ranks=2)
    answer = found(profile, 16, baseline="schedule=1f1b microbatch_size=4")
    assert answer.baseline is not None
    assert (answer.baseline.plan.schedule, answer.baseline.plan.microbatch_size) == ("1f1b", 4)
    other = found(profile, 16, baseline="schedule=interleaved chunks=2 microbatch_size=1")
    assert other.baseline is not None
    assert other.baseline.plan.num_chunks == 2
    assert other.baseline_same_size is not None
    assert other.baseline_same_size.plan.schedule == "1f1b"
    for wrong in ("1f1b", "schedule=best", "microbatch_size=0", "color=red", "microbatch_size=3"):
        with pytest.raises(UsageError, match="baseline"):
            found(profile, 16, baseline=wrong)


def test_counting_plays_nothing_and_agrees_with_the_search() -> None:
    profile = gpu_profile(0.0, memory_bytes=2000)
    counted = count_plans(profile, Setting(target=TORCH), Request(global_batch_size=16))
    space = found(profile, 16).space
    assert counted.num_infeasible > 0
    assert replace(counted, lost_by=space.lost_by) == space


def test_split_schedules_without_split_times_are_left_out_with_the_reason() -> None:
    profile = synthetic_profile(num_layers=8, num_ranks=2)
    answer = found(profile, 8, schedules=("1f1b", "zb-h1"))
    assert answer.candidates[0].plan.schedule == "1f1b"
    assert answer.space.num_illegal["split-times-not-measured"] > 0
    split = synthetic_profile(num_layers=8, block=(1.0, 1.0, 1.0), num_ranks=2)
    assert pick(split, 8, schedules=("1f1b", "zb-h1")).schedule == "zb-h1"


def test_the_leanest_plan_and_the_pareto_front() -> None:
    profile = gpu_profile(0.01)
    rows = found(profile, 16, objective="pareto").candidates
    costs = [(row.estimate.step_time_s, max(row.estimate.peak_memory_bytes or ())) for row in rows]
    assert costs == sorted(costs)
    assert [peak for _, peak in costs] == sorted((peak for _, peak in costs), reverse=True)
    model = CostModel(profile, Setting(target=TORCH))
    for plan in every_plan(profile, 16):
        estimate = model.estimate(plan)
        assert isinstance(estimate, Estimate)
        cost = (estimate.step_time_s, max(estimate.peak_memory_bytes or ()))
        assert any(step <= cost[0] and peak <= cost[1] for step, peak in costs)
    leanest = found(profile, 16, objective="memory").candidates[0]
    assert max(leanest.estimate.peak_memory_bytes or ()) == costs[-1][1]
    with pytest.raises(UsageError, match="memory numbers"):
        found(synthetic_profile(), 16, objective="memory")


def test_a_small_search_loads_neither_torch_nor_optuna() -> None:
    program = (
        "import sys\n"
        "from tests.test_search import found, synthetic_profile\n"
        "found(synthetic_profile(num_layers=8, num_ranks=2), 8)\n"
        "loaded = {name.partition('.')[0] for name in sys.modules}\n"
        "assert not loaded & {'torch', 'optuna', 'sqlalchemy'}, loaded\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parent.parent)


def storages(folder: Path) -> list[str]:
    return [f"sqlite:///{folder}/study.db", f"journal://{folder}/study.log"]


@pytest.mark.parametrize("kind", [0, 1])
@pytest.mark.parametrize("max_enumerated", [0, 1000])
def test_a_stored_search_resumes_and_refuses_another_space(
    tmp_path: Path, kind: int, max_enumerated: int
) -> None:
    import optuna

    url = storages(tmp_path)[kind]
    profile = synthetic_profile(num_layers=8, block=0.1, num_ranks=2)
    request = {"storage": url, "study_name": "s", "max_enumerated": max_enumerated, "trials": 3}
    first = found(profile, 16, **request)
    assert found(profile, 16, **request).candidates == first.candidates
    storage = optuna.storages.get_storage(url) if kind == 0 else None
    if storage is not None:
        trials = optuna.load_study(study_name="s", storage=storage).trials
        assert len(trials) == (3 if max_enumerated == 0 else len(trials))
        values = {trial.user_attrs["plan"]: trial.value for trial in trials}
        best = first.candidates[0]
        assert values[best.plan.label] == pytest.approx(best.estimate.step_time_s)
    with pytest.raises(UsageError, match=r"search space .* has changed .*num_chunks"):
        found(profile, 16, num_chunks=(1, 2), **request)


def test_a_trial_that_was_killed_costs_no_budget_and_workers_share_theirs(tmp_path: Path) -> None:
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    url = f"journal://{tmp_path}/study.log"
    profile = synthetic_profile(num_layers=8, block=0.1, num_ranks=2)
    request = {"storage": url, "study_name": "s", "max_enumerated": 0}
    found(profile, 16, trials=2, **request)
    study = optuna.load_study(
        study_name="s", storage=JournalStorage(JournalFileBackend(f"{tmp_path}/study.log"))
    )
    study.ask()  # a worker that never came back
    found(profile, 16, trials=6, seed=1, **request)
    states = [trial.state.name for trial in study.get_trials()]
    assert states.count("COMPLETE") == 6
    assert states.count("RUNNING") == 1


def test_storages_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    profile = synthetic_profile(num_layers=8, num_ranks=2)
    foreign = tmp_path / "notes.db"
    foreign.write_text("not a database, but a text that is long enough to be looked at\n" * 20)
    locked = tmp_path / "locked.db"
    found(profile, 8, storage=f"sqlite:///{locked}", study_name="a")
    holder = sqlite3.connect(locked)
    holder.execute("BEGIN EXCLUSIVE")
    try:
        for url in (
            f"sqlite:///{foreign}",
            f"sqlite:///{tmp_path}/missing/study.db",
            f"journal://{tmp_path}/missing/study.log",
            f"sqlite:///{locked}?timeout=0.1",
            "nonsense",
        ):
            with pytest.raises(FileError, match="storage"):
                found(profile, 8, storage=url, study_name="b")
    finally:
        holder.close()


def test_a_timeout_keeps_what_was_found() -> None:
    profile = synthetic_profile(num_layers=8, num_ranks=2)
    with pytest.raises(NoAnswer, match="time-out"):
        found(profile, 8, timeout_s=0.0)
