"""A plan on a profile: how long its step takes, where the time goes, what memory it needs.

The step is played action by action in the order that will run (simulator.py); stage times come from
stage_times.py, messages from hops.py, bytes from memory.py. What was assumed rather than measured
is said in words in every estimate.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pptune.bounds import StepBound, step_bound
from pptune.errors import MissingNumber, UsageError
from pptune.estimate import Breakdown, Estimate, Infeasible
from pptune.executors import Executor
from pptune.hops import Links, message_bytes
from pptune.memory import (
    ActivationMemory,
    MemoryParts,
    StaticMemory,
    activation_memory,
    fullest_rank_range,
    peak_bytes,
    peak_memory,
    per_rank,
    rank_parameter_bytes,
    static_memory,
)
from pptune.partition import balanced_layers
from pptune.plan import Plan
from pptune.profiles import Link, Overhead, Profile, Source, weakest
from pptune.schedules import Order, generate
from pptune.simulator import Costs, Hops, Simulation, simulate
from pptune.stage_times import ModelTimes, StageTimes, model_times, stage_times
from pptune.step_constants import constant_costs
from pptune.targets import Target, executor_of

Floats = NDArray[np.float64]

BORDERLINE_RATIO = 0.05
"""A peak within this share of the limit is called borderline: such runs fail now and then."""

_TORCH = (Executor.TORCH_RUNTIME, Executor.TORCH_1F1B)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What holds for every plan of one question."""

    target: Target | None
    """The trainer that runs the plans; null plays them with ideal transfers."""
    ranks_per_node: int | None = None
    """Pipeline ranks on one node; null takes the profile's, and one node where it has none."""
    memory_limit_bytes: int | None = None
    """Per rank; null takes the memory of the profiled device."""
    zero_stage: int = 0
    tensor_parallel: int | None = None
    """Null takes the profile's. Layer times count only for the value they were measured at."""
    context_parallel: int | None = None
    links: tuple[Link, ...] = ()
    """Given on the command line; each replaces the measured links of its scope."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What plans that differ only in schedule, M and N share."""

    costs: Costs
    executor: Executor
    constant_s: Floats
    """Seconds per step besides the actions, of each rank."""
    bound: StepBound
    static: StaticMemory | None
    activation: ActivationMemory | None
    source: Source
    assumptions: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """A plan's step before it is put in words."""

    step_time_s: float
    simulation: Simulation
    inputs: Inputs


