"""Real gloo ranks for tests: processes that meet over a file, have a deadline and are reaped."""

import pickle
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing


def run_ranks(
    function: Callable[..., Any],
    *arguments: Any,
    folder: Path,
    num_ranks: int = 2,
    deadline_s: float = 60.0,
) -> list[Any]:
    """What `function(*arguments)` returns on each rank of a gloo group, in rank order.

    Raises what a rank raises, and TimeoutError after `deadline_s`; no process outlives the call.
    """
    started = time.monotonic()
    context = torch.multiprocessing.start_processes(
        _rank_main, (num_ranks, str(folder), function, arguments), nprocs=num_ranks, join=False,
        daemon=True, start_method="spawn",
    )  # fmt: skip
    try:
        while not context.join(timeout=1.0):
            if time.monotonic() - started > deadline_s:
                raise TimeoutError(f"ranks were still running after {deadline_s} s")
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()
            process.join()
    return [pickle.loads((folder / f"answer.{rank}").read_bytes()) for rank in range(num_ranks)]


def _rank_main(
    rank: int, num_ranks: int, folder: str, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=num_ranks,
        timeout=timedelta(seconds=30),
    )  # fmt: skip
    answer = function(*arguments)
    (Path(folder) / f"answer.{rank}").write_bytes(pickle.dumps(answer))
    dist.barrier()
    dist.destroy_process_group()
