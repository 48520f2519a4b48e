"""What a rank holds by every rule, judged by numpy: arrays whose elements are their own numbers are cut both ways."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ckpttool.core.mesh import Coords, Mesh, share
from ckpttool.errors import LayoutError
from ckpttool.layout.rules import (
    CutSize,
    IndivisibleError,
    PartitionContext,
    RankShare,
    Rule,
    cut_axis,
    fused_rule,
    global_shape,
    local_boxes,
    parse_rule,
    part_rule,
)
from tests.helpers.arrays import Array, index

PAD = -1


def counted(shape: tuple[int, ...]) -> Array:
    """Every element is its own number."""
    return np.arange(np.prod(shape, dtype=np.int64), dtype=np.int64).reshape(shape)


def held(whole: Array, local: RankShare) -> Array:
    """What a rank stores, by the boxes that local_boxes gave."""
    out = np.full(local.shape, PAD, np.int64)
    for inner, outer in local.boxes:
        into = out[index(inner)]
        assert (into == PAD).all(), "two boxes overlap in the stored tensor"
        into[...] = whole[index(outer)]
    return out


def ranks(mesh: Mesh) -> list[Coords]:
    return list(mesh.all_coords())


def cut(
    text: str, shape: tuple[int, ...], mesh: Mesh, sizes: dict[str, CutSize] | None = None, **more: Any
) -> list[Array]:
    """What every rank of a mesh stores of a counted tensor."""
    bias = more.pop("bias", False)
    cutting = PartitionContext(mesh, sizes or {}, **more)
    rule = parse_rule(text)
    return [held(counted(shape), local_boxes(rule, shape, cutting, at, bias=bias)) for at in ranks(mesh)]


# What numpy says about each verb


def shared_out(whole: Array, ways: int, axis: int, size: CutSize | None) -> list[Array]:
    """Equal parts along an axis; with more ranks than units, each unit as often as it is needed."""
    if size is not None and size.shared and ways > size.value:
        units = np.split(whole, size.value, axis)
        return [units[r * size.value // ways] for r in range(ways)]
    return list(np.split(whole, ways, axis))


@dataclass(frozen=True)
class Case:
    """A rule with a tensor and a mesh that it fits."""

    text: str
    shape: tuple[int, ...]
    mesh: Mesh
    sizes: dict[str, CutSize]
    expected: list[Array]
    bias: bool = False


@st.composite
def cases(draw: st.DrawFn) -> Case:
    tp = draw(st.integers(1, 6))
    ep, etp = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    grouped = draw(st.booleans())
    bias = draw(st.booleans())
    in_out = draw(st.booleans())
    verb = draw(st.sampled_from(["replicate", "column", "row", "vocab", "fused"]))
    assume(not (grouped and verb == "vocab"))
    ways = etp if grouped else tp
    mesh = Mesh(tp=tp, ep=ep, etp=etp)

    def units() -> CutSize:
        """A number of units that the ranks can share."""
        if draw(st.booleans()):
            return CutSize(ways * draw(st.integers(1, 3)), draw(st.booleans()))
        return CutSize(draw(st.sampled_from([d for d in range(1, ways + 1) if ways % d == 0])), shared=True)

    sizes: dict[str, CutSize] = {}
    whole_parts: list[int] = []
    words = [verb]
    if verb == "fused":
        each = draw(st.integers(1, 3)) * draw(st.sampled_from([1, ways]))
        lengths = []
        for i in range(draw(st.integers(2, 4))):
            kind = draw(st.sampled_from(["p", "p:u", "p:n/u", "p:n/whole"]))
            words.append(re.sub("[pnu](?!nits|hole)", lambda m, i=i: f"{m[0]}{i}", kind))  # type: ignore[misc]
            if kind.endswith("u"):
                sizes[f"u{i}"] = units()
            if "n" in kind:
                sizes[f"n{i}"] = CutSize(draw(st.integers(1, 3)) * (sizes[f"u{i}"].value if f"u{i}" in sizes else 1))
            whole_parts += [i] if kind.endswith("whole") else []
            lengths.append(next((sizes[s].value for s in (f"n{i}", f"u{i}") if s in sizes), 1) * each)
        # A part without units has the weight 1 and is cut like any other axis.
        assume(all(f"u{i}" in sizes or i in whole_parts or n % ways == 0 for i, n in enumerate(lengths)))
        length = sum(lengths)
    elif verb == "vocab":
        length, lengths = draw(st.integers(1, 40)), []
    elif verb == "replicate" or draw(st.booleans()):
        length, lengths = ways * draw(st.integers(0, 4)), []
    else:
        sizes["u"] = units()
        words.append("u")
        length, lengths = sizes["u"].value * draw(st.integers(0, 3)), []
    other = draw(st.integers(1, 3))
    axes = [length] if bias else ([other, length] if in_out == (verb != "row") else [length, other])
    rows = grouped and draw(st.booleans())
    experts = draw(st.integers(1, 2)) * ep if rows else draw(st.integers(0, 5))
    shape = (experts, *axes) if grouped else tuple(axes)
    axis = len(shape) - 1 if bias or in_out == (verb != "row") else len(shape) - 2
    text = " ".join((["grouped"] if grouped else []) + words + (["in_out"] if in_out else []))
    whole = counted(shape)
    expected = []
    for at in ranks(mesh):
        index = at.etp if grouped else at.tp
        mine = np.array_split(whole, ep, 0)[at.ep] if grouped else whole
        if verb == "replicate" or (verb == "row" and bias):
            got = mine
        elif verb == "vocab":
            padded = -(-length // ways) * ways
            room = [(0, padded - length if i == axis else 0) for i in range(len(shape))]
            got = np.split(np.pad(mine, room, constant_values=PAD), ways, axis)[index]
        elif verb == "fused":
            parts = np.split(mine, np.cumsum(lengths)[:-1], axis)
            got = np.concatenate(
                [
                    p if i in whole_parts else shared_out(p, ways, axis, sizes.get(f"u{i}"))[index]
                    for i, p in enumerate(parts)
                ],
                axis,
            )
        else:
            got = shared_out(mine, ways, axis, sizes.get("u"))[index]
        expected.append(got)
    if rows:  # the same elements, without the axis of experts
        sizes["experts"] = CutSize(experts)
        shape = (shape[0] * shape[1], *shape[2:])
        expected = [e.reshape(e.shape[0] * e.shape[1], *e.shape[2:]) for e in expected]
    return Case(f"{text} rows" if rows else text, shape, mesh, sizes, expected, bias)


@given(cases())
def test_every_rank_holds_what_numpy_says(case: Case) -> None:
    for got, want in zip(cut(case.text, case.shape, case.mesh, case.sizes, bias=case.bias), case.expected, strict=True):
        np.testing.assert_array_equal(got, want)


@given(cases())
def test_the_ranks_together_hold_every_element_and_pad_only_a_vocabulary(case: Case) -> None:
    parts = cut(case.text, case.shape, case.mesh, case.sizes, bias=case.bias)
    together = np.unique(np.concatenate([p.ravel() for p in parts]))
    padded = PAD in together
    np.testing.assert_array_equal(together[together != PAD], np.arange(np.prod(case.shape, dtype=int)))
    assert not padded or "vocab" in case.text


@given(cases())
def test_ranks_with_the_same_coordinates_hold_the_same(case: Case) -> None:
    seen: dict[tuple[int, ...], Array] = {}
    grouped = "grouped" in case.text
    parts = cut(case.text, case.shape, case.mesh, case.sizes, bias=case.bias)
    for at, part in zip(ranks(case.mesh), parts, strict=True):
        where = (at.ep, at.etp) if grouped else (at.tp,)
        np.testing.assert_array_equal(part, seen.setdefault(where, part))


@given(cases())
def test_the_whole_shape_follows_from_any_rank(case: Case) -> None:
    rule = parse_rule(case.text)
    sizes = dict(case.sizes)
    if "vocab" in case.text:
        sizes["vocab"] = CutSize(max(case.shape))
        assume(case.bias or max(case.shape) == case.shape[cut_axis(rule, len(case.shape), bias=case.bias) or 0])
    cutting = PartitionContext(case.mesh, sizes)
    for part in case.expected:
        experts = case.shape[0] if rule.grouped else 0
        assert global_shape(rule, part.shape, experts, cutting, bias=case.bias) == case.shape


# The cases that go wrong in the field, spelled out


def test_key_value_heads_are_interleaved_and_not_tiled() -> None:
    """With 8 ranks and 2 heads the first four hold head 0; taking rank % 2 is the classic mistake."""
    got = cut("column kv", (2, 3), Mesh(tp=8), {"kv": CutSize(2, shared=True)})
    assert [int(p[0, 0]) // 3 for p in got] == [0, 0, 0, 0, 1, 1, 1, 1]


@given(st.integers(1, 8), st.integers(1, 6))
def test_rank_r_holds_head_r_times_heads_over_ranks(heads: int, copies: int) -> None:
    got = cut("column kv", (heads * 2,), Mesh(tp=heads * copies), {"kv": CutSize(heads, shared=True)})
    assert [int(p[0]) // 2 for p in got] == [r * heads // (heads * copies) for r in range(heads * copies)]


def test_fused_parts_are_cut_one_by_one() -> None:
    """Rank 0 of 2 holds [q0; k0; v0], not the first half of [q; k; v]."""
    sizes = {"heads": CutSize(4), "kv": CutSize(2, shared=True)}
    first, second = cut("fused q:heads k:kv v:kv", (8, 1), Mesh(tp=2), sizes)
    assert first.ravel().tolist() == [0, 1, 4, 6]
    assert second.ravel().tolist() == [2, 3, 5, 7]


def test_fused_parts_with_copied_heads() -> None:
    sizes = {"heads": CutSize(4), "kv": CutSize(2, shared=True)}
    got = cut("fused q:heads k:kv v:kv", (8,), Mesh(tp=4), sizes)
    assert [p.tolist() for p in got] == [[0, 4, 6], [1, 4, 6], [2, 5, 7], [3, 5, 7]]


MAMBA = {
    "inner": CutSize(8),
    "bc": CutSize(2),
    "heads": CutSize(4),
    "groups": CutSize(2, shared=True),
}
"""A state space model: 4 heads with 2 channels each, and 2 groups that share a B and a C of one state."""


def test_parts_with_a_length_of_their_own_are_cut_between_their_units() -> None:
    """in_proj of Mamba 2: z, x and dt by heads, B and C by groups, of which two ranks have the same."""
    text = "fused z:inner/heads x:inner/heads B:bc/groups C:bc/groups dt:heads"
    got = cut(text, (24,), Mesh(tp=4), MAMBA)
    assert [p.tolist() for p in got] == [
        [0, 1, 8, 9, 16, 18, 20],
        [2, 3, 10, 11, 16, 18, 21],
        [4, 5, 12, 13, 17, 19, 22],
        [6, 7, 14, 15, 17, 19, 23],
    ]
    with pytest.raises(IndivisibleError, match="4 heads cannot be split evenly across 8 ranks"):
        cut(text, (24,), Mesh(tp=8), MAMBA)


def test_a_part_that_every_rank_holds_whole() -> None:
    first, second = cut("fused x:inner/heads B:2/whole", (10,), Mesh(tp=2), MAMBA)
    assert first.tolist() == [0, 1, 2, 3, 8, 9]
    assert second.tolist() == [4, 5, 6, 7, 8, 9]
    cutting = PartitionContext(Mesh(tp=2), MAMBA)
    assert global_shape(parse_rule("fused x:inner/heads B:2/whole"), (6,), 0, cutting) == (10,)


def test_units_that_only_guard_may_be_unknown() -> None:
    """What the config does not say cannot be checked; a part's length it has to say."""
    cutting = PartitionContext(Mesh(tp=2), {"inner": CutSize(8)}, optional=frozenset({"heads"}))
    rule = parse_rule("fused z:inner/heads x:inner/heads")
    assert local_boxes(rule, (16,), cutting, Coords(0, 0, 0, 0, 0)).shape == (8,)
    with pytest.raises(LayoutError, match="does not give the size `inner`"):
        local_boxes(rule, (16,), replace(cutting, sizes={}), Coords(0, 0, 0, 0, 0))


