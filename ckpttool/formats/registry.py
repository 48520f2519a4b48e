"""All formats by name, and detection.

Imported formats only; adding one is adding its module here.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from ckpttool.containers.index import set_of
from ckpttool.core.activity import activity
from ckpttool.core.files import Place
from ckpttool.core.words import count, natural, some
from ckpttool.errors import CkptError, ConflictError, UnsupportedError, UsageError, plain
from ckpttool.formats.base import OpenOptions, Reader, ReadOptions, StoredCheckpoint, Writer
from ckpttool.formats.engines import VLLM, DeepSeek, TensorRTLLM
from ckpttool.formats.gguf import Gguf
from ckpttool.formats.hf import HuggingFace
from ckpttool.formats.megatron import Megatron, MegatronDist
from ckpttool.formats.paddle import Flex, Hybrid, PaddleProgram, PdparamsFile, Unified, ZeroCost
from ckpttool.formats.parts import Diffusers, MultiPart, SentenceTransformers
from ckpttool.formats.ranks import RankFiles
from ckpttool.formats.runs import RunError, RunSave, TrainingRun, is_run, named_saves, names_in, unwritten
from ckpttool.formats.runs import find as find_run
from ckpttool.formats.torch import (
    ByteCheckpoint,
    DeepSpeed,
    DistributedCheckpoint,
    Fsdp,
    Meta,
    TorchFiles,
    Universal,
    read_optimizer,
)
from ckpttool.storage.identify import foreign
from ckpttool.storage.listing import Listing, is_index, list_source, lost
from ckpttool.storage.place import scan

_T = TypeVar("_T")


def _read_part(listing: Listing) -> StoredCheckpoint:
    """A model that lies in a directory of several."""
    alone = [f for f in READERS.values() if not isinstance(f, MultiPart)]
    return detected(listing, alone).read(listing, ReadOptions())


READERS: dict[str, Reader] = {
    f.name: f
    for f in (
        HuggingFace(),
        RankFiles(),
        DeepSeek(),
        VLLM(),
        TensorRTLLM(),
        Unified(),
        Hybrid(),
        ZeroCost(),
        Flex(),
        PdparamsFile(),
        PaddleProgram(),
        TorchFiles(),
        Meta(),
        DistributedCheckpoint(),
        Fsdp(),
        ByteCheckpoint(),
        DeepSpeed(),
        Universal(),
        Gguf(),
        MegatronDist(),
        Megatron(),
        Diffusers(_read_part),
        SentenceTransformers(_read_part),
    )
}
WRITERS: dict[str, Writer] = {name: f for name, f in READERS.items() if isinstance(f, Writer)}
ALSO_CALLED = {
    **dict.fromkeys(("huggingface", "hugging-face", "transformers", "safetensors"), "hf"),
    **dict.fromkeys(("tensorrt-llm", "tensorrt_llm", "tensorrt", "trt-llm", "trt"), "trtllm"),
    **dict.fromkeys(("rank", "tp", "sharded", "shards"), "ranks"),
    "sglang": "vllm",
    **dict.fromkeys(("paddle", "paddlenlp", "paddleformers"), "unified"),
    **dict.fromkeys(("consolidated", "mistral"), "meta"),
    **dict.fromkeys(("llama.cpp", "llamacpp", "ggml", "ollama"), "gguf"),
    **dict.fromkeys(("distcp", "torch-dcp", "fsdp2", "torchtitan", "torch.distributed.checkpoint"), "dcp"),
    **dict.fromkeys(("torch", "pytorch", "bin", "pth", "pt", "ckpt"), "torch-bin"),
    **dict.fromkeys(("zero", "zero1", "zero2", "zero3", "ds"), "deepspeed"),
    **dict.fromkeys(("ds-universal", "ucp"), "universal"),
    **dict.fromkeys(
        ("torch-dist", "torch_dist", "dist-checkpointing", "mcore", "megatron-core", "nemo"), "megatron-dist"
    ),
    **dict.fromkeys(("megatron-lm", "mp_rank"), "megatron"),
}
"""Other names of formats; only for hints."""
_TRIED = 3
"""Checkpoints of a run that are opened to name one that can be."""
_OF_RANKS = (".safetensors", ".pth")
"""Ends of the names of files that may be one rank's, and can be read without the others."""
_NO_SELECT = (
    "it is for files of torch.save; to use one beside other sources, `ckpttool reshard FILE DIR --select PATH` first"
)


