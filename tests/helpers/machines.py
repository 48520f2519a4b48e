"""Machines that see the same files, each through a page cache of its own which hears nothing of the others.

That is what a network filesystem may be. A page is read when something is written into it, and written back whole, with
whatever was around that.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ckpttool.core.encodings import Contents
from ckpttool.execute import shares
from ckpttool.execute.files import FilePool


class Disk:
    """What all machines have in common, and who has written which page of which file."""

    def __init__(self, root: Path) -> None:
        self.root = str(root)
        self.writers: dict[tuple[int, int], set[int]] = {}
        """(inode, page) -> machines"""
        self.machines = 0

    def machine(self, **_: object) -> Machine:
        """One more, in the place of ``open_medium``."""
        self.machines += 1
        return Machine(self, self.machines)

    def writers_of(self, path: Path) -> list[set[int]]:
        """Of each page of a file that was written."""
        return [machines for (inode, _), machines in self.writers.items() if inode == path.stat().st_ino]


class Machine(FilePool):
    """Files below a directory, through a page cache that never looks again. Other files are as they are."""

    def __init__(self, disk: Disk, number: int) -> None:
        super().__init__()
        self._disk = disk
        self._number = number
        self._cache: dict[tuple[int, int], bytearray] = {}
        self._dirty: set[tuple[int, int]] = set()

    def _page(self, path: str, number: int) -> bytearray:
        name = Path(path).stat().st_ino, number
        if name not in self._cache:
            with Path(path).open("rb") as f:
                f.seek(number * shares.PAGE)
                self._cache[name] = bytearray(f.read(shares.PAGE))
        return self._cache[name]

    def write(self, path: str, offset: int, data: memoryview, *, scattered: bool = False) -> None:
        del scattered
        done = 0
        while done < data.nbytes:
            number, at = divmod(offset + done, shares.PAGE)
            piece = data[done : done + shares.PAGE - at]
            with self._lock:
                self._page(path, number)[at : at + piece.nbytes] = piece
                name = Path(path).stat().st_ino, number
                self._dirty.add(name)
                self._disk.writers.setdefault(name, set()).add(self._number)
            done += piece.nbytes

    def read(self, path: Contents, offset: int, buffers: Sequence[memoryview], *, once: bool = True) -> None:
        if not isinstance(path, str) or not path.startswith(self._disk.root):
            super().read(path, offset, buffers, once=once)
            return
        for buffer in buffers:
            done = 0
            while done < buffer.nbytes:
                number, at = divmod(offset + done, shares.PAGE)
                with self._lock:
                    piece = self._page(path, number)[at : at + buffer.nbytes - done]
                buffer[done : done + len(piece)] = piece
                done += len(piece)
            offset += done

    def sync(self, path: str, *, metadata: bool = False) -> None:
        del metadata
        with self._lock:
            inode = Path(path).stat().st_ino
            for name in sorted(n for n in self._dirty if n[0] == inode):
                with Path(path).open("rb+") as f:
                    f.seek(name[1] * shares.PAGE)
                    f.write(self._cache[name])
                self._dirty.remove(name)
