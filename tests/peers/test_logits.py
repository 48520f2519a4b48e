"""The layout rules are right, not only reversible: models cut by the tool compute what the whole models compute.

For every family a tiny random transformers model is cut with the command line to 2 and to 4 tensor-parallel ranks.
Each rank's file is loaded by transformers into a model of the local sizes, in a process of its own; the ranks work
together over gloo (see rank_model.py), and their logits must be those of the whole model. The same cut with two
query heads swapped must not pass.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from ckpttool.layout.files import FAMILIES
from tests.helpers.tiny_models import TOKENS, VARIANTS, save_tiny
from tests.peers.rank_group import Group
from tests.peers.rank_model import Job, logits_of, run
from tests.peers.tool import reshard

TOLERANCE = 1e-5
"""Largest difference of any logit; a sum over ranks rounds otherwise than one long sum."""
BY_HAND = ("gpt2", "gpt_neox")


@dataclass(frozen=True)
class Experts:
    """A cut with experts shared out."""

    variant: str
    tp: int
    ep: int
    etp: int
    published: bool = True

    @property
    def name(self) -> str:
        return f"{self.variant}-tp{self.tp}-ep{self.ep}-etp{self.etp}" + ("" if self.published else "-stacked")

    @property
    def world(self) -> int:
        return max(self.tp, self.ep * self.etp)


EXPERTS = [
    Experts("qwen3_moe", 1, 2, 1),
    Experts("qwen3_moe", 2, 2, 1),
    Experts("qwen3_moe", 2, 2, 2),
    Experts("qwen3_moe", 4, 2, 2, published=False),
    Experts("deepseek_v3", 4, 4, 1),
    Experts("deepseek_v3", 2, 2, 1, published=False),
    Experts("gpt_oss", 2, 2, 1),
    Experts("gpt_oss", 1, 2, 2),
]


WRONG = [
    ("phi3", "fused q:heads k:kv_heads v:kv_heads", "column"),
    ("phi3", "fused gate up", "column"),
    ("gpt_neox", "column heads", "fused q:heads k:heads v:heads"),
    ("gpt2", "fused q:heads k:heads v:heads in_out", "column heads in_out"),
]
"""(variant, a rule of its family, one that gives two ranks the same shapes, and round trips, but cuts elsewhere)."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The whole checkpoints, by variant."""
    folder = tmp_path_factory.mktemp("whole")
    for variant in VARIANTS:
        save_tiny(variant, folder / variant)
    for variant in {e.variant for e in EXPERTS if not e.published}:
        save_tiny(variant, folder / f"{variant}@transformers", published=False)
    return folder


