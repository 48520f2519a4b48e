"""--to megatron: a directory for each rank. tests/peers lets megatron-core itself load it."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ckpttool.execute import engine
from tests.helpers.command import ckpttool, refused, reshard
from tests.helpers.paddle import Array
from tests.helpers.tensorfile import Raw, read_all, save_hf
from tests.helpers.torch_load import Dtype, torch_load
from tests.helpers.training_run import save_run

FIXTURES = Path(__file__).parents[2] / "fixtures"
H, HEADS, GROUPS, D, F, V, E = 16, 4, 2, 8, 12, 20, 4
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": H, "intermediate_size": F,
    "num_hidden_layers": 4, "num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "head_dim": D,
    "vocab_size": V, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64, "rope_theta": 1e4, "hidden_act": "silu",
}  # fmt: skip
QWEN3_MOE = LLAMA | {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": E, "num_experts_per_tok": 2,
    "moe_intermediate_size": F, "norm_topk_prob": True, "num_hidden_layers": 2, "decoder_sparse_step": 1,
}  # fmt: skip


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    attention = {
        "q_proj": (HEADS * D, H),
        "k_proj": (GROUPS * D, H),
        "v_proj": (GROUPS * D, H),
        "o_proj": (H, HEADS * D),
    }
    mlp = {"gate_proj": (F, H), "up_proj": (F, H), "down_proj": (H, F)}
    out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (V, H)}
    for i in range(config["num_hidden_layers"]):
        layer: dict[str, tuple[int, ...]] = {f"self_attn.{n}": s for n, s in attention.items()}
        layer |= {"input_layernorm": (H,), "post_attention_layernorm": (H,)}
        if config is QWEN3_MOE:
            layer |= {"self_attn.q_norm": (D,), "self_attn.k_norm": (D,), "mlp.gate": (E, H)}
            layer |= {f"mlp.experts.{e}.{n}": s for e in range(E) for n, s in mlp.items()}
        else:
            layer |= {f"mlp.{n}": s for n, s in mlp.items()}
        out |= {f"model.layers.{i}.{n}.weight": s for n, s in layer.items()}
    out["model.norm.weight"] = (H,)
    if not config["tie_word_embeddings"]:
        out["lm_head.weight"] = (V, H)
    return out


def weights(config: dict[str, Any], seed: int = 3) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    return {n: rng.standard_normal(s).astype(np.float32) for n, s in shapes(config).items()}


def model(folder: Path, config: dict[str, Any] = LLAMA) -> tuple[Path, dict[str, Array]]:
    found = {n: a.astype(ml_dtypes.bfloat16) for n, a in weights(config).items()}
    raw = {n: Raw("BF16", a.view(np.uint16)) for n, a in found.items()}
    return save_hf(folder, raw, config), found


def run(
    folder: Path,
    config: dict[str, Any] = LLAMA,
    *,
    masters: bool = True,
    dtype: Any = ml_dtypes.bfloat16,
    **options: Any,
) -> dict[str, Any]:
    """A run of a trainer; {"param": {name: array}, "exp_avg": ..., "exp_avg_sq": ..., "model": ...}."""
    parts = {p: weights(config, seed) for seed, p in enumerate(("param", "exp_avg", "exp_avg_sq"), 5)}
    parts["model"] = {n: a.astype(dtype) for n, a in parts["param"].items()}
    steps = options.pop("steps", {})
    tensors: dict[str, Array] = dict(parts["model"])
    for name in shapes(config):
        if masters:
            tensors[f"master_weights/{name}"] = parts["param"][name]
        for state in ("exp_avg", "exp_avg_sq"):
            tensors[f"optimizer/{name}/{state}"] = parts[state][name]
        tensors[f"optimizer/{name}/step"] = np.array(steps.get(name, 7), np.float32)
    if not masters:
        parts["param"] = {n: a.astype(np.float32) for n, a in parts["model"].items()}
    values = {"lr": 5e-4, "initial_lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-6, "weight_decay": 0.1, "foreach": None}
    options.setdefault("groups", [{"parameters": list(shapes(config)), "values": values}])
    save_run(folder, tensors, config=config, family=config["model_type"], **options)
    return parts


def fused(held: dict[str, Array], config: dict[str, Any], tp: int = 1, rank: int = 0) -> dict[str, Array]:
    """{canonical name: what a rank of tensor parallelism holds}, experts whole."""

    def rows(a: Array) -> Array:
        return np.split(a, tp)[rank]

    def table(a: Array) -> Array:
        each = 128 * -(-V // (128 * tp))
        padded = np.zeros((each * tp, H), a.dtype)
        padded[:V] = a
        return rows(padded)

    out = {"embedding.word_embeddings.weight": table(held["model.embed_tokens.weight"])}
    for i in range(config["num_hidden_layers"]):
        a, b = f"model.layers.{i}.", f"decoder.layers.{i}."
        q, k, v = (held[f"{a}self_attn.{x}_proj.weight"].reshape(GROUPS, -1, H) for x in "qkv")
        out[b + "self_attention.linear_qkv.weight"] = rows(np.concatenate([q, k, v], 1).reshape(-1, H))
        out[b + "self_attention.linear_proj.weight"] = np.split(held[a + "self_attn.o_proj.weight"], tp, 1)[rank]
        for ours, theirs in (("input", "input"), ("pre_mlp", "post_attention")):
            out[f"{b}{ours}_layernorm.weight"] = held[f"{a}{theirs}_layernorm.weight"]
        names = {"mlp.": "mlp."}
        if config is QWEN3_MOE:
            out[b + "mlp.router.weight"] = held[a + "mlp.gate.weight"]
            for x in "qk":
                out[f"{b}self_attention.{x}_layernorm.weight"] = held[f"{a}self_attn.{x}_norm.weight"]
            names = {f"mlp.experts.local_experts.{e}.": f"mlp.experts.{e}." for e in range(E)}
        ways, way = (1, 0) if config is QWEN3_MOE else (tp, rank)
        for ours, theirs in names.items():
            parts = [np.split(held[f"{a}{theirs}{x}_proj.weight"], ways)[way] for x in ("gate", "up")]
            out[f"{b}{ours}linear_fc1.weight"] = np.concatenate(parts)
            out[f"{b}{ours}linear_fc2.weight"] = np.split(held[f"{a}{theirs}down_proj.weight"], ways, 1)[way]
    out["decoder.final_layernorm.weight"] = held["model.norm.weight"]
    if "lm_head.weight" in held:
        out["output_layer.weight"] = table(held["lm_head.weight"])
    return out


def te(name: str) -> str:
    """The same under Transformer Engine, in a model of dense layers."""
    name = name.replace(".input_layernorm.", ".self_attention.linear_qkv.layer_norm_")
    return name.replace(".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_")


def same(found: dict[str, Any], wanted: dict[str, Array]) -> None:
    assert sorted(found) == sorted(wanted)
    for name, want in wanted.items():
        have = found[name]
        assert (have.dtype, have.shape) == (want.dtype, want.shape), name
        assert have.tobytes() == np.ascontiguousarray(want).tobytes(), name


def folders(dst: Path) -> list[str]:
    return sorted(str(p.parent.relative_to(dst)) for p in dst.glob("*/*/model_optim_rng.pt"))


def layers(held: dict[str, Array], *wanted: int) -> dict[str, Array]:
    """The layers with these numbers, numbered from 0."""
    return {
        f"decoder.layers.{i}.{n.split('.', 3)[3]}": a
        for i, layer in enumerate(wanted)
        for n, a in held.items()
        if n.startswith(f"decoder.layers.{layer}.")
    }


def others(held: dict[str, Array], *names: str) -> dict[str, Array]:
    return {n: a for n, a in held.items() if n.startswith(names)}


def test_ranks_and_stages(tmp_path: Path) -> None:
    """Layers are numbered from 0 in each stage; norms lie where Transformer Engine has them; padding is zeros."""
    src, held = model(tmp_path / "src")
    dst = tmp_path / "out"
    reshard(src, dst, "--to", "megatron", "--tp-out", 2, "--pp-out", 2, "--verify", "-q")
    assert (dst / "latest_checkpointed_iteration.txt").read_text() == "release"
    assert folders(dst) == [f"release/mp_rank_{t:02d}_{p:03d}" for t in (0, 1) for p in (0, 1)]
    assert not list(dst.glob("*/*/distrib_optim.pt"))
    for t, p in itertools.product((0, 1), (0, 1)):
        value = torch_load(dst / f"release/mp_rank_{t:02d}_{p:03d}/model_optim_rng.pt")
        assert (value["checkpoint_version"], value["iteration"], "optimizer" in value) == (3.0, 0, False)
        whole = fused(held, LLAMA, 2, t)
        ends = ("embedding.",) if p == 0 else ("decoder.final", "output_layer.")
        wanted = layers(whole, 2 * p, 2 * p + 1) | others(whole, *ends)
        same(value["model"], {te(n): a for n, a in wanted.items()})
        args = value["args"]
        assert (args.tensor_model_parallel_size, args.pipeline_model_parallel_size) == (2, 2)
        assert (args.num_layers, args.padded_vocab_size, args.vocab_size) == (4, 256, V)
        assert (args.transformer_impl, args.params_dtype, args.bf16) == ("transformer_engine", Dtype("bfloat16"), True)
        assert (args.virtual_pipeline_model_parallel_size, args.use_distributed_optimizer) == (None, False)
    reshard(dst, tmp_path / "back", "--to", "hf", "-q")
    assert read_all(tmp_path / "back").keys() == held.keys()


def test_the_order_is_that_of_the_model(tmp_path: Path) -> None:
    src, _ = model(tmp_path / "src")
    reshard(src, tmp_path / "out", "--to", "megatron", "--target", "local", "-q")
    value = torch_load(tmp_path / "out/release/mp_rank_00/model_optim_rng.pt")
    assert value["args"].transformer_impl == "local"
    names = list(value["model"])
    assert names[:2] == ["embedding.word_embeddings.weight", "decoder.layers.0.input_layernorm.weight"]
    assert [n.split(".", 3)[3] for n in names if ".layers.1." in n] == [
        "input_layernorm.weight",
        "self_attention.linear_proj.weight",
        "self_attention.linear_qkv.weight",
        "pre_mlp_layernorm.weight",
        "mlp.linear_fc1.weight",
        "mlp.linear_fc2.weight",
    ]
    assert names[-2:] == ["decoder.final_layernorm.weight", "output_layer.weight"]


def test_virtual_stages(tmp_path: Path) -> None:
    src, held = model(tmp_path / "src")
    dst = tmp_path / "out"
    reshard(src, dst, "--to", "megatron", "--pp-out", 2, "--pp-layout", "1,1,1,1", "--verify", "-q")
    whole = {te(n): a for n, a in fused(held, LLAMA).items()}
    for p in (0, 1):
        value = torch_load(dst / f"release/mp_rank_00_{p:03d}/model_optim_rng.pt")
        assert "model" not in value
        same(value["model0"], layers(whole, p) | (others(whole, "embedding.") if p == 0 else {}))
        ends = others(whole, "decoder.final", "output_layer.") if p else {}
        same(value["model1"], layers(whole, 2 + p) | ends)
        args = value["args"]
        assert args.virtual_pipeline_model_parallel_size == 2
        assert args.num_layers_per_virtual_pipeline_stage == 1
    error = refused(src, tmp_path / "no", "--to", "megatron", "--pp-out", 1, "--pp-layout", "2,2", code=2)
    assert "virtual stages" in error


@pytest.mark.parametrize("pp", [1, 2])
def test_a_tied_head_is_on_the_last_of_several_stages(pp: int, tmp_path: Path) -> None:
    src, held = model(tmp_path / "src", LLAMA | {"tie_word_embeddings": True})
    reshard(src, tmp_path / "out", "--to", "megatron", "--pp-out", pp, "--verify", "-q")
    last = tmp_path / "out" / "release" / ("mp_rank_00" if pp == 1 else "mp_rank_00_001") / "model_optim_rng.pt"
    value = torch_load(last)
    assert value["args"].untie_embeddings_and_output_weights is False
    table = fused(held, LLAMA)["embedding.word_embeddings.weight"]
    assert ("output_layer.weight" in value["model"]) == (pp == 2)
    if pp == 2:
        same(others(value["model"], "output_layer."), {"output_layer.weight": table})


@pytest.mark.parametrize(("asked", "rows"), [((), 256), (("--vocab-multiple", 1), 20), (("--vocab-multiple", 8), 32)])
def test_padding(asked: tuple[object, ...], rows: int, tmp_path: Path) -> None:
    src, _ = model(tmp_path / "src")
    reshard(src, tmp_path / "out", "--to", "megatron", "--tp-out", 2, *asked, "-q")
    value = torch_load(tmp_path / "out/release/mp_rank_01/model_optim_rng.pt")
    assert value["args"].padded_vocab_size == rows
    assert value["model"]["output_layer.weight"].shape == (rows // 2, H)
    assert not value["model"]["output_layer.weight"][V - rows // 2 :].any() or rows == V


EXPERTS = [
    ("1 1 2 1", {"mp_rank_00_000": (0, 0, 0), "mp_rank_00_001": (0, 0, 1)}),
    ("2 1 2 1", {"mp_rank_00_000": (0, 0, 0), "mp_rank_01_001": (1, 0, 1)}),
    ("2 1 4 1", {f"mp_rank_{e % 2:02d}_{e:03d}": (e % 2, 0, e) for e in range(4)}),
    ("1 2 2 1", {f"mp_rank_00_{p:03d}_{e:03d}": (0, p, e) for p in (0, 1) for e in (0, 1)}),
]


@pytest.mark.product
@pytest.mark.parametrize(("mesh", "named"), EXPERTS)
@pytest.mark.parametrize("target", ["transformer_engine", "local"])
def test_experts(mesh: str, named: dict[str, tuple[int, int, int]], target: str, tmp_path: Path) -> None:
    """Numbered from 0 on each rank. Ranks are named by tp and ep; there are only those that the mesh has."""
    src, held = model(tmp_path / "src", QWEN3_MOE)
    tp, pp, ep, etp = map(int, mesh.split())
    flags = ("--tp-out", tp, "--pp-out", pp, "--ep-out", ep, "--etp-out", etp)
    dst = tmp_path / "out"
    reshard(src, dst, "--to", "megatron", *flags, "--target", target, "--verify", "-q")
    assert folders(dst) == sorted(f"release/{n}" for n in named)
    grouped, per = target == "transformer_engine", E // ep
    for folder, (t, p, e) in named.items():
        value = torch_load(dst / "release" / folder / "model_optim_rng.pt")
        assert value["args"].moe_grouped_gemm is grouped
        assert (value["args"].expert_model_parallel_size, value["args"].num_experts) == (ep, E)
        whole = fused(held, QWEN3_MOE, tp, t)
        own = layers(whole, 0, 1) if pp == 1 else layers(whole, p)
        wanted = {}
        for name, a in own.items():
            if ".local_experts." in name:
                before, _, rest = name.partition("local_experts.")
                number, part, _ = rest.split(".")
                local = int(number) - e * per
                if not 0 <= local < per:
                    continue
                wanted[
                    f"{before}{part}.weight{local}" if grouped else f"{before}local_experts.{local}.{part}.weight"
                ] = a
            else:
                own_name = name.replace(".input_layernorm.", ".self_attention.linear_qkv.layer_norm_")
                wanted[own_name if grouped else name] = a
        wanted |= others(whole, "embedding.") if p == 0 else {}
        wanted |= others(whole, "decoder.final", "output_layer.") if p == pp - 1 else {}
        same(value["model"], wanted)


def buffer(names: list[str], held: dict[str, Array]) -> Array:
    """A flat vector: parameters in reverse order, each from a multiple of 64 elements on."""
    parts: list[Array] = []
    at = 0
    for name in reversed(names):
        gap = -at % 64
        parts += [np.zeros(gap, np.float32), held[name].reshape(-1)]
        at += gap + held[name].size
    return np.concatenate(parts)


KEY = (Dtype("bfloat16"), Dtype("float32"))


@pytest.mark.product
@pytest.mark.parametrize("masters", [True, False])
@pytest.mark.parametrize("target", ["transformer_engine", "local"])
def test_optimizer(masters: bool, target: str, tmp_path: Path) -> None:
    held = run(tmp_path / "src", masters=masters, plain={"iteration": 11, "consumed_train_samples": 352})
    dst = tmp_path / "out"
    flags = ("--tp-out", 2, "--pp-out", 2, "--target", target)
    done = reshard(tmp_path / "src", dst, "--to", "megatron", *flags, "--verify")
    assert (dst / "latest_checkpointed_iteration.txt").read_text() == "11"
    assert ("master weights that the source does not have" in done.err) is not masters
    for t, p in itertools.product((0, 1), (0, 1)):
        folder = dst / f"iter_0000011/mp_rank_{t:02d}_{p:03d}"
        value, state = torch_load(folder / "model_optim_rng.pt"), torch_load(folder / "distrib_optim.pt")
        assert list(state) == ["buckets_coalesced", 0]
        assert state["buckets_coalesced"] is True
        assert list(state[0]) == [KEY]
        order = list(value["model"])
        for part in ("param", "exp_avg", "exp_avg_sq"):
            whole = fused(held[part], LLAMA, 2, t)
            own = layers(whole, 2 * p, 2 * p + 1) | others(whole, "embedding.", "decoder.final", "output_layer.")
            own = {te(n): a for n, a in own.items()} if target == "transformer_engine" else own
            found = state[0][KEY][part]
            assert found.tobytes() == buffer(order, own).tobytes(), part
            assert state[0][KEY]["numel_unpadded"] == len(found)
        groups = value["optimizer"]["optimizer"]["param_groups"]
        assert [(g["wd_mult"], g["is_expert_parallel"], g["lr_mult"]) for g in groups] == [
            (1.0, False, 1.0),
            (0.0, False, 1.0),
        ]
        for g in groups:
            assert (g["step"], g["lr"], g["betas"], g["eps"], g["weight_decay"]) == (7, 5e-4, (0.9, 0.95), 1e-6, 0.1)
            assert ("max_lr" in g, g["bias_correction"], "params" in g) == (False, True, False)
        assert (value["iteration"], value["args"].iteration, value["args"].consumed_train_samples) == (11, 11, 352)
        assert value["args"].use_distributed_optimizer is True
        assert value["opt_param_scheduler"]["num_steps"] == 352
        assert value["opt_param_scheduler"]["max_lr"] is None
    assert "--override-opt-param-scheduler" in done.err
    assert "--no-load-rng" in done.err


def test_a_float32_model_is_its_own_master(tmp_path: Path) -> None:
    held = run(tmp_path / "src", masters=False, dtype=np.float32)
    done = reshard(tmp_path / "src", tmp_path / "out", "--to", "megatron", "--target", "local", "--verify")
    assert "master weights" not in done.err
    folder = tmp_path / "out/iter_0000007/mp_rank_00"
    value, state = torch_load(folder / "model_optim_rng.pt"), torch_load(folder / "distrib_optim.pt")
    assert (value["args"].bf16, value["args"].fp16, value["args"].params_dtype) == (False, False, Dtype("float32"))
    (key,) = state[0]
    assert key == (Dtype("float32"), Dtype("float32"))
    assert state[0][key]["param"].tobytes() == buffer(list(value["model"]), fused(held["model"], LLAMA)).tobytes()


def test_a_run_in_bf16_goes_on_in_float32(tmp_path: Path) -> None:
    """What its optimizer worked on is the model then: float32 weights have no masters."""
    source = FIXTURES / "megatron" / "legacy" / "qwen3_tp2_plain"
    reshard(source, tmp_path / "ranks", "--to", "ranks", "--tp-out", 1, "--pp-out", 1)
    done = reshard(source, tmp_path / "out", "--to", "megatron", "--dtype", "f32", "--verify")
    assert "the weights are the source's master weights" in done.err
    reshard(tmp_path / "out", tmp_path / "hf", "--to", "hf")
    bits = {k: t.bits for k, t in read_all(tmp_path / "ranks").items()}
    model = read_all(tmp_path / "hf")
    assert model
    for name, t in model.items():
        assert t.dtype == "F32"
        np.testing.assert_array_equal(t.bits, bits[f"master_weights/{name}"])


def test_a_layer_that_is_left_out(tmp_path: Path) -> None:
    source = FIXTURES / "megatron" / "legacy" / "qwen3_tp2_plain"
    error = refused(source, tmp_path / "out", "--to", "megatron", "--remove-keys", "*.layers.0.*")
    assert "nothing of layer 0 is written" in error
    assert not (tmp_path / "out").exists()


def test_ranks_that_are_written_alone(tmp_path: Path) -> None:
    """On several machines, each its own: what a file says of the model does not depend on which ranks are asked for."""
    mesh = ("--to", "megatron", "--tp-out", 2, "--pp-out", 2)
    done = reshard(FIXTURES / "hf_tiny_source", tmp_path / "all", *mesh)
    assert "torchrun" in done.err
    for rank in range(4):
        done = reshard(FIXTURES / "hf_tiny_source", tmp_path / str(rank), *mesh, "--ranks-out", rank)
        assert "torchrun" not in done.err  # which loads all of them
        (file,) = (tmp_path / str(rank)).rglob("*.pt")
        assert file.read_bytes() == (tmp_path / "all" / file.relative_to(tmp_path / str(rank))).read_bytes()


def test_a_head_that_is_left_out_is_not_tied(tmp_path: Path) -> None:
    reshard(FIXTURES / "hf_tiny_source", tmp_path / "a", "--to", "megatron", "--remove-keys", "lm_head.*")
    (file,) = (tmp_path / "a").rglob("*.pt")
    assert vars(torch_load(file)["args"])["untie_embeddings_and_output_weights"] is True


def test_state_without_its_weights(tmp_path: Path) -> None:
    source = FIXTURES / "megatron" / "legacy" / "qwen3_tp2_plain"
    error = refused(source, tmp_path / "out", "--to", "megatron", "--only", "optimizer")
    assert "the state of a weight together with the weight" in error


def test_the_bias_of_a_router_stays_float32(tmp_path: Path) -> None:
    source = FIXTURES / "megatron" / "dist" / "deepseek_v3"
    flags = ("--ep-out", 2, "--etp-out", 1, "--dtype", "f16", "--verify", "-q")
    reshard(source, tmp_path / "out", "--to", "megatron", *flags)
    (file,) = (tmp_path / "out").glob("*/mp_rank_00_001/model_optim_rng.pt")
    value = torch_load(file)
    found = {n: a.dtype for n, a in value["model"].items() if n.endswith("expert_bias")}
    assert found
    assert set(found.values()) == {np.dtype(np.float32)}
    assert value["args"].fp16 is True


def test_an_interrupted_run_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checksums over vectors that many parameters share are those of all of them, whoever wrote them."""
    run(tmp_path / "src")
    flags = ("--to", "megatron", "--tp-out", 2, "--target", "local", "-q")
    reshard(tmp_path / "src", tmp_path / "whole", *flags)
    with monkeypatch.context() as patch:
        patch.setattr(engine.Run, "_write_summed", interrupt)
        assert ckpttool("reshard", tmp_path / "src", tmp_path / "out", *flags).code == 130
    reshard(tmp_path / "src", tmp_path / "out", *flags, "--resume")
    for path in (tmp_path / "whole").rglob("*.pt"):
        again = tmp_path / "out" / path.relative_to(tmp_path / "whole")
        assert again.read_bytes() == path.read_bytes()
        torch_load(again)


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_optimizers_of_experts(tmp_path: Path) -> None:
    """With expert parallelism the experts have an optimizer of their own; who holds the same as another has nothing."""
    held = run(tmp_path / "src", QWEN3_MOE)
    dst = tmp_path / "out"
    flags = ("--tp-out", 2, "--ep-out", 4, "--etp-out", 1, "--target", "local")
    reshard(tmp_path / "src", dst, "--to", "megatron", *flags, "--verify", "-q")
    for e in range(4):
        folder = dst / f"iter_0000007/mp_rank_{e % 2:02d}_{e:03d}"
        value, states = torch_load(folder / "model_optim_rng.pt"), torch_load(folder / "distrib_optim.pt")
        groups = [o["optimizer"]["param_groups"] for o in value["optimizer"]]
        assert [[(g["is_expert_parallel"], g["wd_mult"]) for g in of] for of in groups] == [
            [(False, 1.0), (False, 0.0)],
            [(True, 1.0)],
        ]
        dense, experts = states
        assert (dense is None) == (e >= 2)
        order = list(value["model"])
        whole = {
            n.replace(f"local_experts.{e}.", "local_experts.0."): a
            for n, a in fused(held["exp_avg"], QWEN3_MOE, 2, e % 2).items()
            if "local_experts" not in n or f"local_experts.{e}." in n
        }
        mine = [n for n in order if "local_experts" in n]
        assert experts[0][KEY]["exp_avg"].tobytes() == buffer(mine, whole).tobytes()
        if dense is not None:
            rest = [n for n in order if "local_experts" not in n]
            assert dense[0][KEY]["exp_avg"].tobytes() == buffer(rest, whole).tobytes()


