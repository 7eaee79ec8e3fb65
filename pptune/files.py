"""JSON files: strict to read, atomic to write.

Every file is one msgspec Struct with a `schema_version`. Reading checks types and finiteness and
never executes anything; writing goes through a temporary file in the same folder and a rename, so
that a reader or a crash sees the old file or the new one, never half of one.
"""

import contextlib
import os
import stat
import tempfile
import warnings
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, get_args

import msgspec

from pptune import __version__
from pptune.errors import FileError

T = TypeVar("T", bound="Document")

MAY_BE_NEGATIVE = frozenset({"error_ratio", "spearman", "overhead", "samples_s"})
"""Fields that are differences. Every other number in a file is a time, a size, a rate, a count or a
share of one, and is refused below 0."""

MAX_COUNT, MAX_NUMBER, MIN_NUMBER = 10**18, 1e30, 1e-30
"""Nothing that is counted, timed or sized here comes near these bounds (of whole numbers, and of
the others above 0): a damaged file must not ask for endless work, nor make arithmetic overflow."""

MAX_FILE_BYTES = 256 * 2**20
"""Larger files are refused: no profile, plans or validation file comes near it."""

_UNREAD = frozenset({"hf_config"})
"""Fields that are kept as they came and checked by who uses them."""

_encoder = msgspec.json.Encoder()


class UnknownFieldWarning(UserWarning):
    """A file holds fields that this version does not know; they were ignored."""


def now() -> str:
    """The current time in UTC, ISO 8601, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """What every file carries; a kind of file is a subclass with its own fields."""

    kind: str
    """`profile`, `plans` or `validation`: a foreign file is refused by name."""
    schema_version: int = 1
    pptune_version: str = __version__
    created_at: str = msgspec.field(default_factory=now)


def load(path: str | Path, document: type[T], *, kind: str) -> T:
    """The document in `path`. Raises FileError in one line for anything that is not one."""
    path = Path(path)
    raw = read_bytes(path, kind)
    try:
        data = msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError) as error:
        raise FileError(f"{path}: not valid JSON ({error}); write the {kind} file again") from None
    _check_header(path, data, document, kind)
    try:
        loaded = msgspec.convert(data, type=document)
    except (msgspec.ValidationError, RecursionError) as error:
        raise FileError(f"{path}: not a usable {kind} file: {error}") from None
    wrong = impossible_number(loaded)
    if wrong is not None:
        raise FileError(f"{path}: {wrong}; write the {kind} file again")
    unknown = sorted(_unknown_fields(data, document, "$"))
    if unknown:
        shown = ", ".join(unknown[:5]) + (", ..." if len(unknown) > 5 else "")
        warnings.warn(f"{path}: unknown fields ignored: {shown}", UnknownFieldWarning, stacklevel=2)
    return loaded


def impossible_number(value: object, where: str = "", name: str = "") -> str | None:
    """The first number in a document that can't be, in words, or None (see MAY_BE_NEGATIVE)."""
    match value:
        case bool() | str() | None:
            return None
        case int() | float():
            largest = MAX_COUNT if isinstance(value, int) else MAX_NUMBER
            # Written so that nan, which compares false, is refused.
            if value != 0 and not MIN_NUMBER <= abs(value) <= largest:
                return f"{where} is {value}, which is no number that was measured or counted"
            if value < 0 and name not in MAY_BE_NEGATIVE:
                return f"{where} is {value}, and can't be below 0"
            return None
        case msgspec.Struct():
            names = zip(value.__struct_fields__, value.__struct_encode_fields__, strict=True)
            parts = [
                (getattr(value, field), f"{where}.{encoded}", encoded)
                for field, encoded in names
                if field not in _UNREAD
            ]
        case dict():
            parts = [(inner, f"{where}.{key}", name) for key, inner in value.items()]
        case tuple() | list():
            # Most of a file is such lists; their items need no names. The sum is nan where one is.
            numbers = set(map(type, value)) == {float}
            if numbers and min(value) >= MIN_NUMBER and sum(value) <= MAX_NUMBER:
                return None
            parts = [(inner, f"{where}[{index}]", name) for index, inner in enumerate(value)]
        case _:
            return None
    found = (impossible_number(*part) for part in parts)
    return next((each for each in found if each is not None), None)


