"""Judges a directory: its files, the tensors of every rank, its config and what lies beside them.

Shares nothing with the package: names, cuts and bytes are worked out from the model that the walk began with.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.walk import names, paddle, states
from tests.walk.bits import Raw, Wrong, difference, read_with_metadata
from tests.walk.forms import leaves
from tests.walk.models import Model
from tests.walk.names import Style, Table
from tests.walk.ranks import Grid, Habit, all_ranks, whole

DTYPES = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}
PADDLE = ("unified", "hybrid", "zcc", "flex")


@dataclass(frozen=True)
class State:
    """What a checkpoint must be."""

    model: Model
    table: Table
    """Names as they are in the files."""
    format: str = "hf"
    naming: str = "hf"
    style: Style = field(default_factory=Style)
    grid: Grid = field(default_factory=Grid)
    multiple: int = 1
    """Of the rows of a vocabulary in rank files."""
    beside: Mapping[str, bytes] = field(default_factory=dict)
    optional: frozenset[str] = frozenset()
    """Tensors that need not be there: a stored head that is the embedding, which an engine has once."""
    dtype: str = ""
    """What everything was cast to last."""
    config_kept: bool = True
    """The config has never been through a format with fields of its own."""
    sizes_only: bool = False
    """It has been through one that has no field for the rest."""
    version: str = ""
    """Of Paddle's software, whose names these are."""
    target: str = ""
    """Of the one that shall read it."""
    shards: int = 1
    """Ranks that share an optimizer's state."""
    stripped: bool = False
    """The file that says how it was shared has been deleted."""
    optimizer: states.Optimizer | None = None
    """What a trainer's checkpoint has beside its weights."""

    def plain(self) -> Table:
        """The tensors that are still there, under the names of one for each projection."""
        there = {name for form in self.table.values() for name in leaves(form)}
        return {n: f for n, f in names.plain(self.model).items() if n in there}

    def named(self, naming: str, style: Style) -> Table:
        """The table under other names. Raises Unclear."""
        plain = self.plain()
        if naming == "hf":
            return names.hugging_face(self.model, plain, style)
        if naming == "paddle":
            return paddle.names(self.model, plain, self.version)
        return {"vllm": names.vllm, "deepseek": names.deepseek, "trtllm": names.trtllm}[naming](self.model, plain)

    @property
    def staged(self) -> State:
        """With vLLM's tied embedding under the names that it has on one stage, or on several."""
        model = self.model
        if self.naming != "vllm" or not model.tied or model.tie == "differs" or model.kind == "gemma2":
            return self
        table = {}
        for name, form in self.table.items():
            if leaves(form) != [model.embedding]:
                table[name] = form
            elif self.grid.pp > 1:
                table[names.vllm_embedding(model)] = form
                table["lm_head.weight"] = form
            else:
                table["lm_head.weight"] = form
        return replace(self, table=table)

    @property
    def habit(self) -> Habit:
        if self.format == "vllm":
            return Habit(64, ragged_experts=False)
        if self.format == "deepseek":
            return Habit(0, ragged_experts=False)
        if self.format in PADDLE:
            return paddle.HABIT
        if self.format == "trtllm":
            return Habit(ragged_experts=False, embedding_whole="transformer.vocab_embedding.weight", local_layers=True)
        return Habit(self.multiple)

    def ranks(self) -> list[dict[str, Raw]]:
        """What every rank must hold. Raises Unclear and Indivisible."""
        return all_ranks(self.model, self.table, self.grid, self.habit)


_NAMES = {
    "ranks": r"rank-(?P<rank>\d{5})-of-(?P<world>\d{5})\.safetensors",
    "deepseek": r"model(?P<rank>\d+)-mp(?P<world>\d+)\.safetensors",
    "trtllm": r"rank(?P<rank>\d+)\.safetensors",
    "vllm": r"model-(?:rank-(?P<rank>\d+)|pp-(?P<pp>\d+)-tp-(?P<tp>\d+))-part-(?P<part>\d+)\.safetensors",
    "hf": r"model(?:-(?P<n>\d{5})-of-(?P<of>\d{5}))?\.safetensors",
}
_CACHE_SCALE = re.compile(r".*\._[kvq]_scale|.*\._prob_scale")


