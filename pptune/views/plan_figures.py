"""Figures of plans: predicted, timed and measured; each is None where there is nothing to draw."""

from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any

from pptune.estimate import Breakdown, Candidate
from pptune.explanation import Alternative
from pptune.plans_file import PlansFile
from pptune.units import (
    bytes_unit,
    format_bytes,
    format_ratio,
    format_seconds,
    seconds_unit,
)
from pptune.validation_file import ValidationFile
from pptune.views.chart import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    RED,
    Figure,
    new_figure,
    short_label,
)
from pptune.views.plans import shown_label
from pptune.views.slices import Timeline
from pptune.views.validation import PARTS

WORKS = {
    "F": ("forward", BLUE), "B": ("backward", GREEN), "I": ("backward, input part", GREEN),
    "W": ("backward, weight part", ORANGE),
}  # fmt: skip
PART_COLOURS = dict(zip(PARTS, (BLUE, GREY, ORANGE, PURPLE, RED), strict=True))

MAX_BARS = 6000
"""More actions than this make a browser slow; a longer timeline is drawn up to a time that holds
as many."""

MAX_EDGED_BARS = 600
"""More bars than this have no edges."""

MAX_STACKS = 4
"""Candidates whose parts are drawn."""

_FAR_ABOVE = 4.0
"""A limit more than so many times the fullest rank's peak is named, not drawn."""


def step_time_map(alternatives: Sequence[Alternative]) -> Figure | None:
    """A heat map of the best step time of each V and b; cells without a plan stay empty."""
    found = {
        (row.num_chunks, row.microbatch_size): row.estimate.step_time_s
        for row in alternatives
        if row.estimate is not None
    }
    if not found:
        return None
    chunks = sorted({row.num_chunks for row in alternatives})
    sizes = sorted({row.microbatch_size for row in alternatives})
    unit, scale = seconds_unit(found.values())
    best = min(found, key=found.__getitem__)
    labels = {
        (row.num_chunks, row.microbatch_size): _map_label(row, found[best]) for row in alternatives
    }

    def cells(value: Callable[[tuple[int, int]], Any]) -> list[list[Any]]:
        return [[value((v, b)) for b in sizes] for v in chunks]

    figure = new_figure("V, chunks per rank", "b, micro-batch size")
    figure.add_heatmap(
        x=[str(b) for b in sizes], y=[str(v) for v in chunks],
        z=cells(lambda key: found[key] / scale if key in found else None),
        text=cells(lambda key: f"{found[key] / scale:.4g}" if key in found else ""),
        texttemplate="%{text}", hovertext=cells(labels.__getitem__), hoverinfo="text",
        colorscale="Viridis_r", xgap=2, ygap=2, colorbar={"title": unit, "thickness": 12},
    )  # fmt: skip
    figure.update_layout(margin_t=10)
    figure.update_xaxes(type="category", showgrid=False)
    figure.update_yaxes(type="category", showgrid=False)
    return figure


