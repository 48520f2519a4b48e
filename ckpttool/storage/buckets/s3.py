"""Buckets of S3, and of what speaks like it: boto3 logs in, signs, and makes all requests but reads of ranges.

Everything that the AWS tools read is read by boto3: AWS_PROFILE, AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, AWS_REGION,
~/.aws, web identities, roles of instances and containers. It tries again by itself (``standard``: backoff with jitter,
a budget of retries for each client, errors inside a 200). It is imported when a client is made.
"""

from __future__ import annotations

import os
import random
import re
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import partial
from typing import Any, NoReturn
from urllib.parse import unquote_plus

from botocore import exceptions

from ckpttool.errors import AccessError, CkptError, OutputError
from ckpttool.storage.access import anonymous, check_secret
from ckpttool.storage.buckets import base
from ckpttool.storage.buckets.base import FileSlice, ObjectContent, ObjectInfo, ObjectPage, SentPart, SignedRead
from ckpttool.storage.caches import TimedCache
from ckpttool.storage.http import REDIRECTS, Answer, HttpError, led

RUN = "ckpttool-run"
"""User metadata of every object that is written: by which run."""
TRIES, ODD_TRIES = 10, 3
"""Tries of a request; those of one whose answer is not S3's."""
CONNECTIONS = 64
"""Kept at most; who sends decides how many are used."""
SIGNED_SECONDS = 600
"""Seconds that a signed URL is valid; it is renewed after half of that."""

_CODE = re.compile(rb"<Code>([A-Za-z0-9.]{1,60})</Code>")
_AMAZON = re.compile(r"https://s3[.-][a-z0-9.-]*amazonaws\.com(\.cn)?")
_MISSING = {"404", "NoSuchKey", "NotFound"}
_TAKEN = {"412", "PreconditionFailed", "409", "ConditionalRequestConflict"}
_REGION = "the bucket is in another region: set AWS_REGION"
_EXPIRED = "the session has expired: log in again, for example with `aws sso login`"
_HINTS = {
    "InvalidAccessKeyId": "the access key is unknown there: check AWS_PROFILE, AWS_ACCESS_KEY_ID and AWS_ENDPOINT_URL",
    "SignatureDoesNotMatch": "the secret key is wrong: check AWS_SECRET_ACCESS_KEY or AWS_PROFILE",
    **dict.fromkeys(("ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired"), _EXPIRED),
    "InvalidToken": "the session token is wrong or has expired: log in again, for example with `aws sso login`",
    "RequestTimeTooSkewed": "the clock of this machine is wrong",
    **dict.fromkeys(
        ("301", "PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException"), _REGION
    ),
    "InvalidObjectState": "the object is archived (Glacier): restore it first",
    "RequestTimeout": "the network is slow: set CKPTTOOL_CONNECTIONS=4 and try again",
    "SlowDown": "the bucket gets too many requests: set CKPTTOOL_CONNECTIONS=4, or try later",
}
_LOGIN = "set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; --anonymous reads public buckets"

_lock = threading.Lock()
_clients: dict[tuple[int, bool, str | None, str], Any] = {}
_signed: TimedCache[tuple[str, str], str] = TimedCache(SIGNED_SECONDS / 2)
"""URLs, by bucket and key."""


def open_bucket(name: str, *, writes: bool) -> S3Bucket:
    """The bucket of this name. Asks nothing."""
    return S3Bucket(name, writes=writes)


def client(region: str | None = None, style: str = "") -> Any:
    """The client of this process, for S3 as the environment has it, or for a region of it.

    ``style``: how URLs name buckets, "virtual" or "path". Raises AccessError for broken settings.
    """
    here = (os.getpid(), anonymous(), region, style)  # connections do not survive a fork
    with _lock:
        if here not in _clients:
            _clients[here] = new_client(region, style, signed=not anonymous())
        return _clients[here]


def new_client(region: str | None = None, style: str = "", *, signed: bool, endpoint: str | None = None) -> Any:
    """A client for S3, or for another endpoint that speaks its language. Raises AccessError for broken settings."""
    import boto3
    from botocore import UNSIGNED
    from botocore.config import Config

    config = Config(
        signature_version="s3v4" if signed else UNSIGNED,
        retries={"mode": "standard", "total_max_attempts": TRIES},
        max_pool_connections=CONNECTIONS,
        connect_timeout=10,
        read_timeout=60,
        # Checksums are given in a form that every store takes.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        s3={"addressing_style": style} if style else None,
    )
    try:
        session = boto3.Session()
        region = region or session.region_name or "us-east-1"  # buckets elsewhere are found by a redirect
        if signed:
            _check_keys(session)
        made = session.client("s3", region_name=region, endpoint_url=endpoint, config=config)
    except (exceptions.BotoCoreError, ValueError) as e:
        raise AccessError(f"invalid S3 settings: {e}", hint=_LOGIN) from None
    if not _AMAZON.fullmatch(made.meta.endpoint_url):
        made.meta.events.register("before-parse.s3", _refuse_redirect)
    if made.meta.endpoint_url.startswith("https:"):
        # TLS and the CRC protect the bytes; a SHA-256 for the signature would cost as much as both.
        made.meta.config.s3 = {**(made.meta.config.s3 or {}), "payload_signing_enabled": False}
    return made


