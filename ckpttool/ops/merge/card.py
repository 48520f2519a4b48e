"""The model card of a merge: README.md with front matter as the Hugging Face Hub reads it.

The front matter is YAML between two lines of three dashes; its fields are those of the Hub's documentation of model
cards (``base_model``, ``base_model_relation``, ``library_name``, ``license``, ...). What parents say of themselves is
said of the merge only where all of them say the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from io import TextIOWrapper
from typing import Any

import yaml

from ckpttool.core.files import DataFile, Place
from ckpttool.core.tensor_names import printable
from ckpttool.core.words import count, short
from ckpttool.kernels.merge import METHODS
from ckpttool.ops.merge.distances import NUMBERS, Distances
from ckpttool.ops.merge.origins import TensorOrigin, parameters_of, some_names
from ckpttool.ops.merge.provenance import Provenance
from ckpttool.storage.listing import COMPANION_LIMIT, leads_away
from ckpttool.version import __version__

NAME = "README.md"
_BEGIN, _END = "<!-- ckpttool merge: begin -->", "<!-- ckpttool merge: end -->"
_OLD = re.compile(r"^## Merge\n\nThis checkpoint was merged with ckpttool .*", re.MULTILINE | re.DOTALL)
"""What ckpttool 0.1 put at the end of a card."""
_MATTER = re.compile(r"\A\ufeff?\s*---[ \t]*\r?\n(.*?)\r?\n?^---[ \t]*(?:\r?\n|\Z)", re.MULTILINE | re.DOTALL)
_MARKUP = re.compile(r"[\\`*_{}\[\]<>#|&~!]")
_FIELD = re.compile(r"([\w-]+)[ \t]*:(?=\s|$)")
_LONGEST, _DEEPEST = 16 << 10, 100
"""Characters, and brackets, of fields that are read: others are no terms of a license."""
_TAKEN = ("license", "license_name", "license_link", "language", "pipeline_tag", "datasets")
"""Fields that are taken over where all parents agree: texts, or lists of texts."""


@dataclass(frozen=True, slots=True)
class ModelCard:
    """A model's own card."""

    fields: Mapping[str, Any] = field(default_factory=dict)
    """Texts, and lists of texts."""
    prose: str = ""

    @classmethod
    def at(cls, root: Place) -> ModelCard:
        """The card in a directory; an empty one where there is none that can be read."""
        path = root / NAME
        if not path.is_file() or leads_away(path) or DataFile.at(path).size > COMPANION_LIMIT:
            return cls()
        with TextIOWrapper(path.open("rb"), encoding="utf-8", errors="replace") as f:
            return cls.of(f.read())

    @classmethod
    def of(cls, text: str) -> ModelCard:
        """A card as text. What an earlier merge has written into it is left out."""
        found = _MATTER.match(text)
        prose = text[found.end() :] if found else text
        prose = _OLD.sub("", prose.rpartition(_END)[2])
        return cls(_fields(found[1]) if found else {}, prose.strip())


def _fields(text: str) -> dict[str, Any]:
    """The fields that can be taken over; of the loader's types, only text: YAML takes the language `no` for false."""
    lines, wanted = [], False  # results of benchmarks may be hundreds of kB beside these
    for line in text.splitlines():
        if start := _FIELD.match(line):
            wanted = start[1] in (*_TAKEN, "tags")
        if wanted:
            lines.append(line)
    text = "\n".join(lines)
    if len(text) > _LONGEST or text.count("[") + text.count("{") > _DEEPEST:
        return {}
    try:
        said = yaml.load(text, yaml.BaseLoader)  # noqa: S506 - makes nothing but texts, lists and mappings
    except (yaml.YAMLError, RecursionError, ValueError):
        return {}
    out: dict[str, Any] = {}
    for name, value in said.items() if isinstance(said, dict) else ():
        texts = value if isinstance(value, list) else [value]
        if isinstance(name, str) and all(isinstance(t, str) and t.strip() for t in texts) and 0 < len(texts) < 1000:
            out[name] = value
    return out


@dataclass(slots=True)
class Parents:
    """What the sources of a merge say of themselves."""

    cards: Mapping[str, ModelCard]
    """Cards by the source's label."""
    donor: str
    """The source whose config and tokenizer the output has."""
    hub: Sequence[str]
    """Models of the Hub among the sources, adapters too."""

    def agreed(self) -> dict[str, Any]:
        """Fields that all sources have, with the same value."""
        first, *others = [c.fields for c in self.cards.values()] or [{}]
        found = {n: first[n] for n in _TAKEN if n in first and all(o.get(n) == first[n] for o in others)}
        if "license" not in found:
            found = {n: v for n, v in found.items() if not n.startswith("license")}
        tags = [_list(f.get("tags")) for f in (first, *others)]
        found["tags"] = [t for t in tags[0] if all(t in some for some in tags[1:])]
        return found


