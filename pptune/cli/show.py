"""pptune explain, show and export: what a plans file says, for people and for trainers."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pptune.cli import app
from pptune.cli.options import (
    Form,
    FormOption,
    OutputOption,
    QuietOption,
    SeedOption,
    at_least_one,
    existing,
)
from pptune.errors import UsageError

if TYPE_CHECKING:
    from pptune.estimate import Candidate
    from pptune.plans_file import PlansFile
    from pptune.profiles import Profile

PlansArgument = Annotated[Path, typer.Argument(help="Plans that `pptune search` wrote.")]
RankArgument = Annotated[int, typer.Argument(help="Place in the ranking, 1 = best.")]
ProfileOption = Annotated[
    Path | None, typer.Option("--profile", help="The profile, where it has moved.")
]


def candidate_at(plans: "PlansFile", rank: int) -> "Candidate":
    """The row at `rank`. Raises UsageError with the places there are."""
    for row in plans.candidates:
        if row.rank == rank:
            return row
    raise UsageError(f"there is no plan {rank}; the file lists 1 to {len(plans.candidates)}")


def profile_behind(plans: "PlansFile", plans_path: Path, given: Path | None) -> "Profile":
    """The profile the plans were made from. Raises UsageError where it can't be found."""
    from pptune.profiles import find_profile, load_profile

    if given is not None:
        return load_profile(existing(given, "profile"))
    profile = find_profile(plans.profile.path, plans.profile.digest, beside=plans_path)
    if profile is None:
        raise UsageError(
            f"the profile {plans.profile.path} is gone or has changed since the search; give it "
            "with --profile, or search again"
        )
    return profile


@app.command(epilog="Example: pptune explain plans.json 1")
def explain(
    plans: PlansArgument,
    rank: RankArgument = 1,
    profile: ProfileOption = None,
    seed: SeedOption = 0,
    form: FormOption = Form.table,
) -> None:
    """Say why this plan: where its time goes and what would change the choice."""
    from pptune.cli.output import show, show_json
    from pptune.explain import explain as explained
    from pptune.plans_file import load_plans
    from pptune.views.explanation import explanation_sheets

    file = load_plans(existing(plans, "plans file"))
    candidate_at(file, rank)
    answer = explained(file, profile_behind(file, plans, profile), rank=rank, seed=seed)
    if form is Form.json:
        show_json(answer)
    else:
        show(*explanation_sheets(answer))


@app.command(epilog="Example: pptune show plans.json 1 --html report.html --trace trace.json")
def show(
    plans: PlansArgument,
    rank: RankArgument = 1,
    trace: Annotated[Path | None, typer.Option(help="Write a Perfetto trace here.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write the HTML report here.")] = None,
    stages: Annotated[
        bool, typer.Option("--stages", show_default=False, help="Show the stage table.")
    ] = False,
    validation: Annotated[
        Path | None, typer.Option(help="Validation with measured times and timelines.")
    ] = None,
    profile: ProfileOption = None,
    quiet: QuietOption = False,
) -> None:
    """Draw a plan: timeline as text, stage table, Perfetto trace, HTML report."""
    from pptune.cli.output import say
    from pptune.cli.output import show as print_parts
    from pptune.cost_model import CostModel
    from pptune.explain import setting_of
    from pptune.files import write_atomic
    from pptune.plans_file import load_plans
    from pptune.validation_file import load_validation
    from pptune.views.slices import predicted_timeline, recorded_timeline
    from pptune.views.stages import stage_sheet
    from pptune.views.timeline import TextTimeline
    from pptune.views.trace import trace_json

    file = load_plans(existing(plans, "plans file"))
    row = candidate_at(file, rank)
    known = profile_behind(file, plans, profile)
    proof = None if validation is None else load_validation(existing(validation, "validation"))
    model = CostModel(known, setting_of(file))
    spans = model.simulation(row.plan, spans=True).spans
    if spans is None:
        raise AssertionError("spans were asked for")
    timelines = [predicted_timeline(row.plan, spans)]
    for run in () if proof is None else proof.runs:
        if run.plan == row.plan and run.timeline is not None:
            timelines.append(recorded_timeline(row.plan, run.timeline))
    if trace is not None:
        write_atomic(trace, trace_json(timelines))
        say(f"wrote {trace}: open it at ui.perfetto.dev or chrome://tracing", quiet=quiet)
    if html is not None:
        write_report(file, known, html, rank=rank, validation=validation)
        say(f"wrote {html}", quiet=quiet)
    if stages:
        costs = model.costs(row.plan)
        print_parts(
            stage_sheet(
                row.plan, forward_s=costs.forward_s.tolist(),
                backward_s=[] if costs.backward_s is None else costs.backward_s.tolist(),
                peak_memory_bytes=row.estimate.peak_memory_bytes,
            )
        )  # fmt: skip
    if trace is None and html is None and not stages:
        print_parts(*(TextTimeline(timeline) for timeline in timelines))


