"""Each trainer's rules, against vectors worked out by hand from its sources and real users' cases.

Case numbers in the names of test data are those of public threads; see each comment.
"""

from collections.abc import Iterator
from itertools import product

import pytest

from pptune import schedules
from pptune.errors import PlanError, UsageError
from pptune.executors import Executor
from pptune.model import ModelSpec
from pptune.plan import Plan, Schedule, even_layers, make_plan
from pptune.targets import (
    TARGETS,
    Target,
    Violation,
    batch_violation,
    executor_of,
    illegal,
    keeps_boundary_tensors,
    legal_group_sizes,
    parse_target,
    schedules_of,
    supports_uneven,
    uneven_violation,
)
from pptune.targets.layout import (
    blocks_per_stage,
    check_layout,
    empty_stages,
    parse_layout,
    write_layout,
)
from pptune.targets.split import Split, balanced_layers, built_layers, split_of
from pptune.targets.torchtitan import default_split

TORCH = parse_target("torch")
OLD_TORCH = parse_target("torch@2.4")
MEGATRON = parse_target("megatron")
TITAN = parse_target("torchtitan")
DEEPSPEED = parse_target("deepspeed")
NANOTRON = parse_target("nanotron")
MINDSPEED = parse_target("mindspeed")


def plan(
    schedule: Schedule,
    ranks: int,
    microbatches: int,
    *,
    chunks: int | None = None,
    group: int | None = None,
    layers: tuple[int, ...] | None = None,
    size: int = 1,
    data: int = 1,
    empty: bool = False,
) -> Plan:
    if chunks is None:
        chunks = 1 if schedule in ("gpipe", "1f1b", "zb-h1", "zb-h2") else 2
    return make_plan(
        schedule=schedule,
        num_ranks=ranks,
        num_chunks=chunks,
        microbatch_size=size,
        num_microbatches=microbatches,
        layers_per_stage=layers or (1,) * (ranks * chunks),
        microbatch_group_size=group,
        data_parallel=data,
        allow_empty_stages=empty,
    )


def model(num_layers: int, *, tied: bool = False) -> ModelSpec:
    return ModelSpec(
        name="tiny",
        family="llama",
        num_layers=num_layers,
        seq_len=16,
        hidden_size=32,
        num_heads=4,
        ffn_size=64,
        vocab_size=128,
        tie_word_embeddings=tied,
    )


def reason(violation: Violation | None) -> str:
    assert violation is not None
    return str(violation)


# P, M, legal at Megatron's N = P, legal other N, torch's interleaving, torch 2.4's, torch's 1F1B.
VECTORS = [
    (4, 3, False, [], True, False, False),
    (4, 6, False, [6], True, False, True),
    (4, 7, False, [7], True, False, True),
    (4, 9, False, [5, 9], False, False, True),
    (4, 10, False, [5, 6, 10], True, False, True),
    (4, 11, False, [6, 7, 11], False, False, True),
    (8, 12, False, [12], True, False, True),
    (8, 15, False, [15], True, False, True),
    (8, 16, True, [16], True, True, True),
    (8, 20, False, [10, 11, 12, 20], True, False, True),
    (2, 5, False, [3, 5], False, False, True),
    (12, 32, False, [16, 17, 18, 19, 20, 32], True, False, True),
]


