"""A tiny model with random weights of every architecture of transformers.

A config is shrunk field by field: by name where the table below knows it, by sub-config where it has some, and lists
with an entry for each layer are thinned so that every kind of layer stays. What that cannot know stands in
``SETTINGS``. Sizes are chosen so that a wrong cut shows: heads are wider than hidden / heads, four query heads share a
key head, and only the vocabulary has 272 rows.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tests.peers.families import timm_stub
from tests.peers.families.remote import REMOTE
from tests.peers.families.settings import PLAIN_HEADS, SETTINGS, TRANSPOSED

VOCAB = 272
"""Rows of every vocabulary: 16 x 17, a number that no other axis has."""
LARGEST = 3_000_000
"""Parameters of a tiny model."""
KEPT = {
    *("transformers_version", "architectures", "dtype", "id2label", "label2id", "problem_type", "return_dict"),
    *("output_hidden_states", "chunk_size_feed_forward", "is_encoder_decoder", "attn_implementation"),
    "ignore_keys_at_rope_validation",
}
"""Fields that a shrunk config takes from its class."""


def _numbers(table: str) -> dict[str, int]:
    out: dict[str, int] = {}
    for line in table.strip().splitlines():
        value, *names = line.split()
        out |= dict.fromkeys(names, int(value))
    return out


NUMBERS = _numbers(
    """
    64 hidden_size d_model n_embd dim embedding_size word_embed_proj_dim emb_dim embedding_dim out_hidden_size
    64 output_dim text_hidden_size projection_dim encoder_hidden_size cross_hidden_size projection_size lru_width
    64 vision_hidden_size audio_hidden_size projector_hidden_size cross_attention_hidden_size backbone_hidden_size
    64 thinker_hidden_size input_embedding_size output_embedding_size pronunciation_embed_dim shape_embed_dim
    64 patch_embed_hidden_size pooler_hidden_size pooler_output_size merged_hidden_size decoder_hidden_size embed_dim
    64 adapter_out_dim alignment_hidden_size image_token_embed_dim llm_hidden_size encoder_embed_dim decoder_embed_dim
    128 attention_hidden_size
    128 intermediate_size encoder_ffn_dim decoder_ffn_dim ffn_dim d_ff mlp_dim d_inner dim_ff dff hidden_dim
    128 ffn_hidden_size projection_hidden_size projection_hidden_dim projection_intermediate_size prompt_mid_dim
    128 alignment_intermediate_size vision_output_dim feed_forward_size intermediate_size_mlp dense_intermediate_size
    128 prefix_dense_intermediate_size qformer_intermediate_size downsample_hidden_size mamba_d_ssm
    32 moe_intermediate_size expert_ffn_hidden_size share_expert_dim moe_hidden_size
    48 shared_expert_intermediate_size moe_shared_expert_intermediate_size shared_intermediate_size
    2 num_hidden_layers n_layer num_layers n_layers encoder_layers decoder_layers depth layers num_encoder_layers
    2 num_decoder_layers num_blocks conf_num_hidden_layers aligner_num_add_layers num_layers_per_stack
    8 num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads attention_heads
    8 num_encoder_attention_heads num_decoder_attention_heads conf_num_attention_heads resampler_n_heads
    8 num_sliding_attention_heads swa_num_attention_heads resampler_heads
    2 num_key_value_heads num_kv_heads kv_n_heads swa_num_key_value_heads num_query_groups num_attention_groups
    16 head_dim d_kv d_head swa_head_dim resampler_head_dim dim_head global_head_dim attention_head_size
    16 resampler_dim_head attention_head_dim
    32 q_lora_rank o_lora_rank
    16 kv_lora_rank qk_nope_head_dim v_head_dim index_head_dim linear_head_dim
    8 qk_rope_head_dim linear_key_head_dim
    24 qk_head_dim
    16 linear_value_head_dim
    4 linear_num_key_heads index_n_heads
    8 linear_num_value_heads linear_num_heads
    16 index_topk
    8 num_experts num_local_experts n_routed_experts moe_num_experts
    2 num_experts_per_tok moe_topk moe_top_k moe_k n_shared_experts num_shared_experts moe_num_shared_experts
    2 n_group num_experts_per_token moe_num_shared_expert
    1 topk_group num_nextn_predict_layers first_k_dense_replace
    0 num_mtp_layers
    128 max_position_embeddings n_positions max_source_positions max_target_positions n_ctx max_2d_position_embeddings
    128 max_encoder_position_embeddings max_decoder_position_embeddings num_position_embeddings position_embedding_size
    128 max_seq_len context_length seq_len max_temporal_embeddings original_max_position_embeddings
    16 window_size sliding_window sliding_window_size attention_window local_attention attention_window_size
    16 attention_chunk_size local_attention_window_len
    32 image_size
    8 patch_size
    64 num_patches
    8 num_mel_bins n_mel_bins
    8 mamba_n_heads mamba_num_heads
    16 mamba_d_head mamba_head_dim mamba_headdim mamba_d_state state_size ssm_state_size
    2 mamba_n_groups mamba_ngroups n_groups
    8 mamba_chunk_size chunk_size
    16 hidden_size_per_layer_input adapter_rank gated_norm_rank router_hidden_size
    32 base_channels latent_channels output_channels num_pos_feats
    64 codebook_size num_embeddings n_embed max_image_size audio_vocab_size mel_vocab_size
    272 vocab_size vocab_size_per_layer_input decoder_vocab_size
    """.replace("\n    ", "\n")
)
LISTS: dict[str, Any] = {
    "deepstack_visual_indexes": [0, 1],
    "fullatt_block_indexes": [1],
    "global_attn_indexes": [1],
    "vision_feature_layer": [-2, -1],
    "channel_multiplier": [1, 1],
    "summary_idxs": [0],
}
"""Lists that are no list of layers."""
_TOKEN = re.compile(r"(_token_id|_token_index|_token_ids|_index|_id)$")


BASES = (
    ("bert", "BertModel"),
    ("bert", "BertForSequenceClassification"),
    ("gemma3_text", "Gemma3TextModel"),
    ("llama", "LlamaForSequenceClassification"),
    ("mistral", "MistralModel"),
    ("modernbert", "ModernBertModel"),
    ("qwen2", "Qwen2Model"),
    ("qwen3", "Qwen3Model"),
    ("qwen3", "Qwen3ForSequenceClassification"),
    ("t5", "T5EncoderModel"),
    ("xlm-roberta", "XLMRobertaModel"),
)
"""Models without a language model's head: embeddings, rerankers, classifiers."""


