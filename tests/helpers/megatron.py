"""Saves of Megatron Core's dist_checkpointing, made without it, with the state of its distributed optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from ckpttool.containers.pickle_write import Instance
from ckpttool.core.geometry import Box
from ckpttool.formats.torch.dcp_metadata import DcpChunk, DcpTensor, Span, write_metadata
from tests.helpers.torch_save import torch_save

Array = np.ndarray[Any, np.dtype[Any]]
_DTYPES = {"<f4": "F32", "<f2": "F16"}

LAYERS = 3
ARGS = {
    "num_layers": LAYERS,
    "hidden_size": 8,
    "ffn_hidden_size": 12,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "group_query_attention": True,
    "kv_channels": 2,
    "swiglu": True,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "rotary_base": 10000,
    "norm_epsilon": 1e-5,
    "max_position_embeddings": 64,
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
    "vocab_size": 13,
    "padded_vocab_size": 16,
    "fp16": True,
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "transformer_impl": "local",
}
"""Of a Llama."""
LAYER: tuple[tuple[str, tuple[int, ...], int | None], ...] = (
    ("self_attention.linear_qkv.layer_norm_weight", (8,), None),
    ("self_attention.linear_proj.weight", (8, 8), 1),
    ("self_attention.linear_qkv.weight", (16, 8), 0),
    ("mlp.linear_fc1.layer_norm_weight", (8,), None),
    ("mlp.linear_fc1.weight", (24, 8), 0),
    ("mlp.linear_fc2.weight", (8, 12), 1),
)
"""(name in torch_dist, shape, axis that tensor parallelism cuts), in the order of the local spec."""
TE_ORDER = (1, 0, 2, 3, 4, 5)
ENDS = ("embedding.word_embeddings.weight", "decoder.final_layernorm.weight", "output_layer.weight")


def model(dtype: str = "<f2") -> dict[str, Array]:
    """The parameters of that Llama by key, layers stacked; no two elements near each other are equal."""
    shapes: dict[str, tuple[int, ...]] = {ENDS[0]: (16, 8)}
    shapes |= {f"decoder.layers.{n}": (LAYERS, *shape) for n, shape, _ in LAYER}
    shapes |= {ENDS[1]: (8,), ENDS[2]: (16, 8)}
    out, at = {}, 1
    for key, shape in shapes.items():
        size = int(np.prod(shape))
        out[key] = ((np.arange(at, at + size) % 1999) / 8).astype(dtype).reshape(shape)
        at += size
    return out


def axis_of(key: str) -> int | None:
    """The axis of a layer's tensor that is cut."""
    if key in ENDS:
        return 0 if "layernorm" not in key else None
    return next(axis for name, _, axis in LAYER if key.endswith(name))


def parts(key: str, shape: tuple[int, ...], tp: int) -> list[list[tuple[slice, ...]]]:
    """What each tensor-parallel rank has of one layer's tensor: of the gate and of what it gates one box each."""
    axis = axis_of(key)
    if axis is None:
        return [[tuple(slice(0, n) for n in shape)] for _ in range(tp)]
    halves = 2 if "linear_fc1" in key else 1
    each = shape[axis] // (tp * halves)
    out = []
    for r in range(tp):
        starts = [(h * tp + r) * each for h in range(halves)]
        out.append(
            [tuple(slice(s, s + each) if a == axis else slice(0, n) for a, n in enumerate(shape)) for s in starts]
        )
    return out


def layers_of(key: str, array: Array) -> list[tuple[tuple[int, ...], Array]]:
    """(index along the axes in front, tensor) of each layer."""
    return [((), array)] if key in ENDS else [((i,), array[i]) for i in range(len(array))]


