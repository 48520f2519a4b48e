"""What every JSON answer says of the checkpoint that it is about."""

from __future__ import annotations

from typing import Any

from ckpttool.answers.fields import pick
from ckpttool.answers.programs import program_json
from ckpttool.formats.paddle import Native
from ckpttool.ops.inspect.identity import Identity, identify
from ckpttool.ops.inspect.listing import TensorListing, sharding_of


def listing_json(listing: TensorListing) -> dict[str, Any]:
    """Where it lies, what it is, and how much of it was chosen."""
    native = listing.stored.native
    return {
        "path": str(listing.path),
        "format": listing.format,
        "mesh": listing.mesh.to_json(),
        "sharding": sharding_of(listing.stored),
        "files": len(listing.files),
        "file_bytes": sum(f.size for f in listing.files),
        "tensors": listing.tensors,
        "listed": len(listing.rows),
        "listed_bytes": listing.nbytes,
        "logical": listing.logical,
        "dtypes": {t.dtype: pick(t, "tensors elements bytes=nbytes") for t in listing.totals()},
        "components": {
            t.component: pick(t, "dtypes tensors elements bytes=nbytes derived") for t in listing.component_totals()
        },
        "identity": _identity_json(identify(listing)),
        "notes": listing.notes,
        **({"program": program_json(native.program)} if isinstance(native, Native) else {}),
    }


def _identity_json(identity: Identity) -> dict[str, Any]:
    lora = identity.adapter
    return {
        "headline": identity.headline,
        **pick(identity, "family? layers? experts? parameters precision?"),
        "adapter": None if lora is None else pick(lora, "kind rank? alpha? base? targets"),
    }
