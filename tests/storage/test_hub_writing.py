"""hf:// as DST: one commit, or none, whatever becomes of requests."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpttool.execute import schedule, workforce
from ckpttool.execute.destinations import hub as writing
from ckpttool.execute.schedule import Part, Task
from ckpttool.storage import hub_files
from tests.helpers.command import ckpttool
from tests.helpers.hub_server import Hub, hub_server

pytestmark = pytest.mark.filterwarnings("ignore:Use .content=:DeprecationWarning")

TINY = Path(__file__).parents[2] / "fixtures" / "hf_tiny_source"
MERGE = TINY.parent / "merge" / "inputs"
GIT = {".gitattributes"}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr("time.sleep", lambda _: None)
    monkeypatch.setattr(writing, "LARGE", 1000)
    with hub_server() as server, server.clients(tmp_path / "home", token="hf_owner"):  # noqa: S106 - it is none
        yield server
    assert not list(tmp_path.glob("ckpttool-spool-*"))


def push(dst: str = "hf://org/new", *options: str) -> str:
    """What is said of a run that goes well."""
    done = ckpttool("reshard", TINY, dst, "--to", "hf", *options)
    assert done.code == 0, done.err
    return done.out + done.err


def refused(dst: str = "hf://org/new", *options: str) -> str:
    done = ckpttool("reshard", TINY, dst, "--to", "hf", *options)
    assert done.code in (1, 2), done.err
    assert "hf_owner" not in done.err
    assert "Signature" not in done.err
    return done.err


def held_files(hub: Hub, name: str = "org/new", revision: str = "main") -> dict[str, bytes]:
    return {n: d for n, d in hub.repos[name].files(revision).items() if n not in GIT}


def test_a_new_repository_is_private(hub: Hub, tmp_path: Path) -> None:
    here = ckpttool("reshard", TINY, tmp_path / "here", "--to", "hf")
    assert here.code == 0
    said = push("hf://org/new", "--verify", "--manifest")
    assert "made a private repository" in said
    files = held_files(hub)
    assert "ckpttool.manifest.json" in files
    del files["ckpttool.manifest.json"]
    assert files == {p.name: p.read_bytes() for p in (tmp_path / "here").iterdir()}
    assert hub.repos["org/new"].readers == {"owner"}
    assert hub.repos["org/new"].messages[1].startswith("Written by ckpttool")
    commit = hub.repos["org/new"].refs["refs/heads/main"]
    assert f"hf://org/new@{commit}: hf" in said
    assert {a.token for a in hub.asked if a.server == "cdn"} == {""}


def test_what_is_there_is_replaced_only_by_force(hub: Hub) -> None:
    hub.add("org/new", {"README.md": b"hi", "old.safetensors": b"x", "sub/a.json": b"{}"})
    assert "the destination holds old.safetensors" in refused()
    assert set(held_files(hub)) == {"README.md", "old.safetensors", "sub/a.json"}
    push("hf://org/new", "--force")
    assert set(held_files(hub)) == {"README.md", "model.safetensors", "config.json"}
    push("hf://org/new/deep/er")
    assert set(held_files(hub)) >= {"README.md", "config.json", "deep/er/config.json", "deep/er/model.safetensors"}


def test_the_token_stays_where_the_next_page_of_files_is_not(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("org/new", {"README.md": b"hi", "old.safetensors": b"x", "sub/a.json": b"{}"})
    monkeypatch.setattr(hub_files, "MAX_WHOLE", 1)
    hub.page, endpoint, hub.endpoint = 1, hub.endpoint, hub.cdn  # the host of the next page
    assert "the destination holds old.safetensors" in refused()
    assert {a.server for a in hub.asked if a.token} == {"hub"}
    hub.endpoint = endpoint


@pytest.mark.parametrize("how", ["--force", "--create-pr"])
def test_what_is_there_already_is_not_committed_again(hub: Hub, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[logging.LogRecord] = []
    monkeypatch.setattr(logging.getLogger("huggingface_hub"), "handle", logged.append)
    monkeypatch.setattr(logging.getLogger("huggingface_hub.hf_api"), "handle", logged.append)
    push()
    commit = hub.repos["org/new"].refs["refs/heads/main"]
    said = push("hf://org/new", how)
    assert f"nothing to commit: {commit} already has everything" in said
    assert f"hf://org/new@{commit}: hf" in said
    assert len(hub.repos["org/new"].commits) == 2
    assert not logged


def test_a_pull_request_leaves_the_branch(hub: Hub) -> None:
    hub.add("org/new", {"old.bin": b"x"})
    said = push("hf://org/new", "--create-pr")
    assert f"opened a pull request: {hub.endpoint}/org/new/discussions/1" in said
    assert "hf://org/new@refs/pr/1: hf" in said
    assert set(held_files(hub)) == {"old.bin"}
    assert set(held_files(hub, revision="refs/pr/1")) == {"model.safetensors", "config.json"}
    assert "needs an existing repository" in refused("hf://org/other", "--create-pr")


def test_a_branch_is_made(hub: Hub) -> None:
    hub.add("org/new", {"old.bin": b"x"})
    push("hf://org/new@v2")
    assert set(held_files(hub)) == {"old.bin"}
    assert set(held_files(hub, revision="v2")) == {"model.safetensors", "config.json"}
    assert "a new repository has no branch v2" in refused("hf://org/other@v2")
    assert "a commit cannot be changed" in refused(f"hf://org/new@{hub.repos['org/new'].refs['refs/heads/main']}")


@pytest.mark.parametrize("kind", [503, 429, "reset", "lost"])
def test_a_commit_is_repeated_or_found(hub: Hub, kind: int | str) -> None:
    hub.fail("POST .*/commit/", kind)  # type: ignore[arg-type]
    push()
    assert len(hub.repos["org/new"].commits) == 2
    assert set(held_files(hub)) == {"model.safetensors", "config.json"}


def test_a_hub_that_fails_gets_no_commit(hub: Hub) -> None:
    hub.fail("POST .*/commit/", 500, times=99)
    assert "the Hub answers 500" in refused()
    assert len(hub.repos["org/new"].commits) == 1
    hub.faults.clear()
    hub.asked.clear()
    assert "nothing to resume" in push("hf://org/new", "--resume")
    assert not [a for a in hub.asked if a.method == "PUT"]  # it was uploaded before


def test_somebody_else_was_faster(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("org/new", {"README.md": b"hi"})
    upload = writing.HubDestination._upload

    def meanwhile(self: writing.HubDestination, paths: list[Path]) -> object:
        hub.add("org/new", {"README.md": b"ho"})
        return upload(self, paths)

    monkeypatch.setattr(writing.HubDestination, "_upload", meanwhile)
    assert "changed by somebody else" in refused()
    assert set(held_files(hub)) == {"README.md"}


def test_permission_is_asked_for_first(hub: Hub, tmp_path: Path) -> None:
    hub.add("org/new", {"README.md": b"hi"})
    with hub.clients(tmp_path / "home", token="hf_reader"):  # noqa: S106 - it is none
        assert "you may not write this" in refused()
        assert "you may not write this" in refused("hf://org/other")
        assert not [a for a in hub.asked if a.method == "PUT"]
        assert "opened a pull request" in push("hf://org/new", "--create-pr")
    with hub.clients(tmp_path / "home"):
        assert "hint: hf auth login" in refused()
    with hub.clients(tmp_path / "home", token="hf_owner"):  # noqa: S106 - it is none
        assert "hint: drop --anonymous" in refused("hf://org/new", "--anonymous")


def test_a_failed_upload_ends_the_run(hub: Hub) -> None:
    hub.fail("PUT /put/", 400)
    assert "400" in refused()
    assert len(hub.repos["org/new"].commits) == 1


def test_files_leave_the_disk(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is sent as soon as it is complete, and those who write wait for that."""
    monkeypatch.setattr(workforce, "_MIB", 1)  # parts are recorded at once,
    monkeypatch.setattr(schedule, "_BATCH", 1)  # and small ones are not done together
    monkeypatch.setattr(writing, "WAITING", 0)
    upload, held = writing.HubDestination._upload, []

    def blocks(path: Path) -> int:
        try:
            return path.stat().st_blocks * 512
        except FileNotFoundError:  # it has been sent meanwhile
            return 0

    def seen(self: writing.HubDestination, paths: list[Path]) -> object:
        done = upload(self, paths)
        held.append(sum(blocks(p) for p in self.partial.iterdir()))
        return done

    monkeypatch.setattr(writing.HubDestination, "_upload", seen)
    push("hf://org/new", "--max-shard-size", "30KB", "--workers", "1")
    assert len(held) > 5
    assert max(held) < sum(map(len, held_files(hub).values())) / 2


