"""pptune validate: the best plans, run for real."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from pptune.cli import app
from pptune.cli.options import (
    OutputOption,
    QuietOption,
    TableForm,
    TableFormOption,
    existing,
    seconds_or_none,
)
from pptune.errors import NoAnswer, UsageError
from pptune.units import format_ratio, parse_ratio, parse_seconds

if TYPE_CHECKING:
    from pptune.profiles import Profile
    from pptune.validate import Request
    from pptune.validation_file import ValidationFile

DEFAULT_OUTPUT = Path("validation.json")
DEFAULT_TIMEOUT = "2m"
DEFAULT_REPEATS = 5
DEFAULT_TOP = 3


@app.command(epilog="Example: pptune validate plans.json --top 3")
def validate(
    plans: Annotated[Path, typer.Argument(help="Plans that `pptune search` wrote.")],
    model: Annotated[
        str | None,
        typer.Option(
            help="Needed where the plans are for a package.module:function: that name again. "
            "Files alone never run code."
        ),
    ] = None,
    top: Annotated[
        int | None, typer.Option(help="How many of the best plans to run; default 3.")
    ] = None,
    baseline: Annotated[
        str | None, typer.Option(help="Default: the file's. Like schedule=1f1b microbatch_size=1.")
    ] = None,
    exhaustive: Annotated[
        bool, typer.Option("--exhaustive", show_default=False, help="Run every plan in the file.")
    ] = False,
    repeats: Annotated[int, typer.Option(help="Rounds over all plans.")] = DEFAULT_REPEATS,
    budget: Annotated[
        str | None,
        typer.Option(help="Time in which to find the fastest plan of the file by running: 10m."),
    ] = None,
    storage: Annotated[
        str | None, typer.Option(help="Optuna storage that keeps the runs of a --budget.")
    ] = None,
    study_name: Annotated[str | None, typer.Option(help="The study's name in --storage.")] = None,
    timeout: Annotated[str, typer.Option(help="Longest time of one visit.")] = DEFAULT_TIMEOUT,
    tolerance: Annotated[
        str | None, typer.Option(help="Exit 1 where an error is larger: 5%.")
    ] = None,
    replay: Annotated[
        bool, typer.Option("--replay", show_default=False, help="Stages wait instead of computing.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", show_default=False, help="Go on with the output file.")
    ] = False,
    recalibrate: Annotated[
        bool,
        typer.Option(
            "--recalibrate",
            show_default=False,
            help="Correct the profile's overheads by these runs.",
        ),
    ] = False,
    record_timeline: Annotated[
        bool,
        typer.Option(
            "--record-timeline", show_default=False, help="Keep each action's start and end."
        ),
    ] = False,
    profile: Annotated[
        Path | None, typer.Option("--profile", help="The profile, where it has moved.")
    ] = None,
    output: OutputOption = None,
    form: TableFormOption = TableForm.table,
    quiet: QuietOption = False,
) -> None:
    """Run the best plans and the baseline for real, interleaved, and compare."""
    from pptune.plans_file import load_plans
    from pptune.profiles import find_profile, load_profile
    from pptune.validate import Request, check_trusted
    from pptune.validate.rounds import Rounds
    from pptune.validate.visit_study import Search

    if (top is not None and top < 1) or repeats < 1:
        raise UsageError("--top and --repeats must be 1 or more")
    budget_s = seconds_or_none(budget, "--budget")
    if storage is not None and (budget_s is None or exhaustive):
        raise UsageError("--storage keeps the runs of a search: give --budget, not --exhaustive")
    file = load_plans(existing(plans, "plans file"))
    if model is not None or not replay:  # a replay waits and runs no code of the model
        check_trusted(file.model, model)
    known = (
        load_profile(existing(profile, "profile"))
        if profile is not None
        else find_profile(file.profile.path, file.profile.digest, beside=plans)
    )
    if recalibrate and (known is None or replay):
        raise UsageError(
            "--recalibrate corrects the profile by real runs; give it with --profile, without "
            "--replay"
        )
    mode: Literal["real", "replay"] = "replay" if replay else "real"
    search = None
    if budget_s is not None and not exhaustive:
        name = f"{file.model.name}, global batch {file.global_batch_size}, {mode} runs"
        search = Search(budget_s=budget_s, study_name=study_name or name, storage=storage)
    request = Request(
        mode=mode, top=top or (DEFAULT_TOP if search is None else len(file.candidates)),
        exhaustive=exhaustive, baseline=baseline, search=search,
        rounds=Rounds(
            repeats=repeats, budget_s=budget_s, separate=not exhaustive,
            record_timeline=record_timeline,
        ),
        timeout_s=parse_seconds(timeout, what="--timeout"),
        device="cpu" if replay else file.device,
    )  # fmt: skip
    path = output or DEFAULT_OUTPUT
    finished = run_validation(
        plans, file, known, request, path=path, resume=resume, quiet=quiet,
    )  # fmt: skip
    if finished is None:  # another rank's agent: only the leader prints
        return
    print_validation(finished, form)
    if recalibrate and known is not None:
        correct_profile(finished, known, profile or Path(file.profile.path), quiet=quiet)
    if tolerance is not None:
        allowed = parse_ratio(tolerance, what="--tolerance")
        worst = None if finished.summary is None else finished.summary.max_abs_error
        if worst is None or worst > allowed:
            raise NoAnswer(
                f"the largest error is {'unknown' if worst is None else format_ratio(worst)}, "
                f"above --tolerance {format_ratio(allowed)}"
            )


def correct_profile(
    validation: "ValidationFile", profile: "Profile", path: Path, *, quiet: bool
) -> None:
    """Write the profile with its overheads corrected by the runs."""
    from pptune.calibration import recalibrate as corrected
    from pptune.cli.output import say
    from pptune.profiles import save_profile

    steps_s = {run.plan: run.measured_s for run in validation.runs if run.measured_s is not None}
    save_profile(corrected(profile, steps_s), path)
    say(
        f"wrote {path}: overheads corrected by {len(steps_s)} plans, which no longer count as "
        "evidence; search again to use them",
        quiet=quiet,
    )


def print_validation(validation: "ValidationFile", form: TableForm) -> None:
    """The runs, their breakdowns, and the verdict."""
    from pptune.cli.output import show_json, show_sheets
    from pptune.views.validation import breakdowns_sheet, models_sheet, runs_sheet

    if form is TableForm.json:
        show_json(validation)
        return
    sheets = [runs_sheet(validation), breakdowns_sheet(validation)]
    models = models_sheet(validation)
    show_sheets([*sheets, models] if models is not None else sheets, form.value)


def run_validation(
    plans_path: Path,
    file: Any,
    profile: "Profile | None",
    request: "Request",
    *,
    path: Path,
    resume: bool,
    quiet: bool,
) -> "ValidationFile | None":
    """Run the plans in `file` and write `path` as results come in; None on other agents."""
    from pptune.cli.output import Progress, say, warnings_as_lines
    from pptune.files import check_writable
    from pptune.runtime.launch import follow
    from pptune.runtime.world import detect_world
    from pptune.validate import Watch, digest_of
    from pptune.validate import validate as run_plans
    from pptune.validation_file import load_validation, save_validation

    world = detect_world(None, request.device)
    if not world.is_leader:
        follow(world, timeout_s=request.timeout_s)
        return None
    check_writable(path)
    previous = None
    if resume and path.exists():
        with warnings_as_lines(quiet=quiet):
            previous = load_validation(path)
    with Progress(f"validate ({request.mode})", quiet=quiet) as progress:
        finished = run_plans(
            file, request, digest=digest_of(plans_path), profile=profile, previous=previous,
            watch=Watch(
                on_visit=progress.update,
                on_saved=lambda validation: save_validation(validation, path),
                on_failed=lambda plan, failure: say(f"{plan.label} failed: {failure}", quiet=quiet),
            ),
        )  # fmt: skip
    say(f"wrote {path}", quiet=quiet)
    return finished
