"""torchtitan in two dialects: TOML for the releases 0.2.x, a Python configuration for main.

Sources: torchtitan/config/job_config.py and distributed/pipeline_parallel.py at v0.2.2;
torchtitan/config/configs.py at b5bcd76, where batch sizes are counted in tokens and the last module
is called lm_head.
"""

import ast
import json
import math
import tomllib
from typing import Any

from pptune import schedules
from pptune.plan import Plan
from pptune.targets.groups import torch_group_sizes
from pptune.targets.megatron_rules import empty_middle_violation
from pptune.targets.notes import checkpoint_note, header, neighbours_note
from pptune.targets.target import ExportedFile, Job, Setting, Trainer, Violation, Written
from pptune.targets.torch_rules import (
    CLASSES,
    SCHEDULES,
    Names,
    executor,
    microbatch_violation,
    needs_loaded_order,
    tied_violation,
)

MAIN = "main"

_TOML_FILE = "torchtitan_plan.toml"
_CONFIG_FILE = "torchtitan_plan.py"
_ORDER_FILE = "torchtitan_order.csv"

_MICROBATCHES = {
    "0.2": "training.local_batch_size / parallelism.pipeline_parallel_microbatch_size",
    MAIN: "parallelism.num_pp_microbatches",
}

_PREFIX = "pipeline_parallel_"

_CONFIG = """\
{notes}
from torchtitan.distributed.activation_checkpoint import FullAC


def planned_config():
    config = llama3_8b()
{settings}
    return config
"""


def illegal(plan: Plan, setting: Setting, version: str) -> Violation | None:
    """The first rule that `plan` breaks, or None."""
    if plan.num_ranks == 1 and plan.num_chunks > 1:
        return Violation(
            "interleaving-on-one-rank",
            f"torchtitan does not pipeline with parallelism.{_PREFIX}degree 1, but chunks is "
            f"{plan.num_chunks}",
            "use --chunks 1",
        )
    names = Names(trainer="torchtitan", microbatches=_MICROBATCHES[version])
    found = microbatch_violation(plan, names) or tied_violation(plan, setting, "torchtitan")
    if found is None and min(plan.layers_per_stage) == 0:
        # It refuses such a split itself, so --allow-empty-stages doesn't help.
        return empty_middle_violation(plan, Setting())
    return found


def default_split(
    num_layers: int, num_stages: int, first_weight: int = 1, last_weight: int = 1
) -> tuple[int, ...] | None:
    """Blocks per stage of torchtitan's own split, or None where it refuses.

    generate_llm_fqn_per_model_part: embedding and output count as so many blocks, stages are as
    equal as they can be, and spare blocks go to the first stages.
    """
    if num_stages == 1:
        return (num_layers,)
    weight, spare = divmod(num_layers + first_weight + last_weight, num_stages)
    if weight < max(1, first_weight, last_weight):
        return None
    layers = [weight + (stage < spare) for stage in range(num_stages)]
    layers[0] -= first_weight
    layers[-1] -= last_weight
    return tuple(layers)


def _split_settings(plan: Plan, last_module: str) -> dict[str, object]:
    """The options that give `layers_per_stage`: a number where torchtitan's split is the plan's."""
    for first, last in ((1, 1), (0, 0), (1, 0), (0, 1)):
        counted = plan.num_layers + first + last
        per_stage = math.ceil(counted / plan.num_stages)
        if (
            math.ceil(counted / per_stage) == plan.num_stages
            and default_split(plan.num_layers, plan.num_stages, first, last)
            == plan.layers_per_stage
        ):
            return {
                f"{_PREFIX}layers_per_stage": per_stage,
                f"{_PREFIX}first_stage_less_layers": first,
                f"{_PREFIX}last_stage_less_layers": last,
            }
    return {"module_fqns_per_model_part": module_names(plan.layers_per_stage, last_module)}


def module_names(layers_per_stage: tuple[int, ...], last_module: str) -> list[list[str]]:
    """The modules of every stage."""
    blocks = iter(range(sum(layers_per_stage)))
    stages = [[f"layers.{next(blocks)}" for _ in range(count)] for count in layers_per_stage]
    stages[0].insert(0, "tok_embeddings")
    stages[-1] += ["norm", last_module]
    return stages


def _parallelism(plan: Plan, job: Job, version: str) -> dict[str, object]:
    sharded = job.setting.zero == 1
    settings: dict[str, object] = {
        "data_parallel_replicate_degree": 1 if sharded else plan.data_parallel,
        "data_parallel_shard_degree": plan.data_parallel if sharded else 1,
        "tensor_parallel_degree": job.setting.tensor_parallel,
        "context_parallel_degree": job.setting.context_parallel,
        f"{_PREFIX}degree": plan.num_ranks,
    }
    if plan.num_ranks > 1:
        settings[f"{_PREFIX}schedule"] = _schedule_name(plan)
        if needs_loaded_order(plan):
            settings[f"{_PREFIX}schedule_csv"] = _ORDER_FILE
        settings |= _split_settings(plan, "lm_head" if version == MAIN else "output")
    return settings


