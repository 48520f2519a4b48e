"""LoRA files of diffusers and of kohya's sd-scripts: ``pytorch_lora_weights.safetensors``, or a file of any name.

One file has the factors for several parts of a pipeline. Source: diffusers 0.42 (loaders/lora_pipeline.py,
loaders/lora_conversion_utils.py, utils/state_dict_utils.py, utils/peft_utils.py). The names of factors are one of

    unet.PATH.lora_A.weight, unet.PATH.lora_B.weight             of PEFT, ``text_encoder.``, ``transformer.`` likewise
    unet.PATH.lora.down.weight, unet.PATH.lora.up.weight         of diffusers; of a text encoder ``.lora_linear_layer.``
    unet.PATH.processor.to_q_lora.down.weight                    of older ones
    lora_unet_PATH.lora_down.weight, lora_te1_PATH.lora_up.weight  of sd-scripts, where PATH has ``_`` for ``.``

W becomes W + alpha / rank * up @ down. ``PATH.alpha`` has alpha, or ``lora_adapter_metadata`` in the header; without
both it is the rank. Names with ``_`` for ``.`` are looked up among those of the base, so that none is guessed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import numpy as np

from ckpttool.adapters import peft
from ckpttool.adapters.base import ANOTHER_MODEL, Adapter, Pair, both_sides, check_dtypes, positive, scaling
from ckpttool.containers.safetensors import read_header
from ckpttool.core.catalog import Catalog, LogicalTensor, whole_tensor
from ckpttool.core.dtypes import numpy_dtype
from ckpttool.errors import ConflictError, CorruptError, IncompleteError, UnsupportedError, UsageError
from ckpttool.storage.listing import Listing
from ckpttool.storage.place import open_file

FILE = "pytorch_lora_weights.safetensors"
METADATA = "lora_adapter_metadata"
"""Header entry: the LoraConfig of each part as JSON, as diffusers writes it."""
_OTHERS = (peft.STEM, "peft_model", "model", "diffusion_pytorch_model")
"""Prefixes of files of other kinds."""
DENOISERS = ("transformer", "unet")
"""Parts that sd-scripts calls ``lora_unet``."""
_PARTS = (*DENOISERS, "transformer_2", "text_encoder", "text_encoder_2", "text_encoder_3")
_KOHYA = re.compile(r"lora_(?P<part>unet|te\d?)_(?P<path>\w+)\.(?P<side>lora_down\.weight|lora_up\.weight|alpha)\Z")
_KOHYA_PARTS = {
    "unet": DENOISERS, "te": ("text_encoder",), "te1": ("text_encoder",), "te2": ("text_encoder_2",),
    "te3": ("text_encoder_3",),
}  # fmt: skip
_DOTTED = re.compile(
    r"(?P<path>.+?)(?P<side>\.lora_A\.weight|\.lora_B\.weight|[._]lora\.down\.weight|[._]lora\.up\.weight"
    r"|\.lora_linear_layer\.down\.weight|\.lora_linear_layer\.up\.weight|\.alpha)\Z"
)
_OLD = {"to_q": "q_proj", "to_k": "k_proj", "to_v": "v_proj", "to_out": "out_proj"}
"""Names in old files -> projections of text encoders."""

_FLUX = (
    (r"double_blocks_(\d+)_img_attn_qkv", r"transformer_blocks.\1.attn.to_qkv"),
    (r"double_blocks_(\d+)_txt_attn_qkv", r"transformer_blocks.\1.attn.add_qkv_proj"),
    (r"double_blocks_(\d+)_img_attn_proj", r"transformer_blocks.\1.attn.to_out.0"),
    (r"double_blocks_(\d+)_txt_attn_proj", r"transformer_blocks.\1.attn.to_add_out"),
    (r"double_blocks_(\d+)_img_mlp_0", r"transformer_blocks.\1.ff.net.0.proj"),
    (r"double_blocks_(\d+)_img_mlp_2", r"transformer_blocks.\1.ff.net.2"),
    (r"double_blocks_(\d+)_txt_mlp_0", r"transformer_blocks.\1.ff_context.net.0.proj"),
    (r"double_blocks_(\d+)_txt_mlp_2", r"transformer_blocks.\1.ff_context.net.2"),
    (r"double_blocks_(\d+)_img_mod_lin", r"transformer_blocks.\1.norm1.linear"),
    (r"double_blocks_(\d+)_txt_mod_lin", r"transformer_blocks.\1.norm1_context.linear"),
    (r"single_blocks_(\d+)_linear1", r"single_transformer_blocks.\1.linear1"),
    (r"single_blocks_(\d+)_linear2", r"single_transformer_blocks.\1.proj_out"),
    (r"single_blocks_(\d+)_modulation_lin", r"single_transformer_blocks.\1.norm.linear"),
)
"""Names of FLUX.1 as its makers have them. Fused ones become names of ``apply.FUSED``, whose parts the base has."""
_FUSED = {
    "to_qkv": "to_q",
    "add_qkv_proj": "add_q_proj",
    "linear1": "attn.to_q",
}
"""The first part of each fused layer, by whose presence a base is known to have it in parts."""
_RESNETS = {
    "in_layers_2": "conv1", "out_layers_3": "conv2", "emb_layers_1": "time_emb_proj",
    "skip_connection": "conv_shortcut",
}  # fmt: skip
"""Stability's names inside of a resnet."""
_LAYERS = 3
"""Blocks of a stage in Stability's numbering of SD's and SDXL's U-Net: two layers and what changes the size."""


