"""Every family from Hugging Face into Paddle's names and orientation, and back to the same tensors."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.command import reshard
from tests.helpers.families import MODELS, Model
from tests.helpers.tensorfile import Raw, Tensors, read, write

# These come back in the form that their owners publish first.
FORMS = ("@transformers", "_published")
NAMES = [n for n in MODELS if not n.endswith(FORMS)]
TARGETS = (
    ("unified", "--target", "paddlenlp-3.0"),
    ("unified", "--target", "paddleformers-1.2"),
    ("hybrid", "--tp-out", "2", "--sharding-out", "2"),
    ("flex", "--tp-out", "2"),
)


def published(model: Model, folder: Path) -> Tensors:
    """A checkpoint as its owners publish it, without NaN: a rounded float32 need not keep its payload."""
    tensors = {n: t._replace(bits=t.bits & 0xBFFF) if t.dtype == "BF16" else t for n, t in model.tensors().items()}
    write(folder / "model.safetensors", tensors, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(model.config))
    return tensors


@pytest.mark.sample(
    "llama-unified --target paddleformers-1.2",
    "gemma2-unified --target paddleformers-1.2",
    "ernie4_5-flex --tp-out 2",
    "phi3-hybrid --tp-out 2 --sharding-out 2",
    "gpt2-hybrid --tp-out 2 --sharding-out 2",
    "ernie4_5_moe-unified --target paddleformers-1.2",
    "mixtral-unified --target paddlenlp-3.0",
    "deepseek_v3_fp8-hybrid --tp-out 2 --sharding-out 2",
    "gpt_oss-unified --target paddlenlp-3.0",
)
@pytest.mark.parametrize("target", TARGETS, ids=" ".join)
@pytest.mark.parametrize("name", NAMES)
def test_into_paddle_and_back(name: str, target: tuple[str, ...], tmp_path: Path) -> None:
    src, out, back = tmp_path / "src", tmp_path / "out", tmp_path / "back"
    want = published(MODELS[name], src)
    reshard(src, out, "--to", *target, "-q")
    reshard(out, back, "--to", "hf", "-q")
    got: Tensors = {}
    for path in back.glob("*.safetensors"):
        got |= read(path)
    assert got.keys() == want.keys()
    assert [n for n in want if got[n].dtype != want[n].dtype or not np.array_equal(got[n].bits, want[n].bits)] == []


def test_square_weights_turn_by_name_and_not_by_shape(tmp_path: Path) -> None:
    """Where every weight is square, only names say what is [in, out] in Paddle: linear weights, PaddleNLP's head."""
    n = 16
    rng = np.random.default_rng(5)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "float32",
        "hidden_size": n,
        "intermediate_size": n,
        "vocab_size": n,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "tie_word_embeddings": False,
    }
    at = "model.layers.0."
    linear = [at + f"self_attn.{x}_proj.weight" for x in "qkvo"] + [
        at + f"mlp.{x}_proj.weight" for x in ("gate", "up", "down")
    ]
    names = [*linear, "model.embed_tokens.weight", "lm_head.weight"]
    from tests.helpers.paddle import read_folder, write_file

    values = {name: rng.standard_normal((n, n)).astype(np.float32) for name in names}
    values |= {at + "input_layernorm.weight": rng.standard_normal(n).astype(np.float32)}
    src = tmp_path / "src"
    src.mkdir()
    write_file(src / "model.safetensors", values)
    (src / "config.json").write_text(json.dumps(config))
    for target, prefix, head in (
        ("paddlenlp-3.0", "llama", True),
        ("paddleformers-0.4", "llama", True),
        ("paddleformers-1.2", "model", False),
    ):
        out = tmp_path / target
        reshard(src, out, "--to", "unified", "--target", target, "--verify")
        got = read_folder(out, "model-*.safetensors")
        for name, array in values.items():
            held = got[name.replace("model.", prefix + ".")]
            # paddleformers 1.x puts linear weights of the model's files back into torch's orientation.
            turned = (name in linear and target != "paddleformers-1.2") or (name == "lm_head.weight" and head)
            assert np.array_equal(held, array.T if turned else array), (target, name)
        back = tmp_path / f"{target}-back"
        reshard(out, back, "--to", "hf")
        assert all(np.array_equal(a, values[k]) for k, a in read_folder(back, "*.safetensors").items())


OWN_NAMES: dict[str, tuple[dict[str, object], dict[str, tuple[int, ...]]]] = {
    "names that a family has in two forms": (
        {"model_type": "aria_text", "architectures": ["AriaTextForCausalLM"]},
        {"model.embed_tokens.weight": (24, 16), "model.layers.0.self_attn.q_proj.weight": (32, 16)},
    ),
    "a first word that is not the family's first": (
        {"model_type": "biogpt", "architectures": ["BioGptForCausalLM"]},
        {"biogpt.embed_tokens.weight": (24, 16), "biogpt.layers.0.fc1.weight": (32, 16)},
    ),
    "a norm beside the language model": (
        {"model_type": "mistral3", "text_config": {"model_type": "mistral"}},
        {
            "language_model.model.layers.0.mlp.up_proj.weight": (32, 16),
            "multi_modal_projector.norm.weight": (16,),
            "multi_modal_projector.linear_1.weight": (16, 24),
        },
    ),
    "qkv_proj of linear attention": (
        {"model_type": "minimax", "architectures": ["MiniMaxForCausalLM"]},
        {
            "model.layers.0.self_attn.qkv_proj.weight": (96, 16),
            "model.layers.1.self_attn.q_proj.weight": (32, 16),
            "model.layers.1.self_attn.k_proj.weight": (16, 16),
            "model.layers.1.self_attn.v_proj.weight": (16, 16),
        },
    ),
    "a norm and a projection that differ by a number": (
        {"_class_name": "ZImageTransformer2DModel"},
        {"cap_embedder.0.weight": (16,), "cap_embedder.1.weight": (32, 16)},
    ),
}


@pytest.mark.parametrize("target", ["unified", "flex"])
@pytest.mark.parametrize("case", OWN_NAMES)
def test_names_of_the_models_own_are_not_taken_for_paddles(case: str, target: str, tmp_path: Path) -> None:
    config, shapes = OWN_NAMES[case]
    numbers: dict[str, object] = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    src = tmp_path / "src"
    want = {n: Raw("F32", np.arange(np.prod(s), dtype=np.uint32).reshape(s)) for n, s in shapes.items()}
    write(src / "model.safetensors", want, {"format": "pt"})
    text = config.get("text_config")
    config = {**config, **numbers, **({"text_config": {**text, **numbers}} if isinstance(text, dict) else {})}
    (src / "config.json").write_text(json.dumps(config))
    reshard(src, tmp_path / "out", "--to", target, "-q")
    reshard(tmp_path / "out", tmp_path / "back", "--to", "hf", "-q")
    got = read(next((tmp_path / "back").glob("*.safetensors")))
    assert got.keys() == want.keys()
    assert [n for n in want if not np.array_equal(got[n].bits, want[n].bits)] == []
