"""How many micro-batches an interleaved schedule takes, and in groups of what size.

Two rules are in use. torch.distributed.pipelining (schedules.py, ScheduleInterleaved1F1B) divides M
into `max(1, M // P)` equal rounds. Megatron-LM (core/pipeline_parallel/schedules.py) lets the user
choose N with P <= N <= M, and M mod N zero or at least P: a shorter last group would make the first
rank wait for a stage that in turn waits for it.
"""

from collections.abc import Callable

from pptune.plan import default_group_size
from pptune.targets.target import Violation, choices

NUM_SUGGESTIONS = 3
"""Legal values named in a message; a longer list is not read."""


def fills_rounds(num_ranks: int, num_microbatches: int) -> bool:
    """torch's rule, for its own N."""
    return num_microbatches % max(1, num_microbatches // num_ranks) == 0


def is_legal_group(num_ranks: int, num_microbatches: int, group_size: int) -> bool:
    """Megatron's rule."""
    if not num_ranks <= group_size <= num_microbatches:
        return False
    remainder = num_microbatches % group_size
    return remainder == 0 or remainder >= num_ranks


def megatron_group_sizes(num_ranks: int, num_microbatches: int) -> tuple[int, ...]:
    """Every legal N, ascending: Megatron's default, N = P, comes first where it is legal."""
    return tuple(
        size
        for size in range(num_ranks, num_microbatches + 1)
        if is_legal_group(num_ranks, num_microbatches, size)
    )


def torch_group_sizes(schedule: str, num_ranks: int, num_microbatches: int) -> tuple[int, ...]:
    """torch's own N where its class takes M, then those that run as a loaded order."""
    own = default_group_size(schedule, num_ranks, num_microbatches)
    if own is None:
        return ()
    others = megatron_group_sizes(num_ranks, num_microbatches)
    if not fills_rounds(num_ranks, num_microbatches):
        return others
    return (own, *(size for size in others if size != own))


def nearest_legal(value: int, is_legal: Callable[[int], bool]) -> list[int]:
    """The closest legal values below and above `value`; 0 and less are never legal."""
    below = next((near for near in range(value - 1, 0, -1) if is_legal(near)), None)
    above = next(near for near in range(value + 1, 3 * value + 2) if is_legal(near))
    return [above] if below is None else [below, above]


def group_violation(
    *, num_ranks: int, num_microbatches: int, group_size: int, group_option: str, rank_option: str
) -> Violation | None:
    """Megatron's rule in the words of a trainer's options, or None where it holds."""
    if is_legal_group(num_ranks, num_microbatches, group_size):
        return None
    if num_microbatches < num_ranks:
        return Violation(
            "microbatches-below-ranks",
            f"interleaving needs micro-batches ({num_microbatches}) to be at least {rank_option} "
            f"({num_ranks})",
            f"use {num_ranks} or more micro-batches, or --chunks 1",
        )
    legal = _first_legal(num_ranks, num_microbatches)
    if group_size < num_ranks or group_size > num_microbatches:
        return Violation(
            "group-size-out-of-range",
            f"{group_option} ({group_size}) must lie in {num_ranks}..{num_microbatches}: at least "
            f"{rank_option} and at most the micro-batches",
            f"use {choices(legal)}, or --chunks 1",
        )
    return Violation(
        "group-remainder",
        f"{num_microbatches} micro-batches in groups of {group_size} ({group_option}) leave "
        f"{num_microbatches % group_size}, which must be 0 or at least {num_ranks} ({rank_option})",
        f"use {group_option} {choices(legal)}, or --chunks 1",
    )


def _first_legal(num_ranks: int, num_microbatches: int) -> list[int]:
    found: list[int] = []
    for size in range(num_ranks, num_microbatches + 1):
        if is_legal_group(num_ranks, num_microbatches, size):
            found.append(size)
            if len(found) == NUM_SUGGESTIONS:
                break
    return found
