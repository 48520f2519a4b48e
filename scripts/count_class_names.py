"""How many names stand for more than one class of the package.

    python scripts/count_class_names.py [-v] [CHECKOUT]

Names count without leading underscores: ``_Reader`` and ``Reader`` are one name. -v prints each with its classes.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path


def classes(nodes: Iterable[ast.AST], file: str) -> Iterator[tuple[str, str]]:
    """(name without underscores, place and name as written) of each class among the nodes of a file."""
    for node in nodes:
        if isinstance(node, ast.ClassDef):
            yield node.name.lstrip("_"), f"{file}:{node.lineno} {node.name}"


def shared_names(package: Path) -> Mapping[str, list[str]]:
    """The names that several classes of a package have, with the classes."""
    found = defaultdict(list)
    for path in sorted(package.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for name, place in classes(ast.walk(tree), str(path.relative_to(package))):
            found[name].append(place)
    return {name: places for name, places in sorted(found.items()) if len(places) > 1}


def main() -> None:
    """Print the names, and how many there are."""
    verbose = "-v" in sys.argv[1:]
    given = [a for a in sys.argv[1:] if a != "-v"]
    shared = shared_names((Path(given[0]) if given else Path(__file__).parents[1]) / "ckpttool")
    for name, places in shared.items() if verbose else ():
        print(f"{name} {len(places)}")
        print(*(f"    {place}" for place in places), sep="\n")
    print(f"{len(shared)} names for {sum(map(len, shared.values()))} classes")


if __name__ == "__main__":
    main()
