"""Names and shapes in the files that vLLM 0.33.0 wrote of tiny models, for the families that fixtures/vllm leaves out.

vLLM's own loader and ``save_sharded_state`` made ``golden/vllm.json`` from checkpoints of the listed names and shapes;
the scales of its attention cache are left out of it. What fixtures/vllm holds is compared element by element.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ckpttool.core.mesh import Mesh
from ckpttool.dialects.family import FamilyDialect
from ckpttool.layout.family import find_family, load_family
from ckpttool.layout.partition import Partitioner
from ckpttool.layout.rules import PartitionContext
from ckpttool.planning.relate import apply_transforms, identity
from tests.helpers.arrays import catalog_of

GOLDEN: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parent / "golden" / "vllm.json").read_text(encoding="utf-8")
)


@pytest.mark.parametrize("case", GOLDEN)
def test_the_last_rank_holds_what_vllm_gives_it(case: str) -> None:
    golden = GOLDEN[case]
    name = find_family(golden["config"])
    assert name is not None
    family = load_family(name, golden["config"])
    sizes = golden["sizes"]
    mesh = Mesh(**{**sizes, "etp": 1 if "ep" in sizes else sizes["tp"]})
    catalog, _ = catalog_of({n: tuple(s) for n, s in golden["source"].items()})
    ops = FamilyDialect("vllm").statements(family, staged=mesh.pp > 1)
    views = apply_transforms(identity(catalog), ops, family)
    cutting = PartitionContext(mesh, family.sizes, vocab_multiple=64)
    ranks = Partitioner(family, ops, cutting, golden["config"], tied=family.tied).run(list(views))
    assert {t.name: list(t.shape) for t in ranks[-1]} == golden["last_rank"]
