"""What compressed-tensors and transformers make of quantized weights that ckpttool wrote, and the other way round.

Everything is compared bit for bit. compressed-tensors multiplies in the dtype of the scales: a code times a BF16 scale
is exact in float32 and rounded once, which is what ckpttool does too.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.tiny_models import save_tiny
from tests.peers.test_reading import same, torch_state
from tests.peers.tool import quantize

COMPRESSED = ("tensor", "channel", "block", "mxfp8", "nvfp4", "mxfp4")
MINMAX = ("tensor", "channel", "block", "nvfp4", "mxfp4")
"""Recipes with the arithmetic of compressed-tensors. MXFP8 has another rule for exponents, see below."""
ROUND: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96}
"""Sizes that 32 divides, as MXFP8 and MXFP4 need; here none is above 128 that 128 does not divide."""
MODELS: dict[str, dict[str, Any]] = {
    "llama": {**ROUND, "head_dim": 32},
    "qwen3_moe": {**ROUND, "head_dim": 32, "moe_intermediate_size": 64},
    "deepseek_v3": {
        **ROUND,
        "q_lora_rank": 64,
        "moe_intermediate_size": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": 16,
    },
}


def matrices(dtype: str, *, edges: bool, seed: int = 0) -> dict[str, Any]:
    """Weights with all that makes rounding differ: outliers, tiny and huge ones, rows, groups and all of zeros."""
    import torch

    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Any:
        return torch.randn(shape, generator=g) * 0.02

    out = {"plain": normal(256, 384), "wide": normal(64, 512), "one_row": normal(1, 256)}
    out["outliers"] = normal(256, 256)
    out["outliers"][torch.rand(256, 256, generator=g) < 0.001] *= 1000
    out["zeros"] = normal(256, 256)
    out["zeros"][:130] = 0
    out["zeros"][:, 128:160] = 0
    out["magnitudes"] = normal(128, 256) * 2.0 ** torch.randint(-12, 12, (128, 256), generator=g)
    out["grid"] = torch.randint(-6, 7, (128, 128), generator=g).float() / 4  # halfway between codes, mostly
    out["all_zero"] = torch.zeros(128, 128)
    if edges:
        out |= {"edge": normal(130, 200), "latent": normal(576, 256), "odd": normal(37, 53), "narrow": normal(300, 7)}
    return {n: w.to(getattr(torch, dtype)) for n, w in out.items()}


def save_matrices(folder: Path, weights: dict[str, Any]) -> Path:
    """A checkpoint of modules ``model.layers.0.mlp.NAME_proj``, with a norm and a head that stay as they are."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir()
    any_dtype = next(iter(weights.values())).dtype
    state = {f"model.layers.0.mlp.{n}_proj.weight": w for n, w in weights.items()}
    state["model.norm.weight"] = torch.ones(64, dtype=any_dtype)
    state["lm_head.weight"] = torch.ones(32, 64, dtype=any_dtype)
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    text = {"architectures": ["X"], "torch_dtype": str(any_dtype).removeprefix("torch.")}
    (folder / "config.json").write_text(json.dumps(text), encoding="utf-8")
    return folder


def quant_config(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))["quantization_config"]
    return found


def options(recipe: str) -> list[str]:
    """How to ask for what compressed-tensors reads."""
    return ["--recipe", recipe, "--quant-method", "compressed-tensors"]


def close(state: dict[str, Any], weights: dict[str, Any], recipe: str) -> None:
    """What came back is what was quantized, but for the steps of the codes."""
    for name, weight in weights.items():
        got, want = state[f"model.layers.0.mlp.{name}_proj.weight"].double(), weight.double()
        assert (got - want).abs().max() <= want.abs().max() / (4 if recipe.endswith("4") else 20), name


