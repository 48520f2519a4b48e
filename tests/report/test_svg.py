"""Pictures of who holds what: labels that can be read, whatever the number of ranks, and colours that do not lie."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from fractions import Fraction
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import pytest

from ckpttool.core.geometry import Box
from ckpttool.ops.inspect.holdings import HeldBox, Holding, HoldingGroup, Layout, layout_of
from ckpttool.ops.inspect.listing import list_tensors
from ckpttool.report import svg
from ckpttool.report.strips import StripCell, cards, folded, part, ranks_short, stage_strips, strips_of
from tests.helpers.command import ckpttool, reshard
from tests.helpers.contrast import contrast
from tests.helpers.layouts import LAYOUTS, cut
from tests.helpers.tensorfile import origin, save_hf, write
from tests.inspect.models import CONFIG, llama

FIXTURES = Path(__file__).parents[2] / "fixtures"
NS = "{http://www.w3.org/2000/svg}"
REAL = ("llama_tp8", "paddle_zcc/ep2_tp2_sharding2_ema", "torch_fsdp/tp_fsdp", "torch_fsdp/uneven", "hf_tiny_source")
EVERY = [*LAYOUTS, *REAL]
SAMPLE = pytest.mark.sample("tp8ep64", "tp2pp4ep256", "irregular64", "llama_tp8")


@cache
def of(name: str) -> Layout:
    return LAYOUTS[name] if name in LAYOUTS else layout_of(list_tensors(FIXTURES / name))


@cache
def documents(name: str) -> list[str]:
    layout = of(name)
    return [*svg.pages(layout, "a title"), *(f.svg for f in svg.figures(layout))]


class Label(NamedTuple):
    """A text and the rectangle that it takes at most."""

    text: str
    left: float
    top: float
    right: float
    bottom: float


def labels(root: ET.Element) -> Iterator[Label]:
    for e in root.iter(f"{NS}text"):
        shown = (e.text or "") + "".join(child.tail or "" for child in e)
        size = float(e.get("font-size", 12))
        width = svg.text_width(shown, size)
        left = float(e.get("x", 0)) - (width / 2 if e.get("text-anchor") == "middle" else 0)
        baseline = float(e.get("y", 0))
        yield Label(shown, left, baseline - 0.8 * size, left + width, baseline + 0.22 * size)


@SAMPLE
@pytest.mark.parametrize("name", EVERY)
def test_no_label_is_cut_off_or_covers_another(name: str) -> None:
    for document in documents(name):
        root = ET.fromstring(document)  # noqa: S314 - our own picture
        width, height = float(root.get("width", 0)), float(root.get("height", 0))
        found = list(labels(root))
        assert found
        for a in found:
            assert 0 <= a.left < a.right <= width, a
            assert 0 <= a.top < a.bottom <= height, a
        for a, b in combinations(sorted(found, key=lambda t: t.top), 2):
            if b.top < a.bottom:
                assert a.right <= b.left or b.right <= a.left, (a, b)


@SAMPLE
@pytest.mark.parametrize("name", EVERY)
def test_the_label_of_a_cell_lies_in_it(name: str) -> None:
    """And each cell has one."""
    for document in documents(name):
        root = ET.fromstring(document)  # noqa: S314 - our own picture
        texts = list(labels(root))
        cells = [e for e in root.iter(f"{NS}rect") if e.find(f"{NS}title") is not None]
        assert cells or "Empty" in document
        for cell in cells:
            x, y, w, h = (float(cell.get(k, 0)) for k in ("x", "y", "width", "height"))
            inside = [t for t in texts if x <= t.left and t.right <= x + w and y <= t.top and t.bottom <= y + h]
            assert len(inside) == 1, (ET.tostring(cell), w)


@SAMPLE
@pytest.mark.parametrize("name", EVERY)
def test_all_ranks_are_in_the_map(name: str) -> None:
    layout = of(name)
    assert sorted(r for s in stage_strips(layout) for c in s.cells for r in c.ranks) == list(range(layout.world))
    first = svg.figures(layout)[0]
    assert first.title == "Ranks"
    said: set[int] = set()
    for numbers in re.findall(r"<title>ranks? ([-0-9,]+)(?=[:<])", first.svg) + re.findall(
        r"ranks ([-0-9]+)", first.svg
    ):
        for run in numbers.split(","):
            start, _, stop = run.partition("-")
            said.update(range(int(start), int(stop or start) + 1))
    assert said == set(range(layout.world))


@SAMPLE
@pytest.mark.parametrize("name", EVERY)
def test_every_kind_is_on_a_page_and_pages_are_not_long(name: str) -> None:
    layout = of(name)
    drawn = svg.pages(layout, "t")
    assert all(float(ET.fromstring(p).get("height", 0)) <= svg.TALL + 60 for p in drawn)  # noqa: S314
    texts = " ".join(ET.tostring(ET.fromstring(p), encoding="unicode", method="text") for p in drawn)  # noqa: S314
    assert all(h.parameter in texts and (h.state or h.component) in texts + " model" for h in layout.holdings)
    assert sum(len(c.kinds) for c in cards(layout)) == len(layout.holdings)


@SAMPLE
@pytest.mark.parametrize("name", EVERY)
def test_a_figure_stands_in_a_page_of_others(name: str) -> None:
    """Nothing that a content security policy forbids, or that meets its like in another figure."""
    layout = of(name)
    drawn = svg.figures(layout)
    assert sum(len(f.svg) for f in drawn) < 100_000
    for f in drawn:
        root = ET.fromstring(f.svg)  # noqa: S314 - our own picture
        assert root.get("role") == "img"
        assert f.title in root.get("aria-label", "")
        for e in root.iter():
            assert e.tag.removeprefix(NS) in {"svg", "rect", "text", "title", "path"}
            assert not set(e.attrib) & {"id", "class", "style", "href"}
            assert not any(k.startswith("on") or "url(" in v for k, v in e.attrib.items())


def test_names_are_text() -> None:
    assert "<&" not in "".join(documents("tp2")).replace("<&amp;", "")
    assert 'буквами&lt;&amp;&gt;"' in "".join(documents("tp2"))


@pytest.mark.parametrize("theme", [svg.LIGHT, svg.DARK])
def test_text_can_be_read_on_every_colour(theme: dict[str, str]) -> None:
    grounds = [v for k, v in theme.items() if k in ("paper", "every") or k.startswith(("rank", "tint"))]
    assert len(grounds) == 18
    assert min(contrast(theme["ink"], ground) for ground in grounds) >= 4.5
    assert contrast(theme["faint"], theme["paper"]) >= 4.5
    assert contrast(theme["line"], theme["paper"]) >= 3
    assert set(svg.LIGHT) == set(svg.DARK)


def test_few_ranks_have_a_colour_each_and_many_a_place_in_a_row() -> None:
    def fills(name: str) -> list[str]:
        d = svg.Drawing(of(name).world, svg.LIGHT, 100)
        return [d.fill((r,)) for r in range(of(name).world)]

    assert len(set(fills("tp8"))) == 8
    many = fills("tp64")
    assert many == sorted(many)
    assert len(set(many)) == 8
    assert svg.Drawing(64, svg.LIGHT, 100).fill((1, 2)) == "every"


def test_pages_of_a_printer_know_no_variables() -> None:
    """Converters and editors read no custom properties; figures have what holds without them."""
    assert "var(" not in "".join(svg.pages(of("tp8"), "t"))
    assert 'fill="var(--ck-rank-0,#8ecae6)"' in "".join(f.svg for f in svg.figures(of("tp8")))
    assert svg.variables("dark").startswith(f"--ck-ink:{svg.DARK['ink']};")


def test_what_is_cut_alike_is_one_card() -> None:
    found = {c.title: [h.name for h in c.kinds] for c in cards(of("llama_tp8"))}
    assert list(found) == [
        "Cut along axis 0 (rows) into 8 parts",
        "Cut along axis 1 (columns) into 8 parts",
        "Cut along axis 0 (rows) into 2 parts",
        "Whole on every rank",
    ]
    assert found["Cut along axis 1 (columns) into 8 parts"] == [
        "model.layers.{0..3}.mlp.down_proj.weight",
        "model.layers.{0..3}.self_attn.o_proj.weight",
    ]
    in_picture = "".join(svg.pages(of("llama_tp8"), "t"))
    assert "320 elements of padding on rank 7" in in_picture
    assert "<title>320 elements of padding</title>" in in_picture


def test_equal_cells_are_folded_and_others_are_not() -> None:
    (card,) = [c for c in cards(of("tp8ep64")) if c.title == "Whole, by experts"]
    shown = folded(card.strips[0].cells, lambda cells: len(cells) < 8)
    assert [(ranks_short(c.ranks), c.note, c.folds) for c in shown] == [
        ("0", "experts 0..3", 0),
        ("1", "experts 4..7", 0),
        ("2-62", "experts 8..251", 61),
        ("63", "experts 252..255", 0),
    ]
    assert folded(card.strips[0].cells, lambda _: True) == card.strips[0].cells
    (runs,) = [c for c in cards(of("irregular64")) if c.title == "Cut into runs of elements"]
    assert len(runs.strips[0].cells) == 64
    assert runs.strips[0].cells[0].span == (0, 46)


def test_only_what_goes_on_by_the_same_step_is_folded() -> None:
    """A fold that hides that ranks are in another order would be wrong."""

    def shown(owners: list[int]) -> list[str]:
        cells = [StripCell((r,), "", (i, i + 1), Fraction(1, len(owners))) for i, r in enumerate(owners)]
        return [ranks_short(c.ranks) for c in folded(cells, lambda some: len(some) < len(owners))]

    assert shown([0, 1, 2, 3, 4, 5, 6, 7]) == ["0", "1", "2-6", "7"]
    assert shown([0, 2, 4, 6, 1, 3, 5, 7, 9, 11]) == ["0", "2", "4", "6", "1", "3", "5,7,9", "11"]
    assert shown([7, 6, 5, 4, 3, 2, 1, 0]) == ["7", "6", "1-5", "0"]


def test_rows_have_no_holes() -> None:
    """A rank that has both rows of the left half, beside two that have one each of the right."""
    held = (
        HeldBox(Box((0, 0), (8, 16)), (0,)),
        HeldBox(Box((0, 16), (4, 32)), (1,)),
        HeldBox(Box((4, 16), (8, 32)), (2,)),
    )
    holding = Holding("w", "F32", (8, 32), 1, (HoldingGroup((), 1, held),), 0)
    assert [(s.place, [(c.note, c.ranks) for c in s.cells]) for s in strips_of(holding)] in (
        [("axis 0 0:4", [("0:16", (0,)), ("16:32", (1,))]), ("axis 0 4:8", [("0:16", (0,)), ("16:32", (2,))])],
        [("axis 1 0:16", [("0:8", (0,))]), ("axis 1 16:32", [("0:4", (1,)), ("4:8", (2,))])],
    )


def test_groups_that_are_cut_along_other_axes() -> None:
    """Each says which, and what a rank has is said of all."""
    first, second = cut((8, 6), 0, [(0,), (1,)]), cut((8, 6), 1, [(2,), (3,)])
    groups = (HoldingGroup((("layers", (0,)),), 1, first), HoldingGroup((("layers", (1,)),), 1, second))
    holding = Holding("w", "F32", (8, 6), 2, groups, 0)
    assert [(s.label, [c.note for c in s.cells]) for s in strips_of(holding)] == [
        ("layers 0, along axis 0", ["0:4", "4:8"]),
        ("layers 1, along axis 1", ["0:3", "3:6"]),
    ]
    assert part(holding) == "[4, 6] or [8, 3]"


def test_all_that_is_saved_of_a_parameter_is_one_line() -> None:
    texts = [t.text for page in svg.pages(of(REAL[1]), "t") for t in labels(ET.fromstring(page))]  # noqa: S314
    at = texts.index("model.layers.{0..1}.mlp.gate_proj.weight")
    assert texts[at + 1] == (
        "F32/BF16 [32, 80], 2 tensors, a rank has [32, 40], in master_weights, moment1_0, moment2_0, ema, model"
    )


def test_ranks_in_few_letters() -> None:
    assert ranks_short((0, 1, 2, 3)) == "0-3"
    assert ranks_short(tuple(range(0, 64, 4))) == "0,4,..,60"
    assert ranks_short((0, 16, 32)) == "0,16,32"
    assert ranks_short(tuple(r for r in range(200) if r * r % 7 in (1, 2))).endswith("(114)")
    assert ranks_short(()) == "no rank"


def test_command(tmp_path: Path) -> None:
    """One page is the file itself; more are said."""
    source = save_hf(tmp_path / "hf", llama(), CONFIG)
    reshard(source, tmp_path / "out", "--to", "ranks", "--tp-out", 4)
    done = ckpttool("inspect", tmp_path / "out", "--ranks", "--svg", tmp_path / "a.svg")
    assert done.code == 0, done.err
    assert "page" not in done.err
    root = ET.fromstring((tmp_path / "a.svg").read_text(encoding="utf-8"))  # noqa: S314 - our own picture
    texts = [t.text for t in labels(root)]
    assert texts[:2] == ["out: who holds what", "4 ranks: tp 4"]
    ckpttool("inspect", tmp_path / "out", "--ranks", "--svg", tmp_path / "b.svg")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    many = {f"{'abcdefghij'[i % 10]}{i:03}": origin(i, "F32", (3,)) for i in range(90)}
    write(tmp_path / "many" / "model.safetensors", many)
    done = ckpttool("inspect", tmp_path / "many", "--ranks", "--svg", tmp_path / "c.svg")
    assert f"note: 2 pages: {tmp_path / 'c.svg'}, {tmp_path / 'c-2.svg'}" in done.err
    second = (tmp_path / "c-2.svg").read_text(encoding="utf-8")
    assert "page 2 of 2" in second
    assert ">Whole on rank 0, continued<" in second
    assert "page" not in ckpttool("inspect", tmp_path / "many", "--ranks", "--svg", tmp_path / "c.svg", "--quiet").err


def test_names_with_markup_and_tensors_of_three_axes(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", {'a<b>&"c': origin(1, "F32", (2, 3, 4)), "n": origin(2, "F32", (0, 4))})
    done = ckpttool("inspect", tmp_path, "--ranks", "--svg", tmp_path / "x.svg")
    assert done.code == 0, done.err
    root = ET.fromstring((tmp_path / "x.svg").read_text(encoding="utf-8"))  # noqa: S314 - our own picture
    assert 'a<b>&"c' in [t.text for t in labels(root)]
