"""Every error a user may meet, and the exit code each one ends the command with."""


class PptuneError(Exception):
    """Root of the tree. The message names the rule, the values and what to change."""

    exit_code = 2


class UsageError(PptuneError):
    """A value or option that cannot be used."""


class MissingNumber(UsageError):
    """A prediction needs a number that the profile does not have."""

    def __init__(self, message: str, *, rule: str) -> None:
        super().__init__(message)
        self.rule = rule
        """A short code to count by, such as `link-not-measured`."""


class FileError(PptuneError):
    """A file that is missing, broken, foreign or from a newer version."""


class PlanError(PptuneError):
    """A plan that breaks a schedule's or a trainer's rule."""


class NoAnswer(PptuneError):
    """The question was fine and the answer is no: nothing legal, nothing fits, every run failed."""

    exit_code = 1


class RuntimeFailure(PptuneError):
    """The environment failed: no such device, rendezvous, time-out, hang, the user's model code."""

    exit_code = 3


class RankFailure(RuntimeFailure):
    """A rank died, hung, raised or ran out of memory."""

    def __init__(self, message: str, *, rank: int | None, reason: str) -> None:
        super().__init__(message)
        self.rank = rank
        """Global rank that failed first, or None where no single one can be blamed."""
        self.reason = reason
        """One of "crash", "timeout", "oom"."""

    @property
    def line(self) -> str:
        """The message in one line: who failed doing what, and the last line of its traceback."""
        first, *rest = str(self).splitlines()
        return f"{first.rstrip(':')}: {rest[-1].strip()}" if rest else first


class Interrupted(PptuneError):
    """Ctrl-C (130) or SIGTERM (143); finished work has been saved."""

    def __init__(self, message: str, *, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code
