"""Texts that look like places: each is one, or one clear error, and nothing is asked of anybody."""

from __future__ import annotations

import socket
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ckpttool.errors import UsageError
from ckpttool.storage.place import SCHEMES, parse_place

PIECES = [
    *[f"{s}:{'/' * n}" for s in (*SCHEMES, "mem", "file", "ftp", "S3", "hf+x") for n in (0, 1, 2, 3)],
    "org", "model", "bucket", "a.b", "a--b", "-", ".", "..", "/", "//", "@", "@main", "@refs/pr/1",
    "@a%2Fb", ":", ":80", ":99999", "?", "?sig=geheim", "#x", "user:geheim@", "[::1]", "[", "]",
    "127.0.0.1", "%2e%2e", "%", "%00", "\\", " ", "\0", "\x1b[2J", "\u202e", "\ud800", "é", "模型",
    "\u2100", "x" * 300, "~", "$HOME", "*", "datasets", "spaces", "0",
]  # fmt: skip


def no_network(*_: object, **__: object) -> None:
    raise AssertionError("a text is parsed, and something is asked of the network")


@given(st.lists(st.sampled_from(PIECES), max_size=8).map("".join) | st.text(max_size=30))
@example("https://user:geheim@ho\u2100st/x")
@example("hf://a/b@\ud800")
@example("s3://bucket/\ud800")
@example("https://[::1")
@example("tar:///tar:/tar:")
def test_a_text_is_a_place_or_an_error(text: str) -> None:
    with patch.object(socket.socket, "connect", no_network), patch("ckpttool.storage.network.getaddrinfo", no_network):
        try:
            place = parse_place(text)
        except UsageError:
            return
        assert place.name == place.name.rpartition("/")[2]
        if not isinstance(place, Path):
            assert str(parse_place(str(place))) == str(place)


@pytest.mark.parametrize("scheme", ["https", "http", "s3", "gs", "az"])
def test_a_password_in_an_address_is_refused_and_not_shown(scheme: str) -> None:
    for slashes in ("/", "//"):
        with pytest.raises(UsageError) as e:
            parse_place(f"{scheme}:{slashes}user:geheim@host/model")
        assert "geheim" not in str(e.value)


def test_a_signature_is_not_shown() -> None:
    assert "geheim" not in str(parse_place("https://host/model?X-Amz-Signature=geheim#geheim"))
