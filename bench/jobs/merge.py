"""Merges of two models, and a base where the method has one, against mergekit with the flags that serve it best."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from bench.measure import OURS, OUT, Job, Program, copy_of
from bench.models import Size, write_finetuned
from bench.setting import TOOL, Setting, differing, made

MERGEKIT_FLAGS = (
    "--lazy-unpickle",
    "--async-write",
    *("--out-shard-size", "500M"),
    *("--no-copy-tokenizer", "--no-write-model-card", "--quiet"),
    *("--num-threads", str(os.cpu_count())),
)
"""Its default of 5 GB per shard waits in memory until it is full; smaller shards cost no time."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """A recipe over base, ft1 and ft2, and what is asked of it."""

    method: str
    per_model: tuple[dict[str, Any], ...] = ({}, {})
    whole: dict[str, Any] = field(default_factory=dict)
    base: str = ""
    """"base", which is read too, or "ft1", which is one side of the way between two models."""
    of_copy: float | None = None
    times_as_fast: float | None = None
    draws: bool = False
    """Both programs draw random numbers, each its own."""

    def document(self, folder: Path) -> dict[str, Any]:
        """As both programs read it."""
        out: dict[str, Any] = {
            "merge_method": self.method,
            "models": [{"model": f"{folder}/ft{i}", "parameters": p} for i, p in enumerate(self.per_model, 1)],
            "dtype": "bfloat16",
        }
        if self.whole:
            out["parameters"] = self.whole
        if self.base:
            out["base_model"] = f"{folder}/{self.base}"
        return out

    @property
    def inputs(self) -> list[str]:
        """Directories that are read."""
        return sorted({f"ft{i}" for i in range(1, len(self.per_model) + 1)} | ({self.base} if self.base else set()))


def _weights(**more: Any) -> tuple[dict[str, Any], ...]:
    return ({"weight": 0.6, **more}, {"weight": 0.4, **more})


_HALF = _weights(density=0.5)
USUAL = (
    Recipe("linear", _weights(), of_copy=0.2, times_as_fast=9),
    Recipe("slerp", whole={"t": 0.4}, base="ft1", of_copy=0.25, times_as_fast=7),
    Recipe("task_arithmetic", _weights(), base="base", of_copy=0.2, times_as_fast=9),
    Recipe("dare_ties", _HALF, base="base", of_copy=0.4, times_as_fast=10, draws=True),
    Recipe("ties", _HALF, base="base", of_copy=0.4, times_as_fast=20),
)
MORE = (
    Recipe("passthrough", ({},)),
    Recipe("nuslerp", _weights()),
    Recipe("multislerp", _weights()),
    Recipe("karcher"),
    Recipe("dare_linear", _HALF, base="base"),
    Recipe("della", _HALF, base="base"),
    Recipe("della_linear", _HALF, base="base"),
    Recipe("breadcrumbs", _HALF, base="base"),
    Recipe("breadcrumbs_ties", _HALF, base="base"),
    Recipe("model_stock", base="base"),
    Recipe("sce", base="base", whole={"select_topk": 0.5}),
    Recipe("arcee_fusion", base="ft1"),
    Recipe("nearswap", base="ft1", whole={"t": 0.001}),
    Recipe("ram", base="base"),
    Recipe("ramplus_tl", base="base"),
    Recipe("average"),
    Recipe("ema", whole={"decay": 0.9}),
)
"""Run when they are asked for, against cp alone."""


def jobs(setting: Setting) -> list[Job]:
    """A job for each method."""
    size = Size.of(setting.gb / 3)
    work = setting.work / f"merge-{size.name}"
    out = []
    for recipe in (*USUAL, *MORE):
        path = work / f"{recipe.method}.yml"
        inputs = [work / i for i in recipe.inputs]
        programs = [
            Program(OURS, (TOOL, "merge", str(path), "-o", OUT, "--quiet")),
            copy_of(*inputs, inputs[0]),  # as many bytes as are read and written
        ]
        if setting.mergekit and recipe in USUAL:
            programs.append(Program("mergekit", (setting.mergekit, str(path), OUT, *MERGEKIT_FLAGS)))
        out.append(
            Job(
                f"merge {recipe.method}",
                tuple(inputs),
                tuple(programs),
                partial(_prepare, work, size),
                compare=None if recipe.draws else _compare,
                of_copy=recipe.of_copy,
                times_as_fast=recipe.times_as_fast,
                usual=recipe in USUAL,
            )
        )
    return out


def _prepare(work: Path, size: Size) -> None:
    with made(work / "base") as missing:
        if missing:
            write_finetuned(work, size)
    for recipe in (*USUAL, *MORE):
        (work / f"{recipe.method}.yml").write_text(json.dumps(recipe.document(work), indent=1))


def _compare(ours: Path, theirs: Path, _peer: str) -> str:
    return differing(ours, theirs)
