"""Buckets of Google Cloud Storage: google-auth logs in, and the JSON API lists and reads.

Credentials are Application Default Credentials: GOOGLE_APPLICATION_CREDENTIALS, ``gcloud auth application-default
login``, the service account of the machine. STORAGE_EMULATOR_HOST names another server, which gets none.

https://cloud.google.com/storage/docs/json_api/v1/objects: list, get; ``ifGenerationMatch`` is the condition of a GET.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn
from urllib.parse import quote, urlencode

import google.auth
import urllib3
from google.auth import exceptions
from google.auth.transport.urllib3 import Request

from ckpttool.errors import AccessError, CkptError, IncompleteError, plain
from ckpttool.storage.access import anonymous
from ckpttool.storage.http import Answer, ChangedError, HttpError, client
from ckpttool.storage.objects import Found, Listing, Signed, bounded, listing, understood

SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"
_LOGIN = (
    "run `gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS; "
    "--anonymous reads public buckets"
)
_lock = threading.Lock()
_credentials: dict[int, Any] = {}


def endpoint() -> str:
    """Where the API is, without a slash at the end."""
    host = os.environ.get("STORAGE_EMULATOR_HOST", "").rstrip("/")
    return host if not host or "://" in host else f"http://{host}"


def authorization(where: str) -> dict[str, str]:
    """The header that goes with each request; none without a login. Raises AccessError."""
    if anonymous() or endpoint():
        return {}
    try:
        with _lock:
            here = os.getpid()
            if here not in _credentials:
                _credentials[here] = google.auth.default(scopes=[SCOPE])[0]
            credentials = _credentials[here]
            if not credentials.valid:
                credentials.refresh(Request(urllib3.PoolManager()))
            return {"Authorization": f"Bearer {credentials.token}"}
    except exceptions.DefaultCredentialsError as e:
        why = str(e.args[0]) if e.args else ""
        if file := os.environ.get("GOOGLE_APPLICATION_CREDENTIALS"):
            what = f"GOOGLE_APPLICATION_CREDENTIALS cannot be used: {why}"
            raise AccessError(plain(what), where=[where, file], hint=_LOGIN) from None
        raise AccessError("no credentials for Google Cloud are found", where=where, hint=_LOGIN) from None
    except exceptions.GoogleAuthError as e:
        raise AccessError(f"Google Cloud does not log in: {e.args[0]}", where=where, hint=_LOGIN) from None


def close() -> None:
    """Log out."""
    with _lock:
        _credentials.clear()


class Bucket:
    """A bucket that is read."""

    lister = "gcloud storage ls {}/"

    def __init__(self, name: str) -> None:
        self.name = name
        self._url = f"{endpoint() or 'https://storage.googleapis.com'}/storage/v1/b/{quote(name, safe='')}/o"

    def list(self, prefix: str, *, deep: bool = False) -> Listing:
        files: dict[str, Found] = {}
        folders: set[str] = set()
        where = self._where(prefix)
        with understood(where):
            for said in bounded(self._pages(prefix, deep=deep), where, deep=deep):
                for o in said.get("items", ()):
                    files[o["name"].removeprefix(prefix)] = _found(o)
                folders |= {p.removeprefix(prefix)[:-1] for p in said.get("prefixes", ())}
        return listing(files, folders, exists=bool(not prefix or files or folders), deep=deep)

    def _pages(self, prefix: str, *, deep: bool) -> Iterator[Mapping[str, Any]]:
        query = {"prefix": prefix, "fields": "items(name,size,generation),prefixes,nextPageToken"}
        if not deep:
            query["delimiter"] = "/"
        while True:
            said = self._ask(f"{self._url}?{urlencode(query)}", prefix)
            yield said
            if not said.get("nextPageToken"):
                return
            query["pageToken"] = str(said["nextPageToken"])

    def head(self, key: str) -> Found:
        said = self._ask(f"{self._url}/{quote(key, safe='')}?fields=size,generation", key, of_object=True)
        with understood(self._where(key)):
            return _found(said)

    def get(self, key: str, tag: str, *, renew: bool) -> Signed:
        query = urlencode({"alt": "media", "ifGenerationMatch": tag})
        headers = authorization(self._where(key))
        return Signed(f"{self._url}/{quote(key, safe='')}?{query}", headers, None, {"x-goog-generation": tag})

    def explain(self, e: HttpError, key: str) -> NoReturn:
        if isinstance(e, ChangedError) or e.answer is None or e.status >= 500:
            e.filename = self._where(key)
            raise e
        raise _meaning(e.answer, self._where(key), of_object=True) from None

    def _ask(self, url: str, key: str, *, of_object: bool = False) -> Mapping[str, Any]:
        where = self._where(key)
        try:
            answer = client().request("GET", url, headers=authorization(where))
            if answer.status != 200:
                raise _meaning(answer, where, of_object=of_object)
            said = answer.json()
        except HttpError as e:
            hint = e.hint or "check the network and the proxy"
            raise AccessError(str(e.strerror), where=where, hint=hint) from None
        if not isinstance(said, dict):
            raise AccessError("the answer is not one of Google Cloud Storage", where=where)
        return said

    def _where(self, key: str) -> str:
        return f"gs://{self.name}/{key}"


def _found(o: Mapping[str, Any]) -> Found:
    size, generation = int(o["size"]), int(o["generation"])
    if size < 0:
        raise ValueError
    return Found(size, str(generation))


def _meaning(answer: Answer, where: str, *, of_object: bool) -> OSError | CkptError:
    if answer.status == 404 and of_object:
        return FileNotFoundError(errno.ENOENT, "No such file or directory", where)
    if answer.status == 404:
        return IncompleteError("the bucket does not exist", where=where, hint="check its name")
    if answer.status == 401 and not anonymous():
        return AccessError("Google Cloud does not accept these credentials", where=where, hint=_LOGIN)
    if answer.status in (401, 403):
        hint = (
            "the bucket is not public: drop --anonymous"
            if anonymous()
            else "this account needs the role Storage Object Viewer, and permission to list"
        )
        return AccessError("Google Cloud refuses access", where=where, hint=hint)
    if answer.status == 429:
        hint = "the bucket gets too many requests: use fewer --connections, or try later"
        return AccessError("Google Cloud answers 429", where=where, hint=hint)
    return AccessError(f"Google Cloud answers {answer.status}", where=where)
