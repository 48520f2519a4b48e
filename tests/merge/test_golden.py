"""Merges of mergekit and PaddleFormers, done again: equal bits where the arithmetic allows it, tight bounds elsewhere.

fixtures/merge/README.md says how the expected results were made.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from ckpttool.execute import worker_pool
from ckpttool.kernels.merge.draws import MergekitDraws
from tests.helpers.command import ckpttool
from tests.helpers.tensorfile import Array, Raw, Tensors, read, read_all

FIXTURES = Path(__file__).parents[2] / "fixtures"
MERGEKIT = FIXTURES / "merge"
PADDLE = FIXTURES / "merge_paddle"
HASHES = json.loads((MERGEKIT / "expected" / "hashes.json").read_text(encoding="utf-8"))

SHARES = {
    "slerp": 0.0002,
    "nuslerp": 0.0003,
    "nuslerp_base": 0.0003,
    "nuslerp_colwise": 0.0003,
    "multislerp": 0.0003,
    "nearswap": 0.0003,
    "ram": 0.0003,
    "ramplus_tl": 0.0003,
    "karcher": 0.0003,
    "sce": 0.0008,
    "arcee_fusion": 0.0013,
    "della": 0.00005,
    "tok_base": 0.0,
    "tok_union": 0.0,
}
"""How many of the elements may differ: torch adds up in float32, in an order of its own, and rounds what comes out.

