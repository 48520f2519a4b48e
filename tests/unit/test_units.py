"""Packed units are the units that were packed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ckpttool.containers.safetensors import CompressedHeader
from ckpttool.plan import (
    AssertEqual,
    AssertPadding,
    Block,
    Compute,
    Copy,
    Fill,
    Output,
    Plan,
    Stored,
    Target,
    Unit,
    Units,
)

numbers = st.integers(0, 2**62)
sizes = st.lists(st.integers(1, 4), max_size=2).map(tuple)
names = st.sampled_from(["a", "b/moment1_0", "\udcff"])
blocks = st.builds(Block, st.integers(0, 3), numbers, sizes)
dtypes = st.sampled_from(["BF16", "F32"])
OPERAND = Stored("F32", (2,), (), "`w` of x")
steps = st.one_of(
    st.builds(Copy, blocks, blocks, sizes, dtypes, dtypes),
    st.builds(Fill, blocks, sizes, dtypes),
    st.builds(AssertEqual, blocks, blocks, sizes, dtypes, names, st.sampled_from(["", "F32"])),
    st.builds(AssertPadding, blocks, sizes, dtypes, st.none() | blocks, names),
    st.builds(lambda n: Compute(n, (2,), "F32", "linear", (OPERAND,), None, ((),), (), None), names),
)
targets = st.builds(Target, names, st.integers(0, 3), numbers, numbers)
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
