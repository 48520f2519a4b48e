"""--to dcp: what FSDP2 would have saved. tests/peers lets torch itself load it."""

from __future__ import annotations

import io
import json
import re
import zipfile
from pathlib import Path

import pytest

from ckpttool.checkpoint import open_checkpoint
from ckpttool.execute.files import FilePool
from ckpttool.formats.torch.dcp_metadata import DcpEntry, DcpTensor, read_metadata
from tests.formats.test_dcp import FIXTURES, checkpoint, tensors
from tests.helpers.command import refused, reshard
from tests.helpers.dcp import rows, write_save


def entries(save: Path) -> dict[str, DcpEntry]:
    names: list[str] = []

    def number(name: str) -> int:
        names.append(name)
        return int(re.findall(r"__(\d+)_0", name)[0])

    return {e.fqn: e for e in read_metadata(save / ".metadata", number)}


def slices(save: Path) -> dict[int, bytes]:
    return {int(p.name.split("_")[2]): p.read_bytes() for p in save.glob("*.distcp")}


@pytest.mark.parametrize("files", [1, 3])
def test_rows_over_files(files: int, tmp_path: Path) -> None:
    """Every slice is a sound file of torch.save at a multiple of 64, and together they are the tensors."""
    reshard(FIXTURES / "hf_mixtral" / "checkpoint", tmp_path / "out", "--to", "dcp", "--sharding-out", files)
    data, found = slices(tmp_path / "out"), entries(tmp_path / "out")
    assert sorted(data) == list(range(files))
    for e in found.values():
        assert isinstance(e.value, DcpTensor)
        assert e.path == ("model", e.fqn.removeprefix("model."))
        each = -(-e.value.shape[0] // files)
        assert [c.box.start[0] for c in e.value.chunks] == list(range(0, e.value.shape[0], each))
        for chunk in e.value.chunks:
            file, begin, length = chunk.span
            assert begin % 64 == 0
            assert file == chunk.box.start[0] // each
            assert zipfile.ZipFile(io.BytesIO(data[file][begin : begin + length])).testzip() is None
    reshard(tmp_path / "out", tmp_path / "back", "--to", "hf")
    assert tensors(tmp_path / "back") == tensors(FIXTURES / "hf_mixtral")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "mixtral"


def test_a_chunk_is_few_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its elements, and what lies between them and the next ones, with the checksums in it."""
    written: dict[str, list[int]] = {}
    write = FilePool.write

    def noted(self: FilePool, path: str, offset: int, data: memoryview, *, scattered: bool = False) -> None:
        written.setdefault(Path(path).name, []).append(offset)
        write(self, path, offset, data, scattered=scattered)

    monkeypatch.setattr(FilePool, "write", noted)
    reshard(FIXTURES / "hf_mixtral" / "checkpoint", tmp_path / "out", "--to", "dcp", "--sharding-out", 2)
    chunks = [c for e in entries(tmp_path / "out").values() if isinstance(e.value, DcpTensor) for c in e.value.chunks]
    for file in range(2):
        mine = written[f"__{file}_0.distcp"]
        assert len(set(mine)) == len(mine) <= 2 * sum(c.span[0] == file for c in chunks) + 1


@pytest.mark.parametrize("name", ["hsdp2x2_llama", "titan_llama3"])
def test_a_save_keeps_its_keys(name: str, tmp_path: Path) -> None:
    """Names, nesting, flattened groups and tensors of one number: the trainer that wrote it finds everything."""
    source = FIXTURES / name / "checkpoint"
    reshard(source, tmp_path / "out", "--to", "dcp", "--sharding-out", 2)
    before, after = entries(source), entries(tmp_path / "out")
    lost = {"rng"} if name == "hsdp2x2_llama" else set()
    assert before.keys() - after.keys() == lost
    assert after.keys() <= before.keys()
    assert {f: e.path for f, e in after.items()} == {f: before[f].path for f in after}
    for fqn, e in after.items():
        a, b = before[fqn].value, e.value
        assert isinstance(a, DcpTensor) == isinstance(b, DcpTensor)
        if isinstance(a, DcpTensor) and isinstance(b, DcpTensor):
            assert (a.dtype, a.shape) == (b.dtype, b.shape)
    first, second = checkpoint(source), checkpoint(tmp_path / "out")
    assert first.stored.training == second.stored.training
    for to, options in (("ranks", ("--tp-out", 1)),):
        reshard(source, tmp_path / f"a-{to}", "--to", to, *options)
        reshard(tmp_path / "out", tmp_path / f"b-{to}", "--to", to, *options)
        assert tensors(tmp_path / f"a-{to}") == tensors(tmp_path / f"b-{to}")


@pytest.mark.parametrize("state", [("state", "a.weight", "exp_avg"), ("state.a.weight.exp_avg",)])
def test_keys_of_several_levels_stay(state: tuple[str, ...], tmp_path: Path) -> None:
    """dcp_to_torch nests what it makes by them."""
    where: dict[str, tuple[str | int, ...]] = {"model": ("app", "nets", 0), "ema": ("app", "model_ema")}
    optimizer: tuple[str | int, ...] = ("app", "optims", 0, *state)
    lr: tuple[str | int, ...] = ("app", "optims", 0, "param_groups.a.weight.lr")
    if len(state) > 1:
        lr = ("app", "optims", 0, "param_groups", 0, "lr")
    every: list[tuple[str | int, ...]] = [*((*p, "a.weight") for p in where.values()), optimizer, lr]
    paths = {".".join(map(str, p)): p for p in every}
    described = {f: ("F32", (6, 4), rows((6, 4), 4)) for f in paths if not f.endswith("lr")}
    write_save(tmp_path / "save", described, {".".join(map(str, lr)): 0.5}, paths)
    reshard(tmp_path / "save", tmp_path / "out", "--to", "dcp", "--sharding-out", 2)
    assert {f: e.path for f, e in entries(tmp_path / "out").items()}.items() >= paths.items()


def test_odd_shapes(tmp_path: Path) -> None:
    """0-d, empty, fewer rows than files: every file is there, and no chunk is empty but that of an empty tensor."""
    reshard(FIXTURES / "uneven" / "checkpoint", tmp_path / "out", "--to", "dcp", "--sharding-out", 20)
    assert len(list((tmp_path / "out").glob("*.distcp"))) == 20
    for e in entries(tmp_path / "out").values():
        if not isinstance(e.value, DcpTensor):  # what the trainer keeps beside them
            continue
        volumes = [c.box.volume for c in e.value.chunks]
        assert all(volumes) or volumes == [0]
    reshard(tmp_path / "out", tmp_path / "back", "--to", "hf")
    assert tensors(tmp_path / "back") == tensors(FIXTURES / "uneven")


def test_paddle_becomes_dcp_and_comes_back(tmp_path: Path) -> None:
    """Master weights, moments and the powers of betas, which are steps for torch."""
    source = Path("fixtures/paddle_zcc/sharding2_v1")
    reshard(source, tmp_path / "out", "--to", "dcp", "--sharding-out", 2, "--betas", "0.9,0.999")
    found = entries(tmp_path / "out")
    name = "model.layers.1.input_layernorm.weight"
    for fqn in (
        f"model.{name}",
        f"master_weights.{name}",
        *(f"optimizer.state.{name}.{s}" for s in ("exp_avg", "step")),
    ):
        assert fqn in found, sorted(found)[:5]
    step = found[f"optimizer.state.{name}.step"].value
    assert isinstance(step, DcpTensor)
    assert (step.dtype, step.shape) == ("F32", ())
    one = set(open_checkpoint(tmp_path / "out").components)
    assert one == {"model", "master_weights", "optimizer"}
    reshard(tmp_path / "out", tmp_path / "a", "--to", "ranks", "--tp-out", 1)
    reshard(source, tmp_path / "b", "--to", "ranks", "--tp-out", 1)
    first, second = tensors(tmp_path / "a"), tensors(tmp_path / "b")
    for state, other in (("exp_avg", "moment1_0"), ("exp_avg_sq", "moment2_0")):
        assert first[f"optimizer/{name}/{state}"] == second[f"optimizer/{name}/{other}"]
    assert first[f"master_weights/{name}"] == second[f"master_weights/{name}"]


def test_what_cannot_be_written(tmp_path: Path) -> None:
    write_save(tmp_path / "save", {"w": ("F32", (4, 2), [((0, 0), (4, 2), 0)])})
    assert "--sharding-out sets the number of files" in refused(
        tmp_path / "save", tmp_path / "out", "--to", "dcp", "--tp-out", 2, code=2
    )


def test_two_tensors_never_have_one_name(tmp_path: Path) -> None:
    """A model without a prefix whose tensor is renamed to what its optimizer's state is called."""
    paths: dict[str, tuple[str | int, ...]] = {
        "a.w": ("a.w",),
        "b.w": ("b.w",),
        "optimizer.state.a.w.exp_avg": ("optimizer", "state", "a.w", "exp_avg"),
    }
    write_save(tmp_path / "src", dict.fromkeys(paths, ("F32", (2, 3), [((0, 0), (2, 3), 0)])), {}, paths)
    rename = ("--rename", "b.w=optimizer.state.a.w.exp_avg")
    error = refused(tmp_path / "src", tmp_path / "dst", "--to", "dcp", *rename)
    assert "two tensors would be `optimizer.state.a.w.exp_avg`" in error
