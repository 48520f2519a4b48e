"""``inspect --html``: what a report shows is what the other views say, and what cannot be found out leaves a place."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpttool.answers.findings import CheckResult
from ckpttool.core.mesh import Mesh
from ckpttool.errors import OutputError
from ckpttool.formats.base import OpenOptions, StoredCheckpoint
from ckpttool.kernels.stats import Histogram, Stats
from ckpttool.ops.inspect.listing import TensorChoice, TensorListing, TensorRow
from ckpttool.ops.inspect.values import Values
from ckpttool.ops.inspect.views.page import PageView, ReportContents
from ckpttool.ops.inspect.views.registry import look
from ckpttool.report.page import render
from ckpttool.report.page.document import heat_map, line_chart
from ckpttool.report.survey import document
from tests.helpers.command import Done, ckpttool
from tests.helpers.tensorfile import Raw, write
from tests.inspect.models import CONFIG, llama

TP8 = Path("fixtures/llama_tp8")


def saved(root: Path, tensors: dict[str, Raw], config: dict[str, Any] | None = None) -> Path:
    root.mkdir()
    write(root / "model.safetensors", tensors)
    (root / "config.json").write_text(json.dumps(CONFIG if config is None else config))
    return root


def report(src: Path, file: Path, *options: object) -> tuple[Done, dict[str, Any]]:
    """The page is written; its document is what --json prints."""
    done = ckpttool("inspect", src, "--html", file, "--json", *options)
    return done, json.loads(done.out)


def section(made: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = [s for s in made["sections"] if s["id"] == name]
    return dict(found)


def columns(made: dict[str, Any]) -> dict[str, list[Any]]:
    names = {"name": made["tensors"]["names"]}
    return names | {c["id"]: c["values"] for c in made["tensors"]["columns"]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("report") / "llama", llama("F32"))


def test_statistics_are_those_of_the_elements(model: Path, tmp_path: Path) -> None:
    done, made = report(model, tmp_path / "r.html", "--stats")
    assert (done.code, done.err) == (0, "")
    found = columns(made)
    elements = {name: raw.bits.view(np.float32).astype(np.float64) for name, raw in llama("F32").items()}
    assert sorted(found["name"]) == sorted(elements)
    for i, name in enumerate(found["name"]):
        data = elements[name]
        assert found["shape"][i] == list(data.shape)
        assert found["min"][i] == data.min()
        assert found["max"][i] == data.max()
        assert found["mean"][i] == pytest.approx(data.mean(), rel=1e-6)
        assert found["std"][i] == pytest.approx(data.std(), rel=1e-6)
        assert found["norm"][i] == pytest.approx(np.linalg.norm(data), rel=1e-6)
        assert found["zeros"][i] == np.mean(data == 0)
        assert made["tensors"]["histograms"][i] == np.histogram(data, 20)[0].tolist()


def test_sums_by_layer_are_those_of_the_elements(model: Path, tmp_path: Path) -> None:
    _, made = report(model, tmp_path / "r.html", "--stats")
    elements = {name: raw.bits.view(np.float32).astype(np.float64) for name, raw in llama("F32").items()}
    norms = section(made, "norms")
    assert norms["x"] == ["0", "1"]
    shown = {s["name"]: s["values"] for s in norms["series"]}
    for i in range(2):
        data = elements[f"model.layers.{i}.mlp.up_proj.weight"]
        assert shown["mlp.up_proj"][i] == pytest.approx(np.linalg.norm(data), rel=1e-6)
    extremes = {s["name"]: s["values"] for s in section(made, "extremes")["series"]}
    inside = [
        np.concatenate([d.ravel() for n, d in elements.items() if f".{i}." in n and d.ndim > 1]) for i in range(2)
    ]
    assert extremes == {"max": [d.max() for d in inside], "min": [d.min() for d in inside]}
    outliers = section(made, "outliers")
    assert "input_layernorm" not in outliers["columns"]  # a vector
    column = outliers["columns"].index("self_attn.q_proj")
    data = elements["model.layers.1.self_attn.q_proj.weight"]
    assert outliers["values"][1][column] == pytest.approx(np.abs(data).max() / data.std(), rel=1e-6)


def test_a_filter_chooses_what_is_shown(model: Path, tmp_path: Path) -> None:
    done, made = report(model, tmp_path / "r.html", "--filter", "*.up_proj.weight")
    assert done.code == 0
    assert columns(made)["name"] == [f"model.layers.{i}.mlp.up_proj.weight" for i in range(2)]
    assert ["Tensors", "2 of 21"] in made["facts"]


def test_what_is_said_and_the_same_bytes_again(model: Path, tmp_path: Path) -> None:
    one, two = (ckpttool("inspect", model, "--html", tmp_path / f"{i}.html", "--stats") for i in "ab")
    page = (tmp_path / "a.html").read_bytes()
    assert page == (tmp_path / "b.html").read_bytes()
    assert (one.code, one.err) == (0, "")
    assert (
        one.out
        == f"{tmp_path}/a.html: {len(page) / 1000:.2f} kB, 21 tensors, statistics, no problem found in headers\n"
    )
    assert two.code == 0


def test_differences_are_in_the_report_and_the_exit_code(model: Path, tmp_path: Path) -> None:
    changed = llama("F32")
    name = "model.layers.1.mlp.up_proj.weight"
    data = changed[name].bits.view(np.float32).copy()
    data[0] += 1
    changed[name] = Raw("F32", data.view(np.uint32))
    other = saved(tmp_path / "other", changed)
    done, made = report(model, tmp_path / "r.html", "--diff", other, "--values")
    assert done.code == 3
    before = llama("F32")[name].bits.view(np.float32).astype(np.float64)
    relative = np.linalg.norm(data - before) / np.linalg.norm(data.astype(np.float64))
    assert section(made, "changes")["rows"][0][:2] == [name, pytest.approx(relative, rel=1e-6)]
    assert made["sections"][0]["id"] == "changes"
    how = "(names, dtypes, shapes, values compared)"
    assert made["verdicts"][1] == {"state": "differs", "text": f"Different from other: 1 of 21 tensors changed {how}"}
    assert "drift" not in [s["id"] for s in made["sections"]]  # a map of one cell
    found = dict(zip(made["tensors"]["names"], columns(made)["relative"], strict=True))
    assert found.pop(name) == pytest.approx(relative, rel=1e-6)
    assert set(found.values()) == {0.0}


def test_equal_checkpoints(model: Path, tmp_path: Path) -> None:
    done, made = report(model, tmp_path / "r.html", "--diff", model, "--values", "--check")
    assert done.code == 0
    assert [v["state"] for v in made["verdicts"]] == ["good", "good"]
    assert not {"changes", "differences", "drift"} & {s["id"] for s in made["sections"]}


def test_change_is_drawn_by_layer_and_module(model: Path, tmp_path: Path) -> None:
    changed = llama("F32")
    far = {}
    for i, name in enumerate(("model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.down_proj.weight")):
        data = changed[name].bits.view(np.float32).copy()
        before = data.astype(np.float64)
        data[0] += 1 + 9 * i
        changed[name] = Raw("F32", data.view(np.uint32))
        far[name] = np.linalg.norm(data - before) / np.linalg.norm(data.astype(np.float64))
    other = saved(tmp_path / "other", changed)
    _, made = report(model, tmp_path / "r.html", "--diff", other, "--values")
    drift = section(made, "drift")
    for name, value in far.items():
        _, _, layer, module = name.removesuffix(".weight").split(".", 3)
        row, column = drift["rows"].index(f"model.layers.{layer}"), drift["columns"].index(module)
        assert drift["values"][row][column] == pytest.approx(value, rel=1e-6)


def test_values_that_nobody_read_are_not_called_equal(model: Path, tmp_path: Path) -> None:
    view = PageView(choice=TensorChoice(), html=tmp_path / "r.html", diff=model)
    found = look(view, model, OpenOptions())
    assert isinstance(found, ReportContents)
    assert found.diff is not None
    found.diff.values = False  # as headers alone say it
    verdict = document(found)["verdicts"][1]
    assert verdict["state"] == "unknown"
    assert "values not compared" in verdict["text"]
    assert "equal" not in verdict["text"].lower()


def test_flat_charts_are_sentences() -> None:
    flat = line_chart("a", "A", "Said.", [0, 1], ("layer", "norm"), [{"name": "up", "values": [2.0, 2.01]}])
    assert (flat["kind"], flat["text"]) == ("statement", "Said.\n\nEvery layer has the same value within 3%: up 2.")
    steep = line_chart("a", "A", "Said.", [0, 1], ("layer", "norm"), [{"name": "up", "values": [2.0, 3.0]}])
    assert steep["kind"] == "lines"
    broken = line_chart("a", "A", "", [0, 1], ("layer", "norm"), [{"name": "up", "values": [2.0, float("nan")]}])
    assert broken["kind"] == "lines"
    one = heat_map("a", "A", "Said.", ["layer 0"], ["up"], [[0.5]], "change")
    assert (one["kind"], one["text"]) == ("statement", "Said.\n\nLayer 0, up: change 0.5.")
    assert heat_map("a", "A", "", ["0", "1"], ["up"], [[0.5], [None]], "change")["kind"] == "heatmap"
    assert heat_map("a", "A", "", ["0", "1"], ["up"], [[0.5], [0.49]], "change")["kind"] == "statement"


def test_ranks_and_who_holds_what(tmp_path: Path) -> None:
    done, made = report(TP8, tmp_path / "r.html")
    assert done.code == 0
    found = columns(made)
    ranks = dict(zip(found["name"], found["ranks"], strict=True))
    assert ranks["model.embed_tokens.weight"] == "0-7"
    assert section(made, "ranks")["figures"]
    assert ["Parallelism", "tp 8"] in made["facts"]


def test_components_have_parameters(tmp_path: Path) -> None:
    _, made = report(Path("fixtures/paddle_zcc/ep2_tp2_sharding2_ema"), tmp_path / "r.html", "--only", "optimizer")
    at = made["tensors"]["names"].index("optimizer/model.layers.1.self_attn.q_proj.weight/moment1_0")
    assert made["tensors"]["parameters"][at] == "model.layers.1.self_attn.q_proj.weight"


def test_a_broken_checkpoint_has_findings(tmp_path: Path) -> None:
    broken = saved(tmp_path / "broken", llama())
    os.truncate(broken / "model.safetensors", 4000)
    done = ckpttool("inspect", broken, "--html", tmp_path / "r.html")
    assert done.code == 1
    assert "no tensors, 1 error\n" in done.out
    assert done.err.startswith("error: tensor")
    done, made = report(broken, tmp_path / "r.html", "--check")
    assert (done.code, done.err) == (3, "")
    assert [f["id"] for f in section(made, "findings")["findings"]] == ["truncated"]  # folded: one line for a file
    assert [s["id"] for s in made["sections"]] == ["findings"]
    assert "tensors" not in made


def test_hostile_names_and_values(tmp_path: Path) -> None:
    tensors = {
        "</script><script>alert(1)</script>": Raw("F32", np.array([np.nan, np.inf], np.float32).view(np.uint32)),
        "a\u202e\n\x1b[2J.0.b": Raw("F32", np.zeros((0, 3), np.uint32)),
        "layers.1.w": Raw("F32", np.array(3, np.uint32)),
        "layers.0.w": Raw("I64", np.array([2**63 - 1], np.uint64)),
    }
    src = saved(tmp_path / "src", tensors, {})
    done, made = report(src, tmp_path / "r.html", "--stats")
    assert done.code == 0
    page = (tmp_path / "r.html").read_text()
    assert "alert(1)" not in page
    assert "\x1b" not in page
    assert len(columns(made)["name"]) == 4
    assert sorted(columns(made)["nan"]) == [0, 0, 0, 1]


def test_elements_smaller_than_a_byte_have_no_statistics(tmp_path: Path) -> None:
    src = saved(tmp_path / "src", {}, {})
    head = {f"layers.{i}.w": {"dtype": "F4", "shape": [2, 4], "data_offsets": [4 * i, 4 * i + 4]} for i in range(2)}
    text = json.dumps(head).encode()
    (src / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(8))
    done, made = report(src, tmp_path / "r.html", "--stats", "--diff", src, "--values")
    assert done.code == 0
    assert made["notes"][-1] == "no statistics of 2 tensors: elements smaller than a byte"
    assert columns(made)["norm"] == [None, None]


def test_a_checkpoint_without_tensors(tmp_path: Path) -> None:
    done, made = report(saved(tmp_path / "src", {}, {}), tmp_path / "r.html", "--stats")
    assert done.code == 0
    assert [s["id"] for s in made["sections"]] == ["findings"]


def test_two_checkpoints_of_a_run(model: Path, tmp_path: Path) -> None:
    for step in (1000, 2000):
        shutil.copytree(model, tmp_path / "run" / f"step-{step}")
    done, made = report(tmp_path / "run", tmp_path / "r.html", "--diff", "step-1000", "step-2000", "--values")
    assert done.code == 0
    assert made["title"] == "step-1000"
    how = "(names, dtypes, shapes, values compared)"
    assert made["verdicts"][1] == {"state": "good", "text": f"Equal to step-2000: 21 tensors {how}"}
    assert ckpttool("inspect", tmp_path / "run", "--html", tmp_path / "r.html").out.endswith("kB, 2 checkpoints\n")


def test_only_checksums_that_were_asked_for_are_read(tmp_path: Path) -> None:
    assert ckpttool("reshard", TP8, tmp_path / "dst", "--tp-out", 1, "--manifest", "-q").code == 0
    _, made = report(tmp_path / "dst", tmp_path / "r.html")
    assert "checksums" not in section(made, "findings")["checked"]
    _, made = report(tmp_path / "dst", tmp_path / "r.html", "--check")
    assert section(made, "findings")["checked"]["checksums"] == 39


@pytest.mark.parametrize("option", ["--list", "--files", "--ranks", "--metadata", "--hash", "--imports", "--depth=1"])
def test_other_views_are_refused(option: str, model: Path, tmp_path: Path) -> None:
    done = ckpttool("inspect", model, "--html", tmp_path / "r.html", option)
    assert done.code == 2
    assert f"{option.partition('=')[0]} is not part of a report" in done.err
    assert not (tmp_path / "r.html").exists()


def test_no_file_but_a_report_is_replaced(model: Path, tmp_path: Path) -> None:
    src = saved(tmp_path / "src", llama())
    before = (src / "model.safetensors").read_bytes()
    done = ckpttool("inspect", src, "--html", src / "model.safetensors")
    assert done.code == 1
    assert "a file that is not a report" in done.err
    assert (src / "model.safetensors").read_bytes() == before
    for _ in range(2):
        assert ckpttool("inspect", model, "--html", tmp_path / "r.html").code == 0
    assert ckpttool("inspect", model, "--html", tmp_path).code == 1
    other = tmp_path / "index.html"
    other.write_text('<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>Mine</title>')
    done = ckpttool("inspect", model, "--html", other)
    assert (done.code, "a file that is not a report" in done.err) == (1, True)
    assert "Mine" in other.read_text()
    done = ckpttool("inspect", model, "--html", tmp_path / "none" / "r.html")
    assert (done.code, "the directory of the report does not exist" in done.err) == (1, True)
    done = ckpttool("inspect", model, "--html", tmp_path / "new.html", "--findings", "sarif")
    assert (done.code, "hint: add --check" in done.err) == (2, True)


def test_nothing_is_written_for_what_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    done = ckpttool("inspect", tmp_path / "empty", "--html", tmp_path / "r.html")
    assert done.code == 1
    assert "no checkpoint format is recognised" in done.err
    assert not (tmp_path / "r.html").exists()


def test_a_plain_inspect_loads_nothing_of_it() -> None:
    code = (
        "import sys; from tests.helpers.command import ckpttool; ckpttool('inspect', 'fixtures/vllm_sharded_tp2');"
        "print([m for m in sys.modules if m.endswith('report.survey') or 'report.page' in m])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_same_page_from_python(model: Path, tmp_path: Path) -> None:
    import ckpttool as api

    assert ckpttool("inspect", model, "--html", tmp_path / "a.html", "--stats", "--diff", model, "--values").code == 0
    written = api.open(model).report(tmp_path / "b.html", stats=True, diff=model, values=True)
    assert written.path == tmp_path / "b.html"
    assert Path(written).read_bytes() == (tmp_path / "a.html").read_bytes()
    with pytest.raises(OutputError, match="not a report"):
        api.open(model).report(model / "config.json")


def test_documents_have_each_section_once(model: Path) -> None:
    found = look(PageView(choice=TensorChoice(), stats=True), model, OpenOptions())
    assert isinstance(found, ReportContents)
    made = document(found)
    ids = [s["id"] for s in made["sections"]]
    assert ids == ["sizes", "norms", "extremes", "outliers", "zeros", "findings", "tensors"]


def test_a_hundred_thousand_tensors_would_be_less_than_2_mb(monkeypatch: pytest.MonkeyPatch) -> None:
    n, rng = 2000, np.random.default_rng(0)
    rows = [
        TensorRow(f"model.layers.{i // 256}.mlp.experts.{i % 256}.up.weight", "BF16", (64, 99), 12672, -1, 0, 1)
        for i in range(n)
    ]
    std = 0.02 * np.exp(rng.normal(0, 0.15, n))
    low, high = -5.5 * std * rng.uniform(0.9, 1.1, n), 5.5 * std * rng.uniform(0.9, 1.1, n)
    values = []
    for row, s, a, b, mean in zip(rows, std.tolist(), low.tolist(), high.tolist(), rng.normal(0, 1e-5, n), strict=True):
        bins = np.exp(-0.5 * (np.linspace(a, b, 20) / s) ** 2)
        stats = Stats(6336, a, b, float(mean), s, max(b, -a), 0, 0, int(rng.poisson(9)), None)
        values.append(Values(row, stats, Histogram((), tuple(map(int, rng.poisson(600 * bins))))))
    found = ReportContents(PageView(choice=TensorChoice(), stats=True), Path("x"), CheckResult(Path("x")), [])
    stored = StoredCheckpoint("hf", Path("x"), [], [], Mesh())
    found.listing = TensorListing(Path("x"), stored, rows, n, logical=True, notes=[], options=OpenOptions(), every=rows)
    found.values = tuple(values)
    made = document(found)
    empty = len(render({**made, "tensors": {"names": [], "columns": []}}))
    packing = sys.modules["ckpttool.report.page.pack"]
    monkeypatch.setattr(packing, "_FIDELITY", vars(packing)["_FIDELITY"][-1:])  # that of 100,000 tensors
    assert (len(render(made)) - empty) * 100_000 / n < 2_000_000 - empty


def test_what_was_not_compared_is_told(tmp_path: Path) -> None:
    tensors = llama("F32")
    left = saved(tmp_path / "left", tensors)
    name = "model.norm.weight"
    right = saved(tmp_path / "right", {n: t for n, t in tensors.items() if n != name})
    done, made = report(left, tmp_path / "r.html", "--diff", right)
    assert done.code == 3
    said = f"Different from right: 0 of {len(tensors) - 1} tensors changed, 1 only in this checkpoint "
    assert made["verdicts"][1]["text"] == said + "(names, dtypes, shapes, values compared)"


def test_a_component_of_one_side_is_told(tmp_path: Path) -> None:
    whole = Path("fixtures/paddle_unified/nlp_llama_bf16_tp2_ignore_merge")
    model = tmp_path / "model"
    assert ckpttool("reshard", whole, model, "--to", "hf", "--only", "model", "-q").code == 0
    _, made = report(whole, tmp_path / "r.html", "--diff", model)
    assert [n for n in made["notes"] if n.startswith("not compared: ")], made["notes"]


def test_within_a_tolerance_no_change_is_not_told_as_zero(tmp_path: Path) -> None:
    def made(root: str, step: float) -> Path:
        return saved(tmp_path / root, {"a": Raw("F32", np.asarray([1, 1 + step], np.float32).view(np.uint32))})

    left, right = made("left", 0.001), made("right", 0.0)
    done, found = report(left, tmp_path / "r.html", "--diff", right, "--atol", "0.01")
    assert (done.code, columns(found)["relative"]) == (0, [None])
    how = "(names and shapes compared, values within 0.01 + 0 * |right|)"
    assert found["verdicts"][1]["text"] == f"Equal to right: 1 tensor {how}"
    done, found = report(left, tmp_path / "r.html", "--diff", right, "--headers-only")
    said = "Same headers as right: 1 tensor (names, dtypes, shapes compared; values not compared)"
    assert (done.code, found["verdicts"][1]["text"], "relative" in columns(found)) == (0, said, False)
    assert columns(report(left, tmp_path / "r.html", "--diff", left, "--values")[1])["relative"] == [0.0]
