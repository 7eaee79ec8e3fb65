"""The search by running: fewer runs than the model's order takes, a sound winner, nothing twice."""

import math
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import optuna
import pytest
from numpy.typing import NDArray
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from pptune.cost_model import CostModel, Setting
from pptune.errors import FileError, RankFailure, UsageError
from pptune.estimate import Candidate, Estimate, PredictedPlan
from pptune.executors import Executor
from pptune.measured_step import Visit
from pptune.model import ModelSpec
from pptune.plan import Plan, even_layers, make_plan
from pptune.plans_file import PlansFile, ProfileReference, Space
from pptune.profiles import Overhead, StepConstants
from pptune.targets import illegal, parse_target
from pptune.validate import residuals
from pptune.validate.measured_search import Found, search_by_running
from pptune.validate.residuals import TIE_RATIO, Residuals, features
from pptune.validate.rounds import Entry, Rounds
from pptune.validate.verdict import summarise
from pptune.validate.visit_study import Search, VisitStudy
from pptune.validation_file import Run, ValidationFile, load_validation
from tests.synthetic import synthetic_profile, uniform_link

Floats = NDArray[np.float64]

ROUNDS = Rounds(repeats=3, steps_per_visit=2)
STUDY = "runs"

RECORDED = Path(__file__).parent / "data" / "exhaustive"
"""Validations of every plan of a space; replay_p4: 27 plans of gpt-small-cpu with 16 blocks on 4
replaying processes, 2 cores that others used as well, which the prediction did not know."""


# Spaces and what their plans really take --------------------------------------------------------


@cache
def space(num_ranks: int, num_layers: int, batch: int, recompute: bool) -> tuple[Entry, ...]:
    """Every plan that torch can run on the axes, with its prediction, best first."""
    model = CostModel(
        synthetic_profile(
            num_layers=num_layers,
            num_ranks=num_ranks,
            block=lambda b: ((0.6 + b) * 1e-3, (1.2 + 2 * b) * 1e-3),
            recomputed_block=lambda b: ((0.6 + b) * 1e-3, (1.8 + 3 * b) * 1e-3),
            embedding=1e-3,
            head=4e-3,
            sizes=(1, 2, 4, 8, 16),
            links=[uniform_link(2e-4, 1e9)],
            boundary_bytes=200_000,
            overheads={str(each): Overhead(forward_s=3e-4, backward_s=3e-4) for each in Executor},
            step_constants=StepConstants(fixed_s=5e-3),
        ),
        Setting(target=parse_target("torch")),
    )
    entries = []
    for chunks in (1, 2, 4, 8):
        layers = even_layers(num_layers, num_ranks * chunks)
        for schedule in ("gpipe", "1f1b") if chunks == 1 else ("interleaved",):
            for b in (1, 2, 4, 8, 16):
                for kept in ("none", "full") if recompute else ("none",):
                    if layers is None or batch % b:
                        continue
                    plan = make_plan(
                        schedule=schedule,  # type: ignore[arg-type]
                        num_ranks=num_ranks,
                        num_chunks=chunks,
                        microbatch_size=b,
                        num_microbatches=batch // b,
                        layers_per_stage=layers,
                        recompute=kept,  # type: ignore[arg-type]
                    )
                    if illegal(plan, parse_target("torch")) is None:
                        estimate = model.estimate(plan)
                        assert isinstance(estimate, Estimate)
                        entries.append(Entry(plan=plan, predicted=estimate))
    return tuple(sorted(entries, key=lambda entry: entry.predicted.step_time_s))


SPACES = ((2, 16, 32, False), (4, 16, 64, True), (8, 32, 64, True))


def predicted(entries: Sequence[Entry]) -> Floats:
    return np.array([entry.predicted.step_time_s for entry in entries])


def wrong_by(entries: Sequence[Entry], level: float, seed: int) -> Floats:
    """Step times that differ from the predictions by what V, b, recompute and schedule cost more.

    The deviations of log(true / predicted) over the plans have the standard deviation `level`; a
    fifth of it is each plan's own.
    """
    draw = np.random.default_rng([seed, len(entries), round(100 * level)])
    plans = [entry.plan for entry in entries]
    chunks = np.log2([plan.num_chunks for plan in plans]) / 2
    size = np.log2([plan.microbatch_size for plan in plans]) / 3
    error = draw.normal() * chunks + draw.normal() * size + draw.normal() * (size - 0.6) ** 2
    error += draw.normal() * np.array([plan.recompute == "full" for plan in plans]) / 2
    error += draw.normal() * np.array([plan.schedule == "gpipe" for plan in plans]) / 2
    error = error / error.std() + draw.normal(size=len(plans)) / 5
    times: Floats = predicted(entries) * np.exp(0.1 + level * (error - error.mean()) / error.std())
    return times


