"""Objects whose chunks are sent by several machines: the bytes are those of a run on one, and none is sent unmade."""

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

from ckpttool.core.plan import Block, Fill, Output, Plan, Unit, WrittenTensor
from ckpttool.errors import AccessError, OutputError, UsageError
from ckpttool.execute import RunOptions, run
from ckpttool.execute.destinations import destination_for, objects
from ckpttool.execute.destinations.object_branch import ObjectBranch
from ckpttool.execute.destinations.spool import Spool
from ckpttool.execute.fleets.base import Answer, Order
from ckpttool.execute.machines.node import NodeWorker
from ckpttool.execute.options import Member
from ckpttool.storage.place import parse_place
from tests.execute.merges import merge_plan
from tests.execute.plans import expected
from tests.execute.test_bytes import recipes
from tests.execute.test_chunks import small
from tests.execute.test_objects import Dst, check_whole, plan, write
from tests.helpers.fleet import CALM, WILD, FakeFleet
from tests.helpers.object_store import ObjectStore
from tests.helpers.sample import examples

__all__ = ["plan"]  # a fixture


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    """A bucket for runs with chunks of 8 KiB and parts of 4."""
    found = ObjectStore()
    small(monkeypatch, found, str(tmp_path), 4 << 10, 8 << 10)
    monkeypatch.setattr(objects, "LEAST_SHARE", 1 << 10)
    return found


@settings(max_examples=examples(25))
@given(recipes(), st.data())
def test_any_plan(recipe: Callable[[Path], Plan], data: st.DataObject) -> None:
    """Any plan, cut anywhere, on nodes that lose and repeat orders, with a driver that ends at any request and is
    followed by another one, or by a run on one machine."""
    store, choose = ObjectStore(), st.sampled_from
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as monkeypatch:
        plan = recipe(Path(directory, "src"))
        small(monkeypatch, store, directory, data.draw(choose((64, 1000))), data.draw(choose((16, 100, 3000))))
        monkeypatch.setattr(objects, "LEAST_SHARE", data.draw(choose((1, 300))))

        def fleet() -> FakeFleet:
            return FakeFleet(
                data.draw(st.integers(1, 3)), data.draw(st.integers(0, 99)), data.draw(choose((CALM, WILD)))
            )

        dst: Any = Dst("s3://bucket/d")
        first = RunOptions(connections=2, manifest=data.draw(st.booleans()), on=fleet())
        then = replace(
            first, resume=True, manifest=data.draw(st.booleans()), on=fleet() if data.draw(st.booleans()) else ""
        )
        end, how = data.draw(st.integers(0, 80)), data.draw(choose(("dead before", "dead after")))
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
        assert not list(Path(directory).glob("ckpttool-spool-*"))


@pytest.mark.parametrize("seed", range(3))
def test_nodes_send_the_chunks_of_one_object(seed: int, store: ObjectStore, plan: Plan, tmp_path: Path) -> None:
    fleet = FakeFleet(3, seed, WILD if seed else CALM)
    write(plan, on=fleet)
    check_whole(store, plan)
    assert len(fleet.sent) > 5
    assert len([o for o in fleet.sent if any(output == 0 for output, _, _ in o["chunks"])]) > 1
    sent = [r for r in store.requests if r.startswith("put_part")]
    assert seed or len(sent) == len(set(sent))
    assert not list(tmp_path.glob("ckpttool-spool-*"))


def test_tensors_that_are_computed(store: ObjectStore, tmp_path: Path) -> None:
    plan, want = merge_plan(tmp_path / "src", rows=400)
    for manifest in (False, True):
        with patch.object(objects, "CHUNK", 256), patch.object(objects, "WHOLE", 100):
            store.requests.clear()
            write(plan, on=FakeFleet(2, 1, WILD), manifest=manifest)
        assert b"|".join(store.files()[f"run/hf/{o.name}"] for o in plan.outputs) == want
        store.objects_.clear()


def test_a_killed_driver_asks_the_store_what_was_sent(store: ObjectStore, plan: Plan) -> None:
    remember, told = objects.ObjectDestination.remember, 0

    def killed(self: objects.ObjectDestination, *given: Any) -> None:
        nonlocal told
        told += 1
        if told > 3:
            raise KeyboardInterrupt
        remember(self, *given)

    with patch.object(objects.ObjectDestination, "remember", killed), pytest.raises(KeyboardInterrupt):
        write(plan, on=FakeFleet())
    before = {r for r in store.requests if r.startswith("put_part")}
    assert before
    store.requests.clear()
    result = write(plan, resume=True, on=FakeFleet())
    check_whole(store, plan)
    assert result.bytes_skipped > 0
    assert not before & set(store.requests)