@pytest.mark.parametrize(
    ("ranks", "microbatches", "at_ranks", "others", "torch_now", "torch_old", "one_f_one_b"),
    VECTORS,
    ids=lambda value: str(value) if isinstance(value, int) else "",
)
def test_microbatch_rules_differ_by_trainer(
    ranks: int,
    microbatches: int,
    at_ranks: bool,
    others: list[int],
    torch_now: bool,
    torch_old: bool,
    one_f_one_b: bool,
) -> None:
    def is_legal(target: Target, group: int | None) -> bool:
        made = plan("interleaved", ranks, microbatches, group=group)
        return illegal(made, target) is None

    legal = [size for size in range(1, microbatches + 1) if is_legal(MEGATRON, size)]
    assert legal == ([ranks] if at_ranks else []) + others
    assert legal == list(
        legal_group_sizes(
            MEGATRON, schedule="interleaved", num_ranks=ranks, num_microbatches=microbatches
        )
    )
    assert is_legal(TORCH, None) is torch_now
    assert is_legal(TITAN, None) is torch_now
    old = plan("interleaved", ranks, microbatches, group=min(ranks, microbatches))
    assert (illegal(old, OLD_TORCH) is None) is torch_old
    single = plan("1f1b", ranks, microbatches)
    assert (illegal(single, TORCH) is None) is one_f_one_b
    for target in (MEGATRON, DEEPSPEED):
        assert illegal(single, target) is None
    assert (illegal(single, NANOTRON) is None) is (microbatches >= ranks - 1)
    wants = 2 * ranks - 1
    assert (illegal(plan("dualpipe-v", ranks, microbatches), MINDSPEED) is None) is (
        microbatches >= wants
    )


def test_the_rule_names_values_and_nearest_legal_ones() -> None:
    found = illegal(plan("interleaved", 4, 9), TORCH)
    assert found is not None
    assert found.rule == "microbatches-not-multiple-of-rounds"
    assert str(found) == (
        "interleaved on torch needs micro-batches (9) to be a multiple of rounds (2) with 4 ranks; "
        "use 8 or 10, or --chunks 1"
    )


def test_torch_runs_other_groups_as_loaded_orders() -> None:
    sizes = legal_group_sizes(TORCH, schedule="interleaved", num_ranks=4, num_microbatches=16)
    assert sizes == (4, 6, 8, 9, 10, 11, 12, 16)
    assert legal_group_sizes(TORCH, schedule="interleaved", num_ranks=4, num_microbatches=3) == (3,)
    # M = 9 has no group of torch's own, yet the order with N = 5 runs.
    assert legal_group_sizes(
        TORCH, schedule="interleaved", num_ranks=4, num_microbatches=9
    ) == (5, 9)  # fmt: skip
    for size in range(1, 17):
        found = illegal(plan("interleaved", 4, 16, group=size), TORCH)
        assert (found is None) is (size in sizes)
    assert illegal(plan("interleaved", 4, 16, group=8), OLD_TORCH) is not None
    assert legal_group_sizes(TORCH, schedule="1f1b", num_ranks=4, num_microbatches=16) == ()


def runs_to_its_end(order: schedules.Order) -> bool:
    """Play the order with blocking receives: every action waits for what it needs."""
    rows = [order.actions(rank) for rank in range(order.num_ranks)]
    at = [0] * order.num_ranks
    done: set[tuple[int, str, int]] = set()
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            while at[rank] < len(row) and needs(row[at[rank]], order.num_stages) <= done:
                stage, work, microbatch = row[at[rank]]
                done.add((stage, "FBBW"[work], microbatch))
                at[rank] += 1
                moved = True
    return all(position == len(row) for position, row in zip(at, rows, strict=True))


def needs(action: schedules.Action, num_stages: int) -> set[tuple[int, str, int]]:
    stage, work, microbatch = action
    if work is schedules.Work.FORWARD:
        return {(stage - 1, "F", microbatch)} if stage else set()
    if work is schedules.Work.BACKWARD_WEIGHT:
        return {(stage, "B", microbatch)}
    after = {(stage + 1, "B", microbatch)} if stage < num_stages - 1 else set()
    return {(stage, "F", microbatch)} | after


@pytest.mark.parametrize("schedule", ["interleaved", "interleaved-zb"])
def test_every_group_that_we_allow_can_run(schedule: Schedule) -> None:
    """By brute force: no legal group size makes ranks wait for each other in a circle."""
    num_stuck = 0
    for ranks, chunks, microbatches in product((2, 3, 4), (2, 3), range(1, 11)):
        legal = legal_group_sizes(
            TORCH, schedule=schedule, num_ranks=ranks, num_microbatches=microbatches
        )
        for size in range(1, microbatches + 1):
            try:
                order = schedules.generate(
                    schedule, num_ranks=ranks, num_chunks=chunks, num_microbatches=microbatches,
                    microbatch_group_size=size,
                )  # fmt: skip
            except PlanError as error:
                if "unknown" in str(error):
                    pytest.skip(f"schedules.generate does not make {schedule}")
                assert size not in legal
                num_stuck += 1
                continue
            if size in legal:
                assert runs_to_its_end(order), (ranks, chunks, microbatches, size)
            else:
                num_stuck += not runs_to_its_end(order)
    assert num_stuck > 0  # so the rule is there for a reason


