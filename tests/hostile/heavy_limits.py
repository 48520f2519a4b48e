"""What is largest: a million tensors, headers of 100 MB, pickles of 250 MB. Minutes, so `make torture` runs it.

    python -m pytest tests/hostile/heavy_limits.py -s

Each case runs in a process of its own that may have so much memory and processor time as the table in
docs/robustness/hostile.md says, and prints what it has taken.
"""

from __future__ import annotations

import json
import os
import resource
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest


def _limited(*arguments: object, mib: int, seconds: int) -> subprocess.CompletedProcess[str]:
    """Run ckpttool with this much address space and processor time; print the peak of its memory."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (mib << 20, mib << 20))
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))

    code = (
        "import resource, sys\n"
        "sys.argv[0] = 'ckpttool'\n"
        "from ckpttool.cli import main\n"
        "try:\n    main()\n"
        "finally:\n"
        "    u = resource.getrusage(resource.RUSAGE_SELF)\n"
        "    print(f'peak {u.ru_maxrss >> 10} MiB, {u.ru_utime + u.ru_stime:.1f} s', file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        preexec_fn=limit,
        check=False,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
    )
    last = done.stderr.splitlines()[-1] if done.stderr else done.returncode
    print(f"\n{' '.join(map(str, arguments))[:100]}: {last}")  # noqa: T201 - with -s, for the table in the docs
    assert "Traceback" not in done.stderr, done.stderr[-2000:]
    assert done.returncode in (0, 1, 2, 3), done.returncode
    return done


def _header(path: Path, raw: bytes, data: int = 0) -> Path:
    with path.open("wb") as f:
        f.write(struct.pack("<Q", len(raw)) + raw)
        f.truncate(8 + len(raw) + data)
    return path


def _million(path: Path) -> Path:
    entries = {
        f"model.layers.{i // 10_000}.experts.{i % 10_000}.w": {"dtype": "U8", "shape": [1], "data_offsets": [i, i + 1]}
        for i in range(10**6)
    }
    return _header(path, json.dumps(entries, separators=(",", ":")).encode(), 10**6)


def test_a_million_tensors(tmp_path: Path) -> None:
    """They are read and listed: there is no limit on their number but that of the header."""
    path = _million(tmp_path / "model.safetensors")
    for arguments in (("inspect", path), ("inspect", path, "--list", "-q"), ("inspect", path, "--check")):
        assert _limited(*arguments, mib=8192, seconds=180).returncode in (0, 3)


HEADERS: dict[str, Callable[[], bytes]] = {
    "spaces": lambda: b"{}" + b" " * (100_000_000 - 2),
    "empty lists": lambda: b'{"a":[' + b"[]," * 33_333_000 + b"[]]}",
    "empty objects": lambda: b'{"a":[' + b"{}," * 33_333_000 + b"{}]}",
    "short names": lambda: b"{" + b",".join(b'"%x":1' % i for i in range(9_000_000)) + b"}",
    "one name": lambda: b'{"' + b"x" * 99_999_900 + b'":1}',
    "escapes": lambda: b'{"' + b"\\u0041" * 16_000_000 + b'":1}',
    "numbers": lambda: b'{"a":{"dtype":"F32","shape":[' + b"1," * 49_000_000 + b'1],"data_offsets":[0,4]}}',
    "long numbers": lambda: b'{"a":[' + (b"1" * 4300 + b",") * 23_000 + b"1]}",
}


@pytest.mark.parametrize("case", HEADERS)
def test_a_header_of_100_mb(tmp_path: Path, case: str) -> None:
    """3 bytes of JSON are an object of 64: the largest header takes 5 GB of memory at most, and is refused then."""
    path = _header(tmp_path / "model.safetensors", HEADERS[case]())
    assert path.stat().st_size <= 100_000_008
    for arguments in (("inspect", path), ("inspect", path, "--check")):
        assert _limited(*arguments, mib=8192, seconds=180).returncode in ((1, 3) if case != "spaces" else (0, 1, 3))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_json_of_100_mb(tmp_path: Path, name: str) -> None:
    _header(tmp_path / "model.safetensors", b"{}")
    (tmp_path / name).write_bytes(b'{"x":[' + b"[]," * 33_333_000 + b"[]]}")
    done = _limited("inspect", tmp_path, mib=1024, seconds=60)
    assert done.returncode in (0, 1)
    with (tmp_path / name).open("ab") as f:
        f.truncate(3 << 30)  # a hole of 3 GB behind it is not read
    done = _limited("inspect", tmp_path, mib=1024, seconds=60)
    assert "more than 8,000,000 bytes" in done.stderr or "more than 100,000,000 bytes" in done.stderr


PICKLES: dict[str, Callable[[], bytes]] = {
    "lists": lambda: b"\x80\x04](" + b"]" * 60_000_000 + b"e.",
    "names": lambda: b"\x80\x04}(" + b"".join(b"\x8c\x07%07dN" % i for i in range(9_000_000)) + b"u.",
    "marks": lambda: b"\x80\x04" + b"(" * 100_000_000 + b".",
    "remembered": lambda: b"\x80\x04N" + b"\x94" * 100_000_000 + b".",
    "nothing": lambda: b"\x80\x04" + b"N" * 200_000_000 + b".",
    "structure": lambda: b"\x80\x04](" + b"K\x01" * 134_000_000 + b"e.",
}


@pytest.mark.parametrize("case", PICKLES)
def test_large_pickles(tmp_path: Path, case: str) -> None:
    """A few bytes of a pickle are a value of 64: 6 GB at most."""
    path = tmp_path / "model_state.pdparams"
    path.write_bytes(PICKLES[case]())
    done = _limited("inspect", path, mib=8192, seconds=300)
    assert done.returncode == 1
