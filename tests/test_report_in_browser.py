"""The report in a real browser: it draws everything, says nothing on the console, asks for nothing.

Skipped where no Chromium is installed. The first tests check the check: a page that does complain
and does ask must be caught.
"""

import json
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.sample_documents import sample_report

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed"),
    pytest.mark.slow,
]

FIGURES = {
    "step-time": 1, "parts": 15, "accuracy": 4, "timeline": 128, "memory": 10, "layer-times": 5,
    "links": 10, "pareto": 2,
}  # fmt: skip
"""Marks that each figure must draw: bars, points, or one image for a heat map."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """What a page did in the browser."""

    dom: str
    console: list[str]
    requests: list[str]


def visit(page: Path, profile: Path, *, width: int = 1280) -> Visit:
    """Load a local page offline; requests are those that pages made, not the browser's own."""
    assert BROWSER is not None
    log = profile / "net.json"
    done = subprocess.run(
        [
            BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic",
            "--no-first-run", "--disable-background-networking", "--disable-component-update",
            "--disable-sync", "--disable-extensions", "--host-resolver-rules=MAP * ~NOTFOUND",
            "--allow-file-access-from-files", f"--user-data-dir={profile / 'user'}",
            "--enable-logging=stderr", f"--log-net-log={log}", "--virtual-time-budget=10000",
            f"--window-size={width},2000", "--dump-dom", page.as_uri(),
        ],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    events = json.loads(log.read_text())
    started = events["constants"]["logEventTypes"]["URL_REQUEST_START_JOB"]
    requests = [
        event["params"]["url"]
        for event in events["events"]
        if event["type"] == started
        and event.get("params", {}).get("initiator", "not an origin") != "not an origin"
        and not event["params"]["url"].startswith("file:")
    ]
    console = [line for line in done.stderr.splitlines() if ":CONSOLE" in line]
    return Visit(dom=done.stdout, console=console, requests=requests)


@pytest.fixture(scope="module")
def report_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    page = tmp_path_factory.mktemp("report") / "report.html"
    page.write_text(sample_report(), encoding="utf-8")
    return page


def test_a_page_that_complains_and_asks_is_caught(tmp_path: Path) -> None:
    page = tmp_path / "bad.html"
    page.write_text(
        '<!doctype html><img src="http://127.0.0.1:9/x.png"><script>console.error("no")</script>'
    )
    seen = visit(page, tmp_path)
    assert len(seen.console) == 1
    assert seen.requests == ["http://127.0.0.1:9/x.png"]


def test_report_draws_every_figure_and_asks_for_nothing(report_page: Path, tmp_path: Path) -> None:
    seen = visit(report_page, tmp_path)
    assert seen.console == []
    assert seen.requests == []
    drawn = marks_by_figure(seen.dom)
    names = [re.sub(r"^figure-\d+-", "", figure) for figure in drawn]
    assert sorted(set(names)) == sorted(FIGURES)
    assert names.count("timeline") == 2
    for name, marks in zip(names, drawn.values(), strict=True):
        assert marks == FIGURES[name], name


@pytest.mark.dist
def test_the_report_of_a_real_tune_draws_every_figure(tmp_path: Path) -> None:
    folder = tmp_path / "results"
    subprocess.run(
        [
            sys.executable, "-m", "pptune", "tune", "gpt-small-cpu", "--device", "cpu",
            "--ranks", "2", "--global-batch-size", "8", "--micro-batch-sizes", "1,2",
            "--chunks", "1,2", "--budget", "20s", "--repeats", "2", "--quiet", "-o", str(folder),
        ],
        check=True, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    seen = visit(folder / "report.html", tmp_path)
    assert seen.console == []
    assert seen.requests == []
    drawn = marks_by_figure(seen.dom)
    names = {re.sub(r"^figure-\d+-", "", figure) for figure in drawn}
    # One objective, so that there is no front of two.
    assert names == set(FIGURES) - {"pareto"}
    assert min(drawn.values()) > 0, drawn


def test_report_fits_a_phone(report_page: Path, tmp_path: Path) -> None:
    page = tmp_path / "phone.html"
    # Headless windows are never as narrow as a phone, frames are.
    page.write_text(
        f'<!doctype html><iframe src="{report_page.as_uri()}" width="390" height="800"></iframe>'
        "<p id=width></p><script>onload = () => setTimeout(() => { const inner = "
        "document.querySelector('iframe').contentDocument.documentElement; "
        "document.querySelector('#width').textContent = "
        "`${inner.clientWidth} ${inner.scrollWidth}` }, 3000)</script>"
    )
    seen = visit(page, tmp_path)
    found = re.search(r'<p id="width">(\d+) (\d+)</p>', seen.dom)
    assert found is not None
    client, content = map(int, found.groups())
    assert client <= 390
    assert content <= client


def marks_by_figure(dom: str) -> dict[str, int]:
    """How many marks each figure drew, by the id of its element."""
    parts = re.split(r'<div id="(figure-[\w-]+)"', dom)
    return {
        name: len(re.findall(r'<(?:g|path) class="point[" ]', drawn))
        + len(re.findall(r'<g class="hm".*?<image', drawn, flags=re.DOTALL))
        for name, drawn in zip(parts[1::2], parts[2::2], strict=True)
    }
