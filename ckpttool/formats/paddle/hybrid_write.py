"""Writing Paddle's hybrid-parallel checkpoints and Zero-Cost Checkpoints.

Two families, decided by the sharding degree N (``WriteRequest.sharding``)::

    N = 1   model_state.tp00_pp01.pdparams           whole weights of the rank
            optimizer.tp00_pp01.pdopt                moments, master_weights, LR_Scheduler
    N > 1   model_state.tp00_pp01_shard03.pdparams   only weights that have no master weight
            optimizer.tp00_pp01_shard03.pdopt        the shard's part of moments and master_weights
            ema.tp00_pp01_shard03.pdopt              zero-cost only: {structured: fp32 weight, master_weights: {...}}
            model_meta.json                          names, shapes and dtypes of every (tp, pp[, ep]) cell

A part of a suffix is there when its degree is above 1. The loader of the second family asserts a sharding degree above
1, hence the first. With expert parallelism a file's expert rank is ``(shard % ds) * mp + tp`` with ``ds = ep / mp``,
and experts are shared out over ``N / ds`` shards. Facts are those of paddleformers 1.2.0 (trainer/utils/sharding_io.py,
trainer/training_args.py, trainer/utils/zero_cost_checkpoint.py) and paddlenlp 3.0.0b4, compared with checkpoints that
they wrote.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any, NamedTuple

from ckpttool.containers.paddle_pickle import read_pickle
from ckpttool.containers.pickle_write import Hole, layout_pickle
from ckpttool.core.catalog import RankTensor
from ckpttool.core.dtypes import nbytes
from ckpttool.core.mesh import Coords, Mesh
from ckpttool.errors import IncompleteError, LayoutError, UnsupportedError, UsageError
from ckpttool.formats.base import FileLayout, OutFile, WriteRequest
from ckpttool.formats.paddle import hybrid_names
from ckpttool.formats.paddle.config import base_prefix, fp8_dtype, module_of, resume_flags, target_config
from ckpttool.formats.paddle.hybrid_names import HybridNames, Suffix
from ckpttool.formats.paddle.sharding import ITEMSIZE, TrainableParam, buffers, flat_slices, owner_order, owners
from ckpttool.formats.paddle.training import SCHEDULE_FILE, left_out, schedule_file, schedule_of

MASTER = "_fp32_master_0"
"""Paddle's suffix of a parameter's name for its master weight (``Optimizer._gen_master_weight_var_name``)."""

_STATES = ("moment1_0", "moment2_0", "beta1_pow_acc_0", "beta2_pow_acc_0")
"""States in the order of Paddle's optimizers."""

_LEFT = re.compile(r"rng_state(_\d+)?\.pth|save[d]?_signal(_TMP)?_\d+|model_meta\.json|\.checkpoint_done")
_LAYER = re.compile(r"(?<![^.])(?:layers|h|blocks)\.(\d+)\.")
_EXPERT = re.compile(r"((?:.*\.)?experts\.)(\d+)(\..*)")
_TNAME = re.compile(r"(?P<layer>(?P<prefix>.+)_\d+)\.(?P<rest>\w+)")

_MODULES = (
    "q_proj", "q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj",
    "k_proj", "v_proj", "qkv_proj", "o_proj", "q_norm", "k_norm",
    "gate_proj", "up_proj", "gate_up_fused_proj", "up_gate_proj", "down_proj",
    "gate", "input_layernorm", "post_attention_layernorm", "norm", "lm_head",
)  # fmt: skip
"""Modules of a decoder layer in the order in which Paddle's models create them."""


_Tables = Mapping[tuple[int, int], Mapping[str, str]]
"""(stage, expert rank) -> structured name with global expert ids -> name of the parameter, in model order."""


