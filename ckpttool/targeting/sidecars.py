"""Small files beside the tensors: config.json, and what is generated, copied or left behind."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import PurePosixPath
from typing import Any

from ckpttool.checkpoint import Checkpoint
from ckpttool.core.dtypes import DTYPES
from ckpttool.core.files import DataFile
from ckpttool.core.words import some
from ckpttool.dialects import Dialect
from ckpttool.formats.base import FileLayout, file_now
from ckpttool.formats.config import quantization
from ckpttool.quant.config import DTYPE_FIELDS, HF_QUANT, with_fields
from ckpttool.storage.below import files_below
from ckpttool.storage.json_file import indented
from ckpttool.storage.listing import is_index
from ckpttool.targeting.target import Goal

PARALLEL_FIELDS = {
    "tp": (
        "tensor_parallel_degree",
        "tensor_model_parallel_size",
        "tensor_parallel_size",
        "tp_size",
        "model_parallel_size",
    ),
    "pp": ("pipeline_parallel_degree", "pipeline_model_parallel_size", "pipeline_parallel_size", "pp_size"),
    "ep": ("expert_parallel_degree", "expert_model_parallel_size", "expert_parallel_size", "ep_size"),
}
"""Fields of a config that name a parallel size, in Paddle's, Megatron's and vLLM's words."""


def beside(
    source: Checkpoint,
    ours: Dialect,
    config: Mapping[str, Any],
    file_layout: FileLayout,
    written: Sequence[tuple[str, bytes]],
    notes: list[str],
) -> tuple[list[tuple[str, DataFile]], list[tuple[str, bytes]]]:
    """(name and file of what is carried, name and bytes of what is made) beside the tensors of the output."""
    root = source.stored.root
    made = [*file_layout.generated, *written]
    own = root / "config.json"
    unquantized = bool(quantization(source.config)) and not quantization(config)
    carried = [root / n for n in source.stored.companions if not (unquantized and n == HF_QUANT)]
    if own.is_file() and config == (source.stored.native_config or source.stored.config):
        carried.insert(0, own)
    elif config:
        made.insert(0, ("config.json", indented(config)))
    left = [p.name for p in carried if p.name in file_layout.dropped]
    if unused := [p.name for p in carried if not ours.carries(p.name)]:
        notes.append(f"not copied, only a trainer uses them: {some(unused, 8)}")
        carried = [p for p in carried if p.name not in unused]
        left = [n for n in left if n not in unused]
    if left:
        notes.append(f"not copied, they belong to the ranks of the source: {some(left, 8)}")
    gone = {*file_layout.dropped, *(name for name, _ in made), *(p.name for p in file_layout.copied)}
    files = [(p.name, file_now(p)) for p in (*file_layout.copied, *(p for p in carried if p.name not in gone))]
    taken = {f.name for f in file_layout.files} | {n for n, _ in made}
    return [*files, *carried_below(source, taken, notes)], made


def carried_below(source: Checkpoint, taken: AbstractSet[str], notes: list[str]) -> list[tuple[str, DataFile]]:
    """(name in DST, file) of what is carried from the subdirectories of SRC; notes say what is not, there and beside.

    ``taken`` are names of files in DST.
    """
    if not (source.path.is_dir() or is_index(source.path.name)):
        return []  # one file of a directory that may hold anything
    root = source.stored.root
    own = [*(f.place for f in source.stored.files), *(root / n for n in source.stored.companions)]
    own += [*(root / n / "config.json" for n in source.stored.beside), *(root / n for n in source.stored.known)]
    below = files_below(root, own, source.capabilities.own_files)
    left = list(map(str, below.left))
    carried = []
    for name in below.carried:
        if taken.isdisjoint([name, *map(str, PurePosixPath(name).parents)]):
            carried.append((name, file_now(root / name)))
        else:
            left.append(f"{name} (the output has a file of that name)")
    for where, names in (
        ("", [n for n in left if "/" not in n]),
        (" from subdirectories", [n for n in left if "/" in n]),
    ):
        if names:
            notes.append(f"not copied{where}: {some(names, 8)}")
    return carried


def target_config(theirs: Dialect, goal: Goal, names: Iterable[str]) -> dict[str, Any]:
    """config.json for the target, whose tensors are called ``names``: fields that name parallel sizes, the dtype or the
    form of the model are updated, the rest is kept. ``theirs`` is the dialect of the source."""
    sizes = {"tp": goal.mesh.tp, "pp": goal.mesh.pp, "ep": goal.mesh.ep}
    values: dict[str, Any] = {f: sizes[d] for d, fields in PARALLEL_FIELDS.items() for f in fields}
    if goal.dtype:
        values |= dict.fromkeys(DTYPE_FIELDS, DTYPES[goal.dtype].numpy)
    config = with_fields(goal.context.config, values)
    if goal.dialect.name != theirs.name:
        config = theirs.published_config(config)
    return goal.dialect.own_config(config, names)
