"""Who holds what as pictures: the ranks and their bytes, then a strip of cells for each way of being cut.

Plain SVG 1.1 with presentation attributes only: no style sheet, no script, no id, nothing to load. So browsers, editors
and image converters show the same, and several can stand in one HTML page. Numbers say which rank it is; colours
only help to find it again: up to eight ranks have one each, of more the colour goes from the first to the last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple
from xml.sax.saxutils import escape, quoteattr

from ckpttool.answers.fields import shape
from ckpttool.core.words import count, short
from ckpttool.errors import plain
from ckpttool.ops.inspect.holdings import Holding, Layout, Ranks
from ckpttool.report.strips import (
    LayoutStrip,
    StripCard,
    StripCell,
    cards,
    folded,
    folded_strips,
    part,
    ranks_named,
    ranks_short,
    stage_strips,
)
from ckpttool.report.tables import middle
from ckpttool.report.text import ranks

PAGE = 1040
TALL = 1470
"""Height of a page, in the proportions of A4. A block that is taller makes its page taller."""
FIGURE = 720
"""Width of a picture for an HTML page."""
MARGIN = 28
BAR = 26
"""Height of a strip."""
IN = "in "
"""Precedes the components and states that are stored of a parameter."""
SMALL = 9.5
GLYPH = 22
PAD = 24
PER_ROW = 16
"""Ranks in a row, where they do not fit into one."""
MOST_ROWS = 4
MOST_STRIPS = 8
MOST_KINDS = 12
"""Most kinds of a card in a figure; pages have them all."""
FONT = "ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace"
ADVANCE = 0.61
"""Width of a letter by the size of its font, of the widest of these fonts."""

LIGHT = {
    "ink": "#1f2933", "faint": "#52606d", "paper": "#ffffff", "line": "#8492a0", "every": "#e4e7eb",
    "rank-0": "#8ecae6", "rank-1": "#ffc94d", "rank-2": "#95d5b2", "rank-3": "#f4a59e",
    "rank-4": "#c8b6ff", "rank-5": "#ffd6a5", "rank-6": "#84dcc6", "rank-7": "#f7aef8",
    "tint-0": "#edf6fb", "tint-1": "#e0f0f9", "tint-2": "#d2eaf6", "tint-3": "#c4e3f3",
    "tint-4": "#b6dcf0", "tint-5": "#a8d5ec", "tint-6": "#9acfe9", "tint-7": "#8ac7e6",
}  # fmt: skip
DARK = {
    "ink": "#e6edf3", "faint": "#a3b0bd", "paper": "#0d1117", "line": "#6b7683", "every": "#30363d",
    "rank-0": "#1b5878", "rank-1": "#6b4e00", "rank-2": "#1f5f3f", "rank-3": "#7a3530",
    "rank-4": "#4a3a8c", "rank-5": "#6e4519", "rank-6": "#0f5e50", "rank-7": "#6d2f6e",
    "tint-0": "#14212c", "tint-1": "#162938", "tint-2": "#183144", "tint-3": "#193a50",
    "tint-4": "#1b425c", "tint-5": "#1c4b69", "tint-6": "#1e5475", "tint-7": "#205d82",
}  # fmt: skip
Paints = dict[str, str]
OF_PAGE: Paints = {name: f"var(--ck-{name},{value})" for name, value in LIGHT.items()}
"""The custom properties of an HTML page, and what holds without them."""


def variables(theme: str) -> str:
    """The custom properties for "light" or "dark": ``--ck-ink:#1f2933;...``."""
    return "".join([f"--ck-{name}:{value};" for name, value in (DARK if theme == "dark" else LIGHT).items()])


class Figure(NamedTuple):
    """A picture for an HTML page."""

    title: str
    caption: str
    """What it shows, in words, for those who do not see it, too."""
    svg: str
    """An ``<svg>`` element to stand in the page."""


def figures(layout: Layout) -> list[Figure]:
    """The layout as pictures for a page, in the colours of its custom properties: the ranks, then the cuts."""
    d = Drawing(layout.world, OF_PAGE, FIGURE, margin=2)
    out = [_figure(d, "Ranks", f"{count(layout.world, 'rank')}: {layout.mesh}", _map(d, layout))]
    for card in cards(layout):
        blocks = [*_strips(d, card), *_kinds(d, card, MOST_KINDS)]
        out.append(_figure(d, card.title, _amount(card), blocks, ": " + _names(card)))
    return out


