"""An explanation for people: plain sentences first, then the numbers as sheets."""

from pptune.explanation import (
    Bandwidth,
    ChunkRange,
    Confidence,
    Explanation,
    HeadLoss,
    Rival,
    Sensitivity,
    StepShare,
)
from pptune.units import format_bytes_per_s, format_ratio, format_seconds
from pptune.views.plans import layers_text, shown_label
from pptune.views.tables import Column, Sheet, ratio_column, time_column
from pptune.views.validation import PARTS

MIN_SHARE = 0.05
"""A part that a rival saves is named from this share of what it loses on."""

SMALLEST_TOLD = 0.0005
"""Shares of the step below this would be told as 0.0 %."""

MAX_SENSITIVITIES = 8
"""Rows shown; the rest moves the step time by less."""


def sentences(explanation: Explanation) -> list[str]:
    """The answer in words, the most important first."""
    pick = explanation.shares[0]
    lines = [_pick_line(pick), explanation.held_fixed]
    lines += [_rival_line(rival) for rival in explanation.rivals]
    lines += _loss_lines(pick)
    if explanation.head is not None:
        lines.append(_head_line(explanation.head))
    lines += _range_lines(explanation)
    if explanation.bandwidth is not None:
        lines.append(_bandwidth_line(explanation.bandwidth))
    if explanation.knee_microbatch_size is not None:
        lines.append(
            f"Knee: a block reaches 90 % of its best rate per sequence at b = "
            f"{explanation.knee_microbatch_size:.1f}."
        )
    lines.append(_sensitivity_line(explanation.sensitivities))
    lines.append(_confidence_line(explanation.confidence))
    return lines


def explanation_sheets(explanation: Explanation) -> tuple[Sheet, ...]:
    """Sentences, then where the steps go, the best of each V, b at the pick's V, sensitivities."""
    return (
        Sheet(title="", columns=(), rows=(), notes=tuple(sentences(explanation))),
        _shares_sheet(explanation),
        _rivals_sheet(explanation),
        _sizes_sheet(explanation),
        _sensitivities_sheet(explanation),
    )


def _pick_line(pick: StepShare) -> str:
    parts = pick.estimate.breakdown_s
    step_s = pick.estimate.step_time_s
    told = ", ".join(
        f"{name.replace('_', ' ')} {format_ratio(getattr(parts, name) / step_s)}"
        for name in PARTS
        if getattr(parts, name) >= SMALLEST_TOLD * step_s > 0
    )
    return f"{shown_label(pick.plan.label)} takes {format_seconds(step_s)} per step: {told}."


def _rival_line(rival: Rival) -> str:
    grown_s = rival.grown_s[rival.reason_code]
    if rival.slower_s < 0:
        return (
            f"V = {rival.plan.num_chunks} ({shown_label(rival.plan.label)}) would be "
            f"{format_seconds(-rival.slower_s)} faster: {rival.reason} "
            f"({format_seconds(-grown_s)} less)."
        )
    line = (
        f"V = {rival.plan.num_chunks} ({shown_label(rival.plan.label)}) loses by "
        f"{format_seconds(rival.slower_s)}: {rival.reason} ({format_seconds(grown_s)} more)"
    )
    worth_saying_s = MIN_SHARE * rival.slower_s
    saved = {name: -value for name, value in rival.grown_s.items() if -value > worth_saying_s}
    if saved:
        name = max(saved, key=saved.__getitem__)
        line += f", against {format_seconds(saved[name])} less {name.replace('-', ' ')}"
    return line + "."


def _loss_lines(pick: StepShare) -> list[str]:
    lines = []
    loss_s = pick.small_size_loss_s
    if loss_s is not None:
        b = pick.plan.microbatch_size
        lines.append(
            f"Small micro-batches: at b = {b} the slowest rank loses {format_seconds(loss_s)} per "
            "step against its layers' best measured rate per sequence."
            if loss_s > 0
            else f"b = {b} runs at the layers' best measured rate per sequence."
        )
    if pick.imbalance_loss_s > 0:
        lines.append(
            f"Uneven stages cost {format_seconds(pick.imbalance_loss_s)}: that much would be saved "
            "if every stage took the same time."
        )
    if pick.chunk_cost_s > 0:
        lines.append(
            f"Per-chunk fixed cost x V: {format_seconds(pick.chunk_cost_s)} per step for V = "
            f"{pick.plan.num_chunks}."
        )
    return lines


