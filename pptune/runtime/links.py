"""Links between neighbouring ranks, each direction for itself, alone and all at once.

One-way times come without trusting the clocks of two hosts to agree: the sender times a message of
n bytes and an answer of one element. Of that round trip half an empty one is the answer; the rest
is the message's own way. A slow direction shows only in its own number.

    open every pair of neighbours, in one global order
    for each directed link, alone: rounds over the sizes until settled or out of budget
    all ranks at once, towards the next rank and then towards the one before: the same sizes
    all-reduce over all ranks
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch
import torch.distributed as dist

from pptune.measurement import MIN_SAMPLES, Measurement, to_nanoseconds
from pptune.profiles import AllreducePoint, Link, LinkPoint
from pptune.runtime.exchange import gather_objects
from pptune.runtime.link_fit import fit_link
from pptune.runtime.wire import Wire
from pptune.units import format_bytes, format_ratio

DEFAULT_SIZES: dict[str, tuple[int, ...]] = {
    "cpu": tuple(4**power for power in range(5, 14)),
    "cuda": tuple(4**power for power in range(5, 15)),
}
"""1 KiB to 64 MiB, and to 256 MiB on CUDA, where messages are larger."""

ALLREDUCE_SIZES: tuple[int, ...] = (1 << 16, 1 << 20, 1 << 24)

_ALONE_SHARE, _LOADED_SHARE = 0.6, 0.25
"""Shares of the budget; the rest goes to all-reduce."""
_MIN_BATCH, _MAX_BATCH = 2, 5
_BATCH_SHARE = 0.005
"""Share of a link's budget that one size gets per round."""
_MAX_SAMPLES = 200
_MIN_SIZES = 2
"""Of messages that aren't empty; fewer don't make a line."""
_OCCUPIED_SAMPLES = 8
_MAX_LOADED_REPEATS, _MIN_LOADED_REPEATS = 20, 3
_MAX_OCCUPIED_BYTES = 1 << 22
"""Occupied times are taken up to this size; larger messages are rare between stages."""
_LARGEST_SHARE = 0.2
"""A message that would take more than this share of a link's budget isn't tried."""
_MAX_FIT_ERROR = 0.15
_LOADED_RATIO = 1.5

Doing = Callable[[str], None]
Pair = tuple[int, int]
"""(rank that sends, rank that receives)."""
SecondsBySize = dict[int, list[float]]
"""Samples by message size in bytes; size 0 is the smallest message there is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkMeasurement:
    """What the links do; the same on every rank."""

    links: tuple[Link, ...]
    allreduce: tuple[AllreducePoint, ...]
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSamples:
    """One directed link, timed alone."""

    round_trip_s: SecondsBySize
    """A message one way and the smallest one back."""
    send_occupied_s: SecondsBySize
    receive_occupied_s: SecondsBySize

    def one_way_s(self, num_bytes: int) -> list[float]:
        """Samples of the message's own way: the round trip less half an empty round trip."""
        answer_s = undelayed_s(self.round_trip_s[0]) / 2
        return [max(trip_s - answer_s, trip_s / 2) for trip_s in self.round_trip_s[num_bytes]]


def measure_links(
    *,
    device: torch.device,
    node: str,
    max_noise: float,
    budget_s: float,
    sizes: Sequence[int] | None = None,
    doing: Doing = lambda what: None,
) -> LinkMeasurement:
    """Every link of the ring of ranks, r -> r + 1 and back, the last to the first included.

    Called by all ranks of the group with the same arguments but for `node`, the name of the node
    that the rank is on: links between ranks of different nodes are `inter`. One rank alone has no
    links. A link's time is that within which the fastest quarter of its samples arrive: what it
    takes when nothing else on the machine delays it. What a busy receiver adds belongs to the
    runtime's overheads.
    """
    num_ranks = dist.get_world_size()
    if num_ranks == 1:
        return LinkMeasurement(links=(), allreduce=(), warnings=())
    nodes = gather_objects(node)
    pairs = directed_pairs(num_ranks)
    wire = Wire(device, max(sizes or DEFAULT_SIZES[device.type]))
    _open_pairs(wire, pairs, doing)
    alone: dict[Pair, LinkSamples] = {}
    for pair in pairs:
        doing(f"timing the link {pair[0]} -> {pair[1]}")
        alone[pair] = _time_alone(
            wire,
            pair,
            sorted(sizes or DEFAULT_SIZES[device.type]),
            max_noise=max_noise,
            budget_s=_ALONE_SHARE * budget_s / len(pairs),
        )
    doing("timing all links at once")
    loaded = _time_loaded(wire, alone, _LOADED_SHARE * budget_s)
    doing("timing all-reduce")
    left_s = (1 - _ALONE_SHARE - _LOADED_SHARE) * budget_s
    allreduce = _time_allreduce(wire, left_s, num_nodes=len(set(nodes)))
    links = tuple(
        link_of(pair, alone[pair], loaded[pair], is_inter=nodes[pair[0]] != nodes[pair[1]])
        for pair in pairs
    )
    warnings = tuple(text for link in links for text in link_warnings(link, max_noise))
    return LinkMeasurement(links=links, allreduce=allreduce, warnings=warnings)


