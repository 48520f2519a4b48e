"""Families: the files in ``families/`` (and the user's own), read, checked and ready to answer for a tensor name.

A family file says, in names as its Hugging Face checkpoints have them, which rule each tensor has (``first``,
``layers`` and ``last`` say on which pipeline stage it lives), which config fields its sizes come from, which tensors
can be fused (``fusions``), and how other software names the same model (``namings``). docs/layouts/ explains each
key with an example.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pydantic import ValidationError

from ckpttool.core.patterns import compile_pattern
from ckpttool.errors import LayoutError, UnsupportedError, UsageError
from ckpttool.formats.config import quantization, ties_head
from ckpttool.layout.files import builtin, completed, find_file, read_builtin, read_own
from ckpttool.layout.names import (
    captures,
    expand,
    has_inner_number,
    has_literal_number,
    pattern_regex,
    samples,
    split_numbers,
)
from ckpttool.layout.rules import (
    WHOLE,
    Rule,
    Sizes,
    fused_rule,
    in_layer,
    parse_rule,
    part_rule,
    rule_in_layer,
    size_words,
    varying,
)
from ckpttool.layout.scales import config_block
from ckpttool.layout.sizes import SizeSpec, SizeVocabulary, read_sizes, size_spec
from ckpttool.layout.spec import FamilySpec, LayersSpec, OpSpec, TensorsSpec
from ckpttool.layout.statements import (
    CreateTensors,
    Drop,
    DropCopies,
    DropCopy,
    DropLayers,
    Fuse,
    OverrideRules,
    ReadAs,
    Refuse,
    Rename,
    RotaryPairs,
    Squeeze,
    Stack,
    Tie,
    Transform,
    Transpose,
    matches,
    renamed,
)

_T = TypeVar("_T")
Shapes = Mapping[str, tuple[int, ...]]
"""Shapes by the names of tensors."""

_KINDS = ("weight", "bias")
"""Tensors of a module, in its order."""
_TIES = {"lm_head.weight": "model.embed_tokens.weight"}
"""Default ties of a family file."""
TASK_HEADS = ("score.*", "classifier.*", "classification_head.*", "qa_outputs.*", "v_head.*", "regression_head.*")
"""Heads that a model of any family may have in place of its own: every rank holds them whole."""


class Placement(NamedTuple):
    """The stage, layer and rule of one tensor."""

    rule: Rule
    stage: str
    """``first``, ``last`` or ``layers``."""
    layer: int | None = None
    expert: int | None = None
    position: int = 0
    """Position of its rule in the family file, which lists tensors in the order in which a model holds them."""


class _NumberedPlacement(NamedTuple):
    """The placement of names that differ only in their numbers."""

    found: Placement
    layer_at: int
    """Index of the layer's number; -1: none."""
    expert_at: int
    varies: bool
    """The rule depends on the layer."""


