"""A model whose layers differ: cut by its family file, put together from the ranks' shapes, fused and taken apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpttool.core.catalog import RankTensor, StoredTensor
from ckpttool.core.files import DataFile
from ckpttool.core.mesh import Mesh
from ckpttool.errors import LayoutError
from ckpttool.layout.assemble import Assembler
from ckpttool.layout.family import Family, load_family
from ckpttool.layout.partition import Partitioner
from ckpttool.layout.rules import PartitionContext, local_boxes
from ckpttool.layout.shapes import declared_tensors
from ckpttool.layout.statements import Transform, inverse
from ckpttool.planning.relate import TensorTable, apply_transforms, identity
from tests.helpers.arrays import Array, catalog_of, index, materialise

HYBRID = """
family: orca
sizes:
  layers: n
  heads: {expr: "text_config.heads[layer]"}
  kv_heads: {expr: "text_config.kv_heads[layer]", shared: true}
  channels: text_config.mamba.heads
  groups: {from: [text_config.mamba.groups], shared: true}
  inner: {expr: channels * head}
  state: {expr: groups * text_config.mamba.state}
layers:
  prefix: "b.{layer}."
  rules:
    q.*: column heads
    "{k,v}.*": column kv_heads
    qkv.*: fused q:heads k:kv_heads v:kv_heads
    o.*: row heads
    in_proj.*: fused z:inner/channels x:inner/channels B:state/groups C:state/groups dt:channels
    conv.*: fused x:inner/channels B:state/groups C:state/groups axis=0
    out_proj.*: row channels
    norm.*: replicate
fusions:
  qkv:
    whole: "{a}.qkv.{b}"
    parts: ["{a}.q.{b}", "{a}.k.{b}", "{a}.v.{b}"]
    units: [heads, kv_heads, kv_heads]
  wqkv:
    whole: "{a}.wqkv.{b}"
    parts: ["{a}.q.{b}", "{a}.k.{b}", "{a}.v.{b}"]
    units: [heads, kv_heads, kv_heads]
    groups: kv_heads
  in_proj:
    whole: "{a}.in_proj.{b}"
    parts: ["{a}.z.{b}", "{a}.x.{b}", "{a}.B.{b}", "{a}.C.{b}", "{a}.dt.{b}"]
    units: [inner, inner, state, state, channels]
tensors:
  defaults: {head: 2}
  names: {mamba: heads == 4 and layer == 1}
  layers:
    norm.weight: [6]
    if not mamba:
      q.weight: [heads * head, 3]
      "{k,v}.weight": [kv_heads * head, 3]
      o.weight: [3, heads * head]
    if mamba:
      in_proj.weight: [2 * inner + 2 * state + channels, 3]
      conv.weight: [inner + 2 * state, 1, 2]
      out_proj.weight: [3, inner]
