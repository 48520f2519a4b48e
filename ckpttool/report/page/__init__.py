"""A report as one HTML page that needs nothing else: no server, no network, no other file.

`render` puts the style, the script and the data into the page. The data is JSON and packed columns, deflated. The
script builds everything that is seen of it, as text. The page's security policy allows this very script and style and
no request at all, so whatever a checkpoint calls its tensors, nothing of it can run or leave the machine.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from ckpttool.errors import plain
from ckpttool.report.page.document import SCHEMA, ReportPage
from ckpttool.report.page.pack import Pool, pack
from ckpttool.report.page.svg import tree
from ckpttool.report.svg import variables

__all__ = ["BEGINS", "SCHEMA", "ReportPage", "render"]

BEGINS = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src 'sha256-"""
"""Every page, and no other software's: what begins so may be replaced."""
_HERE = Path(__file__).parent
SCRIPT = ("base", "data", "charts", "treemap", "tensors", "main")
"""The parts of the script, in their order; a new kind of section is a function in one of them and a line in main."""


def render(document: ReportPage) -> str:
    """The page, as text in UTF-8. The same document gives the same page.

    Raises ValueError for a document that breaks its contract: columns of different lengths, a picture that is more than
    shapes and text.
    """
    style = _read("page.css").replace("/* PICTURES */", _colours())
    page = _read("page.html")
    script = "\n".join([_read(f"script/{name}.js") for name in SCRIPT])
    filled = {
        "TITLE": escape(plain(document["title"])),
        "POLICY": "; ".join(
            [
                "default-src 'none'",
                f"script-src '{_hash(script)}'",
                f"style-src '{_hash(style)}'",
                "base-uri 'none'",
                "form-action 'none'",
                "require-trusted-types-for 'script'",
                "trusted-types 'none'",
            ]
        ),
        "STYLE": style,
        "SCRIPT": script,
        "DATA": base64.b64encode(_payload(document)).decode(),
    }
    # One piece of the template at a time: what is put in is never looked through for further places.
    first, *rest = page.split("{{")
    return first + "".join(filled[name] + text for name, text in (piece.split("}}", 1) for piece in rest))


def _colours() -> str:
    """The custom properties of pictures, each with its value in light and in dark."""
    light, dark = (dict(pair.split(":") for pair in variables(theme).split(";") if pair) for theme in ("light", "dark"))
    return "\n  ".join([f"{name}: light-dark({light[name]}, {dark[name]});" for name in light])


def _read(name: str) -> str:
    return _HERE.joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """As a Content-Security-Policy names an inline script or style."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _payload(document: ReportPage) -> bytes:
    """Deflated: the length of the JSON in four bytes, the JSON, and the bytes that it refers to."""
    pool = Pool()
    tensors = document.get("tensors")
    shown = {
        **{key: value for key, value in document.items() if key != "tensors"},
        "sections": [_section(section) for section in document["sections"]],
    }
    text = {**_clean(shown), "tensors": None if tensors is None else pack(tensors, pool)}
    head = json.dumps(text, separators=(",", ":"), allow_nan=False).encode()
    # Deflated by the page's own browser: mtime=0 leaves the date out.
    return gzip.compress(len(head).to_bytes(4, "little") + head + pool.contents(), 9, mtime=0)


def _section(section: Mapping[str, Any]) -> dict[str, Any]:
    """Pictures as trees: the page never parses what it is given."""
    figures = section.get("figures")
    if figures is None:
        return dict(section)
    made = [{**figure, "svg": tree(figure["svg"], f"{section['id']}-{at}-")} for at, figure in enumerate(figures)]
    return {**section, "figures": made}


def _clean(value: Any) -> Any:
    """Texts without what cannot be seen, and numbers that JSON has: six digits, and texts for those not finite."""
    if isinstance(value, str):
        return "\n".join([plain(line) for line in value.split("\n")])
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {key: _clean(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [_clean(item) for item in value]
    return value
