"""What each option does: selections, names, casts, file sizes, padding, dry runs, verification, determinism."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ckpttool.core.plan import Copy
from ckpttool.core.words import short
from ckpttool.planning import planner
from ckpttool.planning.planner import build_plan
from tests.helpers.command import ckpttool, refused, reshard
from tests.helpers.families import MODELS, H, V
from tests.helpers.judge import Grid, held
from tests.helpers.tensorfile import Array, Raw, Tensors, assert_same, header, origin, read, read_all, save_hf, write

LLAMA = MODELS["llama"]
Q = "model.layers.{}.self_attn.q_proj.weight"
EMBED, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


@pytest.fixture
def src(tmp_path: Path) -> Path:
    return save_hf(tmp_path / "src", LLAMA.tensors(), LLAMA.config)


@pytest.fixture
def dst(tmp_path: Path) -> Path:
    return tmp_path / "dst"


def without(tensors: Tensors, *words: str) -> Tensors:
    return {n: r for n, r in tensors.items() if not any(w in n for w in words)}


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


# -- which tensors, under which names


def test_remove_keys(src: Path, dst: Path) -> None:
    done = reshard(src, dst, "--remove-keys", "*.bias", "--remove-keys", r"re:inv_freq$")
    assert_same(read_all(dst), without(LLAMA.tensors(), ".bias", "inv_freq"))
    gone = {n for n in LLAMA.shapes if n.endswith((".bias", "inv_freq"))}
    size = sum(LLAMA.tensors()[n].bits.nbytes for n in gone)
    assert f"{len(gone)} tensors left out, {short(size)}" in done.err


def test_keep_keys_then_remove(src: Path, dst: Path) -> None:
    reshard(src, dst, "--keep-keys", "model.layers.{0,2}.*", "--remove-keys", "*.mlp.*", "--tp-out", 2, "-q")
    kept = {n: r for n, r in LLAMA.tensors().items() if n.startswith(("model.layers.0", "model.layers.2"))}
    for rank in (0, 1):
        want = held(LLAMA, Grid(tp=2), rank, without(kept, ".mlp."))
        assert_same(read(dst / f"rank-{rank:05d}-of-00002.safetensors"), want)


def test_rename(src: Path, dst: Path) -> None:
    reshard(src, dst, "-q", "--rename", "model.*=language_model.model.*", "--rename", r"re:\.(weight|bias)$=.\1_")
    want = {("language_" if n.startswith("model.") else "") + n: r for n, r in LLAMA.tensors().items()}
    want = {
        n.replace("language_model", "language_model.model", 1) if n.startswith("language_") else n: r
        for n, r in want.items()
    }
    want = {n + "_" if n.endswith((".weight", ".bias")) else n: r for n, r in want.items()}
    assert_same(read_all(dst), want)


def test_rename_while_cutting(src: Path, dst: Path) -> None:
    """Rules go by the names of the family, so the new names need none."""
    reshard(src, dst, "-q", "--rename", "model.*=x.*", "--tp-out", 4, "--verify")
    for rank in range(4):
        want = {
            "x." + n.removeprefix("model.") if n[0] == "m" else n: r for n, r in held(LLAMA, Grid(tp=4), rank).items()
        }
        assert_same(read(dst / f"rank-{rank:05d}-of-00004.safetensors"), want)
    reshard(dst, dst.with_name("back"), "-q", "--rename", "x.*=model.*", "--to", "hf")
    assert_same(read_all(dst.with_name("back")), LLAMA.tensors())


def test_replicate_and_split(tmp_path: Path, dst: Path) -> None:
    """For tensors without a rule, and against the family's rule."""
    tensors = LLAMA.tensors()
    tensors |= {f"extra.{n}": origin(900 + n, "F32", (8, 6)) for n in range(3)}
    save_hf(tmp_path / "src", tensors, LLAMA.config)
    options = ("--split", "extra.0=none", "--split", "extra.1=0", "--split", "extra.2=-1", "--split", f"{HEAD}=none")
    reshard(tmp_path / "src", dst, "-q", "--tp-out", 2, *options)
    for rank in (0, 1):
        got = read(dst / f"rank-{rank:05d}-of-00002.safetensors")
        assert_same({HEAD: got[HEAD], "extra.0": got["extra.0"]}, {n: tensors[n] for n in (HEAD, "extra.0")})
        assert np.array_equal(got["extra.1"].bits, np.split(tensors["extra.1"].bits, 2)[rank])
        assert np.array_equal(got["extra.2"].bits, np.split(tensors["extra.2"].bits, 2, 1)[rank])
    reshard(dst, tmp_path / "back", "-q", "--to", "hf")
    assert_same(read_all(tmp_path / "back"), tensors)


