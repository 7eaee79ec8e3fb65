"""What a plan's step is made of: stage times, messages, overheads and constants put together.

Nothing is played here. Plans that differ only in schedule, M and N share the result.
"""

from functools import cached_property

import msgspec
import numpy as np
from numpy.typing import NDArray

from pptune.cost_model.bounds import StepBound, step_bound
from pptune.cost_model.hops import Links, message_bytes
from pptune.cost_model.memory import (
    ActivationMemory,
    StaticMemory,
    activation_memory,
    layer_parameter_bytes,
    per_rank,
    static_memory,
)
from pptune.cost_model.stage_sums import stage_sums
from pptune.cost_model.stage_times import ModelTimes, StageTimes, layer_seconds, stage_times
from pptune.cost_model.step_constants import constant_costs
from pptune.errors import MissingNumber
from pptune.executors import Executor
from pptune.plan import Plan
from pptune.profiles import Overhead, Profile, Source, weakest
from pptune.simulator import Costs, Hops

Floats = NDArray[np.float64]

_TORCH = (Executor.TORCH_RUNTIME, Executor.TORCH_RUNTIME_SERIAL, Executor.TORCH_1F1B)


class Inputs(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """What plans that differ only in schedule, M and N share."""

    plan: Plan
    """One of them."""
    costs: Costs
    executor: Executor
    constant_s: Floats
    """Seconds per step besides the actions, of each rank."""
    longest_constant_s: float
    static: StaticMemory | None
    activation: ActivationMemory | None
    source: Source
    assumptions: tuple[str, ...]

    @cached_property
    def bound(self) -> StepBound:
        """What no step of these plans beats."""
        return step_bound(self.plan, self.costs, self.longest_constant_s)


class Surroundings(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What plans share whatever their layers, schedule, M and N."""

    executor: Executor
    per_layer: Floats
    """What `layer_seconds` gave and, where known, a row of parameter bytes."""
    knows_parameters: bool
    overhead: Overhead | None
    overhead_s: Floats
    """Seconds per action by Work: forward, backward, input part, weight part."""
    forward_hops: Hops
    backward_hops: Hops
    slowdown: float
    """How much longer compute takes while a stage's messages move, as a ratio; 0 for no longer."""
    activation: ActivationMemory | None
    source: Source
    assumptions: tuple[str, ...]


def surroundings(
    plan: Plan, profile: Profile, *, executor: Executor, times: ModelTimes, links: Links
) -> Surroundings:
    """The numbers around a plan's layers when `executor` runs it.

    `times` are those of the plan's micro-batch size and recompute. Raises MissingNumber where the
    profile lacks a link or the size of a message.
    """
    overhead, assumptions = overhead_of(profile, executor)
    sources = [times.source] if overhead is None else [times.source, overhead.source]
    message = 0
    if plan.num_ranks > 1:
        message = message_bytes(profile, times.block.boundary_bytes, plan.microbatch_size)
    forward_hops, backward_hops, link_source = links.hops(
        plan.num_ranks,
        plan.num_chunks,
        plan.placement,
        num_bytes=message,
        wake_s=0.0 if overhead is None else overhead.hop_s,
    )
    assumptions += links.assumptions(plan.num_ranks)
    per_layer, parameter_bytes = layer_seconds(times), layer_parameter_bytes(profile)
    if parameter_bytes is not None:
        per_layer = np.concatenate([per_layer, parameter_bytes])
    slowdown = profile.interference_ratio
    if slowdown is None and plan.num_ranks > 1:
        assumptions.append("how far messages slow compute down was not measured: counted as 0")
    return Surroundings(
        executor=executor,
        per_layer=per_layer,
        knows_parameters=parameter_bytes is not None,
        overhead=overhead,
        overhead_s=_overhead_by_work(overhead),
        forward_hops=forward_hops,
        backward_hops=backward_hops,
        slowdown=0.0 if executor is Executor.MEGATRON_EXPOSED else slowdown or 0.0,
        activation=activation_memory(times, message_bytes=message),
        source=weakest([*sources, link_source]),
        assumptions=(*times.assumptions, *assumptions),
    )


def compose(
    plan: Plan, profile: Profile, around: Surroundings, *, links: Links, zero_stage: int = 0
) -> Inputs:
    """The numbers that a plan's step is made of. Raises MissingNumber where the profile lacks split
    times or a link."""
    sums = stage_sums(around.per_layer, plan.layers_per_stage)
    parameter_bytes = None
    if around.knows_parameters:
        sums, parameter_bytes = sums[:-1], per_rank(plan, sums[-1])
    stages = stage_times(sums, first_stage_splits=around.executor not in _TORCH)
    if plan.splits_backward and stages.backward_input_s is None:
        raise MissingNumber(
            f"{plan.schedule} plays input and weight gradients apart, and the profile has no "
            "separate times for them; profile again, or use a schedule with full backwards",
            rule="split-times-not-measured",
        )
    if around.slowdown:
        stages = slowed(stages, around.forward_hops, around.backward_hops, around.slowdown)
    constants = constant_costs(plan, profile, around.overhead, parameter_bytes)
    constant_s, assumptions = constants.seconds, (*around.assumptions, *constants.assumptions)
    if profile.model.tie_word_embeddings and plan.num_ranks > 1:
        constant_s = constant_s + _tied_exchange_s(plan, profile, links)
        assumptions = (
            *around.assumptions,
            "tied embeddings: first and last stage exchange the gradient over their link",
            *constants.assumptions,
        )
    return Inputs(
        plan=plan,
        costs=Costs(
            forward_s=stages.forward_s,
            backward_s=stages.backward_s,
            backward_input_s=stages.backward_input_s,
            backward_weight_s=stages.backward_weight_s,
            overhead_s=around.overhead_s,
            forward_hops=around.forward_hops,
            backward_hops=around.backward_hops,
        ),
        executor=around.executor,
        constant_s=constant_s,
        longest_constant_s=max(constant_s.tolist()),
        static=static_memory(plan, profile, parameter_bytes, zero_stage=zero_stage),
        activation=around.activation,
        source=weakest([around.source, constants.source]),
        assumptions=assumptions,
    )


def slowed(stages: StageTimes, forward_hops: Hops, backward_hops: Hops, ratio: float) -> StageTimes:
    """Stage times where compute takes 1 + `ratio` as long while the stage's messages move.

    In the steady state one message arrives and one leaves per action; weight gradients send none.
    """

    def stretched(seconds: Floats | None, wire_s: Floats) -> Floats | None:
        if seconds is None:
            return None
        moving_s = np.zeros(len(seconds))
        moving_s[1:] += wire_s
        moving_s[:-1] += wire_s
        return np.asarray(seconds + ratio * np.minimum(seconds, moving_s))

    forward_s = stretched(stages.forward_s, forward_hops.wire_s)
    backward_s = stretched(stages.backward_s, backward_hops.wire_s)
    assert forward_s is not None
    assert backward_s is not None
    return StageTimes(
        forward_s=forward_s,
        backward_s=backward_s,
        backward_input_s=stretched(stages.backward_input_s, backward_hops.wire_s),
        backward_weight_s=stages.backward_weight_s,
    )


def _overhead_by_work(overhead: Overhead | None) -> Floats:
    """Seconds per action by Work: forward, backward, input part, weight part."""
    if overhead is None:
        return np.zeros(4)
    return np.array([overhead.forward_s, overhead.backward_s, overhead.backward_s,
                     overhead.backward_s])  # fmt: skip


def _tied_exchange_s(plan: Plan, profile: Profile, links: Links) -> Floats:
    """Seconds of the ranks that hold one shared weight's two copies to add their gradients."""
    seconds = np.zeros(plan.num_ranks)
    first, last = plan.rank_of(0), plan.rank_of(plan.num_stages - 1)
    embedding = profile.layer("embedding")
    if first != last and embedding is not None and embedding.parameter_bytes is not None:
        link = links.between(last, first, num_ranks=plan.num_ranks)
        memory = profile.memory
        ratio = 1.0 if memory is None else memory.gradient_bytes_per_parameter_byte
        num_bytes = embedding.parameter_bytes * ratio
        seconds[[first, last]] = link.latency_s + num_bytes / link.bytes_per_s
    return seconds


def overhead_of(profile: Profile, executor: Executor) -> tuple[Overhead | None, list[str]]:
    """The executor's own overhead, or another's with the assumption said."""
    measured = profile.overheads
    if executor in measured:
        return measured[executor], []
    for other in _TORCH:
        if other in measured:
            return measured[other], [
                f"the overhead of {executor} was not measured: taken from {other}"
            ]
    return None, [f"the overhead per action of {executor} was not measured: counted as 0"]
