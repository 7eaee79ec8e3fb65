"""Nemotron 340B on GB200 (NVIDIA/dgxc-benchmarking): P = 4, V = 12, over M.

Steps alone are printed; the rate of a block and a constant per step are solved from the fewest and
the most micro-batches.
"""

from functools import cache

from msgspec.structs import replace

from pptune.plan import make_plan
from pptune.profiles import Profile, StepConstants
from tests.published.solving import (
    Prediction,
    Step,
    head_per_block,
    predictions,
    published_profile,
    rows,
    solved,
    uncalibrated,
    with_layer_times,
    with_unit_layers,
)

NEMOTRON = "nemotron-340b-gb200"


def nemotron_steps() -> list[Step]:
    """The mean step at each M: replicas differ, and nothing else."""
    measured: dict[int, list[float]] = {}
    for row in rows("nemotron_340b_steps"):
        measured.setdefault(int(row["num_microbatches"]), []).append(float(row["step_s"]))
    return [
        Step(
            plan=make_plan(
                schedule="interleaved",
                num_ranks=4,
                num_chunks=12,
                microbatch_size=1,
                num_microbatches=num_microbatches,
                layers_per_stage=(2,) * 48,
            ),
            measured_s=sum(seconds) / len(seconds),
        )
        for num_microbatches, seconds in measured.items()
    ]


@cache
def nemotron_profile() -> Profile:
    steps = sorted(nemotron_steps(), key=lambda step: step.plan.num_microbatches)
    profile = published_profile(NEMOTRON)
    unit = with_unit_layers(profile, embedding=0.0, head=head_per_block(profile.model))

    def build(numbers: list[float]) -> Profile:
        constants = StepConstants(fixed_s=numbers[1], source="given")
        return replace(with_layer_times(unit, numbers[0]), step_constants=constants)

    return solved(build, [steps[0], steps[-1]], [1e-3, 0.1])


def nemotron_340b() -> list[Prediction]:
    profile = nemotron_profile()
    return predictions(profile, uncalibrated(nemotron_steps(), profile), label="340B")
