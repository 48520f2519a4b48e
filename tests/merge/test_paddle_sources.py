"""Merging Paddle's checkpoints: the values are those of the whole models under Hugging Face's names.

What a merge must give is worked out here with numpy and pickle from the committed checkpoints: weights are transposed,
taken apart and rounded by hand, and saved as plain Hugging Face models where a method is more than a sum.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

from tests.helpers.command import ckpttool, reshard
from tests.helpers.paddle import read_folder, write_file
from tests.helpers.tensorfile import Raw, assert_same, header, read_all, save_hf
from tests.merge.models import llama_config, merge, refused

FIXTURES = Path(__file__).parents[2] / "fixtures"
UNIFIED, ZCC, FLEX = (FIXTURES / n for n in ("paddle_unified", "paddle_zcc", "paddle_flex"))
RANKED = UNIFIED / "nlp_llama_bf16_tp2_ignore_merge"
FUSED = UNIFIED / "nlp_llamafused_bf16_tp2"
SKIPPED = UNIFIED / "nlp_llama_bf16_tp2_skip_save_model_weight"
NEW = UNIFIED / "pf12_llama_bf16_sharding2_nonmerge_optimshard2"
LORA = UNIFIED / "nlp_llama_lora_bf16_tp1"
QKV = ("q_proj", "k_proj", "v_proj")

Array = np.ndarray[Any, np.dtype[Any]]
Model = dict[str, Array]


# -- the truth, by hand


def rounded(a: Array) -> Array:
    """bfloat16, by way of float32."""
    return a.astype(np.float32).astype(ml_dtypes.bfloat16)


def published(held: Mapping[str, Array], *, kv: int = 2) -> Model:
    """Weights as Paddle's models hold them, under Hugging Face's names and the way round that torch has them."""
    out: Model = {}
    nlp = any(n.startswith("llama.") for n in held)
    for name, a in held.items():
        plain = name.replace("llama.", "model.")
        linear = a.ndim == 2 and "embed_tokens" not in name and (nlp or "lm_head" not in name)
        if "qkv_proj" in name:
            head = a.shape[1] // (2 * kv + 2 * kv)  # 4 query heads, 2 of keys, 2 of values
            groups = a.reshape(a.shape[0], kv, -1)
            for part, at in zip(
                QKV, (slice(0, 2 * head), slice(2 * head, 3 * head), slice(3 * head, None)), strict=True
            ):
                out[plain.replace("qkv_proj", part)] = groups[:, :, at].reshape(a.shape[0], -1).T
        elif "gate_up_fused_proj" in name:
            for part, half in zip(("gate_proj", "up_proj"), np.split(a, 2, axis=1), strict=True):
                out[plain.replace("gate_up_fused_proj", part)] = half.T
        else:
            out[plain] = a.T if linear else a
    return out


def unpickled(path: Path) -> dict[str, Any]:
    def array(value: Any) -> Any:
        if isinstance(value, tuple):
            value = value[1]
        bits = isinstance(value, np.ndarray) and value.dtype == np.uint16
        return value.view(ml_dtypes.bfloat16) if bits else value

    found = pickle.loads(path.read_bytes())  # noqa: S301 - fixtures
    return {k: {n: array(a) for n, a in v.items()} if isinstance(v, dict) else array(v) for k, v in found.items()}


def two_ranks() -> Model:
    """The fused model of ``nlp_tp2``, put together from its ranks."""
    ranks = [unpickled(ZCC / "nlp_tp2" / f"model_state.tp{r:02d}.pdparams") for r in range(2)]
    out: Model = {}
    for name, first in ranks[0].items():
        if not isinstance(first, np.ndarray):
            continue
        both = [r[name] for r in ranks]
        if "gate_up_fused_proj" in name:
            halves = [np.split(a, 2, axis=1) for a in both]
            out[name] = np.concatenate([halves[0][0], halves[1][0], halves[0][1], halves[1][1]], axis=1)
        elif first.ndim == 1:
            out[name] = first
        else:
            out[name] = np.concatenate(both, axis=int("qkv_proj" in name or "lm_head" in name))
    return out


def master_weights(folder: Path) -> Model:
    """The master weights of ``sharding2_v1``, where every shard has some parameters whole, by the model's names."""
    held: Model = {}
    for path in sorted(folder.glob("optimizer.*.pdopt")):
        held |= {n.removesuffix("_fp32_master_0"): a for n, a in unpickled(path)["master_weights"].items()}
    (meta,) = json.loads((folder / "model_meta.json").read_text())["sharding_metas"].values()
    return {name: held[parameter] for name, parameter in meta["structure_name_mapping"].items()}


