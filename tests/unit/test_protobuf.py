"""Messages of protobuf: what is described is read, everything else is passed over, and broken bytes are told."""

from __future__ import annotations

import pytest

from ckpttool.containers.protobuf import message_classes, parsed

CLASSES = message_classes({"Point": "1:x:int32 2:more:int64*", "Shape": "3:name:bytes 4:points:Point* 5:closed:bool"})


def test_fields_are_read_wherever_they_stand() -> None:
    point = b"\x08\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01\x12\x02\x05\x06\x10\x07"  # x -1; 5 and 6 packed, then 7
    shape = parsed(CLASSES["Shape"], b"\x28\x01\x22" + bytes([len(point)]) + point + b"\x1a\x03\xffab\x22\x00")
    assert (shape.name, shape.closed, len(shape.points)) == (b"\xffab", True, 2)
    assert (shape.points[0].x, list(shape.points[0].more)) == (-1, [5, 6, 7])
    assert not shape.points[1].HasField("x")


def test_other_fields_are_passed_over() -> None:
    assert parsed(CLASSES["Shape"], b"\xfa\x01\x02hi\x08\x05\x1a\x01n").name == b"n"


@pytest.mark.parametrize("data", [b"\x1a\x05abc", b"\x1a", b"\x28" + b"\x80" * 11, b"\x00\x00", b"\x22\x02\x08\x80"])
def test_broken_bytes_are_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        parsed(CLASSES["Shape"], data)
