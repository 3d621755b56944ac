import pytest

from benchmarks.trl_comparison import TrlSteps, comparison, messages
from benchmarks.trl_step import MARK, READY
from slipstream.types import Dtype

BFLOAT16 = TrlSteps(dtype=Dtype.BFLOAT16, step_s=8.0, mean_response_tokens=60.4)
FLOAT32 = TrlSteps(dtype=Dtype.FLOAT32, step_s=6.0, mean_response_tokens=59.6)


def test_the_ratio_that_counts_is_to_trl_in_our_own_type_even_where_another_is_faster_or_nothing_was_drafted() -> None:
    lines = comparison({"autoregressive": 4.0, "speculative": 3.0}, [BFLOAT16, FLOAT32]).splitlines()
    assert lines[0].endswith("of TRL in bfloat16")
    ratios = ["1.00  60 tokens a response", "0.75  60 tokens a response", "0.50", "0.38"]
    assert [line.split("s  ")[-1] for line in lines[1:-1]] == ratios
    assert lines[-1] == ("ratio to TRL, same dtype: autoregressive 0.50 (limit 0.70), speculative 0.38 (limit 0.50)")
    assert "speculative not run: the sweep chose k = 0 (limit 0.50)" in comparison({"autoregressive": 4.0}, [FLOAT32])


def test_what_trl_prints_is_not_taken_for_a_message() -> None:
    said = messages(["{'loss': 0.1}\n", f"{MARK}{READY}\n", "\n", f"{MARK}1.25\n"])
    assert [next(said), next(said)] == [READY, "1.25"]
    with pytest.raises(RuntimeError, match="ended before its last step"):
        next(said)
