"""The bytes that a run writes, with numpy as the judge."""

from __future__ import annotations

import itertools
import json
import pickle
import tempfile
from collections.abc import Callable, Iterator, Sequence
from math import prod
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.core.dtypes import itemsize
from ckpttool.core.plan import Block, Copy, Fill, Output, Plan, Unit, WrittenTensor, merged_axes
from ckpttool.errors import UnsupportedError
from ckpttool.execute import RunOptions, blocks, files, moves, reader, run, schedule, workforce
from ckpttool.execute.hashing import hash_range
from tests.execute.plans import Store, expected, pattern, reshard, row_major, source, written


def slabs(shape: Sequence[int], axis: int, cuts: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    edges = [0, *cuts, shape[axis]]
    for a, b in itertools.pairwise(edges):
        start, stop = [0] * len(shape), list(shape)
        start[axis], stop[axis] = a, b
        yield start, stop


@st.composite
def recipes(draw: st.DrawFn) -> Callable[[Path], Plan]:
    """A function that writes random sources into a directory and returns a random plan over them."""
    casts = draw(st.booleans())
    dtype = draw(
        st.sampled_from(("BF16", "F16", "F32", "F64") if casts else ("U8", "I16", "BF16", "F32", "I64", "C64"))
    )
    dst_dtype = draw(st.sampled_from(("BF16", "F16", "F32", "F64"))) if casts else dtype
    size, out_size = itemsize(dtype), itemsize(dst_dtype)
    have, want = Store(draw(st.integers(1, 4))), Store(draw(st.integers(1, 4)))
    units: list[Unit] = []
    for t in range(draw(st.integers(1, 3))):
        shape = draw(st.lists(st.sampled_from((1, 2, 3, 5, 8, 13, 40)), max_size=4).map(tuple))
        steps: list[Copy | Fill] = []
        sides = []
        for store, item in ((have, size), (want, out_size)):
            files = len(store.sizes)
            axis = draw(st.integers(0, max(0, len(shape) - 1)))
            order = draw(st.permutations(range(len(shape)))) if draw(st.booleans()) else list(range(len(shape)))
            if shape:
                cuts = sorted(draw(st.lists(st.integers(0, shape[axis]), min_size=files - 1, max_size=files - 1)))
                boxes = list(slabs(shape, axis, cuts))
            else:
                boxes = [([], [])]
            side = []
            for f, (start, stop) in enumerate(boxes):
                local = [b - a for a, b in zip(start, stop, strict=True)]
                strides = [0] * len(shape)
                for axis_, stride in zip(order, row_major([local[i] for i in order], item), strict=True):
                    strides[axis_] = stride
                at = store.add(f, draw(st.sampled_from((0, 0, 1, 2, 7))) * item, prod(local) * item)
                side.append((start, stop, f, at, strides))
            sides.append(side)
        for start, stop, f, at, strides in sides[0]:
            for start2, stop2, f2, at2, strides2 in sides[1]:
                lo = [max(a, b) for a, b in zip(start, start2, strict=True)]
                hi = [min(a, b) for a, b in zip(stop, stop2, strict=True)]
                if any(a >= b for a, b in zip(lo, hi, strict=True)):
                    continue
                a = at + sum((x - y) * s for x, y, s in zip(lo, start, strides, strict=True))
                b = at2 + sum((x - y) * s for x, y, s in zip(lo, start2, strides2, strict=True))
                box, (ss, ds) = merged_axes([y - x for x, y in zip(lo, hi, strict=True)], strides, strides2)
                if draw(st.integers(0, 9)):
                    steps.append(Copy(Block(f, a, ss), Block(f2, b, ds), box, dtype, dst_dtype))
                else:
                    steps.append(Fill(Block(f2, b, ds), box, dst_dtype))
        targets = [
            WrittenTensor(f"t{t}", f, at, prod(b - a for a, b in zip(start, stop, strict=True)) * out_size)
            for start, stop, f, at, _ in sides[1]
        ]
        half = len(steps) // 2 if draw(st.booleans()) else 0
        if half:  # two units that write to one stored tensor
            units += [Unit(f"t{t}a", tuple(steps[:half])), Unit(f"t{t}b", tuple(steps[half:]))]
        else:
            units.append(Unit(f"t{t}", tuple(steps), tuple(targets)))

    def make(directory: Path) -> Plan:
        found = [source(directory / f"s{f}", have.contents(f)) for f in range(len(have.sizes))]
        outputs = [Output(f"d{f}" if f else "sub/d0", n) for f, n in enumerate(want.sizes)]
        return Plan(found, outputs, units)

    return make


@given(recipes(), st.data())
def test_any_plan(recipe: Callable[[Path], Plan], data: st.DataObject) -> None:
    """Any cut, order of axes, cast, memory, number of workers and size of parts writes what numpy writes."""
    choose = st.sampled_from
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        plan = recipe(Path(directory, "src"))
        # Small limits make small tensors meet what large ones meet.
        patch.setattr(schedule, "_MIB", data.draw(choose((64, 1000, 1 << 20))))
        patch.setattr(blocks, "BLOCK", data.draw(choose((512, 5000, 4 << 20))))
        patch.setattr(blocks, "SCRATCH", data.draw(choose((64, 1000, 1 << 20))))
        patch.setattr(moves, "TURNED_PART", data.draw(choose((64, 16 << 20))))
        patch.setattr(moves, "NOMINAL", data.draw(choose((1000, 24 << 20))))
        patch.setattr(workforce, "_SMALLEST_ARENA", 4096)
        patch.setattr(files, "UNCACHED_FROM", data.draw(choose((16, 256 << 10))))
        bridge = data.draw(choose((0, 16, 32 << 10)))
        patch.setattr(moves, "BRIDGE", bridge)
        patch.setattr(reader, "BRIDGE", bridge)
        options = RunOptions(
            memory=data.draw(choose((4096, 20_000, 1 << 20))),
            workers=data.draw(st.integers(1, 3)),
            manifest=data.draw(st.booleans()),
        )
        dst = Path(directory, "dst")
        result = run(plan, dst, options)
        assert written(dst, plan) == expected(plan)
        assert sorted(p.name for p in Path(directory).iterdir()) == ["dst", "src"]
        for c in result.manifest:
            (target,) = [
                t
                for u in plan.units
                for t in u.stored_tensors
                if (plan.outputs[t.file].name, t.name) == (c.file, c.tensor)
            ]
            assert c.digest == hash_range(dst / c.file, target.offset, target.nbytes)


MATRICES = [((512, 768), 0), ((768, 512), 1), ((4096,), None), ((96, 64, 32), 2), ((300, 500), 0)]


@pytest.mark.product
@pytest.mark.parametrize("counts", [(8, 2), (2, 8), (1, 4), (4, 1), (3, 2)])
@pytest.mark.parametrize("turned", [False, True])
def test_reshard(tmp_path: Path, counts: tuple[int, int], turned: bool) -> None:
    plan = reshard(tmp_path / "src", MATRICES, *counts, turned=turned)
    for workers, memory in ((1, 64 << 20), (2, 1 << 20), (3, 300_000)):
        dst = tmp_path / f"dst{workers}"
        result = run(plan, dst, RunOptions(workers=workers, memory=memory))
        assert written(dst, plan) == expected(plan)
        assert plan.bytes_written - result.bytes_written == 8 * 2 * counts[1]  # the gaps between tensors are holes
        assert result.peak_buffer <= memory


@pytest.mark.parametrize("dst_dtype", ["F32", "F16"])
def test_cast_while_transposing(tmp_path: Path, dst_dtype: str) -> None:
    plan = reshard(tmp_path / "src", [((300, 500), 0)], 2, 1, dst_dtype=dst_dtype, turned=True)
    run(plan, tmp_path / "dst", RunOptions(memory=200_000))
    assert written(tmp_path / "dst", plan) == expected(plan)


def test_steps_of_other_kinds(tmp_path: Path) -> None:
    """Padding columns and rows, literal bytes, packed elements, empty and 0-d tensors, companions, empty files."""
    found = source(tmp_path / "src/s", pattern(64))
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "empty").write_text("")
    unit = Unit(
        "t",
        (
            Copy(Block(0, 0, (6, 2)), Block(0, 8, (10, 2)), (4, 3), "BF16", "BF16"),
            Fill(Block(0, 14, (10, 2)), (4, 2), "BF16"),
            Fill(Block(0, 48, (1,)), (16,), "F8_E8M0"),
            Copy(Block(0, 24, (1,)), Block(0, 64, (1,)), (7, 0), "U8", "U8"),
            Copy(Block(0, 24, ()), Block(0, 64, ()), (), "F32", "F32"),
            Copy(Block(0, 28, (0,)), Block(0, 68, (0,)), (6,), "F4", "F4"),
        ),
        (WrittenTensor("t", 0, 8, 40),),
    )
    outputs = [
        Output("x.bin", 71, ((0, b"header"),)),
        *[
            Output(name, path.stat().st_size, carried=str(path), tag=str(path.stat().st_mtime_ns))
            for name, path in (("deep/er/config.json", tmp_path / "config.json"), ("empty", tmp_path / "empty"))
        ],
        Output("index.json", 4, ((0, b"null"),)),
    ]
    plan = Plan([found], outputs, [unit])
    result = run(plan, tmp_path / "dst", RunOptions(manifest=True))
    data = (tmp_path / "src/s").read_bytes()
    rows = b"".join(data[6 * i : 6 * i + 6] + bytes(4) for i in range(4))
    assert (tmp_path / "dst/x.bin").read_bytes() == b"header\0\0" + rows + bytes(16) + data[24:28] + data[28:31]
    assert (tmp_path / "dst/deep/er/config.json").read_text() == "{}"
    assert (tmp_path / "dst/index.json").read_text() == "null"
    assert [(c.tensor, c.digest) for c in result.manifest] == [("t", f"xxh3_128:{xxhash.xxh3_128_hexdigest(rows)}")]
    manifest = json.loads((tmp_path / "dst/ckpttool.manifest.json").read_text())
    assert manifest == {
        "version": 1,
        "algorithm": "xxh3_128",
        "tensors": {"x.bin": {"t": xxhash.xxh3_128_hexdigest(rows)}},
        "files": {"deep/er/config.json": 2, "empty": 0, "index.json": 4, "x.bin": 71},
    }


