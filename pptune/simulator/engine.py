"""Drives the compiled loops: plays as little of an order as its repetition allows."""

import numpy as np
from numpy.typing import NDArray

from pptune.errors import PlanError, UsageError
from pptune.executors import WAITS, Executor, Receive
from pptune.schedules.action import Action, Work
from pptune.schedules.deadlock import deadlock
from pptune.schedules.order import MICROBATCH_MASK, STAGE_SHIFT, WORK_MASK, Order
from pptune.simulator.arrays import (
    CUT,
    CUTTING,
    DEADLOCK,
    DONE,
    HALFWAY,
    NAME_SHIFT,
    NONE,
    NUM_CLOCK,
    NUM_CYCLE,
    NUM_KIND,
    NUM_SENDS,
    PENDING,
    SAVED,
    STARTED,
    UNALIGNED,
)
from pptune.simulator.costs import Costs
from pptune.simulator.finish import (
    ARRIVED_AND_PRODUCED,
    ARRIVED_ONLY,
    NUM_RESULTS,
    SENT_AND_ARRIVED,
    finish,
)
from pptune.simulator.kinds import BY_EITHER, BY_RECEIVER, BY_SENDER, fill_kinds
from pptune.simulator.play import play
from pptune.simulator.posts import posts_of
from pptune.simulator.room import Room, give_back, take_room

Floats = NDArray[np.float64]

_GROWTH = 4
"""By how much the played part of an order grows while its state has not come back."""
_NO_POSTS = (np.empty(0, np.int32),) * 3


class Step:
    """A step being played: the arrays of the compiled loops, see arrays.py."""

    def __init__(self, order: Order, costs: Costs, executor: Executor) -> None:
        """Raises UsageError where costs are missing, impossible or for other stages."""
        self.table, self.overhead, self.wired = costs.table, costs.overhead, costs.wired
        _check(order, costs)
        num_ranks = order.num_ranks
        self.order = self.played = order
        """The order asked for, and the part of it that is played."""
        self.room: Room | None = None
        self.executor = executor
        self.started_by = _started_by(order, executor)
        self.clocks = np.zeros((num_ranks, NUM_CLOCK))
        self.places = np.zeros(num_ranks, np.int64)
        self.limits = np.empty(num_ranks, np.int64)
        self.free = np.zeros((2, 2 * num_ranks + 1))
        self.kinds = np.empty(4 * order.num_stages * NUM_KIND, np.int64)
        self.floats = self.kinds.view(np.float64)
        self.cycle = np.zeros(NUM_CYCLE, np.int64)
        if self.started_by == BY_EITHER:
            self.queues = np.full((2 * num_ranks, 2), NONE)
            self.sends = np.full((num_ranks, NUM_SENDS), NONE)
            self.sends[:, [HALFWAY, STARTED]] = 0

    def play(self, *, whole: bool) -> bool:
        """Play to the end; with `whole`, every action. False for a deadlock."""
        cycle = self.order.cycle
        # Which messages have started is no state that cuts compare.
        whole = whole or WAITS[self.executor].one_at_a_time
        count = 0 if whole else _first_count(self.order, two_sided=self.started_by != BY_SENDER)
        cuts = np.array((count > 0, 0, NONE))
        while True:
            room = self._make_room(count)
            status = self._run(room, cuts)
            if status in (DONE, DEADLOCK):
                return status == DONE
            assert cycle is not None
            count = _next_count(cycle.num_cycles, count, cuts, found=status == UNALIGNED)
            if count == cycle.num_cycles:
                cuts[CUTTING] = 0

    def _make_room(self, count: int) -> Room:
        """Set up the order with `count` cycles, or the whole one for 0, keeping what was played."""
        order, shorter, before = self.order, self.room, self.played
        if count:
            assert order.cycle is not None
            self.played = order.with_cycles(count)
            # What a rank posts at a cut looks one cycle ahead: at the last cut, into the cooldown.
            last = count - (self.started_by != BY_SENDER)
            self.cycle[:] = *order.cycle[:4], last, order.cycle.num_cycles - count
        self.room = room = take_room(self.played, self.started_by, self.wired)
        if shorter is not None:
            room.take_over(shorter)
            give_back(before, shorter)
        fill_kinds(
            order.num_ranks, room.stride, order.rank_of_stage, self.table, self.overhead,
            self.started_by, self.kinds, self.floats,
        )  # fmt: skip
        return room

    def leave(self) -> None:
        """Give the arrays back; the step can tell no more."""
        if self.room is not None:
            give_back(self.played, self.room)
            self.room = None

    def _run(self, room: Room, cuts: NDArray[np.int64]) -> int:
        """Play on until the end or until more of the order is needed."""
        common = (*self.played.coded, self.kinds, self.floats, room.stride)
        if self.started_by == BY_SENDER:
            status: int = play(
                *common, self.wired, False, self.clocks, self.places, room.arrived, room.produced,
                self.free, room.done, *_NO_POSTS, self.cycle, cuts, self.limits,
            )  # fmt: skip
            return status
        posts = posts_of(self.played, self.executor)
        placed = (posts.posted_after, posts.ticks, posts.produced_tick)
        if self.started_by == BY_RECEIVER:
            status = play(
                *common, True, True, self.clocks, self.places, room.sent, room.arrived, self.free,
                room.done, *placed, self.cycle, cuts, self.limits,
            )  # fmt: skip
        else:
            from pptune.simulator.two_sided import play_two_sided

            status = play_two_sided(
                *common, WAITS[self.executor].pairs_send_together, self.clocks, self.places,
                self.sends, room.sent, room.arrived, room.produced, self.free, room.done,
                room.following, self.queues, posts.waits, *placed, posts.streams, self.cycle, cuts,
                self.limits,
            )  # fmt: skip
        return status

    def finish(self) -> tuple[float, float, Floats]:
        """The step time, the longest span of a rank, and the result that finish.py describes."""
        order, room = self.order, self.room
        assert room is not None
        first, second, meaning = room.arrived, room.produced, ARRIVED_ONLY
        if self.started_by == BY_RECEIVER:
            first, second, meaning = room.sent, room.arrived, SENT_AND_ARRIVED
        elif room.produced.size:
            meaning = ARRIVED_AND_PRODUCED
        result = np.empty((NUM_RESULTS, order.num_ranks))
        step, span = finish(
            *self.played.coded, order.rank_of_stage, order.num_microbatches, self.table,
            self.overhead, self.kinds, self.floats, self.clocks, first, second, meaning, self.cycle,
            result,
        )  # fmt: skip
        return step, span, result

    def spans(self) -> Floats:
        """Start and end of every action, and when its message was sent and arrived; see spans.py.
        The step must have been played whole."""
        from pptune.simulator.spans import fill_spans

        coded, room = self.played.coded, self.room
        assert room is not None
        kinds = np.empty_like(self.kinds)
        floats = kinds.view(np.float64)
        fill_kinds(
            self.order.num_ranks, room.stride, self.order.rank_of_stage, self.table, self.overhead,
            BY_RECEIVER, kinds, floats,
        )  # fmt: skip
        waits = np.empty(0, np.int8)
        if self.started_by == BY_EITHER:
            waits = posts_of(self.played, self.executor).waits
        spans = np.empty((4, int(coded.lengths.sum())))
        fill_spans(
            *coded, kinds, floats, self.table, self.overhead, room.arrived, waits,
            WAITS[self.executor].pairs_send_together, room.stride, spans,
        )  # fmt: skip
        return spans

    def deadlock(self) -> PlanError:
        """The error for the deadlock that was met."""
        return deadlock(self.played, self.places.tolist(), self._stuck_on)

    def _stuck_on(self, rank: int, action: Action) -> str | None:
        """What a rank waits for whose next action has its input."""
        if self.started_by != BY_EITHER:
            return None
        name = int(self.sends[rank, PENDING])
        if name == NONE:
            return "waits for its message, which is not received in the order of sending"
        kind, microbatch = name >> NAME_SHIFT, name & MICROBATCH_MASK
        stage, work = kind // NUM_KIND >> STAGE_SHIFT, kind // NUM_KIND & WORK_MASK
        return f"waits for the message of {Action(stage, Work(work), microbatch)} to arrive"


