"""Where a merged checkpoint comes from: the record beside it."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckpttool.core.plan import Compute, Plan
from ckpttool.execute.hashing import ALGORITHM, hasher
from ckpttool.version import __version__

RECORD = "ckpttool.merge.json"
PROGRAM_RECORD = "ckpttool-merge.json"
"""Beside a Paddle program: ``ckpttool.merge.json`` would be a function of one that is called ``ckpt.json``, because
paddle.jit.load takes every ``PREFIX*.NAME.json`` for one."""
ONE = "one checkpoint"
"""What a merge of a single source is called."""
SCHEMA = "ckpttool.provenance/1"
PACKAGES = ("numpy", "ml_dtypes")
"""Packages on whose arithmetic the values depend."""


@dataclass(slots=True)
class Origin:
    """One source of a merge."""

    label: str
    """The model and its adapters, as a recipe names them."""
    path: str
    format: str
    files: Sequence[tuple[str, int]]
    """(name, bytes)"""
    tensors: int
    adapters: Sequence[tuple[str, str]] = ()
    """(path, hash of its weights)"""
    derived: tuple[int, str] = (0, "")
    """(tensors, dtype): model weights that are rounded elements of that dtype, and stored nowhere by themselves."""


@dataclass(slots=True)
class Provenance:
    """What is known when the plan is made; the hashes of the payload come with the last byte."""

    recipe: Mapping[str, Any]
    text: str
    """The recipe as it was written, "" for flags."""
    seed: int | None
    """None for methods that draw nothing."""
    rng: str
    origins: Sequence[Origin]
    operands: Mapping[str, Sequence[tuple[str, str]]] = field(default_factory=dict)
    """Name of a computed tensor -> (label of the source, tensor there) of each operand."""
    component: str = "model"
    """What was merged."""
    format: str = ""
    """Format of the output."""

    def record(self, plan: Plan, digests: Mapping[str, str]) -> bytes:
        """The record as JSON. ``digests`` are the operands' hashes by the keys of ``operand_keys``."""
        hashes = self.hashes(plan, digests)
        sources = []
        for o in self.origins:
            count, stored = o.derived
            sources.append(
                {
                    "path": o.path,
                    "format": o.format,
                    "files": [{"name": n, "bytes": size} for n, size in o.files],
                    "tensors": o.tensors,
                    "tensors_hashed": hashes[o.label][0],
                    "hash": hashes[o.label][1],
                    "adapters": [{"path": p, "hash": d} for p, d in o.adapters],
                    "derived": {"tensors": count, "from": "master_weights", "stored": stored} if count else None,
                }
            )
        data = {
            "schema": SCHEMA,
            "ckpttool": __version__,
            "packages": {p: importlib.metadata.version(p) for p in PACKAGES},
            "recipe": self.recipe,
            "recipe_text": self.text,
            "seed": self.seed,
            "rng": self.rng,
            "format": self.format,
            "component": self.component,
            "sources": sources,
        }
        return (json.dumps(data, indent=2, ensure_ascii=False, default=str) + "\n").encode(errors="backslashreplace")

    def hashes(self, plan: Plan, digests: Mapping[str, str]) -> dict[str, tuple[int, str]]:
        """The number of hashed tensors and their hash, by the label of each source.

        It is that of the sorted lines ``<tensor> <hash>``, where a tensor's hash is the one that ``inspect --hash``
        shows: it does not depend on how the source is stored.
        """
        found: dict[str, dict[str, str]] = {o.label: {} for o in self.origins}
        for u, unit in enumerate(plan.units):
            for i, step in enumerate(unit.steps):
                if not isinstance(step, Compute):
                    continue
                for k, (label, name) in enumerate(self.operands.get(step.name, ())):
                    if digest := digests.get(f"{u}:{i}:{k}"):
                        found[label][name] = digest
        out = {}
        for label, tensors in found.items():
            h = hasher()
            for name, digest in sorted(tensors.items()):
                h.update(f"{name} {digest}\n".encode(errors="surrogateescape"))
            out[label] = len(tensors), f"{ALGORITHM}:{h.hexdigest()}"
        return out
