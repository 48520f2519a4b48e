"""What huggingface_hub 2 leaves in its cache when it has fetched files; it leaves threads behind, too, and this does
not. tests/peers/storage/test_hub_cache.py compares both."""

from __future__ import annotations

import json
import os
from fnmatch import fnmatch
from pathlib import Path

from tests.helpers.hub_server import Hub


def fill(hub: Hub, home: Path, repo: str, *patterns: str, revision: str = "main") -> Path:
    """Put the files of a revision whose names match into the cache, without a request. Returns the snapshot."""
    commit = hub.repos[repo].find(revision)
    assert commit
    root = home / "hub" / f"models--{repo.replace('/', '--')}"
    files = hub.repos[repo].commits[commit]
    listed = {}
    for name, blob in files.items():
        listed[name] = {"size": blob.size, "blob_id": blob.oid}
        if blob.lfs:
            listed[name] |= {"lfs_sha256": blob.sha256, "lfs_size": blob.size}
        if not any(fnmatch(name, p) for p in patterns or ["*"]):
            continue
        stored = _made(root / "blobs" / (blob.sha256 if blob.lfs else blob.oid))
        stored.write_bytes(blob.bytes())
        link = _made(root / "snapshots" / commit / name)
        link.symlink_to(os.path.relpath(stored, link.parent))
    tree = {"format_version": 1, "files": dict(sorted(listed.items()))}
    _made(root / "trees" / f"{commit}.json").write_text(json.dumps(tree, indent=1))
    if revision != commit:
        _made(root / "refs" / revision).write_text(commit)
    return root / "snapshots" / commit


def _made(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path
