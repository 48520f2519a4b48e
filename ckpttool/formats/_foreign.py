"""What is no checkpoint that ckpttool reads, but is often given: recognised, so that the error can say the way out.

``disguise`` looks at the first bytes of a file whose name promises something else: what a download left when it failed,
or another format under a wrong name. ``foreign`` looks at the names in a directory. Neither opens anything.

The commands in the hints are what transformers, torch, DeepSpeed and accelerate themselves offer to make safetensors.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import NamedTuple


class Stranger(NamedTuple):
    """Something that is not read."""

    what: str
    """Completes "this is ..."."""
    way_out: str
    """A hint."""


_AGAIN = "the download failed or was not allowed; log in where the model asks for it, and fetch the file again"
_REPACK = "give the safetensors of the model; most models have them beside such files"
_TORCH_FILE = (
    "such files may run code when they are loaded. Where it holds one dict of tensors, torch writes safetensors of it: "
    """python -c "import torch, safetensors.torch as s; s.save_file(torch.load({path!r}, map_location='cpu'),"""
    """ 'model.safetensors')\""""
)
_TRANSFORMERS = (
    "such files may run code when they are loaded. transformers writes safetensors of them: "
    """python -c "from transformers import AutoModelForCausalLM as M;"""
    """ M.from_pretrained({path!r}, dtype='auto').save_pretrained({out!r})\""""
)

_STARTS = (
    (rb"version https://git-lfs", Stranger("a git-lfs pointer, not the file", "run `git lfs pull` in the clone")),
    (rb"\s*<(!doctype|html|\?xml|head|body)", Stranger("a web page, not the file", _AGAIN)),
    (
        rb'\s*\{\s*"(error|message|detail)"|(entry |repository )?not found|unauthorized|forbidden|access to',
        Stranger("a server's error message, not the file", _AGAIN),
    ),
    (rb"GGUF", Stranger("a GGUF file (llama.cpp)", "give the safetensors that it was made of")),
    (rb"PK\x03\x04", Stranger("a zip archive, such as torch.save writes", "give its safetensors instead")),
    (rb"\x80[\x02-\x05]", Stranger("a pickle, such as torch.save writes", "give its safetensors instead")),
    (rb"\x1f\x8b|BZh|\xfd7zXZ|\x28\xb5\x2f\xfd|7z\xbc\xaf", Stranger("a compressed file", "unpack it first")),
    (rb"\x89HDF|\x93NUMPY", Stranger("a file of HDF5 or numpy", _REPACK)),
)

_NAMES = (
    (
        r"pytorch_model_fsdp_\d+",
        Stranger(
            "a checkpoint of torch FSDP", "accelerate merges it to safetensors: accelerate merge-weights {found} {out}"
        ),
    ),
    (
        r"zero_to_fp32\.py|(bf16_)?zero_pp_rank_\d+_mp_rank_\d+_optim_states\.pt|mp_rank_\d+_model_states\.pt",
        Stranger(
            "a checkpoint of DeepSpeed",
            "DeepSpeed puts a script beside it that makes safetensors of it (zero_to_fp32.py, one directory above the"
            " .pt files): python zero_to_fp32.py . {out} --safe_serialization",
        ),
    ),
    (
        r"latest_checkpointed_iteration\.txt|iter_\d{7}|mp_rank_\d+(_\d+)*|model_optim_rng\.pt",
        Stranger(
            "a checkpoint of Megatron-LM",
            "export it to Hugging Face's format first (AutoBridge.export_ckpt of Megatron Bridge), and give that",
        ),
    ),
    (
        r"__\d+_\d+\.distcp|\.metadata",
        Stranger(
            "a checkpoint of torch.distributed.checkpoint",
            "torch gathers it into one file, from which safetensors can be written: "
            "python -m torch.distributed.checkpoint.format_utils dcp_to_torch {root} all.pt; "
            """python -c "import torch, safetensors.torch as s; s.save_file(torch.load('all.pt', map_location='cpu'),"""
            """ 'model.safetensors')\"""",
        ),
    ),
    (
        r"pytorch_model(-\d+-of-\d+)?\.bin(\.index\.json)?",
        Stranger("a model in PyTorch's own files (.bin)", _TRANSFORMERS),
    ),
    (
        r"adapter_model\.bin",
        Stranger("an adapter in PyTorch's own file (.bin)", "save it with PEFT's save_pretrained: safetensors"),
    ),
    (
        r"consolidated\.\d+\.pth|params\.json",
        Stranger("a model in Meta's own files", "give its Hugging Face form: the same model's safetensors"),
    ),
    (
        r".*\.gguf",
        Stranger("a model in GGUF (llama.cpp)", "give the safetensors that it was made of"),
    ),
    (
        r".*\.(pt|pth|ckpt|bin)",
        Stranger("a file of torch.save", _TORCH_FILE),
    ),
    (
        r"_CHECKPOINT_METADATA|manifest\.ocdbt|.*\.(npz|npy|msgpack|h5|onnx|tflite|pb|keras)",
        Stranger("a model of another framework", _REPACK),
    ),
    (
        r".*\.(tar|tgz|zip|tar\.\w+|gz|zst|7z)",
        Stranger("an archive", "unpack it, and give the directory with the weights"),
    ),
)


def disguise(first: bytes) -> Stranger | None:
    """What a file is that begins so; None when that is not known."""
    return next((s for pattern, s in _STARTS if re.match(pattern, first, re.IGNORECASE)), None)


def foreign(root: Path, names: Iterable[str], folders: Collection[str]) -> Stranger | None:
    """What a directory with these files and folders holds; None when that is not known."""
    here = [*names, *folders]
    for pattern, stranger in _NAMES:
        rx = re.compile(pattern)
        found = next((n for n in here if rx.fullmatch(n)), None)
        if found is not None:
            fields = {
                "root": shlex.quote(str(root)),
                "found": shlex.quote(str(root / found)) if found in folders else found,
                "path": str(root if stranger.way_out is _TRANSFORMERS else root / found),
                "out": re.sub(r"[^\w.-]", "-", root.name) + "-safetensors",
            }
            return Stranger(stranger.what.format(**fields), stranger.way_out.format(**fields))
    return None
