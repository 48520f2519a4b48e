"""Keys, tokens and signatures: in requests to their own host, and nowhere else.

Commands run on places that need credentials, where all is well and where it is not. Then every file that they have
left, and all that they have printed, is searched for what the servers have been sent.
"""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch
from urllib.parse import parse_qsl, quote

import pytest

from ckpttool.storage import caches, hub_files, objects
from tests.helpers.bare_reads import bare_reads
from tests.helpers.command import Done, ckpttool
from tests.helpers.hub_server import hub_server
from tests.helpers.s3_server import s3_server
from tests.helpers.web_server import web_server
from tests.hostile.liar import hasty

MODEL = Path(__file__).parents[2] / "fixtures/hf_tiny_source"
SECRETS = ("geheim", "hf_owner", "AKIATESTKEY", "a-secret-that-nobody-may-see")
_NAMED = re.compile(r"(?i)signature|credential|security-token|^sig$|^token$")


class Stand(NamedTuple):
    """A server with a model, and what it was sent."""

    src: str
    dst: str
    """"" where nothing can be written."""
    sent: Callable[[], set[str]]
    """Secrets that came: of headers and of queries."""
    fail: Callable[[], None]
    """From now on, nothing is allowed."""


def secrets(query: str, authorization: str) -> set[str]:
    """What of a request nobody else may know."""
    found = {v for k, v in parse_qsl(query) if _NAMED.search(k)}
    return {s for s in {*found, *re.split(r"[ ,=]", authorization)} if len(s) >= 16 and "/" not in s}


@contextmanager
def on_s3(model: Path, _: Path) -> Iterator[Stand]:
    with s3_server("bucket") as server, patch.dict(os.environ, server.environment()):
        for p in model.iterdir():
            server.put("bucket", f"model/{p.name}", p.read_bytes())
        objects.close()
        yield Stand(
            "s3://bucket/model",
            "s3://bucket/made",
            lambda: set().union(*[secrets("", r.headers.get("authorization", "")) for r in server.requests]),
            lambda: setattr(server, "choose", lambda *_: "403"),
        )
        objects.close()


@contextmanager
def on_the_hub(model: Path, home: Path) -> Iterator[Stand]:
    with hub_server() as server:
        server.add("org/model", model, private=True)
        with server.clients(home, token="hf_owner"):  # noqa: S106 - bait
            yield Stand(
                "hf://org/model",
                "",
                lambda: set().union(*[secrets(a.query, a.token) for a in server.asked]),
                partial(server.fail, ".", 403, times=1000),
            )


@contextmanager
def on_the_web(model: Path, _: Path) -> Iterator[Stand]:
    with web_server({f"model/{p.name}": p.read_bytes() for p in model.iterdir()}) as server:
        caches.forget()
        yield Stand(
            f"{server.url}/model?X-Amz-Signature=geheimgeheimgeheimgeheim&sig=geheim",
            "",
            lambda: {"geheimgeheimgeheimgeheim"},
            server.files.clear,
        )
        caches.forget()


STANDS = {"s3": on_s3, "hf": on_the_hub, "http": on_the_web}


@pytest.fixture
def court(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(hub_files, "SMALL_LARGE", 0)
    with hasty(), bare_reads():
        yield tmp_path


def told(done: list[Done], room: Path) -> str:
    """All that was printed, and all that lies in files."""
    texts = [d.out + d.err for d in done]
    for path in room.rglob("*"):
        if path.is_file():
            texts.append(f"{path.name}\n{path.read_bytes().decode('latin-1')}")
    return "\n".join(texts)


@pytest.mark.sample("hf", "http")  # boto3 takes seconds
@pytest.mark.parametrize("where", STANDS)
def test_secrets_are_not_told(court: Path, where: str) -> None:
    """Neither by what works nor by what fails; not in outputs, cards, manifests, plans or journals."""
    model, room = MODEL, court / "room"
    room.mkdir()
    done = []
    with ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ, {"TMPDIR": str(room)}))
        stand = stack.enter_context(STANDS[where](model, court / "home"))
        src = stand.src
        targets = [room / "hf", *[stand.dst] * bool(stand.dst)]
        for words in (
            ("inspect", src), ("inspect", src, "--list", "--json"), ("inspect", src, "--files"),
            ("inspect", src, "--check"), ("inspect", src, "--metadata"), ("inspect", src, "--diff", src),
            *[("reshard", src, dst, "--to", "hf", "--manifest", "-v", "--verify") for dst in targets],
            ("reshard", src, room / "plan", "--dry-run", "--json"), ("reshard", src, room / "json", "--json"),
            ("drop-keys", src, room / "dropped", "lm_head*", "--manifest"),
            ("merge", src, model, "-o", room / "merged", "--card", "--manifest", "--json"),
            ("size", src), ("quantize", src, room / "cast", "--block", "16x16"),
        ):  # fmt: skip
            done.append(ckpttool(*words))
            assert done[-1].code == 0, (words[0], done[-1].err)
        sent = stand.sent() | set(SECRETS)
        assert len(sent) > len(SECRETS) or where != "s3"
        stand.fail()
        for words in (("inspect", src), ("reshard", src, room / "not"), ("merge", src, model, "-o", room / "no")):
            done.append(ckpttool(*words))
        if stand.dst:
            done.append(ckpttool("reshard", model, stand.dst + "2"))
            assert done[-1].code
    text = told(done, room)
    assert "geheim" not in str(sorted(p.name for p in room.rglob("*")))
    forms = {s: (s, quote(s, safe=""), base64.b64encode(s.encode()).decode().rstrip("=")) for s in sent}
    assert not {s for s, those in forms.items() if any(f in text for f in those)}
