"""Paddle's hybrid-parallel saves without model_meta.json: nothing in them says which tensors every rank holds whole.

Models of every family with unusual configs, written for ranks and read again, must come back bit for bit; what is on
the ranks is read with CPython's unpickler and compared with numpy. The saves with optimizer state are written by the
test itself.
"""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpttool.layout import family as layout_family
from ckpttool.layout.family import find_family, load_family
from ckpttool.layout.shapes import declared_tensors
from tests.helpers.command import ckpttool as run
from tests.helpers.command import refused, reshard
from tests.helpers.tensorfile import Array, Tensors, assert_same, origin, read_all, save_hf

CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "ernie4_5": "Ernie4_5ForCausalLM",
    "ernie4_5_moe": "Ernie4_5_MoeForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "gpt_neox": "GPTNeoXForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}
PLAIN: dict[str, Any] = {
    "vocab_size": 132,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "head_dim": 6,
    "max_position_embeddings": 20,
    "moe_intermediate_size": 36,
    "shared_expert_intermediate_size": 24,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "q_lora_rank": 10,
    "kv_lora_rank": 14,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 2),
    "torch_dtype": "bfloat16",
}
UNUSUAL: dict[str, dict[str, Any]] = {
    "plain": {},
    "odd vocabulary, tied": {"vocab_size": 131, "tie_word_embeddings": True},
    "odd vocabulary, untied, biases": {
        "vocab_size": 131,
        "tie_word_embeddings": False,
        **dict.fromkeys(("attention_bias", "mlp_bias", "use_bias"), True),
    },
    "one kv head": {"num_key_value_heads": 1, "vocab_size": 133},
    "two kv heads, no head_dim": {"num_key_value_heads": 2, "head_dim": None, "tie_word_embeddings": False},
    "four kv heads, biases": {"num_key_value_heads": 4, **dict.fromkeys(("attention_bias", "use_bias"), True)},
    "nested": {"nested": True, "vocab_size": 131, "num_key_value_heads": 2},
}


def config_of(kind: str, unusual: str) -> dict[str, Any]:
    said = {**PLAIN, **UNUSUAL[unusual]}
    nested = said.pop("nested", False)
    said = {k: v for k, v in said.items() if v is not None}
    if kind in ("gpt2", "gpt_neox"):
        said.pop("head_dim", None)
    named = {"architectures": [CLASSES[kind]], "model_type": kind}
    if not nested:
        return {**named, **said}
    # What belongs to the whole model stays outside.
    return {**named, "torch_dtype": said.pop("torch_dtype"), "text_config": said}


def tensors_of(config: dict[str, Any]) -> Tensors:
    """Every element tells which one it is."""
    family = load_family(find_family(config) or "", config)
    found = declared_tensors(family, config)
    return {t.name: origin(i + 1, t.dtype, t.shape) for i, t in enumerate(found)}


def finite(tensors: Tensors) -> Tensors:
    return {n: t._replace(bits=t.bits & 0xBFFF) if t.dtype == "BF16" else t for n, t in tensors.items()}


def array_of(value: Any) -> Array:
    found: Array = value[1] if isinstance(value, tuple) else value
    return found


def load(path: Path) -> dict[str, Any]:
    held: dict[str, Any] = pickle.loads(path.read_bytes())  # noqa: S301 - the test made it
    return held


def written(src: Path, ranks: Path, *options: object) -> list[dict[str, Array]]:
    """Writes a save and returns what its ranks hold, with q, k and v apart where they cannot be cut together."""
    done = run("reshard", src, ranks, "--to", "hybrid", *options)
    if done.code:
        assert re.search(r"qkv_proj\.\w+` .* cannot be cut", done.err), done.err
        reshard(src, ranks, "--to", "hybrid", "--unfuse", *options)
    assert not (ranks / "model_meta.json").exists()
    files = [load(path) for path in sorted(ranks.glob("model_state*.pdparams"))]
    return [{n: array_of(v) for n, v in held.items() if "@@" not in n} for held in files]


