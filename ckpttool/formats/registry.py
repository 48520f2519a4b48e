"""All formats by name, and detection.

Imported formats only; adding one is adding its module here.
"""

from __future__ import annotations

import re
from pathlib import Path

from ckpttool.errors import ConflictError, UnsupportedError, UsageError
from ckpttool.formats.base import Format, Listing, ReadOptions, StoredCheckpoint, list_source
from ckpttool.formats.deepseek import DeepSeek
from ckpttool.formats.flex import Flex
from ckpttool.formats.hf import HuggingFace
from ckpttool.formats.hybrid import Hybrid, ZeroCost
from ckpttool.formats.paddle_file import PaddleFile
from ckpttool.formats.paddle_program import PaddleProgram
from ckpttool.formats.ranks import Ranks
from ckpttool.formats.trtllm import TensorRTLLM
from ckpttool.formats.unified import Unified
from ckpttool.formats.vllm import VLLM

FORMATS: dict[str, Format] = {
    f.name: f
    for f in (
        HuggingFace(),
        Ranks(),
        DeepSeek(),
        VLLM(),
        TensorRTLLM(),
        Unified(),
        Hybrid(),
        ZeroCost(),
        Flex(),
        PaddleFile(),
        PaddleProgram(),
    )
}


def by_name(name: str, option: str) -> Format:
    """The format that --from or --to names. Raises UsageError for an unknown one."""
    if name not in FORMATS:
        import difflib

        close = difflib.get_close_matches(name, FORMATS, n=1)
        raise UsageError(
            f"{option} `{name}` is not a format",
            hint=(f"did you mean `{close[0]}`? " if close else "") + "formats: " + ", ".join(FORMATS),
        )
    return FORMATS[name]


def detect(listing: Listing) -> Format:
    """The format that a source looks most like. Raises ConflictError with the candidates when several are equal."""
    sure = {f.name: f.detect(listing) for f in FORMATS.values()}
    found = [f for f in FORMATS.values() if sure[f.name] and sure[f.name] == max(sure.values())]
    if len(found) == 1:
        return found[0]
    if found:
        raise ConflictError(
            f"the source could be {' or '.join(f.name for f in found)}",
            where=str(listing.root),
            hint=f"say which: --from {found[0].name}",
        )
    if listing.safetensors():
        return FORMATS["hf"]
    shown = ", ".join(listing.names[:6]) + (" ..." if len(listing.names) > 6 else "")
    raise UnsupportedError(
        "no checkpoint format is recognised here",
        where=[str(listing.root), f"files: {shown or 'none'}"],
        hint=_below(listing) or "give the directory that holds the weight files; formats: " + ", ".join(FORMATS),
    )


def _below(listing: Listing) -> str:
    """A hint when the weights lie in subdirectories, which may be one rank each."""
    found = "" if listing.single else next((str(p) for p in sorted(listing.root.glob("*/*.safetensors"))), "")
    if not found:
        return ""
    folder, name = Path(found).parent, Path(found).name
    pattern = re.sub(r"\d+(?=\D*\Z)", "{rank}", folder.name)
    rank = f"; when each directory is a rank: --rank-pattern '{pattern}/{name}'" if pattern != folder.name else ""
    return f"there are weights in {folder}{rank}"


def choose(listing: Listing, name: str, options: ReadOptions) -> Format:
    """The format named by --from, else the one that the files and the other flags show."""
    if name:
        return by_name(name, "--from")
    if options.rank_pattern:
        return FORMATS["ranks"]
    found = detect(listing)
    published = any(n.endswith(".index.json") or n == "model.safetensors" for n in listing.names)
    if found.name == "hf" and not published and any(v > 1 for v in options.said().values()):
        return FORMATS["ranks"]  # the flags say that files are ranks; only the names did not show it
    return found


def read_source(path: Path, name: str, options: ReadOptions) -> StoredCheckpoint:
    """Index the headers of a checkpoint; ``name`` is what --from says, or "".

    Raises UsageError (no such path or format), IncompleteError (a file is missing), CorruptError (a header is wrong),
    ConflictError (flags and files disagree, several formats fit), UnsupportedError (no format fits).
    """
    listing = list_source(path)
    stored = choose(listing, name, options).read(listing, options)
    if not stored.config and stored.mesh.world > 1 and listing.root.parent.joinpath("config.json").is_file():
        stored.notes.append("config.json is read from the parent directory")
        stored.config = list_source(listing.root.parent).json("config.json")
    return stored
