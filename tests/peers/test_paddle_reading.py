"""Paddle's own readers on what ckpttool writes: safetensors, pickles and flex checkpoints, bit for bit.

First they read what Paddle's software wrote itself, so that they are known to tell the truth.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.command import ckpttool
from tests.helpers.tensorfile import assert_same, read_all
from tests.helpers.tensorfile import read as read_safetensors
from tests.peers import paddle_model, paddle_side
from tests.peers.paddle_model import STATE, bare, cut, is_power, joined, upright
from tests.peers.tool import reshard

FIXTURES = Path(__file__).parents[2] / "fixtures"
NLP, OLD, NEW = paddle_side.SOFTWARE
FLEX = {"model": "model_state", "master_weights": "master_weight", "optimizer": "optimizer_state"}
"""Component -> directory."""


def fixture(*parts: str) -> Path:
    path = FIXTURES.joinpath(*parts)
    if not path.exists():
        pytest.fail(f"{path.relative_to(FIXTURES.parent)} is missing")
    return path


def same(got: Any, want: Any) -> bool:
    """Equal shapes and bits."""
    return got.shape == want.shape and np.ascontiguousarray(got).tobytes() == np.ascontiguousarray(want).tobytes()


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    return {s: paddle_model.write_source(tmp_path_factory.mktemp("source"), s) for s in paddle_side.SOFTWARE}


# -- the readers themselves


@pytest.mark.parametrize("ranks", [1, 2])
def test_flex_reader_reads_what_paddle_wrote(ranks: int, tmp_path: Path) -> None:
    names = ("tp2_dp2", "tp2_dp2_replicas", "dist_tensor")
    told = paddle_side.read("flex", {n: fixture("paddle_flex", n) for n in names}, tmp_path, ranks=ranks)
    for name in names:
        of = "tp2_dp2" if name.startswith("tp2_dp2") else name
        check_flex(told[name], paddle_side.load(fixture("paddle_flex", f"{of}.expected.npz")), ranks)


def check_flex(told: Any, wanted: Mapping[str, Any], ranks: int) -> None:
    every = [told] if ranks == 1 else told
    assert not [x["error"] for x in every if "error" in x]
    assert every[0]["tensors"].keys() == wanted.keys()
    for key, want in wanted.items():
        parts = [x["tensors"][key] for x in every]
        got = np.concatenate(parts) if every[0]["cut"][key] else parts[0]
        assert same(got, want), key


def test_pickle_reader_and_resume_agree_on_what_paddle_wrote(tmp_path: Path) -> None:
    """Whole tensors of a v1 save: what ``paddle.load`` gives is what a trainer holds after it resumed."""
    source = fixture("paddle_zcc", "sharding2_v1")
    told = paddle_side.read("pickles", {"all": source}, tmp_path / "read")["all"]
    held = paddle_side.resume(source, tmp_path / "resumed", "sharding_io", sharding=2, version="v1")
    meta = json.loads((source / "model_meta.json").read_text(encoding="utf-8"))
    names = meta["sharding_metas"]["tp00_pp00"]["structure_name_mapping"]
    assert names.keys() == {k.split("/", 1)[1] for k in held[0] if k.startswith("model/")}
    compared = 0
    for shard, rank in enumerate(held):
        file = f"optimizer.shard0{shard}.pdopt"
        for key, value in rank.items():
            component, name, *state = key.split("/")
            stored = f"{names[name]}_fp32_master_0_{state[0]}" if state else f"master_weights/{names[name]}"
            if component != "model":
                assert same(value, told["tensors"][f"{file}/{stored}"]), key
                compared += 1
    assert compared == 5 * len(names)


@pytest.mark.parametrize("software", paddle_side.SOFTWARE)
def test_safetensors_reader_reads_what_paddle_wrote(software: str, tmp_path: Path) -> None:
    names = ("nlp_llamafused_bf16_tp2", "pf041_qwen2_bf16_tp2", "pf12_qwen2tied_bf16_tp1")
    told = paddle_side.read("unified", {n: fixture("paddle_unified", n) for n in names}, tmp_path, software)
    for name in names:
        assert (told[name]["stray"], told[name]["lost"]) == ([], [])
        for path in fixture("paddle_unified", name).glob("*.safetensors"):
            component = path.name.split("-")[0]
            for key, raw in read_safetensors(path).items():
                assert same(told[name]["tensors"][f"{component}/{key}"], raw.bits), key


# -- unified


@pytest.mark.parametrize("software", paddle_side.SOFTWARE)
def test_unified(software: str, sources: Mapping[str, Path], tmp_path: Path) -> None:
    paths = {}
    for tp, pp in ((1, 1), (4, 1), (2, 2)):
        paths[f"tp{tp}_pp{pp}"] = out = tmp_path / f"tp{tp}_pp{pp}"
        reshard(sources[software], out, "--to", "unified", "--target", software, "--tp-out", tp, "--pp-out", pp)
    for name, told in paddle_side.read("unified", paths, tmp_path / "read", software).items():
        assert (told["stray"], told["lost"]) == ([], []), name
        got = {bare(k): v for k, v in told["tensors"].items()}
        assert got.keys() == STATE.keys(), name
        for key, want in STATE.items():
            turned = key.startswith("model/") and "_proj." in key and software == NEW
            found = upright(key, got[key].T if turned else got[key], paddle_model.VOCAB)
            assert same(found, want), (name, key)


def test_only_some_components(sources: Mapping[str, Path], tmp_path: Path) -> None:
    paths = {c: tmp_path / c for c in ("model", "master_weights", "optimizer")}
    for component, out in paths.items():
        reshard(sources[NLP], out, "--to", "unified", "--target", NLP, "--tp-out", 2, "--only", component)
    for component, told in paddle_side.read("unified", paths, tmp_path / "read", NLP).items():
        got = {bare(k): v for k, v in told["tensors"].items()}
        assert got.keys() == {k for k in STATE if k.startswith(component + "/")}
        for key, found in got.items():
            assert same(upright(key, found, paddle_model.VOCAB), STATE[key]), key


def test_unified_of_a_real_zero_cost_save(tmp_path: Path) -> None:
    """Experts, averages and float32 routers of 4 ranks, against digests of a run in one process."""
    source = fixture("paddle_zcc", "ep2_tp2_sharding2_ema")
    expected = json.loads(fixture("paddle_zcc", "expected.json").read_text(encoding="utf-8"))
    reshard(source, tmp_path / "out", "--to", "unified", "--target", NEW, "--tp-out", 2)
    told = paddle_side.read("unified", {"all": tmp_path / "out"}, tmp_path / "read")["all"]
    compared = 0
    for key, found in told["tensors"].items():
        component, name = key.split("/", 1)
        name, *state = name.split("/")
        of = component if component != "master_weights" or component in expected[name] else "model"  # float32 ones
        dtype, shape, digest = expected[name]["/".join([of, *state])]
        turned = re.search(r"[.](?:[qkvo]|gate|up|down)_proj[.]|[.]gate[.]", name)  # not the fused up_gate_proj
        whole = found.T if component == "model" and turned else found
        assert list(whole.shape) == shape, key
        assert hashlib.sha256(np.ascontiguousarray(whole).tobytes()).hexdigest()[:16] == digest, (key, dtype)
        compared += 1
    assert compared == 6 * len(expected)  # the model, masters, two moments and two powers


# -- hybrid and zero-cost


MESHES = {
    "tp4": ("hybrid", 4, 1, 1, "v2"),
    "tp2_pp2": ("hybrid", 2, 2, 1, "v2"),
    "sharding4_v1": ("hybrid", 1, 1, 4, "v1"),
    "sharding4_v2": ("hybrid", 1, 1, 4, "v2"),
    "tp2_pp2_sharding2_v1": ("hybrid", 2, 2, 2, "v1"),
    "tp2_pp4_sharding2_v2": ("hybrid", 2, 4, 2, "v2"),
    "zcc_tp2_sharding3_v2": ("zcc", 2, 1, 3, "v2"),
}


@pytest.mark.parametrize("software", paddle_side.SOFTWARE)
def test_hybrid_and_zcc(software: str, sources: Mapping[str, Path], tmp_path: Path) -> None:
    paths = {}
    for name, (to, tp, pp, sharding, version) in MESHES.items():
        paths[name] = tmp_path / name
        mesh: list[str | int] = [
            "--tp-out",
            tp,
            "--pp-out",
            pp,
            "--sharding-out",
            f"{sharding}:{version}",
        ]
        options = mesh if sharding > 1 else mesh[:4]
        reshard(sources[software], paths[name], "--to", to, "--target", software, *options)
    for name, told in paddle_side.read("pickles", paths, tmp_path / "read", software).items():
        assert "error" not in told, name
        _, tp, pp, sharding, version = MESHES[name]
        check_hybrid(paths[name], told, (tp, pp, sharding), version)


def check_hybrid(folder: Path, told: Any, mesh: tuple[int, int, int], version: str) -> None:
    """Put the ranks' parts together as the trainers' documentation of the files says, and compare."""
    tp, pp, sharding = mesh
    cells = {(t, p): cell(folder, told, (t, p), mesh) for t in range(tp) for p in range(pp)}
    seen = set()
    for stage in range(pp):
        for key in {k for t in range(tp) for shard in cells[t, stage] for k in shard}:
            whole = STATE[bare(key)]
            for t in range(tp):
                want = cut(bare(key), whole, t, tp)
                pieces = cells[t, stage]
                if sharding == 1 or key.startswith("model/"):
                    got = next(p[key] for p in pieces if key in p)
                    vocab = paddle_model.VOCAB // tp
                    assert same(upright(key, got, vocab), want), key
                else:
                    turned = "/lm_head." in key and not is_power(key) and not _head_has_rows(folder)
                    got = joined(pieces, key, want.shape[::-1] if turned else want.shape, version)
                    assert same(got.T if turned else got, want), key
            seen.add(bare(key))
    wanted = STATE if sharding == 1 else {k for k in STATE if not k.startswith("model/")}
    assert seen == set(wanted)


def _head_has_rows(folder: Path) -> bool:
    """[vocab, hidden], as paddleformers 1.2 has it."""
    meta = json.loads((folder / "model_meta.json").read_text(encoding="utf-8"))
    shapes = (m["param_meta"].get("lm_head.weight") for m in meta["sharding_metas"].values())
    return bool(next(s[0][1] for s in shapes if s) == paddle_model.HIDDEN)


def cell(folder: Path, told: Any, place: tuple[int, int], mesh: tuple[int, int, int]) -> list[dict[str, Any]]:
    """What each sharding rank at (tp, pp) has, by names as in ``STATE`` with the model's prefix."""
    (t, p), (tp, pp, sharding) = place, mesh
    out = []
    for shard in range(sharding):
        parts = [f"tp{t:02d}"] * (tp > 1) + [f"pp{p:02d}"] * (pp > 1) + [f"shard{shard:02d}"] * (sharding > 1)
        suffix = "_".join(parts)
        weights, states = f"model_state.{suffix}.pdparams/", f"optimizer.{suffix}.pdopt/"
        table = weights + "StructuredToParameterName@@/"
        if sharding > 1:
            meta = json.loads((folder / "model_meta.json").read_text(encoding="utf-8"))
            names = meta["sharding_metas"][f"tp{t:02d}_pp{p:02d}"]["structure_name_mapping"]
        else:
            names = {k.removeprefix(table): v for k, v in told["other"].items() if k.startswith(table)}
        structured = {v: k for k, v in names.items()}
        found = {}
        for key, value in told["tensors"].items():
            if key.startswith(weights):
                found[f"model/{key.removeprefix(weights)}"] = value
            elif key.startswith(states + "master_weights/"):
                found[f"master_weights/{structured[key.rsplit('/', 1)[1]]}"] = value
            elif m := re.fullmatch(re.escape(states) + r"(.+)_fp32_master_0_(\w+?_0)", key):
                found[f"optimizer/{structured[m[1]]}/{m[2]}"] = value
        out.append(found)
    return out


