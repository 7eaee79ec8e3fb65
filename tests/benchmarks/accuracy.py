"""How far predictions are from measurements on this machine: `python -m tests.benchmarks.accuracy`.

Every plan of each space is run in interleaved rounds; plans that calibrated are none of them.
real: two models on 2 CPU ranks. space: every plan of one model under every schedule, the regret of
the first pick, and what finding it cost beside running them all. replay_p4, replay_p8: waiting
stages, real runtime and messages. published: others' measurements against profiles made of others'
numbers. One JSON object on stdout.
"""

import argparse
import json
import math
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, get_args

import msgspec

from pptune import search as searching
from pptune.cli.profile import run_profile
from pptune.cost_model import CostModel, Setting
from pptune.estimate import Candidate, Estimate
from pptune.hardware import cpu_name, num_cores
from pptune.model import ModelSpec
from pptune.plan import Plan, Schedule, make_plan
from pptune.plans_file import PlansFile, ProfileReference, Space
from pptune.presets import PRESETS
from pptune.profiles import Layer, LayerPoint, Link, Machine, Profile, load_profile
from pptune.targets import parse_target
from pptune.validate import Request, Watch, validate
from pptune.validate.rounds import Rounds
from pptune.validate.simple_models import simple_models
from pptune.validate.verdict import is_tied, summarise
from pptune.validation_file import Run, ValidationFile, save_validation

