"""Compilation of the inner loops, in one place."""

import hashlib
import os
import tempfile
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import numba

Function = TypeVar("Function", bound=Callable[..., Any])

_config = cast(Any, numba.config)
_PACKAGE = Path(__file__).parent.parent
_SOURCES = ("executors.py", "schedules/*.py", "simulator/*.py")
"""Everything that compiled functions are made of, the functions and constants they use included."""


class UncachedWarning(UserWarning):
    """No folder to keep compiled code in was found; every process compiles it again."""


def compiled(signature: str, *, inner: bool = False) -> Callable[[Function], Function]:
    """A decorator that compiles a function for `signature`, or loads it where that was done before.

    `inner` functions are called by compiled ones alone, which makes them faster to compile. Where
    no folder can be written, code is compiled for this process only, with a warning.
    """
    # As in NumPy a division by zero gives no exception, and code is spared the check.
    options: dict[str, Any] = {"error_model": "numpy"}
    if inner:
        options |= {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}

    def decorate(function: Function) -> Function:
        folder = _cache_folder()
        if folder is None:
            return cast(Function, numba.njit(signature, **options)(function))
        configured = _config.CACHE_DIR
        _config.CACHE_DIR = folder
        try:
            return cast(Function, numba.njit(signature, cache=True, **options)(function))
        except OSError:  # A full disk, or a folder that went away.
            return cast(Function, numba.njit(signature, **options)(function))
        finally:
            _config.CACHE_DIR = configured

    return decorate


@cache
def _cache_folder() -> str | None:
    """A writable folder for the code of exactly these sources.

    numba looks for changes only in a function's own file, and would go on using code with an old
    version of another file's functions inside: hence a folder per state of all sources.
    """
    digest = hashlib.sha256()
    for pattern in _SOURCES:
        for path in sorted(_PACKAGE.glob(pattern)):
            digest.update(path.name.encode() + path.read_bytes())
    name = f"compiled-{digest.hexdigest()[:16]}"
    user = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "pptune"
    bases = [_config.CACHE_DIR] if _config.CACHE_DIR else [_PACKAGE / "__pycache__", user]
    for base in map(Path, bases):
        folder = base / name
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        except OSError:
            continue
        return str(folder)
    warnings.warn(
        f"compiled code cannot be kept: no writable folder among {', '.join(map(str, bases))}; "
        "set NUMBA_CACHE_DIR to one to start faster",
        UncachedWarning,
        stacklevel=2,
    )
    return None