# -- flex


@pytest.mark.parametrize("ranks", [1, 2])
def test_flex(ranks: int, sources: Mapping[str, Path], tmp_path: Path) -> None:
    paths: dict[str, Path] = {}
    for name, mesh in {"one": (1, 1, 1), "tp2_sharding2": (2, 1, 2), "tp4_pp2_sharding3": (4, 2, 3)}.items():
        out = tmp_path / name
        sizes = zip(("--tp-out", "--pp-out", "--sharding-out"), mesh, strict=True)
        reshard(sources[NEW], out, "--to", "flex", *(x for size in sizes for x in size))
        paths |= {f"{name}/{d}": out / d for d in FLEX.values()}
    wanted = {d: flex_state(c) for c, d in FLEX.items()}
    for name, told in paddle_side.read("flex", paths, tmp_path / "read", ranks=ranks).items():
        check_flex(told, wanted[name.split("/")[1]], ranks)


def flex_state(component: str) -> dict[str, Any]:
    """A component of the state under the names of a flex checkpoint that paddleformers 1.2 wrote."""
    out = {}
    for key, array in STATE.items():
        part, name, *state = key.split("/")
        if part == component:
            prefixed = name if name.startswith("lm_head.") else f"model.{name}"
            out[".".join([prefixed, *({"master_weights": ["w_0"]}.get(part, state))])] = array
    return out


