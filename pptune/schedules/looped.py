"""The family of 1F1B orders on looped stages, which differ in three numbers.

Rank r does w = (V - 1) N + `warmup_per_hop` (P - 1 - r) forwards, then one forward and one backward
in turn, then the remaining backwards. Forwards go through the chunks in groups of N micro-batches,
chunk 0 first; backwards in the same groups, last chunk first. Where backwards are split, the weight
part of the j-th backward follows the input part of backward j + `weight_lag` r, so that rank r has
work left to fill its bubble; the rest comes at the end. Counts are capped at M V.

Sources: arXiv 2104.04473, section 2.2 (1F1B, interleaving); arXiv 2401.10241, section 3 (split
backwards); Megatron-LM core/pipeline_parallel/schedules.py and torch.distributed.pipelining
schedules.py (warmup counts and groups).
"""

from pptune.schedules import orders
from pptune.schedules.deadlock import check_progress
from pptune.schedules.order import Cycle, Order, Shape

NO_SPLIT = -1
"""As `weight_lag`: full backwards."""
_TRIED_CYCLES = 3
"""Cycles of an order that are tried out: what more of them do is the same again."""


def looped_order(shape: Shape, *, warmup_per_hop: int, weight_lag: int = NO_SPLIT) -> Order:
    """The order of this family for `shape`. Raises PlanError for a group size that deadlocks."""
    num_ranks, num_chunks, num_microbatches, group = shape
    if num_chunks == 1:
        group = num_ranks  # Only the size of a cycle, see Cycle.
    splits = weight_lag != NO_SPLIT

    def make(count: int) -> orders.Codes:
        # One chunk has no groups: all its micro-batches are one run.
        run = group if num_chunks > 1 else count
        return orders.looped(num_ranks, num_chunks, count, run, warmup_per_hop, weight_lag, splits)

    order = Order(
        num_ranks=num_ranks,
        num_stages=num_ranks * num_chunks,
        num_microbatches=num_microbatches,
        placement="loop",
        make=make,
        backwards="split" if splits else "whole",
        cycle=_cycle(num_ranks, num_chunks, num_microbatches, group, warmup_per_hop, weight_lag),
    )
    if num_chunks > 1:
        _check_group(order, group, warmup_per_hop)
    return order


def _check_group(order: Order, group: int, warmup_per_hop: int) -> None:
    """Raise PlanError where the group size makes ranks wait for each other without end.

    The last rank's j-th backward needs a backward of rank 0 that comes after a forward which needs
    the last rank's forward number j + `warmup_per_hop` (P - 1) less two groups. So two groups that
    follow each other must hold that many micro-batches, or there is only one. That is enough; below
    it some sizes still run, and those are tried out.
    """
    num_microbatches, ahead = order.num_microbatches, warmup_per_hop * (order.num_ranks - 1)
    rest = num_microbatches % group
    if group == num_microbatches or (2 * group >= ahead and (not rest or group + rest >= ahead)):
        return
    if order.cycle is not None and order.cycle.num_cycles > _TRIED_CYCLES:
        order = order.with_cycles(_TRIED_CYCLES)
    check_progress(order)


def _cycle(
    num_ranks: int,
    num_chunks: int,
    num_microbatches: int,
    group: int,
    warmup_per_hop: int,
    weight_lag: int,
) -> Cycle | None:
    """Cycles of N micro-batches: V N forwards and backwards, counted back from rank 0's last
    forward in a full group, as long as every rank is past its warmup and its first weight part.

    A cut may not need anything behind it: rank 0's forwards use what the last rank did N slots
    before, while the last rank's backwards use rank 0's. With `skew`, rank r is cut r pairs later.
    """
    per_cycle = num_chunks * group
    skew = 1 if num_chunks > 1 and warmup_per_hop == 2 else 0
    warmup = (num_chunks - 1) * group + warmup_per_hop * (num_ranks - 1)
    grouped = num_microbatches if num_chunks == 1 else num_microbatches // group * per_cycle
    pairs = grouped - warmup
    settled = max(weight_lag, 0) * (num_ranks - 1)
    count = (pairs - settled) // per_cycle
    if count < 1:
        return None
    first = pairs - count * per_cycle
    per_pair, lag = (2, 0) if weight_lag == NO_SPLIT else (3, weight_lag)
    return Cycle(
        num_microbatches=group,
        num_actions=per_pair * per_cycle,
        first_start=warmup + per_pair * first,
        start_per_rank=per_pair * skew - warmup_per_hop - lag,
        num_cycles=count,
        num_settling=2 if num_chunks == 1 else 1,
    )
