"""What a run leaves behind, whatever happens: DST whole or not at all."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckpttool.core.files import Place
from ckpttool.core.plan import Output, Plan
from ckpttool.errors import ConflictError, CorruptError, OutputError, VerifyError
from ckpttool.execute import Advance, NoProgress, RunOptions, engine, files, run, schedule, workforce
from ckpttool.execute.destinations import local
from ckpttool.storage import system
from tests.execute.plans import expected, reshard, written

ROOT = Path(__file__).parents[2]


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    return reshard(tmp_path / "src", [((512, 768), 0), ((768, 512), 1), ((4096,), None)], 4, 2)


def left(directory: Path) -> list[str]:
    return sorted(p.name for p in directory.iterdir())


# -- before anything is written


def test_an_existing_destination(tmp_path: Path, plan: Plan) -> None:
    dst = tmp_path / "dst"
    dst.mkdir()
    run(plan, dst)  # an empty directory is nobody's
    assert written(dst, plan) == expected(plan)
    (dst / "mine").write_text("old")
    with pytest.raises(OutputError, match="exists") as e:
        run(plan, dst)
    assert e.value.hint == "choose another DST, or use --force to replace it"
    assert (dst / "mine").read_text() == "old"
    run(plan, dst, RunOptions(force=True))
    assert not (dst / "mine").exists()
    assert written(dst, plan) == expected(plan)
    assert left(tmp_path) == ["dst", "src"]


@pytest.mark.parametrize("atomic", [True, False])
def test_force_replaces_whatever_is_there(
    tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch, atomic: bool
) -> None:
    if not atomic:
        monkeypatch.setattr(system, "exchange", lambda *_: False)
    (tmp_path / "other").mkdir()
    (tmp_path / "other/file").write_text("kept")
    (tmp_path / "link").symlink_to("other")
    (tmp_path / "file").write_text("old")
    for name in ("link", "file"):
        run(plan, tmp_path / name, RunOptions(force=True))
        assert written(tmp_path / name, plan) == expected(plan)
    assert (tmp_path / "other/file").read_text() == "kept"
    assert left(tmp_path) == ["file", "link", "other", "src"]


def test_the_old_destination_is_there_until_the_end(tmp_path: Path, plan: Plan) -> None:
    dst = tmp_path / "dst"
    dst.mkdir()
    (dst / "mine").write_text("old")
    seen = []

    def verify(partial: Place, _advance: Advance) -> None:
        seen.append((dst / "mine").read_text())
        seen.append(partial.name)

    run(plan, dst, RunOptions(force=True, verify=verify))
    assert seen == ["old", "dst.partial"]


@pytest.mark.parametrize(
    ("dst", "what"),
    [
        ("src/dst", "DST is inside SRC"),
        ("src", "SRC and DST are the same"),
        (".", "SRC is inside DST"),
        ("link/dst", "DST is inside SRC"),
        ("nowhere/dst", "does not exist"),
        ("src/rank_0.bin/dst", "is a file, not a directory"),
    ],
)
def test_where_a_destination_cannot_be(tmp_path: Path, plan: Plan, dst: str, what: str) -> None:
    (tmp_path / "link").symlink_to("src")
    with pytest.raises(OutputError, match=what):
        run(plan, tmp_path / dst, RunOptions(force=True))
    assert left(tmp_path) == ["link", "src"]
    assert left(tmp_path / "src") == [f"rank_{i}.bin" for i in range(4)]


def test_beside_a_single_source_file(tmp_path: Path, plan: Plan) -> None:
    options = RunOptions(source_roots=(str(tmp_path / "src/rank_0.bin"),))
    run(plan, tmp_path / "src/dst", options)
    assert written(tmp_path / "src/dst", plan) == expected(plan)


def test_what_the_host_has_frozen_stays_frozen(tmp_path: Path, plan: Plan) -> None:
    """A server freezes its objects before it forks; a run in it must not give them back to the collector."""
    gc.freeze()
    try:
        run(plan, tmp_path / "dst")
        assert gc.get_freeze_count()
    finally:
        gc.unfreeze()
    run(plan, tmp_path / "other")
    assert not gc.get_freeze_count()


def test_the_current_directory_is_not_replaced(tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "home/deep").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "home/deep")
    with pytest.raises(OutputError, match="current directory"):
        run(plan, tmp_path / "home", RunOptions(force=True))


def test_too_little_space(tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    full = os.statvfs(tmp_path)

    class Full:
        f_frsize = full.f_frsize
        f_bavail = 100

    monkeypatch.setattr(os, "statvfs", lambda _: Full)
    with pytest.raises(
        OutputError, match=r"not enough space: [\d.]+ \w+ and 16 MiB to spare are needed, [\d.]+ \w+ are free"
    ):
        run(plan, tmp_path / "dst")
    assert left(tmp_path) == ["src"]


def test_a_source_that_changed(tmp_path: Path, plan: Plan) -> None:
    path = tmp_path / "src/rank_1.bin"
    os.utime(path, ns=(0, 0))
    with pytest.raises(CorruptError, match="changed since it was planned"):
        run(plan, tmp_path / "dst")
    path.unlink()
    with pytest.raises(CorruptError, match="cannot be read"):
        run(plan, tmp_path / "dst")
    assert left(tmp_path) == ["src"]


def test_a_source_that_changes_during_the_run(tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "src/rank_1.bin"
    sync = files.FilePool.sync

    def touched(pool: files.FilePool, name: str, *, metadata: bool = False) -> None:
        os.utime(path, ns=(0, 0))
        sync(pool, name, metadata=metadata)

    monkeypatch.setattr(files.FilePool, "sync", touched)
    with pytest.raises(CorruptError, match="changed since it was planned"):
        run(plan, tmp_path / "dst")
    assert left(tmp_path) == ["src"]


def test_a_source_that_is_cut_short(tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.Run, "_check_sources", lambda _: None)
    os.truncate(tmp_path / "src/rank_3.bin", 100)
    with pytest.raises(CorruptError, match="shorter than its index says") as e:
        run(plan, tmp_path / "dst")
    assert "rank_3.bin" in e.value.where[0]
    assert "the file has 100 bytes" in e.value.where[0]
    assert left(tmp_path) == ["src"]


# -- failures on the way


def test_verification_that_fails(tmp_path: Path, plan: Plan) -> None:
    def verify(partial: Place, _advance: Advance) -> None:
        assert written(Path(str(partial)), plan) == expected(plan)
        raise VerifyError("not equal")

    with pytest.raises(VerifyError):
        run(plan, tmp_path / "dst", RunOptions(verify=verify))
    assert left(tmp_path) == ["src"]


def test_verification_that_cannot_be_done(tmp_path: Path, plan: Plan) -> None:
    """Machines that are gone say nothing of the output: it stays, and is verified by the next run."""
    seen = []

    def verify(partial: Place, _advance: Advance) -> None:
        seen.append(written(Path(str(partial)), plan) == expected(plan))
        if len(seen) == 1:
            raise OutputError("no working node is left")

    with pytest.raises(OutputError, match="no working node is left"):
        run(plan, tmp_path / "dst", RunOptions(verify=verify))
    assert left(tmp_path) == ["dst.partial", "src"]
    assert run(plan, tmp_path / "dst", RunOptions(verify=verify, resume=True)).bytes_written == 0
    assert seen == [True, True]
    assert written(tmp_path / "dst", plan) == expected(plan)


@contextlib.contextmanager
def failing_writes(code: int, after: int) -> Iterator[None]:
    """From byte ``after`` on, writing outputs fails."""
    write, done = files.FilePool._write, 0

    def failing(pool: files.FilePool, fd: int, path: str, offset: int, data: memoryview) -> None:
        nonlocal done
        done += data.nbytes
        if done > after:
            raise OSError(code, os.strerror(code))
        write(pool, fd, path, offset, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files.FilePool, "_write", failing)
        yield


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "_MIB", 64 << 10)
    monkeypatch.setattr(schedule, "_BATCH", 64 << 10)


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize(
    ("code", "what"),
    [(errno.ENOSPC, "no space left on the destination; [0-9,]+ bytes"), (errno.EIO, "cannot")],
)
def test_a_disk_that_fills_up(tmp_path: Path, plan: Plan, code: int, what: str) -> None:
    with failing_writes(code, 900_000), pytest.raises(OutputError, match=what) as e:
        run(plan, tmp_path / "dst")
    assert "rank_" in e.value.where[0]
    assert e.value.hint is not None
    assert "--resume" in e.value.hint
    assert left(tmp_path) == ["dst.partial", "src"]
    result = run(plan, tmp_path / "dst", RunOptions(resume=True))
    assert result.bytes_skipped > 0
    assert result.bytes_written < plan.bytes_written
    assert written(tmp_path / "dst", plan) == expected(plan)
    assert left(tmp_path) == ["dst", "src"]


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("call", ["fdatasync", "sync_file_range"])
def test_a_sync_that_fails_once(tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """The kernel says once that it lost what it was to write. A sync that succeeds later must not be believed."""
    libc = system.libc()
    failed: list[str] = []

    def fails(fd: int, *rest: Any) -> int:
        name = str(Path(f"/proc/self/fd/{fd}").readlink())
        if not failed and name.endswith("rank_0.bin") and (call == "fdatasync" or rest[2].value == 7):
            failed.append(name)
            with Path(name).open("r+b") as f:
                f.write(bytes(Path(name).stat().st_size))
            if call == "fdatasync":
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            ctypes.set_errno(errno.EIO)
            return -1
        return 0

    def refuses(*_: object) -> int:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    with monkeypatch.context() as patch:
        patch.setattr(files, "UNCACHED_FROM", 8 << 10)
        patch.setattr(files, "PIECE", 16 << 10)
        if call == "fdatasync":
            patch.setattr(os, call, fails)
        else:
            patch.delattr(os, "O_DIRECT")
            patch.setattr(os, "pwritev", refuses)
            patch.setattr(libc, call, fails)
        with pytest.raises(OutputError, match="Input/output error"):
            run(plan, tmp_path / "dst", RunOptions(workers=1))
    assert failed
    run(plan, tmp_path / "dst", RunOptions(resume=True))
    assert written(tmp_path / "dst", plan) == expected(plan)


def test_a_companion_that_changes(tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "src/config.json"
    config.write_text("{1}")
    outputs = [*plan.outputs, Output("config.json", 3, carried=str(config), tag=str(config.stat().st_mtime_ns))]
    changing = replace(plan, outputs=outputs)
    sync = files.FilePool.sync

    def changed(pool: files.FilePool, name: str, *, metadata: bool = False) -> None:
        config.write_text("{2}")
        os.utime(config, ns=(0, 0))
        sync(pool, name, metadata=metadata)

    monkeypatch.setattr(files.FilePool, "sync", changed)
    with pytest.raises(CorruptError, match="changed since it was planned"):
        run(changing, tmp_path / "dst")
    assert left(tmp_path) == ["src"]


def test_a_disk_that_is_full_at_once(tmp_path: Path, plan: Plan) -> None:
    """Nothing was finished, so nothing is kept."""
    with failing_writes(errno.ENOSPC, 200), pytest.raises(OutputError, match="no space left"):
        run(plan, tmp_path / "dst")
    assert left(tmp_path) == ["src"]


def test_a_limit_on_file_sizes(tmp_path: Path) -> None:
    """The real thing, without a mock: the kernel refuses to make the file that large."""
    script = """
        import resource, sys
        from pathlib import Path
        from ckpttool.errors import OutputError
        from ckpttool.execute import run
        from tests.execute.plans import reshard
        here = Path(sys.argv[1])
        plan = reshard(here / "src", [((512, 768), 0)], 4, 2)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        try:
            run(plan, here / "dst")
        except OutputError as e:
            print(e.what)
    """
    assert python(script, tmp_path).stdout == "the destination does not allow files of this size\n"
    assert left(tmp_path) == ["src"]


def python(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=60)


@pytest.mark.usefixtures("small_parts")
def test_a_source_that_cannot_be_read_for_a_while(tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    preadv = os.preadv
    done = 0

    def failing(fd: int, buffers: Any, *rest: int) -> int:
        nonlocal done
        done += sum(len(b) for b in buffers)
        if done > 900_000:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return preadv(fd, buffers, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", failing)
        with pytest.raises(CorruptError, match="cannot read a source") as e:
            run(plan, tmp_path / "dst")
    assert "[bytes " in e.value.where[0]
    assert "--resume" in (e.value.hint or "")
    run(plan, tmp_path / "dst", RunOptions(resume=True))
    assert written(tmp_path / "dst", plan) == expected(plan)


@pytest.mark.parametrize("nth", [1, 2])
def test_a_name_that_cannot_be_removed_for_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nth: int) -> None:
    """Before the reflink is tried, and after it has failed and left an empty file."""
    (tmp_path / "source").write_text("x")
    unlink, calls = Path.unlink, 0

    def failing(path: Path, missing_ok: bool = False) -> None:
        nonlocal calls
        calls += 1
        if calls == nth:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        unlink(path, missing_ok)

    def refuses(*_: object) -> int:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(Path, "unlink", failing)
    monkeypatch.setattr(fcntl, "ioctl", refuses)
    with pytest.raises(OutputError, match="Input/output error"):
        files.share(str(tmp_path / "source"), str(tmp_path / "link"))


# -- what an interrupted run left


@pytest.fixture
def interrupted(tmp_path: Path, plan: Plan, request: pytest.FixtureRequest) -> Path:
    request.getfixturevalue("small_parts")
    with failing_writes(errno.EIO, 900_000), pytest.raises(OutputError):
        run(plan, tmp_path / "dst")
    return tmp_path / "dst"


def test_it_is_not_overlooked(interrupted: Path, plan: Plan) -> None:
    with pytest.raises(OutputError, match="interrupted run left") as e:
        run(plan, interrupted)
    assert e.value.hint == "--resume continues it, --force starts over"
    result = run(plan, interrupted, RunOptions(force=True))
    assert result.bytes_skipped == 0
    assert written(interrupted, plan) == expected(plan)


def test_another_plan_cannot_go_on(interrupted: Path, tmp_path: Path) -> None:
    other = reshard(tmp_path / "src2", [((512, 768), 0)], 4, 2)
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "dst.partial").iterdir()}
    with pytest.raises(ConflictError, match="a different plan") as e:
        run(other, interrupted, RunOptions(resume=True))
    assert "plan " in e.value.where[0]
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "dst.partial").iterdir()} == before


@pytest.mark.parametrize("damage", [b'{"done":[[0,', b"\0" * 50, b'{"done":[[0,99999]]}\n', b'{"done":[[0,2]]}\n'])
def test_a_torn_journal(interrupted: Path, plan: Plan, damage: bytes) -> None:
    journal = interrupted.with_name("dst.partial") / ".journal"
    with journal.open("ab") as f:
        f.write(damage)
    assert run(plan, interrupted, RunOptions(resume=True)).bytes_skipped > 0
    assert written(interrupted, plan) == expected(plan)


@pytest.mark.parametrize("head", [b"", b'{"journal": 1, "pl', b'{"journal"\0\0\0\0\n', b"[]\n", b'{"journal": 99}\n'])
def test_a_journal_without_a_head(interrupted: Path, plan: Plan, head: bytes) -> None:
    journal = interrupted.with_name("dst.partial") / ".journal"
    journal.write_bytes(head)
    if head.endswith(b"\n") and b"\0" not in head:
        with pytest.raises(ConflictError, match="is unreadable"):
            run(plan, interrupted, RunOptions(resume=True))
    else:  # the run died before it had begun
        assert run(plan, interrupted, RunOptions(resume=True)).bytes_skipped == 0
        assert written(interrupted, plan) == expected(plan)


def test_a_file_that_was_lost_is_written_again(interrupted: Path, plan: Plan) -> None:
    (interrupted.with_name("dst.partial") / "rank_0.bin").unlink()
    run(plan, interrupted, RunOptions(resume=True))
    assert written(interrupted, plan) == expected(plan)


def test_a_manifest_after_an_interruption(interrupted: Path, plan: Plan, tmp_path: Path) -> None:
    """Checksums of what was finished without them are made afterwards; no byte of that is written again."""
    result = run(plan, interrupted, RunOptions(resume=True, manifest=True))
    assert result.bytes_skipped > 0
    whole = run(plan, tmp_path / "other", RunOptions(manifest=True))
    assert result.manifest == whole.manifest
    names = {"dst/ckpttool.manifest.json", "other/ckpttool.manifest.json"}
    assert len({(tmp_path / n).read_bytes() for n in names}) == 1


def test_other_workers_and_memory_may_go_on(interrupted: Path, plan: Plan) -> None:
    options = RunOptions(resume=True, workers=1, memory=100_000, manifest=True)
    assert run(plan, interrupted, options).bytes_skipped > 0
    assert written(interrupted, plan) == expected(plan)


def test_resume_without_an_interrupted_run(tmp_path: Path, plan: Plan) -> None:
    run(plan, tmp_path / "dst", RunOptions(resume=True))
    assert written(tmp_path / "dst", plan) == expected(plan)


# -- two runs


def test_two_runs_on_one_destination(tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "PATIENCE", 0.05)
    (tmp_path / "dst.partial").mkdir()
    with (tmp_path / "dst.partial/.journal").open("w") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        for options in (RunOptions(), RunOptions(force=True), RunOptions(resume=True)):
            with pytest.raises(OutputError, match="another run is writing this destination"):
                run(plan, tmp_path / "dst", options)
    run(plan, tmp_path / "dst", RunOptions(force=True))
    assert left(tmp_path) == ["dst", "src"]


def test_the_other_run_is_named(interrupted: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "PATIENCE", 0.05)

    def meanwhile(_partial: Place, _advance: Advance) -> None:
        who = rf"destination: process {os.getpid()} on {os.uname().nodename}, since 20.* UTC, plan {plan.digest()[:12]}"
        with pytest.raises(OutputError, match=who):
            run(plan, interrupted, RunOptions(resume=True))

    run(plan, interrupted, RunOptions(resume=True, verify=meanwhile))


@pytest.mark.usefixtures("interrupted")
def test_workers_of_a_killed_run_are_waited_for(tmp_path: Path, plan: Plan) -> None:
    """They share its lock, and outlive it by as long as their last write takes."""
    with (tmp_path / "dst.partial/.journal").open("r+") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        survivor = threading.Timer(0.3, fcntl.flock, (f, fcntl.LOCK_UN))
        survivor.start()
        assert run(plan, tmp_path / "dst", RunOptions(resume=True)).bytes_skipped > 0
        survivor.join()
    assert written(tmp_path / "dst", plan) == expected(plan)


def test_a_destination_that_appears_during_the_run(tmp_path: Path, plan: Plan) -> None:
    def verify(_: Place, _advance: Advance) -> None:
        (tmp_path / "dst").mkdir()
        (tmp_path / "dst/mine").write_text("mine")

    with pytest.raises(OutputError, match="appeared during the run") as e:
        run(plan, tmp_path / "dst", RunOptions(verify=verify))
    assert "--force" in (e.value.hint or "")
    assert "--resume" in (e.value.hint or "")
    assert (tmp_path / "dst/mine").read_text() == "mine"
    result = run(plan, tmp_path / "dst", RunOptions(force=True, resume=True))
    assert result.bytes_skipped > 0
    assert result.bytes_written == 0  # nothing is done twice
    assert written(tmp_path / "dst", plan) == expected(plan)
    assert left(tmp_path) == ["dst", "src"]


def test_a_destination_that_appears_before_the_lock(
    tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another run had the lock, and finished: nothing is done in vain."""
    lock = local.LocalDestination._lock

    def late(destination: local.LocalDestination, *, fresh: bool) -> None:
        (tmp_path / "dst").mkdir()
        (tmp_path / "dst/mine").write_text("mine")
        lock(destination, fresh=fresh)

    monkeypatch.setattr(local.LocalDestination, "_lock", late)
    with pytest.raises(OutputError, match="the destination exists"):
        run(plan, tmp_path / "dst")
    assert left(tmp_path) == ["dst", "src"]
    assert left(tmp_path / "dst") == ["mine"]


