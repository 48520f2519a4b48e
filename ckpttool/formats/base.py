"""The interface of every format."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

from ckpttool.containers.index import IndexRules
from ckpttool.containers.safetensors import lay_out, read_header, tensor_bytes
from ckpttool.core.catalog import Catalog, FlatShard, Key, RankTensor, StoredTensor
from ckpttool.core.files import DataFile, Place
from ckpttool.core.mesh import Mesh
from ckpttool.errors import CkptError, ConflictError, CorruptError, IncompleteError, UsageError
from ckpttool.storage.listing import COMPANION_LIMIT, WEIGHTS, Listing, is_index
from ckpttool.storage.place import read_each


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """Options of the command line about a source; None: not given."""

    tp: int | None = None
    pp: int | None = None
    ep: int | None = None
    etp: int | None = None
    layout: tuple[int, ...] = ()
    rank_pattern: str = ""
    sharding: int | None = None
    more: tuple[Place, ...] = ()
    """Further directories of the same save, which was spread over nodes."""
    raw: bool = False
    """Names as they are in the files, all of them model weights: what Paddle's own merge of flex checkpoints does."""
    select: str = ""
    """Dotted path of the dict whose tensors are meant, where a file holds several (``Capabilities.nested``)."""
    parts: tuple[str, ...] = ()
    """Chosen models of a directory of several; () is all."""
    part: str = ""
    """The name of the part that this is."""
    beside: tuple[str, ...] = ()
    """Directories below that are other parts of the same, and not carried with this one."""
    wrapped: bool = True
    """Drop the prefixes that wrappers put in front of names. False where ckpttool reads again what it has written."""

    def from_flags(self) -> dict[str, int]:
        return {k: v for k in ("tp", "pp", "ep", "etp") if (v := getattr(self, k)) is not None}


@dataclass(frozen=True, slots=True)
class OpenOptions:
    """A caller's options about a source; every default means "read it from the checkpoint"."""

    format: str = ""
    mesh: ReadOptions = field(default_factory=ReadOptions)
    family: str = ""
    replicate: Sequence[str] = ()
    split: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class ParamGroup:
    """Parameters that an optimizer treats alike."""

    parameters: tuple[str, ...]
    """Their names, in the optimizer's order."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """``lr``, ``betas``, ``eps``, ``weight_decay`` and so on, as torch calls them: plain values."""


@dataclass(frozen=True, slots=True)
class TrainingState:
    """The values that a trainer keeps beside tensors."""

    groups: tuple[ParamGroup, ...] = ()
    step: int | None = None
    """The optimizer's step, where there is one for all parameters."""
    plain: Mapping[str, Any] = field(default_factory=dict)
    """State of anything else (learning-rate schedule, counters, ...), by its name: plain values."""
    left: tuple[str, ...] = ()
    """Names of what is no plain data (random number generators, objects), and is not carried."""
    steps: Mapping[str, float] = field(default_factory=dict)
    """Step of each parameter, for a format that ``counts_steps``."""

    def betas(self, parameter: str) -> tuple[float, float] | None:
        """Adam's betas for a parameter; None where they are unknown."""
        for group in self.groups:
            said = group.values.get("betas")
            if parameter in group.parameters and isinstance(said, (tuple, list)) and len(said) == 2:
                return float(said[0]), float(said[1])
        return None


class TensorShare(NamedTuple):
    """The slice of a tensor in memory that a tensor of the files is."""

    name: str
    start: tuple[int, ...]
    """Along the axes of the tensor in memory."""
    shape: tuple[int, ...]
    """Shape of the tensor of the files."""
    axes: tuple[int, ...]
    """Axes of the tensor in memory that it has."""


class ModelForm(NamedTuple):
    """The parameters of a model, as a program may have them in memory."""

    order: tuple[str, ...]
    """Names in the order of the model's ``named_parameters()``; () where nobody knows it."""
    shapes: Mapping[str, tuple[int, ...]]
    shares: Mapping[str, tuple[TensorShare, ...]] = MappingProxyType({})
    """The tensors of the files that each consists of, where they hold it otherwise; {} where none is."""


