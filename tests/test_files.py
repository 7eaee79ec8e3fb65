"""Files are data: written whole or not at all, and refused in one line when they are damaged."""

import errno
import json
import os
import random
import re
import signal
import stat
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pptune import files
from pptune.cost_model import CostModel, Setting
from pptune.errors import FileError, UsageError
from pptune.estimate import Estimate
from pptune.files import Document, UnknownFieldWarning, check_writable, write_atomic
from pptune.model import ModelSpec
from pptune.plan import make_plan
from pptune.plans_file import PlansFile, load_plans, save_plans
from pptune.profiles import Profile, find_profile, load_profile, save_profile
from pptune.targets import parse_target
from pptune.validate import check_trusted
from pptune.validation_file import load_validation, save_validation
from tests.sample_documents import sample_plans, sample_profile, sample_validation

ROOT = Path(__file__).parent.parent
SHIPPED = sorted((ROOT / "profiles").rglob("*.json"))

Load = Callable[[Path], Document]


def written(folder: Path) -> dict[str, tuple[Path, Load]]:
    """One file of every kind, and how it is read."""
    save_profile(sample_profile(), folder / "profile.json")
    save_plans(sample_plans(), folder / "plans.json")
    save_validation(sample_validation(), folder / "validation.json")
    return {
        "profile": (folder / "profile.json", load_profile),
        "plans": (folder / "plans.json", load_plans),
        "validation": (folder / "validation.json", load_validation),
    }


KINDS = ("profile", "plans", "validation")


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# --- reading --------------------------------------------------------------------------------------


