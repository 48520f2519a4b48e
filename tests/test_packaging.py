"""The wheel holds the whole package: its data files, its type marker, the license and the console script."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import ckpttool

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder], cwd=ROOT, check=True)
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


def test_wheel_holds_every_file_of_the_package(wheel: zipfile.ZipFile) -> None:
    packed = {name for name in wheel.namelist() if name.startswith("ckpttool/")}
    kept = (path for path in (ROOT / "ckpttool").rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    assert packed == {str(path.relative_to(ROOT)) for path in kept}
    assert "ckpttool/py.typed" in packed
    assert any(name.startswith("ckpttool/layout/families/") and name.endswith(".yaml") for name in packed)


def test_wheel_says_what_it_is(wheel: zipfile.ZipFile) -> None:
    info = f"ckpttool-{ckpttool.__version__}.dist-info"
    assert "ckpttool = ckpttool.cli:main" in wheel.read(f"{info}/entry_points.txt").decode()
    assert "Apache License" in wheel.read(f"{info}/licenses/LICENSE").decode()
    metadata = wheel.read(f"{info}/METADATA").decode()
    # An upper bound here would make two packages impossible to install together that work together.
    required = [line for line in metadata.splitlines() if line.startswith("Requires-Dist:") and "extra ==" not in line]
    assert len(required) == 9
    assert all(">=" in line and "<" not in line and "==" not in line for line in required)
