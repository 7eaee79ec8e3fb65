"""What the process of one rank does, from its fork to its end.

It joins the process group of its epoch, then runs the tasks it is given until its agent closes the
channel. It never outlives its agent: a thread waits for the channel to close, and the kernel is
asked to kill the process when its parent dies, which dies with the agent.
"""

import ctypes
import os
import queue
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from pptune.errors import UsageError
from pptune.runtime import TorchMissing, require_torch
from pptune.runtime.channel import Channel, Notice
from pptune.runtime.context import RankContext
from pptune.runtime.heap import keep_freed_memory

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_TIMERSLACK = 29


def serve(
    rank: int, parent: int, channel_descriptor: int, notice_descriptor: int, listener: int | None
) -> None:
    """Join, then serve tasks until the agent closes the channel.

    `parent` is the process that has started this one, `listener` the socket to serve the rendezvous
    on, if that is for this rank to do.
    """
    die_with(parent)
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        # For whoever looks at the list of processes.
        libc.prctl(_PR_SET_NAME, b"pptune-rank-%d" % rank, 0, 0, 0)
        # Replayed stages sleep for given times; the default slack of 50 us would lengthen each.
        libc.prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
    keep_freed_memory()
    # The terminal sends Ctrl-C to the whole group; only the agent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=channel_descriptor))
    notice = Notice(notice_descriptor)
    commands: queue.Queue[dict[str, Any]] = queue.Queue()
    threading.Thread(target=_read_commands, args=(channel, commands), daemon=True).start()
    setup = commands.get()
    lock = threading.Lock()

    def emit(message: dict[str, Any]) -> None:
        try:
            with lock:
                channel.send(message)
        except OSError:
            os._exit(1)  # the agent is gone

    try:
        context = _join(setup, listener, emit, notice.write)
        from pptune.runtime.tasks import TASKS

        notice.write("waiting for a command")
        while True:
            command = commands.get()
            notice.write(f"running {command['task']}")
            result = TASKS[command["task"]](context, **command["arguments"])
            notice.write("waiting for a command")
            emit({"event": "result", "number": command["number"], "result": result})
    except BaseException as error:
        emit(_failed(error))
        # Peers may be blocked on this rank, so no orderly shutdown is possible: the agent kills.
        commands.get()


def _read_commands(channel: Channel, commands: "queue.Queue[dict[str, Any]]") -> None:
    while True:
        messages = channel.receive()
        if messages is None:
            os._exit(1)
        for message in messages:
            commands.put(message)


def die_with(parent: int) -> None:
    """Have the kernel kill this process when `parent`, which has started it, dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)


def _join(
    setup: dict[str, Any],
    listener: int | None,
    emit: Callable[[dict[str, Any]], None],
    status: Callable[[str], None],
) -> RankContext:
    status("importing torch")
    require_torch()
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    status("joining the process group")
    rank, num_ranks = setup["rank"], setup["num_ranks"]
    timeout = timedelta(seconds=setup["timeout_s"])
    if setup["device"] == "cuda":
        device = torch.device("cuda", setup["local_rank"])
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(setup["threads"])
    serving: dict[str, Any] = {} if listener is None else {"master_listen_fd": listener}
    store = TCPStore(
        setup["address"], setup["port"], is_master=listener is not None, timeout=timeout,
        wait_for_workers=False, **serving,
    )  # fmt: skip
    dist.init_process_group(
        "nccl" if setup["device"] == "cuda" else "gloo",
        store=PrefixStore(setup["prefix"], store),
        rank=rank,
        world_size=num_ranks,
        timeout=timeout,
        device_id=device if setup["device"] == "cuda" else None,
    )
    return RankContext(
        rank=rank, num_ranks=num_ranks, device=device, emit=emit, status=status, node=setup["node"]
    )


def _failed(error: BaseException) -> dict[str, Any]:
    """The event that tells the agent. `usage` is text where the user asked for the impossible,
    `environment` where torch is not what is needed."""
    cause = error
    while cause.__cause__ is not None:  # torch and we wrap what the user's code raised
        cause = cause.__cause__
    return {
        "event": "failed",
        "reason": _reason(error),
        "traceback": "".join(traceback.format_exception(cause)),
        "usage": str(error) if isinstance(error, UsageError) else None,
        "environment": str(error) if isinstance(error, TorchMissing) else None,
    }


def _reason(error: BaseException) -> str:
    if isinstance(error, TorchMissing):
        return "crash"  # the other question needs torch
    from pptune.runtime.headroom import is_out_of_memory

    return "oom" if is_out_of_memory(error) else "crash"
