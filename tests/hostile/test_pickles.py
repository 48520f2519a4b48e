"""Pickles that call, in every place where a command meets one; zip files; what is said of pickles that are not read.

What single opcodes do is in tests/formats/test_pickle_hostile.py.
"""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.hostile.court import COMMANDS, EVERYTHING, SAMPLE, Court, safetensors, tensor

pytestmark = SAMPLE


class _Bait:
    """Unpickled, it makes a file called CANARY."""

    def __init__(self, function: Any = os.system, *args: Any) -> None:
        self.call = function, args or ("touch CANARY",)

    def __reduce__(self) -> Any:
        return self.call


class _State:
    def __setstate__(self, state: Any) -> None:
        raise AssertionError("a state was set")


def _zip(data: bytes, name: str = "archive/data.pkl", method: int = zipfile.ZIP_STORED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as z:
        z.writestr(name, data)
        z.writestr("../../CANARY", "x")
    return out.getvalue()


CALL = pickle.dumps({"w": _Bait()}, 4)
BAITS: dict[str, bytes] = {
    "REDUCE": CALL,
    "protocol 0": pickle.dumps({"w": _Bait()}, 0),
    "protocol 2": pickle.dumps({"w": _Bait()}, 2),
    "protocol 5": pickle.dumps({"w": _Bait()}, 5),
    "BUILD": pickle.dumps({"w": _State()}, 4),
    "INST": b"(S'touch CANARY'\nios\nsystem\n.",
    "eval": pickle.dumps({"w": _Bait(eval, "open('CANARY','w')")}, 4),
    "laughs": b"\x80\x04(]\x94" + b"".join(b"](" + (b"h" + bytes([i])) * 10 + b"e\x94" for i in range(12)) + b"t.",
    "nested": b"\x80\x04" + b"]" * 20_000 + b"a" * 19_999 + b".",
    "a size of 2^63": b"\x80\x04}\x8c\x01w\x8e" + b"\xff" * 7 + b"\x7f",
    "a memo of 2^31": b"\x80\x04Nr\xff\xff\xff\x7f.",
    "a number of 2 GB": b"\x80\x04\x8b\xff\xff\xff\x7f",
    "a frame of 2^63": b"\x80\x04\x95" + b"\xff" * 7 + b"\x7f}.",
    "names that steer": pickle.dumps({"\x1b[2J\u202e": _Bait()}, 4),
    "torch's zip": _zip(CALL),
    "a zip bomb": _zip(bytes(10_000_000), method=zipfile.ZIP_DEFLATED),
    "gzip": b"\x1f\x8b\x08\x00" + bytes(100),
    "numpy": b"\x93NUMPY\x01\x00v\x00{'descr': '|O', 'fortran_order': False, 'shape': (1,), }" + b" " * 50 + CALL,
    "cut off": CALL[:-5],
    "nothing": b"",
}
PLACES = (
    *(
        "model_state.pdparams",
        "model.pdopt",
        "0.metadata",
        "0_0.distcp",
        "x.pdiparams",
        "x.pdiparams.info",
        "x.pdmodel",
    ),
    *("model_state.tp00.pdparams", "optimizer.pdopt", "scheduler.pdparams", "master_weights.pdparams"),
    *("pytorch_model.bin", "model.pt", "consolidated.00.pth", "optimizer.pt", "rng_state.pth", "training_args.bin"),
    *("model.safetensors", "model.ckpt", "weights.npz", "x.pdckpt", "x.pdtensor"),
)


@pytest.mark.sample(
    "REDUCE-model_state.pdparams",
    "protocol 0-0.metadata",
    "protocol 5-x.pdmodel",
    "BUILD-optimizer.pdopt",
    "INST-master_weights.pdparams",
    "eval-model.pt",
    "nested-training_args.bin",
    "a size of 2^63-model.ckpt",
    "a memo of 2^31-x.pdckpt",
    "a frame of 2^63-model_state.pdparams",
    "names that steer-0.metadata",
    "torch's zip-x.pdiparams",
    "a zip bomb-x.pdmodel",
    "gzip-optimizer.pdopt",
    "numpy-master_weights.pdparams",
)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("bait", BAITS)
def test_nothing_is_executed(tmp_path: Path, bait: str, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, as SRC itself, and beside a model that is sound."""
    court = Court(tmp_path)
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    (court.src / place).write_bytes(BAITS[bait])
    some = ("inspect", "check", "reshard", "convert")
    for target in (court.src, court.src / place):
        for _ in court.try_all(some, target):
            assert not any(work.iterdir())
    if place != "model.safetensors":
        (court.src / "model.safetensors").write_bytes(safetensors({"a": tensor()}, b"abcd"))
        (court.src / "0_0.safetensors").write_bytes(safetensors({"a": tensor()}, b"abcd"))
        for _ in court.try_all(COMMANDS if bait == "REDUCE" and EVERYTHING else ("reshard",)):
            assert not any(work.iterdir())
    assert not (court.src / "CANARY").exists()
    court.run("convert-json", court.src / place, court.dst, "--names", court.src / place)


def test_the_bait_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    pickle.loads(CALL)  # noqa: S301 - made above
    assert (tmp_path / "CANARY").exists()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth", "model.ckpt"])
def test_what_is_said_of_pickles_that_are_not_read(tmp_path: Path, name: str) -> None:
    court = Court(tmp_path)
    (court.src / name).write_bytes(CALL)
    done = court.run("inspect", court.src)
    assert done.code == 1
    assert name in done.err or "safetensors" in done.err
    assert "hint: " in done.err
