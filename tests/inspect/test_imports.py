"""What pickles would import is listed with its place and a verdict, in every form of file, and nothing runs."""

from __future__ import annotations

import io
import json
import os
import pickle
import zipfile
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpttool.containers import pickle_imports
from tests.helpers.command import Done, ckpttool
from tests.helpers.torch_save import torch_save

FIXTURES = Path("fixtures/torch")
SYSTEM = b"\x80\x02cos\nsystem\n(X\x04\x00\x00\x00truetR."


class Calls:
    """Pickled as a call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.call


def found(src: Path) -> list[dict[str, Any]]:
    done = ckpttool("inspect", src, "--imports", "--json")
    said = json.loads(done.out)
    dangerous = any(i["verdict"] == "dangerous" for i in said["imports"])
    assert (done.code, said["ok"]) == ((3, False) if dangerous else (0, True))
    rows: list[dict[str, Any]] = said["imports"]
    return rows


def verdicts(src: Path) -> dict[str, str]:
    return {i["global"]: i["verdict"] for i in found(src)}


@pytest.mark.parametrize(
    ("name", "dangerous"),
    [
        ("system", "posix.system"),
        ("legacy_system", "posix.system"),
        ("getattr_chain", "builtins.getattr"),
        ("zip_slip", ""),
        ("big_endian", ""),
        ("deflated", ""),
        ("overflow", ""),
    ],
)
def test_hostile_files(name: str, dangerous: str) -> None:
    """Whether or not the reader takes the file: this looks at the pickle alone."""
    path = FIXTURES / f"hostile/{name}.bin"
    assert [n for n, v in verdicts(path).items() if v == "dangerous"][:1] == ([dangerous] if dangerous else [])


@pytest.mark.parametrize("protocol", range(6))
def test_place_and_verdict(protocol: int, tmp_path: Path) -> None:
    """The place is where the name is, whatever the form; protocols 0 and 1 do not say that they are pickles."""
    value = {
        "a": Calls(os.system, "true"),
        "b": Calls(os.system, "true"),
        "p": Path("x"),
        "c": Counter(),
        "d": Decimal(1),
    }
    data = pickle.dumps(value, protocol)
    (tmp_path / "training_args.bin").write_bytes(data)
    rows = {i["global"]: i for i in found(tmp_path)}
    system = rows["posix.system"]
    assert (system["file"], system["member"], system["verdict"]) == ("training_args.bin", None, "dangerous")
    named = data.index(b"cposix\nsystem\n") if protocol < 4 else data.index(b"\x93")
    assert system["offset"] == named
    if protocol > 1:
        assert {n: i["verdict"] for n, i in rows.items() if n != "posix.system"} == {
            "pathlib.PosixPath": "inert",
            "decimal.Decimal": "refused",
            "collections.Counter": "inert",
        }


def test_members_of_zips_behind_one_another(tmp_path: Path) -> None:
    """As torch.distributed.checkpoint lays out its shards; the last of a file would hide the others."""
    good = torch_save({"w": np.ones(3, "<f4")}, tmp_path / "good.pt").read_bytes()
    bad = io.BytesIO()
    with zipfile.ZipFile(bad, "w") as archive:
        archive.writestr("archive/data.pkl", SYSTEM)
    (tmp_path / "run/step-5").mkdir(parents=True)
    (tmp_path / "run/step-5/__0_0.distcp").write_bytes(good + bad.getvalue() + good)
    rows = found(tmp_path / "run")
    assert all(i["file"] == "step-5/__0_0.distcp" for i in rows)
    assert {i["member"] for i in rows} == {
        "archive/data.pkl",
        f"@{len(good)} archive/data.pkl",
        f"@{len(good) + len(bad.getvalue())} archive/data.pkl",
    }
    (system,) = (i for i in rows if i["verdict"] == "dangerous")
    assert (system["member"], system["offset"]) == (f"@{len(good)} archive/data.pkl", 2)


def test_the_table_has_a_line_for_each_name(tmp_path: Path) -> None:
    for i in range(3):
        torch_save({"w": np.ones(3, "<f4")}, tmp_path / f"pytorch_model-{i}.bin")
    (tmp_path / "x.pkl").write_bytes(SYSTEM)
    (tmp_path / "model.safetensors").write_bytes((640).to_bytes(8, "little") + b" " * 640)  # begins as a pickle does
    done = ckpttool("inspect", tmp_path, "--imports")
    assert done.code == 3
    lines = done.out.splitlines()
    assert lines[:2] == ["verdict\tglobal\ttimes\twhere", "dangerous\tos.system\t1\tx.pkl:2"]
    assert any(
        n.startswith("inert\ttorch.FloatStorage\t3\tpytorch_model-0.bin:") and n.endswith("and 2 more") for n in lines
    )
    assert lines[-1].endswith(": 5 pickles, 1 dangerous, 0 refused, 3 inert")
    assert ckpttool("inspect", tmp_path, "--imports", "-q").out.splitlines() == lines[:-1]


def test_what_is_no_pickle_has_none(tmp_path: Path) -> None:
    """Raw numbers name things by accident; a zip that is cut off is told, for nothing was found in it."""
    (tmp_path / "a.bin").write_bytes(np.random.default_rng(0).integers(0, 256, 100_000, dtype=np.uint8).tobytes())
    assert found(tmp_path) == []
    (tmp_path / "b.bin").write_bytes((FIXTURES / "hostile/truncated.bin").read_bytes())
    torch_save({"last_epoch": 3}, tmp_path / "scheduler.pt")
    notes = ckpttool("inspect", tmp_path, "--imports").err
    assert "b.bin: no pickle found in this zip" in notes
    assert "scheduler.pt" not in notes
    assert ckpttool("inspect", tmp_path / "gone", "--imports").code == 2


def test_a_bomb_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a huge member as much is passed over as is bounded, and what comes after it is not called safe."""
    monkeypatch.setattr("ckpttool.containers.pickle_imports._MAX_PASSED", 1 << 20)
    size = 3 << 20
    with zipfile.ZipFile(tmp_path / "bomb.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\x80\x04\x8e" + size.to_bytes(8, "little") + bytes(size) + b".")
    assert verdicts(tmp_path) == {"?": "dangerous"}


