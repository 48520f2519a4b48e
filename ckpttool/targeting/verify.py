"""``--verify``: the output is read back and compared with the source, without the plan."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from ckpttool.checkpoint import OpenOptions, assemble
from ckpttool.containers.safetensors_library import confirm_headers
from ckpttool.core.catalog import Catalog, Key, StoredTensor
from ckpttool.core.files import Place
from ckpttool.errors import VerifyError
from ckpttool.execute.verification import Checks
from ckpttool.formats.base import ReadOptions
from ckpttool.formats.registry import read_source
from ckpttool.planning.relate import DerivedTensor
from ckpttool.targeting.account import Account
from ckpttool.targeting.build import Prepared


def look_through(prepared: Prepared, written: Place) -> Checks:
    """What there is to check of an output, which is read through its format's reader.

    Knows nothing of the plan's moves: the source side goes through pieces and views, the written side through its own
    headers, in which the safetensors library must read the same. What is dequantized or quantized is worked out once
    more, and compared where it was written.
    Raises VerifyError for what is missing, and for what should not be there.
    """
    checks = Checks()
    if prepared.parts:
        for folder, one in prepared.parts.items():
            _look(checks, one, written / folder)
        checks.add_carried(prepared.plan, written)
    else:
        _look(checks, prepared, written)
    return checks


def _look(checks: Checks, prepared: Prepared, written: Place) -> None:
    mesh = prepared.mesh
    said = ReadOptions(mesh.tp, mesh.pp, mesh.ep, mesh.etp, mesh.layout, wrapped=False)
    stored = read_source(written, prepared.format, said)
    confirm_headers(stored.files)
    out = assemble(stored, written, OpenOptions(prepared.format, said), prepared.family)
    expected = prepared.views.table
    # By the names that views have, which say the component too; a reader derives components that were not written.
    components = {k.component for k in prepared.source.catalog.tensors}
    tensors = {Key(str(k)): t for k, t in out.catalog.tensors.items() if k.component in components}
    found = Catalog(out.catalog.files, tensors)
    have = {k.name for k in found.tensors}
    missing, extra = sorted(set(expected) - have), sorted(have - set(expected))
    if missing or extra:
        raise VerifyError(
            f"the output has {len(extra)} unexpected tensors and lacks {len(missing)}: {(missing + extra)[0]}",
            where=str(written),
        )
    _verify_nothing_lost(prepared)
    if prepared.translation is not None:
        prepared.translation.check(expected, found)
    if prepared.computed is not None:
        checks.add_computed(prepared.plan, written)
    real = len(prepared.source.catalog.files)
    copied = [(v, prepared.dtypes[v.name]) for v in expected.values() if all(s.file < real for s in _stored(v))]
    checks.add_views(prepared.source.catalog, copied, found, total=len(expected))


def _verify_nothing_lost(prepared: Prepared) -> None:
    """Raises VerifyError for a tensor of the source that is left out for no reason."""
    if prepared.target.aoa is not None:
        return  # the statements say what is written
    chosen, recoded = prepared.selection, prepared.recoded
    account = partial(Account, statements=prepared.statements)
    account(prepared.source, remove=chosen.remove, keep=chosen.keep, computed=prepared.computed).check(
        prepared.views.table.values()
    )
    if recoded is not None:
        account(recoded.source, remove=recoded.remove, keep=recoded.keep).check_recoded(
            recoded.checkpoint.catalog, recoded.computed
        )


def _stored(view: DerivedTensor) -> Iterator[StoredTensor]:
    """The stored tensors that a view takes elements from."""
    for part in view.parts:
        for piece in part.source.pieces:
            yield piece.stored
