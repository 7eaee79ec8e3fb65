"""The fastest plan found by running plans, in an optuna study that survives its process.

A trial is one visit of a plan; its parameter is the plan's index. Which plan is next follows from
what the finished visits say (residuals.py): the one that most likely beats the best plan so far,
until it is unlikely that any does; then the plans that may be the best are visited in turn until
they can be told apart. A study is used by one process at a time.
"""

import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from pptune.errors import NoAnswer, RankFailure
from pptune.plan import Plan
from pptune.units import format_ratio, format_seconds
from pptune.validate.residuals import TIE_RATIO, Outlook, Residuals
from pptune.validate.rounds import Entry, Rounds, RunPlan, run_rounds
from pptune.validate.visit_study import VisitStudy
from pptune.validation_file import Run

_ENOUGH_DOUBT = 0.1
"""Exploring ends when the chance that any other plan is worthwhile falls below this."""

_CLEARLY_SLOWER = 0.02
"""A plan whose chance to be faster than the best is below this is out of the race, unless later
visits change that."""

_EXPLORING_SHARE = 0.6
"""Share of the budget after which the best plans are confirmed before others are tried."""

_FAR_SLOWER = 1.5
"""A plan is visited for being different only if less than so many times the best is expected."""

_FINALISTS = 4
"""Plans confirmed at most, besides the baseline."""

_EXTRA_ROUNDS = 2
"""At most this many times the asked visits again for finalists that can't be told apart."""

_LOST_TOO_OFTEN = 2
"""A plan during whose visits the search died so often is not visited again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What the visits gave."""

    runs: list[Run]
    """Of the plans that were visited, in the order of the entries."""
    warnings: tuple[str, ...] = ()
    """What the budget did not suffice for."""


def search_by_running(
    entries: Sequence[Entry],
    run: RunPlan,
    *,
    study: VisitStudy,
    budget_s: float,
    rounds: Rounds,
    resumed: Sequence[Run] = (),
    on_visit: Callable[[float, float, Plan], None] = lambda spent_s, budget_s, plan: None,
    on_saved: Callable[[list[Run]], None] = lambda runs: None,
    on_failed: Callable[[Plan, RankFailure], None] = lambda plan, failure: None,
    clock: Callable[[], float] = time.monotonic,
) -> Found:
    """Visit the plans that matter within the budget, and the best `rounds.repeats` times.

    `study` is one of the entries' plans. Its earlier visits count, in results and in budget, and
    are not repeated; so do `resumed` runs, but their time is not known. A plan that fails is marked
    as infeasible and not visited again. Raises NoAnswer where nothing was visited, FileError where
    the study's storage fails.
    """
    barred = [index for index, times in study.num_lost().items() if times >= _LOST_TOO_OFTEN]
    board = _Board(entries, rounds, barred)
    board.runs.update(_known_runs(entries, [*resumed, *study.runs()], run, rounds))
    while study.spent_s < budget_s:
        index = board.next_index(exploring=study.spent_s < _EXPLORING_SHARE * budget_s)
        if index is None:
            break
        on_visit(study.spent_s, budget_s, entries[index].plan)
        trial, started = study.start(index), clock()
        after = _visit(entries[index], board.runs.get(index), run, rounds, on_failed)
        board.runs[index] = after
        study.finish(
            trial,
            after,
            _visit_times(after)[-1] if after.status == "ok" else None,
            slower=board.is_clearly_slower(index),
            elapsed_s=clock() - started,
        )
        on_saved(board.results())
    if not board.runs:
        raise NoAnswer(
            f"the budget of {format_seconds(budget_s)} was spent before a plan had run; "
            "give a larger --budget"
        )
    return Found(runs=board.results(), warnings=tuple(board.doubts()))


def _visit(
    entry: Entry,
    before: Run | None,
    run: RunPlan,
    rounds: Rounds,
    on_failed: Callable[[Plan, RankFailure], None],
) -> Run:
    """The plan's run after one more visit."""
    done = before.rounds[-1] + 1 if before is not None and before.rounds else 0
    (after,) = run_rounds(
        [entry],
        run,
        rounds=replace(rounds, repeats=done + 1, separate=False, budget_s=None),
        resumed=() if before is None else (before,),
        on_failed=on_failed,
    )
    return after


def _known_runs(
    entries: Sequence[Entry], known: Sequence[Run], run: RunPlan, rounds: Rounds
) -> Iterator[tuple[int, Run]]:
    """Runs of earlier processes beside today's predictions; the last of a plan counts."""
    plans = {each.plan for each in known}
    visited = [index for index, entry in enumerate(entries) if entry.plan in plans]
    runs = run_rounds(
        [entries[index] for index in visited],
        run,
        rounds=replace(rounds, repeats=0, separate=False),
        resumed=tuple(known),
    )
    return zip(visited, runs, strict=True)


