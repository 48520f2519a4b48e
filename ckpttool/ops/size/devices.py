"""GPUs by name, with the memory that ``nvidia-smi`` and ``rocm-smi`` report as their total.

A data sheet's "80 GB" is 81,559 MiB (85.5 GB) on an H100 and 81,920 MiB (85.9 GB) on an A100. CUDA itself needs 0.5 to
2 % of it: PyTorch sees 79.15 of the 79.65 GiB of an H100.
"""

from __future__ import annotations

import difflib
import re
from typing import NamedTuple

from ckpttool.core.words import parse_size
from ckpttool.errors import UsageError

_MIB = 1 << 20


class Device(NamedTuple):
    """One kind of GPU."""

    label: str
    memory: int
    """Bytes."""


_TABLE = {
    "t4": ("T4", 15_360),
    "v100-16gb": ("V100-16GB", 16_384),
    "v100-32gb": ("V100-32GB", 32_768),
    "a10": ("A10", 23_028),
    "a10g": ("A10G", 23_028),
    "l4": ("L4", 23_034),
    "rtx3090": ("RTX 3090", 24_576),
    "rtx4090": ("RTX 4090", 24_564),
    "rtx5090": ("RTX 5090", 32_607),
    "a100-40gb": ("A100-40GB", 40_960),
    "l40s": ("L40S", 46_068),
    "a6000": ("RTX A6000", 49_140),
    "rtx6000ada": ("RTX 6000 Ada", 49_140),
    "rtxpro6000": ("RTX PRO 6000", 97_887),
    "a100": ("A100", 81_920),
    "h100": ("H100", 81_559),
    "h100-nvl": ("H100 NVL", 95_830),
    "h20": ("H20", 97_871),
    "h200": ("H200", 143_771),
    "b200": ("B200", 183_359),
    "gb200": ("GB200", 189_471),
    "mi250x": ("MI250X (one of two dies)", 65_520),
    "mi300x": ("MI300X", 196_592),
    "mi325x": ("MI325X", 262_128),
    "mi355x": ("MI355X", 294_896),
}
GPUS = {name: Device(label, mib * _MIB) for name, (label, mib) in _TABLE.items()}
"""Devices by the name that --gpu takes."""
COMMON = tuple(GPUS[name] for name in ("l4", "l40s", "a100", "h100", "h200", "b200", "mi300x"))
"""Devices to suggest, those of one memory class in a row."""


def device(text: str) -> Device:
    """The device that --gpu describes: a name (``h100``) or its memory (``80GB``, ``80GiB``, a number of bytes).

    Raises UsageError for an unknown name, and for a number so small that it was not meant in bytes.
    """
    if re.fullmatch(r"\s*[\d.]+\s*[kmgt]i?b?\s*|\s*\d{6,}\s*", text.lower()):
        return Device("", parse_size(text, "--gpu"))
    if text.strip().isdecimal() and len(text.strip()) < 4:
        raise UsageError(f"--gpu {text} has no unit", hint=f"write {text}GB or {text}GiB")
    return gpu(text)


def gpu(name: str) -> Device:
    """The device of this name in any spelling (``H100``, ``A100-80GB``). Raises UsageError for an unknown one."""
    key = "".join(c for c in name.lower().removeprefix("nvidia").removeprefix("amd") if c.isalnum())
    known = {n.replace("-", ""): n for n in GPUS} | {"a10080gb": "a100", "h10080gb": "h100", "v100": "v100-16gb"}
    if key not in known:
        like = [n for n in known if key and n.endswith(key)] or difflib.get_close_matches(key, known, n=1)
        meant = f"did you mean {known[like[0]]}; " if like else ""
        raise UsageError(
            f"--gpu `{name}` is not a known GPU",
            hint=f"{meant}one of {', '.join(GPUS)}; or its memory, such as 80GB",
        )
    return GPUS[known[key]]
