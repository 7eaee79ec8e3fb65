"""An order: which actions each rank does, one after the other."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pptune.schedules.action import Action, Work

Placement = Literal["loop", "v"]

KIND_MASK = (1 << 24) - 1
STAGE_SHIFT, MICROBATCH_SHIFT, PAIR_SHIFT = 2, 24, 56
WORK_MASK, STAGE_MASK, MICROBATCH_MASK = 3, (1 << 22) - 1, (1 << 32) - 1
"""A code holds an action in one integer: work in bits 0-1, stage in 2-23, micro-batch in 24-55, and
in bit 56 whether the action and the next one form an overlapped pair."""

MAX_STAGES, MAX_MICROBATCHES = STAGE_MASK, MICROBATCH_MASK


class Codes(NamedTuple):
    """The actions of all ranks as codes."""

    codes: NDArray[np.int64]
    """Rank r's actions are codes[r * width : r * width + lengths[r]]."""
    width: int
    lengths: NDArray[np.int64]
    """Shape [num_ranks]."""

    @classmethod
    def empty(cls, num_ranks: int, num_actions: int) -> "Codes":
        """Room for `num_actions` per rank."""
        width = padded(num_actions)
        return cls(np.empty(num_ranks * width, np.int64), width, np.empty(num_ranks, np.int64))


def padded(size: int) -> int:
    """The least odd number of 64-byte cache lines that holds `size` 8-byte items, in items.

    Rows a power of two apart share cache sets and evict each other when many ranks are played in
    turn: at 64 ranks that makes the inner loop five times slower.
    """
    return ((size + 7) // 8 | 1) * 8


class Cycle(NamedTuple):
    """The part of an order that repeats: `num_cycles` times the same actions on every rank, each
    time with micro-batches higher by `num_microbatches`.

    Schedules without groups repeat after every micro-batch. Their cycles are P of them all the
    same: a step's times repeat after as many as its slowest loop of waits holds, often P.
    """

    num_microbatches: int
    num_actions: int
    """Of each rank, per cycle."""
    first_start: int
    """Where the first cycle begins in rank 0's list."""
    start_per_rank: int
    """How much later it begins in each further rank's list; negative where it begins earlier."""
    num_cycles: int
    num_settling: int = 2
    """Cycles in which times usually settle after the first of them has begun."""


class Shape(NamedTuple):
    """The sizes an order is generated for."""

    num_ranks: int
    num_chunks: int
    num_microbatches: int
    group_size: int
    """Micro-batches that a chunk runs in a row; used by interleaved schedules only."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Order:
    """Every rank's actions. A generated order makes them when they are first read."""

    num_ranks: int
    num_stages: int
    num_microbatches: int
    placement: Placement
    make: Callable[[], Codes]
    backwards: Literal["whole", "split", "mixed"] = "whole"
    """Whether backwards are one action, an input and a weight part, or some of each."""
    cycle: Cycle | None = None
    with_microbatches: "Callable[[int], Order] | None" = None
    """The same schedule for another number of micro-batches; None for a loaded order."""
    cache: dict[object, Any] = field(default_factory=dict, repr=False)
    """What others derive from this order and keep with it."""

    def with_cycles(self, count: int) -> "Order":
        """The same schedule with `count` cycles; the order is kept for the next call."""
        assert self.cycle is not None
        assert self.with_microbatches is not None
        if count == self.cycle.num_cycles:
            return self
        key = ("with_cycles", count)
        if key not in self.cache:
            fewer = (self.cycle.num_cycles - count) * self.cycle.num_microbatches
            self.cache[key] = self.with_microbatches(self.num_microbatches - fewer)
        order: Order = self.cache[key]
        return order

    @cached_property
    def coded(self) -> Codes:
        """The actions as codes; the arrays below are views for readers."""
        return self.make()

    @cached_property
    def _flat(self) -> NDArray[np.int64]:
        codes, width, lengths = self.coded
        rows = codes.reshape(-1, width)
        return np.concatenate([row[:length] for row, length in zip(rows, lengths, strict=True)])

    @cached_property
    def offsets(self) -> NDArray[np.int64]:
        """Rank r's actions are offsets[r] : offsets[r + 1]. Shape [num_ranks + 1]."""
        return np.concatenate([[0], np.cumsum(self.coded.lengths)])

    @cached_property
    def works(self) -> NDArray[np.int8]:
        return (self._flat & WORK_MASK).astype(np.int8)

    @cached_property
    def stages(self) -> NDArray[np.int32]:
        return (self._flat >> STAGE_SHIFT & STAGE_MASK).astype(np.int32)

    @cached_property
    def microbatches(self) -> NDArray[np.int32]:
        return (self._flat >> MICROBATCH_SHIFT & MICROBATCH_MASK).astype(np.int32)

    @cached_property
    def pairs(self) -> NDArray[np.bool_]:
        """True where an action and the next one form an overlapped forward and backward."""
        return np.asarray(self._flat >> PAIR_SHIFT != 0)

    @property
    def rank_of_stage(self) -> NDArray[np.int64]:
        """The rank that holds each stage. Shape [num_stages]."""
        return _rank_of_stage(self.num_ranks, self.num_stages, self.placement)

    def actions(self, rank: int) -> list[Action]:
        """Rank `rank`'s actions as values; for reading and printing, not for speed."""
        begin, end = int(self.offsets[rank]), int(self.offsets[rank + 1])
        works = [Work(work) for work in self.works[begin:end].tolist()]
        stages, microbatches = self.stages[begin:end], self.microbatches[begin:end]
        return list(map(Action, stages.tolist(), works, microbatches.tolist()))

    def to_text(self) -> str:
        """One line per rank, actions separated by commas, as torch's `_load_csv` reads them; an
        overlapped pair is written `(2F5;3B1)OVERLAP_F_B`."""
        lines = []
        for rank in range(self.num_ranks):
            cells: list[str] = []
            first_of_pair: Action | None = None
            begin = int(self.offsets[rank])
            for at, action in enumerate(self.actions(rank), start=begin):
                if self.pairs[at]:
                    first_of_pair = action
                elif first_of_pair is not None:
                    cells.append(f"({first_of_pair};{action})OVERLAP_F_B")
                    first_of_pair = None
                else:
                    cells.append(str(action))
            lines.append(",".join(cells) + "\n")
        return "".join(lines)


@lru_cache(maxsize=64)
def _rank_of_stage(num_ranks: int, num_stages: int, placement: Placement) -> NDArray[np.int64]:
    stages = np.arange(num_stages, dtype=np.int64)
    if placement == "v":
        return np.minimum(stages, 2 * num_ranks - 1 - stages)
    return stages % num_ranks
