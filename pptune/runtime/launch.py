"""Start ranks, run tasks on all of them, and end them: alone, under torchrun and under srun.

One agent (this process) owns one or all ranks. The leader - the agent with rank 0 - publishes each
command in a control store; every agent passes it to its ranks and publishes what they answered. A
rank that dies, hangs or raises ends its *epoch*: all ranks are killed, and the next command starts
fresh ones with a fresh rendezvous. So one bad plan never ends the job.
"""

import contextlib
import itertools
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import IO, Any

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from pptune.errors import RankFailure, RuntimeFailure
from pptune.runtime.channel import Channel
from pptune.runtime.world import World, interface_towards

_POLL_S = 0.02
_STOP = "stop"
_TRACEBACK_LINES = 6
_FOLLOWER_PATIENCE_S = 24 * 3600.0
"""How long a follower waits for the leader's next command; the leader may be searching."""

Event = dict[str, Any]

_sessions = itertools.count()
"""Groups that this process has led or followed, one after the other: under a launcher all agents
count alike, and each session has its own keys in the shared store."""


@dataclass(slots=True)
class _Child:
    """A rank's process as its agent sees it."""

    rank: int
    process: subprocess.Popen[bytes]
    channel: Channel
    stderr: IO[bytes]
    ready: bool = False
    doing: str = "starting"
    answer: dict[str, Any] | None = None
    """{"result": ...} or {"failed": reason, "message": text} for the command in progress."""