@pytest.fixture(scope="module")
def ran(whole: Path, ranks: Callable[[int], Group], tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """For 2 and for 4 ranks the folder in which all cuts were run."""
    folders = {}
    for world in (2, 4):
        folder = folders[world] = tmp_path_factory.mktemp(f"cut{world}")
        jobs = []
        for variant in VARIANTS:
            source, cut = whole / variant, folder / f"{variant}.cut"
            reshard(source, cut, "--tp-out", world, "--to", "ranks")
            right = Job(variant, str(source), str(cut), world, 1, world, variant in BY_HAND)
            jobs.append(right)
            swapped = folder / f"{variant}.swapped"
            shutil.copytree(cut, swapped)
            swap_heads(right, swapped, world)
            jobs.append(Job(f"{variant}-swapped", str(source), str(swapped), world, 1, world, variant in BY_HAND))
        for i, (variant, right_rule, wrong_rule) in enumerate(WRONG if world == 2 else ()):
            text = (FAMILIES / f"{variant}.yaml").read_text(encoding="utf-8")
            assert text.count(f": {right_rule}\n") == 1
            rules, cut = folder / f"wrong{i}.yaml", folder / f"wrong{i}.cut"
            rules.write_text(text.replace(f": {right_rule}\n", f": {wrong_rule}\n"), encoding="utf-8")
            reshard(whole / variant, cut, "--tp-out", world, "--to", "ranks", "--family", rules)
            jobs.append(Job(f"wrong{i}", str(whole / variant), str(cut), world, 1, world, variant in BY_HAND))
        for e in EXPERTS:
            if e.world == world:
                source, cut = whole / (e.variant + ("" if e.published else "@transformers")), folder / f"{e.name}.cut"
                reshard(source, cut, "--tp-out", e.tp, "--ep-out", e.ep, "--etp-out", e.etp, "--to", "ranks")
                jobs.append(Job(e.name, str(source), str(cut), e.tp, e.ep, e.etp, by_hand=True))
        ranks(world).run(run, jobs, folder)
    return folders


@cache
def expected(whole: Path, variant: str) -> Any:
    """The logits of the whole model, as transformers loads and runs it."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(whole / variant, dtype=torch.float32, experts_implementation="eager")
    with torch.no_grad():
        return model(torch.tensor(TOKENS), use_cache=False).logits


def swap_heads(job: Job, folder: Path, world: int) -> None:
    """Exchange the first query head of rank 0 with that of rank 1, in every layer, and nothing else."""
    from safetensors.torch import load_file, save_file
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(job.source)
    heads = config.num_attention_heads // job.tp
    kv_heads = max((getattr(config, "num_key_value_heads", None) or config.num_attention_heads) // job.tp, 1)
    per_query = {
        "q_proj": heads,
        "q_b_proj": heads,
        "qkv_proj": heads + 2 * kv_heads,
        "query_key_value": heads,
        "c_attn": 3 * heads,
    }
    paths = [folder / f"rank-{r:05d}-of-{world:05d}.safetensors" for r in (0, 1)]
    first, second = (load_file(p) for p in paths)
    done = 0
    for name in first:
        *_, word, kind = name.split(".")
        if kind == "weight" and word in per_query:
            axis = 1 if word == "c_attn" else 0
            width = first[name].shape[axis] // per_query[word]
            a, b = first[name].narrow(axis, 0, width), second[name].narrow(axis, 0, width)
            kept = a.clone()
            a.copy_(b)
            b.copy_(kept)
            done += 1
    assert done == config.num_hidden_layers
    for path, state in zip(paths, (first, second), strict=True):
        save_file(state, path)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_ranks_compute_what_the_whole_model_computes(
    whole: Path, ran: dict[int, Path], variant: str, world: int
) -> None:
    want = expected(whole, variant)
    assert want.std() > 0.5, "the logits say something"
    assert (logits_of(variant, ran[world]) - want).abs().max() <= TOLERANCE


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("variant", VARIANTS)
def test_two_swapped_heads_are_noticed(whole: Path, ran: dict[int, Path], variant: str, world: int) -> None:
    got = logits_of(f"{variant}-swapped", ran[world])
    assert (got - expected(whole, variant)).abs().max() > 100 * TOLERANCE


@pytest.mark.parametrize("i", range(len(WRONG)), ids=lambda i: f"{WRONG[i][0]}: {WRONG[i][2]}")
def test_a_rule_that_cuts_elsewhere_is_noticed(whole: Path, ran: dict[int, Path], i: int) -> None:
    got = logits_of(f"wrong{i}", ran[2])
    assert (got - expected(whole, WRONG[i][0])).abs().max() > 100 * TOLERANCE


@pytest.mark.parametrize("cut", EXPERTS, ids=lambda e: e.name)
def test_experts_on_several_ranks_compute_what_the_whole_model_computes(
    whole: Path, ran: dict[int, Path], cut: Experts
) -> None:
    want = expected(whole, cut.variant)
    assert (logits_of(cut.name, ran[cut.world]) - want).abs().max() <= TOLERANCE


@pytest.mark.parametrize("variant", VARIANTS)
def test_out_and_back_gives_the_same_logits_exactly(
    whole: Path, ran: dict[int, Path], variant: str, tmp_path: Path
) -> None:
    import torch

    reshard(ran[4] / f"{variant}.cut", tmp_path / variant, "--tp-out", 1, "--to", "hf")
    assert torch.equal(expected(tmp_path, variant), expected(whole, variant))
