"""What a rank can be asked to do, by name. Arguments and results are JSON values.

A task imports what it needs when it is asked for: torch's pipelines take longer to import than all
else together, and a look at an earlier profile's machine needs none.
"""

import gc
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import torch
import torch.distributed as dist

from pptune.model import ModelSpec
from pptune.plan import Plan
from pptune.runtime.context import RankContext
from pptune.runtime.heap import return_freed_memory
from pptune.runtime.machine import describe_machine
from pptune.runtime.reference import ReferenceProduct
from pptune.runtime.wait_times import WaitTimes

if TYPE_CHECKING:
    from pptune.runtime.pipeline import PlanRunner

_EMIT_EVERY_S = 3.0
_MAX_RUNNERS = 64
"""Built plans that a rank keeps between visits; the one built first goes first. Every rank gets the
same visits, so all of them forget alike."""


def ping(context: RankContext) -> dict[str, Any]:
    """Answer with the rank and its node: tells that every rank has joined."""
    return {"rank": context.rank, "node": context.node}


def complete_model(context: RankContext, *, model: dict[str, Any]) -> dict[str, Any]:
    """The model's spec with what only the user's layers tell (entry.py)."""
    from pptune.runtime import entry

    context.status(f"building {model['entry']}")
    completed = entry.completed_spec(msgspec.convert(model, ModelSpec))
    answer: dict[str, Any] = msgspec.to_builtins(completed)
    return answer


def visit_plan(
    context: RankContext,
    *,
    plan: dict[str, Any],
    model: dict[str, Any],
    dtype: str,
    stage_times: list[dict[str, float]] | None,
    boundary_bytes: int,
    warmup_steps: int,
    steps: int,
    record: bool,
    memory: bool,
    forget_others: bool,
    with_product: bool,
) -> dict[str, Any]:
    """Run a plan's untimed and timed steps; the runner stays for the next visit.

    Returns `steps` (see PlanRunner.timed_step), each `with_product` with the `product_s` of the
    reference product just before and after it, `peak_memory_bytes` or null, and
    `free_memory_ratio`, from which the leader decides for all ranks alike when to forget runners.
    """
    from pptune.runtime.pipeline import PlanRunner

    asked = msgspec.convert(plan, Plan)
    runners: dict[str, PlanRunner] = context.keep.setdefault("runners", {})
    key = f"{asked.label} {'replay' if stage_times else 'real'} {model['name']} {dtype}"
    # On a GPU the peak is that of everything on the device.
    if forget_others or (memory and context.device.type == "cuda"):
        _forget(runners, [name for name in runners if name != key])
        return_freed_memory()
    elif key not in runners and len(runners) >= _MAX_RUNNERS:
        _forget(runners, list(runners)[:1])
    if not runners:
        # What torch has made by now stays. To look through it again would outlast most visits.
        gc.collect()
        gc.freeze()
    if key not in runners:
        context.status(f"building {asked.label}")
        times = None if stage_times is None else [WaitTimes(**each) for each in stage_times]
        runners[key] = PlanRunner(
            context, asked, msgspec.convert(model, ModelSpec), dtype=dtype, stage_times=times,
            boundary_bytes=boundary_bytes,
        )  # fmt: skip
    runner = runners[key]
    product = ReferenceProduct(context.device) if with_product else None
    gc.collect()
    # A collection in the middle of a step would be charged to whichever action it interrupts.
    gc.disable()
    try:
        for _ in range(warmup_steps):
            runner.step()
        timed = []
        before_s = 0.0 if product is None else product.sample()
        for _ in range(steps):
            timed.append(runner.timed_step(record=record))
            if product is not None:
                after_s = product.sample()
                timed[-1]["product_s"] = (before_s + after_s) / 2
                before_s = after_s
    finally:
        gc.enable()
    product = None  # Its memory is none of the plan's.
    return {
        "steps": timed,
        "node": context.node,
        "peak_memory_bytes": runner.peak_memory_bytes() if memory else None,
        "free_memory_ratio": free_memory_ratio(context),
    }


def _forget(runners: "dict[str, PlanRunner]", keys: list[str]) -> None:
    for key in keys:
        del runners[key]
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def measure_layers(
    context: RankContext,
    *,
    model: dict[str, Any],
    sizes: list[int],
    dtype: str,
    recompute: Literal["none", "full"],
    max_noise: float,
    budget_s: float,
) -> dict[str, Any]:
    """Times and sizes of the model's layers (layers.py); rank 0 emits what it has now and then."""
    from pptune.runtime import layers
    from pptune.runtime.pipeline import torch_dtype

    spec = msgspec.convert(model, ModelSpec)
    started = last_s = time.monotonic()

    def on_round(result: layers.LayerMeasurement) -> None:
        nonlocal last_s
        now = time.monotonic()
        if context.rank == 0 and now - last_s > _EMIT_EVERY_S:
            last_s = now
            context.emit(
                {"event": "layers", "spent_ratio": (now - started) / budget_s,
                 "result": msgspec.to_builtins(result)}
            )  # fmt: skip

    result = layers.measure_layers(
        spec, sizes, dtype=torch_dtype(dtype), device=context.device, recompute=recompute,
        max_noise=max_noise, budget_s=budget_s, on_round=on_round, doing=context.status,
    )  # fmt: skip
    answer: dict[str, Any] = msgspec.to_builtins(result)
    return answer if context.rank == 0 else {}


def measure_links(context: RankContext, *, max_noise: float, budget_s: float) -> dict[str, Any]:
    """Latency and bandwidth of every link of the ring (links.py)."""
    from pptune.runtime import links

    result = links.measure_links(
        device=context.device, node=context.node, max_noise=max_noise, budget_s=budget_s,
        doing=context.status,
    )  # fmt: skip
    answer: dict[str, Any] = msgspec.to_builtins(result)
    return answer if context.rank == 0 else {}


def time_reference(context: RankContext, *, num_samples: int) -> list[float]:
    """Seconds of the reference product, on all ranks at once: is the machine what it was?"""
    product = ReferenceProduct(context.device)
    dist.barrier()
    return [product.sample() for _ in range(num_samples)]


def machine(context: RankContext, *, dtype: str) -> dict[str, Any]:
    """What the ranks run on."""
    return describe_machine(context, dtype)


def recording_cost(context: RankContext) -> float:
    """Seconds that recording adds per event on this rank."""
    from pptune.runtime.pipeline import recording_cost_s

    return recording_cost_s()


def free_memory_ratio(context: RankContext) -> float:
    """Free / total memory of the rank's device."""
    if context.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(context.device)
        return free / total
    pages, available = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_AVPHYS_PAGES")
    return available / pages


TASKS: dict[str, Callable[..., Any]] = {
    "ping": ping,
    "complete_model": complete_model,
    "describe_machine": machine,
    "measure_layers": measure_layers,
    "measure_links": measure_links,
    "time_reference": time_reference,
    "visit_plan": visit_plan,
    "recording_cost": recording_cost,
}
