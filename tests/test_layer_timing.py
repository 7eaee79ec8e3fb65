"""Layer times in place: against FLOPs counted by torch, closed forms, planted faults, real ranks.

Where a test needs exact times, the clock counts the FLOPs of matrix products instead of seconds: a
perfectly quiet machine on which the right answer is known.
"""

import itertools
import math
import platform
import resource
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from pptune.errors import RankFailure, UsageError
from pptune.model import ModelSpec
from pptune.presets import resolve_model
from pptune.profiles import Layer, LayerPoint
from pptune.runtime import bench, entry, models, reference, update
from pptune.runtime.chunks import Chunk
from pptune.runtime.clock import Clock, clock_for
from pptune.runtime.headroom import is_out_of_memory
from pptune.runtime.layer_points import (
    EMPTY,
    KINDS,
    ChunkSamples,
    Kind,
    KindSizes,
    Lap,
    layers_of,
    noise_ratio,
    sample_warnings,
)
from pptune.runtime.layers import LayerMeasurement, measure_layers
from tests.rank_processes import run_ranks

CPU = torch.device("cpu")
GPT = ModelSpec(
    name="g", family="gpt", num_layers=4, seq_len=16, hidden_size=32, num_heads=4, num_kv_heads=4,
    ffn_size=128, vocab_size=61,
)  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


# --- the clock ------------------------------------------------------------------------------------


@dataclass
class AsyncDevice:
    """A device whose kernels are queued at once and run later, in order."""

    host_s: float = 0.0
    device_s: float = 0.0
    waits: int = 0

    def launch(self, kernel_s: float) -> None:
        self.host_s += 1e-6
        self.device_s = max(self.device_s, self.host_s) + kernel_s

    def mark(self) -> dict[str, float]:
        self.device_s = max(self.device_s, self.host_s)
        return {"reached_at": self.device_s}

    def finish(self) -> None:
        self.waits += 1
        self.host_s = max(self.host_s, self.device_s)

    def seconds_between(self, start: dict[str, float], end: dict[str, float]) -> float:
        assert self.host_s >= end["reached_at"], "read before the device was there"
        return end["reached_at"] - start["reached_at"]

    def clock(self) -> Clock:
        return Clock(mark=self.mark, finish=self.finish, seconds_between=self.seconds_between)


def test_asynchronous_kernels_are_timed_to_their_end() -> None:
    device = AsyncDevice()
    assert device.clock().measure(lambda: device.launch(0.25)) == pytest.approx(0.25, rel=1e-4)
    laps = device.clock().laps(lambda: device.launch(0.5), lambda: device.launch(0.125))
    assert laps == pytest.approx((0.5, 0.125), rel=1e-4)


def test_work_left_over_is_not_charged_to_the_next() -> None:
    device = AsyncDevice()
    device.launch(10.0)
    assert device.clock().measure(lambda: device.launch(0.25)) == pytest.approx(0.25, rel=1e-4)


def test_a_clock_offers_no_reading_without_the_work() -> None:
    clock = clock_for(CPU)
    assert clock.measure(lambda: None) >= 0
    with pytest.raises(AttributeError):
        clock.now()  # type: ignore[attr-defined]


# --- exact times: FLOPs as seconds ----------------------------------------------------------------


