"""What people look at: whole rendered tables, timelines and traces, compared as text."""

import csv
import io
import json
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import msgspec
import pytest

from pptune.plan import Schedule, make_plan
from pptune.profiles import Overhead
from pptune.runtime.doctor import Device, Diagnosis
from pptune.schedules import generate
from pptune.simulator import Costs, simulate
from pptune.validation_file import RecordedAction, Summary
from pptune.views.doctor import doctor_sheets
from pptune.views.html import report
from pptune.views.plans import estimate_sheet, layers_text, ranking, shown_label, space_sheet
from pptune.views.profile import profile_sheets, throughput_sheet
from pptune.views.slices import Slice, Timeline, flows, predicted_timeline, recorded_timeline
from pptune.views.stages import stage_sheet
from pptune.views.tables import Sheet, as_csv, as_markdown, make_console
from pptune.views.timeline import TextTimeline, _phases
from pptune.views.trace import trace_json
from pptune.views.validation import breakdowns_sheet, models_sheet, runs_sheet
from tests.sample_documents import INTERLEAVED, sample_plans, sample_report, sample_validation
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
* Global batch held fixed at 8 sequences: M = global batch / (b x D), so a larger b means fewer micro-batches.
* All 12 legal plans were evaluated or excluded by a proven bound: rank 1 is optimal for the cost model.
* Illegal on torch: layers 5, rounds 3.
* Legal but infeasible: 2 (do not fit in memory).
* Why the others lost to rank 1: more overhead 7, more bubble 4.
* Speed-up is over the baseline (base), 1f1b P4 V1 b2 M4.
* bubble: idle / total time over all ranks; exposed, overhead: of the slowest rank; memory: peak of the fullest rank;
  layers: blocks per stage, 2x8 is 2 on each of 8.
* Assumed: links are equal.
* warning: machine [busy]"""  # noqa: E501
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
* Run 2 failed (oom): rank 3 ran out of memory in step 2.
* Winner: interleaved P4 V2 b1 M8 N4.
* Measured speed-up over the baseline: 1.077x.
* The measured order is the predicted one.
* Mean error 2.8%, largest 3.8% (noise floor 1.1%).
* Rank correlation of predicted and measured: 1.00."""
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
    assert shown_label("1f1b P4 V1 b1 M8 D2 [4,4,4,2]") == "1f1b P4 V1 b1 M8 D2 [4x3 2]"
    assert shown_label(INTERLEAVED.label) == INTERLEAVED.label


def test_a_dry_run_counts_the_space() -> None:
    space = msgspec.structs.replace(sample_plans().space, axes={"num_chunks": ("1", "2")})
    shown = rendered(space_sheet(space), 80)
    assert [line.split() for line in shown.splitlines()[3:7]] == [
        ["legal", "-", "12"], ["legal,", "but", "does", "not", "fit", "-", "2"],
        ["illegal", "layers", "5"], ["illegal", "rounds", "3"],
    ]  # fmt: skip
    assert shown.endswith("num_chunks: 1, 2")


def test_a_machine_and_its_problems_are_told() -> None:
    diagnosis = Diagnosis(
        host="node7",
        versions={"torch": "2.13.0"},
        packages={"transformers": None},
        cores=2,
        devices=(Device(name="H200", memory_bytes=2**37, peak_bfloat16_flops_per_s=989.5e12),),
        backends=("gloo",),
        environment={"OMP_NUM_THREADS": "1"},
        problems=("this host has no address",),
    )
    sheets = doctor_sheets(diagnosis, links=(uniform_link(1e-5, 1e9),), exchange="ok")
    shown = "\n".join(rendered(sheet, 80) for sheet in sheets)
    for text in (
        "H200, 128 GiB, 990 TFLOP/s bfloat16, dense", "OMP_NUM_THREADS", "not installed",
        "* this host has no address", "1.00 GB/s",
    ):  # fmt: skip
        assert text in shown
    healthy = msgspec.structs.replace(diagnosis, problems=())
    assert "No problem was found." in rendered(doctor_sheets(healthy)[-1], 80)


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


def hand_played_timeline() -> Timeline:
    """1F1B on two ranks, forward 1 s, backward 2 s, free messages, played by hand."""
    plan = make_plan(
        schedule="1f1b", num_ranks=2, num_chunks=1, microbatch_size=1, num_microbatches=2,
        layers_per_stage=(1, 1),
    )  # fmt: skip
    return Timeline(
        name="predicted",
        plan=plan,
        slices=(
            Slice(0, 0, "F", 0, 0.0, 1.0), Slice(0, 0, "F", 1, 1.0, 2.0),
            Slice(0, 0, "B", 0, 4.0, 6.0), Slice(0, 0, "B", 1, 7.0, 9.0),
            Slice(1, 1, "F", 0, 1.0, 2.0), Slice(1, 1, "B", 0, 2.0, 4.0),
            Slice(1, 1, "F", 1, 4.0, 5.0), Slice(1, 1, "B", 1, 5.0, 7.0),
        ),
    )  # fmt: skip