def test_torch_schedules_with_a_floor_on_microbatches() -> None:
    assert illegal(plan("gpipe", 4, 1), TORCH) is None
    assert illegal(plan("zb-v", 4, 3), TORCH) is None
    assert illegal(plan("dualpipe-v", 4, 8), TORCH) is None
    assert "use 8 or more" in reason(illegal(plan("dualpipe-v", 4, 7), TORCH))
    assert "use 4 or more" in reason(illegal(plan("1f1b", 4, 3), TORCH))
    assert illegal(plan("zb-v", 4, 8), OLD_TORCH) is not None


class TestUserCases:
    """Behaviour that users of the trainers asked for in public threads."""

    def test_17_group_smaller_than_ranks(self) -> None:
        # NVIDIA/Megatron-LM #1829
        found = illegal(plan("interleaved", 4, 8, group=2), MEGATRON)
        assert found is not None
        assert found.rule == "group-size-out-of-range"
        assert "--microbatch-group-size-per-virtual-pipeline-stage (2) must lie in 4..8" in str(
            found
        )

    def test_18_two_ranks_need_overlap(self) -> None:
        # NVIDIA/Megatron-LM #750
        two = plan("interleaved", 2, 4)
        assert illegal(two, MEGATRON) is None
        text = reason(illegal(two, MEGATRON, overlap_p2p=False))
        assert "can't tell them apart" in text
        assert "--no-overlap-p2p-communication" in text
        assert illegal(plan("interleaved", 4, 4), MEGATRON, overlap_p2p=False) is None
        assert illegal(plan("1f1b", 2, 4), MEGATRON, overlap_p2p=False) is None

    def test_20_microbatches_need_not_be_a_multiple_of_ranks_times_chunks(self) -> None:
        # NVIDIA-BioNeMo/bionemo-recipes #286
        assert illegal(plan("interleaved", 4, 4), MEGATRON) is None
        found = illegal(plan("interleaved", 4, 10, group=4), MEGATRON)
        assert found is not None
        assert found.rule == "group-remainder"
        assert "5, 6 or 10" in found.suggestion
        for size in (5, 6, 10):
            assert illegal(plan("interleaved", 4, 10, group=size), MEGATRON) is None

    @pytest.mark.parametrize(
        ("ranks", "microbatches", "legal"),
        [
            (4, 3, True), (4, 6, True), (4, 10, True), (4, 9, False), (4, 11, False),
            (2, 5, False), (8, 12, True), (8, 20, True),
        ],
    )  # fmt: skip
    def test_21_rounds_of_torch(self, ranks: int, microbatches: int, legal: bool) -> None:
        # pytorch/pytorch PR #129597, #137783
        assert (illegal(plan("interleaved", ranks, microbatches), TORCH) is None) is legal
        if ranks == 8:
            at_ranks = plan("interleaved", ranks, microbatches, group=8)
            assert illegal(at_ranks, MEGATRON) is not None

    def test_23_nanotron_names_its_own_option(self) -> None:
        # huggingface/nanotron #347
        text = reason(illegal(plan("1f1b", 8, 1), NANOTRON))
        assert "tokens.batch_accumulation_per_replica (1)" in text
        assert "use 7 or more" in text

    def test_24_too_few_processes(self) -> None:
        # NVIDIA-NeMo/Speech #11480
        text = reason(illegal(plan("1f1b", 2, 4), MEGATRON, world_size=1))
        assert "needs at least 2 ranks" in text
        assert "you have 1" in text
        assert "--ranks 2 --device cpu" in text
        assert illegal(plan("1f1b", 2, 4, data=4), MEGATRON, world_size=8) is None
        for size in (6, 7, 12):
            assert illegal(plan("1f1b", 4, 4, data=2), MEGATRON, world_size=size) is not None

    def test_25_batch_that_cannot_be_cut(self) -> None:
        # pytorch/pytorch #126600
        text = reason(batch_violation(TORCH, global_batch_size=8, num_microbatches=3))
        assert "use 2, 4 or 8 micro-batches" in text
        for count in (1, 2, 4, 8):
            assert batch_violation(TORCH, global_batch_size=8, num_microbatches=count) is None

    def test_26_deepspeed_refuses_zero_2_and_3(self) -> None:
        # deepspeedai/DeepSpeed #568
        single = plan("1f1b", 4, 8)
        for stage in (2, 3):
            text = reason(illegal(single, DEEPSPEED, zero=stage))
            assert f"zero_optimization.stage ({stage})" in text
        assert illegal(single, DEEPSPEED, zero=1) is None

    def test_27_layers_per_rank_not_divisible_by_chunks(self) -> None:
        # NVIDIA-NeMo/Megatron-Bridge PR #5893
        text = reason(uneven_violation(MEGATRON, num_layers=40, num_ranks=2, num_chunks=12))
        assert "--chunks 1, 2, 4, 5, 10 or 20" in text
        assert uneven_violation(MEGATRON, num_layers=40, num_ranks=2, num_chunks=10) is None

    def test_29_layers_not_divisible_by_ranks(self) -> None:
        # NVIDIA/Megatron-LM #1304: 28 of 30 layers were built
        text = reason(uneven_violation(MEGATRON, num_layers=30, num_ranks=4, num_chunks=1))
        assert "7 layers on the first rank and 7 on the last" in text
        assert "--pipeline-model-parallel-layout 'Et*7|(t*8|)*2t*7L'" in text
        assert illegal(plan("1f1b", 4, 8, layers=(7, 8, 8, 7)), MEGATRON) is None

    def test_30_more_ranks_than_an_even_split_allows(self) -> None:
        # NVIDIA/Megatron-LM #1303
        text = reason(uneven_violation(MEGATRON, num_layers=40, num_ranks=16, num_chunks=2))
        layout = text.split("'")[1]
        stages = parse_layout(layout)
        assert len(stages) == 32
        check_layout(stages, num_layers=40, num_ranks=16)
        assert balanced_layers(7, 2) == (4, 3)  # the lighter side has the head

    def test_39_legal_groups_of_a_large_run(self) -> None:
        # NVIDIA-NeMo/Megatron-Bridge PR #4330: 256 processes, GBS 15360, b = 1
        data = 256 // 2
        assert batch_violation(
            MEGATRON, global_batch_size=15360, data_parallel=data, microbatch_size=1
        ) is None  # fmt: skip
        microbatches = 15360 // data
        assert microbatches == 120
        sizes = legal_group_sizes(
            MEGATRON, schedule="interleaved", num_ranks=2, num_microbatches=microbatches
        )
        assert sizes[0] == 2
        assert set(sizes) == {n for n in range(2, 121) if 120 % n != 1}
        made = plan("interleaved", 2, 120, chunks=8, group=2, data=data, layers=(1,) * 16)
        assert illegal(made, MEGATRON, world_size=256) is None
        assert made.global_batch_size == 15360

    def test_46_ends_that_carry_the_embedding_and_the_head(self) -> None:
        # NVIDIA-NeMo/Megatron-Bridge PR #5797: 160 processes, context parallel 16
        assert balanced_layers(43, 5) == (8, 9, 9, 9, 8)
        assert 160 // (5 * 16) == 2
        made = plan("1f1b", 5, 64, layers=(8, 9, 9, 9, 8), data=2)
        assert made.global_batch_size == 128
        assert illegal(made, MEGATRON, context_parallel=16, world_size=160) is None
        assert write_layout(made.layers_per_stage) == "Et*8|(t*9|)*3t*8L"
        assert parse_layout("Et*8|t*9|t*9|t*9|t*8L") == parse_layout("Et*8|(t*9|)*3t*8L")

    @pytest.mark.parametrize("target", [TORCH, TITAN])
    def test_47_tied_embeddings(self, target: Target) -> None:
        # pytorch/torchtitan PR #1409
        made = plan("1f1b", 2, 4, layers=(2, 2))
        found = illegal(made, target, model=model(4, tied=True))
        assert found is not None
        assert found.rule == "tied-embeddings"
        assert "tie_word_embeddings" in str(found)
        assert illegal(made, target, model=model(4)) is None
        assert illegal(plan("gpipe", 1, 4), target, model=model(1, tied=True)) is None
        assert illegal(made, MEGATRON, model=model(4, tied=True)) is None

    def test_62_stage_without_parameters(self) -> None:
        # deepspeedai/DeepSpeed #1522
        made = plan("1f1b", 4, 8, layers=(2, 0, 1, 1), empty=True)
        text = reason(illegal(made, DEEPSPEED, zero=1, allow_empty_stages=True))
        assert "no parameters" in text
        assert illegal(made, DEEPSPEED, zero=0, allow_empty_stages=True) is None
        assert illegal(made, DEEPSPEED, zero=0) is not None


