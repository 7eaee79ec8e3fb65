"""Why a plan was picked, against closed forms and against the cost model asked directly."""

import json
import subprocess
import sys

import msgspec
import numpy as np
import pytest

from pptune.cost_model import CostModel, Setting
from pptune.errors import NoAnswer, UsageError
from pptune.estimate import Estimate
from pptune.executors import Executor
from pptune.explain import explain, setting_of
from pptune.explain.turning_points import ROUNDS, _runs
from pptune.explain.uncertainty import World, _redraw_factors, with_bandwidth
from pptune.explanation import Explanation
from pptune.measurement import Measurement, t_quantile
from pptune.plan import Plan, even_layers, make_plan
from pptune.plans_file import PlansFile, ProfileReference
from pptune.profiles import LayerPoint, Overhead, Profile
from pptune.search import Request, search
from pptune.targets import parse_target
from pptune.views.explanation import explanation_sheets, sentences
from tests.synthetic import synthetic_profile, uniform_link

REFERENCE = ProfileReference(path="profile.json", digest="0" * 64)
FORWARD_S, BACKWARD_S = 1e-3, 2e-3


def searched(
    profile: Profile, global_batch_size: int, num_ranks: int, **changes: object
) -> PlansFile:
    request = Request(global_batch_size=global_batch_size, num_ranks=num_ranks, **changes)  # type: ignore[arg-type]
    setting = Setting(target=parse_target("torch"))
    return search(profile, setting, request, reference=REFERENCE)


def torch_overhead(**seconds: float) -> dict[str, Overhead]:
    overhead = Overhead(**{"forward_s": 0.0, "backward_s": 0.0, **seconds})
    return {str(name): overhead for name in (Executor.TORCH_1F1B, Executor.TORCH_RUNTIME)}


def interleaved(chunks: int, microbatches: int, *, layers: int = 16, size: int = 1) -> Plan:
    split = even_layers(layers, 4 * chunks)
    assert split is not None
    return make_plan(
        schedule="1f1b" if chunks == 1 else "interleaved", num_ranks=4, num_chunks=chunks,
        microbatch_size=size, num_microbatches=microbatches, layers_per_stage=split,
    )  # fmt: skip


def told(explanation: Explanation) -> str:
    return "\n".join(sentences(explanation))


def test_a_cost_per_chunk_makes_one_chunk_win_and_is_named() -> None:
    # USER_CASES 1: throughput fell with V > 1, because every chunk's first use is slow.
    cheap = synthetic_profile(num_layers=16, sizes=(1,), num_ranks=4)
    dear = synthetic_profile(
        num_layers=16, sizes=(1,), num_ranks=4, overheads=torch_overhead(chunk_s=0.05)
    )
    assert searched(cheap, 8, 4).candidates[0].plan.num_chunks > 1
    explanation = explain(searched(dear, 8, 4), dear)
    assert explanation.shares[0].plan.num_chunks == 1
    assert explanation.rivals
    for rival in explanation.rivals:
        assert rival.reason_code == "chunk-cost"
        assert rival.grown_s["chunk-cost"] == pytest.approx(0.05 * (rival.plan.num_chunks - 1))
        assert sum(rival.grown_s.values()) == pytest.approx(rival.slower_s)
    assert "per-chunk fixed cost x V" in told(explanation)


@pytest.mark.parametrize("overhead_s", [0.1e-3, 2e-3])
def test_ranges_of_m_follow_the_closed_form(overhead_s: float) -> None:
    # USER_CASES 4. With equal stages, free messages and o per forward + backward action,
    # step(V) = (M V + P - 1)(t / V + o): V beats V' < V exactly while
    # M < (P - 1) t (1 / V' - 1 / V) / ((V - V') o).
    profile = synthetic_profile(
        num_layers=16, block=(FORWARD_S, BACKWARD_S), sizes=(1,), num_ranks=4,
        overheads=torch_overhead(forward_s=overhead_s / 2, backward_s=overhead_s / 2),
    )  # fmt: skip
    explanation = explain(searched(profile, 8, 4, num_chunks=(1, 2, 4)), profile)
    rank_s = 4 * (FORWARD_S + BACKWARD_S)
    tried = [8, *(4 * rounds for rounds in ROUNDS)]

    def step_s(chunks: int, microbatches: int) -> float:
        return (microbatches * chunks + 3) * (rank_s / chunks + overhead_s)

    for row in explanation.chunk_ranges:
        for first, last in row.ranges:
            for microbatches in (first, last):
                times = {v: step_s(v, microbatches) for v in (1, 2, 4)}
                assert min(times, key=times.__getitem__) == row.num_chunks
        if row.num_chunks > 1:
            limit = 3 * rank_s / (row.num_chunks * overhead_s)
            assert row.beats_one == ((4, max(m for m in tried if m < limit)),)
            # It pays at small M and not at large M: the rule of thumb has it the wrong way round.
            assert row.rule_holds is False
    assert {row.num_chunks for row in explanation.chunk_ranges if row.ranges} == (
        {1, 2, 4} if overhead_s < 1e-3 else {1, 2}
    )
    assert "does not hold" in told(explanation)


