"""Memory stays within its bound whatever the size of a tensor."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# A sparse tensor of 320 MB is the source; `ru_maxrss` counts the interpreter and numpy too.
SCRIPT = """
import resource, sys
from pathlib import Path
from ckpttool.execute import RunOptions, run
from ckpttool.plan import Block, Copy, Output, Plan, Source, Unit

here, rows, columns = Path(sys.argv[1]), 8_000, 20_000
(here / "src").mkdir()
with open(here / "src/s", "wb") as f:
    f.truncate(rows * columns * 2)
    f.write(b"\\x80\\x3f")  # 1.0
st = (here / "src/s").stat()
source = Source(str(here / "src/s"), st.st_size, str(st.st_mtime_ns))
step = {
    "transpose": Copy(Block(0, 0, (2, 2 * columns)), Block(0, 0, (2 * rows, 2)), (columns, rows), "BF16", "BF16"),
    "cast": Copy(Block(0, 0, (2,)), Block(0, 0, (4,)), (rows * columns,), "BF16", "F32"),
}[sys.argv[2]]
size = rows * columns * (4 if sys.argv[2] == "cast" else 2)
plan = Plan([source], [Output("x", size)], [Unit("t", (step,))])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
options = RunOptions(memory=8 << 20)
result = run(plan, here / "dst", options)
with open(here / "dst/x", "rb") as f:
    assert f.read(4) == (b"\\0\\0\\x80\\x3f" if sys.argv[2] == "cast" else b"\\x80\\x3f\\0\\0")
print(result.peak_buffer, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.parametrize("what", ["transpose", "cast"])
def test_one_huge_tensor(tmp_path: Path, what: str) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), what]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    peak, grown = map(int, done.stdout.split())
    assert peak <= 8 << 20
    assert grown <= (8 + 20) << 10  # KiB; threads, ml_dtypes and what a cast needs for a moment come on top
