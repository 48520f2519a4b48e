"""``--ema`` and ``--masters``: averages or master weights become the model, before anything else is planned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ckpttool.checkpoint import Checkpoint
from ckpttool.core.catalog import Catalog, Key, LogicalTensor
from ckpttool.core.dtypes import CASTABLE, DTYPES
from ckpttool.core.geometry import Box
from ckpttool.core.notes import is_kind
from ckpttool.core.words import count, some
from ckpttool.errors import UnsupportedError, UsageError
from ckpttool.layout.scales import weight_of
from ckpttool.targeting.target import WEIGHTS, Target

_MASTERS, _AVERAGE = "master_weights", "ema"
_Elements = tuple[int, int, Box, Box]
"""File, offset and box of a stored tensor, and the box of the logical tensor that it is."""
_NAMES = {_MASTERS: "master weights", _AVERAGE: "average"}


def promoted(source: Checkpoint, target: Target) -> tuple[Checkpoint, Target]:
    """The checkpoint whose weights are its master weights or averages, where ``target`` wants those, and the target
    of these weights alone.

    A weight without a master or an average stays as it is. Averages get the dtypes of the weights; master weights keep
    theirs, unless --dtype says another. Raises UsageError where SRC has none, or options contradict each other.
    """
    if not (target.masters or target.ema):
        return source, target
    if target.masters and target.ema:
        raise UsageError("--masters and --ema exclude each other", hint="run reshard once for each")
    component, flag = (_MASTERS, "--masters") if target.masters else (_AVERAGE, "--ema")
    if component in source.stored.refused:
        raise source.stored.refused[component]
    if component not in source.components:
        raise _none_there(source, component, flag)
    if not set(target.components) <= {*WEIGHTS}:
        raise UsageError(f"{flag} writes the {_NAMES[component]} as the model, so only `--only model` goes with it")
    tensors, without = _replaced(source, component)
    notes = [n for n in source.notes if not is_kind(n, "derived weights")]
    if without:
        have = f"{count(len(without), 'tensor')} {'has' if len(without) == 1 else 'have'} no {_NAMES[component]}"
        notes.append(f"{have}: written from the model: {some([f'`{n}`' for n in without], 3)}")
    if target.ema and not target.dtype:
        notes += _narrowed(source, tensors)
    dtypes = {t.dtype for k, t in source.catalog.tensors.items() if k.component == component}
    dtype = target.dtype or ("" if target.ema else DTYPES[dtypes.pop() if len(dtypes) == 1 else "F32"].name.lower())
    kept = tuple(c for c in WEIGHTS if any(k.component == c for k in tensors))
    promoted_source = replace(source, catalog=replace(source.catalog, tensors=tensors), notes=notes)
    return promoted_source, replace(target, masters=False, ema=False, dtype=dtype, components=target.components or kept)


def unused_masters(source: Checkpoint, written: Catalog, dtype: str) -> list[str]:
    """A note where weights are written that are a rounding of master weights in SRC, which are not; ``dtype`` is what
    --dtype casts to, or ""."""
    narrow = sorted(
        {
            t.dtype
            for k, t in written.tensors.items()
            if k.component in WEIGHTS and (master := source.catalog.tensors.get(Key(k.name, _MASTERS))) is not None
            and DTYPES[t.dtype].bits < DTYPES[master.dtype].bits
        }
    )  # fmt: skip
    kept = any(k.component == _MASTERS for k in written.tensors)
    if kept or not narrow or (dtype and all(DTYPES[dtype].bits <= DTYPES[d].bits for d in narrow)):
        return []
    return [f"the weights of SRC are {some(narrow)}: --masters writes its float32 master weights instead"]


def _narrowed(source: Checkpoint, averages: Mapping[Key, LogicalTensor]) -> list[str]:
    """A note where averages are rounded to the dtypes of the weights."""
    held = ((t.dtype, source.catalog.tensors.get(Key(k.name, _AVERAGE))) for k, t in averages.items())
    pairs = [(own, t.dtype) for own, t in held if t is not None and DTYPES[own].bits < DTYPES[t.dtype].bits]
    if not pairs:
        return []
    narrow, wide = (some(sorted({*column})) for column in zip(*pairs, strict=True))
    return [f"the average is {wide}, and written as {narrow} like the weights; --dtype f32 keeps it"]


def _none_there(source: Checkpoint, component: str, flag: str) -> UsageError:
    dtypes = {t.dtype for k, t in source.catalog.tensors.items() if k.component in WEIGHTS and t.dtype in CASTABLE}
    alone = component == _MASTERS and dtypes == {"F32"}
    what = "master weights" if component == _MASTERS else "exponential moving average"
    return UsageError(
        f"{flag}: the source has no {what}",
        where=str(source.path),
        hint=f"its weights are F32 themselves: omit {flag}" if alone else "it has " + ", ".join(source.components),
    )


def _replaced(source: Checkpoint, component: str) -> tuple[dict[Key, LogicalTensor], list[str]]:
    """The weights with what ``component`` has of each, and the names of those of which it has nothing.

    Raises UnsupportedError for a weight with scales.
    """
    have = source.catalog.tensors
    names = {k.name for k in have if k.component in WEIGHTS}
    scaled = {weight_of(n, names) for n in names}
    tied = _TiedWeights(source, component)
    tensors: dict[Key, LogicalTensor] = {}
    without = []
    for key, weight in have.items():
        if key.component not in WEIGHTS:
            continue
        found = have.get(Key(key.name, component)) or tied.find(weight)
        if found is None:
            tensors[key] = weight
            if weight.dtype in CASTABLE and not (component == _MASTERS and DTYPES[weight.dtype].bits >= 32):
                without.append(key.name)
            continue
        if key.name in scaled:
            raise UnsupportedError(
                f"`{key.name}` is quantized: its scales do not belong to its {_NAMES[component]}",
                where=str(source.path),
                hint=f"--only {component} with a format that has it, such as ranks, writes that alone",
            )
        tensors[key] = replace(found, key=key, dtype=weight.dtype if component == _AVERAGE else found.dtype)
    for key, found in have.items():
        if key.component == component and key.name not in names:
            tensors[Key(key.name)] = replace(found, key=Key(key.name))
    return tensors, without


class _TiedWeights:
    """What trainers save of a weight of two names, under one of them."""

    def __init__(self, source: Checkpoint, component: str) -> None:
        self._found: dict[tuple[_Elements, ...], LogicalTensor] = {}
        """By the elements of the source that a weight consists of: its own, or those that it is a rounding of."""
        self._named: dict[str, LogicalTensor] = {}
        """By each name that the family ties."""
        self._source = source
        ties = source.family.ties
        pairs = {**ties, **{owner: copy for copy, owner in ties.items()}}
        for key, found in source.catalog.tensors.items():
            if key.component == component:
                weights = (source.catalog.tensors.get(Key(key.name, c)) for c in WEIGHTS)
                for t in (found, *filter(None, weights)):
                    self._found.setdefault(_elements(t), found)
                if other := pairs and pairs.get(source.published(key.name)):
                    self._named[other] = found

    def find(self, weight: LogicalTensor) -> LogicalTensor | None:
        """What the other name of a weight has; None where there is no such name, or it has nothing."""
        found = self._found.get(_elements(weight))
        if found is None and self._named:
            found = self._named.get(self._source.published(weight.key.name))
        return found if found is not None and found.shape == weight.shape else None


def _elements(t: LogicalTensor) -> tuple[_Elements, ...]:
    """Where in the source the elements of a tensor are."""
    return tuple([(p.stored.file, p.stored.offset, p.stored_box, p.logical_box) for p in t.pieces])
