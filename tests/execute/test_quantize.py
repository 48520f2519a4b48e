"""Quantized tensors: panels and parts, the operands they come from, and what a crash leaves."""

from __future__ import annotations

import itertools
import os
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.core.dtypes import itemsize, numpy_dtype
from ckpttool.core.plan import (
    Adapted,
    Block,
    Copy,
    LowRank,
    Operand,
    Output,
    Plan,
    Quantize,
    Result,
    Rounding,
    Scaled,
    StoredOperand,
    Unit,
    WrittenTensor,
)
from ckpttool.errors import CorruptError, OutputError, UnsupportedError, VerifyError
from ckpttool.execute import RunOptions, quantize, run, strided, workforce
from ckpttool.execute.operands import OperandBuffer, reader
from ckpttool.execute.options import unwatched
from ckpttool.execute.quantize import part_bytes, parts_of
from ckpttool.execute.schedule import operand_keys, schedule
from ckpttool.kernels import fp8
from tests.execute.merges import Files, working_out
from tests.execute.plans import row_major
from tests.unit.test_fp8_kernels import SCHEMES, plainly

Array = np.ndarray[Any, np.dtype[Any]]
BF16 = np.dtype(ml_dtypes.bfloat16)
BLOCK = SCHEMES["block"]._replace(block=(4, 8))


