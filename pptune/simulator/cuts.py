"""Cuts through a step, and the proof that a step repeats itself between two of them.

A cut is one position in every rank's list such that no action before it needs one after it. What
follows a cut depends only on the state there: the ranks' clocks, the times of the messages under
way across it, and when the wires are free. Times are maxima of sums, so a state that equals that of
an earlier cut up to one common shift leads to the same times up to that shift (a max-plus system;
Baccelli et al., Synchronization and Linearity, 1992, section 3). Where two states differ by at most
e, all later times do, because such a system is non-expansive: the tolerance bounds the relative
error of the whole step.
"""

from typing import Any

from pptune.schedules.compiled import compiled
from pptune.schedules.order import KIND_MASK, MICROBATCH_MASK, MICROBATCH_SHIFT
from pptune.simulator.arrays import (
    CUT,
    CUTTING,
    CYCLE_ACTIONS,
    CYCLE_MICROBATCHES,
    EXPOSED,
    FIRST_START,
    GO_ON,
    INPUT,
    LAST_CUT,
    LATE,
    LEFT_OUT,
    NONE,
    NOW,
    NUM_KIND,
    SAVED,
    SAVED_EXPOSED,
    SAVED_NOW,
    SAVED_SPENT,
    SPENT,
    START_PER_RANK,
    TOO_SHORT,
    UNALIGNED,
)

TOLERANCE = 1e-12
"""How much two states may differ and count as the same, relative to the shift between them."""


@compiled("int64(int64[::1],int64[::1],int64[::1],int64[::1],int64[::1])", inner=True)
def set_limits(lengths: Any, places: Any, cycle: Any, cuts: Any, limits: Any) -> int:
    """Where every rank stops next: at the cut, or at its end. Returns how many actions that is."""
    num_actions = 0
    for rank in range(lengths.size):
        limits[rank] = lengths[rank]
        if cuts[CUTTING] == 1:
            start = cycle[FIRST_START] + cycle[START_PER_RANK] * rank
            limits[rank] = start + cuts[CUT] * cycle[CYCLE_ACTIONS]
        num_actions += limits[rank] - places[rank]
    return num_actions


@compiled("boolean(float64,float64,float64)", inner=True)
def moved(now: float, before: float, shift: float) -> bool:
    """Whether a time is the earlier one moved by `shift`, or follows from others that are.

    A time that is not known at this cut will follow from those that are; its earlier counterpart
    may have become known since the earlier cut.
    """
    return now < 0.0 or abs(now - before - shift) <= TOLERANCE * shift


@compiled(
    "boolean(int64[::1],int64,int64[::1],int64[::1],int64[::1],float64[:,::1],float64[:,::1],"
    "float64[::1],float64[::1],int64,int64[::1],int64[::1])",
    inner=True,
)
def same_state(
    codes: Any, width: int, lengths: Any, places: Any, kinds: Any, clocks: Any, free: Any,
    times: Any, others: Any, stride: int, cycle: Any, cuts: Any,
) -> bool:  # fmt: skip
    """Whether the state at this cut is that of the saved one moved by one shift."""
    num_links = free.shape[1] - 1
    shift = clocks[0, NOW] - clocks[0, SAVED_NOW]
    for rank in range(lengths.size):
        if not moved(clocks[rank, NOW], clocks[rank, SAVED_NOW], shift):
            return False
    for link in range(num_links):
        unused = free[0, link] == 0.0 and free[1, link] == 0.0
        if not unused and not moved(free[0, link], free[1, link], shift):
            return False
    back = (cuts[CUT] - cuts[SAVED]) * cycle[CYCLE_MICROBATCHES]
    no_input = times.size - 2 * stride
    for rank in range(lengths.size):
        for at in range(rank * width + places[rank], rank * width + lengths[rank]):
            code = codes[at]
            row = kinds[(code & KIND_MASK) * NUM_KIND + INPUT]
            microbatch = code >> MICROBATCH_SHIFT & MICROBATCH_MASK
            slot = row + microbatch
            if row == no_input or times[slot] < 0.0:
                continue
            if microbatch < back or not moved(times[slot], times[slot - back], shift):
                return False
            if others.size > 0 and not moved(others[slot], others[slot - back], shift):
                return False
    return True


