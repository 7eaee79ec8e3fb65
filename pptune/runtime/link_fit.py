"""Times of messages over sizes -> latency and bandwidth."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from pptune.errors import UsageError

Floats = NDArray[np.float64]

_SIGNS = ((1, 1, -1), (1, -1, 1), (-1, 1, 1), (1, 1, 1))
"""Of errors at three sizes, up to the sign of all."""


_BUFFERED_BYTES = 1 << 16
"""Messages up to this size may lie in buffers on their way: what arrives sooner than the link's own
rate allows says nothing about latency or bandwidth."""

_RATE_TOLERANCE = 0.95
"""Noise apart: what arrives in this share of the time that the link's rate allows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFit:
    """t(n) = latency + n / bandwidth (the alpha-beta model)."""

    latency_s: float
    bytes_per_s: float
    worst_ratio: float
    """Largest |fitted / measured - 1| over the sizes."""
    worst_num_bytes: int
    """The size at which it is."""


def fit_link(num_bytes: Sequence[int], seconds: Sequence[float]) -> LinkFit:
    """The line whose largest relative error over the measured sizes is the smallest.

    Sizes span five orders of magnitude, so that least squares would see only the largest. The best
    line errs equally at three sizes (Chebyshev's alternation), or at two with the latency at 0: all
    such lines are tried. Small messages that are faster than the largest one's rate don't count.
    Raises UsageError for fewer than two sizes or times that aren't positive.
    """
    sizes, times = np.asarray(num_bytes, dtype=float), np.asarray(seconds, dtype=float)
    if len(set(num_bytes)) < 2 or not (times > 0).all():
        raise UsageError("a link needs positive times of two or more message sizes")
    counted_sizes, counted_times = _unbuffered(sizes, times)
    candidates = _candidates(counted_sizes, counted_times)
    usable = candidates[(candidates[:, 0] >= 0) & (candidates[:, 1] > 0)]
    counted = np.abs((usable[:, :1] + usable[:, 1:] * counted_sizes) / counted_times - 1)
    latency_s, per_byte_s = usable[int(counted.max(axis=1).argmin())]
    errors = np.abs((latency_s + per_byte_s * sizes) / times - 1)
    return LinkFit(
        latency_s=float(latency_s),
        bytes_per_s=float(1 / per_byte_s),
        worst_ratio=float(errors.max()),
        worst_num_bytes=int(sizes[errors.argmax()]),
    )


def _unbuffered(sizes: Floats, times: Floats) -> tuple[Floats, Floats]:
    """Sizes and times that count: those of the two largest messages at least."""
    ranked = np.argsort(sizes)
    wire_times = sizes * times[ranked[-1]] / sizes[ranked[-1]]
    counts = (sizes > _BUFFERED_BYTES) | (times >= _RATE_TOLERANCE * wire_times)
    counts[ranked[-2:]] = True
    return sizes[counts], times[counts]


def _candidates(sizes: Floats, times: Floats) -> Floats:
    """Rows (latency, seconds per byte) among which the best line is."""
    rows: list[tuple[float, float]] = []
    # Without latency: one rate, equally wrong at two sizes; and the rate of each size alone.
    rates = times / sizes
    rows += [(0.0, float(rate)) for rate in rates]
    rows += [
        (0.0, float(2 / (1 / rates[i] + 1 / rates[j])))
        for i, j in combinations(range(len(sizes)), 2)
    ]
    if len(sizes) == 2:
        per_byte_s = (times[1] - times[0]) / (sizes[1] - sizes[0])
        rows.append((float(times[0] - per_byte_s * sizes[0]), float(per_byte_s)))
    rows += _equal_errors_at_three(sizes, times)
    return np.array(rows)


def _equal_errors_at_three(sizes: Floats, times: Floats) -> list[tuple[float, float]]:
    """Lines with latency + n * rate = t + sign * error * t at three sizes, all signs."""
    chosen = list(combinations(range(len(sizes)), 3))
    if not chosen:
        return []
    # The matrix is scaled to numbers near 1, since bytes and seconds are 15 orders apart.
    n, t = sizes / sizes.max(), times / times.max()
    equations = np.array(
        [
            [[1.0, n[i], -sign * t[i]] for i, sign in zip(three, signs, strict=True)]
            for three in chosen
            for signs in _SIGNS
        ]
    )
    right = np.repeat(t[np.array(chosen)], len(_SIGNS), axis=0)
    solvable = np.abs(np.linalg.det(equations)) > 1e-14
    lines = np.linalg.solve(equations[solvable], right[solvable][..., None])[..., 0]
    return [
        (float(latency * times.max()), float(rate * times.max() / sizes.max()))
        for latency, rate, _ in lines
    ]
