"""``--to vllm`` against vLLM itself: checksums of what vLLM 0.33 holds of the same small checkpoints.

data/vllm_files.json was made on a CPU: for each rank vLLM's own model class and its own weight loaders
(``initialize_model``, ``load_weights``), then the tensors that its ShardedStateLoader keeps of ``state_dict()``, before
a kernel rearranges any. The checkpoints are those of tests/helpers/vllm_files.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.command import ckpttool, reshard
from tests.helpers.tensorfile import Raw, read_all, write
from tests.helpers.vllm_files import recorded, write_source

FILES: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "data" / "vllm_files.json").read_text("utf-8"))


@pytest.mark.sample(
    "qwen3_next_tp2", "qwen3_5_moe_text_tp2_ep", "lfm2_moe_tp2", "llama_tp4", "gpt_oss_tp2", "qwen3_vl_vision_tp2"
)
@pytest.mark.parametrize("name", FILES)
def test_files_are_those_of_vllm(tmp_path: Path, name: str) -> None:
    wanted = FILES[name]
    write_source(wanted["config"], tmp_path / "hf")
    ranks = len(wanted["ranks"])
    options = ("--ep-out", ranks) if wanted.get("experts") else ()
    reshard(tmp_path / "hf", tmp_path / "vllm", "--to", "vllm", "--tp-out", ranks, *options)
    found = recorded(read_all(tmp_path / "vllm", f"model-rank-{rank}-part-*.safetensors") for rank in range(ranks))
    assert found["held"] == wanted["held"]
    assert found["ranks"] == wanted["ranks"]


@pytest.mark.parametrize(
    "model_type",
    ["qwen3", "qwen3_moe", "qwen3_next", "qwen3_5_text", "cohere2", "granitemoe", "ernie4_5", "ernie4_5_moe", "olmoe"],
)
def test_biases_that_vllm_has_not_are_refused(tmp_path: Path, model_type: str) -> None:
    """vLLM 0.33's own models of these types have no such parameter, whatever attention_bias says."""
    config = {"model_type": model_type, "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 1}
    at = "model.layers.0.self_attn."
    rows = dict.fromkeys(("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight"), (4, 4))
    shapes: dict[str, tuple[int, ...]] = {**rows, "o_proj.bias": (4,)}
    write(tmp_path / "hf" / "model.safetensors", {at + n: Raw("F32", np.zeros(s, "<u4")) for n, s in shapes.items()})
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    done = ckpttool("reshard", tmp_path / "hf", tmp_path / "vllm", "--to", "vllm", "--tp-out", 2)
    assert "vLLM's attention has no bias there" in done.err
    assert done.code == 1
    assert not (tmp_path / "vllm").exists()