def _list(value: object) -> list[str]:
    return (
        [value]
        if isinstance(value, str)
        else [v for v in value if isinstance(v, str)]
        if isinstance(value, list)
        else []
    )


def hub_names(paths: Iterable[str]) -> list[str]:
    """The models of the Hub that places lie in: ``ORG/NAME``, each once."""
    found = []
    for path in paths:
        if path.startswith("hf://"):
            owner, _, rest = path.removeprefix("hf://").partition("/")
            found.append(f"{owner}/{re.split('[/@]', rest)[0]}")
    return list(dict.fromkeys(found))


@dataclass(frozen=True, slots=True)
class Subject:
    """What a card is about."""

    name: str
    provenance: Provenance
    groups: Sequence[TensorOrigin]
    parents: Parents
    library: str
    """``transformers``, or "" where it is not certain that a library loads it."""
    command: str
    """What makes it again of the recipe."""
    names: Mapping[str, str] = field(default_factory=dict)
    """What to call the sources, by label: a card is published, and where they lie on a machine is nobody's business."""
    paths: Mapping[str, str] = field(default_factory=dict)
    """The same of everything that the recipe names."""

    def called(self, label: str) -> str:
        return self.names.get(label, label)


def card(subject: Subject, hashes: Mapping[str, str], distances: Distances | None) -> bytes:
    """The card. ``hashes`` are those of the sources, by label."""
    parents = subject.parents
    parts = [_matter(subject), _BEGIN, f"# {_plain(subject.name)}", *_what(subject)]
    parts += ["## Sources", _sources(subject, hashes)]
    parts += ["## What came from where", _groups(subject)]
    if distances is not None:
        parts += ["## How far it is from its sources", *_distances(distances, subject)]
    text, kind = recipe_text(subject.provenance)
    file = "merge_config.json" if kind == "json" else "merge.yml"
    parts += ["## Recipe", _fenced(_renamed(text, subject.paths), kind)]
    again = f"With the recipe in `{file}` and the sources where it says, this makes it again:"
    parts += [again, _fenced(subject.command, "bash"), _END]
    if prose := parents.cards[parents.donor].prose if parents.donor in parents.cards else "":
        parts += [
            f"## About {_code(subject.called(parents.donor))}",
            "Config and tokenizer are those of this model. What follows is its own card: it is about that model.",
            prose,
        ]
    return ("\n\n".join(parts) + "\n").encode(errors="replace")


def recipe_text(provenance: Provenance) -> tuple[str, str]:
    """The recipe as it was written, or in mergekit's words; and its language."""
    text = provenance.text.strip("\n")
    if text:
        return text, "json" if text.lstrip().startswith("{") else "yaml"
    return _yaml(provenance.recipe), "yaml"


def _renamed(text: str, paths: Mapping[str, str]) -> str:
    """The recipe with other names for its sources."""
    for path in sorted(paths, key=len, reverse=True):
        parts = re.split(rf"(?<![\w/.-])(?:\./)?{re.escape(path)}(?![\w/-])", text)
        text = paths[path].join(parts)
    return text


def _yaml(data: Mapping[str, Any]) -> str:
    return yaml.safe_dump(dict(data), allow_unicode=True, sort_keys=False, width=100).strip()


def _matter(subject: Subject) -> str:
    agreed = subject.parents.agreed()
    method = str(subject.provenance.recipe.get("merge_method", ""))
    fields: dict[str, Any] = {}
    if subject.parents.hub:
        fields |= {"base_model": list(subject.parents.hub), "base_model_relation": "merge"}
    if subject.library:
        fields["library_name"] = subject.library
    tags = dict.fromkeys(["merge", method, "ckpttool", *agreed.pop("tags")])
    return f"---\n{_yaml(fields | agreed | {'tags': [t for t in tags if t]})}\n---"


