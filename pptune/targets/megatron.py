"""Megatron-LM, core 0.20: a shell script with its pipeline options.

Option names: megatron/training/arguments.py and core/model_parallel_config.py at d98e8a6.
"""

import re
import shlex

from pptune.plan import Plan
from pptune.targets.groups import megatron_group_sizes
from pptune.targets.megatron_rules import (
    LAYOUT_FLAG,
    MEGATRON_LM,
    SCHEDULES,
    executor,
    family_violation,
)
from pptune.targets.notes import checkpoint_note, header, layout_note, neighbours_note, ramp_note
from pptune.targets.split import Split, built_layers, split_of
from pptune.targets.target import ExportedFile, Job, Setting, Trainer, Violation, Written

FILE_NAME = "megatron_plan.sh"

_SCRIPT = """\
#!/usr/bin/env bash
{notes}
# Run on every node (NODE_RANK and MASTER_ADDR set where there are several):
#   GPUS_PER_NODE={default_local} bash {file_name} pretrain_gpt.py <your other options>
set -euo pipefail
PROCESSES={processes}  # {sizes}
GPUS_PER_NODE="${{GPUS_PER_NODE:-{default_local}}}"
((PROCESSES % GPUS_PER_NODE == 0)) || {{ echo "GPUS_PER_NODE must divide $PROCESSES" >&2; exit 2; }}
{environment}
PIPELINE_ARGS=(
{arguments}
)
exec torchrun --nnodes "$((PROCESSES / GPUS_PER_NODE))" --nproc-per-node "$GPUS_PER_NODE" \\
    --node-rank "${{NODE_RANK:-0}}" --master-addr "${{MASTER_ADDR:-localhost}}" \\
    --master-port "${{MASTER_PORT:-29500}}" "$@" "${{PIPELINE_ARGS[@]}}"
"""


def illegal(plan: Plan, setting: Setting, version: str) -> Violation | None:
    """The first rule that `plan` breaks, or None."""
    return family_violation(plan, setting, MEGATRON_LM)


def common_arguments(plan: Plan, job: Job) -> list[str]:
    """Options that don't depend on how the blocks are split; one string per option and value."""
    setting = job.setting
    arguments = [
        f"--num-layers {plan.num_layers}",
        f"--seq-length {job.seq_len}",
        f"--tensor-model-parallel-size {setting.tensor_parallel}",
        f"--context-parallel-size {setting.context_parallel}",
        f"--pipeline-model-parallel-size {plan.num_ranks}",
        f"--micro-batch-size {plan.microbatch_size}",
        f"--global-batch-size {plan.global_batch_size}",
    ]
    if plan.num_chunks > 1:
        # Evaluation obeys the same rule on micro-batches and would otherwise be sized by default.
        arguments += [
            f"--eval-micro-batch-size {plan.microbatch_size}",
            f"--eval-global-batch-size {plan.global_batch_size}",
        ]
    if plan.microbatch_group_size is not None:
        arguments.append(f"{MEGATRON_LM.group} {plan.microbatch_group_size}")
    if plan.recompute == "full":
        # The unit is blocks per virtual stage; 1 divides any stage.
        arguments += [
            "--recompute-granularity full",
            "--recompute-method uniform",
            "--recompute-num-layers 1",
        ]
    if setting.zero == 1:
        arguments.append("--use-distributed-optimizer")
    return arguments


def split_arguments(plan: Plan, split: Split) -> list[str]:
    """Options for V and the blocks per stage; a layout replaces all others (arguments.py:928)."""
    if split.layout is not None:
        return [f"{LAYOUT_FLAG} {shlex.quote(split.layout)}"]
    arguments = []
    if plan.num_chunks > 1:
        arguments.append(f"{MEGATRON_LM.chunks} {plan.num_chunks}")
    if split.count_embedding:
        arguments.append("--account-for-embedding-in-pipeline-split")
    if split.count_loss:
        arguments.append("--account-for-loss-in-pipeline-split")
    if split.ends is not None:
        first, last = split.ends
        arguments.append(f"--decoder-first-pipeline-num-layers {first}")
        arguments.append(f"--decoder-last-pipeline-num-layers {last}")
    return arguments


def script(
    plan: Plan, job: Job, *, file_name: str, trainer: str, arguments: list[str], notes: list[str]
) -> ExportedFile:
    """A shell script that launches a trainer of the family with `arguments`."""
    setting = job.setting
    num_processes = setting.num_processes(plan)
    sizes = (
        f"tensor {setting.tensor_parallel} x context {setting.context_parallel} x pipeline "
        f"{plan.num_ranks} x data {plan.data_parallel}"
    )
    text = _SCRIPT.format(
        notes=header("#", trainer, plan, job, notes),
        file_name=file_name,
        processes=num_processes,
        sizes=sizes,
        default_local=max(local for local in range(1, 9) if num_processes % local == 0),
        environment=environment_lines(setting),
        arguments="\n".join(f"    {argument}" for argument in arguments),
    )
    return ExportedFile(file_name, text)