def reader(name: str) -> Reader:
    """The reader of the format that --from names. Raises UsageError for an unknown one."""
    return _named(READERS, name, "--from")


def writer(name: str) -> Writer:
    """The writer of the format that --to names. Raises UsageError for an unknown one, UnsupportedError for one that is
    only read.
    """
    if name in READERS and name not in WRITERS:
        raise UnsupportedError(f"--to {name} is not written", hint=READERS[name].capabilities.instead)
    return _named(WRITERS, name, "--to")


def _named(known: Mapping[str, _T], name: str, option: str) -> _T:
    if name not in known:
        import difflib

        said = name.lower()
        close = [ALSO_CALLED.get(said, "")] if said in ALSO_CALLED else difflib.get_close_matches(said, READERS, n=1)
        raise UsageError(
            f"{option} `{name}` is not a format",
            hint=(f"did you mean `{close[0]}`? " if close else "") + "formats: " + ", ".join(known),
        )
    return known[name]


def detect(listing: Listing, among: Iterable[Reader] = ()) -> Reader | None:
    """The format that a source looks most like; None for no format.

    Raises ConflictError with the candidates when several are equal, RunError for a directory of several checkpoints.
    """
    found = _surest(listing, among)
    if len(found) == 1:
        return found[0]
    if found:
        raise ConflictError(
            f"the source could be {' or '.join(f.name for f in found)}",
            where=str(listing.root),
            hint=f"choose one: {' or '.join('--from ' + f.name for f in found)}",
        )
    _refuse_run(listing)
    return None


def detected(listing: Listing, among: Iterable[Reader] = ()) -> Reader:
    """Like ``detect``, but raises UnsupportedError, which says what the source is, where no format fits."""
    found = detect(listing, among)
    if found is not None:
        return found
    folders = _folders(listing)
    below = lost(listing) or (_below(listing.root, folders) if isinstance(listing.root, Path) else "")
    other = None if below else foreign(listing.root, [listing.single] if listing.single else listing.names, folders)
    if other:
        raise UnsupportedError(
            f"this is {other.what}, {other.why}",
            where=str(listing.path(listing.single)),
            hint=other.hint,
        )
    inside = [f"files: {_first(listing.names) or 'none'}", *([f"directories: {_first(folders)}"] if folders else [])]
    raise UnsupportedError(
        "no checkpoint format is recognised here",
        where=[str(listing.root), *inside],
        hint=below
        or _elsewhere(listing, folders)
        or _around(listing)
        or "give the directory that holds the weight files; formats: " + ", ".join(READERS),
    )


def _surest(listing: Listing, among: Iterable[Reader] = ()) -> list[Reader]:
    """The formats that a source looks most like; [] where none knows it."""
    readers = list(among) or list(READERS.values())
    sure = {f.name: f.detect(listing) for f in readers}
    found = [f for f in readers if sure[f.name] and sure[f.name] == max(sure.values())]
    return found or ([READERS["hf"]] if listing.safetensors() else [])


def recognise(listing: Listing) -> str:
    """The format of a checkpoint by its names, the first where it could be several; "" where there is none."""
    try:
        return next((f.name for f in _surest(listing)), "")
    except (
        CkptError
    ):  # a small file that says which it is cannot be read: it is somebody's checkpoint, or was to be one
        return ""


