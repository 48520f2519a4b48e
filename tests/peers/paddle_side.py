"""Starts programs in ``.venv-paddle``, beside which this process has neither Paddle nor its versions of anything.

``make test-peers`` makes that environment and names its interpreter in CKPTTOOL_PADDLE_PYTHON; then a test fails when
it is not there. A bare pytest skips, and says how to get it.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
LIMIT = 240
"""Seconds that one job may take."""
SOFTWARE = ("paddlenlp-3.0", "paddleformers-0.4", "paddleformers-1.2")

Bits = np.ndarray[Any, np.dtype[Any]]


def python() -> Path:
    """The interpreter; skips or fails the test that asks when there is none."""
    named = os.environ.get("CKPTTOOL_PADDLE_PYTHON")
    path = Path(named) if named else ROOT / ".venv-paddle" / "bin" / "python"
    if not path.exists():
        if named:
            pytest.fail(f"CKPTTOOL_PADDLE_PYTHON is {named}, which does not exist; `make test-peers` makes it")
        pytest.skip("there is no .venv-paddle here; `make test-peers` makes it")
    return path


def start(module: str, argument: Path, software: str = SOFTWARE[-1], ranks: int = 1) -> list[list[dict[str, Any]]]:
    """Run ``main`` of a module with an argument on so many ranks; what each rank told, one dictionary for each line.

    Raises RuntimeError with the end of what they said when a rank fails.
    """
    paths = [argument.with_name(f"{argument.stem}.rank{r}.log") for r in range(ranks)]
    given = [{"log": str(p), "environment": e} for p, e in zip(paths, _ranks(ranks), strict=True)]
    codes = _answer(module, software, {"argument": str(argument), "ranks": given})
    logs = [path.read_text(encoding="utf-8") for path in paths]
    if any(codes):
        ends = "\n".join(f"rank {r}:\n{log[-2500:]}" for r, log in enumerate(logs) if codes[r])
        raise RuntimeError(f"{module} ended with {codes}\n{ends}")
    return [[json.loads(x.split(" ", 1)[1]) for x in log.splitlines() if x.startswith("CKPTTOOL ")] for log in logs]


def _answer(module: str, software: str, job: Mapping[str, Any]) -> list[int]:
    """The exit codes of a job's ranks. Raises RuntimeError when there is none in time."""
    server = _server(module, software)
    assert server.stdin is not None
    assert server.stdout is not None
    answer = ""
    try:
        server.stdin.write(json.dumps(job) + "\n")
        server.stdin.flush()
        if select.select([server.stdout], [], [], LIMIT)[0]:
            answer = server.stdout.readline()
    finally:
        if not answer:
            _server.cache_clear()
            _end(server)
    if not answer:
        raise RuntimeError(f"{module} ended or took longer than {LIMIT} s; its job was {job}")
    codes: list[int] = json.loads(answer)
    return codes


@cache
def _server(module: str, software: str) -> subprocess.Popen[str]:
    """A process that has imported a module, see ``paddle_server``."""
    program = python()
    paths = [str(ROOT)] if software == SOFTWARE[-1] else [str(program.parents[1] / "older"), str(ROOT)]
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith(("PADDLE_", "PYTEST_"))},
        "PYTHONPATH": os.pathsep.join(paths),
        "CKPTTOOL_PADDLE_SOFTWARE": software,
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PADDLE_DISTRI_BACKEND": "gloo",
    }
    server = subprocess.Popen(
        [str(program), "-W", "ignore", "-m", "tests.peers.paddle_server", module],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    atexit.register(_end, server)
    return server


def _end(server: subprocess.Popen[str]) -> None:
    """Kill it with its ranks, unless that was done."""
    with server:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGKILL)


def _ranks(ranks: int) -> list[dict[str, str]]:
    """The variables that Paddle's launcher gives to each rank."""
    if ranks == 1:
        return [{}]
    ports = _free_ports(ranks + 1)
    ends = [f"127.0.0.1:{p}" for p in ports[:ranks]]
    return [
        {
            "PADDLE_TRAINER_ID": str(rank),
            "PADDLE_RANK_IN_NODE": str(rank),
            "PADDLE_GLOBAL_RANK": str(rank),
            "PADDLE_LOCAL_SIZE": str(ranks),
            "PADDLE_GLOBAL_SIZE": str(ranks),
            "PADDLE_TRAINERS_NUM": str(ranks),
            "PADDLE_MASTER": f"127.0.0.1:{ports[-1]}",
            "PADDLE_CURRENT_ENDPOINT": ends[rank],
            "PADDLE_TRAINER_ENDPOINTS": ",".join(ends),
        }
        for rank in range(ranks)
    ]


def _ports() -> Iterator[int]:
    """Those of this worker of xdist: two that ask the system for free ones would be given the same."""
    first = 20_000 + 500 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    return cycle(range(first, first + 500))


_PORTS = _ports()


def _free_ports(number: int) -> list[int]:
    return list(islice(filter(_is_free, _PORTS), number))


def _is_free(port: int) -> bool:
    with socket.socket() as s:
        try:
            s.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def load(path: str | Path) -> dict[str, Bits]:
    """The arrays of a .npz."""
    with np.load(path) as f:
        return {k: f[k] for k in f.files}


def read(do: str, paths: Mapping[str, Path], folder: Path, software: str = SOFTWARE[-1], ranks: int = 1) -> Any:
    """Jobs of ``paddle_read``, one for each path, by name: what each told, with its tensors (of each rank)."""
    folder.mkdir(parents=True, exist_ok=True)
    outs = {n: str(folder / f"{n.replace('/', '_')}.npz") for n in paths}
    jobs = folder / "jobs.json"
    jobs.write_text(
        json.dumps([{"do": do, "path": str(p), "out": outs[n]} for n, p in paths.items()]), encoding="utf-8"
    )
    told = start("tests.peers.paddle_read", jobs, software, ranks)
    for rank in told:
        for one in rank:
            if "error" not in one and do != "flex_merge":
                one["tensors"] = load(one["out"])
    by_name = {n: [rank[i] for rank in told] for i, n in enumerate(paths)}
    return {n: one[0] for n, one in by_name.items()} if ranks == 1 else by_name


def resume(
    checkpoint: Path,
    folder: Path,
    kind: str,
    *,
    software: str = SOFTWARE[-1],
    tp: int = 1,
    pp: int = 1,
    sharding: int = 1,
    version: str = "v2",
    bf16: bool = True,
) -> list[dict[str, Bits]]:
    """What each rank of a trainer holds after it loaded a checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    job = folder / "job.json"
    given = {"checkpoint": str(checkpoint), "out": str(folder / "held"), "format": kind, "bf16": bf16}
    sizes = {"tp": tp, "pp": pp, "sharding": sharding, "version": version}
    job.write_text(json.dumps(given | sizes), encoding="utf-8")
    ranks = tp * pp * sharding
    start("tests.peers.paddle_resume", job, software, ranks)
    return [load(folder / f"held.rank{r}.npz") for r in range(ranks)]
