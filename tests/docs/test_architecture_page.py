"""docs/architecture.md draws the modules in the order that tests/test_architecture.py enforces."""

from __future__ import annotations

import re

from tests.docs.runner import ROOT
from tests.test_architecture import ROWS

PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def test_the_modules_are_listed_in_their_order() -> None:
    table = PAGE.split("\n## The modules\n")[1].split("\n## ")[0]
    shown = re.findall(r"^\| `(\w+)/?` \|", table, re.MULTILINE)
    assert shown == [name for row in ROWS for name in row if not name.startswith("__")]
