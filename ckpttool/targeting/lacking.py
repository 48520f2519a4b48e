"""What a model lacks after some of its tensors were left out."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ckpttool.checkpoint import Checkpoint
from ckpttool.core.notes import Note
from ckpttool.formats.config import LAYERS, ties_head, whole_number
from ckpttool.layout.assemble import EXPERT, LAYER
from ckpttool.layout.scales import weight_of

EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


def lacking(source: Checkpoint, gone: Collection[str], left: Collection[str]) -> list[Note]:
    """What a loader may miss of tensors that are left out: of the names that are gone, and those that are left."""
    tied = source.family.tied or ties_head(source.config)
    out = []
    names = dict.fromkeys([*left, *gone])
    prefix = source.dialect.prefix(names)
    embedding, norm = (n.replace("model.", f"{prefix}.", 1) for n in (EMBEDDING, NORM))
    if HEAD in gone and not tied:
        out.append(f"`{HEAD}` is required: the config does not tie it to the embeddings")
    if embedding in gone:
        other = f", and `{HEAD}` is tied to it" if tied else ""
        out.append(f"`{embedding}` is required{other}")
    if norm in gone:
        out.append(f"`{norm}` is required")
    for name in gone:
        weight = weight_of(name, names)
        if weight is not None and weight in left:
            out.append(f"`{weight}` stays without its scales `{name}`")
    for name in left:
        weight = weight_of(name, names)
        if weight is not None and weight in gone:
            out.append(f"the scales `{name}` stay without their weight")
    out += _layer_warnings(source, gone, left)
    if experts := sorted(_experts_of(gone) - _experts_of(left)):
        one = len(experts) == 1
        verb, those = ("is", "it") if one else ("are", "them")
        out.append(f"{_numbered(experts, 'expert')} {verb} gone, and config.json and the routers still count {those}")
    return [Note("lacking", text) for text in out]


def _layer_warnings(source: Checkpoint, gone: Collection[str], left: Collection[str]) -> list[str]:
    """Layers that lose some of their tensors, or all of them."""
    count = whole_number(source.config, *LAYERS)
    lost, kept = _layers_of(gone), _layers_of(left)
    out = []
    if partly := sorted(lost & kept):
        out.append(f"{_numbered(partly)} {'loses some of its' if len(partly) == 1 else 'lose some of their'} tensors")
    if count is not None and (whole_ones := sorted(n for n in lost - kept if n < count)):
        verb = "is" if len(whole_ones) == 1 else "are"
        out.append(f"{_numbered(whole_ones)} {verb} gone, and config.json still counts {count}")
    return out


def _numbered(numbers: Sequence[int], what: str = "layer") -> str:
    shown = ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
    return f"{what} {shown}" if len(numbers) == 1 else f"{what}s {shown}"


def _experts_of(names: Collection[str]) -> set[int]:
    return {int(m[1]) for n in names if (m := EXPERT.search(n))}


def _layers_of(names: Collection[str]) -> set[int]:
    return {int(m[1]) for n in names if (m := LAYER.search(n))}