def timeline_bars(timeline: Timeline, *, end_s: float) -> Figure | None:
    """Ranks as rows, actions as bars by kind of work; time from 0 to `end_s`."""
    if not timeline.slices:
        return None
    shown = sorted(timeline.slices, key=lambda item: item.start_s)[:MAX_BARS]
    part = ""
    if len(shown) < len(timeline.slices):
        end_s = shown[-1].start_s
        part = f", the first {len(shown):,} of {len(timeline.slices):,} actions"
    unit, scale = seconds_unit([end_s])
    figure = new_figure("rank", f"time ({unit}){part}")
    # A thin edge tells neighbours apart, until there are so many that edges are all one sees.
    edge = {"width": 0.5 if len(shown) <= MAX_EDGED_BARS else 0, "color": "rgba(255,255,255,0.7)"}
    for work, (name, colour) in WORKS.items():
        items = [item for item in shown if item.work == work]
        if items:
            figure.add_bar(
                name=name, orientation="h", marker={"color": colour, "line": edge},
                base=[item.start_s / scale for item in items],
                x=[(item.end_s - item.start_s) / scale for item in items],
                y=[item.rank for item in items], hoverinfo="text", textposition="none",
                text=[f"stage {item.stage}, {name}, micro-batch {item.microbatch}<br>"
                      f"{format_seconds(item.start_s)} + "
                      f"{format_seconds(item.end_s - item.start_s)}" for item in items],
            )  # fmt: skip
    num_ranks = timeline.plan.num_ranks
    figure.update_layout(barmode="overlay", bargap=0.15, height=120 + 26 * min(num_ranks, 32))
    figure.update_xaxes(range=[0, end_s / scale])
    figure.update_yaxes(autorange="reversed", dtick=max(1, num_ranks // 8), showgrid=False)
    return figure


def predicted_and_measured(validation: ValidationFile | None) -> Figure | None:
    """Step times of every run that finished, with the noise of the measured ones."""
    if validation is None:
        return None
    runs = [run for run in validation.runs if run.measured_s is not None]
    if not runs:
        return None
    measured_s = [run.measured_s or 0.0 for run in runs]
    unit, scale = seconds_unit(measured_s)
    names = [short_label(run.plan.label) for run in runs]
    figure = new_figure("", f"step time ({unit})")
    noise_s = [
        seconds * (run.noise_ratio or 0.0) for run, seconds in zip(runs, measured_s, strict=True)
    ]
    word = "replayed" if validation.mode == "replay" else "measured"
    figure.add_bar(
        name="predicted", orientation="h", y=names, x=[run.predicted_s / scale for run in runs],
        marker={"color": GREY}, hoverinfo="text", textposition="none",
        text=[f"predicted {format_seconds(run.predicted_s)}" for run in runs],
    )  # fmt: skip
    figure.add_bar(
        name=word, orientation="h", y=names, x=[seconds / scale for seconds in measured_s],
        marker={"color": BLUE}, hoverinfo="text", textposition="none",
        error_x={"type": "data", "array": [noise / scale for noise in noise_s], "color": GREY},
        text=[f"{word} {format_seconds(seconds)} +- {format_ratio(run.noise_ratio or 0.0)}"
              f"<br>prediction off by {format_ratio(run.error_ratio or 0.0, sign=True)}"
              for run, seconds in zip(runs, measured_s, strict=True)],
    )  # fmt: skip
    figure.update_layout(barmode="group", height=150 + 60 * len(runs))
    figure.update_yaxes(autorange="reversed")
    return figure


def memory_bars(
    plans: PlansFile, chosen: Candidate | None, validation: ValidationFile | None
) -> Figure | None:
    """Peak memory by rank: the chosen plan predicted and measured, the baseline, the limit."""
    peaks = _peaks(plans, chosen, validation)
    if not peaks:
        return None
    largest = max(peak for _, by_rank in peaks for peak in by_rank)
    unit, scale = bytes_unit([largest])
    limit, title = plans.memory_limit_bytes, f"peak memory ({unit})"
    if limit is not None and limit > _FAR_ABOVE * largest:  # It would flatten the bars.
        title += f", limit {format_bytes(limit)}"
        limit = None
    figure = new_figure(title, "rank")
    for (name, by_rank), colour in zip(peaks, cycle((BLUE, GREEN, GREY, ORANGE)), strict=False):
        figure.add_bar(
            name=name, x=list(range(len(by_rank))), y=[peak / scale for peak in by_rank],
            marker={"color": colour}, hoverinfo="text", textposition="none",
            text=[f"{name}<br>rank {rank}: {format_bytes(peak)}"
                  for rank, peak in enumerate(by_rank)],
        )  # fmt: skip
    if limit is not None:
        figure.add_hline(
            y=limit / scale, line={"color": RED, "dash": "dash"},
            annotation_text=f"limit {format_bytes(limit)}",
        )  # fmt: skip
    figure.update_layout(barmode="group")
    figure.update_xaxes(dtick=max(1, max(len(by_rank) for _, by_rank in peaks) // 8))
    return figure


def where_the_step_goes(plans: PlansFile) -> Figure | None:
    """Stacked parts of the slowest rank's step: the first candidates and the baseline."""
    breakdowns = {
        short_label(row.plan.label): row.estimate.breakdown_s
        for row in plans.candidates[:MAX_STACKS]
    }
    if plans.baseline is not None:
        # By label: bars of one label, a candidate that is the baseline too, would add up.
        breakdowns[short_label(plans.baseline.plan.label)] = plans.baseline.estimate.breakdown_s
    steps = list(breakdowns.items())
    if not steps:
        return None
    unit, scale = seconds_unit([value for _, parts in steps for value in _values(parts)])
    figure = new_figure("", f"slowest rank's step ({unit})")
    for part in PARTS:
        seconds = [getattr(parts, part) for _, parts in steps]
        name = part.replace("_", " ")
        figure.add_bar(
            name=name, orientation="h", y=[label for label, _ in steps],
            x=[value / scale for value in seconds], marker={"color": PART_COLOURS[part]},
            hoverinfo="text", textposition="none",
            text=[f"{name} {format_seconds(value)}" for value in seconds],
        )  # fmt: skip
    figure.update_layout(barmode="stack", height=190 + 40 * len(steps))
    figure.update_yaxes(autorange="reversed")
    return figure


def time_and_memory(plans: PlansFile) -> Figure | None:
    """Step time against the fullest rank's peak memory, where the search looked for both."""
    rows = [row for row in plans.candidates if row.estimate.peak_memory_bytes]
    if plans.objective != "pareto" or not rows:
        return None
    unit, scale = seconds_unit([row.estimate.step_time_s for row in rows])
    peaks = [max(row.estimate.peak_memory_bytes or (0,)) for row in rows]
    memory_unit, num_bytes = bytes_unit(peaks)
    figure = new_figure(f"step time ({unit})", f"peak memory of the fullest rank ({memory_unit})")
    figure.add_scatter(
        x=[peak / num_bytes for peak in peaks],
        y=[row.estimate.step_time_s / scale for row in rows],
        mode="markers", marker={"color": BLUE, "size": 10}, hoverinfo="text", showlegend=False,
        text=[f"{shown_label(row.plan.label)}<br>{format_seconds(row.estimate.step_time_s)}, "
              f"{format_bytes(peak)}" for row, peak in zip(rows, peaks, strict=True)],
    )  # fmt: skip
    figure.update_layout(margin_t=10)
    figure.update_xaxes(rangemode="tozero")
    figure.update_yaxes(rangemode="tozero")
    return figure


def _map_label(row: Alternative, best_s: float) -> str:
    name = f"V = {row.num_chunks}, b = {row.microbatch_size}"
    if row.plan is None or row.estimate is None:
        return f"{name}<br>{row.reason or 'no plan'}"
    slower = row.estimate.step_time_s / best_s - 1
    return (
        f"{name}, M = {row.plan.num_microbatches}<br>{shown_label(row.plan.label)}<br>"
        f"{format_seconds(row.estimate.step_time_s)}, {format_ratio(slower, sign=True)} on the best"
    )


def _peaks(
    plans: PlansFile, chosen: Candidate | None, validation: ValidationFile | None
) -> list[tuple[str, tuple[int, ...]]]:
    found: list[tuple[str, tuple[int, ...] | None]] = []
    if chosen is not None:
        found.append(("this plan, predicted", chosen.estimate.peak_memory_bytes))
        runs = () if validation is None else validation.runs
        measured = [run.peak_memory_bytes for run in runs if run.plan == chosen.plan]
        found += [("this plan, measured", peaks) for peaks in measured[:1]]
    if plans.baseline is not None:
        found.append(("baseline, predicted", plans.baseline.estimate.peak_memory_bytes))
    return [(name, peaks) for name, peaks in found if peaks]


def _values(parts: Breakdown) -> list[float]:
    return [getattr(parts, name) for name in PARTS]
