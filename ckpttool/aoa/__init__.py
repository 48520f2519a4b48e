"""AOA text: Paddle's rules for turning the tensors of one naming into those of another.

A statement such as ``a^T, b^T -> c, fused_ffn`` is read by ``parse``, turned round by ``invert`` and carried out on a
table of views by ``apply``. Nothing here reads a tensor: the result is again a table of views, so a checkpoint that is
converted by AOA text is planned, written and verified like any other.

Where Paddle drops a statement without a word, or lets one statement overwrite another's result, there is an error.
"""

from ckpttool.aoa.apply import apply_aoa
from ckpttool.aoa.invert import invert
from ckpttool.aoa.parse import parse_aoa, parse_statement, read_aoa
from ckpttool.aoa.statement import Statement, StatementPlace, Var

__all__ = ["Statement", "StatementPlace", "Var", "apply_aoa", "invert", "parse_aoa", "parse_statement", "read_aoa"]
