"""pptune predict: one plan's estimate, from a profile or from numbers."""

from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from pptune.cli import app
from pptune.cli.options import Form, FormOption, at_least_one, existing, ints, one_of, parse_link
from pptune.errors import NoAnswer, PlanError, UsageError
from pptune.units import parse_seconds


@app.command(
    epilog="Example: pptune predict --forward 1 --backward 2 --transfer 0.1 --ranks 4 --chunks 2 "
    "--microbatches 8 --timeline"
)
def predict(
    profile: Annotated[Path | None, typer.Argument(help="Profile to take times from.")] = None,
    forward: Annotated[
        str | None, typer.Option(help="Forward of one micro-batch on one rank's layers: 18.5ms.")
    ] = None,
    backward: Annotated[str | None, typer.Option(help="Its backward.")] = None,
    backward_input: Annotated[str | None, typer.Option(help="Its input gradient.")] = None,
    backward_weight: Annotated[str | None, typer.Option(help="Its weight gradient.")] = None,
    transfer: Annotated[str, typer.Option(help="One hop between ranks.")] = "0",
    ranks: Annotated[int | None, typer.Option(help="Pipeline ranks, P.")] = None,
    chunks: Annotated[int, typer.Option(help="Chunks per rank, V.")] = 1,
    microbatch_size: Annotated[int, typer.Option(help="Micro-batch size, b.")] = 1,
    microbatches: Annotated[int | None, typer.Option(help="Micro-batches per step, M.")] = None,
    schedule: Annotated[
        str | None, typer.Option(help="Default: 1f1b for one chunk, interleaved for more.")
    ] = None,
    microbatch_group_size: Annotated[int | None, typer.Option(help="N, interleaved.")] = None,
    target: Annotated[
        str | None, typer.Option(help="Trainer: decides legality and what overlaps.")
    ] = None,
    recompute: Annotated[str, typer.Option(help="none or full.")] = "none",
    layers_per_stage: Annotated[str | None, typer.Option(help="Blocks by stage: 3,5,5,3.")] = None,
    ranks_per_node: Annotated[int | None, typer.Option(help="Which hops cross nodes.")] = None,
    link: Annotated[
        list[str] | None, typer.Option(help="intra|inter:LATENCY,BANDWIDTH, e.g. inter:20us,12GB/s")
    ] = None,
    timeline: Annotated[
        bool, typer.Option("--timeline", show_default=False, help="Draw who does what when.")
    ] = False,
    form: FormOption = Form.table,
) -> None:
    """Predict one plan's step time from a profile or from numbers."""
    from pptune.cost_model import CostModel
    from pptune.from_numbers import estimate_from_numbers, given_profile
    from pptune.plan import Schedule
    from pptune.targets import parse_target

    if microbatches is None:
        raise UsageError("--microbatches is missing: how many micro-batches a step has, e.g. 8")
    at_least_one(
        ranks=ranks, chunks=chunks, microbatch_size=microbatch_size, microbatches=microbatches,
        ranks_per_node=ranks_per_node,
    )  # fmt: skip
    one_of(recompute, ("none", "full"), "--recompute")
    if schedule is not None:
        one_of(schedule, get_args(Schedule), "--schedule")
    aim = None if target is None else parse_target(target)

    def seconds(text: str | None, what: str) -> float | None:
        return None if text is None else parse_seconds(text, what=what)

    if profile is None:
        if forward is None or ranks is None:
            raise UsageError(
                "give a PROFILE, or --forward, --backward and --ranks "
                "(see the example in pptune predict --help)"
            )
        numbers: dict[str, Any] = {
            "forward_s": parse_seconds(forward, what="--forward"),
            "backward_s": seconds(backward, "--backward"),
            "backward_input_s": seconds(backward_input, "--backward-input"),
            "backward_weight_s": seconds(backward_weight, "--backward-weight"),
            "transfer_s": parse_seconds(transfer, what="--transfer"),
            "num_ranks": ranks,
            "num_chunks": chunks,
        }
        predicted = estimate_from_numbers(
            **numbers, num_microbatches=microbatches, schedule=schedule,  # type: ignore[arg-type]
            microbatch_group_size=microbatch_group_size, target=aim,
        )  # fmt: skip
        from pptune.cost_model import Setting

        model = CostModel(given_profile(**numbers), Setting(target=aim))
    else:
        model, predicted = _from_profile(
            existing(profile, "profile"), ranks=ranks, chunks=chunks, size=microbatch_size,
            microbatches=microbatches, schedule=schedule, group=microbatch_group_size,
            target=target, recompute=recompute, layers=layers_per_stage,
            ranks_per_node=ranks_per_node, links=link or [],
        )  # fmt: skip
    _print(model, predicted, timeline=timeline, form=form)


def _from_profile(
    path: Path,
    *,
    ranks: int | None,
    chunks: int,
    size: int,
    microbatches: int,
    schedule: str | None,
    group: int | None,
    target: str | None,
    recompute: str,
    layers: str | None,
    ranks_per_node: int | None,
    links: list[str],
) -> Any:
    from pptune.cost_model import CostModel, Setting
    from pptune.estimate import Infeasible, PredictedPlan
    from pptune.plan import make_plan, placement_of
    from pptune.profiles import load_profile
    from pptune.targets import illegal, parse_target

    profile = load_profile(path)
    aim = parse_target(target or "torch")
    num_ranks = ranks or profile.num_ranks
    setting = Setting(
        target=aim, ranks_per_node=ranks_per_node, links=tuple(parse_link(text) for text in links)
    )
    model = CostModel(profile, setting)
    name = schedule or ("1f1b" if chunks == 1 else "interleaved")
    split = (
        ints(layers, "--layers-per-stage")
        if layers is not None
        else model.balanced_layers(
            num_ranks,
            chunks,
            placement=placement_of(name),
            microbatch_size=size,
            recompute=recompute,
        )
    )
    if sum(split) != profile.model.num_layers:
        raise UsageError(
            f"--layers-per-stage places {sum(split)} layers, but the model has "
            f"{profile.model.num_layers}; the numbers must add up to that"
        )
    plan = make_plan(
        schedule=name, num_ranks=num_ranks, num_chunks=chunks, microbatch_size=size,  # type: ignore[arg-type]
        num_microbatches=microbatches, layers_per_stage=split, microbatch_group_size=group,
        recompute=recompute,  # type: ignore[arg-type]
    )  # fmt: skip
    violation = illegal(plan, aim, model=profile.model)
    if violation is not None:
        raise PlanError(str(violation))
    estimate = model.estimate(plan)
    if isinstance(estimate, Infeasible):
        raise NoAnswer(estimate.reason)
    return model, PredictedPlan(plan=plan, estimate=estimate)


def _print(model: Any, predicted: Any, *, timeline: bool, form: Form) -> None:
    from pptune.cli.output import show, show_json
    from pptune.views.plans import estimate_sheet
    from pptune.views.slices import predicted_timeline
    from pptune.views.timeline import TextTimeline

    if form is Form.json:
        show_json(predicted)
        return
    show(estimate_sheet(predicted))
    if timeline:
        spans = model.simulation(predicted.plan, spans=True).spans
        show(TextTimeline(predicted_timeline(predicted.plan, spans)))