def simulated_timeline(
    schedule: Schedule, *, ranks: int, chunks: int, microbatches: int, transfer_s: float = 0.0
) -> Timeline:
    """Forward 1 ms and backward 2 ms per rank, as the simulator plays them."""
    plan = make_plan(
        schedule=schedule, num_ranks=ranks, num_chunks=chunks, microbatch_size=1,
        num_microbatches=microbatches, layers_per_stage=(1,) * ranks * chunks,
    )  # fmt: skip
    order = generate(
        schedule, num_ranks=ranks, num_chunks=chunks, num_microbatches=microbatches,
        microbatch_group_size=plan.microbatch_group_size,
    )  # fmt: skip
    costs = Costs.uniform(
        num_ranks=ranks, num_chunks=chunks, forward_s=1e-3, backward_s=2e-3, transfer_s=transfer_s
    )
    spans = simulate(order, costs, spans=True).spans
    assert spans is not None
    return predicted_timeline(plan, spans)


def test_text_timeline_equals_the_hand_played_step() -> None:
    shown = rendered(TextTimeline(hand_played_timeline()), 53).splitlines()
    assert shown[0] == "1f1b P2 V1 b1 M2, predicted: 9.00 s"
    assert shown[-3:] == [
        "rank 0  F0---F1---..........B0--------.....B1--------",
        "rank 1  .....F0---B0--------F1---B1--------..........",
        "        |0 s            |3.20 s         |6.40 s",
    ]


def test_chunks_are_named_by_stage() -> None:
    timeline = simulated_timeline("interleaved", ranks=2, chunks=2, microbatches=2)
    row = next(
        line for line in rendered(TextTimeline(timeline), 170).splitlines() if "rank 0" in line
    )
    assert "0F0-" in row
    assert "2B1-" in row


def test_a_long_step_is_summed_up_and_its_ends_magnified() -> None:
    shown = rendered(
        TextTimeline(simulated_timeline("1f1b", ranks=4, chunks=1, microbatches=64)), 80
    )
    rows = [line[8:] for line in shown.splitlines() if line.startswith("rank")]
    assert len(rows) == 12
    overview, first, last = rows[:4], rows[4:8], rows[8:]
    # (P - 1 + M) x 3 ms = 201 ms in 72 cells: rank 3 waits for 3 forwards and, at the end, for 3
    # backwards; in between all ranks mix forwards and backwards.
    assert overview[3].startswith(".=") or overview[3].startswith("..")
    assert set(overview[3][5:-5]) == {"="}
    assert overview[3].endswith("..")
    assert first[0].startswith("F0-F")
    assert last[0].endswith("B63--")
    assert last[3].endswith(".")


def test_phases_follow_the_schedule() -> None:
    rows = hand_played_timeline().by_rank()
    assert _phases(rows[0]) == ["warmup", "warmup", "cooldown", "cooldown"]
    assert _phases(rows[1]) == ["warmup", "steady backward", "steady forward", "cooldown"]


def test_an_empty_timeline_is_said() -> None:
    empty = Timeline(name="measured", plan=hand_played_timeline().plan, slices=())
    assert "No action was recorded" in rendered(TextTimeline(empty), 60)


def test_timeline_fits_a_narrow_terminal_without_colour() -> None:
    timeline = simulated_timeline("interleaved", ranks=8, chunks=4, microbatches=16)
    assert max(map(len, rendered(TextTimeline(timeline), 60).splitlines())) <= 60


def test_stages_name_their_rank_layers_and_ends() -> None:
    plan = make_plan(
        schedule="zb-v", num_ranks=4, num_chunks=2, microbatch_size=1, num_microbatches=8,
        layers_per_stage=(1, 2, 2, 2, 2, 2, 2, 1),
    )  # fmt: skip
    sheet = stage_sheet(
        plan, forward_s=[0.001] * 8, backward_s=[0.002] * 8, peak_memory_bytes=(4, 3, 2, 1)
    )
    assert [row[:4] for row in sheet.rows] == [
        (0, 0, 0, "embedding + 1"), (1, 1, 0, "2"), (2, 2, 0, "2"), (3, 3, 0, "2"),
        (4, 3, 1, "2"), (5, 2, 1, "2"), (6, 1, 1, "2"), (7, 0, 1, "1 + head"),
    ]  # fmt: skip
    assert [row[-1] for row in sheet.rows] == [4, 3, 2, 1, 1, 2, 3, 4]


def events_of(timelines: Sequence[Timeline], phase: str) -> list[dict[str, Any]]:
    events = json.loads(trace_json(timelines))["traceEvents"]
    return [event for event in events if event["ph"] == phase]


