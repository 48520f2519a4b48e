"""The statements of namings: what leads from the published names to those of other software, one after the other.

They are only data here; ``Family`` says where a tensor lives after them, and ``relate`` applies them to tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ckpttool.layout.names import expand, has_literal_number, pattern_regex
from ckpttool.layout.rules import Rule


@dataclass(frozen=True, slots=True)
class Rename:
    """Names only; the first pattern that matches decides."""

    pairs: tuple[tuple[str, str], ...]

    @property
    def by_template(self) -> bool:
        """Names that differ only in their numbers are renamed alike."""
        return not any(has_literal_number(p) for pair in self.pairs for p in pair)

    def forward(self, name: str) -> str:
        return renamed(self.pairs, name)

    def backward(self, name: str) -> str:
        return renamed(tuple((b, a) for a, b in self.pairs), name)


@dataclass(frozen=True, slots=True)
class Fuse:
    """Parts become one tensor (or, with ``inverse``, one tensor becomes its parts)."""

    name: str
    whole: str
    parts: tuple[str, ...]
    units: tuple[str, ...]
    """One per part; "" is equal parts."""
    groups: str = ""
    inverse: bool = False


@dataclass(frozen=True, slots=True)
class Stack:
    """One tensor per expert becomes one tensor with an axis of experts (or back, with ``inverse``)."""

    whole: str
    part: str
    inverse: bool = False


@dataclass(frozen=True, slots=True)
class Transpose:
    """The last two axes are exchanged."""

    patterns: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RotaryPairs:
    """The rows of each head that rotary embeddings turn together lie side by side (or, with ``inverse``, the second
    ones of all pairs behind the first ones, as Hugging Face has them).

        rows of a head of 6:   0 1 2 3 4 5  ->  0 3 1 4 2 5
    """

    pairs: tuple[tuple[str, str], ...]
    """(pattern, size that counts the heads)."""
    inverse: bool = False


@dataclass(frozen=True, slots=True)
class Squeeze:
    """A first axis of one element is left out (or, with ``inverse``, put in)."""

    patterns: tuple[str, ...]
    inverse: bool = False


@dataclass(frozen=True, slots=True)
class OverrideRules:
    """Gives these tensors rules of their own for the statements that follow."""

    pairs: tuple[tuple[str, Rule], ...]


@dataclass(frozen=True, slots=True)
class Refuse:
    """There must be no tensors with such names: (pattern, why)."""

    pairs: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class DropLayers:
    """Layers from this size on are left out."""

    size: str


@dataclass(frozen=True, slots=True)
class Drop:
    """These tensors are left out."""

    patterns: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CreateTensors:
    """These tensors exist from here on only, and are left out on the way back."""

    patterns: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ReadAs:
    """Files may have other names for these: (other name, name). Nothing happens on the way there."""

    pairs: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class DropCopies:
    """These tensors are left out, and must hold the same as another one (or, with ``inverse``, they are made of it)."""

    pairs: tuple[tuple[str, str, str], ...]
    """(pattern, the other one's name, pattern of a tensor that is there where the copy is)."""
    inverse: bool = False


@dataclass(frozen=True, slots=True)
class DropCopy:
    """A tied tensor is stored by its owner only: a copy under its own name is left out, and must hold the same."""

    name: str
    owner: str


@dataclass(frozen=True, slots=True)
class Tie:
    """A tied tensor is stored as a copy under its own name too (or, with ``inverse``, only by its owner)."""

    name: str
    owner: str
    inverse: bool = False


Transform = (
    Rename
    | Fuse
    | Stack
    | Transpose
    | RotaryPairs
    | Squeeze
    | OverrideRules
    | Refuse
    | DropLayers
    | Drop
    | CreateTensors
    | ReadAs
    | DropCopies
    | DropCopy
    | Tie
)


def matches(patterns: Iterable[str], name: str) -> bool:
    """Whether any pattern matches the whole name."""
    return any(pattern_regex(p).match(name) for p in patterns)


def renamed(pairs: Sequence[tuple[str, str]], name: str) -> str:
    """The name that the first pair makes of it whose pattern matches."""
    for old, new in pairs:
        if m := pattern_regex(old).match(name):
            return expand(new, m.groupdict())
    return name


def inverse(ops: Sequence[Transform]) -> tuple[Transform, ...]:
    """The statements that undo ``ops``. What was dropped stays dropped."""
    out: list[Transform] = []
    for op in reversed(ops):
        if isinstance(op, Rename):
            out.append(Rename(tuple((b, a) for a, b in op.pairs)))
        elif isinstance(op, ReadAs):
            out.append(Rename(op.pairs))
        elif isinstance(op, Transpose):
            out.append(op)
        elif isinstance(op, CreateTensors):
            out.append(Drop(op.patterns))
        elif isinstance(op, Fuse | Stack | RotaryPairs | Squeeze | DropCopies | Tie):
            out.append(replace(op, inverse=not op.inverse))
    return tuple(out)
