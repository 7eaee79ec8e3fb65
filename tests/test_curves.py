"""t(b): interpolation, extrapolation, the fit, the knee and the warning about rising curves."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pptune.curves import fit_curve, layer_times
from pptune.errors import UsageError
from pptune.profiles import Layer, LayerPoint, Source

# Forward time in ms of 2 and 4 layers with embedding and head, Llama-2 7B, sequence 2048, at
# micro-batch sizes 1..12: PKU-DAIR/Hetu-Galvatron@cea12ff, galvatron/models/gpt/configs/
# computation_profiling_bf16_llama2-7b_all.json.
LLAMA_2_LAYERS = [15.079, 24.936, 35.225, 45.436, 55.630, 66.188, 76.637, 86.661, 97.467, 107.959,
                  118.880, 129.223]  # fmt: skip
LLAMA_4_LAYERS = [23.871, 42.117, 60.214, 78.431, 95.785, 114.594, 132.304, 149.652, 168.734,
                  186.767, 205.599, 223.253]  # fmt: skip

# Seconds per iteration at b = 1, 2, 4, 8 and a global batch of 2048 on 384 A100-80G: (P, DP,
# seconds). bigscience-workshop/bigscience, train/tr11-176B-ml/chronicles-prequel.md.
BLOOM = {
    "181B": (12, 4, (143.31, 134.02, 123.69, 129.26)),
    "200B": (10, 4, (221.21, 207.92, 208.18, 229.69)),
    "194B": (6, 8, (183.64, 172.36, 173.92, 192.42)),
    "195B": (11, 4, (197.15, 186.65, 185.79, 206.62)),
    "187B": (10, 4, (160.29, 151.07, 147.43, 152.51)),
}


def layer(*points: LayerPoint) -> Layer:
    return Layer(kind="block", count=4, points=points)


def point(
    b: int,
    forward_s: float | None,
    backward_s: float | None = None,
    *,
    status: str = "ok",
    source: Source = "measured",
    **more: float,
) -> LayerPoint:
    if backward_s is None and forward_s is not None:
        backward_s = 2 * forward_s
    return LayerPoint(
        microbatch_size=b,
        forward_s=forward_s,
        backward_s=backward_s,
        status=status,  # type: ignore[arg-type]
        source=source,
        **more,  # type: ignore[arg-type]
    )


def test_a_measured_size_is_returned_as_measured() -> None:
    found = layer_times(layer(point(1, 1.0), point(4, 2.5, 7.0)), 4)
    assert (found.forward_s, found.backward_s, found.source) == (2.5, 7.0, "measured")
    assert found.backward_input_s is None


def test_between_sizes_the_total_time_is_linear() -> None:
    found = layer_times(layer(point(2, 1.0), point(6, 2.0)), 3)
    assert found.forward_s == pytest.approx(1.25)
    assert found.backward_s == pytest.approx(2.5)
    assert found.source == "interpolated"


def test_beyond_the_sizes_a_straight_line_goes_on() -> None:
    measured = layer(*(point(b, 0.5 + 0.25 * b) for b in (2, 4, 8)))
    for b in (1, 16, 64):
        found = layer_times(measured, b)
        assert found.forward_s == pytest.approx(0.5 + 0.25 * b)
        assert found.source == "extrapolated"


def test_a_single_size_is_carried_on_in_proportion_and_marked() -> None:
    found = layer_times(layer(point(4, 2.0, saved_activation_bytes=400)), 1)
    assert (found.forward_s, found.source) == (pytest.approx(0.5), "extrapolated")
    assert found.saved_activation_bytes == 100


def test_points_that_ran_out_of_memory_do_not_count_and_unsettled_ones_do() -> None:
    found = layer_times(
        layer(point(1, 1.0), point(2, 2.0, status="unsettled"), point(4, 99.0, status="oom")), 4
    )
    assert found.forward_s == pytest.approx(4.0)
    assert found.source == "extrapolated"


def test_a_full_backward_is_the_sum_of_its_parts_where_only_they_were_timed() -> None:
    split = LayerPoint(
        microbatch_size=1, forward_s=1.0, backward_input_s=1.25, backward_weight_s=0.5
    )
    found = layer_times(layer(split), 1)
    assert (found.backward_s, found.backward_input_s, found.backward_weight_s) == (1.75, 1.25, 0.5)


def test_given_numbers_stay_the_weakest_source() -> None:
    given_layer = layer(point(1, 1.0, source="given"), point(4, 4.0, source="given"))
    assert [layer_times(given_layer, b).source for b in (1, 2, 8)] == ["given"] * 3


@pytest.mark.parametrize("points", [(), (point(1, None),), (point(1, 1.0, status="oom"),)])
def test_no_usable_point_is_an_error_that_names_the_layer(points: tuple[LayerPoint, ...]) -> None:
    with pytest.raises(UsageError, match="block"):
        layer_times(layer(*points), 1)


@given(
    overhead=st.floats(0, 5),
    work=st.floats(0.1, 5),
    sizes=st.lists(st.integers(1, 64), min_size=2, max_size=6, unique=True),
    wanted=st.integers(1, 200),
)
@settings(deadline=None)
def test_a_line_is_found_again_at_any_size(
    overhead: float, work: float, sizes: list[int], wanted: int
) -> None:
    measured = layer(*(point(b, overhead + work * b) for b in sizes))
    expected = overhead + work * wanted
    assert layer_times(measured, wanted).forward_s == pytest.approx(expected, rel=1e-3)


@given(
    times=st.lists(st.floats(0.01, 10), min_size=1, max_size=6),
    wanted=st.lists(st.integers(1, 100), min_size=2, max_size=2),
)
@settings(deadline=None)
def test_times_are_never_negative_and_grow_with_size_when_the_points_do(
    times: list[float], wanted: list[int]
) -> None:
    points = [point(2**i, value) for i, value in enumerate(np.cumsum(times))]
    small, large = (layer_times(layer(*points), b).forward_s for b in sorted(wanted))
    assert 0 <= small <= large * (1 + 1e-9)


@pytest.mark.parametrize("floor", [0.0, 2.0, 5.0])
def test_the_fit_recovers_its_own_curve(floor: float) -> None:
    sizes = [1, 2, 3, 4, 6, 8, 12, 16]
    seconds = [0.4 + 0.3 * (floor**4 + b**4) ** 0.25 for b in sizes]
    fit = fit_curve(sizes, seconds)
    assert fit.seconds(32) == pytest.approx(0.4 + 0.3 * (floor**4 + 32**4) ** 0.25, rel=0.01)
    assert fit.loo_error_ratio is not None
    assert fit.loo_error_ratio < 0.01
    assert not fit.slows_with_size


def test_the_knee_is_where_nine_tenths_of_the_plateau_is_reached() -> None:
    # t(b) = 1 + b: b / t(b) reaches 0.9 at b = 9.
    fit = fit_curve([1, 2, 4, 8], [2.0, 3.0, 5.0, 9.0])
    assert fit.knee_microbatch_size == pytest.approx(9.0)
    assert fit_curve([1, 2, 4], [1.0, 2.0, 4.0]).knee_microbatch_size == pytest.approx(1.0)


def test_one_wild_point_does_not_bend_the_fit() -> None:
    sizes = [1, 2, 3, 4, 6, 8, 12]
    seconds = [1.0 + b for b in sizes]
    seconds[3] *= 3
    assert fit_curve(sizes, seconds).seconds(16) == pytest.approx(17.0, rel=0.05)


def test_a_clock_that_reads_zero_does_not_break_the_fit() -> None:
    fit = fit_curve([1, 2, 4, 8], [0.0, 2.0, 4.0, 8.0])
    assert fit.seconds(16) == pytest.approx(16.0, rel=0.1)
    assert fit_curve([1, 2], [0.0, 0.0]).seconds(4) == 0.0


@pytest.mark.parametrize("milliseconds", [LLAMA_2_LAYERS, LLAMA_4_LAYERS])
def test_published_forward_times_are_predicted_from_the_others(milliseconds: list[float]) -> None:
    fit = fit_curve(range(1, 13), milliseconds)
    assert fit.loo_error_ratio is not None
    assert fit.loo_error_ratio < 0.01
    few = fit_curve([1, 2, 4], [milliseconds[b - 1] for b in (1, 2, 4)])
    assert few.seconds(12) == pytest.approx(milliseconds[11], rel=0.04)


@pytest.mark.parametrize("model", BLOOM)
def test_bloom_b4_is_predicted_from_b1_b2_b8_and_the_best_b_is_in_the_middle(model: str) -> None:
    num_ranks, data_parallel, seconds = BLOOM[model]

    def slots(b: int) -> float:
        """Micro-batch times in a 1F1B step, M + P - 1."""
        return 2048 / data_parallel / b + num_ranks - 1

    micro_batch_s = {b: s / slots(b) for b, s in zip((1, 2, 4, 8), seconds, strict=True)}
    fit = fit_curve([1, 2, 8], [micro_batch_s[b] for b in (1, 2, 8)])
    assert fit.seconds(4) == pytest.approx(micro_batch_s[4], rel=0.05)
    measured = layer(*(point(b, micro_batch_s[b]) for b in (1, 2, 8)))
    step_s = {b: layer_times(measured, b).forward_s * slots(b) for b in (1, 2, 3, 4, 8)}
    assert min(step_s, key=lambda b: step_s[b]) in (2, 3, 4)


def test_kernels_that_slow_down_with_size_are_flagged() -> None:
    # Global batch 256 on NVIDIA/Megatron-LM #509: b = 4, 8, 16 take 0.989, 1.412, 2.261 s; with the
    # bubble of P = 2, M = 32, 16, 8 taken out, time per sequence still rises.
    per_step = {4: 0.989 / (1 + 1 / 32), 8: 1.412 / (1 + 1 / 16), 16: 2.261 / (1 + 1 / 8)}
    assert fit_curve([4, 8, 16], [b * per_step[b] for b in (4, 8, 16)]).slows_with_size
    noisy = [b * (1 + 0.02 * (-1) ** b) for b in (1, 2, 3, 4)]
    assert not fit_curve([1, 2, 3, 4], noisy).slows_with_size
    assert fit_curve([1, 2, 3, 4], noisy, noise_ratio=0.01).slows_with_size


def test_a_curve_needs_as_many_times_as_sizes() -> None:
    with pytest.raises(UsageError, match="2 sizes and 1 times"):
        fit_curve([1, 2], [1.0])
    with pytest.raises(UsageError, match="0 sizes"):
        fit_curve([], [])