@dataclass(slots=True)
class _RankParam:
    """One parameter's tensors on one rank."""

    name: str
    """Name as in the request: expert ids are global."""
    expert: bool = False
    model: RankTensor | None = None
    master: RankTensor | None = None
    ema: RankTensor | None = None
    states: dict[str, RankTensor] = field(default_factory=dict)
    written: str = ""
    """Structured name in the files."""
    tname: str = ""
    """Name of the parameter in the optimizer's files."""

    @property
    def local(self) -> RankTensor:
        if self.model is None:
            raise IncompleteError(
                f"there is optimizer state of `{self.name}`, but no such weight",
                hint="the shapes and dtypes of model_meta.json come from the weights",
            )
        return self.model

    @property
    def numel(self) -> int:
        return prod(self.local.shape)

    @property
    def is_cut(self) -> bool:
        """Whether the rank has a part of the parameter only."""
        return sum(logical.volume for _, logical in self.local.boxes) < prod(self.local.whole)

    @property
    def accumulator(self) -> str:
        """Prefix of its moments' names."""
        return self.tname + (MASTER if self.master is not None else "")


@dataclass(slots=True)
class _RankParams:
    """The parameters of one model-parallel rank, in model order."""

    pp: int
    tp: int
    ep: int
    rank: int
    params: list[_RankParam]
    trained: list[_RankParam] = field(default_factory=list)
    """Parameters of the optimizer, which alone are shared out."""
    states: tuple[str, ...] = ()
    """The kinds of optimizer state that there are, in the order of the files."""
    masters: bool = False
    """Some parameters have master weights."""


@dataclass(slots=True)
class _Build:
    """The files as they become known."""

    files: list[OutFile] = field(default_factory=list)
    places: list[dict[str, tuple[int, int]]] = field(default_factory=list)
    ranks: list[list[RankTensor]] = field(default_factory=list)
    rank_files: list[list[int]] = field(default_factory=list)

    def add(self, name: str, content: _Content) -> None:
        """Lay one file of the newest rank out."""
        written = layout_pickle(content.value)
        at = len(self.files)
        self.files.append(OutFile(name, written.size, written.literals))
        self.rank_files[-1].append(at)
        for path, tensors in content.tensors.items():
            offset = written.places[path]
            for t in tensors:
                self.places[-1][t.slot] = (at, offset)
                self.ranks[-1].append(t)
                offset += nbytes(t.dtype, prod(t.shape), where=t.name)


class _Content:
    """A file's nested dict, with what goes into its holes."""

    def __init__(self) -> None:
        self.value: dict[str, Any] = {}
        self.tensors: dict[tuple[str, ...], list[RankTensor]] = {}

    def put(self, path: tuple[str, ...], tensors: list[RankTensor], shape: tuple[int, ...], name: str | None) -> None:
        """A tensor of ``shape`` made of ``tensors``, under the keys of ``path``."""
        at = self.value
        for key in path[:-1]:
            at = at.setdefault(key, {})
        at[path[-1]] = Hole(tensors[0].dtype, shape, name)
        self.tensors[path] = tensors

    def put_held(self, path: tuple[str, ...], t: RankTensor, held: _ParamShare, name: str) -> None:
        """Add the elements of an optimizer's tensor that a shard has."""
        if held.whole:
            self.put(path, [t], t.shape, name)
        else:
            self.put(path, flat_slices(t, held.start, held.stop), (held.stop - held.start,), name)


