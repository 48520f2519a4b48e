"""The kind of each layer of a model by its config.json, and the fields that number layers: a slice must keep both.

A layer is the tensors that it has (``tensors:`` of the family file), what it keeps of the tokens that it has read
(``cache:``), and what ``slices: kinds:`` says beside. When layers get other numbers, fields follow as ``slices:``
declares them, and each layer of the new config must be what its layer of the old one was.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ckpttool.errors import LayoutError
from ckpttool.formats.config import LAYERS, QUANTIZATION, is_part
from ckpttool.layout.cache import CacheScope, kinds_in
from ckpttool.layout.expressions import Refused, words
from ckpttool.layout.family import Family, load_family
from ckpttool.layout.files import find_file, inner_config
from ckpttool.layout.names import samples
from ckpttool.layout.shapes import layer_tensors
from ckpttool.layout.sizes import DefaultSpec, Scope, read_sizes
from ckpttool.layout.spec import CacheSpec, StackFieldsSpec, TensorsSpec

EACH = frozenset({
    "layer_types", "layers_block_type", "mlp_layer_types", "no_rope_layers", "layer_rope_theta", "indexer_types",
    "hybrid_override_pattern", "hybrid_layer_pattern", "moe_layer_freq", "attn_type_list", "attention_layers",
    "activation_sparsity_pattern", "num_attention_heads_per_layer", "num_key_value_heads_per_layer",
    "per_layer_config", "block_configs", "index_topk_pattern", "sliding_windows", "compress_ratios", "attention_window",
})  # fmt: skip
"""Fields with an entry for each layer, whatever the family."""
NUMBERS = frozenset({
    "mlp_only_layers", "moe_layers", "attn_layer_indices", "full_attn_idxs", "cross_attention_layers",
    "fullatt_block_indexes", "global_attn_indexes",
    "hybrid_layer_ids", "moe_layers_enum", "local_layer_ids", "rope_scaling_layers",
})  # fmt: skip
"""Fields with numbers of layers, whatever the family."""


def stacks_of(family: Family, config: Mapping[str, Any], prefixes: Sequence[str]) -> dict[str, str | None]:
    """The stack of the family for each prefix of layers' names; "" is the main one, None another one.

    A prefix may be longer or shorter than the family's, where no other one is it: a base model, a model around it.
    """
    spec = family.spec
    starts = {"": [spec.layers.prefix]} | {name: [s.prefix] for name, s in spec.stacks.items()}
    if spec.tensors is not None:
        starts[""].append(spec.tensors.prefix)
        for name, s in spec.tensors.stacks.items():
            starts.setdefault(name, []).append(s.prefix)
    names = {stack: {s for p in ps for s in samples(p.partition("{layer}")[0]) if s} for stack, ps in starts.items()}
    held = [s for s in names if LayerStack.of(family, config, s).count != 0]
    out: dict[str, str | None] = dict.fromkeys(prefixes)
    for exact in (True, False):
        for prefix in prefixes:
            for stack in (s for s in held if s not in out.values() and out[prefix] is None):
                if any(_alike(prefix, start, exact=exact) for start in names[stack]):
                    out[prefix] = stack
    return out


def _alike(prefix: str, start: str, *, exact: bool) -> bool:
    if exact:
        return prefix == start
    return f".{start}".endswith(f".{prefix}") or f".{prefix}".endswith(f".{start}")


@dataclass(frozen=True)
class LayerStack:
    """The layers of a stack, as a config describes them. What is asked of it may raise LayoutError, UnsupportedError
    and ConflictError for fields that cannot be."""

    family: Family
    config: Mapping[str, Any]
    stack: str = ""
    """"" is the main one."""

    @classmethod
    def of(cls, family: Family, config: Mapping[str, Any], stack: str = "") -> LayerStack:
        """The same family, for this config."""
        return cls(replace(family, sizes=read_sizes(family.vocabulary, family.spec.places(config))), config, stack)

    @cached_property
    def count(self) -> int | None:
        """How many layers there are, without those of multi-token prediction; None where it is not said."""
        spec = self.family.spec.tensors
        counts = {name: s.count for name, s in spec.stacks.items()} | {"": spec.count} if spec else {}
        try:
            got = self._scope.work_out(str(counts[self.stack])) if self.stack in counts else None
        except Refused:
            got = None
        if not self.stack and got != 0:  # without those of multi-token prediction
            return self.family.size("layers")
        return got if type(got) is int else None

    @cached_property
    def count_fields(self) -> list[str]:
        """Fields from which the number of layers comes, the first one first."""
        family, spec = self.family, self.family.spec.tensors
        if not self.stack:
            return _fields(family, ["layers"]) if "layers" in family.vocabulary.specs else []
        if spec is None or self.stack not in spec.stacks:
            return []
        return _fields(family, [str(spec.stacks[self.stack].count)])

    @cached_property
    def fields(self) -> frozenset[str]:
        """Fields from which is read what a layer is."""
        read = {f for both in self._tensors[1].values() for fields in both for f in fields}
        if not self.stack:
            scope, cache = self._kept, self._cache
            texts = [*self.family.spec.slices.kinds.values()]
            texts += [cache.kinds, cache.window, cache.borrowed] if cache else []
            read |= {f for text in texts for f in scope.read(text)} | set(cache.listed if cache else ())
        return frozenset(read)

    def layer(self, number: int) -> dict[str, Any]:
        """The description of one layer: values by what they are about; tensors as ``tensors: LINE``."""
        out: dict[str, Any] = {}
        if self._lines:
            if number >= len(self._lines):
                raise LayoutError(f"config.json counts {len(self._lines)} layers", where=self.family.origin)
            out = {f"tensors: {k}": v for k, v in self._lines[number].items()}
        if self.stack or number >= (self.count or 0):
            return out
        if self._cache is not None:
            out["kind"] = self.kinds[number]
            for name, text in (("window", self._cache.window), ("borrowed", self._cache.borrowed)):
                out[name] = self.value(text, number)
        return out | {name: self.value(text, number) for name, text in self.family.spec.slices.kinds.items()}

    def value(self, text: str, number: int) -> Any:
        """The value of an expression in a layer; None where the config lacks what it needs."""
        scope = self._kept
        scope.kinds = self.kinds if self._cache is not None else []
        scope.enter(number)
        try:
            return scope.work_out(text)
        except Refused as e:
            if e.lacks and not scope.depends(lambda: scope.work_out(text)):
                return None
            raise LayoutError(f"`{text}`: {e.why}", where=self.family.origin, hint=e.hint) from None

    @cached_property
    def kinds(self) -> list[str]:
        """The kind of cache of each layer, in transformers' words."""
        return kinds_in(self._kept, self._cache) if self._cache is not None else []

    def tests(self, fields: Sequence[str]) -> list[str]:
        """Expressions that tell layers apart and are read from one of these fields; ``kind`` is that of the cache."""
        out = []
        spec, cache = self._speaking.spec.tensors, self._cache
        conditions = list(_conditions(spec.layers)) if spec is not None else []
        for family, texts in (
            (self._kept_family, list(self.family.spec.slices.kinds.values())),
            (self._speaking, conditions),
        ):
            out += [t for t in dict.fromkeys(texts) if not set(fields).isdisjoint(_fields(family, [t]))]
        if cache is not None and not self.stack:
            read = {*_fields(self._kept_family, [cache.kinds, cache.window]), *cache.listed}
            out += [] if read.isdisjoint(fields) else ["kind"]
            out += [] if {*_fields(self._kept_family, [cache.borrowed])}.isdisjoint(fields) else [cache.borrowed]
        return out

    def test(self, text: str, number: int) -> Any:
        """The value of one of ``tests``; "?" where it has no value."""
        try:
            if text == "kind":
                return self.kinds[number]
            said = self.family.spec.slices.kinds
            if text in said or text in said.values() or (self._cache and text == self._cache.borrowed):
                return self.value(said.get(text, text), number)
            self._scope.enter(number)
            return self._scope.work_out(text)
        except (Refused, LayoutError, IndexError):
            return "?"

    def changes(self, other: LayerStack, place: int, number: int) -> list[str]:
        """In what the layer at ``place`` of another config differs from the layer of this number here.

        Tensors that only the first layer has stay with the first (T5's relative positions).
        """
        first, rest = self._first_only
        wanted = self.layer(number)
        if place == 0 and number:
            wanted |= rest
        elif place and not number:
            wanted = {k: v for k, v in wanted.items() if k not in first}
        found = other.layer(place)
        return [k for k in {**wanted, **found} if wanted.get(k, "no") != found.get(k, "no")]

    def reads(self, what: str) -> dict[str, Any]:
        """The fields of the config from which something of a layer is read, with their values."""
        if what.startswith("tensors: "):
            conditions, shape = self._tensors[1].get(what.removeprefix("tensors: "), ([], []))
            names = conditions if "if " in what else shape
            return {n: v for n in names for v in self._scope.read(n).values()}
        cache = self._cache or CacheSpec()
        text = {"kind": cache.kinds, "window": cache.window, "borrowed": cache.borrowed}.get(what)
        listed = {f: v for f in cache.listed * (what == "kind") for v in self._kept.values(f) if v}
        return listed or self._kept.read(text or self.family.spec.slices.kinds.get(what, ""))

    # -- how it is known

    @cached_property
    def _speaking(self) -> Family:
        """The family whose ``tensors:`` has the layers: that of the language model, where the model says nothing."""
        spec = self.family.spec
        if spec.tensors is not None or spec.inside is None:
            return self.family
        inner = inner_config(spec.inside.config, self.config)
        name = spec.inside.family or find_file(inner) or spec.inside.default
        return load_family(name, inner) if name and inner else self.family

    @cached_property
    def _tensors(self) -> tuple[list[dict[str, Any]], dict[str, tuple[list[str], list[str]]]]:
        family = self._speaking
        spec = family.spec.tensors
        if spec is None or (self.stack and self.stack not in spec.stacks):
            return [], {}
        return layer_tensors(family, self.config, self.stack)

    @property
    def _lines(self) -> list[dict[str, Any]]:
        return self._tensors[0]

    @cached_property
    def _first_only(self) -> tuple[frozenset[str], dict[str, Any]]:
        """The tensors that only the first layer has, and their description."""
        first, *others = [{f"tensors: {k}": v for k, v in line.items()} for line in self._lines] or [{}]
        if not others or any(o.keys() != others[0].keys() for o in others) or not others[0].keys() < first.keys():
            return frozenset(), {}
        own = {k: v for k, v in first.items() if k not in others[0]}
        return frozenset(own), own

    @property
    def _cache(self) -> CacheSpec | None:
        return self.family.spec.cache

    @cached_property
    def _whole(self) -> Family:
        """The family, with what the language model says of tensors where it says nothing itself."""
        spec = self.family.spec
        if spec.tensors is not None:
            return self.family
        return replace(self.family, spec=spec.model_copy(update={"tensors": self._speaking.spec.tensors}))

    @cached_property
    def _kept(self) -> CacheScope:
        return CacheScope(self._whole, self._cache or CacheSpec(), self.config)

    @cached_property
    def _kept_family(self) -> Family:
        """The family with the words of the section ``cache``."""
        family, cache = self._whole, self._cache or CacheSpec()
        own = family.spec.tensors or TensorsSpec()
        known = own.model_copy(update={"names": own.names | cache.names, "defaults": own.defaults | cache.defaults})
        return replace(family, spec=family.spec.model_copy(update={"tensors": known}))

    @cached_property
    def _scope(self) -> Scope:
        family = self._speaking
        scope = Scope(family.vocabulary, family.spec.places(self.config), family.sizes)
        scope.given["mtp"] = 0
        return scope


