"""Relations between namings: each operation, and any chain of them, gives what numpy gives."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.core.catalog import Key, LogicalTensor
from ckpttool.core.geometry import Box
from ckpttool.core.mesh import Mesh
from ckpttool.errors import ConflictError, IncompleteError, LayoutError, UnsupportedError, UsageError
from ckpttool.layout.family import Family, _compile
from ckpttool.layout.partition import Partitioner
from ckpttool.layout.rules import CutSize, PartitionContext, parse_rule
from ckpttool.layout.spec import FamilySpec
from ckpttool.layout.statements import (
    CreateTensors,
    Drop,
    DropLayers,
    Fuse,
    OverrideRules,
    Refuse,
    Rename,
    RotaryPairs,
    Squeeze,
    Stack,
    Transform,
    Transpose,
    inverse,
)
from ckpttool.planning.relate import (
    DerivedTensor,
    TensorTable,
    apply_transforms,
    concat,
    deinterleave,
    identity,
    interleave,
    permute,
    propagate_to_component,
    rename,
    rename_by_rules,
    stack,
    take,
    unstack,
)
from tests.helpers.arrays import Array, catalog_of, index, materialise


def sources(*shapes: tuple[int, ...]) -> tuple[list[DerivedTensor], dict[str, Array]]:
    """TensorTable of tensors t0, t1, ..., and their arrays."""
    catalog, arrays = catalog_of({f"t{i}": s for i, s in enumerate(shapes)})
    return list(identity(catalog)), arrays


# One operation


@given(st.data())
def test_joining_and_cutting_along_any_axis(data: st.DataObject) -> None:
    ndim = data.draw(st.integers(1, 3))
    axis = data.draw(st.integers(0, ndim - 1))
    common = data.draw(st.lists(st.integers(1, 3), min_size=ndim, max_size=ndim))
    lengths = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    views, arrays = sources(*[tuple(n if i == axis else c for i, c in enumerate(common)) for n in lengths])
    joined = concat("joined", views, axis)
    whole = np.concatenate([arrays[v.name] for v in views], axis)
    np.testing.assert_array_equal(materialise(joined, arrays), whole)
    start = data.draw(st.integers(0, sum(lengths) - 1))
    stop = data.draw(st.integers(start + 1, sum(lengths)))
    np.testing.assert_array_equal(
        materialise(take("part", joined, axis, start, stop), arrays), whole.take(range(start, stop), axis)
    )


@given(st.data())
def test_weaving_and_unweaving(data: st.DataObject) -> None:
    """The woven axis is, for each group, the group's share of every part."""
    groups = data.draw(st.integers(1, 4))
    each = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    axis = data.draw(st.integers(0, 1))
    views, arrays = sources(*[(groups * n, 2) if axis == 0 else (2, groups * n) for n in each])
    woven = interleave("woven", views, axis, groups)
    split = [np.split(arrays[v.name], groups, axis) for v in views]
    want = np.concatenate([s[g] for g in range(groups) for s in split], axis)
    np.testing.assert_array_equal(materialise(woven, arrays), want)
    at = 0
    for view, n in zip(views, each, strict=True):
        back = deinterleave("back", woven, axis, groups, at, n, sum(each))
        np.testing.assert_array_equal(materialise(back, arrays), arrays[view.name])
        at += n


@given(st.integers(1, 4), st.lists(st.integers(1, 3), max_size=3))
def test_stacking_and_unstacking(count: int, shape: list[int]) -> None:
    views, arrays = sources(*[tuple(shape)] * count)
    stacked = stack("stacked", views)
    np.testing.assert_array_equal(materialise(stacked, arrays), np.stack([arrays[v.name] for v in views]))
    for i, view in enumerate(views):
        np.testing.assert_array_equal(materialise(unstack("one", stacked, i), arrays), arrays[view.name])


