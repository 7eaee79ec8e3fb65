"""The arrays of a step that hold something for every message or action."""

import numpy as np
from numpy.typing import NDArray

from pptune.schedules.order import Order, padded
from pptune.simulator.arrays import UNKNOWN
from pptune.simulator.kinds import BY_EITHER, BY_RECEIVER, BY_SENDER

Floats = NDArray[np.float64]

_KEPT_SIZE = 2**18
"""Rooms for more messages are not kept: making them costs little beside playing the step."""
_NO_FLOATS = np.empty(0)


class Room:
    """Message arrays as arrays.py describes them, and `done`: when each rank had done each action,
    after an entry for the step's start. What a loop does not use is empty."""

    def __init__(self, order: Order, started_by: int, wired: bool) -> None:
        self.key = (started_by, wired)
        self.stride = padded(order.num_microbatches)
        self.num_rows = 2 * order.num_stages + 2
        self.num_ranks = order.num_ranks
        size = self.num_rows * self.stride
        self.arrived = np.empty(size)
        self.sent = self.produced = self.done = _NO_FLOATS
        self.following = np.empty(0, np.int64)
        """By message: the name of the next one on its link."""
        if wired or started_by == BY_EITHER:
            self.produced = np.empty(size)
        if started_by != BY_SENDER:
            self.sent = np.empty(size)
            self.done = np.empty(order.num_ranks * (order.coded.width + 1))
        if started_by == BY_EITHER:
            self.following = np.empty(size, np.int64)

    def clear(self) -> None:
        """Nothing has happened yet. Only what a loop asks for before it is known is reset."""
        started_by, _ = self.key
        none = slice((self.num_rows - 2) * self.stride, (self.num_rows - 1) * self.stride)
        if started_by != BY_RECEIVER:
            self.arrived.fill(UNKNOWN)
        if started_by != BY_SENDER:
            self.sent.fill(UNKNOWN)
            self.sent[none] = 0.0
            if started_by == BY_EITHER:
                self.done.fill(UNKNOWN)
            self.done.reshape(self.num_ranks, -1)[:, 0] = 0.0
        self.arrived[none] = 0.0
        self.produced[none] = 0.0

    def take_over(self, shorter: "Room") -> None:
        """What had happened in a room for fewer micro-batches of the same step."""
        for name in ("arrived", "sent", "produced", "following"):
            old, new = getattr(shorter, name), getattr(self, name)
            if old.size:
                new.reshape(self.num_rows, -1)[:, : shorter.stride] = old.reshape(self.num_rows, -1)
        if self.done.size:
            old, new = (
                shorter.done.reshape(self.num_ranks, -1),
                self.done.reshape(self.num_ranks, -1),
            )
            kept = min(old.shape[1], new.shape[1])
            new[:, :kept] = old[:, :kept]


def take_room(order: Order, started_by: int, wired: bool) -> Room:
    """A cleared room for `order`: the one it keeps, or a new one."""
    room: Room = order.cache.pop(("room", started_by, wired), None) or Room(
        order, started_by, wired
    )
    room.clear()
    return room


def give_back(order: Order, room: Room) -> None:
    """Keep a room with its order, for the next step that is played."""
    if room.arrived.size <= _KEPT_SIZE:
        order.cache["room", *room.key] = room
