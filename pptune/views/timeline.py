"""A step's timeline as text: one row per rank, time from left to right."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from statistics import median

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from pptune.units import format_seconds
from pptune.views.plans import shown_label
from pptune.views.slices import Slice, Timeline

READABLE_CELLS = 3
"""Where ordinary actions are narrower than this, a cell sums up what it holds, and the start and
the end are magnified below."""

DOMINANT_RATIO = 0.8
"""A cell that holds several actions shows the work that takes more than this of its busy time."""

MIXED = "="
"""What a cell shows where no kind of work dominates."""

TICK_EVERY = 16
"""Cells between two marks of the time axis."""

STYLES = {
    "warmup": "blue", "steady forward": "cyan", "steady backward": "green",
    "weight gradient": "yellow", "cooldown": "magenta", "bubble": "dim",
}  # fmt: skip

OVERVIEW_STYLES = {
    "F": "steady forward", "B": "steady backward", "I": "steady backward",
    "W": "weight gradient", ".": "bubble", MIXED: "steady forward",
}  # fmt: skip


class TextTimeline:
    """Draws a timeline at whatever width the console has."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._rows = timeline.by_rank()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        timeline = self._timeline
        label_width = len(_label(len(self._rows) - 1))
        cells = max(options.max_width - label_width, 1)
        end_s = timeline.end_s
        label = shown_label(timeline.plan.label)
        yield Text(f"{label}, {timeline.name}: {format_seconds(end_s)}", "bold")
        if not timeline.slices or end_s <= 0:
            yield Text("No action was recorded.")
            return
        yield _legend(coloured=console.color_system is not None)
        ordinary_s = median(item.end_s - item.start_s for item in timeline.slices)
        readable = ordinary_s * cells >= READABLE_CELLS * end_s
        yield from self._panel(0.0, end_s, cells, named=readable)
        longest_name = max(len(self._name(item)) for item in timeline.slices)
        window_s = ordinary_s * cells / (longest_name + 1)
        if not readable and 0 < window_s < end_s:
            yield Text(f"The first {format_seconds(window_s)}:")
            yield from self._panel(0.0, window_s, cells, named=True)
            yield Text(f"The last {format_seconds(window_s)}:")
            yield from self._panel(end_s - window_s, end_s, cells, named=True)

    def _panel(self, start_s: float, end_s: float, cells: int, *, named: bool) -> list[Text]:
        lines = [
            Text(_label(rank))
            + (
                self._row(slices, start_s, end_s, cells)
                if named
                else _overview(slices, end_s, cells)
            )
            for rank, slices in enumerate(self._rows)
        ]
        axis = " " * len(_label(0)) + _axis(start_s, end_s, cells)
        return [*lines, Text(axis, "dim", no_wrap=True, overflow="crop")]

    def _row(self, slices: Sequence[Slice], start_s: float, end_s: float, cells: int) -> Text:
        """A rank's cells, each painted by what runs at its middle."""
        phases = _phases(slices)
        row = Text(no_wrap=True, overflow="crop")
        for index, run in groupby(_running(slices, start_s, end_s, cells)):
            width = sum(1 for _ in run)
            if index is None:
                row.append("." * width, STYLES["bubble"])
            else:
                row.append(self._named(slices[index], width), STYLES[phases[index]])
        return row

    def _name(self, item: Slice) -> str:
        """`2F0`; with one stage per rank the rank already says which stage it is."""
        return item.name if self._timeline.plan.num_chunks > 1 else f"{item.work}{item.microbatch}"

    def _named(self, item: Slice, width: int) -> str:
        """The most telling name that leaves a dash before the next, drawn out with dashes."""
        names = (self._name(item), f"{item.work}{item.microbatch}")
        name = next((name for name in names if len(name) < width), item.work)
        return name + "-" * (width - len(name))


def _label(rank: int) -> str:
    return f"rank {rank:<3d}"


def _legend(*, coloured: bool) -> Text:
    text = Text("F forward, B backward, I and W its input and weight parts, = a mixture, . bubble")
    for name, style in STYLES.items() if coloured else ():
        text.append("; ").append(name, style)
    return text


def _running(
    slices: Sequence[Slice], start_s: float, end_s: float, cells: int
) -> Iterator[int | None]:
    """For each cell the index of the slice that runs at its middle, or None."""
    starts = [item.start_s for item in slices]
    for cell in range(cells):
        middle_s = start_s + (cell + 0.5) * (end_s - start_s) / cells
        index = bisect_right(starts, middle_s) - 1
        yield index if index >= 0 and slices[index].end_s > middle_s else None


def _overview(slices: Sequence[Slice], end_s: float, cells: int) -> Text:
    """A rank's whole step in cells that hold several actions each."""
    cell_s = end_s / cells
    busy_s: list[defaultdict[str, float]] = [defaultdict(float) for _ in range(cells)]
    for item in slices:
        for cell in range(int(item.start_s / cell_s), min(int(item.end_s / cell_s) + 1, cells)):
            inside_s = min(item.end_s, (cell + 1) * cell_s) - max(item.start_s, cell * cell_s)
            busy_s[cell][item.work] += max(inside_s, 0.0)
    row = Text(no_wrap=True, overflow="crop")
    for works in busy_s:
        letter = _summary_letter(works, cell_s)
        row.append(letter, STYLES[OVERVIEW_STYLES[letter]])
    return row


def _summary_letter(busy_s: Mapping[str, float], cell_s: float) -> str:
    total_s = sum(busy_s.values())
    if total_s < cell_s / 2:
        return "."
    work = max(busy_s, key=busy_s.__getitem__)
    return work if busy_s[work] > DOMINANT_RATIO * total_s else MIXED


def _phases(slices: Sequence[Slice]) -> list[str]:
    """Each slice's phase: warmup until the first backward, cooldown after the last forward."""
    forwards = [index for index, item in enumerate(slices) if item.work == "F"]
    others = [index for index, item in enumerate(slices) if item.work != "F"]
    first_backward = others[0] if others else len(slices)
    last_forward = forwards[-1] if forwards else -1
    phases = []
    for index, item in enumerate(slices):
        if item.work == "W":
            phases.append("weight gradient")
        elif item.work == "F":
            phases.append("warmup" if index < first_backward else "steady forward")
        else:
            phases.append("cooldown" if index > last_forward else "steady backward")
    return phases


def _axis(start_s: float, end_s: float, cells: int) -> str:
    marks = ""
    for cell in range(0, cells, TICK_EVERY):
        mark = f"|{format_seconds(start_s + cell * (end_s - start_s) / cells)}"
        marks = marks.ljust(cell) + mark
    return marks[:cells]
