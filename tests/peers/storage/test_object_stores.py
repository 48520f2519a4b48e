"""``s3://``, ``gs://`` and ``az://`` against servers that others wrote."""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from unittest.mock import patch

import boto3
import pytest
import trustme
from azure.storage.blob import BlobServiceClient, ContainerSasPermissions, generate_container_sas

import ckpttool
from ckpttool.core.files import DataFile
from ckpttool.errors import AccessError, CorruptError, IncompleteError
from ckpttool.execute import RunOptions, run
from ckpttool.execute.destinations import objects as written
from ckpttool.execute.destinations.local import MANIFEST
from ckpttool.storage import objects
from ckpttool.storage.buckets import s3
from ckpttool.storage.http import Client, client, using
from ckpttool.storage.place import open_file, parse_place, read_all, scan, walk
from tests.execute.plans import expected, reshard
from tests.execute.test_objects import with_small_files
from tests.helpers.bare_reads import bare_reads
from tests.helpers.s3_server import s3_server
from tests.peers.storage import servers
from tests.peers.storage.servers import Server

SOURCE = Path("fixtures/llama_tp8")
ODD = ["a b", "a+b", "ü€", "a%2Fb", "a&b=c", "x'y", "q?r#s"]


@pytest.fixture(autouse=True)
def _bare() -> Iterator[None]:
    with bare_reads():
        yield