class Save:
    """What a save is to hold."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True)
        self.described: dict[str, DcpTensor] = {}
        self.objects: dict[str, Span] = {}
        self.data: list[bytes] = []
        self.size = 0

    def put_object(self, value: Any) -> Span:
        """Where the bytes of any object are."""
        return self._put(value)

    def _put(self, value: Any) -> Span:
        data = torch_save(value, self.path / "chunk").read_bytes()
        (self.path / "chunk").unlink()
        self.data.append(data)
        self.size += len(data)
        return 0, self.size - len(data), len(data)

    def tensor(self, fqn: str, shape: tuple[int, ...], chunks: Iterable[tuple[tuple[int, ...], Array]]) -> None:
        """A tensor of (offset, elements)."""
        held, dtype = [], ""
        for offset, array in chunks:
            stop = tuple(a + n for a, n in zip(offset, array.shape, strict=True))
            held.append(DcpChunk(Box(offset, stop), self._put(np.ascontiguousarray(array))))
            dtype = _DTYPES[array.dtype.str]
        self.described[fqn] = DcpTensor(dtype, shape, held)

    def object(self, fqn: str, value: Any) -> None:
        self.objects[fqn] = self._put([value])

    def sharded(self, prefix: str, arrays: Mapping[str, Array], tp: int) -> None:
        """Tensors as Megatron cuts those of a model."""
        for key, array in arrays.items():
            chunks = []
            for front, one in layers_of(key, array):
                seen = set()
                for own in parts(key, one.shape, tp):
                    for box in own:
                        at = (*front, *(s.start for s in box))
                        if at not in seen:
                            seen.add(at)
                            chunks.append((at, one[box].reshape((1,) * len(front) + one[box].shape)))
            self.tensor(prefix + key, array.shape, chunks)

    def write(self, common: Mapping[str, Any] = {}, args: Mapping[str, Any] = ARGS) -> Path:
        (self.path / "__0_0.distcp").write_bytes(b"".join(self.data))
        (self.path / ".metadata").write_bytes(write_metadata(self.described, self.objects, {}, ["__0_0.distcp"]))
        torch_save({"args": namespace(args), **common}, self.path / "common.pt")
        (self.path / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
        return self.path


def namespace(args: Mapping[str, Any]) -> Instance:
    """Arguments as a trainer keeps them."""
    return Instance("argparse", "Namespace", dict(args))


def number(save: Save, value: float) -> DcpTensor:
    """A tensor without axes."""
    return DcpTensor("F32", (), [DcpChunk(Box((), ()), save.put_object(np.array(value, "<f4")))])


def states(arrays: Mapping[str, Array]) -> dict[str, dict[str, Array]]:
    """A distributed optimizer's state of parameters: float32, near to them and different from each other."""
    scale = {"param": 1.0, "exp_avg": -0.5, "exp_avg_sq": 0.25}
    return {s: {k: a.astype("<f4") * f for k, a in arrays.items()} for s, f in scale.items()}


def flattened(save: Save, prefix: str, arrays: Mapping[str, Array], tp: int, dp: int) -> None:
    """States in runs of what each rank had (fully_sharded_model_space)."""
    for key, array in arrays.items():
        chunks: dict[tuple[int, ...], Array] = {}
        grid: tuple[int, ...] = ()
        run = 0
        for front, one in layers_of(key, array):
            for own in parts(key, one.shape, tp):
                for box in own:
                    flat, local = one[box].reshape(-1), one[box].shape
                    grid = (*array.shape[: len(front)], *(n // m for n, m in zip(one.shape, local, strict=True)))
                    at = (*front, *(s.start // n for s, n in zip(box, local, strict=True)))
                    run = len(flat)
                    cuts = [len(flat) * r // dp for r in range(dp + 1)]
                    for a, z in pairwise(cuts):
                        chunks[*at, a] = flat[a:z].reshape((1,) * len(grid) + (-1,))
        save.tensor(prefix + key, (*grid, run), chunks.items())


def bucket(parameters: Sequence[Array], ranks: int) -> tuple[int, list[tuple[tuple[int, ...], Array]]]:
    """(elements, chunks) of a flat buffer with parameters in the order of ``named_parameters()``."""
    places, at = [], 0
    for p in reversed(parameters):
        at += -at % 64
        places.append((at, p.reshape(-1)))
        at += p.size
    each = (at + -at % (128 * ranks)) // ranks
    flat = np.full(at, 7, "<f4")
    for a, p in places:
        flat[a : a + p.size] = p
    cuts = {0, at, *(a for a, _ in places), *(a + p.size for a, p in places), *range(0, at, each)}
    bounds = sorted(cuts)
    return at, [((a,), flat[a:z]) for a, z in pairwise(bounds)]
