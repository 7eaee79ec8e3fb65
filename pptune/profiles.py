"""The profile: everything measured, imported or given about a model on a machine.

Format history:
1: first version.
"""

import contextlib
import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, get_args

import msgspec

from pptune.errors import FileError
from pptune.files import Document, impossible_number, load, read_bytes, save
from pptune.model import MAX_SIZE, ModelSpec, broken_model_rule

Source = Literal["measured", "interpolated", "extrapolated", "given"]
"""How a number was come by, strongest first."""
_SOURCES: tuple[Source, ...] = get_args(Source)


def weakest(sources: Iterable[Source]) -> Source:
    """The weakest of `sources`: a result is no better than its inputs. `measured` for none."""
    return max(sources, key=_SOURCES.index, default="measured")


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Where the numbers come from."""

    description: str
    """One line a person would recognise: processor or GPU, number of devices, backend."""
    device: Literal["cpu", "cuda"]
    device_name: str
    num_devices: int
    num_nodes: int = 1
    ranks_per_node: int | None = None
    cores: int | None = None
    memory_bytes: int | None = None
    """Memory of one rank's device; the default memory limit."""
    peak_flops_per_s: float | None = None
    """Dense peak of one device at the profile's dtype, or null where it isn't known."""
    backend: str | None = None
    software: dict[str, str] = {}
    """Versions: python, torch, cuda, nccl."""
    environment: dict[str, str] = {}
    """Variables that change timings, as they were at process start."""


class Parallel(msgspec.Struct, frozen=True, kw_only=True):
    """The other kinds of parallelism in force when the layers were timed."""

    tensor: int = 1
    context: int = 1
    data: int = 1


