"""A verifier that hangs, dies or floods its output costs its own answer and nothing else."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from slipstream.rewards.config import RewardConfig
from slipstream.rewards.reward import RewardResult
from slipstream.rewards.verifier import Verifier

# What the worker imports instead of the reader of LaTeX: it fails at the answer 66, and all others are equal to it.
_MODULE = """
import os, sys, time, types
import sympy

sys.modules[__name__ + ".latex2sympy2"] = types.SimpleNamespace(ConversionConfig=dict)

def latex2sympy(text, **_):
    if "66" in text:
        {fault}
    return sympy.Integer(9)
"""
FAULTS = {
    "hangs": ("time.sleep(10**6)", RewardResult(rewards=(1.0, 0.0, 1.0), num_timeouts=1, num_crashes=0)),
    "crashes": ("os.abort()", RewardResult(rewards=(1.0, 0.0, 1.0), num_timeouts=0, num_crashes=1)),
    "raises": ("raise SystemError", RewardResult(rewards=(1.0, 0.0, 1.0), num_timeouts=0, num_crashes=1)),
    "prints a gigabyte": (
        "[(print('x' * 2**20), print('x' * 2**20, file=sys.stderr)) for _ in range(512)]",
        RewardResult(rewards=(1.0, 1.0, 1.0), num_timeouts=0, num_crashes=0),
    ),
    "eats all memory": ("x = bytearray(2**40)", RewardResult(rewards=(1.0, 0.0, 1.0), num_timeouts=0, num_crashes=1)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_verifier_costs_its_own_answer_alone(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    code, expected = FAULTS[fault]
    (tmp_path / "latex2sympy2_extended.py").write_text(_MODULE.format(fault=code))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    answers = [f"\\boxed{{\\log {number}}}" for number in ("5", "66", "7")]

    with closing(Verifier(RewardConfig(timeout_s=5.0 if fault == "hangs" else 10.0))) as verifier:
        result = verifier.score(answers, ["\\log 9"] * 3)

    assert result == expected
    captured = capfd.readouterr()
    assert len(captured.out) + len(captured.err) < 10_000
