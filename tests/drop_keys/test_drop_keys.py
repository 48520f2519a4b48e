"""drop-keys: what goes is gone everywhere, what stays is untouched."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from ckpttool.execute import engine
from tests.helpers.command import ckpttool, reshard
from tests.helpers.families import MODELS
from tests.helpers.tensorfile import save_hf

if TYPE_CHECKING:
    from tests.helpers.command import Done

FT1 = Path(__file__).parents[2] / "fixtures/merge/inputs/ft1"
INDEX = "model.safetensors.index.json"


def drop(*arguments: object) -> Done:
    """``ckpttool drop-keys``, which must succeed."""
    done = ckpttool("drop-keys", *arguments)
    assert done.code == 0, done.err
    return done


def bits(directory: Path) -> dict[str, bytes]:
    """Every tensor's bytes, by the library that everyone loads such files with."""
    out = {}
    for path in sorted(directory.glob("*.safetensors")):
        data = path.read_bytes()
        n = int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8 : 8 + n]).items():
            if name != "__metadata__":
                a, b = entry["data_offsets"]
                out[name] = data[8 + n + a : 8 + n + b]
    return out


def index(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / INDEX).read_text())
    return found


@pytest.fixture
def source(tmp_path: Path) -> Path:
    shutil.copytree(FT1, tmp_path / "src")
    return tmp_path / "src"


