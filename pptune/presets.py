"""MODEL on the command line -> a ModelSpec: presets, Hugging Face config.json, package:function."""

import difflib
import json
import re
from collections.abc import Mapping
from pathlib import Path

import msgspec

from pptune.errors import FileError, UsageError
from pptune.model import ENTRY_PATTERN, ModelSpec

DEFAULT_MODEL = "gpt-small-cpu"

MAX_DEFAULT_SEQ_LEN = 4096
"""Cap on a config.json's max_position_embeddings, which for long-context models (131072 and more)
is far from the length they are trained at; --seq-len overrides it."""

ENTRY_SEQ_LEN = 128
"""Sequence length of a `package.module:function` model without --seq-len."""


def _gpt(
    name: str, *, num_layers: int, hidden: int, heads: int, seq_len: int, vocab: int, tie: bool
) -> ModelSpec:
    return ModelSpec(
        name=name,
        family="gpt",
        num_layers=num_layers,
        seq_len=seq_len,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=heads,
        ffn_size=4 * hidden,
        vocab_size=vocab,
        tie_word_embeddings=tie,
    )


def _llama(
    name: str,
    *,
    num_layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    ffn: int,
    vocab: int,
    seq_len: int,
    tie: bool = False,
) -> ModelSpec:
    return ModelSpec(
        name=name,
        family="llama",
        num_layers=num_layers,
        seq_len=seq_len,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        ffn_size=ffn,
        vocab_size=vocab,
        tie_word_embeddings=tie,
    )


# The two *-cpu GPTs differ in what dominates: matrix products with small messages, and long narrow
# sequences with messages large for their compute.
_ALL = (
    _gpt("gpt-small-cpu", num_layers=8, hidden=128, heads=4, seq_len=128, vocab=2048, tie=False),
    _gpt("gpt-long-cpu", num_layers=8, hidden=64, heads=2, seq_len=256, vocab=1024, tie=False),
    _llama("llama-small-cpu", num_layers=8, hidden=128, heads=4, kv_heads=2, ffn=352, vocab=2048,
           seq_len=128),
    _gpt("gpt2", num_layers=12, hidden=768, heads=12, seq_len=1024, vocab=50257, tie=True),
    _gpt("gpt2-medium", num_layers=24, hidden=1024, heads=16, seq_len=1024, vocab=50257, tie=True),
    _gpt("gpt2-large", num_layers=36, hidden=1280, heads=20, seq_len=1024, vocab=50257, tie=True),
    _gpt("gpt2-xl", num_layers=48, hidden=1600, heads=25, seq_len=1024, vocab=50257, tie=True),
    _gpt("gpt3-175b", num_layers=96, hidden=12288, heads=96, seq_len=2048, vocab=51200, tie=True),
    _llama("llama-2-7b", num_layers=32, hidden=4096, heads=32, kv_heads=32, ffn=11008,
           vocab=32000, seq_len=4096),
    _llama("llama-2-13b", num_layers=40, hidden=5120, heads=40, kv_heads=40, ffn=13824,
           vocab=32000, seq_len=4096),
    _llama("llama-2-70b", num_layers=80, hidden=8192, heads=64, kv_heads=8, ffn=28672,
           vocab=32000, seq_len=4096),
    _llama("llama-3-8b", num_layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336,
           vocab=128256, seq_len=8192),
    _llama("llama-3-70b", num_layers=80, hidden=8192, heads=64, kv_heads=8, ffn=28672,
           vocab=128256, seq_len=8192),
    _llama("llama-3.1-405b", num_layers=126, hidden=16384, heads=128, kv_heads=8, ffn=53248,
           vocab=128256, seq_len=8192),
    _llama("llama-3.2-1b", num_layers=16, hidden=2048, heads=32, kv_heads=8, ffn=8192,
           vocab=128256, seq_len=8192, tie=True),
    _llama("llama-3.2-3b", num_layers=28, hidden=3072, heads=24, kv_heads=8, ffn=8192,
           vocab=128256, seq_len=8192, tie=True),
    _llama("mistral-7b", num_layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336,
           vocab=32000, seq_len=8192),
)  # fmt: skip

PRESETS: dict[str, ModelSpec] = {spec.name: spec for spec in _ALL}