def pages(layout: Layout, title: str, paints: Paints | None = None) -> list[str]:
    """Whole SVG documents, one for each page."""
    d = Drawing(layout.world, paints or LIGHT, PAGE)
    blocks = _map(d, layout)
    for card in cards(layout):
        head, *strips = [PictureBlock(46, partial(_heading, d, card)), *_strips(d, card)]
        kinds = [b._replace(again=f"{card.title}, continued") for b in _kinds(d, card)]
        blocks += [_together([head, *strips]), *kinds, PictureBlock(14, _nothing)]
    sheets: list[list[PictureBlock]] = [[]]
    for block in blocks:
        if sheets[-1] and 84 + sum(b.height for b in sheets[-1]) + block.height > TALL - MARGIN:
            sheets.append([PictureBlock(28, partial(_continued, d, block.again))] if block.again else [])
        sheets[-1].append(block)
    out = []
    for number, sheet in enumerate(sheets, 1):
        of = f"page {number} of {len(sheets)}" if len(sheets) > 1 else ""
        below = f"{count(layout.world, 'rank')}: {layout.mesh}" + (f", {of}" if of else "")
        head = PictureBlock(56, partial(_title, d, title, below))
        out.append(d.document([head, *sheet], f"{title}{', ' if of else ''}{of}", whole=True))
    return out


def _figure(d: Drawing, title: str, caption: str, blocks: list[PictureBlock], more: str = "") -> Figure:
    return Figure(title, caption, d.document(blocks, f"{title}. {caption}{more}"))


class PictureBlock(NamedTuple):
    """A part of a picture that is not divided between pages."""

    height: float
    draw: Callable[[float], None]
    """Draws it; called with the y of its top."""
    again: str = ""
    """Heading of a page that begins with it."""


def _nothing(_: float) -> None:
    """A gap."""


def _together(blocks: Sequence[PictureBlock]) -> PictureBlock:
    def draw(y: float) -> None:
        for b in blocks:
            b.draw(y)
            y += b.height

    return PictureBlock(sum(b.height for b in blocks), draw)


def text_width(content: str, size: float) -> float:
    """At most that wide; letters of other scripts may come from another font, and are taken for twice as wide."""
    return sum([1 if c.isascii() else 2 for c in content]) * size * ADVANCE


class Drawing:
    """Elements of the document at hand, and how wide it is."""

    def __init__(self, world: int, paints: Paints, width: int, margin: int = MARGIN) -> None:
        self.world = world
        self.paints = paints
        self.width = width
        self.margin = margin
        self.parts: list[str] = []

    @property
    def room(self) -> float:
        return self.width - 2 * self.margin

    def text(self, x: float, y: float, content: str, size: float = 12, *, look: str = "", room: float = 0) -> None:
        """A line; ``look`` has letters: b bold, f faint, m with its middle at x. Shortened where ``room`` is less."""
        content = plain(content)
        shown = content
        while room and len(shown) > 8 and text_width(shown, size) > room:
            shown = middle(content, len(shown) - 1)
        if room and text_width(shown, size) > room:
            return
        hover = f"<title>{escape(content)}</title>" if shown != content else ""
        style = f' font-size="{size:g}"' if size != 12 else ""
        style += ' font-weight="bold"' if "b" in look else ""
        style += f' fill="{self.paints["faint"]}"' if "f" in look else ""
        style += ' text-anchor="middle"' if "m" in look else ""
        self.parts.append(f'<text x="{x:.1f}" y="{y:.1f}"{style}>{hover}{escape(shown)}</text>')

    def box(
        self, place: tuple[float, float, float, float], fill: str, title: str = "", *, dashed: bool = False
    ) -> None:
        x, y, w, h = place
        hover = f"<title>{escape(title)}</title>" if title else ""
        look = f'fill="{self.paints[fill]}" stroke="{self.paints["line"]}"' + (' stroke-dasharray="3 2"' * dashed)
        close = f">{hover}</rect>" if hover else "/>"
        self.parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}" {look}{close}')

    def glyph(self, x: float, y: float, axis: int, parts: int) -> None:
        """A small matrix and where it is cut: lines across for rows, lines down for columns."""
        steps = [i * GLYPH / parts for i in range(1, parts)]
        lines = [f"M{x:.1f} {y + s:.1f}h{GLYPH}" if axis == 0 else f"M{x + s:.1f} {y:.1f}v{GLYPH}" for s in steps]
        outline = f"h{GLYPH}v{GLYPH}h-{GLYPH}z"
        self.line(f"M{x:.1f} {y:.1f}" + outline + "".join(lines))

    def line(self, path: str) -> None:
        self.parts.append(f'<path d="{path}" fill="none" stroke="{self.paints["faint"]}"/>')

    def like(self, world: int) -> Drawing:
        """The same drawing, with the colours of so many ranks."""
        other = Drawing(world, self.paints, self.width, self.margin)
        other.parts = self.parts
        return other

    def fill(self, owners: Ranks) -> str:
        """The name of the colour of a cell."""
        if len(owners) != 1:
            return "every"
        if self.world <= 8:
            return f"rank-{owners[0]}"
        return f"tint-{8 * owners[0] // self.world}"

    def document(self, blocks: Sequence[PictureBlock], label: str, *, whole: bool = False) -> str:
        """An ``<svg>`` element; a ``whole`` document has margins and a ground."""
        self.parts.clear()
        y: float = self.margin
        for b in blocks:
            b.draw(y)
            y += b.height
        height = round(y + self.margin)
        ground = f'<rect width="{self.width}" height="{height}" fill="{self.paints["paper"]}"/>\n' if whole else ""
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width}" height="{height}"'
            f' viewBox="0 0 {self.width} {height}" role="img" aria-label={quoteattr(plain(label))}'
            f' font-family="{FONT}" font-size="12" fill="{self.paints["ink"]}">\n{ground}'
            + "\n".join(self.parts)
            + "\n</svg>\n"
        )


