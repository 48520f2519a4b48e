"""A header as JSON and back: what the safetensors library then reads, and what is left when a run dies."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from ckpttool.errors import CkptError, ConflictError, CorruptError, IncompleteError, OutputError, UsageError
from ckpttool.ops.inspect import header as module
from ckpttool.ops.inspect.header import (
    BACKUP,
    COPIED,
    IN_PLACE,
    RESTORED,
    UNCHANGED,
    HeaderResult,
    MetadataChange,
    TensorChange,
    apply,
    dump,
    restore,
)
from tests.helpers.sample import examples
from tests.helpers.tensorfile import Array, Raw, encode, header, origin, read, write
from tests.inspect.models import header_text, replace_header

Edit = Callable[[dict[str, Any]], object]
TENSORS = {
    "b.weight": origin(0, "BF16", (4, 6)),
    "a.weight": origin(1, "U16", (3, 2)),
    "größe": origin(2, "F32", (5,)),
    "empty": Raw("F32", np.zeros((0, 3), np.uint32)),
    "scalar": origin(3, "I64", ()),
}
LONG = "x" * 5000


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(tmp_path / "model.safetensors", TENSORS, {"format": "pt", "note": 'a: "b"\n'})


def edited(file: Path, change: Edit, name: str = "edited.json") -> Path:
    """The dump of a file, changed."""
    data = json.loads(dump(file))
    change(data)
    path = file.with_name(name)
    path.write_text(json.dumps(data, indent=1), encoding="utf-8")
    return path


def change(file: Path, edit: Edit, **more: Any) -> HeaderResult:
    return apply(edited(file, edit), file, **more)


def rename(old: str, new: str) -> Edit:
    def edit(data: dict[str, Any]) -> None:
        items = [(new if n == old else n, e) for n, e in data.items()]
        data.clear()
        data.update(items)

    return edit


def payload(file: Path) -> bytes:
    return file.read_bytes()[8 + len(header_text(file)) :]


def library(file: Path) -> tuple[dict[str, bytes], dict[str, str]]:
    """Tensors and metadata as the safetensors library has them. numpy lacks bfloat16, so only names for that."""
    with safe_open(file, "np") as f:
        names = f.keys()
        bits = {n: f.get_slice(n).get_dtype() for n in names}
        data = {n: f.get_tensor(n).tobytes() for n in names if bits[n] != "BF16"}
        return data | {n: b"" for n in names if bits[n] == "BF16"}, f.metadata() or {}


def refused(error: type[CkptError], file: Path, edit: Edit | str, *words: str, **more: Any) -> CkptError:
    """A change that must fail and leave the folder as it is."""
    if isinstance(edit, str):
        path = file.with_name("edited.json")
        path.write_text(edit, encoding="utf-8")
    else:
        path = edited(file, edit)
    before = {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in file.parent.iterdir() if p.is_file()}
    with pytest.raises(error) as caught:
        apply(path, file, **more)
    assert {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in file.parent.iterdir() if p.is_file()} == before
    for word in words:
        assert word in str(caught.value), str(caught.value)
    return caught.value


# -- dump


def test_dump(file: Path) -> None:
    text = dump(file)
    assert text.splitlines() == [
        "{",
        '  "__metadata__": {',
        '    "format": "pt",',
        '    "note": "a: \\"b\\"\\n"',
        "  },",
        '  "b.weight": {"dtype": "BF16", "shape": [4, 6], "data_offsets": [0, 48]},',
        '  "a.weight": {"dtype": "U16", "shape": [3, 2], "data_offsets": [48, 60]},',
        '  "größe": {"dtype": "F32", "shape": [5], "data_offsets": [60, 80]},',
        '  "empty": {"dtype": "F32", "shape": [0, 3], "data_offsets": [80, 80]},',
        '  "scalar": {"dtype": "I64", "shape": [], "data_offsets": [80, 88]}',
        "}",
    ]
    assert text.endswith("}\n")
    assert json.loads(text) == header(file)


def test_dump_of_nothing(tmp_path: Path) -> None:
    assert dump(write(tmp_path / "a.safetensors", {})) == "{}\n"
    assert json.loads(dump(write(tmp_path / "a.safetensors", {}, {}))) == {"__metadata__": {}}


def test_dump_keeps_what_is_broken(file: Path) -> None:
    text = (
        '{"a":{"dtype":"F99","shape":"x","data_offsets":[1]},"__metadata__":{"n":1,"o":{"p":[null,true]}},'
        '"a":3,"half":"\\ud800","line":"\u2028"}'
    )
    replace_header(file, text.encode())
    said = dump(file)
    assert said.encode()
    assert said.count('"a": ') == 2
    assert said.splitlines()[2:5] == ['  "__metadata__": {', '    "n": 1,', '    "o": {"p": [null, true]}']
    pairs = json.JSONDecoder(object_pairs_hook=list).decode
    assert pairs(said) == pairs(text)


@pytest.mark.parametrize("text", [b"{", b"[]", b"\xff{}", b"[" * 100_000, b'{"a":' * 50_000])
def test_dump_of_what_is_no_json(file: Path, text: bytes) -> None:
    replace_header(file, text)
    with pytest.raises(CorruptError, match="the header is"):
        dump(file)


def test_dump_of_what_is_no_safetensors_file(tmp_path: Path) -> None:
    with pytest.raises(IncompleteError, match="does not exist"):
        dump(tmp_path / "a.safetensors")
    (tmp_path / "a.safetensors").write_bytes(b"version https://git-lfs")
    with pytest.raises(CorruptError, match="git-lfs pointer"):
        dump(tmp_path / "a.safetensors")


# -- what people do


def test_unchanged(file: Path) -> None:
    before = (file.read_bytes(), file.stat().st_mtime_ns, file.stat().st_ino)
    result = change(file, lambda _: None)
    assert (result.how, result.bytes_written, result.tensors) == (UNCHANGED, 0, 5)
    assert (result.renamed, result.changed, result.metadata) == ((), (), ())
    assert (file.read_bytes(), file.stat().st_mtime_ns, file.stat().st_ino) == before


def test_rename_in_place(file: Path) -> None:
    inode, length, data = file.stat().st_ino, len(header_text(file)), payload(file)
    result = change(file, rename("a.weight", "c"))
    assert result.how == IN_PLACE
    assert result.renamed == (("a.weight", "c"),)
    assert (result.changed, result.added, result.removed, result.metadata) == ((), (), (), ())
    assert result.bytes_written == result.header_bytes == length
    assert (file.stat().st_ino, len(header_text(file)), payload(file)) == (inode, length, data)
    assert read(file)["c"].bits.tobytes() == TENSORS["a.weight"].bits.tobytes()
    assert library(file)[0]["c"] == TENSORS["a.weight"].bits.tobytes()
    assert sorted(p.name for p in file.parent.iterdir()) == ["edited.json", "model.safetensors"]


def test_rename_with_a_copy(file: Path) -> None:
    inode, data = file.stat().st_ino, payload(file)
    file.chmod(0o640)
    result = change(file, rename("a.weight", LONG))
    assert result.how == COPIED
    assert result.renamed == (("a.weight", LONG),)
    assert result.bytes_written == file.stat().st_size
    assert file.stat().st_ino != inode
    assert file.stat().st_mode & 0o777 == 0o640
    assert payload(file) == data
    assert len(header_text(file)) % 8 == 0
    assert library(file)[0][LONG] == TENSORS["a.weight"].bits.tobytes()
    assert sorted(p.name for p in file.parent.iterdir()) == ["edited.json", "model.safetensors"]


def test_names_can_be_exchanged(file: Path) -> None:
    def exchange(data: dict[str, Any]) -> None:
        data["scalar"], data["empty"] = data["empty"], data["scalar"]

    result = change(file, exchange)
    assert result.renamed == (("empty", "scalar"), ("scalar", "empty"))
    assert (result.changed, result.added, result.removed) == ((), (), ())
    assert "the header is not in the order of the data" in result.notes[0]
    assert library(file)[0]["empty"] == TENSORS["scalar"].bits.tobytes()


def test_metadata(file: Path) -> None:
    def edit(data: dict[str, Any]) -> None:
        data["__metadata__"] = {"format": "np", "größe": "1"}

    result = change(file, edit)
    assert result.metadata == (
        MetadataChange("format", "pt", "np"),
        MetadataChange("note", 'a: "b"\n', None),
        MetadataChange("größe", None, "1"),
    )
    assert library(file)[1] == {"format": "np", "größe": "1"}
    assert change(file, lambda d: d.pop("__metadata__")).metadata[0] == MetadataChange("format", "np", None)
    assert library(file)[1] == {}
    # What was removed left room.
    assert change(file, lambda d: d.update(__metadata__={"format": "pt"})).how == IN_PLACE
    assert library(file)[1] == {"format": "pt"}


def test_relabel_and_reshape(file: Path) -> None:
    def edit(data: dict[str, Any]) -> None:
        data["a.weight"] |= {"dtype": "BF16", "shape": [6]}

    result = change(file, edit)
    assert result.changed == (
        TensorChange("a.weight", "dtype", "U16", "BF16"),
        TensorChange("a.weight", "shape", "[3, 2]", "[6]"),
    )
    with safe_open(file, "np") as f:
        assert f.get_slice("a.weight").get_dtype() == "BF16"
        assert f.get_slice("a.weight").get_shape() == [6]


def test_metadata_that_is_not_strings_can_be_repaired(file: Path) -> None:
    text = json.loads(header_text(file))
    text["__metadata__"] = {"step": 7, "nested": {"a": [1]}}
    replace_header(file, json.dumps(text).encode())
    assert json.loads(dump(file))["__metadata__"] == {"step": 7, "nested": {"a": [1]}}
    refused(ConflictError, file, lambda _: None, "not a map of strings")
    result = change(file, lambda d: d.update(__metadata__={"step": "7", "nested": '{"a": [1]}'}))
    assert MetadataChange("step", "7", "7") in result.metadata
    assert library(file)[1]["step"] == "7"


@pytest.mark.parametrize("case", ["twice", "no json", "utf8"])
def test_a_broken_header_can_be_replaced(file: Path, case: str) -> None:
    right = file.with_name("right.json")
    right.write_text(dump(file), encoding="utf-8")
    text = header_text(file)
    broken = {
        "twice": text.rstrip()[:-1] + b',"scalar":{"dtype":"F64","shape":[],"data_offsets":[80,88]}}',
        "no json": b"{" + text[2:],
        "utf8": text.replace(b"pt", b"\xff\xfe"),
    }[case]
    replace_header(file, broken)
    if case == "twice":
        assert dump(file).count('"scalar"') == 2
    result = apply(right, file)
    assert "the old header was broken" in result.notes[0]
    assert set(library(file)[0]) == set(TENSORS)
    assert result.changed == ((TensorChange("scalar", "dtype", "F64", "I64"),) if case == "twice" else ())


def test_dry_run(file: Path) -> None:
    before = file.read_bytes()
    for name, how in (("c", IN_PLACE), (LONG, COPIED)):
        result = change(file, rename("a.weight", name), dry_run=True)
        assert (result.how, result.dry_run, result.renamed) == (how, True, (("a.weight", name),))
        assert file.read_bytes() == before
    out = file.with_name("out.safetensors")
    assert change(file, rename("a.weight", "c"), out=out, dry_run=True).how == COPIED
    assert not out.exists()


def test_another_output(file: Path) -> None:
    before = file.read_bytes()
    out = file.with_name("out.safetensors")
    result = change(file, rename("a.weight", "c"), out=out)
    assert (result.how, result.out) == (COPIED, out)
    assert file.read_bytes() == before
    assert "c" in library(out)[0]
    refused(OutputError, file, rename("a.weight", "d"), "the output exists", out=out)
    assert change(file, lambda _: None, out=file.with_name("same.safetensors")).how == COPIED
    assert read(file.with_name("same.safetensors")).keys() == TENSORS.keys()
    refused(UsageError, file, lambda _: None, "the output is the source", out=file)
    refused(OutputError, file, lambda _: None, "does not exist", out=file.parent / "no" / "a")
    refused(OutputError, file, lambda _: None, "is a directory", out=file.parent)


def test_a_copy_is_what_the_library_writes(tmp_path: Path) -> None:
    """A header in the library's order comes out byte for byte as the library writes it."""
    from safetensors.numpy import save_file

    arrays: dict[str, Array] = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "größe": np.arange(3, dtype=np.int8)}
    one, two = tmp_path / "one.safetensors", tmp_path / "two.safetensors"
    save_file(arrays, one, {"format": "np"})
    save_file({"longer.name": arrays["a"], "größe": arrays["größe"]}, two, {"format": "np"})
    change(one, rename("a", "longer.name"))
    assert one.read_bytes() == two.read_bytes()


