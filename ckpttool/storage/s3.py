"""Buckets of S3, and of what speaks like it: boto3 logs in, lists and signs.

Everything that the AWS tools read is read by boto3: AWS_PROFILE, AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, AWS_REGION,
~/.aws, web identities, roles of instances and containers.
"""

from __future__ import annotations

import errno
import os
import re
import threading
import time
from typing import Any, NoReturn

import boto3
from botocore import UNSIGNED, exceptions
from botocore.config import Config
from botocore.credentials import Credentials
from botocore.parsers import ResponseParserError

from ckpttool.errors import AccessError, CkptError, IncompleteError
from ckpttool.storage.access import anonymous, check_secret
from ckpttool.storage.http import REDIRECTS, ChangedError, HttpError, led
from ckpttool.storage.objects import Found, Listing, Signed, bounded, listed, listing, understood

TRIES = 10
CONNECTIONS = 64
"""Kept at most."""
SIGNED_SECONDS = 600
"""How long a signed URL is valid; it is renewed after half of that."""

_CODE = re.compile(rb"<Code>([A-Za-z0-9.]{1,60})</Code>")
_lock = threading.Lock()
_clients: dict[tuple[int, bool, str | None, str], Any] = {}
_AMAZON = re.compile(r"https://s3[.-][a-z0-9.-]*amazonaws\.com(\.cn)?")

_HINTS = {
    "InvalidAccessKeyId": "the access key is unknown there: check AWS_PROFILE, AWS_ACCESS_KEY_ID and AWS_ENDPOINT_URL",
    "SignatureDoesNotMatch": "the secret key is wrong: check AWS_SECRET_ACCESS_KEY or AWS_PROFILE",
    "ExpiredToken": "the session has expired: log in again, for example with `aws sso login`",
    "InvalidToken": "the session token is wrong or has expired: log in again, for example with `aws sso login`",
    "RequestTimeTooSkewed": "the clock of this machine is wrong",
    "PermanentRedirect": "the bucket is in another region: set AWS_REGION",
    "AuthorizationHeaderMalformed": "the bucket is in another region: set AWS_REGION",
    "IllegalLocationConstraintException": "the bucket is in another region: set AWS_REGION",
    "InvalidObjectState": "the object is archived (Glacier): restore it first",
    "SlowDown": "the bucket gets too many requests: use fewer --connections, or try later",
}
_LOGIN = "set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; --anonymous reads public buckets"


def client(region: str | None = None, style: str = "") -> Any:
    """The client of this process, for S3 as the environment has it, or for a region of it.

    ``style``: how URLs name buckets, "virtual" or "path". Raises AccessError for broken settings.
    """
    here = (os.getpid(), anonymous(), region, style)  # connections do not survive a fork
    with _lock:
        if here not in _clients:
            config = Config(
                signature_version=UNSIGNED if anonymous() else "s3v4",
                retries={"mode": "standard", "total_max_attempts": TRIES},
                max_pool_connections=CONNECTIONS,
                connect_timeout=10,
                read_timeout=60,
                s3={"addressing_style": style} if style else None,
            )
            try:
                session = boto3.Session()
                region = region or session.region_name or "us-east-1"  # buckets elsewhere are found by a redirect
                if not anonymous():
                    _check_keys(session)
                made = session.client("s3", region_name=region, config=config)
            except (exceptions.BotoCoreError, ValueError) as e:
                raise AccessError(f"the settings for S3 cannot be used: {e}", hint=_LOGIN) from None
            if not _AMAZON.fullmatch(made.meta.endpoint_url):
                made.meta.events.register("before-parse.s3", _refuse_redirect)
            _clients[here] = made
        return _clients[here]


def _check_keys(session: Any) -> None:
    """Raises AccessError for keys that cannot be sent. Those that a server gives out are not asked for yet."""
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
    with _lock:
        for made in _clients.values():
            made.close()
        _clients.clear()


