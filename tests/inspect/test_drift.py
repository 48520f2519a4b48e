"""``inspect --diff --values``: how far two checkpoints are apart by layer and by module, against plain numpy."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpttool.ops.inspect.drift import Apart, drift
from tests.helpers.command import ckpttool, reshard
from tests.helpers.tensorfile import Raw, Tensors, save_hf
from tests.inspect.models import CONFIG, llama
from tests.inspect.test_diff import EMBED, NORM, UP, noisy, widened
from tests.inspect.test_widths import on_terminal


def found(left: Path, right: Path, *options: object) -> Any:
    return json.loads(ckpttool("inspect", left, "--diff", right, "--json", *options).out)["drift"]


def expected(one: Tensors, two: Tensors, part: str) -> float:
    """The norm of all differences by the norm of all tensors of the second whose names have this in them."""
    names = [n for n in one if part in n]
    a, b = (np.concatenate([widened(side[n]).ravel() for n in names]) for side in (one, two))
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tensors, Tensors, Path, Path]:
    root = tmp_path_factory.mktemp("drift")
    one = {n: Raw("BF16", (t.bits & 0x807F) | 0x3E80) for n, t in llama().items()}
    two = noisy(one, {UP.format(0): 1.5, UP.format(1): 4.0, EMBED: 2.0})
    return one, two, save_hf(root / "one", one, CONFIG), save_hf(root / "two", two, CONFIG)


def test_layers_and_modules_count_as_a_whole(pair: tuple[Tensors, Tensors, Path, Path]) -> None:
    """Tensors that are equal count too: they are part of their layer."""
    one, two, left, right = pair
    answer = found(left, right)
    assert answer["component"] == "model"
    layers = {d["name"]: d["relative"] for d in answer["layers"]}
    assert list(layers) == ["model.layers.1", "model.embed_tokens", "model.layers.0"]
    for name, relative in layers.items():
        assert relative == pytest.approx(expected(one, two, name + "."), rel=1e-12)
    modules = {d["name"]: d["relative"] for d in answer["modules"]}
    assert list(modules) == ["mlp.up_proj", "model.embed_tokens"]
    assert modules["mlp.up_proj"] == pytest.approx(expected(one, two, "mlp.up_proj."), rel=1e-12)
    assert [(d["changed"], d["tensors"]) for d in answer["layers"]] == [(1, 9), (1, 1), (1, 9)]


def test_the_ranks_of_either_side_do_not_matter(pair: tuple[Tensors, Tensors, Path, Path], tmp_path: Path) -> None:
    _, _, left, right = pair
    reshard(right, tmp_path / "cut", "--to", "ranks", "--tp-out", 2)
    whole, cut = found(left, right), found(left, tmp_path / "cut")
    assert [d["name"] for d in cut["layers"]] == [d["name"] for d in whole["layers"]]
    assert [d["relative"] for d in cut["layers"]] == pytest.approx([d["relative"] for d in whole["layers"]], rel=1e-12)


def test_what_is_within_a_tolerance_has_its_small_difference(pair: tuple[Tensors, Tensors, Path, Path]) -> None:
    one, two, left, right = pair
    answer = found(left, right, "--atol", "0.8")
    (layer,) = [d for d in answer["layers"] if d["name"] == "model.layers.1"]
    assert layer["relative"] == pytest.approx(expected(one, two, "model.layers.1."), rel=1e-12)


def test_nothing_is_told_where_nothing_differs(pair: tuple[Tensors, Tensors, Path, Path]) -> None:
    assert found(pair[2], pair[2]) is None
    assert "drift" not in json.loads(ckpttool("inspect", pair[2], "--diff", pair[3], "--headers-only", "--json").out)


def test_what_is_equal_is_read_once(pair: tuple[Tensors, Tensors, Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two equal checkpoints are not read for norms that nobody asks for."""
    monkeypatch.setattr("ckpttool.ops.inspect.diff._DistanceWork", None)
    assert ckpttool("inspect", pair[2], "--diff", pair[2]).code == 0


def test_on_a_terminal_bars_come_last(pair: tuple[Tensors, Tensors, Path, Path]) -> None:
    for columns in (60, 80, 120):
        shown = on_terminal("inspect", pair[2], "--diff", pair[3], columns=columns)
        assert max(map(len, shown)) <= columns
        at = shown.index(next(line for line in shown if line.startswith("layer ")))
        name, relative, bar, *_ = shown[at + 1].split()
        assert (name, bar) == ("model.layers.1", "#" * 16)
        assert float(relative) == pytest.approx(expected(pair[0], pair[1], "model.layers.1."), rel=1e-3)
        assert any(line.startswith("module ") for line in shown[at:])
    piped = ckpttool("inspect", pair[2], "--diff", pair[3]).out
    assert not any(line.startswith(("layer", "module")) for line in piped.splitlines())


def test_many_layers_are_a_screen() -> None:
    """The largest of a hundred, and one line for the others."""
    from ckpttool.ops.inspect.views.diff import MOST

    sums = drift("model", [Apart(f"model.layers.{i}.w.weight", 1.0 + i, 100.0, changed=True) for i in range(100)])
    assert [d.name for d in sums.layers[:2]] == ["model.layers.99", "model.layers.98"]
    assert (len(sums.layers), len(sums.modules), len(sums.cells)) == (100, 1, 100)
    assert MOST < 40


def test_numbers_that_are_none() -> None:
    found = drift(
        "model",
        [
            Apart("model.layers.0.a.weight", math.nan, 1.0, changed=True),
            Apart("model.layers.1.a.weight", None, None, changed=True),
            Apart("model.layers.2.a.weight", 1.0, 0.0, changed=True),
            Apart("model.layers.3.a.weight", 1.0, 4.0, changed=True),
            Apart("model.layers.4.a.weight", 0.0, 4.0, changed=False),
            Apart("optimizer/model.layers.3.a.weight/moment1_0", 9.0, 1.0, changed=True),
        ],
    )
    sizes = {d.name.rpartition(".")[2]: d.relative for d in found.layers}
    assert sizes["3"] == 0.5
    assert sizes["1"] is None
    assert math.isnan(sizes["0"] or 0)
    assert sizes["2"] == math.inf
    assert [d.name for d in found.layers][-1] == "model.layers.3"
    assert "4" not in sizes


def test_a_component_alone_drifts_too() -> None:
    name = "optimizer/model.layers.{}.a.weight/moment1_0"
    found = drift("optimizer", [Apart(name.format(i), 1.0, 4.0, changed=True) for i in range(2)])
    assert [d.name for d in found.layers] == ["model.layers.0", "model.layers.1"]


def test_a_norm_that_is_nan_is_json(tmp_path: Path) -> None:
    one, two = llama(), dict(llama())
    two[NORM] = Raw("BF16", np.full(16, 0x7FC0, np.uint16))
    left, right = save_hf(tmp_path / "one", one, CONFIG), save_hf(tmp_path / "two", two, CONFIG)
    assert found(left, right)["layers"][0] == {
        "name": "model.norm",
        "tensors": 1,
        "changed": 1,
        "relative": "nan",
    }
