"""Every example, those of the documents included, is a recipe that loads, and its commands print what they promise."""

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

from slipstream.data.tokenizer import VOCAB_SIZE, build_tokenizer
from slipstream.recipe import load_recipe
from tests.unit.conftest import Command
from tests.unit.learner import families

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
_FILE = re.compile(r"^```\w+ title=\"([\w.]+\.\w+)\"\n(.*?)^```$", re.MULTILINE | re.DOTALL)


FEW = ["--set", "data.synthetic.num_draft_rows=50"]  # in sets that are not looked at


@pytest.fixture
def page(tmp_path: Path) -> Path:
    """The files of docs/bring_your_own.md, written beside one another."""
    files = _FILE.findall((ROOT / "docs" / "bring_your_own.md").read_text())
    for name, text in files:
        (tmp_path / name).write_text(text)
    assert len(files) == 7
    return tmp_path


def test_the_data_of_the_page_are_shown_as_the_policy_reads_them(page: Path, command: Command) -> None:
    printed = command("data", page / "own_data.yaml", *FEW)
    assert printed.count("answer '") == 3  # the easy rows
    assert (
        "50 tokens, answer '17'\n<|im_start|><|user|>add up: 1+2=?<|im_end|><|im_start|><|assistant|>\\boxed{3}"
        "<|im_end|><|im_start|><|user|>add up: 8+1+2+6=?<|im_end|><|im_start|><|assistant|>\n"
    ) in printed
    lines = [line.split() for line in printed.splitlines()]
    assert ["train", "3", "48", "48", "50", "50", "50"] in lines
    assert ["train", str(page / "problems.csv"), "3", "3", "none"] in lines


@pytest.mark.usefixtures("stand_in")
def test_the_task_of_the_page_is_made_by_reasoning_gym(page: Path, command: Command) -> None:
    said = ", data source reasoning_gym:chain_sum\n<|im_start|><|user|>"
    assert said in command("data", page / "own_task.yaml", *FEW)


def test_the_model_of_the_page_is_checked_and_shows_its_prompts(page: Path, command: Command) -> None:
    families.write_model(page / "my_model", "llama3", vocab_size=VOCAB_SIZE, max_position_embeddings=512)
    build_tokenizer(max_length=512).save_pretrained(page / "my_model")
    recipe = page / "own_model.yaml"
    assert "own_model, rl_think: fine" in command("check", recipe)
    assert load_recipe(str(recipe)).policy.scratch is None
    assert command("data", recipe, *FEW).count("answer '") == 3
    said = command("check", recipe, "--set", "policy.lora.targets=[q_proj, w_proj]", status=2)
    assert "policy.lora.targets[1] must be one of q_proj, k_proj" in said


def test_the_rewards_of_the_page_are_summed(page: Path, command: Command) -> None:
    printed = command("score", page / "own_reward.yaml", "--responses", page / "responses.jsonl")
    assert [line.split()[1] for line in printed.splitlines()[2:5]] == ["1.076", "0.09", "0"]
    assert "reward/compute_score_boxed 0.666667\n" in printed
    assert "reward/brevity_score 0.553333\n" in printed


def test_the_rows_of_the_example_are_all_kept(command: Command) -> None:
    rows = [line.split() for line in command("data", EXAMPLES / "own_data" / "recipe.yaml").splitlines()]
    assert next(row[2:4] for row in rows if row[1:2] == [str(EXAMPLES / "own_data" / "problems.csv")]) == ["48", "48"]


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*/recipe.yaml")), ids=lambda path: path.parent.name)
def test_an_example_is_a_recipe_of_its_own_name(path: Path) -> None:
    assert load_recipe(str(path)).name == path.parent.name


def test_the_reward_of_the_example_prefers_a_short_right_answer(tmp_path: Path, command: Command) -> None:
    boxed = "\\boxed{42}"
    rows = [(f"{boxed}", "42"), (f"{'by adding the terms, ' * 3}{boxed}", "42"), (boxed, "41"), ("42", "42")]
    responses = tmp_path / "responses.jsonl"
    responses.write_text("".join(json.dumps({"response": text, "reference": gold}) + "\n" for text, gold in rows))
    asked = ("score", EXAMPLES / "own_reward" / "recipe.yaml", "--responses", responses)
    scored = [json.loads(line)["score"] for line in command(*asked, "--json").splitlines()]
    assert scored == [1.0, 0.9, 0.0, 0.0]
    table = command(*asked)
    assert "mean 0.475 of 4 responses, 0 without a reward" in table
    assert "reward/right 0.5" in table


