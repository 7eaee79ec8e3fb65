"""Where a plan's step goes: its parts, and what each imperfection costs by playing without it."""

from collections.abc import Callable

import numpy as np
from msgspec.structs import replace as replaced
from numpy.typing import NDArray

from pptune.cost_model import CostModel
from pptune.cost_model.stage_times import ModelTimes
from pptune.curves import usable_points
from pptune.estimate import Estimate
from pptune.explanation import HeadLoss, StepShare
from pptune.plan import Plan
from pptune.simulator import Costs, simulate

Floats = NDArray[np.float64]

WORTH_SAYING_RATIO = 1e-3
"""A split of the layers that is better by less than this is not worth a sentence."""


def step_share(model: CostModel, role: str, plan: Plan, estimate: Estimate) -> StepShare:
    """Where the plan's step goes beyond the five parts of its estimate."""
    return StepShare(
        role=role,
        plan=plan,
        estimate=estimate,
        chunk_cost_s=chunk_cost_s(model, plan),
        small_size_loss_s=_small_size_loss_s(model, plan),
        imbalance_loss_s=_saved_s(model, plan, levelled),
    )


def parts_s(model: CostModel, plan: Plan, estimate: Estimate) -> dict[str, float]:
    """The estimate's parts with the per-chunk cost taken out of the step constant."""
    parts = estimate.breakdown_s
    chunk_s = chunk_cost_s(model, plan)
    return {
        "compute": parts.compute,
        "bubble": parts.bubble,
        "exposed-transfer": parts.exposed_transfer,
        "overhead": parts.overhead,
        "chunk-cost": chunk_s,
        "step-constant": parts.step_constant - chunk_s,
    }


def chunk_cost_s(model: CostModel, plan: Plan) -> float:
    """Per-chunk fixed cost x V: paid once per step for every chunk of a rank."""
    overhead = model.overhead(plan)
    return 0.0 if overhead is None else overhead.chunk_s * plan.num_chunks


def head_loss(model: CostModel, plan: Plan) -> HeadLoss | None:
    """What the head on the last stage costs the pipeline; None where it costs nothing.

    Spreading the head's work over all ranks is what vocabulary parallelism does (arXiv 2411.05288).
    """
    times = model.layer_costs(plan.microbatch_size, plan.recompute)
    head_s = times.head.forward_s + times.head.backward_s
    block_s = times.block.forward_s + times.block.backward_s
    if head_s <= 0 or plan.num_ranks == 1:
        return None
    step_s = model.evaluate(plan).step_time_s
    loss_s = _saved_s(model, plan, lambda costs: _head_spread(costs, times))
    layers, layers_s = _best_layers(model, plan, step_s)
    return HeadLoss(
        loss_s=loss_s,
        loss_ratio=loss_s / step_s if step_s > 0 else 0.0,
        head_blocks=head_s / block_s if block_s > 0 else 0.0,
        best_layers=layers,
        best_layers_step_time_s=layers_s,
    )


def equal_stages_bubble_ratio(model: CostModel, plan: Plan) -> float:
    """Idle / total over all ranks if every stage took the same time."""
    inputs = model.inputs(plan)
    played = simulate(model.order(plan), levelled(inputs.costs), inputs.executor)
    return float(played.bubble_s.sum()) / (plan.num_ranks * played.step_time_s)


def levelled(costs: Costs) -> Costs:
    """The same work with every stage taking the same time."""
    return _with_stages(costs, lambda _, seconds: np.full(len(seconds), seconds.mean()))


def _head_spread(costs: Costs, times: ModelTimes) -> Costs:
    """The head's work taken from the last stage and shared out among all stages alike."""

    def spread(name: str, seconds: Floats) -> Floats:
        head_s = getattr(times.head, name) or 0.0
        shared = seconds + head_s / len(seconds)
        shared[-1] = max(shared[-1] - head_s, 0.0)
        return shared

    return _with_stages(costs, spread)


def _with_stages(costs: Costs, change: Callable[[str, Floats], Floats]) -> Costs:
    def changed(name: str, seconds: Floats | None) -> Floats | None:
        return None if seconds is None else change(name, seconds)

    return replaced(
        costs,
        forward_s=change("forward_s", costs.forward_s),
        backward_s=changed("backward_s", costs.backward_s),
        backward_input_s=changed("backward_input_s", costs.backward_input_s),
        backward_weight_s=changed("backward_weight_s", costs.backward_weight_s),
    )


def _saved_s(model: CostModel, plan: Plan, change: Callable[[Costs], Costs]) -> float:
    """Step time saved by a change of the costs; never below 0."""
    inputs = model.inputs(plan)
    order = model.order(plan)
    as_it_is = simulate(order, inputs.costs, inputs.executor).step_time_s
    changed = simulate(order, change(inputs.costs), inputs.executor).step_time_s
    return max(as_it_is - changed, 0.0)


def _small_size_loss_s(model: CostModel, plan: Plan) -> float | None:
    """The slowest rank's compute beyond its layers' best rate per sequence among measured sizes."""
    layer = model.profile.layer("block", plan.recompute) or model.profile.layer("block")
    if layer is None:
        return None
    sizes = [point.microbatch_size for point in usable_points(layer)]
    best = [_rates(model.layer_costs(size, plan.recompute), size) for size in sizes]
    own = _rates(model.layer_costs(plan.microbatch_size, plan.recompute), plan.microbatch_size)
    embedding_s, block_s, head_s = (
        max(rate - min(rates), 0.0)
        for rate, rates in zip(own, zip(*best, strict=True), strict=True)
    )
    evaluation = model.evaluate(plan)
    simulation, constant_s = evaluation.simulation, evaluation.inputs.constant_s
    busiest = int((simulation.busy_s + simulation.overhead_s + constant_s).argmax())
    stages = plan.stages_of(busiest)
    per_sequence_s = block_s * float(sum(plan.layers_per_stage[stage] for stage in stages))
    per_sequence_s += embedding_s if 0 in stages else 0.0
    per_sequence_s += head_s if plan.num_stages - 1 in stages else 0.0
    return float(per_sequence_s * plan.microbatch_size * plan.num_microbatches)


def _rates(times: ModelTimes, size: int) -> tuple[float, float, float]:
    """Seconds per sequence of embedding, block and head, forward and backward."""
    embedding, block, head = (
        (layer.forward_s + layer.backward_s) / size
        for layer in (times.embedding, times.block, times.head)
    )
    return embedding, block, head


def _best_layers(
    model: CostModel, plan: Plan, step_s: float
) -> tuple[tuple[int, ...] | None, float | None]:
    """The balanced split and its step time where it is shorter than the plan's own."""
    layers = model.balanced_layers(
        plan.num_ranks,
        plan.num_chunks,
        placement=plan.placement,
        microbatch_size=plan.microbatch_size,
        recompute=plan.recompute,
        allow_empty_stages=min(plan.layers_per_stage) == 0,
    )
    balanced_s = model.evaluate(replaced(plan, layers_per_stage=layers)).step_time_s
    if balanced_s < step_s * (1 - WORTH_SAYING_RATIO):
        return layers, balanced_s
    return None, None
