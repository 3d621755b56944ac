"""Which files of a local data set are read: those of one split and one subset, or none at all."""

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from slipstream.config import ConfigError
from slipstream.data.config import SourceConfig
from slipstream.data.sources import read_rows

ULTRACHAT = [
    f"data/{split}-0000{i}-of-00002-a3ecf9275699358{i}.parquet"
    for split in ("train_sft", "train_gen", "test_sft", "test_gen")
    for i in range(2)
]
ULTRACHAT_README = """---
language: [en]
configs:
- config_name: default
  data_files:
  - split: train_sft
    path: data/train_sft-*
  - split: test_sft
    path: data/test_sft-*
---
# UltraChat
"""
PROCESSED = [f"{subset}/train-00000-of-00001.parquet" for subset in ("all", "cn", "en")]
PROCESSED_README = """---
configs:
- config_name: all
  data_files: [{split: train, path: all/train-*}]
  default: true
- config_name: cn
  data_files: [{split: train, path: cn/train-*}]
- config_name: en
  data_files: [{split: train, path: en/train-*}]
---
"""


def lay(directory: Path, names: list[str], readme: str | None = None) -> Path:
    """A directory of files that hold one row each: their own name, so that what is read names its files."""
    for name in names:
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".parquet":
            datasets.Dataset.from_list([{"name": name}]).to_parquet(path)
        else:
            path.write_text(json.dumps({"name": name}) + "\n")
    if readme is not None:
        (directory / "README.md").write_text(readme)
    return directory


def read(path: Path, **values: Any) -> list[str]:
    rows = read_rows(SourceConfig(path=str(path), **values), field="data.train", seed=0).table
    return [row["name"] for row in rows]  # type: ignore[index]


def refused(message: str, path: Path, **values: Any) -> None:
    with pytest.raises(ConfigError, match=message):
        read(path, **values)


@pytest.mark.parametrize(
    ("train", "test", "split"),
    [
        ("train-0.jsonl", "test-0.jsonl", "test"),
        ("train_0.jsonl", "test_0.jsonl", "test"),
        ("train0.jsonl", "test0.jsonl", "test"),
        ("training.jsonl", "validation.jsonl", "validation"),
        ("training_1.jsonl", "val_1.jsonl", "validation"),
        ("gsm8k_train.jsonl", "gsm8k_test.jsonl", "test"),
        ("train.jsonl", "valid.jsonl", "validation"),
        ("train-part-3.jsonl", "testing.jsonl", "test"),
        ("train/0.jsonl", "test/0.jsonl", "test"),
        ("data/train/0000.parquet", "data/test/0000.parquet", "test"),
        ("data/train-00000-of-00001.parquet", "data/test-00000-of-00001.parquet", "test"),
    ],
)
def test_one_split_is_read_however_it_is_spelled(tmp_path: Path, train: str, test: str, split: str) -> None:
    directory = lay(tmp_path, [train, test])
    assert read(directory) == [train]
    assert read(directory, split="train") == [train]
    assert read(directory, split=split) == [test]


def test_all_files_of_a_split_are_read_in_the_order_of_their_names_or_a_part_as_from_the_hub(tmp_path: Path) -> None:
    names = ["train-2.jsonl", "train-0.jsonl", "test.jsonl", "train-1.jsonl"]
    assert read(lay(tmp_path, names)) == ["train-0.jsonl", "train-1.jsonl", "train-2.jsonl"]
    assert read(tmp_path, split="train[:34%]") == ["train-0.jsonl"]
    assert read(tmp_path, split="train[-1:]+train[:1]") == ["train-2.jsonl", "train-0.jsonl"]
    refused(r"^data\.train must have rows, got '.*; the data set is empty", tmp_path, split="train[5:]")


def test_a_split_of_which_files_are_missing_is_refused(tmp_path: Path) -> None:
    directory = lay(tmp_path, ["data/train-00000-of-00003.parquet", "data/train-00002-of-00003.parquet"])
    refused(r"^data\.train must have all 3 files of .*/data/train-\*, got 2; fetch the o", directory)
    assert read(directory / "data/train-00002-of-00003.parquet") == ["data/train-00002-of-00003.parquet"]


def test_files_that_name_no_split_are_read_as_train_alone(tmp_path: Path) -> None:
    directory = lay(tmp_path, ["b.jsonl", "a.jsonl", ".hidden.jsonl", "__pycache__/x.jsonl"], readme="# Of mine\n")
    (directory / "LICENSE").write_text("MIT")
    (directory / "dataset_infos.json").write_text("{}")
    assert read(directory) == ["a.jsonl", "b.jsonl"]
    refused(r"^split of data\.train must be one of train, as in .*, got 'test'", directory, split="test")


@pytest.mark.parametrize(
    ("names", "split"),
    [
        (["train.jsonl", "test.jsonl"], "validation"),
        (["test-0.jsonl", "test-1.jsonl"], "train"),
        (["train.jsonl", "test.jsonl"], "train+test"),
        (ULTRACHAT, "train"),  # the hub knows train_sft and train_gen alone
    ],
)
def test_a_split_that_is_not_there_is_refused_with_what_is_there(tmp_path: Path, names: list[str], split: str) -> None:
    refused(r"^split of data\.train must be one of .*(test|test_sft), .*as in ", lay(tmp_path, names), split=split)


