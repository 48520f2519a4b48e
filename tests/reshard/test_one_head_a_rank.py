"""Where each rank has one head, a rank's share of a weight of heads has one element, and so have its moments.

A state of one element may be a number of the whole parameter (a step, a power of beta) or such a share.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.command import reshard
from tests.helpers.families import MODELS
from tests.helpers.tensorfile import Tensors, read, save_hf
from tests.helpers.torch_save import torch_save

GPT_OSS = MODELS["gpt_oss"]
SINKS = "model.layers.0.self_attn.sinks"


def moments(folder: Path) -> Tensors:
    held = read(folder / "rank-00000-of-00001.safetensors")
    return {n: t for n, t in held.items() if n.startswith("optimizer/") and f"{SINKS}/" in n}


@pytest.mark.parametrize(
    ("to", "options"), [("megatron", ()), ("hybrid", ()), ("hybrid", ("--sharding-out", 2)), ("unified", ())]
)
def test_moments_of_one_head_a_rank(to: str, options: tuple[object, ...], tmp_path: Path) -> None:
    tensors = GPT_OSS.tensors()
    save_hf(tmp_path / "src", tensors, GPT_OSS.config)
    (heads,) = tensors[SINKS].bits.shape
    rng = np.random.default_rng(1)
    names = list(tensors)
    state: dict[int, dict[str, Any]] = {
        i: {
            **{k: rng.random(tensors[n].bits.shape, np.float32) for k in ("exp_avg", "exp_avg_sq")},
            "step": np.array(3, "<f4"),
        }
        for i, n in enumerate(names)
    }
    group = {"params": list(range(len(names))), "param_names": names, "lr": 0.1, "betas": (0.9, 0.999)}
    torch_save({"state": state, "param_groups": [group]}, tmp_path / "src" / "optimizer.pt")
    reshard(tmp_path / "src", tmp_path / "cut", "--to", to, "--tp-out", heads, *options)
    # In torch's words again, whatever words the format had between.
    betas = () if to == "megatron" else ("--betas", "0.9,0.999")
    reshard(tmp_path / "cut", tmp_path / "dcp", "--to", "dcp", *betas)
    reshard(tmp_path / "dcp", tmp_path / "back", "--to", "ranks")
    found = {n.rpartition("/")[2]: t for n, t in moments(tmp_path / "back").items()}
    want = state[names.index(SINKS)]
    assert found.keys() == want.keys()
    for key, value in want.items():
        assert found[key].bits.shape == value.shape
        assert found[key].bits.tobytes() == value.tobytes()
