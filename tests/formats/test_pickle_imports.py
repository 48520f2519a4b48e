"""What a pickle would import is found in every form, and nothing is imported on the way."""

from __future__ import annotations

import collections
import io
import os
import pickle
import zipfile
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from ckpttool.containers.pickle_imports import UNKNOWN, imports, is_dangerous, is_zip_without_pickles, walk


class Calls:
    """Pickled as a call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.call


@pytest.mark.parametrize("protocol", range(2, 6))
def test_every_protocol(protocol: int, tmp_path: Path) -> None:
    value = {"weights": collections.OrderedDict(a=b"\0" * 100_000), "x": Calls(os.system, "true"), "d": Decimal(1)}
    (tmp_path / "a.bin").write_bytes(pickle.dumps(value, protocol))
    found = imports(tmp_path / "a.bin")
    assert found[0] == "posix.system"
    assert all(not is_dangerous(n) for n in found[1:])
    assert "decimal.Decimal" in found


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (b"\x80\x02cos\nsystem\n.", ["os.system"]),
        (b"\x80\x02(S'x'\nios\nsystem\n.", ["os.system"]),
        (b"\x80\x04\x8c\x02os\x94\x8c\x06system\x940h\x00h\x01\x93.", ["os.system"]),
        (b"\x80\x04\x8c\x02os2\x8c\x06system\x93.", ["os.system"]),
        (b"\x80\x04\x8c\x02os(K\x01K\x021\x8c\x06system\x93.", ["os.system"]),
        (b"\x80\x04K\x01\x8c\x06system\x93.", [UNKNOWN]),
        (b"\x80\x04\x82\x01.", [UNKNOWN]),
        (b"\x80\x02K\x01.\x80\x02cos\nsystem\n.", ["os.system"]),
        (b"\x80\x02cos\nsystem\n", ["os.system"]),
        (b"\x80\x02X\xff\xff\xff\xff", []),
        (b"\x80\x04V\\u006fs\nVsyst\\u0065m\n\x93.", ["os.system"]),
        (b"\x80\x04S'\\x6fs'\nS\"syst\\145m\"\n\x93.", ["os.system"]),
        (b"\x80\x04S'\\\xff'\nS'system'\n\x93.", ["\\\xff.system"]),
        (b"\x80\x02cos\nsystemX", ["os.system"]),  # the end of a file is the end of a line
        (b"V" + b"x" * 70_000 + b"\ncos\nsystem\n.", ["os.system"]),
        (b"\x80\x04cos\n" + b"path.os." * 1000 + b"system\n.", [UNKNOWN]),
        (b"\x80\x02cos\nsystem\np" + b"0" * 4200 + b"1\n.", ["os.system", UNKNOWN]),  # which CPython takes for 1
        (b"\x80\x02Ng" + b"0" * 4200 + b"1\n.", [UNKNOWN]),
        (b"\x80\x02.", []),
    ],
)
def test_ways_to_say_it(program: bytes, expected: list[str]) -> None:
    assert [name for name, _ in walk(io.BytesIO(program))] == expected


def test_zips_and_what_is_not_a_pickle(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data/0", b"\x80\x02cos\nremove\n.")
        archive.writestr("archive/data.pkl", pickle.dumps([b"x" * 99_999, Calls(os.popen, "true")]))
    assert imports(tmp_path / "a.pt") == ("os.popen",)
    for name, data in {"b.bin": b"", "c.bin": b"PK\x03\x04", "d.bin": b"hello cos\nsystem\n."}.items():
        (tmp_path / name).write_bytes(data)
        assert imports(tmp_path / name) == ()


def test_a_zip_of_names_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(Calls(os.popen, "true")))
        archive.writestr("archive/\xe9", b"")
    path.write_bytes(path.read_bytes().replace("\xe9".encode(), b"\x85\x85"))
    assert imports(path) == ()
    assert is_zip_without_pickles(path)  # which `inspect --check` tells


def test_what_weights_need_is_not_told() -> None:
    written = Path("fixtures/torch/written")
    assert imports(written / "weights.bin") == imports(written / "weights.old.bin") == ()


def test_a_name_is_dangerous_by_its_module() -> None:
    assert all(map(is_dangerous, ("builtins.eval", "__builtin__.exec", "os.path.join", "torch.hub.load", UNKNOWN)))
    assert not any(map(is_dangerous, ("builtins.set", "transformers.training_args.TrainingArguments", "osprey.x")))