def test_what_is_written_is_read_back(tmp_path: Path, kind: str) -> None:
    path, load = written(tmp_path)[kind]
    expected = {"profile": sample_profile, "plans": sample_plans, "validation": sample_validation}
    assert load(path) == expected[kind]()


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "truncated": lambda raw: raw[: len(raw) // 2],
    "emptied": lambda raw: b"",
    "blank": lambda raw: b" \n",
    "foreign": lambda raw: b'{"some": "json"}',
    "a list": lambda raw: b"[1, 2]",
    "binary": lambda raw: bytes(range(256)),
    "newer": lambda raw: raw.replace(b'"schema_version": 1', b'"schema_version": 99'),
    "no version": lambda raw: raw.replace(b'"schema_version"', b'"version"'),
    "odd version": lambda raw: raw.replace(b'"schema_version": 1', b'"schema_version": true'),
    "nan": lambda raw: raw.replace(b'_s": 0.', b'_s": NaN, "x": 0.', 1),
    "deep": lambda raw: b'{"schema_version": 1, "kind": ' + b"[" * 100_000,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_one_line_that_names_it(tmp_path: Path, kind: str, damage: str) -> None:
    path, load = written(tmp_path)[kind]
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    with pytest.raises(FileError) as caught:
        load(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    if damage == "newer":
        assert "schema_version 99 is newer than 1" in str(caught.value)


def test_a_file_of_another_kind_is_refused_by_name(tmp_path: Path) -> None:
    made = written(tmp_path)
    with pytest.raises(FileError, match=r"this is a 'plans' file; expected a profile file"):
        load_profile(made["plans"][0])
    with pytest.raises(FileError, match=r"this is a 'profile' file; expected a plans file"):
        load_plans(made["profile"][0])


def test_a_gigantic_file_is_refused_without_reading_it(tmp_path: Path, kind: str) -> None:
    path, load = written(tmp_path)[kind]
    os.truncate(path, 2**40)  # sparse: it takes no room on the disk
    with pytest.raises(FileError, match="too large"):
        load(path)


@pytest.mark.parametrize("place", ["/dev/zero", "a fifo", "a folder"])
def test_what_has_no_end_is_not_read(tmp_path: Path, place: str) -> None:
    path = Path(place)
    if place != "/dev/zero":
        path = tmp_path / "thing"
        os.mkfifo(path) if place == "a fifo" else path.mkdir()
    with pytest.raises(FileError, match="is not a file"):
        load_profile(path)
    assert find_profile(str(path), "0" * 64, beside=tmp_path / "plans.json") is None


def test_unknown_fields_are_ignored_with_a_warning_that_names_them(
    tmp_path: Path, kind: str
) -> None:
    path, load = written(tmp_path)[kind]
    data = json.loads(path.read_bytes())
    data["colour"] = "blue"
    path.write_text(json.dumps(data))
    with pytest.warns(UnknownFieldWarning, match=r"\$\.colour"):
        load(path)


# --- numbers that can't be ------------------------------------------------------------------------


def changed(path: Path, where: list[Any], value: object) -> None:
    data = json.loads(path.read_bytes())
    inner = data
    for key in where[:-1]:
        inner = inner[key]
    inner[where[-1]] = value
    path.write_text(json.dumps(data))


@pytest.mark.parametrize(
    ("kind", "where", "value", "rule"),
    [
        ("profile", ["layers", 1, "points", 0, "forward_s"], -1e-3, "can't be below 0"),
        ("profile", ["layers", 1, "points", 0, "backward_s"], 1e300, "no number that was"),
        ("profile", ["layers", 1, "points", 0, "boundary_bytes"], 10**30, "no number that was"),
        ("profile", ["layers", 1, "points", 0, "microbatch_size"], 0, "micro-batch sizes"),
        ("profile", ["layers", 1, "points", 1, "microbatch_size"], 1, "appears twice"),
        ("profile", ["layers", 1, "points"], [], "has no points"),
        ("profile", ["layers", 1, "count"], 3, "count is 3, but the model has 16"),
        ("profile", ["layers", 0, "kind"], "block", "appears twice"),
        ("profile", ["layers"], [], "no layers"),
        ("profile", ["links", 0, "bytes_per_s"], 0, "bandwidth must be above 0"),
        ("profile", ["links", 0, "latency_s"], -1, "can't be below 0"),
        ("profile", ["links", 0, "from"], None, "joins two ranks"),
        ("profile", ["overheads", "ideal", "forward_s"], -1.0, "can't be below 0"),
        ("profile", ["interference_ratio"], -0.5, "can't be below 0"),
        ("profile", ["machine", "memory_bytes"], -1, "can't be below 0"),
        ("profile", ["machine", "ranks_per_node"], 0, "must be 1 or more"),
        ("profile", ["num_ranks"], 0, "must be 1 or more"),
        ("profile", ["model", "num_layers"], 10**9, "must lie in 1"),
        ("profile", ["seq_len"], 64, "but the model's is 128"),
        ("plans", ["candidates", 0, "estimate", "step_time_s"], 0.2, "breakdown_s sums to"),
        ("plans", ["candidates", 0, "estimate", "step_time_s"], 0, "must be above 0"),
        ("plans", ["candidates", 0, "estimate", "bubble_ratio"], 1.5, "must lie in 0..1"),
        ("plans", ["candidates", 0, "speedup_over_baseline"], 3.0, "the step times make"),
        ("plans", ["candidates", 1, "rank"], 1, "are not 1, 2, 3"),
        ("plans", ["candidates", 0, "plan", "num_microbatches"], 10**9, "actions per step"),
        ("plans", ["candidates", 0, "plan", "microbatch_size"], 2, "its global batch is 16"),
        ("plans", ["candidates", 0, "plan", "num_chunks"], 4, "layers_per_stage has 8"),
        ("plans", ["candidates", 0, "plan", "layers_per_stage", 0], 3, "places 17 layers"),
        ("plans", ["candidates", 0, "plan", "placement"], "v", "places stages in a loop"),
        ("plans", ["model", "entry"], "os:abort()#", "is not package.module:function"),
        ("plans", ["global_batch_size"], -8, "can't be below 0"),
        ("plans", ["ranks_per_node"], 0, "must be 1 or more"),
        ("plans", ["baseline"], None, "there is no baseline"),
        ("plans", ["model", "num_layers"], 0, "must lie in 1"),
        ("validation", ["runs", 0, "samples_s", 0], 0, "samples must be above 0"),
        ("validation", ["runs", 0, "measured_s"], 0.3, "lies outside its samples"),
        ("validation", ["runs", 0, "measured_s"], None, "exactly where there are samples"),
        ("validation", ["runs", 0, "predicted_s"], 0.2, "but the times make"),
        ("validation", ["runs", 0, "rounds"], [0], "3 samples have 1 rounds"),
        ("validation", ["runs", 0, "plan", "num_ranks"], 0, "it must be 1 or more"),
        ("validation", ["runs", 0, "status"], "fine", "Invalid enum value"),
    ],
)
def test_an_impossible_value_is_refused_with_its_rule(
    tmp_path: Path, kind: str, where: list[Any], value: object, rule: str
) -> None:
    path, load = written(tmp_path)[kind]
    changed(path, where, value)
    with pytest.raises(FileError) as caught:
        load(path)
    assert rule in str(caught.value)
    assert "\n" not in str(caught.value)


# --- mutations ------------------------------------------------------------------------------------


def numbers_in(value: Any, where: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of all values in a JSON document that are not containers."""
    items: Any = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        if isinstance(inner, dict | list):
            yield from numbers_in(inner, (*where, key))
        yield (*where, key)


ODD_VALUES: tuple[object, ...] = (
    -1, 0, 1, 2**31, 2**63, 10**40, -1e-9, 0.5, 1e-300, 1e17, 1e300, None, True, "", "x", "../../x",
    "\x00", "os:system", [], {}, [[]], [-1], {"a": -1},
)  # fmt: skip


_VALUE = re.compile(rb'(?<=[:\s])(-?\d[\w.+-]*|"[^"\n]*"|null|true|false)(?=,?\n)')
"""A value that is no container, in a document of one value per line."""

_LARGE = 10_000
"""Bytes; to parse such a document for each change would take longer than everything else."""


def mutated(raw: bytes, draw: random.Random) -> bytes:
    """`raw` with one to three changes: of bytes, or of values of the JSON document."""
    for _ in range(draw.randint(1, 3)):
        if draw.random() < 0.3:
            at = draw.randrange(len(raw))
            cut = draw.choice([0, 1, draw.randrange(1, 200)])
            raw = raw[:at] + draw.randbytes(draw.choice([0, 1, 3])) + raw[at + cut :]
        elif len(raw) > _LARGE:
            raw = with_a_line_changed(raw, draw)
        else:
            raw = with_a_value_changed(raw, draw)
    return raw


def with_a_value_changed(raw: bytes, draw: random.Random) -> bytes:
    """A value, container or not, taken out, doubled or replaced; `raw` where it is not JSON."""
    try:
        data = json.loads(raw)
        paths = list(numbers_in(data))
    except (ValueError, AttributeError, TypeError, RecursionError):
        return raw
    if not paths:
        return raw
    path = draw.choice(paths)
    inner = data
    for key in path[:-1]:
        inner = inner[key]
    match draw.randrange(4):
        case 0:
            del inner[path[-1]]
        case 1 if isinstance(inner, list):
            inner.append(inner[path[-1]])
        case _:
            inner[path[-1]] = draw.choice(ODD_VALUES)
    return json.dumps(data).encode()


def with_a_line_changed(raw: bytes, draw: random.Random) -> bytes:
    """A line taken out or doubled, or a value replaced where it stands."""
    begin = raw.find(b"\n", draw.randrange(len(raw))) + 1
    end = raw.find(b"\n", begin) + 1
    match draw.randrange(4):
        case 0:
            return raw[:begin] + raw[end:]
        case 1:
            return raw[:end] + raw[begin:]
        case _:
            odd = json.dumps(draw.choice(ODD_VALUES)).encode()
            value = _VALUE.search(raw, begin)
            return raw if value is None else raw[: value.start()] + odd + raw[value.end() :]


def use(document: Document) -> None:
    """Do what the commands do first with a document that was accepted."""
    if isinstance(document, Profile):
        for schedule, chunks in (("1f1b", 1), ("interleaved", 2)):
            _predict(document, schedule, chunks)
    elif isinstance(document, PlansFile):
        find_profile(document.profile.path, document.profile.digest, beside=Path("/nowhere/x"))
        for row in document.candidates:
            assert row.plan.global_batch_size == document.global_batch_size


def _predict(profile: Profile, schedule: Any, chunks: int) -> None:
    model = CostModel(profile, Setting(target=parse_target("torch")))
    stages = 2 * chunks
    num_layers = profile.model.num_layers
    if num_layers < stages:
        return
    layers = (num_layers - stages + 1, *(1,) * (stages - 1))
    block = profile.layer("block")
    size = block.points[0].microbatch_size if block is not None and block.points else 1
    plan = make_plan(
        schedule=schedule, num_ranks=2, num_chunks=chunks, microbatch_size=size,
        num_microbatches=4, layers_per_stage=layers,
    )  # fmt: skip
    try:
        estimate = model.estimate(plan)
    except UsageError:  # a number is missing, and the message says which
        return
    if isinstance(estimate, Estimate):
        numbers = [estimate.step_time_s, *msgspec.structs.astuple(estimate.breakdown_s)]
        assert all(0 <= number < 1e30 for number in numbers)
        assert estimate.step_time_s >= estimate.breakdown_s.compute * (1 - 1e-9)


@pytest.fixture
def memory_path(tmp_path: Path) -> Iterator[Path]:
    """A file in memory, on Linux: gigabytes are written to it."""
    if not hasattr(os, "memfd_create"):
        yield tmp_path / "mutated.json"
        return
    descriptor = os.memfd_create("mutated")
    yield Path(f"/proc/self/fd/{descriptor}")
    os.close(descriptor)


def fuzz(raw: bytes, load: Load, path: Path, seed: int) -> None:
    draw = random.Random(seed)
    path.write_bytes(mutated(raw, draw))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnknownFieldWarning)
        try:
            use(load(path))
        except FileError as error:
            message = str(error)
        else:
            message = ""
    assert "\n" not in message


@pytest.mark.parametrize("kind", KINDS)
def test_some_mutations_never_give_a_traceback(
    tmp_path_factory: pytest.TempPathFactory, kind: str
) -> None:
    folder = tmp_path_factory.mktemp("fuzz")
    path, load = written(folder)[kind]
    raw = path.read_bytes()

    @settings(derandomize=True, max_examples=150, deadline=None, database=None)
    @given(st.integers(0, 2**32))
    def check(seed: int) -> None:
        fuzz(raw, load, folder / "mutated.json", seed)

    check()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("path", [*SHIPPED, *KINDS], ids=lambda path: Path(path).stem)
def test_ten_thousand_mutations_never_give_a_traceback(
    tmp_path: Path, memory_path: Path, path: Path | str
) -> None:
    load: Load = load_profile
    if isinstance(path, str):
        path, load = written(tmp_path)[path]
    raw = path.read_bytes()
    for seed in range(10_000):
        fuzz(raw, load, memory_path, seed)


# --- nothing in a file is run or leads out of its folder ------------------------------------------


def test_a_file_cannot_make_validate_import_code() -> None:
    own = ModelSpec(
        name="x", family="custom", num_layers=4, seq_len=16, entry="os:abort"
    )  # fmt: skip
    with pytest.raises(UsageError, match=r"imports os:abort.*--model os:abort"):
        check_trusted(own, None)
    with pytest.raises(UsageError, match="but the plans are for os:abort"):
        check_trusted(own, "tests.faulty:model")
    check_trusted(own, "os:abort")
    built_in = msgspec.structs.replace(own, entry=None, name="gpt2")
    check_trusted(built_in, None)
    check_trusted(built_in, "gpt2")
    with pytest.raises(UsageError, match="but the plans are for gpt2"):
        check_trusted(built_in, "os:abort")


@pytest.mark.parametrize("target", ["torch", "megatron", "torchtitan", "deepspeed", "nanotron"])
def test_text_in_a_file_stays_text_in_an_export(target: str) -> None:
    """A name that would break out of a comment or a string must not become code or an option."""
    from pptune.errors import PlanError
    from pptune.targets import export

    evil = 'x"\n__import__("os").abort()\n\'\'\'"""\nkey: value\n--option'
    plans = sample_plans()
    model = msgspec.structs.replace(
        plans.model, name=evil, family="gpt", hidden_size=32, num_heads=4, num_kv_heads=4,
        ffn_size=128, vocab_size=61,
    )  # fmt: skip
    for row in plans.candidates:
        try:
            exported = export(
                row.plan, parse_target(target), model=model, dtype="float32", seq_len=128,
                profile_name=evil,
            )  # fmt: skip
        except PlanError:
            continue
        for each in exported:
            assert Path(each.name).name == each.name
            for line in each.text.splitlines():
                starts = line.strip()
                assert not starts.startswith(("__import__", "key: value", "--option")), line


# --- writing --------------------------------------------------------------------------------------


def test_writing_replaces_the_file_keeps_its_rights_and_leaves_nothing_behind(
    tmp_path: Path,
) -> None:
    path = tmp_path / "new" / "file.json"
    write_atomic(path, b"one")
    write_atomic(path, b"two")
    assert path.read_bytes() == b"two"
    assert [each.name for each in path.parent.iterdir()] == ["file.json"]
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failed_write_keeps_the_old_file_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, call: str
) -> None:
    path = tmp_path / "file.json"
    write_atomic(path, b"old")

    def fail(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(files.os, call, fail)
    with pytest.raises(FileError, match=rf"cannot write .*{os.strerror(code)}"):
        write_atomic(path, b"new")
    monkeypatch.undo()
    assert path.read_bytes() == b"old"
    assert [each.name for each in tmp_path.iterdir()] == ["file.json"]


def test_a_full_disk_is_an_error_and_the_old_file_stays(tmp_path: Path) -> None:
    """The kernel's own refusal: a limit on the size of files stands for the disk's end."""
    script = textwrap.dedent(
        """
        import resource, signal, sys
        from pptune.errors import FileError
        from pptune.files import write_atomic
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        write_atomic(sys.argv[1], b"old")
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        try:
            write_atomic(sys.argv[1], b"x" * 100_000)
        except FileError as error:
            print(error)
        """
    )
    path = tmp_path / "file.json"
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"cannot write {path}: File too large\n"
    assert path.read_bytes() == b"old"
    assert [each.name for each in tmp_path.iterdir()] == ["file.json"]


def test_a_folder_that_cannot_be_written_is_known_before_the_work(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="give another --output"):
        check_writable("/proc/pptune/plans.json")
    with pytest.raises(FileError, match="it is a folder"):
        check_writable(tmp_path)
    with pytest.raises(FileError, match="cannot write"):
        write_atomic("/proc/pptune/plans.json", b"x")
    check_writable(tmp_path / "new" / "plans.json")
    assert list((tmp_path / "new").iterdir()) == []


def test_a_reader_never_sees_half_a_file_however_the_writer_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    script = textwrap.dedent(
        """
        import sys
        from pptune.files import write_atomic
        print("up", flush=True)
        for number in range(10**6):
            write_atomic(sys.argv[1], (b"%d " % (number % 10)) * 500_000)
        """
    )
    draw = random.Random(0)
    for _ in range(4):
        writer = subprocess.Popen([sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE)
        assert writer.stdout is not None
        writer.stdout.readline()
        while not path.exists():
            pass
        for _ in range(draw.randrange(3, 30)):
            content = path.read_bytes()
            assert len(content) == 1_000_000
            assert len(set(content.split())) == 1
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        assert len(path.read_bytes()) == 1_000_000


# --- what is promised -----------------------------------------------------------------------------


def test_every_promise_names_a_test_that_exists() -> None:
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", (ROOT / "PROMISES.md").read_text())
    assert len(named) > 40
    for file, test in named:
        assert f"def {test}(" in (ROOT / "tests" / file).read_text(), f"{file}::{test}"
