"""One number at a time, chosen so that whole steps come out as they were measured."""

import math
from collections.abc import Callable, Mapping

import msgspec
import numpy as np
from numpy.typing import NDArray

from pptune.calibration.runs import SETTING
from pptune.cost_model import CostModel
from pptune.executors import Executor
from pptune.measurement import t_quantile
from pptune.plan import Plan
from pptune.profiles import Overhead, Profile, StepConstants

_PROBE_S = 1e-5
"""Added to every action to see how much longer a step gets."""

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


def surely_corrected(
    bare: Profile,
    constants: StepConstants,
    executor: Executor,
    overhead: Overhead,
    steps_s: Mapping[Plan, float],
    limit_s: float,
) -> Overhead:
    """The same with no more of the correction than all plans agree on: the end of its 95 % interval
    that is nearer to none. What lies beyond may be how fast the machine was while each of them ran.
    """

    def predicted_s(extra_s: float) -> NDArray[np.float64]:
        changed = {executor: _shifted(overhead, extra_s)}
        model = _model(bare, constants, changed)
        return np.array([model.evaluate(plan).step_time_s for plan in steps_s])

    if len(steps_s) < 2:
        return overhead
    measured_s = np.array(list(steps_s.values()))
    as_recorded_s = predicted_s(0.0)
    per_extra = (predicted_s(_PROBE_S) - as_recorded_s) / _PROBE_S
    wanted_s = (measured_s - as_recorded_s) / per_extra
    # Steps are known to a share of themselves, and show the more the more actions they have.
    weight = (per_extra / measured_s) ** 2
    extra_s = float((weight * wanted_s).sum() / weight.sum())
    freedom = len(wanted_s) - 1
    variance = float((weight * (wanted_s - extra_s) ** 2).sum() / (freedom * weight.sum()))
    sure_s = max(0.0, abs(extra_s) - t_quantile(freedom) * math.sqrt(variance))
    lowest = -min(overhead.forward_s, overhead.backward_s)
    return _shifted(overhead, min(max(math.copysign(sure_s, extra_s), lowest), limit_s))


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
    model = _model(bare, constants, overheads)
    return sum(
        abs(math.log(model.evaluate(plan).step_time_s / seconds))
        for plan, seconds in steps_s.items()
    )


def _model(
    bare: Profile, constants: StepConstants, overheads: Mapping[Executor, Overhead]
) -> CostModel:
    profile = msgspec.structs.replace(bare, overheads=dict(overheads), step_constants=constants)
    return CostModel(profile, SETTING)


def _shifted(overhead: Overhead, extra_s: float) -> Overhead:
    return msgspec.structs.replace(
        overhead,
        forward_s=max(0.0, overhead.forward_s + extra_s),
        backward_s=max(0.0, overhead.backward_s + extra_s),
    )


def least(function: Callable[[float], float], low: float, high: float) -> float:
    """Where a function of seconds with one valley is least, by golden section, to within 1 us."""
    ratio = (5**0.5 - 1) / 2
    while high - low > 1e-6:
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        if function(left) <= function(right):
            high = right
        else:
            low = left
    return (low + high) / 2
