"""What every format gives and takes."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from ckpttool.catalog import Catalog, DataFile, FlatShard, Key, RankTensor, StoredTensor
from ckpttool.errors import ConflictError, CorruptError, IncompleteError, UsageError
from ckpttool.formats.safetensors import layout_file, read_header, tensor_bytes
from ckpttool.mesh import Mesh

COMPANION_LIMIT = 64 << 20
"""Bytes; larger files beside a checkpoint that are not its tensors are left where they are, and said so."""

_WEIGHTS = (
    *(".safetensors", ".bin", ".pt", ".pth", ".gguf", ".ckpt", ".onnx", ".h5"),
    *(".pdparams", ".pdopt", ".pdckpt", ".pdtensor", ".pd", ".distcp"),
)


@dataclass(frozen=True, slots=True)
class Listing:
    """A source directory (or single file), listed once."""

    root: Path
    names: tuple[str, ...]
    """Plain files directly in it, sorted by natural order."""
    single: str = ""
    """The file that SRC names, when it is a weight file or an index and not a directory."""

    def path(self, name: str) -> Path:
        return self.root / name

    def safetensors(self) -> list[str]:
        return [n for n in self.names if n.endswith(".safetensors")]

    def match(self, pattern: str) -> list[tuple[str, re.Match[str]]]:
        """Files whose whole name the regular expression matches."""
        rx = re.compile(pattern + r"\Z")
        return [(n, m) for n in self.names if (m := rx.match(n))]

    def json(self, name: str) -> dict[str, Any]:
        """A JSON object beside the weights; {} when there is none. Raises CorruptError when it is not valid."""
        if name not in self.names:
            return {}
        try:
            data = json.loads(self.path(name).read_bytes())
        except (OSError, ValueError, RecursionError) as e:
            raise CorruptError(f"{name} is not valid JSON: {e}", where=str(self.path(name))) from None
        if not isinstance(data, dict):
            raise CorruptError(f"{name} is not a JSON object", where=str(self.path(name)))
        return data


def natural(name: str) -> list[Any]:
    """Sort key with numbers as numbers (strings and numbers alternate, so keys always compare)."""
    return [int(p) if i % 2 else p for i, p in enumerate(re.split(r"(\d+)", name))]


def list_source(path: Path) -> Listing:
    """List SRC. Raises UsageError when it does not exist."""
    if path.is_file():
        try:
            siblings = _files(path.parent)
        except OSError:
            siblings = [path.name]
        index = path.name.endswith(".index.json")
        names = [n for n in siblings if index or n == path.name or not n.endswith(_WEIGHTS)]
        return Listing(path.parent, tuple(sorted(names, key=natural)), path.name)
    if not path.exists():
        raise UsageError("the source does not exist", where=str(path), hint=_near(path))
    try:
        return Listing(path, tuple(sorted(_files(path), key=natural)))
    except OSError as e:
        raise UsageError(f"the source cannot be listed: {e.strerror}", where=str(path)) from None


def _files(path: Path) -> list[str]:
    with os.scandir(path) as it:
        return [e.name for e in it if e.is_file()]


def _near(path: Path) -> str | None:
    import difflib

    parent = path.parent
    if not parent.is_dir():
        return f"{parent} does not exist either"
    close = difflib.get_close_matches(path.name, [p.name for p in parent.iterdir()], n=1)
    return f"did you mean {parent / close[0]}?" if close else None


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """What the command line says about a source; None is "not said"."""

    tp: int | None = None
    pp: int | None = None
    ep: int | None = None
    etp: int | None = None
    layout: tuple[int, ...] = ()
    rank_pattern: str = ""
    sharding: int | None = None
    more: tuple[Path, ...] = ()
    """Further directories of the same save, which was spread over nodes."""
    raw: bool = False
    """Names as they are in the files, all of them model weights: what Paddle's own merge of flex checkpoints does."""

    def said(self) -> dict[str, int]:
        return {k: v for k in ("tp", "pp", "ep", "etp") if (v := getattr(self, k)) is not None}


@dataclass(frozen=True, slots=True)
class OpenOptions:
    """What a caller says about a source; everything has a default that means "read it from the checkpoint"."""

    format: str = ""
    mesh: ReadOptions = field(default_factory=ReadOptions)
    family: str = ""
    replicate: Sequence[str] = ()
    split: Sequence[str] = ()


