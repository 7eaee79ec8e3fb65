"""One plan on the real runtime: torch.distributed.pipelining, stage by stage, step by step."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed.pipelining import schedules as torch_schedules

from pptune import schedules
from pptune.errors import UsageError
from pptune.model import ModelSpec
from pptune.plan import Plan, default_group_size
from pptune.runtime import models
from pptune.runtime.context import RankContext
from pptune.runtime.memory_meter import measure_peak_bytes
from pptune.runtime.stages import (
    ComputingStage,
    Placeholder,
    Recorder,
    WaitingStage,
)
from pptune.runtime.wait_times import WaitTimes

TORCH_CLASSES: dict[str, str] = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "looped-bfs": "ScheduleLoopedBFS",
    "interleaved-zb": "ScheduleInterleavedZeroBubble",
    "zb-v": "ScheduleZBVZeroBubble",
    "dualpipe-v": "ScheduleDualPipeV",
}
"""Schedules that torch has a class for; the others run as loaded orders."""

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a profile's `dtype`."""
    return _DTYPES[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaGroups:
    """The process groups of one rank; global rank = replica * P + pipeline rank."""

    pipeline: Any
    """The P ranks of this replica, or None for the default group."""
    data: Any
    """The ranks that hold the same stages, or None with one replica."""


def replica_groups(context: RankContext, plan: Plan) -> ReplicaGroups:
    """This rank's groups. Every rank creates every group, in the same order."""
    num_ranks, replicas = plan.num_ranks, plan.data_parallel
    if context.num_ranks != num_ranks * replicas:
        raise UsageError(
            f"{plan.label} needs {num_ranks * replicas} ranks ({num_ranks} x {replicas} replicas), "
            f"but {context.num_ranks} were started"
        )
    if replicas == 1:
        return ReplicaGroups(pipeline=None, data=None)
    key = f"groups {num_ranks}x{replicas}"
    if key not in context.keep:
        pipelines = [
            dist.new_group([replica * num_ranks + rank for rank in range(num_ranks)])
            for replica in range(replicas)
        ]
        data = [
            dist.new_group([replica * num_ranks + rank for replica in range(replicas)])
            for rank in range(num_ranks)
        ]
        context.keep[key] = ReplicaGroups(
            pipeline=pipelines[context.rank // num_ranks], data=data[context.rank % num_ranks]
        )
    groups: ReplicaGroups = context.keep[key]
    return groups


class PlanRunner:
    """A plan ready to step on this rank. Every rank of the group builds one."""

    def __init__(
        self,
        context: RankContext,
        plan: Plan,
        spec: ModelSpec,
        *,
        dtype: str,
        stage_times: list[WaitTimes] | None,
        boundary_bytes: int,
        seed: int = 0,
    ) -> None:
        self.context = context
        self.plan = plan
        self.is_replay = stage_times is not None
        self.recorder = Recorder(context.device, self._say)
        self.groups = replica_groups(context, plan)
        pipeline_rank = context.rank % plan.num_ranks
        own = plan.stages_of(pipeline_rank)
        stages: list[ComputingStage]
        if stage_times is not None:
            stages = [
                self._waiting_stage(stage, stage_times[stage], boundary_bytes) for stage in own
            ]
            loss_fn: Callable[..., torch.Tensor] = _no_loss
            self._inputs = torch.zeros(plan.microbatch_size * plan.num_microbatches, 1)
            self._targets = self._inputs
        else:
            torch.manual_seed(seed + pipeline_rank)
            stages = [self._computing_stage(stage, spec, torch_dtype(dtype)) for stage in own]
            loss_fn = self._timed_loss(models.loss_function(spec))
            self._inputs, self._targets = models.example_batch(
                spec, plan.microbatch_size * plan.num_microbatches, device=context.device,
                dtype=torch_dtype(dtype),
            )  # fmt: skip
        self._stages = stages
        self.schedule = self._schedule(stages, loss_fn)
        parameters = [p for stage in stages for p in stage.submod.parameters()]
        self.parameters = [p for p in parameters if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters) if self.parameters else None
        self._has_first = 0 in own
        self._has_last = plan.num_stages - 1 in own

    def _say(self, action: str) -> None:
        self.context.status(f"running {action} of {self.plan.label}")

    def _computing_stage(self, stage: int, spec: ModelSpec, dtype: torch.dtype) -> ComputingStage:
        plan, device = self.plan, self.context.device
        first, last = stage == 0, stage == plan.num_stages - 1
        module: nn.Module = models.build_stage(
            spec, blocks=plan.layers_per_stage[stage], first=first, last=last, dtype=dtype,
            device=device, recompute=plan.recompute,
            first_block=sum(plan.layers_per_stage[:stage]),
        )  # fmt: skip
        inputs, outputs = models.stage_boundaries(
            spec, plan.microbatch_size, first=first, last=last, dtype=dtype, device=device
        )
        made = ComputingStage(
            module,
            stage,
            plan.num_stages,
            device,
            input_args=inputs,
            output_args=outputs,
            group=self.groups.pipeline,
        )
        made.recorder = self.recorder
        return made

    def _waiting_stage(self, stage: int, times: WaitTimes, boundary_bytes: int) -> WaitingStage:
        plan, device = self.plan, self.context.device
        size = max(1, boundary_bytes // 4 // plan.microbatch_size)
        hidden = torch.zeros(plan.microbatch_size, size, device=device, requires_grad=True)
        tokens = torch.zeros(plan.microbatch_size, 1, device=device)
        made = WaitingStage(
            Placeholder(), stage, plan.num_stages, device,
            input_args=tokens if stage == 0 else hidden, output_args=hidden,
            group=self.groups.pipeline,
        )  # fmt: skip
        made.recorder = self.recorder
        made.times = times
        made.output = hidden
        made.input_grad = None if stage == 0 else torch.zeros_like(hidden)
        return made

    def _timed_loss(self, loss_fn: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def timed(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            loss = loss_fn(output, target)
            self.recorder.extend_last()
            return loss

        return timed

    def _schedule(self, stages: list[Any], loss_fn: Callable[..., torch.Tensor]) -> Any:
        plan = self.plan
        own_group = plan.microbatch_group_size
        torch_group = default_group_size(plan.schedule, plan.num_ranks, plan.num_microbatches)
        if plan.schedule in TORCH_CLASSES and own_group == torch_group:
            made = getattr(torch_schedules, TORCH_CLASSES[plan.schedule])
            single = issubclass(made, torch_schedules.PipelineScheduleSingle)
            return made(stages[0] if single else stages, plan.num_microbatches, loss_fn=loss_fn)
        runtime = torch_schedules._PipelineScheduleRuntime(  # type: ignore[no-untyped-call]
            stages, plan.num_microbatches, loss_fn=loss_fn
        )
        order = schedules.generate(
            plan.schedule, num_ranks=plan.num_ranks, num_chunks=plan.num_chunks,
            num_microbatches=plan.num_microbatches, microbatch_group_size=own_group,
        )  # fmt: skip
        runtime.pipeline_order = {
            rank: [torch_schedules._Action.from_str(str(action)) for action in order.actions(rank)]
            for rank in range(plan.num_ranks)
        }
        runtime._prepare_schedule_with_comms(
            {rank: list(row) for rank, row in runtime.pipeline_order.items()}
        )
        return runtime

    def step(self) -> None:
        """Forward and backward of every micro-batch, then the optimizer."""
        self.forward_backward()
        self.update()

    def forward_backward(self) -> None:
        """The schedule alone. `return_outputs=False`: a training loop keeps only the losses."""
        self._say("the start of a step")
        arguments = (self._inputs,) if self._has_first else ()
        target = {"target": self._targets} if self._has_last else {}
        self.schedule.step(*arguments, **target, losses=[], return_outputs=False)

    def update(self) -> None:
        """Reduction of gradients over replicas, optimizer step and zeroing of gradients."""
        if self.groups.data is not None:
            gradients = [p.grad for p in self.parameters if p.grad is not None]
            flat = _flatten_dense_tensors(gradients)  # type: ignore[no-untyped-call]
            dist.all_reduce(flat, group=self.groups.data)
            flat.div_(self.plan.data_parallel)
            parts = _unflatten_dense_tensors(flat, gradients)  # type: ignore[no-untyped-call]
            for gradient, reduced in zip(gradients, parts, strict=True):
                gradient.copy_(reduced)
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)

    def timed_step(self, *, record: bool) -> dict[str, Any]:
        """One step after a barrier; its times, and its actions where `record`."""
        recorder = self.recorder
        recorder.enabled = record
        synchronise(self.context.device)
        dist.barrier()
        with _recorded_waits(recorder):
            recorder.start()
            started = time.perf_counter()
            self.forward_backward()
            synchronise(self.context.device)
            updating = time.perf_counter()
            self.update()
            synchronise(self.context.device)
            ended = time.perf_counter()
        recorder.enabled = False
        answer: dict[str, Any] = {
            "start_s": started, "step_s": ended - started, "update_s": ended - updating,
        }  # fmt: skip
        if record:
            answer["actions"] = recorder.events()
            answer["waits"] = recorder.waits
        return answer

    def peak_memory_bytes(self) -> int:
        """Peak bytes of one step, parameters and optimizer state included."""
        return measure_peak_bytes(self.step, self.static_tensors(), self.context.device)

    def static_tensors(self) -> list[torch.Tensor]:
        """What lives between steps: parameters, optimizer state and the receive buffers that torch
        allocates once, one per micro-batch and boundary."""
        kept: list[torch.Tensor] = list(self.parameters)
        for stage in self._stages:
            for infos in (*stage.args_recv_info.values(), *stage.grad_recv_info.values()):
                kept += [info.buffer for info in infos if getattr(info, "buffer", None) is not None]
        if self.optimizer is not None:
            for state in self.optimizer.state.values():
                kept += [value for value in state.values() if isinstance(value, torch.Tensor)]
        return kept


def _no_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return output.new_zeros(())


def synchronise(device: torch.device) -> None:
    """Wait until the device has done all that was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def _recorded_waits(recorder: Recorder) -> Iterator[None]:
    """Note when the runtime waits for messages. On CUDA the stream waits, not the thread."""
    if not recorder.enabled or recorder.device.type == "cuda":
        yield
        return
    original = torch_schedules._wait_batch_p2p

    def timed_wait(work: list[dist.Work]) -> None:
        if not work:
            return
        start = time.perf_counter()
        original(work)
        recorder.waits.append((start, time.perf_counter()))

    torch_schedules._wait_batch_p2p = timed_wait
    try:
        yield
    finally:
        torch_schedules._wait_batch_p2p = original


def recording_cost_s() -> float:
    """Seconds that recording adds per event on this rank."""
    recorder = Recorder(torch.device("cpu"), lambda action: None, enabled=True)
    recorder.start()
    count = 2000
    started = time.perf_counter()
    for number in range(count):
        recorder.add(0, "F", number, recorder.now())
    return (time.perf_counter() - started) / count
