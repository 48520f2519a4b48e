"""drop-keys: a parameter goes with its master weight, its optimizer states and its average, in every Paddle format."""

from __future__ import annotations

import json
from fnmatch import fnmatchcase
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.command import ckpttool
from tests.helpers.tensorfile import Raw, read

FIXTURES = Path(__file__).parents[2] / "fixtures"
ZCC = FIXTURES / "paddle_zcc" / "ep2_tp2_sharding2_ema"
UNIFIED = FIXTURES / "paddle_unified"
SIZE = {"BF16": 2, "F32": 4}
EXPERTS = "*.experts.*"
STEMS = ("model", "peft_model", "master_weights", "optimizer")
MERGED = ["pf041_qwen2_bf16_tp2", "nlp_qwen2moe_bf16_tp2", "nlp_llamafused_bf16_tp2", "nlp_llama_bf16_tp2_quantO1"]
SEPARATE = ["nlp_llama_bf16_tp2_ignore_merge", "pf12_llama_bf16_sharding2_nonmerge_optimshard2"]
OTHERS = [
    "pf12_llama_bf16_sharding2_split_param",
    "nlp_llama_bf16_tp2_skip_save_model_weight",
    "nlp_llama_lora_bf16_tp1",
]


def drop(*arguments: object) -> str:
    done = ckpttool("drop-keys", *arguments)
    assert done.code == 0, done.err
    return done.out + done.err


def ask(folder: Path, *options: object) -> dict[str, Any]:
    done = ckpttool("inspect", folder, "--json", *options)
    assert done.code == 0, done.err
    answer: dict[str, Any] = json.loads(done.out)
    return answer


@cache  # no folder changes here
def digests(folder: Path) -> dict[str, str]:
    return {t["name"]: t["digest"] for t in ask(folder, "--hash")["list"]}


@cache
def parameters(folder: Path) -> dict[str, str]:
    """Tensor -> parameter."""
    return {t["name"]: t["parameter"] for t in ask(folder, "--list")["list"]}


def truth() -> dict[str, dict[str, int]]:
    """Component -> tensor -> bytes that it has in files, of ``ZCC``."""
    out: dict[str, dict[str, int]] = {}
    for name, parts in json.loads((FIXTURES / "paddle_zcc" / "expected.json").read_text()).items():
        for part, (dtype, shape, _) in parts.items():
            component, _, state = part.partition("/")
            label = name if component == "model" else f"{component}/{name}" + (f"/{state}" if state else "")
            derived = component == "model" and "master_weights" in parts
            out.setdefault(component, {})[label] = 0 if derived else SIZE[dtype] * prod(shape)
    return out


def test_every_component_is_counted() -> None:
    expected = {c: {n: b for n, b in t.items() if ".experts." in n} for c, t in truth().items()}
    done = ckpttool("drop-keys", ZCC, "nowhere", EXPERTS, "--dry-run", "--json")
    answer = json.loads(done.out)
    assert {t["name"]: t["bytes"] for t in answer["tensors"]} == {n: b for t in expected.values() for n, b in t.items()}
    assert answer["components"] == {c: {"tensors": len(t), "bytes": sum(t.values())} for c, t in expected.items()}
    assert list(answer["components"]) == ["model", "master_weights", "optimizer", "ema"]
    assert answer["removed_bytes"] == sum(sum(t.values()) for t in expected.values())
    text = ckpttool("drop-keys", ZCC, "nowhere", EXPERTS, "--dry-run").err
    assert "16 model 0 bytes, 16 master_weights 36.86 kB, 64 optimizer 73.86 kB, 16 ema 36.86 kB" in text
    assert "16 parameters left out, 112 tensors of all components" in text


def test_a_parameter_is_gone_from_every_component(tmp_path: Path) -> None:
    text = drop(ZCC, tmp_path / "out", EXPERTS, "--verify")
    assert "every file is rewritten, also those that lose nothing" in text
    before, after = digests(ZCC), digests(tmp_path / "out")
    assert after == {n: d for n, d in before.items() if ".experts." not in n}
    assert {n.partition("/")[0] for n in after if "/" in n} == {"master_weights", "optimizer", "ema"}


def test_keep_keys_keeps_every_component(tmp_path: Path) -> None:
    drop(ZCC, tmp_path / "out", "--keep-keys", "lm_head.weight", "--verify")
    before = digests(ZCC)
    assert digests(tmp_path / "out") == {n: d for n, d in before.items() if "lm_head.weight" in n}


def stored(folder: Path) -> dict[tuple[str, str], Raw]:
    """(file, name) -> bytes as the headers say."""
    files = [p for p in folder.iterdir() if ".safetensors" in p.name and p.suffix != ".json"]
    return {(p.name, n): t for p in files for n, t in read(p).items()}


