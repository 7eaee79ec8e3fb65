"""ModelSpec -> real torch modules, a stage at a time.

A stage of given layers gets the same weights whichever plan it belongs to: every layer is
initialised under a seed of its own.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from pptune.errors import UsageError
from pptune.model import ModelSpec
from pptune.runtime import entry, huggingface, transformer

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a profile's `dtype`. Raises UsageError for one that isn't trained in."""
    if name not in _DTYPES:
        raise UsageError(f"dtype {name!r} is unknown; use {', '.join(_DTYPES)}")
    return _DTYPES[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSource:
    """Makes a model's layers one at a time, so that a rank builds only its own."""

    description: str
    """Whose layers they are; a note where they stand in for others."""
    embedding: Callable[[], nn.Module]
    block: Callable[[int], nn.Module]
    head: Callable[[], nn.Module]


def layer_source(spec: ModelSpec) -> LayerSource:
    """The layers of `spec`: the user's, the transformers library's, or ours of the same sizes.

    Raises UsageError where sizes are missing, and what `load_entry` raises.
    """
    if spec.entry is not None:
        user = entry.load_entry(spec.entry)
        return LayerSource(
            description=f"layers of {spec.entry}",
            embedding=lambda: user.embedding,
            block=lambda index: user.blocks[index % len(user.blocks)],
            head=lambda: user.head,
        )
    sizes = transformer.Sizes(spec)
    is_gpt = spec.family == "gpt"
    ours = transformer.GptBlock if is_gpt else transformer.LlamaBlock
    description, block = f"{spec.family} layers of the model's sizes", lambda _: ours(sizes)
    library_class = huggingface.block_class(spec)
    if library_class is not None:
        try:
            huggingface.build_block(_narrowed(spec), 0)
        except Exception as error:
            description += f" (transformers rejects the config: {type(error).__name__}: {error})"
        else:
            description = f"transformers' {library_class.__name__}"
            block = lambda index: huggingface.build_block(spec, index)  # noqa: E731
    elif spec.hf_config is not None:
        description += f" (no transformers layer for {spec.hf_config.get('model_type')!r} here)"
    return LayerSource(
        description=description,
        embedding=lambda: (transformer.GptEmbedding if is_gpt else transformer.LlamaEmbedding)(
            sizes
        ),
        block=block,
        head=lambda: (transformer.GptHead if is_gpt else transformer.LlamaHead)(sizes),
    )
