import numpy as np
from numpy.typing import NDArray

from pptune.executors import Executor
from pptune.schedules.orders import Codes

class Posts:
    def posted_after_rows(self) -> NDArray[np.int32]: ...

def posts_of(
    codes: Codes, ranks: NDArray[np.int64], num_microbatches: int, executor: Executor
) -> Posts: ...
