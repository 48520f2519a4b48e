"""Rank-local safetensors that describe themselves, and anyone else's through ``--rank-pattern``.

One file per rank, ``rank-00003-of-00008.safetensors``. ``__metadata__["ckpttool"]`` is JSON::

    {"version": 1, "rank": 3, "mesh": {"tp": 8, ...}, "family": "llama", "naming": "hf", "fused": "",
     "tensors": {"model.layers.0.mlp.down_proj.weight":
                     {"shape": [4096, 11008], "boxes": [[[0, 0], [0, 4128], [4096, 1376]]]}}}

Each box is (start in the stored tensor, start in the logical tensor, extent), so reading needs neither flags nor a
family: geometry that is recorded can be checked. Model weights that a rank holds whole are not listed.

Files that hold more than model weights have version 2. Their other tensors are called ``master_weights/NAME`` or
``optimizer/NAME/exp_avg`` and are all listed, with ``component`` and ``state``. ``training``, in the first file that is
written, is what ``base.TrainingState`` says.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from json.encoder import encode_basestring
from math import lcm, prod
from typing import Any, NamedTuple

from ckpttool.containers.safetensors import read_header
from ckpttool.core.catalog import (
    COMPONENTS,
    Catalog,
    Key,
    LogicalTensor,
    Pad,
    Piece,
    RankTensor,
    StoredTensor,
    logical_tensor,
)
from ckpttool.core.files import DataFile, Place
from ckpttool.core.geometry import Box, uncovered, whole
from ckpttool.core.mesh import Mesh
from ckpttool.errors import ConflictError, CorruptError, IncompleteError, UnsupportedError, UsageError
from ckpttool.formats import base
from ckpttool.storage.listing import Listing
from ckpttool.storage.place import read_each, walk

_OURS = r"rank-(?P<rank>\d{5})-of-(?P<world>\d{5})\.safetensors"
_COMMON = (
    r"(?:[\w.-]*?[-_.])?rank[-_]?(?P<rank>\d+)\.safetensors",
    r"(?:[\w.-]*?[-_.])?(?:tp[-_]?(?:rank[-_]?)?|mp[-_]?rank[-_]?)(?P<tp>\d+)(?:[-_]pp[-_]?(?P<pp>\d+))?\.safetensors",
)
"""Names that people give to rank files, tried when there is no --rank-pattern."""


class RankFiles:
    """One file per rank."""

    name = "ranks"
    dialect = ""
    capabilities = base.Capabilities(meshes="any", records_shapes=True, ragged_experts=True, components=COMPONENTS)

    def detect(self, listing: Listing) -> int:
        if listing.single:
            return 0
        if listing.match(_OURS):
            return 2
        return int(any(listing.match(p) for p in _COMMON))

    def read(self, listing: Listing, options: base.ReadOptions) -> base.StoredCheckpoint:
        if not options.rank_pattern and (ours := listing.match(_OURS)):
            worlds = {int(m["world"]) for _, m in ours}
            if len(worlds) > 1:
                raise ConflictError(
                    f"rank files of {len(worlds)} different checkpoints lie in one directory"
                    f" (of {', '.join(map(str, sorted(worlds)))})",
                    where=str(listing.root),
                    hint="move all but one set away",
                )
            return self._described(listing, options, {int(m["rank"]): n for n, m in ours}, worlds.pop())
        return self._foreign(listing, options)

    def _described(
        self, listing: Listing, options: base.ReadOptions, names: dict[int, str], world: int
    ) -> base.StoredCheckpoint:
        base.contiguous_ranks(names, world, listing.root, "rank-NNNNN-of-" + f"{world:05d}.safetensors")
        files: list[DataFile] = []
        tensors: list[StoredTensor] = []
        groups: _Groups = {}
        training: base.TrainingState | None = None
        cuts: dict[Any, _RankCut] = {}
        rec: dict[str, Any] = {}
        metadata: dict[str, str] = {}
        mesh = Mesh()
        places = [listing.path(names[r]) for r in range(world)]
        for r, head in enumerate(read_each(read_header, places, range(world), range(world))):
            mine = _record(head.metadata, head.file.place, r)
            recorded = mine.pop("tensors")  # not kept: it is larger than what becomes of it
            said = _training(mine.pop("training", None), head.file.place)
            training = training or said
            if not r:
                rec, mesh = mine, Mesh.from_json(mine["mesh"])
                metadata = {k: v for k, v in head.metadata.items() if k != "ckpttool"}
                if mesh.world != world:
                    raise ConflictError(
                        f"the files record {mesh}, that is {mesh.world} ranks, not {world}", where=str(listing.root)
                    )
                base.check_mesh(
                    "ranks", {k: getattr(mesh, k) for k in ("tp", "pp", "ep", "etp")}, options, listing.root
                )
            if mine["mesh"] != rec["mesh"] or mine.get("family") != rec.get("family"):
                raise ConflictError(
                    f"rank {r} was written for another mesh than rank 0",
                    where=[str(files[0].place), str(head.file.place)],
                    hint="the files belong to different checkpoints",
                )
            files.append(head.file)
            for t in head.tensors:
                tensors.append(_add(groups, t, recorded.get(t.name), head.file.place, cuts))
        logical: dict[Key, LogicalTensor] = {}
        for key, (shape, pieces, pads) in groups.items():
            if not pieces or prod(shape) == 0:
                stored = pieces[0].stored if pieces else next(p.stored for p in pads)
                logical[key] = LogicalTensor(key, stored.dtype, shape, ())
            else:
                logical[key] = logical_tensor(key, shape, pieces, pads, files=files)
        carried, notes = base.companions(listing, names.values())
        return base.StoredCheckpoint(
            self.name,
            listing.root,
            files,
            tensors,
            mesh,
            rec.get("naming") or "hf",
            rec.get("fused", ""),
            listing.json("config.json"),
            carried,
            rec.get("family", ""),
            Catalog(files, logical),
            notes=notes,
            metadata=metadata,
            training=training,
        )

    def _foreign(self, listing: Listing, options: base.ReadOptions) -> base.StoredCheckpoint:
        found, said_by_names, shown = _find(listing, options)
        ranks = {tuple(c.items()) for c, _, _ in found}
        mesh, notes = _infer(len(ranks), said_by_names, options, listing.root, shown)
        if options.from_flags() and {c.get("rank") for c, _, _ in found} == set(range(1, mesh.world + 1)):
            notes.append("the ranks are numbered from 1")
            found = [({**c, "rank": c["rank"] - 1}, p, n) for c, p, n in found]
        names: dict[int, dict[int, str]] = {}
        for coords, part, name in found:
            rank = coords["rank"] if "rank" in coords else mesh.rank_of(**coords)
            other = names.setdefault(rank, {}).setdefault(part, name)
            if other != name:
                raise ConflictError(
                    f"two files are rank {rank}: {other} and {name}",
                    where=str(listing.root),
                    hint="put every varying number of the names in --rank-pattern:"
                    " {tp}, {pp}, {ep}, {etp}, {rank}, or {part} for files of one rank",
                )
        fields = found[0][0].keys()
        silent = [d for d in ("pp", "ep", "tp") if getattr(mesh, d) > 1 and d not in fields]
        seats = {tuple(getattr(c, f) for f in fields) for c in mesh.all_coords()}
        if len(seats) < mesh.world and silent:
            raise ConflictError(
                f"{mesh} has ranks that differ in {' and '.join(silent)}, the file names do not tell them apart",
                where=f"{listing.root}/{shown}",
                hint=f"drop --{silent[0]}, or show where the names have it: --rank-pattern with {{{silent[0]}}}",
            )
        base.contiguous_ranks(names, mesh.world, listing.root, shown)
        named = [(names[r][p], r) for r in range(mesh.world) for p in sorted(names[r])]
        stored = base.read_files(self.name, listing, named, mesh)
        stored.notes = notes + stored.notes
        return stored

    def target_mesh(self, asked: Mesh, said: Mapping[str, int]) -> Mesh:
        return asked

    def write(self, request: base.WriteRequest) -> base.FileLayout:
        training, notes = _training_record(request.training)
        layout = base.build_files(self._files(request, training), request.mesh.world, _file_name)
        return layout._replace(notes=notes)

    def _files(
        self, request: base.WriteRequest, training: dict[str, Any]
    ) -> Iterator[tuple[str, int, Sequence[RankTensor], dict[str, str]]]:
        """One rank after the other: what is recorded of a large rank takes as much memory as its tensors' names."""
        world = request.mesh.world
        texts: dict[tuple[Any, ...], tuple[str, str]] = {}
        for r in request.chosen:
            own = training if r == request.chosen[0] else {}
            more, entries = bool(own), []
            for t in request.ranks[r]:
                if not _is_whole(t):
                    entries.append(_box_record(t, texts))
                    more = more or t.component != "model"
            record = _json(
                {
                    "version": 2 if more else 1,
                    "rank": r,
                    "mesh": request.mesh.to_json(),
                    "family": request.family,
                    "naming": request.dialect,
                    "fused": request.fused,
                    **({"training": own} if own else {}),
                    "tensors": {},
                }
            )
            meta = {"format": "pt", "ckpttool": f"{record[:-2]}{','.join(entries)}}}}}"}
            del entries
            yield f"rank-{r:05d}-of-{world:05d}.safetensors", r, request.ranks[r], meta


