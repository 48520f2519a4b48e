"""Rotary positions: Megatron's arguments and Hugging Face's ``rope_theta`` and ``rope_scaling``.

Sources: megatron/core/models/common/embeddings (rotary_pos_embedding.py, yarn_rotary_pos_embedding.py) and
transformer/multi_latent_attention.py of Megatron Core 0.16; modeling_rope_utils.py of transformers 5.
"""

from __future__ import annotations

from math import log
from typing import Any

from ckpttool.errors import UnsupportedError
from ckpttool.formats.megatron.fields import Fields

LLAMA3: dict[str, Any] = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""The fields of Llama 3.1's scaling that --use-rope-scaling fixes: no argument changes them."""
YARN = {"beta_fast": 32.0, "beta_slow": 1.0}
_BASE = 10_000


def rope_of(args: Fields, *, latent: bool = False, partial: bool = False) -> dict[str, Any]:
    """``rope_theta``, ``rope_scaling`` and ``partial_rotary_factor`` of a model with rotary positions.

    ``latent``: its attention is multi-latent. ``partial``: Hugging Face's code can turn a part of each head.
    """
    share = 1.0 if (said := args.number("rotary_percent")) is None else said
    if share != 1.0 and not partial:
        raise args.no("rotary_percent", "Hugging Face's code of such a model turns all of each head")
    base = args.number("rotary_base")
    out: dict[str, Any] = {"rope_theta": float(_BASE if base is None else base)}
    if partial:
        out["partial_rotary_factor"] = share
    scaling = _latent_scaling(args) if latent else _scaling(args)
    return out | ({"rope_scaling": scaling} if scaling else {})


def is_rotary(args: Fields) -> bool:
    """Whether positions are rotary. Raises IncompleteError where nothing says it, UnsupportedError for other kinds."""
    said = args.text("position_embedding_type")
    if said is None:
        if args.flag("use_rotary_position_embeddings"):
            return True
        raise args.missing("position_embedding_type")
    if said in ("rope", "yarn"):
        return True
    if said == "learned_absolute":
        return args.flag("use_rotary_position_embeddings")
    raise args.no("position_embedding_type", "such positions have no counterpart in Hugging Face's code")


def _scaling(args: Fields) -> dict[str, Any]:
    """``rope_scaling``; {} where there is none."""
    stretch = args.number("rotary_seq_len_interpolation_factor")
    if args.text("position_embedding_type") == "yarn":
        if stretch not in (None, 1.0):
            raise args.no("rotary_seq_len_interpolation_factor", "it cannot be had together with YaRN")
        for name in ("rotary_scaling_factor", "yarn_original_max_position_embeddings"):
            if name not in args.values:  # None is Megatron's default; what is put into its config by hand is nowhere
                raise args.missing(name)
        first = args.whole("yarn_original_max_position_embeddings", least=1)
        return _yarn(args, args.number("rotary_scaling_factor"), first or 4096, "yarn_")
    if args.flag("use_rope_scaling"):
        if stretch not in (None, 1.0):
            raise args.no("rotary_seq_len_interpolation_factor", "it cannot be had together with use_rope_scaling")
        factor = args.number("rope_scaling_factor")
        return {"rope_type": "llama3", "factor": 8.0 if factor is None else factor, **LLAMA3}
    if stretch not in (None, 1.0):
        return {"rope_type": "linear", "factor": stretch}
    return {}


def _latent_scaling(args: Fields) -> dict[str, Any]:
    """The same of multi-latent attention, which knows YaRN (its default) and nothing else."""
    kind, factor = args.text("rope_type") or "yarn", args.number("rotary_scaling_factor")
    if kind not in ("rope", "yarn"):
        raise args.no("rope_type", "such positions have no counterpart in Hugging Face's code")
    if kind == "rope":
        if args.number("mscale_all_dim") and (factor is None or factor > 1):
            raise args.no("mscale_all_dim", "Hugging Face's code scales the softmax with YaRN only")
        return {}
    if factor is None:
        raise args.missing("rotary_scaling_factor")
    if factor <= 1:
        return {}
    first = args.whole("original_max_position_embeddings", least=1)
    if first is None:  # Megatron before 0.13 took max_position_embeddings for it
        raise args.missing("original_max_position_embeddings")
    return _yarn(args, factor, first, "")