@given(st.permutations([0, 1, 2]))
def test_permuting(order: list[int]) -> None:
    views, arrays = sources((2, 3, 4))
    np.testing.assert_array_equal(materialise(permute("p", views[0], order), arrays), arrays["t0"].transpose(order))


# Any chain of operations


def chained(data: st.DataObject, views: list[DerivedTensor], arrays: dict[str, Array]) -> tuple[DerivedTensor, Array]:
    """A view and the array that numpy makes by the same steps."""
    view, want = views[0], arrays[views[0].name]
    for _ in range(data.draw(st.integers(1, 6))):
        step = data.draw(st.sampled_from(["take", "concat", "weave", "unweave", "stack", "unstack", "permute"]))
        axis = data.draw(st.integers(0, want.ndim - 1))
        n = want.shape[axis]
        if step == "take":
            a = data.draw(st.integers(0, n - 1))
            b = data.draw(st.integers(a + 1, n))
            view, want = take("v", view, axis, a, b), want.take(range(a, b), axis)
        elif step == "concat" and want.size < 200:
            view, want = concat("v", [view, view], axis), np.concatenate([want, want], axis)
        elif step == "weave" and want.size < 200:
            groups = data.draw(st.sampled_from([g for g in range(1, n + 1) if n % g == 0]))
            view = interleave("v", [view, view], axis, groups)
            want = np.concatenate([s for s in np.split(want, groups, axis) for _ in range(2)], axis)
        elif step == "unweave":
            groups = data.draw(st.sampled_from([g for g in range(1, n + 1) if n % g == 0]))
            period = n // groups
            at = data.draw(st.integers(0, period - 1))
            length = data.draw(st.integers(1, period - at))
            view = deinterleave("v", view, axis, groups, at, length, period)
            want = np.concatenate([s.take(range(at, at + length), axis) for s in np.split(want, groups, axis)], axis)
        elif step == "stack" and want.ndim < 4 and want.size < 200:
            view, want = stack("v", [view, view]), np.stack([want, want])
        elif step == "unstack" and want.ndim > 1:
            i = data.draw(st.integers(0, want.shape[0] - 1))
            view, want = unstack("v", view, i), want[i]
        elif step == "permute":
            order = data.draw(st.permutations(range(want.ndim)))
            view, want = permute("v", view, order), want.transpose(order)
    return view, want


@given(st.data())
def test_chains_of_operations(data: st.DataObject) -> None:
    views, arrays = sources(tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))))
    view, want = chained(data, views, arrays)
    assert view.shape == want.shape
    np.testing.assert_array_equal(materialise(view, arrays), want)


@given(st.data())
def test_clipping_a_part_keeps_its_elements(data: st.DataObject) -> None:
    """By a box of the view, and by a box of the source: the same elements, and only those."""
    views, arrays = sources(tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))))
    view, want = chained(data, views, arrays)
    box = draw_box(data, view.shape)
    clipped = DerivedTensor("v", "F32", view.shape, None, tuple(c for p in view.parts if (c := p.clip(box))))
    inside = tuple(slice(a, b) for a, b in zip(*box, strict=True))
    got = np.full(want.shape, -1)
    fill(clipped, arrays, got)
    expected = np.full(want.shape, -1)
    expected[inside] = want[inside]
    np.testing.assert_array_equal(got, expected)

    source = arrays["t0"]
    box = draw_box(data, source.shape)
    chosen = source[tuple(slice(a, b) for a, b in zip(*box, strict=True))]
    clipped = DerivedTensor("v", "F32", view.shape, None, tuple(c for p in view.parts if (c := p.clip_source(box))))
    got = np.full(want.shape, -1)
    fill(clipped, arrays, got)
    np.testing.assert_array_equal(got, np.where(np.isin(want, chosen), want, -1))


def draw_box(data: st.DataObject, shape: tuple[int, ...]) -> Box:
    starts = [data.draw(st.integers(0, n - 1)) for n in shape]
    return Box(tuple(starts), tuple(data.draw(st.integers(a + 1, n)) for a, n in zip(starts, shape, strict=True)))


