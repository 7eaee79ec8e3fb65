"""The search's answer and single estimates as sheets."""

import re
from collections.abc import Sequence
from itertools import groupby

from pptune.estimate import Estimate, PredictedPlan
from pptune.plan import Plan
from pptune.plans_file import PlansFile, Space
from pptune.units import format_bytes, format_ratio, format_seconds
from pptune.views.tables import (
    Column,
    Sheet,
    bytes_column,
    facts_sheet,
    ratio_column,
    time_column,
)

LOSS_WORDS = {
    "bubble": "more bubble",
    "exposed-transfer": "more exposed transfer",
    "overhead": "more overhead",
    "compute": "slower compute (smaller micro-batches or an uneven split)",
    "memory": "does not fit",
    "step-constant": "larger per-step constants",
}
"""Reason codes of a search in words; a code that is not here is shown as it is."""


def ranking(plans: PlansFile, *, top: int = 10) -> Sheet:
    """The first `top` candidates, the reference plans, and what was searched in sentences."""
    entries: list[tuple[str, Plan, Estimate, float | None]] = [
        (str(row.rank), row.plan, row.estimate, row.speedup_over_baseline)
        for row in plans.candidates[:top]
    ]
    num_candidates = len(entries)
    entries += [
        (name, reference.plan, reference.estimate, _speedup(plans, reference))
        for name, reference in _references(plans)
    ]
    all_plans = [plan for _, plan, _, _ in entries]
    estimates = [estimate for _, _, estimate, _ in entries]
    columns = (
        Column(key="rank", title="#", left=True),
        *plan_columns(all_plans),
        *_estimate_columns(estimates),
    )
    rows = tuple(
        (name, *plan_cells(plan), *_estimate_cells(estimate, speedup))
        for name, plan, estimate, speedup in entries
    )
    return Sheet(
        title=f"{plans.model.name}: plans for {plans.global_batch_size} sequences per step "
        f"on {plans.target}",
        columns=columns,
        rows=rows,
        notes=tuple(_ranking_notes(plans)),
        strong_rows=frozenset({0} if num_candidates else ()),
        faint_rows=frozenset(range(num_candidates, len(entries))),
    )


def space_sheet(space: Space) -> Sheet:
    """What a search would look at, counted: a row per rule that some plans break."""
    rows: list[tuple[str, str | None, int]] = [
        ("legal", None, space.num_legal),
        ("legal, but does not fit", None, space.num_infeasible),
    ]
    rows += [
        ("illegal", rule, count)
        for rule, count in sorted(space.num_illegal.items(), key=lambda item: (-item[1], item[0]))
    ]
    return Sheet(
        title="The space of plans",
        columns=(
            Column(key="kind", title="plans", left=True),
            Column(key="rule", title="rule", left=True),
            Column(key="count", title="number", text=lambda value: f"{value:,}"),
        ),
        rows=tuple(rows),
        notes=tuple(f"{axis}: {', '.join(values)}" for axis, values in space.axes.items()),
    )


def estimate_sheet(predicted: PredictedPlan) -> Sheet:
    """One plan's estimate, a line per quantity: what `predict` shows."""
    estimate = predicted.estimate
    parts = estimate.breakdown_s
    step_s = estimate.step_time_s

    def part(seconds: float) -> str:
        return f"{format_seconds(seconds)} ({format_ratio(seconds / step_s if step_s else 0.0)})"

    rows = [
        ("step time", format_seconds(step_s)),
        ("  compute", part(parts.compute)),
        ("  bubble", part(parts.bubble)),
        ("  exposed transfer", part(parts.exposed_transfer)),
        ("  overhead", part(parts.overhead)),
        ("  step constant", part(parts.step_constant)),
        ("bubble ratio, all ranks", format_ratio(estimate.bubble_ratio)),
        ("ideal time", format_seconds(estimate.ideal_time_s)),
        ("longest rank's span", format_seconds(estimate.longest_rank_span_s)),
        ("tokens per second", None if estimate.tokens_per_s is None
         else f"{estimate.tokens_per_s:,.0f}"),
        ("MFU", None if estimate.mfu is None else format_ratio(estimate.mfu)),
        ("peak memory, fullest rank", _fullest_text(estimate.peak_memory_bytes)),
        ("fits", estimate.fits),
        ("numbers used", estimate.source),
    ]  # fmt: skip
    return facts_sheet(
        shown_label(predicted.plan.label),
        rows,
        (
            "The five indented parts are the slowest rank's and sum to the step time; bubble ratio "
            "is idle / total time.",
            *(f"assumed: {text}" for text in estimate.assumptions),
        ),
    )


def plan_columns(plans: Sequence[Plan]) -> tuple[Column, ...]:
    """Columns of a plan; those in which every plan is ordinary go to CSV only."""
    return (
        Column(key="schedule", title="schedule", left=True, priority=1),
        Column(key="num_ranks", title="P", priority=6, listed=_varies(p.num_ranks for p in plans)),
        Column(key="num_chunks", title="V"),
        Column(key="microbatch_size", title="b"),
        Column(key="num_microbatches", title="M"),
        Column(
            key="microbatch_group_size", title="N", priority=6),
        Column(
            key="data_parallel", title="D", priority=6,
            listed=_varies(p.data_parallel for p in plans),
        ),
        Column(
            key="recompute", title="recompute", left=True, priority=7,
            listed=any(p.recompute != "none" for p in plans),
        ),
        Column(
            key="layers_per_stage", title="layers", text=layers_text, left=True, priority=5,
            listed=any(len(set(p.layers_per_stage)) > 1 for p in plans),
        ),
    )  # fmt: skip


