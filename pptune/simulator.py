"""Plays an order of actions under given costs: when each action runs, and where the time goes."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pptune.errors import PlanError, UsageError
from pptune.executors import Executor
from pptune.schedules import Order
from pptune.schedules.action import Work
from pptune.schedules.compiled import compiled

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Hops:
    """Messages across each stage boundary in one direction. Arrays [num_stages - 1]: boundary s
    lies between stages s and s + 1. Boundaries inside one rank are ignored."""

    latency_s: Array
    wire_s: Array
    """Time the directed link between the two ranks is occupied by the message."""
    send_occupied_s: Array
    """Time the sender can't compute."""
    receive_occupied_s: Array

    @classmethod
    def pure_latency(cls, latency_s: float, num_stages: int) -> "Hops":
        size = max(num_stages - 1, 0)
        zero = np.zeros(size)
        return cls(
            latency_s=np.full(size, latency_s),
            wire_s=zero,
            send_occupied_s=zero,
            receive_occupied_s=zero,
        )


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Times of one micro-batch. Stage arrays have shape [num_stages]."""

    forward_s: Array
    backward_s: Array | None
    """Full backward, or None where the order splits it."""
    backward_input_s: Array | None = None
    backward_weight_s: Array | None = None
    overhead_s: Array
    """Added to every action and reported apart; by Work, shape [4]."""
    forward_hops: Hops
    backward_hops: Hops

    @classmethod
    def uniform(
        cls,
        *,
        num_ranks: int,
        num_chunks: int,
        forward_s: float,
        backward_s: float | None = None,
        backward_input_s: float | None = None,
        backward_weight_s: float | None = None,
        transfer_s: float = 0.0,
        overhead_s: float = 0.0,
    ) -> "Costs":
        """Equal stages. Times are for one micro-batch on one rank's whole share of the layers, of
        which each stage gets 1 / num_chunks; every hop takes `transfer_s`, overlapping with
        anything."""
        num_stages = num_ranks * num_chunks

        def share(seconds: float | None) -> Array | None:
            return None if seconds is None else np.full(num_stages, seconds / num_chunks)

        forward = share(forward_s)
        assert forward is not None
        if backward_s is None and backward_input_s is not None and backward_weight_s is not None:
            backward_s = backward_input_s + backward_weight_s
        hops = Hops.pure_latency(transfer_s, num_stages)
        return cls(
            forward_s=forward,
            backward_s=share(backward_s),
            backward_input_s=share(backward_input_s),
            backward_weight_s=share(backward_weight_s),
            overhead_s=np.full(4, overhead_s),
            forward_hops=hops,
            backward_hops=hops,
        )


@dataclass(frozen=True, kw_only=True)
class Spans:
    """Every action of the step, and its incoming message. Arrays [num_actions], by rank and then
    in each rank's order."""

    rank: NDArray[np.int32]
    work: NDArray[np.int8]
    stage: NDArray[np.int32]
    microbatch: NDArray[np.int32]
    start_s: Array
    end_s: Array
    sent_s: Array
    """When the message this action waited for left its sender; NaN where it needs none."""
    arrived_s: Array


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """One step. Arrays have one entry per rank; on every rank busy, bubble, exposed transfer and
    overhead sum to the step time, and so do warmup, steady and cooldown."""

    step_time_s: float
    longest_rank_span_s: float
    busy_s: Array
    bubble_s: Array
    """Waiting until the producer had finished, and waiting for the step to end."""
    exposed_transfer_s: Array
    """Waiting after the producer had finished, and the rank's own time in sends and receives."""
    overhead_s: Array
    warmup_s: Array
    """Until the rank's first backward starts or its last forward ends, whichever is first."""
    steady_s: Array
    cooldown_s: Array
    """After the rank's last forward."""
    extrapolated: bool
    spans: Spans | None


def simulate(
    order: Order, costs: Costs, executor: Executor = Executor.IDEAL, *, spans: bool = False
) -> Simulation:
    """The step that `order` takes under `costs` and the waits of `executor`.

    Raises PlanError where the order deadlocks and UsageError where costs are missing, negative or
    NaN.
    """
    duration = _durations(order, costs)
    num_actions = int(order.offsets[-1])
    end = np.full(num_actions, -1.0)
    start = np.empty(num_actions)
    sent = np.full(num_actions, np.nan)
    arrived = np.full(num_actions, np.nan)
    per_rank = np.zeros((8, order.num_ranks))
    hops = np.zeros((8, order.num_stages))
    for row, side in ((0, costs.forward_hops), (4, costs.backward_hops)):
        for at, values in enumerate(
            (side.latency_s, side.wire_s, side.send_occupied_s, side.receive_occupied_s)
        ):
            hops[row + at, : order.num_stages - 1] = values
    rank_of = np.array(
        [
            2 * order.num_ranks - 1 - stage
            if order.placement == "v" and stage >= order.num_ranks
            else stage % order.num_ranks
            for stage in range(order.num_stages)
        ],
        np.int64,
    )
    finished = _play(
        order.works, order.stages, order.microbatches, order.offsets, rank_of,
        order.num_microbatches, duration, costs.overhead_s, hops, start, end, sent, arrived,
        per_rank,
    )  # fmt: skip
    if not finished:
        raise PlanError("the order deadlocks")
    step = float(per_rank[0].max())
    overhead = per_rank[2]
    busy = per_rank[1] - overhead
    exposed = per_rank[3]
    warm_end = np.minimum(per_rank[5], per_rank[6])
    rank = np.repeat(np.arange(order.num_ranks, dtype=np.int32), np.diff(order.offsets))
    return Simulation(
        step_time_s=step,
        longest_rank_span_s=float((per_rank[0] - per_rank[4]).max()),
        busy_s=busy,
        bubble_s=step - busy - overhead - exposed,
        exposed_transfer_s=exposed,
        overhead_s=overhead,
        warmup_s=warm_end,
        steady_s=per_rank[6] - warm_end,
        cooldown_s=step - per_rank[6],
        extrapolated=False,
        spans=Spans(
            rank=rank,
            work=order.works,
            stage=order.stages,
            microbatch=order.microbatches,
            start_s=start,
            end_s=end,
            sent_s=sent,
            arrived_s=arrived,
        )
        if spans
        else None,
    )