@dataclass(slots=True)
class StoredCheckpoint:
    """The result of a format's ``read``: headers turned into stored tensors."""

    format: str
    root: Place
    files: list[DataFile]
    tensors: list[StoredTensor]
    mesh: Mesh
    dialect: str = "hf"
    """Dialect of the tensors' names, fusions and orientation; "" is whichever of those that the family knows has such
    names, else Hugging Face's."""
    fused: str = ""
    """``fuse`` or ``unfuse`` when the family's fusions were applied on top of these names."""
    config: dict[str, Any] = field(default_factory=dict)
    companions: tuple[str, ...] = ()
    family: str = ""
    """Recorded by the format; "" leaves it to config.json."""
    recorded: Catalog | None = None
    """The catalog, when the files themselves say which box each tensor is."""
    whole: tuple[str, ...] = ()
    """Patterns of tensors that these files do not cut, whatever the family's rules say."""
    records_cuts: bool = True
    """False: the files do not say which tensors tensor parallelism cuts, and the software keeps some of them whole."""
    native_config: dict[str, Any] = field(default_factory=dict)
    """config.json as it is, where ``config`` is a translation into Hugging Face's fields."""
    notes: list[str] = field(default_factory=list)
    metadata: dict[str, str] = field(default_factory=dict)
    shards: list[Sequence[FlatShard]] = field(default_factory=list)
    """The shards of the stored tensors with ``file == SHARDED``."""
    merged_raw: bool = False
    """Its own software merges such a save under the names that the files have (``ReadOptions.raw``)."""
    dtypes: dict[Key, str] = field(default_factory=dict)
    """Dtypes of tensors that are derived from elements of another dtype: model weights that are rounded master
    weights."""
    cut: dict[str, Mesh] = field(default_factory=dict)
    """Meshes of components whose tensors are those of ranks, although ``mesh`` says that the others are whole."""
    sharding: int = 1
    """Ranks that share the optimizer state of one model-parallel rank."""
    native: Any = None
    """Data for the format's own writer (names of parameters in the optimizer's files, ...)."""
    training: TrainingState | None = None
    """The rest of what a trainer resumes from; its parameters have the names of the catalog."""
    indexes: tuple[Place, ...] = ()
    """Pickles without tensors that were read in full, so that nobody has to look for code in them: metadata."""
    version: str = ""
    """Version of the software that wrote it, one of its format's ``targets``; "" where unknown or told otherwise."""
    unnamed: Callable[[Sequence[ModelForm]], None] | None = None
    """State of an optimizer that only what the family knows of the model gives to its parameters: called with the forms
    that the model may have in memory, the one of these files first, it adds the tensors."""
    refused: dict[str, CkptError] = field(default_factory=dict)
    """Components that are there and cannot be read, and why; raised where they are asked for."""

    beside: tuple[str, ...] = ()
    """``ReadOptions.beside``."""
    findings: list[tuple[str, str, str]] = field(default_factory=list)
    """Findings of a check in files that could be read all the same: identifier, text, where."""
    known: tuple[str, ...] = ()
    """Names of files with names of weights that were read, or of which ``notes`` speak."""

    @property
    def plain(self) -> bool:
        """Whether these are whole tensors of a model under published names, so that nothing has to be worked out."""
        alone = self.training is None and self.unnamed is None
        return alone and self.dialect in ("hf", "") and self.mesh.world == 1 and self.recorded is None


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteRequest:
    """Everything a format needs to say what it will write."""

    ranks: Sequence[Sequence[RankTensor]]
    chosen: tuple[int, ...] = (0,)
    """Ranks to write."""
    mesh: Mesh = field(default_factory=Mesh)
    requested: Mesh = field(default_factory=Mesh)
    """The mesh that the flags asked for; a format of whole tensors has ``mesh`` 1 and makes so many files of it."""
    family: str = ""
    dialect: str = ""
    fused: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    """config.json in Hugging Face's fields."""
    dtype: str = ""
    """Cast target (safetensors name) or ""."""
    max_shard_size: int | None = None
    sharding: int = 1
    """Ranks that share the optimizer state of one model-parallel rank (--sharding-out)."""
    sharding_version: str = ""
    """``v1``, ``v2`` or "" (not said)."""
    version: str = ""
    """Version of the software that will read it (--target), or ""."""
    training: TrainingState | None = None
    """The values beside tensors that a trainer resumes from; its parameters have the names of the output."""
    source: StoredCheckpoint | None = None
    """The checkpoint that the tensors come from: its ``native``, its own config and its sidecar files may be of use."""

    @property
    def native(self) -> Any:
        """``native`` of the source; of any type, for any format may have read it."""
        return self.source.native if self.source else None

    @property
    def companions(self) -> tuple[str, ...]:
        """Names of the small files in the source's directory that may be carried."""
        return self.source.companions if self.source else ()

    @property
    def complete(self) -> bool:
        """Whether every rank is written, with the config that a reader needs."""
        return len(self.chosen) == self.mesh.world and bool(self.config)


