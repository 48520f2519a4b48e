"""Runs of torch through every format that holds an optimizer, and back: model, masters, moments and steps, bit for bit.

Sources are whatever software of torch wrote into fixtures (and a run that is put down by hand). What comes back
is read with numpy from ``ranks``; it is compared with what SRC becomes when it goes there at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from ckpttool.checkpoint import open_checkpoint
from ckpttool.errors import CkptError
from ckpttool.formats.ranks import Ranks
from ckpttool.formats.registry import WRITERS
from tests.helpers.command import ckpttool, reshard
from tests.helpers.tensorfile import Tensors, assert_same, read_all
from tests.helpers.training_run import groups, names, save_run

FIXTURES = Path(__file__).parents[2] / "fixtures"
ONE = ("--tp-out", 1, "--pp-out", 1)
BETAS = ("--betas", "0.9,0.95")


def _sources() -> Iterator[Path]:
    """Every directory with the optimizer of a model whose names are known."""
    roots = [
        p for p in FIXTURES.iterdir() if p.name.startswith(("torch", "dcp", "deepspeed", "zero", "universal", "fsdp"))
    ]
    for folder in sorted({p for root in roots for p in (root, *root.rglob("*")) if p.is_dir()}):
        try:
            opened = open_checkpoint(folder)
        except CkptError:
            continue
        if "optimizer" in opened.components and opened.family.name != "none":
            yield folder


SOURCES = list(_sources())
TARGETS: list[Sequence[object]] = [
    ("ranks", "--tp-out", 2, "--pp-out", 2),
    ("unified", *ONE),
    ("hybrid", *ONE),
    ("hybrid", "--tp-out", 2, "--pp-out", 1, "--sharding-out", 2),
    ("zcc", *ONE, "--sharding-out", 2),
    ("flex", "--tp-out", 2, "--pp-out", 1, "--sharding-out", 2),
    *[
        (n,)
        for n, w in WRITERS.items()
        if "optimizer" in w.capabilities.components and w.capabilities.states == "torch"
    ],
]


def as_torch(src: Path, dst: Path, monkeypatch: pytest.MonkeyPatch, *options: object) -> Tensors:
    """What ``src`` holds in torch's words and Hugging Face's names."""
    with monkeypatch.context() as patch:
        patch.setattr(Ranks, "capabilities", Ranks.capabilities._replace(states="torch"))
        patch.setattr(Ranks, "dialect", "hf")
        reshard(src, dst, "--to", "ranks", *ONE, *options)
    return read_all(dst, "rank-*")


@pytest.mark.product
@pytest.mark.parametrize("target", TARGETS, ids=lambda t: " ".join(map(str, t)))
@pytest.mark.parametrize("source", [None, *SOURCES], ids=lambda p: str(p.relative_to(FIXTURES)) if p else "by hand")
def test_there_and_back(
    source: Path | None, target: Sequence[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    src = source or save_run(tmp_path / "run", names(step={"lm_head.weight": 3}), groups=groups((0.9, 0.95)))
    want = as_torch(src, tmp_path / "direct", monkeypatch)
    assert any(n.startswith("optimizer/") for n in want)
    said = open_checkpoint(src).stored.training
    betas = said.betas(said.groups[0].parameters[0]) if said is not None and said.groups else None
    flag = () if betas else BETAS
    to = ("--to", *target, *flag, "--verify")
    done = ckpttool("reshard", src, tmp_path / "there", *to)
    if "--unfuse" in done.err:  # a frozen parameter that Paddle's models fuse with one that is not
        done = ckpttool("reshard", src, tmp_path / "there", *to, "--unfuse")
    assert done.code == 0, done.err
    if betas and WRITERS[str(target[0])].capabilities.states == "paddle":
        flag = ("--betas", f"{betas[0]},{betas[1]}")
    got = as_torch(tmp_path / "there", tmp_path / "back", monkeypatch, *flag)
    # Formats that store a weight once make masters of the weights that have none.
    made = {n for n in got.keys() - want.keys() if n.startswith("master_weights/")}
    assert not made or target[0] in ("hybrid", "zcc", "unified")
    assert_same({n: a for n, a in got.items() if n not in made}, want)
