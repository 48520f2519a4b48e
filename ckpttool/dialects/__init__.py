"""Dialects: what one piece of software does to a model, whatever format its files have.

base.py          ``Dialect``: what is asked of each, with Hugging Face's answers
family.py        those that a family file describes: its ``namings:`` and fusions, and the published form
paddle.py        Paddle's names, orientation, fusions and config, which follow a rule and need no table
paddle_whole.py  what Paddle holds whole on every rank
"""

from __future__ import annotations

from functools import cache

from ckpttool.dialects.base import Dialect, NamingContext, Shapes, Statements
from ckpttool.dialects.family import PUBLISHED, FamilyDialect
from ckpttool.dialects.paddle import PaddleDialect

__all__ = ["PUBLISHED", "Dialect", "NamingContext", "Shapes", "Statements", "dialect"]

_COMPUTED = {PaddleDialect.name: PaddleDialect}
"""Dialects that no family file describes."""


@cache
def dialect(name: str) -> Dialect:
    """The dialect of that name; one that is not known here may be a naming of a user's family file."""
    return _COMPUTED[name]() if name in _COMPUTED else FamilyDialect(name)
