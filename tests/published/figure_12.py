"""Figure 12 of arXiv 2104.04473, read off the chart: GPT-3 175B, V = 1 and 4, over the batch.

The rate of a block and the overhead per action are solved from both curves' largest batch; the
optimizer's time comes from another paper's tables.
"""

from functools import cache

from msgspec.structs import replace

from pptune.model import ModelSpec
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
    with_overhead,
    with_unit_layers,
)

FIGURE_12 = "gpt3-175b-figure-12"

FP16_BYTES = 2


def figure_12_steps() -> list[Step]:
    """GPT-3 175B on 96 GPUs; FLOPs as the paper counts them (equation 3), full recompute in."""
    model = published_profile(FIGURE_12).model
    assert model.hidden_size is not None
    assert model.vocab_size is not None
    h, s, layers, vocab = model.hidden_size, model.seq_len, model.num_layers, model.vocab_size
    sequence_flops = 96 * s * layers * h**2 * (1 + s / (6 * h) + vocab / (16 * layers * h))
    steps = []
    for row in rows("gpt3_175b_figure_12"):
        num_chunks, batch = int(row["num_chunks"]), int(row["global_batch_size"])
        readings = [float(row[n]) for n in ("tflops_per_gpu", "second_reading") if row[n]]
        flops_per_s = sum(readings) / len(readings) * 1e12 * 96
        plan = make_plan(
            schedule="1f1b" if num_chunks == 1 else "interleaved",
            num_ranks=12,
            num_chunks=num_chunks,
            microbatch_size=1,
            num_microbatches=batch,
            layers_per_stage=(layers // (12 * num_chunks),) * (12 * num_chunks),
            recompute="full",
        )
        steps.append(Step(plan=plan, measured_s=batch * sequence_flops / flops_per_s))
    return steps


def update_s_per_parameter_byte() -> float:
    """What a step takes besides its layers, for each byte of a rank's parameters.

    Megatron 22B on 8 tensor-parallel GPUs, one micro-batch, no pipeline (arXiv 2205.05198, Tables 4
    and 5): the step less 48 layers and the head, which is worth its FLOPs.
    """
    model = ModelSpec(
        name="megatron-22b",
        family="gpt",
        num_layers=48,
        seq_len=2048,
        hidden_size=6144,
        num_heads=64,
        ffn_size=4 * 6144,
        vocab_size=51200,
        tie_word_embeddings=True,
    )
    num_parameters = model.num_parameters()
    assert num_parameters is not None
    rest_s = [
        float(row["step_s"])
        - model.num_layers * float(row["layer_ms"]) / 1e3
        - head_per_block(model) * float(row["layer_without_recompute_ms"]) / 1e3
        for row in rows("megatron_22b_layer_and_step")
    ]
    return sum(rest_s) / len(rest_s) / (num_parameters / 8 * FP16_BYTES)


@cache
def figure_12_profile() -> Profile:
    profile = published_profile(FIGURE_12)
    per_byte_s = update_s_per_parameter_byte()
    constants = StepConstants(per_parameter_byte_s=per_byte_s, source="given")
    unit = replace(
        with_unit_layers(profile, embedding=0.0, head=head_per_block(profile.model)),
        step_constants=constants,
    )
    steps = figure_12_steps()
    largest = max(step.plan.num_microbatches for step in steps)
    return solved(
        lambda x: with_overhead(with_layer_times(unit, x[0]), x[1]),
        [step for step in steps if step.plan.num_microbatches == largest],
        [1e-3, 1e-3],
    )


def gpt3_175b_figure_12() -> list[Prediction]:
    profile = figure_12_profile()
    others = uncalibrated(figure_12_steps(), profile)
    return predictions(profile, others, label="chart reading, 175B")
