"""Documents of reports that no checkpoint is needed for: of every kind of section, hostile, and large."""

from __future__ import annotations

from math import erf, prod
from typing import Any

import numpy as np

from ckpttool.report.page.document import Column, PageSection, PageTensors, ReportPage

HOSTILE = (
    "<script>window.broken = 1</script>",
    "</script><img src=x onerror='window.broken = 2'>",
    '"><svg onload="window.broken = 3">',
    "evil\u202egnp.exe",
    "new\nline\tand\x00nul",
    "=HYPERLINK('https://example.com')",
    "constructor.__proto__.toString",
    "&amp; &lt;b&gt; {{DATA}} ${window.broken=4}",
    "e\u0301\u4f60\u597d\U0001f600",
    "very.long." + "x" * 5000,
    "re:(((",
    "",
)


def names_of(layers: int, experts: int) -> list[str]:
    """Of a small mixture of experts."""
    out = ["model.embed_tokens.weight"]
    for layer in range(layers):
        at = f"model.layers.{layer}"
        out += [f"{at}.input_layernorm.weight"]
        out += [f"{at}.self_attn.{m}_proj.weight" for m in "qkvo"]
        out += [f"{at}.post_attention_layernorm.weight"]
        out += [f"{at}.mlp.experts.{e}.{m}_proj.weight" for e in range(experts) for m in ("gate", "up", "down")]
        out += [f"{at}.mlp.gate.weight"]
    return [*out, "model.norm.weight", "lm_head.weight"]


def shape_of(name: str) -> tuple[int, ...]:
    if "norm" in name:
        return (2048,)
    if "experts" in name:
        return (2048, 768) if "down" in name else (768, 2048)
    if "embed" in name or "lm_head" in name:
        return (151_936, 2048)
    return (128, 2048) if name.endswith("mlp.gate.weight") else (2048, 2048)


def tensors_of(names: list[str], *, stats: bool = True, seed: int = 0) -> PageTensors:
    """Columns as a checkpoint with these names would have, and statistics as trained weights have."""
    rng = np.random.default_rng(seed)
    n = len(names)
    files = [f"model-{i // 600:05}.safetensors" for i in range(n)]
    shapes = [shape_of(name) for name in names]
    columns: list[Column] = [
        {"id": "component", "title": "component", "kind": "text", "values": ["model"] * n, "hidden": True},
        {"id": "dtype", "title": "dtype", "kind": "text", "values": ["F32" if "norm" in x else "BF16" for x in names]},
        {"id": "shape", "title": "shape", "kind": "shape", "values": shapes},
        {"id": "bytes", "title": "size", "kind": "bytes", "values": [2 * prod(s) for s in shapes]},
        {
            "id": "file",
            "title": "file",
            "kind": "code",
            "values": files,
        },
        {
            "id": "offset",
            "title": "offset",
            "kind": "count",
            "values": [8192 + 3_145_728 * (i % 600) for i in range(n)],
            "hidden": True,
            "help": "Byte of the file at which the tensor begins.",
        },
    ]
    if not stats:
        return {"names": names, "columns": columns}
    std = rng.uniform(0.01, 0.05, n)
    high, low = std * rng.uniform(4, 6, n), -std * rng.uniform(4, 6, n)
    numbers = {"min": low, "max": high, "mean": std * rng.normal(0, 0.01, n), "std": std, "norm": std * 1254}
    for title, values in numbers.items():
        columns.append({"id": title, "title": title, "kind": "number", "values": values.tolist()})
    zeros = rng.integers(0, 3, n) / 1_572_864
    columns.append({"id": "zeros", "title": "zeros", "kind": "share", "values": zeros.tolist()})
    columns.append({"id": "nan", "title": "nan", "kind": "count", "values": [0] * n})
    return {"names": names, "columns": columns, "histograms": _histograms(low / std, high / std, rng)}


def _histograms(
    low: np.ndarray[tuple[int], np.dtype[np.float64]],
    high: np.ndarray[tuple[int], np.dtype[np.float64]],
    rng: np.random.Generator,
) -> list[list[int]]:
    """Of normal weights, in bins between the extremes, and as noisy as counts are."""
    bell = np.array([0.5 * (1 + erf(x / 2**0.5)) for x in np.linspace(-7, 7, 1401)])
    edges = np.linspace(low, high, 21, axis=1)
    expected = np.diff(np.interp(edges, np.linspace(-7, 7, 1401), bell), axis=1) * 1_572_864
    counts = rng.normal(expected, np.sqrt(expected) + 1e-9).clip(0)
    return [list(map(int, row)) for row in counts]


