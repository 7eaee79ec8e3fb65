"""What an optimizer step costs in time and memory, per byte of a rank's own parameters."""

from collections.abc import Sequence

import torch
from torch import nn

from pptune.measurement import Measurement
from pptune.profiles import MemoryModel, StepConstants
from pptune.runtime.clock import Clock, clock_for
from pptune.runtime.exchange import gather_objects

_REPEATS = 8
_MICROBATCHES = 4
"""Any number above 1: torch's schedules divide the gradients by it at the end of a step."""


def make_optimizer(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer that every measured step uses: AdamW with torch's defaults."""
    return torch.optim.AdamW(parameters)


def measure_update(
    few: Sequence[nn.Parameter], many: Sequence[nn.Parameter], device: torch.device
) -> tuple[StepConstants, MemoryModel]:
    """The end of a step (scaling gradients, AdamW, zeroing) and the memory that it needs.

    Called by all ranks at once. Two sets of parameters separate what a step costs in any case from
    what it costs per byte. Leaves the parameters without gradients, and their values changed.
    """
    clock = clock_for(device)
    few_s = _pooled(_update_samples(few, clock))
    many_s = _pooled(_update_samples(many, clock))
    few_bytes, many_bytes = _num_bytes(few), _num_bytes(many)
    grown = many_bytes - few_bytes
    per_byte_s = max(0.0, (many_s - few_s) / grown if grown else many_s / many_bytes)
    constants = StepConstants(
        fixed_s=max(0.0, few_s - per_byte_s * few_bytes), per_parameter_byte_s=per_byte_s
    )
    return constants, _memory_model(many, device)


def _pooled(samples: list[float]) -> float:
    return Measurement(
        samples_s=tuple(value for rank in gather_objects(samples) for value in rank)
    ).centre_s


def _update_samples(parameters: Sequence[nn.Parameter], clock: Clock) -> list[float]:
    optimizer = make_optimizer(parameters)

    def update() -> None:
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.div_(_MICROBATCHES)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def sample() -> float:
        _fill_gradients(parameters)
        return clock.measure(update)

    sample()  # builds the optimizer's state
    return [sample() for _ in range(_REPEATS)]


def _memory_model(parameters: Sequence[nn.Parameter], device: torch.device) -> MemoryModel:
    """Bytes of gradients and optimizer state per parameter byte, counted on the real tensors."""
    optimizer = make_optimizer(parameters)
    _fill_gradients(parameters)
    gradients = sum(_bytes_of(parameter.grad) for parameter in parameters)
    optimizer.step()
    state = sum(_bytes_of(each) for held in optimizer.state.values() for each in held.values())
    optimizer.zero_grad(set_to_none=True)
    total = _num_bytes(parameters)
    return MemoryModel(
        gradient_bytes_per_parameter_byte=gradients / total,
        optimizer_bytes_per_parameter_byte=state / total,
        fixed_bytes=_outside_the_allocator(device),
    )


def _outside_the_allocator(device: torch.device) -> int:
    """Device memory that is gone before the first tensor: CUDA's context and the communicators."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return int(total - free - torch.cuda.memory_reserved(device))


def _fill_gradients(parameters: Sequence[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 1e-3)


def _num_bytes(parameters: Sequence[nn.Parameter]) -> int:
    return sum(map(_bytes_of, parameters))


def _bytes_of(value: object) -> int:
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0
