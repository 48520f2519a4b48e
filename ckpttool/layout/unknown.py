"""Errors where config.json is missing or says too little: what is missing, where it belongs, and what to do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from ckpttool.core.words import either
from ckpttool.errors import LayoutError
from ckpttool.formats.config import missing_config
from ckpttool.layout.rules import UnknownSizeError


@contextmanager
def sizes_from(config: Mapping[str, Any], root: str) -> Iterator[None]:
    """Names config.json, which belongs in ``root``, in the UnknownSizeError that the block raises."""
    try:
        yield
    except UnknownSizeError as e:
        if not config:
            raise missing_config(f"{e.size} is needed", root, *e.where) from None
        e.where = (f"{root}/config.json", *e.where)
        raise


def unknown_model(
    why: str, names: Iterable[str], config: Mapping[str, Any], root: str, shown: Sequence[str] = (), other: str = ""
) -> LayoutError:
    """The error for a checkpoint whose config.json is missing, or names no model that is known.

    ``why`` is what depends on the model. ``names`` are Hugging Face's names of its tensors, by which families are
    suggested; ``shown`` are those that the error lists. ``root`` is where config.json belongs, "" if unknown.
    ``other`` is another way out.
    """
    from ckpttool.layout.nearest import fitting, nearest

    names = list(names)
    place = [f"{root}/config.json"] if root else []
    known, more = fitting(names)[:3], f"; or {other}" if other else ""
    if not config:
        hint = ", or pass --family" + (f" {either(known)}" if known else " NAME")
        return missing_config(why, root, *shown, more=hint + more)
    kind = config.get("model_type")
    said = f"names no known model (model_type `{kind}`)" if kind else "has no model_type"
    what = f"config.json {said}, and {why}"
    if known:
        hint = f"if the model is built like those of a family with such names: --family {either(known)}"
    elif near := nearest(names):
        hint = (
            f"the nearest family is `{near.family}`, whose rules name {near.named} of {near.kinds} kinds of tensor:"
            " `ckpttool inspect SRC --suggest-family` prints a file to start from, for --family"
        )
    else:
        hint = "pass --family NAME|FILE.yaml"
    return LayoutError(what, where=[*place, *shown], hint=hint + more)
