"""``ckpttool inspect FILE --header`` and ``--set-header``: a safetensors file's header as JSON, and edited JSON as it.

What a header says is free as long as it fits the data: names, metadata, dtypes of the same width, shapes of the same
size. The data stays where it is when the new header has room in the place of the old one, else the file is copied.
A crash leaves

    header in place   FILE.header-backup with the bytes that were there; `restore` puts them back
    copy              FILE as it was, and `.FILE.partial`, which the next run writes over
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from ckpttool.containers.safetensors import MAX_HEADER, HeaderError, HeaderProblem, parse, problems, read_raw
from ckpttool.core.files import DataFile, Place
from ckpttool.errors import CkptError, ConflictError, CorruptError, IncompleteError, OutputError, UsageError, plain
from ckpttool.execute.destinations.local import SLACK
from ckpttool.execute.durable import Replacement, lock, resolved, sync_names, write_all
from ckpttool.execute.files import PIECE, create, span, write_error
from ckpttool.storage import system
from ckpttool.storage.place import readable

UNCHANGED, IN_PLACE, COPIED, RESTORED = "unchanged", "in place", "copied", "restored"

BACKUP = ".header-backup"
"""What is appended to the name of a file for the bytes that were its header."""
SHOWN = 5
"""Problems that an error lists."""

_METADATA = "__metadata__"
_BOM = b"\xef\xbb\xbf"


class TensorChange(NamedTuple):
    """One tensor whose entry is another one now."""

    name: str
    """In the new header."""
    what: str
    """``dtype``, ``shape``, ``data_offsets`` or another field of the entry."""
    before: str
    after: str


class MetadataChange(NamedTuple):
    """One entry of ``__metadata__``; None is "not there"."""

    key: str
    before: str | None
    after: str | None


@dataclass(frozen=True, slots=True)
class HeaderResult:
    """What an edited header changed."""

    file: Path
    out: Path
    """The file that has the new header: ``file`` itself unless another was asked for."""
    how: str
    """``unchanged``, ``in place``, ``copied`` or ``restored``."""
    dry_run: bool
    """Nothing was written; ``how`` is what would be."""
    tensors: int = 0
    """In the new header."""
    header_bytes: int = 0
    """Bytes of the new header as it lies in the file, padding included."""
    bytes_written: int = 0
    """Written, or to be written: the header alone, or the whole file."""
    renamed: tuple[tuple[str, str], ...] = ()
    """(before, after), by the bytes that they name."""
    changed: tuple[TensorChange, ...] = ()
    added: tuple[str, ...] = ()
    """Names that are new, of bytes that no other tensor had: tensors without elements, or repairs."""
    removed: tuple[str, ...] = ()
    """The same the other way round."""
    metadata: tuple[MetadataChange, ...] = ()
    notes: tuple[str, ...] = ()


# -- to JSON


def dump(file: Place) -> str:
    """The header as JSON text, one tensor and one entry of the metadata a line, in the order of the file.

    A header that is broken but is JSON is written as it is, names that occur twice included. Raises IncompleteError
    (no such file), CorruptError (no header, or none that is JSON), ConflictError (a header is half written).
    """
    if isinstance(file, Path) and not file.name.endswith(BACKUP):
        _refuse_backup(resolved(file))
    return _text(_pairs(read_raw(file)[1], file))


class _Object(list[tuple[str, Any]]):
    """A JSON object with all of its pairs, also those of equal names."""


def _pairs(raw: bytes, where: Place) -> _Object:
    try:
        data = json.loads(raw.decode(), object_pairs_hook=_Object)
    except UnicodeError:
        raise HeaderError("header-utf8", "the header is not UTF-8", where=str(where)) from None
    except RecursionError:
        raise HeaderError("header-json", "the header is nested too deeply", where=str(where)) from None
    except ValueError as e:
        raise HeaderError("header-json", f"the header is not valid JSON: {e}", where=str(where)) from None
    if not isinstance(data, _Object):
        raise HeaderError("header-json", "the header is not a JSON object", where=str(where))
    return data


def _text(header: _Object) -> str:
    """One line for each tensor and for each entry of the metadata."""
    lines = []
    for name, value in header:
        if name == _METADATA and isinstance(value, _Object) and value:
            inner = [f"    {_inline(k)}: {_inline(v)}" for k, v in value]
            lines.append(f"  {_inline(name)}: {{\n" + ",\n".join(inner) + "\n  }")
        else:
            lines.append(f"  {_inline(name)}: {_inline(value)}")
    return "{\n" + ",\n".join(lines) + "\n}\n" if lines else "{}\n"


def _inline(value: Any) -> str:
    if isinstance(value, _Object):
        return "{" + ", ".join(f"{_inline(k)}: {_inline(v)}" for k, v in value) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_inline, value)) + "]"
    if isinstance(value, str):
        text = json.dumps(value, ensure_ascii=False)
        # Half a surrogate pair has no bytes in UTF-8, and others break lines in editors or steer terminals.
        return text if plain(text) == text else json.dumps(value)
    return json.dumps(value)


# -- from JSON


@dataclass(slots=True)
class _EditedFile:
    """The file whose header is replaced, as it was when it was read."""

    given: Path
    path: Path
    """The path with links resolved."""
    stat: os.stat_result
    raw: bytes
    old: dict[str, Any] = field(default_factory=dict)
    """As far as it can be read."""
    readable: bool = True
    """Whether ``old`` is all that the header says."""

    @property
    def start(self) -> int:
        return 8 + len(self.raw)

    @property
    def payload(self) -> int:
        return self.stat.st_size - self.start


def apply(edited: Path, file: Path, *, out: Path | None = None, dry_run: bool = False) -> HeaderResult:
    """Make the edited JSON the header of ``file``, or of a copy of it at ``out``.

    ``edited`` may be ``FILE.header-backup``, too: then the header that it keeps is put back. Raises
    CorruptError (JSON or file broken), ConflictError (the header does not fit the data, the file changed, an earlier
    run was interrupted), IncompleteError, UsageError, OutputError; then ``file`` is as it was.
    """
    if edited.name.endswith(BACKUP):
        if out is not None:
            raise UsageError("a backup is put back into its file, and not into another", where=str(out))
        return restore(edited, file, dry_run=dry_run)
    target = _target(file)
    _refuse_backup(target.path)
    new = _edited(edited)
    _validate(new, target, edited)
    text = _serialise(new, edited)
    notes = _notes(new, target)
    unchanged = target.readable and json.dumps(target.old) == json.dumps(new)
    if out is not None:
        header = _padded(text)
        destination = _output(out, target)
        how, size = COPIED, 8 + len(header) + target.payload
    elif unchanged:
        header, destination, how, size = target.raw, target.path, UNCHANGED, 0
    elif len(text) <= len(target.raw) and target.stat.st_nlink == 1:
        header, destination, how = text.ljust(len(target.raw)), target.path, IN_PLACE
        size = len(header)
    else:
        header, destination, how = _padded(text), target.path, COPIED
        size = 8 + len(header) + target.payload
        if target.stat.st_nlink > 1:
            notes.append("the file has other names (hard links); they keep the old header")
    if how == COPIED:
        _check_space(destination, size)
    if how != UNCHANGED and not dry_run:
        if out is None:
            _check_writable(target.path)
        if how == IN_PLACE:
            _write_in_place(target, header)
        else:
            _write_copy(target, header, destination, replace=out is None)
    changes = (*_differences(target.old, new), _metadata_changes(target.old, new))
    tensors = len(new) - (_METADATA in new)
    return HeaderResult(file, out or file, how, dry_run, tensors, len(header), size, *changes, tuple(notes))


def restore(backup: Path, file: Path, *, dry_run: bool = False) -> HeaderResult:
    """Put the header back that an interrupted run left in ``FILE.header-backup``, and remove the backup.

    Raises IncompleteError (no such file), UsageError (it is the backup of another file), CorruptError, OutputError.
    """
    path = resolved(file)
    if resolved(backup) != _backup_of(path):
        raise UsageError(
            "this is the backup of another file",
            where=[str(backup), str(file)],
            hint=f"the backup of this file would be {_backup_of(path)}",
        )
    fd = _open(path)
    try:
        # The run that it belongs to may be alive, and removes it when it has finished.
        lock(fd, path)
        info, raw = read_raw(backup)
        stat = os.fstat(fd)
        prefix = struct.pack("<Q", len(raw))
        # Only what stands behind the first eight bytes is ever overwritten.
        if info.size != 8 + len(raw) or os.pread(fd, 8, 0) != prefix or stat.st_size < 8 + len(raw):
            raise ConflictError(
                "the backup does not fit the file, which is another one now",
                where=[str(backup), str(file)],
                hint="if the file is right, remove the backup",
            )
        if not dry_run:
            try:
                write_all(fd, raw, 8)
                system.sync(fd)
                backup.unlink()
            except OSError as e:
                raise write_error(e, str(path), 8, len(raw)) from e
            sync_names([path.parent])
    finally:
        os.close(fd)
    tensors = 0
    with contextlib.suppress(HeaderError):
        tensors = len(parse(raw, path).keys() - {_METADATA})
    return HeaderResult(file, file, RESTORED, dry_run, tensors, len(raw), len(raw))


def _backup_of(path: Path) -> Path:
    return system.beside(path, after=BACKUP)


def _refuse_backup(path: Path) -> None:
    """Raises ConflictError when a run did not get to its end while it wrote the header of this file."""
    backup = _backup_of(path)
    if not os.path.lexists(backup):
        return
    try:
        with path.open("rb") as f, backup.open("rb") as g:
            saved = g.read()
            same = f.read(len(saved)) == saved
    except OSError:
        same = False
    state = "it still has its old header" if same else "it may have its old header, the new one, or parts of both"
    raise ConflictError(
        f"an earlier run was interrupted while it wrote the header of this file; {state}",
        where=[str(path), str(backup)],
        hint=f"`ckpttool inspect {path} --set-header {backup}` puts the old header back",
    )


def _target(file: Path) -> _EditedFile:
    """Read the file that is to change. Raises IncompleteError, CorruptError."""
    path = resolved(file)
    info, raw = read_raw(path)
    stat = path.stat()
    if DataFile.at(path, stat) != info:
        raise ConflictError("the file changed while it was read", where=str(file), hint="try again")
    target = _EditedFile(file, path, stat, raw)
    try:
        target.old = parse(raw, path)
    except HeaderError:
        # What an edited header repairs need not be readable; its length is what counts.
        target.readable = False
        with contextlib.suppress(ValueError, RecursionError):
            found = json.loads(raw.decode())
            target.old = found if isinstance(found, dict) else {}
    return target


def _edited(path: Path) -> dict[str, Any]:
    """The edited header. Raises IncompleteError (no such file), CorruptError (it is not JSON, or has a name twice)."""
    with readable(path), path.open("rb") as f:
        # Indented JSON is longer than the header that it becomes. One long read would take all of that at once.
        raw = b"".join(takewhile(bool, (f.read(PIECE) for _ in range(2 * MAX_HEADER // PIECE + 1))))
    if len(raw) > 2 * MAX_HEADER:
        raise UsageError(
            "this is too long for a header",
            where=str(path),
            hint="ckpttool inspect FILE.safetensors --set-header FILE.json",
        )
    try:
        return parse(raw.removeprefix(_BOM), path)
    except HeaderError as e:
        hint = "ckpttool inspect FILE.safetensors --set-header FILE.json" if e.id == "header-utf8" else None
        what = e.what.replace("the header", "the edited header", 1)
        raise HeaderError(e.id, what, where=str(path), hint=e.hint or hint) from None


def _validate(new: Mapping[str, Any], target: _EditedFile, edited: Path) -> None:
    """Raises ConflictError when the header does not fit the data."""
    found = problems(new, target.payload)
    if not found:
        return
    shown = "; ".join(p.text for p in found[:SHOWN])
    more = f"; and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    raise ConflictError(
        f"the edited header does not fit the data: {shown}{more}",
        where=[str(edited), str(target.given)],
        hint=_hint(found, new, target),
    )


def _hint(found: list[HeaderProblem], new: Mapping[str, Any], target: _EditedFile) -> str:
    if any(p.id in ("hole", "trailing") for p in found):
        spans = {_span(e) for e in new.values()}
        lost = [n for n, e in target.old.items() if n not in new and _span(e) and _span(e) not in spans]
        if lost:
            return f"tensors cannot be left out of a header (`{lost[0]}`): use `ckpttool drop-keys`"
    if any(p.id == "size" for p in found):
        return "dtype and shape may change as long as the number of bytes stays what it is"
    return "nothing was written; mend the JSON and try again"


def _span(entry: object) -> tuple[int, int] | None:
    """The bytes that an entry names, if it does."""
    offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(type(n) is int for n in offsets):
        return None
    return offsets[0], offsets[1]


def _serialise(new: Mapping[str, Any], edited: Path) -> bytes:
    try:
        text = json.dumps(new, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
    except ValueError:
        raise HeaderError(
            "header-json", "the edited header has a number that JSON has not", where=str(edited)
        ) from None
    if len(text) > MAX_HEADER - 8:
        raise ConflictError(
            f"the edited header has {len(text):,} bytes, safetensors takes {MAX_HEADER:,}", where=str(edited)
        )
    return text


def _padded(text: bytes) -> bytes:
    """As the safetensors library pads: the data starts at a multiple of eight."""
    return text + b" " * (-len(text) % 8)


def _notes(new: Mapping[str, Any], target: _EditedFile) -> list[str]:
    notes = []
    if target.given.is_symlink():
        notes.append(f"{target.given} is a link to {target.path}")
    if not target.readable:
        notes.append("the old header was broken: it was no JSON object, or had a name twice")
    starts = [e["data_offsets"] for n, e in new.items() if n != _METADATA]
    if starts != sorted(starts):
        notes.append("the header is not in the order of the data; Paddle's readers refuse such files")
    return notes


def _output(out: Path, target: _EditedFile) -> Path:
    """Where a copy goes. Raises OutputError, UsageError."""
    path = resolved(out)
    if not path.parent.is_dir():
        raise OutputError("the directory of the output does not exist", where=str(path.parent))
    if os.path.lexists(path):
        if path.is_dir():
            raise OutputError("the output is a directory", where=str(out))
        if os.path.samestat(path.stat(), target.stat):
            raise UsageError("the output is the source", where=str(out), hint="omit it to change the file itself")
        raise OutputError("the output exists", where=str(out), hint="remove it, or give another name")
    return path


def _check_space(path: Path, needed: int) -> None:
    """Raises OutputError when a copy would not fit."""
    try:
        st = os.statvfs(path.parent)
    except OSError:
        return
    free = st.f_bavail * st.f_frsize
    if free < needed + SLACK:
        raise OutputError(
            f"not enough space for a copy of the file: {needed:,} bytes and {SLACK >> 20} MiB to spare are needed,"
            f" {free:,} bytes are free",
            where=str(path.parent),
        )


def _check_writable(path: Path) -> None:
    """A file that may not be written is not replaced either. Raises OutputError."""
    for name, mode in ((path, os.W_OK), (path.parent, os.W_OK | os.X_OK)):
        if not os.access(name, mode):
            raise OutputError(f"the {'file' if name == path else 'directory'} cannot be written", where=str(name))


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        raise IncompleteError("the file does not exist", where=str(path)) from None
    except OSError as e:
        raise write_error(e, str(path), 0, 0) from e


def _check_same(fd: int, target: _EditedFile) -> None:
    """Raises ConflictError when the file is no longer the one that was read."""
    now = os.fstat(fd)
    try:
        named = target.path.stat()
    except OSError:
        named = None
    before = target.stat
    same = named is not None and os.path.samestat(now, before) and os.path.samestat(named, before)
    if not same or (now.st_size, now.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
        raise ConflictError("the file changed during the run", where=str(target.given), hint="try again")


def _write_in_place(target: _EditedFile, header: bytes) -> None:
    """Overwrite the header. At any moment either the file or its backup has the whole old one."""
    fd = _open(target.path)
    backup = _backup_of(target.path)
    try:
        lock(fd, target.path)
        _refuse_backup(target.path)
        with Replacement(backup) as saved:
            saved.fill(struct.pack("<Q", len(target.raw)) + target.raw)
            saved.keep_mode(target.stat)
            saved.sync()
            _check_same(fd, target)
            saved.publish()
        try:
            sync_names([backup.parent])
            if os.fstat(fd).st_nlink != 1:  # a name that was linked to the file meanwhile would change with it
                raise ConflictError("the file changed during the run", where=str(target.given), hint="try again")
            write_all(fd, header, 8)
        except BaseException as e:
            _undo(fd, target, backup)
            if isinstance(e, OSError):
                raise write_error(e, str(target.path), 8, len(header)) from e
            raise
        try:
            system.sync(fd)
        except OSError as e:
            # The kernel says so once; a later sync succeeds although the bytes are lost. So the backup stays.
            raise OutputError(
                f"the new header may not be on disk: {e.strerror}",
                where=[str(target.path), str(backup)],
                hint=f"`ckpttool inspect {target.path} --set-header {backup}` puts the old header back",
            ) from e
        try:
            backup.unlink()
        except OSError as e:
            raise OutputError(
                f"the header is written, but the backup of the old one cannot be removed: {e.strerror}",
                where=str(backup),
                hint="remove it",
            ) from e
        sync_names([backup.parent])
    finally:
        os.close(fd)


def _undo(fd: int, target: _EditedFile, backup: Path) -> None:
    """Put the old header back. Raises OutputError when that fails, too; the backup is left then."""
    try:
        write_all(fd, target.raw, 8)
        system.sync(fd)
        backup.unlink()
    except OSError as e:
        raise OutputError(
            f"the header could not be written, and the old one not be put back: {e.strerror}",
            where=[str(target.path), str(backup)],
            hint=f"`ckpttool inspect {target.path} --set-header {backup}` puts it back",
        ) from e
    with contextlib.suppress(CkptError):
        sync_names([backup.parent])


def _write_copy(target: _EditedFile, header: bytes, destination: Path, *, replace: bool) -> None:
    """A file with the new header and the same data takes the name of ``destination``."""
    try:
        source = os.open(target.path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as e:
        raise CorruptError(f"the file cannot be read: {e.strerror}", where=str(target.path)) from None
    try:
        if destination == target.path:
            lock(source, target.path)
        _check_same(source, target)
        with Replacement(destination) as new:
            start = 8 + len(header)
            create(str(new.temporary), start + target.payload)
            try:
                write_all(new.fd, struct.pack("<Q", len(header)) + header, 0)
                _copy(source, target.start, new.fd, start, target)
            except OSError as e:
                raise write_error(e, str(new.temporary), 0, start + target.payload) from e
            new.keep_mode(target.stat)
            new.sync()
            _check_same(source, target)
            new.publish(force=replace)
            sync_names([destination.parent])
    finally:
        os.close(source)


def _copy(source: int, at: int, out: int, to: int, target: _EditedFile) -> None:
    """Copy the data from ``at`` on, inside the kernel where it can: a filesystem may share blocks instead."""
    stop = target.start + target.payload
    ranged = True
    while at < stop:
        count = min(stop - at, PIECE)
        if ranged:
            done = system.copy_range(source, out, count, at, to)
            # Some filesystems say "nothing" where they cannot.
            ranged = done > 0
        else:
            data = os.pread(source, count, at)
            done = len(data)
            if not done:
                raise CorruptError("the file became shorter", where=f"{target.path} {span(at, stop - at)}")
            write_all(out, data, to)
        at += done
        to += done


# -- what an edit changed


def _differences(
    old: Mapping[str, Any], new: Mapping[str, Any]
) -> tuple[tuple[tuple[str, str], ...], tuple[TensorChange, ...], tuple[str, ...], tuple[str, ...]]:
    """Renamed, changed, added and removed tensors. No data moves: a tensor is known by its bytes, else by its name."""
    before = {n: e for n, e in old.items() if n != _METADATA}
    after = {n: e for n, e in new.items() if n != _METADATA}
    owner = {s: n for n, e in after.items() if (s := _span(e)) and s[0] < s[1]}
    partner: dict[str, str] = {}
    for n, e in before.items():
        if (s := _span(e)) in owner:
            partner[n] = owner.pop(s)
    taken = set(partner.values())
    for n in before:
        if n not in partner and n in after and n not in taken:
            partner[n] = n
            taken.add(n)
    # Tensors without elements have no bytes to be known by; those at the same place take each other's names in order.
    empty: dict[tuple[int, int] | None, list[str]] = {}
    for n in reversed(after):
        if n not in taken:
            empty.setdefault(_span(after[n]), []).append(n)
    for n, e in before.items():
        if n not in partner and (s := _span(e)) is not None and empty.get(s):
            partner[n] = empty[s].pop()
            taken.add(partner[n])
    changed = []
    for n, name in partner.items():
        e = before[n] if isinstance(before[n], dict) else {}
        for key in dict.fromkeys((*e, *after[name])):
            if e.get(key) != after[name].get(key):
                changed.append(TensorChange(name, key, _shown(e.get(key)), _shown(after[name].get(key))))
    return (
        tuple((n, partner[n]) for n in before if partner.get(n, n) != n),
        tuple(changed),
        tuple(n for n in after if n not in taken),
        tuple(n for n in before if n not in partner),
    )


def _shown(value: Any) -> str:
    """A value of an entry as a report shows it."""
    return value if isinstance(value, str) else "" if value is None else json.dumps(value)


def _metadata_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[MetadataChange, ...]:
    found = old.get(_METADATA, {})
    before: Mapping[str, Any] = found if isinstance(found, dict) else {}
    after: Mapping[str, str] = new.get(_METADATA, {})
    return tuple(
        MetadataChange(key, _shown(before[key]) if key in before else None, after.get(key))
        for key in dict.fromkeys((*before, *after))
        if key not in before or key not in after or before[key] != after[key]
    )
