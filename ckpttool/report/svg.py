"""Who holds what as a picture: a matrix for each kind of tensor, its boxes in the colours of the ranks.

Plain SVG 1.1 with nothing to load, so that browsers, editors and image converters show the same.
"""

from __future__ import annotations

from typing import NamedTuple
from xml.sax.saxutils import escape

from ckpttool.errors import plain
from ckpttool.ops.inspect.holdings import Group, Held, Holding, Layout
from ckpttool.report.text import ranks, shape
from ckpttool.words import count, short

PAGE = 1040
MARGIN = 28
GAP = 22
"""Between two matrices."""
WIDE, HIGH = 190, 104
"""Largest matrix."""
LINE = 17
EVERY = "#dfe3e8"
"""What every rank holds."""
INK = "#1f2933"
FAINT = "#6b7785"
_CHAR, _TEXT, _BOLD = 6.1, 7.3, 7.8
"""Widths of a character of the small, the middle and the bold font, about."""

# Told apart by people who see colours differently, and dark text stays readable on all of them.
_PALETTE = (
    "#8ecae6", "#ffb703", "#95d5b2", "#f4978e", "#c8b6ff", "#ffd6a5", "#84dcc6", "#f7aef8",
    "#bde0fe", "#e9c46a", "#a7c957", "#ffadad", "#b8c0ff", "#fcd5ce", "#99d98c", "#d0a5c0",
)  # fmt: skip


def colour(rank: int, world: int) -> str:
    """The colour of a rank: from a palette for a few, around the colour circle for many."""
    if world <= len(_PALETTE):
        return _PALETTE[rank]
    return f"hsl({round(360 * rank / world)}, {(70, 45)[rank % 2]}%, {(72, 80)[rank % 2]}%)"


