from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

FORWARD: int
BACKWARD: int
BACKWARD_INPUT: int
BACKWARD_WEIGHT: int

MAX_STAGES: int
MAX_MICROBATCHES: int

class Codes:
    num_ranks: int
    def __init__(self, num_ranks: int, num_actions: int) -> None: ...
    @staticmethod
    def of(ranks: Sequence[Sequence[tuple[int, int, int, bool]]]) -> Codes: ...
    def num_actions(self) -> NDArray[np.int64]: ...
    def columns(
        self,
    ) -> tuple[NDArray[np.int8], NDArray[np.int32], NDArray[np.int32], NDArray[np.bool_]]: ...
    def peaks(self, bytes_per_stage: NDArray[np.float64]) -> NDArray[np.float64]: ...

def breadth_first(
    num_ranks: int, num_chunks: int, num_microbatches: int, reverse_backwards: bool
) -> Codes: ...
def looped(
    num_ranks: int,
    num_chunks: int,
    num_microbatches: int,
    group: int,
    warmup_per_hop: int,
    weight_lag: int,
    split: bool,
) -> Codes: ...
def zero_bubble_v(num_ranks: int, num_microbatches: int) -> Codes: ...
def dualpipe_v(num_ranks: int, num_microbatches: int) -> Codes: ...
