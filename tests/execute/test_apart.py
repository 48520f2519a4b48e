"""An engine that ends the process that uses it: a run hears of that as an error."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from ckpttool.errors import CkptError, OutputError, UsageError
from ckpttool.execute.fleets import fleet_for
from ckpttool.execute.fleets.base import Worker

LINE = "[2026-01-01 00:00:00,000 E 1 2] rpc_client.h:204: No answer within 60 seconds. The program will terminate."


@dataclass(frozen=True)
class Job:
    """Nobody opens it."""

    digest: str = "1"

    def open(self) -> Worker:
        raise NotImplementedError


@pytest.fixture
def ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of this name, whose ``init`` ends as Ray does without a head node."""
    for name, text in {
        "__init__": "import os\ndef is_initialized(): return False\n"
        f"def init(**_):\n    os.write(2, b{LINE + chr(10)!r})\n    os._exit(1)\n",
        "exceptions": "class RayError(Exception): ...\nActorUnavailableError = RuntimeEnvSetupError = RayError\n",
        "_private/worker": "",
        "util/scheduling_strategies": "NodeAffinitySchedulingStrategy = None\n",
    }.items():
        path = tmp_path / f"ray/{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    return tmp_path / "ray"


def start(where: str) -> None:
    fleet = fleet_for(where)
    try:
        fleet.start(Job())
    finally:
        fleet.end(now=True)


def error(where: str = "ray") -> CkptError:
    with pytest.raises(CkptError) as caught:
        start(where)
    return caught.value


@pytest.mark.usefixtures("ray")
def test_its_process_ends() -> None:
    found = error()
    assert isinstance(found, OutputError)
    assert found.what == "no connection to the cluster"
    assert found.where == ("--on ray", "last output: No answer within 60 seconds")


def test_it_raises_what_is_no_error_of_ours(ray: Path) -> None:
    """Ray's way to say that this machine's own node is gone. From OSError the command line takes something else."""
    with (ray / "__init__.py").open("a") as f:
        f.write("def init(**_): raise KeyError('Broken pipe')\n")
    assert error().where == ("--on ray", "last output: KeyError: 'Broken pipe'")


def test_what_it_needs_is_not_installed(ray: Path) -> None:
    (ray / "__init__.py").write_text("raise ModuleNotFoundError('no', name='msgpack')\n")
    found = error()
    assert isinstance(found, UsageError)
    assert found.what == "--on ray needs a package that is not installed: msgpack"


@pytest.mark.usefixtures("ray")
@pytest.mark.parametrize("address", ["127.0.0.1:1", "[::1]:1", "a..b:6379"])
def test_an_address_where_no_cluster_is(address: str) -> None:
    """Also one that is not the name of a host, which is a ValueError."""
    found = error(f"ray={address}")
    assert isinstance(found, UsageError)
    assert "no Ray cluster answers at " in found.what


def test_it_does_not_answer_when_it_is_let_go(ray: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Ray within that minute: it is not waited for."""
    from ckpttool.execute.fleets import apart

    with (ray / "__init__.py").open("a") as f:
        f.write("def init(**_):\n    import time\n    time.sleep(60)\n")
    monkeypatch.setattr(apart, "_END_TIMEOUT", 0.2)
    fleet = fleet_for("ray")
    assert isinstance(fleet, apart.ApartFleet)
    fleet._pipe.send(("start", Job()))
    began = time.monotonic()
    fleet.end(now=True)
    fleet.end(now=True)
    assert time.monotonic() - began < 5
    assert fleet._process.returncode is not None
