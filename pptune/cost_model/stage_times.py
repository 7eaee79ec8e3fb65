"""What one action of a stage takes: the sum of the stage's layers at one micro-batch size.

The embedding is on the first stage, the head (norm, logits and loss) on the last.
"""

from dataclasses import dataclass, replace

import msgspec
import numpy as np
from numpy.typing import NDArray

from pptune.curves import LayerTimes, layer_times
from pptune.errors import MissingNumber
from pptune.profiles import Profile, Source, weakest

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTimes:
    """The three kinds of layer at one micro-batch size."""

    embedding: LayerTimes
    block: LayerTimes
    head: LayerTimes
    recompute_bytes: int | None
    """What one block keeps while it is played again: its activations without recompute."""
    assumptions: tuple[str, ...]

    @property
    def source(self) -> Source:
        return weakest([self.embedding.source, self.block.source, self.head.source])


class StageTimes(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Seconds per action, float64[num_stages]; the parts of a backward only where split."""

    forward_s: Floats
    backward_s: Floats
    backward_input_s: Floats | None
    backward_weight_s: Floats | None


def model_times(profile: Profile, microbatch_size: int, recompute: str) -> ModelTimes:
    """Times of each kind of layer. Raises MissingNumber where the block has none.

    Full recompute takes the layers measured with it; without such a measurement a block's forward
    is played again before its backward, and only its input is kept.
    """
    assumptions: list[str] = []
    plain_layer, own_layer = profile.layer("block"), profile.layer("block", recompute)
    plain = None if plain_layer is None else layer_times(plain_layer, microbatch_size)
    if own_layer is not None:
        block = layer_times(own_layer, microbatch_size)
    elif plain is None:
        raise MissingNumber(
            "the profile has no block times; profile or import the block layer",
            rule="layer-not-measured",
        )
    else:
        block = _recomputed(plain)
        assumptions.append(
            "full recompute was not measured: each block's forward is added to its backward, and "
            "only its input is kept"
        )

    def end(kind: str) -> LayerTimes:
        layer = profile.layer(kind, recompute) or profile.layer(kind)
        if layer is not None:
            return layer_times(layer, microbatch_size)
        assumptions.append(f"the profile has no {kind} times: counted as 0")
        return LayerTimes(
            forward_s=0.0,
            backward_s=0.0,
            backward_input_s=0.0,
            backward_weight_s=0.0,
            saved_activation_bytes=0,
            boundary_bytes=None,
            source="measured",
        )

    return ModelTimes(
        embedding=_without_input_gradient(end("embedding")),
        block=block,
        head=end("head"),
        recompute_bytes=(
            plain.saved_activation_bytes if plain is not None and recompute == "full" else None
        ),
        assumptions=tuple(assumptions),
    )


def layer_seconds(times: ModelTimes) -> Floats:
    """Seconds of embedding, block and head; float64[2 or 4, 3]: forward, backward and, where every
    layer has them, the input and weight parts of the backward."""
    layers = (times.embedding, times.block, times.head)
    rows = [[layer.forward_s for layer in layers], [layer.backward_s for layer in layers]]
    parts = [
        [layer.backward_input_s for layer in layers],
        [layer.backward_weight_s for layer in layers],
    ]
    split = None not in (*parts[0], *parts[1])
    return np.array([*rows, *parts] if split else rows, dtype=np.float64)


def stage_times(seconds: Floats, *, first_stage_splits: bool) -> StageTimes:
    """Times of every stage from the sums over its layers of what `layer_seconds` gave,
    float64[2 or 4, num_stages], which may change.

    `first_stage_splits`: False where the runtime leaves the first stage's input gradient out and
    does the whole backward in the weight action (torch.distributed.pipelining, stage.py).
    """
    if len(seconds) == 2:
        forward_s, backward_s = seconds
        return StageTimes(
            forward_s=forward_s,
            backward_s=backward_s,
            backward_input_s=None,
            backward_weight_s=None,
        )
    if not first_stage_splits:
        seconds[2, 0], seconds[3, 0] = 0.0, seconds[1, 0]
    forward_s, backward_s, input_s, weight_s = seconds
    return StageTimes(
        forward_s=forward_s,
        backward_s=backward_s,
        backward_input_s=input_s,
        backward_weight_s=weight_s,
    )


def _recomputed(block: LayerTimes) -> LayerTimes:
    """A block that keeps its input alone and plays its forward again before its backward."""
    split_s = block.backward_input_s
    return replace(
        block,
        backward_s=block.backward_s + block.forward_s,
        backward_input_s=None if split_s is None else split_s + block.forward_s,
        saved_activation_bytes=block.boundary_bytes,
    )


def _without_input_gradient(embedding: LayerTimes) -> LayerTimes:
    """Token ids have no gradient: the embedding's backward is all weight gradient."""
    if embedding.backward_input_s is not None and embedding.backward_weight_s is not None:
        return embedding
    return replace(embedding, backward_input_s=0.0, backward_weight_s=embedding.backward_s)
