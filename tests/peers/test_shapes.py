"""The tensors that a family declares from a config are those of transformers' own model of that config.

``python -m tests.peers.test_shapes`` records what tests/layout/test_shapes.py compares with, where transformers is not
installed. Prediction layers are in no model of transformers; tests/layout/test_shapes.py counts them.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from ckpttool.errors import LayoutError
from ckpttool.layout.family import find_family, load_family
from ckpttool.layout.shapes import declared_tensors
from tests.helpers.tiny_models import VARIANTS, save_tiny, tiny_config
from tests.helpers.tiny_names import family_lists, saved_shapes

DATA = Path(__file__).parents[1] / "layout" / "data" / "shapes"
Shapes = dict[str, list[int]]

# variant: its fields that are changed, one case each
VARIATIONS: dict[str, list[dict[str, Any]]] = {
    "llama": [
        {"tie_word_embeddings": True},
        {"attention_bias": True},
        {"mlp_bias": True},
        {"head_dim": None},
        {"num_key_value_heads": None},
    ],
    "mistral": [{"tie_word_embeddings": True}, {"head_dim": None}, {"attention_bias": True, "mlp_bias": True}],
    "qwen2": [{"tie_word_embeddings": True}, {"head_dim": 24}, {"num_key_value_heads": 1}],
    "qwen3": [{"tie_word_embeddings": True}, {"attention_bias": True}, {"head_dim": 16}],
    "qwen2_moe": [
        {"mlp_only_layers": []},
        {"mlp_only_layers": [], "decoder_sparse_step": 2},
        {"mlp_only_layers": [2], "num_hidden_layers": 4, "decoder_sparse_step": 2},
        {"qkv_bias": False},
        {"head_dim": 24, "tie_word_embeddings": True},
        {"shared_expert_intermediate_size": 40},
    ],
    "qwen3_moe": [
        {"mlp_only_layers": []},
        {"mlp_only_layers": [1], "num_hidden_layers": 3},
        {"mlp_only_layers": [], "decoder_sparse_step": 2, "num_hidden_layers": 5},
        {"attention_bias": True, "tie_word_embeddings": True},
    ],
    "mixtral": [{"head_dim": 24}, {"tie_word_embeddings": True}, {"num_local_experts": 3}],
    "deepseek_v2_lite": [{"attention_bias": True}, {"mlp_bias": False}, {"first_k_dense_replace": 0}],
    "deepseek_v2": [
        {"first_k_dense_replace": 2, "mlp_bias": True},
        {"n_shared_experts": 1, "attention_bias": True},
        {"tie_word_embeddings": True},
    ],
    "deepseek_v3": [
        {"q_lora_rank": None},
        {"q_lora_rank": None, "attention_bias": False},
        {"first_k_dense_replace": 0, "n_shared_experts": 1},
        {"first_k_dense_replace": 2, "num_hidden_layers": 4, "tie_word_embeddings": True},
        {"v_head_dim": 20, "qk_nope_head_dim": 28},
    ],
    "deepseek_v32": [
        {"mlp_layer_types": ["sparse", "dense"]},
        {"mlp_layer_types": None, "first_k_dense_replace": 1, "num_hidden_layers": 3},
        {"attention_bias": True, "index_n_heads": 3},
    ],
    "nemotron": [
        {"tie_word_embeddings": True},
        {"attention_bias": True},
        {"mlp_bias": True},
        {"head_dim": None},
    ],
    "glm4_moe": [
        {"use_qk_norm": False},
        {"attention_bias": False, "first_k_dense_replace": 0},
        {"n_shared_experts": 1, "first_k_dense_replace": 2, "num_hidden_layers": 4},
        {"tie_word_embeddings": True},
    ],
    "gpt_oss": [{"attention_bias": False}, {"tie_word_embeddings": True, "head_dim": 16}],
    "ernie4_5": [{"use_bias": False}, {"tie_word_embeddings": True}, {"head_dim": None, "num_key_value_heads": None}],
    "ernie4_5_moe": [
        {"use_bias": False},
        {"tie_word_embeddings": True},
        {"moe_num_shared_experts": 0},
        {"moe_layer_start_index": 0, "moe_layer_end_index": 1, "num_hidden_layers": 3},
        {"moe_layer_interval": 2, "moe_layer_end_index": -1, "num_hidden_layers": 5, "use_bias": False},
    ],
    "gemma": [{"attention_bias": True}, {"tie_word_embeddings": False}],
    "gemma2": [{"attention_bias": True}, {"tie_word_embeddings": False}],
    "gemma3_text": [{"attention_bias": True}, {"tie_word_embeddings": False}],
    "phi3": [{"tie_word_embeddings": True}, {"num_key_value_heads": None}],
    "gpt_neox": [{"attention_bias": False}, {"tie_word_embeddings": True}],
    "gpt2": [{"n_inner": None}, {"tie_word_embeddings": False}],
}
CASES = [(v, changed) for v, all_changes in VARIATIONS.items() for changed in all_changes]


def case_name(variant: str, changed: dict[str, Any]) -> str:
    return variant + "".join(f",{k}={v}" for k, v in changed.items())


def declared(config: dict[str, Any], *, mtp: bool = False) -> Shapes:
    """Names and shapes that the family of a config declares."""
    family = load_family(find_family(config) or "none", config)
    found = declared_tensors(family, config, mtp=mtp)
    out = {t.name: list(t.shape) for t in found}
    assert len(out) == len(found)
    return out


def published(config: Any) -> Shapes:
    """Names and shapes of transformers' model, as it publishes them: without memory, one tensor for each expert."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    out: Shapes = {}
    tied = model._tied_weights_keys if config.tie_word_embeddings else ()
    for name, tensor in model.state_dict().items():
        shape = list(tensor.shape)
        if name in tied:
            continue
        if config.model_type == "gpt_neox" and name == "lm_head.weight":
            out["embed_out.weight"] = shape
        elif config.model_type == "mixtral" and name.endswith("gate.weight"):
            out[name.replace(".mlp.", ".block_sparse_moe.")] = shape
        elif config.model_type == "ernie4_5_moe" and "moe_statics" in name:
            out[name.replace(".gate.", ".")] = shape
        elif name.endswith("experts.gate_up_proj") and config.model_type != "gpt_oss":
            gate, up = ("w1", "w3") if config.model_type == "mixtral" else ("gate_proj", "up_proj")
            experts, width, inputs = shape
            for i in range(experts):
                at = name.replace("gate_up_proj", str(i)).replace("mlp", _block(config))
                out |= {f"{at}.{gate}.weight": [width // 2, inputs], f"{at}.{up}.weight": [width // 2, inputs]}
        elif name.endswith("experts.down_proj") and config.model_type != "gpt_oss":
            for i in range(shape[0]):
                at = name.replace("down_proj", str(i)).replace("mlp", _block(config))
                out[f"{at}.{'w2' if config.model_type == 'mixtral' else 'down_proj'}.weight"] = shape[1:]
        else:
            out[name] = shape
    return out


def _block(config: Any) -> str:
    return "block_sparse_moe" if config.model_type == "mixtral" else "mlp"


def made(fields: dict[str, Any]) -> Any:
    """transformers' config of a config.json."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING[fields["model_type"]](**fields)


def written(config: Any) -> dict[str, Any]:
    """The config.json that transformers writes."""
    out: dict[str, Any] = json.loads(config.to_json_string())
    return out


def differences(ours: Shapes, theirs: Shapes) -> list[str]:
    return sorted(
        f"{n}: {ours.get(n)}, not {theirs.get(n)}" for n in ours.keys() | theirs if ours.get(n) != theirs.get(n)
    )


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_saved_checkpoint(variant: str, tmp_path: Path) -> None:
    folder = save_tiny(variant, tmp_path, dtype="bfloat16")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    saved = saved_shapes(folder)
    assert differences(declared(config), saved) == []
    assert differences(published(tiny_config(variant)), saved) == []


@pytest.mark.parametrize(("variant", "changed"), CASES, ids=[case_name(*c) for c in CASES])
def test_other_fields(variant: str, changed: dict[str, Any]) -> None:
    config = tiny_config(variant, **changed)
    assert differences(declared(written(config)), published(config)) == []


NEEDED = {"n_embd", "n_positions", "num_experts"}
"""Fields with a second name; without either it is an error here, where transformers takes the size of some model."""


@pytest.mark.parametrize("variant", VARIANTS)
def test_fields_that_are_missing(variant: str) -> None:
    """A config.json without a field means what transformers makes of it."""
    config = written(tiny_config(variant))
    family = load_family(find_family(config) or "", config)
    assert family.spec.tensors is not None
    compared = []
    for field in (*family.spec.tensors.defaults, "tie_word_embeddings"):
        fields = {k: v for k, v in config.items() if k != field}
        try:
            ours = declared(fields)
        except LayoutError as e:
            assert field in NEEDED, e  # noqa: PT017 - which field it was decides
            continue
        assert differences(ours, published(made(fields))) == [], field
        compared.append(field)
    assert set(family.spec.tensors.defaults) - NEEDED <= set(compared)


@pytest.mark.parametrize(
    ("variant", "field"),
    [
        ("llama", "head_dim"),
        ("llama", "num_key_value_heads"),
        ("mistral", "head_dim"),
        ("mixtral", "head_dim"),
        ("qwen2", "num_key_value_heads"),
        ("qwen3", "num_key_value_heads"),
        ("qwen2_moe", "mlp_only_layers"),
        ("qwen3_moe", "mlp_only_layers"),
        ("deepseek_v2", "q_lora_rank"),
        ("deepseek_v3", "q_lora_rank"),
        ("deepseek_v32", "mlp_layer_types"),
        ("ernie4_5", "head_dim"),
        ("ernie4_5", "num_key_value_heads"),
        ("phi3", "num_key_value_heads"),
        ("gpt2", "n_inner"),
    ],
)
def test_fields_that_are_null(variant: str, field: str) -> None:
    config = {**written(tiny_config(variant)), field: None}
    assert differences(declared(config), published(made(config))) == []


@pytest.mark.parametrize("variant", ["deepseek_v3", "deepseek_v32", "glm4_moe", "ernie4_5_moe"])
def test_dtypes(variant: str, tmp_path: Path) -> None:
    """What transformers keeps in F32 when it loads a model in BF16 is declared so."""
    import torch
    from transformers import AutoModelForCausalLM

    save_tiny(variant, tmp_path, dtype="bfloat16")
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    wide = {
        n.replace("gate.moe_statics", "moe_statics") for n, t in model.state_dict().items() if t.dtype == torch.float32
    }
    ours = declared_tensors(load_family(find_family(config) or "", config), config, mtp=False)
    assert wide
    # DeepSeek holds this norm in F32; transformers makes it BF16 like everything else.
    assert {t.name for t in ours if t.dtype == "F32" and ".k_norm." not in t.name} == wide
    assert {t.dtype for t in ours} == {"BF16", "F32"}


PUBLIC = json.loads((DATA / "published.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", PUBLIC)
def test_public_models(name: str) -> None:
    config = PUBLIC[name]["config"]
    theirs = {k: v for k, v in config.items() if k not in ("quantization_config", "torch_dtype")}
    # `num_key_value_heads` of DeepSeek's own configs is the number of heads, and nothing depends on it.
    assert differences(declared(config), published(made(theirs))) == []


_IDLE = re.compile(
    r"token_id|dropout|pdrop|_act|activation|^rope|range|eps|version|cache|sliding|summary|router|reorder"
)
"""Fields that no shape depends on."""


def recorded(config: Any) -> dict[str, Any]:
    """The fields of a config.json that the recorded lists keep."""
    kept = {k: v for k, v in written(config).items() if not isinstance(v, float | dict) and not _IDLE.search(k)}
    return {k: v for k, v in kept.items() if k == "mlp_layer_types" or k != "layer_types"}


def collapsed(tensors: Shapes) -> Shapes:
    """The same list with one line for all experts of a layer: ``experts.{8}.up_proj`` is those from 0 to 7."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, shape in sorted(tensors.items()):
        at, _, rest = name.partition(".experts.")
        number, _, rest = rest.partition(".")
        key = (at + ".experts.{{}}." + rest, str(shape)) if number.isdigit() else (name, "")
        groups.setdefault(key, []).append(name)
    out: Shapes = {}
    for (line, _), names in groups.items():
        if sorted(names) == sorted(line.replace("{{}}", str(i)) for i in range(len(names))) and "{{}}" in line:
            out[line.replace("{{}}", "{" + str(len(names)) + "}")] = tensors[names[0]]
        else:
            out |= {name: tensors[name] for name in names}
    return out


def record() -> dict[str, Any]:
    """For every variant its config; for every variation what it changes in the config and in the list of tensors."""
    variants = {v: recorded(tiny_config(v)) for v in VARIANTS}
    lists = {v: published(tiny_config(v)) for v in VARIANTS}
    variations = []
    for variant, changed in CASES:
        config = tiny_config(variant, **changed)
        fields, tensors = recorded(config), published(config)
        assert not set(variants[variant]) - set(fields)
        variations.append(
            {
                "variant": variant,
                "config": {k: v for k, v in fields.items() if k not in variants[variant] or variants[variant][k] != v},
                "without": list(collapsed({n: [] for n in lists[variant].keys() - tensors})),
                "with": collapsed({n: s for n, s in tensors.items() if lists[variant].get(n) != s}),
            }
        )
    return {"variants": variants, "variations": variations}


def test_the_record_is_up_to_date() -> None:
    """``python -m tests.peers.test_shapes`` rebuilds it."""
    assert json.loads((DATA / "variations.json").read_text(encoding="utf-8")) == record()
    for variant in VARIANTS:
        listed = family_lists(find_family(written(tiny_config(variant))) or "")[variant]
        assert listed.tensors == published(tiny_config(variant))


def render(data: dict[str, Any]) -> str:
    """JSON with one variant or variation a line."""
    variants = ",\n".join(
        f"  {json.dumps(k)}: {json.dumps(v, separators=(',', ':'))}" for k, v in data["variants"].items()
    )
    variations = ",\n".join(f"  {json.dumps(v, separators=(',', ':'))}" for v in data["variations"])
    return f'{{\n "variants": {{\n{variants}\n }},\n "variations": [\n{variations}\n ]\n}}\n'


if __name__ == "__main__":
    (DATA / "variations.json").write_text(render(record()), encoding="utf-8")