class LayerPoint(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of layer at one micro-batch size. Times are for one layer and one micro-batch."""

    microbatch_size: int
    forward_s: float | None = None
    backward_s: float | None = None
    """Full backward, input and weight gradients together."""
    backward_input_s: float | None = None
    backward_weight_s: float | None = None
    saved_activation_bytes: int | None = None
    """Bytes autograd keeps from this layer's forward until its backward."""
    boundary_bytes: int | None = None
    """Bytes of the layer's output, which is what a message between stages carries."""
    samples_s: dict[str, tuple[float, ...]] = {}
    """Times by phase (`forward`, `backward`, `backward_input`, `backward_weight`), each of one
    layer: the numbers above are their trimmed means. `call_forward` and the like, with the blocks,
    are what an empty chunk's call takes, which has been taken off the others."""
    source: Source = "measured"
    status: Literal["ok", "oom", "unsettled"] = "ok"


class Layer(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of layer and its times over micro-batch sizes."""

    kind: Literal["embedding", "block", "head"]
    """head includes the final norm and the loss."""
    count: int
    points: tuple[LayerPoint, ...]
    recompute: Literal["none", "full"] = "none"
    parameter_bytes: int | None = None


class LinkPoint(msgspec.Struct, frozen=True, kw_only=True):
    """One message size on one link."""

    num_bytes: int
    one_way_s: float
    """From the sender's post to the receiver's completion when nothing else delays it: the time
    within which the fastest quarter of the samples arrive."""
    loaded_s: float | None = None
    """The same while every pair of neighbours sends at once."""
    samples_s: tuple[float, ...] = ()


class Link(msgspec.Struct, frozen=True, kw_only=True, rename={"source_rank": "from",
                                                              "target_rank": "to"}):  # fmt: skip
    """A directed link under the LogGP model: L + bytes / bandwidth, and each end's own time."""

    scope: Literal["intra", "inter"]
    source_rank: int | None
    """Rank that sends; null for a link that stands for every pair of its scope."""
    target_rank: int | None
    latency_s: float
    bytes_per_s: float
    send_occupied_s: float = 0.0
    """Time the sender can't compute, per message."""
    receive_occupied_s: float = 0.0
    points: tuple[LinkPoint, ...] = ()
    source: Source = "measured"


class AllreducePoint(msgspec.Struct, frozen=True, kw_only=True):
    """An all-reduce of `num_bytes` over `num_ranks` ranks."""

    num_bytes: int
    num_ranks: int
    seconds: float
    num_nodes: int = 1
    source: Source = "measured"


class Overhead(msgspec.Struct, frozen=True, kw_only=True):
    """What an executor adds to bare layer times."""

    forward_s: float
    """Per forward action: dispatch, launch, bookkeeping."""
    backward_s: float
    """Per backward action; where the backward is split, per part."""
    step_s: float = 0.0
    """Per step: splitting the batch, setting up, gradient scaling."""
    hop_s: float = 0.0
    """Per message, on top of the link's own time: what a waiting receiver loses to wake up."""
    chunk_s: float = 0.0
    """Per chunk and step (first use of a chunk, per-chunk gradient reduction)."""
    source: Source = "measured"


class StepConstants(msgspec.Struct, frozen=True, kw_only=True):
    """Work once per step that no schedule changes: optimizer, zero-grad, gradient scaling."""

    fixed_s: float = 0.0
    per_parameter_byte_s: float = 0.0
    """Seconds per byte of the rank's own parameters."""
    source: Source = "measured"


class MemoryModel(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes kept per byte of parameters, besides the parameters themselves."""

    gradient_bytes_per_parameter_byte: float = 1.0
    optimizer_bytes_per_parameter_byte: float = 2.0
    """Adam keeps two moments: 2.0 at equal precision."""
    fixed_bytes: int = 0
    """Per rank: context, allocator slack, communication buffers."""
    source: Source = "measured"


class Reference(msgspec.Struct, frozen=True, kw_only=True):
    """A fixed matrix product timed all through the profile: how fast the machine was meanwhile.

    Two profiles taken apart compare by layer time / reference time.
    """

    matrix_size: int
    """Rows and columns of both square factors."""
    dtype: str
    seconds: float
    samples_s: tuple[float, ...] = ()
    """In the order they were taken."""


class Profile(Document, frozen=True, kw_only=True):
    """A profile file. What is unknown is null or absent, never a default."""

    kind: str = "profile"
    machine: Machine
    model: ModelSpec
    parallel: Parallel = Parallel()
    dtype: str
    seq_len: int
    num_ranks: int
    """Ranks that measured it; layer times and links hold for other numbers of ranks too."""
    layers: tuple[Layer, ...]
    links: tuple[Link, ...] = ()
    allreduce: tuple[AllreducePoint, ...] = ()
    overheads: dict[str, Overhead] = {}
    """By executor (executors.py)."""
    interference_ratio: float | None = None
    """How much longer compute takes while messages move: 0.05 is 5 % longer."""
    step_constants: StepConstants | None = None
    memory: MemoryModel | None = None
    reference: Reference | None = None
    calibration_plans: tuple[str, ...] = ()
    """Labels of the plans whose runs gave overheads; they never count as evidence of accuracy."""
    warnings: tuple[str, ...] = ()
    """What a reader must know about these numbers: noise, throttling, unsettled points."""
    notes: str | None = None
    """Free text: where published numbers were taken from."""

    def layer(self, kind: str, recompute: str = "none") -> Layer | None:
        """The measured kind of layer, or None."""
        for layer in self.layers:
            if layer.kind == kind and layer.recompute == recompute:
                return layer
        return None


def load_profile(path: str | Path) -> Profile:
    """Read and check a profile. Raises FileError."""
    profile = load(path, Profile, kind="profile")
    _refuse(_broken_rule(profile), where=str(path))
    return profile


def find_profile(path: str, digest: str, *, beside: Path) -> Profile | None:
    """The profile with that SHA-256 at `path` or next to `beside`; None where it is gone or has
    changed."""
    for place in (Path(path), beside.parent / Path(path).name):
        # ValueError: a path with a zero byte.
        with contextlib.suppress(OSError, ValueError, FileError):
            if hashlib.sha256(read_bytes(place, "profile")).hexdigest() == digest:
                return load_profile(place)
    return None


def save_profile(profile: Profile, path: str | Path) -> None:
    """Write a profile atomically. Raises FileError."""
    save(profile, path)


def check_profile(profile: Profile, *, where: str) -> None:
    """Raise FileError where numbers can't be, alone or together: no layers, zero bandwidth."""
    _refuse(impossible_number(profile) or _broken_rule(profile), where=where)


def _refuse(rule: str | None, *, where: str) -> None:
    if rule is not None:
        raise FileError(f"{where}: {rule}; measure or import the profile again")


def _broken_rule(profile: Profile) -> str | None:
    """What is wrong with the profile as a whole, or None."""
    model = profile.model
    if not profile.layers:
        return "the profile has no layers"
    if profile.num_ranks < 1 or profile.seq_len < 1:
        return "num_ranks and seq_len must be 1 or more"
    if profile.seq_len != model.seq_len:
        return f"seq_len is {profile.seq_len}, but the model's is {model.seq_len}"
    if 0 in (profile.machine.ranks_per_node, profile.machine.num_nodes):
        return "machine.ranks_per_node and num_nodes must be 1 or more"
    broken = broken_model_rule(model)
    if broken is not None:
        return broken
    kinds = [(layer.kind, layer.recompute) for layer in profile.layers]
    if len(set(kinds)) != len(kinds):
        return "a kind of layer appears twice"
    if min(profile.parallel.tensor, profile.parallel.context, profile.parallel.data) < 1:
        return "parallel.tensor, context and data must be 1 or more"
    rules = [
        *(_broken_layer_rule(layer, model) for layer in profile.layers),
        *(_broken_link_rule(link) for link in profile.links),
    ]
    for point in profile.allreduce:
        if point.num_bytes < 1 or point.num_ranks < 2 or point.num_nodes < 1:
            rules.append("an all-reduce point needs 1 byte, 2 ranks and 1 node or more")
    if profile.reference is not None and profile.reference.seconds <= 0:
        rules.append("reference.seconds must be above 0")
    return next((rule for rule in rules if rule is not None), None)


def _broken_layer_rule(layer: Layer, model: ModelSpec) -> str | None:
    expected = model.num_layers if layer.kind == "block" else 1
    if layer.count != expected:
        return f"layer {layer.kind}: count is {layer.count}, but the model has {expected}"
    if not layer.points:
        return f"layer {layer.kind} has no points"
    sizes = [point.microbatch_size for point in layer.points]
    if not 1 <= min(sizes) <= max(sizes) <= MAX_SIZE:
        return f"layer {layer.kind}: micro-batch sizes must lie in 1..{MAX_SIZE}"
    if len(set(sizes)) != len(sizes):
        return f"layer {layer.kind}: a micro-batch size appears twice"
    return None


def _broken_link_rule(link: Link) -> str | None:
    name = f"link {link.source_rank}->{link.target_rank}"
    if link.bytes_per_s <= 0:
        return f"{name}: bandwidth must be above 0"
    if (link.source_rank is None) != (link.target_rank is None):
        return f"{name}: a link joins two ranks, or stands for every pair of its scope"
    return None
