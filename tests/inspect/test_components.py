"""Checkpoints with more than model weights: master weights, optimizer states and averages, however Paddle stores them.

What is expected is worked out with pickle, numpy and the headers of safetensors files, or was by one process in Paddle
(``fixtures/paddle_zcc/expected.json``).
"""

from __future__ import annotations

import itertools
import json
import pickle
import re
import shutil
from collections import Counter
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import xxhash

from ckpttool.checkpoint import open_checkpoint
from ckpttool.storage.place import local_path
from tests.helpers.command import ckpttool, reshard
from tests.helpers.tensorfile import read

FIXTURES = Path(__file__).parents[2] / "fixtures"
ZCC = FIXTURES / "paddle_zcc" / "ep2_tp2_sharding2_ema"
HYBRID = FIXTURES / "paddle_zcc" / "nlp_tp2"
UNIFIED = FIXTURES / "paddle_unified" / "pf041_qwen2_bf16_tp2"
QUANTIZED = FIXTURES / "paddle_unified" / "nlp_llama_bf16_tp2_quantO1"
FUSED = FIXTURES / "paddle_unified" / "nlp_llamafused_bf16_tp2"
ADAPTER = FIXTURES / "paddle_unified" / "nlp_llama_lora_bf16_tp1"
ALL = sorted(
    p.parent
    for p in (
        *FIXTURES.glob("paddle_zcc/*/config.json"),
        *FIXTURES.glob("paddle_unified/*/config.json"),
        *FIXTURES.glob("paddle_flex/*/0.metadata"),
    )
)
SIZE = {"BF16": 2, "F32": 4}
STATES = ["moment1_0", "moment2_0", "beta1_pow_acc_0", "beta2_pow_acc_0"]
Array = np.ndarray[Any, np.dtype[Any]]


def ask(folder: Path, *options: object, code: int = 0) -> dict[str, Any]:
    done = ckpttool("inspect", folder, "--json", *options)
    assert done.code == code, done.err
    answer: dict[str, Any] = json.loads(done.out)
    return answer


def truth() -> dict[str, dict[str, tuple[str, list[int]]]]:
    """Component -> name as listed -> (dtype, shape), of ``ZCC``."""
    out: dict[str, dict[str, tuple[str, list[int]]]] = {}
    for name, parts in json.loads((FIXTURES / "paddle_zcc" / "expected.json").read_text()).items():
        for part, (dtype, shape, _) in parts.items():
            component, _, state = part.partition("/")
            label = name if component == "model" else f"{component}/{name}" + (f"/{state}" if state else "")
            out.setdefault(component, {})[label] = (dtype, shape)
    return out


def nbytes(entries: dict[str, tuple[str, list[int]]]) -> int:
    return sum(SIZE[d] * prod(s) for d, s in entries.values())


def arrays(value: Any) -> list[Array]:
    """All arrays in an unpickled value."""
    if isinstance(value, np.ndarray):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [a for v in items for a in arrays(v)]


def unpickle(path: Path) -> Any:
    return pickle.loads(path.read_bytes())  # noqa: S301 - committed with these tests


def state_of_two_ranks(name: str, state: str, axis: int) -> Array:
    """A whole tensor of ``HYBRID``'s optimizer, put together by hand."""
    parts = []
    for tp in range(2):
        names = unpickle(HYBRID / f"model_state.tp0{tp}.pdparams")["StructuredToParameterName@@"]
        held = unpickle(HYBRID / f"optimizer.tp0{tp}.pdopt")
        value = held[f"{names[name]}_fp32_master_0_{state}"]
        parts.append(value[1] if isinstance(value, tuple) else value)
    return np.concatenate(parts, axis)


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """``ZCC`` in the other formats."""
    root = tmp_path_factory.mktemp("converted")
    out = {"zcc": ZCC}
    for fmt in ("hybrid", "unified", "flex", "hf"):
        reshard(ZCC, root / fmt, "--to", fmt, "--manifest", "--quiet")
        out[fmt] = root / fmt
    return out


