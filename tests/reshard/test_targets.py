"""Every target format for every family that has names for it: out, verified, and back to the published bits."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from ckpttool.dialects.family import FamilyDialect
from ckpttool.layout.family import load_family
from ckpttool.layout.statements import Drop, DropLayers, Refuse, matches
from tests.helpers.command import refused, reshard
from tests.helpers.families import LAYERS, MODELS, A, D, E, H, I, Model, V
from tests.helpers.judge import Grid, Seat, held, kv, padded, part
from tests.helpers.sample import some
from tests.helpers.tensorfile import Array, Raw, Tensors, assert_same, read, read_all, save_hf, write

LLAMA, MIXTRAL = MODELS["llama"], MODELS["mixtral"]


def pairs() -> list[tuple[str, str]]:
    """(model, target) for every naming of a family."""
    out: list[tuple[str, str]] = []
    for name, model in MODELS.items():
        namings = load_family(model.family, model.config).spec.namings
        out += [(name, n) for n in ("vllm", "trtllm", "deepseek") if n in namings]
    return out


def source(model: Model, at: Path) -> Tensors:
    """What a format can hold of a model: no buffers that engines derive, a vocabulary that DeepSeek can cut."""
    tensors = {n: r for n, r in model.tensors().items() if "inv_freq" not in n}
    save_hf(at, tensors, model.config)
    return tensors


OPTIONS: dict[str, list[tuple[object, ...]]] = {
    "vllm": [("--tp-out", 2), ("--tp-out", 8, "--max-shard-size", "20KB"), ("--tp-out", 2, "--pp-out", 3)],
    "trtllm": [("--tp-out", 2), ("--tp-out", 4, "--pp-out", 2, "--pp-layout", "2,1"), ("--tp-out", 2, "--pp-out", 3)],
    "deepseek": [("--tp-out", 1), ("--tp-out", 2)],
}


def comes_back(model: Model, tensors: Tensors, target: str) -> Tensors | None:
    """What a Hugging Face checkpoint made from the target holds; None when the target refuses the model.

    Names are the published ones, whatever variant of them the source had.
    """
    ops = FamilyDialect(target).statements(load_family(model.family, model.config))
    prefix = "transformer." if model.name == "gpt2_published" else ""
    out: Tensors = {prefix + n: r for n, r in tensors.items()}
    for op in ops:
        if isinstance(op, Refuse) and any(matches([p for p, _ in op.pairs], n) for n in out):
            return None
        if isinstance(op, DropLayers):
            out = {n: r for n, r in out.items() if not n.startswith(f"model.layers.{LAYERS}.")}
        if isinstance(op, Drop):
            out = {n: r for n, r in out.items() if not matches(op.patterns, n)}
    for name in [n for n in out if n.endswith(("experts.gate_up_proj", "experts.down_proj")) and "@" in model.name]:
        raw, at = out.pop(name), name.rpartition(".")[0]
        for e, bits in enumerate(raw.bits):
            parts = dict(zip(("gate", "up"), np.split(bits, 2), strict=True)) if "gate_up" in name else {"down": bits}
            out |= {f"{at}.{e}.{p}_proj.weight": Raw(raw.dtype, b) for p, b in parts.items()}
    return out


@pytest.mark.sample(
    "gpt2_published-vllm",
    "mixtral-vllm",
    "deepseek_v2-deepseek",
    "deepseek_v3_fp8-vllm",
    "gpt_oss-vllm",
    "gpt_oss_mxfp4-vllm",
    "mistral-trtllm",
    "gemma3_text-vllm",
    "gpt_neox-vllm",
    "phi3-vllm",
)
@pytest.mark.parametrize(("name", "target"), pairs())
def test_out_and_back(name: str, target: str, tmp_path: Path) -> None:
    model = MODELS[name]
    if target == "deepseek":  # its code pads nothing
        shapes = {n: (V + 1, *s[1:]) if s[:1] == (V,) else s for n, s in model.shapes.items()}
        model = Model(name, model.family, {**model.config, "vocab_size": V + 1}, shapes, model.dtypes, model.moe)
    kept = comes_back(model, source(model, tmp_path / "src"), target)
    if kept is None:
        refused(tmp_path / "src", tmp_path / "no", "--to", target, "--tp-out", 2)
        return
    at = tmp_path / "src"
    one = OPTIONS[target][len(name) % len(OPTIONS[target]) :][:1]
    steps = OPTIONS[target] if name in (LLAMA.name, MIXTRAL.name) else some(OPTIONS[target], one)
    for i, options in enumerate(steps):  # from one to the next, without flags for the source
        to = tmp_path / f"{target}{i}"
        reshard(at, to, "-q", "--to", target, "--verify", *options, *(() if "--pp-out" in options else ("--pp-out", 1)))
        at = to
    reshard(at, tmp_path / "back", "-q", "--to", "hf")
    assert_same(read_all(tmp_path / "back"), kept)
    new = json.loads((tmp_path / "back" / "config.json").read_bytes())
    gone = any(n.startswith(f"model.layers.{LAYERS}.") for n in model.shapes)
    counted = {"num_nextn_predict_layers": 0} if gone and model.config.get("num_nextn_predict_layers") else {}
    assert {k: v for k, v in new.items() if k in model.config and v != model.config[k]} == counted


def test_vllm_names_of_stages(tmp_path: Path) -> None:
    source(LLAMA, tmp_path / "src")
    reshard(tmp_path / "src", tmp_path / "v", "-q", "--to", "vllm", "--tp-out", 2, "--pp-out", 3)
    found = {p.name for p in (tmp_path / "v").glob("*.safetensors")}
    # Part 1 holds the scales of the attention caches.
    assert found == {
        f"model-pp-{pp}-tp-{tp}-part-{p}.safetensors" for pp in range(3) for tp in range(2) for p in (0, 1)
    }
    assert len(read(tmp_path / "v" / "model-pp-1-tp-0-part-1.safetensors")) == 4
    last = read(tmp_path / "v" / "model-pp-2-tp-1-part-0.safetensors")
    assert last["lm_head.weight"].bits.shape == (160, H)
    assert "model.layers.2.self_attn.qkv_proj.bias" in last


def fused(model: Model, grid: Grid, rank: int, layer: int) -> dict[str, Array]:
    """The rank's q, k, v of a layer on top of each other, weights and biases."""
    mine = held(model, grid, rank)
    at = f"model.layers.{layer}.self_attn."
    ends = [e for e in ("weight", "bias") if f"{at}q_proj.{e}" in mine]
    return {e: np.concatenate([mine[f"{at}{p}_proj.{e}"].bits for p in "qkv"]) for e in ends}


