"""Files as other machines are told of them."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest

from ckpttool.core.encodings import Blocks8, Encoding, Given, Moment, Span, Text
from ckpttool.core.files import DataFile
from ckpttool.errors import UsageError
from ckpttool.storage.access import QUERIES
from ckpttool.storage.place import parse_place
from ckpttool.storage.travel import SentFiles, check_sent, text_of


def sent(*files: DataFile) -> tuple[tuple[DataFile, ...], bytes]:
    """What another machine makes of files, and what it was sent."""
    data = pickle.dumps(SentFiles(files))
    return pickle.loads(data), data  # noqa: S301


def test_a_path_means_the_same_in_every_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    spans = [Span("model/a.bin", at, 64) for at in range(4)]
    parts: list[Text | Moment | Blocks8 | Given] = [
        Text(0, 8, spans[0], [0]),
        Moment(8, (2, 1), spans[1], (spans[2], spans[3]), packed=False),
        Blocks8(16, spans[0]),
        Given(84, "00ff"),
    ]
    here = DataFile(Path("model/a.bin"), 7, "1", Encoding("text", "model/a.bin", parts))
    (there,), _ = sent(here)
    path = str(tmp_path / "model/a.bin")
    assert (there.place, there.size, there.tag) == (Path(path), 7, "1")
    assert there.encoding is not None
    assert there.encoding.path == path
    text, moment, blocks, given = there.encoding.parts
    assert isinstance(text, Text)
    assert isinstance(moment, Moment)
    assert isinstance(blocks, Blocks8)
    assert [s.path for s in (text.text, moment.codes, *moment.scales, blocks.blocks)] == [path] * 5
    assert given == parts[3]
    assert moment.shape == (2, 1)


@pytest.mark.parametrize(
    "text", ["s3://bucket/run/a.safetensors", "hf://org/model@main/a.safetensors", "https://host/a.safetensors"]
)
def test_places_elsewhere_travel_as_texts(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "AWS_SECRET_ACCESS_KEY", "a-secret")
    place = parse_place(text)
    (there,), data = sent(DataFile(place, 7, "tag"))
    assert there == DataFile(parse_place(str(place)), 7, "tag")
    assert b"a-secret" not in data


def test_a_query_stays_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(QUERIES, "https://host/signed", "signature=a-secret")
    for text in ("https://host/signed", "https://host/signed/a.safetensors"):
        with pytest.raises(UsageError, match="query of a URL is not sent") as e:
            check_sent([text])
        assert "a-secret" not in e.value.render()
        with pytest.raises(UsageError):
            sent(DataFile(parse_place(text), 7, "tag"))
    assert text_of("https://host/signed2") == "https://host/signed2"
