"""Global batch = micro-batch size x micro-batches x replicas, in each trainer's option names."""

from pptune.targets.groups import NUM_SUGGESTIONS
from pptune.targets.target import Target, Violation, choices

_OPTIONS: dict[str, tuple[str, str]] = {
    "torch": ("--global-batch-size", "the micro-batch size"),
    "megatron": ("--global-batch-size", "--micro-batch-size"),
    "megatron-bridge": ("train.global_batch_size", "train.micro_batch_size"),
    "nemo": ("global_batch_size", "micro_batch_size"),
    "torchtitan": ("training.global_batch_size", "parallelism.pipeline_parallel_microbatch_size"),
    "deepspeed": ("train_batch_size", "train_micro_batch_size_per_gpu"),
    "nanotron": ("the global batch size", "tokens.micro_batch_size"),
    "accelerate": ("the global batch size", "the DataLoader's batch_size"),
    "mindspeed": ("--global-batch-size", "--micro-batch-size"),
}
"""How each trainer calls the global batch size and the micro-batch size."""


def batch_violation(
    target: Target,
    *,
    global_batch_size: int,
    data_parallel: int = 1,
    microbatch_size: int | None = None,
    num_microbatches: int | None = None,
) -> Violation | None:
    """Why the global batch can't be cut into micro-batches of that size, or into that many.

    Every micro-batch has the same size: a last one that is smaller breaks the shapes of messages.
    """
    batch_option, size_option = _OPTIONS[target.name]
    share, rest = divmod(global_batch_size, data_parallel)
    if rest:
        return Violation(
            "batch-not-divisible-by-replicas",
            f"{batch_option} ({global_batch_size}) is not divisible by the data-parallel replicas "
            f"({data_parallel})",
            f"use {choices(_multiples_around(global_batch_size, data_parallel))}",
        )
    if microbatch_size is not None and share % microbatch_size:
        unit = microbatch_size * data_parallel
        return Violation(
            "batch-not-divisible",
            f"{batch_option} ({global_batch_size}) is not divisible by {size_option} "
            f"({microbatch_size}) times the data-parallel replicas ({data_parallel})",
            f"use {size_option} {choices(_divisors_near(share, microbatch_size, least=1))}, or "
            f"{batch_option} {choices(_multiples_around(global_batch_size, unit))}",
        )
    if num_microbatches is not None and share % num_microbatches:
        return Violation(
            "batch-not-divisible",
            f"the {share} sequences of a replica ({batch_option} {global_batch_size}, "
            f"{data_parallel} replicas) cannot be cut into {num_microbatches} equal micro-batches",
            f"use {choices(_divisors_near(share, num_microbatches, least=2))} micro-batches",
        )
    return None


def _divisors_near(value: int, near: int, *, least: int) -> list[int]:
    divisors = [number for number in range(least, value + 1) if value % number == 0]
    closest = sorted(divisors or [value], key=lambda number: abs(number - near))
    return sorted(closest[:NUM_SUGGESTIONS])


def _multiples_around(value: int, unit: int) -> list[int]:
    below = value // unit * unit
    return [below, below + unit] if below else [unit]
