"""pptune profile: measure the machine; and pptune doctor: what the machine has."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pptune.cli import app
from pptune.cli.options import (
    Form,
    FormOption,
    OutputOption,
    QuietOption,
    at_least_one,
    ints_or_none,
    one_of,
)
from pptune.errors import UsageError
from pptune.units import parse_ratio, parse_seconds

if TYPE_CHECKING:
    from pptune.model import ModelSpec
    from pptune.profiles import Profile

DTYPES = ("float32", "bfloat16", "float16")
DEFAULT_BUDGET = "75s"
DEFAULT_TIMEOUT = "2m"
_EXCHANGE_S, _EXCHANGE_NOISE = 4.0, 0.05


@app.command(epilog="Example: pptune profile gpt-small-cpu --micro-batch-sizes 1,2,4,8")
def profile(
    model: Annotated[
        str | None, typer.Argument(help="Preset, config.json, or package.module:function.")
    ] = None,
    ranks: Annotated[int | None, typer.Option(help="Default: all GPUs, else 2 processes.")] = None,
    micro_batch_sizes: Annotated[
        str | None, typer.Option(help="Default on CPU: 1,2,3,4,6,8.")
    ] = None,
    seq_len: Annotated[int | None, typer.Option(help="Tokens per sequence.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Default: float32, bfloat16 on GPUs.")] = None,
    device: Annotated[str, typer.Option(help="auto, cuda or cpu.")] = "auto",
    recompute: Annotated[str, typer.Option(help="none or full.")] = "none",
    budget: Annotated[str, typer.Option(help="Time to measure for.")] = DEFAULT_BUDGET,
    max_noise: Annotated[str, typer.Option(help="Settled below this.")] = "2%",
    timeout: Annotated[str, typer.Option(help="Longest time without an answer.")] = DEFAULT_TIMEOUT,
    no_cache: Annotated[
        bool, typer.Option("--no-cache", show_default=False, help="Measure everything anew.")
    ] = False,
    probe_p2p: Annotated[
        bool,
        typer.Option(
            "--probe-p2p",
            show_default=False,
            help="Also time the links with NCCL's GPU-to-GPU copies off (or on).",
        ),
    ] = False,
    import_file: Annotated[
        Path | None, typer.Option("--import", help="CSV with a trainer's own layer times.")
    ] = None,
    list_models: Annotated[
        bool, typer.Option("--list-models", show_default=False, help="Show the presets.")
    ] = False,
    print_launch: Annotated[
        str | None, typer.Option(help="Show how to start on many nodes: slurm or torchrun.")
    ] = None,
    output: OutputOption = None,
    form: FormOption = Form.table,
    quiet: QuietOption = False,
) -> None:
    """Measure layer times, links, overheads and memory; write a profile."""
    from pptune.cli.output import say, show, show_json
    from pptune.presets import DEFAULT_MODEL, resolve_model

    if list_models:
        from pptune.views.models import models_sheet

        show(models_sheet())
        return
    if print_launch is not None:
        from pptune.cli.launch_lines import launch_lines

        typer.echo(launch_lines(print_launch, model or DEFAULT_MODEL))
        return
    at_least_one(seq_len=seq_len, ranks=ranks)
    spec = resolve_model(model or DEFAULT_MODEL, seq_len=seq_len)
    if import_file is not None:
        from pptune.importing import import_profile
        from pptune.profiles import save_profile
        from pptune.views.profile import profile_sheets

        imported = import_profile(import_file, spec, dtype=dtype or "bfloat16", ranks=ranks)
        path = output or default_path(spec, "imported")
        save_profile(imported, path)
        show(*profile_sheets(imported))
        say(f"wrote {path}", quiet=quiet)
        return
    finished = run_profile(
        spec, ranks=ranks, sizes=micro_batch_sizes, dtype=dtype, device=device,
        recompute=recompute, budget=budget, max_noise=max_noise, timeout=timeout,
        use_cache=not no_cache, output=output, quiet=quiet, probe_p2p=probe_p2p,
    )  # fmt: skip
    if finished is None:
        return
    result, path = finished
    if form is Form.json:
        show_json(result)
    else:
        from pptune.views.profile import profile_sheets

        show(*profile_sheets(result))
    say(f"wrote {path}", quiet=quiet)


def default_path(spec: "ModelSpec", device: str) -> Path:
    """profiles/<model>-<device>.json."""
    return Path("profiles") / f"{file_name(spec)}-{device}.json"


def file_name(spec: "ModelSpec") -> str:
    """The model's name with characters that a file's name can't carry replaced."""
    return "".join(char if char.isalnum() or char in "-_." else "-" for char in spec.name)


