"""Orders: the contract of every schedule, torch's own orders, text, errors."""

from collections import defaultdict
from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from pptune.errors import PlanError
from pptune.schedules import (
    Action,
    Order,
    Work,
    deadlock,
    from_actions,
    from_text,
    generate,
    input_stage,
    looped,
    orders,
    peak_in_flight,
    peak_in_flight_bytes,
)
from pptune.schedules.order import Shape
from tests import contract
from tests.test_executors import recorded_1f1b

CASES = [(schedule, size) for schedule, sizes in contract.SIZES.items() for size in sizes]


def parsed(cells: str) -> list[Action]:
    return [Action.parse(cell) for cell in cells.split()]


def lists_of(order: Order) -> list[list[Action]]:
    return [order.actions(rank) for rank in range(order.num_ranks)]


@pytest.mark.parametrize(("schedule", "size"), CASES)
class TestEverySchedule:
    def test_it_obeys_the_contract(self, schedule: str, size: contract.Size) -> None:
        contract.check(schedule, size, lists_of(contract.make(schedule, size)))

    def test_its_text_reads_back(self, schedule: str, size: contract.Size) -> None:
        order = contract.make(schedule, size)
        read = from_text(order.to_text())
        if size[0] == 1:  # One rank is a loop and a V at once.
            assert read.to_text() == order.to_text()
        else:
            assert contract.same_orders(read, order)

    def test_torch_reads_its_text(self, schedule: str, size: contract.Size) -> None:
        order = contract.make(schedule, size)
        actions = {
            rank: [torch_schedules._Action.from_str(cell) for cell in line.split(",")]
            for rank, line in enumerate(order.to_text().splitlines())
        }
        homes = torch_schedules._validate_schedule(
            actions, order.num_ranks, order.num_stages, order.num_microbatches
        )
        assert [homes[stage] for stage in range(order.num_stages)] == order.rank_of_stage.tolist()

    def test_a_planted_fault_is_caught(self, schedule: str, size: contract.Size) -> None:
        """Off by one in every way: each must break the contract."""
        lists = lists_of(contract.make(schedule, size))
        contract.check(schedule, size, lists)
        for faulty in planted_faults(lists):
            with pytest.raises((AssertionError, PlanError, KeyError)):
                contract.check(schedule, size, faulty)


def planted_faults(lists: list[list[Action]]) -> Iterator[list[list[Action]]]:
    """The lists with one thing wrong on the middle rank: the next micro-batch, the next stage, an
    action too few, one too many, a backward before its forward."""
    rank = len(lists) // 2

    def planted(actions: list[Action]) -> list[list[Action]]:
        return [*lists[:rank], actions, *lists[rank + 1 :]]

    actions = lists[rank]
    stage, work, microbatch = actions[0]
    yield planted([Action(stage, work, microbatch + 1), *actions[1:]])
    yield planted([Action(stage + 1, work, microbatch), *actions[1:]])
    yield planted(actions[:-1])
    yield planted([*actions, actions[-1]])
    backward = next(at for at, action in enumerate(actions) if action.work is not Work.FORWARD)
    early = actions[backward]
    yield planted([early, *actions[:backward], *actions[backward + 1 :]])


@pytest.mark.parametrize(
    ("schedule", "hops", "lag"),
    [("1f1b", 1, looped.NO_SPLIT), ("interleaved", 2, looped.NO_SPLIT), ("zb-h1", 1, 1),
     ("zb-h2", 2, 2), ("interleaved-zb", 1, 1)],
)  # fmt: skip
def test_a_warmup_or_lag_off_by_one_is_caught(schedule: str, hops: int, lag: int) -> None:
    size = (4, contract.SIZES[schedule][-1][1], 16, None)
    shape = Shape(*size[:3], 4)

    def check(hops: int, lag: int) -> None:
        order = looped.looped_order(shape, warmup_per_hop=hops, weight_lag=lag)
        contract.check(schedule, size, lists_of(order))

    check(hops, lag)
    wrong = [(hops + 1, lag), (hops - 1, lag)]
    if lag != looped.NO_SPLIT:
        wrong += [(hops, lag + 1), (hops, lag - 1)]
    for other_hops, other_lag in wrong:
        with pytest.raises((AssertionError, PlanError)):
            check(other_hops, other_lag)


