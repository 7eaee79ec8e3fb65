"""Megatron-Bridge 0.6 and NeMo 2.0: Megatron's options under the names of their configurations.

Option names: Megatron-Bridge scripts/training/run_recipe.py and training/config.py at 067f987; NeMo
nemo/lightning/pytorch/strategies/megatron_strategy.py at 8cfedd7. NeMo 2.0 has no layout string.
"""

import ast
import shlex
from collections.abc import Mapping

from pptune.plan import Plan
from pptune.targets.groups import megatron_group_sizes
from pptune.targets.megatron import environment_lines, family_notes
from pptune.targets.megatron_rules import SCHEDULES, Names, executor, family_violation
from pptune.targets.notes import header
from pptune.targets.python_text import literals
from pptune.targets.split import Split, balanced_layers, built_layers, split_of
from pptune.targets.target import ExportedFile, Job, Setting, Trainer, Violation, Written

BRIDGE = Names(
    ranks="model.pipeline_model_parallel_size",
    chunks="model.virtual_pipeline_model_parallel_size",
    group="model.microbatch_group_size_per_vp_stage",
    layout="model.pipeline_model_parallel_layout",
)

NEMO = Names(
    ranks="pipeline_model_parallel_size",
    chunks="virtual_pipeline_model_parallel_size",
    group="microbatch_group_size_per_vp_stage",
    layout=None,
)

_BRIDGE_FILE = "bridge_plan.sh"
_NEMO_FILE = "nemo_plan.py"

_BRIDGE_SCRIPT = """\
#!/usr/bin/env bash
{notes}
# Add "${{PIPELINE_OVERRIDES[@]}}" to the command line of run_recipe.py, started as {processes}
# processes ({sizes}).
PROCESSES={processes}
{environment}
PIPELINE_OVERRIDES=(
{overrides}
)
"""

_NEMO_SCRIPT = """\
{notes}
# Start {processes} processes ({sizes}).
{environment}
from nemo.lightning import MegatronStrategy
from nemo.lightning.pytorch.callbacks.megatron_comm_overlap import MegatronCommOverlapCallback

PROCESSES = {processes}
NUM_LAYERS = {num_layers}  # of the model
MICRO_BATCH_SIZE = {size}  # of the data module
GLOBAL_BATCH_SIZE = {batch}  # of the data module, for training and for validation

strategy = MegatronStrategy(
{arguments}
)
overlap = MegatronCommOverlapCallback(tp_comm_overlap=False, overlap_p2p_comm={overlap},
                                      batch_p2p_comm={batched})
"""


def illegal_bridge(plan: Plan, setting: Setting, version: str) -> Violation | None:
    """The first rule that `plan` breaks, or None."""
    return family_violation(plan, setting, BRIDGE)


def illegal_nemo(plan: Plan, setting: Setting, version: str) -> Violation | None:
    """The first rule that `plan` breaks, or None; without a layout few uneven splits remain."""
    found = family_violation(plan, setting, NEMO)
    if found is not None or len(set(plan.layers_per_stage)) == 1:
        return found
    if split_of(plan.layers_per_stage, plan.num_ranks).layout is None:
        return None
    near = balanced_layers(plan.num_layers, plan.num_stages)
    return Violation(
        "layers-uneven",
        f"NeMo 2.0 cannot place {list(plan.layers_per_stage)}: num_layers_in_first_pipeline_stage, "
        "num_layers_in_last_pipeline_stage and account_for_*_in_pipeline_split only change the "
        "first and the last stage",
        f"use blocks per stage such as {list(near)}, or --target megatron-bridge",
    )


