"""What Paddle's checkpoints must hold: names, orientations, and a reader of its pickles that allows a few names.

Written from what PaddleNLP 3.0, PaddleFormers 0.4 and 1.2 save and load. In memory Paddle's linear weights are
[in, out]; PaddleFormers turns some of them for the model files of unified checkpoints.
"""

from __future__ import annotations

import io
import json
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tests.walk.bits import Array, Raw, Wrong, cast, read
from tests.walk.forms import Form, Join, Turn, Weave, build, leaves
from tests.walk.models import Model
from tests.walk.names import QKV, Style, Table, hugging_face, join, rename
from tests.walk.ranks import Grid, Habit, Seat, held, share, whole

VERSIONS = ("paddlenlp-3.0", "paddleformers-0.4", "paddleformers-1.2")
HABIT = Habit(-1, heads_whole=True)
_PREFIXED = ("llama", "qwen2", "qwen2_moe", "mistral", "mixtral", "gemma", "deepseek_v2", "deepseek_v3")
"""Whose base model PaddleNLP calls by the model's type."""
_FUSED = ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "ernie4_5", "ernie4_5_moe", "glm4_moe")
"""What PaddleFormers 1.2 holds with q, k, v and gate, up in one."""
_LOOSE = re.compile(r".*\.(head|eh_proj|\d+|w1|w2|w3|wk|wq_b|weights_proj|gate|router|shared_expert_gate)\.weight")
"""Weights whose orientation on disk is not the same in all models of a version: either is taken."""
_DTYPES = {"BF16": "<u2", "F16": "<f2", "F32": "<f4"}


def names(model: Model, table: Table, version: str) -> Table:
    """The parameters as Paddle holds them in memory. Raises Unclear."""
    table = hugging_face(model, table, Style())
    nlp = version.startswith("paddlenlp")
    if version == "paddleformers-1.2" and model.kind in _FUSED:
        table = join(table, "{a}.self_attn.qkv_proj.{b}", *QKV, make=lambda parts: Weave(parts, model.head))
        table = join(table, "{a}.up_gate_proj.{b}", "{a}.gate_proj.{b}", "{a}.up_proj.{b}")
    old_llama = version == "paddleformers-0.4" and model.kind == "llama"
    turned = {n for n, f in table.items() if _linear(model, n, len(model.tensors[leaves(f)[0]].raw.bits.shape))}
    if (nlp or old_llama) and not model.tied:
        turned.add("lm_head.weight")
    table = {n: Turn(f) if n in turned else f for n, f in table.items()}
    if old_llama or (nlp and model.kind in _PREFIXED):
        table = rename(table, ("model.{a}", model.kind + ".{a}"))
    return table


def _linear(model: Model, name: str, axes: int) -> bool:
    if axes != 2 or not name.endswith(".weight") or ("experts." in name and model.family == "gpt_oss"):
        return False
    module = name.split(".")[-2]
    if module in ("embed_tokens", "lm_head") or "norm" in module:
        return False
    return (module, model.family) not in (("router", "gpt_oss"), ("gate", "glm4_moe"))


def judged(model: Model, grid: Grid) -> bool:
    """Whether Paddle's software has this model under these names, and cuts it so."""
    return model.family not in ("gpt2", "gpt_neox") and not (model.family == "phi3" and model.kv % grid.tp)


class _Record:
    """Stands for one of the classes of Paddle's metadata."""

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state)


_ALLOWED: dict[str, Any] = {
    "numpy.ndarray": np.ndarray,
    "numpy.dtype": np.dtype,
    "numpy.core.multiarray._reconstruct": np.ndarray.__new__,
    "numpy.core.multiarray.scalar": lambda dtype, data: np.frombuffer(data, dtype)[0],
    "builtins.tuple": tuple,
    "builtins.slice": slice,
    "_codecs.encode": lambda text, _: text.encode("latin1"),
}


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("paddle.distributed."):
            return type(name, (_Record,), {})
        if (known := _ALLOWED.get(f"{module}.{name}".replace("._core.", ".core."))) is None:
            raise Wrong(f"a pickle names {module}.{name}")
        return known


def load(path: Path) -> Any:
    """What a pickle holds. Raises Wrong for a name that Paddle's pickles do not need."""
    return _Reader(io.BytesIO(path.read_bytes())).load()


def plain(value: Any) -> Array:
    """An array that may be in a pair with its name."""
    array: Array = value[1] if isinstance(value, tuple) else value
    return array