def _started_by(order: Order, executor: Executor) -> int:
    """Which loop plays the order: see kinds.py for the names."""
    rules = WAITS[executor]
    if rules.receive is Receive.BEFORE_STEP:
        return BY_SENDER
    # With generated orders on a loop of 3 ranks and more, a link carries one kind of message in the
    # order in which both of its ends deal with them.
    simple = order.placement == "loop" and (
        order.num_ranks != 2 or order.num_stages == order.num_ranks
    )
    generated = order.with_microbatches is not None
    if rules.receive is Receive.LOWERED and not rules.one_at_a_time and simple and generated:
        return BY_RECEIVER
    return BY_EITHER


def _check(order: Order, costs: Costs) -> None:
    """Raise UsageError where the costs are for other stages or lack a kind of backward."""
    if len(costs.forward_s) != order.num_stages:
        raise UsageError(
            f"the costs are for {len(costs.forward_s)} stages, but the order has {order.num_stages}"
        )
    whole, parts = order.backwards in ("whole", "mixed"), order.backwards in ("split", "mixed")
    if whole and costs.backward_s is None:
        raise UsageError(
            "the order has full backwards, but from stage 0 on no times for them are given; "
            "give backward times"
        )
    if parts and (costs.backward_input_s is None or costs.backward_weight_s is None):
        raise UsageError(
            "the order plays input and weight parts of backwards, but from stage 0 on times for "
            "them are missing; give both parts"
        )


def _first_count(order: Order, *, two_sided: bool) -> int:
    """Cycles to play before the order is made longer, or 0 to play it whole."""
    if order.cycle is None:
        return 0
    # Where waits look ahead, the last cut cannot be compared.
    count = order.cycle.num_settling + two_sided
    return count if 4 * count <= order.cycle.num_cycles else 0


def _next_count(total: int, count: int, cuts: NDArray[np.int64], *, found: bool) -> int:
    """How many cycles to play after `count` were not enough; `total` for all of them."""
    if found:
        return count + (total - count) % int(cuts[CUT] - cuts[SAVED])
    longer = count * _GROWTH
    return total if cuts[CUTTING] == 0 or 2 * longer > total else longer
