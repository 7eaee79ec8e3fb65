"""What all figures of the report share: colours, fonts, axes.

Colours are chosen to be readable on light and on dark paper; text and grid colours are the page's.
"""

from typing import Any

import plotly.graph_objects as go

from pptune.views.plans import shown_label

BLUE, GREEN, ORANGE, PURPLE, RED, GREY = (
    "#4c8bf5", "#2ba66f", "#e09030", "#a06cd5", "#d9534f", "#8a8f98",
)  # fmt: skip

Figure = Any
"""plotly's go.Figure: the library has no types."""


def new_figure(y_title: str, x_title: str) -> Figure:
    """An empty figure in the report's style."""
    figure = go.Figure()
    figure.update_layout(
        template="none",
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"family": "system-ui, sans-serif", "size": 13, "color": GREY},
        margin={"l": 10, "r": 10, "t": 40, "b": 10},
        height=340,
        legend={"orientation": "h", "yanchor": "bottom", "y": 1.0, "x": 0, "traceorder": "normal"},
        dragmode=False,
        modebar={"bgcolor": "rgba(0,0,0,0)", "color": GREY, "activecolor": BLUE},
    )
    figure.update_xaxes(title=x_title, automargin=True, zeroline=False)
    figure.update_yaxes(title=y_title, automargin=True, zeroline=False)
    return figure


def short_label(label: str) -> str:
    """A plan's label on two lines: names on an axis must leave room for the figure."""
    schedule, _, rest = shown_label(label).partition(" ")
    return f"{schedule}<br>{rest}"
