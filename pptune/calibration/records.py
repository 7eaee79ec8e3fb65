"""What every rank recorded of its steps, as overheads and constants."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from statistics import median

import numpy as np

from pptune.calibration.runs import CalibrationRun
from pptune.cost_model import CostModel
from pptune.cost_model.memory import rank_parameter_bytes
from pptune.measured_step import MeasuredStep, producer_end_s
from pptune.measurement import Measurement
from pptune.plan import Plan
from pptune.profiles import Overhead, Profile, StepConstants
from pptune.simulator import Costs


def overhead_from_records(
    model: CostModel, runs: Sequence[CalibrationRun], *, inside: bool
) -> Overhead:
    """What lies between a rank's actions and, where `inside`, what they take beyond the layers.

    Where layer times are those of the runs themselves, what the call of a stage takes was measured
    by itself, and the rest of an action's own time is chance: one executor's plans ran while the
    machine was slower than during another's.
    """
    extras: dict[str, list[float]] = {"F": [], "B": []}
    hops: list[float] = []
    edges: list[float] = []
    for run in runs:
        costs = model.costs(run.plan)
        for step in run.steps:
            for rank in range(run.plan.num_ranks):
                for work, extra in _extras(run.plan, step, rank, costs, inside=inside):
                    extras[work].append(extra)
                edges.append(_edges_s(step, rank))
            hops += _hops_s(run.plan, step, costs)
    calls_s = {work: 0.0 if inside else call_s(model.profile, work) for work in extras}
    return Overhead(
        forward_s=max(0.0, centre(extras["F"]) + calls_s["F"]),
        backward_s=max(0.0, centre(extras["B"]) + calls_s["B"]),
        step_s=max(0.0, centre(edges)),
        hop_s=max(0.0, centre(hops)),
    )


def step_constants(profile: Profile, runs: Sequence[CalibrationRun]) -> StepConstants:
    """Optimizer and zero-grad: a line over the bytes of a rank's parameters."""
    sizes: list[float] = []
    seconds: list[float] = []
    for run in runs:
        parameter_bytes = rank_parameter_bytes(run.plan, profile)
        for rank in range(run.plan.num_ranks):
            sizes.append(0.0 if parameter_bytes is None else float(parameter_bytes[rank]))
            seconds.append(median(step.update_s[rank] for step in run.steps))
    if not seconds:
        return StepConstants()
    if min(sizes) == max(sizes) or max(sizes) == 0.0:
        return StepConstants(fixed_s=median(seconds))
    slope = max(0.0, float(np.polyfit(sizes, seconds, 1)[0]))
    fixed = median(second - slope * size for size, second in zip(sizes, seconds, strict=True))
    if fixed < 0:
        slope = median(second / size for size, second in zip(sizes, seconds, strict=True) if size)
        fixed = 0.0
    return StepConstants(fixed_s=fixed, per_parameter_byte_s=slope)


def _extras(
    plan: Plan, step: MeasuredStep, rank: int, costs: Costs, *, inside: bool
) -> Iterator[tuple[str, float]]:
    """(F or B, extra seconds) of each action of `rank` but its first; those within the action only
    where `inside`."""
    waits = list(step.waits[rank]) if step.waits else []
    actions = step.actions[rank]
    for before, action in itertools.pairwise(actions):
        gap = action.start_s - before.end_s - _waited(waits, before.end_s, action.start_s)
        extra_s = gap - _occupied_s(costs, plan, action.stage, action.work)
        if inside:
            extra_s += action.end_s - action.start_s - bare_s(costs, action.stage, action.work)
        yield "F" if action.work == "F" else "B", extra_s


def call_s(profile: Profile, work: str) -> float:
    """Seconds that calling a stage takes forward (F) or backward (B), whatever its layers: layer
    times are without it. 0 where it was not measured."""
    block = profile.layer("block")
    if block is None:
        return 0.0
    name = "call_forward" if work == "F" else "call_backward"
    return centre([value for point in block.points for value in point.samples_s.get(name, ())])


def bare_s(costs: Costs, stage: int, work: str) -> float:
    """The time of an action's layers alone."""
    seconds = {
        "F": costs.forward_s, "B": costs.backward_s, "I": costs.backward_input_s,
        "W": costs.backward_weight_s,
    }[work]  # fmt: skip
    assert seconds is not None
    return float(seconds[stage])


def _occupied_s(costs: Costs, plan: Plan, stage: int, work: str) -> float:
    """What the links already charge the rank for posting this action's messages."""
    if work == "W":
        return 0.0
    hops = costs.forward_hops if work == "F" else costs.backward_hops
    out_of, into = (stage, stage - 1) if work == "F" else (stage - 1, stage)
    seconds = 0.0
    for boundary, own in ((out_of, hops.send_occupied_s), (into, hops.receive_occupied_s)):
        crosses = 0 <= boundary < plan.num_stages - 1 and plan.rank_of(boundary) != plan.rank_of(
            boundary + 1
        )
        seconds += float(own[boundary]) if crosses else 0.0
    return seconds


def _waited(waits: Iterable[tuple[float, float]], start_s: float, end_s: float) -> float:
    """Seconds of `waits` inside the interval."""
    return sum(max(0.0, min(end, end_s) - max(start, start_s)) for start, end in waits)


def _edges_s(step: MeasuredStep, rank: int) -> float:
    """What a step costs before its first and after its last action, less waits."""
    actions = step.actions[rank]
    begin, end = actions[0].start_s, actions[-1].end_s
    done = step.rank_s[rank] - step.update_s[rank]
    waits = list(step.waits[rank]) if step.waits else []
    return begin + max(0.0, done - end) - _waited(waits, 0.0, begin) - _waited(waits, end, done)


def _hops_s(plan: Plan, step: MeasuredStep, costs: Costs) -> list[float]:
    """How much later than the link's own time a waiting rank goes on, per message."""
    found = []
    ends = producer_end_s(step, plan)
    for rank, row in enumerate(step.actions):
        waits = step.waits[rank] if step.waits else ()
        for start, end in waits:
            consumer = next((action for action in row if action.start_s >= end), None)
            if consumer is None or consumer.work == "W":
                continue
            name = "F" if consumer.work == "F" else "B"
            produced = ends.get((consumer.stage, name, consumer.microbatch))
            if produced is not None and start < produced < end:
                found.append(end - produced - _link_s(costs, consumer.stage, name))
    return found


def _link_s(costs: Costs, stage: int, name: str) -> float:
    hops = costs.forward_hops if name == "F" else costs.backward_hops
    boundary = stage - 1 if name == "F" else stage
    return float(hops.latency_s[boundary] + hops.wire_s[boundary])


def centre(values: Sequence[float]) -> float:
    return Measurement(samples_s=tuple(values)).centre_s if values else 0.0
