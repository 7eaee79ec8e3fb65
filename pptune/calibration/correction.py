"""One number at a time, chosen so that whole steps come out as they were measured."""

import math
from collections.abc import Callable, Mapping

import msgspec

from pptune.calibration.runs import SETTING
from pptune.cost_model import CostModel
from pptune.executors import Executor
from pptune.plan import Plan
from pptune.profiles import Overhead, Profile, StepConstants

MAX_EXTRA_S = 10e-3
"""No runtime needs more than this per action; the search for the last correction ends there."""


def corrected(
    bare: Profile,
    constants: StepConstants,
    executor: Executor,
    overhead: Overhead,
    steps_s: Mapping[Plan, float],
    limit_s: float,
) -> Overhead:
    """`overhead` with one correction per action, the one that fits whole steps best.

    Records miss what jitter costs where two ranks meet: the slower of two sets the pace, so steps
    take longer than the sum of mean times.
    """

    def error(extra_s: float) -> float:
        return misfit(bare, constants, {executor: _shifted(overhead, extra_s)}, steps_s)

    lowest = -min(overhead.forward_s, overhead.backward_s)
    return _shifted(overhead, least(error, lowest, limit_s))


def corrected_hop(
    bare: Profile,
    constants: StepConstants,
    executor: Executor,
    overhead: Overhead,
    steps_s: Mapping[Plan, float],
) -> Overhead:
    """`overhead` with the time per message that fits whole steps best."""

    def with_hop(hop_s: float) -> Overhead:
        return msgspec.structs.replace(overhead, hop_s=hop_s)

    def error(hop_s: float) -> float:
        return misfit(bare, constants, {executor: with_hop(hop_s)}, steps_s)

    return with_hop(least(error, 0.0, MAX_EXTRA_S))


def misfit(
    bare: Profile,
    constants: StepConstants,
    overheads: Mapping[Executor, Overhead],
    steps_s: Mapping[Plan, float],
) -> float:
    """Sum over plans of |log(predicted / measured)|."""
    profile = msgspec.structs.replace(bare, overheads=dict(overheads), step_constants=constants)
    model = CostModel(profile, SETTING)
    return sum(
        abs(math.log(model.evaluate(plan).step_time_s / seconds))
        for plan, seconds in steps_s.items()
    )


def _shifted(overhead: Overhead, extra_s: float) -> Overhead:
    return msgspec.structs.replace(
        overhead,
        forward_s=max(0.0, overhead.forward_s + extra_s),
        backward_s=max(0.0, overhead.backward_s + extra_s),
    )


def least(
    function: Callable[[float], float], low: float, high: float, *, to: float = 1e-6
) -> float:
    """Where a function with one valley is least, by golden section, to within `to`."""
    ratio = (5**0.5 - 1) / 2
    while high - low > to:
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        if function(left) <= function(right):
            high = right
        else:
            low = left
    return (low + high) / 2
