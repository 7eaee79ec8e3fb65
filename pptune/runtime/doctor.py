"""What this machine has for pptune, and what would get in the way, without starting a rank."""

import importlib.metadata
import os
import socket
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

import pptune
from pptune import hardware
from pptune.profiles import Link
from pptune.runtime.machine import software_versions

_OPTIONAL_PACKAGES = ("transformers", "optuna", "optuna-dashboard")
_MIN_SHARED_MEMORY_BYTES = 64 * 2**20


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU, or all processors together."""

    name: str
    memory_bytes: int | None
    peak_bfloat16_flops_per_s: float | None
    """Dense peak, or null where it isn't known (always for processors)."""
    peak_source: str | None = None


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """The machine as pptune sees it."""

    host: str
    versions: dict[str, str]
    packages: dict[str, str | None]
    """Optional packages and their versions; null where not installed."""
    cores: int
    devices: tuple[Device, ...]
    backends: tuple[str, ...]
    """torch.distributed's backends that this build has."""
    environment: dict[str, str]
    """Variables that change timings."""
    problems: tuple[str, ...]
    """What would get in the way, and what to do about it."""


class Checkup(msgspec.Struct, frozen=True, kw_only=True):
    """A diagnosis and how the test exchange went."""

    diagnosis: Diagnosis
    links: tuple[Link, ...]
    exchange: str


def diagnose() -> Diagnosis:
    """Look at this machine; starts nothing and takes a moment."""
    return Diagnosis(
        host=socket.gethostname(),
        versions={
            "pptune": pptune.__version__,
            **{name: str(version) for name, version in software_versions().items()},
        },
        packages={name: _version(name) for name in _OPTIONAL_PACKAGES},
        cores=hardware.num_cores(),
        devices=_devices(),
        backends=_backends(),
        environment=hardware.timing_environment(),
        problems=tuple(_problems()),
    )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _devices() -> tuple[Device, ...]:
    devices = [
        Device(
            name=hardware.cpu_name(),
            memory_bytes=hardware.memory_bytes(),
            peak_bfloat16_flops_per_s=None,
        )
    ]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        peak = hardware.dense_peak(properties.name, "bfloat16")
        devices.append(
            Device(
                name=properties.name,
                memory_bytes=properties.total_memory,
                peak_bfloat16_flops_per_s=None if peak is None else peak.flops_per_s,
                peak_source=None if peak is None else peak.source,
            )
        )
    return tuple(devices)


def _backends() -> tuple[str, ...]:
    available = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available,
                 "mpi": dist.is_mpi_available}  # fmt: skip
    return tuple(name for name, is_available in available.items() if is_available())


def _problems() -> list[str]:
    problems = []
    try:
        socket.gethostbyname(socket.gethostname())
    except OSError:
        problems.append(
            f"this host's name {socket.gethostname()} has no address; add it to /etc/hosts, or "
            "set GLOO_SOCKET_IFNAME to a network interface"
        )
    shared = Path("/dev/shm")
    if torch.cuda.is_available() and shared.exists():
        filesystem = os.statvfs(shared)
        free = filesystem.f_bavail * filesystem.f_frsize
        if free < _MIN_SHARED_MEMORY_BYTES:
            problems.append(
                f"/dev/shm has {free // 2**20} MiB free, too little for NCCL; start the container "
                "with a larger --shm-size"
            )
    if os.environ.get("CUDA_LAUNCH_BLOCKING") == "1":
        problems.append("CUDA_LAUNCH_BLOCKING=1 makes every kernel synchronous; unset it to time")
    if os.environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
        problems.append(
            "TORCH_DISTRIBUTED_DEBUG=DETAIL makes torch check every message; unset it to time"
        )
    return problems
