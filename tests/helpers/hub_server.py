"""A small Hugging Face Hub on 127.0.0.1: repositories in memory, and a second port that stands for its CDN.

It does what the clients need, in the way of the real one: one answer for repositories that are missing and that are
private, small files behind a relative redirect, large ones behind signed URLs of another host, uploads through LFS,
commits as lines of JSON, pull requests. Sources: https://huggingface.co/docs/hub/api, and huggingface_hub 2.4.0.

    with hub_server() as hub:
        hub.add("org/model", directory, private=True)
        with hub.clients(home, token="hf_reader"): ...     # environment, and huggingface_hub of this process
        hub.fail(r"GET /org/model/resolve/", 503, times=2)
        assert hub.resolves() == {...}
"""

from __future__ import annotations

import base64
import hashlib
import importlib
import io
import json
import os
import re
import secrets
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock, Thread
from typing import Any, Literal
from unittest.mock import patch
from urllib.parse import parse_qs, quote, unquote, urlsplit

LARGE = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".pdparams", ".model", ".zip", ".nemo")
"""Endings of files that .gitattributes puts into LFS."""


@dataclass(frozen=True)
class Blob:
    """The contents of a file; a path is read whenever it is asked for."""

    data: bytes | Path
    lfs: bool

    @cached_property
    def size(self) -> int:
        return len(self.data) if isinstance(self.data, bytes) else self.data.stat().st_size

    @cached_property
    def sha256(self) -> str:
        with self.open() as f:
            return hashlib.file_digest(f, "sha256").hexdigest()

    @cached_property
    def oid(self) -> str:
        """Git's name: of the pointer to a large file, otherwise of the bytes."""
        data = self.pointer if self.lfs else self.bytes()
        return hashlib.sha1(b"blob %d\0%b" % (len(data), data), usedforsecurity=False).hexdigest()

    @property
    def pointer(self) -> bytes:
        lines = ("version https://git-lfs.github.com/spec/v1", f"oid sha256:{self.sha256}", f"size {self.size}", "")
        return "\n".join(lines).encode()

    def open(self) -> io.BufferedReader | io.BytesIO:
        return io.BytesIO(self.data) if isinstance(self.data, bytes) else self.data.open("rb")

    def bytes(self) -> bytes:
        return self.data if isinstance(self.data, bytes) else self.data.read_bytes()

    def described(self, path: str) -> dict[str, Any]:
        """As the tree of a repository has it."""
        lfs = {"oid": self.sha256, "size": self.size, "pointerSize": len(self.pointer)} if self.lfs else {}
        return {"type": "file", "path": path, "size": self.size, "oid": self.oid} | ({"lfs": lfs} if lfs else {})


Files = dict[str, Blob]


@dataclass
class Repo:
    """A model repository. Its commits are whole trees."""

    name: str
    readers: set[str] | None = None
    """Accounts that may see it, if it is private."""
    accepted: set[str] | None = None
    """Accounts that may download, if it is gated."""
    commits: dict[str, Files] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    def commit(self, files: Files, ref: str = "refs/heads/main", message: str = "") -> str:
        """Add a commit, which ``ref`` is moved to."""
        named = f"{self.name} {len(self.commits)} {sorted((n, b.oid) for n, b in files.items())}"
        commit = hashlib.sha1(named.encode(), usedforsecurity=False).hexdigest()
        self.commits[commit] = files
        self.refs[ref] = commit
        self.messages.append(message)
        return commit

    def find(self, revision: str) -> str | None:
        """The commit that a branch, a tag, a pull request or a commit names."""
        if revision in self.commits:
            return revision
        names = (revision, f"refs/heads/{revision}", f"refs/tags/{revision}")
        return next((self.refs[n] for n in names if n in self.refs), None)

    def files(self, revision: str = "main") -> dict[str, bytes]:
        """What a revision holds."""
        commit = self.find(revision)
        return {n: b.bytes() for n, b in self.commits[commit].items()} if commit else {}


