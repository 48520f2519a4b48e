"""Bad input and bad requests: one clear error that says what, where and what would work; nothing is left behind."""

from __future__ import annotations

import json
import os
import struct
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from ckpttool import open as open_checkpoint
from ckpttool.errors import CorruptError
from tests.helpers.command import ckpttool, refused, reshard
from tests.helpers.families import MODELS
from tests.helpers.judge import Grid, write_ranks
from tests.helpers.tensorfile import Raw, Tensors, assert_same, encode, header, read, save_hf, write

LLAMA = MODELS["llama"]
NORM = "model.norm.weight"
HEAD = "lm_head.weight"


@cache
def made(make: Callable[..., Path], *options: object) -> tuple[Path, dict[Path, bytes]]:
    """What it makes in a directory, and the files there."""
    with tempfile.TemporaryDirectory() as name:
        at = Path(name)
        path = make(at, *options).relative_to(at)
        return path, {p.relative_to(at): p.read_bytes() for p in at.rglob("*") if p.is_file()}


def once(make: Callable[..., Path]) -> Callable[..., Path]:
    """Let it make the same only once; then the files are copied."""

    def copied(at: Path, *options: object) -> Path:
        path, files = made(make, *options)
        for name, data in files.items():
            (at / name).parent.mkdir(parents=True, exist_ok=True)
            (at / name).write_bytes(data)
        return at / path

    return copied


@once
def hf(at: Path) -> Path:
    """One file, its config, at ``at``/src."""
    return save_hf(at / "src", LLAMA.tensors(), LLAMA.config)


@once
def shards(at: Path) -> Path:
    """Two files and an index."""
    reshard(hf(at), at / "two", "--to", "hf", "--max-shard-size", "130KB", "-q")
    assert len(list((at / "two").glob("*.safetensors"))) == 2
    return at / "two"


@once
def ranks(at: Path, tp: int = 2) -> Path:
    """Another tool's rank files."""
    return write_ranks(at / "src", LLAMA, Grid(tp=tp), "model_tp{tp}.safetensors")


@once
def our_ranks(at: Path, *options: object) -> Path:
    """Self-describing rank files."""
    reshard(hf(at), at / "ours", "-q", *(options or ("--tp-out", 2)))
    return at / "ours"


def change(path: Path, edit: Callable[[Tensors], object], metadata: dict[str, str] | None = None) -> None:
    """Rewrite a file after ``edit``."""
    tensors = dict(read(path))
    edit(tensors)
    write(path, tensors, header(path).get("__metadata__") if metadata is None else metadata)


def rewrite_header(path: Path, edit: Callable[[dict[str, object]], object]) -> None:
    """Change the JSON of a header and nothing else."""
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    found = json.loads(data[8 : 8 + size])
    edit(found)
    text = json.dumps(found).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])


def set_entry(path: Path, name: str, **fields: object) -> None:
    def edit(found: dict[str, object]) -> None:
        entry = found[name]
        assert isinstance(entry, dict)
        entry.update(fields)

    rewrite_header(path, edit)


def write_json(path: Path, data: object) -> None:
    path.write_text(json.dumps(data), encoding="utf-8")


# -- files that break their format


def damaged(at: Path) -> Path:
    return hf(at) / "model.safetensors"


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 100)


def _header_too_long(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(struct.pack("<Q", 1 << 40) + data[8:])


def _header_too_short(path: Path) -> None:
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    path.write_bytes(struct.pack("<Q", size - 5) + data[8:])


def _hole(path: Path) -> None:
    raw = Raw("U8", np.zeros(4, np.uint8))
    text = b'{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[1],"data_offsets":[3,4]}}'
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw.bits.tobytes())


def _overlap(path: Path) -> None:
    text = b'{"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},"b":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}}'
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(4))


