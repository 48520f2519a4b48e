"""``merge --report``: every number of it, worked out once more with numpy and from the checkpoints alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpttool.api import merge as plan_merge
from ckpttool.errors import OutputError, UsageError
from ckpttool.execute import NoProgress, RunOptions
from ckpttool.execute.measuring import Measurement
from ckpttool.kernels.merge import METHODS
from ckpttool.kernels.merge.base import Array, MergeTensor
from ckpttool.kernels.merge.draws import CounterDraws
from ckpttool.kernels.merge.measure import Measured, measured
from ckpttool.ops.merge import execute
from ckpttool.report.merged import document
from ckpttool.report.page import BEGINS, render
from tests.helpers.command import ckpttool
from tests.helpers.fleet import FakeFleet, end_all
from tests.helpers.tensorfile import read
from tests.merge.driver import ArrayChunk, run_method
from tests.merge.models import HIDDEN, finetuned, floats, llama, llama_config, save

NAMES = ("a", "b", "base")


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models and their base."""
    room = tmp_path_factory.mktemp("models")
    base = llama()
    for name, tensors in (("a", finetuned(base, 1)), ("b", finetuned(base, 2)), ("base", base)):
        save(room / name, tensors, llama_config())
    return room


def report(room: Path, dst: Path, *options: object) -> dict[str, Any]:
    """The report's part of ``--json``."""
    page = dst.with_suffix(".html")
    done = ckpttool("merge", room / "a", room / "b", "-o", dst, "--report", page, "--json", *options)
    assert done.code == 0, done.err
    found: dict[str, Any] = json.loads(done.out)["report"]
    assert found["path"] == str(page)
    return found


