"""A time that no order and no executor can beat, so that hopeless plans need not be played.

A rank starts once the first micro-batch has come through all stages before its own, does all its
work one action at a time, and after its last full backward the gradient still has to go back
through those stages. A link carries its messages one after the other. The bound is reached by 1F1B
and interleaved 1F1B with equal stages and free messages: (P - 1)(t_f + t_b) / V + M (t_f + t_b)
(arXiv 2104.04473, sec. 2.2).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pptune.cost_model.memory import per_rank
from pptune.plan import Plan
from pptune.schedules import Work
from pptune.schedules.placement import rank_of_stages
from pptune.simulator import Costs

Floats = NDArray[np.float64]

_ROUNDING = 1e-9
"""The bound is lowered by this share: the simulator adds the same numbers in another order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBound:
    """The parts of the bound; float64[num_ranks]."""

    compute_s: Floats
    """Per micro-batch."""
    overhead_s: Floats
    """Per micro-batch."""
    occupied_s: Floats
    """Per micro-batch, the rank's own time in sends and receives."""
    lead_s: Floats
    """Before the rank's first action and after its last, without messages."""
    messages_s: Floats
    """The messages of that lead."""
    link_s: float
    """Per micro-batch, what the busiest link carries."""
    constant_s: float

    def step_s(self, num_microbatches: int) -> float:
        """No step with these costs is shorter."""
        longest = max(float(self._ranks_s(num_microbatches).max()), num_microbatches * self.link_s)
        return longest * (1 - _ROUNDING) + self.constant_s

    def parts_s(self, num_microbatches: int) -> tuple[float, float, float, float, float]:
        """Compute, bubble, exposed transfer, overhead and constant of the rank that bounds."""
        ranks_s = self._ranks_s(num_microbatches)
        rank = int(ranks_s.argmax())
        waits_s = max(0.0, num_microbatches * self.link_s - float(ranks_s[rank]))
        own_s = num_microbatches * float(self.occupied_s[rank]) + float(self.messages_s[rank])
        return (
            num_microbatches * float(self.compute_s[rank]),
            float(self.lead_s[rank]),
            own_s + waits_s,
            num_microbatches * float(self.overhead_s[rank]),
            self.constant_s,
        )

    def _ranks_s(self, num_microbatches: int) -> Floats:
        per_microbatch_s = self.compute_s + self.overhead_s + self.occupied_s
        return np.asarray(num_microbatches * per_microbatch_s + self.lead_s + self.messages_s)


def step_bound(plan: Plan, costs: Costs, constant_s: float) -> StepBound:
    """The bound of every plan with `plan`'s layout and kind of backward under `costs`."""
    ranks = plan.num_ranks
    overhead = costs.overhead_s
    if plan.splits_backward:
        assert costs.backward_input_s is not None
        assert costs.backward_weight_s is not None
        backward_s = costs.backward_input_s + costs.backward_weight_s
        backward_overhead = overhead[Work.BACKWARD_INPUT] + overhead[Work.BACKWARD_WEIGHT]
    else:
        assert costs.backward_s is not None
        backward_s, backward_overhead = costs.backward_s, overhead[Work.BACKWARD]
    forward, backward = costs.forward_hops, costs.backward_hops
    # Rank r's first stage is r in both placements: stages 0..r-1 lie before it.
    before_s = costs.forward_s[: ranks - 1] + overhead[Work.FORWARD]
    messages_s = forward.latency_s[: ranks - 1] + forward.wire_s[: ranks - 1]
    if not plan.splits_backward:
        # With a split backward a rank may end in weight gradients, which nobody waits for.
        before_s = before_s + backward_s[: ranks - 1] + backward_overhead
        messages_s = messages_s + backward.latency_s[: ranks - 1] + backward.wire_s[: ranks - 1]
    return StepBound(
        compute_s=per_rank(plan, costs.forward_s + backward_s),
        overhead_s=np.full(ranks, plan.num_chunks * (overhead[Work.FORWARD] + backward_overhead)),
        occupied_s=_occupied_s(plan, costs),
        lead_s=_sums_before(before_s),
        messages_s=_sums_before(messages_s),
        link_s=_busiest_link_s(plan, costs),
        constant_s=constant_s,
    )


def _occupied_s(plan: Plan, costs: Costs) -> Floats:
    """Each rank's own time in sends and receives, per micro-batch; float64[num_ranks]."""
    stages = np.zeros(plan.num_stages)
    forward, backward = costs.forward_hops, costs.backward_hops
    stages[:-1] += forward.send_occupied_s + backward.receive_occupied_s
    stages[1:] += forward.receive_occupied_s + backward.send_occupied_s
    return per_rank(plan, stages)


def _busiest_link_s(plan: Plan, costs: Costs) -> float:
    """The most that any directed pair of ranks carries, in seconds per micro-batch."""
    forward_s, backward_s = costs.forward_hops.wire_s, costs.backward_hops.wire_s
    if not (forward_s.any() or backward_s.any()):
        return 0.0
    ranks = rank_of_stages(plan.num_ranks, plan.num_stages, plan.placement)
    sender = np.concatenate([ranks[:-1], ranks[1:]])
    receiver = np.concatenate([ranks[1:], ranks[:-1]])
    seconds = np.concatenate([forward_s, backward_s])
    return float(np.bincount(sender * plan.num_ranks + receiver, weights=seconds).max())


def _sums_before(seconds: Floats) -> Floats:
    """Sums of all earlier entries, one more than `seconds` has."""
    return np.concatenate([[0.0], np.cumsum(seconds)])
