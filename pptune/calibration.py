"""What the runtime adds to bare layer times, from short runs of the real runtime.

An action's extra time is what lies between the end of the action before it and its own end, less
the time it waited for messages and less the bare time of its layers. It can only be seen in the
runtime itself. Plans that calibrated never count as evidence of accuracy: their labels are kept in
the profile.
"""

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import msgspec
import numpy as np

from pptune.cost_model import CostModel, Setting
from pptune.cost_model.memory import rank_parameter_bytes
from pptune.executors import Executor
from pptune.measured_step import MeasuredStep, Visit, producer_end_s
from pptune.measurement import Measurement
from pptune.plan import SINGLE_STAGE, V_SHAPED, Plan, make_plan, placement_of
from pptune.profiles import Layer, LayerPoint, Overhead, Profile, StepConstants
from pptune.targets import illegal, parse_target

_TORCH = parse_target("torch")
_SETTING = Setting(target=_TORCH)

_MIN_VISITS, _MAX_VISITS, _STEPS_PER_VISIT = 1, 12, 3

_CORRECTION_ROUNDS = 3

_LEAST_LIMIT_S = 0.2e-3
"""Added to the largest correction, for runtimes whose recorded overhead is next to nothing."""

_BURST_FACTORS = (0.8, 1.1)
"""Median steps are not further than this from the sums of mean times."""

_ALL_SIZES_UP_TO = 2
"""Plans with at most this many chunks are run at every measured micro-batch size."""

_MAX_EXTRA_S = 10e-3
"""No runtime needs more than this per action; the search for the last correction ends there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationRun:
    """A plan's steps, with records."""

    plan: Plan
    steps: tuple[MeasuredStep, ...]

    @property
    def step_s(self) -> float:
        return median(step.step_s for step in self.steps)


def calibration_plans(
    profile: Profile,
    num_ranks: int,
    *,
    schedules: Sequence[str] = ("1f1b", "interleaved"),
    avoid: Iterable[Plan] = (),
) -> list[Plan]:
    """Small plans that show each executor at few and many actions, small and large micro-batches.

    None of them is in `avoid`, so that those plans stay free to be evidence.
    """
    sizes = sorted(
        point.microbatch_size
        for layer in profile.layers
        if layer.kind == "block" and layer.recompute == "none"
        for point in layer.points
        if point.status != "oom"
    )
    avoided = {plan.label for plan in avoid}
    model = CostModel(profile, _SETTING)
    plans = []
    for schedule in schedules:
        for chunks in _calibration_chunks(schedule):
            if num_ranks * chunks > profile.model.num_layers:
                continue
            # Every size where one executor's actions are longest, the smallest elsewhere.
            for size in sizes if chunks <= _ALL_SIZES_UP_TO else sizes[:1]:
                plan = _first_free(model, schedule, num_ranks, chunks, size, avoided)
                if plan is not None:
                    plans.append(plan)
    return plans


def _calibration_chunks(schedule: str) -> tuple[int, ...]:
    if schedule in SINGLE_STAGE:
        return (1,)
    return (2,) if schedule in V_SHAPED else (2, 4)


def _first_free(
    model: CostModel, schedule: str, num_ranks: int, chunks: int, size: int, avoided: set[str]
) -> Plan | None:
    """The plan with the fewest micro-batches, above P, that is legal and not to be avoided."""
    layers = model.balanced_layers(
        num_ranks, chunks, placement=placement_of(schedule), microbatch_size=size
    )
    for microbatches in range(num_ranks + 1, 4 * num_ranks + 4):
        plan = make_plan(
            schedule=schedule,  # type: ignore[arg-type]
            num_ranks=num_ranks,
            num_chunks=chunks,
            microbatch_size=size,
            num_microbatches=microbatches,
            layers_per_stage=layers,
        )
        if plan.label not in avoided and illegal(plan, _TORCH) is None:
            return plan
    return None


