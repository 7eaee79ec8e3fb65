"""Scoring many plans: play those that may win, exclude by a proven bound those that cannot."""

import contextlib
import heapq
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from pptune.cost_model import CostModel, breakdown
from pptune.errors import MissingNumber
from pptune.plan import Plan

REASONS = ("compute", "bubble", "exposed-transfer", "overhead", "step-constant")
"""Why a plan is slower than another: the part of its step that is longer by most."""

Progress = Callable[[int, int], None]
"""(plans done, plans in all)."""

_PROGRESS_EVERY = 200


class OutOfTime(Exception):
    """The deadline passed; what was scored until then stays."""


class Scores:
    """What is known of each plan of a list, by its index; NaN where it is not known (yet)."""

    def __init__(self, model: CostModel, plans: Sequence[Plan]) -> None:
        """Bounds of all plans; those that lack a number in the profile are counted as missing."""
        self.model = model
        self.plans = plans
        self.step_s = np.full(len(plans), np.nan)
        self.bound_s = np.full(len(plans), np.nan)
        self.parts_s = np.full((len(plans), len(REASONS)), np.nan)
        self.peak_bytes = np.full(len(plans), np.nan)
        self.fits = np.ones(len(plans), dtype=np.bool_)
        """False where the plan is known not to fit."""
        self.missing: Counter[str] = Counter()
        self.missing_reasons: dict[str, str] = {}
        self._judged = np.zeros(len(plans), dtype=np.bool_)
        self._sized = np.zeros(len(plans), dtype=np.bool_)
        for start, stop in families(plans):
            plan = plans[start]
            try:
                bound = model.inputs(plan).bound
            except MissingNumber as error:
                self.missing[error.rule] += stop - start
                self.missing_reasons.setdefault(error.rule, str(error))
                continue
            self.bound_s[start:stop] = bound.step_s(plan.num_microbatches)
            if model.limits_memory:
                for index, fits in enumerate(model.surely_fit(plans[start:stop]), start):
                    if fits is not None:
                        self.fits[index], self._judged[index] = fits, True

    @property
    def known(self) -> NDArray[np.intp]:
        """Indices of plans that can be predicted, most promising first."""
        order = np.argsort(self.bound_s, kind="stable")
        return order[: np.count_nonzero(~np.isnan(self.bound_s))]

    @property
    def num_unfit(self) -> int:
        """Plans known not to fit in memory."""
        return int(np.count_nonzero(~self.fits))

    def judge(self, index: int) -> bool:
        """Whether the plan fits (or is not known not to); its peak is left open where it can be."""
        return bool(self.fits[index]) if self._judged[index] else self.size(index)

    def size(self, index: int) -> bool:
        """Find the plan's peak memory; whether it fits (or is not known not to)."""
        if not self._sized[index]:
            peaks = self.model.peak_bytes(self.plans[index])
            self._sized[index] = self._judged[index] = True
            if peaks is not None:
                self.peak_bytes[index] = peaks.max()
            self.fits[index] = self.model.fits(peaks) != "no"
        return bool(self.fits[index])

    def play(self, index: int) -> float:
        """The plan's step time, played once."""
        if np.isnan(self.step_s[index]):
            played = self.model.evaluate(self.plans[index])
            self.step_s[index] = played.step_time_s
            parts = breakdown(played.simulation, played.inputs.constant_s, played.step_time_s)
            self.parts_s[index] = (parts.compute, parts.bubble, parts.exposed_transfer,
                                   parts.overhead, parts.step_constant)  # fmt: skip
        return float(self.step_s[index])

    def fastest(
        self,
        indices: Iterable[int],
        top: int,
        *,
        deadline: float | None = None,
        on_progress: Progress | None = None,
    ) -> list[int]:
        """The `top` fastest of the plans at `indices` that fit, best first.

        `indices` come with ascending bounds. Once `top` plans are faster than the next bound, no
        later plan can be among them: it is only judged, so that what does not fit is counted.
        Raises OutOfTime past the deadline (time.monotonic).
        """
        best: list[tuple[float, int]] = []  # a heap of (-step time, -index): the slowest on top
        for index in _watched(indices, deadline, on_progress):
            hopeless = len(best) == top and self.bound_s[index] >= -best[0][0]
            if hopeless and not self.model.limits_memory:
                break
            if not self.judge(index) or hopeless:
                continue
            entry = (-self.play(index), -index)
            if len(best) < top:
                heapq.heappush(best, entry)
            else:
                heapq.heappushpop(best, entry)
        return [-index for _, index in sorted(best, reverse=True)]

    def leanest(
        self,
        indices: Iterable[int],
        top: int,
        *,
        deadline: float | None = None,
        on_progress: Progress | None = None,
    ) -> list[int]:
        """The `top` plans with the smallest peak memory, then step time, best first.

        Raises OutOfTime past the deadline.
        """
        wanted = list(indices)
        for index in _watched(wanted, deadline, on_progress):
            self.size(index)
        fitting = sorted((self.peak_bytes[i], i) for i in wanted if self.fits[i])
        if not fitting:
            return []
        most = fitting[min(top, len(fitting)) - 1][0]
        ranked = sorted((peak, self.play(i), i) for peak, i in fitting if peak <= most)
        return [index for *_, index in ranked[:top]]

    def front(
        self,
        indices: Iterable[int],
        *,
        count_gpus: bool,
        deadline: float | None = None,
        on_progress: Progress | None = None,
    ) -> list[int]:
        """The plans that no other beats in step time, peak memory (and GPUs) at once, by time.

        Raises OutOfTime past the deadline.
        """
        kept: list[tuple[float, float, int, int]] = []
        for index in _watched(indices, deadline, on_progress):
            if not self.size(index):
                continue
            plan = self.plans[index]
            gpus = plan.num_ranks * plan.data_parallel if count_gpus else 0
            cost = (float(self.bound_s[index]), float(self.peak_bytes[index]), gpus)
            if any(_beats(other, cost) for other in kept):
                continue
            cost = (self.play(index), *cost[1:])
            if any(_beats(other, cost) for other in kept):
                continue
            kept = [other for other in kept if not _beats(cost, other)]
            kept.append((*cost, index))
        return [index for *_, index in sorted(kept)]

    def lost_by(self, pick: int) -> Counter[str]:
        """Plans other than the pick by why they lost to it."""
        lost: Counter[str] = Counter()
        lost["memory"] = self.num_unfit
        for start, stop in families(self.plans):
            unplayed = np.isnan(self.step_s[start:stop]) & ~np.isnan(self.bound_s[start:stop])
            if unplayed.any():
                plan = self.plans[start]
                parts = self.model.inputs(plan).bound.parts_s(plan.num_microbatches)
                self.parts_s[start:stop][unplayed] = parts
        longer_s = self.parts_s - self.parts_s[pick]
        losers = ~np.isnan(longer_s[:, 0]) & self.fits
        losers[pick] = False
        for reason in longer_s[losers].argmax(axis=1):
            lost[REASONS[reason]] += 1
        return +lost


