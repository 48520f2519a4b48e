"""NeMo's checkpoints and Megatron Bridge's: where Megatron Core's files lie in them, and what says the model's sizes.

    NeMo 2      NAME--val_loss=1.20-step=99-last/weights/           torch_dist, without arguments of Megatron
                NAME--val_loss=1.20-step=99-last/context/model.yaml   the model's configuration, defaults included
    NeMo 1      llama.nemo                        a tar, which is read in place, or a directory with the same files
                  model_config.yaml
                  model_weights/                  torch_dist or zarr
                  model_weights.ckpt              or a file of torch.save for each rank:
                  mp_rank_TT/, tp_rank_TT_pp_rank_PPP/model_weights.ckpt
                checkpoints/NAME--val_loss=1.20-step=99-last/     torch_dist or zarr of a run, with
                hparams.yaml                                      the configuration
    Bridge      iter_0001000/run_config.yaml      beside torch_dist

Source: nemo/lightning/io/pl.py, ckpt_utils.py, io/mixin.py, pytorch/callbacks/model_checkpoint.py and
nemo/collections/nlp/parts/nlp_overrides.py of NeMo 2.5; megatron/bridge/training/checkpointing.py of Megatron Bridge.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ckpttool.containers.pickle import opened, printable
from ckpttool.containers.torch_pickle import TorchTensor
from ckpttool.containers.torch_zip import read_torch
from ckpttool.core.files import Place
from ckpttool.core.words import some
from ckpttool.errors import ConflictError, IncompleteError, UnsupportedError
from ckpttool.formats import base
from ckpttool.formats.megatron.run import MegatronSave
from ckpttool.formats.torch import plain_value
from ckpttool.storage.listing import Listing, list_source
from ckpttool.storage.tar import TarPlace
from ckpttool.storage.yaml_file import load_yaml

SUFFIX = ".nemo"
WEIGHTS = "weights"
"""Directory of NeMo 2."""
MODEL_WEIGHTS = "model_weights"
RANK_FILE = "model_weights.ckpt"
_CONFIG, _HPARAMS = "model_config.yaml", "hparams.yaml"
_CONTEXT, _MODEL, _RUN = "context", "model.yaml", "run_config.yaml"
_TOKENIZER, _NEMO_TOKENIZER = "tokenizer", "nemo_tokenizer"
_OF_TOKENIZERS = (".model", "vocab", "merges", ".txt", ".tiktoken")
"""Endings of a tokenizer's files in a context, which has pickles of NeMo's own, too."""
_ADAPTER = re.compile(r"\.adapters?\.")
_NOT_THE_MODELS = ("metadata.json", "latest_checkpointed_iteration.txt")
_RUNS = "checkpoints"
_RANK = re.compile(r"mp_rank_(\d{2,9})|tp_rank_(\d{2,9})_pp_rank_(\d{3,9})")
_STEP = re.compile(r"(?:\A|-)(?:global_)?step=(\d{1,18})(?=-|\Z)")
_LAST, _UNFINISHED = "-last", "-unfinished"
_MOST = 1000
"""Directories that are looked at."""


def find(listing: Listing) -> MegatronSave | None:
    """The save of NeMo at a source: a .nemo, a directory of one, or the run that has several; None where there is none.

    Raises ConflictError where it is unclear which save is meant, and what listing a tar raises.
    """
    if listing.single:
        if not listing.single.endswith(SUFFIX):
            return None
        path = listing.path(listing.single)
        inner = list_source(TarPlace(path))
        found = _directory(inner)
        if found is None:
            raise IncompleteError(
                f"the tar holds no {MODEL_WEIGHTS} and no {RANK_FILE}",
                where=str(path),
                hint=f"it holds: {some([*inner.names, *(f'{n}/' for n in inner.folders())], 6) or 'nothing'}",
            )
        return found._replace(beside=listing) if "config.json" in listing.names else found
    return _directory(listing) or _run(listing)


def ranks(listing: Listing) -> dict[str, tuple[int, ...]]:
    """The directories of ranks in a save of NeMo 1 -> (tp,) or (tp, pp); "" is the save itself, of one rank."""
    if RANK_FILE in listing.names:
        return {"": (0,)}
    held = {n: m for n in listing.folders() if (m := _RANK.fullmatch(n)) and RANK_FILE in listing.inside(n).names}
    return {n: tuple([int(g) for g in m.groups() if g is not None]) for n, m in held.items()}


def _directory(listing: Listing) -> MegatronSave | None:
    """The save in one directory."""
    folders = listing.folders()
    if WEIGHTS in folders and _has_files(inner := listing.inside(WEIGHTS)):
        return MegatronSave(inner, listing, [])
    if listing.root.name == WEIGHTS and _has_files(listing) and _of_nemo2(listing):
        return MegatronSave(listing, list_source(listing.root.parent), [])
    if MODEL_WEIGHTS in folders and _has_files(inner := listing.inside(MODEL_WEIGHTS)):
        return MegatronSave(inner, listing, [])
    if listing.root.name == MODEL_WEIGHTS and _has_files(listing):
        above = list_source(listing.root.parent)
        return MegatronSave(listing, above if _CONFIG in above.names else listing, [])
    if ranks(listing):
        return MegatronSave(listing, listing, [])
    return None


def small_files(listing: Listing) -> tuple[Place, tuple[str, ...], list[str]] | None:
    """The small files, above all the tokenizer's, of the save in ``listing``: a directory, names below it, and notes
    about what is too large. None for a save of Megatron-LM.
    """
    if _RUN in listing.names:
        carried, notes = base.companions(listing, [_RUN, *_NOT_THE_MODELS])
        inner, more = base.companions(listing.inside(_TOKENIZER), [])
        return listing.root, (*carried, *(f"{_TOKENIZER}/{n}" for n in inner)), [*notes, *more]
    if listing.root.name == WEIGHTS and _of_nemo2(listing):
        above = list_source(listing.root.parent)
        context = above.inside(_CONTEXT)
        own, notes = base.companions(context, [_MODEL])
        inner, more = base.companions(context.inside(_NEMO_TOKENIZER), [])
        names = [n for n in own if n.endswith(_OF_TOKENIZERS)] + [f"{_NEMO_TOKENIZER}/{n}" for n in inner]
        return above.root, tuple([f"{_CONTEXT}/{n}" for n in names]), [*notes, *more]
    for place in (listing.root, listing.root.parent):
        if _is_own(place / _CONFIG):
            return place, *base.companions(list_source(place), [_CONFIG, *_NOT_THE_MODELS])
    return None


def progress(common: Mapping[str, Any], listing: Listing) -> dict[str, int]:
    """Progress of the training of NeMo or Bridge, under Megatron's names: from the values in common.pt, or beside
    it."""
    out: dict[str, Any] = {"iteration": common.get("global_step")}
    for value in common.values():  # the state of a data module, under the name of its class
        if isinstance(value, dict) and set(value) == {"consumed_samples"}:
            out["consumed_train_samples"] = value["consumed_samples"]
    if _STATE in listing.names:
        held = read_torch(listing.path(_STATE))
        with opened(held.info.place) as file:
            for key, value in held.value.items() if isinstance(held.value, dict) else ():
                if key in _COUNTED and isinstance(value, TorchTensor) and not value.shape:
                    out[_COUNTED[key]] = plain_value(value, file, held)
    return {k: v for k, v in out.items() if type(v) is int}


_STATE = "train_state.pt"
_COUNTED = {"step": "iteration", **{k: k for k in ("consumed_train_samples", "consumed_valid_samples")}}
"""Names in a file of Bridge -> Megatron's names."""


