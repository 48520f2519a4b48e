"""The wheel holds the whole package, what lies beside it, and what it is made of; and it is always the same wheel.

`make test-package` installs it and the sdist in environments of their own.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import ckpttool
from scripts import release_notes
from scripts.build_hook import EXTRAS, normal, pinned, sbom_text

ROOT = Path(__file__).parents[1]
INFO = f"ckpttool-{ckpttool.__version__}.dist-info"
NEEDED = ("ckpttool", "share", "scripts/build_hook.py", "pyproject.toml", "constraints.txt", "README.md", "LICENSE")
"""What the wheel is built from."""

PROJECTS = {
    "azure.core": "azure-storage-blob",
    "azure.identity": "azure-identity",
    "azure.storage": "azure-storage-blob",
    "botocore": "boto3",
    "google.auth": "google-auth",
    "google.protobuf": "protobuf",
    "yaml": "pyyaml",
}
"""Modules that have another name than the project that they are declared by."""
UNDECLARED = {"IPython", "certifi"}
"""Are used where they are there already: in a notebook, and where the system has no certificates."""


def built(root: Path, folder: Path) -> Path:
    """The wheel of a tree."""
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder], cwd=root, check=True)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def wheel(path: Path) -> zipfile.ZipFile:
    return zipfile.ZipFile(path)


@pytest.fixture(scope="module")
def required(wheel: zipfile.ZipFile) -> dict[str, tuple[str, str]]:
    """Of the wheel's metadata: project -> what is required of it, and the extra that requires it."""
    found = {}
    for line in wheel.read(f"{INFO}/METADATA").decode().splitlines():
        if line.startswith("Requires-Dist: "):
            text, _, marker = line.removeprefix("Requires-Dist: ").partition(";")
            name, bound = re.fullmatch(r"([\w.-]+)(?:\[.*])?(.*)", text.strip()).groups()  # type: ignore[union-attr]
            extra = found_extra[1] if (found_extra := re.search(r"extra == '(.*?)'", marker)) else ""
            if extra in ("", *EXTRAS):
                found[normal(name)] = bound, extra
    return found


def test_wheel_holds_every_file_of_the_package(wheel: zipfile.ZipFile) -> None:
    packed = {name for name in wheel.namelist() if name.startswith("ckpttool/")}
    kept = (path for path in (ROOT / "ckpttool").rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    assert packed == {str(path.relative_to(ROOT)) for path in kept}
    assert "ckpttool/py.typed" in packed
    assert any(name.startswith("ckpttool/layout/families/") and name.endswith(".yaml") for name in packed)


def test_wheel_holds_what_shells_and_man_look_for(wheel: zipfile.ZipFile) -> None:
    data = f"ckpttool-{ckpttool.__version__}.data/data/"
    packed = {name.removeprefix(data) for name in wheel.namelist() if name.startswith(data)}
    assert packed == {str(path.relative_to(ROOT)) for path in (ROOT / "share").rglob("*") if path.is_file()}
    assert "share/man/man1/ckpttool-reshard.1" in packed


def test_wheel_says_what_it_is(wheel: zipfile.ZipFile, required: dict[str, tuple[str, str]]) -> None:
    assert "ckpttool = ckpttool.cli:main" in wheel.read(f"{INFO}/entry_points.txt").decode()
    assert "Apache License" in wheel.read(f"{INFO}/licenses/LICENSE").decode()
    # An upper bound here would make two packages impossible to install together that work together.
    assert all(re.fullmatch(r">=[\d.]+", bound) for bound, _ in required.values()), required
    assert len([name for name, (_, extra) in required.items() if not extra]) == 11


def test_dependencies_are_what_is_imported(required: dict[str, tuple[str, str]]) -> None:
    """What is declared is used, and the other way round."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "ckpttool").rglob("*.py"))
    # `from google.auth import ...`, `import numpy as np`; a sentence that begins so has no `import` behind it.
    lines = re.findall(r"^ *(?:from ([\w.]+) import \S|import ([\w.]+)(?: as \w+)?$)", text, re.MULTILINE)
    named = {one or other for one, other in lines}
    tops = (*sys.stdlib_module_names, "ckpttool", *UNDECLARED)
    found = set()
    for module in (m for m in named if m.partition(".")[0] not in tops):
        owner = next((p for m, p in PROJECTS.items() if f"{module}.".startswith(f"{m}.")), "")
        found.add(owner or normal(module.partition(".")[0]))
    assert found == required.keys()


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a checkout")
def test_sdist_holds_the_checkout() -> None:
    """Tests run from it, and they look at everything. What is left out is of no use without a checkout."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    held = {name.strip("/") for name in project["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]}
    always = {"pyproject.toml", "README.md", "LICENSE", ".gitignore"}
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert {name.partition("/")[0] for name in tracked.splitlines()} == held | always | {".ci", ".editorconfig"}


def test_sbom_is_of_what_is_required(wheel: zipfile.ZipFile, required: dict[str, tuple[str, str]]) -> None:
    bom = json.loads(wheel.read(f"{INFO}/sboms/ckpttool.cdx.json"))
    assert bom["metadata"]["component"]["purl"] == f"pkg:pypi/ckpttool@{ckpttool.__version__}"
    pins = pinned((ROOT / "constraints.txt").read_text(encoding="utf-8"))
    scopes = {name: "optional" if extra else "required" for name, (_, extra) in required.items()}
    assert {c["name"]: c["scope"] for c in bom["components"]} == scopes
    assert {c["purl"] for c in bom["components"]} == {f"pkg:pypi/{name}@{pins[name]}" for name in required}
    known = {bom["metadata"]["component"]["bom-ref"], *(c["bom-ref"] for c in bom["components"])}
    assert {d["ref"] for d in bom["dependencies"]} == known


def test_sbom_needs_a_pin_of_everything(tmp_path: Path) -> None:
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "constraints.txt").write_text("numpy==2.4.6\n", encoding="utf-8")
    with pytest.raises(ValueError, match="no pin for huggingface_hub"):
        sbom_text(tmp_path, "1")


def test_builds_are_reproducible(path: Path, tmp_path: Path) -> None:
    """In another directory, from files of another time and other permissions, beside others: the same bytes."""
    tree = tmp_path / "another name"
    for name in NEEDED:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tree / name, copy_function=shutil.copyfile)
        else:
            shutil.copyfile(ROOT / name, tree / name)
    (tree / "notes.txt").touch()
    for file in tree.rglob("*.py"):
        os.utime(file, (1e9, 1e9))
        file.chmod(0o600)
    assert built(tree, tmp_path / "again").read_bytes() == path.read_bytes()


CHANGES = """\
# Changelog

## Unreleased

## 1.1.0 - 2026-12-01

### Faster

- Twice.

```
## not a version
```

## v1.0.0

- First.
"""


def test_release_notes() -> None:
    assert release_notes.notes(CHANGES, "1.1.0") == "## Faster\n\n- Twice.\n\n```\n## not a version\n```\n"
    assert release_notes.notes(CHANGES, "1.0.0") == "- First.\n"
    for version in ("Unreleased", "2.0"):  # nothing in it, and not there
        with pytest.raises(KeyError):
            release_notes.notes(CHANGES, version)


def test_release_notes_of_this_changelog() -> None:
    script = [sys.executable, str(ROOT / "scripts/release_notes.py")]
    done = subprocess.run(script, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("## ")
    done = subprocess.run([*script, "v99"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "says nothing of v99" in done.stderr
