"""Credentials that no server can have given out: which one, what is wrong with it, and never what it is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpttool.storage import objects
from tests.helpers.command import ckpttool
from tests.helpers.hub_server import Hub

SECRET = "QUtJQVNFQ1JFVA=="  # noqa: S105 - base64, as keys of Azure are
S3 = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
AZURE = ("AZURE_STORAGE_ACCOUNT", "AZURE_STORAGE_KEY", "AZURE_STORAGE_SAS_TOKEN", "AZURE_STORAGE_CONNECTION_STRING")
NAMES = {**dict.fromkeys(S3, "s3://bucket/m"), **dict.fromkeys(AZURE, "az://box/m")}
KINDS = {"\n": "a line break", "\r": "a line break", "\x01": "a control character", "\u00e9": "not ASCII"}


@pytest.fixture(autouse=True)
def nobody(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An environment with a login for each cloud, at an address where nobody answers."""
    for name in (*NAMES, "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT", "account")
    objects.close()
    yield
    objects.close()


def said(place: str) -> str:
    done = ckpttool("inspect", place)
    assert done.code == 1
    assert done.err.count("error: ") == 1
    assert "hint: " in done.err
    assert "does not answer" not in done.err
    assert SECRET not in done.err
    return done.err


@pytest.mark.parametrize("wrong", KINDS, ids=ascii)
@pytest.mark.parametrize("name", NAMES)
def test_what_cannot_be_sent(monkeypatch: pytest.MonkeyPatch, name: str, wrong: str) -> None:
    pytest.importorskip("boto3" if name in S3 else "azure.storage.blob")
    monkeypatch.setenv(name, f"{SECRET}{wrong}x")
    error = said(NAMES[name])
    assert f"{name} has " in error
    assert KINDS[wrong] in error
    assert f"at position {len(SECRET) + 1} of {len(SECRET) + 2}" in error


@pytest.mark.parametrize("name", S3)
def test_at_the_end(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """As `cat FILE` puts it there."""
    pytest.importorskip("boto3")
    monkeypatch.setenv(name, f"{SECRET}\n")
    assert f"{name} has a line break at its end" in said("s3://bucket/m")


def test_a_key_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("azure.storage.blob")
    monkeypatch.setenv("AZURE_STORAGE_KEY", "not the key")
    assert "AZURE_STORAGE_KEY is not the key of an account: it is not base64" in said("az://box/m")


@pytest.mark.parametrize("wrong", KINDS, ids=ascii)
def test_tokens_of_the_hub(tmp_path: Path, wrong: str) -> None:
    pytest.importorskip("huggingface_hub")
    with Hub().clients(tmp_path / "home", token=f"{SECRET}{wrong}x", HF_ENDPOINT="http://127.0.0.1:1"):
        error = said("hf://org/model")
    assert "HF_TOKEN has " in error
    assert KINDS[wrong] in error


@pytest.mark.parametrize("content", ["", SECRET, json.dumps({"type": "service_account", "private_key": f"{SECRET}\n"})])
def test_files_of_google(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str) -> None:
    pytest.importorskip("google.auth")
    monkeypatch.delenv("STORAGE_EMULATOR_HOST", raising=False)
    file = tmp_path / "credentials.json"
    file.write_text(content)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(file))
    error = said("gs://bucket/m")
    assert "cannot use GOOGLE_APPLICATION_CREDENTIALS: " in error
    assert str(file) in error
