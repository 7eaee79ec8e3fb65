"""Real pipelines on gloo: gradients against one process, replays against given times, memory."""

import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args

import pytest
import torch
from torch import nn

from pptune import schedules
from pptune.errors import UsageError
from pptune.measured_step import (
    MeasuredAction,
    MeasuredStep,
    breakdown,
    join_ranks,
    producer_end_s,
)
from pptune.model import ModelSpec
from pptune.plan import V_SHAPED, Plan, Schedule, make_plan
from pptune.runtime import models
from pptune.runtime.context import RankContext
from pptune.runtime.launch import RankGroup
from pptune.runtime.memory_meter import measure_peak_bytes, storage_bytes
from pptune.runtime.pipeline import PlanRunner, replica_groups
from pptune.runtime.stages import wait
from pptune.runtime.visits import PlanVisitor
from pptune.runtime.wait_times import WaitTimes
from pptune.runtime.world import World
from tests.rank_processes import run_ranks

CPU = torch.device("cpu")
GPT = ModelSpec(
    name="tiny", family="gpt", num_layers=4, seq_len=16, hidden_size=32, num_heads=4,
    num_kv_heads=4, ffn_size=128, vocab_size=61,
)  # fmt: skip
PATIENT_S = 200.0

pytestmark = pytest.mark.timeout(900)


def plan_of(schedule: Schedule, *, ranks: int, chunks: int, microbatches: int, **more: Any) -> Plan:
    return make_plan(
        schedule=schedule, num_ranks=ranks, num_chunks=chunks, microbatch_size=1,
        num_microbatches=microbatches,
        layers_per_stage=(GPT.num_layers // (ranks * chunks),) * (ranks * chunks), **more,
    )  # fmt: skip


TWO_RANK_PLANS = {
    "gpipe": plan_of("gpipe", ranks=2, chunks=1, microbatches=4),
    "1f1b": plan_of("1f1b", ranks=2, chunks=1, microbatches=4),
    "1f1b recompute": plan_of("1f1b", ranks=2, chunks=1, microbatches=4, recompute="full"),
    "interleaved": plan_of("interleaved", ranks=2, chunks=2, microbatches=4),
    "interleaved N=4": plan_of(
        "interleaved", ranks=2, chunks=2, microbatches=4, microbatch_group_size=4
    ),
    "looped-bfs": plan_of("looped-bfs", ranks=2, chunks=2, microbatches=4),
    "interleaved-zb": plan_of("interleaved-zb", ranks=2, chunks=2, microbatches=4),
    "zb-h1": plan_of("zb-h1", ranks=2, chunks=1, microbatches=4),
    "zb-h2": plan_of("zb-h2", ranks=2, chunks=1, microbatches=4),
    "zb-v": plan_of("zb-v", ranks=2, chunks=2, microbatches=4),
    "dualpipe-v": plan_of("dualpipe-v", ranks=2, chunks=2, microbatches=4),
}


# --- gradients and losses -------------------------------------------------------------------------


def as_context(rank: int, num_ranks: int) -> RankContext:
    return RankContext(
        rank=rank, num_ranks=num_ranks, device=CPU, node="here",
        emit=lambda event: None, status=lambda doing: None,
    )  # fmt: skip


def stage_gradients(runner: PlanRunner) -> dict[int, list[torch.Tensor]]:
    stages = getattr(runner.schedule, "_stages", None) or [runner.schedule._stage]
    return {
        stage.stage_index: [
            torch.zeros_like(p) if p.grad is None else p.grad.clone()
            for p in stage.submod.parameters()
        ]
        for stage in stages
    }


def train_everything() -> dict[str, Any]:
    """In a rank: each plan's gradients after one step, and the losses of some 1F1B steps."""
    import torch.distributed as dist

    context = as_context(dist.get_rank(), dist.get_world_size())
    gradients: dict[str, dict[int, list[torch.Tensor]]] = {}
    for name, plan in TWO_RANK_PLANS.items():
        runner = PlanRunner(context, plan, GPT, dtype="float32", stage_times=None, boundary_bytes=0)
        runner.forward_backward()
        gradients[name] = stage_gradients(runner)
    losses: list[float] = []
    runner = PlanRunner(
        context, TWO_RANK_PLANS["1f1b"], GPT, dtype="float32", stage_times=None, boundary_bytes=0
    )
    for _ in range(6):
        own: list[torch.Tensor] = []
        arguments = (runner._inputs,) if context.rank == 0 else ()
        target = {"target": runner._targets} if context.rank == 1 else {}
        runner.schedule.step(*arguments, **target, losses=own, return_outputs=False)
        runner.update()
        losses.append(sum(float(loss.detach()) for loss in own))
    before = time.perf_counter()
    dist.barrier()
    clock = (before, time.perf_counter())
    return {"gradients": gradients, "losses": losses, "clock": clock}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(
        train_everything, folder=tmp_path_factory.mktemp("ranks"), deadline_s=PATIENT_S
    )


def reference_gradients(plan: Plan) -> tuple[float, list[list[torch.Tensor]]]:
    """Loss and gradients by stage of the same layers chained in this process, batch in one go."""
    last = plan.num_stages - 1
    stages: list[nn.Module] = [
        models.build_stage(
            GPT, blocks=plan.layers_per_stage[stage], first=stage == 0, last=stage == last,
            dtype=torch.float32, device=CPU, first_block=sum(plan.layers_per_stage[:stage]),
        )
        for stage in range(plan.num_stages)
    ]  # fmt: skip
    batch = plan.microbatch_size * plan.num_microbatches
    inputs, targets = models.example_batch(GPT, batch, device=CPU, dtype=torch.float32)
    loss = models.cross_entropy(nn.Sequential(*stages)(inputs), targets)
    loss.backward()  # type: ignore[no-untyped-call]
    gradients = [
        [torch.zeros_like(p) if p.grad is None else p.grad for p in stage.parameters()]
        for stage in stages
    ]
    return float(loss.detach()), gradients


@pytest.mark.dist
@pytest.mark.parametrize("name", TWO_RANK_PLANS)
def test_a_pipeline_step_has_the_gradients_of_one_process(
    trained: list[dict[str, Any]], name: str
) -> None:
    plan = TWO_RANK_PLANS[name]
    _, expected = reference_gradients(plan)
    found = {**trained[0]["gradients"][name], **trained[1]["gradients"][name]}
    assert sorted(found) == list(range(plan.num_stages))
    for stage, gradients in enumerate(expected):
        assert sum(float(g.abs().sum()) for g in gradients) > 0
        for ours, theirs in zip(found[stage], gradients, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.dist
def test_training_through_the_pipeline_lowers_the_loss(trained: list[dict[str, Any]]) -> None:
    losses = trained[1]["losses"]
    plan = TWO_RANK_PLANS["1f1b"]
    first, _ = reference_gradients(plan)
    assert losses[0] / plan.num_microbatches == pytest.approx(first, rel=1e-5)
    assert losses[0] / plan.num_microbatches == pytest.approx(math.log(61), rel=0.2)
    assert losses == sorted(losses, reverse=True)


@pytest.mark.dist
def test_processes_of_one_host_share_a_clock(trained: list[dict[str, Any]]) -> None:
    """What joining the records of ranks relies on: all read before they met, and again after."""
    readings = [rank["clock"] for rank in trained]
    assert max(before for before, _ in readings) <= min(after for _, after in readings)


def test_a_plan_needs_as_many_ranks_as_it_names() -> None:
    with pytest.raises(UsageError, match=r"needs 4 ranks \(2 x 2 replicas\), but 2 were started"):
        replica_groups(
            as_context(0, 2),
            plan_of("1f1b", ranks=2, chunks=1, microbatches=2, data_parallel=2),
        )


# --- visits on four ranks -------------------------------------------------------------------------

FORWARD_S, INPUT_S, WEIGHT_S = 2e-3, 3e-3, 1e-3
TIMES = WaitTimes(
    forward_s=FORWARD_S, backward_s=INPUT_S + WEIGHT_S, backward_input_s=INPUT_S,
    backward_weight_s=WEIGHT_S,
)  # fmt: skip


def waited_s(action: MeasuredAction) -> float:
    """What the action has to wait. Stage 0 has no input gradient: torch leaves all to the weight
    part there (torch.distributed.pipelining, stage.py, backward_weight_one_chunk)."""
    if action.stage == 0 and action.work in ("I", "W"):
        return 0.0 if action.work == "I" else INPUT_S + WEIGHT_S
    return {"F": FORWARD_S, "B": INPUT_S + WEIGHT_S, "I": INPUT_S, "W": WEIGHT_S}[action.work]


@pytest.fixture(scope="module")
def four_ranks() -> Iterator[RankGroup]:
    world = World(num_ranks=4, local_ranks=(0, 1, 2, 3), device="cpu", launcher="alone")
    with RankGroup(world, timeout_s=PATIENT_S) as group:
        yield group


def replay_plan(schedule: Schedule) -> Plan:
    chunks = 2 if schedule in (*V_SHAPED, "interleaved", "interleaved-zb", "looped-bfs") else 1
    return make_plan(
        schedule=schedule, num_ranks=4, num_chunks=chunks, microbatch_size=1, num_microbatches=8,
        layers_per_stage=(1,) * (4 * chunks),
    )  # fmt: skip


@pytest.mark.dist
@pytest.mark.parametrize("schedule", get_args(Schedule))
def test_a_replay_plays_the_schedules_own_order_with_real_messages(
    four_ranks: RankGroup, schedule: Schedule
) -> None:
    plan = replay_plan(schedule)
    visitor = PlanVisitor(
        four_ranks, GPT, dtype="float32", timeout_s=PATIENT_S,
        stage_times=lambda plan: ([TIMES] * plan.num_stages, 4096),
    )  # fmt: skip
    visit = visitor(plan, steps=1, memory=True)
    assert visit.peak_memory_bytes is None  # a replay allocates no layers
    (step,) = visit.steps
    check_order(step, plan)
    for row in step.actions:
        for action in row:
            assert action.end_s - action.start_s >= waited_s(action) * 0.999
        busy = sum(map(waited_s, row))
        assert step.step_s >= busy
    check_causality(step, plan)
    check_breakdown(step, plan)


def check_order(step: MeasuredStep, plan: Plan) -> None:
    """Every rank played exactly the actions of the generated order, in that order."""
    order = schedules.generate(
        plan.schedule, num_ranks=plan.num_ranks, num_chunks=plan.num_chunks,
        num_microbatches=plan.num_microbatches, microbatch_group_size=plan.microbatch_group_size,
    )  # fmt: skip
    for rank in range(plan.num_ranks):
        played = [f"{a.stage}{a.work}{a.microbatch}" for a in step.actions[rank]]
        expected = [str(action) for action in order.actions(rank)]
        assert played == expected


def check_causality(step: MeasuredStep, plan: Plan) -> None:
    """Nothing starts before what it needs has ended on another rank (one clock on one host)."""
    ends = producer_end_s(step, plan)
    checked = 0
    for row in step.actions:
        for action in row:
            needed = ends.get((action.stage, "F" if action.work == "F" else "B", action.microbatch))
            if action.work != "W" and needed is not None:
                assert action.start_s >= needed
                checked += 1
    assert checked > 0


def check_breakdown(step: MeasuredStep, plan: Plan) -> None:
    parts = breakdown(step, plan)
    assert parts is not None
    total = (
        parts.compute + parts.bubble + parts.exposed_transfer + parts.overhead + parts.step_constant
    )
    assert total == pytest.approx(step.rank_s[step.slowest_rank], rel=1e-9)
    row = step.actions[step.slowest_rank]
    assert parts.compute == pytest.approx(sum(a.end_s - a.start_s for a in row), rel=1e-9)
    assert parts.bubble >= 0
    assert parts.exposed_transfer >= 0
    assert parts.step_constant >= 0


@pytest.mark.dist
def test_two_replicas_of_two_ranks_step_together_and_split_their_time(
    four_ranks: RankGroup,
) -> None:
    plan = plan_of("1f1b", ranks=2, chunks=1, microbatches=2, data_parallel=2)
    visit = PlanVisitor(four_ranks, GPT, dtype="float32", timeout_s=PATIENT_S)(
        plan, steps=2, memory=True
    )
    assert len(visit.samples_s) == 2
    assert visit.peak_memory_bytes is not None
    assert len(visit.peak_memory_bytes) == 2
    # Parameters and two Adam moments, and gradients at the peak: at least 4 times the parameters.
    for stage, peak in enumerate(visit.peak_memory_bytes):
        module = models.build_stage(
            GPT, blocks=2, first=stage == 0, last=stage == 1, dtype=torch.float32, device=CPU
        )
        assert peak >= 4 * storage_bytes(list(module.parameters()))
    for step in visit.steps:
        assert len(step.actions) == 2
        check_order(step, plan)
        check_breakdown(step, plan)
        assert min(step.update_s) > 0


# --- one process ----------------------------------------------------------------------------------


def test_the_memory_meter_is_exact_on_known_allocations() -> None:
    kept = [torch.zeros(1000), torch.zeros(24)]

    def work() -> None:
        first = torch.empty(100_000, dtype=torch.uint8)
        second = torch.empty(50_000, dtype=torch.uint8)
        del first
        third = torch.empty(60_000, dtype=torch.uint8)
        del second, third

    static = 4 * (1000 + 24)
    assert storage_bytes([*kept, kept[0][:10]]) == static  # a view is no storage of its own
    assert measure_peak_bytes(work, kept, CPU) == static + 150_000


@pytest.mark.parametrize("seconds", [0.0, 1e-4, 5e-3])
def test_a_wait_never_ends_early(seconds: float) -> None:
    for _ in range(5):
        started = time.perf_counter()
        wait(seconds)
        assert time.perf_counter() - started >= seconds


# --- steps joined from records --------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A rank's records by hand: (stage, work, micro-batch, start, end), and waits."""

    actions: list[tuple[int, str, int, float, float]]
    waits: list[tuple[float, float]]
    start_s: float
    step_s: float

    def answer(self) -> dict[str, Any]:
        return {
            "start_s": self.start_s, "step_s": self.step_s, "update_s": 1.0,
            "actions": self.actions, "waits": self.waits,
        }  # fmt: skip


# Two ranks, one micro-batch. Rank 0: F 100-102, waits 102-109, B 109-112. Rank 1: waits 100-103 for
# the forward that was done at 102, F 103-105, B 105-108; the gradient arrives at 109.
BY_HAND = [
    Row([(0, "F", 0, 100.0, 102.0), (0, "B", 0, 109.0, 112.0)], [(102.0, 109.0)], 100.0, 14.0),
    Row([(1, "F", 0, 103.0, 105.0), (1, "B", 0, 105.5, 108.0)], [(100.0, 103.0)], 100.0, 9.5),
]
HAND_PLAN = make_plan(
    schedule="1f1b", num_ranks=2, num_chunks=1, microbatch_size=1, num_microbatches=1,
    layers_per_stage=(1, 1),
)  # fmt: skip


def hand_step(nodes: list[str]) -> MeasuredStep:
    answers = json.loads(json.dumps([row.answer() for row in BY_HAND]))  # as they come by channel
    return join_ranks(answers, nodes)


def test_a_step_is_split_as_by_hand() -> None:
    step = hand_step(["a", "a"])
    assert (step.step_s, step.slowest_rank) == (14.0, 0)
    parts = breakdown(step, HAND_PLAN)
    assert parts is not None
    # Rank 0: 5 of compute; of its 7 waiting, 6 until rank 1's backward ended at 108; 1 of update.
    assert parts.compute == pytest.approx(5.0)
    assert parts.bubble == pytest.approx(6.0)
    assert parts.exposed_transfer == pytest.approx(1.0)
    assert parts.step_constant == pytest.approx(1.0)
    assert parts.overhead == pytest.approx(1.0)


def test_ranks_of_one_node_share_a_clock_and_others_start_together() -> None:
    late = BY_HAND[1].answer()
    late["start_s"] = 99.0
    shared = join_ranks([BY_HAND[0].answer(), late], ["a", "a"])
    assert shared.actions[0][0] == MeasuredAction(
        rank=0, stage=0, work="F", microbatch=0, start_s=1.0, end_s=3.0
    )
    apart = join_ranks([BY_HAND[0].answer(), late], ["a", "b"])
    assert apart.actions[0][0].start_s == 0.0
    assert apart.actions[1][0].start_s == 4.0


def test_the_reference_product_around_a_step_is_the_mean_of_its_ranks() -> None:
    answers = [
        {**row.answer(), "product_s": seconds}
        for row, seconds in zip(BY_HAND, (1.0, 2.0), strict=True)
    ]
    assert join_ranks(answers, ["a", "a"]).product_s == 1.5
    assert hand_step(["a", "a"]).product_s is None


def test_a_step_without_records_has_no_split() -> None:
    bare = [{"start_s": 0.0, "step_s": 1.0, "update_s": 0.1} for _ in range(2)]
    assert breakdown(join_ranks(bare, ["a", "a"]), HAND_PLAN) is None
