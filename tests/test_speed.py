"""Samples at the machine's mean speed (runtime/speed.py), against machines made up here."""

import numpy as np
import pytest
from numpy.typing import NDArray

from pptune.runtime.speed import at_mean_speed

USUAL_S = np.array([0.002, 0.01, 0.03, 0.06])
"""What four kinds of laps take at full speed."""

Laps = tuple[NDArray[np.intp], NDArray[np.float64]]


def laps_of(seed: int, *, flips: bool, num_laps: int = 400, noise: float = 0.02) -> Laps:
    """Laps in random order on a core that runs at two speeds, each kept for about 0.8 s."""
    generator = np.random.default_rng(seed)
    kinds = generator.integers(0, len(USUAL_S), num_laps)
    kinds[: len(USUAL_S)] = range(len(USUAL_S))
    seconds, now_s, slowness, until_s = [], 0.0, 1.0, 0.0
    for kind in kinds:
        if flips and now_s >= until_s:
            slowness = 1.35 if slowness == 1.0 else 1.0
            until_s = now_s + generator.exponential(0.8)
        seconds.append(USUAL_S[kind] * slowness * (1 + noise * generator.normal()))
        now_s += seconds[-1]
    return kinds, np.array(seconds)


def shape_of(kinds: NDArray[np.intp], seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """What each kind takes over its usual time, relative to the mean of all kinds."""
    ratios = np.array([seconds[kinds == kind].mean() for kind in range(len(USUAL_S))]) / USUAL_S
    return np.asarray(ratios / ratios.mean())


def test_kinds_compare_as_on_a_machine_of_one_speed() -> None:
    raw, steady = [], []
    for seed in range(20):
        kinds, seconds = laps_of(seed, flips=True, num_laps=100)
        (found,) = at_mean_speed([kinds], [seconds])
        raw.append(shape_of(kinds, seconds) - 1)
        steady.append(shape_of(kinds, found) - 1)
    assert np.std(raw) > 0.02
    assert np.std(steady) < 0.6 * np.std(raw)


def test_the_total_of_each_rank_stays() -> None:
    fast, slow = laps_of(1, flips=True), laps_of(2, flips=True)
    found = at_mean_speed([fast[0], slow[0]], [fast[1], 1.4 * slow[1]])
    assert found[0].sum() == pytest.approx(fast[1].sum(), rel=1e-12)
    assert found[1].sum() == pytest.approx(1.4 * slow[1].sum(), rel=1e-12)


def test_noise_alone_is_left_as_it_is() -> None:
    kinds, seconds = laps_of(3, flips=False)
    (found,) = at_mean_speed([kinds], [seconds])
    assert found == pytest.approx(seconds, rel=0.01)


def test_an_interruption_stays_where_it_happened() -> None:
    kinds, seconds = laps_of(4, flips=True)
    (clean,) = at_mean_speed([kinds], [seconds])
    interrupted = seconds.copy()
    interrupted[200] *= 100
    (found,) = at_mean_speed([kinds], [interrupted])
    assert found[200] > 30 * clean[200]
    others = np.arange(len(kinds)) != 200
    assert np.median(found[others] / clean[others]) == pytest.approx(1, abs=0.01)
    assert found[others] == pytest.approx(clean[others], rel=0.25)
    assert shape_of(kinds[others], found[others]) == pytest.approx(
        shape_of(kinds[others], clean[others]), abs=0.01
    )


@pytest.mark.parametrize("seconds", [[0.0, 0.0, 0.0], [0.0, 1e-3, 0.0]])
def test_a_clock_too_coarse_breaks_nothing(seconds: list[float]) -> None:
    (found,) = at_mean_speed([np.array([0, 0, 1])], [np.array(seconds)])
    assert np.isfinite(found).all()
    assert found.sum() == pytest.approx(sum(seconds))


def test_a_rank_whose_memory_ran_out_has_no_laps() -> None:
    none: tuple[list[int], list[float]] = ([], [])
    for ranks in ([none, none], [none, ([0, 0], [0.01, 0.02])]):
        found = at_mean_speed(
            [np.array(kinds, dtype=np.intp) for kinds, _ in ranks],
            [np.array(seconds) for _, seconds in ranks],
        )
        assert [each.tolist() for each in found] == [seconds for _, seconds in ranks]


def test_a_lap_alone_is_what_it_is() -> None:
    (found,) = at_mean_speed([np.array([0])], [np.array([0.01])])
    assert found.tolist() == [0.01]