class FlopCounter(TorchDispatchMode):
    """Counts the FLOPs of matrix products, forward and backward, by torch's own formulas."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            self.flops += formula(*args, **(kwargs or {}), out_val=output)
        return output

    def clock_for(self, device: torch.device) -> Clock:
        return Clock(
            mark=lambda: self.flops, finish=lambda: None, seconds_between=lambda a, b: float(b - a)
        )


@pytest.fixture
def flops(monkeypatch: pytest.MonkeyPatch, group_of_one: None) -> Iterator[FlopCounter]:
    counter = FlopCounter()
    monkeypatch.setattr(bench, "clock_for", counter.clock_for)
    monkeypatch.setattr(reference, "clock_for", counter.clock_for)
    with counter:
        yield counter


def measure(spec: ModelSpec = GPT, sizes: tuple[int, ...] = (1, 3), **changed: Any) -> Any:
    arguments: dict[str, Any] = {"max_noise": 0.02, "budget_s": 60.0, "warm_up_s": 0, **changed}
    return measure_layers(spec, sizes, dtype=torch.float32, device=CPU, **arguments)


def by_kind(measured: LayerMeasurement) -> dict[str, Layer]:
    return {layer.kind: layer for layer in measured.layers}


def product_flops(tokens: int) -> float:
    """Forward FLOPs of a block's matrix products: attention's own are not in torch's CPU count."""
    return tokens * 2.0 * (4 * 32**2 + 2 * 32 * 128)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_block_costs_exactly_its_flops(flops: FlopCounter, recompute: str) -> None:
    measured = measure(recompute=recompute)
    assert measured.is_settled
    block = by_kind(measured)["block"]
    assert (block.count, block.recompute) == (4, recompute)
    for point in block.points:
        forward = product_flops(16 * point.microbatch_size)
        assert point.status == "ok"
        assert point.forward_s == forward
        if recompute == "full":
            # torch stops playing again before the last product, whose output nothing needs.
            last_product = 2.0 * 16 * point.microbatch_size * 128 * 32
            assert point.backward_s == 3 * forward - last_product
        else:
            assert point.backward_s == 2 * forward
            assert (point.backward_input_s, point.backward_weight_s) == (forward, forward)


def test_head_and_embedding_cost_exactly_their_flops(flops: FlopCounter) -> None:
    kinds = by_kind(measure())
    for point in kinds["head"].points:
        forward = 2.0 * 16 * point.microbatch_size * 32 * 61
        assert (point.forward_s, point.backward_s) == (forward, 2 * forward)
        assert (point.backward_input_s, point.backward_weight_s) == (forward, forward)
    for point in kinds["embedding"].points:
        assert (point.forward_s, point.backward_s, point.backward_input_s) == (0.0, 0.0, 0.0)


def test_sizes_in_bytes_are_exact(flops: FlopCounter) -> None:
    kinds = by_kind(measure())
    assert kinds["block"].parameter_bytes == 4 * (GPT.block_parameters() or 0)
    total = sum((kinds[kind].parameter_bytes or 0) * kinds[kind].count for kind in KINDS)
    assert total == 4 * (GPT.num_parameters() or 0)
    for kind, width in (("embedding", 32), ("block", 32), ("head", 61)):
        for point in kinds[kind].points:
            assert point.boundary_bytes == 4 * 16 * width * point.microbatch_size


def test_the_run_ends_as_soon_as_it_has_settled(flops: FlopCounter) -> None:
    rounds: list[LayerMeasurement] = []
    measured = measure(on_round=rounds.append)
    assert [each.num_rounds for each in rounds] == list(range(1, measured.num_rounds + 1))
    assert not any(each.is_settled for each in rounds[:-1])
    assert rounds[-1] == measured


def test_a_rebuilt_stage_costs_the_sum_of_its_layers(flops: FlopCounter) -> None:
    """What the numbers are for: a stage that was never timed, from the layers that were."""
    kinds = by_kind(measure(sizes=(2,)))
    stage = models.build_stage(
        GPT, blocks=3, first=False, last=True, dtype=torch.float32, device=CPU
    )
    inputs, outputs = models.stage_boundaries(
        GPT, 2, first=False, last=True, dtype=torch.float32, device=CPU
    )
    _, targets = models.example_batch(GPT, 2, device=CPU, dtype=torch.float32)
    chunk = Chunk(
        stage, "last", inputs=inputs, outputs=outputs, targets=targets, loss=models.cross_entropy,
        device=CPU,
    )  # fmt: skip
    real = dict(chunk.sample(flops.clock_for(CPU), split=True))
    for phase in ("forward", "backward", "backward_input", "backward_weight"):
        block, head = (getattr(kinds[kind].points[0], f"{phase}_s") for kind in ("block", "head"))
        assert real[phase] == 3 * block + head