TORCH = parse_target("torch")
REAL_MODELS = ("gpt-small-cpu", "gpt-long-cpu")
REAL_BATCH = 16
REAL_CHUNKS = (1, 2, 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How long to measure."""

    rounds: int
    steps: int
    profile_budget: str
    real_budget: str
    """For the two profiles of the real part: the speed of a machine that others use too is known as
    well as the time over which it was averaged is long."""


FULL = Effort(rounds=6, steps=3, profile_budget="75s", real_budget="180s")
QUICK = Effort(rounds=3, steps=2, profile_budget="30s", real_budget="30s")


def main() -> None:
    """Run the parts asked for and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--parts", default="real,space,replay_p4,replay_p8,published")
    parser.add_argument("--keep", type=Path, help="folder for the profiles and validations")
    arguments = parser.parse_args()
    effort = QUICK if arguments.quick else FULL
    folder = arguments.keep or Path(tempfile.mkdtemp(prefix="pptune-accuracy-"))
    folder.mkdir(parents=True, exist_ok=True)
    figures: dict[str, Any] = {"machine": machine()}
    for part in arguments.parts.split(","):
        started = time.monotonic()
        figures[part] = PARTS[part](effort, folder)
        say(f"{part}: {time.monotonic() - started:.0f} s")
    print(json.dumps(figures, indent=1))


def machine() -> dict[str, Any]:
    """What these figures were measured on."""
    import torch

    return {
        "cpu": cpu_name(), "cores": num_cores(), "python": platform.python_version(),
        "torch": torch.__version__,
    }  # fmt: skip


def real(effort: Effort, folder: Path) -> dict[str, Any]:
    """Two models, every plan of V in 1, 2, 4 and b in 1, 2, 4, 8, even and balanced layouts."""
    runs: list[Run] = []
    models: dict[str, list[dict[str, Any]]] = {}
    calibrated: set[str] = set()
    for index, name in enumerate(REAL_MODELS):
        path = folder / f"{name}.json"
        profile = measured_profile(name, effort.real_budget, path, use_cache=True)
        request = searching.Request(
            global_batch_size=REAL_BATCH, num_ranks=2, num_chunks=REAL_CHUNKS, top=10_000
        )
        plans = searching.search(
            profile, Setting(target=TORCH), request,
            reference=ProfileReference(path=str(path), digest=""),
        )  # fmt: skip
        validation = measure(plans, profile, effort, folder / f"{name}-validation.json")
        runs += [msgspec.structs.replace(run, model_index=index) for run in validation.runs]
        calibrated |= set(profile.calibration_plans)
        assert validation.summary is not None
        for model, result in validation.summary.models.items():
            models.setdefault(model, []).append(msgspec.to_builtins(result))
    return figures_of(runs, models, calibrated) | {"memory": memory_of(runs)}


def space(effort: Effort, folder: Path) -> dict[str, Any]:
    """Every legal plan of a model under all schedules; a pick that ties with the best of them has
    no regret beyond the tie. Searching costs a new profile, the search, and runs of three plans and
    the baseline; the repeats are the same as those of all plans."""
    path = folder / "space.json"
    started = time.monotonic()
    profile = measured_profile(REAL_MODELS[0], effort.profile_budget, path, use_cache=False)
    profiled_s, started = time.monotonic() - started, time.monotonic()
    plans = searching.search(
        profile, Setting(target=TORCH),
        searching.Request(
            global_batch_size=REAL_BATCH, num_ranks=2, schedules=get_args(Schedule), top=10_000
        ),
        reference=ProfileReference(path=str(path), digest=""),
    )  # fmt: skip
    searched_s, started = time.monotonic() - started, time.monotonic()
    measure(plans, profile, effort, folder / "space-first.json", count=3)
    first_s, started = time.monotonic() - started, time.monotonic()
    validation = measure(plans, profile, effort, folder / "space-all.json")
    all_s = time.monotonic() - started
    assert validation.summary is not None
    figures: dict[str, Any] = msgspec.to_builtins(validation.summary)
    done = [run for run in validation.runs if run.measured_s is not None]
    best = min(done, key=lambda run: run.measured_s or 0.0)
    picks = {"pptune": min(done, key=lambda run: run.predicted_s)}
    closed_form = simple_models(profile)["closed-form"]
    picks["closed-form"] = min(done, key=lambda run: closed_form(run.plan) or math.inf)
    figures["first_pick"] = {
        name: {"plan": pick.plan.label, "tied_with_best": is_tied(pick, best)}
        for name, pick in picks.items()
    }
    figures["best"] = best.plan.label
    figures["seconds"] = {
        "profile": profiled_s, "search": searched_s, "first_three": first_s, "exhaustive": all_s,
        "share": (profiled_s + searched_s + first_s) / all_s,
    }  # fmt: skip
    return figures


def measured_profile(name: str, budget: str, path: Path, *, use_cache: bool) -> Profile:
    """A profile of this machine for the preset."""
    measured = run_profile(
        PRESETS[name], ranks=2, sizes="1,2,4,8", dtype="float32", device="cpu", recompute="none",
        budget=budget, max_noise="1%", timeout="5m", use_cache=use_cache,
        output=path, quiet=False,
    )  # fmt: skip
    assert measured is not None
    return load_profile(path)


def memory_of(runs: Sequence[Run]) -> dict[str, Any]:
    """How far predicted peaks are from measured ones, over plans and ranks."""
    errors = [
        predicted / measured - 1
        for run in runs
        for predicted, measured in zip(
            run.predicted_peak_memory_bytes or (), run.peak_memory_bytes or (), strict=False
        )
    ]
    return {
        "num_peaks": len(errors),
        "mape": sum(map(abs, errors)) / len(errors),
        "max_abs_error": max(map(abs, errors)),
    }


def replay(num_ranks: int, effort: Effort, folder: Path) -> dict[str, Any]:
    """1F1B and interleaved plans with small and 1 MB messages, and zero-bubble schedules."""
    runs: list[Run] = []
    models: dict[str, list[dict[str, Any]]] = {}
    calibrated: set[str] = set()
    zero_bubble: list[Run] = []
    for index, message_bytes in enumerate((4096, 1 << 20)):
        profile = given_times(num_ranks, message_bytes)
        plans = replayed_plans(profile, num_ranks, with_zero_bubble=num_ranks == 4 and index == 0)
        path = folder / f"replay-p{num_ranks}-{message_bytes}.json"
        validation = measure(plans, profile, effort, path, mode="replay")
        for run in validation.runs:
            run = msgspec.structs.replace(run, model_index=index)
            (zero_bubble if run.plan.splits_backward else runs).append(run)
        assert validation.summary is not None
        for model, result in validation.summary.models.items():
            models.setdefault(model, []).append(msgspec.to_builtins(result))
    figures = figures_of(runs, models, calibrated)
    if zero_bubble:
        figures["zero_bubble"] = {
            run.plan.label: {
                "predicted_s": run.predicted_s, "measured_s": run.measured_s,
                "error_ratio": run.error_ratio,
            }
            for run in zero_bubble
        }  # fmt: skip
    return figures


def given_times(num_ranks: int, message_bytes: int) -> Profile:
    """16 ms forward and 32 ms backward on every rank, in 4 blocks; split backwards in halves."""
    blocks, forward_s, backward_s = 4, 16e-3, 32e-3

    def layer(kind: str, count: int, share: float) -> Layer:
        return Layer(
            kind=kind, count=count, parameter_bytes=0,  # type: ignore[arg-type]
            points=(
                LayerPoint(
                    microbatch_size=1, forward_s=forward_s * share, backward_s=backward_s * share,
                    backward_input_s=backward_s * share / 2,
                    backward_weight_s=backward_s * share / 2,
                    saved_activation_bytes=0, boundary_bytes=message_bytes, source="given",
                ),
            ),
        )  # fmt: skip

    return Profile(
        machine=Machine(
            description="given times", device="cpu", device_name="given", num_devices=num_ranks
        ),
        model=ModelSpec(
            name="replay", family="custom", num_layers=blocks * num_ranks, seq_len=1
        ),
        dtype="float32", seq_len=1, num_ranks=num_ranks,
        layers=(
            layer("embedding", 1, 0.0), layer("block", blocks * num_ranks, 1 / blocks),
            layer("head", 1, 0.0),
        ),
        # Replaced by what the ranks measure before the first run.
        links=(Link(scope="intra", source_rank=None, target_rank=None, latency_s=1e-4,
                    bytes_per_s=4e9, source="given"),),
    )  # fmt: skip


def replayed_plans(profile: Profile, num_ranks: int, *, with_zero_bubble: bool) -> PlansFile:
    """M = P, 2P, 4P for V = 1, 2, 4; with the zero-bubble schedules at 2P where asked."""
    wanted = [("1f1b" if chunks == 1 else "interleaved", chunks, factor * num_ranks)
              for chunks, factor in product((1, 2, 4), (1, 2, 4))]  # fmt: skip
    if with_zero_bubble:
        wanted += [("zb-h1", 1, 2 * num_ranks), ("zb-h2", 1, 2 * num_ranks),
                   ("zb-v", 2, 2 * num_ranks), ("interleaved-zb", 2, 2 * num_ranks)]  # fmt: skip
    model = CostModel(profile, Setting(target=TORCH))
    plans = [
        make_plan(
            schedule=schedule, num_ranks=num_ranks, num_chunks=chunks, microbatch_size=1,  # type: ignore[arg-type]
            num_microbatches=microbatches, layers_per_stage=(4 // chunks,) * num_ranks * chunks,
        )
        for schedule, chunks, microbatches in wanted
    ]  # fmt: skip
    return plans_file(profile, model, plans)


def plans_file(profile: Profile, model: CostModel, plans: Sequence[Plan]) -> PlansFile:
    """The plans with their estimates."""
    candidates = []
    for rank, plan in enumerate(plans, start=1):
        estimate = model.estimate(plan)
        assert isinstance(estimate, Estimate)
        candidates.append(Candidate(rank=rank, plan=plan, estimate=estimate))
    return PlansFile(
        profile=ProfileReference(path="given", digest=""), model=profile.model,
        dtype=profile.dtype, device="cpu", global_batch_size=plans[0].global_batch_size,
        target="torch", space=Space(num_legal=len(plans)), proven_optimal=False, baseline=None,
        candidates=tuple(candidates),
    )  # fmt: skip


def measure(
    plans: PlansFile, profile: Profile, effort: Effort, path: Path, *, mode: str = "real",
    count: int | None = None,
) -> ValidationFile:  # fmt: skip
    """Run the first `count` plans of the file and its baseline, or every plan, in rounds."""
    last_s = 0.0

    def on_visit(done: int, total: int, doing: str) -> None:
        nonlocal last_s
        if time.monotonic() - last_s > 20:
            last_s = time.monotonic()
            say(f"{path.stem}: {done} of {total}, {doing}")

    return validate(
        plans,
        Request(
            mode=mode, exhaustive=count is None, top=count or 0,  # type: ignore[arg-type]
            device="cpu", timeout_s=300,
            rounds=Rounds(
                repeats=effort.rounds, steps_per_visit=effort.steps, separate=False
            ),
        ),
        digest="", profile=profile,
        watch=Watch(on_visit=on_visit, on_saved=lambda file: save_validation(file, path)),
    )  # fmt: skip


def figures_of(
    runs: Sequence[Run], models: dict[str, list[dict[str, Any]]], calibrated: set[str]
) -> dict[str, Any]:
    """The summary over several validations, with the simpler models' means beside; a pick's regret
    is among the plans of its own validation."""
    summary = summarise(runs, exhaustive=True, calibrated=frozenset(calibrated))
    figures: dict[str, Any] = msgspec.to_builtins(summary)
    each = [
        summarise([run for run in runs if run.model_index == index], exhaustive=True)
        for index in {run.model_index for run in runs}
    ]
    for name in ("regret_top1", "regret_top3"):
        figures[name] = max(getattr(summary, name) for summary in each)
    figures["models"] = {
        name: {
            "mape": sum(each["mape"] for each in results) / len(results),
            "regret_top1": max(each["regret_top1"] for each in results),
        }
        for name, results in models.items()
    }
    return figures


def published(effort: Effort, folder: Path) -> dict[str, Any]:
    """Published step times predicted from published layer times."""
    del effort, folder
    from tests.published import published_results

    return published_results()


def say(text: str) -> None:
    """A line of progress."""
    print(text, file=sys.stderr, flush=True)


PARTS = {
    "real": real,
    "space": space,
    "replay_p4": lambda effort, folder: replay(4, effort, folder),
    "replay_p8": lambda effort, folder: replay(8, effort, folder),
    "published": published,
}


if __name__ == "__main__":
    main()