# -- compressed-tensors


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("recipe", COMPRESSED)
def test_compressed_tensors_reads_what_we_write(recipe: str, dtype: str, tmp_path: Path) -> None:
    import torch
    from compressed_tensors.entrypoints.convert.converters import CompressedTensorsDequantizer

    weights = matrices(dtype, edges=recipe in ("tensor", "channel", "block"))
    save_matrices(tmp_path / "source", weights)
    quantize(tmp_path / "source", tmp_path / "cast", *options(recipe))
    quantize(tmp_path / "cast", tmp_path / "back", "--to", "bf16")
    written = torch_state(tmp_path / "cast")
    converter = CompressedTensorsDequantizer(tmp_path / "cast", dtype=torch.bfloat16)
    # Its convert_checkpoint stops at a block that ends inside of columns: "non contiguous tensor".
    theirs = {n: t.contiguous() for n, t in converter.validate(written).items()}
    same(theirs, torch_state(tmp_path / "back"))
    close(theirs, weights, recipe)


@pytest.mark.parametrize("recipe", COMPRESSED)
def test_compressed_tensors_converts_our_files(recipe: str, tmp_path: Path) -> None:
    """Several files with an index, by its own entry point (which cannot do files with nothing but scales)."""
    from compressed_tensors.entrypoints.convert import convert_checkpoint
    from compressed_tensors.entrypoints.convert.converters import CompressedTensorsDequantizer

    save_matrices(tmp_path / "source", matrices("bfloat16", edges=False))
    quantize(tmp_path / "source", tmp_path / "cast", *options(recipe), "--max-shard-size", "150KB")
    assert len(list((tmp_path / "cast").glob("*.safetensors"))) > 1
    # Without this it looks for the scales of norms, in llm-compressor's own files too.
    converter = CompressedTensorsDequantizer(tmp_path / "cast", ignore=["re:.*norm$"])
    convert_checkpoint(tmp_path / "cast", tmp_path / "theirs", converter, max_workers=1)
    quantize(tmp_path / "cast", tmp_path / "back", "--to", "bf16")
    same(torch_state(tmp_path / "theirs"), torch_state(tmp_path / "back"))


