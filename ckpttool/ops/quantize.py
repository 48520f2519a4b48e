"""``ckpttool quantize``: weights to FP8 (or MXFP4, NVFP4) and back, as a Hugging Face checkpoint.

What it writes has the bytes that ``size`` foretells with the same options: both ask ``ckpttool.quant``.
"""

from __future__ import annotations

from ckpttool.checkpoint import OpenOptions, open_checkpoint
from ckpttool.core.files import AnyPlace
from ckpttool.targeting.build import Prepared
from ckpttool.targeting.parts import plan_parts
from ckpttool.targeting.recode import Recoding
from ckpttool.targeting.select import Selection
from ckpttool.targeting.target import Target


def prepare(
    src: AnyPlace,
    options: OpenOptions,
    recoding: Recoding,
    selection: Selection,
    *,
    max_shard_size: int | None = None,
) -> Prepared:
    """Plan a cast. Raises a CkptError subclass; nothing is written."""
    target = Target(format="hf", tp=1, pp=1, ep=1, etp=1, max_shard_size=max_shard_size)
    return plan_parts(open_checkpoint(src, options), target, selection, recoding)
