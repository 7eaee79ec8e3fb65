"""What a machine has for pptune, as sheets."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pptune.profiles import Link
from pptune.units import format_bytes
from pptune.views.profile import links_sheet
from pptune.views.tables import Sheet, facts_sheet

if TYPE_CHECKING:
    from pptune.runtime.doctor import Device, Diagnosis


def doctor_sheets(
    diagnosis: "Diagnosis", *, links: Sequence[Link] = (), exchange: str | None = None
) -> tuple[Sheet, ...]:
    """The machine, its environment, the links of the test exchange, and what is wrong.

    `exchange` says in words how the 2-rank send and receive went.
    """
    versions = [*diagnosis.versions.items(), *diagnosis.packages.items()]
    machine = [
        ("host", diagnosis.host),
        ("cores", str(diagnosis.cores)),
        *((f"device {index}", _device(device)) for index, device in enumerate(diagnosis.devices)),
        ("backends", ", ".join(diagnosis.backends) or "none"),
        ("2-rank send and receive", exchange),
    ]
    sheets = [
        facts_sheet("This machine", machine),
        facts_sheet("Versions", ((name, version or "not installed") for name, version in versions)),
    ]
    if diagnosis.environment:
        sheets.append(
            facts_sheet("Variables that change timings", sorted(diagnosis.environment.items()))
        )
    if links:
        sheets.append(links_sheet(links))
    problems = diagnosis.problems or ("No problem was found.",)
    sheets.append(Sheet(title="Problems", columns=(), rows=(), notes=problems))
    return tuple(sheets)


def _device(device: "Device") -> str:
    parts = [device.name]
    if device.memory_bytes is not None:
        parts.append(format_bytes(device.memory_bytes))
    if device.peak_bfloat16_flops_per_s is not None:
        parts.append(f"{device.peak_bfloat16_flops_per_s / 1e12:,.0f} TFLOP/s bfloat16, dense")
    return ", ".join(parts)
