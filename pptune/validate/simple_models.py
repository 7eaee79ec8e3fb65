"""Three simpler predictions, to be judged on the same runs: what each missing term costs."""

from collections.abc import Callable

import msgspec

from pptune.cost_model import CostModel, Setting
from pptune.estimate import Infeasible
from pptune.plan import Plan
from pptune.profiles import Profile
from pptune.targets import parse_target

Predict = Callable[[Plan], float | None]


def simple_models(profile: Profile) -> dict[str, Predict]:
    """closed-form: (M + (P - 1) / V)(t_f + t_b) (arXiv 2104.04473, sections 2.2.1 and 2.2.2).
    no-communication: the order played without transfers and overheads.
    bare-layers: the order played with transfers, without the runtime's overheads.
    """
    setting = Setting(target=parse_target("torch"))
    bare = CostModel(
        msgspec.structs.replace(
            profile, overheads={}, step_constants=None, interference_ratio=None
        ),
        setting,
    )
    silent = CostModel(
        msgspec.structs.replace(
            profile,
            overheads={},
            step_constants=None,
            interference_ratio=None,
            links=tuple(
                msgspec.structs.replace(
                    link, latency_s=0.0, bytes_per_s=1e18, send_occupied_s=0.0,
                    receive_occupied_s=0.0,
                )
                for link in profile.links
            ),
        ),
        setting,
    )  # fmt: skip
    return {
        "closed-form": lambda plan: _closed_form(bare, plan),
        "no-communication": lambda plan: _played(silent, plan),
        "bare-layers": lambda plan: _played(bare, plan),
    }


def _closed_form(model: CostModel, plan: Plan) -> float:
    costs = model.costs(plan)
    assert costs.backward_s is not None
    per_rank = float((costs.forward_s + costs.backward_s).sum()) / plan.num_ranks
    return (plan.num_microbatches + (plan.num_ranks - 1) / plan.num_chunks) * per_rank


def _played(model: CostModel, plan: Plan) -> float | None:
    estimate = model.estimate(plan)
    return None if isinstance(estimate, Infeasible) else estimate.step_time_s
