"""What is known about a machine without touching its devices: peaks, variables, cores, memory."""

import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """A device's dense matrix-product peak at one dtype."""

    flops_per_s: float
    source: str


_TERA = 1e12

# Dense peaks with 32-bit accumulation: (device name, dtype -> TFLOP/s, source). A vendor's figure
# "with sparsity" is halved. A name must match whole: "A100 MIG 1g.5gb" is not an A100.
_PEAKS: tuple[tuple[str, dict[str, float], str], ...] = (
    (
        r"(TESLA )?V100-SXM[23]-(16|32)GB(-LS)?",
        {"float16": 125.0, "float32": 15.7},
        "NVIDIA V100 datasheet, SXM2",
    ),
    (
        r"(TESLA )?V100-PCIE-(16|32)GB",
        {"float16": 112.0, "float32": 14.0},
        "NVIDIA V100 datasheet, PCIe",
    ),
    (
        r"A[18]00(-SXM4-(40|80)GB|-SXM-64GB|-PCIE-40GB|( |-PCIE-)80GB( PCIE)?)",
        {"bfloat16": 312.0, "float16": 312.0, "float32": 19.5},
        "NVIDIA A100 datasheet",
    ),
    (r"A10", {"bfloat16": 125.0, "float16": 125.0, "float32": 31.2}, "NVIDIA A10 datasheet"),
    (r"A40", {"bfloat16": 149.7, "float16": 149.7, "float32": 37.4}, "NVIDIA A40 datasheet"),
    (r"L4", {"bfloat16": 121.0, "float16": 121.0, "float32": 30.3}, "NVIDIA L4 datasheet"),
    (r"L40S", {"bfloat16": 362.05, "float16": 362.05, "float32": 91.6}, "NVIDIA L40S datasheet"),
    (
        r"H[18]00 (80GB HBM3|SXM5?)",
        {"bfloat16": 989.5, "float16": 989.5, "float32": 67.0},
        "NVIDIA H100 datasheet, SXM",
    ),
    (
        r"H[18]00 PCIE",
        {"bfloat16": 756.5, "float16": 756.5, "float32": 51.0},
        "NVIDIA H100 datasheet, PCIe",
    ),
    (
        r"H[12]00 NVL",
        {"bfloat16": 835.5, "float16": 835.5, "float32": 60.0},
        "NVIDIA H100 NVL and H200 NVL datasheets",
    ),
    (
        r"H200",
        {"bfloat16": 989.5, "float16": 989.5, "float32": 67.0},
        "NVIDIA H200 datasheet, SXM",
    ),
    (
        r"GH200( (480GB|96GB HBM3|144GB HBM3E))?",
        {"bfloat16": 989.5, "float16": 989.5, "float32": 67.0},
        "NVIDIA GH200 datasheet",
    ),
    (r"H20", {"bfloat16": 148.0, "float16": 148.0}, "NVIDIA H20 specification"),
    (r"B[23]00( SXM6?.*)?", {"bfloat16": 2250.0, "float16": 2250.0}, "NVIDIA HGX B200/B300"),
    (r"GB[23]00", {"bfloat16": 2500.0, "float16": 2500.0}, "NVIDIA GB200/GB300 NVL72 datasheets"),
    (
        r"GEFORCE RTX 3090",
        {"bfloat16": 71.2, "float16": 71.2, "float32": 35.6},
        "NVIDIA Ampere GA102 whitepaper",
    ),
    (
        r"GEFORCE RTX 4090",
        {"bfloat16": 165.2, "float16": 165.2, "float32": 82.6},
        "NVIDIA Ada whitepaper",
    ),
    (
        r"AMD INSTINCT MI300X.*",
        {"bfloat16": 1307.4, "float16": 1307.4, "float32": 163.4},
        "AMD Instinct MI300X datasheet",
    ),
)


def dense_peak(device_name: str, dtype: str) -> Peak | None:
    """The dense peak of the device, or None where it isn't known; never another device's."""
    name = device_name.upper().removeprefix("NVIDIA ").strip()
    for pattern, peaks, source in _PEAKS:
        if re.fullmatch(pattern, name) and dtype in peaks:
            return Peak(flops_per_s=peaks[dtype] * _TERA, source=source)
    return None


_TIMING_PREFIXES = ("NCCL_", "TORCH_NCCL_", "GLOO_", "OMP_", "MKL_", "KMP_", "GOMP_", "UCX_", "FI_")
_TIMING_NAMES = (
    "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING", "CUDA_MODULE_LOADING",
    "CUDA_VISIBLE_DEVICES", "LD_PRELOAD", "NVIDIA_TF32_OVERRIDE", "OPENBLAS_NUM_THREADS",
    "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TORCH_DISTRIBUTED_DEBUG",
)  # fmt: skip


def timing_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables that change timings, by name; what isn't set is absent."""
    return {
        name: environment[name]
        for name in sorted(environment)
        if name.startswith(_TIMING_PREFIXES) or name in _TIMING_NAMES
    }


def cpu_name() -> str:
    """The processor's name, or the architecture's where the system doesn't say."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def num_cores() -> int:
    """Cores that this process may use: its affinity, and its control group's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    quota = _read_words("/sys/fs/cgroup/cpu.max")
    if len(quota) == 2 and quota[0].isdigit():
        cores = min(cores or 1, max(1, int(quota[0]) // int(quota[1])))
    return cores or 1


def memory_bytes() -> int | None:
    """Memory of this machine, or of this process's control group where that is less."""
    return _smaller(_meminfo("MemTotal"), _group_limit())


def available_memory_bytes() -> int | None:
    """Memory that can still be taken without swapping, or None where the system doesn't say."""
    limit, used = _group_limit(), _read_words("/sys/fs/cgroup/memory.current")
    left = limit - int(used[0]) if limit is not None and used else None
    return _smaller(_meminfo("MemAvailable"), left)


def busy_core_s() -> float | None:
    """Seconds that all cores together have worked since the machine started, or None."""
    words = _read_words("/proc/stat")
    if words[:1] != ["cpu"]:
        return None
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, words[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def own_core_s() -> float:
    """Seconds of processor time that this process has used, all its threads together."""
    times = os.times()
    return times.user + times.system


def _meminfo(key: str) -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith(f"{key}:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def _group_limit() -> int | None:
    words = _read_words("/sys/fs/cgroup/memory.max")
    return int(words[0]) if words and words[0].isdigit() else None


def _read_words(path: str) -> list[str]:
    try:
        return Path(path).read_text().split()
    except OSError:
        return []


def _smaller(first: int | None, second: int | None) -> int | None:
    values = [value for value in (first, second) if value is not None]
    return min(values, default=None)
