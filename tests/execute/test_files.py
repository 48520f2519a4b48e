"""Descriptors and the write policy."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import resource
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpttool.errors import OutputError
from ckpttool.execute import RunOptions, files, run
from ckpttool.execute.files import FilePool, create, descriptor_limit
from ckpttool.storage import system
from tests.execute.plans import expected, pattern, reshard, written


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


def test_more_files_than_descriptors(tmp_path: Path) -> None:
    for i in range(100):
        (tmp_path / str(i)).write_text(f"{i:04}")
    before = open_files()
    wrong = []

    def work(pool: FilePool) -> None:
        for i in range(300):
            buffer = bytearray(4)
            pool.read(str(tmp_path / str(i % 100)), 0, (memoryview(buffer),))
            if bytes(buffer) != b"%04d" % (i % 100) or open_files() > before + 10 + 3:
                wrong.append(i)

    with FilePool(10) as pool:
        threads = [threading.Thread(target=work, args=(pool,)) for _ in range(3)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    assert wrong == []
    assert open_files() == before


@pytest.fixture
def few_descriptors() -> Iterator[None]:
    old = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, old[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, old)


@pytest.mark.usefixtures("few_descriptors")
def test_the_limit_is_raised() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert descriptor_limit() > 64
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(hard, 4096)


@pytest.mark.usefixtures("few_descriptors")
def test_many_files_under_a_low_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = reshard(tmp_path / "src", [((240, 8), 0), ((8, 240), 1)], 120, 80)

    def refuse(*_: object) -> None:
        raise ValueError

    monkeypatch.setattr(resource, "setrlimit", refuse)
    run(plan, tmp_path / "dst", RunOptions(manifest=True))
    assert written(tmp_path / "dst", plan) == expected(plan)
    monkeypatch.undo()


@pytest.mark.parametrize("supported", ["all", "no direct", "behind", "nothing"])
@pytest.mark.parametrize("refused_at", ["open", "write"])
def test_policies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, supported: str, refused_at: str) -> None:
    """What the kernel or the filesystem refuses is found out by trying; the bytes are the same."""
    plan = reshard(tmp_path / "src", [((768, 1024), 0), ((1024, 768), 1)], 2, 2)
    pwrite, pwritev, preadv, opened = os.pwrite, os.pwritev, os.preadv, os.open

    def refuse(call: Any) -> Any:
        def wrapped(fd: int, buffers: Any, offset: int, flags: int = 0) -> int:
            if flags:
                raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
            return int(call(fd, buffers, offset))

        return wrapped

    def no_direct_open(path: Any, flags: int, *more: Any, **named: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return opened(path, flags, *more, **named)

    def no_direct_write(fd: int, data: Any, offset: int) -> int:
        if is_direct(fd):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return pwrite(fd, data, offset)

    if supported != "all" and refused_at == "open":
        monkeypatch.setattr(os, "open", no_direct_open)
    elif supported != "all":
        monkeypatch.setattr(os, "pwrite", no_direct_write)
    if supported in ("behind", "nothing"):
        monkeypatch.setattr(os, "pwritev", refuse(pwritev))
        monkeypatch.setattr(os, "preadv", refuse(preadv))
    if supported == "nothing":
        monkeypatch.setattr(system, "libc", lambda: None)
    result = run(plan, tmp_path / "dst")
    assert written(tmp_path / "dst", plan) == expected(plan)
    assert (
        result.policy
        in {
            "all": ("direct", "uncached", "write-behind"),
            "no direct": ("uncached", "write-behind"),
            "behind": ("write-behind",),
            "nothing": ("plain",),
        }[supported]
    )


def is_direct(fd: int) -> bool:
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)


def test_a_page_is_written_in_one_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Directly or through the page cache: where both reach a page, what the cache holds of it may be older."""
    pwrite, pwritev = os.pwrite, os.pwritev
    pages: dict[bool, set[int]] = {False: set(), True: set()}

    def note(fd: int, nbytes: int, offset: int) -> None:
        direct = is_direct(fd)
        assert not direct or offset % files.PAGE == nbytes % files.PAGE == 0
        pages[direct].update(range(offset // files.PAGE, -(-(offset + nbytes) // files.PAGE)))

    def noted(fd: int, data: Any, offset: int) -> int:
        note(fd, len(data), offset)
        return pwrite(fd, data, offset)

    def noted_v(fd: int, buffers: Any, offset: int, flags: int = 0) -> int:
        note(fd, sum(map(len, buffers)), offset)
        return pwritev(fd, buffers, offset, flags)

    monkeypatch.setattr(os, "pwrite", noted)
    monkeypatch.setattr(os, "pwritev", noted_v)
    path, data = str(tmp_path / "x"), pattern(3_000_000)
    create(path, len(data))
    held = np.empty(len(data) + files.SECTOR, np.uint8)
    with FilePool() as pool:
        pool.expect_writes(path)
        cuts = [0, 300_001, 300_002, 700_000, 704_511, 704_512, 1_500_000, 3_000_000]
        for a, b in itertools.pairwise(cuts):
            start = (a - held.ctypes.data) % files.SECTOR
            memory = held[start : start + b - a]
            memory[:] = np.frombuffer(data[a:b], np.uint8)
            pool.write(path, a, memory.data)
        if pool.policy != "direct":
            pytest.skip("no direct writes on this filesystem")
    assert pages[True]
    assert not pages[True] & pages[False]
    assert (tmp_path / "x").read_bytes() == data


def test_short_reads_and_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = reshard(tmp_path / "src", [((64, 64), 0), ((64, 64), 1), ((3000,), None)], 2, 2)
    pwrite, pwritev, preadv = os.pwrite, os.pwritev, os.preadv
    monkeypatch.setattr(files, "UNCACHED_FROM", 4096)
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, data[:1000], at))
    monkeypatch.setattr(os, "pwritev", lambda fd, data, at, flags=0: pwritev(fd, (data[0][:1000],), at, flags))
    monkeypatch.setattr(os, "preadv", lambda fd, to, at, flags=0: preadv(fd, (to[0][:1000],), at, flags))
    run(plan, tmp_path / "dst", RunOptions(manifest=True))
    assert written(tmp_path / "dst", plan) == expected(plan)