@dataclass(slots=True)
class Machine:
    """Runs plans in no time: true times with noise, a clock that visits move on by 1 s."""

    times: dict[Plan, float]
    visits: dict[Plan, list[tuple[float, ...]]] = field(default_factory=dict)
    """Recorded ones to draw from, instead of noise around the true time."""
    noise: float = 0.0
    seed: int = 0
    log: list[Plan] = field(default_factory=list)
    now_s: float = 0.0
    before: Callable[[Plan], None] = lambda plan: None

    def __call__(self, plan: Plan, *, steps: int, memory: bool) -> Visit:
        self.log.append(plan)
        self.now_s += 1.0
        self.before(plan)
        draw = np.random.default_rng([self.seed, len(self.log)])
        if plan in self.visits:
            return Visit(samples_s=self.visits[plan][draw.integers(len(self.visits[plan]))])
        factors = np.exp(draw.normal(0, self.noise / 2) + draw.normal(0, self.noise, steps))
        return Visit(samples_s=tuple(map(float, self.times[plan] * factors)))


def machine(entries: Sequence[Entry], times: Floats, **fields: Any) -> Machine:
    truth = {entry.plan: float(time) for entry, time in zip(entries, times, strict=True)}
    return Machine(truth, **fields)


def find(
    entries: Sequence[Entry],
    run: Machine,
    *,
    budget_s: float = 1000.0,
    storage: str | None = None,
    rounds: Rounds = ROUNDS,
    space: dict[str, object] | None = None,
    **options: Any,
) -> Found:
    return search_by_running(
        entries,
        run,
        study=VisitStudy(storage, STUDY, [entry.plan for entry in entries], space or {}),
        budget_s=budget_s,
        rounds=rounds,
        clock=lambda: run.now_s,
        **options,
    )


def winner(found: Found) -> Plan:
    done = [run for run in found.runs if run.measured_s is not None]
    return min(done, key=lambda run: run.measured_s or math.inf).plan


# How many runs it takes -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """What every plan of a space is predicted to take and takes."""

    entries: tuple[Entry, ...]
    times: Floats
    visits: dict[Plan, list[tuple[float, ...]]] = field(default_factory=dict)

    @property
    def good(self) -> NDArray[np.bool_]:
        """Which plans are within a tie of the best one."""
        return self.times <= self.times.min() * (1 + TIE_RATIO)


def tables(levels: Sequence[float], draws: range) -> list[Table]:
    """Every space with errors of every level."""
    return [
        Table(entries=space(*size), times=wrong_by(space(*size), level, draw))
        for size in SPACES
        for level in levels
        for draw in draws
    ]


def recorded(path: Path) -> Table:
    """A validation of every plan of a space; a plan takes the median of all its steps."""
    file = load_validation(path)
    blank = space(*SPACES[0])[0].predicted
    runs = sorted(file.runs, key=lambda run: run.predicted_s)
    visits: dict[Plan, list[tuple[float, ...]]] = {}
    for run in runs:
        rounds = sorted(set(run.rounds))
        samples = list(zip(run.rounds, run.samples_s, strict=True))
        visits[run.plan] = [tuple(s for r, s in samples if r == number) for number in rounds]
    return Table(
        entries=tuple(
            Entry(
                plan=run.plan, predicted=msgspec.structs.replace(blank, step_time_s=run.predicted_s)
            )
            for run in runs
        ),
        times=np.array([np.median(run.samples_s) for run in runs]),
        visits=visits,
    )


class _Reached(Exception):
    """A plan within a tie of the best has run."""


def runs_to_reach(table: Table, *, seed: int) -> int:
    """Runs until a plan within a tie of the best one has run, with 3 % noise where the table has no
    recorded visits; a search that ends before counts as if all plans had run."""
    run = machine(table.entries, table.times, visits=table.visits, noise=0.03, seed=seed)
    good = {entry.plan for entry, is_good in zip(table.entries, table.good, strict=True) if is_good}

    def stop(plan: Plan) -> None:
        if plan in good:
            raise _Reached

    run.before = stop
    try:
        find(table.entries, run, budget_s=10 * len(table.times))
    except _Reached:
        return len(run.log)
    return max(len(run.log), len(table.times))


