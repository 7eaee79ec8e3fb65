"""Messages between two ranks, timed: what links.py decides, this sends."""

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from pptune.runtime.clock import clock_for

_SMALLEST_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class _Order:
    """What the leading end of a link tells the other end to take part in."""

    kind: int
    num_bytes: int = 0
    repeats: int = 0
    wait_us: int = 0


_END, _ROUND_TRIPS, _OCCUPY = 0, 1, 2


class _Buffer:
    """Memory for messages of up to `size` bytes, each behind the one before it.

    A pipeline's messages lie elsewhere each time, too. From one place again and again they would
    stay in the caches, and seem faster than they are up to the caches' size.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self._bytes = torch.zeros(max(size, _SMALLEST_BYTES), dtype=torch.uint8, device=device)
        self._next = 0

    def message(self, num_bytes: int) -> torch.Tensor:
        """Room for the next message, uint8[num_bytes]; at the start where the end is too near."""
        size = max(num_bytes, _SMALLEST_BYTES)
        begin = self._next if self._next + size <= self._bytes.numel() else 0
        self._next = begin + size
        return self._bytes[begin : self._next]


class Wire:
    """One rank's buffers and its side of every exchange. "0 bytes" means the smallest message."""

    def __init__(self, device: torch.device, max_bytes: int) -> None:
        self.device = device
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self._clock = clock_for(device)
        self._out = _Buffer(max_bytes, device)
        self._in = _Buffer(max_bytes, device)
        # gloo takes a message faster whose receive is posted. NCCL works off what was posted in
        # order, so that there a receive posted early would hold up the answer behind it for ever.
        self._posts_early = device.type == "cpu"

    def send(self, num_bytes: int, target: int) -> dist.Work:
        """Begin to send."""
        work = dist.isend(self._out.message(num_bytes), target)
        assert work is not None
        return work

    def post_receive(self, num_bytes: int, source: int) -> dist.Work:
        """Begin to receive."""
        work = dist.irecv(self._in.message(num_bytes), source)
        assert work is not None
        return work

    def finish(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    # --- the leading end --------------------------------------------------------------------------

    def round_trips(
        self, target: int, num_bytes: int, repeats: int
    ) -> tuple[list[float], list[float]]:
        """Seconds from post to answer, and seconds that posting kept this thread."""
        self._tell(target, _Order(kind=_ROUND_TRIPS, num_bytes=num_bytes, repeats=repeats))
        trips_s: list[float] = []
        sent_s: list[float] = []

        def trip() -> None:
            started = time.perf_counter()
            sending = self.send(num_bytes, target)
            sent_s.append(time.perf_counter() - started)
            self.post_receive(0, target).wait()
            sending.wait()

        self._hear(target)
        for _ in range(repeats):
            trips_s.append(self._clock.measure(trip))
        return trips_s, sent_s

    def occupy_receiver(
        self, target: int, num_bytes: int, repeats: int, *, arrived_after_s: float
    ) -> None:
        """Have the other end time its own work for messages that have already arrived."""
        wait_us = int(arrived_after_s * 1e6)
        order = _Order(kind=_OCCUPY, num_bytes=num_bytes, repeats=repeats, wait_us=wait_us)
        self._tell(target, order)
        for _ in range(repeats):
            if self._posts_early:
                self._hear(target)
            self.send(num_bytes, target).wait()
        self.finish()

    def end_session(self, target: int) -> None:
        """Let the other end go."""
        self._tell(target, _Order(kind=_END))

    def _tell(self, target: int, order: _Order) -> None:
        words = [order.kind, order.num_bytes, order.repeats, order.wait_us]
        dist.send(torch.tensor(words, dtype=torch.int64, device=self.device), target)

    def _hear(self, source: int) -> None:
        self.post_receive(0, source).wait()
        self.finish()

    # --- the other end ----------------------------------------------------------------------------

    def follow(self, source: int) -> dict[int, list[float]]:
        """Do as the leading end says until it ends; seconds that receiving kept this thread."""
        occupied_s: dict[int, list[float]] = {}
        while (order := self._await_order(source)).kind != _END:
            if order.kind == _ROUND_TRIPS:
                self._answer_round_trips(source, order)
            else:
                occupied_s[order.num_bytes] = [
                    self._receive_arrived(source, order) for _ in range(order.repeats)
                ]
        return occupied_s

    def _await_order(self, source: int) -> _Order:
        words = torch.zeros(4, dtype=torch.int64, device=self.device)
        dist.recv(words, source)
        kind, num_bytes, repeats, wait_us = (int(word) for word in words.tolist())
        return _Order(kind=kind, num_bytes=num_bytes, repeats=repeats, wait_us=wait_us)

    def _answer_round_trips(self, source: int, order: _Order) -> None:
        posted = self.post_receive(order.num_bytes, source) if self._posts_early else None
        self.send(0, source).wait()  # ready
        for left in range(order.repeats, 0, -1):
            (posted or self.post_receive(order.num_bytes, source)).wait()
            if posted is not None:
                posted = self.post_receive(order.num_bytes, source) if left > 1 else None
            self.send(0, source).wait()
        self.finish()

    def _receive_arrived(self, source: int, order: _Order) -> float:
        started = time.perf_counter()
        posted = self.post_receive(order.num_bytes, source)
        seconds = time.perf_counter() - started
        if self._posts_early:
            self.send(0, source).wait()  # ready
            time.sleep(order.wait_us * 1e-6)
        started = time.perf_counter()
        posted.wait()
        return seconds + time.perf_counter() - started

    # --- all at once ------------------------------------------------------------------------------

    def exchange_around(self, num_bytes: int, *, step: int, repeats: int) -> list[float]:
        """Seconds of sending to rank + step and receiving from rank - step, all ranks together."""
        target, source = (self.rank + step) % self.num_ranks, (self.rank - step) % self.num_ranks

        def exchange() -> None:
            operations = [
                dist.P2POp(dist.isend, self._out.message(num_bytes), target),
                dist.P2POp(dist.irecv, self._in.message(num_bytes), source),
            ]
            for work in dist.batch_isend_irecv(operations):
                work.wait()

        self._clock.measure(exchange)
        return [self._clock.measure(exchange) for _ in range(repeats)]

    def allreduces(self, num_bytes: int, repeats: int) -> list[float]:
        """Seconds of all-reduces over all ranks."""
        values = torch.zeros(num_bytes // 4, dtype=torch.float32, device=self.device)
        return [self._clock.measure(lambda: dist.all_reduce(values)) for _ in range(repeats)]
