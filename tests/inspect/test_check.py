"""Every identifier of ``inspect --check`` has a checkpoint that is broken in that way, and in no other."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from ckpttool.answers.findings import CHECKPOINT, ERROR, INFO, WARNING
from ckpttool.containers.torch_zip import read_torch
from tests.helpers.command import ckpttool, reshard
from tests.helpers.dcp import Boxes, rows, write_save
from tests.helpers.tensorfile import Raw, header, origin, read, write
from tests.helpers.torch_save import torch_save
from tests.inspect.models import (
    CONFIG,
    FIRST,
    FP8_CONFIG,
    INDEX,
    SECOND,
    edit_header,
    edit_json,
    flip,
    fp8_llama,
    header_text,
    llama,
    place,
    replace_header,
    save_json,
    save_shards,
)
from tests.inspect.test_widths import on_terminal

Break = Callable[[Path], object]
NORM, HEAD, EMBED = "model.norm.weight", "lm_head.weight", "model.embed_tokens.weight"
DOWN = "model.layers.1.mlp.down_proj.weight"
RANK0, RANK1 = "rank-00000-of-00002.safetensors", "rank-00001-of-00002.safetensors"


# -- sound checkpoints


def shards(folder: Path) -> None:
    save_shards(folder, llama(), CONFIG)


def fp8(folder: Path) -> None:
    save_shards(folder, fp8_llama(), FP8_CONFIG)


def ranks(folder: Path) -> None:
    """Two ranks with replicas, and with padding: the vocabulary is odd."""
    source = folder.with_name(folder.name + "-source")
    tensors = {n: t if n not in (EMBED, HEAD) else Raw(t.dtype, t.bits[:31]) for n, t in llama().items()}
    save_shards(source, tensors, {**CONFIG, "vocab_size": 31})
    reshard(source, folder, "--to", "ranks", "--tp-out", 2)


def foreign(folder: Path) -> None:
    """The files of two ranks under somebody else's names."""
    ranks(folder)
    for r in range(2):
        old = folder / f"rank-{r:05d}-of-00002.safetensors"
        edit_header(old, lambda h: h.pop("__metadata__"))
        old.rename(folder / f"model_rank{r}.safetensors")


def proven(folder: Path) -> None:
    """A checkpoint with a manifest."""
    source = folder.with_name(folder.name + "-source")
    save_shards(source, llama(), CONFIG)
    reshard(source, folder, "--to", "hf", "--manifest", "--max-shard-size", "6kB")


def adapter(folder: Path) -> None:
    shutil.copytree("fixtures/merge/inputs/lora1", folder)


def trained(folder: Path) -> None:
    """Weights of bfloat16, and their masters."""
    reshard("fixtures/torch/deepspeed/z1", folder, "--to", "ranks", "--tp-out", 1)


def stepping(folder: Path) -> None:
    """An optimizer whose steps are tensors."""
    reshard("fixtures/torch_fsdp/uneven", folder, "--to", "ranks", "--tp-out", 1)


def eight(folder: Path) -> None:
    """Ranks whose files say nothing of themselves."""
    shutil.copytree("fixtures/llama_tp8", folder)


def torch_files(folder: Path) -> None:
    """As torch wrote them, with checksums."""
    shutil.copytree("fixtures/torch/sharded", folder)


Chunks = dict[str, tuple[str, tuple[int, ...], Boxes]]


def chunks() -> Chunks:
    """What two ranks of FSDP hold."""
    return {n: (t.dtype, t.bits.shape, rows(t.bits.shape, 2)) for n, t in llama().items()}


def dcp(folder: Path) -> None:
    write_save(folder, chunks())
    save_json(folder / "config.json", CONFIG)


def run(folder: Path) -> None:
    """A trainer's directory above its saves."""
    for step in (1, 2):
        dcp(folder / f"step-{step}")
    (folder / "latest").write_text("step-1")


def bins(folder: Path) -> None:
    """Shards of torch.save, with an index."""
    source = folder.with_name(folder.name + "-source")
    save_shards(source, llama(), CONFIG)
    reshard(source, folder, "--to", "torch-bin", "--max-shard-size", "6kB")


