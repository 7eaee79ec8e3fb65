"""pptune profile --probe-p2p: what it says, and that its ranks have the other setting."""

import os

import msgspec
import pytest

from pptune.errors import UsageError
from pptune.profiles import Link
from pptune.runtime import p2p_probe
from pptune.runtime.launch import RankGroup
from pptune.runtime.p2p_probe import check_probe, links_with_other_setting, with_probe
from pptune.runtime.world import detect_world
from tests.synthetic import synthetic_profile


def link(bytes_per_s: float) -> Link:
    return Link(
        scope="intra", source_rank=0, target_rank=1, latency_s=1e-5, bytes_per_s=bytes_per_s
    )


def test_a_faster_detour_is_a_warning() -> None:
    """The figures of https://github.com/NVIDIA/nccl/issues/814."""
    profile = msgspec.structs.replace(synthetic_profile(), links=(link(10e9),))
    probed, text = with_probe(profile, [link(22e9)])
    assert probed.warnings == (text,)
    assert "2.2 times as fast with NCCL_P2P_DISABLE=1: 22.0 GB/s instead of 10.0 GB/s" in text


def test_a_slower_one_is_said_and_an_earlier_remark_goes() -> None:
    profile = msgspec.structs.replace(synthetic_profile(), links=(link(22e9),))
    once, _ = with_probe(profile, [link(50e9)])
    again, text = with_probe(once, [link(10e9)])
    assert (len(once.warnings), again.warnings) == (1, ())
    assert "no faster with NCCL_P2P_DISABLE=1: 10.0 GB/s instead of 22.0 GB/s" in text


def test_where_it_is_off_the_probe_turns_it_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    profile = msgspec.structs.replace(synthetic_profile(), links=(link(10e9),))
    _, text = with_probe(profile, [link(30e9)])
    assert "3.0 times as fast with NCCL_P2P_DISABLE=0" in text


def test_without_two_gpus_there_is_nothing_to_compare() -> None:
    with pytest.raises(UsageError, match="here are 2 cpu ranks"):
        check_probe(detect_world(2, "cpu"))


@pytest.mark.dist
def test_the_ranks_have_the_other_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_P2P_DISABLE", raising=False)
    monkeypatch.setattr(p2p_probe, "_BUDGET_S", 0.2)
    seen: list[str] = []
    run = RankGroup.run

    def spying(group: RankGroup, *arguments: object, **named: object) -> object:
        machine = run(group, "describe_machine", {"dtype": "float32"})[0]
        seen.append(machine["environment"]["NCCL_P2P_DISABLE"])
        return run(group, *arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(RankGroup, "run", spying)
    links = links_with_other_setting(detect_world(2, "cpu"), max_noise=0.5, timeout_s=60)
    assert [(each.source_rank, each.target_rank) for each in links] == [(0, 1), (1, 0)]
    assert seen == ["1"]
    assert "NCCL_P2P_DISABLE" not in os.environ
