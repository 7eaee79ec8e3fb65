"""Options that several commands share, and how their values are read."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from pptune.errors import UsageError
from pptune.units import parse_positive_ints, parse_seconds


class Form(StrEnum):
    """How a result is printed."""

    table = "table"
    json = "json"


class TableForm(StrEnum):
    """How a ranking is printed."""

    table = "table"
    json = "json"
    csv = "csv"
    md = "md"


FormOption = Annotated[Form, typer.Option("--format", help="How to print the result.")]
TableFormOption = Annotated[TableForm, typer.Option("--format", help="How to print the result.")]
OutputOption = Annotated[Path | None, typer.Option("--output", "-o", help="File to write.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.")]
SeedOption = Annotated[int, typer.Option("--seed", help="Seed of whatever is drawn.")]
TimeoutOption = Annotated[
    str, typer.Option("--timeout", help="Longest time one run may take before it is ended.")
]


def seconds_or_none(text: str | None, what: str) -> float | None:
    """Seconds, or None where the option was not given."""
    return None if text is None else parse_seconds(text, what=what)


def ints_or_none(text: str | None, what: str) -> tuple[int, ...] | None:
    """Positive whole numbers, or None where the option was not given."""
    return None if text is None else parse_positive_ints(text, what=what)


def existing(path: Path, what: str) -> Path:
    """`path`, which must be a readable file. Raises UsageError with what to do."""
    if not path.is_file():
        raise UsageError(f"{what} {path} does not exist; give the path of a {what}")
    return path
