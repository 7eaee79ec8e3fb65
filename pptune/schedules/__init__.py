"""Schedules: the orders in which ranks do their forwards and backwards."""

from importlib import import_module

import numpy as np
from numpy.typing import NDArray

from pptune.errors import PlanError
from pptune.schedules.action import Action, Work
from pptune.schedules.order import ActionArrays, Order, from_text

__all__ = [
    "Action",
    "ActionArrays",
    "Order",
    "Work",
    "from_text",
    "generate",
    "peak_in_flight",
    "peak_in_flight_bytes",
]

_MODULES = {
    "gpipe": "gpipe",
    "1f1b": "one_f_one_b",
    "interleaved": "interleaved",
}


def generate(
    schedule: str,
    *,
    num_ranks: int,
    num_chunks: int,
    num_microbatches: int,
    microbatch_group_size: int | None = None,
) -> Order:
    """The order in which `schedule` does its actions. Raises PlanError for what cannot run."""
    if schedule not in _MODULES:
        raise PlanError(f"schedule {schedule!r} is unknown; use one of {', '.join(_MODULES)}")
    module = import_module(f"pptune.schedules.{_MODULES[schedule]}")
    group = microbatch_group_size
    if group is None:
        group = num_microbatches // max(1, num_microbatches // num_ranks)

    def make() -> ActionArrays:
        size = 2 * num_ranks * num_chunks * num_microbatches
        arrays = ActionArrays(
            np.empty(size, np.int8),
            np.empty(size, np.int32),
            np.empty(size, np.int32),
            np.empty(num_ranks + 1, np.int64),
        )
        module.fill(num_ranks, num_chunks, num_microbatches, group, *arrays)
        return arrays

    return Order(
        num_ranks=num_ranks,
        num_stages=num_ranks * num_chunks,
        num_microbatches=num_microbatches,
        placement="loop",
        make=make,
    )


def peak_in_flight(order: Order) -> NDArray[np.int64]:
    """The most stage-micro-batches each rank holds at once. Shape [num_ranks]."""
    return peak_in_flight_bytes(order, np.ones(order.num_stages)).astype(np.int64)


def peak_in_flight_bytes(order: Order, bytes_per_stage: NDArray[np.float64]) -> NDArray[np.float64]:
    """The most bytes of activations each rank holds at once, from an action's forward until its
    full backward or weight gradient. `bytes_per_stage` is per micro-batch. Shape [num_ranks]."""
    from pptune.schedules.in_flight import peak

    per_stage = np.ascontiguousarray(bytes_per_stage, np.float64)
    peaks: NDArray[np.float64] = peak(order.works, order.stages, order.offsets, per_stage)
    return peaks