# -- what is in it


def test_totals_of_each_component() -> None:
    expected = truth()
    answer = ask(ZCC)
    assert list(answer["components"]) == ["model", "master_weights", "optimizer", "ema"]
    for component, found in answer["components"].items():
        mine = expected[component]
        assert found["tensors"] == len(mine)
        assert found["elements"] == sum(prod(s) for _, s in mine.values())
        assert found["bytes"] == nbytes(mine)
    derived = {n: t for n, t in expected["model"].items() if f"master_weights/{n}" in expected["master_weights"]}
    assert 0 < len(derived) < len(expected["model"])
    assert answer["components"]["model"]["derived"] == len(derived)
    assert answer["components"]["optimizer"]["derived"] == 0
    # Rounded master weights have no bytes: those of the master weights are counted, and once.
    assert answer["listed_bytes"] == sum(map(nbytes, expected.values())) - nbytes(derived)
    assert ask(ZCC, "--only", "model")["listed_bytes"] == nbytes(expected["model"])
    assert answer["sharding"] == 2
    assert answer["files"] == 12 - 2  # two of the files have no tensors


def test_summary_says_components_and_sharding() -> None:
    text = ckpttool("inspect", ZCC).out
    head = text.split("\n\n")[0].splitlines()
    assert head[1].startswith(f"{ZCC}: zcc, tp 2, ep 2, etp 1, sharding 2, ")
    assert [line.split()[0] for line in head[3:]] == ["model", "master_weights", "optimizer", "ema"]
    assert "(37 rounded master weights)" in head[3]


def test_trees_of_components_stand_apart() -> None:
    blocks = ckpttool("inspect", ZCC, "--depth", 1).out.split("\n\n")[1:]
    assert [block.splitlines()[i].split()[0] for i, block in zip((1, 0, 0, 0), blocks, strict=True)] == [
        "model", "master_weights", "optimizer", "ema",
    ]  # fmt: skip
    assert blocks[2].splitlines()[1] == "  each: moment1_0, moment2_0, beta1_pow_acc_0, beta2_pow_acc_0"


def test_the_states_of_an_optimizer_are_one_line_for_each_parameter() -> None:
    expected = truth()
    tree = [t for t in ask(ZCC)["tree"] if t["component"] == "optimizer"]
    leaves = {t["name"]: t for t in tree if "dtype" in t}
    head = leaves["lm_head.weight"]
    mine = {n: t for n, t in expected["optimizer"].items() if n.startswith("optimizer/lm_head.weight/")}
    assert head["tensors"] == len(mine) == 4
    assert (head["bytes"], head["elements"]) == (nbytes(mine), sum(prod(s) for _, s in mine.values()))
    assert (head["shape"], head["states"]) == (expected["model"]["lm_head.weight"][1], STATES)
    assert sum(t["tensors"] for t in leaves.values()) == len(expected["optimizer"])
    assert sum(t["bytes"] for t in leaves.values()) == nbytes(expected["optimizer"])
    assert not any("moment" in t["name"] for t in tree)


def test_derived_weights_are_marked() -> None:
    expected = truth()
    listed = {t["name"]: t for t in ask(ZCC, "--list")["list"]}
    for name, (dtype, shape) in {k: v for part in expected.values() for k, v in part.items()}.items():
        assert (listed[name]["dtype"], listed[name]["shape"]) == (dtype, shape)
        derived = listed[name]["component"] == "model" and f"master_weights/{name}" in expected["master_weights"]
        assert listed[name]["derived"] == derived
    assert {(t["parameter"], t["state"]) for t in listed.values() if t["component"] == "optimizer"} == {
        tuple(n.removeprefix("optimizer/").rsplit("/", 1)) for n in expected["optimizer"]
    }
    text = ckpttool("inspect", ZCC, "--only", "model", "--depth", 1).out
    assert ["lm_head.weight", "BF16", "[64,", "32]", "4.10", "kB", "rounded", "master", "weight"] in map(
        str.split, text.splitlines()
    )


