"""What every schedule's orders must obey, checked in plain Python on lists of actions."""

from collections.abc import Sequence
from itertools import product

import numpy as np

from pptune.schedules import Action, Order, Work, from_actions, generate, peak_in_flight
from pptune.simulator import Costs, simulate

F, B, I, W = Work  # noqa: E741

Size = tuple[int, int, int, int | None]
"""P, V, M, N."""

SINGLE: list[Size] = [
    (ranks, 1, microbatches, None)
    for ranks, microbatches in [(1, 1), (1, 3), (2, 2), (2, 7), (4, 2), (4, 8), (8, 21)]
]
V_SHAPED: list[Size] = [(1, 2, 2, None), (2, 2, 4, None), (4, 2, 8, None), (5, 2, 23, None)]
LOOPED: list[Size] = [
    (1, 2, 3, None), (2, 2, 2, None), (4, 2, 8, None), (4, 4, 16, None), (4, 4, 16, 16),
    (4, 2, 10, 5), (3, 3, 11, 4), (4, 2, 3, None), (8, 3, 24, None), (3, 2, 60, None),
]  # fmt: skip

SIZES: dict[str, list[Size]] = {
    "gpipe": SINGLE,
    "1f1b": SINGLE,
    "zb-h1": SINGLE,
    "zb-h2": SINGLE,
    "interleaved": LOOPED,
    "interleaved-zb": LOOPED,
    "looped-bfs": LOOPED,
    "zb-v": [*V_SHAPED, (4, 2, 3, None)],
    "dualpipe-v": V_SHAPED,
}

SPLIT = {"zb-h1", "zb-h2", "zb-v", "interleaved-zb"}
V_PLACED = {"zb-v", "dualpipe-v"}


def make(schedule: str, size: Size) -> Order:
    ranks, chunks, microbatches, group = size
    return generate(
        schedule,
        num_ranks=ranks,
        num_chunks=chunks,
        num_microbatches=microbatches,
        microbatch_group_size=group,
    )


def check(schedule: str, size: Size, lists: Sequence[Sequence[Action]]) -> None:
    """Raise AssertionError or PlanError where these lists are not an order of `schedule`."""
    ranks, chunks, microbatches, _ = size
    check_actions(schedule, size, lists)
    check_progress(lists, ranks * chunks)
    order = from_actions(lists, num_microbatches=microbatches)
    check_time(schedule, size, order)
    check_in_flight(schedule, size, lists, order)


def check_actions(schedule: str, size: Size, lists: Sequence[Sequence[Action]]) -> None:
    """Every action once, on the rank that holds its stage, and in turn."""
    ranks, chunks, microbatches, _ = size
    for rank, actions in enumerate(lists):
        stages = [rank + chunk * ranks for chunk in range(chunks)]
        if schedule in V_PLACED:
            stages = [rank, 2 * ranks - 1 - rank]
        place = {action: at for at, action in enumerate(actions)}
        assert len(place) == len(actions), "an action appears twice"
        expected = set()
        for stage, microbatch in product(stages, range(microbatches)):
            whole = Action(stage, B, microbatch) in place
            assert schedule == "dualpipe-v" or whole == (schedule not in SPLIT)
            chain = [Action(stage, work, microbatch) for work in ([F, B] if whole else [F, I, W])]
            assert [place[action] for action in chain] == sorted(place[action] for action in chain)
            expected.update(chain)
        assert set(place) == expected


def check_progress(lists: Sequence[Sequence[Action]], num_stages: int) -> None:
    """No rank waits for ever when each waits for its inputs."""
    done: set[tuple[str, int, int]] = set()
    places = [0] * len(lists)
    going = True
    while going:
        going = False
        for rank, actions in enumerate(lists):
            while places[rank] < len(actions):
                stage, work, microbatch = actions[places[rank]]
                if work is F and stage > 0 and ("F", stage - 1, microbatch) not in done:
                    break
                backward = work in (B, I) and stage < num_stages - 1
                if backward and ("B", stage + 1, microbatch) not in done:
                    break
                if work is not W:
                    done.add(("F" if work is F else "B", stage, microbatch))
                places[rank] += 1
                going = True
    assert places == [len(actions) for actions in lists], "the order deadlocks"


