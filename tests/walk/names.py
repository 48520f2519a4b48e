"""Names and fusions: what a model's tensors are called in each kind of checkpoint, and of what each is made.

Written from what the engines' own loaders and savers ask for, not from the package's family files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tests.walk.forms import Form, Join, Leaf, Once, Squeeze, Stack, Turn, Weave, leaves
from tests.walk.models import Model

Table = dict[str, Form]
"""Stored name -> what it is made of."""


class Unclear(Exception):  # noqa: N818  # an answer, not an error
    """There is no one right way to write these tensors so."""


class Missing(Unclear):
    """Some of what belongs together has been left out."""


def _regex(template: str) -> re.Pattern[str]:
    """Of a name with {a} and {b} for any text and {n} for a number."""
    out = re.escape(template)
    for word, text in (("a", ".+"), ("b", ".+"), ("n", r"\d+")):
        out = out.replace(rf"\{{{word}\}}", f"(?P<{word}>{text})", 1)
    return re.compile(out)


def _fill(template: str, found: Mapping[str, str]) -> str:
    for word, text in found.items():
        template = template.replace(f"{{{word}}}", text)
    return template


def rename(table: Table, *pairs: tuple[str, str]) -> Table:
    """The first pair that fits decides."""
    compiled = [(_regex(old), new) for old, new in pairs]
    out: Table = {}
    for name, form in table.items():
        hit = next(((m, new) for regex, new in compiled if (m := regex.fullmatch(name))), None)
        out[_fill(hit[1], hit[0].groupdict()) if hit else name] = form
    return out


def join(table: Table, whole: str, *parts: str, make: Callable[[tuple[Form, ...]], Form] = Join) -> Table:
    """Several become one. Raises Missing where some are there and some are not."""
    first = _regex(parts[0])
    groups = {}
    for name in table:
        if m := first.fullmatch(name):
            groups[name] = [_fill(p, m.groupdict()) for p in parts], _fill(whole, m.groupdict())
    others = [_regex(p) for p in parts[1:]]
    members = {n for names, _ in groups.values() for n in names}
    if any(n not in table for n in members) or any(r.fullmatch(n) and n not in members for n in table for r in others):
        raise Missing(f"a part of {whole} is not there")
    out: Table = {}
    for name, form in table.items():
        if name in groups:
            names, new = groups[name]
            out[new] = make(tuple(table[n] for n in names))
        elif name not in members:
            out[name] = form
    return out


def stack(table: Table, whole: str, part: str, model: Model) -> Table:
    """A tensor for each expert becomes one for all. Raises Missing when one is not there."""
    regex = _regex(part)
    groups: dict[str, dict[int, Form]] = {}
    out: Table = {}
    for name, form in table.items():
        if m := regex.fullmatch(name):
            found = m.groupdict()
            new = _fill(whole, found)
            out[new] = form  # its place
            groups.setdefault(new, {})[int(found["n"])] = form
        else:
            out[name] = form
    for new, forms in groups.items():
        if sorted(forms) != list(range(model.experts)):
            raise Missing(f"an expert of {new} is not there")
        out[new] = Stack(tuple(forms[n] for n in sorted(forms)))
    return out


def turn(table: Table, pattern: str) -> Table:
    regex = re.compile(pattern)
    return {n: Turn(f) if regex.fullmatch(n) else f for n, f in table.items()}


def drop(table: Table, pattern: str) -> Table:
    regex = re.compile(pattern)
    return {n: f for n, f in table.items() if not regex.fullmatch(n)}


QKV = ("{a}.self_attn.q_proj.{b}", "{a}.self_attn.k_proj.{b}", "{a}.self_attn.v_proj.{b}")


@dataclass(frozen=True)
class Style:
    """In which of its forms a Hugging Face checkpoint is."""

    experts: str = "apart"
    """apart, or stacked: as transformers 5 holds them in memory."""
    fused: str = ""
    """fuse or unfuse: other than published."""
    bare: bool = False
    """GPT-2 without `transformer.`, GPT-NeoX with `lm_head`."""


def plain(model: Model) -> Table:
    """Every tensor by itself."""
    return {n: Leaf(n) for n in model.tensors}


def hugging_face(model: Model, table: Table, style: Style) -> Table:
    """As it is published, or in one of the other forms that Hugging Face's own software writes."""
    family = model.family
    stacked = style.experts == "stacked" and model.experts and family != "gpt_oss"
    published_fused = family in ("phi3", "gpt2", "gpt_neox")
    fused = {"fuse": True, "unfuse": False, "": published_fused}[style.fused]
    if family == "gpt2":
        if fused:
            table = join(table, "{a}.attn.c_attn.{b}", *(f"{{a}}.attn.{x}_proj.{{b}}" for x in "qkv"))
        table = turn(table, r".*\.(attn\.(c_attn|[qkv]_proj|c_proj)|mlp\.(c_fc|c_proj))\.weight")
        return rename(table, ("transformer.{a}", "{a}")) if style.bare else table
    if family == "gpt_neox":
        if fused:
            table = join(
                table,
                "{a}.attention.query_key_value.{b}",
                *(f"{{a}}.attention.{x}_proj.{{b}}" for x in "qkv"),
                make=lambda parts: Weave(parts, model.head),
            )
        return rename(table, ("embed_out.{a}", "lm_head.{a}")) if style.bare else table
    if family == "gpt_oss":
        table = join(
            table,
            "{a}.experts.{n}.gate_up_proj.{b}",
            "{a}.experts.{n}.gate_proj.{b}",
            "{a}.experts.{n}.up_proj.{b}",
            make=lambda parts: Weave(parts, 1),
        )
        for x in ("gate_up_proj", "down_proj"):
            table = stack(table, f"{{a}}.experts.{x}", f"{{a}}.experts.{{n}}.{x}.weight", model)
            table = stack(table, f"{{a}}.experts.{x}_bias", f"{{a}}.experts.{{n}}.{x}.bias", model)
        table = turn(table, r".*\.experts\.(gate_up_proj|down_proj)")
        return join(table, "{a}.self_attn.qkv_proj.{b}", *QKV) if fused else table
    if fused and family != "deepseek":
        table = join(table, "{a}.self_attn.qkv_proj.{b}", *QKV)
    if family == "mixtral":
        if fused or stacked:
            table = join(table, "{a}.experts.{n}.w13.{b}", "{a}.experts.{n}.w1.{b}", "{a}.experts.{n}.w3.{b}")
        if stacked:
            old = "{a}.block_sparse_moe.experts.{n}"
            for x, new in (("w13", "gate_up_proj"), ("w2", "down_proj")):
                table = stack(table, f"{{a}}.mlp.experts.{new}", f"{old}.{x}.weight", model)
                table = stack(table, f"{{a}}.mlp.experts.{new}_scale_inv", f"{old}.{x}.weight_scale_inv", model)
            table = rename(table, ("{a}.block_sparse_moe.gate.{b}", "{a}.mlp.gate.{b}"))
        return table
    if fused:
        table = join(table, "{a}.gate_up_proj.{b}", "{a}.gate_proj.{b}", "{a}.up_proj.{b}")
    if stacked:
        old = "{a}.experts.{n}"
        if not fused:
            table = join(table, old + ".gate_up_proj.{b}", old + ".gate_proj.{b}", old + ".up_proj.{b}")
        for x in ("gate_up_proj", "down_proj"):
            table = stack(table, f"{{a}}.experts.{x}", f"{old}.{x}.weight", model)
            table = stack(table, f"{{a}}.experts.{x}_scale_inv", f"{old}.{x}.weight_scale_inv", model)
        if family == "ernie4_5_moe":
            table = rename(table, ("{a}.mlp.moe_statics.{b}", "{a}.mlp.gate.moe_statics.{b}"))
    return table


