"""What docs/resume.md shows of the moves: a table for each model, and a plot of the losses of every move."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from tests.peers.resume import task
from tests.peers.resume.frameworks import FRAMEWORKS, Framework
from tests.peers.resume.pairs import Move

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "resume.md"
PLOTS = ROOT / "docs" / "resume"

Runs = tuple[str, bool]
"""A model, and whether it is bfloat16."""
KINDS: tuple[Runs, ...] = (("llama", True), ("qwen3_moe", True), ("llama", False))
"""What `make test-resume` moves."""
TITLES = {"llama": "Llama", "qwen3_moe": "Qwen3-MoE"}


def title(kind: Runs) -> str:
    return f"{TITLES[kind[0]]}, {'bfloat16' if kind[1] else 'float32'}"


def plot_of(kind: Runs) -> Path:
    return PLOTS / f"{kind[0]}-{'bf16' if kind[1] else 'f32'}.svg"


def begin(kind: Runs) -> str:
    return f"<!-- moves: {title(kind)} -->\n"


END = "<!-- end -->\n"


def table(moves: Sequence[Move], kind: Runs) -> str:
    """A row for each sender, of its moves to all receivers; and under it what cannot be."""
    model = kind[0]
    here = [f for f in FRAMEWORKS if model not in f.without]
    meshes = ", ".join(f"{f.name} ({f.receives[model].mesh})" for f in here)
    lines = [f"To {meshes}:", "", "| from | moves | tensors | losses |", "| --- | ---: | ---: | ---: |"]
    for sender in here:
        sent = [m for m in moves if m.sender.name == sender.name and not m.error]
        held = sorted({m.held for m in sent})
        wrong = sum(bool(m.wrong) for m in sent)
        done = f"{len(sent)}, {wrong} differ" if wrong else f"{len(sent)}"
        tensors = " to ".join(str(n) for n in dict.fromkeys((held[0], held[-1]))) if held else "-"
        apart = figure(max((m.apart for m in sent), default=0))
        lines.append(f"| {sender.name}: {sender.sends[model].mesh} | {done} | {tensors} | {apart} |")
    notes = [f"- {f.name}: {f.without[model]}." for f in FRAMEWORKS if model in f.without]
    notes += [f"- {m.sender.name} to {m.receiver.name}: `{_short(m.error)}`" for m in moves if m.error]
    return "\n".join(lines) + "\n" + ("\n" + "\n".join(notes) + "\n" if notes else "")


def figure(apart: float) -> str:
    return f"{apart:.0e}".replace("e-0", "e-").replace("0e+00", "0")


def _short(error: str) -> str:
    return re.sub(r"\s+", " ", error.split("\n\n", maxsplit=1)[0])[:300]


def with_tables(text: str, moves: Sequence[Move]) -> str:
    """The page with these moves in its tables."""
    for kind in KINDS:
        mine = [m for m in moves if (m.model, m.bf16) == kind]
        head, _, rest = text.partition(begin(kind))
        _, _, tail = rest.partition(END)
        text = head + begin(kind) + "\n" + table(mine, kind) + "\n" + END + tail
    return text


_SIZE, _GAP, _LEFT, _TOP = 104, 10, 150, 70
_INK, _FAINT, _STAYED, _MOVED = "#1f2933", "#6b7785", "#8ecae6", "#d1495b"


def plot(moves: Sequence[Move], kind: Runs) -> str:
    """A matrix of small plots: the losses of ten steps that never moved, and on them those after the move."""
    model = kind[0]
    here = [f for f in FRAMEWORKS if model not in f.without]
    losses = [x for m in moves if not m.error for x in (*m.whole, *m.moved)]
    low, high = min(losses), max(losses)
    side = _LEFT + len(here) * (_SIZE + _GAP) + 10
    about = "losses of the run that stays (wide) and of the run that moves after step 5 (dots)"
    scale = f"rows: where it comes from; columns: where it goes on. Loss {low:.2f} to {high:.2f}, ten steps."
    parts = [f'<text class="t" x="14" y="24">{escape(title(kind))}: {about}</text>', _text(14, 42, scale)]
    parts += [_text(_LEFT + i * (_SIZE + _GAP), _TOP - 8, f.name) for i, f in enumerate(here)]
    parts += [_text(14, _TOP + i * (_SIZE + _GAP) + _SIZE // 2, f.name) for i, f in enumerate(here)]
    for move in moves:
        at = (_LEFT + _index(here, move.receiver), _TOP + _index(here, move.sender))
        parts += _small(move, at, low, high)
    height = _TOP + len(here) * (_SIZE + _GAP) + 10
    style = f"text{{font:9.5px ui-monospace,Menlo,Consolas,monospace;fill:{_INK}}}.t{{font-size:14px;font-weight:bold}}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{side}" height="{height}" viewBox="0 0 {side} {height}"'
        f' role="img" aria-label="{escape(title(kind))}: losses">\n<style>{style}</style>\n'
        '<rect width="100%" height="100%" fill="#ffffff"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _index(here: Sequence[Framework], framework: Framework) -> int:
    return [f.name for f in here].index(framework.name) * (_SIZE + _GAP)


def _text(x: float, y: float, content: str) -> str:
    return f'<text x="{x}" y="{y}">{escape(content)}</text>'


def _small(move: Move, at: tuple[float, float], low: float, high: float) -> list[str]:
    x, y = at
    frame = f'<rect x="{x}" y="{y}" width="{_SIZE}" height="{_SIZE}" fill="none" stroke="{_FAINT}" stroke-width="0.5"/>'
    if move.error:
        return [frame, _text(x + _SIZE / 2 - 4, y + _SIZE / 2, "-")]

    def points(losses: Sequence[float], first: int) -> list[tuple[str, str]]:
        across, down = (_SIZE - 16) / (2 * task.STEPS - 1), (_SIZE - 16) / (high - low)
        return [
            (f"{x + 8 + (first + i) * across:.1f}", f"{y + 8 + (high - v) * down:.1f}") for i, v in enumerate(losses)
        ]

    line = " ".join(f"{a},{b}" for a, b in points(move.whole, 0))
    dots = [f'<circle cx="{a}" cy="{b}" r="1.8" fill="{_MOVED}"/>' for a, b in points(move.moved, task.STEPS)]
    hover = f"<title>{escape(move.sender.name)} to {escape(move.receiver.name)}: {move.apart:.1e} apart</title>"
    drawn = f'<polyline points="{line}" fill="none" stroke="{_STAYED}" stroke-width="4" stroke-linejoin="round"/>'
    return [f"<g>{hover}", frame, drawn, *dots, "</g>"]


def without_figures(text: str) -> str:
    """The page without the differences of losses, which depend on the processor."""
    return re.sub(r"\| \d(?:e-\d+)? \|$", "|", text, flags=re.MULTILINE)
