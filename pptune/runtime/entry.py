"""Models of the user's own: `package.module:function`, the only user code that pptune runs.

The function takes no arguments and returns the model's layers, either as a list
[first, *blocks, last] or as an object with `embedding`, `blocks` and `head`:

* the first layer takes token ids [batch, seq], or what `example_batch` gives as inputs;
* every block takes and returns one tensor of one shape and dtype, batch first: it is what is sent
  between ranks. The blocks must be alike (equal parameters), because one of them is measured;
* the last layer's output goes into the loss with the targets.

The object may also have `example_batch(batch_size) -> (inputs, targets)` and
`loss(output, targets) -> scalar`. Without them inputs are token ids below the first nn.Embedding's
size, targets are token ids, and the loss is the cross-entropy of the logits [batch, seq, vocab].
"""

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import nn

from pptune.errors import PptuneError, RuntimeFailure, UsageError
from pptune.model import ModelSpec

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class UserModel:
    """What the user's function returned."""

    embedding: nn.Module
    blocks: Sequence[nn.Module]
    head: nn.Module
    example_batch: Callable[[int], Batch] | None
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None

    @property
    def vocab_size(self) -> int | None:
        """Rows of the first nn.Embedding in the first layer, or None without one."""
        for module in self.embedding.modules():
            if isinstance(module, nn.Embedding):
                return module.num_embeddings
        return None


def load_entry(entry: str) -> UserModel:
    """Import and call `package.module:function`.

    Raises UsageError for a function that isn't there or returns something else, and
    RuntimeFailure with the exception's own words where the user's code fails.
    """
    module_name, _, function_name = entry.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and module_name.startswith(error.name):
            raise UsageError(
                f"model {entry}: there is no module {module_name} on the path; run pptune from "
                "the folder that contains it, or set PYTHONPATH"
            ) from error
        raise _failed(entry, "importing it", error) from error
    except Exception as error:
        raise _failed(entry, "importing it", error) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise UsageError(f"model {entry}: {module_name} has no function {function_name}")
    try:
        returned = function()
    except Exception as error:
        raise _failed(entry, "calling it", error) from error
    return _user_model(entry, returned)


def _user_model(entry: str, returned: Any) -> UserModel:
    if isinstance(returned, (list, tuple, nn.Sequential, nn.ModuleList)):
        layers = list(returned)
        if len(layers) < 3:
            raise UsageError(
                f"model {entry}: the list has {len(layers)} layers; it needs the first, at least "
                "one block, and the last"
            )
        parts: tuple[Any, list[Any], Any] = (layers[0], layers[1:-1], layers[-1])
    else:
        try:
            parts = (returned.embedding, list(returned.blocks), returned.head)
        except (AttributeError, TypeError):
            raise UsageError(
                f"model {entry}: got a {type(returned).__name__}; return a list of modules "
                "[first, *blocks, last], or an object with embedding, blocks and head"
            ) from None
    embedding, blocks, head = parts
    for number, layer in enumerate([embedding, *blocks, head]):
        if not isinstance(layer, nn.Module):
            raise UsageError(
                f"model {entry}: layer {number} is a {type(layer).__name__}, not an nn.Module"
            )
    if not blocks:
        raise UsageError(f"model {entry}: it has no blocks; a pipeline needs at least one")
    return UserModel(
        embedding=embedding,
        blocks=blocks,
        head=head,
        example_batch=getattr(returned, "example_batch", None),
        loss=getattr(returned, "loss", None),
    )


def completed_spec(spec: ModelSpec) -> ModelSpec:
    """`spec` with what only the layers themselves tell: their number, hidden size, vocabulary.

    Calls the user's function and passes one sequence through the layers. Raises what `load_entry`
    raises, and UsageError where the layers don't chain.
    """
    assert spec.entry is not None
    user = load_entry(spec.entry)
    inputs, _ = example_batch(user, spec, 1)
    boundary = check_chain(spec.entry, user, inputs)
    return msgspec.structs.replace(
        spec,
        num_layers=len(user.blocks),
        hidden_size=boundary.shape[-1] if boundary.dim() == 3 else None,
        vocab_size=user.vocab_size,
    )


def example_batch(user: UserModel, spec: ModelSpec, batch_size: int) -> Batch:
    """Inputs and targets of `batch_size` sequences, from the user or as token ids."""
    if user.example_batch is not None:
        try:
            inputs, targets = user.example_batch(batch_size)
        except Exception as error:
            raise _failed(str(spec.entry), "calling its example_batch", error) from error
        return inputs, targets
    vocab = user.vocab_size
    if vocab is None:
        raise UsageError(
            f"model {spec.entry}: the first layer has no nn.Embedding, so its input can't be "
            "guessed; return an object with example_batch(batch_size) -> (inputs, targets)"
        )
    ids = torch.randint(vocab, (batch_size, spec.seq_len + 1))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def check_chain(entry: str, user: UserModel, inputs: torch.Tensor) -> torch.Tensor:
    """The boundary tensor of a batch, after checking that the layers fit one another.

    Raises UsageError naming the layer whose output does not fit, or that differs from its siblings.
    """
    sizes = [sum(p.numel() for p in block.parameters()) for block in user.blocks]
    for number, size in enumerate(sizes):
        if size != sizes[0]:
            raise UsageError(
                f"model {entry}: block {number} has {size} parameters and block 0 has {sizes[0]}; "
                "blocks must be alike, since one of them stands for all"
            )
    with torch.no_grad():
        boundary = _run(entry, "the first layer", user.embedding, inputs)
        x = boundary
        for number, block in enumerate(user.blocks):
            x = _run(entry, f"block {number} ({type(block).__name__})", block, x)
            if x.shape != boundary.shape or x.dtype != boundary.dtype:
                raise UsageError(
                    f"model {entry}: block {number} ({type(block).__name__}) turns "
                    f"{_words(boundary)} into {_words(x)}; a block must keep shape and dtype"
                )
        _run(entry, f"the last layer ({type(user.head).__name__})", user.head, x)
    return boundary


def _run(entry: str, what: str, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    try:
        output = layer(x)
    except Exception as error:
        raise UsageError(
            f"model {entry}: {what} does not take {_words(x)}: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(output, torch.Tensor):
        raise UsageError(
            f"model {entry}: {what} returns a {type(output).__name__}; layers pass one tensor on"
        )
    return output


def _words(x: torch.Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"


def _failed(entry: str, doing: str, error: Exception) -> PptuneError:
    if isinstance(error, PptuneError):
        return error
    return RuntimeFailure(f"model {entry}: {doing} failed: {type(error).__name__}: {error}")
