"""Links between hosts, measured for real over a shaped wire."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from pptune.validate.verdict import is_tied
from pptune.validation_file import load_validation
from tests.two_hosts import available, two_hosts

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(900)]

REASON = available()
needs_hosts = pytest.mark.skipif(REASON is not None, reason=REASON or "")

BYTES_PER_MEGABIT = 1e6 / 8
FRAME_SHARE = 1448 / 1514
"""What of a full Ethernet frame is payload: 1500 less 52 bytes of headers, plus 14 for Ethernet."""

SLOW = ("20mbit", "40mbit")
"""Of each direction."""


@needs_hosts
@pytest.mark.parametrize("rates", [SLOW, (None, None)], ids=["slow link", "fast link"])
def test_the_link_is_measured_and_decides_how_many_chunks_win(
    tmp_path: Path, rates: tuple[str | None, str | None]
) -> None:
    with two_hosts(rates) as hosts:
        hosts.torchrun(
            "profile", "gpt-small-cpu", "--micro-batch-sizes", "2", "--budget", "12s",
            "--device", "cpu", "--max-noise", "5%", "-o", "profile.json", "--timeout", "120s",
            "--no-cache", folder=tmp_path, timeout_s=280,
        )  # fmt: skip
        subprocess.run(
            [
                sys.executable, "-m", "pptune", "search", "profile.json",
                "--global-batch-size", "4", "--chunks", "1,2", "--schedules", "1f1b,interleaved",
                "-o", "plans.json", "--quiet",
            ],
            cwd=tmp_path, check=True, capture_output=True,
        )  # fmt: skip
        hosts.torchrun(
            "validate", "plans.json", "--exhaustive", "--repeats", "5", "-o", "validation.json",
            folder=tmp_path, timeout_s=280,
        )  # fmt: skip
    measured = bytes_per_s(tmp_path / "profile.json")
    for pair, rate in zip(((0, 1), (1, 0)), rates, strict=True):
        if rate is None:
            assert measured[pair] > 10 * payload_bytes_per_s(SLOW[1])
        else:
            assert measured[pair] == pytest.approx(payload_bytes_per_s(rate), rel=0.15)
    runs = load_validation(tmp_path / "validation.json").runs
    pick = min(runs, key=lambda run: run.predicted_s)
    fastest = min(runs, key=lambda run: run.measured_s or math.inf)
    assert {run.plan.num_chunks for run in runs} == {1, 2}
    assert is_tied(pick, fastest)
    if rates == SLOW:
        assert (pick.plan.num_chunks, fastest.plan.num_chunks) == (1, 1)


def bytes_per_s(path: Path) -> dict[tuple[int, int], float]:
    """The bandwidth of each directed link of a profile of two hosts."""
    links = json.loads(path.read_text())["links"]
    assert {link["scope"] for link in links} == {"inter"}
    return {(link["from"], link["to"]): link["bytes_per_s"] for link in links}


def payload_bytes_per_s(rate: str) -> float:
    """What a wire shaped to `rate` carries."""
    return int(rate.removesuffix("mbit")) * BYTES_PER_MEGABIT * FRAME_SHARE
