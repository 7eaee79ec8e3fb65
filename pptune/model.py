"""A transformer's sizes, and what follows from them: parameters and FLOPs."""

import re
from typing import Literal

import msgspec

ENTRY_PATTERN = r"[A-Za-z_][\w.]*:[A-Za-z_]\w*"
"""What names a user's function: `package.module:function`."""

MAX_LAYERS = 100_000
MAX_SIZE = 2**30
"""Bounds on what a file may ask for: far above any model, low enough to end in reasonable time."""


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How to build the model again, and its sizes; sizes that are not known are null."""

    name: str
    family: Literal["gpt", "llama", "custom"]
    """gpt: LayerNorm, learned positions, 4h MLP with GELU. llama: RMSNorm, rotary positions, gated
    MLP, grouped-query attention. custom: `entry` builds the layers."""
    num_layers: int
    """Blocks; the embedding and the head are counted apart."""
    seq_len: int
    hidden_size: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    """Heads of keys and values; equal to `num_heads` without grouped-query attention."""
    ffn_size: int | None = None
    vocab_size: int | None = None
    tie_word_embeddings: bool = False
    entry: str | None = None
    """`package.module:function`, the only way in which pptune runs a user's code."""
    hf_config: dict[str, object] | None = None
    """The Hugging Face config.json this came from, when its own layers are to be measured."""

    def block_parameters(self) -> int | None:
        """Parameters of one block, or None where the sizes are unknown."""
        if self.hidden_size is None or self.num_heads is None or self.ffn_size is None:
            return None
        hidden, ffn = self.hidden_size, self.ffn_size
        if self.family == "gpt":
            # Attention 4h^2 + 4h, MLP 2hf + f + h, two LayerNorms 4h (arXiv 2104.04473, eq. 2).
            return 4 * hidden**2 + 4 * hidden + 2 * hidden * ffn + ffn + hidden + 4 * hidden
        kv_size = hidden // self.num_heads * (self.num_kv_heads or self.num_heads)
        return 2 * hidden**2 + 2 * hidden * kv_size + 3 * hidden * ffn + 2 * hidden

    def num_parameters(self) -> int | None:
        """Parameters of the whole model, tied embeddings counted once."""
        block = self.block_parameters()
        if block is None or self.hidden_size is None or self.vocab_size is None:
            return None
        ends = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        if self.family == "gpt":
            ends += self.seq_len * self.hidden_size + 2 * self.hidden_size
        else:
            ends += self.hidden_size
        return self.num_layers * block + ends

    def flops_per_sequence(self) -> float | None:
        """Model FLOPs of one training step per sequence, forward and backward.

        Matrix products only, 3 x forward; attention scores count the full square as the field does
        (arXiv 2205.05198, App. A). Independent of V, b, M and recompute: recomputed work is not
        model work, so that MFU falls when it is done.
        """
        if self.hidden_size is None or self.vocab_size is None:
            return None
        per_block = self.block_flops_per_sequence()
        if per_block is None:
            return None
        head = 2.0 * self.seq_len * self.hidden_size * self.vocab_size
        return 3.0 * (self.num_layers * per_block + head)

    def block_flops_per_sequence(self) -> float | None:
        """Forward FLOPs of one block for one sequence."""
        if self.hidden_size is None or self.num_heads is None or self.ffn_size is None:
            return None
        hidden, seq = self.hidden_size, self.seq_len
        kv_size = hidden // self.num_heads * (self.num_kv_heads or self.num_heads)
        projections = 2 * seq * (2 * hidden**2 + 2 * hidden * kv_size)
        attention = 4 * seq**2 * hidden
        matrices = 2 if self.family == "gpt" else 3
        return float(projections + attention + matrices * 2 * seq * hidden * self.ffn_size)


def broken_model_rule(model: ModelSpec) -> str | None:
    """What is wrong with the sizes of a model that was read from a file, or None."""
    if not 1 <= model.num_layers <= MAX_LAYERS:
        return f"model.num_layers is {model.num_layers}; it must lie in 1..{MAX_LAYERS}"
    for name in ("seq_len", "hidden_size", "num_heads", "num_kv_heads", "ffn_size", "vocab_size"):
        size = getattr(model, name)
        if size is not None and not 1 <= size <= MAX_SIZE:
            return f"model.{name} is {size}; it must lie in 1..{MAX_SIZE}"
    if model.entry is not None and re.fullmatch(ENTRY_PATTERN, model.entry) is None:
        return f"model.entry {model.entry!r} is not package.module:function"
    return None