def test_other_commands(hub: Hub, tmp_path: Path) -> None:
    models = MERGE / "ft1", MERGE / "ft2", "--method", "linear", "--weights", "1,2", "--card", "-o"
    for name, command in {
        "merged": ("merge", *models),
        "cut": ("merge", *models[:-1], "--max-shard-size", "50KB", "-o"),
        "told": ("merge", *models[:-1], "--report", tmp_path / "report.html", "-o"),
    }.items():
        for dst in (tmp_path / name, f"hf://org/{name}"):
            done = ckpttool(*command, dst)
            assert done.code == 0, done.err
        assert held_files(hub, f"org/{name}") == {p.name: p.read_bytes() for p in (tmp_path / name).iterdir()}
    assert b"## How far it is from its sources" in held_files(hub, "org/told")["README.md"]
    done = ckpttool("drop-keys", "hf://org/merged", "hf://org/merged", "model.norm.weight", "--create-pr")
    assert done.code == 0, done.err
    assert hub.repos["org/merged"].files("refs/pr/1").keys() == hub.repos["org/merged"].files().keys()


def test_disk_is_what_is_not_sent() -> None:
    tasks = [Task([Part(i, 10, (i // 2,))]) for i in range(6)]
    assert writing.most_held([20, 30, 40], tasks) == 40
    both = [Task([Part(i, 10, (i % 2,))]) for i in range(4)]
    assert writing.most_held([20, 30], both) == 50
