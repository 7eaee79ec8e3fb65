"""Orders as text, in the form that torch's schedule runtime loads, and their checks."""

import re
from collections.abc import Sequence

from pptune.errors import PlanError
from pptune.schedules.action import Action, Work
from pptune.schedules.order import Order
from pptune.schedules.orders import MAX_MICROBATCHES, MAX_STAGES, Codes
from pptune.schedules.placement import Placement

_PAIR = re.compile(r"\(([^;]+);([^;]+)\)OVERLAP_F_B")


def from_text(text: str, *, num_microbatches: int | None = None) -> Order:
    """The order in `text`, one line per rank; empty cells are skipped.

    The number of micro-batches is the highest one found plus 1 unless given. Raises PlanError with
    the rank and the action for anything that is malformed, doubled, missing or out of turn.
    """
    ranks: list[list[Action]] = []
    pairs: list[set[int]] = []
    for rank, line in enumerate(text.strip("\n").split("\n")):
        actions: list[Action] = []
        firsts: set[int] = set()
        for cell in filter(None, map(str.strip, line.split(","))):
            pair = _PAIR.fullmatch(cell)
            try:
                if pair is not None:
                    firsts.add(len(actions))
                actions += map(Action.parse, pair.groups() if pair is not None else [cell])
            except PlanError as error:
                raise PlanError(f"rank {rank}, action {len(actions)}: {error}") from None
        ranks.append(actions)
        pairs.append(firsts)
    return from_actions(ranks, num_microbatches=num_microbatches, pairs=pairs)


def from_actions(
    ranks: Sequence[Sequence[Action]],
    *,
    num_microbatches: int | None = None,
    pairs: Sequence[set[int]] | None = None,
) -> Order:
    """The order with these actions per rank; `pairs` holds the positions of overlapped firsts.

    Raises PlanError as `from_text` does. Whether the ranks can wait for each other without
    deadlock is found when the order is played.
    """
    if not any(ranks):
        raise PlanError("the order has no actions; give one line of actions per rank")
    if num_microbatches is None:
        num_microbatches = 1 + max(action.microbatch for actions in ranks for action in actions)
    num_stages = 1 + max(action.stage for actions in ranks for action in actions)
    if num_stages > MAX_STAGES or num_microbatches > MAX_MICROBATCHES:
        raise PlanError(f"{num_stages} stages x {num_microbatches} micro-batches is too large")
    placement = _placement(ranks, num_stages)
    for rank, actions in enumerate(ranks):
        _check_rank(rank, actions, num_microbatches)
    codes = Codes.of(
        [
            [
                (*action, pairs is not None and at in pairs[rank])
                for at, action in enumerate(actions)
            ]
            for rank, actions in enumerate(ranks)
        ]
    )
    works = {action.work for actions in ranks for action in actions}
    return Order(
        num_ranks=len(ranks),
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        placement=placement,
        make=lambda _: codes,
        generated=False,
        backwards="whole"
        if Work.BACKWARD_INPUT not in works
        else "mixed"
        if Work.BACKWARD in works
        else "split",
    )


def _placement(ranks: Sequence[Sequence[Action]], num_stages: int) -> Placement:
    """Loop or V, whichever has every stage on the rank that runs it. Raises PlanError."""
    num_ranks = len(ranks)
    held = {(rank, action.stage) for rank, actions in enumerate(ranks) for action in actions}
    missing = set(range(num_stages)) - {stage for _, stage in held}
    if missing:
        raise PlanError(f"no rank runs stage {min(missing)} of {num_stages}; add its actions")
    if num_stages % num_ranks == 0:
        if all(rank == stage % num_ranks for rank, stage in held):
            return "loop"
        if num_stages == 2 * num_ranks and all(
            rank == min(stage, num_stages - 1 - stage) for rank, stage in held
        ):
            return "v"
    raise PlanError(
        f"{num_stages} stages on {num_ranks} ranks lie neither in a loop (stage s on rank s mod "
        f"{num_ranks}) nor in a V (stage s on rank s or {2 * num_ranks - 1} - s); move the actions"
    )


def _check_rank(rank: int, actions: Sequence[Action], num_microbatches: int) -> None:
    """Each action once and in turn: forward, then a full backward or an input and a weight part."""
    done: set[Action] = set()
    for at, action in enumerate(actions):
        stage, work, microbatch = action
        where = f"rank {rank}, action {at} ({action})"
        if microbatch >= num_microbatches:
            raise PlanError(f"{where}: there are only {num_microbatches} micro-batches")
        if action in done:
            raise PlanError(f"{where}: the action appears twice; remove one")
        split = work in (Work.BACKWARD_INPUT, Work.BACKWARD_WEIGHT)
        if work is not Work.FORWARD and any(
            Action(stage, other, microbatch) in done
            for other in ([Work.BACKWARD] if split else [Work.BACKWARD_INPUT, Work.BACKWARD_WEIGHT])
        ):
            raise PlanError(f"{where}: this backward is given both whole and in parts; keep one")
        first = Work.BACKWARD_INPUT if work is Work.BACKWARD_WEIGHT else Work.FORWARD
        if work is not Work.FORWARD and Action(stage, first, microbatch) not in done:
            raise PlanError(f"{where}: {Action(stage, first, microbatch)} must come before it")
        done.add(action)
    for stage in sorted({action.stage for action in actions}):
        for microbatch in range(num_microbatches):
            whole = Action(stage, Work.BACKWARD, microbatch) in done
            part = Action(stage, Work.BACKWARD_INPUT, microbatch) in done
            wanted = [Work.FORWARD, *([] if whole else [Work.BACKWARD_WEIGHT] if part else
                                      [Work.BACKWARD])]  # fmt: skip
            for work in wanted:
                if Action(stage, work, microbatch) not in done:
                    raise PlanError(
                        f"rank {rank}: {Action(stage, work, microbatch)} is missing; add it"
                    )
