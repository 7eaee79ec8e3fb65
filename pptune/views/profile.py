"""A profile as sheets: layer times, throughput, links, overheads, and what to know about them."""

from collections.abc import Sequence

from pptune.curves import CurveFit, fit_curve, layer_times, usable_points
from pptune.profiles import Layer, LayerPoint, Link, MemoryModel, Profile
from pptune.units import (
    format_bytes,
    format_bytes_per_s,
    format_ratio,
    format_seconds,
)
from pptune.views.tables import (
    Column,
    Sheet,
    bytes_column,
    ratio_column,
    seconds_column,
    time_column,
)


def profile_sheets(profile: Profile) -> tuple[Sheet, ...]:
    """Layers, throughput by b, links and overheads; the warnings end the last sheet."""
    sheets = [layers_sheet(profile)]
    throughput = throughput_sheet(profile)
    sheets += [throughput] if throughput is not None else []
    sheets += [links_sheet(profile.links)] if profile.links else []
    sheets += [overheads_sheet(profile)] if profile.overheads else []
    sheets.append(Sheet(title="To know", columns=(), rows=(), notes=tuple(_remarks(profile))))
    return tuple(sheets)


def layers_sheet(profile: Profile) -> Sheet:
    """A row per kind of layer and micro-batch size; times are for one layer and one micro-batch."""
    entries = [(layer, point) for layer in profile.layers for point in layer.points]
    columns = (
        Column(key="kind", title="layer", left=True),
        Column(
            key="recompute", title="recompute", left=True, priority=4,
            listed=len({layer.recompute for layer in profile.layers}) > 1,
        ),
        Column(key="microbatch_size", title="b"),
        seconds_column("forward_s", "forward"),
        seconds_column("backward_s", "backward"),
        seconds_column("backward_input_s", "input part", priority=3),
        seconds_column("backward_weight_s", "weight part", priority=3),
        ratio_column("spread_ratio", "spread", priority=2),
        bytes_column("saved_activation_bytes", "saved", priority=1),
        bytes_column("boundary_bytes", "output", priority=1),
        Column(key="source", title="source", left=True, priority=5),
        Column(key="status", title="status", left=True, priority=1),
    )  # fmt: skip
    return Sheet(
        title=f"{profile.model.name} on {profile.machine.description}, {profile.dtype}, "
        f"{profile.seq_len} tokens per sequence",
        columns=columns,
        rows=tuple(_layer_cells(layer, point) for layer, point in entries),
        notes=(
            "Times of one layer and one micro-batch of b sequences; spread: inter-quartile range / "
            "median of the forward samples; saved: what a layer keeps until its backward.",
        ),
    )


def throughput_sheet(profile: Profile) -> Sheet | None:
    """What one device would do with the whole model at each b; None without block times."""
    block = profile.layer("block")
    if block is None:
        return None
    rows = []
    for size in sorted(point.microbatch_size for point in usable_points(block)):
        seconds = _model_seconds(profile, size)
        flops = profile.model.flops_per_sequence()
        rate = None if flops is None else flops * size / seconds
        peak = profile.machine.peak_flops_per_s
        rows.append(
            (
                size,
                seconds,
                seconds / size,
                size * profile.seq_len / seconds,
                rate,
                None if rate is None or peak is None else rate / peak,
            )
        )
    fit = _fit(block)
    return Sheet(
        title="All layers on one device, no pipeline",
        columns=(
            Column(key="microbatch_size", title="b"),
            time_column("seconds", "per micro-batch", [row[1] for row in rows]),
            time_column("seconds_per_sequence", "per sequence", [row[2] for row in rows]),
            Column(key="tokens_per_s", title="tokens/s", text=lambda value: f"{value:,.0f}"),
            Column(key="flops_per_s", title="TFLOP/s", text=lambda value: f"{value / 1e12:.3g}",
                   priority=1),
            ratio_column("mfu", "MFU", priority=2),
        ),
        rows=tuple(rows),
        notes=() if fit is None else _fit_notes(fit),
    )  # fmt: skip


def links_sheet(links: Sequence[Link]) -> Sheet:
    """A row per directed link."""
    return Sheet(
        title="Links",
        columns=(
            Column(key="link", title="link", left=True),
            Column(key="scope", title="scope", left=True),
            seconds_column("latency_s", "latency"),
            Column(key="bytes_per_s", title="bandwidth", text=format_bytes_per_s),
            seconds_column("send_occupied_s", "sender busy", priority=2),
            seconds_column("receive_occupied_s", "receiver busy", priority=2),
            Column(key="num_sizes", title="sizes", priority=3),
            Column(key="source", title="source", left=True, priority=1),
        ),
        rows=tuple(
            (
                link_name(link),
                link.scope,
                link.latency_s,
                link.bytes_per_s,
                link.send_occupied_s,
                link.receive_occupied_s,
                len(link.points),
                link.source,
            )
            for link in links
        ),
    )


