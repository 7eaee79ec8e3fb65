"""The profile command: machine, layers, links, then the runtime's own overheads.

Each phase gets a share of the budget. Whatever is finished is handed to `on_saved` at once, so that
an interruption loses nothing; what an earlier profile of the same machine, model and settings
already has is not measured again.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec
import numpy as np

from pptune.calibration import apply_calibration, calibration_plans, run_calibration
from pptune.errors import UsageError
from pptune.measurement import Measurement
from pptune.model import ModelSpec
from pptune.plan_runs import runner_on
from pptune.profiles import (
    AllreducePoint,
    Layer,
    Link,
    Machine,
    MemoryModel,
    Profile,
    Reference,
    StepConstants,
)
from pptune.runtime.agent import Event
from pptune.runtime.launch import RankGroup
from pptune.units import format_ratio

DEFAULT_SIZES: dict[str, tuple[int, ...]] = {
    "cpu": (1, 2, 3, 4, 6, 8),
    "cuda": (1, 2, 4, 8, 16, 32),
}
"""Micro-batch sizes where none are asked for; those that don't fit are noted and left out."""

_LAYER_SHARE, _LINK_SHARE = 0.4, 0.12
"""Shares of the budget; the rest goes to the calibration runs."""

_SPOT_SAMPLES = 8
"""Of the reference product on each rank, to see whether the machine has changed."""

_CHANGED_RATIO, _USUAL_SHARE = 0.1, 0.95
"""The machine has changed where its reference product differs by more than this ratio and lies
outside this share of what it took, moment by moment, while the profile was measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to measure."""

    model: ModelSpec
    dtype: str
    sizes: tuple[int, ...] | None = None
    recompute: Literal["none", "full"] = "none"
    budget_s: float = 75.0
    max_noise: float = 0.02
    timeout_s: float = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """Who is told what happens."""

    on_phase: Callable[[float, str], None] = lambda share, doing: None
    on_saved: Callable[[Profile], None] = lambda profile: None
    on_note: Callable[[str], None] = lambda text: None


