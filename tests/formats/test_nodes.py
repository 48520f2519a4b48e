"""Saves that lie in several directories: what their small files say of the model must agree."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.command import refused, reshard

FIXTURES = Path(__file__).parents[2] / "fixtures"
SAVES = {
    "unified": ("paddle_unified/nlp_qwen2moe_bf16_tp2", "*-00002-of-00002.safetensors"),
    "hybrid": ("paddle_zcc/nlp_tp2", "*tp01*"),
    "zcc": ("paddle_zcc/ep2_tp2_sharding2_ema", "*shard01*"),
    "flex": ("paddle_zcc/nlp_tp2", "*/1_0.distcp"),
}
"""Format -> a save, and what the second node wrote."""


def scatter(form: str, root: Path) -> tuple[Path, Path]:
    """The save of two nodes, each with the small files of the model."""
    name, pattern = SAVES[form]
    a, b = root / "a", root / "b"
    if form == "flex":
        reshard(FIXTURES / name, a, "--to", "flex", "--tp-out", 2)
    else:
        shutil.copytree(FIXTURES / name, a)
    for path in sorted(a.glob(pattern)):
        (b / path.relative_to(a)).parent.mkdir(parents=True, exist_ok=True)
        path.rename(b / path.relative_to(a))
    shutil.copy(a / "config.json", b)
    return a, b


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def options(form: str, b: Path) -> tuple[object, ...]:
    return "--from", form, "--also", b, "--to", "flex"


def contents(folder: Path) -> dict[Path, bytes]:
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.sample("unified", "hybrid")
@pytest.mark.parametrize("form", SAVES)
def test_configs_of_two_nodes_agree(form: str, tmp_path: Path) -> None:
    """Or the second node alone has one."""
    a, b = scatter(form, tmp_path)
    reshard(a, tmp_path / "same", *options(form, b))
    config = (a / "config.json").rename(tmp_path / "config.json")
    reshard(a, tmp_path / "alone", *options(form, b))
    config.rename(a / "config.json")
    assert contents(tmp_path / "alone") == contents(tmp_path / "same")

    def node(config: dict[str, Any]) -> None:
        config |= {"tensor_parallel_rank": 1, "_name_or_path": "/node1/model", "node_name": "b", "unused": None}

    edit(b / "config.json", node)
    reshard(a, tmp_path / "node", *options(form, b))
    assert contents(tmp_path / "node") == contents(tmp_path / "same")
    edit(b / "config.json", lambda c: c.update(num_key_value_heads=c["num_key_value_heads"] + 1))
    text = refused(a, tmp_path / "out", *options(form, b))
    assert "`num_key_value_heads` of config.json is" in text
    assert str(a / "config.json") in text
    assert str(b / "config.json") in text
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("file", "ours", "others", "said"),
    [
        ("config.json", {}, {"q_lora_rank": 8}, "`q_lora_rank` of config.json is not set in one directory and 8"),
        (
            "config.json",
            {"text_config": {"vocab_size": 64, "rank": [1, {"a": 2}]}},
            {"text_config": {"vocab_size": 64, "rank": [1, {"a": 3}]}},
            "`text_config.rank[1].a` of config.json is 2 in one directory and 3 in another",
        ),
        ("generation_config.json", {"eos_token_id": 2}, {"eos_token_id": [2]}, "`eos_token_id` of generation_config"),
        ("tokenizer.json", {"model": {"vocab": {"a": 0}}}, {"model": {"vocab": {"a": 1}}}, "`model.vocab.a`"),
        ("tokenizer.model", "one", "two", "tokenizer.model is in two directories and differs from byte 0 on"),
        ("vocab.json", "{", "[", "vocab.json is in two directories and differs from byte 0 on"),
    ],
)
def test_a_contradiction_is_named(file: str, ours: Any, others: Any, said: str, tmp_path: Path) -> None:
    a, b = scatter("unified", tmp_path)
    for root, value in ((a, ours), (b, others)):
        if isinstance(value, str):
            (root / file).write_text(value)
            continue
        before = json.loads((root / file).read_text()) if (root / file).exists() else {}
        (root / file).write_text(json.dumps({**before, **value}))
    text = refused(a, tmp_path / "out", *options("unified", b))
    assert said in text
    assert str(a / file) in text
    assert str(b / file) in text