def _conditions(tree: Mapping[Any, Any]) -> Iterator[str]:
    for key, below in tree.items():
        if str(key).startswith("if "):
            yield str(key)[3:]
            yield from _conditions(below)


def _fields(family: Family, texts: Sequence[str]) -> list[str]:
    """The fields of a config that expressions come from, there or not."""
    own = family.vocabulary
    out: dict[str, None] = {}
    todo: list[object] = [*texts]
    seen: set[str] = set()
    while todo:
        text = todo.pop(0)
        if isinstance(text, DefaultSpec):
            todo += [text.missing, text.none]
        for word in words(text) if isinstance(text, str) else ():
            if word in seen or word == "layer":
                continue
            seen.add(word)
            spec = own.specs.get(word)
            if word in own.names:
                todo.append(own.names[word])
            elif spec is not None:
                out |= dict.fromkeys([*spec.fields, *spec.plus])
                todo += [spec.expr, spec.default, *(own.defaults.get(f) for f in spec.fields)]
            else:
                out[word] = None
                todo.append(own.defaults.get(word))
    return [*out]


# -- fields that nobody has declared

_PERIOD = re.compile(r"(?:\A|_)(?:period|interval|step|freq|frequency|every|n_?th)(?:_|\Z)")
_NUMBERED = re.compile(r"(?:\A|_)(?:layers?|pattern|offset)(?:_|\Z)|(?:\A|_)(?:idxs?|index|indexes|indices)\Z|first_k")
_LISTED = re.compile(r"(?:\A|_)(?:blocks?|pattern)(?:_|\Z)")
"""Names of fields that may speak of layers by number: whole numbers, and what lists and texts may be called beside."""
_UNRELATED = re.compile(
    r"\Aarchitectures\Z|token|vocab|label|time_step_limit|multipliers|(?:\A|_)(?:bos|eos|pad|unk)(?:_|\Z)"
)
_APART = re.compile(
    r"layer_?norm|(?:en|de)coder_layers|layerdrop|layer_?scale|chunk|conv|time_step|hidden_size|mtp|adapter|projector"
    r"|resampler|max_period|min_period|ignore_index|summary"
)
_TOWERS = re.compile(r"image|vision|visual|video|audio|speech|mm_")
"""Names in which these words are of something else, or of layers of other stacks."""


