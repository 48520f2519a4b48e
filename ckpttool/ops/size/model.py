"""SRC: a checkpoint (headers only) or a config.json alone, as weights in high precision and what is stored of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ckpttool.checkpoint import Checkpoint, OpenOptions, assemble, open_checkpoint, refuse_empty
from ckpttool.core.dtypes import lookup
from ckpttool.core.files import Place
from ckpttool.errors import CorruptError, IncompleteError, UnsupportedError, UsageError
from ckpttool.formats.base import StoredCheckpoint
from ckpttool.formats.config import quantization
from ckpttool.formats.parts import parts_of
from ckpttool.formats.registry import detect, is_multi_part, read_source
from ckpttool.layout.family import Family, pick_family
from ckpttool.layout.names import split_numbers
from ckpttool.layout.packed import PackedTensor, Packing, find_packing
from ckpttool.layout.shapes import declared_tensors
from ckpttool.layout.statements import Transform, inverse
from ckpttool.planning.relate import apply_transforms, identity
from ckpttool.quant.coded import Codes, find_codes
from ckpttool.quant.keep import Weight, is_conv1d
from ckpttool.storage.json_file import TooLargeError, load_json
from ckpttool.storage.listing import list_source
from ckpttool.targeting.recode import high_precision

CONFIG = "config.json"
CONFIG_ALONE = "config"
"""``Model.format`` of a config.json without weights."""


class SizedTensor(NamedTuple):
    """One tensor of SRC, by its header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    role: str = ""
    """Role in a quantized weight: codes, scales, factor, input; "" is a tensor in high precision."""


class WeightKind(NamedTuple):
    """The kind of a weight, by its name."""

    template: str
    """The name without its numbers."""
    mtp: bool
    """It belongs to a multi-token-prediction layer."""
    in_out: bool
    """Stored [..., in, out]."""


@dataclass(slots=True)
class SizedModel:
    """The model in SRC, by its config and headers."""

    path: Place
    format: str
    config: Mapping[str, Any]
    family: Family
    ops: tuple[Transform, ...]
    """Statements that lead from Hugging Face names to those of ``weights``."""
    weights: list[Weight]
    """In high precision. Of a quantized checkpoint they are those that it was made of."""
    kinds: list[WeightKind]
    """The kind of each weight."""
    stored: dict[str, SizedTensor] = field(default_factory=dict)
    """The tensors that SRC stores, by name; empty for a config alone."""
    codes: Codes = field(default_factory=Codes)
    checkpoint: StoredCheckpoint | None = None
    without_mtp: bool = False
    """The multi-token-prediction layers were left out."""
    notes: list[str] = field(default_factory=list)
    packing: Packing | None = None
    """Its weights are packed integers; ``weights`` then has each of their tensors, with the shape of the weight."""
    packed: Mapping[str, PackedTensor] = field(default_factory=dict)
    """What each tensor of a packed weight is to it."""
    foreign: UnsupportedError | None = None
    """Why it is not known which weights SRC was made of: its quantization is unknown."""


def load(path: Place, options: OpenOptions, config: Place | None, *, mtp: bool) -> SizedModel:
    """Read headers or the config.

    Raises UsageError for options that do nothing, LayoutError for a family that does not say which tensors it has,
    and what ``open_checkpoint`` and ``find_codes`` raise; codes that are none of ours do not end it.
    """
    alone = _config_alone(path, options)
    if alone is not None:
        model = _from_config(path, alone, options, config, mtp=mtp)
    else:
        model = _from_checkpoint(_open(path, options, config), mtp=mtp)
    if not mtp and not model.without_mtp:
        raise UsageError("--no-mtp: the model has no multi-token-prediction layers", where=str(path))
    return model


def _config_alone(path: Place, options: OpenOptions) -> dict[str, Any] | None:
    """The config, when SRC is a config.json or a directory with nothing else that can be read; else None."""
    if path.is_file():
        if path.suffix != ".json" or path.name.endswith(".index.json"):
            return None
        config = _read_json(path)
        return None if "weight_map" in config else config
    listing = list_source(path)
    if CONFIG not in listing.names or options.format or options.mesh.rank_pattern:
        return None
    return _read_json(path / CONFIG) if detect(listing) is None else None


