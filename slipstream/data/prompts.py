"""Turn data sets into prompts: deduplicated, with usable answers, disjoint, and counted row by row.

The order of a set and each training batch are pure functions of the seed, so a resumed run needs only its step.
"""

from __future__ import annotations

import hashlib
import json
import logging
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from slipstream.config import ConfigError, require
from slipstream.data.config import SYNTHETIC, DataConfig, SourceConfig
from slipstream.data.schemas import Item, NoProblemError, Turn, check_asks, normalise, read_item, recognise
from slipstream.data.synthetic import Split, write_split
from slipstream.records.files import write_atomic
from slipstream.records.stages import DataSetRecord
from slipstream.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

Gradable = Callable[[Sequence[str]], Sequence[bool]]
"""For each reference answer: responses can be scored against it."""
Equal = Callable[[Sequence[tuple[str, str]]], Sequence[bool]]
"""For each pair of answers: they are the same to the scorer."""


# A set gives up the rows that an earlier one has: training has the most rows to spare.
_ORDER: tuple[Split, ...] = ("validation", "draft_in_domain", "draft_general", "train")
_SCORED: tuple[Split, ...] = ("validation", "train")
_MANIFEST = "manifest.json"
_SYNTHETIC_FIELD = {
    "train": "num_train_problems",
    "draft_in_domain": "num_draft_rows",
    "draft_general": "num_draft_rows",
}
_REASONS = {
    "num_duplicates": "duplicates",
    "num_conflicting": "with conflicting answers",
    "num_unparseable": "without a usable answer",
    "num_too_long": "too long",
    "num_held_out": "in another set",
    "num_empty": "without a usable problem",
}
_COUNTERS = tuple(name for name in DataSetRecord.__dataclass_fields__ if name.startswith("num_"))


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
    config: DataConfig, *, tokenizer: PreTrainedTokenizerBase, gradable: Gradable, equal: Equal, directory: Path
) -> PromptSets:
    """Read, filter, deduplicate and tokenize all sets.

    Args:
        gradable, equal: the scorer's reading of reference answers, as of `Verifier`.
        directory: where the synthetic stand-ins are written before they are read like any other file.
    Raises:
        ConfigError: a source is missing, has unknown columns, has no usable answers or leaves no prompt; or the
            validation set has not as many unique problems as `data.num_validation_problems` says.
    """
    require(tokenizer.chat_template is not None, "policy.model", "must have a chat template", tokenizer.name_or_path)
    prompts: dict[Split, tuple[Prompt, ...]] = {}
    problems: dict[Split, set[str]] = {}
    records: list[DataSetRecord] = []
    for split in _ORDER:
        taken = set().union(*(problems[other] for other in _rivals(split)))
        reader = _SetReader(
            config=config, split=split, tokenizer=tokenizer, gradable=gradable, equal=equal, held_out=taken
        )
        kept, own = reader.read(list(_resolve(config, split, directory)))
        records += own
        problems[split] = {prompt_id(item.problem) for item, _ in kept}
        prompts[split] = _ordered([prompt for _, prompt in kept], split, config.seed)
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


def prompt_id(text: str) -> str:
    """Content hash of the normalised prompt: equal in every data set that has the prompt."""
    return hashlib.sha256(normalise(text).encode()).hexdigest()[:16]


def render(
    problem: str,
    *,
    tokenizer: PreTrainedTokenizerBase,
    instruction: str = "{problem}",
    context: Sequence[Turn] = (),
) -> tuple[int, ...]:
    """Tokens of the chat up to where the policy's response begins; `context` are the turns before the problem."""
    messages = _messages(problem, instruction, context)
    encoded: Any = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=True)
    return tuple(encoded["input_ids"])


def check_disjoint(sets: dict[str, Sequence[Prompt]]) -> None:
    """Raise a ConfigError that names the two sets and the first problem they share."""
    owner: dict[str, str] = {}
    for name, prompts in sets.items():
        for prompt in prompts:
            other = owner.setdefault(prompt.id, name)
            require(other == name, f"data.{name}", f"must share no problem with {other}", prompt.text)


def require_size(sets: PromptSets, split: Split, field: str, value: int, *, rollouts_per_prompt: int = 1) -> None:
    """Refuse a prompt set that is too small for `value`, of `field`: known long before its prompts are used.

    Raises:
        ConfigError: it names the field, what is left, and where the other rows went.
    """
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
    """How many rows were read, and why the others are no prompts."""
    own = [record for record in sets.records if record.name == split]
    dropped = {reason: sum(getattr(record, name) for record in own) for name, reason in _REASONS.items()}
    reasons = ", ".join(f"{count} {reason}" for reason, count in dropped.items() if count)
    return f"of {sum(record.num_read for record in own)} rows read {reasons or 'none'} were dropped"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Group:
    """The rows of one prompt, of all sources of a set."""

    item: Item  # the first
    rows: Counter[tuple[int, str]] = field(default_factory=Counter)  # by index of the source and answer, as they came


