"""What holds for all tests: where their files lie, what is left to `make test-all`, and how workers start."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import settings

from tests.helpers import sample
from tests.helpers.memory_disk import memory_disk

# As the command line does it, and before numpy is imported: a process with threads cannot fork the workers of a merge,
# and has to start an interpreter for them. The same goes for torch.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

# No test asks the real Hub: what a recipe names and is not here is looked for there.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# Collecting makes a million objects and no garbage, through which Python would look again and again.
gc.disable()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run every case of every product, not a sample of each")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "product(one_in=None, first=0): the cases are all pairs of something. `make test` runs so many that every "
        "value of every argument is met, or one in so many from the first on; `make test-all` runs all.",
    )
    config.addinivalue_line(
        "markers",
        "sample(id, ...): the cases, by their ids, that `make test` runs, because they reach what the others do; "
        "`make test-all` runs all.",
    )
    config.addinivalue_line(
        "markers",
        "thorough: tries for long what a test of `make test` tries for short; only `make test-all` runs it.",
    )
    sample.everything = config.getoption("all")
    # No time limit for an example (machines are shared), and the same examples in every run: what passes here passes
    # there.
    settings.register_profile("all", settings.get_profile("ci"))
    settings.register_profile("sample", settings.get_profile("ci"), max_examples=sample.examples(100))
    settings.load_profile("all" if sample.everything else "sample")
    _use_memory_disk()
    _compute_here()
    if hasattr(config, "workerinput"):
        _fork_beside_xdist(config)


def _use_memory_disk() -> None:
    """No test looks at what survives a power cut, and a disk takes longer to delete the files than they to be tested.

    ``tmp_path`` lies there as pytest does it; other temporary files in a directory that goes at the end, with what
    commands that tests kill leave in it.
    """
    if (disk := memory_disk()) is not None:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(disk))
        os.environ["TMPDIR"] = others = tempfile.mkdtemp(prefix="ckpttool-tests-", dir=disk)
        Path(others).chmod(0o755)  # some tests look with the eyes of another user
        tempfile.tempdir = None
        atexit.register(_remove, others, os.getpid())


def _remove(folder: str, owner: int) -> None:
    """Not from a fork that ends."""
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)


def _compute_here() -> None:
    """One worker computes, where a test does not say --workers: each process of the tests has one processor.

    And it is no process, as where none can be started: a fork of all that tests have loaded takes longer than most of
    them. Tests that say --workers fork, and all do in `make test-all`.
    """
    from ckpttool.execute import options, worker_pool, workforce

    options.RunOptions.computers = property(lambda run: run.workers or 1)  # type: ignore[assignment]
    if not sample.everything:
        spawn = worker_pool.spawn
        patch.object(workforce, "spawn", lambda count, *job: spawn(count, *job) if count > 1 else None).start()


def _fork_beside_xdist(config: pytest.Config) -> None:
    """Let commands fork beside the thread of xdist, which no fork has to do with.

    Otherwise each merge and each cast in a test would start an interpreter for it, which takes longer than itself.
    """
    from ckpttool.execute import worker_pool

    threads = len(os.listdir("/proc/self/task"))  # noqa: PTH208
    worker_pool.can_fork = lambda: len(os.listdir("/proc/self/task")) <= threads  # noqa: PTH208
    config.addinivalue_line("filterwarnings", "ignore:This process .* is multi-threaded:DeprecationWarning")


def pytest_collection_finish() -> None:
    """Let Python look for garbage again, but for what is old: all that was collected, which takes it half a second.

    No `gc.freeze()`: each run of the engine would count what is frozen.
    """
    gc.set_threshold(20_000, 20, 1_000_000)
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is not of the sample."""
    if sample.everything:
        return
    tests: dict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            tests[item.nodeid.partition("[")[0]].append(item)
    left: set[pytest.Item] = {item for item in items if item.get_closest_marker("thorough")}
    whole = not any("::" in argument for argument in config.args)
    for name, cases in tests.items():
        if named := cases[0].get_closest_marker("sample"):
            if whole and (unknown := set(named.args) - {case.callspec.id for case in cases}):
                message = f"{name} has no case {', '.join(sorted(unknown))}"
                raise pytest.UsageError(message)
            left |= {case for case in cases if case.callspec.id not in named.args}
        elif product := cases[0].get_closest_marker("product"):
            left |= set(cases) - set(_of_product(cases, **product.kwargs))
    config.hook.pytest_deselected(items=[item for item in items if item in left])
    items[:] = [item for item in items if item not in left]


def _of_product(
    cases: list[pytest.Function], *, one_in: int | None = None, first: int = 0
) -> Iterable[pytest.Function]:
    return sample.covering(cases) if one_in is None else cases[first::one_in]


@pytest.fixture(autouse=True)
def _nothing_kept() -> None:
    """Of files on other machines: servers of tests give other bytes under one name."""
    if caches := sys.modules.get("ckpttool.storage.caches"):
        caches.forget()


def pytest_runtest_teardown() -> None:
    """Machines that a test has made up are gone with it: what they have open is open for the whole process."""
    if fleet := sys.modules.get("tests.helpers.fleet"):
        fleet.end_all()