def _raw_header(text: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(struct.pack("<Q", len(text)) + text)


def _entry(**fields: object) -> Callable[[Path], None]:
    return lambda path: set_entry(path, NORM, **fields)


def _trailing(path: Path) -> None:
    path.write_bytes(path.read_bytes() + bytes(16))


def _lfs(path: Path) -> None:
    path.write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:" + "4d7a" * 16 + "\nsize 4983508568\n",
        encoding="utf-8",
    )


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (_cut, "ends at byte"),
    "empty file": (lambda p: p.write_bytes(b""), "0 bytes"),
    "seven bytes": (lambda p: p.write_bytes(b"1234567"), "7 bytes"),
    "header longer than the file": (_header_too_long, "the header claims 1,099,511,627,776 bytes"),
    "header shorter than it is": (_header_too_short, "not valid JSON"),
    "git-lfs pointer": (_lfs, "git lfs pull"),
    "a hole": (_hole, "belong to no tensor"),
    "an overlap": (_overlap, "overlap"),
    "trailing bytes": (_trailing, "belong to no tensor"),
    "not utf-8": (_raw_header(b'{"\xff\xfe":1}'), "UTF-8"),
    "not json": (_raw_header(b"{]"), "not valid JSON"),
    "not an object": (_raw_header(b"[1,2]"), "not a JSON object"),
    "nested without end": (_raw_header(b'{"a":' + b"[" * 200_000), "nested too deeply"),
    "a name twice": (_raw_header(b'{"a":1,"a":2}'), "twice"),
    "an entry that is not an object": (_raw_header(b'{"a":[1]}'), "is not an object"),
    "an unknown dtype": (_entry(dtype="F13"), "unknown dtype `F13`"),
    "a dtype that is not a string": (_entry(dtype=["BF16"]), "dtype"),
    "no dtype": (_entry(dtype=None), "dtype"),
    "a negative shape": (_entry(shape=[-48]), "shape"),
    "a shape of floats": (_entry(shape=[48.0]), "shape"),
    "a huge shape": (_entry(shape=[2**62, 2**62]), "needs"),
    "a shape that is text": (_entry(shape="48"), "shape"),
    "a shape that is empty text": (_entry(shape=""), "shape"),
    "a shape that is an object": (_entry(shape={}), "shape"),
    "half a surrogate pair": (_raw_header(rb'{"\ud800":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'), "UTF-8"),
    "offsets in the wrong order": (_entry(data_offsets=[96, 0]), "before it starts"),
    "offsets that do not fit": (_entry(data_offsets=[0, 1]), "data_offsets hold 1"),
    "one offset": (_entry(data_offsets=[0]), "data_offsets"),
    "metadata that is not a string": (
        lambda p: rewrite_header(p, lambda h: h.update(__metadata__={"a": 1})),
        "__metadata__",
    ),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damaged_file(case: str, tmp_path: Path) -> None:
    damage, words = DAMAGE[case]
    path = damaged(tmp_path)
    damage(path)
    error = refused(path.parent, tmp_path / "dst", "--tp-out", 2)
    assert words in error
    assert str(path) in error  # where


# -- checkpoints of which something is missing or contradicts the rest


def _missing_rank(at: Path) -> Path:
    src = ranks(at, 4)
    (src / "model_tp2.safetensors").unlink()
    return src


def _missing_last_of_ours(at: Path) -> Path:
    src = our_ranks(at, "--tp-out", 4)
    (src / "rank-00003-of-00004.safetensors").unlink()
    return src


def _missing_shard(at: Path) -> Path:
    src = shards(at)
    (src / "model-00002-of-00002.safetensors").unlink()
    return src


def _missing_shard_without_index(at: Path) -> Path:
    src = _missing_shard(at)
    (src / "model.safetensors.index.json").unlink()
    return src


def _replicas_differ(at: Path) -> Path:
    src = ranks(at)

    def edit(tensors: Tensors) -> None:
        bits = tensors[NORM].bits.copy()
        bits[7] ^= 1
        tensors[NORM] = Raw("BF16", bits)

    change(src / "model_tp1.safetensors", edit)
    return src


def _shared_heads_differ(at: Path) -> Path:
    src = ranks(at, 8)
    name = "model.layers.1.self_attn.k_proj.weight"

    def edit(tensors: Tensors) -> None:
        bits = tensors[name].bits.copy()
        bits[3, 4] ^= 0x100
        tensors[name] = Raw("BF16", bits)

    change(src / "model_tp6.safetensors", edit)
    return src


def _padding_is_used(at: Path) -> Path:
    src = ranks(at)

    def edit(tensors: Tensors) -> None:
        bits = tensors[HEAD].bits.copy()
        bits[-1, 5] = 7
        tensors[HEAD] = Raw("BF16", bits)

    change(src / "model_tp1.safetensors", edit)
    return src


