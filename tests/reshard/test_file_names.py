"""Names that libraries look for: those of diffusers and of variants stay, and two variants are never mixed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.command import ckpttool, refused
from tests.helpers.tensorfile import Raw, Tensors, assert_same, origin, read_all, write

CONFIG = {"_class_name": "UNet2DConditionModel", "_diffusers_version": "0.30.0", "sample_size": 8}
UNET: Tensors = {
    f"down_blocks.{i}.resnets.0.{part}": Raw("BF16", t.bits & 0x3FFF)
    for i in range(3)
    for part, t in {
        "conv1.weight": origin(2 * i + 1, "BF16", (16, 12, 3, 3)),
        "time_emb_proj.weight": origin(2 * i + 2, "BF16", (32, 32)),
    }.items()
}
STEMS = {
    "model": "model.safetensors.index.json",
    "diffusion_pytorch_model": "diffusion_pytorch_model.safetensors.index.json",
    "diffusion_pytorch_model.fp16": "diffusion_pytorch_model.safetensors.index.fp16.json",
    "model.fp16": "model.safetensors.index.fp16.json",
    "diffusion_pytorch_model.non_ema": "diffusion_pytorch_model.safetensors.index.non_ema.json",
}
"""Stem -> index, as transformers and diffusers write them (``_add_variant``)."""


def save(folder: Path, stem: str, *, shards: int, tensors: Tensors = UNET) -> Path:
    """A checkpoint as ``save_pretrained(variant=...)`` leaves it."""
    (folder / "config.json").parent.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    if shards == 1:
        write(folder / f"{stem}.safetensors", tensors)
        return folder
    weight_map: dict[str, str] = {}
    for i in range(shards):
        name = f"{stem}-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = {n: t for j, (n, t) in enumerate(tensors.items()) if j % shards == i}
        write(folder / name, part)
        weight_map |= dict.fromkeys(part, name)
    index: dict[str, Any] = {"metadata": {"total_size": sum(t.bits.nbytes for t in tensors.values())}}
    (folder / STEMS[stem]).write_text(json.dumps({**index, "weight_map": weight_map}))
    return folder


def names(folder: Path) -> set[str]:
    return {p.name for p in folder.iterdir()} - {"config.json", "ckpttool.merge.json"}


def expected(stem: str, shards: int) -> set[str]:
    if shards == 1:
        return {f"{stem}.safetensors"}
    return {STEMS[stem], *(f"{stem}-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards))}


@pytest.mark.product
@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("stem", STEMS)
def test_the_stem_stays(tmp_path: Path, stem: str, shards: int) -> None:
    src = save(tmp_path / "src", stem, shards=shards)
    other = save(tmp_path / "other", "model", shards=1)  # the first model of a merge decides
    limit = ["--max-shard-size", "9000"] if shards > 1 else []
    for i, words in enumerate(
        (
            ["reshard", src, tmp_path / "0", "--to", "hf", "--verify", *limit],
            ["merge", src, other, "--weights", "0.5,0.5", "-o", tmp_path / "1", "--verify", *limit],
            ["drop-keys", src, tmp_path / "2", "*.2.*", "--verify"],
        )
    ):
        done = ckpttool(*words)
        assert done.code == 0, done.err
        assert "left out" not in done.err or words[0] == "drop-keys"
        found = names(tmp_path / str(i))
        total = len([n for n in found if n.endswith(".safetensors")])
        assert found == expected(stem, total), words
        assert total == 1 if shards == 1 else total > 1
        if total > 1:
            index = json.loads((tmp_path / str(i) / STEMS[stem]).read_text())
            assert set(index["weight_map"].values()) == {n for n in found if n.endswith(".safetensors")}
        kept = {n: t for n, t in UNET.items() if i != 2 or ".2." not in n}
        assert_same(read_all(tmp_path / str(i)), kept)


def test_quantize_keeps_the_stem(tmp_path: Path) -> None:
    src = save(tmp_path / "src", "diffusion_pytorch_model", shards=1)
    assert ckpttool("quantize", src, tmp_path / "dst", "--verify").code == 0
    assert names(tmp_path / "dst") == {"diffusion_pytorch_model.safetensors"}


def test_without_a_name_it_is_that_of_the_library_in_the_config(tmp_path: Path) -> None:
    src = save(tmp_path / "src", "diffusion_pytorch_model", shards=1)
    ranks = tmp_path / "ranks"
    assert ckpttool("reshard", src, ranks, "--tp-out", 2, "--split", "*=0").code == 0
    assert all(n.startswith("rank-") for n in names(ranks))
    assert ckpttool("reshard", ranks, tmp_path / "back", "--to", "hf", "--split", "*=0").code == 0
    assert names(tmp_path / "back") == {"diffusion_pytorch_model.safetensors"}
    (src / "diffusion_pytorch_model.safetensors").rename(src / "of_my_own.safetensors")
    assert ckpttool("reshard", src, tmp_path / "own", "--to", "hf").code == 0
    assert names(tmp_path / "own") == {"diffusion_pytorch_model.safetensors"}
    (src / "config.json").write_text("{}")
    assert ckpttool("reshard", src, tmp_path / "plain", "--to", "hf").code == 0
    assert names(tmp_path / "plain") == {"model.safetensors"}


@pytest.mark.product
@pytest.mark.parametrize("stem", ["model", "diffusion_pytorch_model"])
@pytest.mark.parametrize(("shards", "others"), [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_variants_are_not_mixed(tmp_path: Path, stem: str, shards: int, others: int) -> None:
    """What loaders take is taken: the files without a word. The other variant is chosen by its path."""
    src = save(tmp_path / "src", stem, shards=shards)
    half = {n: Raw("F16", t.bits ^ 1) for n, t in UNET.items()}
    save(src, f"{stem}.fp16", shards=others, tensors=half)
    done = ckpttool("reshard", src, tmp_path / "dst", "--to", "hf", "--verify")
    assert done.code == 0, done.err
    assert "another variant: skipped" in done.err
    assert names(tmp_path / "dst") == {f"{stem}.safetensors"}
    assert_same(read_all(tmp_path / "dst"), UNET)
    dropped = ckpttool("drop-keys", src, tmp_path / "less", "*.2.*")
    assert dropped.code == 0, dropped.err
    assert not any("fp16" in n for n in names(tmp_path / "less"))
    chosen = src / (f"{stem}.fp16.safetensors" if others == 1 else STEMS[f"{stem}.fp16"])
    assert ckpttool("reshard", chosen, tmp_path / "half", "--to", "hf", "--verify").code == 0
    assert names(tmp_path / "half") == {f"{stem}.fp16.safetensors"}
    assert_same(read_all(tmp_path / "half"), half)


def test_two_variants_and_nothing_between_them(tmp_path: Path) -> None:
    src = save(tmp_path / "src", "model.fp16", shards=2)
    save(src, "model.bf16", shards=1)
    error = refused(src, tmp_path / "dst", "--to", "hf")
    assert "there are 2 variants of model here: bf16, fp16" in error
    assert "give the path of one" in error


@pytest.mark.parametrize("second", ["diffusion_pytorch_model-00001-of-00001", "pytorch_lora_weights"])
def test_two_checkpoints(tmp_path: Path, second: str) -> None:
    src = save(tmp_path / "src", "diffusion_pytorch_model", shards=1)
    write(src / f"{second}.safetensors", UNET)
    assert "there is more than one checkpoint in this directory" in refused(src, tmp_path / "dst", "--to", "hf")


def test_files_beside_the_model_are_named(tmp_path: Path) -> None:
    src = save(tmp_path / "src", "model", shards=1)
    write(src / "extra.safetensors", {"a.weight": UNET["down_blocks.0.resnets.0.conv1.weight"]})
    done = ckpttool("reshard", src, tmp_path / "dst", "--to", "hf")
    assert (done.code, "extra.safetensors is not part of model.safetensors; left out" in done.err) == (0, True)


def test_a_shard_of_a_variant_is_missing(tmp_path: Path) -> None:
    src = save(tmp_path / "src", "diffusion_pytorch_model.fp16", shards=3)
    (src / "diffusion_pytorch_model.fp16-00002-of-00003.safetensors").unlink()
    error = refused(src, tmp_path / "dst", "--to", "hf")
    assert "diffusion_pytorch_model.fp16-00002-of-00003.safetensors" in error


def test_the_index_is_made_anew(tmp_path: Path) -> None:
    src = save(tmp_path / "src", "diffusion_pytorch_model.fp16", shards=2)
    wanted = json.loads((src / STEMS["diffusion_pytorch_model.fp16"]).read_text())
    (src / STEMS["diffusion_pytorch_model.fp16"]).unlink()
    assert ckpttool("inspect", src, "--write-index").code == 0
    assert json.loads((src / STEMS["diffusion_pytorch_model.fp16"]).read_text()) == wanted
    assert ckpttool("inspect", src, "--check").code == 0
