"""Where the choice turns: the numbers of micro-batches and the bandwidths at which each V wins."""

import math
from collections.abc import Sequence

from msgspec.structs import replace as replaced

from pptune.cost_model.hops import Links
from pptune.explain.alternatives import Question, by_step_time, fastest
from pptune.explain.uncertainty import World, with_bandwidth
from pptune.explanation import Alternative, Bandwidth, ChunkRange
from pptune.plan import Plan, default_group_size

RULE_OF_THUMB = 1.2
"""Below about M = 1.2 V P steady state is said to be too short for V chunks to pay."""

ROUNDS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Multiples of P tried as M: every trainer's interleaving accepts them."""

MAX_ACTIONS = 500_000
"""Larger steps are not tried when M varies."""

BANDWIDTH_POWERS = range(-16, 13, 2)
"""Bandwidths tried: the measured ones times these powers of two."""

_STEP = BANDWIDTH_POWERS.step

_BISECTIONS = 12
"""Halvings of the interval between two tried bandwidths: a break-even within 0.03 %."""

_MAX_PLANS = 6
"""Plans tried on each side: the fastest of V = 1, and the first of the smallest larger V."""


def chunk_ranges(question: Question, pick: Plan, chunks: Sequence[int]) -> tuple[ChunkRange, ...]:
    """For each V the M at which it is the fastest, with the pick's b, P and D held fixed."""
    times = _times_over_microbatches(question, pick, chunks)
    tried = sorted(times)
    winners = {m: min(times[m], key=lambda v: (times[m][v], v)) for m in tried}
    found = []
    for v in chunks:
        limit = math.ceil(RULE_OF_THUMB * v * pick.num_ranks)
        both = [m for m in tried if v in times[m] and 1 in times[m]]
        beats_one = [m for m in both if times[m][v] < times[m][1]]
        decided = any(m < limit for m in both) and any(m >= limit for m in both)
        found.append(
            ChunkRange(
                num_chunks=v,
                ranges=_runs([m for m in tried if winners[m] == v], tried),
                rule_of_thumb=limit,
                rule_holds=beats_one == [m for m in both if m >= limit]
                if v > 1 and decided
                else None,
                beats_one=_runs(beats_one, tried),
            )
        )
    return tuple(found)


def break_even_bandwidth(world: World, alternatives: Sequence[Alternative]) -> Bandwidth | None:
    """Where V = 1 and the best larger V tie when all bandwidths are scaled alike.

    Of several crossings the one nearest to the measured bandwidth counts. None without links or
    without plans on both sides.
    """
    plans = [row.plan for row in by_step_time(alternatives) if row.plan is not None]
    one = [plan for plan in plans if plan.num_chunks == 1][:_MAX_PLANS]
    first_of = {plan.num_chunks: plan for plan in reversed(plans) if plan.num_chunks > 1}
    more = [first_of[chunks] for chunks in sorted(first_of)[:_MAX_PLANS]]
    links = (*world.setting.links, *world.profile.links)
    if not one or not more or not links or one[0].num_ranks == 1:
        return None

    def gain_s(power: float) -> float:
        """By how much more chunks are faster than one at 2^power times the bandwidth."""
        times = with_bandwidth(world, 2.0**power).step_times_s([*one, *more])
        return min(times[: len(one)]) - min(times[len(one) :])

    gains = {power: gain_s(power) for power in BANDWIDTH_POWERS}
    slowest = _slowest_bytes_per_s(world, one[0])
    crossings = [
        power for power in BANDWIDTH_POWERS[:-1] if (gains[power] > 0) != (gains[power + _STEP] > 0)
    ]
    if not crossings:
        everywhere = "more chunks" if gains[0] > 0 else "one chunk"
        return Bandwidth(slowest_bytes_per_s=slowest, break_even_bytes_per_s=None, below=everywhere)
    low = float(min(crossings, key=lambda power: abs(power + _STEP / 2)))
    high = low + _STEP
    below = gains[int(low)] > 0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if (gain_s(middle) > 0) == below:
            low = middle
        else:
            high = middle
    return Bandwidth(
        slowest_bytes_per_s=slowest,
        break_even_bytes_per_s=slowest * 2.0**high,
        below="more chunks" if below else "one chunk",
    )


def _times_over_microbatches(
    question: Question, pick: Plan, chunks: Sequence[int]
) -> dict[int, dict[int, float]]:
    """Step time by M, then by V; what is illegal or does not fit is left out."""
    tried = {rounds * pick.num_ranks for rounds in ROUNDS} | {pick.num_microbatches}
    shapes = _shapes(question, pick, chunks)
    times: dict[int, dict[int, float]] = {}
    for m in sorted(tried):
        if 2 * pick.num_ranks * max(chunks) * m > MAX_ACTIONS:
            break
        for v in chunks:
            plans = (at_microbatches(plan, m) for plan in shapes if plan.num_chunks == v)
            best = fastest(question.model, filter(question.is_legal, plans))
            if best is not None:
                times.setdefault(m, {})[v] = best[1].step_time_s
    return times


def _shapes(question: Question, pick: Plan, chunks: Sequence[int]) -> list[Plan]:
    """The plans at the pick's b, listed at an M that every schedule takes, and the pick."""
    size, m = pick.microbatch_size, max(ROUNDS) * pick.num_ranks
    listing = question.listing(
        size * m * pick.data_parallel, num_chunks=chunks, microbatch_sizes=(size,)
    )
    return [*listing.plans, pick]


def at_microbatches(plan: Plan, num_microbatches: int) -> Plan:
    """The same plan with another M and the micro-batch group size that goes with it."""
    group = default_group_size(plan.schedule, plan.num_ranks, num_microbatches)
    return replaced(plan, num_microbatches=num_microbatches, microbatch_group_size=group)


def _runs(wins: Sequence[int], tried: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """First and last of each unbroken run of wins among the tried values."""
    runs: list[tuple[int, int]] = []
    for m in wins:
        before = tried[tried.index(m) - 1] if tried.index(m) else None
        if runs and runs[-1][1] == before:
            runs[-1] = (runs[-1][0], m)
        else:
            runs.append((m, m))
    return tuple(runs)


def _slowest_bytes_per_s(world: World, plan: Plan) -> float:
    """The slowest link that the plan's messages take."""
    links = Links(world.profile, world.setting.links, world.setting.ranks_per_node)
    neighbours = [(rank, rank + 1) for rank in range(plan.num_ranks - 1)]
    return min(
        links.between(source, target, num_ranks=plan.num_ranks).bytes_per_s
        for pair in neighbours
        for source, target in (pair, pair[::-1])
    )
