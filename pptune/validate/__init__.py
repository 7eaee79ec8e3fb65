"""From a plans file to a validation file: which plans run, in which rounds, against what."""

import hashlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import msgspec

from pptune.calibration import (
    apply_calibration,
    calibration_plans,
    run_calibration,
)
from pptune.cost_model import CostModel, Setting
from pptune.errors import NoAnswer, RankFailure, UsageError
from pptune.estimate import Infeasible, PredictedPlan
from pptune.measured_step import Visit
from pptune.measurement import Measurement, outlier_warning, quantised_warning
from pptune.model import ModelSpec
from pptune.plan import Plan
from pptune.plan_runs import Ranks, RunPlan, replayed_times, runner
from pptune.plans_file import PlansFile
from pptune.profiles import Link, Profile, Reference
from pptune.search.baseline import is_named
from pptune.targets import parse_target
from pptune.units import format_ratio
from pptune.validate.measured_search import Found, search_by_running
from pptune.validate.rounds import Entry, Rounds, run_rounds
from pptune.validate.simple_models import simple_models
from pptune.validate.verdict import summarise
from pptune.validate.visit_study import Search, VisitStudy, open_visit_study
from pptune.validation_file import Run, ValidationFile

_LINK_BUDGET_S, _LINK_NOISE = 8.0, 0.05
_CALIBRATION_BUDGET_S = 30.0
"""For the runs that measure a replay's overheads."""

_CHANGED_RATIO = 0.03
"""A machine whose speed differs by more from when it was profiled is said to have changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is to be proven, and how."""

    mode: Literal["real", "replay"] = "real"
    top: int = 3
    """The best so many candidates run; with `search`, they may."""
    exhaustive: bool = False
    search: Search | None = None
    """Which plans run follows from the runs themselves, within a budget."""
    rounds: Rounds = field(default_factory=Rounds)
    timeout_s: float = 120.0
    """Per visit of a plan."""
    baseline: str | None = None
    """A specification such as `schedule=1f1b microbatch_size=1`; None takes the file's."""
    device: str = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """Who is told what happens."""

    on_visit: Callable[[int, int, str], None] = lambda done, total, doing: None
    on_saved: Callable[[ValidationFile], None] = lambda validation: None
    on_failed: Callable[[Plan, RankFailure], None] = lambda plan, failure: None


def validate(
    plans: PlansFile,
    request: Request,
    *,
    digest: str,
    profile: Profile | None,
    previous: ValidationFile | None = None,
    watch: Watch,
) -> ValidationFile:
    """Run the plans and judge them. `digest` is that of the plans file's bytes.

    Replay needs the profile: it waits its times, measures what the runtime adds at that number of
    ranks, and predicts again. Raises NoAnswer when every run failed, UsageError where `previous`
    belongs to other plans.
    """
    resumed = resumed_runs(previous, request, digest)
    entries = entries_of(plans, request)
    study = None
    if request.search is not None:  # opened first, so that a bad storage costs no time
        study = open_visit_study(
            request.search, plans, [entry.plan for entry in entries], request.mode
        )
    with Ranks(request.device, timeout_s=request.timeout_s) as ranks:
        if request.mode == "replay":
            if profile is None:
                raise UsageError(
                    "--replay waits the profile's times, but the profile is gone or has changed; "
                    "give it with --profile"
                )
            run = runner(
                ranks, plans.model, dtype=plans.dtype, timeout_s=request.timeout_s,
                stage_times=replayed_times(profile),
            )  # fmt: skip
            profile = with_own_links(profile, entries, ranks, watch)
            profile, entries = rehearsed(profile, entries, run, watch)
        else:
            run = runner(
                ranks, plans.model, dtype=plans.dtype, timeout_s=request.timeout_s,
                with_product=True,
            )  # fmt: skip
        products_s: list[float] = []

        def run_and_keep_products(plan: Plan, *, steps: int, memory: bool) -> Visit:
            visit = run(plan, steps=steps, memory=memory)
            products_s.extend(visit.products_s)
            return visit

        cost_s = recording_cost_s(ranks, entries) if request.rounds.record_timeline else None
        blank = ValidationFile(
            mode=request.mode,
            machine=None if profile is None else profile.machine,
            plans_digest=digest,
            settings={"global_batch_size": str(plans.global_batch_size)},
            recording_cost_s=cost_s,
            runs=(),
            summary=None,
        )
        started = time.monotonic()
        found = _run_entries(
            entries,
            run_and_keep_products,
            request,
            study=study,
            resumed=resumed,
            watch=watch,
            on_saved=lambda done: watch.on_saved(msgspec.structs.replace(blank, runs=tuple(done))),
        )
        same_device = profile is not None and profile.machine.device == ranks.device
    finished = msgspec.structs.replace(
        blank,
        runs=tuple(found.runs),
        warnings=(
            *found.warnings,
            *doubts(found.runs),
            *speed_changes(profile.reference if profile and same_device else None, products_s),
        ),
        summary=summarise(
            found.runs,
            exhaustive=request.exhaustive,
            calibrated=frozenset(() if profile is None else profile.calibration_plans),
            models={} if profile is None else simple_models(profile),
            device_time_s=time.monotonic() - started,
            found_by_running=request.search is not None,
        ),
    )
    watch.on_saved(finished)
    if all(each.status != "ok" for each in found.runs):
        reasons = "\n".join(f"  {each.plan.label}: {each.reason}" for each in found.runs)
        raise NoAnswer(f"every run failed:\n{reasons}")
    return finished