def _file_name(t: RankTensor) -> str:
    return t.name if t.component == "model" else str(Key(t.name, t.component, t.state))


def _is_whole(t: RankTensor) -> bool:
    return (
        t.component == "model"
        and t.shape == t.whole
        and t.key == t.name
        and len(t.boxes) == 1
        and t.boxes[0][0] == t.boxes[0][1]
    )


def _box_record(t: RankTensor, texts: dict[tuple[Any, ...], tuple[str, str]]) -> str:
    """The entry of a tensor as JSON. ``texts`` has what is the same for all tensors that are cut alike."""
    known = texts.get((t.whole, t.boxes))
    if known is None:
        boxes = [[a.start, b.start, a.shape] for a, b in t.boxes]
        known = texts[t.whole, t.boxes] = (f'"shape":{_json(t.whole)},', f'"boxes":{_json(boxes)}}}')
    name = _file_name(t)
    part = f'"component":{_json(t.component)},' if t.component != "model" else ""
    state = f'"state":{_json(t.state)},' if t.state else ""
    key = f'"key":{_json(t.key)},' if t.key != name else ""
    return f"{encode_basestring(name)}:{{{part}{state}{known[0]}{key}{known[1]}"


_MOST = 32 << 20
"""Characters of what is recorded for a trainer. Readers of safetensors take headers of up to 100 MB."""


