"""The vocabulary of a schedule: what a rank does at one time, and what that waits for."""

import re
from enum import IntEnum
from typing import NamedTuple

import pptune.schedules.orders as orders
from pptune.errors import PlanError


class Work(IntEnum):
    """A kind of action. The letters are torch's; zero-bubble papers write B for the input part."""

    FORWARD = orders.FORWARD
    BACKWARD = orders.BACKWARD
    """Full backward: input and weight gradients together."""
    BACKWARD_INPUT = orders.BACKWARD_INPUT
    BACKWARD_WEIGHT = orders.BACKWARD_WEIGHT

    @property
    def letter(self) -> str:
        """`F`, `B`, `I` or `W`."""
        return "FBIW"[self]


_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")


class Action(NamedTuple):
    """One stage's work on one micro-batch."""

    stage: int
    work: Work
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.work.letter}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> "Action":
        """The action that `2F0` names: stage 2, forward, micro-batch 0. Raises PlanError."""
        match = _ACTION.fullmatch(text.strip())
        if match is None:
            raise PlanError(
                f"action {text.strip()!r} is not written as stage, F, B, I or W, micro-batch; "
                "write it like 2F0"
            )
        return cls(int(match[1]), Work("FBIW".index(match[2])), int(match[3]))


def input_stage(work: int, stage: int, num_stages: int) -> int:
    """The neighbour stage whose output the action takes for its micro-batch, or -1 for none.

    The rule that every dependency between stages comes from: a forward takes the previous stage's
    forward, a backward (full or input part) the next stage's, and a weight part nothing. Within a
    stage forward, backward and weight part follow each other, which the rank's own order keeps.
    """
    if work == Work.FORWARD:
        return stage - 1
    if work == Work.BACKWARD_WEIGHT or stage == num_stages - 1:
        return -1
    return stage + 1
