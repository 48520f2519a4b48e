"""Processes that compute, started from programs that have threads already: what a notebook is."""

from __future__ import annotations

import fcntl
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from ckpttool.core.plan import Adapted, Compute, Gathered, LowRank, Randomness, Scaled, StoredOperand
from ckpttool.core.plan import RowRun as RowBlock
from ckpttool.errors import ConflictError, OutputError
from ckpttool.execute import RunOptions, run, worker_pool, workforce
from ckpttool.execute.plan_json import decode, encode
from ckpttool.execute.worker_pool import Answer, ProcessPool, Serve
from tests.execute.merges import merge_plan, written

HELPERS = "tests.execute.worker_entries"


@pytest.fixture
def beside() -> Iterator[threading.Thread]:
    """A thread that lives as long as the test."""
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    yield thread
    assert thread.is_alive()
    done.set()
    thread.join()


def started(count: int = 2, keep: tuple[int, ...] = ()) -> ProcessPool:
    def no_serve() -> Serve:
        raise AssertionError("forked beside a thread")

    found = worker_pool.spawn(count, {}, no_serve, f"{HELPERS}:main", keep)
    assert found is not None
    return found


def ask(worker: worker_pool.WorkerProcess, **order: object) -> dict[str, Any]:
    told: list[Answer] = []
    worker.do(order, told.append)
    return told[0]


def is_alive(pid: int) -> bool:
    """Whether it runs; what only waits to be collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(*pids: int) -> bool:
    """Whether they end within half a minute; on a busy machine that takes seconds."""
    for _ in range(3000):
        if not any(map(is_alive, pids)):
            return True
        time.sleep(0.01)
    return False


@pytest.mark.usefixtures("beside")
def test_workers_beside_a_thread() -> None:
    """They are processes of their own, none of them a fork of this one, and end when they are dismissed."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not worker_pool.can_fork()
        found = started(3)
        said = [ask(w) for w in found.workers]
        found.dismiss(now=False)
        found.close()
    assert len({s["pid"] for s in said}) == 3
    assert len({s["parent"] for s in said}) == 1
    assert os.getpid() not in {said[0]["parent"], *[s["pid"] for s in said]}
    assert gone(said[0]["parent"], *[s["pid"] for s in said])


@pytest.mark.usefixtures("beside")
def test_errors_and_deaths_beside_a_thread() -> None:
    found = started(3)
    with pytest.raises(ConflictError) as caught:
        ask(found.workers[0], fail=True)
    assert (caught.value.what, caught.value.where, caught.value.hint) == ("what", ("here",), "so")
    with pytest.raises(OutputError, match="ended: killed by SIGKILL"):
        ask(found.workers[1], die=True)
    helper = ask(found.workers[0])["parent"]  # an error is no end
    os.kill(helper, signal.SIGKILL)
    with pytest.raises(OutputError, match="ended: killed by SIGKILL"):
        ask(found.workers[2], wait=60)
    found.dismiss(now=True)
    found.close()
    assert gone(helper)


@pytest.mark.usefixtures("beside")
def test_nothing_stays_open_behind_a_thread_that_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is still told how its worker ended, while the others are killed."""
    hears, asks = worker_pool._HelperProcess.hears, threading.Event()

    def late(helper: worker_pool._HelperProcess) -> object:
        asks.set()
        time.sleep(0.05)
        return hears(helper)

    def killed() -> None:
        found = started(2)
        monkeypatch.setattr(worker_pool._HelperProcess, "hears", late)
        asking = threading.Thread(target=wait, args=(found.workers[0],))
        asking.start()
        asks.wait()
        found.dismiss(now=True)
        asking.join()
        found.close()

    def wait(worker: worker_pool.WorkerProcess) -> None:
        with pytest.raises(OutputError, match="a worker process ended"):
            ask(worker, die=True)

    killed()
    gc.collect(1)  # a file that is left to it is a warning, and so an error


@pytest.mark.usefixtures("beside")
def test_what_is_killed_ends_at_once(tmp_path: Path) -> None:
    """And only then is a lock free that the workers hold, too."""
    fd = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    found = started(2, (fd,))
    pids = [ask(w)["pid"] for w in found.workers]
    os.close(fd)
    other = os.open(tmp_path, os.O_RDONLY)
    with pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def wait() -> None:
        with pytest.raises(OutputError, match="a worker process ended"):
            ask(found.workers[0], wait=60)

    asking = threading.Thread(target=wait)
    asking.start()
    found.dismiss(now=True)
    asking.join()
    found.close()
    assert gone(*pids)
    fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(other)


@pytest.mark.usefixtures("beside")
@pytest.mark.parametrize("executable", ["/bin/false", "/bin/cat", "/nowhere/python", ""])
def test_no_interpreter_to_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, executable: str) -> None:
    """A program that embeds Python: one thread computes, and says so."""
    plan, want = merge_plan(tmp_path / "src")
    monkeypatch.setattr(sys, "executable", executable)
    result = run(plan, tmp_path / "dst", RunOptions(workers=2))
    assert written(tmp_path / "dst") == want
    assert [n for n in result.notes if n.startswith("computing with one thread")]


@pytest.mark.usefixtures("beside")
def test_a_run_beside_a_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bytes, and more than one process has worked."""
    plan, want = merge_plan(tmp_path / "src")
    monkeypatch.setattr(workforce, "_ENTRY", f"{HELPERS}:noting")
    result = run(plan, tmp_path / "dst", RunOptions(workers=2, manifest=True))
    assert written(tmp_path / "dst") == want
    assert not result.notes
    pids = [int(p.name.split()[1]) for p in tmp_path.glob("pid *")]
    assert len(pids) == 2
    assert os.getpid() not in pids
    assert gone(*pids)


