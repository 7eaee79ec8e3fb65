"""The plans that a search's gain is measured against."""

from dataclasses import replace
from typing import Any, get_args

from pptune.cost_model import CostModel
from pptune.errors import UsageError
from pptune.estimate import Estimate, PredictedPlan
from pptune.plan import Plan, Schedule
from pptune.search.request import Query
from pptune.search.scores import Scores
from pptune.search.space import Axes, Listing

_AXES = {
    "num_chunks": "num_chunks",
    "chunks": "num_chunks",
    "microbatch_size": "microbatch_sizes",
    "microbatch_group_size": "microbatch_group_sizes",
}


def parse_baseline(text: str | None, axes: Axes) -> Axes:
    """`axes` narrowed to what `schedule=1f1b microbatch_size=1` names; null means any 1F1B.

    The baseline is the best plan on the narrowed axes, so that it is tuned over all that the text
    leaves open. Raises UsageError for an unknown name or value.
    """
    words = {"schedule": "1f1b"}
    for word in (text or "").split():
        name, equals, value = word.partition("=")
        if not equals or not value:
            raise UsageError(
                f"baseline {text!r}: {word!r} is not name=value; write it like "
                "'schedule=1f1b microbatch_size=1'"
            )
        words[name] = value
    changes: dict[str, Any] = {}
    for name, value in words.items():
        if name == "schedule":
            changes["schedules"] = (_one_of(value, get_args(Schedule), text, name),)
        elif name == "recompute":
            changes["recompute"] = (_one_of(value, ("none", "full"), text, name),)
        elif name in ("layout", "layouts"):
            changes["layouts"] = (_one_of(value, ("even", "balanced"), text, name),)
        elif name in _AXES:
            changes[_AXES[name]] = (_positive(value, text, name),)
        elif name in ("num_ranks", "ranks"):
            wanted = _positive(value, text, name)
            changes["grids"] = tuple(grid for grid in axes.grids if grid[0] == wanted)
            if not changes["grids"]:
                ranks = ", ".join(map(str, sorted({p for p, _ in axes.grids})))
                raise UsageError(f"baseline {text!r}: {name} must be one of {ranks}")
        else:
            known = ", ".join(["schedule", *_AXES, "num_ranks", "recompute", "layout"])
            raise UsageError(f"baseline {text!r}: {name!r} is unknown; use {known}")
    if "num_chunks" not in changes and "schedules" in changes:
        changes["num_chunks"] = None
    return replace(axes, **changes)


def is_named(text: str, plan: Plan) -> bool:
    """Whether `plan` is one that `text` names. Raises UsageError as `parse_baseline` does."""
    axes = parse_baseline(text, Axes(grids=((plan.num_ranks, plan.data_parallel),), schedules=()))

    def allows(values: tuple[object, ...] | None, value: object) -> bool:
        return values is None or value in values

    return (
        plan.schedule in axes.schedules
        and allows(axes.num_chunks, plan.num_chunks)
        and allows(axes.microbatch_sizes, plan.microbatch_size)
        and allows(axes.microbatch_group_sizes, plan.microbatch_group_size)
        and plan.recompute in axes.recompute
    )


def baselines(
    query: Query, pick: Plan
) -> tuple[PredictedPlan | None, PredictedPlan | None, tuple[str, ...]]:
    """(baseline, 1F1B at the pick's own b, warnings)."""
    axes = parse_baseline(query.request.baseline, query.axes)
    listing = query.list(axes)
    baseline = _best(query, listing)
    warnings: tuple[str, ...] = ()
    if baseline is None:
        if listing.plans:
            why = "none of its plans fits"
        else:
            why = "; ".join(str(violation) for violation in listing.examples.values())
        if query.request.baseline is not None:
            raise UsageError(f"baseline {query.request.baseline!r}: {why}")
        warnings = (f"there is no 1F1B baseline: {why}",)
    same = parse_baseline(f"microbatch_size={pick.microbatch_size}", query.axes)
    return baseline, _best(query, query.list(same)), warnings


def _best(query: Query, listing: Listing) -> PredictedPlan | None:
    """The fastest fitting plan of a listing, or None."""
    scores = Scores(query.model, listing.plans)
    found = scores.fastest(map(int, scores.known), 1)
    if not found:
        return None
    plan = scores.plans[found[0]]
    return PredictedPlan(plan=plan, estimate=estimated(query.model, plan))


def estimated(model: CostModel, plan: Plan) -> Estimate:
    """The estimate of a plan that is known to have one."""
    estimate = model.estimate(plan)
    assert isinstance(estimate, Estimate), estimate
    return estimate


def _one_of(value: str, allowed: tuple[str, ...], text: str | None, name: str) -> str:
    if value not in allowed:
        raise UsageError(
            f"baseline {text!r}: {name} {value!r} is unknown; use {', '.join(allowed)}"
        )
    return value


def _positive(value: str, text: str | None, name: str) -> int:
    if not value.isdecimal() or int(value) < 1:
        raise UsageError(f"baseline {text!r}: {name} must be a whole number of 1 or more")
    return int(value)
