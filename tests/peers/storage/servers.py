"""Servers of object storage that others wrote, on 127.0.0.1: moto's S3, Microsoft's Azurite, gcp-storage-emulator."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import pytest
from azure.storage.blob import BlobServiceClient

from ckpttool.storage import objects
from ckpttool.storage.http import client

ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Of the account that Azurite has; its documentation prints it."""


class Server(NamedTuple):
    """A server with an empty bucket or container."""

    root: str
    """The text of it as a place."""
    environment: Mapping[str, str]
    put: Callable[[str, bytes], object]
    get: Callable[[str], bytes]
    keys: Callable[[], list[str]]

    def fill(self, directory: Path, below: str) -> str:
        """Store the files of a directory; returns the text of the place."""
        for p in directory.rglob("*"):
            if p.is_file():
                self.put(f"{below}/{p.relative_to(directory).as_posix()}", p.read_bytes())
        return f"{self.root}/{below}"


@contextmanager
def moto() -> Iterator[Server]:
    """S3."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    client().request("POST", f"http://{host}:{port}/moto-api/reset")  # its buckets are those of the process
    environment = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "AKIATESTKEY",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_CONFIG_FILE": "/nowhere",
        "AWS_SHARED_CREDENTIALS_FILE": "/nowhere",
    }
    try:
        with _settings(environment):
            s3 = boto3.client("s3")
            s3.create_bucket(Bucket="bucket")
            yield Server(
                "s3://bucket",
                environment,
                lambda key, data: s3.put_object(Bucket="bucket", Key=key, Body=data),
                lambda key: s3.get_object(Bucket="bucket", Key=key)["Body"].read(),
                lambda: [o["Key"] for o in s3.list_objects_v2(Bucket="bucket").get("Contents", ())],
            )
            s3.close()
    finally:
        server.stop()


@contextmanager
def azurite(directory: Path) -> Iterator[Server]:
    """Azure."""
    program = os.environ.get("CKPTTOOL_AZURITE") or shutil.which("azurite-blob")
    if not program or not Path(program).exists():
        pytest.skip("Azurite is not installed")
    port = _free_port()
    command = [program, "--blobHost", "127.0.0.1", "--blobPort", str(port), "--location", str(directory), "--silent"]
    with _running([*command, "--skipApiVersionCheck"], port):
        text = (
            f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={KEY};"
            f"BlobEndpoint=http://127.0.0.1:{port}/{ACCOUNT};"
        )
        environment = {"AZURE_STORAGE_CONNECTION_STRING": text}
        with _settings(environment), BlobServiceClient.from_connection_string(text) as service:
            box = service.create_container("box")
            yield Server(
                "az://box",
                environment,
                lambda key, data: box.upload_blob(key, data, overwrite=True),
                lambda key: box.download_blob(key).readall(),
                lambda: list(box.list_blob_names()),
            )


@contextmanager
def gcp_emulator() -> Iterator[Server]:
    """Google Cloud Storage."""
    port = _free_port()
    command = [
        sys.executable,
        "-m",
        "gcp_storage_emulator",
        "start",
        "--host=127.0.0.1",
        f"--port={port}",
        "--in-memory",
    ]
    with _running([*command, "--default-bucket=bucket"], port):
        url = f"http://127.0.0.1:{port}"
        environment = {"STORAGE_EMULATOR_HOST": url}

        def put(key: str, data: bytes) -> None:
            to = f"{url}/upload/storage/v1/b/bucket/o?uploadType=media&name={objects_quoted(key)}"
            assert client().request("POST", to, body=data).status == 200

        with _settings(environment):
            yield Server(
                "gs://bucket",
                environment,
                put,
                lambda key: (
                    client().request("GET", f"{url}/storage/v1/b/bucket/o/{objects_quoted(key)}?alt=media").body
                ),
                lambda: [o["name"] for o in client().request("GET", f"{url}/storage/v1/b/bucket/o").json()["items"]],
            )


def objects_quoted(key: str) -> str:
    from urllib.parse import quote

    return quote(key, safe="")


@contextmanager
def _settings(environment: Mapping[str, str]) -> Iterator[None]:
    objects.close()
    with patch.dict(os.environ, environment):
        yield
    objects.close()


@contextmanager
def _running(command: list[str], port: int) -> Iterator[None]:
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            until = time.monotonic() + 60
            while True:
                try:
                    socket.create_connection(("127.0.0.1", port), 1).close()
                    break
                except OSError:
                    if process.poll() is not None or time.monotonic() > until:
                        raise
                    time.sleep(0.1)
            yield
        finally:
            process.kill()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as s:
        port: int = s.getsockname()[1]
        return port
