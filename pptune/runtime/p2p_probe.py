"""Messages between GPUs with and without NCCL's direct copies: `pptune profile --probe-p2p`.

NCCL copies from GPU to GPU directly (P2P) wherever the driver offers it, although a detour through
the host's memory is faster on some machines (https://github.com/NVIDIA/nccl/issues/814: 10 GB/s
instead of 22). It reads its variable once in a process: the other setting takes other ranks.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median

import msgspec

from pptune.errors import UsageError
from pptune.profiles import Link, Profile
from pptune.runtime.launch import RankGroup, follow
from pptune.runtime.world import World
from pptune.units import format_bytes_per_s

_VARIABLE = "NCCL_P2P_DISABLE"
_BUDGET_S = 10.0
_FASTER_RATIO = 1.1
"""Differences of less are not worth a setting."""


def check_probe(world: World) -> None:
    """Raise UsageError where there is nothing to compare."""
    if world.device != "cuda" or world.num_ranks == 1:
        raise UsageError(
            f"--probe-p2p compares NCCL's ways between GPUs; here are {world.num_ranks} "
            f"{world.device} ranks; it needs --device cuda and two GPUs or more"
        )


def links_with_other_setting(
    world: World, *, max_noise: float, timeout_s: float
) -> tuple[Link, ...]:
    """The links as ranks with the other setting measure them; () on agents other than the leader.

    Called by every agent after its first group has ended. Raises RankFailure.
    """
    with _other_setting():
        if not world.is_leader:
            follow(world, timeout_s=timeout_s)
            return ()
        with RankGroup(world, timeout_s=timeout_s, expects_pipelines=False) as group:
            answer = group.run(
                "measure_links", {"max_noise": max_noise, "budget_s": _BUDGET_S},
                timeout_s=_BUDGET_S + timeout_s,
            )[0]  # fmt: skip
        return msgspec.convert(answer["links"], tuple[Link, ...])


def with_probe(profile: Profile, other: Sequence[Link]) -> tuple[Profile, str]:
    """How the profile's links compare with the `other` setting's, in words; and the profile, with
    these as a warning where the other setting is faster."""
    own_rate, other_rate = (
        median(link.bytes_per_s for link in links) for links in (profile.links, other)
    )
    setting = f"{_VARIABLE}={_other_value()}"
    rates = f"{format_bytes_per_s(other_rate)} instead of {format_bytes_per_s(own_rate)}"
    # Of an earlier probe nothing stays.
    warnings = [warning for warning in profile.warnings if _VARIABLE not in warning]
    if other_rate < _FASTER_RATIO * own_rate:
        text = f"messages are no faster with {setting}: {rates}"
    else:
        text = (
            f"messages are {other_rate / own_rate:.1f} times as fast with {setting}: {rates}; set "
            "it where you train, and profile again"
        )
        warnings.append(text)
    return msgspec.structs.replace(profile, warnings=tuple(warnings)), text


def _other_value() -> str:
    return "1" if os.environ.get(_VARIABLE, "0") in ("", "0") else "0"


@contextmanager
def _other_setting() -> Iterator[None]:
    before = os.environ.get(_VARIABLE)
    os.environ[_VARIABLE] = _other_value()
    try:
        yield
    finally:
        if before is None:
            del os.environ[_VARIABLE]
        else:
            os.environ[_VARIABLE] = before
