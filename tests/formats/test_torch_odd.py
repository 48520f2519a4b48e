"""Whatever lies beside the model in a file of torch.save, the model is read, and the rest is named in a note.

The files are pickled by Python itself; the one tensor is written by hand, as torch.save does it.
"""

from __future__ import annotations

import collections
import datetime as dt
import decimal
import enum
import fractions
import functools
import itertools
import operator
import os
import pathlib
import pickle
import re
import types
import uuid
import zipfile
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest

from tests.helpers.command import ckpttool
from tests.helpers.tensorfile import read

WEIGHT = np.arange(6, dtype="<f4").reshape(2, 3)


def text(s: str) -> bytes:
    return b"X" + len(s).to_bytes(4, "little") + s.encode()


TENSOR = (
    b"ctorch._utils\n_rebuild_tensor_v2\n(("
    + text("storage")
    + b"ctorch\nFloatStorage\n"
    + text("0")
    + text("cpu")
    + b"K\x06tQK\x00(K\x02K\x03t(K\x03K\x01t\x89ccollections\nOrderedDict\n)RtR"
)


def save(path: Path, odd: Any, protocol: int, *, inside: bool = False) -> None:
    """``odd`` beside the dict of tensors, or ``inside`` of it."""
    value = text("odd") + pickle.dumps(odd, protocol)[2:-1]
    model = text("a.weight") + TENSOR
    program = value + model if inside else value + text("model") + b"}(" + model + b"u"
    path.parent.mkdir(exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80" + bytes([protocol]) + b"}(" + program + b"u.")
        archive.writestr("archive/data/0", WEIGHT.tobytes())


class Node:
    """Of a configuration: it knows its parent."""

    def __init__(self, parent: Node | None = None) -> None:
        self.parent, self.inner = parent, [(self,)]


class Keywords:
    a: int

    def __new__(cls, *, a: int) -> Self:
        self = object.__new__(cls)
        self.a = a
        return self

    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, int]]:
        return (), {"a": self.a}


class Slots:
    __slots__ = ("a", "b")

    def __init__(self) -> None:
        self.a, self.b = 1, 2


class Listed(list[int]):
    pass


class Color(enum.Enum):
    RED = 1


class Bits(enum.Flag):
    A = 1
    B = 2


Pair = collections.namedtuple("Pair", "a b")  # noqa: PYI024 - what people pickle
LISTED = Listed([1, 2])
LISTED.more = 3  # type: ignore[attr-defined]
HELD: dict[str, Any] = {}
HELD["of"] = [HELD]

ODD: dict[str, Any] = {
    "range": range(0, 9, 2),
    "types": [int, float, str, bytes, dict, list, type(None), type(...), Color, Slots],
    "ellipsis": ...,
    "not implemented": NotImplemented,
    "partial": functools.partial(int, base=2),
    "functions": [len, print, Slots.__init__],
    "exception": ValueError("x"),
    "operators": [operator.itemgetter(1), operator.attrgetter("a"), operator.methodcaller("x")],
    "counter": itertools.count(3),
    "path": pathlib.PurePosixPath("a/b"),
    "date": [dt.datetime(2020, 1, 1, tzinfo=dt.UTC), dt.timedelta(1)],
    "numbers": [decimal.Decimal("1.5"), fractions.Fraction(1, 3), uuid.UUID(int=7), 1 << 300, 1 + 2j],
    "sets": [{1}, frozenset({2}), bytearray(b"abc"), slice(1, 2)],
    "containers": [collections.deque([1], 3), collections.Counter("a"), collections.defaultdict(int, a=1)],
    "namespace": types.SimpleNamespace(a=1),
    "alias": list[int],
    "pattern": re.compile("a+"),
    "dtypes": [np.dtype("f4"), np.dtype(">f4"), np.dtype("U3"), np.dtype([("a", "f4"), ("b", "<i8")])],
    "numpy's": [np.float32, np.float32(1), np.datetime64("2020-01-01"), np.str_("a"), np.random.default_rng(0)],
    "keywords": Keywords(a=1),
    "slots": Slots(),
    "list": LISTED,
    "enums": [Color.RED, Bits.A | Bits.B],
    "pair": Pair(1, 2),
    "keys": [{1.5: 2}, {float("nan"): 1}, {(1, (2, 3)): 1}, {1 << 60: 1}, {int: 1}, {...: 1}, {Pair(1, 2): 3}],
    "more keys": [{Color.RED: 1}, {range(3): 1}, {frozenset({1}): 1}, {dt.date(2020, 1, 1): 1}],
    "node": Node(Node()),
    "dict of itself": HELD,
    "long": ["x" * (17 << 20), b"x" * (17 << 20)],
}
ARRAYS: dict[str, Any] = {
    "numbers": np.ones(3),
    "texts": np.array(["a", "b"]),
    "objects": np.array([1, "a", None], object),
    "big-endian": np.ones(3, ">f4"),
    "records": np.zeros(2, [("a", "f4"), ("b", "<i4")]),
    "times": np.array(["2020-01-01"], "datetime64[D]"),
    "masked": np.ma.masked_array([1, 2], mask=[False, True]),
}


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("case", [*ODD, *(f"array of {n}" for n in ARRAYS)])
def test_odd_values_beside_a_model(case: str, protocol: int, tmp_path: Path) -> None:
    odd = ODD[case] if case in ODD else ARRAYS[case.removeprefix("array of ")]
    save(tmp_path / "src" / "pytorch_model.bin", odd, protocol)
    done = ckpttool("reshard", tmp_path / "src", tmp_path / "dst", "--only", "model")
    assert done.code == 0, done.err
    assert "read from `model`; left out: odd" in done.err
    (got,) = read(tmp_path / "dst" / "model.safetensors").items()
    assert (got[0], got[1].bits.tobytes()) == ("a.weight", WEIGHT.tobytes())


@pytest.mark.parametrize("case", ODD)
def test_odd_values_among_the_tensors(case: str, tmp_path: Path) -> None:
    save(tmp_path / "src" / "pytorch_model.bin", ODD[case], 4, inside=True)
    done = ckpttool("reshard", tmp_path / "src", tmp_path / "dst")
    assert done.code == 0, done.err
    assert "skipped, not tensors: odd" in done.err


@pytest.mark.parametrize("case", [n for n in ARRAYS if n != "masked"])
def test_an_array_among_the_tensors_is_not_left_out(case: str, tmp_path: Path) -> None:
    """It may be a weight, whatever it is made of."""
    save(tmp_path / "src" / "pytorch_model.bin", ARRAYS[case], 4, inside=True)
    done = ckpttool("reshard", tmp_path / "src", tmp_path / "dst")
    assert (done.code, "`odd` is a numpy array, not a tensor" in done.err) == (1, True)
    assert not (tmp_path / "dst").exists()


CODE: dict[str, Any] = {
    "eval": eval,
    "open": open,
    "setattr": setattr,
    "import": __import__,
    "system": os.system,
    "a partial of it": functools.partial(os.system, "true"),
    "a key": {os.system: 1},
}


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("case", CODE)
def test_what_runs_code_is_still_refused(case: str, protocol: int, tmp_path: Path) -> None:
    """Although nothing would run here: the file was made to harm whoever loads it elsewhere."""
    save(tmp_path / "src" / "pytorch_model.bin", CODE[case], protocol)
    done = ckpttool("reshard", tmp_path / "src", tmp_path / "dst", "--only", "model")
    assert (done.code, "is not part of a checkpoint of tensors" in done.err) == (1, True)
