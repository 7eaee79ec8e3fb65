"""Why a plan was picked: what `explain` answers, as data."""

import msgspec

from pptune.estimate import Estimate
from pptune.plan import Plan


class Alternative(msgspec.Struct, frozen=True, kw_only=True):
    """The best plan of one V and one b at the same global batch."""

    num_chunks: int
    microbatch_size: int
    plan: Plan | None
    estimate: Estimate | None
    reason: str | None = None
    """Why there is none: the rule, the values and what to change."""


class StepShare(msgspec.Struct, frozen=True, kw_only=True):
    """Where one plan's step goes. The five parts of `estimate.breakdown_s` sum to the step time;
    what is named here lies inside them."""

    role: str
    """`pick`, `runner-up` or `baseline`."""
    plan: Plan
    estimate: Estimate
    chunk_cost_s: float
    """The part of the step constant that is paid per chunk: per-chunk fixed cost x V."""
    small_size_loss_s: float | None
    """Compute that would be saved if every layer ran at its best measured rate per sequence: what
    small micro-batches cost. Null without layer times."""
    imbalance_loss_s: float
    """Step time saved if every stage took the same time, at the same total."""


class Rival(msgspec.Struct, frozen=True, kw_only=True):
    """The best plan of another V, and why it is not the pick."""

    plan: Plan
    estimate: Estimate
    slower_s: float
    """Its step time - the pick's."""
    reason_code: str
    """The part that differs most: a key of `grown_s`."""
    reason: str
    """The same in words."""
    grown_s: dict[str, float]
    """Its part - the pick's: `compute`, `bubble`, `exposed-transfer`, `overhead`, `chunk-cost`
    (per-chunk fixed cost x V) and `step-constant` (what else is paid once)."""


class ChunkRange(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of micro-batches at which a V is the fastest, with b held fixed."""

    num_chunks: int
    ranges: tuple[tuple[int, int], ...]
    """First and last M tried of each run of wins; empty where this V never wins."""
    rule_of_thumb: int
    """1.2 V P: below it V is said not to pay."""
    rule_holds: bool | None
    """Whether V beats V = 1 exactly from there on; null for V = 1 and where only one side of the
    rule could be tried."""
    beats_one: tuple[tuple[int, int], ...]
    """First and last M tried of each run at which this V beats V = 1; empty for V = 1."""


class SizeRow(msgspec.Struct, frozen=True, kw_only=True):
    """The pick with another b; the global batch is held fixed, and schedule, V and layers stay."""

    microbatch_size: int
    num_microbatches: int
    step_time_s: float
    bubble_ratio: float
    equal_stages_bubble_ratio: float
    """The same with all stages taking the same time: what b alone does to the bubble."""


class Bandwidth(msgspec.Struct, frozen=True, kw_only=True):
    """The bandwidth at which the choice between V = 1 and more chunks turns."""

    slowest_bytes_per_s: float
    """The slowest link that was used."""
    break_even_bytes_per_s: float | None
    """The bandwidth of that link, all others scaled alike, at which V = 1 and the best V > 1 tie;
    null where the same one wins at every bandwidth tried."""
    below: str
    """What wins below the break-even, or at every bandwidth: `one chunk` or `more chunks`."""


class HeadLoss(msgspec.Struct, frozen=True, kw_only=True):
    """What the head (norm, logits, loss) on the last stage costs the whole pipeline."""

    loss_s: float
    """Step time saved if the head's work were spread evenly over the ranks."""
    loss_ratio: float
    head_blocks: float
    """The head's time in blocks."""
    best_layers: tuple[int, ...] | None
    """The split of the blocks with the shortest step, where it is shorter than the plan's own."""
    best_layers_step_time_s: float | None


class Sensitivity(msgspec.Struct, frozen=True, kw_only=True):
    """One number of the profile moved by its own uncertainty, up and down."""

    name: str
    uncertainty_ratio: float
    assumed: bool
    """True where the profile has no samples to take an uncertainty from."""
    step_time_change_ratio: float
    """The pick's step time with the number at its upper end / as it is - 1."""
    new_pick: str | None
    """The plan that would be picked instead at one of the ends, or null where the pick stays."""


class Confidence(msgspec.Struct, frozen=True, kw_only=True):
    """How sure the choice is, by redrawing the profile's samples (bootstrap)."""

    chance_best: float | None
    """Share of the redrawn profiles on which the pick is the fastest; null without samples."""
    num_resamples: int
    num_plans: int
    rival: str | None
    """The plan that most often takes its place."""
    seed: int


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """What `explain` prints; seconds, bytes and ratios 0..1."""

    held_fixed: str
    """Which quantity is held fixed while the others change, in words."""
    shares: tuple[StepShare, ...]
    """The pick, the runner-up and the baseline."""
    alternatives: tuple[Alternative, ...]
    """By V, then b."""
    rivals: tuple[Rival, ...]
    """The first plan of every other V, fastest first."""
    sizes: tuple[SizeRow, ...]
    chunk_ranges: tuple[ChunkRange, ...]
    bandwidth: Bandwidth | None
    """Null where no link is used or only one V is legal."""
    knee_microbatch_size: float | None
    """b at which a block reaches 90 % of its best rate."""
    head: HeadLoss | None
    sensitivities: tuple[Sensitivity, ...]
    confidence: Confidence
