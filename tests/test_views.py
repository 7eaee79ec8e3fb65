"""What people look at: whole rendered tables, timelines and traces, compared as text."""

import csv
import io

import msgspec
import pytest

from pptune.profiles import Overhead
from pptune.validation_file import Summary
from pptune.views.plans import estimate_sheet, layers_text, ranking
from pptune.views.profile import profile_sheets, throughput_sheet
from pptune.views.tables import Sheet, as_csv, as_markdown, make_console
from pptune.views.validation import breakdowns_sheet, models_sheet, runs_sheet
from tests.sample_documents import sample_plans, sample_validation
from tests.synthetic import synthetic_profile, uniform_link


def rendered(sheet: Sheet, width: int) -> str:
    """What a terminal of this width would show, without trailing spaces."""
    stream = io.StringIO()
    make_console(stream, width=width).print(sheet)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())


def test_ranking_on_a_wide_terminal() -> None:
    assert (
        rendered(ranking(sample_plans()), 120)
        == """\
toy: plans for 8 sequences per step on torch
                                         step                    exposed  overhead
#     schedule     V  b  M  N  layers      ms  speed-up  bubble       ms        ms   memory  fits        tokens/s
-----------------------------------------------------------------------------------------------------------------
1     interleaved  2  1  8  4  2x8      100.0    1.100x   12.5%    4.000     5.000  400 MiB  yes           10,240
2     1f1b         1  1  8  -  4x2 5 3  101.2    1.087x   12.5%    4.048     5.060  400 MiB  borderline    10,240
base  1f1b         1  2  4  -  4x4      110.0    1.000x   12.5%    4.400     5.500  400 MiB  yes           10,240
Global batch held fixed at 8 sequences: M = global batch / (b x D), so a larger b means fewer micro-batches.
All 12 legal plans were evaluated or excluded by a proven bound: rank 1 is optimal for the cost model.
Illegal on torch: layers 5, rounds 3.
Legal but infeasible: 2 (do not fit in memory).
Why the others lost to rank 1: more overhead 7, more bubble 4.
Speed-up is over the baseline (base), 1f1b P4 V1 b2 M4.
bubble: idle / total time over all ranks; exposed, overhead: of the slowest rank; memory: peak of the fullest rank;
layers: blocks per stage, 2x8 is 2 on each of 8.
warning: machine [busy]"""  # noqa: E501
    )


def test_ranking_on_a_narrow_terminal_says_what_is_missing() -> None:
    lines = rendered(ranking(sample_plans()), 60).splitlines()
    assert lines[1:8] == [
        "                                step",
        "#     schedule     V  b  M  N     ms  speed-up  fits",
        "----------------------------------------------------------",
        "1     interleaved  2  1  8  4  100.0    1.100x  yes",
        "2     1f1b         1  1  8  -  101.2    1.087x  borderline",
        "base  1f1b         1  2  4  -  110.0    1.000x  yes",
        "not shown at this width: layers, bubble, exposed ms,",
    ]
    assert max(map(len, lines)) <= 60


def test_validation_table_and_verdict() -> None:
    assert (
        rendered(runs_sheet(sample_validation()), 99)
        == """\
Predicted against measured
                           predicted  measured         noise     memory    memory
run  schedule     V  b  M         ms        ms  error     +-  predicted  measured  verdict  status
--------------------------------------------------------------------------------------------------
  1  interleaved  2  1  8      100.0     104.0  -3.8%   1.2%    400 MiB   390 MiB  winner   ok
  2  1f1b         1  1  8      101.2         -      -      -    400 MiB         -           oom
  3  1f1b         1  2  4      110.0     112.0  -1.8%   1.2%    400 MiB   390 MiB  base     ok
not shown at this width: N, layers, steps, reason
Run 2 failed (oom): rank 3 ran out of memory in step 2.
Winner: interleaved P4 V2 b1 M8 N4.
Measured speed-up over the baseline: 1.077x.
The measured order is the predicted one.
Mean error 2.8%, largest 3.8% (noise floor 1.1%).
Rank correlation of predicted and measured: 1.00."""
    )


def test_breakdowns_stand_side_by_side() -> None:
    lines = rendered(breakdowns_sheet(sample_validation()), 100).splitlines()
    assert lines[5:7] == [
        "  1  interleaved P4 V2 b1 M8 N4  predicted    80.00   10.00      4.00      5.00      1.00",
        "  1  interleaved P4 V2 b1 M8 N4  measured     83.00   10.00      5.00      5.00      1.00",
    ]
    assert len(lines) == 9


def test_a_tie_names_the_plans_in_it() -> None:
    tied = sample_validation()
    assert tied.summary is not None
    labels = (tied.runs[0].plan.label, tied.runs[2].plan.label)
    tied = msgspec.structs.replace(
        tied, summary=msgspec.structs.replace(tied.summary, winner="tie", tied_with=labels)
    )
    shown = rendered(runs_sheet(tied), 140)
    assert f"Tie within the noise: {labels[0]}; {labels[1]}." in shown
    assert shown.count("tied") == 2
    assert "tied, base" in shown


