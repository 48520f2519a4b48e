"""Tiny models of PaddleFormers with experts, made as its trainers make them in bfloat16: what stays float32.

``main`` takes JOB.json, model type -> [config, class of the model], and tells the names and dtypes of the
parameters that are trained.
"""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module
from pathlib import Path

import paddle

from tests.peers.paddle_software import on_the_processor
from tests.peers.resume.paddle_device import without_paddlefleet

SIZES = {
    "hidden_size": 16, "intermediate_size": 24, "moe_intermediate_size": 8, "num_hidden_layers": 2, "vocab_size": 32,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "num_experts_per_tok": 2, "num_experts": 4,
    "n_routed_experts": 4, "moe_num_experts": 4, "moe_k": 2, "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
    "shared_expert_intermediate_size": 8, "first_k_dense_replace": 0, "q_lora_rank": 8, "kv_lora_rank": 8,
    "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4, "seq_length": 8, "max_position_embeddings": 64,
    "rope_scaling": None, "num_nextn_predict_layers": 0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "factor": 1.0, "mscale_all_dim": 1.0},
}  # fmt: skip
_YARN = {
    "type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32, "beta_fast": 32, "beta_slow": 1,
    "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip


def main() -> None:
    """Tell ``{model type: {name: dtype}}``."""
    on_the_processor()
    older = os.environ["CKPTTOOL_PADDLE_SOFTWARE"].endswith("0.4")
    if not older:
        without_paddlefleet()
        sys.modules["paddleformers.transformers.gpt_provider"].GPTModelProvider = type(  # type: ignore[attr-defined]
            "GPTModelProvider", (), {"transform_rules": {}}
        )
    told = {}
    for kind, (config, model) in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")).items():
        sizes = SIZES | {"rope_scaling": _YARN} if older and kind == "deepseek_v3" else SIZES  # which knows no other
        made = getattr(import_module(f"paddleformers.transformers.{kind}.configuration"), config)(**sizes)
        module = import_module(f"paddleformers.transformers.{kind}.modeling")
        cls = getattr(module, f"{model}Deprecated", None) or getattr(module, model)
        # As ``Trainer._wrap_model`` does for --bf16 --fp16_opt_level O2.
        tiny = paddle.amp.decorate(cls.from_config(made, dtype="bfloat16"), level="O2", dtype="bfloat16")
        told[kind] = {
            n: str(p.dtype).removeprefix("paddle.") for n, p in tiny.named_parameters() if not p.stop_gradient
        }
    print("CKPTTOOL", json.dumps(told), flush=True)  # noqa: T201