Held against float64, none of slerp's elements that differ is ckpttool's fault.
"""
CHOOSING = {"sce", "arcee_fusion"}
"""These keep or drop an element by a threshold; one on the other side of it differs by any amount."""


def merged(recipe: Path, out: Path, *options: object) -> Tensors:
    """What ``ckpttool merge`` makes of a recipe; the index must be true."""
    done = ckpttool("merge", recipe, "-o", out, *options)
    assert done.code == 0, done.err
    found = read_all(out)
    index = out / "model.safetensors.index.json"
    if index.exists():
        data = json.loads(index.read_text(encoding="utf-8"))
        assert data["metadata"]["total_size"] == sum(r.bits.nbytes for r in found.values())
        assert data["weight_map"].keys() == found.keys()
    return found


def numbers(raw: Raw) -> Array:
    """The elements as float64."""
    if raw.dtype == "BF16":
        return (raw.bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    assert raw.dtype == "F32"
    return raw.bits.view(np.float32).astype(np.float64)


def ulps(found: Raw, wanted: Raw) -> Array:
    """How many bfloat16 numbers lie between the elements of two tensors."""
    assert (found.dtype, wanted.dtype) == ("BF16", "BF16")
    a, b = (r.bits.astype(np.int32) for r in (found, wanted))
    a, b = (np.where(x & 0x8000, -(x & 0x7FFF), x) for x in (a, b))
    out: Array = np.abs(a - b)
    return out


@pytest.mark.sample(
    "breadcrumbs_ties__f32out_bf16",
    "dare_linear__f32out_bf16",
    "dare_ties_norescale__f32out_bf16",
    "linear__nodtype",
    "lora_ta__f32out_bf16",
    "model_stock__f32out_bf16",
    "passthrough_franken__bf16",
    "per_model_filter_gradient_ta__f32out_bf16",
    "ties_rescale__f32out_bf16",
)
@pytest.mark.parametrize("name", sorted(HASHES))
def test_equal_to_mergekit(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(MERGEKIT)
    found = merged(Path("configs", f"{name}.yml"), tmp_path / "out", "--seed", 42, "--rng", "mergekit")
    got = {
        n: [r.dtype, list(r.bits.shape), hashlib.sha256(np.ascontiguousarray(r.bits).tobytes()).hexdigest()[:32]]
        for n, r in found.items()
    }
    assert got.keys() == HASHES[name].keys()
    assert [n for n in got if got[n] != HASHES[name][n]] == []


@pytest.mark.sample(
    "arcee_fusion__f32out_bf16",
    "della__f32out_bf16",
    "karcher__f32out_bf16",
    "multislerp__f32out_bf16",
    "nearswap__f32out_bf16",
    "nuslerp_base__f32out_bf16",
    "ramplus_tl__f32out_bf16",
    "sce__f32out_bf16",
    "slerp__f32out_bf16",
    "tok_union",
)
@pytest.mark.parametrize("path", sorted((MERGEKIT / "expected").glob("*.safetensors")), ids=lambda p: p.stem)
def test_near_to_mergekit(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(MERGEKIT)
    monkeypatch.setattr(MergekitDraws, "order", lambda _, rows: rows.argsort(axis=1, kind="stable"))  # see the README
    # Or workers would not know, where torch has made threads.
    monkeypatch.setattr(worker_pool, "can_fork", lambda: True)
    method = path.stem.removesuffix("__f32out_bf16")
    wanted = read(path)
    found = merged(Path("configs", f"{path.stem}.yml"), tmp_path / "out", "--seed", 42, "--rng", "mergekit")
    assert {n: (r.dtype, r.bits.shape) for n, r in found.items()} == {
        n: (r.dtype, r.bits.shape) for n, r in wanted.items()
    }
    apart = {n: ulps(found[n], wanted[n]) for n in wanted}
    different = sum(int((d > 0).sum()) for d in apart.values())
    elements = sum(d.size for d in apart.values())
    assert different <= SHARES[method] * elements, f"{different / elements:.4%} of the elements differ"
    if method in CHOOSING:
        return
    for name, distance in apart.items():
        want = numbers(wanted[name])
        # Near zero, where terms of opposite sign cancel, a unit in the last place is as small as you like.
        near_zero = np.abs(numbers(found[name]) - want) <= 2e-6 * np.sqrt(np.mean(want * want))
        assert (near_zero | (distance <= 1)).all(), name


@pytest.mark.sample(
    "pf_bf16_pd_linear_base",
    "pf_bf16_pd_ties_norescale",
    "pf_f32_pd_linear_nonorm",
    "pf_f32_pd_slerp",
    "pf_f32_pd_ties_sum",
)
@pytest.mark.parametrize("folder", sorted((PADDLE / "merged").iterdir()), ids=lambda p: p.name)
def test_near_to_paddle(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(PADDLE)
    wanted = read_all(folder)
    found = merged(folder / "merge_config.json", tmp_path / "out")
    assert {n: (r.dtype, r.bits.shape) for n, r in found.items()} == {
        n: (r.dtype, r.bits.shape) for n, r in wanted.items()
    }
    relative = 2**-7.9 if "bf16" in folder.name else 1e-5
    off = elements = 0
    for name, raw in wanted.items():
        a, b = numbers(found[name]), numbers(raw)
        off += int((np.abs(a - b) > relative * np.maximum(np.abs(a), np.abs(b)) + 1e-8).sum())
        elements += a.size
    assert off <= 0.001 * elements, f"{off / elements:.3%} of the elements are too far off"


@pytest.mark.sample("linear")
@pytest.mark.parametrize("method", ["linear", "slerp", "ties_norescale"])
def test_paddles_bits_in_u16_merge_as_bfloat16(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PaddleNLP stored bfloat16 as U16: merged, that is what the same bits in BF16 give."""
    monkeypatch.chdir(PADDLE)
    recipe = (PADDLE / "merged" / f"pf_bf16_pd_{method}" / "merge_config.json").read_text(encoding="utf-8")
    (tmp_path / "merge_config.json").write_text(recipe.replace("models/bf16/", "models/u16/"), encoding="utf-8")
    wanted = merged(PADDLE / "merged" / f"pf_bf16_pd_{method}" / "merge_config.json", tmp_path / "bf16")
    found = merged(tmp_path / "merge_config.json", tmp_path / "u16")
    assert found.keys() == wanted.keys()
    assert [n for n in wanted if not np.array_equal(found[n].bits, wanted[n].bits)] == []
