"""Containers of Azure's blob storage: azure-storage-blob logs in, signs, and makes all requests but reads of ranges.

AZURE_STORAGE_CONNECTION_STRING, or AZURE_STORAGE_ACCOUNT with AZURE_STORAGE_KEY, AZURE_STORAGE_SAS_TOKEN or a login
that azure-identity finds (variables, workload or managed identity, ``az login``).

Blocks stand for parts: they are not seen before a list of them is committed, and that replaces a blob at once. An
upload has no name there, so it is in the names of its blocks. Blocks that nobody commits are discarded after a week.

https://learn.microsoft.com/rest/api/storageservices/put-block, put-block-list and get-block-list.
"""

from __future__ import annotations

import base64
import logging
import os
import re
import secrets
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Any, NoReturn

from azure.core import MatchConditions, exceptions
from azure.core.credentials import AzureNamedKeyCredential, AzureSasCredential
from azure.storage.blob import (
    BlobBlock,
    BlobClient,
    BlobPrefix,
    BlobProperties,
    BlobSasPermissions,
    ContainerClient,
    ExponentialRetry,
    generate_blob_sas,
)

from ckpttool.errors import AccessError, CkptError, OutputError
from ckpttool.storage.access import anonymous, check_secret
from ckpttool.storage.buckets import base
from ckpttool.storage.buckets.base import FileSlice, ObjectContent, ObjectInfo, ObjectPage, SentPart, SignedRead
from ckpttool.storage.caches import TimedCache
from ckpttool.storage.http import REDIRECTS, HttpError, led

logging.getLogger("azure").addHandler(logging.NullHandler())  # it would say on stderr what we say better

RUN = "ckpttool_run"
"""Metadata of every blob that is written: by which run."""
BLOCK = 16 << 20
"""Bytes of a block of what is put at once: no more is in memory."""
SCOPE = "https://storage.azure.com/.default"
VERSION = "2021-12-02"
"""The version of the REST API for reads of ranges: what they need is older."""
SIGNED_SECONDS = 600
TRIES = 7
"""Besides the first, after 2, 4, 8, ... seconds."""

_PART = re.compile(r"(ckpttool-[0-9a-f]{16})-(\d{5})")
"""Names of blocks; all of a blob must be equally long."""
_ADDRESS = "AZURE_STORAGE_SERVICE_ENDPOINT"
_LOGIN = (
    "set AZURE_STORAGE_CONNECTION_STRING, or AZURE_STORAGE_ACCOUNT with AZURE_STORAGE_KEY or AZURE_STORAGE_SAS_TOKEN,"
    " or run `az login`; --anonymous reads public containers"
)
_READING = "is the key right? A login needs the role Storage Blob Data Reader, a SAS token the permissions r and l"
_WRITING = "writing needs the role Storage Blob Data Contributor, or a SAS token with the permissions r, c, w, d and l"
_signed: TimedCache[tuple[str, str], tuple[str, dict[str, str]]] = TimedCache(SIGNED_SECONDS / 2)
"""URLs and headers, by container and key."""
_lock = threading.Lock()
_clients: dict[tuple[int, bool, str], ContainerClient] = {}


def open_bucket(name: str, *, writes: bool) -> AzureBucket:
    """The container of this name. Raises AccessError for one that is written where no account is named."""
    if writes:
        container(name)
    return AzureBucket(name, writes=writes)


def container(name: str) -> ContainerClient:
    """The client of this process for a container, for the account that the environment names. Raises AccessError."""
    here = (os.getpid(), anonymous(), name)
    with _lock:
        if here not in _clients:
            try:
                _clients[here] = _made(name)
            except ValueError as e:
                raise AccessError(f"invalid Azure settings: {e}", hint=_LOGIN) from None
        return _clients[here]


def _made(name: str) -> ContainerClient:
    text = _env("AZURE_STORAGE_CONNECTION_STRING")
    retries = ExponentialRetry(initial_backoff=0, increment_base=2, retry_total=TRIES, random_jitter_range=1)
    options: dict[str, Any] = {"retry_policy": retries, "connection_timeout": 10, "read_timeout": 60}
    options["permit_redirects"] = False  # Azure has none, and these would go anywhere
    if text and not anonymous():
        return ContainerClient.from_connection_string(text, name, **options)
    account = _env("AZURE_STORAGE_ACCOUNT", "AZURE_STORAGE_ACCOUNT_NAME")
    url = _env("AZURE_STORAGE_SERVICE_ENDPOINT", "AZURE_STORAGE_ENDPOINT")
    if not account and not url:
        raise AccessError("no Azure account given", where=f"az://{name}", hint=_LOGIN)
    return ContainerClient(
        url or f"https://{account}.blob.core.windows.net", name, credential=_credential(account), **options
    )


