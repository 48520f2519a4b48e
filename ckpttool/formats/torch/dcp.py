"""torch.distributed.checkpoint (DCP), as FSDP2, HSDP, tensor parallelism, DDP and torchtitan write it.

    step-1000/.metadata       which box of which tensor lies where: the mesh of the trainer does not matter
    step-1000/__3_0.distcp    the chunks of rank 3, each a whole file of torch.save

and the safetensors of its HuggingFaceStorageWriter (``dcp_hf``). Source: torch/distributed/checkpoint of torch 2.13.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Any, Literal

from ckpttool.containers.pickle import opened, printable
from ckpttool.core.catalog import Catalog, Key, LogicalTensor, Piece, StoredTensor, logical_tensor, whole_tensor
from ckpttool.core.encodings import Encoding, Given
from ckpttool.core.files import DataFile
from ckpttool.core.geometry import whole
from ckpttool.core.mesh import Mesh
from ckpttool.core.optimizer_states import number_bytes
from ckpttool.core.words import some
from ckpttool.errors import CkptError, ConflictError, IncompleteError, UnsupportedError, found_as
from ckpttool.formats import base
from ckpttool.formats.torch.dcp_chunks import MAX_OBJECT, ChunkFiles, NotPlainError, plain_value
from ckpttool.formats.torch.dcp_hf import is_sharded, read_sharded
from ckpttool.formats.torch.dcp_metadata import DcpEntry, DcpTensor, Span, read_metadata
from ckpttool.formats.torch.dcp_names import Assigned, GroupParameters, assign, grouped
from ckpttool.formats.torch.dcp_place import METADATA, DcpSave, find
from ckpttool.formats.torch.dcp_write import write_save
from ckpttool.formats.torch.zero_files import list_of
from ckpttool.storage.listing import Listing
from ckpttool.storage.place import expect

_CUT = "omit it; --sharding-out sets the number of files"
_NAMES = "save it with torch's get_optimizer_state_dict, which names them; or omit the optimizer with --only model"


class DistributedCheckpoint:
    """Directories of torch.distributed.checkpoint."""

    name = "dcp"
    dialect = "hf"
    capabilities = base.Capabilities(
        components=("model", "master_weights", "optimizer", "ema"),
        optimizer_shards=True,
        states="torch",
        nested=True,
        views=True,
        namings=("transformers", "torchtitan", "torchtitan-0.2"),
        own_files=r".*\.distcp",
    )
    keeps_names: Literal[True] = True

    def detect(self, listing: Listing) -> int:
        try:
            return 2 * (is_sharded(listing) or find(listing) is not None)
        except CkptError:
            return 2  # there are several, or none of them is whole

    def read(self, listing: Listing, options: base.ReadOptions) -> base.StoredCheckpoint:
        """Raises IncompleteError (a rank's file or chunk is missing), CorruptError (the metadata and the files
        contradict each other), ConflictError (chunks overlap, several models), and what reading its pickles raises.
        """
        base.check_mesh(self.name, dict.fromkeys(("tp", "pp", "ep", "etp"), 1), options, listing.root)
        if is_sharded(listing):
            return read_sharded(self.name, listing)
        save = find(listing)
        if save is None:
            raise IncompleteError(
                "there is no save of torch.distributed.checkpoint here",
                where=str(listing.root),
                hint="give the directory with .metadata",
            )
        reading = _DcpReader(save)
        entries = reading.entries()
        groups = reading.groups(entries)
        assigned = assign(entries, options.select, reading.where, groups, wrapped=options.wrapped)
        tensors = {e.fqn: e.value for e in entries if isinstance(e.value, DcpTensor) and e.fqn in assigned.keys}
        catalog = Catalog(reading.files, reading.tensors(tensors, assigned.keys))
        objects = [(e, span) for e in entries if e.fqn not in tensors and (span := _alone(e.value)) is not None]
        gone = [e.path for e in entries if isinstance(e.value, DcpTensor) and e.value.shape and e.fqn not in tensors]
        lists = {path[:i] for path in gone for i, key in enumerate(path) if type(key) is int}
        broken = {e.fqn for e, _ in objects if e.fqn not in assigned.keys and _inside(e, lists)}
        found = reading.objects([(e, s) for e, s in objects if e.fqn not in broken], assigned, catalog)
        found.left += sorted(broken)
        training = found.training()
        left = training.left if training else ()
        said = [f"skipped, not plain data: {some(left)}"] if left else []
        carried, notes = base.companions(save.listing, [])
        refused: dict[str, CkptError] = {}
        if assigned.refused:
            why = UnsupportedError(
                f"nothing says whose state the optimizer has: {assigned.refused}", where=reading.where, hint=_NAMES
            )
            refused["optimizer"] = why
            said.append(f"the optimizer is not read: {why.what}")
        return base.StoredCheckpoint(
            self.name,
            save.listing.root,
            reading.files,
            [p.stored for t in catalog for p in (*t.pieces, *t.replicas)],
            Mesh(),
            "",
            config=save.config,
            companions=carried,
            recorded=catalog,
            notes=[*save.notes, *assigned.notes, *said, *notes],
            native=assigned.nesting._replace(
                numbers={e.fqn: e.value.dtype for e, _ in objects if isinstance(e.value, DcpTensor)},
                paths={e.fqn: e.path for e, _ in objects if grouped(e) is None},
                held=found.held,
                listed=frozenset(found.listed),
                named=any((g := grouped(e)) is not None and g.value == "param_names" for e, _ in objects),
            ),
            training=training,
            indexes=tuple([p.listing.path(name) for p in save.parts for name in p.metadata]),
            refused=refused,
        )

    def target_mesh(self, asked: Mesh, said: Mapping[str, int]) -> Mesh:
        return base.whole_mesh(said, f"{self.name}: dcp.load cuts its tensors for any mesh", hint=_CUT)

    def write(self, request: base.WriteRequest) -> base.FileLayout:
        """``--sharding-out`` files and their metadata. Raises UnsupportedError for a dtype."""
        return write_save(request)


class _DcpReader:
    """One save that is being read."""

    def __init__(self, save: DcpSave) -> None:
        self.save, self.where = save, str(save.listing.root)
        self.chunks = ChunkFiles()
        self.files = self.chunks.files

    def entries(self) -> list[DcpEntry]:
        """All values that were saved. Ranks that wrote their own metadata each say a part of a tensor."""
        out: dict[str, DcpEntry] = {}
        for part in self.save.parts:
            if not part.metadata:
                raise IncompleteError(
                    f"the save was not finished: {METADATA} is missing, which is written last",
                    where=str(part.listing.root),
                    hint="take an earlier save: `ckpttool inspect RUN --checkpoints` shows which are complete",
                    finding="save-unfinished",
                )
            mine: dict[str, DcpEntry] = {}
            for name in part.metadata:
                for e in read_metadata(part.listing.path(name), partial(self.chunks.number, part.listing)):
                    mine[e.fqn] = _joined(mine[e.fqn], e) if e.fqn in mine else e
            if twice := mine.keys() & out.keys():
                raise ConflictError(
                    f"{len(twice)} values are in two directories: `{printable(min(twice))}`",
                    where=[str(p.listing.root) for p in self.save.parts],
                    hint="these are different saves: give the directory of one",
                )
            out |= mine
        return list(out.values())

    def groups(self, entries: Sequence[DcpEntry]) -> dict[str, list[dict[int, str]]]:
        """Parameters of each group, by the prefix of an optimizer that numbers them: names, "" where none is said."""
        held: dict[tuple[str, str | int], dict[str, list[Any]]] = {}
        for e in entries:
            group, listed = grouped(e), e.path[-1] == "param_groups"
            wanted = listed or (group is not None and group.value in ("params", "param_names"))
            if not wanted or isinstance(e.value, DcpTensor):
                continue
            with opened(self.files[e.value[0]].place) as file:
                value = self.chunks.slice(file, e.fqn, e.value).value
            if group is not None and isinstance(value, list):
                held.setdefault(group[:2], {})[group.value] = value
            elif listed and isinstance(value, list):
                prefix = ".".join(map(str, e.path[:-1]))
                held |= {(prefix, i): g for i, g in enumerate(value) if isinstance(g, dict)}
        out: dict[str, list[dict[int, str]]] = {}
        for (prefix, _), said in held.items():
            numbers = [n for n in list_of(said.get("params")) if type(n) is int]
            if not numbers:
                continue
            names = list_of(said.get("param_names"))
            names = names if len(names) == len(numbers) and all(type(n) is str for n in names) else [""] * len(numbers)
            out.setdefault(prefix, []).append(dict(zip(numbers, names, strict=True)))
        return out

    def tensors(self, described: Mapping[str, DcpTensor], keys: Mapping[str, Key]) -> dict[Key, LogicalTensor]:
        """The tensors, of which the head of each chunk is read, file by file."""
        fqns = list(described)
        pieces: list[list[Piece | None]] = [[None] * len(described[f].chunks) for f in fqns]
        todo = sorted(
            (c.span, i, j) for i, f in enumerate(fqns) for j, c in enumerate(described[f].chunks) if c.box.volume
        )
        for number, group in groupby(todo, key=lambda item: item[0][0]):
            mine = list(group)
            with opened(self.files[number].place) as file:
                expect(file, [span[1] for span, _, _ in mine])
                for span, i, j in mine:
                    tensor = described[fqns[i]]
                    box = tensor.chunks[j].box
                    stored = self.chunks.chunk(file, fqns[i], keys[fqns[i]], span, tensor.dtype, box.shape)
                    pieces[i][j] = Piece(stored, whole(stored.shape), box)
        out = {}
        for i, fqn in enumerate(fqns):
            key, found = keys[fqn], [p for p in pieces[i] if p is not None]
            try:
                with found_as(incomplete="chunk-missing", conflict="chunk-overlap"):
                    out[key] = logical_tensor(key, described[fqn].shape, found, files=self.files)
            except CkptError as e:
                e.hint = f"{METADATA} and the files contradict each other: save the checkpoint again"
                raise
            out[key].dtype = described[fqn].dtype
        return out

    def objects(self, objects: Sequence[tuple[DcpEntry, Span]], assigned: Assigned, catalog: Catalog) -> _Objects:
        """Everything else that a trainer resumes from. Numbers that are state of a parameter become tensors of the
        catalog."""
        values: dict[str, Any] = {}
        """The plain values."""
        for number, group in groupby(sorted(objects, key=itemgetter(1)), key=lambda item: item[1][0]):
            with opened(self.files[number].place) as file:
                for e, span in group:
                    if span[2] <= MAX_OBJECT:
                        held = self.chunks.slice(file, e.fqn, span)
                        with suppress(NotPlainError):
                            values[e.fqn] = plain_value(held.value, file, held)
        found = _Objects(assigned, catalog)
        for e, span in objects:
            if e.fqn in values:
                found.add(e, values[e.fqn], self.files[span[0]])
            else:
                found.left.append(e.fqn)
        return found


def _inside(entry: DcpEntry, lists: Collection[tuple[str | int, ...]]) -> bool:
    """Whether a plain value is in one of these lists, which lack a tensor: torch cannot put the rest together."""
    path = entry.path
    if grouped(entry) is not None or path[-1] == "param_groups":
        return False
    return any(path[:i] in lists for i, key in enumerate(path) if type(key) is int)


def _alone(value: DcpTensor | Span) -> Span | None:
    """The place of an object, or of a tensor of one number; None for other tensors."""
    if not isinstance(value, DcpTensor):
        return value
    return value.chunks[0].span if value.shape == () and value.chunks else None


def _joined(first: DcpEntry, second: DcpEntry) -> DcpEntry:
    """A tensor that two ranks describe; a chunk that both have is replicated. Objects are those of the first."""
    a, b = first.value, second.value
    if not isinstance(a, DcpTensor) or not isinstance(b, DcpTensor):
        return first
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        raise ConflictError(
            f"two ranks say different things of `{printable(first.fqn)}`: {a.dtype} {list(a.shape)} and {b.dtype}"
            f" {list(b.shape)}",
            finding="ranks-differ",
        )
    known = {c.box for c in a.chunks}
    return first._replace(value=a._replace(chunks=[*a.chunks, *[c for c in b.chunks if c.box not in known]]))


class _Objects:
    """The values of a save that are not tensors: numbers of the optimizer, its groups, and plain values."""

    def __init__(self, assigned: Assigned, catalog: Catalog) -> None:
        self.assigned, self.catalog = assigned, catalog
        self.groups: dict[tuple[str, str | int], dict[str, Any]] = {}
        """Groups by prefix of the optimizer, and number (in flattened saves the parameter)."""
        self.listed: set[str] = set()
        """Prefixes of optimizers whose groups are one value."""
        self.held: list[GroupParameters] = []
        """The parameters of each group."""
        self.plain: dict[str, Any] = {}
        self.left: list[str] = []
        """Names of values that are left out: no plain data, or no number where one belongs."""

    def add(self, entry: DcpEntry, value: Any, info: DataFile) -> None:
        """Sort in a plain value: state of a parameter (it becomes a tensor), a field of a group, the list of all groups
        of an optimizer, or anything else. Groups of other models' optimizers are dropped. ``info``: the value's file.
        """
        key = self.assigned.keys.get(entry.fqn)
        group = grouped(entry)
        if key is not None:
            self._add_number(key, value, info)
        elif group is not None:
            if group.prefix not in self.assigned.others:
                self.groups.setdefault(group[:2], {})[group.value] = value
        elif entry.path[-1] == "param_groups" and isinstance(value, list):
            prefix = ".".join(map(str, entry.path[:-1]))
            self.groups |= {(prefix, i): g for i, g in enumerate(value) if isinstance(g, dict)}
            self.listed.add(prefix)
        else:
            self.plain[entry.fqn] = value

    def _add_number(self, key: Key, value: Any, info: DataFile) -> None:
        """Add a number to the catalog as a tensor, as torch's optimizers have it."""
        if type(value) not in (int, float):
            self.left.append(str(key))
            return
        try:
            dtype, data = number_bytes(value)
        except UnsupportedError:
            self.left.append(str(key))
            return
        encoding = Encoding("given", str(info.place))
        encoding.parts.append(Given(0, data.hex()))
        self.catalog.files.append(info._replace(encoding=encoding))
        stored = StoredTensor(key.name, dtype, (), len(self.catalog.files) - 1, 0, 0, None, *key[1:])
        self.catalog.tensors[key] = whole_tensor(stored, key)

    def training(self) -> base.TrainingState | None:
        """The groups and plain values, or None. Flat saves have a group for each parameter: equal ones are joined."""
        groups: list[base.ParamGroup] = []
        alike: dict[str, tuple[list[str], dict[str, Any], str]] = {}
        names, numbers = self.assigned.names, self.assigned.numbers
        for (prefix, which), values in self.groups.items():
            if isinstance(which, str) and not which.isdecimal():
                same = alike.setdefault(prefix + repr(sorted(values.items())), ([], values, prefix))
                same[0].append(names.get(which, which))
                continue
            params = [p for p in list_of(values.pop("params", None)) if isinstance(p, (int, str))]
            said = [n for n in list_of(values.pop("param_names", None)) if isinstance(n, str)]
            known = said if len(said) == len(params) else params
            named = [names.get(n, n) if isinstance(n, str) else numbers.get(n, "") for n in known]
            groups.append(base.ParamGroup(tuple([n for n in named if n]), values))
            self.held.append(GroupParameters(prefix, dict(zip(params, named, strict=True))))
        for parameters, values, prefix in alike.values():
            groups.append(base.ParamGroup(tuple(parameters), values))
            self.held.append(GroupParameters(prefix, {}))
        if not groups and not self.plain and not self.left:
            return None
        return base.TrainingState(tuple(groups), None, self.plain, tuple(self.left))
