"""A recipe over all weights of a model: what is stored, summed in several ways, and the files that hold it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat
from math import prod
from typing import Any, NamedTuple

from ckpttool.core.catalog import RankTensor
from ckpttool.core.dtypes import DTYPES, nbytes
from ckpttool.core.files import DataFile
from ckpttool.errors import UsageError
from ckpttool.formats.base import StoredCheckpoint, WriteRequest
from ckpttool.formats.hf import FileNames
from ckpttool.formats.registry import writer
from ckpttool.layout.scales import config_block
from ckpttool.ops.size.coding import Coding, of_coded, of_scheme
from ckpttool.ops.size.model import CONFIG_ALONE, SizedModel, SizedTensor
from ckpttool.ops.size.names import CLASSES, class_of, module_of
from ckpttool.quant.config import config_scheme
from ckpttool.quant.keep import Keep, Treated, Weight, for_family, kept_words, treat
from ckpttool.quant.scheme import RECIPES, Form, Scheme, check_together, scheme

AS_IS, PLAIN = "as-is", "bf16"
CHOICES = (AS_IS, PLAIN, *RECIPES)
"""Values of --recipe."""
USUAL_PRESET = "hf-default"


@dataclass(frozen=True, slots=True)
class WantedRecipe:
    """The recipe as options give it; an empty field was not given."""

    recipe: str = ""
    block: tuple[int, int] | None = None
    scale_dtype: str = ""
    method: str = ""
    static: bool = False
    keep: Sequence[str] = ()
    include: Sequence[str] = ()
    preset: str = ""
    edge: str = ""

    def options(self) -> list[str]:
        """The options that belong to a recipe which quantizes."""
        given = {
            "--block": self.block,
            "--scale-dtype": self.scale_dtype,
            "--quant-method": self.method,
            "--static-act": self.static,
            "--keep": self.keep,
            "--include": self.include,
            "--keep-preset": self.preset,
            "--edge": self.edge,
        }
        return [option for option, value in given.items() if value]


@dataclass(slots=True)
class WeightGroup:
    """Weights whose names differ in their numbers only, with one shape and one fate."""

    weight: Weight
    """The first of them."""
    held: tuple[SizedTensor, ...]
    """The stored tensors of the first: codes, scales and so on, or the weight itself."""
    coding: Coding | None
    """None: in high precision."""
    why: str
    """Why they are in high precision; "" where they are not, and where nothing was to be quantized."""
    kind: str
    """One of ``CLASSES``."""
    names: list[str] = field(default_factory=list)
    """Names of all of them."""

    @property
    def suffixes(self) -> list[str]:
        """How the name of each stored tensor goes on after ``_stem`` of the weight's."""
        start = len(_stem(self.weight.name))
        return [h.name[start:] for h in self.held]

    def each(self) -> Iterator[tuple[int, str]]:
        """(number in ``held``, name) of every stored tensor."""
        suffixes = list(enumerate(self.suffixes))
        for name in self.names:
            stem = _stem(name)
            for i, suffix in suffixes:
                yield i, stem + suffix


def _stem(name: str) -> str:
    """The common beginning of the names of a weight, its codes and its scales."""
    return name.removesuffix("weight") if name.endswith(".weight") else name


@dataclass(slots=True)
class Subtotal:
    """Sums over some tensors of the output."""

    tensors: int = 0
    parameters: int = 0
    """Elements in high precision, each counted where its codes are; scales are not parameters."""
    elements: int = 0
    """Elements as files count them: bytes that hold two 4-bit codes are one element each."""
    nbytes: int = 0

    def add(self, row: OutputRow, times: int) -> None:
        self.tensors += times
        self.parameters += times * row.parameters
        self.elements += times * row.elements
        self.nbytes += times * row.nbytes