def write_hybrid(request: WriteRequest, *, ema: bool) -> FileLayout:
    """Files, sizes and literals of a hybrid-parallel checkpoint; with ``ema`` of a Zero-Cost Checkpoint.

    Raises LayoutError for sizes that Paddle's groups do not allow, UsageError for a sharding that makes no sense,
    IncompleteError for optimizer state without its weight, UnsupportedError for dtypes that would not be read back.
    """
    mesh, shards = request.mesh, request.sharding
    if shards == 1:
        _check_dtypes(request)
    version = (request.sharding_version or "v2").lower()
    source = request.native if isinstance(request.native, HybridNames) else None
    nlp = (request.version or (source.writer if source else "")).startswith("paddlenlp")
    _check_sizes(request, version, nlp=nlp, ema=ema)
    split = mesh.ep // mesh.tp if mesh.ep > 1 else 1
    notes = left_out(request)
    cells = [_cell(request, c) for c in mesh.all_coords()]
    _settle_masters(cells, shards, notes)
    tables = source.tables if source is not None else {}
    order = _order_key(tables)
    for cell in cells:
        cell.params.sort(key=partial(order, cell.pp))
    _choose_trained(cells)
    for cell in cells:
        _local_experts(cell, local=source is not None and source.local_experts)
    _name(cells, tables, mesh.pp, notes)
    schedule = _schedule(request, source, notes) if not ema else None

    averaged = ema and any(p.ema for c in cells for p in c.params)
    trained = any(c.masters or c.states for c in cells)
    # An optimizer without state (SGD) has a file, too.
    trained = trained or (request.training is not None and source is not None and source.schedule is not None)

    build = _Build()
    by_coords = {(c.pp, c.tp, c.ep): c for c in cells}
    shares = {c.rank: _ShardShares(c, shards, version, mesh) for c in cells}
    # The order of ranks of fleet's topology: pp slowest, then sharding, then mp.
    for pp in range(mesh.pp):
        for shard in range(shards):
            for tp in range(mesh.tp):
                ep = (shard % split) * mesh.tp + tp if mesh.ep > 1 else 0
                cell = by_coords[pp, tp, ep]
                build.places.append({})
                build.ranks.append([])
                build.rank_files.append([])
                if cell.rank not in request.chosen:
                    continue
                ranks = Suffix(tp if mesh.tp > 1 else None, pp if mesh.pp > 1 else None, shard if shards > 1 else None)
                share = shares[cell.rank]
                build.add(hybrid_names.file_name("model_state", ranks), _model_file(share, shard))
                if trained:  # by any rank: the optimizer of each writes a file, be it empty
                    content = _optimizer_file(share, shard, schedule, zero_cost=ema)
                    build.add(hybrid_names.file_name("optimizer", ranks), content)
                if averaged:
                    build.add(hybrid_names.file_name("ema", ranks), _ema_file(share, shard))
    if not any(c.states for c in cells):
        notes.append("the source has no moments: the optimizer starts afresh when training is resumed")
    if ema and not averaged:
        notes.append("the source has no EMA weights: no ema.*.pdopt is written")
    small = [(f"saved_signal_{rank}", b"1") for rank in range(len(build.ranks))]
    if shards > 1:
        small.append((hybrid_names.META, _meta(cells, shares, request, source, nlp=nlp)))
    return FileLayout(
        build.files, build.places, notes, build.rank_files, build.ranks,
        generated=(*small, *schedule_file(request)),
        dropped=tuple(n for n in request.companions if _LEFT.fullmatch(n)),
        config=target_config(request.config, request.version, request.dtype) if request.version else None,
        usage=resume_flags(request, "sharding_io"),
    )  # fmt: skip


def _check_dtypes(request: WriteRequest) -> None:
    """Raises UnsupportedError for weights that Paddle, and ckpttool, would take for another dtype: numpy has neither
    bfloat16 nor FP8, and only the meta data of a sharded save says which is meant.
    """
    fp8 = fp8_dtype(request.config)
    for t in (t for rank in request.ranks for t in rank if t.component == "model"):
        taken = "BF16" if t.dtype in ("U16", "BF16") else t.dtype
        if t.dtype == "I8" or t.dtype.startswith("F8_"):
            taken = fp8 if fp8 and len(t.shape) > 1 else "I8"
        if taken != t.dtype:
            raise UnsupportedError(
                f"`{t.name}` is {t.dtype}, and these files would be read as {taken}: they do not record dtypes",
                hint="write --to unified or flex; or another dtype, where that will do: --dtype",
            )


def _check_sizes(request: WriteRequest, version: str, *, nlp: bool, ema: bool) -> None:
    mesh, shards = request.mesh, request.sharding
    if shards < 1:
        raise UsageError(f"--sharding-out is {shards}", hint="parallel sizes start at 1")
    if version not in ("v1", "v2"):
        raise UsageError(f"there is no sharding version `{version}`", hint="choose v1 or v2")
    if ema and shards == 1:
        raise UsageError(
            "a Zero-Cost Checkpoint has a sharded optimizer",
            hint="set the number of ranks: --sharding-out 2 or more; or write --to hybrid",
        )
    if (mesh.ep == 1 and mesh.tp % mesh.etp) or (mesh.ep > 1 and (mesh.etp > 1 or mesh.ep % mesh.tp)):
        raise LayoutError(
            f"Paddle's expert groups cannot have {mesh}",
            hint="ep must be a multiple of tp, and experts that are spread over ranks are not cut (etp 1)",
        )
    if mesh.ep == 1:
        return
    if nlp:
        raise UnsupportedError(
            "the sharded checkpoints of paddlenlp 3.0 know no expert parallelism",
            hint="write --ep-out 1, or for another version: --target paddleformers-1.2",
        )
    split = mesh.ep // mesh.tp
    if shards == 1 or shards % split:
        raise LayoutError(
            f"ep {mesh.ep} with tp {mesh.tp} spreads experts over {split} sharding ranks: "
            f"a sharding degree of {shards} does not do",
            hint=f"--sharding-out must be a multiple of {split} and above 1",
        )
    if version == "v1":
        raise LayoutError(
            "sharding v1 shares whole parameters out over one group, but experts have a group of their own",
            hint="use --sharding-out N:v2 with expert parallelism",
        )


