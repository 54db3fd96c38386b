"""The tiny model: whole or not at all, the same everywhere, however many make it at once."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.stack import model
from headrace.stack.model import make_tiny_model

_FILES = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}


def _digest(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}


def test_same_bytes_each_time_and_nothing_beside_them(tmp_path: Path) -> None:
    one, other = make_tiny_model(tmp_path / "a" / "tiny"), make_tiny_model(tmp_path / "b")
    assert _digest(one) == _digest(other)
    assert _digest(one).keys() == _FILES
    assert sorted(path.name for path in tmp_path.rglob(".*")) == []


def test_model_that_is_there_is_left_alone(tmp_path: Path) -> None:
    made = make_tiny_model(tmp_path / "tiny")
    marked = made / "config.json"
    marked.write_text("{}")
    assert make_tiny_model(made) == made
    assert marked.read_text() == "{}"


def test_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(model, "_write_weights", full_disk)
    with pytest.raises(OSError, match="No space"):
        make_tiny_model(tmp_path / "tiny")
    assert list(tmp_path.iterdir()) == []


def test_processes_that_make_it_at_once_all_get_a_whole_one(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; from headrace.stack.model import make_tiny_model; "
        "path = make_tiny_model(pathlib.Path(sys.argv[1])); print(sorted(file.name for file in path.iterdir()))"
    )
    makers = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "tiny")], stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    seen = [maker.communicate(timeout=60)[0].strip() for maker in makers]
    assert {maker.returncode for maker in makers} == {0}
    assert set(seen) == {str(sorted(_FILES))}
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


def test_tokenizer_knows_its_chat_marks_and_any_text_comes_back(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    folder = make_tiny_model(tmp_path / "tiny")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = "Grüße, \U0001f30a the quick brown fox"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    ids = tokenizer.encode("<|bos|><|user|>hi<|end|><|assistant|>").ids
    assert ids[:2] == [0, 3]
    config = json.loads((folder / "config.json").read_text())
    assert config["vocab_size"] == tokenizer.get_vocab_size() > max(ids)