def noise(name: str, a: Array, by: float = 0.05) -> Array:
    """The checkpoints are of one model; with noise they are several."""
    rng = np.random.default_rng(sum(name.encode()))
    varied: Array = np.asarray(a.astype(np.float32) + by * rng.standard_normal(a.shape), np.float32)
    return varied.astype(a.dtype)


def vary_safetensors(folder: Path, pattern: str, seed: str) -> None:
    """Noise on all tensors of these files."""
    for path in folder.glob(pattern):
        metadata = header(path).get("__metadata__")
        held = read_folder(folder, path.name)
        write_file(path, {n: noise(seed + n, a) for n, a in held.items()}, metadata)


def vary_masters(folder: Path) -> None:
    """Noise on the master weights of a sharded save, which holds model weights as nothing else."""
    for path in folder.glob("optimizer.*.pdopt"):
        content = pickle.loads(path.read_bytes())  # noqa: S301 - fixtures
        masters = content["master_weights"]
        for name, held in masters.items():
            pair = isinstance(held, tuple)
            changed = noise(name, held[1] if pair else held)
            masters[name] = (held[0], changed) if pair else changed
        path.write_bytes(pickle.dumps(content, protocol=4))


PLACES: dict[str, Path] = {
    "ranked": RANKED,
    "fused": FUSED,
    "skipped": SKIPPED,
    "new": NEW,
    "hybrid": ZCC / "nlp_tp2",
    "sharded": ZCC / "sharding2_v1",
}
TRUTH: dict[str, Callable[[Path], Model]] = {
    "ranked": lambda at: published(read_folder(at, "model-*")),
    "fused": lambda at: published(read_folder(at, "model-*")),
    "skipped": lambda at: {n: rounded(a) for n, a in published(read_folder(at, "model-*")).items()},
    "new": lambda at: read_folder(at, "model-*"),  # paddleformers 1.2 writes model files as torch has them
    "hybrid": lambda _: published(two_ranks()),
    "sharded": lambda at: {n: rounded(a) for n, a in published(master_weights(at)).items()},
}


class Sources(NamedTuple):
    """Paths and true weights by name."""

    at: dict[str, Path]
    truth: dict[str, Model]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Sources:
    """The committed checkpoints, some with noise, and one of them in formats of which there is none like it."""
    root = tmp_path_factory.mktemp("sources")
    at = dict(PLACES)
    for name in ("fused", "skipped", "sharded"):
        at[name] = root / name
        shutil.copytree(PLACES[name], at[name])
    vary_safetensors(at["fused"], "model-*.safetensors", "f")
    vary_safetensors(at["fused"], "master_weights-*.safetensors", "m")
    vary_safetensors(at["skipped"], "model-*.safetensors", "s")
    vary_masters(at["sharded"])
    truth = {n: TRUTH[n](at[n]) for n in PLACES}
    for name, options in {"zcc": ("--tp-out", 2, "--sharding-out", 2), "flex": ("--tp-out", 2)}.items():
        at[name], truth[name] = root / name, truth["skipped"]
        reshard(at["skipped"], at[name], "--to", "hybrid" if name == "zcc" else name, *options)
    return Sources(at, truth)


def bits(model: Mapping[str, Array]) -> dict[str, Raw]:
    names = {"bfloat16": "BF16", "float32": "F32"}
    return {n: Raw(names[a.dtype.name], np.ascontiguousarray(a).view(f"u{a.dtype.itemsize}")) for n, a in model.items()}


