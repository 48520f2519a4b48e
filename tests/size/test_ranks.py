"""What each rank holds, which cuts are possible, keys and values, training."""

from __future__ import annotations

from typing import Any

import pytest

from ckpttool.core.mesh import Mesh
from ckpttool.errors import UnsupportedError, UsageError
from ckpttool.ops.size.cache import KvCache, cache_of
from ckpttool.ops.size.resident import partition
from ckpttool.ops.size.stored import WantedRecipe, apply
from ckpttool.ops.size.training import TrainingSetup, training_of
from tests.size.models import CONFIGS, applied, model, model_of, ranks


def tp(n: int) -> Mesh:
    return Mesh(tp=n, etp=n)


# -- blocks


@pytest.mark.product(one_in=2)
@pytest.mark.parametrize(
    ("name", "size", "local", "possible"),
    [
        ("Qwen3-30B-A3B", 4, "192 of its 768", (1, 2)),
        ("Qwen3-235B-A22B", 8, "192 of its 1,536", (1, 2, 4)),
        ("DeepSeek-V3", 32, "576 of its 18,432", (1, 2, 4, 8, 16)),
    ],
)
def test_blocks_that_a_cut_would_tear(name: str, size: int, local: str, possible: tuple[int, ...]) -> None:
    found = ranks(name, tp(size))
    assert any(local in m.why for m in found.misfits)
    assert found.works == possible
    assert found.held  # engines that pad could hold it all the same


@pytest.mark.product(one_in=2)
@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("Qwen3-30B-A3B", tp(2)),
        ("Qwen3-30B-A3B", Mesh(tp=4, ep=4)),
        pytest.param("DeepSeek-V3", tp(8), marks=pytest.mark.thorough),
        ("DeepSeek-V3", tp(16)),
        ("DeepSeek-V3", Mesh(tp=16, ep=16)),
    ],
    ids=str,
)
def test_blocks_that_no_cut_tears(name: str, mesh: Mesh) -> None:
    found = ranks(name, mesh)
    assert found.checked
    assert not found.misfits
    assert len(found.held) == mesh.world


