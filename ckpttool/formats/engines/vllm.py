"""vLLM sharded state: ``model-rank-{rank}-part-{part}.safetensors``, the runtime tensors of every rank.

Source: vllm/model_executor/model_loader/sharded_state_loader.py (0.33). q, k, v and gate, up are fused per rank,
key/value heads are copied when tp exceeds them, the vocabulary is padded with zeros to a multiple of 64. Tensors fill
parts in model order; a part is closed when the next tensor would push it over the limit (default: 5 GB).
Since 0.16 every attention layer also has four F32 scalars (scales of its cache, 1.0 unless calibrated) without which
loading fails; they are written as one part of their own, since parts may be split in any way, and left out on reading.
With pipeline parallelism people pass the pattern ``model-pp-{pp}-tp-{tp}-part-{part}.safetensors``; both are read.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from ckpttool.containers.safetensors import layout_file
from ckpttool.core.catalog import RankTensor, StoredTensor
from ckpttool.core.mesh import Mesh
from ckpttool.errors import ConflictError, IncompleteError, UsageError
from ckpttool.formats import base
from ckpttool.formats.config import EXPERTS, whole_number
from ckpttool.storage.listing import Listing

_PLAIN = r"model-rank-(?P<rank>\d+)-part-(?P<part>\d+)\.safetensors"
_STAGED = r"model-pp-?(?P<pp>\d+)-tp-?(?P<tp>\d+)-part-(?P<part>\d+)\.safetensors"
PART_LIMIT = 5 * 10**9
"""Bytes; vLLM's default max_size is 5 GB."""
VOCAB_MULTIPLE = 64
"""DEFAULT_VOCAB_PADDING_SIZE."""

_CACHE_SCALES = ("._k_scale", "._v_scale", "._q_scale", "._prob_scale")
_ATTENTION = (
    (re.compile(r"(.*)\.(?:qkv_proj|c_attn|query_key_value)\.weight\Z"), "attn"),
    (re.compile(r"(.*)\.kv_b_proj\.weight\Z"), "mla_attn.mla_attn"),
)
"""(the one tensor that every attention module of a kind has, where that kind keeps its cache)."""


