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

_TRIES = 3

BYTES_PER_MEGABIT = 1e6 / 8
FRAME_SHARE = 1448 / 1514
"""What of a full Ethernet frame is payload: 1500 less 52 bytes of headers, plus 14 for Ethernet."""


@needs_hosts
def test_each_direction_gets_its_own_bandwidth(tmp_path: Path) -> None:
    """A machine that is busy with something else can slow a wire down, but not speed it up: what
    counts is the fastest of a few profiles."""
    rates = {(0, 1): "800mbit", (1, 0): "200mbit"}
    fastest = dict.fromkeys(rates, 0.0)
    for _ in range(_TRIES):
        with two_hosts(tuple(rates.values())) as hosts:
            hosts.torchrun(
                "profile", "gpt-small-cpu", "--micro-batch-sizes", "1", "--budget", "20s",
                "--device", "cpu", "--max-noise", "10%", "-o", "profile.json", "--timeout", "120s",
                "--no-cache", folder=tmp_path, timeout_s=280,
            )  # fmt: skip
        profile = json.loads((tmp_path / "profile.json").read_text())
        links = {(link["from"], link["to"]): link for link in profile["links"]}
        assert {link["scope"] for link in links.values()} == {"inter"}
        for pair, rate in rates.items():
            shaped = int(rate.removesuffix("mbit")) * BYTES_PER_MEGABIT * FRAME_SHARE
            fastest[pair] = max(fastest[pair], links[pair]["bytes_per_s"] / shaped)
        if min(fastest.values()) > 0.85:
            break
    assert fastest == pytest.approx(dict.fromkeys(rates, 1.0), rel=0.15)


@needs_hosts
@pytest.mark.parametrize("rate", ["20mbit", None], ids=["slow link", "fast link"])
def test_the_link_decides_how_many_chunks_win(tmp_path: Path, rate: str | None) -> None:
    with two_hosts((rate, rate)) as hosts:
        hosts.torchrun(
            "profile", "gpt-small-cpu", "--micro-batch-sizes", "2", "--budget", "20s",
            "--device", "cpu", "--max-noise", "5%", "-o", "profile.json", "--timeout", "120s",
            folder=tmp_path, timeout_s=280,
        )  # fmt: skip
        subprocess.run(
            [
                sys.executable, "-m", "pptune", "search", "profile.json",
                "--global-batch-size", "8", "--chunks", "1,2", "--schedules", "1f1b,interleaved",
                "-o", "plans.json", "--quiet",
            ],
            cwd=tmp_path, check=True, capture_output=True,
        )  # fmt: skip
        hosts.torchrun(
            "validate", "plans.json", "--exhaustive", "--repeats", "5", "-o", "validation.json",
            folder=tmp_path, timeout_s=280,
        )  # fmt: skip
    runs = load_validation(tmp_path / "validation.json").runs
    pick = min(runs, key=lambda run: run.predicted_s)
    fastest = min(runs, key=lambda run: run.measured_s or math.inf)
    assert {run.plan.num_chunks for run in runs} == {1, 2}
    assert is_tied(pick, fastest)
    if rate is not None:
        assert (pick.plan.num_chunks, fastest.plan.num_chunks) == (1, 1)
