"""Spaces too large to list: an optuna study tries plans, starting from the cost model's prior."""

from dataclasses import asdict
from typing import TYPE_CHECKING

import numpy as np

from pptune.cost_model import CostModel
from pptune.plans_file import ProfileReference
from pptune.search.request import Query
from pptune.search.scores import Scores, families
from pptune.search.study import open_study, record, sample

if TYPE_CHECKING:
    import optuna

DEFAULT_TRIALS = 2_000
"""Sampled plans where the user gives no number."""

_PRIOR_SHARE = 0.5
"""Share of sampled trials spent on the cost model's prior before the sampler chooses."""


def sampled(query: Query, scores: Scores, reference: ProfileReference) -> list[int]:
    """Indices of the plans that the study of this search has tried, by ascending bound."""
    request, model = query.request, query.model
    by_bound = list(map(int, scores.known))
    num_trials = request.trials or min(DEFAULT_TRIALS, len(by_bound))

    def score(position: int) -> tuple[tuple[float, ...], float]:
        index = by_bound[position]
        scores.size(index)
        return _objectives(query, scores, index), _excess(model, scores, index)

    tried = sample(
        _study(query, reference),
        num_plans=len(by_bound),
        num_trials=num_trials,
        timeout_s=request.timeout_s,
        storage=request.storage,
        first=_promising(scores, max(1, round(_PRIOR_SHARE * num_trials))),
        score=score,
        label=lambda position: scores.plans[by_bound[position]].label,
    )
    return [by_bound[position] for position in tried]


def store(query: Query, scores: Scores, reference: ProfileReference) -> None:
    """Keep every played plan that fits in the user's study."""
    played = [
        (position, scores.plans[index], _objectives(query, scores, index))
        for position, index in enumerate(map(int, scores.known))
        if not np.isnan(scores.step_s[index]) and scores.fits[index]
    ]
    record(
        _study(query, reference),
        played,
        num_plans=len(scores.known),
        storage=query.request.storage,
    )


def _promising(scores: Scores, num_wanted: int) -> list[int]:
    """Positions of fitting plans to try first, the cost model's prior: in order of their bound, but
    one of each family before a second of any, since group sizes do not change the bound."""
    place = np.empty(len(scores.plans), dtype=np.int64)
    for start, stop in families(scores.plans):
        place[start:stop] = np.arange(stop - start)
    known = scores.known
    found: list[int] = []
    for position in map(int, np.argsort(place[known], kind="stable")):
        if len(found) == num_wanted:
            break
        if scores.judge(int(known[position])):
            found.append(position)
    return found


def _objectives(query: Query, scores: Scores, index: int) -> tuple[float, ...]:
    """What the study minimises: step time in seconds, peak bytes, GPUs."""
    plan, peak = scores.plans[index], float(scores.peak_bytes[index])
    match query.request.objective:
        case "time":
            return (scores.play(index),)
        case "memory":
            return (peak,)
        case "pareto" if len(query.axes.grids) > 1:
            return (scores.play(index), peak, float(plan.num_ranks * plan.data_parallel))
        case "pareto":
            return (scores.play(index), peak)


def _excess(model: CostModel, scores: Scores, index: int) -> float:
    """Peak memory over the limit - 1; 0 where either is not known."""
    peak, limit = float(scores.peak_bytes[index]), model.memory_limit_bytes
    return 0.0 if limit is None or np.isnan(peak) else peak / limit - 1


def _study(query: Query, reference: ProfileReference) -> "optuna.Study":
    request, setting = query.request, query.model.setting
    num_objectives = 1
    if request.objective == "pareto":
        num_objectives = 3 if len(query.axes.grids) > 1 else 2
    space = {
        **asdict(query.axes),
        "profile": reference.digest,
        "global_batch_size": request.global_batch_size,
        "target": str(query.target),
        "objective": request.objective,
        "memory_limit_bytes": query.model.memory_limit_bytes,
        "zero_stage": setting.zero_stage,
        "ranks_per_node": setting.ranks_per_node,
        "links": [f"{x.scope}:{x.latency_s},{x.bytes_per_s}" for x in setting.links],
        "allow_empty_stages": request.allow_empty_stages,
    }
    name = f"{query.model.profile.model.name}, global batch {request.global_batch_size}"
    return open_study(
        storage=request.storage,
        name=request.study_name or name,
        num_objectives=num_objectives,
        space=space,
        seed=request.seed,
    )