def fill(view: DerivedTensor, arrays: dict[str, Array], out: Array) -> None:
    """As materialise, for a view with holes."""
    for part in view.parts:
        lone = DerivedTensor(
            "part", "F32", part.size, None, (part._replace(first=(0,) * len(part.size), step=(1,) * len(part.size)),)
        )
        into = tuple(slice(a, a + s * (n - 1) + 1, s) for a, n, s in zip(part.first, part.size, part.step, strict=True))
        out[into] = materialise(lone, arrays)


# What does not fit is refused


def test_tensors_that_do_not_fit_are_not_joined() -> None:
    views, _ = sources((2, 3), (2, 4), (2,))
    with pytest.raises(LayoutError, match="differ besides axis 0"):
        concat("c", views[:2], 0)
    with pytest.raises(LayoutError, match="cannot be fused"):
        concat("c", [views[0], views[2]], 0)
    with pytest.raises(LayoutError, match="cannot be stacked"):
        stack("s", views[:2])
    half = DerivedTensor("h", "F16", (2, 3), LogicalTensor(Key("h"), "F16", (2, 3), ()))
    with pytest.raises(LayoutError, match="cannot be fused"):
        concat("c", [views[0], half], 0)


# Statements of a naming


def family(**sizes: int) -> Family:
    """A family whose weights are all [out, in], cut by column."""
    spec = FamilySpec.model_validate(
        {"family": "test", "layers": {"prefix": "layers.{layer}.", "rules": {"*": "column"}}}
    )
    return compiled(spec, **sizes)


def compiled(spec: FamilySpec, **sizes: int) -> Family:
    return Family(spec, "test.yaml", {k: CutSize(v) for k, v in sizes.items()}, _rules=_compile(spec, "test.yaml"))


QKV = Fuse("qkv", "{a}.qkv.{b}", ("{a}.q.{b}", "{a}.k.{b}", "{a}.v.{b}"), ("heads", "kv", "kv"))
WOVEN = Fuse("qkv", "{a}.qkv.{b}", ("{a}.q.{b}", "{a}.k.{b}", "{a}.v.{b}"), ("heads", "kv", "kv"), "kv")
EXPERTS = Stack("{a}.experts.w", "{a}.experts.{expert}.w")
CHAINS: list[tuple[Transform, ...]] = [
    (QKV,),
    (WOVEN,),
    (EXPERTS,),
    (Rename((("layers.{layer}.{a}", "h.{layer}.{a}"),)),),
    (
        QKV,
        EXPERTS,
        Rename((("layers.{layer}.qkv.{b}", "h.{layer}.attention.{b}"), ("layers.{layer}.{b}", "h.{layer}.{b}"))),
    ),
    (Rename((("layers.{layer}.{b}", "x.{layer}.{b}"),)), EXPERTS, WOVEN),
]


@pytest.mark.parametrize("ops", CHAINS)
def test_undoing_the_statements_of_a_naming_gives_the_same_tensors(ops: tuple[Transform, ...]) -> None:
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in (0, 1):
        for part, heads in (("q", 4), ("k", 2), ("v", 2)):
            shapes[f"layers.{layer}.{part}.weight"] = (heads * 3, 5)
            shapes[f"layers.{layer}.{part}.bias"] = (heads * 3,)
        for e in range(3):
            shapes[f"layers.{layer}.experts.{e}.w"] = (2, 5)
    catalog, arrays = catalog_of(shapes)
    there = apply_transforms(identity(catalog), ops, family(heads=4, kv=2))
    assert set(there.table) != set(shapes)
    back = apply_transforms(there, inverse(ops), family(heads=4, kv=2), ops)
    assert {v.name: v.shape for v in back} == shapes
    for view in back:
        np.testing.assert_array_equal(materialise(view, arrays), arrays[view.name])