def weighted(a: Mapping[str, Array], b: Mapping[str, Array], u: float = 0.75, v: float = 0.25) -> Model:
    """The sum, exact until it is rounded: the weights are powers of two and their sums."""
    assert a.keys() == b.keys()
    return {n: (u * x.astype(np.float64) + v * b[n].astype(np.float64)).astype(np.float32) for n, x in a.items()}


LINEAR = ("--weights", "0.75,0.25", "--quiet")


# -- values


@pytest.mark.sample("skipped-new", "sharded-hybrid")
@pytest.mark.parametrize(
    ("a", "b"),
    [("ranked", "skipped"), ("skipped", "new"), ("fused", "ranked"), ("new", "fused"), ("hybrid", "sharded"),
     ("sharded", "hybrid")],
)  # fmt: skip
def test_linear_is_the_sum_of_the_models(a: str, b: str, sources: Sources, tmp_path: Path) -> None:
    """Names, fusions, orientation, ranks, shards and derived weights: the merge sees the model behind them."""
    merge(sources.at[a], sources.at[b], "-o", tmp_path / "out", *LINEAR, "--to", "hf", "--verify")
    want = {n: rounded(x) for n, x in weighted(sources.truth[a], sources.truth[b]).items()}
    assert_same(read_all(tmp_path / "out"), bits(want))


@pytest.mark.sample("flex")
@pytest.mark.parametrize("format_", ["zcc", "flex"])
def test_other_formats_of_the_same_model(format_: str, sources: Sources, tmp_path: Path) -> None:
    merge(sources.at[format_], sources.at["fused"], "-o", tmp_path / "out", *LINEAR, "--to", "hf", "--verify")
    want = {n: rounded(x) for n, x in weighted(sources.truth["skipped"], sources.truth["fused"]).items()}
    assert_same(read_all(tmp_path / "out"), bits(want))


def test_derived_weights_are_rounded_before_they_are_merged(sources: Sources, tmp_path: Path) -> None:
    """A model is what its files say in its dtype; merging the float32 master weights would give something else."""
    merge(sources.at["skipped"], RANKED, "-o", tmp_path / "out", *LINEAR, "--to", "hf")
    masters = published(read_folder(sources.at["skipped"], "model-*"))
    from_masters = bits({n: rounded(x) for n, x in weighted(masters, sources.truth["ranked"]).items()})
    found = read_all(tmp_path / "out")
    assert any(not np.array_equal(found[n].bits, r.bits) for n, r in from_masters.items())


METHODS = {
    "ties": ("--method", "ties", "--weights", "0.6,0.4", "--param", "density=0.5"),
    "dare_ties": ("--method", "dare_ties", "--weights", "0.6,0.4", "--param", "density=0.5", "--seed", 7),
    "model_stock": ("--method", "model_stock", "--param", "filter_wise=true"),
}


@pytest.mark.sample("model_stock")
@pytest.mark.parametrize("method", METHODS)
def test_methods_see_whole_tensors_of_hugging_face(method: str, sources: Sources, tmp_path: Path) -> None:
    """Thresholds, angles and draws depend on what is one tensor and on the order of its elements."""
    for name in ("ranked", "fused", "skipped"):
        save_hf(tmp_path / name, bits(sources.truth[name]), json.loads((RANKED / "config.json").read_text()))
    words = METHODS[method]
    merge(tmp_path / "fused", tmp_path / "skipped", "--base", tmp_path / "ranked", "-o", tmp_path / "want", *words)
    merge(
        sources.at["fused"],
        sources.at["zcc"],
        "--base",
        RANKED,
        "-o",
        tmp_path / "out",
        *words,
        "--to",
        "hf",
        "--verify",
    )
    assert_same(read_all(tmp_path / "out"), read_all(tmp_path / "want"))


