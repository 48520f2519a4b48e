"""Llama 4 as Meta publishes it, judged by what the models compute: Meta's model, written here from its definition, and
transformers'. Files are written and read by torch itself, each rank's tensors cut as Meta's parallel layers do.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.tiny_models import TOKENS
from tests.peers.tool import reshard

DIM, HEADS, KV, LAYERS, VOCAB, EXPERTS, ROUTED, DENSE = 48, 6, 2, 4, 160, 3, 16, 40
HEAD = DIM // HEADS
IMAGE, PATCH, WIDTH, TOWER_HEADS, BLOCKS, OUTPUT = 32, 8, 32, 4, 2, 24
TOLERANCE = 1e-5
PARAMS: dict[str, Any] = {
    "dim": DIM, "n_layers": LAYERS, "n_heads": HEADS, "n_kv_heads": KV, "vocab_size": VOCAB, "multiple_of": 8,
    "ffn_dim_multiplier": 0.3, "ffn_exp": 4.0, "norm_eps": 1e-5, "rope_theta": 20000.0, "use_scaled_rope": True,
    "attention_chunk_size": 5, "nope_layer_interval": 3, "use_qk_norm": True, "attn_temperature_tuning": True,
    "floor_scale": 4.0, "attn_scale": 0.3,
    "moe_args": {"num_experts": EXPERTS, "top_k": 2, "interleave_moe_layer_step": 2, "auto_scale_F": True},
}  # fmt: skip
VISION = {
    "image_size": {"height": IMAGE, "width": IMAGE}, "patch_size": {"height": PATCH, "width": PATCH}, "dim": WIDTH,
    "n_layers": BLOCKS, "n_heads": TOWER_HEADS, "mlp_ratio": 4.0, "output_dim": OUTPUT, "pixel_shuffle_ratio": 0.5,
}  # fmt: skip
ROWS = ("tok_embeddings.weight", "output.weight", "w_in_shared_FD.weight", "w_swiglu_FD.weight",
        "vision_projection.weight", "wq.weight", "wk.weight", "wv.weight", "wq.bias", "wk.bias", "wv.bias",
        "c_fc.weight", "c_fc.bias", "_linear.weight")  # fmt: skip
COLUMNS = ("wo.weight", "fc2_weight", "w_out_shared_DF.weight", "c_proj.weight")
"""Names whose tensors ColumnParallelLinear and RowParallelLinear cut; the others are cut below, or not at all."""


def random_model(*, vision: bool) -> dict[str, Any]:
    """Whole tensors, with experts as [experts, in, out]."""
    import torch

    torch.manual_seed(11)
    shapes: dict[str, tuple[int, ...]] = {"tok_embeddings.weight": (VOCAB, DIM), "output.weight": (VOCAB, DIM)}
    for i in range(LAYERS):
        at = f"layers.{i}."
        shapes[f"{at}attention.wqkv.weight"] = ((HEADS + 2 * KV) * HEAD, DIM)
        shapes[f"{at}attention.wqkv.layer_norm_weight"] = (DIM,)
        shapes[f"{at}attention.wo.weight"] = (DIM, DIM)
        if i % 2:
            shapes[f"{at}feed_forward.norm.weight"] = (DIM,)
            shapes[f"{at}feed_forward.router_DE"] = (DIM, EXPERTS)
            for name in ("in", "swiglu"):
                shapes[f"{at}feed_forward.experts.moe_w_{name}_eD_F"] = (EXPERTS, DIM, ROUTED)
            shapes[f"{at}feed_forward.experts.moe_w_out_eF_D"] = (EXPERTS, ROUTED, DIM)
            shapes[f"{at}feed_forward.w_in_shared_FD.weight"] = shapes[f"{at}feed_forward.w_swiglu_FD.weight"] = (
                ROUTED, DIM)  # fmt: skip
            shapes[f"{at}feed_forward.w_out_shared_DF.weight"] = (DIM, ROUTED)
        else:
            shapes[f"{at}feed_forward.mlp.layer_norm_weight"] = (DIM,)
            shapes[f"{at}feed_forward.mlp.fc1_weight"] = (2 * DENSE, DIM)
            shapes[f"{at}feed_forward.mlp.fc2_weight"] = (DIM, DENSE)
    shapes["norm.weight"] = (DIM,)
    if vision:
        shapes |= tower()
    return {n: torch.randn(s) * 0.2 + (1.0 if "norm" in n or ".ln_" in n else 0.0) for n, s in shapes.items()}


def tower() -> dict[str, tuple[int, ...]]:
    at = "vision_embeddings.vision_encoder."
    shapes: dict[str, tuple[int, ...]] = {
        f"{at}conv1._linear.weight": (WIDTH, 3 * PATCH * PATCH), f"{at}class_embedding": (WIDTH,),
        f"{at}positional_embedding_vlm": ((IMAGE // PATCH) ** 2 + 1, WIDTH),
        "vision_embeddings.vision_adapter.mlp.c_fc.weight": (OUTPUT, 4 * WIDTH),
        "vision_embeddings.vision_adapter.mlp.c_proj.weight": (OUTPUT, OUTPUT),
        "vision_projection.weight": (DIM, OUTPUT),
    }  # fmt: skip
    norms = [f"{at}ln_pre", f"{at}ln_post"]
    for i in range(BLOCKS):
        block = f"{at}transformer.resblocks.{i}."
        norms += [f"{block}ln_1", f"{block}ln_2"]
        for name, (rows, columns) in {
            **{f"attn.w{c}": (WIDTH, WIDTH) for c in "qkvo"}, "mlp.c_fc": (4 * WIDTH, WIDTH),
            "mlp.c_proj": (WIDTH, 4 * WIDTH),
        }.items():  # fmt: skip
            shapes |= {f"{block}{name}.weight": (rows, columns), f"{block}{name}.bias": (rows,)}
    return shapes | {f"{n}.{kind}": (WIDTH,) for n in norms for kind in ("weight", "bias")}


def pieces(name: str, whole: Any, world: int) -> list[Any]:
    """What the ranks hold, in the shapes of the files."""
    import torch

    if name.endswith(ROWS):
        return list(whole.chunk(world))
    if name.endswith(COLUMNS):
        return list(whole.chunk(world, 1))
    if name.endswith("wqkv.weight"):
        parts = whole.split([HEADS * HEAD, KV * HEAD, KV * HEAD])
        return [torch.cat([p.chunk(world)[r] for p in parts]) for r in range(world)]
    if name.endswith("fc1_weight"):
        return [torch.cat([p.chunk(world)[r] for p in whole.chunk(2)]) for r in range(world)]
    if "_eF_D" in name:
        return [p.flatten(0, 1) for p in whole.chunk(world, 1)]
    return [p.flatten(0, 1) for p in whole.chunk(world, 2)] if "_eD_F" in name else [whole] * world


def rms(x: Any) -> Any:
    import torch

    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)


def turned(x: Any, turn: Any) -> Any:
    """Pairs of elements side by side are complex numbers, which ``turn`` turns."""
    import torch

    return torch.view_as_real(torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2)) * turn[:, None]).flatten(3)


def attention(q: Any, k: Any, v: Any, mask: Any = None) -> Any:
    import torch

    k, v = (t.repeat_interleave(q.shape[2] // t.shape[2], 2) for t in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).flatten(2)


def speeds() -> Any:
    """Of the rotary embeddings: Llama 3.1's scaling with factor 16, and no stretch between low and high frequencies."""
    import torch

    speed = PARAMS["rope_theta"] ** (-torch.arange(0, HEAD, 2).float() / HEAD)
    return torch.where(2 * torch.pi / speed > 8192, speed / 16, speed)