def test_zeros_are_written_over(tmp_path: Path) -> None:
    """A fill counts on nothing being there before."""
    found = source(tmp_path / "src/s", pattern(1 << 16))
    steps = (Fill(Block(0, 0, (1024, 2)), (32, 256), "BF16"), Fill(Block(0, 512, (1024, 2)), (32, 256), "BF16"))
    plan = Plan([found], [Output("x", 1 << 15)], [Unit("t", steps)])
    run(plan, tmp_path / "dst")
    assert (tmp_path / "dst/x").read_bytes() == bytes(1 << 15)


def test_what_cannot_be_moved(tmp_path: Path) -> None:
    found = source(tmp_path / "src/s", pattern(64))
    for step in (
        Copy(Block(0, 0, (1, 0)), Block(0, 0, (2, 0)), (4, 2), "F4", "F4"),
        Copy(Block(0, 0, (1,)), Block(0, 0, (4,)), (4,), "F8_E4M3", "F32"),
    ):
        plan = Plan([found], [Output("x", 16)], [Unit("t", (step,))])
        with pytest.raises(UnsupportedError):
            run(plan, tmp_path / "dst")
        assert sorted(p.name for p in tmp_path.iterdir()) == ["src"]


def test_parts_do_not_depend_on_memory_or_workers(tmp_path: Path) -> None:
    plan = reshard(tmp_path / "src", MATRICES, 4, 2)
    chained = [p.number for t in schedule.schedule(plan, ["xxh3_128"]) for p in t.parts]
    single = [p.number for t in schedule.schedule(plan, ()) for p in t.parts]
    assert chained == single == list(range(len(single)))


