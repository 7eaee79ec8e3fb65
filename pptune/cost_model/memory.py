"""Peak bytes per rank: what the model needs, and what the schedule keeps in flight.

Activations are counted from the order itself, from a micro-batch's forward on a stage until its
full backward or weight gradient. What a runtime keeps of the messages differs: torch holds receive
buffers and sent tensors of every micro-batch until the step ends, Megatron-LM frees them once sent.
"""

from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from pptune.cost_model.stage_sums import stage_sums
from pptune.cost_model.stage_times import ModelTimes
from pptune.executors import Executor
from pptune.plan import Plan
from pptune.profiles import MemoryModel, Profile
from pptune.schedules import Order, peak_in_flight_bytes

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryParts:
    """Peak bytes by what holds them; every field is float64[num_ranks]."""

    weights: Floats
    gradients: Floats
    optimizer: Floats
    activations: Floats
    """Kept by autograd for all stages and micro-batches in flight at the worst moment."""
    logits: Floats
    """The last stage's outputs for the micro-batches in flight, and the gradient of one."""
    boundary: Floats
    """Tensors that are sent and received between stages."""
    fixed: Floats
    """Context, allocator slack, communication buffers."""

    @property
    def total(self) -> Floats:
        return (
            self.weights
            + self.gradients
            + self.optimizer
            + self.activations
            + self.logits
            + self.boundary
            + self.fixed
        )