def _shapes_differ(at: Path) -> Path:
    src = ranks(at)
    name = "model.layers.0.mlp.down_proj.weight"
    change(
        src / "model_tp1.safetensors",
        lambda tensors: tensors.update({name: Raw("BF16", tensors[name].bits[:, :-2].copy())}),
    )
    return src


def _dtypes_differ(at: Path) -> Path:
    src = ranks(at)
    name = "model.layers.0.mlp.down_proj.weight"
    change(src / "model_tp1.safetensors", lambda tensors: tensors.update({name: Raw("F16", tensors[name].bits)}))
    return src


def _tensor_missing_on_a_rank(at: Path) -> Path:
    src = ranks(at)
    change(src / "model_tp1.safetensors", lambda tensors: tensors.pop("model.layers.0.mlp.down_proj.weight"))
    return src


def _tensor_in_two_shards(at: Path) -> Path:
    src = shards(at)
    (src / "model.safetensors.index.json").unlink()
    one, two = sorted(src.glob("*.safetensors"))
    change(two, lambda tensors: tensors.update({next(iter(read(one))): next(iter(read(one).values()))}))
    return src


def _two_sets_of_ranks(at: Path) -> Path:
    src = our_ranks(at)
    (src / "rank-00000-of-00004.safetensors").write_bytes(b"")
    return src


def _two_checkpoints(at: Path) -> Path:
    src = shards(at)
    (src / "model.safetensors.index.json").unlink()
    for path in sorted(src.glob("*.safetensors")):
        path.with_name("other" + path.name.removeprefix("model")).write_bytes(path.read_bytes())
    return src


def _mixed_mp(at: Path) -> Path:
    src = at / "src"
    for name in ("model0-mp1", "model0-mp2", "model1-mp2"):
        write(src / f"{name}.safetensors", {})
    return src


def _vllm_part_missing(at: Path) -> Path:
    reshard(hf(at), at / "vllm", "-q", "--to", "vllm", "--tp-out", 2, "--max-shard-size", "30KB")
    (at / "vllm" / "model-rank-1-part-1.safetensors").unlink()
    return at / "vllm"


def _index_leaves_the_directory(at: Path) -> Path:
    src = shards(at)
    path = src / "model.safetensors.index.json"
    index = json.loads(path.read_bytes())
    index["weight_map"][NORM] = "../model.safetensors"
    write_json(path, index)
    return src


def _no_config(at: Path) -> Path:
    src = hf(at)
    (src / "config.json").unlink()
    return src


def _broken_config(at: Path) -> Path:
    src = hf(at)
    (src / "config.json").write_text('{"model_type": ', encoding="utf-8")
    return src


def _no_rule(at: Path) -> Path:
    tensors = LLAMA.tensors()
    for i in range(3):
        tensors[f"model.layers.{i}.my_adapter.weight"] = Raw("BF16", np.zeros((4, 4), np.uint16))
    return save_hf(at / "src", tensors, LLAMA.config)


def _wrong_heads(at: Path) -> Path:
    src = ranks(at)
    write_json(src / "config.json", {**LLAMA.config, "num_attention_heads": 7})
    return src


def _wrong_vocabulary(at: Path) -> Path:
    src = ranks(at)
    write_json(src / "config.json", {**LLAMA.config, "vocab_size": 300})
    return src


def _metadata(edit: Callable[[dict[str, object]], object]) -> Callable[[Path], Path]:
    def build(at: Path) -> Path:
        src = our_ranks(at)

        def apply(found: dict[str, object]) -> None:
            meta = found["__metadata__"]
            assert isinstance(meta, dict)
            record = json.loads(meta["ckpttool"])
            meta["ckpttool"] = json.dumps(edit(record) or record)

        rewrite_header(src / "rank-00001-of-00002.safetensors", apply)
        return src

    return build


def _strip_metadata(at: Path) -> Path:
    src = our_ranks(at)
    rewrite_header(src / "rank-00001-of-00002.safetensors", lambda found: found.pop("__metadata__"))
    return src


def _trtllm_without_mapping(at: Path) -> Path:
    return write_ranks(at / "src", LLAMA, Grid(tp=2), "rank{rank}.safetensors")


