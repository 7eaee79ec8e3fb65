"""Solve a profile's open numbers from published steps, and predicts other steps with it."""

import csv
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from pptune.cost_model import CostModel, Setting
from pptune.executors import Executor
from pptune.model import ModelSpec
from pptune.plan import Plan
from pptune.profiles import Layer, LayerPoint, Overhead, Profile, load_profile
from pptune.targets import parse_target

Row = dict[str, str]

PROFILES = Path(__file__).parents[2] / "profiles" / "published"
DATA = Path(__file__).parents[1] / "data" / "published"

MEGATRON = parse_target("megatron")
"""Every published run was Megatron-LM's or a fork's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A plan and the step time that was published for it."""

    plan: Plan
    measured_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A published time that calibrated nothing, and what was predicted."""

    label: str
    predicted_s: float
    measured_s: float

    @property
    def error_ratio(self) -> float:
        return self.predicted_s / self.measured_s - 1


def rows(name: str) -> list[Row]:
    """A table of published numbers, as printed."""
    with (DATA / f"{name}.csv").open(newline="") as stream:
        return list(csv.DictReader(stream))


def published_profile(name: str) -> Profile:
    """A shipped profile."""
    return load_profile(PROFILES / f"{name}.json")


def predicted_s(profile: Profile, plan: Plan) -> float:
    """The plan's step under Megatron-LM."""
    return CostModel(profile, Setting(target=MEGATRON)).evaluate(plan).step_time_s


def predictions(profile: Profile, steps: Iterable[Step], *, label: str) -> list[Prediction]:
    """Every step with its prediction; `label` goes before the plan's own."""
    return [
        Prediction(
            label=f"{label} {step.plan.label}",
            predicted_s=predicted_s(profile, step.plan),
            measured_s=step.measured_s,
        )
        for step in steps
    ]


def solved(
    build: Callable[[list[float]], Profile],
    steps: Sequence[Step],
    start: Sequence[float],
) -> Profile:
    """The profile `build(numbers)` whose predictions miss `steps` least, marked with their plans.

    Gauss-Newton on the logarithms of numbers, which stay positive, and of predicted / measured: as
    many steps as numbers are met exactly, more in the least-squares sense. Raises ArithmeticError
    where it does not settle.
    """

    def misses(numbers: NDArray[np.float64]) -> NDArray[np.float64]:
        profile = build(numbers.tolist())
        return np.array([np.log(predicted_s(profile, s.plan) / s.measured_s) for s in steps])

    numbers = np.array(start)
    for _ in range(50):
        missed = misses(numbers)
        nudged = numbers * (1 + 1e-4 * np.eye(len(numbers)))
        slopes = np.column_stack([(misses(row) - missed) / np.log(1 + 1e-4) for row in nudged])
        change = np.linalg.lstsq(slopes, -missed, rcond=None)[0]
        numbers = numbers * np.exp(change)
        if np.abs(change).max() <= 1e-9:
            labels = tuple(sorted({step.plan.label for step in steps}))
            return replace(build(numbers.tolist()), calibration_plans=labels)
    raise ArithmeticError(f"{build} does not settle on {len(steps)} steps: {numbers}")


def with_layer_times(profile: Profile, ratio: float) -> Profile:
    """The profile with every layer time multiplied by `ratio`."""

    def scaled(point: LayerPoint) -> LayerPoint:
        assert point.forward_s is not None
        assert point.backward_s is not None
        return replace(
            point, forward_s=point.forward_s * ratio, backward_s=point.backward_s * ratio
        )

    return replace(
        profile,
        layers=tuple(
            replace(layer, points=tuple(map(scaled, layer.points))) for layer in profile.layers
        ),
    )


def with_unit_layers(profile: Profile, *, embedding: float, head: float) -> Profile:
    """Blocks of one second forward and two backward at each size, the ends in proportion."""
    share = {"embedding": embedding, "block": 1.0, "head": head}

    def unit(layer: Layer) -> Layer:
        size = share[layer.kind]
        points = (replace(point, forward_s=size, backward_s=2 * size) for point in layer.points)
        return replace(layer, points=tuple(points))

    return replace(profile, layers=tuple(map(unit, profile.layers)))


def with_overhead(profile: Profile, seconds: float) -> Profile:
    """The profile with one overhead for every action, whatever V."""
    overhead = Overhead(forward_s=seconds, backward_s=seconds, source="given")
    executors = (Executor.MEGATRON_EXPOSED, Executor.MEGATRON_OVERLAP)
    return replace(profile, overheads={str(executor): overhead for executor in executors})


def uncalibrated(steps: Iterable[Step], profile: Profile) -> list[Step]:
    """The steps of plans that solved nothing in `profile`."""
    return [step for step in steps if step.plan.label not in profile.calibration_plans]


def head_per_block(model: ModelSpec) -> float:
    """The head's FLOPs in blocks."""
    block = model.block_flops_per_sequence()
    assert block is not None
    assert model.vocab_size is not None
    assert model.hidden_size is not None
    return 2 * model.seq_len * model.hidden_size * model.vocab_size / block
