"""Times and sizes of a model's layers, measured in place.

Every rank runs the same chunks at the same time, as it will in a pipeline, so that what ranks take
from one another (memory bandwidth, power, cores) is in the numbers. They meet only between rounds:

    prepare each size, smallest first, until one does not fit
    run untimed rounds until the clocks are warm
    repeat  a round: every chunk at every size, in an order of the rank's own, and the reference
            product
            share the round's samples among the ranks
    until   every layer's time is known to `max_noise`, or the budget ends
"""

import gc
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist

from pptune.errors import RankFailure, UsageError
from pptune.measurement import Measurement, drift_warning
from pptune.model import ModelSpec
from pptune.profiles import Layer, MemoryModel, Reference, StepConstants
from pptune.runtime import headroom
from pptune.runtime.bench import Bench
from pptune.runtime.exchange import gather_objects, ranks_on_this_host
from pptune.runtime.layer_points import (
    KINDS,
    ChunkSamples,
    Lap,
    layers_of,
    noise_ratio,
    sample_warnings,
)
from pptune.runtime.load import Load, load_now, load_warnings
from pptune.runtime.reference import ReferenceProduct
from pptune.runtime.update import measure_update
from pptune.units import format_bytes

_REFERENCES_PER_ROUND = 3

_MAX_DRAWS = 10
"""How often a chunk is timed in one round at most."""

