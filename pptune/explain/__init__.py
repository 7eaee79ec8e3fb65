"""Why this plan: where its step goes, why the others lose, and what would change the choice.

Every counterfactual is played by the same cost model as the search, with one thing changed.
"""

from collections.abc import Sequence

from msgspec.structs import replace as replaced

from pptune.cost_model import CostModel, Setting
from pptune.curves import fit_curve, layer_times, usable_points
from pptune.errors import NoAnswer, UsageError
from pptune.estimate import Candidate, Estimate
from pptune.explain.alternatives import Question, by_step_time, list_alternatives
from pptune.explain.losses import equal_stages_bubble_ratio, head_loss, parts_s, step_share
from pptune.explain.turning_points import at_microbatches, break_even_bandwidth, chunk_ranges
from pptune.explain.uncertainty import World, confidence, sensitivities
from pptune.explanation import Alternative, Explanation, Rival, SizeRow, StepShare
from pptune.plan import Plan
from pptune.plans_file import PlansFile
from pptune.profiles import Profile
from pptune.search.space import Axes
from pptune.targets import parse_target

MAX_CONTENDERS = 8
"""Plans that compete when the profile's numbers are moved: the pick and those nearest to it."""

MAX_CHUNKS = 6
"""Values of V that are compared when M varies: the pick's, 1, and those of the fastest plans."""

REASONS = {
    "compute": "slower compute",
    "bubble": "more bubble",
    "exposed-transfer": "more exposed transfer (V times the messages)",
    "overhead": "more overhead per action (M x V actions)",
    "chunk-cost": "per-chunk fixed cost x V",
    "step-constant": "larger per-step constants",
}
"""Why a slower plan is slower."""

FASTER_REASONS = {
    "compute": "faster compute",
    "bubble": "less bubble",
    "exposed-transfer": "less exposed transfer",
    "overhead": "less overhead per action (M x V actions)",
    "chunk-cost": "less per-chunk fixed cost x V",
    "step-constant": "smaller per-step constants",
}
"""Why a faster plan is faster, where the explained plan is not the best."""


def explain(
    plans: PlansFile,
    profile: Profile,
    *,
    rank: int = 1,
    setting: Setting | None = None,
    seed: int = 0,
) -> Explanation:
    """Why the plan at `rank` stands where it stands.

    Raises NoAnswer where the ranking is empty and UsageError for a rank that it does not have.
    """
    candidate = _candidate(plans, rank)
    pick = candidate.plan
    if setting is None:
        setting = setting_of(plans)
    model = CostModel(profile, setting)
    question = _question(plans, model, pick)
    known = [row.plan for row in plans.candidates if _comparable(row.plan, pick)]
    alternatives = list_alternatives(question, plans.global_batch_size, known)
    rivals = _rivals(candidate, alternatives, model)
    contenders = _contenders(pick, alternatives)
    world = World(profile=profile, setting=setting)
    return Explanation(
        held_fixed=_held_fixed(plans.global_batch_size, pick),
        shares=tuple(_shares(plans, candidate, model)),
        alternatives=alternatives,
        rivals=rivals,
        sizes=_sizes(question, pick, alternatives),
        chunk_ranges=chunk_ranges(question, pick, _chunks_to_compare(pick, rivals)),
        bandwidth=break_even_bandwidth(world, alternatives),
        knee_microbatch_size=_knee(profile),
        head=head_loss(model, pick),
        sensitivities=sensitivities(world, contenders),
        confidence=confidence(world, contenders, seed=seed),
    )


def setting_of(plans: PlansFile) -> Setting:
    """The setting under which the search predicted."""
    return Setting(
        target=parse_target(plans.target),
        ranks_per_node=plans.ranks_per_node,
        memory_limit_bytes=plans.memory_limit_bytes,
        zero_stage=plans.zero_stage,
        links=plans.links,
    )


def _held_fixed(global_batch_size: int, pick: Plan) -> str:
    share = "b" if pick.data_parallel == 1 else f"(b x {pick.data_parallel} replicas)"
    return (
        f"The global batch is held fixed at {global_batch_size} sequences per step: "
        f"M = {global_batch_size} / {share}, so that a larger b leaves fewer micro-batches and, "
        "with equal stages, a larger share of bubble."
    )


def _candidate(plans: PlansFile, rank: int) -> Candidate:
    if not plans.candidates:
        raise NoAnswer("the plans file holds no candidate; search again with other axes")
    for row in plans.candidates:
        if row.rank == rank:
            return row
    raise UsageError(
        f"rank {rank} is not in the ranking of 1..{plans.candidates[-1].rank}; use one of those, "
        "or search again with a larger --top"
    )


