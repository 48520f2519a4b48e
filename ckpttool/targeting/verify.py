"""``--verify``: the output is read back and compared with the source, without the plan."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from ckpttool.catalog import Catalog, Key, StoredTensor
from ckpttool.checkpoint import OpenOptions, assemble
from ckpttool.errors import VerifyError
from ckpttool.execute import Advance
from ckpttool.execute.compare import verify_views
from ckpttool.execute.compute import verify_computed
from ckpttool.execute.reader import reading
from ckpttool.formats.base import ReadOptions
from ckpttool.formats.registry import read_source
from ckpttool.plan import Output
from ckpttool.relate import DerivedTensor
from ckpttool.storage.place import Place, open_file, parse_place
from ckpttool.targeting.account import Account
from ckpttool.targeting.build import Prepared

_BLOCK = 1 << 20
"""Bytes of a carried file that are compared at once."""


def verify_output(
    prepared: Prepared, written: Place, advance: Advance, *, memory: int, connections: int | None = None
) -> None:
    """Read ``written`` back through its format's reader and compare every element with the source.

    Knows nothing of the plan: the source side goes through pieces and views, the written side through its own headers.
    What is dequantised or quantised is worked out once more, with ``memory`` bytes, and compared where it was written.
    ``advance`` is told the bytes of ``written`` that are verified.
    Half of them, and ``connections``, are for what is on other machines.
    Raises VerifyError naming the first tensors that differ.
    """
    with reading(memory=memory // 2, connections=connections):
        _verify(prepared, written, advance, memory)


def _verify(prepared: Prepared, written: Place, advance: Advance, memory: int) -> None:
    if prepared.parts:
        for folder, one in prepared.parts.items():
            _verify(one, written / folder, advance, memory)
        for output in prepared.plan.outputs:
            if output.carried:
                _verify_carried(output, written / output.name, advance)
        return
    mesh = prepared.mesh
    said = ReadOptions(mesh.tp, mesh.pp, mesh.ep, mesh.etp, mesh.layout, wrapped=False)
    stored = read_source(written, prepared.format, said)
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
    real = len(prepared.source.catalog.files)
    if prepared.computed is not None:
        verify_computed(prepared.plan, written, memory, advance)
    verify_views(
        prepared.source.catalog,
        [v for v in expected.values() if all(s.file < real for s in _stored(v))],
        found,
        cast=lambda name, _: prepared.dtypes[name],
        advance=advance,
        total=len(expected),
    )
    if prepared.translation is not None:
        prepared.translation.check(expected, found)


def _verify_carried(output: Output, written: Place, advance: Advance) -> None:
    """Raises VerifyError when a file that stays as it is has other bytes."""
    with open_file(parse_place(output.carried)) as one, open_file(written) as other:
        at = 0
        while at < output.size or one.info.size != other.info.size:
            block = one.pread(_BLOCK, at)
            if not block or block != other.pread(len(block), at):
                raise VerifyError("the file differs from that of the source", where=[str(written), output.carried])
            at += len(block)
            advance(len(block))


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
