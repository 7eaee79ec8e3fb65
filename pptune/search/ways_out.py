"""What to say, and what to try, when no plan is legal or none fits."""

from collections.abc import Callable
from dataclasses import replace

from pptune.cost_model import CostModel
from pptune.errors import NoAnswer
from pptune.plan import Plan
from pptune.search.scores import Scores, families
from pptune.search.space import Axes, Listing, measured_sizes
from pptune.units import format_bytes, format_seconds

_MAX_RULES = 4
_MAX_RANKS = 8


def nothing_legal(listing: Listing) -> NoAnswer:
    """The rules that refused every plan, most frequent first, each with its nearest change."""
    lines = ["no plan is legal"]
    for rule, count in listing.num_illegal.most_common(_MAX_RULES):
        lines.append(f"  {count} refused by {rule}: {listing.examples[rule]}")
    return NoAnswer("\n".join(lines))


def nothing_fits(
    model: CostModel, scores: Scores, axes: Axes, score: Callable[[Axes], Scores]
) -> NoAnswer:
    """What each rank of the leanest plan lacks, and the changes after which a plan fits.

    `score` lists and bounds the plans of other axes.
    """
    limit = model.memory_limit_bytes
    assert limit is not None
    known = set(map(int, scores.known))
    # Within a family the smallest group size, which comes first, holds least.
    firsts = [start for start, _ in families(scores.plans) if start in known]
    for index in firsts:
        scores.size(index)
    leanest = min(firsts, key=lambda index: float(scores.peak_bytes[index]))
    plan = scores.plans[leanest]
    peaks = model.peak_bytes(plan)
    assert peaks is not None
    lines = [f"none of {len(known)} legal plans fits in {format_bytes(limit)} per rank; "
             f"the leanest is {plan.label}:"]  # fmt: skip
    over = [(rank, float(peak)) for rank, peak in enumerate(peaks) if peak > limit]
    lines += [
        f"  rank {rank} needs {format_bytes(peak)}, {format_bytes(peak - limit)} more than it has"
        for rank, peak in over[:_MAX_RANKS]
    ]
    if len(over) > _MAX_RANKS:
        lines.append(f"  and {len(over) - _MAX_RANKS} more ranks lack memory")
    ways = [
        (found.num_ranks * found.data_parallel, seconds, f"  {change}: {found.label} fits "
         f"({format_seconds(seconds)} per step)")
        for change, other in _changes(model, axes)
        for found, seconds in _first_fitting(score(other))
    ]  # fmt: skip
    if ways:
        lines.append("what would fit, cheapest first:")
        lines += [text for _, _, text in sorted(ways)]
    else:
        lines.append(
            "nothing that can be tried from this profile fits; the limit would have to be "
            f"{format_bytes(max(peaks))} or more"
        )
    return NoAnswer("\n".join(lines))


def _changes(model: CostModel, axes: Axes) -> list[tuple[str, Axes]]:
    """Axes that need less memory, in words and as axes."""
    found: list[tuple[str, Axes]] = []
    if "full" not in axes.recompute:
        found.append(("--recompute full", replace(axes, recompute=("full",))))
    if axes.microbatch_sizes is not None:
        smaller = tuple(range(measured_sizes(model)[0], min(axes.microbatch_sizes)))
        if smaller:
            text = f"--micro-batch-sizes below {min(axes.microbatch_sizes)}"
            found.append((text, replace(axes, microbatch_sizes=smaller)))
    most = max(num_ranks for num_ranks, _ in axes.grids)
    for num_ranks in (2 * most, 4 * most):
        if num_ranks <= model.profile.model.num_layers:
            grids = tuple({(num_ranks, d) for _, d in axes.grids})
            found.append((f"--ranks {num_ranks}", replace(axes, grids=grids)))
    return found


def _first_fitting(scores: Scores) -> list[tuple[Plan, float]]:
    """The fastest fitting plan and its step time in seconds, or nothing."""
    return [
        (scores.plans[index], scores.play(index))
        for index in scores.fastest(map(int, scores.known), 1)
    ]