def _credential(account: str) -> Any:
    key, sas = _env("AZURE_STORAGE_KEY", "AZURE_STORAGE_ACCOUNT_KEY"), _env("AZURE_STORAGE_SAS_TOKEN")
    if anonymous():
        return None
    if key:
        with suppress(ValueError):
            base64.b64decode(key, validate=True)
            return AzureNamedKeyCredential(account, key)
        raise AccessError(
            "AZURE_STORAGE_KEY is not the key of an account: it is not base64", where="az://", hint=_LOGIN
        )
    if sas:
        return AzureSasCredential(sas.removeprefix("?"))
    from azure.identity import DefaultAzureCredential  # half a second

    return DefaultAzureCredential()


def _env(*names: str) -> str:
    """The first that is set, without spaces and line breaks around it. Raises AccessError for what cannot be sent."""
    for name in names:
        if value := os.environ.get(name, "").strip():
            check_secret(name, value, "az://")
            return value
    return ""


def close() -> None:
    """Close what is open; whoever asks next gets new connections, by the environment of then."""
    _signed.clear()
    with _lock:
        for client in _clients.values():
            client.close()
        _clients.clear()


class AzureBucket:
    """See ``Bucket``. Blocks as of https://learn.microsoft.com/rest/api/storageservices/put-block#remarks."""

    most_parts = 50_000
    part_step = 1 << 20
    lister = "az storage blob list: {}"

    def __init__(self, name: str, *, writes: bool = False) -> None:
        self.name = name
        self.writes = writes
        self._open: set[str] = set()
        """Keys with an upload of this run."""
        self._lock = threading.Lock()

    # -- reading

    def pages(self, prefix: str, *, deep: bool) -> Iterator[ObjectPage]:
        where = self._where(prefix)
        with self._explained(prefix, listing=True):
            blobs = container(self.name)
            found = (
                blobs.list_blobs(prefix or None, include=["metadata"])
                if deep
                else blobs.walk_blobs(prefix or None, include=["metadata"], delimiter="/")
            )
            with base.understood(where):
                for blob_page in found.by_page():
                    files, folders = [], []
                    for item in blob_page:
                        if isinstance(item, BlobPrefix):
                            folders.append(item.name)
                        elif _is_folder(item):
                            folders.append(f"{item.name}/")
                        else:
                            files.append((str(item.name), _info(item)))
                    yield ObjectPage(files, folders)

    def head(self, key: str) -> ObjectInfo:
        with self._explained(key):
            said = self._blob(key).get_blob_properties()
        if _is_folder(said):
            raise base.no_object(self._where(key))
        with base.understood(self._where(key)):
            return _info(said)

    def get(self, key: str) -> ObjectContent | None:
        said: dict[str, str] = {}
        try:
            with self._explained(key):
                down = self._blob(key).download_blob(raw_response_hook=lambda r: said.update(r.http_response.headers))
                data = down.readall()
        except FileNotFoundError:
            return None
        now = parsedate_to_datetime(said["Date"]) if "Date" in said else None
        age = (now - down.properties.last_modified).total_seconds() if now else 0.0
        return ObjectContent(data, str(down.properties.etag), age)

    def signed(self, key: str, tag: str, *, renew: bool) -> SignedRead:
        found = None if renew else _signed.get((self.name, key))
        if found is None:
            with self._explained(key):
                found = _readable(container(self.name), key)
            _signed.put((self.name, key), found)
        url, headers = found
        return SignedRead(url, {"x-ms-version": VERSION, **headers}, tag)

    def explain(self, e: HttpError, key: str) -> NoReturn:
        where = self._where(key)
        base.explain_read(e, where, lambda a: self._meaning(a.headers.get("x-ms-error-code", ""), a.status, where))

    # -- writing

    def put(self, key: str, data: bytes | FileSlice, run: str, *, new: bool = False, replaces: str = "") -> str:
        condition: dict[str, Any] = {"metadata": {RUN: run}}
        if replaces:
            condition |= {"etag": replaces, "match_condition": MatchConditions.IfNotModified}
        elif new:
            condition |= {"match_condition": MatchConditions.IfMissing}
        with self._explained(key, taken=new or bool(replaces)):
            blob = self._blob(key)
            if isinstance(data, FileSlice):
                names = list(_staged(blob, data))
                return str(blob.commit_block_list([BlobBlock(n) for n in names], **condition)["etag"])
            return str(blob.upload_blob(data, overwrite=not new, validate_content=True, **condition)["etag"])

    def delete(self, key: str) -> None:
        with self._lock:
            if key in self._open:
                return  # its blocks would go, too; the commit replaces it
        with suppress(FileNotFoundError), self._explained(key):
            self._blob(key).delete_blob()

    def uploads(self, prefix: str) -> Iterator[tuple[str, str]]:
        """Uploads of blobs that are not there. Blocks that wait beside an old blob go when something is written."""
        there = {key for page in self.pages(prefix, deep=True) for key, _ in page.files}
        with self._explained(prefix, listing=True):
            names = container(self.name).list_blobs(prefix or None, include=["uncommittedblobs"])
            waiting = [n for found in names if (n := str(found.name)) not in there]
        for key in waiting:
            for upload in sorted({m[1] if (m := _PART.fullmatch(n)) else "" for n, _ in self._blocks(key)}):
                yield key, upload

    def create(self, key: str, run: str) -> str:
        with self._lock:
            self._open.add(key)
        return f"ckpttool-{secrets.token_hex(8)}"

    def put_part(self, key: str, upload: str, number: int, data: FileSlice) -> str:
        name = f"{upload}-{number:05}"
        with self._explained(key):
            self._blob(key).stage_block(name, data, length=data.size, headers={"Content-MD5": base.md5(data)})
        return name

    def parts(self, key: str, upload: str) -> dict[int, SentPart]:
        with self._lock:
            self._open.add(key)
        found = ((_PART.fullmatch(name), name, size) for name, size in self._blocks(key))
        return {int(m[2]): SentPart(size, name) for m, name, size in found if m and m[1] == upload}

    def complete(self, key: str, upload: str, parts: Mapping[int, str], run: str) -> None:
        with self._explained(key, upload=True):  # blocks that are committed already do as well: it may be repeated
            listed = [BlobBlock(name) for _, name in sorted(parts.items())]
            self._blob(key).commit_block_list(listed, metadata={RUN: run})
        with self._lock:
            self._open.discard(key)

    def abort(self, key: str, upload: str) -> None:
        """An empty blob discards the blocks; it is there for a moment, unless there is another one."""
        with self._lock:
            self._open.discard(key)
        with suppress(base.TakenError, FileNotFoundError), self._explained(key, taken=True):
            made = self._blob(key).commit_block_list([], match_condition=MatchConditions.IfMissing)
            self._blob(key).delete_blob(etag=made["etag"], match_condition=MatchConditions.IfNotModified)

    def _blocks(self, key: str) -> list[tuple[str, int]]:
        """Names and sizes of blocks that wait."""
        with suppress(FileNotFoundError), self._explained(key):
            _, waiting = self._blob(key).get_block_list("uncommitted")
            return [(str(b.id), int(b.size)) for b in waiting]
        return []

    def _blob(self, key: str) -> BlobClient:
        return container(self.name).get_blob_client(key)

    # -- what answers mean

    @contextmanager
    def _explained(
        self, key: str, *, taken: bool = False, upload: bool = False, listing: bool = False
    ) -> Iterator[None]:
        """Raises what errors of Azure's libraries mean to users, and FileNotFoundError for a blob that is not there.

        ``taken``, ``upload``: whether a condition may fail (TakenError), and whether an upload may be gone (GoneError).
        """
        where = self._where(key)
        try:
            yield
        except exceptions.HttpResponseError as e:
            code, status = _code(e), e.status_code or 0
            if taken and (status == 412 or code == "BlobAlreadyExists"):
                raise base.TakenError from None
            if upload and code in ("InvalidBlockList", "BlobNotFound"):
                raise base.GoneError from None
            if status in REDIRECTS:
                to = led(e.response.headers.get("Location", "") if e.response else "")
                what = f"the server of the account redirects{to}; refused, because credentials go only to the server"
                hint = f"check the account's name and {_ADDRESS}"
                raise AccessError(f"{what} you named", where=where, hint=hint) from None
            found = self._meaning(code, status, where) if status else AccessError(_NO_LOGIN, where=where, hint=_LOGIN)
            raise (base.unlisted(found, where, _ADDRESS) if listing else found) from None
        except (exceptions.ServiceRequestError, exceptions.ServiceResponseError):
            hint = "check the network and the account's name"
            raise AccessError("Azure does not answer", where=where, hint=hint) from None
        except exceptions.AzureError:
            raise AccessError(_NO_LOGIN, where=where, hint=_LOGIN) from None
        except TypeError:  # what Azure's library makes of an error in JSON that has no message
            raise AccessError(
                "the answer does not come from Azure", where=where, hint="a proxy may have answered"
            ) from None

    def _meaning(self, code: str, status: int, where: str) -> OSError | CkptError:
        """The error for an answer that is one."""
        if code == "ContainerNotFound":
            return base.no_bucket("container", where, "check its name and AZURE_STORAGE_ACCOUNT", writes=self.writes)
        if status == 404:
            return base.no_object(where)
        if code == "AuthenticationFailed":
            hint = f"{_LOGIN}; {_WRITING}" if self.writes else _LOGIN
            return AccessError("Azure does not accept these credentials", where=where, hint=hint)
        if status in (401, 403, 409) and code in ("PublicAccessNotPermitted", "NoAuthenticationInformation"):
            return AccessError("the container is not public", where=where, hint="drop --anonymous")
        if status in (401, 403):
            return AccessError("Azure refuses access", where=where, hint=_WRITING if self.writes else _READING)
        if self.writes and 400 <= status < 500 and status != 429:
            return OutputError(f"Azure refuses a request ({code or status})", where=where)
        return AccessError(f"Azure answers {status} {code}".rstrip(), where=where)

    def _where(self, key: str) -> str:
        return f"az://{self.name}/{key}"


