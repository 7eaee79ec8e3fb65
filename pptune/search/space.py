"""The space of plans: its axes, and every legal plan on them.

GPUs = T * C * P * D and M = global batch / (b * D), so that b and D leave no choice of M.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
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

MAX_PLANS = 1_000_000
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
    walk = _Walk(model, axes, target, global_batch_size, allow_empty_stages)
    plans = walk.listing.plans
    for plan in walk.plans():
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
            walk.refuse(violation)
            continue
        plans.append(plan)
        if len(plans) > MAX_PLANS:
            raise UsageError(
                f"the space holds more than {MAX_PLANS} legal plans; give fewer values of "
                "--microbatch-group-sizes, --chunks, --micro-batch-sizes or --schedules"
            )
    return walk.listing


def measured_sizes(model: CostModel, recompute: str = "none") -> tuple[int, int]:
    """The smallest and the largest micro-batch size with block times. Raises MissingNumber."""
    layer = model.profile.layer("block", recompute) or model.profile.layer("block")
    sizes = [point.microbatch_size for point in usable_points(layer)] if layer else []
    if not sizes:
        raise MissingNumber(
            "the profile has no block times; profile or import the block layer",
            rule="layer-not-measured",
        )
    return min(sizes), max(sizes)


class _Walk:
    """Goes through the axes, outermost first; N is innermost, so that plans which differ in nothing
    else follow each other. What makes no plan at all is counted on the way."""

    def __init__(
        self,
        model: CostModel,
        axes: Axes,
        target: Target,
        global_batch_size: int,
        allow_empty_stages: bool,
    ) -> None:
        self.model = model
        self.axes = axes
        self.target = target
        self.global_batch_size = global_batch_size
        self.allow_empty_stages = allow_empty_stages
        self.num_layers = model.profile.model.num_layers
        self.listing = Listing(plans=[])
        self._layouts: dict[tuple[object, ...], tuple[tuple[int, ...], ...]] = {}

    def plans(self) -> Iterator[Plan]:
        """Plans on the axes, not all of them legal."""
        for (num_ranks, data_parallel), recompute in product(self.axes.grids, self.axes.recompute):
            sizes = self._sizes(data_parallel, recompute)
            for schedule in self._schedules(num_ranks):
                shapes = product(self._chunks(schedule, num_ranks), sizes)
                for num_chunks, (b, num_microbatches) in shapes:
                    layouts = self._layouts_of(schedule, num_ranks, num_chunks, b, recompute)
                    groups = self._groups(schedule, num_ranks, num_microbatches, len(layouts))
                    for layers, group in product(layouts, groups):
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

    def refuse(self, violation: Violation | None, times: int = 1) -> None:
        """Count what is illegal, and keep the first example of its rule."""
        assert violation is not None
        self.listing.num_illegal[violation.rule] += times
        self.listing.examples.setdefault(violation.rule, violation)

    def _sizes(self, data_parallel: int, recompute: str) -> list[tuple[int, int]]:
        """(b, M) pairs of one replica."""

        def broken(microbatch_size: int | None) -> Violation | None:
            return batch_violation(
                self.target,
                global_batch_size=self.global_batch_size,
                data_parallel=data_parallel,
                microbatch_size=microbatch_size,
            )

        replica, rest = divmod(self.global_batch_size, data_parallel)
        if rest:
            self.refuse(broken(None))
            return []
        if self.axes.microbatch_sizes is not None:
            for b in self.axes.microbatch_sizes:
                if replica % b:
                    self.refuse(broken(b))
            return [(b, replica // b) for b in self.axes.microbatch_sizes if replica % b == 0]
        least, most = measured_sizes(self.model, recompute)
        return [(b, replica // b) for b in range(least, min(most, replica) + 1) if replica % b == 0]

    def _schedules(self, num_ranks: int) -> list[Schedule]:
        """The schedules that differ on so many ranks: on a single one there is no pipeline."""
        if num_ranks > 1:
            return list(self.axes.schedules)
        plain: list[Schedule] = [s for s in self.axes.schedules if s in ("1f1b", "gpipe")]
        if not plain:
            violation = Violation(
                "one-rank-has-no-pipeline",
                f"{', '.join(self.axes.schedules)} on 1 rank has nothing to overlap",
                "use --schedules 1f1b, or 2 or more ranks",
            )
            self.refuse(violation)
        return plain[:1]

    def _chunks(self, schedule: Schedule, num_ranks: int) -> list[int]:
        """The values of V that the schedule can have without an empty stage."""
        given = self.axes.num_chunks
        if schedule in SINGLE_STAGE:
            needs, possible = "1", [1]
        elif schedule in V_SHAPED:
            needs, possible = "2", [2]
        else:
            most = max(given or (self.num_layers // num_ranks,))
            needs, possible = "2 or more", list(range(2, most + 1))
        wanted = [v for v in possible if given is None or v in given]
        if not wanted and given is not None:
            violation = Violation(
                "chunks-of-schedule",
                f"{schedule} needs {needs} chunks per rank, but --chunks is "
                f"{','.join(map(str, given))}",
                f"use --chunks {needs.split()[0]}, or other --schedules",
            )
            self.refuse(violation)
        fitting = []
        for num_chunks in wanted:
            num_stages = num_ranks * num_chunks
            if num_stages <= self.num_layers or self.allow_empty_stages:
                fitting.append(num_chunks)
                continue
            violation = Violation(
                "more-stages-than-layers",
                f"{self.num_layers} layers cannot fill {num_stages} stages ({num_ranks} ranks x "
                f"{num_chunks} chunks)",
                f"use at most {self.num_layers} stages, or --allow-empty-stages",
            )
            self.refuse(violation)
        return fitting

    def _layouts_of(
        self, schedule: str, num_ranks: int, num_chunks: int, microbatch_size: int, recompute: str
    ) -> tuple[tuple[int, ...], ...]:
        """The distinct layouts, made once for all schedules that share them."""
        placement = placement_of(schedule)
        key = (placement, num_ranks, num_chunks, microbatch_size, recompute)
        if key not in self._layouts:
            found = []
            even = even_layers(self.num_layers, num_ranks * num_chunks)
            if "even" in self.axes.layouts and even is not None:
                found.append(even)
            if "balanced" in self.axes.layouts:
                balanced = self.model.balanced_layers(
                    num_ranks,
                    num_chunks,
                    placement=placement,
                    microbatch_size=microbatch_size,
                    recompute=recompute,
                    allow_empty_stages=self.allow_empty_stages,
                )
                found += [balanced] if balanced not in found else []
            self._layouts[key] = tuple(found)
        if not self._layouts[key]:
            violation = uneven_violation(
                self.target,
                num_layers=self.num_layers,
                num_ranks=num_ranks,
                num_chunks=num_chunks,
            )
            self.refuse(violation)
        return self._layouts[key]

    def _groups(
        self, schedule: Schedule, num_ranks: int, num_microbatches: int, num_layouts: int
    ) -> Sequence[int | None]:
        """The micro-batch group sizes to try; (None,) for schedules without groups."""
        if schedule not in ("interleaved", "interleaved-zb"):
            return (None,)
        sizes = self.axes.microbatch_group_sizes
        if sizes is None:
            return (default_group_size(schedule, num_ranks, num_microbatches),)
        too_large = [size for size in sizes if size > num_microbatches]
        if too_large and num_layouts:
            violation = Violation(
                "group-size-out-of-range",
                f"the micro-batch group size ({too_large[0]}) must be at most the micro-batches "
                f"({num_microbatches})",
                "use smaller --microbatch-group-sizes",
            )
            self.refuse(violation, num_layouts * len(too_large))
        return [size for size in sizes if size <= num_microbatches]
