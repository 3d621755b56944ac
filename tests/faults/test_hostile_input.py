"""Files and answers from outside: counted or refused, never run, never unpickled."""

from __future__ import annotations

import ast
import json
import pickle
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import slipstream
from slipstream.data.config import DataConfig, SourceConfig
from slipstream.data.prompts import load_prompt_sets
from slipstream.data.synthetic import SyntheticConfig
from slipstream.data.tokenizer import write_tokenizer
from slipstream.rewards.config import RewardConfig
from slipstream.rewards.verifier import Verifier
from tests.small import write_config

SOURCE = Path(slipstream.__file__).parent
ARABIC_34 = "\N{ARABIC-INDIC DIGIT THREE}\N{ARABIC-INDIC DIGIT FOUR}"
FULLWIDTH_12 = "\N{FULLWIDTH DIGIT ONE}\N{FULLWIDTH DIGIT TWO}"


class Bomb:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_answers_that_are_no_numbers_code_or_a_million_characters_are_dropped_and_counted(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    write_tokenizer(tmp_path / "tokenizer", max_length=128)
    code = (f"open({str(tmp_path / 'run')!r}, 'w')", "__import__('os').abort()")
    hostile = ["nan", "NaN", "-inf", "9" * 10**6, *code, ""]
    good = ["34", ARABIC_34, FULLWIDTH_12, "1e3"]
    rows = [{"problem": f"{index}+0=?", "answer": answer} for index, answer in enumerate(hostile + good)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sums = SyntheticConfig(num_draft_rows=20, num_train_problems=20, num_validation_problems=5)
    sources = (SourceConfig(path=str(tmp_path / "rows.jsonl")),)
    config = DataConfig(train=sources, max_prompt_tokens=64, num_validation_problems=None, synthetic=sums)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")

    with closing(Verifier(RewardConfig())) as verifier:
        how = {"gradable": verifier.gradable, "equal": verifier.equal}
        sets = load_prompt_sets(config, tokenizer=tokenizer, **how)

    (train,) = [record for record in sets.records if record.name == "train"]
    assert (train.num_read, train.num_kept, train.num_unparseable) == (11, 4, 7)
    assert sorted(prompt.answer for prompt in sets.train) == sorted(good)
    assert not (tmp_path / "run").exists()


def test_digits_of_other_scripts_mean_what_they_say() -> None:
    with closing(Verifier(RewardConfig())) as verifier:
        answers = ["\\boxed{34}", "\\boxed{12}", "\\boxed{43}"]
        assert verifier.score(answers, [ARABIC_34, FULLWIDTH_12, ARABIC_34]).rewards == (1.0, 1.0, 0.0)


def test_an_answer_is_never_run_as_code(tmp_path: Path) -> None:
    target = tmp_path / "run"
    texts = [f"\\boxed{{__import__('pathlib').Path('{target}').touch()}}", f"\\boxed{{\\write18{{touch {target}}}}}"]
    with closing(Verifier(RewardConfig())) as verifier:
        assert verifier.score(texts, ["0", "0"]).rewards == (0.0, 0.0)
    assert not target.exists()


def test_a_pickled_policy_is_not_read(tmp_path: Path) -> None:
    """A model directory whose weights are a pickle that would run code."""
    from slipstream.learner.config import LearnerConfig
    from slipstream.learner.megatron import MegatronPolicy

    write_config(tmp_path / "model", num_layers=2, num_positions=64)
    (tmp_path / "model" / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(tmp_path / "run")))
    with pytest.raises(FileNotFoundError, match="must hold a safetensors file"):
        MegatronPolicy.load(tmp_path / "model", learner=LearnerConfig(), optimizer=None)
    assert not (tmp_path / "run").exists()


def test_a_pickled_draft_is_not_read(tmp_path: Path) -> None:
    from slipstream.refit.fingerprint import directory_fingerprint

    (tmp_path / "model.safetensors").write_bytes(pickle.dumps(Bomb(tmp_path / "run")))
    with pytest.raises(Exception, match=r"(?i)header"):
        directory_fingerprint(tmp_path)
    assert not (tmp_path / "run").exists()


def test_nothing_in_the_library_unpickles_or_evaluates() -> None:
    """By its syntax tree: no pickle, no `torch.load`, no `eval` or `exec` of what came from outside."""
    modules = {"pickle", "cloudpickle", "dill", "marshal"}
    calls = {"eval", "exec", "torch.load", "pickle.load", "pickle.loads", "yaml.load"}
    found = []
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [*(alias.name for alias in node.names), getattr(node, "module", "") or ""]
                is_bad = bool(modules & {part for name in names for part in name.split(".")})
            else:
                is_bad = isinstance(node, ast.Call) and ast.unparse(node.func) in calls and not _is_safe(node)
            if is_bad:
                found.append(f"{path.name}: {ast.unparse(node)}")
    assert found == []


def _is_safe(call: ast.Call) -> bool:
    """Whether it names yaml's safe loader. `tests/unit/test_config.py` shows that ours builds no objects."""
    return [ast.unparse(keyword.value) for keyword in call.keywords if keyword.arg == "Loader"] == ["_SafeLoader"]
