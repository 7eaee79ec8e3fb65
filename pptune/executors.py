"""What overlaps with what: the semantics of the program that runs a plan.

The same order of actions takes different times in different runtimes, because each has its own
idea of when a receive is posted and what a rank waits for. The simulator plays these rules; a
target (a trainer) decides which one a plan gets.
"""

from dataclasses import dataclass
from enum import StrEnum


class Executor(StrEnum):
    """How a rank's actions and its messages overlap."""

    IDEAL = "ideal"
    """Receives are posted before the step; a message leaves when its producer has finished and
    delays only its receiver."""

    TORCH_RUNTIME = "torch-runtime"
    """torch's `_PipelineScheduleRuntime`: a send is posted right after its producer and never
    waited for inside the step; a receive is posted where torch's lowering puts it in the receiver's
    own order, so that a message starts when both ends have been posted."""

    TORCH_RUNTIME_SERIAL = "torch-runtime-serial"
    """The same where a rank's messages take turns, in the order in which it posts them: a receive
    that is posted early blocks the sends behind it, as on a single communication stream."""

    TORCH_1F1B = "torch-1f1b"
    """torch's `Schedule1F1B`: a send is fused with the next receive of the opposite direction and
    the rank waits for both; warmup and cooldown wait for the previous send."""

    MEGATRON_EXPOSED = "megatron-exposed"
    """Megatron-LM at V = 1: every send and receive blocks the rank; in steady state a send is
    fused with the receive of the opposite direction."""

    MEGATRON_OVERLAP = "megatron-overlap"
    """Megatron-LM at V > 1 with overlapped P2P: messages overlap with compute in steady state;
    those of warmup and cooldown block the rank."""


class Receive(StrEnum):
    """When a rank posts its receives."""

    BEFORE_STEP = "before-step"
    """All of them at once: a message needs only its sender."""
    LOWERED = "lowered"
    """Where torch's lowering puts them: a receive follows those actions that its rank would have
    done by the time the producer runs, were every action one tick long."""
    AT_USE = "at-use"
    """After the action before the one that uses the message."""
    AT_LAST_USE = "at-last-use"
    """In the steady phase after the previous action of the same direction, one exchange ahead;
    outside of it at use."""


class Wait(StrEnum):
    """When a rank waits for the message it has just sent to arrive."""

    NEVER = "never"
    AFTER_NEXT = "after-next"
    """After its next action, before it sends that one's output."""
    BEFORE_RECEIVE = "before-receive"
    """At once, before it posts the receive of its next action."""
    WITH_RECEIVE = "with-receive"
    """Together with the receive of its next action, which is posted at the same time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """What a rank waits for between two actions.

    Forwards go one direction, backwards (full or input part) and weight parts the other.
    """

    receive: Receive
    same_direction: Wait = Wait.NEVER
    """After an action whose successor goes the same direction."""
    opposite_direction: Wait = Wait.NEVER
    """After an action whose successor goes the other direction."""
    steady: Wait | None = None
    """Replaces both from the action before a rank's first backward to its last forward."""
    pairs_send_together: bool = False
    """Whether the forward of an overlapped pair sends only after the backward is done too."""
    one_at_a_time: bool = False
    """Whether a rank's messages, sent and received, each start when the one before has arrived."""


WAITS: dict[Executor, Waits] = {
    Executor.IDEAL: Waits(receive=Receive.BEFORE_STEP),
    Executor.TORCH_RUNTIME: Waits(receive=Receive.LOWERED, pairs_send_together=True),
    Executor.TORCH_RUNTIME_SERIAL: Waits(
        receive=Receive.LOWERED, pairs_send_together=True, one_at_a_time=True
    ),
    Executor.TORCH_1F1B: Waits(
        receive=Receive.AT_USE,
        same_direction=Wait.AFTER_NEXT,
        opposite_direction=Wait.WITH_RECEIVE,
    ),
    Executor.MEGATRON_EXPOSED: Waits(
        receive=Receive.AT_USE,
        same_direction=Wait.BEFORE_RECEIVE,
        opposite_direction=Wait.WITH_RECEIVE,
    ),
    Executor.MEGATRON_OVERLAP: Waits(
        receive=Receive.AT_LAST_USE,
        same_direction=Wait.WITH_RECEIVE,
        opposite_direction=Wait.WITH_RECEIVE,
        steady=Wait.NEVER,
    ),
}
"""Every executor's waits, stated once.

Common to all: a rank pays the sender's occupied time after an action and then posts the message;
it pays the receiver's occupied time before the action that uses it. A message starts when both ends
have posted it and all earlier messages of its directed link have left the wire, in the order in
which they were sent; it arrives one wire time and one latency later, which is also when its send
is complete.
"""
