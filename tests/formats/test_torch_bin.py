"""Files of torch.save: what torch writes is read as torch reads it, what is written is loaded by torch."""

from __future__ import annotations

import io
import json
import pickle
import struct
import zipfile
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ckpttool
from ckpttool.containers.torch_zip import lay_out_torch, read_torch
from ckpttool.errors import CkptError, UsageError
from tests.helpers.command import ckpttool as command
from tests.helpers.command import refused, reshard

FIXTURES = Path("fixtures/torch")
DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.bool),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
)


def headers(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Tensors of a safetensors file."""
    data = path.read_bytes()
    n = int.from_bytes(data[:8], "little")
    out = {}
    for name, t in json.loads(data[8 : 8 + n]).items():
        if name != "__metadata__":
            a, b = t["data_offsets"]
            out[name] = t["dtype"], tuple(t["shape"]), data[8 + n + a : 8 + n + b]
    return out


def raw(t: torch.Tensor) -> bytes:
    flat = t.detach().clone(memory_format=torch.contiguous_format).reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def as_read(src: Path, dst: Path, *options: object) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    reshard(src, dst, "--to", "hf", *options)
    return headers(dst / "model.safetensors")


def same(got: Mapping[str, tuple[str, tuple[int, ...], bytes]], want: Mapping[str, torch.Tensor]) -> None:
    assert {k: (v[1], v[2]) for k, v in got.items()} == {k: (tuple(t.shape), raw(t)) for k, t in want.items()}


@pytest.fixture
def src(tmp_path: Path) -> Path:
    (tmp_path / "src").mkdir()
    return tmp_path / "src"


@pytest.mark.parametrize("name", ["strided", "dtypes", "sharded", "train"])
def test_what_torch_wrote(name: str, tmp_path: Path) -> None:
    """The same tensors as safetensors wrote of them: every dtype, views of all kinds, shards, a trainer's file."""
    assert as_read(FIXTURES / name, tmp_path / "out") == headers(FIXTURES / f"{name}.safetensors")


def odd_tensors() -> dict[str, torch.Tensor]:
    big = torch.arange(320, dtype=torch.float32).reshape(20, 16)
    return {
        **{str(d): (torch.arange(12) % 2).to(d).reshape(3, 4) for d in DTYPES if "e8m0" not in str(d)},
        "columns": big[:, 2:5],
        "transposed": big.t(),
        "expanded": torch.arange(4.0).reshape(4, 1).expand(4, 5),
        "windows": torch.arange(6.0).as_strided((4, 3), (1, 1)),
        "number": big[4, 7],
        "empty": torch.empty(3, 0, 2),
        "tied": big,
        "parameter": torch.nn.Parameter(torch.ones(2, 3)),
        "with.dots and spaces é": torch.ones(1),
    }


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("zipped", [True, False])
def test_protocols(protocol: int, zipped: bool, tmp_path: Path) -> None:
    want = odd_tensors()
    path = tmp_path / "a.pt"
    torch.save(want, path, pickle_protocol=protocol, _use_new_zipfile_serialization=zipped)
    same(as_read(path, tmp_path / "out"), want)


def test_a_module(src: Path, tmp_path: Path) -> None:
    """Its state dict is an OrderedDict with an attribute, and has buffers."""
    module = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    torch.save(module.state_dict(), src / "pytorch_model.bin")
    same(as_read(src, tmp_path / "out"), module.state_dict())


def trained() -> dict[str, Any]:
    model, ema = {"w": torch.ones(2, 2)}, {"w": torch.zeros(2, 2)}
    return {"model": {"state_dict": model, "version": 3}, "ema": OrderedDict(ema), "epoch": 7}


def test_several_dicts(tmp_path: Path) -> None:
    """None is guessed: the error names them, --select takes one, and the note says what was left out."""
    path = tmp_path / "last.ckpt"
    torch.save(trained(), path)
    error = refused(path, tmp_path / "out")
    assert "2 places of the file: model, ema" in error
    assert "--select model" in error
    done = reshard(path, tmp_path / "out", "--to", "hf", "--select", "model.state_dict")
    assert "read from `model.state_dict`; left out: ema, epoch" in done.err
    same(headers(tmp_path / "out/model.safetensors"), {"w": torch.ones(2, 2)})
    same(as_read(path, tmp_path / "ema", "--select", "ema"), {"w": torch.zeros(2, 2)})
    everything = {"model.state_dict.w": torch.ones(2, 2), "ema.w": torch.zeros(2, 2)}
    same(as_read(path, tmp_path / "all", "--select", "."), everything)
    assert "there is no `modle`" in refused(path, tmp_path / "no", "--select", "modle", code=2)
    assert ckpttool.open(path, select="ema")["w"].shape == (2, 2)
    with pytest.raises(UsageError, match="select is 3"):
        ckpttool.open(path, select=3)  # type: ignore[arg-type]
    error = command("inspect", path, "--select", "ema", "--diff", path).err
    assert "for OTHER of --diff, and one source of several, `ckpttool reshard FILE DIR --select PATH` first" in error


def test_the_only_dict_is_found(tmp_path: Path) -> None:
    """The optimizer's tensors are no model; what a trainer keeps beside is not needed to read it."""
    module = torch.nn.Linear(3, 2)
    optimizer = {"state": {0: {"step": torch.ones(()), "exp_avg": torch.ones(2, 3)}}, "param_groups": [{"params": [0]}]}
    args = Namespace(lr=1e-3, path=Path("x"), sizes={1, 2}, dtype=torch.bfloat16, rng=np.random.default_rng(0).random())
    path = tmp_path / "step.pth"
    beside = {"optimizer": optimizer, "scheduler": {"last_epoch": 1}, "args": args, "step": 1}
    torch.save({"net": {"module": module.state_dict()}, **beside}, path)
    done = command("inspect", path)
    assert done.code == 0, done.err
    assert "read from `net.module`; left out: optimizer, scheduler, args and 1 more" in done.err
    same(as_read(path, tmp_path / "out"), module.state_dict())
    assert command("inspect", path, "--check").code == 0


def test_select_is_for_nested_files(tmp_path: Path) -> None:
    error = refused(FIXTURES / "sharded.safetensors", tmp_path / "out", "--select", "model", code=2)
    assert "--select has no effect on hf\n" in error
    assert "reshard FILE DIR --select PATH` first" in error


def quantized() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(2, 2), 0.1, 0, torch.qint8)