def without_prediction(model: Model, table: Table) -> Table:
    """Without what is there for multi-token prediction."""
    return {
        n: f
        for n, f in table.items()
        if not n.startswith("model.mtp_") and all(model.tensors[x].layer < model.layers for x in leaves(f))
    }


def once(model: Model, table: Table) -> Table:
    """Of a tied model: without the head, or with the head in place of the embedding that is not there."""
    heads = {n for n, f in table.items() if leaves(f) == [model.output]}
    owners = {n for n, f in table.items() if leaves(f) == [model.embedding]} - {"lm_head.weight"}
    if not heads:
        return table
    if owners:
        return {n: f for n, f in table.items() if n not in heads}
    return {model.embedding if n in heads else n: f for n, f in table.items()}


def _without_derived(model: Model, table: Table) -> Table:
    return {n: f for n, f in table.items() if not any(model.tensors[x].derived for x in leaves(f))}


def _one_head(model: Model, table: Table, *, both: bool = False) -> Table:
    """Tied embeddings are stored as the head; or under both names."""
    if not model.tied or model.tie == "differs" or model.embedding not in table:
        return table
    if both:
        return {**table, model.output: table[model.embedding]}
    table = {n: f for n, f in table.items() if n != model.output}
    return rename(table, (model.embedding, model.output))