# What a rank holds.


def _cell(request: WriteRequest, coords: Coords) -> _RankParams:
    params: dict[str, _RankParam] = {}
    for t in request.ranks[coords.rank]:
        p = params.setdefault(t.name, _RankParam(t.name))
        # Where experts are spread over ranks, a numbered one is on some of them only.
        p.expert = p.expert or t.expert or (request.mesh.ep > 1 and _EXPERT.fullmatch(t.name) is not None)
        if t.component == "model":
            p.model = t
        elif t.component == "master_weights":
            p.master = t
        elif t.component == "ema":
            p.ema = t
        else:
            p.states[t.state] = t
    ep = coords.ep if request.mesh.ep > 1 else 0
    return _RankParams(coords.pp, coords.tp, ep, coords.rank, list(params.values()))


def _settle_masters(cells: Sequence[_RankParams], shards: int, notes: list[str]) -> None:
    """Half-precision parameters have master weights, fp32 parameters have none.

    Family B stores a weight only once, as its master weight, so without any they are made from the weights. A source
    that has both of an fp32 parameter loses nothing: the master weight, which training goes on from, is the weight.
    """
    every = [p for c in cells for p in c.params]
    for p in every:
        if p.model is not None and p.master is not None and p.model.dtype == "F32":
            p.model, p.master = p.master._replace(component="model"), None
    if shards == 1 or any(p.master for p in every):
        return
    halves = [p for p in every if p.model is not None and p.model.dtype in ("BF16", "F16")]
    for p in halves:
        p.master = p.local._replace(component="master_weights", dtype="F32")
    if halves:
        notes.append("the source has no master weights: they are float32 of the model weights (exact)")


def _choose_trained(cells: Sequence[_RankParams]) -> None:
    """Choose the parameters of the optimizer.

    A source with moments says which they are; one with master weights only leaves the fp32 parameters open, and they
    are taken to be trained like the rest.
    """
    every = [p for c in cells for p in c.params]
    moments = any(p.states for p in every)
    for cell in cells:
        for p in cell.params:
            if p.master or p.states or (not moments and p.local.dtype == "F32"):
                if p.local.dtype not in ITEMSIZE:
                    raise UnsupportedError(
                        f"the optimizer of Paddle cannot hold the {p.local.dtype} parameter `{p.name}`",
                        hint="cast it: --dtype bf16",
                    )
                cell.trained.append(p)
        found = {state for p in cell.params for state in p.states}
        cell.states = (*(s for s in _STATES if s in found), *sorted(found.difference(_STATES)))
        cell.masters = any(p.master for p in cell.params)


def _order_key(tables: _Tables) -> Callable[[int, _RankParam], tuple[Any, ...]]:
    """A sort key, of stage and parameter: the order of the model by the source's tables, or the usual one.

    Layers go by their number; what the tables have before the layers goes first (embeddings), the rest last. The
    experts of a layer are together where the table has the first of them.
    """
    at: dict[str, int] = {}
    before: set[str] = set()
    for _, table in sorted(tables.items()):
        seen = False
        for name in table:
            m = _EXPERT.fullmatch(name)
            for known in (name, *((m[1], m[1] + "#" + m[3]) if m else ())):
                at.setdefault(known, len(at))
            seen = seen or _LAYER.search(name) is not None
            if not seen:
                before.add(name)
    end = len(at)

    def module(name: str) -> tuple[int, int]:
        owner = module_of(name)
        return (_MODULES.index(owner) if owner in _MODULES else len(_MODULES), int(name.endswith(".bias")))

    def key(stage: int, p: _RankParam) -> tuple[Any, ...]:
        layer, expert = _LAYER.search(p.name), _EXPERT.fullmatch(p.name)
        first = p.name in before if p.name in at else _is_embedding(p.name)
        # A tied embedding is in the last stage once more, behind the norm.
        where = (1, int(layer[1])) if layer else (0, 0) if first and not stage else (2, int(first))
        if not expert:
            return (*where, at.get(p.name, end) if at else module(p.name)[0], -1, 0, module(p.name))
        if not at:
            return (*where, _MODULES.index("gate"), int(expert[2]), 0, module(p.name))
        inside = at.get(expert[1] + "#" + expert[3], end)
        return (*where, at.get(expert[1], end), int(expert[2]), inside, module(p.name))

    return key


