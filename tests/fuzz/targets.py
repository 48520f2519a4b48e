"""One entry for each reader: bytes that may be anything, given to it as a file, and an independent reader's answer.

A target returns when the reader answered or refused with a CkptError. Whatever else it raises is a finding.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import shutil
import struct
import tempfile
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ckpttool.adapters.peft import adapter
from ckpttool.aoa import apply_aoa, read_aoa
from ckpttool.checkpoint import OpenOptions, open_checkpoint
from ckpttool.containers.json_stream import JsonError, JsonStream
from ckpttool.containers.pickle_imports import UNKNOWN, named
from ckpttool.containers.safetensors import examine, read_header
from ckpttool.core import patterns as select
from ckpttool.core.catalog import Catalog, Key
from ckpttool.core.geometry import whole
from ckpttool.core.patterns import matching
from ckpttool.errors import CkptError
from ckpttool.execute import NoProgress
from ckpttool.execute.compare import read_tensor
from ckpttool.execute.journal import Journal, sealed
from ckpttool.formats.paddle.pdiparams import match_records
from ckpttool.formats.paddle.pdmodel import read_pdmodel
from ckpttool.formats.paddle.pir import read_pir
from ckpttool.formats.torch.prefixes import strip_prefixes
from ckpttool.layout.family import load_family
from ckpttool.ops.inspect.check import check
from ckpttool.planning.relate import rename_by_rules
from ckpttool.quant.coded import find_codes
from ckpttool.quant.config import config_scheme
from ckpttool.recipe.mergekit import read_mergekit
from ckpttool.recipe.paddle import read_paddle
from ckpttool.vocabulary.read import read_vocabulary
from tests.fuzz.damage_torch import pickle_change, pickle_of, with_pickle
from tests.fuzz.harness import Answers, read
from tests.fuzz.naive import flex, library, pickled, program
from tests.fuzz.naive_torch import (
    bytecheckpoint,
    dcp,
    deepspeed,
    fsdp,
    megatron,
    megatron_dist,
    meta,
    one_file,
    trained,
    universal,
)
from tests.fuzz.subjects import FIXTURES, made, small_dcp, small_megatron, tree
from tests.fuzz.trees import change
from tests.helpers import gguf
from tests.helpers.aoa import table, tensor
from tests.helpers.tensorfile import Raw
from tests.helpers.torch_save import torch_save

Mutator = Callable[[bytes, random.Random], bytes]

NAMES = [
    "model.embed_tokens.weight",
    "model.layers.0.mlp.up_proj.weight",
    "model.layers.10.norm.weight",
    "lm_head.weight",
]


class Target(NamedTuple):
    """What is run on an input, what to begin with, and how inputs are changed besides as bytes."""

    run: Callable[[bytes], None]
    seeds: tuple[bytes, ...]
    words: tuple[bytes, ...] = ()
    mutate: Mutator | None = None


class _Folder:
    """A directory of which one file is rewritten for each input."""

    def __init__(self, name: str, source: str = "") -> None:
        self.root = Path(tempfile.mkdtemp(prefix="ckpttool-fuzz-"))
        if source:
            shutil.copytree(FIXTURES / source, self.root, dirs_exist_ok=True)
        self.path = self.root / name

    def __call__(self, data: bytes) -> Path:
        self.path.write_bytes(data)
        return self.path


def _agree(got: Answers, naive: Callable[[Path], Answers], folder: Path) -> None:
    """What ckpttool reads is what the other reader reads."""
    said_ = naive(folder)
    if wrong := [k for k in got if said_.get(k) != got[k]]:
        raise AssertionError(f"the other reader says otherwise of {wrong[:3]}")


# -- containers


def _safetensors() -> Target:
    folder = _Folder("model.safetensors")

    def run(data: bytes) -> None:
        path = folder(data)
        examine(path)
        head = read_header(path)
        held = library(data)
        if held.keys() != {t.name for t in head.tensors}:
            raise AssertionError("the library has other names")
        for t in head.tensors:
            there = held[t.name]
            if there.shape != t.shape or data[t.offset : t.offset + t.nbytes] != there.data or there.dtype != t.dtype:
                raise AssertionError(f"the library says otherwise of {t.name!r}")

    def mutate(data: bytes, rng: random.Random) -> bytes:
        with suppress(ValueError, struct.error):
            (size,) = struct.unpack("<Q", data[:8])
            text = change(data[8 : 8 + size], rng)
            return struct.pack("<Q", len(text)) + text + data[8 + size :]
        return data

    entry = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
    seeds = []
    for header, payload in (
        ({"a": entry}, 24),
        ({"b": entry, "a": {"dtype": "BF16", "shape": [], "data_offsets": [24, 26]}}, 26),
        ({"__metadata__": {"format": "pt"}, "e": {"dtype": "U8", "shape": [0, 4], "data_offsets": [0, 0]}}, 0),
        ({"f": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}, "g": entry | {"data_offsets": [2, 26]}}, 26),
    ):
        text = json.dumps(header).encode()
        seeds.append(struct.pack("<Q", len(text)) + text + bytes(range(payload)))
    words = (b'"dtype"', b'"shape"', b'"data_offsets"', b'"__metadata__"', b"F8_E4M3", b"I64", b"18446744073709551616")
    return Target(run, tuple(seeds), words, mutate)


def _index() -> Target:
    folder = _Folder("model.safetensors.index.json", "merge/inputs/base")

    def run(data: bytes) -> None:
        folder(data)
        _agree(read(folder.root, {}), _all_shards, folder.root)

    return Target(
        run, (folder.path.read_bytes()[:4000], _small_index(folder)), (b'"weight_map"', b"../", b"null"), change
    )


def _small_index(folder: _Folder) -> bytes:
    held = json.loads(folder.path.read_bytes())
    few = dict(list(held["weight_map"].items())[:4])
    return json.dumps({"metadata": {"total_size": 1}, "weight_map": few}).encode()


def _all_shards(folder: Path) -> Answers:
    out: Answers = {}
    for path in folder.glob("*.safetensors"):
        out |= {n: (t.shape, t.data) for n, t in library(path.read_bytes()).items()}
    return out


def _pickle() -> Target:
    folder = _Folder("model.pdparams")

    def run(data: bytes) -> None:
        folder(data)
        _agree(read(folder.root, {}), pickled, folder.root)

    seeds = [(FIXTURES / "paddle_pickles" / n).read_bytes() for n in ("static_state.pdparams",)]
    seeds += [(FIXTURES / "paddle_pickles" / n).read_bytes() for n in ("scheduler.pdparams", "model_proto2.pdparams")]
    words = (b"\x8c\x05numpy\x94", b"\x93", b"R", b"\x85", b"\x86", b"\x87", b"\x94", b"h\x00", b"b", b"C\x04", b"\x95")
    return Target(run, tuple(seeds), words)


def _torch() -> Target:
    folder = _Folder("pytorch_model.bin")

    def run(data: bytes) -> None:
        folder(data)
        _torch_agrees(read(folder.root, {}), one_file, folder.root)

    files = ("hostile/zip_slip.bin", "hostile/legacy_system.bin", "strided/pytorch_model.bin", "train/step3.pth")
    words = (b"PK\x01\x02", b"PK\x05\x06", b"PK\x06\x07", b"ctorch._utils\n_rebuild_tensor_v3\n", b"Q", b"tR", b"\x8f")
    return Target(run, tuple([(FIXTURES / "torch" / n).read_bytes() for n in files]), words)


ZERO = (
    "global_step3/zero_pp_rank_0_mp_rank_00_model_states.pt",
    "global_step3/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
)
ZERO1 = (
    "global_step3/mp_rank_00_model_states.pt",
    "global_step3/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
)
UNIVERSAL = (
    "global_step3_universal/mp_rank_00_model_states.pt",
    "global_step3_universal/zero/head.weight/fp32.pt",
    "global_step3_universal/zero/head.weight/step.pt",
    "global_step3_universal/zero/optimizer_state.pt",
    "latest_universal",
)
TORCH_WORDS = (
    b"PK\x01\x02",
    b"ctorch\nFloatStorage\n",
    b"Q",
    b"tR",
    b"K\x00",
    b"\x88",
    b"\x89",
    b"N",
    b"\x86",
    b"\x85",
)


def _torch_agrees(got: Answers, naive: Callable[[Path], Answers], folder: Path) -> None:
    """What is read is what the other reader reads; that one does not read all that there is, and guesses no names."""
    try:
        said_ = naive(folder)
    except Exception:  # noqa: BLE001 - it fails as it likes
        return
    if wrong := [k for k in got if k in said_ and said_[k] != got[k]]:
        raise AssertionError(f"the other reader says otherwise of {wrong[:3]}")


def _torch_part(
    make_folder: Callable[[Path], None], naive: Callable[[Path], Answers], *names: str
) -> Callable[[], Target]:
    """Files of a checkpoint of torch's trainers, of which any may have been changed: the first byte says which.

    With its highest bit the bytes behind are the pickle of the file, which gets a true checksum; or else the file.
    """

    def make() -> Target:
        folder = _Folder(names[0])
        make_folder(folder.root)
        sound = [(folder.root / n).read_bytes() for n in names]

        def run(data: bytes) -> None:
            at = (data[0] & 127) % len(names) if data else 0
            path, new = folder.root / names[at], data[1:]
            if data and data[0] & 128 and sound[at][:2] == b"PK":
                new = with_pickle(sound[at], new)
            try:
                path.write_bytes(new)
                _torch_agrees(read(folder.root, {}), naive, folder.root)
            finally:
                path.write_bytes(sound[at])

        seeds = [bytes([i]) + data for i, data in enumerate(sound)]
        seeds += [bytes([i | 128]) + pickle_of(data) for i, data in enumerate(sound) if data[:2] == b"PK"]
        return Target(run, tuple(seeds), TORCH_WORDS, _pickle_part)

    return make


def _pickle_part(data: bytes, rng: random.Random) -> bytes:
    return data[:1] + pickle_change(data[1:], rng)


def _optimizer() -> Target:
    folder = _Folder("optimizer.pt")
    shapes = {"b.weight": (3, 4), "b.bias": (4,), "a.weight": (3, 4)}
    torch_save({n: np.zeros(s, "<f4") for n, s in shapes.items()}, folder.root / "pytorch_model.bin")
    states = {i: {"step": 3, "exp_avg": np.zeros(s, "<f4")} for i, s in enumerate(shapes.values())}
    named = {"lr": 0.1, "params": [0, 1, 2], "param_names": [*shapes]}
    by_name = {f"state.{n}.exp_avg": np.zeros(s, "<f4") for n, s in shapes.items()}
    values = (
        {"state": states, "param_groups": [{"lr": 0.1, "params": [0]}, {"lr": 0.1, "params": [1, 2]}]},
        {"state": states, "param_groups": [named]},
        by_name | {f"param_groups.{n}.lr": 0.1 for n in shapes},
    )
    seeds = [torch_save(v, folder.path).read_bytes() for v in values]
    named_states = trained("pytorch_model.bin", "optimizer.pt")

    def run(data: bytes) -> None:
        with_own = bool(data) and data[:2] != b"PK"
        folder(with_pickle(seeds[1], data) if with_own else data)
        answers = read(folder.root, {})
        if any(n.startswith("optimizer/") and n.split("/")[1] not in shapes for n in answers):
            raise AssertionError("a state of no parameter")
        _torch_agrees(answers, named_states, folder.root)

    words = (*TORCH_WORDS, b"param_names", b"state", b"params", b"exp_avg_sq_row")
    return Target(run, (*seeds, *map(pickle_of, seeds)), words, pickle_change)


def _prefixes() -> Target:
    """Whatever names are: each becomes one that no other becomes, and without its wrappers and what is in front."""

    def run(data: bytes) -> None:
        names = data.decode("utf-8", "surrogateescape").split("\n")
        mapping, _ = strip_prefixes(names)
        if mapping.keys() != set(names) or len(set(mapping.values())) != len(mapping):
            raise AssertionError("two names became one")
        if strip_prefixes(mapping.values())[0] != {n: n for n in mapping.values()}:
            raise AssertionError("a second time takes more away")

    seeds = (
        b"module._orig_mod.model.embed_tokens.weight\nmodule._orig_mod.model.norm.weight\nmodule.lm_head.weight",
        b"base_model.model.model.embed_tokens.weight\nbase_model.model.model.layers.0.q.lora_A.weight",
    )
    words = (b"module.", b"_orig_mod.", b"_fsdp_wrapped_module.", b"model.", b"embed_tokens.weight", b"\n", b"lora_")
    return Target(run, seeds, words)


def _imports() -> Target:
    """Whatever the bytes are, the names are told; a name that CPython would look up first is among them."""
    folder = _Folder("x.pkl")

    class Looked(pickle._Unpickler):  # the one in C hangs on memos of any number
        def find_class(self, module: str, name: str) -> Any:
            raise LookupError(f"{module}.{name}")

        def persistent_load(self, pid: Any) -> Any:
            return str(pid)

    def blob(it: Any) -> None:  # CPython's own makes room for as many bytes as are said
        it.append(bytearray(it.read(int.from_bytes(it.read(8), "little"))))

    Looked.dispatch = {**Looked.dispatch, pickle.BYTEARRAY8[0]: blob}

    def run(data: bytes) -> None:
        path = folder(data)
        told = {n.name for n in named(path)}
        if data[:4] == b"PK\x03\x04" or UNKNOWN in told:
            return
        try:
            Looked(io.BytesIO(data)).load()
        except LookupError as e:
            if type(e) is LookupError and str(e) not in told:
                raise AssertionError(f"{e} is not told") from None
        except Exception:  # noqa: BLE001, S110 - what is no pickle fails in many ways
            pass

    seeds = [pickle.dumps({"a": [Path("x"), 2.5, b"y" * 70], "b": "text"}, n) for n in (0, 2, 4, 5)]
    seeds.append((FIXTURES / "torch/hostile/legacy_system.bin").read_bytes())
    return Target(
        run, tuple(seeds), (b"\x93", b"cos\nsystem\n", b"\x8c\x02os", b"\x94", b"h\x00", b"1", b"0", b"2", b"i")
    )


def _flex() -> Target:
    folder = _Folder("0.metadata", "paddle_flex/dist_tensor")

    def run(data: bytes) -> None:
        folder(data)
        _agree(read(folder.root, {"raw": True}), flex, folder.root)

    words = (b"global_offset", b"local_shape", b"flattened_range", b"is_flattened", b"\x88", b"\x89", b"K\x00", b"N")
    return Target(run, (folder.path.read_bytes(),), words)


def _pdmodel() -> Target:
    folder = _Folder("model.pdmodel", "paddle_programs/legacy")
    (folder.root / "model.pdiparams.info").unlink()

    def run(data: bytes) -> None:
        read_pdmodel(folder(data))
        _agree(read(folder.root, {}), program, folder.root)

    return Target(run, (folder.path.read_bytes(),), (b"\x18\x01", b"\x08\x07", b"\x12\x00"))


def _pir() -> Target:
    folder = _Folder("model.json", "paddle_programs/pir")

    def run(data: bytes) -> None:
        read_pir(folder(data))
        _agree(read(folder.root, {}), program, folder.root)

    return Target(run, (folder.path.read_bytes(),), (b'"TT"', b'"0.t_dtensor"', b'"regions"', b'"p"', b'"%"'), change)


def _pdiparams() -> Target:
    folder = _Folder("model.pdiparams", "paddle_programs/pir")

    def run(data: bytes) -> None:
        path = folder(data)
        match_records(read_pir(folder.root / "model.json"), path)
        _agree(read(folder.root, {}), program, folder.root)

    return Target(run, (folder.path.read_bytes(),), (b"\x08\x05\x10", struct.pack("<IQIi", 0, 0, 0, 4)))


def _gguf() -> Target:
    folder = _Folder("model.gguf")

    def run(data: bytes) -> None:
        folder(data)
        found = open_checkpoint(folder.root)
        there = gguf.decode(data)
        for t in found.catalog:
            held = there[t.key.name]
            with np.errstate(all="ignore"):
                same = read_tensor(found.catalog, t, whole(t.shape)).tobytes() == held.bits.tobytes()
            if not same or t.shape != held.bits.shape or t.dtype != held.dtype:
                raise AssertionError(f"the file says otherwise of {t.key.name!r}")

    bits = np.arange(64, dtype=np.uint16).reshape(2, 32)
    tensors: dict[str, Raw | gguf.Blocks] = {
        "a": Raw("BF16", bits),
        "b": gguf.Blocks(bits.view(np.float16)[0, :2], bits.astype(np.int8)),
    }
    keys = {"general.architecture": "x", "x.many": [1, 2], "x.text": ["a", "bc"], "general.alignment": 32}
    return Target(run, (gguf.encode(keys, tensors), gguf.encode({}, {}, version=2)), (b"GGUF", struct.pack("<Q", 2)))


def _json_stream() -> Target:
    def run(data: bytes) -> None:
        try:
            stream = JsonStream(io.BytesIO(data), chunk=16)
            got = _walk(stream)
            stream.end()
        except (JsonError, RecursionError):
            return
        except UnicodeDecodeError:
            raise AssertionError("no JsonError") from None
        if got != json.loads(data.decode("utf-8-sig")):
            raise AssertionError("json reads something else")

    seeds = (b'{"a": [1, 2.5, "x"], "b": {"c": [{"d": 1}, {"d": 2}]}}', b'[["\\ud83d\\ude00", 1e5, true], null, -0.0]')
    return Target(run, seeds, (b"\\ud800", b"1e400", b"NaN", b"\xef\xbb\xbf"), change)


def _walk(stream: JsonStream) -> Any:
    """The value, in one of the ways that the readers go through a text."""
    if stream.starts("{"):
        return {name: _walk(stream) for name in stream.names()}
    if stream.starts("["):
        near = stream.ahead()
        return near[0] if near else [v for batch in stream.batches() for v in batch]
    return stream.value()


# -- what people write


def _read_by(name: str, reader: Callable[[Path], object], *seeds: bytes, mutate: Mutator | None = None) -> Target:
    folder = _Folder(name)

    def run(data: bytes) -> None:
        reader(folder(data))

    return Target(run, seeds, mutate=mutate)


def _mergekit() -> Target:
    configs = sorted((FIXTURES / "merge" / "configs").glob("*.yml"))
    seeds = [p.read_bytes().replace(b"./inputs/", str(FIXTURES / "merge/inputs").encode() + b"/") for p in configs]
    return _read_by("recipe.yml", read_mergekit, *seeds)


def _merge_config() -> Target:
    text = (FIXTURES / "merge_paddle/merged/pf_f32_pd_ties_sum/merge_config.json").read_bytes()
    text = text.replace(b"models/", str(FIXTURES / "merge_paddle/models").encode() + b"/")
    return _read_by("merge_config.json", read_paddle, text, mutate=change)


def _aoa() -> Target:
    views = table({n: np.zeros((4, 6)) for n in NAMES})

    def reader(path: Path) -> object:
        return apply_aoa(views, read_aoa(path))

    seeds = (
        b"model.embed_tokens.weight -> e\nmodel.layers.$LAYER_ID.norm.weight^T -> l.$LAYER_ID.n\nlm_head.weight -> _\n",
        b"model.embed_tokens.weight, lm_head.weight -> both, axis=1\nboth -> a, b, axis=0\n",
        b'{"aoa_statements": ["lm_head.weight -> x, dtype=float16"], "aoa_config_reverse": false}',
    )
    target = _read_by("rules.txt", reader, *seeds)
    return target._replace(words=(b"$LAYER_ID", b"^T", b"permute=[1,0]", b"axis=", b"fused_qkv, num_heads=2", b"->"))


def _patterns() -> Target:
    def run(data: bytes) -> None:
        matching([data.decode("utf-8", "surrogateescape")], NAMES, option="--remove-keys")

    return Target(
        run, (b"model.*", b"*.{0,1}.[mn]*", b"re:layers\\.(\\d+)", b"re:(a+)+$"), (b"re:", b"{0..3}", b"(?i)")
    )


def _renames() -> Target:
    def run(data: bytes) -> None:
        rename_by_rules(table({n: np.zeros(2) for n in NAMES}), [data.decode("utf-8", "surrogateescape")])

    return Target(run, (b"model.*=m.*", b"re:model\\.(.*)=\\1.x", b"*.*=*.*.*"), (b"\\g<1>", b"\\99", b"re:", b"=*"))


def _peft() -> Target:
    shapes = {"q_proj.lora_A.weight": (2, 4), "q_proj.lora_B.weight": (4, 2)}
    made = [tensor(f"base_model.model.model.layers.0.self_attn.{n}", s) for n, s in shapes.items()]
    catalog = Catalog([], {Key(t.key.name): t for t in made})
    seed = (FIXTURES / "merge/inputs/lora1/adapter_config.json").read_bytes()
    return Target(_on_config(lambda config: adapter("x", config, catalog)), (seed,), (), change)


def _on_config(reader: Callable[[Mapping[str, Any]], object]) -> Callable[[bytes], None]:
    """A reader of configs that are JSON already."""

    def run(data: bytes) -> None:
        try:
            config = json.loads(data)
        except (ValueError, RecursionError):
            return
        if isinstance(config, dict):
            reader(config)

    return run


def _quant() -> Target:
    held = {"a.weight": ("F8_E4M3", (256, 128)), "a.weight_scale_inv": ("F32", (2, 1)), "b.weight": ("BF16", (4, 4))}

    def reader(config: Mapping[str, Any]) -> None:
        try:
            config_scheme(config)
        finally:
            find_codes(held, config)

    seeds = [p.read_bytes() for p in sorted((FIXTURES / "fp8/formats").glob("*/config.json"))]
    return Target(_on_config(reader), tuple(seeds), (), change)


def _journal() -> Target:
    folder = _Folder(".journal")

    def run(data: bytes) -> None:
        path = folder(data)
        fd = os.open(path, os.O_RDWR)
        try:
            found = Journal(fd, str(path)).load("00ff", 20)
        finally:
            os.close(fd)
        if not found.parts <= {*range(17), 18, 19}:
            raise AssertionError("parts that no run has said to be done")

    head = '{"journal": 2, "plan": "00ff", "parts": 20}'
    lines = ['{"done":[[0,17],[18,20]],"sums":{"3.0":"aa"}}', '{"done":[[1,2]]}']
    seeds = ("\n".join([head, *map(sealed, lines), ""]).encode(), head.encode() + b"\n")
    return Target(run, seeds, (b'"sums"', b'"done"', b"[[0,20]]"))


def _family() -> Target:
    config = json.loads((FIXTURES / "hf_tiny_source/config.json").read_bytes())
    text = (Path(__file__).parents[2] / "ckpttool/layout/families/llama.yaml").read_bytes()
    return _read_by("own.yaml", lambda path: load_family(str(path), config), text)


def _tokenizer() -> Target:
    folder = _Folder("tokenizer.json", "merge/inputs/tokA")

    def run(data: bytes) -> None:
        folder(data)
        read_vocabulary(folder.root)

    return Target(run, (folder.path.read_bytes(),), (b'"added_tokens"', b'"vocab"', b'"id"'), change)


def _manifest() -> Target:
    folder = _Folder("ckpttool.manifest.json", "merge/inputs/tokA")

    def run(data: bytes) -> None:
        folder(data)
        check(folder.root, OpenOptions(), NoProgress())

    tensors = dict.fromkeys(library((folder.root / "model.safetensors").read_bytes()), "0" * 16)
    text = {"version": 1, "algorithm": "xxh3_128", "files": {"model.safetensors": 7224}}
    return Target(run, (json.dumps(text | {"tensors": {"model.safetensors": tensors}}).encode(),), (), change)


TARGETS: dict[str, Callable[[], Target]] = {
    "safetensors": _safetensors,
    "index": _index,
    "pickle": _pickle,
    "torch": _torch,
    "dcp": _torch_part(tree("dcp/uneven/checkpoint"), dcp("model."), ".metadata", "__0_0.distcp"),
    "dcp state": _torch_part(small_dcp, dcp("model."), ".metadata", "__1_0.distcp"),
    "megatron-dist": _torch_part(small_megatron, megatron_dist(13, 4), ".metadata", "__0_0.distcp", "metadata.json"),
    "megatron": _torch_part(
        made("megatron/dist/llama_tp2", "--to", "megatron", "--only", "model", "--target", "local"),
        megatron(131),
        "release/mp_rank_00/model_optim_rng.pt",
        "latest_checkpointed_iteration.txt",
    ),
    "bytecheckpoint": _torch_part(
        tree("bytecheckpoint/fsdp2"), bytecheckpoint, "model/.metadata", "optimizer/.metadata", "optimizer/__0_0.distcp"
    ),
    "fsdp 1": _torch_part(
        tree("torch_fsdp/fsdp1"), fsdp, "model_world_size_2_rank_1.pt", "optim_world_size_2_rank_0.pt"
    ),
    "fsdp tp": _torch_part(
        tree("torch_fsdp/tp_fsdp"), fsdp, "model_world_size_4_rank_1.pt", "optim_world_size_4_rank_0.pt"
    ),
    "deepspeed": _torch_part(tree("torch/deepspeed/z3"), deepspeed, *ZERO, "latest"),
    "zero 1": _torch_part(tree("torch/deepspeed/z1"), deepspeed, *ZERO1),
    "universal": _torch_part(tree("torch/deepspeed/universal_z1"), universal, *UNIVERSAL),
    "meta": _torch_part(
        made("merge/inputs/base", "--to", "meta", "--tp-out", 2), meta, "params.json", "consolidated.01.pth"
    ),
    "gguf": _gguf,
    "prefixes": _prefixes,
    "optimizer": _optimizer,
    "imports": _imports,
    "flex": _flex,
    "pdmodel": _pdmodel,
    "pir": _pir,
    "pdiparams": _pdiparams,
    "json stream": _json_stream,
    "mergekit": _mergekit,
    "merge_config": _merge_config,
    "aoa": _aoa,
    "patterns": _patterns,
    "renames": _renames,
    "peft": _peft,
    "quant": _quant,
    "journal": _journal,
    "family": _family,
    "tokenizer": _tokenizer,
    "manifest": _manifest,
}


def guarded(target: Target) -> Callable[[bytes], None]:
    """The target with refusals taken for answers; warnings are findings."""
    warnings.simplefilter("error")
    select.PATIENCE = 2.0  # libFuzzer's own patience is to be the longer one on a busy machine, too

    def run(data: bytes) -> None:
        with suppress(CkptError):
            target.run(data)

    return run
