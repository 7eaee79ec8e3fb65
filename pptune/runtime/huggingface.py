"""Blocks of the transformers library, for models that came from a config.json.

A trainer runs these very layers, so their times are measured rather than those of a look-alike.
Attention is full and causal: sliding windows of a config are not applied.
"""

from typing import Any

import torch
from torch import nn

from pptune.model import ModelSpec

_BLOCKS = {
    "gpt2": ("transformers.models.gpt2.modeling_gpt2", "GPT2Block"),
    "llama": ("transformers.models.llama.modeling_llama", "LlamaDecoderLayer"),
    "mistral": ("transformers.models.mistral.modeling_mistral", "MistralDecoderLayer"),
    "qwen2": ("transformers.models.qwen2.modeling_qwen2", "Qwen2DecoderLayer"),
}
_ROTARY = {
    "llama": ("transformers.models.llama.modeling_llama", "LlamaRotaryEmbedding"),
    "mistral": ("transformers.models.mistral.modeling_mistral", "MistralRotaryEmbedding"),
    "qwen2": ("transformers.models.qwen2.modeling_qwen2", "Qwen2RotaryEmbedding"),
}


class HuggingFaceBlock(nn.Module):
    """[batch, seq, hidden] -> the same shape, through one decoder layer of transformers.

    The rotary tables are computed once here, as a model computes them once for all its layers.
    """

    def __init__(self, layer: nn.Module, rotary: nn.Module | None, seq_len: int) -> None:
        super().__init__()
        self.layer = layer
        self.has_rotary = rotary is not None
        if rotary is not None:
            cosine, sine = rotary(torch.zeros(1), torch.arange(seq_len)[None])
            self.cosine = nn.Buffer(cosine, persistent=False)
            self.sine = nn.Buffer(sine, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        arguments: dict[str, Any] = {}
        if self.has_rotary:
            seq = x.shape[1]
            arguments["position_embeddings"] = (self.cosine[:, :seq], self.sine[:, :seq])
        out = self.layer(x, **arguments)
        hidden: torch.Tensor = out[0] if isinstance(out, tuple) else out
        return hidden


def block_class(spec: ModelSpec) -> type[nn.Module] | None:
    """The library's own layer for `spec`, or None: no config, an unknown type, not installed."""
    model_type = (spec.hf_config or {}).get("model_type")
    return _load(_BLOCKS.get(str(model_type)))


def build_block(spec: ModelSpec, index: int) -> HuggingFaceBlock:
    """Block `index` of the model. Raises whatever the library raises for a config it rejects."""
    from transformers import AutoConfig

    given = dict(spec.hf_config or {})
    model_type = str(given.pop("model_type"))
    config = AutoConfig.for_model(model_type, **given)
    config._attn_implementation = "sdpa"
    layer_class, rotary_class = _load(_BLOCKS[model_type]), _load(_ROTARY.get(model_type))
    assert layer_class is not None
    rotary = None if rotary_class is None else rotary_class(config)
    return HuggingFaceBlock(layer_class(config, index), rotary, spec.seq_len)


def _load(place: tuple[str, str] | None) -> type[Any] | None:
    if place is None:
        return None
    import importlib

    try:
        found: type[Any] = getattr(importlib.import_module(place[0]), place[1])
    except (ImportError, AttributeError):
        return None
    return found
