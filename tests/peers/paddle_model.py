"""A tiny Llama in training: what every reader has to find, whatever ckpttool made of the checkpoint.

``STATE`` holds whole tensors in Paddle's orientation ([in, out]; embeddings and lm_head [vocab, hidden]) under names
without the model's prefix. ``write_source`` saves it as paddlenlp 3.0.0b4 or paddleformers 1.2.0 does; ``cut`` is what
a rank holds of it.
"""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from tests.helpers.tensorfile import Raw, write

Bits = np.ndarray[Any, np.dtype[Any]]

HIDDEN, INTER, VOCAB, HEADS, KV_HEADS, LAYERS = 32, 48, 96, 4, 2, 4
STEP = 2
"""Steps that the scheduler has done."""
POWERS = ("beta1_pow_acc_0", "beta2_pow_acc_0")
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": HIDDEN,
    "initializer_range": 0.02,
    "intermediate_size": INTER,
    "max_position_embeddings": 64,
    "model_type": "llama",
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": KV_HEADS,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-06,
    "tie_word_embeddings": False,
    "vocab_size": VOCAB,
}


def shapes() -> dict[str, tuple[int, ...]]:
    """Of the parameters, in the model's order."""
    kv = HIDDEN // HEADS * KV_HEADS
    out: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (VOCAB, HIDDEN)}
    for n in range(LAYERS):
        sizes = {
            "self_attn.q_proj": (HIDDEN, HIDDEN),
            "self_attn.k_proj": (HIDDEN, kv),
            "self_attn.v_proj": (HIDDEN, kv),
            "self_attn.o_proj": (HIDDEN, HIDDEN),
            "mlp.gate_proj": (HIDDEN, INTER),
            "mlp.up_proj": (HIDDEN, INTER),
            "mlp.down_proj": (INTER, HIDDEN),
            "input_layernorm": (HIDDEN,),
            "post_attention_layernorm": (HIDDEN,),
        }
        out |= {f"layers.{n}.{k}.weight": v for k, v in sizes.items()}
    return out | {"norm.weight": (HIDDEN,), "lm_head.weight": (VOCAB, HIDDEN)}


def _state() -> dict[str, Bits]:
    rng = np.random.default_rng(20)
    out: dict[str, Bits] = {}
    for name, shape in shapes().items():
        master = rng.standard_normal(shape).astype(np.float32)
        out[f"master_weights/{name}"] = master
        out[f"model/{name}"] = master.astype(ml_dtypes.bfloat16).view(np.uint16)
        out[f"optimizer/{name}/moment1_0"] = rng.standard_normal(shape).astype(np.float32)
        out[f"optimizer/{name}/moment2_0"] = np.square(rng.standard_normal(shape)).astype(np.float32)
        for power, base in zip(POWERS, (0.9, 0.999), strict=True):
            out[f"optimizer/{name}/{power}"] = np.array([base**2], np.float32)
    return out


STATE = _state()
"""``model/NAME`` (the bits of bfloat16), ``master_weights/NAME`` and ``optimizer/NAME/STATE``."""


def bare(key: str) -> str:
    """The key without the prefix that the software gives to the model's names."""
    return re.sub(r"(?<=/)(?:model|llama)\.", "", key, count=1)


def parameter(key: str) -> str:
    """Of ``optimizer/NAME/STATE``: NAME."""
    return key.split("/")[1]


def is_power(key: str) -> bool:
    """One number for each parameter, never cut or turned."""
    return key.endswith(POWERS)


def write_source(folder: Path, software: str) -> Path:
    """The state as a unified checkpoint that one process of this software (a --target) saved."""
    newest = software == "paddleformers-1.2"
    prefix = "model." if newest else "llama."
    files: dict[str, dict[str, Raw]] = {"model": {}, "master_weights": {}, "optimizer": {}}
    for key, array in STATE.items():
        component, name = key.split("/", 1)
        head = name.startswith("lm_head.")
        linear = bool(COLUMN.search(name) or ROW.search(name)) and "_proj." in name
        turned = component == "model" and linear if newest else head
        stored = np.ascontiguousarray(array.T if turned and array.ndim == 2 else array)
        raw = Raw(("BF16" if newest else "U16") if component == "model" else "F32", stored.view(f"<u{stored.itemsize}"))
        files[component][name if head else prefix + name] = raw
    for stem, tensors in files.items():
        file = f"{stem}-00001-of-00001.safetensors"
        write(folder / file, tensors, {"format": "pt" if newest and stem == "model" else "np"})
        index: dict[str, Any] = {"metadata": {"total_size": sum(r.bits.nbytes for r in tensors.values())}}
        index["weight_map"] = dict.fromkeys(tensors, file)
        if stem == "optimizer":
            index["master_weights"] = True
        (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=4), encoding="utf-8")
    (folder / "scheduler.pdparams").write_bytes(pickle.dumps({"last_epoch": STEP, "last_lr": 0.001}, protocol=4))
    ours = {"paddleformers_version": "1.2.0", "torch_dtype": "bfloat16"}
    theirs = {"paddlenlp_version": "3.0.0b4", "dtype": "bfloat16"}
    config = CONFIG | (ours if newest else theirs)
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    return folder


COLUMN = re.compile(r"\.(?:q|k|v|gate|up)_proj\.weight")
ROW = re.compile(r"\.(?:o|down)_proj\.weight|embed_tokens\.|lm_head\.")


def cut(key: str, array: Bits, rank: int, tp: int) -> Bits:
    """What a tensor-parallel rank holds of a whole tensor; every rank has all of k and v where heads do not suffice."""
    if KV_HEADS % tp and re.search(r"\.[kv]_proj\.", key):
        return array
    axis = 1 if COLUMN.search(key) else 0 if ROW.search(key) else None
    if tp == 1 or axis is None or is_power(key):
        return array
    return np.split(array, tp, axis)[rank]


def upright(key: str, array: Bits, width: int) -> Bits:
    """``lm_head`` as [vocab, hidden], however this software keeps it; ``width`` is its longer side here."""
    turned = "/lm_head." in key and array.ndim == 2 and array.shape[1] == width
    return array.T if turned else array


def joined(pieces: Sequence[Mapping[str, Bits]], key: str, shape: tuple[int, ...], version: str) -> Bits:
    """A tensor of which sharding ranks hold parts: one has it whole (v1), or each has a slice, padded (v2)."""
    parts = [p[key] for p in pieces if key in p]
    if is_power(key) or version == "v1":
        assert parts, key
        assert all(np.array_equal(p, parts[0]) for p in parts), key
        return parts[0].reshape(shape)
    flat = np.concatenate([p.reshape(-1) for p in parts])
    size = int(np.prod(shape))
    assert not flat[size:].any(), key
    return flat[:size].reshape(shape)
