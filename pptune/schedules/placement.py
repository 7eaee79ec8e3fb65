"""Which rank holds which stage."""

from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Placement = Literal["loop", "v"]


@lru_cache(maxsize=256)
def rank_of_stages(num_ranks: int, num_stages: int, placement: Placement) -> NDArray[np.int64]:
    """The rank that holds each stage; int64[num_stages], not to be written to.

    Loop: stage s lives on rank s mod P. V: the second chunk comes back, 2P - 1 - s.
    """
    stages = np.arange(num_stages, dtype=np.int64)
    ranks = stages % num_ranks
    if placement == "v":
        ranks = np.minimum(stages, 2 * num_ranks - 1 - stages)
    ranks.flags.writeable = False
    return ranks
