"""A plan: what a pipeline-parallel run is configured with, and what every plan must obey.

Rules that hold for every trainer are here; a trainer's own rules are in `targets/`.
"""

from typing import Literal

import msgspec

from pptune.errors import PlanError
from pptune.schedules.placement import Placement, rank_of_stages

Schedule = Literal[
    "gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "looped-bfs", "interleaved-zb",
    "dualpipe-v",
]  # fmt: skip

SINGLE_STAGE: frozenset[str] = frozenset({"gpipe", "1f1b", "zb-h1", "zb-h2"})
"""Schedules with exactly one stage per rank."""

V_SHAPED: frozenset[str] = frozenset({"zb-v", "dualpipe-v"})
"""Schedules with two stages per rank: rank r holds stages r and 2P - 1 - r."""

SPLIT_BACKWARD: frozenset[str] = frozenset(
    {"zb-h1", "zb-h2", "zb-v", "interleaved-zb", "dualpipe-v"}
)
"""Schedules that play the input and the weight part of a backward apart."""

MAX_ACTIONS = 2**24
"""Bound on P x V x M: a step of more actions could be neither drawn nor run in reasonable time."""


class Plan(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One configuration. Build it with `make_plan`, which checks it and fills what follows."""

    schedule: Schedule
    num_ranks: int
    """P: pipeline ranks."""
    num_chunks: int
    """V: stages per rank."""
    microbatch_size: int
    """b, in sequences."""
    num_microbatches: int
    """M, per step and replica."""
    layers_per_stage: tuple[int, ...]
    """Blocks of each stage, in stage order; the embedding is on the first, the head on the last."""
    placement: Placement = "loop"
    microbatch_group_size: int | None = None
    """N: micro-batches that a chunk runs in a row (interleaved schedules); null elsewhere."""
    data_parallel: int = 1
    recompute: Literal["none", "full"] = "none"

    @property
    def num_stages(self) -> int:
        return self.num_ranks * self.num_chunks

    @property
    def num_layers(self) -> int:
        return sum(self.layers_per_stage)

    @property
    def global_batch_size(self) -> int:
        """Sequences per step over all replicas."""
        return self.microbatch_size * self.num_microbatches * self.data_parallel

    @property
    def splits_backward(self) -> bool:
        return self.schedule in SPLIT_BACKWARD

    @property
    def label(self) -> str:
        """A short unique name: `interleaved P2 V2 b4 M8 N2`."""
        parts = [self.schedule, f"P{self.num_ranks}", f"V{self.num_chunks}",
                 f"b{self.microbatch_size}", f"M{self.num_microbatches}"]  # fmt: skip
        if self.microbatch_group_size is not None:
            parts.append(f"N{self.microbatch_group_size}")
        if self.data_parallel > 1:
            parts.append(f"D{self.data_parallel}")
        if self.recompute != "none":
            parts.append("recompute")
        if len(set(self.layers_per_stage)) > 1:
            parts.append("[" + ",".join(map(str, self.layers_per_stage)) + "]")
        return " ".join(parts)

    def rank_of(self, stage: int) -> int:
        """The rank that holds `stage`."""
        return int(rank_of_stages(self.num_ranks, self.num_stages, self.placement)[stage])

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of `rank`, ascending: its chunks 0, 1, ..."""
        return tuple(stage for stage in range(self.num_stages) if self.rank_of(stage) == rank)


def placement_of(schedule: str) -> Placement:
    """Where the schedule's stages live; it follows from the schedule."""
    return "v" if schedule in V_SHAPED else "loop"


def even_layers(num_layers: int, num_stages: int) -> tuple[int, ...] | None:
    """The even split, or None where the layers don't divide."""
    if num_layers % num_stages:
        return None
    return (num_layers // num_stages,) * num_stages


def default_group_size(schedule: str, num_ranks: int, num_microbatches: int) -> int | None:
    """N where nothing else is asked for: torch's M // max(1, M // P), which is P when P divides M.

    torch.distributed.pipelining, schedules.py, ScheduleInterleaved1F1B: micro-batches per round.
    """
    if schedule not in ("interleaved", "interleaved-zb"):
        return None
    return num_microbatches // max(1, num_microbatches // num_ranks)


def check_plan(plan: Plan, *, allow_empty_stages: bool = False) -> None:
    """Raise PlanError where `plan` breaks a rule that holds for every trainer."""
    for name in ("num_ranks", "num_chunks", "microbatch_size", "num_microbatches", "data_parallel"):
        value = getattr(plan, name)
        if value < 1:
            raise PlanError(f"{name} is {value}; it must be 1 or more")
    actions = plan.num_ranks * plan.num_chunks * plan.num_microbatches
    if actions > MAX_ACTIONS:
        raise PlanError(
            f"{plan.num_ranks} ranks x {plan.num_chunks} chunks x {plan.num_microbatches} "
            f"micro-batches are {actions} actions per step, more than {MAX_ACTIONS}; use larger "
            "micro-batches, or a smaller global batch"
        )
    if plan.schedule in SINGLE_STAGE and plan.num_chunks != 1:
        raise PlanError(
            f"{plan.schedule} has one stage per rank, but chunks is {plan.num_chunks}; "
            "use --chunks 1, or --schedule interleaved"
        )
    if plan.schedule in V_SHAPED and plan.num_chunks != 2:
        raise PlanError(
            f"{plan.schedule} has two stages per rank, but chunks is {plan.num_chunks}; "
            "use --chunks 2"
        )
    if plan.schedule in ("interleaved", "interleaved-zb", "looped-bfs") and plan.num_chunks < 2:
        raise PlanError(
            f"{plan.schedule} needs 2 or more chunks, but chunks is {plan.num_chunks}; "
            "use --chunks 2, or --schedule 1f1b"
        )
    if plan.placement != placement_of(plan.schedule):
        raise PlanError(
            f"{plan.schedule} places stages in a {placement_of(plan.schedule)}, "
            f"but placement is {plan.placement!r}"
        )
    if len(plan.layers_per_stage) != plan.num_stages:
        raise PlanError(
            f"layers_per_stage has {len(plan.layers_per_stage)} entries, but {plan.num_ranks} "
            f"ranks x {plan.num_chunks} chunks make {plan.num_stages} stages"
        )
    if min(plan.layers_per_stage) < (0 if allow_empty_stages else 1):
        stage = plan.layers_per_stage.index(min(plan.layers_per_stage))
        raise PlanError(
            f"stage {stage} of {plan.num_stages} has {plan.layers_per_stage[stage]} layers; "
            f"use at most {plan.num_layers} stages (fewer chunks or ranks), or --allow-empty-stages"
        )
    group = plan.microbatch_group_size
    if group is not None and not 1 <= group <= plan.num_microbatches:
        raise PlanError(
            f"micro-batch group size is {group}, but it must lie in 1..{plan.num_microbatches} "
            "(the number of micro-batches)"
        )


def make_plan(
    *,
    schedule: Schedule,
    num_ranks: int,
    num_chunks: int,
    microbatch_size: int,
    num_microbatches: int,
    layers_per_stage: tuple[int, ...],
    microbatch_group_size: int | None = None,
    data_parallel: int = 1,
    recompute: Literal["none", "full"] = "none",
    allow_empty_stages: bool = False,
) -> Plan:
    """A checked plan with placement and group size filled in. Raises PlanError."""
    if microbatch_group_size is None and num_ranks > 0 and num_microbatches > 0:
        microbatch_group_size = default_group_size(schedule, num_ranks, num_microbatches)
    plan = Plan(
        schedule=schedule,
        num_ranks=num_ranks,
        num_chunks=num_chunks,
        microbatch_size=microbatch_size,
        num_microbatches=num_microbatches,
        layers_per_stage=layers_per_stage,
        placement=placement_of(schedule),
        microbatch_group_size=microbatch_group_size,
        data_parallel=data_parallel,
        recompute=recompute,
    )
    check_plan(plan, allow_empty_stages=allow_empty_stages)
    return plan