class Capabilities(NamedTuple):
    """The capabilities in which formats differ: what one can hold, and how it cuts."""

    components: tuple[str, ...] = ("model",)
    """Other components of a source are left out, and a note says so."""
    meshes: str = ""
    """Meshes that it can hold, in words; "" holds whole tensors only."""
    targets: tuple[str, ...] = ()
    """Values of --target, the default first."""
    namings: tuple[str, ...] = ()
    """More values of --target: namings of families, which replace the published names."""
    pad_vocab: bool = True
    """False: a vocabulary that tp does not divide is whole on every rank, or refused."""
    vocab_multiple: int = 1
    """The padded vocabulary is a multiple of this."""
    ragged_experts: bool = False
    """True: ranks may hold different numbers of experts."""
    vocab_multiple_per_tp: bool = False
    """That multiple, or the one of --vocab-multiple in its place, is for each of the tp ranks."""
    free_padding: bool = False
    """The rows that pad the vocabulary in its files may hold anything."""
    local_layers: bool = False
    """Layers are numbered from 0 in every pipeline stage."""
    shards: bool = False
    """True: the tensors of a rank may be shared out to several files."""
    multi_directory: bool = False
    """A save may lie in several directories (--also), each written by another node."""
    optimizer_shards: bool = False
    """Optimizer state may be shared out over --sharding-out ranks."""
    fp32_masters: str = "kept"
    """For a parameter that is float32 itself, a master weight is ``added``, ``dropped``, or ``kept`` as it is."""
    records_shapes: bool = False
    """The files say the shapes of the whole tensors, so that padding is known from them."""
    refused: tuple[str, ...] = ()
    """Those of ``fuse`` and ``unfuse`` whose result the format's own software cannot read."""
    float32: tuple[str, ...] = ()
    """Patterns of model weights that its software keeps in float32, whatever --dtype says."""
    one_dtype: bool = False
    """Its software trains all parameters in one dtype."""
    counts_steps: bool = False
    """Its files have the steps of the optimizer as plain numbers (``TrainingState.steps``)."""
    keeps_form: bool = False
    """Whole tensors as they were published: they keep the form of their family that they have, and parts of a directory
    of several models have this format."""
    indexes: IndexRules | None = None
    """Rules for the indexes that lie beside its files."""
    default_target: bool = False
    """A source in this format stays in it by default (without --to)."""
    views: bool = False
    """Tensors may share bytes, and repeat them; their reader has checked that they lie inside of their files."""
    nested: bool = False
    """Tensors may lie in dicts inside other dicts; --select names one."""
    optimizer_beside: bool = False
    """A file of torch's optimizer may lie beside the model, ``optimizer.pt``."""
    states: str = ""
    """Convention of the names of optimizers' states, ``torch`` or ``paddle`` (``core.optimizer_states``); "" keeps
    them."""
    own_files: str = ""
    """Pattern of names of weights that files of its own have, which may hold no tensors."""
    instead: str = ""
    """The format to write in place of one that is only read."""

    @property
    def sharded(self) -> bool:
        """Holds one set of tensors for each rank."""
        return bool(self.meshes)


class OutFile(NamedTuple):
    """A file that will be written."""

    name: str
    size: int
    literals: Sequence[tuple[int, bytes]]
    """(offset, bytes)"""
    checksums: Mapping[int, tuple[int, ...]] = {}
    """Byte at which a tensor begins -> where the CRC-32 of its bytes is put (4 bytes, little-endian)."""
    shared: Sequence[tuple[int, int, tuple[int, ...]]] = ()
    """(first byte, bytes, the same) of runs that tensors share, with zeros between them."""


def name_in_file(t: RankTensor) -> str:
    """A tensor's name in its file, in most formats."""
    return t.name + (f"/{t.state}" if t.state else "") + (f"#{t.part}" if t.part else "")


class FileLayout(NamedTuple):
    """All files of a target, and where each stored tensor goes."""

    files: list[OutFile]
    places: Sequence[Mapping[str, tuple[int, int]]]
    """Per rank: ``RankTensor.slot`` -> (file, byte offset)."""
    notes: list[str]
    rank_files: list[list[int]]
    ranks: Sequence[Sequence[RankTensor]] | None = None
    """Tensors of each file, where the format cuts further than the mesh does; None: ``WriteRequest.ranks``."""
    generated: tuple[tuple[str, bytes], ...] = ()
    """Small files of the format's own beside them; they replace companions of the same name."""
    dropped: tuple[str, ...] = ()
    """Companions (file names) that are not valid in the target and are left out."""
    config: Mapping[str, Any] | None = None
    """config.json, where the format changes that of the request."""
    copied: tuple[Place, ...] = ()
    """Files that the format carries over as they are, of any size."""
    label: Callable[[RankTensor], str] = name_in_file
    """A tensor's name in its file, for manifests and errors."""
    usage: str = ""
    """A command or a line of Python that reads what is written: {dst} is its path for a shell, {text} in quotes;
    "" where there is none."""
    mesh: Mesh | None = None
    """The mesh of the run that the files are for, where its software cuts them itself; None: ``WriteRequest.mesh``."""


