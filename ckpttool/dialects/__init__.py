"""Dialects: what one piece of software does to a model, whatever format its files have.

base.py          ``Dialect``: what is asked of each, with Hugging Face's answers
family.py        those that a family file describes: its ``namings:`` and fusions, and the published form
paddle.py        Paddle's names, orientation, fusions and config, which follow a rule and need no table
paddle_whole.py  what Paddle holds whole on every rank
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from ckpttool.dialects.base import Dialect, NamingContext, Shapes, Statements
from ckpttool.dialects.family import PUBLISHED, FamilyDialect
from ckpttool.dialects.paddle import PaddleDialect
from ckpttool.formats.base import StoredCheckpoint
from ckpttool.layout.family import Family

__all__ = ["PUBLISHED", "Dialect", "NamingContext", "Recognized", "Shapes", "Statements", "dialect", "recognize"]

_COMPUTED = {PaddleDialect.name: PaddleDialect}
"""Dialects that no family file describes."""


@cache
def dialect(name: str) -> Dialect:
    """The dialect of that name; one that is not known here may be a naming of a user's family file."""
    return _COMPUTED[name]() if name in _COMPUTED else FamilyDialect(name)


class Recognized(NamedTuple):
    """Whose names the tensors of a checkpoint have."""

    said: Dialect
    """The dialect that the format or the names tell, before Hugging Face's namings are told apart."""
    context: NamingContext
    statements: Statements
    """They lead from Hugging Face's names to those of the checkpoint."""


def recognize(stored: StoredCheckpoint, family: Family) -> Recognized:
    """Find the dialect of a checkpoint, and note it in ``stored`` (``dialect``, ``fused``, ``notes``)."""
    names = {t.name for t in stored.tensors} if stored.recorded is None else {k.name for k in stored.recorded.tensors}
    by_names = not stored.dialect
    if by_names:
        stored.dialect = family.trainer_naming(names) or PUBLISHED
        if stored.dialect != PUBLISHED:
            stored.notes.append(f"the tensors have the names of {stored.dialect}")
    said = dialect(stored.dialect)
    if said.published and (by_names or stored.recorded is None):
        naming, stored.fused = family.published_form(names, lambda: _shapes(stored))
        stored.dialect = naming or stored.dialect
    context = NamingContext(family, stored.config, stored.mesh, stored.fused, stored.version)
    own = dialect(stored.dialect)
    if family.name == "none" and isinstance(own, FamilyDialect):
        own.check_known(context, _shapes(stored), str(stored.root))
    return Recognized(said, context, own.detect(context, lambda: _shapes(stored)))


def _shapes(stored: StoredCheckpoint) -> dict[str, tuple[int, ...]]:
    """A shape for each parameter, as a rank holds it; a scalar of the optimizer only where there is nothing else."""
    if stored.recorded is not None:
        return {t.key.name: t.shape for t in sorted(stored.recorded, key=lambda t: len(t.shape))}
    return {t.name: t.shape for t in sorted(stored.tensors, key=lambda t: (t.component == "model", len(t.shape)))}