@dataclass(frozen=True)
class Architecture:
    """One row of the table: a model type and the class that its kind of task has."""

    group: str
    model_type: str
    cls: str

    @property
    def name(self) -> str:
        return self.model_type if self.group == "causal" else f"{self.model_type}:{self.group}"


@cache
def architectures() -> list[Architecture]:
    """Every architecture in scope; a class that two tasks have is that of the first."""
    from transformers.models.auto import modeling_auto as auto

    groups = {
        "causal": ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",),
        "i2t": ("MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",),
        "mm": ("MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES",),
        "seq2seq": ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",),
        "mlm": ("MODEL_FOR_MASKED_LM_MAPPING_NAMES",),
        "speech": ("MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",),
        "clip": ("MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES",),
    }
    out: list[Architecture] = []
    seen: set[tuple[str, str]] = set()
    for group, mappings in groups.items():
        for mapping in mappings:
            for model_type, name in sorted(getattr(auto, mapping).items()):
                cls = name if isinstance(name, str) else name[0]
                if (model_type, cls) not in seen:
                    seen.add((model_type, cls))
                    out.append(Architecture(group, model_type, cls))
    out += [Architecture("base", model_type, cls) for model_type, cls in BASES]
    return [*out, *(Architecture("remote", r.model_type, cls) for cls, r in REMOTE.items())]


def find(name: str) -> list[Architecture]:
    """Those of a model type, ``model_type:group`` or class."""
    return [a for a in architectures() if name in (a.name, a.model_type, a.cls, f"{a.model_type}:{a.group}")]


def _is_config(value: Any) -> bool:
    return hasattr(value, "to_dict") and hasattr(value, "model_type")


class _Tokens:
    """Small token numbers, another for each field; the same for the same large one."""

    def __init__(self) -> None:
        self.given: dict[Any, int] = {}

    def small(self, field: str, value: int) -> int:
        if value < 16:
            return value
        return self.given.setdefault(value, 16 + len(self.given))


