"""Find a save of Megatron Core's dist_checkpointing.

run/latest_checkpointed_iteration.txt    1000, or `release`
run/iter_0001000/common.pt               all that is not cut: arguments, counters, groups of the optimizer
run/iter_0001000/metadata.json           which backend wrote the rest: {"sharded_backend": "torch_dist"}; written last
run/iter_0001000/.metadata               which box of which tensor lies where
run/iter_0001000/__0_0.distcp            chunks

Those of NeMo lie in directories of its own, or in a tar (``nemo``).

Megatron FSDP (``--ckpt-format fsdp_dtensor``) and ``torch_dcp`` leave common.pt and metadata.json out: all of it is in
the chunks. Source: megatron/core/dist_checkpointing/serialization.py and megatron/training/checkpointing.py.
"""

from __future__ import annotations

import re

from ckpttool.errors import CkptError, UsageError
from ckpttool.formats.megatron import nemo, run
from ckpttool.formats.torch import METADATA
from ckpttool.storage.listing import Listing, list_source

COMMON, BACKEND = "common.pt", "metadata.json"
_ITERATION = re.compile(r"iter_\d{7,18}")
_CHUNKS = re.compile(r"__\d+_\d+\.distcp")


def is_save(listing: Listing) -> bool:
    """Whether these are the files of a save."""
    if listing.single:
        return False
    names = listing.names
    if COMMON in names and (METADATA in names or BACKEND in names):
        return True
    fsdp = METADATA in names and _ITERATION.fullmatch(listing.root.name) is not None
    return fsdp and (listing.root.parent / run.POINTER).is_file()


def holds_save(listing: Listing) -> bool:
    """Whether a source is a save, a run with one, or a file of one."""
    try:
        if (found := nemo.find(listing)) is not None:
            return is_save(found.listing)
    except CkptError:
        return True  # NeMo's, and reading says what is wrong with it
    if listing.single:
        own = listing.single in (METADATA, COMMON, BACKEND) or _CHUNKS.fullmatch(listing.single)
        return bool(own) and is_save(list_source(listing.root))
    if is_save(listing):
        return True
    chosen = run.chosen(listing)
    return is_save(chosen) if chosen else any(is_save(listing.inside(n)) for n in run.saves(listing))


def find(listing: Listing) -> run.MegatronSave:
    """The save at a source. Raises UsageError for one file of several, IncompleteError where there is none."""
    if (found := nemo.find(listing)) is not None and is_save(found.listing):
        return found
    if listing.single:
        raise UsageError(
            "this is one of the files of a checkpoint",
            where=str(listing.path(listing.single)),
            hint=f"give their directory: {listing.root}",
        )
    return run.find(listing, is_save=is_save(listing))
