"""Saves of NeMo 1 (.nemo), NeMo 2 and Megatron Bridge, and tensors in zarr, read as the run held them.

``fixtures/megatron/nemo``: ``nemo2`` and ``bridge`` have what NeMo and Bridge write around the chunks of
``fixtures/megatron/dist/llama_tp2``; ``zarr`` is the model of that save by the zarr backend of Megatron Core 0.9 and
zarr 2.18, ``zarr_edge`` has arrays by zarr 2.18 whose chunks reach beyond them; ``ranks`` and ``own`` are rank files of
NeMo 1 (NAME.safetensors is the model), the second with the names of NeMo's own GPT in torch's format before 1.6.
"""

from __future__ import annotations

import json
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest

from ckpttool.checkpoint import Checkpoint, open_checkpoint
from tests.formats.test_megatron_dist import assert_state, ranks
from tests.helpers import tensorfile
from tests.helpers.command import ckpttool, refused, reshard
from tests.helpers.memory import TRAFFIC, in_memory
from tests.helpers.torch_save import torch_save

NEMO, DIST = Path("fixtures/megatron/nemo"), Path("fixtures/megatron/dist")
LLAMA = DIST / "llama_tp2/iter_0000005"
NAME = "llama--val_loss=1.20-step=4-consumed_samples=320.0-last"


def model() -> tensorfile.Tensors:
    return tensorfile.read(DIST / "llama_tp2.safetensors")


def nemo2(root: Path, name: str = NAME) -> Path:
    """A save of NeMo 2."""
    save = root / name
    shutil.copytree(NEMO / "nemo2", save)
    for path in [*LLAMA.glob("*.distcp"), LLAMA / "metadata.json"]:
        shutil.copy(path, save / "weights")
    return save


def bridge(root: Path) -> Path:
    """A run of Megatron Bridge."""
    shutil.copytree(LLAMA, root / "run/iter_0000005")
    for path in (NEMO / "bridge").iterdir():
        shutil.copy(path, root / "run/iter_0000005")
    (root / "run/latest_checkpointed_iteration.txt").write_text("5")
    return root / "run"


def nemo1(root: Path, source: Path = NEMO / "zarr") -> Path:
    """A .nemo as NeMo packs it."""
    with tarfile.open(root / "llama.nemo", "w:") as tar:
        tar.add(source, arcname=".")
    return root / "llama.nemo"


def said(source: Path | str) -> str:
    done = ckpttool("inspect", source)
    assert done.code == 0, done.err
    return done.err + done.out


def test_what_a_run_of_nemo2_held(tmp_path: Path) -> None:
    """The groups of NeMo's optimizer are a list."""
    found = ranks(nemo2(tmp_path), tmp_path / "out")
    tensorfile.assert_same({k: t for k, t in found.items() if "/" not in k}, model())
    assert_state(found, "llama_tp2")


def test_what_a_run_of_bridge_held(tmp_path: Path) -> None:
    run = bridge(tmp_path)
    found = ranks(run, tmp_path / "out")
    tensorfile.assert_same({k: t for k, t in found.items() if "/" not in k}, model())
    assert_state(found, "llama_tp2")
    assert f"sizes of the model are those of {run}/iter_0000005/run_config.yaml" in said(run)


@pytest.mark.parametrize("given", ["save", "weights", "checkpoints", "run"])
def test_the_save_of_nemo2_is_found(given: str, tmp_path: Path) -> None:
    save = nemo2(tmp_path / "exp/checkpoints")
    source = {"save": save, "weights": save / "weights", "checkpoints": save.parent, "run": tmp_path / "exp"}[given]
    text = said(source)
    assert "Llama, 2 layers, 30,048 parameters, BF16, with master weights and optimizer state" in text
    assert (f"{NAME} is read: the only save here" in text) == (given in ("checkpoints", "run"))


