"""Keeps this folder out of an ordinary run: its tests import libraries that only the peers extra brings."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.peers.rank_group import Group, groups

HERE = Path(__file__).parent


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    """Collect the folder only where the command line names it, as `make test-peers` does."""
    named = (config.invocation_params.dir / argument.split("::")[0] for argument in config.args)
    return None if any(path.resolve().is_relative_to(HERE) for path in named) else True


@pytest.fixture(autouse=True, scope="session")
def quiet() -> None:
    """transformers draws a progress bar for every model of 50 kB that it loads or saves."""
    from transformers.utils import logging

    logging.disable_progress_bar()


@pytest.fixture(scope="session")
def megatron(tmp_path_factory: pytest.TempPathFactory) -> None:
    """megatron-core on CPU, in this process and the ranks that it forks later."""
    from tests.peers import megatron_cpu  # which imports torch; this file is read by every run of the tests

    session = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # whose folders lie in that of the session
        session = session.parent
    megatron_cpu.install(session / "megatron_cpu")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], Group]]:
    """Groups of gloo ranks by their number; they have what the module of the test imports."""
    with groups(tmp_path_factory.mktemp("ranks")) as group:
        yield group