@dataclass(frozen=True, kw_only=True, slots=True)
class _SetReader:
    """Reads the sources of one set; `held_out` are ids of problems that other sets already have."""

    config: DataConfig
    split: Split
    tokenizer: PreTrainedTokenizerBase
    gradable: Gradable
    equal: Equal
    held_out: Collection[str]

    def read(self, sources: Sequence[SourceConfig]) -> tuple[list[tuple[Item, Prompt]], list[DataSetRecord]]:
        """The prompts of a set, and one record a source that accounts for each of its rows."""
        groups: dict[str, _Group] = {}
        counts = [self._collect(source, index, groups) for index, source in enumerate(sources)]
        scorable = self._scorable(sources, groups)
        conflicting = self._conflicting(groups, scorable)
        kept: list[tuple[Item, Prompt]] = []
        refused: list[str] = []
        for id_, group in groups.items():
            usable = [(key, num) for key, num in group.rows.items() if key[1] in scorable]
            for (source, answer), num in group.rows.items():
                counts[source]["num_unparseable"] += num if answer not in scorable else 0
            if not usable:
                continue
            (first, answer), _ = usable[0]
            made = "num_conflicting" if id_ in conflicting else self._prompt(id_, group.item, answer, refused)
            for (source, _), num in usable:
                counts[source]["num_duplicates" if isinstance(made, Prompt) else made] += num
            if isinstance(made, Prompt):
                kept.append((group.item, made))
                counts[first].update(num_kept=1, num_duplicates=-1)
        records = [
            DataSetRecord(name=self.split, source=source.path, **{name: count[name] for name in _COUNTERS})
            for source, count in zip(sources, counts, strict=True)
        ]
        if refused:
            logger.warning("data.%s: %d prompts are left out, the first: %s", self.split, len(refused), refused[0])
        found = "; ".join((f"found {records}", *refused[:1]))
        require(bool(kept), f"data.{self.split}", "must leave at least one prompt", 0, found)
        return kept, records

    def _collect(self, source: SourceConfig, index: int, groups: dict[str, _Group]) -> Counter[str]:
        """Put the rows of `source` that have a problem into `groups`, and count all rows and those that have none."""
        from slipstream.data.sources import read_rows  # `datasets` takes seconds; readers of prompts need none of it

        name = f"data.{self.split}"
        rows = read_rows(source, field=name, seed=self.config.seed)
        schema = recognise(rows.column_names, field=name, source=source.path)
        if schema.answer is None and self.split in _SCORED:
            raise ConfigError(f"{name} must have answers, got {source.path!r} with the schema {schema.name}")
        counts = Counter(num_read=len(rows))
        first = ""
        columns = [*schema.columns, *(name for name in schema.for_rewards if name in rows.column_names)]
        for number, row in enumerate(rows.select_columns(columns)):
            try:
                item = read_item(schema, row)
                id_ = prompt_id(item.text)
                if id_ not in groups:  # millions of rows repeat some thousand prompts
                    check_asks(item, instruction=self.config.instruction)
                    groups[id_] = _Group(item=item)
                groups[id_].rows[index, item.answer] += 1
            except NoProblemError as error:
                first = first or f"row {number} of {source.path}, got {row!s:.300}; {error}"
                counts["num_empty"] += 1
        if counts["num_empty"] == len(rows):
            raise ConfigError(f"{name} must follow the schema {schema.name} in {first}")
        if first:
            logger.warning("%s: %d rows have no usable problem, the first: %s", name, counts["num_empty"], first)
        return counts

    def _scorable(self, sources: Sequence[SourceConfig], groups: dict[str, _Group]) -> frozenset[str]:
        """Answers that responses can be scored against; all of a set that is not scored."""
        keys = {key for group in groups.values() for key in group.rows}
        answers = sorted({answer for _, answer in keys})
        if self.split not in _SCORED:
            return frozenset(answers)
        scorable = frozenset(a for a, ok in zip(answers, self.gradable(answers), strict=True) if ok)
        for index, source in enumerate(sources):
            own = sorted(answer for source_index, answer in keys if source_index == index)
            fix = f"no response could be scored against any of them in {source.path}"
            require(not scorable.isdisjoint(own), f"data.{self.split}", "must have parseable answers", own[:5], fix)
        return scorable

    def _conflicting(self, groups: dict[str, _Group], scorable: Collection[str]) -> set[str]:
        """Ids of the prompts whose scorable answers are not all equal to the first, as the scorer compares them."""
        owners: list[str] = []
        pairs: list[tuple[str, str]] = []
        for id_, group in groups.items():
            spellings: dict[str, str] = {}
            for _, answer in group.rows:
                if answer in scorable:
                    spellings.setdefault(normalise(answer), answer)
            first, *others = spellings.values() or ("",)
            owners += [id_] * len(others)
            pairs += [(first, other) for other in others]
        equal = self.equal(pairs) if pairs else ()
        return {id_ for id_, is_equal in zip(owners, equal, strict=True) if not is_equal}

    def _prompt(self, id_: str, item: Item, answer: str, refused: list[str]) -> Prompt | str:
        """The prompt of a group, or the counter of the reason why there is none."""
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
            extra=item.extra,
        )

    def _tokens(self, item: Item) -> tuple[int, ...]:
        """Tokens of the prompt; a NoProblemError where the chat template refuses a turn or leaves one out."""
        try:
            if item.context:
                messages = _messages(item.problem, self.config.instruction, item.context)
                text = str(self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
                # Templates that know no system role say so or leave it out; the thoughts of earlier replies they may.
                lost = [role for role, said in item.context if role != "assistant" and said.strip() not in text]
                if lost:
                    raise NoProblemError(f"the policy's chat template leaves out the {lost[0]} turn")
            return render(
                item.problem, tokenizer=self.tokenizer, instruction=self.config.instruction, context=item.context
            )
        except TemplateError as error:
            roles = ", ".join([*(role for role, _ in item.context), "user"])
            raise NoProblemError(f"the policy's chat template refuses the turns {roles} ({error})") from error


def _messages(problem: str, instruction: str, context: Sequence[Turn]) -> list[dict[str, str]]:
    asked = instruction.replace("{problem}", problem)
    return [{"role": role, "content": said} for role, said in (*context, ("user", asked))]


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
