"""A user's reward function: what it is handed, what counts as a failure, and that nothing that it does stops a run."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from slipstream.config import ConfigError
from slipstream.rewards.config import FunctionConfig, OverlongConfig, RewardConfig
from slipstream.rewards.function import RewardError, kept, open_reward, write_kept
from slipstream.rewards.reward import RewardResult, joined, penalized
from slipstream.tracking.config import check_metrics
from slipstream.types import Prompt

OWN = """
import asyncio, json, os, sys, time

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    print("a line that is no reply", flush=True)
    if solution_str == "raise":
        raise ValueError("no digit in it")
    acts = {"hang": lambda: time.sleep(60), "exit": lambda: os._exit(3), "eat": lambda: bytearray(1 << 40)}
    {**acts, "fork": os.fork, "read": sys.stdin.read}.get(solution_str, int)()
    values = {"none": None, "nan": float("nan"), "inf": float("inf"), "text": "1", "no score": {"other": 1.0},
        "huge": 10**400, "large": 1e39, "long": {"score": 1.0, "text": "x" * 100_000}}
    if solution_str in values:
        return values[solution_str]
    return {"score": float(solution_str == ground_truth), "Length (chars)": len(solution_str), "note": "kept out"}

def echo(data_source, solution_str, ground_truth, extra_info=None):
    raise ValueError(json.dumps([data_source, solution_str, ground_truth, extra_info]))

async def later(data_source, solution_str, ground_truth, extra_info=None):
    await asyncio.sleep(0.001)
    return 0.5

def narrow(solution_str):
    return 1.0
