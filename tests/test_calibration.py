"""Calibration gives back the overheads of a machine that was made up, from steps it plays."""

import dataclasses
import itertools
import math

import msgspec
import pytest

from pptune.calibration import (
    CalibrationRun,
    apply_calibration,
    calibration_plans,
    recalibrate,
    run_calibration,
)
from pptune.calibration.correction import surely_corrected
from pptune.calibration.layer_times import in_pipeline
from pptune.cost_model import CostModel, Setting
from pptune.executors import Executor
from pptune.measured_step import MeasuredAction, MeasuredStep, Visit
from pptune.plan import Plan, make_plan
from pptune.profiles import LayerPoint, Overhead, Profile, Reference, StepConstants
from pptune.schedules.action import Work
from pptune.targets import illegal, parse_target
from tests.synthetic import synthetic_profile, uniform_link

TORCH = parse_target("torch")
SETTING = Setting(target=TORCH)
PER_ACTION = Overhead(forward_s=0.3e-3, backward_s=0.5e-3)
TRUTH = {Executor.TORCH_1F1B: PER_ACTION, Executor.TORCH_RUNTIME: PER_ACTION}
CONSTANTS = StepConstants(fixed_s=2e-3, per_parameter_byte_s=1e-9)


def machine(slower: float = 1.0, sizes: tuple[int, ...] = (1, 2, 4, 8)) -> Profile:
    """What the made-up machine really takes; `slower` than its bare layers."""
    return synthetic_profile(
        sizes=sizes,
        num_layers=8, block=5e-3 * slower, head=6e-3 * slower, links=(uniform_link(0.1e-3, 4e9),),
        overheads=dict(TRUTH), step_constants=CONSTANTS, parameter_bytes=1 << 20,
        end_parameter_bytes=1 << 21, boundary_bytes=1 << 16, interference_ratio=0.0,
    )  # fmt: skip


def bare(profile: Profile) -> Profile:
    """What a profiler knows before it has calibrated."""
    return msgspec.structs.replace(
        profile, overheads={}, step_constants=None, interference_ratio=None
    )


def played(plan: Plan, truth: CostModel) -> MeasuredStep:
    """A step of the machine as ranks would record it: the overhead lies before each action."""
    spans = truth.simulation(plan, spans=True).spans
    assert spans is not None
    rows: list[tuple[MeasuredAction, ...]] = []
    waits: list[tuple[tuple[float, float], ...]] = []
    for rank in range(plan.num_ranks):
        own = [index for index in range(len(spans.rank)) if spans.rank[index] == rank]
        actions = []
        for index in own:
            work = Work(int(spans.work[index]))
            extra = PER_ACTION.forward_s if work is Work.FORWARD else PER_ACTION.backward_s
            actions.append(
                MeasuredAction(
                    rank=rank, stage=int(spans.stage[index]), work=work.letter,
                    microbatch=int(spans.microbatch[index]),
                    start_s=float(spans.start_s[index]) + extra, end_s=float(spans.end_s[index]),
                )
            )  # fmt: skip
        begins = [float(spans.start_s[index]) for index in own]
        ends = [0.0, *(action.end_s for action in actions)]
        waits.append(
            tuple((end, begin) for end, begin in zip(ends, begins, strict=False) if begin > end)
        )
        rows.append(tuple(actions))
    estimate = truth.evaluate(plan)
    update = [float(value) for value in estimate.inputs.constant_s]
    own_s = [row[-1].end_s + seconds for row, seconds in zip(rows, update, strict=True)]
    return MeasuredStep(
        step_s=estimate.step_time_s, slowest_rank=own_s.index(max(own_s)),
        update_s=tuple(update), rank_s=tuple(own_s),
        actions=tuple(rows), waits=tuple(waits),
    )  # fmt: skip


def calibrated(truth: Profile, known: Profile) -> Profile:
    model = CostModel(truth, SETTING)
    runs = run_calibration(
        calibration_plans(known, 2),
        lambda plan, steps, memory: Visit(samples_s=(), steps=(played(plan, model),) * steps),
        budget_s=1e-9,
        on_visit=lambda share, plan: None,
    )
    return apply_calibration(known, runs)


