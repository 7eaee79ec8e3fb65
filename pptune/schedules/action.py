"""The vocabulary of a schedule: what one rank does at one time."""

import re
from enum import IntEnum
from typing import NamedTuple

from pptune.errors import PlanError


class Work(IntEnum):
    """A kind of action. The letters are torch's; zero-bubble papers write B for the input part."""

    FORWARD = 0
    BACKWARD = 1
    """Full backward: input and weight gradients together."""
    BACKWARD_INPUT = 2
    BACKWARD_WEIGHT = 3

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