class _Name(NamedTuple):
    """The parsed name of a tensor of the file."""

    parts: tuple[str, ...]
    """The part of a pipeline that it belongs to, under the names that this may have; () where it does not say."""
    path: str
    side: str
    """``A`` next to the input, ``B`` next to the output, ``alpha``."""
    kohya: bool


class _Unresolved(NamedTuple):
    """A pair whose target has to be looked up in a base."""

    pair: Pair
    kohya: bool


@dataclass(frozen=True, slots=True)
class DiffusersAdapter(peft.PeftAdapter):
    """The factors for one part of a pipeline."""

    underscored: frozenset[str] = frozenset()
    """Targets that have ``_`` where the base has ``.``."""

    def resolved(self, base: Mapping[str, tuple[int, ...]]) -> Self:
        """The same with the names that the base has. Raises ConflictError for one that it does not have."""
        if not self.underscored:
            return self
        known: dict[str, list[str]] = {}
        for name in base:
            if name.endswith(".weight"):
                known.setdefault(name.removesuffix(".weight").replace(".", "_"), []).append(name)
        pairs = [
            p._replace(target=_found(p, base, known, self.path)) if p.target in self.underscored else p
            for p in self.pairs
        ]
        return replace(self, pairs=tuple(pairs), underscored=frozenset())


def is_lora_file(listing: Listing) -> bool:
    """Whether a source is a LoRA file of diffusers, or a directory with one."""
    return bool(_file(listing))


def parts_of(listing: Listing) -> list[tuple[str, ...]]:
    """The parts of a pipeline that a file changes, each under the names that it may have, in order."""
    where = str(listing.path(_file(listing)))
    names = [_named(t.name, where).parts for t in read_header(listing.path(_file(listing))).tensors]
    return list(dict.fromkeys(names))