def other_plans() -> list[Plan]:
    return [
        make_plan(
            schedule="1f1b" if chunks == 1 else "interleaved", num_ranks=2, num_chunks=chunks,
            microbatch_size=size, num_microbatches=8,
            layers_per_stage=(4 // chunks,) * 2 * chunks,
        )
        for chunks, size in itertools.product((1, 2, 4), (1, 2, 4))
    ]  # fmt: skip


@pytest.mark.parametrize("slower", [1.0, 1.2])
def test_other_plans_are_predicted_once_calibrated(slower: float) -> None:
    truth = CostModel(machine(slower), SETTING)
    model = CostModel(calibrated(machine(slower), bare(machine())), SETTING)
    for plan in other_plans():
        expected = truth.evaluate(plan).step_time_s
        assert model.evaluate(plan).step_time_s == pytest.approx(expected, rel=0.02), plan.label


def test_without_calibration_they_are_not() -> None:
    truth, known = CostModel(machine(1.2), SETTING), CostModel(bare(machine()), SETTING)
    for plan in other_plans():
        assert known.evaluate(plan).step_time_s < 0.9 * truth.evaluate(plan).step_time_s


def test_step_constants_come_out_as_a_line_over_parameters() -> None:
    constants = calibrated(machine(), bare(machine())).step_constants
    assert constants is not None
    assert constants.fixed_s == pytest.approx(CONSTANTS.fixed_s, rel=0.05)
    assert constants.per_parameter_byte_s == pytest.approx(CONSTANTS.per_parameter_byte_s, rel=0.05)


@pytest.mark.parametrize("sizes", [(1, 2, 4, 8), (1, 2, 3, 4, 6, 8)])
def test_layers_are_scaled_to_what_they_take_in_the_pipeline(sizes: tuple[int, ...]) -> None:
    """At sizes that none of the runs had, too."""
    known = bare(machine(sizes=sizes))
    truth = CostModel(machine(1.2), SETTING)
    plans = calibration_plans(known, 2)
    assert {plan.microbatch_size for plan in plans} == {1, 2, 4, 8}
    runs = [CalibrationRun(plan=plan, steps=(played(plan, truth),)) for plan in plans]
    scaled = in_pipeline(known, runs).layer("block")
    wanted = machine(1.2, sizes).layer("block")
    assert scaled is not None
    assert wanted is not None
    for got, expected in zip(scaled.points, wanted.points, strict=True):
        assert got.forward_s == pytest.approx(expected.forward_s, rel=1e-6)
        assert got.backward_s == pytest.approx(expected.backward_s, rel=1e-6)


def test_a_size_that_ran_while_the_machine_was_slow_gets_no_factor_of_its_own() -> None:
    known = bare(machine())
    truths = {size: CostModel(machine(1.3 if size == 4 else 1.0), SETTING) for size in (1, 2, 4, 8)}
    runs = [
        CalibrationRun(plan=plan, steps=(played(plan, truths[plan.microbatch_size]),) * 3)
        for plan in calibration_plans(known, 2)
    ]
    scaled, before = in_pipeline(known, runs).layer("block"), known.layer("block")
    assert scaled is not None
    assert before is not None
    factors = [
        (after.forward_s or 0.0) / (point.forward_s or math.inf)
        for after, point in zip(scaled.points, before.points, strict=True)
    ]
    assert factors == pytest.approx([factors[0]] * 4)
    assert 1.0 <= factors[0] < 1.15


@pytest.mark.parametrize("slow_share", [0.2, 0.7])
def test_layers_compare_with_the_reference_product_however_long_the_machine_was_slow(
    slow_share: float,
) -> None:
    known = msgspec.structs.replace(
        bare(machine()), reference=Reference(matrix_size=640, dtype="float32", seconds=77.0)
    )
    fast, slow = CostModel(machine(1.2), SETTING), CostModel(machine(1.2 * 1.4), SETTING)
    runs, steps = [], 0
    for plan in calibration_plans(known, 2):
        own = []
        for _ in range(10):
            steps += 1
            is_slow = steps % 10 < 10 * slow_share
            step = played(plan, slow if is_slow else fast)
            own.append(dataclasses.replace(step, product_s=14e-3 if is_slow else 10e-3))
        runs.append(CalibrationRun(plan=plan, steps=tuple(own)))
    found = in_pipeline(known, runs)
    block, wanted = found.layer("block"), machine(1.2).layer("block")
    assert block is not None
    assert wanted is not None
    assert found.reference is not None
    assert found.reference.seconds == pytest.approx((10 + 4 * slow_share) * 1e-3, rel=0.05)
    for point, expected in zip(block.points, wanted.points, strict=True):
        assert point.forward_s is not None
        assert expected.forward_s is not None
        assert point.forward_s / found.reference.seconds == pytest.approx(
            expected.forward_s / 10e-3, rel=1e-6
        )


def test_plans_that_calibrated_are_named_legal_and_avoid_those_to_be_judged() -> None:
    first = calibration_plans(machine(), 2)
    again = calibration_plans(machine(), 2, avoid=first)
    assert not {plan.label for plan in first} & {plan.label for plan in again}
    assert all(illegal(plan, TORCH) is None for plan in first + again)
    labels = {plan.label for plan in calibration_plans(bare(machine()), 2)}
    assert set(calibrated(machine(), bare(machine())).calibration_plans) == labels


def test_recalibration_moves_overheads_towards_validated_steps() -> None:
    truth = CostModel(machine(), SETTING)
    wrong = msgspec.structs.replace(
        machine(),
        overheads={name: Overhead(forward_s=0.0, backward_s=0.0) for name in TRUTH},
    )
    plans = other_plans()
    better = recalibrate(wrong, {plan: truth.evaluate(plan).step_time_s for plan in plans[::2]})
    model = CostModel(better, SETTING)
    for plan in plans[1::2]:
        expected = truth.evaluate(plan).step_time_s
        assert model.evaluate(plan).step_time_s == pytest.approx(expected, rel=0.02), plan.label
    assert any("corrected by" in text for text in better.warnings)
    assert {plan.label for plan in plans[::2]} <= set(better.calibration_plans)


def test_a_correction_is_no_larger_than_what_plans_agree_on() -> None:
    """Each plan ran at the machine's speed of its own moment."""
    truth = CostModel(machine(), SETTING)
    steps_s = {plan: truth.evaluate(plan).step_time_s for plan in other_plans()[::2]}
    known, executor = bare(machine()), Executor.TORCH_RUNTIME

    def correction_s(measured: dict[Plan, float], recorded: Overhead) -> float:
        own = {plan: each for plan, each in measured.items() if truth.executor(plan) is executor}
        return (
            surely_corrected(known, CONSTANTS, executor, recorded, own, 5e-3).forward_s
            - recorded.forward_s
        )

    uneven = {
        plan: seconds * factor
        for (plan, seconds), factor in zip(
            steps_s.items(), itertools.cycle((0.95, 1.05)), strict=False
        )
    }
    assert abs(correction_s(uneven, PER_ACTION)) < 1e-9
    missing = Overhead(forward_s=0.0, backward_s=0.2e-3)  # 0.3 ms less of each
    assert correction_s(steps_s, missing) == pytest.approx(0.3e-3, rel=0.1)


def test_what_a_call_takes_is_charged_to_actions_and_not_to_layers() -> None:
    known = bare(machine())
    call_s = {"call_forward": (0.2e-3,), "call_backward": (0.4e-3,)}

    def with_calls(point: LayerPoint) -> LayerPoint:
        return msgspec.structs.replace(point, samples_s={**point.samples_s, **call_s})

    known = msgspec.structs.replace(
        known,
        layers=tuple(
            msgspec.structs.replace(layer, points=tuple(map(with_calls, layer.points)))
            for layer in known.layers
        ),
    )
    charged = Overhead(
        forward_s=PER_ACTION.forward_s + 0.2e-3, backward_s=PER_ACTION.backward_s + 0.4e-3
    )
    truth = msgspec.structs.replace(machine(), overheads=dict.fromkeys(TRUTH, charged))
    found = calibrated(truth, known)
    for overhead in found.overheads.values():
        assert overhead.forward_s == pytest.approx(charged.forward_s, rel=0.02)
        assert overhead.backward_s == pytest.approx(charged.backward_s, rel=0.02)
    block, wanted = found.layer("block"), truth.layer("block")
    assert block is not None
    assert wanted is not None
    for got, expected in zip(block.points, wanted.points, strict=True):
        assert got.forward_s == pytest.approx(expected.forward_s, rel=0.01)
