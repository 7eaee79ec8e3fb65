"""t(b): a layer's time over micro-batch sizes, measured at a few and wanted at any.

Between two measured sizes the total time is linear in b. Beyond them a fitted curve continues from
the nearest measured point. The fit is physical: a fixed part plus work at a rate that saturates,

    t(b) = overhead + per_sequence * (floor^4 + b^4)^(1/4)

so that t(b)/b falls until the kernels are full and is flat from there. `floor` is the micro-batch
size below which the work no longer gets cheaper (weights are read whatever b is: the memory-bound
side of the roofline, Williams et al., CACM 52(4), 2009); `floor = 0` leaves a straight line.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pptune.errors import MissingNumber, UsageError
from pptune.profiles import Layer, LayerPoint, Source, weakest

Floats = NDArray[np.float64]

KNEE_RATIO = 0.9
"""The knee is where this share of the plateau's rate is reached."""

NOISE_RATIO = 0.05
"""A rise of t(b)/b by less than this is taken for noise where the caller knows no better."""

_SHARPNESS = 4.0
_NUM_FLOORS = 16
_HUBER_SIGMAS = 1.345
"""Residuals beyond this many robust sigmas lose weight (Huber, 95 % efficiency)."""
_SIGMAS_PER_MEDIAN = 1.4826
"""A normal distribution's sigma over its median absolute deviation."""
_MAX_REWEIGHTINGS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """t(b) = overhead + per_sequence * (floor^4 + b^4)^(1/4)."""

    overhead_s: float
    per_sequence_s: float
    """The plateau of t(b)/b."""
    floor_size: float
    """Micro-batch size below which the work no longer gets cheaper; 0 for a straight line."""

    def seconds(self, microbatch_size: float) -> float:
        """t(b)."""
        shape = _shape(np.array([float(microbatch_size)]), self.floor_size)[0]
        return self.overhead_s + self.per_sequence_s * float(shape)

    @property
    def knee_microbatch_size(self) -> float | None:
        """The b at which b/t(b) reaches 90 % of its plateau, 1 or more; null without a plateau."""
        if self.per_sequence_s <= 0:
            return None
        low, high = 1.0, 1.0
        while self.per_sequence_s * high < KNEE_RATIO * self.seconds(high):
            low, high = high, high * 2
        for _ in range(50):
            middle = (low + high) / 2
            full = self.per_sequence_s * middle >= KNEE_RATIO * self.seconds(middle)
            low, high = (low, middle) if full else (middle, high)
        return high


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveFit(Curve):
    """A fitted curve and how well it holds."""

    loo_error_ratio: float | None
    """Median of |predicted / measured - 1| over points left out in turn; null below 3 points."""
    slows_with_size: bool
    """t(b)/b rises with b beyond noise: memory pressure, recompute or a busy processor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTimes:
    """One kind of layer at one micro-batch size; for one layer and one micro-batch."""

    forward_s: float
    backward_s: float
    backward_input_s: float | None
    backward_weight_s: float | None
    saved_activation_bytes: int | None
    boundary_bytes: int | None
    source: Source


def layer_times(layer: Layer, microbatch_size: int) -> LayerTimes:
    """The layer's times and sizes at `microbatch_size`, with the mark of how they were found.

    Raises MissingNumber when no usable point has both a forward and a backward time.
    """
    points = sorted(usable_points(layer), key=lambda point: point.microbatch_size)
    if not points:
        raise MissingNumber(
            f"layer {layer.kind} (recompute {layer.recompute}) has no micro-batch size with a "
            "forward and a backward time; profile it at one or more sizes",
            rule="layer-not-measured",
        )
    sizes = [point.microbatch_size for point in points]
    backward = [_backward_s(point) for point in points]

    def time_of(values: list[float | None]) -> float | None:
        return _value_at(sizes, values, microbatch_size, by_fit=True)

    def bytes_of(values: list[float | None]) -> int | None:
        value = _value_at(sizes, values, microbatch_size, by_fit=False)
        return None if value is None else round(value)

    forward_s = time_of([point.forward_s for point in points])
    backward_s = time_of(backward)
    assert forward_s is not None
    assert backward_s is not None
    return LayerTimes(
        forward_s=forward_s,
        backward_s=backward_s,
        backward_input_s=time_of([point.backward_input_s for point in points]),
        backward_weight_s=time_of([point.backward_weight_s for point in points]),
        saved_activation_bytes=bytes_of([point.saved_activation_bytes for point in points]),
        boundary_bytes=bytes_of([point.boundary_bytes for point in points]),
        source=_source_at(points, microbatch_size),
    )


def usable_points(layer: Layer) -> list[LayerPoint]:
    """The points whose times count: not out of memory, and timed forward and backward."""
    return [
        point
        for point in layer.points
        if point.status != "oom" and point.forward_s is not None and _backward_s(point) is not None
    ]


def slows_with_size(layer: Layer) -> bool:
    """Whether forward and backward per sequence take longer at some larger size, beyond noise."""
    points = sorted(usable_points(layer), key=lambda point: point.microbatch_size)
    if len(points) < 2:
        return False
    sizes = np.array([point.microbatch_size for point in points], dtype=np.float64)
    total = np.array([(point.forward_s or 0.0) + (_backward_s(point) or 0.0) for point in points])
    return _rises(total / sizes, NOISE_RATIO)


def fit_curve(
    sizes: Sequence[int], seconds: Sequence[float], *, noise_ratio: float = NOISE_RATIO
) -> CurveFit:
    """Fit t(b) to points by robust least squares of the relative error.

    Raises UsageError without points, or where the two lists differ in length.
    """
    if not sizes or len(sizes) != len(seconds):
        raise UsageError(
            f"a curve needs one time per micro-batch size, but has {len(sizes)} sizes and "
            f"{len(seconds)} times"
        )
    order = np.argsort(sizes)
    b = np.asarray(sizes, dtype=np.float64)[order]
    t = np.asarray(seconds, dtype=np.float64)[order]
    curve = _fit(b, t)
    return CurveFit(
        overhead_s=curve.overhead_s,
        per_sequence_s=curve.per_sequence_s,
        floor_size=curve.floor_size,
        loo_error_ratio=_left_out_error(b, t),
        slows_with_size=_rises(t / b, noise_ratio),
    )


def _shape(sizes: Floats, floor: float) -> Floats:
    """Work in units of one sequence at the plateau's rate."""
    return np.asarray((floor**_SHARPNESS + sizes**_SHARPNESS) ** (1 / _SHARPNESS))