def by_model(table: Table) -> int:
    """The same when plans run in the order predicted."""
    return int(np.argmax(table.good)) + 1


def by_chance(table: Table) -> float:
    """The same in random order: the mean place of the first of g good ones among n."""
    return (len(table.times) + 1) / (int(table.good.sum()) + 1)


def check_few_runs(some: Sequence[Table], seeds: range, *, share: float) -> None:
    """That `share` of the searches take up to 30 % of the runs, and fewer than in other orders."""
    runs = np.array([[runs_to_reach(table, seed=seed) for seed in seeds] for table in some])
    allowed = [0.3 * len(table.times) for table in some]
    assert np.mean(runs <= np.array(allowed)[:, None]) >= share
    assert runs.mean() < np.mean([by_chance(table) for table in some]) / 2
    assert runs.mean() <= np.mean([by_model(table) for table in some])


def test_a_good_plan_is_found_in_few_runs() -> None:
    check_few_runs(tables([0.05, 0.15, 0.3], range(3)), range(2), share=0.85)


@pytest.mark.parametrize(
    "seeds", [range(10), pytest.param(range(50), marks=pytest.mark.slow)], ids=len
)
@pytest.mark.parametrize("path", sorted(RECORDED.glob("*.json")), ids=lambda path: path.stem)
def test_recorded_plans_are_found_in_few_runs(path: Path, seeds: range) -> None:
    check_few_runs([recorded(path)], seeds, share=0.9)


@pytest.mark.slow
def test_nine_of_ten_searches_need_less_than_a_third_of_the_runs() -> None:
    check_few_runs(tables([0.05, 0.15, 0.3], range(4)), range(50), share=0.9)


def test_a_right_model_ends_the_search_early() -> None:
    entries = space(*SPACES[1])
    run = machine(entries, predicted(entries) * 1.3, noise=0.01)
    found = find(entries, run)
    assert winner(found) == entries[0].plan
    assert len(set(run.log)) <= len(entries) / 4
    assert found.warnings == ()


def test_a_model_that_ranks_backwards_is_found_out() -> None:
    entries = space(*SPACES[0])
    run = machine(entries, 1 / predicted(entries), noise=0.01)
    best_s = min(run.times.values())
    assert run.times[entries[0].plan] > 1.3 * best_s
    assert run.times[winner(find(entries, run))] < 1.1 * best_s


# The winner -------------------------------------------------------------------------------------


def with_best(entries: Sequence[Entry], *best: int) -> Floats:
    """The predicted times, but those of some plans are equal and 10 % below the least."""
    times = predicted(entries)
    times[list(best)] = times.min() * 0.9
    return times


def test_finalists_and_baseline_are_visited_again_and_in_turn() -> None:
    entries = list(space(*SPACES[0]))
    entries[20] = replace(entries[20], is_baseline=True)
    run = machine(entries, with_best(entries, 1, 4), noise=0.02)
    found = find(entries, run)
    visits = Counter(run.log)
    one, other, baseline = (entries[index].plan for index in (1, 4, 20))
    assert min(visits[plan] for plan in (one, other, baseline)) >= ROUNDS.repeats
    confirming = [plan for plan in run.log if plan in (one, other)][2:]
    assert all(a != b for a, b in pairwise(confirming))
    summary = summarise(found.runs, exhaustive=False)
    assert summary.winner in ("tie", one.label, other.label)
    assert {each.plan for each in found.runs if each.is_baseline} == {baseline}


def test_equal_plans_end_as_a_tie_after_a_bounded_number_of_visits() -> None:
    entries = space(*SPACES[0])
    run = machine(entries, with_best(entries, 0, 3))
    summary = summarise(find(entries, run).runs, exhaustive=False)
    assert summary.winner == "tie"
    assert {entries[0].plan.label, entries[3].plan.label} <= set(summary.tied_with)
    assert max(Counter(run.log).values()) == 3 * ROUNDS.repeats


def test_a_plan_that_was_lucky_once_is_visited_again_before_it_wins() -> None:
    entries = space(*SPACES[0])
    times = with_best(entries, *range(10))
    for seed in range(4):
        found = find(entries, machine(entries, times, noise=0.06, seed=seed))
        (lucky,) = (each for each in found.runs if each.plan == winner(found))
        assert len(set(lucky.rounds)) >= ROUNDS.repeats


