"""Noisy numbers that follow a trend."""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_LEAST_ERROR = 1e-6


def towards_trend(x: Floats, y: Floats, standard_error: Floats) -> Floats:
    """`y` drawn towards a line over `x`, the more so the more of its scatter is noise.

    Random-effects regression: what scatters around the line beyond the standard errors counts as
    true, with the variance that the method of moments gives it (DerSimonian and Laird, Controlled
    Clinical Trials 7(3), 1986; with a regressor, Thompson and Sharp, Statistics in Medicine 18(20),
    1999). All arrays are [n]; with fewer than 3 points `y` is returned.
    """
    if len(x) < 3:
        return y
    finite = standard_error[np.isfinite(standard_error)]
    known = float(finite.max()) if len(finite) else _LEAST_ERROR
    noise = np.maximum(np.where(np.isfinite(standard_error), standard_error, known), _LEAST_ERROR)
    design = np.stack([np.ones(len(x)), x], axis=1)

    def fitted(variance: Floats) -> tuple[Floats, Floats]:
        """The weighted line at every x, and the matrix that gives it from y."""
        weighted = design.T / variance
        hat = design @ np.linalg.solve(weighted @ design, weighted)
        return hat @ y, hat

    line, hat = fitted(noise**2)
    misfit = float((((y - line) / noise) ** 2).sum())
    freedom = len(x) - 2
    per_variance = float(((1 - np.diag(hat)) / noise**2).sum())
    scatter = max(0.0, (misfit - freedom) / per_variance)
    line, _ = fitted(noise**2 + scatter)
    return np.asarray((scatter * y + noise**2 * line) / (scatter + noise**2))
