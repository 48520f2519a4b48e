"""Files of torch.save: what torch wrote is read as torch reads it, what is written is what its own unpickler finds.

``fixtures/torch/written`` has what torch.save makes of many things (tests/peers/torch_files.py); tests/peers lets torch
itself load what is written, and write anew what is read here.
"""

from __future__ import annotations

import io
import json
import pickle
import shutil
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from functools import reduce
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpttool
from ckpttool.containers.pickle_write import Hole
from ckpttool.containers.torch_write import lay_out_torch
from ckpttool.containers.torch_zip import read_torch
from ckpttool.errors import CkptError, UsageError
from tests.helpers.command import ckpttool as command
from tests.helpers.command import refused, reshard
from tests.helpers.torch_save import torch_save

FIXTURES = Path("fixtures/torch")
WRITTEN = FIXTURES / "written"
FORMS = ("bin", "old.bin")
"""Names of a zip, and of the form before torch 1.6."""
Array = np.ndarray[Any, np.dtype[Any]]
W = {"w": np.ones((2, 2), "<f4")}
TWO = np.ones(2, "<f4")
RANGE = {"a": np.arange(6, dtype="<f4").reshape(2, 3)}


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


class Unpickler(pickle.Unpickler):
    """torch's, as far as plain tensors go: Python's own, and the elements behind each other in their storage."""

    def __init__(self, archive: zipfile.ZipFile) -> None:
        self.zip = archive
        (name,) = (n for n in archive.namelist() if n.endswith("/data.pkl"))
        self.top = name.removesuffix("data.pkl")
        super().__init__(io.BytesIO(archive.read(name)))

    def find_class(self, module: str, name: str) -> Any:
        if module in ("torch", "torch.storage"):
            return name
        if module == "torch._utils":
            assert name in ("_rebuild_tensor_v2", "_rebuild_tensor_v3")
            return self.tensor
        assert (module, name) == ("collections", "OrderedDict")
        return OrderedDict

    def persistent_load(self, pid: Any) -> bytes:
        kind, _, key, place, _ = pid
        assert (kind, place) == ("storage", "cpu")
        return self.zip.read(f"{self.top}data/{key}")

    def tensor(self, storage: bytes, offset: int, shape: Any, strides: Any, *_: Any) -> tuple[Any, bytes]:
        assert strides == tuple(prod(shape[i + 1 :]) for i in range(len(shape)))
        assert offset == 0
        return shape, storage


def loaded(path: Path) -> dict[str, tuple[tuple[int, ...], bytes]]:
    with zipfile.ZipFile(path) as z:
        assert z.testzip() is None
        found: dict[str, tuple[tuple[int, ...], bytes]] = Unpickler(z).load()
        return found


def held(safetensors: Path) -> dict[str, tuple[tuple[int, ...], bytes]]:
    return {name: (shape, data) for name, (_, shape, data) in headers(safetensors).items()}


def put(name: str, path: Path) -> Path:
    """A file that torch wrote, at another place."""
    return Path(shutil.copy(WRITTEN / name, path))


def as_read(src: Path, dst: Path, *options: object) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    reshard(src, dst, "--to", "hf", *options)
    return headers(dst / "model.safetensors")


def same(got: Mapping[str, tuple[str, tuple[int, ...], bytes]], want: Mapping[str, Array]) -> None:
    assert {k: (v[1], v[2]) for k, v in got.items()} == {k: (a.shape, a.tobytes()) for k, a in want.items()}


@pytest.fixture
def src(tmp_path: Path) -> Path:
    (tmp_path / "src").mkdir()
    return tmp_path / "src"