def test_slerp_and_stacked_layers(sources: Sources, tmp_path: Path) -> None:
    for name in ("fused", "skipped"):
        save_hf(tmp_path / name, bits(sources.truth[name]), json.loads((RANKED / "config.json").read_text()))
    slerp = ("--method", "slerp", "--param", "t=0.35")
    merge(tmp_path / "skipped", "--base", tmp_path / "fused", "-o", tmp_path / "want", *slerp)
    merge(sources.at["flex"], "--base", sources.at["fused"], "-o", tmp_path / "out", *slerp, "--to", "hf")
    assert_same(read_all(tmp_path / "out"), read_all(tmp_path / "want"))
    recipe = tmp_path / "stack.yml"
    first, second = (
        f"- sources: [{{model: {p}, layer_range: [{r}]}}]"
        for p, r in ((sources.at["fused"], "0, 2"), (sources.at["zcc"], "1, 2"))
    )
    recipe.write_text(f"merge_method: passthrough\nslices:\n{first}\n{second}\n")
    merge(recipe, "-o", tmp_path / "stacked", "--verify")
    assert json.loads((tmp_path / "stacked/config.json").read_text())["num_hidden_layers"] == 3
    reshard(tmp_path / "stacked", tmp_path / "hf", "--to", "hf")
    one, two = sources.truth["fused"], sources.truth["skipped"]
    want = one | {n.replace(".1.", ".2."): a for n, a in two.items() if ".1." in n}
    want |= {n: two[n] for n in ("model.norm.weight", "lm_head.weight")}  # behind the layers: the last slice's
    assert_same(read_all(tmp_path / "hf"), bits(want))


def test_experts_and_averages(tmp_path: Path) -> None:
    """A mixture of experts over expert and tensor ranks: the mean of a model with itself is the model."""
    source = ZCC / "ep2_tp2_sharding2_ema"
    shutil.copytree(source, tmp_path / "copy")
    done = merge(source, tmp_path / "copy", "-o", tmp_path / "out", "--verify")
    assert "master_weights, optimizer, ema of the sources left out" in done.err
    want = json.loads((ZCC / "expected.json").read_text())
    found = read_folder(tmp_path / "out", "model-*")
    assert found
    assert found.keys() == {n for n, t in want.items() if "model" in t}
    for name, a in found.items():
        digests = {hashlib.sha256(np.ascontiguousarray(x).tobytes()).hexdigest()[:16] for x in (a, a.T)}
        dtype, _, digest = want[name]["model"]
        assert digest in digests, name
        assert bits({name: a})[name].dtype == dtype


# -- what is written


def test_paddle_stays_paddle(sources: Sources, tmp_path: Path) -> None:
    """Names, fusions and orientation of the first source, and its writer's config; nothing of the training run."""
    done = merge(sources.at["fused"], RANKED, "-o", tmp_path / "out", "--weights", "0.75,0.25", "--verify")
    assert "master_weights, optimizer of the sources left out" in done.err
    assert "not copied, a merge is not a training run" in done.err
    found = read_folder(tmp_path / "out", "*.safetensors")
    held = read_folder(sources.at["fused"], "model-*")
    assert {n: (a.shape, a.dtype) for n, a in found.items()} == {n: (a.shape, a.dtype) for n, a in held.items()}
    want = {n: rounded(x) for n, x in weighted(sources.truth["fused"], sources.truth["ranked"]).items()}
    assert_same(bits(published(found)), bits(want))
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "ckpttool.merge.json", "config.json", "model-00001-of-00001.safetensors", "model.safetensors.index.json",
    ]  # fmt: skip
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["paddlenlp_version"] == "3.0.0b4"


def test_the_donor_gives_the_form(sources: Sources, tmp_path: Path) -> None:
    merge(RANKED, sources.at["fused"], "-o", tmp_path / "apart", *LINEAR)
    assert read_folder(tmp_path / "apart", "*.safetensors").keys() == read_folder(RANKED, "model-*").keys()
    merge(NEW, RANKED, "-o", tmp_path / "new", *LINEAR)
    assert read_folder(tmp_path / "new", "*.safetensors").keys() == read_folder(NEW, "model-*").keys()
    merge(RANKED, NEW, "-o", tmp_path / "target", *LINEAR, "--target", "paddleformers-1.2")
    assert "paddleformers_version" in json.loads((tmp_path / "target/config.json").read_text())


