"""`make test` runs one case in 24 of each matrix here; with CKPTTOOL_HOSTILE=all, all of them."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.hostile.court import EVERYTHING

ONE_IN = 24


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is not of the sample. The hook sees the whole session's tests, and chooses among its own."""
    if EVERYTHING:
        return
    seen: Counter[str] = Counter()
    kept: list[pytest.Item] = []
    left: list[pytest.Item] = []
    for item in items:
        if not item.nodeid.startswith("tests/hostile/"):
            kept.append(item)
            continue
        matrix = item.nodeid.partition("[")[0]
        (left if seen[matrix] % ONE_IN else kept).append(item)
        seen[matrix] += 1
    config.hook.pytest_deselected(items=left)
    items[:] = kept
