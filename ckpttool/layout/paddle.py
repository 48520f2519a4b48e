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
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from ckpttool.catalog import SHAPE_FROM_RULES, RankTensor, StoredTensor
from ckpttool.errors import CkptError, ConflictError
from ckpttool.formats.paddle.config import base_prefix, head_in_out, is_linear
from ckpttool.layout.assemble import is_bias
from ckpttool.layout.family import Family, Fuse, Placement, Rename, Transform, Transpose, inverse
from ckpttool.layout.names import expand, pattern_regex, split_numbers
from ckpttool.layout.rules import IndivisibleError, PartitionContext, Rule, Sizes, cut_axis, global_axis
from ckpttool.layout.scales import weight_of
from ckpttool.layout.shapes import declared_tensors
from ckpttool.select import compile_pattern, exactly

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


def source_transforms(family: Family, shapes: Shapes, config: Mapping[str, Any]) -> tuple[Transform, ...]:
    """The statements that lead from Hugging Face names to those of a Paddle checkpoint with these tensors."""
    if family.name == "none":
        return ()
    prefix, published = base_prefix(shapes), _hf_prefix(family)
    ops: list[Transform] = list(_fusions(family, _modules(shapes)))
    renamed = prefix not in ("", published)

    def hf(name: str) -> str:
        return published + name[len(prefix) :] if renamed and name.startswith(prefix + ".") else name

    turned = _turned(family, shapes, config)
    head = shapes.get("lm_head.weight")
    if head is not None and head_in_out(head, prefix, config, tied=family.tied):
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


def target_transforms(
    family: Family, shapes: Shapes, config: Mapping[str, Any], version: str, fused: str
) -> tuple[Transform, ...]:
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
    ops: list[Transform] = list(_fusions(family, modules))
    old_llama = kind == "llama" and version.startswith("paddleformers-0")
    turned = _turned(family, shapes, config)
    for op in ops:
        if isinstance(op, Fuse):
            turned |= _wholes(op, {t: shapes[t] for t in turned if t in shapes})
    if len(shapes.get("lm_head.weight", ())) == 2 and (nlp or old_llama) and not family.tied:
        turned.add("lm_head.weight")
    if turned:
        ops.append(Transpose(tuple(sorted({_pattern(n) for n in turned}))))
    if _hf_prefix(family) == "model" and ((nlp and kind in _NLP_PREFIXES) or old_llama):
        ops.append(Rename((("model.{a}", kind + ".{a}"),)))
    return tuple(ops)


def _wholes(op: Fuse, shapes: Shapes) -> set[str]:
    """Names that a fusion makes of these."""
    first = pattern_regex(op.parts[0])
    return {expand(op.whole, m.groupdict()) for n in shapes if (m := first.match(n))}


def with_fusions(ops: tuple[Transform, ...], fused: str, family: Family, shapes: Shapes) -> tuple[Transform, ...]:
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
    out: list[Transform] = [*(op for op in ops if isinstance(op, Fuse)), *more]
    for op in rest:
        out.append(replace(op, patterns=tuple(sorted({*op.patterns, *wholes}))) if isinstance(op, Transpose) else op)
    return tuple(out)


def _apart(op: Fuse, patterns: tuple[str, ...]) -> set[str]:
    """Patterns of the parts of fused tensors that are among ``patterns``."""
    word = op.whole.split("{a}")[1].split("{b}")[0]
    return {p.replace(word, part.split("{a}")[1].split("{b}")[0]) for p in patterns if word in p for part in op.parts}


def _hf_name(ops: Sequence[Transform], name: str) -> str:
    """The name before the renamings of ``ops``."""
    for op in inverse(ops):
        if isinstance(op, Rename):
            name = op.forward(name)
    return name


def _hf_names(ops: Sequence[Transform], shapes: Shapes) -> Shapes:
    return {_hf_name(ops, name): shape for name, shape in shapes.items()}