def test_create(tmp_path: Path) -> None:
    path = tmp_path / "x"
    assert not create(str(path), 100_000)
    assert path.read_bytes() == bytes(100_000)
    assert path.stat().st_blocks * 512 >= 100_000  # reserved, where the filesystem can
    path.write_bytes(pattern(100_000))
    assert create(str(path), 100_000)
    assert path.read_bytes() == pattern(100_000)
    assert not create(str(path), 50_000)
    assert path.read_bytes() == bytes(50_000)


def test_no_descriptor_reads_and_writes(tmp_path: Path) -> None:
    """NFS would read every page of which a part is written, and write all of it back, over what others wrote."""
    path = str(tmp_path / "a")
    create(path, 100)
    with FilePool() as pool:
        pool.expect_writes(path)
        pool.write(path, 10, memoryview(b"x" * 20))
        buffer = bytearray(100)
        pool.read(path, 0, (memoryview(buffer),), once=False)
        assert buffer == b"\0" * 10 + b"x" * 20 + b"\0" * 70
        pool.write(path, 30, memoryview(b"y"))
        pool.sync(path)
        found = [fd for fd in Path("/proc/self/fd").iterdir() if os.path.realpath(fd) == path]
        modes = {fcntl.fcntl(int(fd.name), fcntl.F_GETFL) & os.O_ACCMODE for fd in found}
        assert modes == {os.O_RDONLY, os.O_WRONLY}


def test_a_file_that_cannot_be_opened_to_be_synced(tmp_path: Path) -> None:
    pool = files.FilePool()
    pool.expect_writes(str(tmp_path / "gone"))
    with pytest.raises(OutputError, match="cannot write the destination"):
        pool.sync(str(tmp_path / "gone"))