def _same(name: str, found: Array, want: Raw, where: str) -> None:
    """An array as it is in a pickle: the dtype, or F32 where it is a master weight."""
    loose = _LOOSE.fullmatch(name) and want.bits.ndim == 2
    found = np.ascontiguousarray(found)
    bits = found.view(f"<u{found.itemsize}")
    if loose and bits.shape != want.bits.shape:
        bits = bits.T
    if found.dtype.str != _DTYPES[want.dtype] or bits.shape != want.bits.shape:
        raise Wrong(f"{where}: `{name}` is {found.dtype.str} {found.shape}, must be {want.dtype} {want.bits.shape}")
    if not np.array_equal(bits, want.bits) and not (loose and np.array_equal(found.view(bits.dtype).T, want.bits)):
        raise Wrong(f"{where}: `{name}` has other bits")


def suffix_of(grid: Grid, seat: Seat, shard: int, shards: int) -> str:
    """What the files of a rank have in their names."""
    parts = [("tp", seat.tp, grid.tp), ("pp", seat.stage, grid.pp), ("shard", shard, shards)]
    return "_".join(f"{k}{n:02d}" for k, n, size in parts if size > 1)


def _file(path: Path, stem: str, suffix: str, ending: str) -> Path:
    return path / (f"{stem}.{suffix}.{ending}" if suffix else f"{stem}.{ending}")


def judge_hybrid(path: Path, model: Model, table: Table, grid: Grid, shards: int, masters: Model | None = None) -> None:
    """Of every rank: its weights, or the runs of their master weights that its shards hold.

    ``masters``: the model's, where they are not its weights.
    """
    meta = json.loads((path / "model_meta.json").read_text(encoding="utf-8")) if shards > 1 else {}
    for rank in range(grid.world):
        seat = Seat.of(grid, rank)
        wanted = held(model, table, grid, rank, HABIT)
        wide = {n: cast(want, "F32") for n, want in wanted.items()}
        if masters is not None:
            wide |= held(masters, _made_of(masters, table), grid, rank, HABIT)
        found: dict[str, Array] = {}
        runs: dict[str, list[Array]] = {}
        for shard in range(shards):
            suffix = suffix_of(grid, seat, shard, shards)
            state = load(_file(path, "model_state", suffix, "pdparams"))
            found |= {n: plain(v) for n, v in state.items() if not n.endswith("@@")}
            optimizer = _file(path, "optimizer", suffix, "pdopt")
            if shards > 1 and optimizer.exists():
                state = load(optimizer)
                for name, value in state.get("master_weights", {}).items():
                    runs.setdefault(name, []).append(plain(value).ravel())
        known = {}
        if shards > 1:
            known = meta["sharding_metas"][f"tp{seat.tp:02d}_pp{seat.stage:02d}"]["structure_name_mapping"]
        where = f"hybrid rank {rank} of {grid}, {shards} shards"
        for name, want in wanted.items():
            if name in found:
                _same(name, found.pop(name), want, where)
                continue
            if known.get(name) not in runs:
                raise Wrong(f"{where}: `{name}` is in no file")
            flat = np.concatenate(runs[known[name]])[: want.bits.size]
            if flat.size != want.bits.size:
                raise Wrong(f"{where}: `{name}` has {flat.size} elements, must have {want.bits.size}")
            _same(name, flat.reshape(want.bits.shape), wide[name], where)
        if found:
            raise Wrong(f"{where}: unexpected {sorted(found)[:4]}")


def flex_folder(folder: Path) -> dict[str, Array]:
    """The tensors of one folder, put together as its metadata says. Raises Wrong for an element that no file has."""
    top = load(folder / "0.metadata")
    data = {p.name: load(p) for p in folder.glob("*.distcp")}
    blocks = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for key, entries in top.state_dict_metadata.items():
        for e in entries:
            run = e.flattened_range if getattr(e, "is_flattened", False) else None
            run = (run.start, run.stop) if isinstance(run, slice) else tuple(run) if run else None
            blocks[key, tuple(e.global_offset), run] = e
            shapes[key] = tuple(e.global_shape)
    out: dict[str, Array] = {}
    filled: dict[str, Array] = {}
    for index, name in top.storage_metadata.items():
        run = index.flattened_range if getattr(index, "is_flattened", False) else None
        run = (run.start, run.stop) if isinstance(run, slice) else tuple(run) if run else None
        entry = blocks[index.tensor_key, tuple(index.global_offset), run]
        value = plain(data[name][index.tensor_key])
        key = index.tensor_key
        tensor = out.setdefault(key, np.zeros(shapes[key], value.dtype))
        seen = filled.setdefault(key, np.zeros(shapes[key], bool))
        box = tuple(slice(a, a + n) for a, n in zip(entry.global_offset, entry.local_shape, strict=True))
        block, mask = tensor[box].copy().ravel(), seen[box].copy().ravel()
        piece = slice(*run) if run else slice(None)
        block[piece], mask[piece] = value.ravel(), True
        tensor[box], seen[box] = block.reshape(tensor[box].shape), mask.reshape(seen[box].shape)
    for key, seen in filled.items():
        if not seen.all():
            raise Wrong(f"{folder.name}: {int((~seen).sum())} elements of `{key}` are in no file")
    return out