def vllm(model: Model, table: Table) -> Table:
    """The parameters of vLLM's modules. Raises Unclear."""
    family = model.family
    table = _without_derived(model, without_prediction(model, table))
    no_bias = family in ("qwen3", "qwen3_moe", "ernie4_5", "ernie4_5_moe")
    if no_bias and any(name.endswith("self_attn.o_proj.bias") for name in table):
        raise Unclear("the o_proj of vLLM's model has no bias")
    if family == "gpt_neox":
        table = _one_head(model, hugging_face(model, table, Style()))
        return rename(table, ("gpt_neox.{a}", "model.{a}"), ("embed_out.{a}", "lm_head.{a}"))
    if model.kind != "gemma2":
        table = _one_head(model, table)
    if family == "gpt2":
        return join(table, "{a}.attn.c_attn.{b}", *(f"{{a}}.attn.{x}_proj.{{b}}" for x in "qkv"))
    if family == "gpt_oss":
        # The module of the embedding has another name, and attention too.
        table = hugging_face(model, table, Style(fused="fuse"))
        table = turn(table, r".*\.experts\.(gate_up_proj|down_proj)")
        table = {n: Once(f) if n.endswith(".down_proj_bias") else f for n, f in table.items()}
        return rename(
            table,
            ("model.embed_tokens.{a}", "model.embedding.{a}"),
            ("{a}.self_attn.{b}", "{a}.attn.{b}"),
            ("{a}.experts.gate_up_proj", "{a}.experts.routed_experts.w13_weight"),
            ("{a}.experts.gate_up_proj_bias", "{a}.experts.routed_experts.w13_bias"),
            ("{a}.experts.down_proj", "{a}.experts.routed_experts.w2_weight"),
            ("{a}.experts.down_proj_bias", "{a}.experts.routed_experts.w2_bias"),
        )
    if family == "deepseek":
        a = "{a}.self_attn"
        if any(".q_a_proj." in n for n in table):
            table = join(table, f"{a}.fused_qkv_a_proj.{{b}}", f"{a}.q_a_proj.{{b}}", f"{a}.kv_a_proj_with_mqa.{{b}}")
        if model.kind == "deepseek_v32":
            # wk may be FP8, and is joined with what is not
            if any(n.endswith("indexer.wk.weight_scale_inv") for n in table):
                raise Unclear("the indexer's wk is FP8")
            table = join(table, "{a}.indexer.wk_weights_proj.{b}", "{a}.indexer.wk.{b}", "{a}.indexer.weights_proj.{b}")
    else:
        table = join(table, "{a}.self_attn.qkv_proj.{b}", *QKV)
    old = "{a}.experts.{n}"
    if family == "mixtral":
        table = join(table, old + ".w13.{b}", old + ".w1.{b}", old + ".w3.{b}")
        table = stack(table, "{a}.experts.routed_experts.w13_{b}", old + ".w13.{b}", model)
        return stack(table, "{a}.experts.routed_experts.w2_{b}", old + ".w2.{b}", model)
    table = join(table, "{a}.gate_up_proj.{b}", "{a}.gate_proj.{b}", "{a}.up_proj.{b}")
    table = stack(table, "{a}.experts.routed_experts.w13_{b}", old + ".gate_up_proj.{b}", model)
    table = stack(table, "{a}.experts.routed_experts.w2_{b}", old + ".down_proj.{b}", model)
    shared = "{a}.mlp.experts._shared_experts._layer"
    inner = "{a}.mlp.experts.routed_experts"
    correction = "e_score_correction_bias"
    if family == "ernie4_5_moe":
        table = {n: Squeeze(f) if n.endswith(correction) else f for n, f in table.items()}
    pairs = {
        "qwen2_moe": (
            ("{a}.mlp.shared_expert_gate.{b}", shared + ".expert_gate.{b}"),
            ("{a}.mlp.shared_expert.{b}", shared + ".{b}"),
        ),
        "qwen3_moe": (("{a}.mlp.gate.{b}", "{a}.mlp.experts.gate.{b}"),),
        "glm4_moe": (
            ("{a}.mlp.gate." + correction, f"{inner}.{correction}"),
            ("{a}.mlp.shared_experts.{b}", shared + ".{b}"),
        ),
        "ernie4_5_moe": (
            ("{a}.mlp.moe_statics." + correction, f"{inner}.{correction}"),
            ("{a}.mlp.shared_experts.{b}", shared + ".{b}"),
        ),
        "deepseek": (
            # V3.2 has an attention of its own on CUDA, without this module.
            *(
                ("{a}.self_attn." + name + ".{b}", "{a}.self_attn.mla_attn." + name + ".{b}")
                for name in ("q_a_layernorm", "q_b_proj", "q_proj", "o_proj")
                if model.kind != "deepseek_v32"
            ),
            ("{a}.mlp.shared_experts.{b}", shared + ".{b}"),
            ("{a}.mlp.gate.{b}", "{a}.mlp.experts.gate.{b}"),
        ),
    }.get(family, ())
    return rename(table, *pairs)


def vllm_embedding(model: Model) -> str:
    """Its name where it is not the head."""
    known = {"gpt_oss": "model.embedding.weight", "gpt_neox": "model.embed_in.weight"}
    return known.get(model.family, model.embedding)


def deepseek(model: Model, table: Table) -> Table:
    """Names of DeepSeek's inference code."""
    table = without_prediction(model, table)
    words = (
        ("embed_tokens", "embed"), ("input_layernorm", "attn_norm"), ("post_attention_layernorm", "ffn_norm"),
        ("q_proj", "wq"), ("q_a_proj", "wq_a"), ("q_a_layernorm", "q_norm"), ("q_b_proj", "wq_b"),
        ("kv_a_proj_with_mqa", "wkv_a"), ("kv_a_layernorm", "kv_norm"), ("kv_b_proj", "wkv_b"), ("o_proj", "wo"),
        ("gate_proj", "w1"), ("down_proj", "w2"), ("up_proj", "w3"), ("lm_head", "head"), ("self_attn", "attn"),
        ("mlp", "ffn"), ("e_score_correction_bias", "bias"), ("weight_scale_inv", "scale"),
    )  # fmt: skip
    known = dict(words)

    def new(name: str) -> str:
        name = name.removeprefix("model.")
        inside = ".indexer." in name
        return ".".join(
            known.get(w, w) if not inside or w in ("self_attn", "weight_scale_inv") else w for w in name.split(".")
        )

    return {new(n): f for n, f in table.items()}


def trtllm(model: Model, table: Table) -> Table:
    """Names of TensorRT-LLM. Raises Unclear."""
    table = _one_head(model, _without_derived(model, table), both=True)
    table = join(table, "{a}.self_attn.qkv_proj.{b}", *QKV)
    if model.family == "mixtral":
        old = "{a}.block_sparse_moe.experts.{n}"
        table = join(table, old + ".w31.{b}", old + ".w3.{b}", old + ".w1.{b}")  # up in front of gate
        table = stack(table, "{a}.mlp.fc.weight", old + ".w31.weight", model)
        table = stack(table, "{a}.mlp.proj.weight", old + ".w2.weight", model)
        table = rename(table, ("{a}.block_sparse_moe.gate.{b}", "{a}.mlp.router.{b}"))
    table = rename(
        table,
        ("{a}.self_attn.qkv_proj.{b}", "{a}.attention.qkv.{b}"),
        ("{a}.self_attn.o_proj.{b}", "{a}.attention.dense.{b}"),
        ("{a}.mlp.gate_proj.{b}", "{a}.mlp.fc.{b}"),
        ("{a}.mlp.up_proj.{b}", "{a}.mlp.gate.{b}"),
        ("{a}.mlp.down_proj.{b}", "{a}.mlp.proj.{b}"),
        ("{a}.post_attention_layernorm.{b}", "{a}.post_layernorm.{b}"),
        ("model.embed_tokens.{b}", "transformer.vocab_embedding.{b}"),
        ("model.norm.{b}", "transformer.ln_f.{b}"),
    )
    return rename(table, ("model.layers.{a}", "transformer.layers.{a}"))
