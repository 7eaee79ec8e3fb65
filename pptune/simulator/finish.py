"""From the arrays of a played step to where every rank's time went."""

from typing import Any

from pptune.schedules.action import Work
from pptune.schedules.compiled import compiled
from pptune.schedules.order import (
    KIND_MASK,
    MICROBATCH_MASK,
    MICROBATCH_SHIFT,
    STAGE_MASK,
    STAGE_SHIFT,
    WORK_MASK,
)
from pptune.simulator.arrays import (
    CYCLE_ACTIONS,
    ENDED,
    EXPOSED,
    FLOAT_LATENCY,
    FLOAT_SEND,
    FLOAT_TOTAL,
    LATE,
    LEFT_OUT,
    NOW,
    NUM_KIND,
    OUTPUT,
    SPENT,
)

_FORWARD, _BACKWARD = int(Work.FORWARD), int(Work.BACKWARD)
_INPUT_PART, _WEIGHT_PART = int(Work.BACKWARD_INPUT), int(Work.BACKWARD_WEIGHT)

# Rows of a result, float64[NUM_RESULTS, num_ranks].
BUSY, BUBBLE, EXPOSED_TRANSFER, OVERHEAD, WARMUP, STEADY, COOLDOWN = range(7)
NUM_RESULTS = 7

# What `times` and `others` say of a message.
ARRIVED_ONLY, ARRIVED_AND_PRODUCED, SENT_AND_ARRIVED = range(3)


@compiled("float64(int64,int64[::1],float64[::1],float64[::1],float64[::1],int64)", inner=True)
def end_of(code: int, kinds: Any, floats: Any, times: Any, others: Any, meaning: int) -> Any:
    """When a forward or backward was done, from the message it made."""
    kind = (code & KIND_MASK) * NUM_KIND
    slot = kinds[kind + OUTPUT] + (code >> MICROBATCH_SHIFT & MICROBATCH_MASK)
    if meaning == ARRIVED_AND_PRODUCED:
        return others[slot]
    if meaning == SENT_AND_ARRIVED:
        return times[slot] - floats[kind + FLOAT_SEND]
    return times[slot] - floats[kind + FLOAT_LATENCY] - floats[kind + FLOAT_SEND]


@compiled(
    "UniTuple(float64,2)(int64[::1],int64,int64[::1],int64[::1],int64,float64[:,::1],float64[::1],int64[::1],"
    "float64[::1],float64[:,::1],float64[::1],float64[::1],int64,int64[::1],float64[:,::1])"
)
def finish(
    codes: Any, width: int, lengths: Any, rank_of: Any, num_microbatches: int, costs: Any,
    overhead: Any, kinds: Any, floats: Any, clocks: Any, times: Any, others: Any, meaning: int,
    cycle: Any, result: Any,
) -> tuple[float, float]:  # fmt: skip
    """Fill `result`; the step time and the longest span of a rank from first to last action.
    `num_microbatches` is that of the whole step."""
    num_ranks, num_stages = lengths.size, rank_of.size
    late = clocks[0, LATE]
    step, span = 0.0, 0.0
    for rank in range(num_ranks):
        step = max(step, clocks[rank, NOW] + late)
        result[EXPOSED_TRANSFER, rank] = clocks[rank, EXPOSED]
        # Forwards and weight parts are counted by what the list holds besides backwards.
        num_actions = lengths[rank] + cycle[LEFT_OUT] * cycle[CYCLE_ACTIONS]
        num_backwards = num_microbatches * (num_stages // num_ranks)
        num_split = num_actions - 2 * num_backwards
        result[OVERHEAD, rank] = (
            num_backwards * overhead[_FORWARD]
            + (num_backwards - num_split) * overhead[_BACKWARD]
            + num_split * (overhead[_INPUT_PART] + overhead[_WEIGHT_PART])
        )
    for stage in range(num_stages):
        for work in (_FORWARD, _BACKWARD):
            total = floats[(4 * stage + work) * NUM_KIND + FLOAT_TOTAL]
            occupied = num_microbatches * (total - costs[work, stage] - overhead[work])
            result[EXPOSED_TRANSFER, rank_of[stage]] += occupied
            clocks[rank_of[stage], SPENT] -= occupied
    for rank in range(num_ranks):
        result[BUSY, rank] = clocks[rank, SPENT] - result[OVERHEAD, rank]
        result[BUBBLE, rank] = step - clocks[rank, SPENT] - result[EXPOSED_TRANSFER, rank]
        first = rank * width
        at = first
        while codes[at] & WORK_MASK == _FORWARD:
            at += 1
        backward = codes[at]
        at = first + lengths[rank] - 1
        while codes[at] & WORK_MASK != _FORWARD:
            at -= 1
        last_forward = end_of(codes[at], kinds, floats, times, others, meaning) + late
        started = end_of(codes[first], kinds, floats, times, others, meaning)
        started -= costs[_FORWARD, codes[first] >> STAGE_SHIFT & STAGE_MASK] + overhead[_FORWARD]
        warm = end_of(backward, kinds, floats, times, others, meaning)
        work, stage = backward & WORK_MASK, backward >> STAGE_SHIFT & STAGE_MASK
        warm = min(warm - costs[work, stage] - overhead[work], last_forward)
        result[WARMUP, rank] = warm
        result[STEADY, rank] = last_forward - warm
        result[COOLDOWN, rank] = step - last_forward
        span = max(span, clocks[rank, ENDED] + late - started)
    return step, span
