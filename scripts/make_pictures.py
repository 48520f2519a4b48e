"""Draw the pictures of README.md from real checkpoints: python scripts/make_pictures.py

    docs/images/reshard-light.svg, reshard-dark.svg    three tensors of fixtures/llama_tp8 before and after resharding
    docs/images/reshard-narrow-light.svg, ...          the same for narrow screens

    docs/images/layout.svg    `inspect --ranks --svg` of a mixture of experts in two stages, which Paddle saved

They are drawn by the code that draws `inspect --ranks --svg`, of what the command really writes.
tests/docs/test_pictures.py fails when they are not what would be drawn now.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import ckpttool  # noqa: E402
from ckpttool.ops.inspect.holdings import Holding, Layout, layout_of  # noqa: E402
from ckpttool.ops.inspect.listing import TensorChoice, list_tensors  # noqa: E402
from ckpttool.report import svg  # noqa: E402
from ckpttool.report.strips import strips_of  # noqa: E402

IMAGES = ROOT / "docs" / "images"
SOURCE = ROOT / "fixtures" / "llama_tp8"
MIXTURE = "fixtures/paddle_zcc/ep2_tp2_sharding2_ema"
SHOWN = ("lm_head.weight", "mlp.down_proj.weight", "self_attn.k_proj.weight")
WIDTHS = {"": 840, "narrow-": 420}
PARTS = 5


def _kind(d: svg.Drawing, holding: Holding, y: float) -> None:
    """One kind of tensor: its name, how it is cut, and the strip."""
    (strip,) = strips_of(holding)
    name = holding.name.removeprefix("model.layers.{0..3}.").removesuffix(".weight")
    wide = d.width > 600
    left = 214 if wide else 160
    d.text(d.margin + 30, y + svg.BAR / 2 + 4, name, 12 if wide else 11)
    axis = holding.cut_axes[0] if holding.cut_axes else 0
    d.glyph(d.margin, y + (svg.BAR - svg.GLYPH) / 2, axis, min(len(strip.cells), PARTS))
    if d.world == 1:
        place = (d.margin + left, y, d.room - left, float(svg.BAR))
        d.box(place, "rank-0", "whole")
        d.text(place[0] + place[2] / 2, y + svg.BAR / 2 + 4, "whole", look="m")
        return
    pad = svg.PAD + 4 if holding.padding else 0
    svg.bar(d, strip.cells, svg.Frame(left, d.room - left - pad), "", y)
    if pad:
        svg.padding(d, holding, y)


def _state(d: svg.Drawing, title: str, layout: Layout) -> list[svg.PictureBlock]:
    """A checkpoint: what it is, and the strips of some of its tensors."""
    chosen = [next(h for h in layout.holdings if h.name.endswith(end)) for end in SHOWN]
    return [
        svg.PictureBlock(26, partial(_heading, d, title)),
        *[svg.PictureBlock(svg.BAR + 5, partial(_kind, d, h)) for h in chosen],
    ]


def _heading(d: svg.Drawing, title: str, y: float) -> None:
    d.text(d.margin, y + 13, title, 14, look="b", room=d.room)


def _arrow(d: svg.Drawing, command: str, y: float) -> None:
    """Down, with the command that does it beside it."""
    x = d.margin + svg.GLYPH / 2
    d.line(f"M{x:.1f} {y + 6:.1f}v24m-6 -7l6 7l6 -7")
    d.text(d.margin + 30, y + 23, f"$ {command}", 13 if d.width > 600 else 10.5)


def reshard(paints: svg.Paints, width: int, layouts: Sequence[Layout]) -> str:
    """Eight ranks, two ranks, one Hugging Face checkpoint."""
    d = svg.Drawing(layouts[0].world, paints, width, margin=24 if width > 600 else 10)
    blocks = [
        *_state(d, "llama_tp8: 8 tensor-parallel ranks", layouts[0]),
        svg.PictureBlock(44, partial(_arrow, d, "ckpttool reshard llama_tp8 llama_tp2 --tp-out 2")),
        *_state(d.like(layouts[1].world), "llama_tp2: 2 ranks", layouts[1]),
        svg.PictureBlock(44, partial(_arrow, d, "ckpttool reshard llama_tp2 llama_hf --to hf")),
        *_state(d.like(layouts[2].world), "llama_hf: a Hugging Face checkpoint", layouts[2]),
    ]
    label = "A checkpoint of eight tensor-parallel ranks becomes one of two ranks, then a Hugging Face checkpoint"
    return d.document(blocks, label, whole=True)


def pictures() -> dict[str, str]:
    """Each file of docs/images/ that this script makes, and its content."""
    with tempfile.TemporaryDirectory() as folder:
        two, whole = Path(folder) / "llama_tp2", Path(folder) / "llama_hf"
        ckpttool.open(str(SOURCE)).reshard(tp=2).run(str(two))
        ckpttool.open(str(two)).reshard(to="hf").run(str(whole))
        layouts = [layout_of(list_tensors(place)) for place in (SOURCE, two, whole)]
    mixture = layout_of(list_tensors(ROOT / MIXTURE, choice=TensorChoice(("model.layers.*",), components=("model",))))
    (page,) = svg.pages(mixture, f"{Path(MIXTURE).name}: who holds what")
    themes = {"light": svg.LIGHT, "dark": svg.DARK}
    return {"layout.svg": page} | {
        f"reshard-{size}{theme}.svg": reshard(paints, width, layouts)
        for theme, paints in themes.items()
        for size, width in WIDTHS.items()
    }


def main() -> None:
    """Write them."""
    IMAGES.mkdir(exist_ok=True)
    for name, content in pictures().items():
        (IMAGES / name).write_text(content, encoding="utf-8")
        print(IMAGES.relative_to(ROOT) / name, f"{len(content):,} bytes")


if __name__ == "__main__":
    main()
