"""Do the tensors of a model fit each other and its config? Names, dtypes and shapes only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple

from ckpttool.errors import LayoutError
from ckpttool.formats.config import EMBEDDINGS, HEADS, LAYERS, quantization, ties_head, whole_number
from ckpttool.layout.assemble import LAYER
from ckpttool.layout.family import find_family
from ckpttool.layout.packed import PackedTensor, find_packing
from ckpttool.layout.scales import block_of, config_block, weight_of

FP8 = ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
_SCALE_ENDS = ("_scale_inv", "weight_scale", ".qscale_weight")
"""Names that are a scale of a weight and nothing else (``.scale`` alone is also a norm's)."""
_STEMS = {"_scale_inv": "", "weight_scale": "weight", ".qscale_weight": ".weight"}
_PACKED = ("", "_packed", "_qdata", "_quantized")
"""What follows the name of a weight that is stored packed."""


class NamedShape(NamedTuple):
    """What is known of a tensor without reading it."""

    dtype: str
    shape: tuple[int, ...]
    files: tuple[int, ...]
    """Indices of the files that hold it."""


_Found = Iterator[tuple[str, str, str, str]]
"""(id, text, where, hint) of each finding."""


VocabAxis = Callable[[str, tuple[int, ...]], int]
"""(name, shape) -> the axis of the vocabulary."""


def tensor_findings(
    tensors: Mapping[str, NamedShape], config: Mapping[str, Any], *, complete: bool, vocab_axis: VocabAxis | None = None
) -> _Found:
    """All findings. ``complete`` says that no tensor is hidden in a file that could not be read.

    ``vocab_axis`` is for models that do not keep their head [vocab, hidden].
    """
    yield from _scales(tensors, config, complete=complete)
    if config:
        yield from _architecture(config)
        yield from _layers(tensors, config, complete=complete)
        yield from _vocabulary(tensors, config, vocab_axis or (lambda _name, _shape: 0))
        yield from _tie(tensors, config, complete=complete)


def scale_pairs(tensors: Mapping[str, NamedShape]) -> dict[str, str]:
    """Scale -> weight, by name."""
    out = {}
    for name in tensors:
        weight = weight_of(name, tensors)
        if weight is None and name.endswith("_scales") and name.removesuffix("_scales") + "_blocks" in tensors:
            weight = name.removesuffix("_scales") + "_blocks"
        if weight is not None:
            out[name] = weight
    return out


def _scales(tensors: Mapping[str, NamedShape], config: Mapping[str, Any], *, complete: bool) -> _Found:
    packing = find_packing(quantization(config), {n: t.dtype for n, t in tensors.items()})
    packed: dict[str, PackedTensor] = {}
    if packing is not None:
        packed = packing.parts(tensors)
        for name, part in packed.items():
            try:
                packing.base(part, name, tensors[name].shape, tensors[part.codes].shape)
            except LayoutError as e:
                yield "scale-shape", e.what, "", e.hint or ""
    pairs = {scale: weight for scale, weight in scale_pairs(tensors).items() if scale not in packed}
    block = config_block(config)
    apart = []
    for scale, weight in pairs.items():
        problem = _grid_problem(scale, tensors[scale].shape, tensors[weight], weight, block)
        if problem:
            yield "scale-shape", problem, "", "scales of another block size, or of another tensor"
        if not set(tensors[scale].files) & set(tensors[weight].files):
            apart.append(scale)
    if apart:
        text = f"{len(apart)} scales are not in the file of their weight, the first is `{apart[0]}`"
        yield "scale-shard", text, "", "allowed, but tools that read one file at a time lose them"
    if not complete:
        return
    for name in tensors:
        end = next((e for e in _SCALE_ENDS if name.endswith(e)), None)
        if end is not None and name not in pairs and name not in packed:
            stem = name.removesuffix(end) + _STEMS[end]
            if not any(stem + p in tensors for p in _PACKED):
                yield "scale-orphan", f"scale `{name}` has no weight: `{stem}` is missing", "", ""
    scaled = set(pairs.values())
    bare = [
        n
        for n, t in tensors.items()
        if t.dtype in FP8 and len(t.shape) > 1 and n not in scaled and n not in pairs and "scale" not in n
    ]
    if not bare:
        return
    if quantization(config) or any(tensors[n].dtype in FP8 for n in scaled):
        for n in bare:
            yield "scale-missing", f"FP8 weight `{n}` has no scale", "", "without it the weight means nothing"
    else:
        text = f"{len(bare)} FP8 tensors have no scales, the first is `{bare[0]}`"
        yield "unscaled", text, "", "right if they were cast and not quantized"


def _grid_problem(
    scale: str, grid: tuple[int, ...], weight: NamedShape, name: str, block: tuple[int, int] | None
) -> str | None:
    """Why a scale grid does not fit its weight, or None."""
    shape = weight.shape
    if name.endswith("_blocks"):
        fits = shape[:-1] == grid
        return None if fits else f"scales `{scale}` {list(grid)} do not fit `{name}` {list(shape)}"
    if block and weight.dtype in FP8 and len(shape) >= 2 and len(grid) == len(shape) and any(n != 1 for n in grid):
        wanted = (*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1]))
        if grid != wanted:
            return (
                f"scales `{scale}` {list(grid)} do not fit `{name}` {list(shape)}:"
                f" blocks of {block[0]}x{block[1]} need {list(wanted)}"
            )
    try:
        block_of(shape, grid, block, name=scale)
    except LayoutError as e:
        return e.what
    return None