def test_fused_parts_lie_one_after_the_other() -> None:
    catalog, arrays = catalog_of({"layers.0.q.w": (4, 1), "layers.0.k.w": (2, 1), "layers.0.v.w": (2, 1)})
    views = apply_transforms(identity(catalog), (QKV,), family(heads=4, kv=2))
    assert materialise(views.table["layers.0.qkv.w"], arrays).ravel().tolist() == list(range(8))


def test_woven_parts_go_by_groups() -> None:
    """For each key/value head: its query heads, its key, its value, as Megatron stores them."""
    catalog, arrays = catalog_of({"layers.0.q.w": (4, 1), "layers.0.k.w": (2, 1), "layers.0.v.w": (2, 1)})
    views = apply_transforms(identity(catalog), (WOVEN,), family(heads=4, kv=2))
    assert materialise(views.table["layers.0.qkv.w"], arrays).ravel().tolist() == [0, 1, 4, 6, 2, 3, 5, 7]


@pytest.mark.parametrize("shape", [(2, 3), (4, 2, 3)])
def test_transposing_exchanges_the_last_two_axes(shape: tuple[int, ...]) -> None:
    catalog, arrays = catalog_of({"layers.0.w": shape, "layers.0.x": shape})
    ops = (Transpose(("{a}.w",)),)
    there = apply_transforms(identity(catalog), ops, family())
    np.testing.assert_array_equal(materialise(there.table["layers.0.w"], arrays), arrays["layers.0.w"].swapaxes(-1, -2))
    assert there.table["layers.0.x"].shape == shape
    back = apply_transforms(there, inverse(ops), family(), ops)
    np.testing.assert_array_equal(materialise(back.table["layers.0.w"], arrays), arrays["layers.0.w"])


def test_a_transposed_tensor_is_cut_on_the_same_elements() -> None:
    ops = (Transpose(("{a}.w",)),)
    place = family().placement("layers.0.w", ops)
    assert place is not None
    assert place.rule.in_out
    spec = FamilySpec.model_validate(
        {"family": "test", "layers": {"prefix": "layers.{layer}.", "rules": {"*": "column axis=0"}}}
    )
    with pytest.raises(LayoutError, match="names its axis cannot be transposed"):
        compiled(spec).placement("layers.0.w", ops)


def test_squeezing_leaves_out_an_axis_of_one() -> None:
    catalog, arrays = catalog_of({"layers.0.w": (1, 5), "layers.0.x": (2, 5)})
    ops = (Squeeze(("{a}.w",)),)
    there = apply_transforms(identity(catalog), ops, family())
    np.testing.assert_array_equal(materialise(there.table["layers.0.w"], arrays), arrays["layers.0.w"][0])
    assert apply_transforms(there, inverse(ops), family(), ops).table["layers.0.w"].shape == (1, 5)
    with pytest.raises(LayoutError, match=r"the first axis of `layers\.0\.x` \[2, 5\] has not one element"):
        apply_transforms(identity(catalog), (Squeeze(("{a}.x",)),), family())


def test_a_naming_may_hold_a_tensor_in_its_own_way() -> None:
    ops = (Rename((("layers.{layer}.w", "h.{layer}.w"),)), OverrideRules((("h.{layer}.w", parse_rule("row once")),)))
    place = family().placement("h.3.w", ops)
    assert place is not None
    assert (place.rule.text, place.layer) == ("row once", 3)
    back = family().placement("layers.3.w", (*ops, *inverse(ops)))
    assert back is not None


def test_what_a_naming_does_not_have_is_dropped_or_refused() -> None:
    catalog, _ = catalog_of({"layers.0.w": (2, 2), "layers.0.mask": (2, 2), "layers.1.mask": (2, 2)})
    views = apply_transforms(identity(catalog), (Drop(("{a}.mask",)),), family())
    assert list(views.table) == ["layers.0.w"]
    assert views.notes == ["2 tensors (32 bytes) left out, which the target does not store: layers.0.mask, ..."]
    with pytest.raises(UnsupportedError) as caught:
        apply_transforms(identity(catalog), (Refuse((("{a}.mask", "nobody wants masks"),)),), family())
    assert caught.value.what == "nobody wants masks"
    assert caught.value.where == ("tensor `layers.0.mask`", "test.yaml")


