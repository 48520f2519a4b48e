"""Messages of protobuf, read by Google's library: only the fields that are named here, the others are passed over."""

from __future__ import annotations

from typing import Any

_REPEATED, _OPTIONAL = 3, 1
_KINDS = {"int64": 3, "int32": 5, "bool": 8, "message": 11, "bytes": 12, "uint32": 13}
"""Numbers of ``FieldDescriptorProto.Type``."""


def message_classes(messages: dict[str, str]) -> dict[str, Any]:
    """A class for each message, whose fields are written ``number:name:kind``, with a star behind repeated ones.

    A kind is ``bytes``, ``bool``, a number, or the name of another message. No field is required.
    """
    from google.protobuf.descriptor_pb2 import FileDescriptorProto
    from google.protobuf.descriptor_pool import DescriptorPool
    from google.protobuf.message_factory import GetMessageClass

    file = FileDescriptorProto(name="messages.proto", package="read")
    for name, fields in messages.items():
        described = file.message_type.add(name=name)
        for words in fields.split():
            number, field, kind = words.rstrip("*").split(":")
            described.field.add(
                number=int(number),
                name=field,
                label=_REPEATED if words.endswith("*") else _OPTIONAL,
                type=_KINDS.get(kind, _KINDS["message"]),
                type_name=None if kind in _KINDS else f".read.{kind}",
            )
    pool = DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return {name: GetMessageClass(pool.FindMessageTypeByName(f"read.{name}")) for name in messages}


def parsed(message: Any, data: bytes) -> Any:
    """A message of such a class. Raises ValueError when ``data`` breaks the wire format."""
    from google.protobuf.message import DecodeError

    try:
        return message.FromString(data)
    except DecodeError as e:
        raise ValueError(str(e)) from None
