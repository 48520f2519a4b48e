"""Finds the ``tensors:`` section of a family by trying: which tensors a model has, and how config.json gives sizes.

Tiny models are made from configs in which sizes, flags and lists of layers are drawn at random. For every axis the
smallest expression of config fields is taken that comes to its length in all of them, for every tensor that is not
always there the simplest condition. Models of further configs, which were not used for that, must have exactly the
tensors that the section declares; otherwise there is none.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ckpttool.errors import CkptError
from ckpttool.layout.family import load_family
from ckpttool.layout.shapes import declared_tensors
from scripts.family_rules import Reading, Refused, builder, joined, text_path, walk
from tests.peers.families import plans
from tests.peers.families.tiny import Architecture

SEEN, FRESH = 24, 6
"""Random configs that an expression is found with, and that it is tried on."""
FACTORS = (1, 2, 3, 5)
CONSTANTS = (2, 3, 4)
MOST_CONSTANT = 4
"""Largest length that may stand in a file as a number."""
NOT_SIZES = re.compile(r"(token_id|_index|position|_eps|seed|theta|chunk|sliding_window|max_|top_?k|per_tok|window)")
CORE = re.compile(
    r"(hidden_size|vocab_size|num_hidden_layers|intermediate_size|num_attention_heads|experts|num_key_value_heads)$"
)
"""Sizes that every config.json says: without one there is nothing to compute."""
Shape = tuple[int, ...]


class Place(NamedTuple):
    """A tensor that a line declares."""

    section: str
    name: str


@dataclass
class Sample:
    """One model."""

    config: dict[str, Any]
    fields: dict[str, Any]
    shapes: dict[str, Shape]
    layers: int
    outside: dict[str, Shape] = field(default_factory=dict)
    inside: list[dict[str, Shape]] = field(default_factory=list)
    """By layer: rest of the name, with {expert}, and shape."""


def sampled(architecture: Architecture, changes: Mapping[str, Any], reading: Reading, path: str) -> Sample | None:
    """The tensors of one config; None where the class does not take it."""
    try:
        model = builder(architecture, changes)()
        shapes = {n: tuple(t.shape) for n, t in plans.stored(model, plans.numbered(model)).items()}
    except Exception:  # noqa: BLE001 - whatever a class says to numbers that it does not like
        return None
    config = json.loads(model.config.to_json_string(use_diff=False))
    config["architectures"] = [architecture.cls]
    fields = {n.removeprefix(path): v for n, v in walk(config) if n.startswith(path) and "." not in n[len(path) :]}
    out = Sample(config, fields, shapes, 0)
    start = reading.prefix.partition("{layer}")[0]
    inside: dict[int, dict[str, Shape]] = {}
    experts: dict[tuple[int, str], int] = {}
    for name, shape in shapes.items():
        rest = name.removeprefix(start)
        number, _, tail = rest.partition(".")
        if rest == name or not number.isdigit():
            out.outside[name] = shape
            continue
        shown = re.sub(r"(expert\w*\.)\d+\.", r"\1{expert}.", tail)
        if inside.setdefault(int(number), {}).setdefault(shown, shape) != shape:
            raise Refused(f"experts of several sizes: {name}")
        experts[int(number), shown] = experts.get((int(number), shown), 0) + 1
    out.layers = 1 + max(inside, default=-1)
    out.inside = [inside.get(i, {}) for i in range(out.layers)]
    return out


# --- expressions ---


class Term(NamedTuple):
    """An expression with what it comes to in every sample."""

    text: str
    binds: int
    """How tightly: 3 a word, 2 a product, 1 a sum."""
    size: int


Values = tuple[int, ...]


def _joined(a: Term, sign: str, b: Term) -> Term:
    binds = 2 if sign in "*//" else 1
    left = a.text if a.binds >= binds else f"({a.text})"
    right = b.text if b.binds > binds or (b.binds == binds and sign in "+*" and "//" not in b.text) else f"({b.text})"
    return Term(f"{left} {sign} {right}", binds, a.size + b.size)


def _combined(x: Values, sign: str, y: Values) -> Values | None:
    if sign == "+":
        return tuple(a + b for a, b in zip(x, y, strict=True))
    if sign == "-":
        got = tuple(a - b for a, b in zip(x, y, strict=True))
        return got if min(got) > 0 else None
    if sign == "*":
        return tuple(a * b for a, b in zip(x, y, strict=True))
    if 0 in y:
        return None
    got = tuple(a // b for a, b in zip(x, y, strict=True))
    return got if min(got) > 0 else None


def expression(target: Values, atoms: Mapping[str, Values]) -> str | None:
    """The smallest expression of these words that comes to the target everywhere."""
    found: dict[Values, Term] = {v: Term(n, 3, 1) for n, v in reversed(list(atoms.items()))}
    words = {(c,) * len(target): Term(str(c), 3, 1) for c in CONSTANTS} | found
    if target in found:
        return found[target].text
    for _ in range(2):
        for x, a in sorted(found.items(), key=lambda i: i[1].size):
            for y, b in words.items():
                for left, right, s, t in ((x, y, a, b), (y, x, b, a)):
                    for sign in "+", "*", "-", "//":
                        if sign == "+" and s == t:
                            continue  # twice this is `2 * this`
                        got = _combined(left, sign, right)
                        if got is not None and got not in found:
                            found[got] = _joined(s, sign, t)
        if target in found:
            return found[target].text
    best: Term | None = None
    for x, a in found.items():
        for sign, back in (("+", "-"), ("*", "//")):
            rest = _combined(target, back, x)
            if (
                rest in found
                and _combined(x, sign, rest) == target
                and (best is None or a.size + found[rest].size < best.size)
            ):
                best = _joined(a, sign, found[rest])
    return best.text if best else None


# --- conditions ---


def features(samples: Sequence[Sample], words: Mapping[str, str], *, layered: bool) -> dict[str, list[bool]]:
    """Conditions that a config can give, with whether they hold for each sample (and layer)."""
    out: dict[str, list[bool]] = {}
    cases = [(s, i) for s in samples for i in range(s.layers if layered else 1)]

    def add(text: str, holds: Any) -> None:
        try:
            out[text] = [bool(holds(s.fields, i)) for s, i in cases]
        except (TypeError, IndexError, KeyError, ZeroDivisionError):
            return

    for name in samples[0].fields:
        values = [s.fields.get(name) for s in samples]
        word = words.get(name, name)
        if all(isinstance(v, bool) for v in values):
            add(word, lambda f, _, n=name: f[n])
            add(f"not {word}", lambda f, _, n=name: not f[n])
        elif all(v is None or type(v) is int for v in values) and len(set(map(repr, values))) > 1:
            if not layered or None in values or 0 in values:
                add(f"{word} > 0", lambda f, _, n=name: (f[n] or 0) > 0)
                add(f"{word} == 0", lambda f, _, n=name: not f[n])
            if layered and None not in values:
                add(f"layer >= {word}", lambda f, i, n=name: i >= f[n])
                add(f"layer < {word}", lambda f, i, n=name: i < f[n])
                add(f"(layer + 1) % {word} == 0", lambda f, i, n=name: (i + 1) % f[n] == 0)
                add(f"layer % {word} == 0", lambda f, i, n=name: i % f[n] == 0)
                add(f"(layer + 1) % {word} > 0", lambda f, i, n=name: (i + 1) % f[n] > 0)
        elif layered and all(isinstance(v, list) for v in values):
            if all(len(s.fields[name]) == s.layers for s in samples):
                for kind in sorted({x for v in values for x in v or [] if isinstance(x, str)}):
                    add(f"{word}[layer] == '{kind}'", lambda f, i, n=name, k=kind: f[n][i] == k)
                    add(f"{word}[layer] != '{kind}'", lambda f, i, n=name, k=kind: f[n][i] != k)
            else:
                add(f"layer in {word}", lambda f, i, n=name: i in f[n])
                add(f"layer not in {word}", lambda f, i, n=name: i not in f[n])
    return out


def condition(there: Sequence[bool], known: Mapping[str, list[bool]]) -> str | None:
    """The simplest condition that holds exactly where the tensor is."""
    want = list(there)
    if all(want):
        return ""
    for text, holds in known.items():
        if holds == want:
            return text
    items = list(known.items())
    above = [(t, h) for t, h in items if all(x or not w for x, w in zip(h, want, strict=True))]
    for at, (a, x) in enumerate(above):
        for b, y in above[at + 1 :]:
            if [p and q for p, q in zip(x, y, strict=True)] == want:
                return f"{a} and {b}"
    below = [(t, h) for t, h in items if all(w or not x for x, w in zip(h, want, strict=True))]
    for at, (a, x) in enumerate(below):
        for b, y in below[at + 1 :]:
            if [p or q for p, q in zip(x, y, strict=True)] == want:
                return f"{a} or {b}"
    return None


# --- the search ---


class Search:
    """Random models of one architecture, and what they tell."""

    def __init__(self, reading: Reading) -> None:
        self.reading = reading
        self.architecture = reading.architecture
        self.path = text_path(reading.config)
        self.draw = random.Random(19)  # noqa: S311 - the same ones every time
        base = self.sample({})
        if base is None:
            raise Refused("the tiny model cannot be made")
        if any(re.search(r"\.\d+\.", n) for n in base.outside):
            raise Refused("there are layers besides those of the language model")
        self.base = base
        self.sizes: list[str] = []
        """Fields that change lengths of axes."""
        self.depends: dict[tuple[Place, int], set[str]] = {}
        self.flags: dict[str, list[Any]] = {}
        """Fields that change which tensors there are, and values to draw from."""
        self.fixed: set[int] = set()
        """Values of fields that no class takes another one for."""
        self.look()

    def float32(self, name: str) -> bool:
        """Whether the class keeps a tensor in float32 whatever the config says."""
        kept = getattr(builder(self.architecture)(), "_keep_in_fp32_modules_strict", None) or []
        return any(re.search(rf"(^|\.){re.escape(k)}(\.|$)", name) for k in kept)

    def sample(self, changes: Mapping[str, Any]) -> Sample | None:
        """A model of the tiny config with these changes."""
        return sampled(self.architecture, {self.path + n: v for n, v in changes.items()}, self.reading, self.path)

    def look(self) -> None:
        """Change one field at a time."""
        for name, value in self.base.fields.items():
            if isinstance(value, bool):
                if (other := self.sample({name: not value})) and set(other.shapes) != set(self.base.shapes):
                    self.flags[name] = [value, not value]
            elif type(value) is int and value >= 0 and not NOT_SIZES.search(name):
                self.look_at_number(name, value)
            elif isinstance(value, list) and len(value) == self.base.layers and all(isinstance(v, str) for v in value):
                kinds = sorted(set(value))
                others = ([k] * len(value) for k in kinds)
                if any((o := self.sample({name: x})) and o.inside != self.base.inside for x in others):
                    self.flags[name] = [[self.draw.choice(kinds) for _ in value] for _ in range(8)]
            elif isinstance(value, list) and not value and name.endswith("_layers"):
                other = self.sample({name: [0]})
                if other is not None and other.inside != self.base.inside:
                    self.flags[name] = [[], [0], [1]]

    def look_at_number(self, name: str, value: int) -> None:
        """What another number, or none, changes."""
        if re.search(r"(num_hidden_layers|num_layers|n_layers?)$", name):
            return
        taken = False
        for other in (2 * value, 3 * value, value + 1, 0):
            got = self.sample({name: other}) if other != value else None
            if got is None:
                continue
            taken = True
            if self.names(got) != self.names(self.base):
                self.flags[name] = [value, other, *range(3), *([] if value else [24, 40])]
            for place, shape, now in self.both(self.base, got):
                for axis, (a, b) in enumerate(zip(shape, now, strict=True)):
                    if a != b:
                        self.depends.setdefault((place, axis), set()).add(name)
                        if name not in self.sizes:
                            self.sizes.append(name)
            if name in self.sizes:
                break
        if not taken and value > MOST_CONSTANT:
            self.fixed.add(value)
        if (got := self.sample({name: None})) and self.names(got) != self.names(self.base):
            self.flags[name] = [value, value, None]

    def names(self, sample: Sample) -> list[set[str]]:
        """Which tensors there are, however many experts."""
        return [set(sample.outside), *map(set, sample.inside)]

    def both(self, one: Sample, other: Sample) -> Iterator[tuple[Place, Shape, Shape]]:
        """Tensors that two samples have."""
        for name in one.outside.keys() & other.outside:
            yield Place("", name), one.outside[name], other.outside[name]
        for a, b in zip(one.inside, other.inside, strict=False):
            for name in a.keys() & b:
                if len(a[name]) == len(b[name]):
                    yield Place("layers", name), a[name], b[name]

    def some_of_each(self) -> list[Sample]:
        """Random configs with every value of every flag."""
        out = []
        for name, values in self.flags.items():
            for value in {repr(v): v for v in values}.values():
                if value != self.base.fields[name]:
                    out += self.some(4, {name: value}, needed=False)
        return out

    def some(self, count: int, fixed: Mapping[str, Any] | None = None, *, needed: bool = True) -> list[Sample]:
        """So many random configs that the class takes; ``fixed`` fields are in all of them."""
        out: list[Sample] = []
        names = [n for n in (*self.sizes, *self.flags) if n not in (fixed or {})]
        for _ in range(20 * count):
            if len(out) == count or not names:
                break
            changes: dict[str, Any] = dict(fixed or {})
            for name in self.draw.sample(names, self.draw.randint(1, len(names))):
                if name in self.flags and (name not in self.sizes or self.draw.random() < 0.5):
                    changes[name] = self.draw.choice(self.flags[name])
                elif self.base.fields[name]:
                    changes[name] = self.base.fields[name] * self.draw.choice(FACTORS)
            if (got := self.sample(changes)) is not None:
                out.append(got)
        if len(out) < count and needed:
            raise Refused(f"of {20 * count} random configs the class took {len(out)}")
        return out


class Line(NamedTuple):
    """A tensor of the section."""

    place: Place
    condition: str
    shape: str


def words_of(reading: Reading, sample: Sample, path: str) -> dict[str, str]:
    """Field -> the name of the size that comes from it."""
    out = {}
    for name, value in reading.sizes.items():
        fields = [value] if isinstance(value, str) else value["from"] if isinstance(value, dict) else value
        for f in fields:
            bare = f.removeprefix(path)
            if bare in sample.fields:
                out[bare] = name
    return out


def lines_of(search: Search, samples: Sequence[Sample], words: Mapping[str, str]) -> list[Line]:
    """What each tensor's line says. Raises Refused where nothing simple fits."""
    out = []
    known = {True: features(samples, words, layered=True), False: features(samples, words, layered=False)}
    places = dict.fromkeys(Place("", n) for s in samples for n in s.outside)
    places |= dict.fromkeys(Place("layers", n) for s in samples for layer in s.inside for n in layer)
    for place in places:
        layered = place.section == "layers"
        cases = [(s, t) for s in samples for t in (s.inside if layered else [s.outside])]
        when = condition([place.name in t for _, t in cases], known[layered])
        if when is None:
            raise Refused(f"no simple condition says when there is {place.name}")
        there = [(s, t[place.name]) for s, t in cases if place.name in t]
        if len({len(shape) for _, shape in there}) > 1:
            raise Refused(f"{place.name} has several numbers of axes")
        at = [i for i, (_, t) in enumerate(cases) if place.name in t]
        held = {text: [h[i] for i in at] for text, h in known[layered].items() if "[layer] ==" in text}
        axes = [either_axis(search, place, i, there, words, held) for i in range(len(there[0][1]))]
        shape = f"[{', '.join(axes)}]"
        out.append(Line(place, when, f"{{shape: {shape}, dtype: F32}}" if search.float32(place.name) else shape))
    return out