def test_a_model_of_hugging_face_makes_it_one(sources: Sources, tmp_path: Path) -> None:
    save_hf(tmp_path / "hf", bits(sources.truth["new"]), json.loads((NEW / "config.json").read_text()))
    merge(sources.at["fused"], tmp_path / "hf", "-o", tmp_path / "out", *LINEAR)
    want = {n: rounded(x) for n, x in weighted(sources.truth["fused"], sources.truth["new"]).items()}
    assert_same(read_all(tmp_path / "out"), bits(want))
    assert not [k for k in json.loads((tmp_path / "out/config.json").read_text()) if k.startswith("paddle")]
    merge(sources.at["fused"], tmp_path / "hf", "-o", tmp_path / "paddle", *LINEAR, "--to", "unified")
    assert_same(bits(published(read_folder(tmp_path / "paddle", "*.safetensors"))), bits(want))


TARGETS = (
    ("--to", "hf"),
    ("--to", "hybrid", "--tp-out", 2, "--pp-out", 2),
    ("--to", "hybrid"),
    ("--to", "flex", "--tp-out", 2),
    ("--to", "ranks", "--tp-out", 2),
    ("--to", "vllm", "--tp-out", 2),
    ("--to", "unified", "--unfuse"),
    ("--to", "unified", "--max-shard-size", "20KB"),
    ("--tp-out", 2),
)


@pytest.mark.sample("--tohf", "--tohybrid--tp-out2--pp-out2", "--tounified--max-shard-size20KB")
@pytest.mark.parametrize("options", TARGETS, ids=lambda o: "".join(map(str, o)))
def test_every_target_holds_the_same(options: tuple[object, ...], sources: Sources, tmp_path: Path) -> None:
    merge(sources.at["fused"], sources.at["skipped"], "-o", tmp_path / "out", *LINEAR, *options, "--verify")
    reshard(tmp_path / "out", tmp_path / "hf", "--to", "hf", *(("--tp-out", 1) if "--tp-out" in options else ()),
            *(("--pp-out", 1) if "--pp-out" in options else ()), "--unfuse")  # fmt: skip
    want = {n: rounded(x) for n, x in weighted(sources.truth["fused"], sources.truth["skipped"]).items()}
    assert_same(read_all(tmp_path / "hf"), bits(want))


def test_dtype_and_removed_keys(sources: Sources, tmp_path: Path) -> None:
    merge(
        RANKED,
        sources.at["skipped"],
        "-o",
        tmp_path / "out",
        *LINEAR,
        "--dtype",
        "f32",
        "--remove-keys",
        "llama.layers.1.*",
    )
    want = {n: x for n, x in weighted(sources.truth["ranked"], sources.truth["skipped"]).items() if ".1." not in n}
    assert_same(bits(published(read_folder(tmp_path / "out", "*.safetensors"))), bits(want))


# -- master weights


def recipe(path: Path, *models: Path, **more: Any) -> Path:
    fields = {"merge_method": "linear", "merge_prefix": "master_weights", "model_path_list": [str(m) for m in models]}
    path.write_text(json.dumps(fields | {"weight_list": [0.5, 0.5]} | more))
    return path


def test_master_weights_are_merged_and_written_as_such(sources: Sources, tmp_path: Path) -> None:
    words = recipe(tmp_path / "merge_config.json", sources.at["fused"], RANKED)
    done = merge(words, "-o", tmp_path / "out", "--verify")
    assert "model, optimizer of the sources left out" in done.err
    names = sorted(p.name for p in (tmp_path / "out").glob("*.safetensors*"))
    assert names == ["master_weights-00001-of-00001.safetensors", "master_weights.safetensors.index.json"]
    found = read_folder(tmp_path / "out", "*.safetensors")
    assert found.keys() == read_folder(sources.at["fused"], "master_weights-*").keys()
    ranks = [read_folder(RANKED, f"master_weights.tp{r:02d}.safetensors") for r in range(2)]
    whole = {}
    for name, a in ranks[0].items():
        rows = any(x in name for x in ("embed_tokens", "o_proj", "down_proj"))
        both = [r[name] for r in ranks if name in r]
        whole[name] = a if a.ndim == 1 or len(both) == 1 else np.concatenate(both, axis=int(not rows))
    whole |= {n: a for n, a in ranks[1].items() if n not in whole}
    want = weighted(published(read_folder(sources.at["fused"], "master_weights-*")), published(whole), 0.5, 0.5)
    assert_same(bits(published(found)), bits(want))


