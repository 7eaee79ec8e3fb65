"""The modules that ranks run, against parameter formulas, transformers' layers and autograd."""

import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from pptune.errors import RuntimeFailure, UsageError
from pptune.model import ModelSpec
from pptune.presets import read_config, resolve_model
from pptune.runtime import entry, models, transformer

CPU = torch.device("cpu")


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Tiny products gain nothing from a second thread, and lose much on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


GPT = ModelSpec(
    name="g", family="gpt", num_layers=4, seq_len=16, hidden_size=32, num_heads=4, num_kv_heads=4,
    ffn_size=128, vocab_size=61,
)  # fmt: skip
LLAMA = ModelSpec(
    name="l", family="llama", num_layers=4, seq_len=16, hidden_size=32, num_heads=4,
    num_kv_heads=2, ffn_size=88, vocab_size=61,
)  # fmt: skip
BOTH = pytest.mark.parametrize("spec", [GPT, LLAMA], ids=["gpt", "llama"])


def stage(
    spec: ModelSpec,
    blocks: int,
    *,
    first: bool = False,
    last: bool = False,
    first_block: int = 0,
    recompute: str = "none",
    seed: int = 0,
) -> models.Stage:
    return models.build_stage(
        spec, blocks=blocks, first=first, last=last, dtype=torch.float32, device=CPU,
        recompute=recompute, first_block=first_block, seed=seed,
    )  # fmt: skip


def num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@BOTH
def test_parameters_are_those_of_the_formulas(spec: ModelSpec) -> None:
    assert num_parameters(stage(spec, 1)) == spec.block_parameters()
    assert num_parameters(stage(spec, 4, first=True, last=True)) == spec.num_parameters()


@BOTH
def test_a_token_does_not_see_those_after_it(spec: ModelSpec) -> None:
    whole = stage(spec, 2, first=True, last=True)
    ids, _ = models.example_batch(spec, 1, device=CPU, dtype=torch.float32)
    changed = ids.clone()
    changed[0, 10] = (ids[0, 10] + 1) % 61
    before, after = whole(ids), whole(changed)
    torch.testing.assert_close(before[:, :10], after[:, :10])
    assert not torch.allclose(before[:, 10:], after[:, 10:])


@BOTH
def test_stages_compose_to_the_whole_model(spec: ModelSpec) -> None:
    ids, targets = models.example_batch(spec, 2, device=CPU, dtype=torch.float32)
    whole = stage(spec, 4, first=True, last=True)
    first, second = stage(spec, 1, first=True), stage(spec, 3, first_block=1, last=True)
    loss = models.cross_entropy(whole(ids), targets)
    cut_loss = models.cross_entropy(second(first(ids)), targets)
    assert cut_loss.item() == loss.item()
    loss.backward()
    cut_loss.backward()
    cut_gradients = [p.grad for part in (first, second) for p in part.parameters()]
    for expected, gradient in zip(whole.parameters(), cut_gradients, strict=True):
        torch.testing.assert_close(gradient, expected.grad)


@BOTH
def test_recompute_changes_memory_and_not_gradients(spec: ModelSpec) -> None:
    ids, targets = models.example_batch(spec, 2, device=CPU, dtype=torch.float32)
    gradients = []
    for recompute in ("none", "full"):
        whole = stage(spec, 2, first=True, last=True, recompute=recompute)
        models.cross_entropy(whole(ids), targets).backward()
        gradients.append([parameter.grad for parameter in whole.parameters()])
    for kept, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(kept, recomputed)


def test_weights_follow_the_seed_and_the_layer_only() -> None:
    first = stage(GPT, 1, first_block=2)
    torch.manual_seed(77)  # the caller's own drawing must not matter
    again = stage(GPT, 3, first_block=0)
    assert torch.equal(first.blocks[0].qkv.weight, again.blocks[2].qkv.weight)
    assert not torch.equal(again.blocks[0].qkv.weight, again.blocks[2].qkv.weight)
    other = stage(GPT, 1, first_block=2, seed=1)
    assert not torch.equal(first.blocks[0].qkv.weight, other.blocks[0].qkv.weight)


def test_building_leaves_the_callers_random_state_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    stage(GPT, 1, first=True)
    models.example_batch(GPT, 2, device=CPU, dtype=torch.float32)
    assert torch.equal(torch.rand(1), expected)


def test_targets_are_the_following_tokens() -> None:
    ids, targets = models.example_batch(GPT, 3, device=CPU, dtype=torch.float32)
    assert ids.shape == targets.shape == (3, 16)
    assert torch.equal(ids[:, 1:], targets[:, :-1])