def keeps_whole(rule: Rule, sizes: Sizes, tp: int) -> bool:
    """Whether Paddle's tensor parallelism holds a tensor with this rule whole on every rank.

    That is so for key and value projections whose heads do not divide, and for embeddings and heads of a vocabulary
    that does not. Writing asks this function, and reading does where a save does not record what is cut.
    """
    kind = "vocab" if rule.verb == "vocab" else rule.units if rule.verb == "column" else ""
    return kind in ("vocab", "kv_heads") and kind in sizes and sizes[kind].value % tp != 0


def kept_whole(
    family: Family, ops: tuple[Transform, ...], shapes: Shapes, tp: int, source: Sequence[str] = ()
) -> tuple[str, ...]:
    """Patterns of the tensors to write whole on every rank: those of ``keeps_whole``, and of the tensors that no rule
    names those that the source held whole (``source`` are its patterns).

    Raises ConflictError where config.json has a vocabulary by which the tensor could not be read again.
    """
    place_of = family.placer(ops)
    held = [compile_pattern(p) for p in source]
    out = set()
    for name, shape in shapes.items():
        place = place_of(name)
        if place is not None and tp > 1:
            _check_vocabulary(name, shape, place.rule, family, tp)
        if any(p.search(name) for p in held) if place is None else keeps_whole(place.rule, family.sizes, tp):
            out.add("*".join(split_numbers(name)[0].split("#")))
    return tuple(sorted(out))


