"""What was measured beside what was predicted, as sheets."""

from pptune.estimate import Breakdown
from pptune.units import format_ratio, format_seconds
from pptune.validation_file import Run, Summary, ValidationFile
from pptune.views.plans import fullest, plan_cells, plan_columns, shown_label
from pptune.views.tables import Column, Sheet, bytes_column, ratio_column, time_column

PARTS = ("compute", "bubble", "exposed_transfer", "overhead", "step_constant")
"""Fields of a Breakdown, in the order in which they are shown."""


def runs_sheet(validation: ValidationFile) -> Sheet:
    """A row per run: predicted, measured, error beside noise, memory, status; then the verdict."""
    runs = validation.runs
    plans = [run.plan for run in runs]
    columns = (
        Column(key="run", title="run"),
        *plan_columns(plans),
        time_column("predicted_s", "predicted", [run.predicted_s for run in runs]),
        time_column("measured_s", "measured", [run.measured_s for run in runs]),
        ratio_column("error_ratio", "error", sign=True),
        Column(key="noise_ratio", title="noise +-", text=format_ratio),
        Column(key="num_samples", title="steps", priority=5),
        bytes_column("predicted_peak_memory_bytes", "memory predicted", priority=3),
        bytes_column("peak_memory_bytes", "memory measured", priority=3),
        Column(key="verdict", title="verdict", left=True),
        Column(key="status", title="status", left=True, priority=2),
        Column(
            key="reason", title="reason", left=True, priority=4,
        ),
    )  # fmt: skip
    return Sheet(
        title=_title(validation),
        columns=columns,
        rows=tuple(
            _run_cells(number, run, validation.summary) for number, run in enumerate(runs, start=1)
        ),
        notes=tuple(_verdict(validation)),
        strong_rows=frozenset(
            index for index, run in enumerate(runs) if _is_winner(run, validation.summary)
        ),
        faint_rows=frozenset(index for index, run in enumerate(runs) if run.status != "ok"),
    )


def breakdowns_sheet(validation: ValidationFile) -> Sheet:
    """Two rows per run that has them: where the step was predicted to go, and where it went."""
    rows: list[tuple[object, ...]] = []
    values: list[float] = []
    for number, run in enumerate(validation.runs, start=1):
        for name, parts in (
            ("predicted", run.predicted_breakdown_s),
            ("measured", run.measured_breakdown_s),
        ):
            if parts is not None:
                cells = _parts(parts)
                rows.append((number, shown_label(run.plan.label), name, *cells))
                values += cells
    columns = (
        Column(key="run", title="run"),
        Column(key="plan", title="plan", left=True, priority=len(PARTS)),
        Column(key="kind", title="", left=True),
        *(
            time_column(f"{part}_s", part.replace("_", " "), values, priority=index)
            for index, part in enumerate(PARTS)
        ),
    )
    return Sheet(
        title="Where the slowest rank's step goes",
        columns=columns,
        rows=tuple(rows),
        notes=()
        if validation.recording_cost_s is None
        else (
            f"Recording costs {format_seconds(validation.recording_cost_s)} per action and rank: "
            f"at most {format_seconds(validation.recording_cost_s * _most_actions(validation))} "
            "of a step.",
        ),
    )


def models_sheet(validation: ValidationFile) -> Sheet | None:
    """How simpler cost models would have done on the same runs, or None where none was tried."""
    summary = validation.summary
    if summary is None or not summary.models:
        return None
    rows = [("pptune", summary.mape, summary.regret_top1)]
    rows += [(name, model.mape, model.regret_top1) for name, model in summary.models.items()]
    return Sheet(
        title="Simpler models on the same runs",
        columns=(
            Column(key="model", title="model", left=True),
            ratio_column("mape", "mean error"),
            ratio_column("regret_top1", "regret of its pick"),
        ),
        rows=tuple(rows),
        strong_rows=frozenset({0}),
    )


