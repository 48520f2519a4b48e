"""Descriptors and the write policy."""

from __future__ import annotations

import errno
import os
import resource
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpttool.execute import RunOptions, files, run
from ckpttool.execute.files import FilePool, create, descriptor_limit
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


@pytest.mark.parametrize("supported", ["all", "behind", "nothing"])
def test_policies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, supported: str) -> None:
    """What the kernel or the filesystem refuses is found out by trying; the bytes are the same."""
    plan = reshard(tmp_path / "src", [((2048, 2048), 0), ((2048, 2048), 1)], 2, 2)
    pwritev, preadv = os.pwritev, os.preadv

    def refuse(call: Any) -> Any:
        def wrapped(fd: int, buffers: Any, offset: int, flags: int = 0) -> int:
            if flags:
                raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
            return int(call(fd, buffers, offset))

        return wrapped

    if supported != "all":
        monkeypatch.setattr(os, "pwritev", refuse(pwritev))
        monkeypatch.setattr(os, "preadv", refuse(preadv))
    if supported == "nothing":
        monkeypatch.setattr(files, "_LIBC", None)
    result = run(plan, tmp_path / "dst")
    assert written(tmp_path / "dst", plan) == expected(plan)
    if supported == "all":
        assert result.policy in ("uncached", "write-behind")
    else:
        assert result.policy == {"behind": "write-behind", "nothing": "plain"}[supported]


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
