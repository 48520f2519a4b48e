"""Packed units are the units that were packed."""

from __future__ import annotations

import pickle
from math import prod

from hypothesis import given
from hypothesis import strategies as st

from ckpttool.containers.safetensors import CompressedHeader
from ckpttool.core.plan import (
    AssertEqual,
    AssertPadding,
    Block,
    Compute,
    Copy,
    Fill,
    Output,
    Plan,
    StoredOperand,
    Unit,
    Units,
    WrittenTensor,
)

numbers = st.integers(0, 2**62)
sizes = st.lists(st.integers(1, 4), max_size=2).map(tuple)
names = st.sampled_from(["a", "b/moment1_0", "\udcff"])
blocks = st.builds(Block, st.integers(0, 3), numbers, sizes)
SIZES = {"BF16": 2, "F32": 4}
dtypes = st.sampled_from([*SIZES])
OPERAND = StoredOperand("F32", (2,), (), "`w` of x")
steps = st.one_of(
    st.builds(Copy, blocks, blocks, sizes, dtypes, dtypes),
    st.builds(Fill, blocks, sizes, dtypes),
    st.builds(AssertEqual, blocks, blocks, sizes, dtypes, names, st.sampled_from(["", "F32"])),
    st.builds(AssertPadding, blocks, sizes, dtypes, st.none() | blocks, names),
    st.builds(lambda n: Compute(n, (2,), "F32", "linear", (OPERAND,), None, ((),), (), None), names),
)
targets = st.builds(WrittenTensor, names, st.integers(0, 3), numbers, numbers)
units = st.builds(
    Unit, names, st.lists(steps, max_size=4).map(tuple), st.lists(targets, max_size=3).map(tuple)
)  # fmt: skip


@given(st.lists(units, max_size=5))
def test_what_comes_out_is_what_went_in(given: list[Unit]) -> None:
    packed = Units(given)
    assert list(packed) == given
    assert len(packed) == len(given)
    assert packed[-2:] == given[-2:]
    assert [packed[i] for i in range(len(given))] == given
    plan = Plan([], [], packed)
    assert plan.boxes == sum(type(s) is Copy for u in given for s in u.steps)
    assert plan.digest() == Plan([], [], given).digest()


@given(st.lists(units, max_size=5))
def test_on_another_machine_they_are_the_same(given: list[Unit]) -> None:
    packed = pickle.loads(pickle.dumps(Units(given), 5))  # noqa: S301 - our own
    assert list(packed) == given
    packed.append(Unit("one more", (Copy(Block(1, 2, (4,)), Block(3, 4, (4,)), (2,), "F32", "F32"),)))
    assert list(packed)[:-1] == given
    assert packed[-1].name == "one more"


@given(st.lists(units, max_size=5))
def test_what_units_come_to(given: list[Unit]) -> None:
    packed = Units(given)
    for unit, measure, at in zip(given, packed.measure(), range(len(given)), strict=True):
        moved = [s for s in unit.steps if isinstance(s, Copy | Fill)]
        checks = [s for s in unit.steps if isinstance(s, AssertEqual | AssertPadding)]
        assert measure.written == sum(
            prod(s.shape) * SIZES[s.dst_dtype if isinstance(s, Copy) else s.dtype] for s in moved
        )
        assert measure.checked == sum(prod(s.shape) * SIZES[s.dtype] for s in checks)
        assert sorted(measure.files) == sorted({s.dst.file for s in moved})
        assert measure.computes == any(isinstance(s, Compute) for s in unit.steps)
        assert packed.stored_tensors(at) == unit.stored_tensors


def test_a_plan_takes_little_on_its_way() -> None:
    """Tensors of a large model differ in a few numbers of their names and places."""
    size, many = 7168 * 2048, 2000
    made = []
    for i in range(many):
        name = f"model.layers.{i // 256}.mlp.experts.{i % 256}.down_proj.weight"
        step = Copy(
            Block(i // 100, i * size, (2048, 1)), Block(i // 300, i * size, (2048, 1)), (7168, 2048), "BF16", "BF16"
        )
        made.append(Unit(name, (step,), (WrittenTensor(name, i // 300, i * size, size),)))
    assert len(pickle.dumps(Units(made), 5)) < 100 * many


@given(st.lists(units, min_size=1, max_size=3), st.data())
def test_every_step_counts_in_the_digest(given: list[Unit], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(given) - 1))
    other = data.draw(steps)
    changed = [*given[:at], given[at]._replace(steps=(*given[at].steps, other)), *given[at + 1 :]]
    assert Plan([], [], changed).digest() != Plan([], [], given).digest()


def test_places_and_names_are_in_the_digest() -> None:
    def digest(name: str, offset: int) -> str:
        copy = Copy(Block(0, offset, (1,)), Block(0, 0, (1,)), (4,), "U8", "U8")
        return Plan([], [], [Unit(name, (copy,))]).digest()

    assert len({digest("a", 0), digest("b", 0), digest("a", 8)}) == 3


def test_deflated_literals_are_hashed_as_they_are() -> None:
    data = b'{"a":1}' * 20_000
    deflated = CompressedHeader()
    deflated.put(data[9:1000])
    deflated.put(data[1000:])
    deflated.close(data[:9])
    assert list(deflated) == [(0, data)]
    plans = [Plan([], [Output("x", len(data), literals)], []) for literals in (((0, data),), deflated)]
    assert plans[0].digest() == plans[1].digest()
