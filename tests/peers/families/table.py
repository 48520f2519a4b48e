"""docs/families.md and docs/families/architectures.md: what came out for every architecture."""

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

_ABOUT = """\
# Model families

Which models have a family, that is, rules for cutting them over ranks, and how the families were checked. The family
is chosen by `architectures` in `config.json`, then by `model_type`; for a model that is missing here you can
[write one](layouts/own-family.md).

```text
# can this model be cut so?
ckpttool reshard MODEL DST --tp-out 2 --dry-run

# a first draft for a model that is missing
ckpttool inspect MODEL --suggest-family

# another family than config.json names
ckpttool reshard MODEL DST --family NAME
```

[All architectures](families/architectures.md) lists every architecture with its family. `make test-families` writes
both pages, last with transformers {version}.

## Counts

{counts}

## Popular models

{popular}

## How each was checked

Every architecture is made tiny, with random weights, saved by transformers, and cut with `ckpttool reshard`. Each
comes back byte for byte from 2 and 4 tensor-parallel ranks (8 heads, 2 of keys and values), and computes equal logits
with the shares of ranks 0 and 1 exchanged: a split head, a wrong axis or a missing partner would change them. What
differs is in
parentheses in the list of all:

| entry | meaning |
| --- | --- |
| `tp 16` | also comes back from 16 tensor-parallel ranks |
| `not tp 4` | refused at this size |
| `ep` | also comes back with experts distributed over 2 ranks |
| `config` | names and shapes that `ckpttool size config.json` assumes are those of the saved model |
| `plan` | each rank also holds what transformers' own plan gives it, element for element |
| `vllm`, `trtllm`, `deepseek` | this format is written and read back byte for byte |
| `unseen 2` | two kinds of tensors that are cut do not show in the logits: the tiny model's inputs do not reach them |
| `no logits` | the tiny model cannot be run here, or only the vocabulary is cut |
"""

_UNCOVERED = """\
## Without a family

These are refused when they are cut (`--split`, or [a family file](layouts/own-family.md),
help). Everything that needs no family works: `inspect`, `merge`, `quantize`, `drop-keys`.

"""

_NEXT = "\n**Next:** [all architectures](families/architectures.md), [write a family file](layouts/own-family.md)\n"

_ALL = """\
# All architectures

Every architecture that was cut and checked, with its family; families in `transformers/` cut as transformers does, the
others as engines do. [Model families](../families.md#how-each-was-checked) explains what is in parentheses.

{tables}
**Next:** [model families](../families.md), [write a family file](../layouts/own-family.md)
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
    """A row for the popular lines of models that one family cuts and the same engines take."""
    alike: dict[tuple[str, str], list[str]] = {}
    for line in popular():
        one = of_line(line, found)
        family = f"`{one.family}`" if one is not None and one.passed else "-"
        alike.setdefault((family, _engines(one) if one is not None else ""), []).append(line.name)
    rows = ["| models | family | engines |", "| --- | --- | --- |"]
    return "\n".join([*rows, *(f"| {', '.join(names)} | {f} | {e} |" for (f, e), names in alike.items())])


def _engines(f: Found) -> str:
    return ", ".join(f"`{e}`" for e, how in f.targets.items() if how.startswith("ok")) if f.passed else ""


def checked(f: Found) -> str:
    """What was checked beyond two and four ranks and equal logits, and what could not be."""
    ranks = [k for k, v in f.back.items() if k.startswith("tp") and v == "ok" and k not in ("tp 2", "tp 4")]
    hidden = len([k for k in f.unseen if not k.endswith("bias")])
    said = {
        **{f"not {k}": f.back.get(k) != "ok" for k in ("tp 2", "tp 4")},
        "no logits": not f.logits_equal,
        f"unseen {hidden}": f.logits_equal and hidden,
        "ep": f.back.get("ep 2") == "ok",
        "config": f.declared == "ok",
        "plan": f.plan,
    }
    engines = [name for name, how in f.targets.items() if how.startswith("ok")] if f.passed else []
    return ", ".join([*ranks, *(word for word, holds in said.items() if holds), *engines])


def rows(found: Iterable[Found]) -> str:
    """A line for the architectures of one family that were checked alike."""
    alike: dict[tuple[str, str], list[str]] = {}
    for f in found:
        alike.setdefault((f.family, checked(f)), []).append(f.architecture.cls)
    return "\n".join(
        f"- `{family}`: {', '.join(f'`{name}`' for name in dict.fromkeys(names))}{f' ({said})' if said else ''}"
        for (family, said), names in sorted(alike.items())
    )


def _why(f: Found) -> str:
    if f.not_made:
        return "not made tiny: needs timm" if "Timm" in f.not_made else "not made tiny"
    return "fails" if f.wrong else "refused"


def without_family(found: Sequence[Found]) -> str:
    """A line for each result, with the architectures that have it."""
    alike: dict[str, list[str]] = {}
    for f in found:
        if not f.passed:
            alike.setdefault(_why(f), []).append(f"`{f.architecture.cls}` of `{f.architecture.model_type}`")
    return "\n".join(f"- {why}: {', '.join(dict.fromkeys(names))}" for why, names in alike.items())


def entry(version: str, sums: str, lines: str, left: str) -> str:
    """docs/families.md, of its tables."""
    about = _ABOUT.format(version=version, counts=sums, popular=lines)
    return f"{about}\n{_UNCOVERED}{left}\n{_NEXT}"


def all_page(tables: Mapping[str, str]) -> str:
    """docs/families/architectures.md, of the tables of the groups."""
    return _ALL.format(tables="\n".join(f"## {title}\n\n{tables[g]}\n" for g, title in GROUPS.items() if g in tables))


def write(page: Path, found: Sequence[Found], version: str) -> None:
    """Both pages: the entry, and the list of all in the directory of the same name."""
    page.with_suffix("").mkdir(exist_ok=True)
    text = entry(version, counts(found), popular_table(found), without_family(found))
    page.write_text(text, encoding="utf-8")
    passed = {g: [f for f in found if f.architecture.group == g and f.passed] for g in GROUPS}
    tables = {g: rows(some) for g, some in passed.items() if some}
    (page.with_suffix("") / "architectures.md").write_text(all_page(tables), encoding="utf-8")