def axis_of(
    search: Search,
    place: Place,
    axis: int,
    there: Sequence[tuple[Sample, Shape]],
    words: Mapping[str, str],
    *,
    alone: bool = False,
) -> str:
    """The length of one axis, as an expression."""
    target = tuple(shape[axis] for _, shape in there)
    if len(set(target)) == 1 and (alone or not search.depends.get((place, axis))):
        if target[0] > MOST_CONSTANT or target[0] in search.fixed:
            raise Refused(f"nothing says why {place.name} has {target[0]} elements on axis {axis}")
        return str(target[0])
    counted = [n for n, v in search.flags.items() if all(type(x) is int for x in v) and n not in search.sizes]
    names = search.depends.get((place, axis)) or {*search.sizes, *counted}
    atoms = {words.get(n, n): tuple(s.fields[n] or 0 for s, _ in there) for n in [*search.sizes, *counted]}
    own = {w: v for w, v in atoms.items() if w in {words.get(n, n) for n in names}}
    got = expression(target, own) or expression(target, atoms)
    if got is None:
        raise Refused(f"no expression of {', '.join(sorted(names))} gives axis {axis} of {place.name}: {target[:6]}")
    return got


def either_axis(
    search: Search,
    place: Place,
    axis: int,
    there: Sequence[tuple[Sample, Shape]],
    words: Mapping[str, str],
    kinds: Mapping[str, list[bool]],
) -> str:
    """The length of one axis, which may be another one in another kind of layer."""
    try:
        return axis_of(search, place, axis, there, words)
    except Refused:
        for text, holds in kinds.items():
            parts = [[c for c, h in zip(there, holds, strict=True) if h == which] for which in (True, False)]
            if not all(parts):
                continue
            try:
                one, other = (axis_of(search, place, axis, part, words, alone=True) for part in parts)
            except Refused:
                continue
            return f'"{one} if {text} else {other}"'
        raise