def test_a_response_may_hold_any_separator_of_lines_and_keeps_the_number_of_its_own(
    tmp_path: Path, command: Command
) -> None:
    row = {"response": "so\u2028\x85\\boxed{42}", "reference": "42"}
    (tmp_path / "responses.jsonl").write_text("\n" + json.dumps(row, ensure_ascii=False) + "\r\n")
    printed = command("score", "tiny", "--responses", tmp_path / "responses.jsonl")
    assert re.search(r"^2 +1 +42 +so \\boxed\{42\}$", printed, re.MULTILINE)


def test_a_reward_function_that_fails_is_named_by_the_command_that_tries_it(tmp_path: Path, command: Command) -> None:
    (tmp_path / "reward.py").write_text("def fails(data_source, solution_str, ground_truth, extra_info): 1 / 0")
    (tmp_path / "responses.jsonl").write_text('{"response": "4", "reference": "4"}')
    own = f"reward.function={tmp_path / 'reward.py'}:fails"
    said = command("score", "tiny", "--set", own, "--responses", tmp_path / "responses.jsonl", status=2)
    assert said.startswith("error: reward.function must fail for at most 10% of the responses ")
    assert "got 1 of 1; the first of this call, for prompt line 1: ZeroDivisionError: " in said


@pytest.fixture(scope="module")
def code_reward() -> ModuleType:
    """The reward for programs, which waits for them less long here."""
    spec = importlib.util.spec_from_file_location("code_reward", EXAMPLES / "code_reward" / "reward.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (RuntimeError, FileNotFoundError) as error:
        pytest.skip(f"programs are not run without a sandbox: {error}")
    vars(module)["WALL_SECONDS"] = 2
    return module


_ADD = "\ndef add(a, b): return a + b"


@pytest.mark.parametrize(
    ("code", "score"),
    [
        pytest.param(_ADD, 1.0, id="right"),
        pytest.param("def add(a, b): return 3", 0.5, id="right in one case of two"),
        pytest.param("def add(a, b): return 1 / b if b > 1 else 0", 0.5, id="raises in one case"),
        pytest.param("while True: pass", 0.0, id="never ends"),
        pytest.param("import time\ntime.sleep(60)" + _ADD, 0.0, id="sleeps"),
        pytest.param("x = ' ' * 10**10" + _ADD, 0.0, id="eats memory"),
        pytest.param("import os\nos.fork()" + _ADD, 0.0, id="forks"),
        pytest.param("import _posixsubprocess" + _ADD, 0.0, id="forks by a back door"),
        pytest.param("import subprocess\nsubprocess.run(['true'])" + _ADD, 0.0, id="starts a process"),
        pytest.param("import ctypes" + _ADD, 0.0, id="calls C"),
        pytest.param("import socket\nsocket.socket()" + _ADD, 0.0, id="opens a socket"),
        pytest.param("import os\nos.remove(__file__)" + _ADD, 0.0, id="removes a file"),
        pytest.param("open('/tmp/written', 'w')" + _ADD, 0.0, id="writes a file"),
        pytest.param("import os\nos.write(1, b'3\\n0\\n')\nos._exit(0)", 0.0, id="claims its values"),
        pytest.param(
            "class Equal(int):\n  __eq__ = lambda *_: True\ndef add(a, b): return Equal(5)", 0.0, id="is equal to all"
        ),
    ],
)
def test_a_program_is_scored_by_its_values_and_harms_nobody(code_reward: ModuleType, code: str, score: float) -> None:
    task = json.dumps({"function": "add", "cases": [[[1, 2], 3], [[-1, 1], 0]]})
    assert code_reward.compute_score("", f"Thus:\n```python\n{code}\n```", task) == {"score": score, "has_code": 1.0}
    assert not Path("/tmp/written").exists()
    assert code_reward.compute_score("", "no program", task) == {"score": 0.0, "has_code": 0.0}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "--responses must hold at least one response, got "),
        ("{", "--responses must hold JSON lines, got line 1 of "),
        ("\n[", "--responses must hold JSON lines, got line 2 of "),
        ('{"response": "4"}', "--responses must have the text `response` and a `reference` in line 1, got "),
        ('{"response": "4", "reference": null}', "--responses must have the text `response` and a `reference` in li"),
    ],
)
def test_responses_that_cannot_be_scored_are_refused(tmp_path: Path, command: Command, text: str, message: str) -> None:
    (tmp_path / "responses.jsonl").write_text(text)
    said = command("score", "tiny", "--responses", tmp_path / "responses.jsonl", status=2)
    assert said.startswith(f"error: {message}")
