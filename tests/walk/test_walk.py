"""A sample of the random walk; `make walk` takes thousands of chains."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.sample import some
from tests.walk.merging import START, walk_start

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


_FOLLOWS = ("ernie4_5_moe",)
_OPEN = {name for name in START if name.startswith("slices of ") and not name.endswith(_FOLLOWS)}
"""Of the start set: what is still wrong."""


@pytest.mark.xfail(bool(_OPEN), reason="the start set is walked first")
@pytest.mark.thorough  # `make walk` is the walk itself; this one shows that it can be started
def test_sample() -> None:
    # In chain 7 a command works, one is refused, and one is killed and resumed.
    chains = some(["--chains", "8"], ["--from", "7", "--chains", "1"])
    command = [sys.executable, "-m", "tests.walk", *chains, "-j", "1"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout[-8000:] + ended.stderr[-2000:]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.xfail(strict=True)] * (n in _OPEN)) for n in START]
)
def test_what_was_wrong_stays_right(name: str, tmp_path: Path) -> None:
    told = walk_start(name, tmp_path)
    assert not told.wrong, "\n".join([*told.log, told.wrong])


@pytest.mark.parametrize(
    "module", ["bits", "forms", "models", "names", "numbered", "ranks", "judge", "paddle", "states"]
)
def test_what_makes_and_judges_shares_nothing_with_the_package(module: str) -> None:
    tree = ast.parse((HERE / f"{module}.py").read_text(encoding="utf-8"))
    imported = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    imported |= {n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    ours = {n for n in imported if n.split(".")[0] in ("ckpttool", "tests")}
    assert ours <= {f"tests.walk.{x}" for x in ("bits", "forms", "models", "names", "ranks", "paddle", "states")} | {
        "tests.walk"
    }
    known = {*sys.stdlib_module_names, "numpy", "tests"}
    assert {n.split(".")[0] for n in imported} <= known