class StaticMemory(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What the layout alone decides."""

    weights: Floats
    """Bytes on each rank, float64[num_ranks]."""
    gradient_ratio: float
    """Bytes per byte of weights."""
    optimizer_ratio: float
    """The same."""
    fixed: float
    """Bytes on every rank."""

    @property
    def total(self) -> Floats:
        """float64[num_ranks]."""
        return self.weights * (1 + self.gradient_ratio + self.optimizer_ratio) + self.fixed


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationMemory:
    """What one micro-batch of one size keeps, whatever the layout."""

    embedding: float
    block: float
    head: float
    logits: float
    """The last stage's output; 0 where its size is unknown."""
    recompute: float
    """One block's full activations while it is played again; 0 without recompute."""
    message: float
    """One tensor between stages."""


def peak_memory(
    plan: Plan,
    order: Order,
    *,
    static: StaticMemory,
    activation: ActivationMemory,
    executor: Executor,
) -> MemoryParts:
    """Peak bytes of every rank, by what holds them."""
    held = _held_bytes(plan, order, activation)
    logits = np.zeros(plan.num_ranks)
    if activation.logits:
        last = np.zeros(plan.num_stages)
        last[-1] = activation.logits
        logits = np.minimum(peak_in_flight_bytes(order, last), held)
    last_rank = plan.rank_of(plan.num_stages - 1)
    activations = held - logits + activation.recompute
    logits[last_rank] += activation.logits
    return MemoryParts(
        weights=static.weights,
        gradients=static.weights * static.gradient_ratio,
        optimizer=static.weights * static.optimizer_ratio,
        activations=activations,
        logits=logits,
        boundary=np.full(plan.num_ranks, kept_messages(plan, executor) * activation.message),
        fixed=np.full(plan.num_ranks, static.fixed),
    )


def peak_bytes(
    plan: Plan,
    order: Order,
    *,
    static: StaticMemory,
    activation: ActivationMemory,
    executor: Executor,
) -> Floats:
    """`peak_memory(...).total` at less cost."""
    total = static.total + _held_bytes(plan, order, activation)
    total += activation.recompute + kept_messages(plan, executor) * activation.message
    total[plan.rank_of(plan.num_stages - 1)] += activation.logits
    return total


def fullest_rank_range(
    plan: Plan,
    group_sizes: NDArray[np.int64],
    *,
    static: StaticMemory,
    activation: ActivationMemory,
    executor: Executor,
) -> tuple[Floats, Floats] | None:
    """Bytes between which the fullest rank's peak lies, for `plan` at each group size; float64[n].

    None where no count in flight is known. At its peak a rank holds `in_flight_counts` stage-micro-
    batches, at most M of each stage: at least the smallest ones, at most the largest ones.
    """
    counts = in_flight_counts(plan, group_sizes)
    if counts is None:
        return None
    held = np.sort(
        per_stage_bytes(plan, activation).reshape(plan.num_chunks, plan.num_ranks), axis=0
    )
    each = np.arange(plan.num_chunks)[:, None] * plan.num_microbatches
    taken = np.clip(counts[:, None, :] - each, 0, plan.num_microbatches)
    rest = static.total + activation.recompute
    rest += kept_messages(plan, executor) * activation.message
    rest[-1] += activation.logits
    low = (taken * held).sum(axis=1) + rest
    high = (taken * held[::-1]).sum(axis=1) + rest
    return low.max(axis=1), high.max(axis=1)


_LOOPED = {
    "1f1b": (1, 0),
    "interleaved": (2, 0),
    "zb-h1": (1, 1),
    "zb-h2": (2, 2),
    "interleaved-zb": (1, 1),
}
"""Of the schedules that are 1F1B on looped stages: by how many forwards warm-up grows per rank
towards the first, and by how many backwards weight gradients lag per rank towards the last."""


def in_flight_counts(plan: Plan, group_sizes: NDArray[np.int64]) -> NDArray[np.int64] | None:
    """Stage-micro-batches that each rank holds at its peak, int64[n, num_ranks], for `plan` at each
    group size; None where no closed form is known.

    Warm-up, one more forward, and what waits for its weight gradient: arXiv 2104.04473, sec. 2.2;
    arXiv 2401.10241, sec. 3; Megatron-LM, core/pipeline_parallel/schedules.py.
    """
    most = plan.num_microbatches * plan.num_chunks
    if plan.schedule in ("gpipe", "looped-bfs"):
        return np.full((len(group_sizes), plan.num_ranks), most)
    if plan.schedule not in _LOOPED:
        return None
    per_hop, lag = _LOOPED[plan.schedule]
    rank = np.arange(plan.num_ranks)
    own = per_hop * (plan.num_ranks - 1 - rank) + lag * rank + 1
    return np.asarray(np.minimum((plan.num_chunks - 1) * group_sizes[:, None] + own, most))


def static_memory(
    plan: Plan, profile: Profile, weights: Floats | None, *, zero_stage: int = 0
) -> StaticMemory | None:
    """Weights, gradients and optimizer state, or None where parameter sizes are unknown.

    `weights` are the ranks' own, see `rank_parameter_bytes`.

    ZeRO stage 1 shards the optimizer state over the data-parallel ranks (arXiv 1910.02054, sec. 5).
    """
    if weights is None or profile.memory is None:
        return None
    model: MemoryModel = profile.memory
    shards = plan.data_parallel if zero_stage >= 1 else 1
    return StaticMemory(
        weights=weights,
        gradient_ratio=model.gradient_bytes_per_parameter_byte,
        optimizer_ratio=model.optimizer_bytes_per_parameter_byte / shards,
        fixed=float(model.fixed_bytes),
    )


def layer_parameter_bytes(profile: Profile) -> Floats | None:
    """Bytes of parameters of embedding, block and head, float64[1, 3], or None where unknown."""
    layers = [profile.layer(kind) for kind in ("embedding", "block", "head")]
    sizes = [None if layer is None else layer.parameter_bytes for layer in layers]
    return None if None in sizes else np.array([sizes], dtype=np.float64)


def rank_parameter_bytes(plan: Plan, profile: Profile) -> Floats | None:
    """Bytes of parameters on each rank, float64[num_ranks], or None where a layer's are unknown."""
    per_layer = layer_parameter_bytes(profile)
    if per_layer is None:
        return None
    return per_rank(plan, stage_sums(per_layer, plan.layers_per_stage)[0])


def per_rank(plan: Plan, per_stage: Floats) -> Floats:
    """Sums over each rank's stages, float64[num_ranks]."""
    by_chunk = per_stage.reshape(plan.num_chunks, plan.num_ranks)
    if plan.placement == "v":
        return np.asarray(by_chunk[0] + by_chunk[1, ::-1])
    return np.asarray(by_chunk.sum(axis=0))


def activation_memory(times: ModelTimes, *, message_bytes: int) -> ActivationMemory | None:
    """Bytes of one micro-batch, or None where a layer's are unknown."""
    embedding, block, head = times.embedding, times.block, times.head
    if (
        embedding.saved_activation_bytes is None
        or block.saved_activation_bytes is None
        or head.saved_activation_bytes is None
    ):
        return None
    return ActivationMemory(
        embedding=embedding.saved_activation_bytes,
        block=block.saved_activation_bytes,
        head=head.saved_activation_bytes,
        logits=head.boundary_bytes or 0,
        recompute=times.recompute_bytes or 0,
        message=message_bytes,
    )


def kept_messages(plan: Plan, executor: Executor) -> int:
    """Tensors between stages that a rank holds at its peak, besides those autograd keeps.

    torch 2.13, measured: the multi-stage runtime holds sent outputs, preallocated receive buffers
    and gradients of every micro-batch and stage, Schedule1F1B the receive buffers alone. Others
    free a tensor once it is sent: one in each direction, arriving and leaving.
    """
    if plan.num_ranks == 1:
        return 0
    match executor:
        case Executor.TORCH_RUNTIME | Executor.TORCH_RUNTIME_SERIAL:
            return 3 * plan.num_microbatches * plan.num_chunks + 1
        case Executor.TORCH_1F1B:
            return plan.num_microbatches + 5
        case _:
            return 4


def per_stage_bytes(plan: Plan, activation: ActivationMemory) -> Floats:
    """What autograd and kept outputs hold of one micro-batch on each stage, float64[num_stages]."""
    per_layer = (activation.embedding, activation.block, activation.head + activation.logits)
    per_stage = stage_sums(np.array([per_layer], dtype=np.float64), plan.layers_per_stage)
    return per_stage.reshape(-1)


def _held_bytes(plan: Plan, order: Order, activation: ActivationMemory) -> Floats:
    """Most bytes that autograd and kept outputs hold at once on each rank."""
    return peak_in_flight_bytes(order, per_stage_bytes(plan, activation))