def test_master_weights_of_a_sharded_save(sources: Sources, tmp_path: Path) -> None:
    merge(recipe(tmp_path / "m.json", sources.at["sharded"], ZCC / "nlp_tp2"), "-o", tmp_path / "out", "--verify")
    assert json.loads((tmp_path / "out/ckpttool.merge.json").read_text())["component"] == "master_weights"
    found = read_folder(tmp_path / "out", "master_weights*.safetensors")
    mine = master_weights(sources.at["sharded"])
    assert {n: a.shape for n, a in found.items()} == {n: a.shape for n, a in mine.items()}


def test_master_weights_that_are_not_there(sources: Sources, tmp_path: Path) -> None:
    save_hf(tmp_path / "hf", bits(sources.truth["new"]), json.loads((NEW / "config.json").read_text()))
    error = refused(tmp_path / "out", recipe(tmp_path / "m.json", sources.at["fused"], tmp_path / "hf"))
    assert "the source has no master weights (it has model)" in error
    assert str(tmp_path / "hf") in error
    error = refused(
        tmp_path / "out", recipe(tmp_path / "m.json", sources.at["fused"], RANKED), "--dtype", "bf16", code=2
    )
    assert "master weights are float32" in error
    error = refused(tmp_path / "out", recipe(tmp_path / "m.json", sources.at["fused"], RANKED), "--to", "hf", code=2)
    assert "master_weights" in error


# -- adapters


def lora() -> dict[str, Array]:
    return read_folder(LORA, "peft_model-*")


def adapted_by_hand(model: Mapping[str, Array]) -> dict[str, Array]:
    """float64: alpha / r is 2."""
    out = {n: a.astype(np.float64) for n, a in model.items()}
    factors = {n.replace("llama.", "model."): a.astype(np.float64) for n, a in lora().items()}
    for name in [n.removesuffix(".lora_A") for n in factors if n.endswith(".lora_A")]:
        out[f"{name}.weight"] += 2 * (factors[f"{name}.lora_A"] @ factors[f"{name}.lora_B"]).T
    return out


def peft(folder: Path) -> Path:
    """Paddle's adapter as PEFT would have saved it."""
    folder.mkdir()
    names = {n: n.replace("llama.", "base_model.model.model.") + ".weight" for n in lora()}
    write_file(folder / "adapter_model.safetensors", {names[n]: np.ascontiguousarray(a.T) for n, a in lora().items()})
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "o_proj", "down_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def test_adapter_of_paddle_alone(sources: Sources, tmp_path: Path) -> None:
    """A checkpoint with peft_model files, optimizer and master weights is an adapter all the same."""
    done = merge(f"{RANKED}+{LORA}", "-o", tmp_path / "out", "--verify")
    assert "unified" in done.err
    found = published(read_folder(tmp_path / "out", "*.safetensors"))
    changed = 0
    before = sources.truth["ranked"]
    for name, want in adapted_by_hand(before).items():
        near = np.abs(found[name].astype(np.float64) - want) <= np.maximum(np.abs(want), 2.0**-126) * 2.0**-8
        assert near.all(), name
        changed += not np.array_equal(found[name], before[name])
    assert changed == 6


