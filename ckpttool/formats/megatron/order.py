"""The order of ``named_parameters()`` in Megatron Core's models, which decides where a parameter lies in the flat
buffers of the optimizer, and which no file says.

It is the order in which constructors register modules; what a module holds itself comes before what its modules hold.
In a layer of the local spec:

    input_layernorm, self_attention.linear_proj, linear_qkv, q_layernorm, k_layernorm, pre_mlp_layernorm, mlp

Under Transformer Engine a norm that is fused lies inside of its linear layer, before that layer's weight. So the order
goes by what a file of that form calls its tensors (``names.spelled``).

Sources: models/gpt/gpt_model.py, transformer/transformer_layer.py, attention.py, multi_latent_attention.py, mlp.py,
moe/*.py and multi_token_prediction.py of Megatron Core 0.16; pytorch/module/grouped_linear.py and layernorm_linear.py
of Transformer Engine 2.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_MODULES = (
    ("embedding", "decoder", "mtp", "output_layer"),
    ("word_embeddings", "position_embeddings", "tokentype_embeddings"),
    # What a layer of multi-token prediction has beside a layer's own modules comes before them, its norm after them.
    ("enorm", "hnorm", "eh_proj", "transformer_layer", "mtp_model_layer", "layers", "final_layernorm"),
    ("input_layernorm", "self_attention", "pre_mlp_layernorm", "mlp"),
    (
        "core_attention",
        "linear_proj",
        "linear_qkv",
        "linear_q_proj",
        "linear_q_down_proj",
        "linear_q_up_proj",
        "linear_kv_down_proj",
        "linear_kv_up_proj",
        "q_layernorm",
        "k_layernorm",
        "kv_layernorm",
    ),
    ("gate_weight", "router", "experts", "shared_experts", "linear_fc1", "linear_fc2"),
    ("softmax_offset", "layer_norm_weight", "layer_norm_bias", "weight", "bias", "expert_bias"),
)
"""Names of modules that have the same parent, in the order in which it registers them."""
_PLACES = {name: i for names in _MODULES for i, name in enumerate(names)}
_LAST = len(_PLACES)
_GROUPED = re.compile(r"(weight|bias)(\d{1,9})")
_BUFFER = re.compile(r"\.router\.(?:expert_bias|local_tokens_per_expert|global_tokens_per_expert)\Z")


def place(spelled: str) -> tuple[tuple[int, int, str], ...]:
    """The position of a tensor in its model, as a sort key; ``spelled`` is its name in a file."""
    out = []
    for part in spelled.split("."):
        if part.isdigit():
            out.append((int(part), 0, ""))
        elif m := _GROUPED.fullmatch(part):
            out.append((int(m[2]), _PLACES[m[1]], ""))  # weight0, bias0, weight1, bias1, ...
        else:
            out.append((_PLACES.get(part, _LAST), 0, part))
    return tuple(out)


def in_model_order(spelled: Iterable[str]) -> list[str]:
    """Names as a file of one form has them, in the order of ``named_parameters()``."""
    return sorted(spelled, key=place)


def is_parameter(name: str) -> bool:
    """Whether a tensor is trained: a buffer has no place in those of the optimizer."""
    return _BUFFER.search(name) is None