def _training_record(training: base.TrainingState | None) -> tuple[dict[str, Any], list[str]]:
    """The values that JSON can hold, and notes about the rest."""
    if training is None:
        return {}, []
    left = list(training.left)
    groups = []
    for n, group in enumerate(training.groups):
        values = {k: v for k, v in group.values.items() if _is_plain(v)}
        left += [f"param_groups.{n}.{k}" for k in group.values if k not in values]
        groups.append({"parameters": group.parameters, "values": values})
    plain = {k: v for k, v in training.plain.items() if _is_plain(v)}
    left += [k for k in training.plain if k not in plain]
    record = {"groups": groups, "step": training.step, "plain": plain, "left": left}
    if len(_json(record)) > _MOST:
        return {}, ["param_groups and the state of the trainer are larger than a header holds, and are left out"]
    notes = [f"skipped, not plain data: {', '.join(left)}"] if left != [*training.left] else []
    return record, notes


def _is_plain(value: object) -> bool:
    """Whether JSON gives it back, tuples as lists."""
    if isinstance(value, dict):
        return all(isinstance(k, str) and _is_plain(v) for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


def _training(rec: Any, path: Place) -> base.TrainingState | None:
    """The inverse. Raises CorruptError."""
    if rec is None:
        return None
    try:
        groups = tuple([base.ParamGroup(tuple(map(_text, g["parameters"])), dict(g["values"])) for g in rec["groups"]])
        step = rec["step"]
        if step is not None and type(step) is not int:
            raise TypeError
        return base.TrainingState(groups, step, dict(rec["plain"]), tuple(map(_text, rec["left"])))
    except (KeyError, TypeError, ValueError):
        raise CorruptError("what the `ckpttool` metadata says for a trainer is not valid", where=str(path)) from None


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def _record(metadata: Mapping[str, str], path: Place, rank: int) -> dict[str, Any]:
    text = metadata.get("ckpttool")
    if text is None:
        raise IncompleteError(
            "the file has the name of a self-describing rank file but no `ckpttool` metadata",
            where=str(path),
            hint="read it with --rank-pattern and --tp",
        )
    try:
        rec = json.loads(text)
        version = rec["version"]
        Mesh.from_json(rec["mesh"])
        if not isinstance(rec["tensors"], dict):
            raise TypeError
    except (ValueError, KeyError, TypeError, UsageError, RecursionError):
        raise CorruptError("the `ckpttool` metadata is not valid", where=str(path)) from None
    if version not in (1, 2):
        raise UnsupportedError(f"the file was written by a newer ckpttool (version {version})", where=str(path))
    if rec["rank"] != rank:
        raise ConflictError(f"the file is named rank {rank} but records rank {rec['rank']}", where=str(path))
    out: dict[str, Any] = rec
    return out


class _RankCut(NamedTuple):
    """The share of a tensor on a rank; one object for all tensors that it holds alike."""

    shape: tuple[int, ...]
    """Shape of the logical tensor."""
    boxes: tuple[tuple[Box, Box], ...]
    """(box in the stored tensor, box in the logical tensor)."""
    pads: tuple[Box, ...]
    """The rest of the stored tensor."""


_Groups = dict[Key, tuple[tuple[int, ...], list[Piece], list[Pad]]]
"""Shape, pieces and padding of each logical tensor."""


def _add(
    groups: _Groups, t: StoredTensor, rec: dict[str, Any] | None, path: Place, cuts: dict[Any, _RankCut]
) -> StoredTensor:
    """Add what one rank's record says about one stored tensor, which is returned with its component and state."""
    if rec is None:
        box = whole(t.shape)
        key, cut = Key(t.name), _RankCut(t.shape, ((box, box),), ())
    else:
        try:
            key = _key(rec.get("key", t.name), rec)
            if key.component != "model":
                own = _key(t.name, rec)
                t = t._replace(name=own.name, component=own.component, state=own.state)
            shape = tuple(rec["shape"])
            boxes = tuple([(tuple(a), tuple(b), tuple(size)) for a, b, size in rec["boxes"]])
            known = cuts.get((t.shape, shape, boxes))
            if known is None:
                if any(type(n) is not int for n in shape):
                    raise TypeError
                known = cuts[t.shape, shape, boxes] = _cut(t, shape, boxes, path)
            cut = known  # with sizes that are integers, also where this record has an equal 8.0
        except (AttributeError, KeyError, TypeError, ValueError):
            raise CorruptError(f"the record of tensor `{t.name}` is not valid", where=str(path)) from None
    group = groups.get(key)
    if group is None:
        group = groups[key] = (cut.shape, [], [])
    if group[0] != cut.shape:
        raise ConflictError(
            f"tensor `{key}` is {list(cut.shape)} by one rank's record and {list(group[0])} by another's",
            where=str(path),
        )
    group[1].extend([Piece(t, inner, outer) for inner, outer in cut.boxes])
    group[2].extend([Pad(t, gap) for gap in cut.pads])
    return t


def _key(text: Any, rec: Mapping[str, Any]) -> Key:
    """The key that ``str(Key)`` stands for, given the record with its component and state. Raises ValueError,
    TypeError."""
    component, state = rec.get("component", "model"), rec.get("state", "")
    if not isinstance(text, str) or not isinstance(state, str):
        raise TypeError
    if component not in COMPONENTS or (state and component == "model"):
        raise ValueError
    key = Key(text, component, state)
    if component != "model":
        key = key._replace(name=text.removeprefix(f"{component}/").removesuffix(f"/{state}" if state else ""))
    if str(key) != text or not key.name:
        raise ValueError
    return key


def _cut(
    t: StoredTensor,
    shape: tuple[int, ...],
    boxes: Iterable[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]],
    path: Place,
) -> _RankCut:
    """The boxes of a record: (first element in the stored tensor, first in the logical one, size) of each box.

    Raises CorruptError for what cannot be, and TypeError or ValueError for what are no sizes.
    """
    out = []
    for a, b, size in boxes:
        inner = Box(a, tuple(x + n for x, n in zip(a, size, strict=True)))
        outer = Box(b, tuple(x + n for x, n in zip(b, size, strict=True)))
        if (
            len(a) != len(t.shape)
            or not whole(t.shape).contains(inner)
            or len(shape) != len(t.shape)
            or not whole(shape).contains(outer)
            or any(type(n) is not int or n < 0 for n in (*a, *b, *size))
        ):
            raise CorruptError(
                f"tensor `{t.name}` {list(t.shape)} records the box {outer} of {list(shape)}, which cannot be",
                where=str(path),
            )
        out.append((inner, outer))
    held = [inner for inner, _ in out]
    pads = []
    while (gap := uncovered(t.shape, held)) is not None:
        held.append(gap)
        if not any(a and b == n for a, b, n in zip(gap.start, gap.stop, t.shape, strict=True)) and out:
            raise CorruptError(
                f"tensor `{t.name}` {list(t.shape)} records that {gap} belongs to no tensor; padding is at an end",
                where=str(path),
            )
        pads.append(gap)
    return _RankCut(shape, tuple(out), tuple(pads))


