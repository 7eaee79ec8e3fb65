"""nanotron: the YAML entries of a plan.

Sources: src/nanotron/config/parallelism_config.py, parallel/pipeline_parallel/engine.py and
models/base.py at 2411b02. It places the blocks itself; sends and receives block the rank.
"""

import re
from itertools import accumulate

from pptune.executors import Executor
from pptune.model import ModelSpec
from pptune.plan import Plan
from pptune.targets.notes import checkpoint_note, header
from pptune.targets.target import ExportedFile, Job, Setting, Trainer, Violation, Written

_FILE = "nanotron_plan.yaml"

_ENGINES = {"1f1b": "1f1b", "gpipe": "afab"}
"""Left out, pp_engine is afab: all forwards, then all backwards."""

_YAML = """\
{notes}
parallelism:
  dp: {data_parallel}
  pp: {num_ranks}
  tp: {tensor_parallel}
  pp_engine: {engine}
  recompute_layer: {recompute}
  context_parallel_size: {context_parallel}
  expert_parallel_size: 1
tokens:
  sequence_length: {seq_len}
  micro_batch_size: {microbatch_size}
  batch_accumulation_per_replica: {num_microbatches}
optimizer:
  zero_stage: {zero}
"""


def illegal(plan: Plan, setting: Setting, version: str) -> Violation | None:
    """The first rule that `plan` breaks, or None."""
    least = plan.num_ranks - 1
    if plan.schedule == "1f1b" and plan.num_microbatches < least:
        return Violation(
            "microbatches-below-ranks",
            f"tokens.batch_accumulation_per_replica ({plan.num_microbatches}) must be at least "
            f"parallelism.pp - 1 ({least}) with parallelism.pp_engine 1f1b",
            f"use {least} or more, or --schedule gpipe",
        )
    return None


def own_split(model: ModelSpec, num_ranks: int) -> tuple[int, ...] | None:
    """Blocks per rank that nanotron places for these sizes, or None where sizes are unknown.

    models/base.py and the Llama's get_block_compute_costs: a block costs its matrices, the head
    its own, the embedding nothing; the next rank begins after a block that has passed its share.
    """
    if model.hidden_size is None or model.ffn_size is None or model.vocab_size is None:
        return None
    block = 4 * model.hidden_size**2 + 3 * model.ffn_size * model.hidden_size
    head = model.vocab_size * model.hidden_size
    total = model.num_layers * block + head
    layers = [0] * num_ranks
    rank = 0
    for cost in accumulate([block] * model.num_layers):
        layers[rank] += 1
        if cost > total * (rank + 1) / num_ranks:
            rank += 1
    return tuple(layers)


def write(plan: Plan, job: Job, version: str) -> list[ExportedFile]:
    """The entries to merge into a configuration. `plan` must be legal."""
    setting = job.setting
    text = _YAML.format(
        notes=header("#", "nanotron main (April 2026)", plan, job, _notes(plan, job)),
        data_parallel=plan.data_parallel,
        num_ranks=plan.num_ranks,
        tensor_parallel=setting.tensor_parallel,
        engine=_ENGINES[plan.schedule],
        recompute=str(plan.recompute == "full").lower(),
        context_parallel=setting.context_parallel,
        seq_len=job.seq_len,
        microbatch_size=plan.microbatch_size,
        num_microbatches=plan.num_microbatches,
        zero=setting.zero,
    )
    return [ExportedFile(_FILE, text)]


def _notes(plan: Plan, job: Job) -> list[str]:
    notes = [
        f"Merge into your configuration; start {job.setting.num_processes(plan)} processes with "
        "CUDA_DEVICE_MAX_CONNECTIONS=1 in their environment.",
        checkpoint_note(),
    ]
    own = own_split(job.model, plan.num_ranks)
    if own != plan.layers_per_stage:
        does = "may differ from" if own is None else f"is {list(own)} for these sizes, not"
        notes.append(
            f"nanotron has no option for the split: its own {does} the plan's, and the step time "
            "was predicted for the plan's."
        )
    return notes


def reread(files: dict[str, str], num_layers: int) -> Written:
    """What the entries say."""
    (text,) = files.values()
    entries = dict(re.findall(r"^ +(\w+): (\S+)$", text, re.MULTILINE))
    engines = {engine: schedule for schedule, engine in _ENGINES.items()}
    return Written(
        num_ranks=int(entries["pp"]),
        num_chunks=1,
        microbatch_size=int(entries["micro_batch_size"]),
        num_microbatches=int(entries["batch_accumulation_per_replica"]),
        data_parallel=int(entries["dp"]),
        layers_per_stage=None,
        schedule=engines[entries["pp_engine"]],
        recompute="full" if entries["recompute_layer"] == "true" else "none",
    )


TRAINER = Trainer(
    versions=("main",),
    schedules=lambda version: frozenset(_ENGINES),
    illegal=illegal,
    executor=lambda plan: Executor.MEGATRON_EXPOSED,
    group_sizes=lambda schedule, ranks, microbatches, version: (),
    supports_uneven=False,
    keeps_boundary_tensors=False,
    write=write,
    reread=reread,
)
