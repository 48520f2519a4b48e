"""``--to vllm`` against vLLM itself: checksums of what vLLM 0.33 holds of the same small checkpoints.

data/vllm_files.json was made on a CPU: for each rank vLLM's own model class and its own weight loaders
(``initialize_model``, ``load_weights``), then the tensors that its ShardedStateLoader keeps of ``state_dict()``, before
a kernel rearranges any. The checkpoints are those of tests/helpers/vllm_files.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.command import reshard
from tests.helpers.tensorfile import read_all
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
