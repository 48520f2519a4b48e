"""Reads through a proxy that spoils answers: the bytes are right, or there is an error; and soon."""

from __future__ import annotations

import hashlib
import os
import random
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import pytest

from ckpttool.errors import CkptError
from ckpttool.storage import caches, hub_files, objects
from ckpttool.storage.http import Client, HttpError, using
from ckpttool.storage.place import open_file, parse_place
from tests.helpers.google_server import google_server
from tests.helpers.hub_server import hub_server
from tests.helpers.s3_server import s3_server
from tests.helpers.web_server import WebServer, web_server
from tests.storage.fault_proxy import HARMLESS, SPOILS, Quick, fault_proxy, random_choice, read_place

DATA = random.Random(7).randbytes(600_000)  # noqa: S311 - not for secrets
TAG = f'"{hashlib.md5(DATA, usedforsecurity=False).hexdigest()}"'
SECONDS = 5.0
STORE_SECONDS = 15.0
"""A file of a store takes several requests: to list, to look, to read."""


@pytest.fixture(scope="module")
def server() -> Iterator[WebServer]:
    with web_server({"f.safetensors": DATA}) as served:
        yield served


def quick() -> Client:
    return Client(clock=Quick(), timeout=0.5, grace=0.2, tries=5)


def read(client: Client, url: str, start: int, stop: int) -> bytes:
    into = bytearray(stop - start)
    client.get_range(
        url, start, stop, memoryview(into), if_match=TAG, total=len(DATA), headers={"Authorization": "Bearer s3cr3t"}
    )
    return bytes(into)


@pytest.mark.product(one_in=4)
@pytest.mark.parametrize("fault", SPOILS)
def test_one_fault(server: WebServer, fault: str) -> None:
    """Each, for ever: an error, or the right bytes where the answer is odd and right. Once: the same."""
    for times in (1, 1 << 30):
        left = iter(range(times))
        with fault_proxy(server.url, lambda left=left: fault if next(left, None) is not None else None) as proxy:  # type: ignore[misc]
            client, began, error = quick(), time.monotonic(), None
            try:
                assert read(client, f"{proxy.url}/f.safetensors", 1000, 90_000) == DATA[1000:90_000]
            except HttpError as e:
                error = e
            client.stop()
        assert time.monotonic() - began < SECONDS
        assert "s3cr3t" not in str(error)
        if fault in HARMLESS:
            assert error is None, fault


def reads(server: WebServer, seed: int, rate: float, *, v6: bool = False) -> tuple[int, int]:
    """Random reads by the client and by a place, with random faults; how many were right, and how many errors."""
    draw = random.Random(seed)  # noqa: S311 - not for secrets
    right = errors = 0
    with fault_proxy(
        server.url, lambda: draw.choice(list(SPOILS)) if draw.random() < rate else None, seed, v6=v6
    ) as proxy:
        url, client = f"{proxy.url}/f.safetensors", quick()
        for i in range(8):
            start = draw.randrange(len(DATA) - 1)
            stop = draw.randint(start + 1, min(len(DATA), start + 300_000))
            began = time.monotonic()
            try:
                if i % 2:
                    caches.forget()
                    with using(client), open_file(parse_place(url)) as file:
                        got = file.pread(stop - start, start)
                else:
                    got = read(client, url, start, stop)
                assert got == DATA[start:stop], (seed, i)
                right += 1
            except (HttpError, CkptError, FileNotFoundError):
                errors += 1
            assert time.monotonic() - began < SECONDS, (seed, i)
        client.stop()
        assert {h.get("if-match", TAG) for h in proxy.heard} == {TAG}
    return right, errors


@pytest.mark.parametrize("seed", range(3))
def test_random_faults(server: WebServer, seed: int) -> None:
    right, errors = reads(server, seed, 0.4)
    assert right
    assert right + errors == 8


@pytest.mark.thorough
def test_random_faults_for_long(server: WebServer) -> None:
    found = [reads(server, seed, 0.1 + seed % 8 / 10) for seed in range(100, 300)]
    assert sum(errors for _, errors in found) > 10
    assert sum(right for right, _ in found) > 500


@contextmanager
def s3_place(seed: int, rate: float) -> Iterator[str]:
    with s3_server() as server, fault_proxy(server.url, random_choice(seed, rate), seed) as proxy:
        server.put("bucket", "f.safetensors", DATA)
        objects.close()
        with patch.dict(os.environ, server.environment() | {"AWS_ENDPOINT_URL": proxy.url}):
            yield "s3://bucket/f.safetensors"
        objects.close()


@contextmanager
def gcs_place(seed: int, rate: float) -> Iterator[str]:
    with google_server() as server, fault_proxy(server.url, random_choice(seed, rate), seed) as proxy:
        server.put("bucket", "f.safetensors", DATA)
        objects.close()
        with patch.dict(os.environ, {"STORAGE_EMULATOR_HOST": proxy.url}):
            yield "gs://bucket/f.safetensors"
        objects.close()


@contextmanager
def hub_place(seed: int, rate: float) -> Iterator[str]:
    choose = random_choice(seed, rate)
    with (
        TemporaryDirectory() as home,
        hub_server() as hub,
        fault_proxy(hub.endpoint, choose, seed) as front,
        fault_proxy(hub.cdn, choose, seed) as cdn,
        patch.object(hub_files, "SMALL_LARGE", 0),
    ):
        hub.add("org/one", {"f.safetensors": DATA})
        hub.endpoint, hub.cdn = front.url, cdn.url
        with hub.clients(Path(home)):
            yield "hf://org/one/f.safetensors"


STORES = {
    "s3": (s3_place, objects.forget),
    "gcs": (gcs_place, objects.forget),
    "hub": (hub_place, lambda: hub_files.forget("org/one")),
}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("store", STORES)
def test_random_faults_of_stores(store: str, seed: int) -> None:
    place, forget = STORES[store]
    with place(seed, 0.3) as text:
        right, errors = read_place(text, DATA, forget, seed, STORE_SECONDS)
    assert right + errors == 6
    with place(seed, 0) as text:
        assert read_place(text, DATA, forget, seed, STORE_SECONDS) == (6, 0)


@pytest.mark.thorough
@pytest.mark.parametrize("store", STORES)
def test_random_faults_of_stores_for_long(store: str) -> None:
    place, forget = STORES[store]
    found = []
    for seed in range(100, 140):
        with place(seed, 0.1 + seed % 6 / 10) as text:
            found.append(read_place(text, DATA, forget, seed, STORE_SECONDS))
    assert sum(errors for _, errors in found) > 10
    assert sum(right for right, _ in found) > 60


def test_an_address_of_ipv6(server: WebServer) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    assert reads(server, 1, 0, v6=True) == (8, 0)