def test_virtual_stages_have_a_buffer_each(tmp_path: Path) -> None:
    held = run(tmp_path / "src")
    flags = ("--pp-out", 2, "--pp-layout", "1,1,1,1", "--target", "local", "--verify")
    reshard(tmp_path / "src", tmp_path / "out", "--to", "megatron", *flags, "-q")
    folder = tmp_path / "out/iter_0000007/mp_rank_00_001"
    value, state = torch_load(folder / "model_optim_rng.pt"), torch_load(folder / "distrib_optim.pt")
    whole = fused(held["exp_avg"], LLAMA)
    for chunk, layer in ((0, 1), (1, 3)):
        own = layers(whole, layer) | others(whole, "decoder.final", "output_layer.")
        assert state[chunk][KEY]["exp_avg"].tobytes() == buffer(list(value[f"model{chunk}"]), own).tobytes()


def test_what_cannot_be(tmp_path: Path) -> None:
    first = "model.layers.0.mlp.down_proj.weight"
    run(tmp_path / "steps", steps={first: 8})
    error = refused(tmp_path / "steps", tmp_path / "out", "--to", "megatron")
    assert "counts the steps once for all parameters" in error
    assert "--only model" in error
    reshard(tmp_path / "steps", tmp_path / "model", "--to", "megatron", "--only", "model", "-q")
    error = refused(
        tmp_path / "steps", tmp_path / "out", "--to", "megatron", "--only", "model", "--only", "master_weights"
    )
    assert "together with the moments" in error
    src, _ = model(tmp_path / "moe", QWEN3_MOE)
    error = refused(src, tmp_path / "out", "--to", "megatron", "--tp-out", 1, "--etp-out", 2, code=2)
    assert "several ranks would have one name" in error
    coded = {n: Raw("F8_E4M3", np.zeros(s, np.uint8)) for n, s in shapes(LLAMA).items() if "mlp" in n}
    plain = {n: Raw("BF16", np.zeros(s, np.uint16)) for n, s in shapes(LLAMA).items() if "mlp" not in n}
    error = refused(save_hf(tmp_path / "fp8", plain | coded, LLAMA), tmp_path / "out", "--to", "megatron")
    assert "--dequant bf16" in error


