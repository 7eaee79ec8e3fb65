"""pptune tune: profile, search and validate in one go."""

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pptune.cli import app
from pptune.cli.options import OutputOption, QuietOption, ints_or_none
from pptune.cli.profile import DEFAULT_BUDGET, DEFAULT_TIMEOUT, file_name, run_profile
from pptune.cli.search import LIST_ALL_UP_TO
from pptune.cli.validate import print_validation, run_validation
from pptune.errors import UsageError
from pptune.units import format_ratio, format_seconds

if TYPE_CHECKING:
    from pptune.plans_file import PlansFile
    from pptune.validation_file import ValidationFile

_PER_RANK = 8
"""Sequences per step and rank where --global-batch-size is not given."""


@app.command(epilog="Example: pptune tune gpt-small-cpu --global-batch-size 16")
def tune(
    model: Annotated[
        str | None, typer.Argument(help="Preset, config.json, or package.module:function.")
    ] = None,
    global_batch_size: Annotated[
        int | None, typer.Option(help=f"Sequences per step; default {_PER_RANK} per rank.")
    ] = None,
    ranks: Annotated[int | None, typer.Option(help="Default: all GPUs, else 2 processes.")] = None,
    micro_batch_sizes: Annotated[str | None, typer.Option(help="b: 1,2,4.")] = None,
    chunks: Annotated[str | None, typer.Option(help="V: 1,2,4.")] = None,
    seq_len: Annotated[int | None, typer.Option(help="Tokens per sequence.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Default: float32, bfloat16 on GPUs.")] = None,
    device: Annotated[str, typer.Option(help="auto, cuda or cpu.")] = "auto",
    top: Annotated[int, typer.Option(help="Plans to run for real.")] = 3,
    repeats: Annotated[int, typer.Option(help="Rounds over the plans that run.")] = 5,
    budget: Annotated[str, typer.Option(help="Time for the profile.")] = DEFAULT_BUDGET,
    timeout: Annotated[str, typer.Option(help="Longest time without an answer.")] = DEFAULT_TIMEOUT,
    output: OutputOption = None,
    quiet: QuietOption = False,
) -> None:
    """Measure, predict, search and prove: the one command to start with."""
    from pptune import search as searching
    from pptune.cli.options import TableForm
    from pptune.cli.output import Progress, say, show, show_sheets
    from pptune.cli.show import write_report
    from pptune.cost_model import Setting
    from pptune.plans_file import ProfileReference, save_plans
    from pptune.presets import DEFAULT_MODEL, resolve_model
    from pptune.runtime.world import detect_world
    from pptune.targets import parse_target
    from pptune.validate import Request, digest_of
    from pptune.validate.rounds import Rounds
    from pptune.views.plans import ranking
    from pptune.views.profile import profile_sheets

    if global_batch_size is not None and global_batch_size < 1:
        raise UsageError(f"--global-batch-size is {global_batch_size}; it must be 1 or more")
    spec = resolve_model(model or DEFAULT_MODEL, seq_len=seq_len)
    world = detect_world(ranks, device)
    if world.num_ranks < 2:
        raise UsageError(
            f"a pipeline needs 2 or more ranks; you have {world.num_ranks}. Try it on CPU: "
            "pptune tune --ranks 2 --device cpu"
        )
    folder = output or Path(f"pptune-results-{file_name(spec)}-{datetime.now():%Y%m%d-%H%M%S}")
    profiled = run_profile(
        spec, ranks=ranks, sizes=micro_batch_sizes, dtype=dtype, device=device,
        recompute="none", budget=budget, max_noise="2%", timeout=timeout, use_cache=True,
        output=folder / "profile.json", quiet=quiet,
    )  # fmt: skip
    batch = global_batch_size or _PER_RANK * world.num_ranks
    if profiled is None:
        from pptune.runtime.launch import follow
        from pptune.units import parse_seconds

        follow(world, timeout_s=parse_seconds(timeout))
        return
    profile, profile_path = profiled
    show(*profile_sheets(profile))
    aim = parse_target("torch")
    with Progress("search", quiet=quiet) as progress:
        plans = searching.search(
            profile,
            Setting(target=aim),
            searching.Request(
                global_batch_size=batch, num_ranks=world.num_ranks, list_all_up_to=LIST_ALL_UP_TO,
                num_chunks=ints_or_none(chunks, "--chunks"),
                microbatch_sizes=ints_or_none(micro_batch_sizes, "--micro-batch-sizes"),
            ),
            reference=ProfileReference(path=str(profile_path), digest=digest_of(profile_path)),
            on_progress=lambda done, total: progress.update(done, total, "plans"),
        )  # fmt: skip
    plans_path = folder / "plans.json"
    save_plans(plans, plans_path)
    show_sheets([ranking(plans)], "table")
    validation_path = folder / "validation.json"
    validation = run_validation(
        plans_path, plans, profile,
        Request(
            top=top, rounds=Rounds(repeats=repeats, record_timeline=True), device=world.device,
        ),
        path=validation_path, resume=False, quiet=quiet,
    )  # fmt: skip
    if validation is None:
        return
    print_validation(validation, TableForm.table)
    write_report(plans, profile, folder / "report.html", rank=1, validation=validation_path)
    say(f"wrote {folder}/: profile.json, plans.json, validation.json, report.html", quiet=quiet)
    show(advice(plans, validation))


def advice(plans: "PlansFile", validation: "ValidationFile") -> str:
    """The last line: what to use and what it gains."""
    done = [run for run in validation.runs if run.measured_s is not None]
    baseline = next((run for run in done if run.is_baseline), None)
    pick = plans.candidates[0].plan
    picked = next((run for run in done if run.plan == pick), None)
    if picked is None or picked.measured_s is None:
        return f"Use {pick.label}: predicted best, but its run failed; see the validation."
    text = f"Use {pick.label}: {format_seconds(picked.measured_s)} per step"
    summary = validation.summary
    if baseline is None or baseline.measured_s is None:
        return f"{text}."
    if baseline is picked:
        return f"{text}; the best 1F1B plan is the pick itself: more chunks don't pay here."
    gain = baseline.measured_s / picked.measured_s - 1
    tied = summary is not None and {pick.label, baseline.plan.label} <= set(summary.tied_with)
    if tied:
        return (
            f"{text}; a tie with the best 1F1B plan ({baseline.plan.label}) on this machine: the "
            f"difference of {format_ratio(gain, sign=True)} is within the noise."
        )
    return (
        f"{text}, {format_ratio(gain, sign=True)} throughput over the best 1F1B plan "
        f"({baseline.plan.label}), measured."
    )
