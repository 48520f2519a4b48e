"""Tensors that are decoded while they are read: quantized moments, and texts in pickles of protocol 2."""

from __future__ import annotations

import itertools
import json
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpttool
from ckpttool.containers.paddle_pickle import read_paddle
from ckpttool.core import encodings
from ckpttool.core.encodings import Decoder, Encoding, Moment, Span, Text
from ckpttool.errors import CorruptError
from ckpttool.execute.files import FilePool, SourceReadError
from ckpttool.execute.hashing import hash_range
from ckpttool.execute.plan_json import decode, encode
from ckpttool.execute.reader import read_block
from tests.helpers.command import ckpttool as command
from tests.helpers.command import reshard

FIXTURES = Path(__file__).parents[2] / "fixtures"
QUANTIZED = FIXTURES / "paddle_unified" / "nlp_llama_bf16_tp2_quantO1"
Array = np.ndarray[Any, np.dtype[Any]]


def moments(folder: Path, shape: tuple[int, ...], *, packed: bool) -> tuple[Encoding, Array]:
    """Both moments of a parameter, and their values worked out in one go."""
    random = np.random.default_rng(len(shape))
    wide = (shape[0] // 32, *shape[1:]) if packed else shape[1:2]
    one, low, high = (random.uniform(a, a + 1, wide).astype("<f4") for a in (1, 9, 3))
    codes = [random.integers(0, 256, shape, dtype=np.uint8) for _ in range(2)]
    if packed:
        codes[1] = codes[0]
        first, ratio = (codes[0].view(np.int8) >> 4) / np.float32(7), (codes[0] & 15) / np.float32(15)
        a, b, c = (np.repeat(s, 32, axis=0) for s in (one, low, high))
    else:
        first, ratio = codes[0].view(np.int8) / np.float32(127), codes[1] / np.float32(255)
        a, b, c = (s.reshape(wide + (1,) * (len(shape) - 2)) for s in (one, low, high))
    r = ratio.astype("f4") * (c - b) + b
    values = np.stack([first.astype("f4") * a, np.square(np.float32(1) / r - np.float32(1e-8))])
    parts, spans = [*codes, one, low, high], []
    path = folder / "moments"
    with path.open("wb") as f:
        for p in parts:
            spans.append(Span(str(path), f.tell(), p.nbytes))
            f.write(p.tobytes())
    made = Encoding("moments", str(path))
    made.parts.append(Moment(0, shape, spans[0], (spans[2],), packed))
    made.parts.append(Moment(made.size, shape, spans[1], (spans[3], spans[4]), packed))
    return made, values.astype("<f4").reshape(-1)


def texts(folder: Path) -> tuple[Encoding, Array]:
    """Long and short arrays of a pickle of protocol 2, one behind the other."""
    random = np.random.default_rng(5)
    arrays = {str(n): random.integers(0, 256, n, dtype=np.uint8) for n in (1, 70_001, 9, 0, 8_192, 16_384, 1_500)}
    arrays["ascii"], arrays["high"] = np.full(9_000, 65, "u1"), np.full(9_000, 255, "u1")
    path = folder / "pickle"
    path.write_bytes(pickle.dumps(arrays, 2))
    read = read_paddle(path).tensors
    made = next(a.file.encoding for a in read.values() if a.file.encoding is not None)
    return made, np.concatenate([arrays[k] for k in sorted(read, key=lambda k: read[k].offset) if arrays[k].size])


CASES: dict[str, Callable[[Path], tuple[Encoding, Array]]] = {
    "text": texts,
    "matrix": lambda p: moments(p, (37, 50), packed=False),
    "vector": lambda p: moments(p, (1000,), packed=False),
    "three axes": lambda p: moments(p, (5, 7, 11), packed=False),
    "packed": lambda p: moments(p, (96, 21), packed=True),
    "packed vector": lambda p: moments(p, (320,), packed=True),
}


@pytest.mark.product
@pytest.mark.parametrize("block", [64, 1 << 14, 1 << 18])
@pytest.mark.parametrize("case", CASES)
def test_any_run_of_bytes(case: str, block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encodings, "BLOCK", max(block, 2 << 13) if case == "text" else block)
    made, values = CASES[case](tmp_path)
    whole = values.tobytes()
    assert made.size == len(whole)
    random = np.random.default_rng(9)
    with FilePool() as pool:
        for a, b in [(0, len(whole)), *np.sort(random.integers(0, len(whole), (60, 2))).tolist()]:
            for stop in {b, min(a + 3, b)}:
                out = bytearray(stop - a)
                cut = len(out) // 3
                pool.read(made, a, (memoryview(out)[:cut], memoryview(out)[cut:]))
                assert out == whole[a:stop], (a, stop)
    assert hash_range(made, 0, made.size) == hash_range(tmp_path_of(tmp_path, whole), 0, len(whole))


def tmp_path_of(folder: Path, data: bytes) -> Path:
    path = folder / "plain"
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("case", CASES)
def test_another_process_reads_the_same(case: str, tmp_path: Path) -> None:
    made, values = CASES[case](tmp_path)
    told = decode(json.loads(json.dumps(encode((made, "path")))))
    assert told[1] == "path"
    assert read_block(told[0], 0, (1,), (values.nbytes,), "U8").tobytes() == values.tobytes()


@pytest.mark.parametrize("dtype", ["<f4", "<u2"])
def test_columns_and_transposes(dtype: str, tmp_path: Path) -> None:
    full = np.random.default_rng(2).integers(0, 256, (300, 500, np.dtype(dtype).itemsize), dtype=np.uint8)
    full = full.view(dtype)[..., 0]
    path = tmp_path / "x"
    path.write_bytes(pickle.dumps({"a": full}, 2))
    a = read_paddle(path).tensors["a"]
    size, name = full.itemsize, "F32" if dtype == "<f4" else "U16"
    cut = read_block(a.file.contents, 30 * size, (500 * size, size), (300, 11), name)
    assert np.array_equal(cut.view(f"u{size}"), full[:, 30:41].view(f"u{size}"))
    turned = read_block(a.file.contents, 0, (size, 500 * size), (500, 300), name)
    assert np.array_equal(turned.view(f"u{size}"), full.T.view(f"u{size}"))


# -- checkpoints


def old_pickles(folder: Path) -> Path:
    """What Paddle's trainer wrote, and the same as protocol 2 has it."""
    shutil.copytree(FIXTURES / "paddle_zcc" / "nlp_tp2", folder)
    for path in folder.glob("*.pd*"):
        path.write_bytes(pickle.dumps(pickle.loads(path.read_bytes()), 2))  # noqa: S301 - a fixture
    return folder


def written(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir() if "safetensors" in p.name}


def test_opening_decodes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor is read (of a text, what is counted is not kept), and no file is made."""
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    old = old_pickles(tmp_path / "old")
    monkeypatch.setattr(Decoder, "read", None)
    monkeypatch.setattr(FilePool, "read", None)
    monkeypatch.setattr("tempfile.mkdtemp", None)
    before = set(tmp_path.rglob("*"))
    for path, name in ((QUANTIZED, "moments"), (old, "text")):
        opened = ckpttool.open(path)
        assert {f.encoding.name for f in opened.catalog.files if f.encoding} == {name}
        assert command("inspect", path).code == 0
    assert set(tmp_path.rglob("*")) == before


@pytest.mark.sample("('hf',)-('--workers', 3, '--memory', '4MiB')", "('unified', '--tp-out', 4)-('--workers', 1)")
@pytest.mark.parametrize("options", [(), ("--workers", 1), ("--workers", 3, "--memory", "4MiB")], ids=str)
@pytest.mark.parametrize("target", [("hf",), ("unified", "--tp-out", 1), ("unified", "--tp-out", 4)], ids=str)
def test_old_pickles_become_what_new_ones_do(target: tuple[Any, ...], options: tuple[Any, ...], tmp_path: Path) -> None:
    """Weights are turned and cut by rows and columns, moments are joined."""
    old = old_pickles(tmp_path / "old")
    reshard(FIXTURES / "paddle_zcc" / "nlp_tp2", tmp_path / "a", "--to", *target)
    reshard(old, tmp_path / "b", "--to", *target, *options, "--verify")
    assert written(tmp_path / "a") == written(tmp_path / "b") != {}
    same = command("inspect", "--diff", old, "--values", FIXTURES / "paddle_zcc" / "nlp_tp2")
    assert same.code == 0, same.out + same.err


def test_old_pickles_are_operands_in_other_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no process is forked, an encoding is told as JSON."""
    new, old = FIXTURES / "paddle_zcc" / "nlp_tp2", old_pickles(tmp_path / "old")
    other = shutil.copytree(new, tmp_path / "other")
    monkeypatch.setattr("ckpttool.execute.worker_pool.can_fork", lambda: False)
    options = ("--weights", "0.7,0.3", "--to", "hf", "--verify")
    for name, source, workers in (("a", new, 1), ("b", old, 2)):  # one needs no process
        made = command("merge", source, other, "-o", tmp_path / name, *options, "--workers", workers)
        assert made.code == 0, made.err
    assert written(tmp_path / "a") == written(tmp_path / "b") != {}


def test_quantized_moments_are_cut_like_others(tmp_path: Path) -> None:
    """In one step, or first as F32 and then cut."""
    reshard(QUANTIZED, tmp_path / "whole", "--to", "unified")
    reshard(tmp_path / "whole", tmp_path / "a", "--to", "flex", "--tp-out", 2)
    reshard(QUANTIZED, tmp_path / "b", "--to", "flex", "--tp-out", 2, "--workers", 2, "--verify")
    for path in (p for p in (tmp_path / "a").rglob("*.distcp") if p.is_file()):
        assert path.read_bytes() == (tmp_path / "b" / path.relative_to(tmp_path / "a")).read_bytes(), path


@pytest.mark.parametrize("source", ["old", "quantized"])
def test_an_interrupted_run_goes_on(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    src = old_pickles(tmp_path / "old") if source == "old" else QUANTIZED
    monkeypatch.setattr("ckpttool.execute.schedule._MIB", 1 << 12)
    reshard(src, tmp_path / "want", "--to", "unified")
    real, calls = Decoder.read, itertools.count()

    def read(self: Decoder, *args: Any) -> None:
        if next(calls) == 30:
            raise SourceReadError("the source is gone for a moment")
        real(self, *args)

    with monkeypatch.context() as patched:
        patched.setattr(Decoder, "read", read)
        stopped = command("reshard", src, tmp_path / "dst", "--to", "unified", "--workers", 1)
    assert stopped.code == 1
    assert "--resume" in stopped.err
    reshard(src, tmp_path / "dst", "--to", "unified", "--resume")
    assert written(tmp_path / "dst") == written(tmp_path / "want")


@pytest.mark.parametrize("change", [b"\xff", b"A\xc3", b""], ids=["not UTF-8", "fewer characters", "cut off"])
def test_a_text_that_changes_is_refused(change: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(pickle.dumps({"a": np.full(20_000, 200, "u1")}, 2))
    a = read_paddle(path).tensors["a"]
    assert a.file.encoding is not None
    part = a.file.encoding.parts[0]
    assert isinstance(part, Text)
    with path.open("r+b") as f:
        f.seek(part.text.offset + 20_000)
        f.write(change) if change else f.truncate()
    with pytest.raises(CorruptError, match=r"changed while it was read|shorter than its index says") as e:
        read_block(a.file.contents, a.offset, (1,), (a.nbytes,), "U8")
    assert str(path) in str(e.value.where)


def test_memory_does_not_grow_with_the_tensor(tmp_path: Path) -> None:
    """The beginning of a gigabyte of moments whose codes are a hole in a file, hashed."""
    code = """
import sys
from ckpttool.core.encodings import Encoding, Moment, Span
from ckpttool.execute.hashing import hash_range
path, rows, columns = sys.argv[1], 256, 1 << 20
made = Encoding("moments", path, [Moment(0, (rows, columns), Span(path, 0, rows * columns), (Span(path, 0, 4 * columns),), False)])
hash_range(made, 0, 64)
print(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
hash_range(made, 0, made.size // 12)
print(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
"""  # noqa: E501
    path = tmp_path / "x"
    with path.open("wb") as f:
        f.truncate(1 << 28)
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    before, after = map(int, done.stdout.split())
    assert after - before < 16_000  # kilobytes: one block, and what it is read into
