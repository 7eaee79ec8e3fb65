"""Exported files: what they say, read by parsers other than ours where there are any."""

import ast
import contextlib
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import tomllib
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pptune import schedules
from pptune.errors import PlanError, UsageError
from pptune.model import ModelSpec
from pptune.plan import Plan, Schedule, make_plan
from pptune.targets import (
    TARGETS,
    ExportedFile,
    check_written,
    export,
    illegal,
    parse_target,
    reread,
)
from pptune.targets.torch_rules import needs_loaded_order

EXPORTERS = [name for name in TARGETS if name != "torch@2.4"]


def model(num_layers: int, **changes: Any) -> ModelSpec:
    spec = ModelSpec(
        name="tiny",
        family="llama",
        num_layers=num_layers,
        seq_len=16,
        hidden_size=32,
        num_heads=4,
        num_kv_heads=2,
        ffn_size=64,
        vocab_size=64,
    )
    return msgspec.structs.replace(spec, **changes)


def exported(plan: Plan, target: str, **options: Any) -> list[ExportedFile]:
    spec = options.pop("model", model(plan.num_layers))
    dtype = options.pop("dtype", "float32")
    return export(
        plan, parse_target(target), model=spec, dtype=dtype, seq_len=16, profile_name="p.json",
        **options,
    )  # fmt: skip


def text(plan: Plan, target: str, **options: Any) -> str:
    return exported(plan, target, **options)[0].text


def make(
    schedule: Schedule,
    layers: tuple[int, ...],
    ranks: int,
    microbatches: int,
    *,
    size: int = 1,
    data: int = 1,
    group: int | None = None,
    recompute: Any = "none",
    empty: bool = False,
) -> Plan:
    return make_plan(
        schedule=schedule,
        num_ranks=ranks,
        num_chunks=len(layers) // ranks,
        microbatch_size=size,
        num_microbatches=microbatches,
        layers_per_stage=layers,
        microbatch_group_size=group,
        data_parallel=data,
        recompute=recompute,
        allow_empty_stages=empty,
    )


HEADERS = {
    "torch@2.13": "torch.distributed.pipelining (torch 2.13)",
    "megatron@0.20": "Megatron-LM core 0.20",
    "megatron-bridge@0.6": "Megatron-Bridge 0.6",
    "nemo@2.0": "NeMo 2.0",
    "torchtitan@0.2": "torchtitan 0.2",
    "torchtitan@main": "torchtitan main (August 2026)",
    "deepspeed@0.19": "DeepSpeed 0.19",
    "nanotron@main": "nanotron main (April 2026)",
    "accelerate@1.15": "accelerate 1.15 with Megatron-LM",
    "mindspeed@main": "MindSpeed main (July 2026)",
}

# P = 4, V = 2, b = 1, M = 16, DP = 2, L = 38; embedding and head count as one layer each.
EXAMPLE = make("interleaved", (4, 5, 5, 5, 5, 5, 5, 4), 4, 16, data=2)

PLANS = [
    EXAMPLE,
    make("1f1b", (10, 10, 10, 10), 4, 16, size=2, data=2),
    make("1f1b", (7, 8, 8, 7), 4, 8),
    make("1f1b", (3, 1, 2, 4), 4, 8, recompute="full"),
    make("1f1b", (12,), 1, 8, size=4, data=8),
    make("interleaved", (2,) * 16, 8, 16, size=2, data=2, recompute="full"),
    make("interleaved", (2,) * 6, 2, 8, group=6),
    make("interleaved", (6, 8, 8, 9, 6, 8, 8, 9), 4, 10, data=3),
    make("interleaved", (2,) * 35 + (3, 2, 2, 2, 1), 8, 128),
    make("1f1b", (8, 9, 9, 9, 8), 5, 64, data=2),
    make("gpipe", (2, 3), 2, 4),
    make("looped-bfs", (1, 2, 2, 1), 2, 4, size=3),
    make("zb-v", (1, 2, 2, 1), 2, 6),
    make("dualpipe-v", (2,) * 8, 4, 16),
    make("interleaved-zb", (2,) * 8, 4, 8),
]


