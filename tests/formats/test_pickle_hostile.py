"""Pickles made to do harm: each is refused, by the name of what it wants, and nothing of it runs."""

from __future__ import annotations

import contextlib
import os
import pickle
import pickletools
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpttool.containers.pickle as reader
from ckpttool.containers.paddle_pickle import read_paddle, read_pickle
from ckpttool.errors import CkptError, ConflictError, CorruptError, IncompleteError, UnsupportedError
from tests.helpers import sample


def text(value: str) -> bytes:
    data = value.encode()
    return b"\x8c" + bytes([len(data)]) + data


def name(module: str, attribute: str) -> bytes:
    return text(module) + text(attribute) + b"\x93"


def write(path: Path, body: bytes, protocol: int = 4) -> Path:
    path.write_bytes(b"\x80" + bytes([protocol]) + body + b".")
    return path


class Runs:
    """Pickles as a call."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


def module(called: str) -> bytes:
    """A call of ``called`` with "touch CANARY", in whichever protocol can say it."""
    first, _, last = called.rpartition(".")
    return name(first, last) + text("touch CANARY") + b"\x85R"


TOUCH = "open('CANARY', 'w')"
CALLS = {
    "os.system": module("os.system"),
    "posix.system": module("posix.system"),
    "subprocess.Popen": module("subprocess.Popen"),
    "subprocess.check_output": module("subprocess.check_output"),
    "builtins.exec": name("builtins", "exec") + text(TOUCH) + b"\x85R",
    "builtins.eval": name("builtins", "eval") + text(TOUCH) + b"\x85R",
    "builtins.open": name("builtins", "open") + text("CANARY") + text("w") + b"\x86R",
    "builtins.getattr": name("builtins", "getattr") + name("builtins", "tuple") + text("mro") + b"\x86R",
    "builtins.__import__": name("builtins", "__import__") + text("antigravity") + b"\x85R",
    "__builtin__.eval": b"c__builtin__\neval\n" + text(TOUCH) + b"\x85R",
    "__builtin__.apply": b"c__builtin__\napply\n" + text(TOUCH) + b"\x85R",
    "numpy.load": name("numpy", "load") + text("CANARY") + b"\x85R",
    "numpy.f2py.diagnose.run": name("numpy.f2py.diagnose", "run") + b")R",
    "numpy.testing._private.utils.runstring": name("numpy.testing._private.utils", "runstring") + b")R",
    "importlib.import_module": name("importlib", "import_module") + text("antigravity") + b"\x85R",
    "operator.attrgetter": name("operator", "attrgetter") + text("system") + b"\x85R",
    "torch._utils._rebuild_tensor_v2": name("torch._utils", "_rebuild_tensor_v2") + b")R",
    "paddle.distributed.checkpoint.metadata.os.system": name("paddle.distributed.checkpoint.metadata", "os.system"),
    # The allowed names, taken apart otherwise.
    "numpy.core.multiarray._reconstruct": name("numpy", "core.multiarray._reconstruct") + b")R",
    "collections.OrderedDict.fromkeys": name("collections", "OrderedDict.fromkeys") + b")R",
    "pickle.loads": name("pickle", "loads") + b"C\x02N.\x85R",
    "_codecs.lookup": name("_codecs", "lookup") + text("x") + b"\x85R",
}


@pytest.mark.parametrize("called", CALLS)
def test_calls_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, called: str) -> None:
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path / "x", CALLS[called])
    with pytest.raises(UnsupportedError) as e:
        read_pickle(path)
    assert f"`{called}`" in e.value.what
    assert str(path) in e.value.where[0]
    assert "[byte " in e.value.where[0]
    assert "nothing in the file was run" in str(e.value.hint)
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_what_a_real_pickler_makes_of_an_attack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for protocol in (2, 3, 4, 5):
        value = {"w": np.zeros(3), "b": Runs(os.system, "touch CANARY")}
        Path("x").write_bytes(pickle.dumps(value, min(protocol, 4)))
        with pytest.raises(UnsupportedError, match=r"`posix\.system`"):
            read_paddle(Path("x"))
        assert not Path("CANARY").exists()
    # The canary would sing: the same file does run where it is unpickled.
    pickle.loads(Path("x").read_bytes())  # noqa: S301  # made above
    assert Path("CANARY").exists()


def test_no_name_of_the_file_reaches_the_terminal_as_it_is(tmp_path: Path) -> None:
    path = write(tmp_path / "x", name("os\x1b[31m", "a\nb"))
    with pytest.raises(UnsupportedError) as e:
        read_pickle(path)
    assert e.value.what.isprintable()
    path = write(tmp_path / "x", name("m" * 250, "n"))
    with pytest.raises(UnsupportedError) as e:
        read_pickle(path)
    assert len(e.value.what) < 250


OPCODES = {
    "INST": b"(" + text("touch CANARY") + b"ios\nsystem\n",
    "OBJ": b"(" + name("builtins", "eval") + text(TOUCH) + b"o",
    "NEWOBJ_EX": name("builtins", "tuple") + b")}\x92",
    "EXT1": b"\x82\x01",
    "EXT2": b"\x83\x01\x00",
    "EXT4": b"\x84\x01\x00\x00\x00",
    "PERSID": b"Ptouch\n",
    "BINPERSID": text("touch") + b"Q",
    "NEXT_BUFFER": b"\x97",
    "READONLY_BUFFER": b"N\x98",
    "BYTEARRAY8": b"\x96" + bytes(8),
    "POP": b"NN0",
    "DUP": b"N2",
    "STRING": b"S'a'\n",
    "UNICODE": b"Va\n",
    "INT": b"I1\n",
    "LONG": b"L1L\n",
    "FLOAT": b"F1\n",
    "BINSTRING": b"T\x01\0\0\0a",
    "SHORT_BINSTRING": b"U\x01a",
    "GET": b"g0\n",
    "PUT": b"Np0\n",
    "LIST": b"(l",
    "DICT": b"(d",
}


@pytest.mark.parametrize("opcode", OPCODES)
def test_opcodes_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opcode: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UnsupportedError, match=f"opcode {opcode},"):
        read_pickle(write(tmp_path / "x", OPCODES[opcode]))
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_every_opcode_is_either_run_or_refused_by_its_name(tmp_path: Path) -> None:
    known = {o.code.encode("latin1"): o.name for o in pickletools.opcodes}
    run = reader._TABLE.keys() | {b"\x80", b"."}
    assert run < known.keys()
    for code in known.keys() - run:
        with pytest.raises(UnsupportedError, match=f"opcode {known[code]}, "):
            read_pickle(write(tmp_path / "x", code))


def test_bytes_that_are_no_opcode(tmp_path: Path) -> None:
    for code in set(range(256)) - {o.code.encode("latin1")[0] for o in pickletools.opcodes}:
        with pytest.raises(CorruptError, match="not a pickle opcode"):
            read_pickle(write(tmp_path / "x", bytes([code])))


NDARRAY, RECONSTRUCT = name("numpy", "ndarray"), name("numpy.core.multiarray", "_reconstruct")
EMPTY = RECONSTRUCT + NDARRAY + b"K\x00\x85C\x01b\x87R"
F4 = name("numpy", "dtype") + text("f4") + b"\x89\x88\x87R"
RECORD = name("paddle.distributed.checkpoint.metadata", "Metadata")


def array(shape: bytes, dtype: bytes, data: bytes, fortran: bytes = b"\x89") -> bytes:
    return EMPTY + b"(K\x01" + shape + dtype + fortran + data + b"tb"


MISUSED: dict[str, tuple[bytes, str]] = {
    "eval of other text": (name("builtins", "eval") + text("data ") + b"}" + text("data") + b"Ns\x86R", "run code"),
    "eval without data": (name("builtins", "eval") + text("data") + b"}\x86R", "run code"),
    "eval with more": (name("builtins", "eval") + text("data") + b"}" + text("data") + b"Ns}\x87R", "run code"),
    "eval of a tuple": (name("builtins", "eval") + b")\x85R", "run code"),
    "other codec": (name("_codecs", "encode") + text("x") + text("rot13") + b"\x86R", "_codecs.encode"),
    "codec by itself": (name("_codecs", "encode") + b")R", "_codecs.encode"),
    "bytes of something": (name("builtins", "bytes") + b"K\x05\x85R", "builtins.bytes"),
    "tuple of a list": (name("builtins", "tuple") + b"]\x85R", "builtins.tuple"),
    "tuple of nothing": (name("builtins", "tuple") + b")R", "builtins.tuple"),
    "OrderedDict of text": (name("collections", "OrderedDict") + text("ab") + b"\x85R", "OrderedDict"),
    "OrderedDict of triples": (name("collections", "OrderedDict") + b"](NNN\x87e\x85R", "OrderedDict"),
    "subclass of ndarray": (RECONSTRUCT + name("builtins", "tuple") + b"K\x00\x85C\x01b\x87R", "_reconstruct"),
    "a tuple for a class": (RECONSTRUCT + text("numpy") + text("ndarray") + b"\x86K\x00\x85C\x01b\x87R", "_reconstr"),
    "ndarray called": (NDARRAY + b"K\x05\x85R", "numpy.ndarray"),
    "record called": (RECORD + b")R", "Metadata"),
    "record with arguments": (RECORD + b"N\x85\x81", "Metadata"),
    "new tuple": (name("builtins", "tuple") + b")\x81", "builtins.tuple"),
    "new array": (NDARRAY + b")\x81", "numpy.ndarray"),
    "scalar of text": (name("numpy.core.multiarray", "scalar") + F4 + text("abcd") + b"\x86R", "scalar"),
    "state of a dict": (b"}}b", "BUILD"),
    "state of a list": (b"]}b", "BUILD"),
    "state of a class": (NDARRAY + b"}b", "BUILD"),
    "array from a list": (array(b"K\x01\x85", F4, b"]"), "not bytes"),
    "array from a text": (array(b"K\x01\x85", F4, text("abcd")), "not bytes"),
    "a class as a value": (b"]" + RECORD + b"a", "itself"),
    "a class as a key": (b"}" + RECORD + b"Ns", "itself"),
    "a list as a key": (b"}]Ns", "key of type list"),
    "an array as a key": (b"}" + array(b")", F4, b"C\x04abcd") + b"Ns", "key of type PickledArray"),
    "deep key": (b"}N\x85\x85\x85Ns", "key of type tuple"),
}


@pytest.mark.parametrize("case", MISUSED)
def test_allowed_names_used_otherwise(tmp_path: Path, case: str) -> None:
    body, words = MISUSED[case]
    with pytest.raises(UnsupportedError, match=words) as e:
        read_pickle(write(tmp_path / "x", body))
    assert e.value.hint


CONTRADICTORY: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "0 values"),
    "two values": (b"NN", "2 values"),
    "open mark": (b"(N", "open marks"),
    "no mark": (b"Nt", "mark"),
    "empty stack": (b"s", "empty stack"),
    "tuple of too few": (b"N\x86", "empty stack"),
    "tuple across a mark": (b"N(N\x86", "empty stack"),
    "get before put": (b"h\x00", "never remembered"),
    "put far away": (b"Nr\xff\xff\xff\x7f", "remembers value"),
    "call of a number": (b"K\x01)R", "calls a int"),
    "call with a list": (name("builtins", "tuple") + b"]R", "not a tuple"),
    "instance of a number": (b"K\x01)\x81", "not a class"),
    "a class named by numbers": (b"K\x01K\x02\x93", "not a string"),
    "item for a list": (b"]NNs", "items for a dict"),
    "item for a dict": (b"}Na", "items for a list"),
    "item for a tuple": (b")Na", "items for a list"),
    "key without value": (b"}(Nu", "without a value"),
    "key twice": (b"}(" + text("a") + b"N" + text("a") + b"Nu", "`a` twice"),
    "text that is none": (b"\x8c\x01\xff", "not UTF-8"),
    "endless name": (b"c" + b"a" * 1000, "512 bytes"),
    "negative size": (b"\x8b\xff\xff\xff\xff", "-1 bytes"),
    "second protocol": (b"\x80\x04N", "second pickle"),
    "array without elements": (b"]" + EMPTY + b"a", "before its elements"),
    "array alone": (EMPTY, "before its elements"),
    "array in a state": (RECORD + b")\x81}" + text("a") + EMPTY + b"sb", "before its elements"),
    "elements twice": (array(b")", F4, b"C\x04abcd") + b"(K\x01)" + F4 + b"\x89C\x04abcdtb", "state of an array"),
    "array of a text's dtype": (array(b")", text("f4"), b"C\x04abcd"), "state of an array"),
    "state that is not a tuple": (EMPTY + b"}b", "state of an array"),
    "negative shape": (array(b"J\xff\xff\xff\xff\x85", F4, b"C\x04abcd"), "shape"),
    "shape of bools": (array(b"\x88\x85", F4, b"C\x04abcd"), "shape"),
    "huge shape": (array(b"\x8a\x09" + bytes(8) + b"\x01\x85", F4, b"C\x00"), "shape"),
    "shape of 65 axes": (array(b"(" + b"K\x01" * 65 + b"t", F4, b"C\x04abcd"), "shape"),
    "too few bytes": (array(b"K\x02\x85", F4, b"C\x04abcd"), "needs 8 bytes, the pickle has 4"),
    "too many bytes": (array(b"K\x00\x85", F4, b"C\x04abcd"), "needs 0 bytes, the pickle has 4"),
    "scalar of another size": (
        name("numpy.core.multiarray", "scalar") + F4 + b"C\x02ab\x86R",
        "numpy number of f4 has 2 bytes",
    ),
    "array's version": (EMPTY + b"(K\x05)" + F4 + b"\x89C\x04abcdtb", "version that numpy"),
    "dtype's state": (F4 + b"}b", "state of a numpy dtype"),
    "dtype's version": (
        F4 + b"(K\x05" + text("<") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb",
        "version that numpy",
    ),
    "dtype's alignment": (F4 + b"(K\x03" + text("<") + b"NNNK\x01\x85K\x01K\x00tb", "state of a numpy dtype"),
    "dtype's state of ten": (F4 + b"(K\x03" + text("<") + b"NNNK\x01K\x01K\x00NNtb", "state of a numpy dtype"),
    "record's state": (RECORD + b")\x81]b", "state of a Metadata"),
    "record's state twice": (RECORD + b")\x81}" + text("a") + b"Nsb}b", "state of a Metadata"),
    "bytes beyond latin1": (
        array(b")", F4, name("_codecs", "encode") + text("\u0100bcd") + text("latin1") + b"\x86R"),
        "beyond U",
    ),
}


@pytest.mark.parametrize("case", CONTRADICTORY)
def test_contradictions(tmp_path: Path, case: str) -> None:
    body, words = CONTRADICTORY[case]
    with pytest.raises((CorruptError, ConflictError), match=words):
        read_pickle(write(tmp_path / "x", body, 2))


@pytest.mark.parametrize(
    "head",
    [b"\x8e", b"\x8d", b"\x95", b"B", b"X", b"\x8b"],
    ids=["BINBYTES8", "BINUNICODE8", "FRAME", "BINBYTES", "BINUNICODE", "LONG4"],
)
def test_sizes_beyond_the_file(tmp_path: Path, head: bytes) -> None:
    size = b"\xff" * 7 + b"\x7f" if head in (b"\x8e", b"\x8d", b"\x95") else b"\xff\xff\xff\x7f"
    with pytest.raises((IncompleteError, UnsupportedError), match=r"cut off|LONG4"):
        read_pickle(write(tmp_path / "x", head + size))


# -- little that becomes much


def laughs(levels: int) -> bytes:
    """Lists of ten times the list before: 10**levels values in a few bytes a level."""
    body = b"(]\x94"
    for level in range(levels):
        body += b"](" + (b"h" + bytes([level])) * 10 + b"e\x94"
    return body + b"t"


def doubled(levels: int) -> bytes:
    """Pairs of the pair before."""
    body = b"N\x85\x94"
    for level in range(levels):
        body += (b"h" + bytes([level])) * 2 + b"\x86\x94"
    return b"(" + body + b"t"


GREEDY: dict[str, tuple[bytes, str]] = {
    "a list that holds itself": (b"]\x94h\x00a", "holds itself"),
    "a dict that holds itself": (b"}\x94" + text("a") + b"h\x00s", "holds itself"),
    "a record that holds itself": (RECORD + b")\x81\x94}" + text("a") + b"h\x00sb", "holds itself"),
    "a record as its own key": (b"}\x94" + RECORD + b")\x81}" + text("a") + b"h\x00sbNs", "holds itself"),
    "lists that hold each other": (b"(]\x94]\x94h\x00ah\x00h\x01at", "holds itself"),
    "a billion laughs": (laughs(12), "very many places"),
    "laughing tuples": (doubled(50), "very many places"),
    "nested lists": (b"]" * 100_000 + b"a" * 99_999, "nested deeper"),
    "nested tuples": (b"N" + b"\x85" * 100_000, "nested deeper"),
    "nested dicts": ((b"}" + text("a")) * 10_000 + b"N" + b"s" * 10_000, "nested deeper"),
    "nested tuples of bytes": (b"C\x01a" + b"\x85" * 100_000, "nested deeper"),
    "a huge text": (b"X" + struct.pack("<I", 1 << 25) + bytes(1 << 25), "not an array"),
    "huge bytes": (b"B" + struct.pack("<I", 1 << 25) + bytes(1 << 25), "not an array"),
    "a huge number": (b"\x8b" + struct.pack("<i", 1 << 20) + b"\x7f" * (1 << 20), "LONG4"),
}


@pytest.mark.sample(
    "a list that holds itself",
    "a dict that holds itself",
    "a record that holds itself",
    "a record as its own key",
    "lists that hold each other",
    "a billion laughs",
    "nested dicts",
    "nested tuples of bytes",
    "a huge text",
    "huge bytes",
    "a huge number",
)
@pytest.mark.parametrize("case", GREEDY)
def test_little_that_becomes_much(tmp_path: Path, case: str) -> None:
    body, words = GREEDY[case]
    start = time.process_time()
    with pytest.raises(UnsupportedError, match=words):
        read_pickle(write(tmp_path / "x", body))
    # A second on an idle core, for the worst.
    assert time.process_time() - start < 20


def test_values_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "MAX_VALUES", 10_000)
    many = 200_000
    for body in (
        b"N" * many,
        b"(" * many,
        b"(NN" * many,
        b"](" + b"N" * many + b"e",
        b"]" + b"Na" * many,
        b"]" + b"(NNe" * many,
        b"N" + b"\x94" * many,
        b"]" + b"]a" * many,
        b"]" + b")\x85a" * many,
    ):
        with pytest.raises(UnsupportedError, match=r"more than (10,000 values|4,096 open marks)"):
            read_pickle(write(tmp_path / "x", body))


def test_texts_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "MAX_TEXTS", 10_000)
    short = text("a" * 200)
    for body in (b"](" + short * 100 + b"e", b"](" + (b"X\xd0\x07\0\0" + b"a" * 2000) * 6 + b"e"):
        with pytest.raises(UnsupportedError, match="more than 10,000 bytes"):
            read_pickle(write(tmp_path / "x", body))


def test_nothing_is_copied_again_and_again(tmp_path: Path) -> None:
    """A large value that is remembered once and handed to many calls."""
    fields = b"}(" + b"".join(text(str(i)) + b"N" for i in range(5000)) + b"u\x94"
    body = b"](" + fields + b"".join(RECORD + b")\x81h\x00b" for _ in range(5000)) + b"e"
    with pytest.raises(CorruptError, match="state of a Metadata"):
        read_pickle(write(tmp_path / "x", body))
    # One text, decoded for each of many arrays.
    long = b"X" + struct.pack("<I", 1000) + b"a" * 1000 + b"\x94"
    encode = name("_codecs", "encode") + b"\x94" + text("latin1") + b"\x94"
    u1 = name("numpy", "dtype") + text("u1") + b"\x89\x88\x87R\x94"
    one = array(b"M\xe8\x03\x85", b"h\x03", b"h\x01h\x00h\x02\x86R")
    with pytest.raises(CorruptError, match="share their text"):
        read_pickle(write(tmp_path / "x", b"](" + long + encode + u1 + one * 1000 + b"e", 2))


def test_a_large_text_is_decoded_once_for_all_its_arrays(tmp_path: Path) -> None:
    path = tmp_path / "x"
    data = np.arange(5000, dtype="u1")
    path.write_bytes(pickle.dumps({"a": data, "b": data.view()}, 2))
    a, b = read_pickle(path).values()
    assert (a.nbytes, b.nbytes) == (5000, 5000)


def test_memory_stays_small(tmp_path: Path) -> None:
    """A tensor of 100 MB in protocol 2, whose text cannot be used in place."""
    size = 100_000_000
    head = pickle.dumps({"w": np.zeros(5, "u1")}, 2)
    at = head.index(b"X\x05\0\0\0\0\0\0\0\0")
    before = head[:at].replace(b"K\x05\x85", b"J" + struct.pack("<i", size) + b"\x85")
    path = tmp_path / "x"
    with path.open("wb") as f:
        f.write(before + b"X" + struct.pack("<I", size))
        f.seek(size, os.SEEK_CUR)
        f.write(head[at + 10 :])
    code = """
import sys
from pathlib import Path
from ckpttool.containers.paddle_pickle import read_paddle
a = read_paddle(Path(sys.argv[1])).tensors["w"]
assert a.nbytes == a.file.encoding.size == 100_000_000, a
print(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
"""
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    # Kilobytes; Python itself has 15,000.
    assert int(done.stdout) < 60_000


def test_noise(tmp_path: Path) -> None:
    """Any bytes after the head of a pickle: a value or an error, never another exception, never a hang."""
    random = np.random.default_rng(5)
    codes = list(reader._TABLE)
    pieces = [EMPTY, F4, RECORD, text("a"), array(b")", F4, b"C\x04abcd"), b"h\x00", b"K\x01", b"N", *codes]
    for _ in range(sample.examples(3000)):
        body = b"".join(pieces[i] for i in random.integers(0, len(pieces), random.integers(1, 40)))
        path = write(tmp_path / "x", body)
        with contextlib.suppress(CkptError):
            repr(read_pickle(path))