_NO_LOGIN = "the Azure login failed"


def _is_folder(blob: BlobProperties) -> bool:
    """Whether a blob is a directory of an account that has such (a hierarchical namespace)."""
    return (blob.metadata or {}).get("hdi_isfolder") == "true"


def _readable(client: ContainerClient, key: str) -> tuple[str, dict[str, str]]:
    """A URL that can be read for ``SIGNED_SECONDS``, and what it needs besides."""
    blob, credential = client.get_blob_client(key), client.credential
    if credential is None or "?" in blob.url:
        return blob.url, {}
    if hasattr(credential, "signature"):
        return f"{blob.url}?{credential.signature}", {}
    if hasattr(credential, "get_token"):
        return blob.url, {"Authorization": f"Bearer {credential.get_token(SCOPE).token}"}
    signature = generate_blob_sas(
        credential.account_name,
        client.container_name,
        key,
        account_key=credential.account_key,
        permission=BlobSasPermissions(read=True),
        expiry=datetime.now(UTC) + timedelta(seconds=SIGNED_SECONDS),
    )
    return f"{blob.url}?{signature}", {}


def _code(e: exceptions.HttpResponseError) -> str:
    """Azure's name of an error; "" where it says nothing."""
    code = getattr(e, "error_code", None)
    return str(getattr(code, "value", code) or "")


def _info(blob: BlobProperties) -> ObjectInfo:
    tag = str(blob.etag).strip('"') if blob.etag else ""
    return base.object_info(blob.size, tag and f'"{tag}"', (blob.metadata or {}).get(RUN, ""))


def _staged(blob: BlobClient, data: FileSlice) -> Iterator[str]:
    """Send all of a file, block by block. Returns their names."""
    number, left = 0, data.size
    data.seek(0)
    upload = f"ckpttool-{secrets.token_hex(8)}"
    while left:
        pieces = bytearray()
        while len(pieces) < BLOCK and (piece := data.read()):
            pieces += piece
        if not pieces:
            raise EOFError("the file is shorter than when it was written")
        number, left = number + 1, left - len(pieces)
        name = f"{upload}-{number:05}"
        blob.stage_block(name, bytes(pieces), validate_content=True)
        yield name
