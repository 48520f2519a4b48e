"""Keeps this folder out of an ordinary run: its tests start Ray, Slurm, MPI and torchrun, each once for the session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import slurm
from tests.cluster.ray_fleet import LastingFleet
from tests.cluster.ray_nodes import RayNodes

HERE = Path(__file__).parent


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    """Collect the folder only where the command line names it, as `make test-cluster` does."""
    named = (config.invocation_params.dir / argument.split("::")[0] for argument in config.args)
    return None if any(path.resolve().is_relative_to(HERE) for path in named) else True


@pytest.fixture(scope="session")
def cluster() -> Iterator[slurm.Slurm]:
    """Slurm with four nodes, all of them on this machine."""
    if why := slurm.lacking():
        pytest.skip(why)
    with slurm.Slurm(nodes=4) as running:
        yield running


@pytest.fixture(scope="session")
def ray_nodes() -> Iterator[RayNodes]:
    """A Ray cluster of three nodes on this machine, started once."""
    pytest.importorskip("ray")
    with RayNodes(("head", "one", "two")) as nodes:
        yield nodes


@pytest.fixture(scope="session")
def _lasting(ray_nodes: RayNodes) -> Iterator[LastingFleet]:
    from ckpttool.execute.fleets.ray import RayFleet

    fleet = LastingFleet(lambda: RayFleet(ray_nodes.address))
    yield fleet
    fleet.dismiss()


@pytest.fixture
def ray_fleet(_lasting: LastingFleet, monkeypatch: pytest.MonkeyPatch) -> LastingFleet:
    """``--on ray`` in this process: the cluster, whose nodes need not begin anew for each run. Small runs have many
    shares, too.
    """
    from ckpttool.execute.destinations import local
    from ckpttool.execute.fleets import ray

    _lasting.begin()
    monkeypatch.setattr(ray, "fleet", lambda _address: _lasting)
    monkeypatch.setattr(local, "LEAST_SHARE", 1 << 10)
    return _lasting
