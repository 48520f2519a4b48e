"""``PaddleDialect``: the names, orientation and config of PaddleNLP and PaddleFormers.

They name a model's tensors as Hugging Face does, apart from the first word (``llama.``, ``qwen2.``), fused projections
and the orientation of linear weights, so the statements follow from the names and shapes of a checkpoint and need no
table for each family:

    fuse       qkv_proj: q, k and v interleaved by key/value group; gate_up_fused_proj, up_gate_proj: [gate | up]
    transpose  the weights of linear layers (and the head, in PaddleNLP)
    rename     model.* -> llama.*

Sources: paddlenlp 3.0.0b4 and paddleformers 0.4.1 and 1.2.0 (fuse_param_func, the rules of each model class and the
AOA texts of 1.2), measured on their checkpoints.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckpttool.core.catalog import RankTensor, StoredTensor
from ckpttool.dialects.base import Dialect, NamingContext, Shapes, Statements
from ckpttool.dialects.paddle_whole import WholeTensors, hf_name, kept_whole
from ckpttool.errors import ConflictError
from ckpttool.formats.config import whole_number
from ckpttool.formats.paddle import TARGETS, TRANSPOSED, base_prefix, is_linear, module_of, software, target_config
from ckpttool.layout.family import Family
from ckpttool.layout.names import expand, pattern_of, pattern_regex
from ckpttool.layout.rules import PartitionContext
from ckpttool.layout.scales import weight_of
from ckpttool.layout.statements import Fuse, Rename, Transform, Transpose
from ckpttool.layout.unknown import unknown_model

_NLP_PREFIXES = ("llama", "qwen2", "qwen2_moe", "mistral", "mixtral", "gemma", "deepseek_v2", "deepseek_v3", "yuan")
"""Model types whose base model PaddleNLP names like the type."""
_FUSED_12 = ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "ernie4_5", "ernie4_5_moe", "glm4_moe")
"""Model types that paddleformers 1.x holds with fused projections."""
_SINGLE = ("*.mlp.gate.weight",)
"""Routers, which PaddleFormers makes float32 whatever the model's dtype (``dtype_guard``, ``create_parameter``)."""
_WITH_SINGLE = ("qwen2_moe", "qwen3_moe", "glm4_moe", "deepseek_v3", "ernie4_5_moe")
"""Model types whose routers it makes so."""
FUSED_FLAGS = {"fuse_attention_qkv": ("qkv_proj",), "fuse_attention_ffn": ("gate_up_fused_proj", "up_gate_proj")}
"""Fields of PaddleNLP's configs that say which projections are fused -> the fused modules."""
_COORDINATE = re.compile(r"(?<=[._])(tp|pp|shard|moe)(\d{2,})(?=[._])")
_GATE_UP = ("up_gate_proj", "gate_up_fused_proj")