def run_calibration(
    plans: Sequence[Plan],
    run: Callable[..., Visit],
    *,
    budget_s: float,
    on_visit: Callable[[float, Plan], None],
    clock: Callable[[], float] = time.monotonic,
) -> list[CalibrationRun]:
    """Visit the plans in turn until the budget ends, each at least twice. Raises RankFailure.

    `on_visit` is told the share of the budget that is gone.
    """
    gathered: dict[str, list[MeasuredStep]] = {plan.label: [] for plan in plans}
    started = clock()
    for number in range(_MAX_VISITS):
        for plan in plans if number % 2 == 0 else list(reversed(plans)):
            spent_s = clock() - started
            if number >= _MIN_VISITS and spent_s > budget_s:
                break
            on_visit(min(1.0, spent_s / budget_s), plan)
            gathered[plan.label] += run(plan, steps=_STEPS_PER_VISIT, memory=False).steps
    return [CalibrationRun(plan=plan, steps=tuple(gathered[plan.label])) for plan in plans]


def apply_calibration(
    profile: Profile, runs: Sequence[CalibrationRun], *, stages_compute: bool = True
) -> Profile:
    """The profile with layer times as they are inside the pipeline, overheads and step constants,
    all taken from `runs`."""
    if stages_compute:  # a wait takes what it was given, wherever it runs
        profile = in_pipeline(profile, runs)
    bare = msgspec.structs.replace(profile, overheads={}, step_constants=None)
    model = CostModel(bare, _SETTING)
    by_executor: dict[Executor, list[CalibrationRun]] = {}
    for run in runs:
        by_executor.setdefault(model.executor(run.plan), []).append(run)
    constants = _step_constants(profile, runs)
    recorded = {
        executor: _overhead_from_records(model, own) for executor, own in by_executor.items()
    }
    if stages_compute:
        profile = _without_bursts(profile, constants, recorded, runs)
        bare = msgspec.structs.replace(profile, overheads={}, step_constants=None)
    overheads = dict(profile.overheads)
    for executor, own in by_executor.items():
        first = recorded[executor]
        steps_s = {run.plan: run.step_s for run in own}
        # A correction as large as what was recorded is noise, not overhead.
        limit_s = _LEAST_LIMIT_S + max(first.forward_s, first.backward_s)
        overheads[executor] = _corrected(bare, constants, executor, first, steps_s, limit_s)
    labels = {*profile.calibration_plans, *(run.plan.label for run in runs)}
    return msgspec.structs.replace(
        profile,
        overheads=overheads,
        step_constants=constants,
        calibration_plans=tuple(sorted(labels)),
    )


def in_pipeline(profile: Profile, runs: Sequence[CalibrationRun]) -> Profile:
    """The profile with its layer times scaled to what they take inside a running pipeline.

    Caches, message threads and clocks differ between layers timed by themselves and the same layers
    in the pipeline. One factor per micro-batch size and direction, the summed time of all stages'
    actions over the summed layer times, keeps the ratios between kinds of layer.
    """
    bare = msgspec.structs.replace(
        profile, overheads={}, step_constants=None, interference_ratio=None
    )
    model = CostModel(bare, _SETTING)
    totals: dict[tuple[int, str], tuple[float, float]] = {}
    for run in runs:
        costs = model.costs(run.plan)
        for (stage, work), seconds in _action_times(run).items():
            key = (run.plan.microbatch_size, "F" if work == "F" else "B")
            measured, layers = totals.get(key, (0.0, 0.0))
            totals[key] = (measured + _centre(seconds), layers + _bare_s(costs, stage, work))
    ratios = {key: measured / layers for key, (measured, layers) in totals.items() if layers > 0}
    return msgspec.structs.replace(
        profile,
        layers=tuple(_scaled(layer, ratios) for layer in profile.layers),
        # Messages moved while those actions ran: their effect is in the times now.
        interference_ratio=0.0,
    )


def _without_bursts(
    profile: Profile,
    constants: StepConstants,
    overheads: Mapping[Executor, Overhead],
    runs: Sequence[CalibrationRun],
) -> Profile:
    """`profile` with all layer times scaled by the one factor that fits the median steps best.

    A burst from elsewhere slows many actions of one step: it is in their means, not in the median
    step that a plan is judged by. What it adds grows with compute, not with the number of actions.
    """

    def scaled(factor: float) -> Profile:
        ratios = {(size, work): factor for size in _sizes(profile) for work in ("F", "B")}
        return msgspec.structs.replace(
            profile, layers=tuple(_scaled(layer, ratios) for layer in profile.layers)
        )

    steps_s = {run.plan: run.step_s for run in runs}

    def misfit(factor: float) -> float:
        return _misfit(scaled(factor), constants, overheads, steps_s)

    return scaled(_least(misfit, *_BURST_FACTORS, to=1e-3))


