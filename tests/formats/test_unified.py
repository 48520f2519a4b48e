"""Unified checkpoints: what paddlenlp and paddleformers wrote, against what their ranks held in memory.

``fixtures/paddle_unified/NAME.expected.json`` has shape and checksum of each full tensor, put together from the ranks.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ckpttool.core import encodings
from tests.helpers.command import refused, reshard
from tests.helpers.paddle import read_folder, write_file

FIXTURES = Path(__file__).parents[2] / "fixtures" / "paddle_unified"
SAVED = sorted(p.name for p in FIXTURES.iterdir() if p.is_dir() and p.name != "pf12_llama_bf16_tp2")
EXACT = [n for n in SAVED if "quant" not in n]


def bare(name: str) -> str:
    return re.sub(r"^(?:[a-z0-9_]+\.)(?=layers\.|embed_tokens|norm\.)", "", name)


def held(folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    """``component/name/state`` -> float32 values of every tensor that a unified checkpoint holds."""
    out = {}
    for stem, component in (("model", "model"), ("peft_model", "model"), ("master_weights",) * 2, ("optimizer",) * 2):
        for name, array in read_folder(folder, f"{stem}-*.safetensors").items():
            parameter, _, state = name.rpartition("/") if component == "optimizer" else (name, "", "")
            out["/".join(x for x in (component, bare(parameter), state) if x)] = array.astype(np.float32)
    return out


def right(array: np.ndarray[Any, Any], want: list[Any]) -> bool:
    shape, digest = want
    if list(array.shape) != shape and array.size != np.prod(shape):
        return False
    return hashlib.sha256(array.tobytes()).hexdigest()[:16] == str(digest)


@pytest.fixture(scope="module")
def qwen2moe(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What the mixture of experts holds."""
    out = tmp_path_factory.mktemp("straight") / "out"
    reshard(FIXTURES / "nlp_qwen2moe_bf16_tp2", out, "--to", "unified")
    return {k: v.tobytes() for k, v in held(out).items()}


