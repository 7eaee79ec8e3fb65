"""Layer times as they are inside a running pipeline."""

from collections.abc import Mapping, Sequence

import msgspec

from pptune.calibration.correction import least, misfit
from pptune.calibration.records import bare_s, centre
from pptune.calibration.runs import SETTING, CalibrationRun
from pptune.cost_model import CostModel
from pptune.executors import Executor
from pptune.profiles import Layer, LayerPoint, Overhead, Profile, StepConstants

_BURST_FACTORS = (0.8, 1.1)
"""Median steps are not further than this from the sums of mean times."""


def in_pipeline(profile: Profile, runs: Sequence[CalibrationRun]) -> Profile:
    """The profile with its layer times scaled to what they take inside a running pipeline.

    Caches, message threads and clocks differ between layers timed by themselves and the same layers
    in the pipeline. One factor per micro-batch size and direction, the summed time of all stages'
    actions over the summed layer times, keeps the ratios between kinds of layer.
    """
    bare = msgspec.structs.replace(
        profile, overheads={}, step_constants=None, interference_ratio=None
    )
    model = CostModel(bare, SETTING)
    totals: dict[tuple[int, str], tuple[float, float]] = {}
    for run in runs:
        costs = model.costs(run.plan)
        for (stage, work), seconds in _action_times(run).items():
            key = (run.plan.microbatch_size, "F" if work == "F" else "B")
            measured, layers = totals.get(key, (0.0, 0.0))
            totals[key] = (measured + centre(seconds), layers + bare_s(costs, stage, work))
    ratios = {key: measured / layers for key, (measured, layers) in totals.items() if layers > 0}
    return msgspec.structs.replace(
        profile,
        layers=tuple(_scaled(layer, ratios) for layer in profile.layers),
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
        ratios = {(size, work): factor for size in _sizes(profile) for work in ("F", "B")}
        return msgspec.structs.replace(
            profile, layers=tuple(_scaled(layer, ratios) for layer in profile.layers)
        )

    steps_s = {run.plan: run.step_s for run in runs}

    def error(factor: float) -> float:
        return misfit(scaled(factor), constants, overheads, steps_s)

    return scaled(least(error, *_BURST_FACTORS, to=1e-3))


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
