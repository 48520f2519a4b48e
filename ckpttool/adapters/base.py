"""An adapter before it has a base (``Adapter``), and its changes to one (``Changes``)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple, Self

from ckpttool.core.catalog import Catalog
from ckpttool.core.dtypes import CASTABLE
from ckpttool.core.files import DataFile
from ckpttool.errors import ConflictError, IncompleteError, UnsupportedError
from ckpttool.planning.relate import DerivedTensor, permute

FactorKind = Literal["linear", "embedding", "stacked"]
ANOTHER_MODEL = "is this the model for which the adapter was trained?"
"""Question for errors about shapes that do not fit."""


class CandidateParameter(NamedTuple):
    """A parameter of a module of PEFT that factors may belong to; file names do not say which."""

    name: str
    rank: int
    factor: float


class Pair(NamedTuple):
    """Two trained factors whose product is added to one weight (to one weight of each expert, if stacked)."""

    target: str
    """The weight's name in the model that was trained; of a stacked weight of PEFT, the module that holds it."""
    kind: FactorKind
    a: str
    """Tensor name of the factor next to the input."""
    b: str
    """Tensor name of the factor next to the output."""
    rank: int
    """Rank in the config; of each expert, if stacked."""
    factor: float
    choices: tuple[CandidateParameter, ...] = ()
    """Stacked weights of PEFT, in place of rank and factor."""

    def of(self, choice: CandidateParameter) -> Pair:
        """The same where it is known which parameter it is for."""
        return self._replace(rank=choice.rank, factor=choice.factor, choices=(choice,))


class Factors(NamedTuple):
    """The low-rank factors for one layer."""

    up: DerivedTensor
    """[out, rank]"""
    down: DerivedTensor
    """[rank, in]"""
    factor: float

    @property
    def size(self) -> tuple[int, int]:
        """(out, in)."""
        return self.up.shape[0], self.down.shape[1]

    def transposed(self) -> Factors:
        return Factors(transposed(self.down), transposed(self.up), self.factor)


def transposed(view: DerivedTensor) -> DerivedTensor:
    """A matrix with its axes exchanged."""
    return permute(view.name, view, (1, 0))


@dataclass(frozen=True, slots=True)
class Adapter(ABC):
    """One adapter directory; each library that writes adapters has a class of its own."""

    dialect: ClassVar[str]
    """Dialect of the models that its library trains."""
    in_out_everywhere: ClassVar[bool]
    """Whether ``in_out`` holds for all layers."""
    interleaves_qkv: ClassVar[bool]
    """Whether a fused q, k and v have, for each key and value head, its query heads, the key and the value."""

    path: str
    catalog: Catalog
    """All its tensors, by the names they have in its files."""
    pairs: tuple[Pair, ...]
    whole: Mapping[str, str]
    """Tensors that were trained as they are: name in the model -> name in the catalog."""
    in_out: bool
    """Whether the writer holds the weights of its linear layers as [in, out]: Paddle, and PEFT's fan_in_fan_out."""
    notes: tuple[str, ...] = ()
    in_place: frozenset[str] = frozenset()
    """Tensors of ``whole`` that replace a weight for all layers that share it: tied ones stay tied."""

    @property
    def files(self) -> list[DataFile]:
        return self.catalog.files

    def shifted(self, by: int) -> Adapter:
        """The same with ``by`` added to every file number, for a table of files that others share."""
        return replace(self, catalog=self.catalog.shifted(by))

    def resolved(self, base: Mapping[str, tuple[int, ...]]) -> Self:
        """The same with targets as a base of these names and shapes has them."""
        return self

    @abstractmethod
    def factors(self, pair: Pair) -> Factors:
        """Factors of a linear layer or a convolution."""

    @abstractmethod
    def experts(self, pair: Pair) -> list[Factors]:
        """Factors of each expert of a stacked weight. Raises ConflictError for shapes that are no stack."""

    def view(self, tensor: str) -> DerivedTensor:
        """One of its tensors."""
        t = self.catalog[tensor]
        return DerivedTensor(tensor, t.dtype, t.shape, t)


class LowRankTerm(NamedTuple):
    """``factor * up @ down``, added to a box of a base tensor in the orientation in which that is stored.

    A base tensor of more than two axes is meant as a matrix with the columns that ``down`` has: experts [E, n, m] as
    [E * n, m], a convolution [out, in, h, w] as [out, in * h * w].
    """

    up: DerivedTensor
    """[rows, rank]"""
    down: DerivedTensor
    """[rank, columns]"""
    factor: float
    row: int = 0
    """First row of the box."""
    column: int = 0
    """First column of the box; other than 0 only where a fused [in, out] weight is changed in parts."""


class Change(NamedTuple):
    """The change of one base tensor: ``whole`` in its place, if there is one; then the terms, added in order."""

    terms: tuple[LowRankTerm, ...] = ()
    whole: DerivedTensor | None = None
    in_place: bool = False
    """``whole`` holds for all layers that share the base tensor."""


class Changes(NamedTuple):
    """Changes by the name of the base tensor, in the order of the base; every tensor of the adapter is used."""

    table: dict[str, Change]
    notes: tuple[str, ...] = ()


def number(config: Mapping[str, Any], field: str, where: str) -> float:
    """A positive number from a config. Raises ConflictError."""
    return positive(config.get(field), field, where)


def positive(value: object, what: str, where: str) -> float:
    """The same for a value that has been looked up."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise ConflictError(f"`{what}` is {value!r}, which is not a positive number", where=where)
    return value


def scaling(alpha: float, rank: float, *, root: bool) -> float:
    """alpha / r, or alpha / sqrt(r) for rank-stabilised adapters (rsLoRA)."""
    return float(alpha / rank**0.5 if root else alpha / rank)


def check_dtypes(catalog: Catalog) -> None:
    """Raises UnsupportedError for an adapter whose numbers stand for others."""
    for t in catalog:
        if t.dtype not in CASTABLE:
            raise UnsupportedError(
                f"`{t.key.name}` is {t.dtype}: quantized adapters are not merged",
                where=[catalog.place(p.stored) for p in t.pieces],
                hint="save the adapter in float32, bfloat16 or float16",
            )


def both_sides(sides: Mapping[str, str], where: str) -> tuple[str, str]:
    """The names of A and B. Raises IncompleteError when one is missing."""
    for side, other in (("A", "B"), ("B", "A")):
        if side not in sides:
            raise IncompleteError(f"`{sides[other]}` has no lora_{side} beside it", where=where)
    return sides["A"], sides["B"]


def check_rank(catalog: Catalog, a: str, b: str, found: tuple[int, int], expected: int, where: str) -> None:
    """Raises ConflictError when the factors do not have the rank that the config gives."""
    if found != (expected, expected):
        shapes = f"`{a}` is {list(catalog[a].shape)}, `{b}` is {list(catalog[b].shape)}"
        raise ConflictError(f"{shapes}, but the config says rank {expected}", where=where)
