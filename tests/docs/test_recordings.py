"""The recordings of terminals in docs/images/ show what the commands print now."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from scripts.make_recordings import ADVANCE, EDGE, LOOKS, SESSIONS, Run, file_of, picture, quiet, record, screen, words
from tests.docs import client
from tests.docs.forks import FIXED, forks
from tests.helpers.contrast import contrast

NS = "{http://www.w3.org/2000/svg}"


def in_fork() -> Run:
    """Runs a command in a fork of the process that has ckpttool imported."""
    server = str(forks()._server)

    def run(arguments: object, folder: str, environment: object, terminal: int) -> None:
        client.order(server, arguments, folder, {**environment, **FIXED}, (terminal, terminal, terminal), 120)  # type: ignore[arg-type,dict-item]

    return run


@pytest.mark.parametrize("name", SESSIONS)
def test_a_recording_shows_what_is_printed_now(name: str) -> None:
    content = file_of(name).read_text(encoding="utf-8")
    found = record(SESSIONS[name], in_fork())
    if quiet(found):
        assert content == picture(found), "run: python scripts/make_recordings.py"
    assert len(content) < 100_000
    root = ET.fromstring(content)  # noqa: S314 - our own picture
    shown = ["".join(e.itertext()) for e in root.iter(f"{NS}text")]
    assert " ".join(" ".join(shown).replace(" \\", "").split()) == words(found)
    width = float(root.get("width", 0))
    for e in root.iter(f"{NS}text"):
        assert float(e.get("x", 0)) + len("".join(e.itertext())) * ADVANCE <= width - EDGE / 2
    assert "<script" not in content
    assert "animation" not in content, "a picture is complete at once"


def test_colours_can_be_read() -> None:
    for look in LOOKS.values():
        assert min(contrast(colour, look["ground"]) for name, colour in look.items() if name != "ground") >= 4.5


def test_what_is_left_on_a_screen() -> None:
    assert screen("\x1b[1;31merror:\x1b[0m no\n\nhint\n") == [[("error:", "31"), (" no", "")], [], [("hint", "")]]
    assert screen("\x1b[?25lbar 10%\r\x1b[2Kbar 99%\n\x1b[1A\x1b[2K\x1b[?25hdone\n") == [[("done", "")]]
    assert screen("abc\rx\x1b[Ky") == [[("xy", "")]]
    with pytest.raises(ValueError, match="not known"):
        screen("\x1b[3Jgone")


def test_how_long_it_took_is_not_compared() -> None:
    lines = screen("1 kB; planned in 0.1 s, written in 1.0 s\n  at 2.22 MB/s, verified in 0.3 s\nverified: x\n")
    assert not quiet([("run", lines)])
    assert words([("run", lines)]) == "$ run 1 kB verified: x"
    assert quiet([("run", screen("1 kB\nverified: x\n"))])
