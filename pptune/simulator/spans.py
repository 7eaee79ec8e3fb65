"""When every action ran, from the arrivals that were found by playing the step."""

from typing import Any

from pptune.executors import Wait
from pptune.schedules.compiled import compiled
from pptune.schedules.order import (
    KIND_MASK,
    MICROBATCH_MASK,
    MICROBATCH_SHIFT,
    PAIR_SHIFT,
    STAGE_MASK,
    STAGE_SHIFT,
    WORK_MASK,
)
from pptune.simulator.arrays import (
    FLOAT_LATENCY,
    FLOAT_SEND,
    FLOAT_TOTAL,
    FLOAT_WIRE,
    INPUT,
    NONE,
    NUM_KIND,
    OUTPUT,
)

_AFTER_NEXT, _NEVER = int(Wait.AFTER_NEXT), int(Wait.NEVER)

START, END, SENT, ARRIVED = range(4)
"""Rows of the spans."""


@compiled(
    "void(int64[::1],int64,int64[::1],int64[::1],float64[::1],float64[:,::1],float64[::1],"
    "float64[::1],int8[::1],boolean,int64,float64[:,::1])"
)
def fill_spans(
    codes: Any, width: int, lengths: Any, kinds: Any, floats: Any, costs: Any, overhead: Any,
    arrived: Any, waits: Any, pairs_together: bool, stride: int, spans: Any,
) -> None:  # fmt: skip
    """Fill `spans`, float64[4, num_actions], rank after rank: start and end of each action, and
    when the message it needed left its sender and arrived, NaN where it needs none.

    `kinds` are for messages started BY_RECEIVER; `waits` may be empty where nobody waits for sends.
    """
    no_input = arrived.size - 2 * stride
    column = 0
    for rank in range(lengths.size):
        now, held_s = 0.0, 0.0
        pending = NONE
        for at in range(rank * width, rank * width + lengths[rank]):
            code = codes[at]
            kind = (code & KIND_MASK) * NUM_KIND
            microbatch = code >> MICROBATCH_SHIFT & MICROBATCH_MASK
            slot = kinds[kind + INPUT] + microbatch
            spans[SENT, column], spans[ARRIVED, column] = float("nan"), float("nan")
            if kinds[kind + INPUT] != no_input:
                spans[ARRIVED, column] = arrived[slot]
                spans[SENT, column] = (
                    arrived[slot] - floats[kind + FLOAT_LATENCY] - floats[kind + FLOAT_WIRE]
                )
                now = max(now, arrived[slot])
            if pending != NONE and waits[at - 1] != _AFTER_NEXT:
                now = max(now, arrived[pending])
                pending = NONE
            work, stage = code & WORK_MASK, code >> STAGE_SHIFT & STAGE_MASK
            seconds = costs[work, stage] + overhead[work]
            now += floats[kind + FLOAT_TOTAL] - floats[kind + FLOAT_SEND]
            spans[START, column], spans[END, column] = now - seconds, now
            if pending != NONE:
                now = max(now, arrived[pending])
                pending = NONE
            if pairs_together and code >> PAIR_SHIFT != 0:
                held_s = floats[kind + FLOAT_SEND]
            else:
                now += held_s + floats[kind + FLOAT_SEND]
                held_s = 0.0
            slot = kinds[kind + OUTPUT] + microbatch
            if waits.size > 0 and waits[at] != _NEVER and arrived[slot] >= 0.0:
                pending = slot
            column += 1
