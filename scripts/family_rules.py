"""Reads the rules of a family off transformers' tensor-parallel plan of a model, and proves them.

Which rank holds which element says ``tests.peers.families.plans``. What that cannot say is whether a cut may fall
anywhere or only between heads. That is tried: units that are alike can be exchanged without a change of the logits.
Where single rows cannot, whole heads must; which tensors count query heads and which key heads is seen where a config
with more of them makes longer tensors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from ckpttool.core.mesh import Mesh
from ckpttool.layout.assemble import is_bias
from ckpttool.layout.rules import CutSize, IndivisibleError, PartitionContext, RankShare, local_boxes, parse_rule
from tests.peers.families import forward, plans
from tests.peers.families.tiny import VOCAB, Architecture, random_weights, tiny_config

WIDTH = 100
"""Of a pattern with alternatives."""


TOLERANCE = 2e-5
"""Largest difference of logits, beside the largest: sums in another order."""
OUTPUT = re.compile(r"(gate|up|w1|w3|fc1|input_linear|wi)")
INPUT = re.compile(r"(down|w2|fc2|output_linear|wo)")
SIDE = re.compile(r"(^|[._])(vision|visual|image|audio|sound|speech|tower|encoder|projector|connector|mtp|nextn|patch)")
PREDICTION = re.compile(r"(^|[._])(mtp|nextn)")
LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "decoder_layers")
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "kv_n_heads", "num_query_groups", "num_attention_groups")
COUNT = re.compile(r"(heads|groups|n_head)$")
WHOLE_WORLD = (2, 4)


class Refused(Exception):  # noqa: N818 - an answer, not an error
    """Why there is no family file."""


class Cut(NamedTuple):
    """How one kind of stored tensor is cut."""

    axis: int = 0
    """Counted from behind, so that experts in front change nothing."""
    parts: tuple[str, ...] = ()
    """``cut`` or ``whole`` for each stretch of the axis; () is a tensor that every rank holds."""
    lengths: tuple[int, ...] = ()
    """Of the parts; for a plain cut ()."""
    grouped: bool = False
    """Experts on the first axis, as a plan for experts shares them out."""


@dataclass
class Kind:
    """Stored tensors whose names differ in their numbers only."""

    pattern: str
    """The name with {layer}, {expert} and * for numbers; behind the prefix for those of layers."""
    section: str
    names: list[str]
    cut: Cut = field(default_factory=Cut)
    gathered: bool = False
    verb: str = "replicate"
    unit: str = ""
    behind: bool = False
    """The model has it behind its layers."""

    @property
    def rule(self) -> str:
        if "fused" in self.verb and self.unit:
            before, _, parts = self.verb.partition("fused ")
            return f"{before}fused " + " ".join(
                w if "_" in w or "=" in w else f"{w}:{self.unit}" for w in parts.split()
            )
        return f"{self.verb} {self.unit}".strip()


@dataclass
class Reading:
    """What was read of one architecture."""

    architecture: Architecture
    config: dict[str, Any]
    prefix: str
    kinds: list[Kind]
    sizes: dict[str, Any] = field(default_factory=dict)
    tied: bool = False
    ties: dict[str, str] = field(default_factory=dict)
    base: str = ""
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    counts: dict[str, CutSize] = field(default_factory=dict)
    """Sizes that count units, as the tiny config has them."""
    per_layer: dict[str, dict[int, CutSize]] = field(default_factory=dict)
    """The same where ``per_layer_config`` says otherwise for a layer."""
    notes: list[str] = field(default_factory=list)


def builder(architecture: Architecture, changes: Mapping[str, Any] | None = None) -> Callable[[], Any]:
    """What makes the tiny model."""
    config = tiny_config(architecture.model_type, changes)
    cls = getattr(transformers, architecture.cls)
    return lambda: cls._from_config(config, attn_implementation="eager")


def walk(config: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Every field of a config and of its parts, with dots."""
    for name, value in config.items():
        if isinstance(value, Mapping) and "model_type" in value:
            yield from walk(value, f"{before}{name}.")
        else:
            yield before + name, value