def small(**fields: Any) -> dict[str, Any]:
    """A Llama of two layers."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "intermediate_size": 512,
        "vocab_size": 100,
        **fields,
    }


def test_parts_of_a_fused_tensor_are_looked_at_one_by_one() -> None:
    """The 1,152 rows of a rank would be three times 384, a multiple of 128; but its key has 192 of them."""
    fields = {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "num_attention_heads": 8, "head_dim": 192}
    made = model_of(small(**fields))
    found = partition(made, apply(made, WantedRecipe("block")), tp(2), 64, blocks=True, follows=True)
    assert [(m.name, m.why) for m in found.misfits] == [
        (
            "model.layers.0.self_attn.qkv_proj.weight",
            "a rank has 192 of its 2,304 rows, not a multiple of 128",
        )
    ]


def test_joined_parts_are_whole_blocks_though_nothing_is_cut() -> None:
    made = model_of(small(num_key_value_heads=1))
    found = partition(made, apply(made, WantedRecipe("block")), Mesh(), 64, blocks=True, follows=True)
    # q | k | v: the k of 64 rows lies in the middle, the v of 64 rows at the end, where a block may be partly filled.
    assert [(m.name, m.why) for m in found.misfits] == [
        ("model.layers.0.self_attn.k_proj.weight", "it is joined to others with 64 rows, not a multiple of 128")
    ]


def test_heads_that_do_not_divide_are_no_answer_but_a_misfit() -> None:
    found = ranks("Llama-3-8B", tp(3))
    assert not found.held
    assert found.works == (1, 2, 4, 8, 16)
    assert any("32 heads cannot be split evenly across 3 ranks" in m.why for m in found.misfits)


def test_other_recipes_have_no_blocks_to_tear() -> None:
    found = ranks("Qwen3-30B-A3B", tp(4), WantedRecipe("channel"))
    assert not found.misfits
    assert not found.checked


# -- shares


def test_a_share_by_hand() -> None:
    made = model_of(small())
    found = partition(made, apply(made, WantedRecipe("block")), tp(4), 64, blocks=False, follows=True)
    attention = 64 * 256 + 2 * (64 * 256) + 256 * 64  # two ranks hold the same key and value head
    scales = 4 * (2 + 2 + 2 + 2)  # a share of 64 rows or columns still has a scale for each started block
    mlp = 3 * 128 * 256
    norms = 2 * 2 * 256
    layer = attention + scales + mlp + 3 * 2 * 4 + norms
    vocabulary = 2 * (128 // 4) * 256 * 2  # 100 rows padded to 128; embedding and head, BF16
    assert found.vocabulary == (100, 128)
    assert {w.nbytes for w in found.held} == {2 * layer + vocabulary + 2 * 256}


def test_whole_model_on_one_rank_is_what_is_stored() -> None:
    held = ranks("Llama-3-8B", Mesh()).held
    assert [w.nbytes for w in held] == [applied("Llama-3-8B", WantedRecipe("block")).total.nbytes]
    assert held[0].parameters == 8_030_261_248


def test_scales_of_blocks_are_resident_as_f32() -> None:
    bf16 = ranks("Qwen3-30B-A3B", Mesh(), WantedRecipe("block", scale_dtype="bf16")).held[0]
    f32 = ranks("Qwen3-30B-A3B", Mesh(), WantedRecipe("block", scale_dtype="f32")).held[0]
    assert bf16 == f32


def test_stages_have_their_own_tensors() -> None:
    held = ranks("Llama-3-8B", Mesh(pp=2)).held
    assert len(held) == 2
    assert sum(w.nbytes for w in held) == applied("Llama-3-8B", WantedRecipe("block")).total.nbytes
    assert held[1].nbytes - held[0].nbytes == 2 * 4096  # the last norm


def test_a_tied_embedding_is_on_both_ends() -> None:
    total = applied("Qwen3-0.6B", WantedRecipe("block")).total.nbytes
    held = ranks("Qwen3-0.6B", Mesh(pp=2)).held
    assert sum(w.nbytes for w in held) == total + 2 * 151_936 * 1024


def test_experts_are_shared_out() -> None:
    one = ranks("Qwen3-30B-A3B", Mesh()).held[0]
    for mesh in (Mesh(tp=2, etp=2), Mesh(tp=1, ep=8)):
        held = ranks("Qwen3-30B-A3B", mesh).held
        assert {w.experts for w in held} == {one.experts // mesh.ep // mesh.etp}
    assert {w.dense for w in ranks("Qwen3-30B-A3B", Mesh(tp=1, ep=8)).held} == {one.dense}


def test_packed_experts_of_gpt_oss() -> None:
    wanted = WantedRecipe("as-is")
    held = ranks("gpt-oss-20b", Mesh(tp=2, etp=2), wanted).held
    experts = 24 * 32 * (5760 * 2880 + 2880 * 2880) * 17 // 32  # 4 bits, and a byte for 32 of them
    biases = 24 * 32 * (5760 + 2880) * 2
    down = 24 * 32 * 2880 * 2  # held whole
    assert {w.experts for w in held} == {experts // 2 + (biases - down) // 2 + down}


# -- keys and values


ONE = Mesh()


def kv(
    name: str, dtype: str = "bf16", mesh: Mesh = ONE, *, tokens: int = 0, batch: int = 1, length: int = 0
) -> KvCache:
    return cache_of(model(name), dtype, mesh, tokens=tokens, batch=batch, length=length)


@pytest.mark.parametrize(
    ("name", "dtype", "size"),
    [
        ("Llama-3-8B", "bf16", 131_072),
        ("Llama-3-70B", "bf16", 327_680),
        ("Qwen3-30B-A3B", "bf16", 98_304),
        ("Mixtral-8x7B", "bf16", 131_072),
        ("Qwen3-8B", "bf16", 147_456),
        ("Qwen3-8B", "fp8", 147_456 // 2),
        ("DeepSeek-V3", "bf16", 70_272),
        ("DeepSeek-V3", "fp8", 35_136),
        ("DeepSeek-V3", "fp8_ds_mla", 40_016),
    ],
)
def test_bytes_of_a_token(name: str, dtype: str, size: int) -> None:
    assert kv(name, dtype).per_token == size


def test_heads_are_shared_out_and_latents_are_not() -> None:
    assert kv("Llama-3-8B", mesh=tp(8)).per_token == 131_072 // 8
    assert kv("Llama-3-8B", mesh=tp(32)).per_token == 131_072 // 8  # no rank has less than a head
    assert kv("DeepSeek-V3", mesh=tp(8)).per_token == 70_272


def test_a_stage_keeps_its_own_layers() -> None:
    found = kv("Llama-3-8B", mesh=Mesh(pp=4), tokens=100, batch=3)
    assert found.stages == ((8, 0),) * 4
    assert found.used(0) * 4 == 131_072 * 300


def test_windows_are_full_at_some_point_and_engines_reserve_more() -> None:
    found = kv("gpt-oss-20b", tokens=1000, batch=2, length=4096)
    layer = 2 * 8 * 64 * 2
    assert (found.stages, found.window) == (((12, 12),), 128)
    assert found.used(0) == 2 * 12 * layer * (1000 + 128)
    assert found.reserved(0) == found.needed(0) == 2 * 24 * layer * 4096
    assert kv("gpt-oss-20b", tokens=100).used(0) == 24 * layer * 100
    assert kv("gpt-oss-20b", tokens=1000).needed(0) == 12 * layer * 1128


@pytest.mark.parametrize(
    ("model_type", "fields", "stages"),
    [
        ("llama", {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}, (1, 1)),
        ("mistral", {"sliding_window": 8}, (0, 2)),
        ("mistral", {"sliding_window": None}, (2, 0)),
        ("llama", {"sliding_window": 8, "use_sliding_window": False}, (2, 0)),
        ("qwen2", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}, (1, 1)),
        ("gemma2", {"sliding_window": 8}, (1, 1)),
        ("gemma3_text", {"sliding_window": 8, "sliding_window_pattern": 2}, (1, 1)),
        ("cohere2", {"sliding_window": 8, "num_hidden_layers": 8}, (2, 6)),
        ("olmo3", {"sliding_window": 8, "num_hidden_layers": 8}, (2, 6)),
        ("exaone4", {"sliding_window": 8, "num_hidden_layers": 8, "sliding_window_pattern": "LLLG"}, (2, 6)),
    ],
)
def test_what_layers_keep(model_type: str, fields: dict[str, Any], stages: object) -> None:
    config = small(model_type=model_type, architectures=[], **fields)
    found = cache_of(model_of(config), "bf16", Mesh(), tokens=10, batch=1, length=0)
    assert found.stages == (stages,)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"sliding_window": 8}, "does not say what kind of attention each layer has"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "1 layer of kind `linear_attention`, of whose state"),
        ({"layer_types": ["full_attention", "cross_attention"]}, "1 layer of kind `cross_attention`"),
        ({"full_attention_interval": 2}, "`full_attention_interval`, of which the family knows nothing"),
        ({"attn_type_list": [0, 1]}, "`attn_type_list`, of which the family knows nothing"),
        ({"mamba_d_state": 16}, r"some layers keep a state \(`mamba_d_state`\)"),
        ({"global_head_dim": 128}, "`global_head_dim`, of which the family knows nothing"),
        ({"num_kv_shared_layers": 1}, "`num_kv_shared_layers`"),
    ],
)
def test_what_layers_keep_is_not_guessed(fields: dict[str, Any], why: str) -> None:
    """What is not counted could make a model fit that does not."""
    with pytest.raises(UnsupportedError, match=why) as found:
        cache_of(model_of(small(**fields)), "bf16", Mesh(), tokens=10, batch=1, length=0)
    assert "drop --kv" in str(found.value.hint)


def test_states_do_not_grow() -> None:
    """Jamba: of 8 layers 7 have a state, of 512 x 4 elements in BF16 and 512 x 16 in F32."""
    jamba = {"model_type": "jamba", "architectures": ["JambaForCausalLM"], "num_hidden_layers": 8, "num_experts": 2}
    made = model_of(small(**jamba))
    state = 512 * 4 * 2 + 512 * 16 * 4
    found = cache_of(made, "bf16", Mesh(), tokens=10, batch=3, length=0)
    assert found.kinds == {"linear_attention": 7, "full_attention": 1}
    for tokens in (10, 1000):
        found = cache_of(made, "bf16", Mesh(), tokens=tokens, batch=3, length=0)
        assert (found.layers, found.state_layers, found.per_sequence) == (1, 7, 7 * state)
        assert found.used(0) == 3 * (7 * state + tokens * 2 * 2 * 64 * 2)
    fp8 = cache_of(made, "fp8", Mesh(pp=2), tokens=10, batch=1, length=0)
    assert [fp8.used(0), fp8.used(1)] == [4 * state, 3 * state + 10 * 2 * 2 * 64]
    assert cache_of(made, "bf16", tp(2), tokens=10, batch=1, length=0).per_sequence == 7 * state // 2


def test_groups_of_mamba_are_shared_out_as_heads_are() -> None:
    """Bamba with one group: every rank has its B and C, and its share of the heads."""
    bamba = {
        "model_type": "bamba", "architectures": ["BambaForCausalLM"], "attn_layer_indices": [1], "mamba_n_heads": 8,
        "mamba_d_state": 16, "mamba_d_conv": 4,
    }  # fmt: skip
    made = model_of(small(**bamba))
    for n in (1, 2, 4):
        found = cache_of(made, "bf16", tp(n), tokens=10, batch=1, length=0)
        assert found.per_sequence == 512 // n * 4 * 2 + 2 * 16 * 4 * 2 + 512 // n * 16 * 4


def test_the_keys_of_an_indexer_are_counted() -> None:
    """DeepSeek V3.2: 128 numbers a token and layer, in FP8 with a scale."""
    config = CONFIGS["DeepSeek-V3"] | {
        "model_type": "deepseek_v32", "architectures": ["DeepseekV32ForCausalLM"], "index_head_dim": 128,
        "index_n_heads": 64, "index_topk": 2048,
    }  # fmt: skip
    made = model_of(config)
    for dtype, size in (("bf16", 1152 + 256), ("fp8", 576 + 132), ("fp8_ds_mla", 656 + 132)):
        assert cache_of(made, dtype, Mesh(), tokens=1, batch=1, length=0).per_token == 61 * size


def test_the_family_knows_how_many_heads_have_keys() -> None:
    """Falcon 7B: one key and value of 64 in each of 32 layers, which config.json calls `multi_query`."""
    config = {
        "architectures": ["FalconForCausalLM"],
        "model_type": "falcon",
        "hidden_size": 4544,
        "num_hidden_layers": 32,
        "num_attention_heads": 71,
        "vocab_size": 65024,
        "multi_query": True,
        "new_decoder_architecture": False,
        "parallel_attn": True,
        "bias": False,
        "alibi": False,
    }
    assert cache_of(model_of(config), "bf16", Mesh(), tokens=1, batch=1, length=0).per_token == 2 * 64 * 2 * 32


def test_layers_that_differ() -> None:
    each = 64 * 2  # a head's key or value, in BF16
    for fields, size in (
        ({"per_layer_config": {"1": {"num_key_value_heads": 1}}}, 4 * each + 2 * each),
        ({"per_layer_config": {"1": {"head_dim": 32}}}, 4 * each + 2 * each),
        ({"per_layer_config": {"1": {"intermediate_size": 8}}}, 8 * each),
        ({"v_head_dim": 32}, 6 * each),
        ({"v_head_dim": 64}, 8 * each),
    ):
        found = cache_of(model_of(small(**fields)), "bf16", Mesh(), tokens=10, batch=1, length=0)
        assert found.per_token == size
        assert found.used(0) == 10 * found.per_token


def test_caches_that_cannot_be() -> None:
    with pytest.raises(UsageError, match="no latent attention"):
        kv("Llama-3-8B", "fp8_ds_mla")
    with pytest.raises(UsageError, match="less than --tokens"):
        kv("Llama-3-8B", tokens=10, length=5)
    with pytest.raises(UsageError, match="unknown --kv"):
        kv("Llama-3-8B", "int4")


# -- training


def training(recipe: str, **said: Any) -> TrainingSetup:
    options: dict[str, Any] = {
        "zero": 1,
        "dp": 8,
        "gradient": "fp32",
        "master": "fp32",
        "moment": "fp32",
        "transposed": False,
    } | said
    return training_of(ranks("Llama-3-8B", Mesh(), WantedRecipe(recipe)).held, Mesh(), **options)


@pytest.mark.parametrize(
    ("recipe", "said", "gb"),
    [
        ("bf16", {"zero": 0}, 144.545),
        ("bf16", {"zero": 1}, 60.227),
        ("bf16", {"zero": 2}, 32.121),
        ("bf16", {"zero": 3}, 18.068),
        ("block", {}, 53.249),
        ("block", {"transposed": True}, 60.230),
        ("block", {"gradient": "bf16", "moment": "bf16"}, 33.174),
    ],
)
def test_training_state(recipe: str, said: dict[str, Any], gb: float) -> None:
    found = training(recipe, **said)
    assert round(found.held[0].nbytes / 1e9, 3) == gb


def test_megatrons_bytes_a_parameter() -> None:
    n = 8_030_261_248
    assert training("bf16", zero=0).held[0].nbytes == 18 * n
    assert training("bf16").held[0].nbytes == 6 * n + 12 * n // 8
    assert training("bf16", master="none").held[0].masters == 0


def test_experts_have_fewer_copies() -> None:
    mesh = Mesh(tp=2, ep=4)
    held = ranks("Qwen3-30B-A3B", mesh, WantedRecipe("bf16")).held
    found = training_of(held, mesh, zero=1, dp=8, gradient="fp32", master="fp32", moment="fp32", transposed=False)
    assert found.expert_dp == 2 * 8 // 4
    w = held[0]
    assert found.held[0].masters == w.parameters * 4 // 8 + w.expert_parameters * 4 // 4
    with pytest.raises(UsageError, match="not a multiple"):
        training_of(held, mesh, zero=1, dp=1, gradient="fp32", master="fp32", moment="fp32", transposed=False)


@pytest.mark.parametrize("said", [{"gradient": "fp16"}, {"master": "bf16"}, {"moment": "fp8"}])
def test_dtypes_that_training_does_not_have(said: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="is "):
        training("bf16", **said)
