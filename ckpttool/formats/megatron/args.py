"""Megatron's arguments, which lie in every checkpoint, and config.json in Hugging Face's fields.

Source: megatron/training/arguments.py and checkpointing.py (``load_args_from_checkpoint``) of Megatron-LM.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpttool.containers.pickle import Record
from ckpttool.formats import base
from ckpttool.formats.megatron.models import kind_of
from ckpttool.storage.listing import Listing


def plain_args(value: Any) -> dict[str, Any]:
    """The arguments of a save; {} where it has none."""
    return dict(value.fields) if isinstance(value, Record) and value.cls == "argparse.Namespace" else {}


def model_config(listing: Listing, args: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """config.json of a save in ``listing``, in Hugging Face's fields, and notes: the file beside the save or its run,
    else made of ``args``; {} where there is neither.

    Raises ConflictError where the file and the arguments contradict each other, UnsupportedError for arguments of a
    model that Hugging Face's code would compute otherwise.
    """
    config = listing.json("config.json")
    if config or not args:
        return config, []
    kind = kind_of(args)
    return kind.config(args), []


def args_of(request: base.WriteRequest, rows: int) -> dict[str, Any]:
    """The arguments of the model and the mesh that ``request`` describes; ``rows`` are those of the padded vocabulary.

    What ``load_args_from_checkpoint`` reads, and plain values only. Raises UnsupportedError for a model that Megatron
    does not compute.
    """
    return {"padded_vocab_size": rows, "tensor_model_parallel_size": request.mesh.tp}