def run_profile(
    spec: "ModelSpec",
    *,
    ranks: int | None,
    sizes: str | None,
    dtype: str | None,
    device: str,
    recompute: str,
    budget: str,
    max_noise: str,
    timeout: str,
    use_cache: bool,
    output: Path | None,
    quiet: bool,
    probe_p2p: bool = False,
) -> "tuple[Profile, Path] | None":
    """Measure and write a profile; None on agents other than the leader."""
    from pptune.cli.output import Progress, say, warnings_as_lines
    from pptune.errors import FileError
    from pptune.files import check_writable
    from pptune.profiles import load_profile, save_profile
    from pptune.runtime.launch import RankGroup, follow
    from pptune.runtime.p2p_probe import check_probe, links_with_other_setting, with_probe
    from pptune.runtime.world import detect_world

    one_of(recompute, ("none", "full"), "--recompute")
    at_least_one(ranks=ranks)
    timeout_s = parse_seconds(timeout, what="--timeout")
    micro_batch_sizes = ints_or_none(sizes, "--micro-batch-sizes")
    budget_s = parse_seconds(budget, what="--budget")
    noise_ratio = parse_ratio(max_noise, what="--max-noise")
    if budget_s <= 0:
        raise UsageError("--budget must be above zero, e.g. 75s")
    world = detect_world(ranks, device)
    kind = dtype or ("bfloat16" if world.device == "cuda" else "float32")
    one_of(kind, DTYPES, "--dtype")
    if probe_p2p:
        check_probe(world)
    if not world.is_leader:
        follow(world, timeout_s=timeout_s)
        if probe_p2p:
            links_with_other_setting(world, max_noise=noise_ratio, timeout_s=timeout_s)
        return None
    path = output or default_path(spec, world.device)
    check_writable(path)
    previous = None
    if use_cache and path.exists():
        try:
            with warnings_as_lines(quiet=quiet):
                previous = load_profile(path)
        except FileError as error:
            say(f"the earlier {path} is not used: {error}", quiet=quiet)
    say(
        f"measuring {spec.name} ({kind}, {spec.seq_len} tokens) on {world.num_ranks} "
        f"{world.device} ranks", quiet=quiet,
    )  # fmt: skip
    with (
        Progress("profile", quiet=quiet) as progress,
        # An earlier profile seldom leaves more to do than a look at the machine.
        RankGroup(world, timeout_s=timeout_s, expects_pipelines=previous is None) as group,
    ):
        group.start()
        from pptune.profiling import Profiler, Request, Watch  # While the ranks start.

        request = Request(
            model=spec, dtype=kind, sizes=micro_batch_sizes,
            recompute=recompute,  # type: ignore[arg-type]
            budget_s=budget_s, max_noise=noise_ratio, timeout_s=timeout_s,
        )  # fmt: skip
        watch = Watch(
            on_phase=lambda share, doing: progress.update(share, 1.0, doing),
            on_saved=lambda profile: save_profile(profile, path),
            on_note=lambda text: say(text, quiet=quiet),
        )
        result = Profiler(group, request, watch).profile(previous)
    if probe_p2p:
        say("timing the links with the other NCCL_P2P_DISABLE", quiet=quiet)
        other = links_with_other_setting(world, max_noise=noise_ratio, timeout_s=timeout_s)
        result, text = with_probe(result, other)
        say(text, quiet=quiet)
        save_profile(result, path)
    return result, path


@app.command(epilog="Example: pptune doctor --format json")
def doctor(
    device: Annotated[str, typer.Option(help="auto, cuda or cpu.")] = "auto",
    timeout: Annotated[str, typer.Option(help="For the test exchange.")] = "1m",
    form: FormOption = Form.table,
    quiet: QuietOption = False,
) -> None:
    """Say what this machine has, and time a 2-rank send and receive."""
    import msgspec

    from pptune.cli.output import say, show, show_json
    from pptune.errors import PptuneError
    from pptune.profiles import Link
    from pptune.runtime import require_torch

    require_torch()
    from pptune.runtime.doctor import Checkup, diagnose
    from pptune.runtime.launch import RankGroup
    from pptune.runtime.world import detect_world
    from pptune.views.doctor import doctor_sheets

    timeout_s = parse_seconds(timeout, what="--timeout")
    diagnosis = diagnose()
    links: tuple[Link, ...] = ()
    say("timing a send and receive between 2 ranks", quiet=quiet)
    failure = None
    try:
        with RankGroup(detect_world(2, device), timeout_s=timeout_s) as group:
            answer = group.run(
                "measure_links", {"max_noise": _EXCHANGE_NOISE, "budget_s": _EXCHANGE_S}
            )[0]
        links = msgspec.convert(answer["links"], tuple[Link, ...])
        exchange = "2 ranks exchanged messages in both directions"
    except PptuneError as error:
        failure = error
        exchange = f"the 2-rank exchange failed: {error}"
    if form is Form.json:
        show_json(Checkup(diagnosis=diagnosis, links=links, exchange=exchange))
    else:
        show(*doctor_sheets(diagnosis, links=links, exchange=exchange))
    if failure is not None:
        raise failure