@pytest.mark.parametrize("right", [True, False])
def test_the_number_of_parameters_follows(source: Path, tmp_path: Path, right: bool) -> None:
    """transformers 5 writes it into the index. Where it is not what the tensors have, nobody knows what it counted."""
    said = index(source)
    said["metadata"]["total_parameters"] = sum(map(len, bits(source).values())) // 2 - (not right)
    (source / INDEX).write_text(json.dumps(said))
    assert drop(source, tmp_path / "dst", "*.layers.2.*").code == 0
    left = sum(map(len, bits(tmp_path / "dst").values()))
    expected = {"total_size": left, "total_parameters": left // 2} if right else {"total_size": left}
    assert {k: v for k, v in index(tmp_path / "dst")["metadata"].items() if k.startswith("total")} == expected


def test_what_goes_is_gone_everywhere(source: Path, tmp_path: Path) -> None:
    done = drop(source, tmp_path / "dst", "*.layers.2.*", "re:q_proj", "--verify", "--json")
    before, after = bits(source), bits(tmp_path / "dst")
    gone = {n for n in before if ".layers.2." in n or "q_proj" in n}
    assert after == {n: b for n, b in before.items() if n not in gone}
    said = index(tmp_path / "dst")
    assert set(said["weight_map"]) == set(after)
    assert said["metadata"]["total_size"] == sum(map(len, after.values()))
    for name, file in said["weight_map"].items():
        with safe_open(tmp_path / "dst" / file, "np") as f:
            assert name in f.keys()  # noqa: SIM118 - not a mapping
            assert f.metadata() == {"format": "pt"}
    told = json.loads(done.out)
    assert told["removed_tensors"] == len(gone)
    assert told["removed_bytes"] == sum(len(before[n]) for n in gone)
    assert told["verified"]


def test_files_that_lose_nothing_stay(source: Path, tmp_path: Path) -> None:
    drop(source, tmp_path / "dst", "lm_head.weight")
    holder = index(source)["weight_map"]["lm_head.weight"]
    for path in source.glob("*.safetensors"):
        same = (tmp_path / "dst" / path.name).read_bytes() == path.read_bytes()
        assert same == (path.name != holder)
        assert not path.samefile(tmp_path / "dst" / path.name)


def test_a_file_that_loses_all_goes_and_the_others_are_counted_anew(source: Path, tmp_path: Path) -> None:
    weight_map = index(source)["weight_map"]
    first = min(weight_map.values())
    held = [n for n, f in weight_map.items() if f == first]
    done = drop(source, tmp_path / "dst", *held)
    assert sorted(p.name for p in (tmp_path / "dst").glob("*.safetensors")) == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
    assert "1 deleted" in done.out
    assert set(bits(tmp_path / "dst")) == set(weight_map) - set(held)
    assert ckpttool("inspect", tmp_path / "dst").code == 0


def test_only_one_file_is_left(source: Path, tmp_path: Path) -> None:
    weight_map = index(source)["weight_map"]
    last = max(weight_map.values())
    drop(source, tmp_path / "dst", *[n for n, f in weight_map.items() if f != last])
    assert [p.name for p in (tmp_path / "dst").glob("*.safetensors")] == ["model.safetensors"]
    assert set(bits(tmp_path / "dst")) == {n for n, f in weight_map.items() if f == last}


def test_links(source: Path, tmp_path: Path) -> None:
    """Files that stay share their bytes; the source is untouched by that."""
    before = {p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in source.iterdir()}
    done = drop(source, tmp_path / "dst", "lm_head.weight", "--link")
    assert "2 files hard-linked" in done.err or "2 files reflinked" in done.err
    holder = index(source)["weight_map"]["lm_head.weight"]
    for path in source.glob("*.safetensors"):
        if path.name != holder and "hard-linked" in done.err:
            assert path.samefile(tmp_path / "dst" / path.name)
    assert {p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in source.iterdir()} == before


def test_links_that_do_not_work_are_copies(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(fcntl, "ioctl", refuse)
    done = drop(source, tmp_path / "dst", "lm_head.weight", "--link", "--verify")
    assert "2 files copied: linking does not work here" in done.err
    assert bits(tmp_path / "dst") == {n: b for n, b in bits(source).items() if n != "lm_head.weight"}


def test_resume_with_links(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interruption at the end leaves linked files, which nothing writes through afterwards."""
    before = bits(source)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine.Run, "_finish", interrupt)
        assert ckpttool("drop-keys", source, tmp_path / "dst", "lm_head.weight", "--link").code == 130
    assert not (tmp_path / "dst").exists()
    drop(source, tmp_path / "dst", "lm_head.weight", "--link", "--resume", "--verify")
    assert bits(source) == before
    assert bits(tmp_path / "dst") == {n: b for n, b in before.items() if n != "lm_head.weight"}


def test_a_single_file_without_index(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    save_file(
        {"a.weight": np.arange(6, dtype=np.float32), "b.weight": np.ones((2, 2), np.float16)},
        tmp_path / "src/model.safetensors",
        {"format": "np", "note": "kept"},
    )
    drop(tmp_path / "src", tmp_path / "dst", "a.*")
    assert sorted(p.name for p in (tmp_path / "dst").iterdir()) == ["model.safetensors"]
    with safe_open(tmp_path / "dst/model.safetensors", "np") as f:
        assert list(f.keys()) == ["b.weight"]
        assert f.metadata() == {"format": "np", "note": "kept"}


@pytest.mark.parametrize("name", ["optimizer.safetensors", "master_weights-00001-of-00001.safetensors"])
def test_optimizer_and_master_weight_files(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    save_file({"w/moment1_0": np.ones(3, np.float32), "w/moment2_0": np.zeros(3, np.float32)}, path)
    drop(path, tmp_path / "dst", "*/moment1_0")
    (left,) = (tmp_path / "dst").glob("*.safetensors")
    assert left.name == name
    with safe_open(left, "np") as f:
        assert list(f.keys()) == ["w/moment2_0"]


def test_ranks_stay_ranks(tmp_path: Path) -> None:
    reshard(FT1, tmp_path / "cut", "--to", "ranks", "--tp-out", 2)
    drop(tmp_path / "cut", tmp_path / "dst", "lm_head.weight", "--verify")
    assert len(list((tmp_path / "dst").glob("rank-*.safetensors"))) == 2
    done = ckpttool("inspect", tmp_path / "dst", "--list")
    assert "lm_head" not in done.out
    assert "model.norm.weight" in done.out


def test_dry_run_lists_what_would_go(tmp_path: Path) -> None:
    done = drop(FT1, tmp_path / "dst", "*.layers.1.*", "--dry-run")
    lines = done.out.splitlines()
    assert lines[0].split("\t") == ["tensor", "dtype", "shape", "bytes"]
    assert len(lines) == 1 + 9
    plan = json.loads(drop(FT1, tmp_path / "dst", "*.layers.1.*", "--dry-run", "--json").out)
    assert plan["removed_bytes"] == sum(t["bytes"] for t in plan["tensors"]) > 0
    assert not (tmp_path / "dst").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["lm_hed.weight"], "did you mean `lm_head.weight`?"),
        (["*"], "no tensor is left"),
        ([], "no tensors to drop"),
        (["lm_head.weight", "--tp-out", "2"], "`ckpttool reshard SRC DST --remove-keys PATTERN --tp-out 2`"),
    ],
)
def test_refusals(tmp_path: Path, arguments: list[str], words: str) -> None:
    done = ckpttool("drop-keys", FT1, tmp_path / "dst", *arguments)
    assert done.code == 2
    assert words in done.err
    assert not (tmp_path / "dst").exists()


def test_keep_keys(tmp_path: Path) -> None:
    drop(FT1, tmp_path / "dst", "--keep-keys", "*.layers.0.*")
    assert len(bits(tmp_path / "dst")) == 9


def with_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_required_weights_warn(source: Path, tmp_path: Path) -> None:
    done = drop(source, tmp_path / "a", "lm_head.weight")
    assert "warning: `lm_head.weight` is required" in done.err
    with_config(source, tie_word_embeddings=True)
    done = drop(source, tmp_path / "b", "lm_head.weight")
    assert "warning" not in done.err
    done = drop(source, tmp_path / "c", "model.embed_tokens.weight", "model.norm.weight", "*.1.mlp.up_proj.*")
    for words in ("`model.embed_tokens.weight` is required", "`model.norm.weight` is required", "layer 1 loses some"):
        assert words in done.err


def test_prediction_layers_that_are_gone_are_not_counted(source: Path, tmp_path: Path) -> None:
    with_config(source, num_hidden_layers=2, num_nextn_predict_layers=1)
    done = drop(source, tmp_path / "dst", "*.layers.2.*")
    assert "num_nextn_predict_layers is 0 now" in done.err
    assert json.loads((tmp_path / "dst/config.json").read_text())["num_nextn_predict_layers"] == 0
    assert json.loads((source / "config.json").read_text())["num_nextn_predict_layers"] == 1


def test_scales_without_their_weight_warn(tmp_path: Path) -> None:
    source = FT1.parents[1] / "bad_inputs/ft2_fp8"
    done = drop(source, tmp_path / "dst", "*.0.mlp.up_proj.weight")
    assert "stay without their weight" in done.err
    done = drop(source, tmp_path / "dst2", "*.0.mlp.up_proj.weight_scale_inv")
    assert "stays without its scales" in done.err


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("*.experts.5.*", "expert 5 is gone, and config.json and the routers still count it"),
        ("re:.*experts\\.[45]\\..*", "experts 4, 5 are gone, and config.json and the routers still count them"),
        ("model.layers.1.mlp.experts.5.*", ""),
    ],
)
def test_experts_that_go_are_named(tmp_path: Path, pattern: str, said: str) -> None:
    model = MODELS["qwen3_moe"]
    save_hf(tmp_path / "src", model.tensors(), model.config)
    for command in ("drop-keys", "reshard"):
        words = [pattern] if command == "drop-keys" else ["--to", "hf", "--remove-keys", pattern]
        done = ckpttool(command, tmp_path / "src", tmp_path / command, *words)
        assert done.code == 0, done.err
        assert said in done.err
        assert ("routers" in done.err) is bool(said)