def run_at(path: Place) -> TrainingRun:
    """The checkpoints that lie in a directory. Raises UsageError when it does not exist."""
    return find_run(list_source(path), recognise)


def _refuse_run(listing: Listing) -> None:
    """Raises RunError for a directory of several checkpoints."""
    best = ""
    if isinstance(listing.root, Path):
        run = find_run(listing, recognise)
        names = [s.name for s in run.saves] if is_run(run) else []
        best = _newest_whole(run.saves) if names else ""
    else:  # as in _elsewhere, by names alone
        names = named_saves(listing)
    if not names:
        return
    root = str(listing.root)
    newest = f"the newest that is complete is {best}: {listing.root / best}; " if best else ""
    raise RunError(
        f"this is a directory of {count(len(names), 'checkpoint')}, and one is needed",
        where=[root, f"checkpoints: {some(names[::-1], 6)}"],
        hint=f"{newest}`ckpttool inspect {shlex.quote(root)}` lists them",
    )


def _newest_whole(saves: Sequence[RunSave]) -> str:
    """The newest of the last few that is complete, by the rules by which `inspect RUN` lists them; "" for none."""
    last = [s for s in saves if s.step is not None][-_TRIED:]
    held = [names_in(s.place) for s in last]
    for save, names in zip(reversed(last), reversed(held), strict=True):
        if not save.unfinished and not unwritten(names, held) and _can_be_read(save.place):
            return save.name
    return ""


def _can_be_read(path: Place) -> bool:
    """Whether the headers of a checkpoint are sound."""
    try:
        listing = list_source(path)
        found = _surest(listing)  # not detect(), which would look for checkpoints below this one
        return bool(found) and bool(found[0].read(listing, ReadOptions()))
    except CkptError:
        return False


def _folders(listing: Listing) -> list[str]:
    """Directories directly in a source, for what an error says about it; [] when SRC is a file."""
    if listing.single:
        return []
    return sorted((e.name for e in scan(listing.root) if e.is_dir()), key=natural)


def _elsewhere(listing: Listing, folders: Sequence[str]) -> str:
    """As ``_below``, of a directory on another machine: what lies further down is not looked at."""
    if isinstance(listing.root, Path) or listing.single:
        return ""
    if not folders:
        return listing.root.lost()
    return "give a directory with weight files"


def _first(names: Sequence[str]) -> str:
    return ", ".join(names[:6]) + (" ..." if len(names) > 6 else "")


def _around(listing: Listing) -> str:
    """A hint when SRC is a small file of a checkpoint, such as its config.json."""
    around = recognise(list_source(listing.root)) if listing.single else ""
    return f"this file has no tensors; give its directory: {listing.root}" if around else ""


def _below(root: Path, folders: Sequence[str]) -> str:
    """A hint when the weights lie further down: a cache of the Hugging Face hub, steps of a run, one rank in each."""
    if "snapshots" in folders or root.name == "snapshots":
        holder = root / "snapshots" if "snapshots" in folders else root
        refs = holder.parent / "refs" / "main"
        main = [holder / refs.read_text(encoding="utf-8").strip()] if refs.is_file() else []
        found = next((p for p in [*main, *sorted(holder.glob("*"))] if p.is_dir()), None)
        return f"this is the cache of the Hugging Face hub; give the snapshot: {found}" if found else ""
    if cached := [f for f in folders if f.startswith("models--")]:
        return f"this is the cache of the Hugging Face hub; give a directory in {root / cached[0] / 'snapshots'}"
    holding = [f for f in folders[:1000] if any((root / f).glob("*.safetensors"))]
    if not holding:
        return ""
    files = {p.name for p in (root / holding[0]).glob("*.safetensors")}
    forms = {re.sub(r"\d+(?=\D*\Z)", "{rank}", f) for f in holding}
    numbers = [int(m[1]) for f in holding if (m := re.search(r"(\d+)\D*\Z", f))]
    others = f" (and in {len(holding) - 1} other{'s' if len(holding) > 2 else ''})" if len(holding) > 1 else ""
    here = f"there are weights in {root / holding[-1]}{others}: give one directory"
    if len(forms) == len(files) == 1 and sorted(numbers) == list(range(len(holding))):
        return f"{here}, or, when each is a rank, --rank-pattern '{forms.pop()}/{files.pop()}'"
    return here


