"""Models of the Hugging Face Hub as sources: which requests are made, what they bring, and what goes wrong."""

from __future__ import annotations

import json
import pickle
import re
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ckpttool.checkpoint import OpenOptions, open_checkpoint
from ckpttool.core.files import DataFile
from ckpttool.errors import AccessError, CkptError, CorruptError, UsageError
from ckpttool.storage import caches, hub_files
from ckpttool.storage.caches import BYTES
from ckpttool.storage.http import Client, Clock, using
from ckpttool.storage.hub import HubPlace, from_page, parse
from ckpttool.storage.hub_files import _listed
from ckpttool.storage.place import parse_place, read_all, walk
from tests.helpers.command import ckpttool, refused, reshard
from tests.helpers.hub_cache import fill
from tests.helpers.hub_server import Hub, hub_server

TINY = Path(__file__).parents[2] / "fixtures/hf_tiny_source"
WEIGHTS = "model.safetensors"
MODEL = "hf://org/tiny"
IMPLICIT = {"HF_HUB_DISABLE_IMPLICIT_TOKEN": "1"}
OWNER, READER, WRONG = "hf_owner", "hf_reader", "hf_wrong"


class Patient(Clock):
    """Nobody waits; the waits are counted."""

    def __init__(self) -> None:
        self.waited = 0.0

    def now(self) -> float:
        return super().now() + self.waited

    def sleep(self, seconds: float, stopped: threading.Event) -> None:
        self.waited += seconds


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with (
        hub_server([("org/tiny", TINY)]) as server,
        server.clients(tmp_path / "home"),
        using(Client(clock=Patient())) as client,
    ):
        yield server
        client.stop()


