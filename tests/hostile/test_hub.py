"""A Hub that lies about a repository: names, sizes, commits, where its files are, and what is in them."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch
from urllib.parse import unquote

import pytest

from ckpttool.storage import hub_files
from tests.helpers.families import MODELS
from tests.helpers.hub_server import _read_environment
from tests.helpers.tensorfile import save_hf
from tests.hostile.court import Court
from tests.hostile.liar import Asked, Liar, answer, hasty

LLAMA = MODELS["llama"]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_geheimgeheimgeheim"  # noqa: S105 - bait
WEIGHTS = "model.safetensors"


class LyingHub:
    """A repository ``org/model`` of two files; each answer goes through a function that may change it."""

    def __init__(self, directory: Path) -> None:
        save_hf(directory, LLAMA.tensors(), LLAMA.config)
        self.files = {p.name: p.read_bytes() for p in directory.iterdir()}
        self.info: Any = {"id": "org/model", "sha": COMMIT}
        self.tree: Any = [self._entry(n) for n in self.files]
        self.large: dict[str, str] = {}
        """Headers of what HEAD says of the weights, in place of the right ones; None leaves one out."""
        self.raw: dict[str, Iterable[bytes]] = {}
        """Answers to paths, as they are."""

    def _entry(self, name: str) -> dict[str, Any]:
        data = self.files[name]
        entry: dict[str, Any] = {"rfilename": name, "size": len(data), "blobId": _git(data)}
        if name == WEIGHTS:
            sha = hashlib.sha256(data).hexdigest()
            pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha}\nsize {len(data)}\n".encode()
            entry |= {"blobId": _git(pointer), "lfs": {"sha256": sha, "size": len(data), "pointerSize": len(pointer)}}
        return entry

    def say(self, asked: Asked) -> Iterable[bytes]:
        path = unquote(asked.path.partition("?")[0])
        if path in self.raw:
            return self.raw[path]
        if path.startswith("/api/models/org/model"):
            if isinstance(self.tree, bytes) or not isinstance(self.info, dict):
                return self._json(self.tree if isinstance(self.tree, bytes) else self.info)
            return self._json({"siblings": self.tree, **self.info})
        if path.startswith("/cdn/"):
            return self._bytes(asked, self.files[WEIGHTS], '"of the CDN"')
        name = path.rpartition("/")[2]
        if not path.startswith("/org/model/resolve/") or name not in self.files:
            return answer("404 Not Found", b"", "X-Error-Code: EntryNotFound")
        data = self.files[name]
        if name != WEIGHTS:
            return self._bytes(asked, data, f'"{_git(data)}"', f"X-Repo-Commit: {COMMIT}")
        headers = {
            "X-Repo-Commit": COMMIT,
            "X-Linked-Size": str(len(data)),
            "X-Linked-ETag": f'"{hashlib.sha256(data).hexdigest()}"',
            "Location": f"http://{asked.headers['host']}/cdn/{name}?Signature=geheim",
            **self.large,
        }
        return answer("302 Found", b"", *[f"{k}: {v}" for k, v in headers.items() if v])

    def _json(self, what: Any, *headers: str) -> Iterable[bytes]:
        body = what if isinstance(what, bytes) else json.dumps(what).encode()
        return answer("200 OK", body, "Content-Type: application/json", *headers)

    def _bytes(self, asked: Asked, data: bytes, tag: str, *headers: str) -> Iterable[bytes]:
        headers = (*headers, f"ETag: {tag}", "Accept-Ranges: bytes")
        if asked.method == "HEAD":
            return [answer("200 OK", data, *headers)[0]]
        if asked.span is None:
            return answer("200 OK", data, *headers)
        first, last = asked.span
        last = min(last, len(data) - 1)
        return answer(
            "206 Partial Content", data[first : last + 1], *headers, f"Content-Range: bytes {first}-{last}/{len(data)}"
        )


def _git(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0%b" % (len(data), data), usedforsecurity=False).hexdigest()


@contextmanager
def clients(endpoint: str, home: Path) -> Iterator[None]:
    """Let huggingface_hub find this endpoint and nothing else."""
    named = {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_CACHE": str(home / "hub"), "HF_TOKEN": TOKEN}
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
    try:
        with patch.dict(os.environ, {**kept, **named, "NO_PROXY": "*"}, clear=True):
            _read_environment()
            yield
    finally:
        _read_environment()


def entry(**changes: Any) -> Callable[[LyingHub], None]:
    """Another entry of the weights; ``lfs_`` before a name: of its part for large files."""

    def lie(hub: LyingHub) -> None:
        for e in hub.tree:
            if e["rfilename"] == WEIGHTS:
                e.update({k: v for k, v in changes.items() if not k.startswith("lfs_")})
                if isinstance(e.get("lfs"), dict):
                    e["lfs"].update({k[4:]: v for k, v in changes.items() if k.startswith("lfs_")})

    return lie


def extra(path: Any) -> Callable[[LyingHub], None]:
    """One entry more."""

    def lie(hub: LyingHub) -> None:
        hub.tree.append({"rfilename": path, "size": 9, "blobId": _git(b"surprise!")})
        if isinstance(path, str):
            hub.files.setdefault(path.rpartition("/")[2], b"surprise!")

    return lie


def put(name: str, value: Any) -> Callable[[LyingHub], None]:
    return lambda hub: setattr(hub, name, value)


def large(**headers: str) -> Callable[[LyingHub], None]:
    return lambda hub: hub.large.update({k.replace("_", "-"): v for k, v in headers.items()})


def changed(name: str, data: bytes) -> Callable[[LyingHub], None]:
    """The bytes of a file are others than the tree says."""
    return lambda hub: hub.files.update({name: data})


Lie = Callable[[LyingHub], None]


def each(what: str, make: Callable[[Any], Lie], *values: Any) -> dict[str, Lie]:
    """One lie for each value."""
    return {f"{what} {v!r:.24}": make(v) for v in values}


ODD: dict[str, Lie] = {
    **each(
        "a name", extra,
        "..\\evil.json", "C:\\evil.json", "\x1b[2J.json", "\u202enosj", "x" * 5000, ".git/config",
        ".cache/huggingface/x", "~/evil.json", "$HOME", "-rf", "a?b", "a#b", "a%2f..%2fevil.json", "tokenizer.json",
        "deep/" * 300 + "x.json", None, 7, [], {}, True,
    ),
}  # fmt: skip
"""What a repository may have, or what does no harm."""
LIES: dict[str, Lie] = {
    **each(
        "a name", extra,
        "../evil.json", "/etc/evil.json", "a/../../evil.json", "a//evil.json", "", ".", "..", "a/..", "a/", "\0.json",
        "config.json/evil.json", "http://169.254.169.254/evil.json", "config.json", WEIGHTS,
    ),
    **each(
        "a size", lambda s: entry(size=s, lfs_size=s),
        -1, 0, 1, 1.5, 2**31, 2**63, 2**64, 10**18, 10**30, "12", None, True, [], {}, float("nan"), float("inf"),
    ),
    **each("an id", lambda o: entry(blobId=o, lfs_sha256=o), None, 7, "", "../../x", "x" * 10**5, [], "\x1b[2J"),
    **each("a large file", lambda v: entry(lfs=v), None, 7, [], {}, "x", {"sha256": {}, "size": []}),
    **each(
        "a tree", lambda v: put("tree", v),
        {}, None, 7, "x", [7], [None], [[]], [{}], [{"rfilename": "x"}], {"error": "x"}, b"", b"<html>", b"\xff",
        b"[" * 10**5, b"[" + b"1" * 10**5, [{"rfilename": "\ud800", "size": 1, "blobId": "x"}],
    ),
    **each(
        "a commit", lambda v: put("info", {"sha": v}),
        None, 7, "", "main", "../../../x", "x" * 40, "x" * 10**6, COMMIT + "/..", COMMIT.upper(), "\x1b[2J", [], {},
    ),
    **each("a model", lambda v: put("info", v), None, 7, [], "x", {}, b"", b"<html>", b"{" * 10**5),
    "weights on metadata": large(Location="http://169.254.169.254/x"),
    "weights in a file": large(Location="file:///etc/passwd"),
    "weights by password": large(Location="http://user:geheim@127.0.0.1/x"),
    "weights at half an address": large(Location="http://[::1"),
    "weights at no port": large(Location="http://127.0.0.1:99999/x"),
    "weights at an escape": large(Location="http://\x1b[2J/x"),
    "weights nowhere": large(Location=""),
    "weights of another size": large(X_Linked_Size="7"),
    "weights of no size": large(X_Linked_Size="x"),
    "weights of another id": large(X_Linked_ETag='"../../x"'),
    "weights of another commit": large(X_Repo_Commit="../../x"),
    "weights that moved": large(Location="/org/model/resolve/main/" + WEIGHTS),
    "other weights": changed(WEIGHTS, b"\0" * 100),
    "longer weights": lambda hub: hub.files.update({WEIGHTS: hub.files[WEIGHTS] + b"\0" * 100}),
    "another config": changed("config.json", b'{"hidden_size": 3}'),
    "a longer config": changed("config.json", b" " * (1 << 20) + b"{}"),
    "no config": changed("config.json", b""),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranges are read of small weights, too, and nothing is known from another test."""
    monkeypatch.setattr(hub_files, "SMALL_LARGE", 0)


