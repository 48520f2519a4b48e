"""Kinds of the values of a state dict that was saved with torch.distributed.checkpoint: models, optimizers, the rest.

Trainers nest them as they like, so their own words decide, the path of keys to each value:

    app . model . NAME                    a model, with the prefix ``app.model``
    app . optim . state . NAME . exp_avg  state of an optimizer; also flattened to ``optim.state.NAME.exp_avg``
    master_weights . NAME
    NAME                                  a model without a prefix (torchtitan)

``Optimizer.state_dict()`` has numbers in place of names: ``numbered`` says whose they are.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import permutations
from typing import Any, NamedTuple

from ckpttool.containers.pickle import printable
from ckpttool.core.catalog import Key
from ckpttool.core.dtypes import DTYPES
from ckpttool.core.optimizer_states import STEP
from ckpttool.core.words import some
from ckpttool.errors import ConflictError, IncompleteError, UsageError
from ckpttool.formats.base import ParamGroup
from ckpttool.formats.torch.dcp_metadata import DcpEntry, DcpTensor
from ckpttool.formats.torch.numbered import names_of, unknown
from ckpttool.formats.torch.prefixes import strip_prefixes

ALL = "."
"""The --select of every tensor, under names with all their keys."""
_MODELS = ("model", "module", "state_dict", "model_state_dict", "model_state")
"""Last keys of prefixes under which trainers keep the model."""
_MASTERS = ("master_weights", "master_params")
_AVERAGE = re.compile(r"(model_)?ema(_model|_state_dict|_weights)?|\w+_ema")
_STATE = re.compile(r"(?:(?P<prefix>(?:.*\.)?optim\w*)\.)?state\.(?P<name>.+)\.(?P<state>[A-Za-z_]\w*)")
_GROUP = re.compile(r"(?:(?P<prefix>.*)\.)?param_groups\.(?P<name>.+)\.(?P<value>\w+)")
_COUNTERS = frozenset({"step", "epoch", "rng", "rng_state", "iteration", "global_step", "lr"})
"""Tensors of a trainer that lie beside those of a model without a prefix."""


class GroupParameters(NamedTuple):
    """The parameters of a group as a save has them."""

    prefix: str
    """Prefix of the optimizer."""
    params: Mapping[int | str, str]
    """Names, or numbers with the names of the parameters; "" where nothing says it."""


class SaveKeys(NamedTuple):
    """The nesting of a save's values."""

    model: str = "model"
    """Prefix of the model's names; "" for none."""
    optimizer: str = "optimizer"
    flattened: bool = False
    """Optimizers without numbered groups: ``state.NAME.exp_avg`` and ``param_groups.NAME.lr`` are single keys."""
    numbers: Mapping[str, str] = {}
    """Dtypes of the plain values that are tensors of one number, by fqn."""
    paths: Mapping[str, tuple[str | int, ...]] = {}
    """Keys that lead to plain values, by fqn."""
    parameters: Mapping[str, int] = {}
    """Numbers that the optimizer has for the parameters of these names; empty where it has their names."""
    owners: Mapping[str, str] = {}
    """Parameter -> prefix of its optimizer, where there are several."""
    components: Mapping[str, str] = {}
    """Prefixes of other components, where they are not called as the components are."""
    places: Mapping[str, tuple[str | int, ...]] = {}
    """The keys that each prefix stands for."""
    named: bool = False
    """Groups have ``param_names`` too: the optimizer was made of ``model.named_parameters()``."""
    held: Sequence[GroupParameters] = ()
    """The parameters of each group of the save, in the order of ``TrainingState.groups``."""
    listed: frozenset[str] = frozenset()
    """Prefixes of optimizers whose groups are one value, as in saves of torch 2.2."""
    order: Sequence[str] = ()
    """Names of the model in the order of the save, where it tells which parameters the numbers are."""

    def tensor(self, component: str, name: str, state: str) -> tuple[str | int, ...]:
        """The keys that lead to a tensor."""
        if component != "optimizer":
            prefix = self.model if component == "model" else self.components.get(component, component)
            return (*self._keys(prefix), name)
        return self._path(self._prefix(name), "state", str(self.parameters.get(name, name)), state)

    def groups(self, groups: Sequence[ParamGroup]) -> Iterator[tuple[tuple[str | int, ...], object]]:
        """(keys, value) of what the groups of an optimizer hold."""
        seen: dict[str, int] = {}
        lists: dict[str, list[dict[str, Any]]] = {}
        every: Sequence[GroupParameters | None] = self.held if len(self.held) == len(groups) else [None] * len(groups)
        for group, held in zip(groups, every, strict=True):
            top = held.prefix if held is not None else self._prefix(next(iter(group.parameters), ""))
            i = seen[top] = seen.get(top, -1) + 1
            if self.flattened:
                for name in group.parameters:
                    for key, value in group.values.items():
                        yield self._path(top, "param_groups", name, key), value
                continue
            values = {**group.values, "params": self._params(group, held)}
            values |= {"param_names": list(group.parameters)} if self.named else {}
            if top in self.listed:
                lists.setdefault(top, []).append(values)
                continue
            for key, value in values.items():
                yield self._path(top, "param_groups", i, key), value
        yield from ((self._path(top, "param_groups"), values) for top, values in lists.items())

    def _params(self, group: ParamGroup, held: GroupParameters | None) -> list[int | str]:
        """The ``params`` of a group: as the save has them, where nothing was renamed."""
        kept = {*group.parameters}
        if held is not None and kept <= {*held.params.values()} and not self.named:
            return [p for p, name in held.params.items() if not name or name in kept]
        return [self.parameters.get(name, name) for name in group.parameters]

    def _prefix(self, name: str) -> str:
        return self.owners.get(name, self.optimizer)

    def _keys(self, prefix: str) -> tuple[str | int, ...]:
        return self.places.get(prefix, (prefix,) if prefix else ())

    def _path(self, prefix: str, *keys: str | int) -> tuple[str | int, ...]:
        """The keys below those of an optimizer; one key, where it is flattened."""
        if not self.flattened:
            return (*self._keys(prefix), *keys)
        above = self.places.get(prefix, ())
        below = ".".join(map(str, keys))
        return (*above, below) if above or not prefix else (f"{prefix}.{below}",)

    def for_parameters(self, names: Collection[str]) -> SaveKeys:
        """The same for an optimizer of these parameters: one, with names, where some of them were not in SRC."""
        parameters = self.parameters if all(n in self.parameters for n in names) else {}
        owners = self.owners if all(n in self.owners for n in names) else {}
        held = self.held if (parameters, owners) == (self.parameters, self.owners) else ()
        return self._replace(parameters=parameters, owners=owners, held=held)


