"""The commands: each parses, calls one function and prints. Only this package catches errors."""

import errno
import io
import os
import signal
import sys
import warnings
from types import FrameType
from typing import TextIO

import typer

from pptune import __version__
from pptune.errors import PptuneError, RuntimeFailure

app = typer.Typer(
    name="pptune",
    help="Measure, predict, search and prove pipeline-parallel training configurations.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_STOPPED = 130
"""What typer answers for KeyboardInterrupt, whichever signal raised it."""

_AGAIN_S = 0.2
"""How long after a signal to look whether the KeyboardInterrupt that it raised was lost."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)
"""SIGALRM is our own."""

_DISK_IS_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"pptune {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: bool = typer.Option(
        False, "--version", callback=_show_version, is_eager=True, help="Show the version."
    ),
) -> None:
    """Measure, predict, search and prove pipeline-parallel training configurations."""


def main() -> None:
    """Run a command and exit with the code that the interface promises."""
    received: list[int] = []
    over = False

    def on_signal(number: int, _: FrameType | None) -> None:
        received.append(number)
        signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)
        if number != signal.SIGALRM or not (over or _is_stopping()):
            raise KeyboardInterrupt

    def on_ignored(ignored: "sys.UnraisableHookArgs") -> None:
        if not issubclass(ignored.exc_type, KeyboardInterrupt):
            sys.__unraisablehook__(ignored)

    for number in _SIGNALS:
        signal.signal(number, on_signal)
    sys.unraisablehook = on_ignored
    warnings.showwarning = _warn
    try:
        code = _run()
        over = True
    except BaseException:
        over = True
        # An interrupted import may raise anything, so the signal counts and not the exception.
        if not received:
            raise
        code = _STOPPED
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    if received and code == _STOPPED:
        print("stopped; what was measured has been saved", file=sys.stderr, flush=True)
        # Python ends by SIGINT, whatever code it is given, once a KeyboardInterrupt has passed
        # through code that an extension module ran.
        os._exit(128 + received[0])
    sys.exit(code)


def _is_stopping() -> bool:
    """Whether a KeyboardInterrupt is on its way up. One that was raised in a callback from C, or in
    a module that an extension imports and can do without, has gone nowhere."""
    error = sys.exc_info()[1]
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error is not None


def _run() -> int:
    """Run a command; its exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        from pptune.cli import commands  # registers every command

        del commands
        code = app(standalone_mode=False, prog_name="pptune")
        sys.stdout.flush()
    except PptuneError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("pptune."):
            raise
        print(
            f"error: {error.name} is not built; run `pip install -e .` in the folder with pptune's "
            "sources",
            file=sys.stderr,
        )
        return RuntimeFailure.exit_code
    except (BrokenPipeError, SystemExit):
        # The reader of our output has gone, as `| head` does; the libraries that write it would
        # end the program themselves, with 1.
        _forget_output()
        return 0
    except OSError as error:
        if error.errno not in _DISK_IS_FULL:
            raise
        _forget_output()
        print(f"error: cannot write the result: {error.strerror}", file=sys.stderr)
        return RuntimeFailure.exit_code
    except typer._click.exceptions.ClickException as error:
        error.show()
        return error.exit_code
    return int(code or 0)


def _forget_output() -> None:
    """What is still in the buffer of stdout can't be written; the interpreter must not try."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _warn(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """A warning as one line, without the place in our source that gave it."""
    print(f"warning: {message}", file=sys.stderr)
