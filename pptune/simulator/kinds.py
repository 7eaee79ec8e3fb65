"""The costs of a step by what the inner loops look up."""

from typing import Any

from pptune.schedules.action import Work
from pptune.schedules.compiled import compiled
from pptune.simulator.arrays import (
    FLOAT_INPUT_LAG,
    FLOAT_LATENCY,
    FLOAT_SEND,
    FLOAT_TOTAL,
    FLOAT_WIRE,
    INPUT,
    INPUT_LINK,
    LINK,
    NUM_KIND,
    OUTPUT,
)

_FORWARD, _WEIGHT = int(Work.FORWARD), int(Work.BACKWARD_WEIGHT)
_FORWARD_HOPS, _BACKWARD_HOPS = 4, 8
_LATENCY, _WIRE, _SEND, _RECEIVE = range(4)
"""Rows of a cost table: the hops of forwards and backwards begin at the first two, and the parts of
a hop follow in this order."""

BY_SENDER, BY_RECEIVER, BY_EITHER = range(3)
"""Which end starts a message: the one that posts it last, as far as that is the same for all."""


@compiled("void(int64,int64,int64[::1],float64[:,::1],float64[::1],int64,int64[::1],float64[::1])")
def fill_kinds(
    num_ranks: int, stride: int, rank_of: Any, costs: Any, overhead: Any, started_by: int,
    kinds: Any, floats: Any,
) -> None:  # fmt: skip
    """Fill the table of kinds for messages started by BY_SENDER, BY_RECEIVER or BY_EITHER; `floats`
    is a view of `kinds`."""
    num_stages = rank_of.size
    for stage in range(num_stages):
        rank = rank_of[stage]
        for work in range(4):
            kind = (4 * stage + work) * NUM_KIND
            for entry in range(FLOAT_TOTAL, NUM_KIND):
                floats[kind + entry] = 0.0
            kinds[kind + INPUT] = 2 * num_stages * stride
            kinds[kind + OUTPUT] = (2 * num_stages + 1) * stride
            kinds[kind + LINK] = 2 * num_ranks
            floats[kind + FLOAT_TOTAL] = costs[work, stage] + overhead[work]
            if work == _WEIGHT:
                continue
            # The rule of schedules.action.input_stage: a forward's input comes from the stage
            # before, a backward's from the one after. Boundary s lies between stages s and s + 1.
            step = 1 if work == _FORWARD else -1
            row = 0 if work == _FORWARD else num_stages
            hops = _FORWARD_HOPS if work == _FORWARD else _BACKWARD_HOPS
            kinds[kind + OUTPUT] = (row + stage) * stride
            source, target = stage - step, stage + step
            if 0 <= source < num_stages and rank_of[source] != rank:
                boundary = min(source, stage)
                link = 2 * rank_of[source] + ((rank - rank_of[source]) % num_ranks != 1)
                kinds[kind + INPUT] = (row + source) * stride
                floats[kind + FLOAT_TOTAL] += costs[hops + _RECEIVE, boundary]
                if started_by == BY_EITHER:
                    kinds[kind + INPUT_LINK] = link
                else:
                    floats[kind + FLOAT_INPUT_LAG] = costs[hops + _SEND, boundary]
                if started_by == BY_SENDER:
                    floats[kind + FLOAT_INPUT_LAG] += costs[hops + _LATENCY, boundary]
                if started_by == BY_RECEIVER:
                    kinds[kind + LINK] = link
                    floats[kind + FLOAT_LATENCY] = costs[hops + _LATENCY, boundary]
                    floats[kind + FLOAT_WIRE] = costs[hops + _WIRE, boundary]
            if 0 <= target < num_stages and rank_of[target] != rank:
                boundary = min(stage, target)
                floats[kind + FLOAT_TOTAL] += costs[hops + _SEND, boundary]
                floats[kind + FLOAT_SEND] = costs[hops + _SEND, boundary]
                if started_by != BY_RECEIVER:
                    kinds[kind + LINK] = 2 * rank + ((rank_of[target] - rank) % num_ranks != 1)
                    floats[kind + FLOAT_LATENCY] = costs[hops + _LATENCY, boundary]
                    floats[kind + FLOAT_WIRE] = costs[hops + _WIRE, boundary]
