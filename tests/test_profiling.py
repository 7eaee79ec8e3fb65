"""What a profile that is used again says of the machine."""

from pptune.profiles import Reference
from pptune.profiling import changed_warning

QUIET = Reference(
    matrix_size=640, dtype="float32", seconds=10e-3, samples_s=(9.9e-3, 10e-3, 10.1e-3) * 10
)
RESTLESS = Reference(
    matrix_size=640, dtype="float32", seconds=10e-3, samples_s=(8e-3, 10e-3, 12e-3) * 10
)


def test_a_machine_that_is_no_longer_as_fast_is_said() -> None:
    slower = changed_warning(11.5e-3, QUIET)
    assert slower is not None
    assert "the reference product now takes +15.0% of its time" in slower
    faster = changed_warning(8.5e-3, QUIET)
    assert faster is not None
    assert "-15.0%" in faster
    assert changed_warning(10.9e-3, QUIET) is None


def test_the_unrest_that_the_profile_has_seen_is_no_change() -> None:
    assert changed_warning(11.5e-3, RESTLESS) is None
    assert changed_warning(13e-3, RESTLESS) is not None


def test_without_samples_the_reference_itself_decides() -> None:
    alone = Reference(matrix_size=640, dtype="float32", seconds=10e-3)
    assert changed_warning(11.5e-3, alone) is not None
    assert changed_warning(10.5e-3, alone) is None
