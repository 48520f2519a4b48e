"""The pickles that ``torch.save`` writes: tensors are descriptions of storages, which lie elsewhere in the file.

    _rebuild_tensor_v2(storage, offset, size, stride, requires_grad, hooks)    storage: the persistent id
    _rebuild_tensor_v3(..., dtype)                                             ('storage', FloatStorage, '0', 'cpu', 24)

Classes that a trainer keeps beside its tensors (arguments, schedulers, enums) become inert objects. What runs commands
by itself is refused by name, although nothing would run here: such a file was made to harm whoever loads it elsewhere.
Source: torch/serialization.py, torch/_utils.py and torch/_tensor.py of torch 2.13.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any, NamedTuple

from ckpttool.containers.pickle import MAX_AXES, NUMPY, Call, Global, Machine, PickledObject, PickleVocabulary
from ckpttool.containers.pickle_imports import is_dangerous
from ckpttool.core.dtypes import DTYPES

_CLASSES = {
    f"{name}Storage": dtype
    for name, dtype in (
        *(("Double", "F64"), ("Float", "F32"), ("Half", "F16"), ("BFloat16", "BF16"), ("Long", "I64"), ("Int", "I32")),
        *(("Short", "I16"), ("Char", "I8"), ("Byte", "U8"), ("Bool", "BOOL"), ("ComplexFloat", "C64")),
    )
}
STORAGE_CLASS = {dtype: name for name, dtype in _CLASSES.items()}
"""Dtypes that have a class of storages; tensors of the others lie in untyped ones."""
OTHER_SIZES = {
    "ComplexDoubleStorage": 16,
    "QInt32Storage": 4,
    **dict.fromkeys(("QInt8Storage", "QUInt8Storage", "QUInt4x2Storage", "QUInt2x4Storage"), 1),
}
"""Bytes of an element of storages that are not read, but may lie before others that are."""
TORCH_DTYPE = {d.name: d.numpy for d in DTYPES.values() if d.bits >= 8}
"""Attribute of ``torch``."""
BY_TORCH = {name: dtype for dtype, name in TORCH_DTYPE.items()}

_INERT = frozenset(
    {
        "types.SimpleNamespace", "types.GenericAlias", "functools.partial", "operator.attrgetter",
        "operator.itemgetter", "operator.methodcaller",
        *(f"builtins.{name}" for name in (
            "getattr", "type", "super", "enumerate", "filter", "map", "reversed", "zip", "property", "classmethod",
            "staticmethod", "memoryview", "abs", "all", "any", "bin", "callable", "chr", "divmod", "format", "hash",
            "hex", "id", "isinstance", "issubclass", "iter", "len", "max", "min", "next", "oct", "ord", "pow", "print",
            "repr", "round", "sorted", "sum",
        )),
    }
)  # fmt: skip
"""Parts of configurations and enums: nothing by themselves, and what they would work on is judged by its own name."""
_EXCEPTION = re.compile(r"builtins\.\w+(Error|Exception|Warning|Group|Interrupt|Exit|Iteration)\Z")


class Storage(NamedTuple):
    """A run of elements."""

    dtype: str
    """Name in ``core.dtypes``, "U8" for bytes of any type; the name of its class where the tool has no such type."""
    key: str
    elements: int


class TorchTensor(NamedTuple):
    """A view of a storage; nothing about it is checked but types."""

    dtype: str
    storage: Storage
    offset: int
    """Elements of ``dtype``, as in ``strides``."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def vocabulary(storages: dict[str, Storage]) -> PickleVocabulary:
    """torch's, for one file; the storages that it names are put into ``storages``."""
    return PickleVocabulary(
        "torch.save",
        "torch.load without weights_only=True would run it, so do not load a file that you do not trust",
        _CALLS,
        refuses=_refused,
        builds={dict: _ignore, PickledObject: _fill, TorchTensor: _ignore},
        opcodes={
            ord("Q"): partial(_persistent, storages),
            0x8F: Machine.empty_list,  # sets stay in the order in which they were written
            0x90: Machine.appends,
            0x91: Machine.tuple_marked,
            0x92: _new_with_keywords,
            0x96: lambda m: m.blob(8),
            ord("U"): lambda m: m.text(1),  # the strings of Python 2
            ord("T"): lambda m: m.text(4),
        },
        plain=frozenset({Global, Storage, TorchTensor}),
        keeps_odd=True,
    )


def _refused(name: Global) -> bool:
    text = str(name).replace("__builtin__.", "builtins.", 1)
    return is_dangerous(text) and text not in _INERT and not _EXCEPTION.match(text)


