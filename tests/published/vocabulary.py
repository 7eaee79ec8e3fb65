"""Vocabulary parallelism (arXiv 2411.05288): 1F1B with an ever heavier last stage.

The FLOPs of block, embedding and head are in proportion 72 h + 12 s, 3 and 6 V (Table 4). One rate
for each number of ranks and sequence length is solved from the smallest vocabulary.
"""

from functools import cache

from msgspec.structs import replace

from pptune.plan import even_layers, make_plan
from pptune.profiles import Profile
from tests.published.solving import (
    Prediction,
    Step,
    head_per_block,
    predictions,
    published_profile,
    rows,
    solved,
    with_layer_times,
    with_unit_layers,
)

VOCABULARY_PROFILES = tuple(
    f"vocabulary-{ranks}-ranks-seq-{seq}" for ranks in (8, 16) for seq in (2048, 4096)
)
SMALLEST_VOCABULARY = 32768


def with_vocabulary(profile: Profile, vocab_size: int) -> Profile:
    """The profile with the head of another vocabulary at the same rate."""
    model = replace(profile.model, vocab_size=vocab_size)
    block = profile.layer("block")
    assert block is not None
    ratio = head_per_block(model)
    points = tuple(
        replace(point, forward_s=point.forward_s * ratio, backward_s=point.backward_s * ratio)
        for point in block.points
        if point.forward_s is not None and point.backward_s is not None
    )
    layers = (
        replace(layer, points=points) if layer.kind == "head" else layer for layer in profile.layers
    )
    return replace(profile, model=model, layers=tuple(layers))


def vocabulary_steps(profile: Profile) -> dict[int, Step]:
    """By vocabulary size; step times follow from the MFU that was printed."""
    steps = {}
    for row in rows("vocabulary_mfu"):
        if (int(row["num_ranks"]), int(row["seq_len"])) != (profile.num_ranks, profile.seq_len):
            continue
        vocab_size, num_ranks = int(row["vocab_size"]), int(row["num_ranks"])
        layers = even_layers(int(row["num_layers"]), num_ranks)
        assert layers is not None
        plan = make_plan(
            schedule="1f1b",
            num_ranks=num_ranks,
            num_chunks=1,
            microbatch_size=int(row["microbatch_size"]),
            num_microbatches=int(row["num_microbatches"]),
            layers_per_stage=layers,
        )
        flops = with_vocabulary(profile, vocab_size).model.flops_per_sequence()
        peak = profile.machine.peak_flops_per_s
        assert flops is not None
        assert peak is not None
        rate = float(row["mfu_percent"]) / 100 * peak * num_ranks
        steps[vocab_size] = Step(plan=plan, measured_s=plan.global_batch_size * flops / rate)
    return steps


@cache
def vocabulary_profile(name: str) -> Profile:
    profile = published_profile(name)
    assert profile.model.block_flops_per_sequence() is not None
    assert profile.model.hidden_size is not None
    embedding = 3 / (72 * profile.model.hidden_size + 12 * profile.seq_len)
    unit = with_unit_layers(profile, embedding=embedding, head=head_per_block(profile.model))
    smallest = vocabulary_steps(profile)[SMALLEST_VOCABULARY]
    return solved(lambda x: with_layer_times(unit, x[0]), [smallest], [1e-3])


def vocabulary_imbalance() -> list[Prediction]:
    found = []
    for name in VOCABULARY_PROFILES:
        profile = vocabulary_profile(name)
        for vocab_size, step in vocabulary_steps(profile).items():
            if vocab_size != SMALLEST_VOCABULARY:
                label = f"{name} vocabulary {vocab_size}"
                found += predictions(with_vocabulary(profile, vocab_size), [step], label=label)
    return found