def shrink(config: Any, heads: int, tokens: _Tokens | None = None) -> dict[str, Any]:
    """Fields for a small config of the same class; ``heads``: width of a head where a config says it."""
    tokens = tokens or _Tokens()
    fields = {k: v for k, v in vars(config).items() if not k.startswith("_") and k not in KEPT}
    out: dict[str, Any] = {"model_type": config.model_type} if config.model_type else {}
    kept = kept_layers(fields)
    for name, value in fields.items():
        if _is_config(value):
            out[name] = shrink(value, heads, tokens)
        elif isinstance(value, bool) or value is None or isinstance(value, str | float):
            out[name] = value
        elif isinstance(value, int):
            out[name] = _number(name, value, heads, tokens)
        elif isinstance(value, list | tuple):
            out[name] = _listed(name, value, kept, fields, tokens)
        elif isinstance(value, dict):
            out[name] = dict(value)
        else:
            out[name] = value
    if kept and (layers := _layers_field(fields)):
        out[layers] = len(kept)
    if fields.get("qk_rope_head_dim") and fields.get("num_key_value_heads") == fields.get("num_attention_heads"):
        out["num_key_value_heads"] = out["num_attention_heads"]  # a latent has a key for every query
        if fields.get("head_dim") == fields["qk_rope_head_dim"]:
            out["head_dim"] = out["qk_rope_head_dim"]
    if isinstance(rope := out.get("rope_parameters"), dict):
        out["rope_parameters"] = _sections(rope, int(out.get("head_dim") or 8))
    return out


def _sections(rope: dict[str, Any], head: int) -> dict[str, Any]:
    """Rotary parameters whose sections for time, height and width fit a head."""
    out: dict[str, Any] = {}
    for name, value in rope.items():
        if isinstance(value, dict):
            out[name] = _sections(value, head)
        elif name == "mrope_section":
            quarter = int(head * rope.get("partial_rotary_factor", 1.0)) // 8
            out[name] = [2 * quarter, quarter, quarter]
        else:
            out[name] = value
    return out


def _number(name: str, value: int, heads: int, tokens: _Tokens) -> int:
    if name in NUMBERS:
        if value <= 1 and name not in ("num_key_value_heads", "n_groups") and not name.startswith("num_hidden"):
            return value  # a count that is off or single
        number = NUMBERS[name]
        return heads if number == 16 and name in ("head_dim", "d_kv", "d_head", "swa_head_dim") else number
    if _TOKEN.search(name) and value >= 0:
        return tokens.small(name, value)
    return value


def _layers_field(fields: Mapping[str, Any]) -> str | None:
    return next((n for n in ("num_hidden_layers", "num_layers", "n_layer", "n_layers") if n in fields), None)


def kept_layers(fields: Mapping[str, Any]) -> list[int]:
    """Numbers of the layers that stay: one of every kind that the lists of a config tell apart, at most six."""
    layers = _layers_field(fields)
    count = fields.get(layers or "")
    if not isinstance(count, int):
        return []
    lists = [v for n, v in sorted(fields.items()) if isinstance(v, list | tuple) and len(v) == count > 2]
    if not lists:
        return []
    kinds: dict[str, int] = {}
    for i in range(count):
        kinds.setdefault(repr([v[i] for v in lists if not _is_numbering(v)]), i)
    kept = sorted(kinds.values())[:6]
    for i in range(count):
        if len(kept) >= 2:
            break
        if i not in kept:
            kept.append(i)
    return sorted(kept)


def _is_numbering(values: Any) -> bool:
    return len(values) > 2 and len({repr(v) for v in values}) == len(values)


def _listed(name: str, value: Any, kept: list[int], fields: Mapping[str, Any], tokens: _Tokens) -> Any:
    if name in LISTS:
        return LISTS[name][: max(1, len(value))]
    if name in NUMBERS and value and all(type(v) is int for v in value):
        value = [NUMBERS[name]] * len(value)
    count = fields.get(_layers_field(fields) or "")
    if kept and len(value) == count:
        return list(range(len(kept))) if _is_numbering(value) and value[0] == 0 else [value[i] for i in kept]
    if _TOKEN.search(name) and all(isinstance(v, int) for v in value):
        return [tokens.small(name, v) for v in value]
    return list(value) if isinstance(value, tuple) else value