def _persistent(storages: dict[str, Storage], machine: Machine) -> None:
    pid = machine.plain(machine.stack.pop())  # the source of a class is a long text
    kinds = [str, Global, str, str, int]
    if type(pid) is tuple and len(pid) == 4 and pid[0] == "module" and type(pid[1]) is Global:  # before torch 1.6
        machine.stack.append(pid[1])
        return
    if type(pid) is not tuple or [type(p) for p in pid[:5]] != kinds or pid[0] != "storage" or pid[4] < 0:
        machine.corrupt("the pickle names a storage in a way that torch.save does not")
    if pid[5:] not in ((), (None,)):
        machine.refuse("a storage is a view of another one", "save the file again with torch 0.4 or newer")
    found = Storage("U8" if pid[1].name == "UntypedStorage" else _CLASSES.get(pid[1].name, pid[1].name), pid[2], pid[4])
    if storages.setdefault(found.key, found) != found:
        machine.corrupt(f"the storage `{found.key[:80]}` has two dtypes or sizes")
    machine.made += 1
    machine.stack.append(found)


def _rebuild(machine: Machine, function: Global, args: tuple[Any, ...]) -> Any:
    """storage, offset, size, stride[, requires_grad, hooks][, dtype][, metadata]."""
    typed = function.name.endswith("v3")
    least, most = {"_rebuild_tensor": (4, 4), "_rebuild_tensor_v2": (6, 7)}.get(function.name, (7, 8))
    if not least <= len(args) <= most or type(args[0]) is not Storage or type(args[1]) is not int:
        machine.not_so(function)
    storage, offset, shape, strides = args[:4]
    for numbers in (shape, strides):
        if type(numbers) is not tuple or len(numbers) > MAX_AXES or any(type(n) is not int for n in numbers):
            machine.corrupt("the size or stride of a tensor is not a tuple of numbers")
    if len(shape) != len(strides) or (typed and type(args[6]) is not Global):
        machine.not_so(function)
    if len(args) == most and most > 4 and args[-1]:  # the conjugate or negative of what lies in the storage
        machine.refuse(
            "a tensor is stored with a conjugate or negative bit", "save tensor.resolve_conj().resolve_neg()"
        )
    dtype = BY_TORCH.get(args[6].name, args[6].name) if typed else storage.dtype
    machine.made += 2 + len(shape)
    return TorchTensor(dtype, storage, offset, shape, strides)


def _parameter(machine: Machine, function: Global, args: tuple[Any, ...]) -> Any:
    if len(args) not in (3, 4):
        machine.not_so(function)
    return machine.plain(args[0])


def _from_type(machine: Machine, function: Global, args: tuple[Any, ...]) -> Any:
    """function, type, arguments, state: of a tensor with attributes, and of a subclass."""
    if len(args) != 4 or any(type(a) is not Global for a in args[:2]) or type(args[2]) is not tuple:
        machine.not_so(function)
    call = _TENSORS.get(args[0])
    if call is None or args[1].name not in ("Tensor", "Parameter") or not args[1].module.startswith("torch"):
        return machine.call_inert(function, args)
    return call(machine, args[0], args[2])


def _size(machine: Machine, function: Global, args: tuple[Any, ...]) -> Any:
    if len(args) != 1 or type(args[0]) is not tuple:
        machine.not_so(function)
    return args[0]


def _attribute(machine: Machine, function: Global, args: tuple[Any, ...]) -> Any:
    """Resolve a class inside of another one, as protocols before 4 name it; a member of an enum is named so, too."""
    if len(args) != 2 or type(args[0]) is not Global or type(args[1]) is not str:
        return machine.call_inert(function, args)
    machine.resolve(args[0].module, f"{args[0].name}.{args[1]}")
    return machine.stack.pop()


def _empty_dict(machine: Machine, _function: Global, _args: tuple[Any, ...]) -> Any:
    machine.made += 1
    return {}


def _ignore(_machine: Machine, _value: Any, _state: Any) -> None:
    """The versions of modules on a state dict (``_metadata``), and attributes of tensors."""


def _fill(machine: Machine, record: PickledObject, state: Any) -> None:
    state = machine.plain(state)
    named = type(state) is dict and all(type(k) is str for k in state)
    machine.made += len(state) if named else 1
    record.fields.update(state if named else {"state": state})


def _new_with_keywords(machine: Machine) -> None:
    keywords = machine.stack.pop()
    machine.new()
    _fill(machine, machine.target(PickledObject), keywords)


_TENSORS: dict[tuple[str, str], Call] = {
    ("torch._utils", name): _rebuild for name in ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3")
}
_CALLS: dict[tuple[str, str], Call] = {
    **NUMPY,
    **_TENSORS,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch._utils", "_rebuild_parameter_with_state"): _parameter,
    ("torch._tensor", "_rebuild_from_type_v2"): _from_type,
    ("torch", "Size"): _size,
    ("collections", "defaultdict"): _empty_dict,
    **{(b, "getattr"): _attribute for b in ("builtins", "__builtin__")},
}
