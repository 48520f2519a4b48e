"""A Paddle program's parameters to safetensors and back, and the check of a large program against ``json.load``."""

from __future__ import annotations

import filecmp
import subprocess
from functools import partial
from pathlib import Path

import numpy as np

from bench.measure import OURS, OUT, Job, Program, copy_of
from bench.setting import PYTHON, TOOL, Setting, made
from tests.convert_json.programs import attribute, dumped, operator, ops_of, parameter, program, record, usual

SIDE = 4096
"""Rows and columns of a parameter: 64 MB in float32."""
LOAD = "import json, sys; json.load(open(sys.argv[1]))"


def jobs(setting: Setting) -> list[Job]:
    """There, back, and the check."""
    count = max(1, round(setting.gb / 3 * 1e9 / (4 * SIDE * SIDE)))
    operators = max(1000, round(setting.gb / 4.3 * 100_000))
    work = setting.work / f"program-{count}-{operators}"
    model, weights, out, large = (work / n for n in ("model.json", "model.pdiparams", "out.safetensors", "large.json"))
    prepare = partial(_prepare, work, count, operators)
    there = (TOOL, "convert-json", str(model), OUT, "-q")
    back = (TOOL, "convert-json", str(out), OUT, "--program", str(model), "-q")
    check = (TOOL, "convert-json", str(large), "--check")
    return [
        Job("convert-json to safetensors", (model, weights), (Program(OURS, there), copy_of(weights)), prepare),
        Job("convert-json back", (model, out), (Program(OURS, back), copy_of(out)), prepare),
        Job(
            f"convert-json --check of {operators:,} operators",
            (large,),
            (Program(OURS, check), copy_of(large), Program("json.load", (PYTHON, "-c", LOAD, str(large)))),
            prepare,
        ),
    ]


def _prepare(work: Path, count: int, operators: int) -> None:
    with made(work) as missing:
        if not missing:
            return
        work.mkdir(parents=True, exist_ok=True)
        names = sorted(f"linear_{i}.w_0" for i in range(count))
        with (work / "model.pdiparams").open("wb") as f:
            for i, _ in enumerate(names):
                f.write(record("F32", [SIDE, SIDE], b""))
                f.write(np.random.default_rng(i).standard_normal((SIDE, SIDE), dtype=np.float32).tobytes())
        data = program([parameter(i + 1, name, "F32", [SIDE, SIDE]) for i, name in enumerate(names)])
        (work / "model.json").write_bytes(dumped(data))
        large = usual([])
        note = attribute("struct_name", "0.a_str", "/Linear/" + "x" * 680)
        ops_of(large)[-1:-1] = [
            operator("1.relu", [2 if i == 0 else 99 + i], [100 + i], note) for i in range(operators)
        ]
        (work / "large.json").write_bytes(dumped(large))
        out, again = work / "out.safetensors", work / "again"
        subprocess.run([TOOL, "convert-json", str(work / "model.json"), str(out), "-q", "--force"], check=True)
        command = [TOOL, "convert-json", str(out), str(again), "--program", str(work / "model.json"), "-q", "--force"]
        subprocess.run(command, check=True)
        if not filecmp.cmp(again / "model.pdiparams", work / "model.pdiparams", shallow=False):
            raise SystemExit("what came back is not what went")
        for path in again.iterdir():
            path.unlink()
        again.rmdir()