class Reader(Protocol):
    """The reader of one piece of software's files."""

    name: str
    capabilities: Capabilities

    def detect(self, listing: Listing) -> int:
        """How surely the files are this format, by names and small JSON only.

        0: they are not. 1: their names fit, but others use such names too. 2: names or fields that are its own.
        """

    def read(self, listing: Listing, options: ReadOptions) -> StoredCheckpoint:
        """Index the headers."""


@runtime_checkable
class Writer(Protocol):
    """The writer of one piece of software's files. A format that is only read has none."""

    name: str
    capabilities: Capabilities
    dialect: str
    """Dialect of the files; "" keeps those of the source."""

    def target_mesh(self, asked: Mesh, said: Mapping[str, int]) -> Mesh:
        """The mesh that this target will have when ``asked`` for; ``said`` are the sizes that a flag named."""

    def write(self, request: WriteRequest) -> FileLayout:
        """Name the files, their exact sizes and headers, and what lies beside them."""


class FormatCheck(NamedTuple):
    """The result of a format's own check."""

    found: list[tuple[str, str, str, str]]
    """Identifier, text, where, hint."""
    counts: dict[str, int]
    """How many of each noun were looked at."""


@runtime_checkable
class ChecksItself(Protocol):
    """A reader of a program and its parameters. The program determines its tensors: none may be left out or added."""

    name: str

    def check(self, listing: Listing) -> FormatCheck:
        """Everything that is wrong with the files."""


class KeptFile(NamedTuple):
    """A file of a checkpoint of which some tensors go."""

    file: DataFile
    name: str
    """Name after the removal."""
    tensors: list[StoredTensor]
    """Remaining tensors, as its header says."""
    loses: bool


class Remainder(NamedTuple):
    """The files of a checkpoint after tensors were removed."""

    files: list[KeptFile]
    indexes: list[tuple[str, bytes]]
    """(name, content)."""


@runtime_checkable
class DropsInPlace(Protocol):
    """A format whose files stay what they are when tensors go."""

    def without(self, stored: StoredCheckpoint, catalog: Catalog, lost: Collection[str]) -> Remainder | None:
        """The files without the parameters ``lost``; None where they cannot stay what they are."""


@runtime_checkable
class HoldsWhole(Protocol):
    """A format whose ranks hold some tensors whole, whatever the family's rules say."""

    whole: tuple[str, ...]
    """Patterns of the names of these tensors."""


@runtime_checkable
class KeepsNames(Protocol):
    """A format whose files keep their names when they are written in the same format, whatever software has them."""

    keeps_names: Literal[True]


@runtime_checkable
class VersionedShards(Protocol):
    """A format that has several ways to share out the optimizer's state."""

    sharding_versions: tuple[str, ...]
    """Values behind the colon of --sharding-out."""


@runtime_checkable
class TransposedOnDisk(Protocol):
    """A format whose files hold some model weights the other way round than their naming says."""

    def turned(self, name: str, ndim: int, version: str, prefix: str, config: Mapping[str, Any]) -> bool:
        """Whether the files for ``version`` (--target) hold this model weight with its two axes exchanged."""


def read_files(format_name: str, listing: Listing, named: Sequence[tuple[str, int]], mesh: Mesh) -> StoredCheckpoint:
    """The checkpoint of (file name, rank) pairs, in order; its metadata is that of the first file."""
    places = [listing.path(name) for name, _ in named]
    heads = list(read_each(read_header, places, range(len(named)), [rank for _, rank in named]))
    carried, notes = companions(listing, [name for name, _ in named])
    return StoredCheckpoint(
        format_name,
        listing.root,
        [h.file for h in heads],
        [t for h in heads for t in h.tensors],
        mesh,
        config=listing.json("config.json"),
        companions=carried,
        notes=notes,
        metadata=heads[0].metadata if heads else {},
    )


def file_now(path: Place) -> DataFile:
    """A file that is carried, as it is now. A run refuses one that has changed since.

    Raises CorruptError when it has gone since it was listed.
    """
    try:
        return DataFile.at(path)
    except OSError as e:
        raise CorruptError(f"a source cannot be read: {e.strerror}", where=str(path)) from e