def test_without_overhead_the_best_v_does_not_depend_on_m() -> None:
    profile = synthetic_profile(num_layers=16, sizes=(1,), num_ranks=4)
    explanation = explain(searched(profile, 8, 4, num_chunks=(1, 2, 4)), profile)
    wins = {row.num_chunks: row.ranges for row in explanation.chunk_ranges}
    assert wins[4] == ((4, 256),)
    assert wins[1] == wins[2] == ()


def test_winners_over_m_are_those_of_the_cost_model() -> None:
    profile = slow_links(4e6)
    explanation = explain(searched(profile, 8, 4, num_chunks=(1, 2)), profile)
    model = CostModel(profile, Setting(target=parse_target("torch")))
    tried = 0
    for row in explanation.chunk_ranges:
        for m in {m for run in row.ranges for m in run}:
            times = {v: model.evaluate(interleaved(v, m)).step_time_s for v in (1, 2)}
            assert min(times, key=times.__getitem__) == row.num_chunks
            tried += 1
    assert tried >= 2


def slow_links(bytes_per_s: float) -> Profile:
    return synthetic_profile(
        num_layers=16, block=(FORWARD_S, BACKWARD_S), sizes=(1,), num_ranks=4,
        links=(uniform_link(1e-5, bytes_per_s),), boundary_bytes=4096,
    )  # fmt: skip


def test_the_choice_turns_at_the_break_even_bandwidth() -> None:
    profile = slow_links(1e9)
    plans = searched(profile, 8, 4, num_chunks=(1, 2, 4))
    bandwidth = explain(plans, profile).bandwidth
    assert bandwidth is not None
    assert bandwidth.below == "one chunk"
    assert bandwidth.slowest_bytes_per_s == 1e9
    assert bandwidth.break_even_bytes_per_s is not None
    for factor, winner_is_one in ((0.99, True), (1.01, False)):
        moved = slow_links(bandwidth.break_even_bytes_per_s * factor)
        best = searched(moved, 8, 4, num_chunks=(1, 2, 4)).candidates[0].plan
        assert (best.num_chunks == 1) is winner_is_one


def test_bandwidth_is_scaled_for_every_link() -> None:
    profile = slow_links(1e9)
    world = World(profile=profile, setting=Setting(target=parse_target("torch")))
    halved = with_bandwidth(world, 0.5).profile
    assert [link.bytes_per_s for link in halved.links] == [0.5e9]
    assert profile.links[0].bytes_per_s == 1e9


def test_bubble_grows_with_b_at_a_fixed_global_batch() -> None:
    # USER_CASES 8: whether a larger micro-batch lowers or raises the bubble depends on what is
    # held fixed, so the text says it.
    profile = synthetic_profile(num_layers=16, sizes=(1, 2, 4), num_ranks=4)
    explanation = explain(searched(profile, 32, 4), profile)
    bubbles = [row.bubble_ratio for row in explanation.sizes]
    assert [row.microbatch_size for row in explanation.sizes] == [1, 2, 4]
    assert [row.num_microbatches for row in explanation.sizes] == [32, 16, 8]
    assert bubbles == sorted(bubbles)
    assert len(set(bubbles)) == 3
    assert [row.equal_stages_bubble_ratio for row in explanation.sizes] == pytest.approx(bubbles)
    assert "global batch is held fixed at 32" in explanation.held_fixed
    assert f"With b held fixed at {explanation.shares[0].plan.microbatch_size}," in told(
        explanation
    )


