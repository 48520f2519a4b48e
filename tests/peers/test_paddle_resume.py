"""Trainers of paddlenlp and paddleformers resume from what ckpttool writes, and hold every bit of the source.

The loading code is theirs; ``paddle_software`` says what is replaced because there is no GPU. More than two ranks would
work, but share the processors with other tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.peers import paddle_model, paddle_side
from tests.peers.paddle_model import STATE, bare, cut, is_power, joined, upright
from tests.peers.paddle_side import Bits
from tests.peers.tool import reshard

FIXTURES = Path(__file__).parents[2] / "fixtures" / "paddle_zcc"
NLP, OLD, NEW = paddle_side.SOFTWARE


class Case(NamedTuple):
    """What to write and how to resume from it."""

    to: str
    target: str
    tp: int = 1
    sharding: int = 1
    version: str = "v2"
    written_tp: int | None = None
    """Tensor-parallel ranks of the checkpoint, where the trainer takes others."""
    source: str = ""
    """Software that wrote the source; that of the target unless said."""

    @property
    def options(self) -> list[str | int]:
        out: list[str | int] = ["--to", self.to, "--tp-out", self.tp if self.written_tp is None else self.written_tp]
        if self.to != "flex":
            out += ["--target", self.target, *(["--native-names"] if self.source else [])]
        if self.sharding > 1 and self.to != "unified":
            out += ["--sharding-out", f"{self.sharding}:{self.version}" if self.to != "flex" else self.sharding]
        return out

    @property
    def kind(self) -> str:
        return {"unified": "unified_checkpoint", "flex": "flex_checkpoint"}.get(self.to, "sharding_io")

    def __str__(self) -> str:
        written = "" if self.written_tp is None else f"_from_tp{self.written_tp}"
        written += f"_of_{self.source}" if self.source else ""
        return f"{self.to}{written}_{self.target}_tp{self.tp}_sharding{self.sharding}_{self.version}"


CASES = [
    Case("unified", NLP),
    Case("unified", NLP, tp=2),
    Case("unified", OLD),
    Case("unified", OLD, tp=2, written_tp=4),
    Case("unified", NEW),
    Case("unified", NEW, sharding=2, version="v1"),
    Case("hybrid", NLP),
    Case("hybrid", NLP, tp=2),
    Case("hybrid", NLP, sharding=2),
    Case("hybrid", OLD, tp=2),
    Case("hybrid", OLD, sharding=2),
    Case("hybrid", NEW),
    Case("hybrid", NEW, tp=2),
    Case("hybrid", NEW, sharding=2, version="v1"),
    Case("hybrid", NEW, sharding=2, version="v2"),
    Case("zcc", NEW, sharding=2),
    Case("flex", NEW, sharding=2),
    Case("flex", NEW, sharding=2, written_tp=2),
    # From one generation to another: names, head and optimizer state as the other's models have them.
    Case("hybrid", NEW, tp=2, source=NLP),
    Case("unified", NEW, source=NLP),
    Case("hybrid", NLP, sharding=2, source=NEW),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_trainer_holds_what_the_source_held(case: Case, tmp_path: Path) -> None:
    source = paddle_model.write_source(tmp_path / "source", case.source or case.target)
    reshard(source, tmp_path / "checkpoint", *case.options)
    held = paddle_side.resume(
        tmp_path / "checkpoint",
        tmp_path / "resumed",
        case.kind,
        software=case.target,
        tp=case.tp,
        sharding=case.sharding,
        version=case.version,
    )
    ranks = [{bare(k): v for k, v in one.items()} for one in held]
    assert {k for one in ranks for k in one} == STATE.keys()
    for key, whole in STATE.items():
        for place in range(case.tp):
            want = cut(key, whole, place, case.tp)
            mine = ranks[place :: case.tp] if case.tp > 1 else ranks
            for got in pieces(key, mine, want.shape, case):
                same = np.array_equal(got.view(f"u{got.itemsize}"), want.view(f"u{want.itemsize}"))
                assert same, f"{key} on rank {place}"


def pieces(key: str, ranks: list[dict[str, Any]], shape: tuple[int, ...], case: Case) -> list[Any]:
    """The tensor as ranks of one tensor-parallel place hold it: each has the model, all together the optimizer."""
    vocab = paddle_model.VOCAB // case.tp
    if key.startswith("model/"):
        return [upright(key, one[key], vocab) for one in ranks]
    if case.sharding == 1:
        return [upright(key, ranks[0][key], vocab)]
    turned = "/lm_head." in key and case.target != NEW and not is_power(key)
    got = joined(ranks, key, shape[::-1] if turned else shape, case.version)
    return [upright(key, got, vocab)]


# -- from what a trainer saved


REAL = [
    Case("unified", NEW),
    Case("hybrid", NEW, tp=2),
    Case("hybrid", NEW, sharding=2),
    Case("flex", NEW, sharding=2),
]


REAL_SAVE = FIXTURES / "sharding2_v1"


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Bits]:
    """What the two sharding ranks (v1) of paddleformers 1.2 hold, resumed from their own files."""
    folder = tmp_path_factory.mktemp("truth")
    first, second = paddle_side.resume(REAL_SAVE, folder, "sharding_io", sharding=2, version="v1")
    return second | first


@pytest.mark.parametrize("case", REAL, ids=str)
def test_resumes_from_another_form_of_a_real_save(case: Case, truth: Mapping[str, Bits], tmp_path: Path) -> None:
    whole_state: list[str | int] = ["--sharding-out", 1] if case.to == "hybrid" and case.sharding == 1 else []
    reshard(REAL_SAVE, tmp_path / "checkpoint", *case.options, *whole_state)
    held = paddle_side.resume(
        tmp_path / "checkpoint", tmp_path / "resumed", case.kind, tp=case.tp, sharding=case.sharding
    )
    assert {k for one in held for k in one} == truth.keys()
    for key, whole in truth.items():
        for place in range(case.tp):
            want = cut(key, whole, place, case.tp)
            mine = [held[place]] if case.tp > 1 else held
            alike = key.startswith("model/") or case.sharding == 1
            found = [one[key] for one in mine] if alike else [joined(mine, key, want.shape, case.version)]
            assert all(np.array_equal(f, want) for f in found), f"{key} on rank {place}"


def test_fused_layers_of_a_real_save(tmp_path: Path) -> None:
    """Each of two ranks of paddlenlp saved [gate | up] of its own; one rank has to have [gates | ups]."""
    source = FIXTURES / "nlp_tp2"
    reshard(source, tmp_path / "one", "--to", "hybrid", "--target", NLP, "--tp-out", 1)
    two = paddle_side.resume(source, tmp_path / "two_held", "sharding_io", software=NLP, tp=2)
    (one,) = paddle_side.resume(tmp_path / "one", tmp_path / "one_held", "sharding_io", software=NLP)
    assert one.keys() == two[0].keys()
    compared = set()
    for key, whole in one.items():
        name = key.split("/")[1]
        for rank, held in enumerate(two):
            if is_power(key) or "norm" in name:
                want = whole
            elif "gate_up_fused_proj" in name:
                blocks = np.split(whole, 4, 1)
                want = np.concatenate([blocks[rank], blocks[rank + 2]], 1)
            else:
                rows = "o_proj" in name or "down_proj" in name or "embed_tokens" in name
                want = np.split(whole, 2, 0 if rows else 1)[rank]
            assert np.array_equal(held[key], want), f"{key} on rank {rank}"
            compared.add(name.rsplit(".", 2)[-2])
    assert {"gate_up_fused_proj", "qkv_proj", "lm_head"} <= compared
