"""The built-in models, as a table."""

from pptune.presets import DEFAULT_MODEL, PRESETS
from pptune.views.tables import Column, Sheet


def models_sheet() -> Sheet:
    """A row per preset."""

    def millions(value: int | None) -> str | None:
        return None if value is None else f"{value / 1e6:,.0f} M"

    return Sheet(
        title="Built-in models",
        columns=(
            Column(key="name", title="name", left=True),
            Column(key="family", title="family", left=True, priority=2),
            Column(key="num_layers", title="blocks"),
            Column(key="hidden_size", title="hidden"),
            Column(key="num_heads", title="heads", priority=2),
            Column(key="vocab_size", title="vocabulary", priority=3),
            Column(key="seq_len", title="tokens", priority=1),
            Column(key="parameters", title="parameters", priority=1),
        ),
        rows=tuple(
            (
                spec.name, spec.family, spec.num_layers, spec.hidden_size, spec.num_heads,
                spec.vocab_size, spec.seq_len, millions(spec.num_parameters()),
            )
            for spec in PRESETS.values()
        ),
        notes=(
            f"{DEFAULT_MODEL} is the default: two CPU processes can train it.",
            "A path to a Hugging Face config.json or package.module:function works too.",
        ),
    )  # fmt: skip
