"""Containers of Azure's blob storage as destinations, through azure-storage-blob.

Blocks stand for parts: they are not seen before a list of them is committed, and that replaces a blob at once. An
upload has no name there, so it is in the names of its blocks. Blocks that nobody commits are discarded after a week.

https://learn.microsoft.com/rest/api/storageservices/put-block, put-block-list and get-block-list.
"""

from __future__ import annotations

import base64
import hashlib
import re
import secrets
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from email.utils import parsedate_to_datetime
from typing import Any

from azure.core import MatchConditions, exceptions
from azure.storage.blob import BlobBlock, BlobClient

from ckpttool.errors import AccessError, IncompleteError, OutputError
from ckpttool.execute.destinations.store import Found, GoneError, Held, SentPart, Slice, TakenError
from ckpttool.storage import azure
from ckpttool.storage.http import REDIRECTS

RUN = "ckpttool_run"
"""Metadata of every blob: which run wrote it."""
BLOCK = 16 << 20
"""Bytes of a block of what is put at once: no more is in memory."""
_PART = re.compile(r"(ckpttool-[0-9a-f]{16})-(\d{5})")
"""Names of blocks; all of a blob must be equally long."""
_RIGHTS = "writing takes the role Storage Blob Data Contributor, or a SAS token with the permissions r, c, w, d and l"


def store(container: str) -> AzureStore:
    """The container with this name, in the account of the environment. Raises AccessError where there is none."""
    return AzureStore(container)


