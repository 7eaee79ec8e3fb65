"""Hugging Face accelerate 1.15: a MegatronLMPlugin.

Source: src/accelerate/utils/dataclasses.py. The plug-in's fields become Megatron-LM's argument
defaults and `other_megatron_args` are laid over them, under Megatron-LM's own argument names.
ParallelismConfig has no pipeline.
"""

import ast

from pptune.plan import Plan
from pptune.targets.groups import megatron_group_sizes
from pptune.targets.layout import blocks_per_stage, parse_layout, write_layout
from pptune.targets.megatron import environment_lines, family_notes
from pptune.targets.megatron_rules import SCHEDULES, Names, executor, family_violation
from pptune.targets.notes import header
from pptune.targets.python_text import literals
from pptune.targets.split import split_of
from pptune.targets.target import ExportedFile, Job, Setting, Trainer, Violation, Written

NAMES = Names(
    ranks="pp_degree",
    chunks="num_layers_per_virtual_pipeline_stage",
    group="microbatch_group_size_per_vp_stage",
    layout="pipeline_model_parallel_layout",
)

_FILE = "accelerate_plan.py"

_PLUGIN = """\
{notes}
{environment}
from accelerate import Accelerator
from accelerate.utils import MegatronLMPlugin

PROCESSES = {processes}
MICRO_BATCH_SIZE = {size}  # the batch_size of your DataLoader

plugin = MegatronLMPlugin(
{fields}
)
accelerator = Accelerator(megatron_lm_plugin=plugin)
"""


def illegal(plan: Plan, setting: Setting, version: str) -> Violation | None:
    """The first rule that `plan` breaks, or None."""
    return family_violation(plan, setting, NAMES)


def _fields(plan: Plan, job: Job) -> dict[str, object]:
    setting = job.setting
    other: dict[str, object] = {}
    fields: dict[str, object] = {
        "tp_degree": setting.tensor_parallel,
        # Left out, this one is 2.
        "context_parallel_size": setting.context_parallel,
        "pp_degree": plan.num_ranks,
        "num_micro_batches": plan.num_microbatches,
        "use_distributed_optimizer": setting.zero == 1,
    }
    if len(set(plan.layers_per_stage)) > 1:
        other["pipeline_model_parallel_layout"] = write_layout(plan.layers_per_stage)
    elif plan.num_chunks > 1:
        fields["num_layers_per_virtual_pipeline_stage"] = plan.layers_per_stage[0]
    if plan.num_chunks > 1:
        other["microbatch_group_size_per_vp_stage"] = plan.microbatch_group_size
        other["eval_micro_batch_size"] = plan.microbatch_size
        other["eval_global_batch_size"] = plan.global_batch_size
    # Left out, the plug-in recomputes every block.
    other["recompute_granularity"] = "full" if plan.recompute == "full" else None
    if plan.recompute == "full":
        other |= {"recompute_method": "uniform", "recompute_num_layers": 1}
    return fields | {"other_megatron_args": other}


def write(plan: Plan, job: Job, version: str) -> list[ExportedFile]:
    """The plug-in. `plan` must be legal."""
    processes = job.setting.num_processes(plan)
    notes = [
        f"accelerate launch --use_megatron_lm --num_processes {processes} "
        f"--megatron_lm_pp_degree {plan.num_ranks} --megatron_lm_num_micro_batches "
        f"{plan.num_microbatches} <your script>; there is no launch option for chunks.",
        *family_notes(plan, split_of(plan.layers_per_stage, plan.num_ranks), None),
    ]
    text = _PLUGIN.format(
        notes=header("#", f"accelerate {version} with Megatron-LM", plan, job, notes),
        environment=environment_lines(job.setting).replace("export ", "# in the launch line: "),
        processes=processes,
        size=plan.microbatch_size,
        fields="\n".join(f"    {name}={value!r}," for name, value in _fields(plan, job).items()),
    )
    return [ExportedFile(_FILE, text)]


def reread(files: dict[str, str], num_layers: int) -> Written:
    """What the plug-in says to a model of `num_layers` blocks."""
    (text,) = files.values()
    values = literals(text)
    call = next(
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "MegatronLMPlugin"
    )
    fields = {word.arg: ast.literal_eval(word.value) for word in call.keywords}
    other = fields["other_megatron_args"]
    num_ranks = fields["pp_degree"]
    layout = other.get("pipeline_model_parallel_layout")
    if layout is not None:
        layers = blocks_per_stage(parse_layout(layout))
    else:
        per_stage = fields.get("num_layers_per_virtual_pipeline_stage") or num_layers // num_ranks
        layers = (per_stage,) * (num_layers // per_stage)
    model_parallel = fields["tp_degree"] * fields["context_parallel_size"] * num_ranks
    return Written(
        num_ranks=num_ranks,
        num_chunks=len(layers) // num_ranks,
        microbatch_size=values["MICRO_BATCH_SIZE"],
        num_microbatches=fields["num_micro_batches"],
        data_parallel=values["PROCESSES"] // model_parallel,
        layers_per_stage=layers,
        microbatch_group_size=other.get("microbatch_group_size_per_vp_stage"),
        recompute=other["recompute_granularity"] or "none",
    )


TRAINER = Trainer(
    versions=("1.15",),
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
