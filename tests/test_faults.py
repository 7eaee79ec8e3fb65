"""Faults planted into running commands: what dies is named, the rest ends, nothing is lost.

Each command is a process of its own; whatever it starts inherits a mark in its environment, by
which the test finds survivors.
"""

import contextlib
import errno
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from pptune import search as searching
from pptune.cost_model import Setting
from pptune.model import ModelSpec
from pptune.plan import Plan, make_plan
from pptune.plans_file import PlansFile, ProfileReference, save_plans
from pptune.profiles import load_profile, save_profile
from pptune.runtime.launch import RankGroup
from pptune.runtime.visits import PlanVisitor
from pptune.runtime.wait_times import WaitTimes
from pptune.runtime.world import World
from pptune.targets import parse_target
from pptune.validate import digest_of
from pptune.validation_file import ValidationFile, load_validation
from tests.synthetic import synthetic_profile, uniform_link

ROOT = Path(__file__).parent.parent
ENTRY = "tests.faulty:model"
MODEL = ModelSpec(
    name=ENTRY, family="custom", num_layers=4, seq_len=16, hidden_size=32, vocab_size=61,
    entry=ENTRY,
)  # fmt: skip
MARK = "PPTUNE_TEST_MARK"

pytestmark = pytest.mark.timeout(900)


# --- commands as processes ------------------------------------------------------------------------