@dataclass(slots=True)
class Family:
    """A family file with a model's sizes filled in."""

    spec: FamilySpec
    origin: str
    """File name, for messages."""
    sizes: Sizes = field(default_factory=dict)
    block: tuple[int, int] | None = None
    """Elements of one scale of FP8 weights, from the config."""
    quantization: Mapping[str, Any] = field(default_factory=dict)
    """The config's section about quantized weights."""
    tied: bool = False
    """tie_word_embeddings of the config."""
    model_types: frozenset[str] = frozenset()
    """Model types of the config and of its language model's part."""
    overrides: tuple[tuple[re.Pattern[str], Rule], ...] = ()
    """Rules of --split; before every rule of the file."""
    _rules: list[tuple[re.Pattern[str], Rule, str, bool]] = field(default_factory=list)
    _by_name: bool = False
    """Some pattern names one number, or has an expert's number inside a word: names of one template may differ."""
    _cache: dict[tuple[Transform, ...], dict[str, _NumberedPlacement | None]] = field(default_factory=dict)
    _varying: frozenset[str] = field(init=False)
    """Sizes that differ from layer to layer."""
    _layer_rules: dict[tuple[Rule, int], Rule] = field(init=False, default_factory=dict)
    """Rules with the sizes of one layer; one object for each, as cuts are remembered by it."""

    def __post_init__(self) -> None:
        self._varying = varying(self.sizes)

    @property
    def name(self) -> str:
        return self.spec.family

    @property
    def ties(self) -> dict[str, str]:
        """The tensors that are stored by their owner only, if at all, and those owners; {} when nothing is tied."""
        ops = [op for spec in self.spec.namings.values() for op in spec]
        found = [self.spec.ties or _TIES, *(t for op in ops for t in (op.tie, op.tie_as, op.tie_staged) if t)]
        tied = {copy: owner for pairs in found for copy, owner in pairs.items()} if self.tied else {}
        return {**tied, **self.spec.shared}

    def statements(self, naming: str, *, staged: bool = False) -> tuple[Transform, ...]:
        """The statements from the rules' names to those of a naming; ``staged``: over pipeline stages.

        Raises UnsupportedError for a naming that the family does not have.
        """
        if naming not in self.spec.namings:
            known = ", ".join(["hf", *self.spec.namings])
            raise UnsupportedError(
                f"family `{self.name}` has no {naming} naming",
                where=self.origin or (),
                hint=f"it has: {known}. Add a `namings: {naming}:` section in a file given with --family",
            )
        out: list[Transform] = []
        for spec in self.spec.namings[naming]:
            if spec.only_for and self.model_types.isdisjoint(spec.only_for):
                continue
            if spec.rename is not None:
                out.append(Rename(tuple(spec.rename.items())))
            elif spec.fuse is not None:
                out.append(self.fusion(spec.fuse))
            elif spec.unfuse is not None:
                out.append(replace(self.fusion(spec.unfuse), inverse=True))
            elif spec.stack is not None:
                out += [Stack(w, p) for w, p in spec.stack.items()]
            elif spec.unstack is not None:
                out += [Stack(w, p, inverse=True) for w, p in spec.unstack.items()]
            elif spec.transpose is not None:
                out.append(Transpose(tuple(spec.transpose)))
            elif spec.rotary_pairs is not None:
                out.append(RotaryPairs(tuple(spec.rotary_pairs.items())))
            elif spec.squeeze is not None:
                out.append(Squeeze(tuple(spec.squeeze)))
            elif spec.rules is not None:
                where = f"{self.origin}: namings: {naming}: "
                rules = [(p, parse_rule(t, origin=where + p)) for p, t in spec.rules.items()]
                for _, rule in rules:
                    _check_sizes(size_words(rule), self.spec, rule.place)
                out.append(OverrideRules(tuple(rules)))
            elif spec.refuse is not None:
                out.append(Refuse(tuple(spec.refuse.items())))
            elif spec.drop_layers_from is not None:
                out.append(DropLayers(spec.drop_layers_from))
            elif spec.drop is not None:
                out.append(Drop(tuple(spec.drop)))
            elif spec.copies is not None:
                out.append(DropCopies(tuple((p, c.of, c.beside) for p, c in spec.copies.items())))
            elif spec.own is not None:
                out.append(CreateTensors(tuple(spec.own)))
            elif spec.read_as is not None:
                out.append(ReadAs(tuple(spec.read_as.items())))
            elif spec.tie is not None:
                out += [Tie(n, owner) for n, owner in spec.tie.items()]
            elif spec.tie_as is not None and self.tied:
                pairs = tuple(spec.tie_as.items())
                if staged:
                    out += [Tie(n, owner) for n, owner in pairs]
                else:
                    # Some checkpoints store the tied name as well.
                    out += [*(DropCopy(n, owner) for n, owner in pairs), Rename(tuple((o, n) for n, o in pairs))]
            elif spec.tie_staged is not None and self.tied:
                out += [(Tie if staged else DropCopy)(n, owner) for n, owner in spec.tie_staged.items()]
        return tuple(out)

    def fusion(self, name: str) -> Fuse:
        if name not in self.spec.fusions:
            raise LayoutError(f"`{name}` is not in the fusions of family `{self.name}`", where=self.origin)
        spec = self.spec.fusions[name]
        return Fuse(name, spec.whole, tuple(spec.parts), tuple(spec.units or [""] * len(spec.parts)), spec.groups)

    @property
    def has_experts(self) -> bool:
        return any(rule.expert for _, rule, _, _ in self._rules)

    @property
    def prediction_field(self) -> str:
        """The field of config.json that counts layers of multi-token prediction; "" where the family file has none."""
        mtp = self.spec.tensors.mtp if self.spec.tensors else ""
        return mtp if isinstance(mtp, str) and mtp.isidentifier() else ""

    def publishes_fused(self, name: str) -> bool:
        """Whether the published checkpoints hold the whole of this fusion, which is then what the rules name."""
        spec = self.spec
        patterns = [*spec.first, *(spec.layers.prefix + p for p in spec.layers.rules), *spec.last]
        whole = pattern_regex(spec.fusions[name].whole)
        return any(whole.match(sample) for pattern in patterns for sample in samples(pattern))

    def published_form(self, names: Iterable[str], shapes: Callable[[], Shapes] = dict) -> tuple[str, str]:
        """Which of ``hf_namings`` published names have ("" is none), and ``fuse`` or ``unfuse`` where they have not the
        fusions that are usual. ``shapes`` are those of whole tensors, asked for where names alone do not tell."""
        known = {split_numbers(n)[0].replace("#", "0") for n in names}
        naming = next((n for n in self.spec.hf_namings if self._has_naming(n, known, shapes)), "")
        for name, spec in self.spec.fusions.items():
            wholes = any(matches((spec.whole,), s) for s in known)
            parts = any(matches(spec.parts, s) for s in known)
            if not spec.only_named and wholes != parts and wholes != self.publishes_fused(name):
                return naming, "fuse" if wholes else "unfuse"
        return naming, ""

    def trainer_naming(self, names: Iterable[str]) -> str:
        """Which of ``trainer_namings`` has rules for all these names, some of which are its own; "" is none.

        Of several that fit nothing is guessed: "".
        """
        known = {split_numbers(n)[0].replace("#", "0") for n in names}
        fitting = []
        for naming in self.spec.trainer_namings:
            place = self.placer(self.statements(naming))
            if self._has_naming(naming, known) and all(place(n) is not None for n in known):
                fitting.append(naming)
        return fitting[0] if len(fitting) == 1 else ""

    def _has_naming(self, naming: str, known: Collection[str], shapes: Callable[[], Shapes] = dict) -> bool:
        """Whether some of the names are those of a naming, and none is the one that it replaces; or whether tensors
        have the shapes that tell it."""
        telling = {k: v for op in self.spec.namings[naming] for k, v in (op.shapes or {}).items()}
        if telling:
            return self._has_shapes(telling, shapes())
        ops = self.statements(naming)
        pairs = [pair for op in ops if isinstance(op, Rename) for pair in op.pairs]
        pairs += [(op.part, op.whole) for op in ops if isinstance(op, Stack)]
        before, after = ([pair[i] for pair in pairs] for i in (0, 1))
        return any(matches(after, s) for s in known) and not any(matches(before, s) for s in known)

    def _has_shapes(self, telling: Mapping[str, Sequence[str]], shapes: Shapes) -> bool:
        """Whether there are tensors that match, and all that do have the sizes that stand there."""
        found = [
            shape == tuple(self.size(n) for n in sizes)
            for pattern, sizes in telling.items()
            for name, shape in shapes.items()
            if pattern_regex(pattern).match(name)
        ]
        return bool(found) and all(found)

    def guards(self) -> frozenset[str]:
        """Sizes that are not needed to put ranks together: no rank ever holds another's share of them."""
        shared = {n for n, s in self.spec.sizes.items() if isinstance(s, SizeSpec) and s.shared}
        return frozenset(self.spec.sizes) - shared

    @property
    def vocabulary(self) -> SizeVocabulary:
        """The words of its expressions."""
        return _vocabulary(self.spec, self.origin)

    def size(self, name: str, layer: int | None = None) -> int | None:
        """A size of the model; of one that differs from layer to layer, that of this layer."""
        got = self.sizes.get(self.word(name, layer))
        return got.value if got else None

    def varies(self, name: str) -> bool:
        """Whether a size differs from layer to layer."""
        return name in self._varying

    def word(self, name: str, layer: int | None) -> str:
        """The name of a size in ``sizes``, where it may differ from layer to layer."""
        return in_layer(name, layer) if layer is not None and name in self._varying else name

    def placement(self, name: str, ops: tuple[Transform, ...] = ()) -> Placement | None:
        """Rule and stage of a tensor named as after ``ops``; None when no rule names it."""
        return self.placer(ops)(name)

    def placer(self, ops: tuple[Transform, ...]) -> Callable[[str], Placement | None]:
        """``placement`` for many names of one naming: one lookup for each name template, not for each name."""
        if self._by_name:
            return lambda name: self._in_layer(self._resolve(name, ops))
        known = self._cache.setdefault(ops, {})

        def place(name: str) -> Placement | None:
            template, numbers = split_numbers(name)
            try:
                hit = known[template]
            except KeyError:
                hit = known[template] = self._remember(name, numbers, ops)
            if hit is None:
                return None
            found, layer_at, expert_at, varies = hit
            if layer_at < 0 and expert_at < 0:
                return found
            got = Placement(
                found.rule,
                found.stage,
                int(numbers[layer_at]) if layer_at >= 0 else None,
                int(numbers[expert_at]) if expert_at >= 0 else None,
                found.position,
            )
            return self._in_layer(got) if varies else got

        return place

    def _in_layer(self, place: Placement | None) -> Placement | None:
        """The same with the sizes of its layer, where they differ from layer to layer."""
        if place is None or place.layer is None or not self._varying:
            return place
        key = place.rule, place.layer
        if key not in self._layer_rules:
            self._layer_rules[key] = rule_in_layer(*key, self._varying)
        return place._replace(rule=self._layer_rules[key])

    def _remember(self, name: str, numbers: tuple[str, ...], ops: tuple[Transform, ...]) -> _NumberedPlacement | None:
        """The placement of a name, and what it says of other names of the same template."""
        got = self._resolve(name, ops)
        if got is None:
            return None
        values = [int(n) for n in numbers]
        layer_at = values.index(got.layer) if got.layer is not None else -1
        # The layer comes first in a name and the expert last, which tells them apart when they are equal.
        expert_at = len(values) - 1 - values[::-1].index(got.expert) if got.expert is not None else -1
        return _NumberedPlacement(got, layer_at, expert_at, varies=self._in_layer(got) != got)

    def _resolve(self, name: str, ops: tuple[Transform, ...]) -> Placement | None:
        if not ops:
            return self._base(name)
        *before, op = ops
        earlier = tuple(before)
        if isinstance(op, Rename):
            return self._resolve(op.backward(name), earlier)
        if isinstance(op, Fuse):
            if op.inverse:
                for i, part in enumerate(op.parts):
                    if m := pattern_regex(part).match(name):
                        got = self._resolve(expand(op.whole, m.groupdict()), earlier)
                        if got is None:
                            continue
                        if got.rule.verb in ("fused", "replicate"):
                            return got._replace(rule=part_rule(got.rule, i))
                        units = op.units[i]
                        return got._replace(rule=replace(got.rule, units=units, text=f"column {units}".strip()))
            elif m := pattern_regex(op.whole).match(name):
                parts = [self._resolve(expand(p, m.groupdict()), earlier) for p in op.parts]
                if None not in parts:
                    found = [p for p in parts if p is not None]
                    if op.groups.isdigit():  # of software where no two ranks share a group
                        return found[0]._replace(rule=replace(found[0].rule, units=op.groups))
                    names = [p.rsplit(".", 2)[-2] if "." in p else p for p in op.parts]
                    rules = [(n, p.rule) for n, p in zip(names, found, strict=True)]
                    return found[0]._replace(rule=fused_rule(rules, op.units, op.groups))
        if isinstance(op, Stack):
            if op.inverse:
                if m := pattern_regex(op.part).match(name):
                    captures = m.groupdict()
                    got = self._resolve(expand(op.whole, captures), earlier)
                    if got is not None:
                        return got._replace(rule=replace(got.rule, grouped=False), expert=int(captures["expert"]))
            elif m := pattern_regex(op.whole).match(name):
                got = self._resolve(expand(op.part, {**m.groupdict(), "expert": "0"}), earlier)
                if got is not None:
                    return got._replace(rule=replace(got.rule, grouped=True), expert=None)
        if isinstance(op, CreateTensors) and matches(op.patterns, name):
            return Placement(parse_rule("replicate", origin=f"{self.origin}: `{name}` is this naming's own"), "first")
        if isinstance(op, ReadAs):
            return self._resolve(renamed(op.pairs, name), earlier)
        got = self._resolve(name, earlier)
        if got is None:
            return None
        if isinstance(op, Transpose) and matches(op.patterns, name):
            if got.rule.axis is not None or got.rule.rows:
                raise LayoutError("a tensor whose rule names its axis cannot be transposed", where=got.rule.place)
            return got._replace(rule=replace(got.rule, in_out=not got.rule.in_out))
        if isinstance(op, OverrideRules):
            for pattern, rule in op.pairs:
                if pattern_regex(pattern).match(name):
                    return got._replace(rule=rule)
        return got

    def _base(self, name: str) -> Placement | None:
        for position, (regex, rule, stage, layered) in enumerate(self._rules):
            if m := regex.match(name):
                got = m.groupdict()
                layer = int(got["layer"]) if layered else None
                expert = int(got["expert"]) if got.get("expert") else None
                return Placement(rule, stage, layer, expert, position)
        return None

    def in_model_order(
        self, items: Iterable[_T], ops: tuple[Transform, ...], name: Callable[[_T], str] = str
    ) -> list[_T]:
        """Sorted by their names: embedding, layers with their tensors as the file lists them, head."""
        place_of = self.placer(ops)
        stages = {"first": 0, "layers": 1, "last": 2}

        def key(item: _T) -> tuple[int, int, int, int, str]:
            place = place_of(said := name(item))
            if place is None:
                return (1, 1 << 30, 0, 0, said)
            return (stages[place.stage], place.layer or 0, place.position, place.expert or 0, said)

        return sorted(items, key=key)

    def parameter_order(self, names: Sequence[str]) -> list[str]:
        """Names in the order of the model's ``named_parameters()``; [] where nothing says it for all of them.

        It is another order than that of ``in_model_order``, which is ours.
        """
        place_of, prefix = self.placer(()), self.spec.layers.prefix
        stages = {"first": 0, "layers": 1, "last": 2}
        keys: dict[str, tuple[int, ...]] = {}
        for name in names:
            place = place_of(name)
            if place is None:
                return []
            module, _, kind = name.rpartition(".")
            at = place.position
            if place.layer is not None:
                name_there = name.removeprefix(prefix.replace("{layer}", str(place.layer)))
                own = name_there in self.spec.parameters
                module = name_there if own else name_there.rpartition(".")[0]
                if module not in self.spec.parameters or not (own or kind in _KINDS):
                    return []
                at = self.spec.parameters.index(module)
            elif kind not in _KINDS:
                return []
            keys[name] = (stages[place.stage], place.layer or 0, at, kind == "bias")
        return sorted(names, key=keys.__getitem__)

    def with_whole(self, patterns: Sequence[str]) -> Family:
        """The same family in which tensors with these names are never cut; earlier overrides stay ahead of it."""
        if not patterns:
            return self
        rules = [
            (compile_pattern(p), parse_rule("replicate", origin=f"the format keeps `{p}` whole")) for p in patterns
        ]
        return replace(self, overrides=(*self.overrides, *rules), _cache={})

    def with_overrides(self, replicate: Sequence[str], split: Sequence[str]) -> Family:
        """The same family with rules from the command line first. Raises UsageError for a malformed one."""
        rules = [(compile_pattern(p), parse_rule("replicate", origin=f"--split '{p}=none'")) for p in replicate]
        for text in split:
            pattern, eq, axis = text.rpartition("=")
            if not eq or not axis.lstrip("-").isdigit():
                raise UsageError(f"--split `{text}` is not PATTERN=AXIS", hint="--split '*.my_proj.weight=0'")
            rules.append((compile_pattern(pattern), parse_rule(f"column axis={axis}", origin=f"--split '{text}'")))
        return replace(self, overrides=(*rules, *self.overrides), _cache={})


