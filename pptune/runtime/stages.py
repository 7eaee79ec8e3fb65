"""Pipeline stages that compute or wait, and the recorder that times their actions.

Both kinds are torch's own `PipelineStage`: what surrounds the work of an action - receives, sends,
caches, gradient bookkeeping - is the real runtime's in either case.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage

from pptune.runtime.wait_times import WaitTimes

_SPIN_S = 150e-6
"""A sleeping thread wakes up late by about this much; the rest of a wait is spun."""

RecordedEvent = tuple[int, str, int, float, float]
"""(stage, work letter, micro-batch, start, end) in seconds of this host's monotonic clock."""


@dataclass(slots=True)
class Recorder:
    """Start and end of every action and of every wait of one rank's step."""

    device: torch.device
    doing: Callable[[str], None]
    """Told each action as it starts, so that a rank that hangs can say in which."""
    enabled: bool = False
    actions: list[tuple[int, str, int, Any, Any]] = field(default_factory=list)
    waits: list[tuple[Any, Any]] = field(default_factory=list)
    origin: Any = None
    origin_s: float = 0.0

    def start(self) -> None:
        """Begin a step: forget the last one."""
        self.actions, self.waits = [], []
        self.origin_s = time.perf_counter()
        self.origin = self.now()

    def now(self) -> Any:
        """The time on the device's own clock: an event on CUDA, seconds on CPU."""
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            return event
        return time.perf_counter()

    def _seconds(self, mark: Any) -> float:
        if self.device.type == "cuda":
            return self.origin_s + float(self.origin.elapsed_time(mark)) * 1e-3
        return float(mark)

    def add(self, stage: int, work: str, microbatch: int, start: Any) -> None:
        """Note an action that began at `start` and ends now."""
        if self.enabled:
            self.actions.append((stage, work, microbatch, start, self.now()))

    def extend_last(self) -> None:
        """The last action goes on until now: the loss belongs to the last stage's forward."""
        if self.enabled and self.actions:
            stage, work, microbatch, start, _ = self.actions[-1]
            self.actions[-1] = (stage, work, microbatch, start, self.now())

    def events(self) -> list[RecordedEvent]:
        """The step's actions in order; on CUDA call it after synchronising."""
        return [
            (stage, work, microbatch, self._seconds(start), self._seconds(end))
            for stage, work, microbatch, start, end in self.actions
        ]


class ComputingStage(PipelineStage):
    """A stage that runs its layers for real, timed by a recorder."""

    recorder: Recorder

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.recorder.doing(f"{self.stage_index}F{fwd_chunk_id}")
        start = self.recorder.now()
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        self.recorder.add(self.stage_index, "F", fwd_chunk_id, start)
        return output

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:  # fmt: skip
        work = "B" if full_backward else "I"
        self.recorder.doing(f"{self.stage_index}{work}{bwd_chunk_id}")
        start = self.recorder.now()
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        self.recorder.add(self.stage_index, work, bwd_chunk_id, start)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        self.recorder.doing(f"{self.stage_index}W{bwd_chunk_id}")
        start = self.recorder.now()
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        self.recorder.add(self.stage_index, "W", bwd_chunk_id, start)


class WaitingStage(ComputingStage):
    """A stage that waits for given times instead of computing; its messages are real."""

    times: WaitTimes
    output: torch.Tensor
    input_grad: torch.Tensor | None

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        wait(self.times.forward_s)
        return self.output

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> tuple[tuple[torch.Tensor | None, ...], list[dict[str, Any]] | None]:
        match backward_type:
            case "full":
                wait(self.times.backward_s)
            case "input":
                wait(self.times.backward_input_s)
            case _:
                wait(self.times.backward_weight_s)
        return (self.input_grad,), []


class Placeholder(nn.Module):
    """The module of a waiting stage: it has no layers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def wait(seconds: float) -> None:
    """Return `seconds` from now: sleep first, so that other ranks get the core, then spin."""
    deadline = time.perf_counter() + seconds
    if seconds > 2 * _SPIN_S:
        time.sleep(seconds - _SPIN_S)
    while time.perf_counter() < deadline:
        pass
