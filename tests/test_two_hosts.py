"""Links between hosts, measured for real over a shaped wire."""

import json
from pathlib import Path

import pytest

from tests.two_hosts import available, two_hosts

pytestmark = [pytest.mark.dist, pytest.mark.slow]

REASON = available()
needs_hosts = pytest.mark.skipif(REASON is not None, reason=REASON or "")

BYTES_PER_GIGABIT = 1e9 / 8
FRAME_SHARE = 1448 / 1514
"""What of a full Ethernet frame is payload: 1500 less 52 bytes of headers, plus 14 for Ethernet."""


@needs_hosts
def test_each_direction_gets_its_own_bandwidth(tmp_path: Path) -> None:
    with two_hosts(("800mbit", "200mbit")) as hosts:
        hosts.torchrun(
            "profile", "gpt-small-cpu", "--micro-batch-sizes", "1", "--budget", "30s",
            "--device", "cpu", "--max-noise", "10%", "-o", "profile.json", "--timeout", "120s",
            folder=tmp_path, timeout_s=280,
        )  # fmt: skip
    profile = json.loads((tmp_path / "profile.json").read_text())
    links = {(link["from"], link["to"]): link for link in profile["links"]}
    assert {link["scope"] for link in links.values()} == {"inter"}
    for pair, gigabits in (((0, 1), 0.8), ((1, 0), 0.2)):
        shaped = gigabits * BYTES_PER_GIGABIT * FRAME_SHARE
        assert links[pair]["bytes_per_s"] == pytest.approx(shaped, rel=0.15)