def bubble(schedule: str, size: Size) -> float | None:
    """Step time less the work of one rank, where forward, input and weight part take 1 per rank
    and transfers nothing; None where no closed form is known."""
    ranks, chunks, microbatches, group = size
    hops = ranks - 1
    grouped = group is None and microbatches % ranks == 0
    match schedule:
        case "gpipe" | "1f1b":  # arXiv 2104.04473, sec. 2.2.1: (P - 1)(t_f + t_b).
            return 3.0 * hops
        case "interleaved" if grouped:  # Sec. 2.2.2: over V.
            return 3.0 * hops / chunks
        case "looped-bfs" if microbatches >= ranks:  # arXiv 2211.05953, sec. 4: the same.
            return 3.0 * hops / chunks
        case "zb-h1":  # arXiv 2401.10241, app. H: M <= P: (M + P - 1)(F + I) + W.
            if microbatches <= ranks:
                return 2.0 * (microbatches + hops) + 1.0 - 3.0 * microbatches
            return 1.0 * hops  # Sec. 3.1: (P - 1)(F + I - W).
        case "zb-h2" if microbatches >= 2 * ranks - 1:  # Only the wait for the first micro-batch.
            return 1.0 * hops
        case "interleaved-zb" if grouped and microbatches >= 2 * ranks:  # ZB-H1's over V.
            return 1.0 * hops / chunks
        case "zb-v" if microbatches >= 2 * ranks - 1:  # As zb-h2, with half a forward per hop.
            return 0.5 * hops
        case "dualpipe-v":
            return 0.5 * hops
    return None


def check_time(schedule: str, size: Size, order: Order) -> None:
    ranks, chunks, microbatches, _ = size
    expected = bubble(schedule, size)
    if expected is not None:
        costs = Costs.uniform(
            num_ranks=ranks, num_chunks=chunks, forward_s=1, backward_input_s=1, backward_weight_s=1
        )
        found = simulate(order, costs).step_time_s - 3 * microbatches
        assert abs(found - expected) < 1e-9, f"bubble {found} instead of {expected}"


def in_flight(schedule: str, size: Size, rank: int) -> int | None:
    """Stage-micro-batches that `rank` holds at most, or None where no closed form is known."""
    ranks, chunks, microbatches, group = size
    if group is None:
        group = microbatches // max(1, microbatches // ranks)
    total = microbatches * chunks
    after = ranks - 1 - rank
    match schedule:
        case "gpipe" | "looped-bfs":
            return total
        case "1f1b":
            return min(after + 1, microbatches)
        case "zb-h1":
            return min(ranks, microbatches)
        case "zb-h2":
            return min(2 * ranks - 1, microbatches)
        case "interleaved":
            return min((chunks - 1) * group + 2 * after + 1, total)
        case "interleaved-zb":
            return min((chunks - 1) * group + ranks, total)
        case "zb-v" if microbatches >= 2 * ranks:
            return 2 * ranks
        case "dualpipe-v":
            return 2 * ranks + 1 if microbatches > 1 else 2
    return None


def check_in_flight(
    schedule: str, size: Size, lists: Sequence[Sequence[Action]], order: Order
) -> None:
    counted = []
    for actions in lists:
        held, highest = 0, 0
        for action in actions:
            held += {F: 1, B: -1, I: 0, W: -1}[action.work]
            highest = max(highest, held)
        counted.append(highest)
    assert counted == peak_in_flight(order).tolist()
    for rank, highest in enumerate(counted):
        expected = in_flight(schedule, size, rank)
        assert expected in (None, highest), f"rank {rank} holds {highest}, not {expected}"


def same_orders(one: Order, other: Order) -> bool:
    return all(
        np.array_equal(getattr(one, name), getattr(other, name))
        for name in ("works", "stages", "microbatches", "offsets", "pairs")
    ) and (one.num_ranks, one.num_stages, one.num_microbatches, one.placement) == (
        other.num_ranks, other.num_stages, other.num_microbatches, other.placement,
    )  # fmt: skip


def unit_costs(order: Order) -> Costs:
    """Every action takes 1 and every hop 0.1, whatever the order."""
    return Costs.uniform(
        num_ranks=order.num_ranks,
        num_chunks=order.num_stages // order.num_ranks,
        forward_s=1,
        backward_input_s=1,
        backward_weight_s=1,
        transfer_s=0.1,
    )
