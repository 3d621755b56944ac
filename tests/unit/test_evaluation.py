"""Accuracy figures against hand-worked values, and an evaluation with an engine that replays given responses."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest

from slipstream.config import ConfigError
from slipstream.engine.config import SamplingConfig
from slipstream.engine.protocol import GenerationResult
from slipstream.evaluation import EvaluationConfig, evaluate, maj_at_k, prompt_hash
from slipstream.records.steps import EvaluationRecord
from slipstream.rewards.config import RewardConfig
from slipstream.rewards.reward import RewardResult
from slipstream.rewards.verifier import Verifier
from slipstream.statistics import reward_ci95
from slipstream.types import Prompt, Rollout, RolloutGroup
from tests.unit.conftest import Refusal
from tests.unit.sampled import rollout

# Tokens are code points: 0 ends a response.
PROMPTS = tuple(
    Prompt(id=str(n), text=f"{n}+{n}=?", token_ids=tuple(map(ord, f"{n}+{n}=?")), answer=str(2 * n)) for n in (1, 2)
)


class ReplayEngine:
    """An engine that gives each prompt its listed responses; one without the end token is truncated."""

    def __init__(self, responses: dict[str, list[str]]) -> None:
        self.responses = responses
        self.calls: list[tuple[SamplingConfig, int, int]] = []

    def generate(
        self, prompts: Sequence[Prompt], *, sampling: SamplingConfig, group_size: int, seed: int
    ) -> GenerationResult:
        self.calls.append((sampling, group_size, seed))

        def answer(prompt: Prompt, text: str) -> Rollout:
            return rollout(tuple(map(ord, text)), prompt_id=prompt.id, is_cut=not text.endswith("\0"))

        said = [(prompt, tuple(answer(prompt, text) for text in self.responses[prompt.id])) for prompt in prompts]
        groups = tuple(RolloutGroup(prompt=prompt, rollouts=rollouts) for prompt, rollouts in said)
        return GenerationResult(groups=groups, acceptance=None, generation_s=0.0)


def decode(prompt: Sequence[int], response: Sequence[int]) -> str:
    """A prompt that ends with `t` has opened a thought."""
    return "<think>" * (prompt[-1] == ord("t")) + "".join(map(chr, response)).rstrip("\0")


class ByLength(Verifier):
    """A reward of one's own: a tenth for each character of a response, less a half."""

    def judge(self, prompts: Sequence[Prompt], responses: Sequence[str], *, cut_off: Sequence[bool]) -> RewardResult:
        return RewardResult(rewards=tuple(len(text) / 10 - 0.5 for text in responses), num_timeouts=0, num_crashes=0)


def evaluated(
    engine: ReplayEngine,
    prompts: Sequence[Prompt] = PROMPTS,
    *,
    k: int = 4,
    reward: type[Verifier] = Verifier,
    **how: Any,
) -> EvaluationRecord:
    """An evaluation of `k` samples a problem, which are scored by mathematics unless another reward is named."""
    sampling = SamplingConfig(temperature=0.7, max_response_tokens=16, **how)
    config = EvaluationConfig(num_samples_per_problem=k, sampling=sampling)
    with closing(reward(RewardConfig())) as scorer:
        return evaluate(engine, prompts, reward=scorer, decode=decode, config=config, policy="start", seed=3)


@pytest.mark.parametrize(
    ("answers", "rewards", "expected"),
    [
        ([["2", "2", "3"], ["5", "4", "5"]], [[1, 1, 0], [0, 1, 0]], 0.5),  # "2" wins 2:1, "5" wins 2:1 and is wrong
        ([["2", "3", "2", "3", "9"]], [[1, 0, 1, 0, 0]], 0.5),  # the chance of drawing the right one of a tie
        ([["025", "25", "7", None, None, None]], [[1, 1, 0, 0, 0, 0]], 1.0),  # one value, and no votes
        ([[None, None]], [[0, 0]], 0.0),
        ([["1/2", "0.5", "\\frac{1}{2}", "2", "2"]], [[1, 1, 1, 0, 0]], 1.0),
        ([["2\N{SUPERSCRIPT THREE}", "23", "8"]], [[1, 0, 1]], 1.0),
        ([["\\sqrt{12}", "2\\sqrt{3}", "7", "8"]], [[1, 1, 0, 0]], 1.0),  # both are right
        ([["7" * 5000, "7" * 5000, "07" * 2500, "2", "2"]], [[0, 0, 0, 1, 1]], 0.5),  # a loop is not read
    ],
)
def test_maj_at_k_takes_the_value_with_most_votes(answers: Any, rewards: Any, expected: float) -> None:
    assert maj_at_k(answers, rewards) == pytest.approx(expected)