def environment_lines(setting: Setting) -> str:
    """The launch environment; it can't be changed once a process has started."""
    if setting.tensor_parallel > 1 or setting.context_parallel > 1:
        return (
            "# One connection keeps the order of overlapped communication before Blackwell.\n"
            "# Never with FSDP.\n"
            "export CUDA_DEVICE_MAX_CONNECTIONS=1"
        )
    return (
        "# CUDA_DEVICE_MAX_CONNECTIONS=1 is needed only with tensor or context parallelism\n"
        "# (before Blackwell)."
    )


def family_notes(plan: Plan, split: Split, layout_option: str | None) -> list[str]:
    """What a user of a trainer of the family must know about this plan."""
    notes = [checkpoint_note()]
    if plan.microbatch_group_size is not None:
        notes += [ramp_note(plan), "P2P overlap is on by default for more than one chunk; keep it."]
    if plan.data_parallel > 1:
        notes.append(
            neighbours_note("Megatron-LM's use_tp_pp_dp_mapping gives the predicted order")
        )
    if layout_option is not None and not split.is_even and split.layout is None:
        notes.append(layout_note(plan, layout_option))
    if 0 in plan.layers_per_stage[1:-1]:
        notes.append("The layout has empty stages; runs with empty stages have hung.")
    return notes


def write(plan: Plan, job: Job, version: str) -> list[ExportedFile]:
    """The script. `plan` must be legal."""
    split = split_of(plan.layers_per_stage, plan.num_ranks)
    arguments = common_arguments(plan, job) + split_arguments(plan, split)
    return [
        script(
            plan,
            job,
            file_name=FILE_NAME,
            trainer=f"Megatron-LM core {version}",
            arguments=arguments,
            notes=family_notes(plan, split, LAYOUT_FLAG),
        )
    ]


def reread(files: dict[str, str], num_layers: int) -> Written:
    """What the script says."""
    (text,) = files.values()
    return written_from_flags(read_flags(text), num_processes=read_processes(text))


def read_flags(text: str) -> dict[str, str]:
    """Flag to value from the PIPELINE_ARGS array; a flag without a value maps to an empty text."""
    body = text.split("PIPELINE_ARGS=(\n", 1)[1].split("\n)\n", 1)[0]
    flags: dict[str, str] = {}
    name = ""
    for token in shlex.split(body):
        if token.startswith("--"):
            name = token
            flags[name] = ""
        else:
            flags[name] = token
    return flags


def read_processes(text: str) -> int:
    """The number of processes the script launches."""
    found = re.search(r"^PROCESSES=(\d+)", text, re.MULTILINE)
    assert found is not None
    return int(found[1])


def written_from_flags(
    flags: dict[str, str],
    *,
    num_processes: int,
    layers: tuple[int, ...] | None = None,
    schedule: str | None = None,
) -> Written:
    """The plan behind Megatron-LM flags, computed as its argument parser does.

    `layers` and `schedule`: where the trainer has options of its own for them.
    """
    num_ranks = int(flags["--pipeline-model-parallel-size"])
    num_layers = int(flags["--num-layers"])
    size = int(flags["--micro-batch-size"])
    model_parallel = (
        num_ranks
        * int(flags["--tensor-model-parallel-size"])
        * int(flags["--context-parallel-size"])
    )
    data_parallel = num_processes // model_parallel
    if layers is None:
        layers = _layers_from_flags(flags, num_layers, num_ranks)
    group = flags.get(MEGATRON_LM.group)
    return Written(
        num_ranks=num_ranks,
        num_chunks=len(layers) // num_ranks,
        microbatch_size=size,
        num_microbatches=int(flags["--global-batch-size"]) // (size * data_parallel),
        data_parallel=data_parallel,
        layers_per_stage=layers,
        microbatch_group_size=None if group is None else int(group),
        schedule=schedule,
        recompute=flags.get("--recompute-granularity", "none"),
    )


def _layers_from_flags(flags: dict[str, str], num_layers: int, num_ranks: int) -> tuple[int, ...]:
    ends = [
        int(flags[name])
        for name in ("--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers")
        if name in flags
    ]
    split = Split(
        count_embedding="--account-for-embedding-in-pipeline-split" in flags,
        count_loss="--account-for-loss-in-pipeline-split" in flags,
        ends=(ends[0], ends[1]) if ends else None,
        layout=flags.get(LAYOUT_FLAG),
    )
    num_stages = num_ranks * int(flags.get(MEGATRON_LM.chunks, "1"))
    layers = built_layers(split, num_layers=num_layers, num_ranks=num_ranks, num_stages=num_stages)
    return layers or ()


TRAINER = Trainer(
    versions=("0.20",),
    schedules=lambda version: SCHEDULES,
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
