"""What a checkpoint is, in one line: family, layers, parameters, precision, and what there is besides a model.

Names, shapes and the config say it; no tensor is read. A parameter is counted once, however many ranks hold it, and a
quantized weight has as many as before it was quantized: scales, zero points and tables are no parameters.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from operator import itemgetter
from pathlib import Path
from typing import Any

from ckpttool.core.catalog import in_order
from ckpttool.core.dtypes import lookup
from ckpttool.core.words import count
from ckpttool.errors import CkptError, plain
from ckpttool.formats.base import StoredCheckpoint
from ckpttool.formats.config import EMBEDDINGS, EXPERTS, HEADS, LAYERS, quantization, ties_head, whole_number
from ckpttool.formats.parts import parts_of
from ckpttool.ops.inspect.listing import TensorListing, TensorRow
from ckpttool.storage.listing import list_source

ADAPTER_CONFIGS = ("adapter_config.json", "lora_config.json")
"""PEFT's and Paddle's, which have the same fields."""
BESIDE = {"master_weights": "master weights", "optimizer": "optimizer state", "ema": "EMA"}
"""Components that come with a model or an adapter, as people call them."""

_ENDS = re.compile(r"(?:For[A-Z]\w*|LMHeadModel|DoubleHeadsModel|Model|Pipe)\Z")
"""What an architecture is for, behind the name of its family."""
_SPELLED = tuple(
    (re.compile(pattern), text)
    for pattern, text in (
        (r"(?<=\d)_(?=\d)", "."),
        (r"_", ""),
        (r"(?<=.)M[oO][eE]\Z", "-MoE"),
        (r"V[Ll](?=-|\Z)", "-VL"),
        (r"Next(?=-|\Z)", "-Next"),
        (r"Deep[sS]eek", "DeepSeek"),
        (r"(?<=DeepSeek)V(\d)(\d?)", lambda m: f"-V{m[1]}" + (f".{m[2]}" if m[2] else "")),
        (r"GptOss", "GPT-OSS"),
        (r"\AGpt", "GPT"),
        (r"GPTNeo[xX]", "GPT-NeoX"),
        (r"\AErnie", "ERNIE-"),
        (r"\AGlm", "GLM"),
        (r"\AOpt\Z", "OPT"),
    )
)
"""How families spell the names that their classes have."""

_PLAIN = frozenset({"BF16", "F16", "F32", "F64"})
_BESIDE_CODES = (
    "_scales", ".scales", "_zero_point", ".qzeros", ".g_idx", "_g_idx", ".weight_shape", ".absmax", ".nested_absmax",
    ".quant_map", ".nested_quant_map", ".SCB", ".weight_format", ".quant_scale",
)  # fmt: skip
"""Ends of the names of tensors that only say how codes are to be read, besides those that ``layout.scales`` knows."""
Table = Mapping[str, tuple[str, tuple[int, ...]]]
"""name -> (dtype, shape)"""

_LAYER = re.compile(r"(.*?(?:\A|\.)(?:layers|layer|blocks|block|h)\.)(\d{1,9})(?=\.)")
_EXPERT = re.compile(r"\.experts\.(\d{1,9})\.")


@dataclass(frozen=True, slots=True)
class Lora:
    """What the config of an adapter says; 0 and "" where it does not."""

    kind: str
    """``LoRA``, ``DoRA``, or what PEFT calls another kind."""
    rank: int = 0
    alpha: float = 0
    base: str = ""
    targets: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Identity:
    """What a checkpoint is."""

    family: str
    """As its makers spell it; "" when nothing says it."""
    layers: int
    """By the config, else by the names; 0 when neither says it."""
    experts: int
    """Of a layer, routed ones; 0 for dense models."""
    parameters: int | None
    """None when no rule says how the ranks' tensors fit together."""
    precision: str
    """Dtype of most parameters, or how they are quantized: ``BF16``, ``FP8, 128x128 blocks``, ``AWQ, 4 bits``."""
    components: tuple[str, ...]
    adapter: Lora | None = None

    @property
    def headline(self) -> str:
        """``Qwen3-MoE, 12 layers, 8 experts, 1.02 B parameters, BF16, with optimizer state``."""
        lora = self.adapter
        parts = [self.family or "Model of no known family"]
        if lora is not None:
            parts = [f"{lora.kind} adapter", *([f"rank {lora.rank}"] if lora.rank else [])]
            parts += [f"alpha {lora.alpha:g}"] if lora.alpha else []
            parts += [f"for {lora.base or self.family}"] if lora.base or self.family else []
            parts += ["targets " + ", ".join(lora.targets)] if lora.targets else []
        elif "model" not in self.components and self.components:
            parts.append(self.components[0])
        if self.layers and lora is None:
            parts.append(count(self.layers, "layer"))
        if self.experts and lora is None:
            parts.append(count(self.experts, "expert"))
        if self.parameters is not None:
            parts.append(f"{large(self.parameters)} parameter{'s' if self.parameters != 1 else ''}")
        parts += [self.precision] if self.precision else []
        beside = [BESIDE[c] for c in self.components[1:] if c in BESIDE]
        parts += (
            ["with " + " and ".join([", ".join(beside[:-1]), beside[-1]] if len(beside) > 1 else beside)]
            if beside
            else []
        )
        return plain(", ".join(parts))


