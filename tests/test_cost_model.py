"""A plan on a profile: composed costs against closed forms and conservation."""

import numpy as np
import pytest

from pptune.cost_model import CostModel, Setting
from pptune.estimate import Estimate, Infeasible
from pptune.from_numbers import estimate_from_numbers
from pptune.plan import Plan, Schedule, make_plan
from pptune.profiles import Profile
from tests.synthetic import synthetic_profile, uniform_link

IDEAL = Setting(target=None)


def plan(
    num_ranks: int,
    num_chunks: int,
    num_microbatches: int,
    *,
    layers: tuple[int, ...] | None = None,
    num_layers: int = 16,
    b: int = 1,
    schedule: Schedule | None = None,
    **more: object,
) -> Plan:
    num_stages = num_ranks * num_chunks
    return make_plan(
        schedule=schedule or ("1f1b" if num_chunks == 1 else "interleaved"),
        num_ranks=num_ranks,
        num_chunks=num_chunks,
        microbatch_size=b,
        num_microbatches=num_microbatches,
        layers_per_stage=layers or (num_layers // num_stages,) * num_stages,
        **more,  # type: ignore[arg-type]
    )


def estimate(profile: Profile, wanted: Plan, setting: Setting = IDEAL) -> Estimate:
    found = CostModel(profile, setting).estimate(wanted)
    assert isinstance(found, Estimate), found
    return found


# t_f = 1, t_b = 2 per rank, every hop costs c; checked with several independent simulators.
ORACLES = [
    (4, 8, 1, 0.0, 33.0), (4, 8, 2, 0.0, 28.5), (4, 8, 4, 0.0, 26.25),
    (4, 8, 1, 0.1, 34.6), (4, 8, 2, 0.1, 29.9), (4, 8, 4, 0.1, 29.25),
    (4, 8, 1, 0.3, 37.8), (4, 8, 2, 0.3, 32.7), (4, 8, 4, 0.3, 35.85),
    (8, 64, 4, 0.05, 200.35),
]  # fmt: skip


@pytest.mark.parametrize(("p", "m", "v", "c", "expected_s"), ORACLES)
def test_known_steps(p: int, m: int, v: int, c: float, expected_s: float) -> None:
    profile = synthetic_profile(num_layers=p * v, block=1 / v, links=[uniform_link(c)], num_ranks=p)
    found = estimate(profile, plan(p, v, m, layers=(1,) * (p * v)))
    assert found.step_time_s == pytest.approx(expected_s, rel=1e-9)
    bare = estimate_from_numbers(
        forward_s=1, backward_s=2, transfer_s=c, num_ranks=p, num_chunks=v, num_microbatches=m
    )
    assert bare.estimate.step_time_s == pytest.approx(expected_s, rel=1e-9)
    assert bare.estimate.assumptions == ()
    assert bare.estimate.source == "given"


def test_the_parts_of_a_step_sum_to_it_and_the_bubble_is_the_closed_form() -> None:
    profile = synthetic_profile(block=0.25, num_layers=16, num_ranks=4)
    found = estimate(profile, plan(4, 1, 8))
    assert found.bubble_ratio == pytest.approx(3 / (8 + 3))
    assert found.ideal_time_s == pytest.approx(8 * 3.0)
    parts = found.breakdown_s
    assert parts.compute == pytest.approx(24.0)
    total = sum(getattr(parts, name) for name in parts.__struct_fields__)
    assert total == pytest.approx(found.step_time_s)


def test_ends_are_added_to_the_first_and_last_stage() -> None:
    profile = synthetic_profile(block=0.5, embedding=0.25, head=0.75, num_layers=4, num_ranks=2)
    costs = CostModel(profile, IDEAL).costs(plan(2, 2, 4, num_layers=4))
    np.testing.assert_allclose(costs.forward_s, [0.75, 0.5, 0.5, 1.25])
    np.testing.assert_allclose(costs.backward_s, [1.5, 1.0, 1.0, 2.5])


def test_without_a_link_a_pipeline_has_no_estimate_and_one_rank_does() -> None:
    profile = synthetic_profile(links=())
    found = CostModel(profile, IDEAL).estimate(plan(2, 1, 4, num_layers=8))
    assert isinstance(found, Infeasible)
    assert found.rule == "link-not-measured"
    assert "--link intra:LATENCY,BANDWIDTH" in found.reason
    assert estimate(profile, plan(1, 1, 4, num_layers=8)).step_time_s == pytest.approx(8e-3 * 3 * 4)
