"""BLOOM's sweep over b at a fixed batch (BigScience's logbook), five models.

Layer times at b = 1, 2 and 8 are solved from the steps at those sizes; the step at 4 is predicted
from the curve through them.
"""

from functools import cache

from msgspec.structs import replace

from pptune.plan import make_plan
from pptune.profiles import Profile
from tests.published.solving import (
    Prediction,
    Step,
    predictions,
    published_profile,
    rows,
    solved,
    uncalibrated,
    with_unit_layers,
)

BLOOM = "bloom-181b-a100"
KNOWN_SIZES = (1, 2, 8)


def bloom_steps(model: str) -> list[Step]:
    """Full recompute, one stage per rank. Only the 181B profile knows the layers of a stage: the
    others' stages count as one block."""
    steps = []
    for row in rows("bloom_micro_batch_sweep"):
        if row["model"] != model:
            continue
        num_ranks, b = int(row["num_ranks"]), int(row["microbatch_size"])
        data_parallel = int(row["data_parallel"])
        plan = make_plan(
            schedule="1f1b",
            num_ranks=num_ranks,
            num_chunks=1,
            microbatch_size=b,
            num_microbatches=2048 // data_parallel // b,
            layers_per_stage=(6 if model == "181B" else 1,) * num_ranks,
            data_parallel=data_parallel,
            recompute="full",
        )
        steps.append(Step(plan=plan, measured_s=float(row["step_s"])))
    return steps


@cache
def bloom_profile(model: str = "181B") -> Profile:
    unit = with_unit_layers(published_profile(BLOOM), embedding=0.0, head=0.0)
    block = unit.layer("block")
    assert block is not None

    def build(numbers: list[float]) -> Profile:
        points = tuple(
            replace(point, forward_s=seconds, backward_s=2 * seconds)
            for point, seconds in zip(block.points, numbers, strict=True)
        )
        layers = (
            replace(layer, points=points) if layer.kind == "block" else layer
            for layer in unit.layers
        )
        return replace(unit, layers=tuple(layers))

    known = [step for step in bloom_steps(model) if step.plan.microbatch_size in KNOWN_SIZES]
    return solved(build, known, [float(b) for b in KNOWN_SIZES])


def bloom_micro_batch_sweep() -> list[Prediction]:
    found = []
    for model in dict.fromkeys(row["model"] for row in rows("bloom_micro_batch_sweep")):
        profile = bloom_profile(model)
        found += predictions(profile, uncalibrated(bloom_steps(model), profile), label=model)
    return found
