"""What the options with a fixed set of values take: for their help, and for completion in a shell.

The names are written out here, because the tables that they come from take numpy, and a shell waits for its completion.
tests/cli/test_completion.py holds them to those tables.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

FORMATS = (
    "hf",
    "ranks",
    "deepseek",
    "vllm",
    "trtllm",
    "unified",
    "hybrid",
    "zcc",
    "flex",
    "program",
    "torch-bin",
    "meta",
    "dcp",
    "universal",
    "megatron-dist",
    "megatron",
)
"""What --to takes."""
READ_ONLY = ("pdparams", "fsdp", "bytecheckpoint", "deepspeed", "gguf", "diffusers", "sentence-transformers")
"""What --from takes besides."""
COMPONENTS = ("model", "adapter", "master_weights", "optimizer", "ema")
TARGETS = (
    "paddlenlp-3.0",
    "paddleformers-0.4",
    "paddleformers-1.2",
    "llama2",
    "llama3",
    "transformers",
    "torchtitan",
    "torchtitan-0.2",
    "transformer_engine",
    "local",
)
CASTS = ("f64", "f32", "f16", "bf16")
DTYPES = (
    *("bool", "u8", "u16", "u32", "u64", "i8", "i16", "i32", "i64", "f16", "bf16", "f32", "f64", "c64"),
    *("f8_e4m3", "f8_e5m2", "f8_e8m0", "f8_e4m3fnuz", "f8_e5m2fnuz", "f4", "f6_e2m3", "f6_e3m2"),
)
"""Dtypes of stored tensors."""
PRECISIONS = ("bf16", "f16", "f32")
RECIPES = ("tensor", "channel", "block", "mxfp8", "nvfp4", "mxfp4")
SIZED = ("as-is", "bf16", *RECIPES)
SCALES = ("f32", "bf16", "e8m0")
CODES = ("e4m3", "e5m2")
QUANT_METHODS = ("fp8", "compressed-tensors", "modelopt", "fbgemm_fp8")
EDGES = ("ceil", "skip", "error")
PRESETS = ("hf-default", "deepseek", "experts-only", "none")
CACHES = ("bf16", "fp8", "fp8_ds_mla")
GROUPINGS = ("class", "dtype", "module", "tensor")
UNITS = ("GB", "GiB", "B")
ORDERS = ("name", "size", "offset", "file")
FINDINGS = ("sarif", "junit", "gitlab", "github")
"""What --findings writes."""
GPUS = (
    *("t4", "v100-16gb", "v100-32gb", "a10", "a10g", "l4", "rtx3090", "rtx4090", "rtx5090", "a100-40gb", "l40s"),
    *("a6000", "rtx6000ada", "rtxpro6000", "a100", "h100", "h100-nvl", "h20", "h200", "b200", "gb200"),
    *("mi250x", "mi300x", "mi325x", "mi355x"),
)
ENGINES = ("ray",)
"""What --on takes; an address may follow behind `=`."""
METHODS = (
    *("linear", "passthrough", "nearswap", "average", "ema"),
    *("slerp", "nuslerp", "multislerp", "karcher", "model_stock"),
    *("task_arithmetic", "ties", "dare_linear", "dare_ties", "della", "della_linear", "breadcrumbs"),
    *("breadcrumbs_ties", "sce", "arcee_fusion", "ram", "ramplus_tl"),
    *("paddle_linear", "paddle_ties", "paddle_dare_linear", "paddle_dare_ties", "paddle_della_linear"),
    *("paddle_della", "paddle_slerp"),
)
"""Dtypes of merged tensors."""


def completes(*values: str) -> Callable[[str], list[str]]:
    """A completion that offers those of ``values`` that begin like the word at the cursor."""

    def complete(incomplete: str) -> list[str]:
        return [v for v in values if v.startswith(incomplete)]

    return complete


def families(incomplete: str) -> list[str]:
    """The built-in families: the names of their files, with the folder of those that are cut as transformers does."""
    folder = Path(__file__).parents[1] / "layout" / "families"
    return completes(*sorted(f.relative_to(folder).with_suffix("").as_posix() for f in folder.rglob("*.yaml")))(
        incomplete
    )