@pytest.mark.parametrize(
    ("text", "blocks", "empty"),
    [
        ("Et|(tt|)*29L|", 59, (31,)),
        ("Et|(tt|)*29|L", 59, (30,)),
        ("Et|(tt|)*28t|t|L", 59, ()),
        ("Et|(tt|)*30L", 61, ()),
    ],
)
def test_31_layouts_of_a_long_model(text: str, blocks: int, empty: tuple[int, ...]) -> None:
    # NVIDIA/Megatron-LM #1852: the first two hold an empty stage and hang
    stages = parse_layout(text)
    assert len(stages) == 32
    assert sum(blocks_per_stage(stages)) == blocks
    assert empty_stages(stages) == empty


def test_40_layout_with_a_lighter_last_stage() -> None:
    # NVIDIA-NeMo/Megatron-Bridge PR #5391
    stages = parse_layout("Et*2|(t*2|)*34,t*3|(t*2|)*3,tL")
    check_layout(stages, num_layers=80, num_ranks=8)
    layers = blocks_per_stage(stages)
    assert len(layers) == 40
    assert layers == (2,) * 35 + (3, 2, 2, 2, 1)
    assert parse_layout(write_layout(layers)) == stages
    made = plan("interleaved", 8, 128, chunks=5, layers=layers)
    assert illegal(made, MEGATRON, tensor_parallel=4) is None


