"""``--to vllm`` and back against what vLLM 0.33.0's own loader and saver wrote from the same models (fixtures/vllm)."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

import ckpttool
from ckpttool.containers.safetensors import read_header
from ckpttool.errors import ConflictError

FIXTURES = Path(__file__).parents[2] / "fixtures" / "vllm"
GOLDEN: dict[str, dict[str, Any]] = json.loads((FIXTURES / "written_by_vllm.json").read_text())


def sizes(case: dict[str, Any]) -> tuple[int, int, int]:
    """tp, pp and ep of a case; vLLM's experts lie over its tp ranks."""
    ep = case.get("ep", 1)
    return case.get("tp", ep), case.get("pp", 1), ep


def written(directory: Path) -> dict[str, dict[str, list[Any]]]:
    """Per rank: tensor -> dtype, shape and the first 16 digits of the sha256 of its bytes."""
    out: dict[str, dict[str, list[Any]]] = {}
    for path in sorted(directory.glob("*.safetensors")):
        data = path.read_bytes()
        rank = out.setdefault(path.name.rsplit("-part-", 1)[0], {})
        for t in read_header(path).tensors:
            digest = hashlib.sha256(data[t.offset : t.offset + t.nbytes]).hexdigest()[:16]
            rank[t.name] = [t.dtype, list(t.shape), digest]
    return out


@pytest.mark.sample("deepseek_v3_tp4", "llama_tied_pp2", "qwen3_moe_ep2")
@pytest.mark.parametrize("name", GOLDEN)
def test_writes_what_vllm_writes(name: str, tmp_path: Path) -> None:
    case = GOLDEN[name]
    source = FIXTURES / case["source"]
    tp, pp, ep = sizes(case)
    ckpttool.open(source).reshard(to="vllm", tp=tp, pp=pp, ep=ep).run(tmp_path / "out", verify=True)
    assert written(tmp_path / "out") == case["ranks"]
    ckpttool.open(tmp_path / "out").reshard(to="hf", tp=1, pp=1, ep=1).run(tmp_path / "back", verify=True)
    # The multi-token-prediction layer is not in vLLM's files; everything else comes back bit for bit.
    before = ckpttool.open(source)
    kept = {n for n in before if f"layers.{before.config['num_hidden_layers']}." not in n}
    back = ckpttool.open(tmp_path / "back")
    assert set(back) == kept
    assert all(back.read(n).tobytes() == before.read(n).tobytes() for n in kept)


def test_a_share_of_the_experts_is_not_taken_for_all(tmp_path: Path) -> None:
    """With a wrong --ep the stacked experts do not add up to the config's."""
    ckpttool.open(FIXTURES / "qwen3_moe").reshard(to="vllm", tp=2, ep=2).run(tmp_path / "out")
    with pytest.raises(ConflictError, match=r"config\.json says"):
        ckpttool.open(tmp_path / "out", ep=1)
