"""How sure a choice is: the profile's numbers moved by their own uncertainty, and redrawn.

One number at a time is moved by its 95 % confidence interval, which says what the choice depends
on. All samples together are redrawn with replacement (bootstrap; Efron, Ann. Statist. 7(1), 1979),
which says how likely the pick is the best. Numbers without samples are moved by an assumed share
and never redrawn.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from msgspec.structs import replace as replaced
from numpy.typing import NDArray

from pptune.cost_model import CostModel, Setting
from pptune.errors import MissingNumber
from pptune.explanation import Confidence, Sensitivity
from pptune.measurement import Measurement, trimmed_means
from pptune.plan import Plan
from pptune.profiles import Layer, LayerPoint, Link, Profile

ASSUMED_RATIO = 0.1
"""Uncertainty of a number without samples."""

MAX_RATIO = 0.9
"""Where few samples leave an interval wider than this, a time can't go below a tenth of itself."""

MAX_RESAMPLES = 200
MIN_RESAMPLES = 40
MAX_ACTIONS = 100_000_000
"""Actions played at most for one bootstrap: about a second."""

ACTIONS_PER_PLAN = 100_000
"""What setting up a plan on a new profile costs, in actions."""

_PHASES = ("forward", "backward", "backward_input", "backward_weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """A profile and the setting that goes with it: both hold numbers."""

    profile: Profile
    setting: Setting

    def step_times_s(self, plans: Sequence[Plan]) -> list[float]:
        """Each plan's step time; infinite where the profile lacks a number for it."""
        model = CostModel(self.profile, self.setting)
        return [_step_time_s(model, plan) for plan in plans]

    def fastest(self, plans: Sequence[Plan]) -> int:
        """The index of the fastest plan; plans that cannot win by their bound are not played."""
        model = CostModel(self.profile, self.setting)
        best, best_s = 0, _step_time_s(model, plans[0])
        for index, plan in enumerate(plans[1:], start=1):
            if _bound_s(model, plan) < best_s:
                step_s = _step_time_s(model, plan)
                if step_s < best_s:
                    best, best_s = index, step_s
        return best


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """A number of the world that can be moved."""

    name: str
    noise_ratio: float | None
    """Half-width of its confidence interval / the number; None without samples."""
    scaled: Callable[[World, float], World]
    """The world with this number times a factor."""


def sensitivities(world: World, plans: Sequence[Plan]) -> tuple[Sensitivity, ...]:
    """Every number that a plan's time depends on, moved up and down; the strongest first.

    `plans` are the contenders, the pick first. Numbers that decide the choice come before the rest.
    """
    pick_s = world.step_times_s(plans[:1])[0]
    found = [_sensitivity(world, plans, number, pick_s) for number in _numbers(world, plans)]
    return tuple(
        sorted(
            (row for row in found if row.step_time_change_ratio or row.new_pick),
            key=lambda row: (row.new_pick is None, -abs(row.step_time_change_ratio)),
        )
    )


def confidence(world: World, plans: Sequence[Plan], *, seed: int) -> Confidence:
    """The share of redrawn profiles on which the first of `plans` is the fastest."""
    actions = sum(2 * plan.num_stages * plan.num_microbatches + ACTIONS_PER_PLAN for plan in plans)
    num_resamples = max(MIN_RESAMPLES, min(MAX_RESAMPLES, MAX_ACTIONS // actions))
    if len(plans) < 2 or not _has_samples(world.profile):
        return Confidence(
            chance_best=None, num_resamples=0, num_plans=len(plans), rival=None, seed=seed
        )
    random = np.random.default_rng(seed)
    winners: Counter[int] = Counter()
    for profile in _redrawn(world.profile, num_resamples, random):
        winners[replace(world, profile=profile).fastest(plans)] += 1
    others = [index for index, _ in winners.most_common() if index != 0]
    return Confidence(
        chance_best=winners[0] / num_resamples,
        num_resamples=num_resamples,
        num_plans=len(plans),
        rival=plans[others[0]].label if others else None,
        seed=seed,
    )


def with_bandwidth(world: World, factor: float) -> World:
    """Every link's bandwidth times `factor`."""
    return _with_links(world, lambda link: replaced(link, bytes_per_s=link.bytes_per_s * factor))


def _sensitivity(world: World, plans: Sequence[Plan], number: Number, pick_s: float) -> Sensitivity:
    ratio = ASSUMED_RATIO if number.noise_ratio is None else min(number.noise_ratio, MAX_RATIO)
    new_pick = None
    for factor in (1 - ratio, 1 + ratio):
        moved = number.scaled(world, factor)
        winner = moved.fastest(plans)
        if winner != 0:
            new_pick = plans[winner].label
    upper_s = moved.step_times_s(plans[:1])[0]
    return Sensitivity(
        name=number.name,
        uncertainty_ratio=ratio,
        assumed=number.noise_ratio is None,
        step_time_change_ratio=upper_s / pick_s - 1,
        new_pick=new_pick,
    )


def _numbers(world: World, plans: Sequence[Plan]) -> Iterator[Number]:
    """The numbers that the plans' times are made of."""
    sizes = {plan.microbatch_size for plan in plans}
    split = any(plan.splits_backward for plan in plans)
    for layer in world.profile.layers:
        for point in layer.points:
            if point.microbatch_size in sizes:
                yield from _point_numbers(layer, point, split=split)
    if any(plan.num_ranks > 1 for plan in plans):
        yield from _link_numbers(world)
    model = CostModel(world.profile, world.setting)
    for executor in sorted({model.executor(plan) for plan in plans}):
        overhead = world.profile.overheads.get(executor)
        for field in ("forward_s", "backward_s", "hop_s", "chunk_s"):
            if overhead is not None and getattr(overhead, field) > 0:
                yield Number(
                    name=f"overhead of {executor}, {field.removesuffix('_s')}",
                    noise_ratio=None,
                    scaled=partial(_with_overhead, executor, field),
                )
    if world.profile.interference_ratio:
        yield Number(
            name="slow-down of compute by messages",
            noise_ratio=None,
            scaled=_with_interference,
        )


def _point_numbers(layer: Layer, point: LayerPoint, *, split: bool) -> Iterator[Number]:
    for phase in _PHASES:
        value = getattr(point, f"{phase}_s")
        if value and (split or phase in ("forward", "backward")):
            yield Number(
                name=f"{layer.kind} {phase.replace('_', ' ')} at b = {point.microbatch_size}",
                noise_ratio=_noise_ratio(point.samples_s.get(phase, ())),
                scaled=partial(_with_layer_time, layer, point, f"{phase}_s"),
            )


def _link_numbers(world: World) -> Iterator[Number]:
    links = (*world.setting.links, *world.profile.links)
    ends = [sorted(link.points, key=lambda point: point.num_bytes) for link in links if link.points]
    for name, field, end in (
        ("latency of all links", "latency_s", 0),
        ("bandwidth of all links", "bytes_per_s", -1),
    ):
        noises = [_noise_ratio(points[end].samples_s) for points in ends]
        known = [noise for noise in noises if noise is not None]
        yield Number(
            name=name,
            noise_ratio=max(known) if known and len(known) == len(links) else None,
            scaled=partial(_with_link_field, field),
        )


def _noise_ratio(samples_s: Sequence[float]) -> float | None:
    if len(samples_s) < 2:
        return None
    noise = Measurement(samples_s=tuple(samples_s)).noise_ratio
    return noise if np.isfinite(noise) else None


def _with_layer_time(
    layer: Layer, point: LayerPoint, field: str, world: World, factor: float
) -> World:
    moved = replaced(point, **{field: getattr(point, field) * factor})
    points = tuple(moved if other is point else other for other in layer.points)
    layers = tuple(
        replaced(other, points=points) if other is layer else other
        for other in world.profile.layers
    )
    return replace(world, profile=replaced(world.profile, layers=layers))


def _with_link_field(field: str, world: World, factor: float) -> World:
    return _with_links(world, lambda link: replaced(link, **{field: getattr(link, field) * factor}))


def _with_links(world: World, change: Callable[[Link], Link]) -> World:
    return World(
        profile=replaced(world.profile, links=tuple(map(change, world.profile.links))),
        setting=replace(world.setting, links=tuple(map(change, world.setting.links))),
    )


def _with_overhead(executor: str, field: str, world: World, factor: float) -> World:
    overhead = world.profile.overheads[executor]
    moved = replaced(overhead, **{field: getattr(overhead, field) * factor})
    overheads = {**world.profile.overheads, executor: moved}
    return replace(world, profile=replaced(world.profile, overheads=overheads))


def _with_interference(world: World, factor: float) -> World:
    ratio = (world.profile.interference_ratio or 0.0) * factor
    return replace(world, profile=replaced(world.profile, interference_ratio=ratio))


def _has_samples(profile: Profile) -> bool:
    points = (point for layer in profile.layers for point in layer.points)
    return any(len(samples) > 1 for point in points for samples in point.samples_s.values())


def _redrawn(profile: Profile, number: int, random: np.random.Generator) -> Iterator[Profile]:
    """The profile as `number` other runs of the same measurements might have given it."""
    layers = [[_redrawn_point(point, number, random) for point in layer.points]
              for layer in profile.layers]  # fmt: skip
    links = [_redrawn_link(link, number, random) for link in profile.links]
    for index in range(number):
        yield replaced(
            profile,
            layers=tuple(
                replaced(layer, points=tuple(point(index) for point in points))
                for layer, points in zip(profile.layers, layers, strict=True)
            ),
            links=tuple(link(index) for link in links),
        )


def _redrawn_point(
    point: LayerPoint, number: int, random: np.random.Generator
) -> Callable[[int], LayerPoint]:
    """The point of each redraw, by its index."""
    times = {
        f"{phase}_s": getattr(point, f"{phase}_s") * _redraw_factors(samples, number, random)
        for phase, samples in point.samples_s.items()
        if phase in _PHASES and getattr(point, f"{phase}_s") is not None
    }
    return lambda index: replaced(
        point, **{field: float(values[index]) for field, values in times.items()}
    )


def _redrawn_link(link: Link, number: int, random: np.random.Generator) -> Callable[[int], Link]:
    """The link of each redraw: latency follows the smallest message, bandwidth the largest."""
    if not link.points:
        return lambda _: link
    points = sorted(link.points, key=lambda point: point.num_bytes)
    latencies = link.latency_s * _redraw_factors(points[0].samples_s, number, random)
    bandwidths = link.bytes_per_s / _redraw_factors(points[-1].samples_s, number, random)
    return lambda index: replaced(
        link, latency_s=float(latencies[index]), bytes_per_s=float(bandwidths[index])
    )


def _redraw_factors(
    samples_s: Sequence[float], number: int, random: np.random.Generator
) -> NDArray[np.float64]:
    """Centres of `number` redraws with replacement / the samples' own centre."""
    samples = np.asarray(samples_s)
    if len(samples) < 2 or samples.min() <= 0:
        return np.ones(number)
    chosen = random.integers(0, len(samples), (number, len(samples)))
    return trimmed_means(samples[chosen]) / trimmed_means(samples)


def _bound_s(model: CostModel, plan: Plan) -> float:
    """A time that the plan cannot beat; infinite where the profile lacks a number for it."""
    try:
        return model.inputs(plan).bound.step_s(plan.num_microbatches)
    except MissingNumber:
        return float("inf")


def _step_time_s(model: CostModel, plan: Plan) -> float:
    try:
        return model.evaluate(plan).step_time_s
    except MissingNumber:
        return float("inf")
