"""Megatron-LM's rules, which its wrappers inherit under option names of their own.

Source: Megatron-LM core 0.20, training/arguments.py and core/pipeline_parallel/schedules.py.
"""

from dataclasses import dataclass

from pptune.executors import Executor
from pptune.plan import Plan
from pptune.targets.groups import group_violation, is_legal_group
from pptune.targets.layout import write_layout
from pptune.targets.split import balanced_layers
from pptune.targets.target import Setting, Violation, choices

SCHEDULES = frozenset({"1f1b", "interleaved"})

LAYOUT_FLAG = "--pipeline-model-parallel-layout"


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """What a trainer of the Megatron family calls the options that messages speak of."""

    ranks: str
    chunks: str
    group: str
    layout: str | None
    """None where the trainer has no layout option."""


MEGATRON_LM = Names(
    ranks="--pipeline-model-parallel-size",
    chunks="--num-virtual-stages-per-pipeline-rank",
    group="--microbatch-group-size-per-virtual-pipeline-stage",
    layout=LAYOUT_FLAG,
)


def executor(plan: Plan) -> Executor:
    """P2P is overlapped for V > 1 only (arguments.py: overlap_p2p_comm is off at V = 1)."""
    return Executor.MEGATRON_EXPOSED if plan.num_chunks == 1 else Executor.MEGATRON_OVERLAP


def family_violation(plan: Plan, setting: Setting, names: Names) -> Violation | None:
    """The first rule of the family that `plan` breaks, or None."""
    if plan.num_chunks > 1:
        found = _interleaving_violation(plan, setting, names)
        if found is not None:
            return found
    if min(plan.layers_per_stage) == 0:
        return empty_middle_violation(plan, setting)
    return None


def _interleaving_violation(plan: Plan, setting: Setting, names: Names) -> Violation | None:
    ranks, group = plan.num_ranks, plan.microbatch_group_size or plan.num_ranks
    if ranks == 1:
        return Violation(
            "interleaving-on-one-rank",
            f"{names.chunks} ({plan.num_chunks}) needs {names.ranks} (1) to be at least 2",
            "use --chunks 1",
        )
    if ranks == 2 and not setting.overlap_p2p:
        return Violation(
            "interleaving-without-overlap",
            f"{names.chunks} ({plan.num_chunks}) without overlapped P2P needs {names.ranks} (2) to "
            "be at least 3: with 2 ranks the next and the previous rank are the same one, and a "
            "batch of sends and receives can't tell them apart",
            "drop --no-overlap-p2p-communication, or use --chunks 1",
        )
    if is_legal_group(ranks, plan.num_microbatches, group):
        return None
    return group_violation(
        num_ranks=ranks,
        num_microbatches=plan.num_microbatches,
        group_size=group,
        group_option=names.group,
        rank_option=names.ranks,
    )


def empty_middle_violation(plan: Plan, setting: Setting) -> Violation | None:
    """A stage that holds nothing: the ends still have the embedding and the head."""
    middle = plan.layers_per_stage[1:-1]
    if 0 not in middle or setting.allow_empty_stages:
        return None
    return Violation(
        "empty-stage",
        f"stage {middle.index(0) + 1} of {plan.num_stages} holds nothing, and runs with an empty "
        "stage have hung",
        f"use at most {plan.num_layers} stages (fewer chunks or ranks), or --allow-empty-stages",
    )


def uneven_violation(
    num_layers: int, num_ranks: int, num_chunks: int, names: Names
) -> Violation | None:
    """Why the blocks don't divide evenly, with what does: V, a layout, or None where they do.

    Megatron-LM's own message is "num_layers_per_pipeline_rank should be divisible by vp_size".
    """
    num_stages = num_ranks * num_chunks
    if num_layers % num_stages == 0:
        return None
    advice = []
    if num_layers % num_ranks == 0:
        per_rank = num_layers // num_ranks
        legal = [value for value in range(1, per_rank + 1) if per_rank % value == 0]
        advice.append(f"--chunks {choices(legal)}")
    if num_layers >= num_stages:
        layers = balanced_layers(num_layers, num_stages)
        if num_chunks == 1 and len(set(layers[1:-1])) <= 1:
            advice.append(f"{layers[0]} layers on the first rank and {layers[-1]} on the last")
        if names.layout is not None:
            advice.append(f"{names.layout} '{write_layout(layers)}'")
    else:
        advice.append(f"at most {num_layers} stages")
    return Violation(
        "layers-not-divisible",
        f"{num_layers} layers do not divide evenly into {num_stages} stages: {names.ranks} "
        f"({num_ranks}) x {names.chunks} ({num_chunks})",
        "use " + ", or ".join(advice),
    )