# Names.


def _is_embedding(name: str) -> bool:
    return "embed" in module_of(name) or module_of(name) in ("wte", "wpe")


def _local_experts(cell: _RankParams, *, local: bool) -> None:
    """Structured names as written: experts under their global ids, or counted in each rank."""
    ids: dict[str, set[int]] = {}
    for p in cell.params:
        p.written = p.name
        if local and p.expert and (m := _EXPERT.fullmatch(p.name)):
            ids.setdefault(m[1], set()).add(int(m[2]))
    places = {layer: {n: i for i, n in enumerate(sorted(found))} for layer, found in ids.items()}
    for p in cell.params:
        if local and p.expert and (m := _EXPERT.fullmatch(p.name)):
            p.written = f"{m[1]}{places[m[1]][int(m[2])]}{m[3]}"


def _name(cells: Sequence[_RankParams], tables: _Tables, stages: int, notes: list[str]) -> None:
    """Names of parameters, which are unique in a cell only: the source's where its stage and experts are the same."""
    where = {name: (at, tname) for at, table in sorted(tables.items()) for name, tname in table.items()}
    kept = True
    for cell in cells:
        table = tables.get((cell.pp, cell.ep), {})
        found = [table.get(p.name, "") for p in cell.params]
        if all(found) and len(set(found)) == len(found):
            for p, tname in zip(cell.params, found, strict=True):
                p.tname = tname
            continue
        kept = False
        if any(p.name in where for p in cell.params):
            _renumber(cell, where)
        else:
            _invent(cell, stages)
    if not kept:
        notes.append(
            "parameters in the optimizer's files are renumbered: resume with"
            " --load_sharded_model_remap_parameter_name true"
        )


def _renumber(cell: _RankParams, where: Mapping[str, tuple[tuple[int, int], str]]) -> None:
    """The source's prefixes, numbered from 0 in the order of the cell; parameters of one layer keep one number.

    ``where``: name -> (its stage and expert rank in the source, name of the parameter there).
    """
    count = _Counter()
    for p in cell.params:
        at, tname = where.get(p.name, (None, ""))
        m, expert = _TNAME.fullmatch(tname), _EXPERT.fullmatch(p.name)
        # Where experts are spread over data-parallel ranks, several have one name in one table.
        owner = (at, m["layer"] if m else _owner(p), expert[2] if expert else "")
        p.tname = count.name(m["prefix"] if m else _kind(p), owner, m["rest"] if m else _rest(p))


def _invent(cell: _RankParams, stages: int) -> None:
    """Names such as Paddle makes from the classes of layers, for a source that has none."""
    count = _Counter()
    prefix = base_prefix({p.name: None for p in cell.params})
    # Models whose names begin with their type (``llama.``) have a head of a class of their own: LlamaLMHead.
    own = f"{prefix}_lm_head" if prefix not in ("", "model") else ""
    head = own or ("lm_head_pipe" if stages > 1 else "lm_head")
    for p in cell.params:
        kind = _kind(p)
        p.tname = count.name(head if kind == "lm_head" else kind, _owner(p), _rest(p))