def folded(lines: Sequence[Line]) -> list[tuple[str, str]]:
    """Lines that differ in one word of the name as one."""
    return joined([(x.place.name, x.shape) for x in lines])


def default_of(architecture: Architecture, name: str) -> Any:
    """What the class takes for a field that config.json lacks; ... for what it cannot be without."""
    cls: Any = CONFIG_MAPPING[architecture.model_type]
    spec = getattr(cls, "__dataclass_fields__", {}).get(name)
    return getattr(spec, "default", ...) if spec is not None else ...


def defaults(search: Search, text: str, words: Mapping[str, str]) -> list[str]:
    """Lines for fields that may be missing."""
    out = []
    own = {w: n for n, w in words.items()}
    for word in dict.fromkeys(re.findall(r"[A-Za-z_]\w*", text)):
        name = own.get(word, word)
        if name not in search.base.fields or CORE.search(name) or name == "tie_word_embeddings":
            continue
        value = default_of(search.architecture, name)
        if isinstance(value, bool):
            out.append(f"    {word}: {str(value).lower()}")
        elif type(value) is int:
            none = ", none: 0" if None in search.flags.get(name, []) else ""
            out.append(f"    {word}: {{missing: {value}{none}}}" if none else f"    {word}: {value}")
        elif value is None and None in search.flags.get(name, []):
            out.append(f"    {word}: 0")
        elif value is None and name == "head_dim":
            out.append(f"    {word}: hidden_size // {words.get('num_attention_heads', 'num_attention_heads')}")
    return out


