"""The pickles that ``paddle.save`` writes: what they name, and what their dicts hold.

``tuple((name, array))``, ``eval('data', {'data': array})``, the keys with ``@@`` and the protocols (2 to 4) are from
python/paddle/framework/io.py and io_utils.py; the three classes from
python/paddle/distributed/flex_checkpoint/dcp/metadata.py (paddlepaddle 3.3.1).
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

from ckpttool.containers.pickle import (
    MAX_AXES,
    NUMPY,
    Global,
    Machine,
    PickledArray,
    PickleVocabulary,
    interpret,
    opened,
    printable,
    quoted,
)
from ckpttool.containers.safetensors import MAX_NAME
from ckpttool.core.files import DataFile, Place
from ckpttool.errors import CorruptError, IncompleteError, UnsupportedError

STRUCTURED = "StructuredToParameterName@@"
CHUNKED = "UnpackBigParamInfor@@"

_METADATA = ("Metadata", "LocalTensorMetadata", "LocalTensorIndex")
_METADATA_MODULES = ("paddle.distributed.flex_checkpoint.dcp.metadata", "paddle.distributed.checkpoint.metadata")
"""Since August 2025, and before; Paddle 3.3.1 cannot load files with the old one."""


def _eval(machine: Machine, function: Global, args: tuple[Any, ...]) -> Any:
    if (
        len(args) != 2
        or type(args[0]) is not str
        or args[0] != "data"
        or type(args[1]) is not dict
        or list(args[1]) != ["data"]
    ):
        said = f" with {printable(args[0])!r}" if args and type(args[0]) is str else ""
        machine.refuse(f"the pickle calls `{function}`{said}, which would run code")
    return args[1]["data"]


PADDLE = PickleVocabulary(
    "Paddle's writer",
    "Paddle itself would run it, so do not load a file that you do not trust",
    {**NUMPY, ("builtins", "eval"): _eval, ("__builtin__", "eval"): _eval},
    {(m, c): c for m in _METADATA_MODULES for c in _METADATA},
)


def read_pickle(path: Place) -> Any:
    """The plain values of a pickle of Paddle's, with an Array for every numpy array.

    Raises CorruptError for what is no pickle or contradicts itself, IncompleteError for a file that is cut off or not
    there, and UnsupportedError for anything that Paddle's writer does not write (above all, code).
    """
    with opened(path) as file:
        return interpret(file, PADDLE)[0]


class PaddleFile(NamedTuple):
    """A dict that ``paddle.save`` wrote."""

    tensors: dict[str, PickledArray]
    """Tensors of the dict itself, not of dicts in it. A tensor in ``chunks`` is here too, whole, with offset -1."""
    chunks: dict[str, tuple[PickledArray, ...]]
    """Tensors that protocols 2 and 3 cut at 1 GiB: flat parts in row-major order, none of which is in ``tensors``."""
    structured: dict[str, str]
    """Name in the model -> name of the parameter."""
    other: dict[str, Any]
    """LR_Scheduler, master_weights (a dict of Arrays) and whatever else is no array."""
    info: DataFile


def read_paddle(path: Place) -> PaddleFile:
    """A .pdparams, .pdopt or .distcp file. Raises what ``read_pickle`` does, and UnsupportedError for no dict."""
    with opened(path) as file:
        value, _ = interpret(file, PADDLE)
    if not isinstance(value, dict):
        kind = "a single tensor" if isinstance(value, PickledArray) else f"a {type(value).__name__}"
        raise UnsupportedError(
            f"the file holds {kind}, not a dict of tensors", where=str(path), hint="save a state dict with paddle.save"
        )
    structured = value.pop(STRUCTURED, {})
    if not isinstance(structured, dict) or not all(
        isinstance(k, str) and isinstance(v, str) for k, v in structured.items()
    ):
        raise CorruptError(f"{STRUCTURED} is not a dict of names", where=str(path))
    tensors: dict[str, PickledArray] = {}
    other: dict[str, Any] = {}
    parts = value.pop(CHUNKED, {})
    for key, v in value.items():
        if not isinstance(key, str):
            raise CorruptError(f"the dict has a key {quoted(key)}, which is not a name", where=str(path))
        if len(key) > MAX_NAME:
            raise UnsupportedError(f"the name {quoted(key)} is longer than {MAX_NAME} characters", where=str(path))
        if isinstance(v, PickledArray):
            tensors[key] = v
        else:
            other[key] = v
    chunks = _join(tensors, parts, path)
    return PaddleFile(tensors, chunks, structured, other, file.info)


def _join(tensors: dict[str, PickledArray], parts: Any, path: Place) -> dict[str, tuple[PickledArray, ...]]:
    """Put tensors that were cut into the place of their parts (io_utils._pack_loaded_dict). Raises CorruptError."""
    where = str(path)
    if not isinstance(parts, dict):
        raise CorruptError(f"{CHUNKED} is not a dict", where=where)
    chunks: dict[str, tuple[PickledArray, ...]] = {}
    for name, entry in parts.items():
        shape = entry.get("OriginShape") if isinstance(entry, dict) else None
        names = entry.get("slices") if isinstance(entry, dict) else None
        if (
            not isinstance(name, str)
            or not isinstance(shape, tuple | list)
            or not isinstance(names, tuple | list)
            or not all(type(n) is int and 0 <= n < 1 << 63 for n in shape)
            or not all(isinstance(n, str) for n in names)
            or not names
            or len(shape) > MAX_AXES
        ):
            raise CorruptError(f"{CHUNKED} does not say how the tensor {quoted(name)} was cut", where=where)
        lost = next((n for n in names if n not in tensors), None)
        if lost is not None:
            raise IncompleteError(f"part `{printable(lost)}` of `{printable(name)}` is not in the file", where=where)
        held = tuple([tensors.pop(n) for n in dict.fromkeys(names)])
        if len(held) != len(names) or name in tensors:
            raise CorruptError(f"{CHUNKED} names a tensor twice in `{printable(name)}`", where=where)
        first = held[0]
        count = sum(prod(a.shape) for a in held)
        if any(a.dtype != first.dtype or a.fortran for a in held) or count != prod(shape):
            raise CorruptError(
                f"the {len(held)} parts of `{printable(name)}` hold {count:,} elements, its shape {list(shape)}"
                f" needs {prod(shape):,} of one dtype",
                where=where,
            )
        chunks[name] = held
    # Only now, so that no tensor put together is taken for a part of another.
    for name, held in chunks.items():
        shape, nbytes = tuple(parts[name]["OriginShape"]), sum(a.nbytes for a in held)
        tensors[name] = PickledArray(held[0].dtype, shape, -1, nbytes, held[0].file)
    return chunks