def logits(weights: dict[str, Any], tokens: Any) -> Any:
    """What Meta's model computes."""
    import torch
    from torch.nn.functional import silu

    batch, length = tokens.shape
    place = torch.arange(length)
    causal = place[:, None] >= place
    chunked = causal & (place[:, None] // PARAMS["attention_chunk_size"] == place // PARAMS["attention_chunk_size"])
    turn = torch.polar(torch.ones(length, HEAD // 2), place.float()[:, None] * speeds())
    x = weights["tok_embeddings.weight"][tokens]
    for i in range(LAYERS):
        w = {n.removeprefix(f"layers.{i}."): t for n, t in weights.items() if n.startswith(f"layers.{i}.")}
        h = rms(x) * w["attention.wqkv.layer_norm_weight"]
        q, k, v = (h @ w["attention.wqkv.weight"].T).split([HEADS * HEAD, KV * HEAD, KV * HEAD], -1)
        q, k, v = (t.view(batch, length, -1, HEAD) for t in (q, k, v))
        if (i + 1) % PARAMS["nope_layer_interval"]:
            q, k = (rms(turned(t, turn)) for t in (q, k))
            mixed = attention(q, k, v, chunked)
        else:
            scale = torch.log(torch.floor((place + 1.0) / PARAMS["floor_scale"]) + 1.0) * PARAMS["attn_scale"] + 1.0
            mixed = attention(q * scale[:, None, None], k, v, causal)
        x = x + mixed @ w["attention.wo.weight"].T
        if i % 2 == 0:
            h = rms(x) * w["feed_forward.mlp.layer_norm_weight"]
            gate, up = (h @ w["feed_forward.mlp.fc1_weight"].T).chunk(2, -1)
            x = x + (silu(gate) * up) @ w["feed_forward.mlp.fc2_weight"].T
            continue
        h = rms(x) * w["feed_forward.norm.weight"]
        out = silu(h @ w["feed_forward.w_in_shared_FD.weight"].T) * (h @ w["feed_forward.w_swiglu_FD.weight"].T)
        out = out @ w["feed_forward.w_out_shared_DF.weight"].T
        best, chosen = (h @ w["feed_forward.router_DE"]).topk(2)
        for e in range(EXPERTS):
            share = (best.sigmoid() * (chosen == e)).sum(-1, keepdim=True)
            routed = h * share
            first, second, third = (
                w[f"feed_forward.experts.moe_w_{n}"][e] for n in ("in_eD_F", "out_eF_D", "swiglu_eD_F")
            )
            out = out + (silu(routed @ first) * (routed @ third)) @ second
        x = x + out
    return (rms(x) * weights["norm.weight"]) @ weights["output.weight"].T


def seen(weights: dict[str, Any], image: Any) -> Any:
    """What Meta's tower and projection make of one image [3, IMAGE, IMAGE]."""
    import torch
    from torch.nn.functional import gelu, layer_norm

    at = "vision_embeddings.vision_encoder."
    side = IMAGE // PATCH

    def normed(x: Any, name: str) -> Any:
        return layer_norm(x, (WIDTH,), weights[f"{name}.weight"], weights[f"{name}.bias"])

    patches = image.unfold(1, PATCH, PATCH).unfold(2, PATCH, PATCH).permute(1, 2, 0, 3, 4).reshape(side * side, -1)
    x = torch.cat([patches @ weights[f"{at}conv1._linear.weight"].T, weights[f"{at}class_embedding"][None]])
    x = normed(x + weights[f"{at}positional_embedding_vlm"], f"{at}ln_pre")[None]
    quarter = WIDTH // TOWER_HEADS // 4
    speed = 10000.0 ** (-torch.arange(quarter) / quarter)
    across, down = torch.arange(side).repeat(side) + 1.0, torch.arange(side).repeat_interleave(side) + 1.0
    angles = torch.cat([across[:, None] * speed, down[:, None] * speed], 1)
    angles = torch.cat([angles, torch.zeros(1, 2 * quarter)])
    turn = torch.polar(torch.ones_like(angles), angles)
    for i in range(BLOCKS):
        w = {n.removeprefix(f"{at}transformer.resblocks.{i}."): t for n, t in weights.items()}
        h = normed(x, f"{at}transformer.resblocks.{i}.ln_1")
        q, k, v = ((h @ w[f"attn.w{c}.weight"].T + w[f"attn.w{c}.bias"]).view(1, -1, TOWER_HEADS, 4 * quarter)
                   for c in "qkv")  # fmt: skip
        mixed = attention(turned(q, turn), turned(k, turn), v)
        x = x + mixed @ w["attn.wo.weight"].T + w["attn.wo.bias"]
        h = normed(x, f"{at}transformer.resblocks.{i}.ln_2")
        h = gelu(h @ w["mlp.c_fc.weight"].T + w["mlp.c_fc.bias"])
        x = x + h @ w["mlp.c_proj.weight"].T + w["mlp.c_proj.bias"]
    x = normed(x, f"{at}ln_post")[0, :-1].view(side, side // 2, 2 * WIDTH).permute(1, 0, 2)
    x = x.reshape(side // 2, side // 2, 4 * WIDTH).permute(1, 0, 2).reshape(-1, 4 * WIDTH)
    for name in ("c_fc", "c_proj"):
        x = gelu(x @ weights[f"vision_embeddings.vision_adapter.mlp.{name}.weight"].T)
    return x @ weights["vision_projection.weight"].T


def save(folder: Path, weights: dict[str, Any], world: int, params: dict[str, Any]) -> None:
    """As Meta publishes it; torch itself writes the files."""
    import io

    import torch

    folder.mkdir()
    (folder / "params.json").write_text(json.dumps(params))
    cut = {n: pieces(n, t, world) for n, t in weights.items()}
    for rank in range(world):
        mine = {n: held[rank].clone() for n, held in cut.items()}
        mine |= {"layers.1.feed_forward.global_gate_stats_3E": torch.zeros(3, EXPERTS)}
        torch.save({**mine, "layers.0.attention.wo._extra_state": io.BytesIO(b"fp8")},
                   folder / f"consolidated.{rank:02d}.pth")  # fmt: skip


def loaded(folder: Path) -> Any:
    import torch
    from transformers import Llama4ForCausalLM, Llama4ForConditionalGeneration

    towers = "vision_config" in json.loads((folder / "config.json").read_text())
    kind: Any = Llama4ForConditionalGeneration if towers else Llama4ForCausalLM
    model, info = kind.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    return model.eval()


@pytest.mark.parametrize("world", [1, 2])
def test_metas_files_become_a_model_with_the_same_logits(world: int, tmp_path: Path) -> None:
    import torch

    weights = random_model(vision=False)
    save(tmp_path / "src", weights, world, {"model": PARAMS} if world == 1 else PARAMS)
    reshard(tmp_path / "src", tmp_path / "hf", "--to", "hf")
    tokens = torch.tensor(TOKENS)
    with torch.no_grad():
        got = loaded(tmp_path / "hf")(tokens, use_cache=False).logits
    want = logits(weights, tokens)
    assert (got - want).abs().max() < TOLERANCE
    # The comparison sees what of experts belongs to whom.
    for name in [n for n in weights if "_eD_F" in n]:
        other = {**weights, name: weights[name].roll(1, 2)}
        assert (logits(other, tokens) - want).abs().max() > 100 * TOLERANCE, name


def test_the_tower_for_images_computes_the_same(tmp_path: Path) -> None:
    import torch

    weights = random_model(vision=True)
    save(tmp_path / "src", weights, 2, {**PARAMS, "vision_args": VISION})
    reshard(tmp_path / "src", tmp_path / "hf", "--to", "hf")
    model = loaded(tmp_path / "hf")
    image = torch.randn(3, IMAGE, IMAGE)
    tokens = torch.tensor(TOKENS)
    with torch.no_grad():
        features = model.multi_modal_projector(model.vision_model(image[None]).last_hidden_state[0])
        assert (features - seen(weights, image)).abs().max() < TOLERANCE
        assert (model(tokens, use_cache=False).logits - logits(weights, tokens)).abs().max() < TOLERANCE


@pytest.mark.parametrize("towers", [False, True])
def test_a_model_of_transformers_becomes_metas_files(towers: bool, tmp_path: Path) -> None:
    import torch
    from transformers import Llama4Config, Llama4ForCausalLM, Llama4ForConditionalGeneration, Llama4TextConfig

    torch.manual_seed(3)
    text = {
        "hidden_size": DIM, "intermediate_size": ROUTED, "intermediate_size_mlp": DENSE, "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS, "num_key_value_heads": KV, "head_dim": HEAD, "vocab_size": VOCAB,
        "num_local_experts": EXPERTS, "num_experts_per_tok": 2, "interleave_moe_layer_step": 2,
        "no_rope_layer_interval": 3, "attention_chunk_size": 5, "floor_scale": 4, "attn_scale": 0.3,
        "initializer_range": 0.2, "pad_token_id": None,
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 20000.0, "factor": 16.0, "low_freq_factor": 1.0,
            "high_freq_factor": 1.0, "original_max_position_embeddings": 8192,
        },
    }  # fmt: skip
    tower_config = {
        "hidden_size": WIDTH, "num_hidden_layers": BLOCKS, "num_attention_heads": TOWER_HEADS, "image_size": IMAGE,
        "patch_size": PATCH, "intermediate_size": 4 * WIDTH, "vision_output_dim": OUTPUT,
        "projector_input_dim": OUTPUT, "projector_output_dim": OUTPUT, "initializer_range": 0.2,
    }  # fmt: skip
    model: Any
    if towers:
        model = Llama4ForConditionalGeneration(Llama4Config(text_config=text, vision_config=tower_config))
    else:
        model = Llama4ForCausalLM(Llama4TextConfig(**text))
    model.save_pretrained(tmp_path / "hf")
    reshard(tmp_path / "hf", tmp_path / "meta", "--to", "meta", "--tp-out", 2)
    ranks = [torch.load(tmp_path / f"meta/consolidated.{r:02d}.pth", weights_only=True) for r in range(2)]
    weights = {n: whole(n, [r[n] for r in ranks]) for n in ranks[0]}
    assert all(torch.equal(p, r[n]) for n, t in weights.items() for p, r in zip(pieces(n, t, 2), ranks, strict=True))
    renamed = {n.replace("feed_forward.norm.weight", "feed_forward.mlp.layer_norm_weight")
               if n.startswith(("layers.0", "layers.2")) else n: t for n, t in weights.items()}  # fmt: skip
    tokens = torch.tensor(TOKENS)
    with torch.no_grad():
        want = loaded(tmp_path / "hf")(tokens, use_cache=False).logits
    assert (logits(renamed, tokens) - want).abs().max() < TOLERANCE
    params = json.loads((tmp_path / "meta/params.json").read_text())
    same = ("dim", "n_heads", "n_kv_heads", "nope_layer_interval", "attention_chunk_size", "floor_scale", "attn_scale")
    assert {k: params[k] for k in same} == {k: PARAMS[k] for k in same}
    assert params.get("vision_args") == (VISION if towers else None)


def whole(name: str, held: list[Any]) -> Any:
    """The inverse of ``pieces``."""
    import torch

    if name.endswith(ROWS):
        return torch.cat(held)
    if name.endswith(COLUMNS):
        return torch.cat(held, 1)
    if name.endswith("wqkv.weight"):
        sizes = [n * HEAD // len(held) for n in (HEADS, KV, KV)]
        return torch.cat([torch.cat(part) for part in zip(*(h.split(sizes) for h in held), strict=True)])
    if name.endswith("fc1_weight"):
        return torch.cat([torch.cat(part) for part in zip(*(h.chunk(2) for h in held), strict=True)])
    if "_eF_D" in name:
        return torch.cat([h.unflatten(0, (EXPERTS, -1)) for h in held], 1)
    return torch.cat([h.unflatten(0, (EXPERTS, -1)) for h in held], 2) if "_eD_F" in name else held[0]
