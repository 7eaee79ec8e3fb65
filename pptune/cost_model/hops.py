"""Messages between stages: which link each one takes, how large it is, what it costs.

A hop from stage s to s + 1 runs from the rank of s to the rank of s + 1; the gradient comes back
over the reverse link. Hops cost only between different ranks.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pptune.errors import MissingNumber
from pptune.profiles import Link, Profile, Source, weakest
from pptune.schedules.placement import Placement, rank_of_stages
from pptune.simulator import Hops

_MAX_NAMED_HOPS = 8

_SCOPES: tuple[tuple[Literal["intra", "inter"], str], ...] = (
    ("intra", "stay within a node"),
    ("inter", "cross nodes"),
)

ELEMENT_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8": 1}


class Links:
    """The links that a pipeline's messages take.

    A directed pair that was measured counts where the plan has as many ranks as the profile and the
    pair lies in the same scope; every other hop takes the median link of its scope.
    """

    def __init__(
        self, profile: Profile, given: Sequence[Link] = (), ranks_per_node: int | None = None
    ) -> None:
        given_scopes = {link.scope for link in given}
        self._links = (*given, *(link for link in profile.links if link.scope not in given_scopes))
        self._num_ranks = profile.num_ranks
        self._ranks_per_node = ranks_per_node or profile.machine.ranks_per_node
        self._pairs = {(link.source_rank, link.target_rank): link for link in self._links}
        self._medians: dict[str, Link] = {}
        self._routes: dict[tuple[int, int, str], tuple[_Route, _Route]] = {}
        self._hops: dict[tuple[int, int, str, int, float], tuple[Hops, Hops, Source]] = {}

    def scope(self, source_rank: int, target_rank: int) -> Literal["intra", "inter"]:
        """`inter` where the two ranks live on different nodes."""
        per_node = self._ranks_per_node
        if per_node is None or source_rank // per_node == target_rank // per_node:
            return "intra"
        return "inter"

    def between(self, source_rank: int, target_rank: int, *, num_ranks: int) -> Link:
        """The directed link. Raises MissingNumber where nothing of its scope is known."""
        scope = self.scope(source_rank, target_rank)
        if num_ranks == self._num_ranks:
            pair = self._pairs.get((source_rank, target_rank))
            if pair is not None and pair.scope == scope:
                return pair
        return self._median(scope, source_rank, target_rank)

    def hops(
        self,
        num_ranks: int,
        num_chunks: int,
        placement: Placement,
        *,
        num_bytes: int,
        wake_s: float,
    ) -> tuple[Hops, Hops, Source]:
        """(forward, backward) costs of every stage boundary for messages of `num_bytes`, and the
        weakest source among the links they take.

        `wake_s` is what a waiting receiver loses on top of the link's own latency.
        """
        shape = (num_ranks, num_chunks, placement)
        key = (*shape, num_bytes, wake_s)
        if key not in self._hops:
            if shape not in self._routes:
                self._routes[shape] = self._route(*shape)
            forward, backward = self._routes[shape]
            source = weakest([forward.source, backward.source])
            self._hops[key] = (
                forward.hops(num_bytes, wake_s),
                backward.hops(num_bytes, wake_s),
                source,
            )
        return self._hops[key]

    def assumptions(self, num_ranks: int) -> list[str]:
        """What is taken for the hops between neighbours of more ranks than were measured."""
        if num_ranks <= self._num_ranks:
            return []
        hops = [(rank, rank + 1) for rank in range(num_ranks - 1)]
        texts = []
        for scope, where in _SCOPES:
            own = [f"{a} -> {b}" for a, b in hops if self.scope(a, b) == scope]
            if own:
                more = len(own) - _MAX_NAMED_HOPS
                shown = ", ".join(own[:_MAX_NAMED_HOPS]) + (f" and {more} more" if more > 0 else "")
                source = self._median(scope, *hops[0]).source
                texts.append(f"hops {shown} {where}: each takes the median {source} {scope} link")
        return texts

    def _route(
        self, num_ranks: int, num_chunks: int, placement: Placement
    ) -> tuple["_Route", "_Route"]:
        """(forward, backward) links of every stage boundary."""
        ranks = rank_of_stages(num_ranks, num_ranks * num_chunks, placement)
        pairs = list(pairwise(ranks.tolist()))
        forward = [self._hop(a, b, num_ranks) for a, b in pairs]
        backward = [self._hop(b, a, num_ranks) for a, b in pairs]
        return _Route(forward), _Route(backward)

    def _hop(self, source_rank: int, target_rank: int, num_ranks: int) -> Link | None:
        if source_rank == target_rank:
            return None
        return self.between(source_rank, target_rank, num_ranks=num_ranks)

    def _median(self, scope: Literal["intra", "inter"], source_rank: int, target_rank: int) -> Link:
        if scope not in self._medians:
            of_scope = [link for link in self._links if link.scope == scope]
            if not of_scope:
                same_node = (
                    "" if scope == "intra" else ", or a larger --ranks-per-node if they share one"
                )
                raise MissingNumber(
                    f"rank {source_rank} -> {target_rank} needs an {scope} link, and the profile "
                    f"has none; measure it with 2 or more ranks, or give "
                    f"--link {scope}:LATENCY,BANDWIDTH{same_node}",
                    rule="link-not-measured",
                )
            self._medians[scope] = Link(
                scope=scope,
                source_rank=None,
                target_rank=None,
                latency_s=median(link.latency_s for link in of_scope),
                bytes_per_s=median(link.bytes_per_s for link in of_scope),
                send_occupied_s=median(link.send_occupied_s for link in of_scope),
                receive_occupied_s=median(link.receive_occupied_s for link in of_scope),
                source=weakest(link.source for link in of_scope),
            )
        return self._medians[scope]


def message_bytes(profile: Profile, boundary_bytes: int | None, microbatch_size: int) -> int:
    """Bytes of one message: as measured, or b s h elements over tensor and context ranks.

    With sequence parallelism each tensor-parallel rank sends its own part of the sequence
    (arXiv 2205.05198, sec. 4.2.2). Raises MissingNumber where neither is known.
    """
    if boundary_bytes is not None:
        return boundary_bytes
    hidden = profile.model.hidden_size
    element = ELEMENT_BYTES.get(profile.dtype)
    if hidden is None or element is None:
        raise MissingNumber(
            "the profile has neither boundary_bytes of its blocks nor a hidden size and a known "
            f"dtype (it has {profile.dtype!r}), so that the size of a message is unknown; give one",
            rule="message-size-unknown",
        )
    shards = profile.parallel.tensor * profile.parallel.context
    return microbatch_size * profile.seq_len * hidden * element // shards


class _Route:
    """The links of every stage boundary in one direction; None stays within a rank."""

    def __init__(self, links: Sequence[Link | None]) -> None:
        def column(seconds: Callable[[Link], float]) -> NDArray[np.float64]:
            return np.array([0.0 if link is None else seconds(link) for link in links])

        self.source = weakest(link.source for link in links if link is not None)
        self._crosses = column(lambda _: 1.0)
        self._latency_s = column(lambda link: link.latency_s)
        self._byte_s = column(lambda link: 1 / link.bytes_per_s)
        self._send_occupied_s = column(lambda link: link.send_occupied_s)
        self._receive_occupied_s = column(lambda link: link.receive_occupied_s)

    def hops(self, num_bytes: int, wake_s: float) -> Hops:
        return Hops(
            latency_s=self._latency_s + wake_s * self._crosses,
            wire_s=self._byte_s * num_bytes,
            send_occupied_s=self._send_occupied_s,
            receive_occupied_s=self._receive_occupied_s,
        )
