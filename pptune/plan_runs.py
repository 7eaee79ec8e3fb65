"""Plans on ranks that are started when first needed: for real, or replayed from a profile."""

from collections.abc import Callable, Sequence

import msgspec

from pptune.cost_model import CostModel, Setting
from pptune.measured_step import Visit
from pptune.model import ModelSpec
from pptune.plan import Plan
from pptune.profiles import Profile
from pptune.runtime.agent import Event
from pptune.runtime.launch import RankGroup
from pptune.runtime.visits import PlanVisitor
from pptune.runtime.wait_times import WaitTimes
from pptune.runtime.world import detect_world
from pptune.targets import parse_target

RunPlan = Callable[..., Visit]
"""`run(plan, steps=, memory=)`; raises RankFailure."""

GetStageTimes = Callable[[Plan], tuple[Sequence[WaitTimes], int]]
"""What each stage of a plan waits, and the bytes of its messages."""


class Ranks:
    """Groups of ranks by size, started when first asked for. Use it as a context manager."""

    def __init__(
        self,
        device: str,
        *,
        timeout_s: float,
        on_event: Callable[[Event], None] = lambda event: None,
    ) -> None:
        self._device = device
        self._timeout_s = timeout_s
        self._on_event = on_event
        self._groups: dict[int, RankGroup] = {}

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        for group in self._groups.values():
            group.close()

    @property
    def device(self) -> str | None:
        """What the ranks that have been started run on; None before any has."""
        return next((group.world.device for group in self._groups.values()), None)

    def group(self, num_ranks: int) -> RankGroup:
        """The group of so many ranks. Raises RuntimeFailure or UsageError where it can't be had."""
        if num_ranks not in self._groups:
            self._groups[num_ranks] = RankGroup(
                detect_world(num_ranks, self._device),
                timeout_s=self._timeout_s,
                on_event=self._on_event,
            )
        return self._groups[num_ranks]


def runner(
    ranks: Ranks,
    model: ModelSpec,
    *,
    dtype: str,
    timeout_s: float,
    stage_times: GetStageTimes | None = None,
    with_product: bool = False,
) -> RunPlan:
    """Runs each plan on as many ranks as it takes, with the reference product around each step
    where that is asked for."""
    visitors: dict[int, PlanVisitor] = {}

    def run(plan: Plan, *, steps: int, memory: bool) -> Visit:
        num_ranks = plan.num_ranks * plan.data_parallel
        if num_ranks not in visitors:
            visitors[num_ranks] = PlanVisitor(
                ranks.group(num_ranks),
                model,
                dtype=dtype,
                timeout_s=timeout_s,
                stage_times=stage_times,
                with_product=with_product,
            )
        return visitors[num_ranks](plan, steps=steps, memory=memory)

    return run


def runner_on(group: RankGroup, model: ModelSpec, *, dtype: str, timeout_s: float) -> RunPlan:
    """Runs each plan for real on one group that has been started, with the reference product around
    each step."""
    return PlanVisitor(group, model, dtype=dtype, timeout_s=timeout_s, with_product=True)


def replayed_times(profile: Profile) -> GetStageTimes:
    """Stage times and message sizes from a profile; waiting has no interference."""
    model = CostModel(
        msgspec.structs.replace(profile, interference_ratio=None),
        Setting(target=parse_target("torch")),
    )

    def times(plan: Plan) -> tuple[Sequence[WaitTimes], int]:
        costs = model.costs(plan)
        if costs.backward_s is None:
            raise AssertionError("a profile's costs always have the full backward")
        inputs, weights = costs.backward_input_s, costs.backward_weight_s
        waits = [
            WaitTimes(
                forward_s=float(costs.forward_s[stage]),
                backward_s=float(costs.backward_s[stage]),
                backward_input_s=0.0 if inputs is None else float(inputs[stage]),
                backward_weight_s=0.0 if weights is None else float(weights[stage]),
            )
            for stage in range(plan.num_stages)
        ]
        block = model.layer_costs(plan.microbatch_size, plan.recompute).block
        return waits, block.boundary_bytes or 4

    return times
