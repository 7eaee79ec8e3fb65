"""Where torch's schedule runtime posts its receives.

torch lowers a compute-only order to one with sends and receives (schedules.py:
_add_unshard_reshard, _add_reduce_grad, _add_send_recv) by walking all ranks in step. In every tick
each rank, lowest first, does its next entry if what that needs is there; when an entry sends, its
receive is appended to the receiver's list, behind what that rank has done by then. Entries are
actions, an overlapped pair counting as one, and what torch adds for sharded parameters and gradient
reduction; those take a tick whether or not they do anything.
"""

from typing import Any

import numpy as np

from pptune.schedules.action import Work
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
from pptune.simulator.arrays import NONE

_FORWARD = int(Work.FORWARD)
_BACKWARD = int(Work.BACKWARD)
_WEIGHT = int(Work.BACKWARD_WEIGHT)
_U = np.uint64

_INPUT, _INPUT_TURN, _OUTPUT, _RECEIVER = range(4)
_NUM_ENTRIES = 4
"""Looked up by kind of action: where the messages it needs begin, whether their sender's turn in a
tick comes after its own, where the messages it makes begin, and who receives them; NONE for no."""


@compiled("void(int64,int64[::1],int64[::1])", inner=True)
def _fill_table(stride: int, rank_of: Any, table: Any) -> None:
    num_stages = rank_of.size
    for stage in range(num_stages):
        for work in range(4):
            kind = (4 * stage + work) * _NUM_ENTRIES
            step = 1 if work == _FORWARD else -1
            row = 0 if work == _FORWARD else num_stages
            source, target = stage - step, stage + step
            for entry in range(_NUM_ENTRIES):
                table[kind + entry] = NONE
            if work == _WEIGHT:
                continue
            table[kind + _OUTPUT] = (row + stage) * stride
            if 0 <= source < num_stages and rank_of[source] != rank_of[stage]:
                table[kind + _INPUT] = (row + source) * stride
                table[kind + _INPUT_TURN] = rank_of[source] > rank_of[stage]
            if 0 <= target < num_stages and rank_of[target] != rank_of[stage]:
                table[kind + _RECEIVER] = rank_of[target]


@compiled("void(int64[::1],int64,int64[::1],int32[::1])", inner=True)
def _count_extra(codes: Any, width: int, lengths: Any, extra: Any) -> None:
    """Ticks that torch spends before every action on sharded parameters.

    Those of the next three stages of a rank's list are kept gathered: a stage that leaves that set
    costs an entry, and so does one that joins it.
    """
    for rank in range(lengths.size):
        begin, end = rank * width, rank * width + lengths[rank]
        first, second, third = NONE, NONE, NONE
        for at in range(end - 1, begin - 1, -1):
            stage = codes[_U(at)] >> STAGE_SHIFT & STAGE_MASK
            entries = 0
            if stage != first:
                if stage == second:
                    first, second = stage, first
                else:
                    if stage != third:
                        entries = 1 if third == NONE else 2
                    first, second, third = stage, first, second
            # What goes before the next action; nothing is asked for after the last one.
            extra[_U(at + 1)] = entries
        extra[begin] = (first != NONE) + (second != NONE) + (third != NONE)


@compiled(
    "void(int64[::1],int64,int64[::1],int64,int64[::1],int64,int32[::1],int32[::1],int32[::1])"
)
def lower_torch(
    codes: Any, width: int, lengths: Any, num_microbatches: int, rank_of: Any, stride: int,
    posted_after: Any, ticks: Any, produced_tick: Any,
) -> None:  # fmt: skip
    """Fill `posted_after`, `ticks` and `produced_tick` (see posts.py). Where the order deadlocks,
    the rest stays as it is."""
    num_ranks, num_stages = lengths.size, rank_of.size
    table = np.empty(4 * num_stages * _NUM_ENTRIES, np.int64)
    _fill_table(stride, rank_of, table)
    extra = np.empty(codes.size + 1, np.int32)
    _count_extra(codes, width, lengths, extra)
    num_done = np.zeros(num_stages, np.int64)
    places, free_from = np.zeros(num_ranks, np.int64), np.zeros(num_ranks, np.int64)
    progress = True
    while progress:
        progress = False
        for rank in range(num_ranks):
            row, at, end = rank * width, places[rank], lengths[rank]
            following = free_from[rank]
            begin = at
            while at < end:
                # A pair is one entry, which needs the inputs of both.
                size = 1 + (codes[_U(row + at)] >> PAIR_SHIFT != 0)
                tick = following + extra[_U(row + at)]
                ready = True
                for member in range(row + at, row + at + size):
                    code = codes[_U(member)]
                    kind = (code & KIND_MASK) * _NUM_ENTRIES
                    if table[_U(kind + _INPUT)] != NONE:
                        microbatch = code >> MICROBATCH_SHIFT & MICROBATCH_MASK
                        needed = produced_tick[_U(table[_U(kind + _INPUT)] + microbatch)]
                        ready = ready and needed != NONE
                        tick = max(tick, needed + table[_U(kind + _INPUT_TURN)])
                if not ready:
                    break
                following = tick + 1
                for member in range(row + at, row + at + size):
                    code = codes[_U(member)]
                    kind = (code & KIND_MASK) * _NUM_ENTRIES
                    ticks[_U(member)] = tick
                    if table[_U(kind + _OUTPUT)] != NONE:
                        microbatch = code >> MICROBATCH_SHIFT & MICROBATCH_MASK
                        produced_tick[_U(table[_U(kind + _OUTPUT)] + microbatch)] = tick
                    work = code & WORK_MASK
                    if work == _BACKWARD or work == _WEIGHT:  # noqa: SIM109
                        # A stage's gradients are reduced after its last backward.
                        stage = code >> STAGE_SHIFT & STAGE_MASK
                        num_done[stage] += 1
                        following += num_done[stage] == num_microbatches
                if size == 2:
                    following += extra[_U(row + at + 1)]  # Nothing goes between the two.
                at += size
            progress = progress or at > begin
            places[rank], free_from[rank] = at, following
    for rank in range(num_ranks):
        # Ticks only grow along a list, so one pass over each receiver's list is enough.
        next_position, previous_position = 0, 0
        for at in range(rank * width, rank * width + places[rank]):
            code = codes[_U(at)]
            kind = (code & KIND_MASK) * _NUM_ENTRIES
            receiver = table[_U(kind + _RECEIVER)]
            if receiver == NONE:
                continue
            # What the receiver has done by then, in the same tick only if it is the lower rank.
            until = ticks[_U(at)] + (receiver < rank)
            to_next = receiver == rank + 1 or receiver + num_ranks == rank + 1
            position = next_position if to_next else previous_position
            listed = receiver * width
            while position < places[receiver] and ticks[_U(listed + position)] < until:
                position += 1
            if to_next:
                next_position = position
            else:
                previous_position = position
            microbatch = code >> MICROBATCH_SHIFT & MICROBATCH_MASK
            posted_after[_U(table[_U(kind + _OUTPUT)] + microbatch)] = position - 1
