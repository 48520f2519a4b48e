"""What mergekit makes of a recipe is what ``ckpttool merge --rng mergekit`` makes of it, for every method it has.

All recipes run in one process of mergekit's, which ``mergekit_runs.py`` is. They work in float32 and round once, so
that results are equal or differ only in the order in which torch adds up.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.command import ckpttool
from tests.helpers.tensorfile import Raw, Tensors, read_all, write
from tests.helpers.tiny_models import save_tiny
from tests.peers.mergekit_runs import SEED

LAYERS = 3
RESCALED = 0.00005
"""Share of elements that may differ where ties divides two sums: torch adds them up in float32."""


@dataclass(frozen=True)
class Case:
    """One recipe, and how many of the elements may differ."""

    recipe: dict[str, Any]
    share: float = 0.0
    tokenizer: bool = False


def models(*parameters: dict[str, Any]) -> list[dict[str, Any]]:
    """Entries for ft1, ft2, ..."""
    return [{"model": f"./ft{i}", "parameters": p} if p else {"model": f"./ft{i}"} for i, p in enumerate(parameters, 1)]


def case(
    method: str, *parameters: dict[str, Any], base: bool = False, share: float = 0.0, **whole: Any
) -> dict[str, Case]:
    """A case over all tensors, named after its method."""
    recipe: dict[str, Any] = {"merge_method": method, "models": models(*parameters)}
    if base:
        recipe["base_model"] = "./base"
    if whole:
        recipe["parameters"] = whole
    return {method: Case(recipe, share)}


def weights(*values: float) -> list[dict[str, Any]]:
    return [{"weight": w} for w in values]


def dense(density: float, **more: Any) -> list[dict[str, Any]]:
    return [{"weight": 0.6, "density": density, **more}, {"weight": 0.5, "density": density + 0.1, **more}]


def sliced(*sources: tuple[str, int, int, dict[str, Any]], **more: Any) -> dict[str, Any]:
    """A recipe of passthrough slices, one model each."""
    slices = [
        {"sources": [{"model": m, "layer_range": [a, b], **({"parameters": p} if p else {})}]} for m, a, b, p in sources
    ]
    return {"merge_method": "passthrough", "slices": slices, **more}


def drawn(*layers: tuple[tuple[int, int], tuple[int, int]]) -> dict[str, Any]:
    """A recipe that draws for slices of two models, each with layers of its own."""
    slices = [
        {
            "sources": [
                *({"model": f"./ft{i}", "layer_range": list(of), "parameters": p} for i, (of, p) in both),
                {"model": "./base", "layer_range": list(two[0])},
            ]
        }
        for two in layers
        for both in [list(enumerate(zip(two, dense(0.4), strict=True), 1))]
    ]
    return {"merge_method": "dare_linear", "base_model": "./base", "slices": slices}


GRADIENT: Any = [
    {"filter": "self_attn", "value": [0, 0.5, 0.3, 0.7, 1]},
    {"filter": "mlp", "value": [1, 0.5, 0]},
    {"value": 0.25},
]
UNION: dict[str, Any] = {
    "merge_method": "linear",
    "models": [{"model": m, "parameters": {"weight": w}} for m, w in (("./tok1", 0.6), ("./tok2", 0.4))],
    "base_model": "./tok1",
}

METHODS = {
    **case("linear", *weights(0.6, 0.3, 0.4)),
    **case("nuslerp", *weights(0.6, 0.4), share=0.0006),
    **case("multislerp", *weights(0.6, 0.3, 0.4), share=0.0006),
    **case("karcher", {}, {}, {}, share=0.0006),
    **case("task_arithmetic", *weights(0.6, 0.3, -0.4), base=True, **{"lambda": 0.9}),
    **case("ties", *dense(0.3), base=True),
    **case("dare_linear", *dense(0.4), base=True),
    **case("dare_ties", *dense(0.6), base=True),
    **case("della", *dense(0.5, epsilon=0.2), base=True),
    **case("della_linear", *dense(0.5, epsilon=0.1), base=True),
    **case("breadcrumbs", *dense(0.5, gamma=0.05), base=True),
    **case("breadcrumbs_ties", *dense(0.5, gamma=0.05), base=True),
    **case("model_stock", {}, {}, {}, base=True),
    **case("sce", {}, {}, {}, base=True, share=0.0014, select_topk=0.5),
    **case("ram", {}, {}, base=True, share=0.0006),
    **case("ramplus_tl", {}, {}, {}, base=True, share=0.0006),
    # These two find their base among the models, as one side of the way between them.
    "slerp": Case(
        {
            "merge_method": "slerp",
            "models": models({}, {}),
            "base_model": "./ft1",
            "parameters": {"t": 0.3},
        },
        0.0002,
    ),
    "nearswap": Case(
        {"merge_method": "nearswap", "models": models({}, {}), "base_model": "./ft1", "parameters": {"t": 0.01}}, 0.0006
    ),
    "arcee_fusion": Case({"merge_method": "arcee_fusion", "models": models({}, {}), "base_model": "./ft1"}, 0.0026),
    "passthrough": Case({"merge_method": "passthrough", "models": models({"scale": 0.5})}),
}
OTHERS = {
    "slices": Case(
        sliced(("./ft1", 0, 2, {}), ("./ft2", 1, 3, {"scale": [{"filter": "down_proj", "value": 0.5}, {"value": 1.0}]}))
    ),
    "repeated_layer": Case(sliced(("./ft1", 0, 2, {}), ("./ft1", 1, 2, {}), ("./ft1", 1, 3, {}))),
    "drawn_slices": Case(drawn(((2, 3), (2, 3)), ((0, 2), (0, 2)))),
    "drawn_crosswise": Case(drawn(((1, 2), (0, 1)), ((0, 1), (0, 1)), ((2, 3), (1, 2)))),
    "gradient": Case(
        {"merge_method": "slerp", "models": models({}, {}), "base_model": "./ft1", "parameters": {"t": GRADIENT}},
        0.0002,
    ),
    "gradient_of_a_model": Case(
        {
            "merge_method": "task_arithmetic",
            "models": models({"weight": GRADIENT}, {"weight": [0.1, 0.9]}),
            "base_model": "./base",
        }
    ),
    "unnormalised": Case(
        {"merge_method": "linear", "models": models(*weights(0.6, 0.7)), "parameters": {"normalize": False}}
    ),
    "ties_rescaled": Case(
        {
            "merge_method": "ties",
            "models": models(*dense(0.3)),
            "base_model": "./base",
            "parameters": {"normalize": False, "rescale": True, "int8_mask": True},
        },
        RESCALED,
    ),
    "task_arithmetic_of_slices": Case(
        {
            "merge_method": "task_arithmetic",
            "slices": [
                {
                    "sources": [
                        {"model": "./base", "layer_range": [0, 2]},
                        {"model": "./ft1", "layer_range": [0, 2], "parameters": {"weight": [0.2, 0.8]}},
                    ]
                },
                {
                    "sources": [
                        {"model": "./base", "layer_range": [1, 3]},
                        {"model": "./ft2", "layer_range": [1, 3], "parameters": {"weight": 0.5}},
                    ]
                },
            ],
            "base_model": "./base",
        }
    ),
    "adapter": Case(
        {
            "merge_method": "linear",
            "models": [
                {"model": "./base+./lora", "parameters": {"weight": 0.5}},
                {"model": "./ft2", "parameters": {"weight": 0.5}},
            ],
        },
        share=0.0001,  # products of adapters, whose last bit torch takes from BLAS
    ),
    "tokenizer_union": Case({**UNION, "tokenizer": {"source": "union"}}, tokenizer=True),
    "tokenizer_base": Case({**UNION, "tokenizer": {"source": "base"}}, tokenizer=True),
    "tokenizer_padded": Case({**UNION, "tokenizer": {"source": "union", "pad_to_multiple_of": 32}}, tokenizer=True),
    "tokenizer_rules": Case(
        {
            **UNION,
            "tokenizer": {
                "source": "union",
                "tokens": {
                    "<two>": {"source": "./tok2"},
                    "<one>": {"source": {"kind": "zero"}},
                    "<both>": {
                        "source": {"kind": "model_token", "model": "./tok1", "token": "a"},
                        "force": True,
                    },
                },
            },
        },
        tokenizer=True,
    ),
}
TWICE: dict[str, tuple[Case, tuple[str, ...]]] = {
    "drawn_twice": (
        Case(drawn(((0, 2), (0, 2)), ((1, 3), (1, 3)))),
        ("model.layers.1.", "model.layers.2."),
    ),
    "drawn_thrice": (
        Case(drawn(((1, 3), (1, 3)), ((0, 3), (0, 3)), ((2, 3), (2, 3)))),
        ("model.layers.0.", "model.layers.1.", "model.layers.3.", "model.layers.4.", "model.layers.5."),
    ),
}
"""Recipes that use a layer more than once, and the names of tensors that are made of one."""
CASES = METHODS | OTHERS


def finetuned(base: Tensors, seed: int) -> Tensors:
    """The base with heavy-tailed noise on half of its elements, so that equal elements and magnitudes occur."""
    rng = np.random.default_rng(seed)
    out = {}
    for name, raw in base.items():
        values = (raw.bits.astype(np.uint32) << 16).view(np.float32)
        noise = np.where(rng.random(values.shape) < 0.5, 0.03 * rng.standard_t(3, values.shape), 0)
        bits = (values + noise).astype(np.float32).view(np.uint32)
        out[name] = Raw("BF16", ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16))
    return out


def write_adapter(folder: Path, base: Tensors) -> None:
    """A low-rank adapter in peft's form."""
    rng = np.random.default_rng(9)
    tensors = {}
    for name, raw in base.items():
        if name.endswith(("q_proj.weight", "v_proj.weight", "down_proj.weight")):
            rows, columns = raw.bits.shape
            at = f"base_model.model.{name.removesuffix('.weight')}"
            for part, shape in (("lora_A", (4, columns)), ("lora_B", (rows, 4))):
                values = (0.1 * rng.standard_normal(shape)).astype(np.float32)
                tensors[f"{at}.{part}.weight"] = Raw("F32", values.view(np.uint32))
    write(folder / "adapter_model.safetensors", tensors, {"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "v_proj", "down_proj"],
        "base_model_name_or_path": "./base",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")


def write_tokenizer(folder: Path, tokens: list[str]) -> None:
    """A tokenizer whose tokens are single letters and a few special words."""
    from tokenizers import Tokenizer, decoders
    from tokenizers import models as kinds
    from transformers import PreTrainedTokenizerFast

    letters = [t for t in tokens if len(t) == 1]
    tokenizer = Tokenizer(kinds.BPE(vocab={t: i for i, t in enumerate(letters)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([t for t in tokens if len(t) > 1])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")  # noqa: S106
    fast.save_pretrained(folder)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the models, the recipes, and in NAME/mergekit what mergekit made of them."""
    work = tmp_path_factory.mktemp("mergekit")
    save_tiny("llama", work / "base", dtype="bfloat16", num_hidden_layers=LAYERS)
    base = read_all(work / "base")
    for i in (1, 2, 3):
        write(work / f"ft{i}" / "model.safetensors", finetuned(base, i), {"format": "pt"})
        (work / f"ft{i}" / "config.json").write_bytes((work / "base" / "config.json").read_bytes())
    write_adapter(work / "lora", base)
    common = [chr(c) for c in range(ord("a"), ord("a") + 20)]
    for i, tokens in enumerate((["<s>", "</s>", "<both>", "<one>"], ["<s>", "</s>", "<two>", "<both>", "<zwei>"]), 1):
        # One new letter only: mergekit numbers several in the order of a set, which is another one in every run.
        letters = common if i == 1 else [*reversed(common), "x"]
        save_tiny(
            "llama", work / f"tok{i}", dtype="bfloat16", num_hidden_layers=1, vocab_size=len(letters) + len(tokens)
        )
        write_tokenizer(work / f"tok{i}", letters + tokens)
    jobs = []
    for name, one in (CASES | {n: one for n, (one, _) in TWICE.items()}).items():
        recipe = work / f"{name}.yml"
        recipe.write_text(json.dumps(one.recipe | {"dtype": "float32", "out_dtype": "bfloat16"}), encoding="utf-8")
        jobs.append({"recipe": recipe.name, "out": f"{name}/mergekit", "tokenizer": one.tokenizer})
    (work / "runs.json").write_text(json.dumps(jobs), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("mergekit_runs.py")), "runs.json"],
        cwd=work,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return work


def values(raw: Raw) -> np.ndarray[Any, np.dtype[np.float64]]:
    assert raw.dtype == "BF16"
    return (raw.bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


@pytest.mark.parametrize("name", CASES)
def test_as_mergekit(name: str, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(runs)
    done = ckpttool("merge", f"{name}.yml", "-o", f"{name}/ckpttool", "--seed", SEED, "--rng", "mergekit")
    assert done.code == 0, done.err
    wanted = read_all(runs / name / "mergekit")
    found = read_all(runs / name / "ckpttool")
    assert {n: (r.dtype, r.bits.shape) for n, r in found.items()} == {
        n: (r.dtype, r.bits.shape) for n, r in wanted.items()
    }
    different = {n: float((values(found[n]) != values(w)).mean()) for n, w in wanted.items()}
    elements = sum(w.bits.size for w in wanted.values())
    share = sum(different[n] * w.bits.size for n, w in wanted.items()) / elements
    assert share <= CASES[name].share, f"{share:.4%} differ: { ({n: d for n, d in different.items() if d}) }"
    ours, theirs = (json.loads((runs / name / by / "config.json").read_bytes()) for by in ("ckpttool", "mergekit"))
    for field in ("num_hidden_layers", "vocab_size", "model_type"):
        assert ours[field] == theirs[field]


@pytest.mark.parametrize("name", TWICE)
def test_layers_that_are_used_twice(name: str, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """mergekit draws for them in the order of a set of Python's: a note names how many, and all others are equal."""
    monkeypatch.chdir(runs)
    done = ckpttool("merge", f"{name}.yml", "-o", f"{name}/ckpttool", "--seed", SEED, "--rng", "mergekit")
    assert done.code == 0, done.err
    wanted, found = read_all(runs / name / "mergekit"), read_all(runs / name / "ckpttool")
    (said,) = re.findall(r"--rng mergekit: (\d+) tensors of layers that are used more than once", done.err)
    differ = {n for n, w in wanted.items() if (values(found[n]) != values(w)).any()}
    again = {n for n in wanted if n.startswith(TWICE[name][1])}
    assert differ <= again
    assert len(again) == int(said)


def test_every_method_of_mergekit_is_tested(runs: Path) -> None:
    assert set(json.loads((runs / "methods.json").read_text(encoding="utf-8"))) == set(METHODS)
