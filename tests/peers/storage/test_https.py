"""TLS: certificates, redirects, proxies and logins over real connections; the certificates are trustme's."""

from __future__ import annotations

import os
import select
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import pytest
import trustme

from ckpttool.storage import caches, http
from ckpttool.storage.http import Client, HttpError, RefusedRedirectError
from tests.helpers.command import ckpttool, reshard
from tests.helpers.web_server import WebServer, redirect, web_server
from tests.storage.test_http import DATA, Fast, get

FIXTURES = Path(__file__).parents[3] / "fixtures"


class Authority(NamedTuple):
    """Who signs, and where its certificate is."""

    ca: trustme.CA
    path: str

    def server(self, *names: str) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.ca.issue_cert(*names).configure_cert(context)
        return context

    def client(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=self.path)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    ca, path = trustme.CA(), tmp_path_factory.mktemp("ca") / "ca.pem"
    ca.cert_pem.write_to_path(path)
    return Authority(ca, str(path))


@pytest.fixture(scope="module")
def _server(authority: Authority) -> Iterator[WebServer]:
    with web_server({"f": DATA}, authority.server("127.0.0.1", "files.example")) as server:
        yield server


@pytest.fixture
def server(_server: WebServer) -> WebServer:
    _server.clear()
    _server.files = {"f": DATA}
    caches.forget()
    return _server


def test_ranges_over_tls(server: WebServer, authority: Authority) -> None:
    client = Client(tls=authority.client())
    for _ in range(3):
        assert get(client, f"{server.url}/f") == DATA[100:2_000_100]
    assert server.connections == 1


def test_a_certificate_that_is_not_trusted(server: WebServer) -> None:
    with pytest.raises(HttpError, match=r"the certificate of 127.0.0.1:\d+ is not trusted") as e:
        get(Client(), f"{server.url}/f")
    assert e.value.status == 0
    assert server.count() == 0
    assert server.connections <= 1


def test_a_certificate_of_another_host(authority: Authority) -> None:
    with (
        web_server({"f": DATA}, authority.server("other.example")) as server,
        pytest.raises(HttpError, match="is not trusted: IP address mismatch"),
    ):
        get(Client(tls=authority.client()), f"{server.url}/f")


BUNDLES = ["SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"]


@pytest.mark.parametrize("name", BUNDLES)
def test_certificates_of_the_environment(server: WebServer, authority: Authority, name: str) -> None:
    others = {k: v for k, v in os.environ.items() if k not in BUNDLES}
    with patch.dict(os.environ, others | {name: authority.path}, clear=True):
        assert get(Client(), f"{server.url}/f", 0, 9) == DATA[:9]


def test_no_tls_where_it_was_asked_for() -> None:
    clock = Fast()
    with web_server({"f": DATA}) as server, pytest.raises(HttpError, match="TLS connection to"):
        get(Client(clock=clock), f"{server.url.replace('http:', 'https:')}/f")
    assert len(clock.slept) == 2


def test_a_body_that_ends_early(server: WebServer, authority: Authority) -> None:
    """The end of a TLS connection is not the end of a file."""
    clock = Fast()
    client = Client(tls=authority.client(), clock=clock)
    server.on("/f", lambda _, r: replace(r, body=r.data[:1_000_000], then="close"), times=2)
    assert get(client, f"{server.url}/f") == DATA[100:2_000_100]
    assert len(clock.slept) == 2


def test_redirects_from_https_to_http(server: WebServer, authority: Authority) -> None:
    with web_server({"f": DATA}) as other:
        server.on("/f", redirect(f"{other.url}/f"))
        with pytest.raises(RefusedRedirectError, match="redirects from https to http"):
            get(Client(tls=authority.client()), f"{server.url}/f")
        assert other.connections == 0
        # Nor by a detour; to https it may go.
        server.on("/g", redirect("/f"))
        with pytest.raises(RefusedRedirectError, match="redirects from https to http"):
            get(Client(tls=authority.client()), f"{server.url}/g")
        other.on("/h", redirect(f"{server.url}/h"))
        server.files["h"] = DATA
        assert get(Client(tls=authority.client()), f"{other.url}/h", 0, 9) == DATA[:9]


@contextmanager
def connect_proxy(to: tuple[str, int]) -> Iterator[tuple[str, list[bytes]]]:
    """A proxy that passes every tunnel on to one place, and what it was asked for."""
    asked: list[bytes] = []

    def tunnel(a: socket.socket) -> None:
        with closing(a), suppress(OSError), socket.create_connection(to) as b:
            asked.append(a.recv(1 << 16))
            a.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
            while True:
                for s in select.select([a, b], [], [])[0]:
                    data = s.recv(1 << 16)
                    if not data:
                        return
                    (b if s is a else a).sendall(data)

    def serve(listening: socket.socket) -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=tunnel, args=(listening.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve, args=(listening,), daemon=True)
        thread.start()
        yield f"127.0.0.1:{listening.getsockname()[1]}", asked
        listening.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_a_tunnel_of_a_proxy(server: WebServer, authority: Authority) -> None:
    """TLS is with the host itself, behind the proxy, which sees neither what is asked for nor secrets."""
    port = int(server.url.rpartition(":")[2])
    with connect_proxy(("127.0.0.1", port)) as (proxy, asked):
        environment = {"HTTPS_PROXY": f"http://me:word@{proxy}", "NO_PROXY": "", "no_proxy": ""}
        with patch.dict(os.environ, environment), closing_client(authority) as client:
            for _ in range(2):
                assert (
                    get(client, "https://files.example/f?signature", headers={"Authorization": "x"})
                    == DATA[100:2_000_100]
                )
            with pytest.raises(HttpError, match="not trusted: Hostname mismatch"):
                get(client, "https://elsewhere.example/f")
            with pytest.raises(RefusedRedirectError, match="loopback"):
                get(client, f"https://127.0.0.1:{port}/f", origin="https://files.example/")
    assert [a.split()[1] for a in asked] == [b"files.example:443", b"elsewhere.example:443"]
    assert b"proxy-authorization: Basic bWU6d29yZA==" in asked[0]
    assert b"signature" not in asked[0]
    assert server.asked[0].headers["host"] == "files.example"
    assert "proxy-authorization" not in server.asked[0].headers


@contextmanager
def closing_client(authority: Authority) -> Iterator[Client]:
    client = Client(tls=authority.client(), clock=Fast())
    yield client
    client.stop()


def test_logins_and_commands_over_tls(server: WebServer, authority: Authority, tmp_path: Path) -> None:
    model = FIXTURES / "hf_tiny_source"
    server.files = {f"m/{p.name}": p.read_bytes() for p in model.iterdir()}
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login me password s3cr3t\n")
    reshard(model, tmp_path / "here", "--tp-out", "2")
    with patch.dict(os.environ, {"NETRC": str(netrc)}), http.using(Client(tls=authority.client(), clock=Fast())):
        reshard(f"{server.url}/m", tmp_path / "there", "--tp-out", "2", "--verify")
        assert {a.headers.get("authorization") for a in server.asked} == {"Basic bWU6czNjcjN0"}
    for p in (tmp_path / "here").iterdir():
        assert p.read_bytes() == (tmp_path / "there" / p.name).read_bytes()
    caches.forget()
    with http.using(Client(clock=Fast())):
        done = ckpttool("inspect", f"{server.url}/m/model.safetensors")
    assert done.code == 1
    assert "error: the file cannot be reached: the certificate of" in done.err
