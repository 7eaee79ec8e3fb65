"""Chunks of layers timed where they will run: inside torch's own pipeline stage.

A layer called bare is faster than the same layer in a pipeline, which also detaches its input,
keeps its output, accumulates gradients and walks the graph for a split backward. So a chunk here is
a `PipelineStage` that goes through `forward_one_chunk` and `backward_one_chunk` like any stage;
only the messages are missing, its buffers are filled beforehand.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._utils import InferenceMode

from pptune.runtime.clock import Clock
from pptune.runtime.headroom import is_out_of_memory

Position = Literal["first", "middle", "last"]
Phase = Literal["forward", "backward", "backward_input", "backward_weight"]

_GRADIENT_SCALE = 1e-3
"""Received gradients are drawn this small, so that sums over many samples stay finite."""


class Chunk:
    """Layers at one place of a pipeline, at one micro-batch size, ready to be timed.

    Needs an initialised process group, as every PipelineStage does; sends nothing over it.
    """

    def __init__(
        self,
        module: nn.Module,
        position: Position,
        *,
        inputs: torch.Tensor,
        outputs: torch.Tensor,
        targets: torch.Tensor | None = None,
        loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
        device: torch.device,
    ) -> None:
        """`inputs` are real on the first stage; elsewhere they and `outputs` give shapes alone."""
        num_stages = max(3, dist.get_world_size())
        index = {"first": 0, "middle": 1, "last": num_stages - 1}[position]
        self.stage = PipelineStage(
            module, index, num_stages, device, input_args=inputs, output_args=outputs
        )
        self.stage.has_backward = True
        self.stage.chunks = 1
        self.stage._inference_mode = InferenceMode.STATIC
        self.stage._prepare_forward_infra(1, (), has_backward=True)
        self.stage._prepare_backward_infra(1)
        self._arguments = (inputs,) if position == "first" else ()
        self._targets, self._loss_function = targets, loss
        self._loss: torch.Tensor | None = None
        self._input = None if position == "first" else self.stage.args_recv_info[0][0].buffer
        if self._input is not None:
            self._input.normal_()
        if position != "last":
            self.stage.grad_recv_info[0][0].buffer.normal_(std=_GRADIENT_SCALE)

    def forward(self) -> Any:
        """One micro-batch forward, and its loss on the last stage, as the schedules do it."""
        output = self.stage.forward_one_chunk(0, self._arguments, save_forward_output=False)
        if self._loss_function is not None and self._targets is not None:
            self._loss = self._loss_function(output, self._targets)
        return output

    def backward(self) -> None:
        """The full backward of that micro-batch."""
        self.stage.backward_one_chunk(0, loss=self._loss)

    def backward_input(self) -> None:
        """The input-gradient part; on the first stage torch leaves all to the other part."""
        self.stage.backward_one_chunk(0, loss=self._loss, full_backward=False)

    def backward_weight(self) -> None:
        """The weight-gradient part."""
        self.stage.backward_weight_one_chunk(0)

    def reset(self) -> None:
        """Forget the micro-batch, as a schedule does between steps."""
        self._loss = None
        self.stage.clear_runtime_states()
        self.stage.bwd_cache.clear()
        self.stage.backward_state.clear()
        self.stage.dw_runner.clear()

    def sample(self, clock: Clock, *, split: bool) -> list[tuple[Phase, float]]:
        """Seconds of each phase as they ran: one full pass, and with `split` one in two parts."""
        try:
            self.reset()
            laps = _named(("forward", "backward"), clock.laps(self.forward, self.backward))
            if split:
                self.reset()
                laps += _named(
                    ("forward", "backward_input", "backward_weight"),
                    clock.laps(self.forward, self.backward_input, self.backward_weight),
                )
            return laps
        finally:
            # Also when memory ran out: what was kept so far must not stand in the next one's way.
            self.reset()

    def saved_bytes(self) -> int:
        """Bytes that autograd keeps from forward until backward.

        Distinct storages, without parameters, buffers and the chunk's own output (which is the next
        one's input). The chunk's input counts once if it is kept.
        """
        self.reset()
        saved: dict[int, int] = {}

        def note(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            output = self.forward()
        module = self.stage.submod
        for tensor in (*module.parameters(), *module.buffers(), output):
            saved.pop(tensor.untyped_storage().data_ptr(), None)
        del output
        self.backward()
        self.reset()
        return sum(saved.values())


def _named(phases: Sequence[Phase], seconds: Sequence[float]) -> list[tuple[Phase, float]]:
    return list(zip(phases, seconds, strict=True))


def can_split_backward(chunk: Chunk) -> bool:
    """Whether the chunk's backward can be run in two parts; some modules' graphs forbid it."""
    try:
        chunk.reset()
        chunk.forward()
        chunk.backward_input()
        chunk.backward_weight()
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        return False
    finally:
        chunk.reset()
    return True