class Command:
    """A pptune command under test: its stderr as it comes, its ranks, what survives it."""

    def __init__(
        self,
        *arguments: str,
        cwd: Path,
        fault: str = "",
        before: tuple[str, ...] = (sys.executable,),
        variables: dict[str, str] | None = None,
    ) -> None:
        self.mark = uuid.uuid4().hex
        environment = {
            **os.environ, MARK: self.mark, "PPTUNE_FAULT": fault,
            "PYTHONPATH": f"{cwd}{os.pathsep}{ROOT}", **(variables or {}),
        }  # fmt: skip
        self.process = subprocess.Popen(
            [*before, "-m", "pptune", *arguments], cwd=cwd, env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        self.lines: list[str] = []
        self.out = ""
        self._readers = [
            threading.Thread(target=self._read_err, daemon=True),
            threading.Thread(target=self._read_out, daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    def _read_err(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as stream:
            for line in stream:
                self.lines.append(line)

    def _read_out(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as stream:
            self.out = stream.read()

    @property
    def err(self) -> str:
        return "".join(self.lines)

    def wait_until_rank_1_is(self, doing: str, seconds: float = 300) -> psutil.Process:
        """Rank 1's process, once what it says that it does (channel.Notice) matches."""
        until = time.monotonic() + seconds
        notices: dict[Path, psutil.Process] = {}
        while True:
            assert self.process.poll() is None, self.err
            assert time.monotonic() < until, f"never {doing}; stderr: {self.err}"
            for notice, process in notices.items():
                with contextlib.suppress(OSError):
                    if re.search(doing, notice.read_bytes().decode()):
                        return process
            if not notices:  # To look for it takes longer than it may be doing that.
                for process in self.ranks():
                    # Processes end and files are closed while this looks through them.
                    with contextlib.suppress(psutil.Error, OSError):
                        if process.name() == "pptune-rank-1":
                            for opened in Path(f"/proc/{process.pid}/fd").iterdir():
                                if "pptune-notice" in os.readlink(opened):
                                    notices[opened] = process
            time.sleep(0.002)

    def ranks(self) -> list[psutil.Process]:
        return [process for process in self.alive() if process.name().startswith("pptune-rank-")]

    def alive(self) -> list[psutil.Process]:
        """Living processes that carry this command's mark."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if (
                    process.environ().get(MARK) == self.mark
                    and process.status() != psutil.STATUS_ZOMBIE
                ):
                    found.append(process)
        return found

    def end(self, seconds: float = 300) -> int:
        """The exit code; no process of the command may be left 5 s after it."""
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"still running; stderr: {self.err}") from None
        for reader in self._readers:
            reader.join(10)
        until = time.monotonic() + 5
        while left := self.alive():
            assert time.monotonic() < until, f"survivors: {[each.cmdline() for each in left]}"
            time.sleep(0.05)
        return code


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder with a profile of the faulty model and its plans."""
    profile = synthetic_profile(
        model=MODEL, num_layers=4, seq_len=16, block=lambda b: (1e-3 + 1e-4 * b, 2e-3 + 2e-4 * b),
        sizes=(1, 2, 4), links=(uniform_link(1e-4, 1e9),), boundary_bytes=2048,
    )  # fmt: skip
    save_profile(profile, tmp_path / "profile.json")
    save_plans(plans_of(tmp_path), tmp_path / "plans.json")
    yield tmp_path
    shutil.rmtree(tmp_path, ignore_errors=True)


def plans_of(folder: Path, num_ranks: int = 2) -> PlansFile:
    """1F1B at b = 1 and 2, global batch 8."""
    path = folder / "profile.json"
    return searching.search(
        load_profile(path),
        Setting(target=parse_target("torch")),
        searching.Request(
            global_batch_size=8, num_ranks=num_ranks, schedules=("1f1b",), microbatch_sizes=(1, 2)
        ),
        reference=ProfileReference(path=str(path), digest=digest_of(path)),
    )


@pytest.fixture(scope="session")
def patience() -> str:
    """A `--timeout` that no part of a command needs on this machine, as busy as it is."""
    started = time.monotonic()
    subprocess.run([sys.executable, "-c", "import pptune.runtime.tasks"], cwd=ROOT, check=True)
    return f"{max(30.0, 5 * (time.monotonic() - started)):.0f}s"


REAL = ("validate", "plans.json", "--model", ENTRY)
PROFILE = (
    "profile", ENTRY, "--seq-len", "16", "--micro-batch-sizes", "1,2", "--budget", "3s",
    "--max-noise", "50%", "-o", "new.json",
)  # fmt: skip


# --- a rank fails ---------------------------------------------------------------------------------


@pytest.mark.dist
def test_a_plan_whose_rank_is_killed_is_marked_and_the_next_plan_goes_on(folder: Path) -> None:
    command = Command(*REAL, "--repeats", "2", cwd=folder, fault="kill:1:forward-b2")
    assert command.end() == 0, command.err
    runs = {r.plan.microbatch_size: r for r in load_validation(folder / "validation.json").runs}
    assert runs[1].status == "ok"
    assert len(runs[1].samples_s) >= 4
    assert runs[2].status == "crash"
    assert re.fullmatch(
        r"rank 1 was killed by SIGKILL while running 1F0 of 1f1b P2 V1 b2 M4", runs[2].reason or ""
    )
    assert "1f1b P2 V1 b2 M4 failed: rank 1 was killed by SIGKILL" in command.err


@pytest.mark.slow
@pytest.mark.dist
def test_a_raising_layer_ends_profile_with_its_rank_phase_and_traceback(folder: Path) -> None:
    command = Command(*PROFILE, cwd=folder, fault="raise:1:forward-b2")
    assert command.end() == 3
    error = command.err[command.err.index("error: ") :]
    assert error.startswith("error: rank 1 failed while preparing layers at b=2:\n")
    assert 'misbehave(f"forward-b{x.shape[0]}")' in error  # the user's own line
    assert error.endswith("ValueError: planted by the test\n")
    assert not (folder / "new.json").exists()


FAULTS = [
    ("raise:1:forward-b2", "crash", r"rank 1 failed while running 1F0 of .*ValueError: planted"),
    ("exit:0:forward-b2", "crash", r"rank 0 exited 7 while running 0F0 of"),
    ("oom:1:forward-b2", "oom", r"rank 1 ran out of memory while running 1F0 of"),
    ("hang:0:forward-b2", "timeout", r"rank 0 was running 0F0 of 1f1b P2 V1 b2 M4"),
]


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("launcher", ["alone", "torchrun"])
@pytest.mark.parametrize(("fault", "status", "reason"), FAULTS)
def test_every_failure_in_a_stage_marks_its_plan(
    folder: Path, patience: str, fault: str, status: str, reason: str, launcher: str
) -> None:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
    timeout = patience if status == "timeout" else "200s"
    command = Command(
        *REAL, "--repeats", "1", "--timeout", timeout, cwd=folder, fault=fault,
        before=(sys.executable,) if launcher == "alone" else torchrun,
    )  # fmt: skip
    assert command.end() == 0, command.err
    runs = {r.plan.microbatch_size: r for r in load_validation(folder / "validation.json").runs}
    assert (runs[1].status, runs[2].status) == ("ok", status)
    assert re.search(reason, runs[2].reason or ""), runs[2].reason


@pytest.mark.dist
@pytest.mark.slow
def test_torchrun_gives_the_same_kind_of_answer_as_alone(folder: Path) -> None:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
    answers = {}
    for name, before in (("alone", (sys.executable,)), ("torchrun", torchrun)):
        command = Command(
            *REAL, "--repeats", "2", "--format", "json", "-o", f"{name}.json", cwd=folder,
            before=before,
        )  # fmt: skip
        assert command.end() == 0, command.err
        assert command.out.count('"schema_version"') == 1  # one rank prints, once
        answers[name] = msgspec.json.decode(command.out, type=ValidationFile)
        assert load_validation(folder / f"{name}.json") == answers[name]
    alone, launched = answers["alone"], answers["torchrun"]
    assert [run.plan for run in alone.runs] == [run.plan for run in launched.runs]
    for run in (*alone.runs, *launched.runs):
        assert run.status == "ok"
        assert run.peak_memory_bytes is not None
    for one, other in zip(alone.runs, launched.runs, strict=True):
        assert one.peak_memory_bytes == other.peak_memory_bytes


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("stop", ["kill", "hang"])
@pytest.mark.parametrize(
    ("line", "doing"),
    [
        (PROFILE, "timing .* at b="),
        (PROFILE, "timing the link"),
        (PROFILE, r"running \w+ of 1f1b"),
        (("validate", "plans.json", "--replay"), r"running \w+ of 1f1b"),
    ],
    ids=["layers", "links", "calibration", "replay"],
)
def test_a_rank_stopped_from_outside_ends_the_command_in_time(
    folder: Path, patience: str, line: tuple[str, ...], doing: str, stop: str
) -> None:
    command = Command(*line, "--timeout", patience, cwd=folder)
    victim = command.wait_until_rank_1_is(doing)
    victim.send_signal(signal.SIGKILL if stop == "kill" else signal.SIGSTOP)
    assert command.end() == 3, command.err
    error = command.err[command.err.index("error: ") :]
    if stop == "kill":
        assert re.match(r"error: rank 1 was killed by SIGKILL while \w+", error)
    else:
        assert re.search(r"did not finish within .*rank 1 was|rank 1 hung while", error), error
    if line is PROFILE and "at b=" not in doing:  # the layers had been measured, and are kept
        assert load_profile(folder / "new.json").layers


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("os._exit(9)", r"rank \d exited 9 while starting"),
        ("os.kill(os.getpid(), 9)", r"rank \d was killed by SIGKILL while starting"),
        ("time.sleep(600)", r"did not finish within 5 s: rank 0 was starting; rank 1 was starting"),
    ],
)
def test_ranks_that_fail_at_their_start_are_named(folder: Path, body: str, message: str) -> None:
    (folder / "sitecustomize.py").write_text(
        f"import os, sys, time\nif 'pptune.runtime.fork_server' in sys.orig_argv:\n    {body}\n"
    )
    command = Command(*PROFILE, "--timeout", "5s", cwd=folder)
    assert command.end(120) == 3
    assert re.search(message, command.err), command.err


# --- signals --------------------------------------------------------------------------------------


def samples_by_plan(path: Path) -> dict[str, tuple[float, ...]]:
    return {run.plan.label: run.samples_s for run in load_validation(path).runs}


def stop_and_resume(folder: Path, tries: int, seed: int) -> None:
    """Interrupt one validation again and again; what was finished must never be lost or redone."""
    draw = random.Random(seed)
    path = folder / "validation.json"
    before: dict[str, tuple[float, ...]] = {}
    for number in range(tries):
        command = Command(*REAL, "--resume", "--repeats", "100000", cwd=folder)
        moment = draw.choice(["at once", "starting", "running"])
        if moment == "at once":
            time.sleep(draw.uniform(0.3, 1.5))
        elif moment == "starting":
            time.sleep(draw.uniform(1.5, 5))
        else:
            known = path.stat().st_mtime_ns if path.exists() else 0
            until = time.monotonic() + 120
            while not path.exists() or path.stat().st_mtime_ns == known:
                assert command.process.poll() is None, command.err
                assert time.monotonic() < until
                time.sleep(0.01)
            time.sleep(draw.uniform(0, 0.5))
        wanted = draw.choice([signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
        command.process.send_signal(wanted)
        code = command.end(60)
        # A signal before the first line of pptune runs ends the process as the system does it.
        allowed = {-wanted} if wanted == signal.SIGKILL else {128 + wanted, -wanted}
        assert code in allowed, (number, moment, wanted, code, command.err)
        if code > 0:
            assert command.err.endswith("stopped; what was measured has been saved\n")
        if path.exists():
            after = samples_by_plan(path)
            for label, samples in before.items():
                assert after[label][: len(samples)] == samples
            before = after
        temporary = [each.name for each in folder.iterdir() if each.name.startswith(".valid")]
        assert wanted == signal.SIGKILL or not temporary
        for name in temporary:
            (folder / name).unlink()
    assert before


@pytest.mark.dist
def test_ctrl_c_ends_ranks_and_keeps_what_was_measured(folder: Path) -> None:
    command = Command(*REAL, "--repeats", "100000", cwd=folder)
    path = folder / "validation.json"
    until = time.monotonic() + 200
    while not path.exists():
        assert command.process.poll() is None, command.err
        assert time.monotonic() < until
        time.sleep(0.02)
    command.process.send_signal(signal.SIGINT)
    assert command.end(60) == 130
    assert command.err.endswith("stopped; what was measured has been saved\n")
    validation = load_validation(path)
    assert sum(len(run.samples_s) for run in validation.runs) >= 2
    assert validation.summary is None  # it had not ended


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize(("num_ranks", "tries", "seed"), [(1, 16, 1), (1, 16, 2), (2, 18, 3)])
def test_fifty_stops_at_random_moments_lose_and_repeat_nothing(
    folder: Path, num_ranks: int, tries: int, seed: int
) -> None:
    save_plans(plans_of(folder, num_ranks), folder / "plans.json")
    stop_and_resume(folder, tries=tries, seed=seed)


# --- places that cannot be written, networks that are not there -----------------------------------


def test_a_disk_that_is_full_from_the_start_is_one_line(folder: Path) -> None:
    small = folder / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4k", "none", str(small)], capture_output=True,
        check=False,
    )  # fmt: skip
    if mounted.returncode:
        pytest.skip("this user may not mount a small file system")
    try:
        (small / "full").write_bytes(b"x" * 4096)
        command = Command(
            "search", "profile.json", "--global-batch-size", "8", "--quiet", "-o",
            "small/plans.json", cwd=folder,
        )  # fmt: skip
        code = command.end()
        left = [each.name for each in small.iterdir()]
    finally:
        subprocess.run(["umount", str(small)], check=True)
    assert code == 2
    reason = os.strerror(errno.ENOSPC)
    assert command.err == f"error: cannot write small/plans.json: {reason}; give another --output\n"
    assert left == ["full"]


def test_a_read_only_file_system_is_known_before_any_rank_starts(folder: Path) -> None:
    still = folder / "still"
    still.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "ro", "none", str(still)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("this user may not mount a read-only file system")
    try:
        command = Command(*REAL, "-o", "still/validation.json", cwd=folder)
        code = command.end()
    finally:
        subprocess.run(["umount", str(still)], check=True)
    assert code == 2
    assert re.search(r"error: cannot write still/validation\.json: Read-only file", command.err)
    assert "validate (real)" not in command.err


@pytest.mark.slow
@pytest.mark.dist
def test_ranks_meet_without_any_network_but_loopback_and_without_a_home(folder: Path) -> None:
    if subprocess.run(["unshare", "-n", "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user may not make a network namespace")
    inside = 'ip link set lo up && exec "$0" "$@"'
    command = Command(
        *REAL, "--repeats", "1", cwd=folder, variables={"HOME": "/nonexistent"},
        before=("unshare", "-n", "sh", "-c", inside, sys.executable),
    )  # fmt: skip
    assert command.end() == 0, command.err
    assert all(run.status == "ok" for run in load_validation(folder / "validation.json").runs)


@pytest.mark.slow
@pytest.mark.dist
def test_a_taken_port_under_a_launcher_is_one_line(folder: Path) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = Command(
            *REAL, "--timeout", "5s", cwd=folder,
            variables={"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
                       "MASTER_PORT": port},
        )  # fmt: skip
        assert command.end(60) == 3
    assert re.search(rf"error: cannot open the rendezvous at 127\.0\.0\.1:{port}", command.err)


# --- clocks ---------------------------------------------------------------------------------------


def test_no_duration_is_taken_from_a_clock_that_can_be_set() -> None:
    """time.time() steps when the machine's date is set; monotonic clocks do not."""
    for path in (ROOT / "pptune").rglob("*.py"):
        text = path.read_text()
        assert not re.search(r"\btime\.time\(|from time import time\b", text), path


# --- soak -----------------------------------------------------------------------------------------


def footprint(processes: list[psutil.Process]) -> tuple[int, int, int, int]:
    """Descriptors, threads and resident bytes of the processes, and files in shared memory."""
    return (
        sum(process.num_fds() for process in processes),
        sum(process.num_threads() for process in processes),
        sum(process.memory_info().rss for process in processes),
        len(list(Path("/dev/shm").iterdir())),
    )


@pytest.mark.slow
@pytest.mark.dist
def test_two_hundred_plans_leak_nothing() -> None:
    """200 different plans, replayed, on the same ranks: the second hundred costs no memory."""
    times = WaitTimes(
        forward_s=1e-5, backward_s=1e-5, backward_input_s=5e-6, backward_weight_s=5e-6
    )
    plans: list[Plan] = [
        make_plan(
            schedule="1f1b", num_ranks=2, num_chunks=1, microbatch_size=size,
            num_microbatches=microbatches, layers_per_stage=(2, 2),
        )
        for size in range(1, 21)
        for microbatches in range(2, 12)
    ]  # fmt: skip
    random.Random(0).shuffle(plans)
    world = World(num_ranks=2, local_ranks=(0, 1), device="cpu", launcher="alone")
    with RankGroup(world, timeout_s=200) as group:
        visitor = PlanVisitor(
            group, MODEL, dtype="float32", timeout_s=200,
            stage_times=lambda plan: ([times] * plan.num_stages, 4096 * plan.microbatch_size),
        )  # fmt: skip
        processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
        marks = []
        for number, plan in enumerate(plans):
            visitor(plan, steps=1, memory=False)
            if number == 0:
                processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
            if number in (99, 199):
                marks.append(footprint(processes))
    (fds, threads, rss, shared), (later_fds, later_threads, later_rss, later_shared) = marks
    assert len(processes) == 4  # Two ranks and what they are forked from.
    assert later_fds <= fds
    assert later_threads <= threads
    assert later_shared <= shared
    assert later_rss - rss < 30 * 2**20
    assert all(not process.is_running() for process in processes[1:])


@pytest.mark.slow
@pytest.mark.dist
def test_restarts_after_failures_leak_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every failure starts fresh ranks: sockets, notices and stderr files must go with the old."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PPTUNE_FAULT", "exit:1:build")
    world = World(num_ranks=2, local_ranks=(0, 1), device="cpu", launcher="alone")
    own = psutil.Process()
    counts = []
    with RankGroup(world, timeout_s=200) as group:
        for _ in range(5):
            with contextlib.suppress(Exception):
                group.run("complete_model", {"model": msgspec.to_builtins(MODEL)})
            counts.append(own.num_fds())
    assert counts[1:] == counts[:-1]
    assert own.children() == []


@pytest.mark.slow
def test_twenty_commands_in_a_row_leave_nothing_behind(folder: Path) -> None:
    def everything() -> tuple[set[str], int]:
        return {each.name for each in folder.iterdir()}, len(list(Path("/dev/shm").iterdir()))

    line = ("search", "profile.json", "--global-batch-size", "8", "-o", "again.json", "--quiet")
    assert Command(*line, cwd=folder).end() == 0
    before = everything()
    for _ in range(20):
        assert Command(*line, cwd=folder).end() == 0
    assert everything() == before