def test_a_tree_of_model_weights_alone_has_no_components() -> None:
    text = ckpttool("inspect", FIXTURES / "hf_tiny_source").out
    assert "\nmodel  " in text
    assert "master" not in text
    listed = [line for line in text.splitlines() if line.startswith("lm_head")]
    assert len(listed) == 1


def test_list_is_ordered_by_component() -> None:
    order = [t["component"] for t in ask(ZCC, "--list")["list"]]
    assert list(dict.fromkeys(order)) == ["model", "master_weights", "optimizer", "ema"]
    assert sum(a != b for a, b in itertools.pairwise(order)) == 3


def test_only() -> None:
    expected = truth()
    names = {t["name"] for t in ask(ZCC, "--list", "--only", "ema", "--only", "master_weights")["list"]}
    assert names == {*expected["ema"], *expected["master_weights"]}
    assert {t["component"] for t in ask(ADAPTER, "--list", "--only", "adapter")["list"]} == {"adapter"}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--only", "adapter"), "the source has no adapter"),
        (("--only", "moments"), "--only `moments` is not one of model, adapter"),
        (("--only", "model", "--files"), "--only does not apply to --files"),
        (("--only", "model", "--check"), "add --values"),
        (("--only", "adapter", "--check", "--values"), "the source has no adapter"),
    ],
)
def test_only_that_makes_no_sense(options: tuple[str, ...], text: str) -> None:
    done = ckpttool("inspect", ZCC, *options)
    assert done.code == 2
    assert text in done.err


def test_filter_means_a_tensor_or_a_parameter() -> None:
    def names(*patterns: str) -> set[str]:
        options = [x for p in patterns for x in ("--filter", p)]
        return {t["name"] for t in ask(ZCC, "--list", *options)["list"]}

    every = {n for part in truth().values() for n in part}
    assert names("lm_head.weight") == {n for n in every if "lm_head.weight" in n}
    assert names("optimizer/lm_head.weight/moment?_0") == {
        "optimizer/lm_head.weight/moment1_0",
        "optimizer/lm_head.weight/moment2_0",
    }


@pytest.mark.product(one_in=13)
@pytest.mark.parametrize("folder", ALL, ids=lambda p: p.name)
@pytest.mark.parametrize("view", ["--list", "--files", "--ranks", "--metadata", "--stats", "--hist", "--hash"])
def test_every_view_of_every_fixture(folder: Path, view: str) -> None:
    answer = ask(folder, view)
    if view == "--list":
        assert len(answer["list"]) == answer["tensors"]
    if view == "--files":
        assert all(Path(folder, f["name"]).stat().st_size == f["bytes"] for f in answer["list"])
        assert all(f["tensor_bytes"] <= f["bytes"] for f in answer["list"])
    if view == "--stats":
        counted = [t["stats"] for t in answer["list"] if "stats" in t]
        assert all(s["nan"] == s["inf"] == 0 for s in counted)


# -- files and ranks


def test_files_hold_what_their_pickles_hold() -> None:
    found = {f["name"]: f for f in ask(ZCC, "--files")["list"]}
    for name, f in found.items():
        held = arrays(unpickle(ZCC / name))
        assert (f["tensors"], f["tensor_bytes"]) == (len(held), sum(a.nbytes for a in held)), name


def test_files_of_quantized_state_are_those_of_the_checkpoint() -> None:
    found = {f["name"]: f for f in ask(QUANTIZED, "--files")["list"]}
    assert set(found) == {p.name for p in QUANTIZED.glob("*.safetensors")}
    for name, f in found.items():
        held = read(QUANTIZED / name)
        assert (f["tensors"], f["tensor_bytes"]) == (len(held), sum(t.bits.nbytes for t in held.values()))
    assert {t["file"] for t in ask(QUANTIZED, "--list")["list"]} <= set(found)


