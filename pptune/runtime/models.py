"""ModelSpec -> real torch modules, a stage at a time.

A stage of given layers gets the same weights whichever plan it belongs to: every layer is
initialised under a seed of its own.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from pptune.errors import UsageError
from pptune.model import ModelSpec
from pptune.runtime import entry, huggingface, transformer


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
    sizes = transformer.sizes_of(spec)
    is_gpt = spec.family == "gpt"
    description, block = _blocks(spec, sizes)
    return LayerSource(
        description=description,
        embedding=partial(
            transformer.GptEmbedding if is_gpt else transformer.LlamaEmbedding, sizes
        ),
        block=block,
        head=partial(transformer.GptHead if is_gpt else transformer.LlamaHead, sizes),
    )


def _blocks(spec: ModelSpec, sizes: transformer.Sizes) -> tuple[str, Callable[[int], nn.Module]]:
    """Whose blocks, and how to make block i: the library's where it has them, else ours."""
    description = f"{spec.family} layers of the model's sizes"
    library_class = huggingface.block_class(spec)
    if library_class is not None:
        try:
            with torch.device("meta"):
                huggingface.build_block(spec, 0)
            return f"transformers {library_class.__name__}", partial(huggingface.build_block, spec)
        except Exception as error:
            description += f" (transformers rejects the config: {type(error).__name__}: {error})"
    elif spec.hf_config is not None:
        description += f" (no transformers layer for {spec.hf_config.get('model_type')!r} here)"
    head_dim = (spec.hf_config or {}).get("head_dim")
    if head_dim not in (None, sizes.head_dim):
        raise UsageError(
            f"model {spec.name} has a head size of {head_dim}, but hidden size / heads is "
            f"{sizes.head_dim}; such layers need the transformers library: "
            "pip install 'pptune[hf]'"
        )
    ours = transformer.GptBlock if spec.family == "gpt" else transformer.LlamaBlock
    return description, lambda _: ours(sizes)


class Stage(nn.Module):
    """Consecutive layers of a model: what one pipeline stage computes."""

    def __init__(
        self,
        *,
        embedding: nn.Module | None,
        blocks: Sequence[nn.Module],
        head: nn.Module | None,
        recompute: bool,
    ) -> None:
        super().__init__()
        self.embedding = embedding
        self.blocks = nn.ModuleList(blocks)
        self.head = head
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Token ids [batch, seq] on the first stage, hidden states [batch, seq, hidden] on others.

        Logits [batch, seq, vocab] from the last stage, hidden states from others. With recompute a
        block keeps only its input and runs its forward again before its backward.
        """
        if self.embedding is not None:
            x = self.embedding(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        if self.head is not None:
            x = self.head(x)
        return x


def build_stage(
    spec: ModelSpec,
    *,
    blocks: int,
    first: bool,
    last: bool,
    dtype: torch.dtype,
    device: torch.device,
    recompute: str = "none",
    first_block: int = 0,
    seed: int = 0,
) -> Stage:
    """The stage with `blocks` blocks from `first_block` on, in training mode on `device`.

    `first` adds the embedding, `last` the head. Tied embeddings are built as two copies: over a
    pipeline they live on different ranks.
    """
    with _seeded(seed, device):
        source = layer_source(spec)

    def built(number: int, make: Callable[[], nn.Module]) -> nn.Module:
        with _seeded(seed * 1_000_003 + number, device), torch.device(device):
            return make().to(device=device, dtype=dtype)

    stage = Stage(
        embedding=built(0, source.embedding) if first else None,
        blocks=[
            built(1 + index, partial(source.block, index))
            for index in range(first_block, first_block + blocks)
        ],
        head=built(1 + spec.num_layers, source.head) if last else None,
        recompute=recompute == "full",
    )
    return stage.train()


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Draw from `seed` inside, and leave torch's generators as they were."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def stage_boundaries(
    spec: ModelSpec,
    batch_size: int,
    *,
    first: bool,
    last: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Stand-ins for a stage's input and output, as PipelineStage wants them.

    They carry shape, dtype and requires_grad; those of built-in models hold no memory.
    """
    if spec.entry is not None:
        return _user_boundaries(spec, batch_size, first=first, last=last, dtype=dtype)
    sizes = transformer.sizes_of(spec)
    ids = torch.empty(batch_size, spec.seq_len, dtype=torch.int64, device="meta")
    hidden = torch.empty(
        batch_size, spec.seq_len, sizes.hidden, dtype=dtype, device="meta", requires_grad=True
    )
    logits = torch.empty(
        batch_size, spec.seq_len, sizes.vocab, dtype=dtype, device="meta", requires_grad=True
    )
    return ids if first else hidden, logits if last else hidden


def _user_boundaries(
    spec: ModelSpec, batch_size: int, *, first: bool, last: bool, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    user = entry.load_entry(str(spec.entry))
    inputs, _ = entry.example_batch(user, spec, batch_size)
    with torch.no_grad():
        hidden = user.embedding(inputs)
        output = user.head(hidden) if last else hidden
    return (
        inputs if first else hidden.to(dtype).requires_grad_(),
        output.to(dtype).requires_grad_(),
    )


def example_batch(
    spec: ModelSpec,
    batch_size: int,
    *,
    device: torch.device,
    dtype: torch.dtype,
    seed: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of `batch_size` sequences, the same on every rank for one seed.

    Token ids [batch, seq] and the ids that follow them, or what the user's `example_batch` gives
    (floating inputs in `dtype`).
    """
    with _seeded(seed, torch.device("cpu")):
        if spec.entry is not None:
            user = entry.load_entry(spec.entry)
            inputs, targets = entry.example_batch(user, spec, batch_size)
            if inputs.is_floating_point():
                inputs = inputs.to(dtype)
            return inputs.to(device), targets.to(device)
        vocab = transformer.sizes_of(spec).vocab
        ids = torch.randint(vocab, (batch_size, spec.seq_len + 1)).to(device)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def loss_function(spec: ModelSpec) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """(last stage's output, targets) -> scalar: the user's loss, or `cross_entropy`."""
    if spec.entry is not None:
        user = entry.load_entry(spec.entry)
        if user.loss is not None:
            return user.loss
    return cross_entropy


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean loss of logits [batch, seq, vocab] and ids [batch, seq], in 32 bits as trainers do."""
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
