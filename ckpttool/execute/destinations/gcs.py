"""Google Cloud Storage as a destination: its XML API speaks S3's language with other words, so boto3 speaks it, too.

Logins, versions (generations), metadata and conditions are headers of Google's own; checksums are MD5.
https://cloud.google.com/storage/docs/xml-api/reference-headers and multipart-uploads.
"""

from __future__ import annotations

import base64
import hashlib
from typing import Any

from ckpttool.execute.destinations.s3 import S3Store, connect
from ckpttool.storage import gcs

_META, _GOOGLE_META = "x-amz-meta-", "x-goog-meta-"
_IF = "x-goog-if-generation-match"


class GcsStore(S3Store):
    """See ``Store``. Tags of objects are generations."""

    scheme = "gs"
    rights = "writing takes the role Storage Object User, or storage.objects.* and storage.multipartUploads.*"


def store(bucket: str) -> GcsStore:
    """The bucket with this name. Raises AccessError where nobody has logged in."""
    where = f"gs://{bucket}"
    gcs.authorization(where)
    client = connect(where, signed=False, endpoint=gcs.endpoint() or "https://storage.googleapis.com")
    events = client.meta.events
    events.register("before-send.s3", lambda request, **_: _to_google(request, where))
    for operation in ("PutObject", "GetObject", "HeadObject"):
        events.register(f"after-call.s3.{operation}", _from_google)
    return GcsStore(client, bucket)


def _to_google(request: Any, where: str) -> None:
    """Change a request, before each try, to what Google reads."""
    old = {k.lower(): v.decode() if isinstance(v, bytes) else str(v) for k, v in request.headers.items()}
    new = gcs.authorization(where)
    for name, value in old.items():
        if name.startswith(_META):
            new[_GOOGLE_META + name.removeprefix(_META)] = value
        elif name == "if-none-match":
            new[_IF] = "0"
        elif name == "if-match":
            new[_IF] = value
        elif name == "x-amz-checksum-crc32":
            new["Content-MD5"] = _md5(request.body)
    for name in list(request.headers.keys()):
        if name.lower().startswith(("x-amz-", "amz-sdk-", "if-")):
            del request.headers[name]
    for name, value in new.items():
        request.headers[name] = value


def _from_google(parsed: dict[str, Any], **_: Any) -> None:
    """Change an answer to what ``S3Store`` reads."""
    headers = parsed["ResponseMetadata"]["HTTPHeaders"]
    if "x-goog-generation" in headers:
        parsed["ETag"] = headers["x-goog-generation"]
    found = {k.removeprefix(_GOOGLE_META): v for k, v in headers.items() if k.startswith(_GOOGLE_META)}
    parsed["Metadata"] = found


def _md5(body: Any) -> str:
    """Of bytes, or of a file from its beginning, to which it returns."""
    if isinstance(body, bytes):
        return base64.b64encode(hashlib.md5(body, usedforsecurity=False).digest()).decode()
    sum_ = hashlib.md5(usedforsecurity=False)
    body.seek(0)
    while piece := body.read(1 << 20):
        sum_.update(piece)
    body.seek(0)
    return base64.b64encode(sum_.digest()).decode()
