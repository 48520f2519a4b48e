"""Public models by their config.json, and what a recipe makes of them."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ckpttool.checkpoint import OpenOptions
from ckpttool.core.mesh import Mesh
from ckpttool.ops.size.model import SizedModel, load
from ckpttool.ops.size.resident import RankLoads, partition
from ckpttool.ops.size.stored import Applied, WantedRecipe, apply

DATA = Path(__file__).with_name("data")
CONFIGS: dict[str, dict[str, Any]] = json.loads((DATA / "configs.json").read_text())
GOLDEN: list[dict[str, Any]] = json.loads((DATA / "golden.json").read_text())
RECIPES = {
    "block128_f32": WantedRecipe("block", scale_dtype="f32"),
    "block128_bf16": WantedRecipe("block", scale_dtype="bf16"),
    "channel_bf16": WantedRecipe("channel", scale_dtype="bf16"),
    "bf16": WantedRecipe("bf16"),
    "none": WantedRecipe("bf16"),
    "mxfp4": WantedRecipe("as-is"),
}
"""As golden.json calls them."""


def model_of(config: dict[str, Any], *, mtp: bool = True) -> SizedModel:
    """The model of a config."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(config))
        return load(path, OpenOptions(), None, mtp=mtp)


@contextmanager
def uncollected() -> Iterator[None]:
    """A model of a hundred thousand tensors is no garbage, for which Python would look again and again.

    No `gc.freeze()`: each run of the engine would count what is frozen, which takes longer than most runs of a test.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@cache
@uncollected()
def model(name: str, *, mtp: bool = True) -> SizedModel:
    return model_of(CONFIGS[name], mtp=mtp)


@cache
@uncollected()
def applied(name: str, wanted: WantedRecipe, *, mtp: bool = True) -> Applied:
    """A recipe over a public model. Nothing writes into what this returns."""
    return apply(model(name, mtp=mtp), wanted)


BLOCK = WantedRecipe("block")


@cache
def ranks(name: str, mesh: Mesh, wanted: WantedRecipe = BLOCK, *, mtp: bool = True) -> RankLoads:
    """Its shares; blocks are checked."""
    follows = mesh.ep == 1
    return partition(model(name, mtp=mtp), applied(name, wanted, mtp=mtp), mesh, 64, blocks=True, follows=follows)


def write_config(folder: Path, name: str) -> Path:
    """The config of a public model as a file."""
    path = folder / f"{name}.json"
    path.write_text(json.dumps(CONFIGS[name]))
    return path
