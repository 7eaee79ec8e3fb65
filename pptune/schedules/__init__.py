"""Schedules: in which order every rank does its forwards and backwards.

An order is made by `generate` or read by `from_text`. Each schedule has its own file with a
function `order(shape) -> Order`; to add one, write the file and name it in `_MODULES`.
"""

from collections.abc import Callable
from functools import cache
from importlib import import_module

import numpy as np
from numpy.typing import NDArray

from pptune.errors import PlanError
from pptune.schedules.action import Action, Work, input_stage
from pptune.schedules.order import Cycle, Order, Shape
from pptune.schedules.orders import MAX_MICROBATCHES, MAX_STAGES
from pptune.schedules.text import from_actions, from_text

__all__ = [
    "Action",
    "Cycle",
    "Order",
    "Work",
    "from_actions",
    "from_text",
    "generate",
    "input_stage",
    "peak_in_flight",
    "peak_in_flight_bytes",
]

_MODULES = {
    "gpipe": "gpipe",
    "1f1b": "one_f_one_b",
    "interleaved": "interleaved",
    "zb-h1": "zb_h1",
    "zb-h2": "zb_h2",
    "zb-v": "zb_v",
    "looped-bfs": "looped_bfs",
    "interleaved-zb": "interleaved_zb",
    "dualpipe-v": "dualpipe_v",
}


def generate(
    schedule: str,
    *,
    num_ranks: int,
    num_chunks: int,
    num_microbatches: int,
    microbatch_group_size: int | None = None,
) -> Order:
    """The order in which `schedule` does its actions; it takes no time until it is read.

    `microbatch_group_size` (N) defaults to torch's M // max(1, M // P). Raises PlanError for what
    cannot run at all, under any trainer.
    """
    if schedule not in _MODULES:
        raise PlanError(f"schedule {schedule!r} is unknown; use one of {', '.join(_MODULES)}")
    if min(num_ranks, num_chunks, num_microbatches) < 1:
        raise PlanError(
            f"{num_ranks} ranks, {num_chunks} chunks and {num_microbatches} micro-batches: "
            "each must be 1 or more"
        )
    if num_ranks * num_chunks > MAX_STAGES or num_microbatches > MAX_MICROBATCHES:
        raise PlanError(
            f"{num_ranks * num_chunks} stages x {num_microbatches} micro-batches is too large; "
            f"use at most {MAX_STAGES} and {MAX_MICROBATCHES}"
        )
    group = microbatch_group_size
    if group is None:
        group = num_microbatches // max(1, num_microbatches // num_ranks)
    elif not 1 <= group <= num_microbatches:
        raise PlanError(
            f"micro-batch group size is {group}, but it must lie in 1..{num_microbatches} "
            "(the number of micro-batches)"
        )
    return _maker(schedule)(Shape(num_ranks, num_chunks, num_microbatches, group))


@cache
def _maker(schedule: str) -> Callable[[Shape], Order]:
    """The schedule's function `order`; its file is loaded when it is first asked for."""
    maker: Callable[[Shape], Order] = import_module(f"pptune.schedules.{_MODULES[schedule]}").order
    return maker


def peak_in_flight(order: Order) -> NDArray[np.int64]:
    """The most stage-micro-batches each rank holds at once. Shape [num_ranks]."""
    return peak_in_flight_bytes(order, np.ones(order.num_stages)).astype(np.int64)


def peak_in_flight_bytes(order: Order, bytes_per_stage: NDArray[np.float64]) -> NDArray[np.float64]:
    """The most bytes of activations each rank holds at once. Shape [num_ranks].

    `bytes_per_stage`, shape [num_stages], is what one micro-batch keeps from its forward until its
    full backward or weight part on that stage has ended.
    """
    num_microbatches = order.num_microbatches
    if order.cycle is not None:
        # Every cycle holds and frees the same, so that one of them shows the peak.
        num_microbatches -= (order.cycle.num_cycles - 1) * order.cycle.num_microbatches
    return order.codes(num_microbatches).peaks(np.ascontiguousarray(bytes_per_stage, np.float64))
