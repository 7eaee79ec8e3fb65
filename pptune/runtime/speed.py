"""Takes the machine's changing speed out of samples of many things timed in turn.

A shared core changes its speed several times a second, and few samples of a thing don't average
that out. But what was timed just before and after says how fast the core was: every lap is set
against the laps around it, each in terms of what it takes on the whole.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pptune.measurement import trimmed_means

Floats = NDArray[np.float64]
Ints = NDArray[np.intp]

_AROUND_S = 0.1
"""How far before and after a lap others count; cores keep their speed about that long."""

_PASSES = 3
"""What things take and how fast the core was are found from each other in turn."""

_LARGEST_RATIO = 2.0
"""No core's speed changes by more; what a lap differs by beyond that is an interruption or a clock
too coarse for it."""


def at_mean_speed(kinds: Sequence[Ints], seconds: Sequence[Floats]) -> list[Floats]:
    """Each rank's `seconds` as they would be at the mean speed of all its laps.

    Both have an array of shape [laps] for each rank, in the order in which the laps ran, one right
    after the other; `kinds` numbers what each timed, from 0 on without gaps over all ranks. A
    rank's total, interruptions apart, stays what it is: one slower than the others is no moment.
    Where the laps around say nothing about a lap, as on a machine whose samples differ by noise
    alone, it stays too.
    """
    all_kinds = np.concatenate(kinds)
    steady_s = list(seconds)
    if not len(all_kinds):
        return steady_s
    for _ in range(_PASSES):
        typical_s = _typical(all_kinds, np.concatenate(steady_s))
        usual_s = [typical_s[each] for each in kinds]
        pairs = list(zip(seconds, usual_s, strict=True))
        around = [_slowness_around(measured_s, usual_s) for measured_s, usual_s in pairs]
        own = [_ratio(_counted(measured_s, usual_s), usual_s) for measured_s, usual_s in pairs]
        share = _share(np.concatenate(own) - 1, np.concatenate(around) - 1, np.concatenate(usual_s))
        steady_s = [
            measured_s * _factors(_counted(measured_s, usual_s), 1 + share * (slowness - 1))
            for (measured_s, usual_s), slowness in zip(pairs, around, strict=True)
        ]
    return steady_s


def _factors(counted_s: Floats, slowness: Floats) -> Floats:
    """1 / slowness, scaled so that the total stays; an interrupted lap must not move the others."""
    steady_s = counted_s / slowness
    total_s = float(steady_s.sum())
    return (float(counted_s.sum()) / total_s if total_s > 0 else 1.0) / slowness


def _typical(kinds: Ints, seconds: Floats) -> Floats:
    """What each kind takes."""
    return np.array([trimmed_means(seconds[kinds == kind]) for kind in range(kinds.max() + 1)])


def _counted(measured_s: Floats, usual_s: Floats) -> Floats:
    return np.clip(measured_s, usual_s / _LARGEST_RATIO, usual_s * _LARGEST_RATIO)


def _slowness_around(measured_s: Floats, usual_s: Floats) -> Floats:
    """What the laps around each one took over what they usually take; 1 where there are none."""
    if not len(measured_s):
        return measured_s
    ends_s = np.cumsum(measured_s)
    begins_s = ends_s - measured_s
    counted_s = _counted(measured_s, usual_s)
    first = np.searchsorted(ends_s, begins_s - _AROUND_S, side="right")
    last = np.searchsorted(begins_s, ends_s + _AROUND_S, side="left")

    def around(values: Floats) -> Floats:
        sums = np.concatenate(([0.0], np.cumsum(values)))
        return np.asarray(sums[last] - sums[first] - values)

    others_s = around(usual_s)
    others_s[others_s < 1e-9 * ends_s[-1]] = 0  # A rest of rounding is not a neighbour.
    return _ratio(around(counted_s), others_s)


def _ratio(values: Floats, base: Floats) -> Floats:
    """values / base, and 1 where the base is 0."""
    return np.divide(values, base, out=np.ones_like(base), where=base > 0)


def _share(own: Floats, around: Floats, weights: Floats) -> float:
    """How much of what the laps around were slower by a lap itself was, from 0 to 1: the slope of
    the line through the origin."""
    spread = float((weights * around**2).sum())
    return float(np.clip((weights * own * around).sum() / spread, 0.0, 1.0)) if spread else 0.0