def test_links(file: Path) -> None:
    link = file.with_name("link.safetensors")
    link.symlink_to(file.name)
    result = change(link, rename("a.weight", LONG))
    assert link.is_symlink()
    assert LONG in read(file)
    assert "is a link to" in result.notes[0]
    # In place, another name of the same file would change, too.
    other = file.with_name("other.safetensors")
    os.link(file, other)
    result = change(file, rename(LONG, "c"))
    assert result.how == COPIED
    assert "hard links" in result.notes[0]
    assert LONG in read(other)
    assert "c" in read(file)


# -- refusals


def test_tensors_cannot_be_left_out(file: Path) -> None:
    for name in ("a.weight", "scalar"):
        error = refused(ConflictError, file, lambda d, name=name: d.pop(name), "belong to no tensor")  # type: ignore[misc]
        assert "use `ckpttool drop-keys`" in str(error.hint)
        assert f"`{name}`" in str(error.hint)
    result = change(file, lambda d: d.pop("empty"))  # has no bytes
    assert result.removed == ("empty",)
    assert change(file, lambda d: d.update(empty={"dtype": "F32", "shape": [0], "data_offsets": [0, 0]})).added


MISFITS: dict[str, tuple[Edit, str]] = {
    "overlap": (lambda d: d["scalar"].update(data_offsets=[72, 80]), "overlap"),
    "size": (lambda d: d["scalar"].update(shape=[2]), "needs 16 bytes"),
    "dtype": (lambda d: d["scalar"].update(dtype="int64"), "unknown dtype"),
    "shape": (lambda d: d["scalar"].update(shape=None), "no valid shape"),
    "offsets": (lambda d: d["scalar"].update(data_offsets=[-8, 0]), "no valid data_offsets"),
    "beyond": (lambda d: d["scalar"].update(data_offsets=[88, 96]), "the file has 88"),
    "entry": (lambda d: d.update(scalar=1), "is not an object"),
    "metadata": (lambda d: d["__metadata__"].update(a=1), "not a map of strings"),
    "new": (lambda d: d.update(more={"dtype": "U8", "shape": [1], "data_offsets": [88, 89]}), "the file has 88"),
}