class PaddleDialect(Dialect):
    """PaddleNLP and PaddleFormers."""

    name = "paddle"
    versions = TARGETS
    in_out = True
    whole_alone = True
    whole_format = "unified"

    def detect(self, context: NamingContext, shapes: Callable[[], Shapes]) -> Statements:
        family, config = context.family, context.config
        if family.name == "none":
            return ()
        found = shapes()
        prefix, published = base_prefix(found), _hf_prefix(family)
        renamed = published.isidentifier() and prefix not in ("", published) and not _knows(family, prefix, found)

        def hf(name: str) -> str:
            return published + name[len(prefix) :] if renamed and name.startswith(prefix + ".") else name

        # What a rule names is a module of the model's own, and no fusion of Paddle's.
        fused = _modules(n for n in found if family.placement(hf(n)) is None)
        ops: list[Transform] = list(_fusions(family, fused))
        turned = _turned(family, found, config)
        head = found.get("lm_head.weight")
        if head is not None and head_in_out(head, prefix, config, tied=family.tied):
            turned.add("lm_head.weight")
        if turned:
            ops.append(Transpose(_patterns({hf(n) for n in turned}, map(hf, found))))
        if renamed:
            ops.append(Rename(((f"{published}.{{a}}", prefix + ".{a}"),)))
        return tuple(ops)

    def target(self, context: NamingContext, shapes: Callable[[], Shapes]) -> Statements:
        family, config, version, fused = context.family, context.config, context.version or TARGETS[0], context.fused
        if family.name == "none":
            return ()
        found = shapes()
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
        turned = _turned(family, found, config)
        for op in ops:
            if isinstance(op, Fuse):
                turned |= _wholes(op, {t: found[t] for t in turned if t in found})
        if len(found.get("lm_head.weight", ())) == 2 and (nlp or old_llama) and not family.tied:
            turned.add("lm_head.weight")
        if turned:
            ops.append(Transpose(_patterns(turned, found)))
        if _hf_prefix(family) == "model" and ((nlp and kind in _NLP_PREFIXES) or old_llama):
            ops.append(Rename((("model.{a}", kind + ".{a}"),)))
        return tuple(ops)

    def keep(self, context: NamingContext, own: Statements, shapes: Callable[[], Shapes]) -> Statements:
        if not context.fused:
            return own
        rest = [op for op in own if not isinstance(op, Fuse)]
        if context.fused == "unfuse":
            return tuple(_unfused(own, rest))
        have = {op.name for op in own if isinstance(op, Fuse)}
        module = "gate_up_fused_proj" if any(isinstance(op, Rename) for op in own) else "up_gate_proj"
        more = [f for f in _fusions(context.family, {"qkv_proj", module}) if f.name not in have]
        published = {hf_name(rest, name): shape for name, shape in shapes().items()}
        wholes = {pattern_of(n) for f in more for n in _wholes(f, published) if n.endswith(".weight")}
        turned = [
            replace(op, patterns=tuple(sorted({*op.patterns, *wholes}))) if isinstance(op, Transpose) else op
            for op in rest
        ]
        return (*(op for op in own if isinstance(op, Fuse)), *more, *turned)

    def check_known(self, context: NamingContext, shapes: Shapes, root: str) -> None:
        odd = next((n for n, shape in shapes.items() if len(shape) == 2 and module_of(n) in TRANSPOSED), None)
        if context.family.name == "none" and odd is not None:
            why = "which weights Paddle stores transposed depends on the model"
            raise unknown_model(why, shapes, context.config, root, [odd])

    def single(self, context: NamingContext) -> tuple[str, ...]:
        nlp = (context.version or TARGETS[0]).startswith("paddlenlp")
        return _SINGLE if not nlp and context.config.get("model_type") in _WITH_SINGLE else ()

    def uncut(self, context: NamingContext, after: Statements, shapes: Shapes, held: Sequence[str]) -> tuple[str, ...]:
        return kept_whole(context.family, after, shapes, context.mesh.tp, held)

    def found_whole(
        self, context: NamingContext, own: Statements, cutting: PartitionContext, known: Shapes,
        tensors: Iterable[StoredTensor],
    ) -> tuple[str, ...]:  # fmt: skip
        return WholeTensors(context.family, own, cutting, context.config, known).patterns(tensors)

    def check_written(
        self, context: NamingContext, after: Statements, shapes: Shapes, ranks: Sequence[Sequence[RankTensor]]
    ) -> None:
        in_out = any("lm_head.weight" in op.patterns for op in after if isinstance(op, Transpose))
        whole, prefix, tied = shapes.get("lm_head.weight"), base_prefix(shapes), context.family.tied
        if context.family.name == "none" or whole is None or len(whole) != 2:
            return  # without a family nothing is turned round when it is read
        for shape in {whole, *(t.shape for held in ranks for t in held if t.name == "lm_head.weight")}:
            if len(shape) == 2 and head_in_out(shape, prefix, context.config, tied=tied) != in_out:
                raise ConflictError(
                    f"`lm_head.weight` {list(shape)} would be read transposed: it is kept the way round that the source"
                    " has it, and the models of --target have it the other way round",
                    hint="--native-names writes it as those models have it",
                )

    def vocab_axis(
        self, name: str, shape: tuple[int, ...], names: Iterable[str], config: Mapping[str, Any], *, tied: bool
    ) -> int:
        if not name.endswith("lm_head.weight"):
            return 0
        return int(head_in_out(shape, base_prefix(names), config, tied=tied))

    def prefix(self, names: Iterable[str]) -> str:
        return base_prefix(names) or "model"

    def version_of(self, config: Mapping[str, Any], versions: Sequence[str]) -> str:
        wrote = software(config)
        old = wrote.name == "paddleformers" and wrote.version < (1,)
        start = "paddlenlp" if wrote.name == "paddlenlp" else "paddleformers-0" if old else ""
        return next(v for v in versions if v.startswith(start))

    def published_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        out = target_config(config, "paddleformers-1.2", "")
        for name in ("paddlenlp_version", "paddleformers_version", "tensor_parallel_degree", "source"):
            out.pop(name, None)
        return out

    def own_config(self, config: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
        """The flags of fused projections as the names have them; fields that are not there stay away."""
        modules = _modules(names)
        return {k: not modules.isdisjoint(FUSED_FLAGS[k]) if k in FUSED_FLAGS else v for k, v in config.items()}

    def carries(self, file_name: str) -> bool:
        del file_name
        return True

    def coordinates(self, file_name: str) -> dict[str, int]:
        return {axis: int(n) for axis, n in _COORDINATE.findall(file_name)}


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


def _modules(names: Iterable[str]) -> set[str]:
    return {n.rsplit(".", 2)[-2] for n in names if n.count(".") > 1}


def _hf_prefix(family: Family) -> str:
    """The first word of the layers' names as Hugging Face has them."""
    return family.spec.layers.prefix.split(".")[0]


def _knows(family: Family, prefix: str, names: Iterable[str]) -> bool:
    """Whether some name that begins so is one of the model's own, in one of the forms that it is published in."""
    forms = [family.placer(()), *(family.placer(family.statements(n)) for n in family.spec.hf_namings)]
    return any(place(n) is not None for n in names if n.startswith(prefix + ".") for place in forms)


def _patterns(turned: Iterable[str], names: Iterable[str]) -> tuple[str, ...]:
    """Patterns of these names and of no other one of ``names``."""
    some = set(turned)
    others = {pattern_of(n) for n in names if n not in some}
    return tuple(sorted({n if pattern_of(n) in others else pattern_of(n) for n in some}))


def _turned(family: Family, shapes: Shapes, config: Mapping[str, Any]) -> set[str]:
    """Weights of linear layers, with their scale grids: Paddle has them the other way round than torch."""
    if family.spec.orientation == "in_out":
        return set()  # GPT-2's Conv1D is [in, out] in torch too
    out = {n for n, shape in shapes.items() if is_linear(n, len(shape), config)}
    return out | {n for n, shape in shapes.items() if len(shape) == 2 and weight_of(n, shapes) in out}


def _wholes(op: Fuse, shapes: Shapes) -> set[str]:
    """Names that a fusion makes of these."""
    first = pattern_regex(op.parts[0])
    return {expand(op.whole, m.groupdict()) for n in shapes if (m := first.match(n))}


def _unfused(own: Statements, rest: Iterable[Transform]) -> Iterator[Transform]:
    """The statements without fusions: the parts of what was fused and turned are turned."""
    for op in rest:
        if isinstance(op, Transpose):
            apart = {p for f in own if isinstance(f, Fuse) for p in _apart(f, op.patterns)}
            yield Transpose(tuple(sorted({*op.patterns, *apart})))
        else:
            yield op


def _apart(op: Fuse, patterns: tuple[str, ...]) -> set[str]:
    """Patterns of the parts of fused tensors that are among ``patterns``."""
    word = op.whole.split("{a}")[1].split("{b}")[0]
    return {p.replace(word, part.split("{a}")[1].split("{b}")[0]) for p in patterns if word in p for part in op.parts}


def head_in_out(shape: tuple[int, ...], prefix: str, config: Mapping[str, Any], *, tied: bool) -> bool:
    """Whether ``lm_head.weight`` is [hidden, vocab].

    The shape tells where it can. Else PaddleNLP's models have it so, unless the head is tied, and so have those of
    paddleformers whose names begin with their type; models that begin with ``model`` do not.
    """
    hidden, vocab = whole_number(config, "hidden_size"), whole_number(config, "vocab_size")
    if len(shape) == 2 and hidden != vocab and hidden is not None and vocab is not None:
        if shape[0] == hidden and shape[1] != hidden:
            return True
        if shape[1] == hidden and shape[0] != hidden:
            return False
    return not tied and (prefix not in ("model", "") or software(config).name == "paddlenlp")