def test_merge_of_a_real_save(tmp_path: Path) -> None:
    """Uneven rows, flattened pieces cut within rows, fp8; Paddle cannot merge the int64 tensor and leaves it out."""
    source, theirs, ours = fixture("paddle_flex", "tp2_dp2"), tmp_path / "theirs", tmp_path / "ours"
    jobs = tmp_path / "jobs.json"
    job = {"do": "flex_merge", "path": str(source), "out": str(theirs), "skip": ["position_ids"]}
    jobs.write_text(json.dumps([job]), encoding="utf-8")
    ((told,),) = paddle_side.start("tests.peers.paddle_read", jobs)
    assert "error" not in told, told
    assert ckpttool("merge", source, "-o", ours).code == 0
    wanted, found = read_all(theirs), read_all(ours)
    assert found.keys() - wanted.keys() == {"rope.position_ids"}
    del found["rope.position_ids"]
    assert_same(found, wanted)


def test_merged_by_paddle_and_by_ckpttool(sources: Mapping[str, Path], tmp_path: Path) -> None:
    """``merge_sharded_state_dict`` makes of our flex checkpoint what ckpttool makes of it."""
    flex, theirs, ours = tmp_path / "flex", tmp_path / "theirs", tmp_path / "ours"
    reshard(sources[NEW], flex, "--to", "flex", "--tp-out", 2, "--sharding-out", 2)
    jobs = tmp_path / "jobs.json"
    job = {"do": "flex_merge", "path": str(flex / "master_weight"), "out": str(theirs)}
    jobs.write_text(json.dumps([job]), encoding="utf-8")
    ((told,),) = paddle_side.start("tests.peers.paddle_read", jobs)
    assert "error" not in told, told
    merged: dict[str, Any] = {}
    for path in theirs.glob("*.safetensors"):
        merged |= {k: v.bits for k, v in read_safetensors(path).items()}
    wanted = flex_state("master_weights")
    assert merged.keys() == wanted.keys()
    assert all(same(merged[k], wanted[k]) for k in wanted)
    reshard(flex, ours, "--to", "unified", "--target", NEW, "--only", "master_weights")
    found: dict[str, Any] = {}
    for path in ours.glob("*.safetensors"):
        found |= {f"{k}.w_0": v.bits for k, v in read_safetensors(path).items()}
    assert found.keys() == merged.keys()
    assert all(same(found[k], merged[k]) for k in merged)
