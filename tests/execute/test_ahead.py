"""Reading ahead of bytes on other machines: what arrives is right, is fetched once, and fits in memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from random import Random

import numpy as np
import pytest

from ckpttool.errors import AccessError, CorruptError
from ckpttool.execute.ahead import GAP, LEAST, SPARE, FarFile, ReadAhead
from ckpttool.execute.files import Stopped
from tests.execute.far import Far, far_away, place_of
from tests.helpers import memory

MIB = 1 << 20


@pytest.fixture
def far() -> Iterator[Far]:
    held = dict(memory.FILES)
    with far_away(Far()) as machine:
        yield machine
    memory.FILES.clear()
    memory.FILES.update(held)


def noise(nbytes: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(nbytes)


def read(ahead: ReadAhead, file: FarFile, start: int, *sizes: int) -> bytes:
    buffers = [bytearray(n) for n in sizes]
    ahead.read(file, start, [memoryview(b) for b in buffers])
    return b"".join(buffers)


def test_announced_bytes_are_fetched_once_in_long_requests(far: Far) -> None:
    data = noise(8 * MIB)
    file = FarFile(place_of("a", data))
    ahead = ReadAhead(4 * MIB, 3)
    told = ahead.announce([(file, 100, 8 * MIB - 100)])
    step = 50_000
    for at in range(100, 8 * MIB - 100, step):
        n = min(step, 8 * MIB - 100 - at)
        assert read(ahead, file, at, n // 3, n - n // 3) == data[at : at + n]
    ahead.forget(told)
    ahead.close()
    assert far.nbytes == 8 * MIB - 200
    assert len(far.requests) == -(-far.nbytes // ahead.request)
    assert far.opened == ["a"]
    assert ahead.peak <= 4 * MIB


def test_requests_go_on_at_the_same_time(far: Far) -> None:
    far.delay = 0.02
    data = noise(4 * MIB)
    file = FarFile(place_of("a", data))
    ahead = ReadAhead(4 * MIB, 8)
    ahead.announce([(file, 0, len(data))])
    assert read(ahead, file, 0, len(data)) == data
    ahead.close()
    assert far.at_once == 8


def test_ranges_that_nearly_touch_are_one_request(far: Far) -> None:
    data = noise(20 * MIB)
    file = FarFile(place_of("a", data))
    ahead = ReadAhead(64 * MIB, 3)
    starts = [0, 100_000, 100_000 + GAP, 3 * MIB, 10 * MIB]
    first = ahead.announce([(file, s, s + 1000) for s in starts[:3]])
    second = ahead.announce([(file, s, s + 1000) for s in starts[3:]])
    for s in starts:
        assert read(ahead, file, s, 1000) == data[s : s + 1000]
    assert sorted((r.start, r.nbytes) for r in far.requests) == [
        (0, starts[2] + 1000),
        (3 * MIB, 1000),
        (10 * MIB, 1000),
    ]
    ahead.forget(first)
    ahead.forget(second)
    ahead.close()


def test_tasks_that_follow_each_other_share_requests(far: Far) -> None:
    """Small tasks would be small requests."""
    data = noise(2 * MIB)
    file = FarFile(place_of("a", data))
    far.gate = threading.Event()
    ahead = ReadAhead(16 * MIB, 1)
    told = [ahead.announce([(file, i * 100_000, (i + 1) * 100_000)]) for i in range(20)]
    far.gate.set()
    for i in range(20):
        assert read(ahead, file, i * 100_000, 100_000) == data[i * 100_000 : (i + 1) * 100_000]
        ahead.forget(told[i])
    ahead.close()
    assert len(far.requests) <= 2
    assert far.nbytes == 2_000_000


def test_what_several_need_is_fetched_once(far: Far) -> None:
    far.delay = 0.01
    data = noise(MIB)
    file = FarFile(place_of("a", data))
    ahead = ReadAhead(8 * MIB, 4)
    told = [ahead.announce([(file, 0, MIB)]) for _ in range(3)]
    with ThreadPoolExecutor(6) as pool:
        assert set(pool.map(lambda _: read(ahead, file, 0, MIB), range(6))) == {data}
    for t in told:
        ahead.forget(t)
    ahead.close()
    assert far.nbytes == MIB


def test_reads_that_nobody_announced_are_read_ahead_when_they_go_on(far: Far) -> None:
    data = noise(8 * MIB)
    file = FarFile(place_of("a", data))
    ahead = ReadAhead(8 * MIB, 4)
    for at in range(0, 8 * MIB, 10_000):
        n = min(10_000, 8 * MIB - at)
        assert read(ahead, file, at, n) == data[at : at + n]
    ahead.close()
    assert far.nbytes <= 8 * MIB + 10_000
    assert len(far.requests) < 20


def test_reads_here_and_there_are_short_requests(far: Far) -> None:
    data = noise(MIB) * 32
    file = FarFile(place_of("a", data))
    ahead = ReadAhead(8 * MIB, 4)
    places = Random(0).sample(range(0, 32 * MIB - 100, MIB // 2), 40)  # noqa: S311 - nothing secret  # noqa: S311 - nothing secret
    for at in places:
        assert read(ahead, file, at, 100) == data[at : at + 100]
    ahead.close()
    assert far.nbytes <= 40 * LEAST
    assert ahead.peak <= 8 * MIB


def test_an_error_reaches_the_reads_that_need_it_and_no_others(far: Far) -> None:
    bad = 3 * MIB

    def fault(_name: str, start: int, nbytes: int) -> None:
        if start <= bad < start + nbytes:
            raise OSError(5, "the connection broke")

    far.fault = fault
    data = noise(8 * MIB)
    file = FarFile(place_of("a", data))
    ahead = ReadAhead(8 * MIB, 4)
    ahead.announce([(file, 0, 8 * MIB)])
    size = ahead.request
    for at in range(0, 8 * MIB, size):
        n = min(size, 8 * MIB - at)
        if at <= bad < at + n:
            with pytest.raises(OSError, match="the connection broke"):
                read(ahead, file, at, n)
        else:
            assert read(ahead, file, at, n) == data[at : at + n]
    far.fault = None
    assert read(ahead, file, bad, 100) == data[bad : bad + 100], "whoever asks later asks again"
    ahead.close()


def test_no_error_of_what_nobody_reads(far: Far) -> None:
    def fault(name: str, _start: int, _nbytes: int) -> None:
        if name == "b":
            raise AccessError("gone")

    far.fault = fault
    a, b = FarFile(place_of("a", b"x" * 1000)), FarFile(place_of("b", b"y" * 1000))
    ahead = ReadAhead(MIB, 2)
    told = ahead.announce([(b, 0, 1000), (a, 0, 1000)])
    assert read(ahead, a, 0, 1000) == b"x" * 1000
    ahead.forget(told)
    with pytest.raises(AccessError, match="gone"):
        read(ahead, b, 0, 1)
    ahead.close()


@pytest.mark.usefixtures("far")
@pytest.mark.parametrize("announced", [True, False])
def test_a_file_that_ends_early_is_an_error_where_it_ends(announced: bool) -> None:
    file = FarFile(place_of("a", noise(1000)))
    ahead = ReadAhead(MIB, 2)
    if announced:
        ahead.announce([(file, 0, 5000)])
    assert read(ahead, file, 0, 900) == noise(1000)[:900]
    with pytest.raises(CorruptError, match="shorter than its index says") as e:
        read(ahead, file, 900, 200)
    assert "the file has 1,000 bytes" in str(e.value.where)
    with pytest.raises(CorruptError, match="shorter than its index says"):
        read(ahead, file, 7000, 1)
    ahead.close()


@pytest.mark.usefixtures("far")
def test_an_answer_that_stops_in_the_middle_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of a known size whose bytes do not come."""
    file = FarFile(place_of("a", noise(1000)))
    monkeypatch.setattr(Far, "get", lambda _far, _file, _buffer, at: 0 if at else 100)
    ahead = ReadAhead(MIB, 2)
    with pytest.raises(CorruptError, match="shorter than its index says"):
        read(ahead, file, 0, 1000)
    ahead.close()