@pytest.mark.parametrize("tp", [2, 8])
def test_trtllm_contents(tp: int, tmp_path: Path) -> None:
    """Local layer numbers, its own names, q, k, v fused, the embedding whole, the head padded to the ranks."""
    tensors = source(LLAMA, tmp_path / "src")
    grid = Grid(tp=tp, pp=3)
    reshard(tmp_path / "src", tmp_path / "t", "-q", "--to", "trtllm", "--tp-out", tp, "--pp-out", 3)
    names = {
        "self_attn.o_proj": "attention.dense",
        "mlp.gate_proj": "mlp.fc",
        "mlp.up_proj": "mlp.gate",
        "mlp.down_proj": "mlp.proj",
        "input_layernorm": "input_layernorm",
        "post_attention_layernorm": "post_layernorm",
    }
    for rank in range(3 * tp):
        stage, mine = rank // tp, held(LLAMA, grid, rank)
        want = {f"transformer.layers.0.attention.qkv.{e}": b for e, b in fused(LLAMA, grid, rank, stage).items()}
        for name, raw in mine.items():
            for old, new in names.items():
                if f".{old}." in name:
                    want[f"transformer.layers.0.{new}.{name.rpartition('.')[2]}"] = raw.bits
        if stage == 0:
            want["transformer.vocab_embedding.weight"] = tensors["model.embed_tokens.weight"].bits
        if stage == 2:
            want["transformer.ln_f.weight"] = tensors["model.norm.weight"].bits
            want["lm_head.weight"] = part(padded(tensors["lm_head.weight"].bits, tp), 0, tp, rank % tp)
        got = read(tmp_path / "t" / f"rank{rank}.safetensors")
        assert_same(got, {n: Raw("BF16", b) for n, b in want.items()})
    config = json.loads((tmp_path / "t" / "config.json").read_bytes())
    assert config["architecture"] == "LlamaForCausalLM"
    mapping = config["mapping"]
    assert (mapping["world_size"], mapping["tp_size"], mapping["pp_size"]) == (3 * tp, tp, 3)
    assert (config["num_key_value_heads"], config["vocab_size"], config["head_size"]) == (2, V, D)