def test_the_prompt_hash_follows_tokens_answers_and_order_of_problems_of_which_there_must_be_some() -> None:
    other = Prompt(id="1", text="1+1=?", token_ids=PROMPTS[0].token_ids, answer="3")
    assert prompt_hash(PROMPTS) == prompt_hash(list(PROMPTS))
    assert len({prompt_hash(PROMPTS), prompt_hash(PROMPTS[::-1]), prompt_hash((other, PROMPTS[1]))}) == 3
    with pytest.raises(ConfigError, match=r"^data\.validation must have problems to evaluate on, got 0$"):
        evaluated(ReplayEngine({}), ())


def test_an_evaluation_scores_every_sample_and_counts_truncation() -> None:
    right, wrong, cut = "\\boxed{2}\0", "\\boxed{3}\0", "1+1=2\n\\boxed{"
    engine = ReplayEngine({"1": [right, right, wrong, cut], "2": ["\\boxed{4}\0", cut, wrong, wrong]})
    record = evaluated(engine, top_p=0.9)
    assert engine.calls == [(SamplingConfig(temperature=0.7, top_p=0.9, top_k=0, max_response_tokens=16), 4, 3)]
    assert (record.policy, record.num_problems, record.k, record.num_timeouts) == ("start", 2, 4, 0)
    assert record.correct_by_problem == (2, 1)
    assert record.avg_at_k == pytest.approx((0.5 + 0.25) / 2)
    assert record.maj_at_k == pytest.approx(0.5)
    assert record.truncated_fraction == pytest.approx(2 / 8)
    assert record.ci95 == reward_ci95([0.5, 0.25])
    assert record.prompt_hash == prompt_hash(PROMPTS)


def test_rewards_that_are_no_rates_are_kept_as_they_are_and_have_an_interval_of_their_own() -> None:
    prompts = [replace(PROMPTS[0], id=str(n)) for n in range(6)]
    said = {str(n): [4 * n * "x" + "\0", "y\0"] for n in range(6)}  # rewards (4 n - 5) / 10 and -0.4
    record = evaluated(ReplayEngine(said), prompts, k=2, reward=ByLength)
    assert record.correct_by_problem == pytest.approx((-0.9, -0.5, -0.1, 0.3, 0.7, 1.1))
    assert record.avg_at_k == pytest.approx(0.05)
    low, high = record.ci95 or (0.0, 0.0)
    assert (low + high) / 2 == pytest.approx(0.05) and high - low == pytest.approx(
        2 * 2.5706 * (0.14 / 6) ** 0.5, rel=1e-3
    )
    alike = evaluated(ReplayEngine({"1": ["x" * 20 + "\0"] * 2, "2": ["x" * 20 + "\0"] * 2}), k=2, reward=ByLength)
    assert (alike.avg_at_k, alike.ci95) == (1.5, None)


def test_a_guess_in_a_thought_that_the_prompt_opened_is_no_answer_until_the_thought_is_closed() -> None:
    opened = replace(PROMPTS[0], token_ids=tuple(map(ord, "1+1=? t")))
    guess, cut = "so \\boxed{2}? Let me check", "Answer: 2"  # an answer that may go on has no vote either
    engine = ReplayEngine({"1": [guess, guess + "\0", guess + "</think>\\boxed{2}\0", guess + "</think>" + cut]})
    record = evaluated(engine, [opened])
    assert (record.correct_by_problem, record.maj_at_k) == ((1,), 1.0)


def test_an_answer_in_the_tags_of_a_reasoning_gym_task_has_a_vote() -> None:
    said = {"1": ["<answer>2</answer>\0"] * 3 + ["<answer>3</answer>\0"]}
    for source, expected in (("reasoning_gym:chain_sum", 1.3), ("", 0.0)):
        record = evaluated(ReplayEngine(said), [replace(PROMPTS[0], data_source=source)], reward=ByLength)
        assert record.maj_at_k == pytest.approx(expected)


def test_greedy_samples_are_refused_but_for_one_a_problem(refusal: Refusal) -> None:
    assert refusal(EvaluationConfig, sampling={"max_response_tokens": 16, "temperature": 0.0}) == (
        "evaluation.sampling.temperature must be > 0 with more than one sample a problem, got 0.0; "
        "greedy samples are all equal: set num_samples_per_problem to 1"
    )
    greedy = SamplingConfig(temperature=0.0, max_response_tokens=16)
    assert EvaluationConfig(num_samples_per_problem=1, sampling=greedy).sampling == greedy
