"""Layer times as they are inside a running pipeline."""

import itertools
from collections.abc import Mapping, Sequence
from statistics import median

import msgspec

from pptune.calibration.records import bare_s, call_s, centre
from pptune.calibration.runs import SETTING, CalibrationRun
from pptune.cost_model import CostModel
from pptune.measured_step import MeasuredStep
from pptune.measurement import to_nanoseconds
from pptune.profiles import Layer, LayerPoint, Profile, Reference
from pptune.simulator import Costs


def in_pipeline(profile: Profile, runs: Sequence[CalibrationRun]) -> Profile:
    """The profile with its layer times scaled to what they take inside a running pipeline.

    Caches, message threads and clocks differ between layers timed by themselves and the same layers
    in the pipeline, and the machine was faster or slower meanwhile. Layers were timed in turn, so
    that one factor serves all: a factor of its own for each micro-batch size would follow the
    machine's speed while that size ran. Steps are compared with the reference product around each,
    which takes most of the machine's changes of speed out; the profile's own reference is that of
    the steps afterwards, so that both belong together.
    """
    bare = msgspec.structs.replace(
        profile, overheads={}, step_constants=None, interference_ratio=None
    )
    model = CostModel(bare, SETTING)
    calls_s = {work: call_s(profile, work) for work in ("F", "B")}
    ratios: list[float] = []
    products_s: list[float | None] = []
    for run in runs:
        costs = model.costs(run.plan)
        for step in run.steps:
            ratio = _step_ratio(step, costs, calls_s)
            if ratio is not None:
                ratios.append(ratio)
                products_s.append(step.product_s)
    reference, factor = _reference_and_factor(profile.reference, ratios, products_s)
    return msgspec.structs.replace(
        profile,
        layers=tuple(_scaled(layer, factor) for layer in profile.layers),
        reference=reference,
        # Messages moved while those actions ran: their effect is in the times now.
        interference_ratio=0.0,
    )


def _reference_and_factor(
    reference: Reference | None, ratios: Sequence[float], products_s: Sequence[float | None]
) -> tuple[Reference | None, float]:
    """What the reference product took around the steps, and what layers took over their time alone
    while it did."""
    if not ratios:  # All layers take no time: there is nothing to scale.
        return reference, 1.0
    timed_s = [seconds for seconds in products_s if seconds is not None]
    if reference is None or len(timed_s) < len(ratios):
        return reference, median(ratios)
    taken = msgspec.structs.replace(
        reference, seconds=centre(timed_s), samples_s=to_nanoseconds(timed_s)
    )
    relative = [ratio / seconds for ratio, seconds in zip(ratios, timed_s, strict=True)]
    return taken, median(relative) * taken.seconds


def _step_ratio(step: MeasuredStep, costs: Costs, calls_s: Mapping[str, float]) -> float | None:
    """What all of a step's actions took over their calls and layers; None where those take no
    time."""
    measured_s = alone_s = 0.0
    for action in itertools.chain(*step.actions):
        measured_s += action.end_s - action.start_s
        alone_s += bare_s(costs, action.stage, action.work)
        alone_s += calls_s["F" if action.work == "F" else "B"]
    return measured_s / alone_s if alone_s > 0 else None


def _scaled(layer: Layer, factor: float) -> Layer:
    """`layer` with every point's times, samples included, times `factor`."""

    def scale(point: LayerPoint) -> LayerPoint:
        def times(seconds: float | None) -> float | None:
            return None if seconds is None else seconds * factor

        return msgspec.structs.replace(
            point,
            forward_s=times(point.forward_s),
            backward_s=times(point.backward_s),
            backward_input_s=times(point.backward_input_s),
            backward_weight_s=times(point.backward_weight_s),
            samples_s={
                phase: samples
                if phase.startswith("call_")
                else to_nanoseconds(sample * factor for sample in samples)
                for phase, samples in point.samples_s.items()
            },
        )

    return msgspec.structs.replace(layer, points=tuple(map(scale, layer.points)))
