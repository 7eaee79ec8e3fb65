"""From what every rank recorded of a step to the step's time, split and timeline."""

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from pptune.estimate import Breakdown
from pptune.plan import Plan
from pptune.validation_file import RecordedAction


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredAction:
    """One action as its rank recorded it, on the step's common clock."""

    rank: int
    stage: int
    work: str
    microbatch: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """One step over all ranks; times are seconds from the step's start."""

    step_s: float
    """The slowest rank's wall time."""
    slowest_rank: int
    update_s: tuple[float, ...]
    """Optimizer and zero-grad, by rank."""
    rank_s: tuple[float, ...]
    """Whole step, by rank."""
    actions: tuple[tuple[MeasuredAction, ...], ...] = ()
    """By rank, in the order they ran."""
    waits: tuple[tuple[tuple[float, float], ...], ...] = ()
    """Intervals in which the runtime waited for messages, by rank; empty on CUDA."""
    product_s: float | None = None
    """The reference product just before and just after the step, the mean of all ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """What one visit of a plan gave: some timed steps."""

    samples_s: tuple[float, ...]
    """Each step's time: the slowest rank's."""
    steps: tuple[MeasuredStep, ...] = ()
    """The steps, with records where they were asked for."""
    peak_memory_bytes: tuple[int, ...] | None = None

    @property
    def products_s(self) -> tuple[float, ...]:
        """The reference product around each step, where it was timed."""
        return tuple(step.product_s for step in self.steps if step.product_s is not None)


def join_ranks(answers: list[dict[str, Any]], nodes: list[str]) -> MeasuredStep:
    """One step from the records of all ranks.

    Ranks of one node share a monotonic clock; across nodes each rank's own start is taken as the
    common origin, since all of them have just left the same barrier.
    """
    times = [answer["step_s"] for answer in answers]
    slowest = max(range(len(times)), key=times.__getitem__)
    shared_clock = len(set(nodes)) == 1
    origin = min(answer["start_s"] for answer in answers)
    actions, waits = [], []
    for rank, answer in enumerate(answers):
        zero = origin if shared_clock else answer["start_s"]
        actions.append(
            tuple(
                MeasuredAction(
                    rank=rank, stage=stage, work=work, microbatch=microbatch,
                    start_s=start - zero, end_s=end - zero,
                )
                for stage, work, microbatch, start, end in answer.get("actions", ())
            )
        )  # fmt: skip
        waits.append(tuple((start - zero, end - zero) for start, end in answer.get("waits", ())))
    return MeasuredStep(
        step_s=times[slowest], slowest_rank=slowest, rank_s=tuple(times),
        update_s=tuple(answer["update_s"] for answer in answers), actions=tuple(actions),
        waits=tuple(waits), product_s=_mean(answer.get("product_s") for answer in answers),
    )  # fmt: skip


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def producer_end_s(step: MeasuredStep, plan: Plan) -> dict[tuple[int, str, int], float]:
    """When each action's input was produced on another rank: by (stage, work, micro-batch).

    Works are F for forwards and B for whichever backward needs the next stage's gradient.
    """
    ends: dict[tuple[int, str, int], float] = {}
    for row in step.actions:
        for action in row:
            if action.work == "F" and action.stage + 1 < plan.num_stages:
                consumer = action.stage + 1
                name = "F"
            elif action.work in ("B", "I") and action.stage > 0:
                consumer, name = action.stage - 1, "B"
            else:
                continue
            if plan.rank_of(consumer) != action.rank:
                ends[consumer, name, action.microbatch] = action.end_s
    return ends


def breakdown(step: MeasuredStep, plan: Plan) -> Breakdown | None:
    """The slowest rank's step, split; the parts sum to its wall time. None without records.

    Waiting until the producer had finished is bubble, waiting after that is exposed transfer
    (DESIGN's words); what is neither an action nor a wait is overhead.
    """
    if not step.actions or not step.actions[step.slowest_rank]:
        return None
    rank = step.slowest_rank
    ends = producer_end_s(step, plan)
    compute = bubble = exposed = 0.0
    gap_start = 0.0
    waits = iter(step.waits[rank]) if step.waits else iter(())
    wait = next(waits, None)
    for action in step.actions[rank]:
        compute += action.end_s - action.start_s
        needed = ends.get((action.stage, "F" if action.work == "F" else "B", action.microbatch))
        if action.work == "W":
            needed = None
        if step.waits and step.waits[rank]:
            while wait is not None and wait[0] < action.start_s:
                waited, split = wait[1] - wait[0], needed if needed is not None else wait[0]
                idle = min(max(split - wait[0], 0.0), waited)
                bubble, exposed = bubble + idle, exposed + waited - idle
                wait = next(waits, None)
        elif needed is not None:
            idle = max(0.0, min(needed, action.start_s) - gap_start)
            bubble += idle
            exposed += max(0.0, action.start_s - max(gap_start, needed)) if idle > 0 else 0.0
        gap_start = action.end_s
    while wait is not None:  # sends still under way after the last action
        exposed += wait[1] - wait[0]
        wait = next(waits, None)
    update = step.update_s[rank]
    overhead = step.rank_s[rank] - update - compute - bubble - exposed
    return Breakdown(
        compute=compute, bubble=bubble, exposed_transfer=exposed, overhead=overhead,
        step_constant=update,
    )  # fmt: skip


def timeline(step: MeasuredStep) -> tuple[RecordedAction, ...]:
    """The step's actions as a validation file keeps them."""
    return tuple(
        RecordedAction(
            rank=action.rank, stage=action.stage, work=action.work,  # type: ignore[arg-type]
            microbatch=action.microbatch, start_s=action.start_s, end_s=action.end_s,
        )
        for row in step.actions
        for action in row
    )  # fmt: skip
