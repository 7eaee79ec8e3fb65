"""A sheet of rows, shown three ways: as a terminal's table, as CSV and as Markdown.

The terminal drops the least important columns when they do not fit, and says which; CSV carries
every column in SI units for programs. Nothing here computes a number.
"""

import csv
import io
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from pptune.units import format_bytes, format_ratio, format_seconds, seconds_unit

UNKNOWN = "-"
"""What a terminal or Markdown cell shows where there is no number; CSV leaves it empty."""

BULLET = "*"

COLUMN_GAP = 2
"""Spaces between two columns of a terminal table."""

RULED_HEADER = box.Box("    \n    \n -- \n    \n    \n    \n    \n    \n", ascii=True)
"""A rule under the header and nothing else; ASCII, so that it looks the same in every locale."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column: its name for programs, its title for people, and how a value becomes text."""

    key: str
    title: str
    text: Callable[[Any], str] = str
    left: bool = False
    priority: int = 0
    """0 always stays; on a narrow terminal those with the highest have to go."""
    listed: bool = True
    """False: in CSV only, because every row says the same. A column without values always is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sheet:
    """A table before it has a form."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[object, ...], ...]
    """One value per column, None where unknown; SI units."""
    notes: tuple[str, ...] = ()
    """Sentences to read under the table."""
    strong_rows: frozenset[int] = frozenset()
    """Rows that stand out: the recommendation."""
    faint_rows: frozenset[int] = frozenset()
    """Rows for reference only."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        shown, hidden = _columns_that_fit(self, options.max_width)
        if self.title:
            yield Text(self.title, style="bold")
        if self.rows:
            yield _rich_table(self, shown, options.max_width)
        if hidden:
            names = ", ".join(column.title for column in hidden)
            yield Text(f"not shown at this width: {names}", style="dim")
        if self.notes:
            yield _bullets(self.notes)


def make_console(stream: TextIO | None = None, *, width: int | None = None) -> Console:
    """A console on `stream` (standard output) that never fails on a character.

    No escape codes when the stream is not a terminal or NO_COLOR is set; characters that the
    stream's encoding lacks are written as escapes.
    """
    stream = stream or sys.stdout
    if isinstance(stream, io.TextIOWrapper) and (stream.encoding or "").lower() != "utf-8":
        stream.reconfigure(errors="backslashreplace")
    return Console(
        file=stream,
        width=width,
        color_system=None if os.environ.get("NO_COLOR") else "auto",
        markup=False,
        highlight=False,
        emoji=False,
    )


def as_csv(sheet: Sheet) -> str:
    """Every column, SI units, header of keys; None is an empty cell."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow([column.key for column in sheet.columns])
    for row in sheet.rows:
        writer.writerow(["" if value is None else _plain(value) for value in row])
    return stream.getvalue()


def as_markdown(sheet: Sheet) -> str:
    """A pipe table of the listed columns, as text for people, and the notes as a list."""
    listed = listed_columns(sheet)
    columns = [sheet.columns[index] for index in listed]
    lines = [f"## {sheet.title}", ""] if sheet.title else []
    if sheet.rows:
        lines.append(_pipe_row(column.title for column in columns))
        lines.append(_pipe_row(":--" if column.left else "--:" for column in columns))
        for row in sheet.rows:
            lines.append(_pipe_row(cell_text(sheet.columns[i], row[i]) for i in listed))
        lines.append("")
    lines += [f"{BULLET} {note}" for note in sheet.notes]
    return "\n".join(lines).rstrip("\n") + "\n"


def facts_sheet(
    title: str, facts: Iterable[tuple[str, str | None]], notes: Iterable[str] = ()
) -> Sheet:
    """Two columns, what and how much: one plan's estimate, or what a machine has."""
    return Sheet(
        title=title,
        columns=(
            Column(key="quantity", title="quantity", left=True),
            Column(key="value", title="value"),
        ),
        rows=tuple(facts),
        notes=tuple(notes),
    )