def test_waiting_ends_at_once(far: Far) -> None:
    far.gate = threading.Event()
    file = FarFile(place_of("a", noise(1000)))
    ahead = ReadAhead(MIB, 2)
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(read, ahead, file, 0, 10), pool.submit(read, ahead, file, 500, 10)]
        while not far.requests:
            time.sleep(0.001)
        ahead.close()
        began = time.monotonic()
        for w in waiting:
            with pytest.raises(Stopped):
                w.result()
        assert time.monotonic() - began < 5, "the answer comes after 10"
    file.close()
    assert far.closed == 0, "a request is on its way"
    far.gate.set()
    for _ in range(4000):
        if far.closed:
            break
        time.sleep(0.005)
    assert far.closed == 1
    with pytest.raises(Stopped):
        read(ahead, file, 0, 10)


@pytest.mark.usefixtures("far")
def test_more_readers_than_memory() -> None:
    """Lanes of many files at a time: nobody waits for memory, and little of it is used beside what is allowed."""
    lanes = [noise(MIB // 8, i) * 2 for i in range(40)]
    files = [FarFile(place_of(f"lane {i}", d)) for i, d in enumerate(lanes)]
    ahead = ReadAhead(MIB, 4)
    told = ahead.announce([(f, 0, MIB // 4) for f in files])
    for at in range(0, MIB // 4, 16 << 10):
        for f, data in zip(files, lanes, strict=True):
            assert read(ahead, f, at, 16 << 10) == data[at : at + (16 << 10)]
    ahead.forget(told)
    ahead.close()
    assert ahead.peak <= MIB + SPARE


@pytest.mark.parametrize("seed", [pytest.param(s, marks=[pytest.mark.thorough] if s else []) for s in range(40)])
def test_any_pattern(far: Far, seed: int) -> None:
    """Threads, some of whose reads were announced, in any order, twice or never; requests that fail or take long."""
    rng = Random(seed)  # noqa: S311 - nothing secret
    files = [FarFile(place_of(f"{seed}-{i}", noise(rng.choice([0, 5, 70_000, 3 * MIB]), i))) for i in range(5)]
    datas = [memory.FILES[f.place.at] for f in files]  # type: ignore[attr-defined]
    wrong = rng.random() < 0.5

    chance = Random(seed)  # noqa: S311 - nothing secret

    def fault(_name: str, start: int, _nbytes: int) -> None:
        dice = chance.random()
        if dice < 0.1:
            time.sleep(0.002)
        if wrong and start % 7 == 0 and dice > 0.8:
            raise OSError(104, "reset")

    far.fault = fault
    ahead = ReadAhead(rng.choice([0, 200_000, MIB, 8 * MIB]), rng.choice([1, 2, 7]))
    readers = 5
    failed = []

    def work(number: int) -> int:
        dice = Random(seed * 100 + number)  # noqa: S311 - nothing secret
        errors = 0
        for _ in range(12):
            ranges = []
            for _ in range(dice.randrange(1, 20)):
                i = dice.randrange(len(files))
                start = dice.randrange(len(datas[i]) + 1)
                ranges.append((i, start, min(len(datas[i]), start + dice.choice([1, 100, 40_000, 700_000]))))
            if dice.random() < 0.6:
                ranges.sort()
            told = [(files[i], a, b) for i, a, b in ranges if dice.random() < 0.8]
            heard = ahead.announce(told)
            for i, a, b in ranges:
                step = dice.choice([1 << 30, 3000])
                for at in range(a, min(b, a + 30 * step), step):
                    stop = min(b, at + step)
                    cut = dice.randrange(at, stop + 1)
                    try:
                        if read(ahead, files[i], at, cut - at, stop - cut) != datas[i][at:stop]:
                            failed.append((i, at, stop))
                    except OSError:
                        errors += 1
            ahead.forget(heard)
        return errors

    with ThreadPoolExecutor(readers) as pool:
        errors = sum([w.result(60) for w in [pool.submit(work, n) for n in range(readers)]])
    assert not failed
    assert wrong or not errors
    assert ahead.peak <= max(ahead.memory, 2 * LEAST) + readers * SPARE
    assert far.at_once <= ahead.connections
    ahead.close()
    assert not any(f.pieces for f in files)