@pytest.mark.parametrize("name", ["strided", "dtypes", "sharded", "train"])
def test_what_torch_wrote(name: str, tmp_path: Path) -> None:
    """The same tensors as safetensors wrote of them: every dtype, views of all kinds, shards, a trainer's file."""
    assert as_read(FIXTURES / name, tmp_path / "out") == headers(FIXTURES / f"{name}.safetensors")


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("form", FORMS)
def test_protocols(protocol: int, form: str, tmp_path: Path) -> None:
    got = as_read(WRITTEN / f"protocol_{protocol}.{form}", tmp_path / "out")
    assert {k: v[1:] for k, v in got.items()} == held(WRITTEN / "protocol.safetensors")


def test_a_module(tmp_path: Path) -> None:
    """Its state dict is an OrderedDict with an attribute, and has buffers."""
    assert as_read(WRITTEN / "state_dict.bin", tmp_path / "out") == headers(WRITTEN / "state_dict.safetensors")


def test_several_dicts(tmp_path: Path) -> None:
    """None is guessed: the error names them, --select takes one, and the note says what was left out."""
    path = put("trained.bin", tmp_path / "last.ckpt")
    error = refused(path, tmp_path / "out")
    assert "2 places of the file: model, ema" in error
    assert "--select model" in error
    done = reshard(path, tmp_path / "out", "--to", "hf", "--select", "model.state_dict")
    assert "read from `model.state_dict`; left out: ema, epoch" in done.err
    same(headers(tmp_path / "out/model.safetensors"), W)
    average = np.zeros((2, 2), "<f4")
    same(as_read(path, tmp_path / "ema", "--select", "ema"), {"w": average})
    everything = {"model.state_dict.w": W["w"], "ema.w": average}
    same(as_read(path, tmp_path / "all", "--select", "."), everything)
    assert "there is no `modle`" in refused(path, tmp_path / "no", "--select", "modle", code=2)
    assert ckpttool.open(path, select="ema")["w"].shape == (2, 2)
    with pytest.raises(UsageError, match="select is 3"):
        ckpttool.open(path, select=3)  # type: ignore[arg-type]
    error = command("inspect", path, "--select", "ema", "--diff", path).err
    assert "for B of --diff, and one source of several, `ckpttool reshard FILE DIR --select PATH` first" in error


def test_the_only_dict_is_found(tmp_path: Path) -> None:
    """The optimizer's tensors are no model; what a trainer keeps beside is not needed to read it."""
    path = put("step.bin", tmp_path / "step.pth")
    done = command("inspect", path)
    assert done.code == 0, done.err
    assert "read from `net.module`; left out: args\n" in done.err
    assert "the optimizer (optimizer) is not read: the optimizer has state [2, 3] for its parameter 0" in done.err
    assert as_read(path, tmp_path / "out") == headers(WRITTEN / "state_dict.safetensors")
    assert command("inspect", path, "--check").code == 0


def test_numbers_and_random_state_of_a_trainer_are_no_second_model(tmp_path: Path) -> None:
    """Where no trainer is (nothing but tensors), a number may be a parameter, and nothing is guessed."""
    model = {"a.weight": np.zeros((2, 3), "<f4"), "scale": np.zeros((), "<f4")}
    beside = {
        "best_val_loss": np.zeros((), "<f4"),
        "rng_state": np.zeros(8, "|u1"),
        "losses": {"a": np.zeros((), "<f4")},
    }
    path = torch_save({"model": model, "iter_num": 3, **beside}, tmp_path / "ckpt.pt")
    done = reshard(path, tmp_path / "out", "--to", "hf")
    assert "read from `model`; left out: iter_num, best_val_loss, rng_state and 1 more\n" in done.err
    assert headers(tmp_path / "out/model.safetensors").keys() == model.keys()
    path = torch_save({"text": model, "scale": np.zeros((), "<f4")}, tmp_path / "clip.pt")
    assert "2 places of the file: text, ." in refused(path, tmp_path / "no")


def test_select_is_for_nested_files(tmp_path: Path) -> None:
    error = refused(FIXTURES / "sharded.safetensors", tmp_path / "out", "--select", "model", code=2)
    assert "--select has no effect on hf\n" in error
    assert "reshard FILE DIR --select PATH` first" in error