def no_family() -> Family:
    """A family without rules: only what --split names can be cut."""
    return Family(FamilySpec(family="none", layers=LayersSpec(prefix="", rules={})), "")


def family_names() -> list[str]:
    """The built-in families."""
    return sorted(builtin())


def find_family(config: Mapping[str, Any]) -> str | None:
    """The family whose architectures or model types the config names, or None."""
    return find_file(config)


def pick_family(name: str, recorded: str, config: Mapping[str, Any]) -> Family:
    """The named family, else the recorded one, else the one that the config names, else one without rules.

    A recorded name that is not known is that of a user's file. Raises UnsupportedError for an unknown ``name``.
    """
    if name:
        return load_family(name, config) if name != "none" else no_family()
    chosen = (recorded if recorded in builtin() else "") or find_file(config)
    try:
        return load_family(chosen, config) if chosen else no_family()
    except UnsupportedError:  # around a language model of no known family; it can be read
        return no_family()


def load_family(name: str, config: Mapping[str, Any]) -> Family:
    """A built-in family by name, or a file by path, with its sizes taken from ``config``.

    Raises UnsupportedError for an unknown name and LayoutError for a file that is not valid, with the wrong key.
    """
    own = name.endswith((".yaml", ".yml"))
    origin = Path(name).name if own else f"{name}.yaml"
    data = completed(read_own(Path(name)) if own else read_builtin(name), config, origin)
    spec, rules, by_name = _checked(data, origin) if own else _checked_before(json.dumps(data), origin)
    return Family(
        spec,
        origin,
        read_sizes(_vocabulary(spec, origin), spec.places(config)),
        config_block(config),
        quantization(config),
        spec.tied if (tied := ties_head(config)) is None else tied,
        frozenset(str(place.get("model_type", "")) for place in spec.places(config)),
        _rules=rules,
        _by_name=by_name,
    )


