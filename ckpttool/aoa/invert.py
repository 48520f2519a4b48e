"""Turning AOA text round, for ``aoa_config_reverse``.

Statements are undone from the last to the first, each by its own inverse. A text with one statement that has no
inverse is refused as a whole: half of it undone would be a checkpoint of neither naming.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Never

from ckpttool.aoa.statement import NOTHING, Cast, Statement
from ckpttool.errors import UnsupportedError


def invert(statements: Sequence[Statement]) -> list[Statement]:
    """Statements that undo ``statements``, last first. Raises UnsupportedError naming the one that has no inverse."""
    _refuse_copies(statements)
    return [_inverse(s) for s in reversed(statements)]


def _refuse(s: Statement, why: str, hint: str | None = None) -> Never:
    raise UnsupportedError(f"the text cannot be turned round: {why}", where=s.where, hint=hint)


def _refuse_copies(statements: Sequence[Statement]) -> None:
    """A tensor that two statements read would be written twice on the way back."""
    reader: dict[str, Statement] = {}
    for s in statements:
        for v in s.left:
            if v.name in reader:
                _refuse(
                    s,
                    f"`{v.name}` is also read by `{reader[v.name].text}`, and on the way back both would write it",
                    f"for the way back, write the statements out and drop the copy: `{s.right[0].name} -> _`",
                )
            if v.name != NOTHING:
                reader[v.name] = s
        for v in s.right:
            # Written anew: reading it from here on reads another tensor. A plain `a -> a` writes nothing.
            if not (s.is_plain and v.name == s.left[0].name):
                reader.pop(v.name, None)


def _inverse(s: Statement) -> Statement:
    if s.right[0].name == NOTHING:
        why = f"what `{s.left[0].name}` held is dropped and cannot come back"
        _refuse(s, why, "write the way back out, or remove the statement")
    if s.cast is not None and s.cast.of is None:
        hint = f"write `src_dtype='...', dst_dtype='{s.cast.to}'` instead of `dtype='{s.cast.to}'`"
        _refuse(s, "`dtype=` does not say what the dtype was before", hint)
    if any("*" in v.name for v in s.left):
        _refuse(s, "nothing says how many names * stands for on the way back", "write the names out")
    if len(s.left) != len({v.name for v in s.left}):
        _refuse(s, "one tensor is joined with itself")
    order = s.permute
    return replace(
        s,
        left=s.right,
        right=s.left,
        permute=order and tuple(order.index(i) for i in range(len(order))),
        cast=Cast(s.cast.of, s.cast.to) if s.cast is not None and s.cast.of is not None else None,
        inverted=not s.inverted,
    )
