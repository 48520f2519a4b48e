"""LoRA files of diffusers and sd-scripts, by their names alone; tests/peers holds them to what diffusers fuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.command import ckpttool
from tests.helpers.tensorfile import Raw, read_all, write

Array = np.ndarray[Any, np.dtype[Any]]
RANK = 2
LAYERS = {"blocks.0.attn.to_q": (6, 4), "blocks.0.attn.to_out.0": (4, 6), "blocks.0.ff": (8, 4)}


def save(path: Path, held: dict[str, Array], metadata: dict[str, str] | None = None) -> Path:
    return write(path, {n: Raw("F32", a.astype(np.float32).view("<u4")) for n, a in held.items()}, metadata)


def base(folder: Path, seed: int = 0) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    held = {f"{n}.weight": rng.standard_normal(s).astype(np.float32) for n, s in LAYERS.items()}
    save(folder / "diffusion_pytorch_model.safetensors", held, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"_class_name": "UNet2DConditionModel"}))
    return held


def pipeline(root: Path) -> dict[str, dict[str, Array]]:
    held = {p: base(root / p, i) for i, p in enumerate(("unet", "text_encoder"))}
    index = {"_class_name": "StableDiffusionPipeline", **{p: ["diffusers", "X"] for p in held}}
    (root / "model_index.json").write_text(json.dumps(index))
    return held


def factors(names: dict[str, str], down: str, up: str) -> dict[str, Array]:
    """Under other names, for the layers that are the keys."""
    rng = np.random.default_rng(7)
    out: dict[str, Array] = {}
    for layer, name in names.items():
        rows, columns = LAYERS[layer]
        out |= {f"{name}{down}": rng.standard_normal((RANK, columns)), f"{name}{up}": rng.standard_normal((rows, RANK))}
    return {n: a.astype(np.float32) for n, a in out.items()}


def added(
    held: dict[str, Array], lora: dict[str, Array], names: dict[str, str], ends: tuple[str, str], f: float = 1
) -> dict[str, Array]:
    down, up = ends
    return {
        n: w + f * lora[f"{name}{up}"] @ lora[f"{name}{down}"] if (name := names.get(n.removesuffix(".weight"))) else w
        for n, w in held.items()
    }


def merged(src: Path, lora: Path, dst: Path, *words: str) -> dict[str, Array]:
    done = ckpttool("merge", f"{src}+{lora}", "-o", dst, "--verify", *words)
    assert done.code == 0, done.err
    return {n: t.bits.view("<f4") for n, t in read_all(dst).items()}


def refused(src: Path, lora: Path, dst: Path) -> str:
    done = ckpttool("merge", f"{src}+{lora}", "-o", dst)
    assert done.code in (1, 2), done.err
    assert not dst.exists()
    return done.err


PEFT = (".lora_A.weight", ".lora_B.weight")
FORMS: dict[str, tuple[dict[str, str], tuple[str, str]]] = {
    "peft": ({n: f"unet.{n}" for n in LAYERS}, PEFT),
    "alone": ({n: n for n in LAYERS}, PEFT),
    "diffusers": ({n: f"unet.{n}" for n in LAYERS}, (".lora.down.weight", ".lora.up.weight")),
    "processor": (
        {f"blocks.0.attn.{n}": f"unet.blocks.0.attn.processor.{n.removesuffix('.0')}" for n in ("to_q", "to_out.0")},
        ("_lora.down.weight", "_lora.up.weight"),
    ),
    "sd-scripts": (
        {n: f"lora_unet_{n.replace('.', '_')}" for n in LAYERS}, (".lora_down.weight", ".lora_up.weight"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_factors_are_added_under_all_names(tmp_path: Path, form: str) -> None:
    names, ends = FORMS[form]
    held, lora = base(tmp_path / "unet"), factors(names, *ends)
    found = merged(tmp_path / "unet", save(tmp_path / "lora.safetensors", lora), tmp_path / "dst")
    wanted = added(held, lora, names, ends)
    assert found.keys() == wanted.keys()
    for n, w in wanted.items():
        np.testing.assert_allclose(found[n], w, rtol=1e-6, atol=1e-6)
    assert sum(not np.array_equal(found[n], held[n]) for n in held) == len(names)


def test_alpha_is_divided_by_the_rank(tmp_path: Path) -> None:
    names, ends = FORMS["sd-scripts"]
    held, lora = base(tmp_path / "unet"), factors(names, *ends)
    path = save(tmp_path / "lora.safetensors", lora | {f"{n}.alpha": np.array(3.0) for n in names.values()})
    found = merged(tmp_path / "unet", path, tmp_path / "dst")
    for n, w in added(held, lora, names, ends, 3 / RANK).items():
        np.testing.assert_allclose(found[n], w, rtol=1e-6, atol=1e-6)


def test_the_header_of_diffusers_says_alpha(tmp_path: Path) -> None:
    names, ends = FORMS["peft"]
    held, lora = base(tmp_path / "unet"), factors(names, *ends)
    said = {"unet.peft_type": "LORA", "unet.r": RANK, "unet.lora_alpha": 6, "unet.alpha_pattern": {"ff": 1}}
    path = save(tmp_path / "l" / "pytorch_lora_weights.safetensors", lora, {"lora_adapter_metadata": json.dumps(said)})
    found = merged(tmp_path / "unet", path.parent, tmp_path / "dst")
    for factor, layers in ((3, ("to_q", "to_out.0")), (0.5, ("ff",))):
        for n, w in added(held, lora, names, ends, factor).items():
            if n.removesuffix(".weight").endswith(layers):
                np.testing.assert_allclose(found[n], w, rtol=1e-6, atol=1e-6)


def test_the_header_of_a_model_alone_says_alpha(tmp_path: Path) -> None:
    """Neither its names nor its header name a part (save_lora_adapter)."""
    names, ends = FORMS["alone"]
    held, lora = base(tmp_path / "unet"), factors(names, *ends)
    said = {"peft_type": "LORA", "r": RANK, "lora_alpha": 6, "alpha_pattern": {"ff": 1}}
    path = save(tmp_path / "l" / "pytorch_lora_weights.safetensors", lora, {"lora_adapter_metadata": json.dumps(said)})
    found = merged(tmp_path / "unet", path.parent, tmp_path / "dst")
    for factor, layers in ((3, ("to_q", "to_out.0")), (0.5, ("ff",))):
        for n, w in added(held, lora, names, ends, factor).items():
            if n.removesuffix(".weight").endswith(layers):
                np.testing.assert_allclose(found[n], w, rtol=1e-6, atol=1e-6)


def test_the_only_file_of_a_directory_is_taken(tmp_path: Path) -> None:
    names, ends = FORMS["peft"]
    held, lora = base(tmp_path / "unet"), factors(names, *ends)
    path = save(tmp_path / "l" / "style.safetensors", lora)
    found = merged(tmp_path / "unet", path.parent, tmp_path / "dst")
    for n, w in added(held, lora, names, ends).items():
        np.testing.assert_allclose(found[n], w, rtol=1e-6, atol=1e-6)
    save(tmp_path / "l" / "second.safetensors", lora)
    assert "no adapter here" in refused(tmp_path / "unet", path.parent, tmp_path / "two")


def test_each_part_of_a_pipeline_gets_its_own(tmp_path: Path) -> None:
    held = pipeline(tmp_path / "src")
    names = {"blocks.0.ff": "text_encoder.blocks.0.ff"}
    lora = factors(names, *PEFT)
    path = save(tmp_path / "lora.safetensors", lora)
    found = merged(tmp_path / "src", path, tmp_path / "dst", "--weights", "0.5")
    assert found == {}  # there is nothing in the directory itself
    for part, factor in (("unet", 0), ("text_encoder", 0.5)):
        got = {n: t.bits.view("<f4") for n, t in read_all(tmp_path / "dst" / part).items()}
        for n, w in added(held[part], lora, names if factor else {}, PEFT, factor).items():
            np.testing.assert_allclose(got[n], w, rtol=1e-6, atol=1e-6)
    one = tmp_path / "src" / "unet" / "diffusion_pytorch_model.safetensors"
    assert (tmp_path / "dst" / "unet" / one.name).read_bytes() == one.read_bytes()


def test_a_file_for_several_parts_wants_the_pipeline(tmp_path: Path) -> None:
    pipeline(tmp_path / "src")
    lora = factors({"blocks.0.ff": "text_encoder.blocks.0.ff", "blocks.0.attn.to_q": "unet.blocks.0.attn.to_q"}, *PEFT)
    path = save(tmp_path / "lora.safetensors", lora)
    assert "changes several parts" in refused(tmp_path / "src" / "unet", path, tmp_path / "dst")
    gone = save(tmp_path / "two.safetensors", factors({"blocks.0.ff": "text_encoder_2.blocks.0.ff"}, *PEFT))
    assert "text_encoder_2, which the pipeline does not have" in refused(tmp_path / "src", gone, tmp_path / "dst")
    bare = save(tmp_path / "three.safetensors", factors({"blocks.0.ff": "blocks.0.ff"}, *PEFT))
    assert "does not say which part" in refused(tmp_path / "src", bare, tmp_path / "dst")


UP, DOWN = np.zeros((8, RANK), np.float32), np.zeros((RANK, 4), np.float32)
FF = {"unet.blocks.0.ff.lora_A.weight": DOWN, "unet.blocks.0.ff.lora_B.weight": UP}
REFUSED: dict[str, tuple[dict[str, Array], str]] = {
    "DoRA": (FF | {"unet.blocks.0.ff.lora_magnitude_vector": UP}, "lora_magnitude_vector"),
    "bias": (FF | {"unet.blocks.0.ff.lora_B.bias": UP}, "lora_B.bias"),
    "LoHa": ({"lora_unet_blocks_0_ff.hada_w1_a": UP}, "hada_w1_a"),
    "LoKr": ({"lora_unet_blocks_0_ff.lokr_w1": UP}, "lokr_w1"),
    "difference": (FF | {"unet.blocks.0.ff.diff": UP}, "ff.diff"),
    "Tucker": ({"lora_unet_blocks_0_ff.lora_mid.weight": UP}, "lora_mid"),
    "makers' names": ({"diffusion_model.blocks.0.ff.lora_A.weight": DOWN}, "diffusion_model.blocks"),
    "half a pair": ({"unet.blocks.0.ff.lora_A.weight": DOWN}, "lora_B"),
    "another layer": ({n.replace("ff", "gg"): a for n, a in FF.items()}, "are not in the base"),
    "another layer, sd-scripts": (
        {"lora_unet_blocks_0_gg.lora_down.weight": DOWN, "lora_unet_blocks_0_gg.lora_up.weight": UP},
        "a layer that the base does not have",
    ),
    "alpha for some": (
        FF | {n.replace("ff", "attn.to_q"): a for n, a in FF.items()} | {"unet.blocks.0.ff.alpha": np.array(1.0)},
        "has no alpha",
    ),
    "ranks": (FF | {"unet.blocks.0.ff.lora_B.weight": UP[:, :1]}, "are not factors"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_known_is_refused_by_name(tmp_path: Path, case: str) -> None:
    base(tmp_path / "unet")
    held, why = REFUSED[case]
    said = refused(tmp_path / "unet", save(tmp_path / "lora.safetensors", held), tmp_path / "dst")
    assert why in said