def choose(listing: Listing, name: str, options: ReadOptions) -> Reader:
    """The format named by --from, else the one that the files and the other flags show."""
    if name:
        return reader(name)
    if options.rank_pattern:
        return READERS["ranks"]
    found = detected(listing)
    published = any(is_index(n) or n == "model.safetensors" for n in listing.names)
    if found.name == "hf" and not published and any(v > 1 for v in options.from_flags().values()):
        return READERS["ranks"]  # the flags say that files are ranks; only the names did not show it
    return found


def is_multi_part(path: Place, options: OpenOptions) -> bool:
    """Whether what is read there is a directory of several models. Raises UsageError when there is no such source."""
    if options.format:
        return isinstance(reader(options.format), MultiPart)
    listing = list_source(path)
    several = [f for f in READERS.values() if isinstance(f, MultiPart)]
    return not options.mesh.rank_pattern and any(f.detect(listing) for f in several)


def _refuse_part(path: Place) -> None:
    """Raises UsageError when ``path`` is one file of several that make up a checkpoint.

    Its tensors are whole to look at, but a part of a model (or of each tensor) to anything that is written.
    """
    if not (path.name.endswith(_OF_RANKS) and path.is_file()):
        return
    numbered = set_of(path.name)
    files = numbered[1] if numbered else 1
    if numbered is None:
        try:
            listing = list_source(path.parent)
        except UsageError:
            return  # one may read a file in a directory that one may not list
        if any(f.capabilities.sharded and f.detect(listing) for f in READERS.values()):
            form = re.sub(r"\d+", "0", path.name)
            files = sum(re.sub(r"\d+", "0", n) == form for n in listing.names)
    if files > 1:
        raise UsageError(
            f"this is one of the {files} files of a checkpoint",
            where=str(path),
            hint=f"give their directory: {path.parent}; or --from {detected(list_source(path)).name}, which takes the"
            " tensors of this file for a model",
        )


def read_source(path: Place, name: str, options: ReadOptions, *, complete: bool = False) -> StoredCheckpoint:
    """Index the headers of a checkpoint; ``name`` is what --from says, or "". With ``complete`` one file of several is
    refused, unless the flags say what it is.

    Raises UsageError (no such path or format), IncompleteError (a file is missing), CorruptError (a header is wrong),
    ConflictError (flags and files disagree, several formats fit), UnsupportedError (no format fits).
    """
    if complete and not name and not options.rank_pattern:
        _refuse_part(path)
    activity.begin(f"opening {plain(str(path))}")
    listing = list_source(path)
    found = choose(listing, name, options)
    if options.parts and not isinstance(found, MultiPart):
        raise UsageError(
            f"--part {options.parts[0]}: SRC is one model, not a directory of several",
            where=str(path),
            hint="drop --part; pipelines of diffusers have a model_index.json",
        )
    if options.select and not found.capabilities.nested:
        raise UsageError(f"--select has no effect on {found.name}", where=str(path), hint=_NO_SELECT)
    stored = found.read(listing, options)
    stored.beside = options.beside
    if found.capabilities.optimizer_beside:
        read_optimizer(stored, listing)
    stored.notes += [f"{n} is left out: it is a link out of the checkpoint, to {to}" for n, to in listing.away.items()]
    if not stored.config and stored.mesh.world > 1 and (listing.root.parent / "config.json").is_file():
        stored.notes.append("config.json is read from the parent directory")
        stored.config = list_source(listing.root.parent).json("config.json")
    return stored
