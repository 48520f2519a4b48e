"""Paddle's formats into each other and back, over meshes; and every rank's share against what ranks really held."""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.helpers.command import refused, reshard
from tests.helpers.families import MODELS
from tests.helpers.tensorfile import read
from tests.helpers.training_run import save_run

FIXTURES = Path(__file__).parents[2] / "fixtures"
UNIFIED = FIXTURES / "paddle_unified"
RANKS = sorted(p.name.split(".")[0] for p in UNIFIED.glob("*.ranks.json"))


def float32(array: Any) -> Any:
    """What a pickle holds, with uint16 as the bfloat16 that Paddle means by it."""
    array = array[1] if isinstance(array, tuple) else array
    if array.dtype == np.uint16:
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32)


def unpickled(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = pickle.loads(path.read_bytes())  # noqa: S301 - just written by ckpttool
    return found


@pytest.mark.parametrize("name", RANKS)
def test_each_rank_gets_what_it_held(name: str, tmp_path: Path) -> None:
    """Trained with tp 2 and saved whole: cut again, every rank's files hold what that rank had in memory."""
    reshard(UNIFIED / name, tmp_path / "out", "--to", "hybrid", "--tp-out", 2)
    for rank, want in enumerate(json.loads((UNIFIED / f"{name}.ranks.json").read_text())):
        model = unpickled(tmp_path / "out" / f"model_state.tp{rank:02d}.pdparams")
        state = unpickled(tmp_path / "out" / f"optimizer.tp{rank:02d}.pdopt")
        static = model.pop("StructuredToParameterName@@")
        got = dict(model)
        masters = state["master_weights"]
        for weight, parameter in static.items():
            got[f"master_weights/{weight}"] = masters[parameter]
            for kind in ("moment1_0", "moment2_0", "beta1_pow_acc_0", "beta2_pow_acc_0"):
                got[f"{weight}/{kind}"] = state[f"{parameter}_fp32_master_0_{kind}"]
        assert got.keys() == want.keys()
        for key, (shape, digest) in want.items():
            array = float32(got[key])
            assert shape is None or list(array.shape) == shape, key
            assert hashlib.sha256(array.tobytes()).hexdigest()[:16] == digest, key


DENSE: tuple[tuple[str, ...], ...] = (
    ("hybrid", "--tp-out", "2"),
    ("hybrid", "--tp-out", "1", "--sharding-out", "2"),
    ("hybrid", "--tp-out", "2", "--pp-out", "2", "--sharding-out", "2:v1"),
    ("hybrid", "--tp-out", "1", "--pp-out", "2", "--sharding-out", "4"),
    ("zcc", "--tp-out", "2", "--sharding-out", "2"),
    ("flex", "--tp-out", "2", "--sharding-out", "2"),
    ("flex", "--tp-out", "1", "--pp-out", "2"),
    ("unified", "--tp-out", "4"),
    ("ranks", "--tp-out", "2"),
    ("ranks", "--tp-out", "2", "--pp-out", "2"),
)
MOST = ("hybrid", "--tp-out", "2", "--ep-out", "4", "--sharding-out", "4")
EXPERTS: tuple[tuple[str, ...], ...] = (
    ("hybrid", "--tp-out", "1", "--ep-out", "2", "--sharding-out", "2"),
    MOST,
    ("zcc", "--tp-out", "1", "--ep-out", "4", "--sharding-out", "4"),
    ("flex", "--tp-out", "2", "--ep-out", "2"),
    ("ranks", "--tp-out", "2", "--ep-out", "2"),
)
SOURCES = [
    ("paddle_unified/nlp_llamafused_bf16_tp2", DENSE),
    ("paddle_unified/pf12_llama_bf16_sharding2_split_param", DENSE),
    ("paddle_zcc/nlp_tp2", DENSE),
    ("paddle_zcc/sharding2_v1", DENSE),
    ("paddle_zcc/ep2_tp2_sharding2_ema", (*DENSE[:2], *EXPERTS)),
]


PLAIN = ("--to", "unified", "--target", "paddlenlp-3.0", "--tp-out", 1, "--pp-out", 1, "--ep-out", 1, "-q")


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Whole tensors of a source, made once."""

    @cache
    def made(source: str) -> Path:
        out = tmp_path_factory.mktemp("straight") / "out"
        reshard(FIXTURES / source, out, *PLAIN)
        return out

    return made


@pytest.mark.sample(
    "paddle_unified/nlp_llamafused_bf16_tp2-hybrid --tp-out 2 --pp-out 2 --sharding-out 2:v1",
    "paddle_unified/pf12_llama_bf16_sharding2_split_param-flex --tp-out 2 --sharding-out 2",
    "paddle_zcc/sharding2_v1-unified --tp-out 4",
    "paddle_zcc/ep2_tp2_sharding2_ema-flex --tp-out 2 --ep-out 2",
)
@pytest.mark.parametrize(
    ("source", "target"),
    [pytest.param(s, t, marks=[pytest.mark.thorough] * (t is MOST)) for s, targets in SOURCES for t in targets],
    ids=lambda v: " ".join(v[:9]) if isinstance(v, tuple) else v,
)
def test_there_and_back(source: str, target: tuple[str, ...], straight: Callable[[str], Path], tmp_path: Path) -> None:
    """Any mesh and back to whole tensors gives the bytes that the source gives directly."""
    cut, back = tmp_path / "cut", tmp_path / "back"
    ones = [f for flag in ("--pp-out", "--ep-out") if flag not in target for f in (flag, 1)]
    reshard(FIXTURES / source, cut, "--to", *target, *ones, "--verify", "-q")
    reshard(cut, back, *PLAIN)
    for f in straight(source).glob("*.safetensors*"):
        assert (back / f.name).read_bytes() == f.read_bytes(), f.name
    assert {f.name for f in back.glob("*.safetensors")} == {f.name for f in straight(source).glob("*.safetensors")}


def test_ranks_are_cut_whatever_the_source_was_cut_for(tmp_path: Path) -> None:
    """From pipeline stages without tensor parallelism: new ranks hold shares, not all of what a stage held whole."""
    staged, way, direct = tmp_path / "staged", tmp_path / "way", tmp_path / "direct"
    src = FIXTURES / "paddle_zcc/sharding2_v1"
    reshard(src, staged, "--to", "hybrid", "--pp-out", 2, "--sharding-out", 2)
    reshard(staged, way, "--to", "hybrid", "--tp-out", 2, "--pp-out", 1, "--sharding-out", 2, "--verify")
    reshard(src, direct, "--to", "hybrid", "--tp-out", 2, "--sharding-out", 2)
    a, b = (json.loads((p / "model_meta.json").read_text())["sharding_metas"] for p in (way, direct))
    assert a.keys() == b.keys() == {"tp00_pp00", "tp01_pp00"}
    for key in a:
        assert a[key]["param_meta"] == b[key]["param_meta"]
        assert any(meta[2] for meta in a[key]["param_meta"].values())
    reshard(
        staged, tmp_path / "classic", "--to", "hybrid", "--tp-out", 2, "--pp-out", 1, "--sharding-out", 1, "--verify"
    )


def test_the_average_as_the_model(tmp_path: Path) -> None:
    """--ema: in the model's dtype, or unrounded with --dtype float32; nothing else is written."""
    src = FIXTURES / "paddle_zcc/ep2_tp2_sharding2_ema"
    one = ("--tp-out", 1, "--ep-out", 1, "--to", "unified", "--ema", "--verify")
    reshard(src, tmp_path / "bf16", *one)
    reshard(src, tmp_path / "f32", *one, "--dtype", "float32")
    from tests.helpers.paddle import read_folder

    rounded = read_folder(tmp_path / "bf16", "model-*.safetensors")
    exact = read_folder(tmp_path / "f32", "model-*.safetensors")
    assert not list((tmp_path / "bf16").glob("optimizer*"))
    for name, array in exact.items():
        assert array.dtype == np.float32
        assert np.array_equal(array.astype(rounded[name].dtype), rounded[name]), name
    assert any(not np.array_equal(a, rounded[n].astype("f4")) for n, a in exact.items())


@pytest.mark.parametrize("fmt", ["hybrid", "zcc", "flex", "hf"])
def test_an_adapter_alone_goes_only_to_unified(fmt: str, tmp_path: Path) -> None:
    text = refused(UNIFIED / "nlp_llama_lora_bf16_tp1", tmp_path / "out", "--to", fmt, code=2)
    assert "adapter" in text
    assert "--to unified" in text


def test_a_fused_qkv_is_cut_between_groups(tmp_path: Path) -> None:
    text = refused(UNIFIED / "nlp_llamafused_bf16_tp2", tmp_path / "out", "--to", "flex", "--tp-out", 4)
    assert "2 groups of heads cannot be split evenly across 4 ranks" in text
    reshard(
        UNIFIED / "nlp_llamafused_bf16_tp2", tmp_path / "out", "--to", "flex", "--tp-out", 4, "--unfuse", "--verify"
    )


def test_resume_gives_the_same_files(tmp_path: Path) -> None:
    """A quantized source is decoded into another temporary file in every run, and the plan is the same."""
    src = UNIFIED / "nlp_llama_bf16_tp2_quantO1"
    reshard(src, tmp_path / "one", "--to", "flex", "--tp-out", 2)
    from ckpttool.checkpoint import open_checkpoint
    from ckpttool.targeting.build import plan_target
    from ckpttool.targeting.select import Selection
    from ckpttool.targeting.target import Target

    digests = {
        plan_target(open_checkpoint(src), Target(format="flex", tp=2), Selection()).plan.digest() for _ in range(2)
    }
    assert len(digests) == 1


def test_statements_move_the_whole_state(tmp_path: Path) -> None:
    """--aoa: a renamed, transposed and cast weight; its master and moments go along in their own precision."""
    from tests.helpers.paddle import read_folder

    src = UNIFIED / "nlp_llama_bf16_tp2_ignore_merge"
    rules = tmp_path / "rules.txt"
    rules.write_text(
        "llama.layers.$LAYER_ID.mlp.down_proj.weight^T -> turned.$LAYER_ID.weight\n"
        'llama.norm.weight -> final.weight, dtype="float32"\n'
        "lm_head.weight -> _\n"
    )
    reshard(src, tmp_path / "out", "--to", "unified", "--target", "paddlenlp-3.0", "--aoa", rules, "--verify")
    reshard(src, tmp_path / "plain", "--to", "unified", "--target", "paddlenlp-3.0")
    model, plain = (read_folder(tmp_path / d, "model-*.safetensors") for d in ("out", "plain"))
    state, before = (read_folder(tmp_path / d, "optimizer-*.safetensors") for d in ("out", "plain"))
    old = "llama.layers.1.mlp.down_proj.weight"
    assert np.array_equal(model["turned.1.weight"], plain[old].T)
    assert np.array_equal(state["turned.1.weight/moment2_0"], before[f"{old}/moment2_0"].T)
    assert state["turned.1.weight/beta1_pow_acc_0"] == before[f"{old}/beta1_pow_acc_0"]
    assert model["final.weight"].dtype == np.float32
    assert np.array_equal(model["final.weight"], plain["llama.norm.weight"].astype(np.float32))
    assert not [n for n in (*model, *state) if "lm_head" in n]


@pytest.mark.parametrize("size", ["sharding_degree", "pp_degree", "mp_degree", "ep_degree"])
def test_a_damaged_size_is_not_believed(size: str, tmp_path: Path) -> None:
    """A billion ranks are not looked for one by one."""
    import shutil

    src = tmp_path / "src"
    shutil.copytree(FIXTURES / "paddle_zcc/sharding2_v1", src)
    meta = json.loads((src / "model_meta.json").read_text())
    meta["parallel_config"][size] = 10**9
    (src / "model_meta.json").write_text(json.dumps(meta))
    assert "model_meta.json" in refused(src, tmp_path / "out", "--to", "unified")


def test_shards_that_changed_places(tmp_path: Path) -> None:
    """A parameter that two shards share would be joined the wrong way round."""
    src = tmp_path / "src"
    reshard(FIXTURES / "paddle_zcc/sharding2_v1", src, "--to", "hybrid", "--tp-out", 2, "--sharding-out", 3)
    first, second = src / "optimizer.tp01_shard00.pdopt", src / "optimizer.tp01_shard02.pdopt"
    first.rename(tmp_path / "x")
    second.rename(first)
    (tmp_path / "x").rename(second)
    text = refused(src, tmp_path / "out", "--to", "unified")
    assert "optimizer.tp01_shard00.pdopt holds what shard 2 holds" in text


@pytest.mark.parametrize("more", [(), ("--sharding-out", "2"), ("--sharding-out", "2:v1")])
def test_stages_of_a_pipeline_have_the_state_of_tied_embeddings(more: tuple[str, ...], tmp_path: Path) -> None:
    """A trainer of one process saves it under the name of the head; the first stage has the embedding."""
    src = UNIFIED / "pf12_qwen2tied_bf16_tp1"
    reshard(src, tmp_path / "out", "--to", "hybrid", "--pp-out", 2, *more, "--verify")
    states = read(src / "optimizer-00001-of-00001.safetensors")
    masters = read(src / "master_weights-00001-of-00001.safetensors")
    wanted = {k: states[f"lm_head.weight/{k}"].bits.view("<f4") for k in ("moment1_0", "moment2_0", "beta1_pow_acc_0")}
    wanted["master"] = masters["lm_head.weight"].bits.view("<f4")
    for stage, name in ((0, "model.embed_tokens.weight"), (1, "model.embed_tokens.weight"), (1, "lm_head.weight")):
        found: dict[str, list[Any]] = {}
        meta = tmp_path / "out" / "model_meta.json"
        for shard in range(2) if more else [None]:
            suffix = f"pp{stage:02d}" + (f"_shard{shard:02d}" if shard is not None else "")
            if meta.exists():
                static = json.loads(meta.read_text())["sharding_metas"][f"tp00_pp{stage:02d}"]["structure_name_mapping"]
            else:
                static = unpickled(tmp_path / "out" / f"model_state.{suffix}.pdparams")["StructuredToParameterName@@"]
            state = unpickled(tmp_path / "out" / f"optimizer.{suffix}.pdopt")
            for kind in wanted:
                held = state["master_weights"] if kind == "master" else state
                key = static[name] if kind == "master" else f"{static[name]}_fp32_master_0_{kind}"
                found.setdefault(kind, []).extend([held[key][1].ravel()] if key in held else [])
        for kind, want in wanted.items():
            runs = found[kind][:1] if kind.endswith("acc_0") else found[kind]
            assert runs, (stage, name, kind)
            assert np.array_equal(np.concatenate(runs)[: want.size], want.ravel()), (stage, name, kind)


@pytest.mark.parametrize("target", ["hybrid", "flex"])
def test_powers_of_both_names_of_tied_embeddings_are_verified(target: str, tmp_path: Path) -> None:
    """They are worked out of the steps that torch counts, which the source has under one name."""
    reshard(UNIFIED / "pf12_qwen2tied_bf16_tp1", tmp_path / "dcp", "--to", "dcp", "--betas", "0.9,0.999")
    done = reshard(tmp_path / "dcp", tmp_path / "out", "--to", target, "--pp-out", 2, "--verify")
    assert "verified: every element" in done.out


@pytest.mark.parametrize("target", [("hybrid",), ("hybrid", "--sharding-out", "2"), ("flex", "--sharding-out", "2")])
def test_a_share_of_one_element_is_no_number(target: tuple[str, ...], tmp_path: Path) -> None:
    """gpt-oss has a number for each head: with as many ranks as heads, the moments of a rank's share have the shape of
    a power of beta."""
    model = MODELS["gpt_oss"]
    tensors: dict[str, Any] = {}
    rng = np.random.default_rng(5)
    for name, shape in model.shapes.items():
        master = rng.standard_normal(shape).astype(np.float32)
        tensors |= {name: master.astype(ml_dtypes.bfloat16), f"master_weights/{name}": master}
        tensors |= {f"optimizer/{name}/{s}": rng.random(shape).astype(np.float32) for s in ("exp_avg", "exp_avg_sq")}
        tensors[f"optimizer/{name}/step"] = np.array(3, np.float32)
    (tmp_path / "run").mkdir()
    src = save_run(tmp_path / "run", tensors, config=model.config, family="gpt_oss")
    reshard(src, tmp_path / "cut", "--to", *target, "--tp-out", 8, "--betas", "0.9,0.999", "--verify")
    reshard(tmp_path / "cut", tmp_path / "back", *PLAIN)
    found = read(tmp_path / "back/optimizer-00001-of-00001.safetensors")
    for name in model.shapes:
        for ours, theirs in (("exp_avg", "moment1_0"), ("exp_avg_sq", "moment2_0")):
            want = tensors[f"optimizer/{name}/{ours}"]
            got = found[f"{name}/{theirs}"].bits.view(np.float32)
            assert any(np.array_equal(got, w) for w in (want, want.T))
            assert found[f"{name}/beta1_pow_acc_0"].bits.shape == (1,)