def by_source(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {Path(p["source"]).name: p for p in found["parents"]}


def values(directory: Path) -> dict[str, Array]:
    """All tensors, float64."""
    return {n: floats(raw) for p in sorted(directory.glob("*.safetensors")) for n, raw in read(p).items()}


def joined(tensors: dict[str, Array]) -> Array:
    return np.concatenate([tensors[n].reshape(-1) for n in sorted(tensors)])


def cosine(a: Array, b: Array) -> float:
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def test_distances_are_those_of_numpy(room: Path, tmp_path: Path) -> None:
    found = report(room, tmp_path / "dst", "--weights", "0.6,0.4")
    y = joined(values(tmp_path / "dst"))
    assert found["elements"] == y.size
    assert found["conflicts"] is None
    for name, said in by_source(found).items():
        x = joined(values(room / name))
        assert said["distance"] == pytest.approx(np.linalg.norm(y - x) / np.linalg.norm(x), rel=1e-5)
        assert said["cosine"] == pytest.approx(cosine(x, y), abs=1e-6)
        assert said.keys() == {"source", "base", "distance", "cosine"}


def test_swapped_weights_are_seen(room: Path, tmp_path: Path) -> None:
    right = by_source(report(room, tmp_path / "right", "--weights", "0.8,0.2"))
    wrong = by_source(report(room, tmp_path / "wrong", "--weights", "0.2,0.8"))
    assert right["a"]["distance"] < 0.5 * right["b"]["distance"]
    assert wrong["b"]["distance"] < 0.5 * wrong["a"]["distance"]


def largest(d: Array, density: float) -> Array:
    """The elements that ties keeps: the first of equals."""
    flat = np.abs(d).reshape(-1)
    kept = np.zeros(flat.size, np.bool_)
    kept[np.argsort(-flat, kind="stable")[: max(1, int(density * flat.size))]] = True
    return kept.reshape(d.shape)


def test_ties_is_counted_as_numpy_counts(room: Path, tmp_path: Path) -> None:
    dst = tmp_path / "dst"
    options = ("--method", "ties", "--weights", "0.6,0.4", "--param", "density=0.3,0.7", "--base", room / "base")
    found = report(room, dst, *options)
    y, a, b, base = (values(p) for p in (dst, *(room / n for n in NAMES)))
    count = dict.fromkeys(("changed a", "changed b", "kept a", "kept b", "agreeing a", "agreeing b", "conflicts"), 0)
    for n in base:
        parts = {}
        for name, x, weight, density in (("a", a[n], 0.6, 0.3), ("b", b[n], 0.4, 0.7)):
            d = x.astype(np.float32) - base[n].astype(np.float32)
            parts[name] = np.float32(weight) * d * largest(d, density)
            count[f"changed {name}"] += int(np.count_nonzero(d))
            count[f"kept {name}"] += int(np.count_nonzero(parts[name]))
        elected = np.where(parts["a"] + parts["b"] >= 0, 1, -1)
        for name, p in parts.items():
            count[f"agreeing {name}"] += int(np.count_nonzero(np.sign(p) == elected))
        count["conflicts"] += int(np.count_nonzero(parts["a"] * parts["b"] < 0))
    said, total = by_source(found), found["elements"]
    for name, model in (("a", a), ("b", b)):
        assert said[name]["changed"] == count[f"changed {name}"] / total
        assert said[name]["kept"] == count[f"kept {name}"] / total
        assert said[name]["agreeing"] == count[f"agreeing {name}"] / count[f"kept {name}"]
        moved = joined(y) - joined(base)
        assert said[name]["task_cosine"] == pytest.approx(cosine(moved, joined(model) - joined(base)), abs=1e-5)
    assert found["conflicts"] == count["conflicts"] / total
    assert 0.01 < found["conflicts"] < 0.5
    assert [p["base"] for p in found["parents"]] == [False, False, True]
    assert said["base"].keys() == {"source", "base", "distance", "cosine"}


PICKING = sorted(name for name, method in METHODS.items() if method.parts is not None)


def measure(name: str, models: list[Array], base: Array | None, result: Array, **whole: Any) -> Measured:
    """What is measured of one tensor, chunk by chunk."""
    method = METHODS[name]
    each = {n: 0.6 if n == "density" else 1.0 if p.default is None else p.default for n, p in method.per_model.items()}
    for_all = {n: p.default for n, p in method.whole.items()} | whole
    shape = models[0].shape
    draws = CounterDraws(3, "w")
    tensor = MergeTensor("w", shape, tuple(each for _ in models), for_all, base is not None, draws)
    program = measured(tensor, method)
    flat = [x.reshape(-1) for x in (*models, result)]
    size, step = flat[0].size, 4 * shape[-1]
    while True:
        try:
            see = next(program)
        except StopIteration as end:
            found: Measured = end.value
            return found
        for lo in range(0, size, step):
            see(ArrayChunk(lo, min(lo + step, size), None if base is None else base.reshape(-1), flat))


@pytest.mark.parametrize("name", PICKING)
def test_what_is_kept_is_what_changes_the_base(name: str) -> None:
    """Of a single model: an element is kept if and only if the result differs from the base there."""
    rng = np.random.default_rng(5)
    base = rng.standard_normal((24, HIDDEN)).astype(np.float32)
    model = base + np.where(rng.random(base.shape) < 0.8, rng.standard_normal(base.shape), 0).astype(np.float32)
    whole = {"select_topk": 0.5} if name == "sce" else {}
    each = {"density": 0.6, "weight": 1.0}
    draws = CounterDraws(3, "w")
    chunk = 4 * HIDDEN
    result = run_method(METHODS[name], [model], base, per_model=[each], whole=whole, draws=draws, name="w", chunk=chunk)
    found = measure(name, [model], base, result, **whole)
    assert found.kept == (int(np.count_nonzero(result != base)),)
    assert found.changed == (int(np.count_nonzero(model != base)),)
    assert found.agreeing in ((), found.kept)  # alone, it is always elected
    assert found.conflicts is None
    assert found.gaps[0] == pytest.approx(np.sum((result.astype(np.float64) - model) ** 2), rel=1e-5, abs=1e-9)
    if name != "sce":  # which selects among models
        assert 0 < found.kept[0] < found.changed[0] or name.startswith("ram")


def test_an_election_by_number() -> None:
    """Two small ones outvote a large one, but only if heads are counted."""
    x = [np.full((1, 4), v, np.float32) for v in (5.0, -1.0, -1.0)]
    zero = np.zeros((1, 4), np.float32)
    whole = {"reserve_p": 1.0, "rescale": False}
    assert measure("paddle_ties", x, zero, zero, elect_count=True, **whole).agreeing == (0, 4, 4)
    assert measure("paddle_ties", x, zero, zero, elect_count=False, **whole).agreeing == (4, 0, 0)
    assert measure("paddle_ties", x, None, zero, elect_count=False, **whole).conflicts == 4


@pytest.mark.parametrize("method", [m for m in METHODS if METHODS[m].models[1] != 1])
@pytest.mark.thorough  # what is measured is tested above; this runs all of them
def test_every_method_has_a_report(room: Path, tmp_path: Path, method: str) -> None:
    known = METHODS[method]
    options: list[object] = ["--method", method]
    options += ["--base", room / "base"] * (known.base == "needed")
    options += ["--weights", "0.6,0.4"] * ("weight" in known.per_model)
    options += ["--param", "decay=0.5"] * (method == "ema")
    options += ["--param", "density=0.5"] * ("density" in known.per_model)
    found = report(room, tmp_path / "dst", *options)
    assert all(p["distance"] is not None for p in found["parents"])
    assert all(("kept" in p) == (known.parts is not None) for p in found["parents"] if not p["base"])


TARGETS = [("--to", "vllm", "--tp-out", 2), ("--to", "unified"), ("--to", "ranks", "--pp-out", 3)]
TIES = ("--method", "ties", "--weights", "0.6,0.4", "--param", "density=0.5")


@pytest.mark.parametrize("options", TARGETS)
@pytest.mark.sample("options0", "options1")
def test_the_target_changes_nothing(room: Path, tmp_path: Path, options: tuple[object, ...]) -> None:
    """Cut, fused, turned or replicated: it is the same model, with the same numbers."""
    one = report(room, tmp_path / "one", *TIES, "--base", room / "base")
    two = report(room, tmp_path / "two", *TIES, "--base", room / "base", *options)
    assert {**one, "path": ""} == {**two, "path": ""}


def test_the_page_says_what_came_from_where(room: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "stack.yml"
    recipe.write_text(
        "merge_method: linear\nslices:\n"
        f"- sources: [{{model: {room / 'a'}, layer_range: [0, 2], parameters: {{weight: 0.75}}}},"
        f" {{model: {room / 'b'}, layer_range: [0, 2], parameters: {{weight: 0.25}}}}]\n"
        f"- sources: [{{model: {room / 'b'}, layer_range: [2, 3], parameters: {{weight: 1}}}}]\n"
    )
    plan = plan_merge(recipe).merge
    documents = [
        document(execute(plan, tmp_path / "dst", RunOptions(force=True), NoProgress(), measure=True)) for _ in range(2)
    ]
    assert render(documents[0]) == render(documents[1])
    sections: dict[str, Any] = {s["id"]: s for s in documents[0]["sections"]}
    assert {"sources", "origin", "changes", "recipe", "tensors", "distance-by-layer"} <= sections.keys()
    assert "kept-by-layer" not in sections
    lines = sections["distance-by-layer"]
    assert lines["x"] == [0, 1, 2]
    a, b = (s["values"] for s in lines["series"])
    assert 0 < a[0] < b[0]
    assert (a[2], b[2]) == (None, 0)


def test_tensors_that_no_float_holds_are_left_out(room: Path, tmp_path: Path) -> None:
    """And those that were not written: the numbers are of what there is."""
    found = report(room, tmp_path / "dst", "--weights", "1,1", "--remove-keys", "lm_head.*")
    assert found["tensors"] == len(values(tmp_path / "dst")) == 29


def test_a_machine_of_many(room: Path, tmp_path: Path) -> None:
    """On a fleet the numbers are those of one machine."""
    try:
        plan = plan_merge([room / "a", room / "b"], method="ties", weights=[0.6, 0.4], base=room / "base")
        fleet = FakeFleet()
        here = execute(plan.merge, tmp_path / "here", RunOptions(), NoProgress(), measure=True)
        there = execute(plan.merge, tmp_path / "there", RunOptions(on=fleet), NoProgress(), measure=True)
    finally:
        end_all()
    assert here.distances is not None
    assert there.distances is not None
    assert here.distances.summary() == there.distances.summary()
    assert any("items" in order for order in fleet.sent)


def test_after_an_interruption(room: Path, tmp_path: Path) -> None:
    (tmp_path / "dst.partial").mkdir()
    (tmp_path / "dst.partial/.journal").touch()
    found = report(room, tmp_path / "dst", "--weights", "1,1", "--resume")
    assert found["tensors"] == 30


def test_interrupted_while_it_is_measured(room: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was merged stays, and is not merged again."""
    whole, dst = Measurement.__call__, tmp_path / "dst"

    def full(self: Measurement, written: Path, advance: Any) -> None:
        whole(self, written, advance)
        raise OutputError("the disk is full")

    words = ("merge", room / "a", room / "b", "-o", dst, "--card", "--report", tmp_path / "r.html", "--json")
    with monkeypatch.context() as patched:
        patched.setattr(Measurement, "__call__", full)
        done = ckpttool(*words)
    assert done.code == 1
    assert "--resume" in done.out + done.err
    assert not dst.exists()
    assert not (tmp_path / "r.html").exists()
    done = ckpttool(*words, "--resume")
    assert done.code == 0, done.err
    assert json.loads(done.out)["bytes_resumed"] > 0.8 * json.loads(done.out)["target"]["bytes"]
    assert "## How far it is" in (dst / "README.md").read_text()


def test_an_old_report_is_replaced(room: Path, tmp_path: Path) -> None:
    (tmp_path / "dst.html").write_text(BEGINS + "old")
    report(room, tmp_path / "dst", "--weights", "1,1")
    assert "<html" in (tmp_path / "dst.html").read_text()


def test_a_report_in_the_new_directory(room: Path, tmp_path: Path) -> None:
    dst = tmp_path / "dst"
    done = ckpttool("merge", room / "a", room / "b", "-o", dst, "--report", dst / "report.html")
    assert done.code == 0, done.err
    assert (dst / "report.html").is_file()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("{a}", "{b}", "--report", "{w}/no/such/report.html"), "no such directory"),
        (("{a}", "{b}", "--report", "{w}"), "a directory of this name"),
        (("{a}", "{b}", "--report", "s3://bucket/report.html"), "on this machine"),
        (("{a}", "{b}", "--report", "{w}/r.html", "--part", "1/2"), "--part"),
        (("{a}", "--report", "{w}/r.html"), "one source"),
    ],
    ids=["nowhere", "directory", "remote", "part", "single"],
)
def test_refused_before_anything_is_written(room: Path, tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    places = {"a": room / "a", "b": room / "b", "w": tmp_path}
    done = ckpttool("merge", *[w.format(**places) for w in words], "-o", tmp_path / "dst")
    assert done.code in (1, 2)
    assert said in done.err
    assert done.err.count("error: ") == 1
    assert list(tmp_path.iterdir()) == []


def test_in_python(room: Path, tmp_path: Path) -> None:
    plan = plan_merge([room / "a", room / "b"], weights=[3, 1], report=tmp_path / "r.html")
    written = plan.run(tmp_path / "dst")
    assert (tmp_path / "r.html").is_file()
    assert written.distances is not None
    assert written.distances["parents"][0]["distance"] < written.distances["parents"][1]["distance"]
    assert plan_merge([room / "a", room / "b"]).run(tmp_path / "dst2").distances is None
    with pytest.raises(UsageError, match="one source"):
        plan_merge(room / "a", report=tmp_path / "r.html")
    with pytest.raises(OutputError, match="no such directory"):
        plan_merge([room / "a", room / "b"], report=tmp_path / "no/r.html").run(tmp_path / "dst3")
    assert not (tmp_path / "dst3").exists()


def test_a_dry_run_says_what_will_come_from_where(room: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "filters.yml"
    weight = "[{filter: mlp, value: 0.3}, {value: 0.7}]"
    recipe.write_text(
        f"merge_method: linear\nmodels:\n- {{model: {room / 'a'}, parameters: {{weight: {weight}}}}}\n"
        f"- {{model: {room / 'b'}, parameters: {{weight: 0.5}}}}\n"
    )
    words = ("merge", recipe, "-o", tmp_path / "dst", "--dry-run")
    done = ckpttool(*words)
    assert f"linear of {room / 'a'}: weight 0.3; {room / 'b'}: weight 0.5\n" in done.err + done.out
    assert "9 tensors: model.layers.{0..2}.mlp.down_proj.weight, " in done.err + done.out
    groups = json.loads(ckpttool(*words, "--json").out)["origin"]
    assert [g["tensors"] for g in groups] in ([9, 21], [21, 9])
    assert sum(g["elements"] for g in groups) == sum(raw.bits.size for raw in llama().values())
    alike = ckpttool("merge", room / "a", room / "b", "-o", tmp_path / "dst", "--dry-run")
    assert "linear of" not in alike.err + alike.out


def test_what_is_no_number_is_not_called_one(room: Path, tmp_path: Path) -> None:
    broken = llama()
    broken["lm_head.weight"].bits[0, 0] = 0x7FC0  # NaN
    save(tmp_path / "broken", broken, llama_config())
    words = ("merge", room / "a", tmp_path / "broken", "-o", tmp_path / "dst", "--allow-nonfinite", "--card")
    done = ckpttool(*words, "--report", tmp_path / "r.html", "--json")
    assert done.code == 0, done.err
    for parent in json.loads(done.out)["report"]["parents"]:
        assert (parent["distance"], parent["cosine"]) == (None, None)


@pytest.mark.sample("dare_linear")
@pytest.mark.parametrize("method", ["average", "dare_linear", "ties"])
def test_many_models_share_buffers(tmp_path: Path, method: str) -> None:
    """More of them than have a buffer each: the numbers are still those of each."""
    base, models = llama(layers=1), []
    save(tmp_path / "base", base, llama_config(layers=1))
    for i in range(14):
        models.append(save(tmp_path / f"m{i}", finetuned(base, i), llama_config(layers=1)))
    options: list[object] = ["--weights", ",".join(["1"] * 14), "--base", tmp_path / "base", "--param", "density=0.5"]
    words = ("merge", *models, "-o", tmp_path / "dst", "--report", tmp_path / "r.html", "--json", "--method", method)
    done = ckpttool(*words, *options * (method != "average"))
    assert done.code == 0, done.err
    found = json.loads(done.out)["report"]["parents"]
    y = joined(values(tmp_path / "dst"))
    for model, said in zip(models, found, strict=False):
        x = joined(values(model))
        assert said["distance"] == pytest.approx(np.linalg.norm(y - x) / np.linalg.norm(x), rel=1e-5)
        assert 0.15 < said.get("kept", 0.2) < 0.52
