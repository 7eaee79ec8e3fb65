"""What overlaps with what: the semantics of the program that runs a plan.

The same order of actions takes different times in different runtimes, because each has its own
idea of when a receive is posted and what a rank waits for. The simulator plays these rules; a
target (a trainer) decides which one a plan gets.
"""

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

    TORCH_1F1B = "torch-1f1b"
    """torch's `Schedule1F1B`: a send is fused with the next receive of the opposite direction and
    the rank waits for both; warmup and cooldown wait for the previous send."""

    MEGATRON_EXPOSED = "megatron-exposed"
    """Megatron-LM at V = 1: every send and receive blocks the rank; in steady state a send is
    fused with the receive of the opposite direction."""

    MEGATRON_OVERLAP = "megatron-overlap"
    """Megatron-LM at V > 1 with overlapped P2P: messages overlap with compute in steady state;
    those of warmup and cooldown block the rank."""