def _check_vocabulary(name: str, shape: tuple[int, ...], rule: Rule, family: Family, tp: int) -> None:
    """A vocabulary may be padded beyond config.json's, but not be shorter, nor so long that a share looks whole."""
    vocab = family.size("vocab")
    axis = cut_axis(rule, len(shape), bias=is_bias(name)) if rule.verb == "vocab" else None
    if vocab is None or axis is None:
        return
    rows = shape[axis]
    is_cut = not keeps_whole(rule, family.sizes, tp)
    if rows < vocab or (is_cut and rows // tp >= vocab):
        raise ConflictError(
            f"`{name}` has {rows:,} tokens, config.json says a vocabulary of {vocab:,}:"
            f" on {tp} ranks nothing would tell whether it is whole or cut",
            where=rule.place,
            hint=f"set vocab_size to {rows} in config.json, if the tensor is right",
        )


def check_head(
    ranks: Sequence[Sequence[RankTensor]],
    shapes: Shapes,
    ops: Sequence[Transform],
    family: Family,
    config: Mapping[str, Any],
) -> None:
    """The head must be read the way it is written, with ``config`` as it will lie beside it: its version may be new.

    ``shapes`` are those of all tensors, whole. Raises ConflictError where it would be read transposed.
    """
    in_out = any("lm_head.weight" in op.patterns for op in ops if isinstance(op, Transpose))
    whole, prefix = shapes.get("lm_head.weight"), base_prefix(shapes)
    if family.name == "none" or whole is None or len(whole) != 2:
        return  # without a family nothing is turned round when it is read
    for shape in {whole, *(t.shape for held in ranks for t in held if t.name == "lm_head.weight")}:
        if len(shape) == 2 and head_in_out(shape, prefix, config, tied=family.tied) != in_out:
            raise ConflictError(
                f"`lm_head.weight` {list(shape)} would be read transposed: it is kept the way round that the source"
                " has it, and the models of --target have it the other way round",
                hint="--native-names writes it as those models have it",
            )


@dataclass(slots=True)
class WholeTensors:
    """Finds the tensors that every tensor-parallel rank holds whole, in a save that does not record which are cut.

    The length of the axis that the rule cuts tells: on the rank it is that of the whole tensor, or a share of it. How
    long the whole tensor is follows from config.json, or from the model's weights for what is saved beside them.
    """

    family: Family
    ops: tuple[Transform, ...]
    cutting: PartitionContext
    config: Mapping[str, Any]
    known: Shapes = field(default_factory=dict)
    """Whole shapes of the model's weights, once they are known."""
    _declared: Shapes | None = None

    def patterns(self, tensors: Iterable[StoredTensor]) -> tuple[str, ...]:
        """Patterns of their names. Raises ConflictError where lengths fit neither a whole tensor nor a share."""
        place_of = self.family.placer(self.ops)
        chosen: dict[str, bool] = {}
        for t in tensors:
            if t.name in chosen or (t.state and prod(t.shape) == 1 and t.shape != SHAPE_FROM_RULES):
                continue
            place = place_of(t.name)
            said = any(regex.search(t.name) for regex, _ in self.family.overrides)
            chosen[t.name] = place is not None and not said and self._is_whole(t, place)
        return exactly(chosen)

    def _is_whole(self, t: StoredTensor, place: Placement) -> bool:
        rule, sizes, mesh = place.rule, self.family.sizes, self.cutting.mesh
        ways = mesh.etp if rule.expert else mesh.tp
        if ways == 1:
            return False
        usual = keeps_whole(rule, sizes, ways)
        if t.shape == SHAPE_FROM_RULES:
            return usual
        axis = cut_axis(rule, len(t.shape), bias=is_bias(t.name))
        if axis is None:
            return False
        held = t.shape[axis]
        try:
            joined = held * ways if rule.verb == "vocab" else global_axis(rule, held, ways, self.cutting)
        except IndivisibleError:
            joined = 0  # no share has this length
        length = self._length(t.name, rule, axis, len(t.shape))
        if length in (held, joined):
            return length == held
        if rule.verb != "vocab":
            if length is None or rule.units != "kv_heads":
                return usual
        elif length is not None:
            # A whole vocabulary may be padded, and so may one that is cut.
            if held < length < joined:
                return False
            if usual and held > length:
                return True
        raise self._unclear(t, rule, axis, ways, length)

    def _length(self, name: str, rule: Rule, axis: int, ndim: int) -> int | None:
        """Elements of the axis in the whole tensor, as far as that is known."""
        if name in self.known and len(self.known[name]) == ndim:
            return self.known[name][axis]
        if rule.verb == "vocab":
            return self.family.size("vocab")
        published = _hf_name(self.ops, name)
        fuse = next((f for f in self.ops if isinstance(f, Fuse) and pattern_regex(f.whole).match(published)), None)
        if fuse is None:
            return self._declared_length(published)
        captures = pattern_regex(fuse.whole).match(published)
        parts = [self._declared_length(expand(p, captures.groupdict())) for p in fuse.parts] if captures else []
        return None if None in parts else sum(n for n in parts if n is not None)

    def _declared_length(self, name: str) -> int | None:
        """The same of a tensor as Hugging Face has it, by config.json."""
        if self._declared is None:
            try:
                self._declared = {d.name: d.shape for d in declared_tensors(self.family, self.config)}
            except CkptError:  # the config lacks a field, or the family does not say what its models hold
                self._declared = {}
        place, shape = self.family.placement(name), self._declared.get(name)
        if shape is None and is_bias(name):
            name = name.removesuffix("bias") + "weight"
            place, shape = self.family.placement(name), self._declared.get(name)
        axis = cut_axis(place.rule, len(shape), bias=is_bias(name)) if place is not None and shape else None
        return shape[axis] if shape is not None and axis is not None else None

    def _unclear(self, t: StoredTensor, rule: Rule, axis: int, ways: int, length: int | None) -> ConflictError:
        said = f"config.json says {length:,}" if length is not None else "config.json does not say how long it is"
        field = "vocab_size" if rule.verb == "vocab" else "the sizes of the attention heads"
        return ConflictError(
            f"it is not clear whether `{t.name}` is whole on each of the {ways} ranks or cut: axis {axis} has"
            f" {t.shape[axis]:,} elements on a rank, and {said}",
            where=rule.place,
            hint=f"correct {field} in config.json; or say --replicate '{t.name}' if it is whole,"
            f" --split '{t.name}={axis}' if it is cut",
        )


def differ(ours: tuple[Transform, ...], others: tuple[Transform, ...]) -> list[str]:
    """In which of names, fused projections and the head's orientation two Paddle namings differ."""

    def traits(ops: tuple[Transform, ...]) -> dict[str, object]:
        return {
            "names": [op.pairs for op in ops if isinstance(op, Rename)],
            "fused projections": {op.whole for op in ops if isinstance(op, Fuse)},
            "the head's orientation": any("lm_head.weight" in op.patterns for op in ops if isinstance(op, Transpose)),
        }

    a, b = traits(ours), traits(others)
    return [k for k in a if a[k] != b[k]]
