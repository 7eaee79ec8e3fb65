"""The best plans on a profile: every legal plan scored where they can be listed, else sampled."""

import time
from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from pptune.baseline import parse_baseline
from pptune.cost_model import CostModel, Setting
from pptune.curves import slows_with_size
from pptune.errors import NoAnswer, UsageError
from pptune.estimate import Candidate, Estimate, PredictedPlan
from pptune.plan import Plan, Schedule
from pptune.plans_file import PlansFile, ProfileReference, Space
from pptune.profiles import Profile
from pptune.scores import OutOfTime, Progress, Scores, families
from pptune.space import Axes, Layout, Listing, list_plans, text_of_axes
from pptune.study import open_study, record, sample
from pptune.targets import Target
from pptune.ways_out import nothing_fits, nothing_legal

if TYPE_CHECKING:
    import optuna

MAX_ENUMERATED = 100_000
"""Up to so many legal plans all are scored; more are sampled."""

DEFAULT_TRIALS = 2_000
"""Sampled plans where the user gives no number."""

_PRIOR_SHARE = 0.5
"""Share of sampled trials spent on the cost model's prior before the sampler chooses."""

Objective = Literal["time", "memory", "pareto"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is searched for. Null axes take the values that the profile and the trainer offer."""

    global_batch_size: int
    num_ranks: int | None = None
    """Null: as many as the profile has."""
    data_parallel: int = 1
    num_gpus: int | None = None
    """Search P and D too: T * C * P * D GPUs."""
    schedules: tuple[Schedule, ...] = ("1f1b", "interleaved")
    num_chunks: tuple[int, ...] | None = None
    microbatch_sizes: tuple[int, ...] | None = None
    microbatch_group_sizes: tuple[int, ...] | None = None
    recompute: tuple[Literal["none", "full"], ...] = ("none",)
    layouts: tuple[Layout, ...] = ("even", "balanced")
    allow_empty_stages: bool = False
    objective: Objective = "time"
    baseline: str | None = None
    """`schedule=1f1b microbatch_size=1`; null: the best 1F1B over all other axes."""
    top: int = 10
    trials: int | None = None
    timeout_s: float | None = None
    storage: str | None = None
    study_name: str | None = None
    seed: int = 0
    max_enumerated: int = MAX_ENUMERATED


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
    question = _Question(model, request, axes_of(profile, request))
    listing = question.list(question.axes)
    if not listing.plans:
        raise nothing_legal(listing)
    scores = Scores(model, listing.plans)
    if not len(scores.known):
        raise NoAnswer(
            "no legal plan can be predicted: " + "; ".join(scores.missing_reasons.values())
        )
    found = _find(question, scores, reference, on_progress)
    if not found.ranked:
        raise nothing_fits(model, scores, question.axes, question.scores)
    plans = [scores.plans[index] for index in found.ranked]
    baseline, same_size, warnings = _baselines(question, plans[0])
    candidates = []
    for rank, plan in enumerate(plans, start=1):
        estimate = _estimate(model, plan)
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
        target=str(question.target),
        space=_space(question.axes, listing, scores, scores.lost_by(found.ranked[0])),
        proven_optimal=found.proven,
        objective=request.objective,
        memory_limit_bytes=model.memory_limit_bytes,
        ranks_per_node=setting.ranks_per_node,
        zero_stage=setting.zero_stage,
        links=setting.links,
        baseline=baseline,
        baseline_same_size=same_size,
        candidates=tuple(candidates),
        warnings=(*found.warnings, *warnings, *_cautions(model, scores, candidates[0])),
    )


def count_plans(profile: Profile, setting: Setting, request: Request) -> Space:
    """How many plans are legal, illegal by rule, and don't fit; no step is predicted."""
    model = CostModel(profile, setting)
    question = _Question(model, request, axes_of(profile, request))
    listing = question.list(question.axes)
    scores = Scores(model, listing.plans)
    if model.limits_memory:
        for index in scores.known:
            scores.judge(int(index))
    return _space(question.axes, listing, scores, Counter())


def axes_of(profile: Profile, request: Request) -> Axes:
    """The axes of a request. Raises UsageError where the numbers of GPUs don't work out."""
    return Axes(
        grids=_grids(profile, request),
        schedules=request.schedules,
        num_chunks=request.num_chunks,
        microbatch_sizes=request.microbatch_sizes,
        microbatch_group_sizes=request.microbatch_group_sizes,
        recompute=request.recompute,
        layouts=request.layouts,
    )


@dataclass(frozen=True, slots=True)
class _Question:
    """What every listing of one search has in common."""

    model: CostModel
    request: Request
    axes: Axes

    @property
    def target(self) -> Target:
        target = self.model.setting.target
        if target is None:
            raise UsageError("a search needs a target, whose rules decide what is legal")
        return target

    def list(self, axes: Axes) -> Listing:
        return list_plans(
            self.model,
            axes,
            target=self.target,
            global_batch_size=self.request.global_batch_size,
            allow_empty_stages=self.request.allow_empty_stages,
        )

    def scores(self, axes: Axes) -> Scores:
        return Scores(self.model, self.list(axes).plans)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """Indices of the best plans, and how sure that is."""

    ranked: list[int]
    proven: bool
    warnings: tuple[str, ...] = ()


def _find(
    question: _Question,
    scores: Scores,
    reference: ProfileReference,
    on_progress: Progress | None,
) -> _Found:
    request = question.request
    if request.objective != "time" and not question.model.knows_memory:
        raise UsageError(
            f"--objective {request.objective} needs memory numbers (parameter and activation "
            "bytes), which the profile does not have; profile again, or use --objective time"
        )
    if len(scores.known) > request.max_enumerated:
        return _sample(question, scores, reference)
    deadline = None if request.timeout_s is None else time.monotonic() + request.timeout_s
    indices = list(map(int, scores.known))
    warnings: tuple[str, ...] = ()
    try:
        ranked = _rank(question, scores, indices, deadline, on_progress)
        proven = True
    except OutOfTime:
        played = [index for index in indices if not np.isnan(scores.step_s[index])]
        ranked = _rank(question, scores, played, None, None)
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
        _store(question, scores, reference)
    return _Found(ranked=ranked, proven=proven, warnings=warnings)


def _rank(
    question: _Question,
    scores: Scores,
    indices: list[int],
    deadline: float | None,
    on_progress: Progress | None,
) -> list[int]:
    """The best of the plans at `indices` under the request's objective, best first."""
    top = question.request.top
    match question.request.objective:
        case "time":
            return scores.fastest(indices, top, deadline=deadline, on_progress=on_progress)
        case "memory":
            return scores.leanest(indices, top, deadline=deadline, on_progress=on_progress)
        case "pareto":
            count_gpus = len(question.axes.grids) > 1
            return scores.front(
                indices, count_gpus=count_gpus, deadline=deadline, on_progress=on_progress
            )


def _sample(question: _Question, scores: Scores, reference: ProfileReference) -> _Found:
    """The best of the plans that a study tried."""
    request, model = question.request, question.model
    by_bound = list(map(int, scores.known))
    num_trials = request.trials or min(DEFAULT_TRIALS, len(by_bound))
    study = _study(question, reference)

    def score(position: int) -> tuple[tuple[float, ...], float]:
        index = by_bound[position]
        scores.size(index)
        return _objectives(question, scores, index), _excess(model, scores, index)

    tried = sample(
        study,
        num_plans=len(by_bound),
        num_trials=num_trials,
        timeout_s=request.timeout_s,
        storage=request.storage,
        first=_promising(scores, max(1, round(_PRIOR_SHARE * num_trials))),
        score=score,
        label=lambda position: scores.plans[by_bound[position]].label,
    )
    indices = [by_bound[position] for position in tried]
    return _Found(
        ranked=_rank(question, scores, indices, None, None),
        proven=False,
        warnings=(
            f"{len(indices)} of {len(by_bound)} legal plans were sampled: a better one may exist",
        ),
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


def _objectives(question: _Question, scores: Scores, index: int) -> tuple[float, ...]:
    """What the study minimises: step time in seconds, peak bytes, GPUs."""
    plan, peak = scores.plans[index], float(scores.peak_bytes[index])
    match question.request.objective:
        case "time":
            return (scores.play(index),)
        case "memory":
            return (peak,)
        case "pareto" if len(question.axes.grids) > 1:
            return (scores.play(index), peak, float(plan.num_ranks * plan.data_parallel))
        case "pareto":
            return (scores.play(index), peak)


def _excess(model: CostModel, scores: Scores, index: int) -> float:
    """Peak memory over the limit - 1; 0 where either is not known."""
    peak, limit = float(scores.peak_bytes[index]), model.memory_limit_bytes
    return 0.0 if limit is None or np.isnan(peak) else peak / limit - 1


def _store(question: _Question, scores: Scores, reference: ProfileReference) -> None:
    """Keep every played plan in the user's study."""
    study = _study(question, reference)
    played = [
        (position, scores.plans[index], _objectives(question, scores, index))
        for position, index in enumerate(map(int, scores.known))
        if not np.isnan(scores.step_s[index]) and scores.fits[index]
    ]
    record(study, played, num_plans=len(scores.known), storage=question.request.storage)


def _study(question: _Question, reference: ProfileReference) -> "optuna.Study":
    request, setting = question.request, question.model.setting
    num_objectives = 1
    if request.objective == "pareto":
        num_objectives = 3 if len(question.axes.grids) > 1 else 2
    space = {
        **asdict(question.axes),
        "profile": reference.digest,
        "global_batch_size": request.global_batch_size,
        "target": str(question.target),
        "objective": request.objective,
        "memory_limit_bytes": question.model.memory_limit_bytes,
        "zero_stage": setting.zero_stage,
        "ranks_per_node": setting.ranks_per_node,
        "links": [f"{x.scope}:{x.latency_s},{x.bytes_per_s}" for x in setting.links],
        "allow_empty_stages": request.allow_empty_stages,
    }
    name = f"{question.model.profile.model.name}, global batch {request.global_batch_size}"
    return open_study(
        storage=request.storage,
        name=request.study_name or name,
        num_objectives=num_objectives,
        space=space,
        seed=request.seed,
    )


def _baselines(
    question: _Question, pick: Plan
) -> tuple[PredictedPlan | None, PredictedPlan | None, tuple[str, ...]]:
    """(baseline, 1F1B at the pick's own b, warnings)."""
    axes = parse_baseline(question.request.baseline, question.axes)
    listing = question.list(axes)
    baseline = _best(question, listing)
    warnings: tuple[str, ...] = ()
    if baseline is None:
        if listing.plans:
            why = "none of its plans fits"
        else:
            why = "; ".join(str(violation) for violation in listing.examples.values())
        if question.request.baseline is not None:
            raise UsageError(f"baseline {question.request.baseline!r}: {why}")
        warnings = (f"there is no 1F1B baseline: {why}",)
    same = parse_baseline(f"microbatch_size={pick.microbatch_size}", question.axes)
    return baseline, _best(question, question.list(same)), warnings


def _best(question: _Question, listing: Listing) -> PredictedPlan | None:
    """The fastest fitting plan of a listing, or None."""
    scores = Scores(question.model, listing.plans)
    found = scores.fastest(map(int, scores.known), 1)
    if not found:
        return None
    plan = scores.plans[found[0]]
    return PredictedPlan(plan=plan, estimate=_estimate(question.model, plan))


def _estimate(model: CostModel, plan: Plan) -> Estimate:
    estimate = model.estimate(plan)
    assert isinstance(estimate, Estimate), estimate
    return estimate


def _grids(profile: Profile, request: Request) -> tuple[tuple[int, int], ...]:
    """The (P, D) pairs."""
    if request.num_gpus is None:
        return ((request.num_ranks or profile.num_ranks, request.data_parallel),)
    if request.num_ranks is not None:
        raise UsageError("--gpus searches the number of ranks: leave out --ranks")
    if not profile.allreduce:
        raise UsageError(
            "--gpus trades pipeline ranks for data-parallel replicas and needs an all-reduce "
            "measurement, which the profile does not have; profile with 2 or more ranks, or give "
            "--ranks and --data-parallel"
        )
    shards = profile.parallel.tensor * profile.parallel.context
    if request.num_gpus % shards:
        raise UsageError(
            f"--gpus {request.num_gpus} is not a multiple of tensor x context parallel ({shards})"
        )
    pairs = request.num_gpus // shards
    return tuple(
        (num_ranks, pairs // num_ranks)
        for num_ranks in range(1, pairs + 1)
        if pairs % num_ranks == 0 and num_ranks <= profile.model.num_layers
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
