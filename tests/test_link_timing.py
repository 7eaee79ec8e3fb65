"""Links: the fit against brute force, one-way times against known asymmetric links, real ranks."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from pptune.errors import UsageError
from pptune.profiles import Link
from pptune.runtime.link_fit import fit_link
from pptune.runtime.links import (
    LinkMeasurement,
    LinkSamples,
    directed_pairs,
    link_of,
    link_warnings,
    measure_links,
)
from tests.rank_processes import run_ranks

SIZES = [4**power for power in range(5, 14)]


def affine(latency_s: float, bytes_per_s: float) -> list[float]:
    return [latency_s + size / bytes_per_s for size in SIZES]


# --- the fit --------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.floats(1e-7, 1e-2), st.floats(1e7, 1e12))
def test_a_line_is_found_again(latency_s: float, bytes_per_s: float) -> None:
    fit = fit_link(SIZES, affine(latency_s, bytes_per_s))
    assert fit.latency_s == pytest.approx(latency_s, rel=1e-4)
    assert fit.bytes_per_s == pytest.approx(bytes_per_s, rel=1e-4)
    assert fit.worst_ratio < 1e-6


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(0.6, 1.7), min_size=len(SIZES), max_size=len(SIZES)))
def test_no_other_line_has_a_smaller_largest_error(factors: list[float]) -> None:
    times = np.array(affine(1e-4, 2e9)) * factors
    sizes = np.array(SIZES)

    def errors(latency_s: Any, bytes_per_s: Any) -> Any:
        return np.abs((latency_s + sizes / bytes_per_s) / times - 1)

    fit = fit_link(SIZES, times.tolist())
    own = errors(fit.latency_s, fit.bytes_per_s)
    assert fit.worst_ratio == pytest.approx(own.max(), rel=1e-9)
    assert own[SIZES.index(fit.worst_num_bytes)] == pytest.approx(own.max(), rel=1e-9)
    latency, rate = np.meshgrid(np.linspace(0, 2e-4, 201), np.geomspace(8e8, 4e9, 300))
    on_grid = errors(latency[..., None], rate[..., None]).max(axis=-1)
    assert own.max() <= on_grid.min() + 1e-12


def test_what_buffers_swallow_does_not_bend_the_line() -> None:
    """A bucket of 1,500 bytes in front of 2.5 MB/s: the first packet costs no time on the wire."""
    times = [1.2e-4 + max(0, size - 1500) / 2.5e6 for size in SIZES]
    fit = fit_link(SIZES, times)
    assert fit.bytes_per_s == pytest.approx(2.5e6, rel=0.02)
    assert fit.worst_num_bytes == SIZES[0]


def test_a_wire_without_latency_is_found_where_all_sizes_wait_for_it() -> None:
    """As measured over a wire shaped to 20 Mbit/s: a line through the origin, noise either way."""
    sizes = SIZES[:5]
    times = [1.2e-4, 1.41e-3, 6.5e-3, 2.71e-2, 0.1091]
    fit = fit_link(sizes, times)
    assert fit.bytes_per_s == pytest.approx(2.4e6, rel=0.05)
    assert fit.latency_s == pytest.approx(0, abs=5e-4)


def test_the_fit_holds_within_15_percent_on_a_noisy_line() -> None:
    generator = np.random.default_rng(5)
    noisy = [time_s * factor for time_s, factor in
             zip(affine(6e-5, 2.2e9), generator.uniform(0.88, 1.12, len(SIZES)),
                 strict=True)]  # fmt: skip
    fit = fit_link(SIZES, noisy)
    assert fit.worst_ratio <= 0.12
    assert fit.bytes_per_s == pytest.approx(2.2e9, rel=0.15)


def test_latency_is_never_negative() -> None:
    fit = fit_link([1000, 2000, 4000], [1e-6, 3e-6, 9e-6])  # grows faster than in proportion
    assert fit.latency_s >= 0
    assert fit.bytes_per_s > 0


@pytest.mark.parametrize(
    ("sizes", "seconds"), [([1024], [1e-3]), ([8, 8], [1.0, 1.0]), ([8, 16], [0.0, 1.0])]
)
def test_what_cannot_be_fitted_is_refused(sizes: list[int], seconds: list[float]) -> None:
    with pytest.raises(UsageError, match="two or more message sizes"):
        fit_link(sizes, seconds)


# --- one-way times --------------------------------------------------------------------------------


def samples_of(out_bytes_per_s: float, latency_s: float = 5e-5) -> LinkSamples:
    """What a sender times where only its own direction depends on `out_bytes_per_s`."""
    generator = np.random.default_rng(2)

    def trips(size: int) -> list[float]:
        exact = 2 * latency_s + size / out_bytes_per_s
        return [exact * (1 + abs(noise)) for noise in generator.normal(0, 0.01, 40)]

    return LinkSamples(
        round_trip_s={size: trips(size) for size in [0, *SIZES]},
        send_occupied_s={size: [1e-5, 1.2e-5, 9e-6, 9.5e-6, *[1.1e-5] * 7] for size in SIZES},
        receive_occupied_s={size: [3e-5] for size in SIZES},
    )


def test_each_direction_has_its_own_bandwidth() -> None:
    """A wire shaped to 1 Gbit/s one way: the round trip over both would say twice as much."""
    shaped = link_of((0, 1), samples_of(0.125e9), {}, is_inter=True)
    free = link_of((1, 0), samples_of(3e9), {}, is_inter=True)
    assert shaped.bytes_per_s == pytest.approx(0.125e9, rel=0.02)
    assert free.bytes_per_s == pytest.approx(3e9, rel=0.02)
    for link in (shaped, free):
        assert link.latency_s == pytest.approx(5e-5, rel=0.05)
        assert link.receive_occupied_s == pytest.approx(3e-5)
        assert link.send_occupied_s == pytest.approx(1.05e-5)
        assert [point.num_bytes for point in link.points] == SIZES
        assert link.points[-1].loaded_s is None


def test_times_under_load_are_kept_beside_those_alone() -> None:
    alone = samples_of(2e9)
    # An exchange costs 30 us more than a message, and everything shares half the bandwidth.
    loaded = {size: [8e-5 + size / 1e9] * 5 for size in [0, *SIZES]}
    link = link_of((0, 1), alone, loaded, is_inter=False)
    for point in link.points:
        assert point.loaded_s == pytest.approx(5e-5 + point.num_bytes / 1e9, rel=0.03)
    warnings = link_warnings(link, max_noise=0.5)
    assert any("2.0 times as long for 64.0 MiB while all links" in text for text in warnings)


def test_bursts_do_not_move_a_link() -> None:
    quiet = samples_of(2e9)
    busy = LinkSamples(
        round_trip_s={
            size: [time_s * (40 if place % 2 else 1) for place, time_s in enumerate(trips)]
            for size, trips in quiet.round_trip_s.items()
        },
        send_occupied_s=quiet.send_occupied_s,
        receive_occupied_s=quiet.receive_occupied_s,
    )
    link = link_of((0, 1), busy, {}, is_inter=False)
    assert link.bytes_per_s == pytest.approx(2e9, rel=0.05)
    assert any("did not settle" in text for text in link_warnings(link, max_noise=0.02))
    still = link_of((0, 1), quiet, {}, is_inter=False)
    assert link_warnings(still, max_noise=0.02) == []


def test_a_link_that_is_no_line_is_named() -> None:
    alone = samples_of(2e9)
    alone.round_trip_s[SIZES[-1]] = [3 * time_s for time_s in alone.round_trip_s[SIZES[-1]]]
    link = link_of((2, 3), alone, {}, is_inter=False)
    warning = link_warnings(link, max_noise=0.5)
    assert len(warning) == 1
    assert "link 2 -> 3: latency + bytes / bandwidth misses its times by up to" in warning[0]


# --- real ranks -----------------------------------------------------------------------------------


def test_a_ring_has_both_directions_of_every_link_once() -> None:
    assert directed_pairs(2) == [(0, 1), (1, 0)]
    assert sorted(directed_pairs(4)) == sorted(
        [(0, 1), (1, 2), (2, 3), (3, 0), (1, 0), (2, 1), (3, 2), (0, 3)]
    )


def measure_on_a_rank(budget_s: float) -> LinkMeasurement:
    return measure_links(
        device=torch.device("cpu"), node=f"node{dist.get_rank() // 2}", max_noise=0.1,
        budget_s=budget_s, sizes=(1024, 65536, 1 << 20),
    )  # fmt: skip


def test_one_rank_alone_has_no_links() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert measure_on_a_rank(1.0) == LinkMeasurement(links=(), allreduce=(), warnings=())
    finally:
        dist.destroy_process_group()


def check(link: Link) -> None:
    assert link.source == "measured"
    assert link.bytes_per_s > 0
    assert link.latency_s >= 0
    assert 0 < link.send_occupied_s < 10
    assert 0 < link.receive_occupied_s < 10
    # On a machine too busy for its budget the largest size is left out.
    assert [point.num_bytes for point in link.points] in (
        [1024, 65536, 1 << 20], [1024, 65536],
    )  # fmt: skip
    for point in link.points:
        assert min(point.samples_s) <= point.one_way_s <= max(point.samples_s)
        assert point.loaded_s is None or point.loaded_s > 0
    assert link.points[0].loaded_s is not None


@pytest.mark.dist
def test_three_ranks_on_two_nodes(tmp_path: Path) -> None:
    answers = run_ranks(measure_on_a_rank, 2.0, folder=tmp_path, num_ranks=3)
    assert answers[0] == answers[1] == answers[2]
    links = {(link.source_rank, link.target_rank): link for link in answers[0].links}
    assert list(links) == directed_pairs(3)
    for (source, target), link in links.items():
        check(link)
        assert link.scope == ("inter" if 2 in (source, target) else "intra")
    assert [(point.num_ranks, point.num_nodes) for point in answers[0].allreduce] == [(3, 2)] * 3
    assert all(point.seconds > 0 for point in answers[0].allreduce)