def _check_keys(session: Any) -> None:
    """Raises AccessError for keys that cannot be sent. Those that a server gives out are not asked for yet."""
    from botocore.credentials import Credentials

    keys = session.get_credentials()
    if type(keys) is not Credentials:
        return
    env = keys.method == "env"
    for name, value in (
        ("AWS_ACCESS_KEY_ID", keys.access_key),
        ("AWS_SECRET_ACCESS_KEY", keys.secret_key),
        ("AWS_SESSION_TOKEN", keys.token or ""),
    ):
        check_secret(name if env else name.lower(), value, "s3://" if env else f"{keys.method} (AWS_PROFILE)")


class _RedirectedError(exceptions.BotoCoreError):  # type: ignore[misc]
    """The server that AWS_ENDPOINT_URL names leads elsewhere; botocore would take that for another region, for ever."""

    fmt = "the server redirects{to}; refused, because credentials go only to the server you named"


def _refuse_redirect(response_dict: dict[str, Any], **_: Any) -> None:
    if response_dict["status_code"] in REDIRECTS:
        raise _RedirectedError(to=led(response_dict["headers"].get("location", "")))


def close() -> None:
    """Close what is open; whoever asks next gets new connections, by the environment of then."""
    _signed.clear()
    with _lock:
        for made in _clients.values():
            made.close()
        _clients.clear()


