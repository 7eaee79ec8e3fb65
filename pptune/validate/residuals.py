"""What finished runs say about the plans that have not run: a Gaussian process over plans.

Its values are log(measured / predicted), its mean is 0: before the first run a plan is expected to
take the time predicted for it. Predictions of plans that are alike in V, b, M and so on are wrong
alike, so that each run also corrects its neighbours.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from pptune.plan import Plan, Schedule

Floats = NDArray[np.float64]

TIE_RATIO = 0.02
"""A plan that is better by less than this is not worth a run."""

_COMMON_ERROR = 0.3
"""Standard deviation of the error that all plans share: it doesn't change their order."""

_ERRORS = (0.03, 0.1, 0.3)
"""Standard deviations that the error between plans may have; the runs weigh them."""

_NOISES = (0.01, 0.03, 0.1)
"""Standard deviations that visits of one plan may have; the runs weigh them."""

_OWN_SHARE = 0.1
"""Share of the variance between plans that is each plan's own and says nothing about others."""

_REACH = 2.0
"""Distance over which errors stay alike: 1 is a factor of 2 in one of V, b, M, N."""

_LEAST_VARIANCE = 1e-12
"""Rounding may leave less where two plans are surely equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """What is expected of every plan after some runs; arrays are [num_plans]."""

    best: int
    """The visited plan that is expected to be the fastest."""
    expected_s: Floats
    """The geometric mean of what a plan's step may take."""
    chance_faster: Floats
    """Probability that a plan is faster than `best`."""
    chance_worthwhile: Floats
    """Probability that it is faster by more than TIE_RATIO."""


class Residuals:
    """Predictions of some plans, and how to correct them by what was measured."""

    def __init__(self, plans: Sequence[Plan], predicted_s: Sequence[float]) -> None:
        self._features = features(plans)
        self._log_predicted = np.log(np.asarray(predicted_s, dtype=np.float64))

    def outlook(self, visits: Sequence[tuple[int, float]]) -> Outlook:
        """Expectations after `visits`, one (plan's index, seconds per step) each; at least one.

        Averages over the standard deviations of error and noise, each pair weighed by how likely
        it makes what was measured. Rasmussen and Williams, Gaussian Processes for Machine Learning
        (2006), eq. 2.25, 2.26 and 2.30.
        """
        visited = np.array([index for index, _ in visits])
        residuals = np.log([seconds for _, seconds in visits]) - self._log_predicted[visited]
        likeness = self._likeness(visited)
        fits = list(_fits(likeness, visited, residuals))
        likelihoods = np.array([fit.log_likelihood for fit in fits])
        weights = np.exp(likelihoods - likelihoods.max())
        weights /= weights.sum()
        means = self._log_predicted + weights @ np.stack([fit.means for fit in fits])
        best = int(visited[np.argmin(means[visited])])
        position = int(np.flatnonzero(visited == best)[0])
        faster, worthwhile = np.zeros(len(means)), np.zeros(len(means))
        for weight, fit in zip(weights, fits, strict=True):
            lead = self._log_predicted[best] + fit.means[best] - self._log_predicted - fit.means
            spread = np.sqrt(fit.difference_variances(position, best))
            faster += weight * _normal_cdf(lead / spread)
            worthwhile += weight * _normal_cdf((lead - math.log1p(TIE_RATIO)) / spread)
        faster[best] = worthwhile[best] = 0.0
        return Outlook(
            best=best,
            expected_s=np.exp(means),
            chance_faster=faster,
            chance_worthwhile=worthwhile,
        )

    def _likeness(self, visited: NDArray[np.intp]) -> Floats:
        """Correlation of every plan's own error with each visit's, [num_plans, num_visits]."""
        here = self._features[visited]
        squares = (self._features**2).sum(1)
        distances = squares[:, None] + squares[visited] - 2 * self._features @ here.T
        same = np.arange(len(squares))[:, None] == visited
        smooth = np.exp(-np.maximum(distances, 0.0) / (2 * _REACH**2))
        likeness: Floats = (1 - _OWN_SHARE) * smooth + _OWN_SHARE * same
        return likeness


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fit:
    """The process under one pair of standard deviations, given the visits."""

    log_likelihood: float
    """Up to a constant that all pairs share."""
    means: Floats
    """[num_plans]"""
    prior_variance: float
    covariances: Floats
    """Before the visits: of every plan with each visit, [num_plans, num_visits]."""
    explained: Floats
    """L^-1 covariances^T, [num_visits, num_plans]."""

    def difference_variances(self, position: int, best: int) -> Floats:
        """Variance of each plan's value less that of `best`, whose visit is at `position`."""
        variances = self.prior_variance - (self.explained**2).sum(0)
        shared = self.covariances[:, position] - self.explained.T @ self.explained[:, best]
        differences: Floats = variances + variances[best] - 2 * shared
        return np.maximum(differences, _LEAST_VARIANCE)


def _fits(likeness: Floats, visited: NDArray[np.intp], residuals: Floats) -> Iterator[_Fit]:
    """One fit for each pair of standard deviations."""
    for error in _ERRORS:
        covariances = _COMMON_ERROR**2 + error**2 * likeness
        for noise in _NOISES:
            between_visits = covariances[visited] + noise**2 * np.eye(len(visited))
            lower = np.linalg.cholesky(between_visits)
            scaled = np.linalg.solve(lower, residuals)
            explained = np.linalg.solve(lower, covariances.T)
            yield _Fit(
                log_likelihood=float(-scaled @ scaled / 2 - np.log(np.diag(lower)).sum()),
                means=explained.T @ scaled,
                prior_variance=_COMMON_ERROR**2 + error**2,
                covariances=covariances,
                explained=explained,
            )


def _normal_cdf(values: Floats) -> Floats:
    return np.array([0.5 * math.erfc(-value / math.sqrt(2)) for value in values])


def features(plans: Sequence[Plan]) -> Floats:
    """What makes plans alike, [num_plans, num_features]: a factor of 2 is a distance of 1.

    Two schedules are 2 apart, and so are recomputing and keeping activations.
    """
    rows = [
        (
            math.log2(plan.microbatch_size),
            math.log2(plan.num_chunks),
            math.log2(plan.num_microbatches),
            math.log2((plan.microbatch_group_size or plan.num_ranks) / plan.num_ranks),
            math.log2(plan.num_ranks),
            math.log2(plan.data_parallel),
            math.log2(max(plan.layers_per_stage) * plan.num_stages / plan.num_layers),
            2.0 * (plan.recompute == "full"),
            *(math.sqrt(2) * (plan.schedule == name) for name in get_args(Schedule)),
        )
        for plan in plans
    ]
    return np.array(rows)