class _Drawing:
    """Elements from top to bottom, and the patterns that they use."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.parts: list[str] = []
        self.patterns: dict[tuple[int, ...], str] = {}
        self.y = float(MARGIN)

    def text(self, x: float, y: float, content: str, style: str = "s", anchor: str = "start") -> None:
        where = f'x="{x:.1f}" y="{y:.1f}"'
        end = "" if anchor == "start" else f' text-anchor="{anchor}"'
        self.parts.append(f'<text class="{style}" {where}{end}>{escape(plain(content))}</text>')

    def rect(self, x: float, y: float, w: float, h: float, fill: str, title: str = "") -> None:
        hover = f"<title>{escape(title)}</title>" if title else ""
        self.parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}" fill="{fill}" stroke="#ffffff"'
            f' stroke-width="1">{hover}</rect>'
        )

    def outline(self, x: float, y: float, w: float, h: float) -> None:
        self.parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}" fill="none" stroke="{FAINT}"'
            ' stroke-width="1"/>'
        )

    def fill(self, owners: tuple[int, ...]) -> str:
        """One colour for one rank, stripes for several, grey for all."""
        if len(owners) == 1:
            return colour(owners[0], self.world)
        if len(owners) == self.world or not owners:
            return EVERY
        if owners not in self.patterns:
            self.patterns[owners] = f"shared{len(self.patterns)}"
        return f"url(#{self.patterns[owners]})"

    def definitions(self) -> str:
        """Diagonal stripes of the colours of the ranks that share a box."""
        out = []
        for owners, name in self.patterns.items():
            shown = owners[:: -(-len(owners) // 8)]
            width = 7
            stripes = "".join(
                f'<rect x="{i * width}" y="0" width="{width}" height="{width * len(shown)}"'
                f' fill="{colour(r, self.world)}"/>'
                for i, r in enumerate(shown)
            )
            out.append(
                f'<pattern id="{name}" patternUnits="userSpaceOnUse" width="{width * len(shown)}"'
                f' height="{width * len(shown)}" patternTransform="rotate(45)">{stripes}</pattern>'
            )
        return f"<defs>{''.join(out)}</defs>" if out else ""


class Figure(NamedTuple):
    """A picture for an HTML page."""

    title: str
    caption: str
    """What it shows, in words, for those who do not see it, too."""
    svg: str
    """An ``<svg>`` element to stand in the page: presentation attributes only, no style, no script, no id."""


def figures(layout: Layout) -> list[Figure]:
    """The layout as pictures for a page, in the colours of its custom properties."""
    title = "Who holds what"
    return [Figure(title, f"{count(layout.world, 'rank')}: {layout.mesh}", picture(layout, title))]


def picture(layout: Layout, title: str) -> str:
    """A whole SVG document."""
    d = _Drawing(layout.world)
    d.y += 14
    d.text(MARGIN, d.y, title, "t")
    d.y += 22
    d.text(MARGIN, d.y, f"{count(layout.world, 'rank')}: {layout.mesh}", "f")
    d.y += 12
    _legend(d, layout)
    _blocks(d, layout.holdings)
    height = d.y + MARGIN
    style = (
        "text{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace;"
        f"font-size:10px;fill:{INK}}}"
        f".t{{font-size:17px;font-weight:bold}}.n{{font-size:12px;font-weight:bold}}.f{{font-size:12px;fill:{FAINT}}}"
        f".e{{font-size:8.5px;fill:{FAINT}}}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{PAGE}" height="{height:.0f}"'
        f' viewBox="0 0 {PAGE} {height:.0f}" role="img" aria-label="{escape(plain(title), {chr(34): "&quot;"})}">\n'
        f'<style>{style}</style>\n{d.definitions()}\n<rect width="100%" height="100%" fill="#ffffff"/>\n'
        + "\n".join(d.parts)
        + "\n</svg>\n"
    )


def _legend(d: _Drawing, layout: Layout) -> None:
    x = float(MARGIN)
    entries = [(colour(r, d.world), f"rank {r}  {short(n)}") for r, n in layout.bytes_of_rank.items()]
    if d.world > 1:
        entries.append((EVERY, "every rank"))
    for fill, label in entries:
        width = 24 + len(label) * _CHAR + 14
        if x + width > PAGE - MARGIN:
            x = float(MARGIN)
            d.y += LINE + 3
        d.rect(x, d.y, 16, 14, fill)
        d.text(x + 22, d.y + 11, label)
        x += width
    d.y += LINE + 16


def _blocks(d: _Drawing, holdings: tuple[Holding, ...]) -> None:
    """All kinds of tensor, side by side where they fit."""
    x, tallest = float(MARGIN), 0.0
    for h in holdings:
        panels = [p for group in h.groups for p in _panels(group, h.shape)]
        details = f"{h.dtype} {shape(h.shape)}"
        details += f"   {h.count:,} tensors" if h.count > 1 else ""
        details += f"   {h.padding:,} elements of padding" if h.padding else ""
        rows = _arrange(panels, h.shape)
        widest = max((at + need for row in rows for at, need in row), default=0.0)
        need = max(len(h.name) * _BOLD, len(details) * _TEXT, widest)
        if x > MARGIN and x + need > PAGE - MARGIN:
            x = float(MARGIN)
            d.y += tallest
            tallest = 0.0
        top = d.y + 18
        d.text(x, top, h.name, "n")
        d.text(x, top + LINE, details, "f")
        y = top + LINE + 8
        left = _gutter(panels, h.shape)
        width, height = _extent(h.shape)
        todo = iter(panels)
        for row in rows:
            labelled = False
            for at, _ in row:
                label, held = next(todo)
                labelled = labelled or bool(label)
                if label:
                    d.text(x + at, y + 9, label)
                _matrix(d, held, h.shape, (x + at + left, y + (LINE if label else 4), width, height))
            y += (LINE if labelled else 4) + height + 22
        tallest = max(tallest, y - d.y + 8)
        x += need + GAP + 12
    d.y += tallest


def _gutter(panels: list[tuple[str, list[Held]]], dims: tuple[int, ...]) -> float:
    """Room for the numbers of the rows, left of a matrix."""
    if len(dims) < 2:
        return 0.0
    return max((len(str(h.box.start[-2])) for _, held in panels for h in held), default=0) * 5.4 + 6


def _arrange(panels: list[tuple[str, list[Held]]], dims: tuple[int, ...]) -> list[list[tuple[float, float]]]:
    """Rows of (x, width) of the panels, broken where the page ends."""
    rows: list[list[tuple[float, float]]] = [[]]
    x = 0.0
    for label, _ in panels:
        need = max(_gutter(panels, dims) + _extent(dims)[0], len(label) * _CHAR)
        if rows[-1] and x + need > PAGE - 2 * MARGIN:
            rows.append([])
            x = 0.0
        rows[-1].append((x, need))
        x += need + GAP
    return rows


def _extent(dims: tuple[int, ...]) -> tuple[float, float]:
    """Width and height of the drawn matrix: the proportions of the tensor, kept between readable limits."""
    if len(dims) < 2:
        return float(WIDE), 22.0
    rows, columns = max(dims[-2], 1), max(dims[-1], 1)
    if rows >= columns:
        return max(HIGH * columns / rows, 96.0), float(HIGH)
    return float(WIDE), min(max(WIDE * rows / columns, 40.0), float(HIGH))


def _panels(group: Group, dims: tuple[int, ...]) -> list[tuple[str, list[Held]]]:
    """(label, boxes) of each matrix: one, or one for each slab of the axes before the last two."""
    outer = max(len(dims) - 2, 0)
    slabs: dict[tuple[tuple[int, ...], tuple[int, ...]], list[Held]] = {}
    for h in group.held:
        slabs.setdefault((h.box.start[:outer], h.box.stop[:outer]), []).append(h)
    out = []
    for (start, stop), held in slabs.items():
        cut = [f"axis {i} {a}:{b}" for i, (a, b) in enumerate(zip(start, stop, strict=True)) if (a, b) != (0, dims[i])]
        out.append((", ".join([*([group.label] if group.label else []), *cut]), held))
    return out


def _matrix(d: _Drawing, held: list[Held], dims: tuple[int, ...], place: tuple[float, float, float, float]) -> None:
    x, y, width, height = place
    columns = dims[-1] if dims else 1
    rows = dims[-2] if len(dims) > 1 else 1
    xs: dict[int, float] = {}
    ys: dict[int, float] = {}
    for h in held:
        c0, c1 = (h.box.start[-1], h.box.stop[-1]) if dims else (0, 1)
        r0, r1 = (h.box.start[-2], h.box.stop[-2]) if len(dims) > 1 else (0, 1)
        left, right = x + width * c0 / columns, x + width * c1 / columns
        top, bottom = y + height * r0 / rows, y + height * r1 / rows
        xs |= {c0: left, c1: right}
        ys |= {r0: top, r1: bottom}
        who = "every rank" if len(h.ranks) == d.world > 1 else ranks(h.ranks)
        hover = f"{h.box} rank{'s' if len(h.ranks) != 1 else ''} {ranks(h.ranks)}"
        d.rect(left, top, right - left, bottom - top, d.fill(h.ranks), hover)
        for label in (who, ranks(h.ranks)):
            if len(label) * _CHAR + 4 <= right - left and bottom - top >= 10:
                if 1 < len(h.ranks) < d.world:  # on stripes, text needs a ground
                    half = len(label) * _CHAR / 2 + 3
                    middle = (left + right) / 2
                    d.rect(middle - half, (top + bottom) / 2 - 6.5, 2 * half, 13, "#ffffff")
                d.text((left + right) / 2, (top + bottom) / 2 + 3.5, label, anchor="middle")
                break
    d.outline(x, y, width, height)
    _edges(d, xs, ys, x, y + height, rows=len(dims) > 1)


def _edges(d: _Drawing, xs: dict[int, float], ys: dict[int, float], x: float, bottom: float, *, rows: bool) -> None:
    """Where the cuts are, as far as there is room."""
    last = -100.0
    for value, at in sorted(xs.items()):
        half = len(str(value)) * 2.7
        if at - half > last:
            d.text(at, bottom + 10, str(value), "e", "middle")
            last = at + half + 3
    if not rows or len(ys) <= 2:
        return
    last = -100.0
    for value, at in sorted(ys.items()):
        if at > last + 8:
            d.text(x - 4, at + 3, str(value), "e", "end")
            last = at
