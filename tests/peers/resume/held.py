"""What a run holds, whatever holds it: digests under Hugging Face's published names. Only numpy.

``NAME`` is the parameter in the precision that the optimizer works on: its master, or itself where the model is
float32. ``weights/NAME`` is what the model computes with, where that is something else. ``exp_avg/NAME``,
``exp_avg_sq/NAME`` and ``step/NAME`` are the state of AdamW.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

Bits = np.ndarray[Any, np.dtype[Any]]
"""float32, or the bits of bfloat16 as uint16."""
Digests = dict[str, str]

MOMENTS = ("exp_avg", "exp_avg_sq")


class Ran(NamedTuple):
    """What came of a job."""

    begun: Digests
    """Held before the first step, after loading where something was loaded."""
    saved: Digests
    """Held when it was saved; empty where nothing was."""
    losses: list[float]
    """Of each step: the mean cross entropy of all tokens of all ranks."""
    counters: dict[str, Any]
    """What the trainer says of itself before the first step."""


def digest(array: Bits) -> str:
    data = np.ascontiguousarray(array)
    return f"{data.dtype.str}{list(data.shape)}:{hashlib.sha256(data.tobytes()).hexdigest()[:32]}"


def digests(arrays: Mapping[str, Bits]) -> Digests:
    return {name: digest(array) for name, array in arrays.items()}


def rounded(array: Bits) -> Bits:
    """float32 -> the bits of the nearest bfloat16, ties to even."""
    bits = np.ascontiguousarray(array).view("<u4").astype("<u8")
    out: Bits = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
    return out


def differences(sent: Mapping[str, str], got: Mapping[str, str]) -> list[str]:
    """Names of what the receiver holds otherwise, or not at all, or has made up.

    What the model computes with is compared where both have it apart from the masters. Where only the receiver has,
    ``unrounded`` says whether it is what its masters give.
    """
    alone = {n for n in sent.keys() ^ got.keys() if n.startswith("weights/")}
    return sorted(n for n in (sent.keys() | got.keys()) - alone if sent.get(n) != got.get(n))


def unrounded(arrays: Mapping[str, Bits]) -> list[str]:
    """Names of weights that are not their masters, rounded."""
    pairs = ((n, v, arrays[n.removeprefix("weights/")]) for n, v in arrays.items() if n.startswith("weights/"))
    return [n for n, weights, master in pairs if not np.array_equal(weights, rounded(master))]


def published(name: str, array: Bits) -> dict[str, Bits]:
    """A parameter of transformers' modules as it is published: one tensor for each expert, gate apart from up."""
    at, _, kind = name.rpartition(".")
    if not at.endswith(".mlp.experts") or array.ndim < 3:
        return {name: array}
    out: dict[str, Bits] = {}
    for e, one in enumerate(array):
        parts: Sequence[Bits] = np.split(one, 2) if kind == "gate_up_proj" else [one]
        words = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
        out |= {f"{at}.{e}.{word}.weight": part for word, part in zip(words, parts, strict=True)}
    return out


def named(
    name: str, master: Bits, weights: Bits | None, moments: Mapping[str, Bits], step: float, names: Any = published
) -> dict[str, Bits]:
    """All that is held of one parameter. ``names`` makes published tensors of it, and of its moments alike."""
    apart = {} if weights is None else {"weights": weights}
    out: dict[str, Bits] = dict(names(name, master))
    steps = {f"step/{n}": np.array(step, "<f4") for n in out} if moments else {}
    for kind, array in {**apart, **moments}.items():
        out |= {f"{kind}/{n}": v for n, v in names(name, array).items()}
    return out | steps
