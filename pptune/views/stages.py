"""Which stage lives where, what it holds and what it costs."""

from collections.abc import Sequence

from pptune.plan import Plan
from pptune.views.plans import shown_label
from pptune.views.tables import Column, Sheet, bytes_column, time_column


def stage_sheet(
    plan: Plan,
    *,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    peak_memory_bytes: Sequence[int] | None,
) -> Sheet:
    """A row per stage; times are for one micro-batch, memory is the whole rank's peak."""
    stages = range(plan.num_stages)
    return Sheet(
        title=f"Stages of {shown_label(plan.label)}",
        columns=(
            Column(key="stage", title="stage"),
            Column(key="rank", title="rank"),
            Column(key="chunk", title="chunk", priority=2, listed=plan.num_chunks > 1),
            Column(key="layers", title="layers", left=True),
            time_column("forward_s", "forward", forward_s),
            time_column("backward_s", "backward", backward_s),
            bytes_column("peak_memory_bytes", "rank's peak memory", priority=1),
        ),
        rows=tuple(
            (
                stage,
                plan.rank_of(stage),
                plan.stages_of(plan.rank_of(stage)).index(stage),
                _layers(plan, stage),
                forward_s[stage],
                backward_s[stage],
                None if peak_memory_bytes is None else peak_memory_bytes[plan.rank_of(stage)],
            )
            for stage in stages
        ),
        notes=(
            "layers: blocks of the stage; the embedding is on the first, the head on the last.",
        ),
    )


def _layers(plan: Plan, stage: int) -> str:
    held = [str(plan.layers_per_stage[stage])]
    if stage == 0:
        held.insert(0, "embedding")
    if stage == plan.num_stages - 1:
        held.append("head")
    return " + ".join(held)