def test_an_unfinished_validation_has_no_verdict() -> None:
    unfinished = msgspec.structs.replace(sample_validation(), summary=None)
    assert "no verdict yet" in rendered(runs_sheet(unfinished), 100)
    assert models_sheet(unfinished) is None


def test_nothing_finished_is_said() -> None:
    empty = Summary(
        mape=None, max_abs_error=None, spearman=None, regret_top1=None, regret_top3=None,
        winner=None, speedup_over_baseline=None, order_kept=None,
    )  # fmt: skip
    failed = msgspec.structs.replace(sample_validation(), summary=empty)
    assert "No winner: no run finished." in rendered(runs_sheet(failed), 100)


def test_csv_holds_every_column_in_si_units() -> None:
    rows = list(csv.DictReader(io.StringIO(as_csv(ranking(sample_plans())))))
    assert [row["rank"] for row in rows] == ["1", "2", "base"]
    assert [float(row["step_time_s"]) for row in rows] == [0.1, 0.1012, 0.11]
    assert rows[1]["layers_per_stage"] == "4 4 5 3"
    assert rows[1]["microbatch_group_size"] == ""
    assert int(rows[0]["peak_memory_bytes"]) == 400 * 2**20


def test_markdown_is_a_pipe_table() -> None:
    lines = as_markdown(runs_sheet(sample_validation())).splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert len(table) == 5
    assert {line.count("|") for line in table} == {table[0].count("|")}
    assert "| rank 3 ran out of memory in step 2 |" in table[3]


def test_markdown_escapes_what_would_break_the_table() -> None:
    run = msgspec.structs.replace(sample_validation().runs[1], reason="a | b\nc")
    validation = msgspec.structs.replace(sample_validation(), runs=(run,))
    assert "a \\| b c" in as_markdown(runs_sheet(validation))


def test_every_sheet_fits_sixty_columns() -> None:
    profile = synthetic_profile(
        links=(uniform_link(1e-5, 1e10),), overheads={"ideal": Overhead(forward_s=0, backward_s=0)}
    )
    sheets = [
        ranking(sample_plans()), runs_sheet(sample_validation()),
        breakdowns_sheet(sample_validation()), models_sheet(sample_validation()),
        estimate_sheet(sample_plans().baseline), *profile_sheets(profile),
    ]  # fmt: skip
    for sheet in sheets:
        assert max(map(len, rendered(sheet, 60).splitlines())) <= 60


def test_estimate_parts_carry_their_share() -> None:
    baseline = sample_plans().baseline
    assert baseline is not None
    shown = rendered(estimate_sheet(baseline), 80)
    assert "  bubble                    11.0 ms (10.0%)" in shown
    assert "peak memory, fullest rank  400 MiB (rank 3)" in shown
    assert "MFU                                       -" in shown
    assert "assumed: links are equal" in shown


def test_profile_throughput_is_batch_tokens_over_all_layers() -> None:
    profile = synthetic_profile(num_layers=4, block=(1e-3, 3e-3), head=(2e-3, 2e-3), seq_len=100)
    sheet = throughput_sheet(profile)
    assert sheet is not None
    # 4 x (1 + 3) + (2 + 2) = 20 ms for one sequence of 100 tokens.
    assert sheet.rows[0][:4] == pytest.approx((1, 0.02, 0.02, 5000.0))
    assert "90 %" in sheet.notes[0]


def test_slowing_kernels_are_said_in_words() -> None:
    profile = synthetic_profile(block=lambda b: (1e-3 * b**1.3, 2e-3 * b**1.3))
    assert "slow down with b" in rendered(throughput_sheet(profile), 100)


def test_runs_of_equal_stages_are_folded() -> None:
    assert layers_text((7, 8, 8, 8, 7)) == "7 8x3 7"


@pytest.mark.parametrize("variable", ["NO_COLOR", "plain"])
def test_no_escape_codes_without_a_terminal(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    stream = Terminal() if variable == "NO_COLOR" else io.StringIO()
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    if variable == "NO_COLOR":
        make_console(stream, width=100).print(ranking(sample_plans()))
        assert "\x1b[" in stream.getvalue()  # Colour is there until it is turned off.
        monkeypatch.setenv("NO_COLOR", "1")
        stream = Terminal()
    make_console(stream, width=100).print(ranking(sample_plans()))
    assert "\x1b" not in stream.getvalue()
    assert "[busy]" in stream.getvalue()


class Terminal(io.StringIO):
    """Text that says that it goes to a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_narrow_encoding_does_not_fail() -> None:
    binary = io.BytesIO()
    stream = io.TextIOWrapper(binary, encoding="ascii")
    plans = msgspec.structs.replace(sample_plans(), warnings=("l\u00e4uft \u2026",))
    make_console(stream, width=100).print(ranking(plans))
    stream.flush()
    assert b"l\\xe4uft \\u2026" in binary.getvalue()
