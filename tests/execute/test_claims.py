"""Claims on a directory: one holder at a time, and nobody asks a clock but the own one."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from ckpttool.errors import OutputError
from ckpttool.execute.destinations import claims, holder
from ckpttool.execute.destinations.claims import Claim, Claims, ClaimWatch, Folder, TakenOverError
from ckpttool.execute.destinations.holder import Holder


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    yield Folder(fd, str(tmp_path))
    os.close(fd)


@dataclass
class Clock:
    """What ``time`` is to a watcher."""

    now: float = 0.0
    while_it_sleeps: Callable[[], None] = lambda: None

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.while_it_sleeps()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(claims, "time", made)
    return made


def give_up(watch: ClaimWatch) -> bool:
    raise OutputError(f"held by {watch.holder}")


def wait(_watch: ClaimWatch) -> bool:
    return False


def taken(folder: Folder, name: str = "x", over: Callable[[ClaimWatch], bool] = give_up) -> Claim:
    claim = Claims(folder, "plan").take(name, over)
    assert claim is not None
    return claim


def elsewhere(folder: Folder, name: str, number: int, count: int = 0) -> None:
    """A claim of a process on another machine."""
    said = {"token": "t", "host": "node7", "pid": 4711, "machine": "another boot", "plan": "plan"}
    Path(folder.where, f".claim-{name}-{number}").write_text(f"{json.dumps(said)}\n{count:016d}")


def files(folder: Folder) -> list[str]:
    return sorted(folder.names())


def test_one_holder_at_a_time(folder: Folder) -> None:
    first = taken(folder)
    assert files(folder) == [".claim-x-1"]
    with pytest.raises(OutputError, match=rf"held by process {os.getpid()} on "):
        taken(folder)
    taken(folder, "x-1").release()  # another name
    first.check()
    first.release()
    second = taken(folder)
    assert files(folder) == [".claim-x-1-1", ".claim-x-2"]
    second.check()
    with pytest.raises(TakenOverError, match="has taken over"):
        first.check()
    assert [str(f.holder) for f in Claims(folder, "").all()] == [str(second.me)]
    second.release()
    assert not Claims(folder, "").all()


def test_many_who_want_it_at_once(folder: Folder) -> None:
    won: list[Claim] = []

    def want() -> None:
        if claim := Claims(folder, "plan").take("x", lambda _: True):
            won.append(claim)

    for _ in range(10):
        threads = [threading.Thread(target=want) for _ in range(6)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        (claim,) = won
        claim.release()
        won.clear()
    assert files(folder) == [".claim-x-10"]


def test_a_holder_on_another_machine_that_says_nothing_any_more(folder: Folder, clock: Clock) -> None:
    elsewhere(folder, "x", 3)
    began = clock.now
    claim = taken(folder, over=wait)
    assert claims.SILENT <= clock.now - began <= claims.SILENT + 2
    assert files(folder) == [".claim-x-4"]
    claim.check()


def test_a_holder_that_speaks_seldom_is_left_alone(folder: Folder, clock: Clock) -> None:
    """It counts just before its time is over, ten times."""
    elsewhere(folder, "x", 1)
    spoke = [0.0]

    def speak() -> None:
        if clock.now - spoke[-1] > claims.SILENT - 2 and len(spoke) < 10:
            elsewhere(folder, "x", 1, len(spoke))
            spoke.append(clock.now)

    clock.while_it_sleeps = speak
    seen = []

    def over(watch: ClaimWatch) -> bool:
        seen.append(watch.beats)
        return False

    taken(folder, over=over)
    assert clock.now >= spoke[-1] + claims.SILENT
    assert len(spoke) == 10
    assert not seen[0]
    assert any(seen)


def test_a_watcher_that_stood_still_gives_the_holder_time(folder: Folder, clock: Clock) -> None:
    elsewhere(folder, "x", 1)
    watch = ClaimWatch(Claims(folder, "plan"), "x")
    assert not watch.look()
    clock.now += 10_000
    assert not watch.look()
    assert watch.silent <= 2 * claims.LOOK


def test_clocks_of_others_do_not_matter(folder: Folder, clock: Clock) -> None:
    """Times of files are those of some clock."""
    elsewhere(folder, "x", 1)
    for when in (0, 2**33):
        os.utime(Path(folder.where, ".claim-x-1"), (when, when))
        with pytest.raises(OutputError, match="held by process 4711 on node7"):
            taken(folder)
    assert clock.now == 0


def test_a_process_that_is_gone_from_this_machine(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    pid = os.fork()
    if not pid:
        try:
            taken(folder)
        finally:
            os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    with pytest.raises(OutputError, match=f"held by process {pid} "):
        taken(folder)  # it cannot be told from one that lives until somebody has waited for it
    os.waitpid(pid, 0)
    with monkeypatch.context() as m:
        m.setattr(holder, "machine", lambda: "another boot")
        with pytest.raises(OutputError, match=f"held by process {pid} "):
            taken(folder)
    taken(folder)
    assert files(folder) == [".claim-x-2"]


def test_a_claim_beats_until_it_ends(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "BEAT", 0.002)
    claim = taken(folder)
    watch = ClaimWatch(Claims(folder, "plan"), "x")
    claim.beat()
    deadline = time.monotonic() + 30
    while not watch.beats and time.monotonic() < deadline:
        assert not watch.look()
        time.sleep(0.002)
    assert watch.beats
    claim.release()
    assert watch.look()


def test_who_was_stopped_and_comes_back(folder: Folder, clock: Clock) -> None:
    claim = taken(folder)
    claim.check_lately()
    holder.HERE.discard(claim.me.token)  # to others it is gone
    other = taken(folder)
    claim.check_lately()  # it has looked just now
    clock.now += claims.SILENT
    with pytest.raises(TakenOverError, match=r"was silent for 60 s or more, and process \d+ on .* has taken over"):
        claim.check_lately()
    claim.release()  # which leaves that of the other alone
    other.check()


def test_a_higher_number_counts_although_the_lower_one_is_there(folder: Folder) -> None:
    claim = taken(folder)
    elsewhere(folder, "x", 2)
    with pytest.raises(TakenOverError):
        claim.check()


def test_where_there_are_no_links(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refuse)
    claim = taken(folder)
    with pytest.raises(OutputError, match="held by"):
        taken(folder)
    claim.check()
    assert files(folder) == [".claim-x-1"]


def test_a_link_whose_answer_was_lost(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    link = os.link

    def twice(a: str, b: str, **more: int) -> None:
        link(a, b, src_dir_fd=more["src_dir_fd"], dst_dir_fd=more["dst_dir_fd"])
        link(a, b, src_dir_fd=more["src_dir_fd"], dst_dir_fd=more["dst_dir_fd"])

    monkeypatch.setattr(os, "link", twice)
    taken(folder).check()


@pytest.mark.parametrize("data", [b"", b"{", b"[]\n", b'{"token": 1, "host": "", "pid": "", "machine": ""}\n'])
def test_a_claim_that_cannot_be_read_has_a_holder(folder: Folder, clock: Clock, data: bytes) -> None:
    Path(folder.where, ".claim-x-7").write_bytes(data)
    with pytest.raises(OutputError, match="held by an unknown process"):
        taken(folder)
    taken(folder, over=wait)
    assert clock.now >= claims.SILENT
    assert files(folder) == [".claim-x-8"]


def test_a_link_is_not_followed(folder: Folder, tmp_path: Path) -> None:
    (tmp_path / "other").write_text("mine")
    (tmp_path / ".claim-x-1").symlink_to("other")
    with pytest.raises(OutputError, match="no part of the run made this"):
        taken(folder)
    assert (tmp_path / "other").read_text() == "mine"


def _large(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 27)


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, _large])
def test_what_is_no_claim_is_not_read(folder: Folder, tmp_path: Path, make: Callable[[Path], object]) -> None:
    make(tmp_path / ".claim-x-1")
    with pytest.raises(OutputError, match="no part of the run made this"):
        taken(folder)


@pytest.mark.parametrize("number", ["007", "0", "\N{ARABIC-INDIC DIGIT THREE}", "1\n"])
def test_other_spellings_of_a_number(folder: Folder, tmp_path: Path, number: str) -> None:
    """A name that no number gives would be looked for, and not found, for ever."""
    (tmp_path / f".claim-x-{number}").write_bytes(b"{}")
    taken(folder).release()
    assert not Claims(folder, "plan").all()


def test_holders_that_have_ended() -> None:
    assert not Holder("t", "h", 1, holder.machine()).is_gone()
    assert not Holder("t", "h", 2**22 + 1, "").is_gone()
    assert Holder("t", "h", 2**22 + 1, holder.machine()).is_gone()


def test_ctrl_c_while_it_begins_to_beat(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The claim can be let go."""
    claim = taken(folder)

    def interrupted(_thread: threading.Thread) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            claim.beat()
    claim.release()
    taken(folder).release()
