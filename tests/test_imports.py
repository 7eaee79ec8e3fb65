"""The architecture, enforced: imports point down, torch stays in runtime/, all have a layer."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "pptune"

LAYERS: list[set[str]] = [
    {"errors"},
    {"units", "files", "executors"},
    {"hardware", "model", "measurement", "schedules"},
    {"plan", "presets", "profiles"},
    {"estimate", "curves", "importing", "simulator", "targets"},
    {"plans_file", "validation_file", "explanation"},
    {"measured_step"},
    {"cost_model", "runtime"},
    {"search", "calibration", "from_numbers", "plan_runs"},
    {"explain", "validate", "profiling"},
    {"views"},
    {"cli"},
]
LAYER_OF = {name: depth for depth, names in enumerate(LAYERS) for name in names}


def unit_of(path: Path) -> str:
    """The top-level module or package a file belongs to."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


FILES = [path for path in sorted(ROOT.rglob("*.py")) if path.parent != ROOT or path.stem[0] != "_"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_down(path: Path) -> None:
    unit = unit_of(path)
    assert unit in LAYER_OF, f"{unit} has no layer"
    for name in imported(path):
        parts = name.split(".")
        if parts[0] == "torch":
            assert unit == "runtime", f"{unit} imports torch"
        if parts[0] == "pptune" and len(parts) > 1 and parts[1] in LAYER_OF and parts[1] != unit:
            assert LAYER_OF[parts[1]] < LAYER_OF[unit], f"{unit} imports {parts[1]}"
