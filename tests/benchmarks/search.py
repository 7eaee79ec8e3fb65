"""How fast a large space is enumerated, and how long a small search takes from the command line.

`python -m tests.benchmarks.search` prints one JSON object: {num_plans, seconds, peak_memory_bytes,
cli_seconds, machine}. The large space is 126 layers on 16 ranks with five schedules, every
micro-batch group size, with and without recompute, under a memory limit that many plans break.
"""

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from pptune.cost_model import Setting
from pptune.executors import Executor
from pptune.plans_file import PlansFile, ProfileReference
from pptune.profiles import MemoryModel, Overhead, Profile, StepConstants, save_profile
from pptune.search import Request, search
from pptune.targets import parse_target
from tests.benchmarks.machine import machine
from tests.synthetic import synthetic_profile, uniform_link

GLOBAL_BATCH_SIZE = 960
SIZES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 16)
NUM_CLI_RUNS = 5


def profile_of(num_layers: int, num_ranks: int, memory_bytes: int) -> Profile:
    """A transformer-like profile: saturating kernels, a head worth two blocks, a fast link."""
    overhead = Overhead(forward_s=50e-6, backward_s=80e-6, hop_s=5e-6)
    return synthetic_profile(
        num_layers=num_layers,
        block=lambda b: (0.2e-3 + 1e-3 * b, 0.15e-3 + 1e-3 * b, 0.15e-3 + 1e-3 * b),
        embedding=(50e-6, 0.0, 50e-6),
        head=(2e-3, 2e-3, 2e-3),
        sizes=SIZES,
        num_ranks=num_ranks,
        links=[uniform_link(10e-6, 50e9)],
        boundary_bytes=2 * 2**20,
        overheads={str(name): overhead for name in Executor},
        step_constants=StepConstants(fixed_s=0.05),
        activation_bytes=8 * 2**20,
        end_activation_bytes=8 * 2**20,
        parameter_bytes=400 * 2**20,
        end_parameter_bytes=500 * 2**20,
        memory=MemoryModel(),
        memory_bytes=memory_bytes,
    )


def enumerate_large_space() -> tuple[PlansFile, float]:
    """The answer and the seconds it took."""
    profile = profile_of(num_layers=126, num_ranks=16, memory_bytes=80 * 2**30)
    request = Request(
        global_batch_size=GLOBAL_BATCH_SIZE,
        schedules=("1f1b", "zb-h1", "zb-h2", "interleaved", "interleaved-zb"),
        microbatch_group_sizes=tuple(range(1, GLOBAL_BATCH_SIZE + 1)),
        recompute=("none", "full"),
    )
    started = time.perf_counter()
    answer = search(
        profile,
        Setting(target=parse_target("torch")),
        request,
        reference=ProfileReference(path="synthetic", digest=""),
    )
    return answer, time.perf_counter() - started


def cli_seconds() -> float:
    """The fastest of a few `pptune search` runs on a small space, start-up included."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.json"
        save_profile(profile_of(num_layers=8, num_ranks=2, memory_bytes=80 * 2**30), path)
        command = [sys.executable, "-m", "pptune", "search", str(path), "--global-batch-size", "16",
                   "--output", str(Path(folder) / "plans.json")]  # fmt: skip
        runs = []
        for _ in range(NUM_CLI_RUNS):
            started = time.perf_counter()
            subprocess.run(command, check=True, capture_output=True)
            runs.append(time.perf_counter() - started)
            print(f"pptune search: {runs[-1]:.2f} s", file=sys.stderr)
    return min(runs)


def main() -> None:
    answer, seconds = enumerate_large_space()
    assert answer.proven_optimal
    print(f"{answer.space.num_legal} plans in {seconds:.2f} s", file=sys.stderr)
    result = {
        "num_plans": answer.space.num_legal,
        "seconds": seconds,
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "cli_seconds": cli_seconds(),
        "machine": machine(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
