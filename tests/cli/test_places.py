"""What names a place on the command line and in the API reaches the storage as it was written."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest

import ckpttool as library
from ckpttool.core.files import Remote
from ckpttool.errors import UsageError
from ckpttool.storage.access import ANONYMOUS, OFFLINE, anonymous, offline
from ckpttool.storage.place import SCHEMES
from tests.helpers.command import ckpttool

FIXTURES = Path(__file__).parents[2] / "fixtures"
HERE = FIXTURES / "hf_tiny_source"
PROGRAM = FIXTURES / "paddle_programs/pir/model.json"
URL = "there://host//dir/./a%20b?sig=x"

COMMANDS: dict[str, tuple[object, ...]] = {
    "reshard SRC": ("reshard", URL, "dst"),
    "reshard DST": ("reshard", HERE, URL),
    "reshard --also": ("reshard", HERE, "dst", "--also", URL),
    "reshard --aoa": ("reshard", HERE, "dst", "--aoa", URL),
    "merge SRC": ("merge", URL, "-o", "dst"),
    "merge DST": ("merge", HERE, "-o", URL),
    "merge several": ("merge", HERE, URL, "-o", "dst"),
    "merge --base": ("merge", HERE, HERE, "--base", URL, "--method", "ties", "-o", "dst"),
    "drop-keys SRC": ("drop-keys", URL, "dst", "lm_head.*"),
    "drop-keys DST": ("drop-keys", HERE, URL, "lm_head.*"),
    "inspect SRC": ("inspect", URL),
    "inspect --check": ("inspect", URL, "--check"),
    "inspect --imports": ("inspect", URL, "--imports"),
    "inspect --header": ("inspect", URL, "--header"),
    "inspect --write-index": ("inspect", URL, "--write-index"),
    "inspect --diff": ("inspect", HERE, "--diff", URL),
    "quantize SRC": ("quantize", URL, "dst"),
    "quantize DST": ("quantize", HERE, URL),
    "size SRC": ("size", URL),
    "size --config": ("size", HERE, "--config", URL),
    "convert-json SRC": ("convert-json", URL, "dst"),
    "convert-json DST": ("convert-json", PROGRAM, URL),
    "convert-json --params": ("convert-json", PROGRAM, "dst", "--params", URL),
    "convert-json --names": ("convert-json", PROGRAM, "dst", "--names", URL),
    "convert-json --program": ("convert-json", HERE, "dst", "--program", URL),
}

CALLS: dict[str, Callable[[], object]] = {
    "open": lambda: library.open(URL),
    "also": lambda: library.open(HERE, also=URL),
    "run": lambda: library.open(HERE).reshard(tp=1).run(URL),
    "diff": lambda: library.open(HERE).diff(URL),
    "aoa": lambda: library.open(HERE).reshard(aoa=URL),
    "merge": lambda: library.merge([HERE, URL], method="linear", weights=[1, 1]),
    "base": lambda: library.merge([HERE, HERE], method="ties", base=URL),
    "check": lambda: library.check(URL),
    "size": lambda: library.size(URL),
    "convert": lambda: library.convert(PROGRAM, URL),
    "program": lambda: library.convert(HERE, "dst", program=URL),
}


def asked(text: str) -> Remote:
    """A storage that says what it is asked for."""
    raise UsageError(f"asked for {text}!")


@pytest.fixture(autouse=True)
def _there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SCHEMES, "there", asked)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_hand_on_urls(command: str) -> None:
    done = ckpttool(*COMMANDS[command])
    assert (done.code, f"asked for {URL}!" in done.err) == (2, True), done.err


@pytest.mark.parametrize("call", CALLS)
def test_the_api_hands_on_urls(call: str) -> None:
    with pytest.raises(UsageError) as error:
        CALLS[call]()
    assert f"asked for {URL}!" in error.value.what


def test_settings_are_those_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the processes that compute, and whoever calls, have them, too; and set before a place is looked at."""

    def settings(_: str) -> Remote:
        raise UsageError(f"{anonymous()}, {offline()}!")

    monkeypatch.setitem(SCHEMES, "there", settings)
    monkeypatch.delenv(ANONYMOUS, raising=False)
    monkeypatch.delenv(OFFLINE, raising=False)
    for options, said in (((), "False, False!"), (("--anonymous",), "True, False!")):
        with patch.dict(os.environ):
            assert said in ckpttool("inspect", URL, *options).err, options


MEANT = {
    "gcs://b/x?k=secret": "did you mean gs://b/x?",
    "s3a://b/x": "did you mean s3://b/x?",
    "S3://b/x": "did you mean s3://b/x?",
    "file:///models/x": "give the path: /models/x",
    "abfss://c@account/x": "Azure blobs are az://CONTAINER/PATH",
    "s3:bucket/x": "did you mean s3://bucket/x?",
    "S3:/bucket/x": "did you mean s3://bucket/x?",
    "https:me:secret@host/x?k=secret": "did you mean https://host/x?",
    "hdfs://me:secret@host/x": "places on other machines are hf://ORG/MODEL",
}


@pytest.mark.parametrize("text", MEANT)
def test_a_url_that_nobody_knows_is_no_directory(text: str, tmp_path: Path) -> None:
    for done in (ckpttool("inspect", text), ckpttool("reshard", HERE, text)):
        assert (done.code, f"hint: {MEANT[text]}" in done.err) == (2, True), done.err
        assert "secret" not in done.err
    assert not list(tmp_path.iterdir())


PACKAGES = {"s3": "boto3", "gs": "google.auth", "az": "azure.core"}


@pytest.mark.parametrize("scheme", PACKAGES)
def test_a_package_that_is_missing_is_named(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = {"s3": "s3", "gs": "gcs", "az": "azure"}[scheme]
    monkeypatch.delitem(sys.modules, f"ckpttool.storage.buckets.{module}", raising=False)
    monkeypatch.setitem(sys.modules, PACKAGES[scheme], None)
    for done in (ckpttool("inspect", f"{scheme}://bucket/x"), ckpttool("reshard", HERE, f"{scheme}://bucket/x")):
        assert done.code == 2, done.err
        assert f"{scheme}:// needs a package that is not installed: {PACKAGES[scheme]}" in done.err
        assert "hint: pip install 'ckpttool[remote]'" in done.err


def test_the_web_is_read_only() -> None:
    done = ckpttool("reshard", HERE, "https://127.0.0.1:1/x?k=secret")
    assert (done.code, "https:// is read-only" in done.err, "secret" in done.err) == (2, True, False), done.err


def test_names_of_the_hub_are_told_what_they_are() -> None:
    assert "a model of the Hugging Face Hub is hf://org/model" in ckpttool("inspect", "org/model").err