def text_path(config: Mapping[str, Any]) -> str:
    """Where the language model's fields stand: "" or ``text_config.`` and the like."""
    found = [n.rpartition(".")[0] for n, v in walk(config) if n.rpartition(".")[2] in HEADS and isinstance(v, int)]
    best = sorted(found, key=lambda p: (bool(SIDE.search(p)), p.count("."), "text" not in p and "language" not in p))
    return f"{best[0]}." if best and best[0] else ""


# --- names ---


def stack_of(names: Iterable[str], cut: Callable[[str], bool]) -> str:
    """The prefix of the layers of the language model, with {layer}."""
    counts: dict[str, tuple[int, int]] = {}
    for name in names:
        if m := re.match(r"(.*?\.)\d+\.", name):
            at = counts.get(m[1], (0, 0))
            counts[m[1]] = (at[0] + (not SIDE.search(m[1]) and cut(name)), at[1] + 1)
    if not counts:
        raise Refused("it has no layers with numbers")
    best = max(counts, key=lambda p: (not SIDE.search(p), *counts[p]))
    if not counts[best][0]:
        raise Refused(f"no layers of a language model are found: of {best} nothing is cut")
    return f"{best}{{layer}}."


def pattern_of(name: str, prefix: str) -> tuple[str, str]:
    """A stored name -> its pattern and section ("layers", or "" for those outside)."""
    start = prefix.partition("{layer}")[0]
    inside = name.startswith(start) and re.match(r"\d+\.", name[len(start) :]) is not None
    rest = name[len(start) :].partition(".")[2] if inside else name
    words: list[str] = []
    for word in rest.split("."):
        expert = word.isdigit() and bool(words) and "expert" in words[-1]
        words.append("{expert}" if expert and inside else "*" if word.isdigit() else word)
    return ".".join(words), "layers" if inside else ""


# --- cuts ---