def refuse_adapters(names: Iterable[str], where: str) -> None:
    """Raises UnsupportedError for weights of an adapter: without its model, or not merged with it."""
    if found := next((n for n in names if _ADAPTER.search(n)), None):
        raise UnsupportedError(
            f"`{printable(found)}` belongs to an adapter (LoRA) of NeMo or Megatron Bridge, which is not read",
            where=where,
            hint="merge it with its model first: llm.peft.merge_lora of NeMo, examples/peft/merge_lora.py of Bridge",
        )


def _has_files(listing: Listing) -> bool:
    """Whether Megatron Core's dist_checkpointing wrote here."""
    return "common.pt" in listing.names and ("metadata.json" in listing.names or ".metadata" in listing.names)


def _of_nemo2(listing: Listing) -> bool:
    return (listing.root.parent / _CONTEXT / _MODEL).is_file()


def _run(listing: Listing) -> MegatronSave | None:
    """The save of a run that is the last one."""
    if _RUNS in listing.folders() and (found := _run(listing.inside(_RUNS))):
        return found
    held = {
        n: s for n in listing.folders()[:_MOST] if (_STEP.search(n) or n.endswith(_LAST)) and (s := _inside(listing, n))
    }
    held = {n: s for n, s in held.items() if n + _UNFINISHED not in listing.names}
    if not held:
        return None
    last = [n for n in held if n.endswith(_LAST)] or list(held)
    steps = {n: int(m[1]) if (m := _STEP.search(n)) else -1 for n in last}
    chosen = max(last, key=lambda n: steps[n])
    if sum(s == steps[chosen] for s in steps.values()) > 1:
        raise ConflictError(
            f"there are {len(held)} saves here, and it is unclear which one to read",
            where=str(listing.root),
            hint=f"give the directory of one: {some(list(held))}",
        )
    why = "the only save here" if len(held) == 1 else f"the last of {len(held)} saves"
    found = held[chosen]
    return found._replace(notes=[f"{printable(chosen, 120)} is read: {why}", *found.notes])