@pytest.mark.parametrize("case", MISFITS)
def test_what_does_not_fit_is_refused(file: Path, case: str) -> None:
    edit, words = MISFITS[case]
    refused(ConflictError, file, edit, "does not fit the data", words)
    refused(ConflictError, file, edit, words, out=file.with_name("out.safetensors"))


def test_all_problems_are_counted(file: Path) -> None:
    def edit(data: dict[str, Any]) -> None:
        data["__metadata__"]["a"] = 1
        for name in TENSORS:
            data[name]["dtype"] = "x" + name
        data["more"] = data["other"] = 1

    refused(ConflictError, file, edit, "not a map of strings", "xb.weight", "and 3 more")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"a": 1, "a": 2}', "the name `a` occurs twice"),
        ("{", "not valid JSON"),
        ("[]", "not a JSON object"),
        ("[" * 100_000, "nested"),
        ('{"\\ud800": 1}', "not UTF-8"),
    ],
)
def test_what_is_no_json(file: Path, text: str, words: str) -> None:
    refused(CorruptError, file, text, words, "the edited header" if "twice" not in words else "edited.json")


def test_a_name_twice_in_an_entry(file: Path) -> None:
    text = dump(file).replace('"shape": [],', '"shape": [], "dtype": "F64",')
    refused(CorruptError, file, text, "`dtype` occurs twice")