"""
CONFIG: dict[str, Any] = {
    "n": 4,
    "text_config": {
        "heads": [4, 4, 8, 4],
        "kv_heads": [2, 1, 1, 4],
        "mamba": {"heads": 4, "groups": 2, "state": 3},
    },
}


def family_of(tmp_path: Path, text: str = HYBRID, config: Mapping[str, Any] = CONFIG) -> Family:
    path = tmp_path / "orca.yaml"
    path.write_text(text, encoding="utf-8")
    return load_family(str(path), config)


def views_of(family: Family, config: Mapping[str, Any] = CONFIG) -> tuple[TensorTable, dict[str, Array]]:
    """The tensors that the family declares."""
    catalog, arrays = catalog_of({t.name: t.shape for t in declared_tensors(family, config)})
    return identity(catalog), arrays


def cut(
    family: Family, ops: tuple[Transform, ...], mesh: Mesh, views: TensorTable, config: Mapping[str, Any] = CONFIG
) -> Sequence[Sequence[RankTensor]]:
    return Partitioner(family, ops, PartitionContext(mesh, family.sizes), config).run(list(views))


def held(t: RankTensor, whole: Array) -> Array:
    out = np.full(t.shape, -1, np.int64)
    for inner, outer in t.boxes:
        out[index(inner)] = whole[index(outer)]
    return out


def together(
    family: Family,
    ops: tuple[Transform, ...],
    mesh: Mesh,
    ranks: Sequence[Sequence[RankTensor]],
    wholes: Mapping[str, Array],
    config: Mapping[str, Any] = CONFIG,
) -> dict[str, Array]:
    """The tensors put together again from the names and shapes of the ranks; copies must be equal."""
    files = [DataFile(Path("file"), 0, "")]
    stored = [StoredTensor(t.name, "F32", t.shape, 0, 0, r) for r, tensors in enumerate(ranks) for t in tensors]
    mine = {(r, t.name): held(t, wholes[t.name]) for r, tensors in enumerate(ranks) for t in tensors}
    cutting = PartitionContext(mesh, family.sizes, optional=family.guards())
    out = {}
    for tensor in Assembler(files, family, ops, cutting, config).run(stored):
        whole = out[tensor.key.name] = np.full(tensor.shape, -1, np.int64)
        for piece in (*tensor.pieces, *tensor.replicas):
            got = mine[piece.stored.rank, tensor.key.name][index(piece.stored_box)]
            into = whole[index(piece.logical_box)]
            assert ((into == -1) | (into == got)).all()
            into[...] = got
    return out


MESHES = [Mesh(tp=2), Mesh(tp=4), Mesh(tp=4, pp=2)]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("fusion", ["", "qkv", "wqkv", "in_proj"])
def test_a_hybrid_model_there_and_back(tmp_path: Path, mesh: Mesh, fusion: str) -> None:
    family = family_of(tmp_path)
    start, arrays = views_of(family)
    ops: tuple[Transform, ...] = ()
    if fusion:
        op = family.fusion(fusion)
        ops = inverse([op]) if fusion == "in_proj" else (op,)
    views = apply_transforms(start, ops, family)
    wholes = {v.name: materialise(v, arrays) for v in views}
    got = together(family, ops, mesh, cut(family, ops, mesh, views), wholes)
    assert got.keys() == wholes.keys()
    for name, whole in wholes.items():
        np.testing.assert_array_equal(got[name], whole)
    back = apply_transforms(views, inverse(ops), family, ops)
    for view in back:
        np.testing.assert_array_equal(materialise(view, arrays), arrays[view.name])


def test_groups_that_are_published_are_taken_apart(tmp_path: Path) -> None:
    """The rule of the whole is as good as those of the parts."""
    apart = '    q.*: column heads\n    "{k,v}.*": column kv_heads\n    qkv.*: fused q:heads k:kv_heads v:kv_heads\n'
    assert apart in HYBRID
    text = HYBRID.replace(apart, "    wqkv.*: fused q:heads k:kv_heads v:kv_heads groups=kv_heads\n")
    lines = '      q.weight: [heads * head, 3]\n      "{k,v}.weight": [kv_heads * head, 3]\n'
    assert lines in text
    family = family_of(tmp_path, text.replace(lines, "      wqkv.weight: [(heads + 2 * kv_heads) * head, 3]\n"))
    start, arrays = views_of(family)
    for mesh in MESHES:
        np.testing.assert_equal(together(family, (), mesh, cut(family, (), mesh, start), arrays), arrays)
    ops = inverse([family.fusion("wqkv")])
    views = apply_transforms(start, ops, family)
    wholes = {v.name: materialise(v, arrays) for v in views}
    other = family_of(tmp_path)
    assert wholes.keys() == views_of(other)[1].keys()
    for name in wholes:
        there, here = other.placement(name), family.placement(name, ops)
        assert there is not None
        assert here is not None
        assert (here.rule.verb, here.rule.units) == (there.rule.verb, there.rule.units)


def test_every_layer_is_cut_by_its_own_sizes(tmp_path: Path) -> None:
    """Layer 0 has 4 heads and 2 for keys, layer 2 has 8 and 1, layer 3 has 4 and 4; layer 1 is of another kind."""
    family = family_of(tmp_path)
    start, arrays = views_of(family)
    ranks = cut(family, (), Mesh(tp=4), start)
    shapes = {(t.name): t.shape for t in ranks[1]}
    assert [shapes[f"b.{i}.q.weight"][0] for i in (0, 2, 3)] == [2, 4, 2]
    assert [shapes[f"b.{i}.k.weight"][0] for i in (0, 2, 3)] == [2, 2, 2]
    keys = {i: [held(t, arrays[t.name])[0, 0] for r in ranks for t in r if t.name == f"b.{i}.k.weight"] for i in (0, 2)}
    first, second, third = arrays["b.0.k.weight"][0, 0], arrays["b.0.k.weight"][2, 0], arrays["b.2.k.weight"][0, 0]
    assert keys == {0: [first, first, second, second], 2: [third] * 4}


def test_one_rule_for_each_layer_is_made_once(tmp_path: Path) -> None:
    """Cuts are remembered by the rule; a layer with the same sizes in all of its rules has those of the file."""
    family = family_of(tmp_path)
    place = family.placer(())

    def rule(name: str) -> Any:
        got = place(name)
        assert got is not None
        return got.rule

    assert rule("b.0.q.weight") is rule("b.0.q.weight")
    assert rule("b.0.q.weight") is not rule("b.2.q.weight")
    assert rule("b.0.out_proj.weight") is rule("b.2.out_proj.weight")
    assert (rule("b.2.q.weight").units, rule("b.2.q.weight").text) == ("heads[2]", "column heads")
    assert [p.units for p in rule("b.3.qkv.weight").parts] == ["heads[3]", "kv_heads[3]", "kv_heads[3]"]
    by_name = family_of(
        tmp_path, HYBRID.replace("    norm.*: replicate", "    norm.*: replicate\n    w.7.x: row heads")
    )
    got = by_name.placement("b.2.q.weight")
    assert got is not None
    assert got.rule.units == "heads[2]"


def test_a_cut_that_one_layer_does_not_allow(tmp_path: Path) -> None:
    family = family_of(tmp_path)
    start, _ = views_of(family)
    with pytest.raises(LayoutError) as e:
        cut(family, (), Mesh(tp=8), start)
    assert "`b.0.q.weight` [8, 3] cannot be cut for tp 8, ep 1, etp 1: 4 heads cannot be split evenly" in e.value.what
    assert e.value.hint == "use --tp-out 1, 2 or 4"


def test_a_size_that_one_layer_lacks(tmp_path: Path) -> None:
    text_config = {**CONFIG["text_config"], "kv_heads": [2, 1, None, 4]}
    family = family_of(tmp_path, config={**CONFIG, "text_config": text_config})
    place = family.placement("b.2.k.weight")
    assert place is not None
    with pytest.raises(LayoutError, match="does not give the size `kv_heads` of layer 2"):
        local_boxes(place.rule, (4, 4), PartitionContext(Mesh(tp=2), family.sizes), Mesh(tp=2).coords(0))


def test_a_size_of_layers_has_no_meaning_outside_of_them(tmp_path: Path) -> None:
    family = family_of(tmp_path, HYBRID + "first: {e.*: column heads}\n")
    place = family.placement("e.w")
    assert place is not None
    with pytest.raises(LayoutError, match="`heads` differs from layer to layer, and this tensor is of none"):
        local_boxes(place.rule, (4, 4), PartitionContext(Mesh(tp=2), family.sizes), Mesh(tp=2).coords(0))


def test_ranks_do_not_share_out_numbers_of_experts_that_differ(tmp_path: Path) -> None:
    config = {"n": 2, "experts": 4, "per_layer_config": {"1": {"experts": 2}}}
    text = """