def test_the_fused_tensor_stands_where_its_first_part_stood() -> None:
    catalog, _ = catalog_of(dict.fromkeys(("layers.0.v.w", "layers.0.q.w", "layers.0.o.w", "layers.0.k.w"), (2, 2)))
    views = apply_transforms(identity(catalog), (QKV,), family(heads=1, kv=1))
    assert list(views.table) == ["layers.0.qkv.w", "layers.0.o.w"]


def test_a_missing_part_is_named() -> None:
    catalog, _ = catalog_of({"layers.0.q.w": (4, 1), "layers.0.k.w": (2, 1)})
    with pytest.raises(IncompleteError, match=r"`layers\.0\.v\.w` is not in the checkpoint"):
        apply_transforms(identity(catalog), (QKV,), family(heads=4, kv=2))


def test_a_missing_expert_is_named() -> None:
    catalog, _ = catalog_of({"layers.0.experts.0.w": (4, 1), "layers.0.experts.2.w": (4, 1)})
    with pytest.raises(IncompleteError, match="expert 1 is not in the checkpoint"):
        apply_transforms(identity(catalog), (EXPERTS,), family())


def test_one_scale_for_a_tensor_is_not_fused() -> None:
    catalog, _ = catalog_of({f"layers.0.{p}.scale": (1,) for p in "qkv"})
    with pytest.raises(LayoutError, match="has only one for all parts"):
        apply_transforms(identity(catalog), (QKV,), family(heads=4, kv=2))


def test_layers_after_the_last_are_left_out_and_said() -> None:
    catalog, _ = catalog_of({f"layers.{i}.w": (2, 2) for i in range(3)})
    views = apply_transforms(identity(catalog), (DropLayers("layers"),), family(layers=2))
    assert list(views.table) == ["layers.0.w", "layers.1.w"]
    assert views.notes == [
        "1 tensor (16 bytes) of layers from 2 on left out: the target has no multi-token-prediction layer"
    ]


def test_two_tensors_of_one_name_are_refused() -> None:
    catalog, _ = catalog_of({"a.w": (1,), "b.w": (1,)})
    with pytest.raises(ConflictError, match=r"two tensors would both be named `c\.w`"):
        rename(identity(catalog), lambda _: "c.w", "a test")


@pytest.mark.parametrize(
    ("rules", "names"),
    [
        (["model.*=m.*"], ["m.layers.0.a.w", "m.layers.1.a.w", "head"]),
        (["model.layers.1.*=one.*"], ["model.layers.0.a.w", "one.a.w", "head"]),
        (["re:layers\\.1=h.5"], ["model.layers.0.a.w", "model.h.5.a.w", "head"]),
        (["head=tail", "tail=end"], ["model.layers.0.a.w", "model.layers.1.a.w", "end"]),
    ],
)
def test_renaming_by_rules(rules: list[str], names: list[str]) -> None:
    """A rule that names one layer renames that layer only, whatever came before it."""
    catalog, _ = catalog_of({"model.layers.0.a.w": (1,), "model.layers.1.a.w": (1,), "head": (1,)})
    assert list(rename_by_rules(identity(catalog), rules).table) == names


def test_a_rename_that_matches_nothing_names_the_nearest() -> None:
    catalog, _ = catalog_of({"model.norm.weight": (1,)})
    with pytest.raises(UsageError) as caught:
        rename_by_rules(identity(catalog), ["model.nrom.weight=x"])
    assert "did you mean `model.norm.weight`" in str(caught.value.hint)


