"""What sizes a schedule can run at all, whatever the trainer."""

from pptune.errors import PlanError
from pptune.schedules.order import Shape


def need_chunks(
    schedule: str, shape: Shape, *, exactly: int | None = None, at_least: int = 1
) -> None:
    """Raise PlanError where `schedule` cannot have this many stages per rank."""
    chunks = shape.num_chunks
    if exactly is not None and chunks != exactly:
        advice = " or --schedule interleaved" if exactly == 1 else ""
        raise PlanError(
            f"{schedule} has exactly {exactly} stage{'s' * (exactly > 1)} per rank, but chunks is "
            f"{chunks}; use --chunks {exactly}{advice}"
        )
    if chunks < at_least:
        raise PlanError(
            f"{schedule} needs {at_least} or more stages per rank, but chunks is {chunks}; "
            f"use --chunks {at_least} or --schedule 1f1b"
        )
