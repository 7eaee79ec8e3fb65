"""Plans on a group of ranks, from the leader's side."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from pptune.measured_step import MeasuredStep, Visit, join_ranks
from pptune.model import ModelSpec
from pptune.plan import Plan
from pptune.runtime.launch import RankGroup
from pptune.runtime.wait_times import WaitTimes

_FORGET_BELOW = 0.4
"""Share of free memory under which built plans are dropped before the next is built."""


class PlanVisitor:
    """Runs plans on a group; `visitor(plan, steps=2, memory=False)` is one visit.

    With `stage_times` the plans are replayed: it gives each stage's times and the bytes of a
    message for a plan.
    """

    def __init__(
        self,
        group: RankGroup,
        model: ModelSpec,
        *,
        dtype: str,
        timeout_s: float,
        stage_times: Callable[[Plan], tuple[Sequence[WaitTimes], int]] | None = None,
        warmup_steps: int = 1,
        record: bool = True,
        with_product: bool = False,
    ) -> None:
        self.group = group
        self.model = model
        self.dtype = dtype
        self.timeout_s = timeout_s
        self.stage_times = stage_times
        self.warmup_steps = warmup_steps
        self.record = record
        self.with_product = with_product
        """Whether the reference product is timed around each step."""
        self._memory_is_short = False

    def __call__(self, plan: Plan, *, steps: int, memory: bool) -> Visit:
        """One visit. Raises RankFailure when the plan can't be run."""
        times, boundary_bytes = None, 0
        if self.stage_times is not None:
            given, boundary_bytes = self.stage_times(plan)
            times = [_as_dict(each) for each in given]
        answers = self.group.run(
            "visit_plan",
            {
                "plan": msgspec.to_builtins(plan), "model": msgspec.to_builtins(self.model),
                "dtype": self.dtype, "stage_times": times, "boundary_bytes": boundary_bytes,
                "warmup_steps": self.warmup_steps, "steps": steps, "record": self.record,
                "memory": memory and times is None, "forget_others": self._memory_is_short,
                "with_product": self.with_product,
            },
            timeout_s=self.timeout_s,
        )  # fmt: skip
        self._memory_is_short = min(each["free_memory_ratio"] for each in answers) < _FORGET_BELOW
        replicas = [
            answers[first : first + plan.num_ranks]
            for first in range(0, len(answers), plan.num_ranks)
        ]
        joined = [
            max((_join(replica, index) for replica in replicas), key=lambda step: step.step_s)
            for index in range(steps)
        ]
        peaks = [answer["peak_memory_bytes"] for answer in replicas[0]]
        return Visit(
            samples_s=tuple(step.step_s for step in joined),
            steps=tuple(joined) if self.record else (),
            peak_memory_bytes=None if None in peaks else tuple(peaks),
        )


def _join(answers: list[Any], index: int) -> MeasuredStep:
    """One replica's step number `index`; a step is as slow as its slowest replica."""
    return join_ranks(
        [answer["steps"][index] for answer in answers], [answer["node"] for answer in answers]
    )


def _as_dict(times: WaitTimes) -> dict[str, Any]:
    return {
        "forward_s": times.forward_s, "backward_s": times.backward_s,
        "backward_input_s": times.backward_input_s, "backward_weight_s": times.backward_weight_s,
    }  # fmt: skip
