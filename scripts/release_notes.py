"""Print what CHANGELOG.md says of a version, as release notes: python scripts/release_notes.py VERSION

Without a version: what is not released yet. Exits with 1 and says which versions there are, if this is none of them.
Headings are one level higher than in the file, as the version's own is left out, and links to pages stay as they are.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

CHANGELOG = Path(__file__).parents[1] / "CHANGELOG.md"
UNRELEASED = "Unreleased"
_SECTION = re.compile(r"^## (Unreleased|v?\d[\w.]*)(?: - .*)?$", re.MULTILINE)


def sections(text: str) -> dict[str, str]:
    """Version -> its part of a changelog, without the heading: `## 0.1.0`, or with a date, `## 0.1.0 - 2026-11-23`."""
    parts = _SECTION.split(text)
    return {version.removeprefix("v"): part.strip() for version, part in zip(parts[1::2], parts[2::2], strict=True)}


def notes(text: str, version: str) -> str:
    """The release notes of a version. Raises KeyError where there are none."""
    found = sections(text)[version]
    if not found:
        raise KeyError(version)
    return re.sub(r"^#(#{2,} )", r"\1", found, flags=re.MULTILINE) + "\n"


def main() -> int:
    """Print them."""
    version = sys.argv[1] if len(sys.argv) > 1 else UNRELEASED
    text = CHANGELOG.read_text(encoding="utf-8")
    try:
        print(notes(text, version.removeprefix("v")), end="")
    except KeyError:
        print(f"error: {CHANGELOG.name} says nothing of {version}", file=sys.stderr)
        print(f"\nhint: it has {', '.join(sections(text))}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
