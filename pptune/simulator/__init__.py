"""Plays an order of actions under given costs: when each action runs, and where the time goes."""

import msgspec
import numpy as np
from numpy.typing import NDArray

from pptune.errors import PlanError, UsageError
from pptune.executors import Executor
from pptune.schedules import Action, Order, Work
from pptune.schedules.deadlock import deadlock
from pptune.simulator.costs import Costs, Hops
from pptune.simulator.step import Stuck, play

__all__ = ["Costs", "Hops", "Simulation", "Spans", "simulate"]

Floats = NDArray[np.float64]


class Spans(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Every action of the step, and its incoming message. Arrays [num_actions], by rank and then
    in each rank's order."""

    rank: NDArray[np.int32]
    work: NDArray[np.int8]
    stage: NDArray[np.int32]
    microbatch: NDArray[np.int32]
    start_s: Floats
    end_s: Floats
    sent_s: Floats
    """When the message this action waited for left its sender; NaN where it needs none."""
    arrived_s: Floats


class Simulation(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One step. Arrays have one entry per rank; on every rank busy, bubble, exposed transfer and
    overhead sum to the step time, and so do warmup, steady and cooldown."""

    step_time_s: float
    longest_rank_span_s: float
    """The longest of the ranks' spans from first action to last."""
    busy_s: Floats
    bubble_s: Floats
    """Waiting until the producer had finished, and waiting for the step to end."""
    exposed_transfer_s: Floats
    """Waiting after the producer had finished, and the rank's own time in sends and receives."""
    overhead_s: Floats
    warmup_s: Floats
    """Until the rank's first backward starts or its last forward ends, whichever is first."""
    steady_s: Floats
    cooldown_s: Floats
    """After the rank's last forward."""
    extrapolated: bool
    """Whether a repeating part of the step was counted instead of played."""
    spans: Spans | None


def simulate(
    order: Order, costs: Costs, executor: Executor = Executor.IDEAL, *, spans: bool = False
) -> Simulation:
    """The step that `order` takes under `costs` and the waits of `executor`.

    Raises PlanError where the order deadlocks and UsageError where costs are missing, negative or
    NaN.
    """
    _check(order, costs)
    try:
        played = play(order, costs, executor, spans)
    except Stuck as stuck:
        raise _deadlock(order, stuck) from None
    busy, bubble, exposed, overheads, warmup, steady, cooldown = played.result
    return Simulation(
        step_time_s=played.step_time_s,
        longest_rank_span_s=played.longest_rank_span_s,
        busy_s=busy,
        bubble_s=bubble,
        exposed_transfer_s=exposed,
        overhead_s=overheads,
        warmup_s=warmup,
        steady_s=steady,
        cooldown_s=cooldown,
        extrapolated=played.extrapolated,
        spans=None if played.spans is None else _spans(order, played.spans),
    )


def _check(order: Order, costs: Costs) -> None:
    """Raise UsageError where the costs are for other stages or lack a kind of backward."""
    if len(costs.forward_s) != order.num_stages:
        raise UsageError(
            f"the costs are for {len(costs.forward_s)} stages, but the order has {order.num_stages}"
        )
    if order.backwards != "split" and costs.backward_s is None:
        raise UsageError(
            "the order has full backwards, but from stage 0 on no times for them are given; "
            "give backward times"
        )
    if order.backwards != "whole" and (
        costs.backward_input_s is None or costs.backward_weight_s is None
    ):
        raise UsageError(
            "the order plays input and weight parts of backwards, but from stage 0 on times for "
            "them are missing; give both parts"
        )


def _deadlock(order: Order, stuck: Stuck) -> PlanError:
    def waits_for(rank: int, action: Action) -> str | None:
        """What a rank waits for whose next action has its input."""
        message = stuck.pending[rank]
        if message is not None:
            stage, work, microbatch = message
            return f"waits for the message of {Action(stage, Work(work), microbatch)} to arrive"
        if stuck.takes_turns:
            return "waits for its message, which is not received in the order of sending"
        return None

    return deadlock(order, stuck.places, waits_for)


def _spans(order: Order, times: Floats) -> Spans:
    ranks = np.arange(order.num_ranks, dtype=np.int32)
    start_s, end_s, sent_s, arrived_s = times
    return Spans(
        rank=np.repeat(ranks, np.diff(order.offsets)),
        work=order.works,
        stage=order.stages,
        microbatch=order.microbatches,
        start_s=start_s,
        end_s=end_s,
        sent_s=sent_s,
        arrived_s=arrived_s,
    )
