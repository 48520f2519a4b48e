"""Names of trainers and wrappers: torchtitan's and Meta's are told by themselves, prefixes are left out."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from ckpttool.errors import ConflictError
from ckpttool.formats.torch.prefixes import strip_prefixes
from ckpttool.layout.family import load_family
from ckpttool.layout.names import samples
from tests.helpers.command import ckpttool as command
from tests.helpers.command import refused, reshard
from tests.helpers.families import MODELS, A, D, K
from tests.helpers.tensorfile import Raw, Tensors, read, write
from tests.helpers.tiny_names import all_lists

TITAN = {
    "model.embed_tokens": "tok_embeddings",
    "self_attn.q_proj": "attention.qkv_linear.wq",
    "self_attn.k_proj": "attention.qkv_linear.wk",
    "self_attn.v_proj": "attention.qkv_linear.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.norm": "norm",
    "model.layers": "layers",
}
META = {**TITAN, "lm_head": "output", **{f"self_attn.{c}_proj": f"attention.w{c}" for c in "qkv"}}
LLAMA = MODELS["llama"]


def trained(spelling: dict[str, str], prefix: str = "") -> Tensors:
    """The model as a trainer holds it: with its names, and rotary pairs side by side."""
    out: Tensors = {}
    for published, raw in LLAMA.tensors().items():
        name, bits = published, raw.bits
        for part, heads in (("q_proj", A), ("k_proj", K)):
            if part in name:
                bits = bits.reshape(heads, 2, D // 2, *bits.shape[1:]).swapaxes(1, 2).reshape(bits.shape)
        for old, new in spelling.items():
            name = name.replace(old + ".", new + ".")
        if not name.endswith("inv_freq"):
            out[prefix + name] = Raw(raw.dtype, bits)
    return out


def saved(tensors: Tensors, folder: Path, config: dict[str, object] | None = LLAMA.config) -> Path:
    """A file of torch.save with these tensors, and config.json beside it."""
    write(folder / "flat/model.safetensors", tensors)
    reshard(folder / "flat", folder / "src", "--to", "torch-bin")
    if config is not None:
        (folder / "src/config.json").write_text(json.dumps(config))
    return folder / "src"


def equal(got: Tensors, want: Tensors) -> None:
    assert got.keys() == want.keys()
    for name, raw in want.items():
        assert got[name].dtype == raw.dtype
        np.testing.assert_array_equal(got[name].bits, raw.bits, err_msg=name)


@pytest.mark.product
@pytest.mark.parametrize("spelling", [TITAN, META], ids=["torchtitan", "meta"])
@pytest.mark.parametrize("prefix", ["", "app.model.", "module._orig_mod."])
def test_a_trainers_llama(spelling: dict[str, str], prefix: str, tmp_path: Path) -> None:
    """Names, and the order of rows that rotary embeddings turn, both told from the names."""
    src = saved(trained(spelling, prefix), tmp_path)
    done = reshard(src, tmp_path / "out", "--to", "hf", "--verify")
    assert ("left out of the names: " in done.err) == bool(prefix)
    assert f"the tensors have the names of {'torchtitan' if spelling is TITAN else 'meta'}\n" in done.err
    want = {n: t for n, t in LLAMA.tensors().items() if not n.endswith("inv_freq")}
    equal(read(tmp_path / "out/model.safetensors"), want)
    # Cut over ranks it is what the published model is when it is cut.
    reshard(src, tmp_path / "cut", "--to", "ranks", "--tp-out", 4)
    write(tmp_path / "hf/model.safetensors", want)
    (tmp_path / "hf/config.json").write_text(json.dumps(LLAMA.config))
    reshard(tmp_path / "hf", tmp_path / "want", "--to", "ranks", "--tp-out", 4)
    for a in sorted((tmp_path / "want").glob("*.safetensors")):
        equal(read(tmp_path / "cut" / a.name), read(a))


def test_derived_tensors_of_a_trainer_are_left_out(tmp_path: Path) -> None:
    tensors = trained(META) | {"rope.freqs": Raw("F32", np.arange(5, dtype="<u4"))}
    done = reshard(saved(tensors, tmp_path), tmp_path / "out", "--to", "hf")
    assert "left out, which the target does not store: rope.freqs" in done.err
    assert "rope.freqs" not in read(tmp_path / "out/model.safetensors")


def test_names_that_no_naming_explains_stay(tmp_path: Path) -> None:
    """One tensor that torchtitan does not have, or no config: nothing is guessed."""
    tensors = trained(TITAN)
    odd = tensors | {"layers.0.attention.gate.weight": Raw("F32", np.arange(4, dtype="<u4"))}
    for i, (given, config) in enumerate(((odd, LLAMA.config), (tensors, None))):
        src = saved(given, tmp_path / str(i), config)
        reshard(src, tmp_path / f"out{i}", "--to", "hf")
        equal(read(tmp_path / f"out{i}/model.safetensors"), given)


NAMES = {
    "module.": ["module.model.embed_tokens.weight", "module.lm_head.weight"],
    "module.module.": ["module.module.fc.weight", "module.module.fc.bias"],
    "_orig_mod.": ["_orig_mod.model.embed_tokens.weight", "_orig_mod.model.layers.0._orig_mod.mlp.up_proj.weight"],
    "_fsdp_wrapped_module.": [
        "_fsdp_wrapped_module.model.embed_tokens.weight",
        "_fsdp_wrapped_module.model.layers.3._fsdp_wrapped_module._checkpoint_wrapped_module.mlp.up_proj.weight",
    ],
    "model.": ["model.model.embed_tokens.weight", "model.lm_head.weight"],
    "policy.": ["policy.model.embed_tokens.weight", "policy.model.norm.weight"],
    "app.model.": ["app.model.tok_embeddings.weight", "app.model.layers.0.attention.wq.weight"],
    "base_model.model.": ["base_model.model.transformer.wte.weight", "base_model.model.transformer.h.0.ln_1.weight"],
    "_forward_module.": ["_forward_module.gpt_neox.embed_in.weight", "_forward_module.embed_out.weight"],
}


@pytest.mark.parametrize("prefix", NAMES)
def test_prefixes(prefix: str) -> None:
    mapping, note = strip_prefixes(NAMES[prefix])
    wrappers = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
    for old, new in mapping.items():
        want = old.removeprefix(prefix)
        for wrapper in wrappers:
            want = want.replace(wrapper, "")
        assert new == want
        assert new.split(".")[0] in ("model", "lm_head", "fc", "tok_embeddings", "layers", "transformer", "gpt_neox",
                                     "embed_out")  # fmt: skip
    assert f"`{prefix}`" in note


STAY = [
    ["model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "model.norm.weight"],
    ["embed_tokens.weight", "layers.0.mlp.up_proj.weight"],
    ["tok_embeddings.weight"],
    ["model.decoder.embed_tokens.weight", "model.decoder.layers.0.fc1.weight"],  # OPT, and decoders alone
    ["decoder.embed_tokens.weight", "decoder.layers.0.fc1.weight"],
    ["biogpt.embed_tokens.weight", "biogpt.layers.0.fc1.weight"],
    ["transformer.embedding.word_embeddings.weight", "transformer.output_layer.weight"],  # ChatGLM
    ["model.language_model.embed_tokens.weight", "model.language_model.layers.0.mlp.up_proj.weight"],
    ["wte.weight", "h.0.ln_1.weight"],
    ["model.visual.patch_embed.weight", "model.language_model.layers.0.mlp.up_proj.weight"],
    ["policy.model.embed_tokens.weight", "critic.model.embed_tokens.weight"],
    ["module.a.weight", "b.weight"],
    ["encoder.module.weight", "encoder.module.bias"],
    ["weight"],
    [],
    ["base_model.model.model.embed_tokens.weight", "base_model.model.model.layers.0.q_proj.lora_A.default.weight"],
    ["base_model.model.model.embed_tokens.weight", "base_model.model.model.layers.0.q_proj.base_layer.weight"],
]


@pytest.mark.parametrize("names", STAY)
def test_what_is_no_prefix_stays(names: list[str]) -> None:
    assert strip_prefixes(names) == ({n: n for n in names}, "")


def test_two_names_never_become_one(tmp_path: Path) -> None:
    with pytest.raises(ConflictError, match=r"are both called `model\.norm\.weight`"):
        strip_prefixes(["model.norm.weight", "model._orig_mod.norm.weight"])
    one = Raw("F32", np.arange(4, dtype="<u4"))
    src = saved({"a.weight": one, "_orig_mod.a.weight": one}, tmp_path, None)
    error = refused(src, tmp_path / "out")
    assert "without their prefixes `_orig_mod.a.weight` and `a.weight` are both called `a.weight`" in error


def test_inspect_shows_names_without_prefixes(tmp_path: Path) -> None:
    src = saved({"module.a.weight": Raw("F32", np.arange(4, dtype="<u4"))}, tmp_path, None)
    done = command("inspect", src, "--list")
    assert done.code == 0, done.err
    assert "left out of the names: `module.`" in done.out + done.err
    assert "module.a.weight" not in done.out
    assert "a.weight" in done.out


def test_the_embedding_of_every_family_is_known() -> None:
    """By it a trainer's prefix is told, so every name that a family or a trainer's naming gives it has to be."""
    for listed in sorted({family for family, _ in all_lists()}):
        family = load_family(listed, {})
        (pattern,) = (p for p, rule in family.spec.first.items() if rule == "vocab")
        for published in samples(pattern.replace("*", "weight")):
            for naming in ("", *family.spec.trainer_namings):
                name = published
                for op in family.statements(naming) if naming else ():
                    name = op.forward(name) if hasattr(op, "forward") else name
                # The text model alone has no such word in front; beside a tower it is not in front of all names.
                tower = ["app.vision_model.class_embedding"] if name.startswith("language_model.") else []
                want = f"app.{name}" if tower else name
                assert strip_prefixes([f"app.{name}", *tower])[0][f"app.{name}"] == want


@pytest.mark.parametrize("form", ["torch-bin", "dcp"])
def test_a_model_for_torchtitan(form: str, tmp_path: Path) -> None:
    want = trained(TITAN)
    published = {n: t for n, t in LLAMA.tensors().items() if not n.endswith("inv_freq")}
    write(tmp_path / "hf/model.safetensors", published)
    (tmp_path / "hf/config.json").write_text(json.dumps(LLAMA.config))
    reshard(tmp_path / "hf", tmp_path / "out", "--to", form, "--target", "torchtitan", "--verify")
    (tmp_path / "out/config.json").unlink(missing_ok=True)  # without it names are what they are
    reshard(tmp_path / "out", tmp_path / "raw", "--to", "hf")
    equal(read(tmp_path / "raw/model.safetensors"), want)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--to", "dcp", "--target", "torchtitan-0.2"), "family `llama` has no torchtitan-0.2 naming"),
        (("--to", "universal", "--target", "torchtitan"), "--target `torchtitan` is not known"),
        (("--to", "dcp", "--target", "llama2"), "--target `llama2` is not known"),
        (("--to", "vllm", "--target", "transformers"), "is not known for --to vllm"),
    ],
)
def test_names_that_cannot_be_asked_for(options: tuple[str, ...], says: str, tmp_path: Path) -> None:
    write(tmp_path / "hf/model.safetensors", LLAMA.tensors())
    (tmp_path / "hf/config.json").write_text(json.dumps(LLAMA.config))
    done = command("reshard", tmp_path / "hf", tmp_path / "out", *options)
    assert done.code in (1, 2)
    assert says in done.err


def test_experts_as_transformers_has_them_in_memory(tmp_path: Path) -> None:
    """Written by --target; they stay so among saves of trainers, and are published one by one."""
    model = MODELS["qwen3_moe"]
    memory = MODELS["qwen3_moe@transformers"]
    write(tmp_path / "hf/model.safetensors", model.tensors())
    (tmp_path / "hf/config.json").write_text(json.dumps(model.config))
    reshard(tmp_path / "hf", tmp_path / "run", "--to", "dcp", "--target", "transformers", "--verify")
    (tmp_path / "run/config.json").write_text(json.dumps(model.config))
    reshard(tmp_path / "run", tmp_path / "kept", "--to", "dcp", "--sharding-out", 2)
    reshard(tmp_path / "kept", tmp_path / "raw", "--to", "hf", "--family", "none")
    found = read(tmp_path / "raw/model.safetensors")
    assert {n: t.bits.shape for n, t in found.items()} == memory.shapes
    at = "model.layers.1.mlp.experts."
    for e, expert in enumerate(found[f"{at}gate_up_proj"].bits):
        gate, up = np.split(expert, 2)
        np.testing.assert_array_equal(gate, model.tensors()[f"{at}{e}.gate_proj.weight"].bits)
        np.testing.assert_array_equal(up, model.tensors()[f"{at}{e}.up_proj.weight"].bits)
    (tmp_path / "kept/config.json").write_text(json.dumps(model.config))
    reshard(tmp_path / "kept", tmp_path / "published", "--to", "hf")
    equal(read(tmp_path / "published/model.safetensors"), model.tensors())


@pytest.mark.parametrize("fmt", ["torch-bin", "dcp", "universal"])
def test_names_that_look_wrapped_are_verified(fmt: str, tmp_path: Path) -> None:
    """ByteCheckpoint's merge keeps DDP's `module.`: what is written is compared under the names that it has."""
    src = Path(__file__).parents[2] / "fixtures/bytecheckpoint/ddp2"
    assert "verified" in reshard(src, tmp_path / "out", "--to", fmt, "--verify").out


@pytest.mark.product
@pytest.mark.parametrize("prefix", ["app.model.", "module.", "_orig_mod.", "model."])
@pytest.mark.parametrize("form", ["torch-bin", "dcp"])
def test_prefixes_that_are_asked_for_are_verified(form: str, prefix: str, tmp_path: Path) -> None:
    """--rename puts in front what a reader would leave out: the output is compared under the names it was given."""
    write(tmp_path / "hf/model.safetensors", LLAMA.tensors())
    (tmp_path / "hf/config.json").write_text(json.dumps(LLAMA.config))
    done = reshard(tmp_path / "hf", tmp_path / "out", "--to", form, "--rename", f"*={prefix}*", "--verify")
    assert "verified" in done.out
    listed = command("inspect", tmp_path / "out", "--list").out
    assert "model.embed_tokens.weight" in listed