def section_text(search: Search, lines: Sequence[Line], words: Mapping[str, str], stage: Any) -> str:
    """The ``tensors:`` section."""
    out: list[str] = []
    for name in ("first", "layers", "last"):
        mine = [x for x in lines if (x.place.section or stage(x.place.name)) == name]
        if not mine:
            continue
        out.append(f"  {name}:")
        for when in dict.fromkeys(x.condition for x in mine):
            indent = "      " if when else "    "
            if when:
                out.append(f"    {quoted_key(f'if {when}')}:")
            for pattern, shape in folded([x for x in mine if x.condition == when]):
                out.append(f"{indent}{quoted_key(pattern)}: {shape}")
    body = "\n".join(out)
    said = defaults(search, body, words)
    return "\n".join(["tensors:", *(["  defaults:", *said] if said else []), body]) + "\n"


def quoted_key(text: str) -> str:
    """As a key of YAML."""
    return f'"{text}"' if text[0] in "{*&!%@`" or ": " in text else text


def tensors_section(reading: Reading, text: str, stage: Any, scratch: Path) -> str:
    """The section; ``text`` is the file without it. Raises Refused."""
    search = Search(reading)
    samples = [search.base, *search.some(SEEN), *search.some_of_each()]
    words = words_of(reading, search.base, search.path)
    lines = lines_of(search, samples, words)
    order = {(k.section, k.pattern): i for i, k in enumerate(reading.kinds)}
    lines.sort(key=lambda x: order.get((x.place.section, x.place.name), len(order)))
    section = section_text(search, lines, words, stage)
    file = scratch / "tried.yaml"
    file.write_text(f"{text}\n{section}", encoding="utf-8")
    for sample in [*search.some(FRESH), *samples]:
        check(file, sample, sample.config)
    for name in re.findall(r"^    (\w+): ", section.partition("defaults:")[2].partition("\n  first:")[0], re.MULTILINE):
        own = next((n for n, w in words.items() if w == name), name)
        plain = None if search.path else search.sample({own: ...})
        if plain is not None:
            check(file, plain, {k: v for k, v in plain.config.items() if k != own})
    return section


def check(file: Path, sample: Sample, config: Mapping[str, Any]) -> None:
    """Raises Refused when a file declares other tensors of a config than its model has."""
    try:
        declared = {t.name: tuple(t.shape) for t in declared_tensors(load_family(str(file), config), config, mtp=False)}
    except CkptError as e:
        raise Refused(str(e.what)) from e
    if declared != sample.shapes:
        names = sorted(n for n in declared.keys() | sample.shapes if declared.get(n) != sample.shapes.get(n))
        shown = [f"{n}: {declared.get(n)}, not {sample.shapes.get(n)}" for n in names[:2]]
        raise Refused(f"declared otherwise than made: {'; '.join(shown)}")