"""


Judge = Callable[..., RewardResult]


def prompt(answer: str = "4", **given: Any) -> Prompt:
    return Prompt(id=f"p{answer}", text="", token_ids=(1,), answer=answer, **given)


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("own") / "reward.py"
    path.write_text(OWN)
    return path


@pytest.fixture(scope="module")
def judge(own: Path) -> Iterator[Judge]:
    config = RewardConfig(function=f"{own}:compute_score", timeout_s=1.0, max_failed_fraction=1.0)
    with open_reward(config) as reward:
        yield lambda *texts: reward.judge([prompt()] * len(texts), texts, cut_off=[False] * len(texts))


def test_a_function_gives_a_score_and_metrics_whatever_a_child_of_it_leaves_behind(judge: Judge) -> None:
    metrics = {"length_chars": 2.5}
    assert judge("4", "five") == RewardResult(rewards=(1.0, 0.0), num_timeouts=0, num_crashes=0, metrics=metrics)
    assert judge("fork", "4", "4", "read").rewards == (0.0, 1.0, 1.0, 0.0)


@pytest.mark.parametrize("text", ["raise", "none", "nan", "inf", "huge", "large", "text", "no score", "long"])
def test_what_is_no_finite_number_is_a_failure_and_scores_0(judge: Judge, text: str) -> None:
    result = judge("4", text)
    assert (result.rewards, result.num_failures) == ((1.0, 0.0), 1)
    assert (result.num_timeouts, result.num_crashes) == (0, 0)


def test_a_function_that_hangs_or_ends_its_process_is_counted_and_the_next_response_is_scored(judge: Judge) -> None:
    result = judge("hang", "exit", "eat", "4")
    assert (result.rewards, result.num_failures) == ((0.0, 0.0, 0.0, 1.0), 0)
    assert (result.num_timeouts, result.num_crashes) == (1, 2)


def test_a_function_is_handed_what_the_row_and_the_rollout_have(own: Path, caplog: pytest.LogCaptureFixture) -> None:
    asked = [prompt("7", data_source="mine", extra={"level": 3}), prompt("8")]
    with open_reward(RewardConfig(function=f"{own}:echo", max_failed_fraction=1.0)) as reward:
        reward.judge(asked, ["one", "two"], cut_off=[True, False])
    assert caplog.messages == [
        'reward.function for prompt p7: ValueError: ["mine", "one", "7", {"level": 3, "finish_reason": "length"}]',
        'reward.function for prompt p8: ValueError: ["", "two", "8", {"finish_reason": "stop"}]',
    ]


def test_several_functions_score_the_prompts_of_their_data_sources_and_are_summed_by_weight(own: Path) -> None:
    parts = (
        FunctionConfig(function=f"{own}:compute_score", weight=2.0, data_source="mine"),
        FunctionConfig(function="mathematics", data_source="sums"),
        FunctionConfig(function=f"{own}:later", weight=0.5),
    )
    asked = [prompt("4", data_source="mine"), prompt("1/2", data_source="sums"), prompt("4")]
    with open_reward(RewardConfig(functions=parts)) as reward:
        result = reward.judge(asked, ["4", "\\boxed{0.5}", "four"], cut_off=[False] * 3)
        assert reward.equal([("1/2", "0.5")], "sums") == (False,)  # `later`, which scores all, compares text
        assert reward.gradable(["a word", "1/2"], "sums") == (False, True)
        assert reward.gradable(["a word"], "mine") == (True,)
    assert result.rewards == (2.25, 1.25, 0.25)
    assert result.metrics == {"mine_score": 1.0, "mine_length_chars": 1.0, "sums_score": 1.0, "later_score": 0.5}


def test_a_prompt_that_no_function_scores_has_the_built_in_reward_which_stands_beside_no_several(own: Path) -> None:
    parts = (FunctionConfig(function=f"{own}:later", data_source="mine"),)
    asked = [prompt("1/2", data_source="mine"), prompt("1/2")]
    with open_reward(RewardConfig(functions=parts)) as reward:
        assert reward.judge(asked, ["x", "\\boxed{0.5}"], cut_off=[False] * 2).rewards == (0.5, 1.0)
        assert reward.equal([("1/2", "0.5")]) == (True,)
    several = (FunctionConfig(function="mathematics"),)
    with pytest.raises(ConfigError, match=r"^reward\.function must be left out beside functions, got 'mathematics'; "):
        RewardConfig(function="mathematics", functions=several)


def test_more_failures_than_the_recipe_allows_end_the_run_and_name_the_first(own: Path) -> None:
    function = f"{own}:compute_score"
    with open_reward(RewardConfig(function=function, max_failed_fraction=0.25)) as reward:
        asked = [prompt("1"), prompt("2"), prompt("3"), prompt("4")]
        assert reward.judge(asked, ["1", "2", "3", "nan"], cut_off=[False] * 4).rewards == (1.0, 1.0, 1.0, 0.0)
        with pytest.raises(RewardError) as caught:
            reward.judge(asked, ["1", "raise", "3", "nan"], cut_off=[False] * 4)
    assert str(caught.value) == (
        "reward.function must fail for at most 25% of the responses (reward.max_failed_fraction), got 2 of 4; "
        f"the first of this call, for prompt p2: ValueError: no digit in it; mend {function}"
    )


def test_a_call_for_a_part_of_a_step_is_judged_with_those_before_it(own: Path) -> None:
    """Two of the last eight responses may fail, whatever the groups that were scored at once; a third ends the run."""
    config = RewardConfig(function=f"{own}:compute_score", max_failed_fraction=0.25)
    with open_reward(config, per_step=8) as reward:

        def judge(*texts: str) -> tuple[float, ...]:
            return reward.judge([prompt("1")] * len(texts), texts, cut_off=[False] * len(texts)).rewards

        assert judge("raise", "raise") == (0.0, 0.0)
        assert judge("1", "1") == judge("1", "1") == judge("1", "1") == (1.0, 1.0)
        assert judge("raise", "raise") == (0.0, 0.0)
        with pytest.raises(RewardError, match=r"got 3 of 8; the first of this call, for prompt p1: ValueError: "):
            judge("1", "raise")


def test_metrics_of_functions_with_one_name_have_their_place(own: Path) -> None:
    names = ("compute_score", "later", "compute_score")
    parts = tuple(FunctionConfig(function=f"{own}:{name}", weight=1.0 + i) for i, name in enumerate(names))
    with open_reward(RewardConfig(functions=parts)) as reward:
        found = reward.judge([prompt("4")], ["4"], cut_off=[False]).metrics
    lengths = {f"compute_score_{place}_length_chars": 1.0 for place in (1, 3)}
    assert found == {"compute_score_1_score": 1.0, "later_score": 0.5, "compute_score_3_score": 1.0, **lengths}


@pytest.mark.parametrize("data_source", ["2nd contest", "x" * 400])
def test_metrics_have_names_that_a_tracker_takes_whatever_a_data_source_is_called(own: Path, data_source: str) -> None:
    parts = tuple(FunctionConfig(function=f"{own}:compute_score", data_source=each) for each in (data_source, "b"))
    with open_reward(RewardConfig(functions=parts)) as reward:
        found = reward.judge([prompt("4", data_source=data_source)], ["4"], cut_off=[False]).metrics
    assert len(found) == 2
    check_metrics({f"reward/{name}": value for name, value in found.items()}, 0)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("reward.py", "be FILE:NAME, got 'reward.py'; as in reward.py:compute_score, or mathematics or reasoning_gym"),
        ("HERE/none.py:f", "reward.function must name a file, got 'HERE/none.py'"),
        ("OWN:absent", "AttributeError: module 'reward_function' has no attribute 'absent'"),
        ("OWN:narrow", "TypeError: got an unexpected keyword argument 'data_source'"),
        ("HERE/broken.py:f", "ModuleNotFoundError: No module named 'a_package_that_is_missing'"),
        ("HERE/ends.py:f", "a reward worker ended by itself before it was ready: does HERE/ends.py:f start?"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused_before_anything_runs(
    own: Path, tmp_path: Path, function: str, message: str
) -> None:
    (tmp_path / "broken.py").write_text("import a_package_that_is_missing\n")
    (tmp_path / "ends.py").write_text("import os\nos._exit(1)\n")
    before = set(psutil.Process().children())
    config = RewardConfig(function=function.replace("HERE", str(tmp_path)).replace("OWN", str(own)))
    with pytest.raises(ConfigError) as caught, open_reward(config):
        pass
    assert str(caught.value).endswith(message.replace("HERE", str(tmp_path)))
    assert str(caught.value).startswith("reward.function must ")
    assert set(psutil.Process().children()) <= before


def test_an_execution_keeps_a_copy_and_refuses_one_that_was_changed(own: Path, tmp_path: Path) -> None:
    config = RewardConfig(function=f"{own}:compute_score")
    copied = kept(config, tmp_path)
    write_kept(config, copied)
    write_kept(copied, copied)
    path, _, name = (copied.function or "").rpartition(":")
    assert (Path(path).read_text(), name, Path(path).parent) == (OWN, "compute_score", tmp_path)
    assert kept(config, tmp_path) == kept(copied, tmp_path) == copied
    changed = own.with_name("changed.py")
    changed.write_text(OWN + "\n")
    assert kept(replace(config, function=f"{changed}:compute_score"), tmp_path) != copied
    Path(path).write_text("")
    with pytest.raises(ConfigError, match=r"^reward\.function must be the function with which the execution was start"):
        kept(copied, tmp_path)
    parts = (FunctionConfig(function=f"{own}:compute_score", weight=2.0), FunctionConfig(function="mathematics"))
    both = kept(RewardConfig(functions=parts), tmp_path)
    assert both.functions == (replace(parts[0], function=copied.function), parts[1])
    assert kept(RewardConfig(), tmp_path) == RewardConfig()
    write_kept(RewardConfig(), RewardConfig())


def test_a_response_loses_more_the_nearer_it_is_to_its_limit_and_results_are_joined_by_responses() -> None:
    """A buffer of 4 before a limit of 10: nothing up to 6 tokens, then a quarter of the penalty of 2 for each."""
    result = RewardResult(rewards=(1.0,) * 4, num_timeouts=1, num_crashes=2, metrics={"a": 1.0})
    overlong = OverlongConfig(buffer_tokens=4, penalty=2.0)
    found = penalized(result, [6, 7, 9, 10], max_response_tokens=10, overlong=overlong)
    assert found == replace(result, rewards=(1.0, 0.5, -0.5, -1.0), metrics={"a": 1.0, "overlong_penalty": 1.0})
    assert penalized(result, [6, 7, 9, 10], max_response_tokens=10, overlong=OverlongConfig()) is result
    one = RewardResult(rewards=(1.0,), num_timeouts=1, num_crashes=0, num_failures=2, metrics={"a": 1.0})
    two = RewardResult(rewards=(0.0, 0.5), num_timeouts=0, num_crashes=3, metrics={"a": 4.0, "b": 2.0})
    assert joined([one, two]) == RewardResult(
        rewards=(1.0, 0.0, 0.5), num_timeouts=1, num_crashes=3, num_failures=2, metrics={"a": 3.0, "b": 2.0}
    )