def _sizes(profile: Profile) -> set[int]:
    return {point.microbatch_size for layer in profile.layers for point in layer.points}


def _action_times(run: CalibrationRun) -> dict[tuple[int, str], list[float]]:
    """Durations of a run's actions by stage and work."""
    times: dict[tuple[int, str], list[float]] = {}
    for step in run.steps:
        for row in step.actions:
            for action in row:
                times.setdefault((action.stage, action.work), []).append(
                    action.end_s - action.start_s
                )
    return times


def _scaled(layer: Layer, ratios: Mapping[tuple[int, str], float]) -> Layer:
    """`layer` with every point's times, samples included, times its size's ratios."""

    def scale(point: LayerPoint) -> LayerPoint:
        forward = ratios.get((point.microbatch_size, "F"), 1.0)
        backward = ratios.get((point.microbatch_size, "B"), 1.0)

        def times(seconds: float | None, ratio: float) -> float | None:
            return None if seconds is None else seconds * ratio

        return msgspec.structs.replace(
            point,
            forward_s=times(point.forward_s, forward),
            backward_s=times(point.backward_s, backward),
            backward_input_s=times(point.backward_input_s, backward),
            backward_weight_s=times(point.backward_weight_s, backward),
            samples_s={
                phase: tuple(
                    sample * (forward if phase == "forward" else backward) for sample in samples
                )
                if not phase.startswith("call_")
                else samples
                for phase, samples in point.samples_s.items()
            },
        )

    return msgspec.structs.replace(layer, points=tuple(map(scale, layer.points)))


def recalibrate(profile: Profile, steps_s: Mapping[Plan, float]) -> Profile:
    """The profile with each executor's overhead per action and per message corrected, so that the
    measured steps in `steps_s` come out as well as they can. Marked in its warnings."""
    model = CostModel(profile, _SETTING)
    overheads = dict(profile.overheads)
    constants = profile.step_constants or StepConstants()
    for executor in {model.executor(plan) for plan in steps_s}:
        own = {plan: seconds for plan, seconds in steps_s.items()
               if model.executor(plan) == executor}  # fmt: skip
        overhead = overheads.get(executor, Overhead(forward_s=0.0, backward_s=0.0))
        for _ in range(_CORRECTION_ROUNDS):
            overhead = _corrected(profile, constants, executor, overhead, own, _MAX_EXTRA_S)
            overhead = _corrected_hop(profile, constants, executor, overhead, own)
        overheads[executor] = overhead
    labels = {*profile.calibration_plans, *(plan.label for plan in steps_s)}
    note = f"overheads corrected by {len(steps_s)} validated plans"
    return msgspec.structs.replace(
        profile,
        overheads=overheads,
        calibration_plans=tuple(sorted(labels)),
        warnings=(*(text for text in profile.warnings if text != note), note),
    )


def _overhead_from_records(model: CostModel, runs: Sequence[CalibrationRun]) -> Overhead:
    extras: dict[str, list[float]] = {"F": [], "B": []}
    hops: list[float] = []
    edges: list[float] = []
    for run in runs:
        costs = model.costs(run.plan)
        for step in run.steps:
            for rank in range(run.plan.num_ranks):
                for work, extra in _extras(run.plan, step, rank, costs):
                    extras[work].append(extra)
                edges.append(_edges_s(step, rank))
            hops += _hops_s(run.plan, step, costs)
    return Overhead(
        forward_s=max(0.0, _centre(extras["F"])),
        backward_s=max(0.0, _centre(extras["B"])),
        step_s=max(0.0, _centre(edges)),
        hop_s=max(0.0, _centre(hops)),
    )