class _ParsedFamily(NamedTuple):
    """A family file, parsed, independent of a config; shared between families and never changed."""

    spec: FamilySpec
    rules: list[tuple[re.Pattern[str], Rule, str, bool]]
    by_name: bool


def _checked(data: Any, origin: str) -> _ParsedFamily:
    try:
        spec = FamilySpec.model_validate(data)
    except ValidationError as e:
        first = e.errors()[0]
        where = ".".join(str(x) for x in first["loc"] if not str(x).startswith("function-"))
        at = f" at `{where}`" if where else ""
        raise LayoutError(f"the family file is not valid{at}: {first['msg']}", where=origin) from None
    _check_names(spec, origin)
    if spec.base:
        _add_bare(spec)
    by_name = any(has_literal_number(p) or has_inner_number(p) for p in _patterns(spec))
    return _ParsedFamily(spec, _compile(spec, origin), by_name)


@lru_cache(maxsize=512)
def _checked_before(text: str, origin: str) -> _ParsedFamily:
    """Parse a built-in file with what it inherits, in JSON; cached, since a program opens few families."""
    return _checked(json.loads(text), origin)


_BARE = "bare"
"""The naming of a checkpoint without the family's ``base``."""


def _add_bare(spec: FamilySpec) -> None:
    """Give a family the names that its base model has alone."""
    base = spec.base
    prefixes = [spec.layers.prefix, *(s.prefix for s in spec.stacks.values())]
    names = [n for p in (*spec.first, *prefixes, *spec.last) for n in samples(p) if n.startswith(base)]
    words = dict.fromkeys(n.removeprefix(base).split(".")[0] for n in names)
    spec.namings[_BARE] = [OpSpec(rename={f"{base}{w}.{{a}}": f"{w}.{{a}}" for w in words})]
    spec.hf_namings = [*spec.hf_namings, _BARE]