def _what(subject: Subject) -> list[str]:
    """What it is, in a sentence, and what the method does."""
    p = subject.provenance
    method = METHODS[str(p.recipe["merge_method"])]
    what = "master weights" if p.component == "master_weights" else "weights"
    bases = {g.base for g in subject.groups if g.base} - {label for g in subject.groups for label, _ in g.models}
    sources = len(p.origins) - len(bases)
    models = count(sources, "model") + (f" and {'its' if sources == 1 else 'their'} base" if bases else "")
    said = f"The {what} of {models}, merged with ckpttool {__version__} by the method"
    said += f" [`{method.name}`]({method.paper})" if method.paper else f" `{method.name}`"
    drawn = f", seed {p.seed}" if p.seed is not None else ""
    formula = method.formula
    first = (method.program.__doc__ or "").partition("\n")[0]
    about = f" {first}" if first[:1].isupper() else ""
    return [
        f"{said}{drawn}.{about}",
        f"Each tensor is `{formula}`: `x_i` are the models, `b` the base, `d_i` = `x_i` - `b`, `w_i` the weights.",
    ]


def _sources(subject: Subject, hashes: Mapping[str, str]) -> str:
    bases = {g.base for g in subject.groups if g.base}
    cards = subject.parents.cards
    licensed = any("license" in c.fields for c in cards.values())
    head = ["source", "parameters", "format", "tensors", "size", *["license"] * licensed, "hash"]
    rows = []
    for o in subject.provenance.origins:
        said = parameters_of(subject.groups, o.label) or ("base" if o.label in bases else "")
        terms = ", ".join(_list(cards[o.label].fields.get("license"))) if o.label in cards else ""
        rows.append(
            [
                _linked(subject.called(o.label)),
                said,
                o.format,
                f"{o.tensors:,}",
                short(sum(n for _, n in o.files)),
                *[_plain(terms)] * licensed,
                _code(hashes.get(o.label, "")),
            ]
        )
    return _table(head, rows, right={"tensors", "size"})


def _groups(subject: Subject) -> str:
    groups = subject.groups
    rows = [
        [some_names(g.names, _code), f"{g.elements:,}", g.how, "<br>".join(map(_source, g.sources(subject.names)))]
        for g in groups[:50]
    ]
    table = _table(["tensors", "elements", "method", "from"], rows, right={"elements"})
    return table + (f"\n\nand {len(groups) - 50} more" if len(groups) > 50 else "")


def _source(source: tuple[str, str]) -> str:
    label, said = source
    return f"{_code(label)}: {said}" if said else _code(label)


HEADS = {
    "distance": "distance",
    "cosine": "cosine",
    "task_cosine": "cosine of the changes",
    "changed": "changed",
    "kept": "kept",
    "agreeing": "of the elected sign",
}


def _distances(distances: Distances, subject: Subject) -> list[str]:
    every = distances.everything
    joins = [(p, distances.joins(p)) for p in distances.parents]
    shown = [n for n in NUMBERS if any(n in j for _, j in joins)]
    rows = [
        [
            _linked(subject.called(p.label)) + " (base)" * p.is_base,
            *[_number(j[n](every), n) if n in j else "" for n in shown],
        ]
        for p, j in joins
    ]
    text = "Distance is the L2 norm of the difference divided by that of the source"
    if "changed" in shown:
        text += "; changed, the share of elements in which the source differs from the base"
    if "kept" in shown:
        text += "; kept, the share that the method lets it add"
    if conflicts := distances.conflicts:
        text += f". In {_number(conflicts(every), 'conflicts')} of the elements two sources pull in opposite directions"
    return [_table(["source", *[HEADS[n] for n in shown]], rows, right=set(HEADS.values())), text + "."]


def _number(value: float | None, name: str) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if name in ("distance", "cosine", "task_cosine") else f"{100 * value:.2f} %"


# -- Markdown of texts that may hold anything


def _code(text: str) -> str:
    """A text as it is, in a span of code that may stand in a table."""
    text = printable(text).strip()
    if not text:
        return ""
    ticks = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    space = " " if "`" in text else ""
    return f"{ticks}{space}{text}{space}{ticks}".replace("|", "\\|")


def _plain(text: str) -> str:
    """A text without what Markdown or HTML would make of it."""
    text = printable(text).strip()
    return text if re.fullmatch(r"\w[\w.-]*", text) and not text.endswith("_") else _MARKUP.sub(r"\\\g<0>", text)


def _linked(label: str) -> str:
    """A source; a model of the Hub as a link to it."""
    names = hub_names([label.partition("+")[0]])
    if not names or not re.fullmatch(r"[\w.-]+/[\w.-]+", names[0]):
        return _code(label)
    return f"[{_code(label.removeprefix('hf://'))}](https://huggingface.co/{names[0]})"


def _fenced(text: str, kind: str) -> str:
    ticks = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{ticks}{kind}\n{text}\n{ticks}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], right: set[str]) -> str:
    lines = [head, ["---:" if h in right else "---" for h in head], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
