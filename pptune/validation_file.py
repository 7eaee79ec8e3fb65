"""validation.json: what was predicted and what was measured.

Format history:
1: first version.
"""

from pathlib import Path
from typing import Literal

import msgspec

from pptune.errors import FileError, PptuneError
from pptune.estimate import Breakdown
from pptune.files import Document, load, save
from pptune.plan import Plan, check_plan
from pptune.profiles import Machine

_ERROR_TOLERANCE = 1e-6


class RecordedAction(msgspec.Struct, frozen=True, kw_only=True):
    """One action of a measured step; times are seconds from the step's start, clocks aligned."""

    rank: int
    stage: int
    work: Literal["F", "B", "I", "W"]
    microbatch: int
    start_s: float
    end_s: float


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One plan, run for real or replayed."""

    plan: Plan
    predicted_s: float
    measured_s: float | None
    """A robust centre of `samples_s`; null where no step finished."""
    samples_s: tuple[float, ...]
    """One per timed step: the slowest rank's wall time, in the order they were run."""
    rounds: tuple[int, ...] = ()
    """The interleaving round of each sample."""
    noise_ratio: float | None
    """Half-width of the centre's 95 % confidence interval / the centre."""
    measured_breakdown_s: Breakdown | None
    predicted_breakdown_s: Breakdown | None = None
    error_ratio: float | None
    """predicted / measured - 1."""
    peak_memory_bytes: tuple[int, ...] | None
    """Measured, one per rank."""
    predicted_peak_memory_bytes: tuple[int, ...] | None
    status: Literal["ok", "oom", "timeout", "crash"]
    reason: str | None
    """One line for a status other than ok: rank, phase and cause."""
    is_baseline: bool = False
    model_index: int = 0
    timeline: tuple[RecordedAction, ...] | None = None
    """Of one step, when recording was asked for."""


class SimpleModel(msgspec.Struct, frozen=True, kw_only=True):
    """How a simpler model would have done on the same runs."""

    mape: float | None
    regret_top1: float | None


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict over the runs that finished."""

    mape: float | None
    max_abs_error: float | None
    spearman: float | None
    regret_top1: float | None
    """Measured time of our first pick / of the best measured plan - 1; exhaustive runs only."""
    regret_top3: float | None
    winner: str | None
    """A plan's label, or `tie`."""
    speedup_over_baseline: float | None
    order_kept: bool | None
    num_plans: int = 0
    noise_floor: float | None = None
    """Median over plans of |median of odd rounds / median of even rounds - 1|."""
    pairs_ordered: float | None = None
    """Of pairs in the same global-batch group whose measured gap exceeds twice the noise, the share
    predicted in the right order."""
    tied_with: tuple[str, ...] = ()
    device_time_s: float | None = None
    models: dict[str, SimpleModel] = {}


class ValidationFile(Document, frozen=True, kw_only=True):
    """The answer of `validate`."""

    kind: str = "validation"
    mode: Literal["real", "replay"]
    machine: Machine | None = None
    plans_digest: str | None = None
    """SHA-256 of the plans file, so that --resume knows that it belongs to it."""
    settings: dict[str, str] = {}
    recording_cost_s: float | None = None
    """Measured cost of recording one event, where a timeline was recorded."""
    runs: tuple[Run, ...]
    summary: Summary | None
    """Null until the run has ended."""
    warnings: tuple[str, ...] = ()


def load_validation(path: str | Path) -> ValidationFile:
    """Read and check a validation file. Raises FileError."""
    validation = load(path, ValidationFile, kind="validation")
    for number, run in enumerate(validation.runs, start=1):
        rule = _broken_run_rule(run)
        if rule is not None:
            raise FileError(f"{path}: run {number}: {rule}; validate again")
    return validation


def _broken_run_rule(run: Run) -> str | None:
    """What is wrong with a run, or None."""
    try:
        check_plan(run.plan, allow_empty_stages=True)
    except PptuneError as error:
        return str(error)
    if not run.predicted_s > 0:
        return f"predicted_s is {run.predicted_s}; it must be above 0"
    if run.samples_s and not min(run.samples_s) > 0:
        return f"a sample is {min(run.samples_s)} s; samples must be above 0"
    if (run.measured_s is None) != (not run.samples_s):
        return "measured_s must stand exactly where there are samples"
    if run.rounds and len(run.rounds) != len(run.samples_s):
        return f"{len(run.samples_s)} samples have {len(run.rounds)} rounds"
    if list(run.rounds) != sorted(run.rounds):
        return "rounds must not decrease"
    if run.measured_s is not None:
        if not min(run.samples_s) <= run.measured_s <= max(run.samples_s):
            return f"measured_s {run.measured_s} lies outside its samples"
        expected = run.predicted_s / run.measured_s - 1
        if run.error_ratio is None or abs(run.error_ratio - expected) > _ERROR_TOLERANCE:
            return f"error_ratio is {run.error_ratio}, but the times make {expected}"
    for action in run.timeline or ():
        if not (
            action.stage < run.plan.num_stages
            and action.rank == run.plan.rank_of(action.stage)
            and action.microbatch < run.plan.num_microbatches
            and action.start_s <= action.end_s
        ):
            return f"the timeline has the impossible action {action}"
    return None


def save_validation(validation: ValidationFile, path: str | Path) -> None:
    """Write a validation file atomically. Raises FileError."""
    save(validation, path)
