"""Where results and progress go: results to stdout, everything else to stderr."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec
from rich.console import RenderableType

from pptune.files import Document
from pptune.views.tables import Sheet, as_csv, as_markdown, make_console


def show(*parts: RenderableType) -> None:
    """Print tables and sentences for people, a blank line between them."""
    console = make_console()
    for index, part in enumerate(parts):
        if index:
            console.print()
        console.print(part)


def show_json(value: Document | msgspec.Struct) -> None:
    """Print one JSON object, in UTF-8 whatever the terminal's encoding is."""
    sys.stdout.flush()
    sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n")


def show_sheets(sheets: Sequence[Sheet], form: str) -> None:
    """Print sheets as tables, CSV or Markdown."""
    if form == "table":
        show(*sheets)
    else:
        write = as_csv if form == "csv" else as_markdown
        sys.stdout.write("\n".join(write(sheet) for sheet in sheets))


def say(text: str, *, quiet: bool = False) -> None:
    """A line of progress or advice on stderr."""
    if not quiet:
        make_console(sys.stderr).print(text, highlight=False, markup=False, soft_wrap=True)


class Progress:
    """One bar per phase on stderr; plain lines where stderr is not a terminal."""

    def __init__(self, title: str, *, quiet: bool) -> None:
        from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as Bars

        self._title = title
        self._quiet = quiet
        self._last_percent = -1
        console = make_console(sys.stderr)
        self._bars = (
            Bars(
                TextColumn("{task.description}"), BarColumn(bar_width=24),
                TextColumn("{task.percentage:>3.0f}%"), TimeElapsedColumn(),
                TextColumn("left"), TimeRemainingColumn(), TextColumn("{task.fields[doing]}"),
                console=console, transient=False,
            )
            if console.is_terminal and not quiet
            else None
        )  # fmt: skip
        self._task = None if self._bars is None else self._bars.add_task(title, total=1, doing="")

    def __enter__(self) -> "Progress":
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars is not None:
            self._bars.stop()

    def update(self, done: float, total: float, doing: str) -> None:
        """`done` of `total`, now `doing` something."""
        if self._bars is not None and self._task is not None:
            self._bars.update(self._task, completed=done, total=max(total, 1e-9), doing=doing)
            return
        percent = int(100 * done / total) // 20 * 20 if total else 100
        if percent > self._last_percent:
            self._last_percent = percent
            say(f"{self._title}: {percent}% {doing}", quiet=self._quiet)


@contextmanager
def warnings_as_lines(*, quiet: bool) -> Iterator[None]:
    """Show each Python warning as one line on stderr, without its source."""
    import warnings

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for each in caught:
        say(f"warning: {each.message}", quiet=quiet)