def _schedule_name(plan: Plan) -> str:
    """A class, or with a loaded order the base class that says how many stages a rank has."""
    if not needs_loaded_order(plan):
        return CLASSES[plan.schedule]
    return "PipelineScheduleSingle" if plan.num_chunks == 1 else "PipelineScheduleMulti"


def _notes(plan: Plan, job: Job) -> list[str]:
    notes = [f"Processes: {job.setting.num_processes(plan)}.", checkpoint_note()]
    if plan.data_parallel > 1:
        notes.append(neighbours_note("So hops that were inside a node may cross nodes here"))
    if needs_loaded_order(plan) and plan.num_ranks > 1:
        notes.append(
            f"torch has no class for this order: {_ORDER_FILE} must lie in the folder that you "
            "start from."
        )
    if job.setting.zero == 1:
        notes.append(
            "ZeRO 1 becomes FSDP, which shards gradients and parameters as well. Do not start it "
            "with CUDA_DEVICE_MAX_CONNECTIONS=1: FSDP needs more connections."
        )
    elif job.dtype != "float32":
        notes.append(
            f"Without FSDP the layers run in training.dtype; they were timed in {job.dtype}."
        )
    return notes


def _order_files(plan: Plan) -> list[ExportedFile]:
    if plan.num_ranks == 1 or not needs_loaded_order(plan):
        return []
    order = schedules.generate(
        plan.schedule,
        num_ranks=plan.num_ranks,
        num_chunks=plan.num_chunks,
        num_microbatches=plan.num_microbatches,
        microbatch_group_size=plan.microbatch_group_size,
    )
    return [ExportedFile(_ORDER_FILE, order.to_text())]


def write(plan: Plan, job: Job, version: str) -> list[ExportedFile]:
    """The configuration, and the order where torch has no class for it. `plan` must be legal."""
    text = _config_function(plan, job) if version == MAIN else _toml(plan, job, version)
    name = _CONFIG_FILE if version == MAIN else _TOML_FILE
    return [ExportedFile(name, text), *_order_files(plan)]


def _toml(plan: Plan, job: Job, version: str) -> str:
    parallelism = _parallelism(plan, job, version)
    if plan.num_ranks > 1:
        parallelism[f"{_PREFIX}microbatch_size"] = plan.microbatch_size
    # Without a pipeline the micro-batches become gradient accumulation.
    local = plan.microbatch_size * (plan.num_microbatches if plan.num_ranks > 1 else 1)
    tables: dict[str, dict[str, object]] = {
        "training": {
            "local_batch_size": local,
            "global_batch_size": plan.global_batch_size,
            "seq_len": job.seq_len,
        },
        "parallelism": parallelism,
        "activation_checkpoint": {"mode": plan.recompute},
    }
    lines = [header("#", f"torchtitan {version}", plan, job, _notes(plan, job))]
    for table, settings in tables.items():
        lines += ["", f"[{table}]"]
        lines += [f"{name} = {_toml_value(value)}" for name, value in settings.items()]
    return "\n".join(lines) + "\n"


def _toml_value(value: object) -> str:
    if isinstance(value, list):
        return "[\n" + "".join(f"    {json.dumps(stage)},\n" for stage in value) + "]"
    return json.dumps(value)


def _config_function(plan: Plan, job: Job) -> str:
    tokens = plan.microbatch_size * job.seq_len
    settings: dict[str, object] = {
        f"parallelism.{name}": value for name, value in _parallelism(plan, job, MAIN).items()
    }
    settings |= {
        "parallelism.num_pp_microbatches": plan.num_microbatches,
        "training.num_tokens_per_microbatch_per_dp_rank": tokens,
        "training.num_tokens_per_train_step": tokens * plan.num_microbatches * plan.data_parallel,
        "training.max_context_length": job.seq_len,
    }
    lines = [f"config.{name} = {_python_value(value)}" for name, value in settings.items()]
    recompute = "FullAC.Config()" if plan.recompute == "full" else "None"
    lines.append(f"config.activation_checkpoint = {recompute}")
    notes = [
        "Append this to the config_registry.py of your model's folder, with the configuration "
        "that you train with now in place of llama3_8b, and start with --module <your model> "
        "--config planned_config.",
        *_notes(plan, job),
    ]
    return _CONFIG.format(
        notes=header("#", f"torchtitan {MAIN} (August 2026)", plan, job, notes),
        settings="\n".join(f"    {line}" for line in lines),
    )