def test_megatrons_own_training_is_kept(tmp_path: Path) -> None:
    """Groups, schedule and arguments of a save of Megatron's, in another mesh."""
    schedule = {"max_lr": 1e-3, "num_steps": 320, "lr_decay_style": "cosine"}
    values = {"lr": 9e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.0, "lr_mult": 1.0, "max_lr": 2e-3}
    wd = {n: s for n, s in shapes(LLAMA).items() if len(s) == 1}
    groups = [
        {"parameters": [n for n in shapes(LLAMA) if n not in wd], "values": values | {"wd_mult": 1.0, "pre": "x"}},
        {"parameters": list(wd), "values": values | {"wd_mult": 0.0}},
    ]
    run(tmp_path / "src", groups=groups, plain={"opt_param_scheduler": schedule, "iteration": 5})
    reshard(tmp_path / "src", tmp_path / "one", "--to", "megatron", "--tp-out", 2, "-q")
    done = reshard(tmp_path / "one", tmp_path / "two", "--to", "megatron", "--tp-out", 1, "--pp-out", 2, "--verify")
    assert "--override-opt-param-scheduler" not in done.err
    value = torch_load(tmp_path / "two/iter_0000005/mp_rank_00_001/model_optim_rng.pt")
    assert value["opt_param_scheduler"] == schedule
    first, second = value["optimizer"]["optimizer"]["param_groups"]
    assert (first["wd_mult"], first["max_lr"], first["pre"], first["step"]) == (1.0, 2e-3, "x", 7)
    assert second["wd_mult"] == 0.0
    assert json.loads((tmp_path / "two/config.json").read_text())["model_type"] == "llama"


@pytest.mark.parametrize("source", ["legacy/qwen3_moe_tp2_ep2", "dist/llama_tp2"])
def test_one_rank_of_a_run_stays_in_its_format(source: str, tmp_path: Path) -> None:
    """Without --to the optimizer comes along, also to one rank."""
    done = reshard(FIXTURES / "megatron" / source, tmp_path / "out", "--tp-out", 1, "--ep-out", 1, "--verify")
    assert ckpttool("diff", FIXTURES / "megatron" / source, tmp_path / "out").code == 0
    assert "note: written as megatron" in done.err
    assert "left out" not in done.err
