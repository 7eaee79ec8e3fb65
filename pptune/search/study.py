"""The optuna study behind a search: sampling of large spaces, storage, resuming.

A trial's parameter is the index of a legal plan in the list sorted by its bound, so that an illegal
plan cannot be sampled and neighbours are alike; plans that do not fit are reported as constraints.
"""

import contextlib
import json
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from pptune.errors import FileError, UsageError
from pptune.plan import Plan

if TYPE_CHECKING:
    import optuna

INDEX = "plan_index"
SPACE = "pptune_space"
_PAUSES_S = (0.05, 0.1, 0.2)
"""Before a database is tried again."""

Values = tuple[float, ...]


def open_study(
    *,
    storage: str | None,
    name: str,
    num_objectives: int,
    space: Mapping[str, object],
    seed: int,
) -> "optuna.Study":
    """The study called `name`, made or resumed.

    `space` is what makes trials comparable. Raises UsageError where a stored study was made for
    another one, FileError where the storage cannot be used.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    sampler: optuna.samplers.BaseSampler
    if num_objectives == 1:
        sampler = optuna.samplers.TPESampler(seed=seed)
    else:
        sampler = optuna.samplers.NSGAIISampler(seed=seed)
    # An outdated schema is a RuntimeError, a missing driver an ImportError.
    with storage_errors(storage, RuntimeError, ImportError):
        study = optuna.create_study(
            storage=_storage(storage),
            study_name=name,
            directions=["minimize"] * num_objectives,
            sampler=sampler,
            load_if_exists=True,
        )
        stored = study.user_attrs.get(SPACE)
        if stored is None and not study.trials:
            study.set_user_attr(SPACE, json.dumps(space))
        else:
            _check_space(stored, space, name, len(study.directions) == num_objectives)
    return study


def record(
    study: "optuna.Study",
    plans: Sequence[tuple[int, Plan, Values]],
    *,
    num_plans: int,
    storage: str | None,
) -> None:
    """Store finished plans as trials; those already there are left alone. Raises FileError."""
    import optuna

    distributions: dict[str, optuna.distributions.BaseDistribution] = {
        INDEX: optuna.distributions.IntDistribution(0, max(num_plans - 1, 0))
    }
    with storage_errors(storage):
        done = {trial.params.get(INDEX) for trial in study.get_trials(deepcopy=False)}
        study.add_trials(
            [
                optuna.create_trial(
                    params={INDEX: index},
                    distributions=distributions,
                    values=list(values),
                    user_attrs={"plan": plan.label},
                )
                for index, plan, values in plans
                if index not in done
            ]
        )


def sample(
    study: "optuna.Study",
    *,
    num_plans: int,
    num_trials: int,
    timeout_s: float | None,
    storage: str | None,
    first: Sequence[int],
    score: Callable[[int], tuple[Values, float]],
    label: Callable[[int], str],
) -> list[int]:
    """Indices of the plans that trials scored, those of earlier runs of the study included.

    `score` gives a plan's objectives and by how much it breaks the memory limit (0 or less: fits);
    `first` are tried before the sampler chooses. Trials finished earlier count towards
    `num_trials`. Raises FileError where the storage fails.
    """
    import optuna

    def objective(trial: "optuna.Trial") -> Values:
        index = trial.suggest_int(INDEX, 0, num_plans - 1)
        values, excess = score(index)
        trial.set_constraint("memory", excess)
        trial.set_user_attr("plan", label(index))
        return values

    complete = optuna.trial.TrialState.COMPLETE
    with storage_errors(storage), warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        tried = {trial.params.get(INDEX) for trial in study.get_trials(deepcopy=False)}
        for index in first:
            if index not in tried:
                study.enqueue_trial({INDEX: index}, skip_if_exists=True)
        remaining = num_trials - len(study.get_trials(deepcopy=False, states=(complete,)))
        if remaining > 0:
            study.optimize(
                objective,
                n_trials=remaining,
                timeout=timeout_s,
                callbacks=[optuna.study.MaxTrialsCallback(num_trials, states=(complete,))],
            )
        finished = study.get_trials(deepcopy=False, states=(complete,))
    return sorted({int(trial.params[INDEX]) for trial in finished})


@contextlib.contextmanager
def storage_errors(url: str | None, *others: type[Exception]) -> Iterator[None]:
    """What a storage can raise, and `others`, as one FileError that names it."""
    import optuna
    import sqlalchemy

    where = "the study in memory" if url is None else f"storage {url}"
    caught: tuple[type[Exception], ...] = (
        OSError,
        json.JSONDecodeError,
        sqlalchemy.exc.SQLAlchemyError,
        optuna.exceptions.OptunaError,
    )
    try:
        yield
    except (*caught, *others) as error:
        cause = error.__cause__ or error
        text = str(getattr(cause, "orig", None) or cause).splitlines()
        raise FileError(
            f"{where} cannot be used: {text[0] if text else type(cause).__name__}; check the path, "
            "that it is an optuna storage, and that no other process locks it"
        ) from None


def _storage(url: str | None) -> "optuna.storages.BaseStorage | None":
    """The storage of a URL; `journal:///path` is optuna's journal file."""
    from optuna.storages import JournalStorage, get_storage
    from optuna.storages.journal import JournalFileBackend
    from sqlalchemy.exc import DatabaseError

    if url is None:
        return None
    if url.startswith("journal://"):
        return JournalStorage(JournalFileBackend(url.removeprefix("journal://")))
    for pause_s in _PAUSES_S:
        # Of two commands that make the same tables at once, one fails, and finds them made later.
        with contextlib.suppress(DatabaseError):
            return get_storage(url)
        time.sleep(pause_s)
    return get_storage(url)


def _check_space(
    stored: str | None, space: Mapping[str, object], name: str, same_objectives: bool
) -> None:
    if stored is None or not same_objectives:
        raise UsageError(f"study {name!r} was not made by this search; choose another --study-name")
    before = json.loads(stored)
    now = json.loads(json.dumps(space))
    changed = sorted(key for key in {*before, *now} if before.get(key) != now.get(key))
    if changed:
        shown = "; ".join(f"{key} was {before.get(key)}, is {now.get(key)}" for key in changed[:3])
        raise UsageError(
            f"the search space of study {name!r} has changed ({shown}); use the same options, or "
            "another --study-name"
        )