def metas(folder: Path) -> None:
    """Meta's files of two ranks."""
    source = folder.with_name(folder.name + "-source")
    save_shards(source, llama(), CONFIG)
    reshard(source, folder, "--to", "meta", "--tp-out", 2)


BASES = (shards, fp8, ranks, foreign, proven, adapter, dcp, run, bins, metas)


# -- ways to break them


class Case(NamedTuple):
    base: Callable[[Path], None]
    broken: Break
    also: tuple[str, ...] = ()
    """Findings that come with it by their nature."""
    values: bool = False


def file(name: str, change: Callable[[dict[str, Any]], object], more: bytes = b"") -> Break:
    """Change a header."""
    return lambda folder: edit_header(folder / name, change, more=more)


def config(**fields: object) -> Break:
    """Change config.json; None removes a field."""

    def change(data: dict[str, Any]) -> None:
        for key, value in fields.items():
            data.pop(key) if value is None else data.update({key: value})

    return lambda folder: edit_json(folder / "config.json", change)


def index(change: Callable[[dict[str, Any]], object]) -> Break:
    return lambda folder: edit_json(folder / INDEX, change)


def both(*steps: Break) -> Break:
    def broken(folder: Path) -> None:
        for step in steps:
            step(folder)

    return broken


def drop(*names: str) -> Break:
    """Leave tensors out of files, index and total size."""

    def broken(folder: Path) -> None:
        total = 0
        for path in folder.glob("*.safetensors"):
            left = {n: t for n, t in read(path).items() if n not in names}
            total += sum(t.bits.nbytes for t in left.values())
            write(path, left)
        edit_json(folder / INDEX, lambda d: [d["weight_map"].pop(n) for n in names])
        edit_json(folder / INDEX, lambda d: d["metadata"].update(total_size=total))

    return broken


def put(name: str, raw: Raw, into: str = SECOND) -> Break:
    """Write a tensor anew in that file; the index follows."""

    def broken(folder: Path) -> None:
        total = 0
        for path in folder.glob("*.safetensors"):
            tensors = read(path)
            tensors.pop(name, None)
            if path.name == into:
                tensors[name] = raw
            total += sum(t.bits.nbytes for t in tensors.values())
            write(path, tensors)
        edit_json(folder / INDEX, lambda d: d["weight_map"].update({name: into}))
        edit_json(folder / INDEX, lambda d: d["metadata"].update(total_size=total))

    return broken


def copy(name: str, new: str, *, rename_only: bool = False) -> Break:
    def broken(folder: Path) -> None:
        data = (folder / name).read_bytes()
        if rename_only:
            (folder / name).unlink()
        (folder / new).write_bytes(data)

    return broken


def stretch(header: dict[str, Any]) -> None:
    """Move the last tensor 4 bytes back."""
    last = max((e for n, e in header.items() if n != "__metadata__"), key=lambda e: e["data_offsets"][1])
    last["data_offsets"] = [n + 4 for n in last["data_offsets"]]


def pile(header: dict[str, Any]) -> None:
    """Put the last tensor where the first one is; what it leaves free is behind the last, and cut off below."""
    entries = sorted((e for n, e in header.items() if n != "__metadata__"), key=lambda e: e["data_offsets"])
    first, last = entries[0]["data_offsets"], entries[-1]["data_offsets"]
    entries[-1]["data_offsets"] = [first[0], first[0] + last[1] - last[0]]


def pile_up(folder: Path) -> None:
    path = folder / SECOND
    before = {n: e for n, e in json.loads(header_text(path)).items() if n != "__metadata__"}
    last = max(before.values(), key=lambda e: e["data_offsets"][1])["data_offsets"]
    edit_header(path, pile)
    path.write_bytes(path.read_bytes()[: last[0] - last[1]])


def twice(folder: Path) -> None:
    text = header_text(folder / SECOND).decode()
    entry = json.dumps(json.loads(text)[NORM])
    replace_header(folder / SECOND, (text.rstrip().removesuffix("}") + f', "{NORM}": {entry}}}').encode())