def test_the_last_save_of_nemo2_is_meant(tmp_path: Path) -> None:
    old, new = "llama--val_loss=9.20-step=9-consumed_samples=1.0", "llama--val_loss=1.20-step=10-consumed_samples=1.0"
    for name in (old, new):
        nemo2(tmp_path, name)
    assert f"{new} is read: the last of 2 saves" in said(tmp_path)
    (tmp_path / f"{new}-unfinished").touch()
    assert f"{old} is read: the only save here" in said(tmp_path)
    nemo2(tmp_path, old + "-last")
    assert f"{old}-last is read: the last of 2 saves" in said(tmp_path)
    nemo2(tmp_path, "another-step=9-last")
    assert "it is unclear which one to read" in refused(tmp_path, tmp_path / "out")


def of_nemo2(tmp_path: Path, **changed: object) -> Path:
    """A save of NeMo 2 with other lines in model.yaml."""
    save = nemo2(tmp_path)
    path = save / "context/model.yaml"
    lines = path.read_text().splitlines()
    config = lines.index("config:")
    for name, value in changed.items():
        at = next((i for i, line in enumerate(lines) if i > config and line.startswith(f"  {name}:")), None)
        if at is not None:
            end = next(i for i in range(at + 1, len(lines)) if not lines[i].startswith("   "))
            del lines[at:end]
        lines.insert(config + 1, f"  {name}: {json.dumps(value)}")
    path.write_text("\n".join(lines))
    return save


def config_of(source: Path) -> dict[str, object]:
    opened: Checkpoint = open_checkpoint(source)
    return dict(opened.config)


def test_the_configuration_of_nemo2(tmp_path: Path) -> None:
    scaled = {"scale_factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "old_context_len": 8192}
    config = config_of(of_nemo2(tmp_path, rotary_base=500000, layernorm_epsilon=1e-6, **scaled))
    assert config["model_type"] == "llama"
    assert (config["vocab_size"], config["head_dim"], config["num_key_value_heads"]) == (131, 8, 2)
    assert (config["rope_theta"], config["rms_norm_eps"], config["tie_word_embeddings"]) == (500000.0, 1e-6, False)
    assert config["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 16.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"activation_func": {"_target_": "torch._C._nn.gelu"}}, "a gated gelu"),
        ({"scale_factor": 8.0, "low_freq_factor": 2.0}, "low_freq_factor 2.0"),
    ],
)
def test_a_model_that_is_none_is_refused(changed: dict[str, object], words: str, tmp_path: Path) -> None:
    save = of_nemo2(tmp_path, **changed)
    assert words in refused(save, tmp_path / "out", "--to", "hf")
    (tmp_path / "whole").mkdir()
    config = config_of(nemo2(tmp_path / "whole"))
    (save / "config.json").write_text(json.dumps(config))  # says it all
    reshard(save, tmp_path / "out", "--to", "hf", "--only", "model")
    tensorfile.assert_same(tensorfile.read_all(tmp_path / "out"), model())


def test_what_is_no_language_model_keeps_its_names(tmp_path: Path) -> None:
    save = nemo2(tmp_path)
    (save / "context/model.yaml").write_text("_target_: nemo.collections.asr.models.Model\nconfig: {layers: 3}\n")
    reshard(save, tmp_path / "out", "--to", "hf", "--only", "model")
    assert "decoder.layers.0.self_attention.linear_qkv.weight" in tensorfile.read_all(tmp_path / "out")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [", "is not valid YAML"),
        ("- 1", "is not a YAML mapping"),
        ("[" * 600, "it is nested too deep"),
        ("a: &a {b: 1}\nc: {<<: *a}", "merge keys"),
        ("a: " + "x" * (1 << 20), "this is not a configuration"),
    ],
)
def test_a_broken_configuration_is_one_error(text: str, words: str, tmp_path: Path) -> None:
    save = nemo2(tmp_path)
    (save / "context/model.yaml").write_text(text)
    assert words in refused(save, tmp_path / "out")


def test_objects_in_a_configuration_are_not_made(tmp_path: Path) -> None:
    save = nemo2(tmp_path)
    path = save / "context/model.yaml"
    path.write_text(path.read_text() + "evil: !!python/object/apply:os.mkdir [evil]\nother: !Thing {a: 1}\n")
    assert "Llama" in said(save)
    assert not Path("evil").exists()