def joined(parts: list[Array], want: Array) -> bool:
    """Whether the ranks together hold this: all of it each, or shares of one axis; either way round."""
    for whole in (want, want.T):
        if all(np.array_equal(p, whole) for p in parts):
            return True
        for axis in range(whole.ndim):
            if sum(p.shape[axis] for p in parts) == whole.shape[axis]:
                try:
                    if np.array_equal(np.concatenate(parts, axis), whole):
                        return True
                except ValueError:  # the other axis does not fit
                    continue
    return False


def cases() -> list[tuple[str, str, int]]:
    """Every family with every config, the numbers of ranks by turns."""
    turns = enumerate(CLASSES)
    # Phi-3 is published with q, k and v in one, whose shared heads three ranks cannot have.
    of = {"phi3": (2, 4, 2)}
    return [
        (kind, unusual, of.get(kind, (2, 3, 4))[(i + j) % 3]) for i, kind in turns for j, unusual in enumerate(UNUSUAL)
    ]


@pytest.mark.sample(
    "qwen3_moe-odd vocabulary, untied, biases-3",
    "gemma-nested-2",
    "ernie4_5_moe-odd vocabulary, tied-3",
    "gpt2-four kv heads, biases-3",
    "gpt_oss-nested-2",
)
@pytest.mark.parametrize(("kind", "unusual", "tp"), cases())
def test_every_family_comes_back(kind: str, unusual: str, tp: int, tmp_path: Path) -> None:
    config = config_of(kind, unusual)
    want = finite(tensors_of(config))
    src = save_hf(tmp_path / "src", want, config)
    ranks = written(src, tmp_path / "ranks", "--tp-out", tp)
    assert len(ranks) == tp
    fused = re.compile(r"c_attn|qkv_proj|query_key_value|gate_up_proj|experts\.")
    for name, raw in want.items():
        if name in ranks[0] and not fused.search(name):
            parts = [r[name].view(raw.bits.dtype) for r in ranks]
            assert joined(parts, raw.bits), name
    reshard(tmp_path / "ranks", tmp_path / "back", "--to", "hf")
    assert_same(read_all(tmp_path / "back"), want)


def train(folder: Path) -> None:
    """Put optimizer state beside the weights, element by element a function of them."""
    for path in folder.glob("model_state*.pdparams"):
        held = load(path)
        names: dict[str, str] = held.pop("StructuredToParameterName@@")
        masters = {t: master(array_of(held[n])) for n, t in names.items() if n in held}
        state: dict[str, Any] = {f"{t}_fp32_master_0_moment1_0": moment(a) for t, a in masters.items()}
        state |= {f"{t}_fp32_master_0_beta1_pow_acc_0": np.full(1, 0.5, "<f4") for t in masters}
        out = path.with_name(path.name.replace("model_state", "optimizer").replace(".pdparams", ".pdopt"))
        out.write_bytes(pickle.dumps({**state, "master_weights": masters}, protocol=4))


def master(bits: Array) -> Array:
    return (bits.astype("<u4") << 16).view("<f4")


def moment(a: Array) -> Array:
    return (a.view("<u4") ^ np.uint32(0x5A5)).view("<f4")


@pytest.mark.product(one_in=2)
@pytest.mark.parametrize(
    ("kind", "unusual", "target"),
    [
        ("gpt2", "odd vocabulary, tied", ("--tp-out", 3)),
        ("gpt2", "odd vocabulary, tied", ("--tp-out", 2, "--pp-out", 2)),
        ("gpt_neox", "odd vocabulary, untied, biases", ("--tp-out", 2, "--pp-out", 2)),
        ("qwen3", "two kv heads, no head_dim", ("--tp-out", 4)),
        ("qwen3", "odd vocabulary, tied", ("--tp-out", 2, "--pp-out", 2)),
        ("gemma", "nested", ("--tp-out", 4)),
        ("glm4_moe", "one kv head", ("--tp-out", 2)),
        ("gpt_oss", "plain", ("--tp-out", 2)),
    ],
)
def test_the_optimizer_state_follows(kind: str, unusual: str, target: tuple[Any, ...], tmp_path: Path) -> None:
    config = config_of(kind, unusual)
    # Nothing is trained in float32, which has no master weights.
    want = {n: t._replace(dtype="BF16", bits=t.bits.astype("<u2") & 0xBFFF) for n, t in tensors_of(config).items()}
    written(save_hf(tmp_path / "src", want, config), tmp_path / "ranks", "--unfuse", *target)
    train(tmp_path / "ranks")
    reshard(tmp_path / "ranks", tmp_path / "one", "--to", "unified", "--tp-out", 1)
    masters = read_all(tmp_path / "one", "master_weights-*.safetensors")
    moments = read_all(tmp_path / "one", "optimizer-*.safetensors")
    assert masters.keys() == want.keys()
    for name, raw in want.items():
        have, whole = masters[name].bits, master(raw.bits).view("<u4")
        assert np.array_equal(have, whole) or np.array_equal(have, whole.T), name
        assert np.array_equal(moments[f"{name}/moment1_0"].bits, moment(have).view("<u4")), name
        assert moments[f"{name}/beta1_pow_acc_0"].bits.size == 1


