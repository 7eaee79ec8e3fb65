"""Small plans and validation files with made-up numbers, for tests of what shows them."""

import msgspec

from pptune.estimate import Breakdown, Candidate, Estimate, PredictedPlan
from pptune.explain import explain
from pptune.model import ModelSpec
from pptune.plan import Plan, Schedule, make_plan
from pptune.plans_file import PlansFile, ProfileReference, Space
from pptune.profiles import Link, LinkPoint, Profile
from pptune.schedules import generate
from pptune.simulator import Costs, simulate
from pptune.validation_file import Run, SimpleModel, Summary, ValidationFile
from pptune.views.html import report
from pptune.views.slices import Timeline, predicted_timeline
from tests.synthetic import synthetic_profile

MIB = 2**20


def sample_plan(
    schedule: Schedule, *, chunks: int, microbatches: int, layers: tuple[int, ...], size: int = 1
) -> Plan:
    """A plan on four ranks."""
    return make_plan(
        schedule=schedule,
        num_ranks=4,
        num_chunks=chunks,
        microbatch_size=size,
        num_microbatches=microbatches,
        layers_per_stage=layers,
    )


def sample_estimate(step_time_s: float, *, fits: str = "yes") -> Estimate:
    """An estimate whose parts are 80, 10, 4, 5 and 1 % of the step."""
    parts = Breakdown(
        compute=0.80 * step_time_s,
        bubble=0.10 * step_time_s,
        exposed_transfer=0.04 * step_time_s,
        overhead=0.05 * step_time_s,
        step_constant=0.01 * step_time_s,
    )
    return Estimate(
        step_time_s=step_time_s,
        longest_rank_span_s=step_time_s,
        bubble_ratio=0.125,
        ideal_time_s=0.8 * step_time_s,
        breakdown_s=parts,
        peak_memory_bytes=(300 * MIB, 200 * MIB, 100 * MIB, 400 * MIB),
        fits=fits,  # type: ignore[arg-type]
        tokens_per_s=10240.0,
        mfu=None,
        source="measured",
        assumptions=("links are equal",),
    )


INTERLEAVED = sample_plan("interleaved", chunks=2, microbatches=8, layers=(2,) * 8)
UNEVEN = sample_plan("1f1b", chunks=1, microbatches=8, layers=(4, 4, 5, 3))
BASELINE = sample_plan("1f1b", chunks=1, microbatches=4, size=2, layers=(4,) * 4)


def sample_plans() -> PlansFile:
    """Two candidates and a baseline at another b."""
    return PlansFile(
        created_at="2026-01-01T00:00:00+00:00",
        profile=ProfileReference(path="profile.json", digest="0" * 64),
        model=ModelSpec(name="toy", family="gpt", num_layers=16, seq_len=128),
        dtype="float32",
        device="cpu",
        global_batch_size=8,
        target="torch",
        space=Space(
            num_legal=12,
            num_illegal={"rounds": 3, "layers": 5},
            num_infeasible=2,
            lost_by={"bubble": 4, "overhead": 7},
        ),
        proven_optimal=True,
        baseline=PredictedPlan(plan=BASELINE, estimate=sample_estimate(0.11)),
        candidates=(
            Candidate(
                rank=1,
                plan=INTERLEAVED,
                estimate=sample_estimate(0.1),
                speedup_over_baseline=1.1,
            ),
            Candidate(
                rank=2,
                plan=UNEVEN,
                estimate=sample_estimate(0.1012, fits="borderline"),
                speedup_over_baseline=1.087,
            ),
        ),
        warnings=("machine [busy]",),
    )


def sample_run(plan: Plan, predicted_s: float, measured_s: float | None, **changes: object) -> Run:
    """A run that finished, or ran out of memory where nothing was measured."""
    fields: dict[str, object] = {
        "plan": plan,
        "predicted_s": predicted_s,
        "measured_s": measured_s,
        "samples_s": () if measured_s is None else (measured_s,) * 3,
        "noise_ratio": None if measured_s is None else 0.012,
        "measured_breakdown_s": None,
        "predicted_breakdown_s": sample_estimate(predicted_s).breakdown_s,
        "error_ratio": None if measured_s is None else predicted_s / measured_s - 1,
        "peak_memory_bytes": None if measured_s is None else (MIB * 310, MIB * 390),
        "predicted_peak_memory_bytes": (300 * MIB, 400 * MIB),
        "status": "oom" if measured_s is None else "ok",
        "reason": "rank 3 ran out of memory in step 2" if measured_s is None else None,
    }
    return Run(**(fields | changes))  # type: ignore[arg-type]


def sample_validation() -> ValidationFile:
    """The pick won, the uneven plan ran out of memory."""
    return ValidationFile(
        created_at="2026-01-01T00:00:00+00:00",
        mode="real",
        runs=(
            sample_run(
                INTERLEAVED,
                0.1,
                0.104,
                measured_breakdown_s=Breakdown(
                    compute=0.083, bubble=0.01, exposed_transfer=0.005, overhead=0.005,
                    step_constant=0.001,
                ),
            ),
            sample_run(UNEVEN, 0.1012, None),
            sample_run(BASELINE, 0.11, 0.112, is_baseline=True),
        ),
        summary=Summary(
            mape=0.028, max_abs_error=0.038, spearman=1.0, regret_top1=None, regret_top3=None,
            winner=INTERLEAVED.label, speedup_over_baseline=1.077, order_kept=True, num_plans=3,
            noise_floor=0.011, models={"closed form": SimpleModel(mape=0.2, regret_top1=0.1)},
        ),
    )  # fmt: skip


def sample_profile() -> Profile:
    """Times with a knee, and two links with points."""
    links = tuple(
        Link(
            scope=scope,
            source_rank=source,
            target_rank=1 - source,
            latency_s=latency_s,
            bytes_per_s=bytes_per_s,
            points=tuple(
                LinkPoint(num_bytes=size, one_way_s=latency_s + size / bytes_per_s)
                for size in (2**10, 2**14, 2**18, 2**22, 2**26)
            ),
        )
        for scope, source, latency_s, bytes_per_s in (
            ("intra", 0, 2e-5, 4e9),
            ("inter", 1, 9e-5, 1e9),
        )
    )
    return synthetic_profile(
        num_layers=16,
        block=lambda b: (1e-3 + 0.35e-3 * b, 2e-3 + 0.7e-3 * b),
        sizes=(1, 2, 4, 8, 16),
        links=links,  # type: ignore[arg-type]
    )


def sample_report() -> str:
    """A report with every figure."""
    plans = msgspec.structs.replace(
        sample_plans(), memory_limit_bytes=512 * MIB, objective="pareto"
    )
    order = generate(
        INTERLEAVED.schedule, num_ranks=4, num_chunks=2, num_microbatches=8,
        microbatch_group_size=INTERLEAVED.microbatch_group_size,
    )  # fmt: skip
    costs = Costs.uniform(
        num_ranks=4, num_chunks=2, forward_s=3e-3, backward_s=6e-3, transfer_s=2e-4
    )
    spans = simulate(order, costs, spans=True).spans
    assert spans is not None
    predicted = predicted_timeline(INTERLEAVED, spans)
    measured = Timeline(name="measured", plan=INTERLEAVED, slices=predicted.slices)
    return report(
        plans,
        sample_profile(),
        explanation=explain(plans, sample_profile()),
        validation=sample_validation(),
        timelines=(predicted, measured),
    )