def test_a_link_out_of_the_context_is_not_followed(tmp_path: Path) -> None:
    save = nemo2(tmp_path)
    (save / "context/model.yaml").rename(tmp_path / "model.yaml")
    (save / "context/model.yaml").symlink_to(tmp_path / "model.yaml")
    assert "sizes of the model" not in said(save)


def test_how_far_the_training_was(tmp_path: Path) -> None:
    for source in (nemo2(tmp_path), bridge(tmp_path)):
        training = open_checkpoint(source).stored.training
        assert training is not None
        assert {k: training.plain[k] for k in ("iteration", "consumed_train_samples")} == {
            "iteration": 5,
            "consumed_train_samples": 320,
        }


def test_the_tokenizer_comes_along(tmp_path: Path) -> None:
    save, run = nemo2(tmp_path), bridge(tmp_path)
    for folder in (save / "context/nemo_tokenizer", run / "iter_0000005/tokenizer"):
        folder.mkdir()
        (folder / "tokenizer.json").write_text("{}")
    (save / "context/vocab.txt").write_text("a")
    (save / "context/10e845ad-f676-482e-b6d1-669e911cfaf8").write_bytes(b"a pickle of NeMo's")
    shutil.copytree(NEMO / "zarr", tmp_path / "in")
    (tmp_path / "in/aabb_tokenizer.model").write_bytes(b"x")
    wanted = {
        save: {"tokenizer.json", "vocab.txt"},
        run: {"tokenizer.json"},
        nemo1(tmp_path, tmp_path / "in"): {"aabb_tokenizer.model"},
        tmp_path / "in": {"aabb_tokenizer.model"},
    }
    for i, (source, names) in enumerate(wanted.items()):
        reshard(source, tmp_path / str(i), "--to", "hf", "--only", "model")
        found = {p.relative_to(tmp_path / str(i)).as_posix() for p in (tmp_path / str(i)).rglob("*") if p.is_file()}
        assert found == {"config.json", "model.safetensors", *names}


def test_adapters_are_refused(tmp_path: Path) -> None:
    source = tmp_path / "save"
    shutil.copytree(NEMO / "zarr_edge", source)
    name = "module.decoder.layers.self_attention.linear_proj.adapter.linear_in.weight"
    (source / "e.weight").rename(source / name)
    assert f"`{name}` belongs to an adapter (LoRA)" in refused(source, tmp_path / "out", "--to", "hf")


def test_a_run_of_nemo1(tmp_path: Path) -> None:
    """Its saves are torch_dist without a directory around, and hparams.yaml lies beside `checkpoints`."""
    shutil.copytree(nemo2(tmp_path / "other") / "weights", tmp_path / "run/checkpoints" / NAME)
    lines = (NEMO / "zarr/model_config.yaml").read_text().splitlines()
    (tmp_path / "run/hparams.yaml").write_text("\n".join(["cfg:", *(f"  {line}" for line in lines)]))
    for source in (tmp_path / "run", tmp_path / "run/checkpoints" / NAME):
        text = said(source)
        assert "Llama, 2 layers, 31,904 parameters, BF16, with master weights and optimizer state" in text
        assert "hparams.yaml" in text


# -- NeMo 1, and zarr


def test_a_nemo_is_read_in_place(tmp_path: Path) -> None:
    """The configuration does not say how many tokens there are, so that all rows of the vocabulary are kept."""
    source = nemo1(tmp_path)
    reshard(source, tmp_path / "out", "--to", "hf", "--verify")
    found = tensorfile.read_all(tmp_path / "out")
    for name, raw in model().items():
        rows = raw.bits.shape[0]
        assert found[name].bits.shape == ((160, 32) if rows == 131 else raw.bits.shape)
        assert (found[name].bits[:rows] == raw.bits).all()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["llama.nemo", "out"]
    done = ckpttool("inspect", source, "--check")
    assert (done.code, "0 errors, 0 warnings" in done.out) == (0, True)


