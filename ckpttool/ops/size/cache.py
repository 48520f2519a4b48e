"""Bytes of what the layers keep of a number of tokens: keys and values, latents, states.

Grouped-query attention keeps two vectors for each key/value head of a rank; a rank has at least one head. Latent
attention (DeepSeek) keeps one latent and one rotary key for all heads, whole on every rank. A layer with a sliding
window needs no more than its window; engines may reserve the whole length for it all the same, which is given besides.
Mamba, short convolutions and linear attention keep a state of one size for each sequence, however long it is.
The family declares what each layer keeps (layout/cache.py).

Sources: vLLM's mla_attention.py (656 bytes a token and layer of ``fp8_ds_mla``: 512 codes, 4 F32 scales, 64 BF16),
configuration and cache classes of transformers (which layers slide, what states are), hf-mem #60 (what engines
reserve).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from ckpttool.core.mesh import Mesh
from ckpttool.errors import CkptError, UsageError
from ckpttool.layout.cache import LayerCache, kept_layers
from ckpttool.ops.size.model import SizedModel

KINDS = ("bf16", "fp8", "fp8_ds_mla")
"""Values of --kv."""
DS_MLA = 656
LATENT, ROTARY = "latent", "rotary"
"""Families' names of the two parts that latent attention keeps of a token."""


@dataclass(frozen=True, slots=True)
class CachedLayer:
    """The cache of one layer on a rank, in bytes."""

    kind: str
    token: int
    """Bytes of a token; 0 of a layer that keeps none."""
    window: int
    """How many tokens it keeps; 0 is all."""
    state: int
    """Bytes of a sequence, however long it is."""

    def used(self, tokens: int) -> int:
        """Bytes of a sequence of so many tokens, beside its state."""
        return self.token * (min(tokens, self.window) if self.window else tokens)


@dataclass(frozen=True, slots=True)
class KvCache:
    """The key-value cache on one rank of each pipeline stage."""

    dtype: str
    """One of ``KINDS``."""
    latent: bool
    tokens: int
    """Tokens of a sequence; 0 when not given."""
    batch: int
    length: int
    """Tokens for which an engine reserves memory; 0 when not given."""
    kept: tuple[tuple[CachedLayer, ...], ...]
    """Layers by pipeline stage."""

    @property
    def stages(self) -> tuple[tuple[int, int], ...]:
        """Per pipeline stage: layers that keep all tokens, layers that keep a window of them."""
        return tuple(
            (sum(bool(n.token) and not n.window for n in stage), sum(bool(n.token and n.window) for n in stage))
            for stage in self.kept
        )

    @property
    def kinds(self) -> Mapping[str, int]:
        """How many layers there are of each kind."""
        return Counter(layer.kind for stage in self.kept for layer in stage)

    @property
    def layers(self) -> int:
        """Number of layers that keep something of each token."""
        return sum(a + b for a, b in self.stages)

    @property
    def sliding(self) -> int:
        """Number of these layers that keep a window."""
        return sum(b for _, b in self.stages)

    @property
    def window(self) -> int:
        """The largest of all layers; 0 when no layer slides."""
        return max((layer.window for stage in self.kept for layer in stage if layer.token), default=0)

    @property
    def per_layer(self) -> int:
        """Bytes of a token in the layer that keeps most of it."""
        return max((layer.token for stage in self.kept for layer in stage), default=0)

    @property
    def even(self) -> bool:
        """Whether all layers that keep something of a token keep as many bytes."""
        return len({layer.token for stage in self.kept for layer in stage} - {0}) < 2

    @property
    def per_token(self) -> int:
        """Bytes of a token in all layers of the model, as long as no window is full."""
        return sum(layer.token for stage in self.kept for layer in stage)

    @property
    def state_layers(self) -> int:
        return sum(bool(layer.state) for stage in self.kept for layer in stage)

    @property
    def per_sequence(self) -> int:
        """Bytes of the states of a sequence in all layers of the model."""
        return sum(layer.state for stage in self.kept for layer in stage)

    def states(self, stage: int) -> int:
        """Bytes of the states of all sequences on a rank of this stage."""
        return sum(layer.state for layer in self.kept[stage]) * self.batch

    def used(self, stage: int) -> int:
        """Bytes on a rank of this stage for the tokens asked for."""
        return sum(layer.used(self.tokens) for layer in self.kept[stage]) * self.batch + self.states(stage)

    def reserved(self, stage: int) -> int:
        """Bytes on a rank of this stage when every layer gets the whole length."""
        length = self.length or self.tokens
        return sum(layer.token for layer in self.kept[stage]) * length * self.batch + self.states(stage)

    def needed(self, stage: int) -> int:
        """Bytes that must fit: the reserve where a length is given, else the use of the tokens."""
        return self.reserved(stage) if self.length else self.used(stage)


def cache_of(model: SizedModel, dtype: str, mesh: Mesh, *, tokens: int, batch: int, length: int) -> KvCache:
    """The cache of a model; 0 tokens or length is "not said".

    Raises UsageError for a dtype that the model cannot have, UnsupportedError when family and config do not say what
    its layers keep, ConflictError and LayoutError for a field that has a value which it cannot have.
    """
    if dtype not in KINDS:
        raise UsageError(f"unknown --kv `{dtype}`", hint="one of " + ", ".join(KINDS))
    if length and length < tokens:
        raise UsageError(f"--max-model-len {length} is less than --tokens {tokens}")
    try:
        kept = kept_layers(model.family, model.config, tp=mesh.tp, fp8=dtype != "bf16")
    except CkptError as e:
        raise type(e)(e.what, where=(str(model.path), *e.where), hint=_with_way_out(e.hint)) from None
    latent = any(LATENT in layer.tokens for layer in kept)
    if dtype == "fp8_ds_mla":
        _check_latents(model, kept)
    layers = [CachedLayer(n.kind, _bytes(n, dtype), n.window if n.tokens else 0, n.state) for n in kept]
    stages = tuple(tuple(layers[i] for i in numbers) for numbers in mesh.stage_layers(len(layers)))
    return KvCache(dtype, latent, tokens, batch, length, stages)


def _with_way_out(hint: str | None) -> str:
    return "drop --kv" if not hint else hint if "--kv" in hint else f"{hint}; or drop --kv"


def _bytes(layer: LayerCache, dtype: str) -> int:
    """Bytes of a token."""
    each = sum(layer.tokens.values()) * (2 if dtype == "bf16" else 1)
    if dtype == "fp8_ds_mla" and layer.tokens:
        each += DS_MLA - layer.tokens[LATENT] - layer.tokens[ROTARY]
    return each * layer.attentions


def _check_latents(model: SizedModel, kept: list[LayerCache]) -> None:
    """Raises UsageError for layers whose tokens vLLM's own format for latents cannot hold."""
    for layer in (n for n in kept if n.tokens):
        if LATENT not in layer.tokens:
            raise UsageError("--kv fp8_ds_mla: the model has no latent attention (MLA)", hint="--kv fp8")
        if (layer.tokens[LATENT], layer.tokens.get(ROTARY)) != (512, 64):
            raise UsageError("--kv fp8_ds_mla is for latents of 512 with rotary keys of 64", where=str(model.path))