def _inside(listing: Listing, name: str) -> MegatronSave | None:
    inner = listing.inside(name)
    return _directory(inner) or (MegatronSave(inner, inner, []) if _has_files(inner) else None)


# -- the model's configuration


def arguments(listing: Listing) -> tuple[dict[str, Any], str]:
    """Megatron's arguments as NeMo or Bridge wrote them beside the files in ``listing``, and where; ({}, "") where
    they did not, or where they describe no language model.

    Raises CorruptError for a file that cannot be read, UnsupportedError for a model that Megatron's arguments do not
    describe.
    """
    here, above = listing.root, listing.root.parent
    for place, take in (
        (here / _RUN, _of_bridge),
        (above / _CONTEXT / _MODEL, _of_context),
        (here / _CONFIG, _of_model_config),
        (above / _CONFIG, _of_model_config),
        *([(above.parent / _HPARAMS, _of_hparams)] if above.name == _RUNS else []),
    ):
        if _is_own(place):
            args = take(load_yaml(place), str(place))
            return args, str(place) if args else ""
    return {}, ""


def find_arguments(listing: Listing, beside: Listing) -> tuple[dict[str, Any], str]:
    """The same; where a config.json in ``beside`` says all, a model that arguments do not describe is no error."""
    try:
        return arguments(listing)
    except UnsupportedError:
        if beside.json("config.json"):
            return {}, ""
        raise


def _is_own(place: Place) -> bool:
    """Whether a file is there, and no link out of its directory."""
    return place.is_file() and place.name in list_source(place.parent).names


_NEEDED = ("num_layers", "hidden_size", "num_attention_heads")
_RENAMED = {
    "num_moe_experts": "num_experts",
    "layernorm_epsilon": "norm_epsilon",
    "layernorm_zero_centered_gamma": "apply_layernorm_1p",
    "rotary_percentage": "rotary_percent",
    "bias": "add_bias_linear",
    "qkv_bias": "add_qkv_bias",
    "rope_scaling": "use_rope_scaling",
    "seq_len_interpolation_factor": "rotary_seq_len_interpolation_factor",
}
"""Fields of TransformerConfig, and of NeMo 1 -> arguments of Megatron-LM."""
_GATED = {"silu": "swiglu", "quick_gelu": "quick_geglu"}
_SCALING = {"low_freq_factor": 1, "high_freq_factor": 4, "old_context_len": 8192}
"""Scaling of Llama 3.1 in NeMo, as Megatron-LM assumes it."""
_ACTIVATIONS = {"swiglu": "silu", "fast-swiglu": "silu", "squared-relu": "squared_relu", "openai-gelu": "gelu"}
"""NeMo 1's words."""


def _of_bridge(data: Mapping[str, Any], where: str) -> dict[str, Any]:
    model = data.get("model")
    if not isinstance(model, dict):
        return {}
    inner = model.get("transformer")
    return _of_transformer({**(inner if isinstance(inner, dict) else {}), **model}, where)


def _of_context(data: Mapping[str, Any], where: str) -> dict[str, Any]:
    config = data.get("config")
    return _of_transformer(config, where) if isinstance(config, dict) else {}


def _of_hparams(data: Mapping[str, Any], where: str) -> dict[str, Any]:
    config = data.get("cfg")
    return _of_model_config(config, where) if isinstance(config, dict) else {}


