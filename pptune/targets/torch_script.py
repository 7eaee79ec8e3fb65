"""The text of a script that trains with a plan on torch.distributed.pipelining.

It needs torch and nothing else: its layers are copied from the ones that pptune itself times, or
come from the user's own function.
"""

import ast
import json
import re
from importlib import resources

from pptune import schedules
from pptune.errors import PlanError
from pptune.model import ModelSpec
from pptune.plan import Plan
from pptune.targets import torch_script_text as text
from pptune.targets.notes import checkpoint_note, header, refuse_model_parallel
from pptune.targets.target import Job
from pptune.targets.torch_rules import CLASSES, needs_loaded_order

FILE_NAME = "torch_plan.py"

DTYPES = ("float32", "bfloat16", "float16")

_ENTRY = re.compile(r"\w+(\.\w+)*:\w+")


def training_script(plan: Plan, job: Job) -> str:
    """The script's text. Raises PlanError where the model's sizes are not known."""
    refuse_model_parallel("torch", job)
    if job.dtype not in DTYPES:
        raise PlanError(
            f"the training script for torch runs in {', '.join(DTYPES)}, but the profile's dtype "
            f"is {job.dtype}; profile in one of these"
        )
    body = (
        _constants(plan, job)
        + (_user_layers(job.model.entry) if job.model.entry else _built_in_layers(job.model))
        + text.TRAINING.replace("<schedule>", _schedule_lines(plan))
        + (text.ZERO_OPTIMIZER if job.setting.zero == 1 else text.PLAIN_OPTIMIZER)
        + text.MAIN
    )
    imports = [line for word, line in text.IMPORTS if re.search(rf"\b{word}\b", body)]
    notes = header("#", "torch.distributed.pipelining (torch 2.13)", plan, job, _notes(plan, job))
    return f"{notes}\n" + "\n".join(imports) + f"\n\n{body}"


def _notes(plan: Plan, job: Job) -> list[str]:
    processes = job.setting.num_processes(plan)
    notes = [
        f"Run it on {processes} processes (pipeline {plan.num_ranks} x data {plan.data_parallel}; "
        f"the ranks of one pipeline are neighbours): torchrun --nproc-per-node {processes} "
        f"{FILE_NAME}, or with --nnodes where they are on several machines.",
        checkpoint_note(),
    ]
    if job.model.entry is not None:
        notes.append(f"It trains the layers of {job.model.entry}, which must be on PYTHONPATH.")
    else:
        notes.append(
            "It trains on random token ids with the layers that pptune timed; put your data into "
            "example_batch, and your layers into the make_ functions."
        )
        own_head = (job.model.hf_config or {}).get("head_dim")
        if job.model.hf_config is not None:
            notes.append(
                "The layers below have the sizes of the Hugging Face model, not its exact form"
                + (f" (its head size is {own_head})." if own_head is not None else ".")
            )
    if needs_loaded_order(plan):
        notes.append("torch has no class for this order, so it is loaded as a list of actions.")
    return notes


def _constants(plan: Plan, job: Job) -> str:
    model = job.model
    values: list[tuple[str, object]] = [
        ("SCHEDULE", plan.schedule),
        ("NUM_RANKS", plan.num_ranks),
        ("MICROBATCH_SIZE", plan.microbatch_size),
        ("NUM_MICROBATCHES", plan.num_microbatches),
        ("MICROBATCH_GROUP_SIZE", plan.microbatch_group_size),
        ("DATA_PARALLEL", plan.data_parallel),
        ("LAYERS_PER_STAGE", plan.layers_per_stage),
        ("STAGES_OF_RANK", tuple(plan.stages_of(rank) for rank in range(plan.num_ranks))),
        ("RECOMPUTE", plan.recompute == "full"),
        ("SEQ_LEN", job.seq_len),
        ("VOCAB_SIZE", model.vocab_size),
    ]
    lines = [f"{name} = {_python(value)}" for name, value in values]
    return "\n".join(lines) + f"\nDTYPE = torch.{job.dtype}\n"


def _python(value: object) -> str:
    return json.dumps(value) if isinstance(value, str) else repr(value)


def _built_in_layers(model: ModelSpec) -> str:
    """Source of the layers that pptune times for `model`, and of the functions that make them."""
    sizes = {
        "hidden": model.hidden_size,
        "heads": model.num_heads,
        "kv_heads": model.num_kv_heads or model.num_heads,
        "ffn": model.ffn_size,
    }
    if None in sizes.values() or model.vocab_size is None:
        raise PlanError(
            f"model {model.name} lacks sizes (hidden_size, num_heads, ffn_size or vocab_size), so "
            "no training script can be written for torch; profile it from a config.json or from "
            "package.module:function"
        )
    family = "Gpt" if model.family == "gpt" else "Llama"
    arguments = ", ".join(f"{name}={value}" for name, value in sizes.items())
    return (
        "\n\n"
        + _definitions([f"{family}Embedding", f"{family}Block", f"{family}Head"])
        + f"\n\n\nSIZES = Sizes({arguments}, vocab=VOCAB_SIZE, seq_len=SEQ_LEN)\n"
        + text.BUILT_IN_MAKERS.replace("<Family>", family)
    )


def _user_layers(entry: str) -> str:
    """Source that takes the layers from `package.module:function`. Raises PlanError."""
    if _ENTRY.fullmatch(entry) is None:
        raise PlanError(f"model {entry!r} is not written as package.module:function")
    module, _, function = entry.partition(":")
    return text.USER_LAYERS.replace("<module>", module).replace("<function>", function)


def _definitions(wanted: list[str]) -> str:
    """Source of top-level definitions of pptune/runtime/transformer.py and of all that they use."""
    source = resources.files("pptune").joinpath("runtime/transformer.py").read_text()
    found: dict[str, ast.stmt] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found[node.targets[0].id] = node
    needed: set[str] = set()
    queue = list(wanted)
    while queue:
        name = queue.pop()
        if name in found and name not in needed:
            needed.add(name)
            queue += [node.id for node in ast.walk(found[name]) if isinstance(node, ast.Name)]
    lines = source.splitlines()
    return "\n\n\n".join(_source(lines, node) for name, node in found.items() if name in needed)


def _source(lines: list[str], node: ast.stmt) -> str:
    decorators = getattr(node, "decorator_list", [])
    first = min([node.lineno, *(decorator.lineno for decorator in decorators)])
    return "\n".join(lines[first - 1 : node.end_lineno])


def _schedule_lines(plan: Plan) -> str:
    if not needs_loaded_order(plan):
        name = CLASSES[plan.schedule]
        stages = "stages[0]" if plan.schedule in ("gpipe", "1f1b") else "stages"
        return f"return schedules.Schedule{name}({stages}, NUM_MICROBATCHES, loss_fn=loss_fn)"
    order = schedules.generate(
        plan.schedule,
        num_ranks=plan.num_ranks,
        num_chunks=plan.num_chunks,
        num_microbatches=plan.num_microbatches,
        microbatch_group_size=plan.microbatch_group_size,
    )
    return text.LOADED.format(order=order.to_text())