@pytest.mark.parametrize(("ep", "etp"), [(1, 2), (2, 1)])
def test_trtllm_experts(ep: int, etp: int, tmp_path: Path) -> None:
    """All experts of a rank in one tensor, up before gate."""
    tensors = source(MIXTRAL, tmp_path / "src")
    reshard(tmp_path / "src", tmp_path / "t", "-q", "--to", "trtllm", "--tp-out", 2, "--ep-out", ep)
    for rank in (0, 1):
        got = read(tmp_path / "t" / f"rank{rank}.safetensors")
        mine = range(E) if ep == 1 else range(rank * E // 2, (rank + 1) * E // 2)
        cut = rank if etp == 2 else 0
        at = "model.layers.1.block_sparse_moe.experts"
        up, gate = ([part(tensors[f"{at}.{e}.{w}.weight"].bits, 0, etp, cut) for e in mine] for w in ("w3", "w1"))
        down = [part(tensors[f"{at}.{e}.w2.weight"].bits, 1, etp, cut) for e in mine]
        fc = np.stack([np.concatenate(pair) for pair in zip(up, gate, strict=True)])
        assert np.array_equal(got["transformer.layers.1.mlp.fc.weight"].bits, fc)
        assert np.array_equal(got["transformer.layers.1.mlp.proj.weight"].bits, np.stack(down))
        assert got["transformer.layers.1.mlp.router.weight"].bits.shape == (E, H)


def test_vllm_contents(tmp_path: Path) -> None:
    """q, k, v and gate, up per rank, the vocabulary padded to 64 rows and more."""
    tensors = source(LLAMA, tmp_path / "src")
    reshard(tmp_path / "src", tmp_path / "v", "-q", "--to", "vllm", "--tp-out", 8)
    for rank in (0, 5, 7):
        got = read(tmp_path / "v" / f"model-rank-{rank}-part-0.safetensors")
        for end, bits in fused(LLAMA, Grid(tp=8), rank, 1).items():
            assert np.array_equal(got[f"model.layers.1.self_attn.qkv_proj.{end}"].bits, bits)
        up = [part(tensors[f"model.layers.0.mlp.{n}_proj.weight"].bits, 0, 8, rank) for n in ("gate", "up")]
        assert np.array_equal(got["model.layers.0.mlp.gate_up_proj.weight"].bits, np.concatenate(up))
        want = part(padded(tensors["lm_head.weight"].bits, 64), 0, 8, rank)
        assert np.array_equal(got["lm_head.weight"].bits, want)
        seat = Seat(rank, 8, 0, 1, rank, 8)
        k = kv(tensors["model.layers.2.self_attn.k_proj.weight"].bits, seat)
        qkv = got["model.layers.2.self_attn.qkv_proj.weight"].bits
        assert np.array_equal(qkv[A * D // 8 : A * D // 8 + D], k)


def test_local_layers_of_foreign_stages(tmp_path: Path) -> None:
    """Megatron and others number the layers of each stage from 0."""
    for rank in range(6):
        stage = rank // 2
        mine = {n.replace(f"layers.{stage}.", "layers.0."): r for n, r in held(LLAMA, Grid(tp=2, pp=3), rank).items()}
        write(tmp_path / "src" / f"tp{rank % 2}_pp{stage}.safetensors", mine)
    (tmp_path / "src" / "config.json").write_text(json.dumps(LLAMA.config), encoding="utf-8")
    done = reshard(tmp_path / "src", tmp_path / "hf", "--to", "hf")
    assert "layers are numbered from 0 in every pipeline stage" in done.err
    assert_same(read_all(tmp_path / "hf"), LLAMA.tensors())


def test_local_experts_of_foreign_ranks(tmp_path: Path) -> None:
    model = MODELS["qwen3_moe"]
    grid = Grid(tp=1, ep=2, etp=1)
    for rank in (0, 1):
        first = rank * E // 2
        mine = {}
        for name, raw in held(model, grid, rank).items():
            head, word, tail = name.partition(".experts.")
            number, _, end = tail.partition(".")
            mine[f"{head}{word}{int(number) - first}.{end}" if word else name] = raw
        write(tmp_path / "src" / f"ep{rank}.safetensors", mine)
    (tmp_path / "src" / "config.json").write_text(json.dumps(model.config), encoding="utf-8")
    done = reshard(tmp_path / "src", tmp_path / "hf", "--to", "hf", "--rank-pattern", "ep{ep}.safetensors", "--ep", 2)
    assert "experts are numbered from 0 on every ep rank" in done.err
    assert_same(read_all(tmp_path / "hf"), model.tensors())


def test_targets_without_names(tmp_path: Path) -> None:
    source(MODELS["gpt_oss"], tmp_path / "src")
    for target in ("deepseek", "trtllm"):
        error = refused(tmp_path / "src", tmp_path / "dst", "--to", target, "--tp-out", 2)
        assert f"no {target} naming" in error
        assert "--family" in error


def test_ranks_keep_the_names_of_their_source(tmp_path: Path) -> None:
    """From vLLM's names to our rank files and back: nothing asks for other names."""
    tensors = source(LLAMA, tmp_path / "src")
    reshard(tmp_path / "src", tmp_path / "v", "-q", "--to", "vllm", "--tp-out", 2)
    reshard(tmp_path / "v", tmp_path / "r", "-q", "--to", "ranks", "--tp-out", 4)
    got = read(tmp_path / "r" / "rank-00003-of-00004.safetensors")
    assert "model.layers.0.self_attn.qkv_proj.weight" in got
    assert got["lm_head.weight"].bits.shape == (65, H)  # vLLM's padding is not kept
    reshard(tmp_path / "r", tmp_path / "hf", "-q", "--to", "hf")
    assert_same(read_all(tmp_path / "hf"), tensors)
    assert I == 64  # the shapes above belong to these models


@pytest.mark.product
@pytest.mark.parametrize("target", ["vllm", "trtllm"])
@pytest.mark.parametrize("stages", [1, 3])
def test_tied_and_stored_all_the_same(target: str, stages: int, tmp_path: Path) -> None:
    """Some tied checkpoints hold the head as well; it comes out as the tie says."""
    model = MODELS["qwen2"]
    tensors = model.tensors()
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    save_hf(tmp_path / "src", tensors, model.config)
    reshard(tmp_path / "src", tmp_path / "out", "-q", "--to", target, "--tp-out", 2, "--pp-out", stages, "--verify")
    reshard(tmp_path / "out", tmp_path / "back", "-q", "--to", "hf")
    assert_same(read_all(tmp_path / "back"), model.tensors())


def test_tied_although_the_config_does_not_say(tmp_path: Path) -> None:
    """Gemma's published configs leave it out; the last stage needs the embedding as its head."""
    model = MODELS["gemma"]
    config = {k: v for k, v in model.config.items() if k != "tie_word_embeddings"}
    save_hf(tmp_path / "src", model.tensors(), config)
    reshard(tmp_path / "src", tmp_path / "dst", "-q", "--tp-out", 2, "--pp-out", 3, "--verify")
    holders = [
        r
        for r in range(6)
        if "model.embed_tokens.weight" in read(tmp_path / "dst" / f"rank-{r:05d}-of-00006.safetensors")
    ]
    assert holders == [0, 1, 4, 5]
    reshard(tmp_path / "dst", tmp_path / "back", "-q", "--to", "hf")
    assert_same(read_all(tmp_path / "back"), model.tensors())


@pytest.mark.parametrize(
    ("options", "files"),
    [
        (("--to", "ranks", "--tp-out", 2, "--ep-out", 2), 2),
        (("--to", "ranks", "--tp-out", 1, "--ep-out", 4), 4),
        (("--to", "ranks", "--tp-out", 2, "--ep-out", 2, "--etp-out", 2), 4),
        (("--to", "vllm", "--tp-out", 2, "--ep-out", 2), 2),
        (("--to", "trtllm", "--tp-out", 2, "--ep-out", 2), 2),
        (("--to", "trtllm", "--tp-out", 4, "--ep-out", 2, "--etp-out", 2), 4),
    ],
)
def test_devices_are_files(options: tuple[object, ...], files: int, tmp_path: Path) -> None:
    """--ep-out means whole experts for every target, so tp 2 with ep 2 is two devices and as many rank files."""
    source(MIXTRAL, tmp_path / "src")
    reshard(tmp_path / "src", tmp_path / "dst", "-q", "--verify", *options)
    held = {
        m[0] for p in (tmp_path / "dst").glob("*.safetensors") if (m := re.match(r"(?:rank|model-rank)-?\d+", p.name))
    }
    assert len(held) == files


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--to", "trtllm", "--tp-out", 4, "--ep-out", 2), ("ep 2 x etp 1 is not tp 4", "--etp-out 2")),
        (("--to", "trtllm", "--tp-out", 2, "--ep-out", 4), ("--ep-out must divide tp 2",)),
        (("--to", "vllm", "--tp-out", 2, "--ep-out", 4), ("--ep-out 4 is not possible", "--ep-out 2")),
        (("--to", "vllm", "--ep-out", 2), ("--ep-out 2 is not possible", "with tp 1 only --ep-out 1")),
        (("--to", "vllm", "--tp-out", 2, "--etp-out", 1), ("--etp-out 1 is not possible", "ep 1")),
        (("--to", "vllm", "--tp-out", 2, "--ep-out", 2, "--etp-out", 2), ("--etp-out 2 is not possible", "ep 2")),
        (("--to", "hybrid", "--tp-out", 2, "--etp-out", 1), ("--etp-out 1 is not possible", "without expert")),
        (("--to", "zcc", "--tp-out", 2, "--ep-out", 2, "--etp-out", 2), ("--etp-out 2 is not possible", "--to zcc")),
    ],
)
def test_experts_that_an_engine_cannot_hold(
    options: tuple[object, ...], words: tuple[str, ...], tmp_path: Path
) -> None:
    source(MIXTRAL, tmp_path / "src")
    error = refused(tmp_path / "src", tmp_path / "dst", *options, code=2)
    for word in words:
        assert word in error, error
