"""What a waiting stage waits: apart from the stages, so that the leader needs no pipelines."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitTimes:
    """How long a waiting stage waits, in seconds per micro-batch."""

    forward_s: float
    backward_s: float
    backward_input_s: float
    backward_weight_s: float