def _head_line(head: HeadLoss) -> str:
    weight = f"Head: as heavy as {head.head_blocks:.1f} blocks on the last stage"
    if head.loss_ratio < SMALLEST_TOLD:
        return f"{weight}, it costs the pipeline nothing with this split of the blocks."
    line = (
        f"{weight}, it costs {format_ratio(head.loss_ratio)} of the step "
        f"({format_seconds(head.loss_s)}). "
    )
    if head.best_layers is not None and head.best_layers_step_time_s is not None:
        line += (
            f"Fewer blocks beside it help: {layers_text(head.best_layers)} blocks per stage take "
            f"{format_seconds(head.best_layers_step_time_s)}. "
        )
    return line + (
        "Splitting the vocabulary over the ranks (vocabulary parallelism) would remove the loss."
    )


def _range_lines(explanation: Explanation) -> list[str]:
    b = explanation.shares[0].plan.microbatch_size
    rows = explanation.chunk_ranges
    wins = [f"V = {row.num_chunks} wins at M = {_runs(row.ranges)}" for row in rows if row.ranges]
    losers = [str(row.num_chunks) for row in rows if not row.ranges]
    if losers:
        wins.append(f"V = {', '.join(losers)} at no M tried")
    lines = [f"With b held fixed at {b}, so that the global batch grows with M: {'; '.join(wins)}."]
    judged = [row for row in rows if row.rule_holds is not None]
    for verdict, held in (("holds", True), ("does not hold", False)):
        told = [_rule_text(row) for row in judged if row.rule_holds is held]
        if told:
            lines.append(
                f"The rule of thumb that V pays from M = 1.2 V P on {verdict} here: "
                f"{'; '.join(told)}."
            )
    return lines


def _rule_text(row: ChunkRange) -> str:
    where = f"at M = {_runs(row.beats_one)}" if row.beats_one else "at no M tried"
    return f"V = {row.num_chunks} beats V = 1 {where} (the rule says from {row.rule_of_thumb})"


def _runs(ranges: tuple[tuple[int, int], ...]) -> str:
    return ", ".join(f"{first}" if first == last else f"{first}..{last}" for first, last in ranges)


def _bandwidth_line(bandwidth: Bandwidth) -> str:
    measured = format_bytes_per_s(bandwidth.slowest_bytes_per_s)
    if bandwidth.break_even_bytes_per_s is None:
        return f"Bandwidth: {bandwidth.below} would win at every bandwidth tried (now {measured})."
    above = "more chunks" if bandwidth.below == "one chunk" else "one chunk"
    return (
        f"Bandwidth: below {format_bytes_per_s(bandwidth.break_even_bytes_per_s)} on the slowest "
        f"link (now {measured}) {bandwidth.below} would win, above it {above}."
    )


def _sensitivity_line(rows: tuple[Sensitivity, ...]) -> str:
    turning = [row for row in rows if row.new_pick is not None]
    if not turning:
        return "No single number, moved by its own uncertainty, changes the choice."
    named = "; ".join(
        f"{row.name} by {format_ratio(row.uncertainty_ratio)}"
        f"{' (assumed)' if row.assumed else ''} -> {shown_label(row.new_pick or '')}"
        for row in turning[:MAX_SENSITIVITIES]
    )
    return f"The choice changes with: {named}."


def _confidence_line(confidence: Confidence) -> str:
    if confidence.num_plans < 2:
        return "No other plan fits: there was no choice."
    if confidence.chance_best is None:
        return "The profile has no samples: how sure the choice is can't be said."
    line = (
        f"Chance that it is the best of the {confidence.num_plans} nearest plans, given the "
        f"noise of the layer and link samples: {format_ratio(confidence.chance_best)} "
        f"({confidence.num_resamples} redraws, seed {confidence.seed}; overheads have no samples "
        "and are kept)"
    )
    return line + (
        f"; else most often {shown_label(confidence.rival)}." if confidence.rival else "."
    )