def _title(d: Drawing, title: str, below: str, y: float) -> None:
    d.text(d.margin, y + 16, title, 17, look="b", room=d.room)
    d.text(d.margin, y + 37, below, look="f", room=d.room)


def _heading(d: Drawing, card: StripCard, y: float) -> None:
    d.text(d.margin, y + 14, card.title, 14, look="b", room=d.room)
    d.text(d.margin, y + 32, _amount(card), look="f", room=d.room)


def _continued(d: Drawing, title: str, y: float) -> None:
    d.text(d.margin, y + 14, title, 14, look="b", room=d.room)


def _amount(card: StripCard) -> str:
    kinds = f" of {len(card.kinds)} kinds" if len(card.kinds) > 1 else ""
    return f"{count(card.tensors, 'tensor')}{kinds}, {short(card.nbytes)}"


def _names(card: StripCard) -> str:
    names = list(dict.fromkeys(plain(h.parameter) for h in card.kinds))
    more = len(names) - 4
    return ", ".join(names[:4]) + (f" and {more} more" if more > 0 else "")


def _map(d: Drawing, layout: Layout) -> list[PictureBlock]:
    """The ranks with their bytes: a row for the ranks of a stage, or for sixteen of them."""
    strips = folded_strips(stage_strips(layout), MOST_STRIPS)
    said = {s.ranks: _bytes(layout, s.ranks) for s in strips}
    aside = max(text_width(t, 11) for t in said.values()) + 14 if len(strips) > 1 else 0.0
    left = _left(d, strips)
    out = []
    for strip in strips:
        if strip.folds:
            out.append(PictureBlock(24, partial(_more, d, strip, f", {ranks_named(strip.ranks)}, {said[strip.ranks]}")))
            continue
        rows = [strip.cells[i : i + PER_ROW] for i in range(0, len(strip.cells), PER_ROW)]
        columns = PER_ROW if 1 < len(rows) <= MOST_ROWS else 0
        for row in rows if columns else [strip.cells]:
            frame = Frame(left, d.room - left - aside, columns)
            label = strip.label if row is rows[0] or not columns else ""
            out.append(PictureBlock(BAR + 3, partial(bar, d, row, frame, label)))
        if aside:
            out[-1] = _with(out[-1], partial(_beside, d, said[strip.ranks], aside - 14))
        else:
            out.append(PictureBlock(22, partial(_below, d, f"{ranks_named(strip.ranks)}: {said[strip.ranks]}")))
    return [*out, PictureBlock(14, _nothing)]


def _bytes(layout: Layout, owners: Ranks) -> str:
    """``17.26 GB each``, ``16.74 GB to 17.26 GB``."""
    sizes = {layout.bytes_of_rank[r] for r in owners}
    low, high = short(min(sizes)), short(max(sizes))
    if low != high:
        return f"{low} to {high}"
    return low + (" each" if len(owners) > 1 else "")


def _below(d: Drawing, said: str, y: float) -> None:
    d.text(d.margin, y + 12, said, 11, look="f", room=d.room)


def _with(block: PictureBlock, more: Callable[[float], None]) -> PictureBlock:
    """The block, and something else at the same height."""

    def draw(y: float) -> None:
        block.draw(y)
        more(y)

    return PictureBlock(block.height, draw)