def record(change: Callable[[dict[str, Any]], object], name: str = RANK1) -> Break:
    """Change what a rank file says about itself."""

    def edit(header: dict[str, Any]) -> None:
        rec = json.loads(header["__metadata__"]["ckpttool"])
        change(rec)
        header["__metadata__"]["ckpttool"] = json.dumps(rec)

    return file(name, edit)


def manifest(change: Callable[[dict[str, Any]], object]) -> Break:
    return lambda folder: edit_json(folder / "ckpttool.manifest.json", change)


def forget_tensor(data: dict[str, Any]) -> None:
    tensors = next(iter(data["tensors"].values()))
    tensors.pop(next(iter(tensors)))


def spoil(name: str, tensor: str, which: int = 0) -> Break:
    return lambda folder: flip(folder / name, place(folder / name, tensor)[which])


def swap(data: dict[str, Any]) -> None:
    data["weight_map"][NORM] = FIRST


def scale(value: float) -> Raw:
    return Raw("F32", np.full((2, 3), np.float32(value).view(np.uint32), np.uint32))


def no_scales(folder: Path) -> None:
    """FP8 that was cast and not quantized."""
    both(drop(*(n for n in fp8_llama() if n.endswith("_scale_inv"))), config(quantization_config=None))(folder)


def python(folder: Path) -> None:
    (folder / "modeling_x.py").write_text("raise SystemExit")


def fill(name: str, bits: int, at: int | None = None) -> Break:
    """Set one element of a tensor, or all of them, to these bits."""

    def change(folder: Path) -> None:
        tensors = dict(read(folder / SECOND))
        changed = tensors[name].bits.copy()
        changed.reshape(-1)[slice(None) if at is None else at] = bits
        tensors[name] = Raw(tensors[name].dtype, changed)
        write(folder / SECOND, tensors, {"format": "pt"})

    return change


def cut(*boxes: tuple[tuple[int, ...], tuple[int, ...], int]) -> Break:
    """The chunks of a vector."""
    return lambda folder: write_save(folder, {**chunks(), NORM: ("BF16", (16,), boxes)})


def other_metadata(folder: Path) -> None:
    """Those of a save whose chunks have other sizes, and lie in the same places."""
    dtype, (rows_, columns), _ = chunks()[DOWN]
    turned = columns, rows_
    write_save(folder / "other", {**chunks(), DOWN: (dtype, turned, rows(turned, 2))})
    (folder / "other/.metadata").rename(folder / ".metadata")
    shutil.rmtree(folder / "other")


def two_metadata(folder: Path) -> None:
    """Ranks that each wrote what they say, which is not the same."""
    write_save(folder / "other", {**chunks(), NORM: ("F16", (16,), rows((16,), 2))})
    (folder / "other/.metadata").rename(folder / "__1.metadata")
    (folder / ".metadata").rename(folder / "__0.metadata")
    shutil.rmtree(folder / "other")


def adafactor(folder: Path) -> None:
    state = {0: {"exp_avg_sq_row": np.zeros(3, "<f4"), "exp_avg_sq_col": np.zeros(4, "<f4")}}
    torch_save({"state": state, "param_groups": [{"params": [0]}]}, folder / "optimizer.pt")


def weight_changed(folder: Path) -> None:
    """A bit of a weight in a file of torch.save."""
    path = folder / "pytorch_model-00001-of-00003.bin"
    file = read_torch(path)
    name, tensor = next(iter(file.value.items()))
    flip(path, file.place(tensor, name, 0).offset)


def number_changed(name: str) -> Break:
    """The first element of a tensor of the only file has another last bit."""

    def change(folder: Path) -> None:
        (path,) = folder.glob("*.safetensors")
        tensors = read(path)
        bits = tensors[name].bits.copy()
        bits.reshape(-1)[0] ^= 1
        write(path, {**tensors, name: Raw(tensors[name].dtype, bits)}, header(path)["__metadata__"])

    return change


