"""How often the path of a reshard goes from one room of the package to another, until its plan is made.

    python scripts/count_room_moves.py [-v] [CHECKOUT] [-- ckpttool reshard's arguments]

A room is a module or package directly below `ckpttool/`. Counted are first calls of functions, for a helper that is
called again tells nothing new: a call into another room, and one that comes back up, to a room that a row of
tests/test_architecture.py puts below the caller's. Functions that run because a module is imported do not count.

A return is a step back on the way from SRC to its files. The way is the sequence of rooms that the driving rooms
(DRIVERS) call or call each other, in order, without `core`, whose helpers all use, without what a driver reads of a
value (properties, `__len__`), and without what a room that was called calls itself. Its returns are the entries into a
room that the way was in before, with another room in between.
-v prints the moves one by one, in their order, and then the way, with a star at each return.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
import sys
import tempfile
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

DRIVERS = {"cli", "ops", "checkpoint", "targeting"}
"""The rooms that call the others in turn."""


def read_values(package: Any) -> set[Any]:
    """The code of every property of the package's classes."""
    modules = [m for name, m in sys.modules.items() if name.startswith(package.__name__)]
    classes = {c for m in modules for c in vars(m).values() if isinstance(c, type)}
    members = [member for c in classes for member in vars(c).values()]
    getters: list[Any] = [getattr(m, "fget", None) or getattr(m, "func", None) for m in members]
    return {g.__code__ for g in getters if hasattr(g, "__code__")}


def rows(root: Path) -> dict[str, int]:
    """The row of each room, as the checkout's own test has them."""
    tree = ast.parse((root / "tests/test_architecture.py").read_text(encoding="utf-8"))
    found = next(n.value for n in tree.body if isinstance(n, ast.AnnAssign) and ast.unparse(n.target) == "ROWS")
    return {room: i for i, names in enumerate(ast.literal_eval(found or ast.Tuple([]))) for room in names}


class Moves:
    """A profiler that counts."""

    def __init__(self, package: Path, row: dict[str, int], values: set[Any]) -> None:
        self.package, self.row, self._values = package, row, values
        self.moves: Counter[tuple[str, str]] = Counter()
        self.walk: list[str] = []
        self.way: list[str] = []
        """The driving rooms and those that they call, no room twice in a row."""
        self._seen: set[Any] = set()
        self.done = False

    def room(self, frame: FrameType) -> str:
        """The room of a function; "" of others."""
        path = Path(frame.f_code.co_filename)
        if not path.is_relative_to(self.package) or frame.f_code.co_name == "<module>":
            return ""
        return path.relative_to(self.package).parts[0].removesuffix(".py")

    def function(self, frame: FrameType) -> str:
        """File, line and name of a function."""
        code = frame.f_code
        path = Path(code.co_filename).relative_to(self.package)
        return f"{path}:{frame.f_lineno} {getattr(code, 'co_qualname', code.co_name)}"

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if event == "return" and frame.f_code.co_name == "build_plan":
            self.done = True
        if event != "call" or self.done or frame.f_code in self._seen:
            return
        self._seen.add(frame.f_code)
        here, caller = self.room(frame), frame.f_back
        while caller is not None and not (there := self.room(caller)):
            caller = caller.f_back
        if here and caller is not None and here != there:
            self.moves[there, here] += 1
            self.walk.append(f"{self.function(caller)} -> {self.function(frame)}")
            if there in DRIVERS and here != "core" and not self._reads(frame) and self.way[-1:] != [here]:
                self.way.append(here)

    def _reads(self, frame: FrameType) -> bool:
        """Whether a function reads a value: a property, or a method that Python calls for an operator."""
        return frame.f_code in self._values or frame.f_code.co_name.startswith("__")

    @property
    def returns(self) -> list[bool]:
        """For each room of the way whether it was in that room before."""
        return [room in self.way[:i] for i, room in enumerate(self.way)]

    @property
    def upwards(self) -> int:
        """Of the moves those into a room of a later row."""
        return sum(n for (a, b), n in self.moves.items() if self.row[b] > self.row[a])


def main() -> None:
    """Print the moves of one reshard."""
    verbose = "-v" in sys.argv[1:2]
    given, _, arguments = " ".join(sys.argv[1 + verbose :]).partition("--")
    root = Path(given.strip() or Path(__file__).parents[1]).resolve()
    sys.path.insert(0, str(root))
    package = importlib.import_module("ckpttool")
    for module in pkgutil.walk_packages(package.__path__, "ckpttool."):
        if module.name.endswith("__main__"):
            continue
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as e:  # an engine, whose package is not installed
            if e.name is None or e.name.startswith("ckpttool"):
                raise
    typer = importlib.import_module("typer.main")
    command = typer.get_command(importlib.import_module("ckpttool.cli.app").app)
    counter = Moves(root / "ckpttool", rows(root), read_values(package))
    with tempfile.TemporaryDirectory() as folder:
        words = arguments.split() or [str(root / "fixtures/llama_tp8"), f"{folder}/dst", "--tp-out", "2"]
        sys.setprofile(counter)
        try:
            command.main(["reshard", *words, "--dry-run", "-q"], standalone_mode=False)
        finally:
            sys.setprofile(None)
    if verbose:
        print("\n".join(counter.walk), end="\n\n")
        stars = zip(counter.way, counter.returns, strict=True)
        print(" ".join(room + "*" * again for room, again in stars), end="\n\n")
    for (a, b), n in counter.moves.most_common():
        print(f"{n:4}  {a} -> {b}{'  (up)' if counter.row[b] > counter.row[a] else ''}")
    total, returns = counter.moves.total(), sum(counter.returns)
    print(f"{total} moves between rooms, {counter.upwards} of them upwards, {returns} returns")


if __name__ == "__main__":
    main()
