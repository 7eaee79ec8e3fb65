"""What is searched for, as one question to ask of many lists of plans."""

from dataclasses import dataclass
from typing import Literal

from pptune.cost_model import CostModel
from pptune.errors import UsageError
from pptune.plan import Schedule
from pptune.profiles import Profile
from pptune.search.scores import Scores
from pptune.search.space import Axes, Layout, Listing, list_plans
from pptune.targets import Target

MAX_ENUMERATED = 100_000
"""Up to so many legal plans all are scored; more are sampled."""

Objective = Literal["time", "memory", "pareto"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is searched for. Null axes take the values that the profile and the trainer offer."""

    global_batch_size: int
    num_ranks: int | None = None
    """Null: as many as the profile has."""
    data_parallel: int = 1
    num_gpus: int | None = None
    """Search P and D too: T * C * P * D GPUs."""
    schedules: tuple[Schedule, ...] = ("1f1b", "interleaved")
    num_chunks: tuple[int, ...] | None = None
    microbatch_sizes: tuple[int, ...] | None = None
    microbatch_group_sizes: tuple[int, ...] | None = None
    recompute: tuple[Literal["none", "full"], ...] = ("none",)
    layouts: tuple[Layout, ...] = ("even", "balanced")
    allow_empty_stages: bool = False
    objective: Objective = "time"
    baseline: str | None = None
    """`schedule=1f1b microbatch_size=1`; null: the best 1F1B over all other axes."""
    top: int = 10
    list_all_up_to: int = 0
    """A space of at most so many plans is listed whole, whatever `top` says: an exhaustive
    validation needs every plan."""
    trials: int | None = None
    timeout_s: float | None = None
    storage: str | None = None
    study_name: str | None = None
    seed: int = 0
    max_enumerated: int = MAX_ENUMERATED


@dataclass(frozen=True, slots=True)
class Query:
    """What every listing of one search has in common."""

    model: CostModel
    request: Request
    axes: Axes

    @property
    def target(self) -> Target:
        target = self.model.setting.target
        if target is None:
            raise UsageError("a search needs a target, whose rules decide what is legal")
        return target

    def list(self, axes: Axes) -> Listing:
        return list_plans(
            self.model,
            axes,
            target=self.target,
            global_batch_size=self.request.global_batch_size,
            allow_empty_stages=self.request.allow_empty_stages,
        )

    def scores(self, axes: Axes) -> Scores:
        return Scores(self.model, self.list(axes).plans)


def axes_of(profile: Profile, request: Request) -> Axes:
    """The axes of a request. Raises UsageError where the numbers of GPUs don't work out."""
    return Axes(
        grids=_grids(profile, request),
        schedules=request.schedules,
        num_chunks=request.num_chunks,
        microbatch_sizes=request.microbatch_sizes,
        microbatch_group_sizes=request.microbatch_group_sizes,
        recompute=request.recompute,
        layouts=request.layouts,
    )


def _grids(profile: Profile, request: Request) -> tuple[tuple[int, int], ...]:
    """The (P, D) pairs."""
    if request.num_gpus is None:
        return ((request.num_ranks or profile.num_ranks, request.data_parallel),)
    if request.num_ranks is not None:
        raise UsageError("--gpus searches the number of ranks: leave out --ranks")
    if not profile.allreduce:
        raise UsageError(
            "--gpus trades pipeline ranks for data-parallel replicas and needs an all-reduce "
            "measurement, which the profile does not have; profile with 2 or more ranks, or give "
            "--ranks and --data-parallel"
        )
    shards = profile.parallel.tensor * profile.parallel.context
    if request.num_gpus % shards:
        raise UsageError(
            f"--gpus {request.num_gpus} is not a multiple of tensor x context parallel ({shards})"
        )
    pairs = request.num_gpus // shards
    return tuple(
        (num_ranks, pairs // num_ranks)
        for num_ranks in range(1, pairs + 1)
        if pairs % num_ranks == 0 and num_ranks <= profile.model.num_layers
    )
