"""The process that owns ranks: it starts them, hears what they say, and ends them."""

import contextlib
import os
import selectors
import signal
import socket
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import IO, Any

from pptune.errors import RuntimeFailure
from pptune.runtime.channel import Channel, Notice
from pptune.runtime.fork_server import ForkServer
from pptune.runtime.world import World, interface_towards

_TRACEBACK_LINES = 6
_TAIL_BYTES = 2**16

Event = dict[str, Any]


@dataclass(slots=True)
class Child:
    """A rank's process as its agent sees it."""

    rank: int
    channel: Channel
    stderr: IO[bytes]
    notice: Notice
    oom_kills: int
    """How often the kernel had killed for lack of memory when the rank was started."""
    answer: dict[str, Any] | None = None
    """To the command in progress: {"result": ...}, or {"failed": reason, "message": text, "usage":
    text or None, "environment": text or None}."""

    @property
    def doing(self) -> str:
        """What the rank last said it was at; current even when it has been killed."""
        return self.notice.read() or "starting"


@dataclass(slots=True)
class Agent:
    """The ranks this process owns."""

    world: World
    timeout_s: float
    session: int
    expects_pipelines: bool = True
    """Whether ranks get torch's pipelines from the process they are forked from."""
    children: dict[int, Child] = field(default_factory=dict)
    server: ForkServer | None = None
    """What starts them; it lives on when they are killed."""

    def start(self, epoch: int) -> None:
        """Start one process per local rank. They join through the agents' control store; alone,
        through one that rank 0 serves on a socket of ours, so that its port is surely free."""
        if self.server is None:
            imports = _imports(self.world, expects_pipelines=self.expects_pipelines)
            self.server = ForkServer(self._environment(), imports)
        if self.world.launcher != "alone":
            for local_rank, rank in enumerate(self.world.local_ranks):
                self.children[rank] = self._start_child(rank, local_rank, epoch, self.world.port)
            return
        with _listener(self.world.address) as listener:
            port = listener.getsockname()[1]
            for rank in self.world.local_ranks:
                own = listener if rank == 0 else None
                self.children[rank] = self._start_child(rank, rank, epoch, port, own)

    def _environment(self) -> dict[str, str]:
        """Of the ranks. The launcher's variables would make torch join another group."""
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("TORCHELASTIC") and name not in ("RANK", "WORLD_SIZE")
        }
        if "GLOO_SOCKET_IFNAME" not in environment:
            interface = interface_towards(self.world.address)
            if interface is not None:
                environment["GLOO_SOCKET_IFNAME"] = interface
        return environment

    def _start_child(
        self,
        rank: int,
        local_rank: int,
        epoch: int,
        port: int,
        listener: socket.socket | None = None,
    ) -> Child:
        world = self.world
        assert self.server is not None
        ours, theirs = socket.socketpair()
        stderr = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the child
        notice = Notice.create()
        handed = [theirs.fileno(), notice.descriptor, stderr.fileno()]
        self.server.fork(rank, handed if listener is None else [*handed, listener.fileno()])
        theirs.close()
        cores = len(os.sched_getaffinity(0))
        channel = Channel(ours)
        if world.launcher != "alone":
            local_rank = int(os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or 0)
        ranks_here = _ranks_on_this_host(world)
        with contextlib.suppress(OSError):  # A server that has died takes the channel with it.
            channel.send(
                {
                    "rank": rank, "num_ranks": world.num_ranks, "device": world.device,
                    "local_rank": local_rank, "threads": max(1, cores // ranks_here),
                    "address": world.address, "port": port,
                    "prefix": f"{world.run_id}/session{self.session}/epoch{epoch}",
                    "timeout_s": self.timeout_s,
                    "node": _node_name(world),
                }
            )  # fmt: skip
        return Child(rank, channel, stderr, notice, _oom_kills())

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

    def _note(self, child: Child, message: dict[str, Any]) -> Event | None:
        match message["event"]:
            case "result":
                child.answer = {"number": message["number"], "result": message["result"]}
            case "failed":
                how = "ran out of memory" if message["reason"] == "oom" else "failed"
                lines = [line for line in message["traceback"].strip().splitlines()
                         if line.strip(" ^~")][-_TRACEBACK_LINES:]  # fmt: skip
                child.answer = {
                    "failed": message["reason"], "usage": message["usage"],
                    "environment": message["environment"],
                    "message": f"rank {child.rank} {how} while {child.doing}:\n"
                    + "\n".join(f"  {line}" for line in lines),
                }  # fmt: skip
            case _:
                return {"rank": child.rank, **message}
        return None

    def _note_death(self, child: Child) -> None:
        assert self.server is not None
        code = self.server.exit_of(child.rank)
        child.stderr.seek(-min(_TAIL_BYTES, child.stderr.seek(0, os.SEEK_END)), os.SEEK_END)
        written = child.stderr.read() or self.server.read_errors()[-_TAIL_BYTES:]
        tail = written.decode(errors="replace").strip().splitlines()
        killed = code is not None and code < 0
        how = f"was killed by {signal.Signals(-code).name}" if code and killed else f"exited {code}"
        # The kernel's out-of-memory killer leaves no other trace than SIGKILL.
        short = code == -signal.SIGKILL and _oom_kills() > child.oom_kills
        reason = "oom" if short else "crash"
        child.answer = {
            "failed": reason,
            "usage": None,
            "environment": None,
            "message": f"rank {child.rank} {how} while {child.doing}"
            + "".join(f"\n  {line}" for line in tail[-_TRACEBACK_LINES:]),
        }

    def kill(self) -> None:
        """End every local rank at once and wait until it is gone."""
        if self.server is not None and not self.server.kill_ranks():
            self.server.close()
            self.server = None
        for child in self.children.values():
            child.channel.close()
            child.stderr.close()
            child.notice.close()
        self.children = {}

    def close(self) -> None:
        """End the ranks and what starts them."""
        self.kill()
        if self.server is not None:
            self.server.close()
            self.server = None


def _imports(world: World, *, expects_pipelines: bool) -> tuple[str, ...]:
    """Modules that every rank needs and may have from the process it is forked from."""
    if world.device == "cuda":
        return ()
    pipelines = ("pptune.runtime.pipeline",) if expects_pipelines and world.num_ranks > 1 else ()
    return ("pptune.runtime.tasks", *pipelines)


def _listener(address: str) -> socket.socket:
    try:
        return socket.create_server((address, 0))
    except OSError as error:
        raise RuntimeFailure(
            f"no port of {address} can be opened for the ranks to meet at: "
            f"{error.strerror or error}"
        ) from None


def _ranks_on_this_host(world: World) -> int:
    if world.launcher == "alone":
        return world.num_ranks
    local = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("SLURM_NTASKS_PER_NODE") or "1"
    return int(local) if local.isdigit() else 1


def _node_name(world: World) -> str:
    """Ranks with the same name share a node; hosts of one name differ by the launcher's node."""
    group = os.environ.get("GROUP_RANK") or os.environ.get("SLURM_NODEID") or "0"
    return f"{socket.gethostname()}/{group if world.launcher != 'alone' else 0}"


def _oom_kills() -> int:
    """How often the kernel has killed for lack of memory in this control group; 0 if unknown."""
    for path in ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control"):
        try:
            with open(path) as stream:
                for line in stream:
                    name, _, count = line.partition(" ")
                    if name == "oom_kill":
                        return int(count)
        except (OSError, ValueError):
            continue
    return 0