# --- the optimizer --------------------------------------------------------------------------------


def test_adam_keeps_a_gradient_and_two_moments(flops: FlopCounter) -> None:
    memory = measure(budget_s=0).memory
    assert memory.gradient_bytes_per_parameter_byte == 1.0
    # Beside the moments every tensor has a step count of 4 bytes: little, and not nothing.
    assert 2.0 < memory.optimizer_bytes_per_parameter_byte < 2.02


class ElementCounter(TorchDispatchMode):
    """Counts the elements that operations write: an optimizer's time on a quiet machine."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if isinstance(output, torch.Tensor):
            self.elements += output.numel()
        return output


@pytest.mark.usefixtures("group_of_one")
def test_an_update_costs_in_proportion_to_the_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    counter = ElementCounter()
    clock = Clock(
        mark=lambda: counter.elements, finish=lambda: None,
        seconds_between=lambda a, b: float(b - a),
    )  # fmt: skip
    monkeypatch.setattr(update, "clock_for", lambda device: clock)
    few, many = [torch.nn.Parameter(torch.zeros(1000))], [torch.nn.Parameter(torch.zeros(3000))]
    with counter:
        constants, _ = update.measure_update(few, many, CPU)
        one = update.make_optimizer(few)
        few[0].grad = torch.ones(1000)
        one.step()  # makes the moments
        before = counter.elements
        one.step()
        stepped = counter.elements - before
    # The step's own writes, and the gradients' scaling; once per tensor its step count.
    assert constants.per_parameter_byte_s == pytest.approx((stepped + 1000) / 4000, rel=0.01)
    assert constants.fixed_s < 10


# --- in place: what torch's stage does ------------------------------------------------------------


def middle_chunk(recompute: str = "none", blocks: int = 2, size: int = 2) -> Chunk:
    module = models.build_stage(
        GPT, blocks=blocks, first=False, last=False, dtype=torch.float32, device=CPU,
        recompute=recompute,
    )  # fmt: skip
    inputs, outputs = models.stage_boundaries(
        GPT, size, first=False, last=False, dtype=torch.float32, device=CPU
    )
    return Chunk(module, "middle", inputs=inputs, outputs=outputs, device=CPU)


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_split_and_full_backward_give_the_same_gradients(recompute: str) -> None:
    chunk = middle_chunk(recompute)
    gradients = []
    for backward in ([chunk.backward], [chunk.backward_input, chunk.backward_weight]):
        chunk.stage.submod.zero_grad()
        chunk.reset()
        chunk.forward()
        for part in backward:
            part()
        gradients.append([p.grad for p in chunk.stage.submod.parameters()])
    for full, split in zip(*gradients, strict=True):
        torch.testing.assert_close(full, split)


@pytest.mark.usefixtures("group_of_one")
def test_gradients_accumulate_and_nothing_else_stays() -> None:
    chunk = middle_chunk()
    parameter = next(chunk.stage.submod.parameters())
    chunk.sample(clock_for(CPU), split=False)
    assert parameter.grad is not None
    once = parameter.grad.clone()
    chunk.sample(clock_for(CPU), split=True)
    torch.testing.assert_close(parameter.grad, 3 * once)  # one pass more, and one in two parts
    kept = (chunk.stage.fwd_cache, chunk.stage.bwd_cache, chunk.stage.backward_state)
    assert not any(kept)


# --- saved activations ----------------------------------------------------------------------------

USER_LAYERS = """
    import torch
    from torch import nn

    class Doubled(nn.Module):
        '''Multiplies by itself: autograd keeps the one input once, though both factors need it.'''
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))
        def forward(self, x):
            return x * x + self.scale

    class Limited(nn.Linear):
        '''Runs out of memory above a batch size, as an allocator would say it.'''
        calls = 0
        def forward(self, x):
            Limited.calls += 1
            if x.shape[0] > 2 or (x.shape[0] == 2 and Limited.calls > LATE):
                raise torch.OutOfMemoryError("out of memory")
            return super().forward(x)

    LATE = 10**9

    def doubled():
        return [nn.Embedding(31, 8), *(Doubled() for _ in range(3)), nn.Linear(8, 31)]

    def linear():
        return [nn.Embedding(31, 8), *(nn.Linear(8, 8) for _ in range(3)), nn.Linear(8, 31)]

    def relu():
        blocks = (nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3))
        return [nn.Embedding(31, 8), *blocks, nn.Linear(8, 31)]

    def limited():
        return [nn.Embedding(31, 8), *(Limited(8, 8) for _ in range(3)), nn.Linear(8, 31)]

    def late():
        global LATE
        Limited.calls, LATE = 0, 25
        return limited()