def test_a_best_plan_that_crashes_later_leaves_the_race() -> None:
    entries = space(*SPACES[0])
    times = with_best(entries, 0, 1)
    times[2] = times[0] * 0.9
    run = machine(entries, times)
    crashing = entries[2].plan

    def crash(plan: Plan) -> None:
        if plan == crashing and run.log.count(plan) > 1:
            raise RankFailure("rank 0: crash", rank=0, reason="crash")

    run.before = crash
    found = find(entries, run)
    assert run.log.count(crashing) == 2
    assert min(run.log.count(entries[index].plan) for index in (0, 1)) >= ROUNDS.repeats
    assert next(each for each in found.runs if each.plan == crashing).status == "crash"


# The budget -------------------------------------------------------------------------------------


def test_no_visit_starts_after_the_budget() -> None:
    entries = space(*SPACES[0])
    run = machine(entries, wrong_by(entries, 0.3, 0), noise=0.05)
    found = find(entries, run, budget_s=4.5)
    assert len(run.log) == 5
    assert any("larger --budget" in warning for warning in found.warnings)
    assert {each.plan for each in found.runs} == set(run.log)


def test_a_short_budget_still_confirms_the_best() -> None:
    entries = space(*SPACES[1])
    run = machine(entries, wrong_by(entries, 0.3, 2), noise=0.05)
    find(entries, run, budget_s=10)
    assert max(Counter(run.log[:6]).values()) == 1
    assert max(Counter(run.log).values()) > 1


def test_what_happens_is_told_and_saved_after_each_visit() -> None:
    entries = space(*SPACES[0])
    run = machine(entries, predicted(entries))
    told: list[tuple[float, float, str]] = []
    saved: list[int] = []
    find(
        entries,
        run,
        budget_s=6,
        on_visit=lambda spent_s, budget_s, plan: told.append((spent_s, budget_s, plan.label)),
        on_saved=lambda runs: saved.append(sum(len(set(each.rounds)) for each in runs)),
    )
    assert told == [(float(i), 6.0, plan.label) for i, plan in enumerate(run.log)]
    assert saved == list(range(1, 7))


# Plans that cannot run --------------------------------------------------------------------------


def failing(reason: str, *plans: Plan) -> Callable[[Plan], None]:
    def before(plan: Plan) -> None:
        if plan in plans:
            raise RankFailure(f"rank 1: {reason}", rank=1, reason=reason)

    return before


@pytest.mark.parametrize("reason", ["oom", "crash", "timeout"])
def test_a_plan_that_cannot_run_is_a_constraint_and_never_tried_again(
    reason: str, tmp_path: Path
) -> None:
    entries = space(*SPACES[0])
    bad = [entries[0].plan, entries[1].plan]
    storage = journal(tmp_path)
    run = machine(entries, predicted(entries), before=failing(reason, *bad))
    failed: list[Plan] = []
    found = find(
        entries, run, budget_s=8, storage=storage, on_failed=lambda plan, _: failed.append(plan)
    )
    again = machine(entries, predicted(entries), before=failing(reason, *bad))
    find(entries, again, budget_s=12, storage=storage)
    assert all((run.log + again.log).count(plan) == 1 for plan in bad)
    assert failed == bad
    assert [each.status for each in found.runs[:2]] == [reason, reason]
    infeasible = [
        trial for trial in stored(storage) if any(value > 0 for value in trial.constraints.values())
    ]
    assert [trial.params["plan_index"] for trial in infeasible] == [0, 1]
    assert all(trial.state == optuna.trial.TrialState.PRUNED for trial in infeasible)


def test_when_nothing_runs_every_plan_is_tried_once() -> None:
    entries = space(*SPACES[0])[:5]
    run = machine(
        entries, predicted(entries), before=failing("oom", *(entry.plan for entry in entries))
    )
    found = find(entries, run)
    assert run.log == [entry.plan for entry in entries]
    assert {each.status for each in found.runs} == {"oom"}


# The study --------------------------------------------------------------------------------------


def journal(folder: Path) -> str:
    return f"journal://{folder}/study.log"


