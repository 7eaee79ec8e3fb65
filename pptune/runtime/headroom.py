"""Will it fit? Asked before a size is tried, since a machine out of memory kills, not raises."""

import torch

from pptune.hardware import available_memory_bytes
from pptune.model import ModelSpec

_ATTENTION_AND_MLP_BYTES = 17
"""Elements that a block keeps per token and hidden unit without attention matrices: 34 bytes at
2 bytes per element (arXiv 2205.05198, eq. 1, without the terms in a s / h)."""

_KEPT_SHARE = 0.9
"""Share of the free memory that may be taken."""


def free_bytes(device: torch.device, ranks_on_node: int) -> int | None:
    """Bytes that this rank may still take, or None where the system doesn't say.

    Ranks on CPU share their node's memory evenly; a CUDA device belongs to one rank, and what its
    allocator holds without using it counts as free.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(_KEPT_SHARE * (free + unused))
    available = available_memory_bytes()
    return None if available is None else int(_KEPT_SHARE * available / ranks_on_node)


def parameter_bytes_needed(spec: ModelSpec, blocks: int, element_bytes: int) -> int:
    """Bytes of embedding, `blocks` blocks and head with gradients and Adam's two moments.

    0 where the model's sizes aren't known.
    """
    block, whole = spec.block_parameters(), spec.num_parameters()
    if block is None or whole is None:
        return 0
    ends = whole - spec.num_layers * block
    return 4 * element_bytes * (ends + blocks * block)


def activation_bytes_needed(
    spec: ModelSpec, microbatch_size: int, blocks: int, element_bytes: int
) -> int:
    """A rough count of what one forward and backward of a stack or of the head holds at most.

    0 where the model's sizes aren't known. Only for the smallest size; larger ones are scaled from
    what was measured.
    """
    if spec.hidden_size is None or spec.vocab_size is None:
        return 0
    tokens = microbatch_size * spec.seq_len
    stack = blocks * _ATTENTION_AND_MLP_BYTES * tokens * spec.hidden_size * element_bytes
    # Logits, their 32-bit copy, its log-softmax and its gradient.
    head = tokens * spec.vocab_size * (2 * element_bytes + 3 * 4)
    return max(2 * stack, head)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, whatever the error was wrapped in on its way."""
    chain: BaseException | None = error
    while chain is not None:
        if isinstance(chain, (torch.OutOfMemoryError, MemoryError)):
            return True
        if "can't allocate memory" in str(chain):  # torch's CPU allocator raises RuntimeError
            return True
        chain = chain.__cause__ or chain.__context__
    return False