"""


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    name = f"timed_layers_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(textwrap.dedent(USER_LAYERS))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield name
    sys.modules.pop(name, None)


def user_spec(module: str, function: str) -> ModelSpec:
    return entry.completed_spec(resolve_model(f"{module}:{function}", seq_len=10))


@pytest.mark.parametrize(
    ("function", "tensors_kept"),
    [
        ("linear", 1),  # its input, for the weight gradient
        ("doubled", 1),  # its input, once
        ("relu", 1),  # the linear's input; relu's own output is the next block's input
    ],
)
def test_saved_bytes_of_layers_counted_by_hand(
    user_module: str, flops: FlopCounter, function: str, tensors_kept: int
) -> None:
    block = by_kind(measure(user_spec(user_module, function), sizes=(1, 2), budget_s=0))["block"]
    for point in block.points:
        assert point.saved_activation_bytes == tensors_kept * point.microbatch_size * 10 * 8 * 4


@pytest.mark.usefixtures("group_of_one")
def test_saved_bytes_agree_with_the_graphs_own_list() -> None:
    """The same tensors, found by walking grad_fn for `_saved_` attributes."""
    chunk = middle_chunk(blocks=1)
    chunk.reset()
    output = chunk.forward()
    storages: dict[int, int] = {}
    pending, seen = [output.grad_fn], set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        pending += [parent for parent, _ in node.next_functions]
        for name in dir(node):
            value = getattr(node, name) if name.startswith("_saved_") else None
            for tensor in value if isinstance(value, (list, tuple)) else [value]:
                if isinstance(tensor, torch.Tensor):
                    storages[tensor.untyped_storage().data_ptr()] = (
                        tensor.untyped_storage().nbytes()
                    )
    for parameter in chunk.stage.submod.parameters():
        storages.pop(parameter.untyped_storage().data_ptr(), None)
    assert chunk.saved_bytes() == sum(storages.values())


def test_full_recompute_keeps_a_blocks_input_alone(flops: FlopCounter) -> None:
    for point in by_kind(measure(recompute="full", budget_s=0))["block"].points:
        assert point.saved_activation_bytes == point.boundary_bytes


# --- running out of memory ------------------------------------------------------------------------


def statuses(measured: LayerMeasurement) -> list[list[tuple[int, str]]]:
    return [[(p.microbatch_size, p.status) for p in layer.points] for layer in measured.layers]


def test_sizes_that_cannot_fit_are_never_tried(flops: FlopCounter) -> None:
    tried: list[str] = []
    block_and_head = 3 * 4 * 16 * 61 * 20
    measured = measure(
        sizes=(1, 2, 8, 4096), free_bytes=lambda device, ranks: 100 * block_and_head, budget_s=0,
        doing=tried.append,
    )  # fmt: skip
    assert all(sizes.pop() == (4096, "oom") for sizes in statuses(measured))
    assert "oom" not in {status for sizes in statuses(measured) for _, status in sizes[:-1]}
    assert not any("timing" in what and "4096" in what for what in tried)
    point = measured.layers[1].points[-1]
    assert (point.forward_s, point.samples_s) == (None, {})


def test_a_size_that_runs_out_is_a_data_point(user_module: str, flops: FlopCounter) -> None:
    measured = measure(user_spec(user_module, "limited"), sizes=(1, 2, 3, 4))
    embedding, *others = statuses(measured)
    assert others == [[(1, "ok"), (2, "ok"), (3, "oom"), (4, "oom")]] * 2
    # It has no FLOPs, and nothing is known to a share of 0.
    assert embedding == [(1, "unsettled"), (2, "unsettled"), (3, "oom"), (4, "oom")]


def test_running_out_later_drops_the_size_and_keeps_the_rest(
    user_module: str, flops: FlopCounter
) -> None:
    measured = measure(user_spec(user_module, "late"), sizes=(1, 2))
    embedding, *others = statuses(measured)
    assert others == [[(1, "ok"), (2, "oom")]] * 2
    assert embedding == [(1, "unsettled"), (2, "oom")]


def test_nothing_fits(flops: FlopCounter) -> None:
    with pytest.raises(RankFailure, match="use fewer ranks") as failure:
        measure(free_bytes=lambda device, ranks: 1000)
    assert failure.value.reason == "oom"
    enough_for_parameters = 4 * 4 * (GPT.num_parameters() or 0)
    with pytest.raises(RankFailure, match="a micro-batch of 5000 does not fit"):
        measure(sizes=(5000,), free_bytes=lambda device, ranks: enough_for_parameters)


def test_memory_errors_are_known_through_what_wraps_them() -> None:
    def wrapped(cause: Exception) -> RuntimeError:
        error = RuntimeError("failed to run forward")
        error.__cause__ = cause
        return error

    assert is_out_of_memory(wrapped(torch.OutOfMemoryError("CUDA out of memory")))
    assert is_out_of_memory(MemoryError())
    allocator = "[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"
    assert is_out_of_memory(wrapped(RuntimeError(allocator)))
    assert not is_out_of_memory(wrapped(ValueError("shape")))


def test_no_sizes_are_refused(flops: FlopCounter) -> None:
    with pytest.raises(UsageError, match="no micro-batch size"):
        measure(sizes=())


# --- from samples to points -----------------------------------------------------------------------


def made_up_samples(
    block_s: Callable[[int], float] = lambda size: 2e-3 * size,
    *,
    rounds: int = 20,
    spread: float = 0.01,
    ranks: int = 2,
    seed: int = 0,
) -> ChunkSamples:
    """What ranks would report: calls of 0.1 ms, stacks of 4 blocks, heads worth half a block."""
    generator = np.random.default_rng(seed)
    samples = ChunkSamples()
    for _ in range(rounds):
        gathered: list[list[Lap]] = []
        for _ in range(ranks):
            laps: list[Lap] = []
            for size, (phase, factor) in itertools.product(
                (1, 2), (("forward", 1.0), ("backward", 2.0))
            ):
                work = factor * block_s(size)
                for kind, units in ((EMPTY, 0.0), ("embedding", 0.01), ("block", 4), ("head", 0.5)):
                    noise = 1 + spread * generator.normal()
                    laps.append(((kind, size, phase), (1e-4 + units * work) * noise))
            gathered.append(laps)
        samples.add_round(gathered)
    return samples


SIZES: dict[Kind, KindSizes] = {
    kind: KindSizes(
        count=8 if kind == "block" else 1, units=4 if kind == "block" else 1, parameter_bytes=10,
        saved_bytes={1: 100, 2: 200}, boundary_bytes={1: 8, 2: 16},
    )
    for kind in KINDS
}  # fmt: skip
UNITS = {kind: sizes.units for kind, sizes in SIZES.items()}


def points(samples: ChunkSamples, max_noise: float = 0.02) -> dict[str, tuple[LayerPoint, ...]]:
    made = layers_of(samples, SIZES, out_of_memory=[8], max_noise=max_noise, recompute="none")
    return {layer.kind: layer.points for layer in made}


def test_the_calls_own_cost_is_taken_off() -> None:
    made = points(made_up_samples())
    for size, point in zip((1, 2), made["block"], strict=False):
        assert point.forward_s == pytest.approx(2e-3 * size, rel=0.01)
        assert point.backward_s == pytest.approx(4e-3 * size, rel=0.01)
    assert made["head"][1].forward_s == pytest.approx(2e-3, rel=0.02)
    assert made["embedding"][0].forward_s == pytest.approx(2e-5, abs=3e-6)
    assert made["block"][2].status == "oom"


def test_kept_samples_are_those_of_one_layer() -> None:
    point = points(made_up_samples())["block"][0]
    kept = np.sort(point.samples_s["forward"])
    cut = len(kept) // 10
    assert len(kept) == 40
    assert kept[cut:-cut].mean() == pytest.approx(point.forward_s, abs=1e-9)  # as rounded
    assert np.median(point.samples_s["call_forward"]) == pytest.approx(1e-4, rel=0.02)


def test_a_hundredfold_outlier_changes_nothing() -> None:
    samples = made_up_samples()
    clean = points(samples)["block"][0]
    samples.by_rank["block", 1, "forward"][0][3] *= 100
    spoiled = points(samples)["block"][0]
    assert spoiled.forward_s == pytest.approx(clean.forward_s, rel=0.01)
    assert (spoiled.status, clean.status) == ("ok", "ok")


def test_noise_is_reported_and_the_numbers_kept() -> None:
    noisy = made_up_samples(spread=0.4)
    block = points(noisy)["block"][0]
    assert block.status == "unsettled"
    assert block.forward_s is not None
    warnings = sample_warnings(noisy, units=UNITS, max_noise=0.02)
    assert any("not settled to 2.0%: block forward at b=1" in warning for warning in warnings)
    assert sample_warnings(made_up_samples(), units=UNITS, max_noise=0.02) == []


def test_noise_shrinks_as_samples_grow() -> None:
    few, many = made_up_samples(rounds=10), made_up_samples(rounds=160)
    ratio = noise_ratio(few, "block", 1, units=UNITS) / noise_ratio(many, "block", 1, units=UNITS)
    assert ratio == pytest.approx(math.sqrt(16), rel=0.5)


def test_a_tiny_embedding_keeps_nobody_measuring_and_is_still_not_called_settled() -> None:
    samples = made_up_samples(spread=0.05, rounds=40)
    own = samples.layer_time("embedding", 1, "forward", units=1)
    assert own is not None
    assert own.noise_ratio > 0.02
    assert noise_ratio(samples, "embedding", 1, units=UNITS) < 0.02
    made = points(samples)
    assert (made["embedding"][0].status, made["block"][0].status) == ("unsettled", "ok")


def test_a_coarse_timer_is_named() -> None:
    coarse = made_up_samples(block_s=lambda size: 0.0)
    for ranks in coarse.by_rank.values():
        for rank in ranks:
            rank[:] = [0.0 for _ in rank]
    made = points(coarse)["block"][0]
    assert (made.forward_s, made.status) == (0.0, "unsettled")
    warnings = sample_warnings(coarse, units=UNITS, max_noise=0.02)
    assert any("clock is too coarse" in warning for warning in warnings)


def test_a_slow_rank_is_named() -> None:
    samples = made_up_samples(ranks=4)
    slow = samples.by_rank["block", 2, "forward"][2]
    slow[:] = [1.4 * value for value in slow]
    warnings = sample_warnings(samples, units=UNITS, max_noise=0.02)
    assert any("rank 2 takes" in warning for warning in warnings)


def test_long_runs_keep_a_bounded_number_of_samples() -> None:
    point = points(made_up_samples(rounds=120, ranks=4))["block"][0]
    assert len(point.samples_s["forward"]) == 400


# --- the heap -------------------------------------------------------------------------------------

NEW_PAGES = """
import resource
import sys

