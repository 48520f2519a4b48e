"""Computed tensors: operands, the passes over them, the processes that do the work, and what a crash leaves."""

from __future__ import annotations

import itertools
import os
import signal
import tempfile
from math import prod
from pathlib import Path
from typing import Any
from unittest.mock import patch

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.core.plan import (
    Adapted,
    Block,
    Compute,
    Copy,
    Gathered,
    LowRank,
    Operand,
    RowRun,
    Scaled,
)
from ckpttool.errors import CorruptError, OutputError, VerifyError
from ckpttool.execute import RunOptions, compute, engine, run, strided, worker_pool, workforce
from ckpttool.execute.operands import OperandBuffer, reader
from ckpttool.execute.options import unwatched
from ckpttool.execute.schedule import operand_keys, schedule
from ckpttool.execute.strided import clip
from tests.execute.merges import Files, merge_plan, working_out, written
from tests.execute.plans import row_major

Array = np.ndarray[Any, np.dtype[Any]]
BF16 = np.dtype(ml_dtypes.bfloat16)


def addresses(copy: Copy, side: str) -> list[int]:
    block = copy.src if side == "src" else copy.dst
    ranges = [range(0, n * s, s) for n, s in zip(copy.shape, block.strides, strict=True)]
    return [block.offset + sum(i) for i in itertools.product(*ranges)]


@given(st.data())
def test_clip_takes_every_element_once(data: st.DataObject) -> None:
    """The parts hold exactly the pairs of addresses whose inside lies in the stretch."""
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    start = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    stop = tuple(data.draw(st.integers(a + 1, n)) for a, n in zip(start, shape, strict=True))
    size = tuple(b - a for a, b in zip(start, stop, strict=True))
    order = data.draw(st.permutations(range(len(shape))))
    inside = row_major(shape, 2)
    offset = sum(a * s for a, s in zip(start, inside, strict=True))
    turned = row_major([size[i] for i in order], 4)
    outside = [turned[order.index(i)] for i in range(len(shape))]
    axes = data.draw(st.permutations(range(len(shape))))
    a = Block(0, offset, tuple(inside[i] for i in axes))
    b = Block(1, 100, tuple(outside[i] for i in axes))
    inner = data.draw(st.sampled_from(("src", "dst")))
    kinds = ("BF16", "F32") if inner == "src" else ("F32", "BF16")
    pair = (a, b) if inner == "src" else (b, a)
    copy = Copy(pair[0], pair[1], tuple(size[i] for i in axes), *kinds)
    total = prod(shape)
    lo = data.draw(st.integers(0, total))
    hi = data.draw(st.integers(lo, total))
    want = sorted(
        (i, o)
        for i, o in zip(addresses(copy, inner), addresses(copy, "dst" if inner == "src" else "src"), strict=True)
        if 2 * lo <= i < 2 * hi
    )
    parts = list(clip(copy, 2 * lo, 2 * hi, inner=inner))
    got = [
        pair
        for c in parts
        for pair in zip(addresses(c, inner), addresses(c, "dst" if inner == "src" else "src"), strict=True)
    ]
    assert sorted(got) == want


@given(st.data())
def test_operands_read_any_stretch(data: st.DataObject) -> None:
    """Scales, adapters and gathered rows give what numpy gives, wherever a stretch begins and ends."""
    with tempfile.TemporaryDirectory() as directory:
        read_any_stretch(data, Path(directory))


