"""The family files: every tensor that checkpoints of a family hold has a rule that cuts it, under every naming."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ckpttool.core.catalog import RankTensor
from ckpttool.core.mesh import Mesh
from ckpttool.dialects.family import FamilyDialect
from ckpttool.errors import LayoutError, UnsupportedError
from ckpttool.formats.config import config_field
from ckpttool.layout.assemble import is_bias
from ckpttool.layout.family import TASK_HEADS, Family, find_family, load_family
from ckpttool.layout.names import pattern_regex
from ckpttool.layout.partition import Partitioner
from ckpttool.layout.rules import PartitionContext
from ckpttool.layout.statements import (
    Drop,
    DropCopies,
    Fuse,
    OverrideRules,
    Refuse,
    Rename,
    Squeeze,
    Stack,
    Tie,
    Transform,
    Transpose,
    inverse,
)
from ckpttool.planning.relate import TensorTable, apply_transforms, identity
from tests.helpers.arrays import Array, catalog_of, index, materialise
from tests.helpers.tiny_names import Listed, all_lists, family_lists

LISTS = all_lists()
MESHES = [
    Mesh(),
    Mesh(tp=2, etp=2),
    Mesh(tp=4, etp=4),
    Mesh(tp=2, ep=2, etp=1),
    Mesh(tp=4, ep=2, etp=2, pp=2),
    Mesh(tp=1, pp=2, layout=(2, 0)),
]
PUBLISHED = sorted(key for key in LISTS if "@" not in key[1])
LISTED = sorted({family for family, _ in LISTS})
"""The families whose checkpoints are listed name by name. Of the others tests/layout/test_family_files.py has more."""
SCALED = ("qwen2", "mixtral")
REFUSED = [
    ("gpt_oss", "gpt_oss_mxfp4", "vllm"),
    ("deepseek", "deepseek_v32_fp8", "vllm"),
    ("llama", "llama_per_channel", "trtllm"),
    ("mixtral", "mixtral_fp8", "trtllm"),
    ("qwen2", "qwen2_fp8", "trtllm"),
    *(
        (family, variant, naming)
        for family, variant in (
            ("gpt_oss", "gpt_oss_mxfp4"),
            ("deepseek", "deepseek_v3_fp8"),
            ("deepseek", "deepseek_v32"),
            ("deepseek", "deepseek_v32_fp8"),
        )
        for naming in ("torchtitan", "torchtitan-0.2")
    ),
    *(
        (family, variant, "vllm")
        for family, variant in PUBLISHED
        if family in ("ernie4_5", "ernie4_5_moe", "qwen3", "qwen3_moe")
        and any(n.endswith("o_proj.bias") for n in LISTS[family, variant].tensors)
    ),
    *(
        (family, variant, naming)
        for family, variant in PUBLISHED
        for naming in load_family(family, {}).spec.namings
        if naming.startswith("megatron")
        and any(w in n for n in LISTS[family, variant].tensors for w in ("_scale", "_blocks", ".indexer."))
    ),
]
QUANTIZED = "{a}_scale{b}"
"""Refused by families of which no quantized checkpoint is listed, too."""
BIAS = "{a}.self_attn.o_proj.bias"
"""Likewise: vLLM's models of these families have none, and few checkpoints do."""
# Scale grids beside fused weights are the same for all families, and the largest of the lists.
FUSED = [
    pytest.param(*key, marks=[pytest.mark.thorough] if key[1].endswith("_fp8") and key[0] not in SCALED else [])
    for key in PUBLISHED
]
NAMINGS = [
    (family, variant, naming)
    for family, variant in PUBLISHED
    for naming in load_family(family, {}).spec.namings
    if (family, variant, naming) not in REFUSED
]


def loaded(family: str, variant: str) -> tuple[Family, Listed, dict[str, tuple[int, ...]]]:
    listed = LISTS[family, variant]
    return load_family(family, listed.config), listed, {n: tuple(s) for n, s in listed.tensors.items()}


