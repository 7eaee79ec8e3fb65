"""What a trainer is to the rest of pptune: its name, its rules, its writer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pptune.executors import Executor
from pptune.model import ModelSpec
from pptune.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A trainer at a version. Rules and option names belong to the pair, not to the name."""

    name: str
    version: str

    def __str__(self) -> str:
        return f"{self.name}@{self.version}"


@dataclass(frozen=True, slots=True)
class Violation:
    """Why a trainer can't run a plan."""

    rule: str
    """A short code to count by, such as `microbatches-not-multiple-of-rounds`."""
    message: str
    """The rule and the values, in the trainer's own option names."""
    suggestion: str
    """What to change."""

    def __str__(self) -> str:
        return f"{self.message}; {self.suggestion}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a rule may depend on besides the plan."""

    model: ModelSpec | None = None
    tensor_parallel: int = 1
    context_parallel: int = 1
    zero: int = 0
    """ZeRO stage: 0 nothing sharded, 1 the optimizer state."""
    world_size: int | None = None
    """Processes of the whole job, where it is known."""
    overlap_p2p: bool = True
    """False: Megatron's `--no-overlap-p2p-communication`."""
    allow_empty_stages: bool = False

    @property
    def ties_embeddings(self) -> bool:
        return self.model is not None and self.model.tie_word_embeddings

    def num_processes(self, plan: Plan) -> int:
        """T * C * P * D."""
        return self.tensor_parallel * self.context_parallel * plan.num_ranks * plan.data_parallel


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a writer needs besides the plan."""

    model: ModelSpec
    dtype: str
    seq_len: int
    profile_name: str
    setting: Setting


@dataclass(frozen=True, slots=True)
class ExportedFile:
    """One file of an export."""

    name: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What an exported text says, read back from it. None: the trainer has no such option."""

    num_ranks: int
    num_chunks: int
    microbatch_size: int
    num_microbatches: int
    data_parallel: int
    layers_per_stage: tuple[int, ...] | None
    microbatch_group_size: int | None = None
    schedule: str | None = None
    recompute: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """A trainer's rules and its writer. Functions get the version, the second half of a Target."""

    versions: tuple[str, ...]
    """The first is the default."""
    schedules: Callable[[str], frozenset[str]]
    illegal: Callable[[Plan, Setting, str], Violation | None]
    """The rules of this trainer alone; those that hold for all come first, in `illegal`."""
    executor: Callable[[Plan], Executor]
    group_sizes: Callable[[str, int, int, str], tuple[int, ...]]
    """Legal N for (schedule, P, M, version) of an interleaved schedule, the default first."""
    supports_uneven: bool
    """Whether a plan's `layers_per_stage` can be handed over when they are not all equal."""
    keeps_boundary_tensors: bool
    """Whether outputs that have been sent live on until the step ends."""
    write: Callable[[Plan, Job, str], list[ExportedFile]]
    reread: Callable[[dict[str, str], int], Written]
    """From the texts by file name, and the blocks of the model, as the trainer reads them."""


def choices(values: Sequence[object]) -> str:
    """`8`, `8 or 10`, `5, 6 or 10`."""
    texts = [str(value) for value in values]
    return texts[0] if len(texts) == 1 else ", ".join(texts[:-1]) + " or " + texts[-1]