@pytest.mark.parametrize("target", EXPORTERS)
def test_every_legal_plan_is_read_back_as_itself(target: str) -> None:
    """`export` compares what it wrote with the plan; here the fields are counted once more."""
    num_legal = 0
    for plan in PLANS:
        if illegal(plan, parse_target(target)) is not None:
            with pytest.raises(PlanError, match="cannot be exported"):
                exported(plan, target)
            continue
        num_legal += 1
        files = exported(plan, target)
        written = reread(files, parse_target(target), num_layers=plan.num_layers)
        assert written.num_ranks * written.num_chunks == plan.num_stages
        assert (
            written.microbatch_size * written.num_microbatches * written.data_parallel
            == plan.global_batch_size
        )
        if written.layers_per_stage is not None:
            assert sum(written.layers_per_stage) == plan.num_layers
        for file in files:
            if not file.name.endswith((".json", ".csv")):
                words = re.sub(r"\n#\s*", " ", file.text)
                assert f"{HEADERS[target]}: {plan.label} " in words
                assert "A checkpoint's layout follows" in words
    assert num_legal >= 5


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    ranks, chunks = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    stages = ranks * chunks
    microbatches = draw(st.integers(1, 12))
    interleaved = chunks > 1
    return make(
        "interleaved" if interleaved else draw(st.sampled_from(("1f1b", "gpipe"))),
        tuple(draw(st.lists(st.integers(1, 4), min_size=stages, max_size=stages))),
        ranks,
        microbatches,
        size=draw(st.integers(1, 3)),
        data=draw(st.integers(1, 3)),
        group=draw(st.none() | st.integers(1, microbatches)) if interleaved else None,
        recompute=draw(st.sampled_from(("none", "full"))),
    )


@settings(max_examples=60, deadline=None, derandomize=True)
@given(plan=plans(), tensor=st.sampled_from((1, 2)), zero=st.sampled_from((0, 1)))
def test_any_plan_is_written_whole_or_refused(plan: Plan, tensor: int, zero: int) -> None:
    """Conservation: no exporter loses a layer, a stage or a micro-batch."""
    for name in EXPORTERS:
        target = parse_target(name)
        options = {"zero": zero, "tensor_parallel": 1 if target.name == "torch" else tensor}
        if illegal(plan, target, model=model(plan.num_layers), **options) is not None:
            with pytest.raises(PlanError):
                exported(plan, name, **options)
            continue
        files = exported(plan, name, **options)
        written = reread(files, target, num_layers=plan.num_layers)
        check_written(plan, written)
        assert written.num_microbatches * written.microbatch_size * written.data_parallel == (
            plan.global_batch_size
        )


MUTATIONS = [
    ("torch", "NUM_MICROBATCHES = 8", "NUM_MICROBATCHES = 4"),
    ("torch", "LAYERS_PER_STAGE = (4, 4, 4, 4)", "LAYERS_PER_STAGE = (4, 4, 3, 5)"),
    ("torch", "((0,), (1,), (2,), (3,))", "((0,), (1,), (2,), (2,))"),
    ("megatron", "--micro-batch-size 2", "--micro-batch-size 1"),
    ("megatron", "--pipeline-model-parallel-size 4", "--pipeline-model-parallel-size 2"),
    ("megatron", "PROCESSES=8", "PROCESSES=16"),
    ("megatron-bridge", "train.global_batch_size=32", "train.global_batch_size=64"),
    ("megatron-bridge", "parallel_size=null", "parallel_size=2"),
    ("nemo", "pipeline_model_parallel_size=4", "pipeline_model_parallel_size=2"),
    ("torchtitan", "layers_per_stage = 4", "layers_per_stage = 2"),
    ("torchtitan", '"1F1B"', '"GPipe"'),
    ("torchtitan@main", "per_dp_rank = 32", "per_dp_rank = 16"),
    ("torchtitan@main", "activation_checkpoint = None", "activation_checkpoint = FullAC.Config()"),
    ("deepspeed", '"train_batch_size": 32', '"train_batch_size": 16'),
    ("deepspeed", "NUM_STAGES = 4", "NUM_STAGES = 2"),
    ("nanotron", "pp_engine: 1f1b", "pp_engine: afab"),
    ("nanotron", "dp: 2", "dp: 4"),
    ("accelerate", "num_micro_batches=8", "num_micro_batches=4"),
    ("accelerate", "'recompute_granularity': None", "'recompute_granularity': 'full'"),
    ("mindspeed", "--num-layers 16", "--num-layers 20"),
]


