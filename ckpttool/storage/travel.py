"""Files in jobs for other machines: as texts that name the same files there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from ckpttool.core.encodings import Encoding, Span
from ckpttool.core.files import AnyPlace, DataFile
from ckpttool.errors import UsageError
from ckpttool.storage.access import QUERIES
from ckpttool.storage.place import parse_place


class SentFiles(tuple[DataFile, ...]):
    """Files that are pickled as texts, from which the other machine makes places of its own.

    Credentials stay where they are: each machine has its own. Pickling raises UsageError for a file that only a signed
    URL leads to.
    """

    __slots__ = ()

    def __reduce__(self) -> tuple[Callable[..., SentFiles], tuple[Any, ...]]:
        return _unpickled, ([(text_of(f.place), f.size, f.tag, _elsewhere(f.encoding)) for f in self],)


def _unpickled(files: Iterable[tuple[str, int, str, Encoding | None]]) -> SentFiles:
    return SentFiles([DataFile(parse_place(text), *more) for text, *more in files])  # type: ignore[arg-type]


def text_of(place: AnyPlace) -> str:
    """The text that names a place on every machine that has it.

    Raises UsageError for a URL with a query, which is often a signature: a secret of this process.
    """
    place = parse_place(place)
    if isinstance(place, Path):
        return str(place.absolute())
    text = str(place)
    if any(text == url or text.startswith(f"{url}/") for url in QUERIES):
        raise UsageError(
            "the query of a URL is not sent to other machines, because it may be a signature",
            where=text,
            hint="read it on one machine, or copy it to where all machines can read it",
        )
    return text


def _elsewhere(encoding: Encoding | None) -> Encoding | None:
    """The same, with texts that mean the same elsewhere."""
    if encoding is None:
        return None
    return Encoding(encoding.name, text_of(encoding.path), [_moved(p) for p in encoding.parts])


def _moved(value: Any) -> Any:
    if isinstance(value, Span):
        return value._replace(path=text_of(value.path))
    if isinstance(value, tuple):
        items = [_moved(v) for v in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value


def check_sent(paths: Sequence[str]) -> None:
    """Raises UsageError for a path that other machines cannot follow."""
    for path in paths:
        text_of(path)