def stretches(masks: NDArray[np.int64], ways: int) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Masks along an axis -> which parts it has. Raises Refused for what no rule says."""
    edges = np.flatnonzero(np.diff(masks)) + 1
    starts = [0, *edges.tolist()]
    runs = [(int(masks[s]), e - s) for s, e in zip(starts, [*starts[1:], len(masks)], strict=True)]
    kinds: list[str] = []
    lengths: list[int] = []
    at = 0
    while at < len(runs):
        if runs[at][0] == (1 << ways) - 1:
            kinds.append("whole")
            lengths.append(runs[at][1])
            at += 1
            continue
        share = runs[at : at + ways]
        if [m for m, _ in share] != [1 << r for r in range(ways)]:
            raise Refused("the shares of the ranks do not follow one another")
        if len({n for _, n in share}) > 1 and len(runs) > ways:
            raise Refused("parts that do not divide")
        kinds.append("cut")
        lengths.append(sum(n for _, n in share))
        at += ways
    return tuple(kinds), tuple(lengths)


def cut_of(masks: NDArray[np.int64], ways: int) -> Cut:
    """How one tensor is cut, by the ranks that hold each of its elements."""
    varies = [a for a in range(masks.ndim) if masks.shape[a] and (masks != masks.take([0], axis=a)).any()]
    if not varies:
        if masks.size and int(masks.flat[0]) != (1 << ways) - 1:
            raise Refused("a tensor that one rank holds alone")
        return Cut()
    if len(varies) > 1:
        raise Refused("a tensor that is cut on two axes")
    axis = varies[0]
    line = np.moveaxis(masks, axis, 0).reshape(masks.shape[axis], -1)[:, 0]
    kinds, lengths = stretches(line, ways)
    if kinds == ("cut",):
        return Cut(axis - masks.ndim, kinds)
    return Cut(axis - masks.ndim, kinds, lengths)


def by_expert(whole: NDArray[np.int64]) -> bool:
    """Whether an expert plan shares out the first axis."""
    return (
        whole.ndim > 1
        and (whole != whole.take([0], axis=0)).any().item()
        and not (
            whole
            != np.broadcast_to(whole.reshape(len(whole), -1)[:, 0].reshape(-1, *[1] * (whole.ndim - 1)), whole.shape)
        ).any()
    )


def verb_of(kind: Kind, shape: Sequence[int]) -> str:
    """The rule without its unit."""
    cut = kind.cut
    words = "grouped " if cut.grouped else ""
    ndim = len(shape) - cut.grouped
    if not cut.parts:
        return f"{words}replicate" if cut.grouped else "replicate"
    name = kind.pattern.removesuffix(".weight").rpartition(".")[2]
    axis = cut.axis + len(shape)
    turned = ""
    if ndim == 1 or is_bias(kind.names[0]):
        output = True
        if cut.axis != -1:
            raise Refused(f"{kind.pattern}: a bias that is cut on another axis")
    elif ndim == 2:
        output = cut.axis == -2
        other = (OUTPUT.search(name) and not output) or (INPUT.search(name) and not OUTPUT.search(name) and output)
        if other and (".experts." in f".{kind.pattern}" or cut.grouped):
            output, turned = not output, " in_out"
    else:
        named = ("expert" in kind.pattern and OUTPUT.search(name) and not INPUT.search(name)) is not None
        output, turned = axis == 0 or bool(named), f" axis={axis}"
    if len(cut.parts) == 1:
        if kind.section != "layers" and shape[axis] == VOCAB and output and not turned:
            return "vocab"
        return f"{words}{'column' if output else 'row'}{turned}"
    if "whole" in cut.parts or len(set(cut.lengths)) > 1 or not output:
        raise Refused(f"{kind.pattern}: parts of lengths {cut.lengths} ({' '.join(cut.parts)})")
    count = len(cut.parts)
    spelled = name.partition("_")[0] if len(name.partition("_")[0]) == count else ""
    parts = "gate up" if count == 2 else " ".join(spelled or (f"part{i}" for i in range(count)))
    return f"{words}fused {parts}{turned}"


# --- units ---


def shares(kind: Kind, name: str, shape: tuple[int, ...], sizes: Mapping[str, CutSize], ways: int) -> list[RankShare]:
    """What each of ``ways`` ranks would hold of a tensor."""
    rule = parse_rule(kind.rule, expert="{expert}" in kind.pattern)
    mesh = Mesh(tp=ways, etp=ways)
    context = PartitionContext(mesh, sizes)
    return [local_boxes(rule, shape, context, mesh.coords(r), bias=is_bias(name)) for r in range(ways)]


class Prover:
    """A model of which parts are exchanged."""

    def __init__(self, architecture: Architecture, changes: Mapping[str, Any] | None = None) -> None:
        self.config = tiny_config(architecture.model_type, changes)
        cls = getattr(transformers, architecture.cls)
        torch.manual_seed(0)
        self.config.dtype = torch.float32
        self.model = cls._from_config(self.config, attn_implementation="eager", dtype=torch.float32)
        random_weights(self.model)
        self.model = self.model.float().eval()
        numbers = plans.numbered(self.model)
        self.ids = {n: t.to(torch.int64).numpy() for n, t in plans.stored(self.model, numbers).items()}
        self.fields = dict(walk(self.config.to_dict()))
        self._where = {n: numbers[n].to(torch.int64) for n in self.model.state_dict()}
        total = 1 + int(max(t.max() for t in self._where.values() if t.numel()))
        self._flat = torch.zeros(total, dtype=torch.float64)
        for name, tensor in self.model.state_dict().items():
            self._flat[self._where[name]] = tensor.double()
        self.given = forward.inputs(self.model)
        self.want = forward.compute(self.model, self.given)
        if not float(self.want.std()) > 1e-2:
            raise Refused("its logits are all alike")

    def exchanged(
        self,
        kinds: Sequence[Kind],
        sizes: Mapping[str, CutSize],
        ways: int,
        one: int,
        other: int,
        *,
        alike: bool = False,
        per_layer: Mapping[str, Mapping[int, CutSize]] | None = None,
    ) -> float:
        """Difference of the logits when two of ``ways`` ranks change places in these tensors; -1: nothing changes.

        With ``alike`` tensors of which both hold the same stay; without, that is no exchange: -1.
        """
        place = np.arange(len(self._flat))
        changed = False
        for kind in kinds:
            for name in kind.names:
                ids = self.ids.get(name)
                if ids is None:
                    continue
                layer = next((int(w) for w in name.split(".") if w.isdigit()), -1)
                own = {u: of[layer] for u, of in (per_layer or {}).items() if layer in of}
                try:
                    all_shares = shares(kind, name, ids.shape, {**sizes, **own}, ways)
                except IndivisibleError:
                    if not per_layer:
                        raise
                    continue  # another layer has as many heads as there are ranks
                a, b = all_shares[one].boxes, all_shares[other].boxes
                if a == b:
                    if kind.verb != "replicate" and not alike:
                        return -1.0
                    continue
                for (_, x), (_, y) in zip(a, b, strict=True):
                    left = tuple(slice(i, j) for i, j in zip(x.start, x.stop, strict=True))
                    right = tuple(slice(i, j) for i, j in zip(y.start, y.stop, strict=True))
                    place[ids[left]], place[ids[right]] = ids[right], ids[left]
                    changed = True
        if not changed:
            return -1.0
        return self.computed(torch.from_numpy(place))

    def computed(self, place: torch.Tensor) -> float:
        """Difference of the logits with every element taken from another place."""
        moved = self._flat[place]
        with torch.no_grad():
            for name, tensor in self.model.state_dict().items():
                if tensor.is_floating_point():
                    tensor.copy_(moved[self._where[name]])
            got = forward.compute(self.model, self.given)
            for name, tensor in self.model.state_dict().items():
                if tensor.is_floating_point():
                    tensor.copy_(self._flat[self._where[name]])
        return forward.difference(self.want, got)


def groups_of(kinds: Sequence[Kind]) -> list[list[Kind]]:
    """Kinds that are cut together: what comes out of some goes into the others."""
    by_path: dict[str, list[Kind]] = {}
    for kind in kinds:
        if kind.cut.parts and not kind.gathered and kind.verb != "vocab":
            words = kind.pattern.split(".")
            path = words[:-1] if words[-1] not in ("weight", "bias") else words[:-2]
            by_path.setdefault(".".join(path), []).append(kind)
    changed = True
    while changed:
        changed = False
        for at in sorted(by_path, key=lambda p: -p.count(".")):
            verbs = {k.verb.replace("grouped ", "").split()[0] for k in by_path[at]}
            if "row" not in verbs or verbs == {"row"}:
                above = at.rpartition(".")[0]
                other = next((p for p in by_path if p != at and (above == p or p.startswith(f"{above}."))), None)
                if other is None:
                    continue
                by_path[other] += by_path.pop(at)
                changed = True
                break
    return list(by_path.values())


def finest(prover: Prover, kinds: Sequence[Kind]) -> int:
    """Pieces into which every tensor of a group can be cut without regard to units."""
    lengths = []
    for kind in kinds:
        for name in (n for n in kind.names if n in prover.ids):
            lengths.append(prover.ids[name].shape[kind.cut.axis] // max(1, len(kind.cut.parts)))
    return gcd(*lengths)


def free(prover: Prover, kinds: Sequence[Kind]) -> bool:
    """Whether single rows of these tensors can be exchanged: they need no units."""
    pieces = finest(prover, kinds)
    pairs = {(0, 1), (0, pieces - 1), (0, pieces // 2)} - {(0, 0)}
    return all(prover.exchanged(kinds, {}, pieces, a, b, alike=True) <= TOLERANCE for a, b in sorted(pairs))


def own_field(fields: Mapping[str, Any], names: Sequence[str], path: str) -> str:
    """The first of these fields that the language model's part has, with its path; "" for none."""
    return next((path + n for n in names if isinstance(fields.get(path + n), int)), "")


