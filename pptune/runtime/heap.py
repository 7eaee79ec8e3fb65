"""The C library's heap: memory that a step frees stays with the process, for the next step.

The top of the heap goes back to the system once enough of it is free, and its pages are new again
to whoever needs them next. In a pipeline that hardly happens: other micro-batches lie above. Timed
by itself a large layer would pay for all of its pages every time.
"""

import contextlib
import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3

_NEVER = -1
_LARGEST_MMAP_THRESHOLD = 32 << 20
"""The most that glibc takes on 64 bits; larger blocks are mapped and unmapped each, as ever."""


def keep_freed_memory() -> None:
    """Never give the top of the heap back, and take all but the largest blocks from the heap.

    Does nothing where the C library has no such options; they are glibc's (mallopt(3)).
    """
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError):
            libc = ctypes.CDLL(None)
            libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
            libc.mallopt(_M_TRIM_THRESHOLD, _NEVER)


def return_freed_memory() -> None:
    """Give what is free back to the system once, where the C library can."""
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