_OF_TOWERS = re.compile(
    r"(?!num_|n_)(?:\w*_)?(?:feature|select|target|vision|visual|vit|audio)(?:_\w+)?_layers?\Z|\w*layer_map\Z"
)


def speaks_of_tower(config: Mapping[str, Any]) -> str:
    """A field of the whole that may speak of a tower's layers by number, as ``vision_feature_layer`` does, or ""."""
    return next((k for k, v in config.items() if _OF_TOWERS.match(k) and type(v) in (int, list)), "")


def unknown_field(
    place: Mapping[str, Any], known: Collection[str], count: int, *, tower: bool = False, path: str = ""
) -> tuple[str, Any] | None:
    """The path and value of a field of a stack's config that may speak of its ``count`` layers by number, and is none
    of those that are known. Those in parts of the config count, too.

    Models inside it have layers of their own; rotary positions and quantization have lists of other things.
    ``tower``: these are layers of a tower.
    """
    for name, value in place.items():
        inside = isinstance(value, Mapping) and not name.startswith("rope") and name not in QUANTIZATION
        if is_part(name, value) and ({"model_type", "depth", *LAYERS} & {*value} or _TOWERS.search(name)):
            continue
        if f"{path}{name}" not in known and _suspicious(name, value, count, tower=tower):
            return f"{path}{name}", value
        if inside and (found := unknown_field(value, known, count, tower=tower, path=f"{path}{name}.")):
            return found
    return None