class _Counter:
    """Numbers layers by class, as ``paddle.utils.unique_name`` does."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self._next: dict[str, int] = {}
        self._given: set[str] = set()

    def name(self, prefix: str, owner: Any, rest: str) -> str:
        """``<prefix>_<number>.<rest>``, the number being that of the layer ``owner``."""
        number = self._numbers.setdefault((prefix, owner), self._next.get(prefix, 0))
        self._next[prefix] = max(self._next.get(prefix, 0), number + 1)
        name = f"{prefix}_{number}.{rest}"
        while name in self._given:  # a layer with several matrices: w_0, w_1, ...
            kind, _, at = rest.rpartition("_")
            rest = f"{kind}_{int(at) + 1}"
            name = f"{prefix}_{number}.{rest}"
        self._given.add(name)
        return name


def _kind(p: _RankParam) -> str:
    """The name of the layer class that usually makes such a parameter."""
    module, dims = module_of(p.name), len(p.local.shape)
    if module == "lm_head":
        return "lm_head"
    if _is_embedding(p.name):
        return "embedding"
    if "norm" not in module and (dims == 2 or (dims == 1 and p.name.endswith(".bias"))):
        return "linear"
    return "create_parameter"


def _owner(p: _RankParam) -> str:
    """The owner of a number in names: the layer, or the parameter itself where ``create_parameter`` names it."""
    return p.name if _kind(p) == "create_parameter" else p.name.rpartition(".")[0]


def _rest(p: _RankParam) -> str:
    return "b_0" if p.name.endswith(".bias") and _kind(p) != "create_parameter" else "w_0"


# Who holds what.


class _ParamShare(NamedTuple):
    """The elements of a parameter's optimizer tensors that one shard stores."""

    param: _RankParam
    start: int
    stop: int
    """Elements of the flat parameter; beyond its last one lies padding."""
    whole: bool
    """The tensor is stored as it is, not as a flat slice."""


class _ShardShares:
    """The shares of a cell's parameters that each shard stores, in model order."""

    def __init__(self, cell: _RankParams, shards: int, version: str, mesh: Mesh) -> None:
        self.cell, self.version = cell, version
        self.weights: list[list[_RankParam]] = [[] for _ in range(shards)]
        """Per shard: parameters whose weight is in its model file."""
        self.homes: list[list[_RankParam]] = [[] for _ in range(shards)]
        """Per shard: parameters without a master weight that it stores."""
        self.held: list[list[_ParamShare]] = [[] for _ in range(shards)]
        self.param2rank: dict[str, int] = {}
        """Owners under version 1, in the order of Paddle's own table: rank by rank, each by falling size."""
        # Experts have buffers of their own (``color``), shared by every ``split``-th shard from ``first`` on.
        split = mesh.ep // mesh.tp if mesh.ep > 1 else 1
        first = (cell.ep - cell.tp) // mesh.tp if mesh.ep > 1 else 0
        groups = [([p for p in cell.trained if mesh.ep == 1 or not p.expert], range(shards))]
        if mesh.ep > 1:
            groups.append(([p for p in cell.trained if p.expert], range(first, shards, split)))

        owner: dict[str, int] = {}
        spans: dict[str, list[tuple[int, int, int]]] = {}
        if shards > 1 and version == "v1":
            numels = [p.numel for p in cell.trained]
            ranks = owners(numels, shards)
            owner = {p.name: r for p, r in zip(cell.trained, ranks, strict=True)}
            order = sorted(owner_order(numels), key=ranks.__getitem__)
            self.param2rank = {cell.trained[i].tname: ranks[i] for i in order}
        elif shards > 1:
            for params, group in groups:
                for buffer in buffers([TrainableParam(p.name, p.local.dtype, p.numel) for p in params], len(group)):
                    for name in buffer.starts:
                        spans[name] = [(group[r], *span) for r, span in buffer.spans(name)]
        index = {p.name: i for i, p in enumerate(cell.trained)}
        for p in cell.params:
            # ``filter_sharded_params``: by the parameter's index. With experts that rule can name a rank which has
            # other experts; here it counts within the ranks that have them.
            group = groups[-1][1] if p.expert else groups[0][1]
            home = owner.get(p.name, group[index.get(p.name, 0) % len(group)])
            if shards == 1 or p.master is None:
                self.weights[home].append(p)
            if p.master is None:
                self.homes[home].append(p)
            for shard, start, stop in spans.get(p.name, ((home, 0, p.numel),)):
                self.held[shard].append(_ParamShare(p, start, stop, p.name not in spans))


# Contents of files.


def _model_file(share: _ShardShares, shard: int) -> _Content:
    """Weights under their structured names, then the names of their parameters."""
    content = _Content()
    for p in share.weights[shard]:
        content.put((p.written,), [p.local], p.local.shape, None)
    content.value[hybrid_names.STRUCTURED] = {p.written: p.tname for p in share.weights[shard]}
    return content


