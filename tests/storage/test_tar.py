"""Files inside of a tar: what Python's own tarfile packs is found where it lies; what lies is one error."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from ckpttool.errors import CkptError, ConflictError, CorruptError, IncompleteError, UnsupportedError
from ckpttool.storage.listing import list_source
from ckpttool.storage.place import open_file, parse_place, walk
from ckpttool.storage.tar import TarPlace
from tests.helpers.command import reshard

FIXTURES = Path(__file__).parents[2] / "fixtures"
LONG = "model_weights/" + "model.decoder.layers.self_attention." * 7 + "weight/0.0"
FILES = {"a.yaml": b"a: 1\n", "model_weights/.metadata": b"x" * 1000, LONG: b"long", "empty": b"", "näme": b"n"}


def packed(path: Path, form: int, files: dict[str, bytes] = FILES) -> Path:
    with tarfile.open(path, "w:", format=form) as tar:
        folder = tarfile.TarInfo(".")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
        for name, data in files.items():
            member = tarfile.TarInfo(f"./{name}")
            member.size, member.mtime = len(data), 1.5  # a fraction makes a pax header
            tar.addfile(member, io.BytesIO(data))
    return path


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_members_are_found_where_they_lie(form: int, tmp_path: Path) -> None:
    path = packed(tmp_path / "x.nemo", form)
    root = TarPlace(path)
    assert sorted(walk(root)) == sorted(FILES)
    for name, data in FILES.items():
        place = parse_place(f"tar:{path}!/{name}")
        assert (place, place.is_file(), place.is_dir()) == (root / name, True, False)
        with open_file(place) as file:
            assert (file.info.size, file.pread(5000, 0), file.pread(3, 2)) == (len(data), data, data[2:5])
        with place.open("rb") as f:
            assert f.read() == data
            assert (f.seek(-3, 2) if data else 0, f.read()) == (max(0, len(data) - 3), data[-3:])
    with tarfile.open(path) as tar:
        assert [(root / m.name.removeprefix("./")).span()[0] for m in tar if m.isfile()] == [
            m.offset_data for m in tar if m.isfile()
        ]
    listing = list_source(root)
    assert (listing.names, listing.folders()) == (("a.yaml", "empty", "näme"), ["model_weights"])
    assert str((root / "a.yaml").parent) == str(root) == f"tar:{path}!"


def test_large_sizes_are_read(tmp_path: Path) -> None:
    """Octal digits end at 8 GiB. The holes cost nothing."""
    for form in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT):
        member = tarfile.TarInfo("large")
        member.size = (8 << 30) + 1000
        head = member.tobuf(form)
        path = tmp_path / f"{form}.nemo"
        with path.open("wb") as f:
            f.write(head)
            f.truncate(len(head) + member.size + -member.size % 512 + 1024)
        assert (TarPlace(path) / "large").span() == (len(head), member.size)


def test_nothing_is_unpacked_to_convert(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "x.nemo", "w:") as tar:
        tar.add(FIXTURES / "llama_tp8", arcname=".")
    reshard(f"tar:{tmp_path}/x.nemo!", tmp_path / "out", "--tp-out", "2", "--verify")
    reshard(FIXTURES / "llama_tp8", tmp_path / "plain", "--tp-out", "2")
    for p in (tmp_path / "plain").glob("*.safetensors"):
        assert p.read_bytes() == (tmp_path / "out" / p.name).read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "plain", "x.nemo"]


def _member(name: str, data: bytes = b"data", **fields: object) -> bytes:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for key, value in fields.items():
        setattr(info, key, value)
    return info.tobuf(tarfile.PAX_FORMAT) + data + bytes(-len(data) % 512)


def _pax(text: bytes) -> bytes:
    return _member("pax", text, type=b"x")


def _record(key: str, value: str) -> bytes:
    body = f" {key}={value}\n"
    return f"{len(body) + 2 if len(body) < 98 else len(body) + 3}{body}".encode()


HOSTILE: dict[str, tuple[type[CkptError], str, Callable[[], bytes]]] = {
    "parent": (CorruptError, "leads out of the tar", lambda: _member("a/../../x")),
    "absolute": (CorruptError, "leads out of the tar", lambda: _member("/etc/passwd")),
    "pax parent": (CorruptError, "leads out of the tar", lambda: _pax(_record("path", "../x")) + _member("a")),
    "symbolic link": (UnsupportedError, "a symbolic link", lambda: _member("a", b"", type=b"2", linkname="/etc")),
    "hard link": (UnsupportedError, "a hard link", lambda: _member("a", b"", type=b"1", linkname="b")),
    "device": (UnsupportedError, "not a file or a directory", lambda: _member("a", b"", type=b"3")),
    "sparse": (UnsupportedError, "is sparse", lambda: _member("a", type=b"S")),
    "pax sparse": (UnsupportedError, "is sparse", lambda: _pax(_record("GNU.sparse.major", "1")) + _member("a")),
    "twice": (ConflictError, "two members called `./a`", lambda: _member("a") + _member("./a")),
    "file and directory": (CorruptError, "a file and a directory", lambda: _member("a") + _member("a/b")),
    "directory and file": (ConflictError, "two members", lambda: _member("a/b") + _member("a")),
    "directory with bytes": (CorruptError, "has 4 bytes", lambda: _member("a", type=b"5")),
    "size": (IncompleteError, "the tar is cut off", lambda: _lies(10**6)),
    "endless size": (IncompleteError, "the tar is cut off", lambda: _pax(_record("size", "9" * 18)) + _member("a")),
    "size of words": (CorruptError, "a size that is not a number", lambda: _pax(_record("size", "-5")) + _member("a")),
    "pax length": (CorruptError, "a pax header is damaged", lambda: _pax(b"99 path=x\n") + _member("a")),
    "pax without end": (CorruptError, "a pax header is damaged", lambda: _pax(b"9 path=xx") + _member("a")),
    "long name": (CorruptError, "the description of a member has", lambda: _member("n", bytes(1 << 21), type=b"L")),
    "global": (UnsupportedError, "a global pax header", lambda: _member("g", _record("size", "1"), type=b"g")),
    "checksum": (CorruptError, "is damaged", lambda: _member("a") + b"x" + _member("b")[1:]),
    "no tar": (CorruptError, "this is not a tar", lambda: b"hello" * 300),
    "compressed": (UnsupportedError, "the tar is compressed", lambda: b"\x1f\x8b\x08" + bytes(600)),
    "short": (IncompleteError, "the tar is cut off", lambda: _member("a", bytes(5000))[:2000]),
}


def _lies(size: int) -> bytes:
    info = tarfile.TarInfo("a")
    info.size = size
    return info.tobuf()


@pytest.mark.parametrize("case", HOSTILE)
def test_what_lies_about_itself_is_one_error(case: str, tmp_path: Path) -> None:
    kind, words, data = HOSTILE[case]
    (tmp_path / "x.nemo").write_bytes(data() + bytes(1024))
    with pytest.raises(kind, match=words):
        list_source(TarPlace(tmp_path / "x.nemo"))
    assert [p.name for p in tmp_path.iterdir()] == ["x.nemo"]


def test_a_tar_without_its_end_is_cut_off(tmp_path: Path) -> None:
    """All members are whole, but nobody knows that they are all."""
    (tmp_path / "x.nemo").write_bytes(_member("a"))
    with pytest.raises(IncompleteError, match="cut off"):
        list_source(TarPlace(tmp_path / "x.nemo"))


def test_what_is_not_there_is_not_found(tmp_path: Path) -> None:
    assert not TarPlace(tmp_path / "x.nemo").exists()
    root = TarPlace(packed(tmp_path / "x.nemo", tarfile.PAX_FORMAT))
    assert not (root / "b").exists()
    for place in (root / "b", root / "model_weights"):
        with pytest.raises(OSError, match=r"No such file|Is a directory"):
            place.open_file()
    with pytest.raises(OSError, match="No such file"):
        list((root / "b").scan())