import torch

from pptune.runtime.heap import keep_freed_memory

if sys.argv[1] == "keep":
    keep_freed_memory()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    blocks = [torch.empty(1 << 20, dtype=torch.uint8).fill_(1) for _ in range(48)]
    del blocks
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the options are glibc's")
def test_memory_that_was_freed_is_not_new_again() -> None:
    def new_pages(how: str) -> int:
        return int(subprocess.check_output([sys.executable, "-c", NEW_PAGES, how]))

    pages = (48 << 20) // resource.getpagesize()
    assert new_pages("keep") < 1.5 * pages
    assert new_pages("return") > 1.75 * pages


# --- real ranks -----------------------------------------------------------------------------------


def measure_on_a_rank() -> tuple[LayerMeasurement, int]:
    rounds: list[LayerMeasurement] = []

    def free_bytes(device: torch.device, ranks_on_node: int) -> int:
        # The second rank has no memory left once it comes to b = 4: both must leave it out.
        assert ranks_on_node == 2
        preparing_four = any("b=4" in what for what in doing)
        return 1 << 10 if preparing_four and dist.get_rank() == 1 else 1 << 30

    doing: list[str] = []
    measured = measure_layers(
        GPT, (1, 4), dtype=torch.float32, device=CPU, max_noise=1e-9, budget_s=1.0, warm_up_s=0.1,
        on_round=rounds.append, doing=doing.append, free_bytes=free_bytes,
    )  # fmt: skip
    return measured, len(rounds)


