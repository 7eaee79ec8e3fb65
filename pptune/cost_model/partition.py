"""Layers -> stages: how many blocks each stage gets so that no rank is slower than it must be.

A pipeline in its steady state runs at the pace of its busiest rank, so the split minimises the
largest rank's load first and the largest stage's load second. Blocks cost the same; the embedding
on the first stage and the head on the last are what makes an even split uneven.
"""

import bisect
import heapq
from collections.abc import Callable

from pptune.errors import PlanError
from pptune.plan import even_layers
from pptune.schedules.placement import Placement, rank_of_stages

_BLOCK = 10**9
"""A block's load; others are rounded to this scale, so that sums and ties are exact."""


def balanced_layers(
    num_layers: int,
    num_ranks: int,
    num_chunks: int,
    *,
    embedding_s: float,
    block_s: float,
    head_s: float,
    placement: Placement = "loop",
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
    extras = [0] * num_stages
    if block_s > 0:  # Free blocks can be put anywhere: spread them as if they alone cost anything.
        extras[0] += round(embedding_s / block_s * _BLOCK)
        extras[-1] += round(head_s / block_s * _BLOCK)
    ranks = rank_of_stages(num_ranks, num_stages, placement).tolist()
    split = _Split(extras, ranks, least=0 if allow_empty_stages else 1)
    rank_limit = split.least_rank_limit(num_layers)
    stage_limit = split.least_stage_limit(num_layers, rank_limit)
    even = even_layers(num_layers, num_stages)
    if even is not None and split.obeys(even, rank_limit, stage_limit):
        return even
    return split.fill(num_layers, rank_limit, stage_limit)


class _Split:
    """Loads of stages and of the ranks that hold them."""

    def __init__(self, extras: list[int], ranks: list[int], *, least: int) -> None:
        self.extras = extras
        self.ranks = ranks
        self.least = least
        self.stages_of: list[list[int]] = [[] for _ in range(max(ranks) + 1)]
        for stage, rank in enumerate(ranks):
            self.stages_of[rank].append(stage)
        self.rank_extras = [sum(extras[stage] for stage in own) for own in self.stages_of]

    def least_rank_limit(self, num_layers: int) -> int:
        """The smallest possible load of the busiest rank."""
        floor = max(
            extra + self.least * len(own) * _BLOCK
            for extra, own in zip(self.rank_extras, self.stages_of, strict=True)
        )
        return _least_limit(
            num_layers,
            floor,
            self.rank_extras,
            lambda limit: sum(_room(limit, extra) for extra in self.rank_extras),
        )

    def least_stage_limit(self, num_layers: int, rank_limit: int) -> int:
        """The smallest possible load of the largest stage while no rank exceeds `rank_limit`."""
        floor = max(self.extras) + self.least * _BLOCK
        return _least_limit(
            num_layers, floor, self.extras, lambda limit: sum(self._rank_rooms(rank_limit, limit))
        )

    def obeys(self, layers: tuple[int, ...], rank_limit: int, stage_limit: int) -> bool:
        """Whether `layers` exceeds neither limit."""
        return all(
            count <= _room(stage_limit, extra)
            for count, extra in zip(layers, self.extras, strict=True)
        ) and all(
            sum(layers[stage] for stage in own) <= _room(rank_limit, extra)
            for own, extra in zip(self.stages_of, self.rank_extras, strict=True)
        )

    def fill(self, num_layers: int, rank_limit: int, stage_limit: int) -> tuple[int, ...]:
        """Give block after block to the least loaded rank and stage with room, earlier ones first.

        It cannot get stuck: ranks take blocks independently up to their own room, and the limits
        were chosen so that the rooms hold all layers.
        """
        layers = [self.least] * len(self.extras)
        left = [
            room - self.least * len(own)
            for room, own in zip(
                self._rank_rooms(rank_limit, stage_limit), self.stages_of, strict=True
            )
        ]
        waiting = [
            (extra + self.least * len(self.stages_of[rank]) * _BLOCK, rank)
            for rank, extra in enumerate(self.rank_extras)
            if left[rank] > 0
        ]
        heapq.heapify(waiting)
        for _ in range(num_layers - sum(layers)):
            load, rank = heapq.heappop(waiting)
            _, stage = min(
                (self.extras[stage] + layers[stage] * _BLOCK, stage)
                for stage in self.stages_of[rank]
                if layers[stage] < _room(stage_limit, self.extras[stage])
            )
            layers[stage] += 1
            left[rank] -= 1
            if left[rank] > 0:
                heapq.heappush(waiting, (load + _BLOCK, rank))
        return tuple(layers)

    def _rank_rooms(self, rank_limit: int, stage_limit: int) -> list[int]:
        """Blocks that each rank can take under both limits."""
        return [
            min(
                _room(rank_limit, extra),
                sum(_room(stage_limit, self.extras[stage]) for stage in own),
            )
            for own, extra in zip(self.stages_of, self.rank_extras, strict=True)
        ]


def _least_limit(
    num_layers: int, floor: int, extras: list[int], capacity: Callable[[int], int]
) -> int:
    """The smallest limit of at least `floor` under which `num_layers` blocks find room.

    Room only grows where the limit passes some extra plus a whole number of blocks.
    """
    steps = {extra + count * _BLOCK for extra in set(extras) for count in range(num_layers + 1)}
    limits = sorted({floor, *(step for step in steps if step > floor)})
    return limits[bisect.bisect_left(limits, num_layers, key=capacity)]


def _room(limit: int, extra: int) -> int:
    """Whole blocks that fit beside `extra` under `limit`."""
    return max(0, (limit - extra) // _BLOCK)