def _model_options(plan: Plan, setting: Setting, split: Split) -> dict[str, object]:
    """Field of the model's or strategy's configuration to value; both trainers share the names."""
    options: dict[str, object] = {
        "tensor_model_parallel_size": setting.tensor_parallel,
        "context_parallel_size": setting.context_parallel,
        "pipeline_model_parallel_size": plan.num_ranks,
        "virtual_pipeline_model_parallel_size": plan.num_chunks if plan.num_chunks > 1 else None,
    }
    if plan.num_chunks > 1:
        # Filled in once from P and not again when P is overridden: never leave it to the default.
        options["microbatch_group_size_per_vp_stage"] = plan.microbatch_group_size
    if split.count_embedding:
        options["account_for_embedding_in_pipeline_split"] = True
    if split.count_loss:
        options["account_for_loss_in_pipeline_split"] = True
    if split.ends is not None:
        options["num_layers_in_first_pipeline_stage"] = split.ends[0]
        options["num_layers_in_last_pipeline_stage"] = split.ends[1]
    if split.layout is not None:
        options["pipeline_model_parallel_layout"] = split.layout
    return options


def _overlap(plan: Plan) -> tuple[bool, bool]:
    """overlap_p2p_comm, batch_p2p_comm as training/comm_overlap.py sets them."""
    return plan.num_chunks > 1, plan.num_ranks > 1 and plan.num_chunks == 1


def _sizes(plan: Plan, setting: Setting) -> str:
    return (
        f"tensor {setting.tensor_parallel} x context {setting.context_parallel} x pipeline "
        f"{plan.num_ranks} x data {plan.data_parallel}"
    )


def write_bridge(plan: Plan, job: Job, version: str) -> list[ExportedFile]:
    """KEY=VALUE overrides for a recipe. `plan` must be legal."""
    split = split_of(plan.layers_per_stage, plan.num_ranks)
    overlap, batched = _overlap(plan)
    options = {
        f"model.{name}": value for name, value in _model_options(plan, job.setting, split).items()
    }
    options |= {
        "model.num_layers": plan.num_layers,
        "train.micro_batch_size": plan.microbatch_size,
        "train.global_batch_size": plan.global_batch_size,
        "validation.eval_micro_batch_size": plan.microbatch_size,
        "validation.eval_global_batch_size": plan.global_batch_size,
        "comm_overlap.overlap_p2p_comm": overlap,
        "comm_overlap.batch_p2p_comm": batched,
    }
    if plan.recompute == "full":
        options |= {
            "model.recompute_granularity": "full",
            "model.recompute_method": "uniform",
            "model.recompute_num_layers": 1,
        }
    if job.setting.zero == 1:
        options["ddp.use_distributed_optimizer"] = True
    text = _BRIDGE_SCRIPT.format(
        notes=header(
            "#", f"Megatron-Bridge {version}", plan, job, family_notes(plan, split, BRIDGE.layout)
        ),
        processes=job.setting.num_processes(plan),
        sizes=_sizes(plan, job.setting),
        environment=environment_lines(job.setting),
        overrides="\n".join(f"    {_override(name, value)}" for name, value in options.items()),
    )
    return [ExportedFile(_BRIDGE_FILE, text)]


def _override(name: str, value: object) -> str:
    """One word for the shell: null and true in lower case, a layout in the parser's quotes."""
    match value:
        case None:
            text = "null"
        case bool():
            text = str(value).lower()
        case str() if name.endswith("layout"):
            text = f'"{value}"'
        case _:
            text = str(value)
    return shlex.quote(f"{name}={text}")


def reread_bridge(files: dict[str, str], num_layers: int) -> Written:
    """What the overrides say."""
    (text,) = files.values()
    body = text.split("PIPELINE_OVERRIDES=(\n", 1)[1].split("\n)\n", 1)[0]
    options = dict(word.split("=", 1) for word in shlex.split(body))
    values = {
        name: {"null": None, "true": True, "false": False}.get(value, value.strip('"'))
        for name, value in options.items()
    }
    model = {name.removeprefix("model."): value for name, value in values.items()}
    processes = next(line for line in text.splitlines() if line.startswith("PROCESSES="))
    return _written(
        model,
        num_layers=int(options["model.num_layers"]),
        microbatch_size=int(options["train.micro_batch_size"]),
        global_batch_size=int(options["train.global_batch_size"]),
        num_processes=int(processes.removeprefix("PROCESSES=")),
    )


