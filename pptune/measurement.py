"""Samples of one time: their centre, how sure it is, and what is wrong with them, in words.

A pipeline's step is a sum of many actions, so the centre has to predict sums. A median does not:
timings have a heavy upper tail, and a sum contains the tail. A mean does, but one burst from
another process ruins it. The trimmed mean drops the extreme tenth at each end and averages the
rest.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from pptune.errors import UsageError
from pptune.units import format_ratio, format_seconds

TRIMMED_SHARE = 0.1
"""Share of the samples dropped at each end; at least one at each end from five samples on."""

MIN_SAMPLES = 5
"""Fewer samples than this never count as settled."""

_CONFIDENCE = 0.95
_DRIFT_RATIO = 0.05
_MIN_DISTINCT = 4
_OUTLIER_RATIO = 3.0
_BUSY_CORES = 0.25
_FULL_RATIO = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """The raw times of one thing; everything else is derived from them."""

    samples_s: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.samples_s or not all(math.isfinite(value) for value in self.samples_s):
            raise UsageError("a measurement needs at least one sample, and finite ones only")

    @property
    def median_s(self) -> float:
        return float(np.median(self.samples_s))

    @property
    def centre_s(self) -> float:
        """The trimmed mean."""
        return float(trimmed_means(np.array(self.samples_s)))

    @property
    def half_width_s(self) -> float:
        """Half the width of the centre's 95 % interval; infinite below MIN_SAMPLES samples.

        Tukey and McLaughlin (Sankhya A 25, 1963): the standard error of a trimmed mean is the
        winsorized deviation over (1 - 2 g / n) sqrt(n), with n - 2 g - 1 degrees of freedom.
        """
        values = np.sort(self.samples_s)
        num, cut = len(values), _num_trimmed(len(values))
        if num < MIN_SAMPLES:
            return math.inf
        freedom = num - 2 * cut - 1
        values[:cut] = values[cut]
        values[num - cut :] = values[num - cut - 1]
        deviation = float(values.std(ddof=1))
        standard_error = deviation / ((1 - 2 * cut / num) * math.sqrt(num))
        return t_quantile(freedom) * standard_error

    @property
    def noise_ratio(self) -> float:
        """Half-width / centre; infinite where the centre is 0."""
        centre = self.centre_s
        return self.half_width_s / abs(centre) if centre else math.inf


def trimmed_means(samples_s: NDArray[np.float64]) -> NDArray[np.float64]:
    """The trimmed mean along the last axis; the other axes stay."""
    values = np.sort(samples_s, axis=-1)
    cut = _num_trimmed(values.shape[-1])
    return np.asarray(values[..., cut : values.shape[-1] - cut].mean(axis=-1))


def _num_trimmed(num_samples: int) -> int:
    return max(int(TRIMMED_SHARE * num_samples), 1 if num_samples >= MIN_SAMPLES else 0)


def t_quantile(freedom: int) -> float:
    """The two-sided 95 % quantile of Student's t with `freedom` degrees of freedom.

    Exact for 1 and 2; from 3 on by the expansion in 1 / freedom (Abramowitz and Stegun, 26.7.5),
    within 0.5 % of the tables.
    """
    tail = (1 + _CONFIDENCE) / 2
    if freedom == 1:
        return math.tan(math.pi * (tail - 0.5))
    if freedom == 2:
        return (2 * tail - 1) * math.sqrt(2 / (4 * tail * (1 - tail)))
    z = NormalDist().inv_cdf(tail)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return float(sum(term / freedom**power for power, term in enumerate(terms)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Centre:
    """A derived time with its uncertainty, such as a difference of two measurements."""

    seconds: float
    half_width_s: float

    @property
    def noise_ratio(self) -> float:
        return self.half_width_s / self.seconds if self.seconds > 0 else math.inf


def per_unit(longer: Measurement, shorter: Measurement, *, units: int) -> Centre:
    """(longer - shorter) / units: one of `units` things that only `longer` contains.

    What both contain, such as the fixed cost of a call, cancels. Never below 0, which noise could
    otherwise make of a thing that costs next to nothing.
    """
    seconds = (longer.centre_s - shorter.centre_s) / units
    half_width = math.hypot(longer.half_width_s, shorter.half_width_s) / units
    return Centre(seconds=max(0.0, seconds), half_width_s=half_width)


def to_nanoseconds(samples_s: Iterable[float]) -> tuple[float, ...]:
    """Samples as a file keeps them. No clock tells less apart; all digits take twice the room."""
    return tuple(round(value, 9) for value in samples_s)


def unsettled_warning(unsettled: Mapping[str, Centre], max_noise: float) -> str | None:
    """Which times did not settle, by how much, and what to do; None where all did."""
    if not unsettled:
        return None
    named = ", ".join(
        f"{what} ({format_seconds(centre.seconds)} +- {format_ratio(centre.noise_ratio)})"
        for what, centre in unsettled.items()
    )
    return (
        f"not settled to {format_ratio(max_noise)}: {named}; use a larger --budget or a quieter "
        "machine"
    )


def drift_warning(reference_s: Sequence[float]) -> str | None:
    """That the machine changed its speed during a run, or None.

    `reference_s` are times of one fixed piece of work, spread over the run. The first and the last
    third are compared by their medians.
    """
    third = len(reference_s) // 3
    if third < 3:
        return None
    first, last = float(np.median(reference_s[:third])), float(np.median(reference_s[-third:]))
    if first <= 0 or abs(last / first - 1) <= _DRIFT_RATIO:
        return None
    if last > first:
        return (
            f"clocks dropped during the run: the reference product took "
            f"{format_ratio(last / first - 1)} longer at its end than at its start; the times are "
            "those of a throttled or busy machine"
        )
    return (
        f"the machine sped up during the run: the reference product took "
        f"{format_ratio(1 - last / first)} less at its end than at its start; measure again on a "
        "warm, quiet machine"
    )


def outlier_warning(what: str, samples_s: Sequence[float]) -> str | None:
    """That some samples are far above the others, or None; the centre leaves them out."""
    typical = float(np.median(samples_s)) if samples_s else 0.0
    far = [value for value in samples_s if value > _OUTLIER_RATIO * typical]
    if typical <= 0 or not far:
        return None
    return (
        f"{what}: {len(far)} of {len(samples_s)} samples took up to {max(far) / typical:.3g} times "
        "the median; something else used the machine meanwhile"
    )


def quantised_warning(what: str, samples_s: Sequence[float]) -> str | None:
    """That a clock is too coarse for what it timed, or None."""
    if 0.0 in samples_s:
        return (
            f"{what}: the clock is too coarse, some samples are 0 s; "
            "use larger micro-batches or a longer sequence"
        )
    distinct = len(set(samples_s))
    if len(samples_s) >= 2 * _MIN_DISTINCT and distinct < _MIN_DISTINCT:
        return (
            f"{what}: the clock is too coarse, {len(samples_s)} samples have only {distinct} "
            "different values; use larger micro-batches or a longer sequence"
        )
    return None


def busy_warning(*, own_cores: float, all_cores: float, cores: int) -> str | None:
    """That other processes competed for the processor, or None.

    `own_cores` is the mean number of cores that the measuring processes kept busy, `all_cores` the
    same for the whole machine of `cores` cores. Others on a machine with cores to spare do no harm.
    """
    others = all_cores - own_cores
    if others < _BUSY_CORES or all_cores < _FULL_RATIO * cores:
        return None
    return (
        f"other processes used {others:.1f} of {cores} cores while measuring; "
        "the times contain their interference"
    )


def uneven_ranks_warning(what: str, rank_medians_s: Sequence[float]) -> str | None:
    """That one rank is slower than the others by more than a drift would be, or None."""
    typical = float(np.median(rank_medians_s))
    slowest = int(np.argmax(rank_medians_s))
    if typical <= 0 or rank_medians_s[slowest] / typical - 1 <= 2 * _DRIFT_RATIO:
        return None
    return (
        f"rank {slowest} takes {format_ratio(rank_medians_s[slowest] / typical - 1)} longer than "
        f"the median rank for {what}; a pipeline goes at the pace of its slowest rank"
    )
