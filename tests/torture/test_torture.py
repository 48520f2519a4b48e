"""A sample of ``make torture``, and the proof that nothing goes past what watches the runs."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

READS = {
    "access", "chdir", "close", "dup", "dup2", "execve", "faccessat", "faccessat2", "fadvise64", "fcntl", "flistxattr",
    "fstat", "fstatfs", "getcwd", "getdents64", "getxattr", "ioctl", "lgetxattr", "listxattr", "llistxattr", "lseek",
    "lstat", "mmap", "newfstatat", "openat", "poll", "pread64", "preadv", "preadv2", "read", "readlink", "readlinkat",
    "stat", "statfs", "statx",
}  # fmt: skip
"""Calls that change nothing (openat, mmap and ioctl: unless they are asked to, which the filter sees)."""


def python(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """In a process of its own: one with threads should not be forked."""
    command = [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=120)


@pytest.fixture(scope="module", autouse=True)
def _supervised() -> None:
    done = python("from tests.torture import interpose; print(interpose.available())")
    assert done.returncode == 0, done.stderr
    if why := done.stdout.strip():
        pytest.skip(f"the calls of a process cannot be supervised here: {why}")


@pytest.mark.thorough  # make torture; the calls of a run are supervised in short below
def test_a_sample() -> None:
    chosen = ("reshard --force", "inspect --set-header, in place")
    words = ["--every", "31", "--jobs", "1", "--kind", "faults", *[w for name in chosen for w in ("--only", name)]]
    command = [sys.executable, "-m", "tests.torture", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    (total,) = [line for line in done.stdout.splitlines() if line.startswith("all ")]
    points, runs, killed, failed, *_ = (int(n.replace(",", "")) for n in total.split()[1:])
    assert points > 150
    assert runs > 8
    assert killed
    assert failed


FAULTS = """
    import errno, os, sys
    from pathlib import Path
    from tests.torture.interpose import Fail, Give, Kill, Short, run

    here = Path(sys.argv[1])
    decisions = {
        "failed": Fail(errno.ENOSPC), "given": Give(7), "half": Short(0.5), "killed": Kill(), "after": Kill(after=True),
    }

    def work():
        for name in decisions:
            if name == "after":
                continue
            if name == "killed":
                continue
            fd = os.open(here / name, os.O_WRONLY | os.O_CREAT)
            try:
                print(name, os.write(fd, b"12345678"))
            except OSError as e:
                print(name, errno.errorcode[e.errno])
        return 3

    def decide(call):
        return decisions.get(Path(call.path).name) if call.name == "write" else None

    ended = run(work, [here], decide)
    print(ended.code, ended.out.split(), [c.name for c in ended.calls])
    print({p.name: p.stat().st_size for p in sorted(here.iterdir())})

    def pair():
        # A child that outlives its parent would write the second file.
        if not os.fork():
            import time
            time.sleep(0.2)
            (here / "child").write_text("alive")
            os._exit(0)
        for name in ("one", "two"):
            (here / name).mkdir()
        return 0

    for when in (False, True):
        ended = run(pair, [here], lambda c: Kill(after=when) if c.path.endswith("one") else None)
        print(ended.code, sorted(p.name for p in here.iterdir() if p.is_dir()), (here / "child").exists())
"""


def test_what_a_run_can_be_made_to_see(tmp_path: Path) -> None:
    done = python(FAULTS, tmp_path)
    assert done.stdout.splitlines() == [
        "3 ['failed', 'ENOSPC', 'given', '7', 'half', '4'] ['openat', 'write', 'openat', 'write', 'openat', 'write']",
        "{'failed': 0, 'given': 0, 'half': 4}",
        "-9 [] False",
        "-9 ['one'] False",
    ], done.stderr


CONVERT = """
    import sys
    from tests.torture.campaign import command, small_steps
    small_steps()
    sys.exit(command(sys.argv[1:]))
"""

WATCHED = """
    import sys
    from pathlib import Path
    from tests.torture.campaign import command, small_steps
    from tests.torture.interpose import run

    def work():
        small_steps()
        return command(sys.argv[2:])

    ended = run(work, [Path(sys.argv[1])])
    assert ended.code == 0, ended.err
    for c in ended.calls:
        print(c.name, c.path)
"""


@pytest.mark.thorough  # only of use when the list of calls changes
@pytest.mark.skipif(not shutil.which("strace"), reason="strace is not installed")
def test_no_call_goes_past(tmp_path: Path) -> None:
    """strace sees every call there is. All that it sees in the directory are noticed, or change nothing."""
    source = ROOT / "fixtures/merge/inputs/ft1"
    words = ["drop-keys", source, tmp_path / "dst", "*.0.mlp.*", "--workers", "1", "--manifest"]
    log = tmp_path.with_name(tmp_path.name + ".strace")
    # What is ignored anyway does not stop the process, which reads much while it imports.
    others = "trace=!" + ",".join(f"?{name}" for name in sorted(READS - {"openat"}))
    command = [
        "strace",
        "-f",
        "--seccomp-bpf",
        "-e",
        others,
        "-qq",
        "-y",
        "-o",
        log,
        sys.executable,
        "-c",
        textwrap.dedent(CONVERT),
        *words,
    ]
    traced = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, cwd=ROOT, timeout=120)
    if traced.returncode and "ptrace" in traced.stderr.lower():
        pytest.skip("strace may not trace here")
    assert traced.returncode == 0, traced.stderr
    assert (tmp_path / "dst").is_dir()
    shutil.rmtree(tmp_path / "dst")
    seen: set[str] = set()
    for line in log.read_text(errors="replace").splitlines():
        call = re.match(r"\d+ +(\w+)\(", line)
        if call and str(tmp_path) in line.partition(call[1])[2]:
            opened = call[1] == "openat" and not re.search(r"O_(WRONLY|RDWR|CREAT|TRUNC)", line)
            seen.add("" if opened else call[1])
    log.unlink()
    done = python(WATCHED, tmp_path, *words)
    noticed = {line.split()[0] for line in done.stdout.splitlines()}
    assert {"openat", "pwrite64", "fsync", "fdatasync", "rename", "unlink", "mkdir"} <= noticed, done.stderr
    assert seen
    assert seen - {""} - noticed == set()
