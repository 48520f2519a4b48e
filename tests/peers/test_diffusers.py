"""Pipelines of diffusers: what is written is loaded by diffusers itself, and cut models give the same outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

diffusers = pytest.importorskip("diffusers")
torch = pytest.importorskip("torch")

from safetensors import safe_open  # noqa: E402 - behind the libraries that may lack
from safetensors.torch import load_file, save_file  # noqa: E402

from tests.helpers.command import ckpttool, reshard  # noqa: E402
from tests.peers.diffusion import MODELS, computed, filled, flux  # noqa: E402


def weights(folder: Path) -> dict[str, Any]:
    return {n: t for f in sorted(folder.glob("*.safetensors")) for n, t in load_file(f).items()}


def exchanged(folder: Path) -> None:
    """Rank 0 becomes rank 1 and the other way round."""
    first, second = sorted(folder.glob("rank-*.safetensors"))[:2]
    held = [load_file(f) for f in (second, first)]
    for path, tensors in zip((first, second), held, strict=True):
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
        save_file(tensors, path, metadata=metadata)


@pytest.mark.filterwarnings("ignore:.*FluxPosEmbed:FutureWarning")  # diffusers' own import, for Chroma
@pytest.mark.parametrize("name", MODELS)
def test_ranks_are_units_of_the_model_that_are_all_alike(tmp_path: Path, name: str) -> None:
    """A cut that tears what belongs together, or leaves a partner whole, shows when the ranks are exchanged."""
    model = filled(MODELS[name][0])
    model.save_pretrained(tmp_path / "hf")
    reshard(tmp_path / "hf", tmp_path / "cut", "--tp-out", 2, "--verify")
    reshard(tmp_path / "cut", tmp_path / "back", "--to", "hf")
    before, after = weights(tmp_path / "hf"), weights(tmp_path / "back")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[n], after[n]) for n in before)
    exchanged(tmp_path / "cut")
    reshard(tmp_path / "cut", tmp_path / "other", "--to", "hf")
    moved = weights(tmp_path / "other")
    assert sum(not torch.equal(before[n], moved[n]) for n in before) > 20
    wanted = computed(model, name)
    model.load_state_dict(moved)
    found = computed(model, name)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def parts() -> Iterator[tuple[str, Any]]:
    from transformers import CLIPTextConfig, CLIPTextModel

    yield "transformer", filled(flux)
    yield "vae", diffusers.AutoencoderKL(block_out_channels=(4,), latent_channels=1, norm_num_groups=1)
    yield (
        "text_encoder",
        CLIPTextModel(
            CLIPTextConfig(
                vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
            )
        ),
    )


def test_a_pipeline_that_was_written_is_loaded(tmp_path: Path) -> None:
    lacking = dict.fromkeys(("tokenizer", "tokenizer_2", "text_encoder_2", "image_encoder", "feature_extractor"))
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    given = dict(parts())
    pipeline = diffusers.FluxPipeline(
        scheduler=scheduler, **{n: lacking[n] for n in ("tokenizer", "tokenizer_2", "text_encoder_2")}, **given
    )
    pipeline.save_pretrained(tmp_path / "src")
    reshard(tmp_path / "src", tmp_path / "dst", "--dtype", "bf16", "--max-shard-size", "300kB", "--verify")
    assert len(list((tmp_path / "dst" / "transformer").glob("diffusion_pytorch_model-*.safetensors"))) > 1
    loaded = diffusers.FluxPipeline.from_pretrained(tmp_path / "dst", dtype=torch.bfloat16, **lacking)
    for name, model in given.items():
        wanted, found = model.state_dict(), getattr(loaded, name).state_dict()
        assert wanted.keys() == found.keys()
        assert all(torch.equal(wanted[n].to(torch.bfloat16), found[n]) for n in wanted), name
    done = ckpttool("reshard", tmp_path / "src", tmp_path / "one", "--part", "vae", "--dtype", "f16")
    assert done.code == 0, done.err
    assert diffusers.FluxPipeline.from_pretrained(tmp_path / "one", **lacking).transformer.dtype == torch.float32


# -- LoRA files


def _unet() -> Any:
    return diffusers.UNet2DConditionModel(
        block_out_channels=(8, 16), layers_per_block=2, sample_size=8, in_channels=4, out_channels=4, norm_num_groups=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=32, attention_head_dim=4,
    )  # fmt: skip


def _vae() -> Any:
    return diffusers.AutoencoderKL(block_out_channels=(4,), latent_channels=1, norm_num_groups=1)


def stable_diffusion(folder: Path) -> Any:
    """A tiny Stable Diffusion 1, saved."""
    given = {n: m for n, m in parts() if n == "text_encoder"}
    pipeline = diffusers.StableDiffusionPipeline(
        vae=_vae(), tokenizer=None, unet=filled(_unet), safety_checker=None,
        scheduler=diffusers.DDIMScheduler(steps_offset=1, clip_sample=False),
        feature_extractor=None, requires_safety_checker=False, **given,
    )  # fmt: skip
    pipeline.save_pretrained(folder)
    return pipeline


def flux_pipeline(folder: Path) -> Any:
    given = dict(parts())
    nothing = dict.fromkeys(("tokenizer", "tokenizer_2", "text_encoder_2"))
    pipeline = diffusers.FluxPipeline(scheduler=diffusers.FlowMatchEulerDiscreteScheduler(), **nothing, **given)
    pipeline.save_pretrained(folder)
    return pipeline


_UNET = ("attn1.to_q", "attn2.to_k", "attn1.to_out.0", "ff.net.0.proj", "proj_in", "conv1", "time_emb_proj")
_TEXT = ("q_proj", "out_proj", "fc1")
_FLUX = ("attn.to_q", "attn.to_out.0", "attn.add_k_proj", "ff.net.2", "proj_mlp", "norm1.linear")


def factors(model: Any, ends: tuple[str, ...], rank: int = 4) -> dict[str, Any]:
    """(down, up) for each layer with one of these ends, by its path."""
    out: dict[str, Any] = {}
    for name, m in model.named_modules():
        weight = getattr(m, "weight", None)
        if not name.endswith(ends) or weight is None or weight.ndim not in (2, 4):
            continue
        rows, *rest = weight.shape
        up = (rows, rank) if weight.ndim == 2 else (rows, rank, 1, 1)
        out[name] = torch.randn(rank, *rest) * 0.3, torch.randn(*up) * 0.3
    assert len(out) >= len(ends)
    return out


def _peft(of: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {f"{p}.{n}.lora_{s}.weight": t for p, held in of.items() for n, f in held.items() for s, t in zip("AB", f)}  # noqa: B905 - of two letters


def _kohya(of: dict[str, dict[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for part, held in of.items():
        start = {"unet": "lora_unet", "text_encoder": "lora_te"}[part]
        for name, (down, up) in held.items():
            path = f"{start}_{'text_model.' if part == 'text_encoder' else ''}{name}".replace(".", "_")
            out |= {f"{path}.lora_down.weight": down, f"{path}.lora_up.weight": up, f"{path}.alpha": torch.tensor(2.0)}
    return out


def _old(of: dict[str, dict[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for part, held in of.items():
        for name, (down, up) in held.items():
            module, _, last = name.removesuffix(".0").rpartition(".")
            path = f"{part}.{module}.processor.{last}_lora" if part == "unet" else f"{part}.{name}.lora_linear_layer"
            out |= {f"{path}.down.weight": down, f"{path}.up.weight": up}
    return out


def fused(pipeline: Any, source: Path | dict[str, Any]) -> Any:
    pipeline.load_lora_weights(source)
    pipeline.fuse_lora()
    pipeline.unload_lora_weights()
    return pipeline


def compared(folder: Path, pipeline: Any, changed: dict[str, dict[str, Any]]) -> None:
    """What was written is what diffusers fuses, within the rounding of float32 sums."""
    for part in ("unet", "transformer", "text_encoder", "vae"):
        model = getattr(pipeline, part, None)
        if model is None:
            continue
        wanted, found = model.state_dict(), weights(folder / part)
        assert wanted.keys() == found.keys()
        for name, tensor in wanted.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=1e-6)
        for name in changed.get(part, {}):
            assert f"{name}.weight" in found


FORMS: dict[str, tuple[Callable[[Any], Any], tuple[str, ...]]] = {
    "peft": (_peft, _UNET),
    "kohya": (_kohya, _UNET),
    "old": (_old, ("attn1.to_q", "attn2.to_v", "attn1.to_out.0")),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_lora_of_stable_diffusion_is_added_as_diffusers_fuses_it(tmp_path: Path, form: str) -> None:
    pipeline = stable_diffusion(tmp_path / "src")
    before = {p: weights(tmp_path / "src" / p) for p in ("unet", "text_encoder")}
    write, ends = FORMS[form]
    of = {"unet": factors(pipeline.unet, ends), "text_encoder": factors(pipeline.text_encoder, _TEXT)}
    save_file(write(of), tmp_path / "lora.safetensors")
    done = ckpttool("merge", f"{tmp_path / 'src'}+{tmp_path / 'lora.safetensors'}", "-o", tmp_path / "dst", "--verify")
    assert done.code == 0, done.err
    compared(tmp_path / "dst", fused(pipeline, tmp_path / "lora.safetensors"), of)
    for part, held in of.items():
        after = weights(tmp_path / "dst" / part)
        moved = {n for n in after if not torch.equal(after[n], before[part][n])}
        assert moved == {f"{n}.weight" for n in held}


def test_the_metadata_of_a_lora_file_counts(tmp_path: Path) -> None:
    from peft import LoraConfig

    pipeline = flux_pipeline(tmp_path / "src")
    config = LoraConfig(r=4, lora_alpha=6, target_modules=list(_FLUX), alpha_pattern={"proj_mlp": 3})
    pipeline.transformer.add_adapter(config)
    for name, p in pipeline.transformer.named_parameters():
        if "lora_" in name:
            p.data = torch.randn_like(p) * 0.3
    from peft.utils import get_peft_model_state_dict

    held = get_peft_model_state_dict(pipeline.transformer)
    diffusers.FluxPipeline.save_lora_weights(
        tmp_path / "lora", transformer_lora_layers=held, transformer_lora_adapter_metadata=config.to_dict()
    )
    pipeline.unload_lora_weights()
    done = ckpttool("merge", f"{tmp_path / 'src'}+{tmp_path / 'lora'}", "-o", tmp_path / "dst", "--verify")
    assert done.code == 0, done.err
    compared(tmp_path / "dst", fused(pipeline, tmp_path / "lora"), {})
    alone = ckpttool("merge", f"{tmp_path / 'src' / 'transformer'}+{tmp_path / 'lora'}", "-o", tmp_path / "one")
    assert alone.code == 0, alone.err
    one, all_of_it = weights(tmp_path / "one"), weights(tmp_path / "dst" / "transformer")
    assert all(torch.equal(one[n], all_of_it[n]) for n in all_of_it)


def test_kohyas_files_for_flux_are_taken_apart(tmp_path: Path) -> None:
    pipeline = flux_pipeline(tmp_path / "src")
    dim, mlp, rank = 64, 256, 4
    layers = {
        "double_blocks_0_img_attn_qkv": (3 * dim, dim), "double_blocks_1_txt_attn_qkv": (3 * dim, dim),
        "double_blocks_0_img_attn_proj": (dim, dim), "double_blocks_1_txt_mlp_0": (mlp, dim),
        "double_blocks_1_txt_mod_lin": (6 * dim, dim), "single_blocks_1_linear2": (dim, dim + mlp),
    }  # fmt: skip
    held = {}
    for name, (rows, columns) in layers.items():
        held[f"lora_unet_{name}.lora_down.weight"] = torch.randn(rank, columns) * 0.3
        held[f"lora_unet_{name}.lora_up.weight"] = torch.randn(rows, rank) * 0.3
        held[f"lora_unet_{name}.alpha"] = torch.tensor(2.0)
    save_file(held, tmp_path / "lora.safetensors")
    done = ckpttool("merge", f"{tmp_path / 'src'}+{tmp_path / 'lora.safetensors'}", "-o", tmp_path / "dst", "--verify")
    assert done.code == 0, done.err
    before, after = weights(tmp_path / "src" / "transformer"), weights(tmp_path / "dst" / "transformer")
    assert sum(not torch.equal(before[n], after[n]) for n in before) == 10
    compared(tmp_path / "dst", fused(pipeline, tmp_path / "lora.safetensors"), {})


SGM = (
    "input_blocks_4_1_transformer_blocks_0_attn1_to_q",
    "input_blocks_4_1_proj_in",
    "input_blocks_5_0_in_layers_2",
    "input_blocks_5_0_emb_layers_1",
    "input_blocks_4_0_skip_connection",
    "input_blocks_3_0_op",
    "middle_block_1_transformer_blocks_0_ff_net_0_proj",
    "middle_block_2_out_layers_3",
    "output_blocks_2_1_transformer_blocks_0_attn2_to_v",
    "output_blocks_0_0_skip_connection",
    "output_blocks_2_2_conv",
)


def test_stabilitys_names_of_blocks_are_those_that_diffusers_makes_of_them() -> None:
    from ckpttool.adapters.diffusers import _diffusers_block

    for name in SGM:
        held = {f"lora_unet_{name}.lora_{s}.weight": torch.zeros(2, 2) for s in ("down", "up")}
        unet = _unet()
        said, _ = diffusers.StableDiffusionXLPipeline.lora_state_dict(held, unet_config=unet.config)
        plain = diffusers.utils.convert_unet_state_dict_to_peft({k.removeprefix("unet."): v for k, v in said.items()})
        theirs = next(iter(plain)).partition(".lora_")[0].replace(".", "_")
        assert _diffusers_block(name) == theirs, name
