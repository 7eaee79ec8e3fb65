"""Options that several commands share, and how their values are read."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pptune.errors import UsageError
from pptune.units import parse_bytes_per_s, parse_positive_ints, parse_seconds

if TYPE_CHECKING:
    from pptune.profiles import Link


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
QuietOption = Annotated[
    bool, typer.Option("--quiet", "-q", show_default=False, help="No progress on stderr.")
]
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


def ints(text: str, what: str) -> tuple[int, ...]:
    """Whole numbers in the order given. Raises UsageError."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"{what} {text!r} is not a list of whole numbers; write 3,5,5,3") from None


def at_least_one(**values: int | None) -> None:
    """Raise UsageError for an option whose number is below 1; None is an option not given."""
    for name, value in values.items():
        if value is not None and value < 1:
            raise UsageError(f"--{name.replace('_', '-')} is {value}; it must be 1 or more")


def one_of(value: str, allowed: tuple[str, ...], what: str) -> None:
    """Raise UsageError where `value` is not one of `allowed`."""
    if value not in allowed:
        raise UsageError(f"{what} {value!r} is unknown; use {', '.join(allowed)}")


def existing(path: Path, what: str) -> Path:
    """`path`, which must be a readable file. Raises UsageError with what to do."""
    if not path.is_file():
        raise UsageError(f"{what} {path} does not exist; give the path of a {what}")
    return path


def parse_link(text: str) -> "Link":
    """`intra:20us,12GB/s` or `inter:...` -> a given link. Raises UsageError."""
    from pptune.profiles import Link

    scope, _, numbers = text.partition(":")
    latency, comma, bandwidth = numbers.partition(",")
    if scope not in ("intra", "inter") or not comma:
        raise UsageError(f"--link {text!r} is not a link; write it like inter:20us,12GB/s")
    return Link(
        scope=scope,  # type: ignore[arg-type]
        source_rank=None,
        target_rank=None,
        latency_s=parse_seconds(latency, what="--link latency"),
        bytes_per_s=parse_bytes_per_s(bandwidth, what="--link bandwidth"),
        source="given",
    )


def words(text: str | None, allowed: tuple[str, ...], what: str) -> tuple[str, ...] | None:
    """Names out of `allowed` from `a,b`, or None where not given. Raises UsageError."""
    if text is None:
        return None
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    for name in names:
        if name not in allowed:
            raise UsageError(f"{what} {name!r} is unknown; use some of {', '.join(allowed)}")
    if not names:
        raise UsageError(f"{what} is empty; use some of {', '.join(allowed)}")
    return names