def _vocabulary(spec: FamilySpec, origin: str) -> SizeVocabulary:
    """The words of its expressions."""
    sizes = {name: size_spec(said) for name, said in spec.sizes.items()}
    said = spec.tensors or TensorsSpec()
    inside = spec.inside is not None
    return SizeVocabulary(
        spec.family, origin, sizes, said.names, said.defaults, said.count, said.mtp, spec.tied, inside
    )


def _patterns(spec: FamilySpec) -> Iterator[str]:
    """Every pattern of a family file."""
    for rules in (spec.first, spec.layers.rules, spec.last, *(s.rules for s in spec.stacks.values())):
        yield from rules
    yield from (spec.layers.prefix, *(s.prefix for s in spec.stacks.values()))
    for fusion in spec.fusions.values():
        yield from (fusion.whole, *fusion.parts)
    for op in (op for naming in spec.namings.values() for op in naming):
        for pairs in (op.rename or {}, op.stack or {}, op.unstack or {}, op.read_as or {}):
            yield from (*pairs.keys(), *pairs.values())
        for patterns in (op.transpose, op.rotary_pairs, op.squeeze, op.rules, op.drop, op.copies, op.own):
            yield from patterns or ()


def _check_names(spec: FamilySpec, origin: str) -> None:
    """Raises LayoutError for names that cannot be made from others, and for a naming that is not there."""
    if spec.layers.rules and "{layer}" not in spec.layers.prefix:
        raise LayoutError(f"`{spec.layers.prefix}` lacks {{layer}}", where=f"{origin}: layers: prefix")
    for key, told in (("hf_namings", spec.hf_namings), ("trainer_namings", spec.trainer_namings)):
        if missing := [n for n in told if n not in spec.namings]:
            raise LayoutError(f"`{missing[0]}` is not in the namings of the family", where=f"{origin}: {key}")
    pairs = [(f"fusions: {n}", f.whole, part, "") for n, f in spec.fusions.items() for part in f.parts]
    for naming, ops in spec.namings.items():
        for op in ops:
            for maps, more in ((op.rename, ""), (op.stack, "expert"), (op.unstack, "expert"), (op.read_as, "")):
                pairs += [(f"namings: {naming}", a, b, more) for a, b in (maps or {}).items()]
    for where, one, other, more in pairs:
        try:
            here, there = captures(one) | ({more} - {""}), captures(other)
        except UnsupportedError as e:
            raise LayoutError(e.what, where=f"{origin}: {where}", hint=e.hint) from None
        if odd := sorted(here ^ there):
            raise LayoutError(
                f"`{one}` and `{other}`: only one of them has {{{odd[0]}}}",
                where=f"{origin}: {where}",
                hint="each name must follow from the other",
            )


