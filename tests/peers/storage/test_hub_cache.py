"""The cache that huggingface_hub itself fills is read without a request, and the tests' own is filled like it."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import hf_hub_download, snapshot_download

from tests.helpers.command import reshard
from tests.helpers.hub_cache import fill
from tests.helpers.hub_server import hub_server

TINY = Path("fixtures/hf_tiny_source")


def held(root: Path) -> dict[str, str | bytes]:
    """Files and links below a repository's directory."""
    return {
        p.relative_to(root).as_posix(): str(p.readlink()) if p.is_symlink() else p.read_bytes()
        for p in root.rglob("*")
        if p.is_symlink() or p.is_file()
    }


@pytest.mark.parametrize("patterns", [(), ("*.json",)])
def test_the_cache_of_the_tests_is_like_the_real_one(patterns: tuple[str, ...], tmp_path: Path) -> None:
    with hub_server() as hub, hub.clients(tmp_path / "real"):
        hub.add("org/model", {f"{d}{n}": TINY / n for d in ("", "sub/") for n in ("config.json", "model.safetensors")})
        snapshot_download("org/model", allow_patterns=list(patterns) or None)
        fill(hub, tmp_path / "ours", "org/model", *patterns)
    name = "hub/models--org--model"
    assert held(tmp_path / "ours" / name) == held(tmp_path / "real" / name)


@pytest.mark.parametrize("by_file", [False, True])
def test_a_model_that_huggingface_hub_has_fetched(by_file: bool, tmp_path: Path) -> None:
    """Whole, nobody is asked; file by file, nobody knows whether there are more, so the list is."""
    with hub_server([("org/tiny", TINY)]) as hub, hub.clients(tmp_path / "home"):
        if by_file:
            for name in ("config.json", "model.safetensors"):
                hf_hub_download("org/tiny", name)
        else:
            snapshot_download("org/tiny")
        hub.asked.clear()
        reshard("hf://org/tiny", tmp_path / "dst", "--verify")
        assert [a.path.split("/")[5] for a in hub.asked] == (["revision"] if by_file else [])
