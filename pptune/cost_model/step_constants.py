"""Work once per step that no schedule changes: optimizer, gradient all-reduce, per-chunk costs."""

from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from pptune.plan import Plan
from pptune.profiles import AllreducePoint, Overhead, Profile, Source, weakest

Floats = NDArray[np.float64]


class ConstantCosts(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Seconds per step of each rank, float64[num_ranks], and where they come from."""

    seconds: Floats
    source: Source
    assumptions: tuple[str, ...]


def constant_costs(
    plan: Plan, profile: Profile, overhead: Overhead | None, parameter_bytes: Floats | None
) -> ConstantCosts:
    """What a step costs each rank besides its actions; `parameter_bytes` are each rank's own."""
    fixed_s = 0.0
    sources: list[Source] = []
    assumptions: list[str] = []
    if overhead is not None:
        fixed_s += overhead.step_s + overhead.chunk_s * plan.num_chunks
    constants = profile.step_constants
    if constants is not None:
        fixed_s += constants.fixed_s
    seconds = np.full(plan.num_ranks, fixed_s)
    if constants is None:
        assumptions.append("optimizer and other work once per step were not measured: counted as 0")
    else:
        sources.append(constants.source)
        if parameter_bytes is not None:
            seconds += constants.per_parameter_byte_s * parameter_bytes
        elif constants.per_parameter_byte_s > 0:
            assumptions.append("parameter sizes are not known: optimizer time per byte left out")
    if plan.data_parallel > 1:
        if not profile.allreduce or parameter_bytes is None:
            assumptions.append("the data-parallel all-reduce was not measured: counted as 0")
        else:
            ratio = 1.0
            if profile.memory is not None:
                ratio = profile.memory.gradient_bytes_per_parameter_byte
            reductions = [
                allreduce_s(profile.allreduce, float(size), plan.data_parallel)
                for size in parameter_bytes * ratio
            ]
            seconds += np.array([value for value, _ in reductions])
            sources += [source for _, source in reductions]
    return ConstantCosts(seconds=seconds, source=weakest(sources), assumptions=tuple(assumptions))


def allreduce_s(
    points: Sequence[AllreducePoint], num_bytes: float, num_ranks: int
) -> tuple[float, Source]:
    """Seconds to all-reduce `num_bytes` over `num_ranks`, and how that was found.

    Linear between measured sizes and, beyond the largest, at the bandwidth of the last two. A
    number of ranks that was not measured is scaled from the nearest one by the ring's traffic,
    2 (n - 1) / n of the bytes per rank (Patarasuk and Yuan, JPDC 69(2), 2009).
    """
    counts = {point.num_ranks for point in points if point.num_ranks > 1}
    if num_ranks < 2 or not counts:
        return 0.0, "measured"
    nearest = min(counts, key=lambda count: (abs(count - num_ranks), count))
    of_count = sorted(
        (point for point in points if point.num_ranks == nearest),
        key=lambda point: point.num_bytes,
    )
    sizes = np.array([point.num_bytes for point in of_count], dtype=np.float64)
    times = np.array([point.seconds for point in of_count])
    found: Literal["measured", "interpolated", "extrapolated"] = "interpolated"
    if num_bytes in sizes:
        found = "measured"
    if num_bytes > sizes[-1] and len(sizes) > 1 and times[-1] > times[-2]:
        slope = (times[-1] - times[-2]) / (sizes[-1] - sizes[-2])
        seconds, found = float(times[-1] + slope * (num_bytes - sizes[-1])), "extrapolated"
    elif num_bytes > sizes[-1]:
        seconds, found = float(times[-1] * num_bytes / sizes[-1]), "extrapolated"
    else:
        # Below the smallest size np.interp stays flat: what is left there is latency.
        seconds = float(np.interp(num_bytes, sizes, times))
    if nearest != num_ranks:
        found = "extrapolated"
        seconds *= ((num_ranks - 1) / num_ranks) / ((nearest - 1) / nearest)
    return seconds, weakest([found, *(point.source for point in of_count)])
