"""Orders that do all forwards of a stage before the next stage's, and all backwards after that."""

from pptune.schedules import orders
from pptune.schedules.order import Order, Shape


def breadth_first_order(shape: Shape, *, reverse_backwards: bool) -> Order:
    """Forwards by chunk and micro-batch, then backwards from the last chunk on, their micro-batches
    counting down where `reverse_backwards`."""
    num_ranks, num_chunks, num_microbatches, _ = shape
    return Order(
        num_ranks=num_ranks,
        num_stages=num_ranks * num_chunks,
        num_microbatches=num_microbatches,
        placement="loop",
        make=lambda count: orders.breadth_first(num_ranks, num_chunks, count, reverse_backwards),
    )
