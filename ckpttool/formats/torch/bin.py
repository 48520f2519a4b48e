"""PyTorch's own files: ``pytorch_model.bin``, its shards with an index, any other file of torch.save. Whole tensors.

The name of a file says little (.bin, .pt, .pth and .ckpt are anybody's), so its content decides. An index is only a
hint, as that of safetensors is: the files say what is in them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from math import prod
from typing import Any

from ckpttool.containers.pickle_write import Hole
from ckpttool.containers.torch_write import lay_out_torch
from ckpttool.containers.torch_zip import TorchFile, is_torch, read_torch
from ckpttool.core.catalog import StoredTensor
from ckpttool.core.dtypes import nbytes
from ckpttool.core.files import Place
from ckpttool.core.mesh import Mesh
from ckpttool.core.words import count, some
from ckpttool.errors import ConflictError, CorruptError, IncompleteError, UnsupportedError
from ckpttool.formats import base
from ckpttool.formats.config import auto_class
from ckpttool.formats.torch.optimizer import Trainer, is_trainers
from ckpttool.formats.torch.prefixes import strip_prefixes
from ckpttool.formats.torch.tree import ALL, select
from ckpttool.storage.identify import identify
from ckpttool.storage.json_file import indented
from ckpttool.storage.listing import Listing
from ckpttool.storage.place import read_each

SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
STEM = "pytorch_model"
INDEX = f"{STEM}.bin.index.json"
SHARD_LIMIT = 5 * 10**9
"""Default for the bytes of tensors in a file, as for safetensors."""
_NUMBERED = re.compile(r"(?P<stem>.+)-(?P<part>\d{5})-of-(?P<total>\d{5})\.bin\Z")
_OTHERS = re.compile(
    r"(adapter_model|optimizer|scheduler|scaler|training_args|rng_state|random_states|consolidated\.\d+|mp_rank"
    r"|(bf16_)?zero_pp_rank|model_optim_rng|distrib_optim|common\.pt|pytorch_model_fsdp(_\d+)?_rank"
    r"|([\w.-]*[_.-])?world_size_\d+_rank_)"
)
"""Files of trainers, and of other formats, that are no model by themselves."""


class TorchFiles:
    """Files of torch.save."""

    name = "torch-bin"
    dialect = "hf"
    capabilities = base.Capabilities(
        shards=True,
        views=True,
        nested=True,
        optimizer_beside=True,
        namings=("transformers", "torchtitan", "torchtitan-0.2"),
    )

    def detect(self, listing: Listing) -> int:
        if listing.single:
            return int(listing.single.endswith((*SUFFIXES, ".bin.index.json")))
        if listing.safetensors():
            return 0
        names = _weights(listing)
        return 2 if INDEX in listing.names or any(n.startswith(STEM) for n in names) else int(len(names) == 1)

    def read(self, listing: Listing, options: base.ReadOptions) -> base.StoredCheckpoint:
        """Raises IncompleteError (a shard is missing), ConflictError (a tensor twice, several dicts of tensors),
        and what reading a file of torch.save raises.
        """
        base.check_mesh(self.name, dict.fromkeys(("tp", "pp", "ep", "etp"), 1), options, listing.root)
        names, index = _files(listing)
        single = listing.single if listing.single in names else ""
        carried, notes = ((), []) if single else base.companions(listing, names)
        if left := [n for n in listing.names if n.endswith(SUFFIXES) and n not in names and not is_trainers(n)]:
            notes.append(f"skipped, not part of the model: {some(left)}")
        config = listing.json("config.json")
        stored = base.StoredCheckpoint(self.name, listing.root, [], [], Mesh(), "", config=config, companions=carried)
        stored.known = tuple(left)
        found: dict[str, StoredTensor] = {}
        trainer, chosen = None, ""
        paths = [listing.path(name) for name in names]
        for number, (name, path, file) in enumerate(zip(names, paths, read_each(_read_torch, paths), strict=True)):
            stored.files.append(file.info)
            trainer = Trainer.find(file) if len(names) == 1 and options.select != ALL else None
            chosen, tensors, said = select(file.value, options.select, str(path), trainer.keys() if trainer else ())
            notes += [n for n in said if n not in notes]
            for key, tensor in tensors.items():
                t = file.place(tensor, key, number)
                if key in found and index.get(key) not in (name, names[found[key].file]):
                    raise ConflictError(
                        f"tensor `{key}` is in two files",
                        where=[str(listing.path(names[found[key].file])), str(path)],
                        hint="remove the stale file",
                    )
                if key not in found or index[key] == name:
                    found[key] = t
        renamed, note = strip_prefixes(found, str(listing.root), wrapped=options.wrapped)
        stored.tensors = [t._replace(name=renamed[n]) for n, t in found.items()]
        stored.notes = [*notes, note] if note else notes
        stored.notes += _index_notes(index, {k: names[t.file] for k, t in found.items()})
        if index:
            stored.findings += _index_findings(listing, index, {k: names[t.file] for k, t in found.items()}, found)
        if missing := [k for k in index if k not in found]:
            raise IncompleteError(
                f"{len(missing)} tensors that the index names are in no file: {missing[0]}", where=str(listing.root)
            )
        if trainer is not None:
            trainer.add_to(stored, chosen)
        return stored

    def target_mesh(self, asked: Mesh, said: Mapping[str, int]) -> Mesh:
        return base.whole_mesh(said, f"{self.name}: its files hold whole tensors")

    def write(self, request: base.WriteRequest) -> base.FileLayout:
        """``pytorch_model.bin``, or numbered shards and their index. Raises UnsupportedError for a dtype."""
        groups = base.fill_files(request.ranks[0], request.max_shard_size or SHARD_LIMIT)
        files: list[base.OutFile] = []
        places: dict[str, tuple[int, int]] = {}
        weight_map: dict[str, str] = {}
        for i, group in enumerate(groups):
            stem = STEM if len(groups) == 1 else f"{STEM}-{i + 1:05d}-of-{len(groups):05d}"
            laid = lay_out_torch({t.name: Hole(t.dtype, t.shape) for t in group}, stem)
            files.append(base.OutFile(f"{stem}.bin", laid.size, laid.literals, laid.checksums))
            places |= {t.slot: (i, laid.offsets[t.name,]) for t in group}
            weight_map |= {t.name: f"{stem}.bin" for t in group}
        rank_files = list(range(len(files)))
        if len(groups) > 1:
            total = sum(nbytes(t.dtype, prod(t.shape)) for t in request.ranks[0])
            text = indented({"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})
            files.append(base.OutFile(INDEX, len(text), ((0, text),)))
        return base.FileLayout(files, [places], [], [rank_files], usage=_usage(request.config, weight_map))


def _read_torch(path: Place) -> TorchFile:
    with path.open("rb") as f:
        head = f.read(64)
    if head and not is_torch(head):
        kind = identify(head)
        what = f"this is {kind.what}" if kind else "this is not a file of torch.save"
        raise UnsupportedError(what, where=str(path), hint=kind.hint if kind else "give the file of weights")
    return read_torch(path)


def _index_notes(index: Mapping[str, str], real: Mapping[str, str]) -> list[str]:
    notes = []
    if index and (extra := [n for n in real if n not in index]):
        notes.append(f"the index lacks {count(len(extra), 'tensor')} ({some(extra)}); read from the files")
    if moved := [n for n in real if n in index and index[n] != real[n]]:
        notes.append(
            f"the index puts {count(len(moved), 'tensor')} in the wrong shard ({some(moved)}); read from the files"
        )
    return notes


def _index_findings(
    listing: Listing, index: Mapping[str, str], real: Mapping[str, str], found: Mapping[str, StoredTensor]
) -> Iterator[tuple[str, str, str]]:
    """Findings about an index whose files were read."""
    name = listing.single if listing.single.endswith(".json") else INDEX
    where = str(listing.path(name))
    for n, file in real.items():
        if n not in index:
            yield "index-extra", f"tensor `{n}` of {file} is not in the index", where
        elif index[n] != file:
            yield "index-shard", f"the index puts `{n}` in {index[n]}, it is in {file}", where
    metadata = listing.json(name).get("metadata")
    said = metadata.get("total_size") if isinstance(metadata, dict) else None
    every = sum(t.nbytes for t in found.values())
    # Tied tensors share bytes, which versions of transformers count once or twice.
    once = sum({(t.file, t.offset, t.shape): t.nbytes for t in found.values()}.values())
    if said is not None and said not in (every, once):
        yield "total-size", f"total_size is {said}, the tensors have {every:,} bytes", where


def _usage(config: Mapping[str, Any], names: Collection[str]) -> str:
    name = auto_class(config, names) if config.get("model_type") else ""
    return f"{name}.from_pretrained({{text}}, use_safetensors=False)" if name else ""


def _weights(listing: Listing) -> list[str]:
    return [n for n in listing.names if n.endswith(SUFFIXES) and not _OTHERS.match(n) and not n.startswith(".")]


def _files(listing: Listing) -> tuple[list[str], dict[str, str]]:
    """The files that make up the checkpoint, and the map of their index ({} without one).

    Raises IncompleteError for a file that is missing, or when it is unclear which are meant.
    """
    if listing.single.endswith(SUFFIXES):
        return [listing.single], {}
    index = listing.single or (INDEX if INDEX in listing.names else "")
    if index:
        weight_map = listing.json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
            raise CorruptError("the index has no weight_map of file names", where=str(listing.path(index)))
        names, what = sorted(set(weight_map.values())), "that the index names "
    else:
        present, weight_map, what = _weights(listing), {}, ""
        numbered = [(n, m) for n in present if (m := _NUMBERED.match(n))]
        sets = {(m["stem"], int(m["total"])) for _, m in numbered}
        if f"{STEM}.bin" in present:
            names = [f"{STEM}.bin"]
        elif len(sets) == 1 and len(numbered) == len(present):
            ((stem, total),) = sets
            names = [f"{stem}-{i + 1:05d}-of-{total:05d}.bin" for i in range(min(total, 100_000))]
        elif len(present) == 1:
            names = present
        else:
            raise IncompleteError(
                f"there are {len(present)} files of torch.save here, and it is unclear which one to read"
                if present
                else "there are no files of torch.save with weights here",
                where=[str(listing.root), *present[:4]],
                hint="give the path of the file",
            )
    if missing := [n for n in names if n not in listing.names]:
        raise IncompleteError(
            f"{len(missing)} of {len(names)} files {what}are missing: {missing[0]}",
            where=str(listing.root),
            hint="fetch the missing files; a checkpoint is only read whole",
        )
    return names, weight_map
