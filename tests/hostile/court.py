"""What every command must keep to, whatever it is given: one verdict for all hostile files.

A run happens in a directory of its own, beside a stranger's files. Afterwards: an exit code of ours, no traceback, no
character that steers a terminal, no call of the bait, nothing written outside DST, nothing of the stranger in DST, and
not more processor time than a person would wait.
"""

from __future__ import annotations

import json
import os
import re
import resource
import struct
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import sample
from tests.helpers.command import Done, ckpttool

EVERYTHING = sample.everything
"""The whole matrix and not the sample that `make test` runs."""
SAMPLE = pytest.mark.product(one_in=24)

SECRET = "-----BEGIN PRIVATE KEY----- of somebody else"  # noqa: S105 - bait
SECONDS = 15.0
"""Of the processor, for any command on any hostile file here: the longest limit of ckpttool is 10."""

_STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")

# ruff: noqa: ARG005 - all have one form
COMMANDS: dict[str, Callable[[Path, Path], list[object]]] = {
    "inspect": lambda src, dst: ["inspect", src],
    "list": lambda src, dst: ["inspect", src, "--list"],
    "json": lambda src, dst: ["inspect", src, "--list", "--json"],
    "files": lambda src, dst: ["inspect", src, "--files"],
    "metadata": lambda src, dst: ["inspect", src, "--metadata"],
    "check": lambda src, dst: ["inspect", src, "--check"],
    "imports": lambda src, dst: ["inspect", src, "--imports"],
    "stats": lambda src, dst: ["inspect", src, "--stats", "--hash"],
    "reshard": lambda src, dst: ["reshard", src, dst, "--to", "hf"],
    "ranks": lambda src, dst: ["reshard", src, dst, "--to", "ranks", "--tp-out", 2, "--split", "*=none"],
    "drop": lambda src, dst: ["drop-keys", src, dst, "a*"],
    "merge": lambda src, dst: ["merge", src, "-o", dst],
    "cast": lambda src, dst: ["quantize", src, dst],
    "size": lambda src, dst: ["size", src],
    "index": lambda src, dst: ["inspect", src, "--write-index", "--dry-run"],
    "convert": lambda src, dst: ["convert-json", src, dst],
}
"""One line for each way into a source."""


def safetensors(header: Mapping[str, Any] | bytes, data: bytes = b"") -> bytes:
    """A file with this header, whatever it says."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


def tensor(**changes: Any) -> dict[str, Any]:
    """The entry of one float in the first four bytes."""
    return {"dtype": "F32", "shape": [1], "data_offsets": [0, 4], **changes}


class Court:
    """One hostile source, and the commands that are run on it."""

    def __init__(self, tmp_path: Path) -> None:
        self.room = tmp_path
        self.src = tmp_path / "src"
        self.dst = tmp_path / "dst"
        self.src.mkdir()
        stranger = tmp_path / "stranger"
        stranger.mkdir()
        for name in ("secret.json", "id_rsa", "model.safetensors"):
            (stranger / name).write_text(json.dumps({"token": SECRET}) if name.endswith("json") else SECRET)
        self.stranger = stranger

    def try_all(self, commands: Collection[str] = (), target: Path | None = None) -> Iterator[tuple[str, Done]]:
        """Run each command on the source (or ``target``), and judge it."""
        for name in commands or COMMANDS:
            yield name, self.run(*COMMANDS[name](target or self.src, self.dst))

    def run(self, *arguments: object) -> Done:
        """Run one command, and judge it. What it has written is removed again."""
        before = _tree(self.room)
        started = resource.getrusage(resource.RUSAGE_SELF).ru_utime
        done = ckpttool(*arguments)
        took = resource.getrusage(resource.RUSAGE_SELF).ru_utime - started
        said = f"{' '.join(map(str, arguments))[:300]}\n{done.err[:2000]}"
        assert done.code in (0, 1, 2, 3), said
        assert "Traceback" not in done.err, said
        assert not _STEERING.search(done.out), said
        assert not _STEERING.search(done.err), said
        assert took < SECONDS, f"{took:.1f} s\n{said}"
        assert done.code in (0, 3) or done.err.count("error: ") >= 1, said
        if self.dst.is_dir():
            for path in self.dst.rglob("*"):
                assert not path.is_symlink(), said
                assert SECRET.encode() not in (path.read_bytes() if path.is_file() else b""), said
        assert SECRET not in done.out + done.err, said
        after = {p: v for p, v in _tree(self.room).items() if not p.startswith("dst")}
        assert after == {p: v for p, v in before.items() if not p.startswith("dst")}, said
        _remove(self.dst)
        _remove(self.dst.with_name("dst.partial"))
        return done


def _tree(root: Path) -> dict[str, bytes | str]:
    """Every name below ``root`` with what is there; links are not followed."""
    out: dict[str, bytes | str] = {}
    for folder, names, files in os.walk(root):
        for name in (*names, *files):
            path = os.path.join(folder, name)  # noqa: PTH118 - names may be no text
            at = os.path.relpath(path, root)
            if os.path.islink(path):  # noqa: PTH114
                out[at] = os.readlink(path)  # noqa: PTH115
            elif os.path.isfile(path):  # noqa: PTH113
                out[at] = Path(path).read_bytes()[:65536]
            else:
                out[at] = "directory or other"
    return out


def _remove(path: Path) -> None:
    import shutil

    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
