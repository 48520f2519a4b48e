"""GGUF, the files of llama.cpp: ``model.gguf``, or ``model-00001-of-00003.gguf`` and so on. Whole tensors.

Its keys say what the model is. Weights of Q8_0 are read as the float32 numbers that they stand for; llama.cpp stores
norms, biases and routers as float32. Sources: gguf-py (constants.py, tensor_mapping.py) and convert_hf_to_gguf.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ckpttool.containers.gguf import GgufFile, read_gguf
from ckpttool.core.catalog import StoredTensor
from ckpttool.core.encodings import Blocks8, Encoding, Span
from ckpttool.core.files import DataFile
from ckpttool.core.mesh import Mesh
from ckpttool.core.words import some
from ckpttool.errors import ConflictError, CorruptError, IncompleteError, UnsupportedError
from ckpttool.formats import base
from ckpttool.formats.config import config_fields, whole_number
from ckpttool.storage.listing import Listing

_SUFFIX = ".gguf"
_PART = re.compile(r"(?P<stem>.+)-(?P<part>\d{5})-of-(?P<total>\d{5})\.gguf")
_MODELS = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "qwen3moe": ("qwen3_moe", "Qwen3MoeForCausalLM"),
}
"""``general.architecture``: model_type and class of transformers."""
_MIXTRAL = ("mixtral", "MixtralForCausalLM")
"""A llama with experts."""
_FIELDS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
    "rope.freq_base": "rope_theta",
    "vocab_size": "vocab_size",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
"""Key, behind the architecture: field of config.json."""
_NEEDED = ("block_count", "embedding_length", "attention.head_count")
_HEADS_OF_OTHERS = frozenset({"qwen2", "qwen3", "qwen2_moe", "qwen3_moe"})
"""Models whose heads llama.cpp leaves as they are; those of `llama` have other rows."""
_EXPERTS = {"mixtral": "num_local_experts", "qwen3_moe": "num_experts"}
_EMBEDDING, _HEAD, _SCALED = "token_embd.weight", "output.weight", "rope_freqs.weight"


class Gguf:
    """Files of llama.cpp."""

    name = "gguf"
    capabilities = base.Capabilities(instead="--to hf, which llama.cpp's convert_hf_to_gguf.py reads")

    def detect(self, listing: Listing) -> int:
        if listing.single:
            return 2 * listing.single.endswith(_SUFFIX)
        models = [n for n in listing.names if n.endswith(_SUFFIX)]
        return 2 if models and not listing.safetensors() else 0

    def read(self, listing: Listing, options: base.ReadOptions) -> base.StoredCheckpoint:
        """Raises IncompleteError (a part is missing), ConflictError (several models, a tensor twice), and what reading
        a header raises.
        """
        base.check_mesh(self.name, dict.fromkeys(("tp", "pp", "ep", "etp"), 1), options, listing.root)
        names = _files(listing)
        carried, notes = ((), []) if listing.single else base.companions(listing, names)
        files = [read_gguf(listing.path(n)) for n in names]
        stored = base.StoredCheckpoint(self.name, listing.root, [], [], Mesh(), companions=carried, notes=notes)
        for file in files:
            _add(stored, file)
        _check_once(stored)
        keys = {k: v for f in reversed(files) for k, v in f.keys.items()}
        stored.dialect, stored.config = self._describe(stored, keys, listing.json("config.json"))
        return stored

    def _describe(
        self, stored: base.StoredCheckpoint, keys: Mapping[str, Any], beside: dict[str, Any]
    ) -> tuple[str, dict[str, Any]]:
        """(dialect, config.json)."""
        kind = keys.get("general.architecture")
        if not isinstance(kind, str) or kind not in _MODELS:
            shown = kind[:40] if isinstance(kind, str) else "nothing"
            stored.notes.append(f"names are kept: those of GGUF's architecture `{shown}` are not known")
            return "hf", beside
        shapes = {t.name: t.shape for t in stored.tensors}
        made = _config(keys, kind, shapes, str(stored.root))
        _check_blocks(shapes, made["num_hidden_layers"], str(stored.root))
        _check_heads(keys, kind, made, shapes, str(stored.root))
        if beside:
            _compare(beside, made, str(stored.root / "config.json"))
            return self.name, beside
        stored.notes.append(
            f"config.json is missing: generated one for {made['architectures'][0]} from the file's keys"
        )
        if _SCALED in shapes or any(k.startswith(f"{kind}.rope.scaling.") for k in keys):
            stored.notes.append("its rotary positions are scaled: put the model's rope_scaling into config.json")
        return self.name, made


def _files(listing: Listing) -> list[str]:
    """The files of the model, in order."""
    names = [listing.single] if listing.single else sorted(n for n in listing.names if n.endswith(_SUFFIX))
    parts = {n: m for n in names if (m := _PART.fullmatch(n))}
    if listing.single and parts:
        raise IncompleteError(
            "this is one part of a model",
            where=str(listing.path(listing.single)),
            hint=f"give the directory of its parts: {listing.root}",
        )
    sets = {(m["stem"], m["total"]) for m in parts.values()} | {(n, "") for n in names if n not in parts}
    if len(sets) > 1:
        raise ConflictError(
            f"there are {len(sets)} models here, and it is unclear which one to read",
            where=str(listing.root),
            hint=f"give the path of one: {some(sorted(stem for stem, _ in sets))}",
        )
    if parts:
        ((_, total),) = sets
        found = {int(m["part"]) for m in parts.values()}
        if lost := [i for i in range(1, int(total) + 1) if i not in found]:
            raise IncompleteError(
                f"{len(lost)} of {int(total)} parts are missing: {some(list(map(str, lost)))}",
                where=str(listing.root),
                hint="fetch the missing files",
                finding="rank-missing",
            )
    return names


def _add(stored: base.StoredCheckpoint, file: GgufFile) -> None:
    """The tensors of one file: as they are, or as what they are decoded to."""
    plain, coded = len(stored.files), len(stored.files) + 1
    encoding = Encoding("blocks", str(file.info.place))
    for t in file.tensors:
        at = t.offset
        if t.coded:
            at = encoding.size
            encoding.parts.append(Blocks8(at, Span(encoding.path, t.offset, t.nbytes)))
        stored.tensors.append(StoredTensor(t.name, t.dtype, t.shape, coded if t.coded else plain, at, 0))
    stored.files.append(file.info)
    if encoding.parts:
        stored.files.append(file.info._replace(encoding=encoding))
        stored.notes.append(f"{len(encoding.parts)} weights are Q8_0; they are written as the F32 they stand for")


def _check_once(stored: base.StoredCheckpoint) -> None:
    """Raises ConflictError for a tensor that is in two parts."""
    seen: dict[str, DataFile] = {}
    for t in stored.tensors:
        here = stored.files[t.file]
        if (other := seen.setdefault(t.name, here)).place != here.place:
            raise ConflictError(f"tensor `{t.name[:80]}` is in two files", where=[str(other.place), str(here.place)])


def _config(keys: Mapping[str, Any], kind: str, shapes: Mapping[str, Sequence[int]], where: str) -> dict[str, Any]:
    """config.json of a model that the keys describe. Raises IncompleteError for a key that is missing, CorruptError for
    one that is no number."""
    for name in (*_NEEDED, *(["expert_count"] if kind.endswith("moe") else [])):
        if f"{kind}.{name}" not in keys:
            raise IncompleteError(f"the file does not say `{kind}.{name}`", where=where, hint="convert the model again")
    experts = keys.get(f"{kind}.expert_count")
    model_type, architecture = _MIXTRAL if kind == "llama" and experts else _MODELS[kind]
    config: dict[str, Any] = {"architectures": [architecture], "model_type": model_type}
    for key, field in _FIELDS.items():
        value = keys.get(f"{kind}.{key}")
        if value is None:
            continue
        if type(value) not in (int, float) or value <= 0:
            raise CorruptError(f"`{kind}.{key}` is {value}, and this model needs one number there", where=where)
        config[field] = round(value, 12) if isinstance(value, float) else value
    if model_type in _EXPERTS:
        config[_EXPERTS[model_type]] = experts
    if model_type == "qwen3_moe":
        config["norm_topk_prob"] = True  # as llama.cpp computes it; transformers does not unless it is told
    if len(rows := shapes.get(_EMBEDDING, ())) == 2:
        config["vocab_size"] = rows[0]
    config.setdefault("num_key_value_heads", config["num_attention_heads"])
    config["tie_word_embeddings"] = _HEAD not in shapes
    if model_type == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in shapes
    return config


def _check_blocks(shapes: Mapping[str, Sequence[int]], layers: Any, where: str) -> None:
    """Raises IncompleteError for a layer of which no file has anything."""
    found = {n.split(".")[1] for n in shapes if n.startswith("blk.")}
    lost = [f"blk.{i}" for i in range(min(int(layers), 1 << 16)) if str(i) not in found]
    if lost:
        raise IncompleteError(
            f"the model has {int(layers)} layers, and of {len(lost)} there are no tensors: {some(lost)}",
            where=where,
            hint="fetch the file again, or convert the model again",
        )


def _check_heads(
    keys: Mapping[str, Any], kind: str, made: Mapping[str, Any], shapes: Mapping[str, Sequence[int]], where: str
) -> None:
    """Raises ConflictError where the width of a head is not that of the weights, UnsupportedError where only a part of
    a head turns, which these models do not do."""
    heads, groups = int(made["num_attention_heads"]), int(made["num_key_value_heads"])
    width = int(made.get("head_dim") or made["hidden_size"] // heads)
    for name, n in (("blk.0.attn_q.weight", heads), ("blk.0.attn_k.weight", groups)):
        rows = shapes.get(name, (n * width,))[0]
        if rows != n * width:
            raise ConflictError(
                f"`{name}` has {rows} rows, and the keys of the file say {n} heads of {width}",
                where=where,
                hint="convert the model again",
            )
    turned = keys.get(f"{kind}.rope.dimension_count")
    if type(turned) is int and turned != width:
        raise UnsupportedError(
            f"`{kind}.rope.dimension_count` is {turned}, and a head is {width} wide: {made['architectures'][0]} turns"
            " whole heads",
            where=where,
            hint="give the model's safetensors",
        )


def _compare(beside: Mapping[str, Any], made: Mapping[str, Any], where: str) -> None:
    """Raises ConflictError where config.json and the file give different sizes, by which rows are told apart, or models
    whose rows llama.cpp stores in different orders."""
    ours, theirs = str(config_fields(beside).get("model_type", "")), made["model_type"]
    alike = ours not in _HEADS_OF_OTHERS if theirs == "llama" else ours == theirs
    if ours and not alike:
        raise ConflictError(
            f"`model_type` of config.json is {ours[:40]}, and the GGUF file is of a {theirs}",
            where=where,
            hint="put the config.json of this model there, or remove it",
        )
    for field in ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads"):
        here, there = whole_number(beside, field), made.get(field)
        if here is not None and there is not None and here != there:
            raise ConflictError(
                f"`{field}` of config.json is {here}, and the GGUF file says {there}",
                where=where,
                hint="put the config.json of this model there, or remove it",
            )
