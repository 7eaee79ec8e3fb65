"""The trainers by name, and what is asked of one most often."""

from pptune.errors import UsageError
from pptune.executors import Executor
from pptune.plan import Plan
from pptune.targets import (
    accelerate,
    bridge,
    deepspeed,
    megatron,
    mindspeed,
    nanotron,
    pytorch,
    torchtitan,
)
from pptune.targets.target import Target, Trainer

TRAINERS: dict[str, Trainer] = {
    "torch": pytorch.TRAINER,
    "megatron": megatron.TRAINER,
    "megatron-bridge": bridge.TRAINER,
    "nemo": bridge.NEMO_TRAINER,
    "torchtitan": torchtitan.TRAINER,
    "deepspeed": deepspeed.TRAINER,
    "nanotron": nanotron.TRAINER,
    "accelerate": accelerate.TRAINER,
    "mindspeed": mindspeed.TRAINER,
}

TARGETS: tuple[str, ...] = tuple(
    f"{name}@{version}" for name, trainer in TRAINERS.items() for version in trainer.versions
)
"""Every target, as `parse_target` takes it; a name alone means its first version here."""


def parse_target(text: str) -> Target:
    """The target that `torchtitan` or `torchtitan@main` names. Raises UsageError with the list."""
    name, _, version = text.partition("@")
    trainer = TRAINERS.get(name)
    if trainer is None:
        raise UsageError(f"--target {text!r} is unknown; use one of {', '.join(TARGETS)}")
    if version and version not in trainer.versions:
        known = " or ".join(f"{name}@{one}" for one in trainer.versions)
        raise UsageError(
            f"--target {text!r} names a version whose rules and options are not known; use {known}"
        )
    return Target(name=name, version=version or trainer.versions[0])


def schedules_of(target: Target) -> frozenset[str]:
    """The schedules that the target can run."""
    return TRAINERS[target.name].schedules(target.version)


def executor_of(plan: Plan, target: Target) -> Executor:
    """What overlaps with what when the target runs `plan`."""
    return TRAINERS[target.name].executor(plan)


def supports_uneven(target: Target) -> bool:
    """Whether a plan's own split can be handed to the target; where not, it splits itself."""
    return TRAINERS[target.name].supports_uneven


def keeps_boundary_tensors(target: Target) -> bool:
    """Whether outputs that have been sent, and receive buffers, live until the step ends."""
    return TRAINERS[target.name].keeps_boundary_tensors


def legal_group_sizes(
    target: Target, *, schedule: str, num_ranks: int, num_microbatches: int
) -> tuple[int, ...]:
    """Legal N of an interleaved schedule, the target's default first; empty where there is none."""
    if schedule not in ("interleaved", "interleaved-zb"):
        return ()
    sizes = TRAINERS[target.name].group_sizes
    return sizes(schedule, num_ranks, num_microbatches, target.version)
