"""plans.json: what `search` found and what `validate`, `explain`, `show` and `export` read.

Format history:
1: first version.
"""

from pathlib import Path

import msgspec

from pptune.errors import FileError, PptuneError
from pptune.estimate import Candidate, PredictedPlan
from pptune.files import Document, load, save
from pptune.model import ModelSpec
from pptune.plan import check_plan
from pptune.profiles import Link


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
    named = [(f"candidate {row.rank}", row.plan) for row in plans.candidates]
    if plans.baseline is not None:
        named.append(("baseline", plans.baseline.plan))
    if plans.baseline_same_size is not None:
        named.append(("baseline_same_size", plans.baseline_same_size.plan))
    for name, plan in named:
        try:
            check_plan(plan, allow_empty_stages=True)
        except PptuneError as error:
            raise FileError(f"{path}: {name}: {error}") from None
        if plan.num_layers != plans.model.num_layers:
            raise FileError(
                f"{path}: {name} places {plan.num_layers} layers, but the model has "
                f"{plans.model.num_layers}"
            )
    return plans


def save_plans(plans: PlansFile, path: str | Path) -> None:
    """Write a plans file atomically. Raises FileError."""
    save(plans, path)