KEYS = dict.fromkeys(("torchtitan", "torchtitan-0.2"), SaveKeys("", flattened=True))
"""Nesting by the software that has these names, where that is not what ``get_state_dict`` gives."""


class Assigned(NamedTuple):
    """The values of a state dict, assigned to keys."""

    keys: dict[str, Key]
    """Keys by fqn: tensors, and numbers that are state of an optimizer."""
    names: Mapping[str, str]
    """Names of parameters, by their names in the save."""
    notes: list[str]
    nesting: SaveKeys = SaveKeys()
    numbers: Mapping[int, str] = {}
    """The parameter of each number of an optimizer that has no names."""
    refused: str = ""
    """Reason why the state of an optimizer belongs to no parameter."""
    others: frozenset[str] = frozenset()
    """Prefixes of optimizers of other models."""


class _StateKey(NamedTuple):
    """State of an optimizer."""

    name: str
    state: str
    prefix: str
    flattened: bool


def assign(
    entries: Sequence[DcpEntry],
    select: str,
    where: str,
    groups_of: Mapping[str, Sequence[Mapping[int, str]]],
    *,
    wrapped: bool = True,
) -> Assigned:
    """Tensors by their keys; ``select`` is a prefix of --select, or "", ``wrapped`` that of ``ReadOptions``.

    ``groups_of`` has the parameters of each group by the prefix of an optimizer that numbers them: their names, or "".

    Raises ConflictError for several models or optimizers, UsageError for a prefix that is not there, IncompleteError
    when there are no tensors.
    """
    tensors = {e.fqn: e.value for e in entries if isinstance(e.value, DcpTensor)}
    if select == ALL and tensors:
        return Assigned({fqn: Key(fqn) for fqn in tensors}, {}, [])
    names_said = {str(g.which) for e in entries if (g := grouped(e)) is not None} | tensors.keys()
    states = {e.fqn: s for e in entries if (s := _state(e.path, names_said)) is not None}
    unnamed = _of_numbers(entries, groups_of)
    groups: dict[str, dict[str, str]] = {}
    """{prefix: {name: fqn}} of all other tensors."""
    for e in entries:
        if e.fqn in tensors and e.fqn not in states and e.fqn not in unnamed:
            groups.setdefault(".".join(map(str, e.path[:-1])), {})[str(e.path[-1])] = e.fqn
    trained = {s.name for s in states.values()}
    optimizers = {s.prefix for s in states.values()}
    groups = {**groups, **_split(groups.pop("", {}), trained)}
    masters = {p for p in groups if p.rpartition(".")[2] in _MASTERS}
    averages = {p for p in groups if _AVERAGE.fullmatch(p.rpartition(".")[2])} - {select}
    prefix = _choose({p: g for p, g in groups.items() if p not in masters | averages}, trained, tensors, select, where)
    chosen, weights = ("model", {}) if prefix is None else (prefix, groups.get(prefix, {}))
    keys: dict[str, Key] = {}
    notes = [f"read from `{printable(chosen)}`"] if chosen not in ("", "model") and chosen in groups else []

    names: dict[str, str] = {}

    def take(found: Mapping[str, tuple[str, str, str]]) -> None:
        """Add values by (name, component, state), those of other models' parameters left out."""
        model = {k.name for k in keys.values() if k.component == "model"}
        others = dict.fromkeys(n for n, _, _ in found.values() if n not in names)
        new, note = strip_prefixes(others, where, wrapped=wrapped)
        names.update(new)
        notes.extend([note] if note and note not in notes else [])
        for fqn, (name, *rest) in found.items():
            if not model or names[name] in model:
                keys[fqn] = Key(names[name], *rest)

    take({fqn: (n, "model", "") for n, fqn in weights.items()})
    for component, prefixes in (("master_weights", masters), ("ema", averages)):
        take({fqn: (n, component, "") for p in sorted(prefixes) for n, fqn in groups[p].items()})
    states, refused = _of_model(states, chosen)
    take({fqn: (s.name, "optimizer", s.state) for fqn, s in states.items()})
    whose: Mapping[int, str] = {}
    if (unnamed or groups_of) and not refused:
        model = {n: tensors[fqn] for n, fqn in weights.items()}
        found = {} if states else _whose(unnamed, tensors, model, groups_of)
        if found is None and not unnamed:
            found = {}
        if found is None:
            refused = "its parameters are numbers, and their shapes leave more than one order, or none"
        else:
            numbers = {fqn: (int(s.name), s.state) for fqn, s in unnamed.items()}
            take({fqn: (found[n], "optimizer", state) for fqn, (n, state) in numbers.items() if n in found})
            whose = {number: names[name] for number, name in found.items()}
            every = [n for of in groups_of.values() for group in of for n in group]
            notes += unknown(every, whose, kept="only --to dcp keeps them in their groups")
    if not keys:
        raise IncompleteError("the save holds no tensors", where=where, hint="give the directory of the model's save")
    if left := [
        printable(fqn, 60)
        for fqn, t in tensors.items()
        if fqn not in keys and t.shape and not (refused and fqn in unnamed)
    ]:
        notes.append(f"skipped, not part of the model or its state: {some(left)}")
    kept = {fqn: s for fqn, s in states.items() if fqn in keys}
    first = next(iter(kept.values()), None) or next(iter(unnamed.values()) if whose else iter(()), None)
    nesting = _nesting(chosen, first, entries)
    owners = {names[s.name]: s.prefix for s in kept.values()}
    owners = owners if len(set(owners.values())) > 1 else {}
    components = {c: next(iter(p)) for c, p in (("master_weights", masters), ("ema", averages)) if len(p) == 1}
    nesting = nesting._replace(
        parameters={name: number for number, name in whose.items()},
        order=tuple([k.name for k in keys.values() if k.component == "model"]) if groups_of else (),
        owners=owners,
        components=components,
        places=_places(entries, {chosen, nesting.optimizer, *owners.values(), *components.values()}),
    )
    others = frozenset(optimizers - {s.prefix for s in kept.values()})
    return Assigned(_once(keys, where), names, notes, nesting, whose, refused, others)


