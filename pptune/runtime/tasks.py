"""What a rank can be asked to do, by name."""

from collections.abc import Callable
from typing import Any

from pptune.runtime.rank import RankContext


def ping(context: RankContext) -> dict[str, Any]:
    """Answer with the rank and its node: tells that every rank has joined."""
    return {"rank": context.rank, "node": context.node}


TASKS: dict[str, Callable[..., Any]] = {"ping": ping}