def _of_model_config(data: Mapping[str, Any], where: str) -> dict[str, Any]:
    """NeMo 1: what MegatronGPTModel makes of its configuration."""
    config = {k: _resolved(v, data) for k, v in data.items()}
    said = config.get("activation", "gelu")
    activation = said if isinstance(said, str) else ""
    normalization = str(config.get("normalization", "layernorm")).lower()
    defaults = {
        "bias": True,
        "share_embeddings_and_output_weights": True,
        "position_embedding_type": "learned_absolute",
    }
    defaults |= {"max_position_embeddings": config.get("encoder_seq_length")}
    more = config.get("mcore_customization_config")
    return _of_transformer(
        {
            **defaults,
            **config,
            "gated_linear_unit": activation.endswith("glu"),
            "activation_func": _ACTIVATIONS.get(activation, activation),
            "normalization": "RMSNorm" if normalization == "rmsnorm" else "LayerNorm",
            "layernorm_zero_centered_gamma": normalization == "layernorm1p"
            or bool(config.get("layernorm_zero_centered_gamma")),
            **(more if isinstance(more, dict) else {}),
        },
        where,
    )


def _resolved(value: Any, data: Mapping[str, Any]) -> Any:
    """OmegaConf keeps references to other fields: ``${.encoder_seq_length}``; None for other expressions."""
    if not isinstance(value, str) or "${" not in value:
        return value
    m = re.fullmatch(r"\$\{\.?(?:model\.)?(\w+)\}", value)
    found = data.get(m[1]) if m else None
    return None if isinstance(found, str) and "${" in found else found


def _of_transformer(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The fields of Megatron Core's TransformerConfig and GPTModel."""
    if any(type(config.get(k)) is not int for k in _NEEDED):
        return {}
    args = {_RENAMED.get(k, k): v for k, v in config.items() if _is_plain(v)}
    args["num_experts"] = args.get("num_experts")
    args["untie_embeddings_and_output_weights"] = config.get("share_embeddings_and_output_weights") is False
    args["layernorm_zero_centered_gamma"] = args.get("apply_layernorm_1p")
    heads = args["num_attention_heads"]
    args["num_query_groups"] = args.get("num_query_groups") or heads
    args["group_query_attention"] = args["num_query_groups"] != heads
    args["kv_channels"] = args.get("kv_channels") or args["hidden_size"] // max(heads, 1)
    args["ffn_hidden_size"] = args.get("ffn_hidden_size") or 4 * args["hidden_size"]
    args["max_position_embeddings"] = args.get("max_position_embeddings") or args.get("seq_length")
    if isinstance(epsilon := args.get("norm_epsilon"), str):  # YAML takes 1e-5 for a word
        args["norm_epsilon"] = float(epsilon) if re.fullmatch(r"[\d.]+e-?\d{1,3}", epsilon) else None
    _add_activation(args, config, where)
    _add_scaling(args, config, where)
    return args


def _is_plain(value: Any) -> bool:
    items: Sequence[Any] = value if isinstance(value, list) else [value]
    return all(type(v) in (int, float, str, bool, type(None)) for v in items)


def _named(value: Any) -> str:
    """The dotted name of an object of Python; "" for anything else."""
    name = value.get("_target_") if isinstance(value, dict) else value
    return name if isinstance(name, str) else ""


def _add_activation(args: dict[str, Any], config: Mapping[str, Any], where: str) -> None:
    name = _named(config.get("activation_func")).rpartition(".")[2] or "gelu"
    args |= dict.fromkeys((*_GATED.values(), "squared_relu"), False)
    if config.get("gated_linear_unit"):
        if name not in _GATED:
            raise UnsupportedError(
                f"the activation of this model is a gated {printable(name, 40)}, which none of the models known has",
                where=where,
                hint="put the model's config.json beside the save",
            )
        args[_GATED[name]] = True
    elif name == "squared_relu":
        args[name] = True


def _add_scaling(args: dict[str, Any], config: Mapping[str, Any], where: str) -> None:
    """Llama 3.1: NeMo says four numbers, Megatron-LM one."""
    if "scale_factor" not in config or "low_freq_factor" not in config:
        return
    if other := [k for k, v in _SCALING.items() if config.get(k) != v]:
        raise UnsupportedError(
            f"the rotary embedding is scaled with {other[0]} {config.get(other[0])!s:.20}, which no argument of"
            " Megatron-LM says",
            where=where,
            hint="put the model's config.json beside the save",
        )
    args |= {"use_rope_scaling": True, "rope_scaling_factor": config["scale_factor"]}
