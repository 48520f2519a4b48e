"""Machines that see the same files, each through a page cache of its own which hears nothing of the others.

That is what a network filesystem may be. A page is read when something is written into it, and written back whole, with
whatever was around that.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from ckpttool.encodings import Contents
from ckpttool.execute import shares
from ckpttool.execute.files import FilePool


class Disk:
    """What all machines have in common, and who has written which page."""

    def __init__(self, root: Path) -> None:
        self.root = str(root)
        self.writers: dict[tuple[str, int], set[int]] = {}
        self.machines = 0

    def machine(self, **_: object) -> Machine:
        """One more, in the place of ``open_medium``."""
        self.machines += 1
        return Machine(self, self.machines)

    def name(self, path: str) -> str:
        """Of an output, below the destination of a run."""
        return os.path.relpath(path, self.root).partition("/")[2]


class Machine(FilePool):
    """Files below a directory, through a page cache that never looks again. Other files are as they are."""

    def __init__(self, disk: Disk, number: int) -> None:
        super().__init__()
        self._disk = disk
        self._number = number
        self._cache: dict[tuple[str, int], bytearray] = {}
        self._dirty: set[tuple[str, int]] = set()

    def _page(self, path: str, number: int) -> bytearray:
        if (path, number) not in self._cache:
            with Path(path).open("rb") as f:
                f.seek(number * shares.PAGE)
                self._cache[path, number] = bytearray(f.read(shares.PAGE))
        return self._cache[path, number]

    def write(self, path: str, offset: int, data: memoryview, *, scattered: bool = False) -> None:
        del scattered
        done = 0
        while done < data.nbytes:
            number, at = divmod(offset + done, shares.PAGE)
            piece = data[done : done + shares.PAGE - at]
            with self._lock:
                self._page(path, number)[at : at + piece.nbytes] = piece
                self._dirty.add((path, number))
                self._disk.writers.setdefault((self._disk.name(path), number), set()).add(self._number)
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
            for name, number in sorted(self._dirty):
                if name == path:
                    with Path(path).open("rb+") as f:
                        f.seek(number * shares.PAGE)
                        f.write(self._cache[name, number])
                    self._dirty.remove((name, number))