def _fit(sizes: Floats, seconds: Floats) -> Curve:
    """The line, or the saturating shape where its residual per degree of freedom is smaller.

    Times of 0 come from a clock too coarse for the layer and are left out.
    """
    timed = seconds > 0
    sizes, seconds = sizes[timed], seconds[timed]
    if not len(sizes):
        return Curve(overhead_s=0.0, per_sequence_s=0.0, floor_size=0.0)
    floors = [0.0]
    if len(sizes) > 3:
        floors += [float(floor) for floor in np.geomspace(sizes[0] / 2, sizes[-1], _NUM_FLOORS)]

    def residual(floor: float) -> float:
        shape = _shape(sizes, floor)
        overhead, slope = _weighted_line(shape, seconds, seconds**-2)
        misses = np.abs((overhead + slope * shape) / seconds - 1)
        return float(misses.sum()) / max(len(sizes) - (2 if floor == 0 else 3), 1)

    floor = min(floors, key=residual)
    overhead_s, per_sequence_s = _fit_line(_shape(sizes, floor), seconds)
    return Curve(overhead_s=overhead_s, per_sequence_s=per_sequence_s, floor_size=floor)


def _fit_line(shape: Floats, seconds: Floats) -> tuple[float, float]:
    """(overhead, slope), neither negative, by Huber-weighted least squares of relative errors."""
    weights = seconds**-2
    overhead, slope = _weighted_line(shape, seconds, weights)
    for _ in range(_MAX_REWEIGHTINGS):
        residuals = np.abs((overhead + slope * shape) / seconds - 1)
        limit = _HUBER_SIGMAS * _SIGMAS_PER_MEDIAN * float(np.median(residuals))
        if residuals.max() <= max(limit, 1e-9):
            break
        robust = weights * np.minimum(1.0, limit / np.maximum(residuals, 1e-12))
        before = overhead + slope
        overhead, slope = _weighted_line(shape, seconds, robust)
        if abs(overhead + slope - before) <= 1e-9 * before:
            break
    return overhead, slope