def compressed(weight: Any, config: dict[str, Any]) -> dict[str, Any]:
    """One weight compressed by compressed-tensors: its parameters, its scales, its compressor.

    Only least and largest values are found here, which llm-compressor does (its ``memoryless_minmax`` observer).
    """
    import torch
    from compressed_tensors.compressors import compress_module
    from compressed_tensors.quantization import QuantizationConfig, initialize_module_for_quantization
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
    from compressed_tensors.quantization.utils.helpers import maybe_pad_tensor_for_block_quant

    scheme = QuantizationConfig.model_validate(config).config_groups["group_0"]
    args = scheme.weights
    module: Any = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
    module.weight.data = weight.clone()
    initialize_module_for_quantization(module, scheme, force_zero_point=False)
    factor = None
    if args.strategy == "tensor":
        parts = weight.reshape(1, -1)
    elif args.strategy == "channel":
        parts = weight
    elif args.strategy == "block":
        m, n = args.block_structure
        padded = maybe_pad_tensor_for_block_quant(weight, (m, n))
        rows, columns = padded.shape
        parts = padded.view(rows // m, m, columns // n, n).transpose(1, 2).flatten(-2)
    else:
        parts = weight.unflatten(-1, (-1, args.group_size))
    if args.strategy == "tensor_group":
        factor = generate_gparam(weight.min(), weight.max())
        module.weight_global_scale.data.copy_(factor)
    scale, _ = calculate_qparams(parts.amin(-1), parts.amax(-1), args, global_scale=factor)
    module.weight_scale.data.copy_(scale.reshape(module.weight_scale.shape))
    compress_module(module)
    return {n: t.detach() for n, t in module.state_dict().items()}


def of_module(state: dict[str, Any], module: str) -> dict[str, Any]:
    return {n.removeprefix(f"{module}."): t for n, t in state.items() if n.startswith(f"{module}.")}


def unsigned_zeros(pairs: Any) -> Any:
    """Bytes of two F4 codes each, with 0 for -0."""
    import torch

    low, high = pairs & 15, pairs >> 4
    low, high = (torch.where(c == 8, 0, c) for c in (low, high))
    return low | high << 4


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("recipe", MINMAX)
def test_compressed_tensors_writes_the_same_bytes(recipe: str, dtype: str, tmp_path: Path) -> None:
    """Codes, scales and factors, with the scales in the dtype of the model, as compressed-tensors has them.

    Scales of nothing but zeros are what it puts there in BF16, and otherwise 1 (F32; there 2^-23) and byte 0 (MXFP4 of
    F16; there 127). Its -0 loses the sign in F4, which happens to quotients that F16 cannot hold, too.
    """
    weights = matrices(dtype, edges=recipe in ("tensor", "channel", "block"), seed=1)
    save_matrices(tmp_path / "source", weights)
    own = recipe in ("tensor", "channel", "block") and dtype != "bfloat16"
    scale = ["--scale-dtype", {"float16": "f16", "float32": "f32"}[dtype]] if own else []
    quantize(tmp_path / "source", tmp_path / "cast", *options(recipe), *scale)
    written, config = torch_state(tmp_path / "cast"), quant_config(tmp_path / "cast")
    for name, weight in weights.items():
        theirs = compressed(weight, config)
        ours = of_module(written, f"model.layers.0.mlp.{name}_proj")
        assert ours.keys() == theirs.keys(), name
        scale, other = ours["weight_scale"], theirs["weight_scale"]
        if recipe == "mxfp4" and dtype == "float16":
            empty = weight.unflatten(-1, (-1, 32)).abs().amax(-1) == 0
            assert (scale[empty] == 0).all(), name
            assert (other[empty] == 127).all(), name
            scale[empty] = 127
            for both in (ours, theirs):
                both["weight_packed"] = unsigned_zeros(both["weight_packed"])
        elif dtype == "float32" and recipe in ("tensor", "channel", "block"):
            empty = other == 2.0**-23
            assert (scale[empty] == 1).all(), name
            scale[empty] = 2.0**-23
        same({f"{name} {n}": t for n, t in ours.items()}, {f"{name} {n}": t for n, t in theirs.items()})


def test_mxfp8_is_theirs_but_for_one_magnitude(tmp_path: Path) -> None:
    """The exponent of a scale is rounded up, as ModelOpt does it, so that no code is cut off.

    compressed-tensors adds one where the largest magnitude is 1.75 times its power of two or more. That is the same
    but for 1.75 itself, which 448 holds: there its scales are twice ours. Its groups of zeros are the only others.
    """
    import torch

    weights = matrices("bfloat16", edges=False, seed=2)
    save_matrices(tmp_path / "source", weights)
    quantize(tmp_path / "source", tmp_path / "cast", *options("mxfp8"))
    written, config = torch_state(tmp_path / "cast"), quant_config(tmp_path / "cast")
    groups, apart = 0, 0
    for name, weight in weights.items():
        theirs = compressed(weight, config)
        ours = of_module(written, f"model.layers.0.mlp.{name}_proj")
        amax = weight.float().unflatten(-1, (-1, 32)).abs().amax(-1)
        a, b = ours["weight_scale"].int(), theirs["weight_scale"].int()
        exact = torch.frexp(amax).mantissa == 1.75 / 2
        assert torch.equal((b - a)[amax > 0], exact.int()[amax > 0]), name
        codes, others = (x["weight"].view(torch.uint8).unflatten(-1, (-1, 32)) for x in (ours, theirs))
        assert torch.equal(codes[a == b], others[a == b]), name
        assert (codes[exact].int() & 0x7F).amax(-1).eq(0x7E).all(), name
        groups, apart = groups + amax.numel(), apart + int(exact.sum())
    assert 0 < apart / groups < 0.05


def test_column_edges_that_break_their_block_dequantizer(tmp_path: Path) -> None:
    """``FP8BlockDequantizer`` (for DeepSeek's names) gives our values; its entry point cannot save column edges."""
    from compressed_tensors.entrypoints.convert import convert_checkpoint
    from compressed_tensors.entrypoints.convert.converters import FP8BlockDequantizer

    save_matrices(tmp_path / "source", matrices("bfloat16", edges=True))
    quantize(tmp_path / "source", tmp_path / "cast", "--recipe", "block")
    quantize(tmp_path / "cast", tmp_path / "back", "--to", "bf16")
    converter = FP8BlockDequantizer.from_pretrained(tmp_path / "cast")
    theirs = {n: t.contiguous() for n, t in converter.validate(torch_state(tmp_path / "cast")).items()}
    same(theirs, torch_state(tmp_path / "back"))
    with pytest.raises(ValueError, match="non contiguous"):
        convert_checkpoint(tmp_path / "cast", tmp_path / "theirs", converter, max_workers=1)


# -- ModelOpt's names


def test_modelopt_fp8_is_read_by_its_formula(tmp_path: Path) -> None:
    """vLLM's ModelOptFp8LinearMethod: the weight is ``weight * weight_scale``."""
    import torch

    weights = matrices("bfloat16", edges=True)
    save_matrices(tmp_path / "source", weights)
    quantize(tmp_path / "source", tmp_path / "cast", "--recipe", "tensor", "--quant-method", "modelopt")
    quantize(tmp_path / "cast", tmp_path / "back", "--to", "bf16")
    state = torch_state(tmp_path / "cast")
    formula = {n: t for n, t in state.items() if not n.endswith("_scale")}
    for name in [n for n in formula if f"{n}_scale" in state]:
        assert formula[name].dtype == torch.float8_e4m3fn
        assert state[f"{name}_scale"].shape == ()
        formula[name] = (formula[name].float() * state[f"{name}_scale"]).bfloat16()
    same(formula, torch_state(tmp_path / "back"))
    close(formula, weights, "tensor")


def test_modelopt_nvfp4_is_read_by_its_formula(tmp_path: Path) -> None:
    """vLLM's reference (nvfp4_emulation_utils.py): ``fp4 * (weight_scale * weight_scale_2)``."""
    import torch

    weights = matrices("bfloat16", edges=False)
    save_matrices(tmp_path / "source", weights)
    quantize(tmp_path / "source", tmp_path / "cast", "--recipe", "nvfp4", "--quant-method", "modelopt")
    quantize(tmp_path / "cast", tmp_path / "back", "--to", "bf16")
    state = torch_state(tmp_path / "cast")
    half = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = torch.cat([half, -half])
    formula = {n: t for n, t in state.items() if not n.endswith(("_scale", "_scale_2"))}
    for name in [n for n in formula if f"{n}_scale" in state]:
        codes = formula[name].long()
        elements = values[torch.stack([codes & 15, codes >> 4], -1).flatten(-2)]
        scale = state[f"{name}_scale"].float() * state[f"{name}_scale_2"]
        formula[name] = (elements * scale.repeat_interleave(16, -1)).bfloat16()
    same(formula, torch_state(tmp_path / "back"))
    close(formula, weights, "nvfp4")


def test_modelopt_nvfp4_is_read_by_compressed_tensors(tmp_path: Path) -> None:
    """Its ``ModelOptNvfp4Converter`` takes our names and dtypes.

    It stores 1 / weight_scale_2, rounded, and divides by that: some elements, which lie halfway between two BF16
    numbers, become the other one.
    """
    import torch
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.entrypoints.convert.converters import ModelOptNvfp4Converter

    save_matrices(tmp_path / "source", matrices("bfloat16", edges=False))
    quantize(tmp_path / "source", tmp_path / "cast", "--recipe", "nvfp4", "--quant-method", "modelopt")
    quantize(tmp_path / "cast", tmp_path / "back", "--to", "bf16")
    converter = ModelOptNvfp4Converter(targets=["re:.*_proj$"], ignore=["lm_head"])
    converted = converter.validate(torch_state(tmp_path / "cast"))
    scheme = converter._build_quant_config().config_groups["config_group_0"]
    compressor = BaseCompressor.get_value_from_registry("nvfp4-pack-quantized")
    elements, other = 0, 0
    for name, ours in torch_state(tmp_path / "back").items():
        module = name.removesuffix(".weight")
        if f"{module}.weight_packed" not in converted:
            assert torch.equal(converted[name], ours)
            continue
        theirs = compressor.decompress(of_module(converted, module), scheme)["weight"]
        apart = (theirs.view(torch.int16).int() - ours.view(torch.int16).int()).abs()
        assert apart.max() <= 1, name
        elements, other = elements + ours.numel(), other + int(apart.sum())
    assert other / elements < 0.1


# -- transformers


def loaded(folder: Path, config: Any = None) -> dict[str, Any]:
    """The parameters of the model that transformers makes of a folder."""
    import torch
    from transformers import AutoModelForCausalLM

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "You passed `quantization_config`")
        model, report = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, quantization_config=config, output_loading_info=True
        )
    assert not any(report.values()), report
    state: dict[str, Any] = model.state_dict()
    return state


