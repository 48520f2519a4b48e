"""Names of tensors, files and paths: what they look like on a terminal, and where they may lead."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ckpttool.errors import plain
from tests.helpers.command import ckpttool
from tests.helpers.tensorfile import header
from tests.hostile.court import COMMANDS, EVERYTHING, SAMPLE, Court, safetensors, tensor

pytestmark = SAMPLE

SCRIPTS = {
    "Arabic": "نموذج.الوزن",
    "Persian with a joiner": "می\u200cشود.وزن",
    "Hebrew": "מודל.משקל",
    "Chinese": "模型.权重",
    "Japanese": "モデル.重み",
    "Korean": "모델.가중치",
    "Devanagari": "मॉडल.भार",
    "Thai": "แบบจำลอง.น้ำหนัก",
    "Cyrillic": "модель.вес",
    "emoji": "😀.👩\u200d👩\u200d👧",
    "combining": "e\u0301.a\u0308",
    "composed": "\u00e9.\u00e4",
    "beyond the plane": "\U0001d534\U0001d522",
    "digits": "layers.٣.x",
}
ODD = {
    "escape": "\x1b[2J\x1b]0;owned\x07",
    "8-bit escape": "\x9b31m",
    "newline": "a\nb",
    "tab": "a\tb",
    "carriage return": "ok\rno",
    "backspace": "a\b\b",
    "nul": "\0",
    "delete": "\x7f",
    "right to left": "\u202egnp.exe",
    "isolate": "\u2066a\u2069",
    "line separator": "a\u2028b",
    "no width": "a\u200bb\ufeff",
    "path up": "../../x",
    "absolute": "/etc/passwd",
    "slash": "a/b",
    "backslash": "a\\b",
    "dash": "-rf",
    "home": "~",
    "dot": ".",
    "dots": "..",
    "three dots": "...",
    "empty": "",
    "space": " ",
    "device": "con",
    "format": "%s{0}%n",
    "glob": "*",
    "regex": "re:(",
    "brackets": "[x]",
    "markup": "[red]a[/red]",
    "HTML": "<script>alert(1)</script>",
    "TSV": "a\t1\tb",
    "dunder": "__metadata__x",
    "long": "x" * 16_384,
    "deep": "a." * 8000 + "w",
    "numbers": "a.1." * 4000 + "w",
    "digits": "model.layers." + "9" * 5000 + ".w",
    "a far layer": "model.layers.999999.w",
    "a far expert": "model.layers.0.mlp.experts.999999.w",
}


@pytest.mark.parametrize("name", [*SCRIPTS.values(), *ODD.values()], ids=[*SCRIPTS, *ODD])
def test_tensor_names(tmp_path: Path, name: str) -> None:
    """Whatever a tensor is called: shown without steering the terminal, carried over as it is, in every command."""
    court = Court(tmp_path)
    (court.src / "model.safetensors").write_bytes(safetensors({name: tensor()}, b"abcd"))
    for _ in court.try_all(COMMANDS if EVERYTHING else ("list",)):
        pass
    if name not in (ODD["a far expert"], ODD["digits"]):
        done = ckpttool("reshard", court.src, court.dst, "--to", "hf", "--verify", "-q")
        assert done.code == 0, done.err
        assert header(court.dst / "model.safetensors").keys() - {"__metadata__"} == {name}
    shown = json.loads(ckpttool("inspect", court.src, "--list", "--json").out)
    assert [t["name"] for t in shown["list"]] == [name]


def test_names_that_look_the_same_stay_apart(tmp_path: Path) -> None:
    court = Court(tmp_path)
    names = ["e\u0301", "\u00e9", "A", "a", "K", "\u212a", "a\u200b", "ﬀ", "ff"]
    data = {n: tensor(data_offsets=[4 * i, 4 * i + 4]) for i, n in enumerate(names)}
    (court.src / "model.safetensors").write_bytes(safetensors(data, bytes(4 * len(names))))
    assert ckpttool("reshard", court.src, court.dst, "--to", "hf", "--verify", "-q").code == 0
    assert header(court.dst / "model.safetensors").keys() - {"__metadata__"} == set(names)
    lines = ckpttool("inspect", court.dst, "--list").out.splitlines()[1:]
    assert len({line.split("\t")[0] for line in lines}) == len(names)


def test_16_384_characters_are_the_limit_of_a_name(tmp_path: Path) -> None:
    court = Court(tmp_path)
    (court.src / "model.safetensors").write_bytes(safetensors({"x" * 16_385: tensor()}, b"abcd"))
    done = court.run("inspect", court.src)
    assert done.code == 1
    assert "16,385 characters: 16384 at most" in done.err
    assert len(done.err) < 1000


@pytest.mark.parametrize("what", ["layers", "experts"])
def test_a_million_layers_are_the_limit(tmp_path: Path, what: str) -> None:
    """A number in a name is no reason to fill the memory with a table of all numbers up to it."""
    court = Court(tmp_path)
    for number, refused in ((2**20 - 1, False), (2**20, True), (10**17, True)):
        name = f"model.layers.{number if what == 'layers' else 0}.mlp.experts.{number if what == 'experts' else 0}.w"
        (court.src / "model.safetensors").write_bytes(safetensors({name: tensor()}, b"abcd"))
        done = court.run("reshard", court.src, court.dst, "--to", "ranks", "--tp-out", 2, "--split", "*=none", "-n")
        assert (done.code == 1) == refused, done.err
        assert (f"{number + 1:,} {what} are more than any model has" in done.err) == refused


INDEXES: dict[str, object] = {
    "up": {"a": "../stranger/model.safetensors"},
    "absolute": {"a": "/etc/passwd"},
    "backslash": {"a": "..\\stranger\\model.safetensors"},
    "nul": {"a": "a\0b.safetensors"},
    "steering": {"a": "\x1b[2J\u202e.safetensors"},
    "dots": {"a": ".."},
    "empty": {"a": ""},
    "a list": ["a"],
    "numbers": {"a": 1},
    "a name that leads out": {"a": "model-00001-of-00001.safetensors", "../../x": "model-00001-of-00001.safetensors"},
}


@pytest.mark.parametrize("case", INDEXES)
def test_indexes(tmp_path: Path, case: str) -> None:
    """No index leads to another directory, on reading or in what is written."""
    court = Court(tmp_path)
    (court.src / "model-00001-of-00001.safetensors").write_bytes(safetensors({"a": tensor()}, b"abcd"))
    (court.src / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": INDEXES[case]}))
    for _ in court.try_all(COMMANDS if EVERYTHING else ("inspect", "check", "reshard", "index")):
        pass
    (court.src / "model-00001-of-00001.safetensors").rename(court.src / "model-00001-of-00002.safetensors")
    two = safetensors({"b": tensor()}, b"abcd")
    (court.src / "model-00002-of-00002.safetensors").write_bytes(two)
    done = ckpttool("drop-keys", court.src, court.dst, "b")
    for path in court.dst.glob("*.index.json") if done.code == 0 else ():
        assert ".." not in path.read_text()


def test_indexes_of_unified_checkpoints(tmp_path: Path) -> None:
    """drop-keys carries them over, whatever else they say."""
    court = Court(tmp_path)
    (court.src / "optimizer-00001-of-00001.safetensors").write_bytes(safetensors({"a/moment1_0": tensor()}, bytes(4)))
    for place in ("../x.safetensors", "/etc/passwd", "..\\x"):
        weight_map = {"a/moment1_0": "optimizer-00001-of-00001.safetensors", "b/moment1_0": place}
        text = json.dumps({"metadata": {"total_size": 4}, "weight_map": weight_map})
        (court.src / "optimizer.safetensors.index.json").write_text(text)
        assert "outside the checkpoint" in court.run("drop-keys", court.src, court.dst, "b", "--from", "unified").err


FILES = [b"caf\xe9.txt", b"\xff\xfe.json", b"a\nb.txt", b"\x1b[2J.txt", b"-rf", b"~", b"a\\b", b"%s{0}", b"x" * 255]


def test_file_names(tmp_path: Path) -> None:
    """Names that are not text: shown as escapes, carried as they are."""
    court = Court(tmp_path)
    (court.src / "model.safetensors").write_bytes(safetensors({"a": tensor()}, b"abcd"))
    for name in FILES:
        with open(os.fsencode(court.src) + b"/" + name, "wb") as f:  # noqa: PTH123 - bytes
            f.write(b"x")
    for _ in court.try_all(COMMANDS if EVERYTHING else ("inspect", "files", "reshard")):
        pass
    assert ckpttool("reshard", court.src, court.dst, "--to", "hf", "-q", "--manifest").code == 0
    assert set(FILES) < set(os.listdir(os.fsencode(court.dst)))  # noqa: PTH208 - bytes
    assert ckpttool("inspect", court.dst, "--check").code == 0


@pytest.mark.parametrize("name", [b"mod\xe9l-\x1b[2J.safetensors", b"a\nb.safetensors"])
def test_weight_files_with_such_names(tmp_path: Path, name: bytes) -> None:
    court = Court(tmp_path)
    with open(os.fsencode(court.src) + b"/" + name, "wb") as f:  # noqa: PTH123 - bytes
        f.write(safetensors({"a": tensor()}, b"abcd"))
    for _ in court.try_all(COMMANDS if EVERYTHING else ("files", "json")):
        pass


@pytest.mark.parametrize(
    "environment",
    [{"LC_ALL": "C"}, {"PYTHONIOENCODING": "ascii"}, {"PYTHONIOENCODING": "latin-1"}, {"COLUMNS": "1", "LINES": "1"}],
    ids=str,
)
def test_environments(tmp_path: Path, environment: dict[str, str]) -> None:
    """JSON stays JSON where the terminal cannot write the names, and a terminal of one column is one, too."""
    court = Court(tmp_path)
    names = [*SCRIPTS.values(), "\x1b[2J", "\u202e"]
    data = {n: tensor(data_offsets=[4 * i, 4 * i + 4]) for i, n in enumerate(names)}
    (court.src / "model.safetensors").write_bytes(safetensors(data, bytes(4 * len(names))))
    done = subprocess.run(
        [sys.executable, "-m", "ckpttool", "inspect", court.src, "--list", "--json"],
        env={**os.environ, **environment},
        capture_output=True,
        check=True,
    )
    assert sorted(t["name"] for t in json.loads(done.stdout)["list"]) == sorted(names)
    assert not done.stderr


def test_what_is_printed_plain() -> None:
    assert plain("\x1b \x9b \u202e \u2028 \ud800 \x7f \u200b") == r"\x1b \x9b \u202e \u2028 \ud800 \x7f \u200b"
    for name in SCRIPTS.values():
        assert plain(name) == name
