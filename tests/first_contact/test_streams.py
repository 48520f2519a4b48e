"""Standard streams that are closed, full or without a reader, and Ctrl-C at any moment: processes of their own.

What happens to DST decides how a run ends, not whether anybody reads what it prints.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import chain, combinations
from pathlib import Path

import pytest

from ckpttool.cli.app import app
from tests.helpers.sample import some
from tests.helpers.tensorfile import assert_same, header, read_all, save_hf
from tests.reshard.test_file_names import UNET

CONFIG = {"model_type": "none"}
ROOT = Path(__file__).parents[2]
PIR, LLAMA = ROOT / "fixtures/paddle_programs/pir/model.json", ROOT / "fixtures/llama_tp8"
COMMANDS = [c.name for c in app.registered_commands if c.name]
CLOSED = list(chain.from_iterable(combinations((0, 1, 2), n) for n in some((1, 2, 3), (3,))))


def start(words: Sequence[object], *closed: int, **streams: int) -> subprocess.Popen[str]:
    """The tool with these streams closed, as a shell closes them."""
    shut = "".join(f" {n}{'>' if n else '<'}&-" for n in closed)
    command = ["sh", "-c", f'exec "$@"{shut}', "sh", sys.executable, "-m", "ckpttool", *map(str, words)]
    given = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | streams
    return subprocess.Popen(command, text=True, cwd=ROOT, **given)  # type: ignore[call-overload, no-any-return]


@pytest.fixture(scope="module")
def src(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_hf(tmp_path_factory.mktemp("src"), UNET, CONFIG)


@pytest.mark.parametrize("closed", CLOSED, ids=str)
def test_closed(src: Path, tmp_path: Path, closed: tuple[int, ...]) -> None:
    """Every command ends as it would; no message goes into a file that has got the number of a stream."""
    runs: list[tuple[int, Sequence[object]]] = [
        (0, ["reshard", src, tmp_path / "dst", "--to", "hf", "--verify", "-v"]),
        (2, ["inspect", src / "nowhere"]),
    ]
    if len(closed) == 3:
        more = [(0, ["drop-keys", src, tmp_path / "dropped", "*.2.*"]), (1, ["inspect", src]), (2, ["reshard", src])]
        runs += some([(0, ["merge", src, "-o", tmp_path / "merged", "--workers", 2]), *more], [])
    for code, words in runs:
        run = start(words, *closed)
        out, err = run.communicate(timeout=60)
        assert run.returncode == code, (words, out, err)
        assert "Traceback" not in out + err
        assert "Exception" not in out + err
        assert not (1 in closed and out)
        assert not (2 in closed and err)
    assert_same(read_all(tmp_path / "dst"), UNET)
    assert header(tmp_path / "dst/model.safetensors").keys() == {"__metadata__", *UNET}
    assert json.loads((tmp_path / "dst/config.json").read_text()) == CONFIG
    if some(len(closed) == 3, False):
        assert_same(read_all(tmp_path / "merged"), UNET)


@pytest.mark.thorough  # a closed stream, and one without a reader, end alike
def test_full(src: Path, tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        run = start(["reshard", src, tmp_path / "dst", "--to", "hf"], stdout=full.fileno())
        _, err = run.communicate(timeout=60)
        assert run.returncode == 0
        assert "warning: the output is complete, but ckpttool cannot write to stdout: No space" in err
        assert read_all(tmp_path / "dst").keys() == UNET.keys()
        printed: list[list[object]] = [
            ["inspect", src],
            ["--help"],
            ["reshard", src, tmp_path / "two", "--to", "hf", "-n"],
        ]
        for words in some(printed, printed[:1]):
            run = start(words, stdout=full.fileno())
            _, err = run.communicate(timeout=60)
            assert run.returncode == 1
            assert err.endswith("error: cannot write to stdout: No space left on device\n")
        both = ["reshard", src, tmp_path / "three", "--to", "hf"]
        assert start(both, stdout=full.fileno(), stderr=full.fileno()).wait(60) == 0
        assert start(both, stdout=full.fileno(), stderr=full.fileno()).wait(60) == 1


ANSWERS: list[list[str]] = [
    [],
    ["--help"],
    ["--version"],
    *([command, "--help"] for command in COMMANDS),
    ["doctor"],
    ["doctor", "--json"],
    ["explain"],
    ["explain", "usage"],
    ["explain", "--json"],
    ["merge", "--list-methods"],
    ["convert-json", "--check", "PIR"],
    ["convert-json", "--check", "PIR", "--json"],
    ["inspect", "SRC/model.safetensors", "--header"],
    ["fp8-size", "LLAMA"],
    ["fp8-size", "LLAMA", "--json"],
    *(["inspect", "SRC", *words] for words in ([], ["--json"], ["--stats"], ["--depth", "2"], ["--check"], ["--hash"])),
    ["inspect", "SRC", "--html", "/dev/stdout"],
    ["inspect", "LLAMA", "--ranks"],
    ["inspect", "SRC", "--diff", "LLAMA"],
    ["inspect", "SRC", "--diff", "SRC"],
    *(["reshard", "LLAMA", "DST", "--tp-out", "2", "-n", *words] for words in ([], ["--json"])),
    ["merge", "LLAMA", "-o", "DST", "-n", "--json"],
    ["drop-keys", "LLAMA", "DST", "lm_head.weight", "-n"],
    ["fp8-cast", "LLAMA", "DST", "-n"],
]
"""All that answers on stdout, and writes nothing else."""


def ended(words: Sequence[str], src: Path, **streams: int) -> tuple[int, str]:
    places = {"PIR": PIR, "SRC": src, "LLAMA": LLAMA, "DST": src.parent / "none"}
    given = [str(places.get(head, head)) + slash + rest for head, slash, rest in (w.partition("/") for w in words)]
    closed = () if streams else (1,)
    run = start(given, *closed, **streams)
    err = run.communicate(timeout=120)[1]
    assert "Traceback" not in err
    assert "Exception" not in err
    return run.returncode, err


@pytest.mark.parametrize("words", some(ANSWERS, [["inspect", "SRC", "--json"], ["--version"]]), ids=" ".join)
def test_an_answer_that_nobody_gets(src: Path, words: list[str]) -> None:
    """One line and an exit code that is not 0, where stdout is closed or full; silence, and the exit code that the
    answer has, where its reader is gone."""
    with Path("/dev/null").open("w") as null, Path("/dev/full").open("w") as full:
        usual, said = ended(words, src, stdout=null.fileno())
        shut = ended(words, src)
        filled = ended(words, src, stdout=full.fileno())
    read, write = os.pipe()
    os.close(read)
    unread = ended(words, src, stdout=write)
    os.close(write)
    if not words:  # usage goes to stderr
        assert {shut[0], filled[0], unread[0], usual} == {2}
        return
    if words[-1] != "/dev/stdout":
        assert unread[0] == usual
        assert unread[1] in said
    for (code, err), why in ((shut, "it is closed"), (filled, "No space left on device")):
        assert code in {1, usual or 1}
        if words[-1] != "/dev/stdout":
            assert err.removeprefix(said) == f"error: cannot write to stdout: {why}\n"
            assert said or err.count("\n") == 1
        else:
            assert err.count("error: the report cannot be written") == 1


@pytest.mark.thorough  # test_closed has streams that are not there at all
@pytest.mark.parametrize("gone", ["both", "stdout", "stderr"])
def test_no_reader(src: Path, tmp_path: Path, gone: str) -> None:
    """``| head -1`` and ``2>&1 | head -1``: the run goes on."""
    read, write = os.pipe()
    os.close(read)
    streams = {name: write for name in ("stdout", "stderr") if gone in (name, "both")}
    runs = [(0, tmp_path / "dst"), *some([(1, src)], [])]
    started = [(start(["reshard", src, dst, "--to", "hf", "-v"], **streams), code) for code, dst in runs]
    os.close(write)
    for process, code in started:
        _, err = process.communicate(timeout=60)
        assert process.returncode == code
        assert "Traceback" not in (err or "")
        assert "Exception" not in (err or "")
    assert read_all(tmp_path / "dst").keys() == UNET.keys()


BEGIN = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from pathlib import Path
from ckpttool.cli import process

install = process.interrupts.install

def begun():
    install()
    Path(sys.argv.pop(1)).touch()

process.interrupts.install = begun
import runpy
runpy.run_module("ckpttool", run_name="__main__")
"""
"""``python -m ckpttool``, and a file as soon as it answers Ctrl-C: before that Python itself does."""


