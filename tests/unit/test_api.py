"""The Python API: everything that the commands do, its objects in a console and in a notebook, and its errors."""

from __future__ import annotations

import inspect
import json
import shutil
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import ckpttool
from ckpttool.api.plans import watching
from ckpttool.errors import ConflictError, LayoutError, OutputError, UsageError, VerifyError
from ckpttool.storage.place import local_path
from tests.helpers.command import ckpttool as command
from tests.helpers.tensorfile import Raw, read, save_hf

FIXTURES = Path(__file__).parents[2] / "fixtures"
LLAMA = FIXTURES / "llama_tp8"
MERGE = FIXTURES / "merge" / "inputs"


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def same_as(written: ckpttool.Written, *words: object, at: Path) -> None:
    """What the command line writes has the same bytes."""
    done = command(*words)
    assert done.code == 0, done.err
    assert files(local_path(written.path)) == files(at)


# -- what the commands do


def test_reshard(tmp_path: Path) -> None:
    with ckpttool.open(LLAMA) as source:
        plan = source.reshard(tp=2, to="vllm")
        assert (plan.mesh.tp, plan.format) == (2, "vllm")
        written = plan.run(tmp_path / "a", verify=True)
    assert written.verified
    assert written.files == len(files(tmp_path / "a"))
    assert written.nbytes == sum(map(len, files(tmp_path / "a").values()))
    same_as(written, "reshard", LLAMA, tmp_path / "b", "--tp-out", 2, "--to", "vllm", at=tmp_path / "b")


def test_merge(tmp_path: Path) -> None:
    plan = ckpttool.merge(
        [MERGE / "ft1", MERGE / "ft2"],
        base=MERGE / "base",
        method="ties",
        weights=[0.6, 0.4],
        params={"density": [0.5, 0.75], "normalize": False},
    )
    assert plan.method == "ties"
    written = plan.run(tmp_path / "a", verify=True, workers=2)
    words = ("--base", MERGE / "base", "--method", "ties", "--weights", "0.6,0.4")
    params = ("--param", "density=0.5,0.75", "--param", "normalize=false")
    same_as(written, "merge", MERGE / "ft1", MERGE / "ft2", *words, *params, "-o", tmp_path / "b", at=tmp_path / "b")


