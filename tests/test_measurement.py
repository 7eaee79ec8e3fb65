"""Centres and intervals against closed forms and coverage; warnings against planted faults."""

import math
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pptune import measurement
from pptune.errors import UsageError
from pptune.measurement import Centre, Measurement, per_unit, t_quantile


def of(*samples: float) -> Measurement:
    return Measurement(samples_s=samples)


# Two-sided 95 % points of Student's t, as tables print them (NIST/SEMATECH handbook, 1.3.6.7.2).
T_TABLE = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 8: 2.306, 15: 2.131, 30: 2.042,
           100: 1.984}  # fmt: skip


@pytest.mark.parametrize(("freedom", "tabulated"), T_TABLE.items())
def test_t_quantile_is_the_tables(freedom: int, tabulated: float) -> None:
    assert t_quantile(freedom) == pytest.approx(tabulated, rel=2e-3)


def test_trimmed_mean_and_its_interval_by_hand() -> None:
    # n = 10, one dropped at each end: (2 + ... + 9) / 8 = 5.5. Winsorized: 2, 2, 3, ..., 8, 9, 9.
    measured = of(*[3.0, 1.0, 10.0, 2.0, 9.0, 4.0, 8.0, 5.0, 7.0, 6.0])
    winsorized = [2, 2, 3, 4, 5, 6, 7, 8, 9, 9]
    deviation = float(np.std(winsorized, ddof=1))
    assert measured.centre_s == 5.5
    expected = t_quantile(7) * deviation / (0.8 * math.sqrt(10))
    assert measured.half_width_s == pytest.approx(expected)
    assert measured.noise_ratio == pytest.approx(expected / 5.5)


def test_the_interval_covers_the_centre_as_often_as_it_says() -> None:
    generator = np.random.default_rng(7)
    covered = 0
    for _ in range(1500):
        measured = of(*generator.normal(10.0, 2.0, 20))
        covered += abs(measured.centre_s - 10.0) <= measured.half_width_s
    # A binomial of 1500 at 95 % lies in 93 ... 97 % with near certainty; trimming costs a little.
    assert 0.925 <= covered / 1500 <= 0.97


def test_one_burst_does_not_move_the_centre() -> None:
    samples = [1.0, 1.01, 0.99, 1.02, 0.98, 1.0, 1.01, 0.99, 1.0, 1.0]
    assert of(*samples[:-1], 100.0).centre_s == pytest.approx(of(*samples).centre_s, rel=0.01)


def test_the_centre_predicts_sums_where_the_median_does_not() -> None:
    """Times of an action with a moderate upper tail: a pipeline adds up many of them."""
    generator = np.random.default_rng(3)
    draws = 1.0 + generator.exponential(0.5, (400, 32))
    typical_sum = float(np.median(draws.sum(axis=1)))
    measured = of(*draws.ravel()[:400])
    centre_error = abs(32 * measured.centre_s / typical_sum - 1)
    median_error = abs(32 * measured.median_s / typical_sum - 1)
    assert centre_error < 0.06 < median_error


@given(
    st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=40),
    st.floats(1e-3, 1e3),
    st.randoms(use_true_random=False),
)
def test_scaling_and_order(samples: list[float], factor: float, random: object) -> None:
    shuffled = sorted(samples, key=lambda _: random.random())  # type: ignore[attr-defined]
    measured, scaled = of(*samples), of(*[factor * value for value in shuffled])
    assert scaled.centre_s == pytest.approx(factor * measured.centre_s, rel=1e-9)
    assert min(samples) * (1 - 1e-9) <= measured.centre_s <= max(samples) * (1 + 1e-9)
    if len(samples) >= measurement.MIN_SAMPLES:
        expected = pytest.approx(factor * measured.half_width_s, rel=1e-6, abs=1e-9 * factor)
        assert scaled.half_width_s == expected