@pytest.mark.thorough  # reshard/test_process interrupts too
def test_interrupts_at_any_moment(src: Path, tmp_path: Path) -> None:
    """130 and one line, or DST and 0: while modules are imported, in the run, and at its end."""
    ends = []
    for i in some(range(15), range(0, 15, 6)):
        dst, begun = tmp_path / f"{i}", tmp_path / f"begun-{i}"
        command = [sys.executable, "-c", BEGIN, str(begun), "merge", str(src), "-o", str(dst), "--workers", "2"]
        with subprocess.Popen(command, stdout=-1, stderr=-1, text=True, cwd=ROOT) as run:
            while not begun.exists() and run.poll() is None:
                time.sleep(0.0005)
            time.sleep(i * 0.05)
            run.send_signal(signal.SIGINT)
            out, err = run.communicate(timeout=60)
        ends.append(run.returncode)
        assert run.returncode in (0, 130), (i, err)
        assert "Traceback" not in err, (i, err)
        assert "Exception" not in err, (i, err)
        assert (run.returncode == 0) == bool(out), (i, out, err)
        if run.returncode:
            assert err.splitlines()[-1].startswith("interrupted"), (i, err)
            assert err.count("interrupted") == 1
        assert dst.exists() or run.returncode, (i, err)
    assert ends[0] == 130
