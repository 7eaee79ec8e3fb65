"""Which ranks there are, and which of them this process answers for.

Alone, one process answers for every rank. Under torchrun or srun each launched process answers for
one rank. Both cases are the same to the rest of pptune: an *agent* with a list of local ranks.
"""

import os
import socket
from dataclasses import dataclass
from pathlib import Path

from pptune.errors import RuntimeFailure, UsageError

_DRIVER_NODES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg")
"""What NVIDIA's driver shows of itself, on Linux and on Windows' Linux."""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """The ranks of a job and where the processes that start them meet."""

    num_ranks: int
    local_ranks: tuple[int, ...]
    """Global ranks that this process starts."""
    device: str
    """`cpu` or `cuda`."""
    launcher: str
    """`alone`, `torchrun` or `slurm`."""
    address: str = "127.0.0.1"
    port: int = 0
    """Where the agents' control store listens; not used alone."""
    store_exists: bool = False
    """torchrun's own agent already serves a store at `address:port`."""
    run_id: str = "alone"
    """Separates runs that share a store: torchrun restarts keep the store."""

    @property
    def is_leader(self) -> bool:
        """The process with rank 0 decides, prints and writes."""
        return 0 in self.local_ranks


def detect_world(num_ranks: int | None, device: str) -> World:
    """The world that the environment describes. Raises UsageError and RuntimeFailure.

    `num_ranks` None means every rank of the launcher, every local GPU, or 2 CPU processes.
    """
    device = resolve_device(device)
    environment = os.environ
    if "TORCHELASTIC_RUN_ID" in environment or {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= set(
        environment
    ):
        return _launched(
            num_ranks, device, "torchrun", rank_key="RANK", size_key="WORLD_SIZE",
            store_exists=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        )  # fmt: skip
    if "SLURM_PROCID" in environment and int(environment.get("SLURM_NTASKS", "1")) > 1:
        return _launched(
            num_ranks, device, "slurm", rank_key="SLURM_PROCID", size_key="SLURM_NTASKS",
            store_exists=False,
        )  # fmt: skip
    return _alone(num_ranks, device)


def resolve_device(device: str) -> str:
    """`auto` becomes cuda where a GPU is visible, else cpu. Raises RuntimeFailure."""
    if device not in ("auto", "cpu", "cuda"):
        raise UsageError(f"device {device!r} is unknown; use auto, cuda or cpu")
    if device != "cpu" and num_gpus():
        return "cuda"
    if device == "cuda":
        raise RuntimeFailure("device cuda was asked for, but no GPU is visible; use --device cpu")
    return "cpu"


def num_gpus() -> int:
    """GPUs that torch sees. Without a driver there are none, and torch, which takes seconds to
    import, isn't asked."""
    if not any(Path(node).exists() for node in _DRIVER_NODES):
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _alone(num_ranks: int | None, device: str) -> World:
    if device == "cuda":
        visible = num_gpus()
        num_ranks = num_ranks or visible
        if num_ranks > visible:
            raise RuntimeFailure(
                f"{num_ranks} ranks need {num_ranks} GPUs, but {visible} are visible; use "
                f"--ranks {visible}, or try it on CPU processes: --ranks {num_ranks} --device cpu"
            )
    num_ranks = num_ranks or 2
    return World(
        num_ranks=num_ranks, local_ranks=tuple(range(num_ranks)), device=device, launcher="alone"
    )


def _launched(
    num_ranks: int | None,
    device: str,
    launcher: str,
    *,
    rank_key: str,
    size_key: str,
    store_exists: bool,
) -> World:
    environment = os.environ
    rank, size = int(environment[rank_key]), int(environment[size_key])
    if num_ranks is not None and num_ranks != size:
        raise UsageError(
            f"{launcher} started {size} processes, but {num_ranks} ranks are needed; start "
            f"{num_ranks}, or try it alone on CPU: pptune ... --ranks {num_ranks} --device cpu"
        )
    address = environment.get("MASTER_ADDR") or _first_slurm_host(environment)
    port = int(environment.get("MASTER_PORT", "29400"))
    # One run of pptune under one launch has its own keys, also when torchrun restarts it.
    run_id = "-".join(
        environment.get(key, "0")
        for key in ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID",
                    "SLURM_STEP_ID")
    )  # fmt: skip
    return World(
        num_ranks=size, local_ranks=(rank,), device=device, launcher=launcher, address=address,
        port=port, store_exists=store_exists, run_id=run_id,
    )  # fmt: skip


def _first_slurm_host(environment: "os._Environ[str]") -> str:
    """The first host of the step's node list, without asking scontrol (it may be absent)."""
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST")
    if not nodes:
        raise RuntimeFailure("Slurm gave no node list; set MASTER_ADDR to the first node's name")
    prefix, bracket, rest = nodes.partition("[")
    if not bracket or "," in prefix:
        return nodes.partition(",")[0]
    return prefix + rest.partition("]")[0].partition(",")[0].partition("-")[0]


def interface_towards(address: str) -> str | None:
    """The network interface whose own address reaches `address`, or None where unclear.

    gloo otherwise binds to what the host's name resolves to, which may be an interface that the
    other hosts cannot reach, or none at all.
    """
    import fcntl
    import struct

    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((socket.gethostbyname(address), 9))  # UDP: sends nothing
            own = probe.getsockname()[0]
            for _, name in socket.if_nameindex():
                request = struct.pack("256s", name.encode()[:15])
                try:
                    answer = fcntl.ioctl(probe.fileno(), 0x8915, request)  # SIOCGIFADDR
                except OSError:
                    continue
                if socket.inet_ntoa(answer[20:24]) == own:
                    return name
    except OSError:
        return None
    return None