def test_what_b_does_to_the_bubble_is_told_apart_from_uneven_stages() -> None:
    # The head's share of its stage changes with b, so that the bubble of an uneven plan can fall
    # with b; with equal stages it is (P - 1) / (V M + P - 1) and cannot.
    profile = synthetic_profile(
        num_layers=16, head=lambda b: (4e-3, 8e-3), sizes=(1, 2, 4), num_ranks=4
    )
    plans = searched(profile, 16, 4, num_chunks=(1,), layouts=("even",))
    rows = explain(plans, profile).sizes
    assert [row.equal_stages_bubble_ratio for row in rows] == pytest.approx(
        [3 / (m + 3) for m in (16, 8, 4)]
    )
    assert rows[0].bubble_ratio > rows[1].bubble_ratio


def test_dispatch_overhead_is_seen_and_more_microbatches_are_no_win() -> None:
    # USER_CASES 9: throughput was flat in M, bound by the cost of every call.
    overhead_s = 40e-3
    profile = synthetic_profile(
        num_layers=16, sizes=(1, 2, 4), num_ranks=4,
        overheads=torch_overhead(forward_s=overhead_s, backward_s=overhead_s),
    )  # fmt: skip
    explanation = explain(searched(profile, 32, 4), profile)
    pick = explanation.shares[0]
    assert pick.plan.microbatch_size == 4
    calls = pick.plan.num_microbatches * pick.plan.num_chunks
    assert pick.estimate.breakdown_s.overhead == pytest.approx(2 * calls * overhead_s)
    assert pick.estimate.breakdown_s.overhead > pick.estimate.breakdown_s.compute
    steps = [row.step_time_s for row in explanation.sizes]
    assert steps == sorted(steps, reverse=True)


def test_the_head_and_what_would_remove_its_loss() -> None:
    # USER_CASES 45. Even split on 4 ranks, 1F1B, head of 4 blocks: the last rank bounds the step,
    # (P - 1) t + M (t + h); with the head spread over the ranks it is (M + P - 1)(t + h / P).
    profile = synthetic_profile(
        num_layers=16, block=(FORWARD_S, BACKWARD_S), head=(4 * FORWARD_S, 4 * BACKWARD_S),
        sizes=(1,), num_ranks=4,
    )  # fmt: skip
    plans = searched(profile, 16, 4, num_chunks=(1,), layouts=("even",))
    head = explain(plans, profile).head
    assert head is not None
    t, h, m = 4 * (FORWARD_S + BACKWARD_S), 4 * (FORWARD_S + BACKWARD_S), 16
    before_s, after_s = 3 * t + m * (t + h), (m + 3) * (t + h / 4)
    assert head.loss_s == pytest.approx(before_s - after_s)
    assert head.loss_ratio == pytest.approx((before_s - after_s) / before_s)
    assert head.head_blocks == pytest.approx(4.0)
    assert head.best_layers == (5, 5, 5, 1)
    shown = told(explain(plans, profile))
    assert "vocabulary parallelism" in shown
    assert f"{100 * head.loss_ratio:.1f}% of the step" in shown


def test_a_balanced_plan_has_no_better_split() -> None:
    profile = synthetic_profile(
        num_layers=16, head=(2 * FORWARD_S, 4 * FORWARD_S), sizes=(1,), num_ranks=4
    )
    plans = searched(profile, 16, 4, num_chunks=(1,))
    head = explain(plans, profile).head
    assert head is not None
    assert head.best_layers is None


def test_uneven_stages_and_small_sizes_cost_what_the_closed_form_says() -> None:
    # t(b) = 1 + b ms forward and twice that backward: the best rate of the sizes 1, 2, 4 is at 4.
    profile = synthetic_profile(
        num_layers=16, block=lambda b: (1e-3 + 1e-3 * b, 2e-3 + 2e-3 * b), sizes=(1, 2, 4),
        num_ranks=4,
    )  # fmt: skip
    plans = searched(profile, 16, 4, num_chunks=(1,), microbatch_sizes=(1,))
    share = explain(plans, profile).shares[0]
    rate_s = 3 * 5e-3 / 4
    assert share.small_size_loss_s == pytest.approx(16 * 4 * (6e-3 - rate_s))
    assert share.imbalance_loss_s == pytest.approx(0.0, abs=1e-12)
    uneven = msgspec.structs.replace(plans.candidates[0].plan, layers_per_stage=(4, 4, 4, 4 + 4))
    longer = synthetic_profile(
        num_layers=20, block=(FORWARD_S, BACKWARD_S), sizes=(1,), num_ranks=4
    )
    model = CostModel(longer, Setting(target=parse_target("torch")))
    estimate = model.estimate(uneven)
    assert isinstance(estimate, Estimate)
    candidate = msgspec.structs.replace(plans.candidates[0], plan=uneven, estimate=estimate)
    explained = explain(
        msgspec.structs.replace(plans, model=longer.model, candidates=(candidate,)), longer
    )
    # (P - 1) 4 t + M 8 t against (M + P - 1) 5 t.
    t = FORWARD_S + BACKWARD_S
    assert explained.shares[0].imbalance_loss_s == pytest.approx((12 + 128 - 95) * t)


