"""Start ranks, run tasks on all of them, and end them: alone, under torchrun and under srun.

One agent (this process) owns one or all ranks. Where there are several, the leader - the agent with
rank 0 - publishes each command in a control store; every agent passes it to its ranks and publishes
what they answered. A rank that dies, hangs or raises ends its *epoch*: all ranks are killed, and
the next command starts fresh ones with a fresh rendezvous. So one bad plan never ends the job.
"""

import contextlib
import itertools
import json
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from pptune.errors import RankFailure, RuntimeFailure, UsageError
from pptune.runtime import require_torch
from pptune.runtime.agent import Agent, Event
from pptune.runtime.world import World

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_POLL_S = 0.02
_STOP = "stop"
_CAUSE_PATIENCE_S = 0.5
"""After a first failure, how long to wait for the failure that caused it."""

_FOLLOWER_PATIENCE_S = 24 * 3600.0
"""How long a follower waits for the leader's next command; the leader may be searching."""

_sessions = itertools.count()
"""Groups that this process has led or followed, one after the other: under a launcher all agents
count alike, and each session has its own keys in the shared store."""


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
        expects_pipelines: bool = True,
    ) -> None:
        """`expects_pipelines`: whether plans will probably be run. Ranks are up sooner without, and
        import what they need when they need it."""
        self.world = world
        self.timeout_s = timeout_s
        self.on_event = on_event or (lambda event: None)
        session = next(_sessions)
        self._store = None if world.launcher == "alone" else _open_store(world, timeout_s, session)
        """Through which the leader speaks with other agents, where there may be some."""
        self._agent = Agent(world, timeout_s, session, expects_pipelines)
        self._number = 0
        self._epoch = 0

    def __enter__(self) -> "RankGroup":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Start the ranks and don't wait for them, so that what else there is to prepare runs
        beside. Raises RuntimeFailure."""
        if not self._agent.children:
            self._agent.start(self._epoch)

    def run(
        self, task: str, arguments: dict[str, Any] | None = None, *, timeout_s: float | None = None
    ) -> list[Any]:
        """Run `task` on every rank; the results by rank.

        Raises RankFailure when a rank dies, raises, runs out of memory or does not answer within
        `timeout_s`, and UsageError where a rank was asked for the impossible. Every rank has been
        killed by then, and the next call starts fresh ones.
        """
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        command: dict[str, Any] = {
            "number": self._number, "epoch": self._epoch, "task": task,
            "arguments": arguments or {}, "timeout_s": timeout_s,
        }  # fmt: skip
        self._number += 1
        try:
            self.start()
            if self._store is not None:
                self._store.set(_key("command", command["number"]), json.dumps(command))
            self._agent.send(command)
            return self._collect(command, time.monotonic() + timeout_s)
        except BaseException:
            self._abort(command["number"])
            raise

    def _collect(self, command: dict[str, Any], deadline: float) -> list[Any]:
        answers: dict[int, dict[str, Any]] = {}
        while True:
            self._gather(command["number"], answers)
            if any("failed" in answer for answer in answers.values()):
                self._raise_failure(command["number"], answers)
            if len(answers) == self.world.num_ranks:
                return [answers[rank]["result"] for rank in range(self.world.num_ranks)]
            if time.monotonic() > deadline:
                self._raise_timeout(command, answers)

    def _gather(self, number: int, answers: dict[int, dict[str, Any]]) -> None:
        """Wait a moment and add what ranks here and elsewhere have answered."""
        for event in self._agent.poll(_POLL_S):
            self.on_event(event)
        for child in self._agent.children.values():
            if child.answer is not None:
                answers[child.rank] = child.answer
        if self._store is None:
            return
        for rank in self._missing(answers):
            key = _key("answer", number, rank)
            if rank not in self._agent.children and self._store.check([key]):
                answers[rank] = json.loads(self._store.get(key))

    def _missing(self, answers: dict[int, dict[str, Any]]) -> list[int]:
        return [rank for rank in range(self.world.num_ranks) if rank not in answers]

    def _raise_failure(self, number: int, answers: dict[int, dict[str, Any]]) -> None:
        """Blame the rank that failed first: peers of a dead or hung rank fail too."""
        # Peers notice within moments; give the cause itself time to arrive.
        until = time.monotonic() + _CAUSE_PATIENCE_S
        while time.monotonic() < until and self._missing(answers):
            self._gather(number, answers)
        failed = {rank: answer for rank, answer in answers.items() if "failed" in answer}
        rank, answer = min(failed.items(), key=lambda item: (_is_echo(item[1]["message"]), item[0]))
        silent = self._missing(answers)
        if _is_echo(answer["message"]) and len(silent) == 1:
            doing = self._doing(number, silent[0])
            raise RankFailure(
                f"rank {silent[0]} hung while {doing}; the others gave up waiting for it",
                rank=silent[0],
                reason="timeout",
            )
        if answer["usage"] is not None:
            raise UsageError(answer["usage"])
        if answer["environment"] is not None:
            raise RuntimeFailure(answer["environment"])
        raise RankFailure(answer["message"], rank=rank, reason=answer["failed"])

    def _doing(self, number: int, rank: int) -> str:
        child = self._agent.children.get(rank)
        if child is not None:
            return child.doing
        key = _key("doing", number, rank)
        if self._store is not None and self._store.check([key]):
            return self._store.get(key).decode()
        return "starting"

    def _raise_timeout(self, command: dict[str, Any], answers: dict[int, dict[str, Any]]) -> None:
        missing = self._missing(answers)
        shown = "; ".join(
            f"rank {rank} was {self._doing(command['number'], rank)}" for rank in missing[:8]
        )
        raise RankFailure(
            f"{command['task']} did not finish within {command['timeout_s']:.3g} s: {shown}; "
            "give --timeout a longer time if the work is that long",
            rank=missing[0] if len(missing) == 1 else None,
            reason="timeout",
        )

    def _abort(self, number: int) -> None:
        self._epoch += 1
        self._agent.kill()
        if self._store is not None:
            with contextlib.suppress(Exception):  # the store may be what failed
                self._store.set(_key("abort", number), "1")

    def close(self) -> None:
        """End every rank and release the other agents."""
        self._agent.close()
        if self._store is not None:
            with contextlib.suppress(Exception):
                self._store.set(_key("command", self._number), json.dumps({"task": _STOP}))
                self._wait_for_followers(self._store)

    def _wait_for_followers(self, store: "Store") -> None:
        """The leader may host the store, so it leaves last; a dead agent delays it 5 s at most."""
        followers = self.world.num_ranks - len(self.world.local_ranks)
        until = time.monotonic() + 5
        while followers and time.monotonic() < until:
            if int(store.add(_key("left"), 0)) >= followers:
                return
            time.sleep(_POLL_S)


def follow(world: World, *, timeout_s: float) -> None:
    """What an agent other than the leader does: run commands until told to stop.

    Raises RuntimeFailure when the leader can't be reached or is gone.
    """
    session = next(_sessions)
    store = _open_store(world, timeout_s, session)
    agent = Agent(world, timeout_s, session)
    epoch, number = -1, 0
    try:
        while True:
            command = _next_command(store, number)
            if command["task"] == _STOP:
                return
            if command["epoch"] != epoch or not agent.children:
                agent.kill()
                epoch = command["epoch"]
                agent.start(epoch)
            agent.send(command)
            _answer(store, agent, command)
            number += 1
    finally:
        agent.close()
        with contextlib.suppress(Exception):  # the leader may be gone
            store.add(_key("left"), 1)


def _next_command(store: "Store", number: int) -> dict[str, Any]:
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


def _answer(store: "Store", agent: Agent, command: dict[str, Any]) -> None:
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


def _open_store(world: World, timeout_s: float, session: int) -> "Store":
    """This session's part of the control store of all agents."""
    require_torch()
    from torch._C._distributed_c10d import PrefixStore, TCPStore

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
    return PrefixStore(f"{world.run_id}/session{session}", store)


def _is_echo(message: str) -> bool:
    """Whether a failure only reports that a peer's connection closed."""
    return any(
        sign in message
        for sign in ("Connection closed by peer", "Connection reset", "Broken pipe", "NCCL",
                     "SocketException", "recvBytes", "sendBytes", "Timed out waiting")
    )  # fmt: skip