def _beside(d: Drawing, said: str, width: float, y: float) -> None:
    d.text(d.margin + d.room - width, y + BAR / 2 + 4, said, 11, look="f")


def _left(d: Drawing, strips: Sequence[LayoutStrip]) -> float:
    """Room for labels left of strips."""
    widest = max([text_width(plain(s.label), 11) for s in strips if not s.folds], default=0.0)
    return min(widest + 12, d.room * 0.36) if widest else 0.0


def _strips(d: Drawing, card: StripCard) -> list[PictureBlock]:
    """The strips of a card, below each other, and how the matrix is cut left of them."""
    shown = folded_strips(card.strips, MOST_STRIPS)
    drawn = [s for s in shown if not s.folds]
    aside = len(card.axes) == 1 and len(card.kinds[0].shape) == 2 and bool(drawn) and drawn[0].place == ""
    left = _left(d, shown) + (GLYPH + 12 if aside else 0)
    padded = [h for h in card.kinds if h.padding and card.axes]
    frame = Frame(left, d.room - left - (PAD + 4 if padded else 0), indent=GLYPH + 12 if aside else 0)
    frame = frame._replace(named=all(_placed(d, s.cells, frame) for s in drawn))
    out = []
    for strip, below in zip(shown, [*shown[1:], None], strict=True):
        if strip.folds:
            out.append(PictureBlock(24, partial(_more, d, strip, f" on {ranks_named(strip.ranks)}")))
            continue
        by_word = any(c.word for c in strip.cells)
        last = below is None or [c.span for c in below.cells] != [c.span for c in strip.cells]
        noted = by_word or (bool(card.axes) and card.same_edges and last)
        block = PictureBlock(BAR + (19 if noted else 4), partial(bar, d, strip.cells, frame, strip.label, noted=noted))
        here = next((h for h in padded if set(h.padded) <= set(strip.ranks)), None)
        block = _with(block, partial(padding, d, here)) if here else block
        if aside and not out:
            block = _with(block, partial(_glyph, d, card.axes[0], len(drawn[0].cells)))
        out.append(block)
    return [*out, PictureBlock(6, _nothing)]


def padding(d: Drawing, padded: Holding, y: float) -> None:
    """At the end of a strip that leaves room for it."""
    x = d.margin + d.room - PAD
    d.box((x, y, PAD, BAR), "paper", f"{padded.padding:,} elements of padding", dashed=True)
    d.text(x + PAD / 2, y + BAR / 2 + 4, "pad", 10, look="fm")


def _glyph(d: Drawing, axis: int, parts: int, y: float) -> None:
    d.glyph(d.margin, y + (BAR - GLYPH) / 2, axis, min(parts, 5))


def _more(d: Drawing, strip: LayoutStrip, tail: str, y: float) -> None:
    label = f": {strip.label}" if strip.label else ""
    d.text(d.margin, y + 14, f"... {strip.folds:,} more like these{label}{tail}", 11, look="f", room=d.room)


class Frame(NamedTuple):
    """Where strips are drawn."""

    left: float
    width: float
    columns: int = 0
    """How many cells have room in a row; 0: as many as there are."""
    named: bool = True
    """Whether cells say ``rank 3`` and not only ``3``, where there is room for it."""
    indent: float = 0.0
    """Columns before the label."""


def bar(d: Drawing, cells: Sequence[StripCell], frame: Frame, label: str, y: float, *, noted: bool = False) -> None:
    """A strip with its label and, where ``noted``, what each cell is below it."""
    if label:
        d.text(d.margin + frame.indent, y + BAR / 2 + 4, label, 11, room=frame.left - frame.indent - 8)
    shown = folded(cells, lambda some: _fits(d, some, frame))
    placed = _placed(d, shown, frame) or _placed(d, shown, frame._replace(named=False)) or []
    noted = noted and all(text_width(c.note, SMALL) <= w - 2 for c, (_, w, _) in zip(shown, placed, strict=True))
    for cell, (at, w, said) in zip(shown, placed, strict=True):
        x, hover = d.margin + frame.left + at, ranks_named(cell.ranks) + (f": {cell.note}" if cell.note else "")
        d.box((x, y, w, BAR), "paper" if cell.folds else d.fill(cell.ranks), hover, dashed=bool(cell.folds))
        d.text(x + w / 2, y + BAR / 2 + 4, said, look="m")
        if noted:
            d.text(x + w / 2, y + BAR + 12, cell.note, SMALL, look="fm")


