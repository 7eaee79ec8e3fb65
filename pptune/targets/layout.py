"""Megatron-LM's pipeline layout strings: `Et*4|(t*5|)*6t*4L`.

The language (Megatron-LM core 0.20, transformer/pipeline_parallel_layer_layout.py): E embedding, t
transformer block, m multi-token-prediction layer, L loss; `|` ends a stage, commas mean nothing,
`(..)*n` is expanded first and `x*n` after it, parentheses don't nest. Stages are in pipeline order:
stage i lives on rank i mod P.
"""

import itertools
import re

from pptune.errors import PlanError

_GROUP = re.compile(r"\(([^()]+)\)\*(\d+)")
_REPEAT = re.compile(r"([EtmL|])\*(\d+)")


def write_layout(layers_per_stage: tuple[int, ...]) -> str:
    """The shortest such string for blocks per stage; runs of equal middle stages are folded."""
    first, *middle = layers_per_stage
    if not middle:
        return f"E{_blocks(first)}L"
    last = middle.pop()
    text = f"E{_blocks(first)}|"
    for size, run in itertools.groupby(middle):
        count = len(list(run))
        stage = f"{_blocks(size)}|"
        text += f"({stage})*{count}" if count > 1 else stage
    return f"{text}{_blocks(last)}L"


def _blocks(count: int) -> str:
    return "t" * count if count < 2 else f"t*{count}"


def parse_layout(text: str) -> tuple[str, ...]:
    """The stages, each a string over E, t, m and L. Raises PlanError where it is no layout."""
    plain = text.replace(",", "")
    plain = _GROUP.sub(lambda found: found[1] * int(found[2]), plain)
    plain = _REPEAT.sub(lambda found: found[1] * int(found[2]), plain)
    foreign = sorted(set(plain) - set("EtmL|"))
    if foreign:
        raise PlanError(
            f"layout {text!r} holds {' '.join(foreign)} where E, t, m, L, |, (..)*n or x*n may "
            "stand; parentheses must not nest and need a *n"
        )
    return tuple(plain.split("|"))


def check_layout(
    stages: tuple[str, ...], *, num_layers: int, num_ranks: int, num_mtp_layers: int = 0
) -> None:
    """Raise PlanError where Megatron-LM's validate_layer_layout would refuse the stages."""
    flat = "".join(stages)

    def fail(rule: str) -> None:
        raise PlanError(f"layout {'|'.join(stages)!r}: {rule}")

    if len(stages) % num_ranks:
        fail(f"{len(stages)} stages do not divide over {num_ranks} pipeline ranks")
    if not flat.startswith("E") or flat.count("E") != 1:
        fail("the first layer, and no other, must be E")
    if not flat.endswith("L") or flat.count("L") != 1:
        fail("the last layer, and no other, must be L")
    if flat.count("t") != num_layers:
        fail(f"it holds {flat.count('t')} blocks (t), but the model has {num_layers}")
    if flat.count("m") != num_mtp_layers:
        fail(f"it holds {flat.count('m')} m, but the model has {num_mtp_layers}")
    if num_mtp_layers:
        holders = [index for index, stage in enumerate(stages) if "m" in stage]
        if len(holders) > 1:
            fail("all m must be in one stage")
        if "t" in flat[flat.index("m") :]:
            fail("every m must come after the last t")
        if holders[0] < len(stages) - num_ranks:
            fail("m must be in the last virtual stage of its rank")


def blocks_per_stage(stages: tuple[str, ...]) -> tuple[int, ...]:
    """t per stage."""
    return tuple(stage.count("t") for stage in stages)


def empty_stages(stages: tuple[str, ...]) -> tuple[int, ...]:
    """Stages that hold nothing at all; Megatron-LM parses them, and then may hang."""
    return tuple(index for index, stage in enumerate(stages) if not stage)
