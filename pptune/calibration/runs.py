"""The short runs of the real runtime that calibrate a profile: which plans, and their visits."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from pptune.cost_model import CostModel, Setting
from pptune.measured_step import MeasuredStep, Visit
from pptune.plan import SINGLE_STAGE, V_SHAPED, Plan, make_plan, placement_of
from pptune.profiles import Profile
from pptune.targets import illegal, parse_target

TORCH = parse_target("torch")
SETTING = Setting(target=TORCH)

_MIN_VISITS, _MAX_VISITS, _STEPS_PER_VISIT = 1, 12, 3

_ALL_SIZES_UP_TO = 2
"""Plans with at most this many chunks are run at all sizes of `_spread`, others at the smallest."""


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
    model = CostModel(profile, SETTING)
    plans = []
    for schedule in schedules:
        for chunks in _calibration_chunks(schedule):
            if num_ranks * chunks > profile.model.num_layers:
                continue
            # Every size where one executor's actions are longest, the smallest elsewhere.
            for size in _spread(sizes) if chunks <= _ALL_SIZES_UP_TO else sizes[:1]:
                # As many sequences as fill a few of the largest micro-batches, so that small ones
                # show what many actions in a row cost.
                least = max(num_ranks + 1, sizes[-1] // size)
                plan = _first_free(model, schedule, num_ranks, chunks, size, least, avoided)
                if plan is not None:
                    plans.append(plan)
    return plans


def _spread(sizes: Sequence[int]) -> list[int]:
    """The smallest and the largest of the ascending `sizes`, and between them no two that are
    closer than a factor of 2."""
    kept = list(sizes[-1:])
    for size in reversed(sizes[1:-1]):
        if 2 * size <= kept[0]:
            kept.insert(0, size)
    return [*sizes[:1], *kept] if len(sizes) > 1 else kept


def _calibration_chunks(schedule: str) -> tuple[int, ...]:
    if schedule in SINGLE_STAGE:
        return (1,)
    return (2,) if schedule in V_SHAPED else (2, 4)


def _first_free(
    model: CostModel,
    schedule: str,
    num_ranks: int,
    chunks: int,
    size: int,
    least: int,
    avoided: set[str],
) -> Plan | None:
    """The legal plan with the fewest micro-batches from `least` on that is not in `avoided`."""
    layers = model.balanced_layers(
        num_ranks, chunks, placement=placement_of(schedule), microbatch_size=size
    )
    for microbatches in range(least, least + 3 * num_ranks + 4):
        plan = make_plan(
            schedule=schedule,  # type: ignore[arg-type]
            num_ranks=num_ranks,
            num_chunks=chunks,
            microbatch_size=size,
            num_microbatches=microbatches,
            layers_per_stage=layers,
        )
        if plan.label not in avoided and illegal(plan, TORCH) is None:
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
