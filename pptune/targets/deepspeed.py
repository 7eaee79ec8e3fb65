"""DeepSpeed 0.19: its JSON configuration, and the PipelineModule that sets P and the split.

Sources: deepspeed/runtime/config.py, runtime/pipe/module.py and runtime/pipe/engine.py. The engine
plays 1F1B and knows no virtual stages; sends and receives block the rank.
"""

import json

from pptune.executors import Executor
from pptune.plan import Plan
from pptune.targets.megatron_rules import empty_middle_violation
from pptune.targets.notes import checkpoint_note, header, neighbours_note, refuse_model_parallel
from pptune.targets.python_text import literals
from pptune.targets.target import ExportedFile, Job, Setting, Trainer, Violation, Written
from pptune.units import format_ratio

_CONFIG_FILE = "deepspeed_plan.json"
_MODULE_FILE = "deepspeed_plan.py"

_ENOUGH_MICROBATCHES = 8
"""Micro-batches per stage below which DeepSpeed's own advice is to use more."""

_MODULE = '''\
{notes}
from deepspeed.pipe import PipelineModule
{topology_import}
NUM_STAGES = {num_stages}
TENSOR_PARALLEL = {tensor_parallel}
DATA_PARALLEL = {data_parallel}
LAYERS_PER_STAGE = {layers}
BLOCK = "TransformerBlock"  # matches the class name of your blocks, and of nothing else

{module_class}
def build_pipeline(layers, loss_fn):
    """`layers`: the whole model's modules or LayerSpecs, in order."""
    return {class_name}(
        layers=layers,
        loss_fn=loss_fn,
        {placement},
        partition_method=f"type:{{BLOCK}}",
        activation_checkpoint_interval={interval},
    )
'''

_PLANNED_CLASS = '''
class PlannedPipeline(PipelineModule):
    """A PipelineModule whose stages hold the plan's blocks instead of an even share."""

    def _partition_layers(self, method="uniform"):
        blocks = self._find_layer_type(BLOCK)
        starts = [sum(LAYERS_PER_STAGE[:stage]) for stage in range(1, NUM_STAGES)]
        after_last = blocks[-1] + 1
        firsts = [blocks[start] if start < len(blocks) else after_last for start in starts]
        self.parts = [0, *firsts, len(self._layer_specs)]
        stage = self._topo.get_coord(self.global_rank).pipe
        self._set_bounds(start=self.parts[stage], stop=self.parts[stage + 1])

'''


def illegal(plan: Plan, setting: Setting, version: str) -> Violation | None:
    """The first rule that `plan` breaks, or None."""
    if setting.zero >= 2 and plan.num_ranks > 1:
        return Violation(
            "zero-with-pipeline",
            f"DeepSpeed's zero_optimization.stage ({setting.zero}) must be 0 or 1 with a pipeline "
            f"(num_stages {plan.num_ranks})",
            "use --zero 1, or 1 rank",
        )
    middle = plan.layers_per_stage[1:-1]
    if 0 in middle and setting.zero == 1:
        return Violation(
            "empty-stage",
            f"stage {middle.index(0) + 1} has no parameters, and DeepSpeed with "
            "zero_optimization.stage 1 hangs in the gradient norm of such a stage",
            "give every stage a layer, or use --zero 0",
        )
    return empty_middle_violation(plan, setting)


def write(plan: Plan, job: Job, version: str) -> list[ExportedFile]:
    """The configuration and the module. `plan` must be legal."""
    refuse_model_parallel("deepspeed", job, tensor=False)
    recompute = int(plan.recompute == "full")
    config = {
        "train_batch_size": plan.global_batch_size,
        "train_micro_batch_size_per_gpu": plan.microbatch_size,
        "gradient_accumulation_steps": plan.num_microbatches,
        "zero_optimization": {"stage": job.setting.zero},
        "pipeline": {"activation_checkpoint_interval": recompute},
    }
    is_even = len(set(plan.layers_per_stage)) == 1
    tensor = job.setting.tensor_parallel
    module = _MODULE.format(
        notes=header("#", f"DeepSpeed {version}", plan, job, _notes(plan, job)),
        topology_import=(
            "from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology\n"
            if tensor > 1
            else ""
        ),
        num_stages=plan.num_ranks,
        tensor_parallel=tensor,
        data_parallel=plan.data_parallel,
        layers=plan.layers_per_stage,
        module_class="" if is_even else _PLANNED_CLASS,
        class_name="PipelineModule" if is_even else "PlannedPipeline",
        placement=(
            "topology=PipeModelDataParallelTopology(NUM_STAGES, TENSOR_PARALLEL, DATA_PARALLEL)"
            if tensor > 1
            else "num_stages=NUM_STAGES"
        ),
        interval=recompute,
    )
    return [
        ExportedFile(_CONFIG_FILE, json.dumps(config, indent=4) + "\n"),
        ExportedFile(_MODULE_FILE, module),
    ]


def _notes(plan: Plan, job: Job) -> list[str]:
    ranks, microbatches = plan.num_ranks, plan.num_microbatches
    notes = [
        f"Start {job.setting.num_processes(plan)} processes with --deepspeed_config "
        f"{_CONFIG_FILE}.",
        checkpoint_note(),
    ]
    if plan.data_parallel > 1:
        notes.append(
            neighbours_note("A topology of your own (axes data, pipe) gives the predicted order")
        )
    if microbatches < _ENOUGH_MICROBATCHES * ranks:
        bubble = (ranks - 1) / (microbatches + ranks - 1)
        notes.append(
            f"gradient_accumulation_steps ({microbatches}) is below {_ENOUGH_MICROBATCHES} x "
            f"num_stages ({ranks}): equal stages would idle {format_ratio(bubble)} of the step."
        )
    if job.setting.ties_embeddings:
        notes.append("Tied embeddings: give the embedding and the head as one TiedLayerSpec.")
    return notes


def reread(files: dict[str, str], num_layers: int) -> Written:
    """What the configuration and the module say."""
    config = json.loads(files[_CONFIG_FILE])
    values = literals(files[_MODULE_FILE])
    size, steps = config["train_micro_batch_size_per_gpu"], config["gradient_accumulation_steps"]
    return Written(
        num_ranks=values["NUM_STAGES"],
        num_chunks=1,
        microbatch_size=size,
        num_microbatches=steps,
        data_parallel=config["train_batch_size"] // (size * steps),
        layers_per_stage=values["LAYERS_PER_STAGE"],
        schedule="1f1b",
        recompute="full" if config["pipeline"]["activation_checkpoint_interval"] else "none",
    )


TRAINER = Trainer(
    versions=("0.19",),
    schedules=lambda version: frozenset({"1f1b"}),
    illegal=illegal,
    executor=lambda plan: Executor.MEGATRON_EXPOSED,
    group_sizes=lambda schedule, ranks, microbatches, version: (),
    supports_uneven=True,
    keeps_boundary_tensors=False,
    write=write,
    reread=reread,
)