def _of_numbers(
    entries: Sequence[DcpEntry], groups_of: Mapping[str, Sequence[Mapping[int, str]]]
) -> dict[str, _StateKey]:
    """State of parameters that have numbers for names: of an optimizer, which has groups or tensors.

    A loader of data may have a ``state`` of each of its workers, too.
    """
    found = {e.fqn: s for e in entries if (s := numbered(e.path)) is not None}
    tensors = {found[e.fqn].prefix for e in entries if e.fqn in found and _has_axes(e)}
    return {fqn: s for fqn, s in found.items() if s.prefix in tensors or any(groups_of.get(s.prefix, ()))}


def _has_axes(entry: DcpEntry) -> bool:
    return isinstance(entry.value, DcpTensor) and bool(entry.value.shape)


def _nesting(chosen: str, first: _StateKey | None, entries: Iterable[DcpEntry]) -> SaveKeys:
    """Nesting of the optimizer: by a state of it, or by a value of its groups where it has none."""
    if first is not None:
        return SaveKeys(chosen, first.prefix, first.flattened)
    group = next((g for e in entries if (g := grouped(e)) is not None), None)
    if group is None:
        return SaveKeys(chosen)
    return SaveKeys(chosen, group.prefix, flattened=not str(group.which).isdecimal())


