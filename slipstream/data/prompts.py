"""Turn data sets into prompts: deduplicated, with usable answers, disjoint, and counted row by row.

The order of a set and each training batch are pure functions of the seed, so a resumed run needs only its step.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.config import ConfigError, require
from slipstream.data.config import SYNTHETIC, DataConfig, SourceConfig
from slipstream.data.schemas import Item, normalise, read_item, recognise
from slipstream.data.synthetic import Split, write_split
from slipstream.records.files import write_atomic
from slipstream.records.stages import DataSetRecord
from slipstream.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Parseable = Callable[[Sequence[str]], Sequence[bool]]
"""Says of each answer whether responses can be scored against it: `Verifier.gradable`."""

# A set gives up the rows that an earlier one has: training has the most rows to spare.
_ORDER: tuple[Split, ...] = ("validation", "draft_in_domain", "draft_general", "train")
_SCORED: tuple[Split, ...] = ("validation", "train")
_MANIFEST = "manifest.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptSets:
    """The prompts of a run. No problem is in two sets, save that the two draft sets may share some."""

    train: tuple[Prompt, ...]
    draft_in_domain: tuple[Prompt, ...]
    draft_general: tuple[Prompt, ...]
    validation: tuple[Prompt, ...]
    records: tuple[DataSetRecord, ...]  # one a source

    def __post_init__(self) -> None:
        check_disjoint({"train": self.train, "validation": self.validation, "draft_in_domain": self.draft_in_domain})
        check_disjoint({"train": self.train, "validation": self.validation, "draft_general": self.draft_general})

    def sizes(self) -> dict[Split, int]:
        """Number of distinct prompts, by set."""
        return {
            "train": len(self.train),
            "draft_in_domain": len(self.draft_in_domain),
            "draft_general": len(self.draft_general),
            "validation": len(self.validation),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptStream:
    """Training batches: each epoch is a fresh permutation, cut into batches of distinct prompts.

    What does not fill a batch at the end of an epoch waits for the next one.
    """

    prompts: tuple[Prompt, ...]
    batch_size: int
    seed: int

    def __post_init__(self) -> None:
        require(
            0 < self.batch_size <= len(self.prompts),
            "grpo.prompts_per_step",
            f"must lie in [1, {len(self.prompts)}], the number of training prompts",
            self.batch_size,
        )

    def batch(self, step: int) -> tuple[Prompt, ...]:
        """The prompts of `step` (from 0): a pure function of the prompts, the seed and the step."""
        epoch, position = divmod(step, len(self.prompts) // self.batch_size)
        order = list(range(len(self.prompts)))
        random.Random(f"{self.seed}/epoch/{epoch}").shuffle(order)
        start = position * self.batch_size
        return tuple(self.prompts[index] for index in order[start : start + self.batch_size])


def load_prompt_sets(
    config: DataConfig, *, tokenizer: PreTrainedTokenizerBase, parseable: Parseable, directory: Path
) -> PromptSets:
    """Read, filter, deduplicate and tokenize all sets.

    Args:
        directory: where the synthetic stand-ins are written before they are read like any other file.
    Raises:
        ConfigError: a source is missing, has unknown columns, has no usable answers or leaves no prompt; or the
            validation set has not as many unique problems as `data.num_validation_problems` says.
    """
    require(tokenizer.chat_template is not None, "policy.model", "must have a chat template", tokenizer.name_or_path)
    prompts: dict[Split, tuple[Prompt, ...]] = {}
    records: list[DataSetRecord] = []
    for split in _ORDER:
        taken = {prompt.id for other in _rivals(split) for prompt in prompts[other]}
        reader = _SetReader(config=config, split=split, tokenizer=tokenizer, parseable=parseable, held_out=taken)
        kept: dict[str, Prompt] = {}
        for source in _resolve(config, split, directory):
            records.append(reader.read(source, kept))
        own = [record for record in records if record.name == split]
        require(bool(kept), f"data.{split}", "must leave at least one prompt", 0, f"found {own}")
        prompts[split] = _ordered(kept.values(), split, config.seed)
    _check_num_problems(prompts["validation"], records, config.num_validation_problems)
    return PromptSets(**prompts, records=tuple(records))


def write_prompt_sets(sets: PromptSets, directory: Path) -> None:
    """Write one JSON Lines file a set, and the manifest."""
    for split in _ORDER:
        write_prompts(directory / f"{split}.jsonl", getattr(sets, split))
    write_atomic(directory / _MANIFEST, json.dumps([asdict(record) for record in sets.records], indent=1).encode())


def read_prompt_sets(directory: Path) -> PromptSets:
    """Read what `write_prompt_sets` wrote."""
    manifest = json.loads((directory / _MANIFEST).read_text())
    prompts = {split: read_prompts(directory / f"{split}.jsonl") for split in _ORDER}
    return PromptSets(**prompts, records=tuple(DataSetRecord(**record) for record in manifest))


def write_prompts(path: Path, prompts: Sequence[Prompt]) -> None:
    """Write one JSON object a line."""
    write_atomic(path, "".join(json.dumps(asdict(prompt)) + "\n" for prompt in prompts).encode())


def read_prompts(path: Path) -> tuple[Prompt, ...]:
    """Read what `write_prompts` wrote."""
    with path.open() as lines:
        rows = [json.loads(line) for line in lines]
    return tuple(Prompt(**{**row, "token_ids": tuple(row["token_ids"])}) for row in rows)


def prompt_id(problem: str) -> str:
    """Content hash of the normalised problem: equal in every data set that has the problem."""
    return hashlib.sha256(normalise(problem).encode()).hexdigest()[:16]


def render(problem: str, *, tokenizer: PreTrainedTokenizerBase, instruction: str = "{problem}") -> tuple[int, ...]:
    """Tokens of the chat up to where the policy's response begins."""
    messages = [{"role": "user", "content": instruction.replace("{problem}", problem)}]
    encoded: Any = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=True)
    return tuple(encoded["input_ids"])