Doing = Callable[[str], None]
FreeBytes = Callable[[torch.device, int], int | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerMeasurement:
    """What the rounds so far say; the same on every rank."""

    layers: tuple[Layer, ...]
    """Embedding, block, head."""
    reference: Reference
    step_constants: StepConstants
    memory: MemoryModel
    layer_source: str
    """Whose layers were measured."""
    warnings: tuple[str, ...]
    num_rounds: int
    is_settled: bool


def measure_layers(
    spec: ModelSpec,
    sizes: Sequence[int],
    *,
    dtype: torch.dtype,
    device: torch.device,
    recompute: Literal["none", "full"] = "none",
    max_noise: float,
    budget_s: float,
    warm_up_s: float = 1.0,
    seed: int = 0,
    on_round: Callable[[LayerMeasurement], None] = lambda result: None,
    doing: Doing = lambda what: None,
    free_bytes: FreeBytes = headroom.free_bytes,
) -> LayerMeasurement:
    """Forward, backward, input- and weight-gradient times of the layers at every size.

    Called by all ranks of the group with the same arguments. Untimed rounds last `warm_up_s` or
    more, for clocks to rise; `budget_s` is for the timed ones. `on_round` gets the result so far
    after every round; `doing` is told what is being run. A size that runs out of memory on any rank
    is marked so, and every larger one with it. Raises RankFailure when the smallest doesn't fit.
    """
    if not sizes:
        raise UsageError("there is no micro-batch size to measure; give some, such as 1,2,4")
    ranks_on_node = ranks_on_this_host()

    def left() -> int | None:
        return free_bytes(device, ranks_on_node)

    _check_parameters_fit(spec, dtype, device, left())
    bench = Bench(spec, dtype=dtype, device=device, recompute=recompute)
    out_of_memory = _prepare(bench, sorted(set(sizes)), left, doing)
    run = _Run(bench, out_of_memory, recompute, max_noise, doing)
    with _no_collection():
        run.warm_up(warm_up_s)
        started = time.monotonic()
        while True:
            spent_s = run.play_round(seed, started)
            result = run.result()
            on_round(result)
            # The budget ends before the round that would overrun it.
            if result.is_settled or spent_s * (1 + 1 / result.num_rounds) > budget_s:
                return result


def _check_parameters_fit(
    spec: ModelSpec, dtype: torch.dtype, device: torch.device, free: int | None
) -> None:
    stack = Bench.stack_blocks(spec, device)
    needed = headroom.parameter_bytes_needed(spec, stack, dtype.itemsize)
    short = free is not None and needed > free
    if any(gather_objects(short)):
        raise RankFailure(
            f"embedding, head and {stack} blocks of {spec.name} need {format_bytes(needed)} per "
            f"rank with gradients and optimizer, but {format_bytes(free or 0)} are free; use fewer "
            "ranks on this machine, a smaller --dtype or a smaller model",
            rank=None,
            reason="oom",
        )


def _prepare(
    bench: Bench, sizes: Sequence[int], left: Callable[[], int | None], doing: Doing
) -> list[int]:
    """Add sizes to the bench until one doesn't fit on some rank; the sizes that don't."""
    for place, size in enumerate(sizes):
        doing(f"preparing layers at b={size}")
        if any(gather_objects(not _fits(bench, size, left()))):
            bench.forget_size(size)
            if place == 0:
                raise RankFailure(
                    f"a micro-batch of {size} does not fit in memory beside the layers of "
                    f"{bench.spec.name}; use a shorter --seq-len or fewer ranks on this machine",
                    rank=None,
                    reason="oom",
                )
            return list(sizes[place:])
    return []


def _fits(bench: Bench, size: int, free: int | None) -> bool:
    if free is not None and bench.bytes_needed(size) > free:
        return False
    try:
        bench.add_size(size)
    except (RuntimeError, MemoryError) as error:
        if not headroom.is_out_of_memory(error):
            raise
        return False
    return True


@contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage collection inside: it would be charged to whatever it interrupts."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


@dataclass(slots=True)
class _Run:
    """The rounds of one measurement, and what all ranks found."""

    bench: Bench
    out_of_memory: list[int]
    recompute: Literal["none", "full"]
    max_noise: float
    doing: Doing
    draws: dict[tuple[str, int], int] = field(default_factory=dict)
    """How often each chunk is timed per round."""
    samples: ChunkSamples = field(default_factory=ChunkSamples)
    references_s: list[float] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    num_rounds: int = 0
    product: ReferenceProduct = field(init=False)
    step_constants: StepConstants = field(init=False)
    memory: MemoryModel = field(init=False)
    _load_before: Load = field(init=False)

    def __post_init__(self) -> None:
        self.product = ReferenceProduct(self.bench.device)
        self.doing("timing the optimizer")
        block = list(self.bench.modules["block"].parameters())
        self.step_constants, self.memory = measure_update(
            block, self.bench.parameters(), self.bench.device
        )

    def warm_up(self, at_least_s: float) -> None:
        """Untimed rounds; then how often to draw each chunk, the same on every rank."""
        self.draws = dict.fromkeys(self.bench.measurable, 1)
        costs_s: dict[tuple[str, int], float] = {}
        failed: set[int] = set()
        started = time.monotonic()
        while not costs_s or time.monotonic() - started < at_least_s:
            for kind, size in self.draws:
                costs_s[kind, size] = sum(seconds for _, seconds in self._draw(kind, size, failed))
        ranks = gather_objects((costs_s, failed))
        self._drop({size for _, sizes in ranks for size in sizes})
        slowest_s = {key: max(costs[key] for costs, _ in ranks) for key in self.draws}
        longest_s = max(slowest_s.values(), default=0.0)
        # For a given total, relative errors squared add up to least when each is drawn in
        # proportion to 1 / sqrt(cost).
        self.draws = {
            key: min(_MAX_DRAWS, round(math.sqrt(longest_s / cost_s))) if cost_s > 0 else _MAX_DRAWS
            for key, cost_s in slowest_s.items()
        }
        self._load_before = load_now()

    def play_round(self, seed: int, started: float) -> float:
        """One round and the exchange of its samples; the slowest rank's seconds since `started`."""
        order = [key for key, times in self.draws.items() for _ in range(times)]
        # Each rank its own order: in a pipeline, too, the neighbour runs something else, and two
        # heads at once would share what memory bandwidth one has to itself there.
        random.Random(f"{seed} {self.num_rounds} {dist.get_rank()}").shuffle(order)
        every = max(1, len(order) // _REFERENCES_PER_ROUND)
        laps: list[Lap] = []
        references_s: list[float] = []
        failed: set[int] = set()
        for place, (kind, size) in enumerate(order):
            if place % every == 0:
                references_s.append(self.product.sample())
            laps += self._draw(kind, size, failed)
        self.bench.zero_gradients()
        gc.collect()
        load = load_now().since(self._load_before)
        answer = (laps, references_s, failed, load, time.monotonic() - started)
        return self._share(gather_objects(answer))

    def _draw(self, kind: str, size: int, failed: set[int]) -> list[Lap]:
        """Time a chunk once; a size that runs out of memory joins `failed` and gives nothing."""
        if size in failed:
            return []
        self.doing(f"timing {kind} at b={size}")
        try:
            return self.bench.draw(kind, size)
        except (RuntimeError, MemoryError) as error:
            if not headroom.is_out_of_memory(error):
                raise
            failed.add(size)
            return []

    def _share(self, gathered: list[Any]) -> float:
        laps, references_s, failed, loads, spent_s = zip(*gathered, strict=True)
        self.samples.add_round(laps)
        self.references_s += [value for rank in references_s for value in rank]
        self.loads = list(loads)
        self.num_rounds += 1
        self._drop(set().union(*failed))
        return float(max(spent_s))

    def _drop(self, failed: set[int]) -> None:
        """Sizes that ran out of memory on some rank are out for all, and larger ones with them."""
        smallest = min(failed, default=None)
        if smallest is None:
            return
        for size in {size for _, size in self.draws if size >= smallest}:
            self.bench.forget_size(size)
            self.out_of_memory.append(size)
        self.draws = {key: times for key, times in self.draws.items() if key[1] < smallest}
        if not self.draws:
            raise RankFailure(
                f"a micro-batch of {smallest} ran out of memory, and there is no smaller one to "
                "measure; add smaller --micro-batch-sizes",
                rank=None,
                reason="oom",
            )

    def result(self) -> LayerMeasurement:
        """What the rounds so far say."""
        sizes = self.bench.kind_sizes()
        units = self.bench.units
        measured = {size for _, size in self.draws}
        layers = layers_of(
            self.samples,
            sizes,
            out_of_memory=self.out_of_memory,
            max_noise=self.max_noise,
            recompute=self.recompute,
        )
        return LayerMeasurement(
            layers=layers,
            reference=self._reference(),
            step_constants=self.step_constants,
            memory=self.memory,
            layer_source=self.bench.layer_source,
            warnings=(
                *sample_warnings(self.samples, units=units, max_noise=self.max_noise),
                *([drift] if (drift := drift_warning(self.references_s)) is not None else []),
                *load_warnings(self.loads),
            ),
            num_rounds=self.num_rounds,
            is_settled=all(
                noise_ratio(self.samples, kind, size, units=units) <= self.max_noise
                for kind in KINDS
                for size in measured
            ),
        )

    def _reference(self) -> Reference:
        return Reference(
            matrix_size=self.product.matrix_size,
            dtype=str(self.product.dtype).removeprefix("torch."),
            seconds=Measurement(samples_s=tuple(self.references_s)).centre_s,
            samples_s=tuple(self.references_s),
        )