def study_in(storage: str) -> optuna.Study:
    if storage.startswith("sqlite"):
        return optuna.load_study(study_name=STUDY, storage=storage)
    backend = JournalFileBackend(storage.removeprefix("journal://"))
    return optuna.load_study(study_name=STUDY, storage=JournalStorage(backend))


def stored(storage: str) -> list[optuna.trial.FrozenTrial]:
    return study_in(storage).trials


def test_the_study_tells_the_whole_search(tmp_path: Path) -> None:
    entries = space(*SPACES[0])
    storage = f"sqlite:///{tmp_path}/study.db"
    run = machine(entries, wrong_by(entries, 0.3, 1), noise=0.01)
    find(entries, run, budget_s=7, storage=storage)
    trials = stored(storage)
    assert [trial.user_attrs["plan"] for trial in trials] == [plan.label for plan in run.log]
    assert [entries[trial.params["plan_index"]].plan for trial in trials] == run.log
    complete, pruned = (
        {run.log[trial.number] for trial in trials if trial.state == state}
        for state in (optuna.trial.TrialState.COMPLETE, optuna.trial.TrialState.PRUNED)
    )
    best = min(run.times[plan] for plan in run.log)
    assert min(run.times[plan] for plan in complete) == best
    # Pruned after one visit: slower by more than the noise.
    assert pruned
    assert min(run.times[plan] for plan in pruned) > best * 1.02
    for trial in trials:
        assert trial.value == pytest.approx(run.times[run.log[trial.number]], rel=0.05)


class _Killed(BaseException):
    """Stands for whatever ends the process in the middle of a visit."""


def test_an_interrupted_search_goes_on_where_it_was(tmp_path: Path) -> None:
    entries = space(*SPACES[0])
    times = wrong_by(entries, 0.3, 1)
    storage = journal(tmp_path)
    whole = machine(entries, times)
    expected = find(entries, whole, budget_s=60)

    first = machine(entries, times)

    def kill(plan: Plan) -> None:
        if len(first.log) == 4:
            raise _Killed

    first.before = kill
    with pytest.raises(_Killed):
        find(entries, first, budget_s=60, storage=storage)
    second = machine(entries, times)
    found = find(entries, second, budget_s=60, storage=storage)

    assert first.log[:3] + second.log == whole.log
    assert [each.samples_s for each in found.runs] == [each.samples_s for each in expected.runs]
    states = [trial.state for trial in stored(storage)]
    assert states.index(optuna.trial.TrialState.FAIL) == 3
    assert states.count(optuna.trial.TrialState.FAIL) == 1


def test_the_budget_is_the_study_s_and_lost_visits_count(tmp_path: Path) -> None:
    entries = space(*SPACES[0])
    storage = journal(tmp_path)
    run = machine(entries, wrong_by(entries, 0.3, 0), noise=0.05)

    def kill(plan: Plan) -> None:
        if len(run.log) == 5:
            raise _Killed

    run.before = kill
    with pytest.raises(_Killed):
        find(entries, run, budget_s=10, storage=storage)
    again = machine(entries, wrong_by(entries, 0.3, 0), noise=0.05, seed=1)
    find(entries, again, budget_s=10, storage=storage)
    assert len(again.log) == 5  # 4 visits and a lost one took 5 of 10 s
    spent = machine(entries, wrong_by(entries, 0.3, 0))
    find(entries, spent, budget_s=10, storage=storage)
    assert spent.log == []


def test_a_plan_that_kills_the_search_twice_is_left_out(tmp_path: Path) -> None:
    entries = space(*SPACES[0])
    storage = journal(tmp_path)
    deadly = entries[0].plan

    def kill(plan: Plan) -> None:
        if plan == deadly:
            raise _Killed

    for _ in range(2):
        with pytest.raises(_Killed):
            find(entries, machine(entries, predicted(entries), before=kill), storage=storage)
    run = machine(entries, predicted(entries), before=kill)
    found = find(entries, run, storage=storage)
    assert deadly not in run.log
    assert any(deadly.label in warning for warning in found.warnings)


_SEARCH = """
import os, signal, sys
from tests.test_measured_search import SPACES, find, machine, predicted, space

entries = space(*SPACES[0])
run = machine(entries, predicted(entries))
def kill(plan):
    if len(run.log) == 4:
        os.kill(os.getpid(), signal.SIGKILL)
run.before = kill
find(entries, run, storage=sys.argv[1])
"""


