"""What a prediction answers, and what stands in its place where there is none."""

from typing import Literal

import msgspec

from pptune.plan import Plan
from pptune.profiles import Source

_SUM_TOLERANCE = 1e-6


class Breakdown(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The slowest rank's step, split; the parts sum to the step time."""

    compute: float
    bubble: float
    """Waiting until the producer had finished."""
    exposed_transfer: float
    """Waiting after the producer had finished, and the rank's own time in sends and receives."""
    overhead: float
    step_constant: float


class Estimate(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A plan's predicted step on a profile."""

    step_time_s: float
    longest_rank_span_s: float
    """The longest of the ranks' spans from first action to last (the zero-bubble papers' cost)."""
    bubble_ratio: float
    """Idle / total over all ranks."""
    ideal_time_s: float
    """M (t_f + t_b) of the busiest rank."""
    breakdown_s: Breakdown
    peak_memory_bytes: tuple[int, ...] | None
    """One per rank, or null where the profile has no memory numbers."""
    fits: Literal["yes", "borderline", "no", "unknown"]
    tokens_per_s: float | None
    mfu: float | None
    """Model FLOP/s over the dense peak, or null where the peak is not known."""
    source: Source
    """The weakest source among the numbers used: a prediction is no better than its inputs."""
    assumptions: tuple[str, ...] = ()
    """What was assumed rather than measured, in words."""


class Infeasible(msgspec.Struct, frozen=True, kw_only=True):
    """A plan without an estimate, and why."""

    rule: str
    """A short code to count by, such as `memory` or `layers-not-divisible`."""
    reason: str
    """The rule, the values and what to change."""


class PredictedPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A plan and its estimate; what `predict --format json` prints."""

    plan: Plan
    estimate: Estimate


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """One row of a ranking."""

    rank: int
    """Place in the ranking, 1 = best."""
    plan: Plan
    estimate: Estimate
    speedup_over_baseline: float | None = None
    """Baseline step time / this step time."""


def broken_estimate_rule(predicted: PredictedPlan | Candidate) -> str | None:
    """What can't be in an estimate that was read from a file, or None."""
    estimate, plan = predicted.estimate, predicted.plan
    if not estimate.step_time_s > 0:
        return f"step_time_s is {estimate.step_time_s}; it must be above 0"
    parts = sum(msgspec.structs.astuple(estimate.breakdown_s))
    if abs(parts / estimate.step_time_s - 1) > _SUM_TOLERANCE:
        return f"breakdown_s sums to {parts}, but step_time_s is {estimate.step_time_s}"
    if estimate.bubble_ratio > 1 or (estimate.mfu or 0) > 1:
        return "bubble_ratio and mfu must lie in 0..1"
    peaks = estimate.peak_memory_bytes
    if peaks is not None and len(peaks) != plan.num_ranks:
        return f"peak_memory_bytes has {len(peaks)} entries for {plan.num_ranks} ranks"
    return None