def test_views_know_their_size() -> None:
    views: Any = TensorTable({"a": DerivedTensor("a", "BF16", (3, 4))})
    assert len(views) == 1
    assert next(iter(views)).nbytes == 24


# Rotary pairs

ROTARY = RotaryPairs((("{a}.q.{weight,bias}", "heads"), ("{a}.k.{weight,bias}", "kv")))
PACKED = {"quant_method": "gptq", "bits": 4, "group_size": 8, "desc_act": False}


def side_by_side(a: Array, heads: int) -> Array:
    """From the definition: row i of a head's first half beside row i of its second half."""
    return a.reshape(heads, 2, -1, *a.shape[1:]).swapaxes(1, 2).reshape(a.shape)


def test_rows_that_rotary_embeddings_turn_together_lie_side_by_side() -> None:
    shapes: dict[str, tuple[int, ...]] = {}
    for part, heads in (("q", 6), ("k", 2), ("v", 2)):
        shapes |= {f"layers.0.{part}.weight": (heads * 10, 7), f"layers.0.{part}.bias": (heads * 10,)}
    catalog, arrays = catalog_of(shapes)
    rows = family(heads=6, kv=2)
    there = apply_transforms(identity(catalog), (ROTARY,), rows)
    assert materialise(there.table["layers.0.q.bias"], arrays)[:10].tolist() == [
        arrays["layers.0.q.bias"][i] for i in (0, 5, 1, 6, 2, 7, 3, 8, 4, 9)
    ]
    for view in there:
        a = arrays[view.name]
        of_part = {"q": 6, "k": 2}.get(view.name.split(".")[2])
        np.testing.assert_array_equal(materialise(view, arrays), side_by_side(a, of_part) if of_part else a)
    back = apply_transforms(there, inverse((ROTARY,)), rows, (ROTARY,))
    for view in back:
        np.testing.assert_array_equal(materialise(view, arrays), arrays[view.name])


def test_moments_and_master_weights_follow_into_rotary_pairs() -> None:
    catalog, arrays = catalog_of({"layers.0.q.weight": (24, 5)})
    weight = catalog[Key("layers.0.q.weight")]
    states = [("master_weights", ""), ("optimizer", "exp_avg"), ("ema", "")]
    for component, state in states:
        key = Key(weight.key.name, component, state)
        catalog.tensors[key] = LogicalTensor(key, "F32", (24, 5), ())
    step = Key(weight.key.name, "optimizer", "step")
    catalog.tensors[step] = LogicalTensor(step, "F32", (), ())
    views = apply_transforms(identity(catalog), (ROTARY,), family(heads=4))
    views = TensorTable({n: v for n, v in views.table.items() if v.name == weight.key.name})
    for component, state in states:
        (moved,) = propagate_to_component(views, catalog, component, state, []).values()
        assert {p.source.key for p in moved.parts} == {Key(weight.key.name, component, state)}
        np.testing.assert_array_equal(materialise(moved, arrays), side_by_side(arrays[weight.key.name], 4))
    (number,) = propagate_to_component(views, catalog, "optimizer", "step", []).values()
    assert number.shape == ()


def test_rotary_pairs_keep_the_rule_and_are_cut_between_heads() -> None:
    spec = FamilySpec.model_validate(
        {
            "family": "test",
            "sizes": {"heads": "heads"},
            "layers": {"prefix": "layers.{layer}.", "rules": {"q.*": "column heads"}},
        }
    )
    cut = compiled(spec, heads=4)
    place = cut.placement("layers.3.q.weight", (ROTARY,))
    assert place is not None
    assert (place.rule.text, place.layer) == ("column heads", 3)
    catalog, arrays = catalog_of({"layers.0.q.weight": (24, 5)})
    views = apply_transforms(identity(catalog), (ROTARY,), cut)
    ranks = Partitioner(cut, (ROTARY,), PartitionContext(Mesh(tp=2), cut.sizes), {}).run(list(views))
    whole = side_by_side(arrays["layers.0.q.weight"], 4)
    for rank, (tensor,) in enumerate(ranks):
        ((inner, outer),) = tensor.boxes
        assert (str(inner), tensor.shape) == ("[0:12, 0:5]", (12, 5))
        np.testing.assert_array_equal(whole[index(outer)], whole[12 * rank : 12 * rank + 12])