@dataclass(slots=True)
class StoredCheckpoint:
    """What a format's ``read`` returns: headers turned into stored tensors."""

    format: str
    root: Path
    files: list[DataFile]
    tensors: list[StoredTensor]
    mesh: Mesh
    naming: str = "hf"
    fused: str = ""
    """``fuse`` or ``unfuse`` when the family's fusions were applied on top of the naming."""
    config: dict[str, Any] = field(default_factory=dict)
    companions: tuple[str, ...] = ()
    family: str = ""
    """Recorded by the format; "" leaves it to config.json."""
    recorded: Catalog | None = None
    """The catalog, when the files themselves say which box each tensor is."""
    whole: tuple[str, ...] = ()
    """Patterns of tensors that these files do not cut, whatever the family's rules say."""
    native_config: dict[str, Any] = field(default_factory=dict)
    """config.json as it is, where ``config`` is a translation into Hugging Face's fields."""
    notes: list[str] = field(default_factory=list)
    metadata: dict[str, str] = field(default_factory=dict)
    shards: list[tuple[FlatShard, ...]] = field(default_factory=list)
    """What the stored tensors with ``file == IN_SHARDS`` consist of."""
    dtypes: dict[Key, str] = field(default_factory=dict)
    """Of tensors that are derived from elements of another dtype: model weights that are rounded master weights."""
    cut: dict[str, Mesh] = field(default_factory=dict)
    """Of components whose tensors are those of ranks, although ``mesh`` says that the others are whole."""
    sharding: int = 1
    """Ranks that share the optimizer state of one model-parallel rank."""
    native: Any = None
    """What the format's own writer wants to know again (names of parameters in the optimizer's files, ...)."""


@dataclass(slots=True)
class WriteRequest:
    """Everything a format needs to say what it will write."""

    ranks: list[list[RankTensor]]
    chosen: tuple[int, ...]
    """Ranks to write."""
    mesh: Mesh
    family: str
    naming: str
    fused: str
    config: dict[str, Any]
    dtype: str
    """Cast target (safetensors name) or ""."""
    max_shard_size: int | None
    native_config: dict[str, Any]
    """The source's own config when it has this format and fields of its own, else {}."""
    asked: Mesh = field(default_factory=Mesh)
    """What the flags asked for; a format of whole tensors has ``mesh`` 1 and makes so many files of it."""
    sharding: int = 1
    """Ranks that share the optimizer state of one model-parallel rank (--sharding-out)."""
    sharding_version: str = ""
    """``v1``, ``v2`` or "" (not said)."""
    version: str = ""
    """Of the software that shall read it (--target), or ""."""
    native: Any = None
    """``native`` of the source, where its format is of the same kin."""
    source_format: str = ""
    companions: tuple[Path, ...] = ()
    """Small files of the source that may be carried."""


class Habits(NamedTuple):
    """How a format cuts, where formats differ."""

    vocab_multiple: int = 1
    """The padded vocabulary is a multiple of this."""
    pad_vocab: bool = True
    """False: a vocabulary that does not divide is refused."""
    ragged_experts: bool = False
    """True: ranks may hold different numbers of experts."""
    shards: bool = False
    """True: the tensors of a rank may be shared out to several files."""
    local_layers: bool = False
    """Layers are numbered from 0 in every pipeline stage."""
    whole: tuple[str, ...] = ()
    """Patterns of tensors that are not cut, whatever the family's rules say."""
    components: tuple[str, ...] = ("model",)
    """What the format can hold; other components of a source are left out and said so."""
    targets: tuple[str, ...] = ()
    """What --target may say, the default first."""
    optimizer_shards: bool = False
    """Optimizer state may be shared out over --sharding-out ranks."""
    spread: bool = False
    """A save may lie in several directories (--also), each written by another node."""
    fp32_masters: str = "kept"
    """Of parameters that are float32 themselves, a master weight is ``added``, ``dropped``, or ``kept`` as it is."""
    keeps: bool = False
    """What comes in this format stays in it unless --to says otherwise."""


class OutFile(NamedTuple):
    """A file that will be written."""

    name: str
    size: int
    literals: tuple[tuple[int, bytes], ...]


class Skeleton(NamedTuple):
    """All files of a target, and where each stored tensor goes."""

    files: list[OutFile]
    places: list[dict[str, tuple[int, int]]]
    """Per rank: ``RankTensor.slot`` -> (file, byte offset)."""
    notes: list[str]
    rank_files: list[list[int]]
    ranks: list[list[RankTensor]] | None = None
    """What the files hold, where the format cuts further than the mesh does; None is ``WriteRequest.ranks``."""
    small: tuple[tuple[str, bytes], ...] = ()
    """Small files of the format's own beside them; they replace companions of the same name."""
    left: tuple[str, ...] = ()
    """Companions (file names) that are not valid in the target and are left out."""
    beside: tuple[Path, ...] = ()
    """Files that the format carries over as they are, of any size."""