def save(document: Document, path: str | Path) -> None:
    """Write `document` to `path`, creating its folder. Raises FileError, never half a file."""
    write_atomic(path, msgspec.json.format(_encoder.encode(document), indent=1) + b"\n")


def write_atomic(path: str | Path, content: bytes) -> None:
    """Replace `path` by `content` in one step. Raises FileError with the reason."""
    path = Path(path)
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except OSError as error:
        raise FileError(f"cannot write {path}: {error.strerror or error}") from None
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


def check_writable(path: str | Path) -> None:
    """Raise FileError now where `path` could not be written later, after long work."""
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.") as stream:
            stream.write(b" ")
    except OSError as error:
        raise FileError(
            f"cannot write {path}: {error.strerror or error}; give another --output"
        ) from None
    if path.is_dir():
        raise FileError(f"cannot write {path}: it is a folder; give another --output")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def read_bytes(path: Path, kind: str) -> bytes:
    """The bytes of a file of that kind. Raises FileError for what isn't one or is too large."""
    try:
        status = path.stat()
        # A pipe or a device may have no end.
        if not stat.S_ISREG(status.st_mode):
            raise FileError(f"{path} is not a file; give the path of a {kind} file")
        size = status.st_size
        if size > MAX_FILE_BYTES:
            raise FileError(f"{path}: {size} bytes is too large for a {kind} file")
        raw = path.read_bytes()
    except OSError as error:
        raise FileError(f"cannot read {kind} file {path}: {error.strerror or error}") from None
    if not raw.strip():
        raise FileError(f"{path}: the file is empty; write the {kind} file again")
    return raw


def _check_header(path: Path, data: Any, document: type[Document], kind: str) -> None:
    if not isinstance(data, dict) or "schema_version" not in data:
        raise FileError(f"{path}: not a pptune file (no schema_version); expected a {kind} file")
    if data.get("kind") != kind:
        raise FileError(f"{path}: this is a {data.get('kind')!r} file; expected a {kind} file")
    ours = _newest_version(document)
    version = data["schema_version"]
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise FileError(f"{path}: schema_version {version!r} is not a positive whole number")
    if version > ours:
        raise FileError(
            f"{path}: schema_version {version} is newer than {ours}, the newest this pptune "
            f"({__version__}) reads; upgrade pptune"
        )


@cache
def _newest_version(document: type[Document]) -> Any:
    return next(
        field.default
        for field in msgspec.structs.fields(document)
        if field.name == "schema_version"
    )


@cache
def _field_types(struct: type[msgspec.Struct]) -> dict[str, Any]:
    return {field.encode_name: field.type for field in msgspec.structs.fields(struct)}


def _unknown_fields(data: Any, expected: Any, where: str) -> set[str]:
    """Paths in `data` that the struct type `expected`, or a type inside it, has no field for."""
    if not isinstance(data, dict | list):
        return set()
    if (
        isinstance(data, dict)
        and isinstance(expected, type)
        and issubclass(expected, msgspec.Struct)
    ):
        fields = _field_types(expected)
        found = {f"{where}.{name}" for name in data if name not in fields}
        for name, inner in fields.items():
            if name in data:
                found |= _unknown_fields(data[name], inner, f"{where}.{name}")
        return found
    arguments = get_args(expected)
    if isinstance(data, list) and arguments:
        if arguments[0] in (float, int, str):  # a profile holds thousands of samples
            return set()
        return set().union(
            *(_unknown_fields(item, arguments[0], f"{where}[]") for item in data[:1000])
        )
    if isinstance(data, dict) and len(arguments) == 2 and arguments[0] is str:
        return set().union(
            *(_unknown_fields(item, arguments[1], f"{where}.{name}") for name, item in data.items())
        )
    return set().union(*(_unknown_fields(data, inner, where) for inner in arguments))