def test_config_json_beside_a_nemo(tmp_path: Path) -> None:
    source = nemo1(tmp_path)
    config = {**config_of(source), "vocab_size": 131}
    (tmp_path / "config.json").write_text(json.dumps(config))
    reshard(source, tmp_path / "out", "--to", "hf")
    tensorfile.assert_same(tensorfile.read_all(tmp_path / "out"), model())


@pytest.mark.parametrize("at", ["", "model_weights"])
def test_an_unpacked_nemo(at: str, tmp_path: Path) -> None:
    reshard(nemo1(tmp_path), tmp_path / "packed", "--to", "hf")
    reshard(NEMO / "zarr" / at, tmp_path / "out", "--to", "hf")
    tensorfile.assert_same(tensorfile.read_all(tmp_path / "out"), tensorfile.read_all(tmp_path / "packed"))


def test_a_nemo_of_torch_dist(tmp_path: Path) -> None:
    inside = tmp_path / "in"
    inside.mkdir()
    shutil.copytree(nemo2(tmp_path) / "weights", inside / "model_weights")
    shutil.copy(NEMO / "zarr/model_config.yaml", inside)
    found = ranks(nemo1(tmp_path, inside), tmp_path / "out")
    assert {k for k in found if "/" not in k} == model().keys()


def test_chunks_that_reach_beyond_the_tensor(tmp_path: Path) -> None:
    reshard(NEMO / "zarr_edge", tmp_path / "out", "--to", "hf")
    found = tensorfile.read_all(tmp_path / "out")
    wide = (np.arange(35, dtype="<f4").view("<u4") >> 16).astype("<u2").reshape(5, 7)
    wanted = {
        "a.weight": tensorfile.Raw("BF16", wide),
        "b": tensorfile.Raw("I64", np.array(3, "<u8")),
        "c.weight": tensorfile.Raw("F16", (np.arange(10.0) / 3).astype("<f2").view("<u2")),
        "d.weight": tensorfile.Raw("F32", np.arange(7, dtype="<f4").view("<u4")),
        "e.weight": tensorfile.Raw("F32", np.arange(24, dtype="<f4").view("<u4").reshape(2, 3, 4)),
    }
    tensorfile.assert_same(found, wanted)


def test_chunks_without_their_description_are_refused(tmp_path: Path) -> None:
    """Or the tensor would be gone without a word: copies often leave out names that begin with a dot."""
    source = tmp_path / "in"
    shutil.copytree(NEMO / "zarr", source)
    paths = sorted(source.rglob(".zarray"))
    assert len(paths) == 9
    for path in paths:
        kept = path.rename(tmp_path / "kept")
        assert f".zarray of `{path.parent.name}` is missing" in refused(source, tmp_path / "out", "--to", "hf")
        kept.rename(path)
    reshard(source, tmp_path / "out", "--to", "hf")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"compressor": {"id": "blosc", "cname": "lz4"}}, "`c.weight` is compressed (blosc)"),
        ({"filters": [{"id": "delta"}]}, "goes through filters"),
        ({"order": "F"}, "lies in the order F"),
        ({"dtype": ">f4"}, "zarr's type >f4"),
        ({"zarr_format": 3}, "version 3 of zarr"),
        ({"dimension_separator": "/"}, "chunks in directories"),
        ({"chunks": [0]}, "says the chunks [0]"),
        ({"chunks": [4, 4]}, "says the shape [10] and chunks of [4, 4]"),
        ({"shape": [-1]}, "says the shape [-1]"),
        ({"shape": [1 << 40], "chunks": [1]}, "has 1,099,511,627,776 chunks"),
        ({"chunks": [5]}, "has 8 bytes, not 10"),
        ({"shape": [13]}, "1 of 4 chunks of `c.weight` are missing: 3"),
    ],
)
def test_other_arrays_of_zarr_are_refused(changed: dict[str, object], words: str, tmp_path: Path) -> None:
    source = tmp_path / "save"
    shutil.copytree(NEMO / "zarr_edge", source)
    path = source / "c.weight/.zarray"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))
    assert words in refused(source, tmp_path / "out", "--to", "hf")
    assert not (tmp_path / "out").exists()


