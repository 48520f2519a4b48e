"""The lists of names and shapes that the tests of the layout rules use are what transformers writes today."""

from __future__ import annotations

import pytest

from tests.helpers.tiny_names import Listed, expected_lists, family_lists


@pytest.fixture(scope="module")
def expected() -> dict[str, dict[str, Listed]]:
    return expected_lists()


def test_the_lists_are_up_to_date(expected: dict[str, dict[str, Listed]]) -> None:
    """``python -m tests.helpers.tiny_names`` writes them anew."""
    for family, lists in expected.items():
        assert family_lists(family) == lists, family