def test_scalars_and_empty_tensors(tmp_path: Path, dst: Path) -> None:
    tensors = LLAMA.tensors() | {
        "model.layers.0.self_attn.q_proj.weight_scale": origin(800, "F32", ()),
        "model.layers.1.self_attn.k_proj.input_scale": origin(801, "F32", (1,)),
        "model.layers.0.extra": origin(802, "BF16", (0, H)),
        "steps": origin(803, "I64", ()),
    }
    save_hf(tmp_path / "src", tensors, LLAMA.config)
    options = ("--split", "steps=none", "--split", "model.layers.0.extra=0")
    reshard(tmp_path / "src", dst, "-q", "--tp-out", 4, "--pp-out", 3, "--verify", *options)
    first = read(dst / "rank-00003-of-00012.safetensors")
    assert first["model.layers.0.extra"].bits.shape == (0, H)
    assert first["steps"].bits == tensors["steps"].bits
    reshard(dst, tmp_path / "back", "-q", "--to", "hf")
    assert_same(read_all(tmp_path / "back"), tensors)


@pytest.mark.parametrize("dtype", ["F4", "F6_E2M3"])
def test_elements_smaller_than_a_byte(dtype: str, tmp_path: Path, dst: Path) -> None:
    """They can be moved and kept whole, but not cut."""
    bits = {"F4": 4, "F6_E2M3": 6}[dtype]
    path = tmp_path / "src" / "model.safetensors"
    write(path, {"x": Raw("U8", np.arange(8 * 16 * bits // 8, dtype=np.uint8)), NORM: LLAMA.tensors()[NORM]})
    data = path.read_bytes()
    shown = json.dumps("U8") + f', "shape": [{8 * 16 * bits // 8}]'
    path.write_bytes(data.replace(shown.encode(), f'"{dtype}", "shape": [8, 16]'.encode(), 1))
    data = path.read_bytes()
    path.write_bytes((data.index(b"}}") + 2 - 8).to_bytes(8, "little") + data[8:])
    (tmp_path / "src" / "config.json").write_text(json.dumps(LLAMA.config), encoding="utf-8")
    error = refused(tmp_path / "src", dst, "--tp-out", 2, "--split", "x=0")
    assert "its elements share bytes" in error
    assert "--split 'x=none'" in error
    reshard(tmp_path / "src", dst, "-q", "--tp-out", 2, "--split", "x=none", "--verify")
    reshard(dst, tmp_path / "back", "-q", "--to", "hf", "--verify")
    start = data.index(b"}}") + 2
    again = (tmp_path / "back" / "model.safetensors").read_bytes()
    assert header(tmp_path / "back" / "model.safetensors")["x"]["dtype"] == dtype
    assert data[start : start + 8 * 16 * bits // 8] in again


@pytest.mark.parametrize("name", ["ключ.вес", 'a\nb\t"c"', "\U0001f600.weight", "a/../b", "x" * 3000, " ", "__x__"])
def test_any_name(name: str, tmp_path: Path, dst: Path) -> None:
    tensors = {name: origin(1, "F32", (4, 2)), NORM: LLAMA.tensors()[NORM]}
    save_hf(tmp_path / "src", tensors, LLAMA.config)
    reshard(tmp_path / "src", dst, "-q", "--tp-out", 2, "--split", "?*=0", "--verify")
    reshard(dst, tmp_path / "back", "-q", "--to", "hf")
    assert_same(read_all(tmp_path / "back"), tensors)


# -- casts


def numbers(kind: type[np.generic] | str, count: int = 4096) -> Array:
    """Every class of number: normal, subnormal, zero of both signs, huge, infinite, not a number."""
    rng = np.random.default_rng(7)
    exponents = rng.integers(-140, 128, count)
    with np.errstate(over="ignore", under="ignore"):
        values = np.ldexp(rng.standard_normal(count), exponents).astype(np.float32)
        values[:8] = [0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, 3.4028235e38, 1e-45]
        return values.astype(kind)


CASTS: dict[str, tuple[str, Any]] = {
    "bf16": ("BF16", ml_dtypes.bfloat16),
    "float16": ("F16", np.float16),
    "torch.float32": ("F32", np.float32),
    "F64": ("F64", np.float64),
}


@pytest.mark.product(one_in=3)
@pytest.mark.parametrize("wanted", CASTS)
@pytest.mark.parametrize("given", CASTS)
def test_dtype(given: str, wanted: str, tmp_path: Path, dst: Path) -> None:
    dtype, kind = CASTS[given]
    values = numbers(kind).reshape(8, 512)
    raw = {2: np.uint16, 4: np.uint32, 8: np.uint64}[values.dtype.itemsize]
    tensors = {
        EMBED: Raw(dtype, values.view(raw)),
        "model.layers.0.mlp.down_proj.weight": Raw("F8_E4M3", np.arange(256, dtype=np.uint8).reshape(2, 128)),
        "model.layers.0.mlp.down_proj.weight_scale_inv": origin(5, "F32", (1, 1)),
        "ids": origin(6, "I32", (3,)),
    }
    config = {**LLAMA.config, "vocab_size": 8, "dtype": "x"}
    save_hf(tmp_path / "src", tensors, config)
    reshard(tmp_path / "src", dst, "-q", "--dtype", wanted, "--tp-out", 2, "--split", "ids=none", "--verify")
    reshard(dst, tmp_path / "back", "-q", "--to", "hf")
    got = read_all(tmp_path / "back")
    out_dtype, out_kind = CASTS[wanted]
    assert_same(without(got, EMBED), without(tensors, EMBED))  # neither quantized nor scales nor whole numbers
    assert got[EMBED].dtype == out_dtype
    with np.errstate(over="ignore"):
        want = values.astype(out_kind)
    found = got[EMBED].bits.view(out_kind)
    assert np.array_equal(np.isnan(found.astype(np.float64)), np.isnan(values.astype(np.float64)))
    kept = ~np.isnan(values.astype(np.float64))
    assert np.array_equal(found[kept].view(got[EMBED].bits.dtype), want[kept].view(got[EMBED].bits.dtype))
    name = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}[out_dtype]
    new = json.loads((dst / "config.json").read_bytes())
    assert new["torch_dtype"] == new["dtype"] == name


# -- files


def test_max_shard_size(src: Path, dst: Path) -> None:
    limit = 20_000  # less than the embedding
    reshard(src, dst, "-q", "--to", "hf", "--max-shard-size", limit)
    tensors = LLAMA.tensors()
    assert_same(read_all(dst), tensors)
    shards = sorted(p.name for p in dst.glob("*.safetensors"))
    assert shards == [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    index = json.loads((dst / "model.safetensors.index.json").read_bytes())
    assert index["metadata"]["total_size"] == sum(r.bits.nbytes for r in tensors.values())
    assert index["weight_map"] == {n: s for s in shards for n in read(dst / s)}
    assert header(dst / shards[0])["__metadata__"] == {"format": "pt"}
    for shard in shards:
        held_here = read(dst / shard)
        assert len(held_here) == 1 or sum(r.bits.nbytes for r in held_here.values()) <= limit
    reshard(dst, dst.with_name("one"), "-q")
    assert [p.name for p in dst.with_name("one").glob("model*")] == ["model.safetensors"]


@pytest.mark.parametrize(("text", "size"), [("130KB", 130_000), ("0.125MiB", 131_072), ("131072", 131_072)])
def test_sizes_as_people_write_them(text: str, size: int, src: Path, dst: Path) -> None:
    reshard(src, dst, "-q", "--to", "hf", "--max-shard-size", text)
    first = read(dst / "model-00001-of-00002.safetensors")
    assert size * 0.8 < sum(r.bits.nbytes for r in first.values()) <= size


def test_ranks_out(src: Path, dst: Path) -> None:
    reshard(src, dst, "-q", "--tp-out", 4, "--pp-out", 3)
    all_files = files(dst)
    reshard(src, dst.with_name("some"), "-q", "--tp-out", 4, "--pp-out", 3, "--ranks-out", "1-2,11,2")
    names = [f"rank-{r:05d}-of-00012.safetensors" for r in (1, 2, 11)]
    assert files(dst.with_name("some")) == {n: all_files[n] for n in [*names, "config.json"]}


def test_vocab_multiple(src: Path, dst: Path) -> None:
    reshard(src, dst, "-q", "--tp-out", 2, "--vocab-multiple", 64, "--verify")
    padded = np.zeros((320, H), np.uint16)
    padded[:V] = LLAMA.tensors()[HEAD].bits
    for rank in (0, 1):
        got = read(dst / f"rank-{rank:05d}-of-00002.safetensors")
        assert np.array_equal(got[HEAD].bits, np.split(padded, 2)[rank])
    reshard(dst, dst.with_name("back"), "-q", "--to", "hf")
    assert_same(read_all(dst.with_name("back")), LLAMA.tensors())


def test_more_padding_than_ranks_hold(src: Path, dst: Path) -> None:
    """The last ranks hold nothing but padding."""
    reshard(src, dst, "-q", "--tp-out", 4, "--vocab-multiple", 1024, "--verify")
    assert not read(dst / "rank-00003-of-00004.safetensors")[EMBED].bits.any()
    reshard(dst, dst.with_name("back"), "-q", "--to", "hf", "--verify")
    assert_same(read_all(dst.with_name("back")), LLAMA.tensors())


def test_companions_and_config(src: Path, dst: Path) -> None:
    carried = {
        "tokenizer.json": b"{}",
        "generation_config.json": b'{"a":  1}',
        "chat_template.jinja": b"{{ x }}",
        "tokenizer.model": bytes(range(256)),
        "modeling_custom.py": b"x = 1\n",
    }
    left = {"pytorch_model.bin": b"1", "optimizer.pt": b"1", "model.safetensors.index.json.bak": b"x", ".hidden": b"x"}
    for name, data in {**carried, **left}.items():
        (src / name).write_bytes(data)
    (src / "onnx").mkdir()
    reshard(src, dst, "-q", "--tp-out", 2)
    found = files(dst)
    assert {n: found[n] for n in carried} == carried
    assert not left.keys() & found.keys() - {"model.safetensors.index.json.bak"}
    assert found["config.json"] == (src / "config.json").read_bytes()  # nothing in it names a parallel size


def test_parallel_sizes_in_the_config(tmp_path: Path, dst: Path) -> None:
    config = {**LLAMA.config, "tensor_parallel_degree": 1, "pipeline_model_parallel_size": 1, "tp_size": 1, "keep": [1]}
    save_hf(tmp_path / "src", LLAMA.tensors(), config)
    reshard(tmp_path / "src", dst, "-q", "--tp-out", 4, "--pp-out", 3)
    new = json.loads((dst / "config.json").read_bytes())
    assert new == {**config, "tensor_parallel_degree": 4, "pipeline_model_parallel_size": 3, "tp_size": 4}
    reshard(dst, tmp_path / "back", "-q", "--to", "hf")
    assert json.loads((tmp_path / "back" / "config.json").read_bytes()) == config


def test_file_names_that_are_not_utf8(src: Path) -> None:
    strange = os.fsdecode(b"caf\xe9")
    (src / f"{strange}.txt").write_bytes(b"x")
    src = src.rename(src.with_name(strange))
    dst = src.with_name(strange + "2")
    reshard(src, dst, "--tp-out", 2, "--manifest", "--verify")
    assert (dst / f"{strange}.txt").read_bytes() == b"x"


def test_large_companion_stays_behind(src: Path, dst: Path) -> None:
    with (src / "dump.bin2").open("wb") as f:
        f.truncate((64 << 20) + 1)
    done = reshard(src, dst)
    assert "dump.bin2 (67,108,865 bytes) is not copied: larger" in done.err
    assert not (dst / "dump.bin2").exists()


# -- sources as people have them


def test_one_file_as_source(src: Path, dst: Path) -> None:
    reshard(src / "model.safetensors", dst, "-q", "--tp-out", 2)
    assert_same(read(dst / "rank-00001-of-00002.safetensors"), held(LLAMA, Grid(tp=2), 1))


@pytest.fixture
def shards(src: Path) -> Path:
    to = src.with_name("shards")
    reshard(src, to, "-q", "--to", "hf", "--max-shard-size", "70KB")
    assert len(list(to.glob("*.safetensors"))) == 3
    return to


def test_index_as_source(shards: Path, dst: Path) -> None:
    reshard(shards / "model.safetensors.index.json", dst, "-q")
    assert_same(read_all(dst), LLAMA.tensors())


INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(
    ("change", "note"),
    [
        (None, "the index is missing"),
        ("not json", "not usable"),
        ({"metadata": {}}, "has no weight_map"),
        ({"weight_map": {"gone": "model-00001-of-00003.safetensors"}}, "names 1 tensors that no shard holds"),
        ({"weight_map": {NORM: "old.safetensors"}}, "is stale"),
        ({"weight_map": {EMBED: "model-00003-of-00003.safetensors"}}, "wrong shard"),
    ],
)
def test_wrong_index_is_rebuilt(change: object, note: str, shards: Path, dst: Path) -> None:
    if change is None:
        (shards / INDEX).unlink()
    else:
        (shards / INDEX).write_text(change if isinstance(change, str) else json.dumps(change), encoding="utf-8")
    done = reshard(shards, dst, "--max-shard-size", "50KB")
    assert note in done.err
    assert_same(read_all(dst), LLAMA.tensors())
    index = json.loads((dst / INDEX).read_bytes())
    assert index["weight_map"].keys() == LLAMA.shapes.keys()


def test_a_shard_under_the_name_of_another(shards: Path, dst: Path) -> None:
    """The index says which tensors are lost."""
    names = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    for one in names:
        for other in names:
            kept = (shards / other).read_bytes()
            if one == other:
                continue
            (shards / other).write_bytes((shards / one).read_bytes())
            assert f"{other} holds tensors of another shard, and none of the " in refused(shards, dst, "--to", "hf")
            (shards / other).write_bytes(kept)


def test_stale_shards_beside_the_index(shards: Path, dst: Path) -> None:
    """An older, larger save left files behind; the index says which count."""
    write(shards / "model-00007-of-00009.safetensors", {NORM: origin(99, "BF16", (H,))})
    done = reshard(shards, dst)
    assert "model-00007-of-00009.safetensors is not part of the checkpoint" in done.err
    assert_same(read_all(dst), LLAMA.tensors())


def test_links_into_a_cache(shards: Path, dst: Path) -> None:
    """The Hugging Face cache: a snapshot of links to blobs."""
    snapshot = shards.with_name("snapshot")
    snapshot.mkdir()
    for path in shards.iterdir():
        path.rename(path.with_name("blob-" + path.name))
        (snapshot / path.name).symlink_to(path.with_name("blob-" + path.name))
    reshard(snapshot, dst, "-q", "--tp-out", 2)
    assert_same(read(dst / "rank-00000-of-00002.safetensors"), held(LLAMA, Grid(tp=2), 0))
    assert not (dst / "config.json").is_symlink()


def test_config_of_the_parent_directory(tmp_path: Path, dst: Path) -> None:
    """Frameworks write ranks into a directory of their own."""
    for rank in range(2):
        write(tmp_path / "src" / "ranks" / f"mp_rank_{rank:02d}.safetensors", held(LLAMA, Grid(tp=2), rank))
    (tmp_path / "src" / "config.json").write_text(json.dumps(LLAMA.config), encoding="utf-8")
    done = reshard(tmp_path / "src" / "ranks", dst, "--to", "hf")
    assert "config.json is read from the parent directory" in done.err
    assert "taken as tp 2" in done.err
    assert_same(read_all(dst), LLAMA.tensors())
    assert json.loads((dst / "config.json").read_bytes()) == LLAMA.config


@pytest.mark.parametrize(
    "name",
    [
        "model_{:d}.safetensors",
        "rank{:d}.safetensors",
        "model-rank-{:02d}.safetensors",
        "tp_rank_{:02d}.safetensors",
        "mp_rank_{:02d}.safetensors",
        "model_tp{:d}.safetensors",
        "tp{:02d}.safetensors",
        "shard.mp{:d}.safetensors",
        "consolidated.{:02d}.safetensors",
    ],
)
def test_names_of_rank_files(name: str, tmp_path: Path, dst: Path) -> None:
    """Names that need no --rank-pattern when the size is said."""
    tensors = without(LLAMA.tensors(), "layers.1.", "layers.2.")
    for rank in range(4):
        write(tmp_path / "src" / name.format(rank), held(LLAMA, Grid(tp=4), rank, tensors))
    (tmp_path / "src" / "config.json").write_text(
        json.dumps({**LLAMA.config, "num_hidden_layers": 1}), encoding="utf-8"
    )
    reshard(tmp_path / "src", dst, "-q", "--to", "hf", "--tp", 4)
    assert_same(read_all(dst), tensors)


@pytest.mark.parametrize("pattern", ["", "part{rank}.safetensors"])
def test_ranks_numbered_from_one(pattern: str, tmp_path: Path, dst: Path) -> None:
    for rank in range(4):
        write(tmp_path / "src" / f"part{rank + 1}.safetensors", held(LLAMA, Grid(tp=4), rank))
    (tmp_path / "src" / "config.json").write_text(json.dumps(LLAMA.config), encoding="utf-8")
    options = ("--rank-pattern", pattern) if pattern else ()
    reshard(tmp_path / "src", dst, "-q", "--to", "hf", "--tp", 4, *options)
    assert_same(read_all(dst), LLAMA.tensors())
    (tmp_path / "src" / "part2.safetensors").unlink()
    assert "error: " in refused(tmp_path / "src", tmp_path / "x", "--to", "hf", "--tp", 4, *options)


def test_several_files_of_one_rank(tmp_path: Path, dst: Path) -> None:
    for rank in range(2):
        names = sorted(held(LLAMA, Grid(tp=2), rank))
        for part, some in enumerate((names[::2], names[1::2])):
            mine = {n: held(LLAMA, Grid(tp=2), rank)[n] for n in some}
            write(tmp_path / "src" / f"tp{rank}" / f"model-{part:05d}-of-00002.safetensors", mine)
    (tmp_path / "src" / "config.json").write_text(json.dumps(LLAMA.config), encoding="utf-8")
    pattern = "tp{tp}/model-{part}-of-*.safetensors"
    reshard(tmp_path / "src", dst, "-q", "--to", "hf", "--rank-pattern", pattern)
    assert_same(read_all(dst), LLAMA.tensors())
    error = refused(tmp_path / "src", tmp_path / "no", "--to", "hf", "--rank-pattern", pattern.replace("{part}", "*"))
    assert "two files are rank 0" in error
    assert "{part}" in error


def test_padding_with_copies_of_the_last_row(tmp_path: Path, dst: Path) -> None:
    """As Megatron's converter pads."""
    for rank in range(2):
        tensors = held(LLAMA, Grid(tp=2), rank)
        for name in (EMBED, HEAD):
            last = LLAMA.tensors()[name].bits[-1:]
            rows = np.concatenate([LLAMA.tensors()[name].bits, np.repeat(last, 384 - V, 0)])
            tensors[name] = Raw("BF16", np.split(rows, 2)[rank])
        write(tmp_path / "src" / f"tp{rank}.safetensors", tensors)
    (tmp_path / "src" / "config.json").write_text(json.dumps(LLAMA.config), encoding="utf-8")
    reshard(tmp_path / "src", dst, "-q", "--to", "hf")
    assert_same(read_all(dst), LLAMA.tensors())


# -- families of one's own


OWN = """
family: own
sizes: {heads: n_heads}
first: {emb: vocab}
layers:
  prefix: "blk.{layer}."
  rules: {wq: column heads, wo: row heads, "w*": column}
last: {out: vocab}
fusions:
  ab: {whole: "{x}.wab", parts: ["{x}.wa", "{x}.wb"]}
"""


def test_family_file(tmp_path: Path, dst: Path) -> None:
    tensors = {
        "emb": origin(1, "F32", (10, 6)),
        **{
            f"blk.{i}.{n}": origin(2 + 4 * i + j, "F32", s)
            for i in range(2)
            for j, (n, s) in enumerate({"wq": (8, 6), "wo": (6, 8), "wa": (4, 6), "wb": (4, 6)}.items())
        },
        "out": origin(20, "F32", (10, 6)),
    }
    save_hf(tmp_path / "src", tensors, {"n_heads": 4})
    (tmp_path / "own.yaml").write_text(OWN, encoding="utf-8")
    own = ("--family", tmp_path / "own.yaml")
    assert "config.json has no model_type" in refused(tmp_path / "src", dst, "--tp-out", 4)
    reshard(tmp_path / "src", dst, "-q", "--tp-out", 4, *own, "--verify", "--fuse")
    got = read(dst / "rank-00002-of-00004.safetensors")
    ab = np.concatenate([np.split(tensors[f"blk.1.{n}"].bits, 4)[2] for n in ("wa", "wb")])
    assert np.array_equal(got["blk.1.wab"].bits, ab)
    assert np.array_equal(got["blk.1.wo"].bits, np.split(tensors["blk.1.wo"].bits, 4, 1)[2])
    # What is recorded is enough to put it together; only another cut needs the rules again.
    reshard(dst, tmp_path / "one", "-q", "--to", "hf", *own)
    assert_same(read_all(tmp_path / "one"), tensors)
    reshard(dst, tmp_path / "fused", "-q", "--to", "hf")
    assert "blk.1.wab" in read_all(tmp_path / "fused")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("family: [", "not valid YAML"),
        ("- 1", "not valid"),
        ("family: own\nlayers: {prefix: 'x.{layer}.', rules: {a: columns}}", "is not a layout rule"),
        ("family: own\nlayers: {prefix: 'x.{layer}.', rules: {}}\nlayer: 1", "`layer`"),
        ("family: own\nlayers: {prefix: 'x.{layer}.', rules: {a: fused b}}", "at least two parts"),
        ("family: own\nlayers: {prefix: 'x.{layer}.', rules: {'{a.b}': column}}", "is not a capture"),
    ],
)
def test_wrong_family_file(text: str, words: str, src: Path, dst: Path) -> None:
    path = src.with_name("own.yaml")
    path.write_text(text, encoding="utf-8")
    assert words in refused(src, dst, "--tp-out", 2, "--family", path)


# -- what a run says and leaves


def test_dry_run(src: Path, dst: Path) -> None:
    done = reshard(src, dst, "--tp-out", 2, "--dry-run")
    assert not dst.exists()
    assert not dst.with_name("dst.partial").exists()
    assert "rank-00001-of-00002.safetensors" in done.out
    done = reshard(src, dst, "--tp-out", 2, "-n", "--json")
    shown = json.loads(done.out)
    assert not dst.exists()
    reshard(src, dst, "--tp-out", 2, "-q")
    names = {f["name"]: f["bytes"] for f in shown["files"]}
    assert names == {n: len(data) for n, data in files(dst).items()}


def test_json(src: Path, dst: Path) -> None:
    done = reshard(src, dst, "--tp-out", 2, "--json")
    assert isinstance(json.loads(done.out), dict)
    assert done.err == ""


def test_quiet(src: Path, dst: Path) -> None:
    done = reshard(src, dst, "--tp-out", 2, "-q")
    assert done.err == ""


def test_verify_accepts_what_is_right(src: Path, dst: Path) -> None:
    reshard(src, dst, "-q", "--tp-out", 2, "--pp-out", 3, "--fuse", "--dtype", "f32", "--verify")


def shift(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A planner that takes one element too far to the right, or puts it there."""
    right = planner._copy

    def wrong(*args: Any) -> tuple[Copy, int, int]:
        form, src, dst = right(*args)
        if prod(form.shape) < 100:
            return form, src, dst
        form = form._replace(shape=(*form.shape[:-1], form.shape[-1] - 1))
        return form, src + 2 * (which == "src"), dst + 2 * (which == "dst")

    monkeypatch.setattr(planner, "_copy", wrong)


prod = math.prod


@pytest.mark.parametrize("which", ["src", "dst"])
def test_verify_catches_a_broken_planner(which: str, src: Path, dst: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shift(which, monkeypatch)
    error = refused(src, dst, "-q", "--tp-out", 2, "--verify", code=3)
    assert "tensors differ from the source" in error
    assert "first at [" in error
    reshard(src, dst, "-q", "--tp-out", 2)  # without --verify nobody notices
    assert dst.exists()


def test_verify_catches_a_swapped_replica(src: Path, dst: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies count too: the wrong head on the last rank, whose first copy is right."""

    def swapped(catalog: Any, views: Any, ranks: Any, file_layout: Any, **more: Any) -> Any:
        name = "model.layers.0.self_attn.k_proj.weight"
        bad = [
            [ranks[0][i] if t.name == name and r == len(ranks) - 1 else t for i, t in enumerate(tensors)]
            for r, tensors in enumerate(ranks)
        ]
        return build_plan(catalog, views, bad, file_layout, **more)

    monkeypatch.setattr("ckpttool.targeting.build.build_plan", swapped)
    assert "k_proj" in refused(src, dst, "-q", "--tp-out", 8, "--verify", code=3)


@pytest.mark.parametrize(
    "options", [("--tp-out", 8, "--fuse"), ("--to", "hf", "--dtype", "f32", "--max-shard-size", "60KB")]
)
def test_same_bytes_whatever_the_workers_and_memory(options: tuple[object, ...], src: Path, tmp_path: Path) -> None:
    found = []
    for workers, memory in ((1, "4MiB"), (4, "64MiB"), (3, "512MB")):
        to = tmp_path / f"out{workers}"
        reshard(src, to, "-q", *options, "--workers", workers, "--memory", memory, "--manifest")
        found.append(files(to))
    assert found[0] == found[1] == found[2]
    assert "ckpttool.manifest.json" in found[0]


def test_manifest_is_not_carried_on(src: Path, dst: Path) -> None:
    reshard(src, dst, "-q", "--tp-out", 2, "--manifest")
    reshard(dst, dst.with_name("next"), "-q", "--tp-out", 4)
    assert not (dst.with_name("next") / "ckpttool.manifest.json").exists()


def test_nothing_said_copies_the_checkpoint(src: Path, dst: Path) -> None:
    reshard(src, dst, "-q")
    assert_same(read_all(dst), LLAMA.tensors())
    assert ckpttool("reshard", dst, dst.with_name("again"), "-q").code == 0
    assert files(dst) == files(dst.with_name("again"))