def test_who_waited_for_a_run_does_not_take_its_output(
    tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The partial directory that was waited for is DST by now."""
    flock = local._flock
    published: list[bool] = []

    def waiting(fd: int, lock: int) -> None:
        if not published:
            published.append(True)
            (tmp_path / "dst.partial").rename(tmp_path / "dst")
            (tmp_path / "dst/file").write_text("its")
        flock(fd, lock)

    monkeypatch.setattr(local, "_flock", waiting)
    with pytest.raises(OutputError, match="another run has just finished"):
        run(plan, tmp_path / "dst", RunOptions(force=True))
    assert left(tmp_path) == ["dst", "src"]
    assert left(tmp_path / "dst") == ["file"]


@pytest.mark.parametrize("options", [RunOptions(), RunOptions(resume=True)])
def test_a_directory_of_that_name_that_nobody_here_made(tmp_path: Path, plan: Plan, options: RunOptions) -> None:
    (tmp_path / "dst.partial").mkdir()
    (tmp_path / "dst.partial/thesis.tex").write_text("mine")
    with pytest.raises(OutputError, match=r"nothing to resume|an interrupted run left"):
        run(plan, tmp_path / "dst", options)
    assert left(tmp_path / "dst.partial") == ["thesis.tex"]
    assert left(tmp_path) == ["dst.partial", "src"]


def test_what_a_run_left_without_a_journal(tmp_path: Path, plan: Plan) -> None:
    """It was killed before its journal began, or after it was removed: --resume begins anew."""
    (tmp_path / "dst.partial").mkdir()
    (tmp_path / "dst.partial/rank_0.bin").write_bytes(b"?" * plan.outputs[0].size)
    assert run(plan, tmp_path / "dst", RunOptions(resume=True)).bytes_skipped == 0
    assert written(tmp_path / "dst", plan) == expected(plan)
    assert left(tmp_path) == ["dst", "src"]


def test_a_journal_that_is_closed_is_not_written(tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the last sync of a directory fails, the number of the journal's descriptor may be another file's by then."""
    other = tmp_path / "other"
    other.write_bytes(b"1")
    opened = []

    def fails(path: Path) -> None:
        if path.name == "dst.partial" and not (path / local.JOURNAL).exists():
            opened.append(os.open(other, os.O_RDWR))
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(local, "sync_directory", fails)
    with pytest.raises(OutputError, match="Input/output error"):
        run(plan, tmp_path / "dst")
    (fd,) = opened
    os.close(fd)
    assert other.read_bytes() == b"1"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("again", [False, True])
def test_a_filesystem_that_gives_files_to_somebody_else(
    tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch, *, again: bool
) -> None:
    """NFS gives root's files to nobody, FUSE and SMB theirs to whoever mounted; they are this run's all the same."""
    mkdir, temporary = Path.mkdir, tempfile.TemporaryFile

    def made(path: Path, *args: Any, **more: Any) -> None:
        mkdir(path, *args, **more)
        os.chown(path, 65534, 65534)

    def opened(**more: Any) -> Any:
        file = temporary(**more)
        os.fchown(file.fileno(), 65534, 65534)
        return file

    tmp_path.chmod(0o777)
    monkeypatch.setattr(Path, "mkdir", made)
    monkeypatch.setattr(tempfile, "TemporaryFile", opened)
    if again:
        (tmp_path / "dst.partial").mkdir()
    run(plan, tmp_path / "dst", RunOptions(force=again))
    assert written(tmp_path / "dst", plan) == expected(plan)


@pytest.mark.parametrize("force", [True, False])
def test_a_crash_between_two_renames(tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch, force: bool) -> None:
    """Where names cannot be exchanged, DST is away for a moment. The next run gives it its name back."""
    (tmp_path / "dst").mkdir()
    (tmp_path / "dst/mine").write_text("old")
    monkeypatch.setattr(system, "exchange", lambda *_: False)
    rename = Path.rename

    def killed(path: Path, target: Path) -> Path:
        if path.name == "dst.partial":
            raise SystemExit
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", killed)
        with pytest.raises(SystemExit):
            run(plan, tmp_path / "dst", RunOptions(force=True))
    assert left(tmp_path) == [".dst.ckpttool-replaced", "dst.partial", "src"]
    if force:
        run(plan, tmp_path / "dst", RunOptions(force=True, resume=True))
        assert written(tmp_path / "dst", plan) == expected(plan)
        assert left(tmp_path) == ["dst", "src"]
    else:
        with pytest.raises(OutputError, match="the destination exists"):
            run(plan, tmp_path / "dst", RunOptions(resume=True))
        assert (tmp_path / "dst/mine").read_text() == "old"
        assert left(tmp_path) == ["dst", "dst.partial", "src"]


@pytest.mark.parametrize("seen", [True, False])
def test_a_source_that_changes_while_it_is_verified(tmp_path: Path, plan: Plan, seen: bool) -> None:
    def verify(_: Place, _advance: Advance) -> None:
        with Path(plan.sources[0].path).open("ab") as f:
            f.write(b"x")
        if seen:
            raise VerifyError("1 of 3 tensors differ from the source")

    with pytest.raises(CorruptError, match="a source has changed"):
        run(plan, tmp_path / "dst", RunOptions(verify=verify))
    assert left(tmp_path) == ["src"]


# -- interrupts


class Interrupt(NoProgress):
    """Sends a signal once enough bytes are written."""

    def __init__(self, number: signal.Signals, at: int) -> None:
        self.number, self.at, self.done = number, at, 0

    def advance(self, nbytes: int) -> None:
        self.done += nbytes
        if self.done >= self.at and isinstance(signal.getsignal(self.number), engine._Signals):
            self.at = 1 << 62
            os.kill(os.getpid(), self.number)


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt(tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch, number: signal.Signals) -> None:
    monkeypatch.setattr(engine, "TICK", 0.01)
    monkeypatch.setattr(workforce, "TICK", 0.01)
    slow = files.FilePool.write
    pause = threading.Event()

    def write(pool: files.FilePool, path: str, offset: int, data: memoryview, **how: bool) -> None:
        pause.wait(0.02)
        slow(pool, path, offset, data, **how)

    handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    with monkeypatch.context() as patch:
        patch.setattr(files.FilePool, "write", write)
        with pytest.raises(KeyboardInterrupt, match="--resume"):
            run(plan, tmp_path / "dst", progress=Interrupt(number, 600_000))
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert left(tmp_path) == ["dst.partial", "src"]
    assert run(plan, tmp_path / "dst", RunOptions(resume=True)).bytes_skipped > 500_000
    assert written(tmp_path / "dst", plan) == expected(plan)


@pytest.mark.usefixtures("small_parts")
def test_interrupted_while_threads_start(tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    start, started = threading.Thread.start, []

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        if thread.name.startswith("worker"):
            started.append(thread)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)  # long enough to come

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt, match="--resume"):
            run(plan, tmp_path / "dst", RunOptions(workers=3))
    assert len(started) == 3
    assert not any(t.is_alive() for t in started)
    run(plan, tmp_path / "dst", RunOptions(resume=True))
    assert written(tmp_path / "dst", plan) == expected(plan)


