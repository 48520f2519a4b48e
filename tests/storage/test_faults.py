"""Reads through a proxy that spoils answers: the bytes are right, or there is an error; and soon."""

from __future__ import annotations

import hashlib
import random
import socket
import time
from collections.abc import Iterator

import pytest

from ckpttool.errors import CkptError
from ckpttool.storage import caches
from ckpttool.storage.http import Client, HttpError, using
from ckpttool.storage.place import open_file, parse_place
from tests.helpers.web_server import WebServer, web_server
from tests.storage.fault_proxy import HARMLESS, SPOILS, Quick, fault_proxy

DATA = random.Random(7).randbytes(600_000)  # noqa: S311 - not for secrets
TAG = f'"{hashlib.md5(DATA, usedforsecurity=False).hexdigest()}"'
SECONDS = 5.0


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


def test_an_address_of_ipv6(server: WebServer) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    assert reads(server, 1, 0, v6=True) == (8, 0)