@compiled(
    "boolean(int64[::1],int64,int64[::1],int64[::1],int64[::1],float64[:,::1],float64[::1],"
    "float64[::1],int32[::1],int32[::1],int32[::1],int64,int64[::1],int64[::1])",
    inner=True,
)
def same_posts(
    codes: Any, width: int, lengths: Any, places: Any, kinds: Any, clocks: Any, times: Any,
    done: Any, posted_after: Any, ticks: Any, produced_tick: Any, stride: int, cycle: Any,
    cuts: Any,
) -> bool:  # fmt: skip
    """Whether the same holds for receives that are posted already, and for the ticks by which the
    lowering places those to come."""
    shift = clocks[0, NOW] - clocks[0, SAVED_NOW]
    periods = cuts[CUT] - cuts[SAVED]
    back, back_actions = periods * cycle[CYCLE_MICROBATCHES], periods * cycle[CYCLE_ACTIONS]
    lowered = ticks.size > 0
    tick_shift = 0
    if lowered:
        tick_shift = ticks[places[0] - 1] - ticks[places[0] - 1 - back_actions]
    no_input = times.size - 2 * stride
    for rank in range(lengths.size):
        row, place = rank * width, places[rank]
        if lowered:
            last = row + place - 1
            if ticks[last] - ticks[last - back_actions] != tick_shift:
                return False
        for at in range(row + place, row + lengths[rank]):
            code = codes[at]
            first = kinds[(code & KIND_MASK) * NUM_KIND + INPUT]
            if first == no_input:
                continue
            microbatch = code >> MICROBATCH_SHIFT & MICROBATCH_MASK
            slot = first + microbatch
            posted = posted_after[slot] < place
            sent = lowered and times[slot] >= 0.0
            if (posted or sent) and microbatch < back:
                return False
            if sent and produced_tick[slot] - produced_tick[slot - back] != tick_shift:
                return False
            if posted:
                now, before = posted_after[slot], posted_after[slot - back]
                if now < 0 or before < 0:
                    return False
                done_row = rank * (width + 1) + 1
                if not moved(done[done_row + now], done[done_row + before], shift):
                    return False
    return True


@compiled("int64(float64[:,::1],int64[::1],int64[::1])", inner=True)
def skip_cycles(clocks: Any, cycle: Any, cuts: Any) -> int:
    """Count the cycles left out as repeats of those since the saved cut, and play to the end.

    Their seconds are added to what ranks have spent and waited for.
    """
    period = cuts[CUT] - cuts[SAVED]
    if cycle[LEFT_OUT] % period != 0:
        return UNALIGNED
    repeats = cycle[LEFT_OUT] // period
    for rank in range(clocks.shape[0]):
        spent = clocks[rank, SPENT] - clocks[rank, SAVED_SPENT]
        exposed = clocks[rank, EXPOSED] - clocks[rank, SAVED_EXPOSED]
        clocks[rank, SPENT] += repeats * spent
        clocks[rank, EXPOSED] += repeats * exposed
    clocks[0, LATE] = repeats * (clocks[0, NOW] - clocks[0, SAVED_NOW])
    cuts[CUTTING] = 0
    return GO_ON


@compiled("int64(float64[:,::1],float64[:,::1],int64[::1],int64[::1])", inner=True)
def next_cut(clocks: Any, free: Any, cycle: Any, cuts: Any) -> int:
    """Save the state where it is time to, and aim at the next cut."""
    if cuts[SAVED] == NONE or cuts[CUT] >= 2 * cuts[SAVED]:
        # Brent's way to find a period of any length with one saved state.
        cuts[SAVED] = cuts[CUT]
        for rank in range(clocks.shape[0]):
            for column in range(SAVED_NOW):
                clocks[rank, SAVED_NOW + column] = clocks[rank, column]
        for link in range(free.shape[1]):
            free[1, link] = free[0, link]
    cuts[CUT] += 1
    return GO_ON if cuts[CUT] <= cycle[LAST_CUT] else TOO_SHORT
