"""The indexes of a unified checkpoint: one for each component, and none that is only a map.

Quantized moments have the index that they had in float32; files that ranks wrote for themselves have no map, by which
Paddle's readers know them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from math import prod
from typing import Any

from ckpttool.containers.index import IndexRules, Settled, total_size, weight_map
from ckpttool.core.catalog import StoredTensor
from ckpttool.errors import CorruptError
from ckpttool.formats.paddle.config import config_dtype
from ckpttool.storage.listing import Listing

STEMS = {"model": "model", "peft_model": "adapter", "master_weights": "master_weights", "optimizer": "optimizer"}
"""Stem of the files -> component."""
_RANKED = re.compile(r"(?P<stem>\w+)\.(?:(?:tp|pp|shard|moe)\d{2,}_?)+\.safetensors(?:_shard_(?P<part>\d{4}))?\Z")
_CODED = re.compile(r"@(?:min_|max_)?scales\Z")


class UnifiedIndex(IndexRules):
    """The rules of Paddle's readers."""

    stems = STEMS
    runs = True
    indent = 4
    end = ""

    def of_rank(self, name: str) -> tuple[str, int]:
        m = _RANKED.match(name)
        return (m["stem"], int(m["part"] or 0)) if m and m["stem"] in STEMS else ("", 0)

    def stands_for(self, data: Mapping[str, Any]) -> bool:
        return bool(data.get("ckpt_quant_stage"))

    def choose(
        self,
        stem: str,
        several: Mapping[str, Sequence[str]],
        mapped: Mapping[str, str],
        tensors: Mapping[str, Sequence[StoredTensor]],
    ) -> dict[str, str]:
        """Sharding ranks hold runs of a tensor, or each has its own scalars. Paddle's readers do not mind which of the
        files an index names; Paddle names the last.
        """
        # Whole tensors of a save without runs have more than one axis somewhere.
        state = stem in ("optimizer", "master_weights")
        flat = state and all(len(t.shape) == 1 for held in tensors.values() for t in held)
        scalars = {t.name for held in tensors.values() for t in held if state and prod(t.shape) == 1}
        out = {}
        for name, held in several.items():
            if mapped.get(name) in held:
                out[name] = mapped[name]
            elif len(set(held)) == len(held) and (flat or name in scalars):
                out[name] = held[-1]
        return out

    def settle(
        self,
        listing: Listing,
        stem: str,
        old: Mapping[str, Any] | None,
        settled: Settled,
        files: Iterable[str],
        tensors: Mapping[str, Sequence[StoredTensor]],
    ) -> Settled:
        data = old or {}
        fields: dict[str, Any] = {}
        if stem == "peft_model" and old is None:
            fields["type"] = "ptuning" if "prefix_config.json" in listing.names else "lora"
        if stem != "optimizer":
            return settled._replace(fields=fields)
        notes = []
        if stage := _stage(settled.mapping):
            settled = _as_moments(settled, (t for n in files for t in tensors[n]), weight_map(data) or {})
            said = total_size(data)
            if self.stands_for(data) and isinstance(said, int):
                settled = settled._replace(total=said)
                notes.append(f"total_size {said:,} is of the moments before they were quantized; it stays as it is")
            elif not self.stands_for(data):
                fields["ckpt_quant_stage"] = stage
                notes.append(f"ckpt_quant_stage {stage}: by the names of the moments")
        if old is None:
            fields["quant_ckpt_resume_times"] = 0
        if "master_weights" not in data:
            fields["master_weights"] = _has_masters(listing, tensors)
        return settled._replace(fields=fields, notes=notes)

    def of_ranks(
        self, stem: str, old: Mapping[str, Any] | None, names: Collection[str], parts: int
    ) -> dict[str, Any] | None:
        if stem != "optimizer":
            return None
        stage = _stage(names)
        fresh = {**({"ckpt_quant_stage": stage} if stage else {}), "quant_ckpt_resume_times": 0}
        return {**(fresh if old is None else old), **({"optim_shard_num": parts} if parts else {})}

    def lacks(self, stem: str, data: Mapping[str, Any]) -> str:
        return "whether there are master_weights" if stem == "optimizer" and "master_weights" not in data else ""


def _stage(names: Iterable[str]) -> str:
    """Quantization of moments by their names: O2 packs both into one; "" where they are not."""
    there = set(names)
    coded = [n.partition("@")[0] for n in there if _CODED.search(n)]
    if not coded:
        return ""
    return "O1" if all(n.replace("moment2", "moment1") in there for n in coded) else "O2"


def _as_moments(settled: Settled, tensors: Iterable[StoredTensor], old: Collection[str]) -> Settled:
    """Map and total of quantized state: an index of Paddle's is that of the moments in float32.

    Scales are not in it, and moments that are packed into another tensor are.
    """
    coded = {n.partition("@")[0] for n in settled.mapping if _CODED.search(n)}
    out: dict[str, str] = {}
    size = 0
    shapes: dict[str, tuple[int, ...]] = {}
    for t in tensors:
        if t.name in coded:
            shapes[t.name] = t.shape
        elif "@" not in t.name:
            size += t.nbytes
    for name, file in settled.mapping.items():
        if "@" in name:
            if name in old:
                out[name] = file
            continue
        out[name] = file
        if name not in shapes:
            continue
        size += 4 * prod(shapes[name])
        first = name.replace("moment2", "moment1")
        if first not in settled.mapping:
            out[first] = file
            size += 4 * prod(shapes[name])
    return settled._replace(mapping=out, total=size)


def _has_masters(listing: Listing, tensors: Mapping[str, Sequence[StoredTensor]]) -> bool:
    """Whether there are master weights: files of their own, or a model in float32 that the config calls another."""
    if any(n.startswith(("master_weights-", "master_weights.")) for n in tensors):
        return True
    try:
        want = config_dtype(listing.json("config.json"))
    except CorruptError:
        return False
    model = [t for n, held in tensors.items() if n.startswith("model-") for t in held]
    return want in ("BF16", "F16") and bool(model) and all(t.dtype == "F32" for t in model)
