"""Everything that needs torch: ranks, measurements inside them, real and replayed pipelines."""

import re

from pptune.errors import RuntimeFailure

MIN_TORCH = (2, 13)
"""The first version whose pipelining runtime has what the ranks call."""


class TorchMissing(RuntimeFailure):
    """No torch, a broken one, or one that is too old."""


def require_torch() -> None:
    """Raise TorchMissing where torch is missing, broken or too old, with what to install."""
    needed = ".".join(map(str, MIN_TORCH))
    advice = f"install it with: pip install 'torch>={needed}'"
    try:
        import torch
    except ImportError as error:
        raise TorchMissing(
            f"this command needs torch {needed} or newer, but it cannot be imported ({error}); "
            f"{advice}"
        ) from None
    version = re.match(r"(\d+)\.(\d+)", torch.__version__)
    if version is None or (int(version[1]), int(version[2])) < MIN_TORCH:
        raise TorchMissing(
            f"this command needs torch {needed} or newer, but {torch.__version__} is installed; "
            f"{advice}"
        )