CLASSES = "tests.peers.torch_files"
ODD = {
    "sparse": "`a` is not a plain tensor (sparse tensor)",
    "quantized": "`a` is not a plain tensor (qtensor)",
    "meta": "`a` is not a plain tensor (meta tensor)",
    "a module": "a whole module (torch.nn.modules.linear.Linear)",
    "complex128": "`a` is of torch's type ComplexDoubleStorage",
    "conjugate": "a conjugate or negative bit",
    "a subclass": f"({CLASSES}.Named)",
    "an array": "`a` is a numpy array",
    "an array below": "`a.c` is a numpy array",
    "a storage": "`a` is a storage",
    "no values yet": "UninitializedParameter)",
    "a class of dicts": f"`a` is of class {CLASSES}.Settings, not a plain",
    "of a class": "hint: save what it holds: dict(x)",
    "no tensors": "there are no tensors here",
    "a few bytes for ever": "repeats the 4 bytes of its storage",
}


@pytest.mark.parametrize("form", FORMS)
def test_what_is_refused_by_name(form: str, tmp_path: Path) -> None:
    """In words that do not depend on the form of the file."""
    for case, words in ODD.items():
        assert words in refused(WRITTEN / f"{case.replace(' ', '_')}.{form}", tmp_path / "out"), case


def test_subclasses_elsewhere(tmp_path: Path) -> None:
    """Their tensors are tensors, so the dict to read is asked for; arrays beside the one that is read are none."""
    error = refused(WRITTEN / "a_subclass_elsewhere.bin", tmp_path / "out")
    assert "2 places of the file: model, ema" in error
    same(as_read(WRITTEN / "an_array_elsewhere.bin", tmp_path / "out"), {"w": TWO})


def test_before_torch_1_6(tmp_path: Path) -> None:
    """Classes of modules come with their source, and storages of types that are not read lie before those that are."""
    want = {"w": np.arange(3, dtype="<f4")}
    same(as_read(WRITTEN / "a_class_beside.old.bin", tmp_path / "class"), want)
    same(as_read(WRITTEN / "unread_types_before.old.bin", tmp_path / "types", "--select", "c"), want)


@pytest.mark.parametrize("form", FORMS)
def test_protocols_that_are_not_read(form: str, tmp_path: Path) -> None:
    for protocol in (0, 1):
        error = refused(WRITTEN / f"protocol_{protocol}.{form}", tmp_path / "out")
        assert "protocols 0 and 1 are not read" in error, protocol


def test_the_pickles_checksum(src: Path, tmp_path: Path) -> None:
    """A name with another letter is a model that nobody saved; a writer that takes no checksums writes 0."""
    path = put("tied.bin", src / "pytorch_model.bin")
    path.write_bytes(path.read_bytes().replace(b"weight", b"weighs"))
    assert "data.pkl` is damaged: its CRC-32 is" in refused(src, tmp_path / "out")
    same(as_read(WRITTEN / "no_checksums.bin", tmp_path / "out"), {"a": TWO})


def test_torchscript(tmp_path: Path) -> None:
    with zipfile.ZipFile(put("a.bin", tmp_path / "model.pt"), "a") as z:
        z.writestr("archive/constants.pkl", b"\x80\x02).")
    assert "TorchScript module" in refused(tmp_path / "model.pt", tmp_path / "out")