def _shares_sheet(explanation: Explanation) -> Sheet:
    rows = explanation.shares
    seconds = [getattr(row.estimate.breakdown_s, part) for row in rows for part in PARTS]
    return Sheet(
        title="Where the step goes (slowest rank)",
        columns=(
            Column(key="role", title="", left=True),
            Column(key="plan", title="plan", left=True, priority=8),
            time_column("step_time_s", "step", [row.estimate.step_time_s for row in rows]),
            *(
                time_column(f"{part}_s", part.replace("_", " "), seconds, priority=index)
                for index, part in enumerate(PARTS)
            ),
            time_column("chunk_cost_s", "chunk cost", seconds, priority=7),
            time_column("small_size_loss_s", "small b", seconds, priority=5),
            time_column("imbalance_loss_s", "uneven stages", seconds, priority=6),
        ),
        rows=tuple(
            (
                row.role, shown_label(row.plan.label), row.estimate.step_time_s,
                *(getattr(row.estimate.breakdown_s, part) for part in PARTS),
                row.chunk_cost_s, row.small_size_loss_s, row.imbalance_loss_s,
            )
            for row in rows
        ),
        notes=(
            "The parts from compute to step constant sum to the step; chunk cost lies inside the "
            "step constant, what small b costs inside compute, uneven stages inside compute and "
            "bubble.",
        ),
        strong_rows=frozenset({0}),
    )  # fmt: skip


def _rivals_sheet(explanation: Explanation) -> Sheet:
    rows = explanation.rivals
    return Sheet(
        title="The first plan of every other V",
        columns=(
            Column(key="num_chunks", title="V"),
            Column(key="plan", title="plan", left=True, priority=2),
            time_column("step_time_s", "step", [row.estimate.step_time_s for row in rows]),
            time_column("slower_s", "slower by", [row.slower_s for row in rows]),
            Column(key="reason", title="because of", left=True, priority=1),
        ),
        rows=tuple(
            (
                row.plan.num_chunks, shown_label(row.plan.label), row.estimate.step_time_s,
                row.slower_s, row.reason,
            )
            for row in rows
        ),
    )  # fmt: skip


def _sizes_sheet(explanation: Explanation) -> Sheet:
    pick = explanation.shares[0].plan
    rows = explanation.sizes
    return Sheet(
        title="This plan at other b: the global batch is held fixed, V and the layers stay",
        columns=(
            Column(key="microbatch_size", title="b"),
            Column(key="num_microbatches", title="M"),
            time_column("step_time_s", "step", [row.step_time_s for row in rows]),
            ratio_column("bubble_ratio", "bubble"),
            ratio_column("equal_stages_bubble_ratio", "with equal stages", priority=1),
        ),
        rows=tuple(
            (
                row.microbatch_size,
                row.num_microbatches,
                row.step_time_s,
                row.bubble_ratio,
                row.equal_stages_bubble_ratio,
            )
            for row in rows
        ),
        strong_rows=frozenset(
            index for index, row in enumerate(rows) if row.microbatch_size == pick.microbatch_size
        ),
    )


def _sensitivities_sheet(explanation: Explanation) -> Sheet:
    return Sheet(
        title="What the choice depends on",
        columns=(
            Column(key="name", title="number", left=True),
            Column(
                key="uncertainty_ratio",
                title="moved by",
                text=lambda value: f"+-{format_ratio(value)}",
            ),
            Column(key="assumed", title="", text=lambda value: "assumed" if value else "",
                   left=True, priority=2),
            ratio_column("step_time_change_ratio", "step", sign=True),
            Column(key="new_pick", title="new pick", left=True, priority=1),
        ),
        rows=tuple(
            (row.name, row.uncertainty_ratio, row.assumed, row.step_time_change_ratio,
             shown_label(row.new_pick) if row.new_pick else None)
            for row in explanation.sensitivities[:MAX_SENSITIVITIES]
        ),
    )  # fmt: skip