@dataclass
class Asked:
    """A request, as it came, and what the answer was."""

    server: Literal["hub", "cdn"]
    method: str
    path: str
    query: str
    headers: dict[str, str]
    """By lower-case names."""
    status: int = 0

    @property
    def token(self) -> str:
        """What was sent as ``Authorization``, without the word Bearer."""
        return self.headers.get("authorization", "").removeprefix("Bearer ")


Kind = int | Literal["reset", "short", "lost"]


@dataclass
class Fault:
    """What happens to requests whose "METHOD /path" matches: a status, or what happens to the connection.

    ``reset`` closes it before an answer, ``short`` after half of the body, ``lost`` does what is asked and resets it.
    """

    pattern: str
    kind: Kind
    times: int
    headers: Mapping[str, str]
    at: int = 0
    """Only the request with this number, counted from 1; 0 is any."""


@dataclass
class Answer:
    """What a server says."""

    status: int = 200
    body: bytes | Blob = b""
    headers: dict[str, str] = field(default_factory=dict)


class RefusedError(Exception):
    """A request that is answered with an error, in the Hub's way."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.answer = Answer(status, json.dumps({"error": message}).encode())
        self.answer.headers = {"Content-Type": "application/json", "X-Error-Message": message}
        if code:
            self.answer.headers["X-Error-Code"] = code


class Hub:
    """The state of both servers. Requests are served by threads; ``asked`` has all of them in their order."""

    endpoint = ""
    cdn = ""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.moved: dict[str, str] = {}
        """New names of repositories by their old ones."""
        self.accounts = {"hf_owner": "owner", "hf_reader": "reader"}
        """Names of users by token. The owner may read and write everything, others read what they are allowed to."""
        self.large: dict[str, Blob] = {}
        """What was uploaded through LFS, by its sha256."""
        self.parts: dict[str, dict[int, bytes]] = {}
        self.asked: list[Asked] = []
        self.faults: list[Fault] = []
        self.delay = 0.0
        """Seconds that every answer takes."""
        self.lifetime = 3600.0
        """Seconds that a signed URL is good for."""
        self.page = 1000
        """Entries of a tree in one answer."""
        self.part_size = 0
        """Bytes of a part of an upload; 0: one PUT for the whole file."""
        self.on_reset: Callable[[], object] = lambda: None
        """Called before a connection is reset on purpose: what else happens then."""
        self._key = secrets.token_hex(8)
        self._lock = Lock()

    def add(
        self,
        name: str,
        files: Path | Mapping[str, bytes | Path],
        *,
        branch: str = "main",
        private: bool = False,
        gated: bool = False,
    ) -> str:
        """Put a directory (or files by name) into a repository, as all that a branch holds. Returns the commit."""
        if isinstance(files, Path):
            files = {p.relative_to(files).as_posix(): p for p in sorted(files.rglob("*")) if p.is_file()}
        repo = self.repos.setdefault(name, Repo(name))
        repo.readers = {"owner"} if private else None
        repo.accepted = {"owner"} if gated else None
        return repo.commit({n: Blob(d, n.endswith(LARGE)) for n, d in files.items()}, f"refs/heads/{branch}")

    def fail(
        self,
        pattern: str,
        kind: Kind,
        times: int = 1,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Let the next requests that match fail (see ``Fault``)."""
        self.faults.append(Fault(pattern, kind, times, headers or {}))

    def fail_at(self, number: int, kind: Kind) -> None:
        """Let one request fail, counted from 1 and the next one."""
        self.faults.append(Fault("", kind, 1, {}, len(self.asked) + number))

    def expire(self) -> None:
        """Make every signature that was given out invalid."""
        self._key = secrets.token_hex(8)

    def resolves(self) -> Counter[str]:
        """How often each file was resolved, by its path in the repository."""
        found = (re.fullmatch(r"/[^/]+/[^/]+/resolve/[^/]+/(.+)", a.path) for a in self.asked if a.server == "hub")
        return Counter(unquote(m[1]) for m in found if m)

    @contextmanager
    def clients(self, home: Path, token: str = "", **others: str) -> Iterator[dict[str, str]]:
        """Let huggingface_hub, in this process and in those that it starts, find this server and nothing else.

        Yields the environment variables. Uploads go through LFS: what Xet needs is not here.
        """
        environment = {
            "HF_ENDPOINT": self.endpoint,
            "HF_HOME": str(home),
            "HF_HUB_CACHE": str(home / "hub"),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "NO_PROXY": "127.0.0.1",
        }
        cleared = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
        given = {"HF_TOKEN": token} if token else {}
        try:
            with (
                patch.dict(os.environ, cleared | environment | given | others, clear=True),
                patch("tqdm.tqdm.monitor_interval", 0),  # a thread that stays would keep later tests from forking
            ):
                _read_environment()
                yield environment | given | others
        finally:
            _read_environment()

    # What both servers need.

    def sign(self, path: str) -> str:
        """A URL of the CDN that is good for a while."""
        expires = f"{time.time() + self.lifetime:.3f}"
        return f"{self.cdn}{path}?Expires={expires}&Signature={self._signature(path, expires)}"

    def is_signed(self, path: str, query: str) -> bool:
        """Whether the CDN believes a URL."""
        said = {k: v[0] for k, v in parse_qs(query).items()}
        expires, signature = said.get("Expires", "0"), said.get("Signature", "")
        return signature == self._signature(path, expires) and float(expires) > time.time()

    def _signature(self, path: str, expires: str) -> str:
        return hashlib.sha256(f"{self._key} {path} {expires}".encode()).hexdigest()[:32]

    def next_fault(self, asked: Asked) -> Fault | None:
        """Count a request, and say what happens to it."""
        with self._lock:
            self.asked.append(asked)
            for fault in self.faults:
                its = fault.at in (0, len(self.asked)) and re.search(fault.pattern, f"{asked.method} {asked.path}")
                if its and fault.times:
                    fault.times -= 1
                    return fault
        return None

    def repo(self, name: str, asked: Asked) -> Repo:
        """A repository that the request may see. Raises RefusedError."""
        if name in self.moved:
            path = asked.path.replace(name, self.moved[name], 1)
            moved = RefusedError(307, "", "Temporary Redirect")
            moved.answer.headers["Location"] = path + (f"?{asked.query}" if asked.query else "")
            raise moved
        account = self._account(asked)
        repo = self.repos.get(name)
        if repo and (repo.readers is None or account in {*repo.readers, "owner"}):
            return repo
        if account:
            raise RefusedError(404, "RepoNotFound", "Repository not found")
        raise RefusedError(401, "RepoNotFound", "Invalid username or password.")

    def _account(self, asked: Asked) -> str:
        if asked.token and asked.token not in self.accounts:
            raise RefusedError(401, "", "Invalid credentials in Authorization header")
        return self.accounts.get(asked.token, "")

    def commit(self, repo: Repo, revision: str) -> str:
        """The commit of a revision. Raises RefusedError."""
        commit = repo.find(revision)
        if commit is None:
            raise RefusedError(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return commit

    def check_writer(self, asked: Asked) -> str:
        """The account of a request that changes something. Raises RefusedError."""
        account = self._account(asked)
        if not account:
            raise RefusedError(401, "", "Invalid username or password.")
        if account != "owner":
            raise RefusedError(403, "", "You don't have the rights to create a model under this namespace")
        return account

    def check_download(self, repo: Repo, asked: Asked) -> None:
        """Raises RefusedError for a gated repository whose conditions were not accepted."""
        account = self._account(asked)
        if repo.accepted is not None and account not in repo.accepted:
            what = f"Access to model {repo.name} is restricted."
            raise RefusedError(403 if account else 401, "GatedRepo", what)


def _read_environment() -> None:
    """Let huggingface_hub, if it is loaded, look at the environment again: it does so when it is imported."""
    constants = sys.modules.get("huggingface_hub.constants")
    if constants is None:
        return
    importlib.reload(constants)
    from huggingface_hub import hf_api

    hf_api.api.endpoint = constants.ENDPOINT


@dataclass(frozen=True)
class Call:
    """What answers a request: who asks for what."""

    hub: Hub
    asked: Asked
    m: re.Match[str]
    body: bytes


Route = Callable[[Call], Answer]
_ROUTES: dict[str, list[tuple[str, str, Route]]] = {"hub": [], "cdn": []}
_REPO = r"(?P<repo>[\w.-]+/[\w.-]+)"
_REVISION = r"(?P<revision>[^/]+)"


def _route(server: str, methods: str, pattern: str) -> Callable[[Route], Route]:
    def register(function: Route) -> Route:
        _ROUTES[server].append((methods, pattern, function))
        return function

    return register


def _json(value: Any, status: int = 200, **headers: str) -> Answer:
    return Answer(status, json.dumps(value).encode(), {"Content-Type": "application/json", **headers})


def _oid(folder: str) -> str:
    return hashlib.sha1(folder.encode(), usedforsecurity=False).hexdigest()


# What there is.


@_route("hub", "GET", "/api/whoami-v2")
def _whoami(c: Call) -> Answer:
    account = c.hub._account(c.asked)
    if not account:
        raise RefusedError(401, "", "Invalid username or password.")
    return _json({"type": "user", "name": account, "orgs": [], "auth": {"accessToken": {"role": "write"}}})


@_route("hub", "GET HEAD", rf"/api/models/{_REPO}(/revision/{_REVISION})?")
def _info(c: Call) -> Answer:
    repo = c.hub.repo(c.m["repo"], c.asked)
    commit = c.hub.commit(repo, unquote(c.m["revision"] or "main"))
    files = repo.commits[commit]
    blobs = "blobs" in parse_qs(c.asked.query)
    siblings = [
        {"rfilename": n} | ({"size": b.size, "blobId": b.oid} | _lfs_of(b) if blobs else {}) for n, b in files.items()
    ]
    gated = "manual" if repo.accepted is not None else False
    about = {"id": repo.name, "modelId": repo.name, "private": repo.readers is not None, "gated": gated}
    return _json({**about, "sha": commit, "siblings": siblings, "tags": [], "disabled": False})


def _lfs_of(blob: Blob) -> dict[str, Any]:
    return {"lfs": {"sha256": blob.sha256, "size": blob.size, "pointerSize": len(blob.pointer)}} if blob.lfs else {}


@_route("hub", "GET", rf"/api/models/{_REPO}/refs")
def _refs(c: Call) -> Answer:
    repo = c.hub.repo(c.m["repo"], c.asked)

    def under(prefix: str) -> list[dict[str, str]]:
        named = ((r.removeprefix(prefix), r, c) for r, c in repo.refs.items() if r.startswith(prefix))
        return [{"name": n, "ref": r, "targetCommit": c} for n, r, c in named]

    shown = {"branches": under("refs/heads/"), "tags": under("refs/tags/"), "converts": []}
    return _json(shown | ({"pullRequests": under("refs/pr/")} if "include_prs" in c.asked.query else {}))


@_route("hub", "GET", rf"/api/models/{_REPO}/tree/{_REVISION}(/(?P<folder>.*))?")
def _tree(c: Call) -> Answer:
    repo = c.hub.repo(c.m["repo"], c.asked)
    files = repo.commits[c.hub.commit(repo, unquote(c.m["revision"]))]
    said = {k: v[0] for k, v in parse_qs(c.asked.query).items()}
    entries = list(
        _entries(files, unquote(c.m["folder"] or "").strip("/"), said.get("recursive", "").lower() == "true")
    )
    if not entries and c.m["folder"]:
        raise RefusedError(
            404, "EntryNotFound", f"{unquote(c.m['folder'])} does not exist on {unquote(c.m['revision'])}"
        )
    page = min(c.hub.page, int(said.get("limit", c.hub.page)))
    at = int(said.get("cursor", "0"))
    answer = _json(entries[at : at + page])
    if at + page < len(entries):
        more = "&".join(f"{k}={quote(v)}" for k, v in (said | {"cursor": str(at + page)}).items())
        answer.headers["Link"] = f'<{c.hub.endpoint}{c.asked.path}?{more}>; rel="next"'
    return answer


def _entries(files: Files, folder: str, recursive: bool) -> Iterator[dict[str, Any]]:
    prefix = f"{folder}/" if folder else ""
    folders = set()
    for name, blob in sorted(files.items()):
        if not name.startswith(prefix):
            continue
        parents = name.removeprefix(prefix).split("/")[:-1]
        for i in range(1, (len(parents) if recursive else min(1, len(parents))) + 1):
            folders.add(prefix + "/".join(parents[:i]))
        if recursive or not parents:
            yield blob.described(name)
    for name in sorted(folders):
        yield {"type": "directory", "path": name, "oid": _oid(name), "size": 0}


@_route("hub", "POST", rf"/api/models/{_REPO}/paths-info/{_REVISION}")
def _paths_info(c: Call) -> Answer:
    repo = c.hub.repo(c.m["repo"], c.asked)
    files = repo.commits[c.hub.commit(repo, unquote(c.m["revision"]))]
    is_json = c.body.startswith(b"{")
    paths = json.loads(c.body)["paths"] if is_json else parse_qs(c.body.decode())["paths"]
    folders = [
        {"type": "directory", "path": p, "oid": _oid(p), "size": 0}
        for p in paths
        if any(n.startswith(f"{p}/") for n in files)
    ]
    return _json([files[p].described(p) for p in paths if p in files] + folders)


@_route("hub", "GET HEAD", rf"/{_REPO}/resolve/{_REVISION}/(?P<path>.+)")
def _resolve(c: Call) -> Answer:
    repo = c.hub.repo(c.m["repo"], c.asked)
    c.hub.check_download(repo, c.asked)
    commit = c.hub.commit(repo, unquote(c.m["revision"]))
    blob = repo.commits[commit].get(unquote(c.m["path"]))
    if blob is None:
        refused = RefusedError(404, "EntryNotFound", "Entry not found")
        refused.answer.headers["X-Repo-Commit"] = commit
        raise refused
    headers = {"X-Repo-Commit": commit, "X-Linked-Size": str(blob.size), "Accept-Ranges": "bytes"}
    if blob.lfs:
        c.hub.large[blob.sha256] = blob
        headers |= {"X-Linked-ETag": f'"{blob.sha256}"', "Location": c.hub.sign(f"/{blob.sha256}")}
        return Answer(302, b"Found. Redirecting", headers)
    location = f"/api/resolve-cache/models/{repo.name}/{commit}/{quote(unquote(c.m['path']))}"
    headers |= {"X-Linked-ETag": f'"{blob.oid}"', "Location": f"{location}?etag=%22{blob.oid}%22"}
    return Answer(307, b"Temporary Redirect", headers)


@_route("hub", "GET HEAD", rf"/api/resolve-cache/models/{_REPO}/(?P<commit>[0-9a-f]{{40}})/(?P<path>.+)")
def _small_file(c: Call) -> Answer:
    repo = c.hub.repo(c.m["repo"], c.asked)
    c.hub.check_download(repo, c.asked)
    blob = repo.commits[c.m["commit"]][unquote(c.m["path"])]
    return Answer(200, blob, {"ETag": f'"{blob.oid}"', "X-Repo-Commit": c.m["commit"], "Accept-Ranges": "bytes"})


@_route("cdn", "GET HEAD", r"/(?P<oid>[0-9a-f]{64})")
def _large_file(c: Call) -> Answer:
    if not c.hub.is_signed(c.asked.path, c.asked.query):
        return Answer(403, b"<Error><Code>AccessDenied</Code><Message>Request has expired</Message></Error>")
    # The ETag of a CDN is not that of the Hub.
    return Answer(200, c.hub.large[c.m["oid"]], {"ETag": f'"{c.m["oid"][:32]}-1"', "Accept-Ranges": "bytes"})


# What is changed.


@_route("hub", "POST", "/api/repos/create")
def _create(c: Call) -> Answer:
    account = c.hub.check_writer(c.asked)
    said = json.loads(c.body)
    name = f"{said.get('organization') or account}/{said['name']}"
    url = {"url": f"{c.hub.endpoint}/{name}", "name": name, "id": name}
    if name in c.hub.repos:
        return _json(url | {"error": "You already created this model repo"}, 409)
    private = said.get("visibility") == "private" or bool(said.get("private"))
    c.hub.repos[name] = Repo(name, {account} if private else None)
    c.hub.repos[name].commit({".gitattributes": Blob(b"*.safetensors filter=lfs\n", False)}, message="initial commit")
    return _json(url)


@_route("hub", "DELETE", "/api/repos/delete")
def _delete(c: Call) -> Answer:
    account = c.hub.check_writer(c.asked)
    said = json.loads(c.body)
    del c.hub.repos[f"{said.get('organization') or account}/{said['name']}"]
    return _json({})


@_route("hub", "POST", rf"/api/models/{_REPO}/branch/{_REVISION}")
def _branch(c: Call) -> Answer:
    c.hub.check_writer(c.asked)
    repo = c.hub.repo(c.m["repo"], c.asked)
    ref = f"refs/heads/{unquote(c.m['revision'])}"
    if ref in repo.refs:
        return _json({"error": "Reference already exists"}, 409)
    repo.refs[ref] = c.hub.commit(repo, json.loads(c.body or b"{}").get("startingPoint", "main"))
    return _json({})


@_route("hub", "POST", "/api/validate-yaml")
def _validate(_: Call) -> Answer:
    return _json({"errors": [], "warnings": []})


@_route("hub", "POST", rf"/api/models/{_REPO}/preupload/{_REVISION}")
def _preupload(c: Call) -> Answer:
    repo = c.hub.repo(c.m["repo"], c.asked)
    _check_commit(c.hub, c.asked)
    files = repo.commits[c.hub.commit(repo, unquote(c.m["revision"]))]

    def said(file: dict[str, Any]) -> dict[str, Any]:
        large = file["path"].endswith(LARGE) or file["size"] > 10_000_000
        there = files.get(file["path"])
        oid = {"oid": there.sha256 if there.lfs else there.oid} if there else {}
        return {"path": file["path"], "uploadMode": "lfs" if large else "regular", "shouldIgnore": False, **oid}

    return _json({"files": [said(f) for f in json.loads(c.body)["files"]]})


def _check_commit(hub: Hub, asked: Asked) -> None:
    """Everybody who is logged in may open a pull request. Raises RefusedError."""
    if "create_pr" not in asked.query or not hub._account(asked):
        hub.check_writer(asked)


@_route("hub", "POST", rf"/{_REPO}\.git/info/lfs/objects/batch")
def _batch(c: Call) -> Answer:
    if not c.hub._account(c.asked):
        c.hub.check_writer(c.asked)
    said = json.loads(c.body)
    multipart = c.hub.part_size and "multipart" in said["transfers"]

    def action(large: dict[str, Any]) -> dict[str, Any]:
        oid, size = large["oid"], large["size"]
        if oid in c.hub.large:
            return {"oid": oid, "size": size}
        verify = {"href": f"{c.hub.endpoint}/api/lfs/verify"}
        if not multipart or size <= c.hub.part_size:
            return {
                "oid": oid,
                "size": size,
                "actions": {"upload": {"href": c.hub.sign(f"/put/{oid}")}, "verify": verify},
            }
        header = {str(i + 1): c.hub.sign(f"/put/{oid}/{i + 1}") for i in range(-(-size // c.hub.part_size))}
        upload = {"href": f"{c.hub.endpoint}/api/lfs/complete", "header": {"chunk_size": str(c.hub.part_size)} | header}
        return {"oid": oid, "size": size, "actions": {"upload": upload, "verify": verify}}

    transfer = "multipart" if multipart else "basic"
    return _json({"transfer": transfer, "objects": [action(o) for o in said["objects"]]})


@_route("cdn", "PUT", r"/put/(?P<oid>[0-9a-f]{64})(/(?P<part>\d+))?")
def _put(c: Call) -> Answer:
    if not c.hub.is_signed(c.asked.path, c.asked.query):
        return Answer(403)
    if c.m["part"]:
        c.hub.parts.setdefault(c.m["oid"], {})[int(c.m["part"])] = c.body
    elif hashlib.sha256(c.body).hexdigest() != c.m["oid"]:
        return Answer(400)
    else:
        c.hub.large[c.m["oid"]] = Blob(c.body, True)
    return Answer(200, b"", {"ETag": f'"{hashlib.md5(c.body, usedforsecurity=False).hexdigest()}"'})


@_route("hub", "POST", "/api/lfs/complete")
def _complete(c: Call) -> Answer:
    said = json.loads(c.body)
    if said["oid"] in c.hub.large:  # the first answer was lost
        return _json({})
    parts = c.hub.parts.pop(said["oid"])
    data = b"".join(parts[p["partNumber"]] for p in said["parts"])
    if hashlib.sha256(data).hexdigest() != said["oid"]:
        raise RefusedError(400, "", "the parts are not what was announced")
    c.hub.large[said["oid"]] = Blob(data, True)
    return _json({})


@_route("hub", "POST", "/api/lfs/verify")
def _verify(c: Call) -> Answer:
    if json.loads(c.body)["oid"] not in c.hub.large:
        raise RefusedError(404, "", "Object not found")
    return _json({})


@_route("hub", "POST", rf"/api/models/{_REPO}/commit/{_REVISION}")
def _commit(c: Call) -> Answer:
    repo = c.hub.repo(c.m["repo"], c.asked)
    _check_commit(c.hub, c.asked)
    revision = unquote(c.m["revision"])
    parent = c.hub.commit(repo, revision)
    lines = [json.loads(line) for line in c.body.splitlines()]
    header = next(li["value"] for li in lines if li["key"] == "header")
    if header.get("parentCommit", parent) != parent:
        raise RefusedError(412, "", "A commit has happened since. Please refresh and try again.")
    files = dict(repo.commits[parent])
    for line in lines:
        _apply(c.hub, files, line["key"], line["value"])
    number = sum(r.startswith("refs/pr/") for r in repo.refs) + 1
    pull = "create_pr" in c.asked.query
    ref = f"refs/pr/{number}" if pull else revision if revision in repo.refs else f"refs/heads/{revision}"
    commit = repo.commit(files, ref, header["summary"])
    there = {"pullRequestUrl": f"{c.hub.endpoint}/{repo.name}/discussions/{number}"} if pull else {}
    url = f"{c.hub.endpoint}/{repo.name}/commit/{commit}"
    return _json({"success": True, "commitOid": commit, "commitUrl": url, "hookOutput": "", **there})


def _apply(hub: Hub, files: Files, key: str, value: Mapping[str, Any]) -> None:
    """One line of a commit. Raises RefusedError."""
    path = value.get("path", "")
    if key == "file":
        files[path] = Blob(base64.b64decode(value["content"]), False)
    elif key == "lfsFile":
        if value["oid"] not in hub.large:
            raise RefusedError(400, "", f"LFS object {value['oid']} was not uploaded")
        files[path] = hub.large[value["oid"]]
    elif key == "deletedFile":
        if files.pop(path, None) is None:
            raise RefusedError(404, "EntryNotFound", "A file with this name doesn't exist")
    elif key == "deletedFolder":
        for name in [n for n in files if n.startswith(f"{path.rstrip('/')}/")]:
            del files[name]


# HTTP.


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = 1 << 16
    hub: Hub
    which: Literal["hub", "cdn"]

    def log_message(self, *args: Any) -> None:
        pass

    def _serve(self) -> None:
        url = urlsplit(self.path)
        headers = {k.lower(): v for k, v in self.headers.items()}
        asked = Asked(self.which, self.command, url.path, url.query, headers)
        body = self._body(headers)
        fault = self.hub.next_fault(asked)
        if self.hub.delay:
            time.sleep(self.hub.delay)
        if fault and fault.kind == "reset":
            self.hub.on_reset()
            self._reset()
            return
        answer = Answer(fault.kind) if fault and isinstance(fault.kind, int) else self._answer(asked, body)
        answer.headers.update(fault.headers if fault else {})
        if fault and fault.kind == "lost":
            self.hub.on_reset()
            self._reset()
            return
        self._send(asked, answer, short=bool(fault and fault.kind == "short"))

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = _serve  # noqa: N815

    def _body(self, headers: Mapping[str, str]) -> bytes:
        if headers.get("transfer-encoding") != "chunked":
            return self.rfile.read(int(headers.get("content-length", 0)))
        parts = []
        while n := int(self.rfile.readline().split(b";")[0], 16):
            parts.append(self.rfile.read(n))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _answer(self, asked: Asked, body: bytes) -> Answer:
        for methods, pattern, function in _ROUTES[self.which]:
            if asked.method in methods.split() and (m := re.fullmatch(pattern, asked.path)):
                try:
                    return function(Call(self.hub, asked, m, body))
                except RefusedError as e:
                    return e.answer
        return RefusedError(404, "", "Sorry, we can't find the page you are looking for.").answer

    def _send(self, asked: Asked, answer: Answer, *, short: bool) -> None:
        blob = answer.body if isinstance(answer.body, Blob) else Blob(answer.body, False)
        status, start, stop = self._range(asked, answer, blob.size)
        asked.status = status
        self.send_response(status)
        if status == 206:
            answer.headers["Content-Range"] = f"bytes {start}-{stop - 1}/{blob.size}"
        elif status == 416:
            answer.headers["Content-Range"] = f"bytes */{blob.size}"
        for name, value in (answer.headers | {"Content-Length": str(stop - start)}).items():
            self.send_header(name, value)
        self.end_headers()
        if asked.method != "HEAD":
            self._send_bytes(blob, start, start + (stop - start) // 2 if short else stop)
        if short:
            self.close_connection = True

    def _range(self, asked: Asked, answer: Answer, size: int) -> tuple[int, int, int]:
        """The status, and which bytes of the body are sent."""
        etag = answer.headers.get("ETag")
        if answer.status == 200 and etag and asked.headers.get("if-match", etag) not in (etag, "*"):
            return 412, 0, 0
        m = re.fullmatch(r"bytes=(\d*)-(\d*)", asked.headers.get("range", ""))
        if answer.status != 200 or not etag or not m or m.groups() == ("", ""):
            return answer.status, 0, size
        start = int(m[1]) if m[1] else max(0, size - int(m[2]))
        stop = min(size, int(m[2]) + 1) if m[1] and m[2] else size
        return (206, start, stop) if start < stop else (416, 0, 0)

    def _send_bytes(self, blob: Blob, start: int, stop: int) -> None:
        if isinstance(blob.data, bytes):
            self.wfile.write(memoryview(blob.data)[start:stop])
            return
        self.wfile.flush()
        with blob.open() as f:
            while start < stop:
                start += os.sendfile(self.connection.fileno(), f.fileno(), start, stop - start)

    def _reset(self) -> None:
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.connection.close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, *args: Any) -> None:
        self.connections: set[socket.socket] = set()
        super().__init__(*args)

    def get_request(self) -> tuple[socket.socket, Any]:
        request, address = super().get_request()
        self.connections.add(request)
        return request, address

    def shutdown_request(self, request: Any) -> None:
        self.connections.discard(request)
        super().shutdown_request(request)

    def server_close(self) -> None:
        """Connections that clients keep have a thread each, and a process with threads is not forked."""
        super().server_close()
        for request in list(self.connections):
            with suppress(OSError):
                request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is none."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


@contextmanager
def hub_server(models: Iterable[tuple[str, Path]] = ()) -> Iterator[Hub]:
    """Both servers, on ports of their own, and repositories with the files of directories."""
    hub = Hub()
    servers = []
    for which in ("hub", "cdn"):
        handler = type("Handler", (_Handler,), {"hub": hub, "which": which})
        server = _Server(("127.0.0.1", 0), handler)
        Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        servers.append(server)
    hub.endpoint, hub.cdn = (f"http://127.0.0.1:{s.server_address[1]}" for s in servers)
    for name, directory in models:
        hub.add(name, directory)
    try:
        yield hub
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()