CASES: dict[str, Case] = {
    "unreadable": Case(shards, lambda _: None),  # the test makes opening fail
    "header-length": Case(shards, lambda f: (f / SECOND).write_bytes(b"\xff" * 7 + (f / SECOND).read_bytes()[7:])),
    "header-utf8": Case(
        shards, lambda f: replace_header(f / SECOND, header_text(f / SECOND).replace(b"norm", b"n\xffrm"))
    ),
    "header-json": Case(shards, lambda f: replace_header(f / SECOND, header_text(f / SECOND)[:-1])),
    "duplicate-key": Case(shards, twice),
    "metadata": Case(shards, file(SECOND, lambda h: h.update(__metadata__={"format": 1}))),
    "entry": Case(shards, file(SECOND, lambda h: h.update(x=5))),
    "dtype": Case(shards, file(SECOND, lambda h: h[NORM].update(dtype="F7"))),
    "shape": Case(shards, file(SECOND, lambda h: h[NORM].update(shape=[-16]))),
    "offsets": Case(shards, file(SECOND, lambda h: h[NORM]["data_offsets"].reverse())),
    "size": Case(shards, file(SECOND, lambda h: h[NORM].update(shape=[15]))),
    "truncated": Case(shards, lambda f: (f / SECOND).write_bytes((f / SECOND).read_bytes()[:-3])),
    "overlap": Case(shards, pile_up),
    "hole": Case(shards, file(SECOND, stretch, b"\0\0\0\0")),
    "trailing": Case(shards, file(SECOND, lambda _: None, b"\0\0\0\0")),
    "shard-missing": Case(shards, lambda f: (f / SECOND).unlink()),
    "shard-numbering": Case(
        shards, both(lambda f: (f / INDEX).unlink(), copy(SECOND, "model-00003-of-00003.safetensors"))
    ),
    "orphan-shard": Case(shards, copy(SECOND, "model-00001-of-00003.safetensors")),
    "no-index": Case(shards, lambda f: (f / INDEX).unlink()),
    "index-json": Case(shards, lambda f: (f / INDEX).write_text("{")),
    "index-shard": Case(shards, index(swap)),
    "index-missing": Case(shards, index(lambda d: d["weight_map"].update(gone=SECOND))),
    "index-extra": Case(shards, index(lambda d: d["weight_map"].pop(NORM))),
    "total-size": Case(shards, index(lambda d: d["metadata"].update(total_size=5))),
    "duplicate-tensor": Case(shards, lambda f: write(f / FIRST, {**read(f / FIRST), NORM: origin(99, "BF16", (16,))})),
    "format": Case(shards, lambda f: [p.rename(p.with_suffix(".bin")) for p in f.glob("*.safetensors*")]),
    "corrupt": Case(ranks, file(RANK1, lambda h: h["__metadata__"].update(ckpttool="{"))),
    "incomplete": Case(ranks, lambda f: (f / RANK1).unlink()),
    "conflict": Case(ranks, record(lambda r: r["mesh"].update(tp=3))),
    "layout": Case(foreign, config(architectures=["Unknown"], model_type="unknown"), ("config-architecture",)),
    "unsupported": Case(ranks, record(lambda r: r.update(version=99))),
    "latest": Case(run, lambda f: (f / "latest").write_text("step-9"), ("config-missing",)),
    "save-unfinished": Case(dcp, lambda f: (f / ".metadata").unlink()),
    "rank-missing": Case(dcp, lambda f: (f / "__1_0.distcp").unlink()),
    "ranks-differ": Case(dcp, two_metadata),
    "chunk-missing": Case(dcp, cut(((0,), (9,), 0))),
    "chunk-overlap": Case(dcp, cut(((0,), (9,), 0), ((8,), (8,), 1))),
    "chunk-size": Case(dcp, other_metadata),
    "params-json": Case(
        metas, lambda f: edit_json(f / "params.json", lambda p: p.update(n_kv_heads=4)), ("config-missing",)
    ),
    "component-refused": Case(shards, adafactor),
    "adapter-kind": Case(adapter, lambda f: edit_json(f / "adapter_config.json", lambda c: c.update(use_dora=True))),
    "remote-code": Case(shards, both(config(auto_map={"AutoModel": "modeling_x.X"}), python)),
    "pickle-code": Case(shards, lambda f: (f / "training_args.bin").write_bytes(pickle.dumps(os.getcwd))),
    "pickle-imports": Case(shards, lambda f: (f / "training_args.bin").write_bytes(pickle.dumps(Decimal()))),
    "scale-missing": Case(fp8, drop(DOWN + "_scale_inv")),
    "scale-orphan": Case(fp8, drop(DOWN)),
    "scale-shape": Case(fp8, put(DOWN + "_scale_inv", Raw("F32", scale(1).bits[:, :2]))),
    "scale-shard": Case(fp8, put(DOWN + "_scale_inv", scale(1), FIRST)),
    "unscaled": Case(fp8, no_scales),
    "config-json": Case(shards, lambda f: (f / "config.json").write_text("[")),
    "config-missing": Case(shards, lambda f: (f / "config.json").unlink()),
    "config-architecture": Case(shards, config(architectures=["Unknown"], model_type="unknown")),
    "config-layers": Case(shards, config(num_hidden_layers=3)),
    "config-extra-layers": Case(shards, config(num_hidden_layers=1)),
    "config-vocab": Case(shards, config(vocab_size=40)),
    "config-vocab-padding": Case(shards, config(vocab_size=20)),
    "config-tie": Case(shards, drop(HEAD)),
    "config-tied-copy": Case(shards, config(tie_word_embeddings=True)),
    "manifest-json": Case(proven, manifest(lambda d: d.update(version=2))),
    "manifest-file": Case(proven, manifest(lambda d: d["files"].update(gone=5))),
    "manifest-size": Case(proven, lambda f: (f / "config.json").write_bytes((f / "config.json").read_bytes() + b"\n")),
    "manifest-tensor": Case(proven, manifest(forget_tensor)),
    "manifest-checksum": Case(proven, lambda f: flip(next(f.glob("model-00002-*")), -1)),
    "replica": Case(ranks, spoil(RANK1, NORM), values=True),
    "padding": Case(ranks, spoil(RANK1, EMBED, 1), values=True),
    "scale-value": Case(fp8, put(DOWN + "_scale_inv", scale(-0.0)), values=True),
    "tied-differ": Case(shards, config(tie_word_embeddings=True), ("config-tied-copy",), values=True),
    "masters-differ": Case(trained, number_changed("head.weight"), ("config-missing",), values=True),
    "member-checksum": Case(torch_files, weight_changed, values=True),
    "steps-differ": Case(stepping, number_changed("optimizer/embed.weight/step"), ("config-missing",)),
    "files-equal": Case(eight, lambda f: shutil.copy(f / "model_tp0.safetensors", f / "model_tp1.safetensors")),
    "nan": Case(shards, fill(DOWN, 0x7FC0, 5), values=True),
    "inf": Case(shards, fill(DOWN, 0xFF80, 5), values=True),
    "zeros": Case(shards, fill(DOWN, 0x8000), values=True),
}


