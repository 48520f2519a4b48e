"""How many parameters published models have, from their config.json alone.

data/published.json has the fields of config.json that shapes come from, and the number of elements that the Hub counts
in the model's safetensors files: its page says it, and ``total_size`` of model.safetensors.index.json divided by the
bytes of an element. The figures were written down as the publishers give them, and no model is here whose family was
made to fit its figure.
"""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest

from ckpttool.layout.family import find_family, load_family
from ckpttool.layout.shapes import declared_tensors
from tests.helpers.command import ckpttool

PUBLISHED: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parent / "data" / "published.json").read_text("utf-8")
)


def test_how_many_there_are() -> None:
    assert len(PUBLISHED) >= 40


@pytest.mark.sample(
    "openai-community/gpt2",
    "google/gemma-2-2b",
    "bigscience/bloom-7b1",
    "mistralai/Mamba-Codestral-7B-v0.1",
    "LiquidAI/LFM2-1.2B",
    "Qwen/Qwen3.5-2B",
)
@pytest.mark.parametrize("name", PUBLISHED)
def test_the_number_of_parameters(name: str) -> None:
    config = PUBLISHED[name]["config"]
    family = find_family(config)
    assert family is not None
    shapes = [t.shape for t in declared_tensors(load_family(family, config), config)]
    assert sum(map(prod, shapes)) == PUBLISHED[name]["parameters"]


def test_the_command_says_it(tmp_path: Path) -> None:
    """``total_size`` of the model.safetensors.index.json of meta-llama/Llama-3.1-8B is 16,060,522,496."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(PUBLISHED["meta-llama/Llama-3.1-8B"]["config"]), encoding="utf-8")
    done = ckpttool("size", path, "--recipe", "bf16", "--json")
    assert done.code == 0, done.err
    assert "16060522496" in done.out
