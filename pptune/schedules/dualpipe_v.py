"""DualPipeV: two stages per rank in a V, forwards overlapped with backwards, as torch's
ScheduleDualPipeV orders it (after github.com/deepseek-ai/DualPipe; arXiv 2412.19437, section 3.2).

An overlapped pair is a forward followed by a full backward; the trainer may run them at once, and
neither sends before both are done.
"""

from pptune.errors import PlanError
from pptune.schedules import orders
from pptune.schedules.order import Cycle, Order, Shape
from pptune.schedules.sizes import need_chunks


def order(shape: Shape) -> Order:
    need_chunks("dualpipe-v", shape, exactly=2)
    num_ranks, _, num_microbatches, _ = shape
    if num_microbatches < 2 * num_ranks:
        raise PlanError(
            f"dualpipe-v needs at least as many micro-batches as stages, but there are "
            f"{num_microbatches} and {2 * num_ranks}; use {2 * num_ranks} or more"
        )

    return Order(
        num_ranks=num_ranks,
        num_stages=2 * num_ranks,
        num_microbatches=num_microbatches,
        placement="v",
        make=lambda count: orders.dualpipe_v(num_ranks, count),
        backwards="mixed",
        cycle=_cycle(num_ranks, num_microbatches),
    )


def _cycle(num_ranks: int, num_microbatches: int) -> Cycle | None:
    """The main step's pairs, forward down with backward up and forward up with backward down; from
    the second on, because the last rank's first pair is not overlapped."""
    count, rest = divmod(num_microbatches - 2 * num_ranks, num_ranks)
    if count < 1:
        return None
    # Before it rank r does 5 (P - 1 - r) + 2 (r + 1) actions and the first 4 of the main step.
    first = 5 * (num_ranks - 1) + 2 + 4 * (1 + rest)
    return Cycle(num_ranks, 4 * num_ranks, first, -3, count)
