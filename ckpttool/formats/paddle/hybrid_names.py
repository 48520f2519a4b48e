"""Names of the files of a hybrid-parallel Paddle checkpoint, and its model_meta.json.

::

    model_state.tp01_pp00_shard03_moe00.pdparams    a part of the suffix for every degree above 1, 2 digits or more
    model_state.tp01_moe_sharding02.pdparams        the rank among the experts, where no model_meta.json is written
    optimizer.tp01_pp00_shard03_moe00.pdopt         ema.* likewise
    model.shard00.safetensors                       instead of model_state, with save_to_hf

    model_meta.json
      parallel_config   pp_degree, mp_degree, sharding_degree, ep_degree, moe_sharding_degree (paddlenlp: the first
                        three and vpp_degree)
      sharding_metas    tp00_pp00, with experts over ranks tp00_pp00_ep00
        structure_name_mapping   structured name -> name of the parameter, in the order of the state dict
        param_meta               structured name -> [shape on the rank, dtype, is_distributed, no_sync]
        param2rank               sharding v1: name of the parameter -> shard
        sharding_strategy        ShardingV1 | ShardingV2 | MuonSharding

Sources: ``TrainingArguments.optimizer_name_suffix``, ``weight_name_suffix`` and ``sharded_name_suffix``,
``_add_variant``, and ``trainer/utils/sharding_io.py`` of paddleformers 1.2.0 and paddlenlp 3.0.0b4; the numbers are
``phi::DataType`` (measured with paddle 3.0.0 and 3.3.1), older ones those of ``framework::proto::VarType``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ckpttool.errors import CorruptError, UnsupportedError

META = "model_meta.json"

STRUCTURED = "StructuredToParameterName@@"
"""Key of a .pdparams file: structured name -> name of the parameter."""

DTYPE_INTS = {
    "BOOL": 1,
    "U8": 2,
    "I8": 3,
    "I16": 5,
    "I32": 7,
    "I64": 9,
    "F32": 10,
    "F64": 11,
    "F16": 15,
    "BF16": 16,
    "F8_E4M3": 17,
    "F8_E5M2": 18,
}
"""Numbers of the dtypes in ``param_meta``."""

# 4 and 5 are uint16 and int16 in phi, which no parameter is.
_DTYPE_OF = {number: name for name, number in DTYPE_INTS.items()} | {4: "F16", 5: "F32", 22: "BF16"}

_SUFFIX = re.compile(
    r"(?:tp(?P<tp>\d{2,}))?(?:_?pp(?P<pp>\d{2,}))?(?:_?shard(?P<shard>\d{2,}))?"
    r"(?:_?moe(?P<moe>\d{2,}))?(?:_?moe_sharding(?P<ep>\d{2,}))?\Z"
)
_LABELS = {"tp": "tp", "pp": "pp", "shard": "shard", "moe": "moe", "ep": "moe_sharding"}
_FILE = re.compile(
    r"(?P<kind>model_state|optimizer|ema|model)(?:\.(?P<suffix>[^.]+))?\.(?P<ext>pdparams|pdopt|safetensors)"
)
_EXTENSIONS = {"model_state": "pdparams", "optimizer": "pdopt", "ema": "pdopt", "model": "safetensors"}


class Suffix(NamedTuple):
    """The ranks in a file's name; None for a part that it does not have."""

    tp: int | None = None
    pp: int | None = None
    shard: int | None = None
    moe: int | None = None
    """Data-parallel rank, of models whose experts are spread over the data-parallel ranks."""
    ep: int | None = None
    """Rank among the experts; only in names of weights without a model_meta.json."""

    def __str__(self) -> str:
        return "_".join(f"{_LABELS[k]}{v:02d}" for k, v in self._asdict().items() if v is not None)

    @property
    def axes(self) -> tuple[str, ...]:
        """The parts that it has."""
        return tuple(k for k, v in self._asdict().items() if v is not None)