def test_ranks_that_share_optimizer_state_are_told_apart() -> None:
    answer = ask(ZCC, "--ranks", "--filter", "*lm_head.weight*", "--filter", "*.embed_tokens.weight")
    expected: Counter[str] = Counter()
    for path in [*ZCC.glob("*.pdopt"), *ZCC.glob("model_state.*")]:
        tp, shard = map(int, re.findall(r"\d\d", path.name))
        expected[str(shard * 2 + tp)] += sum(a.nbytes for a in arrays(unpickle(path)))
    assert answer["rank_bytes"] == dict(expected)
    held = {h["name"]: h["groups"][0]["held"] for h in answer["holdings"]}
    # The head is in the files of the second shard, the embedding in those of the first, each cut for tp 2.
    assert [(h["start"], h["ranks"]) for h in held["optimizer/lm_head.weight/moment1_0"]] == [
        ([0, 0], [2]),
        ([32, 0], [3]),
    ]
    assert [h["ranks"] for h in held["master_weights/model.embed_tokens.weight"]] == [[0], [1]]
    assert ckpttool("inspect", ZCC, "--ranks").out.startswith("4 ranks: tp 2, ep 2, etp 1, sharding 2\n")


def test_ranks_of_a_flex_save_are_those_of_its_files(tmp_path: Path) -> None:
    folder = FIXTURES / "paddle_flex" / "tp2_dp2"
    answer = ask(folder, "--ranks", "--svg", tmp_path / "layout.svg")
    expected = {str(r): sum(a.nbytes for a in arrays(unpickle(folder / f"{r}_0.distcp"))) for r in range(4)}
    assert answer["rank_bytes"] == expected
    assert (tmp_path / "layout.svg").read_text().startswith("<svg")


# -- elements


def test_elements_of_a_moment() -> None:
    name = "llama.embed_tokens.weight"
    whole = state_of_two_ranks(name, "moment1_0", 0)
    (shown,) = ask(HYBRID, "--show", f"optimizer/{name}/moment1_0[30:34, :4]")["list"]
    assert shown["shape"] == list(whole.shape)
    assert np.array_equal(np.array(shown["values"], np.float32), whole[30:34, :4])


def test_statistics_and_checksum_of_a_moment() -> None:
    name = "llama.layers.1.self_attn.o_proj.weight"
    whole = state_of_two_ranks(name, "moment2_0", 0)
    options = ("--stats", "--hash", "--only", "optimizer", "--filter", f"optimizer/{name}/moment2_0")
    (found,) = ask(HYBRID, *options)["list"]
    stats = found["stats"]
    assert (stats["elements"], stats["zeros"]) == (whole.size, int((whole == 0).sum()))
    assert (stats["min"], stats["max"]) == (float(whole.min()), float(whole.max()))
    assert stats["mean"] == pytest.approx(float(whole.astype(np.float64).mean()), rel=1e-12)
    assert stats["std"] == pytest.approx(float(whole.astype(np.float64).std()), rel=1e-9)
    assert found["digest"] == f"xxh3_128:{xxhash.xxh3_128(np.ascontiguousarray(whole).tobytes()).hexdigest()}"


def test_a_derived_weight_is_hashed_as_it_is_read() -> None:
    """Its file has float32; the checksum is that of the bfloat16 weights."""
    folder = FIXTURES / "paddle_unified" / "nlp_llama_bf16_tp2_skip_save_model_weight"
    stored = {n: t for p in folder.glob("model-*") for n, t in read(p).items()}
    name = "llama.norm.weight"
    rounded = stored[name].bits.view(np.float32).astype(ml_dtypes.bfloat16)
    listed = {t["name"]: t for t in ask(folder, "--hash", "--filter", name)["list"]}
    assert listed[name]["dtype"] == "BF16"
    assert listed[name]["digest"] == f"xxh3_128:{xxhash.xxh3_128(rounded.tobytes()).hexdigest()}"
    assert listed[f"master_weights/{name}"]["digest"] == (
        f"xxh3_128:{xxhash.xxh3_128(stored[name].bits.tobytes()).hexdigest()}"
    )


