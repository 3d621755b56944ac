"""Imports: what a process does without, and what it does not collect."""

import gc
import subprocess
import sys

import pytest

from slipstream.imports import uncollected


def test_collections_stop_and_go_on_again_after_an_error_too_unless_they_had_stopped_before() -> None:
    frozen = gc.get_freeze_count()
    try:
        with pytest.raises(ImportError), uncollected():
            assert not gc.isenabled()
            raise ImportError
        assert gc.isenabled()
        assert gc.get_freeze_count() > frozen
    finally:
        gc.unfreeze()
    gc.disable()
    try:
        with uncollected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
        gc.unfreeze()


def test_a_recipe_is_checked_an_answer_compared_and_a_run_opened_without_the_large_packages() -> None:
    large = {"matplotlib", "mlflow", "ray", "scipy.stats", "speculators", "sympy", "torch", "transformers", "vllm"}
    ours = "slipstream.cli, slipstream.rewards.verifier, slipstream.stages.start_run"
    code = f"import sys, {ours}; print(*sorted({large} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == []
