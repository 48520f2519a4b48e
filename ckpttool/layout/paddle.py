"""Paddle's names and orientations as statements that lead from a Hugging Face naming to them.

PaddleNLP and PaddleFormers name a model's tensors as Hugging Face does, apart from the first word (``llama.``,
``qwen2.``), fused projections and the orientation of linear weights, so the statements follow from the names and shapes
of a checkpoint and need no table for each family:

    fuse       qkv_proj: q, k and v interleaved by key/value group; gate_up_fused_proj, up_gate_proj: [gate | up]
    transpose  the weights of linear layers (and the head, in PaddleNLP)
    rename     model.* -> llama.*

Sources: paddlenlp 3.0.0b4 and paddleformers 0.4.1 and 1.2.0 (fuse_param_func, the rules of each model class and the
AOA texts of 1.2), measured on their checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckpttool.formats._paddle import base_prefix, head_in_out, is_linear
from ckpttool.layout.family import Family, Fuse, Op, Rename, Transpose, inverse
from ckpttool.layout.names import split_numbers
from ckpttool.layout.scales import weight_of
from ckpttool.select import compile_pattern

Shapes = Mapping[str, tuple[int, ...]]

_NLP_PREFIXES = ("llama", "qwen2", "qwen2_moe", "mistral", "mixtral", "gemma", "deepseek_v2", "deepseek_v3", "yuan")
"""Model types whose base model PaddleNLP names like the type."""
_FUSED_12 = ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "ernie4_5", "ernie4_5_moe", "glm4_moe")
"""Model types that paddleformers 1.x holds with fused projections."""
_GATE_UP = ("up_gate_proj", "gate_up_fused_proj")


def _pattern(name: str) -> str:
    """The pattern of all names that differ from this one in their numbers only."""
    template, numbers = split_numbers(name)
    words = iter(["{layer}", "{expert}"] if len(numbers) > 1 else ["{layer}"])
    parts = template.split("#")
    return parts[0] + "".join(next(words, "{expert}") + p for p in parts[1:])


def _fusions(family: Family, modules: set[str]) -> list[Fuse]:
    """The fusions that lead to these fused modules."""
    out = []
    groups = family.size("kv_heads")
    if "qkv_proj" in modules and groups and family.size("heads"):
        parts = tuple(f"{{a}}.self_attn.{x}_proj.{{b}}" for x in "qkv")
        units = ("heads", "kv_heads", "kv_heads")
        out.append(Fuse("qkv", "{a}.self_attn.qkv_proj.{b}", parts, units, groups=str(groups)))
    for module in _GATE_UP:
        if module in modules:
            parts = ("{a}.gate_proj.{b}", "{a}.up_proj.{b}")
            out.append(Fuse("gate_up", f"{{a}}.{module}.{{b}}", parts, ("", "")))
    # What Hugging Face publishes fused has the same form in Paddle.
    return [f for f in out if f.name not in family.spec.fusions or not family.publishes_fused(f.name)]


def _modules(names: Shapes) -> set[str]:
    return {n.rsplit(".", 2)[-2] for n in names if n.count(".") > 1}


def source_ops(family: Family, shapes: Shapes, config: Mapping[str, Any]) -> tuple[Op, ...]:
    """The statements that lead from Hugging Face names to those of a Paddle checkpoint with these tensors."""
    if family.name == "none":
        return ()
    prefix, published = base_prefix(shapes), _hf_prefix(family)
    ops: list[Op] = list(_fusions(family, _modules(shapes)))
    renamed = prefix not in ("", published)

    def hf(name: str) -> str:
        return published + name[len(prefix) :] if renamed and name.startswith(prefix + ".") else name

    turned = _turned(family, shapes, config)
    head = shapes.get("lm_head.weight")
    if head is not None and head_in_out(head, prefix, config):
        turned.add("lm_head.weight")
    if turned:
        ops.append(Transpose(tuple(sorted({_pattern(hf(n)) for n in turned}))))
    if renamed:
        ops.append(Rename(((f"{published}.{{a}}", prefix + ".{a}"),)))
    return tuple(ops)


def _hf_prefix(family: Family) -> str:
    """The first word of the layers' names as Hugging Face has them."""
    return family.spec.layers.prefix.split(".")[0]


def _turned(family: Family, shapes: Shapes, config: Mapping[str, Any]) -> set[str]:
    """Weights of linear layers, with their scale grids: Paddle has them the other way round than torch."""
    if family.spec.orientation == "in_out":
        return set()  # GPT-2's Conv1D is [in, out] in torch too
    out = {n for n, shape in shapes.items() if is_linear(n, len(shape), config)}
    return out | {n for n, shape in shapes.items() if len(shape) == 2 and weight_of(n, shapes) in out}