def companions(listing: Listing, weights: Iterable[str]) -> tuple[tuple[str, ...], list[str]]:
    """Small files that belong to the model but hold no tensors; and a note about those too large to carry."""
    skip = set(weights)
    keep, notes = [], []
    if listing.single.endswith(".safetensors"):
        return (), []
    for name in listing.names:
        if name in skip or name == "config.json" or name.startswith("."):
            continue
        if name.endswith(WEIGHTS) or is_index(name) or name == "ckpttool.manifest.json":
            continue
        size = DataFile.at(listing.path(name)).size
        if size > COMPANION_LIMIT:
            notes.append(f"{name} ({size:,} bytes) is not copied: larger than {COMPANION_LIMIT >> 20} MiB")
        else:
            keep.append(name)
    return tuple(keep), notes


def check_mesh(format_name: str, read: Mapping[str, int], options: ReadOptions, where: Place) -> None:
    """Flags that contradict what the files say are an error."""
    for name, said in options.from_flags().items():
        if name in read and read[name] != said:
            raise ConflictError(
                f"--{name} {said} contradicts the checkpoint, which is {name} {read[name]} ({format_name})",
                where=str(where),
                hint=f"did you mean --{name}-out {said}? --{name} describes SRC"
                if read[name] == 1
                else f"drop --{name}: it is read from the checkpoint. What is written is --{name}-out",
            )


_CUT = "use --to ranks (or vllm, trtllm, deepseek, megatron-dist, hybrid) for a cut checkpoint"


def whole_mesh(said: Mapping[str, int], target: str, *, hint: str | None = _CUT) -> Mesh:
    """The mesh of a target of whole tensors. Raises UsageError for parallel sizes that flags name."""
    if wrong := [f"--{k}-out {v}" for k, v in said.items() if v != 1]:
        raise UsageError(f"{' '.join(wrong)} cannot be used with --to {target}", hint=hint)
    return Mesh()


def contiguous_ranks(found: Mapping[int, Any], world: int, where: Place, naming: str) -> None:
    """Every rank 0..world-1 must have a file. Raises IncompleteError naming those missing."""
    missing = world - sum(0 <= r < world for r in found)  # a name or a header may claim any number
    if missing:
        first = islice((r for r in range(world) if r not in found), 8)
        shown = ", ".join(map(str, first)) + (" ..." if missing > 8 else "")
        raise IncompleteError(
            f"{missing} of {world} rank files are missing: rank {shown}",
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


class RankPlaces(Mapping[str, tuple[int, int]]):
    """Places of a rank's tensors: ``RankTensor.slot`` -> (file, byte offset)."""

    __slots__ = ("_files", "_index", "_offsets")

    def __init__(self, index: Mapping[str, int], files: array[int], offsets: array[int]) -> None:
        self._index = index
        self._files = files
        self._offsets = offsets

    def __getitem__(self, slot: str) -> tuple[int, int]:
        i = self._index[slot]
        return self._files[i], self._offsets[i]

    def __iter__(self) -> Iterator[str]:
        return iter(self._index)

    def __len__(self) -> int:
        return len(self._index)


def build_files(
    groups: Iterable[tuple[str, int, Sequence[RankTensor], Mapping[str, str] | None]],
    ranks: int,
    name_of: Callable[[RankTensor], str] = name_in_file,
) -> FileLayout:
    """A skeleton of safetensors files from (file name, rank, tensors, metadata); ``name_of`` names them in a file."""
    files: list[OutFile] = []
    rank_files: list[list[int]] = [[] for _ in range(ranks)]
    columns: list[tuple[list[str], array[int], array[int]]] = [([], array("q"), array("q")) for _ in range(ranks)]
    for name, rank, tensors, metadata in groups:
        header, offset_of, size = lay_out([(name_of(t), t.dtype, t.shape) for t in tensors], metadata)
        at = len(files)
        files.append(OutFile(name, size, header))
        rank_files[rank].append(at)
        slots, where, offsets = columns[rank]
        for t in tensors:
            slots.append(t.slot)
            where.append(at)
            offsets.append(offset_of[name_of(t)])
    places: list[RankPlaces] = []
    known: list[str] = []
    index: dict[str, int] = {}
    for slots, where, offsets in columns:
        if slots != known:  # tensor-parallel ranks have the same tensors, and so one index
            known, index = slots, {slot: i for i, slot in enumerate(slots)}
        places.append(RankPlaces(index, where, offsets))
    return FileLayout(files, places, [], rank_files, label=name_of)