def judge(path: Path, state: State, *, limit: int = 0) -> None:
    """Raises Wrong where the directory is not what it must be. ``limit``: bytes of tensors in a file."""
    if state.format in PADDLE:
        _beside(path, state, set())
        if paddle.judged(state.model, state.grid) and not state.optional:
            _paddle(path, state)
        return
    files = {p.name: p for p in path.iterdir() if re.fullmatch(_NAMES[state.format], p.name)}
    _beside(path, state, set(files))
    if state.format == "hf":
        _whole(path, state, files, limit)
    else:
        _ranks(state, files, limit)
    _config(path, state)


def _paddle(path: Path, state: State) -> None:
    optimizer, model, table, grid = state.optimizer, state.model, state.table, state.grid
    masters = optimizer.kinds["master"] if optimizer else None
    if masters and model.tied and model.output in model.tensors and model.embedding in masters.tensors:
        masters = replace(masters, tensors={**masters.tensors, model.output: masters.tensors[model.embedding]})
    if state.format == "unified":
        paddle.judge_unified(path, model, table, state.target)
    elif state.format == "flex":
        paddle.judge_flex(path, model, table, grid, masters)
    elif grid.ep == 1:
        paddle.judge_hybrid(path, model, table, grid, state.shards, masters)
    if optimizer:
        states.judge_states(path, state.format, optimizer, model, table, grid)


def _whole(path: Path, state: State, files: Mapping[str, Path], limit: int) -> None:
    wanted = whole(state.model, state.table)
    found: dict[str, Raw] = {}
    where: dict[str, str] = {}
    for name, file in sorted(files.items()):
        tensors, metadata = read_with_metadata(file)
        if metadata.get("format") != "pt":
            raise Wrong(f"{name}: __metadata__ is {metadata}")
        if again := found.keys() & tensors.keys():
            raise Wrong(f"{name}: {sorted(again)[:3]} are in another file too")
        if limit and len(tensors) > 1 and sum(t.bits.nbytes for t in tensors.values()) > limit:
            raise Wrong(f"{name}: larger than {limit} bytes")
        found |= tensors
        where |= dict.fromkeys(tensors, name)
    optional = {n: f for n, f in names.plain(state.model).items() if n in state.optional and n in found}
    difference(found, {**wanted, **whole(state.model, optional)}, "hf")
    index = path / "model.safetensors.index.json"
    if len(files) > 1 and not index.exists():
        raise Wrong(f"{len(files)} files and no index")
    if index.exists():
        said = json.loads(index.read_text(encoding="utf-8"))
        if said["weight_map"] != where:
            raise Wrong("the index is not that of the files")
        if said["metadata"]["total_size"] != sum(t.bits.nbytes for t in found.values()):
            raise Wrong(f"total_size of the index is {said['metadata']['total_size']}")