def plan_cells(plan: Plan) -> tuple[object, ...]:
    """One cell per plan column."""
    return (
        plan.schedule, plan.num_ranks, plan.num_chunks, plan.microbatch_size,
        plan.num_microbatches, plan.microbatch_group_size, plan.data_parallel, plan.recompute,
        plan.layers_per_stage,
    )  # fmt: skip


def layers_text(layers_per_stage: Sequence[int]) -> str:
    """Blocks per stage with runs folded: `7 8x6 7`."""
    runs = [(layers, sum(1 for _ in run)) for layers, run in groupby(layers_per_stage)]
    return " ".join(f"{layers}x{count}" if count > 1 else f"{layers}" for layers, count in runs)


def shown_label(label: str) -> str:
    """A plan's label with runs of equal stages folded: `[4,4,4,2]` becomes `[4x3 2]`."""

    def folded(found: re.Match[str]) -> str:
        return f"[{layers_text(tuple(map(int, found[1].split(','))))}]"

    return re.sub(r"\[(\d+(?:,\d+)*)\]", folded, label)


def fullest(peak_memory_bytes: Sequence[int] | None) -> int | None:
    """The fullest rank's peak, or None where memory is not known."""
    return max(peak_memory_bytes) if peak_memory_bytes else None


def _varies(values: object) -> bool:
    return len(set(values)) > 1  # type: ignore[call-overload]


def _estimate_columns(estimates: Sequence[Estimate]) -> tuple[Column, ...]:
    return (
        time_column("step_time_s", "step", [row.step_time_s for row in estimates]),
        Column(
            key="speedup_over_baseline", title="speed-up", text=lambda value: f"{value:.3f}x"
        ),
        ratio_column("bubble_ratio", "bubble", priority=3),
        time_column(
            "exposed_transfer_s", "exposed",
            [row.breakdown_s.exposed_transfer for row in estimates], priority=4,
        ),
        time_column(
            "overhead_s", "overhead", [row.breakdown_s.overhead for row in estimates], priority=4
        ),
        bytes_column("peak_memory_bytes", "memory", priority=2),
        Column(key="fits", title="fits", left=True, priority=1),
        Column(
            key="source", title="numbers", left=True, priority=7,
            listed=any(row.source not in ("measured", "given") for row in estimates),
        ),
        Column(
            key="tokens_per_s", title="tokens/s", text=lambda value: f"{value:,.0f}", priority=8
        ),
        ratio_column("mfu", "MFU", priority=8),
    )  # fmt: skip


def _estimate_cells(estimate: Estimate, speedup: float | None) -> tuple[object, ...]:
    return (
        estimate.step_time_s, speedup, estimate.bubble_ratio,
        estimate.breakdown_s.exposed_transfer, estimate.breakdown_s.overhead,
        fullest(estimate.peak_memory_bytes), estimate.fits, estimate.source,
        estimate.tokens_per_s, estimate.mfu,
    )  # fmt: skip


def _references(plans: PlansFile) -> list[tuple[str, PredictedPlan]]:
    named = [("base", plans.baseline), ("same b", plans.baseline_same_size)]
    if plans.baseline_same_size == plans.baseline:
        named.pop()
    return [(name, reference) for name, reference in named if reference is not None]


def _speedup(plans: PlansFile, reference: PredictedPlan) -> float | None:
    if plans.baseline is None:
        return None
    return plans.baseline.estimate.step_time_s / reference.estimate.step_time_s


def _fullest_text(peak_memory_bytes: Sequence[int] | None) -> str | None:
    peak = fullest(peak_memory_bytes)
    if peak is None or peak_memory_bytes is None:
        return None
    return f"{format_bytes(peak)} (rank {list(peak_memory_bytes).index(peak)})"


def _ranking_notes(plans: PlansFile) -> list[str]:
    space = plans.space
    notes = [
        f"Global batch held fixed at {plans.global_batch_size} sequences: "
        "M = global batch / (b x D), so a larger b means fewer micro-batches.",
        f"All {space.num_legal:,} legal plans were evaluated or excluded by a proven bound: "
        "rank 1 is optimal for the cost model."
        if plans.proven_optimal
        else f"The {space.num_legal:,} legal plans were sampled, not all evaluated: rank 1 is the "
        "best plan found.",
    ]
    if space.num_illegal:
        notes.append(f"Illegal on {plans.target}: {_counts(space.num_illegal)}.")
    if space.num_infeasible:
        notes.append(f"Legal but infeasible: {space.num_infeasible:,} (do not fit in memory).")
    if space.lost_by:
        worded = {LOSS_WORDS.get(code, code): count for code, count in space.lost_by.items()}
        notes.append(f"Why the others lost to rank 1: {_counts(worded)}.")
    if plans.baseline is not None:
        notes.append(
            f"Speed-up is over the baseline (base), {shown_label(plans.baseline.plan.label)}."
        )
    notes.append(
        "bubble: idle / total time over all ranks; exposed, overhead: of the slowest rank; "
        "memory: peak of the fullest rank; layers: blocks per stage, 2x8 is 2 on each of 8."
    )
    if plans.candidates:
        notes += [f"Assumed: {text}." for text in plans.candidates[0].estimate.assumptions]
    notes += [f"warning: {text}" for text in plans.warnings]
    return notes


def _counts(counted: dict[str, int]) -> str:
    ordered = sorted(counted.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{name} {count:,}" for name, count in ordered)
