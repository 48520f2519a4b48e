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
    assert "b.bin: no pickle is found in this zip" in notes
    assert "scheduler.pt" not in notes
    assert ckpttool("inspect", tmp_path / "gone", "--imports").code == 2


def test_a_bomb_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a huge member as much is passed over as is bounded, and what comes after it is not called safe."""
    monkeypatch.setattr("ckpttool.containers.pickle_imports._MAX_PASSED", 1 << 20)
    size = 3 << 20
    with zipfile.ZipFile(tmp_path / "bomb.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\x80\x04\x8e" + size.to_bytes(8, "little") + bytes(size) + b".")
    assert verdicts(tmp_path) == {"?": "dangerous"}


def test_one_question_at_a_time() -> None:
    done: Done = ckpttool("inspect", FIXTURES, "--imports", "--list")
    assert (done.code, "different questions" in done.err) == (2, True)
    assert "filters do not apply" in ckpttool("inspect", FIXTURES, "--imports", "--filter", "*").err