def _architecture(config: Mapping[str, Any]) -> _Found:
    if find_family(config) is None:
        named = (
            config.get("architectures") or config.get("model_type") or config.get("_class_name") or "no architecture"
        )
        shown = ", ".join(map(str, named)) if isinstance(named, list) else str(named)
        hint = "it can be read; to cut it for ranks, give rules: --family FILE"
        yield "config-architecture", f"no built-in layout rules are known for {shown}", "", hint


def _layers(tensors: Mapping[str, NamedShape], config: Mapping[str, Any], *, complete: bool) -> _Found:
    wanted = whole_number(config, *LAYERS)
    if wanted is None:
        return
    seen: dict[str, set[int]] = {}
    for name in tensors:
        if m := LAYER.search(name):
            seen.setdefault(name[: m.start(1)], set()).add(int(m[1]))
    if not seen:
        return
    # A model may have other towers with layers of their own; the config speaks of the one that fits it best.
    layers = max(seen.values(), key=lambda s: (fit := sum(n < wanted for n in s), fit - len(s)))
    gone = list(islice((n for n in range(wanted) if n not in layers), 9))  # a config may claim any number
    if gone and complete:
        shown = ", ".join(map(str, gone[:8])) + (" ..." if len(gone) > 8 else "")
        yield "config-layers", f"config.json says {wanted} layers; no tensors of layer {shown}", "", ""
    more = whole_number(config, "num_nextn_predict_layers", "num_mtp_layers") or 0
    beyond = sorted(n for n in layers if n >= wanted + more)
    if beyond:
        shown = ", ".join(map(str, beyond[:8])) + (" ..." if len(beyond) > 8 else "")
        yield "config-extra-layers", f"config.json says {wanted} layers; extra tensors of layer {shown}", "", ""


def _vocabulary(tensors: Mapping[str, NamedShape], config: Mapping[str, Any], vocab_axis: VocabAxis) -> _Found:
    wanted = whole_number(config, "vocab_size")
    if wanted is None:
        return
    for name, t in tensors.items():
        if len(t.shape) == 2 and name.endswith((*EMBEDDINGS, "lm_head.weight")) and "visual" not in name:
            axis = vocab_axis(name, t.shape)
            rows, word = t.shape[axis], "columns" if axis else "rows"
            if rows < wanted:
                yield "config-vocab", f"`{name}` has {rows:,} {word}, vocab_size is {wanted:,}", "", ""
            elif rows > wanted:
                text = f"`{name}` has {rows:,} {word}, vocab_size is {wanted:,}"
                yield "config-vocab-padding", text, "", "padding, or another model's config.json"


def heads(tensors: Mapping[str, NamedShape]) -> tuple[str | None, str | None]:
    """The embedding and the output head, by name."""
    plain = [n for n in tensors if LAYER.search(n) is None]
    embedding = next((n for n in plain if n.endswith(EMBEDDINGS)), None)
    head = next((n for n in plain if n in HEADS or n.endswith(".lm_head.weight")), None)
    return embedding, head


def _tie(tensors: Mapping[str, NamedShape], config: Mapping[str, Any], *, complete: bool) -> _Found:
    tied = ties_head(config)
    embedding, head = heads(tensors)
    if embedding is None:
        return
    names = config.get("architectures")
    causal = isinstance(names, list) and any(str(a).endswith(("CausalLM", "LMHeadModel")) for a in names)
    if tied is True and head is not None:
        text = f"config.json ties `{head}` to `{embedding}`, but both are stored"
        yield "config-tied-copy", text, "", "loaders use one of them"
    elif tied is False and head is None and causal and complete:
        text = "config.json does not tie the embeddings, but the output head (lm_head.weight) is missing"
        yield "config-tie", text, "", "fetch the head, or set tie_word_embeddings to true"