def test_few_samples_are_never_settled() -> None:
    assert of(3.0).half_width_s == math.inf
    assert of(3.0, 3.0, 3.0, 3.0).half_width_s == math.inf
    assert of(3.0, 3.0, 3.0, 3.0, 3.0).half_width_s == 0.0
    assert of(0.0, 0.0, 0.0, 0.0, 0.0).noise_ratio == math.inf


@pytest.mark.parametrize("samples", [(), (1.0, math.nan), (math.inf,)])
def test_unusable_samples_are_refused(samples: tuple[float, ...]) -> None:
    with pytest.raises(UsageError, match="at least one sample, and finite"):
        Measurement(samples_s=samples)


def test_per_unit_takes_the_common_part_off() -> None:
    generator = np.random.default_rng(1)
    call = 0.2e-3 + generator.normal(0, 1e-6, 50)
    stack = 0.2e-3 + 4 * 1.5e-3 + generator.normal(0, 8e-6, 50)
    one = per_unit(of(*stack), of(*call), units=4)
    assert one.seconds == pytest.approx(1.5e-3, rel=1e-3)
    # The stack's error dominates: 8 us over sqrt(50) samples, a quarter of it per block.
    standard_error = 8e-6 / math.sqrt(50) / 4
    assert one.half_width_s == pytest.approx(NormalDist().inv_cdf(0.975) * standard_error, rel=0.4)
    assert per_unit(of(1.0, 1.0), of(1.1, 1.1), units=1).seconds == 0.0


def test_drift_is_found_and_named() -> None:
    steady = [1.0 + 0.01 * (index % 3) for index in range(30)]
    assert measurement.drift_warning(steady) is None
    slowed = [value * (1.25 if index >= 15 else 1.0) for index, value in enumerate(steady)]
    assert "clocks dropped" in (measurement.drift_warning(slowed) or "")
    assert "25" in (measurement.drift_warning(slowed) or "")
    assert "sped up" in (measurement.drift_warning(slowed[::-1]) or "")
    assert measurement.drift_warning([1.0, 9.0]) is None, "too few to tell"


def test_coarse_clocks_are_found() -> None:
    assert "0 s" in (measurement.quantised_warning("head", [0.001, 0.0, 0.001]) or "")
    ticks = [0.015 if index % 2 else 0.030 for index in range(20)]
    assert "2 different values" in (measurement.quantised_warning("head", ticks) or "")
    fine = [0.015 + 1e-5 * index for index in range(20)]
    assert measurement.quantised_warning("head", fine) is None


def test_competitors_are_named_only_where_cores_run_short() -> None:
    warning = measurement.busy_warning(own_cores=1.4, all_cores=1.95, cores=2)
    assert warning is not None
    assert "used 0.6 of 2 cores" in warning or "used 0.5 of 2 cores" in warning
    assert measurement.busy_warning(own_cores=2.0, all_cores=2.0, cores=2) is None
    assert measurement.busy_warning(own_cores=2.0, all_cores=30.0, cores=64) is None


def test_a_slow_rank_is_named() -> None:
    assert measurement.uneven_ranks_warning("a block", [1.0, 1.05, 1.02]) is None
    warning = measurement.uneven_ranks_warning("a block", [1.0, 1.0, 1.0, 1.3])
    assert warning is not None
    assert "rank 3 takes 30.0% longer" in warning


def test_unsettled_says_what_and_by_how_much() -> None:
    text = measurement.unsettled_warning(
        {
            "block forward at b=1": Centre(seconds=0.01, half_width_s=0.0007),
            "block backward at b=1": Centre(seconds=0.02, half_width_s=0.0006),
        },
        0.02,
    )
    assert text is not None
    assert "not settled to 2.0%: block forward at b=1 (10.0 ms +- 7.0%)" in text
    assert "block backward at b=1 (20.0 ms +- 3.0%)" in text
    assert measurement.unsettled_warning({}, 0.02) is None