@pytest.mark.sample("hf", "zcc")
@pytest.mark.parametrize("base", ["ranked", "zcc", "hf", "fused"])
def test_an_adapter_fits_the_base_however_it_is_stored(base: str, sources: Sources, tmp_path: Path) -> None:
    """PEFT's and Paddle's form of one adapter, on every form of a base, give the same bytes."""
    truth = sources.truth["skipped" if base == "zcc" else "fused" if base == "fused" else "ranked"]
    config = json.loads((RANKED / "config.json").read_text())
    save_hf(tmp_path / "hf", bits(truth), config | {"paddlenlp_version": None})
    place = {"ranked": RANKED, "fused": sources.at["fused"], "zcc": sources.at["zcc"], "hf": tmp_path / "hf"}[base]
    other = peft(tmp_path / "peft")
    merge(f"{tmp_path / 'hf'}+{other}", "-o", tmp_path / "want", "--quiet")
    for adapter, out in ((LORA, "paddle"), (other, "torch")):
        merge(f"{place}+{adapter}", "-o", tmp_path / out, "--to", "hf", "--quiet")
        assert_same(read_all(tmp_path / out), read_all(tmp_path / "want"))


def test_an_adapter_is_no_model(tmp_path: Path) -> None:
    error = refused(tmp_path / "out", RANKED, LORA)
    assert "the source is an adapter and holds no model weights" in error
    assert f"BASE+{LORA}" in error
    merge(LORA, "-o", tmp_path / "whole", "--verify")
    assert (tmp_path / "whole/peft_model.safetensors.index.json").exists()


# -- one source


@pytest.mark.sample("new")
@pytest.mark.parametrize("name", ["ranked", "fused", "new"])
def test_one_source_keeps_everything(name: str, sources: Sources, tmp_path: Path) -> None:
    merge(sources.at[name], "-o", tmp_path / "out", "--verify")
    stems = {p.name.split("-")[0] for p in (tmp_path / "out").glob("*-of-*.safetensors")}
    assert stems == {"model", "master_weights", "optimizer"}
    done = ckpttool("inspect", tmp_path / "out", "--diff", sources.at[name], "--values", "--quiet")
    assert done.code == 0, done.out


def test_a_sharded_save_becomes_whole(sources: Sources, tmp_path: Path) -> None:
    merge(sources.at["sharded"], "-o", tmp_path / "out", "--verify")
    assert_same(bits(read_folder(tmp_path / "out", "master_weights-*")), bits(master_weights(sources.at["sharded"])))
    assert_same(bits(read_folder(tmp_path / "out", "model-*")), bits(sources.truth["sharded"]))
    merge(sources.at["sharded"], "-o", tmp_path / "hf", "--to", "hf")
    assert_same(read_all(tmp_path / "hf"), bits(sources.truth["sharded"]))


def test_flex_is_merged_as_paddle_does(sources: Sources, tmp_path: Path) -> None:
    """A plain save keeps all its keys; a trainer's, which is several saves, becomes a unified checkpoint."""
    merge(FLEX / "dist_tensor", "-o", tmp_path / "plain")
    assert (tmp_path / "plain/model.safetensors").exists()
    merge(sources.at["flex"], "-o", tmp_path / "trainer")
    assert (tmp_path / "trainer/optimizer.safetensors.index.json").exists()


# -- around it


@pytest.mark.thorough  # execute/test_memory
def test_wide_transposes_are_read_in_strips(tmp_path: Path) -> None:
    """Matrices larger than all buffers, stored the other way round, rounded or not; and read more than once."""
    rng = np.random.default_rng(5)
    config = llama_config(layers=1, vocab=64, hidden_size=1024, intermediate_size=1536)
    shapes = {
        "model.embed_tokens.weight": (64, 1024),
        "model.layers.0.mlp.down_proj.weight": (1024, 1536),
        "model.layers.0.mlp.up_proj.weight": (1536, 1024),
    }
    for name in "ab":
        model = {n: rounded(rng.standard_normal(s, np.float32)) for n, s in shapes.items()}
        save_hf(tmp_path / name, bits(model), config)
        reshard(tmp_path / name, tmp_path / f"{name}1", "--to", "unified", "--target", "paddlenlp-3.0")
        reshard(tmp_path / name, tmp_path / f"{name}2", "--to", "hybrid", "--sharding-out", 2)
    words = ("--method", "ties", "--weights", "1,1", "--param", "density=0.3", "--memory", "4MiB", "--to", "hf")
    merge(tmp_path / "a", tmp_path / "b", "--base", tmp_path / "a", "-o", tmp_path / "want", *words)
    for first, second in (("a1", "b2"), ("a2", "b1")):
        out = tmp_path / (first + second)
        merge(tmp_path / first, tmp_path / second, "--base", tmp_path / first, "-o", out, *words, "--verify")
        assert_same(read_all(out), read_all(tmp_path / "want"))