@pytest.mark.product(one_in=2)
@pytest.mark.parametrize("name", EXACT)
def test_holds_what_the_ranks_held(name: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    reshard(FIXTURES / name, out, "--to", "unified", "--target", "paddlenlp-3.0")
    got, want = held(out), json.loads((FIXTURES / f"{name}.expected.json").read_text())
    # A save without masters has none, and a tied embedding is in the optimizer under its last name only.
    saved = {k.split("/")[0] for k in got}
    wanted = {k: v for k, v in want.items() if k.split("/")[0] in saved}
    if "tied" in name:
        wanted = {k: v for k, v in wanted.items() if "embed_tokens" not in k or k.startswith("model/")}
    assert [k for k in wanted if k not in got] == []
    assert [k for k in wanted if not right(got[k], wanted[k])] == []
    assert len(wanted) > 20


def test_quantized_state_is_within_half_a_step(tmp_path: Path) -> None:
    """moment1 is stored in 255 steps of its largest value, and the root of moment2 in 255 steps of its inverse."""
    name = "nlp_llama_bf16_tp2_quantO1"
    out = tmp_path / "out"
    done = reshard(FIXTURES / name, out, "--to", "unified")
    assert "quantized" in done.err
    state = read_folder(out, "optimizer-*.safetensors")
    raw = read_folder(FIXTURES / name, "optimizer-*.safetensors")
    key = "llama.layers.0.self_attn.q_proj.weight/"
    codes, low, high = (raw[key + s] for s in ("moment2_0", "moment2_0@min_scales", "moment2_0@max_scales"))
    ratio = codes.astype(np.float64) / 255 * (high - low) + low
    np.testing.assert_allclose(state[key + "moment2_0"], (1 / ratio - 1e-8) ** 2, rtol=2e-6)
    first = raw[key + "moment1_0"].astype(np.float64) / 127 * raw[key + "moment1_0@scales"]
    np.testing.assert_allclose(state[key + "moment1_0"], first, rtol=2e-7)
    assert not [k for k in state if "@" in k]


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("block", [1, 4, 100])
def test_quantized_state_of_any_shape(bits: int, block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """O1 and O2 as their quantizer defines them, in blocks smaller than the tensor or than one of its rows."""
    monkeypatch.setattr(encodings, "BLOCK", 4 * block)
    rng = np.random.default_rng(3)
    shape = (64, 6)
    low, high, one = (rng.uniform(a, a + 1, (2, 6) if bits == 4 else (6,)).astype("<f4") for a in (1, 9, 3))
    at = "model.a.weight/"
    tensors: dict[str, np.ndarray[Any, Any]] = {
        at + "moment2_0@min_scales": low,
        at + "moment2_0@max_scales": high,
        at + "moment1_0@scales": one,
    }
    if bits == 8:
        q1 = rng.integers(-127, 128, shape, dtype=np.int8)
        q2 = rng.integers(0, 256, shape, dtype=np.uint8)
        tensors |= {at + "moment1_0": q1, at + "moment2_0": q2}
        want1 = q1 / 127 * one
        want2 = (1 / (q2 / 255 * (high - low) + low) - 1e-8) ** 2
    else:
        q1 = rng.integers(-8, 8, shape, dtype=np.int8)
        q2 = rng.integers(0, 16, shape, dtype=np.uint8)
        tensors[at + "moment2_0"] = ((q1.view(np.uint8) << 4) | q2).view(np.int8)
        wide = [np.repeat(x, 32, axis=0) for x in (one, low, high)]
        want1 = q1 / 7 * wide[0]
        want2 = (1 / (q2 / 15 * (wide[2] - wide[1]) + wide[1]) - 1e-8) ** 2
    src = tmp_path / "src"
    src.mkdir()
    write_file(src / "optimizer-00001-of-00001.safetensors", tensors)
    write_file(src / "model-00001-of-00001.safetensors", {"model.a.weight": np.zeros(shape, ml_dtypes.bfloat16)})
    reshard(src, tmp_path / "out", "--to", "unified")
    got = read_folder(tmp_path / "out", "optimizer-*.safetensors")
    np.testing.assert_allclose(got[at + "moment1_0"], want1, rtol=1e-6)
    np.testing.assert_allclose(got[at + "moment2_0"], want2, rtol=1e-5)


@pytest.mark.product
@pytest.mark.parametrize(
    ("state", "other", "words"),
    [
        ("moment1_0@scales", np.ones(6, ml_dtypes.bfloat16), "scales BF16"),
        ("moment1_0@scales", np.ones(5, "f4"), r"scales of .* are \[5\], its shape is \[64, 6\]"),
        ("moment2_0", np.ones((64, 6), "f4"), "is F32 and its low scales F32"),
        ("moment1_0@scales", None, "moment1_0@scales` is missing"),
    ],
)
def test_quantized_state_that_does_not_fit_is_refused(state: str, other: Any, words: str, tmp_path: Path) -> None:
    scales = {f"w/moment{s}_scales": np.ones(6, "f4") for s in ("2_0@min", "2_0@max")} | {
        "w/moment1_0@scales": np.ones(6, "f4")
    }
    codes = {"w/moment1_0": np.ones((64, 6), "i1"), "w/moment2_0": np.ones((64, 6), "u1")}
    tensors = {k: v for k, v in (scales | codes | {f"w/{state}": other}).items() if v is not None}
    src = tmp_path / "src"
    src.mkdir()
    write_file(src / "optimizer-00001-of-00001.safetensors", tensors)
    write_file(src / "model-00001-of-00001.safetensors", {"w": np.zeros((64, 6), ml_dtypes.bfloat16)})
    assert re.search(words, refused(src, tmp_path / "out", "--to", "unified", code=1))


@pytest.mark.product
@pytest.mark.parametrize("name", ["nlp_qwen2moe_bf16_tp2", "nlp_llamafused_bf16_tp2", "pf12_qwen2tied_bf16_tp1"])
@pytest.mark.parametrize("target", ["paddlenlp-3.0", "paddleformers-0.4", "paddleformers-1.2"])
def test_every_version_and_number_of_files_and_back(name: str, target: str, tmp_path: Path) -> None:
    """From any number of files, for any version, the way back gives the same bytes."""
    first, cut, back = tmp_path / "first", tmp_path / "cut", tmp_path / "back"
    reshard(FIXTURES / name, first, "--tp-out", 1, "--to", "unified", "--target", target)
    reshard(first, cut, "--tp-out", 2, "--pp-out", 2, "--to", "unified", "--target", "paddlenlp-3.0", "--verify")
    assert len(list(cut.glob("optimizer-*.safetensors"))) == 4
    reshard(cut, back, "--tp-out", 1, "--pp-out", 1, "--to", "unified", "--target", target)
    for f in first.glob("*.safetensors*"):
        assert (back / f.name).read_bytes() == f.read_bytes(), f.name


def test_hugging_face_names_and_orientation(tmp_path: Path) -> None:
    """To Hugging Face: names begin with model, fused projections apart, linear weights [out, in]; and back."""
    src, out, back = FIXTURES / "nlp_llamafused_bf16_tp2", tmp_path / "hf", tmp_path / "back"
    done = reshard(src, out, "--to", "hf", "--unfuse")
    assert "master_weights, optimizer, LR_Scheduler left out" in done.err
    hf, paddle = read_folder(out, "*.safetensors"), held(src)
    at = "model.layers.1."
    fused = paddle["model/layers.1.mlp.gate_up_fused_proj.weight"]
    assert np.array_equal(hf[at + "mlp.gate_proj.weight"].astype("f4"), fused[:, :48].T)
    assert np.array_equal(hf[at + "mlp.up_proj.weight"].astype("f4"), fused[:, 48:].T)
    qkv = paddle["model/layers.1.self_attn.qkv_proj.weight"].reshape(32, 2, 4, 8)  # in, group, q q k v, head
    assert np.array_equal(hf[at + "self_attn.q_proj.weight"].astype("f4"), qkv[:, :, :2].reshape(32, 32).T)
    assert np.array_equal(hf[at + "self_attn.k_proj.weight"].astype("f4"), qkv[:, :, 2].reshape(32, 16).T)
    assert np.array_equal(hf[at + "self_attn.v_proj.weight"].astype("f4"), qkv[:, :, 3].reshape(32, 16).T)
    assert np.array_equal(hf["lm_head.weight"].astype("f4"), paddle["model/lm_head.weight"].T)
    assert np.array_equal(hf["model.embed_tokens.weight"].astype("f4"), paddle["model/embed_tokens.weight"])
    reshard(out, back, "--to", "unified", "--target", "paddlenlp-3.0", "--fuse")
    again = held(back)
    assert {k: v.tobytes() for k, v in again.items()} == {
        k: v.tobytes() for k, v in paddle.items() if k.startswith("model/")
    }


def test_masters_in_the_model_files_are_both(tmp_path: Path) -> None:
    src = FIXTURES / "nlp_llama_bf16_tp2_skip_save_model_weight"
    done = reshard(src, tmp_path / "out", "--to", "unified")
    assert "skip_save_model_weight" in done.err
    model = read_folder(tmp_path / "out", "model-*.safetensors")
    master = read_folder(tmp_path / "out", "master_weights-*.safetensors")
    name = "llama.layers.0.mlp.down_proj.weight"
    assert model[name].dtype == ml_dtypes.bfloat16
    assert np.array_equal(model[name], master[name].astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize("component", ["model", "master_weights", "optimizer"])
def test_only_one_component(component: str, tmp_path: Path) -> None:
    src = FIXTURES / "nlp_llama_bf16_tp2_ignore_merge"
    reshard(src, tmp_path / "out", "--to", "unified", "--only", component, "--verify")
    stems = {p.name.split("-")[0] for p in (tmp_path / "out").glob("*-*.safetensors")}
    assert stems == {component}


def test_removed_keys_go_from_every_component(tmp_path: Path) -> None:
    src = FIXTURES / "nlp_llama_bf16_tp2_ignore_merge"
    reshard(src, tmp_path / "out", "--to", "unified", "--remove-keys", "*.layers.1.*")
    assert not [k for k in held(tmp_path / "out") if "layers.1." in k]
    for index in (tmp_path / "out").glob("*.index.json"):
        data = json.loads(index.read_text())
        stem = index.name.split(".")[0]
        real = read_folder(tmp_path / "out", f"{stem}-*.safetensors")
        assert data["weight_map"].keys() == real.keys()
        assert data["metadata"]["total_size"] == sum(a.nbytes for a in real.values())


def test_a_save_of_two_nodes(qwen2moe: dict[str, bytes], tmp_path: Path) -> None:
    """Files that each node wrote to its own disk are one source."""
    src = FIXTURES / "nlp_qwen2moe_bf16_tp2"
    a, b = tmp_path / "a", tmp_path / "b"
    shutil.copytree(src, a)
    b.mkdir()
    for f in a.glob("*-00002-of-00002.safetensors"):
        f.rename(b / f.name)
    text = refused(a, tmp_path / "out", "--to", "unified")
    assert "00002-of-00002.safetensors" in text
    assert "--also" in text
    reshard(a, tmp_path / "out", "--also", b, "--to", "unified")
    assert {k: v.tobytes() for k, v in held(tmp_path / "out").items()} == qwen2moe


@pytest.mark.parametrize(
    ("fixture", "files"),
    [
        (
            "paddle_unified/nlp_qwen2moe_bf16_tp2",
            ["model-00001-of-00002.safetensors", "optimizer-00002-of-00002.safetensors"],
        ),
        (
            "paddle_zcc/ep2_tp2_sharding2_ema",
            ["ema.tp01_shard00.pdopt", "optimizer.tp01_shard00.pdopt", "model_meta.json"],
        ),
    ],
)
def test_copies_in_two_directories_are_the_same(fixture: str, files: list[str], tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    shutil.copytree(FIXTURES.parent / fixture, a)
    b.mkdir()
    for file in files:
        shutil.copy(a / file, b / file)
    form = fixture.partition("_")[2].split("/")[0]
    options = ("--from", form, "--also", b, "--to", "unified", "--tp-out", 1, "--ep-out", 1)
    reshard(a, tmp_path / "same", *options)
    for file in files:
        data = bytearray((b / file).read_bytes())
        data[-100] ^= 1
        (b / file).write_bytes(data)
        text = refused(a, tmp_path / "out", *options)
        assert f"{file} is in two directories and differs from byte {len(data) - 100:,} on" in text
        assert str(a / file) in text
        assert str(b / file) in text
        (b / file).unlink()
        (b / file).symlink_to(a / file)
    reshard(a, tmp_path / "linked", *options)


def test_architectures_and_dtype_keys(tmp_path: Path) -> None:
    src = tmp_path / "src"
    shutil.copytree(FIXTURES / "pf12_qwen2tied_bf16_tp1", src)
    config = json.loads((src / "config.json").read_text())
    assert config["architectures"] == ["Qwen2ForCausalLMDeprecated"]
    (src / "config.json").write_text(json.dumps({**config, "architectures": ["Qwen2ForCausalLMPipeDeprecated"]}))
    reshard(src, tmp_path / "nlp", "--to", "unified", "--target", "paddlenlp-3.0")
    got = json.loads((tmp_path / "nlp" / "config.json").read_text())
    assert got["architectures"] == ["Qwen2ForCausalLM"]
    assert got["dtype"] == "bfloat16"
    assert "torch_dtype" not in got


# -- what is refused


def test_a_save_that_failed(tmp_path: Path) -> None:
    text = refused(FIXTURES / "pf12_llama_bf16_tp2", tmp_path / "out", "--to", "unified")
    assert "not a complete checkpoint" in text
    assert "training_args.bin" in text


def copy(name: str, to: Path) -> Path:
    shutil.copytree(FIXTURES / name, to)
    return to


def test_a_rank_file_is_missing(tmp_path: Path) -> None:
    src = copy("nlp_llama_bf16_tp2_ignore_merge", tmp_path / "src")
    (src / "optimizer.tp00.safetensors").unlink()
    assert "optimizer.tp00.safetensors" in refused(src, tmp_path / "out", "--to", "unified")
    src = copy("pf12_llama_bf16_sharding2_nonmerge_optimshard2", tmp_path / "src2")
    (src / "optimizer.shard01.safetensors_shard_0002").unlink()
    assert "optimizer.shard01.safetensors_shard_0002" in refused(src, tmp_path / "out", "--to", "unified")


def test_a_piece_is_missing(tmp_path: Path) -> None:

    src = copy("pf12_llama_bf16_sharding2_split_param", tmp_path / "src")
    path = src / "master_weights-00002-of-00002.safetensors"
    tensors = read_folder(src, path.name)
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name] = tensors[name][:1000]
    write_file(path, tensors)
    text = refused(src, tmp_path / "out", "--to", "unified")
    assert "pieces of" in text
    assert name in text


def test_two_orientations_are_not_guessed(tmp_path: Path) -> None:

    src = copy("pf041_qwen2_bf16_tp2", tmp_path / "src")
    for path in [*src.glob("optimizer*"), *src.glob("master_weights*")]:
        path.unlink()
    path = src / "model-00001-of-00002.safetensors"
    tensors = read_folder(src, path.name)
    name = next(n for n in tensors if n.endswith("down_proj.weight"))
    tensors[name] = np.ascontiguousarray(tensors[name].T)
    write_file(path, tensors, metadata={"format": "pt"})
    text = refused(src, tmp_path / "out", "--to", "unified")
    assert "[out, in]" in text


def test_shapes_overrule_the_version(tmp_path: Path) -> None:
    """A config without a version, or of another one: the shapes say how the files lie, and a note says so."""
    src = copy("pf041_qwen2_bf16_tp2", tmp_path / "src")
    config = json.loads((src / "config.json").read_text())
    del config["paddleformers_version"]
    (src / "config.json").write_text(json.dumps(config))
    done = reshard(src, tmp_path / "out", "--to", "unified", "--target", "paddlenlp-3.0")
    assert "stored [out, in], by their shapes" in done.err
    reshard(FIXTURES / "pf041_qwen2_bf16_tp2", tmp_path / "known", "--to", "unified", "--target", "paddlenlp-3.0")
    a, b = held(tmp_path / "out"), held(tmp_path / "known")
    assert {k: v.tobytes() for k, v in a.items()} == {k: v.tobytes() for k, v in b.items()}


@pytest.mark.parametrize(
    ("change", "note"),
    [
        (lambda d: {**d, "metadata": {"total_size": 1}}, ""),
        (lambda d: {"metadata": d["metadata"]}, "no usable"),
        (lambda d: {**d, "weight_map": dict(list(d["weight_map"].items())[1:])}, "not in model.safetensors.index.json"),
    ],
)
def test_an_index_that_lies_is_rebuilt(change: Any, note: str, tmp_path: Path) -> None:
    src = copy("nlp_llama_bf16_tp2_ignore_merge", tmp_path / "src")
    path = src / "model.safetensors.index.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    done = reshard(src, tmp_path / "out", "--to", "unified", "--verify")
    assert note in done.err


def test_an_index_with_tensors_that_no_file_holds(tmp_path: Path) -> None:
    src = copy("nlp_llama_bf16_tp2_ignore_merge", tmp_path / "src")
    path = src / "model.safetensors.index.json"
    data = json.loads(path.read_text())
    data["weight_map"]["ghost.weight"] = next(iter(data["weight_map"].values()))
    path.write_text(json.dumps(data))
    assert "`ghost.weight`" in refused(src, tmp_path / "out", "--to", "unified")


def test_a_model_file_of_another_part(tmp_path: Path) -> None:
    """The second file is a copy of the first: half of the model would be gone, with or without an index."""
    src = copy("nlp_llama_bf16_tp2_ignore_merge", tmp_path / "src")
    shutil.copy(src / "model-00001-of-00002.safetensors", src / "model-00002-of-00002.safetensors")
    assert "no file holds" in refused(src, tmp_path / "out", "--to", "unified")
    (src / "model.safetensors.index.json").unlink()
    assert "but no weight" in refused(src, tmp_path / "out", "--to", "unified")


def test_weights_that_are_not_their_masters_are_not_lost(tmp_path: Path) -> None:
    """With sharding, only master weights are written: weights that were changed since would be gone."""
    src = tmp_path / "src"
    reshard(FIXTURES / "nlp_llama_bf16_tp2_ignore_merge", src, "--to", "unified")
    path = src / "model-00001-of-00001.safetensors"
    tensors = read_folder(src, path.name)
    name = "llama.layers.1.mlp.down_proj.weight"
    tensors[name] = (tensors[name].astype(np.float32) * 1.5).astype(ml_dtypes.bfloat16)
    write_file(path, tensors, {"format": "np"})
    text = refused(src, tmp_path / "out", "--to", "hybrid", "--sharding-out", 2)
    assert f"`{name}` and its master weight differ" in text
    reshard(src, tmp_path / "flex", "--to", "flex", "--verify")
    reshard(src, tmp_path / "hybrid", "--to", "hybrid", "--verify")


def test_float32_parameters_and_their_masters(tmp_path: Path) -> None:
    """Unified checkpoints hold float32 parameters twice, hybrid ones once; they must be equal."""
    src = tmp_path / "src"
    reshard(FIXTURES / "nlp_llama_bf16_tp2_ignore_merge", src, "--to", "unified", "--dtype", "f32")
    path = src / "model-00001-of-00001.safetensors"
    masters = read_folder(src, "master_weights-*.safetensors")
    write_file(path, masters, {"format": "np"})
    for options in (("--sharding-out", 2), ("--tp-out", 2)):
        out = tmp_path / f"out{options[0]}"
        reshard(src, out, "--to", "hybrid", *options, "--verify")
        reshard(out, tmp_path / f"back{options[0]}", "--to", "unified", "--tp-out", 1)
        got, want = held(tmp_path / f"back{options[0]}"), held(src)
        assert got.keys() == {k for k in want if not k.startswith("master")}
        assert all(np.array_equal(got[k], want[k]) for k in got)
    masters["lm_head.weight"] = masters["lm_head.weight"] + 1
    write_file(path, masters, {"format": "np"})
    assert "differ" in refused(src, tmp_path / "x", "--to", "hybrid", "--sharding-out", 2)


def test_config_keeps_to_the_files(tmp_path: Path) -> None:
    src = FIXTURES / "nlp_llamafused_bf16_tp2"
    reshard(src, tmp_path / "a", "--to", "unified", "--unfuse", "--dtype", "f16")
    config = json.loads((tmp_path / "a/config.json").read_text())
    assert config["dtype"] == "float16"
    assert config["fuse_attention_qkv"] is False
    done = reshard(src, tmp_path / "b", "--to", "hf")
    assert not list((tmp_path / "b").glob("*.pdparams"))
    assert "only a trainer uses them" in done.err


def test_flags_that_mean_nothing_are_refused(tmp_path: Path) -> None:
    src = FIXTURES / "nlp_llama_bf16_tp2_ignore_merge"
    assert "no ema" in refused(src, tmp_path / "out", "--only", "ema", code=2)
    assert "moving average" in refused(src, tmp_path / "out", "--ema", code=2)
    assert "--target" in refused(src, tmp_path / "out", "--to", "unified", "--target", "paddlenlp-9", code=2)
    assert "--sharding-out" in refused(src, tmp_path / "out", "--to", "unified", "--sharding-out", 2, code=2)
    assert "--only optimizer" in refused(src, tmp_path / "out", "--to", "hf", "--only", "optimizer", code=2)


@pytest.mark.parametrize(("tp", "split"), [(2, True), (4, False), pytest.param(4, True, marks=pytest.mark.thorough)])
def test_runs_of_shares_of_tensor_parallel_ranks(
    tp: int, split: bool, qwen2moe: dict[str, bytes], tmp_path: Path
) -> None:
    """Not merged, with sharding 2 and split parameters: runs of what each tp rank holds, padded to 256.

    Four ranks hold both key/value heads each.
    """
    src = copy("nlp_qwen2moe_bf16_tp2", tmp_path / "src")
    kept: dict[str, Any] = {}
    for stem in ("optimizer", "master_weights"):
        for path in [*src.glob(f"{stem}-*"), src / f"{stem}.safetensors.index.json"]:
            kept |= read_folder(src, path.name) if path.suffix == ".safetensors" else {}
            path.unlink()
    files: dict[str, dict[str, Any]] = {}
    for key, array in kept.items():
        name, _, state = key.rpartition("/") if "moment" in key or "beta" in key else (key, "", "")
        stem = "optimizer" if state else "master_weights"
        for rank in range(tp):
            share = array if array.size == 1 else shares(name, array, tp)[rank]
            if not split:
                files.setdefault(f"{stem}.tp{rank:02d}.safetensors", {})[key] = share
                continue
            run = np.zeros(-(-share.size // 256) * 256, np.float32)
            run[: share.size] = share.ravel()
            for shard in range(2):
                part = array if array.size == 1 else np.split(run, [run.size // 2 + 3])[shard]
                files.setdefault(f"{stem}.tp{rank:02d}_shard{shard:02d}.safetensors", {})[key] = part
    for file, tensors in files.items():
        write_file(src / file, tensors)
    (src / "optimizer.safetensors.index.json").write_text('{"quant_ckpt_resume_times": 0}')
    reshard(src, tmp_path / "out", "--to", "unified")
    assert {k: v.tobytes() for k, v in held(tmp_path / "out").items()} == qwen2moe


def shares(name: str, array: Any, tp: int) -> list[Any]:
    """What the tensor-parallel ranks hold of a model with two key/value heads, in Paddle's orientation."""
    module = name.rsplit(".", 2)[-2]
    if module in ("q_proj", "gate_proj", "up_proj", "lm_head") or (module in ("k_proj", "v_proj") and tp == 2):
        return np.split(array, tp, axis=-1)
    if module in ("o_proj", "down_proj", "embed_tokens"):
        return np.split(array, tp, axis=0)
    return [array] * tp


def test_names_of_another_generation(tmp_path: Path) -> None:
    """--native-names: PaddleNLP's Llama as paddleformers 1.2 knows it, optimizer state too, and back to the same."""
    src, straight = FIXTURES / "nlp_llamafused_bf16_tp2", tmp_path / "straight"
    plain = ("--to", "unified", "--target", "paddlenlp-3.0")
    reshard(src, straight, *plain)
    kept = reshard(src, tmp_path / "kept", "--to", "unified", "--target", "paddleformers-1.2")
    assert "kept as the source has them; the models of paddleformers-1.2 have others" in kept.err
    new, back = tmp_path / "new", tmp_path / "back"
    done = reshard(src, new, "--to", "unified", "--target", "paddleformers-1.2", "--native-names")
    assert "kept as the source" not in done.err
    a, b = held(straight), held(new)
    assert np.array_equal(b["optimizer/lm_head.weight/moment1_0"], a["optimizer/lm_head.weight/moment1_0"].T)
    fused = a["master_weights/layers.0.mlp.gate_up_fused_proj.weight"]
    assert np.array_equal(b["master_weights/layers.0.mlp.up_proj.weight"], fused[:, 48:])
    assert np.array_equal(
        b["model/layers.0.mlp.up_proj.weight"], a["model/layers.0.mlp.gate_up_fused_proj.weight"][:, 48:].T
    )
    assert {n.split(".")[0] for n in read_folder(new, "model-*.safetensors")} == {"model", "lm_head"}
    reshard(new, back, *plain, "--native-names", "--fuse")
    for f in straight.glob("*.safetensors*"):
        assert (back / f.name).read_bytes() == f.read_bytes(), f.name
    assert "--native-names" in refused(src, tmp_path / "x", "--to", "hf", "--native-names", code=2)
