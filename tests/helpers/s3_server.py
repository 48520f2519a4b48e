"""A small S3 server on 127.0.0.1: what object stores promise, faults on demand, and a record of every request.

::

    with s3_server("bucket") as server:
        server.put("bucket", "run/config.json", b"{}")
        with patch.dict(os.environ, server.environment()):
            ...                                     # boto3, obstore and ckpttool reach it
        server.operations()                         # Counter({"GetObject": 3, "ListObjectsV2": 1})

Signatures are not checked, and what is stored is in memory. Multipart uploads, conditional requests, paged listings and
the errors of S3 behave as its API reference says (https://docs.aws.amazon.com/AmazonS3/latest/API/).
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import re
import socket
import ssl
import struct
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple, NoReturn
from urllib.parse import parse_qsl, quote, unquote
from xml.etree import ElementTree as ET
from xml.sax.saxutils import escape

FAULTS = (
    "refused",  # the connection is reset, and for `outage` seconds nobody listens
    "reset",  # the request is read and not done; the connection is reset
    "lost",  # the request is done; the connection is reset before the answer
    "short",  # the request is done; half of the answer's body comes, and then the end
    "slow",  # the answer comes `slowness` seconds late
    "500",  # InternalError
    "503",  # SlowDown, with Retry-After: 0
    "429",  # TooManyRequests, with Retry-After: 0
    "403",  # AccessDenied
    "200 error",  # 200 with InternalError in the body, nothing done: what CompleteMultipartUpload may answer
    "200 range",  # GET of a range: 200 and the whole object
    "other range",  # GET of a range: the bytes and Content-Range of the range one byte further
    "other etag",  # GET: another ETag, and If-Match is ignored
    "long",  # a Content-Length of one byte more than the body
    "killed",  # `kill()` is called, and the request is not done
    "killed after",  # the request is done, and `kill()` is called
)
"""What can happen to a request. ``killed`` ones also cut every connection from then on, until ``heal()``."""


class Request(NamedTuple):
    """A request that came."""

    operation: str
    """As S3 names it: GetObject, HeadObject, PutObject, UploadPart, ..."""
    method: str
    bucket: str
    key: str
    query: dict[str, str]
    headers: dict[str, str]
    """By names in lower case."""
    body: int
    """Bytes."""


class Stored(NamedTuple):
    """An object, or a part of an upload."""

    data: bytes
    etag: str
    """With its quotes."""
    headers: dict[str, str]
    """Checksums, content type, metadata: what a GET gives back."""
    modified: float
    generation: int = 0
    """As Google counts versions of an object."""


@dataclass(slots=True)
class Upload:
    """A multipart upload that is neither complete nor aborted."""

    bucket: str
    key: str
    headers: dict[str, str]
    parts: dict[int, Stored] = field(default_factory=dict)


_generations = itertools.count(1)


class S3Error(Exception):
    """An answer that is an error of S3."""

    def __init__(self, status: int, code: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(code)
        self.status, self.code, self.headers = status, code, dict(headers or {})


class Answer(NamedTuple):
    """What goes back."""

    status: int
    body: bytes = b""
    headers: Mapping[str, str] = {}


Choose = Callable[[int, Request], str | None]
"""The number of a request, counted from 0, and the request: a fault's name, or None."""


