"""``ckpttool-pre-commit [--values] FILE...``: ``inspect --check`` of the checkpoints that changed files belong to.

What .pre-commit-hooks.yaml calls. Exit 1 when a check found an error.
"""

from __future__ import annotations

import sys
from pathlib import Path

_MAKES_A_CHECKPOINT = ("config.json", "adapter_config.json", "*.safetensors.index.json")
"""Files beside which safetensors files are one checkpoint; without them each is one by itself."""


def checkpoints(files: list[str]) -> list[Path]:
    """The directory or file that is a checkpoint, for each file, once."""
    found: dict[Path, None] = {}
    for file in map(Path, files):
        together = any(next(file.parent.glob(pattern), None) for pattern in _MAKES_A_CHECKPOINT)
        found[file.parent if together or file.suffix == ".json" else file] = None
    return list(found)


def main() -> int:
    """Check them all, and print what is wrong."""
    from ckpttool.errors import CkptError
    from ckpttool.execute import NoProgress
    from ckpttool.formats.base import OpenOptions
    from ckpttool.ops.inspect.check import check
    from ckpttool.ops.inspect.views.check import CheckAnswer
    from ckpttool.report.render import show
    from ckpttool.report.text import message

    words = sys.argv[1:]
    unknown = [w for w in words if w.startswith("-") and w != "--values"]
    if unknown:
        message(f"error: ckpttool-pre-commit has no option {unknown[0]}\n\nhint: --values also reads the elements")
        return 2
    ok = True
    for path in checkpoints([w for w in words if w != "--values"]):
        try:
            result = check(path, OpenOptions(), NoProgress(), values="--values" in words)
        except CkptError as e:
            message(e.render())
            ok = False
            continue
        show(CheckAnswer(result).document(), quiet=True)
        ok = ok and result.ok
    return 0 if ok else 1