LARGE = [((2048, 3072), 0), ((3072, 2048), 1)]
KILL = f"""
    import os, signal, sys
    from pathlib import Path
    from ckpttool.execute import RunOptions, files, run
    from tests.execute.plans import reshard

    here = Path(sys.argv[1])
    plan = reshard(here / "src", {LARGE}, 4, 2)
    write, done = files.FilePool.write, 0

    def counted(pool, path, offset, data, **how):
        global done
        if done >= 0.9 * plan.bytes_written:
            os.kill(os.getpid(), signal.SIGKILL)
        write(pool, path, offset, data, **how)
        done += data.nbytes

    files.FilePool.write = counted
    run(plan, here / "dst", RunOptions(manifest=True))
"""


@pytest.mark.thorough  # torture kills every command; how much is done again: test_resume_goes_on_inside_a_tensor
def test_kill(tmp_path: Path) -> None:
    """kill -9 after 90 % of two large tensors: going on writes at most 15 % of the bytes once more."""
    assert python(KILL, tmp_path).returncode == -signal.SIGKILL
    assert left(tmp_path) == ["dst.partial", "src"]
    plan = reshard(tmp_path / "src", LARGE, 4, 2)
    done = run(plan, tmp_path / "dst", RunOptions(resume=True, manifest=True))
    assert done.bytes_written / plan.bytes_written <= 0.1 + 0.15
    manifest = json.loads((tmp_path / "dst/ckpttool.manifest.json").read_text())
    run(plan, tmp_path / "fresh", RunOptions(manifest=True))
    assert json.loads((tmp_path / "fresh/ckpttool.manifest.json").read_text()) == manifest
    for name in ("rank_0.bin", "rank_1.bin"):
        assert (tmp_path / "dst" / name).read_bytes() == (tmp_path / "fresh" / name).read_bytes()
