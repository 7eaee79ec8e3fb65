"""A plan on a profile: how long its step takes, where the time goes, what memory it needs.

The step is played action by action in the order that will run (simulator); composition.py puts its
costs together, memory.py its bytes. What was assumed rather than measured is said in words in every
estimate.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from pptune.cost_model.composition import Inputs, Surroundings, compose, overhead_of, surroundings
from pptune.cost_model.hops import Links
from pptune.cost_model.memory import (
    MemoryParts,
    fullest_rank_range,
    peak_bytes,
    peak_memory,
    per_rank,
)
from pptune.cost_model.partition import balanced_layers
from pptune.cost_model.stage_times import ModelTimes, model_times
from pptune.errors import MissingNumber, UsageError
from pptune.estimate import Breakdown, Estimate, Infeasible
from pptune.executors import Executor
from pptune.plan import Plan
from pptune.profiles import Link, Overhead, Profile
from pptune.schedules import Order, generate
from pptune.schedules.placement import Placement
from pptune.simulator import Costs, Simulation, simulate
from pptune.targets import Target, executor_of

Floats = NDArray[np.float64]

BORDERLINE_RATIO = 0.05
"""A peak within this share of the limit is called borderline: such runs fail now and then."""

MAX_KEPT_ACTIONS = 2**21
"""Orders are kept while they have no more actions together; one takes 20 to 50 bytes."""

MAX_KEPT_INPUTS = 2**12
"""No more inputs are kept at once: plans that all differ in their layers share none."""


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


class Evaluation(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A plan's step before it is put in words."""

    step_time_s: float
    simulation: Simulation
    inputs: Inputs
    order: Order


class CostModel:
    """Estimates plans on one profile; keeps what plans have in common."""

    def __init__(self, profile: Profile, setting: Setting) -> None:
        """Raises UsageError where the profile was measured under other tensor or context ranks."""
        self.profile = profile
        self.setting = setting
        self._check_parallel()
        self._links = Links(profile, setting.links, setting.ranks_per_node)
        self._times: dict[tuple[int, str], ModelTimes] = {}
        self._surroundings: dict[tuple[object, ...], Surroundings] = {}
        self._inputs: dict[tuple[object, ...], Inputs] = {}
        self._orders: dict[tuple[object, ...], Order] = {}
        self._kept_actions = 0
        self._flops_per_sequence = profile.model.flops_per_sequence()
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
            evaluation = self.evaluate(plan)
            peaks = _peak_bytes(plan, evaluation.inputs, evaluation.order)
            return self._estimate(evaluation, peaks, plan)
        except MissingNumber as error:
            return Infeasible(rule=error.rule, reason=str(error))

    def evaluate(self, plan: Plan) -> Evaluation:
        """The plan's step, played without spans. Raises MissingNumber."""
        inputs = self.inputs(plan)
        order = self.order(plan)
        simulation = simulate(order, inputs.costs, inputs.executor)
        return Evaluation(
            step_time_s=simulation.step_time_s + inputs.longest_constant_s,
            simulation=simulation,
            inputs=inputs,
            order=order,
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
        return overhead_of(self.profile, self.executor(plan))[0]

    def order(self, plan: Plan) -> Order:
        """The plan's actions, rank by rank; kept for plans to come while there are not too many."""
        key = (plan.schedule, plan.num_ranks, plan.num_chunks, plan.num_microbatches,
               plan.microbatch_group_size)  # fmt: skip
        order = self._orders.get(key)
        if order is None:
            order = generate(
                plan.schedule,
                num_ranks=plan.num_ranks,
                num_chunks=plan.num_chunks,
                num_microbatches=plan.num_microbatches,
                microbatch_group_size=plan.microbatch_group_size,
            )
            num_actions = 2 * plan.num_stages * plan.num_microbatches
            if self._kept_actions + num_actions > MAX_KEPT_ACTIONS:
                self._orders.clear()
                self._kept_actions = 0
            self._orders[key] = order
            self._kept_actions += num_actions
        return order

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
        return _peak_bytes(plan, self.inputs(plan), self.order(plan))

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
        fullest = max(peak_memory_bytes.tolist())
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
        placement: Placement,
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
        key = (executor, plan.num_ranks, plan.num_chunks, plan.placement, plan.microbatch_size,
               plan.recompute)  # fmt: skip
        own = (key, plan.layers_per_stage, plan.data_parallel, plan.splits_backward)
        found = self._inputs.get(own)
        if found is not None:
            return found
        around = self._surroundings.get(key)
        if around is None:
            around = self._surroundings[key] = surroundings(
                plan,
                self.profile,
                executor=executor,
                times=self.layer_costs(plan.microbatch_size, plan.recompute),
                links=self._links,
            )
        if len(self._inputs) >= MAX_KEPT_INPUTS:
            self._inputs.clear()
        found = self._inputs[own] = compose(
            plan, self.profile, around, links=self._links, zero_stage=self.setting.zero_stage
        )
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

    def _estimate(self, evaluation: Evaluation, peaks: Floats | None, plan: Plan) -> Estimate:
        simulation, inputs = evaluation.simulation, evaluation.inputs
        step_time_s = evaluation.step_time_s
        costs = inputs.costs
        assert costs.backward_s is not None
        work_s = per_rank(plan, costs.forward_s + costs.backward_s)
        return Estimate(
            step_time_s=step_time_s,
            longest_rank_span_s=simulation.longest_rank_span_s,
            bubble_ratio=sum(simulation.bubble_s.tolist())
            / (plan.num_ranks * simulation.step_time_s)
            if simulation.step_time_s > 0
            else 0.0,
            ideal_time_s=plan.num_microbatches * max(work_s.tolist()),
            breakdown_s=breakdown(simulation, inputs.constant_s, step_time_s),
            peak_memory_bytes=None
            if peaks is None
            else tuple(np.rint(peaks).astype(np.int64).tolist()),
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
        flops = self._flops_per_sequence
        peak = self.profile.machine.peak_flops_per_s
        if flops is None or peak is None or step_time_s <= 0:
            return None
        parallel = self.profile.parallel
        num_devices = plan.num_ranks * plan.data_parallel * parallel.tensor * parallel.context
        return plan.global_batch_size * flops / (step_time_s * peak * num_devices)


def _peak_bytes(plan: Plan, inputs: Inputs, order: Order) -> Floats | None:
    if inputs.static is None or inputs.activation is None:
        return None
    return peak_bytes(
        plan,
        order,
        static=inputs.static,
        activation=inputs.activation,
        executor=inputs.executor,
    )


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
