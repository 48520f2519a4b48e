"""Each request of a push to the Hub fails once, in each way: the branch has what it had, or all that was to come."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpttool.execute.destinations import hub as writing
from tests.helpers.command import ckpttool
from tests.helpers.hub_server import Hub, Kind, hub_server

pytestmark = pytest.mark.filterwarnings("ignore:Use .content=:DeprecationWarning")

TINY = Path(__file__).parents[2] / "fixtures" / "hf_tiny_source"
OLD = {"README.md": b"hi", "config.json": b"{}", "old.safetensors": b"x"}
WHOLE = {"README.md", "config.json", "model.safetensors"}
COMMANDS: dict[str, tuple[str, ...]] = {
    "new": ("hf://org/new",),
    "force": ("hf://org/old", "--force"),
    "branch": ("hf://org/old@v2",),
    "pull": ("hf://org/old", "--create-pr"),
}
KINDS: tuple[Kind, ...] = (500, 503, 429, "reset", "lost")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr("time.sleep", lambda _: None)
    monkeypatch.setattr(writing, "LARGE", 1000)
    with hub_server() as server, server.clients(tmp_path / "home", token="hf_owner"):  # noqa: S106 - it is none
        server.part_size = 100_000
        yield server


def push(command: str) -> bool:
    return ckpttool("reshard", TINY, *COMMANDS[command], "--to", "hf").code == 0


def reset(hub: Hub) -> None:
    hub.repos.clear()
    hub.large.clear()
    hub.faults.clear()
    hub.add("org/old", OLD)


def names(hub: Hub, repo: str, revision: str) -> set[str]:
    return set(hub.repos[repo].files(revision)) - {".gitattributes"} if repo in hub.repos else set()


def check(hub: Hub, command: str, *, done: bool) -> None:
    """Nothing but all or nothing can be read; a run that says that it has written has."""
    new, old, v2 = names(hub, "org/new", "main"), names(hub, "org/old", "main"), names(hub, "org/old", "v2")
    pulls = [names(hub, "org/old", r) for r in hub.repos["org/old"].refs if r.startswith("refs/pr/")]
    assert new in ([WHOLE - {"README.md"}] if done and command == "new" else [set(), WHOLE - {"README.md"}])
    assert old in ([WHOLE] if done and command == "force" else [set(OLD), WHOLE])
    assert v2 in ([WHOLE] if done and command == "branch" else [set(), set(OLD), WHOLE])
    assert all(p == WHOLE for p in pulls)
    assert len(pulls) in ([1] if done and command == "pull" else [0, 1])
    if command != "force":
        assert hub.repos["org/old"].files() == OLD


@pytest.mark.thorough  # test_hub_writing fails at the requests that matter
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("command", COMMANDS)
def test_each_request_fails_once(command: str, kind: Kind, hub: Hub, tmp_path: Path) -> None:
    reset(hub)
    begun = len(hub.asked)
    assert push(command)
    count = len(hub.asked) - begun
    assert count >= 11
    for number in range(1, count + 1):
        reset(hub)
        hub.fail_at(number, kind)
        assert push(command), number  # all requests are repeated, or what they did is found
        check(hub, command, done=True)
        assert not list(tmp_path.glob("ckpttool-spool-*"))


@pytest.mark.thorough  # test_each_request_fails_once leaves the same states, but for the spool
def test_the_client_is_killed_after_each_request(hub: Hub, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ckpttool", "reshard", str(TINY), *COMMANDS["force"], "--to", "hf"]
    for number in range(1, 30):
        reset(hub)
        hub.fail_at(number, "lost")
        with subprocess.Popen(command, env={**os.environ, "TMPDIR": str(tmp_path)}) as run:
            hub.on_reset = lambda pid=run.pid: os.kill(pid, signal.SIGKILL)  # type: ignore[misc]
        check(hub, "force", done=run.returncode == 0)
        if run.returncode == 0:
            break
        assert push("force") or hub.repos["org/old"].files().keys() == WHOLE
        check(hub, "force", done=True)
    assert 11 < number < 29
    assert not list(tmp_path.glob("ckpttool-spool-*"))
