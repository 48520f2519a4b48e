"""Models with towers: their config.json alone gives the sizes that their publishers give.

The sums are `metadata.total_size` of `model.safetensors.index.json` on the Hugging Face Hub, or two bytes for each
of the parameters that it shows. Fields that say nothing of shapes are left out of the configs.
"""

from __future__ import annotations

from typing import Any

import pytest

from ckpttool.core.dtypes import DTYPES
from ckpttool.errors import LayoutError
from ckpttool.layout.family import pick_family
from ckpttool.layout.shapes import declared_tensors

Config = dict[str, Any]


def nbytes(config: Config) -> int:
    total = 0
    for _, dtype, shape in declared_tensors(pick_family("", "", config), config):
        size = DTYPES[dtype].bits // 8
        for n in shape:
            size *= n
        total += size
    return total


def text(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, **more: Any) -> Config:
    return {
        "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, **more,
    }  # fmt: skip


def qwen2_vl(fields: Config, tied: bool) -> Config:
    """As published: the fields of the language model at the top."""
    tower = {"depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "num_heads": 16, "hidden_size": fields["hidden_size"]}
    return {"model_type": "qwen2_vl", **fields, "tie_word_embeddings": tied, "vision_config": tower}


def qwen2_5_vl(fields: Config, tied: bool, inner: int = 3420) -> Config:
    tower = {"depth": 32, "hidden_size": 1280, "intermediate_size": inner, "out_hidden_size": fields["hidden_size"]}
    return {"model_type": "qwen2_5_vl", **fields, "tie_word_embeddings": tied, "vision_config": tower}


def qwen3_vl(fields: Config, tied: bool, tower: tuple[int, int, int] = (27, 1152, 4304)) -> Config:
    depth, width, inner = tower
    kind = "qwen3_vl_moe" if "num_experts" in fields else "qwen3_vl"
    return {
        "model_type": kind,
        "tie_word_embeddings": tied,
        "text_config": {"model_type": f"{kind}_text", "head_dim": 128, "vocab_size": 151936, **fields},
        "vision_config": {
            "depth": depth, "hidden_size": width, "intermediate_size": inner, "num_position_embeddings": 2304,
            "out_hidden_size": fields["hidden_size"], "patch_size": 16, "deepstack_visual_indexes": [8, 16, 24],
        },
    }  # fmt: skip


def gemma3(**fields: Any) -> Config:
    return {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": {"model_type": "gemma3_text", **fields},
        "vision_config": {
            "hidden_size": 1152, "image_size": 896, "intermediate_size": 4304, "num_attention_heads": 16,
            "num_hidden_layers": 27, "patch_size": 14, "vision_use_head": False,
        },
    }  # fmt: skip


def internvl(llm: Config) -> Config:
    """As InternVL's own code has it."""
    tower = {
        "hidden_size": 1024, "image_size": 448, "intermediate_size": 4096, "norm_type": "layer_norm",
        "num_hidden_layers": 24, "patch_size": 14, "qk_normalization": False, "qkv_bias": True,
    }  # fmt: skip
    return {"model_type": "internvl_chat", "llm_config": {**llm, "tie_word_embeddings": False}, "vision_config": tower}


def glm4v(inner: int, fields: Config) -> Config:
    return {
        "model_type": fields["model_type"].removesuffix("_text"),
        "text_config": {"attention_bias": True, "vocab_size": 151552, "tie_word_embeddings": False, **fields},
        "vision_config": {"depth": 24, "hidden_size": 1536, "out_hidden_size": 4096, "intermediate_size": inner},
    }


def llama4(experts: int, step: int) -> Config:
    fields = text(5120, 8192, 48, 40, 8, intermediate_size_mlp=16384, vocab_size=202048, moe_layers=None)
    return {
        "model_type": "llama4",
        "tie_word_embeddings": False,
        "text_config": {**fields, "num_local_experts": experts, "interleave_moe_layer_step": step},
        "vision_config": {"hidden_size": 1408, "image_size": 336, "vision_output_dim": 4096},
    }


PUBLISHED: dict[str, tuple[Config, int]] = {
    "Qwen/Qwen2-VL-2B-Instruct": (qwen2_vl(text(1536, 8960, 28, 12, 2, vocab_size=151936), True), 4_417_971_200),
    "Qwen/Qwen2-VL-7B-Instruct": (qwen2_vl(text(3584, 18944, 28, 28, 4, vocab_size=152064), False), 16_582_751_232),
    "Qwen/Qwen2.5-VL-3B-Instruct": (qwen2_5_vl(text(2048, 11008, 36, 16, 2, vocab_size=151936), True), 7_509_245_952),
    "Qwen/Qwen2.5-VL-7B-Instruct": (
        qwen2_5_vl(text(3584, 18944, 28, 28, 4, vocab_size=152064), False),
        16_584_333_312,
    ),
    "Qwen/Qwen2.5-VL-72B-Instruct": (
        qwen2_5_vl(text(8192, 29568, 80, 64, 8, vocab_size=152064), False, inner=3456),
        146_821_554_688,
    ),
    "Qwen/Qwen3-VL-4B-Instruct": (qwen3_vl(text(2560, 9728, 36, 32, 8), True, (24, 1024, 4096)), 8_875_631_616),
    "Qwen/Qwen3-VL-8B-Instruct": (qwen3_vl(text(4096, 12288, 36, 32, 8), False), 17_534_247_392),
    "Qwen/Qwen3-VL-30B-A3B-Instruct": (
        qwen3_vl(text(2048, 6144, 48, 32, 4, num_experts=128, moe_intermediate_size=768), False),
        62_141_508_064,
    ),
    "google/gemma-3-4b-it": (gemma3(hidden_size=2560, intermediate_size=10240, num_hidden_layers=34), 8_600_158_944),
    "google/gemma-3-12b-it": (gemma3(**text(3840, 15360, 48, 16, 8)), 24_374_650_080),
    "google/gemma-3-27b-it": (gemma3(**text(5376, 21504, 62, 32, 16, head_dim=128)), 54_864_813_280),
    "mistralai/Mistral-Small-3.1-24B-Instruct-2503": (
        {
            "model_type": "mistral3",
            "spatial_merge_size": 2,
            "text_config": text(5120, 32768, 40, 32, 8, model_type="mistral", head_dim=128, vocab_size=131072),
            "vision_config": {
                "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "patch_size": 14,
            },
        },
        48_022_722_560,
    ),
    "OpenGVLab/InternVL3-8B": (
        internvl(text(3584, 18944, 28, 28, 4, model_type="qwen2", vocab_size=151674)),
        15_888_747_520,
    ),
    "OpenGVLab/InternVL3_5-8B": (
        internvl(text(4096, 12288, 36, 32, 8, model_type="qwen3", head_dim=128, vocab_size=151936)),
        17_056_636_928,
    ),
    "zai-org/GLM-4.1V-9B-Thinking": (
        glm4v(13696, text(4096, 13696, 40, 32, 2, model_type="glm4v_text")),
        20_585_554_944,
    ),
    "llava-hf/llava-1.5-7b-hf": (
        {
            "model_type": "llava",
            "text_config": {"model_type": "llama", "vocab_size": 32064},
            "vision_config": {"model_type": "clip_vision_model", "image_size": 336, "patch_size": 14},
        },
        14_126_854_144,
    ),
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": (llama4(16, 1), 217_283_587_072),
    "meta-llama/Llama-4-Maverick-17B-128E-Instruct": (llama4(128, 2), 803_167_562_752),
    "meta-llama/Llama-3.2-11B-Vision-Instruct": (
        {
            "model_type": "mllama",
            "text_config": text(4096, 14336, 40, 32, 8, vocab_size=128256, tie_word_embeddings=False),
            "vision_config": {
                "hidden_size": 1280, "image_size": 560, "intermediate_size": 5120, "max_num_tiles": 4,
                "num_global_layers": 8, "num_hidden_layers": 32, "patch_size": 14, "vision_output_dim": 7680,
            },
        },
        21_340_441_670,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published(name: str) -> None:
    config, size = PUBLISHED[name]
    assert nbytes(config) == size


def test_glm_4_5v() -> None:
    """Its parameters are published; a bias of the router has four bytes for each expert."""
    fields = text(4096, 10944, 46, 96, 8, model_type="glm4v_moe_text", head_dim=128, n_routed_experts=128)
    config = glm4v(10944, {**fields, "moe_intermediate_size": 1408, "n_shared_experts": 1})
    assert nbytes(config) == 2 * 107_710_933_120 + 2 * 45 * 128


def test_a_projector_of_another_width_is_refused() -> None:
    """Fractions are compared, and not computed with."""
    config = PUBLISHED["OpenGVLab/InternVL3-8B"][0]
    assert nbytes({**config, "downsample_ratio": 0.5}) == nbytes(config)
    with pytest.raises(LayoutError, match="the projector has another width"):
        nbytes({**config, "downsample_ratio": 0.25})
