"""Adapters against the formulas of the libraries that write them, worked out in float64 on the factors themselves."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpttool.adapters import Adapter, Changes, adapt, combine, read_adapter
from ckpttool.errors import CkptError, ConflictError, CorruptError, IncompleteError, UnsupportedError, UsageError
from ckpttool.planning.relate import DerivedTensor
from tests.helpers import tensorfile
from tests.helpers.arrays import materialise
from tests.helpers.tensorfile import Raw

Array = np.ndarray[Any, np.dtype[np.float32]]
Shapes = Mapping[str, tuple[int, ...]]

LORA: dict[str, Any] = {"peft_type": "LORA", "r": 4, "lora_alpha": 6}
PADDLE: dict[str, Any] = {"r": 4, "lora_alpha": 6, "dtype": "bfloat16"}
FACTOR = 1.5
P = "base_model.model."
Q = "model.layers.0.self_attn.q_proj"


def arrays(shapes: Shapes, seed: int = 0) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    return {name: np.asarray(rng.standard_normal(shape), np.float32) for name, shape in shapes.items()}


def save(path: Path, values: Mapping[str, Array]) -> Path:
    return tensorfile.write(path, {n: Raw("F32", v.view(np.uint32)) for n, v in values.items()})


def peft(folder: Path, values: Mapping[str, Array], **config: Any) -> Adapter:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(LORA | config))
    save(folder / "adapter_model.safetensors", values)
    return read_adapter(folder)


def paddle(folder: Path, values: Mapping[str, Array], **config: Any) -> Adapter:
    folder.mkdir(exist_ok=True)
    (folder / "lora_config.json").write_text(json.dumps(PADDLE | config))
    save(folder / "peft_model-00001-of-00001.safetensors", values)
    return read_adapter(folder)


def values_of(view: DerivedTensor, values: Mapping[str, Array]) -> Array:
    """The elements of a view of an adapter's tensors."""
    sources = {p.source.key.name: p.source.shape for p in view.parts}
    places = materialise(view, {n: np.arange(np.prod(s)).reshape(s) for n, s in sources.items()})
    (name,) = sources
    found: Array = values[name].reshape(-1)[places]
    return found


def apply(changes: Changes, base: Mapping[str, Array], values: Mapping[str, Array]) -> dict[str, Any]:
    """The base with an adapter, in float64."""
    out: dict[str, Any] = {}
    for name, weight in base.items():
        change = changes.table.get(name)
        out[name] = np.asarray(weight, np.float64)
        if change is None:
            continue
        if change.whole is not None:
            assert change.whole.shape == weight.shape
            out[name] = np.asarray(values_of(change.whole, values), np.float64)
        for t in change.terms:
            up, down = (values_of(v, values).astype(np.float64) for v in (t.up, t.down))
            whole = out[name].shape
            matrix = out[name] if len(whole) == 2 else out[name].reshape(-1, down.shape[1])
            box = matrix[t.row : t.row + up.shape[0], t.column : t.column + down.shape[1]]
            assert box.shape == (up.shape[0], down.shape[1])
            box += t.factor * up @ down
            out[name] = matrix.reshape(whole)
    return out


def check(changes: Changes, base: Mapping[str, Array], values: Mapping[str, Array], **added: Any) -> None:
    """The named tensors become base + added and nothing else changes; ``__`` in a keyword stands for a dot."""
    wanted = {name.replace("__", "."): value for name, value in added.items()}
    assert set(changes.table) == set(wanted)
    found = apply(changes, base, values)
    for name, weight in base.items():
        np.testing.assert_allclose(found[name], weight + wanted.get(name, 0.0), rtol=1e-12, atol=1e-12, err_msg=name)


def shapes_of(base: Mapping[str, Array]) -> dict[str, tuple[int, ...]]:
    return {n: v.shape for n, v in base.items()}


def product(b: Array, a: Array, factor: float = FACTOR) -> Any:
    return factor * (b.astype(np.float64) @ a.astype(np.float64))


# -- PEFT


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (f"{P}{Q}.lora_A.weight", f"{P}{Q}.lora_B.weight"),
        (f"{P}{Q}.lora_A.default.weight", f"{P}{Q}.lora_B.default.weight"),
        (f"{Q}.lora_A.weight", f"{Q}.lora_B.weight"),
    ],
)
def test_linear(tmp_path: Path, a: str, b: str) -> None:
    base = arrays({f"{Q}.weight": (8, 6), "model.norm.weight": (6,)})
    values = arrays({a: (4, 6), b: (8, 4)}, 1)
    changes = adapt(peft(tmp_path, values), shapes_of(base))
    check(changes, base, values, **{f"{Q}.weight": product(values[b], values[a])})
    assert changes.notes == ()


def pair(name: str, out: int, width: int, rank: int = 4) -> dict[str, tuple[int, ...]]:
    return {f"{P}{name}.lora_A.weight": (rank, width), f"{P}{name}.lora_B.weight": (out, rank)}


def of(values: Mapping[str, Array], name: str, factor: float = FACTOR) -> Any:
    return product(values[f"{P}{name}.lora_B.weight"], values[f"{P}{name}.lora_A.weight"], factor)


