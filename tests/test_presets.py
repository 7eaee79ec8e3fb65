"""MODEL on the command line: presets against published sizes, config.json in all its forms."""

import json
from pathlib import Path

import pytest

from pptune.errors import FileError, UsageError
from pptune.model import ModelSpec
from pptune.presets import DEFAULT_MODEL, MAX_DEFAULT_SEQ_LEN, PRESETS, read_config, resolve_model

# Parameter counts of the published checkpoints (model cards and transformers' num_parameters()).
PUBLISHED_PARAMETERS = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "mistral-7b": 7_241_732_096,
}


@pytest.mark.parametrize(("name", "parameters"), PUBLISHED_PARAMETERS.items())
def test_presets_have_their_published_size(name: str, parameters: int) -> None:
    assert PRESETS[name].num_parameters() == parameters


def test_every_preset_resolves_and_the_default_is_small() -> None:
    for name, spec in PRESETS.items():
        assert resolve_model(name) == spec
        assert spec.name == name
        assert spec.num_parameters()
    assert (PRESETS[DEFAULT_MODEL].num_parameters() or 0) < 20e6


def test_the_small_presets_differ_in_compute_per_message() -> None:
    def intensity(spec: ModelSpec) -> float:
        return (spec.block_flops_per_sequence() or 0) / (spec.seq_len * (spec.hidden_size or 0))

    assert intensity(PRESETS["gpt-small-cpu"]) > 1.2 * intensity(PRESETS["gpt-long-cpu"])


def test_seq_len_replaces_the_models_own() -> None:
    assert resolve_model("gpt2", seq_len=64).seq_len == 64
    assert resolve_model("pkg.mod:make", seq_len=64).seq_len == 64
    with pytest.raises(UsageError, match="--seq-len is 0"):
        resolve_model("gpt2", seq_len=0)


def test_a_function_is_a_custom_model() -> None:
    spec = resolve_model("package.module:function")
    assert (spec.family, spec.entry) == ("custom", "package.module:function")


@pytest.mark.parametrize("text", ["gpt-2", "llama3-8b", "no such", "package:module:x", "a.b"])
def test_what_is_no_model_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="neither a preset"):
        resolve_model(text)


def test_a_typo_gets_suggestions() -> None:
    with pytest.raises(UsageError, match=r"did you mean .*gpt2-xl"):
        resolve_model("gpt2-x1")


LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64,
    "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 2,
    "intermediate_size": 160, "vocab_size": 1000, "max_position_embeddings": 131072,
    "rope_scaling": {"rope_type": "frontier", "unheard_of": [1, {"deep": None}]},
    "tie_word_embeddings": True,
}  # fmt: skip


def write(tmp_path: Path, config: object, name: str = "config.json") -> Path:
    path = tmp_path / name
    path.write_text(json.dumps(config))
    return path


def without(*names: str) -> dict[str, object]:
    return {key: value for key, value in LLAMA.items() if key not in names}


def test_a_llama_config_with_strange_keys(tmp_path: Path) -> None:
    spec = read_config(write(tmp_path, LLAMA))
    assert (spec.family, spec.num_layers, spec.hidden_size, spec.num_heads) == ("llama", 6, 64, 8)
    assert (spec.num_kv_heads, spec.ffn_size, spec.vocab_size) == (2, 160, 1000)
    assert spec.tie_word_embeddings
    assert spec.seq_len == MAX_DEFAULT_SEQ_LEN
    assert spec.hf_config == LLAMA


def test_the_folder_of_a_config_is_enough(tmp_path: Path) -> None:
    write(tmp_path, LLAMA)
    assert resolve_model(str(tmp_path)).num_layers == 6
    assert resolve_model(str(tmp_path / "config.json"), seq_len=256).seq_len == 256


@pytest.mark.parametrize(
    ("dropped", "field", "value"),
    [
        ("num_key_value_heads", "num_kv_heads", 8),  # no grouped-query attention
        ("tie_word_embeddings", "tie_word_embeddings", False),
        ("rope_scaling", "num_layers", 6),
        ("model_type", "family", "llama"),
        ("max_position_embeddings", "seq_len", MAX_DEFAULT_SEQ_LEN),
    ],
)
def test_what_may_be_absent(tmp_path: Path, dropped: str, field: str, value: object) -> None:
    assert getattr(read_config(write(tmp_path, without(dropped))), field) == value


@pytest.mark.parametrize(
    ("dropped", "named"),
    [
        (["hidden_size"], "hidden_size or n_embd"),
        (["num_hidden_layers", "vocab_size"], "num_hidden_layers.*vocab_size"),
        (["intermediate_size"], "intermediate_size"),
        (["num_attention_heads"], "num_attention_heads"),
    ],
)
def test_what_is_missing_is_named(tmp_path: Path, dropped: list[str], named: str) -> None:
    with pytest.raises(FileError, match=named):
        read_config(write(tmp_path, without(*dropped)))


def test_a_gpt2_config(tmp_path: Path) -> None:
    config = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_inner": None,
              "vocab_size": 50257, "n_positions": 1024}  # fmt: skip
    spec = read_config(write(tmp_path, config))
    assert spec.family == "gpt"
    assert spec.tie_word_embeddings
    assert spec.num_parameters() == PUBLISHED_PARAMETERS["gpt2"]


@pytest.mark.parametrize("model_type", ["mistral", "qwen2"])
def test_relatives_of_llama(tmp_path: Path, model_type: str) -> None:
    spec = read_config(write(tmp_path, {**LLAMA, "model_type": model_type}))
    assert spec.family == "llama"


def test_a_multimodal_model_is_read_by_its_text_part(tmp_path: Path) -> None:
    spec = read_config(write(tmp_path, {"model_type": "gemma3", "text_config": LLAMA}))
    assert spec.num_layers == 6


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_hidden_layers": "6"}, "num_hidden_layers is '6'"),
        ({"hidden_size": -64}, "hidden_size is -64"),
        ({"hidden_size": True}, "hidden_size is True"),
        ({"num_attention_heads": 7}, "multiple of 7 heads"),
        ({"num_key_value_heads": 3}, "multiple of 3 key-value heads"),
        ({"num_local_experts": 8}, "mixture of experts"),
    ],
)
def test_impossible_sizes_are_refused(
    tmp_path: Path, changed: dict[str, object], message: str
) -> None:
    with pytest.raises(FileError, match=message):
        read_config(write(tmp_path, {**LLAMA, **changed}))


@pytest.mark.parametrize("content", ["", "{", "[1]", '"llama"', "[" * 100_000])
def test_what_is_no_config_is_refused_in_one_line(tmp_path: Path, content: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(FileError) as refused:
        read_config(path)
    assert "\n" not in str(refused.value)
    with pytest.raises(FileError, match="cannot read"):
        read_config(tmp_path / "absent.json")


def test_names(tmp_path: Path) -> None:
    assert read_config(write(tmp_path, {**LLAMA, "_name_or_path": "org/some-7b"})).name == "some-7b"
    assert read_config(write(tmp_path, LLAMA)).name == tmp_path.name
    assert read_config(write(tmp_path, LLAMA, "other.json")).name == "other"