def _merge(fields: dict[str, Any], changes: Mapping[str, Any]) -> None:
    """``a.b: value`` sets a field of a sub-config; ``...`` takes one away, so that the class decides."""
    for path, value in changes.items():
        *inner, last = path.split(".")
        at: Any = fields
        for part in inner:
            at = at.get(part) if isinstance(at, dict) else None
        if not isinstance(at, dict):
            continue
        if value is ...:
            at.pop(last, None)
        else:
            at[last] = value


def tiny_config(model_type: str, changes: Mapping[str, Any] | None = None, group: str = "") -> Any:
    """A small config; ``changes`` come last. Raises what the config's class raises."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    cls = CONFIG_MAPPING[model_type]
    settings = SETTINGS.get(f"{model_type}:{group}") or SETTINGS.get(model_type, {})
    try:
        whole = cls()
    except Exception:  # noqa: BLE001 - a class whose defaults are not valid together
        whole = cls(**{k: v for k, v in settings.items() if "." not in k and v is not ...})
    fields = shrink(whole, 8 if model_type in PLAIN_HEADS else 16)
    _merge(fields, settings)
    _merge(fields, changes or {})
    fields.pop("model_type", None)
    return cls(**fields)


def random_weights(model: Any) -> None:
    """Every parameter and stored buffer random, norms, gates and biases too; the same ones every time."""
    import torch

    owners = {id(p) for p in model.parameters()}
    with torch.no_grad():
        for name, tensor in model.state_dict(keep_vars=True).items():
            if not tensor.is_floating_point() or (id(tensor) not in owners and not re.search(r"bias|gate", name)):
                continue
            draw = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            values = torch.randn(tensor.shape, generator=draw)
            if tensor.dim() < 2:
                tensor.add_(0.2 * values)
            elif tensor.numel() < 65536 or "embed" not in name:
                tensor.copy_(values / tensor.shape[-1] ** 0.5)


def _class_and_config(architecture: Architecture, changes: Mapping[str, Any] | None) -> tuple[Any, Any]:
    import torch
    import transformers

    timm_stub.install()
    config = tiny_config(architecture.model_type, changes, architecture.group)
    config.dtype = torch.float32
    cls = getattr(transformers, architecture.cls)
    if architecture.group == "causal" and not isinstance(config, cls.config_class):
        config = config.get_text_config(decoder=True)
    return cls, config


def meta_model(architecture: Architecture, changes: Mapping[str, Any] | None = None) -> Any:
    """The model without memory."""
    import torch

    cls, config = _class_and_config(architecture, changes)
    with torch.device("meta"):
        return cls._from_config(config, attn_implementation="eager")


def tiny_model(architecture: Architecture, changes: Mapping[str, Any] | None = None) -> Any:
    """The model in float32 on the CPU."""
    import torch

    size = parameters(meta_model(architecture, changes))
    if size > LARGEST:
        raise ValueError(f"{size:,} parameters are not tiny")
    cls, config = _class_and_config(architecture, changes)
    torch.manual_seed(0)
    model = cls._from_config(config, attn_implementation="eager", dtype=torch.float32)
    random_weights(model)
    return model.float().eval()


def parameters(model: Any) -> int:
    return sum(p.numel() for p in model.parameters())


def save(architecture: Architecture, folder: Path, changes: Mapping[str, Any] | None = None) -> Any:
    """Write a tiny checkpoint in the names of published files; returns its model."""
    model = tiny_model(architecture, changes)
    model.save_pretrained(folder)
    if pattern := TRANSPOSED.get(architecture.model_type):
        _transpose(folder, pattern)
    return model


def _transpose(folder: Path, pattern: str) -> None:
    from safetensors.numpy import load_file, save_file

    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        turned = {n: t.swapaxes(-1, -2).copy() if re.fullmatch(pattern, n) else t for n, t in tensors.items()}
        save_file(turned, path, {"format": "pt"})


def kinds(names: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Names grouped by what they are: numbers of layers and experts left out."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name), []).append(name)
    yield from groups.items()