family: orca
sizes: {layers: n, experts: experts}
layers: {prefix: "b.{layer}.", rules: {"e.{expert}.w": column}}
tensors: {layers: {"e.{expert}.w": [4, 2]}}
"""
    family = family_of(tmp_path, text, config)
    start, _ = views_of(family, config)
    assert len(list(start)) == 6
    assert [len(r) for r in cut(family, (), Mesh(tp=2, etp=2), start, config)] == [6, 6]
    with pytest.raises(LayoutError, match="the number of experts differs from layer to layer"):
        cut(family, (), Mesh(tp=2, ep=2), start, config)


ROWS = """
family: orca
sizes: {layers: n, experts: experts}
layers:
  prefix: "b.{layer}."
  rules:
    "{w1,v1}": grouped column rows
    w2: grouped row rows in_out
    w13: grouped fused w1 v1 rows
fusions:
  w13:
    whole: "{a}.w13"
    parts: ["{a}.w1", "{a}.v1"]
    groups: experts
tensors:
  layers: {"{w1,v1,w2}": [experts * 4, 3]}
"""


@pytest.mark.parametrize("mesh", [Mesh(tp=2, ep=2, etp=1), Mesh(tp=4, ep=2, etp=2), Mesh(tp=4, etp=4)], ids=str)
@pytest.mark.parametrize("fused", [False, True])
def test_rows_of_experts_there_and_back(tmp_path: Path, mesh: Mesh, fused: bool) -> None:
    config = {"n": 1, "experts": 4}
    family = family_of(tmp_path, ROWS, config)
    start, arrays = views_of(family, config)
    ops: tuple[Transform, ...] = (family.fusion("w13"),) if fused else ()
    views = apply_transforms(start, ops, family)
    wholes = {v.name: materialise(v, arrays) for v in views}
    assert wholes.keys() == {"b.0.w2", *(["b.0.w13"] if fused else ["b.0.w1", "b.0.v1"])}
    ranks = cut(family, ops, mesh, views, config)
    np.testing.assert_equal(together(family, ops, mesh, ranks, wholes, config), wholes)
    own, made = family.placement("b.0.w13"), family.placement("b.0.w13", (family.fusion("w13"),))
    assert own is not None
    assert made is not None
    assert (own.rule.verb, own.rule.rows, own.rule.expert) == (made.rule.verb, made.rule.rows, made.rule.expert)
    assert (made.rule.verb, made.rule.rows, made.rule.expert) == ("fused", "experts", True)
    for view in apply_transforms(views, inverse(ops), family, ops):
        np.testing.assert_array_equal(materialise(view, arrays), arrays[view.name])
    with pytest.raises(LayoutError, match="4 experts cannot be shared evenly by 3 ranks"):
        cut(family, ops, Mesh(tp=3, ep=3, etp=1), views, config)


@pytest.mark.parametrize(
    ("old", "new", "says", "where"),
    [
        ("column heads", "column haeds", "`haeds` is not among the sizes", "b.{layer}.q.*: `column haeds`"),
        ("/channels x:", "/channel x:", "`channel` is not among", "b.{layer}.in_proj.*: `fused z:inner/channel x:"),
        ("q:heads k:kv", "q:heeds k:kv", "`heeds` is not among", "b.{layer}.qkv.*: `fused q:heeds"),
        ("groups: kv_heads", "groups: kv", "`kv` is not among", "fusions: wqkv"),
        ("units: [inner", "units: [outer", "`outer` is not among", "fusions: in_proj"),
        ("  state:", "  whole: n\n  state:", "`whole` cannot be the name of a size", "sizes"),
        ("  state:", "  a-b: n\n  state:", "`a-b` cannot be the name of a size", "sizes"),
        ("norm.*: replicate", "norm.*: grouped column rows", "`experts` is not among", "b.{layer}.norm.*"),
    ],
)
def test_sizes_that_a_family_does_not_have(tmp_path: Path, old: str, new: str, says: str, where: str) -> None:
    assert old in HYBRID
    with pytest.raises(LayoutError) as e:
        family_of(tmp_path, HYBRID.replace(old, new))
    assert says in e.value.what
    assert e.value.where[0].startswith(f"orca.yaml: {where}")


def test_sizes_that_a_naming_does_not_have(tmp_path: Path) -> None:
    family = family_of(tmp_path, HYBRID + "namings: {other: [{rules: {q.*: column haeds}}]}\n")
    with pytest.raises(LayoutError, match="`haeds` is not among the sizes of family `orca`"):
        family.statements("other")
