"""Reading back the Python files that an export writes, without running them."""

import ast
from typing import Any


def literals(text: str) -> dict[str, Any]:
    """Name to value of the module's plain assignments whose right side is a literal."""
    found: dict[str, Any] = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            try:
                found[node.targets[0].id] = ast.literal_eval(node.value)
            except ValueError:
                continue
    return found