def large(n: int = 100_000) -> ReportPage:
    """As many tensors as the largest open models have, with statistics and histograms."""
    layers = 61
    names = names_of(layers, n // layers // 3 + 1)[:n]
    sections: list[PageSection] = [
        {"id": "sizes", "title": "Sizes", "kind": "treemap"},
        {"id": "tensors", "title": "Tensors", "kind": "tensors"},
    ]
    return {
        "schema": "ckpttool.report/1",
        "title": "large",
        "subtitle": "",
        "facts": [],
        "notes": [],
        "sections": sections,
        "tensors": tensors_of(names),
    }


PICTURE = """<svg xmlns="http://www.w3.org/2000/svg" width="720" height="120" viewBox="0 0 720 120">
<defs><pattern id="stripes" patternUnits="userSpaceOnUse" width="8" height="8" patternTransform="rotate(45)">
<rect width="4" height="8" fill="var(--ck-line, #7d8896)"/></pattern></defs>
<rect x="10" y="30" width="340" height="60" fill="url(#stripes)" stroke="var(--ck-line, #7d8896)"/>
<text x="10" y="20" font-size="13" fill="var(--ck-ink, #1f2933)">rank 0 &amp; rank 1</text></svg>"""


def sections() -> list[PageSection]:
    """One of every kind."""
    layers = [f"layers.{i}" for i in range(12)]
    modules = ["input_layernorm", "mlp.experts.down_proj", "mlp.experts.up_proj", "self_attn.q_proj"]
    rng = np.random.default_rng(3)
    heat: list[list[float | None]] = [[float(v) for v in row] for row in 10 ** rng.uniform(-5, -1, (12, 4))]
    heat[3][1] = None
    return [
        {"id": "sizes", "title": "Sizes", "kind": "treemap", "text": "Where the bytes are."},
        {"id": "tensors", "title": "Tensors", "kind": "tensors"},
        {
            "id": "layout",
            "title": "Layout over ranks",
            "kind": "figures",
            "figures": [{"title": "Two ranks", "caption": "Both ranks hold half of each matrix.", "svg": PICTURE}] * 2,
        },
        {
            "id": "norms",
            "title": "Norms by layer",
            "kind": "lines",
            "x": list(range(12)),
            "x_label": "layer",
            "y_label": "L2 norm",
            "log": True,
            "series": [
                {"name": "self_attn", "values": [2.0**i for i in range(12)]},
                {"name": "mlp", "values": [1.0 if i % 5 else None for i in range(12)]},
            ],
        },
        {
            "id": "change",
            "title": "Relative change",
            "kind": "heatmap",
            "rows": layers,
            "columns": modules,
            "values": heat,
            "unit": "relative change",
            "log": True,
        },
        {
            "id": "largest",
            "title": "Largest changes",
            "kind": "bars",
            "labels": [f"model.layers.{i}.mlp.experts.up_proj" for i in range(60)],
            "values": [60.0 - i for i in range(60)],
            "unit": "relative change",
        },
        {
            "id": "files",
            "title": "Files",
            "kind": "table",
            "columns": [{"title": "file", "kind": "code"}, {"title": "size", "kind": "bytes"}],
            "rows": [[f"model-{i:05}.safetensors", 1_000_000 * i] for i in range(60)],
        },
        {
            "id": "check",
            "title": "Check",
            "kind": "findings",
            "findings": [
                {
                    "id": "missing-file",
                    "severity": "error",
                    "text": "The index names a file that is not there.",
                    "where": "model-00003.safetensors",
                    "hint": "fetch it again",
                },
                {"id": "unused", "severity": "warning", "text": "A file that no index names."},
            ],
            "checked": {"files": 4, "tensors": 123},
        },
        {"id": "flat", "title": "Zeros by layer", "kind": "statement", "text": "Every layer has the same value."},
        {"id": "histograms", "title": "Histograms of both", "kind": "histograms"},
    ]


def with_others(tensors: PageTensors) -> PageTensors:
    """With histograms of another checkpoint, of the query projections, which are twice as wide there."""
    columns: dict[str, Any] = {c["id"]: c["values"] for c in tensors["columns"]}
    counts = tensors["histograms"]
    chosen = ["q_proj" in name for name in tensors["names"]]
    for end in ("min", "max"):
        wide: list[Any] = [2 * v if has else None for has, v in zip(chosen, columns[end], strict=True)]
        tensors["columns"] = [
            *tensors["columns"],
            {"id": f"other_{end}", "title": f"{end} of base", "kind": "number", "values": wide, "hidden": True},
        ]
    tensors["others"] = {
        "names": ["tuned", "base"],
        "counts": [found if has else None for has, found in zip(chosen, counts, strict=True)],
    }
    return tensors


def sample(names: list[str] | None = None) -> ReportPage:
    """All kinds of sections, about a small model."""
    return {
        "schema": "ckpttool.report/1",
        "title": "Qwen3-MoE, 12 layers, 8 experts, 1.02 B parameters, BF16",
        "subtitle": "models/tiny: hf, 3 files",
        "verdicts": [
            {"state": "good", "text": "Complete: 375 tensors in 3 files"},
            {"state": "differs", "text": "Differs from base: 12 of 375 tensors changed"},
            {"state": "unknown", "text": "Values not compared"},
            {"state": "bad", "text": "3 NaN in step-1000"},
        ],
        "facts": [["parameters", "1.02 B"], ["size", "2.04 GB"], ["files", "3"], ["dtype", "BF16"], ["layers", "12"]],
        "notes": ["2 tensors are tied."],
        "sections": sections(),
        "tensors": with_others(tensors_of(names_of(12, 8) if names is None else names)),
    }