def test_numbers_that_json_has_not(file: Path) -> None:
    text = dump(file).replace('"shape": [],', '"shape": [], "more": NaN,')
    refused(CorruptError, file, text, "a number that JSON has not")


def test_a_byte_order_mark_is_no_matter(file: Path) -> None:
    path = file.with_name("edited.json")
    path.write_text(dump(file).replace("\n", "\r\n"), encoding="utf-8-sig")
    assert apply(path, file).how == UNCHANGED


def test_arguments_in_the_wrong_order(file: Path) -> None:
    path = edited(file, lambda _: None)
    with pytest.raises(CkptError) as caught:
        apply(file, path)
    assert path.name in str(caught.value)
    with pytest.raises(IncompleteError, match="does not exist"):
        apply(file.with_name("none.json"), file)
    with pytest.raises(CorruptError, match="cannot be read"):
        apply(file.parent, file)


def test_a_file_that_is_far_too_long(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_HEADER", 1000)
    path = file.with_name("edited.json")
    path.write_bytes(b" " * 2001)
    with pytest.raises(UsageError, match="too long"):
        apply(path, file)


def test_a_header_beyond_the_limit(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_HEADER", 1000)
    refused(ConflictError, file, lambda d: d["__metadata__"].update(a="x" * 1200), "safetensors takes 1,000")


def test_a_full_disk(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        f_bavail, f_frsize = 1, 4096

    monkeypatch.setattr(os, "statvfs", lambda _: Full)
    refused(OutputError, file, rename("a.weight", LONG), "not enough space")
    assert change(file, rename("a.weight", "c")).how == IN_PLACE


def test_a_file_that_must_not_be_written(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    refused(OutputError, file, rename("a.weight", LONG), "cannot be written")
    refused(OutputError, file, rename("a.weight", "c"), "cannot be written")


def test_another_run_writes(file: Path) -> None:
    with file.open("rb") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        for name in ("c", LONG):
            refused(OutputError, file, rename("a.weight", name), "another run")


@pytest.mark.parametrize("name", ["c", LONG])
def test_a_file_that_changes_meanwhile(file: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    path = edited(file, rename("a.weight", name))
    before = module._validate

    def touch(*arguments: Any) -> None:
        before(*arguments)
        file.write_bytes(encode(TENSORS, {"format": "someone else"}))

    monkeypatch.setattr(module, "_validate", touch)
    with pytest.raises(ConflictError, match="changed"):
        apply(path, file)
    assert header(file)["__metadata__"] == {"format": "someone else"}
    assert sorted(p.name for p in file.parent.iterdir()) == ["edited.json", "model.safetensors"]


@pytest.mark.parametrize("name", ["c", LONG])
def test_a_file_that_is_replaced_meanwhile(file: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Another file of the same name, size and time."""
    path = edited(file, rename("a.weight", name))
    before = module._validate

    def exchange(*arguments: Any) -> None:
        before(*arguments)
        stat = file.stat()
        other = file.with_name("other")
        shutil.copy(file, other)
        os.utime(other, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        other.replace(file)

    monkeypatch.setattr(module, "_validate", exchange)
    with pytest.raises(ConflictError, match="changed"):
        apply(path, file)
    assert read(file).keys() == TENSORS.keys()


# -- copying


@pytest.mark.parametrize("code", [None, errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP])
def test_copying_without_help(file: Path, monkeypatch: pytest.MonkeyPatch, code: int | None) -> None:
    """copy_file_range that is refused, or that copies nothing."""
    monkeypatch.setattr(module, "PIECE", 7)

    def refuse(*_: object) -> int:
        if code is None:
            return 0
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "copy_file_range", refuse)
    data = payload(file)
    assert change(file, rename("a.weight", LONG)).how == COPIED
    assert payload(file) == data


def test_memory_is_bounded(tmp_path: Path) -> None:
    import tracemalloc

    file = write(tmp_path / "a.safetensors", {"a": Raw("U8", np.zeros(24 << 20, np.uint8))})
    path = edited(file, rename("a", LONG))
    tracemalloc.start()
    apply(path, file)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 12 << 20


@pytest.mark.parametrize("call", ["copy_file_range", "pwrite", "fsync", "replace", "fchmod"])
def test_a_copy_that_fails(file: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = edited(file, rename("a.weight", LONG))
    before = file.read_bytes()
    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OutputError, match="no space left"):
        apply(path, file)
    monkeypatch.undo()
    assert file.read_bytes() == before
    assert sorted(p.name for p in file.parent.iterdir()) == ["edited.json", "model.safetensors"]


# -- in place, and dying there


def failing(monkeypatch: pytest.MonkeyPatch, call: str, at: set[int]) -> list[int]:
    """Let the calls of these numbers fail."""
    real = getattr(os, call)
    count = [0]

    def fail(*arguments: Any, **more: Any) -> Any:
        count[0] += 1
        if count[0] in at:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(*arguments, **more)

    monkeypatch.setattr(os, call, fail)
    return count


def test_a_header_that_cannot_be_written(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = file.read_bytes()
    path = edited(file, rename("a.weight", "c"))
    failing(monkeypatch, "pwrite", {2})  # the first is the backup's
    with pytest.raises(OutputError, match="Input/output error"):
        apply(path, file)
    assert file.read_bytes() == before
    assert sorted(p.name for p in file.parent.iterdir()) == ["edited.json", "model.safetensors"]


def test_a_header_that_cannot_be_put_back(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = file.read_bytes()
    path = edited(file, rename("a.weight", "c"))
    failing(monkeypatch, "pwrite", {2, 3})
    with pytest.raises(OutputError, match="not be put back") as caught:
        apply(path, file)
    monkeypatch.undo()
    assert BACKUP in str(caught.value.hint)
    assert restore(file.with_name(file.name + BACKUP), file).how == RESTORED
    assert file.read_bytes() == before


def test_a_header_that_cannot_be_synced(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a sync that failed nobody knows what is on disk, so the backup stays."""
    before = file.read_bytes()
    path = edited(file, rename("a.weight", "c"))
    failing(monkeypatch, "fsync", {3})  # backup, directory, file
    with pytest.raises(OutputError, match="may not be on disk"):
        apply(path, file)
    monkeypatch.undo()
    assert apply(file.with_name(file.name + BACKUP), file).how == RESTORED
    assert file.read_bytes() == before


def test_a_backup_that_stays(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = edited(file, rename("a.weight", "c"))
    failing(monkeypatch, "unlink", {1})
    with pytest.raises(OutputError, match="the header is written"):
        apply(path, file)
    assert "c" in read(file)


KILLS = [("pwrite", n) for n in (1, 2)] + [("fsync", n) for n in (1, 2, 3, 4)] + [("replace", 1), ("unlink", 1)]


def killed(path: Path, file: Path, call: str, number: int, *, torn: bool) -> bool:
    """Run in a child that dies in the given call, or half-way through a write. Returns whether it came to that."""
    child = os.fork()
    if not child:
        real, count = getattr(os, call), [0]

        def die(*arguments: Any, **more: Any) -> Any:
            count[0] += 1
            if count[0] == number:
                if torn and call == "pwrite":
                    real(arguments[0], bytes(arguments[1])[: len(arguments[1]) // 2], arguments[2])
                os._exit(7)
            return real(*arguments, **more)

        setattr(os, call, die)
        try:
            apply(path, file)
            os._exit(0)
        finally:
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 7)
    return code == 7


@pytest.mark.product
@pytest.mark.parametrize("torn", [False, True])
@pytest.mark.parametrize(("call", "number"), KILLS)
def test_killed_in_place(file: Path, call: str, number: int, torn: bool) -> None:
    before = file.read_bytes()
    path = edited(file, rename("a.weight", "c"))
    backup = file.with_name(file.name + BACKUP)
    assert killed(path, file, call, number, torn=torn)
    if backup.exists():
        assert backup.read_bytes() == before[: 8 + len(header_text(file))]
        for act in (lambda: apply(path, file), lambda: dump(file), lambda: apply(path, file, out=file.with_name("o"))):
            with pytest.raises(ConflictError, match="an earlier run was interrupted") as caught:
                act()
            assert str(backup) in str(caught.value.hint)
        assert json.loads(dump(backup)) == json.loads(before[8 : 8 + len(header_text(file))])
        assert apply(backup, file, dry_run=True).how == RESTORED
        assert backup.exists()
        result = apply(backup, file)
        assert (result.how, result.tensors) == (RESTORED, 5)
        assert not backup.exists()
        assert file.read_bytes() == before
    elif (call, number) == ("fsync", 4):
        assert "c" in read(file)
        return
    assert file.read_bytes() == before
    assert apply(path, file).how == IN_PLACE
    assert "c" in library(file)[0]
    assert sorted(p.name for p in file.parent.iterdir()) == ["edited.json", "model.safetensors"]


@pytest.mark.parametrize(
    ("call", "number"),
    [("copy_file_range", 1), ("pwrite", 1), ("fchmod", 1), ("fsync", 1), ("replace", 1), ("fsync", 2)],
)
def test_killed_while_copying(file: Path, call: str, number: int) -> None:
    before = file.read_bytes()
    path = edited(file, rename("a.weight", LONG))
    assert killed(path, file, call, number, torn=False)
    if (call, number) == ("fsync", 2):
        assert LONG in library(file)[0]
        return
    assert file.read_bytes() == before
    assert apply(path, file).how == COPIED  # over what the other run left
    assert LONG in library(file)[0]
    assert sorted(p.name for p in file.parent.iterdir()) == ["edited.json", "model.safetensors"]


def test_a_backup_of_another_file(file: Path) -> None:
    backup = file.with_name(file.name + BACKUP)
    text = header_text(file)
    other = file.with_name("other.safetensors" + BACKUP)
    other.write_bytes(struct.pack("<Q", len(text)) + text)
    with pytest.raises(UsageError, match="another file"):
        apply(other, file)
    other.rename(backup)
    with pytest.raises(UsageError, match="not into another"):
        apply(backup, file, out=file.with_name("o"))
    write(file, {**TENSORS, "more": TENSORS["scalar"]})
    before = file.read_bytes()
    with pytest.raises(ConflictError, match="does not fit"):
        restore(backup, file)
    assert file.read_bytes() == before
    backup.write_bytes(backup.read_bytes()[:-1])
    with pytest.raises(CorruptError):
        restore(backup, file)
    with pytest.raises(IncompleteError):
        restore(backup.with_name("none" + BACKUP), backup.with_name("none"))


# -- anything

NAMES = st.text(min_size=1, max_size=12).filter(lambda n: n != "__metadata__")


@settings(max_examples=examples(60))
@given(
    st.lists(NAMES, unique=True, max_size=5),
    st.lists(NAMES, unique=True, min_size=5, max_size=5),
    st.dictionaries(st.text(max_size=6), st.text(max_size=20), max_size=3),
    st.dictionaries(st.text(max_size=6), st.text(max_size=20), max_size=3),
)
def test_any_names_and_metadata(
    tmp_path_factory: pytest.TempPathFactory,
    before: list[str],
    after: list[str],
    old: dict[str, str],
    new: dict[str, str],
) -> None:
    """Whatever is written in JSON is what the library reads, and undoing it gives what was there."""
    file = tmp_path_factory.mktemp("any") / "a.safetensors"
    write(file, {n: origin(i, "I32", (i + 1,)) for i, n in enumerate(before)}, old)
    first = file.with_name("first.json")
    first.write_text(dump(file), encoding="utf-8")
    assert json.loads(dump(file)) == header(file)
    assert list(json.loads(dump(file))) == list(header(file))
    data = payload(file)
    entries = [e for n, e in header(file).items() if n != "__metadata__"]
    wanted = dict(zip(after, entries, strict=False))
    second = file.with_name("second.json")
    second.write_text(json.dumps({"__metadata__": new, **wanted}), encoding="utf-8")
    result = apply(second, file)
    assert payload(file) == data
    assert library(file) == ({n: origin(i, "I32", (i + 1,)).bits.tobytes() for i, n in enumerate(wanted)}, new)
    assert result.renamed == tuple((a, b) for a, b in zip(before, wanted, strict=True) if a != b)
    assert (result.changed, result.added, result.removed) == ((), (), ())
    apply(first, file)
    assert cast("dict[str, Any]", json.loads(dump(file))) == json.loads(first.read_text(encoding="utf-8"))
    assert payload(file) == data
