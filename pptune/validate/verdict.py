"""What the finished runs say: errors, order, regret, winner or tie."""

from collections.abc import Callable, Sequence
from itertools import combinations
from statistics import median

from pptune.plan import Plan
from pptune.validation_file import Run, SimpleModel, Summary

Predict = Callable[[Plan], float | None]


def summarise(
    runs: Sequence[Run],
    *,
    exhaustive: bool,
    calibrated: frozenset[str] = frozenset(),
    models: dict[str, Predict] | None = None,
    device_time_s: float | None = None,
    found_by_running: bool = False,
) -> Summary:
    """The verdict. Plans whose labels are in `calibrated` never count as evidence of accuracy.

    What is compared with the baseline is the plan predicted to be the fastest, so that luck in its
    measurement is not what chose it; where plans were `found_by_running`, the fastest measured.
    """
    done = [run for run in runs if run.status == "ok" and run.measured_s is not None]
    judged = [run for run in done if run.plan.label not in calibrated]
    errors = [abs(run.error_ratio) for run in judged if run.error_ratio is not None]
    predicted = {run.plan.label: run.predicted_s for run in done}
    best = min(done, key=_measured, default=None)
    tied = [run for run in done if best is not None and is_tied(run, best)]
    baseline = next((run for run in done if run.is_baseline), None)
    pick = best if found_by_running else min(done, key=lambda run: run.predicted_s, default=None)
    return Summary(
        mape=_mean(errors),
        max_abs_error=max(errors, default=None),
        spearman=spearman([run.predicted_s for run in judged], [_measured(run) for run in judged]),
        regret_top1=regret(done, predicted, 1) if exhaustive else None,
        regret_top3=regret(done, predicted, 3) if exhaustive else None,
        winner=None if best is None else best.plan.label if len(tied) == 1 else "tie",
        tied_with=tuple(run.plan.label for run in tied) if len(tied) > 1 else (),
        speedup_over_baseline=None
        if baseline is None or pick is None
        else _measured(baseline) / _measured(pick),
        order_kept=None if len(done) < 2 else pairs_ordered(done, 0.0) == 1.0,
        num_plans=len(judged),
        noise_floor=noise_floor(judged),
        pairs_ordered=pairs_ordered(judged, noise_floor(judged) or 0.0),
        device_time_s=device_time_s,
        models={
            name: _simple_model(predict, judged, done) for name, predict in (models or {}).items()
        },
    )


def regret(done: Sequence[Run], predicted: dict[str, float], first: int) -> float | None:
    """Best measured time among the `first` plans predicted best / best measured of all - 1.

    Per global batch size, then the worst group: plans of different batches don't compete.
    """
    regrets = []
    for group in _groups(done):
        ranked = sorted(group, key=lambda run: predicted[run.plan.label])
        best = min(map(_measured, group))
        regrets.append(min(map(_measured, ranked[:first])) / best - 1)
    return max(regrets, default=None)


def pairs_ordered(done: Sequence[Run], noise: float) -> float | None:
    """Of pairs in a global-batch group whose measured gap exceeds twice the noise, the share
    predicted in the right order; None without such a pair. The noise of a pair is the largest of
    both plans' own and `noise`."""
    right = total = 0
    for group in _groups(done):
        for a, b in combinations(group, 2):
            if is_tied(a, b, floor=noise):
                continue
            total += 1
            right += (a.predicted_s < b.predicted_s) == (_measured(a) < _measured(b))
    return right / total if total else None


def noise_floor(done: Sequence[Run]) -> float | None:
    """Median over plans of |median of odd rounds / median of even rounds - 1|."""
    differences = []
    for run in done:
        parts = [
            [sample for sample, number in zip(run.samples_s, run.rounds, strict=False)
             if number % 2 == odd]
            for odd in (0, 1)
        ]  # fmt: skip
        if all(parts):
            differences.append(abs(median(parts[1]) / median(parts[0]) - 1))
    return median(differences) if differences else None


def spearman(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Rank correlation; None for fewer than three values or where one side is constant."""
    if len(a) < 3:
        return None
    x, y = _ranks(a), _ranks(b)
    mean = (len(a) - 1) / 2
    spread = [sum((value - mean) ** 2 for value in side) for side in (x, y)]
    if 0.0 in spread:
        return None
    shared = sum((u - mean) * (v - mean) for u, v in zip(x, y, strict=True))
    return float(shared / (spread[0] * spread[1]) ** 0.5)


def _simple_model(predict: Predict, judged: Sequence[Run], done: Sequence[Run]) -> SimpleModel:
    values = {run.plan.label: predict(run.plan) for run in done}
    known = {label: value for label, value in values.items() if value is not None}
    errors = [
        abs(known[run.plan.label] / _measured(run) - 1) for run in judged if run.plan.label in known
    ]
    complete = [run for run in done if run.plan.label in known]
    return SimpleModel(mape=_mean(errors), regret_top1=regret(complete, known, 1))


def is_tied(a: Run, b: Run, floor: float = 0.0) -> bool:
    """Whether the gap between two runs is within twice their noise."""
    noise = max(a.noise_ratio or 0.0, b.noise_ratio or 0.0, floor)
    slow, fast = max(_measured(a), _measured(b)), min(_measured(a), _measured(b))
    return slow / fast - 1 <= 2 * noise


def _measured(run: Run) -> float:
    if run.measured_s is None:
        raise AssertionError(f"{run.plan.label} has no measured time")
    return run.measured_s


def _groups(done: Sequence[Run]) -> list[list[Run]]:
    groups: dict[tuple[int, int], list[Run]] = {}
    for run in done:
        groups.setdefault((run.model_index, run.plan.global_batch_size), []).append(run)
    return list(groups.values())


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = [0.0] * len(values)
    start = 0
    while start < len(order):
        end = start
        while end + 1 < len(order) and values[order[end + 1]] == values[order[start]]:
            end += 1
        for index in order[start : end + 1]:
            ranks[index] = (start + end) / 2
        start = end + 1
    return ranks


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