def test_merge_by_a_recipe_and_of_shards(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yml"
    recipe.write_text(
        json.dumps(
            {
                "merge_method": "linear",
                "models": [{"model": str(MERGE / n), "parameters": {"weight": 1}} for n in ("ft1", "ft2")],
                "dtype": "bfloat16",
            }
        )
    )
    assert ckpttool.merge(recipe).method == "linear"
    written = ckpttool.merge(LLAMA).run(tmp_path / "one")
    assert written.tensors == len(ckpttool.open(LLAMA))
    with pytest.raises(UsageError, match="no parameter `desity`"):
        ckpttool.merge([MERGE / "ft1", MERGE / "ft2"], method="ties", base=MERGE / "base", params={"desity": 1})


def test_drop_keys(tmp_path: Path) -> None:
    plan = ckpttool.drop_keys(FIXTURES / "hf_tiny_source", "*.0.mlp.*", "lm_head.*")
    assert "lm_head.weight" in plan.removed
    written = plan.run(tmp_path / "a", verify=True)
    patterns = ("*.0.mlp.*", "lm_head.*")
    same_as(written, "drop-keys", FIXTURES / "hf_tiny_source", tmp_path / "b", *patterns, at=tmp_path / "b")
    with pytest.raises(UsageError, match="matches no tensor"):
        ckpttool.open(LLAMA).drop_keys("nothing")


def test_quantize_and_back(tmp_path: Path) -> None:
    with ckpttool.open(FIXTURES / "hf_tiny_source") as weights:
        weights.quantize("tensor").run(tmp_path / "fp8", verify=True)
    with ckpttool.open(tmp_path / "fp8") as quantized:
        assert quantized["model.layers.0.mlp.up_proj.weight"].dtype == "F8_E4M3"
        quantized.quantize(to="bf16").run(tmp_path / "bf16")
    assert ckpttool.open(tmp_path / "bf16")["model.layers.0.mlp.up_proj.weight"].dtype == "BF16"


def test_check(tmp_path: Path) -> None:
    assert ckpttool.check(LLAMA, values=True).ok
    assert ckpttool.open(LLAMA).check().ok
    shutil.copytree(FIXTURES / "hf_tiny_source", tmp_path / "src")
    file = tmp_path / "src" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    found = ckpttool.check(tmp_path / "src")
    assert not found.ok
    assert found.findings[0].severity == "error"
    assert "1 error" in repr(found)


def test_diff(tmp_path: Path) -> None:
    source = ckpttool.open(LLAMA)
    source.reshard(tp=1, to="hf").run(tmp_path / "hf")
    assert ckpttool.diff(LLAMA, tmp_path / "hf").ok
    assert source.diff(ckpttool.open(tmp_path / "hf")).ok
    file = tmp_path / "hf" / "model.safetensors"
    tensors = dict(read(file))
    bits = tensors["model.norm.weight"].bits.copy()
    bits[3] += 1
    save_hf(tmp_path / "hf", {**tensors, "model.norm.weight": Raw("BF16", bits)}, source.config)
    found = source.diff(tmp_path / "hf")
    assert not found.ok
    assert [e.name for e in found.elements] == ["model.norm.weight"]
    assert source.diff(tmp_path / "hf", values=False).ok
    assert source.diff(tmp_path / "hf", rtol=0.5).ok


def test_convert(tmp_path: Path) -> None:
    program, there, again = FIXTURES / "paddle_programs/pir/model.json", tmp_path / "p.safetensors", tmp_path / "again"
    written = ckpttool.convert(program, there).run(there)
    assert written.verified
    assert written.tensors == len(read(there))
    assert ckpttool.convert(there, again, program=program).run(again).format == "program"
    assert (again / "model.pdiparams").read_bytes() == program.with_name("model.pdiparams").read_bytes()


def test_size() -> None:
    found = ckpttool.size(FIXTURES / "hf_tiny_source", "bf16", tp=2, kv="bf16", tokens=100, gpu="h100")
    said = command("size", FIXTURES / "hf_tiny_source", "--recipe", "bf16", "--tp-out", 2, "--kv", "bf16",
                   "--tokens", 100, "--gpu", "h100", "--json")  # fmt: skip
    data = json.loads(said.out)
    assert found.ok
    assert (found.parameters, found.nbytes) == (data["parameters"], data["bytes"])
    assert found.rank_bytes is not None
    assert len(found.rank_bytes) == 2
    assert (found.needed, found.memory) == (data["fit"]["needed"], data["fit"]["memory"])
    assert found.needed is not None
    uncut = ckpttool.size(FIXTURES / "hf_tiny_source", "block", tp=1)
    assert not uncut.ok
    assert any("not a multiple of 128" in why for why in uncut.misfits)
    assert not found.misfits
    small = ckpttool.size(ckpttool.open(FIXTURES / "hf_tiny_source"), "bf16", device_mem=found.needed)
    assert not small.ok
    with pytest.raises(UsageError, match="exclude"):
        ckpttool.size(FIXTURES / "hf_tiny_source", gpu="h100", device_mem=1)


# -- a mapping


def test_a_mapping() -> None:
    source = ckpttool.open(LLAMA)
    assert list(source) == list(source.keys()) == [n for n, _ in source.items()]
    assert len(source.items()) == len(source.values()) == len(source) == 39
    assert source.get("lm_head") is None
    assert source.get("lm_head.weight") == source["lm_head.weight"] == source.catalog["lm_head.weight"]
    assert source != ckpttool.open(LLAMA)
    assert {source: 1}[source] == 1
    with pytest.raises(KeyError):
        source["lm_head"]
    with pytest.raises(UsageError, match="3 is not a tensor name"):
        source[3]  # type: ignore[index]
    assert "lm_head" not in source
    assert source.identity.layers == 4


def test_tensors_one_after_the_other() -> None:
    source = ckpttool.open(LLAMA)
    found = dict(source.tensors())
    assert found.keys() == {*source}
    assert all(np.array_equal(found[n], source.read(n)) for n in source)
    norms = dict(source.tensors("*norm.weight", framework="pt"))
    assert {n for n in source if n.endswith("norm.weight")} == norms.keys()
    assert {str(t.dtype) for t in norms.values()} == {"torch.bfloat16"}
    with pytest.raises(UsageError, match="framework `tf`"):
        next(source.tensors(framework="tf"))  # type: ignore[call-overload]
    with pytest.raises(UsageError, match="matches no tensor"):
        next(source.tensors("nothing"))


def test_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is an extra: whoever asks for its tensors hears so before anything is read."""
    monkeypatch.setitem(sys.modules, "torch", None)
    source = ckpttool.open(LLAMA)
    assert source.read("model.norm.weight").shape == (64,)
    monkeypatch.setattr("ckpttool.api.checkpoint.read_tensor", None)
    for ask in (lambda: source.torch("model.norm.weight"), lambda: source.tensors(framework="pt")):
        with pytest.raises(UsageError, match="a torch tensor needs a package that is not installed: torch") as caught:
            ask()
        assert caught.value.hint == "pip install 'ckpttool[torch]'"


PARTS: list[tuple[Any, Any]] = [
    ((), ...),
    (np.s_[3:7], slice(3, 7)),
    (np.s_[5:6], 5),
    (np.s_[7:8, ...], (np.int64(7), ...)),
    (np.s_[..., 3:7], (..., slice(3, 7))),
    (np.s_[63:64], -1),
    (np.s_[2:4, 20:24], np.s_[2:4, 20:24]),
    (np.s_[61:64, 174:175], (slice(-3, None), -2)),
    (np.s_[9:9], slice(9, 2)),
]
"""What numpy is asked, which loses no axis, and what is asked here."""


def test_reading_takes_what_numpy_takes() -> None:
    source, name = ckpttool.open(LLAMA), "model.layers.0.mlp.down_proj.weight"
    held = source.read(name)
    for theirs, ours in PARTS:
        assert np.array_equal(source.read(name, ours), held[theirs]), ours
    for piece in source[name].pieces:
        (a, b), (c, d) = piece.logical_box
        assert np.array_equal(source.read(name, piece.logical_box), held[a:c, b:d])
    with pytest.raises(UsageError, match="is outside"):
        source.read("model.norm.weight", source[name].pieces[0].logical_box)


@pytest.mark.parametrize(
    "part",
    [None, True, 1.5, "0", [0, 1], (0, 0, 0), (..., ...), 64, -65, slice(0, 9, 2), np.arange(2), ((0, 4), (2, 4))],
)
def test_what_is_no_part_of_a_tensor(part: object) -> None:
    with pytest.raises(UsageError, match="down_proj"):
        ckpttool.open(LLAMA).read("model.layers.0.mlp.down_proj.weight", part)  # type: ignore[arg-type]


def test_a_whole_tensor_takes_its_own_memory_only(tmp_path: Path) -> None:
    save_hf(tmp_path / "src", {"w": Raw("F32", np.ones((1024, 4096), np.uint32))}, {})
    source = ckpttool.open(tmp_path / "src")
    source.read("w", 0)
    tracemalloc.start()
    held = source.read("w")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert held.nbytes == 16 << 20
    assert peak < held.nbytes + (4 << 20)


def test_tied_names_find_their_owner() -> None:
    tied = ckpttool.open(FIXTURES / "vllm" / "llama_tied")
    assert tied.tied == {"lm_head.weight": "model.embed_tokens.weight"}
    assert "lm_head.weight" in tied
    assert "lm_head.weight" not in list(tied)
    assert tied["lm_head.weight"] == tied["model.embed_tokens.weight"]
    assert np.array_equal(tied.read("lm_head.weight"), tied.read("model.embed_tokens.weight"))


def test_a_single_string_is_one_pattern(tmp_path: Path) -> None:
    source = ckpttool.open(FIXTURES / "hf_tiny_source")
    norms = {n for n in source if "norm" in n}
    assert {v.name for v in source.reshard(keep="*norm*").prepared.views} == norms
    assert set(source) - set(source.drop_keys(keep="*norm*").removed) == norms
    assert source.diff(source, patterns="*norm*").compared == len(norms)
    written = source.quantize("block", keep="*.o_proj.weight").run(tmp_path / "dst")
    assert ckpttool.open(written)["model.layers.0.self_attn.o_proj.weight"].dtype == "BF16"
    with pytest.raises(UsageError, match="patterns contains"):
        source.drop_keys(["lm_head.*"])  # type: ignore[arg-type]


def test_sizes_are_numbers_or_words(tmp_path: Path) -> None:
    source = ckpttool.open(FIXTURES / "hf_tiny_source")
    named, counted = (source.reshard(to="hf", max_shard_size=n) for n in ("100kB", 100_000))
    assert [o.name for o in named.plan.outputs] == [o.name for o in counted.plan.outputs]
    assert len(named.plan.outputs) > 2
    assert named.run(tmp_path / "dst", memory="8MiB").tensors == 21
    said = ckpttool.size(source, "bf16", kv="bf16", tokens="1k", device_mem="1GB")
    assert said == ckpttool.size(source, "bf16", kv="bf16", tokens=1024, device_mem=1e9)


def test_the_text_of_the_command_line_says_the_same(tmp_path: Path) -> None:
    """Everything that options say as text, and the API as numbers."""
    hf = ckpttool.open(FIXTURES / "hf_tiny_source")
    plans = [hf.quantize("block", block=b) for b in ("32x64", "32X64", (32, 64))]
    assert plans[0].plan.outputs == plans[1].plan.outputs == plans[2].plan.outputs
    assert ckpttool.size(hf, "block", block="16x32") == ckpttool.size(hf, "block", block=(16, 32))
    with pytest.raises(UsageError, match="block `32` is not MxN"):
        hf.quantize("block", block="32")
    said = {"pp": 2, "tp": 2, "to": "hybrid"}
    one = ckpttool.open(LLAMA).reshard(**said, pp_layout="3,1", ranks="0-1,3", betas="0.9,0.999")  # type: ignore[arg-type]
    two = ckpttool.open(LLAMA).reshard(**said, pp_layout=(3, 1), ranks=[0, 1, 3], betas=(0.9, 0.999))  # type: ignore[arg-type]
    assert [(o.name, o.size) for o in one.plan.outputs] == [(o.name, o.size) for o in two.plan.outputs]
    weighed = [ckpttool.merge([MERGE / "ft1", MERGE / "ft2"], weights=w) for w in ("0.4,0.6", [0.4, 0.6])]
    runs = [m.run(tmp_path / str(at)) for at, m in enumerate(weighed)]
    assert files(local_path(runs[0].path)) == files(local_path(runs[1].path))


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"tp": "2"}, "tp is '2'"),
        ({"tp": True}, "tp is True"),
        ({"tp": 1.5}, "tp is 1.5"),
        ({"pp": 0}, "pp is 0"),
        ({"max_shard_size": -5}, "max_shard_size is -5"),
        ({"max_shard_size": "much"}, "`much` is not a size"),
        ({"vocab_multiple": 0}, "vocab_multiple is 0"),
        ({"pp_layout": "1;1"}, "pp_layout `1;1` is not a list of numbers"),
        ({"pp_layout": 1.5}, "pp_layout is 1.5"),
        ({"ranks": "0-x"}, "ranks `0-x` is not a list of numbers"),
        ({"betas": "0.9"}, "betas `0.9` is not two numbers"),
        ({"betas": "0.9,2"}, "betas `0.9,2` is not two numbers"),
        ({"betas": 0.9}, "betas is 0.9"),
        ({"betas": ("a", "b")}, "betas is \\('a', 'b'\\)"),
        ({"sharding_version": "v3"}, "v3` is not one of"),
    ],
)
def test_options_of_reshard_that_make_no_sense(given: dict[str, object], match: str) -> None:
    with pytest.raises(UsageError, match=match):
        ckpttool.open(LLAMA).reshard(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"missing": "all"}, "missing `all` is not one of"),
        ({"vocab": "all"}, "vocab `all` is not one of"),
        ({"rng": "numpy"}, "rng `numpy` is not one of"),
        ({"seed": -1}, "seed is -1"),
        ({"weights": []}, "weights are"),
        ({"weights": "0.4;0.6"}, "weights are '0.4;0.6'"),
        ({"params": "density=0.5"}, "params is 'density=0.5'"),
        ({"weights": 0.5}, "weights are 0.5"),
    ],
)
def test_options_of_merge_that_make_no_sense(given: dict[str, object], match: str) -> None:
    with pytest.raises(UsageError, match=match):
        ckpttool.merge([MERGE / "ft1", MERGE / "ft2"], **given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "given",
    [{"tokens": -5}, {"batch": 0}, {"zero": 9}, {"zero": "2"}, {"tp": 0}, {"block": 128}, {"max_shard_size": 0}],
)
def test_options_of_size_that_make_no_sense(given: dict[str, object]) -> None:
    with pytest.raises(UsageError, match=f"^{next(iter(given))} is "):
        ckpttool.size(FIXTURES / "hf_tiny_source", **{"kv": "bf16", "tokens": 5, **given})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "given", [{"workers": 0}, {"workers": -1}, {"memory": 1}, {"memory": "x"}, {"progress": print}]
)
def test_options_of_run_that_make_no_sense(given: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=next(iter(given))):
        ckpttool.open(LLAMA).reshard(tp=2).run(tmp_path / "dst", **given)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_open_checkpoints_and_what_was_written_are_sources(tmp_path: Path) -> None:
    one, two, base = (ckpttool.open(MERGE / n) for n in ("ft1", "ft2", "base"))
    density = np.array([0.5, 0.75])
    merging = ckpttool.merge([one, two], base=base, method="ties", weights=[1, 1], params={"density": density})
    written = merging.run(tmp_path / "a")
    again = ckpttool.merge([MERGE / "ft1", MERGE / "ft2"], base=MERGE / "base", method="ties", weights=[1, 1],
                           params={"density": [0.5, 0.75]}).run(tmp_path / "b")  # fmt: skip
    assert files(local_path(written.path)) == files(local_path(again.path))
    assert ckpttool.diff(written, again).ok
    assert ckpttool.merge([written, again]).run(tmp_path / "c").tensors == written.tensors
    assert ckpttool.drop_keys(one, "lm_head.*").removed == ("lm_head.weight",)
    odd = ckpttool.open(MERGE / "ft1", family="qwen2")
    with pytest.raises(UsageError, match="opened with its own options"):
        ckpttool.merge([odd, two])


def test_the_other_side_of_a_diff_is_opened_as_it_was(tmp_path: Path) -> None:
    source = ckpttool.open(LLAMA)
    source.reshard(tp=2).run(tmp_path / "dst")
    for rank in range(2):
        (tmp_path / "dst" / f"rank-{rank:05}-of-00002.safetensors").rename(tmp_path / "dst" / f"w{rank}.safetensors")
    odd = ckpttool.open(tmp_path / "dst", rank_pattern="w{tp}.safetensors")
    found = source.diff(odd)
    assert found.ok
    assert repr(found) == f"<DiffResult {LLAMA}, {tmp_path / 'dst'}: equal: 39 tensors>"
    assert ckpttool.diff(source, FIXTURES / "hf_tiny_source").changed == 21
    with pytest.raises(UsageError, match="atol is -1"):
        source.diff(odd, atol=-1)


def test_a_plan_outlives_its_source(tmp_path: Path) -> None:
    """Also where tensors are decoded: opening keeps nothing that closing would take away."""
    with ckpttool.open(FIXTURES / "paddle_pickles" / "model_proto2.pdparams") as source:
        plan = source.reshard(to="hf")
        name = next(iter(source))
        source.read(name)
    assert plan.run(tmp_path / "dst").tensors == len(source)
    with pytest.raises(UsageError, match="is closed"):
        source.reshard(to="hf")
    with pytest.raises(UsageError, match="is closed"):
        source.read(name)
    source.close()


def test_a_conversion_is_written_where_it_was_planned(tmp_path: Path) -> None:
    plan = ckpttool.convert(FIXTURES / "paddle_programs/pir/model.json", tmp_path / "a.safetensors")
    with pytest.raises(UsageError, match="this plan is for"):
        plan.run(tmp_path / "b.safetensors")
    assert not list(tmp_path.iterdir())


# -- consoles and notebooks


def test_reprs_are_one_short_line(tmp_path: Path) -> None:
    source = ckpttool.open(LLAMA)
    plan = source.reshard(tp=2)
    written = plan.run(tmp_path / "dst")
    size = ckpttool.size(FIXTURES / "hf_tiny_source", gpu="h100")
    objects = (source, source["lm_head.weight"], source.catalog, plan, plan.plan, written, size, source.check())
    for thing in objects:
        assert "\n" not in repr(thing)
        assert len(repr(thing)) < 100 + len(str(tmp_path)) + len(str(FIXTURES))
    for thing in (plan, written, size):
        assert "<table>" in thing._repr_html_()


def shown(thing: object) -> str:
    html = getattr(thing, "_repr_html_")()  # noqa: B009  (of classes that know nothing of notebooks)
    assert "<script" not in html
    return str(html)


def test_a_notebook_shows_a_checkpoint_as_a_tree_that_folds() -> None:
    html = shown(ckpttool.open(LLAMA))
    assert "tp 8, 39 tensors, 419.71 kB" in html
    assert "<details" in html
    assert "layers.{0..3}</span>" in html
    assert "BF16, [64, 64]" in html
    assert "ema" in shown(ckpttool.open(FIXTURES / "paddle_zcc" / "ep2_tp2_sharding2_ema"))


def test_a_notebook_shows_where_a_tensor_lies_and_its_first_elements() -> None:
    source = ckpttool.open(LLAMA)
    html = shown(source["model.layers.0.mlp.down_proj.weight"])
    assert "BF16 [64, 176]" in html
    assert "model_tp7.safetensors" in html
    first = source.read("model.layers.0.mlp.down_proj.weight")[0, 0]
    assert f"{float(first):.4g}"[:6] in html


def test_a_notebook_shows_checks_and_differences(tmp_path: Path) -> None:
    assert "no problem found" in shown(ckpttool.check(LLAMA))
    shutil.copytree(FIXTURES / "hf_tiny_source", tmp_path / "bad")
    with (tmp_path / "bad" / "model.safetensors").open("r+b") as file:
        file.truncate(100_000)
    found = ckpttool.check(tmp_path / "bad")
    assert "error</b>" in shown(found)
    assert found.findings[0].id in shown(found.findings[0])
    different = shown(ckpttool.diff(MERGE / "ft1", MERGE / "ft2"))
    assert "different: 30 of 30 tensors changed" in different
    assert different.index("layers.0.self_attn.q_proj") < different.index("layers.2.self_attn.q_proj")
    assert "equal: 39 tensors (names, dtypes, shapes, values compared)" in shown(ckpttool.diff(LLAMA, LLAMA))
    assert "values not compared" in shown(ckpttool.diff(LLAMA, LLAMA, values=False))


def test_the_report_of_a_run(tmp_path: Path) -> None:
    for step in (1000, 2000):
        shutil.copytree(FIXTURES / "hf_tiny_source", tmp_path / "run" / f"step-{step}")
    report = ckpttool.make_report(tmp_path / "run", tmp_path / "r.html", stats=True)
    assert command("inspect", tmp_path / "run", "--html", tmp_path / "of-the-command.html", "--stats").code == 0
    assert (tmp_path / "of-the-command.html").read_bytes() == Path(report).read_bytes() == report.html.encode()
    of_one = ckpttool.make_report(FIXTURES / "hf_tiny_source", stats=True)
    assert of_one.html == ckpttool.open(FIXTURES / "hf_tiny_source").report(stats=True).html
    with pytest.raises(UsageError, match="check=True is about one checkpoint"):
        ckpttool.make_report(tmp_path / "run", check=True)


@pytest.mark.parametrize(
    ("call", "said", "hint"),
    [
        (lambda s: s.reshard(tensor_parallel_size=2), "reshard() has no argument tensor_parallel_size", "mean tp=?"),
        (lambda s: s.reshard(format="hf"), "no argument format", "mean to=?"),
        (lambda s: s.reshard(2), "reshard(): too many positional arguments", "pass these by name: tp=, pp=, "),
        (lambda s: s.diff(LLAMA, headers_only=True), "no argument headers_only", "mean values=False?"),
        (lambda s: s.report(html="x"), "no argument html", "mean file=?"),
        (lambda s: s.reshard().run("x", overwrite=True), "no argument overwrite", "mean force=True?"),
        (lambda _: ckpttool.merge([LLAMA], density=0.5), "no argument density", "params={'density': ...}"),  # type: ignore[call-arg]
        (lambda _: ckpttool.merge(LLAMA, LLAMA), "merge(): too many positional arguments", "by name: method=, "),  # type: ignore[call-arg, arg-type]
        (lambda _: ckpttool.merge([]), "sources is empty", "merge([a, b])"),
        (lambda _: ckpttool.open(), "open(): missing a required argument: 'path'", ""),  # type: ignore[call-arg]
        (lambda _: ckpttool.open(None), "None is not a path", "pass a str or a Path"),  # type: ignore[arg-type]
        (lambda _: ckpttool.open(LLAMA, tp=3), "tp=3 contradicts the checkpoint", "written is `tp` in reshard()"),
        (lambda _: ckpttool.size(LLAMA, gpu="h100", utilization=9), "utilization=9 is not a share", "at most 1"),
        (lambda _: ckpttool.size(LLAMA, gpu="h100", utilization="9"), "utilization is '9'", "pass a number"),  # type: ignore[arg-type]
    ],
)
def test_mistakes_of_python_name_the_arguments(call: Callable[[Any], object], said: str, hint: str) -> None:
    with pytest.raises(UsageError if "contradicts" not in said else ConflictError) as caught:
        call(ckpttool.open(LLAMA))
    assert said in caught.value.what
    assert hint in (caught.value.hint or "")


def test_less_of_the_memory_is_used() -> None:
    sizes = [ckpttool.size(FIXTURES / "hf_tiny_source", "bf16", device_mem=450_000, utilization=u) for u in (1.0, 0.5)]
    assert [s.ok for s in sizes] == [True, False]


def test_a_notebook_shows_a_report(tmp_path: Path) -> None:
    report = ckpttool.open(FIXTURES / "hf_tiny_source").report()
    assert report.path is None
    assert '<iframe sandbox="allow-scripts"' in report._repr_html_()
    assert "&lt;!doctype html&gt;" in report._repr_html_()
    written = ckpttool.open(FIXTURES / "hf_tiny_source").report(tmp_path / "r.html")
    assert Path(written).read_text(encoding="utf-8") == report.html
    with pytest.raises(UsageError, match="not written to a file"):
        Path(report)


def test_html_is_escaped(tmp_path: Path) -> None:
    save_hf(tmp_path / "src", {"<script>alert(1)</script>.weight": Raw("F32", np.zeros(4, np.uint32))}, {})
    source = ckpttool.open(tmp_path / "src")
    for thing in (source, source[next(iter(source))], source.diff(source, values=False), source.reshard()):
        assert "<script" not in shown(thing)
    assert "&lt;script&gt;" in shown(source)


# -- progress


class Notebook:
    """What a kernel has: a shell with a kernel, and outputs that are shown and updated."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.shown: list[dict[str, str]] = []
        ipython, display = ModuleType("IPython"), ModuleType("IPython.display")
        ipython.get_ipython = lambda: SimpleNamespace(kernel=1)  # type: ignore[attr-defined]
        display.display = self.show  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "IPython", ipython)
        monkeypatch.setitem(sys.modules, "IPython.display", display)
        monkeypatch.setattr("ckpttool.report.bars.REFRESH_S", 0)
        monkeypatch.setattr("ckpttool.report.bars.PATIENCE_S", 0)

    def show(self, what: dict[str, str], *, raw: bool, display_id: bool = False) -> SimpleNamespace:
        assert raw
        assert display_id is not bool(self.shown), "one output for all"
        self.shown.append(what)
        return SimpleNamespace(update=self.show)


