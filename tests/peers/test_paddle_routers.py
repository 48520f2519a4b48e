"""Which weights of a bfloat16 model PaddleFormers keeps in float32, by its own models, is what the dialect says."""

from __future__ import annotations

import json
from fnmatch import fnmatch
from pathlib import Path

import pytest

from ckpttool.core.mesh import Mesh
from ckpttool.dialects.base import NamingContext
from ckpttool.dialects.paddle import PaddleDialect
from ckpttool.layout.family import no_family
from tests.peers import paddle_side

MODELS = {
    "qwen2_moe": ("Qwen2MoeConfig", "Qwen2MoeForCausalLM"),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM"),
    "glm4_moe": ("Glm4MoeConfig", "Glm4MoeForCausalLM"),
    "deepseek_v3": ("DeepseekV3Config", "DeepseekV3ForCausalLM"),
    "ernie4_5_moe": ("Ernie4_5_MoeConfig", "Ernie4_5_MoeForCausalLM"),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
}


@pytest.mark.parametrize("software", paddle_side.SOFTWARE[1:])
def test_what_paddleformers_keeps_in_float32(software: str, tmp_path: Path) -> None:
    job = tmp_path / "job.json"
    job.write_text(json.dumps(MODELS))
    ((told,),) = paddle_side.start("tests.peers.paddle_routers", job, software)
    for kind, dtypes in told.items():
        context = NamingContext(no_family(), {"model_type": kind}, Mesh(), "", software)
        patterns = PaddleDialect().single(context)
        assert bool(patterns) == (kind != "qwen3")
        for name, dtype in dtypes.items():
            assert (dtype == "float32") == any(fnmatch(name, p) for p in patterns), (kind, name)
