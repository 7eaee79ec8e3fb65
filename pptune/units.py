"""The one place where text becomes SI numbers and SI numbers become text.

Inside pptune every time is in seconds, every size in bytes, every ratio in 0..1.
"""

import math
import re
from collections.abc import Iterable

from pptune.errors import UsageError

_NUMBER = re.compile(r"^\s*([+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?)\s*([A-Za-z%/µ]*)\s*$")

_SECONDS = {
    "": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9, "m": 60.0, "min": 60.0,
    "h": 3600.0,
}  # fmt: skip
_BYTES = {
    "": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip


def _split(text: str, what: str, example: str) -> tuple[float, str]:
    match = _NUMBER.match(text)
    if match is None or not math.isfinite(float(match[1])):
        raise UsageError(f"{what} {text!r} is not a number with a unit; write it like {example}")
    return float(match[1]), match[2]


def parse_seconds(text: str, *, what: str = "time") -> float:
    """Seconds from `1.5`, `18.5ms`, `200us`, `10m`. Raises UsageError; negative is refused."""
    value, unit = _split(text, what, "18.5ms")
    if unit.lower() not in _SECONDS:
        raise UsageError(
            f"{what} {text!r} has the unknown unit {unit!r}; use ns, us, ms, s, m or h"
        )
    if value < 0:
        raise UsageError(f"{what} {text!r} is negative; give a time of 0 or more")
    return value * _SECONDS[unit.lower()]


def parse_bytes(text: str, *, what: str = "size") -> int:
    """Bytes from `1024`, `24GiB`, `80GB`. Raises UsageError; must be positive."""
    value, unit = _split(text, what, "24GiB")
    if unit.lower() not in _BYTES:
        raise UsageError(
            f"{what} {text!r} has the unknown unit {unit!r}; use KiB, MiB, GiB, KB, MB, GB"
        )
    if value <= 0:
        raise UsageError(f"{what} {text!r} must be above zero")
    return int(value * _BYTES[unit.lower()])


def parse_bytes_per_s(text: str, *, what: str = "bandwidth") -> float:
    """Bytes per second from `12.5GB/s` or `1e9`. Bits are refused rather than guessed."""
    value, unit = _split(text, what, "12.5GB/s")
    size = unit.lower().removesuffix("/s")
    if size not in _BYTES or unit.endswith("bit/s"):
        raise UsageError(
            f"{what} {text!r} has the unknown unit {unit!r}; use GB/s or GiB/s (bytes)"
        )
    if value <= 0:
        raise UsageError(f"{what} {text!r} must be above zero")
    return value * _BYTES[size]


def parse_ratio(text: str, *, what: str = "ratio") -> float:
    """A ratio in 0..1 from `5%` or `0.05`. Raises UsageError outside that range."""
    value, unit = _split(text, what, "5%")
    if unit not in ("", "%"):
        raise UsageError(f"{what} {text!r} has the unknown unit {unit!r}; write 5% or 0.05")
    value = value / 100 if unit == "%" else value
    if not 0 <= value <= 1:
        raise UsageError(f"{what} {text!r} is outside 0..100%")
    return value


def parse_positive_ints(text: str, *, what: str) -> tuple[int, ...]:
    """Distinct positive integers, ascending, from `1,2,4`. Raises UsageError."""
    try:
        values = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise UsageError(f"{what} {text!r} is not a list of whole numbers; write 1,2,4") from None
    if values[0] < 1:
        raise UsageError(f"{what} {text!r} contains {values[0]}; every value must be 1 or more")
    return tuple(values)


def format_seconds(seconds: float) -> str:
    """Three significant digits with the unit that keeps the number readable: `18.5 ms`."""
    size = abs(seconds)
    if size >= 120:
        return f"{seconds / 60:.3g} min"
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if size >= scale:
            return f"{_three_digits(seconds / scale)} {unit}"
    return f"{_three_digits(seconds / 1e-9)} ns" if size > 0 else "0 s"


def seconds_unit(seconds: Iterable[float]) -> tuple[str, float]:
    """One unit for a column of times, and its size in seconds: the largest is at least 1 in it."""
    largest = max((abs(value) for value in seconds), default=1.0) or 1.0
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if largest >= scale:
            return unit, scale
    return "ns", 1e-9


def format_bytes(num_bytes: float) -> str:
    """Binary units: `1.50 GiB`."""
    unit, scale = bytes_unit([num_bytes])
    return f"{num_bytes:.0f} B" if scale == 1 else f"{_three_digits(num_bytes / scale)} {unit}"


def bytes_unit(sizes: Iterable[float]) -> tuple[str, int]:
    """One unit for a column of sizes, and how many bytes it is: the largest is at least 1 in it."""
    largest = max((abs(size) for size in sizes), default=0.0)
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if largest >= scale:
            return unit, scale
    return "B", 1


def format_bytes_per_s(bytes_per_s: float) -> str:
    """Decimal units, as links are sold: `12.5 GB/s`."""
    size = abs(bytes_per_s)
    for unit, scale in (("TB/s", 1e12), ("GB/s", 1e9), ("MB/s", 1e6), ("KB/s", 1e3)):
        if size >= scale:
            return f"{_three_digits(bytes_per_s / scale)} {unit}"
    return f"{bytes_per_s:.0f} B/s"


def format_ratio(ratio: float, *, sign: bool = False) -> str:
    """A percentage with one decimal: `4.2%`, or `+4.2%` with `sign`."""
    return f"{ratio * 100:{'+' if sign else ''}.1f}%"


def _three_digits(value: float) -> str:
    size = abs(value)
    return f"{value:.0f}" if size >= 100 else f"{value:.1f}" if size >= 10 else f"{value:.2f}"
