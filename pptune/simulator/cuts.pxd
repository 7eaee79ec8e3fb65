"""Cuts through a step, and the proof that a step repeats itself between two of them.

A cut is one position in every rank's list such that no action before it needs one after it. What
follows a cut depends only on the state there: the ranks' clocks, the times of the messages under
way across it, and when the wires are free. Times are maxima of sums, so a state that equals that of
an earlier cut up to one common shift leads to the same times up to that shift (a max-plus system;
Baccelli et al., Synchronization and Linearity, 1992, section 3). Where two states differ by at most
e, all later times do, because such a system is non-expansive: the tolerance bounds the relative
error of the whole step.
"""

from libc.math cimport fabs
from libc.stdint cimport int64_t

from pptune.schedules.orders cimport kind_of, microbatch_of
from pptune.simulator.state cimport GO_ON, NONE, TOO_SHORT, UNALIGNED, Clock, Status, Step, no_input


cdef inline int64_t set_limits(Step* step) noexcept nogil:
    """Where every rank stops next: at the cut, or at its end. Returns how many actions that is."""
    cdef int64_t rank, num_actions = 0
    for rank in range(step.num_ranks):
        step.limits[rank] = step.lengths[rank]
        if step.cutting:
            step.limits[rank] = (
                step.first_start + step.start_per_rank * rank + step.cut * step.cycle_actions
            )
        num_actions += step.limits[rank] - step.places[rank]
    return num_actions


cdef inline bint moved(double now, double before, double shift) noexcept nogil:
    """Whether a time is the earlier one moved by `shift`, or follows from others that are.

    A time that is not known at this cut will follow from those that are; its earlier counterpart
    may have become known since the earlier cut. Two states may differ by a relative 1e-12 and count
    as the same.
    """
    return now < 0.0 or fabs(now - before - shift) <= 1e-12 * shift


cdef inline double shift_of(const Step* step) noexcept nogil:
    """How much later the state at this cut is than that of the saved one."""
    return step.clocks[0].now - step.clocks[0].saved_now


cdef inline bint same_clocks(const Step* step) noexcept nogil:
    """Whether clocks and wires at this cut are those of the saved one moved by one shift."""
    cdef double shift = shift_of(step)
    cdef int64_t rank, link
    for rank in range(step.num_ranks):
        if not moved(step.clocks[rank].now, step.clocks[rank].saved_now, shift):
            return False
    for link in range(2 * step.num_ranks):
        if step.free[link] == 0.0 and step.saved_free[link] == 0.0:
            continue  # Never used.
        if not moved(step.free[link], step.saved_free[link], shift):
            return False
    return True


cdef inline bint same_messages(
    const Step* step, const double* times, bint posted, bint in_order
) noexcept nogil:
    """Whether the same holds for what is needed after the cut: messages under way, those with a
    time in `times`, and, if receives are `posted`, those that are posted already and the ticks by
    which the lowering places those to come.

    With `in_order` a rank needs the messages of a link in the order in which they are sent and
    received: behind one that is neither under way nor posted there is none.
    """
    cdef double shift = shift_of(step)
    cdef int64_t periods = step.cut - step.saved
    cdef int64_t back = periods * step.cycle_microbatches
    cdef int64_t back_actions = periods * step.cycle_actions
    cdef const double* arrived = step.arrived if times != step.arrived else NULL
    cdef const double* produced = step.produced
    cdef bint lowered = posted and step.ticks != NULL
    cdef int64_t tick_shift = 0
    cdef int64_t rank, at, last, place, code, row, microbatch, slot, now, before, links_left
    cdef bint[2] is_left
    cdef bint is_known, is_posted
    cdef const double* done
    if lowered:
        last = step.places[0] - 1
        if last < back_actions:
            return False  # Nothing was done by the saved cut.
        tick_shift = step.ticks[last] - step.ticks[last - back_actions]
    for rank in range(step.num_ranks):
        place = step.places[rank]
        done = step.done + rank * (step.width + 1) + 1
        if lowered:
            last = rank * step.width + place - 1
            if place <= back_actions:
                return False
            if step.ticks[last] - step.ticks[last - back_actions] != tick_shift:
                return False
        is_left[0] = is_left[1] = True
        links_left = 2
        for at in range(rank * step.width + place, rank * step.width + step.lengths[rank]):
            code = step.codes[at]
            row = step.kinds[kind_of(code)].input
            if row == no_input(step):
                continue
            microbatch = microbatch_of(code)
            slot = row + microbatch
            is_known = times[slot] >= 0.0
            is_posted = posted and step.posted_after[slot] < place
            if in_order and not is_known and not is_posted:
                links_left -= is_left[step.kinds[kind_of(code)].link & 1]
                is_left[step.kinds[kind_of(code)].link & 1] = False
                if links_left == 0:
                    break
            if is_known:
                if microbatch < back or not moved(times[slot], times[slot - back], shift):
                    return False
                if arrived != NULL and not moved(arrived[slot], arrived[slot - back], shift):
                    return False
                if produced != NULL and not moved(produced[slot], produced[slot - back], shift):
                    return False
                if (
                    lowered
                    and step.produced_tick[slot] - step.produced_tick[slot - back] != tick_shift
                ):
                    return False
            if is_posted:
                if microbatch < back:
                    return False
                now, before = step.posted_after[slot], step.posted_after[slot - back]
                if now < 0 or before < 0 or not moved(done[now], done[before], shift):
                    return False
    return True


cdef inline Status skip_cycles(Step* step) noexcept nogil:
    """Count the cycles left out as repeats of those since the saved cut, and play to the end.

    Their seconds are added to what ranks have spent and waited for.
    """
    cdef int64_t period = step.cut - step.saved
    cdef int64_t repeats = step.left_out // period
    cdef int64_t rank
    cdef Clock* clock
    if step.left_out % period != 0:
        return UNALIGNED
    for rank in range(step.num_ranks):
        clock = &step.clocks[rank]
        clock.spent += repeats * (clock.spent - clock.saved_spent)
        clock.exposed += repeats * (clock.exposed - clock.saved_exposed)
    step.late = repeats * shift_of(step)
    step.cutting = False
    return GO_ON


cdef inline Status next_cut(Step* step) noexcept nogil:
    """Save the state where it is time to, and aim at the next cut."""
    cdef int64_t rank, link
    cdef Clock* clock
    if step.saved == NONE or step.cut >= 2 * step.saved:
        # Brent's way to find a period of any length with one saved state.
        step.saved = step.cut
        for rank in range(step.num_ranks):
            clock = &step.clocks[rank]
            clock.saved_now, clock.saved_spent = clock.now, clock.spent
            clock.saved_exposed = clock.exposed
        for link in range(2 * step.num_ranks):
            step.saved_free[link] = step.free[link]
    step.cut += 1
    return GO_ON if step.cut <= step.last_cut else TOO_SHORT


cdef inline Status no_cut(Step* step) noexcept nogil:
    """Some action before the cut needs one after it: play on to the end."""
    step.cutting = False
    return GO_ON if step.left_out == 0 else TOO_SHORT
