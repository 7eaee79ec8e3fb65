"""Peaks against vendors' and published figures; captures against made-up systems."""

import os
import time

import pytest

from pptune import hardware


def test_an_h200_at_420_tflops_is_at_42_percent() -> None:
    """NVIDIA/Megatron-LM issue 1565: 1979 TFLOP/s is the figure with sparsity; dense is half."""
    peak = hardware.dense_peak("NVIDIA H200", "bfloat16")
    assert peak is not None
    assert 420e12 / peak.flops_per_s == pytest.approx(0.4245, abs=5e-4)


# Best products measured with mamf-finder (stas00/ml-engineering, compute/accelerator): a dense peak
# lies above them, and not by a factor of two.
MEASURED_TFLOPS = {
    "NVIDIA A100-SXM4-80GB": 271.2,
    "NVIDIA A100 80GB PCIe": 252.9,
    "NVIDIA H100 80GB HBM3": 794.5,
    "NVIDIA GH200 480GB": 828.6,
    "NVIDIA B200": 1745.0,
}


@pytest.mark.parametrize(("name", "tflops"), MEASURED_TFLOPS.items())
def test_peaks_lie_above_what_was_measured(name: str, tflops: float) -> None:
    peak = hardware.dense_peak(name, "bfloat16")
    assert peak is not None
    assert peak.source
    assert tflops * 1e12 < peak.flops_per_s < 1.4 * tflops * 1e12


def test_form_factors_differ() -> None:
    def of(name: str) -> float:
        peak = hardware.dense_peak(name, "float16")
        assert peak is not None
        return peak.flops_per_s

    assert of("NVIDIA H100 PCIe") < of("NVIDIA H100 NVL") < of("NVIDIA H100 80GB HBM3")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("AMD EPYC 7763 64-Core Processor", "float32"),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bfloat16"),  # a seventh of an A100
        ("NVIDIA H2000", "bfloat16"),
        ("NVIDIA H100", "bfloat16"),  # which form factor?
        ("Tesla V100-SXM2-32GB", "bfloat16"),  # has no bfloat16
        ("", "bfloat16"),
    ],
)
def test_an_unknown_device_has_no_peak(name: str, dtype: str) -> None:
    assert hardware.dense_peak(name, dtype) is None


def test_only_variables_that_change_timings_are_kept() -> None:
    environment = {
        "NCCL_P2P_DISABLE": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1", "OMP_NUM_THREADS": "4",
        "HOME": "/home/someone", "AWS_SECRET_ACCESS_KEY": "x", "GLOO_SOCKET_IFNAME": "eth0",
    }  # fmt: skip
    assert hardware.timing_environment(environment) == {
        "CUDA_DEVICE_MAX_CONNECTIONS": "1", "GLOO_SOCKET_IFNAME": "eth0", "NCCL_P2P_DISABLE": "1",
        "OMP_NUM_THREADS": "4",
    }  # fmt: skip


def test_memory_and_cores_are_plausible() -> None:
    total, available = hardware.memory_bytes(), hardware.available_memory_bytes()
    if total is None or available is None:
        pytest.skip("the system doesn't say")
    assert 2**26 < available <= total
    assert 1 <= hardware.num_cores() <= (os.cpu_count() or 1)
    assert hardware.cpu_name()


def test_processor_time_counts_work_and_not_sleep() -> None:
    own, everyone = hardware.own_core_s(), hardware.busy_core_s()
    if everyone is None:
        pytest.skip("the system doesn't say")
    deadline = time.process_time() + 0.25
    while time.process_time() < deadline:
        pass
    worked = hardware.own_core_s() - own
    assert worked >= 0.2
    assert (hardware.busy_core_s() or 0.0) - everyone >= worked - 0.1


def test_a_control_groups_limit_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "/sys/fs/cgroup/memory.max": ["1000000"], "/sys/fs/cgroup/memory.current": ["400000"],
        "/sys/fs/cgroup/cpu.max": ["100000", "100000"],
    }  # fmt: skip
    monkeypatch.setattr(hardware, "_read_words", lambda path: files.get(path, []))
    assert hardware.memory_bytes() == 1_000_000
    assert hardware.available_memory_bytes() == 600_000
    assert hardware.num_cores() == 1