def findings(folder: Path, *options: object) -> tuple[int, list[dict[str, Any]]]:
    done = ckpttool("inspect", folder, "--check", "--json", *options)
    answer = json.loads(done.out)
    assert answer["schema"] == "ckpttool.inspect/1"
    assert answer["ok"] == (done.code == 0)
    return done.code, answer["findings"]


def test_every_identifier_has_a_case() -> None:
    assert CASES.keys() == CHECKPOINT.keys()
    assert set(CHECKPOINT.values()) == {ERROR, WARNING, INFO}


Base = Callable[[Path], None]
CopyOf = Callable[[Base, Path], Path]


@pytest.fixture(scope="module")
def copy_of(tmp_path_factory: pytest.TempPathFactory) -> CopyOf:
    """Copies a sound checkpoint, each of which is made once."""
    made: dict[Base, Path] = {}

    def copied(base: Base, folder: Path) -> Path:
        if base not in made:
            made[base] = tmp_path_factory.mktemp(base.__name__) / "model"
            base(made[base])
        return shutil.copytree(made[base], folder)

    return copied


@pytest.mark.parametrize("base", BASES, ids=lambda b: b.__name__)
def test_nothing_is_found_in_a_sound_checkpoint(base: Base, copy_of: CopyOf, tmp_path: Path) -> None:
    values = () if base in (dcp, run) else ("--values",)  # these hold zeros
    assert findings(copy_of(base, tmp_path / "model"), *values) == (0, [])


