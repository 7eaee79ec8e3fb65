"""The waits of torch's own runtimes, taken from torch and compared with ours."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from pptune.executors import WAITS, Executor, Receive, Wait
from pptune.schedules import Action, Order, Work
from pptune.simulator.posts import posts_of
from tests import contract, reference_simulator

CASES = [(schedule, size) for schedule, sizes in contract.SIZES.items() for size in sizes]


def lowered_by_torch(order: Order) -> list[list[str]]:
    """torch's lowering of the order, without what it adds for sharding and gradient reduction."""
    homes = order.rank_of_stage.tolist()
    lists = {}
    for rank, line in enumerate(order.to_text().splitlines()):
        actions = [torch_schedules._Action.from_str(cell) for cell in line.split(",")]
        actions = torch_schedules._add_unshard_reshard(actions)
        lists[rank] = torch_schedules._add_reduce_grad(actions, order.num_microbatches)
    lowered = torch_schedules._add_send_recv(lists, lambda stage: homes[stage], order.num_stages)
    added = {"UNSHARD", "RESHARD", "REDUCE_GRAD"}
    return [
        [
            str(action)
            for entry in lowered[rank]
            if entry.computation_type.value not in added
            for action in (entry.sub_actions or (entry,))
        ]
        for rank in range(order.num_ranks)
    ]


@pytest.mark.parametrize(("schedule", "size"), CASES)
class TestTorchRuntime:
    def test_receives_are_posted_where_torch_posts_them(
        self, schedule: str, size: contract.Size
    ) -> None:
        order = contract.make(schedule, size)
        posts = posts_of(
            order.codes(), order.rank_of_stage, order.num_microbatches, Executor.TORCH_RUNTIME
        ).posted_after_rows()
        for actions in lowered_by_torch(order):
            done = 0
            for text in actions:
                if "RECV_F" in text:
                    stage, microbatch = map(int, text.split("RECV_F"))
                    assert posts[stage - 1, microbatch] == done - 1, text
                elif "RECV_B" in text:
                    stage, microbatch = map(int, text.split("RECV_B"))
                    assert posts[order.num_stages + stage + 1, microbatch] == done - 1, text
                elif "SEND" not in text:
                    done += 1

    def test_the_plain_simulator_lowers_as_torch_does(
        self, schedule: str, size: contract.Size
    ) -> None:
        order = contract.make(schedule, size)
        costs = contract.unit_costs(order)
        player = reference_simulator.Player(order, costs, Executor.TORCH_RUNTIME)

        def text(kind: str, value: Any) -> str:
            if kind == "work":
                return str(value.action)
            letter, stage, microbatch = value.name
            if kind == "send":
                return f"{stage}SEND_{letter}{microbatch}"
            return f"{stage + (1 if letter == 'F' else -1)}RECV_{letter}{microbatch}"

        ours = [[text(*entry) for entry in entries] for entries in player.lowered()]
        assert ours == lowered_by_torch(order)


def recorded_1f1b(num_ranks: int, rank: int, num_microbatches: int) -> list[tuple[str, str]]:
    """What torch's Schedule1F1B does on this rank: its step loop runs on a stage that takes notes.

    Notes are ("post", message), ("wait", message) and ("work", action).
    """
    notes: list[tuple[str, str]] = []
    last = num_ranks - 1

    def ops(kind: str, there: bool) -> Callable[[int], list[str]]:
        return lambda microbatch: [f"{kind}{microbatch}"] if there else []

    def post(operations: list[str], desc: str | None = None) -> list[str]:
        notes.extend(("post", operation) for operation in operations)
        return operations

    def wait(works: list[str]) -> None:
        notes.extend(("wait", work) for work in works)

    def work(kind: Work) -> Callable[..., None]:
        return lambda microbatch, *_, **__: notes.append(
            ("work", str(Action(rank, kind, microbatch)))
        )

    stage = SimpleNamespace(
        stage_index=rank,
        get_fwd_recv_ops=ops("receive F", rank > 0),
        get_fwd_send_ops=ops("send F", rank < last),
        get_bwd_recv_ops=ops("receive B", rank < last),
        get_bwd_send_ops=ops("send B", rank > 0),
        forward_one_chunk=work(Work.FORWARD),
        backward_one_chunk=work(Work.BACKWARD),
        perform_reduce_grad=lambda scale: None,
    )
    schedule = object.__new__(torch_schedules.Schedule1F1B)
    vars(schedule).update(
        _stage=stage,
        _num_stages=num_ranks,
        _n_microbatches=num_microbatches,
        scale_grads=False,
        _check_inputs=lambda *_: ([()] * num_microbatches, [{}] * num_microbatches),
        _initialize_stage=lambda *_: None,
        _maybe_compute_loss=lambda *_: None,
        _maybe_get_loss=lambda *_: None,
        _update_losses=lambda *_: None,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_schedules, "_batch_p2p", post)
        patch.setattr(torch_schedules, "_wait_batch_p2p", wait)
        schedule._step_microbatches()
    return notes


@pytest.mark.parametrize(
    ("ranks", "microbatches"), [(1, 2), (2, 2), (2, 5), (4, 4), (4, 9), (8, 8)]
)
def test_1f1b_waits_as_torchs_step_loop_does(ranks: int, microbatches: int) -> None:
    """Posts and waits between two computations are those of the plain simulator's program."""
    order = contract.make("1f1b", (ranks, 1, microbatches, None))
    player = reference_simulator.Player(order, contract.unit_costs(order), Executor.TORCH_1F1B)
    for rank, program in enumerate(player.programs):
        ours: list[tuple[str, str]] = []
        for kind, *values in program:
            if kind == "work":
                ours.append(("work", str(values[0].action)))
            elif kind in ("send", "receive"):
                letter, _, microbatch = values[0].name
                ours.append(("post", f"{kind} {letter}{microbatch}"))
            elif kind == "wait":
                needed, sent = values
                for what, message in (("receive", needed), ("send", sent)):
                    if message is not None:
                        ours.append(("wait", f"{what} {message.name[0]}{message.name[2]}"))
        theirs = recorded_1f1b(ranks, rank, microbatches)
        assert segments(ours) == segments(theirs), rank


def segments(notes: list[tuple[str, str]]) -> list[tuple[str, set[tuple[str, str]]]]:
    """Every computation with what was posted and waited for before it. The order inside does not
    matter: nothing takes the rank's time there but the waits, and all of them must end."""
    result: list[tuple[str, set[tuple[str, str]]]] = []
    between: set[tuple[str, str]] = set()
    for kind, what in [*notes, ("work", "end")]:
        if kind == "work":
            result.append((what, between))
            between = set()
        else:
            between.add((kind, what))
    return result


def test_every_executor_states_its_waits() -> None:
    assert set(WAITS) == set(Executor)
    for executor, rules in WAITS.items():
        one_sided = rules.receive in (Receive.BEFORE_STEP, Receive.LOWERED)
        never = rules.same_direction is rules.opposite_direction is Wait.NEVER
        assert one_sided == never, executor
