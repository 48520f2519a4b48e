"""Redirects that are refused, on every way to bytes elsewhere: from where, to where, why, and what to do."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from ckpttool.storage import caches, objects
from tests.helpers.command import ckpttool
from tests.helpers.hub_server import Hub

FIXTURES = Path(__file__).parents[2] / "fixtures"
SECRET = "a-signature-of-somebody"  # noqa: S105
TO = f"http://169.254.169.254/latest/{SECRET}/meta?token={SECRET}"
ASKED: list[str] = []


class Leads(BaseHTTPRequestHandler):
    """Answers everything with a redirect."""

    code = 302
    body = b""

    def do_GET(self) -> None:
        ASKED.append(self.path)
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.send_response(self.code)
        self.send_header("Location", TO)
        self.send_header("Content-Length", str(len(self.body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(self.body)

    do_HEAD = do_PUT = do_POST = do_GET  # noqa: N815 - the names of http.server

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Its URL, which all clouds have as their address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Leads) as served:
        threading.Thread(target=served.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{served.server_port}"
        for name in ("AWS_ENDPOINT_URL", "STORAGE_EMULATOR_HOST"):
            monkeypatch.setenv(name, url)
        monkeypatch.setenv("AZURE_STORAGE_SERVICE_ENDPOINT", f"{url}/account")
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT", "account")
        monkeypatch.setenv("AZURE_STORAGE_KEY", "a2V5")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        monkeypatch.delenv("AZURE_STORAGE_CONNECTION_STRING", raising=False)
        objects.close()
        yield url
        served.shutdown()
    objects.close()
    caches.forget()


@pytest.mark.parametrize("code", [301, 302, 307, 308])
@pytest.mark.parametrize(
    "place",
    [
        "URL/model",
        "URL/model.safetensors",
        "hf://org/model",
        "s3://bucket/model",
        "gs://bucket/model",
        "az://box/model",
    ],
)
def test_it_is_said(server: str, place: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not place.startswith("URL"):
        pytest.importorskip({"hf": "huggingface_hub", "s3": "boto3", "gs": "google.auth", "az": "azure"}[place[:2]])
    monkeypatch.setattr(Leads, "code", code)
    ASKED.clear()
    with Hub().clients(tmp_path / "home", HF_ENDPOINT=server) if place.startswith("hf") else nullcontext():
        done = ckpttool("inspect", place.replace("URL", server))
    assert ASKED
    assert done.code == 1
    assert done.err.count("error: ") == 1
    assert "redirect" in done.err
    assert "to http://169.254.169.254" in done.err
    assert "refused" in done.err
    assert "hint: " in done.err
    assert SECRET not in done.err
    assert "does not exist" not in done.err


@pytest.mark.parametrize(
    ("dst", "code", "said"),
    [
        ("az://box/out", 302, "redirects to http://169.254.169.254"),
        ("az://box/out", 412, "does not come from Azure"),
        ("s3://bucket/out", 302, "redirects to http://169.254.169.254"),
        ("gs://bucket/out", 302, "redirects to http://169.254.169.254"),
    ],
)
def test_writing(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dst: str, code: int, said: str) -> None:
    """A login page, and a proxy that answers in JSON, where DST is: one error, and nothing is left."""
    pytest.importorskip({"az": "azure.storage.blob", "s3": "boto3", "gs": "google.auth"}[dst[:2]])
    assert server
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(Leads, "code", code)
    monkeypatch.setattr(Leads, "body", b'{"error": {"code": 412}}' if code == 412 else b"")
    done = ckpttool("reshard", FIXTURES / "hf_tiny_source", dst, "--tp-out", 2)
    assert done.code == 1
    assert said in done.err
    assert SECRET not in done.err
