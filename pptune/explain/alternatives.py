"""What else could have been picked: the best plan of every V and b, at any global batch."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from pptune.cost_model import CostModel
from pptune.errors import UsageError
from pptune.estimate import Estimate
from pptune.explanation import Alternative
from pptune.plan import Plan
from pptune.search.space import Axes, Listing, list_plans
from pptune.targets import Target, illegal


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What all plans of one comparison have in common."""

    model: CostModel
    axes: Axes
    target: Target
    allow_empty_stages: bool

    def listing(
        self,
        global_batch_size: int,
        *,
        num_chunks: Sequence[int] | None = None,
        microbatch_sizes: Sequence[int] | None = None,
    ) -> Listing:
        """Every legal plan at this global batch, by default on the question's own V and b."""
        axes = self.axes
        if num_chunks is not None:
            axes = replace(axes, num_chunks=tuple(num_chunks))
        if microbatch_sizes is not None:
            axes = replace(axes, microbatch_sizes=tuple(microbatch_sizes))
        return list_plans(
            self.model,
            axes,
            target=self.target,
            global_batch_size=global_batch_size,
            allow_empty_stages=self.allow_empty_stages,
        )

    def is_legal(self, plan: Plan) -> bool:
        """Whether the target can run it."""
        profile = self.model.profile
        violation = illegal(
            plan,
            self.target,
            model=profile.model,
            tensor_parallel=profile.parallel.tensor,
            context_parallel=profile.parallel.context,
            zero=self.model.setting.zero_stage,
            allow_empty_stages=self.allow_empty_stages,
        )
        return violation is None


def list_alternatives(
    question: Question, global_batch_size: int, known: Iterable[Plan]
) -> tuple[Alternative, ...]:
    """The best plan of each V and b, by V, then b; `known` plans compete with the listed ones."""
    listed = question.listing(global_batch_size).plans
    plans = dict.fromkeys([*listed, *known])
    cells: dict[tuple[int, int], list[Plan]] = {}
    for plan in plans:
        cells.setdefault((plan.num_chunks, plan.microbatch_size), []).append(plan)
    chunks = sorted({v for v, _ in cells})
    sizes = sorted({b for _, b in cells})
    return tuple(
        _best_of(question, v, b, cells[v, b])
        if (v, b) in cells
        else Alternative(
            num_chunks=v,
            microbatch_size=b,
            plan=None,
            estimate=None,
            reason=_why_none(question, global_batch_size, v, b),
        )
        for v in chunks
        for b in sizes
    )


def fastest(model: CostModel, plans: Iterable[Plan]) -> tuple[Plan, Estimate] | None:
    """The fastest of the plans that have an estimate and fit, or None."""
    best: tuple[Plan, Estimate] | None = None
    for plan in plans:
        estimate = model.estimate(plan)
        if (
            isinstance(estimate, Estimate)
            and estimate.fits != "no"
            and (best is None or estimate.step_time_s < best[1].step_time_s)
        ):
            best = (plan, estimate)
    return best


def by_step_time(alternatives: Iterable[Alternative]) -> list[Alternative]:
    """Those that have a plan, fastest first."""
    return sorted((row for row in alternatives if row.estimate is not None), key=_step_time_s)


def _step_time_s(row: Alternative) -> float:
    assert row.estimate is not None
    return row.estimate.step_time_s


def _best_of(question: Question, num_chunks: int, size: int, plans: list[Plan]) -> Alternative:
    found = fastest(question.model, plans)
    reason = None
    if found is None:
        answer = question.model.estimate(plans[0])
        if isinstance(answer, Estimate):
            limit = question.model.memory_limit_bytes
            peak = max(answer.peak_memory_bytes or (0,))
            reason = f"needs {peak} bytes on its fullest rank, over the limit of {limit}"
        else:
            reason = answer.reason
    return Alternative(
        num_chunks=num_chunks,
        microbatch_size=size,
        plan=None if found is None else found[0],
        estimate=None if found is None else found[1],
        reason=reason,
    )


def _why_none(question: Question, global_batch_size: int, num_chunks: int, size: int) -> str:
    try:
        listing = question.listing(
            global_batch_size, num_chunks=(num_chunks,), microbatch_sizes=(size,)
        )
    except UsageError as error:
        return str(error)
    examples = [str(violation) for violation in listing.examples.values()]
    return examples[-1] if examples else "no legal plan"
