"""Steps that others measured, against the steps predicted from what they published.

Each experiment starts from a profile in profiles/published/, solves the numbers that its source
leaves open from a few measured steps, and predicts the other steps. Steps that solved a number
never count. `python -m tests.published` writes the solved numbers into the profiles.
"""

from collections.abc import Callable

from pptune.profiles import Profile
from tests.published.bloom import BLOOM, bloom_micro_batch_sweep, bloom_profile
from tests.published.figure_12 import FIGURE_12, figure_12_profile, gpt3_175b_figure_12
from tests.published.llama2 import llama2_7b_forward
from tests.published.nemotron import NEMOTRON, nemotron_340b, nemotron_profile
from tests.published.solving import Prediction
from tests.published.vocabulary import VOCABULARY_PROFILES, vocabulary_imbalance, vocabulary_profile
from tests.published.zero_bubble import (
    ZERO_BUBBLE_MODELS,
    zero_bubble_name,
    zero_bubble_profile,
    zero_bubble_throughput,
)

EXPERIMENTS: dict[str, Callable[[], list[Prediction]]] = {
    "zero_bubble_throughput": zero_bubble_throughput,
    "vocabulary_imbalance": vocabulary_imbalance,
    "nemotron_340b": nemotron_340b,
    "gpt3_175b_figure_12": gpt3_175b_figure_12,
    "bloom_micro_batch_sweep": bloom_micro_batch_sweep,
    "llama2_7b_forward": llama2_7b_forward,
}


def published_results() -> dict[str, dict[str, float]]:
    """By experiment: how many steps were predicted, their MAPE and the largest error, as ratios."""
    results = {}
    for name, experiment in EXPERIMENTS.items():
        errors = [abs(row.error_ratio) for row in experiment()]
        results[name] = {
            "num_rows": len(errors),
            "mape": sum(errors) / len(errors),
            "max_abs_error": max(errors),
        }
    return results


def calibrated_profiles() -> dict[str, Profile]:
    """The published profiles by file name without suffix, with their open numbers solved."""
    return {
        **{zero_bubble_name(model): zero_bubble_profile(model) for model in ZERO_BUBBLE_MODELS},
        **{name: vocabulary_profile(name) for name in VOCABULARY_PROFILES},
        NEMOTRON: nemotron_profile(),
        FIGURE_12: figure_12_profile(),
        BLOOM: bloom_profile(),
    }