@st.composite
def groups(draw: st.DrawFn) -> tuple[str, Array, int, dict[str, CutSize]]:
    """A rule, the whole axis, how many ranks, and the sizes, of which every part can be shared out."""
    count, sharing, queries = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    ways = draw(st.sampled_from([d for d in range(1, count + 1) if count % d == 0] + [count * sharing]))
    shared = {d * count for d in range(1, sharing + 1) if sharing % d == 0}
    heads = CutSize(count * sharing * queries, draw(st.booleans()))
    sizes = {
        "g": CutSize(count, draw(st.booleans())),
        "h": heads,
        "k": CutSize(draw(st.sampled_from(sorted(shared))), True),
    }
    sizes["n"] = CutSize(sizes["k"].value * draw(st.integers(1, 3)))
    words = draw(st.lists(st.sampled_from(["q:h", "k:k", "v:n/k"]), min_size=2, max_size=4))
    lengths = [sizes[{"q": "h", "k": "k", "v": "n"}[w[0]]].value for w in words]
    whole = counted((sum(lengths) * draw(st.integers(1, 3)),))
    return f"fused {' '.join(words)} groups=g", whole, ways, sizes


@given(groups())
def test_groups_hold_what_the_parts_would_hold_alone(case: tuple[str, Array, int, dict[str, CutSize]]) -> None:
    """The parts of all groups, taken out and cut by themselves, are what the ranks hold; and the way back."""
    text, whole, ways, sizes = case
    rule, count = parse_rule(text), sizes["g"].value
    parts: list[list[Array]] = [[] for _ in rule.parts]
    weights = [sizes[p.length].value for p in rule.parts]
    for group in np.split(whole, count):
        for part, rows in zip(
            parts, np.split(group, np.cumsum(weights)[:-1] * len(group) // sum(weights)), strict=True
        ):
            part.append(rows)
    got = cut(text, whole.shape, Mesh(tp=ways), sizes)
    for rank, held_by_it in enumerate(got):
        alone = [
            cut(part_rule(rule, i).text, (len(whole) * w // sum(weights),), Mesh(tp=ways), sizes)[rank]
            for i, w in enumerate(weights)
        ]
        want = np.concatenate([np.concatenate(p)[mine] for p, mine in zip(parts, alone, strict=True)])
        if ways > count:
            np.testing.assert_array_equal(held_by_it, want)
        else:  # whole groups
            np.testing.assert_array_equal(held_by_it, np.split(whole, ways)[rank])
            assert sorted(held_by_it) == sorted(want)
        cutting = PartitionContext(Mesh(tp=ways), sizes)
        assert global_shape(rule, held_by_it.shape, 0, cutting) == whole.shape


def test_more_ranks_than_groups_cut_the_queries_and_copy_the_keys() -> None:
    """InternLM2: per key head its two queries, the key and the value; heads of one element."""
    sizes = {"heads": CutSize(4), "kv": CutSize(2, shared=True)}
    text = "fused q:heads k:kv v:kv groups=kv"
    assert [p.tolist() for p in cut(text, (8,), Mesh(tp=2), sizes)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    got = cut(text, (8,), Mesh(tp=4), sizes)
    assert [p.tolist() for p in got] == [[0, 2, 3], [1, 2, 3], [4, 6, 7], [5, 6, 7]]


@pytest.mark.parametrize(
    ("text", "n", "tp", "why"),
    [
        ("fused q:heads k:kv v:kv groups=kv", 8, 8, "2 heads of a group cannot be split evenly across 4 ranks"),
        ("fused q:heads k:kv v:kv groups=kv", 8, 3, "3 ranks cannot share 2 kv evenly"),
        ("fused q:heads k:alone v:alone groups=kv", 8, 4, "1 alone of a group cannot be split evenly across 2 ranks"),
        ("fused q:heads k:kv v:kv groups=heads", 8, 2, "2 elements of k do not divide into 4 heads"),
        ("fused k:kv q:heads v:kv groups=heads", 16, 8, "2 kv do not divide into 4 heads"),
        ("fused q:heads k:kv v:kv groups=4", 16, 3, "4 groups of heads cannot be split evenly across 3 ranks"),
    ],
)
def test_groups_that_do_not_come_out_even(text: str, n: int, tp: int, why: str) -> None:
    sizes = {"heads": CutSize(4), "kv": CutSize(2, shared=True), "alone": CutSize(2)}
    with pytest.raises(IndivisibleError, match=why):
        cut(text, (n,), Mesh(tp=tp), sizes)


def test_a_row_bias_is_whole_on_every_rank() -> None:
    assert [p.tolist() for p in cut("row", (4,), Mesh(tp=2), bias=True)] == [[0, 1, 2, 3]] * 2


def test_the_bias_of_grouped_experts_has_an_output_axis_only() -> None:
    column = cut("grouped column", (2, 4), Mesh(etp=2), bias=True)
    row = cut("grouped row", (2, 4), Mesh(etp=2), bias=True)
    assert [p.tolist() for p in column] == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    assert [p.tolist() for p in row] == [[[0, 1, 2, 3], [4, 5, 6, 7]]] * 2


def test_rows_of_experts_are_cut_in_every_expert() -> None:
    """DBRX: w1 of all experts in one matrix, and w2 stored [in, out]: two experts of two rows."""
    sizes = {"experts": CutSize(2)}
    for text in ("grouped column rows", "grouped row rows in_out"):
        got = cut(text, (4, 1), Mesh(ep=2), sizes)
        assert [p.ravel().tolist() for p in got] == [[0, 1], [2, 3]]
        got = cut(text, (4, 1), Mesh(tp=2, etp=2), sizes)
        assert [p.ravel().tolist() for p in got] == [[0, 2], [1, 3]]
    row = cut("grouped row rows", (4, 2), Mesh(tp=2, ep=2, etp=2), sizes)
    assert [p.ravel().tolist() for p in row] == [[0, 2], [1, 3], [4, 6], [5, 7]]
    fused = cut("grouped fused gate up rows", (8,), Mesh(tp=2, etp=2), sizes)
    assert [p.tolist() for p in fused] == [[0, 2, 4, 6], [1, 3, 5, 7]]
    cutting = PartitionContext(Mesh(ep=2), sizes)
    rule = parse_rule("grouped column rows")
    with pytest.raises(IndivisibleError, match="5 rows do not divide into those of 2 experts"):
        local_boxes(rule, (5, 1), cutting, Coords(0, 0, 0, 0, 0))
    with pytest.raises(IndivisibleError, match="3 experts cannot be shared evenly by 2 ranks"):
        local_boxes(rule, (6, 1), replace(cutting, sizes={"experts": CutSize(3)}), Coords(0, 0, 0, 0, 0))
    with pytest.raises(LayoutError, match="does not give the size `experts`"):
        global_shape(rule, (2, 1), 0, replace(cutting, sizes={}))


def test_scales_of_rows_of_experts_follow_them_or_are_refused() -> None:
    """Two experts of 256 rows in blocks of 128: half of an expert is a block, a quarter is none."""
    sizes = {"experts": CutSize(2)}
    rule = parse_rule("grouped column rows")
    half = PartitionContext(Mesh(tp=2, etp=2), sizes)
    got = [local_boxes(rule, (512, 128), half, at, blocks=(128, 128)) for at in ranks(half.mesh)]
    assert [held(counted((4, 1)), g).ravel().tolist() for g in got] == [[0, 2], [1, 3]]
    quarter = PartitionContext(Mesh(tp=4, etp=4), sizes)
    with pytest.raises(IndivisibleError, match="falls inside a scale block of 128"):
        local_boxes(rule, (512, 128), quarter, Coords(0, 0, 0, 0, 0), blocks=(128, 128))


def test_held_once_is_zeros_on_the_other_ranks() -> None:
    """What every rank would add before a sum; PAD is what is written as zeros."""
    got = cut("grouped row once", (4, 3), Mesh(tp=2, ep=2, etp=2), bias=True)
    whole = counted((4, 3))
    for at, part in zip(ranks(Mesh(tp=2, ep=2, etp=2)), got, strict=True):
        mine = whole[2 * at.ep : 2 * at.ep + 2]
        np.testing.assert_array_equal(part, np.full((2, 3), PAD) if at.etp else mine)


def test_experts_that_do_not_divide_go_to_the_first_ranks() -> None:
    got = cut("grouped column", (5, 2, 1), Mesh(ep=3))
    assert [len(p) for p in got] == [2, 2, 1]
    assert [share(5, 3, r) for r in range(3)] == [(0, 2), (2, 4), (4, 5)]


def test_experts_that_do_not_divide_are_refused_where_shares_must_be_equal() -> None:
    with pytest.raises(IndivisibleError, match="5 experts cannot be shared evenly by 3 ranks"):
        cut("grouped column", (5, 2, 1), Mesh(ep=3), ragged_experts=False)


def test_a_vocabulary_is_padded_to_a_multiple() -> None:
    """vLLM pads to 64 before it cuts: 259 rows become 320, the last rank holds 99 and 61 rows of padding."""
    got = cut("vocab", (259, 1), Mesh(tp=2), vocab_multiple=64)
    assert [len(p) for p in got] == [160, 160]
    assert (got[1][:99, 0] == np.arange(160, 259)).all()
    assert (got[1][99:] == PAD).all()


def test_a_rank_may_hold_nothing_but_padding() -> None:
    got = cut("vocab", (3, 1), Mesh(tp=4), vocab_multiple=8)
    assert [p.ravel().tolist() for p in got] == [[0, 1], [2, PAD], [PAD, PAD], [PAD, PAD]]


def test_empty_and_scalar_tensors_are_held_whole() -> None:
    assert [p.shape for p in cut("column", (0, 4), Mesh(tp=2))] == [(0, 4)] * 2
    assert [p.shape for p in cut("column", (), Mesh(tp=2))] == [()] * 2


@pytest.mark.parametrize(
    ("text", "shape", "tp", "sizes", "why", "works"),
    [
        ("column", (6, 1), 4, {}, "6 .*cannot be split evenly across 4 ranks", (1, 2, 3, 6)),
        (
            "column heads",
            (12, 1),
            4,
            {"heads": CutSize(6)},
            "6 heads cannot be split evenly across 4 ranks",
            (1, 2, 3, 6),
        ),
        ("column heads", (7, 1), 2, {"heads": CutSize(2)}, "7 .* 2 heads", ()),
        ("column kv", (4, 1), 3, {"kv": CutSize(2, shared=True)}, "3 .* 2 kv", (1, 2, 4, 8, 16)),
        ("row heads", (1, 12), 4, {"heads": CutSize(6)}, "6 heads cannot be split evenly across 4 ranks", (1, 2, 3, 6)),
        ("fused a b", (5, 1), 1, {}, "5 does not divide into parts 1:1", ()),
        ("fused a b", (6, 1), 2, {}, "3 .*cannot be split evenly across 2 ranks", (1, 3)),
    ],
)
def test_what_does_not_come_out_even_is_refused(
    text: str, shape: tuple[int, ...], tp: int, sizes: dict[str, CutSize], why: str, works: tuple[int, ...]
) -> None:
    with pytest.raises(IndivisibleError, match=why) as caught:
        cut(text, shape, Mesh(tp=tp), sizes)
    assert caught.value.works == works


# Scale grids


def expanded(grid: Array, shape: tuple[int, ...], blocks: tuple[int, ...]) -> Array:
    """The scale of every element of a weight."""
    out = grid
    for axis, block in enumerate(blocks):
        out = np.repeat(out, block or shape[axis], axis)
    return out[tuple(slice(n) for n in shape)]


@given(
    st.sampled_from(
        [
            *("column", "row", "column heads", "row heads", "fused a b", "replicate"),
            *("fused a:heads/1 b:2/whole", "fused a:heads b:1/heads groups=heads"),
        ]
    ),
    st.tuples(st.integers(1, 24), st.integers(1, 24)),
    st.tuples(st.integers(0, 6), st.integers(0, 6)),
    st.integers(1, 4),
    st.integers(1, 8),
)
def test_scales_follow_their_weight_or_are_refused(
    text: str, shape: tuple[int, int], blocks: tuple[int, int], tp: int, heads: int
) -> None:
    """Every element of every rank keeps its scale; a refusal is right only when a cut falls inside a block."""
    rule = parse_rule(text)
    cutting = PartitionContext(Mesh(tp=tp), {"heads": CutSize(heads)})
    grid = counted((-(-shape[0] // blocks[0]) if blocks[0] else 1, -(-shape[1] // blocks[1]) if blocks[1] else 1))
    each = expanded(grid, shape, blocks)
    try:
        weights = [local_boxes(rule, shape, cutting, at) for at in ranks(cutting.mesh)]
    except IndivisibleError:
        return  # the weight itself cannot be cut
    try:
        scales = [local_boxes(rule, shape, cutting, at, blocks=blocks) for at in ranks(cutting.mesh)]
    except IndivisibleError:
        assert any(not on_blocks(w, shape, blocks) for w in weights)
        return
    for weight, scale in zip(weights, scales, strict=True):
        np.testing.assert_array_equal(held(each, weight), expanded(held(grid, scale), weight.shape, blocks))


def on_blocks(local: RankShare, shape: tuple[int, ...], blocks: tuple[int, ...]) -> bool:
    """Whether all boxes of a rank lie on block boundaries."""
    for inner, outer in local.boxes:
        for axis, block in enumerate(blocks):
            inside = block and (
                inner.start[axis] % block
                or outer.start[axis] % block
                or (outer.stop[axis] % block and outer.stop[axis] != shape[axis])
            )
            if inside:
                return False
    return True


def test_a_cut_inside_a_block_is_refused() -> None:
    """192 rows in blocks of 128 on two ranks: rows 96 to 127 would take the wrong scale."""
    with pytest.raises(IndivisibleError, match="the cut at 96 of 192 falls inside a scale block of 128"):
        local_boxes(
            parse_rule("column"), (192, 128), PartitionContext(Mesh(tp=2), {}), Coords(0, 0, 0, 0, 0), blocks=(128, 128)
        )


def test_one_scale_for_each_output_is_copied_along_the_input() -> None:
    cutting = PartitionContext(Mesh(tp=2), {})
    row = local_boxes(parse_rule("row"), (4, 300), cutting, Coords(1, 0, 1, 0, 0), blocks=(1, 0))
    column = local_boxes(parse_rule("column"), (4, 300), cutting, Coords(1, 0, 1, 0, 0), blocks=(1, 0))
    assert row.shape == (4, 1)
    assert held(counted((4, 1)), column).ravel().tolist() == [2, 3]


# Words


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("column", Rule("column")),
        ("column heads", Rule("column", "heads")),
        ("grouped row in_out", Rule("row", grouped=True, in_out=True, expert=True)),
        ("column axis=-1", Rule("column", axis=-1)),
        ("column 8", Rule("column", "8")),
    ],
)
def test_reading_a_rule(text: str, rule: Rule) -> None:
    got = parse_rule(text)
    assert (got.verb, got.units, got.grouped, got.axis, got.in_out, got.expert) == (
        rule.verb,
        rule.units,
        rule.grouped,
        rule.axis,
        rule.in_out,
        rule.expert,
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "`` is not a layout rule"),
        ("colunm", "`colunm` is not a layout rule"),
        ("grouped", "`grouped` is not a layout rule"),
        ("replicate heads", "too many words after replicate"),
        ("row a b", "too many words after row"),
        ("fused gate", "fused needs at least two parts"),
        ("column axis=x", "`axis=x` is not an axis"),
        ("fused gate: up", "`gate:` is not a part of a fused tensor"),
        ("fused gate :up", "`:up` is not a part of a fused tensor"),
        ("fused gate/heads up", "`gate/heads` is not a part of a fused tensor"),
        ("fused gate:/heads up", "`gate:/heads` is not a part of a fused tensor"),
        ("fused gate:inner/ up", "`gate:inner/` is not a part of a fused tensor"),
        ("fused gate:inner/heads/whole up", "`gate:inner/heads/whole` is not a part of a fused tensor"),
        ("fused gate:a:b up", "`gate:a:b` is not a part of a fused tensor"),
        ("fused gate:whole up", "`gate:whole` is not a part of a fused tensor"),
        ("fused gate up groups=", "`groups=` is not a number of groups"),
        ("fused gate up groups=0", "`groups=0` is not a number of groups"),
        ("column rows", "`rows` is for grouped experts"),
        ("grouped column rows axis=0", "`rows` is for grouped experts"),
        ("grouped vocab rows", "experts have no vocabulary"),
        ("column heads groups=4", "only the parts of a fused tensor lie in groups"),
        ("fused x:8/whole y:8 groups=4", "a part of groups cannot be held whole"),
        ("fused gate:0 up", "`gate:0` is not a part of a fused tensor"),
        ("fused gate:8/00 up", "`gate:8/00` is not a part of a fused tensor"),
    ],
)
def test_a_wrong_rule_names_the_word(text: str, says: str) -> None:
    with pytest.raises(LayoutError) as caught:
        parse_rule(text, origin="mine.yaml")
    assert says in caught.value.what
    assert caught.value.where == ("mine.yaml",)


def test_a_size_that_the_config_does_not_give_is_an_error() -> None:
    with pytest.raises(LayoutError) as caught:
        cut("column heads", (4, 1), Mesh(tp=2))
    assert "does not give the size `heads`" in caught.value.what


@pytest.mark.parametrize(
    ("text", "ndim", "bias", "axis"),
    [
        ("column", 2, False, 0),
        ("row", 2, False, 1),
        ("column in_out", 2, False, 1),
        ("row in_out", 2, False, 0),
        ("column", 1, True, 0),
        ("row", 1, True, None),
        ("column in_out", 1, True, 0),
        ("grouped column", 3, False, 1),
        ("grouped row", 3, False, 2),
        ("grouped column in_out", 3, False, 2),
        ("grouped row in_out", 3, False, 1),
        ("grouped column", 2, True, 1),
        ("grouped row", 2, True, None),
        ("grouped column axis=1", 4, False, 1),
        ("replicate", 2, False, None),
        ("column", 0, False, None),
    ],
)
def test_which_axis_is_cut(text: str, ndim: int, bias: bool, axis: int | None) -> None:
    assert cut_axis(parse_rule(text), ndim, bias=bias) == axis


def test_joining_rules_and_taking_them_apart() -> None:
    q, k = parse_rule("column heads"), parse_rule("column kv")
    joined = fused_rule([("q", q), ("k", k)])
    assert joined.text == "fused q:heads k:kv"
    assert [part_rule(joined, i).units for i in range(2)] == ["heads", "kv"]
    assert fused_rule([("a", parse_rule("replicate")), ("b", parse_rule("replicate"))]).verb == "replicate"
    texts = ["column heads", "column heads", "replicate", "replicate", "column"]
    rules = [(name, parse_rule(text)) for name, text in zip("zxBCd", texts, strict=True)]
    mixed = fused_rule(rules, ["inner", "", "state", "", ""])
    assert mixed.text == "fused z:inner/heads x:1/heads B:state/whole C:1/whole d"
    assert mixed.parts == parse_rule(mixed.text).parts
    assert [part_rule(mixed, i).text for i in range(5)] == texts
    joined = fused_rule([("q", q), ("k", k)], ["heads", "kv"], "kv")
    assert joined.text == "fused q:heads k:kv groups=kv"
    assert [part_rule(joined, i) for i in range(2)] == [q, k]
    gate, up = parse_rule("grouped column rows"), parse_rule("grouped column rows")
    joined = fused_rule([("gate", gate), ("up", up)], ["", ""], "experts")
    assert (joined.rows, joined.groups, [part_rule(joined, i).rows for i in range(2)]) == (
        "experts",
        "",
        ["experts"] * 2,
    )
    with pytest.raises(LayoutError, match="rows of experts are joined expert by expert"):
        fused_rule([("gate", gate), ("up", up)], ["", ""])
    with pytest.raises(LayoutError, match="takes 6 parts out of a tensor of 5"):
        part_rule(mixed, 5)
    with pytest.raises(LayoutError, match="their rules are column, replicate"):
        fused_rule(rules)
    with pytest.raises(LayoutError, match="cannot be fused"):
        fused_rule([("q", q), ("o", parse_rule("row heads"))])
    with pytest.raises(LayoutError, match="only a fused tensor can be taken apart"):
        part_rule(q, 0)
