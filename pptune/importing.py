"""A trainer's own layer times (`pptune profile --import times.csv`) -> a profile.

One row per kind of layer and micro-batch size; times are for one layer and one micro-batch:

    kind,microbatch_size,forward_ms,backward_ms,backward_input_ms,backward_weight_ms,recompute
    embedding,1,0.11,0.15,,,none
    block,1,1.93,3.80,1.97,1.83,none
    block,2,3.61,7.15,3.70,3.45,none
    head,1,2.90,5.70,2.95,2.75,none

`kind` (embedding, block or head), `microbatch_size`, and a forward and a backward time of blocks
are needed; other columns may be left out or empty, and what is not given is null in the profile.
Times end in `_s`, `_ms` or `_us`. Further columns: `parameter_bytes`, `saved_activation_bytes`,
`boundary_bytes`, and `tensor_parallel`, `context_parallel`, `data_parallel`, which must be the same
in all rows. Lines that begin with # are comments.
"""

import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from pptune.errors import FileError
from pptune.model import ModelSpec
from pptune.profiles import Layer, LayerPoint, Machine, Parallel, Profile, check_profile

Kind = Literal["embedding", "block", "head"]
Recompute = Literal["none", "full"]

_UNITS = {"_s": 1.0, "_ms": 1e-3, "_us": 1e-6}
_TIMES = ("forward", "backward", "backward_input", "backward_weight")
_PARALLEL = {
    "tensor": "tensor_parallel", "context": "context_parallel", "data": "data_parallel"
}  # fmt: skip
_COLUMNS: frozenset[str] = frozenset(
    {"kind", "microbatch_size", "recompute", "parameter_bytes",
     "saved_activation_bytes", "boundary_bytes", *_PARALLEL.values(),
     *(time + unit for time in _TIMES for unit in _UNITS)}
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """One line of the file."""

    line: int
    kind: Kind
    recompute: Recompute
    point: LayerPoint
    parameter_bytes: int | None
    parallel: Parallel


def import_profile(
    path: str | Path, spec: ModelSpec, *, dtype: str, ranks: int | None = None
) -> Profile:
    """The profile that the CSV file `path` gives, source `given` throughout.

    It has no links, overheads or memory model: those come from the command line or are unknown.
    Raises FileError naming the line and the column.
    """
    path = Path(path)
    rows = list(_rows(path))
    if not any(row.kind == "block" for row in rows):
        raise FileError(f"{path}: there is no row of kind block; give the time of one block")
    parallel = rows[0].parallel
    for row in rows:
        if row.parallel != parallel:
            raise FileError(
                f"{path} line {row.line}: tensor, context and data parallel sizes differ from line "
                f"{rows[0].line}; times of another sharding belong in another file"
            )
    profile = Profile(
        machine=Machine(
            description=f"layer times imported from {path.name}", device="cuda",
            device_name="unknown", num_devices=ranks or 1,
        ),
        model=spec, parallel=parallel, dtype=dtype, seq_len=spec.seq_len, num_ranks=ranks or 1,
        layers=tuple(_layers(path, rows, spec)),
        notes=f"layer times imported from {path.name}",
    )  # fmt: skip
    check_profile(profile, where=str(path))
    return profile


def _layers(path: Path, rows: Sequence[_Row], spec: ModelSpec) -> Iterator[Layer]:
    grouped: dict[tuple[Kind, Recompute], dict[int, _Row]] = {}
    for row in rows:
        points = grouped.setdefault((row.kind, row.recompute), {})
        size = row.point.microbatch_size
        if size in points:
            raise FileError(
                f"{path} line {row.line}: {row.kind} at micro-batch size {size} is given twice, "
                f"first on line {points[size].line}"
            )
        points[size] = row
    for (kind, recompute), points in grouped.items():
        first = next(iter(points.values()))
        yield Layer(
            kind=kind,
            count=spec.num_layers if kind == "block" else 1,
            points=tuple(points[size].point for size in sorted(points)),
            recompute=recompute,
            parameter_bytes=first.parameter_bytes,
        )


def _rows(path: Path) -> Iterator[_Row]:
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(f"cannot read layer times {path}: {error}") from None
    numbered = [
        (number, line)
        for number, line in enumerate(lines, start=1)
        if line.strip() and not line.lstrip().startswith("#")
    ]
    if len(numbered) < 2:
        raise FileError(f"{path}: it needs a line of column names and at least one row")
    names = [name.strip() for name in next(csv.reader([numbered[0][1]]))]
    _check_columns(path, names)
    for number, line in numbered[1:]:
        cells = [cell.strip() for cell in next(csv.reader([line]))]
        where = f"{path} line {number}"
        if len(cells) != len(names):
            raise FileError(f"{where}: {len(cells)} cells, but there are {len(names)} columns")
        filled = {name: cell for name, cell in zip(names, cells, strict=True) if cell}
        yield _row(where, number, filled)


def _check_columns(path: Path, names: Sequence[str]) -> None:
    unknown = [name for name in names if name not in _COLUMNS]
    if unknown:
        raise FileError(
            f"{path}: unknown column {', '.join(map(repr, unknown))}; use "
            f"{', '.join(sorted(_COLUMNS - {t + u for t in _TIMES for u in ('_s', '_us')}))} "
            "(times also in _s or _us)"
        )
    twice = sorted({name for name in names if names.count(name) > 1})
    missing = [name for name in ("kind", "microbatch_size") if name not in names]
    for time in _TIMES:
        if sum(time + unit in names for unit in _UNITS) > 1:
            twice.append(time)
    if twice or missing:
        what = f"lacks {', '.join(missing)}" if missing else f"gives {', '.join(twice)} twice"
        raise FileError(f"{path}: the first line {what}; name every column once")


def _row(where: str, line: int, cells: Mapping[str, str]) -> _Row:
    kind, recompute = cells.get("kind", ""), cells.get("recompute", "none")
    if kind not in get_args(Kind):
        raise FileError(f"{where}: kind is {kind!r}; use embedding, block or head")
    if recompute not in get_args(Recompute):
        raise FileError(f"{where}: recompute is {recompute!r}; use none or full")
    forward_s, backward_s, input_s, weight_s = (_seconds(where, cells, time) for time in _TIMES)
    if kind == "block" and (forward_s is None or backward_s is None):
        raise FileError(f"{where}: a block needs a forward and a backward time")
    size = _whole(where, cells, "microbatch_size")
    if not size:
        raise FileError(f"{where}: microbatch_size is missing")
    return _Row(
        line=line,
        kind=kind,  # type: ignore[arg-type]
        recompute=recompute,  # type: ignore[arg-type]
        point=LayerPoint(
            microbatch_size=size,
            forward_s=forward_s,
            backward_s=backward_s,
            backward_input_s=input_s,
            backward_weight_s=weight_s,
            saved_activation_bytes=_whole(where, cells, "saved_activation_bytes"),
            boundary_bytes=_whole(where, cells, "boundary_bytes"),
            source="given",
        ),
        parameter_bytes=_whole(where, cells, "parameter_bytes"),
        parallel=Parallel(
            **{name: _whole(where, cells, column) or 1 for name, column in _PARALLEL.items()}
        ),
    )


def _seconds(where: str, cells: Mapping[str, str], time: str) -> float | None:
    for unit, factor in _UNITS.items():
        text = cells.get(time + unit)
        if text is not None:
            value = _number(where, time + unit, text)
            if value < 0:
                raise FileError(f"{where}: {time}{unit} is {text}; a time is 0 or more")
            return value * factor
    return None


def _whole(where: str, cells: Mapping[str, str], name: str) -> int | None:
    """A whole number of 1 or more, or None where the cell is empty. Bytes may be 0."""
    text = cells.get(name)
    if text is None:
        return None
    value = _number(where, name, text)
    least = 0 if name.endswith("_bytes") else 1
    if value != int(value) or value < least:
        raise FileError(f"{where}: {name} is {text}; it must be a whole number of {least} or more")
    return int(value)


def _number(where: str, name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise FileError(f"{where}: {name} is {text!r}; write a plain number")
    return value