def _made_of(model: Model, table: Table) -> Table:
    """The stored names that are made of tensors that the model has."""
    return {n: f for n, f in table.items() if all(x in model.tensors for x in leaves(f))}


def judge_flex(path: Path, model: Model, table: Table, grid: Grid, masters: Model | None = None) -> None:
    """Every tensor from its boxes and runs."""
    found = flex_folder(path / "model_state") if (path / "model_state/0.metadata").exists() else {}
    wide = flex_folder(path / "master_weight") if (path / "master_weight/0.metadata").exists() else {}
    trained = flex_wanted(masters, _made_of(masters, table), grid) if masters is not None else {}
    for name, want in flex_wanted(model, table, grid).items():
        if name in found:
            _same(name, found.pop(name), want, "flex")
        elif f"{name}.w_0" in wide:
            _same(name, wide[f"{name}.w_0"], trained.get(name, cast(want, "F32")), "flex, a master weight")
        else:
            raise Wrong(f"flex: `{name}` is in no file")
    if found:
        raise Wrong(f"flex: unexpected {sorted(found)[:4]}")


def flex_wanted(model: Model, table: Table, grid: Grid) -> dict[str, Raw]:
    """The tensors as flex has them: what fuses gate and up lies there rank after rank."""
    out = whole(model, table)
    for name, form in table.items():
        if isinstance(form.part if isinstance(form, Turn) else form, Join):  # a weight, or a bias
            out[name] = Raw(out[name].dtype, np.concatenate(list(_of_ranks(model, form, grid)), -1))
    return out


def _of_ranks(model: Model, form: Form, grid: Grid) -> Iterator[Array]:
    """A tensor of each rank that cuts it, one after the other."""
    expert = model.tensors[leaves(form)[0]].expert >= 0
    done = set()
    for rank in range(grid.world):
        seat = Seat.of(grid, rank)
        at = seat.etp if expert else seat.tp

        def get(name: str, seat: Seat = seat) -> Array | None:
            return share(model.tensors[name], grid, seat, model.experts, HABIT)

        bits = build(form, get)
        if bits is not None and at not in done:
            done.add(at)
            yield bits


def judge_unified(path: Path, model: Model, table: Table, version: str) -> None:
    """Whole tensors over the model's files, and an index that says which."""
    found: dict[str, Raw] = {}
    where: dict[str, str] = {}
    for file in sorted(path.glob("model-*.safetensors")):
        tensors = read(file)
        if again := found.keys() & tensors.keys():
            raise Wrong(f"{file.name}: {sorted(again)[:3]} are in another file too")
        found |= tensors
        where |= dict.fromkeys(tensors, file.name)
    wanted = whole(model, table)
    if found.keys() != wanted.keys():
        missing, extra = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
        raise Wrong(f"unified: missing {missing[:4]}, unexpected {extra[:4]}")
    index = json.loads((path / "model.safetensors.index.json").read_text(encoding="utf-8"))
    if index["weight_map"] != where:
        raise Wrong("unified: the index is not that of the files")
    as_torch = version == "paddleformers-1.2" or (version == "paddleformers-0.4" and model.kind != "llama")
    for name, want in wanted.items():
        module = name.split(".")[-2]
        turned = as_torch and re.fullmatch(r"(q|k|v|o|gate|up|down)_proj", module) and name.endswith(".weight")
        bits = want.bits.T if turned else want.bits
        have = found[name]
        loose = want.bits.ndim == 2 and not re.fullmatch(
            r"(q|k|v|o|gate|up|down|qkv|up_gate)_proj|embed_tokens", module
        )
        if have.dtype != want.dtype or not (
            np.array_equal(have.bits, bits) or (loose and np.array_equal(have.bits, bits.T))
        ):
            raise Wrong(
                f"unified: `{name}` {have.dtype} {have.bits.shape} is not {want.dtype} {bits.shape} as it must be"
            )
