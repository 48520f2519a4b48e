"""Class and module of a tensor, from its name in Hugging Face's naming."""

from __future__ import annotations

from ckpttool.layout.names import split_numbers

CLASSES = (
    "embedding",
    "head",
    "attention",
    "dense mlp",
    "experts",
    "shared experts",
    "router",
    "norm",
    "mtp",
    "scale",
    "other",
)
"""Classes, in the order in which they are shown."""

# The first that is found in a name decides.
_PARTS = (
    ("norm", ("norm", ".ln_", "ln_f")),
    ("router", (".gate.weight", ".gate.wg.", "router", "shared_expert_gate", "e_score_correction", "moe_statics")),
    ("shared experts", ("shared_expert",)),
    ("experts", (".experts.",)),
    ("head", ("lm_head", "output_layer", "embed_out")),
    ("embedding", ("embed", "wte.", "wpe.")),
    ("attention", ("attn", "attention")),
    ("dense mlp", (".mlp.", "feed_forward", ".ffn.")),
)


def class_of(template: str) -> str:
    """The class of a tensor that no prediction layer holds; ``template`` is its name without numbers."""
    return next((c for c, parts in _PARTS if any(p in template for p in parts)), "other")


def module_of(name: str) -> str:
    """``model.layers.*.self_attn.q_proj``: the module that a tensor belongs to, numbers left out."""
    template = split_numbers(name)[0].replace("#", "*")
    for end in (".weight", ".bias"):
        template = template.removesuffix(end)
    return template
