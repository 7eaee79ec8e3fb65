"""Ranks as processes: they start, answer, fail in every way, and never outlive their agent."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from pptune.errors import RankFailure, RuntimeFailure, UsageError
from pptune.presets import resolve_model
from pptune.runtime.channel import Channel, Notice
from pptune.runtime.launch import RankGroup
from pptune.runtime.world import World, detect_world, interface_towards

ROOT = Path(__file__).parent.parent
WORLD = World(num_ranks=2, local_ranks=(0, 1), device="cpu", launcher="alone")
pytestmark = pytest.mark.timeout(900)

PATIENT_S = 200.0
"""A time-out that only a hang reaches, on however busy a machine."""

LAUNCHER_VARIABLES = (
    "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE", "RANK", "WORLD_SIZE", "LOCAL_RANK",
    "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID", "SLURM_NTASKS",
    "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_JOB_ID", "SLURM_STEP_ID",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def group() -> Iterator[RankGroup]:
    with RankGroup(WORLD, timeout_s=PATIENT_S) as group:
        yield group
    assert processes_below() == []


def processes_below(of: int | None = None) -> list[psutil.Process]:
    """Processes below `of` (default: this one) that have not ended, but for Python's own tracker,
    which tests of other files may have left."""
    return [
        child
        for child in psutil.Process(of).children(recursive=True)
        if child.status() != psutil.STATUS_ZOMBIE
        and "multiprocessing.resource_tracker" not in " ".join(child.cmdline())
    ]


def ranks_alive(of: int | None = None) -> list[psutil.Process]:
    """The same without what ranks are forked from, which lives on when they fail."""
    return [
        process
        for process in processes_below(of)
        if process.name().startswith("pptune-rank-")
        or "pptune.runtime.fork_server" not in process.cmdline()
    ]


def complete_model(group: RankGroup, entry: str, *, timeout_s: float = PATIENT_S) -> list[Any]:
    spec = msgspec.to_builtins(resolve_model(entry, seq_len=16))
    return group.run("complete_model", {"model": spec}, timeout_s=timeout_s)


# --- channel and notice ---------------------------------------------------------------------------


def test_channel_delivers_messages_whole_however_the_bytes_arrive() -> None:
    left, right = socket.socketpair()
    channel = Channel(left)
    right.sendall(b'{"a": 1}\n{"b"')
    assert channel.receive() == [{"a": 1}]
    right.sendall(b": 2}\n")
    assert channel.receive() == [{"b": 2}]
    Channel(right).send({"text": "two\nlines"})
    assert channel.receive() == [{"text": "two\nlines"}]
    right.close()
    assert channel.receive() is None
    channel.close()


def test_notice_is_read_by_the_other_side_of_the_memory() -> None:
    ours = Notice.create()
    theirs = Notice(os.dup(ours.descriptor))
    assert ours.read() == ""
    theirs.write("running 3F7 of a long plan")
    theirs.write("running 3F8")
    assert ours.read() == "running 3F8"
    theirs.write("x" * 100_000)
    assert set(ours.read()) == {"x"}
    theirs.close()
    assert set(ours.read()) == {"x"}
    ours.close()


# --- the world ------------------------------------------------------------------------------------


def test_alone_means_two_cpu_ranks_of_this_process() -> None:
    assert detect_world(None, "cpu") == WORLD
    assert detect_world(5, "cpu").local_ranks == (0, 1, 2, 3, 4)


def test_torchrun_gives_rank_size_and_store(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234",
        "TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_USE_AGENT_STORE": "True",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    world = detect_world(None, "cpu")
    assert (world.num_ranks, world.local_ranks, world.launcher) == (8, (3,), "torchrun")
    assert (world.address, world.port, world.store_exists) == ("10.0.0.1", 1234, True)
    assert not world.is_leader
    with pytest.raises(UsageError, match=r"torchrun started 8 processes, but 4 ranks are needed"):
        detect_world(4, "cpu")


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu[07-09,12]", "gpu07"),
        ("gpu3", "gpu3"),
        ("a1,b[2-3]", "a1"),
        ("node-[1,5]", "node-1"),
    ],
)
def test_slurm_leader_is_the_first_host_of_the_list(
    monkeypatch: pytest.MonkeyPatch, nodes: str, first: str
) -> None:
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_NTASKS", "4")
    monkeypatch.setenv("SLURM_STEP_NODELIST", nodes)
    world = detect_world(None, "cpu")
    assert (world.address, world.launcher, world.num_ranks) == (first, "slurm", 4)


def test_slurm_with_one_task_starts_its_own_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_NTASKS", "1")
    assert detect_world(None, "cpu").launcher == "alone"


def test_unknown_and_missing_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pptune.runtime.world.num_gpus", lambda: 0)
    with pytest.raises(UsageError, match="use auto, cuda or cpu"):
        detect_world(2, "tpu")
    with pytest.raises(RuntimeFailure, match=r"no GPU is visible; use --device cpu"):
        detect_world(2, "cuda")
    monkeypatch.setattr("pptune.runtime.world.num_gpus", lambda: 2)
    with pytest.raises(RuntimeFailure, match=r"4 ranks need 4 GPUs, but 2 are visible"):
        detect_world(4, "cuda")
    assert detect_world(None, "auto").num_ranks == 2


def test_loopback_is_found_by_its_address() -> None:
    assert interface_towards("127.0.0.1") == "lo"
    assert interface_towards("no.such.host.invalid") is None


# --- a group of ranks -----------------------------------------------------------------------------


@pytest.mark.dist
def test_ranks_answer_in_order_stay_between_commands_and_end_with_the_group() -> None:
    with RankGroup(WORLD, timeout_s=PATIENT_S) as group:
        assert [answer["rank"] for answer in group.run("ping")] == [0, 1]
        before = {process.pid for process in ranks_alive()}
        assert len(before) == 2
        assert [answer["rank"] for answer in group.run("ping")] == [0, 1]
        assert {process.pid for process in ranks_alive()} == before
    assert processes_below() == []


@pytest.mark.dist
def test_a_rank_killed_between_commands_is_named_and_the_next_command_starts_fresh_ones(
    group: RankGroup,
) -> None:
    group.run("ping")
    os.kill(ranks_alive()[1].pid, signal.SIGKILL)
    with pytest.raises(RankFailure, match=r"rank 1 was killed by SIGKILL while waiting") as caught:
        group.run("ping")
    assert (caught.value.rank, caught.value.reason) == (1, "crash")
    assert ranks_alive() == []
    assert [answer["rank"] for answer in group.run("ping")] == [0, 1]


BUILDING = "building tests.faulty:model"


@pytest.mark.dist
@pytest.mark.parametrize(
    ("fault", "rank", "reason", "line"),
    [
        ("raise:1:build", 1, "crash",
         f"rank 1 failed while {BUILDING}: ValueError: planted by the test"),
        pytest.param(
            "oserror:0:build", 0, "crash",
            f"rank 0 failed while {BUILDING}: FileNotFoundError: weights.bin is not there",
            marks=pytest.mark.slow),
        pytest.param("kill:0:build", 0, "crash",
                     f"rank 0 was killed by SIGKILL while {BUILDING}", marks=pytest.mark.slow),
        pytest.param("exit:1:build", 1, "crash", f"rank 1 exited 7 while {BUILDING}",
                     marks=pytest.mark.slow),
        pytest.param("oom:1:build", 1, "oom", f"rank 1 ran out of memory while {BUILDING}",
                     marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_a_failing_rank_is_named_with_what_it_did(
    group: RankGroup, monkeypatch: pytest.MonkeyPatch, fault: str, rank: int, reason: str, line: str
) -> None:
    monkeypatch.setenv("PPTUNE_FAULT", fault)
    with pytest.raises(RankFailure) as caught:
        complete_model(group, "tests.faulty:model")
    assert (caught.value.rank, caught.value.reason) == (rank, reason)
    assert caught.value.line.startswith(line)
    assert "\n" not in caught.value.line
    assert ranks_alive() == []
    if "Error" in line:
        assert 'misbehave("build")' in str(caught.value)  # the user's own line of the traceback


@pytest.mark.dist
def test_a_hanging_rank_is_named_at_the_time_out(
    group: RankGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PPTUNE_FAULT", "hang:1:build")
    group.run("ping")
    with pytest.raises(RankFailure, match=rf"within 1 s: rank 1 was {BUILDING}") as caught:
        complete_model(group, "tests.faulty:model", timeout_s=1)
    assert (caught.value.rank, caught.value.reason) == (1, "timeout")
    assert ranks_alive() == []


@pytest.mark.slow
@pytest.mark.dist
def test_what_a_user_asked_wrongly_is_a_usage_error_without_traceback(group: RankGroup) -> None:
    with pytest.raises(UsageError, match=r"there is no module tests\.nothing") as caught:
        complete_model(group, "tests.nothing:model")
    assert "\n" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.dist
def test_processes_that_the_model_starts_end_with_the_ranks() -> None:
    with RankGroup(WORLD, timeout_s=PATIENT_S) as group:
        answers = complete_model(group, "tests.faulty:forks")
        assert answers[0]["num_layers"] == 4
        started = processes_below()
        assert len(started) == 5  # each rank and its own child, and what ranks are forked from
    _, alive = psutil.wait_procs(started, timeout=5)
    assert alive == []


@pytest.mark.dist
def test_ranks_end_within_seconds_when_their_agent_is_killed(tmp_path: Path) -> None:
    script = textwrap.dedent(
        """
        import time
        from pptune.runtime.launch import RankGroup
        from pptune.runtime.world import World
        world = World(num_ranks=2, local_ranks=(0, 1), device="cpu", launcher="alone")
        group = RankGroup(world, timeout_s=120)
        group.run("ping")
        print("up", flush=True)
        time.sleep(600)
        """
    )
    agent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert agent.stdout is not None
    assert agent.stdout.readline() == b"up\n"
    ranks = processes_below(agent.pid)
    assert len(ranks) == 3  # and what they are forked from
    agent.kill()
    agent.wait()
    agent.stdout.close()
    _, alive = psutil.wait_procs(ranks, timeout=5)
    assert alive == []


@pytest.mark.dist
def test_what_ranks_are_forked_from_may_die_like_a_rank(group: RankGroup) -> None:
    group.run("ping")
    ranks = ranks_alive()
    [server] = [process for process in processes_below() if process not in ranks]
    server.kill()
    _, alive = psutil.wait_procs(ranks, timeout=5)
    assert alive == []
    with pytest.raises(RankFailure, match=r"rank \d was killed by SIGKILL while waiting"):
        group.run("ping")
    assert [answer["rank"] for answer in group.run("ping")] == [0, 1]


def test_a_port_in_use_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        world = World(
            num_ranks=2, local_ranks=(0,), device="cpu", launcher="slurm", port=port
        )  # fmt: skip
        with pytest.raises(RuntimeFailure, match=rf"127\.0\.0\.1:{port}.*a free port"):
            RankGroup(world, timeout_s=5)
