"""TensorRT-LLM checkpoints: ``rank{N}.safetensors`` and a ``config.json`` with the mapping.

Source: tensorrt_llm/mapping.py and models/llama/convert.py (0.2x). rank = pp_rank * tp_size + tp_rank; experts lie over
the tp ranks as moe_tp x moe_ep with moe_ep the fastest; every pipeline stage numbers its layers from 0; q, k, v are
fused per rank; the embedding is whole on every rank unless ``use_parallel_embedding``; the head is padded to a multiple
of tp_size. The config has its own field names; inside ckpttool they are Hugging Face's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpttool.core.mesh import Mesh
from ckpttool.errors import CorruptError, IncompleteError, UnsupportedError, UsageError
from ckpttool.formats import base
from ckpttool.formats.config import config_fields, missing_config
from ckpttool.storage.listing import Listing

_NAME = r"rank(?P<rank>\d+)\.safetensors"
_EMBEDDING = "transformer.vocab_embedding.*"

_FIELDS = {
    "architecture": "architectures",
    "dtype": "torch_dtype",
    "head_size": "head_dim",
    "norm_epsilon": "rms_norm_eps",
    "rotary_base": "rope_theta",
    "rotary_scaling": "rope_scaling",
}
"""TensorRT-LLM's name of a field: Hugging Face's, where they differ."""
_SAME = (
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_size",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
    "tie_word_embeddings",
)
_BIASES = {"attn_bias": "attention_bias", "mlp_bias": "mlp_bias"}
_MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "Qwen2ForCausalLM": "qwen2",
}


class TensorRTLLM:
    """One file per rank."""

    name = "trtllm"
    dialect = "trtllm"
    capabilities = base.Capabilities(meshes="tp x pp; ep x etp = tp", local_layers=True, refused=("fuse", "unfuse"))
    whole = (_EMBEDDING,)

    def detect(self, listing: Listing) -> int:
        return 2 if not listing.single and listing.match(_NAME) and "mapping" in listing.json("config.json") else 0

    def read(self, listing: Listing, options: base.ReadOptions) -> base.StoredCheckpoint:
        config = listing.json("config.json")
        mapping = config.get("mapping")
        if not isinstance(mapping, dict):
            raise IncompleteError(
                "there is no `mapping` in config.json, so the parallel sizes are not known",
                where=str(listing.root),
                hint="read the files as anyone's: --rank-pattern 'rank{rank}.safetensors' --tp N",
            )
        if _size(mapping, "cp_size", 1, listing) > 1:
            raise UnsupportedError("context-parallel TensorRT-LLM checkpoints are not read", where=str(listing.root))
        tp, pp, ep = (_size(mapping, k, 1, listing) for k in ("tp_size", "pp_size", "moe_ep_size"))
        etp = _size(mapping, "moe_tp_size", max(tp // ep, 1), listing)
        base.check_mesh("mapping in config.json", {"tp": tp, "pp": pp, "ep": ep, "etp": etp}, options, listing.root)
        mesh = Mesh(tp, pp, ep, etp, options.layout, experts="ep-etp")
        names = {int(m["rank"]): n for n, m in listing.match(_NAME)}
        base.contiguous_ranks(names, mesh.world, listing.root, "rank*.safetensors")
        stored = base.read_files(self.name, listing, [(names[r], r) for r in range(mesh.world)], mesh)
        if config.get("use_parallel_embedding") and config.get("embedding_sharding_dim") == 1:
            raise UnsupportedError(
                "an embedding that is cut over the hidden size is not read",
                where=str(listing.path("config.json")),
                hint="convert with --embedding_sharding_dim 0",
            )
        stored.dialect = "trtllm"
        stored.config, stored.native_config = to_hugging_face(config), config
        stored.whole = () if config.get("use_parallel_embedding") else self.whole
        return stored

    def target_mesh(self, asked: Mesh, said: Mapping[str, int]) -> Mesh:
        """Moe_tp x moe_ep is tp, always. Raises UsageError for numbers that flags name and that do not make it."""
        if len(asked.layout) > asked.pp:
            raise UsageError(
                f"--to trtllm has no virtual stages: {len(asked.layout)} chunks for pp {asked.pp}",
                hint=f"--pp-layout takes {asked.pp} numbers here",
            )
        fits = asked.tp % asked.ep == 0
        etp = asked.etp if said.keys() & {"ep", "etp"} else asked.tp // asked.ep
        if not fits or etp * asked.ep != asked.tp:
            raise UsageError(
                f"ep {asked.ep} x etp {etp} is not tp {asked.tp}, as --to trtllm needs",
                hint=f"add --etp-out {asked.tp // asked.ep}: each expert is cut over so many ranks"
                if fits
                else f"--ep-out must divide tp {asked.tp}",
            )
        return Mesh(asked.tp, asked.pp, asked.ep, etp, asked.layout, experts="ep-etp")

    def write(self, request: base.WriteRequest) -> base.FileLayout:
        mesh = request.mesh
        source = request.source
        own = source.native_config if source and source.format == self.name else {}
        if not own and not request.config:
            raise missing_config("the config of TensorRT-LLM is made from it", source and source.root)
        config = {
            **(own or from_hugging_face(request.config)),
            "use_parallel_embedding": False,
            "mapping": {
                "world_size": mesh.world,
                "tp_size": mesh.tp,
                "pp_size": mesh.pp,
                "moe_tp_size": mesh.etp,
                "moe_ep_size": mesh.ep,
            },
        }
        if request.dtype:
            config["dtype"] = {"BF16": "bfloat16", "F16": "float16"}.get(request.dtype, "float32")
        groups = [(f"rank{r}.safetensors", r, request.ranks[r], None) for r in request.chosen]
        usage = "trtllm-build --checkpoint_dir {dst} --output_dir ENGINE" if len(groups) == mesh.world else ""
        return base.build_files(groups, mesh.world)._replace(config=config, usage=usage)


def to_hugging_face(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a TensorRT-LLM config that describe the model, under Hugging Face's names."""
    out: dict[str, Any] = {k: config[k] for k in _SAME if k in config}
    for theirs, ours in _FIELDS.items():
        if config.get(theirs) is not None:
            out[ours] = [config[theirs]] if ours == "architectures" else config[theirs]
    architecture = config.get("architecture")
    if architecture in _MODEL_TYPES:
        out["model_type"] = _MODEL_TYPES[architecture]
    if config.get("hidden_act"):
        out["hidden_act"] = "silu" if config["hidden_act"] == "swiglu" else config["hidden_act"]
    out |= {ours: True for theirs, ours in _BIASES.items() if config.get(theirs) is True}
    if out.get("model_type") == "mistral":
        out["sliding_window"] = config.get("sliding_window")  # transformers takes 4,096 where nothing is said
    moe = config.get("moe")
    if isinstance(moe, dict) and moe.get("num_experts"):
        out["num_local_experts"] = moe["num_experts"]
        out["num_experts_per_tok"] = moe.get("top_k", 0)
    return out