def _durations(order: Order, costs: Costs) -> Array:
    """Time of one action by work and stage, overhead included. Shape [4, num_stages]."""
    duration = np.zeros((4, order.num_stages))
    present = np.unique(order.works)
    for work, values in (
        (Work.FORWARD, costs.forward_s),
        (Work.BACKWARD, costs.backward_s),
        (Work.BACKWARD_INPUT, costs.backward_input_s),
        (Work.BACKWARD_WEIGHT, costs.backward_weight_s),
    ):
        if values is None:
            if work in present:
                raise UsageError(f"the order has {work.name.lower()} actions, but no times for it")
            continue
        bad = np.flatnonzero(~(np.asarray(values) >= 0))
        if bad.size:
            stage = int(bad[0])
            raise UsageError(
                f"{work.name.lower()} time of stage {stage} is {values[stage]}; "
                "give a time of 0 or more"
            )
        duration[work] = values + costs.overhead_s[work]
    return duration


@compiled(
    "boolean(int8[::1],int32[::1],int32[::1],int64[::1],int64[::1],int64,float64[:,::1],"
    "float64[::1],float64[:,::1],float64[::1],float64[::1],float64[::1],float64[::1],"
    "float64[:,::1])"
)
def _play(
    works: Any, stages: Any, microbatches: Any, offsets: Any, rank_of: Any, num_microbatches: int,
    duration: Any, overhead: Any, hops: Any, start: Any, end: Any, sent: Any, arrived: Any,
    per_rank: Any,
) -> bool:  # fmt: skip
    num_ranks = offsets.size - 1
    num_stages = rank_of.size
    produced = np.full((2, num_microbatches, num_stages), -1.0)
    left = np.full((2, num_microbatches, num_stages), -1.0)
    arrival = np.full((2, num_microbatches, num_stages), -1.0)
    link_free = np.zeros((num_ranks, num_ranks))
    at_of = offsets[:-1].copy()
    first_backward = np.full(num_ranks, -1.0)
    remaining = offsets[num_ranks]
    while remaining > 0:
        progress = False
        for rank in range(num_ranks):
            now = per_rank[0, rank]
            while at_of[rank] < offsets[rank + 1]:
                at = at_of[rank]
                work = works[at]
                stage = stages[at]
                microbatch = microbatches[at]
                source = -1
                kind = 0
                if work == 0:
                    source = stage - 1
                elif work != 3:
                    kind = 1
                    if stage + 1 < num_stages:
                        source = stage + 1
                if source >= 0 and rank_of[source] != rank:
                    t = arrival[kind, microbatch, source]
                    if t < 0.0:
                        break
                    ready = produced[kind, microbatch, source]
                    arrived[at] = t
                    sent[at] = left[kind, microbatch, source]
                    if t > now:
                        per_rank[3, rank] += t - max(now, ready)
                        now = t
                    occupied = hops[7, stage] if kind == 1 else hops[3, source]
                    per_rank[3, rank] += occupied
                    now += occupied
                start[at] = now
                if at == offsets[rank]:
                    per_rank[4, rank] = now
                if work != 0 and first_backward[rank] < 0.0:
                    first_backward[rank] = now
                    per_rank[5, rank] = now
                now += duration[work, stage]
                end[at] = now
                per_rank[1, rank] += duration[work, stage]
                per_rank[2, rank] += overhead[work]
                if work == 0:
                    per_rank[6, rank] = now
                target = -1
                if work == 0:
                    if stage + 1 < num_stages:
                        target = stage + 1
                elif work != 3:
                    target = stage - 1
                if target >= 0 and rank_of[target] != rank:
                    boundary = min(stage, target)
                    produced[kind, microbatch, stage] = now
                    occupied = hops[4 * kind + 2, boundary]
                    per_rank[3, rank] += occupied
                    now += occupied
                    leave = max(now, link_free[rank, rank_of[target]])
                    link_free[rank, rank_of[target]] = leave + hops[4 * kind + 1, boundary]
                    left[kind, microbatch, stage] = leave
                    arrival[kind, microbatch, stage] = (
                        leave + hops[4 * kind + 1, boundary] + hops[4 * kind, boundary]
                    )
                at_of[rank] += 1
                remaining -= 1
                progress = True
            per_rank[0, rank] = now
        if not progress:
            return False
    return True
