"""The report: one HTML file that needs nothing else, for a screen, a phone or paper."""

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import Any

import plotly.io

from pptune.estimate import Candidate
from pptune.explanation import Explanation
from pptune.plan import Plan
from pptune.plans_file import PlansFile
from pptune.profiles import Profile
from pptune.units import format_ratio, format_seconds
from pptune.validation_file import ValidationFile
from pptune.views import plan_figures, profile_figures
from pptune.views.chart import Figure
from pptune.views.explanation import sentences
from pptune.views.plans import layers_text, ranking, shown_label
from pptune.views.report_text import CAPTIONS, GLOSSARY, NO_REQUESTS, STYLE
from pptune.views.slices import Timeline
from pptune.views.tables import Sheet, cell_text, listed_columns
from pptune.views.validation import runs_sheet

PLOT_OPTIONS: dict[str, Any] = {"responsive": True, "displayModeBar": False}

ZOOM_OPTIONS: dict[str, Any] = {
    "responsive": True,
    "displaylogo": False,
    "displayModeBar": True,
    "modeBarButtons": [["pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"]],
}
"""For timelines, which hold more than fits: buttons, so that dragging still scrolls the page."""

MAX_SPELLED_STAGES = 16
"""Up to so many stages the answer spells their layers out; longer lists are folded."""


def report(
    plans: PlansFile,
    profile: Profile,
    *,
    rank: int = 1,
    explanation: Explanation | None = None,
    validation: ValidationFile | None = None,
    timelines: Sequence[Timeline] = (),
) -> str:
    """The whole page about the plan at `rank`. `timelines` are drawn under each other on one scale;
    sections and figures without data are left out."""
    title = f"{plans.model.name}: pipeline plan for {plans.global_batch_size} sequences per step"
    answer = "".join(f"<p>{escape(line)}</p>" for line in _answer(plans, rank, validation))
    sections = [_section("Ranking", _table(ranking(plans)))]
    if validation is not None:
        sections.append(_section("Validation", _table(runs_sheet(validation))))
    if explanation is not None:
        sections.append(_section("Why this plan", _list(sentences(explanation))))
    sections += _figures(plans, rank, profile, explanation, validation, timelines)
    sections.append(_section("Assumptions", _list(_assumptions(plans, rank, profile))))
    sections.append(_section("Glossary", _glossary()))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{NO_REQUESTS}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>\n"
        f'<h1>{escape(title)}</h1>\n<div class="answer">{answer}</div>\n'
        + "\n".join(sections)
        + "\n</body></html>\n"
    )


def _answer(plans: PlansFile, rank: int, validation: ValidationFile | None) -> Iterator[str]:
    """The recommendation, its gain, and whether it was proven, in plain words."""
    chosen = _candidate(plans, rank)
    if chosen is None:
        yield "No plan is both legal and fits in memory."
        return
    plan = chosen.plan
    held = "one stage" if plan.num_chunks == 1 else f"V = {plan.num_chunks} stages"
    opening = "Use" if rank == 1 else f"Number {rank} in the ranking:"
    yield (
        f"{opening} {plan.schedule} with {held} per rank, micro-batches of "
        f"b = {plan.microbatch_size} and M = {plan.num_microbatches} micro-batches per step."
    )
    gain = ""
    if chosen.speedup_over_baseline is not None and plans.baseline is not None:
        gain = (
            f", {chosen.speedup_over_baseline:.2f} times as fast as the baseline "
            f"{shown_label(plans.baseline.plan.label)} "
            f"({format_seconds(plans.baseline.estimate.step_time_s)})"
        )
    yield f"Predicted step time: {format_seconds(chosen.estimate.step_time_s)}{gain}."
    if len(set(plan.layers_per_stage)) > 1:
        layers = plan.layers_per_stage
        told = (
            layers_text(layers) if len(layers) > MAX_SPELLED_STAGES else ", ".join(map(str, layers))
        )
        yield f"Blocks per stage, in stage order: {told}."
    if rank == 1:
        yield (
            "By this cost model no plan in the space searched is faster."
            if plans.proven_optimal
            else "The space was sampled, not searched in full."
        )
    yield _measured(plan, validation)