def explained(e: Exception, where: str) -> OSError | CkptError:
    """What an error of botocore means to users."""
    if isinstance(e, exceptions.ClientError):
        said = e.response.get("Error", {})
        status = int(e.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        return _meaning(str(said.get("Code", "")), status, where)
    if isinstance(e, exceptions.NoCredentialsError | exceptions.PartialCredentialsError):
        return AccessError("no credentials for S3 are found", where=where, hint=_LOGIN)
    if isinstance(e, _RedirectedError):
        hint = "set AWS_ENDPOINT_URL to the bucket's own server; a proxy or login page may have answered instead"
        return AccessError(f"S3 cannot be used: {e}", where=where, hint=hint)
    if isinstance(e, exceptions.HTTPClientError | exceptions.ConnectionError):  # refused, timeouts, TLS, proxies
        return AccessError("S3 does not answer", where=where, hint="check the network and AWS_ENDPOINT_URL")
    if isinstance(e, exceptions.ParamValidationError):
        return AccessError("S3 does not allow this name", where=where)
    if isinstance(e, ResponseParserError | exceptions.PaginationError):
        return AccessError("the answer is not one of S3", where=where, hint="check AWS_ENDPOINT_URL")
    return AccessError(f"S3 cannot be used: {e}", where=where, hint=_LOGIN)


class Bucket:
    """A bucket that is read."""

    lister = "aws s3 ls {}/"

    def __init__(self, name: str) -> None:
        self.name = name
        self._signed: dict[str, tuple[float, str]] = {}
        self._region: str | None = None

    def list(self, prefix: str, *, deep: bool = False) -> Listing:
        files, folders, where = {}, set(), self._where(prefix)
        asked = {"Bucket": self.name, "Prefix": prefix, **({} if deep else {"Delimiter": "/"})}
        try:
            pages = client().get_paginator("list_objects_v2").paginate(**asked)
            with understood(where):
                for page in bounded(pages, where, deep=deep):
                    for o in page.get("Contents", ()):
                        files[o["Key"].removeprefix(prefix)] = _found(o["Size"], o["ETag"])
                    folders |= {p["Prefix"].removeprefix(prefix)[:-1] for p in page.get("CommonPrefixes", ())}
        except (exceptions.BotoCoreError, exceptions.ClientError) as e:
            raise listed(explained(e, where), where, "AWS_ENDPOINT_URL") from None
        return listing(files, folders, exists=bool(not prefix or files or folders), deep=deep)

    def head(self, key: str) -> Found:
        where = self._where(key)
        try:
            said = client().head_object(Bucket=self.name, Key=key)
        except (exceptions.BotoCoreError, exceptions.ClientError) as e:
            raise explained(e, where) from None
        with understood(where):
            return _found(said["ContentLength"], said["ETag"])

    def get(self, key: str, tag: str, *, renew: bool) -> Signed:
        until, url = self._signed.get(key, (0.0, ""))
        if renew or time.monotonic() > until:
            at = {"Bucket": self.name, "Key": key}
            try:
                url = self._signer().generate_presigned_url("get_object", at, ExpiresIn=SIGNED_SECONDS)
            except exceptions.BotoCoreError as e:
                raise explained(e, self._where(key)) from None
            self._signed[key] = (time.monotonic() + SIGNED_SECONDS / 2, url)
        return Signed(url, {}, tag)

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
        except exceptions.ClientError as e:  # who may not look is told the region nevertheless
            return e.response

    def explain(self, e: HttpError, key: str) -> NoReturn:
        if isinstance(e, ChangedError) or e.answer is None or e.status >= 500:
            e.filename = self._where(key)
            raise e
        code = _CODE.search(e.answer.body)
        raise _meaning(code[1].decode() if code else "", e.status, self._where(key)) from None

    def _where(self, key: str) -> str:
        return f"s3://{self.name}/{key}"


def _found(size: int, tag: str) -> Found:
    if size < 0 or not tag:
        raise ValueError
    return Found(int(size), tag)


def _meaning(code: str, status: int, where: str) -> OSError | CkptError:
    if code == "NoSuchBucket":
        hint = "check its name, and AWS_ENDPOINT_URL for stores that are not Amazon's"
        return IncompleteError("the bucket does not exist", where=where, hint=hint)
    if status == 404:
        return FileNotFoundError(errno.ENOENT, "No such file or directory", where)
    hint = _HINTS.get(code, "")
    if status in (401, 403) and not hint:
        hint = (
            "the bucket is not public: drop --anonymous"
            if anonymous()
            else "these credentials may not read it; without permission to list, a missing object looks the same"
        )
        return AccessError("S3 refuses access", where=where, hint=hint)
    if status in (301, 307) or (status == 400 and not code):
        hint = _HINTS["PermanentRedirect"]
    said = f"S3 answers {status}" + (f" {code}" if code != str(status) else "")
    return AccessError(said.rstrip(), where=where, hint=hint)
