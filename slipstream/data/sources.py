"""Reader of data set rows from the hub or local files through `datasets`, which only this module imports.

`datasets` selects the files of a local directory as it does those of a hub data set: by the `configs` in its README.md,
otherwise by their names (`data/train_sft-00000-of-00003.parquet`, `test-0.jsonl`). It reads as `train` what names no
split that it knows. Whatever would so mix splits or subsets without notice is refused here. Local JSON and CSV are read
by Python's own readers, because `datasets` makes times of texts such as 2024-01-05, and floats of large integers.
"""

from __future__ import annotations

import csv
import glob
import json
import logging
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import yaml
from datasets.data_files import FILES_TO_IGNORE
from datasets.exceptions import DatasetGenerationError

from slipstream.config import LARGEST, ConfigError, require
from slipstream.data.config import DATA_KINDS, SourceConfig

logger = logging.getLogger(__name__)

_SHOWN_VALUES = 10
_ROWS_AT_ONCE = 10_000
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_TRAIN = "train"
_NOT_TRAIN = re.compile(r"test|eval|valid|dev|held|hold", re.IGNORECASE)
_BLANK = re.compile(r"\s*")
_SHARD = re.compile(r"(.+)-\d{5}-of-(\d{5}).*")


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
            length = len(_load(kind, [path], _TRAIN))
            if number < length:
                return f"row {number + 1} of {path}"
            number -= length
        return f"row {number + 1} of {self.source}"


def read_rows(source: SourceConfig, *, field: str, seed: int) -> Rows:
    """Read the rows of `source` that its `where` admits, at most `source.max_rows` of them, sampled by `seed`."""
    datasets.disable_progress_bars()
    path = Path(source.path)
    local = source.path.startswith((".", "/", "~")) or path.suffix in DATA_KINDS or path.is_dir()
    rule = "must be a hub id (owner/name), a local file or directory, `reasoning_gym:TASK` or `synthetic`"
    require(local or _HUB_ID.fullmatch(source.path) is not None, field, rule, source.path)
    kind, names, split = _local_files(source, field) if local else ("", [], source.split or _TRAIN)
    try:
        rows = _load(kind, names, split) if local else datasets.load_dataset(source.path, source.subset, split=split)
        rows.data.validate(full=True)  # otherwise text that is not UTF-8 fails only when its row is read
    except (OSError, ValueError, TypeError, csv.Error, DatasetGenerationError) as error:
        fix = "is it JSON Lines or CSV in UTF-8, or Parquet?" if local else "is the hub reachable and the split right?"
        cause = str(error.__cause__ or error).split("\n")[0]
        raise ConfigError(f"{field} must be readable, got {source.path!r} ({cause}); {fix}") from error
    require(len(rows) > 0, field, "must have rows", source.path, "the data set is empty")
    numbers = source.sampled(_admitted(rows, source, field) if source.where else range(len(rows)), seed)
    is_part = "[" in (source.split or "")  # then the rows do not begin with the first file's
    files = () if is_part else tuple((kind, name) for name in names)
    table = rows if len(numbers) == len(rows) else rows.select(numbers)
    return Rows(table=table, numbers=numbers, source=source.path, files=files)


def _load(kind: str, names: Sequence[str], split: str) -> Any:
    """Read the rows of local files; a row of JSON or CSV has null in the columns of other rows alone."""
    if kind == "parquet":
        return datasets.load_dataset(kind, data_files=[glob.escape(name) for name in names], split=split)
    encode, read, parts = json.JSONEncoder(ensure_ascii=False).encode, _json_rows if kind == "json" else _csv_rows, []
    rows = (row for name in names for row in read(Path(name)))
    while some := list(islice(rows, _ROWS_AT_ONCE)):
        columns = dict.fromkeys(key for row in some for key in row)
        cells = ([encode(row[key]) if key in row else None for row in some] for key in columns)
        parts.append(pa.table([pa.array(column, pa.large_string()) for column in cells], names=list(columns)))
    whole = pa.concat_tables(parts or [pa.table({})], promote_options="default")
    chosen = datasets.ReadInstruction.from_spec(split).to_absolute({_TRAIN: len(whole)})
    cut = pa.concat_tables(whole.slice(part.from_, max(0, part.to - part.from_)) for part in chosen)
    return datasets.Dataset(cut).with_transform(
        lambda found: {key: [each and json.loads(each) for each in cells] for key, cells in found.items()}
    )


