"""What a task knows about the rank it runs in."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True, kw_only=True)
class RankContext:
    """What a task knows about the rank it runs in."""

    rank: int
    num_ranks: int
    device: Any
    """A torch.device."""
    emit: Callable[[dict[str, Any]], None]
    """Send an event (progress, a finished point) to the agent."""
    status: Callable[[str], None]
    """Say what the rank is doing: named when it hangs or dies. Cheap enough for every action."""
    node: str
    """Where the rank runs; ranks of one node share it."""
    keep: dict[str, Any] = field(default_factory=dict)
    """What a task leaves for the next one: built models, opened links."""
