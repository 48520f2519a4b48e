"""The families as transformers cuts are those that scripts/make_families.py makes."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpttool.layout.files import FAMILIES
from scripts.make_families import chosen, make

GENERATED = FAMILIES / "transformers"


@pytest.mark.parametrize("model_type", ["helium", "granitemoe", "deepseek_v3", "t5gemma"])
def test_a_family_made_again_is_the_same(model_type: str, tmp_path: Path) -> None:
    made, _ = make(chosen([model_type])[0][0], tmp_path)
    assert made.read_text(encoding="utf-8") == (GENERATED / f"{model_type}.yaml").read_text(encoding="utf-8")