def test_a_killed_process_loses_one_visit_of_a_journal_file(tmp_path: Path) -> None:
    entries = space(*SPACES[0])
    storage = journal(tmp_path)
    killed = subprocess.run(
        [sys.executable, "-c", _SEARCH, storage], cwd=Path(__file__).parent.parent, check=False
    )
    assert killed.returncode == -signal.SIGKILL
    run = machine(entries, predicted(entries))
    found = find(entries, run, storage=storage)
    whole = machine(entries, predicted(entries))
    find(entries, whole)
    assert run.log == whole.log[3:]
    assert sum(len(set(each.rounds)) for each in found.runs) == len(whole.log)


def test_a_study_of_other_plans_is_refused(tmp_path: Path) -> None:
    entries = space(*SPACES[0])
    storage = journal(tmp_path)
    find(entries, machine(entries, predicted(entries)), budget_s=2, storage=storage,
         space={"num_chunks": ("1", "2")})  # fmt: skip
    with pytest.raises(UsageError, match=r"search space of study 'runs' has changed.*num_chunks"):
        find(entries, machine(entries, predicted(entries)), storage=storage,
             space={"num_chunks": ("1", "2", "4")})  # fmt: skip
    fewer = entries[:-1]
    with pytest.raises(UsageError, match="num_plans was 25, is 24"):
        find(fewer, machine(fewer, predicted(fewer)), storage=storage,
             space={"num_chunks": ("1", "2")})  # fmt: skip


def test_a_storage_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    entries = space(*SPACES[0])
    with pytest.raises(FileError, match="nowhere"):
        find(entries, machine(entries, predicted(entries)),
             storage=f"sqlite:///{tmp_path}/nowhere/study.db")  # fmt: skip


def test_without_storage_the_runs_of_a_validation_file_count() -> None:
    entries = space(*SPACES[0])
    times = wrong_by(entries, 0.3, 1)
    first = machine(entries, times)
    saved: list[Run] = []

    def kill(plan: Plan) -> None:
        if len(first.log) == 5:
            raise _Killed

    first.before = kill
    with pytest.raises(_Killed):
        find(entries, first, on_saved=lambda runs: saved.__setitem__(slice(None), runs))
    second = machine(entries, times)
    find(entries, second, resumed=saved)
    whole = machine(entries, times)
    find(entries, whole)
    assert first.log[:4] + second.log == whole.log


def test_a_plan_another_user_enqueued_does_not_take_the_place_of_the_chosen(
    tmp_path: Path,
) -> None:
    entries = space(*SPACES[0])
    storage = journal(tmp_path)
    find(entries, machine(entries, predicted(entries)), budget_s=1, storage=storage)
    study_in(storage).enqueue_trial({"plan_index": 7})
    run = machine(entries, predicted(entries))
    find(entries, run, budget_s=3, storage=storage)
    visited = [trial.user_attrs.get("plan") for trial in stored(storage)]
    assert visited == [entries[0].plan.label, None, *(plan.label for plan in run.log)]


# The command ------------------------------------------------------------------------------------


def plans_file(entries: Sequence[Entry]) -> PlansFile:
    rows = [
        Candidate(rank=rank, plan=entry.plan, estimate=entry.predicted)
        for rank, entry in enumerate(entries, start=1)
    ]
    baseline = next(row for row in rows if row.plan.schedule == "1f1b")
    return PlansFile(
        profile=ProfileReference(path="profile.json", digest=""),
        model=ModelSpec(name="model", family="custom", num_layers=16, seq_len=1),
        dtype="float32",
        device="cpu",
        global_batch_size=32,
        target="torch",
        space=Space(num_legal=len(rows), axes={"num_chunks": ("1", "2", "4", "8")}),
        proven_optimal=True,
        baseline=PredictedPlan(plan=baseline.plan, estimate=baseline.estimate),
        candidates=tuple(rows),
    )