@pytest.mark.parametrize(("target", "old", "new"), MUTATIONS)
def test_a_wrong_text_is_noticed(target: str, old: str, new: str) -> None:
    plan = make("1f1b", (4, 4, 4, 4), 4, 8, size=2, data=2)
    files = exported(plan, target)
    broken = [ExportedFile(file.name, file.text.replace(old, new)) for file in files]
    assert broken != files
    with pytest.raises(PlanError):
        check_written(plan, reread(broken, parse_target(target), num_layers=16))


def flags_by_bash(script: str, folder: Path) -> tuple[list[str], dict[str, str]]:
    """Arguments and environment that the script gives to torchrun, by running it in bash."""
    (folder / "plan.sh").write_text(script)
    fake = folder / "torchrun"
    fake.write_text(
        f"#!{sys.executable}\nimport json, os, sys\nprint(json.dumps([sys.argv[1:], "
        "os.environ.get('CUDA_DEVICE_MAX_CONNECTIONS')]))\n"
    )
    fake.chmod(0o755)
    environment = {"PATH": f"{folder}:{os.environ['PATH']}"}
    result = subprocess.run(
        ["bash", "plan.sh", "pretrain_gpt.py", "--lr", "1e-4"],
        cwd=folder, env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    arguments, connections = json.loads(result.stdout)
    return arguments, {"CUDA_DEVICE_MAX_CONNECTIONS": connections}


def value_after(arguments: list[str], flag: str) -> str:
    return arguments[arguments.index(flag) + 1]


def test_megatron_script_gives_its_options_to_torchrun(tmp_path: Path) -> None:
    plan = PLANS[8]
    script = text(plan, "megatron", tensor_parallel=4)
    arguments, environment = flags_by_bash(script, tmp_path)
    assert arguments[arguments.index("pretrain_gpt.py") + 1 :][:2] == ["--lr", "1e-4"]
    layout = value_after(arguments, "--pipeline-model-parallel-layout")
    assert layout == "Et*2|(t*2|)*34t*3|(t*2|)*3tL"
    assert "--num-virtual-stages-per-pipeline-rank" not in arguments  # a layout excludes it
    assert value_after(arguments, "--microbatch-group-size-per-virtual-pipeline-stage") == "8"
    assert value_after(arguments, "--eval-global-batch-size") == "128"
    assert value_after(arguments, "--nnodes") == "4"
    assert value_after(arguments, "--nproc-per-node") == "8"
    assert environment["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"


def test_connections_are_limited_only_where_it_helps(tmp_path: Path) -> None:
    _, environment = flags_by_bash(text(EXAMPLE, "megatron"), tmp_path)
    assert environment["CUDA_DEVICE_MAX_CONNECTIONS"] is None
    _, environment = flags_by_bash(text(EXAMPLE, "megatron", context_parallel=2), tmp_path)
    assert environment["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"


def array(script: str) -> list[str]:
    body = script.split("=(\n", 1)[1].split("\n)\n", 1)[0]
    return shlex.split(body)


class TestOneePlanForAll:
    """The mapping of one plan to every trainer."""

    def test_megatron(self) -> None:
        arguments = array(text(EXAMPLE, "megatron"))
        assert "--account-for-embedding-in-pipeline-split" in arguments
        assert "--account-for-loss-in-pipeline-split" in arguments
        assert value_after(arguments, "--num-virtual-stages-per-pipeline-rank") == "2"
        assert value_after(arguments, "--global-batch-size") == "32"
        assert "'Et*4|(t*5|)*6t*4L'" in text(EXAMPLE, "megatron")

    def test_bridge(self) -> None:
        overrides = dict(word.split("=", 1) for word in array(text(EXAMPLE, "megatron-bridge")))
        assert overrides["model.virtual_pipeline_model_parallel_size"] == "2"
        assert overrides["model.account_for_embedding_in_pipeline_split"] == "true"
        assert overrides["model.account_for_loss_in_pipeline_split"] == "true"
        assert overrides["train.global_batch_size"] == "32"
        assert overrides["model.microbatch_group_size_per_vp_stage"] == "4"
        assert overrides["comm_overlap.overlap_p2p_comm"] == "true"
        single = dict(word.split("=", 1) for word in array(text(PLANS[1], "megatron-bridge")))
        assert single["model.virtual_pipeline_model_parallel_size"] == "null"
        assert single["comm_overlap.overlap_p2p_comm"] == "false"
        assert single["comm_overlap.batch_p2p_comm"] == "true"

    def test_torchtitan_release(self) -> None:
        config = tomllib.loads(text(EXAMPLE, "torchtitan"))
        parallelism, training = config["parallelism"], config["training"]
        assert parallelism["pipeline_parallel_schedule"] == "Interleaved1F1B"
        assert parallelism["pipeline_parallel_layers_per_stage"] == 5
        assert parallelism["pipeline_parallel_microbatch_size"] == 1
        assert training["local_batch_size"] == 16
        assert training["global_batch_size"] == 32
        assert config["activation_checkpoint"]["mode"] == "none"

    def test_torchtitan_main(self) -> None:
        config = SimpleNamespace(
            parallelism=SimpleNamespace(), training=SimpleNamespace(), activation_checkpoint=1
        )
        source = text(EXAMPLE, "torchtitan@main")
        functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
        scope: dict[str, Any] = {"llama3_8b": lambda: config}
        exec(compile(ast.Module(functions, []), "<config>", "exec"), scope)
        assert scope["planned_config"]() is config
        assert config.parallelism.num_pp_microbatches == 16
        assert config.training.num_tokens_per_microbatch_per_dp_rank == 16
        assert config.training.num_tokens_per_train_step == 32 * 16
        assert config.parallelism.pipeline_parallel_schedule == "Interleaved1F1B"
        assert config.parallelism.pipeline_parallel_layers_per_stage == 5
        assert config.activation_checkpoint is None

    def test_torch(self) -> None:
        source = text(EXAMPLE, "torch")
        assert "STAGES_OF_RANK = ((0, 4), (1, 5), (2, 6), (3, 7))" in source
        assert "schedules.ScheduleInterleaved1F1B(stages, NUM_MICROBATCHES" in source

    def test_deepspeed(self) -> None:
        with pytest.raises(PlanError, match="no virtual stages"):
            exported(EXAMPLE, "deepspeed")
        files = exported(make("1f1b", (9, 10, 10, 9), 4, 16, data=2), "deepspeed")
        config = json.loads(files[0].text)
        assert config["gradient_accumulation_steps"] == 16
        assert config["train_batch_size"] == 32

    def test_nanotron(self) -> None:
        with pytest.raises(PlanError, match="no virtual stages"):
            exported(EXAMPLE, "nanotron")
        entries = text(make("1f1b", (10, 9, 10, 9), 4, 16, data=2), "nanotron")
        assert "  batch_accumulation_per_replica: 16\n" in entries
        assert "  pp_engine: 1f1b\n" in entries
        assert "  pp_engine: afab\n" in text(PLANS[10], "nanotron")

    def test_accelerate(self) -> None:
        other = plugin_fields(text(EXAMPLE, "accelerate"))["other_megatron_args"]
        assert other["pipeline_model_parallel_layout"] == "Et*4|(t*5|)*6t*4L"
        even = plugin_fields(text(PLANS[5], "accelerate"))
        assert even["num_layers_per_virtual_pipeline_stage"] == 2
        assert "pipeline_model_parallel_layout" not in even["other_megatron_args"]

    def test_mindspeed(self) -> None:
        arguments = array(text(EXAMPLE, "mindspeed"))
        nested = json.loads(value_after(arguments, "--pipeline-num-transformer-layers"))
        assert nested == [[4, 5], [5, 5], [5, 5], [5, 4]]
        assert value_after(arguments, "--num-virtual-stages-per-pipeline-rank") == "2"


def plugin_fields(source: str) -> dict[str, Any]:
    """The keywords of MegatronLMPlugin, by running the file with stand-ins for accelerate."""
    caught: dict[str, Any] = {}

    def plugin(**words: Any) -> None:
        caught.update(words)

    body = [node for node in ast.parse(source).body if not isinstance(node, ast.ImportFrom)]
    scope = {"MegatronLMPlugin": plugin, "Accelerator": lambda **words: None}
    exec(compile(ast.Module(body, []), "<plug-in>", "exec"), scope)
    return caught


class TestUserCases:
    """Behaviour that users of the trainers asked for in public threads."""

    def test_22_evaluation_obeys_the_interleaving_rule(self) -> None:
        # NVIDIA/Megatron-LM PR #5022: PP2, 32 layers, 8 per virtual stage, b 4, DP 32
        plan = make("interleaved", (8,) * 4, 2, 8, size=4, data=32)
        arguments = array(text(plan, "megatron"))
        size = int(value_after(arguments, "--eval-micro-batch-size"))
        batch = int(value_after(arguments, "--eval-global-batch-size"))
        assert (size, batch // (size * 32)) == (4, 8)
        assert "--eval-global-batch-size" not in array(text(PLANS[1], "megatron"))

    def test_28_one_rank_never_gets_flags_for_its_ends(self) -> None:
        # NVIDIA/Megatron-LM #1778: 20 layers became 1
        arguments = array(text(make("1f1b", (20,), 1, 4), "megatron"))
        assert not [word for word in arguments if word.startswith("--decoder-")]
        assert value_after(arguments, "--num-layers") == "20"
        two = array(text(make("1f1b", (3, 1), 2, 4), "megatron"))
        assert value_after(two, "--decoder-first-pipeline-num-layers") == "3"
        assert value_after(two, "--decoder-last-pipeline-num-layers") == "1"

    def test_31_empty_stages_only_by_leave(self) -> None:
        # NVIDIA/Megatron-LM #1852
        plan = make("1f1b", (2, 0, 1, 2), 4, 8, empty=True)
        with pytest.raises(PlanError, match="0 layers"):
            exported(plan, "megatron")
        script = text(plan, "megatron", allow_empty_stages=True)
        assert "'Et*2||t|t*2L'" in script
        assert "hung" in script

    def test_55_recompute_divides_every_virtual_stage(self) -> None:
        # NVIDIA/Megatron-LM #1807
        arguments = array(text(PLANS[3], "megatron"))
        assert value_after(arguments, "--recompute-granularity") == "full"
        assert value_after(arguments, "--recompute-method") == "uniform"
        unit = int(value_after(arguments, "--recompute-num-layers"))
        assert all(blocks % unit == 0 for blocks in PLANS[3].layers_per_stage)
        assert "--recompute-granularity" not in array(text(EXAMPLE, "megatron"))
        assert "the unit of --recompute-num-layers" in re.sub(
            r"\n#\s*", " ", text(PLANS[3], "mindspeed")
        )

    def test_26_deepspeed_notes_few_microbatches(self) -> None:
        # deepspeedai/DeepSpeed #4164: M < 8 P is a note, not an error
        few = exported(make("1f1b", (10,) * 4, 4, 16), "deepspeed")[1].text
        assert "15.8%" in few  # 3 / (16 + 3)
        enough = exported(make("1f1b", (10,) * 4, 4, 32), "deepspeed")[1].text
        assert "gradient_accumulation_steps" not in enough


def test_a_ramp_is_warned_of() -> None:
    script = re.sub(r"\n#\s*", " ", text(EXAMPLE, "megatron"))
    assert "--step-batch-size-schedule" in script
    assert "multiple of 4 or leave at least 4 over" in script
    assert "ramp" not in text(PLANS[1], "megatron")


def test_yaml_is_read_the_same_by_a_yaml_parser() -> None:
    yaml = pytest.importorskip("yaml")
    plan = make("1f1b", (10, 10), 2, 16, size=2, data=4, recompute="full")
    entries = yaml.safe_load(text(plan, "nanotron", tensor_parallel=2, context_parallel=2, zero=1))
    assert entries["parallelism"] == {
        "dp": 4, "pp": 2, "tp": 2, "pp_engine": "1f1b", "recompute_layer": True,
        "context_parallel_size": 2, "expert_parallel_size": 1,
    }  # fmt: skip
    assert entries["tokens"] == {
        "sequence_length": 16, "micro_batch_size": 2, "batch_accumulation_per_replica": 16,
    }  # fmt: skip
    assert entries["optimizer"] == {"zero_stage": 1}


def test_nanotron_tells_that_it_splits_by_itself() -> None:
    # Head = 128256 x 4096, block = 4 x 4096^2 + 3 x 14336 x 4096: 2.16 blocks; a rank goes on
    # until it has passed its share of 34.16 blocks, 8.54.
    spec = model(32, hidden_size=4096, ffn_size=14336, vocab_size=128256)
    even = re.sub(r"\n#\s*", " ", text(make("1f1b", (8,) * 4, 4, 8), "nanotron", model=spec))
    assert "its own is [9, 9, 8, 6]" in even
    own = text(make("1f1b", (9, 9, 8, 6), 4, 8), "nanotron", model=spec)
    assert "its own" not in own


def test_torchtitan_lists_modules_where_its_own_split_differs() -> None:
    plan = make("1f1b", (3, 1, 2, 4), 4, 8)
    parts = tomllib.loads(text(plan, "torchtitan"))["parallelism"]["module_fqns_per_model_part"]
    assert parts[0] == ["tok_embeddings", "layers.0", "layers.1", "layers.2"]
    assert parts[1] == ["layers.3"]
    assert parts[3][-2:] == ["norm", "output"]
    assert sum(len(part) for part in parts) == 10 + 3
    assert "lm_head" in text(plan, "torchtitan@main")


def test_torchtitan_without_a_pipeline_accumulates() -> None:
    config = tomllib.loads(text(make("1f1b", (12,), 1, 8, size=4, data=2), "torchtitan"))
    assert config["training"]["local_batch_size"] == 4
    assert config["training"]["global_batch_size"] == 64


def test_torchtitan_gets_a_loaded_order() -> None:
    plan = make("interleaved", (2,) * 4, 2, 6, group=3)
    config, order = exported(plan, "torchtitan")
    parallelism = tomllib.loads(config.text)["parallelism"]
    assert parallelism["pipeline_parallel_schedule_csv"] == order.name
    rank_0, rank_1 = (line.split(",") for line in order.text.splitlines())
    assert rank_0[:6] == ["0F0", "0F1", "0F2", "2F0", "2F1", "2F2"][:6]
    assert len(rank_0) == len(rank_1) == 2 * 2 * 6
    assert len(exported(EXAMPLE, "torchtitan")) == 1


def test_zero_1_in_every_trainers_words() -> None:
    plan = make("1f1b", (4, 4), 2, 4, data=4)
    wanted = {
        "megatron": "--use-distributed-optimizer",
        "megatron-bridge": "ddp.use_distributed_optimizer=true",
        "nemo": "use_distributed_optimizer=True",
        "torchtitan": "data_parallel_shard_degree = 4",
        "torch": "ZeroRedundancyOptimizer(",
        "deepspeed": '"stage": 1',
        "nanotron": "zero_stage: 1",
        "accelerate": "use_distributed_optimizer=True",
        "mindspeed": "--use-distributed-optimizer",
    }
    for target, words in wanted.items():
        assert words in text(plan, target, zero=1), target
        assert words not in text(plan, target), target


def test_nothing_is_written_that_cannot_run() -> None:
    with pytest.raises(PlanError, match="use 8 or 10, or --chunks 1"):
        exported(make("interleaved", (1,) * 8, 4, 9), "torch")
    with pytest.raises(PlanError, match="tie_word_embeddings"):
        exported(PLANS[10], "torch", model=model(5, tie_word_embeddings=True))
    with pytest.raises(PlanError, match="6 layers, but model tiny has 5"):
        exported(make("1f1b", (3, 3), 2, 4), "torch", model=model(5))
    with pytest.raises(PlanError, match="lacks sizes"):
        exported(PLANS[10], "torch", model=model(5, ffn_size=None))
    with pytest.raises(PlanError, match="tensor parallelism"):
        exported(PLANS[10], "torch", tensor_parallel=2)
    with pytest.raises(PlanError, match="fp8"):
        exported(PLANS[10], "torch", dtype="fp8")
    with pytest.raises(PlanError, match=r"package\.module:function"):
        exported(PLANS[10], "torch", model=model(5, entry='os:system("x")'))
    with pytest.raises(UsageError, match="--target torch"):
        exported(PLANS[10], "torch@2.4")


def test_names_cannot_break_out_of_a_comment() -> None:
    spec = model(5, name="tiny\nrm -rf $HOME\n'''")
    for target in EXPORTERS:
        plan = make("1f1b", (3, 2), 2, 4)
        for file in exported(plan, target, model=spec):
            if not file.name.endswith(".json"):
                lines = [line for line in file.text.splitlines() if "rm -rf" in line]
                assert lines
                assert all(line.startswith("#") for line in lines)


LOSS = re.compile(r"^step \d+ loss (\S+)$", re.MULTILINE)

STEPS = ["--steps", "4", "--learning-rate", "1e-2"]


def falls(losses: list[float]) -> bool:
    return all(later < earlier for earlier, later in pairwise(losses))


def cpu_environment(folder: Path) -> dict[str, str]:
    return os.environ | {
        "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder),
    }  # fmt: skip


@pytest.mark.dist
def test_the_torch_script_trains_on_two_ranks(tmp_path: Path) -> None:
    plan = make("interleaved", (1, 1, 2, 1), 2, 4, size=2)
    (tmp_path / "plan.py").write_text(text(plan, "torch"))
    result = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
            "plan.py", *STEPS,
        ],
        cwd=tmp_path, env=cpu_environment(tmp_path), capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    losses = [float(loss) for loss in LOSS.findall(result.stdout)]
    assert len(losses) == 4
    assert falls(losses)


USER_MODULE = """
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(8, 8)

    def forward(self, x):
        return x + self.mix(x).tanh()


def layers():
    return [nn.Embedding(32, 8), Block(), Block(), Block(), nn.Linear(8, 32)]
"""

USERS_MODEL = model(3, family="custom", entry="mine:layers", vocab_size=32, ffn_size=None)
GPT = model(4, family="gpt")

ALONE = make("gpipe", (4,), 1, 4, size=2)
TWO_REPLICAS = make("1f1b", (4,), 1, 2, data=2)

PLANS_LIKE_ALONE = [
    make("1f1b", (2, 2), 2, 4, size=2),
    make("gpipe", (3, 1), 2, 4, size=2),
    make("interleaved", (1, 1, 1, 1), 2, 4, size=2, recompute="full"),
    make("interleaved", (1, 1, 1, 1), 2, 4, size=2, group=4),
    make("looped-bfs", (1, 1, 1, 1), 2, 4, size=2),
    make("interleaved-zb", (1, 1, 1, 1), 2, 4, size=2),
    make("zb-v", (1, 1, 1, 1), 2, 4, size=2, recompute="full"),
    make("dualpipe-v", (1, 1, 1, 1), 2, 4, size=2),
    make("zb-h1", (2, 2), 2, 4, size=2),
    make("zb-h2", (2, 2), 2, 4, size=2),
]


def can_generate(plan: Plan) -> bool:
    try:
        schedules.generate(
            plan.schedule, num_ranks=plan.num_ranks, num_chunks=plan.num_chunks,
            num_microbatches=plan.num_microbatches,
        )  # fmt: skip
    except PlanError:
        return False
    return True


RUNS: dict[str, tuple[Plan, ModelSpec, dict[str, Any]]] = {
    "alone": (ALONE, GPT, {}),
    **{
        plan.label: (plan, GPT, {})
        for plan in PLANS_LIKE_ALONE
        if not needs_loaded_order(plan) or can_generate(plan)
    },
    "replicas": (TWO_REPLICAS, GPT, {}),
    "sharded": (TWO_REPLICAS, GPT, {"zero": 1}),
    "users": (make("1f1b", (1, 2), 2, 4), USERS_MODEL, {}),
}

DRIVER = """
import os, runpy, sys

names, ports, sys.argv[1:] = sys.argv[1].split(","), sys.argv[2].split(","), sys.argv[3:]
for name, port in zip(names, ports):
    world = 1 if name.startswith("alone") else 2
    os.environ.update(WORLD_SIZE=str(world), MASTER_PORT=port)
    print("script", name, flush=True)
    if int(os.environ["RANK"]) < world:
        runpy.run_path(name, run_name="__main__")
"""


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("localhost", 0))
        return [probe.getsockname()[1] for probe in probes]


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """Losses of every script in RUNS. Both ranks run all of them in turn: importing torch once."""
    folder = tmp_path_factory.mktemp("scripts")
    (folder / "mine.py").write_text(USER_MODULE)
    (folder / "driver.py").write_text(DRIVER)
    files = {name: re.sub(r"\W+", "_", name) + ".py" for name in RUNS}
    for name, (plan, spec, options) in RUNS.items():
        (folder / files[name]).write_text(text(plan, "torch", model=spec, **options))
    arguments = [",".join(files.values()), ",".join(map(str, free_ports(len(files)))), *STEPS]
    processes = [
        subprocess.Popen(
            [sys.executable, "driver.py", *arguments],
            cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=cpu_environment(folder) | {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "localhost",
            },
        )
        for rank in (0, 1)
    ]  # fmt: skip
    outputs = [process.communicate(timeout=200) for process in processes]
    for process, (_, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, errors[-3000:]
    found: dict[str, list[float]] = {name: [] for name in RUNS}
    for output, _ in outputs:
        for name, part in zip(RUNS, re.split(r"^script .*$", output, flags=re.M)[1:], strict=True):
            found[name] += [float(loss) for loss in LOSS.findall(part)]
    return found


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.xdist_group("scripts")
class TestTorchScripts:
    """Losses don't depend on the plan: layers, data and optimizer are the same."""

    @pytest.mark.parametrize("plan", PLANS_LIKE_ALONE, ids=lambda plan: plan.label)
    def test_every_plan_trains_as_one_rank_does(
        self, plan: Plan, losses: dict[str, list[float]]
    ) -> None:
        if plan.label not in losses:
            pytest.skip(f"schedules.generate does not make {plan.schedule}")
        assert len(losses["alone"]) == 4
        assert falls(losses["alone"])
        assert losses[plan.label] == pytest.approx(losses["alone"], abs=2e-3)

    def test_sharding_the_optimizer_changes_nothing(self, losses: dict[str, list[float]]) -> None:
        assert falls(losses["replicas"])
        assert losses["sharded"] == pytest.approx(losses["replicas"], abs=2e-3)

    def test_the_users_layers_train(self, losses: dict[str, list[float]]) -> None:
        assert len(losses["users"]) == 4
        assert falls(losses["users"])