def _json_rows(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of JSON Lines, or of a list; a `ValueError` names what is none, and its place."""
    text, decoder = file.read_text(encoding="utf-8-sig"), json.JSONDecoder(object_pairs_hook=_once)
    at = next(_BLANK.finditer(text)).end()
    while at < len(text):
        try:
            found, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{file}: {error}") from error
        for row in found if isinstance(found, list) else [found]:
            if not isinstance(row, dict):
                raise ValueError(f"{file}: a row must be a mapping, got {row!r:.80}")
            yield row
        at = next(_BLANK.finditer(text, at)).end()


def _csv_rows(file: Path) -> Iterator[dict[str, str]]:
    """Yield the rows of a .csv file, all of them text: an answer 007 must not become 7."""
    csv.field_size_limit(LARGEST)
    with file.open(newline="", encoding="utf-8-sig") as lines:
        rows = csv.reader(lines)
        header = next(filter(None, rows), [])
        for row in filter(None, rows):
            if len(row) > len(header):
                raise ValueError(f"{file}: line {rows.line_num} has {len(row)} cells under {len(header)} names")
            cells = zip_longest(header, row, fillvalue="")
            yield _once([cell for cell in cells if cell[0]])  # pandas writes its index without a name


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return a mapping of what has each name once."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(f"a name stands twice among {', '.join(name for name, _ in pairs)}")
    return found


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


def _local_files(source: SourceConfig, field: str) -> tuple[str, list[str], str]:
    """Return the kind, the names and, with the rows asked for, the split of a local source's files."""
    path = Path(source.path).expanduser()
    require(path.exists(), field, "must be a file or directory that exists", source.path)
    split, bracket, rows = (source.split or _TRAIN).partition("[")  # `train[:10%]` takes a tenth, as on the hub
    if path.is_dir():
        files = _files_of(path, source, split, field)
    else:
        require(source.subset is None, f"subset of {field}", "must not be set for a file", source.subset)
        files = [path]
        if source.split is not None:
            _require_split([path.name], split, field)
    for file in files:
        require(file.is_file(), field, "must be a file that exists", str(file), "is it a link to what is gone?")
    require(all(file.stat().st_size > 0 for file in files), field, "must have rows", source.path, "a file is empty")
    kinds = {DATA_KINDS.get(file.suffix) for file in files}
    rule = f"must be of one kind of {', '.join(DATA_KINDS)}"
    require(len(kinds) == 1 and None not in kinds, field, rule, source.path)
    return kinds.pop() or "", list(map(str, files)), f"{_TRAIN}{bracket}{rows}"


def _files_of(directory: Path, source: SourceConfig, split: str, field: str) -> list[Path]:
    """Return the files of a split and a subset of a local data set."""
    lost = next((path for path in sorted(directory.rglob("*")) if path.is_symlink() and not path.exists()), None)
    require(lost is None, field, "must have files that exist", str(lost), "it is a link to what is gone")
    try:
        config: Any = datasets.load_dataset_builder(str(directory), name=source.subset).config
    except (OSError, ValueError, yaml.YAMLError) as error:
        fix = "name its files one by one as sources, or set subset and the README.md right"
        cause = " ".join(str(error).split())
        raise ConfigError(f"{field} must hold data, got {source.path!r} ({cause:.400}); {fix}") from error
    found = {str(name): list(map(Path, paths)) for name, paths in config.data_files.items()}
    fix = "set it, or name the files one by one as sources"
    require(split in found, f"split of {field}", f"must be one of {', '.join(found)}, as in {directory}", split, fix)
    files = found[split]
    readme = directory / "README.md"
    if not (readme.is_file() and "configs:" in readme.read_text(encoding="utf-8")):  # nobody says what belongs together
        _require_split([str(file.relative_to(directory)) for file in files], split, field)
        folders = sorted({str(file.parent) for file in files})
        rule, fix = f"must lie in one directory for the split {split}", "name one of them as the source's path"
        require(len(folders) == 1, f"the files of {field}", rule, folders, fix)
        kinds = {path.suffix: path.name for path in sorted(files[0].parent.iterdir()) if path.suffix in DATA_KINDS}
        others = sorted(name for suffix, name in kinds.items() if DATA_KINDS[suffix] != DATA_KINDS[files[0].suffix])
        others = [name for name in others if name not in FILES_TO_IGNORE]
        rule, fix = "must be of one kind, for no other would be read", "name the files one by one as sources"
        require(not others, f"the files of {field}", rule, [files[0].name, *others], fix)
    logger.info("%s: the split %s of %s has %d files", field, split, directory, len(files))
    _check_shards(files, field)
    return files


def _require_split(names: Sequence[str], split: str, field: str) -> None:
    """Refuse rows for training from files whose names speak of another split."""
    other = next((name for name in names if split == _TRAIN and _NOT_TRAIN.search(name)), None)
    fix = "its name speaks of another: name the files one by one as sources, without a split"
    require(other is None, f"split of {field}", "must hold files of that split alone", other, fix)


def _check_shards(files: Sequence[Path], field: str) -> None:
    """Reject a split with missing shards, such as `-00001-of-00003`."""
    shards = [(file.parent, match) for file in files if (match := _SHARD.fullmatch(file.stem))]
    found = Counter((folder / match[1], int(match[2])) for folder, match in shards)
    for (name, num), num_found in found.items():
        fix = "fetch the others, or name the files one by one as sources"
        require(num_found == num, field, f"must have all {num} files of {name}-*", num_found, fix)