def _places(entries: Iterable[DcpEntry], prefixes: set[str]) -> dict[str, tuple[str | int, ...]]:
    """The keys that these prefixes stand for."""
    found: dict[str, tuple[str | int, ...]] = {}
    for e in entries:
        for n in range(1, len(e.path)):
            prefix = ".".join(map(str, e.path[:n]))
            if prefix in prefixes:
                found.setdefault(prefix, e.path[:n])
    return found


def _of_model(states: Mapping[str, _StateKey], chosen: str) -> tuple[dict[str, _StateKey], str]:
    """The states without those of other models' optimizers, whose parameters have the same names; or why not."""
    held: dict[str, set[str]] = {}
    for s in states.values():
        held.setdefault(s.prefix, set()).add(s.name)
    rivals = {p for p, q in permutations(held, 2) if not held[p].isdisjoint(held[q])}
    above, _, word = chosen.rpartition(".")
    near = {p for p in rivals if above and p.rpartition(".")[0] == above}
    near = near or {p for p in rivals if word and word in re.split(r"[._]", p)}
    if any(not held[p].isdisjoint(held[q]) for p, q in permutations(near, 2)) or (rivals and not near):
        return {f: s for f, s in states.items() if s.prefix not in rivals}, (
            f"{some([f'`{printable(p)}`' for p in sorted(rivals)])} have parameters of the same names"
        )
    return {f: s for f, s in states.items() if s.prefix not in rivals - near}, ""


def numbered(path: tuple[str | int, ...]) -> _StateKey | None:
    """The state key of a value whose parameter has a number for a name."""
    if len(path) < 3 or path[-3] != "state" or not str(path[-2]).isdecimal():
        return None
    return _StateKey(str(path[-2]), str(path[-1]), ".".join(map(str, path[:-3])), flattened=False)


def _whose(
    unnamed: Mapping[str, _StateKey],
    tensors: Mapping[str, DcpTensor],
    model: Mapping[str, DcpTensor],
    groups_of: Mapping[str, Sequence[Mapping[int, str]]],
) -> dict[int, str] | None:
    """The name of each number of the optimizer, None where nothing says it; numbers without state may lack theirs."""
    prefixes = {s.prefix for s in unnamed.values()} or {*groups_of}
    if len(prefixes) > 1 or not prefixes <= groups_of.keys():
        return None
    shapes: dict[int, tuple[int, ...]] = {}
    for fqn, s in unnamed.items():
        if s.state != STEP and fqn in tensors:
            shapes.setdefault(int(s.name), tensors[fqn].shape)
    dealt = groups_of[prefixes.pop()]
    said = {n: name for group in dealt for n, name in group.items() if name in model}
    if said.keys() >= shapes.keys():
        fits = all(model[name].shape == shapes.get(n, model[name].shape) for n, name in said.items())
        return said if fits and len(set(said.values())) == len(said) else None
    groups = [[(n, shapes.get(n)) for n in group] for group in dealt]
    floats = [(n, t.shape) for n, t in model.items() if t.dtype in DTYPES and DTYPES[t.dtype].kind == "float"]
    found = names_of(groups, floats, shapes.keys())
    return None if found is None else {int(n): name for n, name in found.items()}


