"""pptune search: every legal plan, predicted and ranked."""

from pathlib import Path
from typing import Annotated

import typer

from pptune.cli import app
from pptune.cli.options import (
    OutputOption,
    QuietOption,
    SeedOption,
    TableForm,
    TableFormOption,
    at_least_one,
    existing,
    ints_or_none,
    one_of,
    parse_link,
    seconds_or_none,
    words,
)
from pptune.errors import UsageError
from pptune.units import parse_bytes

DEFAULT_OUTPUT = Path("plans.json")
LIST_ALL_UP_TO = 1000
"""Plans that a plans file holds beyond the rows printed, for `validate --exhaustive`."""


@app.command(
    epilog="Example: pptune search profiles/gpt-small-cpu-cpu.json --global-batch-size 16 "
    "--chunks 1,2,4"
)
def search(
    profile: Annotated[Path, typer.Argument(help="Profile that `pptune profile` wrote.")],
    global_batch_size: Annotated[int, typer.Option(help="Sequences per step, all replicas.")],
    ranks: Annotated[int | None, typer.Option(help="P; default: as profiled.")] = None,
    data_parallel: Annotated[int, typer.Option(help="D, replicas of the pipeline.")] = 1,
    gpus: Annotated[int | None, typer.Option(help="Search P and D for so many GPUs.")] = None,
    chunks: Annotated[str | None, typer.Option(help="V: 1,2,4.")] = None,
    micro_batch_sizes: Annotated[str | None, typer.Option(help="b: 1,2,4.")] = None,
    microbatch_group_sizes: Annotated[str | None, typer.Option(help="N: 2,4.")] = None,
    schedules: Annotated[str, typer.Option(help="Which to try.")] = "1f1b,interleaved",
    target: Annotated[str, typer.Option(help="Trainer whose rules hold.")] = "torch",
    recompute: Annotated[str, typer.Option(help="none, full or both.")] = "none",
    memory_limit: Annotated[str | None, typer.Option(help="Per rank: 24GiB.")] = None,
    tensor_parallel: Annotated[int, typer.Option(help="T, as profiled.")] = 1,
    context_parallel: Annotated[int, typer.Option(help="C, as profiled.")] = 1,
    zero: Annotated[int, typer.Option(help="1 shards the optimizer over replicas.")] = 0,
    ranks_per_node: Annotated[int | None, typer.Option(help="Which hops cross nodes.")] = None,
    link: Annotated[list[str] | None, typer.Option(help="intra|inter:LATENCY,BANDWIDTH")] = None,
    allow_empty_stages: Annotated[
        bool,
        typer.Option("--allow-empty-stages", show_default=False, help="Stages without blocks."),
    ] = False,
    objective: Annotated[str, typer.Option(help="time, memory or pareto.")] = "time",
    baseline: Annotated[
        str | None, typer.Option(help='Default: best 1F1B. "schedule=1f1b microbatch_size=1".')
    ] = None,
    top: Annotated[int, typer.Option(help="Rows to print.")] = 10,
    trials: Annotated[int | None, typer.Option(help="Plans to sample in a huge space.")] = None,
    timeout: Annotated[str | None, typer.Option(help="Stop searching after this long.")] = None,
    storage: Annotated[str | None, typer.Option(help="Optuna URL: sqlite:///f.db.")] = None,
    study_name: Annotated[str | None, typer.Option(help="Study in the storage.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", show_default=False, help="Count plans; predict none.")
    ] = False,
    seed: SeedOption = 0,
    output: OutputOption = None,
    form: TableFormOption = TableForm.table,
    quiet: QuietOption = False,
) -> None:
    """Predict every legal plan on a profile and rank them."""
    import hashlib
    from typing import get_args

    from pptune import search as searching
    from pptune.cli.output import Progress, say, show_json, show_sheets, warnings_as_lines
    from pptune.cost_model import Setting
    from pptune.files import check_writable
    from pptune.plan import Schedule
    from pptune.plans_file import ProfileReference, save_plans
    from pptune.profiles import load_profile
    from pptune.targets import parse_target
    from pptune.views.plans import ranking

    one_of(objective, ("time", "memory", "pareto"), "--objective")
    one_of(recompute, ("none", "full", "both"), "--recompute")
    at_least_one(
        global_batch_size=global_batch_size, top=top, ranks=ranks, data_parallel=data_parallel,
        gpus=gpus, tensor_parallel=tensor_parallel, context_parallel=context_parallel,
        ranks_per_node=ranks_per_node, trials=trials,
    )  # fmt: skip
    if zero not in (0, 1):
        raise UsageError(f"--zero is {zero}; use 0 or 1")
    path = output or DEFAULT_OUTPUT
    if not dry_run:
        check_writable(path)
    with warnings_as_lines(quiet=quiet):
        known = load_profile(existing(profile, "profile"))
    aim = parse_target(target)
    setting = Setting(
        target=aim, ranks_per_node=ranks_per_node, zero_stage=zero,
        memory_limit_bytes=None
        if memory_limit is None
        else parse_bytes(memory_limit, what="--memory-limit"),
        tensor_parallel=tensor_parallel, context_parallel=context_parallel,
        links=tuple(parse_link(text) for text in link or []),
    )  # fmt: skip
    request = searching.Request(
        global_batch_size=global_batch_size, num_ranks=ranks,
        data_parallel=data_parallel, num_gpus=gpus,
        schedules=words(schedules, get_args(Schedule), "--schedules") or (),  # type: ignore[arg-type]
        num_chunks=ints_or_none(chunks, "--chunks"),
        microbatch_sizes=ints_or_none(micro_batch_sizes, "--micro-batch-sizes"),
        microbatch_group_sizes=ints_or_none(microbatch_group_sizes, "--microbatch-group-sizes"),
        recompute=("none", "full") if recompute == "both" else (recompute,),  # type: ignore[arg-type]
        allow_empty_stages=allow_empty_stages, objective=objective,  # type: ignore[arg-type]
        baseline=baseline, top=top, list_all_up_to=LIST_ALL_UP_TO, trials=trials,
        timeout_s=seconds_or_none(timeout, "--timeout"), storage=storage, study_name=study_name,
        seed=seed,
    )  # fmt: skip
    if dry_run:
        from pptune.views.plans import space_sheet

        space = searching.count_plans(known, setting, request)
        if form is TableForm.json:
            show_json(space)
        else:
            show_sheets([space_sheet(space)], form.value)
        return
    reference = ProfileReference(
        path=str(profile), digest=hashlib.sha256(profile.read_bytes()).hexdigest()
    )
    with Progress("search", quiet=quiet) as progress:
        plans = searching.search(
            known, setting, request, reference=reference,
            on_progress=lambda done, total: progress.update(done, total, "plans"),
        )  # fmt: skip
    save_plans(plans, path)
    if form is TableForm.json:
        show_json(plans)
    else:
        show_sheets([ranking(plans, top=top)], form.value)
    say(f"wrote {path}", quiet=quiet)