class VLLM:
    """One or more parts per rank."""

    name = "vllm"
    dialect = "vllm"
    capabilities = base.Capabilities(
        meshes="tp x pp; ep 1 or ep = tp", vocab_multiple=VOCAB_MULTIPLE, shards=True, refused=("unfuse",)
    )

    def detect(self, listing: Listing) -> int:
        return 2 if not listing.single and (listing.match(_PLAIN) or listing.match(_STAGED)) else 0

    def read(self, listing: Listing, options: base.ReadOptions) -> base.StoredCheckpoint:
        found = [(n, {k: int(v) for k, v in m.groupdict().items()}) for n, m in listing.match(_PLAIN)]
        if found:
            world = 1 + max(c["rank"] for _, c in found)
            said = options.from_flags()
            pp = said.get("pp", 1)
            if world % pp:
                raise ConflictError(f"{world} ranks cannot be {pp} pipeline stages", where=str(listing.root))
            sizes = {"tp": world // pp, "pp": pp}
        else:
            found = [(n, {k: int(v) for k, v in m.groupdict().items()}) for n, m in listing.match(_STAGED)]
            if not found:
                raise IncompleteError("there are no vLLM rank files here", where=str(listing.root))
            sizes = {"tp": 1 + max(c["tp"] for _, c in found), "pp": 1 + max(c["pp"] for _, c in found)}
            for _, c in found:
                c["rank"] = c["pp"] * sizes["tp"] + c["tp"]
        base.check_mesh("its rank files", sizes, options, listing.root)
        parts: dict[int, dict[int, str]] = {}
        for n, c in found:
            parts.setdefault(c["rank"], {})[c["part"]] = n
        base.contiguous_ranks(parts, sizes["tp"] * sizes["pp"], listing.root, "model-rank-*-part-*.safetensors")
        for r, have in parts.items():
            gap = next((i for i in range(len(have)) if i not in have), None)
            if gap is not None:
                raise IncompleteError(f"part {gap} of rank {r} is missing", where=str(listing.root))
        named = [(parts[r][p], r) for r in sorted(parts) for p in sorted(parts[r])]
        stored = base.read_files(self.name, listing, named, Mesh())
        stored.dialect = "vllm"
        if scales := sum(t.name.endswith(_CACHE_SCALES) for t in stored.tensors):
            stored.notes.append(f"{scales} scales of vLLM's attention cache are left out: they belong to its runtime")
        # Before 0.24 the stacked experts were not a module of their own.
        stored.tensors = [
            t._replace(name=re.sub(r"\.experts\.(w13_|w2_)", r".experts.routed_experts.\1", t.name))
            for t in stored.tensors
            if not t.name.endswith(_CACHE_SCALES)
        ]
        ep = options.ep or _expert_ranks(stored.tensors, stored.config, sizes["tp"])
        if ep > 1 and options.ep is None:
            stored.notes.append(f"ep {ep}: the ranks hold whole experts")
        stored.mesh = Mesh(sizes["tp"], sizes["pp"], ep, options.etp or (1 if ep > 1 else sizes["tp"]), options.layout)
        return stored

    def target_mesh(self, asked: Mesh, said: Mapping[str, int]) -> Mesh:
        etp = 1 if asked.ep > 1 else asked.tp
        if asked.ep not in (1, asked.tp) or said.get("etp", etp) != etp:
            option, n = ("etp", said["etp"]) if asked.ep in (1, asked.tp) else ("ep", asked.ep)
            raise UsageError(
                f"--{option}-out {n} is not possible for --to vllm with tp {asked.tp}"
                + (f", ep {asked.ep}" if option == "etp" else ""),
                hint=f"--ep-out {asked.tp} puts whole experts on the tp ranks, --ep-out 1 a share of each"
                if asked.tp > 1
                else "with tp 1 only --ep-out 1 is possible",
            )
        return Mesh(asked.tp, asked.pp, asked.ep, etp, asked.layout)

    def write(self, request: base.WriteRequest) -> base.FileLayout:
        limit = request.max_shard_size or PART_LIMIT
        groups = []
        scales = []
        for r in request.chosen:
            at = request.mesh.coords(r)
            stem = f"model-rank-{r}" if request.mesh.pp == 1 else f"model-pp-{at.pp}-tp-{r % request.mesh.width}"
            parts = base.fill_files(request.ranks[r], limit)
            groups += [(f"{stem}-part-{p}.safetensors", r, part, None) for p, part in enumerate(parts)]
            scales.append((f"{stem}-part-{len(parts)}.safetensors", _cache_scales(request.ranks[r])))
        file_layout = base.build_files(groups, request.mesh.world)
        for r, (name, data) in zip(request.chosen, scales, strict=True):
            if data:
                file_layout.rank_files[r].append(len(file_layout.files))
                file_layout.files.append(base.OutFile(name, len(data), ((0, data),)))
        if not request.complete:
            return file_layout
        mesh = request.mesh
        stages = f" -pp {mesh.pp}" if mesh.pp > 1 else ""
        experts = " --enable-expert-parallel" if mesh.ep > 1 else ""
        return file_layout._replace(
            usage=f"vllm serve {{dst}} --load-format sharded_state -tp {mesh.width}{stages}{experts}"
        )


def _expert_ranks(tensors: Sequence[StoredTensor], config: Mapping[str, Any], tp: int) -> int:
    """Expert-parallel ranks, which nothing records: the ranks' experts are counted and compared with the config's."""
    stacked = {t.rank: t.shape[0] for t in tensors if t.name.endswith(".w13_weight") and t.shape}
    total = whole_number(config, *EXPERTS)
    return tp if tp > 1 and stacked and total and max(stacked.values()) < total else 1


def _cache_scales(tensors: Sequence[RankTensor]) -> bytes:
    """A safetensors file with the cache scales of a rank's attention layers, or b"" when it has none."""
    caches = [f"{m[1]}.{inner}" for t in tensors for regex, inner in _ATTENTION if (m := regex.match(t.name))]
    names = [cache + s for cache in dict.fromkeys(caches) for s in _CACHE_SCALES]
    if not names:
        return b""
    header, _, size = layout_file([(n, "F32", ()) for n in names], None)
    return header + struct.pack("<f", 1.0) * ((size - len(header)) // 4)