@dataclass(slots=True)
class _Agent:
    """The ranks this process owns."""

    world: World
    port: int
    timeout_s: float
    session: int
    children: dict[int, _Child] = field(default_factory=dict)

    def start(self, epoch: int) -> None:
        """Start one process per local rank. They join through the control store."""
        for local_rank, rank in enumerate(self.world.local_ranks):
            self.children[rank] = self._start_child(rank, local_rank, epoch)

    def _start_child(self, rank: int, local_rank: int, epoch: int) -> _Child:
        world = self.world
        ours, theirs = socket.socketpair()
        stderr = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the child
        # The rank's own launcher variables would make torch join another group.
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("TORCHELASTIC") and name not in ("RANK", "WORLD_SIZE")
        }
        environment |= {"PPTUNE_CHANNEL": str(theirs.fileno()), "PPTUNE_PARENT": str(os.getpid())}
        if "GLOO_SOCKET_IFNAME" not in environment:
            interface = interface_towards(world.address)
            if interface is not None:
                environment["GLOO_SOCKET_IFNAME"] = interface
        process = subprocess.Popen(
            [sys.executable, "-m", "pptune.runtime.rank"],
            env=environment, stdin=subprocess.DEVNULL, stdout=stderr, stderr=stderr,
            pass_fds=[theirs.fileno()],
        )  # fmt: skip
        theirs.close()
        cores = len(os.sched_getaffinity(0))
        channel = Channel(ours)
        if world.launcher != "alone":
            local_rank = int(os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or 0)
        ranks_here = _ranks_on_this_host(world)
        channel.send(
            {
                "rank": rank, "num_ranks": world.num_ranks, "device": world.device,
                "local_rank": local_rank, "threads": max(1, cores // ranks_here),
                "address": world.address, "port": self.port,
                "prefix": f"{world.run_id}/session{self.session}/epoch{epoch}",
                "timeout_s": self.timeout_s,
                "node": _node_name(world),
            }
        )  # fmt: skip
        return _Child(rank, process, channel, stderr)

    def send(self, command: dict[str, Any]) -> None:
        """Give every local rank the next command."""
        for child in self.children.values():
            child.answer = None
            with contextlib.suppress(OSError):
                child.channel.send(command)

    def poll(self, timeout_s: float) -> Iterator[Event]:
        """Wait up to `timeout_s` for messages; yield events of local ranks and note answers."""
        with selectors.DefaultSelector() as selector:
            for child in self.children.values():
                if child.answer is None:
                    selector.register(child.channel.connection, selectors.EVENT_READ, child)
            if not selector.get_map():
                time.sleep(timeout_s)
                return
            for key, _ in selector.select(timeout_s):
                child = key.data
                messages = child.channel.receive()
                if messages is None:
                    self._note_death(child)
                for message in messages or []:
                    event = self._note(child, message)
                    if event is not None:
                        yield event

    def _note(self, child: _Child, message: dict[str, Any]) -> Event | None:
        match message["event"]:
            case "ready":
                child.ready = True
            case "status":
                child.doing = message["doing"]
            case "result":
                child.answer = {"number": message["number"], "result": message["result"]}
            case "failed":
                lines = message["traceback"].strip().splitlines()[-_TRACEBACK_LINES:]
                child.answer = {
                    "failed": message["reason"],
                    "message": f"rank {child.rank} failed while {child.doing}:\n"
                    + "\n".join(f"  {line}" for line in lines),
                }
            case _:
                return {"rank": child.rank, **message}
        return None

    def _note_death(self, child: _Child) -> None:
        try:
            code = child.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            code = None
        child.stderr.seek(0)
        tail = child.stderr.read().decode(errors="replace").strip().splitlines()
        killed = code is not None and code < 0
        how = f"was killed by {signal.Signals(-code).name}" if code and killed else f"exited {code}"
        # The kernel's out-of-memory killer leaves no other trace than SIGKILL.
        reason = "oom" if code == -signal.SIGKILL and _oom_killed() else "crash"
        child.answer = {
            "failed": reason,
            "message": f"rank {child.rank} {how} while {child.doing}"
            + "".join(f"\n  {line}" for line in tail[-_TRACEBACK_LINES:]),
        }

    def kill(self) -> None:
        """End every local rank at once and wait until it is gone."""
        for child in self.children.values():
            with contextlib.suppress(OSError):
                child.process.kill()
        for child in self.children.values():
            child.process.wait()
            child.channel.close()
            child.stderr.close()
        self.children = {}


class RankGroup:
    """All ranks of a world, seen from the leader. Use it as a context manager.

    >>> with RankGroup(world, timeout_s=60) as group:
    ...     answers = group.run("links", {"budget_s": 10})
    """

    def __init__(
        self,
        world: World,
        *,
        timeout_s: float,
        on_event: Callable[[Event], None] | None = None,
    ) -> None:
        self.world = world
        self.timeout_s = timeout_s
        self.on_event = on_event or (lambda event: None)
        self._store, port, session = _open_store(world, timeout_s)
        self._agent = _Agent(world, port, timeout_s, session)
        self._number = 0
        self._epoch = 0

    def __enter__(self) -> "RankGroup":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(
        self, task: str, arguments: dict[str, Any] | None = None, *, timeout_s: float | None = None
    ) -> list[Any]:
        """Run `task` on every rank; the results by rank.

        Raises RankFailure when a rank dies, raises, runs out of memory or does not answer within
        `timeout_s`; every rank has been killed by then, and the next call starts fresh ones.
        """
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        started = not self._agent.children
        command: dict[str, Any] = {
            "number": self._number, "epoch": self._epoch, "task": task,
            "arguments": arguments or {}, "timeout_s": timeout_s,
        }  # fmt: skip
        self._number += 1
        if started:
            self._agent.start(self._epoch)
        self._store.set(_key("command", command["number"]), json.dumps(command))
        self._agent.send(command)
        try:
            return self._collect(command, time.monotonic() + timeout_s)
        except BaseException:
            self._abort(command["number"])
            raise

    def _collect(self, command: dict[str, Any], deadline: float) -> list[Any]:
        number, world = command["number"], self.world
        remote = [rank for rank in range(world.num_ranks) if rank not in world.local_ranks]
        answers: dict[int, dict[str, Any]] = {}
        while True:
            for event in self._agent.poll(_POLL_S):
                self.on_event(event)
            for child in self._agent.children.values():
                if child.answer is not None:
                    answers[child.rank] = child.answer
            for rank in remote:
                key = _key("answer", number, rank)
                if rank not in answers and self._store.check([key]):
                    answers[rank] = json.loads(self._store.get(key))
            failed = [answer for answer in answers.values() if "failed" in answer]
            if failed:
                self._raise(self._first_failure(answers))
            if len(answers) == world.num_ranks:
                return [answers[rank]["result"] for rank in range(world.num_ranks)]
            if time.monotonic() > deadline:
                self._raise_timeout(command, answers)

    def _first_failure(self, answers: dict[int, dict[str, Any]]) -> tuple[int, dict[str, Any]]:
        """The failure to blame: peers of a dead rank fail too, with a closed connection."""
        # Peers notice within moments; give the cause itself time to arrive.
        until = time.monotonic() + 0.3
        while time.monotonic() < until and len(answers) < self.world.num_ranks:
            for event in self._agent.poll(_POLL_S):
                self.on_event(event)
            for child in self._agent.children.values():
                if child.answer is not None:
                    answers[child.rank] = child.answer
        failed = {rank: answer for rank, answer in answers.items() if "failed" in answer}
        return min(failed.items(), key=lambda item: (_is_echo(item[1]["message"]), item[0]))

    def _raise(self, failure: tuple[int, dict[str, Any]]) -> None:
        rank, answer = failure
        raise RankFailure(answer["message"], rank=rank, reason=answer["failed"])

    def _raise_timeout(self, command: dict[str, Any], answers: dict[int, dict[str, Any]]) -> None:
        missing = [rank for rank in range(self.world.num_ranks) if rank not in answers]
        doing = {child.rank: child.doing for child in self._agent.children.values()}
        for rank in missing:
            key = _key("doing", command["number"], rank)
            if rank not in doing and self._store.check([key]):
                doing[rank] = self._store.get(key).decode()
        shown = "; ".join(f"rank {rank} {doing.get(rank, 'did not start')}" for rank in missing[:8])
        raise RankFailure(
            f"{command['task']} did not finish within {command['timeout_s']:.0f} s: {shown}; "
            "give --timeout a longer time if the work is that long",
            rank=missing[0] if len(missing) == 1 else None,
            reason="timeout",
        )

    def _abort(self, number: int) -> None:
        self._epoch += 1
        self._agent.kill()
        with contextlib.suppress(Exception):  # the store may be what failed
            self._store.set(_key("abort", number), "1")

    def close(self) -> None:
        """End every rank and release the other agents."""
        self._agent.kill()
        with contextlib.suppress(Exception):
            self._store.set(_key("command", self._number), json.dumps({"task": _STOP}))
            self._wait_for_followers()

    def _wait_for_followers(self) -> None:
        """The leader may host the store, so it leaves last; a dead agent delays it 5 s at most."""
        followers = self.world.num_ranks - len(self.world.local_ranks)
        until = time.monotonic() + 5
        while followers and time.monotonic() < until:
            if int(self._store.add(_key("left"), 0)) >= followers:
                return
            time.sleep(_POLL_S)


def follow(world: World, *, timeout_s: float) -> None:
    """What an agent other than the leader does: run commands until told to stop.

    Raises RuntimeFailure when the leader can't be reached or is gone.
    """
    store, port, session = _open_store(world, timeout_s)
    agent = _Agent(world, port, timeout_s, session)
    epoch, number = -1, 0
    try:
        while True:
            command = _next_command(store, number)
            if command["task"] == _STOP:
                store.add(_key("left"), 1)
                return
            if command["epoch"] != epoch or not agent.children:
                agent.kill()
                epoch = command["epoch"]
                agent.start(epoch)
            agent.send(command)
            _answer(store, agent, command)
            number += 1
    finally:
        agent.kill()


def _next_command(store: Store, number: int) -> dict[str, Any]:
    deadline = time.monotonic() + _FOLLOWER_PATIENCE_S
    key = _key("command", number)
    while time.monotonic() < deadline:
        try:
            if store.check([key]):
                command: dict[str, Any] = json.loads(store.get(key))
                return command
        except Exception as error:
            raise RuntimeFailure(f"the leader (rank 0) is gone: {error}") from None
        time.sleep(_POLL_S)
    raise RuntimeFailure("no command came from the leader (rank 0) for a day")


def _answer(store: Store, agent: _Agent, command: dict[str, Any]) -> None:
    number = command["number"]
    pending = set(agent.children)
    said: dict[int, str] = {}
    while pending:
        for _ in agent.poll(_POLL_S):
            pass
        for child in agent.children.values():
            if said.get(child.rank) != child.doing:
                said[child.rank] = child.doing
                store.set(_key("doing", number, child.rank), child.doing)
            if child.answer is not None and child.rank in pending:
                pending.discard(child.rank)
                store.set(_key("answer", number, child.rank), json.dumps(child.answer))
        if store.check([_key("abort", number)]):
            agent.kill()
            return
    # Results are in, but another rank may still fail; the next command's epoch tells.


def _key(*parts: object) -> str:
    return "/".join(map(str, parts))


def _open_store(world: World, timeout_s: float) -> tuple[Store, int, int]:
    """The control store, its port, and this session's number in the launch."""
    host = world.is_leader and not world.store_exists
    try:
        store = TCPStore(
            world.address, world.port, is_master=host, timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
        )  # fmt: skip
    except Exception as error:
        raise RuntimeFailure(
            f"cannot {'open' if host else 'reach'} the rendezvous at {world.address}:{world.port} "
            f"({str(error).splitlines()[0]}); set MASTER_ADDR and MASTER_PORT to rank 0's host and "
            "a free port"
        ) from None
    session = next(_sessions)
    return PrefixStore(f"{world.run_id}/session{session}", store), store.port, session


def _ranks_on_this_host(world: World) -> int:
    if world.launcher == "alone":
        return world.num_ranks
    local = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("SLURM_NTASKS_PER_NODE") or "1"
    return int(local) if local.isdigit() else 1


def _node_name(world: World) -> str:
    """Ranks with the same name share a node; hosts of one name differ by the launcher's node."""
    group = os.environ.get("GROUP_RANK") or os.environ.get("SLURM_NODEID") or "0"
    return f"{socket.gethostname()}/{group if world.launcher != 'alone' else 0}"


def _is_echo(message: str) -> bool:
    """Whether a failure only reports that a peer's connection closed."""
    return any(
        sign in message
        for sign in ("Connection closed by peer", "Connection reset", "Broken pipe", "NCCL",
                     "SocketException", "recvBytes", "sendBytes", "Timed out waiting")
    )  # fmt: skip


def _oom_killed() -> bool:
    """Whether this control group has counted an out-of-memory kill."""
    for path in ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control"):
        try:
            with open(path) as stream:
                for line in stream:
                    name, _, count = line.partition(" ")
                    if name == "oom_kill" and int(count) > 0:
                        return True
        except (OSError, ValueError):
            continue
    return False