def cast_tiny(variant: str, tmp_path: Path, *how: str, published: bool = True, **sizes: Any) -> Path:
    """A tiny model in ``source``, quantized in the folder that is returned."""
    sizes = {**MODELS.get(variant, {}), **sizes}
    save_tiny(variant, tmp_path / "source", published=published, dtype="bfloat16", **sizes)
    quantize(tmp_path / "source", tmp_path / "cast", *how)
    return tmp_path / "cast"


def back(cast: Path) -> Path:
    """The same dequantized by ckpttool."""
    quantize(cast, cast.with_name("back"), "--to", "bf16")
    return cast.with_name("back")


@pytest.mark.parametrize("scales", ["f32", "bf16", "e8m0"])
@pytest.mark.parametrize("block", ["128x128", "32x32"])
@pytest.mark.parametrize("variant", MODELS)
def test_transformers_dequantizes_blocks(variant: str, block: str, scales: str, tmp_path: Path) -> None:
    from transformers import FineGrainedFP8Config

    cast = cast_tiny(variant, tmp_path, "--recipe", "block", "--block", block, "--scale-dtype", scales)
    same(loaded(cast, FineGrainedFP8Config(dequantize=True)), loaded(back(cast)))


def test_experts_in_one_tensor_are_named_as_in_transformers(tmp_path: Path) -> None:
    """Names and shapes of its FP8 model. It cannot dequantize such files: it leaves their scales unread."""
    cast = cast_tiny("qwen3_moe", tmp_path, "--recipe", "block", "--block", "32x32", published=False)
    wanted = {n: tuple(t.shape) for n, t in quantized_by_transformers(cast).state_dict().items()}
    assert {n: tuple(t.shape) for n, t in torch_state(cast).items()} == wanted
    assert any(n.endswith("experts.gate_up_proj_scale_inv") for n in wanted)