def lengths(build: Callable[[], Any]) -> dict[str, tuple[int, ...]]:
    """Shapes of the stored tensors."""
    model = build()
    return {n: tuple(t.shape) for n, t in plans.stored(model, plans.numbered(model)).items()}


def dependences(architecture: Architecture, changes: Mapping[str, Any], kinds: Sequence[Kind]) -> dict[str, set[str]]:
    """By pattern: the counts of the config (heads, groups) with which the cut axis grows."""
    fields = dict(walk(tiny_config(architecture.model_type, changes).to_dict()))
    base = lengths(builder(architecture, changes))
    out: dict[str, set[str]] = {k.pattern: set() for k in kinds}
    for name, value in fields.items():
        if not COUNT.search(name) or type(value) is not int or value < 2:
            continue
        try:
            other = lengths(builder(architecture, {**changes, name: 2 * value}))
        except Exception:  # noqa: BLE001, S112 - whatever a class says to a number that it does not like
            continue
        for kind in kinds:
            for stored in kind.names:
                if stored in other and kind.cut.parts and base[stored][kind.cut.axis] != other[stored][kind.cut.axis]:
                    out[kind.pattern].add(name)
                    break
    return out


def assign(reading: Reading, kinds: Sequence[Kind], depends: Mapping[str, set[str]], path: str) -> None:
    """Give a group's tensors the counts that their units are, and the reading these sizes."""
    fields = dict(walk(reading.config))
    found = {n for k in kinds for n in depends[k.pattern]}
    places = {n.rpartition(".")[0] for n in found} or {path.rstrip(".")}
    if len(places) > 1:
        raise Refused(f"{kinds[0].pattern} is as long as several parts of the config say: {', '.join(sorted(found))}")
    place = places.pop()
    before = f"{place}." if place else ""
    heads, kv_heads = own_field(fields, HEADS, before), own_field(fields, KV_HEADS, before)
    for kind in kinds:
        counts = depends[kind.pattern]
        if not counts and kind.section != "layers":
            raise Refused(f"{kind.pattern}: no size of the config says how many heads it has")
        if kv_heads and kv_heads in counts:
            field = kv_heads
        elif heads and (heads in counts or not counts):
            field = heads
        elif len(counts) == 1:
            field = min(counts)
        else:
            raise Refused(f"{kind.pattern} is as long as several counts say: {', '.join(sorted(counts))}")
        kind.unit = size_name(reading, field, path, kv=field == kv_heads)