def test_rank_stabilised(tmp_path: Path) -> None:
    base, values = arrays({"q.weight": (8, 6)}), arrays(pair("q", 8, 6), 1)
    changes = adapt(peft(tmp_path, values, use_rslora=True), shapes_of(base))
    check(changes, base, values, **{"q.weight": of(values, "q", 6 / 4**0.5)})


def test_patterns_take_the_first_that_matches_the_end(tmp_path: Path) -> None:
    names = ["h.0.q", "h.1.q", "h.1.xq", "h.1.k", "h.2.k"]
    ranks = {"h.0.q": 4, "h.1.q": 2, "h.1.xq": 4, "h.1.k": 3, "h.2.k": 8}
    alphas = {"h.0.q": 10.0, "h.1.q": 10.0, "h.1.xq": 6.0, "h.1.k": 6.0, "h.2.k": 1.0}
    base = arrays({f"{n}.weight": (8, 6) for n in names})
    values = arrays({k: v for n in names for k, v in pair(n, 8, 6, ranks[n]).items()}, 1)
    adapter = peft(
        tmp_path,
        values,
        rank_pattern={r"h\.1\.q": 2, "^h.2.k": 8, "k": 3, r"h\.1": 99, "[[q]z": 7},
        alpha_pattern={"q": 10, "h.2.k": 1.0},
    )
    wanted = {f"{n}.weight": of(values, n, alphas[n] / ranks[n]) for n in names}
    check(adapt(adapter, shapes_of(base)), base, values, **wanted)


@pytest.mark.parametrize("end", ["", ".default"])
def test_embedding(tmp_path: Path, end: str) -> None:
    base = arrays({"model.embed_tokens.weight": (10, 6)})
    a, b = f"{P}model.embed_tokens.lora_embedding_A{end}", f"{P}model.embed_tokens.lora_embedding_B{end}"
    values = arrays({a: (4, 10), b: (6, 4)}, 1)
    # Nobody stores embeddings transposed, so who wrote the base does not matter.
    for in_out in (None, lambda _: True, lambda _: False):
        changes = adapt(peft(tmp_path, values), shapes_of(base), in_out=in_out)
        check(changes, base, values, **{"model.embed_tokens.weight": product(values[b], values[a]).T})
    with pytest.raises(ConflictError, match=r"change an embedding of \[10, 6\].*is \[6, 10\]"):
        adapt(peft(tmp_path, values), {"model.embed_tokens.weight": (6, 10)})


def test_fan_in_fan_out(tmp_path: Path) -> None:
    """GPT-2's layers are [in, out]; a plain linear layer beside them is not, whatever the one flag says."""
    base = arrays({"h.0.c_attn.weight": (6, 18), "h.0.c_proj.weight": (6, 6)})
    values = arrays(pair("h.0.c_attn", 18, 6) | pair("h.0.c_proj", 6, 6), 1)
    adapter = peft(tmp_path / "a", values, fan_in_fan_out=True)
    wanted = {f"{n}.weight": of(values, n).T for n in ("h.0.c_attn", "h.0.c_proj")}
    check(adapt(adapter, shapes_of(base)), base, values, **wanted)

    base |= arrays({"lm_head.weight": (10, 6)})
    values |= arrays(pair("lm_head", 10, 6), 2)
    adapter = peft(tmp_path / "b", values, fan_in_fan_out=True)
    with pytest.raises(UnsupportedError, match=r"c_proj.weight.*fan_in_fan_out.*lm_head"):
        adapt(adapter, shapes_of(base))
    changes = adapt(adapter, shapes_of(base), in_out=lambda name: name != "lm_head.weight")
    check(changes, base, values, **wanted, **{"lm_head.weight": of(values, "lm_head")})
    adapter = peft(tmp_path / "c", {n: v for n, v in values.items() if "c_proj" not in n}, fan_in_fan_out=True)
    del wanted["h.0.c_proj.weight"]
    check(adapt(adapter, shapes_of(base)), base, values, **wanted, **{"lm_head.weight": of(values, "lm_head")})


def test_a_flag_that_is_not_set_is_never_guessed(tmp_path: Path) -> None:
    adapter = peft(tmp_path, arrays(pair("c_attn", 18, 6)))
    with pytest.raises(ConflictError, match=r"6 inputs and 18 outputs; .* is \[6, 18\], \[out, in\]") as e:
        adapt(adapter, {"c_attn.weight": (6, 18)})
    assert e.value.hint == "it would fit if the base stored it as [in, out]"


@pytest.mark.parametrize("shape", [(8, 6, 3, 3), (8, 6, 5)])
def test_convolution(tmp_path: Path, shape: tuple[int, ...]) -> None:
    base = arrays({"c.weight": shape})
    a, b = f"{P}c.lora_A.weight", f"{P}c.lora_B.weight"
    values = arrays({a: (4, *shape[1:]), b: (8, 4, *(1 for _ in shape[2:]))}, 1)
    adapter = peft(tmp_path, values)
    wanted = product(values[b].reshape(8, 4), values[a].reshape(4, -1)).reshape(shape)
    check(adapt(adapter, shapes_of(base)), base, values, **{"c.weight": wanted})
    with pytest.raises(ConflictError, match="change a convolution of"):
        adapt(adapter, {"c.weight": (8, 6)})