@pytest.mark.parametrize("hashes", [(), ("xxh3_128",)])
def test_a_task_is_the_same_wherever_it_is_made(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, hashes: tuple[str, ...]
) -> None:
    """Another machine makes the tasks that it is to do, and no others."""
    monkeypatch.setattr(schedule, "_MIB", 1 << 14)
    monkeypatch.setattr(schedule, "_LARGEST_PART", 1 << 14)
    monkeypatch.setattr(schedule, "_BATCH", 1 << 13)
    plan = reshard(tmp_path / "src", [*MATRICES, *[((256, 64), i % 2) for i in range(3)]], 4, 2)
    (tmp_path / "note").write_bytes(b"note")
    plan.outputs.append(Output("note", 4, carried=str(tmp_path / "note")))
    tasks = schedule.schedule(plan, hashes)
    large = schedule.large_units(tasks)
    assert 0 < len(large) < len(plan.units)
    with monkeypatch.context() as context:
        context.setattr(schedule, "_moved_parts", None)  # what takes long
        there = schedule.Schedule(pickle.loads(pickle.dumps(plan)), hashes, (), large)  # noqa: S301 - our own
    assert (len(there), list(there)) == (len(tasks), tasks)
    assert [there[i] for i in reversed(range(len(tasks)))] == tasks[::-1]
    assert there[-3:] == tasks[-3:]


def test_large_units_are_cut(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plan = reshard(tmp_path / "src", [((2048, 512), 1), ((512, 2048), 0), ((2 << 20,), None)], 2, 2)
    monkeypatch.setattr(schedule, "_MIB", 1 << 18)
    monkeypatch.setattr(schedule, "_LARGEST_PART", 1 << 19)
    parts = [p for t in schedule.schedule(plan, ()) for p in t.parts]
    assert sum(p.nbytes for p in parts) == plan.bytes_written - 2 * 8
    assert max(p.nbytes for p in parts) <= 1 << 19
    run(plan, tmp_path / "dst", RunOptions(manifest=True))
    assert written(tmp_path / "dst", plan) == expected(plan)


def test_many_small_tensors(tmp_path: Path) -> None:
    """Small units share blocks: far fewer calls than tensors."""
    plan = reshard(tmp_path / "src", [((8, 16), i % 2) for i in range(900)], 2, 2)
    calls = 0
    with pytest.MonkeyPatch.context() as patch:
        write = files.FilePool.write

        def counted(pool: files.FilePool, path: str, offset: int, data: memoryview, **how: bool) -> None:
            nonlocal calls
            calls += 1
            write(pool, path, offset, data, **how)

        patch.setattr(files.FilePool, "write", counted)
        run(plan, tmp_path / "dst", RunOptions(manifest=True))
    assert written(tmp_path / "dst", plan) == expected(plan)
    assert calls < 1200  # every second tensor follows a gap of eight bytes, which is not written


def test_no_units(tmp_path: Path) -> None:
    result = run(Plan([], [], []), tmp_path / "dst")
    assert list((tmp_path / "dst").iterdir()) == []
    assert result.bytes_written == 0


def test_defaults() -> None:
    options = RunOptions()
    assert options.memory == 64 << 20
    assert 2 <= options.movers <= 4
    assert np.dtype("u1").itemsize == 1