def suffix(**parts: tuple[int, int]) -> str:
    """The suffix for ``tp=(rank, degree)`` and so on: a part is there when its degree is above 1."""
    return str(Suffix(**{k: rank for k, (rank, degree) in parts.items() if degree > 1}))


def parse_suffix(text: str) -> Suffix | None:
    """The inverse; None for anything that Paddle would not have written."""
    m = _SUFFIX.match(text)
    if m is None:
        return None
    found = Suffix(**{k: int(v) for k, v in m.groupdict().items() if v is not None})
    return found if str(found) == text else None


def file_name(kind: str, ranks: Suffix) -> str:
    """``kind`` is ``model_state``, ``optimizer``, ``ema``, or ``model`` for weights in safetensors."""
    return ".".join(p for p in (kind, str(ranks), _EXTENSIONS[kind]) if p)


def parse_file_name(name: str) -> tuple[str, Suffix | None] | None:
    """(kind, ranks) of a file of this family, ranks being None where the suffix is not known; None for other files."""
    m = _FILE.fullmatch(name)
    if m is None or _EXTENSIONS[m["kind"]] != m["ext"]:
        return None
    return m["kind"], parse_suffix(m["suffix"] or "")


def cell_key(tp: int, pp: int, ep: int | None = None) -> str:
    """A key of ``sharding_metas``; ``ep`` only where experts are spread over ranks."""
    return f"tp{tp:02d}_pp{pp:02d}" + ("" if ep is None else f"_ep{ep:02d}")


class ParamMeta(NamedTuple):
    """The entry in model_meta.json of a parameter of one model-parallel rank."""

    shape: tuple[int, ...]
    dtype: str
    distributed: bool
    """Tensor parallelism cuts it; along which axis is not said."""
    no_sync: bool = False
    """An expert's: it is not the same on all ranks of the sharding group."""

    def to_json(self, *, nlp: bool) -> list[Any]:
        held: list[Any] = [list(self.shape), DTYPE_INTS[self.dtype], self.distributed]
        return held if nlp else [*held, self.no_sync]


@dataclass(slots=True)
class CellMeta:
    """One entry of ``sharding_metas``; names as written."""

    names: dict[str, str]
    params: dict[str, ParamMeta]
    strategy: str
    owners: dict[str, int] = field(default_factory=dict)
    overlap: bool = False


@dataclass(slots=True)
class ModelMeta:
    """model_meta.json."""

    mp: int
    pp: int
    sharding: int
    ep: int
    moe_sharding: int
    """0 without expert parallelism."""
    cells: dict[str, CellMeta]
    nlp: bool = False
    """Written by paddlenlp, which knows no expert parallelism."""

    def to_json(self) -> dict[str, Any]:
        sizes = {"pp_degree": self.pp, "mp_degree": self.mp, "sharding_degree": self.sharding}
        if self.nlp:
            sizes["vpp_degree"] = 1
        else:
            sizes |= {"ep_degree": self.ep, "moe_sharding_degree": self.moe_sharding}
        metas = {}
        for key, cell in self.cells.items():
            metas[key] = {
                "param2rank": cell.owners,
                "structure_name_mapping": cell.names,
                "param_meta": {name: p.to_json(nlp=self.nlp) for name, p in cell.params.items()},
                **({} if self.nlp else {"param_meta_keys": ["shape", "dtype", "is_distributed", "no_sync"]}),
                "sharding_strategy": cell.strategy,
                "enable_overlap": cell.overlap,
            }
        return {"parallel_config": sizes, "sharding_metas": metas}


