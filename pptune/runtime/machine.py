"""What the ranks run on, as a profile describes it."""

import platform
from typing import Any

import torch

from pptune import hardware
from pptune.runtime.context import RankContext
from pptune.runtime.exchange import gather_objects


def describe_machine(context: RankContext, dtype: str) -> dict[str, Any]:
    """The fields of a profile's `machine`; called by all ranks."""
    nodes = gather_objects(context.node)
    ranks_per_node = max(nodes.count(node) for node in set(nodes))
    on_cuda = context.device.type == "cuda"
    name = torch.cuda.get_device_name(context.device) if on_cuda else hardware.cpu_name()
    peak = hardware.dense_peak(name, dtype) if on_cuda else None
    cores = hardware.num_cores()
    memory = (
        torch.cuda.mem_get_info(context.device)[1]
        if on_cuda
        else _share(hardware.memory_bytes(), ranks_per_node)
    )
    backend = "nccl" if on_cuda else "gloo"
    where = f"{torch.cuda.device_count()} x {name}" if on_cuda else f"{name}, {cores} cores"
    num_nodes = len(set(nodes))
    return {
        "description": f"{where}, {len(nodes)} ranks on {num_nodes} "
        f"{'node' if num_nodes == 1 else 'nodes'}, {backend}, torch {torch.__version__}",
        "device": context.device.type,
        "device_name": name,
        "num_devices": torch.cuda.device_count() if on_cuda else cores,
        "num_nodes": num_nodes,
        "ranks_per_node": ranks_per_node,
        "cores": cores,
        "memory_bytes": memory,
        "peak_flops_per_s": None if peak is None else peak.flops_per_s,
        "backend": backend,
        "software": software_versions(),
        "environment": hardware.timing_environment(),
    }


def software_versions() -> dict[str, str]:
    """Versions that change timings: python, torch, and CUDA's where there is a GPU."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    if torch.cuda.is_available():
        versions["cuda"] = str(torch.version.cuda)
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return versions


def _share(memory_bytes: int | None, ranks: int) -> int | None:
    """Ranks of one host share its memory."""
    return None if memory_bytes is None else memory_bytes // ranks
