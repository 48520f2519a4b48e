"""Reads of files on other machines as their storages make them: nothing is kept, and each read is a request."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from ckpttool.core.files import OpenFile


def _bare(file: OpenFile) -> OpenFile:
    return file


@contextmanager
def bare_reads() -> Iterator[None]:
    """Without read-ahead."""
    with patch("ckpttool.storage.place.ahead", _bare), patch("ckpttool.storage.stream.ahead", _bare):
        yield
