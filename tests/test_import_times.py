"""A trainer's times from CSV: what becomes of every cell, and every way to get it wrong."""

from pathlib import Path

import pytest

from pptune import importing
from pptune.curves import layer_times
from pptune.errors import FileError
from pptune.importing import import_profile
from pptune.presets import PRESETS
from pptune.profiles import Profile, load_profile, save_profile

SPEC = PRESETS["gpt2"]

# T_F, T_B, T_W of a stage of the 1.5B model in the zero-bubble paper's profiled times (arXiv
# 2401.10241, Table 6), in ms; the full backward is the sum of its parts.
PAPER = """\
# profiled on A100s
kind,microbatch_size,forward_ms,backward_ms,backward_input_ms,backward_weight_ms
block,6,18.522,27.423,18.086,9.337
"""


def imported(tmp_path: Path, text: str, ranks: int | None = None) -> Profile:
    path = tmp_path / "times.csv"
    path.write_text(text)
    return import_profile(path, SPEC, dtype="bfloat16", ranks=ranks)


def test_published_times_become_a_profile(tmp_path: Path) -> None:
    profile = imported(tmp_path, PAPER, ranks=8)
    block = profile.layer("block")
    assert block is not None
    times = layer_times(block, 6)
    assert times.forward_s == pytest.approx(18.522e-3)
    assert times.backward_s == pytest.approx(27.423e-3)
    assert (times.backward_input_s, times.backward_weight_s) == pytest.approx((18.086e-3, 9.337e-3))
    assert times.source == "given"
    assert block.count == SPEC.num_layers
    assert (profile.num_ranks, profile.dtype, profile.seq_len) == (8, "bfloat16", SPEC.seq_len)


def test_what_is_not_given_is_null(tmp_path: Path) -> None:
    profile = imported(tmp_path, "kind,microbatch_size,forward_s,backward_s\nblock,1,0.1,0.2\n")
    point = profile.layers[0].points[0]
    assert point.backward_input_s is None
    assert point.saved_activation_bytes is None
    assert profile.layers[0].parameter_bytes is None
    assert (profile.links, profile.overheads, profile.memory) == ((), {}, None)
    assert profile.layer("head") is None
    assert profile.machine.peak_flops_per_s is None


def test_the_profile_survives_its_file(tmp_path: Path) -> None:
    profile = imported(tmp_path, PAPER)
    save_profile(profile, tmp_path / "profile.json")
    assert load_profile(tmp_path / "profile.json") == profile


def test_every_column_arrives(tmp_path: Path) -> None:
    text = (
        "microbatch_size,kind,forward_us,backward_s,recompute,parameter_bytes,"
        "saved_activation_bytes,boundary_bytes,tensor_parallel,context_parallel,data_parallel\n"
        "4, block ,1500,0.003,full,1000000,2e6,4096,8,2,4\n"
        "2,block,800,0.0016,full,1000000,1e6,2048,8,2,4\n"
        "2,block,700,0.0013,none,1000000,1e6,2048,8,2,4\n"
    )
    profile = imported(tmp_path, text)
    assert (profile.parallel.tensor, profile.parallel.context, profile.parallel.data) == (8, 2, 4)
    layer = profile.layer("block", "full")
    assert layer is not None
    assert [point.microbatch_size for point in layer.points] == [2, 4]
    assert (layer.count, layer.parameter_bytes) == (SPEC.num_layers, 1_000_000)
    point = layer.points[1]
    assert (point.forward_s, point.backward_s) == pytest.approx((1.5e-3, 3e-3))
    assert (point.saved_activation_bytes, point.boundary_bytes) == (2_000_000, 4096)
    assert profile.layer("block", "none") is not None


def test_the_documented_example_is_read(tmp_path: Path) -> None:
    lines = (importing.__doc__ or "").splitlines()
    example = "\n".join(line.strip() for line in lines if line.startswith("    "))
    profile = imported(tmp_path, example + "\n")
    assert {layer.kind for layer in profile.layers} == {"embedding", "block", "head"}
    block = profile.layer("block")
    assert block is not None
    assert block.points[1].forward_s == pytest.approx(3.61e-3)
    embedding = profile.layer("embedding")
    assert embedding is not None
    assert embedding.points[0].backward_input_s is None


HEADER = "kind,microbatch_size,forward_ms,backward_ms,tensor_parallel\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "at least one row"),
        (HEADER, "at least one row"),
        ("kind,microbatch_size,forward\nblock,1,2\n", "unknown column 'forward'"),
        ("kind,forward_ms\nblock,1\n", "lacks microbatch_size"),
        ("kind,kind,microbatch_size\nblock,block,1\n", "gives kind twice"),
        ("kind,microbatch_size,forward_ms,forward_s\nblock,1,1,1\n", "gives forward twice"),
        (HEADER + "block,1,2\n", "line 2: 3 cells, but there are 5 columns"),
        (HEADER + "block,1,2,x,1\n", "line 2: backward_ms is 'x'"),
        (HEADER + "block,1,nan,2,1\n", "forward_ms is 'nan'"),
        (HEADER + "block,1,-2,2,1\n", "forward_ms is -2; a time is 0 or more"),
        (HEADER + "block,1.5,2,2,1\n", "microbatch_size is 1.5"),
        (HEADER + "block,0,2,2,1\n", "microbatch_size is 0"),
        (HEADER + "block,,2,2,1\n", "microbatch_size is missing"),
        (HEADER + "block,1,2,,1\n", "a block needs a forward and a backward time"),
        (HEADER + "layer,1,2,2,1\n", "kind is 'layer'"),
        (HEADER + "head,1,2,2,1\n", "no row of kind block"),
        (HEADER + "block,1,2,2,1\n# c\nblock,1,2,2,1\n", "line 4: block at .* given twice"),
        (HEADER + "block,1,2,2,1\nblock,2,2,2,4\n", "line 3: tensor, context and data"),
    ],
)
def test_mistakes_are_named_with_their_place(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(FileError, match=message) as refused:
        imported(tmp_path, text)
    assert "\n" not in str(refused.value)


def test_a_file_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="cannot read"):
        import_profile(tmp_path / "absent.csv", SPEC, dtype="bfloat16")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00kind")
    with pytest.raises(FileError, match="cannot read"):
        import_profile(tmp_path / "binary.csv", SPEC, dtype="bfloat16")
