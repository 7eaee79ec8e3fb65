"""Layers -> stages: the best split, checked against every split of small problems."""

import random
from collections.abc import Iterator

import pytest

from pptune.cost_model.partition import balanced_layers
from pptune.errors import PlanError
from pptune.schedules.placement import Placement, rank_of_stages


def splits(num_layers: int, num_stages: int, least: int) -> Iterator[tuple[int, ...]]:
    """Every way to put `num_layers` in `num_stages` with at least `least` in each."""
    if num_stages == 1:
        if num_layers >= least:
            yield (num_layers,)
        return
    for first in range(least, num_layers + 1):
        for rest in splits(num_layers - first, num_stages - 1, least):
            yield (first, *rest)


def loads(
    layers: tuple[int, ...], num_ranks: int, embedding_s: float, head_s: float, placement: Placement
) -> tuple[float, float]:
    """(busiest rank, largest stage) in seconds where a block takes 1 s."""
    stages = [float(count) for count in layers]
    stages[0] += embedding_s
    stages[-1] += head_s
    ranks = [0.0] * num_ranks
    homes = rank_of_stages(num_ranks, len(layers), placement).tolist()
    for home, load in zip(homes, stages, strict=True):
        ranks[home] += load
    return max(ranks), max(stages)


@pytest.mark.parametrize("seed", range(60))
def test_no_split_is_better(seed: int) -> None:
    draw = random.Random(seed)
    num_chunks = draw.choice([1, 1, 2, 3])
    num_ranks = draw.randint(1, 6 // num_chunks)
    placement = "v" if num_chunks == 2 and draw.random() < 0.5 else "loop"
    allow_empty = draw.random() < 0.3
    num_layers = draw.randint(0 if allow_empty else num_ranks * num_chunks, 12)
    embedding_s, head_s = draw.choice([0.0, 0.25, 1.0]), draw.choice([0.0, 1.0, 2.5, 4.75])
    found = balanced_layers(
        num_layers,
        num_ranks,
        num_chunks,
        embedding_s=embedding_s,
        block_s=1.0,
        head_s=head_s,
        placement=placement,
        allow_empty_stages=allow_empty,
    )
    assert sum(found) == num_layers
    assert min(found) >= (0 if allow_empty else 1)
    best = min(
        loads(layers, num_ranks, embedding_s, head_s, placement)
        for layers in splits(num_layers, num_ranks * num_chunks, 0 if allow_empty else 1)
    )
    assert loads(found, num_ranks, embedding_s, head_s, placement) == pytest.approx(best)


def balanced(num_layers: int, num_ranks: int, num_chunks: int = 1, **costs: float) -> tuple:
    given = {"embedding_s": 0.0, "block_s": 1.0, "head_s": 0.0} | costs
    return balanced_layers(num_layers, num_ranks, num_chunks, **given)


def test_published_layouts() -> None:
    # NVIDIA-NeMo/Megatron-Bridge PR 5797: 43 layers, PP 5, ends worth about a layer each.
    assert balanced(43, 5, embedding_s=1.0, head_s=1.0) == (8, 9, 9, 9, 8)
    # deepspeedai/DeepSpeed PR 4312: five equal weights on four parts, none empty.
    assert balanced(5, 4) == (2, 1, 1, 1)
    # NVIDIA/Megatron-LM 1303: seven layers on two ranks, the head's side lighter.
    assert balanced(7, 2, head_s=0.5) == (4, 3)


def test_measured_time_decides_not_parameters() -> None:
    # deepspeedai/DeepSpeed 2974: a head costs time where the equally large embedding costs none.
    found = balanced(16, 4, embedding_s=0.0, head_s=2.0)
    assert loads(found, 4, 0.0, 2.0, "loop") == (5.0, 5.0)
    assert found[-1] < found[0]


def test_an_even_split_stays_even_when_nothing_is_better() -> None:
    assert balanced(8, 4, embedding_s=0.25, head_s=0.5) == (2, 2, 2, 2)
    assert balanced(24, 4, 2) == (3,) * 8


def test_the_head_of_a_v_shape_weighs_on_the_first_rank() -> None:
    found = balanced_layers(
        12, 2, 2, embedding_s=1.0, block_s=1.0, head_s=1.0, placement="v"
    )  # fmt: skip
    assert found[0] + found[3] == 5
    assert found[1] + found[2] == 7


def test_a_head_larger_than_any_share_leaves_its_stage_one_layer() -> None:
    assert balanced(9, 3, head_s=20.0) == (4, 4, 1)


def test_free_blocks_are_spread() -> None:
    assert balanced(5, 2, block_s=0.0, head_s=1.0) == (3, 2)


def test_large_models_split_without_losing_layers() -> None:
    found = balanced(126, 64, embedding_s=0.3, head_s=1.7)
    assert (sum(found), len(found), max(found)) == (126, 64, 2)
    # The head's 1.7 blocks fit beside one block only: 1 + 1.7 > 2 is what bounds the step.
    assert found[-1] == 1


def test_too_few_layers_say_what_to_change() -> None:
    with pytest.raises(PlanError, match=r"3 layers cannot fill 4 stages .*--allow-empty-stages"):
        balanced(3, 2, 2)
    found = balanced_layers(
        3, 2, 2, embedding_s=0.0, block_s=1.0, head_s=1.0, allow_empty_stages=True
    )
    assert (sum(found), found[-1]) == (3, 0)
