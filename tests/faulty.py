"""Tiny user models for `package.module:function` that misbehave where they are told to.

`PPTUNE_FAULT` in the environment is `kind:rank:where`, such as `raise:1:forward`. The rank is told
by the process group; without one (a function that is only called) every process counts as rank 0.
"""

import os
import signal
import time

import torch
import torch.distributed as dist
from torch import nn

VOCAB, HIDDEN, SEQ = 61, 32, 16


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def misbehave(where: str) -> None:
    """Do what the environment asks of this rank at this place; usually nothing."""
    kind, _, rest = os.environ.get("PPTUNE_FAULT", "").partition(":")
    number, _, place = rest.partition(":")
    if place != where or int(number) != rank():
        return
    match kind:
        case "raise":
            raise ValueError("planted by the test")
        case "oserror":
            raise FileNotFoundError("weights.bin is not there")
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit":
            os._exit(7)
        case "hang":
            time.sleep(600)
        case "oom":
            torch.empty(2**60)


class Block(nn.Module):
    """A small residual MLP, [batch, seq, hidden] -> the same."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, HIDDEN))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        misbehave("forward")
        # The last micro-batch size that a plan uses, so that only some plans meet the fault.
        misbehave(f"forward-b{x.shape[0]}")
        return x + self.inner(x)


def model() -> list[nn.Module]:
    """Four blocks between an embedding and a head; `build` is the place where it is made."""
    misbehave("build")
    return [nn.Embedding(VOCAB, HIDDEN), *(Block() for _ in range(4)), nn.Linear(HIDDEN, VOCAB)]


def forks() -> list[nn.Module]:
    """A model whose construction leaves a process of its own running."""
    if os.fork() == 0:
        time.sleep(600)
        os._exit(0)
    return model()
