"""The commands: each parses, calls one function and prints. Only this package catches errors."""

import signal
import sys
from types import FrameType

import typer

from pptune import __version__
from pptune.errors import PptuneError

app = typer.Typer(
    name="pptune",
    help="Measure, predict, search and prove pipeline-parallel training configurations.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_INTERRUPTED, _TERMINATED = 130, 143


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
    from pptune.cli import commands  # registers every command

    del commands
    terminated = False

    def on_sigterm(_: int, __: FrameType | None) -> None:
        nonlocal terminated
        terminated = True
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, on_sigterm)
    try:
        code = app(standalone_mode=False)
    except PptuneError as error:
        print(f"error: {error}", file=sys.stderr)
        code = error.exit_code
    except KeyboardInterrupt:
        code = _INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has gone, as `| head` does.
        sys.stderr.close()
        code = 0
    except typer._click.exceptions.ClickException as error:
        error.show()
        code = error.exit_code
    if code == _INTERRUPTED:
        code = _TERMINATED if terminated else _INTERRUPTED
        print("stopped; what was measured has been saved", file=sys.stderr)
    sys.exit(code or 0)