def _box(record: dict[str, object]) -> None:
    tensors = record["tensors"]
    assert isinstance(tensors, dict)
    tensors[HEAD]["boxes"][0][1][0] += 1000


def _shape(record: dict[str, object]) -> None:
    tensors = record["tensors"]
    assert isinstance(tensors, dict)
    tensors[HEAD]["shape"] = [1000, 48]


CONTRADICTIONS: dict[str, tuple[Callable[[Path], Path], tuple[object, ...], tuple[str, ...]]] = {
    "missing rank": (_missing_rank, ("--tp", 4), ("1 of 4 rank files", "missing: rank 2", "hint: ")),
    "missing rank, nothing said": (
        _missing_rank,
        (),
        (
            "1 of 4 rank files",
            "missing: rank 2",
        ),
    ),
    "missing rank of ours": (
        _missing_last_of_ours,
        (),
        (
            "1 of 4 rank files",
            "missing: rank 3",
        ),
    ),
    "missing shard": (_missing_shard, (), ("missing: model-00002-of-00002.safetensors", "hint: fetch")),
    "missing shard, no index": (_missing_shard_without_index, (), ("missing: model-00002-of-00002.safetensors",)),
    "replicas differ": (_replicas_differ, (), (f"two copies of `{NORM}` differ", "model_tp0", "model_tp1", "[bytes ")),
    "shared heads differ": (_shared_heads_differ, (), ("layers.1.self_attn.k_proj.weight` differ", "model_tp6")),
    "padding is used": (_padding_is_used, (), (f"padding of `{HEAD}`", "model_tp1", "[bytes ")),
    "shapes differ": (_shapes_differ, (), ("down_proj.weight` of rank 1 is [48, 30]", "hint: ")),
    "dtypes differ": (_dtypes_differ, (), ("is BF16 in one file and F16 in another", "model_tp1")),
    "tensor missing on a rank": (_tensor_missing_on_a_rank, (), ("no file holds", "down_proj", "hint: ")),
    "tensor in two shards": (_tensor_in_two_shards, (), ("is in two shards", "hint: ")),
    "two sets of ranks": (_two_sets_of_ranks, (), ("2 different checkpoints", "hint: ")),
    "two checkpoints": (_two_checkpoints, (), ("more than one checkpoint", "hint: ")),
    "two sizes of mp": (_mixed_mp, (), ("mp 1, 2", "--tp")),
    "part of a rank missing": (_vllm_part_missing, (), ("part 1 of rank 1 is missing",)),
    "index leaves the directory": (_index_leaves_the_directory, (), ("../model.safetensors",)),
    "no config": (
        _no_config,
        ("--tp-out", 2),
        ("config.json is missing, and how ", "put the model's config.json there", "=none' (whole on every rank)"),
    ),
    "config is not json": (_broken_config, (), ("config.json is not valid JSON",)),
    "tensor without a rule": (
        _no_rule,
        ("--tp-out", 2),
        ("1 kind of tensor", "model.layers.{n}.my_adapter.weight", "=none'", "--split"),
    ),
    "config has other heads": (_wrong_heads, (), ("q_proj", "7")),
    "config has more rows": (_wrong_vocabulary, (), ("has 260 rows on 2 ranks, config.json says 300", "hint: ")),
    "not our mesh": (_metadata(lambda r: r.update(mesh={"tp": 4})), (), ("another mesh",)),
    "not our rank": (_metadata(lambda r: r.update(rank=0)), (), ("named rank 1 but records rank 0",)),
    "newer version": (_metadata(lambda r: r.update(version=3)), (), ("newer ckpttool",)),
    "record without mesh": (_metadata(lambda r: r.pop("mesh") and None), (), ("metadata is not valid",)),
    "record is a list": (_metadata(lambda r: [r]), (), ("metadata is not valid",)),
    "record of another mesh type": (_metadata(lambda r: r.update(mesh={"tp": "2"})), (), ("metadata is not valid",)),
    "record of tensors is wrong": (_metadata(lambda r: r.update(tensors={HEAD: 1})), (), (HEAD, "not valid")),
    "box outside": (_metadata(_box), (), (HEAD, "cannot be")),
    "other whole shape": (_metadata(_shape), (), (HEAD, "another's")),
    "ours without metadata": (_strip_metadata, (), ("--rank-pattern",)),
    "trtllm without mapping": (_trtllm_without_mapping, ("--from", "trtllm"), ("mapping",)),
    "wrong tp for rank files": (ranks, ("--tp", 4), ("--tp 4 contradicts", "tp 2")),
    "wrong tp for ours": (our_ranks, ("--tp", 4), ("--tp 4 contradicts", "hint: drop --tp")),
    "wrong pp for ours": (our_ranks, ("--pp", 2), ("--pp 2 contradicts",)),
    "tp of whole tensors": (hf, ("--tp", 8), ("--tp 8 contradicts", "whole tensors")),
    "another format": (hf, ("--from", "deepseek"), ("no DeepSeek files",)),
    "ranks that are none": (hf, ("--from", "ranks"), ("--rank-pattern",)),
    "vllm that is none": (hf, ("--from", "vllm"), ("vLLM",)),
    "pattern that matches nothing": (hf, ("--rank-pattern", "part{rank}.safetensors"), ("part{rank}.safetensors",)),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_contradicting_source(case: str, tmp_path: Path) -> None:
    build, options, words = CONTRADICTIONS[case]
    error = refused(build(tmp_path), tmp_path / "dst", "--tp-out", 1, *options)
    for word in words:
        assert word in error, error


def test_sizes_that_are_equal_and_no_integers(tmp_path: Path) -> None:
    """8.0 is 8 to a table of the cuts that are known; it is not a size of a tensor."""

    def apply(found: dict[str, object]) -> None:
        meta = found["__metadata__"]
        assert isinstance(meta, dict)
        record = json.loads(meta["ckpttool"])
        for name, tensor in record["tensors"].items():
            if ".layers.1." in name:  # layer 0, which comes first, is cut alike
                tensor["shape"] = [float(n) for n in tensor["shape"]]
        meta["ckpttool"] = json.dumps(record)

    src = our_ranks(tmp_path)
    for path in src.glob("*.safetensors"):
        rewrite_header(path, apply)
    reshard(src, tmp_path / "dst", "--to", "hf", "-q")
    assert_same(read(tmp_path / "dst/model.safetensors"), LLAMA.tensors())


def test_a_companion_that_goes_before_the_plan(tmp_path: Path) -> None:
    src = hf(tmp_path)
    (src / "tokenizer.json").write_text("{}")
    source = open_checkpoint(src)
    (src / "tokenizer.json").unlink()
    with pytest.raises(CorruptError, match="a source cannot be read: No such file"):
        source.reshard(tp=2)


# -- requests that cannot be


REQUESTS: dict[str, tuple[tuple[object, ...], int, tuple[str, ...]]] = {
    "heads do not divide": (("--tp-out", 3), 1, ("cannot be cut for tp 3", "llama.yaml", "use --tp-out 1, 2, 4 or 8")),
    "heads cannot be shared": (("--tp-out", 16), 1, ("cannot be cut for tp 16", "hint: use --tp-out")),
    "layers do not divide": (("--pp-out", 2), 1, ("3 layers", "--pp-layout 2,1")),
    "layout does not add up": (("--pp-out", 2, "--pp-layout", "2,2"), 1, ("places 4 layers, the model has 3",)),
    "layout of another pp": (("--pp-out", 2, "--pp-layout", "1,1,1"), 2, ("not a multiple of pp 2",)),
    "layout is not numbers": (("--pp-layout", "1,x"), 2, ("not a list of numbers",)),
    "more stages than layers": (("--pp-out", 5), 1, ("3 layers",)),
    "unknown family": (("--tp-out", 2, "--family", "lama"), 1, ("unknown family `lama`", "did you mean `llama`, ")),
    "family file is not there": (("--tp-out", 2, "--family", "no.yaml"), 2, ("no.yaml",)),
    "unknown format": (("--to", "vlm"), 2, ("`vlm` is not a format", "did you mean `vllm`")),
    "unknown source format": (("--from", "h5"), 2, ("`h5` is not a format", "formats: ")),
    "hf in ranks": (("--to", "hf", "--tp-out", 2), 2, ("--tp-out 2 cannot be used", "--to ranks")),
    "deepseek with ep": (("--to", "deepseek", "--tp-out", 2, "--ep-out", 4), 2, ("--ep-out 4",)),
    "no deepseek names": (("--to", "deepseek", "--tp-out", 2), 1, ("no deepseek naming",)),
    "experts of a dense model": (("--tp-out", 2, "--ep-out", 4), 2, ("--ep-out 4", "no experts")),
    "rank out of range": (("--tp-out", 2, "--ranks-out", "0,2"), 2, ("rank 2", "ranks 0 to 1")),
    "ranks are not numbers": (("--tp-out", 2, "--ranks-out", "a-b"), 2, ("not a list of numbers",)),
    "ranks backwards": (("--tp-out", 2, "--ranks-out", "1-0"), 2, ("--ranks-out",)),
    "verify of some ranks": (("--tp-out", 2, "--ranks-out", "0", "--verify"), 2, ("--verify needs all ranks",)),
    "fp8 is not a cast": (("--dtype", "fp8"), 2, ("not a cast", "bf16")),
    "int is not a cast": (("--dtype", "int32"), 2, ("not a cast",)),
    "unknown dtype": (("--dtype", "bf17"), 2, ("--dtype: unknown dtype `bf17`", "bf16")),
    "memory too small": (("--memory", "1MB"), 2, ("too small", "64MiB")),
    "memory is not a size": (("--memory", "lots"), 2, ("is not a size",)),
    "shard size is not a size": (("--max-shard-size", "5GG"), 2, ("is not a size", "5GB")),
    "shard size is zero": (("--max-shard-size", "0"), 2, ("must be positive",)),
    "nothing kept": (("--keep-keys", "*.k_porj.weight"), 2, ("matches no tensor", "did you mean")),
    "nothing removed": (("--remove-keys", "visual.*"), 2, ("matches no tensor",)),
    "everything removed": (("--remove-keys", "*"), 2, ("no tensor is left",)),
    "pattern is not valid": (("--remove-keys", "re:("), 2, ("is not valid",)),
    "rename of nothing": (("--rename", "a=b"), 2, ("matches no tensor",)),
    "rename without =": (("--rename", "model"), 2, ("is not OLD=NEW",)),
    "rename with other stars": (("--rename", "*.q_proj.weight=q"), 2, ("same number of *",)),
    "rename to one name": (("--rename", "re:.*norm.weight=x"), 1, ("would both be named `x`",)),
    "rename to a group that is not there": (("--rename", r"re:norm=\2"), 2, ("is not valid", "group")),
    "rename to nothing": (("--rename", r"re:^model\.norm\.weight$="), 2, ("is not OLD=NEW",)),
    "split without an axis": (("--tp-out", 2, "--split", "*.norm.weight"), 2, ("PATTERN=AXIS",)),
    "split on an axis that is not there": (("--tp-out", 2, "--split", f"{NORM}=1"), 1, ("axis 1", NORM)),
    "split of nothing": (("--tp-out", 2, "--split", "nothing=0"), 2, ("--split", "matches no tensor")),
    "padding of whole tensors": (("--to", "hf", "--vocab-multiple", 64), 2, ("--vocab-multiple 64", "does not pad")),
    "replicate of nothing": (("--tp-out", 2, "--split", "nothing=none"), 2, ("--split", "matches no tensor")),
}


@pytest.mark.parametrize("case", REQUESTS)
def test_impossible_request(case: str, tmp_path: Path) -> None:
    options, code, words = REQUESTS[case]
    error = refused(hf(tmp_path), tmp_path / "dst", *options, code=code)
    for word in words:
        assert word in error, error


@pytest.mark.parametrize(
    "options", [("--tp-out", 0), ("--tp", "x"), ("--no-such-option",), ("--workers", 0), ("--vocab-multiple", 0)]
)
def test_wrong_usage(options: tuple[object, ...], tmp_path: Path) -> None:
    done = ckpttool("reshard", hf(tmp_path), tmp_path / "dst", *options)
    assert done.code == 2
    assert str(options[0]) in done.err
    assert not (tmp_path / "dst").exists()


def test_experts_that_engines_want_even(tmp_path: Path) -> None:
    """Our own rank files and foreign ones may be ragged; DeepSeek's code counts on equal shares."""
    model = MODELS["deepseek_v3"]
    save_hf(tmp_path / "src", model.tensors(), {**model.config, "vocab_size": 260})
    error = refused(tmp_path / "src", tmp_path / "dst", "--to", "deepseek", "--tp-out", 4)
    assert "6 experts" in error
    assert "1, 2, 3 or 6" in error


def test_cut_inside_a_scale_block(tmp_path: Path) -> None:
    """A block of 16 rows has one scale; five ranks or more would share it."""
    model = MODELS["deepseek_v3_fp8"]
    config = {**model.config, "quantization_config": {"weight_block_size": [32, 32]}}
    shapes = {
        n: tuple(-(-s // 2) for s in shape) if n.endswith("_scale_inv") else shape for n, shape in model.shapes.items()
    }
    tensors = {n: Raw(r.dtype, r.bits[tuple(map(slice, shapes[n]))]) for n, r in model.tensors().items()}
    save_hf(tmp_path / "src", tensors, config)
    error = refused(tmp_path / "src", tmp_path / "dst", "--tp-out", 8)
    assert "inside a scale block of 32" in error
    assert "hint: use --tp-out 1, 2 or 4" in error
    reshard(tmp_path / "src", tmp_path / "dst", "--tp-out", 4, "-q")


def test_one_scale_for_parts_that_are_fused(tmp_path: Path) -> None:
    """Each of q, k and v has a scale of its own; the fused tensor could hold one."""
    tensors = {n: r for n, r in LLAMA.tensors().items() if "bias" not in n}
    for name in list(tensors):
        if name.endswith("_proj.weight"):
            tensors[name + "_scale"] = Raw("F32", np.ones((), np.uint32))
    save_hf(tmp_path / "src", tensors, LLAMA.config)
    error = refused(tmp_path / "src", tmp_path / "dst", "--tp-out", 2, "--fuse")
    assert "one scale for its whole tensor" in error
    reshard(tmp_path / "src", tmp_path / "dst", "--tp-out", 2, "-q")


# -- places


def test_source_that_is_not_there(tmp_path: Path) -> None:
    src = hf(tmp_path)
    error = refused(src.with_name("srcs"), tmp_path / "dst", code=2)
    assert "does not exist" in error
    assert f"did you mean {src}" in error


def test_source_that_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "no checkpoint format is recognised" in refused(tmp_path / "empty", tmp_path / "dst")
    (tmp_path / "dirs" / "mp_rank_00").mkdir(parents=True)
    (hf(tmp_path) / "model.safetensors").rename(tmp_path / "dirs" / "mp_rank_00" / "model.safetensors")
    error = refused(tmp_path / "dirs", tmp_path / "dst")
    assert "--rank-pattern 'mp_rank_{rank}/model.safetensors'" in error
    adapter = tmp_path / "dirs" / "mp_rank_00" / "model.safetensors"
    adapter.rename(adapter.with_name("adapter_model.safetensors"))
    assert "adapter_model.safetensors is not a model's weights" in refused(adapter.parent, tmp_path / "dst")
    (tmp_path / "notes.txt").write_text("not a checkpoint", encoding="utf-8")
    assert "no checkpoint format is recognised" in refused(tmp_path / "notes.txt", tmp_path / "dst")


def test_destination_that_exists(tmp_path: Path) -> None:
    src = hf(tmp_path)
    (tmp_path / "dst").mkdir()
    (tmp_path / "dst" / "kept.txt").write_text("mine", encoding="utf-8")
    error = refused(src, tmp_path / "dst", "--tp-out", 2)
    assert "exists" in error
    assert "--force" in error
    assert [p.name for p in (tmp_path / "dst").iterdir()] == ["kept.txt"]
    reshard(src, tmp_path / "dst", "--tp-out", 2, "--force", "-q")
    assert not (tmp_path / "dst" / "kept.txt").exists()


def test_destination_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "dst").write_text("mine", encoding="utf-8")
    assert "exists" in refused(hf(tmp_path), tmp_path / "dst")
    assert (tmp_path / "dst").read_text(encoding="utf-8") == "mine"


@pytest.mark.parametrize("where", [".", "inside", "inside/.", "../src", "../src/x"])
def test_destination_in_the_source(where: str, tmp_path: Path) -> None:
    src = hf(tmp_path)
    before = sorted(p.name for p in src.iterdir())
    error = refused(src, src / where, "--force")
    assert "DST is inside SRC" in error or "SRC and DST are the same" in error
    assert sorted(p.name for p in src.iterdir()) == before


def test_source_in_the_destination(tmp_path: Path) -> None:
    src = hf(tmp_path)
    assert "SRC is inside DST" in refused(src, tmp_path, "--force")
    assert (src / "model.safetensors").exists()


def test_destination_without_a_parent(tmp_path: Path) -> None:
    assert "does not exist" in refused(hf(tmp_path), tmp_path / "no" / "dst")


def as_somebody_else(*arguments: object) -> tuple[int, str]:
    """Exit code and stderr of a run without root's rights, which would read and write everything."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if not child:
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
            done = ckpttool(*arguments)
            os.write(write_end, f"{done.code} {done.err}".encode())
        finally:
            os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        code, _, err = pipe.read().decode().partition(" ")
    os.waitpid(child, 0)
    return int(code), err


def test_permissions(tmp_path: Path) -> None:
    reshard(hf(tmp_path), tmp_path / "first", "-q")  # loads every module: the other user may not read them
    with tempfile.TemporaryDirectory() as name:
        here = Path(name)
        here.chmod(0o755)
        src = hf(here)
        (here / "locked").mkdir(0o555)
        for locked, words, code in (
            (here / "locked", "is not writable", 1),
            (src / "model.safetensors", "cannot be read", 1),
            (src, "cannot be listed", 2),
        ):
            locked.chmod(0o555 if locked.name == "locked" else 0)
            found, err = as_somebody_else("reshard", src, here / "locked" / "dst")
            locked.chmod(0o755)
            assert (found, words in err, str(locked) in err) == (code, True, True), err
        assert not any((here / "locked").iterdir())


def test_source_that_changes_is_noticed(tmp_path: Path) -> None:
    """Between planning and reading; shown on the parts of the command."""
    from ckpttool.checkpoint import OpenOptions
    from ckpttool.errors import CkptError
    from ckpttool.execute import NoProgress, RunOptions
    from ckpttool.ops.reshard import execute, prepare
    from ckpttool.targeting.target import Target

    src = hf(tmp_path)
    prepared = prepare(src, OpenOptions(), Target(tp=2))
    path = src / "model.safetensors"
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(CkptError, match="chang") as caught:
        execute(prepared, tmp_path / "dst", RunOptions(), NoProgress())
    assert str(path) in caught.value.render()
    assert not (tmp_path / "dst").exists()


def test_header_that_lies_about_its_order_is_fine(tmp_path: Path) -> None:
    """Names need not be in the order of their data."""
    tensors = LLAMA.tensors()
    (tmp_path / "src").mkdir()
    data = encode(tensors, {"format": "pt"}, order=sorted(tensors, reverse=True))
    (tmp_path / "src" / "model.safetensors").write_bytes(data)
    reshard(tmp_path / "src", tmp_path / "dst", "-q")
    assert read(tmp_path / "dst" / "model.safetensors").keys() == tensors.keys()


@pytest.mark.parametrize(
    ("name", "config", "error"),
    [
        ("qwen3_moe", {"num_key_value_heads": 4}, "they are not as long as 8 `heads` and 4 `kv_heads`"),
        ("qwen3_moe", {"num_key_value_heads": None}, "they are not as long as 8 `heads` and 8 `kv_heads`"),
        (  # its query has a gate beside it
            "qwen3_moe",
            {"model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"]},
            "they are not as long as 16 `gated_heads` and 2 `kv_heads`",
        ),
        ("qwen3_moe", {"num_experts": 4}, "holds 6 experts, config.json says 4"),
    ],
)
def test_a_config_that_is_not_that_of_the_tensors(
    tmp_path: Path, name: str, config: dict[str, object], error: str
) -> None:
    """What is fused or stacked is cut by the sizes of the config alone, and its reader takes it apart by them."""
    model = MODELS[name]
    source = save_hf(tmp_path / "src", model.tensors(), {**model.config, **config})
    assert error in refused(source, tmp_path / "dst", "--to", "vllm", "--tp-out", 2)
    assert not (tmp_path / "dst").exists()
