"""Random rules, shapes and meshes against a judge that names the origin of every element.

A family file is made up, its tensors are cut for one mesh and then for another, and every rank's file is compared with
what numpy takes from the whole tensor, position by position. What numpy cannot share out evenly must be refused.
"""

from __future__ import annotations

import itertools
import json
import tempfile
from dataclasses import dataclass
from math import lcm, prod
from pathlib import Path

import numpy as np
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.command import ckpttool, reshard
from tests.helpers.sample import examples
from tests.helpers.tensorfile import Array, Raw, Tensors, assert_same, origin, read, read_all, save_hf, write

PAD = -1
SHARES = (1, 2, 3, 4, 6)
"""All divide 12."""


class UnevenError(Exception):
    """The judge cannot share this out."""


@dataclass(frozen=True)
class Units:
    """Something that no cut may part; ``shared`` ones may be held by several ranks."""

    name: str
    count: int
    shared: bool = False


@dataclass(frozen=True)
class Tensor:
    """A made-up tensor with its rule."""

    name: str
    shape: tuple[int, ...]
    verb: str
    units: Units | None = None
    parts: tuple[Units | None, ...] = ()
    grouped: bool = False
    in_out: bool = False
    expert: int | None = None
    layer: int | None = None

    @property
    def rule(self) -> str:
        words = ["grouped"] if self.grouped else []
        words.append(self.verb)
        if self.units:
            words.append(self.units.name)
        words += [f"p{i}:{u.name}" if u else f"p{i}" for i, u in enumerate(self.parts)]
        return " ".join([*words, "in_out"] if self.in_out else words)


@dataclass(frozen=True)
class Sizes:
    """A mesh."""

    tp: int
    pp: int
    ep: int
    etp: int
    layout: tuple[int, ...]

    @property
    def width(self) -> int:
        return lcm(self.tp, self.ep * self.etp)

    def flags(self, end: str) -> list[object]:
        names = {"tp": self.tp, "pp": self.pp, "ep": self.ep, "etp": self.etp}
        out: list[object] = [x for k, v in names.items() for x in (f"--{k}{end}", v)]
        return [*out, "--pp-layout", ",".join(map(str, self.layout))] if end else out

    def stage(self, layer: int) -> int:
        owners = [chunk % self.pp for chunk, n in enumerate(self.layout) for _ in range(n)]
        return owners[layer]


@dataclass(frozen=True)
class Case:
    """A model, two meshes for it, and the experts it has."""

    tensors: tuple[Tensor, ...]
    meshes: tuple[Sizes, ...]
    experts: int
    layers: int
    vocab: int
    heads: Units
    kv: Units

    def config(self) -> dict[str, int]:
        return {"n_heads": self.heads.count, "n_kv": self.kv.count, "n_experts": self.experts, "n_vocab": self.vocab}

    def family(self) -> str:
        rules: dict[str, dict[str, str]] = {"first": {}, "layers": {}, "last": {}}
        for t in self.tensors:
            if t.layer is None:
                rules["first" if t.name == "embed" else "last"][t.name] = t.rule
            else:
                short = t.name.split(".", 2)[2]
                rules["layers"][
                    short if t.expert is None else short.replace(f"experts.{t.expert}", "experts.{expert}")
                ] = t.rule
        return yaml.safe_dump(
            {
                "family": "made_up",
                "sizes": {
                    "heads": "n_heads",
                    "kv": {"from": ["n_kv"], "shared": True},
                    "experts": "n_experts",
                    "vocab": "n_vocab",
                },
                "first": rules["first"],
                "layers": {"prefix": "layers.{layer}.", "rules": rules["layers"]},
                "last": rules["last"],
            }
        )

    def whole(self) -> Tensors:
        return {t.name: origin(i + 1, "U32", t.shape) for i, t in enumerate(self.tensors)}


