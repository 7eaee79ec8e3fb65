"""The process that an agent's ranks are copies of: `python -m pptune.runtime.fork_server`.

Importing torch and its pipelines takes seconds of a core. One process does it for all ranks of an
agent, and for those that are started again after a failure. Ranks on CUDA import torch themselves:
what a process has asked its driver before a fork may leave the copy without it.
"""

import contextlib
import gc
import importlib
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence

from pptune.errors import RuntimeFailure
from pptune.runtime.channel import Channel
from pptune.runtime.rank import die_with, serve

_PATIENCE_S = 5.0
"""How long a rank that was killed may take to be gone."""


class ForkServer:
    """The agent's side."""

    def __init__(self, environment: dict[str, str], imports: Sequence[str]) -> None:
        """Start it; it then imports the modules `imports`. Raises RuntimeFailure."""
        self._pids: dict[int, int] = {}
        self._codes: dict[int, int] = {}
        self._asked: set[int] = set()
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the server
        ours, theirs = socket.socketpair()
        self._channel = Channel(ours)
        try:
            # A process group of its own: Ctrl-C in the terminal is for the agent.
            self._process = subprocess.Popen(
                # -P: the pptune that is installed, even inside a folder with its sources.
                [sys.executable, "-P", "-m", "pptune.runtime.fork_server",
                 str(theirs.fileno()), str(os.getpid()), *imports],
                env=environment, stdin=subprocess.DEVNULL, stdout=self._stderr,
                stderr=self._stderr, pass_fds=[theirs.fileno()], process_group=0,
            )  # fmt: skip
        except OSError as error:
            ours.close()
            self._stderr.close()
            raise RuntimeFailure(f"cannot start ranks: {error.strerror or error}") from None
        finally:
            theirs.close()

    def fork(self, rank: int, descriptors: Sequence[int]) -> None:
        """Start a rank as soon as the imports are done.

        `descriptors` are its channel, its notice, what its output goes to and, for one that serves
        the rendezvous, a listening socket.
        """
        self._asked.add(rank)
        with contextlib.suppress(OSError):  # A dead server closes the channel of its rank.
            socket.send_fds(self._channel.connection, [b"%d" % rank], descriptors)

    def exit_of(self, rank: int) -> int | None:
        """What a rank whose channel has closed exited with, negative for a signal; None where
        nothing tells."""
        self._hear_until(lambda: rank in self._codes)
        if rank not in self._codes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self._process.wait(1)
        return self._codes.get(rank)

    def read_errors(self) -> bytes:
        """What the server itself wrote."""
        self._stderr.seek(0)
        return self._stderr.read()

    def kill_ranks(self) -> bool:
        """End every rank and what it has started, at once. Whether the server still serves."""
        self._hear(0)
        for pid in self._pids.values():
            with contextlib.suppress(OSError):
                os.killpg(pid, signal.SIGKILL)
        # A server that is still importing has nothing that would have to be kept.
        if self._asked == set(self._pids):
            self._hear_until(lambda: self._asked == set(self._codes))
        whole = self._asked == set(self._codes) and self._process.poll() is None
        self._pids, self._codes, self._asked = {}, {}, set()
        return whole

    def close(self) -> None:
        """End the server and every rank."""
        self.kill_ranks()
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._channel.close()
        self._stderr.close()

    def _hear_until(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while not done() and time.monotonic() < deadline:
            if not self._hear(deadline - time.monotonic()):
                return

    def _hear(self, timeout_s: float) -> bool:
        """Note what the server says within this time; False once it is gone."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._channel.connection, selectors.EVENT_READ)
            if not selector.select(timeout_s):
                return True
        messages = self._channel.receive()
        for message in messages or []:
            known = self._pids if message["event"] == "started" else self._codes
            known[message["rank"]] = message["value"]
        return messages is not None


def main() -> None:
    """The server's side: import, then fork until the agent closes the channel."""
    descriptor, parent, *imports = sys.argv[1:]
    die_with(int(parent))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.disable()  # Nothing that is imported is garbage, and to look through it again takes long.
    for name in imports:
        with contextlib.suppress(Exception):  # A rank says what is wrong with torch.
            importlib.import_module(name)
    gc.freeze()
    gc.enable()
    _fork_on_demand(Channel(socket.socket(fileno=int(descriptor))))


def _fork_on_demand(channel: Channel) -> None:
    connection = channel.connection
    with selectors.DefaultSelector() as selector:
        selector.register(connection, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is connection:
                    # The kernel keeps messages with descriptors apart.
                    text, descriptors, *_ = socket.recv_fds(connection, 64, 4)
                    if not text:
                        return
                    rank = int(text)
                    pid = _fork(
                        rank, descriptors, [each.fd for each in selector.get_map().values()]
                    )
                    channel.send({"event": "started", "rank": rank, "value": pid})
                    selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (rank, pid))
                else:
                    rank, pid = key.data
                    selector.unregister(key.fileobj)
                    os.close(key.fd)
                    _, status = os.waitpid(pid, 0)
                    code = os.waitstatus_to_exitcode(status)
                    channel.send({"event": "ended", "rank": rank, "value": code})


def _fork(rank: int, descriptors: list[int], own: list[int]) -> int:
    """Start a rank, which has `descriptors` and not the server's `own`; its process."""
    server = os.getpid()
    with warnings.catch_warnings():
        # Python 3.12 warns of other threads; those here are BLAS libraries', which expect forks.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid:
        # A group of its own, so that what the user's model starts ends with it. Either side may be
        # first, and a rank that has ended is nobody's leader any more.
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)
        for descriptor in descriptors:
            os.close(descriptor)
        return pid
    try:
        os.setpgid(0, 0)
        for descriptor in own:
            os.close(descriptor)
        channel, notice, output, *listener = descriptors
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        serve(rank, server, channel, notice, listener[0] if listener else None)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


if __name__ == "__main__":
    main()