def adapter(listing: Listing, part: str = "") -> Adapter:
    """The adapter for a part of a pipeline in a file; ``part`` is "" for a model of its own.

    Raises UnsupportedError for tensors that are not factors of plain LoRA, UsageError for a file that changes other
    parts, too, and a model of its own, ConflictError and IncompleteError for what does not fit together.
    """
    place = listing.path(_file(listing))
    where = str(place)
    head = read_header(place)
    tensors = {t.key: whole_tensor(t, t.key) for t in head.tensors}
    catalog = Catalog([head.file], tensors)
    named = {key.name: _named(key.name, where) for key in tensors}
    there = list(dict.fromkeys(n.parts for n in named.values()))
    if not there:
        raise IncompleteError("the adapter has no tensors", where=where)
    if part:
        mine = [p for p in there if part in p]
    elif len(there) > 1:
        shown = ", ".join(" or ".join(p) or "no part" for p in there)
        raise UsageError(
            f"the adapter changes several parts of a pipeline: {shown}",
            where=where,
            hint="give the pipeline, not one part of it: PIPELINE+ADAPTER",
        )
    else:
        mine = there
    if not mine:
        raise ConflictError(f"the adapter changes nothing in {part}", where=where, hint=ANOTHER_MODEL)
    chosen = {n: what for n, what in named.items() if what.parts == mine[0]}
    check_dtypes(Catalog([head.file], {k: t for k, t in tensors.items() if k.name in chosen}))
    config = _config(head.metadata or {}, mine[0], where)
    pairs = _pairs(chosen, catalog, config, where)
    underscored = frozenset(u.pair.target for u in pairs if u.kohya)
    return DiffusersAdapter(where, catalog, tuple(u.pair for u in pairs), {}, in_out=False, underscored=underscored)


def _file(listing: Listing) -> str:
    """The file itself, that of diffusers' name in a directory, or the only one there; "" for none."""
    if listing.single:
        return listing.single if listing.single.endswith(".safetensors") else ""
    if FILE in listing.names:
        return FILE
    found = listing.safetensors()
    alone = len(found) == 1 and "config.json" not in listing.names
    return found[0] if alone and not found[0].startswith(_OTHERS) else ""


def _named(name: str, where: str) -> _Name:
    """Parse a tensor's name. Raises UnsupportedError for tensors that plain LoRA does not have."""
    if m := _KOHYA.match(name):
        side = {"lora_down.weight": "A", "lora_up.weight": "B"}.get(m["side"], "alpha")
        parts = _KOHYA_PARTS.get(m["part"], ())
        if parts:
            return _Name(parts, m["path"], side, kohya=True)
    m = _DOTTED.match(name)
    if m is None or name.startswith(("lora_", "diffusion_model.", "base_model.")):
        raise UnsupportedError(
            f"`{name}` is nothing that is known of the LoRA files of diffusers",
            where=where,
            hint="load it in diffusers, and save it with its save_lora_weights",
        )
    side = "A" if m["side"].endswith(("A.weight", "down.weight")) else "B" if m["side"] != ".alpha" else "alpha"
    first, _, rest = m["path"].partition(".")
    parts, path = ((first,), rest) if first in _PARTS else ((), m["path"])
    path = path.replace(".processor.", ".")
    if m["side"].startswith("_lora"):
        path = _unabbreviated(path, text=first.startswith("text_encoder"))
    return _Name(parts, path, side, kohya=False)


def _unabbreviated(path: str, *, text: bool) -> str:
    """``attn1.to_out`` of old files is ``attn1.to_out.0``; that of a text encoder ``self_attn.out_proj``."""
    module, dot, last = path.rpartition(".")
    if text:
        return f"{module}{dot}{_OLD.get(last, last)}"
    return f"{path}.0" if last == "to_out" else path


def _config(metadata: Mapping[str, str], parts: Sequence[str], where: str) -> dict[str, Any]:
    """The header's config for the factors of a part; {} where there is none. Raises CorruptError."""
    if METADATA not in metadata:
        return {}
    try:
        said = json.loads(metadata[METADATA])
    except (ValueError, RecursionError):
        said = None
    if not isinstance(said, dict):
        raise CorruptError(f"`{METADATA}` in the header is not a JSON object", where=where)
    if not parts:  # save_lora_adapter of one model writes neither names nor header with a part
        return said
    return {
        k.removeprefix(f"{p}."): v
        for p in parts
        for k, v in said.items()
        if isinstance(k, str) and k.startswith(f"{p}.")
    }