def overheads_sheet(profile: Profile) -> Sheet:
    """What each executor adds to bare layer times."""
    return Sheet(
        title="Runtime overhead",
        columns=(
            Column(key="executor", title="executor", left=True),
            seconds_column("forward_s", "per forward"),
            seconds_column("backward_s", "per backward"),
            seconds_column("hop_s", "per message", priority=1),
            seconds_column("chunk_s", "per chunk", priority=2),
            seconds_column("step_s", "per step", priority=1),
            Column(key="source", title="source", left=True, priority=3),
        ),
        rows=tuple(
            (
                name,
                overhead.forward_s,
                overhead.backward_s,
                overhead.hop_s,
                overhead.chunk_s,
                overhead.step_s,
                overhead.source,
            )
            for name, overhead in profile.overheads.items()
        ),
    )


def link_name(link: Link) -> str:
    """`0 -> 1`, or `any` where the link stands for every pair of its scope."""
    if link.source_rank is None or link.target_rank is None:
        return "any"
    return f"{link.source_rank} -> {link.target_rank}"


def _layer_cells(layer: Layer, point: LayerPoint) -> tuple[object, ...]:
    return (
        layer.kind, layer.recompute, point.microbatch_size, point.forward_s, point.backward_s,
        point.backward_input_s, point.backward_weight_s, _spread(point),
        point.saved_activation_bytes, point.boundary_bytes, point.source, point.status,
    )  # fmt: skip


def _spread(point: LayerPoint) -> float | None:
    samples = sorted(point.samples_s.get("forward", ()))
    if len(samples) < 4:
        return None
    low, middle, high = (samples[len(samples) * quarter // 4] for quarter in (1, 2, 3))
    return (high - low) / middle if middle > 0 else None


def _model_seconds(profile: Profile, microbatch_size: int) -> float:
    """Forward and backward of every layer of the model."""
    total = 0.0
    for kind, count in (("embedding", 1), ("block", profile.model.num_layers), ("head", 1)):
        layer = profile.layer(kind)
        if layer is not None and usable_points(layer):
            times = layer_times(layer, microbatch_size)
            total += count * (times.forward_s + times.backward_s)
    return total


def _fit(layer: Layer) -> CurveFit | None:
    points = [point for point in usable_points(layer) if point.backward_s is not None]
    if len(points) < 2:
        return None
    return fit_curve(
        [point.microbatch_size for point in points],
        [(point.forward_s or 0.0) + (point.backward_s or 0.0) for point in points],
    )


def _fit_notes(fit: CurveFit) -> tuple[str, ...]:
    notes = []
    if fit.knee_microbatch_size is not None:
        notes.append(
            f"A block reaches 90 % of its best rate at b = {fit.knee_microbatch_size:.1f} (knee)."
        )
    if fit.loo_error_ratio is not None:
        notes.append(
            f"The fitted curve t(b) predicts a size left out of the fit within "
            f"{format_ratio(fit.loo_error_ratio)} (median)."
        )
    if fit.slows_with_size:
        notes.append(
            "Kernels slow down with b: the time per sequence rises beyond the noise. Memory "
            "pressure, recompute, or a busy processor?"
        )
    return tuple(notes)


def _remarks(profile: Profile) -> list[str]:
    remarks = []
    if profile.step_constants is not None:
        constants = profile.step_constants
        remarks.append(
            f"Once per step: {format_seconds(constants.fixed_s)} and "
            f"{format_seconds(constants.per_parameter_byte_s * 2**30)} per GiB of the rank's "
            f"parameters ({constants.source})."
        )
    if profile.interference_ratio is not None:
        remarks.append(
            f"Compute takes {format_ratio(profile.interference_ratio)} longer while messages move."
            if profile.interference_ratio > 0
            else "Layer times hold inside the running pipeline, with messages moving."
        )
    remarks.append(_memory_remark(profile.memory))
    if profile.machine.memory_bytes is not None:
        remarks.append(f"Memory of a rank's device: {format_bytes(profile.machine.memory_bytes)}.")
    if not profile.links and profile.num_ranks == 1:
        remarks.append("No links were measured: give them with --link or measure with two ranks.")
    if profile.calibration_plans:
        remarks.append(
            "Plans run to measure overheads, no evidence of accuracy: "
            f"{'; '.join(profile.calibration_plans)}."
        )
    if profile.notes:
        remarks.append(profile.notes)
    return remarks + [f"warning: {text}" for text in profile.warnings]


def _memory_remark(memory: MemoryModel | None) -> str:
    if memory is None:
        return "Memory was not measured: no plan can be said to fit."
    return (
        f"Per byte of parameters: {memory.gradient_bytes_per_parameter_byte:.2f} bytes of "
        f"gradients and {memory.optimizer_bytes_per_parameter_byte:.2f} of optimizer state; "
        f"{format_bytes(memory.fixed_bytes)} fixed per rank ({memory.source})."
    )
