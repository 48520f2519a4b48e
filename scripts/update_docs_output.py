"""Rewrite what the commands of a page print: python scripts/update_docs_output.py README.md docs/reference.md ...

Each page runs as its test does, in a folder of its own. Output that the page still shows rightly is left as it is;
other output is replaced, so look at the diff and put `...` where a time or a size differs from run to run.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.docs.runner import ROOT, Session, problems, updated


def update(page: Path) -> bool:
    """Bring one page up to date; says whether that changed it."""
    text = page.read_text(encoding="utf-8")
    if found := list(problems(text)):
        sys.exit("\n".join(f"error: {page}: {problem}" for problem in found))
    with tempfile.TemporaryDirectory() as folder:
        result = updated(text, Session(Path(folder)), str(page))
        for path in (folder, str(ROOT), str(Path.home())):
            if path in result and path not in text:
                sys.exit(
                    f"error: {page}: an example prints a path of this machine, {path}\n\nhint: name files from there"
                )
    if result == text:
        return False
    page.write_text(result, encoding="utf-8")
    return True


def main() -> None:
    """Bring the named pages up to date."""
    if len(sys.argv) == 1 or sys.argv[1].startswith("-"):
        sys.exit(f"{__doc__}")
    for name in sys.argv[1:]:
        print(f"{name}: {'changed' if update(Path(name)) else 'unchanged'}")


if __name__ == "__main__":
    main()
