"""Objects on their way from a spool of this machine to a store, chunk by chunk; and the keys that they get.

The process that holds DST has one, and so has each process on another machine that sends a share of the chunks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field

from ckpttool.errors import OutputError
from ckpttool.execute.destinations.local import MANIFEST
from ckpttool.execute.destinations.sender import Sender
from ckpttool.execute.destinations.spool import Spool
from ckpttool.execute.files import Stopped
from ckpttool.storage.buckets.base import Bucket, FileSlice, GoneError, SliceStoppedError

MARK = ".ckpttool-partial"
_ENTRIES = {
    "config.json": 0,
    "adapter_config.json": 0,
    "model_index.json": 0,
    "model_meta.json": 0,
    "metadata.json": 0,
    ".metadata": 0,
    "latest": 1,
    "latest_checkpointed_iteration.txt": 1,
}
"""Files at which readers begin."""
LATE = 1
"""Rank from which on objects appear one rank after the other, when all others are there."""
LAST = LATE + 3


def rank(name: str) -> int:
    """The rank in which an object appears: objects at which readers begin come last."""
    base = name.rpartition("/")[2]
    if base in _ENTRIES:
        return LATE + 2 + _ENTRIES[base] + (base == name == "config.json")
    if base.endswith(".index.json"):
        return LATE + 1
    return LATE if name == MANIFEST else 0


class ObjectKeys:
    """The keys of what is written for a DST. ``single``: DST is one object, not a prefix."""

    def __init__(self, text: str, *, single: bool) -> None:
        self.text = text
        self.single = single
        scheme, _, rest = text.partition("://")
        bucket, _, key = rest.partition("/")
        self.bucket = f"{scheme}://{bucket}"
        self.key = key.rstrip("/")

    def at(self, name: str) -> str:
        """The key of an output."""
        if self.single:
            return self.key
        return f"{self.key}/{name}" if self.key else name

    def beside(self, name: str) -> str:
        """The key of an object that is there while DST is being made."""
        return self.key + name if self.single else self.at(name)

    def where(self, name: str) -> str:
        """An output, as errors show it."""
        return f"{self.bucket}/{self.at(name)}"

    @property
    def prefix(self) -> str:
        """The beginning of the keys of all objects of DST."""
        return self.key if self.single else self.at("")

    @property
    def marker(self) -> str:
        return self.beside(f"{MARK}.json")

    @property
    def notes(self) -> str:
        """The beginning of the keys of hashes and of members' markers."""
        return self.beside(f"{MARK}/")


@dataclass(slots=True)
class Upload:
    """An output that is sent in chunks."""

    name: str
    size: int
    chunk: int
    """Bytes of each chunk but the last."""
    upload: str = ""
    sent: dict[int, str] = field(default_factory=dict)
    """Chunk, counted from 0, -> its tag."""
    is_done: bool = False
    """The object is there, written by this run."""

    @property
    def chunks(self) -> range:
        return range(-(-self.size // self.chunk))

    def span(self, chunk: int) -> tuple[int, int]:
        """First byte, and how many."""
        start = chunk * self.chunk
        return start, min(self.chunk, self.size - start)

    def has(self, chunk: int, size: int) -> bool:
        """Whether there is such a chunk, of this size."""
        return chunk in self.chunks and self.span(chunk)[1] == size


class Outbox:
    """Sends chunks from a spool, some at a time, and gives their room back."""

    def __init__(
        self,
        bucket: Bucket,
        keys: ObjectKeys,
        spool: Spool,
        threads: int,
        stop: threading.Event,
        gone: Callable[[], object] = lambda: None,
    ) -> None:
        """``gone`` is called when an upload is, and raises a better reason where there is one."""
        self.objects: dict[int, Upload] = {}
        """The uploads, by the number of the output."""
        self.spool = spool
        self.bucket = bucket
        self.keys = keys
        self._stop = stop
        self._gone = gone
        self.sender = Sender(self._send, threads)

    def sizes(self, outputs: int) -> list[int]:
        """Bytes of a chunk of each output; 0 for one that is put whole."""
        return [self.objects[i].chunk if i in self.objects else 0 for i in range(outputs)]

    def sent(self, output: int) -> Collection[int]:
        """The chunks of an output that have been sent."""
        o = self.objects.get(output)
        if o is None:
            return ()
        return o.chunks if o.is_done else o.sent.keys()

    def ask(self, o: Upload) -> None:
        """Look which chunks of an upload have been sent. Raises GoneError."""
        parts = self.bucket.parts(self.keys.at(o.name), o.upload) if o.upload else {}
        o.sent = {n - 1: p.tag for n, p in parts.items() if o.has(n - 1, p.size)}

    def put(self, output: int, chunk: int) -> None:
        """Nothing more is written into a chunk: send it, or forget it when that has been done before."""
        o = self.objects[output]
        if o.is_done or chunk in o.sent:  # sent by an earlier run, and made again with others
            self.forget(o, chunk)
        else:
            self.sender.put((output, chunk))

    def _send(self, item: tuple[int, int]) -> None:
        o, chunk = self.objects[item[0]], item[1]
        start, size = o.span(chunk)
        path = self.spool.path / o.name
        try:
            with FileSlice(path, start, size, self._stop) as data:
                tag = self.bucket.put_part(self.keys.at(o.name), o.upload, chunk + 1, data)
        except SliceStoppedError:
            raise Stopped from None
        except GoneError:
            self._gone()
            raise OutputError(
                "an upload is gone: something aborted it, perhaps the bucket's rule for incomplete uploads",
                where=self.keys.where(o.name),
            ) from None
        except OSError as e:
            what = f"cannot read data that waits to be sent: {e.strerror or e}"
            raise OutputError(what, where=str(path)) from e
        o.sent[chunk] = tag
        self.forget(o, chunk)

    def forget(self, o: Upload, chunk: int) -> None:
        with suppress(OSError):  # the bytes stay a little longer
            self.spool.forget(str(self.spool.path / o.name), *o.span(chunk))
