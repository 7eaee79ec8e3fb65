"""Orders in which ranks wait for each other without end, and how to show them."""

from collections.abc import Callable, Sequence

from pptune.errors import PlanError
from pptune.schedules.action import Action, Work, input_stage
from pptune.schedules.order import Order

_SHOWN = 4
"""Actions before the one a rank is stuck at."""


def check_progress(order: Order) -> None:
    """Raise PlanError where the actions of `order` need each other in a circle."""
    lists = [order.actions(rank) for rank in range(order.num_ranks)]
    places = [0] * order.num_ranks
    done: set[tuple[int, bool, int]] = set()

    def ready(action: Action) -> bool:
        source = input_stage(action.work, action.stage, order.num_stages)
        return source < 0 or (source, action.work == Work.FORWARD, action.microbatch) in done

    progress = True
    while progress:
        progress = False
        for rank, actions in enumerate(lists):
            while places[rank] < len(actions) and ready(actions[places[rank]]):
                stage, work, microbatch = actions[places[rank]]
                if work != Work.BACKWARD_WEIGHT:
                    done.add((stage, work == Work.FORWARD, microbatch))
                places[rank] += 1
                progress = True
    if any(place < len(actions) for place, actions in zip(places, lists, strict=True)):
        raise deadlock(order, places)


def deadlock(
    order: Order,
    places: Sequence[int],
    reason: Callable[[int, Action], str | None] = lambda rank, action: None,
) -> PlanError:
    """The error that says where every rank is stuck: one row per rank with its last actions, the
    next one in brackets, and what that waits for.

    `places` holds how many actions each rank has done. `reason` may name what a rank waits for
    where its input has been produced.
    """
    done = {
        (action.stage, action.work == Work.FORWARD, action.microbatch)
        for rank in range(order.num_ranks)
        for action in order.actions(rank)[: places[rank]]
        if action.work != Work.BACKWARD_WEIGHT
    }
    rows = []
    for rank in range(order.num_ranks):
        actions = order.actions(rank)
        place = places[rank]
        cells = [str(action) for action in actions[max(place - _SHOWN, 0) : place]]
        why = "done"
        if place < len(actions):
            action = actions[place]
            cells.append(f"[{action}]")
            source = input_stage(action.work, action.stage, order.num_stages)
            forward = action.work == Work.FORWARD
            if source >= 0 and (source, forward, action.microbatch) not in done:
                owner = int(order.rank_of_stage[source])
                letter = "F" if forward else "B or I" if order.backwards == "mixed" else (
                    "I" if order.backwards == "split" else "B")  # fmt: skip
                why = f"waits for stage {source}'s {letter}{action.microbatch} of rank {owner}"
            else:
                why = reason(rank, action) or "waits"
        rows.append((f"rank {rank}", f"step {place}", *cells, why))
    width = max(map(len, rows))
    padded = [(*row[:2], *[""] * (width - len(row)), *row[2:]) for row in rows]
    sizes = [max(len(row[column]) for row in padded) for column in range(width)]
    grid = "\n".join(
        "  " + "  ".join(cell.ljust(size) for cell, size in zip(row, sizes, strict=True)).rstrip()
        for row in padded
    )
    return PlanError(
        "the ranks wait for each other without end (the actions each has done last, the next one "
        f"in brackets); use another schedule or micro-batch group size:\n{grid}"
    )
