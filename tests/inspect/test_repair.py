"""``inspect --header``, ``--set-header`` and ``--write-index`` as people type them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.helpers.command import ckpttool

INDEX = "model.safetensors.index.json"


def ok(*words: object) -> str:
    done = ckpttool(*words)
    assert done.code == 0, done.err
    return done.out


def answer(*words: object) -> Any:
    return json.loads(ok(*words, "--json"))


def refused(*words: object, code: int = 2) -> str:
    done = ckpttool(*words)
    assert (done.code, done.out) == (code, ""), done
    return done.err


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    folder = tmp_path / "src"
    folder.mkdir()
    for i in (1, 2):
        save_file({f"w{i}": np.full(4, i, np.float32)}, folder / f"model-{i:05d}-of-00002.safetensors")
    return folder


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save_file({"a": np.arange(6, dtype=np.uint16)}, tmp_path / "m.safetensors", {"format": "np"})
    return tmp_path / "m.safetensors"


def test_write_index(shards: Path) -> None:
    assert "no-index" in ok("check", shards)
    assert "would be written" in ok("inspect", shards, "--write-index", "-n")
    assert not (shards / INDEX).exists()
    assert "written; 2 tensors in 2 shards, 32 bytes" in ok("inspect", shards, "--write-index")
    said = answer("inspect", shards, "--write-index")
    assert (said["view"], said["written"]) == ("write-index", 0)
    assert "no-index" not in ok("check", shards)
    index = json.loads((shards / INDEX).read_text())
    index["weight_map"]["w1"] = "model-00002-of-00002.safetensors"
    (shards / INDEX).write_text(json.dumps(index))
    done = ckpttool("check", shards)
    assert done.code == 3
    assert "`ckpttool inspect DIR --write-index`" in " ".join(done.out.split())
    (shards / "model-00001-of-00002.safetensors").unlink()
    assert "missing" in refused("inspect", shards, "--write-index", code=1)


def test_header(tmp_path: Path, file: Path) -> None:
    text = ok("inspect", file, "--header")
    assert ok("inspect", file, "--header", "-q") == text
    assert answer("inspect", file, "--header")["text"] == text
    data = json.loads(text)
    assert data["a"]["dtype"] == "U16"
    data["b"] = dict(data.pop("a"), dtype="F16", shape=[2, 3])
    data["__metadata__"]["format"] = "pt"
    edited = tmp_path / "h.json"
    edited.write_text(json.dumps(data))
    assert "would be changed in place" in ok("inspect", file, "--set-header", edited, "--dry-run")
    assert load_file(file)["a"].dtype == np.uint16
    said = answer("inspect", file, "--set-header", edited)
    assert (said["view"], said["how"], said["renamed"]) == ("set-header", "in place", [["a", "b"]])
    assert load_file(file)["b"].shape == (2, 3)
    data["__metadata__"]["note"] = "x" * 1000
    edited.write_text(json.dumps(data))
    other = tmp_path / "other.safetensors"
    assert "rewritten" in ok("inspect", file, "--set-header", edited, "-o", other)
    assert load_file(other)["b"].shape == load_file(file)["b"].shape
    assert "the output exists" in refused("inspect", file, "--set-header", edited, "-o", other, code=1)
    data["b"]["shape"] = [2, 2]
    edited.write_text(json.dumps(data))
    assert "needs" in refused("inspect", file, "--set-header", edited, code=1)


def test_a_backup_is_put_back(file: Path) -> None:
    """What a run leaves that dies while it writes the header, and the command that its error names."""
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    backup = file.with_name(f"{file.name}.header-backup")
    backup.write_bytes(raw[: 8 + length])
    file.write_bytes(raw[:8] + b"?" * length + raw[8 + length :])
    error = refused("inspect", file, "--header", code=1)
    assert f"`ckpttool inspect {file} --set-header {backup}`" in " ".join(error.split())
    assert "restored" in ok("inspect", file, "--set-header", backup)
    assert file.read_bytes() == raw
    assert not backup.exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-o", "x"], "--output belongs to --set-header"),
        (["-n"], "inspect only reads"),
        (["--header", "--write-index"], "cannot be combined"),
        (["--header", "--tp", "2"], "options of the source have no effect"),
        (["--write-index", "--filter", "a"], "does not take filters"),
        (["--write-index", "--on", "ray"], "--on needs a view that reads values"),
        (["--set-header", "x.json", "--html", "x.html"], "is not part of a report"),
    ],
)
def test_refusals(file: Path, words: list[str], said: str) -> None:
    assert said in refused("inspect", file, *words)


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("m.safetensors --header", "ckpttool inspect m.safetensors --header"),
        ("--header m.safetensors h.json", "ckpttool inspect m.safetensors --header > h.json"),
        ("h.json m.safetensors --header", "ckpttool inspect m.safetensors --set-header h.json"),
        ("h.json m.safetensors --header -o new", "ckpttool inspect m.safetensors --set-header h.json -o new"),
        ("-o new h.json m.safetensors --header", "ckpttool inspect m.safetensors --set-header h.json -o new"),
        ("h.json m.safetensors --header -n", "ckpttool inspect m.safetensors --set-header h.json --dry-run"),
        ("m.safetensors.header-backup m.safetensors --header", "--set-header m.safetensors.header-backup"),
        ("dir --index", "ckpttool inspect dir --write-index"),
        ("--index dir --dry-run", "ckpttool inspect dir --write-index --dry-run"),
        ("dir --index --check", "ckpttool check dir"),
        ("h.json --header", "ckpttool inspect FILE.safetensors --set-header h.json"),
    ],
)
def test_former_spellings(words: str, hint: str) -> None:
    error = " ".join(refused("convert-json", *words.split()).split())
    assert f"{hint}`" in error
