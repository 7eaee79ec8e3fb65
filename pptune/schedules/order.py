"""An order: which actions each rank does, one after the other."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pptune.schedules.action import Action, Work
from pptune.schedules.orders import Codes
from pptune.schedules.placement import Placement, rank_of_stages

Columns = tuple[NDArray[np.int8], NDArray[np.int32], NDArray[np.int32], NDArray[np.bool_]]
"""Of every action, rank after rank: work, stage, micro-batch, whether it is the first of a pair."""


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
    make: Callable[[int], Codes]
    """The same schedule's actions for a number of micro-batches."""
    backwards: Literal["whole", "split", "mixed"] = "whole"
    """Whether backwards are one action, an input and a weight part, or some of each."""
    cycle: Cycle | None = None
    generated: bool = True
    """False for an order that was read."""
    _made: dict[int, Codes] = field(default_factory=dict, repr=False)

    def with_cycles(self, count: int) -> "Order":
        """The same schedule with `count` cycles."""
        assert self.cycle is not None
        fewer = (self.cycle.num_cycles - count) * self.cycle.num_microbatches
        return replace(
            self,
            num_microbatches=self.num_microbatches - fewer,
            cycle=self.cycle._replace(num_cycles=count),
            _made={},
        )

    def codes(self, num_microbatches: int | None = None) -> Codes:
        """The actions as codes, or those for another number of micro-batches; kept for the next
        call. The arrays below are for readers."""
        count = self.num_microbatches if num_microbatches is None else num_microbatches
        made = self._made.get(count)
        if made is None:
            made = self._made[count] = self.make(count)
        return made

    @cached_property
    def _columns(self) -> Columns:
        return self.codes().columns()

    @cached_property
    def offsets(self) -> NDArray[np.int64]:
        """Rank r's actions are offsets[r] : offsets[r + 1]. Shape [num_ranks + 1]."""
        return np.concatenate([[0], np.cumsum(self.codes().num_actions())])

    @property
    def works(self) -> NDArray[np.int8]:
        return self._columns[0]

    @property
    def stages(self) -> NDArray[np.int32]:
        return self._columns[1]

    @property
    def microbatches(self) -> NDArray[np.int32]:
        return self._columns[2]

    @property
    def pairs(self) -> NDArray[np.bool_]:
        """True where an action and the next one form an overlapped forward and backward."""
        return self._columns[3]

    @cached_property
    def rank_of_stage(self) -> NDArray[np.int64]:
        """The rank that holds each stage. Shape [num_stages]."""
        return rank_of_stages(self.num_ranks, self.num_stages, self.placement)

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