class AzureStore:
    """See ``Store``. Blocks as of https://learn.microsoft.com/rest/api/storageservices/put-block#remarks."""

    most_parts = 50_000
    least_part = 1
    part_step = 1 << 20

    def __init__(self, container: str) -> None:
        self._name = container
        self._container = azure.container(container)
        self._open: set[str] = set()
        """Keys with an upload of this run."""
        self._lock = threading.Lock()

    def put(self, key: str, data: bytes | Slice, run: str, *, new: bool = False, replaces: str = "") -> str:
        condition: dict[str, Any] = {"metadata": {RUN: run}}
        if replaces:
            condition |= {"etag": replaces, "match_condition": MatchConditions.IfNotModified}
        elif new:
            condition |= {"match_condition": MatchConditions.IfMissing}
        with self._told(key, taken=new or bool(replaces)):
            blob = self._container.get_blob_client(key)
            if isinstance(data, Slice):
                names = list(_staged(blob, data))
                return str(blob.commit_block_list([BlobBlock(n) for n in names], **condition)["etag"])
            return str(blob.upload_blob(data, overwrite=not new, validate_content=True, **condition)["etag"])

    def get(self, key: str) -> Found | None:
        said: dict[str, str] = {}
        with self._told(key), suppress(exceptions.ResourceNotFoundError):
            down = self._container.download_blob(key, raw_response_hook=lambda r: said.update(r.http_response.headers))
            now = parsedate_to_datetime(said["Date"]) if "Date" in said else None
            age = (now - down.properties.last_modified).total_seconds() if now else 0.0
            return Found(down.readall(), str(down.properties.etag), age)
        return None

    def head(self, key: str) -> Held | None:
        with self._told(key), suppress(exceptions.ResourceNotFoundError):
            found = self._container.get_blob_client(key).get_blob_properties()
            if not azure.is_folder(found):
                return Held(int(found.size), (found.metadata or {}).get(RUN, ""))
        return None

    def objects(self, prefix: str) -> Iterator[tuple[str, int]]:
        with self._told(prefix):
            for found in self._container.list_blobs(prefix or None, include=["metadata"]):
                if not azure.is_folder(found):
                    yield str(found.name), int(found.size)

    def delete(self, key: str) -> None:
        with self._lock:
            if key in self._open:
                return  # its blocks would go, too; the commit replaces it
        with self._told(key), suppress(exceptions.ResourceNotFoundError):
            self._container.delete_blob(key)

    def uploads(self, prefix: str) -> Iterator[tuple[str, str]]:
        """Of blobs that are not there. Blocks that wait beside an old blob are discarded when something is written."""
        there = {key for key, _ in self.objects(prefix)}
        with self._told(prefix):
            names = self._container.list_blobs(prefix or None, include=["uncommittedblobs"])
            waiting = [n for found in names if (n := str(found.name)) not in there]
        for key in waiting:
            for upload in sorted({m[1] if (m := _PART.fullmatch(n)) else "" for n, _ in self._blocks(key)}):
                yield key, upload

    def create(self, key: str, run: str) -> str:
        with self._lock:
            self._open.add(key)
        return f"ckpttool-{secrets.token_hex(8)}"

    def put_part(self, key: str, upload: str, number: int, data: Slice) -> str:
        name = f"{upload}-{number:05}"
        with self._told(key):
            self._container.get_blob_client(key).stage_block(
                name, data, length=data.size, headers={"Content-MD5": _md5(data)}
            )
        return name

    def parts(self, key: str, upload: str) -> dict[int, SentPart]:
        with self._lock:
            self._open.add(key)
        found = ((_PART.fullmatch(name), name, size) for name, size in self._blocks(key))
        return {int(m[2]): SentPart(size, name) for m, name, size in found if m and m[1] == upload}

    def complete(self, key: str, upload: str, parts: Mapping[int, str], run: str) -> None:
        with self._told(key, upload=True):  # blocks that are committed already do as well: it may be repeated
            listed = [BlobBlock(name) for _, name in sorted(parts.items())]
            self._container.get_blob_client(key).commit_block_list(listed, metadata={RUN: run})
        with self._lock:
            self._open.discard(key)

    def abort(self, key: str, upload: str) -> None:
        """An empty blob discards the blocks; it is there for a moment, unless there is another one."""
        with self._lock:
            self._open.discard(key)
        with self._told(key), suppress(exceptions.ResourceExistsError, exceptions.ResourceNotFoundError):
            blob = self._container.get_blob_client(key)
            made = blob.commit_block_list([], match_condition=MatchConditions.IfMissing)
            blob.delete_blob(etag=made["etag"], match_condition=MatchConditions.IfNotModified)

    def close(self) -> None:
        pass  # the client is that of the process

    def _blocks(self, key: str) -> list[tuple[str, int]]:
        """Names and sizes of blocks that wait."""
        with self._told(key), suppress(exceptions.ResourceNotFoundError):
            _, waiting = self._container.get_blob_client(key).get_block_list("uncommitted")
            return [(str(b.id), int(b.size)) for b in waiting]
        return []

    @contextmanager
    def _told(self, key: str, *, taken: bool = False, upload: bool = False) -> Iterator[None]:
        """What Azure's libraries raise, as this package's errors; a blob that is not there stays what it is.

        ``taken``, ``upload``: whether a condition may fail, and whether an upload may be gone.
        """
        where = f"az://{self._name}/{key}"
        try:
            yield
        except exceptions.HttpResponseError as e:
            code, status = azure.code_of(e), e.status_code or 0
            if code == "ContainerNotFound":
                raise OutputError("the container does not exist", where=where, hint="make it, or check its name") from e
            if taken and (status == 412 or code == "BlobAlreadyExists"):
                raise TakenError from e
            if upload and code in ("InvalidBlockList", "BlobNotFound"):
                raise GoneError from e
            if status == 404 or code == "BlobAlreadyExists":
                raise
            if status in (401, 403):
                raise _explained(e, where) from e
            if status >= 500 or status == 429 or status in REDIRECTS:
                raise azure.explained(e, where) from e
            raise OutputError(f"Azure refuses a request ({code or status})", where=where) from e
        except exceptions.AzureError as e:
            raise azure.explained(e, where) from e
        except TypeError as e:  # what Azure's library makes of an error in JSON that has no message
            raise AccessError("the answer is not one of Azure's", where=where, hint="does a proxy answer?") from e


def _explained(e: exceptions.HttpResponseError, where: str) -> Exception:
    found = azure.explained(e, where)
    if isinstance(found, IncompleteError) or not hasattr(found, "hint"):
        return found
    found.hint = f"{found.hint}; {_RIGHTS}" if found.hint else _RIGHTS
    return found


def _staged(blob: BlobClient, data: Slice) -> Iterator[str]:
    """Send all of a file, block by block. Returns their names."""
    number, left = 0, data.size
    data.seek(0)
    upload = f"ckpttool-{secrets.token_hex(8)}"
    while left:
        pieces = bytearray()
        while len(pieces) < BLOCK and (piece := data.read()):
            pieces += piece
        if not pieces:
            raise EOFError("the file is shorter than it was made")
        number, left = number + 1, left - len(pieces)
        name = f"{upload}-{number:05}"
        blob.stage_block(name, bytes(pieces), validate_content=True)
        yield name


def _md5(data: Slice) -> str:
    sum_ = hashlib.md5(usedforsecurity=False)
    data.seek(0)
    while piece := data.read():
        sum_.update(piece)
    data.seek(0)
    return base64.b64encode(sum_.digest()).decode()
