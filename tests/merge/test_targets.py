"""Whatever the models are stored as, and whatever the merge is written as, it holds the same numbers."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.helpers.command import ckpttool, reshard

if TYPE_CHECKING:
    from tests.helpers.command import Done

INPUTS = Path(__file__).parents[2] / "fixtures/merge/inputs"
A, B, BASE = (INPUTS / n for n in ("ft1", "ft2", "base"))


def merge(*arguments: object) -> Done:
    """``ckpttool merge``, which must succeed."""
    done = ckpttool("merge", *arguments)
    assert done.code == 0, done.err
    return done


def ties(a: Path, b: Path, base: Path, dst: Path, *options: object) -> Done:
    words = ("--method", "ties", "--weights", "0.6,0.4", "--param", "density=0.5", "--base", base)
    return merge(a, b, "-o", dst, *words, *options)


def digest(directory: Path) -> dict[str, str]:
    """Hashes of the files with tensors."""
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(directory.glob("*.safetensors"))}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The merge of Hugging Face models as one."""
    out = tmp_path_factory.mktemp("whole") / "merged"
    ties(A, B, BASE, out)
    return out


@pytest.mark.sample("vllm")
@pytest.mark.parametrize(
    "options",
    [
        ("--to", "ranks", "--tp-out", 2),
        ("--to", "ranks", "--tp-out", 4, "--pp-out", 3),
        ("--to", "vllm", "--tp-out", 2),
    ],
    ids=["tp2", "tp4pp3", "vllm"],
)
def test_sources_in_any_format(tmp_path: Path, whole: Path, options: tuple[object, ...]) -> None:
    """One model whole, one cut, the base cut in yet another way."""
    reshard(B, tmp_path / "b", *options)
    reshard(BASE, tmp_path / "base", "--to", "ranks", "--tp-out", 2, "--pp-out", 3)
    ties(A, tmp_path / "b", tmp_path / "base", tmp_path / "out")
    assert digest(tmp_path / "out") == digest(whole)


@pytest.mark.sample("--tp-out4--pp-out3--toranks", "--manifest")
@pytest.mark.parametrize(
    "options",
    [
        ("--tp-out", 2),
        ("--tp-out", 4, "--pp-out", 3, "--to", "ranks"),
        ("--tp-out", 2, "--to", "vllm"),
        ("--to", "ranks", "--tp-out", 2, "--fuse"),
        ("--max-shard-size", "100KB"),
        ("--dtype", "f32"),
        ("--rename", "model.*=core.*"),
        ("--memory", "4MiB", "--workers", 1),
        ("--manifest",),
    ],
    ids=lambda o: "".join(map(str, o)),
)
def test_targets_of_reshard(tmp_path: Path, whole: Path, options: tuple[object, ...]) -> None:
    """What reshard makes of the merged model is what merge writes at once, file for file."""
    ties(A, B, BASE, tmp_path / "at_once", *options, "--verify")
    if options[0] == "--dtype":  # rounding twice is not rounding once
        source = tmp_path / "full"
        ties(A, B, BASE, source, "--dtype", "f32")
    else:
        source = whole
    reshard(source, tmp_path / "later", *options)
    assert digest(tmp_path / "at_once") == digest(tmp_path / "later")


def test_removed_keys_are_gone_and_counted(tmp_path: Path) -> None:
    done = ties(A, B, BASE, tmp_path / "out", "--remove-keys", "*.layers.2.*", "--max-shard-size", "100KB", "--json")
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert not [n for n in index["weight_map"] if ".layers.2." in n]
    headers = 0
    for path in (tmp_path / "out").glob("*.safetensors"):
        data = path.read_bytes()
        n = int.from_bytes(data[:8], "little")
        headers += len(data) - 8 - n
    assert index["metadata"]["total_size"] == headers
    target = json.loads(done.out)["target"]
    assert target["removed_tensors"] == 9
    assert target["removed_bytes"] > 0


def test_one_source_becomes_one_checkpoint(tmp_path: Path) -> None:
    reshard(A, tmp_path / "cut", "--to", "ranks", "--tp-out", 2, "--pp-out", 3)
    merge(tmp_path / "cut", "-o", tmp_path / "out", "--verify")
    assert [p.name for p in (tmp_path / "out").glob("*.safetensors")] == ["model.safetensors"]
    done = ckpttool("inspect", tmp_path / "out", "--diff", A, "--values")
    assert done.code == 0, done.out


def test_the_record_names_sources_by_their_payload(tmp_path: Path, whole: Path) -> None:
    """The hash of a source is that of its tensors, however they are stored."""
    first = json.loads((whole / "ckpttool.merge.json").read_text())
    reshard(A, tmp_path / "cut", "--to", "ranks", "--tp-out", 2)
    ties(tmp_path / "cut", B, BASE, tmp_path / "out")
    second = json.loads((tmp_path / "out/ckpttool.merge.json").read_text())
    assert [s["hash"] for s in first["sources"]] == [s["hash"] for s in second["sources"]]
    assert len({s["hash"] for s in first["sources"]}) == 3
    assert {s["tensors_hashed"] for s in first["sources"]} == {30}
    assert first["recipe"]["merge_method"] == "ties"


def test_plan_of_a_merge(tmp_path: Path) -> None:
    done = ties(A, B, BASE, tmp_path / "out", "--dry-run", "--json", "--tp-out", 2)
    plan = json.loads(done.out)
    assert plan["method"] == "ties"
    assert plan["merged_tensors"] == 30
    assert len(plan["sources"]) == 3
    assert not (tmp_path / "out").exists()