@pytest.fixture
def by_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are read as those of many gigabytes are."""
    monkeypatch.setattr(hub_files, "SMALL_LARGE", 0)


def written(root: Path) -> dict[str, bytes]:
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def requests(hub: Hub) -> list[str]:
    """What was asked for since the last time, commits as COMMIT."""
    commits = {c for r in hub.repos.values() for c in r.commits}
    found = []
    for asked in hub.asked:
        path = asked.path
        for commit in commits:
            path = path.replace(commit, "COMMIT")
        found.append(f"{asked.server} {asked.method} {path}" if asked.server == "hub" else f"cdn {asked.method}")
    hub.asked.clear()
    return found


def place(text: str) -> HubPlace:
    found = parse_place(text)
    assert isinstance(found, HubPlace)
    return found


# -- what is asked for

LISTING = ["hub GET /api/models/org/tiny/revision/main"]
OF_COMMIT = ["hub GET /api/models/org/tiny/revision/COMMIT"]
CONFIG = [
    "hub GET /org/tiny/resolve/COMMIT/config.json",
    "hub GET /api/resolve-cache/models/org/tiny/COMMIT/config.json",
]


@pytest.mark.usefixtures("by_ranges")
def test_reshard_streams_what_files_give(hub: Hub, tmp_path: Path) -> None:
    reshard(TINY, tmp_path / "there", "--tp-out", "2")
    reshard(MODEL, tmp_path / "here", "--tp-out", "2", "--verify", "--workers", "2")
    assert written(tmp_path / "here") == written(tmp_path / "there")
    assert set(hub.resolves().values()) == {1}
    asked = requests(hub)
    assert asked[:1] == LISTING
    assert sorted(set(asked[1:])) == sorted([*CONFIG, f"hub HEAD /org/tiny/resolve/COMMIT/{WEIGHTS}", "cdn GET"])
    assert not (tmp_path / "home/hub").exists()  # nothing is left in the cache


def test_small_files_are_fetched_once(hub: Hub) -> None:
    """Whole, and whatever reads them; the text of a place names the commit, for the processes that compute."""
    src = place(MODEL)
    for name in ("config.json", WEIGHTS):
        assert read_all(src / name) == read_all(place(str(src / name))) == (TINY / name).read_bytes()
    with (src / WEIGHTS).open() as f:
        assert (f.read(8), f.seek(-4, 2), f.read()) == (
            (TINY / WEIGHTS).read_bytes()[:8],
            (TINY / WEIGHTS).stat().st_size - 4,
            (TINY / WEIGHTS).read_bytes()[-4:],
        )
    assert hub.resolves() == {"config.json": 1, WEIGHTS: 1}
    assert requests(hub)[:1] == LISTING
    assert re.fullmatch(r"hf://org/tiny@[0-9a-f]{40}", str(src))


def test_a_commit_is_not_asked_for(hub: Hub) -> None:
    commit = hub.repos["org/tiny"].refs["refs/heads/main"]
    assert place(f"{MODEL}@{commit}/config.json").is_file()
    assert requests(hub) == OF_COMMIT


@pytest.mark.usefixtures("by_ranges")
def test_a_push_during_a_run_changes_nothing(hub: Hub) -> None:
    src = place(MODEL)
    file = DataFile.at(src / WEIGHTS)
    hub.add("org/tiny", {"config.json": b"{}", WEIGHTS: b"new"})
    assert read_all(src / WEIGHTS) == read_all(file.place) == (TINY / WEIGHTS).read_bytes()
    assert read_all(place(f"{MODEL}/config.json")) == (TINY / "config.json").read_bytes()
    assert file.is_unchanged()


def test_revisions(hub: Hub) -> None:
    repo = hub.repos["org/tiny"]
    for i, ref in enumerate(("refs/heads/fp8", "refs/tags/v1.0", "refs/heads/a/b", "refs/pr/3")):
        hub.add("org/tiny", {"config.json": b"%d" % i})
        repo.refs[ref] = repo.refs["refs/heads/main"]
    for text, i in (("fp8", 0), ("v1.0", 1), ("a%2Fb", 2), ("refs/pr/3", 3), ("main", 3)):
        found = place(f"{MODEL}@{text}/config.json")
        assert str(found) == f"{MODEL}@{text}/config.json"  # nobody has looked
        assert read_all(found) == b"%d" % i
        assert str(found) == f"{MODEL}@{list(repo.commits)[i + 1]}/config.json"


def test_folders(hub: Hub) -> None:
    hub.add("org/two", {f"{d}/{n}": TINY / n for d in ("a/b", "c") for n in ("config.json", WEIGHTS)} | {"x": b""})
    root = place("hf://org/two")
    assert {(e.name, e.is_dir(), e.is_file()) for e in root.scan()} == {
        ("a", True, False), ("c", True, False), ("x", False, True)
    }  # fmt: skip
    assert [e.name for e in (root / "a").scan()] == ["b"]
    assert ((root / "a/b").is_dir(), (root / "a").is_file(), (root / "b").exists()) == (True, False, False)
    assert (root / "a/b" / "config.json").parent.parent == root / "a"
    assert ckpttool("inspect", "hf://org/two/a/b").code == 0
    assert ckpttool("inspect", f"hf://org/two/c/{WEIGHTS}").code == 0
    assert requests(hub).count("hub GET /api/models/org/two/revision/main") == 1
    for wrong in (root / "a", root / "nothing", root / "x" / "y", root / "../../etc/passwd"):
        with pytest.raises(OSError, match="directory"):
            wrong.identity()
        with pytest.raises(OSError, match="directory"):
            wrong.open()
    with pytest.raises(NotADirectoryError):
        list((root / "x").scan())


def test_a_repository_of_many_files(hub: Hub) -> None:
    hub.add("org/many", {f"{i % 7}/{i:05}.json": b"" for i in range(2500)})
    assert len(list(place("hf://org/many").scan())) == 7
    assert requests(hub) == ["hub GET /api/models/org/many/revision/main"]


def test_more_files_than_one_answer_lists(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tree is paged. A next page on another host gets no token: it is asked of the Hub."""
    monkeypatch.setattr(hub_files, "MAX_WHOLE", 5)
    hub.page = 4
    files = {f"{i % 2}/{i}.json": b"%d" % i for i in range(11)} | {"a.safetensors": bytes(2000)}
    hub.add("org/more", files)
    hub.endpoint, asked = hub.cdn, hub.endpoint  # the host of the next page
    src = place("hf://org/more")
    assert sorted(walk(src)) == sorted(files)
    hub.endpoint = asked
    (blobs,) = hub.repos["org/more"].commits.values()
    for name, blob in blobs.items():
        assert (src / name).identity() == (blob.size, blob.sha256 if blob.lfs else blob.oid)
    assert (
        requests(hub)
        == ["hub GET /api/models/org/more/revision/main"] + ["hub GET /api/models/org/more/tree/COMMIT"] * 4
    )
    for name, value in (("MAX_FILES", 7), ("MAX_PAGES", 2)):
        hub.add("org/more", files | {name: b""})
        with monkeypatch.context() as patch:
            patch.setattr(hub_files, name, value)
            hub_files.forget("org/more")
            with pytest.raises(CorruptError, match=r"has more than [78] files"):
                place("hf://org/more").exists()


def test_threads_share_a_resolve(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_files, "SMALL_LARGE", 0)
    hub.delay = 0.01
    data = (TINY / WEIGHTS).read_bytes()
    file = (place(MODEL) / WEIGHTS).open_file()
    with ThreadPoolExecutor(8) as threads:
        parts = list(threads.map(lambda at: file.pread(10_000, at), range(0, len(data), 10_000)))
    assert b"".join(parts) == data
    assert hub.resolves() == {WEIGHTS: 1}
    etags = {a.headers.get("if-match") for a in hub.asked if a.server == "cdn"}
    assert len(etags - {None}) == 1  # the storage's own, as soon as it is known


