"""Weights in another precision on their way to the output: dequantized, quantized, or one after the other.

    checkpoint -> which tensors are codes and scales -> what becomes of each weight -> a checkpoint whose changed
    tensors are in no file yet, and the steps that make them

``quantize``, ``reshard --dequant`` and ``--requant`` and ``merge --dequant`` all plan it here; the result is planned
further as any other checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from ckpttool.checkpoint import Checkpoint, refuse_empty
from ckpttool.core.catalog import Catalog, Key, LogicalTensor, StoredTensor, whole_tensor
from ckpttool.core.dtypes import CASTABLE, DTYPES, find
from ckpttool.core.geometry import contiguous_strides
from ckpttool.core.patterns import matching
from ckpttool.core.plan import Compute, Operand, Quantize, Result, Scaled
from ckpttool.core.words import some
from ckpttool.errors import ConflictError, UnsupportedError, UsageError
from ckpttool.formats.config import QUANTIZATION, config_places
from ckpttool.formats.registry import WRITERS
from ckpttool.layout.names import pattern_regex
from ckpttool.layout.scales import config_block
from ckpttool.layout.statements import inverse
from ckpttool.planning.planner import Computed, Operands
from ckpttool.planning.relate import DerivedTensor, apply_transforms, identity, permute
from ckpttool.quant.coded import Coded, Codes, find_codes
from ckpttool.quant.config import (
    DTYPE_FIELDS,
    HF_QUANT,
    config_scheme,
    hf_quant_config,
    quantization_config,
    section,
    with_fields,
    without,
)
from ckpttool.quant.keep import Keep, Treated, Weight, for_family, is_conv1d, kept_words, treat
from ckpttool.quant.scheme import METHODS, Form, Scheme, check_together, scheme
from ckpttool.targeting.components import run_names
from ckpttool.targeting.lacking import lacking
from ckpttool.targeting.prediction import settled
from ckpttool.targeting.select import removal_note

HIGH = ("BF16", "F16", "F32")
"""What quantized weights can be written as."""

_BY_CONFIG = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "half": "F16", "float": "F32"}


@dataclass(frozen=True, slots=True)
class Recoding:
    """What becomes of the weights."""

    scheme: Scheme | None = None
    """How they are quantized; None: none of them is."""
    dtype: str = ""
    """Dtype of weights that come out of codes; "" is what the config says, else BF16."""
    keep: Keep = field(default_factory=Keep)
    like_source: bool = False
    """Names and scales as the source has them, where its software has the recipe."""


@dataclass(slots=True)
class Recoded:
    """A checkpoint with its weights in another precision."""

    checkpoint: Checkpoint
    source: Checkpoint
    """The source before it is recoded."""
    computed: Computed
    scheme: Scheme | None
    dtype: str
    """Dtype of weights that came out of codes."""
    written: list[tuple[str, bytes]]
    """Small files that say how weights are quantized, other than config.json."""
    quantized: int = 0
    dequantized: int = 0
    same: int = 0
    """Quantized weights that have the wanted form already."""
    kept: dict[str, int] = field(default_factory=dict)
    """Why tensors stay in high precision -> how many."""
    removed: tuple[int, int] = (0, 0)
    """(tensors, bytes) of the source that are left out."""
    remove: Sequence[str] = ()
    keep: Sequence[str] = ()
    """The patterns that say which."""


def high(text: str, option: str) -> str:
    """A dtype for weights in high precision, as people write it. Raises UsageError for others."""
    found = find(text)
    if found is None and text in WRITERS:
        raise UsageError(
            f"{option} takes a dtype, and `{text}` is a format",
            hint=f"ckpttool reshard SRC DST --requant RECIPE --to {text}",
        )
    if found is None or found.name not in HIGH:
        raise UsageError(f"{option} {text}: dequantized weights are bf16, f16 or f32", hint="--recipe quantizes")
    return found.name


def high_precision(config: Mapping[str, Any]) -> str:
    """The dtype that the model had before it was quantized: the config's, else BF16."""
    for place in config_places(config):
        for name in DTYPE_FIELDS:
            if isinstance(value := place.get(name), str) and value:
                found = _BY_CONFIG.get(value.removeprefix("torch."), "")
                return found if found in HIGH else "BF16"
    return "BF16"