def test_a_bar_in_a_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = Notebook(monkeypatch)
    source = ckpttool.open(LLAMA)
    source.reshard(tp=2).run(tmp_path / "dst", progress=True, verify=True)
    said = [what["text/plain"] for what in cell.shown]
    assert said[0].startswith("write ")
    assert any(line.startswith("verify 100%") for line in said)
    assert said[-1] == cell.shown[-1]["text/html"] == ""
    assert '<progress value="100" max="100">' in cell.shown[-2]["text/html"]


@pytest.mark.parametrize("what", ["diff", "check"])
def test_what_reads_has_a_bar_too(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = Notebook(monkeypatch)
    source = ckpttool.open(LLAMA)
    found = source.diff(source, progress=True) if what == "diff" else source.check(values=True, progress=True)
    assert found.ok
    assert len(cell.shown) > 1
    assert cell.shown[-1]["text/plain"] == ""


def test_a_bar_is_gone_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = Notebook(monkeypatch)

    def interrupted() -> None:
        with watching(True) as bar:
            bar.start(100, 1)
            bar.advance(50)
            assert "50%" in cell.shown[-1]["text/plain"]
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert cell.shown[-1]["text/plain"] == ""


def test_without_a_terminal_a_bar_is_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    monkeypatch.setattr("ckpttool.report.bars.LINE_S", 0)
    ckpttool.open(LLAMA).reshard(tp=2).run(tmp_path / "dst", progress=True)
    assert "write 100%" in capfd.readouterr().err
    ckpttool.open(LLAMA).reshard(tp=2).run(tmp_path / "other", progress=False)
    assert capfd.readouterr().err == ""


# -- errors and docs


def test_errors(tmp_path: Path) -> None:
    source = ckpttool.open(LLAMA)
    with pytest.raises(LayoutError):
        source.reshard(tp=3)
    with pytest.raises(UsageError, match="no tensor `lm_head"):
        source["lm_head.wieght"]
    source.reshard(tp=2).run(tmp_path / "there")
    with pytest.raises(OutputError, match="exists"):
        source.reshard(tp=2).run(tmp_path / "there")
    assert issubclass(VerifyError, ckpttool.CkptError)


@pytest.mark.parametrize("name", [n for n in ckpttool.__all__ if not n.startswith("__")])
def test_everything_public_is_documented(name: str) -> None:
    """Every argument of a public function and method stands in its docstring, and every name on the page."""
    thing = getattr(ckpttool, name)
    assert inspect.getdoc(thing), name
    page = (Path(__file__).parents[2] / "docs" / "python.md").read_text(encoding="utf-8")
    assert name in page
    module = inspect.getmodule(thing)
    if module is None or not module.__name__.startswith("ckpttool.api"):
        return
    functions = [thing] if inspect.isfunction(thing) else [
        f for n, f in vars(thing).items() if inspect.isfunction(f) and not n.startswith("_")
    ]  # fmt: skip
    for function in functions:
        text = inspect.getdoc(function)
        assert text, function
        arguments = [p for p in inspect.signature(function).parameters if p != "self"]
        if len(arguments) > 1:
            missing = [a for a in arguments if a not in text]
            assert not missing, (function, missing)
