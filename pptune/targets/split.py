"""Blocks per stage in the forms that Megatron-LM takes, from the plainest to the most general.

Megatron-LM core 0.20, transformer/transformer_config.py: an even split needs nothing; the embedding
and the loss may each count as a block; the first and last rank may hold fewer or more; anything
else is a layout string.
"""

from dataclasses import dataclass

from pptune.errors import PlanError
from pptune.targets.layout import blocks_per_stage, parse_layout, write_layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """One form; with nothing set, the even split."""

    count_embedding: bool = False
    """The embedding counts as a block: the first stage has one fewer."""
    count_loss: bool = False
    """The loss counts as a block: the last stage has one fewer."""
    ends: tuple[int, int] | None = None
    """Blocks of the first and of the last rank, all their chunks together."""
    layout: str | None = None

    @property
    def is_even(self) -> bool:
        return self == Split()


def split_of(layers_per_stage: tuple[int, ...], num_ranks: int) -> Split:
    """The plainest form that builds exactly `layers_per_stage`."""
    num_stages = len(layers_per_stage)
    num_layers = sum(layers_per_stage)
    plain = [
        Split(count_embedding=embedding, count_loss=loss)
        for embedding, loss in ((False, False), (True, True), (True, False), (False, True))
    ]
    candidates = plain + _ends_forms(layers_per_stage, num_ranks)
    for split in candidates:
        if (
            built_layers(split, num_layers=num_layers, num_ranks=num_ranks, num_stages=num_stages)
            == layers_per_stage
        ):
            return split
    return Split(layout=write_layout(layers_per_stage))


def _ends_forms(layers_per_stage: tuple[int, ...], num_ranks: int) -> list[Split]:
    if num_ranks == 1:
        return []  # with one rank the flags would cut the model down to their own count
    first, last = (sum(layers_per_stage[rank::num_ranks]) for rank in (0, num_ranks - 1))
    return [Split(ends=(first, last))] if min(first, last) > 0 else []


def built_layers(
    split: Split, *, num_layers: int, num_ranks: int, num_stages: int
) -> tuple[int, ...] | None:
    """Blocks per stage that Megatron-LM builds from `split`, or None where it would refuse."""
    num_chunks = num_stages // num_ranks
    if split.layout is not None:
        return blocks_per_stage(parse_layout(split.layout))
    if split.ends is not None:
        return _built_from_ends(split.ends, num_layers, num_ranks, num_chunks)
    counted = num_layers + split.count_embedding + split.count_loss
    if counted % num_stages:
        return None
    layers = [counted // num_stages] * num_stages
    layers[0] -= split.count_embedding
    layers[-1] -= split.count_loss
    return tuple(layers) if min(layers) >= 0 else None


def _built_from_ends(
    ends: tuple[int, int], num_layers: int, num_ranks: int, num_chunks: int
) -> tuple[int, ...] | None:
    first, last = ends
    num_middle = num_ranks - 2
    left = num_layers - first - last
    if num_middle < 0 or left < 0 or (left > 0 and num_middle == 0):
        return None
    if num_middle and left % num_middle:
        return None
    middle = left // num_middle if num_middle else 0
    if first % num_chunks or last % num_chunks or middle % num_chunks:
        return None
    chunk = (first // num_chunks, *[middle // num_chunks] * num_middle, last // num_chunks)
    return chunk * num_chunks


def balanced_layers(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Blocks per stage where embedding and head each weigh one block.

    The stages are as equal as they can be, and spare blocks go to the first ones, so that the head
    has the lighter side. Raises PlanError with more stages than blocks.
    """
    if num_layers < num_stages:
        raise PlanError(
            f"{num_layers} layers cannot fill {num_stages} stages; use fewer chunks or ranks"
        )
    if num_stages == 1:
        return (num_layers,)
    weight, spare = divmod(num_layers + 2, num_stages)
    layers = [weight + (stage < spare) for stage in range(num_stages)]
    layers[0] -= 1
    layers[-1] -= 1
    if layers[-1] == 0:  # one block per stage: the last takes one from a fuller stage
        layers[layers.index(max(layers))] -= 1
        layers[-1] = 1
    return tuple(layers)