def parse_meta(data: Mapping[str, Any], where: str) -> ModelMeta:
    """model_meta.json as an object. Raises CorruptError where a field is missing or is something else."""
    sizes, metas = data.get("parallel_config"), data.get("sharding_metas")
    if not isinstance(sizes, dict) or not isinstance(metas, dict):
        raise CorruptError(
            f"{META} has no parallel_config and sharding_metas", where=where, hint="it is not one of Paddle's trainers"
        )

    def size(name: str, default: int | None = None) -> int:
        n = sizes.get(name, default)
        if type(n) is not int or n < 0 or (n == 0 and default is None):
            raise CorruptError(f"{META}: parallel_config.{name} is {n!r}", where=where)
        return n

    cells = {key: _cell(key, cell, where) for key, cell in metas.items()}
    return ModelMeta(
        size("mp_degree"),
        size("pp_degree"),
        size("sharding_degree"),
        max(1, size("ep_degree", 1)),
        size("moe_sharding_degree", 0),
        cells,
        nlp="ep_degree" not in sizes,
    )


def _cell(key: str, cell: Any, where: str) -> CellMeta:
    names = cell.get("structure_name_mapping") if isinstance(cell, dict) else None
    params = cell.get("param_meta") if isinstance(cell, dict) else None
    if not isinstance(names, dict) or not isinstance(params, dict):
        raise CorruptError(f"{META}: sharding_metas.{key} has no structure_name_mapping and param_meta", where=where)
    if not all(isinstance(t, str) for t in names.values()):
        raise CorruptError(f"{META}: structure_name_mapping of {key} holds something that is not a name", where=where)
    owners = cell.get("param2rank") or {}
    return CellMeta(
        dict(names),
        {name: _param(key, name, value, where) for name, value in params.items()},
        str(cell.get("sharding_strategy", "")),
        dict(owners) if isinstance(owners, dict) else {},
        bool(cell.get("enable_overlap", False)),
    )


def _param(key: str, name: str, value: Any, where: str) -> ParamMeta:
    if not isinstance(value, list) or len(value) < 3:
        raise CorruptError(
            f"{META}: param_meta of `{name}` ({key}) is not [shape, dtype, is_distributed, ...]", where=where
        )
    shape, number, distributed = value[:3]
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
        raise CorruptError(f"{META}: the shape of `{name}` ({key}) is {shape!r}", where=where)
    if type(number) is not int or number not in _DTYPE_OF:
        raise UnsupportedError(
            f"{META}: `{name}` ({key}) has dtype {number!r}",
            where=where,
            hint="known numbers: " + ", ".join(f"{n} ({d})" for n, d in sorted(_DTYPE_OF.items())),
        )
    return ParamMeta(tuple(shape), _DTYPE_OF[number], bool(distributed), len(value) > 3 and bool(value[3]))


@dataclass(slots=True)
class CellNames:
    """The parameters of one (stage, tp rank, expert rank); names have global expert ids, in model order."""

    names: dict[str, str]
    """Structured name -> name of the parameter in the optimizer's files."""
    params: dict[str, ParamMeta]
    """Empty without model_meta.json."""


@dataclass(slots=True)
class HybridNames:
    """The names and tables in a hybrid-parallel source's files."""

    writer: str
    """``paddlenlp``, ``paddleformers`` or "" where nothing says it."""
    mp: int
    pp: int
    sharding: int
    ep: int
    """Expert-parallel ranks; of experts over data-parallel ranks their number."""
    moe_sharding: int
    """Ranks that share the optimizer state of one expert rank."""
    data_parallel_experts: bool
    """Files are named ``_moeNN``."""
    strategy: str
    """``ShardingV1``, ``ShardingV2``, ... or "" without model_meta.json."""
    has_meta: bool
    schedule: dict[str, Any] | None
    """``LR_Scheduler`` of the optimizer's files."""
    local_experts: bool
    """Experts are numbered from 0 in every rank's files."""
    cells: dict[tuple[int, int, int], CellNames]
    """Cells by (stage, tp rank, expert rank)."""

    @property
    def tables(self) -> dict[tuple[int, int], dict[str, str]]:
        """(stage, expert rank) -> structured name -> name of the parameter, which is the same on all tp ranks."""
        out: dict[tuple[int, int], dict[str, str]] = {}
        for (pp, _, ep), cell in self.cells.items():
            out.setdefault((pp, ep), cell.names)
        return out