@pytest.mark.parametrize("variant", MODELS)
def test_transformers_dequantizes_one_scale_for_each_tensor(variant: str, tmp_path: Path) -> None:
    from transformers import FineGrainedFP8Config

    cast = cast_tiny(variant, tmp_path, "--recipe", "tensor", "--quant-method", "fp8")
    assert quant_config(cast)["weight_block_size"] is None
    same(loaded(cast, FineGrainedFP8Config(dequantize=True, weight_block_size=None)), loaded(back(cast)))


@pytest.mark.parametrize("recipe", COMPRESSED)
def test_transformers_reads_compressed_tensors(recipe: str, tmp_path: Path) -> None:
    from transformers import CompressedTensorsConfig

    cast = cast_tiny("llama", tmp_path, *options(recipe))
    same(loaded(cast, CompressedTensorsConfig(run_compressed=False)), loaded(back(cast)))


@pytest.mark.parametrize("variant", ["qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("recipe", ["tensor", "channel", "mxfp4"])
def test_transformers_reads_compressed_experts(recipe: str, variant: str, tmp_path: Path) -> None:
    """Not the other recipes: for experts transformers 5.23 takes no E8M0 byte, no block and no global scale."""
    from transformers import CompressedTensorsConfig

    cast = cast_tiny(variant, tmp_path, *options(recipe))
    same(loaded(cast, CompressedTensorsConfig(run_compressed=False)), loaded(back(cast)))


def coded_modules(folder: Path) -> set[str]:
    """Modules whose weights are quantized in the files; all experts of a layer are one."""
    out = set()
    for name, tensor in torch_state(folder).items():
        module, _, parameter = name.rpartition(".")
        if tensor.element_size() == 1 and parameter in ("weight", "weight_packed"):
            out.add(module.partition(".experts.")[0] + ".experts" if ".experts." in module else module)
        elif tensor.element_size() == 1 and module.endswith(".experts"):
            out.add(module)
    return out


def empty_model(folder: Path) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def quantized_by_transformers(folder: Path) -> Any:
    """The model without elements, its modules replaced by quantized ones as the config says."""
    from transformers import FineGrainedFP8Config
    from transformers.quantizers.auto import AutoHfQuantizer

    model = empty_model(folder)
    config = FineGrainedFP8Config.from_dict(quant_config(folder))
    AutoHfQuantizer.from_config(config, pre_quantized=True)._process_model_before_weight_loading(model)
    return model


KEEP: list[list[str]] = [
    [],
    ["--keep-preset", "deepseek"],
    ["--keep", "*.layers.1.self_attn.o_proj.*", "--keep", "*.0.self_attn.*"],
    ["--keep", "*.layers.1.mlp.*"],
    ["--keep-preset", "none", "--keep", r"re:embed_tokens|\.gate\.weight"],
]


@pytest.mark.parametrize("keep", KEEP, ids=lambda k: " ".join(k) or "hf-default")
@pytest.mark.parametrize("variant", MODELS)
def test_transformers_quantizes_the_modules_that_we_did(variant: str, keep: list[str], tmp_path: Path) -> None:
    from transformers.integrations.finegrained_fp8 import FP8Experts, FP8Linear

    cast = cast_tiny(variant, tmp_path, "--recipe", "block", *keep)
    model = quantized_by_transformers(cast)
    found = {n for n, m in model.named_modules() if isinstance(m, FP8Linear | FP8Experts)}
    assert found == coded_modules(cast)


@pytest.mark.parametrize("keep", KEEP, ids=lambda k: " ".join(k) or "hf-default")
@pytest.mark.parametrize("recipe", ["channel", "nvfp4"])
@pytest.mark.parametrize("variant", MODELS)
def test_compressed_tensors_quantizes_the_modules_that_we_did(
    variant: str, recipe: str, keep: list[str], tmp_path: Path
) -> None:
    """In transformers' models experts are not Linear, so only the others are looked at."""
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

    cast = cast_tiny(variant, tmp_path, *options(recipe), *keep)
    model = empty_model(cast)
    apply_quantization_config(model, QuantizationConfig.model_validate(quant_config(cast)))
    found = {n for n, m in model.named_modules() if getattr(m, "quantization_scheme", None) is not None}
    assert found == {n for n in coded_modules(cast) if not n.endswith(".experts")}


# -- edges that transformers cannot read


def dequantized_by_transformers(weight: Any, scale: Any) -> Any:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    return Fp8Dequantize(None)._dequantize_one(weight, scale)


def test_edges_that_transformers_gets_wrong(tmp_path: Path) -> None:
    """It takes rows / scale rows for the side of a block: an error for 576 rows, other elements for 130 x 200."""
    import torch

    weights = {n: w for n, w in matrices("bfloat16", edges=True).items() if n in ("latent", "edge", "plain")}
    save_matrices(tmp_path / "source", weights)
    quantize(tmp_path / "source", tmp_path / "cast", "--recipe", "block", "--scale-dtype", "bf16")
    quantize(tmp_path / "cast", tmp_path / "back", "--to", "bf16")
    written, dequantized = torch_state(tmp_path / "cast"), torch_state(tmp_path / "back")
    for name, weight in weights.items():
        full = f"model.layers.0.mlp.{name}_proj.weight"
        codes, scale, ours = written[full], written[f"{full}_scale_inv"], dequantized[full]
        rows, columns = weight.shape
        grown = scale.float().repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :columns]
        assert torch.equal(ours, (codes.float() * grown).bfloat16()), name
        assert (ours.float() - weight.float()).abs().max() <= weight.float().abs().max() / 16, name
        if name == "latent":
            with pytest.raises(ValueError, match="not divisible by scale grid"):
                dequantized_by_transformers(codes, scale)
        else:
            assert torch.equal(dequantized_by_transformers(codes, scale), ours) == (name == "plain"), name


# -- gpt-oss


def test_transformers_reads_gpt_oss(tmp_path: Path) -> None:
    from transformers import Mxfp4Config

    cast = cast_tiny("gpt_oss", tmp_path, "--recipe", "mxfp4", **ROUND)
    state = torch_state(cast)
    blocks = [n for n in state if n.endswith("_blocks")]
    assert len(blocks) == 4
    assert all(state[n].shape[-1] == 16 for n in blocks)
    assert quant_config(cast)["quant_method"] == "mxfp4"
    same(loaded(cast, Mxfp4Config(dequantize=True)), loaded(back(cast)))
