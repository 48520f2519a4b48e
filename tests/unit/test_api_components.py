"""The Python API on a checkpoint that holds more than model weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import ckpttool
from ckpttool.errors import CkptError, ConflictError, UsageError

ZCC = Path(__file__).parents[2] / "fixtures/paddle_zcc/ep2_tp2_sharding2_ema"


def test_every_name_of_every_component_can_be_read() -> None:
    source = ckpttool.open(ZCC)
    assert {source[n].key.component for n in source} == {"model", "master_weights", "optimizer", "ema"}
    assert all(n in source for n in source)
    name = "model.layers.1.self_attn.q_proj.weight"
    model, master = source.read(name), source.read(f"master_weights/{name}")
    assert np.array_equal(model, master.astype(model.dtype))
    assert np.array_equal(source.read(f"optimizer/{name}/moment1_0", (slice(3, 5), 2)).shape, (2, 1))
    assert "optimizer/nothing/moment1_0" not in source
    with pytest.raises(UsageError, match="no tensor"):
        source.read(f"ema/{name}/moment1_0")


def test_targets_have_the_options_of_the_command_line(tmp_path: Path) -> None:
    source = ckpttool.open(ZCC, tp=2, sharding=2)
    source.reshard(to="unified", tp=1, ep=1, only=["model"], target="paddlenlp-3.0").run(tmp_path / "a")
    source.reshard(to="hybrid", tp=1, ep=2, sharding=4, sharding_version="v2").run(tmp_path / "b", verify=True)
    source.reshard(to="hf", tp=1, ep=1, ema=True).run(tmp_path / "c", verify=True)
    assert [p.name for p in (tmp_path / "a").glob("*.safetensors")] == ["model-00001-of-00001.safetensors"]
    assert len(list((tmp_path / "b").glob("optimizer.*.pdopt"))) == 4


def test_flags_that_contradict_the_files() -> None:
    with pytest.raises(ConflictError, match="shared out over 2 ranks, not 4"):
        ckpttool.open(ZCC, sharding=4)
    with pytest.raises(UsageError, match="`also` names"):
        ckpttool.open(ZCC.parents[1] / "hf_tiny_source", also=[ZCC])


def test_merge_takes_the_betas(tmp_path: Path) -> None:
    """Shards with an optimizer of Paddle's, whose powers of the betas become steps."""
    source = ZCC.parent / "sharding2_v1"
    with pytest.raises(CkptError, match="does not say the betas of Adam"):
        ckpttool.merge(source, to="dcp")
    with pytest.raises(UsageError, match="pass two numbers"):
        ckpttool.merge(source, to="dcp", betas=(0.9, 2))
    ckpttool.merge(source, to="dcp", betas=(0.9, 0.999)).run(tmp_path / "run")
    found = ckpttool.open(tmp_path / "run")
    steps = {float(found.read(n)) for n in found if n.endswith("/step")}
    assert len(steps) == 1
    assert all(s > 0 and s == int(s) for s in steps)