@pytest.mark.parametrize(
    "names",
    [
        ["TRAIN.jsonl", "DEV.jsonl"],
        ["mathtrain.jsonl", "mathtest.jsonl"],
        ["trainset.jsonl", "evalset.jsonl"],
        ["0-train.jsonl", "train-held-out.jsonl"],
        ["train/test-0.jsonl", "train/x.jsonl"],
    ],
)
def test_files_of_another_split_are_never_read_as_train(tmp_path: Path, names: list[str]) -> None:
    refused(r"^split of data\.train must hold files of that split alone, got '.*; its", lay(tmp_path, names))


@pytest.mark.parametrize("readme", [ULTRACHAT_README, None], ids=["README", "names"])
@pytest.mark.parametrize("split", ["train_sft", "test_sft"])
def test_a_snapshot_of_ultrachat_gives_the_splits_of_the_hub(tmp_path: Path, readme: str | None, split: str) -> None:
    assert read(lay(tmp_path, ULTRACHAT, readme), split=split) == [name for name in ULTRACHAT if f"/{split}-" in name]


def test_a_split_that_a_readme_does_not_declare_is_refused(tmp_path: Path) -> None:
    directory = lay(tmp_path, ULTRACHAT, ULTRACHAT_README)
    message = r"^split of data\.train must be one of train_sft, test_sft, as in .*, got "
    for split in (None, "train", "train_gen"):
        refused(message, directory, split=split)


def test_a_snapshot_with_subsets_gives_the_one_asked_for(tmp_path: Path) -> None:
    directory = lay(tmp_path, PROCESSED, PROCESSED_README)
    assert read(directory) == ["all/train-00000-of-00001.parquet"]
    assert read(directory, subset="en") == ["en/train-00000-of-00001.parquet"]
    refused(r"^data\.train must hold data, got .*'fr' not found.*'all', 'cn', 'en'", directory, subset="fr")
    refused(r"^split of data\.train must be one of train, .* got 'test'", directory, subset="en", split="test")


def test_several_subsets_are_never_mixed(tmp_path: Path) -> None:
    refused(r"^the files of data\.train must lie in one directory .*/all', '.*/cn', '", lay(tmp_path / "1", PROCESSED))
    readme = PROCESSED_README.replace("  default: true\n", "")
    refused(
        r"^data\.train must hold data, .*pick one .*'all', 'cn', 'en'.* set", lay(tmp_path / "2", PROCESSED, readme)
    )


def test_a_lone_directory_or_file_is_the_data_set_unless_another_split_is_asked_for(tmp_path: Path) -> None:
    assert read(lay(tmp_path / "0", ["export/rows.jsonl"])) == ["export/rows.jsonl"]
    lay(tmp_path, ["test.jsonl", "rows.jsonl"])
    assert read(tmp_path / "test.jsonl") == read(tmp_path / "test.jsonl", split="test") == ["test.jsonl"]
    assert read(tmp_path / "rows.jsonl", split="test") == ["rows.jsonl"]
    lone = tmp_path / "test.jsonl"
    refused(r"^split of data\.train must hold files of that split alone, got 'test", lone, split="train")
    refused(r"^subset of data\.train must not be set for a file, got 'en'", lone, subset="en")


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ("configs: [", "expected the node content"),
        ("configs: [{config_name: default, data_files: 5}]", "Expected data_files in YAML"),
        ("configs: [{config_name: default, data_files: gone-*}]", "data files found"),
    ],
)
def test_a_readme_that_cannot_be_followed_is_refused(tmp_path: Path, block: str, message: str) -> None:
    directory = lay(tmp_path, ["train.jsonl"], f"---\n{block}\n---\n")
    refused(rf"^data\.train must hold data, got .*{message}.*; name its files", directory)


def test_marks_of_patterns_in_a_path_are_letters(tmp_path: Path) -> None:
    directory = lay(tmp_path / "run [1] *", ["x[1].jsonl", "x*.jsonl"])
    assert read(directory / "x*.jsonl") == ["x*.jsonl"]
    assert read(directory / "x[1].jsonl") == ["x[1].jsonl"]


def test_two_kinds_of_file_and_a_link_to_a_file_that_is_gone_are_refused(tmp_path: Path) -> None:
    mixed, split = (
        lay(tmp_path / "1", ["train.jsonl", "test.parquet"]),
        lay(tmp_path / "2", ["train.jsonl", "train.parquet"]),
    )
    refused(r"^data\.train must hold data, got .*Couldn't infer the same data file format", mixed)
    refused(r"^the files of data\.train must be of one kind, .*'train\.jsonl'\]; name", split)
    linked = lay(tmp_path / "linked", ["train-0.jsonl"])
    (linked / "train-1.jsonl").symlink_to(tmp_path / "gone")
    refused(r"must have files that exist, got '.*train-1\.jsonl'; it is a link", linked)


@pytest.mark.parametrize(
    "content",
    [
        b'{"name": "a"}\n{"name": "b',
        b'{"name": "caf\xe9"}\n',
        '{"name": "a"}\n'.encode("utf-16"),
        b"5\n6\n",
        b'"a"\n',
        b"\n \n",
        b"[]",
        b"{}\n",
        b"\x00" * 64,
        b'{"name": "a", "name": "b"}\n',
        b"[" * 100_000,
    ],
    ids=["torn", "latin-1", "utf-16", "numbers", "texts", "blank", "no rows", "no columns", "zeros", "twice", "deep"],
)
def test_a_file_that_is_no_table_in_utf_8_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    refused(r"^data\.train must (be readable|have rows), got '.*rows\.jsonl'", path)


def test_local_files_are_read_without_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    def refuse(*_: object) -> None:
        raise AssertionError("a local data set asked the network")

    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    assert len(read(lay(tmp_path, ULTRACHAT, ULTRACHAT_README), split="test_sft")) == 2