def undelayed_s(samples_s: Sequence[float]) -> float:
    """The time within which the fastest quarter arrive.

    On a machine that does other work too most messages wait for a processor at one end or both;
    that wait is no property of the link.
    """
    return float(np.quantile(samples_s, 0.25))


def directed_pairs(num_ranks: int) -> list[Pair]:
    """Both directions of every link of a ring; two ranks have two, not four."""
    ahead = [(rank, (rank + 1) % num_ranks) for rank in range(num_ranks)]
    return list(dict.fromkeys(ahead + [(target, source) for source, target in ahead]))


def _open_pairs(wire: Wire, pairs: Sequence[Pair], doing: Doing) -> None:
    """Make every connection that pipelines need, one by one in an order that all agree on.

    Communicators are made on first use; made in different orders on different ranks, they deadlock.
    """
    for source, target in pairs:
        if wire.rank in (source, target):
            doing(f"opening the link {source} -> {target}")
            if wire.rank == source:
                wire.send(0, target).wait()
            else:
                wire.post_receive(0, source).wait()
            wire.finish()
        dist.barrier()


def _time_alone(
    wire: Wire, pair: Pair, sizes: Sequence[int], *, max_noise: float, budget_s: float
) -> LinkSamples:
    """One link's samples, on every rank; the ranks that don't take part wait."""
    source, target = pair
    round_trip_s: SecondsBySize = {}
    send_occupied_s: SecondsBySize = {}
    receive_occupied_s: SecondsBySize = {}
    if wire.rank == source:
        _lead(wire, target, [0, *sizes], round_trip_s, send_occupied_s, max_noise, budget_s)
    elif wire.rank == target:
        receive_occupied_s = wire.follow(source)
    ranks = gather_objects((round_trip_s, send_occupied_s, receive_occupied_s))
    return LinkSamples(
        round_trip_s=ranks[source][0],
        send_occupied_s=ranks[source][1],
        receive_occupied_s=ranks[target][2],
    )


def _lead(
    wire: Wire,
    target: int,
    sizes: list[int],
    round_trip_s: SecondsBySize,
    send_occupied_s: SecondsBySize,
    max_noise: float,
    budget_s: float,
) -> None:
    """The sender's side: it decides what is sent next and when to stop.

    Rounds over the sizes, so that a burst of other work spoils a bit of each rather than one.
    """
    started = time.monotonic()
    wire.round_trips(target, 0, _MIN_BATCH)  # the first ones are slow
    open_sizes = list(sizes)
    while open_sizes:
        for num_bytes in list(open_sizes):
            if num_bytes in round_trip_s and time.monotonic() - started > budget_s:
                break
            expected_s = _expected_s(round_trip_s, num_bytes)
            if expected_s > _LARGEST_SHARE * budget_s and len(round_trip_s) > _MIN_SIZES:
                open_sizes = [size for size in open_sizes if size < num_bytes]
                break
            affordable = int(_BATCH_SHARE * budget_s / max(expected_s, 1e-6))
            repeats = max(_MIN_BATCH, min(_MAX_BATCH, affordable))
            trips_s, sent_s = wire.round_trips(target, num_bytes, repeats)
            round_trip_s.setdefault(num_bytes, []).extend(trips_s)
            send_occupied_s.setdefault(num_bytes, []).extend(sent_s)
        if time.monotonic() - started > budget_s:
            break
        open_sizes = [size for size in open_sizes if not _is_enough(round_trip_s[size], max_noise)]
    for num_bytes, trips_s in round_trip_s.items():
        if 0 < num_bytes <= _MAX_OCCUPIED_BYTES:
            wire.occupy_receiver(
                target, num_bytes, _OCCUPIED_SAMPLES, arrived_after_s=3 * undelayed_s(trips_s)
            )
    wire.end_session(target)


def _expected_s(known_s: SecondsBySize, num_bytes: int) -> float:
    """What a round trip will take: as before, else continued from the next smaller size."""
    if num_bytes in known_s:
        return median(known_s[num_bytes])
    smaller = max((size for size in known_s if size < num_bytes), default=0)
    if not smaller:
        return 0.0
    empty_s, trip_s = median(known_s[0]), median(known_s[smaller])
    return trip_s + max(0.0, trip_s - empty_s) * (num_bytes / smaller - 1)


def _is_enough(samples_s: Sequence[float], max_noise: float) -> bool:
    if len(samples_s) >= _MAX_SAMPLES:
        return True
    measured = Measurement(samples_s=tuple(samples_s))
    return len(samples_s) >= 2 * MIN_SAMPLES and measured.noise_ratio <= max_noise