def gpt2_ranks(folder: Path, **said: object) -> tuple[Path, Tensors]:
    """GPT-2 with an odd vocabulary on two ranks, whose config.json then says something else; None takes a field out."""
    config = config_of("gpt2", "odd vocabulary, tied")
    want = finite(tensors_of(config))
    written(save_hf(folder / "src", want, config), folder / "ranks", "--tp-out", 2)
    config = {k: v for k, v in {**config, **said}.items() if v is not None}
    (folder / "ranks" / "config.json").write_text(json.dumps(config))
    return folder / "ranks", want


@pytest.mark.parametrize(
    ("vocab", "says"), [(None, "config.json does not say how long it is"), (126, "config.json says 126")]
)
def test_what_no_size_tells_is_refused(vocab: int | None, says: str, tmp_path: Path) -> None:
    ranks, want = gpt2_ranks(tmp_path, vocab_size=vocab)
    error = refused(ranks, tmp_path / "dst", "--to", "hf")
    assert "it is not clear whether `transformer.wte.weight` is whole on each of the 2 ranks or cut" in error
    assert says in error
    assert "--split 'transformer.wte.weight=none'" in error
    reshard(ranks, tmp_path / "dst", "--to", "hf", "--split", "transformer.wte.weight=none", "--verify")
    assert_same(read_all(tmp_path / "dst"), want)


def test_a_wrong_answer_to_the_question_is_found_by_the_copies(tmp_path: Path) -> None:
    """Tensors that are said to be whole must be the same on all ranks."""
    config = config_of("gpt2", "plain")
    written(save_hf(tmp_path / "src", finite(tensors_of(config)), config), tmp_path / "ranks", "--tp-out", 2)
    error = refused(tmp_path / "ranks", tmp_path / "dst", "--to", "hf", "--split", "transformer.wte.weight=none")
    assert "transformer.wte.weight" in error


def test_a_family_without_shapes_is_read_as_it_is_written(tmp_path: Path) -> None:
    """Where config.json does not say how wide a head is, the number of heads decides, as in writing."""
    config = config_of("qwen3", "two kv heads, no head_dim")
    want = finite(tensors_of(config))
    written(save_hf(tmp_path / "src", want, config), tmp_path / "ranks", "--unfuse", "--tp-out", 4)
    source = Path(layout_family.__file__).with_name("families") / "qwen3.yaml"
    rules = source.read_text().partition("\ntensors:")[0]
    (tmp_path / "mine.yaml").write_text(rules)
    reshard(tmp_path / "ranks", tmp_path / "back", "--to", "hf", "--family", tmp_path / "mine.yaml", "--verify")
    assert_same(read_all(tmp_path / "back"), want)


def test_without_a_family_everything_is_asked_for(tmp_path: Path) -> None:
    ranks, _ = gpt2_ranks(tmp_path, model_type="unheard", architectures=[])
    error = refused(ranks, tmp_path / "dst", "--to", "hf")
    assert "config.json names no known model" in error
    assert "--family gpt2" in error


