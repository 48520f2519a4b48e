"""Codes and scales of one quantized weight, for any shape: a rank's share has the blocks of the whole."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import NamedTuple

from ckpttool.core.dtypes import lookup, nbytes
from ckpttool.quant.coded import Coded
from ckpttool.quant.scheme import GROUP, Form, Scheme


class Coding(NamedTuple):
    """How a weight is quantized."""

    code: str
    """dtype of a code."""
    scale: str
    """dtype of a scale as it is stored; "" where there is none."""
    block: tuple[int, ...]
    """Elements per scale along each axis of the weight; 0 is all of the axis."""
    sides: tuple[int, int] = (0, 0)
    """Rows and columns of a block where scales form a grid that a cut must not tear; (0, 0) where they do not."""
    beside: int = 0
    """Bytes of single numbers for the whole weight: factor, scale of its inputs."""

    def codes(self, shape: tuple[int, ...]) -> int:
        """Bytes of the codes; a code that fills no byte takes one."""
        return -(-prod(shape) * lookup(self.code).bits // 8)

    def scales(self, shape: tuple[int, ...]) -> int:
        """Number of scales; a block that is partly filled has one."""
        if not self.scale:
            return 0
        return prod(-(-n // b) if b else min(n, 1) for n, b in zip(shape, self.block, strict=True))

    def resident(self, shape: tuple[int, ...]) -> int:
        """Bytes in memory. Engines hold a grid of scales as F32, whatever the file has; other scales as stored."""
        if not prod(shape):
            return 0
        held = "F32" if self.sides[0] else self.scale
        scales = nbytes(held, self.scales(shape)) if self.scale else 0
        return self.codes(shape) + scales + self.beside


def of_scheme(scheme: Scheme, ndim: int, forms: Iterable[Form], *, in_out: bool) -> Coding:
    """What ``quant.scheme.forms`` made of a weight, as a rule for its shares."""
    rows, columns = {"tensor": (0, 0), "channel": (1, 0)}.get(scheme.recipe, scheme.block)
    if in_out and scheme.recipe in GROUP:
        rows, columns = columns, rows
    beside = sum(nbytes(f.dtype, prod(f.shape)) for f in forms if f.role in ("factor", "input"))
    sides = scheme.block if scheme.recipe == "block" else (0, 0)
    return Coding(scheme.code, scheme.stored_scale, (*[1] * (ndim - 2), rows, columns), sides, beside)


def of_coded(coded: Coded, stored_scale: str, block: tuple[int, int] | None, beside: int) -> Coding:
    """What a checkpoint holds of a weight, as a rule for its shares.

    ``stored_scale`` is the dtype in the file, ``block`` what the config says of grids, ``beside`` as in ``Coding``.
    """
    if not coded.scale:
        return Coding(coded.code, "", coded.block)
    sides = coded.block
    if coded.turned:
        sides = (*sides[:-2], sides[-1], sides[-2])
    whole = tuple(0 if b >= n else b for n, b in zip(coded.shape, sides, strict=True))
    rows, columns = sides[-2:]
    grid = (0, 0)
    if block is not None and coded.code != "F4":
        grid, whole = block, (*whole[:-2], *block)  # of a weight that is one block, too
    elif rows > 1 and columns > 1 and (whole[-2] or whole[-1]):
        grid = (rows, columns)
    return Coding(coded.code, stored_scale, whole, grid, beside)