@pytest.mark.parametrize("id_", CASES)
def test_finds_what_was_broken_and_nothing_else(
    id_: str, copy_of: CopyOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[id_]
    folder = copy_of(case.base, tmp_path / "model")
    case.broken(folder)
    if id_ == "unreadable":
        deny(monkeypatch, folder / SECOND)
    code, found = findings(folder, *(["--values"] if case.values else []))
    assert {f["id"] for f in found} == {id_, *case.also}, found
    assert {f["severity"] for f in found if f["id"] == id_} == {CHECKPOINT[id_]}
    assert code == (3 if CHECKPOINT[id_] == ERROR else 0)
    assert all(f["text"] for f in found)


def deny(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """Opening this file fails, as it does for a user without permission (root has all)."""
    real = os.open

    def opened(name: Any, *args: Any, **kwargs: Any) -> int:
        if name == path:
            raise PermissionError(13, "Permission denied")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(os, "open", opened)


@pytest.mark.parametrize(
    ("id_", "change"),
    [
        ("total-size", lambda d: d["metadata"].update(total_size=5)),
        ("index-extra", lambda d: d["weight_map"].pop(NORM)),
        ("index-shard", lambda d: d["weight_map"].update({NORM: d["weight_map"][EMBED]})),
        ("incomplete", lambda d: d["weight_map"].update(gone=d["weight_map"][EMBED])),
    ],
)
def test_index_of_torch_files(
    id_: str, change: Callable[[dict[str, Any]], object], copy_of: CopyOf, tmp_path: Path
) -> None:
    folder = copy_of(bins, tmp_path / "model")
    edit_json(folder / "pytorch_model.bin.index.json", change)
    assert [f["id"] for f in findings(folder)[1]] == [id_]


@pytest.mark.parametrize(
    ("id_", "broken"),
    [
        ("latest", lambda f: (f / "latest").write_text("global_step9")),
        ("rank-missing", lambda f: next(f.glob("*/*rank_2_*_optim_states.pt")).unlink()),
    ],
)
def test_saves_of_deepspeed(id_: str, broken: Break, tmp_path: Path) -> None:
    folder = shutil.copytree("fixtures/torch/deepspeed/z3", tmp_path / "run")
    assert findings(folder)[0] == 0
    broken(folder)
    assert [f["id"] for f in findings(folder)[1] if f["severity"] == ERROR] == [id_]


def other_rank(folder: Path) -> None:
    """A second rank of a model that was cut for four."""
    reshard(folder, folder.with_name("four"), "--to", "meta", "--tp-out", 4)
    shutil.copy(folder.with_name("four") / "consolidated.01.pth", folder)


@pytest.mark.parametrize(
    ("id_", "broken"),
    [
        ("rank-missing", lambda f: (f / "consolidated.00.pth").unlink()),
        ("rank-missing", lambda f: (f / "consolidated.01.pth").unlink()),
        ("ranks-differ", other_rank),
        ("params-json", lambda f: (f / "params.json").unlink()),
        ("params-json", lambda f: edit_json(f / "params.json", lambda p: p.update(dim="64"))),
        ("params-json", lambda f: edit_json(f / "params.json", lambda p: p.update(vocab_size=5))),
    ],
)
def test_files_of_meta(id_: str, broken: Break, copy_of: CopyOf, tmp_path: Path) -> None:
    folder = copy_of(metas, tmp_path / "model")
    broken(folder)
    assert [f["id"] for f in findings(folder)[1] if f["severity"] == ERROR] == [id_]


def longer(folder: Path) -> None:
    """The metadata of another save: its chunks end behind the files."""
    for path in (folder / "model").glob("__*"):
        path.write_bytes(path.read_bytes()[:-8])


@pytest.mark.parametrize(
    ("id_", "broken"),
    [
        ("rank-missing", lambda f: min((f / "model").glob("__*")).unlink()),
        ("truncated", longer),
    ],
)
def test_saves_of_bytecheckpoint(id_: str, broken: Break, tmp_path: Path) -> None:
    folder = shutil.copytree("fixtures/bytecheckpoint/fsdp2", tmp_path / "run")
    assert [f["id"] for f in findings(folder)[1] if f["severity"] == ERROR] == []
    broken(folder)
    assert [f["id"] for f in findings(folder)[1] if f["severity"] == ERROR] == [id_]


@pytest.mark.parametrize("config", [True, False])
def test_the_last_ranks_of_sharded_safetensors(config: bool, tmp_path: Path) -> None:
    """Nothing says how many there were; the last norm is shorter than a row of the embedding."""
    folder = shutil.copytree("fixtures/dcp/hf_mixtral/checkpoint", tmp_path / "run")
    if not config:
        (folder / "config.json").unlink()
    assert [f["id"] for f in findings(folder)[1] if f["severity"] == ERROR] == []
    for path in folder.glob("shard-00004-*"):
        path.unlink()
    assert [f["id"] for f in findings(folder)[1] if f["severity"] == ERROR] == ["rank-missing"]


def test_what_readers_call_their_errors_is_an_identifier() -> None:
    said = set()
    for path in Path("ckpttool").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        said |= set(re.findall(r'finding="([^"]+)"', text))
        for call in re.findall(r"found_as\(([^)]*)\)", text):
            said |= set(re.findall(r'="([^"]+)"', call))
    assert said
    assert said <= CHECKPOINT.keys()


VALUES = [id_ for id_, case in CASES.items() if case.values]


@pytest.mark.parametrize("id_", VALUES)
def test_values_are_only_read_when_asked(id_: str, tmp_path: Path) -> None:
    case = CASES[id_]
    case.base(tmp_path / "model")
    case.broken(tmp_path / "model")
    _, found = findings(tmp_path / "model")
    assert {f["id"] for f in found} == set(case.also)


def test_lists_the_problems_of_every_file(tmp_path: Path) -> None:
    shards(tmp_path)
    edit_header(tmp_path / FIRST, lambda h: h[EMBED].update(dtype="F7"))
    edit_header(tmp_path / SECOND, lambda h: [h[NORM].update(shape=[15]), h[HEAD].update(dtype="X")], more=b"\0")
    edit_json(tmp_path / INDEX, swap)
    code, found = findings(tmp_path)
    assert code == 3
    assert {(f["id"], Path(f["where"]).name) for f in found} >= {("dtype", FIRST), ("dtype", SECOND), ("size", SECOND)}
    assert sum(f["id"] == "dtype" for f in found) == 2


def total_with(tmp_path: Path, tensors: dict[str, Raw], total: Callable[[int], int]) -> str:
    """What is said about a total size that was counted wrong."""
    save_shards(tmp_path, tensors, CONFIG)
    edit_json(tmp_path / INDEX, lambda d: d["metadata"].update(total_size=total(d["metadata"]["total_size"])))
    _, found = findings(tmp_path)
    (text,) = [str(f["text"]) for f in found if f["id"] == "total-size"]
    return text


@pytest.mark.parametrize(
    ("dtype", "total", "words"),
    [
        ("F8_E5M2", lambda n: n - 256, "F8_E5M2 was counted as nothing"),
        ("BOOL", lambda n: n - 256 + 32, "BOOL was counted as one bit"),
        ("F8_E4M3", lambda n: n + 256, "as before they were quantized"),
        ("F8_E4M3", lambda n: n - 256, "FP8 tensors were not counted"),
        ("F8_E4M3", lambda n: (n - 256) // 2 + 256, "number of elements"),
    ],
)
def test_explains_known_wrong_totals(tmp_path: Path, dtype: str, total: Callable[[int], int], words: str) -> None:
    tensors = {**llama(), "model.layers.0.self_attn.o_proj.weight": origin(7, dtype, (16, 16))}
    assert words in total_with(tmp_path, tensors, total)


def test_explains_a_total_of_files(tmp_path: Path) -> None:
    save_shards(tmp_path, llama(), CONFIG)
    size = sum(p.stat().st_size for p in tmp_path.glob("*.safetensors"))
    assert "headers included" in total_with(tmp_path, llama(), lambda _: size)


def test_says_what_was_checked(tmp_path: Path) -> None:
    proven(tmp_path / "model")
    done = ckpttool("inspect", tmp_path / "model", "--check")
    files = len(list((tmp_path / "model").glob("*.safetensors")))
    assert done.code == 0
    said = f"checked {files} files, 21 tensors, 21 checksums"
    assert done.out.splitlines()[-1] == f"{said}; values not checked (--values)"
    done = ckpttool("inspect", tmp_path / "model", "--check", "--values")
    assert "not checked" not in done.out
    asked = [["--check"], ["--check", "--values"]]
    told = [json.loads(ckpttool("inspect", tmp_path / "model", *a, "--json").out)["values"] for a in asked]
    assert told == [False, True]


def test_findings_fit_a_terminal_between_words(tmp_path: Path) -> None:
    """No line is cut by the terminal, which would cut a number in two."""
    shards(tmp_path)
    path = tmp_path / SECOND
    path.write_bytes(path.read_bytes()[: len(header_text(path)) + 8 + 40])
    next(tmp_path.glob("*.index.json")).unlink()
    for columns in (60, 80, 120):
        lines = on_terminal("inspect", tmp_path, "--check", columns=columns)
        assert [line for line in lines if len(line) > columns and " " in line[6:]] == []
        assert any(line.startswith("  hint: ") for line in lines)


def test_text_names_severity_place_and_identifier(tmp_path: Path) -> None:
    shards(tmp_path)
    edit_header(tmp_path / SECOND, lambda h: h[NORM].update(dtype="F7"))
    done = ckpttool("inspect", tmp_path, "--check")
    assert done.code == 3
    lines = done.out.splitlines()
    assert lines[0] == f"error: tensor `{NORM}` has the unknown dtype `F7` [dtype]"
    assert lines[1] == f"  --> {tmp_path / SECOND}"


def test_a_checked_source_must_exist(tmp_path: Path) -> None:
    done = ckpttool("inspect", tmp_path / "gone", "--check")
    assert done.code == 2
    assert "does not exist" in done.err


def test_a_single_file_is_checked_alone(tmp_path: Path) -> None:
    shards(tmp_path)
    (tmp_path / FIRST).write_bytes(b"broken")
    write(tmp_path / "alone.safetensors", llama())
    assert findings(tmp_path / "alone.safetensors") == (0, [])


def test_another_file_beside_a_model_is_no_part_of_it(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", llama())
    write(tmp_path / "other.safetensors", llama())
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    code, found = findings(tmp_path)
    assert (code, [f["id"] for f in found]) == (0, ["orphan-shard"])
    write(tmp_path / "adapter_model.safetensors", llama())
    (tmp_path / "other.safetensors").unlink()
    assert findings(tmp_path) == (0, [])


def test_mxfp4_scales_are_paired(tmp_path: Path) -> None:
    """gpt-oss: blocks and scales, without `.weight` in their names."""
    blocks = {
        "model.layers.0.mlp.experts.gate_up_proj_blocks": origin(1, "U8", (2, 8, 1, 16)),
        "model.layers.0.mlp.experts.gate_up_proj_scales": origin(2, "U8", (2, 8, 1)),
    }
    write(tmp_path / "good" / "model.safetensors", blocks)
    blocks["model.layers.0.mlp.experts.gate_up_proj_scales"] = origin(2, "U8", (2, 8, 2))
    write(tmp_path / "bad" / "model.safetensors", blocks)
    assert [f["id"] for f in findings(tmp_path / "good")[1]] == ["config-missing"]
    assert [f["id"] for f in findings(tmp_path / "bad")[1]] == ["config-missing", "scale-shape"]


def test_a_broken_file_is_one_line_and_json_has_everything(tmp_path: Path) -> None:
    shards(tmp_path)
    path = tmp_path / SECOND
    path.write_bytes(path.read_bytes()[: len(header_text(path)) + 8 + 40])
    code, found = findings(tmp_path)
    assert (code, {f["id"] for f in found}) == (3, {"truncated"})
    assert len(found) > 5
    lines = ckpttool("inspect", tmp_path, "--check").out.splitlines()
    assert [line for line in lines if line.startswith("error")] == [
        f"error: {found[0]['text']}, and {len(found) - 1} more like it [truncated]"
    ]
    assert "1 error," in lines[-2]


def test_a_file_that_git_lfs_has_not_fetched_comes_with_the_command(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    assert "hint: run `git lfs pull`" in ckpttool("inspect", tmp_path, "--check").out