def _run_entries(
    entries: list[Entry],
    run: RunPlan,
    request: Request,
    *,
    study: VisitStudy | None,
    resumed: tuple[Run, ...],
    watch: Watch,
    on_saved: Callable[[list[Run]], None],
) -> Found:
    """All entries in rounds, or those that a search chooses."""
    if request.search is not None and study is not None:
        return search_by_running(
            entries, run, study=study, budget_s=request.search.budget_s, rounds=request.rounds,
            resumed=resumed, on_saved=on_saved, on_failed=watch.on_failed,
            on_visit=lambda spent_s, budget_s, plan: watch.on_visit(
                round(spent_s), round(budget_s), plan.label
            ),
        )  # fmt: skip
    runs = run_rounds(
        entries, run, rounds=request.rounds, resumed=resumed, on_saved=on_saved,
        on_failed=watch.on_failed,
        on_visit=lambda done, total, plan: watch.on_visit(done, total, plan.label),
    )  # fmt: skip
    return Found(runs=runs)


def doubts(runs: Iterable[Run]) -> list[str]:
    """What is wrong with the samples themselves, in words: outliers, a coarse clock."""
    found = []
    for run in runs:
        for warning in (outlier_warning, quantised_warning):
            text = warning(run.plan.label, run.samples_s)
            if text is not None:
                found.append(text)
    return found


def speed_changes(reference: Reference | None, products_s: Sequence[float]) -> list[str]:
    """That the machine's speed is no longer that of the profile, in words."""
    if reference is None or not products_s:
        return []
    change = Measurement(samples_s=tuple(products_s)).centre_s / reference.seconds - 1
    if abs(change) <= _CHANGED_RATIO:
        return []
    which, how = ("slower", "longer") if change > 0 else ("faster", "less time")
    return [
        f"the machine was {which} than when it was profiled: its reference product took "
        f"{format_ratio(abs(change))} {how}; about that much of every error is the machine's, and "
        "it hits all plans alike"
    ]


def check_trusted(model: ModelSpec, named: str | None) -> None:
    """Raise UsageError unless the user has named the code that running `model` would import.

    A plans file is data, and it may come from someone else: alone it must not run code.
    """
    if model.entry is not None and named is None:
        raise UsageError(
            f"running these plans imports {model.entry}, which the file names; if you trust it, "
            f"name it yourself: --model {model.entry}"
        )
    if named is not None and named != (model.entry or model.name):
        raise UsageError(
            f"--model is {named}, but the plans are for {model.entry or model.name}; give the "
            "plans of that model, or its name"
        )


def recording_cost_s(ranks: Ranks, entries: Sequence[Entry]) -> float:
    """Seconds per recorded event on the slowest rank, measured on the ranks that will record."""
    first = entries[0].plan
    return float(max(ranks.group(first.num_ranks * first.data_parallel).run("recording_cost")))