def share(n: int, units: Units | None, ways: int, index: int) -> list[int]:
    """The positions of an axis that one of ``ways`` ranks holds."""
    count = units.count if units else n
    heads = np.arange(n).reshape(count, -1) if n else np.zeros((count, 0), int)
    if units and units.shared and ways > count:
        if ways % count:
            raise UnevenError
        return [int(i) for i in heads[index // (ways // count)]]
    if count % ways:
        raise UnevenError
    return [int(i) for part in np.split(heads, ways)[index] for i in part]


def positions(t: Tensor, mesh: Sizes, rank: int) -> list[list[int]]:
    """Per axis the positions in the whole tensor that the rank's tensor has, or PAD."""
    i = rank % mesh.width
    tp, etp, ep = i % mesh.tp, i % mesh.etp, i // mesh.etp % mesh.ep
    ways, index = (mesh.etp, etp) if t.expert is not None or t.grouped else (mesh.tp, tp)
    out = [list(range(n)) for n in t.shape]
    first = int(t.grouped)
    if t.grouped:
        out[0] = [int(e) for e in np.array_split(np.arange(t.shape[0]), mesh.ep)[ep]]
    axes = len(t.shape) - first
    if t.verb == "replicate" or (t.verb == "row" and axes == 1):
        return out
    last, other = len(t.shape) - 1, len(t.shape) - 2
    axis = last if axes == 1 else (other if (t.verb == "row") == t.in_out else last)
    n = t.shape[axis]
    if t.verb == "vocab":
        rows = -(-n // ways)
        out[axis] = [j if j < n else PAD for j in range(index * rows, (index + 1) * rows)]
    elif t.verb == "fused":
        weights = [u.count if u else 1 for u in t.parts]
        edges = np.cumsum([0, *(w * n // sum(weights) for w in weights)])
        out[axis] = [
            int(a) + j
            for a, b, u in zip(edges, edges[1:], t.parts, strict=False)
            for j in share(int(b - a), u, ways, index)
        ]
    else:
        out[axis] = share(n, t.units, ways, index)
    return out


def taken(bits: Array, where: list[list[int]]) -> Array:
    """The elements at the given positions; padding is zero."""
    for axis, at in enumerate(where):
        index = np.array(at, int)
        bits = np.where(
            (index == PAD).reshape([-1 if a == axis else 1 for a in range(bits.ndim)]),
            np.uint32(0),
            bits.take(np.maximum(index, 0), axis) if bits.shape[axis] else bits,
        )
    return bits


def rank_tensors(case: Case, mesh: Sizes, rank: int, whole: Tensors) -> Tensors:
    """What one rank holds. Raises UnevenError."""
    stage = rank // mesh.width
    ep = rank % mesh.width // mesh.etp % mesh.ep
    owner = [i for i, ids in enumerate(np.array_split(np.arange(case.experts), mesh.ep)) for _ in ids]
    out: Tensors = {}
    for t in case.tensors:
        where = positions(t, mesh, rank)
        here = {"embed": 0, "head": mesh.pp - 1}.get(t.name)
        if (mesh.stage(t.layer or 0) if here is None else here) == stage and (
            t.expert is None or owner[t.expert] == ep
        ):
            out[t.name] = Raw("U32", taken(whole[t.name].bits, where))
    return out


def all_ranks(case: Case, mesh: Sizes, whole: Tensors) -> list[Tensors] | None:
    """None when something does not come out even."""
    try:
        return [rank_tensors(case, mesh, r, whole) for r in range(mesh.width * mesh.pp)]
    except UnevenError:
        return None


@st.composite
def meshes(draw: st.DrawFn, layers: int) -> Sizes:
    pp = draw(st.integers(1, min(3, layers)))
    chunks = pp * draw(st.integers(1, 2))
    cuts = sorted(draw(st.lists(st.integers(0, layers), min_size=chunks - 1, max_size=chunks - 1)))
    layout = tuple(b - a for a, b in itertools.pairwise([0, *cuts, layers]))
    return Sizes(draw(st.sampled_from(SHARES)), pp, draw(st.integers(1, 4)), draw(st.sampled_from((1, 2, 3))), layout)


@st.composite
def rules(draw: st.DrawFn, /, name: str, heads: Units, kv: Units, experts: int, *, expert: bool = False) -> Tensor:
    """A tensor of one to three axes whose cut axis its units divide."""
    grouped = not expert and draw(st.booleans())
    verb = draw(st.sampled_from(("replicate", "column", "row", "fused")))
    units = draw(st.sampled_from((None, heads, kv))) if verb in ("column", "row") else None
    parts: tuple[Units | None, ...] = ()
    if verb == "fused":
        size = draw(st.integers(2, 3))
        parts = draw(st.sampled_from(((heads, kv, kv)[:size], (None,) * size)))
    axes = draw(st.integers(1, 2))
    shape = [draw(st.sampled_from((12, 24, 5))) for _ in range(axes)]
    in_out = draw(st.booleans())
    if verb != "replicate" and not (verb == "row" and axes == 1):
        axis = axes - 1 if axes == 1 or (verb == "row") != in_out else 0
        each = sum(u.count if u else 1 for u in parts) if parts else units.count if units else 12
        shape[axis] = (
            each * draw(st.integers(0, 2) if units else st.integers(1, 3)) * (12 if parts and not parts[0] else 1)
        )
    if grouped:
        shape.insert(0, experts)
    return Tensor(name, tuple(shape), verb, units, parts, grouped, in_out)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    layers, experts = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    heads = Units("heads", draw(st.sampled_from((12, 24))))
    kv = Units("kv", draw(st.sampled_from((1, 2, 3, 12))), shared=True)
    vocab = draw(st.integers(1, 30))
    tensors = [Tensor("embed", (vocab, 5), "vocab"), Tensor("head", (vocab, 3), "vocab", in_out=False)]
    model = [draw(rules(f"t{i}", heads, kv, experts)) for i in range(draw(st.integers(1, 4)))]
    one = draw(rules("w", heads, kv, experts, expert=True))
    for layer in range(layers):
        tensors += [_renamed(t, f"layers.{layer}.{t.name}", layer, None) for t in model]
        tensors += [_renamed(one, f"layers.{layer}.experts.{e}.w", layer, e) for e in range(experts)]
    pair = draw(meshes(layers)), draw(meshes(layers))
    return Case(tuple(tensors), pair, experts, layers, vocab, heads, kv)


def _renamed(t: Tensor, name: str, layer: int, expert: int | None) -> Tensor:
    return Tensor(name, t.shape, t.verb, t.units, t.parts, t.grouped, t.in_out, expert, layer)


@given(cases())
@settings(max_examples=examples(40))
def test_any_rule_any_shape_any_mesh(case: Case) -> None:
    whole = case.whole()
    with tempfile.TemporaryDirectory() as name:
        at = Path(name)
        save_hf(at / "src", whole, case.config())
        (at / "own.yaml").write_text(case.family(), encoding="utf-8")
        options = ("-q", "--to", "ranks", "--family", at / "own.yaml")
        last = at / "src"
        for step, mesh in enumerate(case.meshes):
            to = at / f"step{step}"
            want = all_ranks(case, mesh, whole)
            if want is None:
                done = ckpttool("reshard", last, to, *options, *mesh.flags("-out"))
                assert done.code == 1, done
                assert "cannot be cut for" in done.err
                assert not to.exists()
                continue
            reshard(last, to, *options, *mesh.flags("-out"))
            for rank, tensors in enumerate(want):
                assert_same(read(to / f"rank-{rank:05d}-of-{len(want):05d}.safetensors"), tensors)
            last = to
        reshard(last, at / "back", "-q", "--to", "hf")
        assert_same(read_all(at / "back"), whole)


@given(cases())
@settings(max_examples=examples(25))
def test_any_ranks_of_others(case: Case) -> None:
    """Files that numpy cut, without metadata: their place follows from rules, config and flags."""
    whole = case.whole()
    mesh = case.meshes[0]
    ranks = all_ranks(case, mesh, whole)
    if ranks is None:
        return
    held = {n for tensors in ranks for n, r in tensors.items() if prod(r.bits.shape)}
    with tempfile.TemporaryDirectory() as name:
        at = Path(name)
        for rank, tensors in enumerate(ranks):
            write(at / "src" / f"part{rank}.safetensors", tensors)
        (at / "src" / "config.json").write_text(json.dumps(case.config()), encoding="utf-8")
        (at / "own.yaml").write_text(case.family(), encoding="utf-8")
        options = ("--rank-pattern", "part{rank}.safetensors", "--family", at / "own.yaml", *mesh.flags(""))
        reshard(at / "src", at / "back", "-q", "--to", "hf", *options)
        found = read_all(at / "back")
        assert_same({n: found[n] for n in held}, {n: whole[n] for n in held})
        assert found.keys() == whole.keys()