class Format(Protocol):
    """One checkpoint format."""

    name: str
    about: str
    sharded: bool
    """Holds one set of tensors per rank; otherwise only whole tensors."""
    habits: Habits

    def detect(self, listing: Listing) -> int:
        """How surely the files are this format, by names and small JSON only.

        0: they are not. 1: their names fit, but others use such names too. 2: names or fields that are its own.
        """

    def read(self, listing: Listing, options: ReadOptions) -> StoredCheckpoint:
        """Index the headers."""

    def naming(self) -> str:
        """The family naming that a target in this format uses."""

    def target_mesh(self, asked: Mesh, said: Mapping[str, int]) -> Mesh:
        """The mesh that this target will have when ``asked`` for; ``said`` are the sizes that a flag named."""

    def write(self, request: WriteRequest) -> Skeleton:
        """Name the files, their exact sizes and headers; ``request.config`` may be replaced by the format's own."""


@runtime_checkable
class Turning(Protocol):
    """A format whose files hold some model weights the other way round than their naming says."""

    def turned(self, name: str, ndim: int, version: str, prefix: str, config: Mapping[str, Any]) -> bool:
        """Whether the files for ``version`` (--target) hold this model weight with its two axes exchanged."""


def read_files(
    listing: Listing, names: Iterable[tuple[str, int]]
) -> tuple[list[DataFile], list[StoredTensor], list[dict[str, str]]]:
    """Headers of (file name, rank) pairs, in order: files, stored tensors, metadata of each file."""
    files: list[DataFile] = []
    tensors: list[StoredTensor] = []
    metadata = []
    for name, rank in names:
        head = read_header(listing.path(name), len(files), rank)
        files.append(head.file)
        tensors += head.tensors
        metadata.append(head.metadata)
    return files, tensors, metadata


def companions(listing: Listing, weights: Iterable[str]) -> tuple[tuple[str, ...], list[str]]:
    """Small files that belong to the model but hold no tensors; and a note about those too large to carry."""
    skip = set(weights)
    keep, notes = [], []
    if listing.single.endswith(".safetensors"):
        return (), []
    for name in listing.names:
        if name in skip or name == "config.json" or name.startswith("."):
            continue
        if name.endswith((*_WEIGHTS, ".index.json")) or name == "ckpttool.manifest.json":
            continue
        size = listing.path(name).stat().st_size
        if size > COMPANION_LIMIT:
            notes.append(f"{name} ({size:,} bytes) is not carried along: larger than {COMPANION_LIMIT >> 20} MiB")
        else:
            keep.append(name)
    return tuple(keep), notes


def check_mesh(format_name: str, read: Mapping[str, int], options: ReadOptions, where: Path) -> None:
    """Flags that contradict what the files say are an error."""
    for name, said in options.said().items():
        if name in read and read[name] != said:
            raise ConflictError(
                f"--{name} {said} contradicts the checkpoint, which is {name} {read[name]} ({format_name})",
                where=str(where),
                hint=f"leave --{name} away: it is read from the checkpoint",
            )


def contiguous_ranks(found: Mapping[int, Any], world: int, where: Path, naming: str) -> None:
    """Every rank 0..world-1 must have a file. Raises IncompleteError naming those missing."""
    missing = [r for r in range(world) if r not in found]
    if missing:
        shown = ", ".join(map(str, missing[:8])) + (" ..." if len(missing) > 8 else "")
        raise IncompleteError(
            f"{len(missing)} of {world} rank files are missing: rank {shown}",
            where=f"{where}/{naming}",
            hint="copy the missing files beside the others",
        )
    extra = [r for r in found if r >= world]
    if extra:
        raise ConflictError(
            f"there are files of rank {max(extra)}, but the sizes given make only {world} ranks",
            where=f"{where}/{naming}",
            hint="check --tp, --pp, --ep and --etp of the source",
        )


def fill_files(tensors: Sequence[RankTensor], limit: int | None) -> list[list[RankTensor]]:
    """Share tensors out to files in order: a file is closed when the next tensor would push it over ``limit`` bytes.

    A tensor larger than the limit gets a file of its own.
    """
    groups: list[list[RankTensor]] = [[]]
    size = 0
    for t in tensors:
        n = tensor_bytes(t.dtype, t.shape)
        if limit and groups[-1] and size + n > limit:
            groups.append([])
            size = 0
        groups[-1].append(t)
        size += n
    return groups


def build_files(
    groups: Sequence[tuple[str, int, Sequence[RankTensor], Mapping[str, str] | None]], ranks: int
) -> Skeleton:
    """A skeleton of safetensors files from (file name, rank, tensors, metadata)."""
    files: list[OutFile] = []
    places: list[dict[str, tuple[int, int]]] = [{} for _ in range(ranks)]
    rank_files: list[list[int]] = [[] for _ in range(ranks)]
    for name, rank, tensors, metadata in groups:
        header, placed, size = layout_file([(t.name, t.dtype, t.shape) for t in tensors], metadata)
        at = len(files)
        files.append(OutFile(name, size, ((0, header),)))
        rank_files[rank].append(at)
        slots = {t.name: t.slot for t in tensors}
        for p in placed:
            places[rank][slots[p.name]] = (at, p.offset)
    return Skeleton(files, places, [], rank_files)