def _watched(
    indices: Iterable[int], deadline: float | None, on_progress: Progress | None
) -> Iterator[int]:
    """The indices, with word of how far they are; all are done where the caller stops earlier.

    Raises OutOfTime past the deadline.
    """
    wanted = list(indices)
    with contextlib.suppress(GeneratorExit):
        for done, index in enumerate(wanted):
            if done % _PROGRESS_EVERY == 0:
                if deadline is not None and time.monotonic() > deadline:
                    raise OutOfTime
                if on_progress is not None:
                    on_progress(done, len(wanted))
            yield index
    if on_progress is not None:
        on_progress(len(wanted), len(wanted))


def families(plans: Sequence[Plan]) -> Iterator[tuple[int, int]]:
    """Ranges of neighbouring plans that differ in their micro-batch group size alone."""

    def shared(plan: Plan) -> tuple[object, ...]:
        return (plan.schedule, plan.num_ranks, plan.microbatch_size, plan.num_microbatches,
                plan.recompute, plan.data_parallel, id(plan.layers_per_stage))  # fmt: skip

    start = 0
    for _, family in groupby(plans, key=shared):
        stop = start + sum(1 for _ in family)
        yield start, stop
        start = stop


def _beats(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    """Whether `one` is at least as good in every objective; of two equal plans the first stays."""
    return all(a <= b for a, b in zip(one[:3], other[:3], strict=True))
