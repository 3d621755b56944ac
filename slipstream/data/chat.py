"""Chats as the policy reads them: the turns before a problem, and the policy's chat template over them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, TemplateError, meta

from slipstream.config import ConfigError, require
from slipstream.data.config import DataConfig
from slipstream.data.schemas import Turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Chat = list[dict[str, str]]
"""Turns with `role` and `content`, as chat templates take them."""
# What transformers itself hands a chat template.
_GIVEN = {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"}
_GIVEN |= {"raise_exception", "strftime_now"}


def chat(problem: str, config: DataConfig, context: Sequence[Turn] = ()) -> Chat:
    """Return the turns of a chat: the system's, the worked examples, the row's own, and the problem."""
    system = [turn for turn in context[:1] if turn[0] == "system"]
    examples = [
        turn
        for each in config.examples
        for turn in (("user", config.instruction.replace("{problem}", each.problem)), ("assistant", each.response))
    ]
    turns = [
        *(system or ([("system", config.system)] if config.system else [])),
        *examples,
        *context[len(system) :],
        ("user", config.instruction.replace("{problem}", problem)),
    ]
    return [{"role": role, "content": said} for role, said in turns]


def render(problem: str, *, config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Tokenize the chat up to the policy's response."""
    return token_ids_of(chat(problem, config), config, tokenizer)


def token_ids_of(messages: Chat, config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Tokenize a chat up to the policy's response."""
    encoded: Any = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=True, **config.chat_template_args
    )
    return tuple(encoded["input_ids"])


def chat_text(messages: Chat, config: DataConfig, tokenizer: PreTrainedTokenizerBase, *, opened: bool = True) -> str:
    """Render a chat as text; `opened` adds what opens the policy's turn."""
    arguments = config.chat_template_args
    return str(tokenizer.apply_chat_template(messages, add_generation_prompt=opened, tokenize=False, **arguments))


def opening_of(config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> str:
    """Check that the chat template shows what it is handed; return the text with which it opens the policy's turn."""
    require(tokenizer.chat_template is not None, "policy.model", "must have a chat template", tokenizer.name_or_path)
    known = _template_arguments(tokenizer)
    for name in config.chat_template_args:
        rule = f"must be arguments of the policy's chat template, which takes {', '.join(known) or 'none'}"
        require(name in known, "data.chat_template_args", rule, name)
    messages = chat("1+1=?", config)
    try:
        text, closed = (chat_text(messages, config, tokenizer, opened=opened) for opened in (True, False))
    except TemplateError as error:
        if len(messages) == 1:
            raise ConfigError(f"policy.model must have a chat template that takes a user turn, got {error}") from error
        field = "data.system" if config.system else "data.examples"
        raise ConfigError(f"{field} must be taken by the policy's chat template, got {error}; leave it out") from error
    said = (turn for turn in messages if turn["role"] != "assistant")  # whose thoughts a template may drop
    lost = next((turn["role"] for turn in said if turn["content"].strip() not in text), None)
    field = "data.system" if lost == "system" else "data.examples"
    require(lost is None, field, "must be shown by the policy's chat template", lost, "it leaves that turn out")
    return text.removeprefix(closed) if text.startswith(closed) else ""


def _template_arguments(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the names that the chat template looks up and that a recipe may set."""
    # The tags with which transformers marks the assistant's tokens are none of jinja2's.
    template = re.sub(r"\{%-?\s*(?:end)?generation\s*-?%\}", "", tokenizer.get_chat_template())
    environment = Environment(extensions=["jinja2.ext.loopcontrols"])
    found = meta.find_undeclared_variables(environment.parse(template)) - environment.globals.keys()
    return sorted(name for name in found - _GIVEN if not name.endswith("_token"))


def end_token_ids(model: Path) -> tuple[int, ...]:
    """Read the ids of the tokens that end a response, those of config.json first: an export has nothing else."""
    files = [model / name for name in ("config.json", "generation_config.json")]
    given = [json.loads(file.read_text()).get("eos_token_id") for file in files if file.is_file()]
    found = [token for ids in given if ids is not None for token in (ids if isinstance(ids, list) else [ids])]
    require(bool(found), "policy.model", "must name an eos_token_id in its config.json", None, f"see {model}")
    return tuple(dict.fromkeys(found))
