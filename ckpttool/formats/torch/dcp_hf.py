"""The safetensors of torch's HuggingFaceStorageWriter: each rank's boxes, before they are consolidated.

    shard-00002-model-00001-of-00003.safetensors    rank 2 (from 1), file 1 of 3 that a whole model would have
      __metadata__.DCP_SHARDING_INFO                {name: {"saved_offsets": [33, 0]}}

Shapes are nowhere: a whole tensor reaches as far as its boxes do. Source: hf_storage.py and _hf_utils.py in
torch/distributed/checkpoint of torch 2.13.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ckpttool.containers.safetensors import Header, read_header
from ckpttool.core.catalog import Catalog, Key, Piece, logical_tensor
from ckpttool.core.geometry import whole
from ckpttool.core.mesh import Mesh
from ckpttool.errors import CkptError, CorruptError, IncompleteError, found_as
from ckpttool.formats import base
from ckpttool.formats.config import whole_number
from ckpttool.formats.torch.dcp_place import config_of
from ckpttool.storage.listing import Listing
from ckpttool.storage.place import read_each

_FILES = r"shard-(?P<rank>\d{5})-model-(?P<part>\d{5})-of-(?P<parts>\d{5})\.safetensors"
_INFO = "DCP_SHARDING_INFO"
_EMBEDDINGS = ("embed_tokens.weight", "tok_embeddings.weight", "embed_in.weight", "wte.weight")
_NORMS = ("model.norm.weight", "final_layer_norm.weight", "ln_f.weight")


def is_sharded(listing: Listing) -> bool:
    """Whether the files of ranks lie here."""
    return not listing.single and bool(listing.match(_FILES))


def read_sharded(format_name: str, listing: Listing) -> base.StoredCheckpoint:
    """The checkpoint of all ranks' files.

    Raises IncompleteError (a rank's files are missing), ConflictError (boxes overlap), CorruptError (a header).
    """
    found = {n: int(m["rank"]) for n, m in listing.match(_FILES)}
    base.contiguous_ranks(
        {r - 1: r for r in found.values()},
        max(found.values()),
        listing.root,
        "shard-RRRRR-model-... (RRRRR from 00001)",
    )
    heads = list(read_each(read_header, [listing.path(name) for name in found], range(len(found))))
    pieces: dict[str, list[Piece]] = {}
    for head in heads:
        offsets = _offsets(head)
        for t in head.tensors:
            at = offsets.get(t.name, (0,) * len(t.shape))
            if len(at) != len(t.shape):
                raise CorruptError(
                    f"{_INFO} says that `{t.name}` {list(t.shape)} begins at {list(at)}", where=str(head.file.place)
                )
            pieces.setdefault(t.name, []).append(Piece(t, whole(t.shape), whole(t.shape).shift(at)))
    files = [h.file for h in heads]
    config, note = config_of(listing)
    catalog = Catalog(files, {})
    for name, mine in pieces.items():
        shape = tuple(map(max, *(p.logical_box.stop for p in mine))) if len(mine) > 1 else mine[0].logical_box.stop
        try:
            with found_as(incomplete="chunk-missing", conflict="chunk-overlap"):
                catalog.tensors[Key(name)] = logical_tensor(Key(name), shape, mine, files=files)
        except CkptError as e:
            e.hint = "a rank's file is missing, or the files are of several saves"
            raise
    _check_reach(catalog, config, listing)
    carried, notes = base.companions(listing, found)
    return base.StoredCheckpoint(
        format_name, listing.root, files, [t for h in heads for t in h.tensors], Mesh(), "",
        config=config, companions=carried, recorded=catalog, notes=[*notes, note] if note else notes,
    )  # fmt: skip


def _offsets(head: Header) -> dict[str, tuple[int, ...]]:
    """Where the box of each tensor begins. Raises CorruptError."""
    try:
        said = json.loads(head.metadata.get(_INFO, "{}"))
        return {name: tuple([_natural(n) for n in entry["saved_offsets"]]) for name, entry in said.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CorruptError(
            f"the metadata {_INFO} is not valid", where=str(head.file.place), hint="fetch or save the file again"
        ) from None


def _natural(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise TypeError
    return value


def _check_reach(catalog: Catalog, config: Mapping[str, Any], listing: Listing) -> None:
    """Without the files of the last ranks all tensors would only seem smaller: the config tells, and else the last
    norm, which has as many elements as a row of the embedding, and is cut as its rows are."""
    shapes = {k.name: t.shape for k, t in catalog.tensors.items()}
    width = next((s[1] for n, s in shapes.items() if n.endswith(_EMBEDDINGS) and len(s) == 2), 0)
    for name, shape in shapes.items():
        if name.rpartition("layers.")[1] == "" and name.endswith(_NORMS) and len(shape) == 1 and shape[0] < width:
            raise IncompleteError(
                f"`{name}` has {shape[0]:,} elements, and a row of the embedding {width:,}: ranks are missing",
                where=str(listing.root),
                hint="copy the files of all ranks into one directory",
                finding="rank-missing",
            )
    for key, t in catalog.tensors.items():
        least = None
        if key.name.endswith("embed_tokens.weight"):
            least = whole_number(config, "vocab_size")
        elif key.name == "model.norm.weight":
            least = whole_number(config, "hidden_size")
        if least is not None and t.shape and t.shape[0] < least:
            raise IncompleteError(
                f"`{key.name}` has {t.shape[0]:,} rows, config.json says {least:,}: ranks are missing",
                where=str(listing.root),
                hint="copy the files of all ranks into one directory",
                finding="rank-missing",
            )