def write_report(
    plans: "PlansFile", profile: "Profile", path: Path, *, rank: int, validation: Path | None
) -> None:
    """Write the HTML report."""
    from pptune.cost_model import CostModel
    from pptune.explain import explain as explained
    from pptune.explain import setting_of
    from pptune.files import write_atomic
    from pptune.validation_file import load_validation
    from pptune.views.html import report
    from pptune.views.slices import predicted_timeline, recorded_timeline

    row = candidate_at(plans, rank)
    model = CostModel(profile, setting_of(plans))
    proof = None if validation is None else load_validation(validation)
    spans = model.simulation(row.plan, spans=True).spans
    timelines = [] if spans is None else [predicted_timeline(row.plan, spans)]
    for run in () if proof is None else proof.runs:
        if run.plan == row.plan and run.timeline is not None:
            timelines.append(recorded_timeline(row.plan, run.timeline))
    page = report(
        plans, profile, rank=rank, explanation=explained(plans, profile, rank=rank),
        validation=proof,
        timelines=timelines,
    )  # fmt: skip
    write_atomic(path, page.encode())


@app.command(epilog="Example: pptune export plans.json 1 --target megatron -o launch/")
def export(
    plans: PlansArgument,
    rank: RankArgument = 1,
    target: Annotated[
        str | None, typer.Option(help="Trainer, e.g. torchtitan@main; default: the search's.")
    ] = None,
    seq_len: Annotated[int | None, typer.Option(help="Default: as profiled.")] = None,
    output: OutputOption = None,
    quiet: QuietOption = False,
) -> None:
    """Write a plan in a trainer's own options."""
    from pptune.cli.output import say
    from pptune.errors import PlanError
    from pptune.files import write_atomic
    from pptune.plans_file import load_plans
    from pptune.targets import export as exported
    from pptune.targets import illegal, parse_target

    at_least_one(seq_len=seq_len)
    file = load_plans(existing(plans, "plans file"))
    row = candidate_at(file, rank)
    aim = parse_target(target or file.target)
    setting: dict[str, Any] = {
        "model": file.model, "tensor_parallel": file.tensor_parallel,
        "context_parallel": file.context_parallel, "zero": file.zero_stage,
        "allow_empty_stages": 0 in row.plan.layers_per_stage,
    }  # fmt: skip
    try:
        files = exported(
            row.plan, aim, dtype=file.dtype, seq_len=seq_len or file.model.seq_len,
            profile_name=Path(file.profile.path).name, **setting,
        )  # fmt: skip
    except PlanError as error:
        if illegal(row.plan, aim, **setting) is None:
            raise  # it is the model or an option that can't be written, not the plan
        others = [
            other.rank for other in file.candidates if illegal(other.plan, aim, **setting) is None
        ]
        advice = (
            f"; the best plan in the file that it can run is number {others[0]}"
            if others
            else f"; search again with --target {aim.name} for the best plan that it can run"
        )
        raise PlanError(f"{error}{advice}") from None
    if output is None:
        for each in files:
            if len(files) > 1:
                typer.echo(f"# --- {each.name}")
            typer.echo(each.text, nl=not each.text.endswith("\n"))
        return
    folder = output if len(files) > 1 or output.is_dir() or str(output).endswith("/") else None
    for each in files:
        path = output if folder is None else folder / each.name
        write_atomic(path, each.text.encode())
        say(f"wrote {path}", quiet=quiet)