def test_a_nemo_without_weights_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/model_config.yaml").write_text("a: 1")
    source = nemo1(tmp_path, tmp_path / "in")
    assert "the tar holds no model_weights" in refused(source, tmp_path / "out")
    source.write_bytes(b"\x1f\x8b\x08" + bytes(1000))
    assert "mkdir DIR && tar xf llama.nemo -C DIR" in refused(source, tmp_path / "out")


# -- files of ranks


def given(source: Path, tmp_path: Path, *, packed: bool) -> Path:
    """A save of NeMo 1, with the number of tokens."""
    shutil.copytree(source, tmp_path / "in")
    config = config_of(source)
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 131}))
    if packed:
        return nemo1(tmp_path, tmp_path / "in")
    shutil.copy(tmp_path / "config.json", tmp_path / "in")
    return tmp_path / "in"


@pytest.mark.parametrize(("case", "packed"), [("ranks", True), ("ranks", False), ("own", True)])
def test_files_of_ranks(case: str, packed: bool, tmp_path: Path) -> None:
    """Two ranks with `model.module.` in front of names; two stages of two ranks, with NeMo's own names."""
    source = given(NEMO / case, tmp_path, packed=packed)
    reshard(source, tmp_path / "out", "--to", "hf", "--verify")
    tensorfile.assert_same(tensorfile.read_all(tmp_path / "out"), tensorfile.read(NEMO / f"{case}.safetensors"))
    done = ckpttool("inspect", source, "--check")
    assert (done.code, "0 errors" in done.out) == (0, True), done.out


def test_a_file_of_one_rank(tmp_path: Path) -> None:
    save = nemo2(tmp_path)
    (save / "context/model.yaml").unlink()  # so that names stay
    reshard(save, tmp_path / "bin", "--to", "torch-bin", "--only", "model")
    (tmp_path / "one").mkdir()
    shutil.copy(tmp_path / "bin/pytorch_model.bin", tmp_path / "one/model_weights.ckpt")
    shutil.copy(NEMO / "zarr/model_config.yaml", tmp_path / "one")  # it says tp 2
    reshard(given(tmp_path / "one", tmp_path, packed=True), tmp_path / "out", "--to", "hf")
    tensorfile.assert_same(tensorfile.read_all(tmp_path / "out"), model())