def size_name(reading: Reading, field: str, path: str, *, kv: bool) -> str:
    """The name of a size that counts units; adds it to the reading."""
    place, _, last = field.rpartition(".")
    own = f"{place}." == path or (not place and not path)
    word = "kv_heads" if kv else "heads" if last in HEADS else last
    name = word if own else "_".join([*(w.removesuffix("_config") for w in place.split(".") if w), word])
    reading.counts[name] = CutSize(dict(walk(reading.config))[field], shared=kv)
    said = dict(walk(reading.config)).get(f"{place}.per_layer_config" if place else "per_layer_config") or {}
    reading.per_layer[name] = {int(i): CutSize(of[last], shared=kv) for i, of in said.items() if last in of}
    if name not in reading.sizes:
        shown = last if own and path == "text_config." else field
        heads = name.replace("kv_heads", "heads")
        known = heads in reading.sizes
        reading.sizes[name] = (
            {"from": [shown], **({"default": heads} if known else {}), "shared": True} if kv else shown
        )
    return name


def same_in_all_layers(reading: Reading, kinds: Sequence[Kind], prefix: str) -> None:
    """Raises Refused when layers have other numbers of key heads for each query head: one size cannot count both."""
    start = prefix.partition("{layer}")[0]
    found: dict[str, dict[str, int]] = {}
    for kind in kinds:
        for name in kind.names:
            layer = name.removeprefix(start).partition(".")[0] if kind.section == "layers" else ""
            units = found.setdefault(kind.unit, {})
            if name.endswith(".weight") and units.setdefault(layer, 0) < reading.shapes[name][kind.cut.axis]:
                units[layer] = reading.shapes[name][kind.cut.axis]
    if len(found) > 1:
        first, *others = found.values()
        for other in others:
            if len({first[x] / other[x] for x in first.keys() & other if other[x]}) > 1:
                raise Refused(f"not all layers have as many heads: {' '.join(k.pattern for k in kinds)}")


