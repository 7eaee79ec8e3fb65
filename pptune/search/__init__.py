"""The best plans on a profile: every legal plan scored where they can be listed, else sampled."""

import time
from collections import Counter
from dataclasses import dataclass, replace

import numpy as np

from pptune.cost_model import CostModel, Setting
from pptune.curves import slows_with_size
from pptune.errors import NoAnswer, UsageError
from pptune.estimate import Candidate
from pptune.plans_file import PlansFile, ProfileReference, Space
from pptune.profiles import Profile
from pptune.search.baseline import baselines, estimated
from pptune.search.request import Query, Request, axes_of
from pptune.search.sampling import sampled, store
from pptune.search.scores import OutOfTime, Progress, Scores
from pptune.search.space import Axes, Listing, text_of_axes
from pptune.search.ways_out import nothing_fits, nothing_legal

__all__ = ["Request", "count_plans", "search"]


def search(
    profile: Profile,
    setting: Setting,
    request: Request,
    *,
    reference: ProfileReference,
    on_progress: Progress | None = None,
) -> PlansFile:
    """The best plans and what they are measured against.

    All legal plans are scored where `request.max_enumerated` allows, and the answer is then the
    optimum of the model; else an optuna study samples them. Raises NoAnswer where nothing is legal
    or nothing fits, UsageError for a request that the profile cannot answer, FileError where the
    storage fails.
    """
    model = CostModel(profile, setting)
    query = Query(model, request, axes_of(profile, request))
    listing = query.list(query.axes)
    if not listing.plans:
        raise nothing_legal(listing)
    scores = Scores(model, listing.plans)
    if not len(scores.known):
        raise NoAnswer(
            "no legal plan can be predicted: " + "; ".join(scores.missing_reasons.values())
        )
    if len(scores.known) <= request.list_all_up_to:
        query = replace(query, request=replace(request, top=max(request.top, len(scores.known))))
    found = _find(query, scores, reference, on_progress)
    if not found.ranked:
        raise nothing_fits(model, scores, query.axes, query.scores)
    plans = [scores.plans[index] for index in found.ranked]
    baseline, same_size, warnings = baselines(query, plans[0])
    candidates = []
    for rank, plan in enumerate(plans, start=1):
        estimate = estimated(model, plan)
        speedup = None if baseline is None else baseline.estimate.step_time_s / estimate.step_time_s
        candidates.append(
            Candidate(rank=rank, plan=plan, estimate=estimate, speedup_over_baseline=speedup)
        )
    return PlansFile(
        profile=reference,
        model=profile.model,
        dtype=profile.dtype,
        device=profile.machine.device,
        global_batch_size=request.global_batch_size,
        target=str(query.target),
        space=_space(query.axes, listing, scores, scores.lost_by(found.ranked[0])),
        proven_optimal=found.proven,
        objective=request.objective,
        memory_limit_bytes=model.memory_limit_bytes,
        ranks_per_node=setting.ranks_per_node,
        zero_stage=setting.zero_stage,
        tensor_parallel=profile.parallel.tensor,
        context_parallel=profile.parallel.context,
        links=setting.links,
        baseline=baseline,
        baseline_same_size=same_size,
        candidates=tuple(candidates),
        warnings=(*found.warnings, *warnings, *_cautions(model, scores, candidates[0])),
    )


def count_plans(profile: Profile, setting: Setting, request: Request) -> Space:
    """How many plans are legal, illegal by rule, and don't fit; no step is predicted."""
    model = CostModel(profile, setting)
    query = Query(model, request, axes_of(profile, request))
    listing = query.list(query.axes)
    scores = Scores(model, listing.plans)
    if model.limits_memory:
        for index in scores.known:
            scores.judge(int(index))
    return _space(query.axes, listing, scores, Counter())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """Indices of the best plans, and how sure that is."""

    ranked: list[int]
    proven: bool
    warnings: tuple[str, ...] = ()


def _find(
    query: Query,
    scores: Scores,
    reference: ProfileReference,
    on_progress: Progress | None,
) -> _Found:
    request = query.request
    if request.objective != "time" and not query.model.knows_memory:
        raise UsageError(
            f"--objective {request.objective} needs memory numbers (parameter and activation "
            "bytes), which the profile does not have; profile again, or use --objective time"
        )
    if len(scores.known) > request.max_enumerated:
        tried = sampled(query, scores, reference)
        ranked = _rank(query, scores, tried, None, None)
        if len(tried) == len(scores.known):
            return _Found(ranked=ranked, proven=True)
        text = f"{len(tried)} of {len(scores.known)} legal plans were sampled: a better may exist"
        return _Found(ranked=ranked, proven=False, warnings=(text,))
    deadline = None if request.timeout_s is None else time.monotonic() + request.timeout_s
    indices = list(map(int, scores.known))
    warnings: tuple[str, ...] = ()
    try:
        ranked = _rank(query, scores, indices, deadline, on_progress)
        proven = True
    except OutOfTime:
        played = [index for index in indices if not np.isnan(scores.step_s[index])]
        ranked = _rank(query, scores, played, None, None)
        if not ranked:
            raise NoAnswer(
                f"the time-out of {request.timeout_s:g} s ended the search before a fitting plan "
                "was found; give a longer --timeout, or fewer values to search"
            ) from None
        proven = False
        warnings += (
            f"the time-out of {request.timeout_s:g} s ended the search after {len(played)} of "
            f"{len(indices)} plans",
        )
    if request.storage is not None:
        store(query, scores, reference)
    return _Found(ranked=ranked, proven=proven, warnings=warnings)


def _rank(
    query: Query,
    scores: Scores,
    indices: list[int],
    deadline: float | None,
    on_progress: Progress | None,
) -> list[int]:
    """The best of the plans at `indices` under the request's objective, best first."""
    top = query.request.top
    match query.request.objective:
        case "time":
            return scores.fastest(indices, top, deadline=deadline, on_progress=on_progress)
        case "memory":
            return scores.leanest(indices, top, deadline=deadline, on_progress=on_progress)
        case "pareto":
            count_gpus = len(query.axes.grids) > 1
            return scores.front(
                indices, count_gpus=count_gpus, deadline=deadline, on_progress=on_progress
            )


def _space(axes: Axes, listing: Listing, scores: Scores, lost_by: Counter[str]) -> Space:
    return Space(
        num_legal=len(scores.known),
        num_illegal=dict(listing.num_illegal + scores.missing),
        num_infeasible=scores.num_unfit,
        lost_by=dict(lost_by),
        axes=text_of_axes(axes, listing),
    )


def _cautions(model: CostModel, scores: Scores, pick: Candidate) -> tuple[str, ...]:
    """What to know before trusting the pick."""
    found = list(scores.missing_reasons.values())
    if pick.estimate.fits == "borderline":
        found.append(
            "the pick's fullest rank comes within 5% of the memory limit: run it several times "
            "before relying on it"
        )
    if pick.estimate.source == "extrapolated":
        found.append(
            f"the pick's times are extrapolated to micro-batch size {pick.plan.microbatch_size}; "
            "profile that size"
        )
    block = model.profile.layer("block")
    if block is not None and slows_with_size(block):
        found.append(
            "block times per sequence rise with the micro-batch size: memory pressure, recompute "
            "or a busy processor?"
        )
    return tuple(found)
