"""tests/helpers/s3_server.py: what real clients make of it, and that each fault is what it says."""

from __future__ import annotations

import errno
import http.client
import os
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any
from unittest.mock import patch

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError

from tests.helpers.s3_server import FAULTS, S3Server, s3_server


@pytest.fixture
def server() -> Iterator[S3Server]:
    with s3_server() as server, patch.dict(os.environ, server.environment()):
        yield server


def client(**options: Any) -> Any:
    return boto3.client("s3", config=Config(retries={"total_max_attempts": 1}, **options))


def code(e: pytest.ExceptionInfo[ClientError]) -> str:
    return str(e.value.response["Error"]["Code"])


def raw(server: S3Server, headers: dict[str, str] | None = None) -> tuple[int, bytes, dict[str, str]]:
    with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)) as connection:
        connection.request("GET", "/bucket/key", headers=headers or {})
        with connection.getresponse() as answer:
            return answer.status, answer.read(), {k.lower(): v for k, v in answer.getheaders()}


def test_boto3_lists_reads_and_deletes(server: S3Server) -> None:
    s3 = client()
    keys = [f"run/{k}" for k in ("a b", "a+b", "a%2Fb", "ü", "d/x", "d/y", "e//z", "../up", "z&<")]
    for k in keys:
        s3.put_object(Bucket="bucket", Key=k, Body=k.encode())
    assert server.names("bucket") == sorted(keys)
    assert s3.get_object(Bucket="bucket", Key="run/a%2Fb", Range="bytes=2-4")["Body"].read() == b"n/a"
    server.page = 2
    pages = list(s3.get_paginator("list_objects_v2").paginate(Bucket="bucket", Prefix="run/", Delimiter="/"))
    assert sorted(o["Key"] for p in pages for o in p.get("Contents", [])) == sorted(
        k for k in keys if k.count("/") == 1
    )
    assert [o["Prefix"] for p in pages for o in p.get("CommonPrefixes", [])] == ["run/../", "run/d/", "run/e/"]
    s3.delete_objects(Bucket="bucket", Delete={"Objects": [{"Key": k} for k in keys]})
    assert not server.names("bucket")


def test_a_multipart_upload_is_listed_and_completed(server: S3Server) -> None:
    s3, at = client(), {"Bucket": "bucket", "Key": "run/model"}
    server.min_part = 4
    upload = at | {"UploadId": s3.create_multipart_upload(**at, ChecksumAlgorithm="CRC32")["UploadId"]}
    for n, data in ((2, b"efgh"), (1, b"abcd"), (3, b"i")):
        s3.upload_part(**upload, PartNumber=n, Body=data, ChecksumAlgorithm="CRC32")
    server.page = 2
    assert [u["Key"] for u in s3.list_multipart_uploads(Bucket="bucket", Prefix="run/")["Uploads"]] == ["run/model"]
    parts = [p for page in s3.get_paginator("list_parts").paginate(**upload) for p in page["Parts"]]
    assert [(p["PartNumber"], p["Size"], "ChecksumCRC32" in p) for p in parts] == [
        (1, 4, True),
        (2, 4, True),
        (3, 1, True),
    ]
    named = [{"PartNumber": p["PartNumber"], "ETag": p["ETag"]} for p in parts]
    assert not server.names("bucket")
    with pytest.raises(ClientError) as e:
        s3.complete_multipart_upload(**upload, MultipartUpload={"Parts": named[::-1]})
    assert code(e) == "InvalidPartOrder"
    s3.complete_multipart_upload(**upload, MultipartUpload={"Parts": named})
    assert server.get("bucket", "run/model") == b"abcdefghi"
    assert not server.uploads
    with pytest.raises(ClientError) as e:
        s3.abort_multipart_upload(**upload)
    assert code(e) == "NoSuchUpload"


@pytest.mark.usefixtures("server")
def test_conditions() -> None:
    s3, at = client(), {"Bucket": "bucket", "Key": "key"}
    etag = s3.put_object(**at, Body=b"1", IfNoneMatch="*")["ETag"]
    with pytest.raises(ClientError) as e:
        s3.put_object(**at, Body=b"2", IfNoneMatch="*")
    assert code(e) == "PreconditionFailed"
    s3.put_object(**at, Body=b"2")
    with pytest.raises(ClientError) as e:
        s3.get_object(**at, IfMatch=etag)
    assert code(e) == "PreconditionFailed"


def after_outage(server: S3Server) -> int:
    """The first status of a server that listens again; a busy machine takes its time."""
    deadline = time.monotonic() + 20
    while True:
        time.sleep(server.outage + 0.05)
        try:
            return raw(server)[0]
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault(server: S3Server, fault: str) -> None:
    killed = []
    server.kill = lambda: killed.append(1)
    server.put("bucket", "key", b"0123456789")
    server.at(0, fault)
    began = time.monotonic()
    if fault in ("refused", "reset", "lost", "killed", "killed after"):
        with pytest.raises(ConnectionResetError):
            raw(server)
        if fault == "refused":
            with pytest.raises(OSError, match="refused") as e:
                raw(server)
            assert e.value.errno == errno.ECONNREFUSED
            assert after_outage(server) == 200
        if "killed" in fault:
            assert killed
            with pytest.raises(ConnectionError):
                raw(server)
            server.heal()
            assert raw(server)[0] == 200
    elif fault in ("short", "long"):
        with pytest.raises(http.client.IncompleteRead):
            raw(server)
    elif fault in ("500", "503", "429", "403"):
        assert raw(server)[0] == int(fault)
    else:
        status, body, headers = raw(server, {"Range": "bytes=2-4"})
        assert (status, body, headers.get("content-range")) == {
            "slow": (206, b"234", "bytes 2-4/10"),
            "200 error": (200, body, None),
            "200 range": (200, b"0123456789", None),
            "other range": (206, b"345", "bytes 3-5/10"),
            "other etag": (206, b"234", "bytes 2-4/10"),
        }[fault]
        assert fault != "slow" or time.monotonic() - began > server.slowness
        assert (headers.get("etag") == '"another"') == (fault == "other etag")
        assert (b"InternalError" in body) == (fault == "200 error")
    assert server.operations()["GetObject"] == len(server.requests)
