"""megatron-core goes on from what --to megatron wrote: parameters, masters, moments and steps are the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.command import reshard
from tests.peers.megatron_ranks import Case, make, resume
from tests.peers.megatron_tiny import TOKENS, config, same
from tests.peers.rank_group import Group

pytestmark = pytest.mark.usefixtures("megatron")
QWEN2 = {"model_type": "qwen2", "tie_word_embeddings": True}
EXPERTS = {
    "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 28,
    "num_hidden_layers": 2,
}  # fmt: skip
MESHES = [
    # Between Transformer Engine's names and the local spec's, to interleaved stages, and to more ranks of data.
    ({}, {"tp": 2, "te": True}, 2, {"pp": 2, "vp": 2}, 2, ("--pp-layout", "1,1,1,1", "--target", "local")),
    ({}, {"pp": 2}, 2, {"tp": 2, "te": True}, 4, ("--target", "transformer_engine")),
    (QWEN2, {"tp": 2, "te": True}, 2, {"tp": 2, "pp": 2, "te": True}, 4, ()),
    (EXPERTS, {"ep": 2, "te": True}, 2, {"tp": 2, "ep": 2, "etp": 1, "te": True}, 2, ()),
    (EXPERTS, {"tp": 2, "ep": 2, "etp": 1}, 2, {"pp": 2, "te": True}, 2, ("--target", "transformer_engine")),
]


@pytest.mark.parametrize(("fields", "first", "n", "second", "m", "flags"), MESHES, ids=lambda v: str(v)[:40])
def test_a_run_goes_on_in_another_mesh(
    fields: dict[str, Any],
    first: dict[str, Any],
    n: int,
    second: dict[str, Any],
    m: int,
    flags: tuple[str, ...],
    ranks: Callable[[int], Group],
    tmp_path: Path,
) -> None:
    case = Case(config(tmp_path / "model", **fields), dtype="bfloat16", optimizer="distributed")
    _, want = ranks(n).run(make, replace(case, **first), TOKENS, str(tmp_path / "save"), "legacy", steps=2)
    other = replace(case, **second)
    mesh = ["--tp-out", other.tp, "--pp-out", other.pp]
    mesh += ["--ep-out", other.ep, "--etp-out", other.etp or other.tp] if fields is EXPERTS else []
    reshard(tmp_path / "save", tmp_path / "out", "--to", "megatron", *mesh, *flags, "--verify", "-q")
    got, after = ranks(m).run(resume, other, str(tmp_path / "out"), TOKENS, 1)
    tied = {k for k in got.keys() ^ want.keys() if "output_layer" in k and fields is QWEN2}
    same({k: t for k, t in got.items() if k not in tied}, {k: t for k, t in want.items() if k not in tied})
    assert not any(torch.equal(after[k], want[k]) for k in want if "exp_avg" in k and "norm" in k)
