"""``make test-package``: the wheel and the sdist as a user gets them, in environments that hold nothing else (minutes).

    build      wheel and sdist; the sdist builds the same two, byte for byte, and tests run from it
    sbom       by the schema of CycloneDX
    install    with the lowest and the newest dependencies that are allowed, on each Python that is here; then jobs.py
    types      a user's project under mypy --strict, with torch and without

What is not here (another Python) is skipped with a word. Everything is made in a temporary directory.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
JOBS = Path(__file__).with_name("jobs.py")
PYTHONS = ("3.11", "3.12", "3.13")
LOWEST, NEWEST = "lowest-direct", "highest"

USER = """
from collections.abc import Iterator

import numpy as np

import ckpttool
from ckpttool import Checkpoint, CkptError, Written


def halved(path: str, to: str) -> Written:
    with ckpttool.open(path) as source:
        return source.reshard(tp=2).run(to, verify=True)


def names(source: Checkpoint) -> Iterator[tuple[str, tuple[int, ...]]]:
    for name, tensor in source.items():
        yield name, tensor.shape


def largest(source: Checkpoint) -> float:
    arrays = (array for _, array in source.tensors("*norm*"))
    return max(float(np.abs(a.astype(np.float32)).max()) for a in arrays)


def tensors(source: Checkpoint) -> int:
    source.torch("model.norm.weight")
    return len(dict(source.tensors(framework="pt")))


def checked(path: str) -> bool:
    try:
        return ckpttool.check(path).ok
    except CkptError as e:
        print(e.what, e.hint)
        return False
"""
WITH_TORCH = """
import torch

import ckpttool


def norm(source: ckpttool.Checkpoint) -> torch.Tensor:
    return source.torch("model.norm.weight").float()


wrong: int = ckpttool.open("model").torch("model.norm.weight")
"""


CYCLONEDX = "cyclonedx-python-lib[json-validation]==11.12.0"
VALIDATE = """
import sys
from pathlib import Path

from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