def write_nemo(plan: Plan, job: Job, version: str) -> list[ExportedFile]:
    """A Python snippet with the strategy and its callback. `plan` must be legal."""
    split = split_of(plan.layers_per_stage, plan.num_ranks)
    options = _model_options(plan, job.setting, split)
    notes = family_notes(plan, split, None)
    if plan.recompute == "full":
        notes.append(
            "Full recompute: give the model recompute_granularity='full', "
            "recompute_method='uniform' and recompute_num_layers=1 (blocks per virtual stage)."
        )
    overlap, batched = _overlap(plan)
    if job.setting.zero == 1:
        notes.append("ZeRO 1: give MegatronStrategy a ddp with use_distributed_optimizer=True.")
    text = _NEMO_SCRIPT.format(
        notes=header("#", f"NeMo {version}", plan, job, notes),
        processes=job.setting.num_processes(plan),
        sizes=_sizes(plan, job.setting),
        environment=environment_lines(job.setting).replace("export ", "# in the launch line: "),
        num_layers=plan.num_layers,
        size=plan.microbatch_size,
        batch=plan.global_batch_size,
        arguments="\n".join(f"    {name}={value!r}," for name, value in options.items()),
        overlap=overlap,
        batched=batched,
    )
    return [ExportedFile(_NEMO_FILE, text)]


def reread_nemo(files: dict[str, str], num_layers: int) -> Written:
    """What the snippet says."""
    (text,) = files.values()
    values = literals(text)
    call = next(
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "MegatronStrategy"
    )
    model = {word.arg or "": ast.literal_eval(word.value) for word in call.keywords}
    return _written(
        model,
        num_layers=values["NUM_LAYERS"],
        microbatch_size=values["MICRO_BATCH_SIZE"],
        global_batch_size=values["GLOBAL_BATCH_SIZE"],
        num_processes=values["PROCESSES"],
    )


def _written(
    model: Mapping[str, object],
    *,
    num_layers: int,
    microbatch_size: int,
    global_batch_size: int,
    num_processes: int,
) -> Written:
    def number(name: str, default: int) -> int:
        value = model.get(name)
        return default if value is None else int(str(value))

    num_ranks = number("pipeline_model_parallel_size", 1)
    num_stages = num_ranks * number("virtual_pipeline_model_parallel_size", 1)
    first, last = (number(f"num_layers_in_{end}_pipeline_stage", -1) for end in ("first", "last"))
    layout = model.get("pipeline_model_parallel_layout")
    split = Split(
        count_embedding=bool(model.get("account_for_embedding_in_pipeline_split")),
        count_loss=bool(model.get("account_for_loss_in_pipeline_split")),
        ends=None if first < 0 else (first, last),
        layout=None if layout is None else str(layout),
    )
    layers = built_layers(split, num_layers=num_layers, num_ranks=num_ranks, num_stages=num_stages)
    model_parallel = num_ranks * number("tensor_model_parallel_size", 1)
    data_parallel = num_processes // (model_parallel * number("context_parallel_size", 1))
    group = number("microbatch_group_size_per_vp_stage", 0)
    return Written(
        num_ranks=num_ranks,
        num_chunks=num_stages // num_ranks,
        microbatch_size=microbatch_size,
        num_microbatches=global_batch_size // (microbatch_size * data_parallel),
        data_parallel=data_parallel,
        layers_per_stage=layers,
        microbatch_group_size=group or None,
    )


def _group_sizes(schedule: str, ranks: int, microbatches: int, version: str) -> tuple[int, ...]:
    return megatron_group_sizes(ranks, microbatches)


TRAINER = Trainer(
    versions=("0.6",),
    schedules=lambda version: SCHEDULES,
    illegal=illegal_bridge,
    executor=executor,
    group_sizes=_group_sizes,
    supports_uneven=True,
    keeps_boundary_tensors=False,
    write=write_bridge,
    reread=reread_bridge,
)

NEMO_TRAINER = Trainer(
    versions=("2.0",),
    schedules=lambda version: SCHEDULES,
    illegal=illegal_nemo,
    executor=executor,
    group_sizes=_group_sizes,
    supports_uneven=True,
    keeps_boundary_tensors=False,
    write=write_nemo,
    reread=reread_nemo,
)