def large(n: int) -> str:
    """``1.02 B``; numbers below a million as they are."""
    for unit, name in ((10**12, "T"), (10**9, "B"), (10**6, "M")):
        if n >= unit:
            return f"{n / unit:.2f} {name}"
    return f"{n:,}"


def identify(listing: TensorListing) -> Identity:
    """What a checkpoint is, whatever was chosen of it."""
    stored, rows = listing.stored, listing.every
    config = stored.config
    components = in_order({r.component for r in rows})
    main = next((c for c in ("model", "adapter", *components) if c in components), "")
    mine = rows if len(components) == 1 else [r for r in rows if r[7] == main]
    adapter = _lora(stored) if "model" not in components else None
    elements = parameters(mine, config)
    parts = parts_of(stored)
    return Identity(
        parts.label if parts is not None else family_name(config, Path(listing.options.family).stem or stored.family),
        whole_number(config, *LAYERS) or (_layers(mine) if parts is None else 0),
        (whole_number(config, *EXPERTS) or 0) if config else _experts(mine),
        sum(elements.values()) if listing.logical else None,
        _precision(elements, mine, config),
        tuple(components),
        adapter,
    )


def family_name(config: Mapping[str, Any], otherwise: str = "") -> str:
    """``Qwen3-MoE`` for Qwen3MoeForCausalLM; of a config that names no architecture, by its model type."""
    named = config.get("architectures")
    first = named[0] if isinstance(named, list) and named and isinstance(named[0], str) else ""
    first = first or (said if isinstance(said := config.get("_class_name"), str) else "")
    name = _ENDS.sub("", first)
    if not name:
        kind = config.get("model_type")
        kind = kind if isinstance(kind, str) and kind else otherwise
        name = re.sub(r"(?:\A|_)([a-z])", lambda m: m[1].upper(), kind)
    for pattern, text in _SPELLED:
        name = pattern.sub(text, name)
    return name


# -- parameters


def parameters(rows: Sequence[TensorRow], config: Mapping[str, Any]) -> Counter[str]:
    """Parameters by dtype: a tied head once, codes as the weights that they stand for."""
    counted: Counter[tuple[str, tuple[int, ...]]] = Counter(map(itemgetter(1, 2), rows))
    out: Counter[str] = Counter()
    if all(dtype in _PLAIN for dtype, _ in counted):
        for (dtype, shape), n in counted.items():
            out[dtype] += n * prod(shape)
    else:
        table = {r.name: (r.dtype, r.shape) for r in rows}
        for name, (dtype, shape) in table.items():
            if each := _each(name, dtype, table, config):
                out[dtype] += each * prod(shape)
    if ties_head(config):
        heads = [r for r in rows if r.name in HEADS or r.name.endswith(".lm_head.weight")]
        for head in heads if any(r.name.endswith(EMBEDDINGS) for r in rows) else ():
            out[head.dtype] -= prod(head.shape)
    return out