class Named(torch.Tensor):
    """A subclass, which torch.save stores by its class."""


class Settings(dict[str, Any]):
    """What looks like a dict."""


ODD: dict[str, tuple[Callable[[], Any], str]] = {
    "sparse": (lambda: {"a": torch.eye(3).to_sparse()}, "`a` is not a plain tensor (sparse tensor)"),
    "quantised": (lambda: {"a": quantized()}, "`a` is not a plain tensor (qtensor)"),
    "meta": (lambda: {"a": torch.empty(2, device="meta")}, "`a` is not a plain tensor (meta tensor)"),
    "a module": (lambda: torch.nn.Linear(2, 2), "a whole module (torch.nn.modules.linear.Linear)"),
    "complex128": (lambda: {"a": torch.ones(2, dtype=torch.complex128)}, "`a` is of torch's type ComplexDoubleStorage"),
    "conjugate": (lambda: {"a": torch.ones(2, dtype=torch.complex64).conj()}, "a conjugate or negative bit"),
    "a subclass": (lambda: {"a": torch.ones(2).as_subclass(Named), "b": torch.ones(2)}, f"({__name__}.Named)"),
    "an array": (lambda: {"a": np.ones(3), "b": torch.ones(2)}, "`a` is a numpy array"),
    "an array below": (lambda: {"a": {"c": np.ones(3)}, "b": torch.ones(2)}, "`a.c` is a numpy array"),
    "a storage": (lambda: {"a": torch.ones(2).untyped_storage(), "b": torch.ones(2)}, "`a` is a storage"),
    "no values yet": (lambda: {"a": torch.nn.UninitializedParameter(), "b": torch.ones(2)}, "UninitializedParameter)"),
    "a class of dicts": (lambda: {"a": Settings(w=torch.ones(2))}, f"`a` is of class {__name__}.Settings, not a plain"),
    "of a class": (lambda: Settings(w=torch.ones(2)), "hint: save what it holds: dict(x)"),
    "no tensors": (lambda: {"a": 1, "b": "text"}, "there are no tensors here"),
    "a few bytes for ever": (lambda: {"a": torch.ones(1).expand(1 << 40)}, "repeats the 4 bytes of its storage"),
}


