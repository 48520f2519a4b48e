"""``inspect RUN --html``: numbers over the steps are those of plain numpy; without --stats nothing is read."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpttool.report.page import render
from tests.helpers.command import ckpttool
from tests.helpers.tensorfile import Raw, write
from tests.inspect.models import CONFIG, llama

UP = "model.layers.0.mlp.up_proj.weight"
BROKEN = "model.layers.1.mlp.down_proj.weight"
Weights = dict[str, np.ndarray[Any, np.dtype[Any]]]


def saved(root: Path, weights: Weights) -> None:
    root.mkdir(parents=True)
    write(root / "model.safetensors", {n: Raw("F32", np.asarray(w).view(np.uint32)) for n, w in weights.items()})
    (root / "config.json").write_text(json.dumps(CONFIG))


@pytest.fixture(scope="module")
def weights() -> dict[int, Weights]:
    """Of three steps: one tensor grows, and the last step has elements that are not finite in another one."""
    rng = np.random.default_rng(0)
    first: Weights = {n: np.asarray(rng.standard_normal(raw.bits.shape), np.float32) for n, raw in llama("F32").items()}
    second = {**first, UP: (first[UP] * np.float32(1.5)).astype(np.float32)}
    third = {**second, UP: (second[UP] + np.float32(0.25)).astype(np.float32), BROKEN: first[BROKEN].copy()}
    third[BROKEN][0, :2] = np.nan
    third[BROKEN][1, 0] = np.inf
    return {500: first, 1000: second, 1500: third}


@pytest.fixture(scope="module")
def run(weights: dict[int, Weights], tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("run") / "run"
    for step, found in weights.items():
        saved(root / f"checkpoint-{step}", found)
    return root


def report(run: Path, file: Path, *options: object) -> dict[str, Any]:
    done = ckpttool("inspect", run, "--html", file, "--json", *options)
    assert done.code == 0, done.err
    assert file.exists()
    return dict(json.loads(done.out))


def section(made: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = [s for s in made["sections"] if s["id"] == name]
    return dict(found)


def norm(*arrays: np.ndarray[Any, np.dtype[Any]]) -> float:
    return math.sqrt(sum(float(np.sum(np.square(a[np.isfinite(a)].astype(np.float64)))) for a in arrays))


def test_without_stats_only_headers_are_read(run: Path, tmp_path: Path) -> None:
    made = report(run, tmp_path / "r.html")
    assert [s["id"] for s in made["sections"]] == ["checkpoints"]
    assert "tensors" not in made
    rows = section(made, "checkpoints")["rows"]
    assert [row[:2] for row in rows] == [[f"checkpoint-{n}", n] for n in (500, 1000, 1500)]
    assert made["verdicts"] == [
        {"state": "good", "text": "Training resumes from checkpoint-1500 (the newest that is complete)"}
    ]


def test_norms_and_changes_are_those_of_numpy(run: Path, weights: dict[int, Weights], tmp_path: Path) -> None:
    made = report(run, tmp_path / "r.html", "--stats")
    table = section(made, "checkpoints")
    column = {c["title"]: i for i, c in enumerate(table["columns"])}
    one, two, three = weights.values()
    for row, found in zip(table["rows"], weights.values(), strict=True):
        assert row[column["Norm"]] == pytest.approx(norm(*found.values()), rel=1e-6)
    change = norm(two[UP] - one[UP]) / norm(*one.values())
    assert [row[column["Change"]] for row in table["rows"]] == [None, pytest.approx(change, rel=1e-6), "nan"]
    assert [row[column["NaN"]] for row in table["rows"]] == [0, 0, 2]
    assert [row[column["Inf"]] for row in table["rows"]] == [0, 0, 1]

    modules = {s["name"]: s["values"] for s in section(made, "change-modules")["series"]}
    ups = [n for n in one if n.endswith("up_proj.weight")]
    first = norm(two[UP] - one[UP]) / norm(*(one[n] for n in ups))
    second = norm(three[UP] - two[UP]) / norm(*(two[n] for n in ups))
    assert modules["mlp.up_proj"] == [pytest.approx(first, rel=1e-6), pytest.approx(second, rel=1e-6)]
    assert modules["mlp.gate_proj"] == [0, 0]
    assert modules["mlp.down_proj"][0] == 0
    norms = {s["name"]: s["values"] for s in section(made, "norms-modules")["series"]}
    assert norms["mlp.up_proj"] == [
        pytest.approx(norm(*(w[n] for n in ups)) / norm(*(one[n] for n in ups)), rel=1e-6) for w in weights.values()
    ]
    layers = {s["name"]: s["values"] for s in section(made, "change-layers")["series"]}
    inside = [one[n] for n in one if ".layers.0." in n]
    assert layers["model.layers.0"][0] == pytest.approx(norm(two[UP] - one[UP]) / norm(*inside), rel=1e-6)


def test_what_is_not_finite_is_in_the_verdict(run: Path, tmp_path: Path) -> None:
    made = report(run, tmp_path / "r.html", "--stats")
    assert {"state": "bad", "text": f"2 NaN and 1 infinite elements in checkpoint-1500: {BROKEN}"} in made["verdicts"]


def test_both_histograms_are_those_of_numpy(run: Path, weights: dict[int, Weights], tmp_path: Path) -> None:
    made = report(run, tmp_path / "r.html", "--stats")
    tensors = made["tensors"]
    columns = {c["id"]: c["values"] for c in tensors["columns"]}
    at = tensors["names"].index(UP)
    one, three = weights[500][UP], weights[1500][UP]
    assert tensors["others"]["names"] == ["checkpoint-1500", "checkpoint-500"]
    assert tensors["histograms"][at] == np.histogram(three.astype(np.float64), 20)[0].tolist()
    assert tensors["others"]["counts"][at] == np.histogram(one.astype(np.float64), 20)[0].tolist()
    assert (columns["other_min"][at], columns["other_max"][at]) == (one.min(), one.max())
    assert (columns["min"][at], columns["max"][at]) == (three.min(), three.max())
    assert columns["relative"][at] == pytest.approx(norm(three - one) / norm(one), rel=1e-6)
    same = tensors["names"].index("model.layers.0.mlp.gate_proj.weight")
    assert tensors["others"]["counts"][same] is None  # it has not changed
    assert columns["relative"][same] == 0


def test_a_filter_chooses_what_is_read(run: Path, weights: dict[int, Weights], tmp_path: Path) -> None:
    made = report(run, tmp_path / "r.html", "--stats", "--filter", UP)
    assert made["tensors"]["names"] == [UP]
    rows = section(made, "checkpoints")["rows"]
    assert rows[0][6] == pytest.approx(norm(weights[500][UP]), rel=1e-6)


def test_incomplete_checkpoints_are_listed_and_not_read(weights: dict[int, Weights], tmp_path: Path) -> None:
    for step, found in weights.items():
        saved(tmp_path / "run" / f"checkpoint-{step}", found)
    last = tmp_path / "run" / "checkpoint-1500" / "model.safetensors"
    last.write_bytes(last.read_bytes()[:-100])
    made = report(tmp_path / "run", tmp_path / "r.html", "--stats")
    assert made["verdicts"][1]["text"] == "1 of 3 checkpoints incomplete: checkpoint-1500"
    assert made["verdicts"][0]["text"].startswith("Training resumes from checkpoint-1000")
    column = [c["title"] for c in section(made, "checkpoints")["columns"]].index("Norm")
    assert [row[column] is None for row in section(made, "checkpoints")["rows"]] == [False, False, True]
    assert made["tensors"]["others"]["names"] == ["checkpoint-1000", "checkpoint-500"]


def test_an_adapter_among_models_is_left_out_with_a_note(tmp_path: Path) -> None:
    made = report(Path("fixtures/merge/inputs"), tmp_path / "r.html", "--checkpoints", "--stats")
    assert "lora1 is not in the charts: it has no model" in made["notes"]
    names = [row[0] for row in section(made, "checkpoints")["rows"]]
    assert "lora1" in names
    assert made["tensors"]["names"]


def test_checkpoints_of_what_opens_as_one(weights: dict[int, Weights], tmp_path: Path) -> None:
    saved(tmp_path / "run", weights[500])
    for step, found in weights.items():
        saved(tmp_path / "run" / f"checkpoint-{step}", found)
    assert report(tmp_path / "run", tmp_path / "one.html")["subtitle"].startswith("Llama")
    assert report(tmp_path / "run", tmp_path / "run.html", "--checkpoints")["facts"][0] == ["Checkpoints", "3"]


def test_a_check_needs_one_checkpoint(run: Path, tmp_path: Path) -> None:
    done = ckpttool("inspect", run, "--html", tmp_path / "r.html", "--check")
    assert done.code == 2
    assert "--check is about one checkpoint" in done.err


def test_a_comparison_has_both_histograms(run: Path, weights: dict[int, Weights], tmp_path: Path) -> None:
    one, two = (run / f"checkpoint-{n}" for n in (1000, 500))
    done = ckpttool("inspect", one, "--html", tmp_path / "r.html", "--diff", two, "--values", "--json")
    assert done.code == 3
    tensors = json.loads(done.out)["tensors"]
    at = tensors["names"].index(UP)
    assert tensors["others"]["names"] == ["checkpoint-1000", "checkpoint-500"]
    for counts, step in ((tensors["histograms"], 1000), (tensors["others"]["counts"], 500)):
        assert counts[at] == np.histogram(weights[step][UP].astype(np.float64), 20)[0].tolist()
    headers = ckpttool("inspect", one, "--html", tmp_path / "h.html", "--stats", "--json")
    assert "others" not in json.loads(headers.out)["tensors"]


def test_a_long_run_stays_small() -> None:
    """A page is bounded: a map has a cell for each layer and step, and a hundred steps are drawn at most."""
    rows = [f"model.layers.{i}" for i in range(128)]
    values = [[0.001 * (i + j + 1) for j in range(100)] for i in range(128)]
    maps: Any = [
        {"id": f"map-{n}", "title": "Norm", "kind": "heatmap", "rows": rows, "columns": [str(j) for j in range(100)],
         "values": values, "unit": "norm"} for n in range(2)
    ]  # fmt: skip
    page: Any = {"schema": "ckpttool.report/1", "title": "", "subtitle": "", "facts": [], "notes": [], "sections": maps}
    assert len(render(page)) < 300_000