def _need(d: Drawing, cell: StripCell, *, named: bool) -> float:
    return text_width(_who(d, cell, named=named), 12) + 10


def _fits(d: Drawing, cells: Sequence[StripCell], frame: Frame) -> bool:
    return bool(frame.columns) or sum([_need(d, c, named=False) for c in cells]) <= frame.width


def _placed(d: Drawing, cells: Sequence[StripCell], frame: Frame) -> list[tuple[float, float, str]]:
    """Place, width and label of each cell; [] where they do not fit with names."""
    shown = folded(cells, lambda some: _fits(d, some, frame))
    labels = [_who(d, c, named=frame.named and not frame.columns) for c in shown]
    if frame.columns:
        each = frame.width / frame.columns
        return [(i * each, each, label) for i, label in enumerate(labels)]
    needs = [text_width(label, 12) + 10 for label in labels]
    if frame.named and sum(needs) > frame.width:
        return []
    scaled = not any(c.folds for c in shown)
    widths = _widths([float(c.share) if scaled else 1 / len(shown) for c in shown], needs, frame.width)
    return list(zip([sum(widths[:i]) for i in range(len(widths))], widths, labels, strict=True))


def _widths(shares: list[float], needs: list[float], width: float) -> list[float]:
    """Widths by share where each has what it needs; else what they need, and the rest shared out."""
    total = sum(shares)
    widths = [width * s / total for s in shares]
    if all(w >= n for w, n in zip(widths, needs, strict=True)):
        return widths
    rest = max(width - sum(needs), 0.0)
    return [n + rest * s / total for n, s in zip(needs, shares, strict=True)]


def _who(d: Drawing, cell: StripCell, *, named: bool) -> str:
    """The label of a cell."""
    if cell.folds:
        together = len(cell.ranks) == cell.ranks[-1] - cell.ranks[0] + 1
        return f".. {ranks(cell.ranks)} .." if together else f".. {cell.folds:,} more .."
    if len(cell.ranks) == d.world > 1:
        return "every rank" if named else ranks_short(cell.ranks)
    return ranks_named(cell.ranks) if named else ranks_short(cell.ranks)


def _kinds(d: Drawing, card: StripCard, most: int = 0) -> Iterator[PictureBlock]:
    """What is cut so: a line for each parameter, with all that is saved of it, or two where one would be too long."""
    together: dict[tuple[object, ...], list[Holding]] = {}
    for h in card.kinds:
        together.setdefault((h.parameter, h.shape, h.count, h.padding, h.padded), []).append(h)
    lines = [(same[0].parameter, _details(same)) for same in together.values()]
    shown = lines[:most] if most and len(lines) > most + 1 else lines
    names = max(text_width(plain(name), 12) for name, _ in shown) + 18
    one_line = names + max(text_width(said, 12) for _, said in shown) <= d.room
    for name, said in shown:
        lines_below = 0 if one_line else 1 + (text_width(said, 11) > d.room - 14)
        yield PictureBlock(18 + 15 * lines_below, partial(_kind, d, name, said, names if one_line else 0.0))
    if len(shown) < len(lines):
        said = f"and {count(len(lines) - len(shown), 'more kind', 'more kinds')}"
        yield PictureBlock(18, partial(_kind, d, "", said, 0.0))


def _details(same: Sequence[Holding]) -> str:
    """What is said of a parameter's tensors, which differ in component and dtype only."""
    first = same[0]
    mine, dtypes = part(first), dict.fromkeys(h.dtype for h in same)
    said = [f"{'/'.join(dtypes)} {shape(first.shape)}"]
    said += [f"{first.count:,} tensors"] if first.count > 1 else []
    said += [f"a rank has {mine}"] if mine else []
    if first.padding:
        most = "up to " if len(first.groups) > 1 else ""
        said.append(f"{most}{count(first.padding, 'element')} of padding on {ranks_named(first.padded)}")
    parts = [h.state or h.component for h in same]
    if parts != ["model"]:
        said.append(IN + ", ".join(parts))
    return ", ".join(said)


def _kind(d: Drawing, name: str, said: str, aside: float, y: float) -> None:
    if name:
        d.text(d.margin, y + 12, name, room=d.room)
    if aside or not name:
        d.text(d.margin + aside, y + 12, said, look="f", room=d.room - aside)
        return
    head, found, parts = said.partition(f", {IN}")
    rows = [head, IN + parts] if found and text_width(said, 11) > d.room - 14 else [said]
    for at, row in enumerate(rows):
        d.text(d.margin + 14, y + 26 + 14 * at, row, 11, look="f", room=d.room - 14)