def _run_cells(number: int, run: Run, summary: Summary | None) -> tuple[object, ...]:
    return (
        number, *plan_cells(run.plan), run.predicted_s, run.measured_s,
        run.error_ratio, run.noise_ratio, len(run.samples_s),
        fullest(run.predicted_peak_memory_bytes), fullest(run.peak_memory_bytes),
        _mark(run, summary), run.status, run.reason,
    )  # fmt: skip


def _title(validation: ValidationFile) -> str:
    if validation.mode == "replay":
        return "Predicted against replayed (real messages, waiting instead of computing)"
    return "Predicted against measured"


def _parts(parts: Breakdown) -> list[float]:
    return [getattr(parts, name) for name in PARTS]


def _most_actions(validation: ValidationFile) -> int:
    """Actions of the busiest rank's step, over the plans that ran."""
    return max(
        (
            (3 if run.plan.splits_backward else 2) * run.plan.num_microbatches * run.plan.num_chunks
            for run in validation.runs
        ),
        default=0,
    )


def _is_winner(run: Run, summary: Summary | None) -> bool:
    return summary is not None and run.plan.label == summary.winner


def _mark(run: Run, summary: Summary | None) -> str:
    marks = ["winner"] if _is_winner(run, summary) else []
    if summary is not None and summary.winner == "tie" and run.plan.label in summary.tied_with:
        marks.append("tied")
    if run.is_baseline:
        marks.append("base")
    return ", ".join(marks)


def _verdict(validation: ValidationFile) -> list[str]:
    summary = validation.summary
    lines = [
        f"Run {number} failed ({run.status}): {run.reason or 'no reason recorded'}."
        for number, run in enumerate(validation.runs, start=1)
        if run.status != "ok"
    ]
    if summary is None:
        return [*lines, "The run has not ended: no verdict yet.", *_warnings(validation)]
    lines.append(_winner_line(summary))
    if summary.speedup_over_baseline is not None:
        lines.append(f"Measured speed-up over the baseline: {summary.speedup_over_baseline:.3f}x.")
    if summary.order_kept is not None:
        lines.append(
            "The measured order is the predicted one."
            if summary.order_kept
            else "The measured order is not the predicted one."
        )
    lines += _accuracy_lines(summary)
    if summary.device_time_s is not None:
        lines.append(f"Device time used: {format_seconds(summary.device_time_s)}.")
    return lines + _warnings(validation)


def _winner_line(summary: Summary) -> str:
    if summary.winner is None:
        return "No winner: no run finished."
    if summary.winner == "tie":
        among = f": {'; '.join(map(shown_label, summary.tied_with))}" if summary.tied_with else ""
        return f"Tie within the noise{among}."
    return f"Winner: {shown_label(summary.winner)}."


def _accuracy_lines(summary: Summary) -> list[str]:
    floor = (
        "noise floor not known"
        if summary.noise_floor is None
        else f"noise floor {format_ratio(summary.noise_floor)}"
    )
    lines = []
    if summary.mape is not None:
        worst = (
            ""
            if summary.max_abs_error is None
            else f", largest {format_ratio(summary.max_abs_error)}"
        )
        lines.append(f"Mean error {format_ratio(summary.mape)}{worst} ({floor}).")
    if summary.spearman is not None:
        lines.append(f"Rank correlation of predicted and measured: {summary.spearman:.2f}.")
    if summary.pairs_ordered is not None:
        lines.append(
            f"Pairs further apart than twice the noise that were predicted in the right order: "
            f"{format_ratio(summary.pairs_ordered)}."
        )
    if summary.regret_top1 is not None:
        top3 = (
            ""
            if summary.regret_top3 is None
            else f"; of the best of our first three {format_ratio(summary.regret_top3)}"
        )
        lines.append(
            f"Regret of our first pick against the best measured plan: "
            f"{format_ratio(summary.regret_top1)}{top3} ({floor})."
        )
    return lines


def _warnings(validation: ValidationFile) -> list[str]:
    return [f"warning: {text}" for text in validation.warnings]
