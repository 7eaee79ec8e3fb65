"""Orders that do all forwards of a stage before the next stage's, and all backwards after that."""

from typing import Any

from pptune.schedules.action import Work
from pptune.schedules.compiled import compiled
from pptune.schedules.order import MICROBATCH_SHIFT, STAGE_SHIFT, Codes, Order, Shape

_FORWARD, _BACKWARD = int(Work.FORWARD), int(Work.BACKWARD)


def breadth_first_order(shape: Shape, *, reverse_backwards: bool) -> Order:
    """Forwards by chunk and micro-batch, then backwards from the last chunk on, their micro-batches
    counting down where `reverse_backwards`."""
    num_ranks, num_chunks, num_microbatches, _ = shape

    def make() -> Codes:
        coded = Codes.empty(num_ranks, 2 * num_chunks * num_microbatches)
        _fill(num_ranks, num_chunks, num_microbatches, reverse_backwards, *coded)
        return coded

    return Order(
        num_ranks=num_ranks,
        num_stages=num_ranks * num_chunks,
        num_microbatches=num_microbatches,
        placement="loop",
        make=make,
    )


@compiled("void(int64,int64,int64,boolean,int64[::1],int64,int64[::1])")
def _fill(
    num_ranks: int,
    num_chunks: int,
    num_microbatches: int,
    reverse_backwards: bool,
    codes: Any,
    width: int,
    lengths: Any,
) -> None:
    half = num_chunks * num_microbatches
    for rank in range(num_ranks):
        at = rank * width
        for chunk in range(num_chunks):
            forward = (chunk * num_ranks + rank) << STAGE_SHIFT | _FORWARD
            backward = ((num_chunks - 1 - chunk) * num_ranks + rank) << STAGE_SHIFT | _BACKWARD
            for microbatch in range(num_microbatches):
                codes[at] = forward | microbatch << MICROBATCH_SHIFT
                turn = num_microbatches - 1 - microbatch if reverse_backwards else microbatch
                codes[half + at] = backward | turn << MICROBATCH_SHIFT
                at += 1
        lengths[rank] = 2 * half
