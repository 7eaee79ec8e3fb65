"""Samples of timed chunks -> the times of single layers.

Four chunks are timed at every micro-batch size: an empty one, the embedding, a stack of blocks, the
head with its loss. What the empty one takes is the cost of the call itself: it is taken off the
others, and what is left of the stack is divided by its number of blocks.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from pptune.measurement import (
    Centre,
    Measurement,
    per_unit,
    quantised_warning,
    to_nanoseconds,
    uneven_ranks_warning,
    unsettled_warning,
)
from pptune.profiles import Layer, LayerPoint
from pptune.runtime.speed import at_mean_speed

Kind = Literal["embedding", "block", "head"]
KINDS: tuple[Kind, ...] = ("embedding", "block", "head")
EMPTY = "empty"
"""The chunk without layers."""

Key = tuple[str, int, str]
"""(kind of chunk, micro-batch size, phase)."""

Lap = tuple[Key, float]
"""What was timed, and its seconds."""

_MAX_SAMPLES = 400
"""Samples of one phase that a profile keeps, spread evenly over the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KindSizes:
    """What a kind of layer holds; bytes for one layer by micro-batch size."""

    count: int
    """Layers of this kind in the model."""
    units: int
    """Layers in the timed chunk."""
    parameter_bytes: int
    saved_bytes: Mapping[int, int]
    boundary_bytes: Mapping[int, int]


@dataclass(slots=True)
class ChunkSamples:
    """Seconds of every chunk, size and phase, kept apart by rank."""

    by_rank: dict[Key, list[list[float]]] = field(default_factory=dict)
    """At the machine's mean speed (speed.py)."""
    _numbers: dict[Key, int] = field(default_factory=dict)
    _laps: list[tuple[list[int], list[float]]] = field(default_factory=list)
    """What each rank timed, by its number in `_numbers`, and the seconds, in the order they ran."""

    def add_round(self, gathered: Sequence[Sequence[Lap]]) -> None:
        """Add what each rank measured in one round, in the order in which it did."""
        self._laps = self._laps or [([], []) for _ in gathered]
        for (numbers, seconds), laps in zip(self._laps, gathered, strict=True):
            for key, lap_s in laps:
                numbers.append(self._numbers.setdefault(key, len(self._numbers)))
                seconds.append(lap_s)
        kinds = [np.array(numbers, dtype=np.intp) for numbers, _ in self._laps]
        steady_s = at_mean_speed(kinds, [np.array(seconds) for _, seconds in self._laps])
        self.by_rank = {
            key: [own_s[own == number].tolist() for own, own_s in zip(kinds, steady_s, strict=True)]
            for key, number in self._numbers.items()
        }

    def get(self, kind: str, size: int, phase: str) -> Measurement | None:
        """All ranks' samples together, or None without any."""
        pooled = [value for rank in self.by_rank.get((kind, size, phase), []) for value in rank]
        return Measurement(samples_s=tuple(pooled)) if pooled else None

    def layer_time(self, kind: str, size: int, phase: str, *, units: int) -> Centre | None:
        """Seconds of one layer, or None where it wasn't timed."""
        whole, call = self.get(kind, size, phase), self.get(EMPTY, size, phase)
        if whole is None or call is None:
            return None
        return per_unit(whole, call, units=units)


def noise_ratio(
    samples: ChunkSamples, kind: Kind, size: int, *, units: Mapping[Kind, int]
) -> float:
    """How unsure a stage's forward and backward times are because of a layer, the worse of the two.

    A stage has at least a block, beside an embedding or a head too: half-width over the larger of
    the layer's own time and a block's. Measuring ends when this is small, not when an embedding of
    next to no time is known exactly.
    """
    worst = 0.0
    for phase in ("forward", "backward"):
        own = samples.layer_time(kind, size, phase, units=units[kind])
        block = samples.layer_time("block", size, phase, units=units["block"])
        if own is None or block is None:
            continue
        yardstick = max(own.seconds, block.seconds)
        worst = max(worst, own.half_width_s / yardstick if yardstick > 0 else float("inf"))
    return worst