def prove(
    prover: Prover,
    kinds: Sequence[Kind],
    sizes: Mapping[str, CutSize],
    per_layer: Mapping[str, Mapping[int, CutSize]] | None = None,
) -> None:
    """Exchange whole units of a group. Raises Refused when that changes what the model computes."""
    counts = {sizes[k.unit].value for k in kinds}
    per_layer = {u: of for u, of in (per_layer or {}).items() if of}
    counts |= {s.value for of in per_layer.values() for s in of.values()}
    low = min([sizes[k.unit].value for k in kinds if sizes[k.unit].shared], default=max(counts))
    proven = False
    for ways in sorted(counts | {2}):
        pairs = {(0, 1), (0, ways - 1)} if ways <= low else {(0, 1)} if ways // low > 1 else set()
        for a, b in sorted(pairs):
            apart = prover.exchanged(kinds, sizes, ways, a, b, alike=True, per_layer=per_layer)
            if apart > TOLERANCE:
                names = " ".join(k.pattern for k in kinds)
                raise Refused(f"with {ways} ranks, {a} and {b} exchanged change the logits by {apart:.1e}: {names}")
            proven = proven or apart >= 0
    if not proven:
        raise Refused(f"nothing could be exchanged of {' '.join(k.pattern for k in kinds)}")


def sort_kinds(owned: Mapping[int, plans.Owners], by_experts: plans.Owners | None, prefix: str) -> list[Kind]:
    """Stored tensors by what they are, and how each kind is cut."""
    kinds: dict[tuple[str, str], Kind] = {}
    for name in owned[2]:
        pattern, section = pattern_of(name, prefix)
        kinds.setdefault((section, pattern), Kind(pattern, section, [])).names.append(name)
    for kind in kinds.values():
        found: dict[Cut, str] = {}
        for name in kind.names:
            for ways, masks in owned.items():
                try:
                    cut = cut_of(masks[name], ways)
                except Refused as e:
                    raise Refused(f"{name}: {e}") from None
                shared_out = by_experts is not None and by_expert(by_experts[name])
                grouped = shared_out and not (cut.parts and cut.axis == -masks[name].ndim)
                found[cut._replace(grouped=grouped)] = name
        if len(found) > 1:
            raise Refused(f"{kind.pattern} is cut in several ways: {' and '.join(map(str, found))}")
        kind.cut = next(iter(found))
    return list(kinds.values())


def read(architecture: Architecture) -> Reading:
    """What transformers' plan says of an architecture, with the tensors that it has by other configs, too.

    Raises Refused.
    """
    out = read_one(architecture, {})
    for changes in variants(architecture):
        try:
            names = lengths(builder(architecture, changes))
        except Exception:  # noqa: BLE001, S112 - a class that does not want it
            continue
        known = {(k.section, k.pattern): k for k in out.kinds}
        if all(pattern_of(n, out.prefix)[::-1] in known for n in names):
            continue
        try:
            other = read_one(architecture, changes)
        except Refused as e:
            out.notes.append(f"not with {changes}: {e}")
            continue
        if other.prefix != out.prefix:
            raise Refused(f"layers are called {out.prefix} or, with {changes}, {other.prefix}")
        for kind in other.kinds:
            mine = known.get((kind.section, kind.pattern))
            if mine is None:
                out.kinds.append(kind)
                out.shapes |= {n: other.shapes[n] for n in kind.names}
            elif mine.rule != kind.rule:
                raise Refused(f"{kind.pattern}: `{mine.rule}`, with {changes} `{kind.rule}`")
        out.notes += other.notes
        out.sizes |= other.sizes
        out.ties = out.ties or other.ties
    used = {w for k in out.kinds for w in k.rule.split()} | {"layers", "vocab", "experts"}
    if "kv_heads" in used:
        used.add("heads")
    out.sizes = {n: v for n, v in out.sizes.items() if n in used}
    return out


