"""Reading an adapter directory: which library wrote it, its files, its tensors."""

from __future__ import annotations

from ckpttool.adapters import diffusers, paddle, peft
from ckpttool.adapters.base import Adapter
from ckpttool.containers.index import NUMBERED
from ckpttool.containers.safetensors import read_header
from ckpttool.core.catalog import Catalog, Key, LogicalTensor, whole_tensor
from ckpttool.core.files import AnyPlace, Place
from ckpttool.core.mesh import Mesh
from ckpttool.errors import ConflictError, CorruptError, IncompleteError, UnsupportedError
from ckpttool.formats.base import StoredCheckpoint
from ckpttool.storage.listing import Listing, list_source
from ckpttool.storage.place import parse_place, read_each

READERS = {peft.CONFIG: (peft.STEM, peft.adapter), paddle.CONFIG: (paddle.STEM, paddle.adapter)}
"""Config's name -> prefix of the weight files, and the function that reads both."""
OTHERS = {
    "prefix_config.json": "prefix tuning",
    "vera_config.json": "VeRA",
    "lokr_config.json": "LoKr",
    "reft_config.json": "ReFT",
}
"""Config files of other adapters that Paddle's libraries write; PEFT names the kind in adapter_config.json."""


def changed_parts(path: AnyPlace) -> list[tuple[str, ...]] | None:
    """The parts of a pipeline that an adapter changes, each under the names that it may have; None for an adapter of
    one model."""
    listing = list_source(parse_place(path))
    if any(name in listing.names for name in READERS) or not diffusers.is_lora_file(listing):
        return None
    return diffusers.parts_of(listing)


def read_adapter(path: AnyPlace, part: str = "") -> Adapter:
    """Read the headers and the config of an adapter; ``part`` is the part of a pipeline that it is for.

    Raises IncompleteError (no adapter, a shard is missing), UnsupportedError (kinds of adapters that are no sum of
    low-rank products, pickled weights), ConflictError (config and tensors say different things), CorruptError.
    """
    listing = list_source(parse_place(path))
    where = str(listing.root)
    for name, kind in OTHERS.items():
        if name in listing.names:
            raise UnsupportedError(f"the adapter is {kind}, which is not merged", where=str(listing.path(name)))
    found = [name for name in READERS if name in listing.names]
    if not found and diffusers.is_lora_file(listing):
        return diffusers.adapter(listing, part)
    if not found:
        raise IncompleteError(
            f"there is no adapter here: neither {peft.CONFIG} (PEFT), {paddle.CONFIG} (Paddle) nor {diffusers.FILE}",
            where=where,
            hint="give the directory that holds the config and the weights of the adapter",
        )
    if len(found) > 1:
        raise ConflictError(f"there are two adapters here: {peft.CONFIG} and {paddle.CONFIG}", where=where)
    (config,) = found
    stem, make = READERS[config]
    extra = next((n for n in listing.names if n.startswith("new_embeddings.")), None)
    if extra:
        raise UnsupportedError("the adapter brings embeddings of new tokens", where=str(listing.path(extra)))
    catalog = _catalog(listing, stem)
    if not len(catalog):
        raise IncompleteError("the adapter has no tensors", where=where)
    return make(where, listing.json(config), catalog)


def read_stored(path: Place, name: str) -> StoredCheckpoint:
    """The headers of an adapter of PEFT, of whatever kind, as a checkpoint of format ``name`` to look into.

    Raises IncompleteError, CorruptError, UnsupportedError (pickled weights) and ConflictError.
    """
    listing = list_source(path)
    catalog = _catalog(listing, peft.STEM, "adapter")
    stored = [p.stored for t in catalog for p in t.pieces]
    return StoredCheckpoint(
        name, listing.root, catalog.files, stored, Mesh(), config=listing.json("config.json"), recorded=catalog
    )


def _catalog(listing: Listing, stem: str, component: str = "model") -> Catalog:
    shards = _shards(listing, stem)
    heads = list(read_each(read_header, [listing.path(n) for n in shards], range(len(shards))))
    files = [h.file for h in heads]
    tensors: dict[Key, LogicalTensor] = {}
    for t in (t._replace(component=component) for h in heads for t in h.tensors):
        key = t.key
        if key in tensors:
            first = tensors[key].pieces[0].stored.file
            raise ConflictError(
                f"tensor `{t.name}` is in two files of the adapter",
                where=[str(files[first].place), str(files[t.file].place)],
                hint="these may be the files of tensor-parallel ranks: save the adapter merged",
            )
        tensors[key] = whole_tensor(t, key)
    return Catalog(files, tensors)


def _shards(listing: Listing, stem: str) -> list[str]:
    """Files with the adapter's tensors. Raises IncompleteError or UnsupportedError."""
    where = str(listing.root)
    names = [n for n in listing.safetensors() if n == f"{stem}.safetensors"]
    parts = {int(m["part"]): m for n in listing.safetensors() if (m := NUMBERED.match(n)) and m["stem"] == stem}
    index = f"{stem}.safetensors.index.json"
    if names and parts:
        raise ConflictError(f"there are two adapters here: {names[0]} and {parts[min(parts)][0]}", where=where)
    if parts:
        totals = {int(m["total"]) for m in parts.values()}
        if len(totals) > 1 or set(parts) != set(range(1, max(totals) + 1)):
            raise IncompleteError(
                f"shards of the adapter are missing: there are {len(parts)} of {max(totals)}", where=where
            )
        names = [m[0] for _, m in sorted(parts.items())]
    if names:
        listed = listing.json(index).get("weight_map", {})
        if not isinstance(listed, dict):
            raise CorruptError(f"{index} has no weight_map", where=where)
        missing = sorted({str(n) for n in listed.values()} - set(names))
        if missing:
            raise IncompleteError(f"{missing[0]}, which {index} names, is missing", where=where)
        return names
    pickled = [n for n in listing.names if n.endswith((".bin", ".pt", ".pdparams"))]
    weights = next((n for n in pickled if n.startswith((stem, "lora_model_state"))), None)
    if weights:
        raise UnsupportedError(
            f"{weights} is pickled; adapters are read as safetensors only",
            where=str(listing.path(weights)),
            hint="save the adapter as safetensors (PEFT's save_pretrained does so by default)",
        )
    raise IncompleteError(f"the adapter has no {stem}.safetensors", where=where)
