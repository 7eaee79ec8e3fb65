"""One way to time work on a device, in which leaving out the synchronisation is impossible.

A CUDA kernel runs long after the call that launched it. Timing the call alone gives the launch, so
no reading is available here before the device has finished: `laps` takes the work, not the times.
"""

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """Times work by marks that the device itself sets when it reaches them."""

    mark: Callable[[], Any]
    """Put a mark behind all work issued so far."""
    finish: Callable[[], None]
    """Wait until the device has reached every mark."""
    seconds_between: Callable[[Any, Any], float]
    """The time between two marks that have been reached."""

    def measure(self, work: Callable[[], object]) -> float:
        """Seconds that `work` takes on the device, alone."""
        return self.laps(work)[0]

    def laps(self, *works: Callable[[], object]) -> tuple[float, ...]:
        """Seconds of each of `works`, done one after the other.

        They are issued without a pause, as a training loop issues them, so that a device that is
        slower than its host never waits for the host between two of them.
        """
        self.finish()
        marks = [self.mark()]
        for work in works:
            work()
            marks.append(self.mark())
        self.finish()
        return tuple(self.seconds_between(start, end) for start, end in itertools.pairwise(marks))


def clock_for(device: torch.device) -> Clock:
    """The clock of `device`: events of the current stream on CUDA, the processor's otherwise."""
    if device.type == "cuda":
        return Clock(
            mark=_recorded_event,
            finish=lambda: torch.cuda.synchronize(device),
            seconds_between=lambda start, end: float(start.elapsed_time(end)) * 1e-3,
        )
    return Clock(
        mark=time.perf_counter_ns,
        finish=lambda: None,
        seconds_between=lambda start, end: (end - start) * 1e-9,
    )


def _recorded_event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