class S3Bucket:
    """See ``Bucket``. Parts as of https://docs.aws.amazon.com/AmazonS3/latest/userguide/qfacts.html."""

    most_parts = 10_000
    part_step = 1 << 20
    lister = "aws s3 ls {}/"
    scheme, cloud, address = "s3", "S3", "AWS_ENDPOINT_URL"
    rights = (
        "writing needs s3:ListBucket, s3:GetObject, s3:PutObject, s3:DeleteObject, s3:ListBucketMultipartUploads,"
        " s3:ListMultipartUploadParts and s3:AbortMultipartUpload"
    )

    def __init__(self, name: str, *, writes: bool = False) -> None:
        self.name = name
        self.writes = writes
        self._region: str | None = None

    # -- reading

    def pages(self, prefix: str, *, deep: bool) -> Iterator[ObjectPage]:
        where = self._where(prefix)
        delimiter: dict[str, Any] = {} if deep else {"Delimiter": "/"}
        following = {"ContinuationToken": "NextContinuationToken"}
        for said in self._answers("list_objects_v2", prefix, following, Prefix=prefix, **delimiter):
            with base.understood(where):
                files = [(o["Key"], base.object_info(o["Size"], o["ETag"])) for o in said.get("Contents", ())]
                page = ObjectPage(files, [p["Prefix"] for p in said.get("CommonPrefixes", ())])
            yield page

    def head(self, key: str) -> ObjectInfo:
        said = self._call("head_object", key, Key=key)
        with base.understood(self._where(key)):
            return base.object_info(said["ContentLength"], said["ETag"], said.get("Metadata", {}).get(RUN, ""))

    def get(self, key: str) -> ObjectContent | None:
        try:
            said = self._call("get_object", key, Key=key)
        except FileNotFoundError:
            return None
        with base.understood(self._where(key)):
            date = said["ResponseMetadata"]["HTTPHeaders"].get("date")
            now = parsedate_to_datetime(date) if date else datetime.now(UTC)
            return ObjectContent(said["Body"], said["ETag"], (now - said["LastModified"]).total_seconds())

    def signed(self, key: str, tag: str, *, renew: bool) -> SignedRead:
        url = None if renew else _signed.get((self.name, key))
        if url is None:
            at = {"Bucket": self.name, "Key": key}
            with self._explained(key):
                url = str(self._signer().generate_presigned_url("get_object", at, ExpiresIn=SIGNED_SECONDS))
            _signed.put((self.name, key), url)
        return SignedRead(url, {}, tag)

    def _signer(self) -> Any:
        """The client that signs: for the region of the bucket, which botocore learns only in requests of its own."""
        if self._region is None:
            region = ""
            if _AMAZON.fullmatch(client().meta.endpoint_url):
                region = self._look()["ResponseMetadata"]["HTTPHeaders"].get("x-amz-bucket-region", "")
            self._region = region
        # Of its own accord it would sign for the address of all regions, where a redirect makes the signature wrong.
        return client(self._region, "path" if "." in self.name else "virtual") if self._region else client()

    def _look(self) -> Any:
        try:
            return client().head_bucket(Bucket=self.name)
        except exceptions.ClientError as e:  # it names the region to those who may not look, too
            return e.response

    def explain(self, e: HttpError, key: str) -> NoReturn:
        base.explain_read(e, self._where(key), partial(self._answered, key))

    def _answered(self, key: str, answer: Answer) -> OSError | CkptError:
        code = _CODE.search(answer.body)
        return self._meaning(code[1].decode() if code else "", answer.status, self._where(key))

    # -- writing

    def put(self, key: str, data: bytes | FileSlice, run: str, *, new: bool = False, replaces: str = "") -> str:
        condition: dict[str, Any] = {"IfNoneMatch": "*"} if new else {"IfMatch": replaces} if replaces else {}
        given: dict[str, Any] = {"Key": key, "Body": data, "ChecksumCRC32": base.crc32(data), "Metadata": {RUN: run}}
        try:
            return str(self._call("put_object", key, taken=bool(condition), **given, **condition)["ETag"])
        except _NotImplementedError:
            if not condition:
                raise
        # A store without conditions. Whoever puts reads again afterwards, so one of two notices.
        there = self.get(key)
        if (there.tag if there else "") != replaces:
            raise base.TakenError
        return str(self._call("put_object", key, **given)["ETag"])

    def delete(self, key: str) -> None:
        self._call("delete_object", key, Key=key)

    def uploads(self, prefix: str) -> Iterator[tuple[str, str]]:
        following = {"KeyMarker": "NextKeyMarker", "UploadIdMarker": "NextUploadIdMarker"}
        given: dict[str, Any] = {"Prefix": prefix, "EncodingType": "url"}
        for said in self._answers("list_multipart_uploads", prefix, following, **given):
            plain = unquote_plus if said.get("EncodingType") == "url" else str
            yield from [(plain(u["Key"]), u["UploadId"]) for u in said.get("Uploads", ())]

    def create(self, key: str, run: str) -> str:
        given: dict[str, Any] = {"Key": key, "Metadata": {RUN: run}, "ChecksumAlgorithm": "CRC32"}
        return str(self._call("create_multipart_upload", key, **given)["UploadId"])

    def put_part(self, key: str, upload: str, number: int, data: FileSlice) -> str:
        at: dict[str, Any] = {"Key": key, "UploadId": upload, "PartNumber": number}
        return _tag(self._call("upload_part", key, upload=True, Body=data, ChecksumCRC32=base.crc32(data), **at))

    def parts(self, key: str, upload: str) -> dict[int, SentPart]:
        found: dict[int, SentPart] = {}
        following = {"PartNumberMarker": "NextPartNumberMarker"}
        for said in self._answers("list_parts", key, following, upload=True, Key=key, UploadId=upload):
            with base.understood(self._where(key)):
                found |= {p["PartNumber"]: SentPart(p["Size"], _tag(p)) for p in said.get("Parts", ())}
        return found

    def complete(self, key: str, upload: str, parts: Mapping[int, str], run: str) -> None:
        names = ("ETag", "ChecksumCRC32")
        rows = [{"PartNumber": n} | dict(zip(names, tag.split(), strict=False)) for n, tag in sorted(parts.items())]
        named: dict[str, Any] = {"Key": key, "UploadId": upload, "MultipartUpload": {"Parts": rows}}
        self._call("complete_multipart_upload", key, upload=True, **named)

    def abort(self, key: str, upload: str) -> None:
        with suppress(base.GoneError):
            self._call("abort_multipart_upload", key, upload=True, Key=key, UploadId=upload)

    # -- requests, and what their answers mean

    def _client(self) -> Any:
        return client()

    def _answers(
        self, operation: str, key: str, following: Mapping[str, str], *, upload: bool = False, **given: Any
    ) -> Iterator[Any]:
        """The answers to a listing, page by page. ``following``: what of an answer goes into the next request."""
        after: dict[str, Any] = {}
        while True:
            with base.understood(self._where(key)):
                said = self._call(operation, key, upload=upload, **given, **after)
            yield said
            if not said.get("IsTruncated"):
                return
            with base.understood(self._where(key)):
                last, after = after, {name: said[of] for name, of in following.items()}
                if "KeyMarker" in after and said.get("EncodingType") == "url":
                    after["KeyMarker"] = unquote_plus(after["KeyMarker"])
                if after == last:  # it would go on for ever
                    raise ValueError

    def _call(self, operation: str, key: str, *, taken: bool = False, upload: bool = False, **given: Any) -> Any:
        """The answer; that of ``get_object`` has its bytes. One that breaks off is asked for again; botocore does not.

        ``taken``, ``upload``: whether a condition may fail (TakenError), and whether an upload may be gone (GoneError).
        """
        from botocore.parsers import ResponseParserError

        made = self._client()
        for number in range(1, TRIES + 1):
            with self._explained(key, operation, taken=taken, upload=upload):
                try:
                    answer = getattr(made, operation)(Bucket=self.name, **given)
                    if operation == "get_object":
                        answer["Body"] = answer["Body"].read()
                except ResponseParserError:
                    if number == ODD_TRIES:
                        hint = f"check {self.address}; a proxy may have answered"
                        raise AccessError(
                            f"the answer does not come from {self.cloud}", where=self._where(key), hint=hint
                        ) from None
                except (exceptions.IncompleteReadError, exceptions.ResponseStreamingError):
                    if number == TRIES:
                        raise
                else:
                    return answer
                time.sleep(random.random() / 2)  # noqa: S311
                if isinstance(given.get("Body"), FileSlice):
                    given["Body"].seek(0)
        raise AssertionError

    @contextmanager
    def _explained(self, key: str, operation: str = "", *, taken: bool = False, upload: bool = False) -> Iterator[None]:
        """Raises what botocore's errors mean to users, and FileNotFoundError for an object that is not there."""
        where = self._where(key)
        try:
            yield
        except exceptions.ClientError as e:
            said = e.response.get("Error", {})
            code, text = str(said.get("Code", "")), str(said.get("Message", ""))
            status = int(e.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
            if taken and code in _TAKEN:
                raise base.TakenError from None
            if upload and code == "NoSuchUpload":
                raise base.GoneError from None
            found = self._meaning(code, status, where, text, of_object=not upload)
            listing = operation in ("list_objects_v2", "list_multipart_uploads")
            raise (base.unlisted(found, where, self.address) if listing else found) from None
        except exceptions.BotoCoreError as e:
            if isinstance(e, exceptions.UnseekableStreamError) or isinstance(e.__context__, base.SliceStoppedError):
                raise base.SliceStoppedError from None  # between two tries of a request that is to end
            raise self._failed(e, where) from None

    def _meaning(
        self, code: str, status: int, where: str, text: str = "", *, of_object: bool = True
    ) -> OSError | CkptError:
        """The error for an answer that is one."""
        if code == "NoSuchBucket":
            hint = "check its name, and AWS_ENDPOINT_URL for stores that are not Amazon's"
            return base.no_bucket("bucket", where, hint, writes=self.writes)
        if of_object and (status == 404 or code in _MISSING):
            return base.no_object(where)
        hint = _HINTS.get(code, "")
        if status in (401, 403) and not hint:
            return AccessError("S3 refuses access", where=where, hint=self._denied())
        if status in (301, 307) or (status == 400 and not code):
            hint = _REGION
        said = f"S3 answers {status}" + (f" {code}" if code != str(status) else "")
        if status == 501 or code == "NotImplemented":
            return _NotImplementedError(said, where=where)
        if self.writes and 400 <= status < 500 and status != 429 and not hint:
            return OutputError(f"S3 refuses a request ({code or status}): {text or code or status}", where=where)
        return AccessError(said.rstrip(), where=where, hint=hint)

    def _failed(self, e: exceptions.BotoCoreError, where: str) -> AccessError:
        """The error for a request that had no answer, or none that can be used."""
        if isinstance(e, exceptions.NoCredentialsError | exceptions.PartialCredentialsError):
            return AccessError("no S3 credentials found", where=where, hint=_LOGIN)
        if isinstance(e, _RedirectedError):
            hint = f"check {self.address}: a proxy or login page may have answered in the place of the bucket's server"
            return AccessError(f"{self.cloud} cannot be used: {e}", where=where, hint=hint)
        # Refused, timeouts, TLS, proxies, and answers that break off each time.
        if isinstance(e, exceptions.HTTPClientError | exceptions.ConnectionError | exceptions.IncompleteReadError):
            hint = f"check the network and {self.address}"
            return AccessError(f"{self.cloud} does not answer", where=where, hint=hint)
        if isinstance(e, exceptions.ParamValidationError):
            return AccessError(f"{self.cloud} does not allow this name", where=where)
        return AccessError(f"{self.cloud} cannot be used: {e}", where=where, hint=_LOGIN)

    def _denied(self) -> str:
        if self.writes:
            return self.rights
        if anonymous():
            return "the bucket is not public: drop --anonymous"
        return "these credentials may not read it; without permission to list, a missing object looks the same"

    def _where(self, key: str) -> str:
        return f"{self.scheme}://{self.name}/{key}"


class _NotImplementedError(AccessError):
    """The store does not know a request, or a condition of it."""


def _tag(part: Mapping[str, Any]) -> str:
    """ETag and, where the store keeps it, checksum: one that it keeps has to be named when the upload is completed."""
    return " ".join([part["ETag"], part["ChecksumCRC32"]] if part.get("ChecksumCRC32") else [part["ETag"]])
