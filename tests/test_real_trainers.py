"""Our texts and rules against the trainers' own code, where it can be imported.

Install what is wanted beside torch: `pip install --no-deps megatron-core==0.16.1` needs nothing
else; torchtitan 0.2.2, accelerate and DeepSpeed 0.19 want packages of their own. A check skips
where its trainer is missing.
"""

import importlib
import itertools
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pptune import schedules
from pptune.model import ModelSpec
from pptune.plan import Plan, Schedule, make_plan
from pptune.schedules import Work
from pptune.targets import export, illegal, legal_group_sizes, parse_target
from pptune.targets.layout import check_layout, parse_layout, write_layout
from pptune.targets.split import Split, balanced_layers, built_layers, split_of
from pptune.targets.torchtitan import default_split, module_names

pytestmark = pytest.mark.filterwarnings("ignore")

MEGATRON = parse_target("megatron")


def imported(name: str) -> Any:
    """The module, or a skip with the reason. Trainers warn about what a CPU machine lacks."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module(name)
        except ImportError as error:
            pytest.skip(f"{name} cannot be imported here: {error}")


def made(
    layers: tuple[int, ...], ranks: int, microbatches: int, *, group: int | None = None
) -> Plan:
    schedule: Schedule = "interleaved" if len(layers) > ranks else "1f1b"
    return make_plan(
        schedule=schedule,
        num_ranks=ranks,
        num_chunks=len(layers) // ranks,
        microbatch_size=2,
        num_microbatches=microbatches,
        layers_per_stage=layers,
        microbatch_group_size=group,
    )


def exported(plan: Plan, target: str) -> dict[str, str]:
    spec = ModelSpec(name="tiny", family="llama", num_layers=plan.num_layers, seq_len=64)
    files = export(plan, parse_target(target), model=spec, dtype="bfloat16", seq_len=64)
    return {file.name: file.text for file in files}


def splits() -> Iterator[tuple[tuple[int, ...], int]]:
    """Blocks per stage and ranks, of every form there is."""
    for ranks, chunks in itertools.product((2, 3, 4), (1, 2, 3)):
        stages = ranks * chunks
        for layers in range(stages, 3 * stages + 1):
            yield balanced_layers(layers, stages), ranks
    yield (3, 1, 2, 4), 4
    yield (2, 3, 3, 1, 2, 3, 3, 1), 4
    yield (2,) * 35 + (3, 2, 2, 2, 1), 8
    yield (8, 9, 9, 9, 8), 5


class TestMegatronCore:
    """megatron-core 0.16.1."""

    def test_interleaved_order(self) -> None:
        core = imported("megatron.core.pipeline_parallel.schedules")
        for ranks, chunks, microbatches in itertools.product((2, 4), (2, 3), range(2, 13)):
            for group in legal_group_sizes(
                MEGATRON, schedule="interleaved", num_ranks=ranks, num_microbatches=microbatches
            ):
                order = schedules.generate(
                    "interleaved", num_ranks=ranks, num_chunks=chunks,
                    num_microbatches=microbatches, microbatch_group_size=group,
                )  # fmt: skip
                table = core.get_schedule_table(microbatches, chunks, group)
                for rank in range(ranks):
                    actions = order.actions(rank)
                    forwards = [
                        (action.microbatch, action.stage // ranks)
                        for action in actions
                        if action.work is Work.FORWARD
                    ]
                    backwards = [
                        (action.microbatch, chunks - 1 - action.stage // ranks)
                        for action in actions
                        if action.work is Work.BACKWARD
                    ]
                    assert forwards == backwards == table
                    theirs = self.warmup(core, ranks, rank, chunks, microbatches, group)
                    assert forwards_first(actions) == min(theirs + 1, chunks * microbatches)

    @staticmethod
    def warmup(core: Any, ranks: int, rank: int, chunks: int, microbatches: int, group: int) -> int:
        """Megatron's own count of forwards before the first pair of forward and backward."""
        communicator = SimpleNamespace(
            pp_group=SimpleNamespace(size=lambda: ranks, rank=lambda: rank),
            virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        )
        answer = core.get_pp_rank_microbatches(
            microbatches, chunks, group, p2p_communicator=communicator
        )
        return int(answer[2])

    def test_1f1b_order(self) -> None:
        core = imported("megatron.core.pipeline_parallel.schedules")
        for ranks, microbatches in itertools.product((2, 4, 5), range(1, 9)):
            order = schedules.generate(
                "1f1b", num_ranks=ranks, num_chunks=1, num_microbatches=microbatches
            )
            for rank in range(ranks):
                theirs = self.warmup(core, ranks, rank, 1, microbatches, ranks)
                assert forwards_first(order.actions(rank)) == min(theirs + 1, microbatches)

    def test_group_rule(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The schedule function raises for exactly the groups that we refuse."""
        core = imported("megatron.core.pipeline_parallel.schedules")
        stop_after_the_rule(core, monkeypatch)
        for ranks, microbatches in itertools.product((2, 3, 4), range(1, 12)):
            for group in range(1, microbatches + 1):
                plan = made((1,) * (2 * ranks), ranks, microbatches, group=group)
                refused = refuses_group(core, ranks, microbatches, group)
                assert refused is (illegal(plan, MEGATRON) is not None)

    def test_layout_strings(self) -> None:
        layout = imported("megatron.core.transformer.pipeline_parallel_layer_layout")
        for layers, ranks in splits():
            text = write_layout(layers)
            theirs = layout.PipelineParallelLayerLayout.from_str(text, ranks)
            theirs.validate_layer_layout(sum(layers), None)
            assert stages_of(theirs, ranks) == list(parse_layout(text))
        for text in (
            "Et*2|(t*2|)*34,t*3|(t*2|)*3,tL",
            "Et|(tt|)*29L|",
            "Et|(tt|)*29|L",
            "Et|(tt|)*28t|t|L",
            "Et|(tt|)*30L",
            "Ettt|(tt|)*29,m|L",
            "E(t|t)*3,(|t*2)*5L",
        ):
            ranks = 8 if len(parse_layout(text)) % 8 == 0 else 1
            theirs = layout.PipelineParallelLayerLayout.from_str(text, ranks)
            assert stages_of(theirs, ranks) == list(parse_layout(text))

    def test_layout_rules(self) -> None:
        """Megatron accepts and refuses the same layouts."""
        layout = imported("megatron.core.transformer.pipeline_parallel_layer_layout")
        for text, mtp in (
            ("Et|t|t|tL", 0), ("tE|t|t|tL", 0), ("Et|t|tL|t", 0), ("Et|t|t|ttL", 0),
            ("Et|tt|tL", 0), ("Et|t|t|tmL", 0), ("Ett|t|t|mL", 1), ("Et|t|t|t|||m|L", 1),
            ("Ett|m|t|tL", 1), ("Et|t|tt|m|||L|", 1),
        ):  # fmt: skip

            def theirs(text: str = text, mtp: int = mtp) -> None:
                made = layout.PipelineParallelLayerLayout(text, 4)
                made.validate_layer_layout(4, mtp or None)

            def ours(text: str = text, mtp: int = mtp) -> None:
                check_layout(parse_layout(text), num_layers=4, num_ranks=4, num_mtp_layers=mtp)

            assert fails(ours) is fails(theirs), text

    def test_splits_build_the_plans_blocks(self) -> None:
        """What our options make Megatron build, stage by stage."""
        block = imported("megatron.core.transformer.transformer_block")
        forms = set()
        for layers, ranks in splits():
            split = split_of(layers, ranks)
            forms.add((split.layout is None, split.ends is None, split.is_even))
            if split.layout is None:
                assert megatron_builds(block, split, layers, ranks) == layers
        assert len(forms) == 4

    def test_splits_that_it_refuses(self) -> None:
        block = imported("megatron.core.transformer.transformer_block")
        for split, stages in itertools.product(
            (Split(), Split(count_embedding=True), Split(count_loss=True), Split(ends=(2, 4)),
             Split(count_embedding=True, count_loss=True), Split(ends=(3, 4))),
            (4, 8),
        ):  # fmt: skip
            for num_layers in range(6, 20):
                ours = built_layers(split, num_layers=num_layers, num_ranks=4, num_stages=stages)
                spread = (0,) * (stages - 1) + (num_layers,)
                if ours is None:
                    assert fails(lambda: megatron_builds(block, split, spread, 4)), (split, stages)  # noqa: B023
                else:
                    assert megatron_builds(block, split, spread, 4) == ours


def forwards_first(actions: list[Any]) -> int:
    """Forwards before the first backward: the warmup, and the first of the steady pairs."""
    return next(index for index, action in enumerate(actions) if action.work is Work.BACKWARD)


def stages_of(layout: Any, ranks: int) -> list[str]:
    """Megatron's parsed layout as our stages, in pipeline order."""
    letters = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
    chunks = layout.virtual_pipeline_model_parallel_size
    return [
        "".join(letters[kind.name] for kind in layout.layout[rank][chunk])
        for chunk in range(chunks)
        for rank in range(ranks)
    ]


def fails(call: Any) -> bool:
    try:
        call()
    except Exception:
        return True
    return False


def megatron_builds(block: Any, split: Split, layers: tuple[int, ...], ranks: int) -> Any:
    """get_num_layers_to_build of every stage, in pipeline order."""
    chunks = len(layers) // ranks
    first, last = split.ends or (None, None)
    config = SimpleNamespace(
        num_layers=sum(layers),
        pipeline_model_parallel_size=ranks,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        pipeline_model_parallel_layout=None,
        num_layers_in_first_pipeline_stage=first,
        num_layers_in_last_pipeline_stage=last,
        account_for_embedding_in_pipeline_split=split.count_embedding,
        account_for_loss_in_pipeline_split=split.count_loss,
    )
    return tuple(
        block.get_num_layers_to_build(config, vp_stage=chunk if chunks > 1 else None, pp_rank=rank)
        for chunk in range(chunks)
        for rank in range(ranks)
    )


class RuleHolds(Exception):
    """The schedule function got past its checks."""


def stop_after_the_rule(core: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """End the schedule function where its checks end, and keep it off the GPU until then."""
    torch = core.torch

    def passed(*arguments: Any, **words: Any) -> None:
        raise RuleHolds

    on_cpu = SimpleNamespace(nn=torch.nn, int=torch.int, zeros=lambda *a, **k: torch.zeros([]))
    monkeypatch.setattr(core, "torch", on_cpu)
    monkeypatch.setattr(core, "get_pp_rank_microbatches", passed)


def refuses_group(core: Any, ranks: int, microbatches: int, group: int) -> bool:
    """Whether Megatron's interleaved schedule raises for this N."""
    one = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    pipeline = SimpleNamespace(size=lambda: ranks, rank=lambda: 0)
    config = SimpleNamespace(
        overlap_p2p_comm=True, batch_p2p_comm=False, finalize_model_grads_func=None, timers=None,
        no_sync_func=None, grad_sync_func=None, param_sync_func=None, hidden_size=8,
        sequence_parallel=False, overlap_moe_expert_parallel_comm=False,
        microbatch_group_size_per_vp_stage=group,
    )  # fmt: skip
    chunk = core.torch.nn.Module()
    chunk.config = config
    chunk.model_type = core.ModelType.encoder_or_decoder
    try:
        core.forward_backward_pipelining_with_interleaving(
            forward_step_func=None, data_iterator=[None, None], model=[chunk, chunk],
            num_microbatches=microbatches, seq_length=8, micro_batch_size=1,
            p2p_communicator=SimpleNamespace(config=config, pp_group=pipeline),
            pg_collection=SimpleNamespace(
                tp=one, cp=one, embd=None, pos_embd=None, pp=pipeline, dp_cp=one
            ),
        )  # fmt: skip
    except RuleHolds:
        return False
    except (ValueError, RuntimeError):
        return True
    raise AssertionError("the schedule function ended without a check")


class TestTorchtitan:
    """torchtitan 0.2.2."""

    def test_split(self) -> None:
        pipeline = imported("torchtitan.distributed.pipeline_parallel")
        for stages, layers in itertools.product(range(1, 9), range(1, 30)):
            for first, last in itertools.product((0, 1, 2), (0, 1, 2)):
                ours = default_split(layers, stages, first, last)

                def theirs(
                    stages: int = stages, layers: int = layers, first: int = first, last: int = last
                ) -> Any:
                    return pipeline.generate_llm_fqn_per_model_part(stages, layers, first, last)

                if ours is None:
                    assert fails(theirs)
                elif stages == 1 or min(ours) >= 0:
                    assert theirs() == module_names(ours, "output"), (stages, layers, first, last)

    def test_configuration(self, tmp_path: Path) -> None:
        config_module = imported("torchtitan.config")
        pipeline = imported("torchtitan.distributed.pipeline_parallel")
        # Reading a file takes a while, so only every ninth split is tried.
        by_number = set()
        for number, (layers, ranks) in enumerate(itertools.islice(splits(), 0, None, 9)):
            plan = made(layers, ranks, 24)
            files = exported(plan, "torchtitan")
            path = tmp_path / f"{number}.toml"
            path.write_text(files["torchtitan_plan.toml"])
            config = config_module.ConfigManager().parse_args(["--job.config_file", str(path)])
            parallelism, training = config.parallelism, config.training
            assert parallelism.pipeline_parallel_degree == ranks
            assert training.seq_len == 64
            size = parallelism.pipeline_parallel_microbatch_size
            assert training.local_batch_size == size * plan.num_microbatches
            parts = parallelism.module_fqns_per_model_part
            by_number.add(parts is None)
            if parts is None:
                first = parallelism.pipeline_parallel_first_stage_less_layers
                last = parallelism.pipeline_parallel_last_stage_less_layers
                counted = plan.num_layers + first + last
                stages = -(-counted // parallelism.pipeline_parallel_layers_per_stage)
                parts = pipeline.generate_llm_fqn_per_model_part(
                    stages, plan.num_layers, first, last
                )
            assert parts == module_names(layers, "output")
            torch_schedules = importlib.import_module("torch.distributed.pipelining.schedules")
            torch_schedules.get_schedule_class(parallelism.pipeline_parallel_schedule)
        assert by_number == {True, False}


class TestAccelerate:
    """accelerate 1.15: the plug-in turns our fields into Megatron-LM's arguments."""

    def test_arguments(self) -> None:
        utilities = imported("accelerate.utils")
        for layers, ranks in splits():
            plan = made(layers, ranks, 24)
            (text,) = exported(plan, "accelerate").values()
            body = text.replace("accelerator = Accelerator(megatron_lm_plugin=plugin)", "")
            scope: dict[str, Any] = {}
            exec(body.replace("from accelerate import Accelerator", ""), scope)
            assert isinstance(scope["plugin"], utilities.MegatronLMPlugin)
            arguments = scope["plugin"].megatron_lm_default_args
            assert arguments["pipeline_model_parallel_size"] == ranks
            assert arguments["num_micro_batches"] == 24
            assert arguments["context_parallel_size"] == 1
            assert arguments["recompute_granularity"] is None
            layout = arguments.get("pipeline_model_parallel_layout")
            per_stage = arguments["num_layers_per_virtual_pipeline_stage"]
            assert (layout is None) is (len(set(layers)) == 1)
            assert per_stage in (None, layers[0])
            if plan.num_chunks > 1:
                assert arguments["microbatch_group_size_per_vp_stage"] is not None


class TestDeepSpeed:
    """DeepSpeed 0.19: which layers its module gives to each stage."""

    def test_stages(self) -> None:
        pipe = imported("deepspeed.pipe")
        nn = importlib.import_module("torch").nn

        class TransformerBlock(nn.Linear):  # type: ignore[misc,name-defined]
            pass

        for layers, ranks in splits():
            if len(layers) != ranks:
                continue
            text = exported(made(layers, ranks, 24), "deepspeed")["deepspeed_plan.py"]
            scope: dict[str, Any] = {}
            exec(text, scope)
            kind = scope.get("PlannedPipeline", pipe.PipelineModule)
            specs = [nn.Embedding(4, 4)]
            specs += [TransformerBlock(1, 1) for _ in range(sum(layers))]
            specs += [nn.LayerNorm(4), nn.Linear(4, 4)]
            for rank in range(ranks):
                module = object.__new__(kind)
                nn.Module.__init__(module)
                module._layer_specs = specs
                module.loss_fn = None
                module.global_rank = rank + 1  # the first rank would print
                module.num_stages = ranks
                module._topo = SimpleNamespace(
                    get_coord=lambda number: SimpleNamespace(pipe=number - 1),
                    get_dim=lambda axis, size=ranks: size,
                )
                module._partition_layers(method=f"type:{scope['BLOCK']}")
                own = specs[module._local_start : module._local_stop]
                blocks = sum(isinstance(layer, TransformerBlock) for layer in own)
                assert blocks == layers[rank]
                assert (specs[0] in own) is (rank == 0)
                assert (specs[-1] in own) is (rank == ranks - 1)
