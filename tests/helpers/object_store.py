"""A bucket in a dict, for destinations in object stores: requests in order, each of which may fail, or be the last."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NoReturn

from ckpttool.errors import AccessError
from ckpttool.storage.buckets.base import (
    FileSlice,
    GoneError,
    ObjectContent,
    ObjectInfo,
    ObjectPage,
    SentPart,
    SignedRead,
    TakenError,
    pieces,
)
from ckpttool.storage.http import HttpError


class UnreachableError(AccessError):
    """The store does not answer any more."""


@dataclass(slots=True)
class Upload:
    """A multipart upload."""

    key: str
    run: str
    parts: dict[int, bytes] = field(default_factory=dict)


Fault = Callable[[int, str], str]
"""Of a request's number and name: "" or "before" (it fails), "after" (it is done, and fails), "dead before" and "dead
after" (so do all that follow)."""


class ObjectStore:
    """See ``ckpttool.storage.buckets.base.Bucket``: what destinations ask of it."""

    most_parts = 10_000
    part_step = 1
    lister = ""

    def __init__(self) -> None:
        self.objects_: dict[str, tuple[bytes, str]] = {}
        """Bytes and run, by key."""
        self.uploads_: dict[str, Upload] = {}
        self.requests: list[str] = []
        self.fault: Fault = lambda _number, _name: ""
        self.dead = False
        self.age = 0.0
        """Of every object, in seconds."""
        self._made = 0
        self._lock = threading.RLock()

    def heal(self) -> None:
        """From now on everything works; what has been counted is forgotten."""
        self.fault, self.dead, self.requests = (lambda _number, _name: ""), False, []

    def files(self) -> dict[str, bytes]:
        """All objects."""
        return {k: data for k, (data, _) in self.objects_.items()}

    def _request(self, name: str, key: str, do: Callable[[], object]) -> object:
        with self._lock:
            fault = "dead before" if self.dead else self.fault(len(self.requests), name)
            self.requests.append(f"{name} {key}")
            self.dead = self.dead or fault.startswith("dead")
            if fault.endswith("before"):
                raise UnreachableError("no answer", where=key)
            answer = do()
            if fault.endswith("after"):
                raise UnreachableError("no answer", where=key)
            return answer

    def put(self, key: str, data: bytes | FileSlice, run: str, *, new: bool = False, replaces: str = "") -> str:
        whole = b"".join(pieces(data))

        def do() -> str:
            there = self.objects_.get(key)
            if (new and there is not None) or (replaces and (there is None or _tag(there[0]) != replaces)):
                raise TakenError
            self.objects_[key] = whole, run
            return _tag(whole)

        return str(self._request("put", key, do))

    def get(self, key: str) -> ObjectContent | None:
        def do() -> ObjectContent | None:
            there = self.objects_.get(key)
            return None if there is None else ObjectContent(there[0], _tag(there[0]), self.age)

        found = self._request("get", key, do)
        assert found is None or isinstance(found, ObjectContent)
        return found

    def head(self, key: str) -> ObjectInfo:
        def do() -> ObjectInfo | None:
            there = self.objects_.get(key)
            return None if there is None else ObjectInfo(len(there[0]), _tag(there[0]), there[1])

        found = self._request("head", key, do)
        if found is None:
            raise FileNotFoundError(key)
        assert isinstance(found, ObjectInfo)
        return found

    def pages(self, prefix: str, *, deep: bool) -> Iterator[ObjectPage]:
        assert deep
        found: list[tuple[str, ObjectInfo]] = []

        def do() -> None:
            found.extend((k, ObjectInfo(len(v[0]), _tag(v[0]))) for k, v in sorted(self.objects_.items()))

        self._request("list", prefix, do)
        return iter([ObjectPage([f for f in found if f[0].startswith(prefix)])])

    def signed(self, key: str, tag: str, *, renew: bool) -> SignedRead:
        raise NotImplementedError

    def explain(self, e: HttpError, key: str) -> NoReturn:
        raise NotImplementedError

    def delete(self, key: str) -> None:
        self._request("delete", key, lambda: self.objects_.pop(key, None))

    def uploads(self, prefix: str) -> Iterator[tuple[str, str]]:
        found: list[tuple[str, str]] = []
        self._request("uploads", prefix, lambda: found.extend((u.key, n) for n, u in self.uploads_.items()))
        return iter([f for f in found if f[0].startswith(prefix)])

    def create(self, key: str, run: str) -> str:
        def do() -> str:
            self._made += 1
            name = f"upload-{self._made}"
            self.uploads_[name] = Upload(key, run)
            return name

        return str(self._request("create", key, do))

    def _upload(self, upload: str) -> Upload:
        if upload not in self.uploads_:
            raise GoneError
        return self.uploads_[upload]

    def put_part(self, key: str, upload: str, number: int, data: FileSlice) -> str:
        whole = b"".join(pieces(data))
        assert len(whole) == data.size

        def do() -> str:
            self._upload(upload).parts[number] = whole
            return _tag(whole)

        return str(self._request("put_part", f"{key} {number}", do))

    def parts(self, key: str, upload: str) -> dict[int, SentPart]:
        found: dict[int, SentPart] = {}

        def do() -> None:
            found.update({n: SentPart(len(p), _tag(p)) for n, p in self._upload(upload).parts.items()})

        self._request("parts", key, do)
        return found

    def complete(self, key: str, upload: str, parts: Mapping[int, str], run: str) -> None:
        def do() -> None:
            u = self._upload(upload)
            assert all(_tag(u.parts[n]) == tag for n, tag in parts.items())
            self.objects_[key] = b"".join(u.parts[n] for n in sorted(parts)), u.run
            del self.uploads_[upload]

        self._request("complete", key, do)

    def abort(self, key: str, upload: str) -> None:
        self._request("abort", key, lambda: self.uploads_.pop(upload, None))


def _tag(data: bytes) -> str:
    return f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'