@pytest.mark.product
@pytest.mark.parametrize("vocab", [48, 96, 97, 130])
@pytest.mark.parametrize("form", [("hybrid", "--tp-out", 2), ("unified",)])
@pytest.mark.parametrize("nested", [True, False])
def test_the_head_of_paddlenlp_comes_back(vocab: int, form: tuple[Any, ...], *, nested: bool, tmp_path: Path) -> None:
    """[hidden, vocab], under names that begin with ``model`` and in shapes that do not always tell."""
    config = config_of("qwen3", "nested" if nested else "plain")
    sizes = config["text_config"] if nested else config
    sizes |= {"vocab_size": vocab, "tie_word_embeddings": False}
    want = finite(tensors_of(config))
    src = save_hf(tmp_path / "src", want, config)
    reshard(src, tmp_path / "paddle", "--target", "paddlenlp-3.0", "--to", *form)
    if form[0] == "unified":
        held = read_all(tmp_path / "paddle")["lm_head.weight"].bits
    else:
        parts = [load(p)["lm_head.weight"] for p in sorted((tmp_path / "paddle").glob("model_state*"))]
        held = parts[0] if vocab % 2 else np.concatenate(parts, axis=1)
    assert np.array_equal(held, want["lm_head.weight"].bits.T)
    reshard(tmp_path / "paddle", tmp_path / "back", "--to", "hf")
    assert_same(read_all(tmp_path / "back"), want)


@pytest.mark.product
@pytest.mark.parametrize("vocab", [130, 131, 133, 259, 260, 300])
@pytest.mark.parametrize(
    "form", [("hybrid", "--sharding-out", 1), ("hybrid", "--sharding-out", 2), ("zcc", "--sharding-out", 2), ("flex",)]
)
def test_a_vocabulary_that_contradicts_the_config(vocab: int, form: tuple[Any, ...], tmp_path: Path) -> None:
    """131 would be read as halves of 260 rows when config.json says 259; a padded one is written and comes back."""
    rows = {130: 262, 131: 264, 133: 131, 259: 131, 260: 520, 300: 131}[vocab]
    config = config_of("llama", "plain") | {"vocab_size": rows, "tie_word_embeddings": False}
    want = finite(tensors_of(config))
    src = save_hf(tmp_path / "src", want, config | {"vocab_size": vocab})
    if vocab == 131:
        reshard(src, tmp_path / "ranks", "--tp-out", 2, "--to", *form)
        reshard(tmp_path / "ranks", tmp_path / "back", "--to", "hf", "--tp-out", 1)
        assert_same(read_all(tmp_path / "back"), want)
        return
    error = refused(src, tmp_path / "dst", "--tp-out", 2, "--to", *form)
    assert f"has {rows:,} tokens, config.json says a vocabulary of {vocab:,}" in error
    assert f"set vocab_size to {rows}" in error
    assert not (tmp_path / "dst").exists()
    reshard(src, tmp_path / "whole", "--to", "unified", "--tp-out", 1)


@pytest.mark.parametrize(("vocab", "form"), [(48, ("unified",)), (48, ("flex",)), (96, ("hybrid", "--tp-out", 2))])
def test_a_head_that_would_be_read_transposed(vocab: int, form: tuple[Any, ...], tmp_path: Path) -> None:
    """A square head of PaddleNLP, for a version whose models have it the other way round."""
    config = config_of("qwen3", "plain") | {"vocab_size": vocab, "tie_word_embeddings": False}
    want = finite(tensors_of(config))
    src = save_hf(tmp_path / "src", want, config)
    reshard(src, tmp_path / "nlp", "--to", "unified", "--target", "paddlenlp-3.0")
    options = ("--to", *form, *(() if form[0] == "flex" else ("--target", "paddleformers-0.4")))
    error = refused(tmp_path / "nlp", tmp_path / "out", *options)
    assert "`lm_head.weight` [48, 48] would be read transposed" in error
    assert "--native-names" in error
    reshard(tmp_path / "nlp", tmp_path / "out", *options, "--native-names")
    reshard(tmp_path / "out", tmp_path / "back", "--to", "hf", "--tp-out", 1)
    assert_same(read_all(tmp_path / "back"), want)