def listed_columns(sheet: Sheet) -> list[int]:
    """Indices of the columns that people get to see."""
    return [
        index
        for index, column in enumerate(sheet.columns)
        if column.listed and any(row[index] is not None for row in sheet.rows)
    ]


def cell_text(column: Column, value: object) -> str:
    """What a person reads in the cell."""
    return UNKNOWN if value is None else column.text(value)


def time_column(
    key: str, title: str, values: Iterable[float | None], *, priority: int = 0
) -> Column:
    """Seconds in one unit for the whole column, so that the eye can compare; the title names it.

    Four digits of the largest value: neighbours in a ranking often differ by less than a per cent.
    """
    known = [abs(value) for value in values if value is not None]
    unit, scale = seconds_unit(known)
    largest = max(known, default=0.0) / scale
    decimals = 0 if largest >= 1000 else 1 if largest >= 100 else 2 if largest >= 10 else 3
    return Column(
        key=key,
        title=f"{title} {unit}",
        text=lambda value: f"{value / scale:.{decimals}f}",
        priority=priority,
    )


def ratio_column(key: str, title: str, *, sign: bool = False, priority: int = 0) -> Column:
    """A ratio shown in per cent."""
    return Column(
        key=key, title=title, text=lambda value: format_ratio(value, sign=sign), priority=priority
    )


def bytes_column(key: str, title: str, *, priority: int = 0) -> Column:
    """Bytes shown in binary units."""
    return Column(key=key, title=title, text=format_bytes, priority=priority)


def seconds_column(key: str, title: str, *, priority: int = 0) -> Column:
    """Seconds, each cell with its own unit: for values of very different size."""
    return Column(key=key, title=title, text=format_seconds, priority=priority)


def _plain(value: object) -> object:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple | list):
        return " ".join(str(item) for item in value)
    return value


def _pipe_row(cells: Iterable[str]) -> str:
    escaped = (cell.replace("|", "\\|").replace("\n", " ") for cell in cells)
    return "| " + " | ".join(escaped) + " |"


def _columns_that_fit(sheet: Sheet, width: int) -> tuple[list[int], list[Column]]:
    """Indices of the columns to show, and the columns left out for want of room.

    The more important go first; of equals the left one.
    """
    listed = listed_columns(sheet)
    shown = [index for index in listed if sheet.columns[index].priority == 0]
    rest = [index for index in listed if index not in shown]
    for index in sorted(rest, key=lambda index: sheet.columns[index].priority):
        if _table_width(sheet, [*shown, index]) <= width:
            shown.append(index)
    return sorted(shown), [sheet.columns[index] for index in listed if index not in shown]


def _table_width(sheet: Sheet, shown: Sequence[int]) -> int:
    return sum(_column_width(sheet, index) for index in shown) + COLUMN_GAP * (len(shown) - 1)


def _column_width(sheet: Sheet, index: int) -> int:
    """The longest cell, or the longest word of the title, which may take several lines."""
    column = sheet.columns[index]
    cells = (cell_text(column, row[index]) for row in sheet.rows)
    return max(map(len, [*column.title.split(), *cells]), default=0)


def _bullets(notes: Iterable[str]) -> Table:
    grid = Table.grid(padding=(0, 1, 0, 0))
    for note in notes:
        grid.add_row(BULLET, Text(note))
    return grid


def _rich_table(sheet: Sheet, shown: Sequence[int], width: int) -> Table:
    table = Table(
        box=RULED_HEADER, show_edge=False, pad_edge=False, padding=(0, COLUMN_GAP - 1, 0, 0)
    )
    for index in shown:
        column = sheet.columns[index]
        table.add_column(
            Text(column.title, style="bold"),
            justify="left" if column.left else "right",
            vertical="bottom",
            overflow="fold",
            width=min(_column_width(sheet, index), width),
        )
    for number, row in enumerate(sheet.rows):
        style = "bold" if number in sheet.strong_rows else None
        style = "dim" if number in sheet.faint_rows else style
        table.add_row(
            *(Text(cell_text(sheet.columns[index], row[index])) for index in shown), style=style
        )
    return table
