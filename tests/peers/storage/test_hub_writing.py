"""What ckpttool writes to the Hub is a model for those who read it there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import HfFileSystem, snapshot_download

from tests.helpers.command import ckpttool
from tests.helpers.hub_server import Hub, hub_server

pytestmark = pytest.mark.filterwarnings("ignore:Use .content=:DeprecationWarning")

TINY = Path("fixtures/hf_tiny_source")
OWNER = "hf_owner"


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with hub_server() as server, server.clients(tmp_path / "home", token=OWNER):
        yield server


def files_of(directory: Path) -> dict[str, bytes]:
    return {p.relative_to(directory).as_posix(): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


@pytest.mark.parametrize(("name", "options"), [("org/new", ()), ("org/verified", ("--verify", "--manifest"))])
def test_a_model_that_was_pushed_loads(hub: Hub, tmp_path: Path, name: str, options: tuple[str, ...]) -> None:
    from transformers import AutoModelForCausalLM

    here = ckpttool("reshard", TINY, tmp_path / "here", "--tp-out", "1", *options)
    assert here.code == 0, here.err
    there = ckpttool("reshard", TINY, f"hf://{name}", "--tp-out", "1", *options)
    assert there.code == 0, there.err
    assert "made a private repository" in there.out + there.err
    files = hub.repos[name].files()
    del files[".gitattributes"]
    assert files == files_of(tmp_path / "here")
    assert hub.repos[name].readers == {"owner"}
    assert len(hub.repos[name].commits) == 2
    assert AutoModelForCausalLM.from_pretrained(name).config.model_type == "llama"
    fs = HfFileSystem()
    config = json.loads(fs.cat_file(f"{name}/config.json"))
    assert config["model_type"] == "llama"
    with fs.open(f"{name}/model.safetensors") as f:  # as a streaming reader opens it
        assert f.read() == files["model.safetensors"]
    assert files_of(Path(snapshot_download(name))).keys() >= files.keys()