def test_a_large_file_of_git_is_read_by_ranges(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_files, "SMALL", 10)
    file = (place(MODEL) / "config.json").open_file()
    assert file.pread(20, 5) + file.pread(7, 25) == (TINY / "config.json").read_bytes()[5:32]
    assert hub.resolves() == {"config.json": 1}


def test_repositories_that_were_renamed(hub: Hub) -> None:
    hub.moved["org/old"] = "org/tiny"
    assert read_all(place("hf://org/old/config.json")) == (TINY / "config.json").read_bytes()
    assert read_all(place(f"hf://org/old/{WEIGHTS}")) == (TINY / WEIGHTS).read_bytes()


@pytest.mark.parametrize("forks", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_processes_that_compute(hub: Hub, forks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forks know what their parent knows; a fresh interpreter lists the commits that it is told, and no branch."""
    monkeypatch.setattr(hub_files, "SMALL_LARGE", 0)
    monkeypatch.setattr("ckpttool.execute.worker_pool.can_fork", lambda: forks)
    second = tmp_path / "second"
    shutil.copytree(TINY, second)
    (second / "README.md").touch()
    hub.add("org/b", second)
    for at, models in (("there", [TINY, second]), ("here", [MODEL, "hf://org/b"])):
        done = ckpttool("merge", *models, "-o", tmp_path / at, "--weights", "0.3,0.7", "--workers", "2")
        assert done.code == 0, done.err
    assert (tmp_path / "here" / WEIGHTS).read_bytes() == (tmp_path / "there" / WEIGHTS).read_bytes()
    asked = requests(hub)
    assert asked.count(LISTING[0]) == 1
    processes = 1 if forks else 1 + 2  # this one, and those of a machine with two cores
    assert asked.count(OF_COMMIT[0]) <= processes - 1
    assert 1 <= asked.count(f"hub HEAD /org/tiny/resolve/COMMIT/{WEIGHTS}") <= processes


@pytest.mark.usefixtures("hub")
def test_locks_of_threads_that_a_fork_left_behind() -> None:
    src = place(f"{MODEL}/{WEIGHTS}")
    file = src.open_file()
    commit = src._revision.commit
    held: list[Any] = [
        hub_files._lock,
        BYTES._lock,
        commit.stored(WEIGHTS).lock,
    ]
    with ThreadPoolExecutor(1) as other:
        for lock in held:
            other.submit(lock.acquire).result()
    caches._after_fork()
    hub_files._after_fork()
    found: list[bytes] = []
    reader = threading.Thread(target=lambda: found.append(read_all(place(str(src)))), daemon=True)
    reader.start()
    reader.join(5)
    assert found == [file.pread(1 << 20, 0)]


# -- credentials


@pytest.mark.parametrize("kind", ["ranges", "whole"])
def test_the_token_goes_to_the_hub_only(hub: Hub, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "ranges":
        monkeypatch.setattr(hub_files, "SMALL_LARGE", 0)
    hub.add("org/secret", TINY, private=True, gated=True)
    with hub.clients(tmp_path / "home", token=OWNER):
        done = reshard("hf://org/secret", tmp_path / "dst", "--manifest")
    assert {a.token for a in hub.asked if a.server == "hub"} == {OWNER}
    at_cdn = [a for a in hub.asked if a.server == "cdn"]
    assert at_cdn
    assert not any("authorization" in a.headers or "cookie" in a.headers for a in at_cdn)
    assert OWNER not in done.out + done.err
    assert not any(s in data for data in written(tmp_path / "dst").values() for s in (OWNER.encode(), b"Signature"))


def test_anonymous(hub: Hub, tmp_path: Path) -> None:
    with hub.clients(tmp_path / "home", token=WRONG, CKPTTOOL_ANONYMOUS="1"):
        assert place(f"{MODEL}/config.json").is_file()
    with hub.clients(tmp_path / "home2", token=WRONG, CKPTTOOL_ANONYMOUS="", **IMPLICIT):
        assert place(f"{MODEL}/config.json").is_file()
    assert not any(a.token for a in hub.asked)


# -- signatures


@pytest.mark.usefixtures("by_ranges")
def test_a_signature_that_has_become_invalid_is_renewed(hub: Hub) -> None:
    data = (TINY / WEIGHTS).read_bytes()
    file = (place(MODEL) / WEIGHTS).open_file()
    assert file.pread(100, 0) == data[:100]
    hub.expire()
    assert file.pread(100, 100) == data[100:200]
    assert hub.resolves() == {WEIGHTS: 2}
    assert [a.status for a in hub.asked if a.server == "cdn"] == [206, 403, 206]


@pytest.mark.usefixtures("by_ranges")
@pytest.mark.parametrize("status", [403, 404])
def test_a_storage_that_refuses_every_signature(hub: Hub, status: int) -> None:
    file = (place(MODEL) / WEIGHTS).open_file()
    hub.fail(r"GET /[0-9a-f]{64}", status, times=100)
    with pytest.raises(AccessError, match="the Hub's storage cannot be read") as e:
        file.pread(100, 0)
    assert "Signature" not in str(e.value)
    assert hub.resolves() == {WEIGHTS: 2}


@pytest.mark.usefixtures("by_ranges")
def test_access_that_is_lost_during_a_run(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    is_signed, at_cdn = hub.is_signed, 0

    def fewer(path: str, query: str) -> bool:
        nonlocal at_cdn
        at_cdn += 1
        if at_cdn > 1:  # behind the header
            hub.repos["org/tiny"].accepted = set()
            hub.expire()
        return is_signed(path, query)

    monkeypatch.setattr(hub, "is_signed", fewer)
    done = ckpttool("reshard", MODEL, tmp_path / "dst", "--memory", "8MiB")
    assert (done.code, done.err.count("error: ")) == (1, 1), done.err
    assert "error: org/tiny is gated, and you are not logged in" in done.err
    assert not (tmp_path / "dst").exists()


@pytest.mark.usefixtures("by_ranges")
@pytest.mark.parametrize("kind", [503, 429, "reset", "short"])
def test_what_passes_is_tried_again(hub: Hub, kind: int | str, tmp_path: Path) -> None:
    for pattern in ("revision", "HEAD .*resolve/", "GET /org/.*resolve/", r"GET /[0-9a-f]{64}"):
        hub.fail(pattern, kind, times=2)  # type: ignore[arg-type]
    reshard(MODEL, tmp_path / "dst")
    assert (tmp_path / "dst" / WEIGHTS).read_bytes() == (TINY / WEIGHTS).read_bytes()


# -- the cache


def test_a_model_in_the_cache_needs_no_request(hub: Hub, tmp_path: Path) -> None:
    snapshot = fill(hub, tmp_path / "home", "org/tiny")
    src = place(MODEL)
    done = reshard(MODEL, tmp_path / "dst")
    assert written(tmp_path / "dst")[WEIGHTS] == (TINY / WEIGHTS).read_bytes()
    assert not hub.asked
    said = f"main of org/tiny is commit {snapshot.name[:12]}, as the Hub's cache has it; `hf download org/tiny` fetches"
    assert said in done.err
    assert "as the Hub's cache has it" not in ckpttool("inspect", str(src)).err
    assert str(src) == f"{MODEL}@{snapshot.name}"
    assert (src / WEIGHTS).identity()[1] == hub.repos["org/tiny"].commits[snapshot.name][WEIGHTS].sha256
    here = (src / WEIGHTS).on_disk()
    assert here == ((snapshot / WEIGHTS).resolve(), 0)
    file = (src / WEIGHTS).open_file()
    with closing(file.map()) as mapped:
        assert mapped[:100] == file.pread(100, 0)
    file.close()


@pytest.mark.usefixtures("by_ranges")
def test_what_the_cache_has_is_read_there(hub: Hub, tmp_path: Path) -> None:
    """Of a commit that was fetched in part, the rest comes from the Hub; the list of its files is there, too."""
    fill(hub, tmp_path / "home", "org/tiny", WEIGHTS)
    before = written(tmp_path / "home")
    reshard(MODEL, tmp_path / "dst")
    assert requests(hub) == LISTING[:1] + CONFIG
    assert written(tmp_path / "home") == before
    assert (place(MODEL) / "config.json").on_disk() is None


@pytest.mark.usefixtures("by_ranges")
def test_caches_without_lists_of_files(hub: Hub, tmp_path: Path) -> None:
    """As huggingface_hub before 2 leaves them: nobody knows whether there is more, so the Hub is asked."""
    snapshot = fill(hub, tmp_path / "home", "org/tiny", WEIGHTS)
    shutil.rmtree(snapshot.parents[1] / "trees")
    reshard(MODEL, tmp_path / "dst")
    assert requests(hub) == LISTING + CONFIG


@pytest.mark.usefixtures("by_ranges")
def test_the_same_bytes_of_another_commit(hub: Hub, tmp_path: Path) -> None:
    """Weights that were renamed are in the cache by what they hold."""
    fill(hub, tmp_path / "home", "org/tiny")
    hub.add("org/tiny", {"config.json": TINY / "config.json", "new/renamed.safetensors": TINY / WEIGHTS})
    src = place(f"{MODEL}@{hub.repos['org/tiny'].refs['refs/heads/main']}")
    assert read_all(src / "new/renamed.safetensors") == (TINY / WEIGHTS).read_bytes()
    assert requests(hub) == OF_COMMIT


@pytest.mark.usefixtures("by_ranges")
def test_caches_without_links(hub: Hub, tmp_path: Path) -> None:
    snapshot = fill(hub, tmp_path / "home", "org/tiny")
    blobs = {(snapshot / n).resolve(): snapshot / n for n in ("config.json", WEIGHTS)}
    for blob, path in blobs.items():
        path.unlink()
        blob.rename(path)
    assert read_all(place(f"{MODEL}/{WEIGHTS}")) == (TINY / WEIGHTS).read_bytes()
    assert not hub.asked


@pytest.mark.usefixtures("by_ranges")
def test_a_damaged_cache_is_not_read(hub: Hub, tmp_path: Path) -> None:
    """A file of another size, a list that is cut off, a branch that is no commit."""
    snapshot = fill(hub, tmp_path / "home", "org/tiny")
    (snapshot / WEIGHTS).resolve().write_bytes(b"half")
    (snapshot.parents[1] / "trees" / f"{snapshot.name}.json").write_text('{"format_version": 1, "fil')
    (snapshot.parents[1] / "refs/main").write_text("../../..")
    assert read_all(place(f"{MODEL}/{WEIGHTS}")) == (TINY / WEIGHTS).read_bytes()
    assert [r for r in requests(hub) if r.startswith("hub")] == [
        *LISTING, f"hub HEAD /org/tiny/resolve/COMMIT/{WEIGHTS}"
    ]  # fmt: skip


@pytest.mark.usefixtures("by_ranges")
def test_a_link_to_other_bytes_is_not_read(hub: Hub, tmp_path: Path) -> None:
    """A name that leads to a blob of the right size that holds something else."""
    snapshot = fill(hub, tmp_path / "home", "org/tiny")
    blob = (snapshot / WEIGHTS).resolve()
    blob.rename(other := blob.with_name("0" * 64))
    other.write_bytes(bytes(other.stat().st_size))
    (snapshot / WEIGHTS).unlink()
    (snapshot / WEIGHTS).symlink_to(other)
    assert read_all(place(f"{MODEL}/{WEIGHTS}")) == (TINY / WEIGHTS).read_bytes()


def test_lists_of_files_that_lead_out_are_not_believed(hub: Hub, tmp_path: Path) -> None:
    snapshot = fill(hub, tmp_path / "home", "org/tiny")
    tree = snapshot.parents[1] / "trees" / f"{snapshot.name}.json"
    data = json.loads(tree.read_text())
    data["files"]["../../../../secret"] = {"size": 3, "blob_id": "0" * 40}
    tree.write_text(json.dumps(data))
    assert {e.name for e in place(MODEL).scan()} == {"config.json", WEIGHTS}
    assert requests(hub) == LISTING


# -- offline


def test_offline(hub: Hub, tmp_path: Path) -> None:
    snapshot = fill(hub, tmp_path / "home", "org/tiny")
    with hub.clients(tmp_path / "home", HF_HUB_OFFLINE="1"):
        reshard(MODEL, tmp_path / "dst")
        assert str(place(MODEL)) == f"{MODEL}@{snapshot.name}"
        assert refused("hf://org/other", tmp_path / "no") == (
            "error: org/other is not in the Hub's cache, and only that is read (offline)\n"
            f"  --> hf://org/other\n      {tmp_path}/home/hub/models--org--other\n\n"
            "hint: `hf download org/other` fetches it; or unset HF_HUB_OFFLINE\n"
        )
        assert "`hf download org/tiny --revision v1` fetches it" in refused(f"{MODEL}@v1", tmp_path / "no")
    assert not hub.asked


@pytest.mark.parametrize("listed", [True, False])
def test_offline_a_missing_file_is_named(hub: Hub, listed: bool, tmp_path: Path) -> None:
    names = {f"model-0000{i}-of-00002.safetensors": b"%d" % i for i in (1, 2)}
    index = json.dumps({"weight_map": {f"w{i}": n for i, n in enumerate(names)}}).encode()
    hub.add("org/two", {"config.json": TINY / "config.json", "model.safetensors.index.json": index, **names})
    snapshot = fill(hub, tmp_path / "home", "org/two", "*.json", "*1-of*")
    if not listed:
        shutil.rmtree(snapshot.parents[1] / "trees")
    if_it_has = "" if listed else "if the model has it, "
    with hub.clients(tmp_path / "home", HF_HUB_OFFLINE="1"):
        error = refused("hf://org/two", tmp_path / "dst")
        lost = place(f"hf://org/two@{snapshot.name}/original").lost()
    assert "1 of 2 shards that the index names are missing: model-00002-of-00002.safetensors" in error
    assert error.endswith(
        f"hint: only the Hub's cache is read (offline); {if_it_has}`hf download org/two "
        f"model-00002-of-00002.safetensors --revision {snapshot.name}` fetches it\n"
    )
    assert lost.startswith("org/two has config.json, " if listed else "only the Hub's cache is read (offline)")
    assert not hub.asked


def test_offline_what_the_cache_lacks_is_said(hub: Hub, tmp_path: Path) -> None:
    """A checkpoint can be read without its tokenizer, and the output would have none."""
    about: dict[str, bytes | Path] = {"README.md": b"#", "tokenizer.json": b"{}", "original/params.json": b"{}"}
    hub.add("org/words", about | {n: TINY / n for n in ("config.json", WEIGHTS)})
    snapshot = fill(hub, tmp_path / "home", "org/words", "config.json", WEIGHTS)
    with hub.clients(tmp_path / "home", HF_HUB_OFFLINE="1"):
        notes = open_checkpoint(place("hf://org/words"), OpenOptions()).notes
    assert any(
        n.endswith(
            "; the Hub's cache lacks tokenizer.json: "
            f"`hf download org/words tokenizer.json --revision {snapshot.name}` fetches it"
        )
        for n in notes
    )


# -- what goes wrong

GATED = "error: org/gated is gated, and "
MISSING = "error: the Hub has no model org/nothing, or it is private, and "
ERRORS = {
    "missing": ("hf://org/nothing", "", MISSING + "you are not logged in", "log in: `hf auth login`, or HF_TOKEN"),
    "missing, logged in": ("hf://org/nothing", READER, MISSING + "your token may not read it", "check the name at "),
    "private": ("hf://org/private", "", "error: the Hub has no model org/private, or it is private", "hf auth login"),
    "private, logged in": ("hf://org/private", READER, "or it is private, and your token may not", "fine-grained"),
    "gated": ("hf://org/gated", "", GATED + "you are not logged in", "accept the conditions there, then log in"),
    "gated, logged in": ("hf://org/gated", READER, GATED + "your account has not been given", "ask for it there"),
    "token": (MODEL, WRONG, "error: the Hub does not recognize the token", "log in again: `hf auth login`"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_repositories_that_cannot_be_read(hub: Hub, case: str, tmp_path: Path) -> None:
    hub.add("org/private", TINY, private=True)
    hub.add("org/gated", TINY, gated=True)
    source, token, what, hint = ERRORS[case]
    with hub.clients(tmp_path / "home", token=token):
        error = refused(source, tmp_path / "dst")
    assert what in error
    assert hint in error.partition("hint: ")[2]
    assert f"--> {source}" in error
    assert not token or token not in error


def test_revisions_and_folders_that_there_are_not(hub: Hub, tmp_path: Path) -> None:
    hub.repos["org/tiny"].refs["refs/heads/fp8/new"] = hub.repos["org/tiny"].refs["refs/heads/main"]
    error = refused(f"{MODEL}@v9", tmp_path / "dst", code=2)
    assert error == (
        f"error: org/tiny has no revision 'v9'\n  --> {MODEL}@v9\n\n"
        "hint: it has main, fp8/new; a slash in a name is written %2F\n"
    )
    assert "has no revision" in refused(f"{MODEL}@{'0' * 40}", tmp_path / "dst", code=2)
    error = refused(f"{MODEL}/fp8", tmp_path / "dst", code=2)
    assert "the source does not exist" in error
    assert "hint: org/tiny has config.json, model.safetensors\n" in error


@pytest.mark.parametrize("token", ["", READER])
def test_too_many_requests(hub: Hub, token: str, tmp_path: Path) -> None:
    limits = {"RateLimit": '"api";r=0;t=55', "RateLimit-Policy": '"fixed window";"api";q=500;w=300'}
    hub.fail("revision", 429, times=100, headers=limits)
    with hub.clients(tmp_path / "home", token=token):
        error = refused(MODEL, tmp_path / "dst")
    assert "error: the Hub allows no more requests for now (500 api in 300 s); again in 55 s\n" in error
    assert ("logged-in users may send more requests" in error) == (not token)


@pytest.mark.usefixtures("by_ranges")
def test_servers_that_are_down(hub: Hub, tmp_path: Path) -> None:
    hub.fail("revision", 503, times=100)
    assert "error: the Hub answers 503\n" in refused(MODEL, tmp_path / "dst")
    hub.faults.clear()
    hub.fail(r"GET /[0-9a-f]{64}", 500, times=100)
    error = refused(MODEL, tmp_path / "dst")
    assert "error: the Hub's storage cannot be read: " in error
    assert "Signature" not in error
    with hub.clients(tmp_path / "home2", HF_ENDPOINT="http://127.0.0.1:1"):
        error = refused(MODEL, tmp_path / "dst")
    assert "error: the Hub did not answer: " in error
    assert "HF_HUB_OFFLINE=1" in error


def test_what_is_not_the_hub(hub: Hub, tmp_path: Path) -> None:
    hub.fail("revision", 200, times=1)
    error = refused(MODEL, tmp_path / "dst")
    assert "error: the answer does not come from the Hugging Face Hub (status 200)\n" in error
    assert "check HF_ENDPOINT" in error
    for wrong in ("nonsense", "ftp://host", "http://user:secret@127.0.0.1:1", "http://127.0.0.1:99999"):
        with hub.clients(tmp_path / f"home {wrong[:6]}", HF_ENDPOINT=wrong):
            assert "secret" not in refused(MODEL, tmp_path / "dst")


# -- what the Hub says of files


def test_files_as_listings_have_them() -> None:
    """Of a pointer git's size and hash are said too: they do not count."""
    git, sha = "1" * 40, "2" * 64
    listed = partial(_listed, blob="blobId", sha256="sha256")
    plain: dict[str, Any] = {"rfilename": "a", "size": 7, "blobId": git}
    assert listed(plain) == listed(plain | {"lfs": None}) == (7, git, False)
    pointer = {"size": 900, "sha256": sha, "pointerSize": 134}
    assert listed(plain | {"size": 134, "lfs": pointer}) == (900, sha, True)
    for wrong in (
        {"size": -1},
        {"size": "7"},
        {"size": True},
        {"size": 1 << 63},
        {"blobId": sha},
        {"blobId": "x"},
        {"blobId": 7},
    ):
        with pytest.raises(ValueError, match="is not a"):
            listed(plain | wrong)
    with pytest.raises(ValueError, match="is not a hash"):
        listed(plain | {"lfs": pointer | {"sha256": git}})


# -- a Hub that lies


@pytest.mark.parametrize("names", [["../x"], ["a/../../x"], ["/etc/x"], ["a//b"], ["a", "a/b"], ["x\0y"]])
def test_listings_that_lead_out_or_contradict(hub: Hub, names: list[str], tmp_path: Path) -> None:
    hub.add("org/evil", dict.fromkeys(names, b"") | {"config.json": b"{}"})
    assert "error: the listing of the repository has " in refused("hf://org/evil", tmp_path / "dst")


@pytest.mark.usefixtures("by_ranges")
@pytest.mark.parametrize(
    ("header", "value"), [("X-Linked-ETag", f'"{"0" * 64}"'), ("X-Linked-Size", "5"), ("X-Repo-Commit", "0" * 40)]
)
def test_a_resolve_that_contradicts_the_listing(hub: Hub, header: str, value: str) -> None:
    src = place(f"{MODEL}/{WEIGHTS}")
    assert src.is_file()
    hub.fail("HEAD .*resolve", 302, headers={"Location": f"{hub.cdn}/x", header: value})
    with pytest.raises(CorruptError, match="contradicts its list of files"):
        src.open_file().pread(10, 0)
    assert not any(a.server == "cdn" for a in hub.asked)


def test_bytes_that_contradict_the_listing(hub: Hub) -> None:
    """Of small files every byte is checked; of ranges their place, and the size of the whole."""
    src = place(MODEL)
    assert src.is_dir()
    blob = hub.repos["org/tiny"].find("main")
    assert blob
    files = hub.repos["org/tiny"].commits[blob]
    for name in ("config.json", WEIGHTS):
        data = files[name].bytes()
        other = bytes([data[0] ^ 1]) + data[1:]
        object.__setattr__(files[name], "data", other)
        with pytest.raises(CorruptError, match="do not match the Hub's list of files"):
            read_all(src / name)


@pytest.mark.usefixtures("by_ranges")
def test_a_storage_with_another_file(hub: Hub) -> None:
    src = place(f"{MODEL}/{WEIGHTS}")
    assert src.is_file()
    file = src.open_file()
    file.pread(10, 0)
    commit = hub.repos["org/tiny"].find("main")
    assert commit
    blob = hub.repos["org/tiny"].commits[commit][WEIGHTS]
    object.__setattr__(blob, "data", b"longer" + blob.bytes())
    del blob.__dict__["size"]
    with pytest.raises(CorruptError):
        file.pread(10, 100)


@pytest.mark.usefixtures("by_ranges")
@pytest.mark.parametrize(
    ("to", "why"),
    [
        ("http://169.254.169.254/x", "has a link-local address"),
        ("http://10.0.0.1/x", "has a private address"),
        ("ftp://h/x", "has the scheme ftp, not https or http"),
        ("http://h:99999/x", "port is not a number"),
        ("http://[", "an invalid URL"),
    ],
)
def test_locations_that_nobody_should_be_led_to(hub: Hub, to: str, why: str) -> None:
    src = place(f"{MODEL}/{WEIGHTS}")
    assert src.is_file()
    hub.fail("HEAD .*resolve", 302, headers={"Location": to}, times=100)
    with pytest.raises(AccessError, match=why):
        src.open_file().pread(10, 0)


@pytest.mark.usefixtures("by_ranges")
def test_redirects_in_a_circle(hub: Hub) -> None:
    src = place(f"{MODEL}/{WEIGHTS}")
    assert src.is_file()
    hub.fail("HEAD .*resolve", 302, headers={"Location": "?again"}, times=100)
    with pytest.raises(AccessError, match="in a circle"):
        src.open_file().pread(10, 0)
    assert len(hub.asked) < 10


# -- names

TEXTS = {
    "hf://org/model": "hf://org/model",
    "hf:/org/model": "hf://org/model",
    "hf://org/model/": "hf://org/model",
    "hf://models/org/model": "hf://org/model",
    "hf://org/model@main": "hf://org/model@main",
    "hf://org/model@a%2Fb/c": "hf://org/model@a%2Fb/c",
    "hf://org/model@refs/pr/3/c/d": "hf://org/model@refs/pr/3/c/d",
    "hf://org/model/a/./b//c@d": "hf://org/model/a/b/c@d",
    "hf://o-1/M_2.5-8B@v1+x/a b?c%20#.safetensors": "hf://o-1/M_2.5-8B@v1+x/a b?c%20#.safetensors",
}


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize("text", TEXTS)
def test_texts(text: str) -> None:
    found = parse(text)
    assert str(found) == TEXTS[text]
    assert parse(str(found)) == found == pickle.loads(pickle.dumps(found))  # noqa: S301 - our own
    assert hash(parse(str(found))) == hash(found)


PAGES = {
    "https://huggingface.co/org/model": "hf://org/model",
    "https://huggingface.co/org/model/tree/main": "hf://org/model@main",
    "https://hf.co/org/model/blob/v1/a/b%20c.json?x=y#z": "hf://org/model@v1/a/b c.json",
    "https://huggingface.co/org/model/resolve/a%2Fb/model.safetensors?download=true": "hf://org/model@a%2Fb/model.safetensors",
    "https://huggingface.co/org/model/tree/refs%2Fpr%2F3/a": "hf://org/model@refs/pr/3/a",
    "https://huggingface.co/org/model/tree/refs/pr/3/a": "hf://org/model@refs/pr/3/a",
    "http://hub.host:80/below/org/model/resolve/main/c": "hf://org/model@main/c",
    "https://huggingface.co/org/model/discussions/3": "",
    "https://huggingface.co/org": "",
    "https://huggingface.co/docs/hub": "",
    "https://other.co/org/model": "",
}


@pytest.mark.parametrize("url", PAGES)
def test_pages_and_downloads_of_the_hub_are_its_places(url: str, tmp_path: Path) -> None:
    with Hub().clients(tmp_path / "home", HF_ENDPOINT="http://hub.host:80/below"):
        found = from_page(url)
    assert str(found or "") == PAGES[url]


@pytest.mark.usefixtures("hub")
def test_a_page_of_a_data_set() -> None:
    with pytest.raises(UsageError, match="a dataset of the Hub"):
        from_page("https://huggingface.co/datasets/org/data")


@pytest.mark.usefixtures("hub")
def test_parts_of_a_name() -> None:
    found = parse("hf://org/model@v1/a/b.safetensors")
    assert isinstance(found, HubPlace)
    assert (found.repo, found.revision, found.path) == ("org/model", "v1", "a/b.safetensors")
    assert (found.name, found.suffix) == ("b.safetensors", ".safetensors")
    root = found.parent.parent
    assert (root.path, root.name, root.parent) == ("", "model", root)
    assert root / "a" / "b.safetensors" == root / "a/b.safetensors" == found
    assert root not in (parse("hf://org/model@v2"), "hf://org/model@v1")


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize(
    "text",
    [
        "hf://", "hf://gpt2", "hf://datasets/org/data", "hf://spaces/org/app", "hf://org/model@", "hf://org/a--b",
        "hf://org/mod el", "hf://-org/model", "hf://org/..", "hf://org/model@..%2F..%2Fx", "hf://org/model@%2Fetc",
        "hf://org/model@a b", "hf://org/model@a:b", "hf://org:pw@host/model", "hf://ö/model",
        "hf://pw@org/model", "hf://org/model?token=pw", "hf://org/model@v1/x?sig=pw",
    ],
)  # fmt: skip
def test_names_that_cannot_be(text: str) -> None:
    with pytest.raises(UsageError) as e:
        parse(text)
    assert e.value.hint
    assert "pw" not in e.value.render()


def test_nobody_is_asked_about_what_is_only_named(hub: Hub) -> None:
    """A repository that is to be written need not be there."""
    assert str(parse("hf://org/new@branch") / "config.json") == "hf://org/new@branch/config.json"
    assert not hub.asked


def test_an_error_is_not_kept(hub: Hub) -> None:
    src = place("hf://org/later")
    with pytest.raises(CkptError):
        src.exists()
    hub.add("org/later", TINY)
    assert src.is_dir()


def test_a_run_is_listed_with_a_few_requests(hub: Hub, tmp_path: Path) -> None:
    """One list of the repository, and the headers of one of the checkpoints that are alike."""
    for step in range(1, 31):
        shutil.copytree(TINY, tmp_path / "run" / f"checkpoint-{step}")
    hub.add("org/run", tmp_path / "run")
    done = ckpttool("inspect", "hf://org/run")
    assert done.code == 0, done.err
    assert [line.split("\t")[8] for line in done.out.splitlines()[1:]] == ["yes"] * 30
    assert len(hub.asked) < 10
