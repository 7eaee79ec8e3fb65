"""Rounds over plans with made-up runs: order, failures, budget, resuming, lying clocks."""

import itertools
from collections import Counter
from collections.abc import Callable

import pytest

from pptune.errors import RankFailure
from pptune.estimate import Breakdown
from pptune.measured_step import MeasuredAction, MeasuredStep, Visit
from pptune.plan import Plan
from pptune.profiles import Reference
from pptune.validate import doubts, speed_changes
from pptune.validate.rounds import Entry, Rounds, run_rounds
from pptune.validation_file import Run
from tests.sample_documents import sample_estimate, sample_plan

A = sample_plan("1f1b", chunks=1, microbatches=4, layers=(4,) * 4)
B = sample_plan("1f1b", chunks=1, microbatches=8, layers=(4,) * 4)
C = sample_plan("interleaved", chunks=2, microbatches=8, layers=(2,) * 8)
ENTRIES = [Entry(plan=plan, predicted=sample_estimate(0.1)) for plan in (A, B, C)]
ONCE = Rounds(repeats=3, steps_per_visit=2, separate=False)


def steady(seconds: dict[Plan, float], visited: list[Plan]) -> Callable[..., Visit]:
    """A machine on which every step of a plan takes the same time, to 1 %."""
    jitter = itertools.cycle((0.0, 0.01, -0.01))

    def run(plan: Plan, *, steps: int, memory: bool) -> Visit:
        visited.append(plan)
        return Visit(
            samples_s=tuple(seconds[plan] * (1 + next(jitter)) for _ in range(steps)),
            peak_memory_bytes=(1, 2, 3, 4) if memory else None,
        )

    return run


def test_every_plan_is_visited_in_every_round_from_another_start() -> None:
    visited: list[Plan] = []
    runs = run_rounds(ENTRIES, steady({A: 0.1, B: 0.2, C: 0.3}, visited), rounds=ONCE)
    rounds = [visited[first : first + 3] for first in (0, 3, 6)]
    assert all(set(each) == {A, B, C} for each in rounds)
    assert rounds[0] == rounds[1][::-1]
    assert rounds[2][0] != rounds[0][0]
    for run in runs:
        assert run.rounds == (0, 0, 1, 1, 2, 2)
        assert run.peak_memory_bytes == (1, 2, 3, 4)
    assert [run.measured_s for run in runs] == pytest.approx([0.1, 0.2, 0.3], rel=0.011)
    assert [run.error_ratio for run in runs] == pytest.approx([0.0, -0.5, -0.6667], abs=0.011)


@pytest.mark.parametrize("reason", ["crash", "oom", "timeout"])
def test_a_failing_plan_is_marked_once_and_the_others_go_on(reason: str) -> None:
    visited: list[Plan] = []
    good = steady({A: 0.1, C: 0.3}, visited)
    told: list[tuple[Plan, RankFailure]] = []

    def run(plan: Plan, *, steps: int, memory: bool) -> Visit:
        if plan == B:
            visited.append(plan)
            raise RankFailure(
                "rank 1 failed while running 1F0:\n  a\n  E: no", rank=1, reason=reason
            )
        return good(plan, steps=steps, memory=memory)

    runs = run_rounds(
        ENTRIES, run, rounds=ONCE, on_failed=lambda plan, failure: told.append((plan, failure))
    )
    assert Counter(visited) == {A: 3, B: 1, C: 3}
    assert [each.status for each in runs] == ["ok", reason, "ok"]
    assert runs[1].reason == "rank 1 failed while running 1F0: E: no"
    assert (runs[1].measured_s, runs[1].samples_s, runs[1].error_ratio) == (None, (), None)
    assert [plan for plan, _ in told] == [B]
    assert "\n" in str(told[0][1])


def test_resuming_repeats_nothing_wherever_it_was_stopped() -> None:
    whole: list[Plan] = []
    seconds = {A: 0.1, B: 0.2, C: 0.3}
    run_rounds(ENTRIES, steady(seconds, whole), rounds=ONCE)
    for stop_after in range(len(whole) + 1):
        before: list[Plan] = []
        saved: list[list[Run]] = [[]]
        machine = steady(seconds, before)

        def run(
            plan: Plan,
            *,
            steps: int,
            memory: bool,
            machine: Callable[..., Visit] = machine,
            before: list[Plan] = before,
            stop_after: int = stop_after,
        ) -> Visit:
            if len(before) == stop_after:
                raise KeyboardInterrupt
            return machine(plan, steps=steps, memory=memory)

        if stop_after < len(whole):
            with pytest.raises(KeyboardInterrupt):
                run_rounds(ENTRIES, run, rounds=ONCE, on_saved=saved.append)
        else:
            run_rounds(ENTRIES, run, rounds=ONCE, on_saved=saved.append)
        after: list[Plan] = []
        runs = run_rounds(ENTRIES, steady(seconds, after), rounds=ONCE, resumed=tuple(saved[-1]))
        assert before + after == whole
        assert all(len(each.samples_s) == 6 for each in runs)


def test_a_resumed_failure_is_not_run_again_and_keeps_its_reason() -> None:
    visited: list[Plan] = []
    failed = run_rounds(
        ENTRIES[:1],
        lambda plan, **_: (_ for _ in ()).throw(RankFailure("no", rank=0, reason="oom")),
        rounds=ONCE,
    )
    runs = run_rounds(
        ENTRIES, steady({B: 0.1, C: 0.2}, visited), rounds=ONCE, resumed=tuple(failed)
    )
    assert A not in visited
    assert (runs[0].status, runs[0].reason) == ("oom", "no")