def check_disjoint(sets: dict[str, Sequence[Prompt]]) -> None:
    """Raise a ConfigError that names the two sets and the first problem they share."""
    owner: dict[str, str] = {}
    for name, prompts in sets.items():
        for prompt in prompts:
            other = owner.setdefault(prompt.id, name)
            require(other == name, f"data.{name}", f"must share no problem with {other}", prompt.text)


@dataclass(frozen=True, kw_only=True, slots=True)
class _SetReader:
    """Reads the sources of one set; `held_out` are ids that other sets already have."""

    config: DataConfig
    split: Split
    tokenizer: PreTrainedTokenizerBase
    parseable: Parseable
    held_out: Collection[str]

    def read(self, source: SourceConfig, kept: dict[str, Prompt]) -> DataSetRecord:
        """Add the new prompts of `source` to `kept` and account for each of its rows."""
        items = list(self._items(source))
        scorable = self._scorable(items)
        groups: dict[str, list[Item]] = {}
        for item in items:
            if item.answer in scorable:
                groups.setdefault(prompt_id(item.problem), []).append(item)
        dropped = {"num_duplicates": 0, "num_conflicting": 0, "num_too_long": 0, "num_held_out": 0}
        num_before = len(kept)
        for id_, group in groups.items():
            reason, num_dropped = self._judge(id_, group, kept)
            dropped[reason] += num_dropped
        num_scorable = sum(len(group) for group in groups.values())
        return DataSetRecord(
            name=self.split,
            source=source.path,
            num_read=len(items),
            num_kept=len(kept) - num_before,
            num_unparseable=len(items) - num_scorable,
            **dropped,
        )

    def _items(self, source: SourceConfig) -> Iterator[Item]:
        from slipstream.data.sources import read_rows  # `datasets` takes seconds; readers of prompts need none of it

        field = f"data.{self.split}"
        rows = read_rows(source, field=field, seed=self.config.seed)
        schema = recognise(rows.column_names, field=field, source=source.path)
        if schema.answer is None and self.split in _SCORED:
            raise ConfigError(f"{field} must have answers, got {source.path!r} with the schema {schema.name}")
        for index, row in enumerate(rows.select_columns(list(schema.columns))):
            assert isinstance(row, dict)
            yield read_item(schema, row, field=field, where=f"row {index} of {source.path}")

    def _scorable(self, items: Sequence[Item]) -> frozenset[str]:
        answers = sorted({item.answer for item in items})
        if self.split not in _SCORED:
            return frozenset(answers)
        scorable = frozenset(answer for answer, ok in zip(answers, self.parseable(answers), strict=True) if ok)
        fix = "no response could be scored against any of them"
        require(bool(scorable), f"data.{self.split}", "must have parseable answers", answers[:5], fix)
        return scorable

    def _judge(self, id_: str, group: Sequence[Item], kept: dict[str, Prompt]) -> tuple[str, int]:
        """Keep one row of a group of equal problems or none; say why, and how many, of the others are dropped."""
        if id_ in kept:
            return "num_duplicates", len(group)
        if len({normalise(item.answer) for item in group}) > 1:
            return "num_conflicting", len(group)
        if id_ in self.held_out:
            return "num_held_out", len(group)
        item = group[0]
        token_ids = render(item.problem, tokenizer=self.tokenizer, instruction=self.config.instruction)
        if len(token_ids) > self.config.max_prompt_tokens:
            return "num_too_long", len(group)
        kept[id_] = Prompt(id=id_, text=item.problem, token_ids=token_ids, answer=item.answer)
        return "num_duplicates", len(group) - 1


def _rivals(split: Split) -> tuple[Split, ...]:
    """The sets whose problems `split` must not have, all of them read before it."""
    if split == "train":
        return ("validation", "draft_in_domain", "draft_general")
    return () if split == "validation" else ("validation",)


def _resolve(config: DataConfig, split: Split, directory: Path) -> Iterator[SourceConfig]:
    """The sources of `split`, the synthetic ones written to files first."""
    sources: tuple[SourceConfig, ...] = getattr(config, split)
    for source in sources:
        if source.path != SYNTHETIC:
            yield source
            continue
        for path in write_split(config.synthetic, directory, split=split, seed=config.seed):
            yield SourceConfig(path=str(path), max_rows=source.max_rows)


def _ordered(prompts: Collection[Prompt], split: Split, seed: int) -> tuple[Prompt, ...]:
    """By seed, whatever the order of the rows was; validation sets keep theirs, for people know it."""
    if split == "validation":
        return tuple(prompts)
    return tuple(sorted(prompts, key=lambda prompt: hashlib.sha256(f"{seed}/{prompt.id}".encode()).digest()))


def _check_num_problems(prompts: Sequence[Prompt], records: Sequence[DataSetRecord], expected: int | None) -> None:
    found = [record for record in records if record.name == "validation"]
    require(
        expected is None or len(prompts) == expected,
        "data.validation",
        f"must give {expected} unique problems",
        len(prompts),
        f"found {found}; set data.num_validation_problems to what the set holds",
    )
