"""Containers of Azure's blob storage: azure-storage-blob logs in, lists and signs.

AZURE_STORAGE_CONNECTION_STRING, or AZURE_STORAGE_ACCOUNT with AZURE_STORAGE_KEY, AZURE_STORAGE_SAS_TOKEN or a login
that azure-identity finds (variables, workload or managed identity, ``az login``).
"""

from __future__ import annotations

import base64
import errno
import logging
import os
import threading
import time
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any, NoReturn

from azure.core import exceptions
from azure.core.credentials import AzureNamedKeyCredential, AzureSasCredential
from azure.storage.blob import (
    BlobPrefix,
    BlobProperties,
    BlobSasPermissions,
    ContainerClient,
    ExponentialRetry,
    generate_blob_sas,
)

from ckpttool.errors import AccessError, CkptError, IncompleteError
from ckpttool.storage.access import anonymous, check_secret
from ckpttool.storage.http import REDIRECTS, ChangedError, HttpError, led
from ckpttool.storage.objects import Found, Listing, Signed, bounded, listed, listing, understood

logging.getLogger("azure").addHandler(logging.NullHandler())  # it would say on stderr what we say better

SCOPE = "https://storage.azure.com/.default"
VERSION = "2021-12-02"
"""Of the REST API, for reads: what they need is older."""
SIGNED_SECONDS = 600
TRIES = 7
"""Besides the first, after 2, 4, 8, ... seconds."""

_LOGIN = (
    "set AZURE_STORAGE_CONNECTION_STRING, or AZURE_STORAGE_ACCOUNT with AZURE_STORAGE_KEY or AZURE_STORAGE_SAS_TOKEN,"
    " or run `az login`; --anonymous reads public containers"
)
_lock = threading.Lock()
_clients: dict[tuple[int, bool, str], ContainerClient] = {}


def container(name: str) -> ContainerClient:
    """The client of this process for a container, for the account that the environment names. Raises AccessError."""
    here = (os.getpid(), anonymous(), name)
    with _lock:
        if here not in _clients:
            try:
                _clients[here] = _made(name)
            except ValueError as e:
                raise AccessError(f"the settings for Azure cannot be used: {e}", hint=_LOGIN) from None
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
        raise AccessError("no account of Azure is named", where=f"az://{name}", hint=_LOGIN)
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
    with _lock:
        for client in _clients.values():
            client.close()
        _clients.clear()


class Bucket:
    """A container that is read."""

    lister = "az storage blob list: {}"

    def __init__(self, name: str) -> None:
        self.name = name
        self._signed: dict[str, tuple[float, str, dict[str, str]]] = {}

    def list(self, prefix: str, *, deep: bool = False) -> Listing:
        files, folders, where = {}, set(), self._where(prefix)
        try:
            blobs = container(self.name)
            found = (
                blobs.list_blobs(prefix, include=["metadata"])
                if deep
                else blobs.walk_blobs(prefix, include=["metadata"], delimiter="/")
            )
            with understood(where):
                for page in bounded(found.by_page(), where, deep=deep):
                    for item in page:
                        name = item.name.removeprefix(prefix)
                        if isinstance(item, BlobPrefix):
                            folders.add(name[:-1])
                        elif is_folder(item):
                            folders.add(name)
                        else:
                            files[name] = _found(item)
        except exceptions.AzureError as e:
            raise listed(explained(e, where), where, "AZURE_STORAGE_SERVICE_ENDPOINT") from None
        return listing(files, folders, exists=bool(not prefix or files or folders), deep=deep)

    def head(self, key: str) -> Found:
        where = self._where(key)
        try:
            said = container(self.name).get_blob_client(key).get_blob_properties()
        except exceptions.AzureError as e:
            raise explained(e, where) from None
        if is_folder(said):
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", where)
        with understood(where):
            return _found(said)

    def get(self, key: str, tag: str, *, renew: bool) -> Signed:
        until, url, headers = self._signed.get(key, (0.0, "", {}))
        if renew or time.monotonic() > until:
            try:
                url, headers = _readable(container(self.name), key)
            except exceptions.AzureError as e:
                raise explained(e, self._where(key)) from None
            self._signed[key] = (time.monotonic() + SIGNED_SECONDS / 2, url, headers)
        return Signed(url, {"x-ms-version": VERSION, **headers}, tag)

    def explain(self, e: HttpError, key: str) -> NoReturn:
        if isinstance(e, ChangedError) or e.answer is None or e.status >= 500:
            e.filename = self._where(key)
            raise e
        raise _meaning(e.answer.headers.get("x-ms-error-code", ""), e.status, self._where(key)) from None

    def _where(self, key: str) -> str:
        return f"az://{self.name}/{key}"


def is_folder(blob: BlobProperties) -> bool:
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


def code_of(e: exceptions.HttpResponseError) -> str:
    """What Azure calls an error; "" where it says nothing."""
    code = getattr(e, "error_code", None)
    return str(getattr(code, "value", code) or "")


def explained(e: exceptions.AzureError, where: str) -> OSError | CkptError:
    """What an error of Azure's libraries means to users."""
    if isinstance(e, exceptions.HttpResponseError) and e.status_code in REDIRECTS:
        to = led(e.response.headers.get("Location", "") if e.response else "")
        what = f"the server of the account redirects{to}; refused, because credentials go only to the server you named"
        return AccessError(what, where=where, hint="check the account's name and AZURE_STORAGE_SERVICE_ENDPOINT")
    if isinstance(e, exceptions.HttpResponseError) and e.status_code:
        return _meaning(code_of(e), e.status_code, where)
    if isinstance(e, exceptions.ServiceRequestError | exceptions.ServiceResponseError):
        return AccessError("Azure does not answer", where=where, hint="check the network and the account's name")
    return AccessError("Azure does not log in", where=where, hint=_LOGIN)


def _meaning(code: str, status: int, where: str) -> OSError | CkptError:
    if code == "ContainerNotFound":
        hint = "check its name and AZURE_STORAGE_ACCOUNT"
        return IncompleteError("the container does not exist", where=where, hint=hint)
    if status == 404:
        return FileNotFoundError(errno.ENOENT, "No such file or directory", where)
    if code == "AuthenticationFailed":
        return AccessError("Azure does not accept these credentials", where=where, hint=_LOGIN)
    if status in (401, 403, 409) and code in ("PublicAccessNotPermitted", "NoAuthenticationInformation"):
        return AccessError("the container is not public", where=where, hint="drop --anonymous")
    if status in (401, 403):
        hint = "is the key right? A login needs the role Storage Blob Data Reader, a SAS token the permissions r and l"
        return AccessError("Azure refuses access", where=where, hint=hint)
    return AccessError(f"Azure answers {status} {code}".rstrip(), where=where)


def _found(blob: BlobProperties) -> Found:
    size, tag = int(blob.size), str(blob.etag).strip('"')
    if size < 0 or not blob.etag:
        raise ValueError
    return Found(size, f'"{tag}"')
