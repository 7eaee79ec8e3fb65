"""Layers -> stages: how many blocks each stage gets so that no rank is slower than it must be.

A pipeline in its steady state runs at the pace of its busiest rank, so the split minimises the
largest rank's load first and the largest stage's load second. Blocks cost the same; the embedding
on the first stage and the head on the last are what makes an even split uneven.
"""

import bisect
import math
from collections.abc import Callable

from pptune.errors import PlanError
from pptune.plan import even_layers, rank_of_stage

_ROUNDING = 1e-9
"""Loads closer than this share of a block are equal: they differ by rounding alone."""


def balanced_layers(
    num_layers: int,
    num_ranks: int,
    num_chunks: int,
    *,
    embedding_s: float,
    block_s: float,
    head_s: float,
    placement: str = "loop",
    allow_empty_stages: bool = False,
) -> tuple[int, ...]:
    """Blocks per stage, in stage order, with the least maximal rank load, then stage load.

    The three costs are one layer's forward and backward time for one micro-batch. The even split is
    returned where it is as good; else earlier stages get what does not divide. Raises PlanError
    where the layers are fewer than the stages and no stage may be empty.
    """
    num_stages = num_ranks * num_chunks
    if num_layers < num_stages and not allow_empty_stages:
        raise PlanError(
            f"{num_layers} layers cannot fill {num_stages} stages ({num_ranks} ranks x "
            f"{num_chunks} chunks); use fewer chunks or ranks, or --allow-empty-stages"
        )
    # In units of one block. Free blocks can be put anywhere: spread them as if they cost the same.
    extras = [0.0] * num_stages
    if block_s > 0:
        extras[0] += embedding_s / block_s
        extras[-1] += head_s / block_s
    ranks = [rank_of_stage(stage, num_ranks=num_ranks, placement=placement)
             for stage in range(num_stages)]  # fmt: skip
    split = _Split(extras, ranks, least=0 if allow_empty_stages else 1)
    rank_limit = split.least_rank_limit(num_layers)
    stage_limit = split.least_stage_limit(num_layers, rank_limit)
    even = even_layers(num_layers, num_stages)
    if even is not None and split.obeys(even, rank_limit, stage_limit):
        return even
    return split.fill(num_layers, rank_limit, stage_limit)


class _Split:
    """Loads, in blocks, of stages and the ranks that hold them."""

    def __init__(self, extras: list[float], ranks: list[int], *, least: int) -> None:
        self.extras = extras
        self.ranks = ranks
        self.least = least
        self.rank_extras = [0.0] * (max(ranks) + 1)
        self.rank_least = [0] * (max(ranks) + 1)
        for extra, rank in zip(extras, ranks, strict=True):
            self.rank_extras[rank] += extra
            self.rank_least[rank] += least

    def least_rank_limit(self, num_layers: int) -> float:
        """The smallest possible load of the busiest rank."""

        def capacity(limit: float) -> int:
            return sum(_room(limit, extra) for extra in self.rank_extras)

        floor = max(map(sum, zip(self.rank_extras, self.rank_least, strict=True)))
        return _least_limit(num_layers, floor, self.rank_extras, capacity)

    def least_stage_limit(self, num_layers: int, rank_limit: float) -> float:
        """The smallest possible load of the largest stage while no rank exceeds `rank_limit`."""

        def capacity(limit: float) -> int:
            rooms = [0] * len(self.rank_extras)
            for extra, rank in zip(self.extras, self.ranks, strict=True):
                rooms[rank] += _room(limit, extra)
            limits = (_room(rank_limit, extra) for extra in self.rank_extras)
            return sum(map(min, rooms, limits))

        floor = max(extra + self.least for extra in self.extras)
        return _least_limit(num_layers, floor, self.extras, capacity)

    def obeys(self, layers: tuple[int, ...], rank_limit: float, stage_limit: float) -> bool:
        """Whether `layers` exceeds neither limit."""
        rank_layers = [0] * len(self.rank_extras)
        for count, rank in zip(layers, self.ranks, strict=True):
            rank_layers[rank] += count
        return all(
            count <= _room(stage_limit, extra)
            for count, extra in zip(layers, self.extras, strict=True)
        ) and all(
            count <= _room(rank_limit, extra)
            for count, extra in zip(rank_layers, self.rank_extras, strict=True)
        )

    def fill(self, num_layers: int, rank_limit: float, stage_limit: float) -> tuple[int, ...]:
        """Give block after block to the least loaded rank and stage with room, earlier ones first.

        It cannot get stuck: ranks take blocks independently up to their own room, and the limits
        were chosen so that the rooms hold all layers.
        """
        layers = [self.least] * len(self.extras)
        rank_layers = list(self.rank_least)
        for _ in range(num_layers - sum(layers)):
            stage = min(
                (
                    stage
                    for stage, rank in enumerate(self.ranks)
                    if layers[stage] < _room(stage_limit, self.extras[stage])
                    and rank_layers[rank] < _room(rank_limit, self.rank_extras[rank])
                ),
                key=lambda stage: (
                    _rounded(self.rank_extras[self.ranks[stage]] + rank_layers[self.ranks[stage]]),
                    _rounded(self.extras[stage] + layers[stage]),
                    stage,
                ),
            )
            layers[stage] += 1
            rank_layers[self.ranks[stage]] += 1
        return tuple(layers)


def _least_limit(
    num_layers: int, floor: float, extras: list[float], capacity: Callable[[float], int]
) -> float:
    """The smallest limit of at least `floor` under which `num_layers` blocks find room.

    Room only grows where the limit passes some extra plus a whole number of blocks.
    """
    steps = {extra + count for extra in set(extras) for count in range(num_layers + 1)}
    limits = sorted({floor, *(step for step in steps if step > floor)})
    first = bisect.bisect_left(limits, num_layers, key=capacity)
    return limits[first]


def _room(limit: float, extra: float) -> int:
    """Whole blocks that fit beside `extra` under `limit`."""
    return max(0, math.floor(limit - extra + _ROUNDING))


def _rounded(load: float) -> float:
    return round(load / _ROUNDING)