def test_tensors_that_were_trained_whole(tmp_path: Path) -> None:
    base = arrays(
        {"lm_head.weight": (10, 6), "e.weight": (10, 6), "q.weight": (8, 6), "q.bias": (8,), "n.weight": (6,)}
    )
    values = arrays(
        {
            f"{P}lm_head.modules_to_save.default.weight": (10, 6),
            f"{P}n.modules_to_save.weight": (6,),
            f"{P}q.bias": (8,),
            f"{P}e.base_layer.weight": (10, 6),
            f"{P}e.lora_embedding_A": (4, 10),
            f"{P}e.lora_embedding_B": (6, 4),
            f"{P}n.original_module.weight": (6,),
        },
        1,
    )
    changes = adapt(peft(tmp_path / "a", values, bias="all"), shapes_of(base))
    whole = {
        "lm_head.weight": f"{P}lm_head.modules_to_save.default.weight",
        "n.weight": f"{P}n.modules_to_save.weight",
        "q.bias": f"{P}q.bias",
        "e.weight": f"{P}e.base_layer.weight",
    }
    wanted: dict[str, Any] = {n: values[t].astype(np.float64) - base[n] for n, t in whole.items()}
    wanted["e.weight"] = (
        wanted["e.weight"] + product(values[f"{P}e.lora_embedding_B"], values[f"{P}e.lora_embedding_A"]).T
    )
    check(changes, base, values, **wanted)
    assert len(changes.notes) == 1
    assert "original_module" in changes.notes[0]
    with pytest.raises(ConflictError, match=r"\[12, 6\] of the adapter replaces `lm_head.weight`, which is \[10, 6\]"):
        adapt(peft(tmp_path / "b", arrays({f"{P}lm_head.weight": (12, 6)})), shapes_of(base))
    with pytest.raises(ConflictError, match=r"both stand for `lm_head.weight`"):
        peft(tmp_path / "c", arrays({f"{P}lm_head.weight": (1,), f"{P}lm_head.modules_to_save.weight": (1,)}))


