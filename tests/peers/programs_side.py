"""Inference programs in Paddle, seen from the process that has none: jobs of ``paddle_programs``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.convert_json.accepted import CASES, RIGHTS
from tests.peers import paddle_side
from tests.peers.paddle_side import Bits

LOADERS = ("J", "S", "I")
LIMIT = 20
"""Seconds for a program of some operators, which needs half of one."""
KNOWN_BAD = 3
"""The same for one that is known to hang or crash."""
BAD = "crash or hang"
AT_A_TIME = 150
"""Loads in one process, which may take `paddle_side.LIMIT` altogether."""


def job(tasks: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """What Paddle told about each task; its version at the end."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "job.json"
    path.write_text(json.dumps(tasks), encoding="utf-8")
    (told,) = paddle_side.start("tests.peers.paddle_programs", path)
    assert len(told) == len(tasks) + 1
    return told


def task(program: Path, loader: str, inputs: Path, out: Path, limit: float = 60) -> dict[str, Any]:
    """Load a program and run it."""
    path = program.with_suffix("")
    paths = {"path": str(path), "suffix": program.suffix, "inputs": str(inputs), "out": str(out)}
    return {"do": "load", "loader": loader, "limit": limit, **paths}


def same(one: Mapping[str, Bits], other: Mapping[str, Bits]) -> bool:
    """Bit for bit, NaN included."""
    return one.keys() == other.keys() and all(
        (a.dtype, a.shape, a.tobytes()) == (other[n].dtype, other[n].shape, other[n].tobytes()) for n, a in one.items()
    )


def measure(names: Iterable[tuple[str, str]], folder: Path, known: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What each loader does with these cases, ``(table, name)``; as the fixture has it.

    ``known`` is the fixture: a load that is known to end badly gets less time.
    """
    folder.mkdir(parents=True, exist_ok=True)
    inputs = folder / "inputs.npz"
    np.savez(inputs, x=np.array([[1, -2, 3, -4], [0.5, 0.25, -1, 2]], "f4"))
    cases = {(t, ""): RIGHTS[t] for t in CASES} | {(t, n): CASES[t][n] for t, n in names}
    tasks: dict[tuple[str, str, str], dict[str, Any]] = {}
    for i, ((table, name), case) in enumerate(cases.items()):
        program = case.write(folder / str(i))
        for loader in LOADERS:
            bad = known is not None and known[table].get(name, {}).get(loader) == BAD
            limit = KNOWN_BAD if bad else LIMIT
            tasks[table, name, loader] = task(program, loader, inputs, folder / f"{i}.{loader}.npz", limit)
    told: list[dict[str, Any]] = []
    given, version = list(tasks.values()), ""
    for at in range(0, len(given), AT_A_TIME):
        *said, last = job(given[at : at + AT_A_TIME], folder / f"job{at}")
        told += said
        version = last["version"]
    found: dict[str, Any] = {"paddle": version, **{t: {} for t in CASES}}
    right = {}
    for (table, name, loader), one in zip(tasks, told, strict=True):
        out = Path(tasks[table, name, loader]["out"])
        if not name:
            assert one["said"] == "accepted", (table, loader, one)
            right[table, loader] = paddle_side.load(out)
            continue
        entry = found[table].setdefault(name, {"id": cases[table, name].id})
        entry[loader] = answer(one, out, right[table, loader])
    return found


def answer(said: Mapping[str, Any], out: Path, right: Mapping[str, Bits]) -> str:
    """In the words of the fixture."""
    if said["said"] == "accepted":
        return f"accepted, {'same' if same(paddle_side.load(out), right) else 'other'} output"
    return "refused" if said["said"] == "refused" else BAD
