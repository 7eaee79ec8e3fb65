"""torch.distributed.pipelining itself: rules, and a script that trains with the plan."""

from pptune.errors import PlanError, UsageError
from pptune.plan import Plan
from pptune.targets.groups import torch_group_sizes
from pptune.targets.python_text import literals
from pptune.targets.target import ExportedFile, Job, Setting, Trainer, Violation, Written
from pptune.targets.torch_rules import (
    SCHEDULES,
    Names,
    executor,
    microbatch_violation,
    old_interleaved_violation,
    tied_violation,
)
from pptune.targets.torch_script import FILE_NAME, training_script

FIRST_RELEASE = "2.4"
"""Interleaving with M % P == 0, and none of the later schedules."""

_FIRST_SCHEDULES = frozenset({"gpipe", "1f1b", "interleaved", "looped-bfs"})


def illegal(plan: Plan, setting: Setting, version: str) -> Violation | None:
    """The first rule that `plan` breaks, or None."""
    if version == FIRST_RELEASE:
        names = Names(trainer=f"torch {version}", microbatches="micro-batches")
        found = old_interleaved_violation(plan, names)
    else:
        names = Names(trainer="torch", microbatches="micro-batches")
        found = None
    found = found or microbatch_violation(plan, names)
    return found or tied_violation(plan, setting, "torch")


def group_sizes(
    schedule: str, num_ranks: int, num_microbatches: int, version: str
) -> tuple[int, ...]:
    """Legal N, torch's own first."""
    if version == FIRST_RELEASE:
        return (num_ranks,) if num_microbatches % num_ranks == 0 else ()
    return torch_group_sizes(schedule, num_ranks, num_microbatches)


def write(plan: Plan, job: Job, version: str) -> list[ExportedFile]:
    """The training script. Raises PlanError where the model's sizes are not known."""
    if version == FIRST_RELEASE:
        raise UsageError(
            f"the training script needs torch 2.13, but the target is torch@{version}; "
            "use --target torch"
        )
    return [ExportedFile(FILE_NAME, training_script(plan, job))]


def reread(files: dict[str, str], num_layers: int) -> Written:
    """What the script's constants say."""
    (text,) = files.values()
    values = literals(text)
    num_stages = len(values["LAYERS_PER_STAGE"])
    stages = sorted(stage for own in values["STAGES_OF_RANK"] for stage in own)
    if stages != list(range(num_stages)) or len(values["STAGES_OF_RANK"]) != values["NUM_RANKS"]:
        raise PlanError("the script's STAGES_OF_RANK does not place every stage exactly once")
    return Written(
        num_ranks=values["NUM_RANKS"],
        num_chunks=num_stages // values["NUM_RANKS"],
        microbatch_size=values["MICROBATCH_SIZE"],
        num_microbatches=values["NUM_MICROBATCHES"],
        data_parallel=values["DATA_PARALLEL"],
        layers_per_stage=values["LAYERS_PER_STAGE"],
        microbatch_group_size=values["MICROBATCH_GROUP_SIZE"],
        schedule=values["SCHEDULE"],
        recompute="full" if values["RECOMPUTE"] else "none",
    )


TRAINER = Trainer(
    versions=("2.13", FIRST_RELEASE),
    schedules=lambda version: _FIRST_SCHEDULES if version == FIRST_RELEASE else SCHEDULES,
    illegal=illegal,
    executor=executor,
    group_sizes=group_sizes,
    supports_uneven=True,
    keeps_boundary_tensors=True,
    write=write,
    reread=reread,
)