def _question(plans: PlansFile, model: CostModel, pick: Plan) -> Question:
    """The search's own axes, at the pick's P, D and recompute."""
    axes = plans.space.axes

    def numbers(name: str) -> tuple[int, ...] | None:
        return tuple(map(int, axes[name])) if name in axes else None

    schedules = dict.fromkeys([*axes.get("schedule", ("1f1b", "interleaved")), pick.schedule])
    target = parse_target(plans.target)
    return Question(
        model=model,
        axes=Axes(
            grids=((pick.num_ranks, pick.data_parallel),),
            schedules=tuple(schedules),  # type: ignore[arg-type]
            num_chunks=numbers("num_chunks"),
            microbatch_sizes=numbers("microbatch_size"),
            recompute=(pick.recompute,),
        ),
        target=target,
        allow_empty_stages=min(pick.layers_per_stage) == 0,
    )


def _comparable(plan: Plan, pick: Plan) -> bool:
    """Whether the two differ in nothing but schedule, V, b, M, N and layers."""
    return (plan.num_ranks, plan.data_parallel, plan.recompute) == (
        pick.num_ranks,
        pick.data_parallel,
        pick.recompute,
    )


def _shares(plans: PlansFile, candidate: Candidate, model: CostModel) -> list[StepShare]:
    """The explained plan, the best other candidate, and the baseline."""
    shares = [step_share(model, "pick", candidate.plan, candidate.estimate)]
    others = [row for row in plans.candidates if row.plan != candidate.plan]
    if others:
        shares.append(step_share(model, "runner-up", others[0].plan, others[0].estimate))
    if plans.baseline is not None:
        shares.append(step_share(model, "baseline", plans.baseline.plan, plans.baseline.estimate))
    return shares


def _rivals(
    candidate: Candidate, alternatives: Sequence[Alternative], model: CostModel
) -> tuple[Rival, ...]:
    """The fastest plan of every other V, fastest first, and why it is not the pick."""
    best: dict[int, Alternative] = {}
    for row in by_step_time(alternatives):
        best.setdefault(row.num_chunks, row)
    best.pop(candidate.plan.num_chunks, None)
    own_s = parts_s(model, candidate.plan, candidate.estimate)
    return tuple(_rival(row, candidate, own_s, model) for row in best.values())


def _rival(
    row: Alternative, candidate: Candidate, own_s: dict[str, float], model: CostModel
) -> Rival:
    assert row.plan is not None
    assert row.estimate is not None
    slower_s = row.estimate.step_time_s - candidate.estimate.step_time_s
    parts = parts_s(model, row.plan, row.estimate)
    grown = {name: seconds - own_s[name] for name, seconds in parts.items()}
    # A rival that is faster wins by the part that shrank most.
    code = max(grown, key=lambda name: grown[name] if slower_s >= 0 else -grown[name])
    return Rival(
        plan=row.plan,
        estimate=row.estimate,
        slower_s=slower_s,
        reason_code=code,
        reason=REASONS[code] if slower_s >= 0 else FASTER_REASONS[code],
        grown_s=grown,
    )


def _sizes(
    question: Question, pick: Plan, alternatives: Sequence[Alternative]
) -> tuple[SizeRow, ...]:
    """The pick at every b of the alternatives: its schedule, V and layers stay, M follows b."""
    replica = pick.microbatch_size * pick.num_microbatches
    rows = []
    for size in sorted({row.microbatch_size for row in alternatives}):
        plan = pick
        if size != pick.microbatch_size:
            plan = at_microbatches(replaced(pick, microbatch_size=size), replica // size)
        estimate = question.model.estimate(plan)
        if isinstance(estimate, Estimate) and question.is_legal(plan):
            rows.append(
                SizeRow(
                    microbatch_size=size,
                    num_microbatches=plan.num_microbatches,
                    step_time_s=estimate.step_time_s,
                    bubble_ratio=estimate.bubble_ratio,
                    equal_stages_bubble_ratio=equal_stages_bubble_ratio(question.model, plan),
                )
            )
    return tuple(rows)


def _chunks_to_compare(pick: Plan, rivals: Sequence[Rival]) -> tuple[int, ...]:
    others = [rival.plan.num_chunks for rival in rivals]
    ordered = dict.fromkeys([pick.num_chunks, *(v for v in others if v == 1), *others])
    return tuple(sorted(list(ordered)[:MAX_CHUNKS]))


def _contenders(pick: Plan, alternatives: Sequence[Alternative]) -> list[Plan]:
    """The pick, then the nearest other plans by step time."""
    rows = by_step_time(alternatives)
    plans = [row.plan for row in rows if row.plan is not None and row.plan != pick]
    return [pick, *plans[: MAX_CONTENDERS - 1]]


def _knee(profile: Profile) -> float | None:
    block = profile.layer("block")
    if block is None:
        return None
    sizes = [point.microbatch_size for point in usable_points(block)]
    if len(sizes) < 2:
        return None
    times = [layer_times(block, size) for size in sizes]
    return fit_curve(
        sizes, [time.forward_s + time.backward_s for time in times]
    ).knee_microbatch_size