def _optimizer_file(
    share: _ShardShares, shard: int, schedule: Mapping[str, Any] | None, *, zero_cost: bool
) -> _Content:
    """Moments state by state, then (in a Zero-Cost Checkpoint before) the master weights."""
    content = _Content()
    if zero_cost:
        _put_masters(content, share, shard, ema=False)
    for state in share.cell.states:
        for held in share.held[shard]:
            t = held.param.states.get(state)
            if t is None:
                continue
            name = f"{held.param.accumulator}_{state}"
            # The powers of the betas are one element per parameter, stored by every shard that has some of it.
            if "pow_acc" in state or t.shape != held.param.local.shape:
                content.put((name,), [t], t.shape, name)
            else:
                content.put_held((name,), t, held, name)
    if not zero_cost:
        _put_masters(content, share, shard, ema=False)
    if schedule is not None:
        content.value["LR_Scheduler"] = dict(schedule)
    return content


def _ema_file(share: _ShardShares, shard: int) -> _Content:
    """Averages of the fp32 weights under their structured names, then those of the master weights."""
    content = _Content()
    for p in share.homes[shard]:
        if p.ema is not None:
            content.put((p.written,), [p.ema], p.ema.shape, p.tname)
    _put_masters(content, share, shard, ema=True)
    return content


def _put_masters(content: _Content, share: _ShardShares, shard: int, *, ema: bool) -> None:
    if not share.cell.masters:
        return
    content.value["master_weights"] = {}
    for held in share.held[shard]:
        t = held.param.ema if ema else held.param.master
        if held.param.master is not None and t is not None:
            content.put_held(("master_weights", held.param.tname), t, held, held.param.tname + MASTER)


def _schedule(request: WriteRequest, source: HybridNames | None, notes: list[str]) -> Mapping[str, Any] | None:
    """The content of scheduler.pdparams, which is also ``LR_Scheduler`` of every optimizer file."""
    if request.source is not None and SCHEDULE_FILE in request.companions:
        value = read_pickle(request.source.root / SCHEDULE_FILE)
        if isinstance(value, dict):
            return value
    if source is not None and source.schedule is not None:
        return source.schedule
    if (schedule := schedule_of(request.training)) is not None:
        return schedule
    notes.append("there is no scheduler.pdparams: the optimizer's files have no LR_Scheduler")
    return None


# model_meta.json


def _meta(
    cells: Sequence[_RankParams],
    shares: Mapping[int, _ShardShares],
    request: WriteRequest,
    source: HybridNames | None,
    *,
    nlp: bool,
) -> bytes:
    """The file, its cells in the order in which the trainer's groups gather them (``_gather_sharding_metas``)."""
    mesh = request.mesh
    split = mesh.ep // mesh.tp if mesh.ep > 1 else 1
    flags = {name: p for cell in source.cells.values() for name, p in cell.params.items()} if source else {}
    metas = {}
    for cell in sorted(cells, key=lambda c: ((c.ep - c.tp) // mesh.tp if mesh.ep > 1 else 0, c.pp, c.tp)):
        params = {}
        for p in cell.params:
            if p.local.dtype not in hybrid_names.DTYPE_INTS:
                raise UnsupportedError(f"Paddle has no number for the dtype {p.local.dtype} of `{p.name}`")
            # Some models flag experts too: what the source says about them holds for any number of ranks.
            distributed = p.name in flags and flags[p.name].distributed if p.expert else p.is_cut
            params[p.written] = hybrid_names.ParamMeta(p.local.shape, p.local.dtype, distributed, p.expert)
        share = shares[cell.rank]
        metas[hybrid_names.cell_key(cell.tp, cell.pp, cell.ep if mesh.ep > 1 else None)] = hybrid_names.CellMeta(
            {p.written: p.tname for p in cell.params}, params, f"Sharding{share.version.upper()}", share.param2rank
        )
    moe = request.sharding // split if mesh.ep > 1 else 0
    meta = hybrid_names.ModelMeta(mesh.tp, mesh.pp, request.sharding, mesh.ep, moe, metas, nlp)
    return json.dumps(meta.to_json()).encode()
