"""plans.json: what `search` found and what `validate`, `explain`, `show` and `export` read.

Format history:
1: first version.
"""

from pathlib import Path

import msgspec

from pptune.errors import FileError, PptuneError
from pptune.estimate import Candidate, PredictedPlan, broken_estimate_rule
from pptune.files import Document, load, save
from pptune.model import ModelSpec, broken_model_rule
from pptune.plan import check_plan
from pptune.profiles import Link

_SPEEDUP_TOLERANCE = 1e-3


class ProfileReference(msgspec.Struct, frozen=True, kw_only=True):
    """The profile a search read."""

    path: str
    digest: str
    """SHA-256 of its bytes: tells whether the file has changed since."""


class Space(msgspec.Struct, frozen=True, kw_only=True):
    """What was searched, counted."""

    num_legal: int
    num_illegal: dict[str, int] = {}
    """By rule."""
    num_infeasible: int = 0
    """Legal plans that do not fit in memory."""
    lost_by: dict[str, int] = {}
    """Why the legal plans that lost did, by reason code."""
    axes: dict[str, tuple[str, ...]] = {}
    """The values searched, by axis."""


class PlansFile(Document, frozen=True, kw_only=True):
    """The answer of a search."""

    kind: str = "plans"
    profile: ProfileReference
    model: ModelSpec
    dtype: str
    device: str
    """`cpu` or `cuda`: what the profile was measured on and validate runs on."""
    global_batch_size: int
    target: str
    space: Space
    proven_optimal: bool
    """True when every legal plan was evaluated or excluded by a proven bound."""
    objective: str = "time"
    memory_limit_bytes: int | None = None
    ranks_per_node: int | None = None
    """Where the search was told; null: as the profile says."""
    zero_stage: int = 0
    tensor_parallel: int = 1
    context_parallel: int = 1
    links: tuple[Link, ...] = ()
    """Given on the command line in place of measured ones."""
    baseline: PredictedPlan | None
    """The best 1F1B plan over all b, or the one the user gave."""
    baseline_same_size: PredictedPlan | None = None
    """The 1F1B plan at the pick's own b."""
    candidates: tuple[Candidate, ...]
    warnings: tuple[str, ...] = ()


def load_plans(path: str | Path) -> PlansFile:
    """Read and check a plans file. Raises FileError."""
    plans = load(path, PlansFile, kind="plans")
    rule = broken_model_rule(plans.model) or _broken_order_rule(plans)
    if rule is not None:
        raise FileError(f"{path}: {rule}; search again")
    named: list[tuple[str, Candidate | PredictedPlan]] = []
    if plans.baseline is not None:
        named.append(("baseline", plans.baseline))
    named += [(f"candidate {row.rank}", row) for row in plans.candidates]
    if plans.baseline_same_size is not None:
        named.append(("baseline_same_size", plans.baseline_same_size))
    for name, predicted in named:
        rule = _broken_row_rule(plans, predicted)
        if rule is not None:
            raise FileError(f"{path}: {name}: {rule}")
    return plans


def _broken_order_rule(plans: PlansFile) -> str | None:
    places = [row.rank for row in plans.candidates]
    if places != list(range(1, len(places) + 1)):
        return "the candidates' ranks are not 1, 2, 3, ..."
    if plans.ranks_per_node == 0:
        return "ranks_per_node must be 1 or more"
    if min(plans.tensor_parallel, plans.context_parallel) < 1 or plans.zero_stage not in (0, 1):
        return "tensor_parallel and context_parallel must be 1 or more, zero_stage 0 or 1"
    for link in plans.links:
        if link.bytes_per_s <= 0:
            return f"a {link.scope} link has no bandwidth"
    return None


def _broken_row_rule(plans: PlansFile, predicted: Candidate | PredictedPlan) -> str | None:
    """What is wrong with a plan of the file or with its estimate, or None."""
    plan = predicted.plan
    try:
        check_plan(plan, allow_empty_stages=True)
    except PptuneError as error:
        return str(error)
    if plan.num_layers != plans.model.num_layers:
        return f"it places {plan.num_layers} layers, but the model has {plans.model.num_layers}"
    if plan.global_batch_size != plans.global_batch_size:
        return (
            f"its global batch is {plan.global_batch_size}, but the file's is "
            f"{plans.global_batch_size}"
        )
    rule = broken_estimate_rule(predicted)
    if rule is None and isinstance(predicted, Candidate):
        return _broken_speedup_rule(plans, predicted)
    return rule


def _broken_speedup_rule(plans: PlansFile, row: Candidate) -> str | None:
    if row.speedup_over_baseline is None:
        return None
    if plans.baseline is None:
        return "it has a speed-up, but there is no baseline"
    ratio = plans.baseline.estimate.step_time_s / row.estimate.step_time_s
    if abs(row.speedup_over_baseline / ratio - 1) > _SPEEDUP_TOLERANCE:
        return (
            f"speedup_over_baseline is {row.speedup_over_baseline}, but the step times make {ratio}"
        )
    return None


def save_plans(plans: PlansFile, path: str | Path) -> None:
    """Write a plans file atomically. Raises FileError."""
    save(plans, path)
