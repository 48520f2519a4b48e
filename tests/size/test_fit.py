"""What fits, by plain arithmetic: models of three kinds, worked out from the numbers of their configs alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.size.models import CONFIGS, write_config
from tests.size.test_command import refused, size_of, verdict
from tests.size.test_ranks import small

H100, TENTHS = 81_559 * 2**20, 9
BUDGET = H100 * TENTHS // 10


def dense(tp: int, tokens: int) -> int:
    """Bytes on a rank of Llama 3 70B: BF16 weights, BF16 cache of grouped queries."""
    c: dict[str, int] = CONFIGS["Llama-3-70B"]
    width, layers, vocabulary = c["hidden_size"], c["num_hidden_layers"], c["vocab_size"]
    head = width // c["num_attention_heads"]
    keys = c["num_key_value_heads"] * head
    layer = 2 * width * width + 2 * width * keys + 3 * width * c["intermediate_size"]
    weights = (2 * vocabulary * width + layers * layer) // tp + (2 * layers + 1) * width
    return 2 * weights + tokens * layers * 2 * (keys // tp) * 2


def experts(tp: int, tokens: int) -> int:
    """Bytes on a rank of Mixtral 8x7B: channels of FP8 with BF16 scales, FP8 cache."""
    c: dict[str, int] = CONFIGS["Mixtral-8x7B"]
    width, layers, vocabulary, inner = (
        c[k] for k in ("hidden_size", "num_hidden_layers", "vocab_size", "intermediate_size")
    )
    keys = c["num_key_value_heads"] * (width // c["num_attention_heads"])
    number = c["num_local_experts"]
    codes = (2 * width * width + 2 * width * keys + number * 3 * width * inner) // tp
    # One scale for each output: cut with q, k, v, gate and up; whole where inputs are cut (o, down).
    scales = (width + 2 * keys) // tp + width + number * (2 * inner // tp + width)
    high = 2 * vocabulary * width // tp + layers * (2 * width + number * width) + width
    return layers * (codes + 2 * scales) + 2 * high + tokens * layers * 2 * (keys // tp)


def latents(tp: int, tokens: int) -> int:
    """Bytes on a rank of DeepSeek V3 without its prediction layer: blocks of FP8, BF16 cache of latents."""
    c: dict[str, int] = CONFIGS["DeepSeek-V3"]
    width, layers, vocabulary, heads = (
        c[k] for k in ("hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads")
    )
    nope, rope, value = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    q, kv = c["q_lora_rank"], c["kv_lora_rank"]

    def block(rows: int, columns: int) -> int:
        return rows * columns + 4 * -(-rows // 128) * -(-columns // 128)

    attention = block(q, width) + block(kv + rope, width)  # whole on every rank
    attention += block(heads * (nope + rope) // tp, q) + block(heads * (nope + value) // tp, kv)
    attention += block(width, heads * value // tp) + 2 * (q + kv) + 2 * 2 * width

    def mlp(inner: int) -> int:
        return 2 * block(inner // tp, width) + block(width, inner // tp)

    n = c["n_routed_experts"]
    first, each = c["first_k_dense_replace"], c["moe_intermediate_size"]
    routed = n * mlp(each) + mlp(each * c["n_shared_experts"]) + 2 * n * width + 4 * n
    weights = layers * attention + first * mlp(c["intermediate_size"]) + (layers - first) * routed
    weights += 2 * (2 * vocabulary * width // tp + width)
    return weights + tokens * layers * (kv + rope) * 2


@pytest.mark.parametrize(
    ("name", "options", "by_hand", "fits"),
    [
        ("Llama-3-70B", ("--recipe", "bf16"), dense, {1: False, 2: True}),
        ("Mixtral-8x7B", ("--recipe", "channel", "--kv", "fp8"), experts, {1: True, 2: True}),
        ("DeepSeek-V3", ("--recipe", "block", "--no-mtp"), latents, {8: False, 16: True}),
    ],
    ids=["dense", "experts", "latents"],
)
def test_the_fit_by_hand(
    tmp_path: Path, name: str, options: tuple[str, ...], by_hand: Any, fits: dict[int, bool]
) -> None:
    config, tokens = write_config(tmp_path, name), 8192
    asked = ("--kv", "bf16", *options, "--tokens", tokens, "--gpu", "h100")
    for tp, wanted in fits.items():
        data = size_of(config, *asked, "--tp-out", tp, code=0 if wanted else 3)
        needed, weights = by_hand(tp, tokens), by_hand(tp, 0)
        assert (data["fit"]["needed"], data["budget_bytes"], data["fits"]) == (needed, BUDGET, wanted)
        assert wanted == (needed <= BUDGET)
        assert data["fit"]["left"] == BUDGET - needed
        assert data["fit"]["gpus"] == tp
        assert data["fit"]["tokens"] == max(0, BUDGET - weights) // (by_hand(tp, 1) - weights)
        for remedy in data["fit"]["would_fit"]:
            if remedy["options"].startswith("--tp-out"):
                assert remedy["needed"] == by_hand(int(remedy["options"].split()[1]), tokens)


def test_utilization_is_a_share_of_the_device(tmp_path: Path) -> None:
    config = write_config(tmp_path, "Llama-3-8B")
    needed = size_of(config, "--tp-out", 1)["ranks"]["groups"][0]["bytes"]
    # Nine tenths of it are one byte too few, and of one byte more than its ten ninths they are enough.
    just = -(-needed * 10 // 9)
    assert size_of(config, "--gpu", just)["fit"]["left"] == just * 9 // 10 - needed
    assert size_of(config, "--gpu", just - 1, code=3)["fits"] is False
    assert size_of(config, "--gpu", just, "--utilization", 0.85, code=3)["budget_bytes"] == just * 85 // 100
    for share in ("0", "1.01", "-0.5", "nan"):
        assert "is not a share" in refused(config, "--gpu", "h100", f"--utilization={share}")
    assert "--utilization has no effect without --gpu" in refused(config, "--utilization", 0.5)


def test_training_keeps_the_same_reserve(tmp_path: Path) -> None:
    config = write_config(tmp_path, "Llama-3-8B")
    # 6 bytes of each parameter, and 12 more shared by 8 ranks; the vocabulary needs no padding.
    fit = size_of(config, "--recipe", "bf16", "--train", "--dp", 8, "--gpu", "h100")["fit"]
    assert fit["needed"] == 8_030_261_248 * 6 + 8_030_261_248 * 12 // 8
    assert (fit["budget_bytes"], fit["gpus"]) == (BUDGET, 8)


def test_gpus_for_the_weights(tmp_path: Path) -> None:
    """Without a device: the fewest of each common GPU whose nine tenths hold the weights."""
    memory = {"L4": 23_034, "L40S": 46_068, "A100": 81_920, "H100": 81_559}
    memory |= {"H200": 143_771, "B200": 183_359, "MI300X": 196_592}
    wanted = {}
    for gpu, mib in memory.items():
        wanted[gpu] = next(n for n in (1, 2, 4, 8) if dense(n, 0) <= mib * 2**20 * 9 // 10)
    config = write_config(tmp_path, "Llama-3-70B")
    data = size_of(config, "--recipe", "bf16")
    assert {c["gpu"]: c["gpus"] for c in data["gpu_choices"]} == wanted
    assert (data["fits"], data["budget_bytes"]) == (None, None)
    said = verdict(config, "--recipe", "bf16", code=0)
    assert said[0].endswith("/Llama-3-70B.json: 141.1 GB on disk in 30 files with recipe bf16")
    assert said[1] == (
        "the weights fit on 1 x B200 or MI300X; 2 x A100, H100 or H200; 4 x L40S; 8 x L4 (in 90% of the memory)"
    )


def test_gpus_for_ranks(tmp_path: Path) -> None:
    config = write_config(tmp_path, "Llama-3-70B")
    asked = ("--recipe", "bf16", "--tp-out", 4, "--kv", "bf16", "--tokens", 8192)
    needed = dense(4, 8192)
    assert [c["needed"] for c in size_of(config, *asked)["gpu_choices"]] == [needed] * 6
    said = verdict(config, *asked, code=0)
    assert said[0].endswith(f"with recipe bf16, {needed / 1e9:.1f} GB on each of 4 GPUs")
    assert said[1].startswith("that fits on L40S, A100, ")


def test_one_unit_in_all_columns(tmp_path: Path) -> None:
    config = write_config(tmp_path, "Llama-3-8B")
    for unit, memory in (("GB", "85.5 GB"), ("GiB", "79.6 GiB")):
        out = "\n".join(verdict(config, "--tp-out", 2, "--unit", unit, "--gpu", "h100", code=0))
        assert f" {unit} on each of 2 GPUs (H100: {memory} x 0.9)" in out


def test_a_small_model_fits_anywhere(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(small()))
    assert {c["gpus"] for c in size_of(path)["gpu_choices"]} == {1}
    assert verdict(path, code=0)[1] == "the weights fit on any GPU from L4 up (in 90% of the memory)"