def entries_of(plans: PlansFile, request: Request) -> list[Entry]:
    """The plans to run: the best ones and the baselines, or every candidate. Raises UsageError."""
    chosen = [
        Entry(plan=row.plan, predicted=row.estimate)
        for row in plans.candidates
        if request.exhaustive or row.rank <= request.top
    ]
    missing = plans.space.num_legal - plans.space.num_infeasible - len(plans.candidates)
    if request.exhaustive and missing > 0:
        raise UsageError(
            f"the plans file lists {len(plans.candidates)} of {plans.space.num_legal} legal plans; "
            "search again with a smaller space, so that it lists all of them"
        )
    for position, reference in enumerate(_references(plans, request)):
        same = next((entry for entry in chosen if entry.plan == reference.plan), None)
        entry = Entry(plan=reference.plan, predicted=reference.estimate, is_baseline=position == 0)
        if same is None:
            chosen.append(entry)
        elif position == 0:
            chosen[chosen.index(same)] = entry
    return chosen


def _references(plans: PlansFile, request: Request) -> list[PredictedPlan]:
    """The baseline, then what else to compare with."""
    if request.baseline is None:
        known = [plans.baseline, None if request.exhaustive else plans.baseline_same_size]
        return [each for each in known if each is not None]
    for row in plans.candidates:
        if is_named(request.baseline, row.plan):
            return [PredictedPlan(plan=row.plan, estimate=row.estimate)]
    raise UsageError(
        f"no plan in the file is {request.baseline!r}; search again with "
        f'--baseline "{request.baseline}"'
    )


def resumed_runs(previous: ValidationFile | None, request: Request, digest: str) -> tuple[Run, ...]:
    """The runs of an earlier validation of the same plans. Raises UsageError for another's."""
    if previous is None:
        return ()
    if previous.plans_digest != digest or previous.mode != request.mode:
        raise UsageError(
            "--resume: the validation file belongs to other plans or another mode; give the same "
            "plans file, or another --output"
        )
    return previous.runs


def with_own_links(
    profile: Profile, entries: Sequence[Entry], ranks: Ranks, watch: Watch
) -> Profile:
    """The profile with the links between the processes that replay, which are not the profiled
    machine's. The median link stands for all where plans differ in P."""
    sizes = sorted({entry.plan.num_ranks for entry in entries if entry.plan.num_ranks > 1})
    if not sizes:
        return profile
    watch.on_visit(0, 1, "measuring the links between the replaying processes")
    answer = ranks.group(sizes[-1]).run(
        "measure_links", {"max_noise": _LINK_NOISE, "budget_s": _LINK_BUDGET_S}
    )[0]
    return msgspec.structs.replace(
        profile,
        links=msgspec.convert(answer["links"], tuple[Link, ...]),
        machine=msgspec.structs.replace(profile.machine, ranks_per_node=None),
    )


def rehearsed(
    profile: Profile, entries: Sequence[Entry], run: RunPlan, watch: Watch
) -> tuple[Profile, list[Entry]]:
    """The profile with the overheads of replayed plans, and the entries predicted with it."""
    profile = calibrated_for(
        profile, [entry.plan for entry in entries], run, on_visit=watch.on_visit
    )
    model = CostModel(profile, Setting(target=parse_target("torch")))
    renewed = []
    for entry in entries:
        estimate = model.estimate(entry.plan)
        if isinstance(estimate, Infeasible):
            raise UsageError(f"{entry.plan.label}: {estimate.reason}")
        renewed.append(replace(entry, predicted=estimate))
    return profile, renewed


def calibrated_for(
    profile: Profile,
    plans: Iterable[Plan],
    run: RunPlan,
    *,
    on_visit: Callable[[int, int, str], None],
) -> Profile:
    """The profile with overheads measured by short runs of the schedules that `plans` use."""
    wanted = list(plans)
    calibrating = [
        plan
        for num_ranks in sorted({plan.num_ranks for plan in wanted if plan.num_ranks > 1})
        for plan in calibration_plans(
            profile,
            num_ranks,
            schedules=sorted({p.schedule for p in wanted if p.num_ranks == num_ranks}),
            avoid=wanted,
        )
    ]
    runs = run_calibration(
        calibrating,
        run,
        budget_s=_CALIBRATION_BUDGET_S,
        on_visit=lambda share, plan: on_visit(round(100 * share), 100, f"calibrating {plan.label}"),
    )
    return apply_calibration(profile, runs, stages_compute=False)


def digest_of(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
