"""The kinds of models: which arguments of Megatron make which model of Hugging Face, a row for each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckpttool.errors import UnsupportedError


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of model."""

    model_type: str
    architecture: str

    def config(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """Its config.json."""
        heads, groups = args["num_attention_heads"], args.get("num_query_groups")
        return {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            "hidden_size": args["hidden_size"],
            "intermediate_size": args["ffn_hidden_size"],
            "num_hidden_layers": args["num_layers"],
            "num_attention_heads": heads,
            "num_key_value_heads": groups or heads,
            "head_dim": args.get("kv_channels") or args["hidden_size"] // heads,
            "vocab_size": args.get("vocab_size") or args["padded_vocab_size"],
            "tie_word_embeddings": not args.get("untie_embeddings_and_output_weights"),
        }


_KINDS = (Kind("llama", "LlamaForCausalLM"),)


def kind_of(args: Mapping[str, Any]) -> Kind:
    """The kind that a model with these arguments is. Raises UnsupportedError where it is none that is known."""
    if args.get("swiglu"):
        return _KINDS[0]
    raise UnsupportedError("the arguments of this save describe a kind of model that is not known")