def _pairs(named: Mapping[str, _Name], catalog: Catalog, config: Mapping[str, Any], where: str) -> list[_Unresolved]:
    found: dict[tuple[str, bool], dict[str, str]] = {}
    for name, what in named.items():
        sides = found.setdefault((what.path, what.kohya), {})
        if what.side in sides:
            raise ConflictError(f"`{sides[what.side]}` and `{name}` are one factor twice", where=where)
        sides[what.side] = name
    with_alpha = [sides.get("alpha", "") for sides in found.values()]
    if any(with_alpha) and not all(with_alpha):
        path = next(path for (path, _), sides in found.items() if "alpha" not in sides)
        raise UnsupportedError(
            f"`{path}` has no alpha, and others have one: what is meant then differs from loader to loader", where=where
        )
    if config:
        peft.check(config, where)
        if any(with_alpha):
            raise ConflictError(f"there are tensors of alpha, and `{METADATA}` in the header", where=where)
    out = []
    for (path, kohya), sides in found.items():
        a, b = both_sides(sides, where)
        shapes = catalog[a].shape, catalog[b].shape
        if min(map(len, shapes)) < 2 or shapes[0][0] != shapes[1][1]:
            raise ConflictError(f"`{a}` {list(shapes[0])} and `{b}` {list(shapes[1])} are not factors", where=where)
        rank = shapes[0][0]
        factor = 1.0
        if "alpha" in sides:
            factor = scaling(positive(_scalar(catalog[sides["alpha"]], where), sides["alpha"], where), rank, root=False)
        elif config:
            said, factor = peft.rank_of(path, config, where)
            if said != rank:
                raise ConflictError(f"`{a}` is {list(shapes[0])}, but the header says rank {said}", where=where)
        out.append(_Unresolved(Pair(f"{path}.weight", "linear", a, b, rank, factor), kohya))
    return out


def _scalar(tensor: LogicalTensor, where: str) -> float:
    """The number in a tensor of one element. Raises ConflictError."""
    stored = tensor.pieces[0].stored if tensor.pieces else None
    if stored is None or stored.nbytes != numpy_dtype(tensor.dtype).itemsize:
        raise ConflictError(f"`{tensor.key.name}` {list(tensor.shape)} is not one number", where=where)
    from ckpttool.storage.place import parse_place

    with open_file(parse_place(where)) as file:
        data = file.pread(stored.nbytes, stored.offset)
    return float(np.frombuffer(data, numpy_dtype(tensor.dtype))[0])


def _found(pair: Pair, base: Mapping[str, tuple[int, ...]], known: Mapping[str, list[str]], where: str) -> str:
    """The name in the base of a target with ``_`` for ``.``. Raises ConflictError."""
    path = pair.target.removesuffix(".weight")
    # transformers 5 leaves out what CLIP's names began with
    tries = (path, _diffusers_block(path), path.removeprefix("text_model_"), f"text_model_{path}")
    for name in tries:
        if len(names := known.get(name, [])) == 1:
            return names[0]
    for pattern, target in _FLUX:
        if m := re.fullmatch(pattern, path):
            name = m.expand(target)
            stem, _, last = name.rpartition(".")
            if f"{name}.weight" in base or (last in _FUSED and f"{stem}.{_FUSED[last]}.weight" in base):
                return f"{name}.weight"
    raise ConflictError(
        f"`{pair.a}` of the adapter is for a layer that the base does not have, or has under a name that is not known",
        where=where,
        hint=ANOTHER_MODEL,
    )


def _diffusers_block(path: str) -> str:
    """A name of Stability's U-Net as diffusers has it, ``_`` for ``.`` in both; "" for none."""
    m = re.fullmatch(r"(input_blocks|output_blocks)_(\d+)_(\d+)_(\w+)|middle_block_([012])_(\w+)", path)
    if m is None:
        return ""
    if m[5]:
        kind, number, rest = ("attentions", 0, m[6]) if m[5] == "1" else ("resnets", int(m[5]) // 2, m[6])
        return f"mid_block_{kind}_{number}_{_RESNETS.get(rest, rest)}"
    stage, layer = divmod(int(m[2]) - (m[1] == "input_blocks"), _LAYERS)
    side = "down" if m[1] == "input_blocks" else "up"
    if m[4] in ("op", "conv"):
        return f"{side}_blocks_{stage}_{side}samplers_0_conv"
    kind = ("resnets", "attentions", "upsamplers")[min(int(m[3]), 2)]
    return f"{side}_blocks_{stage}_{kind}_{layer}_{_RESNETS.get(m[4], m[4])}"
