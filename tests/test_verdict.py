"""The verdict over runs: order, regret, ties and correlation, against plain definitions."""

from itertools import combinations, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pptune.plan import Plan
from pptune.validate.verdict import noise_floor, pairs_ordered, regret, spearman, summarise
from pptune.validation_file import Run
from tests.sample_documents import sample_plan, sample_run


def plan_with(microbatches: int, *, size: int = 1) -> Plan:
    return sample_plan(
        "1f1b", chunks=1, microbatches=microbatches, layers=(4,) * 4, size=size
    )  # fmt: skip


def group_of(*times: tuple[float, float], noise: float = 0.0) -> list[Run]:
    """Runs of one global batch (2520), as (predicted, measured)."""
    sizes = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10)
    return [
        sample_run(plan_with(2520 // size, size=size), predicted, measured, noise_ratio=noise)
        for size, (predicted, measured) in zip(sizes, times, strict=False)
    ]


def brute_force_spearman(a: list[float], b: list[float]) -> float:
    """1 - 6 sum d^2 / (n (n^2 - 1)), which holds where all values differ."""

    def rank(values: list[float]) -> list[int]:
        return [sum(other < value for other in values) for value in values]

    d2 = sum((x - y) ** 2 for x, y in zip(rank(a), rank(b), strict=True))
    return 1 - 6 * d2 / (len(a) * (len(a) ** 2 - 1))


def test_spearman_is_the_textbook_formula_for_every_order() -> None:
    values = [1.0, 2.0, 5.0, 9.0, 10.0]
    for order in permutations(values):
        assert spearman(values, list(order)) == pytest.approx(
            brute_force_spearman(values, list(order))
        )


def test_spearman_shares_ranks_among_equals() -> None:
    # Ranks 0, 1.5, 1.5, 3 against 0, 1, 2, 3: covariance 4.5, spreads 4.5 and 5.
    assert spearman([1, 2, 2, 3], [1, 2, 3, 4]) == pytest.approx(4.5 / (4.5 * 5) ** 0.5)
    assert spearman([1, 1, 1], [1, 2, 3]) is None
    assert spearman([1, 2], [1, 2]) is None


@settings(derandomize=True, max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(0.1, 1.0), st.floats(0.1, 1.0)), min_size=1, max_size=8
    )
)  # fmt: skip
def test_regret_is_what_the_pick_costs_over_the_best(times: list[tuple[float, float]]) -> None:
    runs = group_of(*times)
    predicted = {run.plan.label: run.predicted_s for run in runs}
    pick = min(times, key=lambda pair: pair[0])[1]
    best = min(measured for _, measured in times)
    assert regret(runs, predicted, 1) == pytest.approx(pick / best - 1)
    assert regret(runs, predicted, len(times)) == 0.0
    top3 = regret(runs, predicted, 3)
    assert top3 is not None
    assert 0.0 <= top3 <= pick / best - 1 + 1e-12


def test_regret_is_of_the_worst_batch_group_and_never_across_groups() -> None:
    small = [sample_run(plan_with(4), 0.1, 0.1), sample_run(plan_with(2, size=2), 0.2, 0.2)]
    large = [sample_run(plan_with(8), 0.5, 0.66), sample_run(plan_with(4, size=2), 0.6, 0.6)]
    runs = small + large
    predicted = {run.plan.label: run.predicted_s for run in runs}
    assert regret(runs, predicted, 1) == pytest.approx(0.1)
    assert regret(runs, predicted, 3) == 0.0


@settings(derandomize=True, max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=2, max_size=8),
    st.sampled_from([0.0, 0.1, 0.3]),
)
def test_pairs_ordered_counts_pairs_beyond_twice_the_noise(
    times: list[tuple[int, int]], noise: float
) -> None:
    runs = group_of(*((float(p), float(m)) for p, m in times), noise=noise)
    counted = [
        (a[0] < b[0]) == (a[1] < b[1])
        for a, b in combinations(times, 2)
        if max(a[1], b[1]) / min(a[1], b[1]) - 1 > 2 * noise
    ]
    expected = sum(counted) / len(counted) if counted else None
    assert pairs_ordered(runs, 0.0) == (None if expected is None else pytest.approx(expected))


