"""Character-level tokenizer of the tiny policy, in the Hugging Face format that engine and learner load."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD, UNKNOWN, START, END = "<|pad|>", "<|unk|>", "<|im_start|>", "<|im_end|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
THINK = ("<think>", "</think>")
CHARACTERS = "\n 0123456789abcdefghijklmnopqrstuvwxyz+-*/=^?.,:;'\\{}()"

_TOKENS = (PAD, UNKNOWN, START, END, *ROLES, *THINK, *CHARACTERS)
VOCAB_SIZE = len(_TOKENS)
assert VOCAB_SIZE == 64  # size of the tiny policy's embedding, and the engine's padding unit

# Qwen's layout with one token a role and no line breaks: five tokens around a problem.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message.role not in ['system', 'user', 'assistant'] -%}"
    "{{- raise_exception('role must be system, user or assistant, got ' ~ message.role) -}}"
    "{%- endif -%}"
    "{{- '<|im_start|><|' ~ message.role ~ '|>' ~ message.content ~ '<|im_end|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|><|assistant|>' -}}{%- endif -%}"
)


def build_tokenizer(*, max_length: int) -> PreTrainedTokenizerFast:
    """Build a tokenizer of one token a character; every character outside `CHARACTERS` becomes `<|unk|>`.

    `<think>` and `</think>` are single tokens that decoding keeps, as Qwen3's are. `max_length` counts tokens.
    """
    from transformers import PreTrainedTokenizerFast  # takes a second, and most importers build no tokenizer

    vocabulary = {token: index for index, token in enumerate(_TOKENS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([PAD, UNKNOWN, START, END, *ROLES])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in THINK])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        unk_token=UNKNOWN,
        eos_token=END,
        extra_special_tokens=[START, *ROLES],
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def write_tokenizer(directory: Path, *, max_length: int) -> None:
    """Write the tokenizer into `directory` for `AutoTokenizer.from_pretrained`."""
    build_tokenizer(max_length=max_length).save_pretrained(str(directory))
