"""Zero Bubble (arXiv 2401.10241): 1F1B and interleaved on A100, four models.

Layer and transfer times are printed; what the trainer adds to each action is not. It is one number
per model, solved from the two steps at its smallest M.
"""

from functools import cache

from pptune.plan import even_layers, make_plan
from pptune.profiles import Profile
from tests.published.solving import (
    Prediction,
    Step,
    predictions,
    published_profile,
    rows,
    solved,
    uncalibrated,
    with_overhead,
)

ZERO_BUBBLE_MODELS = ("1.5B", "6.2B", "14.6B", "28.3B")


def zero_bubble_name(model: str) -> str:
    return f"zero-bubble-{model.lower()}"


def zero_bubble_steps(model: str) -> list[Step]:
    """1F1B and interleaved, one layer per chunk; the embedding and the head stand for a layer."""
    steps = []
    for row in rows("zero_bubble_throughput"):
        if row["model"] != model:
            continue
        num_ranks, num_chunks = int(row["num_ranks"]), int(row["num_chunks"])
        profile = published_profile(zero_bubble_name(model))
        slots = even_layers(profile.model.num_layers + 2, num_ranks * num_chunks)
        assert slots is not None
        first, *middle, last = slots
        plan = make_plan(
            schedule=row["schedule"],  # type: ignore[arg-type]
            num_ranks=num_ranks,
            num_chunks=num_chunks,
            microbatch_size=int(row["microbatch_size"]),
            num_microbatches=int(row["num_microbatches"]),
            layers_per_stage=(first - 1, *middle, last - 1),
            allow_empty_stages=True,
        )
        samples_per_s = float(row["samples_per_gpu_per_s"]) * num_ranks
        steps.append(Step(plan=plan, measured_s=plan.global_batch_size / samples_per_s))
    return steps


@cache
def zero_bubble_profile(model: str) -> Profile:
    steps = zero_bubble_steps(model)
    fewest = min(step.plan.num_microbatches for step in steps)
    smallest = [step for step in steps if step.plan.num_microbatches == fewest]
    profile = published_profile(zero_bubble_name(model))
    return solved(lambda x: with_overhead(profile, x[0]), smallest, [1e-3])


def zero_bubble_throughput() -> list[Prediction]:
    found = []
    for model in ZERO_BUBBLE_MODELS:
        profile = zero_bubble_profile(model)
        others = uncalibrated(zero_bubble_steps(model), profile)
        found += predictions(profile, others, label=model)
    return found
