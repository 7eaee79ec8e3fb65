"""A step predicted from a few numbers given by hand, along the same path as from a profile."""

import msgspec

from pptune.cost_model import CostModel, Setting
from pptune.errors import PlanError, UsageError
from pptune.estimate import Infeasible, PredictedPlan
from pptune.executors import Executor
from pptune.model import ModelSpec
from pptune.plan import Schedule, make_plan
from pptune.profiles import Layer, LayerPoint, Link, Machine, Overhead, Profile, StepConstants
from pptune.targets import Target, illegal


def estimate_from_numbers(
    *,
    forward_s: float,
    backward_s: float | None = None,
    backward_input_s: float | None = None,
    backward_weight_s: float | None = None,
    transfer_s: float = 0.0,
    num_ranks: int,
    num_chunks: int = 1,
    num_microbatches: int,
    schedule: Schedule | None = None,
    microbatch_group_size: int | None = None,
    target: Target | None = None,
) -> PredictedPlan:
    """The step of equal stages, with ideal transfers unless a target is given.

    `schedule` is 1F1B for one chunk and interleaved for more where it is null. Raises PlanError for
    a plan that cannot run, UsageError where the numbers don't make one.
    """
    profile = given_profile(
        forward_s=forward_s,
        backward_s=backward_s,
        backward_input_s=backward_input_s,
        backward_weight_s=backward_weight_s,
        transfer_s=transfer_s,
        num_ranks=num_ranks,
        num_chunks=num_chunks,
    )
    plan = make_plan(
        schedule=schedule or ("1f1b" if num_chunks == 1 else "interleaved"),
        num_ranks=num_ranks,
        num_chunks=num_chunks,
        microbatch_size=1,
        num_microbatches=num_microbatches,
        layers_per_stage=(1,) * (num_ranks * num_chunks),
        microbatch_group_size=microbatch_group_size,
    )
    violation = None if target is None else illegal(plan, target)
    if violation is not None:
        raise PlanError(str(violation))
    estimate = CostModel(profile, Setting(target=target)).estimate(plan)
    if isinstance(estimate, Infeasible):
        raise UsageError(estimate.reason)
    # Without a sequence length there is no rate of tokens.
    return PredictedPlan(plan=plan, estimate=msgspec.structs.replace(estimate, tokens_per_s=None))


def given_profile(
    *,
    forward_s: float,
    backward_s: float | None,
    backward_input_s: float | None = None,
    backward_weight_s: float | None = None,
    transfer_s: float = 0.0,
    num_ranks: int,
    num_chunks: int,
) -> Profile:
    """Equal stages, one block each; every hop takes `transfer_s`; nothing else costs anything.

    Times are for one micro-batch on one rank's whole share of the layers, of which each of its
    `num_chunks` stages gets an equal part. Raises UsageError where the backward is missing or said
    twice.
    """
    split = backward_input_s is not None or backward_weight_s is not None
    if split == (backward_s is not None):
        raise UsageError("give either --backward, or both --backward-input and --backward-weight")
    if split and (backward_input_s is None or backward_weight_s is None):
        raise UsageError("--backward-input and --backward-weight belong together; give both")
    if num_ranks < 1 or num_chunks < 1:
        raise UsageError(f"ranks ({num_ranks}) and chunks ({num_chunks}) must be 1 or more")

    def share(seconds: float | None) -> float | None:
        return None if seconds is None else seconds / num_chunks

    point = LayerPoint(
        microbatch_size=1,
        forward_s=share(forward_s),
        backward_s=share(backward_s),
        backward_input_s=share(backward_input_s),
        backward_weight_s=share(backward_weight_s),
        boundary_bytes=0,
        source="given",
    )
    nothing = LayerPoint(microbatch_size=1, forward_s=0.0, backward_s=0.0,
                         backward_input_s=0.0, backward_weight_s=0.0, source="given")  # fmt: skip
    num_layers = num_ranks * num_chunks
    return Profile(
        machine=Machine(
            description="numbers given by hand",
            device="cpu",
            device_name="given",
            num_devices=num_ranks,
        ),
        model=ModelSpec(name="given", family="custom", num_layers=num_layers, seq_len=1),
        dtype="given",
        seq_len=1,
        num_ranks=num_ranks,
        layers=(
            Layer(kind="embedding", count=1, points=(nothing,)),
            Layer(kind="block", count=num_layers, points=(point,)),
            Layer(kind="head", count=1, points=(nothing,)),
        ),
        links=(
            Link(
                scope="intra",
                source_rank=None,
                target_rank=None,
                latency_s=transfer_s,
                bytes_per_s=1.0,
                source="given",
            ),
        ),
        overheads={
            executor: Overhead(forward_s=0.0, backward_s=0.0, source="given")
            for executor in Executor
        },
        interference_ratio=0.0,
        step_constants=StepConstants(source="given"),
    )
