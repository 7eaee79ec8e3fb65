"""What actions and messages take."""

from collections.abc import Iterator
from typing import NoReturn

import msgspec
import numpy as np
from numpy.typing import NDArray

from pptune.errors import UsageError

Floats = NDArray[np.float64]

_ROWS = (
    *(f"{kind} time of stage" for kind in ("forward", "backward", "input part", "weight part")),
    *(
        f"{direction} {part} of the hop after stage"
        for direction in ("forward", "backward")
        for part in ("latency", "wire time", "send time", "receive time")
    ),
)
"""What the rows of a cost table hold."""


class Hops(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Messages across each stage boundary in one direction. Arrays [num_stages - 1]: boundary s
    lies between stages s and s + 1. Boundaries inside one rank are ignored."""

    latency_s: Floats
    wire_s: Floats
    """Time the message occupies the directed link between the two ranks."""
    send_occupied_s: Floats
    """Time the sender can't compute."""
    receive_occupied_s: Floats

    def __iter__(self) -> Iterator[Floats]:
        """The parts in the order of a cost table."""
        return iter((self.latency_s, self.wire_s, self.send_occupied_s, self.receive_occupied_s))

    @classmethod
    def pure_latency(cls, latency_s: float, num_stages: int) -> "Hops":
        """Messages that take `latency_s` and occupy nobody."""
        zero = np.zeros(num_stages - 1)
        return cls(
            latency_s=np.full(num_stages - 1, latency_s),
            wire_s=zero,
            send_occupied_s=zero,
            receive_occupied_s=zero,
        )


class Costs(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Times of one micro-batch. Stage arrays have shape [num_stages]."""

    forward_s: Floats
    backward_s: Floats | None
    """Full backward; None where no order that is played has one."""
    backward_input_s: Floats | None = None
    backward_weight_s: Floats | None = None
    overhead_s: Floats
    """Added to every action and reported apart; by Work, shape [4]."""
    forward_hops: Hops
    backward_hops: Hops

    @classmethod
    def uniform(
        cls,
        *,
        num_ranks: int,
        num_chunks: int,
        forward_s: float,
        backward_s: float | None = None,
        backward_input_s: float | None = None,
        backward_weight_s: float | None = None,
        transfer_s: float = 0.0,
        overhead_s: float = 0.0,
    ) -> "Costs":
        """Equal stages. Times are for one micro-batch on one rank's whole share of the layers, of
        which each stage gets 1 / num_chunks; every hop takes `transfer_s` of pure latency. A
        backward that is not given is the sum of its parts."""
        num_stages = num_ranks * num_chunks

        def share(seconds: float) -> Floats:
            return np.full(num_stages, seconds / num_chunks)

        parts = (backward_input_s, backward_weight_s)
        if backward_s is None and parts[0] is not None and parts[1] is not None:
            backward_s = parts[0] + parts[1]
        hops = Hops.pure_latency(transfer_s, num_stages)
        return cls(
            forward_s=share(forward_s),
            backward_s=None if backward_s is None else share(backward_s),
            backward_input_s=None if parts[0] is None else share(parts[0]),
            backward_weight_s=None if parts[1] is None else share(parts[1]),
            overhead_s=np.full(4, overhead_s),
            forward_hops=hops,
            backward_hops=hops,
        )

    def rows(self) -> tuple[Floats | None, ...]:
        """Stage times by Work, then the parts of a hop forward and backward; see _ROWS."""
        return (
            self.forward_s, self.backward_s, self.backward_input_s, self.backward_weight_s,
            *self.forward_hops, *self.backward_hops,
        )  # fmt: skip

    def refuse(self) -> NoReturn:
        """Raise the UsageError that says which time is missing, negative or not finite."""
        num_stages = len(self.forward_s)
        for row, (what, seconds) in enumerate(zip(_ROWS, self.rows(), strict=True)):
            size = num_stages if row < 4 else num_stages - 1
            if seconds is None:
                continue
            values = np.ravel(seconds)
            if len(values) != size:
                raise UsageError(f"{what}: {len(values)} values given for {size}; give one each")
            for at, value in enumerate(values):
                if not 0.0 <= value < np.inf:
                    raise UsageError(f"{what} {at} is {value}; give a finite time of 0 or more")
        raise UsageError(
            f"overhead_s is {self.overhead_s}; give 4 finite times of 0 or more, by Work"
        )
