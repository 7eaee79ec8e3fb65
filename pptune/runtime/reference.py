"""A fixed matrix product: how fast the machine is right now."""

import torch

from pptune.runtime.clock import Clock, clock_for

_CPU_SIZE = 640
_CUDA_SIZE = 4096

_PRODUCTS = 4
"""In one sample. A core's speed differs from one moment to the next; some tens of milliseconds tell
more about it than one product."""


class ReferenceProduct:
    """A square product of about 10 ms on a CPU core, as long as a layer; less on a GPU."""

    def __init__(self, device: torch.device) -> None:
        on_cuda = device.type == "cuda"
        self.matrix_size = _CUDA_SIZE if on_cuda else _CPU_SIZE
        self.dtype = torch.bfloat16 if on_cuda else torch.float32
        shape = (self.matrix_size, self.matrix_size)
        self._left = torch.ones(shape, dtype=self.dtype, device=device)
        self._right = torch.ones(shape, dtype=self.dtype, device=device)
        self._product = torch.empty(shape, dtype=self.dtype, device=device)
        self._clock: Clock = clock_for(device)

    def sample(self) -> float:
        """Seconds of one product, the mean of a few in a row; the first only fills the caches."""
        self._multiply(1)
        return self._clock.measure(lambda: self._multiply(_PRODUCTS)) / _PRODUCTS

    def _multiply(self, times: int) -> None:
        for _ in range(times):
            torch.mm(self._left, self._right, out=self._product)
