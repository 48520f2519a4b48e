"""The small Hub of the tests is one for huggingface_hub and transformers: what they ask for, they get."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import HfApi, HfFileSystem, hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from tests.helpers.hub_server import Hub, hub_server

TINY = Path("fixtures/hf_tiny_source")
OWNER, READER = "hf_owner", "hf_reader"


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with hub_server([("org/tiny", TINY)]) as server, server.clients(tmp_path / "home"):
        yield server


def contents(directory: Path) -> dict[str, bytes]:
    files = (p for p in directory.rglob("*") if p.is_file() and ".cache" not in p.parts)
    return {p.relative_to(directory).as_posix(): p.read_bytes() for p in files}


def test_download(hub: Hub) -> None:
    assert contents(Path(snapshot_download("org/tiny"))) == contents(TINY)
    assert set(hub.resolves().values()) <= {1, 2}  # HEAD and GET
    assert all(not a.token for a in hub.asked)


@pytest.mark.usefixtures("hub")
def test_transformers() -> None:
    from transformers import AutoModelForCausalLM

    assert AutoModelForCausalLM.from_pretrained("org/tiny").config.model_type == "llama"


@pytest.mark.filterwarnings("ignore:Use .content=:DeprecationWarning")
@pytest.mark.parametrize("part_size", [0, 50_000])
def test_upload(hub: Hub, part_size: int) -> None:
    hub.part_size = part_size
    api = HfApi(token=OWNER)
    api.create_repo("org/new", private=True, exist_ok=True)
    api.upload_folder(repo_id="org/new", folder_path=TINY)
    there = hub.repos["org/new"].files()
    del there[".gitattributes"]
    assert there == contents(TINY)
    with pytest.raises(RepositoryNotFoundError):
        HfApi().model_info("org/new")
    pull = api.upload_file(repo_id="org/new", path_or_fileobj=b"{}", path_in_repo="a/new.json", create_pr=True)
    assert pull.pr_revision == "refs/pr/1"
    assert Path(hf_hub_download("org/new", "a/new.json", revision="refs/pr/1", token=OWNER)).read_text() == "{}"
    assert "a/new.json" not in hub.repos["org/new"].files()
    assert {a.token for a in hub.asked if a.server == "cdn"} == {""}


@pytest.mark.usefixtures("hub")
def test_file_system() -> None:
    fs = HfFileSystem()
    name = next(p.name for p in TINY.iterdir() if p.suffix == ".safetensors")
    assert {Path(str(p)).name for p in fs.ls("org/tiny", detail=False)} == set(contents(TINY))
    assert fs.cat_file(f"org/tiny/{name}", 100, 300) == (TINY / name).read_bytes()[100:300]


def test_pages(hub: Hub) -> None:
    hub.page = 2
    commit = hub.add("org/deep", {f"a/b/{i}.json": b"{}" for i in range(5)})
    api = HfApi()
    assert len(list(api.list_repo_tree("org/deep", recursive=True, revision=commit))) == 7
    assert [e.path for e in api.list_repo_tree("org/deep", "a")] == ["a/b"]


def test_refusals(hub: Hub) -> None:
    hub.add("org/gated", {"config.json": b"{}"}, gated=True)
    hub.add("org/private", {"config.json": b"{}"}, private=True)
    hub.add("org/tiny", {"config.json": b"[]"}, branch="v2/x")
    hub.moved["org/old"] = "org/tiny"
    assert Path(hf_hub_download("org/tiny", "config.json", revision="v2/x")).read_text() == "[]"
    assert HfApi().model_info("org/old").id == "org/tiny"
    for name, revision, file, error in [
        ("org/gated", None, "config.json", GatedRepoError),
        ("org/private", None, "config.json", RepositoryNotFoundError),
        ("org/nothing", None, "config.json", RepositoryNotFoundError),
        ("org/tiny", "v3", "config.json", RevisionNotFoundError),
        ("org/tiny", None, "other.json", EntryNotFoundError),
    ]:
        with pytest.raises(error):
            hf_hub_download(name, file, revision=revision)
    assert hf_hub_download("org/gated", "config.json", token=OWNER)
    with pytest.raises(HfHubHTTPError, match="403"):
        HfApi(token=READER).create_repo("org/other")


def test_faults(hub: Hub) -> None:
    hub.fail("/resolve/", 503)
    hub.fail("/resolve/", 429, headers={"Retry-After": "0", "RateLimit": '"resolvers";r=0;t=1'})
    with pytest.raises(HfHubHTTPError):
        hf_hub_download("org/tiny", "model.safetensors.index.json", etag_timeout=1)
    assert [a.status for a in hub.asked if "/resolve/" in a.path][:1] == [503]


def test_why_reading_has_requests_of_its_own(tmp_path: Path) -> None:
    """When this fails, ``HfApi.list_repo_tree`` may be able to stand in for ``storage.hub_files``."""
    with hub_server() as hub, hub.clients(tmp_path / "home", token=READER):
        hub.add("org/model", {"a": b"", "b": b""})
        hub.page = 1
        hub.endpoint, asked = hub.cdn, hub.endpoint  # the host of the next page
        with pytest.raises(HfHubHTTPError):
            list(HfApi(asked, READER).list_repo_tree("org/model", recursive=True))
        assert [(a.server, a.token) for a in hub.asked] == [("hub", READER), ("cdn", READER)]