def test_plans_that_cannot_be_told_apart_get_more_rounds_and_others_do_not() -> None:
    visited: list[Plan] = []
    run_rounds(
        ENTRIES,
        steady({A: 0.1, B: 0.1001, C: 0.3}, visited),
        rounds=Rounds(repeats=3, separate=True),
    )
    counts = Counter(visited)
    assert counts[C] == 3
    assert counts[A] == counts[B] == 9  # at most twice the asked rounds again
    visited.clear()
    run_rounds(
        ENTRIES, steady({A: 0.1, B: 0.2, C: 0.3}, visited), rounds=Rounds(repeats=3, separate=True)
    )
    assert Counter(visited) == {A: 3, B: 3, C: 3}


def test_no_visit_starts_after_the_budget() -> None:
    now = itertools.count()  # each look at the clock takes a second
    visited: list[Plan] = []
    runs = run_rounds(
        ENTRIES,
        steady({A: 1, B: 1, C: 1}, visited),
        rounds=Rounds(repeats=100, budget_s=10, separate=False),
        clock=lambda: float(next(now)),
    )
    assert 0 < len(visited) < 10
    assert len(runs) == 3


def test_everything_so_far_is_handed_over_after_every_visit() -> None:
    saved: list[list[Run]] = []
    run_rounds(ENTRIES, steady({A: 1, B: 1, C: 1}, []), rounds=ONCE, on_saved=saved.append)
    assert [sum(len(run.samples_s) for run in runs) for runs in saved] == list(range(2, 20, 2))


@pytest.mark.parametrize("sample", [0.0, -0.5, float("inf"), float("nan")])
def test_a_step_of_no_time_is_a_failure_and_not_a_measurement(sample: float) -> None:
    runs = run_rounds(ENTRIES[:1], lambda plan, **_: Visit(samples_s=(0.1, sample)), rounds=ONCE)
    assert runs[0].status == "crash"
    assert runs[0].samples_s == ()
    assert "the clock is too coarse or was set back" in (runs[0].reason or "")


def test_one_outlier_of_a_hundredfold_is_said_and_does_not_move_the_result() -> None:
    samples = iter([0.1, 0.101, 0.099, 10.0, 0.1, 0.1005])
    runs = run_rounds(
        ENTRIES[:1], lambda plan, steps, **_: Visit(samples_s=(next(samples), next(samples))),
        rounds=ONCE,
    )  # fmt: skip
    assert runs[0].measured_s == pytest.approx(0.1, rel=0.005)
    assert 10.0 in runs[0].samples_s
    (said,) = doubts(runs)
    assert "1 of 6 samples took up to 99.8 times the median" in said
    assert A.label in said


def test_a_machine_that_changed_its_speed_since_its_profile_is_said() -> None:
    reference = Reference(matrix_size=640, dtype="float32", seconds=10e-3)
    (slower,) = speed_changes(reference, [10.5e-3] * 20)
    assert "was slower than when it was profiled: its reference product took 5.0% longer" in slower
    (faster,) = speed_changes(reference, [9e-3] * 20)
    assert "was faster than when it was profiled: its reference product took 10.0% less" in faster
    assert speed_changes(reference, [10.2e-3] * 20) == []
    assert speed_changes(reference, []) == speed_changes(None, [1.0]) == []


def test_quantised_steps_are_said() -> None:
    runs = run_rounds(
        ENTRIES[:1], lambda plan, steps, **_: Visit(samples_s=(0.015, 0.03)),
        rounds=Rounds(repeats=5, separate=False),
    )  # fmt: skip
    assert any("clock is too coarse" in text for text in doubts(runs))


def step_of(plan: Plan, seconds: float) -> MeasuredStep:
    """A step whose only rank with records works half of it."""
    action = MeasuredAction(
        rank=0, stage=0, work="F", microbatch=0, start_s=0.0, end_s=seconds / 2
    )  # fmt: skip
    return MeasuredStep(
        step_s=seconds, slowest_rank=0, update_s=(seconds / 4,) * 4, rank_s=(seconds,) * 4,
        actions=((action,), (), (), ()), waits=((), (), (), ()),
    )  # fmt: skip


def test_a_runs_breakdown_sums_to_its_measured_time_and_the_timeline_survives_a_resume() -> None:
    def run(plan: Plan, **_: object) -> Visit:
        return Visit(samples_s=(0.2, 0.21), steps=(step_of(plan, 0.2), step_of(plan, 0.21)))

    rounds = Rounds(repeats=1, separate=False, record_timeline=True)
    (first,) = run_rounds(ENTRIES[:1], run, rounds=rounds)
    parts = first.measured_breakdown_s
    assert isinstance(parts, Breakdown)
    total = parts.compute + parts.bubble + parts.exposed_transfer + parts.overhead
    assert total + parts.step_constant == pytest.approx(first.measured_s)
    assert parts.compute == pytest.approx(2 * parts.step_constant)
    assert first.timeline is not None
    (again,) = run_rounds(ENTRIES[:1], run, rounds=rounds, resumed=(first,))
    assert again == first
