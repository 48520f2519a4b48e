"""Choice of the tensors of a file of torch.save: state dicts lie in other dicts, beside all that a trainer keeps.

Nothing is guessed: the only candidate is taken and named in a note, of several one has to be chosen (--select).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from ckpttool.containers.pickle import PickledArray, PickledObject, printable
from ckpttool.containers.torch_pickle import Storage, TorchTensor
from ckpttool.core.words import some
from ckpttool.errors import ConflictError, IncompleteError, UnsupportedError, UsageError

_NODES = (dict, list, tuple)
_KINDS = ("torch._utils._rebuild_", "torch._tensor._rebuild_", "torch.nn.parameter.")
"""Functions that rebuild tensors of other kinds."""
_ARRAY = "numpy.ndarray"
"""An array of other elements than little-endian numbers; big-endian ones may be weights all the same."""
ALL = "."
"""The --select of everything, under names with all their dicts."""


def select(
    value: Any, path: str, where: str, kept: Collection[str] = ()
) -> tuple[str, dict[str, TorchTensor], list[str]]:
    """The tensors at ``path`` ("" for the only dict that has some): the path, they by name, and notes.

    ``kept`` are keys beside it that are read, too.
    Raises UsageError for a path that is not there, ConflictError for several candidates, IncompleteError when there are
    none, UnsupportedError for tensors of other kinds and for arrays of numpy.
    """
    chosen, node = (path, _at(value, path, where)) if path else _only(value, where)
    tensors: dict[str, TorchTensor] = {}
    left = []
    for name, v in _leaves(node):
        if isinstance(v, TorchTensor):
            if name in tensors:
                raise ConflictError(f"two tensors are called `{printable(name)}`", where=where)
            tensors[name or "tensor"] = v
        elif isinstance(v, PickledArray) or _holds(v) or (isinstance(v, PickledObject) and v.cls == _ARRAY):
            raise _odd(name, v, where)
        else:
            left.append(printable(name, 40))
    if not tensors:
        raise IncompleteError(
            "there are no tensors here" + (f", in `{printable(path)}`" if path else ""),
            where=where,
            hint="give the file that holds the weights" + (f"; --select takes {_paths(value)}" if path else ""),
        )
    notes = [f"skipped, not tensors: {some(left)}"] if left else []
    if chosen not in ("", ALL) and isinstance(value, Mapping):
        beside = [printable(str(k), 40) for k in value if str(k) not in (chosen.split(".")[0], *kept)]
        notes.insert(0, f"read from `{printable(chosen)}`" + (f"; left out: {some(beside)}" if beside else ""))
    return chosen, tensors, notes


def _only(value: Any, where: str) -> tuple[str, Any]:
    """The one node that has tensors, and the path to it."""
    path: list[str] = []
    while True:
        inner = [(k, v) for k, v in _items(value) if _holds(v)]
        if len(inner) < sum(1 for _ in _items(value)):  # a trainer's: its best loss and random state are no model
            inner = [(k, v) for k, v in inner if _weighs(str(k), v)] or inner
        nested = [(k, v) for k, v in inner if type(v) in _NODES]
        if len(nested) == len(inner) == 1:
            path.append(str(nested[0][0]))
            value = nested[0][1]
            continue
        if nested:
            here = ".".join(path)
            names = [".".join([*path, str(k)]) for k, _ in nested] + [here or ALL] * (len(nested) < len(inner))
            raise ConflictError(
                f"tensors lie in {len(names)} places of the file: {some([printable(n) for n in names], 6)}",
                where=where,
                hint=f"choose one: --select {printable(names[0])}; --select {ALL} takes all, with dotted names; for"
                " B of --diff, and one source of several, `ckpttool reshard FILE DIR --select PATH` first",
            )
        return ".".join(path), value


def _at(value: Any, path: str, where: str) -> Any:
    """The node at a dotted path, whose keys may have dots themselves."""
    if path == ALL:
        return value
    for key, v in _items(value):
        if path == str(key):
            return v
        if path.startswith(f"{key}.") and type(v) in _NODES:
            return _at(v, path[len(str(key)) + 1 :], where)
    raise UsageError(
        f"--select: there is no `{printable(path)}` in the file", where=where, hint=f"there is {_paths(value)}"
    )


def _paths(value: Any) -> str:
    return some([printable(str(k), 40) for k, _ in _items(value)], 8) or "nothing in it"


def _items(value: Any) -> Iterator[tuple[Any, Any]]:
    if type(value) in _NODES:
        yield from value.items() if isinstance(value, dict) else enumerate(value)


def _holds(value: Any) -> bool:
    """Whether there are tensors of a model in it; those of optimizers are none."""
    if isinstance(value, (TorchTensor, Storage)):
        return True
    if isinstance(value, PickledObject):
        return value.cls.startswith(_KINDS) or any(map(_holds, value.fields.values()))
    if isinstance(value, dict) and "param_groups" in value and "state" in value:
        return False
    return any(_holds(v) for _, v in _items(value))


def _weighs(key: str, value: Any) -> bool:
    """Whether what holds tensors may be a model: not only single numbers, nor the bytes of a generator."""
    if isinstance(value, TorchTensor):
        return bool(value.shape) and not (value.dtype == "U8" and len(value.shape) == 1 and "rng" in key)
    if type(value) in _NODES:
        return any(_weighs(f"{key}.{k}" if "rng" in key else str(k), v) for k, v in _items(value))
    return _holds(value)


def _leaves(value: Any) -> Iterator[tuple[str, Any]]:
    """Everything that is no container, with its dotted name."""
    stack = [("", value)]
    while stack:
        name, v = stack.pop()
        if type(v) in _NODES:
            stack += reversed([(f"{name}.{k}" if name else str(k), x) for k, x in _items(v)])
        else:
            yield name, v


def _odd(name: str, v: Any, where: str) -> UnsupportedError:
    """The error for what is a tensor of another kind, or has tensors inside."""
    if isinstance(v, PickledArray) or (isinstance(v, PickledObject) and v.cls == _ARRAY):
        what = "a numpy array, not a tensor"
        hint = "make it a tensor, torch.from_numpy(array), and save the file again"
    elif isinstance(v, Storage):
        what = "a storage, not a tensor"
        hint = "save the tensor"
    elif "_parameters" in v.fields or "_modules" in v.fields:
        what = f"a whole module ({printable(v.cls)}), not a dict of tensors"
        hint = "save its weights where its class is known: torch.save(module.state_dict(), 'pytorch_model.bin')"
    elif v.cls.startswith(_KINDS):
        kind = v.cls
        if kind.endswith("_from_type_v2"):
            kind = next((str(a) for a in v.fields.get("args", ())[1:2]), kind)
        elif kind.startswith(_KINDS[0]):
            kind = kind.removeprefix(_KINDS[0]).removesuffix("_no_storage").replace("_", " ")
        what = f"not a plain tensor ({printable(kind)})"
        hint = (
            "save it as a plain one: .to_dense(), .dequantize(), .full_tensor() or .as_subclass(torch.Tensor); "
            "a meta tensor has no values"
        )
        if kind.startswith("torch.distributed."):
            hint = "this is the file of one rank: give the directory, with the files of all ranks"
    else:
        what = f"of class {printable(v.cls)}, not a plain dict or list"
        hint = "save what it holds: dict(x), list(x) or x.state_dict()"
    at = f"`{printable(name)}`" if name else "the object in the file"
    return UnsupportedError(f"{at} is {what}", where=where, hint=hint)
