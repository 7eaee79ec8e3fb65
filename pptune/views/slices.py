"""One step as slices of time, predicted or recorded: what timelines, traces and figures draw."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from pptune.plan import Plan
from pptune.schedules import Work
from pptune.simulator import Spans
from pptune.validation_file import RecordedAction


class Slice(NamedTuple):
    """One action of one rank; seconds from the step's start."""

    rank: int
    stage: int
    work: str
    """F, B, I or W."""
    microbatch: int
    start_s: float
    end_s: float

    @property
    def name(self) -> str:
        """torch's text form: `2F0`."""
        return f"{self.stage}{self.work}{self.microbatch}"


class Flow(NamedTuple):
    """A message: the slice that made it and the slice of another rank that used it."""

    producer: Slice
    consumer: Slice


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The slices of one step of one plan."""

    name: str
    """`predicted` or `measured`."""
    plan: Plan
    slices: tuple[Slice, ...]

    @property
    def end_s(self) -> float:
        """When the last slice ends."""
        return max((item.end_s for item in self.slices), default=0.0)

    def by_rank(self) -> list[list[Slice]]:
        """Each rank's slices in order of time."""
        rows: list[list[Slice]] = [[] for _ in range(self.plan.num_ranks)]
        for item in sorted(self.slices, key=lambda item: item.start_s):
            rows[item.rank].append(item)
        return rows


def predicted_timeline(plan: Plan, spans: Spans) -> Timeline:
    """What the simulator played."""
    letters = [work.letter for work in Work]
    columns = (spans.rank, spans.stage, spans.work, spans.microbatch, spans.start_s, spans.end_s)
    return Timeline(
        name="predicted",
        plan=plan,
        slices=tuple(
            Slice(rank, stage, letters[work], microbatch, start_s, end_s)
            for rank, stage, work, microbatch, start_s, end_s in zip(
                *(column.tolist() for column in columns), strict=True
            )
        ),
    )


def recorded_timeline(plan: Plan, actions: Iterable[RecordedAction]) -> Timeline:
    """What validation recorded of one real step."""
    return Timeline(
        name="measured",
        plan=plan,
        slices=tuple(
            Slice(row.rank, row.stage, row.work, row.microbatch, row.start_s, row.end_s)
            for row in actions
        ),
    )


def flows(timeline: Timeline) -> list[Flow]:
    """The messages between ranks: activations to the next stage, gradients to the one before."""
    producers: dict[tuple[str, int, int], Slice] = {}
    for item in timeline.slices:
        if item.work != "W":
            producers["F" if item.work == "F" else "gradient", item.stage, item.microbatch] = item
    found = []
    for (kind, stage, microbatch), item in producers.items():
        source = stage - 1 if kind == "F" else stage + 1
        producer = producers.get((kind, source, microbatch))
        if producer is not None and producer.rank != item.rank:
            found.append(Flow(producer, item))
    return found
