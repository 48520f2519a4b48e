"""A system without what only Linux has: the same bytes, and each call's stand-in by itself.

`pytest -p tests.helpers.portable tests/reshard tests/merge` runs whole rooms of tests there.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl as fcntl_module
import hashlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ckpttool.storage import system
from tests.helpers.command import ckpttool
from tests.helpers.portable import OF_GLIBC, Libc, elsewhere, without

ROOT = Path(__file__).parents[2]


def digests(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.rglob("*") if p.is_file()}


COMMANDS = {
    "reshard": "reshard {f}/llama_tp8 {o}/dst --tp-out 2 --verify --manifest",
    "merge": "merge {f}/merge/inputs/ft1 {f}/merge/inputs/ft2 --base {f}/merge/inputs/base --method ties"
    " --weights 0.6,0.4 --param density=0.5 -o {o}/dst --verify",
    "quantize": "quantize {f}/hf_tiny_source {o}/dst --recipe channel --verify",
    "drop-keys": "drop-keys {f}/hf_tiny_source {o}/dst lm_head.weight --link",
}


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_write_the_same_bytes(tmp_path: Path, command: str) -> None:
    def run(folder: Path) -> dict[str, str]:
        folder.mkdir(exist_ok=True)
        words = COMMANDS[command].format(f=ROOT / "fixtures", o=folder).split()
        done = ckpttool(*words, *(["--force"] if (folder / "dst").exists() else []))
        assert done.code == 0, done.err
        assert [p.name for p in folder.iterdir()] == ["dst"]
        return digests(folder / "dst")

    here = run(tmp_path / "here")
    with elsewhere():
        assert run(tmp_path / "there") == here
        assert run(tmp_path / "there") == here  # in place of the one that is there: two renames
    assert len(here) > 1


def test_the_helper_takes_them_away() -> None:
    """Or the tests above would show nothing."""
    libc = Libc(system.libc())
    assert all(hasattr(system.libc(), name) and not hasattr(libc, name) for name in OF_GLIBC)
    with elsewhere():
        assert not hasattr(os, "preadv")
        assert system.descriptors() is not None  # /dev/fd, as on macOS
        assert system.uncached() == 0
        assert not system.can_sync_range()
        assert system.cores() == os.cpu_count()
    assert hasattr(os, "preadv")


def test_reading_without_preadv(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(bytes(range(100)))
    fd = os.open(path, os.O_RDONLY)
    first, second = bytearray(10), bytearray(20)
    try:
        with without(os, "preadv"):
            assert system.read_into(fd, [memoryview(b""), memoryview(first), memoryview(second)], 5) == 10
            assert system.read_into(fd, [memoryview(second)], 90) == 10
            assert system.read_into(fd, [], 90) == 0
    finally:
        os.close(fd)
    assert (bytes(first), bytes(second[:10])) == (bytes(range(5, 15)), bytes(range(90, 100)))


class Macos(Libc):
    """With what macOS has in their place, as far as it can be shown here."""

    def __init__(self, real: Any) -> None:
        super().__init__(real)
        self.calls: list[tuple[Any, ...]] = []
        self.fails = 0

    def renamex_np(self, one: bytes, two: bytes, flags: Any) -> int:
        self.calls.append((one, two, flags.value))
        ctypes.set_errno(self.fails)
        return -1 if self.fails else 0

    def clonefile(self, source: bytes, path: bytes, _flags: Any) -> int:
        Path(os.fsdecode(path)).write_bytes(Path(os.fsdecode(source)).read_bytes())
        return 0

    def sysctlbyname(self, name: bytes, text: Any, size: Any, _new: Any, _length: Any) -> int:
        assert (name, size._obj.value) == (b"kern.bootsessionuuid", 64)
        text.value = b"4F1E"
        return 0


def test_the_calls_of_macos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    libc = Macos(system.libc())
    monkeypatch.setattr(system, "libc", lambda: libc)
    assert system.exchange(Path("a"), Path("b"))
    assert libc.calls == [(b"a", b"b", 2)]
    libc.fails = errno.ENOTSUP
    assert not system.exchange(Path("a"), Path("b"))
    libc.fails = errno.ENOENT
    with pytest.raises(FileNotFoundError):
        system.exchange(Path("a"), Path("b"))
    (tmp_path / "x").write_bytes(b"abc")
    assert system.clone(str(tmp_path / "x"), str(tmp_path / "y"))
    assert (tmp_path / "y").read_bytes() == b"abc"
    monkeypatch.setattr(os, "readlink", lambda *_: (_ for _ in ()).throw(OSError))
    assert system.this_boot() == "4F1E"


def test_the_disk_is_asked_where_fsync_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(fcntl_module, "F_FULLFSYNC", 51, raising=False)

    def fcntl(_fd: int, command: int) -> int:
        asked.append(command)
        if len(asked) > 1:
            raise OSError(errno.ENOTSUP, "no")
        return 0

    monkeypatch.setattr(fcntl_module, "fcntl", fcntl)
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    system.sync(7)
    assert (asked, synced) == ([51], [])
    system.sync(7)
    assert (asked, synced) == ([51, 51], [7])


def test_a_worker_ends_with_its_parent_without_prctl() -> None:
    """The worker sleeps in its work; nobody but the parent would end it."""
    code = """
import os, sys, time
from ckpttool.execute import worker_pool
from ckpttool.storage import system
system.killed_with_parent = lambda _: False
worker_pool._LOOK = 0.05
def serve():
    def work(order, tell):
        print(os.getpid(), flush=True)
        time.sleep(600)
    return work
worker_pool.spawn(1, None, serve, "", ()).workers[0].do({}, lambda _: None)
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}
    ) as parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        parent.kill()
        parent.wait()
        for _ in range(400):
            try:
                os.kill(worker, 0)
                state = Path(f"/proc/{worker}/stat").read_text().rsplit(")", 1)[1].split()[0]
            except (ProcessLookupError, FileNotFoundError):
                return
            if state == "Z":
                return
            time.sleep(0.05)
        os.kill(worker, signal.SIGKILL)
        pytest.fail("the worker is still there after 20 s")