class S3Server:
    """Buckets in memory, behind a port. All attributes may be changed while it runs."""

    def __init__(self, buckets: Iterable[str], tls: ssl.SSLContext | None = None) -> None:
        self.buckets: dict[str, dict[str, Stored]] = {b: {} for b in buckets}
        self.uploads: dict[str, Upload] = {}
        self.requests: list[Request] = []
        self.choose: Choose | None = None
        """Which fault a request meets. ``at`` and ``on`` set the usual ones."""
        self.faults = 0
        """How many requests met one."""
        self.kill: Callable[[], object] = lambda: None
        self.min_part = 5 << 20
        """Bytes that every part but the last must have. S3's; less makes small tests."""
        self.page = 1000
        """Names of a listing's page, at most."""
        self.region = "us-east-1"
        """Of all buckets."""
        self.delay = 0.0
        """Seconds before every answer."""
        self.slowness = 0.3
        self.outage = 0.1
        self.cut = False
        """Every connection is reset."""
        self.lock = threading.RLock()
        self._made = 0
        self._away: threading.Timer | None = None
        self._tls = tls
        self._http = self._made_http(0)
        self.port = self._http.server_address[1]
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{self.port}"
        self._serve()

    def environment(self) -> dict[str, str]:
        """Variables that lead boto3, obstore and ckpttool here."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "AKIATESTKEY",
            "AWS_SECRET_ACCESS_KEY": "a-secret-that-nobody-may-see",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_REGION": "us-east-1",
            "AWS_CONFIG_FILE": "/nowhere",
            "AWS_SHARED_CREDENTIALS_FILE": "/nowhere",
            "AWS_EC2_METADATA_DISABLED": "true",
            "NO_PROXY": "127.0.0.1",
        }

    def put(self, bucket: str, key: str, data: bytes) -> None:
        """Store an object without a request."""
        self.buckets.setdefault(bucket, {})[key] = _stored(data, {})

    def get(self, bucket: str, key: str) -> bytes:
        """The bytes of an object, without a request."""
        return self.buckets[bucket][key].data

    def names(self, bucket: str, prefix: str = "") -> list[str]:
        """Keys of objects, sorted, without a request."""
        return sorted(k for k in list(self.buckets[bucket]) if k.startswith(prefix))

    def operations(self) -> Counter[str]:
        """How often each operation came."""
        return Counter(r.operation for r in self.requests)

    def clear(self) -> None:
        """Forget the requests and the faults; objects and uploads stay."""
        self.requests.clear()
        self.heal()

    def heal(self) -> None:
        """No faults from now on."""
        self.choose, self.faults, self.cut = None, 0, False

    def at(self, number: int, fault: str) -> None:
        """One fault at the request with this number, counted from the first one after ``clear()``."""
        self.choose = lambda i, _: fault if i == number else None

    def on(self, operation: str, fault: str, times: int = 1, key: str = "") -> None:
        """A fault for the first requests of an operation, or of one whose key ends like that."""
        left = [times]

        def choose(_: int, request: Request) -> str | None:
            if left[0] and request.operation == operation and request.key.endswith(key):
                left[0] -= 1
                return fault
            return None

        self.choose = choose

    def close(self) -> None:
        """Stop listening."""
        if self._away:
            self._away.join()
        self._http.shutdown()
        self._http.server_close()

    def leave(self) -> None:
        """Listen no more, and again after ``outage`` seconds; connections that are open are reset meanwhile."""
        with self.lock:
            if self._away and self._away.is_alive():
                return
            self._away = threading.Timer(self.outage, self._return)
            self._http.shutdown()
            self._http.server_close()
            self._away.start()

    def _return(self) -> None:
        self._http = self._made_http(self.port)
        self._serve()

    def _made_http(self, port: int) -> _Http:
        made = _Http(("127.0.0.1", port), _Handler)
        made.store = self
        if self._tls:
            made.socket = self._tls.wrap_socket(made.socket, server_side=True)
        return made

    @property
    def is_away(self) -> bool:
        """Whether every connection is reset now."""
        return self.cut or bool(self._away and self._away.is_alive())

    def _serve(self) -> None:
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()

    # What S3 does

    def answer(self, request: Request, body: bytes, fault: str | None = None) -> Answer:
        """Do a request. Raises S3Error."""
        with self.lock:
            bucket = self.buckets.get(request.bucket)
            if bucket is None:
                raise S3Error(404, "NoSuchBucket")
            if request.operation in ("GetObject", "HeadObject"):
                return self._read(bucket, request, fault)
            name = re.sub("(?<=[a-z])(?=[A-Z])", "_", request.operation.removesuffix("V2")).lower()
            method: Callable[[dict[str, Stored], Request, bytes], Answer] | None = getattr(self, f"_{name}", None)
            if method is None:
                raise S3Error(501, "NotImplemented")
            return method(bucket, request, body)

    def _read(self, bucket: dict[str, Stored], request: Request, fault: str | None) -> Answer:
        stored = bucket.get(request.key)
        if stored is None:
            raise S3Error(404, "NoSuchKey")
        etag = '"another"' if fault == "other etag" else stored.etag
        wanted = request.headers.get("if-match")
        if fault != "other etag" and wanted not in (None, "*", stored.etag):
            raise S3Error(412, "PreconditionFailed")
        headers = stored.headers | {
            "ETag": etag,
            "Accept-Ranges": "bytes",
            "Last-Modified": formatdate(stored.modified),
            "x-goog-generation": str(stored.generation),
        }
        size, asked = len(stored.data), request.headers.get("range")
        if asked is None or fault == "200 range" or request.operation == "HeadObject":
            return Answer(200, stored.data, headers)
        m = re.fullmatch(r"bytes=(\d*)-(\d*)", asked)
        if not m or asked == "bytes=-":
            return Answer(200, stored.data, headers)
        lo = int(m[1]) if m[1] else max(0, size - int(m[2]))
        hi = min(size, int(m[2]) + 1) if m[1] and m[2] else size
        if lo >= size or lo >= hi:
            raise S3Error(416, "InvalidRange", {"Content-Range": f"bytes */{size}"})
        if fault == "other range":
            lo, hi = lo + 1, hi + 1
        headers = {k: v for k, v in headers.items() if not k.startswith("x-amz-checksum")}
        return Answer(206, stored.data[lo:hi], headers | {"Content-Range": f"bytes {lo}-{hi - 1}/{size}"})

    def _head_bucket(self, bucket: dict[str, Stored], request: Request, body: bytes) -> Answer:
        return Answer(200, b"", {"x-amz-bucket-region": self.region})

    def _get_bucket_location(self, bucket: dict[str, Stored], request: Request, body: bytes) -> Answer:
        return _xml("LocationConstraint", "")

    def _put_object(self, bucket: dict[str, Stored], request: Request, body: bytes) -> Answer:
        self._conditions(bucket, request)
        bucket[request.key] = stored = _stored(body, _kept(request.headers))
        about = {"ETag": stored.etag, "x-goog-generation": str(stored.generation)}
        return Answer(200, b"", about | _checksums(stored.headers))

    def _delete_object(self, bucket: dict[str, Stored], request: Request, body: bytes) -> Answer:
        bucket.pop(request.key, None)
        return Answer(204)

    def _delete_objects(self, bucket: dict[str, Stored], request: Request, body: bytes) -> Answer:
        keys = [k.text or "" for k in _parse(body).iter("Key")]
        for k in keys:
            bucket.pop(k, None)
        return _xml("DeleteResult", "".join(f"<Deleted><Key>{escape(k)}</Key></Deleted>" for k in keys))

    def _list_objects(self, bucket: dict[str, Stored], request: Request, body: bytes) -> Answer:
        q = request.query
        prefix, delimiter = q.get("prefix", ""), q.get("delimiter", "")
        after = q.get("continuation-token", q.get("start-after", ""))
        room = min(self.page, int(q.get("max-keys", "1000")))

        def shown(text: str) -> str:
            return quote(text, safe="/") if q.get("encoding-type") == "url" else escape(text)

        rows: list[str] = []
        last = more = ""
        for key in sorted(k for k in bucket if k.startswith(prefix) and k > after):
            rest = key[len(prefix) :]
            folder = prefix + rest.partition(delimiter)[0] + delimiter if delimiter and delimiter in rest else ""
            if folder and folder in (last, after):
                continue
            if len(rows) == room:
                more = last
                break
            last = folder or key
            stored = bucket[key]
            rows.append(
                f"<CommonPrefixes><Prefix>{shown(folder)}</Prefix></CommonPrefixes>"
                if folder
                else f"<Contents><Key>{shown(key)}</Key><LastModified>{_time(stored.modified)}</LastModified>"
                f"<ETag>{escape(stored.etag)}</ETag><Size>{len(stored.data)}</Size></Contents>"
            )
        token = f"<NextContinuationToken>{escape(more)}</NextContinuationToken>" if more else ""
        kind = "<EncodingType>url</EncodingType>" if q.get("encoding-type") == "url" else ""
        head = (
            f"<Name>{request.bucket}</Name><Prefix>{shown(prefix)}</Prefix><KeyCount>{len(rows)}</KeyCount>"
            f"<MaxKeys>{room}</MaxKeys><IsTruncated>{str(bool(more)).lower()}</IsTruncated>"
        )
        return _xml("ListBucketResult", head + kind + token + "".join(rows))

    # Multipart uploads

    def _create_multipart_upload(self, bucket: dict[str, Stored], request: Request, body: bytes) -> Answer:
        self._made += 1
        name = f"upload-{self._made}"
        self.uploads[name] = Upload(request.bucket, request.key, _kept(request.headers))
        inside = f"<Bucket>{request.bucket}</Bucket><Key>{escape(request.key)}</Key><UploadId>{name}</UploadId>"
        return _xml("InitiateMultipartUploadResult", inside)

    def _upload_part(self, bucket: dict[str, Stored], request: Request, body: bytes) -> Answer:
        number = int(request.query["partNumber"])
        if not 1 <= number <= 10_000:
            raise S3Error(400, "InvalidArgument")
        self._upload(request).parts[number] = part = _stored(body, _kept(request.headers))
        return Answer(200, b"", {"ETag": part.etag} | _checksums(part.headers))

    def _list_parts(self, bucket: dict[str, Stored], request: Request, body: bytes) -> Answer:
        upload, after = self._upload(request), int(request.query.get("part-number-marker", "0"))
        room = min(self.page, int(request.query.get("max-parts", "1000")))
        numbers = [n for n in sorted(upload.parts) if n > after]
        rows = []
        for n in numbers[:room]:
            p = upload.parts[n]
            sums = "".join(f"<{k}>{v}</{k}>" for k, v in _sum_tags(p.headers).items())
            rows.append(
                f"<Part><PartNumber>{n}</PartNumber><LastModified>{_time(p.modified)}</LastModified>"
                f"<ETag>{escape(p.etag)}</ETag><Size>{len(p.data)}</Size>{sums}</Part>"
            )
        more = len(numbers) > room
        head = (
            f"<Bucket>{request.bucket}</Bucket><Key>{escape(request.key)}</Key>"
            f"<UploadId>{request.query['uploadId']}</UploadId><PartNumberMarker>{after}</PartNumberMarker>"
            f"<NextPartNumberMarker>{numbers[:room][-1] if rows else 0}</NextPartNumberMarker>"
            f"<MaxParts>{room}</MaxParts><IsTruncated>{str(more).lower()}</IsTruncated>"
        )
        return _xml("ListPartsResult", head + "".join(rows))

    def _list_multipart_uploads(self, bucket: dict[str, Stored], request: Request, body: bytes) -> Answer:
        q = request.query
        here = (q.get("key-marker", ""), q.get("upload-id-marker", ""))
        found = sorted(
            (u.key, name) for name, u in self.uploads.items()
            if u.bucket == request.bucket and u.key.startswith(q.get("prefix", ""))
        )  # fmt: skip
        found = [f for f in found if (f > here if here[1] else f[0] > here[0] or not here[0])]
        room = min(self.page, int(q.get("max-uploads", "1000")))
        shown: Callable[[str], str] = quote if q.get("encoding-type") == "url" else escape
        rows = "".join(
            f"<Upload><Key>{shown(k)}</Key><UploadId>{n}</UploadId><Initiated>{_time(time.time())}</Initiated></Upload>"
            for k, n in found[:room]
        )
        more = len(found) > room
        following = (
            f"<NextKeyMarker>{shown(found[room - 1][0])}</NextKeyMarker>"
            f"<NextUploadIdMarker>{found[room - 1][1]}</NextUploadIdMarker>"
            if more
            else ""
        )
        kind = "<EncodingType>url</EncodingType>" if q.get("encoding-type") == "url" else ""
        return _xml(
            "ListMultipartUploadsResult",
            f"<Bucket>{request.bucket}</Bucket><IsTruncated>{str(more).lower()}</IsTruncated>{kind}{following}{rows}",
        )

    def _complete_multipart_upload(self, bucket: dict[str, Stored], request: Request, body: bytes) -> Answer:
        upload = self._upload(request)
        named = [(int(_text(p, "PartNumber")), _text(p, "ETag").strip('"')) for p in _parse(body).iter("Part")]
        if not named:
            raise S3Error(400, "MalformedXML")
        if [n for n, _ in named] != sorted({n for n, _ in named}):
            raise S3Error(400, "InvalidPartOrder")
        if any(n not in upload.parts or upload.parts[n].etag.strip('"') != etag for n, etag in named):
            raise S3Error(400, "InvalidPart")
        parts = [upload.parts[n] for n, _ in named]
        if any(len(p.data) < self.min_part for p in parts[:-1]):
            raise S3Error(400, "EntityTooSmall")
        self._conditions(bucket, request)
        sums = _md5(b"".join(_md5(p.data) for p in parts)).hex()
        kept = {k: v for k, v in upload.headers.items() if not k.startswith("x-amz-checksum")}
        etag = f'"{sums}-{len(parts)}"'
        bucket[request.key] = Stored(b"".join(p.data for p in parts), etag, kept, time.time(), next(_generations))
        del self.uploads[request.query["uploadId"]]
        inside = f"<Bucket>{request.bucket}</Bucket><Key>{escape(request.key)}</Key><ETag>{escape(etag)}</ETag>"
        return _xml("CompleteMultipartUploadResult", inside)

    def _abort_multipart_upload(self, bucket: dict[str, Stored], request: Request, body: bytes) -> Answer:
        self._upload(request)
        del self.uploads[request.query["uploadId"]]
        return Answer(204)

    def _upload(self, request: Request) -> Upload:
        upload = self.uploads.get(request.query["uploadId"])
        if upload is None or (upload.bucket, upload.key) != (request.bucket, request.key):
            raise S3Error(404, "NoSuchUpload")
        return upload

    def _conditions(self, bucket: dict[str, Stored], request: Request) -> None:
        there = bucket.get(request.key)
        if request.headers.get("if-none-match") == "*" and there:
            raise S3Error(412, "PreconditionFailed")
        wanted = request.headers.get("if-match")
        if wanted is not None and there is None:
            raise S3Error(404, "NoSuchKey")
        generation = request.headers.get("x-goog-if-generation-match")
        if generation is not None and int(generation) != (there.generation if there else 0):
            raise S3Error(412, "PreconditionFailed")
        if wanted is not None and there and wanted.strip('"') != there.etag.strip('"'):
            raise S3Error(412, "PreconditionFailed")


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128
    store: S3Server

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # a client that has gone


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = 1 << 16
    server: _Http

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass

    def handle_expect_100(self) -> bool:
        super().handle_expect_100()
        self.wfile.flush()
        return True

    def handle_one_request(self) -> None:
        with suppress(ConnectionError):
            super().handle_one_request()
            return
        self.close_connection = True

    def _serve(self) -> None:
        store = self.server.store
        if store.is_away:
            self._reset()
        body = self._body()
        request = self._request(len(body))
        with store.lock:
            store.requests.append(request)
            fault = store.choose(len(store.requests) - 1, request) if store.choose else None
            store.faults += fault is not None
            store.cut |= fault in ("killed", "killed after")
        if fault == "refused":
            store.leave()
            self._reset()
        if fault in ("reset", "killed"):
            if fault == "killed":
                store.kill()
            self._reset()
        time.sleep(store.delay + (store.slowness if fault == "slow" else 0))
        try:
            answer = self._faulty(fault) or store.answer(request, self._checked(body), fault)
        except S3Error as e:
            answer = _error(e, request)
        if fault == "killed after":
            store.kill()
        if fault in ("lost", "killed after"):
            self._reset()
        self._send(answer, fault)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _serve  # noqa: N815

    def _faulty(self, fault: str | None) -> Answer | None:
        statuses = {"500": "InternalError", "503": "SlowDown", "429": "TooManyRequests", "403": "AccessDenied"}
        if fault in statuses:
            raise S3Error(
                int(fault or 0), statuses[fault or ""], {"Retry-After": "0"} if fault in ("503", "429") else {}
            )
        return _xml("Error", "<Code>InternalError</Code><Message>again</Message>") if fault == "200 error" else None

    def _send(self, answer: Answer, fault: str | None) -> None:
        self.send_response(answer.status)
        for name, value in ({"x-amz-request-id": "R1"} | dict(answer.headers)).items():
            self.send_header(name, value)
        if answer.status != 204:
            self.send_header("Content-Length", str(len(answer.body) + (fault == "long")))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body[: len(answer.body) // 2] if fault == "short" else answer.body)
        self.wfile.flush()
        if fault in ("short", "long"):
            self.close_connection = True

    def _reset(self) -> NoReturn:
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()  # with this, the other side sees a reset and no end
        self.close_connection = True
        raise ConnectionResetError

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            data = b""
            while size := int(self.rfile.readline().split(b";")[0], 16):
                data += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            data = self._exactly(int(self.headers.get("Content-Length", "0")))
        return _unchunked(data) if "aws-chunked" in self.headers.get("Content-Encoding", "") else data

    def _exactly(self, size: int) -> bytes:
        data = self.rfile.read(size)
        if len(data) < size:
            raise ConnectionResetError
        return data

    def _checked(self, body: bytes) -> bytes:
        for name, digest in {
            "Content-MD5": _md5(body),
            "x-amz-checksum-crc32": zlib.crc32(body).to_bytes(4, "big"),
        }.items():
            if self.headers.get(name, _b64(digest)) != _b64(digest):
                raise S3Error(400, "BadDigest")
        return body

    def _request(self, size: int) -> Request:
        path, _, rest = self.path.partition("?")
        query = dict(parse_qsl(rest, keep_blank_values=True))
        bucket, _, key = path.lstrip("/").partition("/")
        headers = {k.lower(): v for k, v in self.headers.items()}
        key = unquote(key)
        return Request(_operation(self.command, key, query), self.command, bucket, key, query, headers, size)


def _operation(method: str, key: str, query: Mapping[str, str]) -> str:
    if not key:
        kinds = {"uploads": "ListMultipartUploads", "location": "GetBucketLocation", "delete": "DeleteObjects"}
        found = next((kinds[k] for k in kinds if k in query), "ListObjectsV2")
        return {"HEAD": "HeadBucket", "PUT": "CreateBucket"}.get(method, found)
    if "uploads" in query:
        return "CreateMultipartUpload"
    if "uploadId" in query:
        return {
            "PUT": "UploadPart",
            "GET": "ListParts",
            "POST": "CompleteMultipartUpload",
            "DELETE": "AbortMultipartUpload",
        }[method]
    return f"{method.capitalize()}Object"


def _error(e: S3Error, request: Request) -> Answer:
    if request.method == "HEAD":
        return Answer(e.status, b"", e.headers)
    inside = (
        f"<Code>{e.code}</Code><Message>{e.code}</Message><Key>{escape(request.key)}</Key><RequestId>R1</RequestId>"
    )
    return _xml("Error", inside)._replace(status=e.status, headers={"Content-Type": "application/xml"} | e.headers)


def _xml(tag: str, inside: str) -> Answer:
    space = "" if tag == "Error" else ' xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'
    body = f'<?xml version="1.0" encoding="UTF-8"?>\n<{tag}{space}>{inside}</{tag}>'.encode()
    return Answer(200, body, {"Content-Type": "application/xml"})


def _parse(body: bytes) -> ET.Element:
    """XML without its namespaces."""
    try:
        root = ET.fromstring(body)  # noqa: S314 - the tests wrote it
    except ET.ParseError:
        raise S3Error(400, "MalformedXML") from None
    for e in root.iter():
        e.tag = e.tag.rpartition("}")[2]
    return root


def _text(e: ET.Element, tag: str) -> str:
    return e.findtext(tag) or ""


def _unchunked(data: bytes) -> bytes:
    """The body of ``Content-Encoding: aws-chunked``: chunks with their sizes, and checksums behind them."""
    body, at = b"", 0
    while True:
        end = data.index(b"\r\n", at)
        size = int(data[at:end].split(b";")[0], 16)
        if not size:
            return body
        body += data[end + 2 : end + 2 + size]
        at = end + 4 + size


def _stored(data: bytes, headers: dict[str, str]) -> Stored:
    return Stored(data, f'"{_md5(data).hex()}"', headers, time.time(), next(_generations))


def _kept(headers: Mapping[str, str]) -> dict[str, str]:
    names = ("content-type", "cache-control")
    return {
        k: v
        for k, v in headers.items()
        if k in names or k.startswith(("x-amz-meta-", "x-goog-meta-", "x-amz-checksum-"))
    }


def _checksums(headers: Mapping[str, str]) -> dict[str, str]:
    return {k: v for k, v in headers.items() if k.startswith("x-amz-checksum-")}


def _sum_tags(headers: Mapping[str, str]) -> dict[str, str]:
    named = {"crc32": "ChecksumCRC32", "crc32c": "ChecksumCRC32C", "crc64nvme": "ChecksumCRC64NVME"}
    kinds = {k.removeprefix("x-amz-checksum-"): v for k, v in _checksums(headers).items()}
    return {named[k]: v for k, v in kinds.items() if k in named}


def _md5(data: bytes) -> bytes:
    return hashlib.md5(data, usedforsecurity=False).digest()


def _b64(digest: bytes) -> str:
    return base64.b64encode(digest).decode()


def _time(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(seconds))


@contextmanager
def s3_server(*buckets: str, tls: ssl.SSLContext | None = None) -> Iterator[S3Server]:
    """A server with empty buckets ("bucket" if none is named); it is closed at the end."""
    server = S3Server(buckets or ["bucket"], tls)
    try:
        yield server
    finally:
        server.close()
