import numpy as np
from numpy.typing import NDArray

from pptune.executors import Executor
from pptune.schedules import Order
from pptune.simulator.costs import Costs

class Played:
    step_time_s: float
    longest_rank_span_s: float
    extrapolated: bool
    result: NDArray[np.float64]
    spans: NDArray[np.float64] | None

class Stuck(Exception):
    places: list[int]
    pending: list[tuple[int, int, int] | None]
    takes_turns: bool

def play(order: Order, costs: Costs, executor: Executor, spans: bool) -> Played: ...
