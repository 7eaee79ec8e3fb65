"""Whether a target can run a plan: the rules common to all, then the trainer's own."""

from pptune.model import ModelSpec
from pptune.plan import Plan
from pptune.targets import accelerate, bridge, megatron_rules
from pptune.targets.megatron_rules import MEGATRON_LM, Names
from pptune.targets.target import Setting, Target, Violation, choices
from pptune.targets.trainers import TRAINERS, schedules_of

_NAMES: dict[str, Names] = {
    "megatron": MEGATRON_LM,
    "megatron-bridge": bridge.BRIDGE,
    "nemo": bridge.NEMO,
    "accelerate": accelerate.NAMES,
    "mindspeed": MEGATRON_LM,
}

_OWN_NAMES = Names(
    ranks="--ranks", chunks="--chunks", group="--microbatch-group-sizes", layout=None
)


def uneven_violation(
    target: Target, *, num_layers: int, num_ranks: int, num_chunks: int
) -> Violation | None:
    """Why the blocks do not divide evenly over the stages, and what does; None where they do.

    For those who want the even split: a plan with uneven `layers_per_stage` can still be legal.
    """
    names = _NAMES.get(target.name, _OWN_NAMES)
    return megatron_rules.uneven_violation(num_layers, num_ranks, num_chunks, names)


def illegal(
    plan: Plan,
    target: Target,
    *,
    model: ModelSpec | None = None,
    tensor_parallel: int = 1,
    context_parallel: int = 1,
    zero: int = 0,
    world_size: int | None = None,
    overlap_p2p: bool = True,
    allow_empty_stages: bool = False,
) -> Violation | None:
    """The first rule of `target` that `plan` breaks, or None where it can run."""
    setting = Setting(
        model=model,
        tensor_parallel=tensor_parallel,
        context_parallel=context_parallel,
        zero=zero,
        world_size=world_size,
        overlap_p2p=overlap_p2p,
        allow_empty_stages=allow_empty_stages,
    )
    trainer = TRAINERS[target.name]
    if plan.schedule not in trainer.schedules(target.version):
        return _unknown_schedule(plan, target)
    found = trainer.illegal(plan, setting, target.version)
    if found is None and world_size is not None:
        found = _world_violation(plan, setting, world_size)
    if found is None and zero not in (0, 1):
        found = Violation(
            "zero-unsupported", f"ZeRO stage is {zero}, but pptune knows 0 and 1", "use --zero 1"
        )
    return found


def _unknown_schedule(plan: Plan, target: Target) -> Violation:
    known = sorted(schedules_of(target))
    others = [
        name
        for name, trainer in TRAINERS.items()
        if plan.schedule in trainer.schedules(trainer.versions[0])
    ]
    chunks = f" with {plan.num_chunks} chunks" if plan.num_chunks > 1 else ""
    lacks = ""
    if plan.num_chunks > 1 and not any(name.startswith("interleaved") for name in known):
        lacks = "has no virtual stages and "
    one_chunk = "--chunks 1 with " if plan.num_chunks > 1 else ""
    return Violation(
        "schedule-unsupported",
        f"{target} {lacks}runs {', '.join(known)}, but the plan is {plan.schedule}{chunks}",
        f"use {one_chunk}--schedule {known[0]}, or --target {choices(others)}",
    )


def _world_violation(plan: Plan, setting: Setting, world_size: int) -> Violation | None:
    num_processes = setting.num_processes(plan)
    if world_size == num_processes:
        return None
    one_replica = num_processes // plan.data_parallel
    sizes = (
        f"tensor {setting.tensor_parallel} x context {setting.context_parallel} x pipeline "
        f"{plan.num_ranks}"
    )
    if world_size < one_replica:
        return Violation(
            "world-too-small",
            f"the plan needs at least {one_replica} ranks ({sizes}); you have {world_size}",
            f"start {num_processes} processes, or try it on one machine with --ranks "
            f"{plan.num_ranks} --device cpu",
        )
    if world_size % one_replica:
        return Violation(
            "world-not-divisible",
            f"world size ({world_size}) is not divisible by {sizes} ({one_replica})",
            f"start {num_processes} processes, or change --ranks",
        )
    return Violation(
        "world-differs",
        f"the plan needs {num_processes} ranks ({sizes} x data {plan.data_parallel}), but there "
        f"are {world_size}",
        f"start {num_processes} processes, or use --data-parallel {world_size // one_replica}",
    )
