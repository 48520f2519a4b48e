"""docs/families.md and the pages below it: what came out for every architecture."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.peers.families.judge import Found

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "families.md"
LINES = Path(__file__).with_name("lines.tsv")

GROUPS = {
    "causal": "Text",
    "i2t": "Images and text",
    "mm": "Sound and text",
    "seq2seq": "Encoder and decoder",
    "mlm": "Masked language models",
    "speech": "Speech recognition",
    "clip": "Images beside text",
    "base": "Embedding models and classifiers",
    "remote": "Code of the publisher and diffusers",
}
"""Titles of the groups of architectures, in the order of the counts."""

PAGES = {
    "text": ("Families of text models", ("causal",)),
    "images": ("Families of models for images and text", ("i2t", "clip")),
    "sound": ("Families of models for sound", ("mm", "speech")),
    "encoders": ("Families of encoders and encoder-decoders", ("seq2seq", "mlm", "base")),
    "other": ("Families outside of transformers", ("remote",)),
}
"""The pages below docs/families.md, with their titles and the groups on them."""

_ABOUT = """\
# Model families

For people who ask whether their model is supported: every architecture that has a family, and what was checked of it.
A family says how a model is cut over ranks. It is chosen from `config.json`; for a model that is missing here you can
[write one](layouts/own-family.md). The three commands that most people need:

```text
# can this model be cut so?
ckpttool reshard MODEL DST --tp-out 2 --dry-run

# a first draft for a model that is missing
ckpttool inspect MODEL --suggest-family

# another family than config.json names
ckpttool reshard MODEL DST --family NAME
```

{contents}

`make test-families` writes these pages, last with transformers {version}. [Layouts](layouts.md) explains the file of a
family.

## Counts

{counts}

## Popular models

{popular}

## How each was checked

Every architecture is made tiny, with random weights, saved by transformers, and cut with `ckpttool reshard`.

| column | meaning |
| --- | --- |
| family | as `config.json` chooses. Those in `transformers/` cut as transformers does; the others as engines do |
| tp | sizes of tensor parallelism at which the model comes back byte for byte (8 heads, 2 of keys and values) |
| ep | the same with experts shared out over 2 ranks |
| logits | `equal`: with the shares of ranks 0 and 1 exchanged the model computes the same |
| config | names and shapes that `ckpttool fp8-size config.json` assumes are those of the saved model |
| engines | formats that are written and read back byte for byte |

The shares of a correct cut are alike: what rank 1 holds can take the place of rank 0's part, if this is done to every
tensor that is cut. A split head, a wrong axis or a missing partner changes the logits. In that column:

| entry | meaning |
| --- | --- |
| `plan` | each rank also holds what transformers' own plan gives it, element for element |
| `but for 2` | two kinds of tensors that are cut do not show in the logits: the tiny model's inputs do not reach them |
| `-` | the tiny model cannot be run here, or only the vocabulary is cut |
"""

_UNCOVERED = """\
## Without a family

These are refused when they are cut (`--split`, or [a family file](layouts/own-family.md),
help). Everything that needs no family works: `inspect`, `merge`, `fp8-cast`, `drop-keys`.

| `model_type` | architecture | result |
| --- | --- | --- |
"""

_NEXT = "\n**Next:** [built-in families](layouts/families.md), [write a family file](layouts/own-family.md)\n"

_GROUP = """\
# {title}

