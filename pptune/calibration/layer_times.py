"""Layer times as they are inside a running pipeline."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec
import numpy as np

from pptune.calibration.correction import least, misfit
from pptune.calibration.records import bare_s, call_s, centre
from pptune.calibration.runs import SETTING, CalibrationRun
from pptune.calibration.trend import Floats, towards_trend
from pptune.cost_model import CostModel
from pptune.executors import Executor
from pptune.measured_step import MeasuredStep
from pptune.measurement import to_nanoseconds
from pptune.plan import Plan
from pptune.profiles import Layer, LayerPoint, Overhead, Profile, StepConstants
from pptune.simulator import Costs

_BURST_FACTORS = (0.8, 1.1)
"""Median steps are not further than this from the sums of mean times."""


def in_pipeline(profile: Profile, runs: Sequence[CalibrationRun]) -> Profile:
    """The profile with its layer times scaled to what they take inside a running pipeline.

    Caches, message threads and clocks differ between layers timed by themselves and the same layers
    in the pipeline. One factor per micro-batch size and direction, the summed time of all stages'
    actions over that of their calls and layers, keeps the ratios between kinds of layer. It changes
    with the size little and steadily: what scatters is mostly the machine's speed at the time.
    """
    bare = msgspec.structs.replace(
        profile, overheads={}, step_constants=None, interference_ratio=None
    )
    model = CostModel(bare, SETTING)
    totals: dict[tuple[int, str], tuple[float, float]] = {}
    by_step: dict[tuple[int, str], list[float]] = {}
    calls_s = {direction: call_s(profile, direction) for direction in ("F", "B")}
    for run in runs:
        costs = model.costs(run.plan)
        for (stage, work), seconds in _action_times(run.steps).items():
            key = (run.plan.microbatch_size, "F" if work == "F" else "B")
            measured, layers = totals.get(key, (0.0, 0.0))
            alone_s = bare_s(costs, stage, work) + calls_s[key[1]]
            totals[key] = (measured + centre(seconds), layers + alone_s)
        for step in run.steps:
            for key, found in _step_ratios(run.plan, step, costs, calls_s).items():
                by_step.setdefault(key, []).append(found)
    curves: dict[str, tuple[Floats, Floats]] = {}
    for direction in ("F", "B"):
        sizes = sorted(
            size for (size, work), (_, layers) in totals.items() if work == direction and layers > 0
        )
        if not sizes:
            continue
        logarithms = [math.log(np.divide(*totals[size, direction])) for size in sizes]
        spread = [_standard_error(by_step[size, direction]) for size in sizes]
        at = np.log2(sizes)
        curves[direction] = at, towards_trend(at, np.array(logarithms), np.array(spread))

    def ratio(size: int, direction: str) -> float:
        """Between the sizes that ran, in between; beyond them, that of the nearest."""
        if direction not in curves:
            return 1.0
        return math.exp(float(np.interp(math.log2(size), *curves[direction])))

    return msgspec.structs.replace(
        profile,
        layers=tuple(_scaled(layer, ratio) for layer in profile.layers),
        # Messages moved while those actions ran: their effect is in the times now.
        interference_ratio=0.0,
    )


def without_bursts(
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
        layers = tuple(_scaled(layer, lambda size, direction: factor) for layer in profile.layers)
        return msgspec.structs.replace(profile, layers=layers)

    steps_s = {run.plan: run.step_s for run in runs}

    def error(factor: float) -> float:
        return misfit(scaled(factor), constants, overheads, steps_s)

    return scaled(least(error, *_BURST_FACTORS, to=1e-3))


def _action_times(steps: Iterable[MeasuredStep]) -> dict[tuple[int, str], list[float]]:
    """Durations of actions by stage and work."""
    times: dict[tuple[int, str], list[float]] = {}
    for step in steps:
        for row in step.actions:
            for action in row:
                times.setdefault((action.stage, action.work), []).append(
                    action.end_s - action.start_s
                )
    return times


def _step_ratios(
    plan: Plan, step: MeasuredStep, costs: Costs, calls_s: Mapping[str, float]
) -> dict[tuple[int, str], float]:
    """By micro-batch size and direction, what all of a step's actions took over their calls and
    layers."""
    sums: dict[tuple[int, str], tuple[float, float]] = {}
    for (stage, work), seconds in _action_times([step]).items():
        key = (plan.microbatch_size, "F" if work == "F" else "B")
        measured, layers = sums.get(key, (0.0, 0.0))
        alone_s = len(seconds) * (bare_s(costs, stage, work) + calls_s[key[1]])
        sums[key] = (measured + sum(seconds), layers + alone_s)
    return {key: measured / layers for key, (measured, layers) in sums.items() if layers > 0}


def _standard_error(ratios: Sequence[float]) -> float:
    """Of the mean of the ratios' logarithms; infinite for one alone."""
    if len(ratios) < 2:
        return math.inf
    return float(np.std(np.log(ratios), ddof=1)) / math.sqrt(len(ratios))


def _scaled(layer: Layer, ratio: Callable[[int, str], float]) -> Layer:
    """`layer` with every point's times, samples included, times the ratio of its size and
    direction (F or B)."""

    def scale(point: LayerPoint) -> LayerPoint:
        forward = ratio(point.microbatch_size, "F")
        backward = ratio(point.microbatch_size, "B")

        def times(seconds: float | None, ratio: float) -> float | None:
            return None if seconds is None else seconds * ratio

        return msgspec.structs.replace(
            point,
            forward_s=times(point.forward_s, forward),
            backward_s=times(point.backward_s, backward),
            backward_input_s=times(point.backward_input_s, backward),
            backward_weight_s=times(point.backward_weight_s, backward),
            samples_s={
                phase: to_nanoseconds(
                    sample * (forward if phase == "forward" else backward) for sample in samples
                )
                if not phase.startswith("call_")
                else samples
                for phase, samples in point.samples_s.items()
            },
        )

    return msgspec.structs.replace(layer, points=tuple(map(scale, layer.points)))