def read_any_stretch(data: st.DataObject, directory: Path) -> None:
    files = Files(directory)
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    rows, columns = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 9))
    kind = data.draw(st.sampled_from(("stored", "scaled", "channel", "adapted", "gathered")))
    weight = rng.standard_normal((rows, columns)).astype(np.float32)
    operand: Operand
    if kind == "stored":
        operand, want = files.stored(weight, "F32"), weight
    elif kind in ("scaled", "channel"):
        tall, wide = (data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))) if kind == "scaled" else (1, 0)
        grid = -(-rows // tall), -(-columns // wide) if wide else 1
        scale = rng.random(grid, dtype=np.float32)
        codes = weight.astype(ml_dtypes.float8_e4m3fn)
        operand = Scaled(files.stored(codes, "F8_E4M3"), files.stored(scale, "F32"), (tall, wide))
        spread = np.repeat(np.repeat(scale, tall, 0), wide or columns, 1)[:rows, :columns]
        want = codes.astype(np.float32) * spread
    elif kind == "adapted":
        first = data.draw(st.integers(0, rows - 1))
        left = data.draw(st.integers(0, columns - 1))
        up = rng.standard_normal((rows - first, 2)).astype(np.float32)
        down = rng.standard_normal((2, columns - left)).astype(np.float32)
        term = LowRank(files.stored(up, "F32"), files.stored(down, "F32"), 0.5, first, left)
        operand = Adapted(files.stored(weight, "BF16"), (term,), columns, "BF16")
        want = weight.astype(BF16).astype(np.float32)
        want[first:, left:] += up @ down * np.float32(0.5)
        want = want.astype(BF16).astype(np.float32)
    else:
        other = rng.standard_normal((3, columns)).astype(np.float32)
        runs = (RowRun(0, 1, 1, 2), RowRun(1, 2, -1, 0), RowRun(3, 3 + rows, 0, 0))
        operand = Gathered(
            (files.stored(weight, "F32"), files.stored(other, "F32")),
            (3 + rows, columns),
            runs,
            ((2, ((0, 0), (1, 1))),),
        )
        want = np.concatenate([other[2:], np.zeros((1, columns)), (weight[:1] + other[1:2]) / 2, weight])
    flat = want.astype(np.float32).reshape(-1)
    carrier = files.carrier()
    with patch("ckpttool.execute.operands._PRODUCT", data.draw(st.sampled_from((1, 7, 1000)))):
        read = reader(operand, carrier, OperandBuffer)
        for _ in range(4):
            lo = data.draw(st.integers(0, flat.size))
            hi = data.draw(st.integers(lo, flat.size))
            out = np.empty(hi - lo, np.float32)
            read.read(lo, hi, out, last=False)
            np.testing.assert_allclose(out, flat[lo:hi], rtol=1e-6 if kind != "adapted" else 1e-2)
    carrier.pool.close()


A_HELPER = pytest.param("a helper", False, marks=pytest.mark.thorough)  # test_worker_pool.py has runs with one


@pytest.mark.product
@pytest.mark.parametrize("manifest", [True, False])
@pytest.mark.parametrize(
    ("how", "small"),
    [
        ("forks", True),
        ("forks", False),
        ("a thread", True),
        ("a thread", False),
        A_HELPER,
    ],
)
def test_bytes_do_not_depend_on_how(tmp_path: Path, how: str, *, manifest: bool, small: bool) -> None:
    plan, want = merge_plan(tmp_path / "src")
    found = {}

    def late_files(digests: Any) -> bytes:
        found.update(digests)
        return b"said at the end"

    with pytest.MonkeyPatch.context() as patched:
        if small:  # chunks, stretches and parts of a few rows
            patched.setattr(compute, "CHUNK", 18)
            patched.setattr(compute, "STRETCH", 80)
            patched.setattr(compute, "PART", 54)
        patched.setattr(worker_pool, "can_fork", lambda: how == "forks")
        if how == "a thread":
            patched.setattr(workforce, "spawn", lambda *_: None)
        result = run(
            plan, tmp_path / "dst", RunOptions(manifest=manifest, late_files={"note.txt": late_files}, workers=2)
        )
    assert written(tmp_path / "dst") == want
    assert (tmp_path / "dst/note.txt").read_bytes() == b"said at the end"
    assert len(result.manifest) == (3 if manifest else 0)
    assert result.bytes_read == sum(s.size - 8 for s in plan.sources)
    assert {k for k in found if ":" in k} == {*operand_keys(plan, 0), *operand_keys(plan, 1)}


def test_resume_goes_on_inside_a_tensor(tmp_path: Path) -> None:
    """Recorded parts are not written again, and the hashes of the operands are whole all the same."""
    plan, want = merge_plan(tmp_path / "src")
    hashes: list[dict[str, str]] = []

    def late_files(digests: Any) -> bytes:
        hashes.append({k: v for k, v in digests.items() if ":" in k})
        return b"said at the end"

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(compute, "CHUNK", 18)
        patched.setattr(compute, "PART", 54)
        patched.setattr(workforce, "spawn", lambda *_: None)
        run(plan, tmp_path / "once", RunOptions(late_files={"note.txt": late_files}))
        tasks = schedule(plan, ())
        assert [len(t.parts) for t in tasks] == [5, 5]
        real = strided.scatter
        calls = itertools.count()

        def scatter(*arguments: Any) -> None:
            if next(calls) == 7:
                raise OutputError("the disk is gone")
            real(*arguments)

        patched.setattr(compute, "scatter", scatter)
        with pytest.raises(OutputError, match="the disk is gone"):
            run(plan, tmp_path / "dst", RunOptions(late_files={"note.txt": late_files}))
        assert not (tmp_path / "dst").exists()
        patched.setattr(compute, "scatter", real)
        result = run(plan, tmp_path / "dst", RunOptions(resume=True, late_files={"note.txt": late_files}))
    assert 0 < result.bytes_skipped < result.bytes_skipped + result.bytes_written
    assert result.bytes_skipped + result.bytes_written == plan.bytes_written
    assert written(tmp_path / "dst") == want
    assert hashes[0] == hashes[1]


@pytest.fixture
def forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process computes, however many there are and whatever threads."""
    monkeypatch.setattr(workforce, "spawn", worker_pool.spawn)
    monkeypatch.setattr(worker_pool, "can_fork", lambda: True)


@pytest.mark.usefixtures("forks")
@pytest.mark.parametrize("unsynced", [False, True])
def test_a_sync_that_fails_in_a_worker(tmp_path: Path, *, unsynced: bool) -> None:
    """The kernel has told the worker, and will not tell again: what is not recorded yet is not believed."""
    plan, _ = merge_plan(tmp_path / "src")
    real, calls = strided.scatter, itertools.count()

    def scatter(carrier: Any, *arguments: Any) -> None:
        if next(calls) == 7:
            carrier.pool.unsynced = unsynced
            raise OutputError("the disk is gone")
        real(carrier, *arguments)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(compute, "CHUNK", 18)
        patched.setattr(compute, "PART", 54)
        patched.setattr(compute, "scatter", scatter)
        with pytest.raises(OutputError, match="the disk is gone"):
            run(plan, tmp_path / "dst", RunOptions(workers=1))
    assert (tmp_path / "dst.partial").exists() == (not unsynced)


@pytest.mark.usefixtures("forks")
def test_a_worker_that_dies_is_an_error(tmp_path: Path) -> None:
    """Nothing is left that looks like a result, and the error says how the worker ended."""
    plan, _ = merge_plan(tmp_path / "src")

    def die(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with patch.object(compute, "scatter", die), pytest.raises(OutputError) as caught:
        run(plan, tmp_path / "dst", RunOptions(workers=2))
    assert "killed by SIGKILL" in str(caught.value)
    assert not (tmp_path / "dst").exists()


@pytest.mark.usefixtures("forks")
def test_an_error_in_a_worker_arrives_whole(tmp_path: Path) -> None:
    plan, _ = merge_plan(tmp_path / "src")
    error = CorruptError("what", where=["here", "there"], hint="so")
    with patch.object(compute, "scatter", side_effect=error), pytest.raises(CorruptError) as caught:
        run(plan, tmp_path / "dst", RunOptions())
    assert (caught.value.what, caught.value.where, caught.value.hint) == ("what", ("here", "there"), "so")
    assert not (tmp_path / "dst.partial").exists()


@pytest.mark.usefixtures("forks")
def test_a_fault_in_a_worker_shows_its_traceback(tmp_path: Path) -> None:
    plan, _ = merge_plan(tmp_path / "src")
    fault = patch.object(compute, "scatter", side_effect=KeyError("a fault"))
    with fault, pytest.raises(RuntimeError, match=r"in a worker process:\n(.*\n)+KeyError: 'a fault'"):
        run(plan, tmp_path / "dst", RunOptions())
    assert not (tmp_path / "dst").exists()


@pytest.mark.parametrize("value", [np.nan, pytest.param(np.inf, marks=pytest.mark.thorough), -np.inf])
def test_what_is_not_finite_is_named(tmp_path: Path, value: float) -> None:
    plan, _ = merge_plan(tmp_path / "src")
    path = Path(plan.sources[1].path)
    data = np.fromfile(path, np.uint8)
    data[8 + 2 * 31 :][:2].view(BF16)[0] = value
    with path.open("r+b") as f:
        f.write(data.tobytes())
    os.utime(path, ns=(int(plan.sources[1].tag),) * 2)
    with pytest.raises(CorruptError) as caught:
        run(plan, tmp_path / "dst", RunOptions())
    assert "`t0`" in caught.value.what
    assert "[5, 1]" in caught.value.what
    assert [w for w in caught.value.where if "`b` of source 1" in w]
    assert not [w for w in caught.value.where if "`a` of source 0" in w]
    plan.units = [u._replace(steps=tuple(s._replace(finite=False) for s in u.steps)) for u in plan.units]  # type: ignore[call-arg]
    run(plan, tmp_path / "dst", RunOptions())
    assert not np.isfinite(np.frombuffer(written(tmp_path / "dst")[: 40 * 6 * 2], BF16).astype(np.float32)).all()


def test_unchanged_bytes_pass_whatever_they_mean(tmp_path: Path) -> None:
    """NaNs keep their payload when a tensor only passes through."""
    plan, _ = merge_plan(
        tmp_path / "src", method="passthrough", parameters=((("scale", 1.0),),), whole=(), finite=False
    )
    units = []
    for u in plan.units:
        (step,) = u.steps
        assert isinstance(step, Compute)
        units.append(u._replace(steps=(step._replace(models=step.models[:1]),)))
    plan.units = units
    bits = np.random.default_rng(5).integers(0, 1 << 16, 240).astype(np.uint16)
    with Path(plan.sources[0].path).open("r+b") as f:
        f.seek(8)
        f.write(bits.tobytes())
    os.utime(plan.sources[0].path, ns=(int(plan.sources[0].tag),) * 2)
    run(plan, tmp_path / "dst", RunOptions())
    assert written(tmp_path / "dst")[:480] == bits.tobytes()


def test_verify_finds_a_flipped_bit(tmp_path: Path) -> None:
    plan, _ = merge_plan(tmp_path / "src")
    run(plan, tmp_path / "dst", RunOptions(verify=working_out(plan)))
    path = tmp_path / "dst/1.bin"
    data = bytearray(path.read_bytes())
    data[77] ^= 1
    path.write_bytes(data)
    with pytest.raises(VerifyError, match="`t1`"):
        working_out(plan)(tmp_path / "dst", unwatched)


def test_an_output_that_was_lost_is_worked_out_again(tmp_path: Path) -> None:
    """Everything is recorded, the run ends before the rename, and a file is gone when it goes on."""
    plan, want = merge_plan(tmp_path / "src")
    with (
        patch.object(engine.Run, "_finish", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        run(plan, tmp_path / "dst", RunOptions())
    (tmp_path / "dst.partial/0.bin").unlink()
    run(plan, tmp_path / "dst", RunOptions(resume=True))
    assert written(tmp_path / "dst") == want