def test_noise_floor_compares_odd_with_even_rounds() -> None:
    def run(even: float, odd: float) -> Run:
        return sample_run(
            plan_with(4), 0.1, 0.1, samples_s=(even, even, odd, odd), rounds=(0, 0, 1, 1)
        )

    assert noise_floor([run(0.1, 0.11), run(0.1, 0.1), run(0.1, 0.13)]) == pytest.approx(0.1)
    assert noise_floor([sample_run(plan_with(4), 0.1, 0.1, rounds=(0, 0, 0))]) is None


def test_the_winner_stands_alone_or_the_tie_names_everyone_in_it() -> None:
    clear = summarise(group_of((1, 1.0), (2, 1.2), noise=0.05), exhaustive=True)
    assert clear.winner == "1f1b P4 V1 b1 M2520"
    assert clear.tied_with == ()
    tied = summarise(group_of((1, 1.0), (2, 1.09), (3, 1.5), noise=0.05), exhaustive=True)
    assert tied.winner == "tie"
    assert tied.tied_with == ("1f1b P4 V1 b1 M2520", "1f1b P4 V1 b2 M1260")


def test_failed_and_calibrating_runs_are_no_evidence() -> None:
    runs = group_of((1.1, 1.0), (1.5, 1.2), (9.0, 1.3))
    calibrated = runs[2].plan.label
    failed = sample_run(plan_with(1, size=2520), 0.1, None)
    summary = summarise([*runs, failed], exhaustive=False, calibrated=frozenset({calibrated}))
    assert summary.num_plans == 2
    assert summary.mape == pytest.approx((0.1 + 0.25) / 2)
    assert summary.max_abs_error == pytest.approx(0.25)
    assert summary.regret_top1 is None  # only an exhaustive run knows the best plan
    nothing = summarise([failed], exhaustive=True)
    assert (nothing.winner, nothing.mape, nothing.regret_top1) == (None, None, None)


def test_speedup_is_of_the_pick_over_the_baseline_as_measured() -> None:
    runs = group_of((1.0, 1.1), (1.2, 1.0))
    baseline = sample_run(plan_with(1260, size=2), 1.3, 1.32, is_baseline=True)
    summary = summarise([*runs, baseline], exhaustive=False)
    assert summary.speedup_over_baseline == pytest.approx(1.32 / 1.1)
    assert summary.order_kept is False


def test_speedup_is_of_the_fastest_run_where_runs_chose_the_plan() -> None:
    runs = group_of((1.0, 1.1), (1.2, 1.0))
    baseline = sample_run(plan_with(1260, size=2), 1.3, 1.32, is_baseline=True)
    summary = summarise([*runs, baseline], exhaustive=False, found_by_running=True)
    assert summary.speedup_over_baseline == pytest.approx(1.32 / 1.0)


def test_simpler_models_are_judged_on_the_same_runs() -> None:
    runs = group_of((1.0, 1.0), (1.2, 1.2), (1.4, 1.4))
    upside_down = {run.plan.label: 2.0 / run.predicted_s for run in runs}
    summary = summarise(
        runs, exhaustive=True,
        models={"upside down": lambda plan: upside_down[plan.label], "mute": lambda plan: None},
    )  # fmt: skip
    judged = summary.models["upside down"]
    assert judged.regret_top1 == pytest.approx(0.4)
    assert judged.mape == pytest.approx(
        (abs(2 / 1 - 1) + abs(2 / 1.44 - 1) + abs(2 / 1.96 - 1)) / 3
    )
    assert (summary.models["mute"].mape, summary.models["mute"].regret_top1) == (None, None)
