"""A name that a header has twice is always found, although most headers are parsed without looking for one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.containers import safetensors
from ckpttool.containers.safetensors import HeaderError, parse

WORDS = st.text(st.sampled_from('ab:{}",\\u003aé\n'), min_size=1, max_size=6)
METADATA = st.none() | st.dictionaries(WORDS, WORDS, max_size=3)
HERE = Path("x.safetensors")


def entry(dtype: str = "F32", *extra: str) -> str:
    return "{" + ", ".join([f'"dtype": "{dtype}"', '"shape": [2]', '"data_offsets": [0, 8]', *extra]) + "}"


def header(pairs: list[tuple[str, str]], metadata: dict[str, str] | None, *, ascii_only: bool) -> bytes:
    """JSON with these pairs as they are, names twice and all."""
    parts = [f"{json.dumps(name, ensure_ascii=ascii_only)}: {text}" for name, text in pairs]
    if metadata is not None:
        parts.insert(0, f'"__metadata__": {json.dumps(metadata, ensure_ascii=ascii_only)}')
    return ("{" + ", ".join(parts) + "}").encode()


@given(st.lists(WORDS, unique=True, max_size=5), METADATA, st.booleans())
def test_good_headers_are_what_json_says(names: list[str], metadata: dict[str, str] | None, ascii_only: bool) -> None:
    raw = header([(n, entry()) for n in names], metadata, ascii_only=ascii_only)
    assert parse(raw, HERE) == json.loads(raw)


@given(st.lists(WORDS, unique=True, min_size=1, max_size=5), METADATA, st.booleans(), st.data())
def test_a_name_twice_is_found(
    names: list[str], metadata: dict[str, str] | None, ascii_only: bool, data: st.DataObject
) -> None:
    pairs = [(n, entry()) for n in names]
    again = data.draw(st.sampled_from(names))
    pairs.insert(data.draw(st.integers(0, len(pairs))), (again, entry("BF16")))
    with pytest.raises(HeaderError, match="twice") as caught:
        parse(header(pairs, metadata, ascii_only=ascii_only), HERE)
    assert caught.value.id == "duplicate-key"


@pytest.mark.parametrize("extra", ['"dtype": "F32"', '"shape": [3]', '"x": 1, "x": 1'])
def test_a_field_twice_is_found(extra: str) -> None:
    with pytest.raises(HeaderError, match="twice"):
        parse(header([("a", entry("F32", extra))], None, ascii_only=True), HERE)


def test_metadata_twice_is_found() -> None:
    raw = b'{"__metadata__": {"a": "b"}, "__metadata__": {"a": "b"}}'
    with pytest.raises(HeaderError, match="`__metadata__`"):
        parse(raw, HERE)


def test_usual_headers_take_the_quick_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(pairs: object) -> object:
        raise AssertionError(pairs)

    monkeypatch.setattr(safetensors, "_no_duplicates", slow)
    raw = header([("a.b:c", entry()), ("d", entry())], {"format": "pt", "note": '{"a": "b:c"}'}, ascii_only=True)
    assert len(parse(raw, HERE)) == 3