def _yarn(args: Fields, factor: float | None, first: int, prefix: str) -> dict[str, Any]:
    """YaRN of a model that was trained for ``first`` positions; ``prefix`` of the arguments that are its own."""
    factor = 1.0 if factor is None else factor
    out: dict[str, Any] = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": first}
    for name, default in YARN.items():
        got = args.number(prefix + name)
        out[name] = default if got is None else got
    if not args.flag("yarn_correction_range_round_to_int", default=True):
        out["truncate"] = False
    mscale, all_dim = (args.number(n) for n in ("mscale", "mscale_all_dim"))
    mscale, all_dim = 1.0 if mscale is None else mscale, all_dim or 0.0
    if mscale and all_dim:
        out |= {"mscale": mscale, "mscale_all_dim": all_dim}
    elif mscale != 1.0 or all_dim:
        # Hugging Face's code takes 1 for a scale of 0 here, but not where it scales the softmax.
        out |= {"attention_factor": _mscale(factor, mscale) / _mscale(factor, all_dim), "mscale_all_dim": all_dim}
    return out


def _mscale(factor: float, by: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * by * log(factor) + 1.0


def rope_args(config: Fields, *, latent: bool = False, default_share: float = 1.0) -> dict[str, Any]:
    """Megatron's arguments for the rotary positions of a config.json, in either of the forms that transformers knows.

    ``default_share``: the partial rotary factor of a config that has none. Raises UnsupportedError for positions that
    Megatron does not compute.
    """
    new, old = config.inner("rope_parameters"), config.inner("rope_scaling")
    scaling = new if new.values else old
    theta = next((t for f in (new, config) for n in ("rope_theta", "rotary_emb_base") if (t := f.number(n))), 10_000.0)
    names = ("partial_rotary_factor", "rotary_pct")
    share = next((s for c in (new, config) for n in names if (s := c.number(n)) is not None), default_share)
    kind = scaling.text("rope_type") or scaling.text("type") or "default"
    out: dict[str, Any] = {
        "position_embedding_type": "rope",
        "use_rotary_position_embeddings": True,
        "add_position_embedding": True,
        "rotary_base": int(theta) if theta.is_integer() else theta,
        "rotary_percent": share,
        "rotary_interleaved": False,
        "rotary_seq_len_interpolation_factor": None,
        "use_rope_scaling": False,
    }
    if latent:
        return out | _latent_args(scaling, kind)
    if kind == "default":
        return out
    factor = scaling.number("factor")
    if kind == "linear" and factor:
        if not factor.is_integer():
            raise scaling.no("factor", "Megatron stretches positions by whole numbers")
        return out | {"rotary_seq_len_interpolation_factor": int(factor)}
    if kind == "llama3":
        wrong = next((n for n, v in LLAMA3.items() if scaling.number(n) != v), None)
        if wrong:
            raise scaling.no(wrong, f"Megatron has {LLAMA3[wrong]} only")
        return out | {"use_rope_scaling": True, "rope_scaling_factor": factor or 8.0}
    if kind == "yarn":
        own = _yarn_args(scaling, "yarn_")
        # Megatron takes the older argument for `rope`, whatever the newer one says.
        return out | own | {"position_embedding_type": "yarn", "use_rotary_position_embeddings": False}
    raise UnsupportedError(f"Megatron has no rotary positions of the kind `{kind}`")


def _latent_args(scaling: Fields, kind: str) -> dict[str, Any]:
    if kind == "default":
        plain = {"rope_type": "rope", "rotary_scaling_factor": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0}
        return {**plain, "apply_rope_fusion": False}  # Megatron's kernel of latent attention is for YaRN only
    if kind != "yarn":
        raise UnsupportedError(f"Megatron's multi-latent attention has no rotary positions of the kind `{kind}`")
    return {"rope_type": "yarn", **_yarn_args(scaling, "")}


def _yarn_args(scaling: Fields, prefix: str) -> dict[str, Any]:
    factor, first = scaling.number("factor"), scaling.size("original_max_position_embeddings")
    if factor is None:
        raise scaling.missing("factor")
    out: dict[str, Any] = {"rotary_scaling_factor": factor, f"{prefix}original_max_position_embeddings": first}
    for name, default in YARN.items():
        out[prefix + name] = scaling.number(name) or default
    mscale, all_dim, given = (scaling.number(n) or 0.0 for n in ("mscale", "mscale_all_dim", "attention_factor"))
    if given and abs(given - _mscale(factor, 1.0)) > 1e-9:
        mscale = (given * _mscale(factor, all_dim) - 1.0) / (0.1 * log(factor)) if factor > 1 else 1.0
    elif not (mscale and all_dim):
        if all_dim:
            raise scaling.no("mscale_all_dim", "Megatron scales with it where Hugging Face's code does not")
        mscale = 1.0
    out |= {"mscale": mscale, "mscale_all_dim": all_dim}
    truncate = scaling.flag("truncate", default=True)
    if prefix:
        out["yarn_correction_range_round_to_int"] = truncate
    elif not truncate:
        raise scaling.no("truncate", "Megatron's multi-latent attention rounds the range of YaRN")
    return out
