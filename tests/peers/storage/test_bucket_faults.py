"""``s3://`` through a proxy that spoils answers, before a server that others wrote."""

from __future__ import annotations

import os
from unittest.mock import patch

import pytest

from ckpttool.storage import objects
from tests.peers.storage.servers import moto
from tests.storage.fault_proxy import fault_proxy, random_choice, read_place
from tests.storage.test_faults import DATA, STORE_SECONDS


@pytest.mark.parametrize("rate", [0.0, 0.2, 0.5])
def test_random_faults(rate: float) -> None:
    with moto() as server:
        server.put("f.safetensors", DATA)
        to = server.environment["AWS_ENDPOINT_URL"]
        with fault_proxy(to, random_choice(1, rate), 1) as proxy, patch.dict(os.environ, AWS_ENDPOINT_URL=proxy.url):
            objects.close()
            right, errors = read_place(f"{server.root}/f.safetensors", DATA, objects.forget, 1, STORE_SECONDS)
    assert right + errors == 6
    assert not errors or rate
