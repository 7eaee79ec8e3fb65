"""The chunks of one rank that are timed to learn what layers cost, at every micro-batch size."""

from typing import Literal

import torch
from torch import nn

from pptune.model import ModelSpec
from pptune.runtime import headroom, models
from pptune.runtime.chunks import Chunk, can_split_backward
from pptune.runtime.clock import clock_for
from pptune.runtime.layer_points import EMPTY, KINDS, Kind, KindSizes, Lap

_STACK_BLOCKS = {"cpu": 2, "cuda": 4}
"""Blocks in the timed stack. Per second spent, two tell as much as more do; on CUDA more hide the
wait for the first kernel."""


class Bench:
    """An empty chunk, an embedding, a stack of blocks and a head with its loss, on one rank."""

    def __init__(
        self,
        spec: ModelSpec,
        *,
        dtype: torch.dtype,
        device: torch.device,
        recompute: Literal["none", "full"],
    ) -> None:
        self.spec, self.dtype, self.device = spec, dtype, device
        stack = self.stack_blocks(spec, device)
        self.units: dict[Kind, int] = {"embedding": 1, "block": stack, "head": 1}
        self.layer_source = models.layer_source(spec).description
        self.modules: dict[str, nn.Module] = {
            EMPTY: models.Stage(embedding=None, blocks=(), head=None, recompute=False)
        }
        for kind in KINDS:
            self.modules[kind] = models.build_stage(
                spec,
                blocks=stack if kind == "block" else 0,
                first=kind == "embedding",
                last=kind == "head",
                dtype=dtype,
                device=device,
                recompute=recompute,
            )
        self.splits = False
        """Whether the backward of a block and of the head can be run in two parts."""
        self._chunks: dict[tuple[str, int], Chunk] = {}
        self._clock = clock_for(device)
        self._saved: dict[Kind, dict[int, int]] = {kind: {} for kind in KINDS}
        self._boundary: dict[Kind, dict[int, int]] = {kind: {} for kind in KINDS}

    @staticmethod
    def stack_blocks(spec: ModelSpec, device: torch.device) -> int:
        """How many blocks the stack has."""
        return max(1, min(spec.num_layers, _STACK_BLOCKS[device.type]))

    @property
    def measurable(self) -> list[tuple[str, int]]:
        """(kind of chunk, micro-batch size) of every chunk that can be timed."""
        return list(self._chunks)

    def parameters(self) -> list[nn.Parameter]:
        """Every parameter of the bench."""
        return [p for module in self.modules.values() for p in module.parameters()]

    def add_size(self, size: int) -> None:
        """Build the chunks of micro-batch size `size`, run each once, note what it keeps.

        Leaves the bench as it was when memory runs out, and raises what the allocator raised.
        """
        try:
            for kind in (EMPTY, *KINDS):
                self._chunks[kind, size] = chunk = self._chunk(kind, size)
                saved = chunk.saved_bytes()
                if kind in KINDS:
                    self._saved[kind][size] = saved // self.units[kind]
            if len(self._saved["block"]) == 1:
                self.splits = all(
                    can_split_backward(self._chunks[kind, size]) for kind in ("block", "head")
                )
        except BaseException:
            self.forget_size(size)
            raise

    def _chunk(self, kind: str, size: int) -> Chunk:
        first, last = kind == "embedding", kind == "head"
        inputs, outputs = models.stage_boundaries(
            self.spec, size, first=first, last=last, dtype=self.dtype, device=self.device
        )
        if kind in KINDS:
            self._boundary[kind][size] = outputs.numel() * outputs.element_size()
        if not first and not last:
            return Chunk(
                self.modules[kind], "middle", inputs=inputs, outputs=outputs, device=self.device
            )
        ids, targets = models.example_batch(self.spec, size, device=self.device, dtype=self.dtype)
        if first:
            return Chunk(
                self.modules[kind], "first", inputs=ids, outputs=outputs, device=self.device
            )
        return Chunk(
            self.modules[kind],
            "last",
            inputs=inputs,
            outputs=outputs,
            targets=targets,
            loss=models.loss_function(self.spec),
            device=self.device,
        )

    def forget_size(self, size: int) -> None:
        """Drop what `add_size` made."""
        for kind in (EMPTY, *KINDS):
            self._chunks.pop((kind, size), None)
        for noted in (*self._saved.values(), *self._boundary.values()):
            noted.pop(size, None)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def bytes_needed(self, size: int) -> int:
        """What a pass at `size` takes at most: scaled from a size that ran, else from the sizes."""
        for known in self._saved["block"]:
            needed = max(
                2 * self.units[kind] * self._saved[kind][known] + 3 * self._boundary[kind][known]
                for kind in KINDS
            )
            return needed * size // known
        return headroom.activation_bytes_needed(
            self.spec, size, self.units["block"], self.dtype.itemsize
        )

    def draw(self, kind: str, size: int) -> list[Lap]:
        """Time one pass of a chunk."""
        laps = self._chunks[kind, size].sample(
            self._clock, split=self.splits and kind != "embedding"
        )
        return [((kind, size, phase), seconds) for phase, seconds in laps]

    def zero_gradients(self) -> None:
        """Set accumulated gradients to 0 in place, so that they stay accumulated and finite."""
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()

    def kind_sizes(self) -> dict[Kind, KindSizes]:
        """What a layer of each kind holds."""
        return {
            kind: KindSizes(
                count=self.spec.num_layers if kind == "block" else 1,
                units=self.units[kind],
                parameter_bytes=sum(
                    p.numel() * p.element_size() for p in self.modules[kind].parameters()
                )
                // self.units[kind],
                saved_bytes=self._saved[kind],
                boundary_bytes=self._boundary[kind],
            )
            for kind in KINDS
        }