def splits() -> Iterator[tuple[tuple[int, ...], int]]:
    for ranks in (1, 2, 3, 4):
        for chunks in (1, 2, 3):
            stages = ranks * chunks
            for layers in range(stages, stages * 3 + 1):
                yield balanced_layers(layers, stages), ranks
    yield (3, 1, 2, 4), 4
    yield (1, 9, 9, 5), 4
    yield (2, 3, 3, 1, 2, 3, 3, 1), 4
    yield (2, 3, 3, 1, 2, 3, 3, 2), 4
    yield (1, 2), 2


def test_every_split_form_and_layout_builds_the_same_blocks() -> None:
    """Conservation: whatever form is chosen, the trainer builds every block exactly once."""
    forms = set()
    for layers, ranks in splits():
        split = split_of(layers, ranks)
        forms.add((split.layout is None, split.ends is None, split.is_even))
        assert ranks > 1 or split.ends is None
        assert built_layers(
            split, num_layers=sum(layers), num_ranks=ranks, num_stages=len(layers)
        ) == layers  # fmt: skip
        stages = parse_layout(write_layout(layers))
        assert blocks_per_stage(stages) == layers
        check_layout(stages, num_layers=sum(layers), num_ranks=ranks)
    assert len(forms) == 4  # even, counted ends, ends by number, layout


