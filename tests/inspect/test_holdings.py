"""``inspect --ranks``: who holds which box, as data, as text and as a picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpttool.core.geometry import Box
from ckpttool.ops.inspect.holdings import HeldBox, merge
from tests.helpers.command import ckpttool, reshard
from tests.helpers.tensorfile import origin, save_hf, write
from tests.inspect.models import CONFIG, HIDDEN, llama, shapes

FIXTURES = Path(__file__).parents[2] / "fixtures"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_hf(tmp_path_factory.mktemp("holdings") / "hf", llama(), CONFIG)


def holdings(
    folder: Path, *options: object
) -> dict[str, list[tuple[str, list[tuple[list[int], list[int], list[int]]]]]]:
    """Name -> (which, [(start, stop, ranks)]) of each group."""
    done = ckpttool("inspect", folder, "--ranks", "--json", *options)
    assert done.code == 0, done.err
    answer = json.loads(done.out)
    return {
        h["name"]: [(g["which"], [(b["start"], b["stop"], b["ranks"]) for b in g["held"]]) for g in h["groups"]]
        for h in answer["holdings"]
    }


def cut(source: Path, folder: Path, *options: object) -> dict[str, Any]:
    reshard(source, folder, "--to", "ranks", *options)
    return holdings(folder)


def test_tensor_parallel(source: Path, tmp_path: Path) -> None:
    found = cut(source, tmp_path / "out", "--tp-out", 4)
    q = [([n * 4, 0], [n * 4 + 4, HIDDEN], [n]) for n in range(4)]
    assert found["model.layers.{0..1}.self_attn.q_proj.weight"] == [("", q)]
    o = [([0, n * 4], [HIDDEN, n * 4 + 4], [n]) for n in range(4)]
    assert found["model.layers.{0..1}.self_attn.o_proj.weight"] == [("", o)]
    shared = [([0, 0], [4, HIDDEN], [0, 1]), ([4, 0], [8, HIDDEN], [2, 3])]
    assert found["model.layers.{0..1}.self_attn.k_proj.weight"] == [("", shared)]
    assert found["model.norm.weight"] == [("", [([0], [HIDDEN], [0, 1, 2, 3])])]


def test_fused_parts_are_boxes_of_their_own(source: Path, tmp_path: Path) -> None:
    found = cut(source, tmp_path / "out", "--tp-out", 2, "--fuse")
    ((_, held),) = found["model.layers.{0..1}.mlp.gate_up_proj.weight"]
    assert [(start[0], stop[0], ranks) for start, stop, ranks in held] == [
        (0, 12, [0]),
        (12, 24, [1]),
        (24, 36, [0]),
        (36, 48, [1]),
    ]


def test_stages_and_experts_become_groups(source: Path, tmp_path: Path) -> None:
    found = cut(source, tmp_path / "out", "--tp-out", 2, "--pp-out", 2)
    groups = found["model.layers.{0..1}.mlp.down_proj.weight"]
    assert [(which, [ranks for _, _, ranks in held]) for which, held in groups] == [
        ("layers 0", [[0], [1]]),
        ("layers 1", [[2], [3]]),
    ]
    assert [ranks for _, held in found["lm_head.weight"] for _, _, ranks in held] == [[2], [3]]
    moe = holdings(FIXTURES / "deepseek_v3_mp2", "--filter", "*.ffn.experts.*.w1.weight")
    ((name, groups),) = moe.items()
    assert "experts.{0..3}" in name
    assert [(which, [ranks for _, _, ranks in held]) for which, held in groups] == [
        ("experts 0..1", [[0]]),
        ("experts 2..3", [[1]]),
    ]


@pytest.mark.parametrize("options", [(4, 1), (2, 2), (4, 2), (1, 2)])
def test_every_element_is_held_and_no_rank_holds_it_twice(
    source: Path, tmp_path: Path, options: tuple[int, int]
) -> None:
    tp, pp = options
    found = cut(source, tmp_path / "out", "--tp-out", tp, "--pp-out", pp)
    for name, shape in shapes().items():
        if ".1." in name:
            continue
        template = name.replace(".0.", ".{0..1}.")
        groups = [held for which, held in found[template] if which in ("", "layers 0")]
        assert len(groups) == 1
        times = np.zeros((tp * pp, *shape), np.int64)
        for start, stop, ranks in groups[0]:
            index = tuple(slice(a, b) for a, b in zip(start, stop, strict=True))
            for r in ranks:
                times[(r, *index)] += 1
        assert times.max() == 1
        assert (times.sum(axis=0) > 0).all()


def test_neighbours_of_one_owner_are_joined() -> None:
    def box(a: int, b: int, c: int, d: int) -> Box:
        return Box((a, c), (b, d))

    pieces = [
        HeldBox(box(0, 2, 0, 2), (0,)),
        HeldBox(box(2, 4, 0, 2), (0,)),
        HeldBox(box(0, 4, 2, 4), (0,)),
        HeldBox(box(4, 6, 0, 4), (1,)),
    ]
    assert merge(pieces) == [HeldBox(box(0, 4, 0, 4), (0,)), HeldBox(box(4, 6, 0, 4), (1,))]
    assert merge([]) == []


def test_text(source: Path, tmp_path: Path) -> None:
    reshard(source, tmp_path / "out", "--to", "ranks", "--tp-out", 2, "--pp-out", 2)
    done = ckpttool("inspect", tmp_path / "out", "--ranks", "--filter", "*.o_proj.weight", "--filter", "*norm.weight")
    expected = """\
