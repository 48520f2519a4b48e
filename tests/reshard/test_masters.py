"""``--masters`` and ``--ema``: what is kept of each parameter beside its weight, written as the model.

What is right is what the saves' own software said that it held (fixtures/README.md), or was drawn by numpy.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import ckpttool as api
from ckpttool.errors import UsageError
from tests.helpers.command import ckpttool, refused, reshard
from tests.helpers.tensorfile import Raw, Tensors, assert_same, read, read_all, save_hf, write
from tests.helpers.training_run import CONFIG, SHAPES, names, save_run

FIXTURES = Path(__file__).parents[2] / "fixtures"
DEEPSPEED, MEGATRON = FIXTURES / "torch/deepspeed", FIXTURES / "megatron"
ZCC = FIXTURES / "paddle_zcc/ep2_tp2_sharding2_ema"


def raw(array: Any) -> Raw:
    kind = {np.dtype(np.float32): "F32", np.dtype(ml_dtypes.bfloat16): "BF16"}[array.dtype]
    return Raw(kind, array.view(f"u{array.itemsize}"))


def widened(weight: Raw) -> Raw:
    """BF16 as F32: the same bits and 16 zeros."""
    return Raw("F32", weight.bits.astype(np.uint32) << np.uint32(16)) if weight.dtype == "BF16" else weight


def wanted(told: Tensors) -> Tensors:
    """The masters of what an engine said that it held, and the weights of parameters that have none."""
    masters = {n.removeprefix("master_weights/"): t for n, t in told.items() if n.startswith("master_weights/")}
    weights = {n: widened(t) for n, t in told.items() if "/" not in n}
    return weights | masters


def digest(weight: Raw) -> str:
    return hashlib.sha256(weight.bits.tobytes()).hexdigest()


@pytest.mark.parametrize("case", ["z1", "z3", "z3sgd", "bf16", "ams", "universal_z1", "universal_z3"])
def test_masters_of_deepspeed(case: str, tmp_path: Path) -> None:
    told = read(DEEPSPEED / f"{case.removeprefix('universal_')}.safetensors")
    done = reshard(DEEPSPEED / case, tmp_path / "out", "--to", "hf", "--masters", "--verify")
    assert_same(read_all(tmp_path / "out"), wanted(told))
    frozen = [n for n in told if "/" not in n and told[n].dtype == "BF16" and f"master_weights/{n}" not in told]
    assert len(frozen) == {"z1": 2, "z3sgd": 2}.get(case.removeprefix("universal_"), 0)
    assert ("master weights: written from the model" in done.err) == bool(frozen)
    assert all(f"`{n}`" in done.err for n in frozen)


@pytest.mark.parametrize(
    "case", ["dist/llama_tp2", "dist/qwen2_buckets", "legacy/qwen2_pp2_tied", "legacy/llama_pp2_vp2"]
)
def test_masters_of_megatron(case: str, tmp_path: Path) -> None:
    told = json.loads((MEGATRON / f"{case}.json").read_text())["master_weights"]
    reshard(MEGATRON / case, tmp_path / "out", "--to", "hf", "--tp-out", 1, "--pp-out", 1, "--masters", "--verify")
    got = read_all(tmp_path / "out")
    assert {n: [t.dtype, list(t.bits.shape), digest(t)] for n, t in got.items()} == told
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert {config.get("dtype"), config.get("torch_dtype")} <= {"float32", None}


def test_masters_of_a_zero_cost_checkpoint(tmp_path: Path) -> None:
    """Routers are float32 themselves: no note counts them."""
    told = {n: t["master_weights"] if "master_weights" in t else t["model"] for n, t in expected(ZCC.parent).items()}
    done = reshard(ZCC, tmp_path / "out", "--to", "ranks", "--tp-out", 1, "--ep-out", 1, "--masters", "--verify")
    got = read_all(tmp_path / "out")
    assert {n: [t.dtype, list(t.bits.shape), digest(t)[:16]] for n, t in got.items()} == told
    assert "written from the model" not in done.err


def expected(folder: Path) -> Any:
    return json.loads((folder / "expected.json").read_text())


@pytest.mark.parametrize(
    "case", ["nlp_llamafused_bf16_tp2", "nlp_qwen2moe_bf16_tp2", "pf12_llama_bf16_sharding2_split_param"]
)
def test_masters_of_paddle(case: str, tmp_path: Path) -> None:
    told = json.loads((FIXTURES / f"paddle_unified/{case}.expected.json").read_text())
    told = {n.removeprefix("master_weights/"): t for n, t in told.items() if n.startswith("master_weights/")}
    assert told
    reshard(FIXTURES / f"paddle_unified/{case}", tmp_path / "out", "--to", "ranks", "--tp-out", 1, "--masters")
    got = read_all(tmp_path / "out")
    assert {t.dtype for t in got.values()} == {"F32"}
    for name, (shape, short) in told.items():
        (found,) = [t for n, t in got.items() if n == name or n.partition(".")[2] == name]
        assert [list(found.bits.shape), digest(found)[:16]] == [shape, short], name


def test_the_copy_of_a_tied_weight_is_its_owners_master(tmp_path: Path) -> None:
    """Paddle saves a master under one of both names."""
    source = FIXTURES / "paddle_unified/pf12_qwen2tied_bf16_tp1"
    (master,) = [t["lm_head.weight"] for t in map(read, source.glob("master_weights-*")) if "lm_head.weight" in t]
    done = reshard(source, tmp_path / "out", "--to", "hf", "--masters", "--verify")
    got = read_all(tmp_path / "out")
    assert_same({"x": got["model.embed_tokens.weight"]}, {"x": master})
    assert {t.dtype for t in got.values()} == {"F32"}
    assert "written from the model" not in done.err


def test_masters_are_cut_and_cast(tmp_path: Path) -> None:
    """Over ranks; and what --dtype makes of them is what the model has, where nothing else rounded it."""
    held = names()
    source = save_run(tmp_path / "run", held)
    reshard(source, tmp_path / "cut", "--to", "ranks", "--tp-out", 2, "--masters", "--verify")
    reshard(tmp_path / "cut", tmp_path / "whole", "--to", "hf", "--tp-out", 1)
    assert_same(read_all(tmp_path / "whole"), {n: raw(held[f"master_weights/{n}"]) for n in SHAPES})
    reshard(source, tmp_path / "narrow", "--to", "hf", "--masters", "--dtype", "bf16", "--verify")
    assert_same(read_all(tmp_path / "narrow"), {n: raw(held[n]) for n in SHAPES})


def test_masters_for_a_trainer_that_shares_them_out(tmp_path: Path) -> None:
    """A float32 model has no other masters there, and --dtype, which says what it is, refused nothing before."""
    held = names()
    options = ("--to", "hybrid", "--sharding-out", 2, "--masters", "--dtype", "f32", "--verify")
    reshard(save_run(tmp_path / "run", held), tmp_path / "out", *options)
    reshard(tmp_path / "out", tmp_path / "hf", "--to", "hf")
    assert_same(read_all(tmp_path / "hf"), {n: raw(held[f"master_weights/{n}"]) for n in SHAPES})


def test_quantized_from_the_masters(tmp_path: Path) -> None:
    """A rounding of the masters, not of the rounded weights; the same of an average, which requant once forgot."""
    held = names()
    source = save_run(tmp_path / "run", held)
    save_hf(
        tmp_path / "f32", {n: raw(held[f"master_weights/{n}"]) for n in SHAPES}, {**CONFIG, "torch_dtype": "float32"}
    )
    for src, dst, *options in ((source, "a", "--masters"), (tmp_path / "f32", "b")):
        reshard(src, tmp_path / dst, "--to", "hf", "--requant", "channel", *options)
    assert_same(read_all(tmp_path / "a"), read_all(tmp_path / "b"))
    averaged = {n: np.array(held[n] * ml_dtypes.bfloat16(2)) for n in SHAPES}
    ema = save_run(tmp_path / "ema", held | {f"ema/{n}": a.astype(np.float32) for n, a in averaged.items()})
    save_hf(tmp_path / "bf16", {n: raw(a) for n, a in averaged.items()}, CONFIG)
    for src, dst, *options in ((ema, "c", "--ema"), (tmp_path / "bf16", "d")):
        reshard(src, tmp_path / dst, "--to", "hf", "--requant", "channel", *options)
    assert_same(read_all(tmp_path / "c"), read_all(tmp_path / "d"))


def test_weights_without_an_average_stay(tmp_path: Path) -> None:
    """A frozen embedding was missing in DST."""
    held = names(masters=False)
    kept = {f"ema/{n}": held[n] * np.float32(2) for n in SHAPES if "embed" not in n}
    done = reshard(save_run(tmp_path / "run", held | kept), tmp_path / "out", "--to", "hf", "--ema", "--verify")
    assert_same(read_all(tmp_path / "out"), {n: raw(kept.get(f"ema/{n}", held[n])) for n in SHAPES})
    assert "1 tensor has no average: written from the model: `model.embed_tokens.weight`" in done.err


def test_the_api(tmp_path: Path) -> None:
    held = names()
    source = api.open(save_run(tmp_path / "run", held))
    source.reshard(to="hf", masters=True).run(tmp_path / "out", verify=True)
    assert_same(read_all(tmp_path / "out"), {n: raw(held[f"master_weights/{n}"]) for n in SHAPES})
    with pytest.raises(UsageError, match="exclude each other"):
        source.reshard(to="hf", masters=True, ema=True)


def test_what_is_refused(tmp_path: Path) -> None:
    run = save_run(tmp_path / "run", names())
    single = save_run(tmp_path / "single", names(masters=False))
    hf = save_hf(tmp_path / "hf", {n: raw(np.zeros(s, ml_dtypes.bfloat16)) for n, s in SHAPES.items()}, CONFIG)
    out = tmp_path / "out"
    said = refused(hf, out, "--masters", "--to", "hf", code=2)
    assert "--masters: the source has no master weights" in said
    assert "it has model" in said
    said = refused(single, out, "--masters", "--to", "hf", code=2)
    assert "its weights are F32 themselves: omit --masters" in said
    assert "exclude each other" in refused(run, out, "--masters", "--ema", "--to", "hf", code=2)
    said = refused(run, out, "--masters", "--only", "master_weights", "--to", "ranks", code=2)
    assert "only `--only model` goes with it" in said
    assert ckpttool("reshard", run, out, "--masters", "--only", "model", "--to", "hf", "--dry-run").code == 0


def test_masters_of_quantized_weights(tmp_path: Path) -> None:
    """Their scales would belong to nothing."""
    run = save_run(tmp_path / "run", names())
    name = "model.layers.0.self_attn.q_proj.weight"
    (path,) = run.glob("rank-*")
    header = json.loads(path.read_bytes()[8 : 8 + int.from_bytes(path.read_bytes()[:8], "little")])
    held = read(path)
    held[name] = Raw("F8_E4M3", np.zeros(SHAPES[name], np.uint8))
    held[f"{name}_scale_inv"] = raw(np.ones((1, 1), np.float32))
    write(path, held, header["__metadata__"])
    said = refused(run, tmp_path / "out", "--masters", "--to", "hf")
    assert f"`{name}` is quantized" in said


NOTE = "--masters writes its float32 master weights"


@pytest.mark.parametrize(
    ("options", "noted"),
    [
        (["--to", "hf"], True),
        (["--to", "hf", "--dtype", "f32"], True),
        (["--to", "hf", "--only", "model"], True),
        (["--to", "hf", "--dtype", "bf16"], False),
        (["--to", "hf", "--masters"], False),
        (["--to", "unified", "--betas", "0.9,0.999"], False),
        (["--to", "hf", "--requant", "channel"], False),
    ],
)
def test_one_note_names_masters_that_are_not_used(options: list[str], noted: bool, tmp_path: Path) -> None:
    done = reshard(save_run(tmp_path / "run", names()), tmp_path / "out", "--dry-run", *options)
    assert done.err.count(NOTE) == noted, done.err


def test_the_average_is_rounded_with_a_note(tmp_path: Path) -> None:
    """It is float32 and gets the dtype of the weights; master weights are no better a model than an average."""
    done = reshard(ZCC, tmp_path / "out", "--to", "hf", "--ema")
    assert {t.dtype for t in read_all(tmp_path / "out").values()} == {"BF16", "F32"}
    assert done.err.count("the average is F32, and written as BF16 like the weights; --dtype f32 keeps it") == 1
    assert NOTE not in done.err
    wide = reshard(ZCC, tmp_path / "wide", "--to", "hf", "--ema", "--dtype", "f32")
    assert {t.dtype for t in read_all(tmp_path / "wide").values()} == {"F32"}
    assert "the average is" not in wide.err
    assert NOTE not in wide.err


def test_no_note_where_weights_are_their_own_masters(tmp_path: Path) -> None:
    done = reshard(save_run(tmp_path / "run", names(masters=False)), tmp_path / "out", "--dry-run", "--to", "hf")
    assert "--masters" not in done.err
    assert "--masters" not in ckpttool("quantize", ZCC, tmp_path / "cast", "--dry-run").err