def _refuse_windows(config: Mapping[str, Any]) -> None:
    """Raises UnsupportedError for layers that attend to a window, of which only Mistral's config there can speak."""
    listed = config.get("layer_types")
    kinds = listed if isinstance(listed, list) else []
    asked = config.get("use_sliding_window", config.get("model_type") == "mixtral") and config.get("sliding_window")
    other = next((k for k in kinds if k not in ("full_attention", "attention")), "")
    if other or (asked and not kinds):
        field = "layer_types" if other else "sliding_window"
        raise UnsupportedError(
            f"TensorRT-LLM's config.json cannot say that layers have a window of attention (`{field}`)",
            hint="--to hf or vllm",
        )


def from_hugging_face(config: Mapping[str, Any]) -> dict[str, Any]:
    """A TensorRT-LLM config from Hugging Face's fields; the mapping is added by ``write``."""
    config = _flat_rope(config_fields(config))
    out: dict[str, Any] = {k: config[k] for k in _SAME if k in config}
    for theirs, ours in _FIELDS.items():
        if ours in config:
            out[theirs] = config[ours][0] if ours == "architectures" and config[ours] else config[ours]
    out.setdefault("dtype", str(config.get("dtype", "bfloat16")))
    out["logits_dtype"] = "float32"
    out["position_embedding_type"] = "rope_gpt_neox"
    heads = config.get("num_attention_heads")
    if "head_size" not in out and heads and "hidden_size" in config:
        out["head_size"] = config["hidden_size"] // heads
    out["num_key_value_heads"] = config.get("num_key_value_heads", heads)
    experts = config.get("num_local_experts", 0)
    out["hidden_act"] = "swiglu" if experts else config.get("hidden_act", "silu")
    if experts:
        # 1: the router's weights are normalised after the top k are chosen, as in Mixtral
        out["moe"] = {
            "num_experts": experts,
            "top_k": config.get("num_experts_per_tok", 2),
            "normalization_mode": 1,
        }
    if config.get("model_type") != "mistral":
        out |= {theirs: True for theirs, ours in _BIASES.items() if config.get(ours) is True}
        _refuse_windows(config)
    elif window := config.get("sliding_window", 4096):  # it has no biases, whatever its config says
        out["sliding_window"] = window
    if config.get("model_type") == "qwen2":
        out["qwen_type"] = "qwen2"
        out["attn_bias"] = True
    out["embedding_sharding_dim"] = 0
    out["quantization"] = {"quant_algo": None, "kv_cache_quant_algo": None}
    return out


def _flat_rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config with ``rope_theta`` and ``rope_scaling``, which transformers 5 writes as one ``rope_parameters``."""
    rope = config.get("rope_parameters")
    if not isinstance(rope, dict):
        return config
    scaling = {k: v for k, v in rope.items() if k != "rope_theta"}
    flat = {"rope_theta": rope["rope_theta"]} if "rope_theta" in rope else {}
    return {**config, **flat, **({"rope_scaling": scaling} if rope.get("rope_type", "default") != "default" else {})}


def _size(mapping: Mapping[str, Any], name: str, default: int, listing: Listing) -> int:
    """A parallel size of the mapping. Raises CorruptError when it is none."""
    value = mapping.get(name, default)
    if type(value) is not int or value < 1:
        raise CorruptError(
            f"`mapping.{name}` is not a number of ranks: {value}", where=str(listing.path("config.json"))
        )
    return value