def _extras(
    plan: Plan, step: MeasuredStep, rank: int, costs: object
) -> Iterator[tuple[str, float]]:
    """(F or B, extra seconds) of each action of `rank` but its first."""
    waits = list(step.waits[rank]) if step.waits else []
    actions = step.actions[rank]
    for before, action in itertools.pairwise(actions):
        gap = action.start_s - before.end_s - _waited(waits, before.end_s, action.start_s)
        seconds = _bare_s(costs, action.stage, action.work)
        seconds += _occupied_s(costs, plan, action.stage, action.work)
        work = "F" if action.work == "F" else "B"
        yield work, gap + (action.end_s - action.start_s) - seconds


def _bare_s(costs: object, stage: int, work: str) -> float:
    name = {
        "F": "forward_s", "B": "backward_s", "I": "backward_input_s", "W": "backward_weight_s",
    }[work]  # fmt: skip
    return float(getattr(costs, name)[stage])


def _occupied_s(costs: object, plan: Plan, stage: int, work: str) -> float:
    """What the links already charge the rank for posting this action's messages."""
    if work == "W":
        return 0.0
    hops = getattr(costs, "forward_hops" if work == "F" else "backward_hops")
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


def _hops_s(plan: Plan, step: MeasuredStep, costs: object) -> list[float]:
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


def _link_s(costs: object, stage: int, name: str) -> float:
    hops = getattr(costs, "forward_hops" if name == "F" else "backward_hops")
    boundary = stage - 1 if name == "F" else stage
    return float(hops.latency_s[boundary] + hops.wire_s[boundary])


def _centre(values: Sequence[float]) -> float:
    return Measurement(samples_s=tuple(values)).centre_s if values else 0.0


def _step_constants(profile: Profile, runs: Sequence[CalibrationRun]) -> StepConstants:
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


def _corrected(
    bare: Profile,
    constants: StepConstants,
    executor: Executor,
    overhead: Overhead,
    steps_s: Mapping[Plan, float],
    limit_s: float,
) -> Overhead:
    """`overhead` with one correction per action, the one that fits whole steps best.

    Records miss what jitter costs where two ranks meet: the slower of two sets the pace, so steps
    take longer than the sum of mean times.
    """

    def misfit(extra_s: float) -> float:
        return _misfit(bare, constants, {executor: _shifted(overhead, extra_s)}, steps_s)

    lowest = -min(overhead.forward_s, overhead.backward_s)
    return _shifted(overhead, _least(misfit, lowest, limit_s))


def _corrected_hop(
    bare: Profile,
    constants: StepConstants,
    executor: Executor,
    overhead: Overhead,
    steps_s: Mapping[Plan, float],
) -> Overhead:
    """`overhead` with the time per message that fits whole steps best."""

    def with_hop(hop_s: float) -> Overhead:
        return msgspec.structs.replace(overhead, hop_s=hop_s)

    def misfit(hop_s: float) -> float:
        return _misfit(bare, constants, {executor: with_hop(hop_s)}, steps_s)

    return with_hop(_least(misfit, 0.0, _MAX_EXTRA_S))


def _misfit(
    bare: Profile,
    constants: StepConstants,
    overheads: Mapping[Executor, Overhead],
    steps_s: Mapping[Plan, float],
) -> float:
    """Sum over plans of |log(predicted / measured)|."""
    profile = msgspec.structs.replace(bare, overheads=dict(overheads), step_constants=constants)
    model = CostModel(profile, _SETTING)
    return sum(
        abs(math.log(model.evaluate(plan).step_time_s / seconds))
        for plan, seconds in steps_s.items()
    )


def _shifted(overhead: Overhead, extra_s: float) -> Overhead:
    return msgspec.structs.replace(
        overhead,
        forward_s=max(0.0, overhead.forward_s + extra_s),
        backward_s=max(0.0, overhead.backward_s + extra_s),
    )


def _least(
    function: Callable[[float], float], low: float, high: float, *, to: float = 1e-6
) -> float:
    """Where a function with one valley is least, by golden section, to within `to`."""
    ratio = (5**0.5 - 1) / 2
    while high - low > to:
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        if function(left) <= function(right):
            high = right
        else:
            low = left
    return (low + high) / 2
