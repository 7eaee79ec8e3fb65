"""An optuna study of visits: what ran, what it cost, and what was lost with its process.

One trial is one visit of a plan, its parameter the plan's index. COMPLETE: the plan may be the
fastest. PRUNED: it is clearly slower, or it cannot be run, which its constraint says. FAIL: its
process died during the visit. One process at a time uses a study.
"""

import hashlib
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import mean
from typing import TYPE_CHECKING

import msgspec

from pptune.plan import Plan
from pptune.plans_file import PlansFile
from pptune.search.study import INDEX, open_study, storage_errors
from pptune.validation_file import Run

if TYPE_CHECKING:
    import optuna

_RUN = "run"
"""User attribute: the plan's run up to and with this visit, as in validation.json."""

_ELAPSED = "elapsed_s"
"""User attribute: what the visit took, start-up included."""

_CANNOT_RUN = "cannot run"
"""Constraint: above 0 for a plan that ran out of memory, crashed or hung."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """How long to search, and where to remember it."""

    budget_s: float
    """Time that all visits of the study may take together; none starts after it."""
    study_name: str
    storage: str | None = None
    """An optuna storage's URL, or `journal://` and a file; null keeps the study in memory."""


def open_visit_study(
    search: Search, file: PlansFile, plans: Sequence[Plan], mode: str
) -> "VisitStudy":
    """The study of a search among `plans` of `file`; raises as VisitStudy does."""
    space = {
        "model": file.model.name,
        "dtype": file.dtype,
        "device": file.device,
        "mode": mode,
        "global_batch_size": file.global_batch_size,
        **file.space.axes,
    }
    return VisitStudy(search.storage, search.study_name, plans, space)


class VisitStudy:
    """The study called `name`, made or resumed."""

    def __init__(
        self, storage: str | None, name: str, plans: Sequence[Plan], space: Mapping[str, object]
    ) -> None:
        """`space` is what makes visits comparable besides the plans.

        Raises UsageError where a stored study was made for another space, FileError where the
        storage cannot be used.
        """
        self._labels = [plan.label for plan in plans]
        self._storage = storage
        digest = hashlib.sha256("\n".join(self._labels).encode()).hexdigest()
        self._study = open_study(
            storage=storage,
            name=name,
            num_objectives=1,
            space={**space, "num_plans": len(plans), "plans": digest[:12]},
            seed=0,
        )
        with self._errors():
            self._finished, self._lost = self._earlier()
        times = [float(trial.user_attrs[_ELAPSED]) for trial in self._finished]
        self.spent_s = sum(times) + (mean(times) * len(self._lost) if times else 0.0)
        """What all visits took; a lost one, whose end is not known, counts as an average one."""

    def runs(self) -> list[Run]:
        """After each earlier visit its plan's run, in the order of the visits."""
        return [msgspec.json.decode(trial.user_attrs[_RUN], type=Run) for trial in self._finished]

    def num_lost(self) -> Counter[int]:
        """How often a plan's visit was lost with its process, by index."""
        return Counter(trial.params[INDEX] for trial in self._lost if INDEX in trial.params)

    def start(self, index: int) -> "optuna.Trial":
        """The trial of a visit that begins."""
        import optuna

        with self._errors():
            self._study.sampler = optuna.samplers.PartialFixedSampler(
                {INDEX: index}, optuna.samplers.RandomSampler()
            )
            trial = self._study.ask()
            while trial.suggest_int(INDEX, 0, len(self._labels) - 1) != index:
                # Another plan, which someone enqueued: not what has been decided.
                self._study.tell(trial, state=optuna.trial.TrialState.PRUNED)
                trial = self._study.ask()
            trial.set_user_attr("plan", self._labels[index])
        return trial

    def finish(
        self,
        trial: "optuna.Trial",
        run: Run,
        visit_s: float | None,
        *,
        slower: bool,
        elapsed_s: float,
    ) -> None:
        """Store the visit: its step time, None where the plan cannot run, and the plan's run."""
        import optuna

        self.spent_s += elapsed_s
        compact = msgspec.structs.replace(run, timeline=None)
        with self._errors():
            trial.set_user_attr(_ELAPSED, elapsed_s)
            trial.set_user_attr(_RUN, msgspec.json.encode(compact).decode())
            if visit_s is not None and not slower:
                self._study.tell(trial, visit_s)
                return
            if visit_s is None:
                trial.set_constraint(_CANNOT_RUN, 1.0)
            else:
                trial.report(visit_s, step=len(run.samples_s))
            self._study.tell(trial, state=optuna.trial.TrialState.PRUNED)

    def _earlier(self) -> "tuple[list[optuna.trial.FrozenTrial], list[optuna.trial.FrozenTrial]]":
        """Trials of finished visits and of lost ones, after marking those that were under way."""
        from optuna.trial import TrialState

        for trial in self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            self._study.tell(trial.number, state=TrialState.FAIL)
        trials = self._study.get_trials(deepcopy=False)
        return (
            [trial for trial in trials if trial.state.is_finished() and _RUN in trial.user_attrs],
            [trial for trial in trials if trial.state == TrialState.FAIL],
        )

    @contextmanager
    def _errors(self) -> Iterator[None]:
        import optuna

        with storage_errors(self._storage), warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            yield
