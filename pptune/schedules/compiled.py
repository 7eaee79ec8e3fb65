"""Compilation of the inner loops, in one place."""

import warnings
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

Function = TypeVar("Function", bound=Callable[..., Any])


class UncachedWarning(UserWarning):
    """No folder to keep compiled code in was found; every process compiles it again."""


def compiled(signature: str) -> Callable[[Function], Function]:
    """A decorator that compiles a function for `signature`, from numba's cache where there is one.

    numba raises RuntimeError where neither the source's folder nor the user's cache folder can be
    written; the function is then compiled for this process only, with a warning.
    """

    def decorate(function: Function) -> Function:
        try:
            return cast(Function, numba.njit(signature, cache=True)(function))
        except RuntimeError as error:
            if "cache" not in str(error):
                raise
            warnings.warn(
                f"compiled code cannot be cached ({error}); set NUMBA_CACHE_DIR to a writable "
                "folder to start faster",
                UncachedWarning,
                stacklevel=2,
            )
            return cast(Function, numba.njit(signature)(function))

    return decorate
