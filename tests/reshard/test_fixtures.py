"""fixtures/ is what scripts/make_fixtures.py writes, small, and described."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[2]
FIXTURES = ROOT / "fixtures"


def test_generated_fixtures_are_what_the_script_writes(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("make_fixtures", ROOT / "scripts" / "make_fixtures.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main(tmp_path)
    made = {p.relative_to(tmp_path): p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    folders = {p.parts[0] for p in made}
    there = {p.relative_to(FIXTURES): p.read_bytes() for f in folders for p in (FIXTURES / f).rglob("*") if p.is_file()}
    assert made.keys() == there.keys()
    assert [str(p) for p in made if made[p] != there[p]] == []


def test_fixtures_are_small_and_described() -> None:
    # Half is checkpoints that Paddle and Megatron wrote with their optimizer state, which is six times the weights.
    assert sum(p.stat().st_size for p in FIXTURES.rglob("*") if p.is_file()) < 23_000_000
    text = (FIXTURES / "README.md").read_text(encoding="utf-8")
    assert [p.name for p in FIXTURES.iterdir() if p.is_dir() and f"`{p.name}`" not in text] == []