def scaled(coded: Coded, views: Mapping[str, DerivedTensor], operands: Operands, label: str) -> Operand:
    """What gives a quantized weight's values, in the shape in which its codes lie ([..., out, in] where ``turned``)."""
    codes = operands.stored(views[coded.codes], f"`{coded.codes}` of {label}")
    if coded.turned:
        *lead, k, n = coded.shape
        codes = codes._replace(shape=(*lead, n, k // 2))
    if not coded.scale:
        return codes._replace(dtype=coded.code)
    scale = operands.stored(views[coded.scale], f"`{coded.scale}` of {label}")._replace(dtype=coded.scale_dtype)
    factor = operands.stored(views[coded.factor], f"`{coded.factor}` of {label}") if coded.factor else None
    code = "" if coded.code == codes.dtype else coded.code
    return Scaled(codes, scale, coded.block, code, factor, coded.divides)


def is_quantized(source: Checkpoint) -> bool:
    """Whether any of its weights is codes and scales. Raises what finding them raises."""
    table = {v.name: (v.dtype, v.shape) for v in identity(source.catalog)}
    return bool(find_codes(table, source.config, where=str(source.path)).weights)


def recode(source: Checkpoint, recoding: Recoding, *, remove: Sequence[str] = (), keep: Sequence[str] = ()) -> Recoded:
    """Plan the weights of ``source`` in another precision.

    ``remove`` and ``keep`` are patterns for what is left out, of names in high precision: codes and scales go with
    their weight. Raises IncompleteError, ConflictError or UnsupportedError for codes without their scales, LayoutError
    for weights that the recipe cannot hold, UsageError when there is nothing to do.
    """
    refuse_empty(source)
    return _Recoder(source, recoding).run(remove, keep)


def _said(config: Mapping[str, Any]) -> Scheme | None:
    """The recipe of the source as its config has it; None also where it is an unknown one: its tensors decide."""
    try:
        found = config_scheme(config).scheme
    except UnsupportedError:
        return None
    return found


def _bare(scheme: Scheme) -> Scheme:
    """What a config can say of a recipe: in which dtype the scales are is seen from their tensors."""
    return replace(scheme, static=False, edge="", scale="", stored_scale="")


def _like(wanted: Scheme | None, config: Mapping[str, Any]) -> Scheme | None:
    """The recipe in the words of the software that quantized the source, if that has it."""
    before = _said(config)
    blocks = section(config).get("quant_method") == "mxfp4"  # gpt-oss's, for which there is no other recipe
    if wanted is None or before is None or blocks or before.method not in METHODS[wanted.recipe]:
        return wanted
    same = before.recipe == wanted.recipe
    return scheme(
        wanted.recipe,
        method=before.method,
        block=wanted.block if wanted.recipe == "block" else None,
        scale_dtype=before.scale if same else "",
        code=before.code if same else "",
        powers=same and before.powers,
    )


class _Recoder:
    def __init__(self, source: Checkpoint, recoding: Recoding) -> None:
        self.source = source
        self.recoding = recoding
        self.config = source.config
        self.scheme = _like(recoding.scheme, self.config) if recoding.like_source else recoding.scheme
        before = _said(self.config)
        self.before = before and _bare(before)
        self.dtype = recoding.dtype or high_precision(self.config)
        # Scales get the names that Hugging Face's files have, so weights must have those too. What is only
        # dequantized may keep its names, and the other components then keep theirs.
        self.renamed = self.scheme is not None and not source.capabilities.keeps_form and bool(source.ops)
        views = identity(source.catalog)
        if self.renamed:
            views = apply_transforms(views, inverse(source.ops), source.family, source.ops)
        self.views = views
        self.operands = Operands()
        self.operands.tied = views.tied
        self.steps: list[Compute | Quantize] = []
        self.results: list[tuple[int, int]] = []
        self.tensors: dict[Key, LogicalTensor] = {}
        self.codes: dict[str, Coded] = {}
        self.groups: dict[str, tuple[str, ...]] = {}
        """Weights that engines hold as one, by the name of each."""

    def run(self, remove: Sequence[str], keep_keys: Sequence[str]) -> Recoded:
        table = {n: (v.dtype, v.shape) for n, v in self.views.table.items()}
        codes = find_codes(table, self.config, where=str(self.source.path))
        weights = self._weights(codes)
        if self.scheme is None and not codes.weights:
            raise UsageError(
                "there is nothing to dequantize: no weight of the source is quantized",
                where=str(self.source.path),
                hint="ckpttool reshard SRC DST --dtype DTYPE casts weights that are not quantized",
            )
        names = {w.name for w in weights}
        self.recoding.keep.check(names)
        wanted = matching(keep_keys, names, option="--keep-keys") if keep_keys else set(names)
        wanted -= matching(remove, names, option="--remove-keys")
        if not wanted:
            raise UsageError("no tensor is left: the patterns remove all of them")
        gone = [w.name for w in weights if w.name not in wanted]
        weights = [w for w in weights if w.name in wanted]
        computed = Computed(self.steps, self.operands, None, self.results)
        out = Recoded(self.source, self.source, computed, self.scheme, self.dtype, [], remove=remove, keep=keep_keys)
        keep = for_family(self.recoding.keep, self.scheme, weights)
        keep = replace(keep, among=frozenset(codes.weights) if codes.weights else None)
        ends = {t.weight.name: t for t in treat(weights, self.scheme, keep)}
        check_together((name, t.forms) for name, t in ends.items())
        self.codes = codes.weights
        if self.scheme is not None and self.scheme.recipe == "nvfp4":
            self.groups = self._fused([n for n, t in ends.items() if t.forms])
        parts = codes.parts
        beside = set(codes.beside)
        for name, view in self.views.table.items():
            if name in beside:
                continue
            weight = parts.get(name, name)
            if weight not in wanted:
                out.removed = (out.removed[0] + 1, out.removed[1] + view.nbytes)
            treated = ends.pop(weight, None)
            if treated is None:
                continue  # left out, or the codes or scales of a weight that was met before
            self._one(treated, codes.weights.get(weight), view, out)
        if self.scheme is not None and not out.quantized and not out.same:
            raise UsageError(
                "nothing to quantize: every tensor stays as it is",
                where=str(self.source.path),
                hint=kept_words(out.kept),
            )
        out.checkpoint = self._checkpoint(out, codes, gone, [w.name for w in weights])
        return out

    def _weights(self, codes: Codes) -> list[Weight]:
        """Every tensor in high precision, in the order of the checkpoint."""
        family, ops = self.source.family, () if self.renamed else self.source.ops
        place = family.placer(ops)
        parts, beside = codes.parts, set(codes.beside)
        out: list[Weight] = []
        seen = set()
        for name, view in self.views.table.items():
            weight = parts.get(name, name)
            if weight in seen or name in beside:
                continue
            seen.add(weight)
            found = place(weight) if len(view.shape) > 1 and self.scheme is not None else None
            in_out = found.rule.in_out if found is not None else is_conv1d(self.config, weight)
            coded = codes.weights.get(weight)
            if coded is not None:
                out.append(Weight(weight, self.dtype, coded.shape, in_out or coded.turned))
            else:
                out.append(Weight(name, view.dtype, view.shape, in_out))
        return out

    def _fused(self, names: Sequence[str]) -> dict[str, tuple[str, ...]]:
        """The weights that the family's fusions join, by the name of each of them."""
        found: dict[tuple[str, ...], list[str]] = {}
        for fusion, spec in self.source.family.spec.fusions.items():
            parts = [pattern_regex(p) for p in spec.parts]
            for name in names:
                if m := next((m for p in parts if (m := p.match(name))), None):
                    found.setdefault((fusion, *m.groupdict().values()), []).append(name)
        return {n: tuple(group) for group in found.values() for n in group if len(group) > 1}

    def _whole(self, name: str) -> Operand:
        """A weight as it is before it is quantized."""
        coded = self.codes.get(name)
        if coded is not None:
            return scaled(coded, self.views.table, self.operands, str(self.source.path))
        return self.operands.stored(self.views.table[name], f"`{name}` of {self.source.path}")

    def _one(self, treated: Treated, coded: Coded | None, view: DerivedTensor, out: Recoded) -> None:
        name = treated.weight.name
        if not treated.forms:
            if self.scheme is not None:
                out.kept[treated.why] = out.kept.get(treated.why, 0) + 1
            if coded is None:
                self._copy(name, view)
            else:
                out.dequantized += 1
                self._dequantize(coded)
            return
        if coded is not None and self._has_form(coded, treated.forms):
            out.same += 1
            for n in (coded.codes, coded.scale, coded.factor):
                if n:
                    self._copy(n, self.views.table[n])
            return
        out.quantized += 1
        self._quantize(treated, coded, view)

    def _has_form(self, coded: Coded, forms: Sequence[Form]) -> bool:
        """Whether the weight is stored as the recipe would store it."""
        wanted = {(f.name, f.dtype, f.shape) for f in forms if f.role != "input"}
        names = [n for n in (coded.codes, coded.scale, coded.factor) if n]
        views = [self.views.table[n] for n in names]
        return wanted == {(v.name, v.dtype, v.shape) for v in views} and (
            self.scheme is not None and self.before == _bare(self.scheme)
        )

    def _copy(self, name: str, view: DerivedTensor) -> None:
        if view.same is not None:
            self._add(name, replace(view.same, key=Key(name)))
            return
        # A part of a fused tensor under Hugging Face's names: its bytes are gathered.
        step = self._compute(name, view.dtype, view.shape, self.operands.stored(view, f"`{name}`"), finite=False)
        self._put(name, view.dtype, view.shape, step, 0)

    def _add(self, name: str, tensor: LogicalTensor) -> None:
        if tensor.key in self.tensors:
            raise ConflictError(
                f"two tensors would both be named `{name}`: one that the source has, and a scale or code of the recipe",
                where=str(self.source.path),
                hint=f"leave the one that is there out: --remove-keys '{name}'",
            )
        self.tensors[tensor.key] = tensor

    def _compute(self, name: str, dtype: str, shape: tuple[int, ...], operand: Operand, *, finite: bool = True) -> int:
        parameters = ((("scale", 1.0),),)
        self.steps.append(Compute(name, shape, dtype, "passthrough", (operand,), None, parameters, (), None, finite))
        return len(self.steps) - 1

    def _put(
        self, name: str, dtype: str, shape: tuple[int, ...], step: int, result: int, *, turned: bool = False
    ) -> None:
        key = Key(name)
        if not prod(shape):
            self._add(name, LogicalTensor(key, dtype, shape, ()))
            return
        strides = None
        if turned:
            *lead, k, n = shape
            strides = contiguous_strides((*lead, n, k))
            strides = (*strides[:-2], strides[-1], strides[-2])
        file = len(self.source.catalog.files) + len(self.results)
        self.results.append((step, result))
        self._add(name, whole_tensor(StoredTensor(name, dtype, shape, file, 0, strides=strides), key))

    def _dequantize(self, coded: Coded) -> None:
        shape = coded.shape
        if coded.turned:
            shape = (*shape[:-2], shape[-1], shape[-2])
        operand = scaled(coded, self.views.table, self.operands, str(self.source.path))
        step = self._compute(coded.name, self.dtype, shape, operand)
        self._put(coded.name, self.dtype, coded.shape, step, 0, turned=coded.turned)

    def _quantize(self, treated: Treated, coded: Coded | None, view: DerivedTensor) -> None:
        """Plan codes and scales.

        They are worked out the way round in which the recipe stores them; of a weight that is coded the other way
        round, in that way, and put into place transposed.
        """
        weight, scheme = treated.weight, self.scheme
        if scheme is None:
            return
        forms = [f for f in treated.forms if f.role != "input"]
        rounding, shape = scheme.rounding, weight.shape
        swapped = (*shape[:-2], shape[-1], shape[-2])
        stored_turned = scheme.recipe == "mxfp4" and weight.in_out
        back = False
        if coded is not None:
            operand = scaled(coded, self.views.table, self.operands, str(self.source.path))
            if coded.turned:
                shape = swapped
            if coded.turned != stored_turned:
                if stored_turned:
                    raise UsageError(
                        f"`{weight.name}` is quantized [in, out], and {scheme.recipe} codes lie [out, in]",
                        hint="dequantize first: --to bf16",
                    )
                back = True
                rounding = rounding._replace(block=(rounding.block[1], rounding.block[0]))
        elif stored_turned:
            order = (*range(len(shape) - 2), len(shape) - 1, len(shape) - 2)
            operand = self.operands.stored(permute(view.name, view, order), f"`{view.name}` of {self.source.path}")
            shape = swapped
        else:
            operand = self.operands.stored(view, f"`{view.name}` of {self.source.path}")
        results = []
        for f in forms:
            # The steps see results as they are worked out.
            there = (*f.shape[:-2], f.shape[-1], f.shape[-2]) if back and len(f.shape) > 1 else f.shape
            results.append(Result(f.role, f.dtype, there))
        beside = tuple([self._whole(n) for n in self.groups.get(weight.name, ()) if n != weight.name])
        self.steps.append(Quantize(weight.name, shape, operand, rounding, tuple(results), beside))
        for i, f in enumerate(forms):
            self._put(f.name, f.dtype, f.shape, len(self.steps) - 1, i, turned=back and len(f.shape) > 1)

    def _checkpoint(self, out: Recoded, codes: Codes, gone: Sequence[str], left: Sequence[str]) -> Checkpoint:
        """What follows reads: ``left`` of the weights, under the names that they have in high precision."""
        source, stored = self.source, self.source.stored
        notes = list(source.notes)
        if self.scheme is not None and not self.config:
            notes.append("there is no config.json, so nothing tells engines how the weights are quantized")
        others = {k: t for k, t in source.catalog.tensors.items() if k.component != "model"}
        if self.renamed:
            if lost := [*dict.fromkeys(k.component for k in others), *run_names(source)]:
                notes.append(f"{some(lost, 12)} left out: quantized weights are for serving")
            others = {}
        if self.scheme is not None and (self.scheme.method, self.scheme.recipe) == ("modelopt", "tensor"):
            notes.append("ModelOpt's FP8 needs a scale for each layer's activations too, which takes data to find")
        config = self._config(out)
        if gone:
            notes += [removal_note(out.removed), *lacking(source, gone, left)]
            config, changes = settled(config, [*left, *gone], left, source.family.prediction_field)
            notes += changes
        if codes.beside:
            notes.append(
                f"{len(codes.beside)} scales of activations or caches are left out (`{codes.beside[0]}`):"
                " they belong to the recipe that the source had"
            )
        catalog = Catalog(source.catalog.files, {**self.tensors, **others}, source.catalog.aliases)
        companions = tuple([n for n in stored.companions if n != HF_QUANT])
        stored = replace(
            stored,
            config=config,
            companions=companions,
            recorded=None,
            native_config=stored.native_config or (source.config if config != source.config else {}),
            notes=[],
        )
        if self.renamed:
            stored.dialect, stored.fused, stored.training = "hf", "", None
        # What follows sees the scales of the blocks that were made, not of those that the source had.
        family = replace(source.family, block=config_block(config))
        return Checkpoint(source.path, stored, family, catalog, notes, () if self.renamed else source.ops)

    def _config(self, out: Recoded) -> dict[str, Any]:
        config = without(self.config)
        if not self.config:
            return {}
        if out.dequantized and self.scheme is None:
            config = with_fields(config, dict.fromkeys(DTYPE_FIELDS, DTYPES[self.dtype].numpy))
        if self.scheme is not None:
            kept = self._kept()
            config[QUANTIZATION[0]] = quantization_config(
                self.scheme, kept, blocks=any(k.name.endswith("_blocks") for k in self.tensors)
            )
            own = hf_quant_config(self.scheme, kept)
            if own is not None:
                out.written.append((HF_QUANT, (json.dumps(own, indent=2) + "\n").encode()))
        return config

    def _kept(self) -> list[str]:
        """Modules with a matrix that stays as it was.

        Where all experts of a layer do, their common name is one of them: in transformers they are one module.
        """
        kept: list[str] = []
        experts: dict[str, bool] = {}
        for key, t in self.tensors.items():
            at, inside, _ = key.name.partition(".experts.")
            if inside:
                experts[at] = experts.get(at, True) and t.dtype in CASTABLE
            if len(t.shape) == 2 and key.name.endswith(".weight") and t.dtype in CASTABLE:
                kept.append(key.name.removesuffix(".weight"))
        return kept + [f"{at}.experts" for at, high in experts.items() if high]
