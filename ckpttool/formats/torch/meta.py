"""Meta's own files, ``consolidated.NN.pth`` with ``params.json``, one for each tensor-parallel rank, and Mistral's
``consolidated.safetensors`` (or several with numbers, or one .pth), whose tensors are whole.

Llama 3 cuts its embedding by rows, Llama 1 and 2 by columns. Which of these it is, and how many ranks there are, is in
the shapes and ``params.json``; both are checked, because joining along the wrong axis would give no error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ckpttool.containers.pickle_write import Hole
from ckpttool.containers.torch_write import lay_out_torch
from ckpttool.containers.torch_zip import read_torch
from ckpttool.core.catalog import StoredTensor
from ckpttool.core.dtypes import DTYPES
from ckpttool.core.mesh import Mesh
from ckpttool.errors import ConflictError, IncompleteError, UsageError, found_as
from ckpttool.formats import base
from ckpttool.formats.config import config_fields
from ckpttool.formats.torch import meta_llama4
from ckpttool.formats.torch.meta_params import config_of, params_of
from ckpttool.formats.torch.prefixes import strip_prefixes
from ckpttool.formats.torch.tree import select
from ckpttool.storage.json_file import indented
from ckpttool.storage.listing import Listing, is_index
from ckpttool.storage.place import read_each

_RANK = r"consolidated\.(?P<rank>\d+)\.pth"
_WHOLE = r"consolidated(-\d+-of-\d+)?\.safetensors"
_PARAMS = "params.json"
_BY_COLUMNS = "llama2"
"""The version (--target) that cuts its embedding by columns; "meta-llama2" is its naming."""
_EMBEDDING, _HEAD = "tok_embeddings.weight", "output.weight"
_PROJECTIONS = _QUERY, _KEY, _FUSED = (".attention.wq.weight", ".attention.wk.weight", ".attention.wqkv.weight")
_OF_FILES = ("checklist.chk", "consolidated.safetensors.index.json", _PARAMS)
"""Files beside the weights that describe these files: checksums, an index, and what becomes config.json."""


class Meta:
    """One file of torch.save for each rank."""

    name = "meta"
    dialect = "meta"
    capabilities = base.Capabilities(meshes="tp", targets=("llama3", _BY_COLUMNS), pad_vocab=False)

    def detect(self, listing: Listing) -> int:
        if listing.single:
            return 0
        if listing.match(_RANK):
            return 2
        published = any(n == "model.safetensors" or (is_index(n) and n not in _OF_FILES) for n in listing.names)
        return 2 if _PARAMS in listing.names and listing.match(_WHOLE) and not published else 0

    def read(self, listing: Listing, options: base.ReadOptions) -> base.StoredCheckpoint:
        """Raises IncompleteError (a rank's file or params.json is missing), ConflictError (shapes and params.json
        disagree), UnsupportedError (a model of another kind), and what reading the files raises.
        """
        params = listing.json(_PARAMS)
        params = inner if isinstance(inner := params.get("model"), dict) else params  # Llama 4's
        if not params:
            raise IncompleteError(
                f"there is no {_PARAMS} beside the weights, which says how many heads the model has",
                where=str(listing.root),
                hint="fetch it from where the weights are from",
                finding="params-json",
            )
        found = {int(m["rank"]): n for n, m in listing.match(_RANK)}
        world = max(found) + 1 if found else 1
        base.check_mesh("its files", {"tp": world, "pp": 1, "ep": 1}, options, listing.root)
        if found:
            with found_as(incomplete="rank-missing"):
                base.contiguous_ranks(found, world, listing.root, "consolidated.*.pth")
            stored = self._ranks(listing, [found[r] for r in range(world)], options.select)
            _check_alike(stored)
            where = str(listing.path(_PARAMS))
            stored.tensors = [meta_llama4.unfolded(t, params, where) for t in stored.tensors]
        else:
            whole = [(n, 0) for n, _ in listing.match(_WHOLE)]
            stored = base.read_files(self.name, listing, whole, Mesh())
        stored.companions = tuple(n for n in stored.companions if n not in _OF_FILES)
        with found_as(**dict.fromkeys(("conflict", "corrupt", "incomplete", "unsupported"), "params-json")):
            self._describe(stored, params, str(listing.path(_PARAMS)))
        return stored

    def _ranks(self, listing: Listing, names: Sequence[str], selected: str) -> base.StoredCheckpoint:
        carried, notes = base.companions(listing, names)
        mesh = Mesh(tp=len(names), etp=len(names))
        stored = base.StoredCheckpoint(self.name, listing.root, [], [], mesh, companions=carried, notes=notes)
        paths = [listing.path(name) for name in names]
        for rank, (path, file) in enumerate(zip(paths, read_each(read_torch, paths), strict=True)):
            stored.files.append(file.info)
            _, tensors, said = select(file.value, selected, str(path))
            mapping, note = strip_prefixes(tensors, str(path))
            notes += [n for n in (*said, note) if n and n not in notes]
            stored.tensors += [file.place(t, mapping[n], rank)._replace(rank=rank) for n, t in tensors.items()]
        return stored

    def _describe(self, stored: base.StoredCheckpoint, params: Mapping[str, Any], where: str) -> None:
        """Fill in the config and the dialect."""
        first = {t.name: t for t in stored.tensors if t.rank == 0}
        tp = stored.mesh.tp
        embedding, head = first.get(_EMBEDDING), first.get(_HEAD)
        if embedding is None or len(embedding.shape) != 2:
            raise IncompleteError(
                f"there is no matrix `{_EMBEDDING}` in the weights", where=str(stored.root), finding="incomplete"
            )
        dim = params.get("dim")
        by_columns = tp > 1 and dim == embedding.shape[1] * tp
        stored.dialect = f"{self.dialect}-{_BY_COLUMNS}" if by_columns else self.dialect
        tied = head is None or _bytes_of(head) == _bytes_of(embedding)
        rows = {
            "feed_forward": max((t.shape[0] * tp for t in first.values() if _is_gate(t)), default=0),
            "vocab": embedding.shape[0] * (1 if by_columns else tp),
        }
        dtypes = Counter(t.dtype for t in stored.tensors)
        dtype = DTYPES[max(dtypes, key=lambda d: dtypes[d])].numpy
        stored.native_config = {}
        if meta_llama4.is_llama4(params):
            held = meta_llama4.rows_of({n: t.shape for n, t in first.items()}, tp)
            stored.config, notes = meta_llama4.config_of(
                params, rows=held, vocab=rows["vocab"], dtype=dtype, where=where
            )
        else:
            stored.config, notes = config_of(params, rows=rows, dtype=dtype, tied=tied, where=where)
        stored.notes += notes
        self._check(stored, first, params, where)

    def _check(
        self, stored: base.StoredCheckpoint, first: Mapping[str, StoredTensor], params: Mapping[str, Any], where: str
    ) -> None:
        """Raises IncompleteError where the files are not all ranks, ConflictError where params.json says otherwise."""
        config, tp = config_fields(stored.config), stored.mesh.tp
        files = [str(f.place) for f in stored.files[:4]]
        query = config["num_attention_heads"] * config["head_dim"]
        groups = config["num_key_value_heads"]
        rows = {end: t.shape[0] for t in first.values() for end in _PROJECTIONS if t.name.endswith(end) and t.shape}
        held, key = rows.get(_QUERY, 0), rows.get(_KEY, 0)
        if fused := rows.get(_FUSED, 0):
            key = max(groups // tp, 1) * config["head_dim"]
            held = fused - 2 * key
        if held * tp != query:
            ranks = f": {query // held} files would hold them" if held and query % held == 0 else ""
            raise IncompleteError(
                f"the query projections of these files have {held * tp} rows, and {_PARAMS} says {query}{ranks}",
                where=[*files, where],
                hint="fetch the missing consolidated.*.pth, and the params.json of the same model",
                finding="rank-missing" if ranks else "",
            )
        if key * min(tp, groups) != groups * config["head_dim"]:
            raise ConflictError(
                f"the key projections of these files have {key * min(tp, groups)} rows, and {_PARAMS} says"
                f" {groups * config['head_dim']}: {groups} heads of {config['head_dim']}",
                where=[*files, where],
                hint="the files and params.json must be those of one model",
            )
        vocab, said = config["vocab_size"], params.get("vocab_size", -1)
        width = first[_EMBEDDING].shape[1] * (tp if stored.dialect != self.dialect else 1)
        if width != config["hidden_size"] or said not in (vocab, -1, None):
            raise ConflictError(
                f"the embedding of these files is {vocab} x {width}, and {_PARAMS} says"
                f" {vocab if said in (-1, None) else said} x {config['hidden_size']}",
                where=[*files, where],
                hint="the files and params.json must be those of one model",
            )

    def target_mesh(self, asked: Mesh, said: Mapping[str, int]) -> Mesh:
        if wrong := [f"--{k}-out {v}" for k, v in said.items() if k != "tp" and v != 1]:
            raise UsageError(f"{' '.join(wrong)} cannot be used with --to meta", hint="its files are cut by --tp-out")
        return Mesh(tp=asked.tp, etp=asked.tp)

    def write(self, request: base.WriteRequest) -> base.FileLayout:
        """``consolidated.NN.pth`` and ``params.json``. Raises what ``params_of`` raises."""
        files: list[base.OutFile] = []
        places: list[dict[str, tuple[int, int]]] = [{} for _ in range(request.mesh.world)]
        rank_files: list[list[int]] = [[] for _ in places]
        for rank in request.chosen:
            stem = f"consolidated.{rank:02d}"
            laid = lay_out_torch(
                {t.name: Hole(t.dtype, meta_llama4.folded(t.name, t.shape)) for t in request.ranks[rank]}, stem
            )
            rank_files[rank].append(len(files))
            places[rank] = {t.slot: (len(files), laid.offsets[t.name,]) for t in request.ranks[rank]}
            files.append(base.OutFile(f"{stem}.pth", laid.size, laid.literals, laid.checksums))
        params = indented(params_of(request.config))
        return base.FileLayout(files, places, [], rank_files, generated=((_PARAMS, params),), config={})


def _check_alike(stored: base.StoredCheckpoint) -> None:
    """Raises ConflictError where the ranks do not hold the same tensors in the same shapes."""
    first = {t.name: t for t in stored.tensors if t.rank == 0}
    names: dict[int, set[str]] = {}
    for t in stored.tensors:
        names.setdefault(t.rank, set()).add(t.name)
        own = first.get(t.name)
        if own is None or (own.dtype, own.shape) != (t.dtype, t.shape):
            here = f"{t.dtype} {list(t.shape)}"
            raise _unlike(stored, t, here, f"{own.dtype} {list(own.shape)}" if own is not None else "missing")
    for rank, held in names.items():
        if lost := first.keys() - held:
            raise _unlike(stored, first[min(lost)]._replace(rank=rank), "missing", "there")


def _unlike(stored: base.StoredCheckpoint, t: StoredTensor, here: str, there: str) -> ConflictError:
    return ConflictError(
        f"`{t.name}` of rank {t.rank} is {here}, and that of rank 0 is {there}",
        where=[str(stored.files[r].place) for r in (0, t.rank)],
        hint="the files must be those of one model, each complete",
        finding="ranks-differ",
    )


def _is_gate(tensor: StoredTensor) -> bool:
    return tensor.name.endswith(".w1.weight") and ".feed_forward." in tensor.name


def _bytes_of(tensor: StoredTensor) -> tuple[Any, ...]:
    return tensor._replace(name="")
