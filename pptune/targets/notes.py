"""The comments that every exported file begins with."""

import textwrap

from pptune.errors import PlanError
from pptune.plan import Plan
from pptune.targets.layout import write_layout
from pptune.targets.target import Job

WIDTH = 96


def header(prefix: str, trainer: str, plan: Plan, job: Job, notes: list[str]) -> str:
    """Comment lines: trainer and version, the plan, where its numbers come from, what to know."""
    first = [
        f"{trainer}: {plan.label}",
        f"Predicted by pptune from {job.profile_name}: {job.model.name}, {job.dtype}, sequence "
        f"length {job.seq_len}. Global batch {plan.global_batch_size} = micro-batch size "
        f"{plan.microbatch_size} x {plan.num_microbatches} micro-batches x {plan.data_parallel} "
        "replicas.",
        f"Blocks per stage: {list(plan.layers_per_stage)}.",
    ]
    return comment(prefix, first + notes)


def comment(prefix: str, paragraphs: list[str]) -> str:
    """Each paragraph wrapped, every line behind `prefix`."""
    lines: list[str] = []
    for paragraph in paragraphs:
        lines += textwrap.wrap(
            paragraph,
            WIDTH,
            initial_indent=f"{prefix} ",
            subsequent_indent=f"{prefix}   ",
            break_long_words=False,
            break_on_hyphens=False,
        )
    return "\n".join(lines)


def checkpoint_note() -> str:
    """What a change of P or V does to old checkpoints."""
    return (
        "A checkpoint's layout follows the number of pipeline ranks and chunks: convert a "
        "checkpoint that was written with others before you resume from it."
    )


def ramp_note(plan: Plan) -> str:
    """The rule on micro-batches holds at every step of a batch ramp."""
    return (
        "With a batch ramp (--rampup-batch-size, --step-batch-size-schedule) or "
        "--decrease-batch-size-if-needed, the micro-batches of every step must stay a multiple of "
        f"{plan.microbatch_group_size} or leave at least {plan.num_ranks} over, and be at least "
        f"{plan.microbatch_group_size}."
    )


def neighbours_note(remedy: str) -> str:
    """Which processes the hops of a pipeline were predicted to join."""
    return (
        "The hops were predicted with the ranks of one pipeline next to each other; this trainer "
        f"puts data-parallel replicas next to each other by default. {remedy}."
    )


def layout_note(plan: Plan, option: str) -> str:
    """The same split as a layout string."""
    return f"The same split as a layout: {option} '{write_layout(plan.layers_per_stage)}'"


def refuse_model_parallel(trainer: str, job: Job, *, tensor: bool = True) -> None:
    """Raise PlanError where the writer has no place for tensor or context parallelism."""
    setting = job.setting
    for kind, degree, refused in (
        ("tensor", setting.tensor_parallel, tensor),
        ("context", setting.context_parallel, True),
    ):
        if degree > 1 and refused:
            raise PlanError(
                f"the export for {trainer} has no {kind} parallelism, but --{kind}-parallel is "
                f"{degree}; use --target megatron, megatron-bridge or torchtitan"
            )
