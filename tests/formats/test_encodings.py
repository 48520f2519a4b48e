"""Sources that are decoded into scratch files, and change while that happens."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import pytest

from ckpttool.containers import scratch as _scratch
from ckpttool.containers.scratch import Scratch, decoded
from ckpttool.errors import CorruptError
from ckpttool.formats.base import file_now


@pytest.mark.parametrize(
    "change",
    [
        lambda path: path.write_bytes(b"others!!"),
        lambda path: os.truncate(path, 3),
        lambda path: path.unlink(),
    ],
    ids=["written", "cut", "gone"],
)
def test_a_source_that_changes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], None]
) -> None:
    """Nobody looks at it again: from then on the scratch file is the source."""
    path = tmp_path / "model.pdopt"
    path.write_bytes(b"original")
    os.utime(path, ns=(0, 0))
    source = file_now(path)
    with Scratch() as scratch:
        monkeypatch.setattr(_scratch, "DEFAULT", scratch)

        def write(out: BinaryIO) -> None:
            out.write(path.read_bytes())
            change(path)

        with pytest.raises(CorruptError, match="a source has changed while it was read") as e:
            decoded(source, "moment", write)
        assert str(path) in e.value.where
    assert not Path(scratch.folder or tmp_path / "nothing").exists()