class _Board:
    """The runs so far, by the index of their entry, and what follows from them."""

    def __init__(self, entries: Sequence[Entry], rounds: Rounds, barred: Sequence[int]) -> None:
        self.runs: dict[int, Run] = {}
        self._entries = entries
        self._rounds = rounds
        self._barred = barred
        self._residuals = Residuals(
            [entry.plan for entry in entries],
            [entry.predicted.step_time_s for entry in entries],
        )

    def results(self) -> list[Run]:
        return [run for _, run in sorted(self.runs.items())]

    def outlook(self) -> Outlook | None:
        """None before the first success."""
        visits = [
            (index, seconds)
            for index, run in self.runs.items()
            if run.status == "ok"
            for seconds in _visit_times(run)
        ]
        return self._residuals.outlook(visits) if visits else None

    def next_index(self, *, exploring: bool) -> int | None:
        """The plan to visit next; None when all that matters is known."""
        outlook = self.outlook()
        if outlook is None:
            return min(
                self._untried(),
                key=lambda index: self._entries[index].predicted.step_time_s,
                default=None,
            )
        promising = self._most_promising(outlook)
        if exploring and promising is not None:
            return promising
        finalists = self._finalists(outlook)
        lagging = self._least_visited(self._to_confirm(outlook), self._rounds.repeats)
        if lagging is not None or promising is not None:
            return promising if lagging is None else lagging
        if len(finalists) > 1 and self._rounds.separate:
            return self._least_visited(finalists, self._rounds.repeats * (1 + _EXTRA_ROUNDS))
        return None

    def _most_promising(self, outlook: Outlook) -> int | None:
        """Of the plans not tried the likeliest to be worthwhile; once hardly any is, one with a
        value of V, b and so on that no visit has tested: there the model may be wrong."""
        if self._chance_of_others(outlook) >= _ENOUGH_DOUBT:
            return max(self._untried(), key=lambda index: outlook.chance_worthwhile[index])
        tested = {value for index in self.runs for value in _axes(self._entries[index].plan)}
        limit_s = _FAR_SLOWER * outlook.expected_s[outlook.best]
        different = [
            index
            for index in self._untried()
            if outlook.expected_s[index] < limit_s
            and not _axes(self._entries[index].plan) <= tested
        ]
        return min(different, key=lambda index: outlook.expected_s[index], default=None)

    def is_clearly_slower(self, index: int) -> bool:
        """Whether the plan is out of the race."""
        outlook = self.outlook()
        return (
            outlook is not None
            and index != outlook.best
            and outlook.chance_faster[index] < _CLEARLY_SLOWER
        )

    def doubts(self) -> Iterator[str]:
        """What the budget did not suffice for, and plans left out."""
        for index in self._barred:
            yield (
                f"{self._entries[index].plan.label} was being visited {_LOST_TOO_OFTEN} times when "
                "the search died: it is not visited again"
            )
        outlook = self.outlook()
        if outlook is None:
            return
        chance = self._chance_of_others(outlook)
        if chance >= _ENOUGH_DOUBT:
            yield (
                f"{len(self.runs)} of {len(self._entries)} plans were visited: the chance that "
                f"another is more than {format_ratio(TIE_RATIO)} faster is {format_ratio(chance)}; "
                "give a larger --budget"
            )
        if self._least_visited(self._to_confirm(outlook), self._rounds.repeats) is not None:
            yield (
                f"the budget ended before the best plans had been visited {self._rounds.repeats} "
                "times each: the winner is uncertain; give a larger --budget"
            )

    def _untried(self) -> list[int]:
        return [
            index
            for index in range(len(self._entries))
            if index not in self.runs and index not in self._barred
        ]

    def _chance_of_others(self, outlook: Outlook) -> float:
        """That any plan not tried is worthwhile, as if they were independent."""
        return float(1 - np.prod(1 - outlook.chance_worthwhile[self._untried()]))

    def _to_confirm(self, outlook: Outlook) -> set[int]:
        """The finalists, the baseline, and the plan that looks the fastest, by luck or not."""
        measured = {i: run.measured_s for i, run in self.runs.items() if run.status == "ok"}
        fastest = min(measured, key=lambda index: measured[index] or math.inf)
        return {*self._finalists(outlook), *self._baseline(), fastest}

    def _finalists(self, outlook: Outlook) -> list[int]:
        """The plans that may be the best, likeliest first."""
        running = [
            index
            for index, run in self.runs.items()
            if run.status == "ok"
            and (index == outlook.best or outlook.chance_faster[index] >= _CLEARLY_SLOWER)
        ]
        return sorted(running, key=lambda index: outlook.expected_s[index])[:_FINALISTS]

    def _baseline(self) -> list[int]:
        return [
            index
            for index, entry in enumerate(self._entries)
            if entry.is_baseline
            and index not in self._barred
            and (index not in self.runs or self.runs[index].status == "ok")
        ]

    def _least_visited(self, indices: Collection[int], enough: int) -> int | None:
        """Of the plans with fewer visits than `enough` one that has the fewest."""
        visits = {
            i: len(_visit_times(self.runs[i])) if i in self.runs else 0 for i in sorted(indices)
        }
        least = min(visits, key=visits.__getitem__, default=None)
        return None if least is None or visits[least] >= enough else least


def _axes(plan: Plan) -> set[tuple[str, object]]:
    """The values that a plan takes of the axes of a search."""
    names = ("schedule", "num_ranks", "num_chunks", "microbatch_size", "recompute")
    return {(name, getattr(plan, name)) for name in names}


def _visit_times(run: Run) -> list[float]:
    """The median step of each visit, in seconds."""
    visits: dict[int, list[float]] = {}
    for number, sample in zip(run.rounds, run.samples_s, strict=False):
        visits.setdefault(number, []).append(sample)
    return [median(samples) for samples in visits.values()]
