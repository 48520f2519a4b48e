"""Which components of a checkpoint are written, and what each rank holds of them.

A parameter is cut once. Its master weight, moments and average have its shape and go where its elements go
(``relate.propagate_to_component``), and scalars such as the powers of beta go to every rank that holds some of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ckpttool.checkpoint import Checkpoint, refuse_empty
from ckpttool.core.catalog import COMPONENTS, Catalog, Key, LogicalTensor, RankTensor, RankTensors
from ckpttool.core.geometry import whole
from ckpttool.core.patterns import compile_pattern
from ckpttool.core.words import count, either, some
from ckpttool.errors import UsageError
from ckpttool.formats.base import Capabilities, Writer
from ckpttool.formats.registry import WRITERS
from ckpttool.planning.relate import DerivedTensor, EqualPair
from ckpttool.targeting.target import WEIGHTS, Target, castable

_AS_MODEL = {"ema": "--ema", "master_weights": "--masters"}

Component = tuple[str, str]
"""Its name, and the state of an optimizer or ""."""


def chosen_components(
    source: Checkpoint, target: Target, writer: Writer, notes: list[str], equal: list[EqualPair]
) -> tuple[Checkpoint, list[Component]]:
    """The checkpoint with what shall be written of it, in the order in which that is written.

    ``equal`` collects tensors of which only one is written.

    Raises UsageError for a component that is not there or that the format cannot hold.
    """
    refuse_empty(source)
    fmt, capabilities = writer.name, writer.capabilities
    catalog, wanted = source.catalog, target.components
    have = source.components
    if "adapter" in have and "adapter" not in capabilities.components and not wanted:
        raise UsageError(
            f"the source is an adapter, and --to {fmt} holds {', '.join(capabilities.components)}",
            where=str(source.path),
            hint="use --to unified; or merge it into its base first: ckpttool merge BASE+ADAPTER",
        )
    for c, why in source.stored.refused.items():
        # Who names no format wants the model cut, and has a note on the rest.
        if c in (wanted or (capabilities.components if target.format else ())):
            raise why
    for c in wanted:
        if c not in have:
            raise UsageError(
                f"--only {c}: the source has no {c}", where=str(source.path), hint="it has " + ", ".join(have)
            )
        if c not in capabilities.components:
            raise UsageError(
                f"--only {c}: --to {fmt} holds {', '.join(capabilities.components)}",
                hint=f"{_AS_MODEL[c]} writes it as the model"
                if c in _AS_MODEL and "model" in capabilities.components
                else f"--to {either([n for n, w in WRITERS.items() if c in w.capabilities.components])} holds it",
            )
    keep = wanted or tuple(c for c in have if c in capabilities.components)
    if not keep:
        raise UsageError(
            f"--to {fmt} holds {', '.join(capabilities.components)}, the source has only {', '.join(have)}",
            hint="choose another format with --to",
        )
    if not wanted:
        left = [c for c in have if c not in keep]
        if "optimizer" not in capabilities.components:
            left += run_names(source)
        if left:
            notes.append(f"{some(left, 12)} left out: --to {fmt} holds {', '.join(capabilities.components)}")
    tensors = {k: t for k, t in catalog.tensors.items() if k.component in keep}
    if capabilities.fp32_masters == "added" and "master_weights" in keep:
        tensors |= _own_masters(catalog)
    elif _narrowed(target, capabilities, keep) and not wanted:
        masters = _own_masters(catalog)
        tensors |= masters
        if masters:
            notes.append(f"master_weights: the source's own F32 weights, which the model has rounded to {target.dtype}")
    elif capabilities.fp32_masters == "dropped" and "model" in keep:
        widened = 0
        for key in [k for k in tensors if k.component == "master_weights"]:
            model = catalog.tensors.get(Key(key.name))
            if model is not None and model.dtype == "F32":
                equal.append((model, tensors.pop(key)))
            elif model is not None and castable(target.dtype) == "F32":
                tensors[model.key] = replace(tensors.pop(key), key=model.key)
                widened += 1
        if widened:
            notes.append("the weights are the source's master weights: float32 weights have no others")
    pairs = dict.fromkeys((k.component, k.state) for k in tensors)
    kept = replace(source, catalog=Catalog(catalog.files, tensors, catalog.aliases))
    return kept, sorted(pairs, key=lambda p: (COMPONENTS.index(p[0]), p[1]))


def in_one_dtype(source: Checkpoint, target: Target, capabilities: Capabilities, notes: list[str]) -> Target:
    """The target with a dtype for all parameters, where its software trains in one and the run of the source has two.

    What is float32 in a narrow model, such as routers of PaddleFormers, has its elements in the masters then.
    """
    if target.dtype or target.components or not capabilities.one_dtype:
        return target
    tensors = source.catalog.tensors
    trained = dict.fromkeys(Key(k.name) for k in tensors if k.component == "optimizer")
    dtypes = {key.name: tensors[key].dtype for key in trained if key in tensors}
    narrow = set(dtypes.values()) & {"BF16", "F16"}
    wide = [name for name, dtype in dtypes.items() if dtype == "F32"]
    if len(narrow) != 1 or not wide:
        return target
    dtype = narrow.pop()
    notes.append(
        f"{count(len(wide), 'float32 weight')} rounded to {dtype}, because this format has one dtype for all"
        f" parameters: {some(wide)}; their master weights stay float32"
    )
    return replace(target, dtype=dtype.lower())


def run_names(source: Checkpoint) -> list[str]:
    """What a run resumes from beside its tensors, by the first part of each name.

    Groups belong to the optimizer, which is named where it has tensors.
    """
    training = source.stored.training
    if training is None:
        return []
    names = ["param_groups"] if training.groups and "optimizer" not in source.components else []
    names += [*training.plain, *(["step"] if training.step is not None and not training.plain else [])]
    return list(dict.fromkeys(n.partition(".")[0] for n in names))


def _narrowed(target: Target, capabilities: Capabilities, keep: Sequence[str]) -> bool:
    """Whether a training run continues in a narrow dtype: what its optimizer worked on is then in the masters alone."""
    narrow = castable(target.dtype) in ("BF16", "F16")
    return narrow and "optimizer" in keep and "master_weights" in capabilities.components


def _own_masters(catalog: Catalog) -> dict[Key, LogicalTensor]:
    """Master weights of the parameters that have none because they are float32 themselves: their own elements."""
    out = {}
    for key, t in catalog.tensors.items():
        master = Key(key.name, "master_weights")
        if key.component == "model" and t.dtype == "F32" and master not in catalog.tensors:
            out[master] = replace(t, key=master)
    return out


def with_single(
    source: Checkpoint,
    capabilities: Capabilities,
    patterns: Sequence[str],
    views: Mapping[str, DerivedTensor],
    dtype: str,
    notes: list[str],
    equal: list[EqualPair],
) -> Checkpoint:
    """The checkpoint with what a trainer keeps in float32 (``patterns`` of names in ``views``) as it has it.

    A weight is its master then, all bits of it, and has no other where float32 parameters have none. ``dtype`` is what
    the others are cast to, or "". ``equal`` collects each weight that is left out for its master.
    """
    compiled = [compile_pattern(p) for p in patterns]
    found = {n: v for n, v in views.items() if any(p.search(n) for p in compiled)}
    tensors = dict(source.catalog.tensors)
    twice = capabilities.fp32_masters == "added"
    lifted, widened = [], []
    for name, view in found.items():
        keys = [part.source.key for part in view.parts if part.source.key in tensors]
        masters = {key: Key(key.name, "master_weights") for key in keys if key.component == "model"}
        for key, master in masters.items():
            if master in tensors:
                equal.append((tensors[key], tensors[master]))
                lifted += [name] if (dtype or tensors[key].dtype) != "F32" else []
                tensors[key] = replace(tensors[master] if twice else tensors.pop(master), key=key)
            elif tensors[key].dtype in ("BF16", "F16"):
                widened.append(name)
    if lifted:
        become = "are also" if twice else "become"
        notes.append(
            f"{count(len(lifted), 'float32 master weight')} {become} the model's weights, which the trainer keeps in"
            f" float32: {some(lifted)}"
        )
    if widened:
        notes.append(f"weights widened to float32, in which the trainer keeps them: {some(widened)}")
    return replace(source, catalog=Catalog(source.catalog.files, tensors, source.catalog.aliases))


def share_of(
    held: Sequence[RankTensor],
    tables: Mapping[Component, Mapping[str, DerivedTensor]],
    cast: Callable[[str, str], str],
    out: RankTensors,
) -> RankTensors:
    """What a rank stores of all components, given what it stores of the parameters; added to ``out``."""
    for (component, state), table in tables.items():
        for r in held:
            view = table.get(r.key)
            if view is None:
                continue
            dtype = cast(r.key, view.dtype) if component in WEIGHTS else view.dtype
            if view.shape != r.whole:  # a scalar is held by every rank that holds some of its parameter
                cut = ((whole(view.shape),) * 2,)
                out.append(RankTensor(r.name, dtype, view.shape, view.name, view.shape, cut, (), component, state))
            elif component == "model" and dtype == r.dtype:
                out.append(r)
            else:
                out.append(r._replace(dtype=dtype, key=view.name, component=component, state=state))
    return out
