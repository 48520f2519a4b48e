"""Files in subdirectories of SRC: what belongs to the model goes with it, everything else is left and said."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ckpttool.execute import engine
from ckpttool.storage.below import MOST, files_below
from tests.helpers.command import Done, ckpttool
from tests.helpers.families import MODELS
from tests.helpers.tensorfile import Raw, save_hf, write
from tests.hostile.court import SECRET

QWEN = MODELS["qwen3"]
SMALL = {
    "1_Pooling/config.json": b'{"pooling_mode_mean_tokens": true}',
    "additional_chat_templates/rag.jinja": b"{{ documents }}",
    "assets/deep/er/figure.png": b"\x89PNG\r\n\x1a\n" + bytes(999),
    "original/params.json": b'{"dim": 48}',
    "original/tokenizer.model": b"\x0a\x04of bytes",
}
COMMANDS: dict[str, tuple[str, ...]] = {
    "reshard": ("reshard", "{src}", "{dst}", "--tp-out", "2", "--verify"),
    "paddle": ("reshard", "{src}", "{dst}", "--to", "unified", "--verify"),
    "flex": ("reshard", "{src}", "{dst}", "--to", "flex", "--tp-out", "2", "--verify"),
    "merge": ("merge", "{src}", "-o", "{dst}", "--verify"),
    "quantize": ("quantize", "{src}", "{dst}", "--verify"),
    "drop-keys": ("drop-keys", "{src}", "{dst}", "lm_head.weight", "--verify"),
    "drop-keys, linked": ("drop-keys", "{src}", "{dst}", "lm_head.weight", "--link"),
    "reshard, cut": ("reshard", "{src}", "{dst}", "--remove-keys", "lm_head.weight", "--tp-out", "2"),
}


@pytest.fixture
def src(tmp_path: Path) -> Path:
    # No exponent of all ones: quantize refuses what is not finite.
    tensors = {n: Raw(t.dtype, t.bits & 0x3FFF) for n, t in QWEN.tensors().items()}
    save_hf(tmp_path / "src", tensors, QWEN.config)
    for name, data in SMALL.items():
        put(tmp_path / "src" / name, data)
    return tmp_path / "src"


def put(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def below(root: Path) -> dict[str, bytes]:
    """What lies in subdirectories that do not belong to a format."""
    found = {p.relative_to(root).as_posix(): p.read_bytes() for p in root.rglob("*") if p.is_file()}
    return {n: d for n, d in found.items() if "/" in n and not n.endswith((".distcp", ".metadata"))}


def done(command: str, src: Path, dst: Path, *more: object) -> Done:
    words = [w.format(src=src, dst=dst) for w in COMMANDS[command]]
    ended = ckpttool(*words, *more)
    assert ended.code == 0, ended.err
    return ended


@pytest.mark.sample("paddle", "merge", "quantize", "drop-keys", "drop-keys, linked", "reshard, cut")
@pytest.mark.parametrize("command", COMMANDS)
def test_what_belongs_to_the_model_goes_with_it(src: Path, tmp_path: Path, command: str) -> None:
    ended = done(command, src, tmp_path / "dst")
    assert below(tmp_path / "dst") == SMALL
    assert "subdirectories" not in ended.err


def test_once_more(src: Path, tmp_path: Path) -> None:
    """What was carried is carried from there, too, and a DST that is replaced keeps nothing of the old one."""
    put(tmp_path / "again/old/file.txt", b"old")
    done("reshard", src, tmp_path / "dst")
    done("flex", tmp_path / "dst", tmp_path / "flex")
    done("reshard", tmp_path / "flex", tmp_path / "again", "--to", "hf", "--tp-out", "1", "--force", "--manifest")
    assert below(tmp_path / "again") == SMALL
    assert '"1_Pooling/config.json": 34' in (tmp_path / "again/ckpttool.manifest.json").read_text()


@pytest.mark.parametrize("command", ["reshard", "drop-keys", "quantize"])
def test_what_is_left_is_said(src: Path, tmp_path: Path, command: str) -> None:
    tensors = QWEN.tensors()
    write(src / "original/consolidated.safetensors", tensors)
    save_hf(src / "checkpoint-100", tensors, QWEN.config)
    save_hf(src / "2_Dense", {"linear.weight": tensors["model.norm.weight"]}, {"in_features": 48})
    put(src / "global_step100/mp_rank_00_model_states.pt", b"\x80\x02}q\x00.")
    put(src / "onnx/model.onnx", bytes(100))
    put(src / "onnx/quantize_config.json", b"{}")
    put(src / "odd/state.dat", b"\x80\x04}q\x00.")
    put(src / ".git/HEAD", b"ref")
    put(src / "dst.partial/README.md", b"half")
    put(src / "assets/film.mp4", b"")
    os.truncate(src / "assets/film.mp4", (64 << 20) + 1)
    ended = done(command, src, tmp_path / "dst")
    assert below(tmp_path / "dst") == {**SMALL, "onnx/quantize_config.json": b"{}"}
    (note,) = [line for line in ended.err.splitlines() if "subdirectories" in line]
    for said in (
        ".git/ (hidden)",
        "2_Dense/ (a checkpoint of its own, ",
        "assets/film.mp4 (large, 67,108,865 bytes)",
        "checkpoint-100/ (of a training run)",
        "dst.partial/ (not the model's by its name)",
        "global_step100/ (of a training run)",
        "odd/state.dat (weights, 6 bytes)",
        "onnx/model.onnx (weights, 100 bytes)",
        "and 1 more",
    ):
        assert said in note


def test_links(src: Path, tmp_path: Path) -> None:
    """Nothing from outside, no cycles; links within the checkpoint are what they lead to."""
    secret = put(tmp_path / "stranger/id_rsa", SECRET.encode())
    write(tmp_path / "stranger/w.dat", QWEN.tensors())
    for name, target in {
        "1_Pooling/key.txt": secret,
        "1_Pooling/blob.txt": tmp_path / "stranger/w.dat",
        "assets/up": Path(".."),
        "assets/round.txt": Path("round.txt"),
        "stranger": tmp_path / "stranger",
    }.items():
        (src / name).symlink_to(target)
    (src / "assets/params.json").symlink_to("../original/params.json")
    os.mkfifo(src / "assets/pipe")
    ended = done("reshard", src, tmp_path / "dst")
    assert below(tmp_path / "dst") == {**SMALL, "assets/params.json": SMALL["original/params.json"]}
    assert not any(p.is_symlink() for p in (tmp_path / "dst").rglob("*"))
    for said in ("1_Pooling/key.txt (a link out", "1_Pooling/blob.txt (a link out", "assets/up/ (a link)"):
        assert said in ended.err
    assert "stranger/ (a link)" in ended.err


def test_a_view_and_a_cache(src: Path, tmp_path: Path) -> None:
    """A copy made of links, and a snapshot in the Hugging Face hub's cache: directories with links to files."""
    view = tmp_path / "view"
    snapshot, blobs = tmp_path / "models--x/snapshots/1f", tmp_path / "models--x/blobs"
    blobs.mkdir(parents=True)
    for i, path in enumerate(p for p in src.rglob("*") if p.is_file()):
        for at in (view, snapshot):
            (at / path.relative_to(src)).parent.mkdir(parents=True, exist_ok=True)
        (view / path.relative_to(src)).symlink_to(path)
        (blobs / str(i)).write_bytes(path.read_bytes())
        link = snapshot / path.relative_to(src)
        link.symlink_to(os.path.relpath(blobs / str(i), link.parent))
    for at in (view, snapshot):
        done("reshard", at, tmp_path / f"{at.name}-out")
        assert below(tmp_path / f"{at.name}-out") == SMALL


