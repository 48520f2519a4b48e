"""Shared rules of the Paddle formats: who wrote a checkpoint, and which way round a weight lies.

A Paddle ``Linear`` keeps its weight [in, out], the transpose of torch's. Embeddings are [vocab, hidden] in both; the
head is [hidden, vocab] in PaddleNLP's models when it is not tied, and [vocab, hidden] everywhere else. PaddleFormers
from 0.3.2 on transposes some weights of the model files (``save_to_hf``) and never those of the optimizer's files, so
that one checkpoint holds both. Measured with paddlenlp 3.0.0b4, paddleformers 0.4.1 and 1.2.0.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ckpttool.formats.base import WriteRequest
from ckpttool.formats.config import config_field, quantization, whole_number

STATES = frozenset({"moment1_0", "moment2_0", "velocity_0", "beta1_pow_acc_0", "beta2_pow_acc_0", "moment2_max_0"})
"""Accumulators of the optimizers, as their names end."""

_PREFIX = re.compile(r"(?P<prefix>[a-z][a-z0-9_]*)\.(?:layers\.\d+|embed_tokens|norm)\.")
_EMBEDDINGS = (
    *("embed_tokens", "word_embeddings", "position_embeddings", "token_type_embeddings"),
    *("wte", "wpe", "embed_in", "embed_positions"),
)
TRANSPOSED = frozenset(
    [
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "gate", "shared_expert_gate"),
        *("kv_a_proj_with_mqa", "kv_b_proj", "q_a_proj", "q_b_proj", "eh_proj"),
    ]
)
"""Modules in ``transpose_weight_keys``; fused projections are in none of the lists."""

TARGETS = ("paddleformers-1.2", "paddleformers-0.4", "paddlenlp-3.0")
"""Values of --target."""


_GATE_UP = ("up_gate_proj", "gate_up_fused_proj")


class Software(NamedTuple):
    """The software that wrote a checkpoint, or will read it."""

    name: str
    """``paddlenlp``, ``paddleformers`` or "" when the config does not say."""
    version: tuple[int, ...] = ()


def software(config: Mapping[str, Any]) -> Software:
    """The software that ``paddlenlp_version`` or ``paddleformers_version`` in config.json names."""
    for name in ("paddleformers", "paddlenlp"):
        found = config.get(f"{name}_version")
        if isinstance(found, str):
            return Software(name, tuple(int(n) for n in re.findall(r"\d+", found)[:3]))
    return Software("")


def target_software(text: str) -> Software:
    """The software that a --target names."""
    name, _, version = text.partition("-")
    return Software(name, tuple(int(n) for n in version.split(".")))


def base_prefix(names: Iterable[str]) -> str:
    """Prefix of the models' names: ``model``, ``llama``, ``qwen2``, ...; "" when there is none."""
    for name in names:
        if m := _PREFIX.match(name):
            return m["prefix"]
    return ""


def module_of(name: str) -> str:
    """``a.b.q_proj.weight`` -> ``q_proj``."""
    parts = name.rsplit(".", 2)
    return parts[-2] if len(parts) > 1 else name


def is_linear(name: str, ndim: int, config: Mapping[str, Any]) -> bool:
    """Whether this is the weight of a ``Linear`` by its name, which Paddle keeps [in, out]; not the head."""
    if ndim != 2 or not name.endswith(".weight"):
        return False
    module = module_of(name)
    if module in _EMBEDDINGS or module == "lm_head" or "norm" in module:
        return False
    # paddleformers keeps these routers as torch does.
    return (module, config.get("model_type")) not in (("router", "gpt_oss"), ("gate", "glm4_moe"))


def transposed_on_disk(name: str, ndim: int, writer: Software, prefix: str, config: Mapping[str, Any]) -> bool:
    """Whether ``save_to_hf`` of this software puts the weight [out, in] into the model files."""
    if writer.name != "paddleformers" or writer.version < (0, 3, 2) or not is_linear(name, ndim, config):
        return False
    if writer.version < (1,) and prefix == "llama":
        return False  # the Llama of 0.x has no list of weights to transpose
    module = module_of(name)
    return module in TRANSPOSED and not (module == "gate" and ".mlp.gate." not in name)


