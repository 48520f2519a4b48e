"""Checksums of runs that several tensors share."""

from __future__ import annotations

import zlib

from ckpttool.execute.hashing import joined_crc32


def test_joined_checksum_is_that_of_the_bytes() -> None:
    data, parts = bytearray(200_000), []
    for offset, nbytes in ((0, 0), (3, 5), (8, 70_000), (150_000, 1), (150_001, 4096)):  # apart, adjacent, far apart
        part = bytes((offset + i * i) % 251 for i in range(nbytes))
        data[offset : offset + nbytes] = part
        parts.append((1000 + offset, nbytes, zlib.crc32(part)))
    assert joined_crc32(1000, len(data), parts) == zlib.crc32(data)
    assert joined_crc32(7, 0, ()) == 0
