"""Run plans for real, interleaved in time, and say how the predictions held.

Every round visits every plan once, in an order that turns from round to round, so that drift of
the machine hits all plans alike. After the asked rounds, plans that can't be told apart from the
best one get more, until they can or the budget ends.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

from pptune.errors import RankFailure
from pptune.estimate import Breakdown, Estimate
from pptune.measured_step import Visit, breakdown, timeline
from pptune.measurement import Measurement
from pptune.plan import Plan
from pptune.validation_file import RecordedAction, Run

_EXTRA_ROUNDS = 2
"""At most this many times the asked rounds again for plans that can't be told apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A plan to run and what was predicted for it."""

    plan: Plan
    predicted: Estimate
    is_baseline: bool = False


RunPlan = Callable[..., Visit]
"""`run(plan, steps=..., memory=...)`; raises RankFailure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """How often plans are visited."""

    repeats: int = 5
    steps_per_visit: int = 2
    budget_s: float | None = None
    """No new visit starts after this; None means no limit."""
    record_timeline: bool = False
    separate: bool = True
    """Whether plans that can't be told apart from the best get more rounds."""


@dataclass(slots=True)
class _State:
    """A plan's measurements so far."""

    entry: Entry
    samples: list[float] = field(default_factory=list)
    rounds: list[int] = field(default_factory=list)
    breakdowns: list[Breakdown] = field(default_factory=list)
    peak_memory_bytes: tuple[int, ...] | None = None
    timeline: tuple[RecordedAction, ...] | None = None
    status: str = "ok"
    reason: str | None = None

    def next_round(self) -> int:
        return self.rounds[-1] + 1 if self.rounds else 0

    def run(self, *, with_timeline: bool) -> Run:
        measurement = Measurement(samples_s=tuple(self.samples)) if self.samples else None
        predicted = self.entry.predicted.step_time_s
        measured = None if measurement is None else measurement.median_s
        return Run(
            plan=self.entry.plan,
            predicted_s=predicted,
            measured_s=measured,
            samples_s=tuple(self.samples),
            rounds=tuple(self.rounds),
            noise_ratio=None
            if measurement is None or math.isinf(measurement.noise_ratio)
            else measurement.noise_ratio,
            measured_breakdown_s=_median_breakdown(self.breakdowns, measured),
            predicted_breakdown_s=self.entry.predicted.breakdown_s,
            error_ratio=None if measured is None else predicted / measured - 1,
            peak_memory_bytes=self.peak_memory_bytes,
            predicted_peak_memory_bytes=self.entry.predicted.peak_memory_bytes,
            status=self.status,  # type: ignore[arg-type]
            reason=self.reason,
            is_baseline=self.entry.is_baseline,
            timeline=self.timeline if with_timeline else None,
        )


def run_rounds(
    entries: list[Entry],
    run: RunPlan,
    *,
    rounds: Rounds,
    resumed: tuple[Run, ...] = (),
    on_visit: Callable[[int, int, Plan], None] = lambda done, total, plan: None,
    on_saved: Callable[[list[Run]], None] = lambda runs: None,
    on_failed: Callable[[Plan, RankFailure], None] = lambda plan, failure: None,
    clock: Callable[[], float] = time.monotonic,
) -> list[Run]:
    """Visit every entry `rounds.repeats` times and more where it takes more to tell plans apart.

    `on_saved` is called after every visit with all runs so far, so that an interruption loses
    nothing. A plan that fails is marked, told to `on_failed` and not visited again; the others go
    on.
    """
    states = [_resume(entry, resumed) for entry in entries]
    deadline = None if rounds.budget_s is None else clock() + rounds.budget_s

    def results() -> list[Run]:
        return [state.run(with_timeline=rounds.record_timeline) for state in states]

    def out_of_time() -> bool:
        return deadline is not None and clock() > deadline

    number = min((state.next_round() for state in states if state.status == "ok"), default=0)
    total = rounds.repeats * len(states)
    last = rounds.repeats * (1 + _EXTRA_ROUNDS if rounds.separate else 1)
    while number < last and not out_of_time():
        alive = [state for state in states if state.status == "ok"]
        if number >= rounds.repeats:
            alive = _undecided(alive)
        if not alive:
            break
        for state in _turned(alive, number):
            if state.next_round() > number or out_of_time():
                continue
            done = sum(len(set(each.rounds)) for each in states)
            on_visit(done, max(total, done + 1), state.entry.plan)
            _visit(state, run, number, rounds, on_failed)
            on_saved(results())
        number += 1
    return results()


def _resume(entry: Entry, resumed: tuple[Run, ...]) -> _State:
    state = _State(entry)
    for old in resumed:
        if old.plan == entry.plan:
            state.samples, state.rounds = list(old.samples_s), list(old.rounds)
            state.peak_memory_bytes = old.peak_memory_bytes
            state.status, state.reason = old.status, old.reason
            state.timeline = old.timeline
            if old.measured_breakdown_s is not None:
                state.breakdowns = [old.measured_breakdown_s]
    return state


def _visit(
    state: _State,
    run: RunPlan,
    number: int,
    rounds: Rounds,
    on_failed: Callable[[Plan, RankFailure], None],
) -> None:
    try:
        visit = run(
            state.entry.plan,
            steps=rounds.steps_per_visit,
            memory=state.peak_memory_bytes is None,
        )
        _check_times(visit)
    except RankFailure as failure:
        state.status, state.reason = failure.reason, failure.line
        on_failed(state.entry.plan, failure)
        return
    state.samples += visit.samples_s
    state.rounds += [number] * len(visit.samples_s)
    if visit.peak_memory_bytes is not None:
        state.peak_memory_bytes = visit.peak_memory_bytes
    for step in visit.steps:
        split = breakdown(step, state.entry.plan)
        if split is not None:
            state.breakdowns.append(split)
            state.timeline = timeline(step)


def _check_times(visit: Visit) -> None:
    """Raise RankFailure for a step that took no time or less, or for ever: the clock lies."""
    for sample in visit.samples_s:
        if not 0 < sample < math.inf:
            raise RankFailure(
                f"a step took {sample} s: the clock is too coarse or was set back; run more work "
                "per step, on a machine with a monotonic clock",
                rank=None,
                reason="crash",
            )


def _turned(states: list[_State], number: int) -> list[_State]:
    """Forwards and backwards in turn, each time from another plan on."""
    shift = number // 2 % len(states)
    turned = states[shift:] + states[:shift]
    return turned if number % 2 == 0 else turned[::-1]


def _undecided(states: list[_State]) -> list[_State]:
    """The best plan and those whose confidence interval touches its; empty when it stands alone."""
    sampled = [
        (state, Measurement(samples_s=tuple(state.samples))) for state in states if state.samples
    ]
    if not sampled:
        return []
    best = min((measurement for _, measurement in sampled), key=lambda each: each.median_s)
    touching = [state for state, measurement in sampled if _touches(measurement, best)]
    return touching if len(touching) > 1 else []


def _touches(a: Measurement, b: Measurement) -> bool:
    return abs(a.median_s - b.median_s) <= a.half_width_s + b.half_width_s


def _median_breakdown(splits: list[Breakdown], measured_s: float | None) -> Breakdown | None:
    """The medians of the parts over visits, scaled to sum to the measured step time."""
    if not splits or measured_s is None:
        return None
    names = ("compute", "bubble", "exposed_transfer", "overhead", "step_constant")
    medians = [median([getattr(split, name) for split in splits]) for name in names]
    scale = measured_s / sum(medians)
    return Breakdown(**{name: value * scale for name, value in zip(names, medians, strict=True)})