def resolve_model(text: str, *, seq_len: int | None = None) -> ModelSpec:
    """The model that `text` names: a preset, a config.json (or its folder), `package:function`.

    `seq_len` replaces the model's own. Of a function nothing is known until it is called, so its
    spec has 0 layers (see runtime/entry.py). Raises UsageError and FileError.
    """
    if seq_len is not None and seq_len < 1:
        raise UsageError(f"--seq-len is {seq_len}; it must be 1 or more")
    path = Path(text)
    if text in PRESETS:
        spec = PRESETS[text]
    elif path.is_dir():
        spec = read_config(path / "config.json")
    elif path.is_file() or path.suffix == ".json":
        spec = read_config(path)
    elif re.fullmatch(ENTRY_PATTERN, text):
        spec = ModelSpec(
            name=text, family="custom", num_layers=0, seq_len=ENTRY_SEQ_LEN, entry=text
        )
    else:
        close = difflib.get_close_matches(text, PRESETS, n=3, cutoff=0.4)
        hint = f"did you mean {', '.join(close)}? " if close else ""
        raise UsageError(
            f"model {text!r} is neither a preset, a config.json, nor package.module:function; "
            f"{hint}see `pptune profile --list-models`"
        )
    return spec if seq_len is None else msgspec.structs.replace(spec, seq_len=seq_len)


# Each size under the names that model families give it in config.json.
_KEYS = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "hidden": ("hidden_size", "n_embd"),
    "heads": ("num_attention_heads", "n_head"),
    "vocab": ("vocab_size",),
    "ffn": ("intermediate_size", "n_inner"),
    "kv heads": ("num_key_value_heads",),
    "positions": ("max_position_embeddings", "n_positions", "n_ctx"),
}
_EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


def read_config(path: str | Path) -> ModelSpec:
    """The model of a Hugging Face config.json, read offline; unknown keys are kept and ignored.

    Raises FileError for a file that is not one, and names every size that is missing.
    """
    path = Path(path)
    try:
        config = json.loads(path.read_text())
    except OSError as error:
        raise FileError(f"cannot read model config {path}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path}: not valid JSON ({error}); expected a config.json") from None
    if not isinstance(config, dict):
        raise FileError(f"{path}: not a model config; expected a JSON object with the model's size")
    text = config.get("text_config")  # multimodal models nest their language model
    if isinstance(text, dict):
        config = {**config, **text}
    return _spec_of(config, path)


def _spec_of(config: dict[str, object], path: Path) -> ModelSpec:
    experts = next((key for key in _EXPERT_KEYS if _is_size(config.get(key))), None)
    if experts is not None and config[experts] != 1:
        raise FileError(
            f"{path}: {experts} is {config[experts]}, a mixture of experts; its layers can only be "
            "measured as package.module:function"
        )
    sizes = {name: _size(config, keys, path) for name, keys in _KEYS.items()}
    is_gpt = config.get("model_type") == "gpt2" or "n_embd" in config
    if sizes["ffn"] is None and is_gpt and sizes["hidden"] is not None:
        sizes["ffn"] = 4 * sizes["hidden"]
    layers, hidden, heads = sizes["layers"], sizes["hidden"], sizes["heads"]
    vocab, ffn = sizes["vocab"], sizes["ffn"]
    if layers is None or hidden is None or heads is None or vocab is None or ffn is None:
        missing = [
            " or ".join(_KEYS[name])
            for name in ("layers", "hidden", "heads", "vocab", "ffn")
            if sizes[name] is None
        ]
        raise FileError(f"{path}: the config lacks {', '.join(missing)}; add what is missing")
    kv_heads = sizes["kv heads"] or heads
    if hidden % heads or heads % kv_heads:
        raise FileError(
            f"{path}: hidden size {hidden} must be a multiple of {heads} heads, and heads a "
            f"multiple of {kv_heads} key-value heads"
        )
    return ModelSpec(
        name=_name_of(config, path),
        family="gpt" if is_gpt else "llama",
        num_layers=layers,
        seq_len=min(sizes["positions"] or MAX_DEFAULT_SEQ_LEN, MAX_DEFAULT_SEQ_LEN),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        ffn_size=ffn,
        vocab_size=vocab,
        # transformers' own defaults where the key is absent: GPT-2 ties, the Llama family doesn't.
        tie_word_embeddings=bool(config.get("tie_word_embeddings", is_gpt)),
        hf_config=config,
    )


def _size(config: Mapping[str, object], keys: tuple[str, ...], path: Path) -> int | None:
    """The first of `keys` that has a value, or None. Raises FileError where it isn't a size."""
    for key in keys:
        value = config.get(key)
        if value is None:
            continue
        if not _is_size(value):
            raise FileError(f"{path}: {key} is {value!r}; it must be a positive whole number")
        return int(str(value))
    return None


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _name_of(config: Mapping[str, object], path: Path) -> str:
    """The repository name the config carries, else its folder's, else its type's."""
    named = config.get("_name_or_path")
    if isinstance(named, str) and named:
        return named.rstrip("/").rpartition("/")[2]
    if path.stem == "config" and path.resolve().parent.name:
        return path.resolve().parent.name
    return path.stem