class TestTorch:
    """Orders that torch has a class for are torch's, to the action."""

    @staticmethod
    def order_of(name: str, num_ranks: int, num_chunks: int, num_microbatches: int) -> list[str]:
        """What torch's class would do, one line per rank, without its idle slots."""
        made = getattr(torch_schedules, name)
        schedule = object.__new__(made)
        rounds = max(1, num_microbatches // num_ranks)
        vars(schedule).update(
            pp_group_size=num_ranks,
            n_local_stages=num_chunks,
            num_stages=num_ranks * num_chunks,
            _num_stages=num_ranks * num_chunks,
            _stages=[None] * num_chunks,
            _n_microbatches=num_microbatches,
            number_of_rounds=rounds,
            microbatches_per_round=num_microbatches // rounds,
        )
        if name == "ScheduleGPipe":
            orders = schedule._get_pipeline_order()
            return [
                ",".join(str(a) for a in orders[rank] if a is not None and a.is_compute_op)
                for rank in range(num_ranks)
            ]
        return [
            ",".join(str(a) for a in schedule._calculate_single_rank_operations(rank) if a)
            for rank in range(num_ranks)
        ]

    @pytest.mark.parametrize(
        ("schedule", "name", "chunks"),
        [
            ("gpipe", "ScheduleGPipe", (1,)),
            ("interleaved", "ScheduleInterleaved1F1B", (2, 3, 4)),
            ("interleaved-zb", "ScheduleInterleavedZeroBubble", (2, 3, 4)),
            ("looped-bfs", "ScheduleLoopedBFS", (2, 3, 4)),
            ("zb-v", "ScheduleZBVZeroBubble", (2,)),
            ("dualpipe-v", "ScheduleDualPipeV", (2,)),
        ],
    )
    def test_orders_are_the_same(self, schedule: str, name: str, chunks: tuple[int, ...]) -> None:
        for ranks, num_chunks, microbatches in product((1, 2, 3, 4, 8), chunks, range(1, 25)):
            if schedule == "dualpipe-v" and microbatches < 2 * ranks:
                continue
            if "interleaved" in schedule and microbatches % max(1, microbatches // ranks):
                continue
            ours = contract.make(schedule, (ranks, num_chunks, microbatches, None))
            assert ours.to_text().splitlines() == self.order_of(
                name, ranks, num_chunks, microbatches
            )

    def test_1f1b_is_what_torch_runs(self) -> None:
        """Its step loop is recorded: the order its class prints is off by one on the last rank."""
        for ranks, microbatches in [(1, 1), (2, 2), (4, 4), (4, 9), (8, 20)]:
            order = contract.make("1f1b", (ranks, 1, microbatches, None))
            for rank in range(ranks):
                notes = recorded_1f1b(ranks, rank, microbatches)
                recorded = [what for kind, what in notes if kind == "work"]
                assert [str(action) for action in order.actions(rank)] == recorded


class TestSizes:
    def test_group_sizes_that_deadlock_are_refused_and_no_others(self) -> None:
        refused = 0
        for schedule, ranks, chunks in product(("interleaved", "interleaved-zb"), (3, 5), (2, 3)):
            for microbatches in range(1, 14):
                for group in range(1, microbatches + 1):
                    runs = self.runs(schedule, ranks, chunks, microbatches, group)
                    size = (ranks, chunks, microbatches, group)
                    if runs:
                        contract.make(schedule, size)
                    else:
                        refused += 1
                        with pytest.raises(PlanError, match="wait for each other"):
                            contract.make(schedule, size)
        assert refused > 50

    @staticmethod
    def runs(schedule: str, ranks: int, chunks: int, microbatches: int, group: int) -> bool:
        hops, lag = (2, looped.NO_SPLIT) if schedule == "interleaved" else (1, 1)
        codes = orders.looped(ranks, chunks, microbatches, group, hops, lag, lag != looped.NO_SPLIT)
        order = Order(
            num_ranks=ranks,
            num_stages=ranks * chunks,
            num_microbatches=microbatches,
            placement="loop",
            make=lambda _: codes,
        )
        try:
            contract.check_progress(lists_of(order), ranks * chunks)
        except AssertionError:
            return False
        return True

    @pytest.mark.parametrize(
        ("schedule", "size", "says"),
        [
            ("1f2b", (2, 1, 2, None), "unknown; use one of gpipe, 1f1b"),
            ("1f1b", (2, 2, 2, None), "chunks is 2; use --chunks 1"),
            ("interleaved", (2, 1, 2, None), "chunks is 1; use --chunks 2"),
            ("zb-v", (2, 3, 4, None), "chunks is 3; use --chunks 2"),
            ("dualpipe-v", (4, 2, 7, None), "there are 7 and 8; use 8 or more"),
            ("interleaved", (2, 2, 4, 5), "must lie in 1..4"),
            ("interleaved", (2, 2, 4, 0), "must lie in 1..4"),
            ("1f1b", (0, 1, 4, None), "each must be 1 or more"),
            ("1f1b", (2, 1, 0, None), "each must be 1 or more"),
            ("1f1b", (2**23, 1, 1, None), "too large"),
        ],
    )
    def test_what_cannot_run_says_why(self, schedule: str, size: contract.Size, says: str) -> None:
        with pytest.raises(PlanError, match=says):
            contract.make(schedule, size)

    def test_an_order_is_made_when_it_is_read(self) -> None:
        """Of a trillion micro-batches nothing is made, yet its peak is known."""
        order = contract.make("1f1b", (4, 1, 10**9, None))
        assert peak_in_flight(order).tolist() == [4, 3, 2, 1]


@pytest.mark.parametrize("schedule", contract.SIZES)
def test_cycles_repeat(schedule: str) -> None:
    """Where an order says that it repeats, it does, and every cut is one: nothing before it needs
    anything after it."""
    ranks = 4
    chunks = contract.SIZES[schedule][-1][1]
    sizes: list[contract.Size] = [(ranks, chunks, count, None) for count in (24, 40, 41)]
    if "interleaved" in schedule:
        sizes += [(ranks, chunks, 50, 5), (ranks, chunks, 54, 10)]
    seen = 0
    for size in sizes:
        order = contract.make(schedule, size)
        if order.cycle is None:
            continue
        seen += 1
        microbatches, num_actions, first, per_rank, count = order.cycle[:5]
        lists = lists_of(order)
        for rank, actions in enumerate(lists):
            start = first + per_rank * rank
            assert start >= 0
            assert start + count * num_actions <= len(actions)
            for at in range(start, start + (count - 1) * num_actions):
                now, later = actions[at], actions[at + num_actions]
                assert later == (now.stage, now.work, now.microbatch + microbatches)
        starts = [first + per_rank * rank for rank in range(ranks)]
        for cut in range(count + 1):
            before = [
                actions[: start + cut * num_actions]
                for actions, start in zip(lists, starts, strict=True)
            ]
            contract.check_progress(before, order.num_stages)
        shorter = order.with_cycles(1)
        assert shorter.num_microbatches == order.num_microbatches - (count - 1) * microbatches
        for rank, actions in enumerate(lists):
            keep = starts[rank] + num_actions
            assert shorter.actions(rank)[:keep] == actions[:keep]
            assert len(actions) - len(shorter.actions(rank)) == (count - 1) * num_actions
    assert seen == (0 if schedule in ("gpipe", "looped-bfs") else len(sizes))


class TestText:
    def test_an_action_reads_and_prints(self) -> None:
        assert str(Action(2, Work.FORWARD, 0)) == "2F0"
        assert Action.parse(" 13W257 ") == Action(13, Work.BACKWARD_WEIGHT, 257)
        assert [work.letter for work in Work] == ["F", "B", "I", "W"]

    @pytest.mark.parametrize("text", ["", "F0", "2F", "2X0", "2F0x", "-1F0", "2 F0", "2f0"])
    def test_what_is_no_action_is_refused(self, text: str) -> None:
        with pytest.raises(PlanError, match="write it like 2F0"):
            Action.parse(text)

    def test_idle_slots_are_skipped(self) -> None:
        order = from_text("0F0,,0B0\n,1F0,1B0\n")
        assert order.to_text() == "0F0,0B0\n1F0,1B0\n"

    @pytest.mark.parametrize(
        ("text", "says"),
        [
            ("", "no actions"),
            ("0F0,0B0\n1F0,1Z0", "rank 1, action 1: action '1Z0' is not written"),
            ("0F0,0F0,0B0", r"rank 0, action 1 \(0F0\): the action appears twice"),
            ("0B0,0F0", r"rank 0, action 0 \(0B0\): 0F0 must come before it"),
            ("0F0,0W0,0I0", r"rank 0, action 1 \(0W0\): 0I0 must come before it"),
            ("0F0,0I0", "rank 0: 0W0 is missing"),
            ("0F0", "rank 0: 0B0 is missing"),
            ("0F0,0B0,0F1,0B1\n1F0,1B0", "rank 1: 1F1 is missing"),
            ("0F0,0B0,0I0,0W0", "given both whole and in parts"),
            ("0F0,0B0\n2F0,2B0", "no rank runs stage 1 of 3"),
            ("0F0,0B0,1F0,1B0\n2F0,2B0,3F0,3B0", "neither in a loop"),
            ("0F0,0B0,1F0,1B0\n1F0,1B0,0F0,0B0", "neither in a loop"),
        ],
    )
    def test_a_broken_order_says_where(self, text: str, says: str) -> None:
        with pytest.raises(PlanError, match=says):
            from_text(text)

    def test_too_many_microbatches_for_the_number_given(self) -> None:
        with pytest.raises(PlanError, match="there are only 1 micro-batches"):
            from_text("0F0,0F1,0B0,0B1", num_microbatches=1)

    def test_pairs_survive(self) -> None:
        text = contract.make("dualpipe-v", (2, 2, 6, None)).to_text()
        assert "(0F3;3B1)OVERLAP_F_B" in text
        assert from_text(text).to_text() == text

    def test_ranks_that_wait_for_each_other_are_shown(self) -> None:
        order = from_actions(
            [
                parsed("0F0 0F1 0B1 0B0"),
                parsed("1F0 1B0 1F1 1B1"),
            ]
        )
        deadlock.check_progress(order)
        stuck = from_actions(
            [
                parsed("0F0 0B0 0F1 0B1"),
                parsed("1F0 1F1 1B1 1B0"),
            ]
        )
        with pytest.raises(PlanError) as raised:
            deadlock.check_progress(stuck)
        assert str(raised.value).splitlines()[1:] == [
            "  rank 0  step 1  0F0  [0B0]  waits for stage 1's B0 of rank 1",
            "  rank 1  step 1  1F0  [1F1]  waits for stage 0's F1 of rank 0",
        ]


def test_a_forward_waits_downstream_and_a_backward_upstream() -> None:
    waits = {(work, stage): input_stage(work, stage, 3) for work, stage in product(Work, range(3))}
    assert {key: source for key, source in waits.items() if source >= 0} == {
        (Work.FORWARD, 1): 0,
        (Work.FORWARD, 2): 1,
        (Work.BACKWARD, 0): 1,
        (Work.BACKWARD, 1): 2,
        (Work.BACKWARD_INPUT, 0): 1,
        (Work.BACKWARD_INPUT, 1): 2,
    }


def test_bytes_in_flight_weigh_each_stage() -> None:
    """Against a plain count, with stages of very different size."""
    for schedule, size in CASES:
        order = contract.make(schedule, size)
        weights = 10.0 ** np.arange(order.num_stages)
        expected = []
        for actions in lists_of(order):
            held: dict[int, float] = defaultdict(float)
            highest = 0.0
            for stage, work, _ in actions:
                held[stage] += {"F": 1, "B": -1, "I": 0, "W": -1}[work.letter]
                highest = max(highest, sum(weights[at] * count for at, count in held.items()))
            expected.append(highest)
        assert peak_in_flight_bytes(order, weights).tolist() == pytest.approx(expected)


def test_unknown_group_default_is_torchs() -> None:
    """M // max(1, M // P), arXiv 2104.04473's P where it divides M."""
    for ranks, microbatches, group in [(4, 8, 4), (4, 10, 5), (4, 3, 3), (2, 9, 2)]:
        if microbatches % max(1, microbatches // ranks):
            continue
        one = contract.make("interleaved", (ranks, 2, microbatches, None))
        other = contract.make("interleaved", (ranks, 2, microbatches, group))
        assert contract.same_orders(one, other)
    assert generate("1f1b", num_ranks=2, num_chunks=1, num_microbatches=3).num_microbatches == 3