def test_a_merge_can_be_trained_on_with_shards(sources: Sources, tmp_path: Path) -> None:
    """A sharded optimizer stores weights as master weights: they are float32 of what was merged."""
    merge(sources.at["fused"], RANKED, "-o", tmp_path / "out", *LINEAR)
    reshard(tmp_path / "out", tmp_path / "zcc", "--to", "hybrid", "--sharding-out", 2)
    reshard(tmp_path / "zcc", tmp_path / "back", "--to", "unified")
    model = read_folder(tmp_path / "back", "model-*")
    masters = read_folder(tmp_path / "back", "master_weights-*")
    assert_same(bits(masters), bits({n: a.astype(np.float32) for n, a in model.items()}))
    want = {n: rounded(x) for n, x in weighted(sources.truth["fused"], sources.truth["ranked"]).items()}
    assert_same(bits(published(model)), bits(want))


def test_record(sources: Sources, tmp_path: Path) -> None:
    merge(sources.at["zcc"], sources.at["fused"], "-o", tmp_path / "out", *LINEAR)
    record = json.loads((tmp_path / "out/ckpttool.merge.json").read_text())
    assert record["format"] == "unified"
    assert record["component"] == "model"
    first, second = record["sources"]
    assert (first["format"], second["format"]) == ("hybrid", "unified")  # without averages it is not a zcc
    assert first["derived"] == {"tensors": 21, "from": "master_weights", "stored": "F32"}
    assert second["derived"] is None
    # The hash is that of the model as it is, so a copy that holds the rounded weights has the same.
    reshard(sources.at["zcc"], tmp_path / "hf", "--to", "hf")
    merge(tmp_path / "hf", sources.at["fused"], "-o", tmp_path / "again", *LINEAR)
    again = json.loads((tmp_path / "again/ckpttool.merge.json").read_text())
    assert [s["hash"] for s in again["sources"]] == [s["hash"] for s in record["sources"]]


def test_dry_run_and_json(sources: Sources, tmp_path: Path) -> None:
    done = merge(sources.at["fused"], sources.at["skipped"], "-o", tmp_path / "out", "--dry-run", "--json")
    plan = json.loads(done.out)
    assert plan["merged_tensors"] == 21
    assert not (tmp_path / "out").exists()
    done = merge(sources.at["fused"], sources.at["skipped"], "-o", tmp_path / "out", "--json")
    assert json.loads(done.out)["target"]["format"] == "unified"


def test_resumed(sources: Sources, tmp_path: Path) -> None:
    """From pickles, whose arrays lie in files of their own in every run."""
    words = (sources.at["zcc"], RANKED, "--weights", "0.75,0.25", "--quiet")
    merge(*words, "-o", tmp_path / "want")
    partial = tmp_path / "out.partial"
    partial.mkdir()
    (partial / ".journal").touch()
    merge(*words, "-o", tmp_path / "out", "--resume")
    assert_same(read_all(tmp_path / "out"), read_all(tmp_path / "want"))


def test_nothing_is_guessed_without_a_config(sources: Sources, tmp_path: Path) -> None:
    """Square weights of unknown orientation could be merged with their transposes."""
    bare = tmp_path / "bare"
    shutil.copytree(sources.at["flex"], bare)
    for path in bare.rglob("config.json"):
        path.unlink()
    error = refused(tmp_path / "out", bare, RANKED)
    assert "how the weights of some models lie" in error
    assert str(bare) in error
    shutil.copytree(bare, tmp_path / "twin")
    # Two of one kind need no names, but a reader of the merged model needs the orientation, too.
    assert "config.json is missing" in refused(tmp_path / "same", bare, tmp_path / "twin")
