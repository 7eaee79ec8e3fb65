"""An order: which actions each rank does, one after the other."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pptune.errors import PlanError
from pptune.schedules.action import Action, Work

Placement = Literal["loop", "v"]


class ActionArrays(NamedTuple):
    """The actions of all ranks, one rank after the other."""

    works: NDArray[np.int8]
    stages: NDArray[np.int32]
    microbatches: NDArray[np.int32]
    offsets: NDArray[np.int64]
    """Rank r's actions are offsets[r] : offsets[r + 1]. Shape [num_ranks + 1]."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Order:
    """Every rank's actions. A generated order makes its arrays when they are first read."""

    num_ranks: int
    num_stages: int
    num_microbatches: int
    placement: Placement
    make: Callable[[], ActionArrays]

    @cached_property
    def arrays(self) -> ActionArrays:
        return self.make()

    @property
    def works(self) -> NDArray[np.int8]:
        return self.arrays.works

    @property
    def stages(self) -> NDArray[np.int32]:
        return self.arrays.stages

    @property
    def microbatches(self) -> NDArray[np.int32]:
        return self.arrays.microbatches

    @property
    def offsets(self) -> NDArray[np.int64]:
        return self.arrays.offsets

    def actions(self, rank: int) -> list[Action]:
        """Rank `rank`'s actions as values; for reading and printing, not for speed."""
        begin, end = int(self.offsets[rank]), int(self.offsets[rank + 1])
        return [
            Action(int(stage), Work(int(work)), int(microbatch))
            for stage, work, microbatch in zip(
                self.stages[begin:end],
                self.works[begin:end],
                self.microbatches[begin:end],
                strict=True,
            )
        ]

    def to_text(self) -> str:
        """One line per rank, actions separated by commas, as torch's `_load_csv` reads them."""
        return "".join(
            ",".join(map(str, self.actions(rank))) + "\n" for rank in range(self.num_ranks)
        )


def from_text(text: str, *, num_microbatches: int) -> Order:
    """The order in `text`, one line per rank. Raises PlanError naming the rank and the action."""
    ranks = []
    for rank, line in enumerate(text.strip().splitlines()):
        try:
            ranks.append([Action.parse(part) for part in line.split(",") if part.strip()])
        except PlanError as error:
            raise PlanError(f"rank {rank}: {error}") from None
    return from_actions(ranks, num_microbatches=num_microbatches)


def from_actions(ranks: list[list[Action]], *, num_microbatches: int) -> Order:
    """The order with these actions per rank. Raises PlanError where it cannot run."""
    flat = [action for actions in ranks for action in actions]
    arrays = ActionArrays(
        works=np.array([action.work for action in flat], np.int8),
        stages=np.array([action.stage for action in flat], np.int32),
        microbatches=np.array([action.microbatch for action in flat], np.int32),
        offsets=np.cumsum([0, *(len(actions) for actions in ranks)], dtype=np.int64),
    )
    num_stages = 1 + max((action.stage for action in flat), default=-1)
    rank_zero = {action.stage for action in ranks[0]} if ranks else set()
    placement: Placement = (
        "v" if num_stages == 2 * len(ranks) and num_stages - 1 in rank_zero and len(ranks) > 1
        else "loop"
    )  # fmt: skip
    return Order(
        num_ranks=len(ranks),
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        placement=placement,
        make=lambda: arrays,
    )
