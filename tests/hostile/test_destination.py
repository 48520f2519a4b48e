"""A DST, a DST.partial and a journal that somebody has prepared: what they lead to is neither changed nor removed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.command import ckpttool
from tests.helpers.families import MODELS
from tests.helpers.tensorfile import assert_same, read_all, save_hf
from tests.hostile.court import SAMPLE, Court

pytestmark = SAMPLE

LLAMA = MODELS["llama"]
OPTIONS: tuple[tuple[str, ...], ...] = ((), ("--force",), ("--resume",), ("--force", "--resume"))


def partial(court: Court) -> Path:
    found = court.room / "dst.partial"
    found.mkdir()
    return found


def journal_link(court: Court) -> None:
    (partial(court) / ".journal").symlink_to(court.stranger / "id_rsa")


def journal_new(court: Court) -> None:
    (partial(court) / ".journal").symlink_to(court.stranger / "new")


def journal_hard(court: Court) -> None:
    os.link(court.stranger / "id_rsa", partial(court) / ".journal")


def journal_pipe(court: Court) -> None:
    os.mkfifo(partial(court) / ".journal")


def journal_directory(court: Court) -> None:
    (partial(court) / ".journal").mkdir()


def output_link(court: Court) -> None:
    (partial(court) / "model.safetensors").symlink_to(court.stranger / "model.safetensors")


def output_hard(court: Court) -> None:
    os.link(court.stranger / "model.safetensors", partial(court) / "model.safetensors")


def output_pipe(court: Court) -> None:
    os.mkfifo(partial(court) / "model.safetensors")


def output_directory(court: Court) -> None:
    (partial(court) / "model.safetensors").mkdir()


PREPARED: dict[str, Callable[[Court], object]] = {
    "partial is a link": lambda c: (c.room / "dst.partial").symlink_to(c.stranger),
    "partial is a link to nothing": lambda c: (c.room / "dst.partial").symlink_to(c.stranger / "new"),
    "partial is a link to a file": lambda c: (c.room / "dst.partial").symlink_to(c.stranger / "id_rsa"),
    "partial is a link to SRC": lambda c: (c.room / "dst.partial").symlink_to(c.src),
    "partial is a file": lambda c: (c.room / "dst.partial").write_text("x"),
    "partial is a pipe": lambda c: os.mkfifo(c.room / "dst.partial"),
    "journal is a link": journal_link,
    "journal is a link to nothing": journal_new,
    "journal is a second name": journal_hard,
    "journal is a pipe": journal_pipe,
    "journal is a directory": journal_directory,
    "output is a link": output_link,
    "output is a second name": output_hard,
    "output is a pipe": output_pipe,
    "output is a directory": output_directory,
    "DST is a link": lambda c: c.dst.symlink_to(c.stranger),
    "DST is a link to SRC": lambda c: c.dst.symlink_to(c.src),
    "DST is a link to nothing": lambda c: c.dst.symlink_to(c.stranger / "new"),
    "DST is a link to itself": lambda c: c.dst.symlink_to("dst"),
    "DST is a pipe": lambda c: os.mkfifo(c.dst),
}


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: " ".join(o) or "plain")
@pytest.mark.parametrize("case", PREPARED)
def test_prepared(tmp_path: Path, case: str, options: tuple[str, ...]) -> None:
    court = Court(tmp_path)
    save_hf(court.src, LLAMA.tensors(), LLAMA.config)
    PREPARED[case](court)
    before = {p.name: p.read_bytes() for folder in (court.src, court.stranger) for p in folder.iterdir()}
    done = ckpttool("reshard", court.src, court.dst, "--to", "hf", *options)
    assert done.code in (0, 1), done.err
    assert before == {p.name: p.read_bytes() for folder in (court.src, court.stranger) for p in folder.iterdir()}
    if done.code == 0:
        assert not court.dst.is_symlink()
        assert_same(read_all(court.dst), LLAMA.tensors())
    else:
        assert done.err.count("error: ") == 1
        assert "Traceback" not in done.err


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: " ".join(o) or "plain")
def test_the_partial_directory_of_somebody_else(tmp_path: Path, options: tuple[str, ...]) -> None:
    """In /tmp, its owner could exchange files for links while they are written."""
    court = Court(tmp_path)
    save_hf(court.src, LLAMA.tensors(), LLAMA.config)
    os.chown(partial(court), 12345, 12345)
    tmp_path.chmod(0o1777)
    done = ckpttool("reshard", court.src, court.dst, "--to", "hf", *options)
    assert done.code == 1
    assert "belongs to another user" in done.err


JOURNALS = {
    "noise": b"\xff\xfe\x00" * 100,
    "brackets": b"[" * 100_000 + b"\n",
    "objects": b'{"a":' * 100_000 + b"\n",
    "digits": b'{"journal":' + b"1" * 10_000 + b"}\n",
    "no plan": b'{"journal":1}\n',
    "a number for a plan": b'{"journal":2,"plan":5}\n',
    "a plan that steers": b'{"journal":2,"plan":"\\u001b[2J","parts":3}\n',
    "newlines": b"\n" * 100_000,
    "a long line": b"x" * 10_000_000,
}


@pytest.mark.parametrize("case", JOURNALS)
def test_journals(tmp_path: Path, case: str) -> None:
    court = Court(tmp_path)
    save_hf(court.src, LLAMA.tensors(), LLAMA.config)
    (partial(court) / ".journal").write_bytes(JOURNALS[case])
    done = court.run("reshard", court.src, court.dst, "--to", "hf", "--resume")
    assert done.code in (0, 1)


ENTRIES = [
    b'{"done":[["a",2]]}',
    b'{"done":[[0,1e9]]}',
    b'{"done":[[0,1000000000000]]}',
    b'{"done":[[-5,1]]}',
    b'{"done":[[0.5,1]]}',
    b'{"done":[[true,1]]}',
    b'{"done":5}',
    b'{"done":[],"sums":[1]}',
    b'{"done":[],"sums":{"0.0":{"a":1}}}',
    b"[" * 100_000,
]


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda e: e.decode()[:20])
def test_journals_of_the_right_plan(tmp_path: Path, entry: bytes) -> None:
    """Lines that no run writes end what is believed of a journal; the rest is done again."""
    from ckpttool.execute.journal import Journal, sealed

    path = tmp_path / "journal"
    lines = [sealed(text) for text in ('{"done":[[0,1]]}', entry.decode(), '{"done":[[2,3]]}')]
    path.write_text("\n".join(['{"journal": 2, "plan": "x", "parts": 3}', *lines, ""]))
    fd = os.open(path, os.O_RDWR)
    try:
        found = Journal(fd, str(path)).load("x", 3)
    finally:
        os.close(fd)
    assert found.parts <= {0, 2}
    assert all(isinstance(v, str) for v in found.sums.values())


@pytest.mark.parametrize("command", ["--write-index", "--set-header"])
def test_files_that_are_replaced(tmp_path: Path, command: str) -> None:
    """inspect writes into SRC, or over a file: not through a link that leads out, not over a device."""
    court = Court(tmp_path)
    save_hf(court.src, LLAMA.tensors())
    if command == "--write-index":
        (court.src / "model.safetensors").rename(court.src / "model-00001-of-00001.safetensors")
        (court.src / "model.safetensors.index.json").symlink_to(court.stranger / "secret.json")
        done = court.run("inspect", court.src, command)
        assert done.code == 1
        assert "link" in done.err
    else:
        pipe = tmp_path / "pipe"
        os.mkfifo(pipe)
        header = tmp_path / "header.json"
        header.write_text(ckpttool("inspect", court.src / "model.safetensors", "--header").out)
        done = court.run("inspect", court.src / "model.safetensors", command, header, "-o", pipe)
        assert done.code != 0, done


def test_names_of_outputs_stay_inside() -> None:
    """Whoever makes a plan: no file of it lies outside DST."""
    from ckpttool.core.plan import Output
    from ckpttool.errors import ConflictError

    for name in ("../x", "/x", "a/../../x", "", ".", "a//b", "a\0b", ".."):
        with pytest.raises(ConflictError, match="not a name of a file"):
            Output(name, 0)
    assert Output("tp0/model.safetensors", 0).name == "tp0/model.safetensors"


@pytest.mark.parametrize(
    "name", ["x" * 250, "x" * 300, "-rf", "a\nb\x1b[2J", "\udcff", "~", "a b", "weights.safetensors"]
)
def test_names_of_dst(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    court = Court(tmp_path)
    save_hf(court.src, LLAMA.tensors(), LLAMA.config)
    court.dst.mkdir()
    monkeypatch.chdir(court.dst)  # what is made there is no offence
    done = court.run("reshard", court.src, "--to", "hf", "--", name)
    assert (done.code == 0) == (len(name) <= 255), done.err