def test_split_forms_that_the_trainer_refuses() -> None:
    for split in (Split(), Split(count_loss=True), Split(ends=(3, 4)), Split(ends=(2, 5))):
        assert built_layers(split, num_layers=10, num_ranks=4, num_stages=8) is None
    assert built_layers(Split(ends=(1, 4)), num_layers=9, num_ranks=4, num_stages=4) == (1, 2, 2, 4)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Et|xt|tL", "holds x"),
        ("E((t|)*2t)*2L", "holds"),
        ("t|Et|t|tL", "must be E"),
        ("Et|t|t|tt", "must be L"),
        ("Et|t|t|L", "3 blocks"),
        ("Et|t|t|tmL", "1 m"),
        ("Et|tt|tL", "do not divide"),
    ],
)
def test_broken_layouts_are_refused(text: str, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        check_layout(parse_layout(text), num_layers=4, num_ranks=4)


def test_layouts_with_prediction_layers() -> None:
    check_layout(parse_layout("Ett|t|t|mL"), num_layers=4, num_ranks=4, num_mtp_layers=1)
    check_layout(parse_layout("Et|t|t|t|||m|L"), num_layers=4, num_ranks=4, num_mtp_layers=1)
    for text in ("Ett|m|t|tL", "Et|t|tm|mtL", "Et|t|tt|m|||L|"):
        with pytest.raises(PlanError):
            check_layout(parse_layout(text), num_layers=4, num_ranks=4, num_mtp_layers=1)


def test_balanced_layers_on_equal_blocks() -> None:
    for stages in range(1, 9):
        for layers in range(stages, 40):
            made = balanced_layers(layers, stages)
            assert sum(made) == layers
            assert min(made) >= 1
            if stages > 1:
                weights = [made[0] + 1, *made[1:-1], made[-1] + 1]
                assert max(weights) - min(weights) <= 1 or 1 in (made[0], made[-1])
    assert max(balanced_layers(5, 4)) == 2
    with pytest.raises(PlanError, match="fewer chunks"):
        balanced_layers(3, 4)


def test_torchtitan_splits_as_its_own_function() -> None:
    assert default_split(38, 8) == (4, 5, 5, 5, 5, 5, 5, 4)
    assert default_split(3, 2, 2, 2) == (2, 1)
    assert default_split(6, 4) == (1, 2, 2, 1)
    assert default_split(2, 4) == (0, 1, 1, 0)
    assert default_split(1, 4) is None


def test_targets_are_named_with_their_versions() -> None:
    assert str(parse_target("torchtitan")) == "torchtitan@0.2"
    assert str(parse_target("torchtitan@main")) == "torchtitan@main"
    assert {str(parse_target(text)) for text in TARGETS} == set(TARGETS)
    with pytest.raises(UsageError, match=r"torchtitan@0\.2 or torchtitan@main"):
        parse_target("torchtitan@0.3")
    with pytest.raises(UsageError, match="megatron-bridge"):
        parse_target("megatorn")
    with pytest.raises(UsageError):
        parse_target("")


def test_what_a_trainer_cannot_run_at_all() -> None:
    found = illegal(plan("interleaved", 4, 16), DEEPSPEED)
    assert found is not None
    assert found.rule == "schedule-unsupported"
    assert "no virtual stages" in str(found)
    assert "--chunks 1" in found.suggestion
    assert "megatron" in found.suggestion
    assert "deepspeed" not in found.suggestion
    for target in map(parse_target, TARGETS):
        known = schedules_of(target)
        assert "1f1b" in known
        assert (illegal(plan("zb-h1", 4, 16), target) is None) is ("zb-h1" in known)


def test_one_rank() -> None:
    for target in map(parse_target, TARGETS):
        assert illegal(plan("1f1b", 1, 1), target) is None
    assert illegal(plan("interleaved", 1, 4), MEGATRON) is not None
    assert illegal(plan("interleaved", 1, 4), TITAN) is not None


def test_dualpipe_of_mindspeed_has_rules_of_its_own() -> None:
    even = plan("dualpipe-v", 4, 16, layers=(2,) * 8)
    assert illegal(even, MINDSPEED, model=model(16)) is None
    assert illegal(even, MINDSPEED, model=model(16, tied=True)) is not None
    assert illegal(even, MINDSPEED, context_parallel=2) is not None
    uneven = plan("dualpipe-v", 4, 16, layers=(1, 2, 2, 2, 2, 2, 2, 1))
    assert "evenly" in reason(illegal(uneven, MINDSPEED))


def test_uneven_layers() -> None:
    odd = plan("1f1b", 4, 8, layers=(3, 1, 2, 4))
    for name in ("torch", "megatron", "megatron-bridge", "torchtitan", "deepspeed", "accelerate",
                 "mindspeed"):  # fmt: skip
        target = parse_target(name)
        assert supports_uneven(target)
        assert illegal(odd, target) is None
    assert not supports_uneven(NANOTRON)
    nemo = parse_target("nemo")
    assert "layers-uneven" in (illegal(odd, nemo) or Violation("", "", "")).rule
    assert illegal(plan("1f1b", 4, 8, layers=(7, 8, 8, 7)), nemo) is None
    assert illegal(plan("1f1b", 4, 8, layers=(6, 8, 8, 9)), nemo) is None


def test_empty_stages_need_leave() -> None:
    middle = plan("1f1b", 4, 8, layers=(2, 0, 1, 1), empty=True)
    end = plan("1f1b", 4, 8, layers=(2, 1, 1, 0), empty=True)
    assert illegal(middle, MEGATRON) is not None
    assert illegal(middle, MEGATRON, allow_empty_stages=True) is None
    assert illegal(end, MEGATRON) is None  # it still has the head
    assert illegal(middle, TITAN, allow_empty_stages=True) is not None


def test_batches_in_each_trainers_words() -> None:
    text = reason(
        batch_violation(
            parse_target("megatron"), global_batch_size=30, data_parallel=4, microbatch_size=2
        )
    )
    assert "--global-batch-size (30)" in text
    assert "28 or 32" in text
    text = reason(
        batch_violation(DEEPSPEED, global_batch_size=32, data_parallel=4, microbatch_size=3)
    )
    assert "train_micro_batch_size_per_gpu (3)" in text
    assert "1, 2 or 4" in text
    for target in map(parse_target, TARGETS):
        assert batch_violation(target, global_batch_size=32, data_parallel=4) is None
        assert batch_violation(target, global_batch_size=33, data_parallel=4) is not None


def test_zero_stages() -> None:
    for target in map(parse_target, TARGETS):
        assert illegal(plan("1f1b", 2, 4), target, zero=1) is None
        assert illegal(plan("1f1b", 2, 4), target, zero=3) is not None


def test_executors() -> None:
    single, chunked = plan("1f1b", 4, 8), plan("interleaved", 4, 8)
    assert executor_of(single, TORCH) is Executor.TORCH_1F1B
    assert executor_of(plan("gpipe", 4, 8), TORCH) is Executor.TORCH_1F1B
    for schedule in ("interleaved", "zb-h1", "zb-v", "looped-bfs"):
        assert executor_of(plan(schedule, 4, 8), TORCH) is Executor.TORCH_RUNTIME  # type: ignore[arg-type]
    assert executor_of(chunked, TITAN) is Executor.TORCH_RUNTIME
    for name in ("megatron", "megatron-bridge", "nemo", "accelerate", "mindspeed"):
        target = parse_target(name)
        assert executor_of(single, target) is Executor.MEGATRON_EXPOSED
        assert executor_of(chunked, target) is Executor.MEGATRON_OVERLAP
    for target in (DEEPSPEED, NANOTRON):
        assert executor_of(single, target) is Executor.MEGATRON_EXPOSED


def test_who_keeps_boundary_tensors() -> None:
    keep = {str(t) for t in map(parse_target, TARGETS) if keeps_boundary_tensors(t)}
    assert keep == {"torch@2.13", "torch@2.4", "torchtitan@0.2", "torchtitan@main"}


def test_even_plans_of_any_depth_are_legal_for_megatron() -> None:
    for chunks in (1, 2, 5, 10):
        layers = even_layers(80, 8 * chunks)
        assert layers is not None
        schedule: Schedule = "1f1b" if chunks == 1 else "interleaved"
        assert illegal(plan(schedule, 8, 128, chunks=chunks, layers=layers), MEGATRON) is None