def test_validate_searches_within_a_budget_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pptune import validate as validation  # loads torch, which no other test here needs

    entries = space(*SPACES[0])
    run = machine(entries, wrong_by(entries, 0.3, 1))
    monkeypatch.setattr("pptune.validate.runner", lambda *args, **options: run)
    file = plans_file(entries)
    request = validation.Request(
        top=len(entries),
        search=Search(budget_s=600, study_name=STUDY, storage=journal(tmp_path)),
        rounds=Rounds(repeats=2),
        device="cpu",
    )
    saved: list[ValidationFile] = []
    watch = validation.Watch(on_saved=saved.append)
    first = validation.validate(file, request, digest="d", profile=None, watch=watch)
    assert first.summary is not None
    best = min(run.times, key=run.times.__getitem__)
    assert best != entries[0].plan
    assert first.summary.winner == best.label
    assert first.summary.speedup_over_baseline is not None
    assert len(run.log) < len(entries)
    assert [len(each.runs) for each in saved] == sorted(len(each.runs) for each in saved)
    run.log.clear()
    again = validation.validate(file, request, digest="d", profile=None, watch=watch)
    assert run.log == []
    assert again.runs == first.runs


def test_a_storage_needs_a_budget(tmp_path: Path) -> None:
    from pptune.cli.validate import validate as validate_command

    for options in ({}, {"budget": "10m", "exhaustive": True}):
        with pytest.raises(UsageError, match="--budget"):
            validate_command(tmp_path / "plans.json", storage="sqlite:///x", **options)


# What runs say about other plans ----------------------------------------------------------------


def test_the_outlook_is_what_weighed_draws_from_the_prior_give() -> None:
    entries = [space(*SPACES[0])[index] for index in (0, 3, 8, 15)]
    plans = [entry.plan for entry in entries]
    seconds = predicted(entries)
    visits = [(0, 1.1 * seconds[0]), (2, 1.3 * seconds[2]), (0, 1.15 * seconds[0])]
    outlook = Residuals(plans, list(seconds)).outlook(visits)

    draw = np.random.default_rng(0)
    num = 60_000
    apart = ((features(plans)[:, None] - features(plans)[None]) ** 2).sum(2)
    alike = np.linalg.cholesky(np.exp(-apart / (2 * residuals._REACH**2)) + 1e-9 * np.eye(4))
    own = residuals._OWN_SHARE
    values, weights = [], []
    for error in residuals._ERRORS:
        shared = draw.normal(size=(num, 4)) @ alike.T
        between = np.sqrt(1 - own) * shared + np.sqrt(own) * draw.normal(size=(num, 4))
        log_ratios = residuals._COMMON_ERROR * draw.normal(size=(num, 1)) + error * between
        for noise in residuals._NOISES:
            likelihood = np.ones(num)
            for index, measured_s in visits:
                off = math.log(measured_s / seconds[index]) - log_ratios[:, index]
                likelihood *= np.exp(-(off**2) / (2 * noise**2)) / noise
            values.append(np.log(seconds) + log_ratios)
            weights.append(likelihood)
    steps, weight = np.concatenate(values), np.concatenate(weights)

    assert outlook.best == 0
    expected = np.exp((steps * weight[:, None]).sum(0) / weight.sum())
    assert outlook.expected_s == pytest.approx(expected, rel=0.005)
    lead = steps[:, [0]] - steps
    faster = ((lead > 0) * weight[:, None]).sum(0) / weight.sum()
    worthwhile = ((lead > np.log(1 + TIE_RATIO)) * weight[:, None]).sum(0) / weight.sum()
    assert outlook.chance_faster[1:] == pytest.approx(faster[1:], abs=0.02)
    assert outlook.chance_worthwhile[1:] == pytest.approx(worthwhile[1:], abs=0.02)


def test_an_error_that_all_plans_share_does_not_change_their_order() -> None:
    entries = space(*SPACES[0])
    seconds = predicted(entries)
    model = Residuals([entry.plan for entry in entries], list(seconds))
    outlook = model.outlook([(index, 1.5 * seconds[index]) for index in (0, 5, 11)])
    ratio = outlook.expected_s / seconds
    assert ratio == pytest.approx(1.5, rel=0.05)
    assert ratio.max() / ratio.min() < 1.01


def test_a_slow_plan_makes_its_neighbours_less_promising() -> None:
    entries = space(*SPACES[0])
    seconds = predicted(entries)
    plans = [entry.plan for entry in entries]
    outlook = Residuals(plans, list(seconds)).outlook(
        [(0, seconds[0]), (4, seconds[4]), (10, 1.5 * seconds[10])]
    )
    distances = ((features(plans) - features(plans)[10]) ** 2).sum(1)
    distances[[0, 4, 10]] = np.inf
    near = int(np.argmin(distances))
    distances[[0, 4, 10]] = 0
    far = int(np.argmax(distances))
    ratio = outlook.expected_s / seconds
    assert ratio[near] > ratio[far]
