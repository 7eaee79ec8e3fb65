"""The rules of torch.distributed.pipelining, which torchtitan inherits.

Source: torch/distributed/pipelining/schedules.py of torch 2.13; the first releases (2.4) wanted M
to be a multiple of P for interleaved schedules.
"""

from dataclasses import dataclass

from pptune.executors import Executor
from pptune.plan import Plan, default_group_size
from pptune.targets.groups import fills_rounds, group_violation, nearest_legal
from pptune.targets.target import Setting, Violation, choices

CLASSES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "looped-bfs": "LoopedBFS",
    "interleaved-zb": "InterleavedZeroBubble",
    "zb-v": "ZBVZeroBubble",
    "dualpipe-v": "DualPipeV",
}
"""torch's name of each schedule, as `get_schedule_class` knows it; the class has `Schedule` before
it. Schedules that are not here run as loaded orders."""

SCHEDULES = frozenset(CLASSES) | {"zb-h1", "zb-h2"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """How messages speak of the trainer and of M."""

    trainer: str
    microbatches: str


def needs_loaded_order(plan: Plan) -> bool:
    """Whether no class of torch makes the plan's order."""
    if plan.schedule not in CLASSES:
        return True
    own = default_group_size(plan.schedule, plan.num_ranks, plan.num_microbatches)
    return plan.microbatch_group_size is not None and plan.microbatch_group_size != own


def executor(plan: Plan) -> Executor:
    """What overlaps in the class that runs the plan.

    ScheduleGPipe is counted with Schedule1F1B: it posts a receive only when it needs the tensor and
    waits for it. It never waits for a send inside a phase, where Schedule1F1B waits for the
    previous one; that receive was posted before the wait in either case.
    """
    single = plan.schedule in ("gpipe", "1f1b")
    return Executor.TORCH_1F1B if single else Executor.TORCH_RUNTIME


def microbatch_violation(plan: Plan, names: Names) -> Violation | None:
    """The rule on M (and N) that `plan` breaks, or None."""
    ranks, microbatches = plan.num_ranks, plan.num_microbatches
    match plan.schedule:
        case "1f1b" if microbatches < ranks:
            return _too_few(plan, names, ranks, "the number of stages", "--schedule gpipe")
        case "dualpipe-v" if microbatches < 2 * ranks:
            return _too_few(plan, names, 2 * ranks, "the number of stages", "--schedule zb-v")
        case "interleaved" | "interleaved-zb":
            if needs_loaded_order(plan):
                return group_violation(
                    num_ranks=ranks,
                    num_microbatches=microbatches,
                    group_size=plan.microbatch_group_size or ranks,
                    group_option="the micro-batch group size",
                    rank_option="the ranks",
                )
            if not fills_rounds(ranks, microbatches):
                return _not_filled(plan, names)
    return None


def _too_few(plan: Plan, names: Names, least: int, what: str, otherwise: str) -> Violation:
    return Violation(
        "microbatches-below-stages",
        f"{plan.schedule} on {names.trainer} needs {names.microbatches} ({plan.num_microbatches}) "
        f"to be at least {what} ({least})",
        f"use {least} or more, or {otherwise}",
    )


def _not_filled(plan: Plan, names: Names) -> Violation:
    ranks, microbatches = plan.num_ranks, plan.num_microbatches
    near = nearest_legal(microbatches, lambda value: fills_rounds(ranks, value))
    return Violation(
        "microbatches-not-multiple-of-rounds",
        f"{plan.schedule} on {names.trainer} needs {names.microbatches} ({microbatches}) to be a "
        f"multiple of rounds ({max(1, microbatches // ranks)}) with {ranks} ranks",
        f"use {choices(near)}, or --chunks 1",
    )


def old_interleaved_violation(plan: Plan, names: Names) -> Violation | None:
    """The rule of torch's first releases: M a multiple of P, groups of P."""
    ranks, microbatches = plan.num_ranks, plan.num_microbatches
    if plan.schedule != "interleaved":
        return None
    if microbatches % ranks:
        near = nearest_legal(microbatches, lambda value: value % ranks == 0)
        return Violation(
            "microbatches-not-multiple-of-ranks",
            f"interleaved on {names.trainer} needs {names.microbatches} ({microbatches}) to be a "
            f"multiple of the ranks ({ranks})",
            f"use {choices(near)}, or --chunks 1",
        )
    if plan.microbatch_group_size not in (None, ranks):
        return Violation(
            "group-size-fixed",
            f"interleaved on {names.trainer} runs micro-batches in groups of the ranks ({ranks}), "
            f"but the micro-batch group size is {plan.microbatch_group_size}",
            f"use {ranks}, or --target torch",
        )
    return None


def tied_violation(plan: Plan, setting: Setting, trainer: str) -> Violation | None:
    """Embedding and head share one weight, but live on different ranks."""
    if not setting.ties_embeddings or plan.num_ranks == 1:
        return None
    return Violation(
        "tied-embeddings",
        f"{trainer} has no tied embeddings over pipeline ranks, but the model ties them "
        f"(tie_word_embeddings) and runs on {plan.num_ranks} ranks: the first and the last stage "
        "would train two copies apart",
        "untie them (tie_word_embeddings: false), use 1 rank, or --target megatron",
    )