@pytest.mark.parametrize("path", sorted((FIXTURES / "hostile").iterdir()), ids=lambda p: p.stem)
def test_hostile(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing runs and nothing is written outside; what is honest apart from a strange member is read."""
    path = path.absolute()
    monkeypatch.chdir(tmp_path)
    if path.stem == "zip_slip":
        same(as_read(path, Path("out")), RANGE)
    else:
        refused(path, "out")
        assert command("inspect", path, "--stats").code == 1
        assert command("inspect", path, "--check").code == 3
    assert not list(tmp_path.parent.rglob("canary"))


def crafted(pickled: bytes = b"", *, twice: bool = False, lies: int = 0) -> bytes:
    """A file of torch.save with another pickle, a storage that is there twice, or another size in the directory."""
    out = io.BytesIO()
    with zipfile.ZipFile(WRITTEN / "range.bin") as old, zipfile.ZipFile(out, "w") as new:
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
    same(as_read(src, tmp_path / "out"), RANGE)
    (src / "pytorch_model.bin").write_bytes(crafted(tensor_pickle().replace(b"X\x01\0\0\0a", b"U\x01a")))
    same(as_read(src, tmp_path / "again"), RANGE)
    same(as_read(WRITTEN / "old_keys.bin", tmp_path / "old"), {"w": TWO})


def test_cut_off_anywhere(tmp_path: Path) -> None:
    """Every prefix of both forms is refused; not one is half a model."""
    for form in FORMS:
        data = (WRITTEN / f"range.{form}").read_bytes()
        for n in range(0, len(data) - 1, 7):
            (tmp_path / "part").write_bytes(data[:n])
            with pytest.raises(CkptError):
                read_torch(tmp_path / "part")


def test_names_lie(tmp_path: Path) -> None:
    """.bin is anybody's: what else it holds is named."""
    for name, data, words in (
        ("a.bin", b"GGUF" + bytes(60), "GGUF file"),
        ("b.bin", b"\x80\x04K\x01.", "pickle was not written by torch.save"),
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
    put("a.bin", tmp_path / "src/pytorch_model.bin")
    assert len(as_read(tmp_path / "src", tmp_path / "out")) == 21
    put("a.bin", tmp_path / "pytorch_model.bin")
    put("optimizer.bin", tmp_path / "optimizer.pt")
    done = reshard(tmp_path / "pytorch_model.bin", tmp_path / "one", "--to", "hf")
    assert "optimizer" not in done.err
    (tmp_path / "train").mkdir()
    for name in ("pytorch_model.bin", "optimizer.pt"):
        (tmp_path / name).rename(tmp_path / "train" / name)
    done = reshard(tmp_path / "train", tmp_path / "two", "--to", "hf")
    assert "the optimizer (optimizer.pt) has no state yet" in done.err


def test_which_file_is_the_model(src: Path) -> None:
    """transformers' training_args.bin makes nothing Paddle's; of several files, or none, the error says the truth."""
    assert "there are no files of torch.save" in command("inspect", src, "--from", "torch-bin").err
    put("a.bin", src / "weights.pt")
    put("no_tensors.bin", src / "training_args.bin")
    (src / "config.json").write_text("{}")
    done = command("inspect", src)
    assert done.code == 0, done.err
    assert "skipped, not part of the model: training_args.bin" in done.err
    put("a.bin", src / "again.pt")
    error = command("inspect", src).err
    assert "files of torch.save (again.pt, training_args.bin, weights.pt), and it is unclear which one" in error


def test_tied_weights_are_written_once(src: Path, tmp_path: Path) -> None:
    """Where config.json ties them and the file stores them in one place; else both are tensors of their own."""
    fields = {"model_type": "qwen2", "num_hidden_layers": 1, "hidden_size": 2, "vocab_size": 4}
    (src / "config.json").write_text(json.dumps({**fields, "tie_word_embeddings": True}))
    put("tied.bin", src / "pytorch_model.bin")
    done = reshard(src, tmp_path / "out", "--to", "torch-bin", "--verify")
    assert "`lm_head.weight` has the bytes of `model.embed_tokens.weight`" in done.err
    assert loaded(tmp_path / "out/pytorch_model.bin").keys() == {"model.embed_tokens.weight"}
    put("apart.bin", src / "pytorch_model.bin")
    assert len(as_read(src, tmp_path / "two")) == 2
    (src / "config.json").unlink()
    put("tied.bin", src / "pytorch_model.bin")
    assert len(as_read(src, tmp_path / "both")) == 2


def test_shards(src: Path, tmp_path: Path) -> None:
    """A shard that is missing is an error; an index that is wrong, a note; two files with one tensor, an error."""
    put("a.bin", src / "pytorch_model-00001-of-00002.bin")
    assert "1 of 2 files are missing" in refused(src, tmp_path / "out")
    put("b.bin", src / "pytorch_model-00002-of-00002.bin")
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
    put("a.bin", src / two)
    assert "tensor `a` is in two files" in refused(src, tmp_path / "no")


# -- writing


@pytest.mark.parametrize("options", [(), ("--max-shard-size", "20KB"), ("--workers", 1, "--manifest")])
def test_written_files_are_torchs(options: tuple[object, ...], tmp_path: Path) -> None:
    """Python's unpickler finds every tensor, zipfile every checksum right, and the tool reads them back."""
    out = tmp_path / "out"
    reshard(FIXTURES / "sharded", out, "--to", "torch-bin", "--verify", *options)
    files = sorted(out.glob("pytorch_model*.bin"))
    assert (len(files) > 1) == ("--max-shard-size" in options)
    found: dict[str, tuple[tuple[int, ...], bytes]] = {}
    for path in files:
        found |= loaded(path)
        with zipfile.ZipFile(path) as z:
            assert all(data_offset(path, i) % 64 == 0 for i in z.infolist())
    assert found == held(FIXTURES / "sharded.safetensors")
    if len(files) > 1:
        index = json.loads((out / "pytorch_model.bin.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(len(data) for _, data in found.values())
        assert {f.name for f in files} == set(index["weight_map"].values())
    assert command("inspect", out, "--check").code == 0
    assert as_read(out, tmp_path / "back") == headers(FIXTURES / "sharded.safetensors")


def data_offset(path: Path, info: zipfile.ZipInfo) -> int:
    name, extra = struct.unpack_from("<2H", path.read_bytes(), info.header_offset + 26)
    return info.header_offset + 30 + int(name) + int(extra)


def test_every_dtype_is_written(tmp_path: Path) -> None:
    """And computed tensors get their checksums, too: merged ones are written by other processes."""
    reshard(FIXTURES / "dtypes", tmp_path / "out", "--to", "torch-bin")
    assert loaded(tmp_path / "out/pytorch_model.bin") == held(FIXTURES / "dtypes.safetensors")
    reshard(FIXTURES / "sharded", tmp_path / "hf", "--to", "hf")
    done = command("merge", FIXTURES / "sharded", tmp_path / "hf", "-o", tmp_path / "merged", "--to", "torch-bin")
    assert done.code == 0, done.err
    assert loaded(tmp_path / "merged/pytorch_model.bin") == held(FIXTURES / "sharded.safetensors")


def test_what_torch_has_not(src: Path, tmp_path: Path) -> None:
    header = {"a": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}}
    text = json.dumps(header).encode()
    (src / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + b"\0\0")
    assert "`a` is F4, which torch.save does not write" in refused(src, tmp_path / "out", "--to", "torch-bin")


def test_beyond_4_gib(tmp_path: Path) -> None:
    """Sizes and offsets of zip64; the bytes of the tensors are a hole in the file."""
    laid = lay_out_torch(
        {"a": Hole("F32", (1 << 30, 1)), "b": Hole("I8", (3,)), "c": Hole("F8_E4M3", (5 << 30,))}, "big"
    )
    path = tmp_path / "big.bin"
    with path.open("wb") as f:
        f.truncate(laid.size)
        for at, data in laid.literals:
            f.seek(at)
            f.write(data)
    file = read_torch(path)
    for name, t in file.value.items():
        assert file.place(t, name, 0).offset == laid.offsets[name,]
    with zipfile.ZipFile(path) as z:
        assert [i.file_size for i in z.infolist() if "/data/" in i.filename] == [4 << 30, 3, 5 << 30]
