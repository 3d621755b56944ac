"""The tiny policy's tokenizer: one token a character, nothing dropped, loadable as any other."""

import itertools
from pathlib import Path

import pytest
from jinja2.exceptions import TemplateError
from transformers import AutoTokenizer

from slipstream.data.synthetic import SyntheticConfig, pretraining_corpus
from slipstream.data.tokenizer import CHARACTERS, build_tokenizer, write_tokenizer
from slipstream.types import Workload

TOKENIZER = build_tokenizer(max_length=256)


def test_every_character_of_the_corpus_round_trips() -> None:
    for workload in Workload:
        for example in itertools.islice(pretraining_corpus(SyntheticConfig(), workload=workload, seed=0), 300):
            for text in (example.problem, example.response):
                ids = TOKENIZER(text)["input_ids"]
                assert TOKENIZER.unk_token_id not in ids
                assert TOKENIZER.decode(ids) == text


def test_each_character_is_one_token_and_so_are_thought_marks_and_what_is_unknown() -> None:
    assert len(TOKENIZER) == 64
    assert len(set(TOKENIZER(CHARACTERS)["input_ids"])) == len(CHARACTERS) == 55
    ids = TOKENIZER("1X\N{SNOWMAN}2")["input_ids"]
    one, two = TOKENIZER("12")["input_ids"]
    assert ids == [one, TOKENIZER.unk_token_id, TOKENIZER.unk_token_id, two]
    ids = TOKENIZER("<think>1</think>2<|im_end|>")["input_ids"]
    assert len(ids) == 5
    assert TOKENIZER.decode(ids, skip_special_tokens=True) == "<think>1</think>2"


def test_the_chat_template_puts_five_tokens_around_a_problem_and_refuses_an_unknown_role() -> None:
    messages = [{"role": "user", "content": "1+2=?"}]
    text = TOKENIZER.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == "<|im_start|><|user|>1+2=?<|im_end|><|im_start|><|assistant|>"
    assert isinstance(text, str)
    assert len(TOKENIZER(text)["input_ids"]) == len("1+2=?") + 5
    with pytest.raises(TemplateError, match="role must be system, user or assistant, got tool"):
        TOKENIZER.apply_chat_template([{"role": "tool", "content": "1"}], tokenize=False)


def test_what_is_written_loads_as_an_auto_tokenizer(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, max_length=256)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert (loaded.eos_token, loaded.pad_token, loaded.model_max_length) == ("<|im_end|>", "<|pad|>", 256)
    text = "<think>\n1+2=3\n</think>\n\\boxed{3}"
    assert loaded(text)["input_ids"] == TOKENIZER(text)["input_ids"]
    assert loaded.decode(loaded(text)["input_ids"]) == text
    assert loaded.chat_template == TOKENIZER.chat_template