4 ranks: tp 2, pp 2
  ranks 0-1: 2.50 kB each
  ranks 2-3: 2.53 kB each

model.layers.{0..1}.input_layernorm.weight   BF16 [16]   2 tensors
    layers 0  whole on ranks 0-1
    layers 1  whole on ranks 2-3

model.layers.{0..1}.post_attention_layernorm.weight   BF16 [16]   2 tensors
    layers 0  whole on ranks 0-1
    layers 1  whole on ranks 2-3

model.layers.{0..1}.self_attn.o_proj.weight   BF16 [16, 16]   2 tensors
    layers 0
    axis 1  |               0                |               1                |
            0                                8                                16
    layers 1
    axis 1  |               2                |               3                |
            0                                8                                16

model.norm.weight   BF16 [16]
    whole on ranks 2-3
"""
    assert done.out == expected


def test_text_of_many_cuts_is_a_list(tmp_path: Path) -> None:
    """What does not fit on a line is never cut off."""
    wide = {"model.embed_tokens.weight": origin(1, "BF16", (40_000, 1))}
    save_hf(tmp_path / "src", {**llama(), **wide}, {**CONFIG, "vocab_size": 40_000})
    reshard(tmp_path / "src", tmp_path / "out", "--to", "ranks", "--tp-out", 32, "--split", "model.layers.*=none")
    out = ckpttool("inspect", tmp_path / "out", "--ranks", "--filter", "*embed*").out
    assert "    axis 0       0:1250  rank 0\n" in out
    assert "    axis 0  38750:40000  rank 31\n" in out


def test_two_cut_axes_are_a_grid() -> None:
    from ckpttool.ops.inspect.holdings import Holding, HoldingGroup, Layout
    from ckpttool.report.layout import draw

    held = tuple(HeldBox(Box((i * 2, j * 3), (i * 2 + 2, j * 3 + 3)), (2 * i + j,)) for i in range(2) for j in range(2))
    layout = Layout(
        "tp 4", 4, (Holding("w", "F32", (4, 6), 1, (HoldingGroup((), 1, held),), 0),), dict.fromkeys(range(4), 24)
    )
    assert draw(layout).splitlines()[-3:] == [
        "    axis 0 \\ 1   0:3   3:6",
        "           0:2 |  0  |  1  |",
        "           2:4 |  2  |  3  |",
    ]


def test_one_rank(source: Path) -> None:
    out = ckpttool("inspect", source, "--ranks", "--filter", "model.norm.weight").out
    assert out.splitlines()[0] == "1 rank: tp 1"
    assert out.splitlines()[-1] == "    whole on rank 0"


def test_padding_and_empty_tensors_are_told(tmp_path: Path) -> None:
    out = ckpttool("inspect", FIXTURES / "llama_tp8", "--ranks", "--filter", "lm_head.weight").out
    assert "and 320 elements of padding" in out
    write(tmp_path / "model.safetensors", {"none": origin(1, "F32", (0, 4)), "one": origin(2, "F32", ())})
    done = ckpttool("inspect", tmp_path, "--ranks", "--svg", tmp_path / "x.svg")
    assert "whole on rank 0" in done.out


def test_a_picture_that_cannot_be_written_is_an_error(source: Path, tmp_path: Path) -> None:
    done = ckpttool("inspect", source, "--ranks", "--svg", tmp_path / "no" / "x.svg")
    assert done.code == 1
    assert "picture cannot be written" in done.err