wrong = JsonStrictValidator(SchemaVersion.V1_6).validate_str(Path(sys.argv[1]).read_text())
sys.exit(wrong and str(wrong))
"""


class FailedError(Exception):
    """What did not work."""


def call(*words: object, where: Path | None = None, **environment: str) -> str:
    """Run a program, with nothing of this environment but PATH and what is said. Returns what it printed."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV", "CKPTTOOL"))}
    done = subprocess.run(
        list(map(str, words)),
        cwd=where,
        env={**kept, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise FailedError(f"$ {' '.join(map(str, words))}\n{done.stdout}[exit {done.returncode}]")
    return done.stdout


def interpreter(version: str) -> str | None:
    """A Python of this version that runs, on PATH or of pyenv."""
    found = [shutil.which(f"python{version}"), *map(str, Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))]
    code = "import sys, venv; print('%d.%d' % sys.version_info[:2])"
    for python in filter(None, found):
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
        if done.stdout.strip() == version:
            return python
    return None


class Bench:
    """The directory in which everything is made."""

    def __init__(self, work: Path) -> None:
        self.work = work
        self.uv = str(Path(sys.executable).with_name("uv"))

    def build(self) -> None:
        """Wheel and sdist of this tree, and the wheel of the unpacked sdist."""
        call(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-t", "sdist", "-d", self.work, where=ROOT)
        (self.wheel,) = self.work.glob("*.whl")
        (self.sdist,) = self.work.glob("*.tar.gz")
        with tarfile.open(self.sdist) as packed:
            packed.extractall(self.work / "sdist", filter="data")
        (self.tree,) = (self.work / "sdist").iterdir()
        again = self.work / "again"
        call(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-t", "sdist", "-d", again, where=self.tree)
        for one in (self.wheel, self.sdist):
            if (again / one.name).read_bytes() != one.read_bytes():
                raise FailedError(f"what {self.sdist.name} builds is another {one.name}")

    def sbom(self, python: Path) -> None:
        """What the project behind CycloneDX says of the wheel's SBOM."""
        call(self.uv, "pip", "install", "-q", "--python", python, CYCLONEDX)
        with zipfile.ZipFile(self.wheel) as packed:
            (name,) = (n for n in packed.namelist() if n.endswith(".cdx.json"))
            packed.extract(name, self.work)
        call(python, "-c", VALIDATE, self.work / name)

    def test_from_sdist(self) -> None:
        """A few tests of every kind run from what is unpacked, and need nothing beside it."""
        some = ["tests/unit/test_api.py", "tests/test_packaging.py", "tests/test_share.py", "tests/merge/test_draws.py"]
        options = ("-q", "-p", "no:cacheprovider", f"--basetemp={self.work / 'pytest'}")
        call(sys.executable, "-m", "pytest", *options, *some, where=self.tree)

    def environment(self, name: str, python: str) -> Path:
        """A new one. Returns its interpreter."""
        call(self.uv, "venv", "-q", "--python", python, self.work / name)
        return self.work / name / "bin" / "python"

    def install(self, python: Path, what: Path, resolution: str) -> None:
        """ckpttool and what it depends on."""
        pip = (self.uv, "pip", "install", "-q", "--python", python)
        if resolution == LOWEST:
            # Of a wheel that is given, what it depends on is indirect already; so that is named here, and what has no
            # wheel for this Python is not its lowest version.
            requirements = ("-r", self.tree / "pyproject.toml")
            call(*pip, "--resolution", LOWEST, "--only-binary", ":all:", *requirements)
            call(*pip, "--no-deps", what)
        else:
            call(*pip, what)
        call(self.uv, "pip", "check", "--python", python)

    def jobs(self, python: Path) -> None:
        """What users do."""
        with tempfile.TemporaryDirectory(dir=self.work) as folder:
            call(python, JOBS, ROOT / "fixtures", where=Path(folder))

    def types(self, python: Path) -> None:
        """A user's project, for which mypy looks into the environment: without torch, then with the one of .venv."""
        project = self.work / "project"
        project.mkdir()
        (project / "user.py").write_text(USER, encoding="utf-8")
        (project / "tensors.py").write_text(WITH_TORCH, encoding="utf-8")
        mypy = (sys.executable, "-m", "mypy", "--strict", "--python-executable", python, "--cache-dir")
        call(*mypy, self.work / "cache-without", "user.py", where=project)
        site = next((python.parents[1] / "lib").glob("python*/site-packages"))
        (site / "torch.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
        try:
            call(*mypy, self.work / "cache", "user.py", "tensors.py", where=project)
        except FailedError as e:
            expected = 'Incompatible types in assignment (expression has type "Tensor", variable has type "int")'
            if str(e).count("error: ") != 1 or expected not in str(e):
                raise
        else:
            raise FailedError("mypy takes a torch tensor for anything where torch is installed")


def steps(bench: Bench) -> Iterator[tuple[str, bool]]:
    """Does it all; says what is done, and whether it was."""
    bench.build()
    yield "build: wheel and sdist, and the same two from the sdist", True
    bench.sbom(bench.environment("sbom", sys.executable))
    yield "SBOM: valid CycloneDX 1.6", True
    bench.test_from_sdist()
    yield "tests from the sdist", True
    for version in PYTHONS:
        found = interpreter(version)
        for resolution in (LOWEST, NEWEST):
            name = f"{version} {resolution}"
            if found is None:
                yield f"{name}: there is no Python {version}", False
                continue
            python = bench.environment(name.replace(" ", "-"), found)
            bench.install(python, bench.sdist if resolution == NEWEST else bench.wheel, resolution)
            bench.jobs(python)
            yield name, True
            if name == f"3.11 {NEWEST}":
                bench.types(python)
                yield "types of a user's project, without torch and with it", True


def main() -> int:
    """Say what was done, and how long it took."""
    parser = argparse.ArgumentParser(prog="make test-package", description=__doc__.partition("\n")[0])
    parser.parse_args()
    passed = skipped = 0
    with tempfile.TemporaryDirectory(prefix="ckpttool-package-") as folder:
        began = time.monotonic()
        try:
            for what, done in steps(Bench(Path(folder))):
                print(f"{'passed ' if done else 'skipped'} {time.monotonic() - began:5.0f} s  {what}", flush=True)  # noqa: T201 - what it is for
                passed, skipped, began = passed + done, skipped + (not done), time.monotonic()
        except FailedError as e:
            print(f"failed: {e}\n{passed} passed, 1 failed, {skipped} skipped")  # noqa: T201 - what it is for
            return 1
    print(f"{passed} passed, 0 failed, {skipped} skipped")  # noqa: T201 - what it is for
    return 0


if __name__ == "__main__":
    sys.exit(main())