def _time_loaded(
    wire: Wire, alone: dict[Pair, LinkSamples], budget_s: float
) -> dict[Pair, SecondsBySize]:
    """Seconds from post to arrival while every rank sends, first ahead and then back."""
    sizes = sorted(set.intersection(*(set(each.round_trip_s) for each in alone.values())))
    steps = (1,) if wire.num_ranks == 2 else (1, -1)
    slowest_s = {
        size: max(median(each.round_trip_s[size]) for each in alone.values()) for size in sizes
    }
    found: dict[Pair, SecondsBySize] = {pair: {} for pair in alone}
    for step in steps:
        for size in sizes:
            affordable = budget_s / len(steps) / len(sizes) / (2 * slowest_s[size])
            repeats = max(_MIN_LOADED_REPEATS, min(_MAX_LOADED_REPEATS, int(affordable)))
            dist.barrier()
            samples_s = wire.exchange_around(size, step=step, repeats=repeats)
            for rank, own_s in enumerate(gather_objects(samples_s)):
                found[(rank - step) % wire.num_ranks, rank][size] = own_s
    return found


def _time_allreduce(wire: Wire, budget_s: float, *, num_nodes: int) -> tuple[AllreducePoint, ...]:
    """Seconds of an all-reduce over all ranks, the slowest rank's, by size."""
    points: list[AllreducePoint] = []
    for num_bytes in ALLREDUCE_SIZES:
        if points and points[-1].seconds * num_bytes / points[-1].num_bytes > budget_s:
            break
        first_s = max(gather_objects(wire.allreduces(num_bytes, 2)[-1]))
        if first_s > budget_s:
            break
        affordable = int(budget_s / len(ALLREDUCE_SIZES) / first_s)
        repeats = max(_MIN_LOADED_REPEATS, min(_MAX_LOADED_REPEATS, affordable))
        ranks = gather_objects(wire.allreduces(num_bytes, repeats))
        points.append(
            AllreducePoint(
                num_bytes=num_bytes,
                num_ranks=wire.num_ranks,
                num_nodes=num_nodes,
                seconds=median(max(each) for each in zip(*ranks, strict=True)),
            )
        )
    return tuple(points)


def link_of(pair: Pair, alone: LinkSamples, loaded: SecondsBySize, *, is_inter: bool) -> Link:
    """The link that the samples describe."""
    points = []
    for num_bytes in sorted(size for size in alone.round_trip_s if size > 0):
        one_way_s = alone.one_way_s(num_bytes)
        points.append(
            LinkPoint(
                num_bytes=num_bytes,
                one_way_s=undelayed_s(one_way_s),
                loaded_s=_loaded_s(alone, loaded, num_bytes),
                samples_s=to_nanoseconds(one_way_s),
            )
        )
    fit = fit_link([point.num_bytes for point in points], [point.one_way_s for point in points])
    return Link(
        scope="inter" if is_inter else "intra",
        source_rank=pair[0],
        target_rank=pair[1],
        latency_s=fit.latency_s,
        bytes_per_s=fit.bytes_per_s,
        send_occupied_s=_typical_s(alone.send_occupied_s),
        receive_occupied_s=_typical_s(alone.receive_occupied_s),
        points=tuple(points),
    )


def _loaded_s(alone: LinkSamples, loaded: SecondsBySize, num_bytes: int) -> float | None:
    """One way under load: an empty message's way, and what the size adds to an exchange."""
    if num_bytes not in loaded or 0 not in loaded:
        return None
    added_s = undelayed_s(loaded[num_bytes]) - undelayed_s(loaded[0])
    return undelayed_s(alone.one_way_s(0)) + max(0.0, added_s)


def _typical_s(samples_s: SecondsBySize) -> float:
    """The median over the sizes that stages send."""
    each_s = [
        undelayed_s(each) for size, each in samples_s.items() if 0 < size <= _MAX_OCCUPIED_BYTES
    ]
    return median(each_s) if each_s else 0.0


def link_warnings(link: Link, max_noise: float) -> list[str]:
    """What a reader must know about a link's numbers, in words."""
    name = f"link {link.source_rank} -> {link.target_rank}"
    warnings = []
    fit = fit_link(
        [point.num_bytes for point in link.points], [point.one_way_s for point in link.points]
    )
    if fit.worst_ratio > _MAX_FIT_ERROR:
        warnings.append(
            f"{name}: latency + bytes / bandwidth misses its times by up to "
            f"{format_ratio(fit.worst_ratio)}, at {format_bytes(fit.worst_num_bytes)}"
        )
    noisy = [
        format_bytes(point.num_bytes)
        for point in link.points
        if Measurement(samples_s=point.samples_s).noise_ratio > max_noise
    ]
    if noisy:
        warnings.append(f"{name} did not settle to {format_ratio(max_noise)} at {', '.join(noisy)}")
    slowed = [
        point.loaded_s / point.one_way_s for point in link.points if point.loaded_s is not None
    ]
    if slowed and slowed[-1] > _LOADED_RATIO:
        warnings.append(
            f"{name} takes {slowed[-1]:.1f} times as long for "
            f"{format_bytes(link.points[-1].num_bytes)} while all links are in use"
        )
    return warnings
