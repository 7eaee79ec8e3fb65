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

from typing import Any

from pptune.schedules.action import Work
from pptune.schedules.compiled import compiled
from pptune.schedules.deadlock import check_progress
from pptune.schedules.order import MICROBATCH_SHIFT, STAGE_SHIFT, Codes, Cycle, Order, Shape

NO_SPLIT = -1
"""As `weight_lag`: full backwards."""
_TRIED_CYCLES = 3
"""Cycles of an order that are tried out: what more of them do is the same again."""

_FORWARD = int(Work.FORWARD)
_BACKWARD = int(Work.BACKWARD)
_INPUT = int(Work.BACKWARD_INPUT)
_WEIGHT = int(Work.BACKWARD_WEIGHT)
_NEXT = 1 << MICROBATCH_SHIFT


def looped_order(shape: Shape, *, warmup_per_hop: int, weight_lag: int = NO_SPLIT) -> Order:
    """The order of this family for `shape`. Raises PlanError for a group size that deadlocks."""
    num_ranks, num_chunks, num_microbatches, group = shape
    if num_chunks == 1:
        group = num_ranks  # Only the size of a cycle, see Cycle.
    per_backward = 1 if weight_lag == NO_SPLIT else 2

    def make() -> Codes:
        coded = Codes.empty(num_ranks, (1 + per_backward) * num_chunks * num_microbatches)
        # One chunk has no groups: all its micro-batches are one run.
        run = group if num_chunks > 1 else num_microbatches
        _fill(num_ranks, num_chunks, num_microbatches, run, warmup_per_hop, weight_lag, *coded)
        return coded

    def with_microbatches(count: int) -> Order:
        return looped_order(
            Shape(num_ranks, num_chunks, count, group),
            warmup_per_hop=warmup_per_hop,
            weight_lag=weight_lag,
        )

    order = Order(
        num_ranks=num_ranks,
        num_stages=num_ranks * num_chunks,
        num_microbatches=num_microbatches,
        placement="loop",
        make=make,
        backwards="whole" if weight_lag == NO_SPLIT else "split",
        cycle=_cycle(num_ranks, num_chunks, num_microbatches, group, warmup_per_hop, weight_lag),
        with_microbatches=with_microbatches,
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
        order.with_cycles(_TRIED_CYCLES)  # Tries itself out.
    else:
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


@compiled("UniTuple(int64,2)(int64,int64,int64,int64,int64,int64,int64)", inner=True)
def _run(
    index: int,
    work: int,
    rank: int,
    num_ranks: int,
    num_chunks: int,
    num_microbatches: int,
    group: int,
) -> tuple[int, int]:
    """The code of a rank's `index`-th forward, backward or weight part, and how many of its kind
    follow in the same stage, itself included, with micro-batches counting up."""
    first = index // (num_chunks * group) * group
    size = min(group, num_microbatches - first)
    chunk, offset = divmod(index - first * num_chunks, size)
    if work != _FORWARD:
        chunk = num_chunks - 1 - chunk
    stage = chunk * num_ranks + rank
    return (first + offset) << MICROBATCH_SHIFT | stage << STAGE_SHIFT | work, size - offset


@compiled("void(int64,int64,int64,int64,int64,int64,int64[::1],int64,int64[::1])")
def _fill(
    num_ranks: int,
    num_chunks: int,
    num_microbatches: int,
    group: int,
    warmup_per_hop: int,
    weight_lag: int,
    codes: Any,
    width: int,
    lengths: Any,
) -> None:
    """In slot i a rank does forward i, backward i - w and weight part i - w - lag, those that
    exist. Slots are written in runs in which only the micro-batches count up."""
    total = num_chunks * num_microbatches
    split = weight_lag != NO_SPLIT
    backward = _INPUT if split else _BACKWARD
    sizes = (num_ranks, num_chunks, num_microbatches, group)
    for rank in range(num_ranks):
        warmup = min((num_chunks - 1) * group + warmup_per_hop * (num_ranks - 1 - rank), total)
        weights = warmup + weight_lag * rank if split else warmup
        f_code, f_left, b_code, b_left, w_code, w_left = 0, 0, 0, 0, 0, 0
        at, slot = rank * width, 0
        while slot < weights + total:
            has_f = slot < total
            has_b = warmup <= slot < warmup + total
            has_w = split and slot >= weights
            run = weights + total - slot
            for bound in (warmup, weights, total, warmup + total):
                if slot < bound:
                    run = min(run, bound - slot)
            if has_f:
                if f_left == 0:
                    f_code, f_left = _run(slot, _FORWARD, rank, *sizes)
                run = min(run, f_left)
            if has_b:
                if b_left == 0:
                    b_code, b_left = _run(slot - warmup, backward, rank, *sizes)
                run = min(run, b_left)
            if has_w:
                if w_left == 0:
                    w_code, w_left = _run(slot - weights, _WEIGHT, rank, *sizes)
                run = min(run, w_left)
            per_slot = has_f + has_b + has_w
            if has_f:
                for i in range(run):
                    codes[at + per_slot * i] = f_code + i * _NEXT
                f_code, f_left = f_code + run * _NEXT, f_left - run
            if has_b:
                for i in range(run):
                    codes[at + has_f + per_slot * i] = b_code + i * _NEXT
                b_code, b_left = b_code + run * _NEXT, b_left - run
            if has_w:
                for i in range(run):
                    codes[at + per_slot - 1 + per_slot * i] = w_code + i * _NEXT
                w_code, w_left = w_code + run * _NEXT, w_left - run
            at += per_slot * run
            slot += run
        lengths[rank] = at - rank * width