@pytest.mark.sample("nlp_llama_bf16_tp2_quantO1", "pf12_llama_bf16_sharding2_nonmerge_optimshard2")
@pytest.mark.parametrize("name", [*MERGED, *SEPARATE, *OTHERS])
def test_unified_files_keep_what_is_in_them(name: str, tmp_path: Path) -> None:
    """Names, files, dtypes and bytes stay: quantized moments are not decoded, shards not joined."""
    source, out = UNIFIED / name, tmp_path / "out"
    pattern = "*.layers.1.mlp.*"
    drop(source, out, pattern, "--verify")
    before, after = stored(source), stored(out)
    expected = {k: t for k, t in before.items() if not fnmatchcase(k[1], pattern)}
    assert 0 < len(expected) < len(before)
    assert set(after) == set(expected)
    for key, raw in after.items():
        assert raw.dtype == expected[key].dtype
        assert raw.bits.tobytes() == expected[key].bits.tobytes()
        assert raw.bits.shape == expected[key].bits.shape
    for stem in STEMS:
        path = out / f"{stem}.safetensors.index.json"
        assert path.is_file() == (source / path.name).is_file()
        index = json.loads(path.read_text()) if path.is_file() else {}
        if "weight_map" in index:
            held = {k: t for k, t in after.items() if k[0].startswith(f"{stem}-")}
            assert all((file, n) in held for n, file in index["weight_map"].items() if "moment" not in n)
            assert {n for _, n in held if "@" not in n} <= set(index["weight_map"])
            if "ckpt_quant_stage" not in index:
                assert index["metadata"]["total_size"] == sum(t.bits.nbytes for t in held.values())
    gone = {n for n, p in parameters(source).items() if fnmatchcase(p, pattern)}
    assert digests(out) == {n: d for n, d in digests(source).items() if n not in gone}
    found = ckpttool("inspect", out, "--check", "--values", "--json")
    assert {f["id"] for f in json.loads(found.out)["findings"]} <= {"config-tied-copy"}


def test_unified_files_that_lose_nothing_are_the_same(tmp_path: Path) -> None:
    source, out = UNIFIED / "pf041_qwen2_bf16_tp2", tmp_path / "out"
    answer = json.loads(drop(source, out, "*.layers.1.mlp.*", "--link", "--json"))
    same = [p.name for p in source.glob("*.safetensors") if (out / p.name).read_bytes() == p.read_bytes()]
    loses = {f for f, n in stored(source) if ".layers.1.mlp." in n}
    assert sorted(same) == sorted({f for f, _ in stored(source)} - loses)
    assert (answer["files_rewritten"], answer["files_carried"], answer["files_dropped"]) == (len(loses), len(same), 0)
    assert any("linked" in n or "copied" in n for n in answer["notes"])


def test_a_file_that_loses_everything_goes(tmp_path: Path) -> None:
    source, out = UNIFIED / "pf041_qwen2_bf16_tp2", tmp_path / "out"
    first = [n for f, n in stored(source) if f == "model-00001-of-00002.safetensors"]
    answer = json.loads(drop(source, out, *first, "--verify", "--json"))
    assert answer["files_dropped"] > 0
    assert (out / "model-00001-of-00001.safetensors").is_file()
    assert not (out / "model-00002-of-00002.safetensors").exists()
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {"model-00001-of-00001.safetensors"}
    assert not set(parameters(out).values()) & set(first)
    assert ckpttool("inspect", out, "--check").out.count("index") == 0


def test_all_files_of_ranks_stay(tmp_path: Path) -> None:
    """A rank of which nothing is left keeps its file, without which the others could not be read."""
    source, out = UNIFIED / "pf12_llama_bf16_sharding2_nonmerge_optimshard2", tmp_path / "out"
    lost = [n for f, n in stored(source) if f == "master_weights.shard00.safetensors_shard_0001"]
    drop(source, out, *lost, "--verify")
    assert {p.name for p in source.glob("*_shard_*")} == {p.name for p in out.glob("*_shard_*")}
    assert read(out / "master_weights.shard00.safetensors_shard_0001") == {}


def test_a_component_that_loses_everything_is_written_anew(tmp_path: Path) -> None:
    """The embedding is tied to the head, under whose name the master weight and the moments are."""
    source, out = UNIFIED / "pf12_qwen2tied_bf16_tp1", tmp_path / "out"
    text = drop(source, out, "--keep-keys", "model.embed_tokens.weight")
    assert "every file is rewritten" in text
    assert set(digests(out)) == {"model.embed_tokens.weight"}
    refused = ckpttool("drop-keys", source, tmp_path / "linked", "--keep-keys", "model.embed_tokens.weight", "--link")
    assert refused.code == 2
    assert "--link keeps files that do not change" in refused.err


def test_warnings_know_the_names_of_the_model() -> None:
    source = UNIFIED / "nlp_llamafused_bf16_tp2"
    text = ckpttool("drop-keys", source, "nowhere", "llama.norm.weight", "llama.embed_tokens.weight", "--dry-run").err
    assert "warning: `llama.norm.weight` is required" in text
    assert "warning: `llama.embed_tokens.weight` is required" in text
    assert ckpttool("drop-keys", source, "nowhere", "lm_head.weight", "-n").err.count("warning: `lm_head.weight`") == 1
