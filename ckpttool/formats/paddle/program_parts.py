"""A Paddle inference program, above all its parameters, in either encoding.

    model.json      a PIR program in JSON                      _pir.py
    model.pdmodel   a ProgramDesc in protobuf, before PIR      _pdmodel.py
    *.pdiparams     the parameters, one record after another   _pdiparams.py

Names are only in the program, bytes only in the parameter file, and nothing in either says that they belong together
but dtypes, shapes and the order: records are sorted by name, as Python sorts strings. Source: paddle 3.3.1
(static/pir_io.py, jit/pir_translated_layer.py, framework.proto), measured.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

from ckpttool.core.files import Place


class Element(NamedTuple):
    """An element type in the words of Paddle."""

    dtype: str
    """safetensors' name; ``C128``, ``U16`` and so on where safetensors has none or Paddle's writers know none."""
    number: int
    """``VarType.Type`` of framework.proto, which is what a parameter file holds."""
    pir: str
    """Name in a PIR program, after ``0.``."""
    bits: int


ELEMENTS = (
    Element("BOOL", 0, "t_bool", 8),
    Element("I16", 1, "t_i16", 16),
    Element("I32", 2, "t_i32", 32),
    Element("I64", 3, "t_i64", 64),
    Element("F16", 4, "t_f16", 16),
    Element("F32", 5, "t_f32", 32),
    Element("F64", 6, "t_f64", 64),
    Element("U8", 20, "t_ui8", 8),
    Element("I8", 21, "t_i8", 8),
    Element("BF16", 22, "t_bf16", 16),
    Element("C64", 23, "t_c64", 64),
    Element("C128", 24, "t_c128", 128),
    Element("F8_E4M3", 32, "t_f8e4m3fn", 8),
    Element("F8_E5M2", 33, "t_f8e5m2", 8),
)
BY_NUMBER = {e.number: e for e in ELEMENTS}
BY_PIR = {e.pir: e for e in ELEMENTS}
BY_DTYPE = {e.dtype: e for e in ELEMENTS}

LISTED = 20
"""Problems of one kind that are listed; the others are counted."""
FLOAT8 = ("F8_E4M3", "F8_E5M2")


class ProgramProblem(NamedTuple):
    """Something wrong with a program or its parameters: ``--check`` lists all, reading raises the first."""

    id: str
    text: str
    where: str = ""
    """Place in the file: operator, byte, record."""


class ProgramTensor(NamedTuple):
    """A tensor that the program expects in the parameter file, or feeds, or fetches."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    """-1 along an axis whose length is only known when the program runs; never of a parameter."""

    @property
    def nbytes(self) -> int:
        return BY_DTYPE[self.dtype].bits // 8 * prod(self.shape)


@dataclass(slots=True)
class Program:
    """One program, read to its end."""

    path: Place
    kind: str
    """``pir`` or ``pdmodel``."""
    version: int | None = None
    """Version of PIR's JSON; in a .pdmodel Paddle's own: major * 1000000 + minor * 1000 + patch. None: not given."""
    trainable: bool | None = None
    parameters: list[ProgramTensor] = field(default_factory=list)
    """Parameters in the order of the parameter file: by name."""
    operators: Counter[str] = field(default_factory=Counter)
    """How many of each operator there are, in all blocks."""
    elements: Counter[str] = field(default_factory=Counter)
    """How many values have each element type, by safetensors' name; parameters included."""
    infinite: int = 0
    """Attributes that are infinite, which JSON has no number for."""
    blocks: int = 0
    inputs: list[ProgramTensor] = field(default_factory=list)
    """Tensors that are fed, in the order of the program."""
    outputs: list[ProgramTensor] = field(default_factory=list)
    """Tensors that are fetched."""
    problems: list[ProgramProblem] = field(default_factory=list)
    """Problems, at most ``LISTED`` of each id."""
    more: Counter[str] = field(default_factory=Counter)
    """Problems beyond those listed, by id."""

    def report(self, id_: str, text: str, where: str = "") -> None:
        """Note a problem; the hundredth of a kind says nothing new."""
        if sum(p.id == id_ for p in self.problems) < LISTED:
            self.problems.append(ProgramProblem(id_, text, where))
        else:
            self.more[id_] += 1
