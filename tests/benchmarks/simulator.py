"""How fast steps are simulated: `python -m tests.benchmarks.simulator`.

Prints one JSON object: {cases [{num_ranks, num_chunks, num_microbatches, median_s, torch_median_s
or null}], plans_per_s, machine}. A case makes an interleaved order and plays it, both from nothing;
stages are equal and every hop takes 1 / 20 of a rank's forward. Beside it, where that ends soon,
torch makes, lowers and dry-runs the same order; the two take turns. `plans_per_s` is for estimates
of 10,000 mixed plans on 16 ranks with uneven layers, up to 7 chunks and 256 micro-batches.
"""

import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from itertools import pairwise, product
from statistics import median

from pptune.cost_model import CostModel, Setting
from pptune.estimate import Estimate
from pptune.executors import Executor
from pptune.plan import Plan, make_plan
from pptune.profiles import Overhead, Profile
from pptune.schedules import generate
from pptune.simulator import Costs, simulate
from pptune.targets import parse_target
from tests.benchmarks.machine import machine
from tests.synthetic import synthetic_profile, uniform_link

Size = tuple[int, int, int]
"""Ranks, chunks, micro-batches."""

BESIDE_TORCH: tuple[Size, ...] = ((8, 4, 64), (8, 8, 128), (16, 4, 256))
ALONE: tuple[Size, ...] = ((64, 8, 1024), (64, 8, 65536), (1024, 4, 8192))
TURNS, RUNS_PER_TURN = 7, 30
ALONE_RUNS = 7
NUM_PLANS, NUM_LAYERS, NUM_RANKS, PASSES = 10_000, 126, 16, 3
SIZES = (1, 2, 4, 8)


def seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def ours(size: Size) -> Callable[[], object]:
    num_ranks, num_chunks, num_microbatches = size
    costs = Costs.uniform(
        num_ranks=num_ranks, num_chunks=num_chunks, forward_s=1, backward_s=2, transfer_s=0.05
    )

    def run() -> float:
        order = generate(
            "interleaved",
            num_ranks=num_ranks,
            num_chunks=num_chunks,
            num_microbatches=num_microbatches,
        )
        return simulate(order, costs).step_time_s

    return run


def torchs(size: Size) -> Callable[[], object]:
    """torch's own way to the number of ticks that an interleaved order takes."""
    from torch.distributed.pipelining import schedules

    num_ranks, num_chunks, num_microbatches = size

    def run() -> object:
        schedule = object.__new__(schedules.ScheduleInterleaved1F1B)
        rounds = max(1, num_microbatches // num_ranks)
        vars(schedule).update(
            pp_group_size=num_ranks,
            n_local_stages=num_chunks,
            _n_microbatches=num_microbatches,
            microbatches_per_round=num_microbatches // rounds,
        )
        lists = {
            rank: [action for action in schedule._calculate_single_rank_operations(rank) if action]
            for rank in range(num_ranks)
        }
        num_stages = num_ranks * num_chunks
        lowered = schedules._add_send_recv(lists, lambda stage: stage % num_ranks, num_stages)
        return schedules._simulate_comms_compute(
            lowered, lambda stage: stage % num_ranks, num_stages
        )

    return run


def timed_cases() -> list[dict[str, float | int | None]]:
    cases = []
    for size in BESIDE_TORCH:
        our, torch_runs = [], []
        run, torch_run = ours(size), torchs(size)
        run()
        for _ in range(TURNS):
            our += [seconds(run) for _ in range(RUNS_PER_TURN)]
            torch_runs.append(seconds(torch_run))
        cases.append(case(size, our, torch_runs))
    for size in ALONE:
        run = ours(size)
        run()
        cases.append(case(size, [seconds(run) for _ in range(ALONE_RUNS)], []))
    return cases


def case(
    size: Size, our: Sequence[float], torch_runs: Sequence[float]
) -> dict[str, float | int | None]:
    num_ranks, num_chunks, num_microbatches = size
    beside = f", torch {median(torch_runs) * 1e3:.1f} ms" if torch_runs else ""
    print(f"{size}: median {median(our) * 1e3:.4f} ms, fastest {min(our) * 1e3:.4f} ms{beside}",
          file=sys.stderr)  # fmt: skip
    return {
        "num_ranks": num_ranks,
        "num_chunks": num_chunks,
        "num_microbatches": num_microbatches,
        "median_s": median(our),
        "torch_median_s": median(torch_runs) if torch_runs else None,
    }


def mixed_plans(num_plans: int) -> list[Plan]:
    """Plans in the order of a search: for every number of chunks and of micro-batches, layers split
    unevenly at random and any micro-batch size."""
    rng = random.Random(0)
    shapes = list(product(range(1, 8), range(NUM_RANKS, 16 * NUM_RANKS + 1, NUM_RANKS)))
    plans = []
    for at in range(num_plans):
        num_chunks, num_microbatches = shapes[at * len(shapes) // num_plans]
        cuts = sorted(rng.sample(range(1, NUM_LAYERS), NUM_RANKS * num_chunks - 1))
        edges = [0, *cuts, NUM_LAYERS]
        plans.append(
            make_plan(
                schedule="1f1b" if num_chunks == 1 else "interleaved",
                num_ranks=NUM_RANKS,
                num_chunks=num_chunks,
                microbatch_size=rng.choice(SIZES),
                num_microbatches=num_microbatches,
                layers_per_stage=tuple(b - a for a, b in pairwise(edges)),
            )
        )
    return plans


def profile() -> Profile:
    overhead = Overhead(forward_s=50e-6, backward_s=80e-6, hop_s=5e-6)
    return synthetic_profile(
        num_layers=NUM_LAYERS,
        block=lambda b: (0.2e-3 + 1e-3 * b, 0.3e-3 + 2e-3 * b),
        head=(2e-3, 4e-3),
        sizes=SIZES,
        num_ranks=NUM_RANKS,
        links=[uniform_link(10e-6, 50e9)],
        boundary_bytes=2 * 2**20,
        overheads={str(name): overhead for name in Executor},
    )


def plans_per_s() -> float:
    """Of the median pass."""
    known, plans = profile(), mixed_plans(NUM_PLANS)
    passes = [seconds_of_all(plans, known) for _ in range(PASSES)]
    print(f"{NUM_PLANS} plans: {', '.join(f'{taken:.2f}' for taken in passes)} s", file=sys.stderr)
    return NUM_PLANS / median(passes)


def seconds_of_all(plans: Sequence[Plan], known: Profile) -> float:
    """Of estimates by a cost model that has seen no plan before."""
    model = CostModel(known, Setting(target=parse_target("torch")))
    started = time.perf_counter()
    estimates = [model.estimate(plan) for plan in plans]
    taken = time.perf_counter() - started
    assert all(isinstance(each, Estimate) for each in estimates)
    return taken


def main() -> None:
    result = {"cases": timed_cases(), "plans_per_s": plans_per_s(), "machine": machine()}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
