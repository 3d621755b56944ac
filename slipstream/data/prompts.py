"""Prompt sets from data sources: deduplicated, answerable, disjoint, and accounted for row by row.

The order of a set and each training batch are pure functions of the seed, so a resumed run needs only its step.
"""

from __future__ import annotations

import hashlib
import json
import logging
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from jinja2 import TemplateError

from slipstream.config import ConfigError, require
from slipstream.data.chat import chat, chat_text, opening_of, token_ids_of
from slipstream.data.config import SYNTHETIC, DataConfig, SourceConfig
from slipstream.data.reasoning_tasks import task_rows
from slipstream.data.schemas import (
    FOR_REWARDS,
    REASONING_GYM_ROWS,
    Item,
    NoProblemError,
    Row,
    Schema,
    check_asks,
    normalise,
    read_item,
    schema_of,
)
from slipstream.data.synthetic import Split, makers
from slipstream.records.files import write_atomic
from slipstream.records.stages import DataSetRecord
from slipstream.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

Gradable = Callable[[Sequence[str], str], Sequence[bool]]
"""Returns for each reference answer of a data source whether responses can be scored against it."""
Equal = Callable[[Sequence[tuple[str, str]], str], Sequence[bool]]
"""Returns for each pair of answers of a data source whether the scorer treats them as equal."""