def test_models_of_speech_keep_their_names(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    torch_save({"model.joint.weight": np.zeros((2, 3), "<f4")}, tmp_path / "in/model_weights.ckpt")
    (tmp_path / "in/model_config.yaml").write_text("target: nemo.collections.asr.models.Model\n")
    reshard(nemo1(tmp_path, tmp_path / "in"), tmp_path / "out", "--to", "hf")
    assert list(tensorfile.read_all(tmp_path / "out")) == ["model.joint.weight"]


def test_the_configuration_of_nemo1(tmp_path: Path) -> None:
    config = config_of(NEMO / "own")
    assert {k: config[k] for k in ("model_type", "vocab_size", "max_position_embeddings", "rms_norm_eps")} == {
        "model_type": "llama",
        "vocab_size": 160,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
    }
    shutil.copytree(NEMO / "own", tmp_path / "in")
    path = tmp_path / "in/model_config.yaml"
    path.write_text(path.read_text().replace("fast-swiglu", "geglu"))
    assert "a gated geglu" in refused(tmp_path / "in", tmp_path / "out")


@pytest.mark.product
@pytest.mark.parametrize(
    ("doubled", "said"),
    [
        (["hidden_size"], "hidden_size"),
        (["num_attention_heads", "num_key_value_heads"], "num_attention_heads and head_dim"),
        (["head_dim"], "num_attention_heads and head_dim"),
        (["num_key_value_heads"], "num_attention_heads, num_key_value_heads and head_dim"),
        (["intermediate_size"], "intermediate_size"),
    ],
)
@pytest.mark.parametrize("case", ["own", "zarr"])
def test_the_configuration_of_another_model_is_refused(
    case: str, doubled: list[str], said: str, tmp_path: Path
) -> None:
    """Twice as many heads of each kind would cut queries, keys and values in other places, and fit."""
    config = {**config_of(NEMO / case), "vocab_size": 131}
    for name in doubled:
        config[name] = 2 * int(str(config[name]))
    shutil.copytree(NEMO / case, tmp_path / "in")
    for name in ("model_config.yaml", "config.json"):
        (tmp_path / "in" / name).unlink(missing_ok=True)
    (tmp_path / "in/config.json").write_text(json.dumps(config))
    error = refused(tmp_path / "in", tmp_path / "out", "--to", "hf")
    assert f"does not fit {said} of the model's configuration" in error


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (
            b"mlp.dense_h_to_4h.weight",
            b"mlp.dense_h_to_4_2.weight",
            "`language_model.encoder.layers.0.mlp.dense_h_to_4_2.weight`",
        ),
        (
            b"model.language_model.encoder.layers.0.input_layernorm",
            b"model.0.language_model.encoder.layer.0.inputlayernorm",
            "a virtual pipeline",
        ),
    ],
)
def test_names_of_others_are_refused(old: bytes, new: bytes, words: str, tmp_path: Path) -> None:
    shutil.copytree(NEMO / "own", tmp_path / "in")
    path = tmp_path / "in/tp_rank_00_pp_rank_000/model_weights.ckpt"
    data = path.read_bytes()
    at = data.index(old)
    grown = len(new) - len(old)
    begin = at - 5 if data[at - 5 : at - 4] == b"X" else data.rindex(b"X", 0, at)
    length = int.from_bytes(data[begin + 1 : begin + 5], "little")
    path.write_bytes(
        data[: begin + 1] + (length + grown).to_bytes(4, "little") + data[begin + 5 : at] + new + data[at + len(old) :]
    )
    assert words in refused(tmp_path / "in", tmp_path / "out", "--to", "hf")


def test_a_rank_that_is_missing(tmp_path: Path) -> None:
    shutil.copytree(NEMO / "own", tmp_path / "in")
    shutil.rmtree(tmp_path / "in/tp_rank_01_pp_rank_001")
    assert "1 directory is missing: tp_rank_01_pp_rank_001" in refused(tmp_path / "in", tmp_path / "out")


def test_code_in_a_nemo_is_named_and_not_run(tmp_path: Path) -> None:
    shutil.copytree(NEMO / "ranks", tmp_path / "in")
    path = tmp_path / "in/mp_rank_01/model_weights.ckpt"
    shutil.copy("fixtures/torch/hostile/system.bin", path)
    source = nemo1(tmp_path, tmp_path / "in")
    assert "system" in refused(source, tmp_path / "out")
    done = ckpttool("inspect", source, "--imports")
    assert "1 dangerous" in done.out
    assert "mp_rank_01/model_weights.ckpt" in done.out


@pytest.mark.parametrize("source", ["zarr", "own"])
def test_a_nemo_on_another_machine_is_read_where_it_lies(source: str, tmp_path: Path) -> None:
    held = tmp_path / "held"
    held.mkdir()
    archive = nemo1(held, NEMO / source)
    reshard(archive, tmp_path / "there", "--to", "hf")
    with in_memory(held) as root:
        reshard(f"{root}/llama.nemo", tmp_path / "here", "--to", "hf", "--verify")
        said = ckpttool("inspect", f"{root}/llama.nemo", "--list", "--json")
        pickles = ckpttool("inspect", f"{root}/llama.nemo", "--imports")
        assert not TRAFFIC.maps
    assert (said.code, pickles.code) == (0, 0), said.err + pickles.err
    names = sorted(p.relative_to(tmp_path / "there") for p in (tmp_path / "there").rglob("*") if p.is_file())
    assert names == sorted(p.relative_to(tmp_path / "here") for p in (tmp_path / "here").rglob("*") if p.is_file())
    for name in names:
        assert (tmp_path / "here" / name).read_bytes() == (tmp_path / "there" / name).read_bytes(), name
