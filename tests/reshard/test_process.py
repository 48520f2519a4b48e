"""The program as a shell sees it: streams, exit codes, pipes that close early, an interrupt."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.command import reshard
from tests.helpers.tensorfile import origin, read_all, save_hf

FIXTURES = Path(__file__).parents[2] / "fixtures"
LIMIT = ("--max-shard-size", "5MB")


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "ckpttool", *map(str, arguments)]


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.thorough  # test_interrupt and tests/first_contact start the tool, too; tests/docs reads such an answer
def test_success(tmp_path: Path) -> None:
    done = run("reshard", FIXTURES / "llama_tp8", tmp_path / "dst", "--tp-out", 2, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert isinstance(json.loads(done.stdout), dict)
    assert len(read_all(tmp_path / "dst", "rank-00000*")) == 4 * 9 + 3


def test_failure(tmp_path: Path) -> None:
    done = run("reshard", FIXTURES / "llama_tp8", tmp_path / "dst", "--tp-out", 3)
    assert (done.returncode, done.stdout) == (1, "")
    what, where, *_, hint = [line for line in done.stderr.splitlines() if line]
    assert what.startswith("error: tensor `model.layers.0.self_attn.q_proj.weight` [64, 64] cannot be cut for tp 3")
    assert where.startswith("  --> llama.yaml: ")
    assert hint == "hint: use --tp-out 1, 2, 4 or 8"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.thorough  # tests/first_contact/test_streams.py closes each stream of a run
def test_a_reader_that_goes_away(tmp_path: Path) -> None:
    """``ckpttool reshard --dry-run | head -1``."""
    arguments = command("reshard", FIXTURES / "llama_tp8", tmp_path / "dst", "--tp-out", 2, "-n")
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as tool:
        assert tool.stdout is not None
        assert tool.stderr is not None
        tool.stdout.close()
        error = tool.stderr.read()
    assert "Traceback" not in error
    assert "Exception ignored" not in error
    assert tool.returncode == 0


@pytest.mark.thorough  # in this process: execute/test_destination
def test_interrupt(tmp_path: Path) -> None:
    """Ctrl-C ends with 130 and one word; no DST, or all of it."""
    tensors = {f"t{i}": origin(i, "F64", (1 << 19,)) for i in range(6)}
    save_hf(tmp_path / "src", tensors)
    arguments = command("reshard", tmp_path / "src", tmp_path / "dst", *LIMIT)
    with subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True) as tool:
        partial = tmp_path / "dst.partial"
        while tool.poll() is None and not partial.exists():
            time.sleep(0.001)
        tool.send_signal(signal.SIGINT)
        assert tool.stderr is not None
        error = tool.stderr.read()
    assert "Traceback" not in error
    if tool.returncode == 130:
        assert "interrupted" in error
        assert not (tmp_path / "dst").exists()
        reshard(tmp_path / "src", tmp_path / "dst", *LIMIT, "--resume")
    assert read_all(tmp_path / "dst").keys() == tensors.keys()
