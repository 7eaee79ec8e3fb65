"""What ranks tell one another between measurements."""

import socket
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

Gather = Callable[[Any], list[Any]]


def gather_objects(value: Any) -> list[Any]:
    """Every rank's `value`, in rank order, on every rank. Nobody returns before all have called."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def ranks_on_this_host() -> int:
    """How many ranks of the group share this host's memory and cores. Called by all ranks."""
    host = socket.gethostname()
    return gather_objects(host).count(host)