def _read_json(path: Place) -> dict[str, Any]:
    try:
        data = load_json(path)
    except OSError as e:
        raise UsageError(f"the config cannot be read: {e.strerror}", where=str(path)) from None
    except ValueError as e:
        what = "is too large" if isinstance(e, TooLargeError) else "is not valid JSON"
        raise CorruptError(f"the config {what}: {e}", where=str(path)) from None
    if not isinstance(data, dict):
        raise CorruptError("the config is not a JSON object", where=str(path))
    return data


def _from_config(
    path: Place, config: Mapping[str, Any], options: OpenOptions, other: Place | None, *, mtp: bool
) -> SizedModel:
    if other is not None:
        raise UsageError("--config has no effect: SRC is a config", hint="give one of the two")
    said = [*options.mesh.from_flags()]
    said += [o for o, value in (("rank-pattern", options.mesh.rank_pattern), ("from", options.format)) if value]
    if said:
        raise UsageError(f"--{said[0]} has no effect: SRC is a config, without ranks", where=str(path))
    family = pick_family(options.family, "", config)
    if family.name == "none":
        kind = config.get("model_type") or config.get("architectures")
        raise UnsupportedError(
            f"no family is known for this model: {kind}" if kind else "this is not a config of a model",
            where=str(path),
            hint="choose one like it with --family NAME, or describe its tensors: --family FILE.yaml",
        )
    declared = declared_tensors(family, config, mtp=mtp)
    without = not mtp and len(declared) < len(declared_tensors(family, config))
    kind_of = _kinds(family, ())
    kinds = [kind_of(name) for name, _, _ in declared]
    weights = [
        Weight(name, dtype, shape, len(shape) > 1 and kind.in_out)
        for (name, dtype, shape), kind in zip(declared, kinds, strict=True)
    ]
    return SizedModel(path, CONFIG_ALONE, config, family, (), weights, kinds, without_mtp=without)


def _kinds(family: Family, ops: tuple[Transform, ...]) -> Callable[[str], WeightKind]:
    """A function that says the kind of a weight, which asks the family once for each template."""
    place = family.placer(ops)
    layers = family.size("layers")
    known: dict[str, tuple[int, bool]] = {}

    def kind(name: str) -> WeightKind:
        template, numbers = split_numbers(name)
        got = known.get(template)
        if got is None:
            found = place(name)
            # The layer comes first in a name. Those that follow the model's last predict further tokens.
            counts = found is not None and found.layer is not None and layers is not None
            at = numbers.index(str(found.layer)) if found is not None and counts else -1
            got = known[template] = (at, found is not None and found.rule.in_out)
        at, in_out = got
        return WeightKind(template, at >= 0 and int(numbers[at]) >= (layers or 0), in_out)

    return kind


def _check_file(path: Place, options: OpenOptions) -> None:
    """Raises an error that names SRC, a file, when it or what it speaks of cannot be read."""
    listing = list_source(path)
    if path.name.endswith(".json"):
        found = listing.json(path.name).get("weight_map")
        names = sorted({str(f) for f in found.values()}) if isinstance(found, dict) else []
        missing = [n for n in names if not listing.path(n).is_file()]
        if missing:
            raise IncompleteError(
                f"{len(missing)} of {len(names)} files that the index names are missing: `{missing[0]}`",
                where=str(path),
                hint="copy the missing files beside it",
            )
    if not options.format and not options.mesh.rank_pattern and detect(listing) is None:
        raise UnsupportedError(
            "this is neither a checkpoint nor the config.json of a model",
            where=str(path),
            hint="give a directory, a .safetensors file, an index, or a config.json",
        )


