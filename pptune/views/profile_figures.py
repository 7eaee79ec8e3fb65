"""Figures of what was measured: a block's time over b, and the links."""

import math
from collections.abc import Sequence
from itertools import cycle

from pptune.curves import CurveFit, fit_curve, usable_points
from pptune.profiles import Layer, Link, Profile
from pptune.units import format_bytes, format_bytes_per_s, format_seconds, seconds_unit
from pptune.views.chart import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, Figure, new_figure
from pptune.views.profile import link_name

MAX_LINKS = 6
"""Links drawn one by one; more are drawn as their slowest and fastest."""


def layer_curve(profile: Profile) -> Figure | None:
    """t(b) of one block with its fit, the plateau's line and the knee; log-log."""
    block = profile.layer("block")
    points = [] if block is None else _block_points(block)
    if len(points) < 2:
        return None
    sizes, seconds = [size for size, _ in points], [value for _, value in points]
    fit = fit_curve(sizes, seconds)
    grid = [sizes[0] * (sizes[-1] / sizes[0]) ** (step / 60) for step in range(61)]
    unit, scale = seconds_unit(seconds)
    figure = new_figure(f"t(b) ({unit})", "b, micro-batch size")
    figure.add_scatter(
        name="measured", x=sizes, y=[value / scale for value in seconds], mode="markers",
        marker={"color": BLUE, "size": 9},
        text=[f"b = {size}<br>{format_seconds(value)}<br>{format_seconds(value / size)} per "
              "sequence" for size, value in points],
        hoverinfo="text",
    )  # fmt: skip
    figure.add_scatter(
        name="fit", x=grid, y=[fit.seconds(size) / scale for size in grid], mode="lines",
        line={"color": BLUE}, text=[format_seconds(fit.seconds(size)) for size in grid],
        hoverinfo="text",
    )  # fmt: skip
    figure.add_scatter(
        name="at the best rate", x=grid, y=[fit.per_sequence_s * size / scale for size in grid],
        mode="lines", line={"color": GREY, "dash": "dash"}, hoverinfo="skip",
    )  # fmt: skip
    figure.update_xaxes(type="log", tickvals=sizes, ticktext=[str(size) for size in sizes])
    _logarithmic_y(figure, [value / scale for value in seconds])
    _mark_knee(figure, fit, sizes)
    return figure


def link_curves(profile: Profile) -> Figure | None:
    """One-way time over message size: measured points and latency + size / bandwidth; log-log."""
    links = _links_to_draw([link for link in profile.links if link.points])
    if not links:
        return None
    times = [point.one_way_s for link in links for point in link.points]
    unit, scale = seconds_unit(times)
    figure = new_figure(f"one-way time ({unit})", "message size")
    for link, colour in zip(links, cycle((BLUE, GREEN, ORANGE, PURPLE, RED, GREY)), strict=False):
        points = sorted(link.points, key=lambda point: point.num_bytes)
        name = f"{link_name(link)} ({link.scope})"
        figure.add_scatter(
            name=name, legendgroup=name, mode="markers", marker={"color": colour, "size": 8},
            x=[point.num_bytes for point in points],
            y=[point.one_way_s / scale for point in points], hoverinfo="text",
            text=[f"{name}<br>{format_bytes(point.num_bytes)}: {format_seconds(point.one_way_s)}"
                  for point in points],
        )  # fmt: skip
        figure.add_scatter(
            name=f"{format_seconds(link.latency_s)} + size / "
            f"{format_bytes_per_s(link.bytes_per_s)}",
            legendgroup=name, mode="lines", line={"color": colour}, hoverinfo="skip",
            x=[point.num_bytes for point in points],
            y=[(link.latency_s + point.num_bytes / link.bytes_per_s) / scale for point in points],
        )  # fmt: skip
    sizes = sorted({point.num_bytes for link in links for point in link.points})
    figure.update_xaxes(
        type="log", tickvals=sizes[:: max(1, len(sizes) // 4)],
        ticktext=[format_bytes(size) for size in sizes[:: max(1, len(sizes) // 4)]],
    )  # fmt: skip
    _logarithmic_y(figure, [value / scale for value in times])
    return figure


def _block_points(layer: Layer) -> list[tuple[int, float]]:
    """(b, forward + backward seconds), ascending, of the sizes that have both."""
    return sorted(
        (point.microbatch_size, point.forward_s + point.backward_s)
        for point in usable_points(layer)
        if point.forward_s is not None and point.backward_s is not None
    )


def _mark_knee(figure: Figure, fit: CurveFit, sizes: Sequence[int]) -> None:
    knee = fit.knee_microbatch_size
    if knee is not None and sizes[0] < knee < sizes[-1]:
        figure.add_vline(x=knee, line={"color": ORANGE, "dash": "dot"})
        # On a logarithmic axis plotly takes an annotation's place as a power of ten, a line's not.
        figure.add_annotation(
            x=math.log10(knee), y=1.0, yref="paper", showarrow=False,
            xanchor="left" if knee**2 < sizes[0] * sizes[-1] else "right",
            text=f"90 % of the best rate at b = {knee:.1f}",
        )  # fmt: skip


def _logarithmic_y(figure: Figure, values: Sequence[float]) -> None:
    """Marks at 1, 2 and 5 of each decade, written out: plotly's own leave the decade away."""
    known = [value for value in values if value > 0]
    decades = range(math.floor(math.log10(min(known))), math.ceil(math.log10(max(known))) + 1)
    marks = [digit * 10.0**decade for decade in decades for digit in (1, 2, 5)]
    figure.update_yaxes(type="log", tickvals=marks, ticktext=[f"{mark:g}" for mark in marks])


def _links_to_draw(links: Sequence[Link]) -> list[Link]:
    if len(links) <= MAX_LINKS:
        return list(links)
    by_speed = sorted(links, key=lambda link: link.bytes_per_s)
    return [by_speed[0], by_speed[-1]]
