"""The interface of a function over many items, for this machine or a fleet."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar

from ckpttool.core.files import DataFile
from ckpttool.execute.reader import Reads

_Given_contra = TypeVar("_Given_contra", contravariant=True)
_Made_co = TypeVar("_Made_co", covariant=True)


class Work(Protocol[_Given_contra, _Made_co]):
    """A function of one item. Work, items and results can be pickled."""

    @property
    def files(self) -> Iterable[DataFile]:
        """Files that must be the same on all machines. Their texts may be others there, so results hold none."""

    def reads(self, item: _Given_contra, /) -> Reads:
        """Byte ranges that will be read from other machines."""

    def do(self, item: _Given_contra, /) -> _Made_co:
        """Called by several threads that read blocks; see ``reading``."""
