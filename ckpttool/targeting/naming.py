"""The names of the output's tensors: naming, fusions and the version of the software that reads them."""

from __future__ import annotations

from dataclasses import replace

from ckpttool.aoa import apply_aoa, read_aoa
from ckpttool.checkpoint import Checkpoint, naming_transforms
from ckpttool.errors import LayoutError, UsageError
from ckpttool.formats.base import Capabilities, Writer
from ckpttool.formats.config import quantization
from ckpttool.formats.paddle.config import TRANSPOSED, module_of, software
from ckpttool.layout import paddle
from ckpttool.layout.family import Transform, inverse
from ckpttool.layout.packed import NAMINGS, find_packing
from ckpttool.mesh import Mesh
from ckpttool.relate import TensorTable, apply_transforms
from ckpttool.targeting.target import Target


def choose_naming(source: Checkpoint, target: Target, writer: Writer) -> tuple[str, str]:
    """The naming of the output, and which fusions are added to it: "fuse", "unfuse" or ""."""
    stored = source.stored
    fused = "fuse" if target.fuse else "unfuse" if target.unfuse else ""
    naming = writer.dialect
    if not naming:
        return stored.naming, fused or stored.fused
    if naming == "hf":
        # What came from Hugging Face in one of its forms goes back in that form.
        if stored.naming in source.family.spec.hf_namings:
            naming = stored.naming
        if stored.format == writer.name:
            fused = fused or stored.fused
    return naming, fused


def renamed(
    source: Checkpoint,
    target: Target,
    views: TensorTable,
    naming: str,
    fused: str,
    mesh: Mesh,
    version: str,
    notes: list[str],
) -> tuple[TensorTable, tuple[Transform, ...]]:
    """The views under the names of the target, and the statements that lead there from Hugging Face names."""
    family, before = source.family, source.ops
    packing = find_packing(quantization(source.config), {n: v.dtype for n, v in views.table.items()})
    if packing is not None and (target.aoa is not None or (naming != source.stored.naming and naming not in NAMINGS)):
        raise replace(packing, why=packing.why or "Hugging Face and vLLM have them, others do not").refuse(
            "rearranged by --aoa" if target.aoa is not None else f"brought into the names of {naming}"
        )
    if target.aoa is not None:
        if fused:
            raise UsageError("--aoa already determines what is fused", hint="drop --fuse and --unfuse")
        views = apply_aoa(views, read_aoa(target.aoa), sizes=family.sizes)
        # The statements decide; what they made is looked at for the rules by which it is cut.
        if naming == "paddle":
            return views, paddle.source_transforms(family, shapes_of(views), source.config)
        return views, naming_transforms(family, naming, "", mesh)
    _refuse_unknown(source, views, naming)
    canonical = None
    if naming != "paddle":
        after = naming_transforms(family, naming, fused, mesh)
    elif source.stored.naming == "paddle" and not target.native_names:
        after = paddle.with_fusions(before, fused, family, shapes_of(views))
        if target.version and not fused:
            _note_other_names(source, views, after, version, notes)
    else:
        canonical = apply_transforms(views, inverse(before), family, before)
        after = paddle.target_transforms(family, shapes_of(canonical), source.config, version, fused)
    if before != after:
        canonical = canonical or apply_transforms(views, inverse(before), family, before)
        views = apply_transforms(canonical, after, family)
    return views, after


def _refuse_unknown(source: Checkpoint, views: TensorTable, naming: str) -> None:
    """Paddle has a decoder's linear weights the other way round; without its family nothing says which these are."""
    if source.family.name != "none" or (naming == "paddle") == (source.stored.naming == "paddle"):
        return
    odd = next((n for n, v in views.table.items() if len(v.shape) == 2 and module_of(n) in TRANSPOSED), None)
    if odd is not None:
        raise LayoutError(
            f"`{odd}` and its like are [in, out] in Paddle's formats and [out, in] in others, and which of these"
            " tensors that concerns is not known: there is no family",
            where=str(source.path / "config.json"),
            hint="put the model's config.json beside the checkpoint, or pass --family NAME",
        )


def _note_other_names(
    source: Checkpoint, views: TensorTable, after: tuple[Transform, ...], version: str, notes: list[str]
) -> None:
    """Say so when the models of --target know the tensors otherwise; trainers skip names that they do not know."""
    canonical = apply_transforms(views, inverse(source.ops), source.family, source.ops)
    usual = paddle.target_transforms(source.family, shapes_of(canonical), source.config, version, "")
    if found := paddle.differ(after, usual):
        notes.append(
            f"{', '.join(found)}: kept as the source has them; the models of {version} have others, which"
            " --native-names writes"
        )


def shapes_of(views: TensorTable) -> dict[str, tuple[int, ...]]:
    """The shape of each view, by its name."""
    return {n: v.shape for n, v in views.table.items()}


def choose_version(source: Checkpoint, target: Target, capabilities: Capabilities) -> str:
    """What --target says; else the version that wrote the source, else the newest. "" where there are no versions."""
    if target.version:
        if target.version not in capabilities.targets:
            raise UsageError(
                f"--target `{target.version}` is not known"
                + (
                    "" if capabilities.targets else f" for --to {target.format or source.format}, which has no versions"
                ),
                hint="targets: " + ", ".join(capabilities.targets)
                if capabilities.targets
                else "omit it, or choose one of Paddle's formats: --to unified, hybrid, zcc or flex",
            )
        return target.version
    if not capabilities.targets:
        return ""
    wrote = software(source.config)
    if wrote.name == "paddlenlp":
        return next(t for t in capabilities.targets if t.startswith("paddlenlp"))
    if wrote.name == "paddleformers" and wrote.version < (1,):
        return next(t for t in capabilities.targets if t.startswith("paddleformers-0"))
    return capabilities.targets[0]