def test_checksums_are_the_same_in_every_format(converted: dict[str, Path]) -> None:
    found = {f: {t["name"]: t["digest"] for t in ask(converted[f], "--hash")["list"]} for f in converted if f != "hf"}
    assert set(found["zcc"]) == {n for part in truth().values() for n in part}
    assert found["flex"] == found["zcc"]
    for fmt in ("hybrid", "unified"):
        common = found["zcc"].keys() & found[fmt].keys()
        assert common == {n for n in found["zcc"] if not n.startswith("ema/")}
        assert {n: found[fmt][n] for n in common} == {n: found["zcc"][n] for n in common}


# -- check


def findings(folder: Path, *options: object) -> list[tuple[str, str]]:
    done = ckpttool("inspect", folder, "--check", "--json", *options)
    return [(f["id"], f["text"]) for f in json.loads(done.out)["findings"]]


@pytest.mark.product(one_in=2)
@pytest.mark.parametrize("folder", ALL, ids=lambda p: p.name)
def test_what_paddle_wrote_is_sound(folder: Path) -> None:
    told = {"config-missing", "config-tied-copy", "unscaled"}
    assert {i for i, _ in findings(folder, "--values")} <= told


def test_what_is_written_is_sound(converted: dict[str, Path]) -> None:
    for folder in converted.values():
        assert findings(folder, "--values") == []


def copy(folder: Path, to: Path) -> Path:
    shutil.copytree(folder, to)
    return to


def overwrite(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as f:
        f.seek(offset)
        f.write(data)


def test_pickles_that_are_cut_off(tmp_path: Path) -> None:
    folder = copy(ZCC, tmp_path / "short")
    cut = [folder / "optimizer.tp01_shard00.pdopt", folder / "ema.tp00_shard01.pdopt"]
    for path in cut:
        path.write_bytes(path.read_bytes()[:-1000])
    answer = ask(folder, "--check", code=3)
    assert {f["where"] for f in answer["findings"] if f["severity"] == "error"} == {str(p) for p in cut}
    assert {f["id"] for f in answer["findings"]} <= {"corrupt", "incomplete"}


def test_copies_of_two_ranks_that_differ(tmp_path: Path) -> None:
    folder = copy(ZCC, tmp_path / "apart")
    tensor = open_checkpoint(folder).catalog["model.layers.0.mlp.gate.weight"]
    held = tensor.replicas[0].stored
    path = folder / "model_state.tp01_shard00.pdparams"
    gate = unpickle(path)["model.layers.0.mlp.gate.weight"]
    assert path.read_bytes().count(gate.tobytes()) == 1
    overwrite(path, path.read_bytes().index(gate.tobytes()) + 4, b"\0\0\0\x3f")
    assert held.shape == (32, 4)
    assert findings(folder) == []
    ((id_, text),) = findings(folder, "--values")
    assert id_ == "replica"
    assert "`model.layers.0.mlp.gate.weight`: 1 of 128 elements differ, first at [0, 1]" in text
    assert findings(folder, "--values", "--only", "optimizer") == []


def test_copies_of_a_state_that_shards_share(tmp_path: Path) -> None:
    folder = copy(ZCC, tmp_path / "apart")
    catalog = open_checkpoint(folder).catalog
    tensor = next(t for t in catalog if t.key.state == "beta1_pow_acc_0" and t.replicas)
    held = tensor.replicas[0].stored
    overwrite(local_path(catalog.files[held.file].place), held.offset, b"\0\0\0\x3f")
    assert [i for i, _ in findings(folder, "--values")] == ["replica"]
    assert findings(folder, "--values", "--only", "model", "--only", "ema") == []


def test_padding_behind_a_shard(tmp_path: Path) -> None:
    folder = copy(ZCC, tmp_path / "padded")
    path = folder / "optimizer.tp00_shard00.pdopt"
    masters = unpickle(path)["master_weights"].values()
    flat = next(a for _, a in masters if a.size > 32 and not a[32:].any())
    at = path.read_bytes().index(flat.tobytes())
    overwrite(path, at + 4 * 32, b"\1")
    found = findings(folder, "--values")
    assert [i for i, _ in found] == ["padding"]
    assert re.match(
        r"the padding behind a shard of `master_weights/model\.layers\.0\.\w+_layernorm\.weight`", found[0][1]
    )


def test_vocabulary_of_heads_that_lie_the_other_way(tmp_path: Path) -> None:
    folder = copy(FUSED, tmp_path / "vocabulary")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 98}))
    assert findings(folder) == [
        ("config-vocab", "`llama.embed_tokens.weight` has 96 rows, vocab_size is 98"),
        ("config-vocab", "`lm_head.weight` has 96 columns, vocab_size is 98"),
    ]


