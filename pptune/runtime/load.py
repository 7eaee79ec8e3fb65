"""Who else used the processors while ranks measured."""

import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass

from pptune.hardware import busy_core_s, own_core_s
from pptune.measurement import busy_warning


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Processor time used on a host, by this rank and by all processes together."""

    host: str
    own_s: float
    all_s: float | None
    """None where the system doesn't say."""
    wall_s: float

    def since(self, earlier: "Load") -> "Load":
        """What was used between `earlier` and this."""
        known = self.all_s is not None and earlier.all_s is not None
        return Load(
            host=self.host,
            own_s=self.own_s - earlier.own_s,
            all_s=(self.all_s or 0.0) - (earlier.all_s or 0.0) if known else None,
            wall_s=self.wall_s - earlier.wall_s,
        )


def load_now() -> Load:
    """What has been used so far; only differences mean something."""
    return Load(
        host=socket.gethostname(),
        own_s=own_core_s(),
        all_s=busy_core_s(),
        wall_s=time.monotonic(),
    )


def load_warnings(loads: Sequence[Load]) -> list[str]:
    """Hosts on which other processes competed, in words; one load of each rank."""
    warnings = []
    for host in sorted({load.host for load in loads}):
        ranks = [load for load in loads if load.host == host]
        wall_s, all_s = ranks[0].wall_s, ranks[0].all_s
        if all_s is None or wall_s <= 0:
            continue
        warning = busy_warning(
            own_cores=sum(load.own_s for load in ranks) / wall_s,
            all_cores=all_s / wall_s,
            cores=os.cpu_count() or 1,
        )
        if warning is not None:
            warnings.append(f"on {host}, {warning}")
    return warnings
