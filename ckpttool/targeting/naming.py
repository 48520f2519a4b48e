"""The names of the output's tensors: dialect, fusions and the version of the software that reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from ckpttool.aoa import apply_aoa, read_aoa
from ckpttool.checkpoint import Checkpoint
from ckpttool.dialects import PUBLISHED, Dialect, NamingContext, Shapes, Statements, dialect
from ckpttool.errors import UsageError
from ckpttool.formats.base import KeepsNames, StoredCheckpoint, Writer
from ckpttool.formats.config import quantization
from ckpttool.layout.packed import find_packing
from ckpttool.layout.statements import Fuse, Rename, Transpose, inverse
from ckpttool.planning.relate import DerivedTensor, TensorTable, apply_transforms
from ckpttool.targeting.target import Target

_MEMORY = "torch"
"""``Capabilities.states`` of formats in which torch's trainers save what they have in memory."""


def choose_dialect(source: Checkpoint, target: Target, writer: Writer) -> tuple[Dialect, str]:
    """The dialect of the output, and which fusions are added to it: "fuse", "unfuse" or ""."""
    stored = source.stored
    fused = "fuse" if target.fuse else "unfuse" if target.unfuse else ""
    if target.version in writer.capabilities.namings:
        return dialect(target.version), fused
    if not writer.dialect:
        if stored.dialect in source.family.spec.trainer_namings and stored.format != writer.name:
            return dialect(PUBLISHED), fused
        return source.dialect, fused or stored.fused
    ours = dialect(writer.dialect)
    if ours.published:
        # What came from Hugging Face in one of its forms goes back in that form. So does what a trainer has in memory,
        # if it goes to a trainer.
        memory = source.capabilities.states == _MEMORY != writer.capabilities.states
        if stored.dialect in source.family.spec.hf_namings and not memory:
            ours = source.dialect
        if stored.format == writer.name:
            ours = source.dialect if isinstance(writer, KeepsNames) else ours
            fused = fused or stored.fused
    return ours, fused


def renamed(
    source: Checkpoint, target: Target, views: TensorTable, ours: Dialect, context: NamingContext, notes: list[str]
) -> tuple[TensorTable, Statements]:
    """The views under the names of ``ours``, and the statements that lead there from Hugging Face names."""
    family, before, same = source.family, source.ops, ours.name == source.dialect.name
    packing = find_packing(quantization(context.config), {n: v.dtype for n, v in views.table.items()})
    if packing is not None and (target.aoa is not None or not (same or ours.packs)):
        raise replace(packing, why=packing.why or "Hugging Face and vLLM have them, others do not").refuse(
            "rearranged by --aoa" if target.aoa is not None else f"brought into the names of {ours.name}"
        )

    def held() -> Shapes:
        return shapes_of(views)

    if target.aoa is not None:
        if context.fused:
            raise UsageError("--aoa already determines what is fused", hint="drop --fuse and --unfuse")
        views = apply_aoa(views, read_aoa(target.aoa), sizes=family.sizes)
        # The statements decide; what they made is looked at for the rules by which it is cut.
        return views, ours.detect(context, held)
    if not same:
        for one in (source.dialect, ours):
            one.check_known(context, held(), str(source.stored.root))

    @cache
    def canonical() -> TensorTable:
        return apply_transforms(views, inverse(before), family, before)

    if not same or target.native_names:
        after = ours.target(context, lambda: shapes_of(canonical()))
    else:
        after = ours.keep(context, before, held)
        usual = ours.target(context, lambda: shapes_of(canonical())) if target.version and not context.fused else after
        if found := _differ(after, usual):  # trainers skip names that they do not know
            notes.append(
                f"{', '.join(found)}: kept as the source has them; the models of {context.version} have others, which"
                " --native-names writes"
            )
    return views if before == after else apply_transforms(canonical(), after, family), after


def _differ(ours: Statements, others: Statements) -> list[str]:
    """In which of names, fused projections and the head's orientation the results of these differ."""

    def traits(ops: Statements) -> dict[str, object]:
        return {
            "names": [op.pairs for op in ops if isinstance(op, Rename)],
            "fused projections": {op.whole for op in ops if isinstance(op, Fuse)},
            "the head's orientation": any("lm_head.weight" in op.patterns for op in ops if isinstance(op, Transpose)),
        }

    a, b = traits(ours), traits(others)
    return [k for k in a if a[k] != b[k]]


@dataclass(slots=True)
class OutputTensors:
    """The tensors of the output under their names."""

    views: TensorTable
    ruled: Sequence[DerivedTensor]
    """The same before --rename; the rules go by these names."""
    names: Mapping[str, str]
    """What each of them is called in the output."""
    statements: Statements
    """What leads from Hugging Face names to them."""
    removed: tuple[int, int]
    """(tensors, bytes) that --remove-keys or --keep-keys left out."""
    uncut: Sequence[str]
    """Patterns of the tensors that the dialect writes whole on every rank."""


def shapes_of(views: TensorTable) -> dict[str, tuple[int, ...]]:
    """The shape of each view, by its name."""
    return {n: v.shape for n, v in views.table.items()}


def choose_version(source: StoredCheckpoint, target: Target, writer: Writer) -> str:
    """The version that --target gives, else the one that wrote the source, else the newest; "" where there are none."""
    capabilities = writer.capabilities
    if target.version in capabilities.namings:
        return ""
    if target.version:
        known = (*capabilities.targets, *capabilities.namings)
        if target.version not in known:
            raise UsageError(
                f"--target `{target.version}` is not known"
                + ("" if known else f" for --to {target.format or source.format}, which has no versions"),
                hint="targets: " + ", ".join(known)
                if known
                else "omit it, or choose a format that has versions: --to unified, hybrid, zcc, flex, meta or dcp",
            )
        return target.version
    if not capabilities.targets:
        return ""
    ours = dialect(writer.dialect)
    own = source.version if source.format == writer.name and source.version else ours.version_called(source.dialect)
    return own if own in capabilities.targets else ours.version_of(source.config, capabilities.targets)