def edit(path: Path, **changes: Any) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(path.read_text())
    data.update(changes)
    path.write_text(json.dumps(data))
    return data


def test_the_index_of_each_component(tmp_path: Path) -> None:
    folder = copy(UNIFIED, tmp_path / "index")
    optimizer, masters = folder / "optimizer.safetensors.index.json", folder / "master_weights.safetensors.index.json"
    weight_map = json.loads(optimizer.read_text())["weight_map"]
    moved = "lm_head.weight/moment1_0"
    other = next(f for f in weight_map.values() if f != weight_map[moved])
    edit(optimizer, weight_map={**weight_map, moved: other})
    weight_map = json.loads(masters.read_text())["weight_map"]
    del weight_map["lm_head.weight"]
    edit(masters, weight_map=weight_map, metadata={"total_size": 7})
    shutil.copy(folder / "model-00001-of-00002.safetensors", folder / "model-00001-of-00003.safetensors")
    found = dict(findings(folder))
    assert set(found) == {"index-shard", "index-extra", "total-size", "orphan-shard"}
    assert f"`{moved}`" in found["index-shard"]
    assert "tensor `lm_head.weight` of master_weights-" in found["index-extra"]
    total = sum(t.bits.nbytes for p in folder.glob("master_weights-*") for t in read(p).values())
    assert f"total_size 7, the tensors have {total:,} bytes" in found["total-size"]
    assert "model-00001-of-00003.safetensors" in found["orphan-shard"]


def test_an_adapter_has_an_index_too(tmp_path: Path) -> None:
    folder = copy(ADAPTER, tmp_path / "adapter")
    path = folder / "peft_model.safetensors.index.json"
    weight_map = json.loads(path.read_text())["weight_map"]
    edit(path, weight_map={**weight_map, "nothing.lora_A": next(iter(weight_map.values()))})
    assert [i for i, _ in findings(folder)] == ["index-missing"]


def test_headers_of_every_component_are_checked(tmp_path: Path) -> None:
    folder = copy(UNIFIED, tmp_path / "short")
    path = folder / "optimizer-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    assert "truncated" in {i for i, _ in findings(folder)}


# -- diff


@pytest.mark.thorough  # checksums: test_checksums_are_the_same_in_every_format
def test_the_same_state_in_every_format_is_equal(converted: dict[str, Path]) -> None:
    expected = {c: len(t) for c, t in truth().items()}
    for left, right in (("zcc", "hybrid"), ("hybrid", "unified"), ("unified", "flex")):
        answer = ask(converted[left], "--diff", converted[right], "--values")
        assert answer["equal"]
        compared = {c: n for c, n in answer["components"].items() if c != "master_weights"}
        assert compared == {c: expected[c] for c in compared}
        assert {"model", "optimizer"} <= set(compared)
        assert answer["only_left_components"] == (["ema"] if (left, right) == ("zcc", "hybrid") else [])
        assert answer["only_right_components"] == (["ema"] if (left, right) == ("unified", "flex") else [])
    done = ckpttool("inspect", converted["zcc"], "--diff", converted["unified"])
    assert done.code == 0
    assert "not compared: ema, only in A\n" in done.out


