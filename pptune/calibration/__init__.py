"""What the runtime adds to bare layer times, from short runs of the real runtime.

Layers take what they take inside the running pipeline. An action's extra time is what lies between
it and the action before, less the time it waited for messages, and what whole steps take beyond
that. It can only be seen in the runtime itself. Plans that calibrated never count as evidence of
accuracy: their labels are kept in the profile.
"""

from collections.abc import Mapping, Sequence

import msgspec

from pptune.calibration.correction import (
    MAX_EXTRA_S,
    corrected,
    corrected_hop,
    surely_corrected,
)
from pptune.calibration.layer_times import in_pipeline
from pptune.calibration.records import overhead_from_records, step_constants
from pptune.calibration.runs import SETTING, CalibrationRun, calibration_plans, run_calibration
from pptune.cost_model import CostModel
from pptune.executors import Executor
from pptune.plan import Plan
from pptune.profiles import Overhead, Profile, StepConstants

__all__ = [
    "CalibrationRun", "apply_calibration", "calibration_plans", "recalibrate", "run_calibration",
]  # fmt: skip

_CORRECTION_ROUNDS = 3

_LEAST_LIMIT_S = 0.2e-3
"""Added to the largest correction, for runtimes whose recorded overhead is next to nothing."""


def apply_calibration(
    profile: Profile, runs: Sequence[CalibrationRun], *, stages_compute: bool = True
) -> Profile:
    """The profile with layer times as they are inside the pipeline, overheads and step constants,
    all taken from `runs`."""
    if stages_compute:  # a wait takes what it was given, wherever it runs
        profile = in_pipeline(profile, runs)
    bare = msgspec.structs.replace(profile, overheads={}, step_constants=None)
    model = CostModel(bare, SETTING)
    by_executor: dict[Executor, list[CalibrationRun]] = {}
    for run in runs:
        by_executor.setdefault(model.executor(run.plan), []).append(run)
    constants = step_constants(profile, runs)
    recorded = {
        executor: overhead_from_records(model, own, inside=not stages_compute)
        for executor, own in by_executor.items()
    }
    overheads = dict(profile.overheads)
    for executor, own in by_executor.items():
        first = recorded[executor]
        steps_s = {run.plan: run.step_s for run in own}
        # A correction as large as what was recorded is noise, not overhead.
        limit_s = _LEAST_LIMIT_S + max(first.forward_s, first.backward_s)
        overheads[executor] = surely_corrected(bare, constants, executor, first, steps_s, limit_s)
    labels = {*profile.calibration_plans, *(run.plan.label for run in runs)}
    return msgspec.structs.replace(
        profile,
        overheads=overheads,
        step_constants=constants,
        calibration_plans=tuple(sorted(labels)),
    )


def recalibrate(profile: Profile, steps_s: Mapping[Plan, float]) -> Profile:
    """The profile with each executor's overhead per action and per message corrected, so that the
    measured steps in `steps_s` come out as well as they can. Marked in its warnings."""
    model = CostModel(profile, SETTING)
    overheads = dict(profile.overheads)
    constants = profile.step_constants or StepConstants()
    for executor in {model.executor(plan) for plan in steps_s}:
        own = {plan: seconds for plan, seconds in steps_s.items()
               if model.executor(plan) == executor}  # fmt: skip
        overhead = overheads.get(executor, Overhead(forward_s=0.0, backward_s=0.0))
        for _ in range(_CORRECTION_ROUNDS):
            overhead = corrected(profile, constants, executor, overhead, own, MAX_EXTRA_S)
            overhead = corrected_hop(profile, constants, executor, overhead, own)
        overheads[executor] = overhead
    labels = {*profile.calibration_plans, *(plan.label for plan in steps_s)}
    note = f"overheads corrected by {len(steps_s)} validated plans"
    return msgspec.structs.replace(
        profile,
        overheads=overheads,
        calibration_plans=tuple(sorted(labels)),
        warnings=(*(text for text in profile.warnings if text != note), note),
    )