@pytest.fixture(scope="module", params=["moto", "azurite", "gcp_emulator"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    arguments = [tmp_path_factory.mktemp("azurite")] if request.param == "azurite" else []
    with getattr(servers, request.param)(*arguments) as found:
        yield found
    client()._connections.forget()


def test_many_directories_beside_each_other_are_listed_at_once(server: Server) -> None:
    names = [f"step-{i}/{n}" for i in range(12) for n in ("a b", "deep/x'y")]
    for i, name in enumerate(names):
        server.put(f"steps/{name}", b"x" * (i + 1))
    objects.forget()
    place = parse_place(f"{server.root}/steps")
    assert {n: DataFile.at(place / n).size for n in walk(place)} == {n: i + 1 for i, n in enumerate(names)}


def test_names_and_bytes(server: Server) -> None:
    odd = [k for k in ODD if not (server.root.startswith("gs") and k == "q?r#s")]  # the emulator cuts it
    for k in odd:
        server.put(f"odd/{k}", k.encode() * 1000)
        server.put(f"odd/in/{k}/f", b"f")
    place = parse_place(f"{server.root}/odd")
    assert (place.is_dir(), place.is_file(), (place / "no").exists()) == (True, False, False)
    assert sorted(e.name for e in scan(place)) == sorted([*odd, "in"])
    assert sorted(walk(place)) == sorted([*odd, *(f"in/{k}/f" for k in odd)])
    for k in odd:
        assert DataFile.at(place / k)[1:3] == DataFile.at(place / k)[1:3], "a listing and a HEAD say the same"
        with open_file(place / k) as file:
            assert file.pread(10, len(k.encode()) * 500) == (k.encode() * 20)[:10]
            assert file.pread(100, file.info.size - 1) == k.encode()[-1:]
        assert read_all(place / k) == k.encode() * 1000


def test_an_object_that_has_changed(server: Server) -> None:
    server.put("changed", b"before")
    place = parse_place(f"{server.root}/changed")
    with open_file(place) as file:
        was = file.info
        assert file.pread(6, 0) == b"before"
        server.put("changed", b"behind")
        if not server.root.startswith("gs"):  # the emulator knows no conditions: see tests/storage/test_gcs.py
            with pytest.raises(CorruptError):
                file.pread(6, 0)
    assert not was.is_unchanged()


def test_what_is_not_there(server: Server) -> None:
    scheme = server.root.partition(":")[0]
    with pytest.raises(FileNotFoundError):
        read_all(parse_place(f"{server.root}/no/file"))
    with pytest.raises(IncompleteError, match="does not exist"):
        list(scan(parse_place(f"{scheme}://nobodys/run")))


def test_resharding_gives_what_paths_give(server: Server, tmp_path: Path) -> None:
    text = server.fill(SOURCE, "run")
    ckpttool.open(text).reshard(tp=2).run(tmp_path / "far")
    ckpttool.open(SOURCE).reshard(tp=2).run(tmp_path / "near")
    near = {p.name: p.read_bytes() for p in (tmp_path / "near").iterdir()}
    assert {p.name: p.read_bytes() for p in (tmp_path / "far").iterdir()} == near
    shared = [k for k in os.environ if "SECRET" in k or "CONNECTION_STRING" in k]
    for p in (tmp_path / "far").rglob("*"):
        assert not any(os.environ[k].encode() in p.read_bytes() for k in shared)


def test_a_store_with_a_certificate_of_its_own(tmp_path: Path) -> None:
    authority, context = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    with s3_server(tls=context) as server:
        server.put("bucket", "run/file", b"12345678" * 1000)
        with patch.dict(os.environ, server.environment()), patch.object(s3, "TRIES", 1), using(Client(tries=1)):
            objects.close()
            with pytest.raises(AccessError, match="does not answer"):
                parse_place("s3://bucket/run").is_dir()
            objects.close()
        own = server.environment() | {"AWS_CA_BUNDLE": str(tmp_path / "ca.pem")}
        with patch.dict(os.environ, own), using(Client()) as web:
            assert read_all(parse_place("s3://bucket/run/file")) == b"12345678" * 1000
            assert "GetObject" in server.operations()
            web._connections.forget()
            objects.close()


def test_azure_with_each_kind_of_credentials(tmp_path: Path) -> None:
    with servers.azurite(tmp_path) as server:
        server.put("run/a", b"12345")
        text = server.environment["AZURE_STORAGE_CONNECTION_STRING"]
        url = text.partition("BlobEndpoint=")[2].rstrip(";")
        at = {"AZURE_STORAGE_CONNECTION_STRING": "", "AZURE_STORAGE_SERVICE_ENDPOINT": url}
        names = {**at, "AZURE_STORAGE_ACCOUNT": servers.ACCOUNT}
        sas = generate_container_sas(
            servers.ACCOUNT, "box", account_key=servers.KEY, permission=ContainerSasPermissions(read=True, list=True),
            expiry="2100-01-01",
        )  # fmt: skip
        for more in ({"AZURE_STORAGE_KEY": servers.KEY}, {"AZURE_STORAGE_SAS_TOKEN": sas}):
            with patch.dict(os.environ, names | more):
                objects.close()
                place = parse_place("az://box/run")
                assert [read_all(place / e.name) for e in scan(place)] == [b"12345"]
        wrong = {"AZURE_STORAGE_KEY": "d3Jvbmc="}
        with patch.dict(os.environ, names | wrong):
            objects.close()
            with pytest.raises(AccessError, match="refuses access"):
                parse_place("az://box/run").is_dir()
        with patch.dict(os.environ, names | {"CKPTTOOL_ANONYMOUS": "1"}):
            objects.close()
            with pytest.raises((AccessError, IncompleteError)):
                parse_place("az://box/run").is_dir()
            with BlobServiceClient.from_connection_string(text) as service:
                service.get_container_client("box").set_container_access_policy({}, public_access="container")
            objects.close()
            assert read_all(parse_place("az://box/run/a")) == b"12345"
        objects.close()
    client()._connections.forget()


def test_moto_takes_what_is_written_in_parts(tmp_path: Path) -> None:
    plan = with_small_files(reshard(tmp_path / "src", [((1536, 1024), 0), ((1024, 2048), 1)], 2, 2))
    with servers.moto() as server, patch.object(written, "CHUNK", 5 << 20):
        run(plan, parse_place("s3://bucket/hf"), RunOptions(manifest=True))
        keys = server.keys()
        there = {k: server.get(k) for k in keys}
        assert {k: there[f"hf/{k}"] for k in expected(plan)} == expected(plan)
        assert set(there) == {f"hf/{k}" for k in [*expected(plan), MANIFEST]}
        with closing(boto3.client("s3")) as s3_client:
            assert "Uploads" not in s3_client.list_multipart_uploads(Bucket="bucket")
            etags = [o["ETag"] for o in s3_client.list_objects_v2(Bucket="bucket")["Contents"]]
        assert any("-" in e for e in etags), "an object was made of parts"