def expected_side(name: str, config: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """(in, out) of a linear weight as far as the config tells; None where it does not."""
    hidden = whole_number(config, "hidden_size")
    module = module_of(name)
    if module in ("o_proj", "down_proj"):
        return None, hidden
    takes_hidden = ("q_proj", "k_proj", "v_proj", "qkv_proj", "gate_proj", "up_proj", "gate", "router", *_GATE_UP)
    return hidden if module in takes_hidden else None, None


def clean_architecture(name: str) -> str:
    """The class without what parallel training appended to its name.

    ``LlamaForCausalLMPipe``, ``Qwen2ForCausalLMDeprecated`` and ``...PipeDeprecated`` are all found in saved configs.
    """
    while m := re.fullmatch(r"(.+?)(?:Pipe|Deprecated|Network|Auto|Decapitated)", name):
        name = m[1]
    return name


def target_config(config: Mapping[str, Any], version: str, dtype: str) -> dict[str, Any]:
    """config.json as this version's loader expects it: its dtype key, plain architectures, no parallel sizes."""
    if not config:
        return {}
    out = dict(config)
    if isinstance(names := out.get("architectures"), list):
        out["architectures"] = [clean_architecture(n) if isinstance(n, str) else n for n in names]
    for field in ("tensor_parallel_degree", "tensor_model_parallel_size", "pipeline_parallel_degree"):
        if out.get(field, 1) != 1:
            out[field] = 1
    reader = target_software(version)
    if software(config).name != reader.name or software(config).version[:2] != reader.version[:2]:
        # By this field readers, ours among them, know which way round the weights lie.
        for name in ("paddlenlp", "paddleformers"):
            out.pop(f"{name}_version", None)
        out[f"{reader.name}_version"] = ".".join(map(str, (*reader.version, 0)))
    said = next((n for n, d in CONFIG_DTYPES.items() if d == dtype), "") or out.get("torch_dtype") or out.get("dtype")
    key, other = ("dtype", "torch_dtype") if version.startswith("paddlenlp") else ("torch_dtype", "dtype")
    if said is not None and (key not in out or dtype):
        out.pop(other, None)
        out[key] = said
    return out


def resume_flags(request: WriteRequest, kind: str) -> str:
    """Flags with which a trainer resumes from a save in ``kind``, its word for a format; "" where a trainer cannot.

    It needs weights (those of the model, or the master weights that they are rounded from) and optimizer state.
    """
    written = {t.component for t in request.ranks[0]} if request.complete else set()
    if "optimizer" not in written or not written & {"model", "master_weights"}:
        return ""
    if request.version.startswith("paddlenlp"):
        own = "--unified_checkpoint true" if kind == "unified_checkpoint" else "--load_sharded_model true"
    else:
        own = f"--load_checkpoint_format {kind}"
    return f"resume with --resume_from_checkpoint {{dst}} {own}"


CONFIG_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "float64": "F64"}
"""Names in config.json -> dtypes."""


def config_dtype(config: Mapping[str, Any]) -> str:
    """Dtype of the model's weights by its config; float32 when it says nothing (PaddleNLP leaves the default out)."""
    text = config_field(config, "dtype") or config_field(config, "torch_dtype") or "float32"
    return CONFIG_DTYPES.get(str(text), "")


def fp8_dtype(config: Mapping[str, Any]) -> str:
    """The FP8 dtype of a model's quantized weights, or "" when its config names none."""
    quant = quantization(config)
    method = str(quant.get("quant_method", ""))
    groups = quant.get("config_groups")
    weights = [g.get("weights") for g in groups.values() if isinstance(g, dict)] if isinstance(groups, dict) else []
    floats = any(isinstance(w, dict) and w.get("type") == "float" for w in weights)
    if "fp8" not in method and not (method in ("compressed-tensors", "modelopt") and floats):
        return ""
    return "F8_E5M2" if quant.get("fmt") == "e5m2" else "F8_E4M3"