def test_whole_weights_of_another_librarys_base(tmp_path: Path) -> None:
    """A linear weight is turned where the base is; a matrix of tokens is not."""
    base = arrays({"score.weight": (6, 2), "lm_head.weight": (10, 6)})
    values = arrays({"score.weight": (2, 6), "lm_head.weight": (10, 6)}, 1)
    changes = adapt(peft(tmp_path, values), shapes_of(base), in_out=lambda _: True)
    wanted = {
        "score.weight": values["score.weight"].T.astype(np.float64) - base["score.weight"],
        "lm_head.weight": values["lm_head.weight"].astype(np.float64) - base["lm_head.weight"],
    }
    check(changes, base, values, **wanted)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"peft_type": "LOHA"}, "LOHA"),
        ({"peft_type": None}, "None"),
        ({"use_dora": True}, "use_dora"),
        ({"lora_bias": True}, "lora_bias"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"megatron_config": {"a": 1}}, "megatron_config"),
        ({"init_lora_weights": "pissa_niter_4"}, "pissa_niter_4"),
        ({"init_lora_weights": "loftq", "loftq_config": {"bits": 4}}, "loftq"),
        ({"use_novelty": True}, "use_novelty"),
        ({"novel_config": {"a": 1}}, "novel_config"),
    ],
)
def test_refused_kinds(tmp_path: Path, config: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        peft(tmp_path, arrays(pair("q", 8, 6)), **config)


@pytest.mark.parametrize("start", [True, False, "gaussian", "eva", "orthogonal"])
def test_starts_that_leave_the_base(tmp_path: Path, start: object) -> None:
    peft(tmp_path, arrays(pair("q", 8, 6)), init_lora_weights=start, eva_config={"rho": 2.0}, use_dora=False)


@pytest.mark.parametrize(
    ("shapes", "error", "words"),
    [
        (pair("q", 8, 6) | {f"{P}q.lora_magnitude_vector": (8,)}, UnsupportedError, "lora_magnitude_vector"),
        (pair("q", 8, 6) | {f"{P}q.lora_B.bias": (8,)}, UnsupportedError, "biases of their own"),
        ({f"{P}e.token_adapter.trainable_tokens_delta": (2, 6)}, UnsupportedError, "token_adapter"),
        ({f"{P}q.lora_A.weight": (4, 6)}, IncompleteError, "no lora_B beside it"),
        ({f"{P}q.lora_B.weight": (8, 4)}, IncompleteError, "no lora_A beside it"),
        ({f"{P}q.lora_A": (4, 6), f"{P}q.lora_B": (8, 4)}, UnsupportedError, "nothing that plain LoRA has"),
        ({f"{P}q.lora_A.x.y.weight": (4, 6)}, UnsupportedError, "nothing that plain LoRA has"),
        (pair("q", 8, 6, rank=8), ConflictError, r"\[8, 6\].*\[8, 8\], but the config says rank 4"),
        ({f"{P}q.lora_A.weight": (4,), f"{P}q.lora_B.weight": (8, 4)}, ConflictError, "are not matrices"),
        (pair("q", 8, 6) | {f"{P}q.lora_A.a.weight": (4, 6)}, ConflictError, "one factor twice"),
        ({}, IncompleteError, "has no tensors"),
    ],
)
def test_refused_tensors(tmp_path: Path, shapes: Shapes, error: type[CkptError], words: str) -> None:
    with pytest.raises(error, match=words):
        peft(tmp_path, arrays(shapes))


@pytest.mark.parametrize(
    ("config", "error", "words"),
    [
        ({"r": 0}, ConflictError, "`r` is 0"),
        ({"r": 2.5}, ConflictError, "not a whole number"),
        ({"lora_alpha": "8"}, ConflictError, "`lora_alpha` is '8'"),
        ({"rank_pattern": {"q": True}}, ConflictError, "rank_pattern: q"),
        ({"rank_pattern": {"(": 4}}, CorruptError, "not a regular expression"),
        ({"alpha_pattern": [1]}, CorruptError, "not a table"),
        ({"target_parameters": "x"}, CorruptError, "not a list of names"),
    ],
)
def test_wrong_configs(tmp_path: Path, config: dict[str, Any], error: type[CkptError], words: str) -> None:
    with pytest.raises(error, match=words):
        peft(tmp_path, arrays(pair("q", 8, 6)), **config)


# -- files


def test_shards(tmp_path: Path) -> None:
    base, values = arrays({"q.weight": (8, 6)}), arrays(pair("q", 8, 6), 1)
    (tmp_path / "adapter_config.json").write_text(json.dumps(LORA))
    for i, (name, value) in enumerate(values.items()):
        save(tmp_path / f"adapter_model-0000{i + 1}-of-00002.safetensors", {name: value})
    adapter = read_adapter(tmp_path).shifted(5)
    assert len(adapter.files) == 2
    changes = adapt(adapter, shapes_of(base))
    check(changes, base, values, **{"q.weight": of(values, "q")})
    (term,) = changes.table["q.weight"].terms
    assert [t.parts[0].source.pieces[0].stored.file for t in (term.down, term.up)] == [5, 6]

    (tmp_path / "adapter_model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "gone.safetensors"}})
    )
    with pytest.raises(IncompleteError, match=r"gone.safetensors"):
        read_adapter(tmp_path)
    (tmp_path / "adapter_model.safetensors.index.json").unlink()
    save(tmp_path / "adapter_model-00002-of-00002.safetensors", {next(iter(values)): values[next(iter(values))]})
    with pytest.raises(ConflictError, match="in two files"):
        read_adapter(tmp_path)
    (tmp_path / "adapter_model-00002-of-00002.safetensors").unlink()
    with pytest.raises(IncompleteError, match="there are 1 of 2"):
        read_adapter(tmp_path)


@pytest.mark.parametrize(
    ("names", "error", "words"),
    [
        (["adapter_config.json", "adapter_model.bin"], UnsupportedError, "adapter_model.bin is pickled"),
        (["lora_config.json", "lora_model_state.pdparams"], UnsupportedError, "lora_model_state.pdparams is pickled"),
        (["lora_config.json", "lora_model_state.tp00.pdparams"], UnsupportedError, "is pickled"),
        (["adapter_config.json"], IncompleteError, "no adapter_model.safetensors"),
        (["prefix_config.json"], UnsupportedError, "prefix tuning"),
        (["vera_config.json"], UnsupportedError, "VeRA"),
        (["adapter_config.json", "new_embeddings.safetensors"], UnsupportedError, "new tokens"),
        (["adapter_config.json", "lora_config.json"], ConflictError, "two adapters"),
        (["model.safetensors"], IncompleteError, "no adapter here"),
    ],
)
def test_refused_directories(tmp_path: Path, names: list[str], error: type[CkptError], words: str) -> None:
    for name in names:
        (tmp_path / name).write_text("{}")
    with pytest.raises(error, match=words):
        read_adapter(tmp_path)


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        read_adapter(tmp_path / "no")


def test_quantized_adapters_are_refused(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps(LORA))
    raw = {n: Raw("U16", np.zeros(s, np.uint16)) for n, s in pair("q", 8, 6).items()}
    tensorfile.write(tmp_path / "adapter_model.safetensors", raw)
    with pytest.raises(UnsupportedError, match="is U16: quantized adapters"):
        read_adapter(tmp_path)


# -- names


def test_names_may_begin_otherwise(tmp_path: Path) -> None:
    names = [f"model.layers.{i}.self_attn.q_proj" for i in range(2)]
    base = arrays({f"llama.layers.{i}.self_attn.q_proj.weight": (8, 6) for i in range(3)} | {"lm_head.weight": (9, 6)})
    values = arrays({k: v for n in [*names, "lm_head"] for k, v in pair(n, 9 if n == "lm_head" else 8, 6).items()}, 1)
    changes = adapt(peft(tmp_path, values), shapes_of(base))
    wanted = {f"{n.replace('model.', 'llama.')}.weight": of(values, n) for n in [*names, "lm_head"]}
    check(changes, base, values, **wanted)
    assert changes.notes == ("names that begin with `model.` in the adapter begin with `llama.` in the base",)


def test_every_tensor_must_have_its_place(tmp_path: Path) -> None:
    names = [f"model.layers.{i}.self_attn.q_proj" for i in range(4)]
    adapter = peft(tmp_path, arrays({k: v for n in names for k, v in pair(n, 8, 6).items()}))
    base = {f"model.layers.{i}.self_attn.q_proj.weight": (8, 6) for i in range(2)}
    with pytest.raises(ConflictError, match="2 of the 4 tensors that the adapter changes are not in the base") as e:
        adapt(adapter, base)
    assert any("model.layers.2.self_attn.q_proj.weight" in w and "did you mean" in w for w in e.value.where)
    twice = {f"{start}.layers.{i}.self_attn.q_proj.weight": (8, 6) for i in range(4) for start in ("text", "vision")}
    with pytest.raises(ConflictError, match="more than one place"):
        adapt(adapter, twice)


def test_shapes_must_fit(tmp_path: Path) -> None:
    adapter = peft(tmp_path, arrays(pair("q", 8, 6)))
    for shape in [(8, 7), (9, 6), (8,), (8, 6, 1)]:
        with pytest.raises(ConflictError, match=r"6 inputs and 8 outputs; `q.weight` of the base is"):
            adapt(adapter, {"q.weight": shape})


# -- fused layers


QKV = {"q_proj": 12, "k_proj": 4, "v_proj": 4}


def test_a_fused_adapter_on_parts(tmp_path: Path) -> None:
    base = arrays(
        {f"a.{n}.weight": (size, 6) for n, size in QKV.items()}
        | {"m.gate_proj.weight": (9, 6), "m.up_proj.weight": (9, 6)}
    )
    values = arrays(pair("a.qkv_proj", 20, 6) | pair("m.gate_up_proj", 18, 6), 1)
    adapter = peft(tmp_path, values)
    qkv, gate_up = of(values, "a.qkv_proj"), of(values, "m.gate_up_proj")
    wanted = {
        "a.q_proj.weight": qkv[:12],
        "a.k_proj.weight": qkv[12:16],
        "a.v_proj.weight": qkv[16:],
        "m.gate_proj.weight": gate_up[:9],
        "m.up_proj.weight": gate_up[9:],
    }
    check(adapt(adapter, shapes_of(base)), base, values, **wanted)
    turned = {n: np.ascontiguousarray(v.T) for n, v in base.items()}
    changes = adapt(adapter, shapes_of(turned), in_out=lambda _: True)
    check(changes, turned, values, **{n: v.T for n, v in wanted.items()})
    with pytest.raises(ConflictError, match="has 20 outputs, but the base has"):
        adapt(adapter, shapes_of(base) | {"a.k_proj.weight": (6, 6)})


@pytest.mark.parametrize("chosen", [("q_proj", "k_proj", "v_proj"), ("q_proj", "v_proj"), ("v_proj",), ("k_proj",)])
def test_parts_of_a_fused_base(tmp_path: Path, chosen: tuple[str, ...]) -> None:
    base = arrays({"a.qkv_proj.weight": (20, 6)})
    values = arrays({k: v for n in chosen for k, v in pair(f"a.{n}", QKV[n], 6).items()}, 1)
    wanted = np.zeros((20, 6))
    for n, start in zip(QKV, (0, 12, 16), strict=True):
        if n in chosen:
            wanted[start : start + QKV[n]] = of(values, f"a.{n}")
    changes = adapt(peft(tmp_path, values), shapes_of(base))
    check(changes, base, values, **{"a.qkv_proj.weight": wanted})
    if len(chosen) > 1:
        with pytest.raises(ConflictError, match=r"`a.qkv_proj.weight` of the base has 22"):
            adapt(peft(tmp_path, values), {"a.qkv_proj.weight": (22, 6)})


def test_halves_of_a_fused_base(tmp_path: Path) -> None:
    """Where the base is [in, out] the halves are columns."""
    base = arrays({"m.gate_up_proj.weight": (18, 6)})
    values = arrays(pair("m.gate_proj", 9, 6) | pair("m.up_proj", 9, 6), 1)
    adapter = peft(tmp_path, values)
    wanted = np.concatenate([of(values, "m.gate_proj"), of(values, "m.up_proj")])
    check(adapt(adapter, shapes_of(base)), base, values, **{"m.gate_up_proj.weight": wanted})
    turned = {n: np.ascontiguousarray(v.T) for n, v in base.items()}
    changes = adapt(adapter, shapes_of(turned), in_out=lambda _: True)
    assert [(t.row, t.column) for t in changes.table["m.gate_up_proj.weight"].terms] == [(0, 0), (0, 9)]
    check(changes, turned, values, **{"m.gate_up_proj.weight": wanted.T})
    with pytest.raises(ConflictError, match="of the base has 20"):
        adapt(adapter, {"m.gate_up_proj.weight": (20, 6)})


# -- stacked experts

STACKED = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
E, R, H, N = 3, 4, 6, 5
X = "l.0.mlp.experts"


def moe(module: str, out: int, width: int) -> dict[str, tuple[int, ...]]:
    return {f"{P}{module}.lora_A.weight": (E * R, width), f"{P}{module}.lora_B.weight": (out, R * E)}


def per_expert(values: Mapping[str, Array], module: str) -> Any:
    """[E, out, in], by the einsum of PEFT's ParamWrapper."""
    a, b = values[f"{P}{module}.lora_A.weight"], values[f"{P}{module}.lora_B.weight"]
    a64, b64 = a.astype(np.float64).reshape(E, R, -1), b.astype(np.float64).reshape(b.shape[0], R, E)
    return FACTOR * np.einsum("ore,eri->eoi", b64, a64)


@pytest.mark.parametrize("turned", [False, True])
def test_stacked_experts(tmp_path: Path, turned: bool) -> None:
    """Two parameters of one module are nested, and only shapes say which is which."""
    values = arrays(moe(f"{X}.base_layer", 2 * N, H) | moe(X, H, N), 1)
    adapter = peft(tmp_path, values, **STACKED)
    wanted = {
        f"{X}.gate_up_proj": per_expert(values, f"{X}.base_layer"),
        f"{X}.down_proj": per_expert(values, X),
    }
    if turned:
        wanted = {n: v.transpose(0, 2, 1) for n, v in wanted.items()}
    base = arrays({n: v.shape for n, v in wanted.items()})
    check(adapt(adapter, shapes_of(base)), base, values, **wanted)
    with pytest.raises(ConflictError, match="for 3 experts"):
        adapt(adapter, {n: (4, *s[1:]) for n, s in shapes_of(base).items()})


def test_stacked_experts_on_a_base_that_has_them_apart(tmp_path: Path) -> None:
    values = arrays(moe(f"{X}.base_layer", 2 * N, H) | moe(X, H, N), 1)
    adapter = peft(tmp_path, values, **STACKED)
    gate_up, down = per_expert(values, f"{X}.base_layer"), per_expert(values, X)
    wanted = {}
    for e in range(E):
        wanted[f"{X}.{e}.gate_proj.weight"] = gate_up[e, :N]
        wanted[f"{X}.{e}.up_proj.weight"] = gate_up[e, N:]
        wanted[f"{X}.{e}.down_proj.weight"] = down[e]
    base = arrays({n: v.shape for n, v in wanted.items()})
    check(adapt(adapter, shapes_of(base)), base, values, **wanted)
    with pytest.raises(ConflictError, match="for 3 experts"):
        adapt(adapter, {n: s for n, s in shapes_of(base).items() if ".2." not in n})
    more = {n.replace(".2.", ".3."): s for n, s in shapes_of(base).items()}
    with pytest.raises(ConflictError, match="for 3 experts"):
        adapt(adapter, shapes_of(base) | more)


def test_square_experts(tmp_path: Path) -> None:
    """The other parameter of the module says how a square one lies; alone, it is refused."""
    values = arrays(moe(f"{X}.base_layer", 2 * H, H) | moe(X, H, H), 1)
    base = arrays({f"{X}.gate_up_proj": (E, H, 2 * H), f"{X}.down_proj": (E, H, H)})
    wanted = {
        f"{X}.gate_up_proj": per_expert(values, f"{X}.base_layer").transpose(0, 2, 1),
        f"{X}.down_proj": per_expert(values, X).transpose(0, 2, 1),
    }
    check(adapt(peft(tmp_path / "a", values, **STACKED), shapes_of(base)), base, values, **wanted)
    alone = peft(tmp_path / "b", arrays(moe(X, H, H)), target_parameters=["mlp.experts.down_proj"])
    with pytest.raises(UnsupportedError, match=r"as \[in, out\] or as \[out, in\]"):
        adapt(alone, shapes_of(base))


def test_ranks_tell_the_parameters_apart(tmp_path: Path) -> None:
    """As PEFT saves ``target_modules`` of transformers 4: names of parameters alone, a joined one with both ranks."""
    ranked = {
        f"{P}{X}.base_layer.lora_A.weight": (E * 2 * R, H), f"{P}{X}.base_layer.lora_B.weight": (2 * N, E * 2 * R),
    }  # fmt: skip
    router, query = X.replace("experts", "gate"), X.replace("mlp.experts", "self_attn.q_proj")
    values = arrays(ranked | moe(X, H, N) | pair(router, E, H) | pair(query, 5, H), 1)
    a, b = (values[n].astype(np.float64) for n in ranked)
    joined = FACTOR * np.einsum("ore,eri->eoi", b.reshape(2 * N, 2 * R, E), a.reshape(E, 2 * R, H))
    wanted = {
        f"{X}.gate_up_proj": joined,
        f"{X}.down_proj": per_expert(values, X),
        f"{router}.weight": of(values, router),
        f"{query}.weight": of(values, query),
    }
    base = arrays({n: v.shape for n, v in wanted.items()})
    config = {
        "target_parameters": ["gate_up_proj", "down_proj", "gate.weight"],
        "rank_pattern": {r".*\.gate_up_proj": 2 * R},
        "alpha_pattern": {r".*\.gate_up_proj": 2 * LORA["lora_alpha"]},
    }
    modules: tuple[object, object] = (["q_proj"], r".*\.q_proj")
    first, adapter = (peft(tmp_path / str(i), values, target_modules=m, **config) for i, m in enumerate(modules))
    for one in (first, adapter):
        check(adapt(one, shapes_of(base)), base, values, **wanted)
    with pytest.raises(ConflictError, match="fit no weight"):
        adapt(adapter, shapes_of(base) | {f"{X}.gate_up_proj": (E + 1, 2 * N, H), f"{X}.down_proj": (E + 1, H, N)})


def test_a_parameter_without_experts(tmp_path: Path) -> None:
    values = arrays(pair("l.0.mlp.gate", 3, 6), 1)
    base = arrays({"l.0.mlp.gate.weight": (3, 6)})
    adapter = peft(tmp_path, values, target_parameters=["mlp.gate.weight"])
    check(adapt(adapter, shapes_of(base)), base, values, **{"l.0.mlp.gate.weight": of(values, "l.0.mlp.gate")})


def test_parameters_with_and_without_experts_in_one_module(tmp_path: Path) -> None:
    """PEFT asks the module how it holds the former, and takes the latter for [out, in]."""
    values = arrays(pair(f"{X}.base_layer", 9, H) | moe(X, H, N), 1)
    wanted = {f"{X}.router": of(values, f"{X}.base_layer"), f"{X}.down_proj": per_expert(values, X).transpose(0, 2, 1)}
    base = arrays({n: v.shape for n, v in wanted.items()})
    adapter = peft(tmp_path, values, target_parameters=["experts.router", "experts.down_proj"])
    check(adapt(adapter, shapes_of(base)), base, values, **wanted)


def test_stacks_that_do_not_fit(tmp_path: Path) -> None:
    adapter = peft(tmp_path / "a", arrays(moe(X, H, N)), **STACKED)
    with pytest.raises(ConflictError, match="fit no weight that each expert has"):
        adapt(adapter, {f"{X}.down_proj": (E, H + 1, N)})
    with pytest.raises(ConflictError, match="are not in the base"):
        adapt(adapter, {f"{X}.w2": (E, H, N)})
    with pytest.raises(UnsupportedError, match="which parameter"):
        adapt(adapter, {f"{X}.down_proj": (E, H, N), f"{X}.gate_up_proj": (E, H, N)})
    odd = arrays({f"{P}{X}.lora_A.weight": (E * R, N), f"{P}{X}.lora_B.weight": (H, R)})
    with pytest.raises(ConflictError, match="not a stack of factors of rank 4"):
        adapt(peft(tmp_path / "b", odd, **STACKED), {f"{X}.down_proj": (E, H, N)})


# -- Paddle


def paddle_pair(name: str, width: int, out: int, rank: int = 4) -> dict[str, tuple[int, ...]]:
    return {f"{name}.lora_A": (width, rank), f"{name}.lora_B": (rank, out)}


def paddle_of(values: Mapping[str, Array], name: str, factor: float = FACTOR) -> Any:
    return product(values[f"{name}.lora_A"], values[f"{name}.lora_B"], factor)


def torch_like(_: str) -> bool:
    return False


@pytest.mark.parametrize(
    ("config", "rank", "factor"),
    [({}, 4, 1.5), ({"rslora": True}, 4, 3.0), ({"loraga": True}, 8, 1.5), ({"r": 2}, 2, 3.0)],
)
def test_paddle_on_both_kinds_of_base(tmp_path: Path, config: dict[str, Any], rank: int, factor: float) -> None:
    values = arrays(paddle_pair("llama.layers.0.q_proj", 6, 6, rank) | {"llama.norm.weight": (6,)}, 1)
    adapter = paddle(tmp_path, values, **config)
    wanted = paddle_of(values, "llama.layers.0.q_proj", factor)
    base = arrays({"llama.layers.0.q_proj.weight": (6, 6), "llama.norm.weight": (6,)})
    norm = {"llama.norm.weight": values["llama.norm.weight"].astype(np.float64) - base["llama.norm.weight"]}
    for in_out, expected in ((None, wanted), (torch_like, wanted.T)):
        changes = adapt(adapter, shapes_of(base), in_out=in_out)
        check(changes, base, values, **{"llama.layers.0.q_proj.weight": expected}, **norm)


def test_paddle_holds_bfloat16_as_u16(tmp_path: Path) -> None:
    (tmp_path / "lora_config.json").write_text(json.dumps(PADDLE))
    raw = {n: Raw("U16", np.full(s, 0x3F80, np.uint16)) for n, s in paddle_pair("q", 6, 8).items()}
    tensorfile.write(tmp_path / "peft_model-00001-of-00001.safetensors", raw)
    (term,) = adapt(read_adapter(tmp_path), {"q.weight": (6, 8)}).table["q.weight"].terms
    assert (term.up.dtype, term.down.dtype) == ("BF16", "BF16")
    assert {p.source.pieces[0].stored.dtype for p in (*term.up.parts, *term.down.parts)} == {"BF16"}


def grouped(values: Mapping[str, Array], heads: int) -> dict[str, Any]:
    """q, k and v of a fused Paddle layer: per key and value head its query heads, the key, the value."""
    whole = paddle_of(values, "a.qkv_proj").reshape(6, heads, -1)
    each = [n // heads for n in QKV.values()]
    parts = np.split(whole, np.cumsum(each)[:-1], axis=2)
    return {f"a.{n}.weight": p.reshape(6, -1) for n, p in zip(QKV, parts, strict=True)}


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_paddle_orders_fused_attention_by_heads(tmp_path: Path, heads: int) -> None:
    values = arrays(paddle_pair("a.qkv_proj", 6, 20), 1)
    adapter = paddle(tmp_path, values)
    wanted = grouped(values, heads)
    base = arrays({n: v.shape for n, v in wanted.items()})
    check(adapt(adapter, shapes_of(base), kv_heads=heads), base, values, **wanted)
    turned = {n: np.ascontiguousarray(v.T) for n, v in base.items()}
    changes = adapt(adapter, shapes_of(turned), in_out=torch_like, kv_heads=heads)
    check(changes, turned, values, **{n: v.T for n, v in wanted.items()})
    with pytest.raises(UnsupportedError, match="key and value heads"):
        adapt(adapter, shapes_of(base))
    with pytest.raises(ConflictError, match="do not divide among 3"):
        adapt(adapter, shapes_of(base), kv_heads=3)


@pytest.mark.parametrize("fused", ["gate_up_proj", "up_gate_proj", "gate_up_fused_proj"])
def test_paddle_fused_feed_forward(tmp_path: Path, fused: str) -> None:
    values = arrays(paddle_pair(f"m.{fused}", 6, 18), 1)
    wanted = paddle_of(values, f"m.{fused}")
    base = arrays({"m.gate_proj.weight": (6, 9), "m.up_proj.weight": (6, 9)})
    changes = adapt(paddle(tmp_path, values), shapes_of(base))
    check(changes, base, values, **{"m.gate_proj.weight": wanted[:, :9], "m.up_proj.weight": wanted[:, 9:]})


def test_paddle_parts_of_a_fused_base(tmp_path: Path) -> None:
    values = arrays(paddle_pair("m.up_proj", 6, 9) | paddle_pair("a.q_proj", 6, 12), 1)
    adapter = paddle(tmp_path, values)
    base = arrays({"m.gate_up_proj.weight": (6, 18), "a.qkv_proj.weight": (6, 20)})
    with pytest.raises(UnsupportedError, match=r"parts of `a.qkv_proj.weight`"):
        adapt(adapter, shapes_of(base))
    base = arrays({"m.gate_up_proj.weight": (6, 18), "a.q_proj.weight": (6, 12)})
    wanted = np.concatenate([np.zeros((6, 9)), paddle_of(values, "m.up_proj")], axis=1)
    check(
        adapt(adapter, shapes_of(base)),
        base,
        values,
        **{"m.gate_up_proj.weight": wanted, "a.q_proj.weight": paddle_of(values, "a.q_proj")},
    )


@pytest.mark.parametrize(("in_out", "axes"), [(None, (0, 1, 2)), (torch_like, (0, 2, 1))])
def test_paddle_stacked_experts(tmp_path: Path, in_out: Callable[[str], bool] | None, axes: tuple[int, ...]) -> None:
    values = arrays({"m.weight1_lora_A": (E, 6, R), "m.weight1_lora_B": (E, R, 8)}, 1)
    a, b = (values[f"m.weight1_lora_{s}"].astype(np.float64) for s in "AB")
    wanted = (FACTOR * a @ b).transpose(axes)
    base = arrays({"m.weight1": wanted.shape})
    adapter = paddle(tmp_path, values)
    check(adapt(adapter, shapes_of(base), in_out=in_out), base, values, **{"m.weight1": wanted})
    with pytest.raises(ConflictError, match="the base's differ"):
        adapt(adapter, {"m.weight1": (E, *wanted.shape[:0:-1])}, in_out=in_out)


@pytest.mark.parametrize(
    ("shapes", "config", "error", "words"),
    [
        (paddle_pair("q", 6, 8), {"pissa": True}, UnsupportedError, "pissa"),
        (paddle_pair("q", 6, 8), {"use_mora": True}, UnsupportedError, "use_mora"),
        (paddle_pair("q", 6, 8), {"do_qat": True}, UnsupportedError, "do_qat"),
        (paddle_pair("q", 6, 8), {"r": None}, ConflictError, "`r` is None"),
        (paddle_pair("q", 6, 8), {"loraga": True}, ConflictError, "but the config says rank 8"),
        ({"q.lora_A": (6, 4)}, {}, IncompleteError, "no lora_B"),
        ({"q.lora_C": (6, 4)}, {}, UnsupportedError, "lora_C"),
        ({"q.lora_A": (6, 4), "q.lora_B": (2, 4, 8)}, {}, ConflictError, "cannot be multiplied"),
    ],
)
def test_paddle_refusals(
    tmp_path: Path, shapes: Shapes, config: dict[str, Any], error: type[CkptError], words: str
) -> None:
    with pytest.raises(error, match=words):
        paddle(tmp_path, arrays(shapes), **config)


# -- several adapters


def test_combine(tmp_path: Path) -> None:
    base = arrays({"q.weight": (8, 6), "n.weight": (6,)})
    one, two = arrays(pair("q", 8, 6), 1), arrays(pair("q", 8, 6, 2) | {f"{P}n.weight": (6,)}, 2)
    first = adapt(peft(tmp_path / "a", one), shapes_of(base))
    second = adapt(peft(tmp_path / "b", two, r=2), shapes_of(base))
    both = combine([(first, 0.5), (second, 1.0)])
    assert [t.factor for t in both.table["q.weight"].terms] == [0.75, 3.0]
    assert both.table["n.weight"].whole is second.table["n.weight"].whole
    other_way = combine([(second, 1.0), (first, 0.5)])
    assert other_way.table["n.weight"].whole is second.table["n.weight"].whole
    assert [t.factor for t in other_way.table["q.weight"].terms] == [3.0, 0.75]
    more = combine([(second, 1.0), (adapt(peft(tmp_path / "c", arrays(pair("n", 6, 6))), {"n.weight": (6, 6)}), 2.0)])
    assert more.table["n.weight"].whole is second.table["n.weight"].whole
    assert [t.factor for t in more.table["n.weight"].terms] == [3.0]
    for weights in ((1.0, 0.5), (1.0, 1.0)):
        with pytest.raises(ConflictError, match=r"replaces `n.weight` as a whole"):
            combine(zip((second, second), weights, strict=True))
    with pytest.raises(ConflictError, match=r"with weight 0.5"):
        combine([(second, 0.5)])
