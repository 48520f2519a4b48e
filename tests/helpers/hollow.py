"""Checkpoints of any size on hardly any disk: true headers, and data that are holes of sparse files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from ckpttool.checkpoint import OpenOptions
from ckpttool.containers.safetensors import layout_file, read_header
from ckpttool.core.dtypes import nbytes
from ckpttool.core.plan import Plan
from ckpttool.layout.family import find_family, load_family
from ckpttool.layout.shapes import declared_tensors
from ckpttool.ops.reshard import prepare
from ckpttool.ops.size.model import load
from ckpttool.ops.size.stored import WantedRecipe, apply
from ckpttool.targeting.target import Target
from tests.convert_json import programs
from tests.convert_json.programs import dumped, operator, parameter, record

Tensor = tuple[str, str, tuple[int, ...]]
"""(name, dtype, shape)"""

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
"""What config.json of DeepSeek's models says of their weights."""

CONFIGS: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parent.parent / "size" / "data" / "configs.json").read_text()
)
"""Public models by name."""


def published(root: Path, config: Mapping[str, Any], *, files: int, fp8: bool = False) -> int:
    """A public model as Hugging Face has it, its tensors shared out to ``files`` files; returns how many they are.

    ``fp8``: its matrices in blocks of 128 x 128 with a scale each.
    """
    family = load_family(find_family(config) or "", config)
    root.mkdir(parents=True)
    (root / "config.json").write_text(json.dumps({**config, "quantization_config": FP8} if fp8 else config))
    if fp8:
        plain = root / "plain.json"
        plain.write_text(json.dumps(config))
        rows = apply(load(plain, OpenOptions(), None, mtp=True), WantedRecipe("block")).rows()
        tensors = [(r.name, r.dtype, r.shape) for r in rows]
        plain.unlink()
    else:
        tensors = [(t.name, t.dtype, t.shape) for t in declared_tensors(family, config)]
    tensors = family.in_model_order(sorted(tensors), (), lambda t: t[0].removesuffix("_scale_inv"))
    shards(root, tensors, files)
    return len(tensors)


def shards(root: Path, tensors: Sequence[Tensor], files: int, stem: str = "model") -> None:
    """``STEM-0000N-of-0000M.safetensors`` of about one size, and their index."""
    sizes = [nbytes(dtype, prod(shape)) for _, dtype, shape in tensors]
    total, held = sum(sizes), 0
    groups: list[list[Tensor]] = [[] for _ in range(files)]
    for tensor, size in zip(tensors, sizes, strict=True):
        groups[min(held * files // max(total, 1), files - 1)].append(tensor)
        held += size
    groups = [g for g in groups if g]
    weight_map: dict[str, str] = {}
    for i, group in enumerate(groups):
        name = f"{stem}-{i + 1:05d}-of-{len(groups):05d}.safetensors"
        header, _, size = layout_file(group, {"format": "pt"})
        _hole(root / name, size, [(0, header)])
        weight_map |= dict.fromkeys((t[0] for t in group), name)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (root / f"{stem}.safetensors.index.json").write_text(json.dumps(index))


def planned(root: Path, plan: Plan) -> None:
    """The files that a plan would write, with their headers."""
    for output in plan.outputs:
        path = root / output.name
        path.parent.mkdir(parents=True, exist_ok=True)
        if output.carried:
            path.write_bytes(Path(output.carried).read_bytes())
        else:
            _hole(path, output.size, output.literals)


def trained(root: Path, source: Path, *, files: int) -> int:
    """A unified checkpoint of Paddle's with the weights of ``source`` and, of each, a master weight and two moments."""
    plan = prepare(source, OpenOptions(), Target(format="unified")).plan
    root.mkdir(parents=True)
    names = [(t.name, plan.outputs[t.file].name) for u in plan.units for t in u.stored_tensors]
    planned(root, plan)
    held = {t.name: t for name in {file for _, file in names} for t in read_header(root / name).tensors}
    model = [(n, held[n].dtype, held[n].shape) for n, _ in names]
    for path in root.glob("model*"):
        path.unlink()
    shards(root, model, files)
    shards(root, [(n, "F32", shape) for n, _, shape in model], files, "master_weights")
    states = [(f"{n}/{state}", "F32", shape) for n, _, shape in model for state in ("moment1_0", "moment2_0")]
    shards(root, states, files, "optimizer")
    return 4 * len(model)


def program(root: Path, parameters: int) -> None:
    """A Paddle program with so many parameters, each used by one operator, and the file of their records."""
    root.mkdir(parents=True)
    made = [(f"linear_{i}.w_0", "F32", [4, 4]) for i in range(parameters)]
    used = [operator("1.matmul", [0, i + 1], [parameters + i + 1]) for i in range(parameters)]
    made_by = [parameter(i + 1, *p) for i, p in enumerate(made)]
    (root / "model.json").write_bytes(dumped(programs.program([*made_by, *used])))
    data = b"".join([record("F32", [4, 4], bytes(64)) for _ in made])
    (root / "model.pdiparams").write_bytes(data)


def _hole(path: Path, size: int, literals: Sequence[tuple[int, bytes]]) -> None:
    with path.open("wb") as f:
        f.truncate(size)
        for offset, data in literals:
            f.seek(offset)
            f.write(data)