def _ranks(state: State, files: Mapping[str, Path], limit: int) -> None:
    grid = state.grid
    found: list[dict[str, Raw]] = [{} for _ in range(grid.world)]
    for name, file in sorted(files.items()):
        m = re.fullmatch(_NAMES[state.format], name)
        assert m
        at = m.groupdict()
        rank = int(at["pp"]) * grid.width + int(at["tp"]) if at.get("pp") else int(at["rank"])
        if rank >= grid.world or int(at.get("world") or grid.world) != grid.world:
            raise Wrong(f"{name} beside {grid.world} ranks")
        tensors, _ = read_with_metadata(file)
        if state.format == "vllm":
            scales = {n for n in tensors if _CACHE_SCALE.fullmatch(n)}
            for n in scales:
                if tensors[n].dtype != "F32" or tensors[n].bits.shape != () or tensors[n].bits != 0x3F800000:
                    raise Wrong(f"{name}: `{n}` is not 1.0")
            tensors = {n: t for n, t in tensors.items() if n not in scales}
            if limit and len(tensors) > 1 and sum(t.bits.nbytes for t in tensors.values()) > limit:
                raise Wrong(f"{name}: larger than {limit} bytes")
        if again := found[rank].keys() & tensors.keys():
            raise Wrong(f"{name}: {sorted(again)[:3]} are in another part too")
        found[rank] |= tensors
    for rank, wanted in enumerate(state.ranks()):
        for name in [n for n, t in found[rank].items() if not t.bits.size and n not in wanted]:
            del found[rank][name]  # a stack of experts of which the rank has none
        difference(found[rank], wanted, f"{state.format} rank {rank} of {grid}")


def _beside(path: Path, state: State, tensors: set[str]) -> None:
    """Companions are there, with their bytes, and nothing else is."""
    known = {"config.json", "model.safetensors.index.json", "ckpttool.manifest.json", "ckpttool.merge.json"}
    found = {str(p.relative_to(path)) for p in path.rglob("*") if p.is_file()} - tensors - known
    if state.format in PADDLE:
        found = {n for n in found if n in state.beside}
    if found != state.beside.keys():
        raise Wrong(
            f"beside the tensors: missing {sorted(state.beside.keys() - found)[:4]},"
            f" unexpected {sorted(found - state.beside.keys())[:4]}"
        )
    for name, data in state.beside.items():
        if (path / name).read_bytes() != data:
            raise Wrong(f"{name} has other bytes")


def _config(path: Path, state: State) -> None:
    found = json.loads((path / "config.json").read_text(encoding="utf-8"))
    wanted = expected_config(state)
    if state.format == "trtllm":
        mapping = found.get("mapping", {})
        grid = state.grid
        degrees = {"world_size": grid.world, "tp_size": grid.tp, "pp_size": grid.pp}
        if {k: mapping.get(k) for k in degrees} != degrees:
            raise Wrong(f"config.json: mapping is {mapping}")
        return
    if not state.config_kept:
        inner, outer = _flat(found), _flat(wanted)
        lost = {"dtype", "torch_dtype", "text_config"}
        sizes = {
            "architectures",
            "model_type",
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "vocab_size",
            "intermediate_size",
        }
        for key in sorted(sizes.intersection(outer) if state.sizes_only else {*outer} - lost):
            if inner.get(key) != outer[key]:
                raise Wrong(f"config.json: {key} is {inner.get(key)}, must be {outer[key]}")
        return
    free = {"tie_word_embeddings"} if state.model.tie == "differs" else set()
    _same_fields(found, wanted, "config.json", free)


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    return {**config, **config.get("text_config", {})}


def expected_config(state: State) -> dict[str, Any]:
    """The config of the model, with the dtype that everything was cast to, and the prediction layers that are left."""
    predicts = names.without_prediction(state.model, state.table).keys() != state.table.keys()

    def block(config: Mapping[str, Any]) -> dict[str, Any]:
        out = {}
        for key, value in config.items():
            said = key in ("dtype", "torch_dtype") and state.dtype
            out[key] = block(value) if key == "text_config" else DTYPES[state.dtype] if said else value
            if key == "num_nextn_predict_layers" and not predicts:
                out[key] = 0
        return out

    return block(state.model.config)


def _same_fields(found: Mapping[str, Any], wanted: Mapping[str, Any], where: str, free: set[str]) -> None:
    for key in sorted({*found, *wanted} - free):
        have, want = found.get(key, "(absent)"), wanted.get(key, "(absent)")
        if isinstance(have, dict) and isinstance(want, dict):
            _same_fields(have, want, f"{where}: {key}", free)
        elif have != want:
            raise Wrong(f"{where}: {key} is {have}, must be {want}")