OWN = """
    import sys, threading
    from dataclasses import replace
    from pathlib import Path
    from ckpttool.execute import RunOptions, run
    from ckpttool.kernels.merge import METHODS
    from ckpttool.core.plan import Unit
    from tests.execute.merges import merge_plan, written

    def mine(tensor):
        return (yield from METHODS["linear"].program(tensor))

    here = Path(sys.argv[1])
    METHODS["mine"] = replace(METHODS["linear"], name="mine", program=mine)
    plan, want = merge_plan(here / "src", method="mine")
    for dst in here / "alone", here / "beside":
        print(run(plan, dst, RunOptions(workers=2)).notes)
        assert written(dst) == want
        threading.Thread(target=threading.Event().wait, daemon=True).start()
"""


@pytest.mark.thorough  # what cannot be started elsewhere: test_errors_and_deaths_beside_a_thread
def test_a_method_of_the_program(tmp_path: Path) -> None:
    """No fresh interpreter knows it. Threads of numpy's library alone do not keep the program from forking."""
    environment = {k: v for k, v in os.environ.items() if k != "OPENBLAS_NUM_THREADS"}
    out, err = script(OWN, tmp_path, env=environment).communicate(timeout=60)
    assert out.splitlines() == ["[]", "['computing with one thread: no other process can be started here']"]
    assert not err


SCRIPT = """
    import sys, threading, time
    from pathlib import Path
    from ckpttool.execute import RunOptions, run, workforce
    from tests.execute.merges import merge_plan, written

    here = Path(sys.argv[1])
    print("begin", flush=True)
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    plan, want = merge_plan(here / "src")
    if sys.argv[2] == "whole":
        run(plan, here / "dst", RunOptions(workers=2))
        assert written(here / "dst") == want
    print("end", flush=True)
    workforce._ENTRY = "tests.execute.worker_entries:slow"
    run(plan, here / "killed", RunOptions(workers=2))
"""


def script(text: str, *arguments: object, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """A program on stdin, which no other process could import."""
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-", *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
        env=env,
    )
    assert process.stdin is not None
    process.stdin.write(dedent(text))
    process.stdin.close()
    process.stdin = None
    return process


@pytest.mark.sample("9")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_the_workers_of_a_program_that_ends(tmp_path: Path, number: signal.Signals) -> None:
    """Ctrl-C and kill -9 leave no process behind, and nobody holds the lock. One of the two writes something before."""
    process = script(SCRIPT, tmp_path, "whole" if number == signal.SIGKILL else "")
    pids: list[int] = []
    for _ in range(3000):
        if len(pids := [int(p.name.split()[1]) for p in tmp_path.glob("pid *")]) == 2:
            break
        time.sleep(0.01)
    time.sleep(0.2)
    assert len(pids) == 2
    assert all(map(is_alive, pids))
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert out == "begin\nend\n"
    assert process.returncode != 0
    assert gone(*pids)
    assert "KeyboardInterrupt" in err if number == signal.SIGINT else not err
    plan, want = merge_plan(tmp_path / "src")
    run(plan, tmp_path / "killed", RunOptions(force=True))
    assert written(tmp_path / "killed") == want


def test_a_unit_as_json_and_back(tmp_path: Path) -> None:
    """Every kind of operand, and names that are no Unicode."""
    import json

    plan, _ = merge_plan(tmp_path / "src")
    (step,) = plan.units[0].steps
    assert isinstance(step, Compute)
    one, two = step.models
    assert isinstance(one, StoredOperand)
    assert isinstance(two, StoredOperand)
    strange = one._replace(label="a\udcff\n\x00é")
    operands = (
        Scaled(strange, two, (2, 3), "F4", two, divides=True),
        Adapted(strange, (LowRank(one, two, 0.1, 1, 2),), 6, "BF16"),
        Gathered((one, two), (40, 6), (RowBlock(0, 39, 1, 0),), ((39, ((0, 1), (1, 2))),)),
    )
    whole = (("a", float("inf")), ("b", 1e-323), ("c", 3), ("d", True))
    unit = plan.units[0]._replace(steps=(step._replace(models=operands, base=one, whole=whole, base_at=None),))
    again = decode(json.loads(json.dumps(encode(unit))))
    assert again == unit
    assert repr(again) == repr(unit)  # True is not 1, and no list is left
    randomness = Randomness("mergekit", 1, (("t", 5, (True, False), "BF16"),))
    assert repr(decode(json.loads(json.dumps(encode(randomness))))) == repr(randomness)
    assert decode(encode(None)) is None