@BOTH
@pytest.mark.parametrize(("first", "last"), [(True, False), (False, False), (False, True)])
def test_boundaries_are_those_of_the_real_stage(spec: ModelSpec, first: bool, last: bool) -> None:
    inputs, outputs = models.stage_boundaries(
        spec, 3, first=first, last=last, dtype=torch.bfloat16, device=CPU
    )
    module = stage(spec, 1, first=first, last=last).to(torch.bfloat16)
    real = torch.zeros(inputs.shape, dtype=inputs.dtype, requires_grad=inputs.requires_grad)
    output = module(real)
    assert (output.shape, output.dtype) == (outputs.shape, outputs.dtype)
    assert outputs.requires_grad


def test_loss_is_the_mean_negative_log_likelihood() -> None:
    logits = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(1))
    targets = torch.arange(10).view(2, 5) % 7
    by_hand = [
        -torch.log_softmax(logits[i, j], 0)[targets[i, j]] for i in range(2) for j in range(5)
    ]
    torch.testing.assert_close(models.cross_entropy(logits, targets), torch.stack(by_hand).mean())


def test_missing_sizes_are_named() -> None:
    bare = ModelSpec(name="bare", family="llama", num_layers=2, seq_len=8, hidden_size=4)
    with pytest.raises(UsageError, match="num_heads, ffn_size, vocab_size"):
        stage(bare, 1)


# --- against the transformers library -------------------------------------------------------------

HF_CONFIGS = {
    "llama": {"num_key_value_heads": 2, "intermediate_size": 88, "max_position_embeddings": 64},
    "mistral": {"num_key_value_heads": 2, "intermediate_size": 88, "sliding_window": 8},
    "qwen2": {"num_key_value_heads": 2, "intermediate_size": 88, "use_sliding_window": False},
}


def hf_spec(tmp_path: Path, model_type: str) -> ModelSpec:
    import json

    sizes: dict[str, object]
    if model_type == "gpt2":
        sizes = {"n_embd": 32, "n_layer": 4, "n_head": 4, "vocab_size": 61, "n_positions": 16,
                 "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # fmt: skip
    else:
        sizes = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4,
                 "vocab_size": 61, **HF_CONFIGS[model_type]}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, **sizes}))
    return read_config(tmp_path / "config.json")


@pytest.mark.parametrize(
    ("model_type", "layer"),
    [("gpt2", "GPT2Block"), ("llama", "LlamaDecoderLayer"), ("mistral", "MistralDecoderLayer"),
     ("qwen2", "Qwen2DecoderLayer")],
)  # fmt: skip
def test_a_config_gets_the_librarys_own_layers(tmp_path: Path, model_type: str, layer: str) -> None:
    pytest.importorskip("transformers")
    spec = hf_spec(tmp_path, model_type)
    assert layer in models.layer_source(spec).description
    whole = stage(spec, 2, first=True, last=True)
    assert type(whole.blocks[0].layer).__name__ == layer
    ids, targets = models.example_batch(spec, 2, device=CPU, dtype=torch.float32)
    loss = models.cross_entropy(whole(ids), targets)
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in whole.parameters())


def test_our_llama_block_computes_what_the_librarys_does(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    spec = hf_spec(tmp_path, "llama")
    theirs = stage(spec, 1).blocks[0]
    ours = transformer.LlamaBlock(transformer.sizes_of(spec))
    names = {
        "attention_norm": "input_layernorm", "query": "self_attn.q_proj",
        "key": "self_attn.k_proj", "value": "self_attn.v_proj",
        "attention_out": "self_attn.o_proj", "mlp_norm": "post_attention_layernorm",
        "mlp_gate": "mlp.gate_proj", "mlp_up": "mlp.up_proj", "mlp_down": "mlp.down_proj",
    }  # fmt: skip
    for own, library in names.items():
        state = theirs.layer.get_submodule(library).state_dict()
        ours.get_submodule(own).load_state_dict(state)
    x = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-4, atol=1e-5)


def test_our_gpt_block_computes_what_the_librarys_does(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    spec = hf_spec(tmp_path, "gpt2")
    theirs = stage(spec, 1).blocks[0]
    ours = transformer.GptBlock(transformer.sizes_of(spec))
    norms = {"attention_norm": "ln_1", "mlp_norm": "ln_2"}
    # GPT-2 keeps its matrices transposed (Conv1D).
    products = {"qkv": "attn.c_attn", "attention_out": "attn.c_proj", "mlp_up": "mlp.c_fc",
                "mlp_down": "mlp.c_proj"}  # fmt: skip
    for own, library in norms.items():
        ours.get_submodule(own).load_state_dict(theirs.layer.get_submodule(library).state_dict())
    for own, library in products.items():
        state = theirs.layer.get_submodule(library).state_dict()
        ours.get_submodule(own).load_state_dict(
            {"weight": state["weight"].T, "bias": state["bias"]}
        )
    x = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-4, atol=1e-5)