def _python_value(value: object) -> str:
    if isinstance(value, list):
        return "[\n" + "".join(f"        {json.dumps(stage)},\n" for stage in value) + "    ]"
    return json.dumps(value)


def reread(files: dict[str, str], num_layers: int) -> Written:
    """What the configuration says to a model of `num_layers` blocks."""
    if _TOML_FILE in files:
        return _reread_toml(files, num_layers)
    return _reread_config(files, num_layers)


def _reread_toml(files: dict[str, str], num_layers: int) -> Written:
    settings = tomllib.loads(files[_TOML_FILE])
    training, parallelism = settings["training"], settings["parallelism"]
    size = parallelism.get(f"{_PREFIX}microbatch_size", training["local_batch_size"])
    return _written(
        parallelism,
        num_layers,
        files.get(_ORDER_FILE),
        microbatch_size=size,
        num_microbatches=training["global_batch_size"] // (size * _data_parallel(parallelism)),
        recompute=settings["activation_checkpoint"]["mode"],
    )


def _reread_config(files: dict[str, str], num_layers: int) -> Written:
    settings: dict[str, ast.expr] = {}
    for node in ast.walk(ast.parse(files[_CONFIG_FILE])):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
            settings[ast.unparse(node.targets[0]).removeprefix("config.")] = node.value
    recomputes = isinstance(settings.pop("activation_checkpoint"), ast.Call)
    values = {name: ast.literal_eval(value) for name, value in settings.items()}
    parallelism = {
        name.removeprefix("parallelism."): value
        for name, value in values.items()
        if name.startswith("parallelism.")
    }
    tokens = values["training.num_tokens_per_microbatch_per_dp_rank"]
    per_step = values["training.num_tokens_per_train_step"]
    return _written(
        parallelism,
        num_layers,
        files.get(_ORDER_FILE),
        microbatch_size=tokens // values["training.max_context_length"],
        num_microbatches=per_step // (tokens * _data_parallel(parallelism)),
        recompute="full" if recomputes else "none",
    )


def _data_parallel(parallelism: dict[str, Any]) -> int:
    return int(
        parallelism["data_parallel_replicate_degree"] * parallelism["data_parallel_shard_degree"]
    )


def _written(
    parallelism: dict[str, Any],
    num_layers: int,
    order: str | None,
    *,
    microbatch_size: int,
    num_microbatches: int,
    recompute: str,
) -> Written:
    num_ranks = parallelism[f"{_PREFIX}degree"]
    layers = _read_layers(parallelism, num_layers)
    name = parallelism.get(f"{_PREFIX}schedule", "1F1B")
    by_class = {torch_name: ours for ours, torch_name in CLASSES.items()}
    return Written(
        num_ranks=num_ranks,
        num_chunks=len(layers) // num_ranks,
        microbatch_size=microbatch_size,
        num_microbatches=num_microbatches,
        data_parallel=_data_parallel(parallelism),
        layers_per_stage=layers,
        microbatch_group_size=None if order is None else _group_size(order),
        schedule=by_class.get(name) if num_ranks > 1 else None,
        recompute=recompute,
    )


def _group_size(order: str) -> int | None:
    """N: how many micro-batches rank 0 starts with before it turns to its second stage."""
    first = [action for action in order.splitlines()[0].split(",") if "F" in action]
    others = [index for index, action in enumerate(first) if not action.startswith("0F")]
    return others[0] if others else None


def _read_layers(parallelism: dict[str, Any], num_layers: int) -> tuple[int, ...]:
    parts = parallelism.get("module_fqns_per_model_part")
    if parts is not None:
        return tuple(sum(name.startswith("layers.") for name in part) for part in parts)
    per_stage = parallelism.get(f"{_PREFIX}layers_per_stage")
    if per_stage is None:
        return (num_layers,)
    first = parallelism[f"{_PREFIX}first_stage_less_layers"]
    last = parallelism[f"{_PREFIX}last_stage_less_layers"]
    num_stages = math.ceil((num_layers + first + last) / per_stage)
    return default_split(num_layers, num_stages, first, last) or ()


TRAINER = Trainer(
    versions=("0.2", MAIN),
    schedules=lambda version: SCHEDULES,
    illegal=illegal,
    executor=executor,
    group_sizes=lambda schedule, ranks, microbatches, version: torch_group_sizes(
        schedule, ranks, microbatches
    ),
    supports_uneven=True,
    keeps_boundary_tensors=True,
    write=write,
    reread=reread,
)