_FIELD = re.compile(r"\{(rank|tp|pp|ep|etp|part)(?::[^{}]*)?\}|\*")


def rank_regex(pattern: str) -> str:
    """The regular expression of a --rank-pattern. Raises UsageError when it has no coordinate."""
    out, at, seen = [], 0, set()
    for m in _FIELD.finditer(pattern):
        out.append(re.escape(pattern[at : m.start()]))
        at = m.end()
        if m[1] is None:
            out.append("[^/]*")
        elif m[1] in seen:
            out.append(rf"0*(?P={m[1]})")
        else:
            seen.add(m[1])
            out.append(rf"(?P<{m[1]}>\d+)")
    out.append(re.escape(pattern[at:]))
    if not seen - {"part"}:
        raise UsageError(
            f"--rank-pattern `{pattern}` names no coordinate",
            hint="for example 'model_{rank}.safetensors' or 'tp{tp:02d}/pp{pp}.safetensors'",
        )
    return "".join(out)


def _find(
    listing: Listing, options: base.ReadOptions
) -> tuple[list[tuple[dict[str, int], int, str]], dict[str, int], str]:
    """(coordinates, part, file) of all rank files, the sizes that the coordinates imply, the pattern for messages."""
    if options.rank_pattern:
        patterns = [rank_regex(options.rank_pattern)]
        shown = options.rank_pattern
        names = list(listing.names)
        if "/" in options.rank_pattern:
            names = list(walk(listing.root))
    else:
        patterns, shown, names = list(_COMMON), "*rank*.safetensors", list(listing.names)
    for pattern in patterns:
        rx = re.compile(pattern + r"\Z")
        hits = []
        for n in sorted(names):
            if m := rx.match(n):
                coords = {k: int(v) for k, v in m.groupdict().items() if v is not None}
                hits.append((coords, coords.pop("part", 0), n))
        if hits:
            named = [k for k in hits[0][0] if k != "rank"]
            sizes = {k: 1 + max(c.get(k, 0) for c, _, _ in hits) for k in named}
            return hits, sizes, shown if options.rank_pattern else re.sub(r"\d+", "*", hits[0][2])
    if options.from_flags() and not options.rank_pattern and (numbered := _numbered(listing)):
        return [({"rank": r}, 0, n) for r, n in numbered.items()], {}, "*{rank}*.safetensors"
    files = listing.safetensors()
    like = re.sub(r"\d+(?=\D*\Z)", "{rank}", files[0]) if files else "model_{rank}.safetensors"
    raise IncompleteError(
        f"no file matches the rank pattern `{shown}`",
        where=[str(listing.root), f"files: {', '.join(files[:4]) or 'none'}{' ...' if len(files) > 4 else ''}"],
        hint=f"give the names with --rank-pattern, for example '{like}'",
    )