def with_samples(profile: Profile, spread_ratio: float) -> Profile:
    """Twenty samples per time, evenly spread around it."""

    def sampled(point: LayerPoint) -> LayerPoint:
        assert point.forward_s is not None
        assert point.backward_s is not None
        steps = [1 + spread_ratio * (index / 9.5 - 1) for index in range(20)]
        return msgspec.structs.replace(
            point,
            samples_s={
                "forward": tuple(point.forward_s * step for step in steps),
                "backward": tuple(point.backward_s * step for step in steps),
            },
        )

    return msgspec.structs.replace(
        profile,
        layers=tuple(
            msgspec.structs.replace(layer, points=tuple(map(sampled, layer.points)))
            for layer in profile.layers
        ),
    )


def near_tie(spread_ratio: float) -> Profile:
    """Two sizes whose steps on one rank differ by 0.1 %."""
    profile = synthetic_profile(
        num_layers=4, sizes=(1, 2), num_ranks=1,
        block=lambda b: (b * 1e-3 * (1.001 if b == 2 else 1), b * 2e-3),
    )  # fmt: skip
    return with_samples(profile, spread_ratio)


def test_the_chance_of_a_near_tie_is_a_coin_toss_and_of_a_clear_win_is_one() -> None:
    noisy, quiet = near_tie(0.2), near_tie(1e-5)
    toss = explain(searched(noisy, 8, 1), noisy).confidence
    sure = explain(searched(quiet, 8, 1), quiet).confidence
    assert toss.num_plans == sure.num_plans == 2
    assert toss.num_resamples == 200
    assert toss.chance_best is not None
    # A share of 200 tosses is within four standard deviations of the truth, which is near a half.
    assert 0.35 < toss.chance_best < 0.72
    assert toss.rival == "1f1b P1 V1 b2 M4"
    assert sure.chance_best == 1.0
    assert sure.rival is None


def test_the_chance_follows_the_seed() -> None:
    noisy = near_tie(0.2)
    plans = searched(noisy, 8, 1)
    chances = [explain(plans, noisy, seed=seed).confidence.chance_best for seed in (1, 1, 2)]
    assert chances[0] == chances[1]
    assert chances[0] != chances[2]


def test_redraws_scatter_as_the_standard_error_says() -> None:
    # Tukey and McLaughlin's standard error of a trimmed mean, as measurement.py has it.
    samples = tuple(1.0 + 0.01 * step for step in range(20))
    measured = Measurement(samples_s=samples)
    factors = _redraw_factors(samples, 4000, np.random.default_rng(7))
    standard_error = measured.half_width_s / t_quantile(20 - 2 * 2 - 1) / measured.centre_s
    assert factors.mean() == pytest.approx(1.0, abs=standard_error / 10)
    assert factors.std() == pytest.approx(standard_error, rel=0.15)


def test_sensitivities_name_the_numbers_that_turn_the_choice() -> None:
    noisy = near_tie(0.2)
    rows = explain(searched(noisy, 8, 1), noisy).sensitivities
    turning = {row.name for row in rows if row.new_pick is not None}
    assert turning == {
        "block forward at b = 1", "block backward at b = 1", "block forward at b = 2",
        "block backward at b = 2",
    }  # fmt: skip
    assert all(not row.assumed for row in rows)
    # One third of the step is forward at the pick's size.
    forward = next(row for row in rows if row.name == "block forward at b = 1")
    assert forward.step_time_change_ratio == pytest.approx(forward.uncertainty_ratio / 3)


def test_without_samples_the_uncertainty_is_assumed_and_said() -> None:
    profile = slow_links(1e9)
    explanation = explain(searched(profile, 8, 4), profile)
    assert explanation.confidence.chance_best is None
    assert explanation.sensitivities
    assert all(row.assumed for row in explanation.sensitivities)
    assert "how sure the choice is can't be said" in told(explanation)