@pytest.mark.dist
def test_two_ranks_agree_on_rounds_samples_and_memory(tmp_path: Path) -> None:
    (first, first_rounds), (second, second_rounds) = run_ranks(measure_on_a_rank, folder=tmp_path)
    assert first == second
    assert first_rounds == second_rounds == first.num_rounds
    assert statuses(first) == [[(1, "unsettled"), (4, "oom")]] * 3
    block = by_kind(first)["block"].points[0]
    assert len(block.samples_s["backward"]) % (2 * first_rounds) == 0, "both ranks' samples"
    assert (block.forward_s or 0) > 0
    assert (block.backward_input_s or 0) > 0
    assert not first.is_settled
    assert any("not settled to" in warning for warning in first.warnings)


# --- GPUs -----------------------------------------------------------------------------------------

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@needs_gpu
def test_a_kernel_is_timed_and_not_its_launch() -> None:
    clock = clock_for(torch.device("cuda"))
    clock.measure(lambda: torch.cuda._sleep(1000))
    short = clock.measure(lambda: torch.cuda._sleep(10_000_000))
    long = clock.measure(lambda: torch.cuda._sleep(50_000_000))
    assert long / short == pytest.approx(5, rel=0.2)


@pytest.mark.gpu
@needs_gpu
def test_layers_are_measured_on_a_gpu() -> None:
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
    try:
        measured = measure_layers(
            GPT, (1, 4), dtype=torch.bfloat16, device=device, max_noise=0.05, budget_s=5.0
        )
    finally:
        dist.destroy_process_group()
    for layer in measured.layers:
        assert [point.microbatch_size for point in layer.points] == [1, 4]
        assert all((point.forward_s or 0) >= 0 for point in layer.points)
    block = by_kind(measured)["block"].points[1]
    assert block.boundary_bytes == 2 * 4 * 16 * 32
    assert (block.backward_s or 0) > 0
