"""The command line of size: sources, exit codes, errors, output."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.helpers.command import ckpttool
from tests.size.models import write_config
from tests.size.test_ranks import small

FIXTURES = Path(__file__).parents[2] / "fixtures"
DEEPSEEK = FIXTURES / "deepseek_v3"


def size_of(src: Path, *options: object, code: int = 0) -> dict[str, Any]:
    """``size --json``, which must end with ``code``."""
    done = ckpttool("size", src, *options, "--json")
    assert done.code == code, done.err
    data: dict[str, Any] = json.loads(done.out)
    assert data["schema"] == "ckpttool.size/1"
    assert data["ok"] == (code == 0)
    return data


def refused(src: Path, *options: object, code: int = 2) -> str:
    """``size``, which must fail with one clear error."""
    done = ckpttool("size", src, *options)
    assert done.code == code, (done.code, done.out, done.err)
    assert done.out == ""
    assert done.err.count("error: ") == 1
    return done.err


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    path = tmp_path / "llama.json"
    path.write_text(json.dumps(small()))
    return path


# -- sources


def test_a_checkpoint_as_it_is() -> None:
    data = size_of(DEEPSEEK)
    files = list(DEEPSEEK.glob("*.safetensors"))
    index = DEEPSEEK / "model.safetensors.index.json"
    assert data["recipe"]["name"] == "as-is"
    assert data["disk"] == {
        "payload": json.loads(index.read_text())["metadata"]["total_size"],
        "headers": sum(f.stat().st_size for f in files) - data["bytes"],
        "files": 2,
        "bytes": sum(f.stat().st_size for f in files),
        "index": index.stat().st_size,
        "real": True,
    }
    assert sum(t["bytes"] for t in data["classes"].values()) == data["bytes"]
    assert sum(t["bytes"] for t in data["dtypes"].values()) == data["bytes"]
    assert {"scale", "experts", "mtp"} <= data["classes"].keys()


def test_the_weights_of_a_quantized_checkpoint_are_found_again(tmp_path: Path) -> None:
    # Its config alone declares the same tensors in high precision, and the same recipe makes the same of them.
    config = tmp_path / "config.json"
    shutil.copy(DEEPSEEK / "config.json", config)
    # (The prediction layer of the fixture is not complete.)
    options = ("--no-mtp", "--by", "tensor")
    there, declared = size_of(DEEPSEEK, *options), size_of(tmp_path, *options)
    assert declared["recipe"]["name"] == there["recipe"]["name"] == "as-is"
    for key in ("parameters", "elements", "bytes", "tensors", "classes", "disk"):
        assert declared[key] == there[key]


def test_a_model_is_as_large_in_ranks_as_whole() -> None:
    whole = size_of(DEEPSEEK, "--no-mtp", "--recipe", "block")
    ranks = size_of(FIXTURES / "deepseek_v3_mp2", "--recipe", "block")
    for key in ("parameters", "elements", "bytes", "dtypes", "classes"):
        assert ranks[key] == whole[key]
    note = size_of(FIXTURES / "deepseek_v3_mp2")["notes"]
    assert any("copies and padding" in n for n in note)


@pytest.mark.parametrize("name", ["llama_tp8", "vllm_sharded_tp2", "vllm/qwen3_moe", "vllm/llama_tied"])
def test_other_formats(name: str) -> None:
    data = size_of(FIXTURES / name, "--recipe", "bf16")
    assert data["parameters"] == data["elements"] > 0


def test_packed_codes_and_lone_scales(tmp_path: Path) -> None:
    save_file(
        {
            "a.weight_packed": np.zeros((16, 16), "uint8"),
            "a.weight_scale": np.zeros((16, 2), ml_dtypes.float8_e4m3fn),
            "a.weight_global_scale": np.ones(1, "float32"),
            "a.input_global_scale": np.ones(1, "float32"),
            "norm.weight": np.ones(32, ml_dtypes.bfloat16),
        },
        tmp_path / "model.safetensors",
    )
    data = size_of(tmp_path, "--by", "module")
    assert data["parameters"] == 16 * 32 + 32
    assert data["elements_unpacked"] - data["elements"] == 16 * 16
    assert data["classes"]["scale"]["tensors"] == 3
    assert data["modules"]["a"]["bytes"] == 16 * 16 + 16 * 2 + 4 + 4
    bf16 = size_of(tmp_path, "--recipe", "bf16")
    assert bf16["bytes"] == 2 * bf16["parameters"]


def test_a_file_and_a_config_for_it(tmp_path: Path) -> None:
    file = tmp_path / "weights.safetensors"
    shutil.copy(FIXTURES / "hf_tiny_source" / "model.safetensors", file)
    config = FIXTURES / "hf_tiny_source" / "config.json"
    assert size_of(file)["family"] == "none"
    assert size_of(file, "--config", config, "--recipe", "bf16", "--tp-out", 2)["family"] == "llama"
    assert "has a config of its own" in refused(FIXTURES / "hf_tiny_source", "--config", config)


def test_an_index_is_a_source() -> None:
    assert size_of(DEEPSEEK / "model.safetensors.index.json")["bytes"] == size_of(DEEPSEEK)["bytes"]


def test_norms_of_each_head_are_not_forgotten(tmp_path: Path) -> None:
    """StableLM 2 12B has a tensor of norms for each head."""
    numbers = dict.fromkeys(("hidden_size", "intermediate_size", "vocab_size"), 64) | {"num_hidden_layers": 2}
    config = {"model_type": "stablelm", "num_attention_heads": 4, "num_key_value_heads": 2, **numbers}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    size_of(path)
    path.write_text(json.dumps({**config, "qk_layernorm": True}))
    assert "a norm for each head of the queries" in refused(path, code=1)


def test_configs_that_are_none(tmp_path: Path, llama: Path) -> None:
    odd = tmp_path / "odd.json"
    odd.write_text("{}")
    assert "not a config of a model" in refused(odd, code=1)
    odd.write_text('{"model_type": "unheard"}')
    assert "no family is known for this model: unheard" in refused(odd, code=1)
    odd.write_text("[]")
    assert "not a JSON object" in refused(odd, code=1)
    odd.write_text("{")
    assert "not valid JSON" in refused(odd, code=1)
    assert "does not exist" in refused(tmp_path / "nothing")
    assert "--tp has no effect" in refused(llama, "--tp", 2)
    assert "--from has no effect" in refused(llama, "--from", "hf")
    assert "--config has no effect" in refused(llama, "--config", llama)


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    index = tmp_path / "x.index.json"
    shutil.copy(DEEPSEEK / "model.safetensors.index.json", index)
    text = refused(index, code=1)
    assert "2 of 2 files that the index names are missing: `model-00001-of-00002.safetensors`" in text
    assert f"--> {index}\n" in text
    other = tmp_path / "h.py"
    other.write_text("x = 1")
    text = refused(other, code=1)
    assert "neither a checkpoint nor the config.json" in text
    assert f"--> {other}\n" in text


# -- fields that are not what they should be


@pytest.mark.parametrize("value", ["8", 1.5, [], {}, True, 0, -8], ids=repr)
def test_sizes_of_another_type(tmp_path: Path, value: object) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(small(num_key_value_heads=value)))
    assert f"`num_key_value_heads` of config.json is {json.dumps(value)}, " in refused(path, code=1)


def test_sizes_of_a_checkpoint_count_on_ranks(tmp_path: Path) -> None:
    src = shutil.copytree(FIXTURES / "hf_tiny_source", tmp_path / "src")
    config = json.loads((src / "config.json").read_text())
    (src / "config.json").write_text(json.dumps({**config, "num_key_value_heads": "2"}))
    whole = size_of(FIXTURES / "hf_tiny_source", "--recipe", "bf16")
    assert size_of(src, "--recipe", "bf16")["bytes"] == whole["bytes"]
    for options in (("--tp-out", 2), ("--kv", "bf16")):
        assert '`num_key_value_heads` of config.json is "2"' in refused(src, "--recipe", "bf16", *options, code=1)


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("gpt-oss-20b", "sliding_window", -5),
        ("gpt-oss-20b", "sliding_window", "x"),
        ("gpt-oss-20b", "layer_types", "full_attention"),
        ("gpt-oss-20b", "layer_types", ["full_attention"]),
        ("gpt-oss-20b", "layer_types", [1] * 24),
        ("gpt-oss-20b", "layer_types", ["full_attention"] * 23 + [2]),
        ("Qwen2.5-7B", "use_sliding_window", "false"),
        ("DeepSeek-V3", "qk_rope_head_dim", "64"),
    ],
)
def test_fields_of_the_cache(tmp_path: Path, name: str, field: str, value: object) -> None:
    path = write_config(tmp_path, name)
    config = {k: v for k, v in json.loads(path.read_text()).items() if field == "layer_types" or k != "layer_types"}
    path.write_text(json.dumps({**config, field: value}))
    text = refused(path, "--kv", "bf16", "--tokens", 1000, code=1)
    assert f"`{field}`" in text
    assert json.dumps(value)[:20] in text


def test_no_window(tmp_path: Path) -> None:
    path = write_config(tmp_path, "gpt-oss-20b")
    config = json.loads(path.read_text())
    options = ("--kv", "bf16", "--tokens", 1000)
    path.write_text(json.dumps({**config, "sliding_window": 256}))
    kv = size_of(path, *options)["kv"]
    assert (kv["layers"], kv["sliding_layers"], kv["window"]) == (24, 12, 256)
    path.write_text(json.dumps({k: v for k, v in config.items() if k != "sliding_window"}))
    assert size_of(path, *options)["kv"]["window"] == 128
    path.write_text(json.dumps({**config, "sliding_window": None}))
    kv = size_of(path, *options)["kv"]
    assert (kv["layers"], kv["sliding_layers"], kv["window"]) == (24, 0, 0)


def test_a_dtype_that_is_left_to_the_files(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(small(torch_dtype="auto")))
    assert set(size_of(path, "--recipe", "bf16")["dtypes"]) == {"BF16"}


@pytest.mark.parametrize("value", [[128], "x", 5, [0, 128], ["x", 1], [True, 128], {}], ids=repr)
def test_blocks_of_another_type(tmp_path: Path, value: object) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(small(quantization_config={"quant_method": "fp8", "weight_block_size": value})))
    text = refused(path, code=1)
    assert f"`weight_block_size` of config.json's quantization_config is {json.dumps(value)}" in text
    assert "hint: " in text


def test_an_unknown_dtype_is_named(tmp_path: Path) -> None:
    header = json.dumps({"x": {"dtype": "F3", "shape": [1], "data_offsets": [0, 1]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"0")
    assert "tensor `x` has the unknown dtype `F3`" in refused(tmp_path, code=1)


# -- recipes


def test_recipes_choose_themselves(llama: Path, tmp_path: Path) -> None:
    """As the model is, until an option of a recipe asks for one; the former name of the command asks for FP8."""
    plain = size_of(llama)
    assert plain["recipe"]["name"] == "as-is"
    assert plain["bytes"] == 2 * plain["parameters"] == size_of(llama, "--recipe", "bf16")["bytes"]
    assert size_of(llama, "--block", "64x64")["recipe"]["name"] == "block"
    for options, name in (((), "block"), (("--recipe", "mxfp8"), "mxfp8")):
        assert json.loads(ckpttool("fp8-size", llama, *options, "--json").out)["recipe"]["name"] == name
    quantized = tmp_path / "quantized.json"
    quantized.write_text(json.dumps(small(quantization_config={"quant_method": "fp8", "weight_block_size": [64, 64]})))
    data = size_of(quantized)
    assert data["recipe"]["name"] == "as-is"
    assert data["recipe"]["scheme"]["block"] == [64, 64]
    assert size_of(quantized, "--scale-dtype", "bf16")["recipe"]["name"] == "block"


def test_as_is_keeps_what_the_config_keeps(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    quant = {"quant_method": "fp8", "modules_to_not_convert": ["model.layers.1.mlp.down_proj"]}
    path.write_text(json.dumps(small(quantization_config=quant)))
    kept = size_of(path)["recipe"]["kept"]
    assert kept["config"] == 1


def test_keep_and_include(llama: Path) -> None:
    plain = size_of(llama, "--recipe", "block")["dtypes"]["F8_E4M3"]["tensors"]
    assert size_of(llama, "--keep", "*.layers.0.*")["dtypes"]["F8_E4M3"]["tensors"] == plain - 7
    assert size_of(llama, "--include", "lm_head.*")["dtypes"]["F8_E4M3"]["tensors"] == plain + 1
    assert "nothing to quantize" in refused(llama, "--keep-preset", "experts-only")
    assert "did you mean" in refused(llama, "--keep", "*.nothing.*")


def test_edges(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(small(intermediate_size=500)))
    assert size_of(path, "--recipe", "block")["dtypes"]["F8_E4M3"]["tensors"] == 14
    skipped = size_of(path, "--edge", "skip")
    assert skipped["recipe"]["kept"]["--edge skip"] == 6
    assert "not a multiple of blocks" in refused(path, "--edge", "error", code=1)
    assert "not a multiple of 32" in refused(path, "--recipe", "mxfp8", code=1)


def test_static_activations_have_a_scale_each(llama: Path) -> None:
    options = ("--recipe", "tensor", "--quant-method", "modelopt")
    assert size_of(llama, *options, "--static-act")["bytes"] == size_of(llama, *options)["bytes"] + 14 * 4


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--recipe", "int4"), "unknown recipe"),
        (("--recipe", "bf16", "--block", "64x64"), "--block has no effect with recipe bf16"),
        (("--recipe", "as-is", "--keep", "*"), "--keep has no effect with recipe as-is"),
        (("--block", "64"), "not MxN"),
        (("--scale-dtype", "e4m3"), "no F8_E4M3 scales"),
        (("--no-mtp",), "no multi-token-prediction layers"),
        (("--by", "size"), "not one of"),
        (("--unit", "MB"), "not one of"),
        (("--tokens", 5), "also pass --kv bf16 or --kv fp8"),
        (("--kv", "bf16", "--batch", 2), "--batch has no effect without --tokens"),
        (("--kv", "bf16", "--max-model-len", 2), "--max-model-len has no effect without --tokens"),
        (("--kv", "fp8_ds_mla"), "no latent attention"),
        (("--zero", 1), "--zero has no effect without --train"),
        (("--fp8-transposed",), "--fp8-transposed has no effect without --train"),
        (("--train", "--recipe", "bf16", "--fp8-transposed"), "has no effect with recipe bf16"),
        (("--train", "--kv", "bf16"), "once for each"),
        (("--vocab-pad", 128), "--vocab-pad has no effect"),
        (("--ep-out", 2), "no experts"),
        (("--check-total-size",), "SRC is a config"),
        (("--recipe", "tensor", "--edge", "skip"), "--edge has no effect with recipe tensor"),
        (("--recipe", "channel", "--edge", "ceil"), "--edge has no effect with recipe channel"),
        (("--recipe", "mxfp8", "--edge", "round"), "--edge is round"),
        (("--scale-dtype", "xx"), "--scale-dtype: unknown dtype `xx`"),
        (("--keep", "*"), "nothing to quantize"),
    ],
    ids=lambda x: " ".join(map(str, x)) if isinstance(x, tuple) else "",
)
def test_options_that_do_nothing_or_make_no_sense(llama: Path, options: tuple[object, ...], said: str) -> None:
    assert said in refused(llama, *options)


def test_scales_of_blocks_that_gpt_oss_cannot_have(tmp_path: Path) -> None:
    config = write_config(tmp_path, "gpt-oss-20b")
    mxfp4 = ("--recipe", "mxfp4")
    for options in (("--include", "*.q_proj.weight"), ("--keep-preset", "none")):
        assert "cannot be MXFP4 beside `model.layers.0.mlp.experts.gate_up_proj`" in refused(config, *mxfp4, *options)
    alone = size_of(config, *mxfp4, "--keep", "*.experts.*", "--include", "*.q_proj.weight")
    assert alone["dtypes"]["U8"]["tensors"] == 2 * 24
    assert size_of(config, *mxfp4)["dtypes"]["U8"]["tensors"] == 4 * 24


def test_an_index_is_checked_where_nothing_can_be_quantized(tmp_path: Path) -> None:
    src = indexed(tmp_path, 4, x=np.zeros(1, "float32"))
    data = size_of(src, "--check-total-size")
    assert (data["recipe"]["name"], data["total_size"]["ok"]) == ("as-is", True)
    assert "nothing to quantize" in refused(src, "--check-total-size", "--recipe", "block")


# -- the answer is no


def test_blocks_that_a_cut_tears(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(small(intermediate_size=640, num_key_value_heads=4)))
    data = size_of(config, "--recipe", "block", "--tp-out", 2, code=3)
    assert not data["ranks"]["feasible"]
    assert data["ranks"]["possible_tp"] == [1]
    assert data["ranks"]["misfits"][0]["shape"] == [640, 256]
    text = ckpttool("size", config, "--recipe", "block", "--tp-out", 2).out
    assert "not possible: `model.layers.0.mlp.gate_proj.weight` [640, 256]: a rank has 320 of its 640 rows" in text
    assert "possible: --tp-out 1" in text


def test_training_has_no_blocks_to_tear(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(small(intermediate_size=640, num_key_value_heads=4)))
    assert size_of(config, "--tp-out", 2, "--train")["ranks"]["feasible"]


def test_devices_that_are_too_small(llama: Path) -> None:
    data = size_of(llama, "--gpu", "1MB", "--utilization", 1, code=3)
    held = data["ranks"]["groups"][0]["bytes"]
    fit = data["fit"]
    assert [r["options"] for r in fit.pop("would_fit")]
    assert fit == {
        "rank": 0,
        "needed": held,
        "memory": 10**6,
        "budget_bytes": 10**6,
        "utilization": 1.0,
        "gpus": 1,
        "tokens": None,
        "device": "",
        "ok": False,
        "left": 10**6 - held,
    }
    whole = ("--utilization", 1)
    assert size_of(llama, "--gpu", held, *whole)["fit"]["left"] == 0
    cache = ("--kv", "bf16", "--tokens", 1000)
    kv = size_of(llama, "--gpu", held + 1000 * 1024, *whole, *cache)
    assert kv["kv"]["bytes_per_token"] == 2 * 2 * 2 * 64 * 2 == 1024
    assert (kv["fit"]["left"], kv["fit"]["tokens"]) == (0, 1000)
    assert not size_of(llama, "--gpu", held + 999 * 1024, *whole, *cache, code=3)["fit"]["ok"]
    assert size_of(llama, "--train", "--gpu", "100MB")["fit"]["ok"]


def test_the_most_loaded_rank_counts(llama: Path) -> None:
    data = size_of(llama, "--pp-out", 2, "--gpu", "1GB")
    sizes = [g["bytes"] for g in data["ranks"]["groups"]]
    assert data["fit"]["needed"] == max(sizes)
    assert data["ranks"]["most_loaded"] == 1
    assert data["not_modelled"] == ["activations", "CUDA graphs", "allocator fragmentation", "NCCL buffers"]


def indexed(folder: Path, total: float, **tensors: np.ndarray[Any, Any]) -> Path:
    save_file(tensors, folder / "model-00001-of-00001.safetensors")
    index = {
        "metadata": {"total_size": total},
        "weight_map": dict.fromkeys(tensors, "model-00001-of-00001.safetensors"),
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


MISTAKES = [
    ("float8_e5m2", 0, 32, "F8_E5M2 was counted as nothing"),
    ("bool", 4, 32, "BOOL was counted as one bit"),
    ("float8_e4m3fn", 64, 32, "two bytes an element"),
    ("bfloat16", 32, 64, "the number of elements"),
]


@pytest.mark.parametrize(("dtype", "said", "true", "why"), MISTAKES, ids=[m[0] for m in MISTAKES])
def test_wrong_totals_are_explained(tmp_path: Path, dtype: str, said: int, true: int, why: str) -> None:
    kind = getattr(ml_dtypes, dtype, dtype)
    src = indexed(tmp_path, said, x=np.zeros((4, 8)).astype(kind))
    data = size_of(src, "--check-total-size", "--recipe", "bf16", code=3)
    assert (data["total_size"]["said"], data["total_size"]["real"]) == (said, true)
    assert why in data["total_size"]["why"]
    assert why in ckpttool("size", src, "--check-total-size").out


def test_right_totals(tmp_path: Path) -> None:
    assert size_of(DEEPSEEK, "--check-total-size")["total_size"]["ok"]
    assert "no index" in refused(FIXTURES / "hf_tiny_source", "--check-total-size")
    src = indexed(tmp_path, 4, x=np.zeros(1, "float32"))
    (src / "model.safetensors.index.json").write_text('{"weight_map": {"x": "model-00001-of-00001.safetensors"}}')
    assert "says no total_size" in refused(src, "--check-total-size")


def test_every_dtype_has_its_true_size(tmp_path: Path) -> None:
    # What peers take from the digits at the end of a name: an error for e4m3fn and e8m0fnu, 0 for e5m2, 1/8 for bool.
    sizes = {"float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e8m0fnu": 1, "bool": 1, "bfloat16": 2, "float32": 4}
    save_file(
        {name: np.zeros(8).astype(getattr(ml_dtypes, name, name)) for name in sizes}, tmp_path / "model.safetensors"
    )
    data = size_of(tmp_path, "--recipe", "bf16", "--by", "tensor")
    assert {t["name"]: t["bytes"] for t in data["tensors"]} == {name: 8 * n for name, n in sizes.items()}


# -- output


def test_json(llama: Path) -> None:
    serving = size_of(llama, "--tp-out", 1, "--kv", "bf16", "--tokens", 10, "--gpu", "1GB")
    assert set(serving) == {
        "schema",
        "path",
        "format",
        "family",
        "ok",
        "recipe",
        "mtp",
        "tensors_stored",
        "parameters",
        "elements",
        "elements_unpacked",
        "bytes",
        "dtypes",
        "classes",
        "disk",
        "fits",
        "budget_bytes",
        "gpu_choices",
        "ranks",
        "kv",
        "fit",
        "not_modelled",
        "notes",
    }
    assert set(serving["ranks"]["groups"][0]) == {"ranks", "stage", "bytes", "experts", "other", "kv", "kv_reserve"}
    for table in ("dtypes", "classes"):
        for key in ("parameters", "elements", "bytes"):
            numbers = [t[key] for t in serving[table].values()]
            assert all(type(n) is int for n in numbers)
            assert sum(numbers) == serving[key]


def test_tables(llama: Path) -> None:
    for by, word in (("class", "dense mlp"), ("dtype", "F8_E4M3"), ("module", "model.layers.*.mlp.down_proj")):
        out = ckpttool("size", llama, "--recipe", "block", "--by", by).out
        assert word in out
        assert "█" not in out
    listed = ckpttool("size", llama, "--recipe", "block", "--by", "tensor", "--unit", "B").out
    assert "model.layers.1.mlp.down_proj.weight_scale_inv" in listed
    assert "GiB  " not in listed


def test_bars_on_a_terminal(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpttool.report.text.on_terminal", lambda: True)
    monkeypatch.setattr("ckpttool.report.meters.has_blocks", lambda: True)
    rows = [line.split() for line in ckpttool("size", llama).out.splitlines()]
    longest, least = (next(row[-1] for row in rows if row[:1] == [name]) for name in ("attention", "norm"))
    assert "█" in longest
    assert least == "▏"  # a thousandth of the whole does not look like a sixteenth


def test_tensors_stand_in_model_order(llama: Path) -> None:
    names = [t["name"] for t in size_of(llama, "--recipe", "block", "--by", "tensor")["tensors"]]
    assert names[0] == "model.embed_tokens.weight"
    assert names[-2:] == ["lm_head.weight", "model.norm.weight"] or names[-1] == "lm_head.weight"
    at = names.index("model.layers.0.self_attn.q_proj.weight")
    assert names[at + 1] == "model.layers.0.self_attn.q_proj.weight_scale_inv"


def test_quiet_and_notes(tmp_path: Path) -> None:
    config = write_config(tmp_path, "Mixtral-8x7B")
    options = ("--tp-out", 2, "--ep-out", 2)
    assert "note: etp 1" in ckpttool("size", config, *options).err
    assert ckpttool("size", config, *options, "-q").err == ""


def test_training_on_the_command_line(llama: Path) -> None:
    data = size_of(llama, "--train", "--zero", 2, "--dp", 4, "--recipe", "bf16")
    state = data["training"]["groups"][0]
    n = data["parameters"]
    padded = n + 2 * 28 * 256
    assert state["weights"] == 2 * padded
    assert state["gradients"] == state["masters"] == padded
    assert data["training"]["expert_dp"] == 4
    assert "training: ZeRO-2, dp 4" in ckpttool("size", llama, "--train", "--zero", 2, "--dp", 4).out


# -- the verdict


def verdict(src: Path, *options: object, code: int) -> list[str]:
    """The lines before the first blank one."""
    done = ckpttool("size", src, *options)
    assert done.code == code, done.err
    return done.out.split("\n\n")[0].splitlines()


def test_the_verdict_comes_first(llama: Path) -> None:
    needed = size_of(llama, "--gpu", "H100")["fit"]["needed"]
    memory = 81_559 * 2**20
    budget = memory * 9 // 10
    (fits,) = verdict(llama, "--gpu", "H100", "--unit", "B", code=0)
    sizes = f"{needed:,} of {budget:,} bytes on one GPU (H100: {memory:,} bytes x 0.9)"
    assert fits == f"fits: {sizes}, {budget - needed:,} bytes left"
    held = size_of(llama, "--recipe", "bf16", "--tp-out", 1)["ranks"]["groups"][0]["bytes"]
    no = verdict(llama, "--recipe", "bf16", "--gpu", held - 1, "--utilization", 1, code=3)
    assert no[0].startswith(f"does not fit: needs 1 byte more on one GPU: {held:,} of {held - 1:,} bytes (")
    assert no[1].startswith("would fit: --tp-out 2 (")


@pytest.mark.parametrize("tokens", ["32768", "32k", "32K", "32,768", "32_768", "0.03125m"])
def test_tokens_as_people_write_them(llama: Path, tokens: str) -> None:
    assert size_of(llama, "--kv", "bf16", "--tokens", tokens)["kv"]["tokens"] == 32768
    assert size_of(llama, "--kv", "bf16", "--tokens", 1, "--max-model-len", tokens)["kv"]["max_model_len"] == 32768


@pytest.mark.parametrize("tokens", ["0", "-1", "k", "32 000", "1.3", "0.3k", "32kb", "1e5"])
def test_tokens_that_are_no_number(llama: Path, tokens: str) -> None:
    assert "is not a number of tokens" in refused(llama, "--kv", "bf16", f"--tokens={tokens}")


def test_what_would_fit_does(llama: Path) -> None:
    """Each remedy, given as options, makes the command succeed; the next milder value of its kind does not."""
    asked: list[object] = ["--recipe", "bf16", "--kv", "bf16", "--tokens", "64k", "--batch", 2]
    data = size_of(llama, *asked, "--gpu", "h100")
    device = ("--utilization", 1, "--gpu", int(data["fit"]["needed"] * 0.7))
    found = size_of(llama, *asked, *device, code=3)["fit"]["would_fit"]
    assert {r["options"].split()[0] for r in found} >= {"--tp-out", "--kv", "--tokens"}
    for remedy in found:
        again = size_of(llama, *asked, *remedy["options"].split(), *device)
        assert again["fit"]["needed"] == remedy["needed"] <= device[-1]
    tokens = next(int(r["options"].split()[1]) for r in found if r["options"].startswith("--tokens"))
    size_of(llama, *asked, "--tokens", tokens + 1, *device, code=3)


def test_remedies_together(llama: Path) -> None:
    """Where no change alone is enough, the mildest that are enough together."""
    asked = ("--recipe", "bf16", "--kv", "bf16", "--tokens", "64k")
    least = size_of(llama, *asked, "--tp-out", 2, "--recipe", "mxfp4", "--kv", "fp8", "--gpu", "h100")["fit"]["needed"]
    device = ("--utilization", 1, "--gpu", least + 1000)
    found = size_of(llama, *asked, *device, code=3)["fit"]["would_fit"]
    (remedy,) = [r for r in found if not r["options"].startswith("--tokens")]
    options = remedy["options"].split()
    assert {"--tp-out", "--recipe", "--kv"} <= {*options}
    assert size_of(llama, *asked, *options, *device)["fit"]["needed"] == remedy["needed"]


def test_remedies_of_training(llama: Path) -> None:
    asked = ("--recipe", "bf16", "--train", "--dp", 8)
    needed = size_of(llama, *asked, "--gpu", "h100")["fit"]["needed"]
    found = size_of(llama, *asked, "--gpu", needed, code=3)["fit"]["would_fit"]
    assert [(r["options"], r["gpus"]) for r in found] == [("--tp-out 2", 16), ("--zero 2", 8)]


def test_remedies_of_training_on_one_gpu(tmp_path: Path) -> None:
    """More data-parallel ranks with ZeRO-3, by hand: 18 bytes of each parameter, shared by all GPUs."""
    config, memory = write_config(tmp_path, "Llama-3-70B"), 81_559 * 2**20
    asked = ("--recipe", "bf16", "--train", "--gpu", "h100")
    found = {r["options"]: r for r in size_of(config, *asked, code=3)["fit"]["would_fit"]}
    whole = 18 * 70_553_706_496
    gpus = next(n for n in (2, 4, 8, 16, 32, 64) if whole / n <= memory * 0.9)
    zero = found[f"--dp {gpus} --zero 3"]
    assert zero["gpus"] == gpus
    assert 0 <= zero["needed"] - whole // gpus < 16
    assert [r for r in size_of(config, *asked, "--zero", 0, code=3)["fit"]["would_fit"] if "dp" in r["options"]] == []
    said = verdict(config, *asked, code=3)
    assert f"--dp {gpus} --zero 3 ({zero['needed'] / 1e9:.1f} GB on each of {gpus} GPUs)" in said[1]


@pytest.mark.parametrize(
    ("name", "mib"), [("h100", 81_559), ("NVIDIA H100", 81_559), ("A100-80GB", 81_920), ("mi300x", 196_592)]
)
def test_gpus(llama: Path, name: str, mib: int) -> None:
    fit = size_of(llama, "--gpu", name)["fit"]
    assert fit["memory"] == mib << 20
    assert fit["device"]


def test_a_gpu_that_is_not_known(llama: Path) -> None:
    assert "mi300x" in refused(llama, "--gpu", "h1000")
    assert "write 80GB or 80GiB" in refused(llama, "--gpu", "80")  # not 80 bytes
