"""safetensors headers made to do harm, through every command."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from tests.hostile.court import COMMANDS, EVERYTHING, SAMPLE, Court, safetensors, tensor

pytestmark = SAMPLE

HEADERS: dict[str, bytes] = {
    "length 2^63": struct.pack("<Q", 2**63) + b"{}",
    "length 2^64-1": struct.pack("<Q", 2**64 - 1) + b"{}",
    "length over the limit": struct.pack("<Q", 100_000_001) + b"{}",
    "length over the file": struct.pack("<Q", 3) + b"{}",
    "nothing": b"",
    "seven bytes": bytes(7),
    "brackets": safetensors(b"[" * 100_000),
    "brackets in an entry": safetensors(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "brackets in metadata": safetensors(b'{"__metadata__":' + b'{"a":' * 900 + b"1" + b"}" * 901),
    "product over 2^64": safetensors({"a": tensor(shape=[2**62, 2**62])}, b"abcd"),
    "product of nothing": safetensors({"a": tensor(shape=[0, 2**62], data_offsets=[0, 0])}),
    "product of nothing, last": safetensors({"a": tensor(shape=[2**62, 2**62, 0], data_offsets=[0, 0])}),
    "axes of one": safetensors({"a": tensor(shape=[1] * 65)}, b"abcd"),
    "axes of 2^62": safetensors({"a": tensor(shape=[2**62] * 100_000)}, b"abcd"),
    "negative": safetensors({"a": tensor(shape=[-1])}, b"abcd"),
    "offsets of 2^63": safetensors({"a": tensor(data_offsets=[2**63, 2**63 + 4])}, b"abcd"),
    "offsets the wrong way": safetensors({"a": tensor(data_offsets=[4, 0])}, b"abcd"),
    "a million digits": safetensors(
        b'{"a":{"dtype":"F32","shape":[' + b"1" * 10**6 + b'],"data_offsets":[0,4]}}', b"abcd"
    ),
    "4,300 digits": safetensors(b'{"a":{"dtype":"F32","shape":[' + b"1" * 4300 + b'],"data_offsets":[0,4]}}', b"abcd"),
    "1e999": safetensors(b'{"a":{"dtype":"F32","shape":[1e999],"data_offsets":[0,4]}}', b"abcd"),
    "NaN": safetensors(b'{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,Infinity]}}', b"abcd"),
    "true": safetensors(b'{"a":{"dtype":"F32","shape":[true],"data_offsets":[false,4]}}', b"abcd"),
    "a name twice": safetensors(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":1}', b"abcd"),
    "half a character": safetensors(b'{"\\ud800":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', b"abcd"),
    "not UTF-8": safetensors(b'{"\xff":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', b"abcd"),
    "UTF-16": safetensors('{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'.encode("utf-16"), b"abcd"),
    "a dtype that steers": safetensors({"a": tensor(dtype="\x1b[2J\x9b31m\u202e")}, b"abcd"),
    "metadata that steers": safetensors({"__metadata__": {"\x1b[2J": "\x9b31m\u202e\x07"}, "a": tensor()}, b"abcd"),
    "the same bytes 1,000 times": safetensors({f"t{i}": tensor() for i in range(1000)}, b"abcd"),
    "overlap": safetensors({"a": tensor(shape=[2], data_offsets=[0, 8]), "b": tensor(data_offsets=[4, 8])}, bytes(8)),
    "a hole": safetensors({"a": tensor(), "b": tensor(data_offsets=[8, 12])}, bytes(12)),
    "a pickle": b"\x80\x04cposix\nsystem\n\x8c\x0ctouch CANARY\x85R.",
    "a zip": b"PK\x03\x04" + bytes(100),
}
VALID = {"product of nothing", "product of nothing, last", "metadata that steers"}
"""What is odd and allowed all the same."""


@pytest.mark.parametrize("case", HEADERS)
def test_headers(tmp_path: Path, case: str) -> None:
    court = Court(tmp_path)
    (court.src / "model.safetensors").write_bytes(HEADERS[case])
    for name, done in court.try_all(COMMANDS if EVERYTHING else ("inspect", "check", "reshard")):
        if case not in VALID and name in ("inspect", "reshard", "cast", "ranks", "merge", "stats"):
            assert done.code != 0, (case, name)
        if case not in VALID and name == "check":
            assert done.code == 3, case


def test_a_shape_is_not_multiplied_out(tmp_path: Path) -> None:
    """The product of a million sizes takes hours, and is never needed."""
    court = Court(tmp_path)
    (court.src / "model.safetensors").write_bytes(HEADERS["axes of 2^62"])
    assert "100,000 axes" in court.run("inspect", court.src).err


def test_64_axes_are_the_limit(tmp_path: Path) -> None:
    court = Court(tmp_path)
    (court.src / "model.safetensors").write_bytes(safetensors({"a": tensor(shape=[1] * 64)}, b"abcd"))
    assert court.run("inspect", court.src, "--stats").code == 0
    assert court.run("reshard", court.src, court.dst, "--to", "hf", "--verify").code == 0


def test_a_header_that_is_cut_off_is_no_pickle(tmp_path: Path) -> None:
    """A length of 640 has the first two bytes of a pickle of protocol 2."""
    court = Court(tmp_path)
    (court.src / "model.safetensors").write_bytes(struct.pack("<Q", 640) + b'{"a":{"dtype":"F32",')
    assert "the header claims 640 bytes, the file has 28" in court.run("inspect", court.src).err