class OutputRow(NamedTuple):
    """One tensor of the output."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    kind: str
    """One of ``CLASSES``."""
    parameters: int
    elements: int
    nbytes: int


@dataclass(slots=True)
class Applied:
    """A model under a recipe."""

    recipe: str
    """One of ``CHOICES``."""
    scheme: Scheme | None
    """None for bf16, and for what is stored already."""
    preset: str
    """A preset of ``quant.keep``; "" where nothing is quantized."""
    groups: list[WeightGroup]
    loose: list[SizedTensor]
    """Scales that belong to no weight (of caches)."""
    total: Subtotal = field(default_factory=Subtotal)
    classes: dict[str, Subtotal] = field(default_factory=dict)
    dtypes: dict[str, Subtotal] = field(default_factory=dict)
    modules: dict[str, Subtotal] = field(default_factory=dict)
    kept: dict[str, int] = field(default_factory=dict)
    """Why tensors stay in high precision -> how many."""

    @property
    def quantized(self) -> bool:
        return any(g.coding is not None for g in self.groups)

    def rows(self) -> Iterator[OutputRow]:
        """Every stored tensor."""
        for g in self.groups:
            same = [_row(h, g) for h in g.held]
            for i, name in g.each():
                yield same[i]._replace(name=name)
        yield from map(_row, self.loose)

    def unpacked(self) -> int:
        """Stored elements with every 4-bit code counted, where files count the bytes that hold two."""
        return self.total.elements + sum(
            len(g.names) * (prod(g.weight.shape) // 2) for g in self.groups if g.coding and g.coding.code == "F4"
        )


def _row(h: SizedTensor, g: WeightGroup | None = None) -> OutputRow:
    """A stored tensor of a group; one of no group is a scale."""
    scale = g is None or h.role in ("scales", "factor", "input")
    kind, parameters = ("scale", 0) if g is None or scale else (g.kind, prod(g.weight.shape))
    elements = prod(h.shape)
    return OutputRow(h.name, h.dtype, h.shape, kind, parameters, elements, nbytes(h.dtype, elements, where=h.name))


def apply(model: SizedModel, wanted: WantedRecipe) -> Applied:
    """Work out what is stored.

    Raises UsageError for options that do nothing and when there is nothing to quantize, LayoutError as
    ``quant.forms`` does.
    """
    recipe = wanted.recipe
    if recipe and recipe not in CHOICES:
        raise UsageError(f"unknown recipe `{recipe}`", hint="recipes: " + ", ".join(CHOICES))
    if not recipe:
        recipe = "block" if wanted.options() else AS_IS  # options of a recipe ask for one
    if recipe in (AS_IS, PLAIN) and (options := wanted.options()):
        raise UsageError(f"{options[0]} has no effect with recipe {recipe}", hint="omit it, or choose another --recipe")
    as_it_is = recipe == AS_IS and model.format != CONFIG_ALONE
    if model.foreign is not None and not as_it_is:
        raise model.foreign
    out = _stored(model) if as_it_is else _treated(model, recipe, wanted)
    if recipe in RECIPES:
        _something(model, out.groups)
        check_together((g.weight.name, [Form(h.role, *h[:3]) for h in g.held]) for g in out.groups if g.coding)
    _sum(out)
    return out


def _treated(model: SizedModel, recipe: str, wanted: WantedRecipe) -> Applied:
    chosen: Scheme | None = None
    ignored: Collection[str] = ()
    preset = wanted.preset or USUAL_PRESET
    if recipe == AS_IS:
        chosen, ignored, habit = config_scheme(model.config)
        preset = habit or preset
    elif recipe != PLAIN:
        chosen = scheme(
            recipe,
            method=wanted.method,
            block=wanted.block,
            scale_dtype=wanted.scale_dtype,
            static=wanted.static,
            edge=wanted.edge,
        )
    keep = for_family(Keep(preset, wanted.keep, wanted.include, ignored), chosen, model.weights)
    # What a quantized source has in high precision stays so.
    coded = model.codes.weights
    keep = replace(keep, among=frozenset(coded) if coded else None)
    if wanted.keep or wanted.include:
        keep.check([w.name for w in model.weights])
    # A pattern may name one layer; the presets treat all numbers alike, so that one weight of a kind decides.
    each = wanted.keep or wanted.include or ignored or coded
    fates: Iterable[Treated | None] = treat(model.weights, chosen, keep) if each else repeat(None, len(model.weights))
    groups: dict[tuple[Any, ...], WeightGroup] = {}
    for w, (template, mtp, _), fate in zip(model.weights, model.kinds, fates, strict=True):
        key = (template, mtp, w.shape, w.dtype, w.in_out, fate and fate.why)
        group = groups.get(key)
        if group is None:
            _, forms, why = fate or treat([w], chosen, keep)[0]
            kind = "mtp" if mtp else class_of(template)
            if chosen is None or not forms:
                held: tuple[SizedTensor, ...] = (SizedTensor(w.name, w.dtype, w.shape),)
                group = WeightGroup(w, held, None, why if chosen else "", kind)
            else:
                held = tuple([SizedTensor(f.name, f.dtype, f.shape, f.role) for f in forms])
                group = WeightGroup(w, held, of_scheme(chosen, len(w.shape), forms, in_out=w.in_out), "", kind)
            groups[key] = group
        group.names.append(w.name)
    return Applied(recipe, chosen, keep.preset if chosen else "", list(groups.values()), [])


def _something(model: SizedModel, groups: Iterable[WeightGroup]) -> None:
    """Raises UsageError when a recipe leaves everything as it is."""
    kept: dict[str, int] = {}
    for g in groups:
        if g.coding is not None:
            return
        kept[g.why] = kept.get(g.why, 0) + len(g.names)
    raise UsageError(
        "nothing to quantize: every tensor stays as it is",
        where=str(model.path),
        hint=f"{kept_words(kept)}; --recipe {PLAIN} gives the size as it is",
    )


def _stored(model: SizedModel) -> Applied:
    """The recipe of a checkpoint as it is stored."""
    block = config_block(model.config)
    beside: dict[str, list[SizedTensor]] = {}
    for name in model.codes.beside:
        # `x.input_scale` belongs to `x.weight`
        beside.setdefault(name.rpartition(".")[0] + ".weight", []).append(model.stored[name])
    groups: dict[tuple[Any, ...], WeightGroup] = {}
    for w, (template, mtp, _) in zip(model.weights, model.kinds, strict=True):
        coded = model.codes.weights.get(w.name)
        names = [w.name] if coded is None else [n for n in (coded.codes, coded.scale, coded.factor) if n]
        held = tuple([model.stored[n] for n in names])
        if coded is not None:
            held += tuple(beside.pop(w.name, ()))
        start = len(_stem(w.name))
        key = (template, mtp, w.shape, *((h.name[start:], h.dtype, h.shape) for h in held))
        group = groups.get(key)
        if group is None:
            coding = None
            if coded is not None:
                lone = sum(nbytes(h.dtype, prod(h.shape), where=h.name) for h in held if h.role in ("factor", "input"))
                coding = of_coded(coded, model.stored[coded.scale].dtype if coded.scale else "", block, lone)
            group = groups[key] = WeightGroup(w, held, coding, "", "mtp" if mtp else class_of(template))
        group.names.append(w.name)
    return Applied(AS_IS, None, "", list(groups.values()), [h for found in beside.values() for h in found])


def _sum(out: Applied) -> None:
    classes: dict[str, Subtotal] = {}

    def add(row: OutputRow, module: str, times: int) -> None:
        for table, key in ((classes, row.kind), (out.dtypes, row.dtype), (out.modules, module)):
            table.setdefault(key, Subtotal()).add(row, times)
        out.total.add(row, times)

    for g in out.groups:
        if g.why:
            out.kept[g.why] = out.kept.get(g.why, 0) + len(g.names)
        for h in g.held:
            add(_row(h, g), module_of(g.weight.name), len(g.names))
    for h in out.loose:
        add(_row(h), module_of(h.name), 1)
    out.classes = {c: classes[c] for c in CLASSES if c in classes}
    out.dtypes = {d: out.dtypes[d] for d in sorted(out.dtypes, key=list(DTYPES).index, reverse=True)}


# -- files


@dataclass(frozen=True, slots=True)
class Disk:
    """The files that hold the tensors."""

    payload: int
    """Bytes of tensors: what an index calls total_size."""
    headers: int
    """Bytes of everything else in these files."""
    files: int
    index: int
    """Bytes of the index beside them, 0 if there is none."""
    real: bool
    """They are those of SRC; else those that would be written."""

    @property
    def size(self) -> int:
        return self.payload + self.headers


def in_order(model: SizedModel, applied: Applied) -> list[OutputRow]:
    """The stored tensors, in model order."""
    return model.family.in_model_order(applied.rows(), model.ops, lambda r: r.name)


def on_disk(model: SizedModel, applied: Applied, max_shard_size: int | None) -> Disk:
    """The files of SRC where they are asked for, else those that the writer of the Hugging Face format would write.

    It fills files in model order, as it does for reshard and quantize.
    """
    source = model.checkpoint
    if source is not None and applied.recipe == AS_IS and not (max_shard_size or model.without_mtp):
        own = _own_files(source)
        if own is not None:
            return own
    stored = [(name, g.held[i]) for g in applied.groups for i, name in g.each()]
    stored += [(h.name, h) for h in applied.loose]
    stored = model.family.in_model_order(stored, model.ops, lambda t: t[0])
    tensors = [RankTensor(name, h.dtype, h.shape, name, h.shape, ()) for name, h in stored]
    request = WriteRequest(ranks=[tensors], max_shard_size=max_shard_size)
    file_layout = writer("hf").write(request)
    # Weights first, an index last.
    sizes = [f.size for f in file_layout.files if f.name.endswith(".safetensors")]
    payload = applied.total.nbytes
    return Disk(
        payload, sum(sizes) - payload, len(sizes), sum(f.size for f in file_layout.files) - sum(sizes), real=False
    )


def _own_files(source: StoredCheckpoint) -> Disk | None:
    """The files of a checkpoint of nothing but model weights; None where they hold other components too."""
    if any(t.component != "model" or t.file < 0 for t in source.tensors) or any(f.encoding for f in source.files):
        return None
    payload = sum(t.nbytes for t in source.tensors)
    names = source.native if isinstance(source.native, FileNames) else FileNames()
    index = source.root / (names.found or names.index)
    size = DataFile.at(index).size if len(source.files) > 1 and index.is_file() else 0
    return Disk(payload, sum(f.size for f in source.files) - payload, len(source.files), size, real=True)