def test_an_unknown_type_gets_our_layers_and_says_so(tmp_path: Path) -> None:
    spec = hf_spec(tmp_path, "llama")
    assert spec.hf_config is not None
    strange = ModelSpec(
        **{
            **{field: getattr(spec, field) for field in spec.__struct_fields__},
            "hf_config": {**spec.hf_config, "model_type": "frontier9"},
        }
    )
    assert "no transformers layer for 'frontier9'" in models.layer_source(strange).description
    assert num_parameters(stage(strange, 1)) == spec.block_parameters()


# --- the user's own layers ------------------------------------------------------------------------


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    source = """
        import torch
        from torch import nn

        class Head(nn.Module):
            def __init__(self):
                super().__init__()
                self.out = nn.Linear(8, 31)
            def forward(self, x):
                return self.out(x)

        def make(blocks=None, head=None):
            blocks = blocks or [nn.Linear(8, 8) for _ in range(3)]
            return [nn.Embedding(31, 8), *blocks, head or Head()]

        def narrowing():
            return make([nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(4, 8)])

        def narrowing_alike():
            return make([nn.Sequential(nn.Linear(8, 8)), nn.Sequential(nn.Linear(8, 8),
                         nn.Flatten(1))])

        def wrong_head():
            return make(head=nn.Linear(9, 31))

        def failing():
            raise ValueError("no checkpoint here")

        def short():
            return [nn.Embedding(3, 4), nn.Linear(4, 3)]

        def nothing():
            return 5

        class Regression:
            embedding = nn.Linear(6, 8)
            blocks = [nn.Linear(8, 8), nn.Linear(8, 8)]
            head = nn.Linear(8, 1)
            def example_batch(self, batch_size):
                return torch.ones(batch_size, 6), torch.zeros(batch_size, 1)
            def loss(self, output, target):
                return ((output - target) ** 2).mean()

        def regression():
            return Regression()

        def blind():
            return [nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 1)]

        not_callable = 3
    """
    name = f"user_layers_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(textwrap.dedent(source))
    (tmp_path / f"{name}_broken.py").write_text("import numpy as np\nnp.absent_function()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield name
    sys.modules.pop(name, None)


def test_a_list_of_modules_becomes_a_model(user_module: str) -> None:
    spec = entry.completed_spec(resolve_model(f"{user_module}:make", seq_len=12))
    assert (spec.num_layers, spec.hidden_size, spec.vocab_size) == (3, 8, 31)
    ids, targets = models.example_batch(spec, 2, device=CPU, dtype=torch.float32)
    assert ids.shape == (2, 12)
    first, last = stage(spec, 1, first=True), stage(spec, 2, first_block=1, last=True)
    loss = models.loss_function(spec)(last(first(ids)), targets)
    loss.backward()
    inputs, outputs = models.stage_boundaries(
        spec, 2, first=False, last=True, dtype=torch.float32, device=CPU
    )
    assert (inputs.shape, outputs.shape) == ((2, 12, 8), (2, 12, 31))
    assert inputs.requires_grad


def test_an_object_brings_its_own_batch_and_loss(user_module: str) -> None:
    spec = entry.completed_spec(resolve_model(f"{user_module}:regression"))
    inputs, targets = models.example_batch(spec, 4, device=CPU, dtype=torch.bfloat16)
    assert (inputs.dtype, targets.shape) == (torch.bfloat16, (4, 1))
    output = torch.full((4, 1), 3.0)
    assert models.loss_function(spec)(output, targets).item() == 9.0


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("narrowing", "block 1 has 36 parameters and block 0 has 72"),
        ("narrowing_alike", r"block 1 \(Sequential\) turns float32 \[1, 128, 8\] into float32"),
        ("wrong_head", r"the last layer \(Linear\) does not take float32 \[1, 128, 8\]"),
        ("short", "has 2 layers"),
        ("nothing", "got a int"),
        ("blind", "example_batch"),
        ("absent", "no function absent"),
        ("not_callable", "no function not_callable"),
    ],
)
def test_layers_that_do_not_fit_are_named(user_module: str, function: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        entry.completed_spec(resolve_model(f"{user_module}:{function}"))


def test_failing_user_code_is_the_environments_failure(user_module: str) -> None:
    with pytest.raises(RuntimeFailure, match="ValueError: no checkpoint here") as failure:
        entry.load_entry(f"{user_module}:failing")
    assert failure.value.exit_code == 3
    with pytest.raises(RuntimeFailure, match="importing it failed: AttributeError"):
        entry.load_entry(f"{user_module}_broken:make")
    with pytest.raises(UsageError, match="there is no module absent_package"):
        entry.load_entry("absent_package.inner:make")