def test_limits(src: Path) -> None:
    for i in range(MOST + 1):
        put(src / f"many/{i}.txt", b"")
    put(src / "a/b/c/d/e.txt", b"")
    put(src / "a/b/c/d/e/f.txt", b"")
    found = files_below(src, [src / "model.safetensors"])
    assert "a/b/c/d/e.txt" in found.carried
    assert list(map(str, found.left)) == [
        "a/b/c/d/e/ (more than 4 directories deep)",
        "many/ (more than 1,000 files)",
    ]


def test_a_directory_in_the_way_of_an_output(src: Path, tmp_path: Path) -> None:
    put(src / "model.safetensors.index.json/x.txt", b"")
    put(src / "out/x.txt", b"")
    ended = done("reshard", src, tmp_path / "dst", "--to", "ranks")
    assert "model.safetensors.index.json/ (not the model's by its name)" in ended.err
    assert (tmp_path / "dst/out/x.txt").exists()


def test_one_file_of_a_directory_brings_nothing(src: Path, tmp_path: Path) -> None:
    assert ckpttool("reshard", src / "model.safetensors", tmp_path / "dst", "--to", "hf").code == 0
    assert below(tmp_path / "dst") == {}


@pytest.mark.parametrize("command", ["reshard", "drop-keys, linked"])
def test_interrupted_and_resumed(src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    words = [w.format(src=src, dst=tmp_path / "dst") for w in COMMANDS[command]]
    with monkeypatch.context() as patch:
        patch.setattr(engine.Run, "_finish", interrupt)
        assert ckpttool(*words).code == 130
    partial = tmp_path / "dst.partial"
    (partial / "1_Pooling/config.json").unlink()
    (partial / "original/params.json").write_bytes(b"")
    done(command, src, tmp_path / "dst", "--resume")
    assert below(tmp_path / "dst") == SMALL


def test_a_file_that_changes_meanwhile(src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go = engine.Run.go

    def changed(run: engine.Run) -> object:
        put(src / "1_Pooling/config.json", b"another")
        return go(run)

    monkeypatch.setattr(engine.Run, "go", changed)
    ended = ckpttool("reshard", src, tmp_path / "dst", "--tp-out", 2)
    assert (ended.code, "a source has changed since it was planned" in ended.err) == (1, True)
    assert not (tmp_path / "dst").exists()
