"""Reader of data set rows from the hub or local files through `datasets`, which only this module imports.

A local directory is read like a hub data set: one split and one subset. The `configs` in its README.md select the
files, otherwise names of files and directories do (`data/train_sft-00000-of-00003.parquet`, `en/test-0.jsonl`). A
source whose names do not decide is rejected, for training would otherwise mix splits without notice.
"""

from __future__ import annotations

import csv
import glob
import json
import logging
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import yaml
from datasets.data_files import FILES_TO_IGNORE, sanitize_patterns
from datasets.exceptions import DatasetGenerationError

from slipstream.config import ConfigError, read_yaml, require
from slipstream.data.config import SourceConfig

logger = logging.getLogger(__name__)

_KINDS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}
_SHOWN_VALUES = 10
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_TRAIN = "train"
_DEFAULT = "default"
_SPELLINGS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev", "devel", "development"),
    "test": ("test", "testing"),
    "eval": ("eval", "evaluation"),
    "heldout": ("heldout", "holdout"),
}
_SPLITS = {spelling: split for split, spellings in _SPELLINGS.items() for spelling in spellings}
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")  # trainSet and train_set are two words, TRAIN is one
_SHARD = re.compile(r"(.+)-\d{5}-of-(\d{5}).*")
_COUNTERS = (
    re.compile(r"-[0-9a-f]{16}$"),
    re.compile(r"(?:[-_. ]+(?:part|shard|chunk|file|rank|of|no)?[-_. ]*\d+)+$", re.IGNORECASE),
    re.compile(r"^\d+[-_. ]+"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """Rows of a source, which know where they stand in it."""

    table: datasets.Dataset
    numbers: Sequence[int]  # of the rows in the source, from 0
    source: str
    files: tuple[tuple[str, str], ...]  # kind and path of the files, in the order of their rows; empty: not known

    def place(self, index: int) -> str:
        """Name the file that holds the row `index` of the table, and the row's number in it, counted from 1."""
        number = self.numbers[index]
        for kind, path in self.files if len(self.files) > 1 else ():
            length = len(datasets.load_dataset(kind, data_files=[path], split=_TRAIN))
            if number < length:
                return f"row {number + 1} of {path}"
            number -= length
        return f"row {number + 1} of {self.source}"


def read_rows(source: SourceConfig, *, field: str, seed: int) -> Rows:
    """Read the rows of `source` that its `where` admits, at most `source.max_rows` of them, sampled by `seed`.

    Raises:
        ConfigError: the source does not exist, cannot be read, or has no such rows.
    """
    datasets.disable_progress_bars()
    path = Path(source.path)
    local = source.path.startswith((".", "/", "~")) or path.suffix in _KINDS or path.is_dir()
    rule = "must be a hub id (owner/name), a local file or directory, `reasoning_gym:TASK` or `synthetic`"
    require(local or _HUB_ID.fullmatch(source.path) is not None, field, rule, source.path)
    on_hub = {"path": source.path, "name": source.subset, "split": source.split or _TRAIN}
    arguments = _local_arguments(source, field) if local else on_hub
    try:
        rows: Any = datasets.load_dataset(**arguments)
        rows.data.validate(full=True)  # otherwise text that is not UTF-8 fails only when its row is read
    except (OSError, ValueError, TypeError, DatasetGenerationError) as error:
        fix = "is it JSON Lines or CSV in UTF-8, or Parquet?" if local else "is the hub reachable and the split right?"
        cause = _broken_line(arguments) or str(error.__cause__ or error).split("\n")[0]
        raise ConfigError(f"{field} must be readable, got {source.path!r} ({cause}); {fix}") from error
    require(len(rows) > 0, field, "must have rows", source.path, "the data set is empty")
    numbers = _admitted(rows, source, field) if source.where else range(len(rows))
    if source.max_rows is not None and source.max_rows < len(numbers):
        order = np.random.default_rng(seed).permutation(len(numbers))[: source.max_rows]
        numbers = [numbers[index] for index in order]
    is_part = "[" in (source.split or "")  # then the rows do not begin with the first file's
    files = tuple((arguments["path"], name) for name in arguments["data_files"]) if local and not is_part else ()
    table = rows if len(numbers) == len(rows) else rows.select(numbers)
    return Rows(table=table, numbers=numbers, source=source.path, files=files)


def _broken_line(arguments: dict[str, Any]) -> str:
    """Name the first line of local JSON Lines that is no JSON; empty where there is none."""
    for name in arguments.get("data_files", ()) if arguments["path"] == "json" else ():
        (path,) = glob.glob(name)
        with open(path, "rb") as lines:
            for number, line in enumerate(lines, 1):
                if number == 1 and line.lstrip().startswith(b"["):  # a list, not JSON Lines
                    break
                try:
                    json.loads(line) if line.strip() else None
                except ValueError as error:
                    return f"row {number} of {path}: {error}"
    return ""


def _admitted(rows: datasets.Dataset, source: SourceConfig, field: str) -> list[int]:
    """Return the numbers of the rows whose columns have the values of `source.where`."""
    for name in source.where:
        rule = f"must name one of {', '.join(sorted(rows.column_names))}, the columns of {source.path}"
        require(name in rows.column_names, f"{field}.where", rule, name)
    named: Any = rows.select_columns(list(source.where))
    found = [
        number for number, row in enumerate(named) if all(_is(row[key], value) for key, value in source.where.items())
    ]
    if not found:
        counts = {name: Counter(map(_spelled, named[name])).most_common(_SHOWN_VALUES) for name in source.where}
        values = "; ".join(f"{name} has {', '.join(value for value, _ in common)}" for name, common in counts.items())
        raise ConfigError(f"{field}.where must leave a row of {source.path}, got {source.where}; {values}")
    logger.info("%s: %d of the %d rows of %s are as `where` says", field, len(found), len(rows), source.path)
    return found


def _is(value: Any, wanted: Any) -> bool:
    """Compare a cell; text equals the number, the truth value or the null that it spells."""
    if isinstance(value, str) and not isinstance(wanted, str):
        return value.lower() == json.dumps(wanted)  # Python writes True where others write true
    return value == wanted and isinstance(value, bool) == isinstance(wanted, bool)


def _spelled(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


@dataclass(frozen=True, kw_only=True, slots=True)
class _DataFile:
    """A file of a local data set, with what its path tells about it."""

    path: Path
    subset: str  # "" for a file in the data set's own directory
    split: str | None  # name of the split without a shard number; None where the path names none
    meanings: frozenset[str]  # splits that the name stands for, as keys of `_SPELLINGS`
    is_shard: bool  # a shard in the hub's naming, whose split is the whole name


def _local_arguments(source: SourceConfig, field: str) -> dict[str, Any]:
    path = Path(source.path).expanduser()
    require(path.exists(), field, "must be a file or directory that exists", source.path)
    split, bracket, rows = (source.split or _TRAIN).partition("[")  # `train[:10%]` takes a tenth, as on the hub
    if path.is_dir():
        files = _declared_files(path, source, split, field) or _named_files(path, source, split, field)
        _check_shards(files, field)
    else:
        require(source.subset is None, f"subset of {field}", "must not be set for a file", source.subset)
        files = [path]
        lone = _data_file(path, path.parent)
        if source.split is not None and lone.split is not None and not _of_split([lone], split):
            raise ConfigError(
                f"split of {field} must be {lone.split!r}, which {source.path} names, got {split!r}; leave it out to "
                "read the file whatever its name is"
            )
    for file in files:
        require(file.is_file(), field, "must be a file that exists", str(file), "is it a link to what is gone?")
    require(all(file.stat().st_size > 0 for file in files), field, "must have rows", source.path, "a file is empty")
    kinds = {_KINDS.get(file.suffix) for file in files}
    require(len(kinds) == 1 and None not in kinds, field, f"must be of one kind of {', '.join(_KINDS)}", source.path)
    names = [glob.escape(str(file)) for file in files]
    as_written = _text_columns(files[0]) if ".csv" in {file.suffix for file in files} else {}
    return {"path": kinds.pop(), "data_files": names, "split": f"{_TRAIN}{bracket}{rows}", **as_written}


def _text_columns(file: Path) -> dict[str, Any]:
    """Return the arguments that read all columns of a .csv file as text: an answer 007 must not become 7."""
    with file.open(newline="", encoding="utf-8-sig", errors="replace") as lines:
        header = next(csv.reader(lines), [])
    features = datasets.Features({name: datasets.Value("string") for name in header})
    return {"features": features, "keep_default_na": False}


def _declared_files(directory: Path, source: SourceConfig, split: str, field: str) -> list[Path]:
    """Return the split's files by the `configs` of the directory's README.md; empty without `configs`."""
    configs = _readme_configs(directory, field)
    if not configs:
        return []
    names = [config.get("config_name", _DEFAULT) for config in configs]
    defaults = [name for name, config in zip(names, configs, strict=True) if config.get("default") is True]
    chosen = source.subset or (names if len(names) == 1 else [*defaults, _DEFAULT])[0]
    known = f"must be one of {', '.join(map(str, names))}, the configs in {directory}/README.md"
    require(chosen in names, f"subset of {field}", known, source.subset)
    config = configs[names.index(chosen)]
    folder = str(config.get("data_dir") or "")
    try:
        patterns: dict[str, list[str]] = sanitize_patterns(config.get("data_files", []))
    except (TypeError, ValueError) as error:
        rule = f"{field} must have data_files of split and path in {directory}/README.md"
        raise ConfigError(f"{rule}, got {config!r}") from error
    for name in (folder, *(str(pattern) for own in patterns.values() for pattern in own)):
        is_inside = not Path(name).is_absolute() and ".." not in Path(name).parts
        require(is_inside, f"README.md of {directory}", "must declare files of its own directory", name)
    base = directory / folder
    if "data_files" not in config:
        return _named_files(base, SourceConfig(path=str(base)), split, field)
    rule = f"must be one of {', '.join(patterns)}, the splits of {chosen} in {directory}/README.md"
    require(split in patterns, f"split of {field}", rule, split)
    found = {base / name for own in patterns[split] for name in glob.glob(str(own), root_dir=base, recursive=True)}
    files = sorted(file for file in found if not file.is_dir())
    rule = f"must hold files of the split {split}, {patterns[split]} in its README.md"
    require(bool(files), field, rule, source.path, "was it copied in part?")
    return files


def _readme_configs(directory: Path, field: str) -> list[dict[str, Any]]:
    """Read the `configs` from the YAML block at the start of a README.md."""
    path = directory / "README.md"
    if not path.is_file():
        return []
    try:
        block = re.match(r"---\s*\n(.*?)\n---\s*(?:\n|\Z)", path.read_text(encoding="utf-8-sig"), re.DOTALL)
        values = read_yaml(block[1]) if block else None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        cause = str(error).split("\n")[0]
        raise ConfigError(f"{field} must have a README.md with valid YAML, got {str(path)!r} ({cause})") from error
    configs = values.get("configs") if isinstance(values, dict) else None
    return [config for config in configs if isinstance(config, dict)] if isinstance(configs, list) else []


def _named_files(directory: Path, source: SourceConfig, split: str, field: str) -> list[Path]:
    """Return the files whose own or directories' names give the split and the subset."""
    paths = sorted(path for path in directory.rglob("*") if _is_data(path.relative_to(directory)) and not path.is_dir())
    require(bool(paths), field, f"must hold {', '.join(_KINDS)} files", source.path)
    files = [_data_file(path, directory) for path in paths]
    subsets = sorted({file.subset or _DEFAULT for file in files})
    if source.subset is not None:
        rule = f"must be one of {', '.join(subsets)}, the directories of data in {directory}"
        require(source.subset in subsets, f"subset of {field}", rule, source.subset)
        files = [file for file in files if (file.subset or _DEFAULT) == source.subset]
    chosen = _of_split(files, split)
    if not chosen:
        known = ", ".join(sorted({file.split or "none" for file in files}))
        names = ", ".join(str(file.path.relative_to(directory)) for file in files[:5])
        raise ConfigError(
            f"split of {field} must be one that the names in {source.path} decide ({known}: {names}, ...), got "
            f"{split!r}; set it, or name the files one by one as sources"
        )
    subsets = sorted({file.subset or _DEFAULT for file in chosen})
    fix = f"set it: files of the split {split} lie in each of them ({_DEFAULT}: {directory} itself)"
    require(len(subsets) == 1, f"subset of {field}", f"must be one of {', '.join(subsets)}", source.subset, fix)
    if len(chosen) < len(paths):
        logger.info("%s: %d of the %d files in %s belong to the split", field, len(chosen), len(paths), directory)
    return [file.path for file in chosen]


def _check_shards(files: Sequence[Path], field: str) -> None:
    """Reject a split with missing shards, such as `-00001-of-00003`."""
    shards = [(file.parent, match) for file in files if (match := _SHARD.fullmatch(file.stem))]
    found = Counter((folder / match[1], int(match[2])) for folder, match in shards)
    for (name, num), num_found in found.items():
        fix = "fetch the others, or name the files one by one as sources"
        require(num_found == num, field, f"must have all {num} files of {name}-*", num_found, fix)


def _is_data(path: Path) -> bool:
    is_hidden = any(part.startswith((".", "__")) for part in path.parts)
    return path.suffix in _KINDS and not is_hidden and path.name not in FILES_TO_IGNORE


def _of_split(files: Sequence[_DataFile], split: str) -> list[_DataFile]:
    """Return the files of `split`; empty where names do not decide.

    A name is a split itself (`train_sft`), or stands for one (`gsm8k_train`, `dev` for validation) if no other name
    does. Files without a split's name belong to `train` if no file has one.
    """
    named = [file for file in files if file.split is not None]
    if not named:
        return list(files) if split == _TRAIN and not _is_pair([file.path.stem for file in files]) else []
    exact = [file for file in named if str(file.split).casefold() == split.casefold()]
    if exact:
        return exact
    meaning = {_SPLITS.get(split.casefold())}
    alike = [file for file in named if file.meanings == meaning and not file.is_shard]
    return alike if len({str(file.split).casefold() for file in alike}) == 1 else []


def _data_file(path: Path, directory: Path) -> _DataFile:
    folders = path.relative_to(directory).parent.parts
    splits = [folder for folder in folders if _meanings(folder)]
    shard = _SHARD.fullmatch(path.stem)
    is_name = shard is not None and re.fullmatch(r"\w+", shard[1]) is not None
    is_shard = shard is not None and is_name and (bool(_meanings(shard[1])) or path.parent.name == "data")
    own = shard[1] if shard and is_shard else _without_counter(path.stem)
    meanings = _meanings(own).union(*map(_meanings, splits))
    names = [*splits, own] if len(meanings) > 1 else (splits[-1:] or [own])
    return _DataFile(
        path=path,
        subset="/".join(folder for folder in folders if folder not in (*splits, "data")),
        split="/".join(names) if meanings or is_shard else None,
        meanings=meanings,
        is_shard=is_shard and not splits,
    )


def _meanings(name: str) -> frozenset[str]:
    """Return the splits that the words of a name stand for; `trainset`, `held-out` and `TEST` stand for one each."""
    words = _WORD.findall(re.sub(r"(?i)(held|hold)[-_ ]out", r"\1out", name))
    bare = (re.sub(r"(?<=.)(?:sets?|data|splits?)$", "", word.casefold()) for word in words)
    return frozenset(_SPLITS[word] for word in bare if word in _SPLITS)


def _without_counter(name: str) -> str:
    for counter in _COUNTERS:
        name = counter.sub("", name)
    word = re.sub(r"\d+$", "", name)
    return word if _meanings(word) and _meanings(_WORD.findall(word)[-1]) else name


def _is_pair(names: Sequence[str]) -> bool:
    """Return True if some names contain `train` and others another split, such as `mathtrain` and `mathtest`."""
    trains = [name for name in names if _TRAIN in name.casefold()]
    others = [name for name in names if re.search(r"test|eval|valid|dev", name.casefold())]
    return bool(trains and others)