class CostModel:
    """Estimates plans on one profile; keeps what plans have in common."""

    def __init__(self, profile: Profile, setting: Setting) -> None:
        """Raises UsageError where the profile was measured under other tensor or context ranks."""
        self.profile = profile
        self.setting = setting
        self._check_parallel()
        self._links = Links(profile, setting.links, setting.ranks_per_node)
        self._times: dict[tuple[int, str], ModelTimes] = {}
        self._inputs: dict[tuple[object, ...], Inputs] = {}
        self._order: tuple[tuple[object, ...], Order] | None = None
        limit = setting.memory_limit_bytes
        self.memory_limit_bytes = profile.machine.memory_bytes if limit is None else limit
        layers = [profile.layer(kind) for kind in ("embedding", "block", "head")]
        self.knows_memory = profile.memory is not None and all(
            layer is not None and layer.parameter_bytes is not None for layer in layers
        )
        """Whether the profile has the parameter sizes and ratios that peak memory takes."""
        self.limits_memory = self.memory_limit_bytes is not None and self.knows_memory
        """Whether a plan can be found not to fit."""

    def estimate(self, plan: Plan) -> Estimate | Infeasible:
        """The plan's estimate; Infeasible where the profile lacks a number that it takes.

        A plan that does not fit in memory has an estimate, with `fits` "no".
        """
        try:
            return self._estimate(self.evaluate(plan), self.peak_bytes(plan), plan)
        except MissingNumber as error:
            return Infeasible(rule=error.rule, reason=str(error))

    def evaluate(self, plan: Plan) -> Evaluation:
        """The plan's step, played without spans. Raises MissingNumber."""
        inputs = self.inputs(plan)
        order = self.order(plan)
        simulation = simulate(order, inputs.costs, inputs.executor)
        return Evaluation(
            step_time_s=simulation.step_time_s + float(inputs.constant_s.max()),
            simulation=simulation,
            inputs=inputs,
        )

    def simulation(self, plan: Plan, *, spans: bool = True) -> Simulation:
        """The plan's step without its constants, by default with every action's start and end."""
        inputs = self.inputs(plan)
        return simulate(self.order(plan), inputs.costs, inputs.executor, spans=spans)

    def costs(self, plan: Plan) -> Costs:
        """What the plan's actions and messages take. Raises MissingNumber."""
        return self.inputs(plan).costs

    def executor(self, plan: Plan) -> Executor:
        """What overlaps with what when the setting's target runs the plan."""
        target = self.setting.target
        return Executor.IDEAL if target is None else executor_of(plan, target)

    def overhead(self, plan: Plan) -> Overhead | None:
        """What the plan's executor adds to bare layer times; None where none was measured."""
        return self._overhead(self.executor(plan))[0]

    def order(self, plan: Plan) -> Order:
        """The plan's actions, rank by rank; the last one asked for is kept."""
        key = (plan.schedule, plan.num_ranks, plan.num_chunks, plan.num_microbatches,
               plan.microbatch_group_size)  # fmt: skip
        if self._order is None or self._order[0] != key:
            order = generate(
                plan.schedule,
                num_ranks=plan.num_ranks,
                num_chunks=plan.num_chunks,
                num_microbatches=plan.num_microbatches,
                microbatch_group_size=plan.microbatch_group_size,
            )
            self._order = (key, order)
        return self._order[1]

    def memory(self, plan: Plan) -> MemoryParts | None:
        """Peak bytes of every rank by what holds them, or None where the profile lacks a number."""
        inputs = self.inputs(plan)
        if inputs.static is None or inputs.activation is None:
            return None
        return peak_memory(
            plan,
            self.order(plan),
            static=inputs.static,
            activation=inputs.activation,
            executor=inputs.executor,
        )

    def peak_bytes(self, plan: Plan) -> Floats | None:
        """Peak bytes of every rank, float64[num_ranks]: the sum of `memory`'s parts."""
        inputs = self.inputs(plan)
        if inputs.static is None or inputs.activation is None:
            return None
        return peak_bytes(
            plan,
            self.order(plan),
            static=inputs.static,
            activation=inputs.activation,
            executor=inputs.executor,
        )

    def surely_fit(self, plans: Sequence[Plan]) -> list[bool | None]:
        """Whether each of `plans`, which differ in N alone, fits; None if only the order tells."""
        inputs, limit = self.inputs(plans[0]), self.memory_limit_bytes
        if inputs.static is None or inputs.activation is None or limit is None:
            return [True] * len(plans)
        found = fullest_rank_range(
            plans[0],
            np.array([plan.microbatch_group_size or 0 for plan in plans]),
            static=inputs.static,
            activation=inputs.activation,
            executor=inputs.executor,
        )
        if found is None:
            return [None] * len(plans)
        return [
            True if high <= limit else False if low > limit else None
            for low, high in zip(*found, strict=True)
        ]

    def fits(
        self, peak_memory_bytes: Floats | None
    ) -> Literal["yes", "borderline", "no", "unknown"]:
        """Whether the fullest rank stays under the memory limit."""
        limit = self.memory_limit_bytes
        if peak_memory_bytes is None or limit is None:
            return "unknown"
        fullest = float(peak_memory_bytes.max())
        if fullest > limit:
            return "no"
        return "borderline" if fullest > limit * (1 - BORDERLINE_RATIO) else "yes"

    def layer_costs(self, microbatch_size: int, recompute: str) -> ModelTimes:
        """Times of embedding, block and head at this size. Raises MissingNumber."""
        key = (microbatch_size, recompute)
        if key not in self._times:
            self._times[key] = model_times(self.profile, microbatch_size, recompute)
        return self._times[key]

    def balanced_layers(
        self,
        num_ranks: int,
        num_chunks: int,
        *,
        placement: str,
        microbatch_size: int,
        recompute: str = "none",
        allow_empty_stages: bool = False,
    ) -> tuple[int, ...]:
        """Blocks per stage, balanced by the layers' times at this size. Raises MissingNumber."""
        times = self.layer_costs(microbatch_size, recompute)
        return balanced_layers(
            self.profile.model.num_layers,
            num_ranks,
            num_chunks,
            embedding_s=times.embedding.forward_s + times.embedding.backward_s,
            block_s=times.block.forward_s + times.block.backward_s,
            head_s=times.head.forward_s + times.head.backward_s,
            placement=placement,
            allow_empty_stages=allow_empty_stages,
        )

    def inputs(self, plan: Plan) -> Inputs:
        """The numbers that the plan's step is made of. Raises MissingNumber."""
        executor = self.executor(plan)
        key = (plan.layers_per_stage, plan.num_ranks, plan.placement, plan.microbatch_size,
               plan.recompute, plan.data_parallel, executor, plan.splits_backward)  # fmt: skip
        found = self._inputs.get(key)
        if found is None:
            found = self._inputs[key] = self._compose(plan, executor)
        return found

    def _check_parallel(self) -> None:
        measured = self.profile.parallel
        for name, asked, at in (
            ("tensor", self.setting.tensor_parallel, measured.tensor),
            ("context", self.setting.context_parallel, measured.context),
        ):
            if asked is not None and asked != at:
                raise UsageError(
                    f"the profile's layer times hold for {name}-parallel {at}, not {asked}; "
                    f"import times measured at --{name}-parallel {asked}, or ask for {at}"
                )

    def _compose(self, plan: Plan, executor: Executor) -> Inputs:
        times = self.layer_costs(plan.microbatch_size, plan.recompute)
        stages = stage_times(
            times, plan.layers_per_stage, first_stage_splits=executor not in _TORCH
        )
        if plan.splits_backward and stages.backward_input_s is None:
            raise MissingNumber(
                f"{plan.schedule} plays input and weight gradients apart, and the profile has no "
                "separate times for them; profile again, or use a schedule with full backwards",
                rule="split-times-not-measured",
            )
        overhead, assumptions = self._overhead(executor)
        sources: list[Source] = [times.source]
        if overhead is not None:
            sources.append(overhead.source)
        message = 0
        if plan.num_ranks > 1:
            message = message_bytes(self.profile, times.block.boundary_bytes, plan.microbatch_size)
        forward_hops, backward_hops, link_source = self._links.hops(
            plan.num_ranks,
            plan.num_chunks,
            plan.placement,
            num_bytes=message,
            wake_s=0.0 if overhead is None else overhead.hop_s,
        )
        slowdown = self.profile.interference_ratio
        if slowdown and executor is not Executor.MEGATRON_EXPOSED:
            stages = slowed(stages, forward_hops, backward_hops, slowdown)
        elif slowdown is None and plan.num_ranks > 1:
            assumptions.append("how far messages slow compute down was not measured: counted as 0")
        parameter_bytes = rank_parameter_bytes(plan, self.profile)
        constants = constant_costs(plan, self.profile, overhead, parameter_bytes)
        costs = Costs(
            forward_s=stages.forward_s,
            backward_s=stages.backward_s,
            backward_input_s=stages.backward_input_s,
            backward_weight_s=stages.backward_weight_s,
            overhead_s=_overhead_by_work(overhead),
            forward_hops=forward_hops,
            backward_hops=backward_hops,
        )
        return Inputs(
            costs=costs,
            executor=executor,
            constant_s=constants.seconds,
            bound=step_bound(plan, costs, float(constants.seconds.max())),
            static=static_memory(plan, self.profile, zero_stage=self.setting.zero_stage),
            activation=activation_memory(times, message_bytes=message),
            source=weakest([*sources, link_source, constants.source]),
            assumptions=(*times.assumptions, *assumptions, *constants.assumptions),
        )

    def _overhead(self, executor: Executor) -> tuple[Overhead | None, list[str]]:
        """The executor's own overhead, or another's with the assumption said."""
        measured = self.profile.overheads
        if executor in measured:
            return measured[executor], []
        for other in _TORCH:
            if other in measured:
                return measured[other], [
                    f"the overhead of {executor} was not measured: taken from {other}"
                ]
        return None, [f"the overhead per action of {executor} was not measured: counted as 0"]

    def _estimate(self, evaluation: Evaluation, peaks: Floats | None, plan: Plan) -> Estimate:
        simulation, inputs = evaluation.simulation, evaluation.inputs
        step_time_s = evaluation.step_time_s
        costs = inputs.costs
        assert costs.backward_s is not None
        work_s = plan.num_microbatches * per_rank(plan, costs.forward_s + costs.backward_s)
        return Estimate(
            step_time_s=step_time_s,
            longest_rank_span_s=simulation.longest_rank_span_s,
            bubble_ratio=float(simulation.bubble_s.sum())
            / (plan.num_ranks * simulation.step_time_s)
            if simulation.step_time_s > 0
            else 0.0,
            ideal_time_s=float(work_s.max()),
            breakdown_s=breakdown(simulation, inputs.constant_s, step_time_s),
            peak_memory_bytes=None if peaks is None else tuple(round(peak) for peak in peaks),
            fits=self.fits(peaks),
            tokens_per_s=self._tokens_per_s(plan, step_time_s),
            mfu=self._mfu(plan, step_time_s),
            source=inputs.source,
            assumptions=inputs.assumptions,
        )

    def _tokens_per_s(self, plan: Plan, step_time_s: float) -> float | None:
        if step_time_s <= 0:
            return None
        return plan.global_batch_size * self.profile.seq_len / step_time_s

    def _mfu(self, plan: Plan, step_time_s: float) -> float | None:
        """Model FLOP/s over the dense peak of all devices (arXiv 2204.02311, app. B)."""
        flops = self.profile.model.flops_per_sequence()
        peak = self.profile.machine.peak_flops_per_s
        if flops is None or peak is None or step_time_s <= 0:
            return None
        parallel = self.profile.parallel
        num_devices = plan.num_ranks * plan.data_parallel * parallel.tensor * parallel.context
        return plan.global_batch_size * flops / (step_time_s * peak * num_devices)


def breakdown(simulation: Simulation, constant_s: Floats, step_time_s: float) -> Breakdown:
    """The busiest rank's step, split; a rank that waits for others' constants counts it as bubble.

    The busiest rank is the one with the most compute, overhead and constants of its own.
    """
    own_s = simulation.busy_s + simulation.overhead_s + constant_s
    rank = int(own_s.argmax())
    compute, overhead = float(simulation.busy_s[rank]), float(simulation.overhead_s[rank])
    exposed, constant = float(simulation.exposed_transfer_s[rank]), float(constant_s[rank])
    return Breakdown(
        compute=compute,
        bubble=max(0.0, step_time_s - compute - overhead - exposed - constant),
        exposed_transfer=exposed,
        overhead=overhead,
        step_constant=constant,
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