@pytest.fixture
def court(tmp_path: Path) -> Court:
    (tmp_path / "room").mkdir()
    return Court(tmp_path / "room")


def judge(court: Court, hub: LyingHub, commands: Iterable[str], home: Path) -> list[int]:
    """Run commands on the repository. Returns their exit codes."""
    codes = []
    server = Liar(hub.say)
    try:
        for command in commands:
            with clients(server.url, home), hasty():
                words = ["hf://org/model", court.dst] if command == "reshard" else ["hf://org/model"]
                done = court.run(*command.split(), *words)
            assert "geheim" not in done.out + done.err
            codes.append(done.code)
        assert TOKEN not in "".join(asked.path for asked in server.asked)
    finally:
        server.close()
    outside = [p for p in home.rglob("*") if "evil" in p.name or p.name == "x"] if home.exists() else []
    assert not outside
    return codes


def test_the_truth(court: Court, tmp_path: Path) -> None:
    hub = LyingHub(court.src)
    assert judge(court, hub, ("inspect", "inspect --list --json", "reshard"), tmp_path / "home") == [0, 0, 0]


@pytest.mark.product(one_in=9)
@pytest.mark.parametrize("name", LIES)
def test_a_lie(court: Court, tmp_path: Path, name: str) -> None:
    """What contradicts itself is refused, and nothing is asked of other hosts."""
    hub = LyingHub(court.src)
    LIES[name](hub)
    assert judge(court, hub, ("inspect", "reshard"), tmp_path / "home") == [1, 1]


@pytest.mark.product(one_in=9)
@pytest.mark.parametrize("name", ODD)
def test_odd_repositories(court: Court, tmp_path: Path, name: str) -> None:
    """Nothing is written outside DST, whether it can be written there or not."""
    hub = LyingHub(court.src)
    ODD[name](hub)
    judge(court, hub, ("inspect", "reshard"), tmp_path / "home")