For people who look up an architecture: its family, and what was checked of it.
[Model families](../families.md#how-each-was-checked) explains the columns.

{tables}
**Next:** {others}, [model families](../families.md)
"""


@dataclass(frozen=True)
class Line:
    """A popular line of models."""

    name: str
    cls: str
    model_type: str


def popular() -> list[Line]:
    """The lines of models that most people run."""
    rows = LINES.read_text(encoding="utf-8").splitlines()
    return [Line(*row.split("\t")[:3]) for row in rows if row]


def of_line(line: Line, found: Sequence[Found]) -> Found | None:
    """What came out for a line: that of its class, else that of its model type."""
    by_class = [f for f in found if f.architecture.cls == line.cls]
    exact = [f for f in by_class if f.architecture.model_type == line.model_type]
    by_type = [f for f in found if f.architecture.model_type == line.model_type and line.model_type]
    return next(iter((*exact, *by_class, *by_type)), None)


def percent(part: int, whole: int) -> str:
    return f"{part} of {whole} ({100 * part // whole} %)" if whole else "0"


def counts(found: Sequence[Found]) -> str:
    rows = ["| architectures | cut and checked | logits compared | config |", "| --- | ---: | ---: | ---: |"]
    for group, title in GROUPS.items():
        here = [f for f in found if f.architecture.group == group]
        if here:
            passed = [f for f in here if f.passed]
            rows.append(
                f"| {title} | {percent(len(passed), len(here))} | {sum(f.logits_equal for f in passed)} | "
                f"{sum(f.declared == 'ok' for f in passed)} |"
            )
    lines = popular()
    done = sum((f := of_line(line, found)) is not None and f.passed for line in lines)
    rows.append(f"| [Popular models](#popular-models) | {percent(done, len(lines))} | | |")
    return "\n".join(rows)


def popular_table(found: Sequence[Found]) -> str:
    rows = ["| models | architecture | family | engines |", "| --- | --- | --- | --- |"]
    for line in popular():
        one = of_line(line, found)
        family = f"`{one.family}`" if one is not None and one.passed else "-"
        rows.append(f"| {line.name} | `{line.cls}` | {family} | {_engines(one) if one is not None else ''} |")
    return "\n".join(rows)


def _engines(f: Found) -> str:
    return ", ".join(f"`{e}`" for e, how in f.targets.items() if how.startswith("ok")) if f.passed else ""


def _tp(f: Found) -> str:
    return ", ".join(k.removeprefix("tp ") for k, v in f.back.items() if k.startswith("tp") and v == "ok")


def _logits(f: Found) -> str:
    hidden = [k for k in f.unseen if not k.endswith("bias")]
    said = "equal" if f.logits_equal else "-"
    if f.logits_equal and hidden:
        said += f" but for {len(hidden)}"
    return f"{said}, plan" if f.plan else said


def rows(found: Iterable[Found]) -> str:
    out = [
        "| `model_type` | architecture | family | tp | ep | logits | config | engines |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for f in found:
        ep = "2" if f.back.get("ep 2") == "ok" else ""
        config = "yes" if f.declared == "ok" else ""
        a = f.architecture
        cells = (f"`{a.model_type}`", f"`{a.cls}`", f"`{f.family}`", _tp(f), ep, _logits(f), config, _engines(f))
        out.append(f"| {' | '.join(cells)} |")
    return "\n".join(out)


def _why(f: Found) -> str:
    if f.not_made:
        return "not made tiny: needs timm" if "Timm" in f.not_made else "not made tiny"
    return "fails" if f.wrong else "refused"


def without_family(found: Sequence[Found]) -> str:
    left = [f for f in found if not f.passed]
    return "\n".join(f"| `{f.architecture.model_type}` | `{f.architecture.cls}` | {_why(f)} |" for f in left)


def entry(version: str, sums: str, lines: str, left: str) -> str:
    """docs/families.md, of its tables."""
    contents = ["| page | architectures |", "| --- | --- |"]
    for name, (title, groups) in PAGES.items():
        contents.append(f"| [{title}](families/{name}.md) | {', '.join(GROUPS[g] for g in groups)} |")
    about = _ABOUT.format(version=version, contents="\n".join(contents), counts=sums, popular=lines)
    return f"{about}\n{_UNCOVERED}{left}\n{_NEXT}"


def group_page(name: str, tables: Mapping[str, str]) -> str:
    """A page below docs/families.md, of the tables of its groups."""
    title, groups = PAGES[name]
    parts = "\n".join(f"## {GROUPS[g]}\n\n{tables[g]}\n" for g in groups if g in tables)
    others = ", ".join(f"[{PAGES[other][0].lower()}]({other}.md)" for other in PAGES if other != name)
    return _GROUP.format(title=title, tables=parts, others=others)


def write(page: Path, found: Sequence[Found], version: str) -> None:
    """All pages: the entry, and those below it in the directory of the same name."""
    page.with_suffix("").mkdir(exist_ok=True)
    text = entry(version, counts(found), popular_table(found), without_family(found))
    page.write_text(text, encoding="utf-8")
    passed = {g: [f for f in found if f.architecture.group == g and f.passed] for g in GROUPS}
    tables = {g: rows(some) for g, some in passed.items() if some}
    for name in PAGES:
        (page.with_suffix("") / f"{name}.md").write_text(group_page(name, tables), encoding="utf-8")