def _numbered(listing: Listing) -> dict[int, str]:
    """Files that differ in one number, which goes from 0 (or 1) without a gap; {} when there is anything else."""
    names = listing.safetensors()
    found = {m[2]: (m[1], m[3], n) for n in names if (m := re.fullmatch(r"(.*?)(\d+)(\D*)\.safetensors", n))}
    first = 0 if any(int(k) == 0 for k in found) else 1
    out = {int(k) - first: n for k, (_, _, n) in found.items()}
    alike = len({(a, b) for a, b, _ in found.values()}) == 1 and len(found) == len(names)
    return dict(sorted(out.items())) if alike and out.keys() == set(range(len(names))) else {}


def _infer(
    count: int, named: dict[str, int], options: base.ReadOptions, root: Place, shown: str
) -> tuple[Mesh, list[str]]:
    """The source mesh from flags, file names and their number; what was inferred is noted."""
    base.check_mesh(f"file names {shown}", named, options, root)
    said = {**named, **options.from_flags()}
    notes = []
    if not said:
        said = {"tp": count}
        notes.append(f"{count} rank files and no sizes given: taken as tp {count}")
    tp, pp, ep = said.get("tp", 1), said.get("pp", 1), said.get("ep", 1)
    etp = said.get("etp")
    if etp is None:
        options_etp = [tp, 1] if ep > 1 else [tp]
        etp = next((e for e in options_etp if lcm(tp, ep * e) * pp == count), tp)
        if ep > 1:
            notes.append(f"etp {etp} follows from {count} rank files")
    mesh = Mesh(tp, pp, ep, etp, options.layout)
    if mesh.world != count and not named:
        raise ConflictError(
            f"{mesh} needs {mesh.world} rank files, there are {count}",
            where=f"{root}/{shown}",
            hint=f"--tp {count}?" if set(said) <= {"tp"} else "check --tp, --pp, --ep and --etp",
        )
    return mesh, notes
