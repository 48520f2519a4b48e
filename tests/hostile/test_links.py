"""Links, pipes and devices in a source: nothing of another place comes into DST, and nothing waits for ever."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from tests.helpers.command import ckpttool
from tests.helpers.families import MODELS
from tests.helpers.tensorfile import save_hf
from tests.hostile.court import COMMANDS, EVERYTHING, SAMPLE, SECRET, Court, safetensors, tensor

pytestmark = SAMPLE

LLAMA = MODELS["llama"]
SOME = ("inspect", "check", "reshard", "drop", "cast", "size")
WEIGHTS = safetensors({"a": tensor()}, b"abcd")

CARRIED = (
    *("tokenizer.json", "tokenizer_config.json", "README.md", "generation_config.json", "chat_template.jinja"),
    *(
        "training_args.bin",
        "scheduler.pt",
        "rng_state_0.pth",
        "LICENSE",
        "vocab.json",
        "modeling_x.py",
        "trainer_state.json",
    ),
)


@pytest.mark.parametrize("name", CARRIED)
def test_a_link_out_is_not_carried(tmp_path: Path, name: str) -> None:
    """An archive or a repository may hold ``tokenizer.json -> ~/.ssh/id_rsa``; DST is published."""
    court = Court(tmp_path)
    save_hf(court.src, LLAMA.tensors(), LLAMA.config)
    for target in (court.stranger / "id_rsa", Path("../stranger/id_rsa")):
        (court.src / name).symlink_to(target)
        for _, done in court.try_all(COMMANDS if EVERYTHING else ("reshard",)):
            assert SECRET not in done.err
        done = ckpttool("reshard", court.src, court.dst, "--to", "hf", "-f")
        assert f"{name} is left out: it is a link out of the checkpoint" in done.err
        assert not (court.dst / name).exists()
        (court.src / name).unlink()


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_a_link_out_is_not_read(tmp_path: Path, name: str) -> None:
    court = Court(tmp_path)
    save_hf(court.src, LLAMA.tensors())
    (court.src / name).symlink_to(court.stranger / "secret.json")
    for command, done in court.try_all(COMMANDS if EVERYTHING else SOME):
        if command in ("reshard", "drop") and name == "config.json":
            assert f"{name} is a link to a file outside of the checkpoint" in done.err


@pytest.mark.parametrize("name", ["tokenizer.json", "README.md"])
def test_a_merge_reads_no_links_out(tmp_path: Path, name: str) -> None:
    court = Court(tmp_path)
    save_hf(court.src, LLAMA.tensors(), LLAMA.config)
    (court.src / name).symlink_to(court.stranger / "id_rsa")
    other = tmp_path / "other"
    save_hf(other, LLAMA.tensors(), LLAMA.config)
    done = court.run("merge", court.src, other, "-o", court.dst, "--card", "--allow-nonfinite")
    assert done.code == 0, done.err
    recipe = tmp_path / "dst-recipe.yaml"
    recipe.write_text(f"models: [{{model: {court.src}}}]\nmerge_method: linear\ntokenizer_source: union\n")
    court.run("merge", recipe, "-o", court.dst)


def test_links_to_where_the_weights_are(tmp_path: Path) -> None:
    """A cache of the Hugging Face hub, and a second view of a checkpoint: links that lead out and belong to it."""
    court = Court(tmp_path)
    blobs = tmp_path / "blobs"
    save_hf(blobs, LLAMA.tensors(), LLAMA.config)
    (blobs / "tokenizer.json").write_text('{"blob": true}')
    for path in blobs.iterdir():
        (court.src / path.name).symlink_to(os.path.relpath(path, court.src))
    (court.src / "extra.txt").symlink_to(court.stranger / "id_rsa")
    assert ckpttool("reshard", court.src, court.dst, "--tp-out", 2, "-q").code == 0
    assert json.loads((court.dst / "tokenizer.json").read_text()) == {"blob": True}
    assert not (court.dst / "extra.txt").exists()
    assert not any(p.is_symlink() for p in court.dst.iterdir())


def test_a_hub_cache_without_safetensors(tmp_path: Path) -> None:
    """A config alone, and a Paddle program: nothing there says that the blobs are weights, but where they lie does."""
    court = Court(tmp_path)
    blobs, snapshot = tmp_path / "models--x/blobs", tmp_path / "models--x/snapshots/1f"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    program = Path("fixtures/paddle_programs/pir").resolve()
    for i, path in enumerate([program / "model.json", program / "model.pdiparams"]):
        (blobs / str(i)).write_bytes(path.read_bytes())
        (snapshot / path.name).symlink_to(f"../../blobs/{i}")
    assert court.run("inspect", snapshot).code == 0
    (blobs / "c").write_text(json.dumps(LLAMA.config))
    (snapshot / "config.json").symlink_to("../../blobs/c")
    for path in (snapshot / "model.json", snapshot / "model.pdiparams"):
        path.unlink()
    assert court.run("size", snapshot).code == 0

    (blobs / "c").unlink()
    blobs.rename(tmp_path / "elsewhere")
    blobs.symlink_to(court.stranger)
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to("../../blobs/id_rsa")
    done = court.run("size", snapshot)
    assert (done.code, "no checkpoint format is recognised here" in done.err) == (1, True)


def test_a_decoy_opens_no_directory(tmp_path: Path) -> None:
    """Only where the safetensors that a link leads to really are such, other links to that directory are followed."""
    court = Court(tmp_path)
    (court.src / "model.safetensors").write_bytes(WEIGHTS)
    (court.src / "decoy.safetensors").symlink_to(court.stranger / "model.safetensors")
    (court.src / "notes.txt").symlink_to(court.stranger / "id_rsa")
    for _ in court.try_all(COMMANDS if EVERYTHING else ("reshard",)):
        pass


def test_links_within(tmp_path: Path) -> None:
    court = Court(tmp_path)
    save_hf(court.src, LLAMA.tensors(), LLAMA.config)
    (court.src / "sub").mkdir()
    (court.src / "sub/real.txt").write_text("here")
    (court.src / "notes.txt").symlink_to("sub/real.txt")
    view = tmp_path / "view"
    view.symlink_to("src")  # SRC may be a link: whoever names it asks for it
    assert ckpttool("reshard", view, court.dst, "--to", "hf", "-q").code == 0
    assert (court.dst / "notes.txt").read_text() == "here"


ODD = {
    "a loop": "notes.txt",
    "dangling": "nowhere",
    "the directory above": "..",
    "itself": ".",
    "zeros without an end": "/dev/zero",
    "a terminal": "/dev/tty",
    "the environment": "/proc/self/environ",
    "memory": "/proc/self/mem",
    "stdin": "/dev/stdin",
}


@pytest.mark.parametrize("case", ODD)
@pytest.mark.parametrize("name", ["notes.txt", "x.safetensors", "config.json"])
def test_links_to_odd_places(tmp_path: Path, name: str, case: str) -> None:
    court = Court(tmp_path)
    (court.src / "model.safetensors").write_bytes(WEIGHTS)
    (court.src / name).symlink_to(name if case == "a loop" else ODD[case])
    for _ in court.try_all(COMMANDS if EVERYTHING else ("reshard",)):
        pass


KINDS = ("pipe", "socket", "directory", "empty", "unreadable")
PLACES = (
    *("model.safetensors", "config.json", "model.safetensors.index.json", "notes.txt", "tokenizer.json"),
    *("0.metadata", "0_0.distcp", "x.pdparams", "model_state.pdparams", "x.pdmodel", "x.pdiparams", "x.json"),
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", PLACES)
def test_what_is_no_file(tmp_path: Path, kind: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody writes into the pipe: whoever opened it would wait."""
    court = Court(tmp_path)
    (court.src / "model.safetensors").write_bytes(WEIGHTS)
    path = court.src / name
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        monkeypatch.chdir(court.src)  # names of sockets are short
        with socket.socket(socket.AF_UNIX) as s:
            s.bind(name)
    elif kind == "directory":
        path.mkdir()
    else:
        path.write_bytes(b"")
        path.chmod(0 if kind == "unreadable" else 0o644)
    for _ in court.try_all(COMMANDS if EVERYTHING else ("reshard", "check")):
        pass
    # A recipe may come through a pipe: `merge <(...)`.
    for _ in court.try_all([c for c in COMMANDS if c != "merge"] if EVERYTHING else ("inspect", "convert"), path):
        pass


@pytest.mark.parametrize(
    "target",
    [
        *("/dev/zero", "/dev/stdin", "/dev/full", "/proc/self/mem", "/proc/self/fd", "/etc/passwd", "/proc", "/dev"),
        *("nowhere", "x" * 300, "y/" * 3000, "~", "-", ".", "", "a\nb\x1b[2J"),
    ],
    ids=lambda t: t[:16].encode("unicode_escape").decode() or "empty",
)
def test_sources_that_are_none(tmp_path: Path, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    court = Court(tmp_path)
    monkeypatch.chdir(court.src)
    commands = COMMANDS if EVERYTHING else ("inspect", "reshard")
    for name in commands:
        first, _, *rest = COMMANDS[name](court.src, court.dst)
        done = court.run(first, *rest, "--", target) if target == "-" else court.run(first, target, *rest)
        # What can be read and has no pickle is no wrong answer to the question which pickles there are.
        assert done.code != 0 or (name == "imports" and ": 0 pickles" in done.out), (name, done.out)