def _compile(spec: FamilySpec, origin: str) -> list[tuple[re.Pattern[str], Rule, str, bool]]:
    out = []
    if wrong := next((n for n in spec.sizes if not n.isidentifier() or n in _WORDS), ""):
        raise LayoutError(f"`{wrong}` cannot be the name of a size", where=f"{origin}: sizes")
    transposed = spec.orientation == "in_out"
    heads = dict.fromkeys(TASK_HEADS, "replicate")
    for stage, prefix, rules in (
        ("first", "", spec.first),
        *(("first", s.prefix, s.rules) for s in spec.stacks.values()),
        ("layers", spec.layers.prefix, spec.layers.rules),
        ("last", "", spec.last),
        ("last", "", heads),
    ):
        for pattern, text in rules.items():
            rule = parse_rule(
                text, origin=f"{origin}: {prefix}{pattern}", in_out=transposed, expert="{expert}" in pattern
            )
            _check_sizes(size_words(rule), spec, rule.place)
            out.append((pattern_regex(prefix + pattern), rule, stage, stage == "layers"))
    for name, fusion in spec.fusions.items():
        _check_sizes([*fusion.units, fusion.groups], spec, f"{origin}: fusions: {name}")
    return out


_WORDS = (WHOLE, "layer", "mtp", "rows", "once", "in_out", "out_in")
"""Words with a meaning of their own, where sizes stand."""


def _check_sizes(words: Iterable[str], spec: FamilySpec, where: str) -> None:
    """Raises LayoutError for a size that a family names and does not have."""
    for word in words:
        if word and not word.isdigit() and word not in spec.sizes:
            raise LayoutError(
                f"`{word}` is not among the sizes of family `{spec.family}`",
                where=where,
                hint=f"they are {', '.join(spec.sizes)}" if spec.sizes else "add it to `sizes:`",
            )
