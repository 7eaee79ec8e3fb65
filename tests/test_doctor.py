"""What `pptune doctor` finds: the real machine, and planted obstacles."""

import json

import msgspec
import pytest
import torch

from pptune import hardware
from pptune.runtime import doctor


def test_the_real_machine_is_described() -> None:
    found = json.loads(msgspec.json.encode(doctor.diagnose()))
    assert found["versions"]["torch"] == torch.__version__
    assert found["devices"][0]["name"] == hardware.cpu_name()
    assert len(found["devices"]) == 1 + torch.cuda.device_count()
    assert "gloo" in found["backends"]
    assert found["cores"] >= 1


def test_settings_that_spoil_timings_are_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    problems = " ".join(doctor.diagnose().problems)
    assert "CUDA_LAUNCH_BLOCKING=1" in problems
    assert "TORCH_DISTRIBUTED_DEBUG=DETAIL" in problems


def test_a_host_without_an_address_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(name: str) -> str:
        raise OSError(f"unknown host {name}")

    monkeypatch.setattr("socket.gethostbyname", unknown)
    assert any("has no address" in problem for problem in doctor.diagnose().problems)
