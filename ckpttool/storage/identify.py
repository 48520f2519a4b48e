"""Recognises files and directories that are often given and not read, so that the error can say what to do.

``identify`` looks at the first bytes of a file whose name promises something else: what a download left when it failed,
or another format under a wrong name. ``foreign`` looks at the names in a directory. Neither opens anything.

The commands in the hints are what transformers, torch and accelerate themselves offer to make safetensors.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Iterable
from typing import NamedTuple

from ckpttool.core.files import Place
from ckpttool.core.words import some
from ckpttool.storage.place import open_file, readable


class KnownUnsupported(NamedTuple):
    """Something that is not read."""

    what: str
    """Completes "this is ..."."""
    hint: str
    """A hint."""
    why: str = "which ckpttool does not read"
    """Completes "this is ..., "."""


_AGAIN = "the download failed or was not allowed; log in where the model asks for it, and fetch the file again"
_REPACK = "give the safetensors of the model; most models have them beside such files"
_RENAME = "if torch.save wrote it, rename it to .bin or .pt"

_STARTS = (
    (
        rb"version https://git-lfs",
        KnownUnsupported("a git-lfs pointer, not the file", "run `git lfs pull` in the clone"),
    ),
    (rb"\s*<(!doctype|html|\?xml|head|body)", KnownUnsupported("a web page, not the file", _AGAIN)),
    (
        rb'\s*\{\s*"(error|message|detail)"|(entry |repository )?not found|unauthorized|forbidden|access to',
        KnownUnsupported("a server's error message, not the file", _AGAIN),
    ),
    (rb"GGUF", KnownUnsupported("a GGUF file (llama.cpp)", "rename it to .gguf")),
    (rb"PK\x03\x04", KnownUnsupported("a zip archive, such as torch.save writes", _RENAME)),
    (rb"\x80[\x02-\x05]", KnownUnsupported("a pickle, such as torch.save writes", _RENAME)),
    (rb"\x1f\x8b|BZh|\xfd7zXZ|\x28\xb5\x2f\xfd|7z\xbc\xaf", KnownUnsupported("a compressed file", "unpack it first")),
    (rb"\x89HDF|\x93NUMPY", KnownUnsupported("a file of HDF5 or numpy", _REPACK)),
)

_NAMES = (
    (
        r"zero_to_fp32\.py",
        KnownUnsupported(
            "part of a DeepSpeed save",
            "fetch the sibling directories (global_step...)",
            "without its files",
        ),
    ),
    (
        r"latest_checkpointed_iteration\.txt|iter_\d{7}|common\.pt|mp_rank_\d+(_\d+)*|model_optim_rng\.pt",
        KnownUnsupported(
            "part of a Megatron-LM save",
            "fetch the directories of its ranks (iter_0001000/mp_rank_00) or its chunks (iter_0001000/__0_0.distcp)",
            "without its files",
        ),
    ),
    (
        r"adapter_model\.bin",
        KnownUnsupported("an adapter in PyTorch's own file (.bin)", "save it with PEFT's save_pretrained: safetensors"),
    ),
    (
        r".*\.(pt|pth|ckpt|bin)",
        KnownUnsupported(
            "a directory with files of torch.save ({names})",
            "give the path of the one with the weights",
            "and it is unclear which one is the model",
        ),
    ),
    (
        r"_CHECKPOINT_METADATA|manifest\.ocdbt|.*\.(npz|npy|msgpack|h5|onnx|tflite|pb|keras)",
        KnownUnsupported("a model of another framework", _REPACK),
    ),
    (
        r".*\.(tar|tgz|zip|tar\.\w+|gz|zst|7z)",
        KnownUnsupported("an archive", "unpack it, and give the directory with the weights"),
    ),
)


def identify(first: bytes) -> KnownUnsupported | None:
    """The kind of a file by its first bytes; None if unknown."""
    return next((s for pattern, s in _STARTS if re.match(pattern, first, re.IGNORECASE)), None)


def foreign(root: Place, names: Iterable[str], folders: Collection[str]) -> KnownUnsupported | None:
    """The kind of a directory with these files and folders; None if unknown."""
    here = [*names, *folders]
    for pattern, kind in _NAMES:
        rx = re.compile(pattern)
        found = next((n for n in here if rx.fullmatch(n)), None)
        if found is not None:
            fields = {
                "names": some([n for n in here if rx.fullmatch(n)]),
                "root": shlex.quote(str(root)),
                "found": shlex.quote(str(root / found)) if found in folders else found,
                "out": re.sub(r"[^\w.-]", "-", root.name) + "-safetensors",
            }
            return KnownUnsupported(kind.what.format(**fields), kind.hint.format(**fields), kind.why)
    return None


def sniff(path: Place) -> str:
    """The kind of a file by its first bytes: "pickle", "torch" (a zip of torch.save), "safetensors", "dense" (a
    stream of Paddle's DenseTensor) or "".

    Raises IncompleteError or CorruptError for a file that cannot be read.
    """
    with readable(path), open_file(path) as f:
        size, head = f.info.size, f.pread(512, 0)
    # A header of 640 bytes begins as a pickle of protocol 2 does, but no pickle has zeros and a brace there.
    if len(head) > 8 and head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= size - 8:
        return "safetensors"
    if len(head) >= 2 and head[0] == 0x80 and 2 <= head[1] <= 5:
        return "pickle"
    # The pickle is the first member, below one directory.
    if head[:4] == b"PK\x03\x04" and head[30 : 30 + int.from_bytes(head[26:28], "little")].endswith(b"/data.pkl"):
        return "torch"
    # u32 version 0, u64 levels, u32 version 0, i32 length of the description, which begins with field 1
    # (phi/core/framework/dense_tensor_serialize.cc); levels of ragged tensors are zero in every checkpoint.
    if len(head) >= 22 and not any(head[:16]) and 2 <= int.from_bytes(head[16:20], "little") < 4096 and head[20] == 8:
        return "dense"
    return ""
