"""Chunks are sent when nothing more is written into them, and not before."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpttool.core.plan import Block, Copy, Fill, Output, Plan, Unit, WrittenTensor
from ckpttool.errors import AccessError
from ckpttool.execute import RunOptions, compute, moves, quantize, run, schedule, workforce
from ckpttool.execute.destinations import objects
from ckpttool.execute.destinations.chunks import Chunks
from ckpttool.execute.hashing import ALGORITHM
from ckpttool.execute.workforce import CompletionQueue
from ckpttool.storage.place import SCHEMES
from tests.execute.merges import merge_plan
from tests.execute.plans import expected
from tests.execute.test_bytes import recipes
from tests.execute.test_objects import Dst
from tests.helpers.command import ckpttool
from tests.helpers.object_store import ObjectStore
from tests.helpers.sample import examples

FIXTURES = Path(__file__).parents[2] / "fixtures"


def small(monkeypatch: pytest.MonkeyPatch, store: ObjectStore, spool: str, part: int, chunk: int) -> None:
    """Small limits make small tensors meet what large ones meet; what is done is recorded, and sent, at once."""
    monkeypatch.setattr(schedule, "_MIB", part)
    monkeypatch.setattr(schedule, "_LARGEST_PART", part)
    monkeypatch.setattr(moves, "TURNED_PART", part)
    monkeypatch.setattr(objects, "CHUNK", chunk)
    monkeypatch.setattr(objects, "WHOLE", chunk)
    monkeypatch.setattr(objects, "REMEMBER", 0.0)
    monkeypatch.setattr(objects, "open_bucket", lambda _scheme, _bucket, **_: store)
    monkeypatch.setattr(workforce, "CompletionQueue", lambda _, most: CompletionQueue(1, most))
    monkeypatch.setattr(workforce, "_SMALLEST_ARENA", 4096)
    monkeypatch.setattr("tempfile.tempdir", spool)


@settings(max_examples=examples(25))
@given(recipes(), st.data())
def test_any_plan(recipe: Callable[[Path], Plan], data: st.DataObject) -> None:
    """Any plan, cut anywhere, ended at any request and resumed, writes what numpy writes."""
    store, choose = ObjectStore(), st.sampled_from
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as monkeypatch:
        plan = recipe(Path(directory, "src"))
        small(monkeypatch, store, directory, data.draw(choose((64, 1000, 1 << 20))), data.draw(choose((16, 100, 3000))))
        dst: Any = Dst("s3://bucket/d")
        first = RunOptions(
            workers=data.draw(st.integers(1, 3)),
            connections=data.draw(st.integers(1, 3)),
            manifest=data.draw(st.booleans()),
        )
        then = replace(first, resume=True, manifest=data.draw(st.booleans()))
        end, how = data.draw(st.integers(0, 60)), data.draw(choose(("dead before", "dead after")))
        store.fault = lambda i, _: how if i == end else ""
        last = first
        with suppress(AccessError):
            run(plan, dst, first)
        store.heal()
        if not store.objects_ or any(".ckpttool-partial" in k for k in store.objects_):
            last = then
            run(plan, dst, then)
        found = store.files()
        assert (found.pop("d/ckpttool.manifest.json", None) is not None) == last.manifest
        assert found == {f"d/{n}": v for n, v in expected(plan).items()}
        assert not store.uploads_


def test_computed_tensors(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plan, want = merge_plan(tmp_path / "src", rows=400)
    monkeypatch.setattr(compute, "CHUNK", 64)
    monkeypatch.setattr(compute, "PART", 200)
    for manifest in (False, True):
        store = ObjectStore()
        small(monkeypatch, store, str(tmp_path), 100, 64)
        dst: Any = Dst("s3://bucket/d")
        run(plan, dst, RunOptions(manifest=manifest, workers=1))
        assert b"|".join(store.files()[f"d/{o.name}"] for o in plan.outputs) == want


FORMATS = {
    "hf": ("reshard", "--to", "hf"),
    "torch-bin": ("reshard", "--to", "torch-bin"),
    "dcp": ("reshard", "--to", "dcp"),
    "megatron": ("reshard", "--to", "megatron"),
    "megatron-dist": ("reshard", "--to", "megatron-dist"),
    "unified": ("reshard", "--to", "unified"),
    "hybrid": ("reshard", "--to", "hybrid"),
    "vllm": ("reshard", "--to", "vllm", "--tp-out", "2"),
    "cast": ("reshard", "--to", "hf", "--dtype", "f32"),
    "quantize": ("quantize",),
    "drop-keys": ("drop-keys", "lm_head.weight"),
}


@pytest.mark.sample("quantize-True", "megatron-dist-False")
@pytest.mark.parametrize("manifest", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_formats(name: str, manifest: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    command, *options = FORMATS[name]
    options += ["--manifest"] * manifest
    source, store, local = FIXTURES / "llama_tp8", ObjectStore(), tmp_path / "local"
    small(monkeypatch, store, str(tmp_path), 4096, 1024)
    monkeypatch.setattr(quantize, "PART", 600)
    assert ckpttool(command, source, local, *options).code == 0
    sent: list[int] = []
    settle = objects.ObjectDestination.settle

    def look(self: objects.ObjectDestination, *given: Any) -> None:
        sent.append(len([r for r in store.requests if r.startswith("put_part")]))
        settle(self, *given)

    with patch.dict(SCHEMES, {"s3": Dst}), patch.object(objects.ObjectDestination, "settle", look):
        done = ckpttool(command, source, "s3://bucket/d", *options)
    assert done.code == 0, done.err
    here = {f"d/{p.relative_to(local).as_posix()}": p.read_bytes() for p in local.rglob("*") if p.is_file()}
    assert store.files() == here
    assert sent[0] > 20  # while the others were being written


# -- which chunks wait for what


def test_parts_and_hashes() -> None:
    """Two tensors of 100 bytes, in chunks of 64, behind a header of 8 bytes."""
    copies = [Copy(Block(0, 100 * i, (1,)), Block(0, 8 + 100 * i, (1,)), (100,), "U8", "U8") for i in range(2)]
    units = [Unit(f"t{i}", (c,), (WrittenTensor(f"t{i}", 0, 8 + 100 * i, 100),)) for i, c in enumerate(copies)]
    plan = Plan([], [Output("a", 208, ((0, b"12345678"),)), Output("b", 10)], units)
    tasks = schedule.schedule(plan, [])
    chunks = Chunks(plan, tasks, (64, 0))
    assert chunks.counts == [4, 0]
    assert list(chunks.done([1])) == [(0, 2), (0, 3)]  # the other one writes into chunk 1, too
    assert list(chunks.done([0])) == [(0, 0), (0, 1)]
    assert chunks.finished([{0, 1}, ()], ()) == {0}
    assert chunks.finished([{1, 2, 3}, ()], ()) == {1}
    assert chunks.finished([{0, 2, 3}, ()], ()) == set()
    hashed = Chunks(plan, schedule.schedule(plan, [ALGORITHM]), (64, 0))
    assert list(hashed.done([0, 1])) == []  # hashes may read it back
    assert list(hashed.done([], ["0.0", "1.0", "0:0:0"])) == [(0, 0), (0, 1), (0, 2), (0, 3)]
    assert hashed.finished([{0, 1, 2, 3}, ()], ["0.0"]) == set()
    assert hashed.finished([{0, 1, 2, 3}, ()], ["0.0", "1.0"]) == {0, 1}


def test_what_is_put_whole_is_written_again() -> None:
    fills = tuple(Fill(Block(f, 0, (1,)), (10,), "U8") for f in range(2))
    plan = Plan([], [Output("a", 10), Output("b", 10)], [Unit("t", fills)])
    chunks = Chunks(plan, schedule.schedule(plan, []), (4, 0))
    assert chunks.finished([{0, 1, 2}, ()], ()) == set()


def test_checksums_inside_wait_for_the_end() -> None:
    fill = Fill(Block(0, 50, (1,)), (100,), "U8")
    output = Output("a", 200, ((0, b"head"), (160, b"tail")), checksums={50: (0,)})
    plan = Plan([], [output], [Unit("t", (fill,), (WrittenTensor("t", 0, 50, 100),))])
    chunks = Chunks(plan, schedule.schedule(plan, []), (32,))
    assert list(chunks.done([0])) == [(0, 1), (0, 2), (0, 3), (0, 4)]