@pytest.mark.filterwarnings("ignore:torch.quantize", "ignore:Couldn't retrieve source")
@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("case", ODD)
def test_what_is_refused_by_name(case: str, zipped: bool, src: Path, tmp_path: Path) -> None:
    """In words that do not depend on the form of the file."""
    make, words = ODD[case]
    torch.save(make(), src / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    assert words in refused(src, tmp_path / "out")


def test_subclasses_elsewhere(tmp_path: Path) -> None:
    """Their tensors are tensors, so the dict to read is asked for; arrays beside the one that is read are none."""
    path = tmp_path / "a.pt"
    torch.save({"model": {"w": torch.ones(2)}, "ema": {"w": torch.ones(2).as_subclass(Named)}}, path)
    assert "2 places of the file: model, ema" in refused(path, tmp_path / "out")
    torch.save({"model": {"w": torch.ones(2)}, "rng": ("MT19937", np.ones(3))}, path)
    same(as_read(path, tmp_path / "out"), {"w": torch.ones(2)})


@pytest.mark.filterwarnings("ignore:torch.quantize")
def test_before_torch_1_6(src: Path, tmp_path: Path) -> None:
    """Classes of modules come with their source, and storages of types that are not read lie before those that are."""
    value = {"w": torch.arange(3.0), "class": torch.nn.Linear}
    torch.save(value, src / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    same(as_read(src, tmp_path / "class"), {"w": torch.arange(3.0)})
    unread = {"a": torch.ones(3, dtype=torch.complex128), "b": quantized(), "c": {"w": torch.arange(3.0)}}
    torch.save(unread, src / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    same(as_read(src, tmp_path / "types", "--select", "c"), {"w": torch.arange(3.0)})


@pytest.mark.parametrize("protocol", [0, 1])
@pytest.mark.parametrize("zipped", [True, False])
def test_protocols_that_are_not_read(protocol: int, zipped: bool, src: Path, tmp_path: Path) -> None:
    path = src / "pytorch_model.bin"
    torch.save({"a": torch.ones(2)}, path, pickle_protocol=protocol, _use_new_zipfile_serialization=zipped)
    assert "protocols 0 and 1 are not read" in refused(src, tmp_path / "out")


def test_the_pickles_checksum(src: Path, tmp_path: Path) -> None:
    """A name with another letter is a model that nobody saved; a writer that takes no checksums writes 0."""
    path = src / "pytorch_model.bin"
    torch.save({"weight": torch.ones(2)}, path)
    path.write_bytes(path.read_bytes().replace(b"weight", b"weighs"))
    assert "data.pkl` is damaged: its CRC-32 is" in refused(src, tmp_path / "out")
    torch.serialization.set_crc32_options(compute_crc32=False)
    try:
        torch.save({"weight": torch.ones(2)}, path)
    finally:
        torch.serialization.set_crc32_options(compute_crc32=True)
    same(as_read(src, tmp_path / "out"), {"weight": torch.ones(2)})


def test_torchscript(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(1)}, tmp_path / "model.pt")
    with zipfile.ZipFile(tmp_path / "model.pt", "a") as z:
        z.writestr("model/constants.pkl", b"\x80\x02).")
    assert "TorchScript module" in refused(tmp_path / "model.pt", tmp_path / "out")


@pytest.mark.parametrize("path", sorted((FIXTURES / "hostile").iterdir()), ids=lambda p: p.stem)
def test_hostile(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing runs and nothing is written outside; what is honest apart from a strange member is read."""
    path = path.absolute()
    monkeypatch.chdir(tmp_path)
    if path.stem == "zip_slip":
        same(as_read(path, Path("out")), {"a": torch.arange(6.0).reshape(2, 3)})
    else:
        refused(path, "out")
        assert command("inspect", path, "--stats").code == 1
        assert command("inspect", path, "--check").code == 3
    assert not list(tmp_path.parent.rglob("canary"))


def crafted(pickled: bytes = b"", *, twice: bool = False, lies: int = 0) -> bytes:
    """A file of torch.save with another pickle, a storage that is there twice, or another size in the directory."""
    plain, out = io.BytesIO(), io.BytesIO()
    torch.save({"a": torch.arange(6.0).reshape(2, 3)}, plain)
    with zipfile.ZipFile(plain) as old, zipfile.ZipFile(out, "w") as new:
        for i in old.infolist():
            new.writestr(i.filename, pickled if pickled and i.filename.endswith(".pkl") else old.read(i))
        if twice:
            with pytest.warns(UserWarning, match="Duplicate"):
                new.writestr("archive/data/0", bytes(24))
    data = bytearray(out.getvalue())
    entry = data.rfind(b"archive/data/0")
    if lies:
        struct.pack_into("<2I", data, entry - 26, lies, lies)
    return bytes(data)


def tensor_pickle(key: str = "0", hooks: bytes = b"ccollections\nOrderedDict\n)R", offset: int = 0) -> bytes:
    name = b"X" + struct.pack("<I", len(key)) + key.encode()
    storage = b"(X\x07\0\0\0storagectorch\nFloatStorage\n" + name + b"X\x03\0\0\0cpuK\x06tQ"
    view = b"J" + struct.pack("<i", offset) + b"K\x02K\x03\x86K\x03K\x01\x86\x89"
    return b"\x80\x02}X\x01\0\0\0actorch._utils\n_rebuild_tensor_v2\n(" + storage + view + hooks + b"tRs."


SHARED: list[Any] = reduce(lambda x, _: [x, x], range(40), [])
CRAFTED = {
    "deep": (crafted(b"\x80\x02" + b"(" * 100_000 + b"t" * 100_000 + b"."), "open marks"),
    "many": (crafted(pickle.dumps({"a": SHARED}, 2)), "very many places"),
    "hooks that call": (crafted(tensor_pickle(hooks=b"cos\nsystem\n(X\x04\0\0\0exittR")), "asks for `os.system`"),
    "a path for a key": (crafted(tensor_pickle("../../etc/passwd")), "is not in the file"),
    "before the storage": (crafted(tensor_pickle(offset=-2)), "negative size, stride or offset"),
    "behind the storage": (crafted(tensor_pickle(offset=4)), "ends at byte 40 of its storage, which has 24"),
    "a member twice": (crafted(twice=True), "two members called `archive/data/0`"),
    "a member that is longer": (crafted(lies=1 << 20), "reaches beyond the data of the zip"),
    "a member that is shorter": (crafted(lies=8), "should have 24 bytes, it has 8"),
}


@pytest.mark.parametrize("case", CRAFTED)
def test_crafted(case: str, src: Path, tmp_path: Path) -> None:
    data, words = CRAFTED[case]
    (src / "pytorch_model.bin").write_bytes(data)
    assert words in refused(src, tmp_path / "out")


def test_crafted_as_it_should_be(src: Path, tmp_path: Path) -> None:
    """Honest numbers in the same form are read; so are keys of optimizers before torch 1.6, and Python 2's strings."""
    (src / "pytorch_model.bin").write_bytes(crafted(tensor_pickle()))
    same(as_read(src, tmp_path / "out"), {"a": torch.arange(6.0).reshape(2, 3)})
    (src / "pytorch_model.bin").write_bytes(crafted(tensor_pickle().replace(b"X\x01\0\0\0a", b"U\x01a")))
    same(as_read(src, tmp_path / "again"), {"a": torch.arange(6.0).reshape(2, 3)})
    torch.save({"model": {"w": torch.ones(2)}, "optimizer": {"state": {1 << 46: {}}}}, src / "pytorch_model.bin")
    same(as_read(src, tmp_path / "old"), {"w": torch.ones(2)})


def test_cut_off_anywhere(tmp_path: Path) -> None:
    """Every prefix of both forms is refused; not one is half a model."""
    for zipped in (True, False):
        torch.save({"a": torch.arange(6.0)}, tmp_path / "whole", _use_new_zipfile_serialization=zipped)
        data = (tmp_path / "whole").read_bytes()
        for n in range(0, len(data) - 1, 7):
            (tmp_path / "part").write_bytes(data[:n])
            with pytest.raises(CkptError):
                read_torch(tmp_path / "part")


def test_names_lie(tmp_path: Path) -> None:
    """.bin is anybody's: what else it holds is named."""
    for name, data, words in (
        ("a.bin", b"GGUF" + bytes(60), "GGUF file"),
        ("b.bin", b"\x80\x04K\x01.", "a pickle, but not one of torch.save"),
        ("c.bin", b"\x00" * 64, "not a file of torch.save"),
        ("d.bin", b"", "cut off"),
    ):
        (tmp_path / name).write_bytes(data)
        assert words in refused(tmp_path / name, tmp_path / "out")
    with zipfile.ZipFile(tmp_path / "e.bin", "w") as z:
        z.writestr("readme.txt", "text")
    assert "0 data.pkl" in refused(tmp_path / "e.bin", tmp_path / "out")


def test_beside_safetensors(tmp_path: Path) -> None:
    """Safetensors are read, as ever; a trainer's other files are no models."""
    reshard(FIXTURES / "sharded", tmp_path / "src", "--to", "hf")
    torch.save({"a": torch.ones(1)}, tmp_path / "src/pytorch_model.bin")
    assert len(as_read(tmp_path / "src", tmp_path / "out")) == 21
    torch.save({"w": torch.ones(1)}, tmp_path / "pytorch_model.bin")
    torch.save({"state": {}, "param_groups": []}, tmp_path / "optimizer.pt")
    done = reshard(tmp_path / "pytorch_model.bin", tmp_path / "one", "--to", "hf")
    assert "optimizer" not in done.err
    (tmp_path / "train").mkdir()
    for name in ("pytorch_model.bin", "optimizer.pt"):
        (tmp_path / name).rename(tmp_path / "train" / name)
    done = reshard(tmp_path / "train", tmp_path / "two", "--to", "hf")
    assert "not part of the model, and left out: optimizer.pt" in done.err


def test_which_file_is_the_model(src: Path) -> None:
    """transformers' training_args.bin makes nothing Paddle's; of several files, or none, the error says the truth."""
    assert "there are no files of torch.save" in command("inspect", src, "--from", "torch-bin").err
    torch.save({"w": torch.ones(1)}, src / "weights.pt")
    torch.save({"lr": 1.0}, src / "training_args.bin")
    (src / "config.json").write_text("{}")
    done = command("inspect", src)
    assert done.code == 0, done.err
    assert "not part of the model, and left out: training_args.bin" in done.err
    torch.save({"w": torch.ones(1)}, src / "again.pt")
    error = command("inspect", src).err
    assert "files of torch.save (again.pt, training_args.bin, weights.pt), and it is unclear which one" in error


def test_tied_weights_are_written_once(src: Path, tmp_path: Path) -> None:
    """Where config.json ties them and the file stores them in one place; else both are tensors of their own."""
    words = torch.arange(8.0).reshape(4, 2)
    fields = {"model_type": "qwen2", "num_hidden_layers": 1, "hidden_size": 2, "vocab_size": 4}
    (src / "config.json").write_text(json.dumps({**fields, "tie_word_embeddings": True}))
    torch.save({"model.embed_tokens.weight": words, "lm_head.weight": words}, src / "pytorch_model.bin")
    done = reshard(src, tmp_path / "out", "--to", "torch-bin", "--verify")
    assert "`lm_head.weight` has the bytes of `model.embed_tokens.weight`" in done.err
    assert torch.load(tmp_path / "out/pytorch_model.bin").keys() == {"model.embed_tokens.weight"}
    torch.save({"model.embed_tokens.weight": words, "lm_head.weight": words.clone()}, src / "pytorch_model.bin")
    assert len(as_read(src, tmp_path / "two")) == 2
    (src / "config.json").unlink()
    torch.save({"model.embed_tokens.weight": words, "lm_head.weight": words}, src / "pytorch_model.bin")
    assert len(as_read(src, tmp_path / "both")) == 2


def test_shards(src: Path, tmp_path: Path) -> None:
    """A shard that is missing is an error; an index that is wrong, a note; two files with one tensor, an error."""
    torch.save({"a": torch.ones(2)}, src / "pytorch_model-00001-of-00002.bin")
    assert "1 of 2 files are missing" in refused(src, tmp_path / "out")
    torch.save({"b": torch.ones(2)}, src / "pytorch_model-00002-of-00002.bin")
    assert as_read(src, tmp_path / "out").keys() == {"a", "b"}
    index = src / "pytorch_model.bin.index.json"
    one, two = (f"pytorch_model-0000{i}-of-00002.bin" for i in (1, 2))
    index.write_text(json.dumps({"weight_map": {"a": two, "b": one}}))
    done = reshard(src, tmp_path / "noted", "--to", "hf")
    assert "the index puts 2 tensors in the wrong shard (a, b); read from the files" in done.err
    index.write_text(json.dumps({"weight_map": {"a": one, "c": two}}))
    assert "in no file: c" in refused(src, tmp_path / "no")
    index.write_text(json.dumps({"weight_map": {"a": "../x.bin"}}))
    assert "missing: ../x.bin" in refused(src, tmp_path / "no")
    index.unlink()
    torch.save({"a": torch.ones(2)}, src / two)
    assert "tensor `a` is in two files" in refused(src, tmp_path / "no")


# -- writing


@pytest.mark.parametrize("options", [(), ("--max-shard-size", "20KB"), ("--workers", 1, "--manifest")])
def test_written_files_are_torchs(options: tuple[object, ...], tmp_path: Path) -> None:
    """torch loads them with the strictest settings, zipfile finds every checksum right, the tool reads them back."""
    out = tmp_path / "out"
    reshard(FIXTURES / "sharded", out, "--to", "torch-bin", "--verify", *options)
    files = sorted(out.glob("pytorch_model*.bin"))
    assert (len(files) > 1) == ("--max-shard-size" in options)
    loaded: dict[str, torch.Tensor] = {}
    for path in files:
        loaded |= torch.load(path, weights_only=True, mmap=True)
        assert torch.load(path, weights_only=True).keys() <= loaded.keys()
        with zipfile.ZipFile(path) as z:
            assert z.testzip() is None
            assert all(data_offset(path, i) % 64 == 0 for i in z.infolist())
    same(headers(FIXTURES / "sharded.safetensors"), loaded)
    if len(files) > 1:
        index = json.loads((out / "pytorch_model.bin.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(t.nbytes for t in loaded.values())
        assert {f.name for f in files} == set(index["weight_map"].values())
    assert command("inspect", out, "--check").code == 0
    assert as_read(out, tmp_path / "back") == headers(FIXTURES / "sharded.safetensors")


def data_offset(path: Path, info: zipfile.ZipInfo) -> int:
    name, extra = struct.unpack_from("<2H", path.read_bytes(), info.header_offset + 26)
    return info.header_offset + 30 + int(name) + int(extra)


def test_every_dtype_is_written(tmp_path: Path) -> None:
    """And computed tensors get their checksums, too: merged ones are written by other processes."""
    reshard(FIXTURES / "dtypes", tmp_path / "out", "--to", "torch-bin")
    loaded = torch.load(tmp_path / "out/pytorch_model.bin", weights_only=True)
    same(headers(FIXTURES / "dtypes.safetensors"), loaded)
    reshard(FIXTURES / "sharded", tmp_path / "hf", "--to", "hf")
    done = command("merge", FIXTURES / "sharded", tmp_path / "hf", "-o", tmp_path / "merged", "--to", "torch-bin")
    assert done.code == 0, done.err
    with zipfile.ZipFile(tmp_path / "merged/pytorch_model.bin") as z:
        assert z.testzip() is None
    same(headers(FIXTURES / "sharded.safetensors"), torch.load(tmp_path / "merged/pytorch_model.bin"))


def test_what_torch_has_not(src: Path, tmp_path: Path) -> None:
    header = {"a": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}}
    text = json.dumps(header).encode()
    (src / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + b"\0\0")
    assert "`a` is F4, which torch.save does not write" in refused(src, tmp_path / "out", "--to", "torch-bin")


def test_beyond_4_gib(tmp_path: Path) -> None:
    """Sizes and offsets of zip64; the bytes of the tensors are a hole in the file."""
    laid = lay_out_torch([("a", "F32", (1 << 30, 1)), ("b", "I8", (3,)), ("c", "F8_E4M3", (5 << 30,))], "big")
    path = tmp_path / "big.bin"
    with path.open("wb") as f:
        f.truncate(laid.size)
        for at, data in laid.literals:
            f.seek(at)
            f.write(data)
    file = read_torch(path)
    for name, t in file.value.items():
        assert file.place(t, name, 0).offset == laid.offsets[name]
    loaded = torch.load(path, weights_only=True, mmap=True)
    assert [(t.shape, t.dtype) for t in loaded.values()] == [
        *(((1 << 30, 1), torch.float32), ((3,), torch.int8), ((5 << 30,), torch.float8_e4m3fn)),
    ]
    with zipfile.ZipFile(path) as z:
        assert [i.file_size for i in z.infolist() if "/data/" in i.filename] == [4 << 30, 3, 5 << 30]


def views() -> st.SearchStrategy[torch.Tensor]:
    """Any view of a storage: offsets, strides of 0, overlaps, no elements."""

    def make(shape: list[int], strides: list[int], offset: int, dtype: torch.dtype) -> torch.Tensor:
        reach = offset + sum((n - 1) * s for n, s in zip(shape, strides, strict=False)) + 1
        base = torch.arange(max(reach, 1)).to(dtype)
        return base.as_strided(shape, strides[: len(shape)], offset) if 0 not in shape else torch.empty(shape)

    return st.builds(
        make,
        st.lists(st.integers(0, 4), max_size=4),
        st.lists(st.integers(0, 9), min_size=4, max_size=4),
        st.integers(0, 9),
        st.sampled_from([torch.float32, torch.int64, torch.bfloat16, torch.int8, torch.uint16]),
    )


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("views")


@settings(max_examples=30, deadline=None)
@given(st.dictionaries(st.text(min_size=1, max_size=8), views(), min_size=1, max_size=4), st.booleans())
def test_any_views(scratch: Path, tensors: dict[str, torch.Tensor], zipped: bool) -> None:
    path = scratch / "a.bin"
    torch.save(tensors, path, _use_new_zipfile_serialization=zipped)
    file = read_torch(path)
    data = np.fromfile(path, np.uint8)
    for name, tensor in file.value.items():
        t = file.place(tensor, name, 0)
        size = tensors[name].element_size()
        strides = [s * size for s in t.element_strides]
        cells = np.ndarray(t.shape, f"V{size}", data, t.offset, strides) if 0 not in t.shape else np.empty(0, "V1")
        assert (t.shape, cells.tobytes()) == (tuple(tensors[name].shape), raw(tensors[name]))