# By set, in the order of reading: earlier sets, whose rows it drops. Training comes last, for it has most rows.
_RIVALS: dict[Split, tuple[Split, ...]] = {
    "validation": (),
    "draft_in_domain": ("validation",),
    "draft_general": ("validation",),
    "train": ("validation", "draft_in_domain", "draft_general"),
}
_SCORED: tuple[Split, ...] = ("validation", "train")
_MANIFEST = "manifest.json"
_MADE = f"{SYNTHETIC}:"  # start of the path of rows that stand for those of a data set
_SYNTHETIC_FIELD = {
    "train": "num_train_problems",
    "draft_in_domain": "num_draft_rows",
    "draft_general": "num_draft_rows",
}
REASONS = {
    "num_duplicates": "duplicates",
    "num_conflicting": "with conflicting answers",
    "num_unparseable": "without a usable answer",
    "num_too_long": "too long",
    "num_held_out": "in another set",
    "num_empty": "without a usable problem",
    "num_left_out": "beyond the source's weight",
}
"""Words for the counters of `DataSetRecord` that say why rows were dropped."""
_COUNTERS = tuple(name for name in DataSetRecord.__dataclass_fields__ if name.startswith("num_"))


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptSets:
    """The prompts of a run. Sets share no problem, except that the two draft sets may overlap."""

    train: tuple[Prompt, ...]
    draft_in_domain: tuple[Prompt, ...]
    draft_general: tuple[Prompt, ...]
    validation: tuple[Prompt, ...]
    records: tuple[DataSetRecord, ...]  # one for each source

    def __post_init__(self) -> None:
        for draft in ("draft_in_domain", "draft_general"):
            owner: dict[str, str] = {}
            for name in ("train", "validation", draft):
                for prompt in getattr(self, name):
                    other = owner.setdefault(prompt.id, name)
                    require(other == name, f"data.{name}", f"must share no problem with {other}", prompt.text)

    def sizes(self) -> dict[Split, int]:
        """Return the number of distinct prompts by set."""
        return {split: len(getattr(self, split)) for split in get_args(Split)}


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptStream:
    """Training batches: each epoch is a new permutation, cut into batches of distinct prompts.

    Prompts that do not fill the last batch of an epoch are left out of that epoch.
    """

    prompts: tuple[Prompt, ...]
    batch_size: int
    seed: int

    def __post_init__(self) -> None:
        num = len(self.prompts)
        rule = f"must lie in [1, {num}], the number of training prompts"
        require(0 < self.batch_size <= num, "grpo.prompts_per_step", rule, self.batch_size)

    def batch(self, step: int) -> tuple[Prompt, ...]:
        """Return the prompts of `step`, counted from 0: a pure function of the prompts, the seed and the step."""
        return tuple(self.prompts[index] for index in self._indices(step))

    def further(self, step: int, number: int) -> tuple[Prompt, ...]:
        """Return the further batch `number`, counted from 1, of a step that needs more prompts than `batch` gives.

        It has prompts that no other batch of the step has, and is a pure function as well: the prompts of a step do not
        depend on how many other steps needed.
        """
        own = set(self._indices(step))
        order = [index for index in range(len(self.prompts)) if index not in own]
        random.Random(f"{self.seed}/step/{step}").shuffle(order)
        start = (number - 1) * self.batch_size
        found = tuple(self.prompts[index] for index in order[start : start + self.batch_size])
        assert len(found) == self.batch_size, "`require_prompts` has counted them"
        return found

    def _indices(self, step: int) -> list[int]:
        epoch, position = divmod(step, len(self.prompts) // self.batch_size)
        order = list(range(len(self.prompts)))
        random.Random(f"{self.seed}/epoch/{epoch}").shuffle(order)
        start = position * self.batch_size
        return order[start : start + self.batch_size]


def load_prompt_sets(
    config: DataConfig, *, tokenizer: PreTrainedTokenizerBase, gradable: Gradable, equal: Equal
) -> PromptSets:
    """Read, filter, deduplicate and tokenize all sets; `gradable` and `equal` are those of a `Reward`."""
    opening = opening_of(config, tokenizer)
    prompts: dict[Split, tuple[Prompt, ...]] = {}
    problems: dict[Split, set[str]] = {}
    records: list[DataSetRecord] = []
    for split, rivals in _RIVALS.items():
        reader = _SetReader(
            config=config,
            split=split,
            tokenizer=tokenizer,
            gradable=gradable,
            equal=equal,
            held_out=set().union(*(problems[other] for other in rivals)),
            opening=opening,
        )
        kept, own = reader.read(list(_resolve(config, split)))
        records += own
        problems[split] = {prompt_id(each.item.problem) for each in kept}
        prompts[split] = _ordered([each.prompt for each in kept], split, config.seed)
    expected, num = config.num_validation_problems, len(prompts["validation"])
    found = [record for record in records if record.name == "validation"]
    rule, fix = f"must give {expected} unique problems", "set data.num_validation_problems to what the set holds"
    require(expected in (None, num), "data.validation", rule, num, f"found {found}; {fix}")
    return PromptSets(**prompts, records=tuple(records))


def write_prompt_sets(sets: PromptSets, directory: Path) -> None:
    """Write one JSON Lines file for each set, and the manifest."""
    for split in _RIVALS:
        lines = "".join(json.dumps(asdict(prompt)) + "\n" for prompt in getattr(sets, split))
        write_atomic(directory / f"{split}.jsonl", lines.encode())
    write_atomic(directory / _MANIFEST, json.dumps([asdict(record) for record in sets.records], indent=1).encode())


def read_prompt_sets(directory: Path) -> PromptSets:
    """Read what `write_prompt_sets` wrote."""
    manifest = json.loads((directory / _MANIFEST).read_text())
    prompts: dict[Split, tuple[Prompt, ...]] = {}
    for split in _RIVALS:
        with (directory / f"{split}.jsonl").open() as lines:
            rows = map(json.loads, lines)
            prompts[split] = tuple(Prompt(**{**row, "token_ids": tuple(row["token_ids"])}) for row in rows)
    return PromptSets(**prompts, records=tuple(DataSetRecord(**record) for record in manifest))


def prompt_id(text: str) -> str:
    """Return the content hash of the normalised prompt, which is equal across data sets."""
    return hashlib.sha256(normalise(text).encode()).hexdigest()[:16]


def require_size(sets: PromptSets, split: Split, field: str, value: int, *, rollouts_per_prompt: int = 1) -> None:
    """Refuse early a prompt set that is too small for the recipe's `field`, and say where its rows went."""
    left = sets.sizes()[split]
    rule = f"must be <= {left}, the number of distinct prompts in data.{split}"
    if rollouts_per_prompt > 1:
        rule = (
            f"must be <= {left * rollouts_per_prompt}: {rollouts_per_prompt} rollouts (grpo.group_size) for each of "
            f"the {left} distinct prompts in data.{split}"
        )
    fix = (
        f"{_account(sets, split)}: lower it, or read more rows "
        f"(synthetic: raise data.synthetic.{_SYNTHETIC_FIELD[split]}; else add a source or raise its max_rows)"
    )
    require(value <= left * rollouts_per_prompt, field, rule, value, fix)


def _account(sets: PromptSets, split: Split) -> str:
    """Describe how many rows were read, and why rows were dropped."""
    own = [record for record in sets.records if record.name == split]
    dropped = {reason: sum(getattr(record, name) for record in own) for name, reason in REASONS.items()}
    reasons = ", ".join(f"{count} {reason}" for reason, count in dropped.items() if count)
    return f"of {sum(record.num_read for record in own)} rows read {reasons or 'none'} were dropped"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Group:
    """Rows of one prompt over all sources of a set."""

    item: Item  # the first row
    rows: Counter[tuple[int, str]] = field(default_factory=Counter)  # by index of the source and raw answer

    def answer(self, answer: str) -> tuple[str, str]:
        """Return an answer with the data source that says what it means."""
        return self.item.data_source, answer


@dataclass(frozen=True, kw_only=True, slots=True)
class _Kept:
    """A prompt of a set, its row and the index of its source."""

    item: Item
    prompt: Prompt
    source: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _SetReader:
    """Reader of one set; `held_out` holds the ids of problems that other sets already have."""

    config: DataConfig
    split: Split
    tokenizer: PreTrainedTokenizerBase
    gradable: Gradable
    equal: Equal
    held_out: Collection[str]
    opening: str

    def read(self, sources: Sequence[SourceConfig]) -> tuple[list[_Kept], list[DataSetRecord]]:
        """Return the set's prompts, and one record for each source that accounts for all its rows."""
        groups: dict[str, _Group] = {}
        counts = [self._collect(source, index, groups) for index, source in enumerate(sources)]
        scorable = self._scorable(sources, groups)
        conflicting = self._conflicting(groups, scorable)
        kept: list[_Kept] = []
        refused: list[str] = []
        for id_, group in groups.items():
            usable = [(key, num) for key, num in group.rows.items() if group.answer(key[1]) in scorable]
            for (source, answer), num in group.rows.items():
                counts[source]["num_unparseable"] += num if group.answer(answer) not in scorable else 0
            if not usable:
                continue
            (first, answer), _ = usable[0]
            made = "num_conflicting" if id_ in conflicting else self._prompt(id_, group.item, answer, refused)
            for (source, _), num in usable:
                counts[source]["num_duplicates" if isinstance(made, Prompt) else made] += num
            if isinstance(made, Prompt):
                kept.append(_Kept(item=group.item, prompt=made, source=first))
                counts[first].update(num_kept=1, num_duplicates=-1)
        kept = self._weighed(kept, sources, counts)
        records = [
            DataSetRecord(name=self.split, source=source.path, **{name: count[name] for name in _COUNTERS})
            for source, count in zip(sources, counts, strict=True)
        ]
        if refused:
            logger.warning("data.%s: %d prompts are dropped, the first: %s", self.split, len(refused), refused[0])
        found = "; ".join((f"found {records}", *refused[:1]))
        require(bool(kept), f"data.{self.split}", "must leave at least one prompt", 0, found)
        return kept, records

    def _weighed(
        self, kept: list[_Kept], sources: Sequence[SourceConfig], counts: Sequence[Counter[str]]
    ) -> list[_Kept]:
        """Leave prompts out until each source has its share; the scarcest one stays whole."""
        weights = [source.weight for source in sources if source.weight is not None]
        if not weights or not kept:
            return kept
        found = Counter(each.source for each in kept)
        scale = min(found[index] / weight for index, weight in enumerate(weights))
        taken: set[str] = set()
        for index, weight in enumerate(weights):
            own = _ordered([each.prompt for each in kept if each.source == index], "train", self.config.seed)
            rule = "must leave at least one prompt of each source that has a weight"
            require(bool(own), f"data.{self.split}", rule, 0, f"{sources[index].path}: {dict(counts[index])}")
            num_taken = min(max(1, round(scale * weight)), len(own))
            taken.update(prompt.id for prompt in own[:num_taken])
            counts[index].update(num_kept=num_taken - len(own), num_left_out=len(own) - num_taken)
        return [each for each in kept if each.prompt.id in taken]

    def _rows(self, source: SourceConfig) -> tuple[Schema, Sequence[Row] | Any, Callable[[int], str]]:
        """Return the schema of a source, its rows, and a function that names the place of a row by its index."""
        name, seed = f"data.{self.split}", self.config.seed
        if (stands_for := source.path.removeprefix(_MADE)) != source.path:
            rows = makers(self.config.synthetic, split=self.split, seed=seed)[stands_for]()
            numbers = source.sampled(range(len(rows)), seed)
            schema = schema_of(source, rows[0].keys(), field=name)
            return (
                schema,
                [rows[number] for number in numbers],
                lambda index: f"row {numbers[index] + 1} of {stands_for}",
            )
        if source.task is not None:
            made = task_rows(source, field=name, seed=seed)
            return REASONING_GYM_ROWS, made, lambda index: f"row {index + 1} of {source.path}"
        from slipstream.data.sources import read_rows  # `datasets` takes seconds, and readers of prompts do not need it

        rows = read_rows(source, field=name, seed=seed)
        present = rows.table.column_names
        schema = schema_of(source, present, field=name)
        columns = [*schema.columns, *(column for column in FOR_REWARDS if column in present)]
        return schema, rows.table.select_columns(list(dict.fromkeys(columns))), rows.place

    def _collect(self, source: SourceConfig, index: int, groups: dict[str, _Group]) -> Counter[str]:
        """Group the rows of `source` by prompt, and count rows read and rows without a usable problem."""
        name = f"data.{self.split}"
        schema, rows, place = self._rows(source)
        if schema.answer is None and self.split in _SCORED:
            raise ConfigError(f"{name} must have answers, got {source.path!r} with the schema {schema.name}")
        counts = Counter(num_read=len(rows))
        first = ""
        for number, row in enumerate(rows):
            try:
                item = read_item(schema, row, data_source=source.data_source)
                id_ = prompt_id(item.text)
                if id_ not in groups:  # checked once: millions of rows can repeat some thousand prompts
                    check_asks(item, instruction=self.config.instruction)
                if item.answer is None and self.split in _SCORED:  # no reward, whichever it is, could score against it
                    counts["num_unparseable"] += 1
                else:
                    groups.setdefault(id_, _Group(item=item)).rows[index, item.answer or ""] += 1
            except NoProblemError as error:
                first = first or f"{place(number)}, got {row!s:.300}; {error}"
                counts["num_empty"] += 1
        if counts["num_empty"] == len(rows):
            raise ConfigError(f"{name} must follow the schema {schema.name} in {first}")
        if first:
            logger.warning("%s: %d rows have no usable problem, the first: %s", name, counts["num_empty"], first)
        return counts

    def _scorable(self, sources: Sequence[SourceConfig], groups: dict[str, _Group]) -> frozenset[tuple[str, str]]:
        """Return the answers, with their data sources, that responses can be scored against."""
        keys = {(index, group.answer(answer)) for group in groups.values() for index, answer in group.rows}
        if self.split not in _SCORED:
            return frozenset(each for _, each in keys)
        scorable: set[tuple[str, str]] = set()
        for data_source in {each[0] for _, each in keys}:
            answers = sorted({answer for _, (of, answer) in keys if of == data_source})
            scored = zip(answers, self.gradable(answers, data_source), strict=True)
            scorable |= {(data_source, answer) for answer, ok in scored if ok}
        for index, source in enumerate(sources):
            own = sorted(each for source_index, each in keys if source_index == index)
            fix = f"no response could be scored against any of them in {source.path}"
            shown = [answer for _, answer in own[:5]] or None
            require(not scorable.isdisjoint(own), f"data.{self.split}", "must have parseable answers", shown, fix)
        return frozenset(scorable)

    def _conflicting(self, groups: dict[str, _Group], scorable: Collection[tuple[str, str]]) -> set[str]:
        """Return ids of prompts with two scorable answers that the scorer treats as different."""
        pairs: dict[str, list[tuple[str, tuple[str, str]]]] = defaultdict(list)  # with their ids, by data source
        for id_, group in groups.items():
            spellings: dict[str, str] = {}
            for _, answer in group.rows:
                if group.answer(answer) in scorable:
                    spellings.setdefault(normalise(answer), answer)
            first, *others = spellings.values() or ("",)
            for other in others:
                pairs[group.item.data_source].append((id_, (first, other)))
        conflicting: set[str] = set()
        for data_source, own in pairs.items():
            verdicts = self.equal([pair for _, pair in own], data_source)
            conflicting |= {id_ for (id_, _), is_equal in zip(own, verdicts, strict=True) if not is_equal}
        return conflicting

    def _prompt(self, id_: str, item: Item, answer: str, refused: list[str]) -> Prompt | str:
        """Return the group's prompt, or the name of the counter that says why it has none."""
        if prompt_id(item.problem) in self.held_out:
            return "num_held_out"
        try:
            token_ids = self._tokens(item)
        except NoProblemError as error:
            refused.append(f"{error}, in {item.text!r:.300}")
            return "num_empty"
        if len(token_ids) > self.config.max_prompt_tokens:
            return "num_too_long"
        return Prompt(
            id=id_,
            text=item.text,
            token_ids=token_ids,
            answer=answer,
            data_source=item.data_source,
            extra={**item.extra, "prompt_end": self.opening} if self.split in _SCORED else item.extra,
        )

    def _tokens(self, item: Item) -> tuple[int, ...]:
        """Tokenize the prompt; a `NoProblemError` where the chat template rejects a turn or leaves one out."""
        turns = chat(item.problem, self.config, item.context)
        try:
            if item.context:
                text = chat_text(turns, self.config, self.tokenizer)
                # Templates without a system role reject it or leave it out. They may drop earlier replies' thoughts.
                lost = [role for role, said in item.context if role != "assistant" and said.strip() not in text]
                if lost:
                    raise NoProblemError(f"the policy's chat template leaves out the {lost[0]} turn")
            return token_ids_of(turns, self.config, self.tokenizer)
        except TemplateError as error:
            roles = ", ".join(turn["role"] for turn in turns)
            raise NoProblemError(f"the policy's chat template refuses the turns {roles} ({error})") from error


def _resolve(config: DataConfig, split: Split) -> Iterator[SourceConfig]:
    """Yield the sources of `split`; `synthetic` is one for each data set that its rows stand for."""
    sources: tuple[SourceConfig, ...] = getattr(config, split)
    for source in sources:
        names = makers(config.synthetic, split=split, seed=config.seed) if source.path == SYNTHETIC else ()
        weight = source.weight and source.weight / max(1, len(names))
        yield from [replace(source, path=f"{_MADE}{name}", weight=weight) for name in names] or [source]


def _ordered(prompts: Collection[Prompt], split: Split, seed: int) -> tuple[Prompt, ...]:
    """Order prompts by a hash of seed and id; validation sets keep their published order."""
    if split == "validation":
        return tuple(prompts)
    return tuple(sorted(prompts, key=lambda prompt: hashlib.sha256(f"{seed}/{prompt.id}".encode()).digest()))