def _is_settled(
    samples: ChunkSamples, kind: Kind, size: int, *, units: Mapping[Kind, int], max_noise: float
) -> bool:
    """Whether the layer's own forward and backward times are known to `max_noise`."""
    times = [
        samples.layer_time(kind, size, phase, units=units[kind])
        for phase in ("forward", "backward")
    ]
    return all(time is None or time.noise_ratio <= max_noise for time in times)


def layers_of(
    samples: ChunkSamples,
    sizes: Mapping[Kind, KindSizes],
    *,
    out_of_memory: Sequence[int],
    max_noise: float,
    recompute: Literal["none", "full"],
) -> tuple[Layer, ...]:
    """The three kinds of layer with their points, sizes that ran out of memory included."""
    units: dict[Kind, int] = {kind: sizes[kind].units for kind in KINDS}
    measured = sorted({size for _, size, _ in samples.by_rank} - set(out_of_memory))

    def points(kind: Kind) -> Iterator[LayerPoint]:
        for size in measured:
            settled = _is_settled(samples, kind, size, units=units, max_noise=max_noise)
            yield _point(samples, kind, size, sizes[kind], "ok" if settled else "unsettled")
        for size in sorted(out_of_memory):
            yield LayerPoint(microbatch_size=size, status="oom")

    return tuple(
        Layer(
            kind=kind,
            count=sizes[kind].count,
            points=tuple(points(kind)),
            recompute=recompute,
            parameter_bytes=sizes[kind].parameter_bytes,
        )
        for kind in KINDS
    )


def _point(
    samples: ChunkSamples,
    kind: Kind,
    size: int,
    sizes: KindSizes,
    status: Literal["ok", "unsettled"],
) -> LayerPoint:
    seconds: dict[str, float] = {}
    kept: dict[str, tuple[float, ...]] = {}
    for phase in ("forward", "backward", "backward_input", "backward_weight"):
        whole, call = samples.get(kind, size, phase), samples.get(EMPTY, size, phase)
        if whole is None or call is None:
            continue
        seconds[phase] = per_unit(whole, call, units=sizes.units).seconds
        each = [(value - call.centre_s) / sizes.units for value in whole.samples_s]
        kept[phase] = _thinned(each)
        if kind == "block":  # The same for all kinds.
            kept[f"call_{phase}"] = _thinned(call.samples_s)
    if kind == "embedding" and "backward" in seconds:
        # Token ids have no gradient: its backward is all weight gradient.
        seconds |= {"backward_input": 0.0, "backward_weight": seconds["backward"]}
    return LayerPoint(
        microbatch_size=size,
        forward_s=seconds.get("forward"),
        backward_s=seconds.get("backward"),
        backward_input_s=seconds.get("backward_input"),
        backward_weight_s=seconds.get("backward_weight"),
        saved_activation_bytes=sizes.saved_bytes.get(size),
        boundary_bytes=sizes.boundary_bytes.get(size),
        samples_s=kept,
        status=status,
    )


def _thinned(samples: Sequence[float]) -> tuple[float, ...]:
    kept = np.asarray(samples)
    if len(kept) > _MAX_SAMPLES:
        kept = kept[np.linspace(0, len(kept) - 1, _MAX_SAMPLES).round().astype(int)]
    return to_nanoseconds(kept.tolist())


def sample_warnings(
    samples: ChunkSamples, *, units: Mapping[Kind, int], max_noise: float
) -> list[str]:
    """What a reader must know about the block's times, in words."""
    warnings: list[str | None] = []
    unsettled: dict[str, Centre] = {}
    sizes = sorted({size for _, size, _ in samples.by_rank})
    for size in sizes:
        for phase in ("forward", "backward"):
            centre = samples.layer_time("block", size, phase, units=units["block"])
            raw = samples.get("block", size, phase)
            if centre is None or raw is None:
                continue
            what = f"block {phase} at b={size}"
            warnings.append(quantised_warning(what, raw.samples_s))
            if centre.noise_ratio > max_noise:
                unsettled[what] = centre
    warnings.append(unsettled_warning(unsettled, max_noise))
    if sizes:
        ranks = samples.by_rank.get(("block", sizes[-1], "forward"), [])
        medians = [float(np.median(rank)) for rank in ranks if rank]
        if len(medians) > 1:
            warnings.append(uneven_ranks_warning(f"a block at b={sizes[-1]}", medians))
    return [warning for warning in warnings if warning is not None]