class Profiler:
    """Measures on a group of ranks."""

    def __init__(self, group: RankGroup, request: Request, watch: Watch) -> None:
        self.group = group
        self.request = request
        self.watch = watch
        self.partial: dict[str, Any] | None = None
        """The layers measured so far, while they are being measured."""

    def profile(self, previous: Profile | None) -> Profile:
        """A complete profile. Raises RankFailure, and UsageError for what can't be measured."""
        watch = self.watch
        watch.on_phase(0.0, "starting ranks")
        request = self.request = self._completed(self.request)
        machine = self._machine()
        profile = self._reusable(previous, machine) or Profile(
            machine=machine, model=request.model, dtype=request.dtype,
            seq_len=request.model.seq_len, num_ranks=self.group.world.num_ranks, layers=(),
        )  # fmt: skip
        missing = self._missing_sizes(profile)
        if profile.layers:
            self._spot_check(profile)
        if missing:
            profile = self._with_layers(profile, missing)
            watch.on_saved(profile)
        if self.group.world.num_ranks == 1:
            watch.on_note(
                "one rank alone has no links: give them to search with --link, or profile 2 ranks"
            )
        elif not profile.links:
            profile = self._with_links(profile)
            watch.on_saved(profile)
        if missing or not profile.overheads:
            profile = self._with_overheads(profile)
            watch.on_saved(profile)
        else:
            watch.on_note("nothing new to measure: the earlier profile is reused")
        watch.on_phase(1.0, "done")
        return profile

    def _completed(self, request: Request) -> Request:
        """The request with the user's model as its layers describe it; code runs in ranks only."""
        if request.model.entry is None:
            return request
        answers = self.group.run(
            "complete_model",
            {"model": msgspec.to_builtins(request.model)},
            timeout_s=request.timeout_s,
        )
        return replace(request, model=msgspec.convert(answers[0], ModelSpec))

    def _machine(self) -> Machine:
        answers = self.group.run(
            "describe_machine", {"dtype": self.request.dtype}, timeout_s=self.request.timeout_s
        )
        return msgspec.convert(answers[0], Machine)

    def _reusable(self, previous: Profile | None, machine: Machine) -> Profile | None:
        """The earlier profile where it is of the same machine, model and settings."""
        if previous is None:
            return None
        request = self.request
        same = (
            previous.machine.device_name == machine.device_name
            and previous.machine.cores == machine.cores
            and previous.machine.software == machine.software
            and previous.machine.environment == machine.environment
            and previous.model == request.model
            and previous.dtype == request.dtype
            and previous.num_ranks == self.group.world.num_ranks
        )
        if not same:
            self.watch.on_note(
                "the earlier profile is of another machine, model or setting: measuring anew"
            )
        return previous if same else None

    def _sizes(self) -> tuple[int, ...]:
        return self.request.sizes or DEFAULT_SIZES[self.group.world.device]

    def _missing_sizes(self, profile: Profile) -> tuple[int, ...]:
        layer = profile.layer("block", self.request.recompute)
        known = {point.microbatch_size for point in layer.points} if layer else set()
        missing = tuple(size for size in self._sizes() if size not in known)
        if known and missing:
            self.watch.on_note(f"measuring only what is new: b = {', '.join(map(str, missing))}")
        return missing

    def _spot_check(self, profile: Profile) -> None:
        """Warn where the machine is no longer as fast as when the profile was measured."""
        if profile.reference is None:
            return
        now_s = Measurement(samples_s=self._reference_samples_s(_SPOT_SAMPLES)).centre_s
        warning = changed_warning(now_s, profile.reference)
        if warning is not None:
            self.watch.on_note(f"warning: {warning}")

    def _reference_samples_s(self, num_samples: int) -> tuple[float, ...]:
        """Seconds of the reference product, that many times on every rank."""
        answers = self.group.run(
            "time_reference", {"num_samples": num_samples}, timeout_s=self.request.timeout_s
        )
        return tuple(seconds for answer in answers for seconds in answer)

    def _with_layers(self, profile: Profile, sizes: tuple[int, ...]) -> Profile:
        request = self.request
        self.watch.on_phase(0.05, "layers")

        def on_event(event: Event) -> None:
            if event["event"] == "layers":
                self.watch.on_phase(0.05 + _LAYER_SHARE * min(1.0, event["spent_ratio"]), "layers")
                self.watch.on_saved(_merged(profile, event["result"]))

        self.group.on_event = on_event
        answers = self.group.run(
            "measure_layers",
            {
                "model": msgspec.to_builtins(request.model), "sizes": list(sizes),
                "dtype": request.dtype, "recompute": request.recompute,
                "max_noise": request.max_noise, "budget_s": request.budget_s * _LAYER_SHARE,
            },
            timeout_s=request.budget_s + request.timeout_s,
        )  # fmt: skip
        return _merged(profile, answers[0])

    def _with_links(self, profile: Profile) -> Profile:
        request = self.request
        self.watch.on_phase(0.05 + _LAYER_SHARE, "links")
        answers = self.group.run(
            "measure_links",
            {"max_noise": request.max_noise, "budget_s": request.budget_s * _LINK_SHARE},
            timeout_s=request.budget_s + request.timeout_s,
        )
        answer = answers[0]
        return msgspec.structs.replace(
            profile,
            links=msgspec.convert(answer["links"], tuple[Link, ...]),
            allreduce=msgspec.convert(answer["allreduce"], tuple[AllreducePoint, ...]),
            warnings=(*profile.warnings, *answer["warnings"]),
        )

    def _with_overheads(self, profile: Profile) -> Profile:
        if profile.num_ranks == 1:
            return profile
        begin = 0.05 + _LAYER_SHARE + _LINK_SHARE
        plans = calibration_plans(profile, profile.num_ranks)
        if not plans:
            raise UsageError(
                f"{profile.model.num_layers} layers cannot be spread over {profile.num_ranks} "
                "ranks; use fewer ranks"
            )
        runs = run_calibration(
            plans,
            runner_on(
                self.group, profile.model, dtype=profile.dtype, timeout_s=self.request.timeout_s
            ),
            budget_s=self.request.budget_s * (1 - _LAYER_SHARE - _LINK_SHARE),
            on_visit=lambda share, plan: self.watch.on_phase(
                begin + (0.98 - begin) * share, f"calibrating {plan.label}"
            ),
        )
        return apply_calibration(profile, runs)


def changed_warning(now_s: float, reference: Reference) -> str | None:
    """That the machine's speed has changed since a profile, or None.

    `now_s` is what the profile's reference product takes now. What it also took in some moments of
    the profile is the machine's own unrest.
    """
    change = now_s / reference.seconds - 1
    if abs(change) <= _CHANGED_RATIO:
        return None
    outside = (1 - _USUAL_SHARE) / 2
    samples_s = reference.samples_s or (reference.seconds,)
    low_s, high_s = np.quantile(samples_s, [outside, 1 - outside])
    if low_s <= now_s <= high_s:
        return None
    return (
        "the machine changed: the reference product now takes "
        f"{format_ratio(change, sign=True)} of its time when this was measured; profile again with "
        "--no-cache"
    )


def _merged(profile: Profile, answer: dict[str, Any]) -> Profile:
    """The profile with newly measured layers; points of other sizes stay."""
    new = msgspec.convert(answer["layers"], tuple[Layer, ...])
    layers = {(layer.kind, layer.recompute): layer for layer in profile.layers}
    for layer in new:
        key = (layer.kind, layer.recompute)
        if key in layers:
            points = {point.microbatch_size: point for point in layers[key].points}
            points |= {point.microbatch_size: point for point in layer.points}
            layer = msgspec.structs.replace(
                layer, points=tuple(points[size] for size in sorted(points))
            )
        layers[key] = layer
    return msgspec.structs.replace(
        profile,
        layers=tuple(layers.values()),
        reference=msgspec.convert(answer["reference"], Reference),
        memory=msgspec.convert(answer["memory"], MemoryModel | None),
        # Until calibration says what they are in a pipeline; one rank alone has none.
        step_constants=profile.step_constants
        or msgspec.convert(answer["step_constants"], StepConstants),
        warnings=tuple(dict.fromkeys((*profile.warnings, *answer["warnings"]))),
        notes=answer["layer_source"],
    )