def test_only_the_model_is_compared_with_one_that_has_nothing_else(converted: dict[str, Path]) -> None:
    done = ckpttool("inspect", converted["hf"], "--diff", converted["unified"], "--values")
    assert done.code == 0, done.err
    assert done.out.startswith("equal: ")
    assert "not compared: master_weights, optimizer, only in B" in done.out
    refused = ckpttool("inspect", converted["hf"], "--diff", converted["unified"], "--only", "optimizer")
    assert refused.code == 2
    assert "the source has no optimizer" in refused.err


def test_a_moment_that_differs(tmp_path: Path) -> None:
    folder = copy(HYBRID, tmp_path / "changed")
    name = "llama.embed_tokens.weight"
    path = folder / "optimizer.tp01.pdopt"
    second = state_of_two_ranks(name, "moment1_0", 0)[32:]
    at = path.read_bytes().index(second.tobytes())
    overwrite(path, at + 4 * 5, b"\0\0\0\x41")
    answer = ask(HYBRID, "--diff", folder, "--values", code=3)
    (found,) = answer["elements"]
    assert (found["name"], found["different"], found["first"]) == (f"optimizer/{name}/moment1_0", 1, [32, 5])
    assert found["max_abs"] == pytest.approx(abs(8.0 - float(second[0, 5])))
    assert ask(HYBRID, "--diff", folder, "--values", "--only", "model")["equal"]
    assert ask(HYBRID, "--diff", folder, "--values", "--filter", "lm_head.weight")["compared"] == 6


def test_a_component_of_which_a_tensor_is_gone(tmp_path: Path) -> None:
    done = ckpttool("drop-keys", HYBRID, tmp_path / "less", "llama.norm.weight", "--quiet")
    assert done.code == 0, done.err
    answer = ask(HYBRID, "--diff", tmp_path / "less", code=3)
    every = {t["name"] for t in ask(HYBRID, "--list")["list"]}
    assert set(answer["only_left"]) == {n for n in every if "llama.norm.weight" in n}
    assert len(answer["only_left"]) == 6
    assert answer["only_right"] == answer["dtypes"] == answer["shapes"] == []


def test_master_weights_that_are_the_weights_themselves(converted: dict[str, Path]) -> None:
    """Unified checkpoints have a master weight of float32 parameters, too; the others do not, and both are right."""
    lists = {f: {t["name"] for t in ask(converted[f], "--list")["list"]} for f in ("hybrid", "unified")}
    more = lists["unified"] - lists["hybrid"]
    assert more == {f"master_weights/model.layers.{i}.mlp.gate.weight" for i in range(2)}
    answer = ask(converted["hybrid"], "--diff", converted["unified"], "--values", "--only", "master_weights")
    assert answer["equal"]
    assert answer["compared"] == len(truth()["master_weights"]) + len(more)


def test_components_follow_their_parameters_to_common_names(tmp_path: Path) -> None:
    """Fused and apart: both sides are brought to the published names, moments and master weights too."""
    reshard(FUSED, tmp_path / "apart", "--unfuse", "--quiet")
    answer = ask(FUSED, "--diff", tmp_path / "apart", "--values")
    apart = ask(tmp_path / "apart", "--list")
    assert answer["renamed"]
    assert answer["components"] == {c: t["tensors"] for c, t in apart["components"].items()}
    assert answer["compared"] > ask(FUSED, "--list")["tensors"]


def test_components_that_nothing_has_in_common() -> None:
    done = ckpttool("inspect", ADAPTER, "--diff", FIXTURES / "llama_tp8")
    assert done.code == 2
    assert "the two have no component in common" in done.err


def test_manifests_of_components(converted: dict[str, Path], tmp_path: Path) -> None:
    folder = copy(converted["unified"], tmp_path / "unified")
    assert (folder / "ckpttool.manifest.json").exists()
    path = next(folder.glob("master_weights-00001*"))
    overwrite(path, path.stat().st_size - 4, b"\1\2\3\4")
    assert [i for i, _ in findings(folder)] == ["manifest-checksum"]