def test_a_lower_place_is_told_what_is_faster() -> None:
    profile = synthetic_profile(num_layers=16, sizes=(1,), num_ranks=4)
    plans = searched(profile, 8, 4, num_chunks=(1, 2, 4))
    last = plans.candidates[-1]
    assert last.plan.num_chunks == 1
    explanation = explain(plans, profile, rank=last.rank)
    assert [rival.plan.num_chunks for rival in explanation.rivals] == [4, 2]
    assert all(rival.slower_s < 0 for rival in explanation.rivals)
    assert {rival.reason_code for rival in explanation.rivals} == {"bubble"}
    assert "faster: less bubble" in told(explanation)
    assert explanation.shares[1].plan == plans.candidates[0].plan


def test_the_map_holds_the_best_plan_of_each_cell() -> None:
    # A head makes the even and the balanced split two plans of one cell.
    profile = synthetic_profile(
        num_layers=16, head=(2e-3, 4e-3), sizes=(1, 2, 4), num_ranks=4,
        overheads=torch_overhead(forward_s=1e-3),
    )  # fmt: skip
    plans = searched(profile, 32, 4, num_chunks=(1, 2, 4), top=1000)
    assert len(plans.candidates) > 9
    explanation = explain(plans, profile)
    assert [(row.num_chunks, row.microbatch_size) for row in explanation.alternatives] == [
        (v, b) for v in (1, 2, 4) for b in (1, 2, 4)
    ]
    for row in explanation.alternatives:
        assert row.estimate is not None
        same_cell = [
            candidate.estimate.step_time_s
            for candidate in plans.candidates
            if (candidate.plan.num_chunks, candidate.plan.microbatch_size)
            == (row.num_chunks, row.microbatch_size)
        ]
        assert row.estimate.step_time_s == min(same_cell)


def test_a_cell_without_a_plan_says_why() -> None:
    profile = synthetic_profile(num_layers=16, sizes=(1, 2, 4), num_ranks=4)
    explanation = explain(searched(profile, 8, 4, num_chunks=(1, 2)), profile)
    empty = [row for row in explanation.alternatives if row.plan is None]
    assert [(row.num_chunks, row.microbatch_size) for row in empty] == [(1, 4)]
    assert empty[0].reason is not None
    assert "2" in empty[0].reason


def test_bad_ranks_and_empty_rankings_are_refused() -> None:
    profile = synthetic_profile(num_layers=16, sizes=(1,), num_ranks=4)
    plans = searched(profile, 8, 4)
    with pytest.raises(UsageError, match=r"rank 99 is not in the ranking of 1\.\."):
        explain(plans, profile, rank=99)
    with pytest.raises(NoAnswer, match="no candidate"):
        explain(msgspec.structs.replace(plans, candidates=()), profile)


def test_runs_break_where_a_tried_value_was_lost() -> None:
    tried = [4, 8, 12, 16, 24]
    assert _runs([4, 8, 16, 24], tried) == ((4, 8), (16, 24))
    assert _runs([], tried) == ()


def test_explanations_survive_json_and_fit_a_terminal() -> None:
    profile = with_samples(slow_links(1e9), 0.05)
    explanation = explain(searched(profile, 8, 4), profile)
    again = msgspec.json.decode(msgspec.json.encode(explanation), type=Explanation)
    assert again == explanation
    assert json.loads(msgspec.json.encode(explanation))["bandwidth"]["below"] == "one chunk"
    titles = [sheet.title for sheet in explanation_sheets(explanation)]
    assert "Where the step goes (slowest rank)" in titles


def test_the_setting_is_the_one_that_the_search_was_told() -> None:
    link = uniform_link(1e-6, 1e9, scope="inter")
    profile = slow_links(1e9)
    setting = Setting(target=parse_target("torch"), ranks_per_node=2, links=(link,))
    plans = search(profile, setting, Request(global_batch_size=8, num_ranks=4), reference=REFERENCE)
    told_again = setting_of(plans)
    assert told_again.links == (link,)
    assert told_again.ranks_per_node == 2
    assert str(told_again.target) == plans.target


def test_explaining_and_showing_never_load_torch() -> None:
    code = (
        "import sys, pptune.explain, pptune.views.explanation, pptune.views.html, "
        "pptune.views.trace, pptune.views.timeline, pptune.views.stages; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