@pytest.mark.parametrize(
    ("dtype", "shape", "sizes", "error", "says"),
    [
        ("F8_E4M3", (24, 5), {"heads": 4, "kv": 1}, UnsupportedError, "is F8_E4M3: rows of quantized weights"),
        ("U8", (60, 1), {"heads": 4, "kv": 1}, UnsupportedError, "is U8: rows of quantized weights"),
        ("F32", (24, 5), {"kv": 1}, LayoutError, "config.json does not give the size `heads`"),
        ("F32", (28, 5), {"heads": 4, "kv": 1}, LayoutError, r"\[28, 5\] does not divide into 4 heads of an even size"),
    ],
)
def test_rows_that_cannot_be_put_into_pairs_are_refused(
    dtype: str, shape: tuple[int, ...], sizes: dict[str, int], error: type[Exception], says: str
) -> None:
    view = DerivedTensor("layers.0.q.weight", dtype, shape, LogicalTensor(Key("layers.0.q.weight"), dtype, shape, ()))
    for op in (ROTARY, *inverse((ROTARY,))):
        with pytest.raises(error, match=says):
            apply_transforms(TensorTable({view.name: view}), (op,), family(**sizes))


def test_heads_of_two_sizes_are_a_wrong_config() -> None:
    """Without the number of key/value heads that of all heads would be taken, and the rows would be mixed up."""
    catalog, _ = catalog_of({"layers.0.q.weight": (48, 5), "layers.0.k.weight": (24, 5)})
    with pytest.raises(ConflictError, match=r"a head of `layers\.0\.k\.weight` has 6 rows, and one of .* has 12"):
        apply_transforms(
            identity(catalog), (RotaryPairs((("{a}.q.{b}", "heads"), ("{a}.k.{b}", "kv"))),), family(heads=4, kv=4)
        )
    apply_transforms(identity(catalog), (ROTARY,), family(heads=4, kv=2))


def test_packed_weights_are_not_put_into_rotary_pairs() -> None:
    table = {}
    for end, dtype, shape in (("qweight", "I32", (2, 16)), ("scales", "F16", (2, 16)), ("qzeros", "I32", (2, 2))):
        for part in ("q", "v"):
            name = f"layers.0.{part}.{end}"
            table[name] = DerivedTensor(name, dtype, shape, LogicalTensor(Key(name), dtype, shape, ()))
    packed = replace(family(heads=4, kv=4), quantization=PACKED)
    with pytest.raises(UnsupportedError, match="GPTQ weights cannot be put into the order of rotary pairs") as caught:
        apply_transforms(TensorTable(table), (ROTARY,), packed)
    assert "`layers.0.q.qweight`" in str(caught.value.where)
    others = {n: v for n, v in table.items() if ".v." in n}
    assert apply_transforms(TensorTable(others), (ROTARY,), packed).table == others


def test_what_only_a_naming_has_is_whole_there_and_left_out_elsewhere() -> None:
    ops = (Rename((("layers.{layer}.w", "h.{layer}.w"),)), CreateTensors(("{a}.freqs",)))
    place = family().placement("rope.freqs", ops)
    assert place is not None
    assert (place.rule.verb, place.layer) == ("replicate", None)
    assert family().placement("rope.freqs") is None
    catalog, _ = catalog_of({"h.0.w": (2, 2), "rope.freqs": (3,)})
    views = apply_transforms(identity(catalog), inverse(ops), family(), ops)
    assert list(views.table) == ["layers.0.w"]
    assert views.notes == ["1 tensor (12 bytes) left out, which the target does not store: rope.freqs"]
