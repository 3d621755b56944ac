"""Offline stand-ins for the real data sets, with the same columns, and the tiny policy's pretraining corpus.

The in-domain task is chained addition, `12+7+30=?`, worked step by step and closed with a boxed answer. A
character-level model of a few million parameters learns it easily. Answers lie in AIME's range 0-999, and response
lengths have the long right tail that makes rollouts expensive. The general-domain task edits text over the same
characters.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from slipstream.config import NUMBER, Checked, ConfigError, Fix, Int, NonNegativeInt, Probability
from slipstream.types import Workload

Split = Literal["train", "draft_in_domain", "draft_general", "validation"]
Row = dict[str, Any]

MAX_ANSWER = 999
Size = Annotated[Int, Field(ge=1, le=1_000_000), Fix("larger sets come from files")]
_MAX_TRIES = 10_000  # samples in a row without a new problem that fits
_VALIDATION_SHARE = 16  # one problem in so many is reserved for validation and never in the corpus
_TEXT = (
    "a red fox ran over the old stone bridge while two small birds sang in tall green trees near our house and "
    "my friend reads books about ships stars rivers mountains music bread rain snow wind fire every quiet morning"
)
_WORDS = tuple(_TEXT.split())


class SyntheticConfig(Checked, path="data.synthetic"):
    """Size and difficulty of the synthetic sets.

    The number of terms n of a problem is drawn with chance proportional to `terms_decay` ** n over
    [`min_terms`, `max_terms`]: mostly short responses with a long tail. With the defaults a direct response has
    about 55 characters in the mean and 160 at most, a prompt about 20.
    """

    num_train_problems: Size = 2000
    """Unique training problems. Set it where a run is longer than its problems last."""
    num_copies: Size = 2
    """Rows for each training problem, as the real set repeats its own. Set it to test the removal of duplicates."""
    num_conflicting: NonNegativeInt = 8
    """Training problems that a further row gives another answer. Set it to test the cleaning of data."""
    num_leaked: NonNegativeInt = 2
    """Validation problems that also stand among the training rows. Set it to test the removal of leaks."""
    num_draft_rows: Size = 1000
    """Rows of each of the two draft sets."""
    num_validation_problems: Size = 30
    """Unique validation problems, as many as AIME 2024 has. Set it where an accuracy is too noisy."""
    min_terms: Annotated[Int, Field(ge=2)] = 3
    """Terms of the shortest sum. Set it for easier problems."""
    max_terms: Annotated[Int, Field(ge=2, le=MAX_ANSWER)] = 14
    """Terms of the longest sum; a response grows with them."""
    terms_decay: Annotated[float, Field(gt=0, le=2), NUMBER] = 0.74
    """Ratio of the chances of n + 1 and of n terms; below 1 most sums are short."""
    max_term: Annotated[Int, Field(ge=10, le=99)] = 99
    """Largest term. Set it for easier problems."""
    one_digit_rate: Probability = 0.5
    """Chance that a term has one digit."""
    subtraction_rate: Probability = 0.0
    """Chance that a term is subtracted where the running sum allows it. Set it for problems of another kind."""
    noise_rate: Probability = 0.1
    """Chance that a worked step of the pretraining corpus is wrong and the mistake is carried on."""
    careless_rate: Probability = 0.0
    """Chance that a response of the pretraining corpus skips the work and boxes the first term: what RL unlearns."""
    general_rate: Probability = 0.1
    """Share of the pretraining corpus that is general-domain text."""

    def _check(self) -> None:
        for name, bound in (("num_leaked", "num_validation_problems"), ("num_conflicting", "num_train_problems")):
            most = getattr(self, bound)
            self._require(getattr(self, name) <= most, name, f"must be <= {bound} ({most})")
        self._require(self.max_terms >= self.min_terms, "max_terms", f"must be >= min_terms ({self.min_terms})")
        fits, rule = self.min_terms * self.max_term <= MAX_ANSWER, f"must be <= {MAX_ANSWER}, the largest answer"
        self._require(fits, "min_terms", f"times max_term {rule}", "lower min_terms or max_term")


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """One problem and one response to it, as plain text without any chat template."""

    problem: str
    response: str


def pretraining_corpus(config: SyntheticConfig, *, workload: Workload, seed: int) -> Iterator[Example]:
    """Generate endless noisy examples for pretraining the tiny policy, a pure function of the arguments.

    No validation problem is among them, whatever its seed. A direct response lists the steps; one of `rl_think` works
    inside `<think>` … `</think>` and checks each step. Mistakes occur at `noise_rate` a step, so a well-trained policy
    is wrong at that rate when sampled at temperature 1. At `careless_rate` the response has no work and a wrong
    answer, a habit that RL unlearns first.
    """
    rng = random.Random(f"{seed}/corpus/{workload}")
    respond = _thinking_response if workload is Workload.RL_THINK else _direct_response
    while True:
        if rng.random() < config.general_rate:
            yield _general_example(rng)
            continue
        terms = _draw_terms(rng, config, validation=False)
        careless = rng.random() < config.careless_rate
        response = f"\\boxed{{{terms[0]}}}" if careless else respond(terms, rng, config.noise_rate)
        yield Example(problem=_problem(terms), response=response)


def dapo_rows(config: SyntheticConfig, *, split: Split, seed: int) -> list[Row]:
    """Rows with the columns of DAPO-Math-17k; the training split has copies, conflicting answers and leaks."""
    rng = random.Random(f"{seed}/{split}")
    if split != "train":
        chains = [_draw_terms(rng, config, validation=False) for _ in range(config.num_draft_rows)]
        return [_dapo_row(_problem(terms), sum(terms), index) for index, terms in enumerate(chains)]
    chains = _unique_chains(rng, config, config.num_train_problems, validation=False)
    answers = [(_problem(terms), sum(terms)) for terms in chains] * config.num_copies
    answers += [(problem, answer + 1) for problem, answer in answers[: config.num_conflicting]]
    answers += [(row["problem"], int(row["answer"])) for row in aime_rows(config, seed=seed)[: config.num_leaked]]
    rng.shuffle(answers)
    return [_dapo_row(problem, answer, index) for index, (problem, answer) in enumerate(answers)]


def aime_rows(config: SyntheticConfig, *, seed: int) -> list[Row]:
    """Rows with the columns of HuggingFaceH4/aime_2024: unique problems with integer answers 0-999."""
    rng = random.Random(f"{seed}/validation")
    chains = _unique_chains(rng, config, config.num_validation_problems, validation=True)
    return [
        {
            "id": index,
            "problem": _problem(terms),
            "solution": _direct_response(terms, rng, 0.0),
            "answer": str(sum(terms)),
            "url": f"synthetic://aime_2024/{index}",
            "year": "2024",
        }
        for index, terms in enumerate(chains)
    ]


def ultrachat_rows(config: SyntheticConfig, *, seed: int) -> list[Row]:
    """General-domain rows with the columns of HuggingFaceH4/ultrachat_200k."""
    rng = random.Random(f"{seed}/ultrachat")
    rows: list[Row] = []
    for _ in range(config.num_draft_rows):
        example = _general_example(rng)
        turns = (("user", example.problem), ("assistant", example.response))
        messages = [{"role": role, "content": said} for role, said in turns]
        prompt_id = hashlib.sha256(example.problem.encode()).hexdigest()
        rows.append({"prompt": example.problem, "prompt_id": prompt_id, "messages": messages})
    return rows


def magpie_rows(config: SyntheticConfig, *, seed: int) -> list[Row]:
    """General-domain rows with the text columns of Magpie-Align/Magpie-Llama-3.1-Pro-300K-Filtered."""
    rng = random.Random(f"{seed}/magpie")
    rows: list[Row] = []
    for index in range(config.num_draft_rows):
        example = _general_example(rng)
        turns = (("human", example.problem), ("gpt", example.response))
        conversations = [{"from": role, "value": said} for role, said in turns]
        asked = {"instruction": example.problem, "response": example.response}
        rows.append({"uuid": f"{index:08d}", **asked, "conversations": conversations})
    return rows


def makers(config: SyntheticConfig, *, split: Split, seed: int) -> dict[str, Callable[[], list[Row]]]:
    """Return functions that make the stand-ins for `split`, by the data set that each stands for."""
    if split == "draft_general":
        return {
            "ultrachat_200k": lambda: ultrachat_rows(config, seed=seed),
            "magpie": lambda: magpie_rows(config, seed=seed),
        }
    if split == "validation":
        return {"aime_2024": lambda: aime_rows(config, seed=seed)}
    return {"dapo_math_17k": lambda: dapo_rows(config, split=split, seed=seed)}


def _draw_terms(rng: random.Random, config: SyntheticConfig, *, validation: bool) -> tuple[int, ...]:
    """Sample signed terms whose running sums lie in 0-999, reserved for validation or not."""
    counts = range(config.min_terms, config.max_terms + 1)
    num_terms = rng.choices(counts, [config.terms_decay**n for n in counts])[0]
    for _ in range(_MAX_TRIES):
        terms: list[int] = []
        total = 0
        for _ in range(num_terms):
            one_digit = rng.random() < config.one_digit_rate
            term = rng.randint(1, 9) if one_digit else rng.randint(10, config.max_term)
            subtract = rng.random() < config.subtraction_rate and 0 < term <= total
            terms.append(-term if subtract else term)
            total += terms[-1]
        if max(itertools.accumulate(terms)) <= MAX_ANSWER and _is_validation(terms) == validation:
            return tuple(terms)
    rule = f"must leave sums of so many terms at most {MAX_ANSWER}"
    fix = "lower it or max_term, or raise one_digit_rate"
    raise ConfigError(f"data.synthetic.max_terms {rule}, got {num_terms}; {fix}")


def _dapo_row(problem: str, answer: int, index: int) -> Row:
    return {
        "data_source": "math_dapo",
        "prompt": [{"role": "user", "content": problem}],
        "ability": "MATH",
        "reward_model": {"ground_truth": str(answer), "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": f"synthetic-{index}"},
    }


def _is_validation(terms: list[int]) -> bool:
    digest = hashlib.sha256(_problem(tuple(terms)).encode()).digest()
    return digest[0] % _VALIDATION_SHARE == 0


def _unique_chains(
    rng: random.Random, config: SyntheticConfig, num_chains: int, *, validation: bool
) -> list[tuple[int, ...]]:
    chains: dict[tuple[int, ...], None] = {}
    tries = 0
    while len(chains) < num_chains:
        chain = _draw_terms(rng, config, validation=validation)
        tries = tries + 1 if chain in chains else 0
        chains[chain] = None
        if tries == _MAX_TRIES:
            field = f"data.synthetic.num_{'validation' if validation else 'train'}_problems"
            rule = f"must be at most about {len(chains)}, as there are hardly more problems of these lengths"
            raise ConfigError(f"{field} {rule}, got {num_chains}; lower it, or raise max_terms or max_term")
    return list(chains)


def _problem(terms: tuple[int, ...]) -> str:
    return "".join(f"{term:+d}" for term in terms).removeprefix("+") + "=?"


def _noisy_sum(left: int, term: int, rng: random.Random, noise_rate: float) -> int:
    """Return `left + term`, at `noise_rate` off by 10 as if a carry were forgotten or invented."""
    exact = left + term
    if rng.random() >= noise_rate:
        return exact
    wrong = exact - 10 if left % 10 + term % 10 >= 10 else exact + 10
    return wrong if 0 <= wrong <= MAX_ANSWER else exact


def _direct_response(terms: tuple[int, ...], rng: random.Random, noise_rate: float) -> str:
    lines = []
    total = terms[0]
    for term in terms[1:]:
        result = _noisy_sum(total, term, rng, noise_rate)
        lines.append(f"{total}{term:+d}={result}\n")
        total = result
    return "".join(lines) + f"\\boxed{{{total}}}"


def _thinking_response(terms: tuple[int, ...], rng: random.Random, noise_rate: float) -> str:
    """Work and check each step; where they differ the check says `no`, and the step is redone once."""
    lines = []
    total = terms[0]
    for term in terms[1:]:
        step = f"{total}{term:+d}="
        result, check = (_noisy_sum(total, term, rng, noise_rate) for _ in range(2))
        lines.append(f"{step}{result}\n{step}{check} {'ok' if result == check else 'no'}\n")
        if result != check:
            result = _noisy_sum(total, term, rng, noise_rate)
            lines.append(f"{step}{result}\n")
        total = result
    return "<think>\n" + "".join(lines) + f"</think>\n\\boxed{{{total}}}"


def _general_example(rng: random.Random) -> Example:
    words = [rng.choice(_WORDS) for _ in range(rng.randint(2, 5))]
    text = " ".join(words)
    task = rng.choice(("copy", "reverse", "sort", "count", "join"))
    responses = {
        "copy": text,
        "reverse": " ".join(reversed(words)),
        "sort": " ".join(sorted(words)),
        "count": f"{len(words)} words: {', '.join(words)}.",
        "join": "".join(words),
    }
    return Example(problem=f"{task}: {text}", response=responses[task])