def _state(path: tuple[str | int, ...], names_said: Collection[str]) -> _StateKey | None:
    """The state key of a value of an optimizer; None for any other. Parameters that are only numbered are none.

    Keys that are not below another one count where a group or a tensor has the name: a model may have a module that is
    called ``state``.
    """
    if "state" in path[:-2]:
        at = path.index("state")
        name, state = ".".join(map(str, path[at + 1 : -1])), str(path[-1])
        prefix = ".".join(map(str, path[:at]))
        return _StateKey(name, state, prefix, flattened=False) if "." not in state and not name.isdecimal() else None
    last = str(path[-1])
    if len(path) > 1 and last.startswith("state."):
        name, _, state = last.removeprefix("state.").rpartition(".")
        return _StateKey(name, state, ".".join(map(str, path[:-1])), flattened=True) if name else None
    m = _STATE.fullmatch(last) if len(path) == 1 else None
    if m is None or m["name"].isdecimal() or (m["prefix"] is None and m["name"] not in names_said):
        return None
    return _StateKey(m["name"], m["state"], m["prefix"] or "", flattened=True)


class Grouped(NamedTuple):
    """A value of param_groups."""

    prefix: str
    """Prefix of the optimizer."""
    which: str | int
    """The parameter, or the number of the group."""
    value: str
    """Its name."""


def grouped(entry: DcpEntry) -> Grouped | None:
    """The place of a value in param_groups; None for any other."""
    path = entry.path
    if len(path) > 2 and path[-3] == "param_groups":
        return Grouped(".".join(map(str, path[:-3])), path[-2], str(path[-1]))
    m = _GROUP.fullmatch(".".join(map(str, path)))
    return Grouped(m["prefix"] or "", m["name"], m["value"]) if m else None


def _split(flat: Mapping[str, str], trained: set[str]) -> dict[str, dict[str, str]]:
    """Tensors without a path by the prefix of the model, where the names of an optimizer or the model tell it."""
    prefix = ""
    if some_trained := next(iter(trained - flat.keys()), ""):
        ends = [n for n in flat if n.endswith(f".{some_trained}")]
        prefix = min(ends, key=len).removesuffix(some_trained) if ends else ""
    elif not trained and any(n.startswith(("model.model.", "model.lm_head.")) for n in flat):
        prefix = "model."
    out: dict[str, dict[str, str]] = {}
    for name, fqn in flat.items():
        master = next((m for m in _MASTERS if name.startswith(f"{m}.")), "")
        at = f"{master}." if master else prefix if name.startswith(prefix) else ""
        out.setdefault(at.rstrip("."), {})[name[len(at) :]] = fqn
    if prefix:
        return out
    # Counters beside a model that has no prefix.
    model = out.get("", {})
    if any("." in n for n in model):
        counters = [n for n in model if n in _COUNTERS or n.startswith("train_state.")]
        out["trainer"] = {n: model.pop(n) for n in counters}
    return {p: g for p, g in out.items() if g}


def _choose(
    groups: Mapping[str, Mapping[str, str]],
    trained: set[str],
    tensors: Mapping[str, DcpTensor],
    select: str,
    where: str,
) -> str | None:
    """The prefix of the model; None where there is an optimizer alone."""
    if select:
        if select not in groups:
            raise UsageError(
                f"--select: no tensors lie in `{printable(select)}`", where=where, hint=f"there is {_listed(groups)}"
            )
        return select
    found = [p for p in groups if p.rpartition(".")[2] in _MODELS]
    if not found and trained:
        found = [p for p, g in groups.items() if trained & g.keys()]
    if not found:
        found = [p for p, g in groups.items() if any(len(tensors[fqn].shape) > 1 for fqn in g.values())]
    if not found and not trained:
        found = list(groups)
    if len(found) > 1:
        raise ConflictError(
            f"the save holds {len(found)} models: {_listed(found)}",
            where=where,
            hint=f"choose one: --select {printable(found[0]) or ALL}; --select {ALL} takes all tensors, with all keys",
        )
    return found[0] if found else None


def _listed(prefixes: Iterable[str]) -> str:
    return some([f"`{printable(p, 60)}`" if p else "tensors without a prefix" for p in prefixes], 6)


def _once(keys: dict[str, Key], where: str) -> dict[str, Key]:
    """The same, where no two values have one key."""
    seen: dict[Key, str] = {}
    for fqn, key in keys.items():
        if (other := seen.setdefault(key, fqn)) != fqn:
            raise ConflictError(
                f"two values are `{printable(str(key))}`: `{printable(other)}` and `{printable(fqn)}`",
                where=where,
                hint="the save has several optimizers or copies of the model: choose one with --select PREFIX",
            )
    return keys