def target_ops(family: Family, shapes: Shapes, config: Mapping[str, Any], version: str, fused: str) -> tuple[Op, ...]:
    """The statements from Hugging Face tensors with these names and shapes to the names of ``version`` (a --target).

    ``fused`` is "fuse", "unfuse" or "" for what that version's models have.
    """
    if family.name == "none":
        return ()
    kind = str(config.get("model_type", ""))
    nlp = version.startswith("paddlenlp")
    gate_up = "gate_up_fused_proj" if nlp else "up_gate_proj"
    modules = set()
    if fused == "fuse" or (not fused and version.startswith("paddleformers-1") and kind in _FUSED_12):
        modules = {"qkv_proj", gate_up}
    elif nlp and not fused:
        # In PaddleNLP the config says so.
        flags = {"fuse_attention_qkv": "qkv_proj", "fuse_attention_ffn": gate_up}
        modules = {module for field, module in flags.items() if config.get(field)}
    ops: list[Op] = list(_fusions(family, modules))
    old_llama = kind == "llama" and version.startswith("paddleformers-0")
    turned = _turned(family, shapes, config)
    for op in ops:
        if isinstance(op, Fuse):
            turned |= _wholes(op, {t: shapes[t] for t in turned if t in shapes})
    tied = bool(config.get("tie_word_embeddings", family.tied))
    if len(shapes.get("lm_head.weight", ())) == 2 and (nlp or old_llama) and not tied:
        turned.add("lm_head.weight")
    if turned:
        ops.append(Transpose(tuple(sorted({_pattern(n) for n in turned}))))
    if _hf_prefix(family) == "model" and ((nlp and kind in _NLP_PREFIXES) or old_llama):
        ops.append(Rename((("model.{a}", kind + ".{a}"),)))
    return tuple(ops)


def _wholes(op: Fuse, shapes: Shapes) -> set[str]:
    """Names that a fusion makes of these."""
    from ckpttool.layout.names import expand, pattern_regex

    first = pattern_regex(op.parts[0])
    return {expand(op.whole, m.groupdict()) for n in shapes if (m := first.match(n))}


def with_fusions(ops: tuple[Op, ...], fused: str, family: Family, shapes: Shapes) -> tuple[Op, ...]:
    """A Paddle source's own statements with all fusions (``fuse``) or none (``unfuse``)."""
    if not fused:
        return ops
    rest = [op for op in ops if not isinstance(op, Fuse)]
    if fused == "unfuse":
        patterns = []
        for op in rest:
            if isinstance(op, Transpose):
                apart = {p for f in ops if isinstance(f, Fuse) for p in _apart(f, op.patterns)}
                op = Transpose(tuple(sorted({*op.patterns, *apart})))  # noqa: PLW2901
            patterns.append(op)
        return tuple(patterns)
    have = {op.name for op in ops if isinstance(op, Fuse)}
    module = "gate_up_fused_proj" if any(isinstance(op, Rename) for op in ops) else "up_gate_proj"
    more = [f for f in _fusions(family, {"qkv_proj", module}) if f.name not in have]
    wholes = {_pattern(n) for f in more for n in _wholes(f, _hf_names(rest, shapes)) if n.endswith(".weight")}
    out: list[Op] = [*(op for op in ops if isinstance(op, Fuse)), *more]
    for op in rest:
        out.append(replace(op, patterns=tuple(sorted({*op.patterns, *wholes}))) if isinstance(op, Transpose) else op)
    return tuple(out)


def _apart(op: Fuse, patterns: tuple[str, ...]) -> set[str]:
    """Patterns of the parts of fused tensors that are among ``patterns``."""
    word = op.whole.split("{a}")[1].split("{b}")[0]
    return {p.replace(word, part.split("{a}")[1].split("{b}")[0]) for p in patterns if word in p for part in op.parts}


def _hf_names(ops: Sequence[Op], shapes: Shapes) -> Shapes:
    out = {}
    for name, shape in shapes.items():
        new = name
        for op in inverse(ops):
            if isinstance(op, Rename):
                new = op.forward(new)
        out[new] = shape
    return out


def kept_whole(
    family: Family, ops: tuple[Op, ...], names: Iterable[str], tp: int, source: Sequence[str] = ()
) -> tuple[str, ...]:
    """Patterns of the tensors that Paddle's tensor parallelism holds whole on every rank.

    Key and value projections whose heads do not divide, and embeddings and heads of a vocabulary that does not; and
    of the tensors that no rule names those that the source held whole (``source`` are its patterns).
    """
    heads, vocab = family.size("kv_heads") or 0, family.size("vocab") or 0
    place_of = family.placer(ops)
    held = [compile_pattern(p) for p in source]
    out = set()
    for name in names:
        place = place_of(name)
        if place is None:
            if any(p.search(name) for p in held):
                out.add("*".join(split_numbers(name)[0].split("#")))
            continue
        if tp == 1:
            continue
        rule = place.rule
        if (rule.verb == "vocab" and vocab % tp) or (rule.verb == "column" and rule.units == "kv_heads" and heads % tp):
            out.add("*".join(split_numbers(name)[0].split("#")))
    return tuple(sorted(out))


def differ(ours: tuple[Op, ...], others: tuple[Op, ...]) -> list[str]:
    """In which of names, fused projections and the head's orientation two Paddle namings differ."""

    def traits(ops: tuple[Op, ...]) -> dict[str, object]:
        return {
            "names": [op.pairs for op in ops if isinstance(op, Rename)],
            "fused projections": {op.whole for op in ops if isinstance(op, Fuse)},
            "the head's orientation": any("lm_head.weight" in op.patterns for op in ops if isinstance(op, Transpose)),
        }

    a, b = traits(ours), traits(others)
    return [k for k in a if a[k] != b[k]]
