"""What torch.save makes of many things: ``python -m tests.peers.torch_files`` writes ``fixtures/torch/written`` anew.

tests/formats/test_torch_bin.py reads these files, so that it needs no torch; tests/peers/test_torch_bin.py shows that
they are read as what the installed torch writes is.
"""

from __future__ import annotations

import io
import warnings
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from safetensors.torch import save_file

WRITTEN = Path(__file__).parents[2] / "fixtures" / "torch" / "written"
DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.bool),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
)


class Named(torch.Tensor):
    """A subclass, which torch.save stores by its class."""


class Settings(dict[str, Any]):
    """What looks like a dict."""


def odd_tensors() -> dict[str, torch.Tensor]:
    big = torch.arange(320, dtype=torch.float32).reshape(20, 16)
    return {
        **{str(d): (torch.arange(12) % 2).to(d).reshape(3, 4) for d in DTYPES},
        "columns": big[:, 2:5],
        "transposed": big.t(),
        "expanded": torch.arange(4.0).reshape(4, 1).expand(4, 5),
        "windows": torch.arange(6.0).as_strided((4, 3), (1, 1)),
        "number": big[4, 7],
        "empty": torch.empty(3, 0, 2),
        "tied": big,
        "parameter": torch.nn.Parameter(torch.ones(2, 3)),
        "with.dots and spaces é": torch.ones(1),
    }


def module() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    found: dict[str, torch.Tensor] = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3)).state_dict()
    return found


def trained() -> dict[str, Any]:
    model, ema = {"w": torch.ones(2, 2)}, {"w": torch.zeros(2, 2)}
    return {"model": {"state_dict": model, "version": 3}, "ema": OrderedDict(ema), "epoch": 7}


def step() -> dict[str, Any]:
    optimizer = {"state": {0: {"step": torch.ones(()), "exp_avg": torch.ones(2, 3)}}, "param_groups": [{"params": [0]}]}
    args = Namespace(lr=1e-3, path=Path("x"), sizes={1}, dtype=torch.bfloat16, rng=np.random.default_rng(0).random())
    beside = {"optimizer": optimizer, "scheduler": {"last_epoch": 1}, "args": args, "step": 1}
    return {"net": {"module": module()}, **beside}


def quantized() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(2, 2), 0.1, 0, torch.qint8)


WORDS = torch.arange(8.0).reshape(4, 2)
ODD: dict[str, Callable[[], Any]] = {
    "sparse": lambda: {"a": torch.eye(3).to_sparse()},
    "quantized": lambda: {"a": quantized()},
    "meta": lambda: {"a": torch.empty(2, device="meta")},
    "a module": lambda: torch.nn.Linear(2, 2),
    "complex128": lambda: {"a": torch.ones(2, dtype=torch.complex128)},
    "conjugate": lambda: {"a": torch.ones(2, dtype=torch.complex64).conj()},
    "a subclass": lambda: {"a": torch.ones(2).as_subclass(Named), "b": torch.ones(2)},
    "an array": lambda: {"a": np.ones(3), "b": torch.ones(2)},
    "an array below": lambda: {"a": {"c": np.ones(3)}, "b": torch.ones(2)},
    "a storage": lambda: {"a": torch.ones(2).untyped_storage(), "b": torch.ones(2)},
    "no values yet": lambda: {"a": torch.nn.UninitializedParameter(), "b": torch.ones(2)},
    "a class of dicts": lambda: {"a": Settings(w=torch.ones(2))},
    "of a class": lambda: Settings(w=torch.ones(2)),
    "no tensors": lambda: {"a": 1, "b": "text"},
    "a few bytes for ever": lambda: {"a": torch.ones(1).expand(1 << 40)},
}
"""Case -> what is refused in the form before torch 1.6 as it is in a zip."""

FILES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    **{f"protocol {p}": (odd_tensors, {"pickle_protocol": p}) for p in (2, 3, 4, 5)},
    **{f"protocol {p}": (lambda: {"a": torch.ones(2)}, {"pickle_protocol": p}) for p in (0, 1)},
    **{case: (make, {}) for case, make in ODD.items()},
    "weights": (
        lambda: {
            "a": torch.zeros(3, 4, dtype=torch.bfloat16),
            "b": torch.nn.Parameter(torch.ones(2)),
            "s": torch.Size([1]),
        },
        {},
    ),
    "range": (lambda: {"a": torch.arange(6.0).reshape(2, 3)}, {}),
}
"""Name -> a value, and what torch.save is told; written in both forms."""

ONLY_NEW: dict[str, Callable[[], Any]] = {
    "state dict": module,
    "trained": trained,
    "step": step,
    "a subclass elsewhere": lambda: {"model": {"w": torch.ones(2)}, "ema": {"w": torch.ones(2).as_subclass(Named)}},
    "an array elsewhere": lambda: {"model": {"w": torch.ones(2)}, "rng": ("MT19937", np.ones(3))},
    "old keys": lambda: {"model": {"w": torch.ones(2)}, "optimizer": {"state": {1 << 46: {}}}},
    "a": lambda: {"a": torch.ones(2)},
    "b": lambda: {"b": torch.ones(2)},
    "optimizer": lambda: {"state": {}, "param_groups": []},
    "tied": lambda: {"model.embed_tokens.weight": WORDS, "lm_head.weight": WORDS},
    "apart": lambda: {"model.embed_tokens.weight": WORDS, "lm_head.weight": WORDS.clone()},
}
ONLY_OLD: dict[str, Callable[[], Any]] = {
    "a class beside": lambda: {"w": torch.arange(3.0), "class": torch.nn.Linear},
    "unread types before": lambda: {
        "a": torch.ones(3, dtype=torch.complex128),
        "b": quantized(),
        "c": {"w": torch.arange(3.0)},
    },
}


def saved(value: object, **options: Any) -> bytes:
    """Without the source of torch's classes, which the form before torch 1.6 takes along with its path."""
    out = io.BytesIO()
    source = ["class Linear(Module):\n", "    ...\n"], 0, "linear.py"
    with (
        warnings.catch_warnings(action="ignore"),
        patch("torch.serialization.get_source_lines_and_file", lambda *_: source),
    ):
        torch.save(value, out, **options)
    return out.getvalue()


def written() -> dict[str, bytes]:
    """The files by name. Those of the form before torch 1.6 end in .old.bin."""
    found = {}
    with warnings.catch_warnings(action="ignore"):
        made = {name: (make(), options) for name, (make, options) in FILES.items()}
        made |= {name: (make(), {}) for name, make in (ONLY_NEW | ONLY_OLD).items()}
    for name, (value, options) in made.items():
        file = name.replace(" ", "_")
        if name not in ONLY_OLD:
            found[f"{file}.bin"] = saved(value, **options)
        if name not in ONLY_NEW:
            found[f"{file}.old.bin"] = saved(value, _use_new_zipfile_serialization=False, **options)
    torch.serialization.set_crc32_options(compute_crc32=False)
    try:
        found["no_checksums.bin"] = saved({"a": torch.ones(2)})
    finally:
        torch.serialization.set_crc32_options(compute_crc32=True)
    return found


def main() -> None:
    WRITTEN.mkdir(exist_ok=True)
    for name, data in written().items():
        (WRITTEN / name).write_bytes(data)
    for name, tensors in (("protocol", odd_tensors()), ("state_dict", module())):
        plain = {k: t.detach().clone(memory_format=torch.contiguous_format) for k, t in tensors.items()}
        save_file(plain, WRITTEN / f"{name}.safetensors")


if __name__ == "__main__":
    from tests.peers.torch_files import main as named  # classes are pickled by the name of their module

    named()