def _suspicious(name: str, value: object, count: int, *, tower: bool) -> bool:
    """Whether a field may speak of layers by number, as far as its name and value tell."""
    if value is None or isinstance(value, bool | float) or _UNRELATED.search(name) or name in LAYERS:
        return False
    apart = _APART.search(name) or (not tower and _TOWERS.search(name))
    named = bool(_PERIOD.search(name) or _NUMBERED.search(name)) and not apart
    if isinstance(value, dict):
        return bool(value) and all(str(k).isdecimal() and int(k) < count for k in value)
    if isinstance(value, list):
        numbers = all(type(n) is int and 0 <= n < count for n in value) and len(value) > 1 and value == sorted({*value})
        return bool(value) and not apart and (len(value) == count or numbers or named or bool(_LISTED.search(name)))
    if isinstance(value, str):
        letters = len(value) == count > 3 and bool(re.fullmatch(r"[A-Z*|\-]+", value))
        return bool(value) and (letters or named or bool(_LISTED.search(name)))
    # Every layer is what a period of one means.
    return named and isinstance(value, int) and not (_PERIOD.search(name) and value in (0, 1))


def stack_fields(family: Family, stack: str) -> StackFieldsSpec:
    """The family's section on the fields of a stack that is not the main one."""
    return family.spec.slices.stacks.get(stack, StackFieldsSpec())