def _measured(plan: Plan, validation: ValidationFile | None) -> str:
    if validation is None:
        return "Not validated yet: no plan was run."
    run = next((run for run in validation.runs if run.plan == plan), None)
    if run is None or run.measured_s is None:
        return "This plan was not run to its end in the validation."
    summary = validation.summary
    verdict = ""
    if summary is not None and summary.winner == plan.label:
        verdict = " It won."
    elif summary is not None and summary.winner == "tie":
        verdict = " The best plans tie within the noise."
    elif summary is not None and summary.winner is not None:
        verdict = f" The fastest was {shown_label(summary.winner)}."
    word = "Replayed" if validation.mode == "replay" else "Measured"
    return (
        f"{word}: {format_seconds(run.measured_s)} +- {format_ratio(run.noise_ratio or 0.0)}; the "
        f"prediction is off by {format_ratio(run.error_ratio or 0.0, sign=True)}.{verdict}"
    )


def _figures(
    plans: PlansFile,
    rank: int,
    profile: Profile,
    explanation: Explanation | None,
    validation: ValidationFile | None,
    timelines: Sequence[Timeline],
) -> list[str]:
    """A section per figure that has something to draw; the first carries the library."""
    alternatives = () if explanation is None else explanation.alternatives
    end_s = max((timeline.end_s for timeline in timelines), default=0.0)
    drawn: list[tuple[str, str, Figure | None]] = [
        ("step-time", "Step time over V and b", plan_figures.step_time_map(alternatives)),
        ("parts", "Where the step goes", plan_figures.where_the_step_goes(plans)),
        ("accuracy", "Predicted against measured", plan_figures.predicted_and_measured(validation)),
        *(
            ("timeline", f"Timeline, {item.name}: {shown_label(item.plan.label)}",
             plan_figures.timeline_bars(item, end_s=end_s))
            for item in timelines
        ),
        ("memory", "Memory by rank",
         plan_figures.memory_bars(plans, _candidate(plans, rank), validation)),
        ("layer-times", "Time of a block over b", profile_figures.layer_curve(profile)),
        ("links", "Links", profile_figures.link_curves(profile)),
        ("pareto", "Step time against memory", plan_figures.time_and_memory(plans)),
    ]  # fmt: skip
    sections: list[str] = []
    for name, title, figure in drawn:
        if figure is not None:
            plot = plotly.io.to_html(
                figure,
                full_html=False,
                include_plotlyjs=not sections,
                config=ZOOM_OPTIONS if name == "timeline" else PLOT_OPTIONS,
                default_height=f"{figure.layout.height}px",
                div_id=f"figure-{len(sections)}-{name}",
            )
            caption = f'<p class="faint">{escape(CAPTIONS[name])}</p>'
            sections.append(_section(title, caption + plot))
    return sections


def _candidate(plans: PlansFile, rank: int) -> Candidate | None:
    return next((row for row in plans.candidates if row.rank == rank), None)


def _assumptions(plans: PlansFile, rank: int, profile: Profile) -> list[str]:
    machine = profile.machine
    lines = [
        f"Measured on {machine.description}; {profile.dtype}, {profile.seq_len} tokens per "
        f"sequence, {profile.num_ranks} ranks.",
        f"Rules and overlap of {plans.target}.",
    ]
    chosen = _candidate(plans, rank)
    if chosen is not None:
        lines += chosen.estimate.assumptions
    return [*lines, *plans.warnings, *profile.warnings]


def _section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{content}</section>"


def _list(lines: Iterable[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"


def _glossary() -> str:
    items = (f"<dt>{escape(term)}</dt><dd>{escape(text)}</dd>" for term, text in GLOSSARY)
    return "<dl>" + "".join(items) + "</dl>"


def _table(sheet: Sheet) -> str:
    """The sheet's listed columns as an HTML table that scrolls sideways, and its notes."""
    listed = listed_columns(sheet)

    def row(tag: str, cells: Iterable[str], style: str) -> str:
        sides = (' class="left"' if sheet.columns[index].left else "" for index in listed)
        inner = (
            f"<{tag}{side}>{escape(cell)}</{tag}>" for side, cell in zip(sides, cells, strict=True)
        )
        return f'<tr class="{style}">{"".join(inner)}</tr>'

    rows = [row("th", (sheet.columns[index].title for index in listed), "")]
    for number, values in enumerate(sheet.rows):
        style = "strong" if number in sheet.strong_rows else ""
        style = "dim" if number in sheet.faint_rows else style
        cells = (cell_text(sheet.columns[index], values[index]) for index in listed)
        rows.append(row("td", cells, style))
    notes = "".join(f'<p class="faint">{escape(note)}</p>' for note in sheet.notes)
    return f'<div class="scroll"><table>{"".join(rows)}</table></div>{notes}'
