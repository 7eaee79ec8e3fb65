"""MindSpeed (Ascend): Megatron-LM's options, its own nested list of layers, and DualPipeV.

Sources: features_manager/pipeline_parallel/unaligned_pineline_feature.py and dualpipev_feature.py
at 028de58.
"""

import json

from pptune.plan import Plan
from pptune.targets import megatron
from pptune.targets.groups import megatron_group_sizes
from pptune.targets.megatron_rules import MEGATRON_LM, SCHEDULES, executor, family_violation
from pptune.targets.split import Split
from pptune.targets.target import ExportedFile, Job, Setting, Trainer, Violation, Written

FILE_NAME = "mindspeed_plan.sh"

_LAYERS = "--pipeline-num-transformer-layers"
_METHOD = "--schedules-method"


def illegal(plan: Plan, setting: Setting, version: str) -> Violation | None:
    """The first rule that `plan` breaks, or None."""
    if plan.schedule == "dualpipe-v":
        return _dualpipe_violation(plan, setting)
    return family_violation(plan, setting, MEGATRON_LM)


def _dualpipe_violation(plan: Plan, setting: Setting) -> Violation | None:
    ranks, least = plan.num_ranks, 2 * plan.num_ranks - 1
    method = f"{_METHOD} dualpipev"
    if ranks == 1:
        return Violation(
            "interleaving-on-one-rank",
            f"{method} needs --pipeline-model-parallel-size (1) to be at least 2",
            "use --schedule 1f1b",
        )
    if plan.num_microbatches < least:
        return Violation(
            "microbatches-below-stages",
            f"{method} needs micro-batches ({plan.num_microbatches}) to be at least 2 x "
            f"--pipeline-model-parallel-size - 1 ({least})",
            f"use {least} or more (--global-batch-size), or --schedule interleaved",
        )
    if setting.ties_embeddings:
        return Violation(
            "tied-embeddings",
            f"{method} needs --untie-embeddings-and-output-weights, but the model ties them",
            "untie them, or use --schedule interleaved",
        )
    if setting.context_parallel > 1:
        return Violation(
            "context-parallel",
            f"{method} needs --context-parallel-size ({setting.context_parallel}) to be 1",
            "use --context-parallel 1, or --schedule interleaved",
        )
    if len(set(plan.layers_per_stage)) > 1:
        return Violation(
            "layers-uneven",
            f"{method} splits {plan.num_layers} layers evenly over 2 x "
            f"--pipeline-model-parallel-size ({2 * ranks}) stages, but the plan has "
            f"{list(plan.layers_per_stage)}",
            f"use a number of ranks whose double divides {plan.num_layers}, or "
            "--schedule interleaved",
        )
    return None


def write(plan: Plan, job: Job, version: str) -> list[ExportedFile]:
    """The script. `plan` must be legal."""
    arguments = megatron.common_arguments(plan, job)
    if plan.schedule == "dualpipe-v":
        arguments.append(f"{_METHOD} dualpipev")
    elif plan.num_chunks > 1:
        arguments.append(f"{MEGATRON_LM.chunks} {plan.num_chunks}")
    if len(set(plan.layers_per_stage)) > 1:
        ranks = range(plan.num_ranks)
        nested = [list(plan.layers_per_stage[rank :: plan.num_ranks]) for rank in ranks]
        arguments.append(f"{_LAYERS} '{json.dumps(nested, separators=(',', ':'))}'")
    notes = megatron.family_notes(plan, Split(), None)
    if plan.recompute == "full":
        notes.append(
            "Without --enable-recompute-layers-per-pp-rank; with it the unit of "
            "--recompute-num-layers is the rank and no longer the virtual stage."
        )
    return [
        megatron.script(
            plan,
            job,
            file_name=FILE_NAME,
            trainer="MindSpeed main (July 2026)",
            arguments=arguments,
            notes=notes,
        )
    ]


def reread(files: dict[str, str], num_layers: int) -> Written:
    """What the script says."""
    (text,) = files.values()
    flags = megatron.read_flags(text)
    num_ranks = int(flags["--pipeline-model-parallel-size"])
    blocks = int(flags["--num-layers"])
    is_dualpipe = flags.get(_METHOD) == "dualpipev"
    if is_dualpipe:
        layers = (blocks // (2 * num_ranks),) * (2 * num_ranks)
    elif _LAYERS in flags:
        nested = json.loads(flags[_LAYERS])
        num_chunks = len(nested[0])
        layers = tuple(row[chunk] for chunk in range(num_chunks) for row in nested)
    else:
        num_stages = num_ranks * int(flags.get(MEGATRON_LM.chunks, "1"))
        layers = (blocks // num_stages,) * num_stages
    return megatron.written_from_flags(
        flags,
        num_processes=megatron.read_processes(text),
        layers=layers,
        schedule="dualpipe-v" if is_dualpipe else None,
    )


TRAINER = Trainer(
    versions=("main",),
    schedules=lambda version: SCHEDULES | {"dualpipe-v"},
    illegal=illegal,
    executor=executor,
    group_sizes=lambda schedule, ranks, microbatches, version: megatron_group_sizes(
        ranks, microbatches
    ),
    supports_uneven=True,
    keeps_boundary_tensors=False,
    write=write,
    reread=reread,
)
