"""Peak memory of a piece of work: the allocator's own count on CUDA, live tensors on CPU."""

from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


def measure_peak_bytes(
    work: Callable[[], None], static_tensors: list[torch.Tensor], device: torch.device
) -> int:
    """The largest number of bytes that live at once during `work`.

    On CUDA what the allocator counts, which includes everything on the device. On CPU the bytes of
    `static_tensors` (they live before `work`) plus the highest balance of allocations and frees
    that torch's CPU allocator reports while `work` runs.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        work()
        torch.cuda.synchronize(device)
        return int(torch.cuda.max_memory_allocated(device))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    balance = peak = 0
    for event in _memory_events(profiler):
        balance += event
        peak = max(peak, balance)
    return storage_bytes(static_tensors) + peak


def _memory_events(profiler: profile) -> list[int]:
    """Signed sizes of the CPU allocator's events, in time order."""
    results: Any = profiler.profiler.kineto_results  # type: ignore[union-attr]
    events = [
        (event.start_ns(), event.nbytes())
        for event in results.events()
        if event.name() == "[memory]"
    ]
    return [size for _, size in sorted(events, key=lambda event: event[0])]


def storage_bytes(tensors: list[torch.Tensor]) -> int:
    """Bytes of the distinct storages behind `tensors`."""
    storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}
    return sum(tensor.untyped_storage().nbytes() for tensor in storages.values())
