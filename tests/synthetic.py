"""Profiles with chosen numbers, for tests of everything that reads a profile."""

from collections.abc import Callable, Sequence

from pptune.model import ModelSpec
from pptune.profiles import (
    AllreducePoint,
    Layer,
    LayerPoint,
    Link,
    Machine,
    MemoryModel,
    Overhead,
    Parallel,
    Profile,
    StepConstants,
)

Times = float | Sequence[float] | Callable[[int], Sequence[float]]
"""Seconds: forward alone (backward is twice that), (forward, backward), (forward, backward input,
backward weight), or b -> one of the last two. All but the last grow in proportion to b."""

SIZES = (1, 2, 4, 8)


def layer_points(
    times: Times,
    sizes: Sequence[int],
    *,
    activation_bytes: int | None,
    boundary_bytes: int | None,
) -> tuple[LayerPoint, ...]:
    """One measured point per size; bytes are per sequence."""
    points = []
    for b in sizes:
        backward_input_s = backward_weight_s = None
        if callable(times):
            seconds = list(times(b))
        elif isinstance(times, float | int):
            seconds = [times * b, 2 * times * b]
        else:
            seconds = [value * b for value in times]
        forward_s, backward_s = seconds[0], sum(seconds[1:])
        if len(seconds) == 3:
            backward_input_s, backward_weight_s = seconds[1:]
        elif backward_s == 0:
            backward_input_s = backward_weight_s = 0.0
        points.append(
            LayerPoint(
                microbatch_size=b,
                forward_s=forward_s,
                backward_s=backward_s,
                backward_input_s=backward_input_s,
                backward_weight_s=backward_weight_s,
                saved_activation_bytes=None if activation_bytes is None else activation_bytes * b,
                boundary_bytes=None if boundary_bytes is None else boundary_bytes * b,
            )
        )
    return tuple(points)


def uniform_link(
    latency_s: float = 0.0,
    bytes_per_s: float = 1e30,
    *,
    scope: str = "intra",
    send_occupied_s: float = 0.0,
    receive_occupied_s: float = 0.0,
) -> Link:
    """A link that stands for every pair of its scope."""
    return Link(
        scope="inter" if scope == "inter" else "intra",
        source_rank=None,
        target_rank=None,
        latency_s=latency_s,
        bytes_per_s=bytes_per_s,
        send_occupied_s=send_occupied_s,
        receive_occupied_s=receive_occupied_s,
    )


def synthetic_profile(
    *,
    num_layers: int = 8,
    block: Times = 1e-3,
    embedding: Times = 0.0,
    head: Times = 0.0,
    recomputed_block: Times | None = None,
    sizes: Sequence[int] = SIZES,
    num_ranks: int = 2,
    seq_len: int = 128,
    links: Sequence[Link] = (uniform_link(),),
    overheads: dict[str, Overhead] | None = None,
    no_overhead: bool = True,
    step_constants: StepConstants | None = None,
    interference_ratio: float | None = None,
    allreduce: Sequence[AllreducePoint] = (),
    activation_bytes: int | None = None,
    boundary_bytes: int | None = 0,
    parameter_bytes: int | None = None,
    end_parameter_bytes: int | None = None,
    end_activation_bytes: int | None = None,
    memory: MemoryModel | None = None,
    memory_bytes: int | None = None,
    ranks_per_node: int | None = None,
    peak_flops_per_s: float | None = None,
    parallel: Parallel | None = None,
    model: ModelSpec | None = None,
) -> Profile:
    """A profile of `num_layers` equal blocks; bytes are per layer and sequence.

    Embedding and head cost nothing, links and executors are free unless given. `no_overhead`
    records zero overheads for every executor, as if they had been measured.
    """
    from pptune.executors import Executor

    def layer(kind: str, times: Times, count: int, *, recompute: str = "none") -> Layer:
        end = kind != "block"
        return Layer(
            kind=kind,  # type: ignore[arg-type]
            count=count,
            recompute=recompute,  # type: ignore[arg-type]
            parameter_bytes=end_parameter_bytes if end else parameter_bytes,
            points=layer_points(
                times,
                sizes,
                activation_bytes=end_activation_bytes if end else activation_bytes,
                boundary_bytes=None if kind == "head" else boundary_bytes,
            ),
        )

    layers = [
        layer("embedding", embedding, 1),
        layer("block", block, num_layers),
        layer("head", head, 1),
    ]
    if recomputed_block is not None:
        layers.append(layer("block", recomputed_block, num_layers, recompute="full"))
    free = {str(name): Overhead(forward_s=0.0, backward_s=0.0) for name in Executor}
    return Profile(
        created_at="2026-01-01T00:00:00+00:00",
        machine=Machine(
            description="synthetic",
            device="cpu",
            device_name="synthetic",
            num_devices=num_ranks,
            ranks_per_node=ranks_per_node,
            memory_bytes=memory_bytes,
            peak_flops_per_s=peak_flops_per_s,
        ),
        model=model
        or ModelSpec(name="synthetic", family="custom", num_layers=num_layers, seq_len=seq_len),
        parallel=parallel or Parallel(),
        dtype="float32",
        seq_len=seq_len,
        num_ranks=num_ranks,
        layers=tuple(layers),
        links=tuple(links),
        allreduce=tuple(allreduce),
        overheads={**(free if no_overhead else {}), **(overheads or {})},
        interference_ratio=interference_ratio,
        step_constants=step_constants,
        memory=memory,
    )
