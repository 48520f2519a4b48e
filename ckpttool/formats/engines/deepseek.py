"""DeepSeek's inference files: ``model{rank}-mp{n}.safetensors``, native names, no metadata, no config.

Source: inference/convert.py of DeepSeek-V3 (9b4e978). tp = ep = n: dense tensors are cut n ways, routed experts go
whole to the rank ``id // (experts / n)`` under their global id, nothing is padded, layers from num_hidden_layers on
(MTP) are left out, and companion files are those with ``token`` in their name. config.json is carried along too: the
original does not write one, but the way back needs the number of heads.
"""

from __future__ import annotations

from collections.abc import Mapping

from ckpttool.core.mesh import Mesh
from ckpttool.errors import ConflictError, IncompleteError, UsageError
from ckpttool.formats import base
from ckpttool.storage.listing import Listing

_NAME = r"model(?P<rank>\d+)-mp(?P<world>\d+)\.safetensors"


class DeepSeek:
    """One file per model-parallel rank."""

    name = "deepseek"
    dialect = "deepseek"
    capabilities = base.Capabilities(meshes="tp = ep", pad_vocab=False, refused=("fuse", "unfuse"))

    def detect(self, listing: Listing) -> int:
        return 2 if not listing.single and listing.match(_NAME) else 0

    def read(self, listing: Listing, options: base.ReadOptions) -> base.StoredCheckpoint:
        found = listing.match(_NAME)
        worlds = sorted({int(m["world"]) for _, m in found})
        if len(worlds) > 1:
            wanted = options.tp
            if wanted not in worlds:
                raise ConflictError(
                    f"files of mp {', '.join(map(str, worlds))} lie in one directory",
                    where=str(listing.root),
                    hint="choose one with --tp",
                )
            worlds = [wanted]
        if not worlds:
            raise IncompleteError(
                "there are no DeepSeek files model{rank}-mp{n}.safetensors here", where=str(listing.root)
            )
        n = worlds[0]
        names = {int(m["rank"]): name for name, m in found if int(m["world"]) == n}
        base.contiguous_ranks(names, n, listing.root, f"model*-mp{n}.safetensors")
        base.check_mesh(f"mp{n} in the file names", {"tp": n, "pp": 1, "ep": n, "etp": 1}, options, listing.root)
        stored = base.read_files(self.name, listing, [(names[r], r) for r in range(n)], Mesh(tp=n, ep=n))
        stored.dialect = stored.family = "deepseek"
        return stored

    def target_mesh(self, asked: Mesh, said: Mapping[str, int]) -> Mesh:
        for k, v in said.items():
            if k != "tp" and v != (asked.tp if k == "ep" else 1):
                raise UsageError(
                    f"--{k}-out {v} is not possible for --to deepseek",
                    hint="its ranks are tp = ep: --tp-out alone decides",
                )
        return Mesh(tp=asked.tp, ep=asked.tp)

    def write(self, request: base.WriteRequest) -> base.FileLayout:
        n = request.mesh.tp
        groups = [(f"model{r}-mp{n}.safetensors", r, request.ranks[r], None) for r in request.chosen]
        file_layout = base.build_files(groups, n)
        if not request.complete:
            return file_layout
        return file_layout._replace(
            usage=f"torchrun --nproc-per-node {n} generate.py --ckpt-path {{dst}} --config CONFIG --interactive"
        )