SOME_DENSE = (
    {"mlp_only_layers": [0]},
    {"first_k_dense_replace": 1},
    {"decoder_sparse_step": 2},
    {"q_lora_rank": None},
    {"mlp_layer_types": ["dense", "sparse"]},
    {"num_nextn_predict_layers": 1},
)
"""Changes besides flags with which a config asks for other tensors."""


def variants(architecture: Architecture) -> Iterator[dict[str, Any]]:
    """Changes of the tiny config that may give the model other tensors: every flag the other way round."""
    fields = dict(walk(tiny_config(architecture.model_type).to_dict()))
    path = text_path(tiny_config(architecture.model_type).to_dict())
    for name, value in fields.items():
        if name.rpartition(".")[0] in ("", path.rstrip(".")) and isinstance(value, bool) and not UNRELATED.search(name):
            yield {name: not value}
    for changes in SOME_DENSE:
        if all(path + name in fields for name in changes):
            yield {path + name: value for name, value in changes.items()}


UNRELATED = re.compile(r"(output_|return_|use_cache|is_decoder|is_encoder|cross_attention|torchscript|chunk|scale)")
"""Flags that say nothing about tensors, or make another kind of model."""


def read_one(architecture: Architecture, changes: Mapping[str, Any]) -> Reading:
    """What the plan says of one tiny config."""
    build = builder(architecture, changes)
    model = build()
    if not plans.has_plan(model):
        raise Refused("transformers has no plan for it")
    config = model.config.to_dict()
    path = text_path(config)
    owned = {ways: plans.owners(build, ways) for ways in WHOLE_WORLD}
    experts = plans.owners(build, 2, experts=True) if model.ep_plan else None
    is_cut = {n: bool((m != 3).any()) for n, m in owned[2].items()}
    prefix = stack_of(owned[2], is_cut.__getitem__)
    kinds = sort_kinds(owned, experts, prefix)
    style, order = plans.styles(model)
    kinds.sort(key=lambda k: order.get(k.names[0], 0))
    start = next((order[k.names[0]] for k in kinds if k.section == "layers" and k.names[0] in order), 0)
    for kind in kinds:
        kind.behind = order.get(kind.names[0], 0) > start
        kind.gathered = style.get(kind.names[0], "") in plans.GATHERED
        kind.verb = verb_of(kind, owned[2][kind.names[0]].shape)
        if style.get(kind.names[0], "").startswith("embedding") and kind.cut.parts and kind.verb != "vocab":
            raise Refused(f"{kind.pattern} is cut with the embedding, and is none")
    if not any(k.cut.parts and k.verb != "vocab" for k in kinds):
        raise Refused("transformers cuts only embedding and head")
    out = Reading(architecture, config, prefix, kinds, shapes={n: m.shape for n, m in owned[2].items()})
    add_sizes(out, path)
    find_units(out, path, changes)
    add_ties(out, model)
    return out


def add_sizes(reading: Reading, path: str) -> None:
    """The sizes with the fields that they come from."""
    fields = dict(walk(reading.config))
    other = {v: k for k, v in getattr(type(tiny_config(reading.architecture.model_type)), "attribute_map", {}).items()}
    shown = "" if path == "text_config." else path

    def named(fields_of: Sequence[str]) -> str | list[str]:
        field = own_field(fields, fields_of, path)
        alias = other.get(field) if not path else None
        names = [shown + field[len(path) :], *([alias] if alias and alias != field else [])]
        return names if len(names) > 1 else names[0]

    if own_field(fields, LAYERS, path):
        reading.sizes["layers"] = named(LAYERS)
    if own_field(fields, ("vocab_size",), path):
        reading.sizes["vocab"] = named(("vocab_size",))
    if own_field(fields, HEADS, path):
        reading.sizes["heads"] = named(HEADS)
    if own_field(fields, KV_HEADS, path):
        fields_of = named(KV_HEADS)
        fields_of = [fields_of] if isinstance(fields_of, str) else fields_of
        reading.sizes["kv_heads"] = {"from": fields_of, "default": "heads", "shared": True}
    if own_field(fields, EXPERTS, path) and any("expert" in k.pattern for k in reading.kinds):
        reading.sizes["experts"] = named(EXPERTS)


