"""The layers of a GPT and of a Llama, built from sizes alone.

Attention is torch's fused causal attention, so that no [batch, heads, seq, seq] matrix is kept.
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from pptune.errors import UsageError
from pptune.model import ModelSpec

_ROPE_THETA = 10_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The sizes of a transformer, none missing."""

    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    seq_len: int

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


def sizes_of(spec: ModelSpec) -> Sizes:
    """The sizes of `spec`. Raises UsageError naming what is missing or what we cannot build."""
    hidden, heads, ffn, vocab = spec.hidden_size, spec.num_heads, spec.ffn_size, spec.vocab_size
    if hidden is None or heads is None or ffn is None or vocab is None:
        named = {"hidden_size": hidden, "num_heads": heads, "ffn_size": ffn, "vocab_size": vocab}
        missing = ", ".join(name for name, value in named.items() if value is None)
        raise UsageError(
            f"model {spec.name} lacks {missing}; without them its layers can only come from "
            "package.module:function"
        )
    return Sizes(
        hidden=hidden,
        heads=heads,
        kv_heads=spec.num_kv_heads or heads,
        ffn=ffn,
        vocab=vocab,
        seq_len=spec.seq_len,
    )


class GptEmbedding(nn.Module):
    """Token ids [batch, seq] -> hidden states [batch, seq, hidden]: token plus learned position."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocab, sizes.hidden)
        self.positions = nn.Parameter(torch.randn(sizes.seq_len, sizes.hidden) * 0.02)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = self.tokens(ids)
        return embedded + self.positions[: ids.shape[1]]


class GptBlock(nn.Module):
    """[batch, seq, hidden] -> the same shape: attention and MLP with LayerNorm before each."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        hidden = sizes.hidden
        self.num_heads = sizes.heads
        self.attention_norm = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.attention_out = nn.Linear(hidden, hidden)
        self.mlp_norm = nn.LayerNorm(hidden)
        self.mlp_up = nn.Linear(hidden, sizes.ffn)
        self.mlp_down = nn.Linear(sizes.ffn, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, seq, hidden = x.shape
        qkv = self.qkv(self.attention_norm(x))
        # [batch, seq, 3, heads, head_dim] -> three of [batch, heads, seq, head_dim]
        query, key, value = qkv.view(batch, seq, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).reshape(batch, seq, hidden))
        wide = functional.gelu(self.mlp_up(self.mlp_norm(x)), approximate="tanh")
        out: torch.Tensor = x + self.mlp_down(wide)
        return out


class GptHead(nn.Module):
    """Hidden states [batch, seq, hidden] -> logits [batch, seq, vocab]."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(sizes.hidden)
        self.logits = nn.Linear(sizes.hidden, sizes.vocab, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.logits(self.norm(x))
        return logits


class LlamaEmbedding(nn.Module):
    """Token ids [batch, seq] -> hidden states [batch, seq, hidden]."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocab, sizes.hidden)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = self.tokens(ids)
        return embedded


class LlamaBlock(nn.Module):
    """[batch, seq, hidden] -> the same shape: grouped-query attention and a gated MLP."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        hidden, kv_size = sizes.hidden, sizes.kv_heads * sizes.head_dim
        self.head_dim = sizes.head_dim
        self.is_grouped = sizes.kv_heads != sizes.heads
        self.attention_norm = nn.RMSNorm(hidden)
        self.query = nn.Linear(hidden, hidden, bias=False)
        self.key = nn.Linear(hidden, kv_size, bias=False)
        self.value = nn.Linear(hidden, kv_size, bias=False)
        self.attention_out = nn.Linear(hidden, hidden, bias=False)
        self.mlp_norm = nn.RMSNorm(hidden)
        self.mlp_gate = nn.Linear(hidden, sizes.ffn, bias=False)
        self.mlp_up = nn.Linear(hidden, sizes.ffn, bias=False)
        self.mlp_down = nn.Linear(sizes.ffn, hidden, bias=False)
        cosine, sine = rotary_tables(sizes.seq_len, sizes.head_dim)
        self.cosine = nn.Buffer(cosine, persistent=False)
        self.sine = nn.Buffer(sine, persistent=False)

    def _heads(self, flat: torch.Tensor) -> torch.Tensor:
        """[batch, seq, heads * head_dim] -> [batch, heads, seq, head_dim]."""
        return flat.view(*flat.shape[:2], -1, self.head_dim).transpose(1, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.attention_norm(x)
        query = self._rotate(self._heads(self.query(normed)))
        key = self._rotate(self._heads(self.key(normed)))
        value = self._heads(self.value(normed))
        attended = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=self.is_grouped
        )
        x = x + self.attention_out(attended.transpose(1, 2).flatten(2))
        normed = self.mlp_norm(x)
        out: torch.Tensor = x + self.mlp_down(
            functional.silu(self.mlp_gate(normed)) * self.mlp_up(normed)
        )
        return out

    def _rotate(self, heads: torch.Tensor) -> torch.Tensor:
        """Rotary positions on [batch, heads, seq, head_dim] (arXiv 2104.09864, eq. 34)."""
        seq = heads.shape[2]
        first, second = heads.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
        return heads * self.cosine[:seq] + turned * self.sine[:seq]


def rotary_tables(seq_len: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of the rotary angles, each [seq, head_dim]."""
    rates = _ROPE_THETA ** (-torch.arange(0, head_dim, 2).float() / head_dim)
    angles = torch.outer(torch.arange(seq_len).float(), rates)
    return torch.cat((angles, angles), dim=-1).cos(), torch.cat((angles, angles), dim=-1).sin()


class LlamaHead(nn.Module):
    """Hidden states [batch, seq, hidden] -> logits [batch, seq, vocab]."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(sizes.hidden)
        self.logits = nn.Linear(sizes.hidden, sizes.vocab, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.logits(self.norm(x))
        return logits
