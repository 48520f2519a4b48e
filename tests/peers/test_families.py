"""The judge of families finds a wrong cut: one that comes back byte for byte, and computes something else.

``make test-families`` judges every architecture; here are a few kinds of them, and rules made wrong on purpose.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpttool.layout.files import FAMILIES
from tests.peers.families.judge import Found, judge
from tests.peers.families.tiny import architectures, find

RIGHT = ["llama", "qwen3_moe", "gpt2", "olmo2", "qwen3_next", "T5ForConditionalGeneration", "BertModel", "llava"]
WRONG = [
    ("llama", "self_attn.o_proj.*: row heads", "self_attn.o_proj.*: column"),
    ("llama", "self_attn.o_proj.*: row heads", "self_attn.o_proj.*: replicate"),
    ("llama", "self_attn.{k_proj,v_proj}.*: column kv_heads", "self_attn.{k_proj,v_proj}.*: replicate"),
    ("llama", "mlp.down_proj.*: row", "mlp.down_proj.*: replicate"),
    ("phi3", "fused q:heads k:kv_heads v:kv_heads", "column"),
    ("phi3", "fused gate up", "column"),
    ("gpt_neox", "column heads", "fused q:heads k:heads v:heads"),
    ("gpt2", "fused q:heads k:heads v:heads in_out", "column heads in_out"),
    ("qwen3_moe", "mlp.experts.{expert}.down_proj.*: row", "mlp.experts.{expert}.down_proj.*: column"),
]
"""(family, a line of its rules, a wrong one)."""


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One thread: what is computed here is too small for more."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    yield
    torch.set_num_threads(before)


def judged(name: str, folder: Path, family: str = "") -> Found:
    return judge(find(name)[0], folder, family)


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_cut(name: str, tmp_path: Path) -> None:
    found = judged(name, tmp_path)
    assert found.wrong == []
    assert found.passed
    assert found.logits_equal
    assert found.back["tp 2"] == "ok"


@pytest.mark.parametrize(("family", "right", "wrong"), WRONG, ids=[f"{f}: {w}" for f, _, w in WRONG])
def test_a_wrong_cut(family: str, right: str, wrong: str, tmp_path: Path) -> None:
    text = (FAMILIES / f"{family}.yaml").read_text(encoding="utf-8")
    assert right in text
    rules = tmp_path / "wrong.yaml"
    rules.write_text(text.replace(right, wrong), encoding="utf-8")
    found = judged(family, tmp_path / "files", str(rules))
    assert found.back["tp 2"] == "ok", "a round trip does not notice it"
    assert [w for w in found.wrong if w.startswith("tp 2: with ranks 0 and 1 exchanged the logits differ")], found.wrong


def test_heads_that_are_torn(tmp_path: Path) -> None:
    """More ranks than heads: refused, or found."""
    text = (FAMILIES / "llama.yaml").read_text(encoding="utf-8")
    rules = tmp_path / "wrong.yaml"
    rules.write_text(text.replace("column heads", "column").replace("row heads", "row"), encoding="utf-8")
    found = judged("llama", tmp_path / "files", str(rules))
    assert found.back["tp 16"] == "ok"
    assert [w for w in found.wrong if w.startswith("tp 16: with ranks 0 and 1 exchanged")], found.wrong


def test_every_group_has_architectures() -> None:
    groups = {a.group for a in architectures()}
    assert {"causal", "i2t", "mm", "seq2seq", "mlm", "speech", "clip", "base"} <= groups
