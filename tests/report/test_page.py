"""The page of a report: what is in it, what can never be in it, and that what is packed can be unpacked."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import math
import re
import shutil
import subprocess
from typing import Any

import pytest

from ckpttool.report.page import render
from ckpttool.report.page.document import Column, ReportPage
from ckpttool.report.page.svg import tree
from tests.helpers.reports import HOSTILE, PICTURE, names_of, sample, tensors_of


@pytest.fixture(scope="module")
def page() -> str:
    return render(sample())


def payload(page: str) -> tuple[dict[str, Any], bytes]:
    found = re.search(r'<script type="application/octet-stream" id="data">([^<]*)</script>', page)
    assert found
    data = gzip.decompress(base64.b64decode(found[1]))
    end = 4 + int.from_bytes(data[:4], "little")
    return json.loads(data[4:end]), data[end:]


def whole(pool: bytes, ref: dict[str, Any]) -> list[int]:
    planes = [pool[ref["at"] + p * ref["n"] :][: ref["n"]] for p in range(ref["planes"])]
    numbers = [sum(plane[i] << 8 * p for p, plane in enumerate(planes)) for i in range(ref["n"])]
    if ref["way"] == "steps":
        last, out = 0, []
        for n in numbers:
            last += (n >> 1) ^ -(n & 1)
            out.append(last)
        return out
    return numbers


def unpacked(page: str, column: str) -> list[Any]:
    document, pool = payload(page)
    tensors = document["tensors"]
    if column == "name":
        numbers = iter(whole(pool, tensors["numbers"]))
        texts = [tensors["templates"][t]["text"] for t in whole(pool, tensors["template"])]
        return [text[0] + "".join([f"{next(numbers)}{piece}" for piece in text[1:]]) for text in texts]
    packed = next(c for c in tensors["columns"] if c["id"] == column)
    if "values" in packed:
        return [packed["values"][i] for i in whole(pool, packed["index"])]
    if "whole" in packed:
        return [None if n == 0 else n - 1 for n in whole(pool, packed["whole"])]
    exponents = [e - 512 for e in whole(pool, packed["decimal"]["e"])]
    special = {-512: None, 511: math.nan, 510: math.inf, -510: -math.inf}
    mantissas = [(m >> 1) ^ -(m & 1) for m in whole(pool, packed["decimal"]["m"])]
    return [special[e] if e in special else float(f"{m}e{e}") for m, e in zip(mantissas, exponents, strict=True)]


def document_of(*columns: Column, names: list[str]) -> ReportPage:
    return {**sample(), "sections": [], "tensors": {"names": names, "columns": columns}}


def test_the_same_document_gives_the_same_page(page: str) -> None:
    assert render(sample()) == page


def test_names_and_columns_come_back() -> None:
    names = [*names_of(11, 2), "0.weight", "a.007.b", "layers.99999999999999999.w", "x.3", ""]
    tensors = tensors_of(names)
    page = render({**sample(), "tensors": tensors})
    assert unpacked(page, "name") == names
    for column in tensors["columns"]:
        found = unpacked(page, column["id"])
        if column["kind"] in {"number", "share"}:
            assert found == [float(f"{v:.5e}") for v in column["values"]]
        else:
            assert [tuple(v) if isinstance(v, list) else v for v in found] == list(column["values"])


def test_numbers_at_their_ends_come_back() -> None:
    values = [0.0, -0.0, None, math.inf, -math.inf, 1.5, -2.25e-30, 9.999996e10, 3.4e38, 1e-45, -1e300, 2e-300]
    sizes = [0, None, 1, (1 << 53) - 2, *[7] * 8]
    page = render(
        document_of(
            {"id": "number", "title": "number", "kind": "number", "values": [*values, math.nan]},
            {"id": "bytes", "title": "size", "kind": "bytes", "values": [*sizes, 3]},
            {"id": "text", "title": "text", "kind": "text", "values": ["a", None, *["b"] * 11]},
            names=[f"t{i}" for i in range(13)],
        )
    )
    *found, last = unpacked(page, "number")
    assert found == [None if v is None else float(f"{v:.5e}") for v in values]
    assert math.isnan(last)
    assert unpacked(page, "bytes") == [*sizes, 3]
    assert unpacked(page, "text") == ["a", None, *["b"] * 11]


def test_histograms_keep_their_form() -> None:
    tensors = tensors_of(["a", "b", "c"])
    tensors["histograms"] = [[1, 1000, 0, 500], None, ()]
    document, pool = payload(render({**sample(), "tensors": tensors}))
    packed = document["tensors"]["histograms"]
    assert packed["bins"] == 4
    assert list(pool[packed["at"] :][:12]) == [1, 15, 0, 8, *[0] * 8]


def test_columns_of_another_length_are_refused() -> None:
    with pytest.raises(ValueError, match="column dtype: 1 values for 2 tensors"):
        render(document_of({"id": "dtype", "title": "dtype", "kind": "text", "values": ["BF16"]}, names=["a", "b"]))


def test_no_name_is_part_of_the_page_as_html() -> None:
    hostile = [*HOSTILE]
    title = "".join(HOSTILE)
    page = render({**sample(hostile), "title": title, "subtitle": title, "notes": hostile, "facts": [[title, title]]})
    outside = re.sub(r"<(script|style)[^>]*>.*?</\1>", "", page, flags=re.DOTALL)
    assert "<img" not in outside
    assert "<svg" not in outside
    assert page.count("<script") == len(re.findall(r"<script>|<script type=", page)) == 2
    assert "\u202e" not in page
    assert "&lt;script&gt;" in outside


def test_the_policy_allows_this_script_and_style_and_no_request(page: str) -> None:
    found = re.search(r'<meta http-equiv="Content-Security-Policy" content="([^"]*)">', page)
    assert found
    rules = dict(rule.split(" ", 1) for rule in found[1].split("; "))
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == "'none'"
    for element, rule in (("style", "style-src"), ("script", "script-src")):
        text = re.search(rf"<{element}>(.*?)</{element}>", page, re.DOTALL)
        assert text
        digest = base64.b64encode(hashlib.sha256(text[1].encode()).digest()).decode()
        assert rules[rule] == f"'sha256-{digest}'"
    assert found.start() < page.index("<style>")  # it holds only for what stands behind it


def test_the_page_refers_to_nothing_outside(page: str) -> None:
    without_data = re.sub(r'id="data">[^<]*', "", page)
    assert set(re.findall(r"https?://[^\s\"'`)]+", without_data)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"\b(innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|fetch\()", without_data)


def test_without_script_a_sentence_says_so(page: str) -> None:
    assert re.search(r"<noscript>.*JavaScript is off", page, re.DOTALL)


@pytest.mark.parametrize(
    "bad",
    [
        "<script>1</script>",
        '<a href="x"/>',
        '<rect style="fill:red"/>',
        '<rect onclick="x"/>',
        '<rect fill="url(https://example.com/x)"/>',
        "<style>*{}</style>",
        "<image/>",
        "<foreignObject/>",
        '<use href="#x"/>',
    ],
)
def test_pictures_of_more_than_shapes_are_refused(bad: str) -> None:
    with pytest.raises(ValueError, match="a picture in a page"):
        tree(f'<svg xmlns="http://www.w3.org/2000/svg">{bad}</svg>', "p-")


def test_pictures_keep_shapes_and_text() -> None:
    name, attributes, children = tree(PICTURE, "p-")
    assert (name, attributes["viewBox"]) == ("svg", "0 0 720 120")
    text = next(c for c in children if c[0] == "text")
    assert text[2] == ["rank 0 & rank 1"]
    pattern = children[0][2][0]
    assert pattern[1]["id"] == "p-stripes"
    assert next(c for c in children if c[0] == "rect")[1]["fill"] == "url(#p-stripes)"


def test_numbers_of_sections_that_json_has_not_are_texts() -> None:
    section = {**sample(), "sections": [{**sample()["sections"][5], "values": [math.nan, math.inf, 1 / 3]}]}
    document, _ = payload(render(section))  # type: ignore[arg-type]
    assert document["sections"][0]["values"] == ["nan", "inf", 0.333333]


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed: it only checks the syntax here")
def test_the_script_is_javascript(page: str) -> None:
    script = re.search(r"<script>(.*?)</script>", page, re.DOTALL)
    assert script
    done = subprocess.run(["node", "--check", "-"], input=script[1], text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
