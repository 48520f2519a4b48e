"""What the pickles of a source would import when somebody loads them: every global, where it is named, and a verdict.

It is found by reading opcodes: nothing is imported, run or unpickled. SRC need not be a checkpoint that can be read.
"""

from __future__ import annotations

from pathlib import Path

from ckpttool.answers.findings import DANGEROUS, INERT, REFUSED, Import, ImportsResult
from ckpttool.containers.pickle_imports import NamedGlobal, is_dangerous, is_safe, is_zip_without_pickles, named
from ckpttool.core.files import AnyPlace, Place
from ckpttool.errors import UsageError
from ckpttool.ops.inspect.code import PICKLE_SUFFIXES, is_paddles
from ckpttool.storage.listing import list_source
from ckpttool.storage.place import parse_place, walk
from ckpttool.storage.tar import TarPlace, is_tar

_ZIP = b"PK\x03\x04"
_HEADS = (_ZIP, *(bytes((0x80, protocol)) for protocol in range(2, 6)))
"""How zips begin, and pickles that say so."""


def list_imports(src: AnyPlace) -> ImportsResult:
    """Look at every pickle in a directory and below, in a tar, or at one file. Raises UsageError for none,
    and for a file that cannot be read."""
    path = parse_place(src)
    alone = path.is_file()
    if alone and _is_tar(path):
        path, alone = TarPlace(path), False
    root = path.parent if alone else list_source(path).root
    out = ImportsResult(path)
    for name in [path.name] if alone else sorted(walk(root)):
        place = root / name
        if not place.is_file():  # a pipe would be waited for
            out.notes.append(f"{name} is not a regular file; skipped")
            continue
        try:
            with place.open("rb") as f:
                head = f.read(4)
            if not (_is_pickle(name) or head.startswith(_HEADS)):
                continue
            found = named(place)
            bare = not found and is_zip_without_pickles(place)
        except OSError as e:
            out.notes.append(f"{name} cannot be read: {e.strerror}")
            continue
        out.files += 1
        # Paddle's pickles spell an array with `eval` of a text that their reader knows: it takes that form only.
        sound = any(is_dangerous(n.name) for n in found) and is_paddles(place)
        out.found += [Import(name, n.member, n.offset, n.name, n.times, _verdict(n, sound=sound)) for n in found]
        if bare:
            out.notes.append(f"{name}: no pickle found in this zip; it may be truncated")
    return out


def _is_tar(path: Place) -> bool:
    try:
        return is_tar(path)
    except OSError as e:
        raise UsageError(f"cannot read the file: {e.strerror}", where=str(path)) from None


def _verdict(found: NamedGlobal, *, sound: bool) -> str:
    if is_dangerous(found.name):
        return INERT if sound else DANGEROUS
    return INERT if is_safe(found.name) else REFUSED


def _is_pickle(name: str) -> bool:
    return Path(name).suffix in PICKLE_SUFFIXES or Path(name).name == ".metadata"