def canonical(family: Family, shapes: dict[str, tuple[int, ...]]) -> tuple[TensorTable, dict[str, Array]]:
    """The tensors under the names from which namings start, and their arrays."""
    catalog, arrays = catalog_of(shapes)
    ops = FamilyDialect(family.published_form(shapes)[0] or "hf").statements(family)
    return apply_transforms(identity(catalog), inverse(ops), family, ops), arrays


def cut(
    family: Family, ops: tuple[Transform, ...], mesh: Mesh, views: TensorTable, config: dict[str, Any]
) -> Sequence[Sequence[RankTensor]]:
    """What every rank of a mesh stores."""
    return Partitioner(family, ops, PartitionContext(mesh, family.sizes), config).run(list(views))


def of_rank(tensors: Sequence[RankTensor], arrays: dict[str, Array], total: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Which of all elements a rank stores. None may be there twice."""
    out = np.zeros(total, bool)
    held = 0
    for t in tensors:
        for _, outer in t.boxes:
            elements = arrays[t.key][index(outer)]
            out[elements] = True
            held += elements.size
    assert np.count_nonzero(out) == held, "two tensors of the rank hold the same elements"
    return out


def test_the_config_chooses_the_family() -> None:
    for (family, variant), listed in LISTS.items():
        assert find_family(listed.config) == family, variant
        assert find_family({"model_type": listed.config["model_type"]}) == family, variant


def test_the_config_gives_every_size() -> None:
    for (family, variant), listed in LISTS.items():
        got = load_family(family, listed.config)
        needed = {u for _, rule, _, _ in got._rules for u in (rule.units, *(p.units for p in rule.parts))} - {""}
        assert needed <= set(got.sizes), variant
        assert got.sizes["vocab"].value == config_field(listed.config, "vocab_size"), variant


@pytest.mark.product
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize(("family", "variant"), sorted(LISTS))
def test_the_ranks_together_hold_every_tensor(family: str, variant: str, mesh: Mesh) -> None:
    got, listed, shapes = loaded(family, variant)
    catalog, arrays = catalog_of(shapes)
    ranks = cut(got, (), mesh, identity(catalog), listed.config)
    total = sum(a.size for a in arrays.values())
    assert np.logical_or.reduce([of_rank(tensors, arrays, total) for tensors in ranks]).all()


@pytest.mark.parametrize("family", LISTED)
def test_no_rule_is_dead(family: str) -> None:
    """Every pattern decides about at least one tensor that checkpoints of the family hold."""
    names = {n for listed in family_lists(family).values() for n in listed.tensors}
    got = load_family(family, {})
    deciding = {next(rule.origin for regex, rule, _, _ in got._rules if regex.match(n)) for n in names}
    own = [rule.origin for _, rule, _, _ in got._rules if rule.origin.partition(": ")[2] not in TASK_HEADS]
    assert [origin for origin in own if origin not in deciding] == []


def test_trainers_names_become_the_published_ones_where_a_format_has_none() -> None:
    for name in LISTED:
        spec = load_family(name, {}).spec
        assert ("megatron" in spec.namings) == ("megatron" in spec.trainer_namings), name


def patterns_of(op: Transform) -> list[str]:
    """What the names that a statement changes look like."""
    match op:
        case Rename(pairs) | OverrideRules(pairs) | Refuse(pairs):
            return [pair[0] for pair in pairs]
        case Stack():
            return [op.whole] if op.inverse else [op.part]
        case Transpose(patterns) | Squeeze(patterns) | Drop(patterns):
            return list(patterns)
        case Fuse():
            return [op.whole] if op.inverse else list(op.parts)
        case Tie():
            return [op.owner]
        case DropCopies(pairs):
            return [pair[0] for pair in pairs]
        case _:
            return []


@pytest.mark.parametrize("family", LISTED)
def test_no_statement_of_a_naming_is_dead(family: str) -> None:
    """Every pattern of every statement, and of renamings the first that matches, meets a tensor of some checkpoint."""
    for naming, specs in load_family(family, {}).spec.namings.items():
        written = {p for spec in specs for p in spec.drop or ()}
        wanted: set[tuple[Transform, str]] = set()
        live: set[tuple[Transform, str]] = set()
        for variant in (v for f, v in PUBLISHED if f == family):
            got, _, shapes = loaded(family, variant)
            ops = FamilyDialect(naming).statements(got)
            # What tie_as drops is there only in checkpoints that store tied embeddings twice.
            wanted |= {(op, p) for op in ops for p in patterns_of(op) if not isinstance(op, Drop) or p in written}
            views, _ = canonical(got, shapes)
            for i, op in enumerate(ops):
                for name in views.table:
                    hits = [p for p in patterns_of(op) if pattern_regex(p).match(name)]
                    live |= {(op, p) for p in (hits[:1] if isinstance(op, Rename) else hits)}
                if isinstance(op, Refuse) and (family, variant, naming) in REFUSED:
                    if BIAS not in patterns_of(op):
                        break
                    views = replace(
                        views, table={n: v for n, v in views.table.items() if not pattern_regex(BIAS).match(n)}
                    )
                views = apply_transforms(views, (op,), got, ops[:i])
        assert {p for _, p in wanted - live} <= {QUANTIZED, BIAS}, naming


@pytest.mark.product
@pytest.mark.parametrize(("family", "variant", "naming"), NAMINGS)
def test_a_naming_can_be_undone(family: str, variant: str, naming: str) -> None:
    got, _, shapes = loaded(family, variant)
    start, arrays = canonical(got, shapes)
    ops = FamilyDialect(naming).statements(got)
    there = apply_transforms(start, ops, got)
    back = apply_transforms(there, inverse(ops), got, ops)
    kept = {p.source.key.name for v in there for p in v.parts}
    copies = made_again(start, ops)
    assert set(back.table) == {v.name for v in start for p in v.parts if p.source.key.name in kept} | copies.keys()
    for view in back:
        held = start.table[copies.get(view.name, view.name)]
        np.testing.assert_array_equal(materialise(view, arrays), materialise(held, arrays))


def made_again(views: TensorTable, ops: tuple[Transform, ...]) -> dict[str, str]:
    """The copies that a naming leaves out: name -> of which tensor the way back makes them."""
    pairs = [pair for op in ops if isinstance(op, DropCopies) for pair in op.pairs]
    return {v.name: of for pattern, of, _ in pairs for v in views if pattern_regex(pattern).match(v.name)}


@pytest.mark.parametrize(("family", "variant", "naming"), REFUSED)
def test_what_a_naming_cannot_say_is_refused(family: str, variant: str, naming: str) -> None:
    got, _, shapes = loaded(family, variant)
    with pytest.raises(UnsupportedError, match=r"vLLM|TensorRT|torchtitan|Megatron"):
        apply_transforms(identity(catalog_of(shapes)[0]), FamilyDialect(naming).statements(got), got)


@pytest.mark.product
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize(("family", "variant", "naming"), NAMINGS)
def test_a_rank_holds_the_same_elements_under_every_naming(family: str, variant: str, naming: str, mesh: Mesh) -> None:
    """Renamed, fused, stacked and transposed tensors are cut as their parts are."""
    got, listed, shapes = loaded(family, variant)
    start, arrays = canonical(got, shapes)
    ops = FamilyDialect(naming).statements(got)
    views = apply_transforms(start, ops, got)
    # A copy of tied embeddings says nothing about a cut, and what has a rule of its own is cut so in no other naming.
    copies = tied_copies(ops) if got.tied else set()
    views = TensorTable({v.name: v for v in views if v.name not in copies and not has_own_rule(v.name, ops)})
    sources = {p.source.key.name for v in views for p in v.parts}
    plain = TensorTable({v.name: v for v in start if sources & {p.source.key.name for p in v.parts}})
    named_arrays = {v.name: materialise(v, arrays) for v in views}
    plain_arrays = {v.name: materialise(v, arrays) for v in plain}
    there = cut(got, ops, mesh, views, listed.config)
    here = cut(got, (), mesh, plain, listed.config)
    total = sum(a.size for a in arrays.values())
    for a, b in zip(there, here, strict=True):
        assert (of_rank(a, named_arrays, total) == of_rank(b, plain_arrays, total)).all()


def tied_copies(ops: tuple[Transform, ...]) -> set[str]:
    """What a naming calls the copies of tied embeddings in the end."""
    copies: set[str] = set()
    for op in ops:
        if isinstance(op, Tie):
            copies.add(op.name)
        elif isinstance(op, Rename):
            copies = {op.forward(name) for name in copies}
    return copies


def has_own_rule(name: str, ops: tuple[Transform, ...]) -> bool:
    return any(pattern_regex(p).match(name) for op in ops if isinstance(op, OverrideRules) for p, _ in op.pairs)


@pytest.mark.product(one_in=2)
@pytest.mark.parametrize(("family", "variant"), FUSED)
def test_a_rank_holds_the_same_elements_fused_and_apart(family: str, variant: str) -> None:
    """Each fusion of a family, there and back, for as many ranks as copy the key/value heads."""
    got, listed, shapes = loaded(family, variant)
    catalog, arrays = catalog_of(shapes)
    total = sum(a.size for a in arrays.values())
    mesh = Mesh(tp=4, etp=4)
    here = [of_rank(tensors, arrays, total) for tensors in cut(got, (), mesh, identity(catalog), listed.config)]
    for name in fusions(got):
        ops = (replace(got.fusion(name), inverse=got.publishes_fused(name)),)
        views = apply_transforms(identity(catalog), ops, got)
        named = {v.name: materialise(v, arrays) for v in views}
        for a, b in zip(cut(got, ops, mesh, views, listed.config), here, strict=True):
            assert (of_rank(a, named, total) == b).all()
        back = apply_transforms(views, inverse(ops), got, ops)
        assert {v.name: v.shape for v in back} == shapes


def fusions(family: Family) -> list[str]:
    """Those that --fuse and --unfuse use; the others are shown by their namings."""
    return [name for name, spec in family.spec.fusions.items() if not spec.only_named]


def test_which_families_publish_fused_tensors() -> None:
    fused = {(f, n) for f in LISTED for n in load_family(f, {}).spec.fusions if load_family(f, {}).publishes_fused(n)}
    assert fused == {
        ("phi3", "qkv"),
        ("phi3", "gate_up"),
        ("gpt2", "qkv"),
        ("gpt_neox", "qkv"),
        ("llama4", "experts_gate_up"),
        ("llama4_text", "experts_gate_up"),
    }


@pytest.mark.product(one_in=2)
@pytest.mark.parametrize(("family", "variant"), FUSED)
def test_fused_parts_lie_one_after_the_other_on_every_rank(family: str, variant: str) -> None:
    """Rank r stores [q_r; k_r; v_r] and [gate_r; up_r]."""
    got, listed, shapes = loaded(family, variant)
    catalog, arrays = catalog_of(shapes)
    mesh = Mesh(tp=2, etp=2)
    plain = [{t.name: t for t in tensors} for tensors in cut(got, (), mesh, identity(catalog), listed.config)]
    for name in fusions(got):
        op = got.fusion(name)
        if op.groups:
            continue
        views = apply_transforms(identity(catalog), (op,), got)
        ranks = cut(got, (op,), mesh, views, listed.config)
        for view in views:
            if view.same is not None:
                continue
            whole = materialise(view, arrays)
            parts = list(dict.fromkeys(p.source.key.name for p in view.parts))
            for rank, tensors in enumerate(ranks):
                mine = next((t for t in tensors if t.name == view.name), None)
                if mine is None:
                    assert parts[0] not in plain[rank]
                    continue
                want = np.concatenate([local(plain[rank][p], arrays[p]) for p in parts])
                np.testing.assert_array_equal(local(mine, whole), want)


def local(t: RankTensor, whole: Array) -> Array:
    """What a rank stores of one tensor."""
    out = np.full(t.shape, -1, np.int64)
    for inner, outer in t.boxes:
        out[index(inner)] = whole[index(outer)]
    return out


# Where tensors live


def test_the_prediction_layer_lives_on_the_last_stage() -> None:
    for family, variant in (("deepseek", "deepseek_v3_fp8"), ("glm4_moe", "glm4_moe_mtp")):
        got, listed, shapes = loaded(family, variant)
        ranks = cut(got, (), Mesh(pp=2), identity(catalog_of(shapes)[0]), listed.config)
        stages = {t.name: stage for stage, tensors in enumerate(ranks) for t in tensors}
        assert stages["model.embed_tokens.weight"] == 0
        assert {stages[n] for n in shapes if n.startswith("model.layers.0.")} == {0}
        assert {stages[n] for n in shapes if n.startswith(("model.layers.1.", "model.layers.2."))} == {1}
        assert stages["model.layers.2.embed_tokens.weight"] == 1
        assert stages["lm_head.weight"] == stages["model.norm.weight"] == 1


def test_layers_and_experts_are_told_from_the_name() -> None:
    """The cache of placements answers as the rules do, whatever it has seen before."""
    for family, variant in LISTS:
        got, _, shapes = loaded(family, variant)
        for name in shapes:
            place, direct = got.placement(name), got._base(name)
            assert place == direct, (variant, name)
            assert place is not None, (variant, name)
            decoder = "layers." in name and not name.startswith("vision_model.")
            assert (place.layer is not None) == (decoder or ".h." in f".{name}"), (variant, name)


def test_experts_are_cut_by_their_own_grid() -> None:
    got, _, shapes = loaded("qwen3_moe", "qwen3_moe")
    placed = {n: got.placement(n) for n in shapes}
    assert {bool(p and p.rule.expert) for n, p in placed.items() if ".experts." in n} == {True}
    assert {bool(p and p.rule.expert) for n, p in placed.items() if ".experts." not in n} == {False}


def test_biases_of_row_parallel_layers_are_whole() -> None:
    got, listed, shapes = loaded("llama", "llama_tied")
    ranks = cut(got, (), Mesh(tp=4), identity(catalog_of(shapes)[0]), listed.config)
    for t in ranks[2]:
        if is_bias(t.name):
            assert (t.shape == shapes[t.name]) == t.name.endswith(("o_proj.bias", "down_proj.bias"))


def test_no_cut_parts_gate_from_up_in_gpt_oss() -> None:
    got, listed, shapes = loaded("gpt_oss", "gpt_oss")
    catalog, arrays = catalog_of(shapes)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    for rank, tensors in enumerate(cut(got, (), Mesh(tp=3, etp=3, ep=1), identity_of(name, catalog), listed.config)):
        (mine,) = tensors
        np.testing.assert_array_equal(local(mine, arrays[name]), arrays[name][:, :, 64 * rank : 64 * (rank + 1)])
    with pytest.raises(LayoutError, match="96 neurons cannot be split evenly across 64 ranks"):
        cut(got, (), Mesh(etp=64), identity_of(name, catalog), listed.config)


def test_mxfp4_is_cut_between_blocks() -> None:
    """256 inputs are 8 blocks: 4 ranks hold 2 each, 3 ranks cannot share them."""
    got, listed, shapes = loaded("gpt_oss", "gpt_oss_mxfp4")
    catalog, _ = catalog_of(shapes)
    for kind, tail in (("blocks", (16,)), ("scales", ())):
        name = f"model.layers.0.mlp.experts.down_proj_{kind}"
        ranks = cut(got, (), Mesh(etp=4), identity_of(name, catalog), listed.config)
        assert [t.shape for tensors in ranks for t in tensors] == [(4, 64, 2, *tail)] * 4
        with pytest.raises(LayoutError, match="8 elements cannot be split evenly across 3 ranks"):
            cut(got, (), Mesh(etp=3), identity_of(name, catalog), listed.config)


def identity_of(name: str, catalog: Any) -> TensorTable:
    return TensorTable({name: identity(catalog).table[name]})


def test_scale_grids_are_cut_with_their_weights() -> None:
    got, listed, shapes = loaded("deepseek", "deepseek_v3_fp8")
    views = identity(catalog_of(shapes)[0])
    rank = {t.name: t.shape for t in cut(got, (), Mesh(tp=4, etp=4), views, listed.config)[1]}
    for name, shape in rank.items():
        if name.endswith("_scale_inv"):
            weight = rank[name.removesuffix("_scale_inv")]
            assert shape == tuple(-(-n // 128) for n in weight)
    with pytest.raises(LayoutError, match="falls inside a scale block of 128"):
        cut(got, (), Mesh(tp=8, etp=8), views, listed.config)


def test_scales_of_outputs_follow_their_weights() -> None:
    got, listed, shapes = loaded("llama", "llama_per_channel")
    rank = {t.name: t.shape for t in cut(got, (), Mesh(tp=2), identity(catalog_of(shapes)[0]), listed.config)[0]}
    at = "model.layers.0."
    assert rank[at + "self_attn.q_proj.weight_scale"] == (48, 1)
    assert rank[at + "self_attn.o_proj.weight_scale"] == (64, 1)
    assert rank[at + "mlp.down_proj.weight_scale"] == (64, 1)
    assert rank["model.layers.1.mlp.down_proj.input_scale"] == (1,)


# Names of other software


def test_names_of_deepseek() -> None:
    """inference/convert.py of DeepSeek-V3 and V3.2, by whole names."""
    got, _, shapes = loaded("deepseek", "deepseek_v32_fp8")
    names = set(apply_transforms(identity(catalog_of(shapes)[0]), FamilyDialect("deepseek").statements(got), got).table)
    assert {n for n in names if not n.startswith("layers.")} == {"embed.weight", "head.weight", "norm.weight"}
    layer = {n.removeprefix("layers.1.") for n in names if n.startswith("layers.1.")}
    weights = {"attn.wq_a", "attn.wq_b", "attn.wkv_a", "attn.wkv_b", "attn.wo", "attn.indexer.wq_b", "attn.indexer.wk"}
    weights |= {f"ffn.{where}.w{i}" for where in ("shared_experts", *(f"experts.{e}" for e in range(4))) for i in "123"}
    plain = {"attn_norm", "ffn_norm", "attn.q_norm", "attn.kv_norm", "ffn.gate", "attn.indexer.weights_proj"}
    indexer = {"attn.indexer.k_norm.weight", "attn.indexer.k_norm.bias"}
    assert (
        layer
        == {f"{w}.{k}" for w in weights for k in ("weight", "scale")}
        | {f"{n}.weight" for n in plain}
        | {"ffn.gate.bias"}
        | indexer
    )
    assert not any(n.startswith("layers.2.") for n in names)


@pytest.mark.parametrize(("family", "variant"), sorted(key for key in LISTS if "@" in key[1]))
def test_the_names_of_transformers(family: str, variant: str) -> None:
    """From the published names to those of the modules: the list that transformers itself writes."""
    published = variant.partition("@")[0]
    got, _, shapes = loaded(family, published)
    views = apply_transforms(identity(catalog_of(shapes)[0]), FamilyDialect("transformers").statements(got), got)
    assert {v.name: list(v.shape) for v in views} == LISTS[family, variant].tensors


def test_the_form_of_a_hugging_face_checkpoint_is_seen_from_its_names() -> None:
    for family, variant in LISTS:
        got, listed, shapes = loaded(family, variant)
        want = "transformers" if "@" in variant else "bare" if variant == "gpt2_published" else ""
        assert got.published_form(listed.tensors) == (want, ""), variant
        for name in fusions(got):
            apart = got.publishes_fused(name)
            op = replace(got.fusion(name), inverse=apart)
            views = apply_transforms(identity(catalog_of(shapes)[0]), (op,), got)
            fusing = "" if set(views.table) == set(shapes) else "unfuse" if apart else "fuse"
            assert got.published_form(views.table) == (want, fusing), (variant, name)


def test_a_trainers_naming_is_seen_from_its_names() -> None:
    """Of every model under every such naming; published names, and one more tensor, are none."""
    seen = set()
    for family, variant in PUBLISHED:
        got, listed, shapes = loaded(family, variant)
        assert got.trainer_naming(listed.tensors) == "", variant
        start, _ = canonical(got, shapes)
        for naming in got.spec.trainer_namings:
            if (family, variant, naming) in REFUSED:
                continue
            views = apply_transforms(start, FamilyDialect(naming).statements(got), got)
            assert got.trainer_naming(views.table) == naming, variant
            assert got.trainer_naming([*views.table, "layers.0.attention.other"]) == "", variant
            seen.add((family, naming))
    assert seen >= {("llama", "torchtitan"), ("llama", "meta")}


# Finding and reading


def test_an_unknown_naming_says_what_there_is() -> None:
    with pytest.raises(UnsupportedError) as caught:
        FamilyDialect("nemo").statements(load_family("llama", {}))
    assert "it has: hf, " in str(caught.value.hint)


def test_an_unknown_family_says_the_nearest() -> None:
    with pytest.raises(UnsupportedError) as caught:
        load_family("lama", {})
    assert "did you mean `llama`, " in str(caught.value.hint)


def test_a_config_that_names_no_known_family() -> None:
    assert find_family({"model_type": "orca", "architectures": ["OrcaForCausalLM"]}) is None
    assert find_family({}) is None


def test_a_family_from_a_file(tmp_path: Any) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "family: mine\n"
        "sizes: {heads: n_heads}\n"
        "layers:\n"
        "  prefix: 'blocks.{layer}.'\n"
        "  rules:\n"
        "    attn.*: column heads\n"
        "    special.*: replicate\n"
        "first:\n"
        "  blocks.0.attn.first: replicate\n",
        encoding="utf-8",
    )
    got = load_family(str(path), {"n_heads": 4})
    assert got.size("heads") == 4
    # A rule for one layer does not spread to the others of its template.
    rules = [got.placement(f"blocks.{i}.attn.first") for i in (1, 0, 2)]
    assert [p.rule.verb for p in rules if p] == ["column", "replicate", "column"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("family: x", "not valid at `layers`"),
        ("family: x\nlayers: {prefix: a, rules: {}, rulez: {}}", "not valid at `layers.rulez`"),
        ("family: x\nlayers: {prefix: 'a.{layer}.', rules: {b: colunm}}", "`colunm` is not a layout rule"),
        ("a: [", "not valid YAML"),
        ("a: [1\n b: }", "wrong.yaml:2"),
        ("a: \0", "not valid YAML"),
    ],
)
def test_a_family_file_that_is_wrong_names_the_place(tmp_path: Any, text: str, says: str) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(LayoutError) as caught:
        load_family(str(path), {})
    assert says in str(caught.value)
    assert "\\n" not in str(caught.value)


def test_sizes_come_from_the_text_model_of_a_larger_one() -> None:
    config = {"text_config": {"num_attention_heads": 8, "num_hidden_layers": 2}, "model_type": "x"}
    got = load_family("llama", config)
    assert (got.size("heads"), got.size("kv_heads"), got.size("layers")) == (8, 8, 2)


def test_null_fields_count_as_not_given() -> None:
    got = load_family("llama", json.loads('{"num_attention_heads": 8, "num_key_value_heads": null}'))
    assert got.size("kv_heads") == 8
