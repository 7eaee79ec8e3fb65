"""Trainers: what each can run, and a plan in each one's own options."""

from pptune.targets.batch import batch_violation
from pptune.targets.exporting import check_written, export, reread
from pptune.targets.legality import illegal, uneven_violation
from pptune.targets.target import ExportedFile, Target, Violation, Written
from pptune.targets.trainers import (
    TARGETS,
    executor_of,
    keeps_boundary_tensors,
    legal_group_sizes,
    parse_target,
    schedules_of,
    supports_uneven,
)

__all__ = [
    "TARGETS",
    "ExportedFile",
    "Target",
    "Violation",
    "Written",
    "batch_violation",
    "check_written",
    "executor_of",
    "export",
    "illegal",
    "keeps_boundary_tensors",
    "legal_group_sizes",
    "parse_target",
    "reread",
    "schedules_of",
    "supports_uneven",
    "uneven_violation",
]
