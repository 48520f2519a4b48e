"""S3 and what speaks its language, through boto3: the only module that imports it.

botocore tries again by itself (``standard``: backoff with jitter, a budget of retries for each client, errors inside a
200), and finds endpoint, region and credentials as in every other program: AWS_*, ~/.aws, roles.
"""

from __future__ import annotations

import base64
import random
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import unquote_plus

import boto3
from botocore import UNSIGNED, exceptions
from botocore.config import Config
from botocore.parsers import ResponseParserError

from ckpttool.errors import AccessError, CkptError, OutputError
from ckpttool.execute.destinations.store import Found, GoneError, Held, SentPart, Slice, TakenError
from ckpttool.execute.files import Stopped
from ckpttool.storage.access import anonymous

RUN = "ckpttool-run"
"""User metadata of every object: which run wrote it."""

TRIES = 10
CONNECTIONS = 32
"""Kept open at most; who sends decides how many are used."""

_MISSING = {"404", "NoSuchKey", "NotFound"}
_TAKEN = {"412", "PreconditionFailed", "409", "ConditionalRequestConflict"}
_DENIED = {"403", "AccessDenied", "AllAccessDisabled", "AccountProblem", "SignatureDoesNotMatch", "InvalidAccessKeyId"}
_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestTimeTooSkewed", "InvalidToken"}
_REGION = {"PermanentRedirect", "301", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException"}
_RIGHTS = (
    "writing takes s3:ListBucket, s3:GetObject, s3:PutObject, s3:DeleteObject, s3:ListBucketMultipartUploads,"
    " s3:ListMultipartUploadParts and s3:AbortMultipartUpload"
)


def store(bucket: str) -> S3Store:
    """The bucket with this name. Raises AccessError when there is no region, profile or endpoint to go by."""
    return S3Store(connect(f"s3://{bucket}", signed=not anonymous()), bucket)


def connect(where: str, *, signed: bool, endpoint: str | None = None) -> Any:
    """A client for S3 as the environment has it, or for another endpoint. Raises AccessError."""
    config = Config(
        retries={"mode": "standard", "max_attempts": TRIES},
        max_pool_connections=CONNECTIONS,
        connect_timeout=20,
        read_timeout=60,
        # Checksums are given below, in a form that every store takes.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        signature_version=None if signed else UNSIGNED,
    )
    try:
        session = boto3.session.Session()
        region = None if session.region_name else "us-east-1"  # buckets elsewhere are found by a redirect
        client = session.client("s3", region_name=region, endpoint_url=endpoint, config=config)
    except (exceptions.BotoCoreError, ValueError) as e:
        raise AccessError(f"the S3 client cannot be set up: {e}", where=where) from e
    if client.meta.endpoint_url.startswith("https:"):
        # TLS and the CRC protect the bytes; a SHA-256 for the signature would cost as much as both.
        settings = client.meta.config
        settings.s3 = {**(settings.s3 or {}), "payload_signing_enabled": False}
    return client


class S3Store:
    """See ``Store``. Parts as of https://docs.aws.amazon.com/AmazonS3/latest/userguide/qfacts.html."""

    most_parts = 10_000
    least_part = 5 << 20
    part_step = 1 << 20
    scheme = "s3"
    rights = _RIGHTS

    def __init__(self, client: Any, bucket: str) -> None:
        self._client = client
        self._bucket = bucket

    def put(self, key: str, data: bytes | Slice, run: str, *, new: bool = False, replaces: str = "") -> str:
        condition = {"IfNoneMatch": "*"} if new else {"IfMatch": replaces} if replaces else {}
        with self._told(key, taken=bool(condition)):
            given = {"Body": data, "ChecksumCRC32": _crc32(data), "Metadata": {RUN: run}}
            try:
                return str(self._call("put_object", key, **given, **condition)["ETag"])
            except exceptions.ClientError as e:
                if not condition or e.response.get("Error", {}).get("Code") != "NotImplemented":
                    raise
        # A store without conditions. Whoever puts reads again afterwards, so one of two notices.
        there = self.get(key)
        if (there.tag if there else "") != replaces:
            raise TakenError
        with self._told(key):
            return str(self._call("put_object", key, **given)["ETag"])

    def get(self, key: str) -> Found | None:
        try:
            with self._told(key):
                answer, data = self._call("get_object", key)
                date = answer["ResponseMetadata"]["HTTPHeaders"].get("date")
                now = parsedate_to_datetime(date) if date else datetime.now(UTC)
                return Found(data, answer["ETag"], (now - answer["LastModified"]).total_seconds())
        except FileNotFoundError:
            return None

    def head(self, key: str) -> Held | None:
        try:
            with self._told(key):
                answer = self._call("head_object", key)
        except FileNotFoundError:
            return None
        return Held(answer["ContentLength"], answer.get("Metadata", {}).get(RUN, ""))

    def objects(self, prefix: str) -> Iterator[tuple[str, int]]:
        after: dict[str, str] = {}
        with self._told(prefix):
            while True:
                page = self._call("list_objects_v2", Prefix=prefix, **after)
                yield from [(o["Key"], o["Size"]) for o in page.get("Contents", ())]
                if not page.get("IsTruncated"):
                    return
                after = {"ContinuationToken": page["NextContinuationToken"]}

    def delete(self, key: str) -> None:
        with self._told(key):
            self._call("delete_object", key)

    def uploads(self, prefix: str) -> Iterator[tuple[str, str]]:
        after: dict[str, str] = {}
        with self._told(prefix):
            while True:
                page = self._call("list_multipart_uploads", Prefix=prefix, EncodingType="url", **after)
                plain = unquote_plus if page.get("EncodingType") == "url" else str
                yield from [(plain(u["Key"]), u["UploadId"]) for u in page.get("Uploads", ())]
                if not page.get("IsTruncated"):
                    return
                after = {"KeyMarker": plain(page["NextKeyMarker"]), "UploadIdMarker": page["NextUploadIdMarker"]}

    def create(self, key: str, run: str) -> str:
        with self._told(key):
            answer = self._call("create_multipart_upload", key, Metadata={RUN: run}, ChecksumAlgorithm="CRC32")
            return str(answer["UploadId"])

    def put_part(self, key: str, upload: str, number: int, data: Slice) -> str:
        with self._told(key, upload=True):
            given = {"UploadId": upload, "PartNumber": number, "Body": data, "ChecksumCRC32": _crc32(data)}
            return _tag(self._call("upload_part", key, **given))

    def parts(self, key: str, upload: str) -> dict[int, SentPart]:
        found: dict[int, SentPart] = {}
        after: dict[str, int] = {}
        with self._told(key, upload=True):
            while True:
                page = self._call("list_parts", key, UploadId=upload, **after)
                found |= {p["PartNumber"]: SentPart(p["Size"], _tag(p)) for p in page.get("Parts", ())}
                if not page.get("IsTruncated"):
                    return found
                after = {"PartNumberMarker": page["NextPartNumberMarker"]}

    def complete(self, key: str, upload: str, parts: Mapping[int, str], run: str) -> None:
        names = ("ETag", "ChecksumCRC32")
        rows = [{"PartNumber": n} | dict(zip(names, tag.split(), strict=False)) for n, tag in sorted(parts.items())]
        named = {"Parts": rows}
        with self._told(key, upload=True):
            self._call("complete_multipart_upload", key, UploadId=upload, MultipartUpload=named)

    def abort(self, key: str, upload: str) -> None:
        try:
            with self._told(key, upload=True):
                self._call("abort_multipart_upload", key, UploadId=upload)
        except GoneError:
            pass

    def close(self) -> None:
        self._client.close()

    def _call(self, operation: str, key: str = "", **given: Any) -> Any:
        """The answer, of an object with its bytes. An answer that breaks off is asked for again; botocore does not."""
        if key:
            given["Key"] = key
        for left in reversed(range(TRIES)):
            try:
                answer = getattr(self._client, operation)(Bucket=self._bucket, **given)
                return (answer, answer["Body"].read()) if operation == "get_object" else answer
            except (ResponseParserError, exceptions.IncompleteReadError, exceptions.ResponseStreamingError) as e:
                if not left:
                    raise exceptions.HTTPClientError(error=e) from e
                time.sleep(random.random() / 2)  # noqa: S311
                if isinstance(given.get("Body"), Slice):
                    given["Body"].seek(0)
        raise AssertionError

    @contextmanager
    def _told(self, key: str, *, taken: bool = False, upload: bool = False) -> Iterator[None]:
        """What botocore raises, as this package's errors; FileNotFoundError for an object that is not there.

        ``taken``, ``upload``: whether a condition may fail, and whether an upload may be gone.
        """
        where = f"{self.scheme}://{self._bucket}/{key}"
        try:
            yield
        except exceptions.ClientError as e:
            code = str(e.response.get("Error", {}).get("Code", ""))
            if taken and code in _TAKEN:
                raise TakenError from e
            if upload and code == "NoSuchUpload":
                raise GoneError from e
            if not upload and code in _MISSING:
                raise FileNotFoundError(where) from None
            raise _refused(e, code, where, self.rights) from e
        except (
            exceptions.NoCredentialsError,
            exceptions.PartialCredentialsError,
            exceptions.CredentialRetrievalError,
        ) as e:
            hint = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or `aws configure`"
            raise AccessError("there are no credentials for S3", where=where, hint=hint) from e
        except (exceptions.HTTPClientError, exceptions.ConnectionError) as e:
            if isinstance(e.__context__, Stopped):
                raise Stopped from e
            raise AccessError(
                f"the store cannot be reached: {_sentence(e)}", where=where, hint="check the network"
            ) from e
        except exceptions.UnseekableStreamError as e:  # between two tries of a request that is to end
            raise Stopped from e
        except exceptions.BotoCoreError as e:
            raise AccessError(f"the request cannot be made: {_sentence(e)}", where=where) from e
        except KeyError as e:
            raise AccessError(f"the answer of the store lacks {e}", where=where) from e


def _refused(e: exceptions.ClientError, code: str, where: str, rights: str) -> CkptError:
    """The error for an answer of S3 that is one. ``rights``: what writing takes."""
    said = str(e.response.get("Error", {}).get("Message", "")) or code
    if code == "NoSuchBucket":
        return OutputError("the bucket does not exist", where=where, hint="make it, or check the name and the endpoint")
    if code in _EXPIRED:
        return AccessError(f"the credentials are no longer good ({code})", where=where, hint="renew them")
    if code in _DENIED:
        return AccessError(f"permission denied ({code})", where=where, hint=rights)
    if code in _REGION:
        return AccessError(
            f"the bucket is in another region ({code})", where=where, hint="set AWS_REGION to that of it"
        )
    status = e.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    if status >= 500 or status == 429 or code in ("SlowDown", "RequestTimeout"):
        return AccessError(f"the store does not answer as it should ({code}), also when asked again", where=where)
    return OutputError(f"the store refuses a request ({code}): {said}", where=where)


def _sentence(e: Exception) -> str:
    """What botocore says, on one line, without a URL's query."""
    return " ".join(word.partition("?")[0] for word in str(e).split())


def _tag(part: Mapping[str, Any]) -> str:
    """ETag and, where the store keeps it, checksum: one that it keeps has to be named when the upload is completed."""
    return " ".join([part["ETag"], part["ChecksumCRC32"]] if part.get("ChecksumCRC32") else [part["ETag"]])


def _crc32(data: bytes | Slice) -> str:
    sum_ = zlib.crc32(data) if isinstance(data, bytes) else data.crc32()
    return base64.b64encode(sum_.to_bytes(4, "big")).decode()