def _weighted_line(shape: Floats, seconds: Floats, weights: Floats) -> tuple[float, float]:
    """Least squares with both coefficients held at 0 or more."""
    total = float(weights.sum())
    mean_x, mean_y = float(weights @ shape) / total, float(weights @ seconds) / total
    spread = float(weights @ (shape - mean_x) ** 2)
    slope = float(weights @ ((shape - mean_x) * (seconds - mean_y))) / spread if spread > 0 else 0.0
    overhead = mean_y - slope * mean_x
    if spread <= 0 or overhead < 0:
        return 0.0, float(weights @ (shape * seconds)) / float(weights @ shape**2)
    return (mean_y, 0.0) if slope < 0 else (overhead, slope)


def _left_out_error(sizes: Floats, seconds: Floats) -> float | None:
    """Median relative error at each timed point of the fit to the others; None below 3 points."""
    timed = seconds > 0
    sizes, seconds = sizes[timed], seconds[timed]
    if len(sizes) < 3:
        return None
    errors = []
    for left_out in range(len(sizes)):
        kept = np.arange(len(sizes)) != left_out
        curve = _fit(sizes[kept], seconds[kept])
        errors.append(abs(curve.seconds(float(sizes[left_out])) / seconds[left_out] - 1))
    return float(np.median(errors))


def _rises(per_sequence: Floats, noise_ratio: float) -> bool:
    """Whether some size is slower per sequence than the best smaller one, beyond noise."""
    best_before = np.minimum.accumulate(per_sequence)
    return bool(np.any(per_sequence > best_before * (1 + noise_ratio)))


def _backward_s(point: LayerPoint) -> float | None:
    """The full backward; where only its parts were timed, their sum."""
    if point.backward_s is not None:
        return point.backward_s
    if point.backward_input_s is None or point.backward_weight_s is None:
        return None
    return point.backward_input_s + point.backward_weight_s


def _value_at(
    sizes: list[int], values: list[float | None], wanted: int, *, by_fit: bool
) -> float | None:
    """The value at `wanted`: interpolated between neighbours, or carried on from the nearest end.

    `by_fit`: beyond the ends follow the fitted curve; else stay in proportion to b, as bytes do.
    """
    known = [(size, value) for size, value in zip(sizes, values, strict=True) if value is not None]
    if not known:
        return None
    xs, ys = [size for size, _ in known], [value for _, value in known]
    if xs[0] <= wanted <= xs[-1]:
        return float(np.interp(wanted, xs, ys))
    end = 0 if wanted < xs[0] else -1
    if not by_fit:
        return ys[end] * wanted / xs[end]
    fit = _fit(np.array(xs, dtype=np.float64), np.array(ys, dtype=np.float64))
    at_end = fit.seconds(xs[end])
    # Scaled to pass through the end point, so that the curve has no step there.
    return ys[end] * (fit.seconds(wanted) / at_end if at_end > 0 else wanted / xs[end])


def _source_at(points: list[LayerPoint], wanted: int) -> Source:
    for point in points:
        if point.microbatch_size == wanted:
            return point.source
    inside = points[0].microbatch_size < wanted < points[-1].microbatch_size
    found: Source = "interpolated" if inside else "extrapolated"
    return weakest([found, *(point.source for point in points)])