BOMBS: dict[str, bytes] = {
    "nothing": b"\x80\x04" + b"N" * (1 << 17) + b".",
    "numbers": b"\x80\x04](" + b"K\x01" * (1 << 17) + b"e.",
    "remembered": b"\x80\x04N" + b"\x94" * (1 << 17) + b".",
    "many pickles": b"\x80\x04N." * (1 << 15),
    "calls at the end": b"\x80\x04" + b"N" * (1 << 17) + SYSTEM[2:],
    "a line": b"V" + b"x" * (1 << 20) + b"\n.",
    "many texts": (b"\x80\x04X\x00\x00\x01\x00" + bytes(1 << 16)) * 16 + b".",
}


class _Counts:
    """Opcodes that are read, and bytes that are passed over."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opcodes = self.passed = 0
        argument, passed = pickle_imports._argument, pickle_imports._pass

        def counted(stream: Any, op: Any, budget: Any) -> Any:
            self.opcodes += 1
            return argument(stream, op, budget)

        def measured(stream: Any, n: int, budget: Any) -> None:
            before = budget.passed
            try:
                passed(stream, n, budget)
            finally:
                self.passed += before - budget.passed

        monkeypatch.setattr(pickle_imports, "_argument", counted)
        monkeypatch.setattr(pickle_imports, "_pass", measured)
        monkeypatch.setattr(pickle_imports, "_FEW_OPCODES", 1 << 12)
        monkeypatch.setattr(pickle_imports, "_MAX_PASSED", 1 << 18)


@pytest.mark.parametrize("case", BOMBS)
def test_a_small_file_has_a_small_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """One for the whole file, however many pickles it has and whatever they unpack to."""
    counts = _Counts(monkeypatch)
    with zipfile.ZipFile(tmp_path / "bomb.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        for i in range(4):
            archive.writestr(f"archive/{i}.pkl", BOMBS[case])
    most = max(1 << 12, (tmp_path / "bomb.pt").stat().st_size)
    assert [n.name for n in pickle_imports.named(tmp_path / "bomb.pt")] == ["?"]
    assert counts.opcodes <= most
    assert counts.passed <= 1 << 18


@pytest.mark.parametrize("question", ["--imports", "--check", "--html"])
def test_a_bomb_costs_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, question: str) -> None:
    counts = _Counts(monkeypatch)
    with zipfile.ZipFile(tmp_path / "pytorch_model.bin", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", BOMBS["nothing"])
    words = [question, tmp_path / "page.html"] if question == "--html" else [question]
    done = ckpttool("inspect", tmp_path, *words)
    assert done.code in (1, 3)
    assert counts.opcodes <= 2 << 12


def test_a_pickle_that_is_not_packed_is_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a file has room for an opcode in each of its bytes."""
    _Counts(monkeypatch)
    with zipfile.ZipFile(tmp_path / "a.pt", "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x04" + b"N" * (1 << 14) + SYSTEM[2:])
    assert [n.name for n in pickle_imports.named(tmp_path / "a.pt")] == ["os.system"]


def test_one_question_at_a_time() -> None:
    done: Done = ckpttool("inspect", FIXTURES, "--imports", "--list")
    assert (done.code, "cannot be combined" in done.err) == (2, True)
    assert "does not take filters" in ckpttool("inspect", FIXTURES, "--imports", "--filter", "*").err
