"""The worker is started by path, so its own directory comes first where it imports: nothing there may be in the way."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

from slipstream.rewards import pool

REWARDS = Path(pool.__file__).parent


def test_no_file_beside_the_worker_hides_a_module_that_math_verify_imports() -> None:
    check = "import math_verify, sys; print(*{name.partition('.')[0] for name in sys.modules})"
    command = [sys.executable, "-P", "-c", check]
    imported = set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
    assert {"sympy", "types"} <= imported  # else the list would say nothing

    beside = {path.stem for path in REWARDS.glob("*.py")}
    assert "worker" in beside
    assert not beside & (imported | set(sys.stdlib_module_names))


def test_the_worker_imports_nothing_of_slipstream() -> None:
    tree = ast.parse((REWARDS / "worker.py").read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {"json", "math_verify"} <= imported
    assert not [name for name in imported if name.startswith("slipstream")]