def find_units(reading: Reading, path: str, changes: Mapping[str, Any]) -> None:
    """Where cuts may fall. Raises Refused when no units are found that are alike."""
    groups = groups_of(reading.kinds)
    if not groups:
        return
    try:
        prover = Prover(reading.architecture, changes)
    except Refused:
        raise
    except Exception as e:
        raise Refused(f"it cannot be run: {type(e).__name__}: {str(e).splitlines()[0][:120]}") from e
    depends = dependences(reading.architecture, changes, reading.kinds)
    for group in groups:
        if not any(depends[k.pattern] for k in group) and free(prover, group):
            continue
        try:
            assign(reading, group, depends, path)
            same_in_all_layers(reading, group, reading.prefix)
            prove(prover, group, reading.counts, reading.per_layer)
        except Refused:
            if any(depends[k.pattern] for k in group) or not other_units(reading, prover, group, path):
                raise


def other_units(reading: Reading, prover: Prover, group: Sequence[Kind], path: str) -> bool:
    """Whether units are found that are no heads: gate and up of a neuron side by side."""
    lengths = [prover.ids[n].shape[k.cut.axis] for k in group for n in k.names if n in prover.ids]
    for name, value in prover.fields.items():
        own = name.startswith(path) and "." not in name[len(path) :]
        if not own or type(value) is not int or value < 4 or any(n % value for n in lengths) or max(lengths) == value:
            continue
        for kind in group:
            kind.unit = name[len(path) :]
        try:
            prove(prover, group, {name[len(path) :]: CutSize(value)})
        except Refused:
            continue
        # Half of a unit must be too little, or the units say nothing.
        if prover.exchanged(group, {}, 2 * value, 0, 1, alike=True) <= TOLERANCE:
            continue
        reading.sizes[name[len(path) :]] = name if path != "text_config." else name[len(path) :]
        return True
    return False


def add_ties(reading: Reading, model: Any) -> None:
    """Which tensors are copies of others when embeddings are tied, in stored names; and the base model's prefix."""
    base = f"{model.base_model_prefix}."
    if model.base_model is not model and reading.prefix.startswith(base):
        reading.base = base
    reading.tied = (
        bool(getattr(type(model.config)(), "tie_word_embeddings", False))
        if not any("." in n for n, _ in walk(reading.config))
        else bool(reading.config.get("tie_word_embeddings", False))
    )
    embedding = [k.names[0] for k in reading.kinds if k.verb == "vocab" and "embed" in k.pattern]
    head = [k.names[0] for k in reading.kinds if k.section != "layers" and "lm_head.weight" in k.pattern]
    if embedding and head and (head[0], embedding[0]) != ("lm_head.weight", "model.embed_tokens.weight"):
        reading.ties = {head[0]: embedding[0]}


def joined(rules: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Neighbours with one rule, whose names differ in one word, in one line."""
    out: list[tuple[str, str]] = []
    left = list(rules)
    while left:
        pattern, rule = left.pop(0)
        words = pattern.split(".")
        best: tuple[int, list[str]] = (0, [pattern])
        for at in range(len(words)):
            if words[at] in ("*", "weight", "bias", "{expert}"):
                continue
            like = [p for p, r in left if r == rule and differ_at(p.split("."), words) == at]
            while like and len(pattern) + sum(len(p.split(".")[at]) + 1 for p in like) > WIDTH:
                like.pop()
            if len(like) + 1 > len(best[1]):
                best = (at, [pattern, *like])
        at, members = best
        if len(members) > 1:
            left = [x for x in left if x[0] not in members or x[1] != rule]
            words[at] = "{" + ",".join(m.split(".")[at] for m in members) + "}"
        out.append((".".join(words), rule))
    return out


def differ_at(a: Sequence[str], b: Sequence[str]) -> int:
    """The one word in which two names differ; -1 for none or several."""
    if len(a) != len(b):
        return -1
    found = [i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y]
    return found[0] if len(found) == 1 and "{" not in a[found[0]] and a[found[0]] != "*" else -1
