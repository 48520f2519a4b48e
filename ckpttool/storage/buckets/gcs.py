"""Buckets of Google Cloud Storage: google-auth logs in, the JSON API lists and reads, and the XML API writes.

Credentials are Application Default Credentials: GOOGLE_APPLICATION_CREDENTIALS, ``gcloud auth application-default
login``, the service account of the machine. STORAGE_EMULATOR_HOST names another server, which gets none.

The XML API has uploads in parts. It speaks S3's language with other words, so boto3 speaks it, too: logins, versions
(generations), metadata and conditions are headers of Google's own; checksums are MD5.

https://cloud.google.com/storage/docs/json_api/v1/objects: list, get; ``ifGenerationMatch`` is the condition of a GET.
https://cloud.google.com/storage/docs/xml-api/reference-headers and multipart-uploads.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn
from urllib.parse import quote, urlencode

import google.auth
import urllib3
from google.auth import exceptions
from google.auth.transport.urllib3 import Request

from ckpttool.errors import AccessError, CkptError, OutputError, plain
from ckpttool.storage.access import anonymous
from ckpttool.storage.buckets import base, s3
from ckpttool.storage.buckets.base import ObjectInfo, ObjectPage, SignedRead
from ckpttool.storage.http import Answer, HttpError, client

SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"
_LOGIN = (
    "run `gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS; "
    "--anonymous reads public buckets"
)
_META, _GOOGLE_META = "x-amz-meta-", "x-goog-meta-"
_IF = "x-goog-if-generation-match"
_lock = threading.Lock()
_credentials: dict[int, Any] = {}
_writers: dict[tuple[int, str], Any] = {}
"""Clients of the XML API, by process and address."""


def open_bucket(name: str, *, writes: bool) -> GcsBucket:
    """The bucket of this name. Raises AccessError for one that is written where nobody has logged in."""
    if writes:
        authorization(f"gs://{name}")
    return GcsBucket(name, writes=writes)


def endpoint() -> str:
    """Where the API is, without a slash at the end; "" for Google's."""
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
            what = f"cannot use GOOGLE_APPLICATION_CREDENTIALS: {why}"
            raise AccessError(plain(what), where=[where, file], hint=_LOGIN) from None
        raise AccessError("no Google Cloud credentials found", where=where, hint=_LOGIN) from None
    except exceptions.GoogleAuthError as e:
        raise AccessError(f"the Google Cloud login failed: {e.args[0]}", where=where, hint=_LOGIN) from None


def close() -> None:
    """Log out, and close what is open."""
    with _lock:
        _credentials.clear()
        for made in _writers.values():
            made.close()
        _writers.clear()


