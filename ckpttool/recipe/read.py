"""Detect the kind of a recipe file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ckpttool.errors import UsageError
from ckpttool.formats.paddle import looks_like_pir
from ckpttool.recipe.mergekit import read_mergekit
from ckpttool.recipe.model import Recipe
from ckpttool.recipe.paddle import read_paddle
from ckpttool.storage.place import parse_place, scheme_of

YAML = (".yml", ".yaml")


def is_recipe(sources: Sequence[str]) -> bool:
    """Whether the words of a command line name a recipe. Raises UsageError for a recipe beside something else."""
    found = [s for s in sources if _looks_like_one(s)]
    if found and len(sources) > 1:
        raise UsageError("a recipe stands alone", where=found[0], hint="name either one recipe or the checkpoints")
    return bool(found)


def _looks_like_one(source: str) -> bool:
    if not source.endswith((".json", *YAML)):
        return not scheme_of(source) and _says_so(Path(source))
    place = parse_place(source)
    if place.is_dir() or source.endswith(".index.json"):
        return False
    return source.endswith(YAML) or not looks_like_pir(place)  # a Paddle program is JSON, too


def _says_so(source: Path) -> bool:
    """Whether a file that is not called so is a recipe of mergekit."""
    if source.suffix not in ("", ".txt", ".cfg", ".conf") or not source.is_file():
        return False  # of a pipe nothing would be left to read
    try:
        with source.open("rb") as f:
            return b"merge_method:" in f.read(1 << 16)
    except (OSError, ValueError):
        return False


def read_recipe(source: str) -> Recipe:
    """The recipe in a file: JSON is Paddle's, anything else mergekit's YAML. Raises as these readers do."""
    path = parse_place(source)
    return read_paddle(path) if source.endswith(".json") else read_mergekit(path)