def _each(name: str, dtype: str, table: Table, config: Mapping[str, Any]) -> int:
    """Parameters that an element of a tensor stands for: several where codes are packed, none where it is no weight."""
    from ckpttool.layout.scales import is_sidecar, weight_of

    if is_sidecar(name) or weight_of(name, table) or name.endswith(_BESIDE_CODES) or ".quant_state." in name:
        return 0
    entry = lookup(dtype)
    if entry.kind == "float" or entry.bits < 8:
        return 1
    if name.endswith((".qweight", "_packed")):
        return max(1, entry.bits // (_bits(config) or 4))
    if name.endswith("_blocks") or f"{name}.absmax" in table:
        return entry.bits // 4
    if dtype in ("I8", "U8"):
        return 2 if _holds_pairs(name, table) else int(name.endswith((".weight", ".quant_weight")))
    return 0


def _holds_pairs(name: str, table: Table) -> bool:
    """Whether the scales of a tensor of bytes say that each byte is two 4-bit codes."""
    from ckpttool.quant.coded import holds_pairs

    scales = (f"{name}_scale", f"{name}_scale_inv", f"{name.removesuffix('.weight')}.scale")
    return any(s in table and holds_pairs(*table[name], *table[s]) for s in scales)


def _weights(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What compressed-tensors says of weights."""
    groups = quantization(config).get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        if isinstance(group, dict) and isinstance(group.get("weights"), dict):
            found: Mapping[str, Any] = group["weights"]
            return found
    return {}


def _bits(config: Mapping[str, Any]) -> int:
    """Bits of a code by the config, 0 when it does not say."""
    for value in (quantization(config).get("bits"), _weights(config).get("num_bits")):
        if isinstance(value, int) and value in (1, 2, 3, 4, 8):
            return value
    return 0


# -- precision


_METHODS = {"awq": "AWQ", "gptq": "GPTQ", "mxfp4": "MXFP4", "hqq": "HQQ", "aqlm": "AQLM", "quark": "Quark"}
_NAMES = {"F8_E4M3": "FP8", "F8_E5M2": "FP8 (E5M2)", "F8_E4M3FNUZ": "FP8", "F8_E5M2FNUZ": "FP8 (E5M2)"}


def _precision(elements: Counter[str], rows: Sequence[TensorRow], config: Mapping[str, Any]) -> str:
    """How most parameters are stored."""
    most = max(elements, key=lambda d: (elements[d], d), default="")
    said = quantization(config)
    method = str(said.get("quant_method") or "")
    if most in _PLAIN or not most:
        return most
    group = said.get("group_size") or _weights(config).get("group_size")
    groups = f", groups of {group}" if isinstance(group, int) and group > 0 else ""
    if method == "bitsandbytes":
        four = str(said.get("bnb_4bit_quant_type") or "fp4").upper()
        return f"bitsandbytes {four if said.get('load_in_4bit') else '8-bit'}"
    if most in _NAMES:
        from ckpttool.layout.scales import config_block

        block = config_block(config)
        scaled = any(r.name.endswith(("_scale_inv", "_scale", ".scale", "_scales", ".qscale_weight")) for r in rows)
        sides = f", {block[0]}x{block[1]} blocks" if block and scaled else "" if scaled else ", no scales"
        return _NAMES[most] + sides
    if method == "modelopt" or any(r.name.endswith(("_scale_2", "_global_scale")) for r in rows):
        return str(said.get("quant_algo") or "NVFP4")
    if method == "mxfp4" or any(r.name.endswith("_blocks") for r in rows):
        return "MXFP4"
    if lookup(most).kind == "float":
        return most
    bits = _bits(config)
    title = _METHODS.get(method, method)
    return f"{title}, {bits or 4} bits{groups}" if title else most


# -- what names say


def _layers(rows: Iterable[TensorRow]) -> int:
    """Layers of the tower that has most."""
    towers: dict[str, set[str]] = {}
    for r in rows:
        if m := _LAYER.match(r.parameter):
            towers.setdefault(m[1], set()).add(m[2])
    return max(map(len, towers.values()), default=0)


def _experts(rows: Iterable[TensorRow]) -> int:
    return len({m[1] for r in rows if (m := _EXPERT.search(r.parameter))})


# -- adapters


def _lora(stored: StoredCheckpoint) -> Lora | None:
    """What the config of an adapter says, if there is one."""
    listing = list_source(stored.root)
    name = next((n for n in ADAPTER_CONFIGS if n in listing.names), "")
    if not name:
        return None
    try:
        config = listing.json(name)
    except CkptError:
        return Lora("LoRA")
    kind = str(config.get("peft_type") or "LORA")
    kind = "DoRA" if config.get("use_dora") else "LoRA" if kind.upper() == "LORA" else kind
    rank, alpha, base, targets = (
        config.get(n) for n in ("r", "lora_alpha", "base_model_name_or_path", "target_modules")
    )
    listed = [targets] if isinstance(targets, str) else targets if isinstance(targets, list) else []
    return Lora(
        kind,
        rank if type(rank) is int else 0,
        alpha if isinstance(alpha, int | float) and not isinstance(alpha, bool) else 0,
        base if isinstance(base, str) else "",
        tuple(sorted({str(t).removeprefix(".*").removesuffix(".*").strip(".") for t in listed})),
    )
