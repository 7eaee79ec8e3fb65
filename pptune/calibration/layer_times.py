"""Layer times as they are inside a running pipeline."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from statistics import median

import msgspec
import numpy as np

from pptune.calibration.records import bare_s, call_s
from pptune.calibration.runs import SETTING, CalibrationRun
from pptune.calibration.trend import Floats, towards_trend
from pptune.cost_model import CostModel
from pptune.measured_step import MeasuredStep
from pptune.measurement import to_nanoseconds
from pptune.plan import Plan
from pptune.profiles import Layer, LayerPoint, Profile
from pptune.simulator import Costs


def in_pipeline(profile: Profile, runs: Sequence[CalibrationRun]) -> Profile:
    """The profile with its layer times scaled to what they take inside a running pipeline.

    Caches, message threads and clocks differ between layers timed by themselves and the same layers
    in the pipeline. One factor per micro-batch size and direction keeps the ratios between kinds of
    layer: what a step's actions take together over what their calls and layers do, in the median
    step, for a plan is judged by that and a burst from elsewhere is in the mean. The factor changes
    with the size little and steadily: what scatters is mostly the machine's speed at the time.
    """
    bare = msgspec.structs.replace(
        profile, overheads={}, step_constants=None, interference_ratio=None
    )
    model = CostModel(bare, SETTING)
    by_step: dict[tuple[int, str], list[float]] = {}
    calls_s = {direction: call_s(profile, direction) for direction in ("F", "B")}
    for run in runs:
        costs = model.costs(run.plan)
        for step in run.steps:
            for key, found in _step_ratios(run.plan, step, costs, calls_s).items():
                by_step.setdefault(key, []).append(found)
    curves: dict[str, tuple[Floats, Floats]] = {}
    for direction in ("F", "B"):
        sizes = sorted(size for size, work in by_step if work == direction)
        if not sizes:
            continue
        logarithms = [math.log(median(by_step[size, direction])) for size in sizes]
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


def _step_ratios(
    plan: Plan, step: MeasuredStep, costs: Costs, calls_s: Mapping[str, float]
) -> dict[tuple[int, str], float]:
    """By micro-batch size and direction, what all of a step's actions took over their calls and
    layers."""
    sums_s: dict[str, tuple[float, float]] = {}
    for action in itertools.chain(*step.actions):
        direction = "F" if action.work == "F" else "B"
        measured_s, alone_s = sums_s.get(direction, (0.0, 0.0))
        sums_s[direction] = (
            measured_s + action.end_s - action.start_s,
            alone_s + bare_s(costs, action.stage, action.work) + calls_s[direction],
        )
    return {
        (plan.microbatch_size, direction): measured_s / alone_s
        for direction, (measured_s, alone_s) in sums_s.items()
        if alone_s > 0
    }


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
