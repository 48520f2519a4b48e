"""What lies on pages that others write into is kept, read back, and handed out once."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.execute import shares
from ckpttool.execute.compute_worker import ComputeJob, edges, order, server
from ckpttool.execute.files import FilePool, create
from ckpttool.execute.schedule import part_limit, schedule
from ckpttool.execute.withheld_pages import WithholdingMedium
from ckpttool.execute.worker_pool import Answer
from tests.execute.merges import merge_plan

SIZE = 100


@contextlib.contextmanager
def opened(path: str, size: int = SIZE) -> Iterator[tuple[WithholdingMedium, FilePool]]:
    """A medium that can hold, the one below it, and a file of zeros."""
    create(path, size)
    with FilePool() as pool:
        pool.expect_writes(path)
        yield WithholdingMedium(pool), pool


def read(medium: WithholdingMedium, path: str, offset: int, *sizes: int) -> bytes:
    memory = bytearray(sum(sizes))
    views, at = [], 0
    for n in sizes:
        views.append(memoryview(memory)[at : at + n])
        at += n
    medium.read(path, offset, views)
    return bytes(memory)


@given(st.data())
def test_any_writes(data: st.DataObject) -> None:
    """Nothing is written to pages that are held; what is read is what was written; edges are what the file lacks."""
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        page = data.draw(st.sampled_from((1, 7, 16, 64)))
        patch.setattr(shares, "PAGE", page)
        path = str(Path(directory, "a"))
        hold = data.draw(st.lists(st.integers(0, SIZE // page), unique=True, max_size=6).map(sorted))
        model, mine = bytearray(SIZE), bytearray(SIZE)
        with opened(path) as (held, _):
            held.hold({path: hold})
            for number in range(data.draw(st.integers(0, 8))):
                a, b = sorted(data.draw(st.tuples(st.integers(0, SIZE), st.integers(0, SIZE))))
                written = bytes((number + 1,)) * (b - a)
                held.write(path, a, memoryview(written))
                model[a:b] = written
                if data.draw(st.booleans()):
                    a, b, c = sorted(data.draw(st.tuples(*[st.integers(0, SIZE)] * 3)))
                    assert read(held, path, a, b - a, c - b) == model[a:c]
                if data.draw(st.booleans()):
                    for edge in held.take():
                        mine[edge.offset : edge.offset + len(edge.data)] = edge.data
            for edge in held.take():
                assert edge.path == path
                mine[edge.offset : edge.offset + len(edge.data)] = edge.data
            assert not held.take()
        found = bytearray(Path(path).read_bytes())
        for number in hold:
            start, stop = number * page, (number + 1) * page
            assert not any(found[start:stop])
            found[start:stop] = mine[start:stop]
            mine[start:stop] = bytes(len(mine[start:stop]))
        assert found == model
        assert not any(mine)


def test_other_pages_and_files(tmp_path: Path) -> None:
    """A new order holds other pages; what was kept before is gone. Other files are as they always are."""
    path, other = str(tmp_path / "a"), str(tmp_path / "b")
    with opened(path, 3 * shares.PAGE) as (held, pool):
        create(other, 10)
        pool.expect_writes(other)
        held.hold({path: [1], other: []})
        assert held.held == {path: [1]}
        whole = bytes(range(1, 4)) * shares.PAGE
        held.write(path, 0, memoryview(whole))
        held.write(other, 0, memoryview(b"0123456789"))
        assert [(e.offset, len(e.data)) for e in held.take()] == [(shares.PAGE, shares.PAGE)]
        assert read(held, path, 0, len(whole)) == whole
        held.hold({path: [2]})
        assert not held.take()
        assert read(held, path, shares.PAGE, shares.PAGE) == bytes(shares.PAGE)
        assert read(held, other, 0, 10) == b"0123456789"
        held.write(path, 3 * shares.PAGE - 1, memoryview(b"x"))
        held.write(path, shares.PAGE, memoryview(b"y"))
        assert held.take() == [(path, 3 * shares.PAGE - 1, b"x")]
        held.hold({})
        held.write(path, 3 * shares.PAGE - 2, memoryview(b"z"))
        assert read(held, path, 3 * shares.PAGE - 3, 3) == b"\1z\3"


def test_it_is_the_medium_that_it_was_made_of(tmp_path: Path) -> None:
    path = str(tmp_path / "a")
    with opened(path) as (held, pool):
        held.scratch = "/x"
        held.unsynced = True
        assert (pool.scratch, pool.unsynced) == ("/x", True)
        assert (held.policy, held.short_calls, held.ahead) == (pool.policy, pool.short_calls, 0)
        assert not held.is_far(path)
        held.sync(path, metadata=True)


@pytest.mark.parametrize("manifest", [False, True])
def test_processes_tell_what_they_keep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, manifest: bool) -> None:
    """Bytes on pages that are held come before the part that they belong to, and are in the tensor's hash."""
    monkeypatch.setattr(shares, "PAGE", 64)
    plan, want = merge_plan(tmp_path / "src")
    hashes = ["xxh3_128"] * manifest
    paths = [str(tmp_path / o.name) for o in plan.outputs]
    task = schedule(plan, hashes)[0]
    unit = plan.units[0]
    job = ComputeJob([s.contents for s in plan.sources], paths, None, 8 << 20, part_limit(plan.bytes_written), hashes)
    sums = []
    for held in ({}, {0: [1, 3]}, {0: list(range(100))}):
        for path, made in zip(paths, plan.outputs, strict=True):
            Path(path).unlink(missing_ok=True)
            create(path, made.size)
        answers: list[Answer] = []
        server(job)()(order(unit, 0, task, (), held), answers.append)
        found = bytearray(Path(paths[0]).read_bytes()[: task.nbytes])
        kept = [(i, e) for i, a in enumerate(answers) for e in edges(a)]
        last = max(i for i, a in enumerate(answers) if "part" in a)
        for i, (output, offset, data) in kept:
            assert i <= last
            assert output == 0
            assert all(at // 64 in held[0] for at in (offset, offset + len(data) - 1))
            assert not any(found[offset : offset + len(data)])
            found[offset : offset + len(data)] = data
        assert bool(kept) == bool(held)
        assert found == want[: len(found)]
        sums.append(answers[-1]["sums"])
    assert sums[0] == sums[1] == sums[2]
    assert all(any(key == "0.0" for key in s) == manifest for s in sums)
