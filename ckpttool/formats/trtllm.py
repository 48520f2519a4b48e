"""TensorRT-LLM checkpoints: ``rank{N}.safetensors`` and a ``config.json`` with the mapping.

Source: TensorRT-LLM's checkpoint documentation and its models' convert functions. rank = pp_rank * tp_size + tp_rank;
layers are numbered from 0 in every pipeline stage; experts lie over the tp ranks as moe_tp x moe_ep with moe_ep the
fastest; q, k, v are fused per rank.
"""

from __future__ import annotations

from collections.abc import Mapping

from ckpttool.formats.base import (
    Listing,
    ReadOptions,
    Skeleton,
    StoredCheckpoint,
    WriteRequest,
    build_files,
    check_mesh,
    companions,
    contiguous_ranks,
    read_files,
)
from ckpttool.mesh import Mesh

_NAME = r"rank(?P<rank>\d+)\.safetensors"


class TensorRTLLM:
    """One file per rank."""

    name = "trtllm"
    about = "TensorRT-LLM checkpoints rank{N}.safetensors with config.json"
    sharded = True

    def detect(self, listing: Listing) -> bool:
        return not listing.single and bool(listing.match(_NAME)) and "mapping" in listing.json("config.json")

    def read(self, listing: Listing, options: ReadOptions) -> StoredCheckpoint:
        config = listing.json("config.json")
        mapping = config.get("mapping") or {}
        tp, pp = int(mapping.get("tp_size", 1)), int(mapping.get("pp_size", 1))
        ep = int(mapping.get("moe_ep_size", 1))
        etp = int(mapping.get("moe_tp_size", tp // max(ep, 1)))
        check_mesh("mapping in config.json", {"tp": tp, "pp": pp, "ep": ep, "etp": etp}, options, listing.root)
        mesh = Mesh(tp, pp, ep, etp, options.layout, experts="ep-etp")
        names = {int(m["rank"]): n for n, m in listing.match(_NAME)}
        contiguous_ranks(names, mesh.world, listing.root, "rank*.safetensors")
        files, tensors, metadata = read_files(listing, [(names[r], r) for r in range(mesh.world)])
        carried, notes = companions(listing, names.values())
        return StoredCheckpoint(
            self.name,
            listing.root,
            files,
            tensors,
            mesh,
            naming="trtllm",
            config=config,
            companions=carried,
            local_layers=True,
            notes=notes,
            metadata=metadata[0] if metadata else {},
        )

    def naming(self) -> str:
        return "trtllm"

    def target_mesh(self, asked: Mesh, said: Mapping[str, int]) -> Mesh:
        ep = asked.ep
        etp = said.get("etp", max(asked.tp // ep, 1))
        return Mesh(asked.tp, asked.pp, ep, etp, asked.layout, experts="ep-etp")

    def write(self, request: WriteRequest) -> Skeleton:
        groups = [(f"rank{r}.safetensors", r, request.ranks[r], None) for r in request.chosen]
        return build_files(groups, request.mesh.world)