def grid_of(r: Rounding, shape: tuple[int, ...]) -> tuple[int, ...]:
    *lead, rows, columns = shape
    return (*lead, -(-rows // (r.block[0] or rows)), -(-columns // (r.block[1] or columns)))


def step_of(r: Rounding, shape: tuple[int, ...], operand: Operand, *, factors: tuple[int, ...] = (1,)) -> Quantize:
    """Codes, scales and factor one behind the other in the first output; a second output has every second column of
    codes, if a row has as many."""
    packed = r.code == "F4"
    coded = (*shape[:-1], shape[-1] // 2) if packed else shape
    results, at = [], 0
    roles = [("codes", "U8" if packed else r.code, coded), ("scales", r.scale, grid_of(r, shape))]
    if r.scheme == "nvfp4":
        roles.append(("factor", "F32", factors))
    for role, dtype, held in roles:
        item, size = itemsize(dtype), prod(held)
        copies = [Copy(Block(0, 0, (item,)), Block(0, at, (item,)), (size,), dtype, dtype)]
        if role == "codes" and coded[-1] > 1:
            half = (size // coded[-1], coded[-1] // 2)
            strides = row_major(half, 1)
            copies.append(Copy(Block(0, 0, (coded[-1], 2)), Block(1, 0, strides), half, dtype, dtype))
        results.append(Result(role, dtype, held, tuple(copies)))
        at += size * item
    return Quantize("w", shape, operand, r, tuple(results))


def plan_of(files: Files, *steps: Quantize) -> Plan:
    (step,) = steps
    sizes = [0, 0]
    targets = []
    for r in step.results:
        n = prod(r.shape) * itemsize(r.dtype)
        targets.append(WrittenTensor(r.role, 0, sizes[0], n))
        sizes[0] += n
        if len(r.outputs) > 1:
            sizes[1] += prod(r.outputs[1].shape)
            targets.append(WrittenTensor(r.role, 1, 0, sizes[1]))
    outputs = [Output(f"{i}.bin", n) for i, n in enumerate(sizes)]
    return Plan(files.sources, outputs, [Unit("w", (step,), tuple(targets))])


def wanted(step: Quantize, x: Array, kind: str) -> bytes:
    """Both outputs, by whole arrays."""
    r = step.rounding
    whole = x.reshape(-1, *x.shape[-2:])
    one_scale = r.block[0] == 0 and prod(step.results[1].shape) == 1
    one_factor = prod(step.results[-1].shape) == 1
    if one_scale or (r.scheme == "nvfp4" and one_factor):
        whole = x.reshape(1, -1, x.shape[-1])
    made = [plainly(r, m.astype(np.float32), kind) for m in whole]
    codes = np.concatenate([c for c, _, _ in made])
    if r.code == "F4":
        codes = codes[:, 0::2] | codes[:, 1::2] << 4
    data = codes.tobytes() + b"".join(s.tobytes() for _, s, _ in made)
    if r.scheme == "nvfp4":
        data += np.array([f for _, _, f in made], np.float32).tobytes()
    other = codes[:, : codes.shape[1] // 2 * 2 : 2].tobytes() if codes.shape[1] > 1 else b""
    return data + b"|" + other


def written(dst: Path) -> bytes:
    return (dst / "0.bin").read_bytes() + b"|" + (dst / "1.bin").read_bytes()


def weight(shape: tuple[int, ...], dtype: np.dtype[Any], seed: int = 0) -> Array:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape)
    x[rng.random(shape) < 0.02] *= 300
    x.reshape(-1, shape[-1])[: max(1, shape[-2] // 3), : shape[-1] // 2] = 0
    return x.astype(dtype)


def turned(files: Files, x: Array, dtype: str) -> StoredOperand:
    """The last two axes as they lie in a file that holds them the other way round."""
    stored = files.stored(np.ascontiguousarray(np.swapaxes(x, -1, -2)), dtype)
    (copy,) = stored.copies
    item = x.itemsize
    rows = x.shape[-2]
    outer = row_major(x.shape, item)[:-2]
    src = Block(copy.src.file, copy.src.offset, (*outer, item, rows * item))
    dst = Block(0, 0, row_major(x.shape, item))
    return StoredOperand(dtype, x.shape, (Copy(src, dst, x.shape, dtype, dtype),), "turned")


@given(data=st.data())
def test_bytes_do_not_depend_on_how(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Any scheme and shape, from rows or columns, in panels and parts of any size."""
    directory = tmp_path_factory.mktemp("q")
    name = data.draw(st.sampled_from(sorted(set(SCHEMES) - {"channel f16"})))
    r = SCHEMES[name]
    lead = data.draw(st.sampled_from(((), (3,), (2, 2))))
    rows, columns = data.draw(st.sampled_from((1, 4, 9, 20))), data.draw(st.sampled_from((16, 32, 40, 96)))
    shape = (*lead, rows, columns)
    kind = data.draw(st.sampled_from(("BF16", "F32", "F16")))
    x = weight(shape, numpy_dtype(kind), data.draw(st.integers(0, 1 << 20)))
    files = Files(directory / "src")
    operand = turned(files, x, kind) if data.draw(st.booleans()) else files.stored(x, kind)
    factors = data.draw(st.sampled_from(((1,), (prod(lead),))))
    step = step_of(r, shape, operand, factors=factors)
    if r.scheme == "tensor" and data.draw(st.booleans()):
        codes, scales = step.results
        one = scales._replace(shape=(1,), outputs=tuple(c._replace(shape=(1,)) for c in scales.outputs))
        step = step._replace(results=(codes, one))
    plan = plan_of(files, step)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(workforce, "spawn", lambda *_: None)
        patched.setattr(quantize, "_LEAST", data.draw(st.sampled_from((1, 16, 64, 1 << 16))))
        patched.setattr(quantize, "_PANEL", data.draw(st.sampled_from((32, 64, 700, 1 << 16))))
        patched.setattr(quantize, "PART", data.draw(st.sampled_from((1, 100, 1 << 20))))
        found: dict[str, str] = {}

        def late_files(digests: Any) -> bytes:
            found.update(digests)
            return b""

        options = RunOptions(
            manifest=data.draw(st.booleans()),
            late_files={"note.txt": late_files},
            verify=working_out(plan),
        )
        result = run(plan, directory / "dst", options)
        assert sum(part_bytes(step, n) for n in range(parts_of(step))) == plan.bytes_written
        assert result.bytes_written == plan.bytes_written
        assert {k for k in found if ":" in k} == set(operand_keys(plan, 0))
    assert written(directory / "dst") == wanted(step, x, kind)


def plain_plan(directory: Path, r: Rounding, shape: tuple[int, ...] = (40, 64), seed: int = 0) -> tuple[Plan, bytes]:
    files = Files(directory)
    x = weight(shape, BF16, seed)
    step = step_of(r, shape, files.stored(x, "BF16", "x"))
    return plan_of(files, step), wanted(step, x, "BF16")


def test_processes_write_what_a_thread_writes(tmp_path: Path) -> None:
    plan, want = plain_plan(tmp_path / "src", BLOCK)
    result = run(plan, tmp_path / "dst", RunOptions(manifest=True, workers=2))
    assert written(tmp_path / "dst") == want
    assert [c.tensor for c in result.manifest] == ["codes", "scales", "codes"]


@pytest.mark.product
@pytest.mark.parametrize("name", ["block", "tensor", "mxfp4", "nvfp4", "channel bf16"])
@pytest.mark.parametrize("panel", [64, 1 << 20])
def test_resume_goes_on_inside_a_tensor(tmp_path: Path, name: str, panel: int) -> None:
    """Recorded parts are not written again; what needs the whole tensor reads it again; its hash is whole."""
    plan, want = plain_plan(tmp_path / "src", SCHEMES[name])
    hashes: list[dict[str, str]] = []

    def late_files(digests: Any) -> bytes:
        hashes.append({k: v for k, v in digests.items() if ":" in k})
        return b""

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(quantize, "PART", 256)
        patched.setattr(quantize, "_LEAST", 64)
        patched.setattr(quantize, "_PANEL", panel)
        patched.setattr(workforce, "spawn", lambda *_: None)
        real = strided.scatter
        calls = itertools.count()
        stop = 1 << 30

        def scatter(*arguments: Any) -> None:
            if next(calls) == stop:
                raise OutputError("the disk is gone")
            real(*arguments)

        patched.setattr(quantize, "scatter", scatter)
        run(plan, tmp_path / "once", RunOptions(late_files={"note.txt": late_files}))
        parts = [p for t in schedule(plan, ()) for p in t.parts]
        assert len(parts) == 10
        assert sum(p.nbytes for p in parts) == plan.bytes_written
        stop, calls = next(calls) // 2, itertools.count()
        with pytest.raises(OutputError, match="the disk is gone"):
            run(plan, tmp_path / "dst", RunOptions(late_files={"note.txt": late_files}))
        stop = 1 << 30
        result = run(plan, tmp_path / "dst", RunOptions(resume=True, late_files={"note.txt": late_files}))
    assert result.bytes_skipped > 0
    assert result.bytes_skipped + result.bytes_written == plan.bytes_written
    assert written(tmp_path / "dst") == want == written(tmp_path / "once")
    assert hashes[0] == hashes[1]


@pytest.mark.parametrize("name", ["block", "tensor", "nvfp4"])
def test_what_is_not_finite_is_named(tmp_path: Path, name: str) -> None:
    plan, _ = plain_plan(tmp_path / "src", SCHEMES[name], (2, 40, 64))
    path = Path(plan.sources[0].path)
    data = np.fromfile(path, np.uint8)
    data[8:].view(BF16).reshape(2, 40, 64)[1, 31, 5] = -np.inf
    path.write_bytes(data.tobytes())
    os.utime(path, ns=(int(plan.sources[0].tag),) * 2)
    with pytest.raises(CorruptError) as caught:
        run(plan, tmp_path / "dst", RunOptions())
    assert "`w` is -inf at [1, 31, 5]" in caught.value.what
    assert "`x` of source 0" in caught.value.where[0]
    assert not (tmp_path / "dst.partial").exists()


def test_verify_finds_a_flipped_bit(tmp_path: Path) -> None:
    plan, _ = plain_plan(tmp_path / "src", SCHEMES["nvfp4"])
    run(plan, tmp_path / "dst", RunOptions())
    for at in (5, 40 * 32 + 7, -2):  # a code, a scale, the factor
        path = tmp_path / "dst/0.bin"
        good = path.read_bytes()
        data = bytearray(good)
        data[at] ^= 1
        path.write_bytes(data)
        with pytest.raises(VerifyError, match="`w`"):
            working_out(plan)(tmp_path / "dst", unwatched)
        path.write_bytes(good)
    working_out(plan)(tmp_path / "dst", unwatched)


def test_results_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    plan, _ = plain_plan(tmp_path / "src", BLOCK)
    (step,) = plan.units[0].steps
    assert isinstance(step, Quantize)
    wrong = step._replace(rounding=step.rounding._replace(block=(8, 8)))
    plan.units = [plan.units[0]._replace(steps=(wrong,)), *plan.units[1:]]
    with pytest.raises(UnsupportedError, match="scales of `w` are 40"):
        run(plan, tmp_path / "dst", RunOptions())


def test_empty_tensors_are_written_as_nothing(tmp_path: Path) -> None:
    for shape in ((0, 64), (0, 4, 64)):
        files = Files(tmp_path / "src" / str(len(shape)))
        step = Quantize(
            "w", shape, StoredOperand("BF16", shape, (), "x"), BLOCK,
            (Result("codes", "F8_E4M3", shape), Result("scales", "F32", (*shape[:-2], 0, 8))),
        )  # fmt: skip
        plan = Plan(files.sources, [Output("0.bin", 3, ((0, b"abc"),))], [Unit("w", (step,))])
        run(plan, tmp_path / f"dst{len(shape)}", RunOptions())


# -- operands


def scaled(files: Files, rng: Any, shape: tuple[int, ...], kind: str, block: tuple[int, ...]) -> tuple[Scaled, Array]:
    """A quantized weight of any kind, and its values."""
    full = tuple([b or n for b, n in zip(block, shape, strict=True)])
    grid = tuple([-(-n // b) for n, b in zip(shape, full, strict=True)])
    stored = {"f4": "U8", "i8": "I8", "fnuz": "F8_E4M3FNUZ", "e5m2": "F8_E5M2"}.get(kind, "F8_E4M3")
    code = {"f4": "F4", "i8": "F8_E4M3"}.get(kind, "")
    count = (*shape[:-1], shape[-1] // 2) if kind == "f4" else shape
    codes = rng.integers(0, 256, count).astype(np.uint8)
    if rng.random() < 0.5 and kind != "f4":  # without NaN and infinities
        codes &= 0xBB
        codes[codes == 0x80] = 0
    table = fp8.table(code or stored)
    values = np.stack([table[codes & 15], table[codes >> 4]], -1).reshape(shape) if kind == "f4" else table[codes]
    dtype = {"f4": "F8_E4M3", "e8m0": "F8_E8M0", "bf16": "BF16"}.get(kind, "F32")
    scale = (2.0 ** rng.integers(-9, 9, grid)).astype(np.float32)
    if dtype != "F8_E8M0":
        scale *= rng.choice(np.array([1, 1.125, -1.25], np.float32), grid)
    if rng.random() < 0.2 and dtype == "F32":
        scale *= np.float32(1e35)
    scale = scale.astype(numpy_dtype(dtype))
    factor, number = None, np.float32(1)
    divides = bool(rng.random() < 0.5)
    if kind == "f4":
        number = np.float32(rng.random() + 0.1)
        factor = files.stored(np.array([number]), "F32", "factor")
    operand = Scaled(
        files.stored(codes.view(numpy_dtype(stored)), stored), files.stored(scale, dtype), block, code, factor, divides
    )
    spread = scale.astype(np.float32)
    if factor is not None:
        spread = spread / number if divides else spread * number
    for axis, b in enumerate(full):
        spread = np.repeat(spread, b, axis)
    with np.errstate(all="ignore"):
        return operand, values * spread[tuple([slice(n) for n in shape])]


@given(data=st.data())
def test_scaled_operands_are_code_times_scale(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Every kind of code and scale, bit by bit, wherever a stretch begins and ends."""
    files = Files(tmp_path_factory.mktemp("s"))
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 30)))
    kind = data.draw(st.sampled_from(("f4", "i8", "fnuz", "e5m2", "e4m3", "e8m0", "bf16")))
    shape = tuple(data.draw(st.sampled_from(((6,), (9, 8), (5, 24), (3, 4, 6), (2, 2, 3, 4)))))
    block = tuple([data.draw(st.sampled_from((0, 1, 2, 3, 8))) for _ in shape])
    operand, want = scaled(files, rng, shape, kind, block)
    flat = want.reshape(-1)
    carrier = files.carrier()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("ckpttool.execute.operands._AHEAD", data.draw(st.sampled_from((1, 5, 1 << 10))))
        patched.setattr("ckpttool.execute.operands._SCALE_ROWS", data.draw(st.sampled_from((1, 2, 1 << 10))))
        read = reader(operand, carrier, OperandBuffer)
        for _ in range(5):
            lo = data.draw(st.integers(0, flat.size))
            hi = data.draw(st.integers(lo, flat.size))
            out = np.empty(hi - lo, np.float32)
            read.read(lo, hi, out, last=False)
            np.testing.assert_array_equal(out, flat[lo:hi])
    carrier.pool.close()


@pytest.mark.product
@pytest.mark.parametrize("kind", ["f4", "e4m3", "e8m0", "adapted"])
@pytest.mark.parametrize("panel", [64, 1 << 16])
def test_what_is_worked_out_is_quantized(tmp_path: Path, kind: str, panel: int) -> None:
    """Quantized anew, or with an adapter; in float32, or in the dtype that an adapted weight has."""
    files = Files(tmp_path / "src")
    rng = np.random.default_rng(3)
    shape = (20, 32)
    operand: Operand
    if kind == "adapted":
        x = weight(shape, BF16)
        up, down = rng.standard_normal((20, 2)).astype(np.float32), rng.standard_normal((2, 32)).astype(np.float32)
        term = LowRank(files.stored(up, "F32"), files.stored(down, "F32"), 0.5)
        operand = Adapted(files.stored(x, "BF16"), (term,), 32, "BF16")
        want = (x.astype(np.float32) + up @ down * np.float32(0.5)).astype(BF16).astype(np.float32)
    else:
        while True:
            operand, want = scaled(files, rng, shape, kind, (4, 8))
            if np.isfinite(want).all():
                break
    for name in ("block", "tensor bf16", "channel bf16", "nvfp4"):
        step = step_of(SCHEMES[name], shape, operand)
        plan = plan_of(files, step)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(workforce, "spawn", lambda *_: None)
            patched.setattr(quantize, "_LEAST", 64)
            patched.setattr(quantize, "_PANEL", panel)
            run(plan, tmp_path / name, RunOptions())
        assert written(tmp_path / name) == wanted(step, want, "BF16" if kind == "adapted" else "F32")