def _part(path: Place, options: OpenOptions) -> tuple[Place, OpenOptions, str]:
    """The only model in a directory of several parts, and a note. Raises UsageError when it has several."""
    parts = parts_of(read_source(path, options.format, options.mesh))
    found = [p for p in parts.all if p.is_model] if parts is not None else []
    if parts is None or len(found) != 1:
        raise UsageError(
            f"SRC has several models, and sizes are for one: {', '.join(p.name for p in found)}",
            where=str(path),
            hint=f"give one part as SRC: {path / found[0].name}" if found else None,
        )
    others = ", ".join(p.name for p in parts.all if p not in found)
    return found[0].place, parts.options(found[0]), f"the size of part {found[0].name} alone, without {others}"


def _open(path: Place, options: OpenOptions, config: Place | None) -> Checkpoint:
    if path.is_file():
        _check_file(path, options)
    elif path.is_dir() and is_multi_part(path, options):
        path, options, note = _part(path, options)
        source = _open(path, options, config)
        source.notes.append(note)
        return source
    if config is None:
        return open_checkpoint(path, options)
    stored = read_source(path, options.format, options.mesh)
    if stored.config:
        raise UsageError("--config has no effect: SRC has a config of its own", where=str(path))
    stored.config = _read_json(config)
    return assemble(stored, path, options)


def _from_checkpoint(source: Checkpoint, *, mtp: bool) -> SizedModel:
    family, ops, notes = source.family, source.ops, list(source.notes)
    views = identity(source.catalog)
    if not source.capabilities.keeps_form and ops:
        # Scales are known by the names that Hugging Face's files have; a Hugging Face checkpoint keeps its form.
        views = apply_transforms(views, inverse(ops), family, ops)
        notes += views.notes
        ops = ()
    refuse_empty(source)
    others = [c for c in source.components if c != "model"]
    if others:
        notes.append(f"{', '.join(others)}: not counted, only the model's weights are")
    if not views.table:
        raise UsageError("SRC holds no model weights", where=str(source.path))
    kind_of = _kinds(family, ops)
    table = {}
    left = False
    for name, view in views.table.items():
        if not mtp and kind_of(name).mtp:
            left = True
            continue
        lookup(view.dtype, where=name)
        table[name] = (view.dtype, view.shape)
    foreign = None
    try:
        codes = find_codes(table, source.config, where=str(source.path))
    except UnsupportedError as e:
        # What is stored has its size, whatever it means.
        codes, foreign = Codes(), e
        notes.append(f"{e.what}; every tensor is counted as it is stored")
    packing = find_packing(quantization(source.config), {n: dtype for n, (dtype, _) in table.items()})
    packed = packing.parts(table) if packing is not None else {}
    dtype = high_precision(source.config)
    parts, beside = codes.parts, set(codes.beside)
    weights: dict[str, Weight] = {}
    kinds: dict[str, WeightKind] = {}
    for name, (stored_as, shape) in table.items():
        weight = parts.get(name, name)
        if weight in weights or name in beside:
            continue
        coded = codes.weights.get(weight)
        kinds[weight] = kind_of(weight)
        in_out = len(shape) > 1 and (kinds[weight].in_out or is_conv1d(source.config, weight))
        if packing is not None and (part := packed.get(name)) is not None:
            weights[weight] = Weight(name, stored_as, packing.base(part, name, shape, table[part.codes][1]))
        elif packing is not None and packing.pairs and name + packing.pairs in table:
            weights[weight] = Weight(name, stored_as, (2 * shape[0], *shape[1:]))
        elif coded is not None:
            weights[weight] = Weight(weight, dtype, coded.shape, in_out or coded.turned)
        else:
            weights[weight] = Weight(name, stored_as, shape, in_out)
    roles = dict.fromkeys(beside, "input")
    for c in codes.weights.values():
        roles |= {c.codes: "codes", c.scale: "scales", c.factor: "factor"}
    roles |= {n: "scales" for n, part in packed.items() if n != part.codes}
    if packing is not None and packing.beside:
        roles |= {n: "scales" for n in table if n.endswith(packing.beside)}
    stored = {n: SizedTensor(n, *entry, roles.get(n, "")) for n, entry in table.items()}
    return SizedModel(
        source.path,
        source.format,
        source.config,
        family,
        ops,
        list(weights.values()),
        list(kinds.values()),
        stored,
        codes,
        source.stored,
        left,
        notes,
        packing,
        packed,
        foreign,
    )