class GcsBucket(s3.S3Bucket):
    """See ``Bucket``. Tags of objects are generations."""

    scheme, cloud, address = "gs", "Google Cloud", "the proxy"
    lister = "gcloud storage ls {}/"
    rights = "writing needs the role Storage Object User, or storage.objects.* and storage.multipartUploads.*"

    def __init__(self, name: str, *, writes: bool = False) -> None:
        super().__init__(name, writes=writes)
        self._url = f"{endpoint() or 'https://storage.googleapis.com'}/storage/v1/b/{quote(name, safe='')}/o"

    # -- the JSON API

    def pages(self, prefix: str, *, deep: bool) -> Iterator[ObjectPage]:
        query = {"prefix": prefix, "fields": "items(name,size,generation),prefixes,nextPageToken"}
        if not deep:
            query["delimiter"] = "/"
        while True:
            said = self._ask(f"{self._url}?{urlencode(query)}", prefix)
            with base.understood(self._where(prefix)):
                files = [(o["name"], base.object_info(o["size"], int(o["generation"]))) for o in said.get("items", ())]
                if not all(isinstance(key, str) for key, _ in files):
                    raise TypeError
                page = ObjectPage(files, [str(p) for p in said.get("prefixes", ())])
            yield page
            if not said.get("nextPageToken"):
                return
            query["pageToken"] = str(said["nextPageToken"])

    def head(self, key: str) -> ObjectInfo:
        said = self._ask(f"{self._url}/{quote(key, safe='')}?fields=size,generation,metadata", key, of_object=True)
        with base.understood(self._where(key)):
            return base.object_info(said["size"], int(said["generation"]), said.get("metadata", {}).get(s3.RUN, ""))

    def signed(self, key: str, tag: str, *, renew: bool) -> SignedRead:
        query = urlencode({"alt": "media", "ifGenerationMatch": tag})
        headers = authorization(self._where(key))
        return SignedRead(f"{self._url}/{quote(key, safe='')}?{query}", headers, None, {"x-goog-generation": tag})

    def explain(self, e: HttpError, key: str) -> NoReturn:
        where = self._where(key)
        base.explain_read(e, where, lambda answer: self._meaning("", answer.status, where))

    def _ask(self, url: str, key: str, *, of_object: bool = False) -> Mapping[str, Any]:
        where = self._where(key)
        try:
            answer: Answer = client().request("GET", url, headers=authorization(where))
            if answer.status != 200:
                raise self._meaning("", answer.status, where, of_object=of_object)
            said = answer.json()
        except HttpError as e:
            hint = e.hint or "check the network and the proxy"
            raise AccessError(str(e.strerror), where=where, hint=hint) from None
        if not isinstance(said, dict):
            raise AccessError("the answer does not come from Google Cloud Storage", where=where)
        return said

    # -- the XML API

    def _client(self) -> Any:
        url = endpoint() or "https://storage.googleapis.com"
        here = (os.getpid(), url)
        with _lock:
            if here not in _writers:
                made = s3.new_client(signed=False, endpoint=url)
                made.meta.events.register("before-send.s3", _to_google)
                for operation in ("PutObject", "GetObject"):
                    made.meta.events.register(f"after-call.s3.{operation}", _from_google)
                _writers[here] = made
            return _writers[here]

    def _meaning(
        self, code: str, status: int, where: str, text: str = "", *, of_object: bool = True
    ) -> OSError | CkptError:
        if code == "NoSuchBucket" or (status == 404 and not of_object and not code):
            return base.no_bucket("bucket", where, "check its name", writes=self.writes)
        if status == 404 and of_object:
            return base.no_object(where)
        if status == 401 and not anonymous():
            return AccessError("Google Cloud does not accept these credentials", where=where, hint=_LOGIN)
        if status in (401, 403):
            return AccessError("Google Cloud refuses access", where=where, hint=self._denied())
        if status == 429:
            hint = "the bucket gets too many requests: set CKPTTOOL_CONNECTIONS=4, or try later"
            return AccessError("Google Cloud answers 429", where=where, hint=hint)
        if self.writes and 400 <= status < 500:
            what = f"Google Cloud refuses a request ({code or status}): {text or code or status}"
            return OutputError(what, where=where)
        return AccessError(f"Google Cloud answers {status}", where=where)

    def _denied(self) -> str:
        if self.writes:
            return self.rights
        if anonymous():
            return "the bucket is not public: drop --anonymous"
        return "this account needs the role Storage Object Viewer, and permission to list"


def _to_google(request: Any, **_: Any) -> None:
    """Change a request, before each try, to what Google reads."""
    old = {k.lower(): v.decode() if isinstance(v, bytes) else str(v) for k, v in request.headers.items()}
    new = authorization("gs://")
    for name, value in old.items():
        if name.startswith(_META):
            new[_GOOGLE_META + name.removeprefix(_META)] = value
        elif name == "if-none-match":
            new[_IF] = "0"
        elif name == "if-match":
            new[_IF] = value
        elif name == "x-amz-checksum-crc32":
            new["Content-MD5"] = base.md5(request.body)
    for name in list(request.headers.keys()):
        if name.lower().startswith(("x-amz-", "amz-sdk-", "if-")):
            del request.headers[name]
    for name, value in new.items():
        request.headers[name] = value


def _from_google(parsed: dict[str, Any], **_: Any) -> None:
    """Change an answer to what ``S3Bucket`` reads."""
    headers = parsed["ResponseMetadata"]["HTTPHeaders"]
    if "x-goog-generation" in headers:
        parsed["ETag"] = headers["x-goog-generation"]