def test_a_node_that_is_given_up_and_comes_back(store: ObjectStore, plan: Plan, tmp_path: Path) -> None:
    """While the run goes on, it sends the same bytes; afterwards it finds that the run has ended."""
    nodes: list[tuple[NodeWorker, Order]] = []
    do = NodeWorker.do

    def look(self: NodeWorker, order: Order) -> Answer:
        nodes.append((self, order))
        return do(self, order)

    class Undead(FakeFleet):
        def end(self, *, now: bool) -> None:
            self.ended.append(now)

    with patch.object(NodeWorker, "do", look):
        write(plan, on=Undead(2))
    check_whole(store, plan)
    for node, order in nodes:
        with pytest.raises(OutputError, match="has ended"):
            node.do(order)
        node.close()
    check_whole(store, plan)
    write(plan, force=True)
    assert not list(tmp_path.glob("ckpttool-spool-*"))


def test_an_upload_that_is_gone(store: ObjectStore, plan: Plan) -> None:
    """Another run has aborted it: the error says so, and names the node."""
    put_part = store.put_part

    def gone(key: str, upload: str, number: int, data: Any) -> str:
        store.uploads_.clear()
        return put_part(key, upload, number, data)

    with patch.object(store, "put_part", gone), pytest.raises(OutputError, match="an upload is gone") as e:
        write(plan, on=FakeFleet())
    assert any("on node-" in w for w in e.value.where)


def test_what_a_node_owes_is_never_made_up(store: ObjectStore, plan: Plan) -> None:
    """The spool of the driver has zeros where nodes have tensors."""
    finish = ObjectBranch.finish

    def forgetful(self: ObjectBranch, pool: Any) -> dict[str, Any]:
        answer = finish(self, pool)
        return answer | {"sent": answer["sent"][1:]}

    with patch.object(ObjectBranch, "finish", forgetful), pytest.raises(OutputError, match="was not sent"):
        write(plan, on=FakeFleet())
    assert not any("model" in k for k in store.files())


def test_an_order_for_a_chunk_without_its_tasks(store: ObjectStore, plan: Plan) -> None:
    turn = FakeFleet._turn

    def torn(self: FakeFleet, node: Any, ticket: int, order: Order) -> None:
        turn(self, node, ticket, order | {"tasks": order["tasks"][:-1]})

    with patch.object(FakeFleet, "_turn", torn), pytest.raises(OutputError, match="has different parts"):
        write(plan, on=FakeFleet())
    assert not any("model" in k for k in store.files())


def test_files_with_checksums_inside_are_refused(store: ObjectStore) -> None:
    fill = Fill(Block(0, 50, (1,)), (100,), "U8")
    output = Output("a.bin", 200, ((0, b"head"),), checksums={50: (0,)})
    with pytest.raises(UsageError, match="checksums of its tensors"):
        write(Plan([], [output], [Unit("t", (fill,), (WrittenTensor("t", 0, 50, 100),))]), on=FakeFleet())
    assert not store.objects_
    assert not store.uploads_


@pytest.mark.parametrize(
    ("options", "how"), [(RunOptions(on="ray"), "--on"), (RunOptions(member=Member(1, 2)), "--part")]
)
def test_the_hub_has_one_writer(options: RunOptions, how: str) -> None:
    with pytest.raises(UsageError, match=f"{how} does not write to hf://: one machine makes a commit") as e:
        destination_for(parse_place("hf://org/model"), options)
    assert f"run without {how}, or write to a bucket" in str(e.value.hint)


def test_spools_of_several_processes(tmp_path: Path) -> None:
    with patch("tempfile.tempdir", str(tmp_path)):
        one, two = Spool.free("s3://b/d"), Spool.free("s3://b/d")
        assert one.path != two.path
        one.make(str(one.path / "left"), 10)
        one.close()
        again = Spool.free("s3://b/d")
        assert (again.path, list(again.path.iterdir())) == (one.path, [])
        again.close()
        two.close()
    assert not list(tmp_path.iterdir())
