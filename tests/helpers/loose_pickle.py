"""Pickles of any globals, calls and instances, and files of torch.save around them: what no writer here would make."""

from __future__ import annotations

import pickle
from typing import Any, NamedTuple

from ckpttool.containers.pickle import Global
from ckpttool.containers.pickle_write import Hole, Instance, PickledCall, Stateful
from tests.fuzz.damage_torch import zipped


class Single(NamedTuple):
    """A dict of one key, which may be what Python cannot hash."""

    item: tuple[Any, Any]


def loose(value: Any) -> bytes:
    """A pickle of protocol 4 with Globals, Calls, Instances, and tensors of zeros (Holes, of the storage 0)."""
    return b"\x80\x04" + _value(value) + b"."


def loose_torch(value: Any, data: bytes = bytes(1 << 12)) -> bytes:
    """A file of torch.save with it; ``data`` is the storage of all tensors, float32."""
    return zipped([("archive/data.pkl", loose(value)), ("archive/byteorder", b"little"), ("archive/data/0", data)])


def _value(value: Any) -> bytes:
    if isinstance(value, Global):
        return f"c{value.module}\n{value.name}\n".encode()
    if isinstance(value, Hole):
        strides = [1]
        for n in value.shape[:0:-1]:
            strides.insert(0, strides[0] * n)
        pid = _value(("storage", Global("torch", "FloatStorage"), "0", "cpu", 1 << 10)) + b"Q"
        rest = _value(
            (0, value.shape, tuple(strides[: len(value.shape)]), False, PickledCall("collections", "OrderedDict"))
        )
        return b"ctorch._utils\n_rebuild_tensor_v2\n(" + pid + rest[1:-1] + b"tR"
    if isinstance(value, PickledCall):
        return _value(Global(value.module, value.name)) + _value(value.args) + b"R"
    if isinstance(value, Instance):
        return _value(Global(value.module, value.cls)) + b")\x81" + _value(dict(value.fields)) + b"b"
    if isinstance(value, dict):
        return b"}(" + b"".join(_value(k) + _value(v) for k, v in value.items()) + b"u"
    if isinstance(value, Single):
        return b"}" + _value(value.item[0]) + _value(value.item[1]) + b"s"
    if isinstance(value, Stateful):
        return _value(Global(value.module, value.cls)) + b")\x81" + _value(value.state) + b"b"
    if type(value) is list:
        return b"](" + b"".join(map(_value, value)) + b"e"
    if type(value) is tuple:
        return b"(" + b"".join(map(_value, value)) + b"t"
    return pickle.dumps(value, 4).rpartition(b".")[0].removeprefix(b"\x80\x04") if _plain(value) else _framed(value)


def _plain(value: Any) -> bool:
    return value is None or type(value) in (bool, int, float)


def _framed(value: Any) -> bytes:
    """A text or bytes, without the frame that pickle puts around them and what it remembers."""
    if isinstance(value, str):
        data = value.encode("utf-8", "surrogatepass")
        return b"X" + len(data).to_bytes(4, "little") + data
    return b"B" + len(value).to_bytes(4, "little") + bytes(value)
