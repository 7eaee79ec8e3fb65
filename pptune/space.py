"""The space of plans: its axes, and every legal plan on them.

GPUs = T * C * P * D and M = global batch / (b * D), so that b and D leave no choice of M.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from pptune.cost_model import CostModel
from pptune.curves import usable_points
from pptune.errors import MissingNumber, UsageError
from pptune.plan import (
    SINGLE_STAGE,
    V_SHAPED,
    Plan,
    Schedule,
    default_group_size,
    even_layers,
    placement_of,
)
from pptune.targets import Target, Violation, batch_violation, illegal, uneven_violation

MAX_PLANS = 2_000_000
"""Legal plans that are listed at most; a larger space is refused."""

Layout = Literal["even", "balanced"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """The values of a search, by axis; a plan takes one of each."""

    grids: tuple[tuple[int, int], ...]
    """(P, D) pairs."""
    schedules: tuple[Schedule, ...]
    num_chunks: tuple[int, ...] | None = None
    """Null: every V that leaves no stage empty."""
    microbatch_sizes: tuple[int, ...] | None = None
    """Null: every divisor of the per-replica batch within the measured sizes."""
    microbatch_group_sizes: tuple[int, ...] | None = None
    """Null: `default_group_size` alone."""
    recompute: tuple[Literal["none", "full"], ...] = ("none",)
    layouts: tuple[Layout, ...] = ("even", "balanced")


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """Every legal plan on the axes, and what was illegal."""

    plans: list[Plan]
    num_illegal: Counter[str] = field(default_factory=Counter)
    """By rule."""
    examples: dict[str, Violation] = field(default_factory=dict)
    """One violation of each rule."""


def text_of_axes(axes: Axes, listing: Listing) -> dict[str, tuple[str, ...]]:
    """The values searched, by axis, in words; axes left open show the values of the legal plans."""

    def seen(name: str, given: Sequence[object] | None) -> tuple[str, ...]:
        values = given if given is not None else sorted({getattr(p, name) for p in listing.plans})
        return tuple(map(str, values))

    return {
        "schedule": axes.schedules,
        "num_ranks": tuple(str(p) for p in sorted({p for p, _ in axes.grids})),
        "data_parallel": tuple(str(d) for d in sorted({d for _, d in axes.grids})),
        "num_chunks": seen("num_chunks", axes.num_chunks),
        "microbatch_size": seen("microbatch_size", axes.microbatch_sizes),
        "microbatch_group_size": ("default",)
        if axes.microbatch_group_sizes is None
        else tuple(map(str, axes.microbatch_group_sizes)),
        "recompute": axes.recompute,
        "layout": axes.layouts,
    }


def list_plans(
    model: CostModel,
    axes: Axes,
    *,
    target: Target,
    global_batch_size: int,
    allow_empty_stages: bool = False,
) -> Listing:
    """Every legal plan on `axes`, and the illegal ones counted by rule.

    Raises UsageError where there are more than `MAX_PLANS`, MissingNumber where no layer time is
    known.
    """
    listing = Listing(plans=[])
    layouts = _Layouts(model, axes.layouts, allow_empty=allow_empty_stages)
    for plan in _candidates(model, axes, layouts, listing, target, global_batch_size):
        violation = illegal(
            plan,
            target,
            model=model.profile.model,
            tensor_parallel=model.profile.parallel.tensor,
            context_parallel=model.profile.parallel.context,
            zero=model.setting.zero_stage,
            allow_empty_stages=allow_empty_stages,
        )
        if violation is not None:
            _count(listing, violation)
            continue
        listing.plans.append(plan)
        if len(listing.plans) > MAX_PLANS:
            raise UsageError(
                f"the space holds more than {MAX_PLANS} legal plans; give fewer values of "
                "--microbatch-group-sizes, --chunks, --micro-batch-sizes or --schedules"
            )
    return listing


def _candidates(
    model: CostModel,
    axes: Axes,
    layouts: "_Layouts",
    listing: Listing,
    target: Target,
    global_batch_size: int,
) -> Iterator[Plan]:
    """Plans on the axes; combinations that make no plan are counted in `listing`."""
    for num_ranks, data_parallel in axes.grids:
        sizes = _sizes(model, axes, listing, target, global_batch_size, data_parallel)
        for schedule in _schedules(axes, listing, num_ranks):
            for num_chunks in _chunks(axes, listing, layouts, schedule, num_ranks):
                for b, num_microbatches in sizes:
                    groups, too_large = _groups(axes, schedule, num_ranks, num_microbatches)
                    for recompute in axes.recompute:
                        for layers in layouts.of(schedule, num_ranks, num_chunks, b, recompute):
                            if not layers:
                                _count(listing, layouts.uneven(target, num_ranks, num_chunks))
                                continue
                            if too_large:
                                violation = _oversized(too_large, num_microbatches)
                                _count(listing, violation, len(too_large))
                            for group in groups:
                                yield Plan(
                                    schedule=schedule,
                                    num_ranks=num_ranks,
                                    num_chunks=num_chunks,
                                    microbatch_size=b,
                                    num_microbatches=num_microbatches,
                                    layers_per_stage=layers,
                                    placement=placement_of(schedule),
                                    microbatch_group_size=group,
                                    data_parallel=data_parallel,
                                    recompute=recompute,
                                )


class _Layouts:
    """Layers per stage, by layout; what several plans share is made once."""

    def __init__(self, model: CostModel, layouts: tuple[Layout, ...], *, allow_empty: bool) -> None:
        self.model = model
        self.num_layers = model.profile.model.num_layers
        self.layouts = layouts
        self.allow_empty = allow_empty
        self._found: dict[tuple[object, ...], tuple[tuple[int, ...], ...]] = {}

    def of(
        self, schedule: str, num_ranks: int, num_chunks: int, microbatch_size: int, recompute: str
    ) -> tuple[tuple[int, ...], ...]:
        """The distinct layouts; an empty tuple stands for an even split that does not exist."""
        placement = placement_of(schedule)
        key = (placement, num_ranks, num_chunks, microbatch_size, recompute)
        if key not in self._found:
            even = even_layers(self.num_layers, num_ranks * num_chunks) or ()
            found = [even] if "even" in self.layouts else []
            if "balanced" in self.layouts:
                balanced = self.model.balanced_layers(
                    num_ranks,
                    num_chunks,
                    placement=placement,
                    microbatch_size=microbatch_size,
                    recompute=recompute,
                    allow_empty_stages=self.allow_empty,
                )
                # Where nothing splits evenly, the balanced split stands for both.
                found = [layers for layers in found if layers and layers != balanced]
                found.append(balanced)
            self._found[key] = tuple(found)
        return self._found[key]

    def uneven(self, target: Target, num_ranks: int, num_chunks: int) -> Violation:
        """Why there is no even split."""
        violation = uneven_violation(
            target, num_layers=self.num_layers, num_ranks=num_ranks, num_chunks=num_chunks
        )
        assert violation is not None
        return violation


def _sizes(
    model: CostModel,
    axes: Axes,
    listing: Listing,
    target: Target,
    global_batch_size: int,
    data_parallel: int,
) -> list[tuple[int, int]]:
    """(b, M) pairs of one replica."""

    def refuse(microbatch_size: int | None) -> None:
        violation = batch_violation(
            target,
            global_batch_size=global_batch_size,
            data_parallel=data_parallel,
            microbatch_size=microbatch_size,
        )
        assert violation is not None
        _count(listing, violation)

    if global_batch_size % data_parallel:
        refuse(None)
        return []
    replica = global_batch_size // data_parallel
    if axes.microbatch_sizes is None:
        least, most = measured_sizes(model)
        return [(b, replica // b) for b in range(least, min(most, replica) + 1) if replica % b == 0]
    pairs = []
    for b in axes.microbatch_sizes:
        if replica % b:
            refuse(b)
        else:
            pairs.append((b, replica // b))
    return pairs


def measured_sizes(model: CostModel) -> tuple[int, int]:
    """The smallest and the largest micro-batch size with block times. Raises MissingNumber."""
    layer = model.profile.layer("block") or model.profile.layer("block", "full")
    sizes = [point.microbatch_size for point in usable_points(layer)] if layer else []
    if not sizes:
        raise MissingNumber(
            "the profile has no block times; profile or import the block layer",
            rule="layer-not-measured",
        )
    return min(sizes), max(sizes)


def _schedules(axes: Axes, listing: Listing, num_ranks: int) -> list[Schedule]:
    """The schedules that differ on so many ranks: on a single one there is no pipeline."""
    if num_ranks > 1:
        return list(axes.schedules)
    plain: list[Schedule] = [s for s in axes.schedules if s in ("1f1b", "gpipe")]
    if not plain:
        _count(listing, Violation(
            "one-rank-has-no-pipeline",
            f"{', '.join(axes.schedules)} on 1 rank has nothing to overlap",
            "use --schedules 1f1b, or 2 or more ranks",
        ))  # fmt: skip
    return plain[:1]


def _chunks(
    axes: Axes, listing: Listing, layouts: _Layouts, schedule: Schedule, num_ranks: int
) -> list[int]:
    """The values of V that the schedule can have without an empty stage."""
    most = max(layouts.num_layers // num_ranks, 1)
    if schedule in SINGLE_STAGE:
        wanted, needs = [1], "1"
    elif schedule in V_SHAPED:
        wanted, needs = [2], "2"
    else:
        wanted, needs = list(range(2, most + 1)), "2 or more"
        if axes.num_chunks is not None:
            wanted = [v for v in axes.num_chunks if v > 1]
    if axes.num_chunks is not None:
        wanted = [v for v in wanted if v in axes.num_chunks]
        if not wanted:
            _count(listing, Violation(
                "chunks-of-schedule",
                f"{schedule} needs {needs} chunks per rank, but --chunks is "
                f"{','.join(map(str, axes.num_chunks))}",
                f"use --chunks {needs.split()[0]}, or other --schedules",
            ))  # fmt: skip
    fitting = []
    for num_chunks in wanted:
        if num_ranks * num_chunks <= layouts.num_layers or layouts.allow_empty:
            fitting.append(num_chunks)
        else:
            _count(listing, Violation(
                "more-stages-than-layers",
                f"{layouts.num_layers} layers cannot fill {num_ranks * num_chunks} stages "
                f"({num_ranks} ranks x {num_chunks} chunks)",
                f"use at most {layouts.num_layers} stages, or --allow-empty-stages",
            ))  # fmt: skip
    return fitting


def _groups(
    axes: Axes, schedule: Schedule, num_ranks: int, num_microbatches: int
) -> tuple[Sequence[int | None], Sequence[int]]:
    """The micro-batch group sizes to try, (None,) for schedules without, and those above M."""
    if schedule not in ("interleaved", "interleaved-zb"):
        return (None,), ()
    sizes = axes.microbatch_group_sizes
    if sizes is None:
        return (default_group_size(schedule, num_ranks, num_microbatches),), ()
    return [n for n in sizes if n <= num_microbatches], [n for n in sizes if n > num_microbatches]


def _oversized(sizes: Sequence[int], num_microbatches: int) -> Violation:
    return Violation(
        "group-size-out-of-range",
        f"the micro-batch group size ({sizes[0]}) must be at most the micro-batches "
        f"({num_microbatches})",
        "use smaller --microbatch-group-sizes",
    )


def _count(listing: Listing, violation: Violation, times: int = 1) -> None:
    listing.num_illegal[violation.rule] += times
    listing.examples.setdefault(violation.rule, violation)
