"""docs/layouts.md and the pages below it explain every key and verb of a family file, and no other."""

from __future__ import annotations

import re

from ckpttool.layout.rules import VERBS, parse_rule
from ckpttool.layout.sizes import SizeSpec
from ckpttool.layout.spec import FamilySpec, FusionSpec, InsideSpec, OpSpec
from scripts.make_reference import ROOT

PAGES = [ROOT / "docs" / "layouts.md", *(ROOT / "docs" / "layouts").glob("*.md")]
TEXT = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)


def section(title: str) -> str:
    """The text below a heading, up to the next of the same level."""
    return TEXT.split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_every_key_is_explained() -> None:
    shown = section("The data structure").split("```")[1]
    keys = re.findall(r"^(\w+)", shown, re.MULTILINE)
    assert sorted(keys) == sorted(FamilySpec.model_fields)


def test_every_key_of_a_language_model_inside_is_explained() -> None:
    page = section("A family on top of another")
    assert sorted(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == sorted(InsideSpec.model_fields)


def test_every_key_of_a_size_is_explained() -> None:
    names = [field.alias or name for name, field in SizeSpec.model_fields.items()]
    assert re.findall(r"^\| `(\w+)` \|", section("Sizes"), re.MULTILINE) == names


def test_every_key_of_a_fusion_is_explained() -> None:
    assert re.findall(r"^\| `(\w+)` \|", section("Fusions"), re.MULTILINE) == list(FusionSpec.model_fields)


def test_every_statement_of_a_naming_is_explained() -> None:
    assert re.findall(r"^\| `(\w+): ", section("Namings"), re.MULTILINE) == list(OpSpec.model_fields)


def test_every_verb_is_explained_by_rules_that_are_valid() -> None:
    table = section("Rules").split("| word | meaning |")[0]
    first_cells = re.findall(r"^\| (`.*?`) \|", table, re.MULTILINE)
    rules = [rule for row in first_cells for rule in re.findall(r"`([^`]+)`", row)]
    parsed = [parse_rule(rule.replace("...", "gate up")) for rule in rules]
    assert {rule.verb for rule in parsed} == set(VERBS)
    assert any(rule.grouped for rule in parsed)
