"""Statements as data, and their text."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

NOTHING = "_"
"""The name that stands for no tensor: ``a -> _`` drops."""

MACROS = ("fused_qkv", "fused_qkv_old", "fused_ffn")

DTYPES = {"float16": "F16", "bfloat16": "BF16", "float32": "F32"}
"""The dtypes that AOA text can cast between."""

PLACEHOLDER = re.compile(r"\$LAYER_ID_OFFSET|\$LAYER_ID|\$EXPERT_ID")


class StatementPlace(NamedTuple):
    """The place of a statement, for messages."""

    file: str
    line: int = 0
    """Line of a text file, from 1; 0 when ``number`` is given."""
    number: int = 0
    """Position in a list, from 1."""
    shift: int = 0
    """Columns before the statement in its line."""

    def at(self, column: int | None = None) -> str:
        """``file:line:column``, or ``file, statement n, column c``; columns count from 1."""
        if self.line:
            return f"{self.file}:{self.line}" + ("" if column is None else f":{column + self.shift}")
        return f"{self.file}, statement {self.number}" + ("" if column is None else f", column {column}")


class Var(NamedTuple):
    """One name of a statement."""

    name: str
    transposed: bool = False
    """On the left: read as its transpose. On the right (inverted statements only): transposed before it is stored."""
    column: int = 1

    def __str__(self) -> str:
        return self.name + ("^T" if self.transposed else "")


class Cast(NamedTuple):
    """``dtype='float32'``, or ``src_dtype='bfloat16', dst_dtype='float32'``. Names of AOA, not of ckpttool."""

    to: str
    of: str | None = None
    """The dtype that the tensor must have before; only then can the cast be undone."""


@dataclass(frozen=True, slots=True)
class Statement:
    """``left -> right, attributes``, with ``name[a:b]`` written out; placeholders and ``*`` still stand in names."""

    left: tuple[Var, ...]
    right: tuple[Var, ...]
    text: str
    """Text as it was written."""
    place: StatementPlace
    axis: int | None = None
    permute: tuple[int, ...] | None = None
    """() reverses all axes."""
    cast: Cast | None = None
    macro: str | None = None
    num_heads: int = 0
    num_key_value_groups: int = 0
    inverted: bool = False
    """Made by ``invert`` of ``text``: ``permute`` is the inverse of the text's, and ``$LAYER_ID_OFFSET`` counts up."""

    @property
    def placeholders(self) -> tuple[str, ...]:
        """The placeholders of all names, sorted."""
        return tuple(sorted({p for v in (*self.left, *self.right) for p in PLACEHOLDER.findall(v.name)}))

    @property
    def is_plain(self) -> bool:
        """Whether it is ``a -> b`` and nothing else."""
        return (
            len(self.left) == len(self.right) == 1
            and not (self.left[0].transposed or self.right[0].transposed or self.macro)
            and self.axis is None
            and self.permute is None
            and self.cast is None
        )

    def __str__(self) -> str:
        out = ", ".join(map(str, self.left)) + " -> " + ", ".join(map(str, self.right))
        if self.macro:
            out += f", {self.macro}"
        if self.num_heads:
            out += f", num_heads={self.num_heads}, num_key_value_groups={self.num_key_value_groups}"
        if self.axis is not None:
            out += f", axis={self.axis}"
        if self.permute is not None:
            out += f", permute='{list(self.permute)}'"
        if self.cast is not None and self.cast.of is None:
            out += f", dtype='{self.cast.to}'"
        elif self.cast is not None:
            out += f", src_dtype='{self.cast.of}', dst_dtype='{self.cast.to}'"
        return out

    @property
    def where(self) -> list[str]:
        """The place and the text, for an error."""
        what = [self.place.at(), self.text]
        return [*what, f"turned round: {self}"] if self.inverted else what