def check_trace(trace: bytes) -> None:
    """Only events of Chrome's format, no slice overlaps another, every arrow has two ends."""
    events = json.loads(trace)["traceEvents"]
    assert {event["ph"] for event in events} <= {"M", "X", "s", "f"}
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    rows: dict[tuple[int, int], list[tuple[float, float]]] = {}
    ends: dict[str, dict[str, dict[str, Any]]] = {}
    for event in events:
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        if event["ph"] == "X":
            assert event["ts"] >= 0
            assert event["dur"] >= 0
            rows.setdefault((event["pid"], event["tid"]), []).append(
                (event["ts"], event["ts"] + event["dur"])
            )
        elif event["ph"] in "sf":
            assert event["ph"] not in ends.setdefault(event["id"], {})
            ends[event["id"]][event["ph"]] = event
    assert rows.keys() <= named
    for slices in rows.values():
        slices.sort()
        for (_, end), (start, _) in pairwise(slices):
            assert start >= end - 1e-6
    for pair in ends.values():
        assert pair.keys() == {"s", "f"}
        assert pair["f"]["ts"] >= pair["s"]["ts"]
        assert pair["f"]["bp"] == "e"
        for event in pair.values():
            row = rows[event["pid"], event["tid"]]
            assert any(start <= event["ts"] <= end for start, end in row)


def test_trace_of_a_large_step_is_valid_and_complete() -> None:
    ranks, chunks, microbatches = 8, 4, 64
    timeline = simulated_timeline(
        "interleaved", ranks=ranks, chunks=chunks, microbatches=microbatches, transfer_s=1e-5
    )
    trace = trace_json([timeline])
    check_trace(trace)
    slices = events_of([timeline], "X")
    assert len(slices) == 2 * ranks * chunks * microbatches == 4096
    durations = {(event["cat"], event["dur"]) for event in slices}
    assert durations == {("forward", 250.0), ("backward", 500.0)}
    # Every boundary between stages is crossed by an activation and a gradient of each micro-batch.
    arrows = events_of([timeline], "s")
    assert len(arrows) == 2 * (ranks * chunks - 1) * microbatches
    starts = {(event["tid"], event["ts"]) for event in slices}
    assert all((event["tid"], event["ts"]) in starts for event in events_of([timeline], "f"))


def test_trace_puts_the_measured_step_beside_the_predicted_one() -> None:
    predicted = hand_played_timeline()
    actions = [
        RecordedAction(
            rank=item.rank, stage=item.stage, work=item.work, microbatch=item.microbatch,
            start_s=item.start_s * 1.1, end_s=item.end_s * 1.1,
        )
        for item in predicted.slices
    ]  # fmt: skip
    measured = recorded_timeline(predicted.plan, actions)
    both = [predicted, measured]
    check_trace(trace_json(both))
    names = [e["args"]["name"] for e in events_of(both, "M") if e["name"] == "process_name"]
    assert [name.split(":")[0] for name in names] == ["predicted", "measured"]
    assert sum(e["dur"] for e in events_of(both, "X") if e["pid"] == 2) == pytest.approx(
        1.1 * sum(e["dur"] for e in events_of(both, "X") if e["pid"] == 1)
    )


def test_a_turn_inside_a_rank_is_no_message() -> None:
    timeline = simulated_timeline("1f1b", ranks=1, chunks=1, microbatches=4)
    assert flows(timeline) == []


def test_report_needs_nothing_from_outside() -> None:
    page = sample_report()
    assert page.count("Plotly.newPlot") >= 7
    assert page.count("plotly.js v") == 1
    references = re.findall(
        r"<[^>]*\s(?:src|href)\s*=\s*[\"']?(?!data:)[^\"'>]+", strip_scripts(page)
    )
    assert references == []
    assert "default-src 'none'" in page


def test_report_says_the_answer_first() -> None:
    text = re.sub(r"<[^>]+>", " ", strip_scripts(sample_report()))
    answer = "Use interleaved with V = 2 stages per rank, micro-batches of b = 1 and M = 8"
    assert answer in text
    assert "1.10 times as fast as the baseline 1f1b P4 V1 b2 M4 (110 ms)" in text
    assert "Measured: 104 ms +- 1.2%; the prediction is off by -3.8%. It won." in text
    for term in ("V, chunks per rank", "b, micro-batch size", "M, micro-batches"):
        assert term in text


def test_report_without_validation_says_so() -> None:
    plans = sample_plans()
    page = report(plans, synthetic_profile(num_layers=16))
    assert "Not validated yet" in page
    second = report(plans, synthetic_profile(num_layers=16), rank=2)
    assert "Number 2 in the ranking: 1f1b with one stage per rank" in second
    assert "Blocks per stage, in stage order: 4, 4, 5, 3." in second
    empty = msgspec.structs.replace(plans, candidates=(), baseline=None)
    assert "No plan is both legal and fits" in report(empty, synthetic_profile(num_layers=16))


def test_report_escapes_names() -> None:
    plans = sample_plans()
    hostile = msgspec.structs.replace(plans.model, name="</script><script>alert(1)</script>")
    page = report(msgspec.structs.replace(plans, model=hostile), synthetic_profile(num_layers=16))
    assert "<script>alert" not in page


def strip_scripts(page: str) -> str:
    return re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
